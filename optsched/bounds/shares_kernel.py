"""Compiled loops of `optsched.bounds.shares`, in the notation of `optsched.bounds.checker.shares`.

A batch of a request lasts T, of which f is the fixed cost and w or more own work, the request's
being w. It pays p3 (w + mu f) in all, mu being the request's share of fixed costs in the cell, and
p2 w / (T - f) per unit of time. A multiplier nu says that a batch pays at least nu less the
integral over it of g, which is 0 or, if that is more,

    g = max over T >= f + w of nu' / T - p2 w / (T - f),    nu' = nu - p3 (w + mu f).

V is the least that is paid up to the end of a cell, and s its slope: who ends x seconds before
that pays V + s x or more. Comments name the paragraphs of the checker's proof in parentheses.

In loops i is a request, c a cell of time, j one counted from that of the request's arrival (c - c0)
and k the level of a multiplier. A loop over two ends goes over the first batch of a phase and its
last one, and one over two steps over the phases: 0 is the prefill, 1 are the steps. Of a window the
first ``span`` cells are used, and of its first cell the ``lead`` seconds from the arrival on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.busy_time import Floats, Tokens, cell_at
from optsched.problem.kernel import njit

WINDOW = 1 << 15
"""Max cells after its arrival that a request's path extends over. Beyond, only time counts."""
SLACK = 4.0 * WINDOW * 2.0**-52
"""What rounding may take off an integral over a window: so little is paid for nothing."""
# What sums of shares stay below 1 by, the least mean use that a request's use is compared with, and
# the most that a share's logarithm changes by, in steps.
_SAFETY, _LEAST_USE, _FASTEST = 1e-9, 0.02, 3.0


@njit
def _best_density(root_nu: float, work: float, fixed: float, root_toll: float) -> float:
    """Return w / (T - f) at the best batch length T: how densely own work fills the batch.

    The fixed cost f takes no part in it, so this is what a path charges p2 for per unit of time.
    ``root_nu`` and ``root_toll`` are the roots of nu' and of p2 w.
    """
    # Where p2 w >= nu' no batch gains anything (proof: g is 0), so the path waits.
    if work <= 0 or root_toll >= root_nu:
        return 0.0
    # The best T > f of nu' / T - p2 w / (T - f) has (T - f) / T = root(p2 w / nu'), but a batch
    # lasts f + w at least (proof, A path).
    if fixed > 0 and root_toll * (fixed + work) >= root_nu * work:
        share = root_toll / root_nu
        return work * (1 - share) / (fixed * share)

    # The best is the shortest batch, T = f + w.
    return 1.0


@njit
def _steady_nu(work: float, fixed: float, price: float) -> float:
    """Return the multiplier at a steady price: the least that a batch takes and pays.

    That is the min over T >= f + w of T + price w T / (T - f).
    """
    # Without own work nothing is charged, and the shortest batch is the best.
    if work <= 0:
        return fixed

    # The min over all lengths is at root(price w f), and no batch is shorter than its own work.
    length = max(work, np.sqrt(price * work * fixed))
    return (fixed + length) * (1 + price * work / length)


class Shared(NamedTuple):
    """Prices under which requests share fixed costs: p3 and mu.

    ``price`` is p3 by cell. Request i, which arrives in cell c0, has the share
    ``share[begin[i] + c - c0]`` in cell c, up to the place before ``begin[i + 1]``. The shares of
    one cell have a sum of at most 1.
    """

    price: Floats
    begin: NDArray[np.int64]
    share: Floats


class Use(NamedTuple):
    """What the best paths use. Empty arrays are left as they are.

    The machine time that is charged under each of the two prices, as a share of each cell, and the
    fixed cost that requests sit through, as a share of the cell, by the index of `Shared.share`.
    """

    machine: Floats
    shared: Floats
    fixed: Floats


NO_USE = Use(np.zeros(0), np.zeros(0), np.zeros(0))


