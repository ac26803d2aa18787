"""Algorithm 1 of InferMax (003): a scheduler is a choice of groups, order and switches."""

from __future__ import annotations

from optsched.policies import policy
from optsched.policies.base import Group, Order, Rules

TOKENS = 4096
"""C of all of them, and P of all but Sarathi (003, section 4.1 and Table 1)."""

PREFILL_FIRST: tuple[Group, ...] = ("waiting", "running")
DECODE_FIRST: tuple[Group, ...] = ("running_decode", "running_prefill", "waiting")


def _rules(
    eviction_free: bool,
    max_running: int | None,
    max_prefill_tokens: int,
    *,
    groups: tuple[Group, ...],
    hybrid: bool,
    chunked: bool = False,
    order: Order = "arrival",
) -> Rules:
    return Rules(
        order=order,
        groups=groups,
        requeue="order" if "all" in groups else "back",
        admission="reserve" if eviction_free else "present",
        hybrid=hybrid,
        chunked=chunked,
        max_batch_tokens=TOKENS,
        max_prefill_tokens=max_prefill_tokens,
        max_running=max_running,
    )


@policy("vllm", "prefill first, no hybrid batches, no chunking", paper="003, Table 1")
def vllm(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """Groups: waiting, running. Evicts only for running candidates."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=PREFILL_FIRST, hybrid=False)


@policy("vllm-hy", "prefill first, hybrid batches, no chunking", paper="003, Table 1")
def vllm_hy(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """As vLLM, with decodes beside the prefills."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=PREFILL_FIRST, hybrid=True)


@policy("sarathi", "decode first, hybrid batches, chunked prefill", paper="003, Table 1")
def sarathi(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = 512
) -> Rules:
    """Groups: running decodes, running prefills, waiting. Evicts for decode candidates."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=DECODE_FIRST, hybrid=True, chunked=True)


@policy("sarathi-pc", "sarathi with P = C = 4096", paper="003, Table 1")
def sarathi_pc(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """As Sarathi, with as many prefill tokens as the batch holds."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=DECODE_FIRST, hybrid=True, chunked=True)


@policy("sarathi-nocp", "decode first, hybrid batches, no chunking", paper="003, Table 1")
def sarathi_nocp(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """As Sarathi with P = C, whole prompts only."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=DECODE_FIRST, hybrid=True)


@policy("sarathi-nohy", "decode first, no hybrid batches, no chunking", paper="003, Table 1")
def sarathi_nohy(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """Prefills only when no request decodes."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=DECODE_FIRST, hybrid=False)


@policy("rank-org", "one line of all requests by arrival", paper="003, A.3")
def rank_org(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """Waiting and running requests in one group; hybrid batches, no chunking (ours)."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=("all",), hybrid=True)


@policy("rank-input", "one line of all requests, smallest prompt first", paper="003, A.3")
def rank_input(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """As `rank_org`, ordered by prompt tokens: the largest prompts are evicted first."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=("all",), hybrid=True, order="prompt")


@policy(
    "rank-output",
    "one line of all requests, smallest predicted output first",
    clairvoyant=True,
    paper="003, A.3",
)
def rank_output(
    *, eviction_free: bool = False, max_running: int | None = None, max_prefill_tokens: int = TOKENS
) -> Rules:
    """As `rank_org`, ordered by predicted output tokens: the largest are evicted first."""
    limits = eviction_free, max_running, max_prefill_tokens
    return _rules(*limits, groups=("all",), hybrid=True, order="output")
