"""How many requests can be within their SLOs, at prices of machine time with a cadence.

docs/formulations.md, "Prices within SLOs", has the notation and the proof. Prices pi are constant
on cells of time, and 0 outside. Whoever is in time has its prefill done within [begin, first], and
all its batches within [begin, last]. It takes one step a batch, and a step of own work w is paid
``extra + rate w``, as long as in every cell

    sum over the windows that meet it of max(0, max over w of extra + (rate - pi) w)
        <= pi fixed,                                                                     (*)

where ``fixed`` is what a batch that decodes lasts at least beside own work. The ``room`` is the
number of machines, and ``prefill`` a prefill's own work and its share of prefill_base. So at most
as many are in time as of the smallest ``prefill * least pi of [begin, first] + what all steps are
paid`` fit into the room times the integral of pi. Nothing changes if all prices are multiplied, so
they are integers over no denominator.

*Refills.* A step may be made by a refill, which has other own work, and whose batches need not
decode. What is above says that a step of own work w is paid at most pi (fixed + w) in every cell of
its window. So a refill of no less own work than fixed + w pays for it, in chunks, too. The first
steps of short prompts, whose refills may be shorter, are ``early``: each counts the smaller own
work of the two, at the least price of the whole window.

*Stretches.* Of a stretch of time let R be those whose windows lie in it, as far as they do, with
work a_i there, and e = sum a_i - room > 0. The parts min(a_i, e) / e of those in R that are not in
time sum up to 1 at least: those are late whose a_i sum up to e. So with a multiplier m >= 0 each
of R that is in time may be taken to pay m times its part more, if there is room for m times the sum
of parts less 1 more. Where all a_i >= e a whole request is late, and not e of its work.

*Intervals of rates.* Let arrivals come at any rate from r to q, and shorten the clock of a schedule
such that they come at rate q. Limits become no longer than they were, and times of batches are at
least r / q of what they were. So windows at rate q, and all work times r / q, prove something of
all rates from r to q. (What can be served need not fall with the rate, so a proof at r does not.)
At any rate from r on, requests come between the first one and when they come at r. So windows from
the first arrival to their ends at rate r, and all work, prove something of all rates from r on.

*Tables.* Under a tabulated cost model a leaf, or a chain, may hold charges by class of batch length
(`optsched.bounds.checker.class_work`). Then work has no cadence: all of it is the least charges of
tokens, and those of later tokens are charged within the time that the limits leave for their
batches. At a rate from r to q that is said of the schedule before its clock is shortened, and then
a factor of r / q at least remains of what is charged.

*Rounding.* Windows are whole ticks, rounded outward, and wider by 1 / `_CLOCK` for the rounding of
the judge's clock. Work is rounded down, or up where cells are charged, and of what is paid
1 / `_MARGIN` is left out. All products of (*) are below 2**62: prices have 30 bits, and so have
``fixed`` and own work in units of 2**``bits`` ticks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.class_work import (
    Floors,
    alone,
    floors_of,
    later_work,
    prefill_work,
)
from optsched.bounds.checker.classes import proved_charges
from optsched.bounds.checker.fields import PREFIX_FIELDS, further_fields
from optsched.bounds.checker.parts import (
    Budget,
    Ints,
    expect,
    expect_fields,
    integer,
    integers,
    same,
)
from optsched.bounds.checker.prefixes import Charge, charges_of
from optsched.bounds.checker.requests import (
    Part,
    Rates,
    Request,
    decimal,
    later_of,
    least_sum,
    minorants_of,
    rates_of,
    request_of,
    ticks_since,
)
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
PRICE_BITS = 30
"""Prices and rates are below 2 to the power of this."""
PART_BITS = 30
"""Parts of 1 are multiples of 1 over 2 to the power of this."""
NEVER = 1 << 60
"""The end of a window without one, in ticks."""
ALL = Fraction(1)
"""All work as it is."""
# Windows are wider by 1 / `_CLOCK`, and 1 / `_MARGIN` of what is paid is left out (docstring,
# Rounding).
_CLOCK, _MARGIN = 10**9, 10**7
# The most parts of a chain.
_PARTS = 1000
# An extra is below 2 to the power of this.
_EXTRA_BITS = 60


_FIELDS = ("relaxation", "limits", "rates", "edges", "price", "rate", "extra", "stretches")
_SLOS = ("slo_ttft", "slo_tpot", "slo_gap", "slo_latency")


class Works(NamedTuple):
    """What requests do, in ticks, rounded down: one entry for each of them.

    ``prefill`` is the work of the first token, ``early`` that of steps without a cadence, and
    ``later`` that of the ``steps`` others, which take from ``low`` to ``high`` (rounded up) each.
    There are ``all`` steps together, and a batch that decodes takes ``fixed``. If the request is
    alone, ``first`` is the time of the first token's batches, ``rest`` that of all others, and
    ``chain`` that of both. ``paced`` is what stands in for ``early`` where the limits leave so many
    ticks for the batches of later tokens, infinite for no limit.
    """

    prefill: Ints
    early: Ints
    later: Ints
    steps: Ints
    low: Ints
    high: Ints
    all: Ints
    first: Ints
    rest: Ints
    chain: Ints
    fixed: int
    paced: Callable[[Floats], Ints] | None = None


class Demand(NamedTuple):
    """What requests in time do, and when: one entry for each of those that can be in time alone.

    ``who`` are their numbers. Work, from ``prefill`` to ``steps``, is as in `Works`. Windows are in
    ticks: of a prefill from ``begin`` to ``first``, of steps from ``begin`` to ``last``. ``low``
    and ``high``, rounded outward, and ``fixed`` are in units of 2**``bits`` ticks. A tick has
    ``room`` for so much work, of which nothing is left out if it is ``exact``.
    """

    who: Ints
    begin: Ints
    first: Ints
    last: Ints
    prefill: Ints
    early: Ints
    later: Ints
    steps: Ints
    low: Ints
    high: Ints
    fixed: int
    bits: int
    room: int
    exact: bool = False


class Prices(NamedTuple):
    """Prices of the cells between edges in ticks, and the rate and the extra of every request.

    An extra is in units of a price times 2**``bits`` ticks. A stretch has its begin and end in
    ticks, and a multiplier in units of a price times 2**`PART_BITS` ticks.
    """

    edges: Ints
    price: Ints
    rate: Ints
    extra: Ints
    stretches: Sequence[tuple[int, int, int]] = ()


def most_in_time(
    instance: Any, model: Any, ticks: int, tree: Any, budget: Budget, machines: int = 1
) -> int:
    """Return how many requests a tree lets be within the limits that it states.

    Its leaf holds for arrivals at any rate between two, the instance's own among them, which is 1.
    """
    claim = _Claim(instance, model, ticks, tree, budget, machines)
    # Without classes a certificate is about a linear model, one of the minorants of a table.
    right = claim.has_classes or "table" not in model
    expect(right, "slo-prices: found a table, and no classes; expected some")
    low, high = claim.rates(claim.tree)
    valid = low <= 1 and (high is None or high >= 1)  # what is claimed is about the instance itself
    expect(valid, f"slo-prices: rates: found {low} to {high}; expected some that contain 1")
    return claim.count(claim.tree, len(claim.works) - 1)


def most_from(instance: Any, model: Any, ticks: int, tree: Any, budget: Budget) -> int:
    """Return how many requests a chain of leaves lets be in time at any rate from one on.

    Each leaf holds for the rates between two, under a minorant of the cost model (or, with a number
    behind the last, by the classes of the tree), and states how many it leaves. The last one holds
    for all larger rates, too.
    """
    claim = _Claim(instance, model, ticks, tree, budget)
    expect_fields(claim.tree, "tree", ("from", "chain"))
    since, parts = decimal(claim.tree["from"], "tree: from"), claim.tree["chain"]
    valid = isinstance(parts, list) and 1 <= len(parts) <= _PARTS
    expect(valid, f"tree: chain: found another value; expected 1 to {_PARTS} parts")
    # Up to which rate the parts so far reach; None: all rates.
    reach: Fraction | None = since
    most_of_all = 0

    for part in parts:
        expect_fields(part, "tree: chain", ("minorant", "most", "leaf"))
        number, leaf = integer(part["minorant"], "minorant"), part["leaf"]
        right = 0 <= number < len(claim.works)
        expect(right, f"minorant: found {number}; expected one of the table")
        low, high = claim.rates(leaf)
        valid = reach is not None and low <= reach
        expect(valid, f"tree: chain: found rates from {low} on; expected some from {reach} on")
        same(leaf["limits"], parts[0]["leaf"]["limits"], "tree: chain: limits")
        most = claim.count(leaf, number, chained=True)
        same(part["most"], most, "tree: chain: most")
        # A part that ends at the first rate, or below, says nothing of larger ones, and the next
        # one holds at that rate, too. Such parts show what can be served at lower rates.
        reach, most_of_all = high, max(most_of_all, most if high is None or high > since else 0)

    expect(reach is None, "tree: chain: found an end; expected a last part for all larger rates")
    return most_of_all


class _Claim:
    """What a certificate is about: the requests under each form of the cost model, and the leaf.

    The forms are linear, and behind them are charges by class of a table, if the tree has any.
    The tree of an instance that shares prefixes says that charges are of users that come at the
    same time (D = 0): then nobody is released before its arrival.
    """

    def __init__(
        self, instance: Any, model: Any, ticks: int, tree: Any, budget: Budget, machines: int = 1
    ) -> None:
        self.release = instance.release_times.tolist()
        self.ticks, self.budget, self.machines = ticks, budget, machines
        n, charges = len(self.release), None
        if further_fields(instance) & PREFIX_FIELDS:
            budget.spend(500 * n)
            expect_fields(tree, "tree", ("within", "tree"))
            same(tree["within"], 0, "tree: within")
            charges = charges_of(instance, ticks_since(self.release, ticks), 0)
            tree = tree["tree"]

        forms = minorants_of(model)
        budget.spend(200 * n * len(forms))
        self.works = [_works(instance, one, ticks, charges) for one in forms]
        self.per_leaf = 0
        self.tree, self.has_classes = tree, isinstance(tree, dict) and "classes" in tree
        if self.has_classes:
            expect(charges is None, "tree: classes: found shared prefixes; expected none")
            self.tree = {name: value for name, value in tree.items() if name != "classes"}
            part = Part([], [], rates_of(instance, forms[0]), ticks, [], (instance, model))
            floors = floors_of(part.machine, proved_charges(part, tree, budget))
            # Each demand of a leaf charges later tokens anew, by pairs of classes (`count`).
            self.per_leaf = n * (100 + len(floors.lo) ** 2 // 4)
            self.works.append(works_by_class(instance, floors, ticks))

    def rates(self, leaf: Any) -> tuple[Fraction, Fraction | None]:
        """Return the rates between which a leaf holds; None: for all larger ones."""
        expect_fields(leaf, "tree", _FIELDS)
        same(leaf["relaxation"], "slo-prices", "tree: relaxation")
        place, stated = "slo-prices: rates", leaf["rates"]
        valid = isinstance(stated, list) and len(stated) == 2
        expect(valid, f"{place}: found another value; expected two")
        low = decimal(stated[0], place)
        high = None if stated[1] is None else decimal(stated[1], place)
        valid = low > 0 and (high is None or low <= high)
        expect(valid, f"{place}: found {low} to {high}; expected ascending ones")
        return low, high

    def count(self, leaf: Any, form: int, chained: bool = False) -> int:
        """Return how many a leaf lets be in time.

        `form` is the number of the minorant whose times count. `chained`: the leaf holds for
        instances of other rates, too, whose arrivals are rounded to float64.
        """
        low, high = self.rates(leaf)
        limits = _read_limits(leaf["limits"], len(self.release))
        # Windows at the highest rate and all work times low / high; or, without a highest one,
        # windows from the first arrival on and all work (docstring, Intervals of rates).
        since = ticks_since(self.release, self.ticks, low if high is None else high)
        apart = rounding(self.release, low, self.ticks) if chained else 0
        work = ALL if high is None else low / high
        arguments = limits, since, self.ticks, self.machines, work, apart
        self.budget.spend(self.per_leaf)
        demand = demand_of(self.works[form], *arguments)
        if high is None:
            demand = at_all_rates(demand, self.ticks, apart)

        return max_in_time(demand, _read_prices(leaf, len(self.release)), work, self.budget)


def _works(instance: Any, model: Any, ticks: int, charges: Sequence[Charge] | None) -> Works:
    """Return what requests do under one form of the cost model.

    A prefill has no share of ``base``: where a batch decodes, too, its steps are paid out of that.
    """
    rates = rates_of(instance, model)
    alone = replace(rates, cost={**rates.cost, "base": 0})  # only the shares of prefill_base
    sizes = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    charged: Sequence[Charge | None] = charges or [None] * len(sizes[0])
    each = [*zip(*sizes, charged, strict=True)]
    # Requests of equal sizes and charges are computed once.
    known = {
        one: (request_of(rates, *one, ticks), request_of(alone, *one, ticks)) for one in {*each}
    }
    requests, firsts = zip(*(known[one] for one in each), strict=True)
    return works_of(rates, requests, [r.own + r.share for r in firsts], ticks)


def rounding(release: Sequence[float], low: Fraction, ticks: int) -> int:
    """Return by how many ticks arrivals at rates from one on are rounded to float64 at most.

    The latest time is that at the lowest rate, ``low``. An arrival there is the first one plus a
    quotient, each rounded; four spacings of floats at that time are more than that.
    """
    first, last = min(release), max(release)
    latest = max(abs(first), abs(last)) + (last - first) / float(low)
    return ceil(Fraction(float(np.spacing(latest))) * 4 * ticks)


def at_all_rates(demand: Demand, ticks: int, apart: int) -> Demand:
    """Return what requests do at all rates from a demand's on.

    They come earlier then, and not before the first one of all.
    """
    # The first arrival is at 0: less its slack as in `demand_of`, and two ticks more.
    first = -(2 * (ticks // _CLOCK) + 4 + min(apart, NEVER))
    return demand._replace(begin=np.full_like(demand.begin, first))


def _read_limits(stated: Any, n: int) -> dict[str, list[Any]]:
    """Return all limits by request, in seconds, infinite for none.

    Each is stated as a decimal text for all requests, or as a list of such texts; null is none.
    """
    valid = isinstance(stated, dict) and len(stated) > 0 and {*stated} <= {*_SLOS}
    expect(valid, f"slo-prices: limits: found others; expected some of {', '.join(_SLOS)}")
    limits: dict[str, list[Any]] = {name: [inf] * n for name in _SLOS}
    for name, value in stated.items():
        place = f"slo-prices: limits: {name}"
        texts = value if isinstance(value, list) else [value] * n
        expect(len(texts) == n, f"{place}: found {len(texts)} limits; expected {n}")
        by_text = {t: inf if t is None else decimal(t, place) for t in {*texts}}
        expect(min(by_text.values()) > 0, f"{place}: found 0; expected times > 0")
        limits[name] = [by_text[text] for text in texts]

    return limits


def _read_prices(leaf: Any, n: int) -> Prices:
    """Return the prices of a leaf. `charge` checks that cells ascend and that charges hold."""
    place = "slo-prices: "
    edges = integers(leaf["edges"], f"{place}edges")
    expect(len(edges) >= 2, f"{place}edges: found {len(edges)}; expected two or more")
    expect(max(max(edges), -min(edges)) < NEVER, f"{place}edges: found one out of range")
    bounds = {"price": 1 << PRICE_BITS, "rate": 1 << PRICE_BITS, "extra": 1 << _EXTRA_BITS}
    counts = {"price": len(edges) - 1, "rate": n, "extra": n}
    columns = [
        integers(leaf[name], f"{place}{name}", count=counts[name], highest=bounds[name] - 1)
        for name in bounds
    ]
    stated = leaf["stretches"]
    expect(isinstance(stated, list), f"{place}stretches: found no list; expected one")
    stretches = []
    for stretch in stated:
        begin, end, multiplier = integers(stretch, f"{place}stretches", count=3)
        valid = -NEVER < begin < end < NEVER and multiplier >= 0
        expect(valid, f"{place}stretches: found another; expected a begin, an end and a multiplier")
        stretches.append((begin, end, multiplier))

    cells, price, rate, extra = (np.array(x, np.int64) for x in (edges, *columns))
    return Prices(cells, price, rate, extra, stretches)


def works_of(rates: Rates, requests: Sequence[Request], firsts: Sequence[int], ticks: int) -> Works:
    """Return what requests do. `firsts`: work of their prefills with no share of ``base``.

    A request counts as one that does nothing if its times are out of range, so as one that is
    in time.
    """
    scale, rows = rates.scale, []
    for r, prefill in zip(requests, firsts, strict=True):
        # Own work of step j: step + j rise as a decode, and refill + j refill_slope as a refill.
        step, rise, refill, refill_slope = later_of(rates, r.prompt)
        # From this step on a refill has no less own work than a decode with its fixed cost. Earlier
        # steps are ``early`` (docstring, Refills).
        begin = _first_steady_step(refill - rates.decode - step, refill_slope - rise, r.steps)
        early = least_sum((step, rise), (refill, refill_slope), begin)
        # With a line twice, it is the sum of that line: here over the steps from ``begin`` on.
        later = least_sum((step, rise), (step, rise), r.steps) - least_sum(
            (step, rise), (step, rise), begin
        )
        high, rest = step + max(r.steps - 1, 0) * rise, r.chain - r.first
        times = (prefill, early, later, step + begin * rise, r.first, rest, r.chain)
        whole = [*(x * ticks // scale for x in times), -(-high * ticks // scale)]
        in_range = max(whole) < NEVER
        rows.append((*(whole if in_range else [0] * 8), (r.steps - begin) * in_range, r.steps))

    prefill, early, later, low, first, rest, chain, high, steps, all_ = np.array(rows, np.int64).T
    fixed = min(rates.decode * ticks // scale, NEVER)
    return Works(prefill, early, later, steps, low, high, all_, first, rest, chain, fixed)


def works_by_class(instance: Any, floors: Floors, ticks: int) -> Works:
    """Return what requests do by the charges of classes: no step has a cadence."""
    prompt, output = (
        np.asarray(x, np.float64) for x in (instance.prompt_tokens, instance.output_tokens)
    )
    steps = output - 1

    def whole(seconds: Floats) -> Ints:
        """Return ticks, rounded down to what integers hold."""
        return np.floor(np.clip(seconds * ticks, 0, NEVER // 2)).astype(np.int64)

    def paced(within: Floats) -> Ints:
        return whole(later_work(floors, prompt, steps, within / ticks))

    first, rest = (whole(seconds) for seconds in alone(floors, prompt, steps))
    none, prefill = np.zeros(len(prompt), np.int64), whole(prefill_work(floors, prompt))
    # `demand_of` has ``paced`` in place of ``early``. There are no later steps: not ``later``, nor
    # ``steps``, ``low`` and ``high``.
    columns = prefill, none, none, none, none, none, steps.astype(np.int64)
    return Works(*columns, first, rest, first + rest, 0, paced)


def _first_steady_step(lead: int, slope: int, steps: int) -> int:
    """Return the first j from which on ``lead + j slope`` is not below 0, else ``steps``.

    Only 0 <= j < ``steps`` count.
    """
    # It falls, so it is never below 0 if it is not at the last step.
    if slope <= 0:
        return 0 if steps > 0 and lead + slope * (steps - 1) >= 0 else steps

    return min(max(-(lead // slope), 0), steps)


def demand_of(
    works: Works,
    limits: Mapping[str, Sequence[float]],
    arrival: Sequence[int],
    ticks: int,
    machines: int = 1,
    work: Fraction = ALL,
    apart: int = 0,
) -> Demand:
    """Return what requests do in time on so many machines.

    `limits`: in seconds, infinite for none. `arrival`: ticks since the first one, rounded down.
    `work`: what their times alone are multiplied by. Windows that are out of range have no end.
    `apart`: by how many ticks arrivals may be others.
    """
    # No sum of these and of limits leaves 64 bits. Limits are longer by a tick, and by the arrival
    # times 2**-49, for the judge's rounding.
    since, judged = (
        np.array([min(x >> bits, NEVER) for x in arrival], np.int64) for bits in (0, 49)
    )
    limit_ticks = {name: _in_ticks(column, ticks) + judged + 1 for name, column in limits.items()}
    # From the arrival on: by when the first token and, as ``last``, all tokens must be there.
    latency = limit_ticks["slo_latency"]
    first = np.minimum(limit_ticks["slo_ttft"], latency)
    # All steps come within their number times the pace, whether it limits each gap or their mean.
    pace = np.minimum(limit_ticks["slo_tpot"], limit_ticks["slo_gap"])
    # Times the steps the pace would leave the range, so there is no end; without steps there is 0.
    endless = pace >= NEVER // np.maximum(works.all, 1)
    later = np.where(endless, NEVER, pace) * np.where(endless, works.all > 0, works.all)
    last = np.minimum(latency, first + later)
    times = [
        np.array([x * work.numerator // work.denominator for x in column.tolist()], np.int64)
        for column in (works.first, works.rest, works.chain)
    ]
    # Whoever is late even alone is left out.
    possible = np.flatnonzero((times[0] <= first) & (times[1] <= later) & (times[2] <= last))
    early = works.early
    if works.paced is not None:
        # The time of later tokens' batches, with the judge's rounding at the lowest rate.
        left = np.minimum(later, latency)
        spare = 2 + np.ceil(judged / float(work))
        early = works.paced(np.where(left < NEVER, left + spare, inf))

    # Windows are wider by this on both sides (docstring, Rounding).
    slack = 2 * ((since + ticks) // _CLOCK) + 2 + min(apart, NEVER)
    top = max(works.fixed, int(works.high.max(initial=0)))
    # So few bits that all products stay below 2**62 (docstring, Rounding).
    bits = max(0, top.bit_length() + 1 - PRICE_BITS)

    return Demand(
        who=possible,
        begin=(since - slack)[possible],
        first=np.minimum(since + slack + first, NEVER)[possible],
        last=np.minimum(since + slack + last, NEVER)[possible],
        prefill=works.prefill[possible],
        early=early[possible],
        later=works.later[possible],
        steps=works.steps[possible],
        low=(works.low >> bits)[possible],
        high=(-(-works.high >> bits))[possible],
        fixed=works.fixed >> bits,
        bits=bits,
        room=machines,
    )


def _in_ticks(limits: Sequence[float], ticks: int) -> Ints:
    """Return limits as ticks, with room for the judge's rounding.

    A float is what its shortest decimal says, which is what a certificate states.
    """
    known = {
        limit: NEVER
        if limit == inf
        else min(NEVER, int(Fraction(str(limit)) * ticks * (_CLOCK + 2) / _CLOCK))
        for limit in set(limits)
    }
    return np.array([known[limit] for limit in limits], np.int64)


def charge(demand: Demand, prices: Prices, budget: Budget | None = None) -> tuple[list[int], int]:
    """Return what each request in time pays at least, and what all of them may pay together.

    A prefill pays the least price of its window, early steps that of the whole window, and later
    steps their rates and extras. All may pay ``room`` times the integral of the price.

    Rejected: some cell's requests are charged more than it costs, or numbers are out of range.
    """
    edges, price = prices.edges, prices.price
    rate, extra = prices.rate[demand.who], prices.extra[demand.who]
    lasting = np.diff(edges)
    right = len(price) == len(lasting) > 0 and bool((lasting > 0).all())
    expect(right, "slo-prices: found other cells; expected ascending edges, one more than prices")
    # Only whoever has steps that are charged must be held against the cells.
    who = (demand.steps > 0) & ((rate > 0) | (extra > 0))
    begin, last = demand.begin[who], demand.last[who]
    right = not len(begin) or (int(begin.min()) >= edges[0] and int(last.max()) <= edges[-1])
    expect(right, "slo-prices: found a request that is charged outside of all cells")
    cells = cells_of(edges, begin, last)
    if budget is not None:
        budget.spend_compiled(int((cells[1] - cells[0]).sum()) + 50 * len(price))

    charges = (x[who] for x in (rate, extra, demand.low, demand.high))
    broken = broken_cell(price, demand.fixed, *cells, *charges)
    expect(broken < 0, f"slo-prices: cell {broken}: found requests charged more than it costs")
    first, last = (
        min_prices(edges, price, demand.begin, end) for end in (demand.first, demand.last)
    )
    columns = (demand.prefill, first, demand.early, last, demand.later, rate, demand.steps, extra)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    # An extra is a price times 2**bits ticks, as in the cells, while work is in ticks.
    payments = [v * p + e * q + w * r + (m * x << demand.bits) for v, p, e, q, w, r, m, x in rows]
    room = demand.room * sum(x * p for x, p in zip(lasting.tolist(), price.tolist(), strict=True))

    # 1 / `_MARGIN`, rounded up, is left out of what is paid (docstring, Rounding).
    return payments if demand.exact else [x - -(-x // _MARGIN) for x in payments], room


def max_in_time(
    demand: Demand, prices: Prices, work: Fraction = ALL, budget: Budget | None = None
) -> int:
    """Return how many requests can be in time at most, if all work is multiplied by `work`.

    All payments are multiplied by it, and so that they stay integers, all by its denominator.
    """
    payments, room = charge(demand, prices, budget)
    over, under = work.numerator, work.denominator
    total, room = [x * over for x in payments], room * under
    for begin, end, multiplier in prices.stretches:
        if budget is not None:
            budget.spend(len(total) // 20)

        who, amount = inside(demand, begin, end)
        excess = sum(amount) * over - demand.room * (end - begin) * under
        # All of this work fits, so nobody has to be late.
        if excess <= 0:
            continue

        # Rounded up, the parts of those who are late still sum to 1 at least.
        parts = [-(-(min(x * over, excess) << PART_BITS) // excess) for x in amount]
        room += multiplier * under * (sum(parts) - (1 << PART_BITS))
        for i, part in zip(who.tolist(), parts, strict=True):
            total[i] += multiplier * under * part

    # The smallest payments fit first, so at most as many are in time as sums of these fit.
    return sum(amount <= room for amount in accumulate(sorted(total)))


def inside(demand: Demand, begin: int, end: int) -> tuple[Ints, list[int]]:
    """Return who has work that must be done within a stretch, and how much.

    Prefills whose windows lie in it count, and steps whose whole windows do.
    """
    since = demand.begin >= begin
    first, last = since & (demand.first <= end), since & (demand.last <= end)
    work = np.where(first, demand.prefill, 0) + np.where(last, demand.early + demand.later, 0)
    who = np.flatnonzero(work)
    amount: list[int] = work[who].tolist()
    return who, amount if demand.exact else [x - -(-x // _MARGIN) for x in amount]


def cells_of(edges: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the first cell that each window meets, and the one behind the last.

    A window outside of all cells counts as one in the nearest cell.
    """
    first = np.clip(np.searchsorted(edges, begin, side="right") - 1, 0, len(edges) - 2)
    behind = np.searchsorted(edges, end, side="left")
    return first, np.clip(behind, first + 1, len(edges) - 1)


