"""Compiled loops of the checker, in 64-bit integers. Callers show first that none can overflow.

`path_costs` and what it calls have the letters of the proof in `optsched.bounds.checker.shares`: nu
is a multiplier; g bounds what a path is paid back of it per unit of time; w is own work and f the
fixed cost of its batch; h is f, or w where f is 0, and with classes the shortest length of a batch;
mu is a request's part of a cell's shares. V(j) is what is paid at least up to an end in cell j, and
s(j) by how much more an end costs per cell that it comes before the end of j. "proof" in a comment
means that text, and for `min_costs` the proof of prices of machine time in docs/formulations.md.

Rows of integers, by place. Cost is in units of 2**-26 cells.

- A *request*: 0 the cell of its arrival; 1, 2 what is left of that cell, in units of 2**-18 cells,
  rounded down and up; 3 the same in units of cost, rounded down; 4, 5 the first cells in which the
  prefill and all steps can end; 6 the cells between these two ends; 7 the time of all batches, in
  units of cost; 8 what the growth of own work pays per unit of a price, with 16 bits more; 9 the
  number of steps; 10 the cells to begin with; 11, 12 where its shares begin, and how many they are.
- A *phase* (prefill, first step, perhaps last step): `shares._phase` lists its 10 integers. Behind
  them are two for each class of batches, if there are any (`_fill_class_gains`).
- The *market*: by cell the prices p2 and p3 and the root of p2; the shares of all requests
  (`portions`), and the bits of a price after the point.
- The *memory* w, a row by cell from that of the arrival on: 0 g; 1 its integral; 2, 3 V and s of
  the prefill; 4, 5 V and s of all; 6 the least price so far; 7, 8 a queue of starts and their keys;
  9, 10 what p3 takes off, and the root of p2 w / h, for the first phase that is looked at; 11, 12
  the same for the second one. Of the cells ``span`` are in use.
- ``levels`` are the multipliers that are tried, in thousandths of a phase's.
"""

from typing import Any

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.problem.kernel import njit

NEVER = 1 << 62
"""The cost of what cannot be."""
TOGETHER = 32
"""Cells that are passed over at once where none of them can cost less."""


@njit
def min_costs(ends: Ints, p1: Ints, p2: Ints, root: Ints) -> Ints:
    """Return the min cost of each row of ``ends`` over the moments from its first one on.

    A row has ``cell``, that of its first moment; ``wait`` and ``step``, the cost of waiting until
    that cell ends and of every further cell; and three rates, what it pays per unit of ``p1``,
    ``p2`` and ``root``. Up to the price ``turn`` of p2 it pays ``floor`` and ``low_rate`` per unit
    of ``p2`` in place of the last two; beyond at least ``floor``, which is due at any moment.
    Beyond the last cell nothing but that and the waiting is due. While it is compared, the waiting
    is at most the best cost plus one cell. Prices are constant in a cell, so a cell costs least as
    it begins: ``waited`` is the waiting until then, and ``wait`` that until its end. ``best``
    leaves out ``floor``.
    """
    costs = np.empty(len(ends), np.int64)
    cells = len(p1)
    low1, low2, low_root = _block_minima(p1), _block_minima(p2), _block_minima(root)
    for row in range(len(ends)):
        cell, wait, step, rate1, rate2, rate3, floor, low_rate, turn = ends[row]
        best, waited = NEVER, 0
        # Every later moment costs its waiting at least, so the search ends once that is no less
        # than the best cost (proof, Independent minima).
        while waited < best:
            # Behind all cells prices are 0.
            if cell >= cells:
                best = waited
                break

            # At the lowest prices of a block, and with the waiting to its first cell, all of its
            # cells cost at least so much: if that is no better, the block is passed over. The size
            # of a step is such that the sum stays below 2**62.
            if cell % TOGETHER == 0 and cell + TOGETHER <= cells and step < NEVER // 4 // TOGETHER:
                block = cell // TOGETHER
                payment = max(0, low2[block] * rate2 + low_root[block] * rate3 - floor)
                if low2[block] <= turn:
                    payment = min(payment, low2[block] * low_rate)
                if waited + low1[block] * rate1 + payment >= best:
                    # The first cell ends at ``wait``, and each of the others a step later.
                    waited = wait + (TOGETHER - 1) * step
                    wait = waited + step
                    cell += TOGETHER
                    continue

            p = p2[cell]
            payment = p * low_rate if p <= turn else max(0, p * rate2 + root[cell] * rate3 - floor)
            best = min(best, waited + p1[cell] * rate1 + payment)
            waited, wait = wait, wait + step
            cell += 1

        costs[row] = floor + best

    return costs


