"""Schedulers that decide once per window of tokens, as data."""

from dataclasses import dataclass
from typing import Literal

from optsched.policies.runner import Job, Runner, Workers, too_long
from optsched.problem.columns import MAX_TOKENS, check_whole
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates, forecast_of


@dataclass(frozen=True)
class Windows(Runner):
    """A scheduler that decides once per window of tokens (Choi et al. 2025, Algorithm 1).

    Whenever a worker is free, the first of its requests by
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

    moves = False
    order: Literal["arrival", "remaining", "total"] = "remaining"
    window: int = 50
    batch_size: int = 4
    aging: float = 0.0

    def __post_init__(self) -> None:
        if self.order not in ("arrival", "remaining", "total"):
            raise InputError(f"order: found {self.order!r}; expected arrival, remaining or total")

        for name in ("window", "batch_size"):
            check_whole(getattr(self, name), name, 1, MAX_TOKENS)

        if not (isinstance(self.aging, (int, float)) and 0 <= self.aging < float("inf")):
            raise InputError(f"aging: found {self.aging!r}; expected a number of tokens >= 0")

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`. The loop is in `optsched.policies.engine.windows`."""
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, windows as loop

        instance = job.instance
        mode: EvictMode = "restart" if instance.in_rounds else "recompute"
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["total"] = estimates(instance)[0]
        limits = limits_of(instance, mode)._replace(chunked=False)
        forecast = forecast_of(instance)
        # `every`: tokens between predictions.
        every, order = int(forecast.every), loop.ORDERS[self.order]
        # In a batch of decodes each takes a token, and each holds KV.
        size = min(self.batch_size, limits.max_batch_tokens, limits.max_running)
        forecast_arrays = forecast.offsets, forecast.remaining
        settings = loop.Settings(
            every, *forecast_arrays, order, self.window, float(self.aging), size
        )
        state = common.new_state(loop.STATE_FIELDS, instance)
        run = common.Loop(loop.run, [(settings,)])
        return common.Compiled(job, requests, state, limits, run, workers)

    def uses_lengths(self, instance: Instance) -> bool:
        """See `Runner.uses_lengths`. The answer is whether the order is by predicted lengths."""
        return self.order != "arrival"

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`. No prefill is split, so a prompt may be too long (`too_long`)."""
        return too_long(instance)