class Grid(NamedTuple):
    """Prices p2 on cells of so many seconds, their square roots, and the second price.

    ``rises``: whether multipliers rise from step to step. Otherwise later steps have that of the
    first, and pay for more own work at the lowest price.
    """

    width: float
    price: Floats
    roots: Floats
    shared: Shared
    rises: bool


class Window(NamedTuple):
    """Lower bounds on what one request pays, by cell j from that of its arrival (0) on.

    For a prefill that ends in the cell: V (``ahead``), s (``slope``) and the multiplier that gave
    them (``level``). For steps that end there: the same (``after``, ``slope_after``,
    ``level_after``), and ``begin``, the cell where they begin, or -1 - that cell if they pay
    nothing. ``soonest`` is the min cost of a prefill that ends in the cell or before, and
    ``cheapest`` the min price since the arrival. Of one multiplier, ``gains`` is g, and
    ``area[j]`` its integral from the arrival to the begin of cell j. ``queue`` has starts of the
    steps that may be best, and ``key`` what they cost. ``price`` is p2. ``root_toll``, the root of
    p2 w, and ``p3_charge`` have a row for the first and one for the last batch of a phase.
    """

    ahead: Floats
    slope: Floats
    soonest: Floats
    after: Floats
    slope_after: Floats
    level: NDArray[np.int64]
    level_after: NDArray[np.int64]
    begin: NDArray[np.int64]
    cheapest: Floats
    gains: Floats
    area: Floats
    queue: NDArray[np.int64]
    key: Floats
    price: Floats
    root_toll: Floats
    p3_charge: Floats


def new_window() -> Window:
    """Return empty arrays for the window of one request, which all requests use in turn."""
    numbers = {"level", "level_after", "begin", "queue"}
    kinds = {name: np.int64 if name in numbers else np.float64 for name in Window._fields}
    sizes = {"root_toll": (2, WINDOW + 1), "p3_charge": (2, WINDOW + 1)}
    return Window._make(np.empty(sizes.get(k, WINDOW + 1), kind) for k, kind in kinds.items())


class Phase(NamedTuple):
    """A prefill, or all steps, of one request under multipliers that rise from step to step.

    ``c0`` is the cell of the arrival and ``lead`` its length from there on; ``first`` and ``alone``
    are the times of the prefill's batches and of all batches, if the request were alone. ``nu`` and
    ``work`` are multipliers and own work of the first and of the last batch, and ``fixed`` is the
    fixed cost of each. So many ``batches`` are paid for: a prefill counts as one, in chunks, too.
    ``number`` is that of the request.
    """

    arrival: float
    c0: int
    lead: float
    first: float
    alone: float
    nu: tuple[float, float]
    work: tuple[float, float]
    fixed: float
    batches: float
    number: int


@njit
def _last_multiplier(nu: float, fixed: float, work: float, last_work: float) -> float:
    """Return the multiplier of the last step, at the steady price at which ``nu`` is the first's.

    It is a square: nu = (root(fixed) + root(price own))^2.
    """
    # Nothing grows, or ``nu`` is too small for any price above 0.
    if work <= 0 or last_work <= work or nu <= fixed:
        return nu

    root = np.sqrt(fixed)
    return (root + (np.sqrt(nu) - root) * np.sqrt(last_work / work)) ** 2


@njit
def _p3_charge(number: int, j: int, c: int, work: float, fixed: float, shared: Shared) -> float:
    """Return what p3 charges a batch in cell c, the j-th from the arrival: p3 (w + mu_i f).

    Prices behind the last cell are 0, and so are a request's shares behind its last one.
    """
    if c >= shared.price.shape[0]:
        return 0.0

    index = shared.begin[number] + j
    share = shared.share[index] if index < shared.begin[number + 1] else 0.0
    return shared.price[c] * (work + fixed * share)


