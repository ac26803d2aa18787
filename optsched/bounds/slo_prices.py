"""Upper bounds on how many requests can be within their SLOs, by prices of machine time.

docs/formulations.md, "Prices within SLOs", has the notation and the proof, and
`optsched.bounds.checker.slo_prices` the bound. Here prices are found, and raised until they prove
something; what they prove is what the checker says.

*Program.* The prices are multipliers of a linear program: x_i is the share of request i that is in
time, p_if that of its prefill's work in a fine cell f, z_ik that of its steps in a coarse cell k,
and J_k the part of the cell that the fixed costs of batches that decode take. Maximize the sum of
x_i subject to ``x_i <= sum p_if``, ``x_i <= sum z_ik``, ``sum v_i p_if <= length`` for fine cells,
``sum v_i p_if + sum W_i z_ik + J_k length <= length`` for coarse ones, and ``m_i fixed z_ik <=
J_k length``: a request takes one step a batch. The multiplier of the last row is what a step pays
of the fixed cost. This counts mean steps, which is not valid for steps that differ; the checker's
inequality (*) is, and prices are raised until it holds, which loses next to nothing: a step of
work w is paid ``extra + rate w``, where ``rate`` is the mean price of the cells in which the
request pays for fixed costs.

*Rates.* If all work is multiplied by a factor, so is all that is paid. So the least factor at which
too few are in time is known for all prices: what there is room for, over the sum of the smallest
payments. The method goes on with the smallest factor so far.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.batch import requests_of, with_rates
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.prefixes import Charge
from optsched.bounds.checker.requests import ticks_since
from optsched.bounds.checker.slo_prices import (
    NEVER,
    PART_BITS,
    PRICE_BITS,
    Demand,
    Prices,
    Works,
    crossed,
    demand_of,
    inside,
    most_paid,
    paid,
    works_of,
)
from optsched.bounds.leaves import TICKS_PER_SECOND
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Shares of steps for each request, and in all at most; a first, coarser level has fewer.
_SHARES, _MOST, _COARSER = 120, 300_000, 5
# Fine cells for each window of a median prefill, at most.
_FINE = 50
# Steps between looks at what is proved, and after how many without a gain of so much it ends.
_STEPS, _PATIENCE, _GAIN = 150, 3, 3e-4
_WEIGHT = 1.5
# What factors of work are rounded up by, and the least number to divide by.
_UP, _TINY, _LITTLE = 1e-9, 1e-30, 1e-9
# Where no more than so many may be late, stretches are looked for so often, so many at a time, and
# of at most so many median windows.
_FEW, _ROUNDS, _MORE, _LONGEST = 200, 4, 40, 20


class Place(NamedTuple):
    """Where the method ended, from which it can go on with other cells or at another rate.

    ``coarse`` and ``fine`` are edges of cells on a clock that all rates share.
    """

    program: Any
    state: Any
    who: Ints
    coarse: Floats
    fine: Floats


class Found(NamedTuple):
    """Prices, and how many they leave in time; all work is multiplied by `work`."""

    prices: Prices
    most: int
    work: float
    place: Place


def works_in_ticks(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None
) -> Works:
    """Return what requests do."""
    rates, requests = requests_of(instance, cost, charged)
    alone = replace(rates, cost={**rates.cost, "base": 0})  # only the shares of ``prefill_base``
    firsts = [r.own + r.share for r in with_rates(alone, instance, charged)]
    return works_of(rates, requests, firsts, TICKS_PER_SECOND)


def find(
    demand: Demand,
    n: int,
    need: int,
    budget: Budget,
    *,
    least: float = 1.0,
    start: Place | None = None,
    clock: float = 1.0,
) -> Found | None:
    """Return prices that leave less than `need` of n requests in time, or as few as they can.

    `least`: the least factor of work at which `need` may be too many; 1: work is as it is. `start`:
    where it begins. `clock`: what ticks are multiplied by on the clock that all rates share.
    """
    found, value, work = None, float("inf"), 1.0
    levels = [(_SHARES, r) for r in range(_ROUNDS + 1)]
    if start is None:
        levels = [(_SHARES // _COARSER, 0), *levels]

    method = None
    for shares, extra in levels:
        if extra == 0:
            method = _Method(demand, n, shares, start, clock)
        elif n - need > _FEW or not method.look_for_stretches():
            break

        idle = 0
        while idle < _PATIENCE and not (found and budget.over):
            method.climb(work)
            prices = method.prices()
            try:
                payments, room = paid(demand, prices)
            except Rejected:
                break

            most, now, factor = method.counted(prices, payments, room, need, least)
            if least < 1:
                now = factor
                if factor < work:
                    work = max(factor, least)

            idle = idle + 1 if now > value * (1 - _GAIN) else 0
            if now < value:
                value, found = now, Found(prices, most, work, method.place)
            if least == 1 and most < need or least == work < 1:
                return found

        start = method.place

    return found


class _Method:
    """The first-order method on one set of cells."""

    def __init__(
        self, demand: Demand, n: int, shares: int, start: Place | None, clock: float
    ) -> None:
        from optsched.bounds import slo_kernel

        self.kernel, self.demand, self.n = slo_kernel, demand, n
        self.coarse, self.fine = _edges(demand, min(shares * len(demand.who), _MOST))
        self.program, self.work = _program(demand, self.coarse, self.fine), 1.0
        self.sums = self.kernel.sums_of(self.program)
        edges = self.coarse * clock, self.fine * clock
        self.state = _state(self.program, demand.who, edges, start)
        self.place = Place(self.program, self.state, demand.who, *edges)
        self.stretches: list[tuple[int, int]] = []
        self.members: list[tuple[Ints, Floats]] = []

    def look_for_stretches(self) -> bool:
        """Add stretches whose parts of requests that are late are too few; return if there are."""
        demand, state = self.demand, self.state
        early, late = demand.first < NEVER // 2, (demand.last < NEVER // 2) & (demand.later > 0)
        owner = np.concatenate([np.flatnonzero(early), np.flatnonzero(late)])
        begin = demand.begin[owner]
        end = np.concatenate([demand.first[early], demand.last[late]])
        work = np.concatenate([demand.prefill[early], demand.later[late]]) * self.work
        order = np.lexsort((end, begin))
        columns = (x[order] for x in (begin, end, work, 1.0 - state.x[owner]))
        longest = int(_LONGEST * np.median(end - begin))
        until, least = self.kernel.crowded(*columns, float(demand.room), longest)
        chosen = [i for i in np.argsort(least)[:_MORE].tolist() if least[i] < 0.98]
        kept = [
            one for one, m in zip(self.stretches, state.stretch.tolist(), strict=True) if m > 0
        ]
        multipliers = state.stretch[state.stretch > 0]
        since = begin[order]
        new = [x for x in {(int(since[i]), int(until[i])) for i in chosen} if x not in kept]
        self.stretches = [*kept, *new]
        self.members = []
        for stretch in self.stretches:
            who, amount = inside(demand, *stretch)
            self.members.append((who, np.array(amount, np.float64)))

        self.state = state._replace(stretch=np.append(multipliers, np.zeros(len(new))))
        self._fill()
        return bool(new)

    def _fill(self) -> None:
        """Set the rows of stretches at the present work."""
        parts = [self._parts(k, self.work) for k in range(len(self.stretches))]
        at = np.append(0, np.cumsum([len(x) for x in parts])).astype(np.int64)
        whose = [who for who, _ in self.members]
        self.program = self.program._replace(
            whose_at=at,
            whose=np.concatenate([*whose, np.zeros(0, np.int64)]),
            part=np.concatenate([*parts, np.zeros(0)]),
        )
        self.sums = self.kernel.sums_of(self.program)
        self.place = self.place._replace(program=self.program, state=self.state)

    def _parts(self, k: int, work: float) -> Floats:
        (begin, end), (_, amount) = self.stretches[k], self.members[k]
        excess = float(amount.sum()) * work - self.demand.room * (end - begin)
        if excess <= 1e-9 * float(amount.sum()):
            return np.zeros(len(amount))

        return np.minimum(amount * work, excess) / excess

    def counted(
        self, prices: Prices, payments: list[int], room: int, need: int, least: float
    ) -> tuple[int, float, float]:
        """Return how many fit, with the share of the next, and the work at which fewer do.

        All are about right; the checker's number is the exact one.
        """
        unit = room + sum(m << PART_BITS for *_, m in prices.stretches) + 1
        own = np.array([x / unit for x in payments])
        weights = [(m << PART_BITS) / unit for *_, m in prices.stretches]

        def left(work: float) -> tuple[Floats, float]:
            total, more = own * work, room / unit
            for k, weight in enumerate(weights):
                part = self._parts(k, work)
                if weight > 0 and part.any():
                    total[self.members[k][0]] += weight * part
                    more += weight * (float(part.sum()) - 1.0)

            return np.sort(total), more

        ascending, more = left(self.work)
        fits = np.cumsum(ascending)
        most = int(np.searchsorted(fits, more, side="right"))
        before = fits[most - 1] if most else 0.0
        share = (more - before) / ascending[most] if most < len(own) else 0.0
        if least == 1 or len(own) < need:
            return most, most + share, self.work if least == 1 else 0.0

        low, high = least, 2.0
        while high - low > _UP * high:
            middle = (low + high) / 2
            ascending, more = left(middle)
            low, high = (low, middle) if ascending[:need].sum() > more else (middle, high)

        return most, most + share, high

    def climb(self, work: float) -> None:
        """Go on with all work multiplied by a factor."""
        if work != self.work:
            light, later, fixed = (x * (work / self.work) for x in self.program[:3])
            self.program = self.program._replace(light=light, later=later, fixed=fixed)
            self.work = work
            self._fill()

        self.kernel.ascend(self.program, self.state, self.sums, _WEIGHT, _STEPS)

    def prices(self) -> Prices:
        """Return the prices of the multipliers, raised until no cell's requests pay too much."""
        demand, program, state = self.demand, self.program, self.state
        coarse = state.price / program.coarse
        fine = coarse[program.up] + state.burst / program.fine
        many = np.diff(program.z_at)
        owner = np.repeat(np.arange(len(many)), many)
        cell = np.arange(len(owner)) + np.repeat(program.z_first - program.z_at[:-1], many)

        # A step pays its part of ``steps``; of this ``rate`` for work, and the rest is its extra.
        steps = np.maximum(demand.steps, 1)
        each, work = state.steps / steps, np.maximum(program.later, _TINY) / steps
        shared, weighted = (
            np.bincount(owner, part, len(many)) for part in (state.cadence, state.cadence * coarse[cell])
        )
        rate = np.minimum(each / work, weighted / np.maximum(shared, _TINY))
        rate = np.where(shared > _TINY, rate, each / work)
        extra = np.maximum(each - rate * work, 0.0)
        unit = 2.0 ** (PRICE_BITS - 1) / max(float(fine.max()), float(rate.max()), _LITTLE)
        whole = np.rint(fine * unit).astype(np.int64), np.floor(rate * unit).astype(np.int64)
        ticks = TICKS_PER_SECOND * demand.room / self.work / 2.0**demand.bits
        extras = np.floor(np.minimum(extra * unit * ticks, 2.0**59)).astype(np.int64)
        some = demand.paced & (demand.steps > 0) & ((whole[1] > 0) | (extras > 0))
        cells = crossed(self.fine, demand.begin[some], demand.last[some])
        columns = (x[some] for x in (whole[1], extras, demand.low, demand.high))
        price = self.kernel.raised(whole[0], demand.fixed, *cells, *columns)
        rates, more = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        rates[demand.who], more[demand.who] = whole[1], extras

        one = unit * TICKS_PER_SECOND * demand.room / self.work / 2.0**PART_BITS
        multipliers = [int(m * one) for m in state.stretch.tolist()]
        stretches = [(*x, m) for x, m in zip(self.stretches, multipliers, strict=True)]
        return Prices(self.fine, price, rates, more, stretches)


