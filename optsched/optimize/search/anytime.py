"""Bound and schedule of an instance in rounds, at any scale and any time limit.

The order of work is: the bounds that take no search (`optsched.bounds.lower_bound`), a serial
placement, the Lagrangian dual, and placements along its soft-min mean starts. The
large-neighbourhood search takes the rest of the time. Whenever the work is stopped, there is a
valid bound and a feasible schedule.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optsched.bounds import lower_bound
from optsched.bounds.ascent import raise_dual
from optsched.bounds.certificate import make_certificate
from optsched.bounds.dual import Prices, dual_value
from optsched.bounds.leaves import prices_leaf
from optsched.bounds.timeline import Floats, Ints, model_of
from optsched.optimize.formulations.rounds.horizon import RoundData, place, search_data
from optsched.optimize.search.lns import Search
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, from_starts

# The max share of the time limit for the dual.
_DUAL_SHARE = 0.35
_BASE_STEPS, _STEPS_PER_REQUEST = 20_000, 8_000


@dataclass(eq=False)
class Found:
    """The best bound and schedule that a search has found so far, and its limits.

    `bound`, from `origin`, is on the total latency `objective` of `starts` (shape (n,), in the
    instance's time). `proved` is the dual value of `prices`, which a certificate can carry, and -1
    before there is one. Seconds are those until the first bound, and in all. `steps` are those of
    the large-neighbourhood search, and the work ends at `gap`, a part of the objective.
    """

    instance: Instance
    budget: Budget
    gap: float = 0.0
    bound: int = 0
    origin: str = ""
    starts: Ints | None = None
    objective: int | None = None
    prices: Prices = field(default_factory=lambda: Prices(np.array([1]), np.array([0]), 1))
    proved: int = -1
    first_bound_s: float = 0.0
    search_s: float = 0.0
    steps: int = 0

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of `starts`. None without starts."""
        return None if self.starts is None else from_starts(self.starts, self.instance)

    def certificate(self) -> dict[str, Any]:
        """Return a certificate of `proved`, or of optimality if the schedule reaches it."""
        # The certificate holds the schedule only if that is optimal.
        optimal = self.objective == self.proved
        return make_certificate(
            self.instance,
            prices_leaf(self.prices),
            value=self.proved,
            denominator=self.prices.denominator,
            schedule=self.schedule if optimal else None,
        )

    def over(self, share: float = 1.0, certify: bool = False) -> bool:
        """Whether the budget, or a share of its time, is used up, or the gap is small enough.

        With ``certify`` the gap is that of the bound which a certificate can carry.
        """
        if self.budget.stopped:
            return True

        bound = self.proved if certify else self.bound
        if self.objective is not None and self.objective - bound <= self.gap * self.objective:
            return True

        return self.budget.spent_s >= share * self.budget.limit_s

    def keep_bound(self, value: int, origin: str) -> None:
        """Keep a bound if it is the largest so far."""
        if value > self.bound or not self.origin:
            self.bound, self.origin = value, origin
            self.budget.tell(incumbent=self.objective, bound=self.bound)

    def keep_prices(self, prices: Prices) -> None:
        """Keep prices if they prove more than the present ones."""
        value = dual_value(self.instance, prices)
        if value > self.proved:
            self.prices, self.proved = prices, value
            self.keep_bound(value, "dual")

    def keep_schedule(self, objective: int, starts: Ints) -> None:
        """Keep a schedule, given by starts in the instance's time, if it is the best so far."""
        if self.objective is None or objective < self.objective:
            self.starts, self.objective = starts.copy(), objective
            self.budget.tell(incumbent=self.objective, bound=self.bound)


def explore(
    instance: Instance,
    budget: Budget | None = None,
    *,
    max_steps: int | None = None,
    gap: float = 0.0,
    seed: int = 0,
    search: bool = True,
    certify: bool = False,
    warm_start: Schedule | None = None,
) -> Found:
    """Bound the total latency of an instance in rounds, and look for a schedule close to it.

    `instance`: in rounds. With limits on batches the bound is valid, but no schedule is looked for.
    `budget`: its callback receives the progress whenever bound or schedule improve. Without a time
    limit the outcome depends on the seed alone.
    `max_steps`: the max number of steps of the large-neighbourhood search. Default: 20,000 and
    another 8,000 per request.
    `gap`: the work ends once bound and value are apart by at most this part of the value.
    `search`: whether to look for schedules at all.
    `certify`: whether to raise the dual, for a certificate, even if another bound has met the
    schedule.
    `warm_start`: a schedule to begin with, which counts if it is given by starts.
    """
    if not instance.in_rounds:
        raise UsageError("bound: found an instance in seconds; expected one in rounds for the dual")
    if max_steps is None:
        max_steps = _BASE_STEPS + _STEPS_PER_REQUEST * instance.n

    found = Found(instance, Budget() if budget is None else budget, gap)
    value, origin = lower_bound(instance)
    if value is not None and origin is not None:
        found.keep_bound(int(value), origin)

    found.first_bound_s = found.budget.spent_s
    data = _searchable(instance) if search else None
    # A schedule of batches has no starts, so the search could not go on from it.
    if warm_start is not None and warm_start.starts is not None:
        total = int((warm_start.starts + instance.output_tokens - instance.release_times).sum())
        found.keep_schedule(total, warm_start.starts)

    if data is not None:
        _place(found, data, None)

    model, means = model_of(instance), None
    # Without prices the dual is the sum of outputs, which every certificate can carry.
    found.keep_prices(found.prices)
    if not found.over(1.0, certify):
        # Without a search all of the time goes to the dual.
        share = _DUAL_SHARE if data is not None else 1.0
        means = raise_dual(model, over=lambda: found.over(share, certify), report=found.keep_prices)

    if data is not None and not found.over():
        # Means count in the model's units, and the orders add them to outputs in rounds.
        if means is not None and model.unit == 1:
            _place(found, data, means)

        found.steps = _improve(found, data, seed, max_steps)

    found.search_s = found.budget.spent_s
    return found


def _searchable(instance: Instance) -> RoundData | None:
    """Return what the searches need of an instance, or None if it has what they ignore."""
    try:
        return search_data(instance)
    except OptschedError:
        return None


def orders(data: RoundData, means: Floats | None = None) -> list[Ints]:
    """Return orders in which requests may be placed, each an array of requests' numbers.

    Without `means` they are by volume and by arrival. Else they are by the soft-min mean starts of
    the dual, by mean completions, and in between.
    """
    index, volume = np.arange(data.instance.n), data.instance.volume
    if means is None:
        both = (data.arrival, volume), (volume, data.arrival)  # the last key comes first
        return [np.lexsort((index, *keys)) for keys in both]

    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return [np.lexsort((index, means + share * data.output)) for share in shares]


def _place(found: Found, data: RoundData, means: Floats | None) -> None:
    """Place the requests in each order, and keep the best schedule."""
    for order in orders(data, means):
        # One order is placed in any case, so that there is a schedule.
        if found.starts is not None and found.over():
            return

        # The search counts from the first arrival, and `shift` leads to the instance's time.
        starts = place(data, order)
        found.keep_schedule(data.tel(starts), starts + data.shift)


def _improve(found: Found, data: RoundData, seed: int, max_steps: int) -> int:
    """Search from the best schedule until a limit. Return the number of steps made.

    The search's starts plus `data.shift` are those of the instance.
    """
    assert found.starts is not None
    search = Search(data, found.starts - data.shift, seed=seed)

    def keep() -> None:
        found.keep_schedule(search.best_value, search.best + data.shift)

    search.anneal(found.budget, max_steps, found.over, keep)
    return search.steps
