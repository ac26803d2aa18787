"""Compiled loops of the checker, in 64-bit integers. Callers show first that none can overflow."""

from typing import Any

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.problem.kernel import njit

NEVER = 1 << 62
"""The cost of what cannot be."""
TOGETHER = 32
"""Cells that are passed over at once where none of them can cost less."""


@njit
def least_costs(ends: Ints, p1: Ints, p2: Ints, root: Ints) -> Ints:
    """Return the least cost of each row of ``ends`` over the moments from its first one on.

    A row has the cell of its first moment, the cost of waiting until that cell ends and of every
    further cell, and what it pays per unit of ``p1``, ``p2`` and ``root``. Up to the price ``turn``
    of p2 it pays ``least``, and ``short`` per unit of ``p2``; beyond at least as much. ``least`` is
    due at any moment, and beyond the last cell nothing but that and the waiting. While it is
    compared, the waiting is at most the best cost plus one cell.
    """
    found = np.empty(len(ends), np.int64)
    cells = len(p1)
    low1, low2, low_root = _lowest(p1), _lowest(p2), _lowest(root)
    for row in range(len(ends)):
        cell, wait, every, l1, l2, r, least, short, turn = ends[row]
        best, waited = NEVER, 0
        while waited < best:
            if cell >= cells:
                best = waited
                break

            if cell % TOGETHER == 0 and cell + TOGETHER <= cells and every < NEVER // 4 // TOGETHER:
                b = cell // TOGETHER
                paid = max(0, low2[b] * l2 + low_root[b] * r - least)
                if low2[b] <= turn:
                    paid = min(paid, low2[b] * short)
                if waited + low1[b] * l1 + paid >= best:  # as does every cell of these
                    waited = wait + (TOGETHER - 1) * every
                    wait = waited + every
                    cell += TOGETHER
                    continue

            p = p2[cell]
            paid = p * short if p <= turn else max(0, p * l2 + root[cell] * r - least)
            best = min(best, waited + p1[cell] * l1 + paid)
            waited, wait = wait, wait + every
            cell += 1

        found[row] = least + best

    return found