def _edges(demand: Demand, shares: int) -> tuple[Ints, Ints]:
    """Return the edges of coarse cells, and of fine ones, which are cut at windows of prefills."""
    begin, first = demand.begin, demand.first
    early, late = first < NEVER // 2, (demand.last < NEVER // 2) & (demand.steps > 0)
    low = int(begin.min())
    high = max(int(begin.max()) + 1, *(int(x.max(initial=0)) for x in (first[early], demand.last[late])))
    windows = float((demand.last - begin)[late].sum()) or float(high - low)
    cells = max(1, min(round(shares * (high - low) / windows), shares))
    coarse = np.unique(np.linspace(low, high, cells + 1).round().astype(np.int64))
    apart = int(np.median((first - begin)[early])) // _FINE + 1 if early.any() else high
    cuts = np.unique(np.concatenate([begin, first[early]]))
    kept = _apart(cuts, coarse, apart)

    return coarse, np.union1d(coarse, kept)


def _apart(cuts: Ints, others: Ints, apart: int) -> Ints:
    """Return cuts that are so far from one another, and from the others."""
    at = np.searchsorted(others, cuts)
    left, right = others[np.maximum(at - 1, 0)], others[np.minimum(at, len(others) - 1)]
    kept: list[int] = []
    for cut in cuts[(cuts - left >= apart) & (right - cuts >= apart)].tolist():
        if not kept or cut - kept[-1] >= apart:
            kept.append(cut)

    return np.array(kept, np.int64)


