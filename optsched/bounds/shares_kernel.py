"""Compiled loops of `optsched.bounds.shares`. The notation is that of the checker's proof.

`optsched.bounds.checker.shares` has it.
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
_SAFETY, _LEAST_USE, _FASTEST = 1e-9, 0.02, 3.0


@njit
def _used(root: float, work: float, fixed: float, sqrt: float) -> float:
    """Return w / (T - f) at the best T, which is own work per unit of the batch's room."""
    if work <= 0 or sqrt >= root:
        return 0.0
    if fixed > 0 and sqrt * (fixed + work) >= root * work:
        ratio = sqrt / root
        return work * (1 - ratio) / (fixed * ratio)

    return 1.0


@njit
def _worth(work: float, fixed: float, price: float) -> float:
    """Return the multiplier at steady prices: the min of T + price w T / (T - f), T >= f + w."""
    if work <= 0:
        return fixed

    room = max(work, np.sqrt(price * work * fixed))
    return (fixed + room) * (1 + price * work / room)


class Shared(NamedTuple):
    """Prices under which requests share fixed costs: p3 and mu.

    Those of request i are ``share[begin[i] : begin[i + 1]]``, for cells from that of its arrival
    on. Those of one cell have a sum of at most 1.
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
    """Lower bounds on what one request pays, by cells from its arrival on.

    V and s of the prefill and of the steps for an end in each cell (``ahead``, ``slope``,
    ``after``, ``slope_after``), and the numbers of the multipliers that gave them; the min cost of
    a prefill that ends in or before each cell (``soonest``);
    the cell where the steps begin, or -1 - cell if they pay nothing; the min price since the
    arrival (``cheapest``); g of one multiplier and its integral; starts of the steps that may be
    best and what they cost (``queue``, ``key``); price p2, and for the first and the last batch of
    a phase the root of p2 w and what p3 asks for.
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
    toll: Floats
    asked: Floats


def new_window() -> Window:
    """Return room for one request."""
    numbers = {"level", "level_after", "begin", "queue"}
    kinds = {name: np.int64 if name in numbers else np.float64 for name in Window._fields}
    sizes = {"toll": (2, WINDOW + 1), "asked": (2, WINDOW + 1)}
    return Window._make(np.empty(sizes.get(k, WINDOW + 1), kind) for k, kind in kinds.items())


class Phase(NamedTuple):
    """A prefill, or all steps, of one request under multipliers that rise from step to step.

    ``c0`` is the cell of the arrival and ``lead`` its length from there on; ``first`` and ``alone``
    are the times of the prefill's batches and of all batches, if the request were alone. ``nu`` and
    ``own`` are multipliers and own work of the first and of the last batch. ``number`` is that of
    the request.
    """

    arrival: float
    c0: int
    lead: float
    first: float
    alone: float
    nu: tuple[float, float]
    own: tuple[float, float]
    fixed: float
    batches: float
    number: int


@njit
def _last_multiplier(nu: float, fixed: float, own: float, own_last: float) -> float:
    """Return the multiplier of the last step, at the steady price at which ``nu`` is the first's.

    It is a square: nu = (root(fixed) + root(price own))^2.
    """
    if own <= 0 or own_last <= own or nu <= fixed:
        return nu

    root = np.sqrt(fixed)
    return (root + (np.sqrt(nu) - root) * np.sqrt(own_last / own)) ** 2


@njit
def _asked(number: int, j: int, c: int, own: float, fixed: float, s: Shared) -> float:
    """Return what p3 asks for in the j-th cell, c."""
    if c >= s.price.shape[0]:
        return 0.0

    at = s.begin[number] + j
    share = s.share[at] if at < s.begin[number + 1] else 0.0
    return s.price[c] * (own + fixed * share)


@njit(forceinline=True)
def _charge(window: Window, grid: Grid, phase: Phase, span: int) -> None:
    """Fill in what no multiplier of a phase changes: its prices, and what p3 asks for."""
    cells = grid.price.shape[0]
    for j in range(span):
        c = phase.c0 + j
        window.price[j] = grid.price[c] if c < cells else 0.0

    for end in range(2):
        asked, toll, scale = window.asked[end], window.toll[end], np.sqrt(phase.own[end])
        for j in range(span):
            c = phase.c0 + j
            toll[j] = grid.roots[c] * scale if c < cells else 0.0
            asked[j] = _asked(phase.number, j, c, phase.own[end], phase.fixed, grid.shared)


