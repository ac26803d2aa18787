"""Algorithm 1 of InferMax (003): vLLM and Sarathi as choices of groups and switches."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Rules

TOKENS = 4096
"""C of all of them, and P of all but Sarathi (003, section 4.1 and Table 1)."""


@policy("vllm", "prefill first, no hybrid batches, no chunking", paper="003, Table 1")
def vllm(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """Groups: waiting, running. Evicts only for running candidates."""
    return Rules(
        groups=("waiting", "running"),
        requeue="back",
        admission="reserve" if eviction_free else "present",
        hybrid=False,
        max_batch_tokens=TOKENS,
        max_prefill_tokens=max_prefill_tokens,
        max_running=max_running,
    )


@policy("sarathi", "decode first, hybrid batches, chunked prefill", paper="003, Table 1")
def sarathi(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = 512
) -> Rules:
    """Groups: running decodes, running prefills, waiting. Evicts for decode candidates."""
    return Rules(
        groups=("running_decode", "running_prefill", "waiting"),
        requeue="back",
        admission="reserve" if eviction_free else "present",
        chunked=True,
        max_batch_tokens=TOKENS,
        max_prefill_tokens=max_prefill_tokens,
        max_running=max_running,
    )
