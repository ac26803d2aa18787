"""Schedulers that decide once per window of tokens, as data."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from optsched.policies.runner import Job, Runner, too_long
from optsched.policies.workers import joined
from optsched.problem.columns import MAX_TOKENS, check_whole
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode, Schedule
from optsched.workloads.predict import estimates, forecast_of


@dataclass(frozen=True)
class Windows(Runner):
    """A scheduler that decides once per window of tokens (Choi et al. 2025, Algorithm 1).

    A request goes to the worker with the fewest unfinished requests when it arrives (ties: the
    lowest number) and stays there. Whenever a worker is free, the first of its requests by
    ``order`` form a batch, as many as ``batch_size`` and the KV capacity allow. They run until
    each has produced ``window`` tokens or one has finished. Then the worker decides again.

    Parameters
    ----------
    order : {"arrival", "remaining", "total"}
        What a worker's requests are sorted by, ascending (ties: arrival, index): arrival,
        predicted tokens left (`optsched.problem.forecast.tokens_left`), or predicted output. The
        order does not change within a window.
    window : int
        K, in tokens, from 1 to `MAX_TOKENS`.
    batch_size : int
        Max requests of a batch.
    aging : float
        Tokens by which a request moves forward in the order per second (or round) since its
        arrival, >= 0. It prevents starvation: let m be the max tokens ever predicted for a
        request; on its worker it is never passed by one that arrives more than m / aging later.

    Notes
    -----
    The paper leaves these points to vLLM 0.5. The prefills of a batch come first, unsplit, in
    batches of their own. A request that leaves the batch between windows keeps its KV. It loses
    it, to be recomputed, only when a batch lacks room. Requests outside the batch lose theirs
    first, and among them the last by ``order``. A request whose input does not fit beside those
    chosen ends the choice. A prefill counts as one token of the window. In rounds, where an
    eviction loses the tokens produced, a request is still ranked by its latest prediction.
    """

    balances = True
    order: Literal["arrival", "remaining", "total"] = "remaining"
    window: int = 50
    batch_size: int = 4
    aging: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ("arrival", "remaining", "total"):
            raise InputError(f"order: found {self.order!r}; expected arrival, remaining or total")

        largest = {"window": MAX_TOKENS, "batch_size": MAX_TOKENS}
        for name, limit in largest.items():
            check_whole(getattr(self, name), name, 1, limit)

        if not (isinstance(self.aging, (int, float)) and 0 <= self.aging < float("inf")):
            raise InputError(f"aging: found {self.aging!r}; expected a number of tokens >= 0")

    def run(self, job: Job) -> Schedule:
        """See `Runner.run`. The loop is in `optsched.policies.engine.windows`."""
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, windows as loop

        instance = job.instance
        mode: EvictMode = "restart" if instance.in_rounds else "recompute"
        forecast = forecast_of(instance)
        predicted, _ = estimates(instance)
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["total"], requests["place"] = predicted, requests["seq"]

        machines = np.zeros(job.workers, dtype=loop.WORKER)
        machines["until"] = np.inf
        # A request goes to the worker of the fewest, so none ever has more than its share and one.
        share = instance.n // job.workers + 2
        lines = np.empty((job.workers, 4, share), dtype=np.int64)
        state = common.new_state(loop.STATE_FIELDS, instance)
        limits = limits_of(instance, mode)
        settings = loop.Settings(
            limits,
            job.cost.array,
            int(forecast.every),
            forecast.offsets,
            forecast.remaining,
            loop.ORDERS[self.order],
            self.window,
            float(self.aging),
            min(share, self.batch_size, limits.max_batch_tokens, limits.max_running),
        )
        columns = common.new_columns(instance)

        def run() -> None:
            nonlocal columns
            columns = loop.run(requests, machines, state, settings, columns, lines)

        common.in_turns(job, state, run)
        part = common.part_of(job, requests, state, columns, split=False)
        worker = columns.batches["worker"][: len(part.start)].copy()
        return replace(joined(job, mode, [part]), worker=worker if job.workers > 1 else None)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`. The answer is whether the order is by predicted lengths."""
        return self.order != "arrival"

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. No prefill is split, so a prompt may be too long (`too_long`)."""
        if instance.after is not None:
            return "requests are released when others end, and the policy runs whole windows"

        return too_long(instance)
