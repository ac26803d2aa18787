"""The compiled first-order method of `optsched.bounds.slo_method`, and what prices need.

In loops i is a request, k a coarse cell, f a fine one and j a stretch. Rows of several lengths are
one array: the row of i is ``[at[i] : at[i + 1]]`` of it, and q is a place there. So request i has
the shares ``z[z_at[i] : z_at[i + 1]]`` of its steps, for coarse cells from ``z_first[i]`` on, and
``p[p_at[i] : p_at[i + 1]]`` of its prefill, for fine cells from ``p_first[i]`` on. Where a program
is unpacked, ``at`` is its ``whose_at``, which does the same for stretches.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit
from optsched.problem.sorting import sort_up

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Program(NamedTuple):
    """A linear program: who is in time, and in which cells its prefill and its steps are done.

    A request has ``light`` work of its prefill, ``later`` work of its steps, and ``fixed`` costs of
    its steps' batches, in units of what a machine, or all of them, can do in a second. Its shares
    of steps begin at ``z_at`` and are for the coarse cells from ``z_first`` on, those of the
    prefill at ``p_at`` and for the fine cells from ``p_first`` on. Cells last ``coarse`` and
    ``fine`` seconds, and ``up`` is the coarse cell of a fine one. Stretch j of time has no room for
    all work of the requests ``whose[whose_at[j] : whose_at[j + 1]]``. Each of them has a ``part``,
    and the parts of those that are not in time sum up to 1 at least.
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
    ``cadence`` what steps pay for the fixed costs of a cell. ``stretch`` has the
    multiplier of each stretch.
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

    See Pock and Chambolle 2011. They are in the order of `State`. Rows of cells are divided by the
    length of the cell. The program, with x, z, p and J (``batches`` here), is in the text of
    `optsched.bounds.slo_prices`.
    """
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    n, cells = len(light), len(coarse)
    # Each sum begins with entries of 1: of columns, J is in the row of its cell, z and p in the row
    # x <= sum, and x in both such rows; of rows, likewise. A fine cell or a stretch has none, and
    # 1e-9 keeps its sum from being 0.
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
def _descend_shares(
    program: Program,
    state: State,
    sums: tuple[Floats, ...],
    ahead: tuple[Floats, ...],
    size: float,
) -> None:
    """Move shares down along their reduced costs, and ``ahead`` as far again.

    The first four of ``state`` change: 0 x, 1 batches, 2 z, 3 p. ``ahead`` receives the same four,
    each as 2 new - old. A step is ``size`` over the sum of the share's column, which ``sums`` has
    in this order (`sums_of`). No share falls below 0, and x does not rise above 1.
    """
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    x, batches, z, p, price, burst, prefill, steps, cadence, stretch = state
    x2, batches2, z2, p2 = ahead
    cadence_sum, reduced = np.zeros(len(coarse)), np.full(len(x), -1.0)
    for j in range(len(stretch)):
        for q in range(at[j], at[j + 1]):
            # The reduced cost of x: -1 in the objective, and what its rows ask for.
            reduced[whose[q]] += stretch[j] * part[q]

    for i in range(len(x)):
        new = min(1.0, max(0.0, x[i] - size / sums[0][i] * (prefill[i] + steps[i] + reduced[i])))
        x2[i], x[i] = 2 * new - x[i], new
        for q in range(p_at[i], p_at[i + 1]):
            f = p_first[i] + q - p_at[i]
            k = up[f]
            cost = light[i] * (price[k] / coarse[k] + burst[f] / fine[f]) - prefill[i]
            new = max(0.0, p[q] - size / sums[3][q] * cost)
            p2[q], p[q] = 2 * new - p[q], new

        for q in range(z_at[i], z_at[i + 1]):
            k = z_first[i] + q - z_at[i]
            cadence_sum[k] += cadence[q]
            cost = (later[i] * price[k] + fixed[i] * cadence[q]) / coarse[k] - steps[i]
            new = max(0.0, z[q] - size / sums[2][q] * cost)
            z2[q], z[q] = 2 * new - z[q], new

    for k in range(len(coarse)):
        new = max(0.0, batches[k] - size / sums[1][k] * (price[k] - cadence_sum[k]))
        batches2[k], batches[k] = 2 * new - batches[k], new


@njit
def _ascend_multipliers(
    program: Program,
    state: State,
    sums: tuple[Floats, ...],
    ahead: tuple[Floats, ...],
    size: float,
) -> None:
    """Move multipliers up by how far the shares ahead break each row, and never below 0.

    The others of ``state`` change: 4 price, 5 burst, 6 prefill, 7 steps, 8 cadence, 9 stretch. A
    step is ``size`` over the sum of the row, which ``sums`` has in this order. ``ahead`` is what
    `_descend_shares` has left there. Who has no window of its prefill, or of its steps, has no such
    row.
    """
    light, later, fixed, z_at, z_first, p_at, p_first, up, coarse, fine, at, whose, part = program
    _, _, _, _, price, burst, prefill, steps, cadence, stretch = state
    x2, batches2, z2, p2 = ahead
    # What part of each coarse cell is used, by fixed costs to begin with, and of each fine one.
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
            # A request takes one step a batch, so its fixed costs take no more of a cell than all
            # batches do.
            over = fixed[i] / coarse[k] * z2[q] - batches2[k]
            cadence[q] = max(0.0, cadence[q] + size / sums[8][q] * over)

        if z_at[i + 1] > z_at[i]:
            steps[i] = max(0.0, steps[i] + size / sums[7][i] * (x2[i] - total))

    for k in range(len(coarse)):
        price[k] = max(0.0, price[k] + size / sums[4][k] * (load[k] - 1.0))
    for f in range(len(fine)):
        burst[f] = max(0.0, burst[f] + size / sums[5][f] * (full[f] - 1.0))
    for j in range(len(stretch)):
        # The parts of those that are absent have to sum up to 1 at least.
        over = 1.0
        for q in range(at[j], at[j + 1]):
            over += part[q] * (x2[whose[q]] - 1.0)

        stretch[j] = max(0.0, stretch[j] + size / sums[9][j] * over)


@njit
def ascend(
    program: Program, state: State, sums: tuple[Floats, ...], weight: float, count: int
) -> None:
    """Take steps of the primal-dual hybrid gradient method (Chambolle and Pock 2011).

    So many (``count``) of them change ``state``. ``sums`` are those of `sums_of`. With a larger
    ``weight`` multipliers move more and shares less.
    """
    ahead = (
        np.zeros_like(state[0]),
        np.zeros_like(state[1]),
        np.zeros_like(state[2]),
        np.zeros_like(state[3]),
    )
    # Shares move by the inverse of the weight and multipliers by the weight, from shares that are
    # extrapolated: this converges for any weight (Chambolle and Pock 2011, Algorithm 1).
    for _ in range(count):
        _descend_shares(program, state, sums, ahead, 1.0 / weight)
        _ascend_multipliers(program, state, sums, ahead, weight)


@njit
def spread(
    mass: Floats, at: Ints, first: Ints, edges: Floats, new_at: Ints, new_first: Ints, new: Floats
) -> Floats:
    """Return the mass that rows have in some cells, spread evenly, by other cells.

    Row i has ``mass[at[i] : at[i + 1]]``, for cells from ``first[i]`` on, and of the result what
    ``new_at`` and ``new_first`` say in the same way. ``edges`` and ``new`` are the cells' edges.
    """
    masses = np.zeros(new_at[-1])
    for i in range(len(first)):
        k, end = new_first[i], new_first[i] + new_at[i + 1] - new_at[i]
        for q in range(at[i], at[i + 1]):
            c = first[i] + q - at[i]
            # Both lists of cells ascend, so no new cell before k meets this one or a later one.
            while k < end and new[k + 1] <= edges[c]:
                k += 1

            j = k
            while j < end and new[j] < edges[c + 1]:
                overlap = min(new[j + 1], edges[c + 1]) - max(new[j], edges[c])
                masses[new_at[i] + j - new_first[i]] += (
                    mass[q] * max(overlap, 0.0) / (edges[c + 1] - edges[c])
                )
                j += 1

    return masses


@njit
def crowded_stretches(
    begin: Ints, end: Ints, work: Floats, absent: Floats, by_end: Ints, speed: float, longest: int
) -> tuple[Ints, Floats]:
    """Return, by request, the end of the stretch from its begin whose absent parts sum up to least.

    And these least sums. An end of 0, with the sum 1, says that no sum is below 1, and so that no
    stretch from there cuts anything off.

    A stretch has no room for all work of windows inside. What is more than there is room for is
    absent at least, so the sum over those inside of absent times the smaller of their work and the
    excess, over the excess, is 1 at least. ``begin``, which ascends, and ``end`` are windows in
    ticks, and ``by_end`` is their order by ``end``. A tick has room for so much work as ``speed``
    says, and ``absent`` is the part of each request that is not in time.
    """
    n = len(begin)
    rank = np.empty(n, np.int64)  # of each window by its end
    for k in range(n):
        rank[by_end[k]] = k

    ends, min_sum = np.zeros(n, np.int64), np.ones(n)
    for i in range(n):
        inside = np.empty(n, np.int64)
        count, total = 0, 0.0
        # Stretches from one moment on are looked at once, by the first request that begins there.
        if i > 0 and begin[i] == begin[i - 1]:
            continue

        behind = i
        # Longer stretches have no effect worth their time: only begins within ``longest`` ticks are
        # looked at, of the requests from i to before ``behind``.
        while behind < n and begin[behind] < begin[i] + longest:
            behind += 1

        # By end, each prefix of the windows is all that lies inside a stretch that ends there.
        order = rank[i:behind].copy()
        sort_up(order, behind - i)
        for k in range(behind - i):
            j = by_end[order[k]]
            inside[count] = j
            count += 1
            total += work[j]
            excess = total - speed * (end[j] - begin[i])
            # All of these may be in time together, so nobody has to be absent.
            if excess <= 1e-9 * total:
                continue

            total_absent = 0.0
            for q in range(count):
                total_absent += min(work[inside[q]], excess) / excess * absent[inside[q]]
                # Parts are not negative, so the sum is no new min any more.
                if total_absent >= min_sum[i]:
                    break

            if total_absent < min_sum[i]:
                min_sum[i], ends[i] = total_absent, end[j]

    return ends, min_sum


@njit
def raise_prices(
    price: Ints,
    fixed: int,
    first: Ints,
    behind: Ints,
    rate: Ints,
    extra: Ints,
    low: Ints,
    high: Ints,
) -> Ints:
    """Return the min prices, from these on, at which no cell's requests are charged too much.

    That is the inequality of the proof: the sum of max(0, extra + (rate - pi) w) is at most
    pi fixed. Sums of floats are rounded, so 1e-12 of that is left; the checker has the last word.
    The window of request i meets the cells from ``first[i]`` to before ``behind[i]``, and its steps
    have own work from ``low[i]`` to ``high[i]``. Work and ``fixed`` are in the units of a `Demand`,
    and ``price``, ``rate`` and ``extra`` in those of `Prices`.
    """
    # A counting sort by cell: those of cell k become members[at[k] : at[k + 1]].
    cells = len(price)
    at = np.zeros(cells + 1, np.int64)
    for i in range(len(first)):
        for k in range(first[i], behind[i]):
            at[k + 1] += 1

    at = np.cumsum(at)
    place, members = at.copy(), np.zeros(at[cells], np.int64)
    for i in range(len(first)):
        for k in range(first[i], behind[i]):
            members[place[k]] = i
            place[k] += 1

    prices = price.copy()
    for k in range(cells):
        # The highest price that the checker takes, of 30 bits, is assumed to be valid.
        too_low, valid, middle = price[k] - 1, (1 << 30) - 1, price[k]
        # What is charged falls with the price and what may be charged rises, so the valid prices
        # are all from one on: bisection finds it, and first looks at the price that is there.
        while valid - too_low > 1:
            charge = 0.0
            for q in range(at[k], at[k + 1]):
                i = members[q]
                # A step of work w is paid extra + (rate - pi) w more than the price: largest at an
                # end of w.
                margin = rate[i] - middle
                charge += max(0.0, float(extra[i] + margin * (high[i] if margin > 0 else low[i])))

            if charge <= float(middle) * fixed * (1 - 1e-12):
                valid = middle
            else:
                too_low = middle

            middle = (too_low + valid) // 2

        prices[k] = valid

    return prices
