"""The first-order method that finds prices for `optsched.bounds.slo_prices`, and its cells."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds import slo_kernel as kernel
from optsched.bounds.checker.slo_prices import (
    NEVER,
    PART_BITS,
    PRICE_BITS,
    Demand,
    Prices,
    cells_of,
    inside,
)
from optsched.bounds.leaves import TICKS_PER_SECOND

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Shares of steps for each request, and in all at most.
_SHARES, _MOST = 120, 300_000
# Fine cells for each window of a median prefill, at most.
_FINE = 50
# Steps between looks at what is proved, and how much more multipliers move than shares.
_STEPS, _WEIGHT = 150, 1.5
# What factors of work are rounded up by, the least number to divide by, and the least price.
UP, _TINY, _LITTLE = 1e-9, 1e-30, 1e-9
# Prices have bits enough for one whose fixed cost pays so many extras of any one request.
_FEW_EXTRAS = 4
# So many stretches are looked for at a time, of at most so many median windows.
_MORE, _LONGEST = 40, 20


class Place(NamedTuple):
    """Where the method ended, from which it can go on with other cells or at another rate.

    ``coarse`` and ``fine`` are edges of cells on a clock that all rates share.
    """

    program: Any
    state: Any
    who: Ints
    coarse: Floats
    fine: Floats


class Method:
    """The first-order method on one set of cells.

    `n` is the number of all requests, of which the demand has those that can be in time alone.
    Cells are ``fewer`` times as few as they may be. `start` is where the method ended on other
    cells, and `clock` is what ticks are multiplied by on a clock that all rates share.

    ``work`` is the factor of all work. ``stretches`` have their begin and end in ticks, and
    ``members`` says of each who has work in it, as places in the demand, and how much.
    """

    def __init__(
        self, demand: Demand, n: int, fewer: int, start: Place | None, clock: float
    ) -> None:
        self.demand, self.n = demand, n
        self.coarse, self.fine = _edges(demand, min(_SHARES * len(demand.who), _MOST) // fewer)
        self.program, self.work = _program(demand, self.coarse, self.fine), 1.0
        self.sums = kernel.sums_of(self.program)
        edges = (np.asarray(self.coarse * clock, float), np.asarray(self.fine * clock, float))
        self.state = _state(self.program, demand.who, edges, start)
        self.place = Place(self.program, self.state, demand.who, *edges)
        self.stretches: list[tuple[int, int]] = []
        self.members: list[tuple[Ints, Floats]] = []

    def look_for_stretches(self) -> bool:
        """Add stretches of which the present shares leave too little late; return if any are new.

        Those so far that have no effect go. The program and its state get the rows of what is left.
        """
        demand, state = self.demand, self.state
        # A request may have two windows: that of its prefill and that of its other work. An end of
        # about `NEVER` is none. ``owner`` has the request of each window.
        early, late = demand.first < NEVER // 2, _late(demand)
        owner = np.concatenate([np.flatnonzero(early), np.flatnonzero(late)])
        if not len(owner):
            return False

        begin = demand.begin[owner]
        end = np.concatenate([demand.first[early], demand.last[late]])
        work = (
            np.concatenate([demand.prefill[early], (demand.early + demand.later)[late]]) * self.work
        )
        order = np.lexsort((end, begin))
        columns = [x[order] for x in (begin, end, work, 1.0 - state.x[owner])]
        by_end = np.argsort(columns[1], kind="stable")
        longest = int(_LONGEST * np.median(end - begin))
        until, least = kernel.crowded_stretches(*columns, by_end, float(demand.room), longest)
        # Valid shares have absent parts that sum up to 1 at least (`crowded_stretches`), so
        # stretches with clearly less cut off the present ones.
        chosen = [i for i in np.argsort(least)[:_MORE].tolist() if least[i] < 0.98]
        # Of the stretches so far, those without a multiplier have no effect, and go.
        kept = [one for one, m in zip(self.stretches, state.stretch.tolist(), strict=True) if m > 0]
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
        self.sums = kernel.sums_of(self.program)
        self.place = self.place._replace(program=self.program, state=self.state)

    def _parts(self, k: int, work: float) -> Floats:
        """Return the parts of those in the k-th stretch, if all work is multiplied by `work`.

        They are min(a, e) / e, with e the excess (`optsched.bounds.checker.slo_prices`, Stretches).
        """
        (begin, end), (_, amount) = self.stretches[k], self.members[k]
        excess = float(amount.sum()) * work - self.demand.room * (end - begin)
        # All of the work of this stretch fits: nobody has to be late.
        if excess <= 1e-9 * float(amount.sum()):
            return np.zeros(len(amount))

        return np.minimum(amount * work, excess) / excess

    def count(
        self, prices: Prices, payments: list[int], room: int, need: int, least: float
    ) -> tuple[int, float, float]:
        """Return how many fit, this with the share of the next, and the work at which fewer do.

        `payments` and `room` are of the checker's `charge`: what each request in time pays at
        least, and what all may pay together (not the ``room`` of a tick). Fewer are fewer than
        `need`. `least` is the least factor of work to look for; 1 if none is looked for. All that
        is returned is about right; the checker's number is the exact one.
        """
        # Integers of any size become floats relative to all that may be paid, which may be 0. The
        # multiplier m of a stretch is what 1 / 2**PART_BITS of a part of 1 pays.
        unit = room + sum(m << PART_BITS for *_, m in prices.stretches) + 1
        own = np.array([x / unit for x in payments])
        weights = [(m << PART_BITS) / unit for *_, m in prices.stretches]

        def payments_at(work: float) -> tuple[Floats, float]:
            """Return what requests pay, ascending, and what they may pay, with all stretches.

            Both are at a factor of work, and over ``unit``.
            """
            total, more = own * work, room / unit
            for k, weight in enumerate(weights):
                part = self._parts(k, work)
                if weight > 0 and part.any():
                    total[self.members[k][0]] += weight * part
                    more += weight * (float(part.sum()) - 1.0)

            return np.sort(total), more

        def proves(work: float) -> bool:
            """Return whether those who pay least, as many as are needed, may not pay together."""
            ascending, more = payments_at(work)
            return bool(ascending[:need].sum() > more * (1 + UP))

        ascending, more = payments_at(self.work)
        fits = np.cumsum(ascending)
        most = int(np.searchsorted(fits, more, side="right"))
        before = fits[most - 1] if most else 0.0
        share = (more - before) / ascending[most] if most < len(own) else 0.0
        # No factor is looked for, or even without any work too few could be in time: 0.
        if least == 1 or len(own) < need:
            return most, most + share, self.work if least == 1 else 0.0

        # The factor looked for is below the present one if that proves enough, else above. With
        # more work the parts of stretches get smaller, so another one may prove enough further off.
        # About 2 says that none has been found.
        low, high = (least, self.work) if proves(self.work) else (self.work, 2.0)
        # Bisection on the factor of work: what is proved is taken to be monotone in it, and the
        # checker decides.
        while high - low > UP * high:
            middle = (low + high) / 2
            low, high = (low, middle) if proves(middle) else (middle, high)

        return most, most + share, high

    def climb(self, work: float) -> None:
        """Go on with all work multiplied by a factor."""
        if work != self.work:
            light, later, fixed = (x * (work / self.work) for x in self.program[:3])
            self.program = self.program._replace(light=light, later=later, fixed=fixed)
            self.work = work
            self._fill()

        kernel.ascend(self.program, self.state, self.sums, _WEIGHT, _STEPS)

    def prices(self) -> Prices:
        """Return the prices of the multipliers, raised until no cell's requests pay too much."""
        demand, program, state = self.demand, self.program, self.state
        # Rows of cells are divided by their length, and so are their multipliers to be prices.
        coarse = state.price / program.coarse
        fine = coarse[program.up] + state.burst / program.fine
        # The request and the cell of each share of steps.
        many = np.diff(program.z_at)
        owner = np.repeat(np.arange(len(many)), many)
        cell = np.arange(len(owner)) + np.repeat(program.z_first - program.z_at[:-1], many)

        # All work of steps pays ``rate``, the mean price of the cells in which the request pays for
        # fixed costs, or less if it pays less in all. Each step pays what is left as an extra. If
        # it pays for no fixed costs there is nothing left.
        work, paid = np.maximum(program.later, _TINY), np.where(many > 0, state.steps, 0.0)
        # By request, the sums of its multipliers of fixed costs, and of these times their prices.
        shared, weighted = (
            np.bincount(owner, part, len(many))
            for part in (state.cadence, state.cadence * coarse[cell])
        )
        rate = np.minimum(paid / work, weighted / np.maximum(shared, _TINY))
        rate = np.where(shared > _TINY, rate, paid / work) * (program.later > 0)
        extra = np.maximum(paid - rate * work, 0.0) / np.maximum(demand.steps, 1)
        # Prices have `PRICE_BITS` bits, of which one is left for what they are raised by. A price
        # at which a batch's fixed cost pays for the extras of a few (``high``) is in range, too.
        batch = program.fixed / np.maximum(demand.steps, 1)
        high = _FEW_EXTRAS * extra / np.maximum(batch, _TINY) * (demand.steps > 0)
        unit = 2.0 ** (PRICE_BITS - 1) / max(
            _LITTLE, *(float(x.max(initial=0)) for x in (fine, rate, high))
        )
        # Prices of fine cells, and the rate of each request, as the integers of the checker.
        whole = np.rint(fine * unit).astype(np.int64), np.floor(rate * unit).astype(np.int64)
        # From seconds of all machines, at the factor of work, to units of 2**bits ticks. The
        # checker takes extras below 2**60.
        ticks = TICKS_PER_SECOND * demand.room / self.work / 2.0**demand.bits
        extras = np.floor(np.minimum(extra * unit * ticks, 2.0**59)).astype(np.int64)
        # Only who pays something for steps is charged in cells.
        some = (demand.steps > 0) & ((whole[1] > 0) | (extras > 0))
        cells = cells_of(self.fine, demand.begin[some], demand.last[some])
        columns = (x[some] for x in (whole[1], extras, demand.low, demand.high))
        price = kernel.raise_prices(whole[0], demand.fixed, *cells, *columns)
        rates, more = np.zeros(self.n, np.int64), np.zeros(self.n, np.int64)
        rates[demand.who], more[demand.who] = whole[1], extras

        # What a multiplier of 1 is in the checker's units (`Prices`).
        one = unit * TICKS_PER_SECOND * demand.room / self.work / 2.0**PART_BITS
        multipliers = [int(m * one) for m in state.stretch.tolist()]
        stretches = [(*x, m) for x, m in zip(self.stretches, multipliers, strict=True)]
        return Prices(self.fine, price, rates, more, stretches)


