"""Independent check of the leaf ``shares``: prices of machine time along each request's path.

docs/formulations.md, "Paths" and "Paths that share fixed costs", has the notation and the proof.
Prices p2, p3 >= 0 are constant on cells of ``width`` ticks from the first arrival of the range on
and 0 afterwards. Of each cell requests have weights, and mu_i is request i's part of their sum.
f is the fixed cost that a request asks for by its phase (`optsched.bounds.checker.requests`).

*A path.* Request i prefills in [a, t] and takes its m further steps, one after another, in [t, C].
For any nu >= 0 a step pays at least nu - int_batch g with an upper bound g on

    [nu' / T - p2 w / (T - f)]_+  over all T >= f + w,    nu' = [nu - p3 (w + mu_i f)]_+ .

So the steps pay at least max(0, m nu - int_t^C g). The same holds for the prefill with m = 1, all
its own work and its fixed cost. For every end the nu that gives most is taken.

- g <= (root(nu') - root(p2 w))^2 / f, the max over all T > f, and 0 where p2 w >= nu'.
- g <= nu' / (f + w) - p2 where p2 (f + w)^2 <= nu' w, since the best T is then at most f + w.

*Later steps* have own work w + d_k, and pay pi d_k more. With nu + pi_min d_k in place of nu the
same g will do, with pi_min the min of pi between arrival and end. So pi_min sum d_k is added.

*Multipliers that rise.* Or nothing is added, and with w_k = w + d k multipliers nu_k are affine in
k, too. Then the larger g of the first and of the last step will do for all. For at T = f + w_k u,
u >= 1, the bracket is [nu_k - p3 (w_k + mu_i f)]_+ / (f + w_k u) - p2 / u. Before it is cut at 0
the first term is the quotient of two affine functions of k, which is monotone, and so is the whole
for each u. So the max over u is at one of the two ends. The steps pay m (nu_1 + nu_m) / 2 - int g.
Any nu_m is valid. The one used is that of the steady price p at which nu_1 is
(root(f) + root(p w))^2.

*Chunks, refills.* A chunk of own work w_c gets nu w_c / W, with W >= w_c the own work of all. Since
f W / w_c >= f, what p3 leaves of it is at most nu' w_c / W. Where T <= f + W its rate
(nu' w_c / (W T) - p2 w_c / (T - f)) is at most (T - f) / W (nu' / T - p2 W / (T - f)), which rises
with T, and g covers it. A refill is a prefill of no less own work and no less fixed cost than are
used for a step, and g falls with both. What evictions lose is left out.

*Cells.* V(j) is a lower bound on what is paid up to an end in cell j, and s(j) a slope: an end
x cells before the end of cell j costs at least V(j) + s(j) x. For a prefill V = nu - int up to the
end of the cell, s = g, or both 0. A start of the steps in cell j' enters with
V(j') + int_a^end(j') g less [g(j') - s(j')]_+ times the cell's length. Where steps may be free the
cost is V(j') of the last such start, since V falls. An end in cell j costs at least
V(j) + max(all batches alone, begin of the cell - a + min(1, s) times its length).

*Integers.* Costs are in units of 2**-26 cells and g is one of 2**-26 per cell, rounded up; all
else is rounded down. Let h be f, or w where f is 0. Multipliers are multiples of 2**-20 h below
2**17 h, and nu' / h is one of 2**-44. Its root is rounded up and that of p2 w / h is rounded down,
both in units of 2**-22. So g is below 2**44 and its integral over 2**15 cells below 2**59. What a
multiplier pays is cut to 2**60, so that the sums of the loops are below 2**62.
"""

from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.busy_time import line_of
from optsched.bounds.checker.parts import Budget, expect, expect_fields, integer, integers
from optsched.bounds.checker.requests import Part

# `UNIT_BITS`, `LEAD_BITS` and `WINDOW` of `kernel`, which is imported late as it loads numba.
_UNIT, _LEAD, _WINDOW = 26, 18, 1 << 15
# Max cells, max weights of all requests, and bits of a price.
_CELLS = 8_000_000
_SHARES = 40_000_000
_PRICE = 40
# Requests that are checked at once.
_BATCH = 2000
_FIELDS = ["relaxation", "width", "bits", "p2", "p3", "levels", "first", "later", "cells", "weight"]


class _Prices(NamedTuple):
    """The prices of a leaf, and what follows from the highest ones.

    ``p2`` and ``p3`` have ``bits`` bits after the point, by cells of ``width`` ticks. ``root`` has
    the roots of ``p2`` as integers, times 2**``shift``. ``highest`` is no less than any sum of both
    prices, ``highest_shared`` the max of ``p3``, and ``rises`` says whether multipliers do.
    """

    width: int
    bits: int
    p2: Any
    p3: Any
    root: Any
    shift: int
    highest: int
    highest_shared: int
    rises: bool