@njit(forceinline=True)
def _fill_charges(window: Window, grid: Grid, phase: Phase, span: int) -> None:
    """Fill in what no multiplier of a phase changes: its prices, and what p3 charges.

    Of two rows, the first is for the phase's first batch, and the second for its last one. Behind
    the last cell of the grid all prices are 0.
    """
    cells = grid.price.shape[0]
    for j in range(span):
        c = phase.c0 + j
        window.price[j] = grid.price[c] if c < cells else 0.0

    for end in range(2):
        charges, tolls, work = window.p3_charge[end], window.root_toll[end], phase.work[end]
        for j in range(span):
            c = phase.c0 + j
            tolls[j] = grid.roots[c] * np.sqrt(work) if c < cells else 0.0
            charges[j] = _p3_charge(phase.number, j, c, work, phase.fixed, grid.shared)


@njit(forceinline=True, error_model="numpy")
def _integrate_gains(window: Window, grid: Grid, phase: Phase, span: int) -> None:
    """Fill in g of one multiplier, cell by cell, and its integral from the arrival on.

    These are ``gains`` and ``area`` of the window. Of it `_fill_charges` has filled in what is read
    here: prices, p3's charges, and ``root_toll``, the roots of p2 w.
    """
    gains, area, price, fixed = window.gains, window.area, window.price, phase.fixed
    gains[:span] = 0.0

    # If work does not grow, the first and the last batch are alike.
    for end in range(2 if phase.work[1] > phase.work[0] else 1):
        whole, work = phase.nu[end], phase.work[end]
        charges, tolls, shortest = window.p3_charge[end], window.root_toll[end], fixed + work
        # The larger g of the first and of the last step holds for all steps between (Multipliers
        # that rise). ``whole`` is nu of the phase, and ``nu`` below is nu', what p3 leaves of it.
        for j in range(span):  # without branches, so that it is done for several cells at once
            nu = max(0.0, whole - charges[j])
            root, paid = np.sqrt(nu), tolls[j]
            # The best T is f + w (``early``), or longer (``late``): the two cases of g in the proof
            # (A path). Where p2 w >= nu' g is 0.
            early = max(0.0, nu / shortest - price[j])
            late = (root - paid) ** 2 / fixed if fixed > 0 else 0.0
            g = late if fixed > 0 and paid * shortest >= root * work else early
            gains[j] = max(gains[j], 0.0 if paid >= root else g)

    area[0], area[1] = 0.0, gains[0] * phase.lead
    for j in range(1, span):
        area[j + 1] = area[j] + gains[j] * grid.width


@njit(forceinline=True)
def end_prefill(window: Window, width: float, phase: Phase, span: int, k: int) -> None:
    """Raise V and s of the prefill, for an end in each cell, to what the k-th multiplier proves.

    They are ``ahead`` and ``slope`` of the window, whose ``gains`` and ``area`` are those of this
    multiplier. The first one (k = 0) overwrites what is there of the request before.
    """
    ahead, slope, gains, area = window.ahead, window.slope, window.gains, window.area
    payment = phase.nu[0] * phase.batches
    for j in range(span):
        # No prefill ends before the time that its batches take alone. What rounding may have added
        # is taken off (SLACK). Where V would be below 0 it is 0, which the multiplier 0 proves.
        if (phase.c0 + j + 1) * width - phase.arrival < phase.first:
            value, s = np.inf, 0.0
        else:
            value, s = payment - area[j + 1], gains[j]
            value -= SLACK * (payment + area[j + 1])
            if value <= 0:
                value, s = 0.0, 0.0

        if k == 0 or value > ahead[j]:
            ahead[j], slope[j], window.level[j] = value, s, k


@njit(forceinline=True)
def find_soonest(window: Window, span: int) -> None:
    """Fill in the min cost of a prefill that ends in or before each cell, for `end_steps`."""
    cheapest = np.inf
    for j in range(span):
        cheapest = min(cheapest, window.ahead[j])
        window.soonest[j] = cheapest