def _edges(demand: Demand, shares: int) -> tuple[Ints, Ints]:
    """Return the edges of coarse cells, and of fine ones, which are cut at windows of prefills.

    All edges are in ticks. ``shares`` is about how many shares of steps there are to be, and a
    request has one for each coarse cell of its window.
    """
    begin, first = demand.begin, demand.first
    # Whose prefill has a window that ends (an end of about `NEVER` is none), and whose other work.
    early, late = first < NEVER // 2, _late(demand)
    low = int(begin.min())
    high = max(
        int(begin.max()) + 1, *(int(x.max(initial=0)) for x in (first[early], demand.last[late]))
    )
    # A request has a share for each cell that its window meets, so the ticks of all windows with
    # steps say how many cells give so many shares. If nobody has steps there is no such window, and
    # the whole time stands in for it.
    windows = float((demand.last - begin)[late].sum(dtype=np.float64)) or float(high - low)
    cells = max(1, min(round(shares * (high - low) / windows), shares))
    coarse = np.clip(np.linspace(low, high, cells + 1).round().astype(np.int64), low, high)
    coarse = np.unique(np.append(coarse, [low, high]))  # beyond 2**53 the ends are rounded, too
    # The fewest ticks between edges. Without windows of prefills there is nothing to cut at.
    apart = int(np.median((first - begin)[early])) // _FINE + 1 if early.any() else high
    cuts = np.unique(np.concatenate([begin, first[early]]))
    kept = _apart(cuts, coarse, apart)

    return coarse, np.union1d(coarse, kept)


