"""The compiled first-order method of `optsched.bounds.slo_method`, and what prices need."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Program(NamedTuple):
    """A linear program: who is in time, and in which cells its prefill and its steps are done.

    A request has ``light`` work of its prefill, ``later`` work of its steps, and ``fixed`` costs of
    its steps' batches, in units of what a machine, or all of them, can do in a second. Its shares
    of steps begin at ``z_at`` and are for the coarse cells from ``z_first`` on, those of the
    prefill at ``p_at`` and for the fine cells from ``p_first`` on. Cells last ``coarse`` and
    ``fine`` seconds, and ``up`` is the coarse cell of a fine one. Of those ``whose`` windows are in
    a stretch of time that has no room for all, whose numbers begin at ``whose_at``, parts that sum
    up to 1 at least are not in time.
    """

    light: Floats
    later: Floats
    fixed: Floats
    z_at: Ints
    z_first: Ints
    p_at: Ints
    p_first: Ints
    up: Ints
    coarse: Floats
    fine: Floats
    whose_at: Ints
    whose: Ints
    part: Floats


class State(NamedTuple):
    """Where the method is: shares, then multipliers of the program's rows.

    ``x`` is the share of each request that is in time, ``batches`` what part of a coarse cell fixed
    costs take, and ``z`` and ``p`` are shares of steps and of prefills. ``price`` and ``burst`` are
    of coarse and of fine cells, ``prefill`` and ``steps`` what requests pay for these, and
    ``cadence`` what steps pay for the fixed costs of a cell.
    """

    x: Floats
    batches: Floats
    z: Floats
    p: Floats
    price: Floats
    burst: Floats
    prefill: Floats
    steps: Floats
    cadence: Floats
    stretch: Floats


@njit
def sums_of(program: Program) -> tuple[Floats, ...]:
    """Return the sums of columns and of rows, whose inverses are the sizes of steps.

    See Pock and Chambolle 2011. They are in the order of `State`.
    """
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    n, cells = len(light), len(coarse)
    batches, z, p = np.ones(cells), np.ones(z_at[n]), np.ones(p_at[n])
    price, burst, prefill, steps = np.ones(cells), np.full(len(fine), 1e-9), np.ones(n), np.ones(n)
    cadence, x, stretch = np.ones(z_at[n]), np.full(n, 2.0), np.full(len(at) - 1, 1e-9)
    for j in range(len(stretch)):
        for q in range(at[j], at[j + 1]):
            stretch[j] += part[q]
            x[whose[q]] += part[q]

    for i in range(n):
        steps[i] += z_at[i + 1] - z_at[i]
        prefill[i] += p_at[i + 1] - p_at[i]
        for q in range(z_at[i], z_at[i + 1]):
            k = z_first[i] + q - z_at[i]
            price[k] += later[i] / coarse[k]
            z[q] += (later[i] + fixed[i]) / coarse[k]
            cadence[q] += fixed[i] / coarse[k]
            batches[k] += 1

        for q in range(p_at[i], p_at[i + 1]):
            f = p_first[i] + q - p_at[i]
            price[up[f]] += light[i] / coarse[up[f]]
            burst[f] += light[i] / fine[f]
            p[q] += light[i] / coarse[up[f]] + light[i] / fine[f]

    return x, batches, z, p, price, burst, prefill, steps, cadence, stretch


@njit
def _down(
    program: Program,
    state: State,
    sums: tuple[Floats, ...],
    ahead: tuple[Floats, ...],
    size: float,
) -> None:
    """Move shares down along their costs, and set ``ahead`` to them and as far again."""
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    x, batches, z, p, price, burst, prefill, steps, cadence, stretch = state
    x2, batches2, z2, p2 = ahead
    pull, other = np.zeros(len(coarse)), np.full(len(x), -1.0)
    for j in range(len(stretch)):
        for q in range(at[j], at[j + 1]):
            other[whose[q]] += stretch[j] * part[q]

    for i in range(len(x)):
        new = min(1.0, max(0.0, x[i] - size / sums[0][i] * (prefill[i] + steps[i] + other[i])))
        x2[i], x[i] = 2 * new - x[i], new
        for q in range(p_at[i], p_at[i + 1]):
            f = p_first[i] + q - p_at[i]
            k = up[f]
            cost = light[i] * (price[k] / coarse[k] + burst[f] / fine[f]) - prefill[i]
            new = max(0.0, p[q] - size / sums[3][q] * cost)
            p2[q], p[q] = 2 * new - p[q], new

        for q in range(z_at[i], z_at[i + 1]):
            k = z_first[i] + q - z_at[i]
            pull[k] += cadence[q]
            cost = (later[i] * price[k] + fixed[i] * cadence[q]) / coarse[k] - steps[i]
            new = max(0.0, z[q] - size / sums[2][q] * cost)
            z2[q], z[q] = 2 * new - z[q], new

    for k in range(len(coarse)):
        new = max(0.0, batches[k] - size / sums[1][k] * (price[k] - pull[k]))
        batches2[k], batches[k] = 2 * new - batches[k], new


@njit
def _up(
    program: Program,
    state: State,
    sums: tuple[Floats, ...],
    ahead: tuple[Floats, ...],
    size: float,
) -> None:
    """Move multipliers up along what the shares ahead break."""
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    _, _, _, _, price, burst, prefill, steps, cadence, stretch = state
    x2, batches2, z2, p2 = ahead
    load, full = batches2.copy(), np.zeros(len(fine))
    for i in range(len(x2)):
        total = 0.0
        for q in range(p_at[i], p_at[i + 1]):
            f = p_first[i] + q - p_at[i]
            total += p2[q]
            load[up[f]] += light[i] / coarse[up[f]] * p2[q]
            full[f] += light[i] / fine[f] * p2[q]

        if p_at[i + 1] > p_at[i]:
            prefill[i] = max(0.0, prefill[i] + size / sums[6][i] * (x2[i] - total))

        total = 0.0
        for q in range(z_at[i], z_at[i + 1]):
            k = z_first[i] + q - z_at[i]
            total += z2[q]
            load[k] += later[i] / coarse[k] * z2[q]
            over = fixed[i] / coarse[k] * z2[q] - batches2[k]
            cadence[q] = max(0.0, cadence[q] + size / sums[8][q] * over)

        if z_at[i + 1] > z_at[i]:
            steps[i] = max(0.0, steps[i] + size / sums[7][i] * (x2[i] - total))

    for k in range(len(coarse)):
        price[k] = max(0.0, price[k] + size / sums[4][k] * (load[k] - 1.0))
    for f in range(len(fine)):
        burst[f] = max(0.0, burst[f] + size / sums[5][f] * (full[f] - 1.0))
    for j in range(len(stretch)):
        over = 1.0
        for q in range(at[j], at[j + 1]):
            over += part[q] * (x2[whose[q]] - 1.0)

        stretch[j] = max(0.0, stretch[j] + size / sums[9][j] * over)


@njit
def ascend(
    program: Program, state: State, sums: tuple[Floats, ...], weight: float, count: int
) -> None:
    """Take steps of the primal-dual hybrid gradient method (Chambolle and Pock 2011).

    With a larger ``weight`` multipliers move more and shares less.
    """
    ahead = (
        np.zeros_like(state[0]),
        np.zeros_like(state[1]),
        np.zeros_like(state[2]),
        np.zeros_like(state[3]),
    )
    for _ in range(count):
        _down(program, state, sums, ahead, 1.0 / weight)
        _up(program, state, sums, ahead, weight)


@njit
def spread(
    mass: Floats, at: Ints, first: Ints, edges: Floats, new_at: Ints, new_first: Ints, new: Floats
) -> Floats:
    """Return the mass that rows have in some cells as what they have in others.

    Row i has ``at[i]`` to ``at[i + 1]``, for cells from ``first[i]`` on.
    """
    found = np.zeros(new_at[-1])
    for i in range(len(first)):
        k, end = new_first[i], new_first[i] + new_at[i + 1] - new_at[i]
        for q in range(at[i], at[i + 1]):
            c = first[i] + q - at[i]
            while k < end and new[k + 1] <= edges[c]:
                k += 1

            j = k
            while j < end and new[j] < edges[c + 1]:
                part = min(new[j + 1], edges[c + 1]) - max(new[j], edges[c])
                found[new_at[i] + j - new_first[i]] += (
                    mass[q] * max(part, 0.0) / (edges[c + 1] - edges[c])
                )
                j += 1

    return found


@njit
def crowded(
    begin: Ints, end: Ints, work: Floats, absent: Floats, room: float, longest: int
) -> tuple[Ints, Floats]:
    """Return, by request, the stretch from its begin on whose sum of absent parts is least, or 0.

    A stretch has no room for all work of windows inside. What is more than there is room for is
    absent at least, so the sum over those inside of absent times the smaller of their work and the
    excess, over the excess, is 1 at least. Begins and ends ascend; ends are in order of ``by_end``.
    """
    n = len(begin)
    until, least = np.zeros(n, np.int64), np.ones(n)
    for i in range(n):
        inside = np.empty(n, np.int64)
        many, total = 0, 0.0
        if i > 0 and begin[i] == begin[i - 1]:
            continue

        stop = i
        while stop < n and begin[stop] < begin[i] + longest:
            stop += 1

        order = i + np.argsort(end[i:stop])
        for j in order:
            inside[many] = j
            many += 1
            total += work[j]
            excess = total - room * (end[j] - begin[i])
            if excess <= 1e-9 * total:
                continue

            parts = 0.0
            for q in range(many):
                parts += min(work[inside[q]], excess) / excess * absent[inside[q]]
                if parts >= least[i]:
                    break

            if parts < least[i]:
                least[i], until[i] = parts, end[j]

    return until, least


@njit
def raised(
    price: Ints,
    fixed: int,
    first: Ints,
    behind: Ints,
    rate: Ints,
    extra: Ints,
    low: Ints,
    high: Ints,
) -> Ints:
    """Return the least prices, from these on, at which no cell's requests are charged too much.

    Sums are rounded, so a little more.
    """
    cells = len(price)
    at = np.zeros(cells + 1, np.int64)
    for i in range(len(first)):
        for k in range(first[i], behind[i]):
            at[k + 1] += 1

    at = np.cumsum(at)
    place, who = at.copy(), np.zeros(at[cells], np.int64)
    for i in range(len(first)):
        for k in range(first[i], behind[i]):
            who[place[k]] = i
            place[k] += 1

    found = price.copy()
    for k in range(cells):
        below, enough, middle = price[k] - 1, (1 << 30) - 1, price[k]
        while enough - below > 1:
            total = 0.0
            for q in range(at[k], at[k + 1]):
                i = who[q]
                over = rate[i] - middle
                total += max(0.0, float(extra[i] + over * (high[i] if over > 0 else low[i])))

            if total <= float(middle) * fixed * (1 - 1e-12):
                enough = middle
            else:
                below = middle

            middle = (below + enough) // 2

        found[k] = enough

    return found
