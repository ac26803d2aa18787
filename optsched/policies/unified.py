"""Algorithm 1 of InferMax (003): a scheduler is a choice of groups, order and switches.

``watermark`` keeps that share of the KV capacity free when a request is admitted, and
``evicted_first`` lets an evicted request wait ahead of those that arrived later instead of behind
all. The paper's text has neither; the simulator that it extends (Vidur) has both, with 0.01, and
the published effect of evictions is reproduced with them alone (docs/infermax-analysis.md).
"""

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
    watermark: float,
    evicted_first: bool,
    *,
    groups: tuple[Group, ...],
    hybrid: bool,
    chunked: bool = False,
    order: Order = "arrival",
) -> Rules:
    return Rules(
        order=order,
        groups=groups,
        requeue="order" if evicted_first or "all" in groups else "back",
        admission="reserve" if eviction_free else "protect" if watermark else "present",
        alpha=watermark,
        hybrid=hybrid,
        chunked=chunked,
        max_batch_tokens=TOKENS,
        max_prefill_tokens=max_prefill_tokens,
        max_running=max_running,
    )


@policy("vllm", "prefill first, no hybrid batches, no chunking", paper="003, Table 1")
def vllm(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """Groups: waiting, running. Evicts only for running candidates."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=PREFILL_FIRST, hybrid=False)


@policy("vllm-hy", "prefill first, hybrid batches, no chunking", paper="003, Table 1")
def vllm_hy(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """As vLLM, with decodes beside the prefills."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=PREFILL_FIRST, hybrid=True)


@policy("sarathi", "decode first, hybrid batches, chunked prefill", paper="003, Table 1")
def sarathi(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = 512,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """Groups: running decodes, running prefills, waiting. Evicts for decode candidates."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=DECODE_FIRST, hybrid=True, chunked=True)


@policy("sarathi-pc", "sarathi with P = C = 4096", paper="003, Table 1")
def sarathi_pc(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """As Sarathi, with as many prefill tokens as the batch holds."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=DECODE_FIRST, hybrid=True, chunked=True)


@policy("sarathi-nocp", "decode first, hybrid batches, no chunking", paper="003, Table 1")
def sarathi_nocp(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """As Sarathi with P = C, whole prompts only."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=DECODE_FIRST, hybrid=True)


@policy("sarathi-nohy", "decode first, no hybrid batches, no chunking", paper="003, Table 1")
def sarathi_nohy(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
    evicted_first: bool = False,
) -> Rules:
    """Prefills only when no request decodes."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, evicted_first
    return _rules(*options, groups=DECODE_FIRST, hybrid=False)


@policy("rank-org", "one line of all requests by arrival", paper="003, A.3")
def rank_org(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
) -> Rules:
    """Waiting and running requests in one group; hybrid batches, no chunking (ours)."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, True
    return _rules(*options, groups=("all",), hybrid=True)


@policy("rank-input", "one line of all requests, smallest prompt first", paper="003, A.3")
def rank_input(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
) -> Rules:
    """As `rank_org`, ordered by prompt tokens: the largest prompts are evicted first."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, True
    return _rules(*options, groups=("all",), hybrid=True, order="prompt")


@policy(
    "rank-output",
    "one line of all requests, smallest predicted output first",
    clairvoyant=True,
    paper="003, A.3",
)
def rank_output(
    *,
    eviction_free: bool = False,
    max_running: int | None = None,
    max_prefill_tokens: int = TOKENS,
    watermark: float = 0.0,
) -> Rules:
    """As `rank_org`, ordered by predicted output tokens: the largest are evicted first."""
    options = eviction_free, max_running, max_prefill_tokens, watermark, True
    return _rules(*options, groups=("all",), hybrid=True, order="output")
