"""Highest response ratio next, by the prefill that a request asks for."""

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.programs import in_chunks


@policy(
    "hrrn",
    "largest ratio of the time that a request has waited to its prefill",
    paper="SGLang pull request 32911",
)
def hrrn(*, max_running: int | None = None, max_batch_tokens: int = 2048) -> Rules:
    """Return rules that sort the queue before every batch (docs/policies/discussed.md).

    SGLang counts only the tokens that are not cached; `vllm-v1` with ``policy=hrrn`` does so.
    """
    return in_chunks("ratio", max_running, max_batch_tokens)