@njit(forceinline=True)
def end_steps(window: Window, width: float, phase: Phase, extra: float, span: int, k: int) -> None:
    """Raise V and s of the steps, for an end in each cell, to what the k-th multiplier proves.

    They are ``after`` and ``slope_after`` of the window. ``extra`` own work is paid at the lowest
    price. ``start`` is the last cell that leaves enough time for the steps, and ``free`` the last
    one from which they pay nothing; -1: none yet. From the starts between, a queue keeps those that
    may be best, by ascending cost, so that the whole takes linear time: ``queue[head:tail]``. The
    first multiplier (k = 0) overwrites what is there of the request before.
    """
    ahead, after, gains, area = window.ahead, window.after, window.gains, window.area
    queue, key = window.queue, window.key
    # Multipliers rise by as much from each step to the next, so this is their sum over all steps.
    payment = (phase.nu[0] + phase.nu[1]) / 2 * phase.batches
    c0, lead, alone = phase.c0, phase.lead, phase.alone
    head = tail = 0
    start = free = -1

    for j in range(span):
        end = (c0 + j + 1) * width
        # Every start that leaves time for the steps enters once, with V(j') + int g up to the end
        # of j' less what a start inside the cell saves (proof, Cells). The begin of a cell decides
        # whether a start in it leaves time, and the arrival's cell always enters.
        while start < j and (start < 0 or (c0 + start + 1) * width <= end - (alone - phase.first)):
            start += 1
            value = ahead[start] + area[start + 1]
            value -= max(0.0, gains[start] - window.slope[start]) * (width if start > 0 else lead)
            # An earlier start that costs no less is never better again: starts only leave at the
            # front.
            while tail > head and key[tail - 1] >= value:
                tail -= 1

            queue[tail], key[tail] = start, value
            tail += 1

        # Rounding may have raised the integral of g by so much, and a bound may only be too small.
        slack = SLACK * (payment + area[j + 1])
        # The integral of g between start and end is all that the multiplier pays: steps are free
        # for starts up to here, at any later end too, and so they leave the queue.
        while free < start and payment - slack <= area[j + 1] - area[free + 1]:
            free += 1
        while tail > head and queue[head] <= free:
            head += 1

        # The best start whose steps are free, and the best of the others, the head of the queue.
        free_cost = window.soonest[free] if free >= 0 else np.inf
        paid_cost = np.inf
        if tail > head:
            paid_cost = key[head] + payment - area[j + 1] - slack
        # No request ends before the time that all its batches take alone.
        if end - phase.arrival < alone:
            value, slope, begin = np.inf, 0.0, 0
        elif paid_cost < free_cost:
            value, begin = paid_cost, queue[head]
            # An end earlier in the cell pays g more for each moment, but no more than free steps.
            slope = min(gains[j], (free_cost - paid_cost) / (width if j > 0 else lead))
        else:
            value, slope, begin = free_cost, 0.0, -1 - free

        value += extra * window.cheapest[j]
        if k == 0 or value > after[j]:
            after[j], window.slope_after[j], window.level_after[j] = value, slope, k
            window.begin[j] = begin


@njit(forceinline=True)
def best_end(
    window: Window, width: float, phase: Phase, steps: float, span: int
) -> tuple[float, int]:
    """Return the cost of the best end, and its cell, or -1 if no end is in the window.

    The cost is what is paid up to the end and the latency, as in the proof (Cells). Without
    ``steps``, tokens after the first, the path ends with the prefill.
    """
    arrival, c0 = phase.arrival, phase.c0
    after, ahead = (window.after, window.slope_after), (window.ahead, window.slope)
    pays, slopes = after if steps > 0 else ahead
    best, cell = np.inf, -1
    for j in range(span):
        earliest = max(0.0, (c0 + j) * width - arrival)
        # Later ends pay at least their latency, which is no less than the best cost.
        if earliest >= best:
            break

        length = width if j > 0 else phase.lead
        # From the end of the cell back, the latency falls by 1 and the payment rises by s. So the
        # best end of the cell is its last moment if s > 1, else its first one.
        value = pays[j] + max(phase.alone, earliest + min(1.0, slopes[j]) * length)
        if value < best:
            best, cell = value, j

    return best, cell


