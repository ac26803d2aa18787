"""Requests in the order of their arrival, less a boost for those that need little."""

from optsched.policies import policy
from optsched.policies.base import Rules
from optsched.policies.programs import in_chunks


@policy(
    "uniboost",
    "by arrival less a boost for short prefills: between first come and shortest first",
    paper="Li et al. 2026, abstract and project page",
)
def uniboost(
    *, gamma: float = 1.0, max_running: int | None = None, max_batch_tokens: int = 2048
) -> Rules:
    """Return rules that admit by boosted arrival (docs/policies/discussed.md).

    `gamma`: per second (in rounds: per token-round), > 0. Small ones serve the shortest prefill
    first, large ones the first that came.
    """
    return in_chunks("boost", max_running, max_batch_tokens, gamma=gamma)
