"""The scheduler of vLLM since its version 1 engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from optsched.policies import policy as register
from optsched.policies.runner import Job, Runner, Workers, attained, no_room_for_drafts, order_key
from optsched.problem.columns import check_choice, check_whole
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates

Priority = Literal[
    "arrival", "prompt", "output", "total", "volume", "work", "session", "attained"
]  # fmt: skip
"""The orders that ``policy="priority"`` may serve by, as `Rules` has them."""

# Who is admitted first: vLLM's two policies, and those of SGLang that go by what is cached.
Queue = Literal["fcfs", "priority", "lpm", "shortest-prefill-first", "hrrn"]

# Which idle block of the prefix cache is taken away first.
Eviction = Literal["lru", "next-use", "ttl"]

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2048
"""What a server of vLLM 0.32 takes on an A100 or a smaller GPU."""

LOWEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "prefill_schedule_interval": 1,
}


@register("vllm-v1", "vLLM's version 1 engine: running requests first, prefills in chunks")
@dataclass(kw_only=True, eq=False)
class VllmV1(Runner):
    """The scheduler of vLLM's version 1 engine, as it is in vLLM 0.32 (docs/policies/vllm-v1.md).

    Its code was compared batch by batch with that of vLLM (docs/lab/vllm-conformance.md), on
    instances with ``"cached"`` accounting and without limits. Limits of an instance hold beside
    the scheduler's own. vLLM has no maximum of prefill tokens; prefills beyond it are cut. Where
    phases are kept apart, the first request of a step decides its phase. Where prefills are not
    split, an input that is longer than ``max_num_batched_tokens`` runs alone; vLLM refuses such
    settings, and those with fewer tokens than seats.
    """

    evict_mode: ClassVar[EvictMode] = "recompute"
    hybrid: ClassVar[bool] = True  # unless the instance forbids it, as below
    chunked: ClassVar[bool] = True
    drafts: ClassVar[bool] = True

    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    prefill_schedule_interval: int = 1
    policy: Queue = "fcfs"
    priority: Priority = "arrival"
    prefix_caching: bool = True
    eviction: Eviction = "lru"
    ttl: float = 0.0
    merge_blocks: bool = False

    def __post_init__(self) -> None:
        for name, low in LOWEST.items():
            check_whole(getattr(self, name), name, low)

        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark: found {self.watermark!r}; expected 0 <= watermark < 1")
        for name, names in (("policy", Queue), ("priority", Priority), ("eviction", Eviction)):
            check_choice(getattr(self, name), name, get_args(names))

        if self.policy != "priority" and self.priority != "arrival":
            raise InputError(f"priority: found {self.priority!r}; expected it with policy=priority")

        if (self.ttl > 0) != (self.eviction == "ttl") or not 0 <= self.ttl < math.inf:
            expected = "a finite number > 0, as in vllm-v1:eviction=ttl,ttl=512"
            if self.eviction != "ttl":
                expected = "it with eviction=ttl, for which alone it is"
            raise InputError(
                f"ttl: found {self.ttl!r} with eviction={self.eviction}; expected {expected}"
            )

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`. The loop is in `optsched.policies.engine.vllm_v1`."""
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import blocks, common, vllm_v1 as loop

        instance = job.instance
        mode: EvictMode = "restart" if instance.in_rounds else self.evict_mode
        limits = limits_of(instance, mode, instance.drafts)
        caching = self.prefix_caching and instance.prefixes is not None
        fields = loop.CACHE_FIELDS if caching else loop.REQUEST_FIELDS
        requests = common.new_requests(instance, fields)
        predicted, _ = estimates(instance)
        requests["order"] = order_key(self.priority, instance, predicted, job.cost)
        # The watermark is a share of the blocks, with the one that vLLM keeps empty.
        all_blocks = instance.kv_capacity // instance.kv_block_tokens + 1
        limits = limits._replace(max_running=min(limits.max_running, self.max_num_seqs))
        state = common.new_state(loop.STATE_FIELDS, instance)
        state["budget"] = min(limits.max_batch_tokens, self.max_num_batched_tokens)
        # A prefill that may not be split cannot be cut at the threshold.
        state["long_prefill"] = self.long_prefill_token_threshold if limits.chunked else 0
        state["watermark"] = int(self.watermark * all_blocks) * instance.kv_block_tokens
        state["reserve"] = self.scheduler_reserve_full_isl
        state["interval"] = self.prefill_schedule_interval
        state["order"] = get_args(Queue).index(self.policy)
        caches: Sequence[blocks.Store] = [None]  # nothing is cached, for all workers
        if caching:
            kept = (limits.max_running, (self.eviction, self.ttl))
            caches = blocks.caches_of(instance, requests, state, workers, *kept, self.merge_blocks)

        def released(request: int, at: float) -> None:
            """Write the work that the session had attained when a request was released."""
            if self.priority == "attained":
                requests["order"][request] = attained(job, requests, request, at)[0]

        run = common.Loop(loop.run, [(cache,) for cache in caches], released)
        return common.Compiled(job, requests, state, limits, run, workers)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`."""
        needs_arrivals = self.eviction == "next-use" and instance.prefixes is not None
        return needs_arrivals or self.priority in ("output", "total", "volume", "work")

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. Next uses need all arrivals."""
        if self.eviction == "next-use" and instance.sessions is not None:
            return "eviction=next-use needs all arrivals in advance, and requests come after others"

        return no_room_for_drafts(instance)

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """See `Runner.switched_off`. Orders and evictions by what is cached need prefixes."""
        orders = ("lpm", "shortest-prefill-first")
        needs_prefixes = self.policy in orders or self.eviction != "lru"
        if instance.prefixes is not None or not needs_prefixes:
            return super().switched_off(instance)

        what = f"policy={self.policy} and eviction={self.eviction}"
        note = f"the instance shares no prefixes, so that {what} see nothing cached"
        return (*super().switched_off(instance), note)
