"""Upper bounds on how many requests can be within their SLOs, by prices of machine time.

docs/formulations.md, "Prices within SLOs", has the notation and the proof, and
`optsched.bounds.checker.slo_prices` the bound. Here prices are found, and raised until they prove
something; what they prove is what the checker says.

*Program.* The prices are multipliers of a linear program: x_i is the share of request i that is in
time, p_if that of its prefill in a fine cell f, z_ik that of its steps in a coarse cell k, and J_k
the part of the cell that the fixed costs of batches that decode take. Maximize the sum of x_i
subject to ``x_i <= sum p_if``, ``x_i <= sum z_ik``, ``sum v_i p_if <= length`` in fine cells,
``sum v_i p_if + sum W_i z_ik + J_k length <= length`` in coarse ones, and ``m_i fixed z_ik <= J_k
length``, since a request takes one step a batch. The multiplier of the last row is what a step pays
of the fixed cost. This counts mean steps, which is not valid where steps differ; the checker's
inequality (*) is. Here v_i is the work of i's prefill, W_i that of its m_i steps, and fixed what a
batch that decodes takes beside own work. Prices are raised until (*) holds, which loses next to
nothing, as a step of work w is paid ``extra + rate w`` where ``rate`` is the mean price of the
cells in which the request pays for fixed costs.

*Rates.* The method looks for the least factor of all work at which too few are in time, and goes on
with the smallest one so far. At the rate r of windows, that factor proves it for all rates from
factor times r to r. The next interval ends where this one begins.

*Rounds.* Nothing is fixed there, and every limit on a round is a machine of its own
(`optsched.bounds.service`): prompts in windows of first tokens, and the rest in whole ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import (
    CHARGES,
    IN_ROUNDS,
    MINORANTS,
    WORKERS,
    Bound,
    BoundTask,
    Proof,
    of_table,
)
from optsched.bounds.batch import PROVED_FOR, requests_of, with_rates
from optsched.bounds.checker.class_work import Floors
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.prefixes import Charge, charges_of
from optsched.bounds.checker.requests import ticks_since
from optsched.bounds.checker.slo_prices import (
    ALL,
    NEVER,
    Demand,
    Prices,
    at_all_rates,
    charge,
    demand_of,
    max_in_time,
    rounding,
    works_by_class,
    works_of,
)
from optsched.bounds.class_work import within_slos
from optsched.bounds.leaves import TICKS_PER_SECOND, slo_prices_leaf
from optsched.bounds.service import count_in_windows, loads, shortest_span
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits

Floats = NDArray[np.float64]

# The first cells are so much coarser than the last ones.
_COARSER = 5
# After how many looks without a gain of so much the method ends.
_PATIENCE, _GAIN = 3, 3e-4
# Where no more than so many may be late, stretches are looked for so often.
_FEW, _ROUNDS = 200, 4
# The least factor of work that one interval of rates has.
_LEAST = 0.8
# The factor from which on an interval is so short that finer cells are tried.
_NEAR = 0.985
_SAFETY = 1e-9
# By how much a rate is raised for what rounding loses.
_MARGINS = (1e-7, 1e-5, 1e-3)


class Found(NamedTuple):
    """Prices, and how many they leave in time if all work is multiplied by `work`.

    ``place`` is where the method ended (`optsched.bounds.slo_method.Place`).
    """

    prices: Prices
    most: int
    work: float
    place: Any


class Interval(NamedTuple):
    """Rates from `low` to `high`, or all from `low` on, and how many prices leave in time there."""

    low: float
    high: float
    prices: Prices | None
    most: int


def _exact(rate: float) -> Fraction:
    """Return what the shortest decimal of a rate says, which is what a certificate states."""
    return Fraction(repr(float(rate)))


class Ask:
    """How many requests are within their SLOs on so many workers, in seconds, at any rate.

    `limits`: every SLO as a column. `charged`: as of a `BoundTask`. `floors`: what tokens pay by
    class of batch, instead of what they cost by a linear model, which `cost` is then not.
    """

    def __init__(
        self,
        instance: Instance,
        cost: CostModel,
        limits: Mapping[str, Floats],
        workers: int = 1,
        charged: Sequence[Charge] | None = None,
        floors: Floors | None = None,
    ) -> None:
        release = instance.release_times.tolist()
        self.release, self.n = release, instance.n
        self.limits = {name: column.tolist() for name, column in limits.items()}
        # Where the method ended last, and how much coarser than the last ones its cells are.
        self.workers, self.place, self.coarser = workers, None, _COARSER
        self.bound = SHARE if floors is None else SHARE_BY_CLASS  # of which its answers are
        if floors is not None:
            self.works = works_by_class(instance, floors, TICKS_PER_SECOND)
            return

        assert isinstance(cost, BatchCost)
        # SLOs count from each arrival, so users share what they pay within no time at all: 0.
        charged = charged or charges_of(instance, ticks_since(release, TICKS_PER_SECOND), 0)
        rates, requests = requests_of(instance, cost, charged)
        # The base of a batch is part of what batches that decode are paid for, so the work of a
        # prefill has no share of it: only one of ``prefill_base``.
        alone = replace(rates, cost={**rates.cost, "base": 0})
        firsts = [r.own + r.share for r in with_rates(alone, instance, charged)]
        self.works = works_of(rates, requests, firsts, TICKS_PER_SECOND)

    def demand(self, rate: float = 1.0, work: Fraction = ALL, onwards: bool = False) -> Demand:
        """Return what requests do at a rate: those that can be in time if they are alone.

        `work`: what their times alone are multiplied by. `onwards`: what they do at all rates from
        this one on.
        """
        exact, ticks = _exact(rate), TICKS_PER_SECOND
        since = ticks_since(self.release, ticks, exact)
        # `scale_arrivals` of `optsched.analysis.capacity_question` rounds arrivals, but not at the
        # instance's own rate.
        apart = 0 if rate == work == 1 else rounding(self.release, exact * work, ticks)
        found = demand_of(self.works, self.limits, since, ticks, self.workers, work, apart)
        return at_all_rates(found, ticks, apart) if onwards else found

    def onwards(self, rate: float, need: int, budget: Budget) -> Interval | None:
        """Return all rates from a rate on if fewer are in time there than needed, else None.

        Work alone says first whether prices may prove it. All windows begin at the first arrival
        there, and end as they do at the rate (`at_all_rates`).
        """
        demand = self.demand(rate, onwards=True)
        for end, work in (
            (demand.first, demand.prefill),
            (demand.last, demand.prefill + demand.early + demand.later),
        ):
            fits = count_in_windows(
                demand.begin.astype(float), end.astype(float), work.astype(float), demand.room
            )
            if fits < need:
                break
        else:  # neither prefills nor all work exclude it
            return None

        found = find(demand, self.n, need, budget)
        most = self.n if found is None else max_in_time(demand, found.prices)
        return Interval(rate, inf, found.prices, most) if found and most < need else None

    def between(self, need: int, budget: Budget, low: float = 1.0, high: float = 1.0) -> Interval:
        """Return how many can be in time at most at any rate between two, with prices.

        It ends once these are fewer than needed.
        """
        # Windows at the highest rate, and all work times the quotient, hold for all rates between
        # (`optsched.bounds.checker.slo_prices`, Intervals of rates).
        work = _exact(low) / _exact(high)
        demand = self.demand(high, work)
        found = find(demand, self.n, need, budget, work=float(work))
        if found is None:
            return Interval(low, high, None, len(demand.who))

        return Interval(low, high, found.prices, max_in_time(demand, found.prices, work))

    def below(self, high: float, need: int, budget: Budget) -> Interval | None:
        """Return rates up to one at which fewer are in time than needed; None if it finds none.

        The method goes on where the last one has ended, with finer cells once it gains little. Its
        factor of work is about right, so rates from a little higher on are tried, too.
        """
        demand = self.demand(high, Fraction(_LEAST))
        # Arrivals at this rate, times the rate, are those at the rate 1: the clock of all rates.
        asked: dict[str, Any] = {"least": _LEAST, "start": self.place, "clock": high}
        found = find(demand, self.n, need, budget, **asked, cells=(self.coarser,))
        if self.coarser > 1 and (found is None or found.work > _NEAR):
            self.coarser = 1
            asked["start"] = found and found.place
            found = find(demand, self.n, need, budget, **asked, cells=(1,))
        if found is None:
            return None

        self.place = found.place
        for margin in _MARGINS:
            low = high * found.work * (1 + margin)
            work = _exact(low) / _exact(high)
            # An interval without any rates proves nothing, and ``need`` stands for that.
            most = max_in_time(self.demand(high, work), found.prices, work) if low < high else need
            if most < need:
                return Interval(low, high, found.prices, most)

        return None


def find(
    demand: Demand,
    n: int,
    need: int,
    budget: Budget,
    *,
    least: float = 1.0,
    work: float = 1.0,
    start: Any = None,
    clock: float = 1.0,
    cells: Sequence[int] = (_COARSER, 1),
) -> Found | None:
    """Return prices that leave fewer of n requests in time than needed, or as few as they can.

    The first prices are looked for even without time.

    `work`: the factor of all work. `least`: below 1, a factor is looked for at which fewer are in
    time than needed, from `work` down to this one; with 1 `work` is kept. `start`: where the method
    begins. `clock`: what ticks are multiplied by on a clock that all rates share.
    `cells`: how many times coarser than the last ones cells are, one after another.
    """
    from optsched.bounds.slo_method import Method

    # The value is the count, with a share of the next request, or the factor of work: the least is
    # the best.
    found, value = None, inf
    # Nobody can be in time even alone.
    if not len(demand.who):
        return None

    for fewer in cells:
        method = Method(demand, n, fewer, start, clock)
        # Stretches are looked for on the finest cells only, once prices alone gain no more: the
        # first time is without them.
        for again in range(_ROUNDS + 1 if fewer == 1 else 1):
            if again and (n - need > _FEW or not method.look_for_stretches()):
                break

            idle = 0  # looks without a gain
            while idle < _PATIENCE and not (found and budget.over):
                method.climb(work)
                prices = method.prices()
                try:
                    most, now, factor = method.count(prices, *charge(demand, prices), need, least)
                except Rejected:  # prices that would have to be too high
                    idle += 1
                    continue

                # The method goes on at the smallest factor so far (module's text, Rates).
                if least < 1:
                    now, work = factor, max(min(work, factor), least)

                idle = idle + 1 if now > value * (1 - _GAIN) else 0
                if now < value:
                    value, found = now, Found(prices, most, work, method.place)
                # The count is small enough, or the factor as small as it may be.
                if (least == 1 and most < need) or least == work < 1:
                    return found

        start = method.place

    return found


def demands_of(task: BoundTask) -> list[Demand]:
    """Return what requests in time do; in rounds for every limit."""
    instance, limits = task.instance, all_limits(task.instance, None)
    if not instance.in_rounds:
        return [Ask(instance, task.batch_cost, limits, task.workers, task.charged).demand()]

    who, first, last, amounts = loads(instance, limits)
    begin, none = instance.release[who].astype(np.int64), np.zeros(len(who), np.int64)
    # No step has a fixed cost in rounds, so all later work is ``early``, work without a cadence.
    # Ends are integers, and `NEVER` stands for none: those of first tokens, and of the last ones.
    one, all_ = (begin + np.minimum(x, NEVER).astype(np.int64) for x in (first, last))
    # Behind ``early``: no ``later``, ``steps``, ``low`` and ``high``, and 0 ``fixed`` and ``bits``.
    return [
        Demand(
            who, begin, one, all_, prefill, early, none, none, none, none, 0, 0, room, exact=True
        )
        for prefill, early, room in amounts
    ]


def most_in_time(
    task: BoundTask, budget: Budget, need: int = 0, demands: list[Demand] | None = None
) -> tuple[int, Any]:
    """Return how many can be in time at most, and prices that prove it, or None if none are found.

    For each demand the search ends once fewer are in time than needed. `demands`: by default those
    of `demands_of`.
    """
    most, best = task.instance.n, None
    demands = demands or demands_of(task)
    for place, demand in enumerate(demands):
        found = find(demand, task.instance.n, need, budget.part(1 / (len(demands) - place)))
        left = len(demand.who) if found is None else max_in_time(demand, found.prices)
        # The first prices are kept even if they prove nothing, as a certificate needs some.
        if left < most or best is None:
            most, best = left, found and found.prices

    return most, best


def within(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on SLO attainment, or on goodput: over the shortest possible span.

    Certificates are of attainment in seconds only.
    """
    instance = task.instance
    most, prices = most_in_time(task, budget)
    if task.goal.name != "slo_attainment":
        return Proof(most / shortest_span(task))

    tree = None
    if prices is not None and not instance.in_rounds:
        tree = slo_prices_leaf(prices, all_limits(instance, None))

    return Proof(most / instance.n, tree=tree)