@njit
def _lowest(values: Ints) -> Ints:
    """Return the least of each `TOGETHER` cells, where there are so many."""
    found = np.empty(len(values) // TOGETHER, np.int64)
    for b in range(len(found)):
        found[b] = values[b * TOGETHER]
        for k in range(b * TOGETHER + 1, (b + 1) * TOGETHER):
            found[b] = min(found[b], values[k])

    return found


@njit
def least_class_costs(ends: Ints, paid: Ints, fixed: Ints, price: Ints) -> Ints:
    """Return the least cost of each row of ``ends`` over classes and moments from its first one on.

    A row is as in `least_costs`. Class b pays ``paid[row, b]`` per unit of ``price``, and
    ``fixed[row, b]``. Beyond the last cell only waiting and ``fixed`` cost.
    """
    found = np.empty(len(ends), np.int64)
    cells, classes = len(price), paid.shape[1]
    for row in range(len(ends)):
        cell, ahead, every = ends[row]
        least = fixed[row].min()
        wait, best = 0, NEVER

        while wait + least < best:
            if cell >= cells:
                best = wait + least
                break

            for b in range(classes):
                best = min(best, wait + price[cell] * paid[row, b] + fixed[row, b])

            wait += ahead
            ahead = every
            cell += 1

        found[row] = best

    return found


WINDOW = 1 << 15
"""Max cells after its arrival that a request's path extends over. Beyond, only time counts."""
UNIT_BITS = 26
"""Costs of paths are in units of 2**-26 cells."""
LEAD_BITS = 18
"""The part of the first cell that is left is in units of 2**-18 cells, rounded down and up."""


@njit
def portions(weight: Ints, begin: Ints, cell: Ints, cells: int) -> Ints:
    """Return each request's part of the weights of a cell, in units of 2**-30.

    Those of request i are ``weight[begin[i] : begin[i + 1]]``, for cells from ``cell[i]`` on. They
    are below 2**21, and fewer than 2**31. Beyond the last cell the part is 0.
    """
    total, found = np.zeros(cells, np.int64), np.zeros(len(weight), np.int64)
    for i in range(len(cell)):
        for at in range(begin[i], min(begin[i + 1], begin[i] + cells - cell[i])):
            total[cell[i] + at - begin[i]] += weight[at]

    for i in range(len(cell)):
        for at in range(begin[i], min(begin[i + 1], begin[i] + cells - cell[i])):
            found[at] = (weight[at] << 30) // max(total[cell[i] + at - begin[i]], 1)

    return found


@njit
def times(x: int, c: int) -> int:
    """Return x c / 2**30, rounded down, for x < 2**61 and c <= 2**30."""
    return (x >> 30) * c + (((x & ((1 << 30) - 1)) * c) >> 30)


@njit
def root_above(x: int) -> int:
    """Return the root of 0 <= x < 2**61, rounded up. Floating point only says where to begin."""
    r = int(np.sqrt(float(x)))
    while r * r < x:
        r += 1
    while r > 0 and (r - 1) * (r - 1) >= x:
        r -= 1

    return r


@njit
def _charge(w: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Find what p3 takes off nu / h in each cell, and the root of p2 w / h, both rounded down."""
    p2, p3, root, share, bits = market
    cell, begin, many = request[0], request[11], request[12]
    for end in range(len(ends)):
        drop, toll, phase = w[9 + 2 * end], w[10 + 2 * end], ends[end]
        own, fine, coarse, factor, cut = phase[1], phase[2], phase[3], phase[6], phase[7]
        shift = 44 - bits - fine

        for j in range(span):
            drop[j] = toll[j] = 0
            if cell + j < len(p2):
                mu = share[begin + j] >> coarse if j < many else 0
                asked = p3[cell + j] * (own + mu)
                drop[j] = min(asked, NEVER >> shift) << shift if shift >= 0 else asked >> -shift
                toll[j] = (root[cell + j] * factor) >> cut


@njit
def _integrate(w: Ints, level: int, ends: Ints, request: Ints, market: Any, span: int) -> int:
    """Fill in upper bounds on g, and on its integral from the arrival to each cell's end.

    ``ends`` are the first and the last batch of a phase. Returns what all its batches pay.
    """
    gain, area, p2, bits = w[0], w[1], market[0], market[4]
    cell, up, pays = request[0], request[2], 0
    gain[:span] = 0

    for end in range(len(ends)):
        drop, toll, low, slow = w[9 + 2 * end], w[10 + 2 * end], ends[end, 4], ends[end, 5]
        nu, paid = _level(ends[end], level)
        pays += paid // len(ends)
        for j in range(span):
            x = nu - drop[j]
            if x > 0:
                p = p2[cell + j] if cell + j < len(p2) else 0
                if p <= times(x, low) >> (44 - bits):
                    g = max(0, (times(x, slow) >> 18) + 1 - (p << (UNIT_BITS - bits)))
                else:
                    d = root_above(x) - toll[j]
                    g = ((d * d) >> 18) + 1 if d > 0 else 0

                gain[j] = max(gain[j], g)

    area[0] = 0
    for j in range(span):
        area[j + 1] = area[j] + (gain[j] if j > 0 else ((gain[j] * up) >> LEAD_BITS) + 1)

    return pays


@njit
def _level(phase: Ints, level: int) -> tuple[int, int]:
    """Return a multiplier over h in units of 2**-44, and what all batches pay at it."""
    nu = min(phase[0] * level // 1000, (1 << 37) - 1) << 24
    pays, wide = times(nu, phase[8]), phase[9]
    return nu, min(pays >> wide if wide >= 0 else min(pays, NEVER >> -wide) << -wide, NEVER >> 2)


@njit
def _end_prefill(w: Ints, levels: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Find the least that the prefill pays if it ends in each cell, and its slope."""
    gain, area, ahead, slope = w[0], w[1], w[2], w[3]
    _charge(w, ends, request, market, span)
    for k in range(len(levels)):
        pays = _integrate(w, levels[k], ends, request, market, span)
        for j in range(span):
            value, s = pays - area[j + 1], gain[j]
            if j < request[4]:
                value, s = NEVER, 0
            elif value <= 0:
                value, s = 0, 0

            if k == 0 or value > ahead[j]:
                ahead[j], slope[j] = value, s


@njit
def _end_steps(w: Ints, levels: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Find the least that prefill and steps pay if they end in each cell, and its slope."""
    gain, area, ahead, slope = w[0], w[1], w[2], w[3]
    after, slope_after, cheapest, queue, key = w[4], w[5], w[6], w[7], w[8]
    up, first_end, apart, extra = request[2], request[5], request[6], request[8]
    _charge(w, ends, request, market, span)

    for k in range(len(levels)):
        pays = _integrate(w, levels[k], ends, request, market, span)
        head = tail = 0
        last = free = -1  # the last start that leaves enough time, and that makes the steps free

        for j in range(span):
            while last < j and (last < 0 or last + 1 <= j + 1 - apart):
                last += 1
                if ahead[last] == NEVER:
                    continue

                less = max(0, gain[last] - slope[last])
                if last == 0:
                    less = ((less * up) >> LEAD_BITS) + 1

                value = ahead[last] + area[last + 1] - less
                while tail > head and key[tail - 1] >= value:
                    tail -= 1

                queue[tail], key[tail] = last, value
                tail += 1

            while free < last and pays <= area[j + 1] - area[free + 1]:
                free += 1
            while tail > head and queue[head] <= free:
                head += 1

            nothing = ahead[free] if free >= 0 else NEVER
            some = key[head] + pays - area[j + 1] if tail > head else NEVER
            if j < first_end:
                value, s = NEVER, 0
            elif some < nothing:
                value, s = some, min(gain[j], nothing - some)
            else:
                value, s = nothing, 0

            if value < NEVER:
                value += (extra * cheapest[j]) >> 16
            if k == 0 or value > after[j]:
                after[j], slope_after[j] = value, s


@njit
def path_costs(requests: Ints, phases: Ints, levels: Ints, market: Any, allowed: int) -> Any:
    """Return the least cost of the path of each request, in units of 2**-26 cells, and the steps.

    A row of ``requests`` has the cell of the arrival; what is left of it in units of 2**-18 cells,
    rounded down and up; the same in units of cost, rounded down; the first cells in which the
    prefill and all steps can end; the cells between the ends of the two; the least cost, which is
    the time of all batches; own work of later steps; the number of steps; the cells to begin with;
    where its shares begin, and how many there are. `optsched.bounds.checker.shares` describes
    ``phases``, of the prefill, of the first step and, where multipliers rise, of the last step.
    ``levels`` are multipliers in thousandths of the one of a phase. ``market`` has p2, p3, the root
    of p2, shares, and the bits of a price after the point. Once there were more than ``allowed``
    steps, nothing more is found.
    """
    found = np.zeros(len(requests), np.int64)
    window = np.empty((13, WINDOW + 1), np.int64)
    cheapest, p2, p3, taken = window[6], market[0], market[1], 0

    for i in range(len(requests)):
        request = requests[i]
        cell, down, lead, alone, steps = request[0], request[1], request[3], request[7], request[9]
        span = min(WINDOW, request[10])

        while True:
            taken += phases.shape[1] * span * len(levels)
            if taken > allowed:
                return found, taken

            lowest = NEVER
            for j in range(span):
                lowest = min(lowest, p2[cell + j] + p3[cell + j] if cell + j < len(p2) else 0)
                cheapest[j] = lowest

            _end_prefill(window, levels, phases[i, :1], request, market, span)
            if steps > 0:
                _end_steps(window, levels, phases[i, 1:], request, market, span)

            pays, slopes = (window[4], window[5]) if steps > 0 else (window[2], window[3])
            best = NEVER
            for j in range(span):
                early = lead + ((j - 1) << UNIT_BITS) if j > 0 else 0
                if early >= best:
                    break
                if pays[j] < NEVER:
                    rest = min(1 << UNIT_BITS, slopes[j])
                    if j == 0:
                        rest = (rest * down) >> LEAD_BITS

                    best = min(best, pays[j] + max(alone, early + rest))

            beyond = lead + ((span - 1) << UNIT_BITS)
            if beyond >= best or span == WINDOW:
                break

            span = min(WINDOW, 2 * span)

        found[i] = min(best, beyond)

    return found, taken