@njit(nogil=True)
def costs_of_paths(
    tokens: Tokens,
    chain: Floats,
    grid: Grid,
    window: Window,
    levels: Floats,
    centre: Floats,
    use: Use,
) -> float:
    """Return the sum of the min costs of all requests.

    `centre` (shape (n, 2), or (0, 2) for none): multipliers for the prefill and for the steps of
    each request, of which ``levels`` are multiples. It receives the best ones. Without it, or where
    it is 0, multipliers are those of a steady price, ``levels`` times the mean in the window.
    `chain` has the time of all batches of each request alone, and what best paths use is added to
    `use`. `window` is scratch for one request after another.
    """
    width, price, shared = grid.width, grid.price, grid.shared
    cells = price.shape[0]
    whole = price + shared.price  # p2 + p3
    # Multipliers by level: of the prefill, of the first step and of the last one.
    nus = np.empty((3, levels.shape[0]))
    total = 0.0

    for i in range(tokens.arrival.shape[0]):
        arrival, steps, alone, first = tokens.arrival[i], tokens.steps[i], chain[i], tokens.first[i]
        work, fixed = tokens.work[i], (tokens.prefill_fixed, tokens.decode)
        # What own work grows by is paid at the lowest price, unless multipliers rise with it.
        extra, last_work = tokens.work_slope * steps * (steps - 1) / 2, work
        if grid.rises:
            extra, last_work = 0.0, work + tokens.work_slope * max(0.0, steps - 1)

        # Of the first and the last batch of the prefill, which are alike, and of the steps.
        works = (tokens.prefill[i], tokens.prefill[i]), (work, last_work)
        c0 = cell_at(arrival, width)
        lead = (c0 + 1) * width - arrival  # length of the first cell
        # The window is guessed at twice the time alone, and doubled below until it is enough.
        span = min(WINDOW, max(32, int(2 * alone / width) + 8))
        # The mean price; at a price of 0 all levels would give the same multiplier.
        mean = max(whole[c0 : c0 + span].sum() / span, 0.02)
        centred = centre.shape[0] > 0 and centre[i, 0] > 0
        last_centre = _last_multiplier(centre[i, 1], fixed[1], work, last_work) if centred else 0.0
        for k in range(levels.shape[0]):
            if centred:
                nus[0, k], nus[1, k] = centre[i, 0] * levels[k], centre[i, 1] * levels[k]
                nus[2, k] = last_centre * levels[k]
            else:
                nus[0, k] = _steady_nu(works[0][0], fixed[0], mean * levels[k])
                nus[1, k] = _steady_nu(work, fixed[1], mean * levels[k])
                nus[2, k] = _last_multiplier(nus[1, k], fixed[1], work, last_work)

        while True:
            # All later steps pay for the growth of their own work at the lowest price since the
            # arrival.
            lowest = np.inf
            for j in range(span):
                lowest = min(lowest, whole[c0 + j] if c0 + j < cells else 0.0)
                window.cheapest[j] = lowest

            for k in range(levels.shape[0]):
                nu = nus[0, k], nus[0, k]
                # 1.0: the prefill pays its multiplier once. All levels have the same charges.
                phase = Phase(arrival, c0, lead, first, alone, nu, works[0], fixed[0], 1.0, i)
                if k == 0:
                    _fill_charges(window, grid, phase, span)

                _integrate_gains(window, grid, phase, span)
                end_prefill(window, width, phase, span, k)

            find_soonest(window, span)
            for k in range(levels.shape[0] if steps > 0 else 0):
                nu = nus[1, k], nus[2, k]
                phase = Phase(arrival, c0, lead, first, alone, nu, works[1], fixed[1], steps, i)
                if k == 0:
                    _fill_charges(window, grid, phase, span)

                _integrate_gains(window, grid, phase, span)
                end_steps(window, width, phase, extra, span, k)

            best, last = best_end(window, width, phase, steps, span)
            # An end beyond the window costs its latency at least. If that is no less than the best
            # end inside, or the window is as long as may be, the search is over.
            beyond = (c0 + span) * width - arrival
            if beyond >= best or span == WINDOW:
                break

            span = min(WINDOW, 2 * span)

        total += min(best, beyond)
        # Nobody asks for the use, or no end is in the window, so that there is no path to follow.
        if use.machine.shape[0] == 0 or last < 0:
            continue

        j = last
        for step in range(1 if steps > 0 else 0, -1, -1):
            # Go back along the best path: the steps first, from their end to their start, and then
            # the prefill, which ends where they start. A start of -1 - c is one in c whose steps
            # pay nothing.
            start = 0 if step == 0 else window.begin[j]
            level = window.level[j] if step == 0 else window.level_after[j]
            if centre.shape[0] > 0:
                centre[i, step] = nus[step, level]

            # What a middle batch uses: those of the ends differ, and which g is larger changes.
            # In ``nus`` the last batch of a prefill has row 0, that of steps row 2.
            load = (works[step][0] + works[step][1]) / 2
            nu, scale = (nus[step, level] + nus[2 * step, level]) / 2, np.sqrt(load)
            # Steps that pay nothing (start < 0) use nothing: their range is empty.
            for c in range(c0 + max(start, 0), min(c0 + j + 1, cells) if start >= 0 else 0):
                portion = 1.0 if c > c0 else lead / width  # of the cell that is after the arrival
                net = max(0.0, nu - _p3_charge(i, c - c0, c, load, fixed[step], shared))
                dense = _best_density(np.sqrt(net), load, fixed[step], grid.roots[c] * scale)
                # dense is w / (T - f), so T = f + w / dense, and 1 / T is the rate. p2 takes dense
                # off g, and p3 the rate times (w + mu f): what the path uses under each.
                rate = dense / (fixed[step] * dense + load) if dense > 0 else 0.0
                use.machine[c] += portion * dense
                index = shared.begin[i] + c - c0
                share = 0.0

                if index < shared.begin[i + 1]:
                    share = shared.share[index]
                    use.fixed[index] += portion * rate * fixed[step]

                use.shared[c] += portion * rate * (load + fixed[step] * share)

            j = start if start >= 0 else -1 - start

    return total