def check_shares(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the total latency that a leaf proves, in ticks, rounded down (module's text).

    ``first`` and ``later`` of a leaf are multipliers nu, in ticks, of each request's prefill and of
    its later steps, and ``levels`` the thousandths of them that are tried. ``weight`` has the
    weights of one request after another, ``cells[i]`` of them from the cell of i's arrival on.
    """
    from optsched.bounds.checker.kernel import path_costs, portions

    expect(objective == "tel", f"shares: found the objective {objective!r}; expected 'tel'")
    expect_fields(leaf, "shares", [*_FIELDS, *(["rises"] if "rises" in leaf else [])])
    budget.spend(sum(len(column) for column in leaf.values() if isinstance(column, list)))
    prices, n = _read_prices(leaf), len(part.requests)

    def column_of(name: str, highest: int, count: int | None = None) -> list[int]:
        return integers(leaf[name], f"shares: {name}", count=count, highest=highest)

    levels = column_of("levels", 10**6)
    expect(0 < len(levels) <= 64, f"shares: levels: found {len(levels)}; expected 1 to 64")
    nus = column_of("first", 1 << 80, n), column_of("later", 1 << 80, n)
    many = column_of("cells", _WINDOW, n)
    weight = column_of("weight", 1 << 20, sum(many))
    expect(
        len(weight) <= _SHARES, f"shares: weight: found {len(weight)}; expected at most {_SHARES}"
    )
    begin = np.cumsum([0, *many])
    cell = np.array([min(a // prices.width, _CELLS) for a in part.arrival], dtype=np.int64)
    share = portions(np.array(weight, dtype=np.int64), begin, cell, len(prices.p2))
    # Requests go to the compiled loop in batches, so that a budget is looked at between them.
    budget.spend(n * 100)
    total = 0

    for at in range(0, n, _BATCH):
        batch = range(at, min(n, at + _BATCH))
        # Where the shares of a request begin, and how many there are, come last in its row.
        rows = [(*_row_of(part, i, prices), begin[i], many[i]) for i in batch]
        tables = [_phases_of(part, i, prices, nus) for i in batch]
        numbers = (np.array(x, dtype=np.int64) for x in (rows, tables, levels))
        market = prices.p2, prices.p3, prices.root, share, prices.bits
        # 50 compiled steps count as one.
        costs, steps = path_costs(*numbers, market, 50 * budget.left)
        budget.spend(steps // 50 + 1)
        total += sum(costs.tolist())

    # The integral of all prices comes off the sum of the costs, rounded up: -spent is shifted down.
    # A tick per request comes off, as arrivals are rounded down.
    spent = (int(prices.p2.sum()) + int(prices.p3.sum())) * prices.width
    return (total * prices.width >> _UNIT) - n + (-spent >> prices.bits)


def _read_prices(leaf: dict[str, Any]) -> _Prices:
    """Return the prices of a leaf, each below 2**40 as an integer."""
    width, bits = (integer(leaf[name], f"shares: {name}") for name in ("width", "bits"))
    is_valid = width >= 1 and 0 <= bits <= _UNIT
    expect(is_valid, "shares: found width or bits out of range; expected >= 1 and 0..26")
    highest = (1 << _PRICE) - 1
    p2 = integers(leaf["p2"], "shares: p2", highest=highest)
    p3 = integers(leaf["p3"], "shares: p3", count=len(p2), highest=highest)
    expect(0 < len(p2) <= _CELLS, f"shares: p2: found {len(p2)} cells; expected 1 to {_CELLS}")
    # Roots keep as many bits as fit into 31, rounded down.
    shift = (62 - max(p2).bit_length()) // 2
    root = [isqrt(p << 2 * shift) for p in p2]
    first, second, third = (np.array(column, dtype=np.int64) for column in (p2, p3, root))

    rises = integers([leaf.get("rises", 0)], "shares: rises", highest=1) == [1]
    return _Prices(width, bits, first, second, third, shift, max(p2) + max(p3), max(p3), rises)


def _row_of(part: Part, i: int, prices: _Prices) -> tuple[int, ...]:
    """Return the integers of a request that `path_costs` takes, but for its shares."""
    request = part.requests[i]
    m, slope = request.steps, 0 if prices.rises else line_of(part.rates, request).work_slope
    below = part.rates.scale * prices.width
    # pi_min sum d_k (module's text, Later steps), per unit of a price: in units of 2**-26 cells
    # with 16 further bits, and cut so that times the highest price it stays below 2**60.
    extra = (slope * (m * (m - 1) // 2) * part.ticks << _UNIT + 16 - prices.bits) // below
    extra = min(extra, (1 << 60) // max(prices.highest, 1))
    times = part.arrival[i], part.floor(request.first), part.floor(request.chain)
    return path_row(times, m, prices.width, extra)


def path_row(times: tuple[int, int, int], steps: int, width: int, extra: int) -> tuple[int, ...]:
    """Return the integers of a request that `path_costs` takes, but for its shares.

    ``times`` are its arrival, and the least times of its prefill and of all its batches, in ticks.
    ``extra`` is what the growth of own work pays per unit of a price. The head of `kernel` lists
    the integers. Prices end by cell `_CELLS`, so a later arrival may count as one in it.
    """
    arrival, first, alone = times
    cell = arrival // width
    lead = (cell + 1) * width - arrival  # of the cell of the arrival
    # Times are below 2**30 cells, so that the integers of the kernel do not overflow.
    expect(alone >> 30 < width, "shares: found cells that are too narrow; expected wider ones")

    return (
        min(cell, _CELLS),
        (lead << _LEAD) // width,
        -((-lead << _LEAD) // width),
        (lead << _UNIT) // width,
        max(0, -((lead - first) // width)),  # the first cell in which the prefill can end
        max(0, -((lead - alone) // width)),  # and that of all steps
        -((first - alone) // width),  # cells between these two ends, rounded up
        (alone << _UNIT) // width,
        extra,
        steps,
        # The cells to begin with: the search doubles them where they are too few.
        min(_WINDOW, max(32, 2 * alone // width + 8)),
    )


def _phases_of(
    part: Part, i: int, prices: _Prices, nus: tuple[list[int], list[int]]
) -> list[list[int]]:
    """Return the phases of a request: its prefill, its first step, and its last if it `rises`.

    The multipliers of the first and the last step are those at one steady price. ``nus`` has by
    request those of the prefill, and those of the first step.
    """
    request, rates, (first, nu) = part.requests[i], part.rates, (nus[0][i], nus[1][i])
    line, decode, m = line_of(rates, request), min(rates.decode, rates.refill), request.steps
    work = line.work
    # Own work and fixed cost (of a step the less of a decode's and a refill's), the number of
    # batches (1 for the prefill), and the multiplier.
    phases = [
        _phase(part, prices, request.own, rates.refill, 1, first),
        _phase(part, prices, work, decode, m, nu),
    ]

    if prices.rises:
        last = work + line.work_slope * max(0, m - 1)
        # nu_1 = (root(f) + root(p w))^2 has the price p, and nu_m is the same with w_m for w. Roots
        # have 20 bits after the point; rounding is free here, as any multiplier is valid.
        fixed, root = isqrt((decode * part.ticks << 40) // rates.scale), isqrt(nu << 40)
        if fixed < root and work > 0:
            nu = (fixed + ((root - fixed) * isqrt((last << 60) // work) >> 30)) ** 2 >> 40

        phases.append(_phase(part, prices, last, decode, m, nu))

    return phases


def _phase(part: Part, prices: _Prices, work: int, fixed: int, batches: int, nu: int) -> list[int]:
    """Return the ten integers of a phase that `path_costs` takes, of so many batches.

    ``work`` is w and ``fixed`` f, in units of 1 / scale s, and ``nu`` is the multiplier in ticks.
    By number they are

    - 0: the multiplier over h, in units of 2**-20;
    - 1, 2: w / h in units of 2**-fine, and ``fine``;
    - 3: by how many bits mu is cut;
    - 4, 5: h w / (f + w)^2 and h / (f + w), in units of 2**-30;
    - 6, 7: a factor and a number of bits: times the root of a price, and without these bits, the
      factor is root(p2 w / h) in units of 2**-22;
    - 8, 9: the time of all batches of length h, on a scale such that times nu / h it is what they
      pay, and the bits of that scale.
    """
    # ``unit`` is h of the module's text.
    unit, long, ticks, scale = fixed or work, fixed + work, part.ticks, part.rates.scale
    # The product of a price and work per unit stays below 2**62, so work may lose bits: downward. A
    # mu of at most 1 is added to it (`kernel._fill_charges`), for which 2 leaves room.
    max_bits = 62 - prices.highest_shared.bit_length()
    fine = min(30, max(0, max_bits - (work // unit + 2).bit_length()))
    ratio = min((work << fine) // unit, (1 << max_bits) - 2)
    # Times the integer of a root, 2**(bits / 2 + shift) times that of a price, root(w / h) has to
    # be in units of 2**-22: so 22 bits, and 62 that are cut again.
    squared = (work << 44 + 2 * 62) // (unit << prices.bits + 2 * prices.shift)
    root, cut = mantissa(isqrt(squared), 62, 31)
    if cut < 0:  # own work far beyond the fixed cost: less of the root will do
        root, cut = (1 << 31) - 1, 0

    # What is paid is nu / h, which has 44 bits, times this, less 30 bits (`kernel.times`), in units
    # of 2**-26 cells. So this has 12 bits, and 62 more, of which `mantissa` keeps 30.
    time, wide = mantissa((unit * batches * ticks << 12 + 62) // (scale * prices.width), 62, 30)
    multiplier = min((nu * scale << 20) // (ticks * unit), (1 << 37) - 1)
    # mu has 30 bits, of which those beyond ``fine`` are cut. Without a fixed cost it counts for
    # nothing: cut by 40, it is 0.
    coarse, slope, below = 30 - fine if fixed else 40, -((-unit << 30) // long), unit * work << 30
    return [multiplier, ratio, fine, coarse, below // long**2, slope, root, cut, time, wide]


def mantissa(value: int, bits: int, max_bits: int) -> tuple[int, int]:
    """Return m and e with m < 2**max_bits, e <= bits and m 2**-e <= value 2**-bits.

    So m 2**-e is the number of which ``value`` has ``bits`` bits after the point, rounded down.
    """
    cut = max(0, value.bit_length() - max_bits)
    return value >> cut, bits - cut