def min_prices(edges: Ints, price: Ints, begin: Ints, end: Ints) -> Ints:
    """Return the least price of each window, which is 0 where it leaves the cells."""
    inside = (begin >= edges[0]) & (end <= edges[-1])
    return np.where(inside, _min_in_windows(price, *cells_of(edges, begin, end)), 0)


@njit
def _min_in_windows(price: Ints, first: Ints, behind: Ints) -> Ints:
    """Return the least price of the cells ``first[i]`` to ``behind[i]`` - 1 of each window."""
    minima = np.zeros(len(first), np.int64)
    for i in range(len(first)):
        lowest = price[first[i]]
        for k in range(first[i] + 1, behind[i]):
            lowest = min(lowest, price[k])

        minima[i] = lowest

    return minima


@njit
def broken_cell(
    price: Ints,
    fixed: int,
    first: Ints,
    behind: Ints,
    rate: Ints,
    extra: Ints,
    low: Ints,
    high: Ints,
) -> int:
    """Return the first cell that is found to break (*) of the module's text, or -1 if none does.

    Request i has a window that meets the cells from ``first[i]`` to before ``behind[i]``. Its steps
    have own work w from ``low[i]`` to ``high[i]``.
    """
    total = np.zeros(len(price), np.int64)
    for i in range(len(first)):
        for k in range(first[i], behind[i]):
            # A line in w is largest at one end of its range.
            margin = rate[i] - price[k]
            amount = extra[i] + margin * (high[i] if margin > 0 else low[i])
            # A request that is charged less than nothing takes no step in this cell.
            if amount > 0:
                total[k] += amount
                # Charges are not negative, so the cell stays broken.
                if total[k] > price[k] * fixed:
                    return k

    return -1