@njit
def _block_minima(values: Ints) -> Ints:
    """Return the min of each block of `TOGETHER` cells; the last cells may fill no block."""
    lowest = np.empty(len(values) // TOGETHER, np.int64)
    for block in range(len(lowest)):
        lowest[block] = values[block * TOGETHER]
        for k in range(block * TOGETHER + 1, (block + 1) * TOGETHER):
            lowest[block] = min(lowest[block], values[k])

    return lowest


@njit
def min_class_costs(ends: Ints, paid: Ints, fixed: Ints, price: Ints) -> Ints:
    """Return the min cost of each row of ``ends`` over classes and moments from its first one on.

    A row is the cell of its first moment, the cost of waiting until that cell ends, and of every
    further cell. Class b pays ``paid[row, b]`` per unit of ``price``, and ``fixed[row, b]``. Beyond
    the last cell only waiting and ``fixed`` cost.
    """
    costs = np.empty(len(ends), np.int64)
    cells, classes = len(price), paid.shape[1]
    for row in range(len(ends)):
        cell, next_wait, step = ends[row]
        min_fixed = fixed[row].min()
        wait, best = 0, NEVER

        # Every later moment costs its waiting and the min of ``fixed`` at least.
        while wait + min_fixed < best:
            if cell >= cells:
                best = wait + min_fixed
                break

            for b in range(classes):
                best = min(best, wait + price[cell] * paid[row, b] + fixed[row, b])

            wait += next_wait
            next_wait = step
            cell += 1

        costs[row] = best

    return costs


WINDOW = 1 << 15
"""Max cells after its arrival that a request's path extends over. Beyond, only time counts."""
UNIT_BITS = 26
"""Costs of paths are in units of 2**-26 cells."""
LEAD_BITS = 18
"""What is left of the first cell is in units of 2**-18 cells, rounded down and up."""
PHASE = 10
"""Integers of a phase before the two of each of its classes of batches, if it has any."""


@njit
def portions(weight: Ints, begin: Ints, cell: Ints, cells: int) -> Ints:
    """Return each request's part of the weights of a cell, in units of 2**-30.

    There are ``cells`` cells. The weights of request i are ``weight[begin[i] : begin[i + 1]]``, for
    cells from ``cell[i]`` on. They are below 2**21, and fewer than 2**31, so sums are below 2**52.
    Beyond the last cell the part is 0. Parts are rounded down, so those of a cell sum to 1 at most.
    """
    total, parts = np.zeros(cells, np.int64), np.zeros(len(weight), np.int64)
    for i in range(len(cell)):
        for at in range(begin[i], min(begin[i + 1], begin[i] + cells - cell[i])):
            # Requests share a cell by its number, whatever their own first cells are.
            total[cell[i] + at - begin[i]] += weight[at]

    for i in range(len(cell)):
        for at in range(begin[i], min(begin[i + 1], begin[i] + cells - cell[i])):
            parts[at] = (weight[at] << 30) // max(total[cell[i] + at - begin[i]], 1)

    return parts


@njit
def times(x: int, c: int) -> int:
    """Return x c / 2**30, rounded down, for x < 2**61 and c <= 2**30.

    The product may exceed 64 bits, so the high and the low 30 bits of x are multiplied apart.
    """
    return (x >> 30) * c + (((x & ((1 << 30) - 1)) * c) >> 30)


@njit
def root_above(x: int) -> int:
    """Return the root of 0 <= x < 2**61, rounded up. Floating point only says where to begin."""
    r = int(np.sqrt(float(x)))
    # The float may be off by a little on either side; integers decide.
    while r * r < x:
        r += 1
    while r > 0 and (r - 1) * (r - 1) >= x:
        r -= 1

    return r


@njit
def _fill_charges(w: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Fill in what p3 takes off nu / h in each cell, and the root of p2 w / h: rounded down.

    They get into rows 9 and 10 of the memory ``w`` for the first of ``ends``, a phase, and into 11
    and 12 for the second, if there is one. ``span`` is how many cells count, from that of the
    arrival on.
    """
    p2, p3, root, share, bits = market
    cell, begin, shares = request[0], request[11], request[12]
    # Classes of batches have charges of their own (`_fill_class_gains`), and no p3.
    if ends.shape[1] > PHASE:
        return

    for end in range(len(ends)):
        drop, toll, phase = w[9 + 2 * end], w[10 + 2 * end], ends[end]
        # w / h with ``fine`` bits, the bits by which mu is cut, and the root's factor and bits.
        work, fine, coarse, root_factor, cut = phase[1], phase[2], phase[3], phase[6], phase[7]
        # The product of price and share has bits + fine bits after the point, and nu / h has 44. It
        # is cut at `NEVER` before it is shifted up, so that it cannot overflow. nu / h is below
        # that (`_multiplier_at`), so a product that is cut leaves nothing of it, as the whole one
        # would.
        shift = 44 - bits - fine

        for j in range(span):
            drop[j] = toll[j] = 0
            if cell + j < len(p2):
                mu = share[begin + j] >> coarse if j < shares else 0
                charge = p3[cell + j] * (work + mu)
                drop[j] = min(charge, NEVER >> shift) << shift if shift >= 0 else charge >> -shift
                toll[j] = (root[cell + j] * root_factor) >> cut


@njit
def _fill_class_gains(gain: Ints, phase: Ints, nu: int, cell: int, market: Any, span: int) -> None:
    """Fill in upper bounds on g, the max of (nu - p2 c) / lo over the classes of a phase.

    c is a class's charge, and lo the least length of its batches. ``gain`` receives the bounds by
    cell, from the arrival's (``cell``) on, ``span`` of them.

    Behind its first ten integers a phase has c / h of each class in units of 2**-fine, rounded
    down, and h / lo in units of 2**-30, rounded up. ``nu`` is nu / h in units of 2**-44, and g is
    in units of 2**-26: hence a shift by 18, and 1 more for rounding up. g is 0 at least.
    """
    p2, bits, fine = market[0], market[4], phase[2]
    # A price has ``bits`` bits after the point, so p2 c / h has bits + fine, and gets the 44 of nu.
    shift = 44 - bits - fine
    for j in range(span):
        # Beyond the last cell prices are 0.
        p, highest = p2[cell + j] if cell + j < len(p2) else 0, 0
        for at in range(PHASE, len(phase), 2):
            charge = p * phase[at]
            # It is cut at `NEVER` before it is shifted up, so that it cannot overflow. No nu is as
            # large as that, so a charge that is cut leaves nothing, as the whole one would.
            charge = min(charge, NEVER >> shift) << shift if shift >= 0 else charge >> -shift
            if nu > charge:
                highest = max(highest, (times(nu - charge, phase[at + 1]) >> 18) + 1)

        gain[j] = highest


@njit
def _integrate_gains(w: Ints, level: int, ends: Ints, request: Ints, market: Any, span: int) -> int:
    """Fill in upper bounds on g, and on its integral from the arrival to each cell's end.

    They are rows 0 and 1 of the memory ``w``. ``ends`` are the first and the last batch of a phase,
    or one where all are alike: the larger g of the two does for all (proof, Multipliers that rise).
    ``level`` is the multiplier, in thousandths of a phase's. ``area[j]`` is the integral up to the
    begin of cell j, ``area[j + 1]`` that to its end. Returns what all its batches pay, without g.
    """
    gain, area, p2, bits = w[0], w[1], market[0], market[4]
    cell, up, payment = request[0], request[2], 0
    gain[:span] = 0

    for end in range(len(ends)):
        # ``drop`` is what p3 takes off nu / h, and ``toll`` the root of p2 w / h (`_fill_charges`).
        drop, toll, below, slope = w[9 + 2 * end], w[10 + 2 * end], ends[end, 4], ends[end, 5]
        nu, paid = _multiplier_at(ends[end], level)
        # Multipliers rise evenly, so all batches pay the mean of the first and the last one's.
        payment += paid // len(ends)
        if ends.shape[1] > PHASE:
            _fill_class_gains(gain, ends[end], nu, cell, market, span)
            continue

        for j in range(span):
            net = nu - drop[j]
            if net > 0:
                p = p2[cell + j] if cell + j < len(p2) else 0
                # ``net`` is nu' / h, ``below`` h w / (f + w)^2 and ``slope`` h / (f + w). Where
                # p2 (f + w)^2 <= nu' w the best T is f + w, and else g has the root form (proof, A
                # path). Both are rounded up, since g bounds what a path is paid back. Shifts by 18
                # are from the 44 bits of nu' / h to the 26 of g.
                if p <= times(net, below) >> (44 - bits):
                    g = max(0, (times(net, slope) >> 18) + 1 - (p << (UNIT_BITS - bits)))
                else:
                    roots = root_above(net) - toll[j]
                    g = ((roots * roots) >> 18) + 1 if roots > 0 else 0

                gain[j] = max(gain[j], g)

    area[0] = 0
    for j in range(span):
        # Only part of the first cell lies after the arrival: rounded up, as g is.
        area[j + 1] = area[j] + (gain[j] if j > 0 else ((gain[j] * up) >> LEAD_BITS) + 1)

    return payment


@njit
def _multiplier_at(phase: Ints, level: int) -> tuple[int, int]:
    """Return a multiplier over h in units of 2**-44, and what all batches pay at it.

    What they pay is in units of 2**-26 cells, and cut to a quarter of `NEVER`, so that sums of it
    and of others stay below 2**62.
    """
    # The phase's own multiplier has 20 bits after the point, and 24 are added. By the time of all
    # batches (`shares._phase`, 8 and 9) it becomes what they pay.
    nu = min(phase[0] * level // 1000, (1 << 37) - 1) << 24
    pays, bits = times(nu, phase[8]), phase[9]
    return nu, min(pays >> bits if bits >= 0 else min(pays, NEVER >> -bits) << -bits, NEVER >> 2)


@njit
def _end_prefill(w: Ints, levels: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Fill in V and s of the prefill: the min that it pays for an end in each cell.

    They are rows 2 and 3 of the memory ``w``. Each multiplier is a lower bound, so V is the largest
    over ``levels``, and s that of the same. ``ends`` is the prefill's phase.
    """
    gain, area, ahead, slope = w[0], w[1], w[2], w[3]
    _fill_charges(w, ends, request, market, span)
    for k in range(len(levels)):
        payment = _integrate_gains(w, levels[k], ends, request, market, span)
        for j in range(span):
            value, slope_here = payment - area[j + 1], gain[j]
            # No prefill ends before its batches can, alone (``request[4]`` is the first cell where
            # it may); and no multiplier proves less than nothing.
            if j < request[4]:
                value, slope_here = NEVER, 0
            elif value <= 0:
                value, slope_here = 0, 0

            if k == 0 or value > ahead[j]:
                ahead[j], slope[j] = value, slope_here


@njit
def _end_steps(w: Ints, levels: Ints, ends: Ints, request: Ints, market: Any, span: int) -> None:
    """Fill in V and s of prefill and steps: the min that they pay for an end in each cell.

    They are rows 4 and 5 of the memory ``w``, and those of the prefill alone are there in rows 2
    and 3. Starts of the steps are where the prefill ends. For an end in cell j the cost of a start
    is what it enters with (``key``), plus what the steps pay, less the integral of g up to j's end,
    or V alone where that integral is all of what they would pay (*free*). ``queue`` has the starts
    that can still be best, by cell, with ascending keys.
    """
    gain, area, ahead, slope = w[0], w[1], w[2], w[3]
    after, slope_after, cheapest, queue, key = w[4], w[5], w[6], w[7], w[8]
    up, first_end, apart, extra = request[2], request[5], request[6], request[8]
    _fill_charges(w, ends, request, market, span)

    for k in range(len(levels)):
        payment = _integrate_gains(w, levels[k], ends, request, market, span)
        head = tail = 0
        start = free = -1

        for j in range(span):
            # Every start in a cell j' that leaves time for the steps (j - j' + 1 is ``apart`` or
            # more) enters once: V(j') and int g to the end of j', less what a start within the
            # cell saves (proof, Cells).
            while start < j and (start < 0 or start + 1 <= j + 1 - apart):
                start += 1
                if ahead[start] == NEVER:
                    continue

                saved = max(0, gain[start] - slope[start])
                # Of the first cell only what lies after the arrival, rounded up.
                if start == 0:
                    saved = ((saved * up) >> LEAD_BITS) + 1

                value = ahead[start] + area[start + 1] - saved
                # Starts leave at the front only, in order, so an earlier one that costs no less is
                # never best again.
                while tail > head and key[tail - 1] >= value:
                    tail -= 1

                queue[tail], key[tail] = start, value
                tail += 1

            # From these starts on the integral of g is all that the steps would pay, at later ends,
            # too.
            while free < start and payment <= area[j + 1] - area[free + 1]:
                free += 1
            while tail > head and queue[head] <= free:
                head += 1

            # V falls, so the last of the free starts costs least.
            free_cost = ahead[free] if free >= 0 else NEVER
            paid_cost = key[head] + payment - area[j + 1] if tail > head else NEVER
            # No request ends before all its batches can, alone.
            if j < first_end:
                value, slope_here = NEVER, 0
            elif paid_cost < free_cost:
                # An end before the cell's end pays more, but no more than with a free start.
                value, slope_here = paid_cost, min(gain[j], free_cost - paid_cost)
            else:
                value, slope_here = free_cost, 0

            if value < NEVER:
                # ``extra`` has 16 more bits than a cost (`shares._row_of`).
                value += (extra * cheapest[j]) >> 16
            if k == 0 or value > after[j]:
                after[j], slope_after[j] = value, slope_here


@njit
def path_costs(requests: Ints, phases: Ints, levels: Ints, market: Any, allowed: int) -> Any:
    """Return the min cost of the path of each request, in units of 2**-26 cells, and the steps.

    The module's text has the rows of ``requests`` and ``phases`` and the parts of ``market``. By
    request, ``phases`` are of the prefill, of the first step and, where multipliers rise, of the
    last step; the leaf ``class-paths`` has a prefill and equal steps. Once there were more than
    ``allowed`` steps, nothing more is found.
    """
    costs = np.zeros(len(requests), np.int64)
    # The memory of the module's text, which all requests use in turn.
    window = np.empty((13, WINDOW + 1), np.int64)
    cheapest, p2, p3, spent = window[6], market[0], market[1], 0

    for i in range(len(requests)):
        request = requests[i]
        cell, down, lead, alone, steps = request[0], request[1], request[3], request[7], request[9]
        span = min(WINDOW, request[10])

        while True:
            # Each phase looks at each cell at each level, and in each of its classes if it has any.
            spent += phases.shape[1] * span * len(levels) * max(1, (phases.shape[2] - PHASE) // 2)
            # A budget spent is an error for the caller, and what was found so far proves nothing.
            if spent > allowed:
                return costs, spent

            # Later steps pay for the growth of their own work at the min price since the arrival.
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
                earliest = lead + ((j - 1) << UNIT_BITS) if j > 0 else 0
                # An end costs its latency at least: ``earliest`` in this cell, and more later.
                if earliest >= best:
                    break
                if pays[j] < NEVER:
                    # An end x cells before the cell's end waits x less and pays at least s x more.
                    wait = min(1 << UNIT_BITS, slopes[j])
                    if j == 0:
                        wait = (wait * down) >> LEAD_BITS

                    best = min(best, pays[j] + max(alone, earliest + wait))

            # An end beyond the window costs its latency at least. If that is no less than the best
            # cost, or the window cannot be longer, the search is over.
            beyond = lead + ((span - 1) << UNIT_BITS)
            if beyond >= best or span == WINDOW:
                break

            span = min(WINDOW, 2 * span)

        costs[i] = min(best, beyond)

    return costs, spent
