"""Algorithm 1 of Kim et al. 2024 (InferMax): a choice of groups, order and switches.

``watermark`` keeps that share of the KV capacity free when a request is admitted. With
``evicted_first`` an evicted request waits ahead of those that arrived later, instead of behind
all. The paper's text has neither. The simulator that it extends (Vidur) has both, with a watermark
of 0.01. The published effect of evictions is reproduced only with both
(docs/lab/infermax-analysis.md).
"""

from __future__ import annotations

from typing import NamedTuple

from optsched.policies import policy
from optsched.policies.base import Group, Order, Rules

TOKENS = 4096
"""C of all schedulers, and P of all but Sarathi (Kim et al. 2024, section 4.1 and Table 1)."""

PREFILL_FIRST: tuple[Group, ...] = ("waiting", "running")
DECODE_FIRST: tuple[Group, ...] = ("running_decode", "running_prefill", "waiting")


class _Options(NamedTuple):
    """The parameters that the user of a scheduler may choose."""

    eviction_free: bool
    max_running: int | None
    max_prefill_tokens: int
    watermark: float
    evicted_first: bool


def _rules(
    options: _Options,
    *,
    groups: tuple[Group, ...],
    hybrid: bool,
    chunked: bool = False,
    order: Order = "arrival",
) -> Rules:
    return Rules(
        order=order,
        groups=groups,
        requeue="order" if options.evicted_first or "all" in groups else "back",
        admission=(
            "reserve" if options.eviction_free else "protect" if options.watermark else "present"
        ),
        alpha=options.watermark,
        hybrid=hybrid,
        chunked=chunked,
        max_batch_tokens=TOKENS,
        max_prefill_tokens=options.max_prefill_tokens,
        max_running=options.max_running,
    )


def _table_1(
    name: str,
    summary: str,
    *,
    groups: tuple[Group, ...],
    hybrid: bool,
    chunked: bool = False,
    prefill_tokens: int = TOKENS,
) -> None:
    """Register a scheduler of Table 1; all of them take the same parameters."""

    @policy(name, summary, paper="Kim et al. 2024, Table 1")
    def make(
        *,
        eviction_free: bool = False,
        max_running: int | None = None,
        max_prefill_tokens: int = prefill_tokens,
        watermark: float = 0.0,
        evicted_first: bool = False,
    ) -> Rules:
        options = _Options(eviction_free, max_running, max_prefill_tokens, watermark, evicted_first)
        return _rules(options, groups=groups, hybrid=hybrid, chunked=chunked)


def _ranking(name: str, summary: str, *, order: Order, clairvoyant: bool = False) -> None:
    """Register a ranking of appendix A.3 with one group, hybrid batches and no chunking.

    The last requests in the order are evicted first, and wait at their place in it. That there is
    no chunking is our choice.
    """

    @policy(name, summary, clairvoyant=clairvoyant, paper="Kim et al. 2024, appendix A.3")
    def make(
        *,
        eviction_free: bool = False,
        max_running: int | None = None,
        max_prefill_tokens: int = TOKENS,
        watermark: float = 0.0,
    ) -> Rules:
        options = _Options(eviction_free, max_running, max_prefill_tokens, watermark, True)
        return _rules(options, groups=("all",), hybrid=True, order=order)


_table_1(
    "vllm", "prefill first, no hybrid batches, no chunking", groups=PREFILL_FIRST, hybrid=False
)
_table_1("vllm-hy", "prefill first, hybrid batches, no chunking", groups=PREFILL_FIRST, hybrid=True)
_table_1(
    "sarathi",
    "decode first, hybrid batches, chunked prefill",
    groups=DECODE_FIRST,
    hybrid=True,
    chunked=True,
    prefill_tokens=512,
)
_table_1("sarathi-pc", "sarathi with P = C = 4096", groups=DECODE_FIRST, hybrid=True, chunked=True)
_table_1(
    "sarathi-nocp", "decode first, hybrid batches, no chunking", groups=DECODE_FIRST, hybrid=True
)
_table_1(
    "sarathi-nohy",
    "decode first, no hybrid batches, no chunking",
    groups=DECODE_FIRST,
    hybrid=False,
)

_ranking("rank-org", "one line of all requests by arrival", order="arrival")
_ranking("rank-input", "one line of all requests, smallest prompt first", order="prompt")
_ranking(
    "rank-output",
    "one line of all requests, smallest predicted output first",
    order="output",
    clairvoyant=True,
)
