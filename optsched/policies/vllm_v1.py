"""The scheduler of vLLM since its version 1 engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.policies import policy as register
from optsched.policies.rules import Rules
from optsched.policies.runner import Fleet, Job, Runner, order_key, too_long, waiting_rank
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates

if TYPE_CHECKING:  # the loop is loaded by those who run it
    from optsched.judge.life import Ints, Records
    from optsched.policies.engine.common import Columns

Priority = Literal["arrival", "prompt", "output", "total", "volume", "work"]
"""The orders that ``policy="priority"`` may serve by, as `Rules` has them."""

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

    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    prefill_schedule_interval: int = 1
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority: Priority = "arrival"

    def __post_init__(self) -> None:
        for name, low in LOWEST.items():
            if getattr(self, name) < low:
                raise InputError(
                    f"{name}: found {getattr(self, name)!r}; expected an integer >= {low}"
                )

        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark: found {self.watermark!r}; expected 0 <= watermark < 1")
        if self.policy not in ("fcfs", "priority"):
            raise InputError(f"policy: found {self.policy!r}; expected fcfs or priority")

        wrong = f"priority: found {self.priority!r}; expected"
        if self.priority not in get_args(Priority):
            raise InputError(f"{wrong} one of {', '.join(get_args(Priority))}")
        if self.policy == "fcfs" and self.priority != "arrival":
            raise InputError(f"{wrong} it with policy=priority")

    def begin(self, job: Job, workers: int) -> Fleet:
        """See `Runner.begin`. The loop is in `optsched.policies.engine.vllm_v1`."""
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, vllm_v1 as loop

        instance = job.instance
        mode: EvictMode = "restart" if instance.in_rounds else self.evict_mode
        limits = limits_of(instance, mode)
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        predicted, _ = estimates(instance)
        requests["order"] = order_key(self.priority, instance, predicted, job.cost)
        # vLLM counts the blocks with the one that it keeps empty.
        blocks = instance.kv_capacity // instance.kv_block_tokens + 1
        settings = loop.Settings(
            limits._replace(max_running=min(limits.max_running, self.max_num_seqs)),
            float(instance.clock_origin),
            min(limits.max_batch_tokens, self.max_num_batched_tokens),
            self.long_prefill_token_threshold if limits.chunked else 0,
            int(self.watermark * blocks) * instance.kv_block_tokens,
            self.scheduler_reserve_full_isl,
            self.prefill_schedule_interval,
            self.policy == "priority",
        )
        lines = np.empty((workers, 2, instance.n + 1), dtype=np.int64)

        def step(w: int, state: Records, queue: Ints, columns: Columns, until: float) -> Columns:
            work = (job.cost.array, queue, columns, lines[w], until)
            return loop.run(requests, state, settings, *work)

        states = [common.new_state(loop.STATE_FIELDS, instance) for _ in range(workers)]
        return common.Compiled(job, mode, requests, states, step, limits.chunked)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`."""
        return self.priority in ("output", "total", "volume", "work")

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. A prompt may be too long unless prefills are split."""
        return too_long(instance) if instance.chunked_prefill is False else None

    def towards(self, target: Rules, instance: Instance) -> tuple[Runner, Runner] | None:
        """See `Rules.towards`. With another admission it is rules with the engine's batches."""
        if target.order not in get_args(Priority):
            return None

        seats, tokens = self.max_num_seqs, self.max_num_batched_tokens
        batches = replace(target, groups=("running", "waiting"), gate=math.inf, chunked=True)
        batches = replace(batches, piece=math.inf, cheap=False, max_running=seats)
        return (
            replace(self, policy="priority", priority=cast("Priority", target.order)),
            replace(batches, max_batch_tokens=tokens),
        )

    def waiting_rank(self, instance: Instance, cost: CostModel) -> NDArray[np.int64]:
        """See `Runner.waiting_rank`. The places are by true lengths."""
        return waiting_rank(self.priority, instance, instance.output_tokens, cost)
