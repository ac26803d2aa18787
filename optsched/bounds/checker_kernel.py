"""Compiled loops of the checker, in 64-bit integers. Callers show first that none can overflow."""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.problem.kernel import njit


@njit
def least_costs(ends: Any, p1: Any, p2: Any, root: Any) -> Any:
    """Return the least cost of each row of ``ends`` over the moments from its first one on.

    A row has the cell of its first moment, the cost of waiting until that cell ends and of every
    further cell, and what it pays per unit of ``p1``, ``p2`` and ``root``. Beyond the last cell
    only waiting costs. While it is compared, the waiting is at most the best cost plus one cell.
    """
    found = np.empty(len(ends), np.int64)
    cells = len(p1)
    for row in range(len(ends)):
        cell, wait, every, l1, l2, r = ends[row]
        if cell >= cells:
            found[row] = 0
            continue
        best = p1[cell] * l1 + p2[cell] * l2 + root[cell] * r
        cell += 1
        while wait < best:
            if cell >= cells:
                best = wait
                break
            best = min(best, wait + p1[cell] * l1 + p2[cell] * l2 + root[cell] * r)
            wait += every
            cell += 1
        found[row] = best
    return found


WINDOW = 1 << 15
"""Max cells after its arrival that a request's path extends over. Beyond, only time counts."""
UNIT_BITS = 26
"""Costs of paths are in units of 2**-26 cells."""
LEAD_BITS = 18
"""The part of the first cell that is left is in units of 2**-18 cells, rounded down and up."""
NEVER = 1 << 62
"""The cost of what cannot be."""


@njit
def _integrate(gain: Any, area: Any, level: Any, request: Any, prices: Any, span: int) -> None:
    """Fill in upper bounds on g, and on its integral from the arrival to each cell's end."""
    price, root, bits = prices
    low, high, lead, at_low, base, rise, fall, fine = level[:8]
    cell, up = request[0], request[2]
    area[0] = 0
    for j in range(span):
        p = price[cell + j] if cell + j < len(price) else 0
        if p >= high:
            g = 0
        elif p <= low:
            g = max(0, at_low - (p << (UNIT_BITS - bits)))
        else:
            g = base + rise * p - fall * root[cell + j]
            g = min(max(0, (g >> fine) + 1), lead)
        gain[j] = g
        area[j + 1] = area[j] + (g if j > 0 else ((g * up) >> LEAD_BITS) + 1)


@njit
def _end_prefill(window: Any, levels: Any, request: Any, prices: Any, span: int) -> None:
    """Find the least that the prefill pays if it ends in each cell, and its slope."""
    gain, area, ahead, slope = window[:4]
    for k in range(len(levels)):
        _integrate(gain, area, levels[k], request, prices, span)
        pays = levels[k, 8]
        for j in range(span):
            value, s = pays - area[j + 1], gain[j]
            if j < request[4]:
                value, s = NEVER, 0
            elif value <= 0:
                value, s = 0, 0
            if k == 0 or value > ahead[j]:
                ahead[j], slope[j] = value, s


@njit
def _end_steps(window: Any, levels: Any, request: Any, prices: Any, span: int) -> None:
    """Find the least that prefill and steps pay if they end in each cell, and its slope."""
    gain, area, ahead, slope, after, slope_after, least, queue, key = window
    up, first_end, apart, extra = request[2], request[5], request[6], request[8]
    for k in range(len(levels)):
        _integrate(gain, area, levels[k], request, prices, span)
        pays = levels[k, 8]
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
                value += (extra * least[j]) >> 16
            if k == 0 or value > after[j]:
                after[j], slope_after[j] = value, s


@njit
def path_costs(requests: Any, levels: Any, price: Any, root: Any, bits: int) -> Any:
    """Return the least cost of the path of each request, in units of 2**-26 cells.

    A row of ``requests`` has the cell of the arrival; what is left of it in units of 2**-18 cells,
    rounded down and up; the same in units of cost, rounded down; the first cells in which the
    prefill and all steps can end; the cells between the ends of the two; the least cost, which is
    the time of all batches; own work of later steps; the number of steps; and the cells to begin
    with. A row of ``levels`` is described at `optsched.bounds.checker_paths`.
    """
    found = np.empty(len(requests), np.int64)
    window = (
        np.empty(WINDOW, np.int64), np.empty(WINDOW + 1, np.int64), np.empty(WINDOW, np.int64),
        np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64),
        np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64), np.empty(WINDOW, np.int64),
    )  # fmt: skip
    least = window[6]
    prices = (price, root, bits)
    for i in range(len(requests)):
        request = requests[i]
        cell, down, lead, alone, steps = request[0], request[1], request[3], request[7], request[9]
        span = min(WINDOW, request[10])
        while True:
            lowest = NEVER
            for j in range(span):
                lowest = min(lowest, price[cell + j] if cell + j < len(price) else 0)
                least[j] = lowest
            _end_prefill(window, levels[i, 0], request, prices, span)
            if steps > 0:
                _end_steps(window, levels[i, 1], request, prices, span)
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
    return found
