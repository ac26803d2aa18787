r"""Independent check of the leaf ``paths``: prices of machine time along each request's path.

Notation and the first inequality are those of `optsched.bounds.checker_busy` with p1 = 0: for a
price pi, constant on cells, the tokens of a request pay the mean of pi over their batch times
w T / (T - f), and the total latency is at least the sum of latencies and payments less int pi.

*A path.* Request i prefills in [a, t] and takes its m further steps, one after another, in [t, C].
A step's payment is the integral over its batch of pi w / (T - f). For any nu >= 0 it is at least
nu - int_batch g with an upper bound g(pi) on [nu / T - pi w / (T - f)]_+ over all T >= f + w. The
batches are disjoint. So the steps pay at least max(0, m nu - int_t^C g). The same holds for the
prefill with m = 1, all its own work and its fixed cost. Any nu may be taken, and for every end the
one that gives most.

- g <= (nu + pi w - 2 sqrt(nu w pi)) / f, the max over all T > f, and 0 where pi w >= nu.
- g <= nu / (f + w) - pi where pi (f + w)^2 <= nu w, since the best T is then at most f + w.

*Later steps* have own work w + d_k. With nu + pi_min d_k in place of nu the same g will do, with
pi_min the min price between arrival and end. So pi_min sum d_k is added.

*Chunks, refills.* A chunk of own work w_c gets nu w_c / W, with W >= w_c the own work of all.
Where T <= f + W its rate (nu w_c / (W T) - pi w_c / (T - f)) is at most
(T - f) / W (nu / T - pi W / (T - f)), which rises with T, and g covers it. A refill is a prefill of
no less own work and no less fixed cost than are used for a step, and g falls with both. What
evictions lose is left out.

*Cells.* V(j) is a lower bound on what is paid up to an end in cell j, and s(j) a slope: an end
x cells before the end of cell j costs at least V(j) + s(j) x. For a prefill V = nu - int up to the
end of the cell, s = g, or both 0. A start of the steps in cell j' enters with
V(j') + int_a^end(j') g less [g(j') - s(j')]_+ times the cell's length. Where steps may be free the
cost is V(j') of the last such start, since V falls. An end in cell j costs at least
V(j) + max(all batches alone, begin of the cell - a + min(1, s) times its length).

*Integers.* Costs are in units of 2**-26 cells and g is one of 2**-26 per cell, rounded up; all
else is rounded down. g is computed with further bits as base + rise p - fall root(p), where p is
the integer price and root(p) its root, rounded down, as are the thresholds of p between the three
cases, in the direction in which the case holds. Multipliers are cut so that g is at most 2**43 and
its integral over 2**15 cells at most 2**58. What a multiplier pays is cut to 2**60, so that the
sums of the loops are below 2**62.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np

from optsched.bounds.checker_busy import line_of
from optsched.bounds.checker_parts import Budget, expect, integer, integers
from optsched.bounds.checker_requests import Part

_UNIT, _LEAD, _WINDOW = 26, 18, 1 << 15
_CELLS = 8_000_000
_BATCH = 2000
"""Requests that are checked at once."""
_FIELDS = {"relaxation", "width", "bits", "split", "price", "levels"}


def check_paths(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the total latency that a leaf proves, in ticks, rounded down (module's text)."""
    from optsched.bounds.checker_kernel import path_costs

    expect(objective == "tel", f"paths: found the objective {objective!r}; expected 'tel'")
    expect(
        set(leaf) == _FIELDS, f"paths: found other fields; expected {', '.join(sorted(_FIELDS))}"
    )
    width, bits, split = (
        integer(leaf[name], f"paths: {name}") for name in ("width", "bits", "split")
    )
    right = width >= 1 and 0 <= bits <= _UNIT and 1 <= split <= 64
    expect(right, "paths: found width, bits or split out of range; expected >= 1, 0..26 and 1..64")
    listed, levels = (integers(leaf[name], f"paths: {name}") for name in ("price", "levels"))
    expect(0 < len(listed) * split <= _CELLS, f"paths: found no or more than {_CELLS} cells")
    expect(
        min(listed) >= 0 and max(listed) < 1 << 40,
        "paths: found a price out of range; expected 0 <= price < 2**40",
    )
    expect(
        0 < len(levels) <= 32 and min(levels) >= 0 and max(levels) <= 10**6,
        "paths: levels: found none or others; expected 1 to 32 integers from 0 to 10**6",
    )
    n, highest = len(part.requests), max(listed)
    shift = max(0, 62 - highest.bit_length()) // 2
    price = np.repeat(np.array(listed, dtype=np.int64), split)
    root = np.repeat(np.array([isqrt(p << 2 * shift) for p in listed], dtype=np.int64), split)
    upto = [0, *np.cumsum(price).tolist()]
    budget.spend(3 * len(price) + n * (200 + len(levels) * 40))
    total, spans = 0, 0
    for begin in range(0, n, _BATCH):
        rows, tables = [], []
        for arrival, request in zip(
            part.arrival[begin : begin + _BATCH],
            part.requests[begin : begin + _BATCH],
            strict=True,
        ):
            row, mean = _row(part, arrival, request, width, bits, upto, highest)
            spans += row[10]
            line, rates = line_of(part.rates, request.prompt), part.rates
            decode = min(rates.decode, rates.refill)
            step = part.ticks, rates.scale, width, bits, shift
            tables.append([
                [_level(request.own, rates.refill, 1, mean, k, step) for k in levels],
                [_level(line.work, decode, request.steps, mean, k, step) for k in levels],
            ])  # fmt: skip
            rows.append(row)
        budget.spend(spans * len(levels) // 100)
        spans = 0
        found = path_costs(
            np.array(rows, dtype=np.int64), np.array(tables, dtype=np.int64), price, root, bits
        )
        total += sum(found.tolist())
    spent = upto[-1] * width
    return (total * width >> _UNIT) - n + (-spent >> bits)


def _row(
    part: Part, arrival: int, request: Any, width: int, bits: int, upto: list[int], highest: int
) -> tuple[tuple[int, ...], int]:
    """Return what `path_costs` needs of a request, and the mean price after its arrival."""
    first, alone, m = part.floor(request.first), part.floor(request.chain), request.steps
    cell, cells = arrival // width, len(upto) - 1
    left = (cell + 1) * width - arrival  # of the cell of the arrival
    expect(alone >> 30 < width, "paths: found cells that are too narrow; expected wider ones")
    span = min(_WINDOW, max(32, 2 * alone // width + 8))
    since, until = min(cell, cells), min(cell + span, cells)
    mean = max((upto[until] - upto[since]) // span, (1 << bits) // 50)
    slope = line_of(part.rates, request.prompt).work_slope
    below = part.rates.scale * width
    extra = (slope * (m * (m - 1) // 2) * part.ticks << _UNIT + 16 - bits) // below
    extra = min(extra, (1 << 60) // max(highest, 1))
    row = (
        since if cell >= cells else cell,
        (left << _LEAD) // width,
        -((-left << _LEAD) // width),
        (left << _UNIT) // width,
        max(0, -((left - first) // width)),
        max(0, -((left - alone) // width)),
        -((first - alone) // width),
        (alone << _UNIT) // width,
        extra,
        m,
        span,
    )
    return row, mean


def _level(
    own: int, fixed: int, batches: int, mean: int, level: int, step: tuple[int, ...]
) -> list[int]:
    """Return a multiplier as `path_costs` needs it.

    These are the price up to which a batch of the least time is best, the price from which g is 0,
    the highest g, g at price 0 in the first case, then base, rise, fall and the further bits of
    the formula of the second case, and what all batches pay.
    """
    ticks, scale, width, bits, shift = step
    pays = max(mean * level // 1000, 1)
    # The multiplier at the steady price `pays`: the least T + price w T / (T - f). Any would do.
    room = max(own, isqrt(pays * own * fixed >> bits), 1)
    nu = (fixed + room) * ((room << bits) + pays * own) // (room << bits)
    long = fixed + own
    nu = min(nu, (fixed or long) << 43 - _UNIT)
    low = (nu * own << bits) // long**2
    high = min(-((-nu << bits) // own), 1 << 61) if own > 0 else 1 << 61
    at_low = -((-nu << _UNIT) // long)
    most = -((-nu << _UNIT) // (fixed or long))
    total = min((nu * batches * ticks << _UNIT) // (scale * width), 1 << 60)
    if fixed == 0:
        return [min(low, 1 << 61), high, most, at_low, 0, 0, 0, 0, total]
    fine = 58 - most.bit_length()
    base = -((-nu << _UNIT + fine) // fixed)
    rise = -((-own << _UNIT + fine - bits) // fixed)
    # 2 sqrt(nu w p) / f = fall root(p), as root(p) <= sqrt(p) 2**shift
    fall = isqrt((4 * nu * own << 2 * (_UNIT + fine)) // (fixed * fixed << bits + 2 * shift))
    if max(rise, fall) >= 1 << 60:  # own work far beyond the fixed cost: g is at most its highest
        base, rise, fall = most << fine, 0, 0
    return [min(low, 1 << 61), high, most, at_low, base, rise, fall, fine, total]
