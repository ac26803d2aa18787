"""Schedulers that decide once per window of tokens, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from optsched.policies.runner import Job, Runner, too_long, waiting_rank
from optsched.problem.columns import MAX_TOKENS
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode, Schedule
from optsched.workloads.predict import estimates, forecast_of

MAX_WORKERS = 10_000
"""Max workers of `Windows`."""


@dataclass(frozen=True)
class Windows(Runner):
    """A scheduler that decides once per window of tokens, as data (004, Algorithm 1).

    A request goes to the worker with the fewest unfinished requests when it arrives (ties: the
    lowest number) and stays there. Whenever a worker is free, the first of its requests by
    ``order`` form a batch, as many as ``batch_size`` and the KV capacity allow, and run until
    each has produced ``window`` tokens or one has finished; then the worker decides again.

    Parameters
    ----------
    order : {"arrival", "remaining", "total"}
        Ascending order of a worker's requests (ties: arrival, index): arrival, predicted tokens
        left (`optsched.problem.forecast.tokens_left`), or predicted output. It does not change
        within a window.
    window : int
        K, tokens.
    batch_size : int
        Most requests of a batch.
    workers : int
        Each with the instance's KV capacity and limits.
    aging : float
        Tokens by which a request moves forward in the order per second (or round) since its
        arrival, against starvation: on its worker a request is never passed by one that arrives
        more than (the most tokens ever predicted of it) / aging after it. 0: none.

    Notes
    -----
    What the paper leaves to vLLM 0.5: the prefills of a batch come first, in batches of their
    own, unsplit; a request that leaves the batch between windows keeps its KV, and loses it, to
    be recomputed, only when a batch lacks room: those outside the batch first, the last by
    ``order`` before others. A request whose input does not fit beside those chosen ends the
    choice. Prefill counts as one token of the window. In rounds, where an eviction loses the
    tokens produced, a request is still ranked by what it was last predicted.
    """

    order: Literal["arrival", "remaining", "total"] = "remaining"
    window: int = 50
    batch_size: int = 4
    workers: int = 1
    aging: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ("arrival", "remaining", "total"):
            raise InputError(f"order: {self.order!r}; arrival, remaining or total is right")
        most = {"window": MAX_TOKENS, "batch_size": MAX_TOKENS, "workers": MAX_WORKERS}
        for name, limit in most.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise InputError(f"{name}: {value!r}; an integer from 1 to {limit} is right")
        if not (isinstance(self.aging, (int, float)) and 0 <= self.aging < float("inf")):
            raise InputError(f"aging: {self.aging!r}; a number of tokens >= 0 is right")

    @property
    def uses_predictions(self) -> bool:
        """Whether decisions depend on predicted output lengths."""
        return self.order != "arrival"

    def run(self, job: Job) -> Schedule:
        """See `Runner.run`; the loop is `optsched.policies.engine.windows`."""
        from optsched.policies.engine import common, windows as loop

        instance = job.instance
        mode: EvictMode = "restart" if instance.in_rounds else "recompute"
        forecast = forecast_of(instance)
        predicted, _ = estimates(instance)
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["total"] = predicted
        requests["place"] = waiting_rank("arrival", instance, predicted, job.cost)
        for name in ("left", "right", "previous", "next", "member"):
            requests[name] = -1
        machines = np.zeros(self.workers, dtype=loop.WORKER)
        machines["until"] = np.inf
        for name in ("queue", "holder", "member"):
            machines[name] = -1
        state = common.new_state(loop.STATE_FIELDS, instance)
        limits = common.limits_of(instance, mode)
        settings = loop.Settings(
            limits,
            int(forecast.every),
            loop.ORDERS[self.order],
            self.window,
            float(self.aging),
            min(instance.n, self.batch_size, limits.max_batch_tokens, limits.max_running),
        )
        columns = loop.run(
            requests, machines, state, settings, job.cost.array,
            forecast.offsets, forecast.remaining, common.new_columns(instance),
        )  # fmt: skip
        return common.schedule_of(
            job, mode, requests, state, columns, split=False, workers=self.workers
        )

    def uses_lengths(self, instance: Instance) -> bool:
        """Whether the order is by predicted lengths."""
        return self.uses_predictions

    def allows(self, instance: Instance) -> str | None:
        """Return which prompt is too long: windows split no prefill."""
        return too_long(instance)
