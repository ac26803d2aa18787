"""Algorithm 1 of Kim et al. 2024 (InferMax): a choice of groups, order and switches.

``watermark``, a share of KV kept free at admission, and ``evicted_first`` are not in the text, but
in the simulator that it extends (Vidur). Only both give the published effect of evictions
(docs/lab/infermax-analysis.md).
"""

from dataclasses import replace
from typing import Any

from optsched.policies import policy
from optsched.policies.base import Group, Rules
from optsched.policies.rules import Admission

TOKENS = 4096
"""C of all schedulers, and P of all but Sarathi (Kim et al. 2024, section 4.1 and Table 1)."""

DECODE_FIRST: tuple[Group, ...] = ("running_decode", "running_prefill", "waiting")
VLLM = Rules(groups=("waiting", "running"), requeue="back", max_batch_tokens=TOKENS)
SARATHI = replace(VLLM, groups=DECODE_FIRST, chunked=True)
LINE = replace(VLLM, groups=("all",), requeue="order")


def _made(rules: Rules, eviction_free: bool, watermark: float, **fields: Any) -> Rules:
    admission: Admission = "reserve" if eviction_free else "protect" if watermark else "present"
    return replace(rules, admission=admission, alpha=watermark, **fields)


def _table_1(name: str, summary: str, rules: Rules, prefill_tokens: int = TOKENS) -> None:
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
        limits = {"max_running": max_running, "max_prefill_tokens": max_prefill_tokens}
        requeue = "order" if evicted_first else "back"
        return _made(rules, eviction_free, watermark, requeue=requeue, **limits)


def _ranking(name: str, summary: str, rules: Rules, clairvoyant: bool = False) -> None:
    """Register a ranking of appendix A.3: one group, hybrid batches, no chunks (our choice)."""

    @policy(name, summary, clairvoyant=clairvoyant, paper="Kim et al. 2024, appendix A.3")
    def make(
        *,
        eviction_free: bool = False,
        max_running: int | None = None,
        max_prefill_tokens: int = TOKENS,
        watermark: float = 0.0,
    ) -> Rules:
        limits = {"max_running": max_running, "max_prefill_tokens": max_prefill_tokens}
        return _made(rules, eviction_free, watermark, **limits)


_table_1("vllm", "prefill first, no hybrid batches, no chunking", replace(VLLM, hybrid=False))
_table_1("vllm-hy", "prefill first, hybrid batches, no chunking", VLLM)
_table_1("sarathi", "decode first, hybrid batches, chunked prefill", SARATHI, prefill_tokens=512)
_table_1("sarathi-pc", "sarathi with P = C = 4096", SARATHI)
WHOLE = replace(SARATHI, chunked=False)
_table_1("sarathi-nocp", "decode first, hybrid batches, no chunking", WHOLE)
SPLIT_PHASES = replace(WHOLE, hybrid=False)
_table_1("sarathi-nohy", "decode first, no hybrid batches, no chunking", SPLIT_PHASES)

BY_PROMPT, BY_OUTPUT = replace(LINE, order="prompt"), replace(LINE, order="output")
_ranking("rank-org", "one line of all requests by arrival", LINE)
_ranking("rank-input", "one line of all requests, smallest prompt first", BY_PROMPT)
_ranking(
    "rank-output", "one line of all requests, smallest predicted output first", BY_OUTPUT, True
)