@njit(nogil=True)
def scale_to_one(shared: Shared, cell: NDArray[np.int64], cells: int) -> None:
    """Divide shares by the sum of their cell, and a little more: their sum is at most 1.

    ``cell`` has the cell of each request's arrival, where its first share is. So the share at the
    place ``at`` of ``share`` is for the cell ``cell[i] + at - begin[i]``.
    """
    begin, share = shared.begin, shared.share
    total = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            total[cell[i] + at - begin[i]] += share[at]

    # Shares that are all 0 stay so.
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            share[at] /= max(total[cell[i] + at - begin[i]], 1e-300) * (1 + _SAFETY)


@njit(nogil=True)
def improve_shares(
    shared: Shared, fixed_costs: Floats, cell: NDArray[np.int64], cells: int, step: float
) -> None:
    """Raise the shares of requests that sit through more fixed costs than others of their cell.

    ``fixed_costs`` is a mean of `Use.fixed`, and ``cell`` has each arrival's cell. The logarithm of
    a share rises by ``step`` where its fixed costs are twice the cell's mean, weighted by shares.
    Sums are no longer at most 1: `scale_to_one` follows.
    """
    begin, share = shared.begin, shared.share
    mean = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            mean[cell[i] + at - begin[i]] += share[at] * fixed_costs[at]

    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            usual = mean[cell[i] + at - begin[i]]
            if usual > 0:
                excess = fixed_costs[at] / max(usual, _LEAST_USE) - 1
                share[at] *= np.exp(step * max(-_FASTEST, min(_FASTEST, excess)))