def _late(demand: Demand) -> Any:
    """Return who has work behind its prefill that must end in time, as booleans.

    That is steps, or ``early`` work, which has no fixed costs.
    """
    return (demand.last < NEVER // 2) & ((demand.steps > 0) | (demand.early > 0))


def _apart(cuts: Ints, others: Ints, apart: int) -> Ints:
    """Return cuts that are so far from one another, and from the others; all of them ascend."""
    at = np.searchsorted(others, cuts)
    left, right = others[np.maximum(at - 1, 0)], others[np.minimum(at, len(others) - 1)]
    kept: list[int] = []
    for cut in cuts[(cuts - left >= apart) & (right - cuts >= apart)].tolist():
        # Cells that are too short would have prices of their own for next to no time.
        if not kept or cut - kept[-1] >= apart:
            kept.append(cut)

    return np.array(kept, np.int64)


def _program(demand: Demand, coarse: Ints, fine: Ints) -> Any:
    """Return the linear program of a demand on cells with these edges, without any stretch."""
    # Who has a window of its prefill, and who one of other work, of which ``demand.early`` is part.
    early = (demand.first < NEVER // 2) & (demand.prefill > 0)
    late = _late(demand)
    z_at, z_first = _shares(demand.begin, demand.last, late, coarse)
    p_at, p_first = _shares(demand.begin, demand.first, early, fine)
    # Work becomes seconds of all machines, of which a tick has ``room`` for so much.
    # The demand's ``fixed`` is in units of 2**bits ticks, and here it counts once for each step.
    unit = float(TICKS_PER_SECOND * demand.room)
    nobody = np.zeros(0, np.int64)
    return kernel.Program(
        light=demand.prefill / unit,
        later=(demand.early + demand.later) / unit,
        fixed=demand.steps.astype(np.float64) * (demand.fixed << demand.bits) / unit,
        z_at=z_at,
        z_first=z_first,
        p_at=p_at,
        p_first=p_first,
        up=np.searchsorted(coarse, fine[:-1], side="right") - 1,
        coarse=np.diff(coarse) / TICKS_PER_SECOND,
        fine=np.diff(fine) / TICKS_PER_SECOND,
        whose_at=np.zeros(1, np.int64),
        whose=nobody,
        part=np.zeros(0),
    )


def _shares(begin: Ints, end: Ints, some: Any, edges: Ints) -> tuple[Ints, Ints]:
    """Return where the shares of each request begin, and in which cell its window does.

    Those who are not in ``some`` have no shares.
    """
    first, behind = cells_of(edges, begin, end)
    return np.append(0, np.cumsum(np.where(some, behind - first, 0))), first


def _state(program: Any, who: Ints, edges: tuple[Floats, Floats], start: Place | None) -> Any:
    """Return where the method begins: where it ended with other cells, or at 0.

    ``who`` has the numbers of the requests, and ``edges`` those of coarse and of fine cells on the
    clock that all rates share. Stretches begin anew.
    """
    n, z, p = len(who), int(program.z_at[-1]), int(program.p_at[-1])
    coarse, fine = len(program.coarse), len(program.fine)
    # The order is that of `State`: x, batches, z, p, then price, burst, prefill, steps, cadence,
    # and stretch, of which there are none.
    if start is None:
        sizes = (n, coarse, z, p, coarse, fine, n, n, z, 0)
        return kernel.State(*(np.zeros(size) for size in sizes))

    old, was = start.program, start.state
    # The place that each request had there, or -1 if it is new.
    place = np.searchsorted(start.who, who)
    place = np.where(start.who[np.minimum(place, len(start.who) - 1)] == who, place, -1)

    def of(values: Floats) -> Floats:
        """Return values by request, 0 for new ones."""
        return np.where(place >= 0, values[place], 0.0)

    def rows(values: Floats, at: Ints, first: Ints, cells: Floats, new: tuple[Any, ...]) -> Floats:
        """Return values by request and cell of its window, spread over the new cells.

        ``at`` and ``first`` are the packing of the old ones, and `new` has that of the new ones and
        the edges of their cells.
        """
        # By request in the new order, how many values it had, and then where they are.
        many = np.where(place >= 0, np.diff(at)[place], 0)
        take = np.arange(many.sum()) + np.repeat(at[:-1][place] - np.cumsum(many) + many, many)
        begin = np.append(0, np.cumsum(many))
        return kernel.spread(values[take], begin, first[place], cells, *new)

    def whole(values: Floats, cells: Floats, new: Floats) -> Floats:
        """Return values by cell, spread over the new cells, as the only row."""
        ends = np.array([0, len(values)]), np.array([0, len(new) - 1])
        zero = np.zeros(1, np.int64)
        return kernel.spread(values, ends[0], zero, cells, ends[1], zero, new)

    # The packing and the edges of steps, of prefills, and of steps as they were.
    later = program.z_at, program.z_first, edges[0]
    first = program.p_at, program.p_first, edges[1]
    since = old.z_at, old.z_first, start.coarse
    # What is spread adds up over cells. ``batches`` are parts of a cell, so they become seconds.
    return kernel.State(
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