@njit(forceinline=True, error_model="numpy")
def _integrate(window: Window, grid: Grid, phase: Phase, span: int) -> None:
    """Fill in the gains of a multiplier and their integral."""
    gains, area, price, fixed = window.gains, window.area, window.price, phase.fixed
    gains[:span] = 0.0

    for end in range(2 if phase.own[1] > phase.own[0] else 1):
        all_nu, own = phase.nu[end], phase.own[end]
        asked, toll, long = window.asked[end], window.toll[end], fixed + own
        for j in range(span):  # without branches, so that it is done for several cells at once
            nu = max(0.0, all_nu - asked[j])
            root, paid = np.sqrt(nu), toll[j]
            early = max(0.0, nu / long - price[j])
            late = (root - paid) ** 2 / fixed if fixed > 0 else 0.0
            g = late if fixed > 0 and paid * long >= root * own else early
            gains[j] = max(gains[j], 0.0 if paid >= root else g)

    area[0], area[1] = 0.0, gains[0] * phase.lead
    for j in range(1, span):
        area[j + 1] = area[j] + gains[j] * grid.width


@njit(forceinline=True)
def _end_prefill(window: Window, width: float, phase: Phase, span: int, k: int) -> None:
    """Raise V of the prefill by the k-th multiplier."""
    ahead, slope, gains, area = window.ahead, window.slope, window.gains, window.area
    all_paid = phase.nu[0] * phase.batches
    for j in range(span):
        if (phase.c0 + j + 1) * width - phase.arrival < phase.first:
            value, s = np.inf, 0.0
        else:
            value, s = all_paid - area[j + 1], gains[j]
            value -= SLACK * (all_paid + area[j + 1])
            if value <= 0:
                value, s = 0.0, 0.0

        if k == 0 or value > ahead[j]:
            ahead[j], slope[j], window.level[j] = value, s, k


@njit(forceinline=True)
def _find_soonest(window: Window, span: int) -> None:
    """Fill in the min cost of a prefill that ends in or before each cell."""
    cheapest = np.inf
    for j in range(span):
        cheapest = min(cheapest, window.ahead[j])
        window.soonest[j] = cheapest


@njit(forceinline=True)
def _end_steps(window: Window, width: float, phase: Phase, extra: float, span: int, k: int) -> None:
    """Raise V of the steps by the k-th multiplier. ``extra`` is paid for at the lowest price."""
    ahead, after, gains, area = window.ahead, window.after, window.gains, window.area
    queue, key = window.queue, window.key
    all_paid = (phase.nu[0] + phase.nu[1]) / 2 * phase.batches
    c0, lead, alone = phase.c0, phase.lead, phase.alone
    head = tail = 0
    last = free = -1  # the last start that leaves enough time; the last that makes the steps free

    for j in range(span):
        end = (c0 + j + 1) * width
        while last < j and (last < 0 or (c0 + last + 1) * width <= end - (alone - phase.first)):
            last += 1
            value = ahead[last] + area[last + 1]
            value -= max(0.0, gains[last] - window.slope[last]) * (width if last > 0 else lead)
            while tail > head and key[tail - 1] >= value:
                tail -= 1

            queue[tail], key[tail] = last, value
            tail += 1

        slack = SLACK * (all_paid + area[j + 1])
        while free < last and all_paid - slack <= area[j + 1] - area[free + 1]:
            free += 1
        while tail > head and queue[head] <= free:
            head += 1

        nothing = window.soonest[free] if free >= 0 else np.inf
        some = np.inf
        if tail > head:
            some = key[head] + all_paid - area[j + 1] - slack
        if end - phase.arrival < alone:
            value, s, start = np.inf, 0.0, 0
        elif some < nothing:
            value, start = some, queue[head]
            s = min(gains[j], (nothing - some) / (width if j > 0 else lead))
        else:
            value, s, start = nothing, 0.0, -1 - free

        value += extra * window.cheapest[j]
        if k == 0 or value > after[j]:
            after[j], window.slope_after[j], window.level_after[j] = value, s, k
            window.begin[j] = start