def by_class(task: BoundTask, budget: Budget) -> Proof:
    """Return the same by what requests cost by class of batch length, under a tabulated model."""
    instance, limits = task.instance, all_limits(task.instance, None)
    found = within_slos(task, budget)
    if found is None:
        return Proof(1.0 if task.goal.name == "slo_attainment" else inf)

    leaf, floors = found
    ask = Ask(instance, task.cost_model, limits, task.workers, floors=floors)
    demand = ask.demand()
    most, prices = most_in_time(task, budget, demands=[demand])
    if task.goal.name != "slo_attainment":
        latest = (instance.release + ask.works.chain / TICKS_PER_SECOND * (1 - _SAFETY)).max()
        return Proof(most / float(latest) if latest > 0 else inf)

    if prices is None:
        return Proof(most / instance.n)

    tree = {**slo_prices_leaf(prices, limits), "classes": leaf["classes"]}
    return Proof(most / instance.n, tree=tree)


_WORDS = "prices of machine time, with a fixed cost for every batch that decodes"
_VOLUME = "prices of what rounds hold, for prompts and whole requests"
_PROVED = PROVED_FOR | WORKERS | CHARGES
_GOALS = ("slo_attainment", "slo_goodput")
SHARE = Bound("slo-prices", _WORDS, "second", _GOALS[:1], within, _PROVED, True, certifies=True)
RATE = Bound("slo-prices-rate", _WORDS, "second", _GOALS[1:], within, _PROVED, True)
_BY_CLASS = "prices of machine time, with charges by batch length"
TABLES = PROVED_FOR | WORKERS | MINORANTS
SHARE_BY_CLASS = Bound(
    "slo-classes",
    _BY_CLASS,
    "second",
    _GOALS[:1],
    by_class,
    TABLES,
    searches=True,
    certifies=True,
    suits=of_table,
    weight=4.0,
)
RATE_BY_CLASS = replace(
    SHARE_BY_CLASS, name="slo-classes-rate", objectives=_GOALS[1:], certifies=False
)
IN_ROUND = Bound("slo-round-prices", _VOLUME, "round", _GOALS, within, IN_ROUNDS, True)