def _program(demand: Demand, coarse: Ints, fine: Ints) -> Any:
    from optsched.bounds.slo_kernel import Program

    early = (demand.first < NEVER // 2) & (demand.prefill > 0)
    late = (demand.last < NEVER // 2) & (demand.steps > 0)
    at = []
    for edges, end, some in ((coarse, demand.last, late), (fine, demand.first, early)):
        first, behind = crossed(edges, demand.begin, end)
        at += [np.append(0, np.cumsum(np.where(some, behind - first, 0))), first]

    unit = float(TICKS_PER_SECOND * demand.room)
    fixed = np.where(demand.paced, demand.steps * float(demand.fixed << demand.bits), 0.0)
    works = demand.prefill / unit, demand.later / unit, fixed / unit
    up = np.searchsorted(coarse, fine[:-1], side="right") - 1
    lengths = (np.diff(x) / TICKS_PER_SECOND for x in (coarse, fine))
    none = np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0)
    return Program(*works, *at, up, *lengths, *none)


def _state(program: Any, who: Ints, edges: tuple[Floats, Floats], start: Place | None) -> Any:
    """Return where the method begins: where it ended with other cells, or nowhere."""
    from optsched.bounds.slo_kernel import State, spread

    n, z, p = len(who), int(program.z_at[-1]), int(program.p_at[-1])
    coarse, fine = len(program.coarse), len(program.fine)
    if start is None:
        sizes = (n, coarse, z, p, coarse, fine, n, n, z, 0)
        return State(*(np.zeros(size) for size in sizes))

    old, was = start.program, start.state
    place = np.searchsorted(start.who, who)
    place = np.where(start.who[np.minimum(place, len(start.who) - 1)] == who, place, -1)

    def of(values: Floats) -> Floats:
        return np.where(place >= 0, values[place], 0.0)

    def rows(values: Floats, at: Ints, first: Ints, cells: Floats, new: tuple[Any, ...]) -> Floats:
        many = np.where(place >= 0, np.diff(at)[place], 0)
        take = np.arange(many.sum()) + np.repeat(at[:-1][place] - np.cumsum(many) + many, many)
        begin = np.append(0, np.cumsum(many))
        return spread(values[take], begin, first[place], cells, *new)

    def whole(values: Floats, cells: Floats, new: Floats) -> Floats:
        ends = np.array([0, len(values)]), np.array([0, len(new) - 1])
        zero = np.zeros(1, np.int64)
        return spread(values, ends[0], zero, cells, ends[1], zero, new)

    later = program.z_at, program.z_first, edges[0]
    first = program.p_at, program.p_first, edges[1]
    since = old.z_at, old.z_first, start.coarse
    return State(
        of(was.x),
        whole(was.batches * old.coarse, start.coarse, edges[0]) / program.coarse,
        rows(was.z, *since, later),
        rows(was.p, old.p_at, old.p_first, start.fine, first),
        whole(was.price, start.coarse, edges[0]),
        whole(was.burst, start.fine, edges[1]),
        of(was.prefill),
        of(was.steps),
        rows(was.cadence, *since, later),
        np.zeros(0),
    )