@njit(forceinline=True)
def _best_end(
    window: Window, width: float, phase: Phase, steps: float, span: int
) -> tuple[float, int]:
    """Return the cost of the best end, and its cell, or -1 if no end is in the window."""
    a, c0 = phase.arrival, phase.c0
    after, ahead = (window.after, window.slope_after), (window.ahead, window.slope)
    pays, slopes = after if steps > 0 else ahead
    best, at = np.inf, -1
    for j in range(span):
        early = max(0.0, (c0 + j) * width - a)
        if early >= best:
            break

        d = width if j > 0 else phase.lead
        value = pays[j] + max(phase.alone, early + min(1.0, slopes[j]) * d)
        if value < best:
            best, at = value, j

    return best, at


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

    `centre` (shape (n, 2) or (0, 2)): if given, ``levels`` are times these multipliers, for the
    prefill and for the steps of each request. Receives the best ones. Zeros count as not given.
    """
    width, price, shared = grid.width, grid.price, grid.shared
    cells = price.shape[0]
    whole = price + shared.price
    nus = np.empty((3, levels.shape[0]))
    total = 0.0

    for i in range(tokens.arrival.shape[0]):
        a, m, alone, first = tokens.arrival[i], tokens.steps[i], chain[i], tokens.first[i]
        work, fixed = tokens.work[i], (tokens.prefill_fixed, tokens.decode)
        extra, last = tokens.work_slope * m * (m - 1) / 2, work
        if grid.rises:
            extra, last = 0.0, work + tokens.work_slope * max(0.0, m - 1)

        own = (tokens.prefill[i], tokens.prefill[i]), (work, last)
        c0 = cell_at(a, width)
        lead = (c0 + 1) * width - a  # length of the first cell
        span = min(WINDOW, max(32, int(2 * alone / width) + 8))
        mean = max(whole[c0 : c0 + span].sum() / span, 0.02)
        for k in range(levels.shape[0]):
            nus[0, k] = _worth(own[0][0], fixed[0], mean * levels[k])
            nus[1, k] = _worth(work, fixed[1], mean * levels[k])
            nus[2, k] = _last_multiplier(nus[1, k], fixed[1], work, last)

        if centre.shape[0] > 0 and centre[i, 0] > 0:
            nus[0], nus[1] = centre[i, 0] * levels, centre[i, 1] * levels
            nus[2] = _last_multiplier(centre[i, 1], fixed[1], work, last) * levels

        while True:
            low = np.inf
            for j in range(span):
                low = min(low, whole[c0 + j] if c0 + j < cells else 0.0)
                window.cheapest[j] = low

            for k in range(levels.shape[0]):
                nu = nus[0, k], nus[0, k]
                phase = Phase(a, c0, lead, first, alone, nu, own[0], fixed[0], 1.0, i)
                if k == 0:
                    _charge(window, grid, phase, span)

                _integrate(window, grid, phase, span)
                _end_prefill(window, width, phase, span, k)

            _find_soonest(window, span)
            for k in range(levels.shape[0] if m > 0 else 0):
                nu = nus[1, k], nus[2, k]
                phase = Phase(a, c0, lead, first, alone, nu, own[1], fixed[1], m, i)
                if k == 0:
                    _charge(window, grid, phase, span)

                _integrate(window, grid, phase, span)
                _end_steps(window, width, phase, extra, span, k)

            best, at = _best_end(window, width, phase, m, span)
            beyond = (c0 + span) * width - a
            if beyond >= best or span == WINDOW:
                break

            span = min(WINDOW, 2 * span)

        total += min(best, beyond)
        if use.machine.shape[0] == 0 or at < 0:
            continue

        j = at
        for step in range(1 if m > 0 else 0, -1, -1):
            start = 0 if step == 0 else window.begin[j]
            level = window.level[j] if step == 0 else window.level_after[j]
            if centre.shape[0] > 0:
                centre[i, step] = nus[step, level]

            # What a middle batch uses: those of the ends differ, and which g is larger changes.
            w = (own[step][0] + own[step][1]) / 2
            nu, scale = (nus[step, level] + nus[2 * step, level]) / 2, np.sqrt(w)
            for c in range(c0 + max(start, 0), min(c0 + j + 1, cells) if start >= 0 else 0):
                part = 1.0 if c > c0 else lead / width
                left = max(0.0, nu - _asked(i, c - c0, c, w, fixed[step], shared))
                used = _used(np.sqrt(left), w, fixed[step], grid.roots[c] * scale)
                # used is w / (T - f), so T = f + w / used.
                rate = used / (fixed[step] * used + w) if used > 0 else 0.0
                use.machine[c] += part * used
                at = shared.begin[i] + c - c0
                share = 0.0

                if at < shared.begin[i + 1]:
                    share = shared.share[at]
                    use.fixed[at] += part * rate * fixed[step]

                use.shared[c] += part * rate * (w + fixed[step] * share)

            j = start if start >= 0 else -1 - start

    return total


@njit(nogil=True)
def scale_to_one(shared: Shared, cell: NDArray[np.int64], cells: int) -> None:
    """Divide shares by the sum of their cell, and by a little more."""
    begin, share = shared.begin, shared.share
    total = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            total[cell[i] + at - begin[i]] += share[at]

    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            share[at] /= max(total[cell[i] + at - begin[i]], 1e-300) * (1 + _SAFETY)


@njit(nogil=True)
def improve_shares(
    shared: Shared, used: Floats, cell: NDArray[np.int64], cells: int, step: float
) -> None:
    """Raise the shares of requests that sit through more fixed costs than others of their cell."""
    begin, share = shared.begin, shared.share
    mean = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            mean[cell[i] + at - begin[i]] += share[at] * used[at]

    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            usual = mean[cell[i] + at - begin[i]]
            if usual > 0:
                more = used[at] / max(usual, _LEAST_USE) - 1
                share[at] *= np.exp(step * max(-_FASTEST, min(_FASTEST, more)))
