r"""Minorants over feasible batches: whether so much per token is at most the time of all of them.

docs/formulations.md, "Charges by batch length", has the notation. A *vector* (phi, a, b, k, g, d)
is a minorant up to h if every batch that fits the machine and lasts at most h has

    T >= phi + a n + b K + k D + g C + d Q.

`witnesses` returns the least number, nearly, by which a vector must be divided to be one, and
`refuse` rejects vectors that are none. Both are a branch and bound over boxes of (C, H, n, kv): the
prefill tokens C, the KV cached before them H, the decodes n and their mean KV kv = K / n.

D is the KV held after the batch, and Q the sum of the prefill tokens' positions in their prompts.
The machine has the KV capacity M (``room``), and limits on a batch's ``tokens`` and on its requests
(``seats``). No request has more than L tokens (``longest``).
A decode adds 1 + offset to offset + block tokens of KV (``min_extra``, ``max_extra``).
`optsched.bounds.checker.batches` says what is known of a batch and of its time.

*A box* lies in one cell. For a ratio r, with time below its value by lines below the grids of
tokens and of requests, phi + ... + d Q - r T is linear in H, n and kv one by one, and convex in C.
So its maximum over the box is at a corner. The two constraints that cut the box at a slant, D <= y
with y = M - H - C, and K + n (1 + offset) <= M - H - C, come in with multipliers:

    k D <= (k - lambda) (K + n (offset + block)) + lambda y,    0 <= lambda <= k,
    0 <= mu (M - H - C - K - n (1 + offset)),                   mu >= 0.

Both are linear one by one, too, so the corners decide. A box whose corners all last longer than h
has no batch that counts, since its least time is at one of them. Another box in which no
multiplier will do is split, and the gap falls with the square of its size. Nothing is sampled: a
box is left only when its corners prove it.

*Rounding.* All terms of a sum are non-negative but the time, whose parts are below the largest node
S. A corner takes fewer than 64 operations on floats, each with a relative error of 2^-53, so it
errs by less than 1e-14 times the sum of its terms' sizes. It must be below -1e-12 times the terms
and -1e-12 S. The ratio is also taken 2e-9 too large, which covers the judge's float64 times.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.batches import ROUNDING, Batches
from optsched.bounds.checker.parts import Budget, expect
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
TERMS = 6
"""Numbers of a vector: per batch, decode, cached token, held token, prefill token and position."""
# A relative margin for the rounding of the judge's times.
_MARGIN = 1e-9
# The most boxes at hand, whose number grows with how often a box is halved.
_DEPTH = 600
# Values of the multipliers that are tried.
_TRIES = 14
# Compiled steps between two looks at the clock, or at a budget of steps: some 0.05 s.
_AT_ONCE = 1_000_000


def witnesses(
    batches: Batches,
    vectors: Floats,
    until: Floats | float = np.inf,
    *,
    within: float = 1e-4,
    check: Callable[[], None] = lambda: None,
) -> tuple[Floats, Floats]:
    """Return by how much vectors must be divided to be minorants, and batches that show it.

    ``vectors`` has a row of `TERMS` numbers each. The number of each vector is at most the share
    ``within`` above the least one. Its batch, which nearly reaches it, has n, K, D, C, Q and the
    time, or 0 where none was looked at. Only batches that last ``until`` seconds at most count, by
    vector or for all. `check` is called now and then, and may raise.
    """
    rows = np.ascontiguousarray(vectors, np.float64)
    # Ratios begin next to 0, and are raised to what batches show and boxes need. In the end they
    # are raised by more than `refuse` takes off, so that it accepts what is divided by them.
    ratio, witness = np.full(len(rows), 1e-12), np.zeros((len(rows), TERMS))
    check()
    for _ in _scan_in_parts(batches, rows, until, ratio, witness, within):
        check()

    return ratio * (1 + 4 * _MARGIN), witness


def refuse(batches: Batches, vectors: Floats, until: Floats | float, budget: Budget) -> None:
    """Reject a certificate unless each of its vectors, shape (vectors, 6), is a minorant.

    One is held against the batches that last ``until`` seconds at most.
    """
    rows = np.ascontiguousarray(vectors, np.float64)
    expect(bool((rows >= 0).all() and (rows < 1e9).all()), "charges: found one < 0 or too large")
    # A ratio so far below 1 covers the judge's float64 times (docstring, Rounding).
    ratio, witness = np.full(len(rows), 1 - 2 * _MARGIN), np.zeros((len(rows), TERMS))
    # ``within`` is 0, so that the ratio of a vector that is not proved becomes infinite.
    for steps in _scan_in_parts(batches, rows, until, ratio, witness, 0.0):
        budget.spend_compiled(steps)

    wrong = np.flatnonzero(ratio >= 1)
    which = f"charges: vector {wrong[0] if len(wrong) else 0}"
    expect(len(wrong) == 0, f"{which}: found more than a batch's time; expected at most that")


def _scan_in_parts(
    batches: Batches,
    rows: Floats,
    until: Floats | float,
    ratio: Floats,
    witness: Floats,
    within: float,
) -> Iterator[int]:
    """Raise the ratios of vectors to what all boxes prove, and yield the steps taken now and then.

    With ``within`` 0 the ratio of a vector that is above it becomes infinite instead.
    """
    # Batches that are longer by rounding alone count.
    ends = np.full(len(rows), until) * (1 + _MARGIN)
    boxes, at = _first_boxes(batches), np.zeros(2, np.int64)
    stack, count = np.empty((_DEPTH, 8)), np.zeros(_DEPTH, np.int64)
    at_hand = stack, count, np.empty((_DEPTH, len(rows)), np.int64), at
    while at[0] < len(boxes) or at[1] > 0:
        yield _scan_boxes(batches, (rows, ends), ratio, witness, boxes, within, at_hand)


def _first_boxes(batches: Batches) -> Floats:
    """Return the boxes to begin with: low and high C, H, n and kv of every cell.

    On each axis 0 stands alone, and the cells between nodes begin at 1; but H has a cell from 0 to
    1 instead.
    """
    chunk, cached, decodes, kv = (
        [(0.0, 0.0), *(pairwise(axis[1:]) if len(axis) > 2 else [(1.0, 1.0)])]
        for axis in batches.axes
    )
    cached = [(0.0, min(1.0, batches.cached[-1])), *cached[1:]]
    boxes = []
    for c, h, n, mean_kv in product(chunk, cached, decodes, kv):
        no_decode, no_chunk = n[1] == 0, c[1] == 0
        # Decodes and their mean KV are there together or not at all. KV before a prefill takes a
        # prefill, and a batch without either is none.
        if no_decode == (mean_kv[1] == 0) and not (no_chunk and (no_decode or h[0] > 0)):
            boxes.append((*c, *((0.0, 0.0) if no_chunk else h), *n, *mean_kv))

    return np.array(sorted(set(boxes)))


@njit
def _cell_of(axis: Floats, x: float) -> int:
    """Return the number of the cell of an axis in which x lies, or of the nearest one."""
    low, high = 0, len(axis) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if axis[middle] <= x:
            low = middle
        else:
            high = middle

    return low


@njit
def _value_at(nodes: Floats, x: float) -> float:
    """Return the value at x of a line through nodes, which goes on straight beyond its ends."""
    i = _cell_of(nodes[0], x)
    x0, x1 = nodes[0, i], nodes[0, i + 1]
    return ((x1 - x) * nodes[1, i] + (x - x0) * nodes[1, i + 1]) / (x1 - x0)


@njit
def _fit_line_below(nodes: Floats, low: float, high: float) -> tuple[float, float, float]:
    """Return the value at ``low`` and the slope of a line below nodes, and how far below it is.

    The line is below the one through the nodes all the way from ``low`` to ``high``.
    """
    if high <= low:
        return _value_at(nodes, low), 0.0, 0.0

    first, last, below = _value_at(nodes, low), _value_at(nodes, high), 0.0
    slope = (last - first) / (high - low)
    i = _cell_of(nodes[0], low) + 1
    # Between nodes the line through them is straight, so the farthest point below is at a node.
    while i < nodes.shape[1] and nodes[0, i] < high:
        below = max(below, first + slope * (nodes[0, i] - low) - nodes[1, i])
        i += 1

    return first - below, slope, below


@njit
def _tighten(batches: Any, box: Floats) -> bool:
    """Cut off what no batch within the limits has, and return whether any of a box is left.

    A box has the low and high ends of C (0 and 1), H (2, 3), n (4, 5) and kv (6, 7). Highs come
    down by what the lows leave of the KV capacity, the tokens and the seats of a batch.
    """
    # What one limit cuts off may let another one cut more, so there are two rounds. Factors of
    # 1 + 1e-12 are for rounding.
    for _ in range(2):
        # The KV that the lows leave.
        spare = batches.room * (1 + 1e-12) - box[0] - box[2]
        if box[4] > 0:
            spare -= box[4] * (box[6] + batches.min_extra)
        if spare < 0:
            return False

        # It is for one of C and H alone; H is also at most what each prefill that
        # has a seat and a token can have cached.
        box[1] = np.floor(min(box[1], batches.tokens - box[4], box[0] + spare))
        box[3] = np.floor(min(box[3], box[2] + spare))
        box[3] = min(box[3], min(box[1], batches.seats - box[4]) * batches.longest)
        # A prefill takes a seat at least.
        seats = batches.seats - (1.0 if box[0] > 0 else 0.0)
        box[5] = min(box[5], batches.tokens - box[0], seats)

        if box[4] > 0:
            kv_left = batches.room - box[0] - box[2]
            box[5] = min(box[5], np.floor(kv_left / (box[6] + batches.min_extra) * (1 + 1e-12)))
            box[7] = min(box[7], kv_left / box[4] * (1 + 1e-12) - batches.min_extra)
            # Decodes and prefills do not mix on this machine.
            if box[0] > 0 and not batches.hybrid:
                return False

        for d in range(4):
            if box[2 * d] > box[2 * d + 1]:
                return False

    return True


@njit
def _fill_corners(batches: Any, box: Floats, corners: Floats) -> tuple[float, float]:
    """Fill in the corners of a box, and return how far the lines are below the grids there.

    A corner has C, min(H, L), n, K, the own and the shared limit of D, spare KV, the time by all,
    and that by the grid alone. Corner j has the high end of the d-th side where bit d of j is 1.
    """
    axes = (batches.chunk, batches.cached, batches.decodes, batches.kv)
    cell, weight = np.empty(4, np.int64), np.empty((4, 2, 2))
    for d in range(4):
        # A box lies in one cell, and the grid is multilinear there: its corners follow from the 16
        # nodes of the cell, one axis after another.
        axis, i = axes[d], _cell_of(axes[d], box[2 * d])
        cell[d], width = i, axes[d][i + 1] - axes[d][i]
        # At each end of the side, how much the low and the high node of the cell count.
        for end in range(2):
            x = box[2 * d + end]
            weight[d, end, 0], weight[d, end, 1] = (axis[i + 1] - x) / width, (x - axis[i]) / width

    time = np.empty(16)
    # The nodes of the cell, then one axis after another moved to the ends of the box.
    for j in range(16):
        time[j] = batches.values[
            cell[0] + (j & 1),
            cell[1] + ((j >> 1) & 1),
            cell[2] + ((j >> 2) & 1),
            cell[3] + ((j >> 3) & 1),
        ]

    for d in range(4):
        for j in range(16):
            if not (j >> d) & 1:
                low, high = time[j], time[j | (1 << d)]
                time[j] = weight[d, 0, 0] * low + weight[d, 0, 1] * high
                time[j | (1 << d)] = weight[d, 1, 0] * low + weight[d, 1, 1] * high

    # Times by tokens and by requests are replaced by lines below them, which are linear in C and n
    # (docstring, A box). Tokens are C + n (`Batches.dense`). Times by requests hang on n, with
    # prefills (``beside``) or without (``alone``).
    first = box[0] + box[4]
    start, slope, below = _fit_line_below(
        batches.dense, first, max(first, min(box[1] + box[5], batches.tokens))
    )
    requests = batches.beside if box[0] > 0 else batches.alone
    begin, rise, under = _fit_line_below(requests, box[4], box[5])

    for j in range(16):
        chunk, cached = box[j & 1], box[2 + ((j >> 1) & 1)]
        n, kv = box[4 + ((j >> 2) & 1)], box[6 + ((j >> 3) & 1)]
        kv_left = batches.room - chunk - cached
        corners[j, 0], corners[j, 1] = chunk, min(cached, batches.longest)
        corners[j, 2], corners[j, 3] = n, n * kv
        corners[j, 4], corners[j, 5] = n * (kv + batches.max_extra), kv_left
        corners[j, 6] = kv_left - n * (kv + batches.min_extra)
        corners[j, 7] = time[j] + start + slope * (chunk + n - first) + begin + rise * (n - box[4])
        corners[j, 8] = time[j]

    return below, under


@njit
def _is_proved(batches: Any, corners: Floats, vector: Floats, ratio: float, over: Floats) -> bool:
    """Whether the corners prove that a vector is at most ``ratio`` times the time all over the box.

    A multiplier is searched for under which all corners do: lambda is ``price`` up to k, and
    beyond it mu is what ``price`` is more. The excess at the worst corner is convex in the price.

    ``corners`` are those of `_fill_corners`, and ``vector`` is (phi, a, b, k, g, d). ``over[j]``
    gets what corner j has over the time under the last multipliers, and ``over[16]`` their size:
    the larger of k and the price.
    """
    # What d Q has over the time's squares and products. Where that is above 0, their sums are taken
    # at their most, C (C - 1) and C H; else at their least, where they add nothing (`batches`).
    k, curve = vector[3], max(0.0, vector[5] / 2 - ratio * batches.square)
    tilt = max(0.0, vector[5] - ratio * batches.cross)
    base, is_cut = np.empty(16), False

    for j in range(16):
        chunk, cached, n, held = corners[j, 0], corners[j, 1], corners[j, 2], corners[j, 3]
        base[j] = vector[0] + vector[1] * n + vector[2] * held + vector[4] * chunk
        base[j] += tilt * chunk * cached + curve * chunk * (chunk - 1)
        # The slants cut something off where the spare KV (column 6) is below 0, or D's own limit
        # (4) above the one that all share (5). Else no multiplier helps.
        is_cut = is_cut or corners[j, 6] < 0 or corners[j, 5] < corners[j, 4]

    price, low, high = (k if is_cut else 0.0), 0.0, np.inf
    # Rounding is covered in proportion to all terms and to the largest node (docstring, Rounding).
    slack = ROUNDING * ratio * batches.size

    for _ in range(_TRIES):
        highest, worst, over[16] = -np.inf, 0, max(k, price) if is_cut else 0.0
        for j in range(16):
            own_limit, shared, spare = corners[j, 4], corners[j, 5], corners[j, 6]
            if price < k:
                held_charge = (k - price) * own_limit + price * shared
            else:
                held_charge = k * shared + (price - k) * spare

            # No less than the sizes of all terms but the time, for which ``slack`` is.
            sizes = base[j] + max(k, price) * (own_limit + 2 * batches.room)
            over[j] = base[j] + held_charge - ratio * corners[j, 7] + ROUNDING * sizes + slack
            # A number that is none proves nothing.
            if np.isnan(over[j]):
                return False
            if over[j] > highest:
                highest, worst = over[j], j

        if highest <= 0:
            return True
        if not is_cut:
            return False

        # The slope of the excess at the worst corner, in the price to the left and to the right,
        # says on which side the min lies; in a min above 0 no multiplier will do.
        left_slope = corners[worst, 5] - corners[worst, 4] if price <= k else corners[worst, 6]
        right_slope = corners[worst, 6] if price >= k else left_slope
        if right_slope < 0:
            low = price
        elif left_slope > 0 and price > 0:
            high = price
        else:
            return False

        # Bisection; before an upper end is known, the price, which may be 0, is doubled and b + k
        # added.
        price = (low + high) / 2 if high < np.inf else 2 * price + vector[2] + vector[3]

    return False


@njit
def _raise_ratio(
    batches: Any, corners: Floats, vector: Floats, until: float, ratio: float, witness: Floats
) -> float:
    """Return the larger of a ratio and those at corners that are batches, and keep the last one.

    The one kept, in ``witness``, has n, K, D, C, Q and the time. ``corners`` are those of
    `_fill_corners`, and ``vector`` is (phi, a, b, k, g, d). ``until`` is how long a batch may last.
    """
    for j in range(16):
        chunk, cached, n, held = corners[j, 0], corners[j, 1], corners[j, 2], corners[j, 3]
        # Only corners that are batches within the limits are witnesses: with no KV too much (6).
        if corners[j, 6] < 0 or chunk + n > batches.tokens or chunk + n == 0:
            continue
        # A prefill takes a seat.
        if chunk > 0 and n + 1 > batches.seats:
            continue

        # The time itself, and not the lines below it: the grid's (8), by tokens and by requests.
        time = corners[j, 8] + _value_at(batches.dense, chunk + n)
        time += _value_at(batches.beside if chunk > 0 else batches.alone, n)
        # D (``after``) is the less of its two limits. As in `_is_proved`: sums of squares and
        # products are at their most where the vector pays more for them than they cost in time.
        # Else they are left out of both.
        after, squares = min(corners[j, 4], corners[j, 5]), 0.5 * chunk * (chunk - 1)
        curve = max(0.0, vector[5] / 2 - ratio * batches.square)
        tilt = max(0.0, vector[5] - ratio * batches.cross)
        if tilt > 0:
            time += batches.cross * chunk * cached
        if curve > 0:
            time += batches.square * chunk * (chunk - 1)

        # Longer batches are not of this class.
        if time > until:
            continue

        position = (cached * chunk if tilt > 0 else 0.0) + (squares if curve > 0 else 0.0)
        charge = vector[0] + vector[1] * n + vector[2] * held + vector[3] * after
        charge += vector[4] * chunk + vector[5] * position
        if charge > ratio * time:
            ratio = charge / time if time > 0 else np.inf
            witness[0], witness[1], witness[2], witness[3] = n, held, after, chunk
            witness[4], witness[5] = position, time

    return ratio


@njit
def _longest_side(box: Floats, corners: Floats, over: Floats, below: float, under: float) -> int:
    """Return the side of a box along which corners differ most, or -1 if it cannot be split.

    Side d has its ends in ``box[2 d]`` and ``box[2 d + 1]``, and corner j is at the high one where
    bit d of j is 1. Multipliers make corners alike that are on both sides of a slant, so what they
    price, the spare KV in column 6, counts too. ``below`` and ``under`` are how far lines are below
    the grids of tokens, which are C + n, and of requests, which are n. ``over`` is what
    `_is_proved` left: by corner, and in place 16 the size of the multipliers.
    """
    best, side = -1.0, -1
    for d in range(4):
        width = box[2 * d + 1] - box[2 * d]
        # C, H and n are integers, so a side below 1 has no other batch; kv is split as far as
        # floats say.
        if width < (1.0 if d < 3 else 1e-7 * (1 + box[6])):
            continue

        difference = 0.0
        for j in range(16):
            if not (j >> d) & 1:
                i = j | (1 << d)
                difference += abs(over[i] - over[j]) + over[16] * abs(corners[i, 6] - corners[j, 6])

        # How far the lines are below counts for each of the 8 pairs, on the sides that they go by.
        difference += 8 * (below if d == 0 or d == 2 else 0.0) + 8 * (under if d == 2 else 0.0)
        if difference > best:
            best, side = difference, d

    return side


@njit
def _scan_boxes(
    batches: Any,
    rows: tuple[Floats, Floats],
    ratio: Floats,
    witness: Floats,
    boxes: Floats,
    within: float,
    at_hand: Any,
) -> int:
    """Go on with branch and bound over boxes for so many steps, and return how many were taken.

    ``rows`` are the vectors and until when each counts. ``at_hand`` has the boxes at hand, a stack,
    how many vectors are not proved for each and which, and at last ``at``: how many of ``boxes``
    were begun and how many are at hand. ``within``: by which share a ratio may be above the least
    one. If it is 0, that of a vector which is not proved becomes infinite. ``witness`` keeps a
    batch for each vector (`_raise_ratio`).
    """
    (vectors, until), (stack, count, members, at) = rows, at_hand
    corners, over, steps = np.empty((16, 9)), np.empty(17), 0

    while steps < _AT_ONCE:
        if at[1] == 0:
            if at[0] == len(boxes):
                break

            stack[0], count[0] = boxes[at[0]], len(vectors)
            for v in range(len(vectors)):
                members[0, v] = v

            at[0] += 1
            at[1] = 1

        # The last box at hand is taken off the stack; if it is split, its row (``size``) gets the
        # first half. Steps are counted roughly: 20 for its corners, and 10 for each vector.
        at[1] -= 1
        size = at[1]
        box, unproved = stack[size], 0
        steps += 1
        # No batch within the limits lies in the box.
        if not _tighten(batches, box):
            continue

        below, under = _fill_corners(batches, box, corners)
        # No batch in the box is shorter, as its least time is that of a corner.
        shortest = corners[:, 7].min() - ROUNDING * batches.size
        steps += 20
        for p in range(count[size]):
            v = members[size, p]
            steps += 10
            # It is refuted already, or no batch of the box is of its class.
            if ratio[v] == np.inf or shortest > until[v]:
                continue
            if _is_proved(batches, corners, vectors[v], ratio[v], over):
                continue

            # A batch that nearly reaches the ratio raises it, too: else boxes around that batch
            # would be split until they tell the two apart.
            near = ratio[v] / (1 + within / 2)
            higher = _raise_ratio(batches, corners, vectors[v], until[v], near, witness[v])
            if higher > near:
                ratio[v] = higher * (1 + within) if within > 0 else np.inf
                if _is_proved(batches, corners, vectors[v], ratio[v], over):
                    continue

            members[size, unproved] = v
            unproved += 1

        if unproved == 0:
            continue

        side = _longest_side(box, corners, over, below, under)
        # The box cannot be split, so the ratio is raised until its corners prove it, and may be too
        # large; with ``within`` 0 the vector is refused.
        if side < 0 or size + 2 > _DEPTH:
            for p in range(unproved):
                v, rise = members[size, p], within
                while ratio[v] < 1e300 and not _is_proved(
                    batches, corners, vectors[v], ratio[v], over
                ):
                    ratio[v] = ratio[v] * (1 + rise) if within > 0 else np.inf
                    rise, steps = 2 * rise, steps + 10

            continue

        # Halve the box along its longest side: the excess of corners falls with the square of its
        # size.
        low, high = box[2 * side], box[2 * side + 1]
        middle = np.floor((low + high) / 2) if side < 3 else (low + high) / 2
        stack[size + 1] = box
        stack[size, 2 * side + 1] = middle
        stack[size + 1, 2 * side] = middle + 1 if side < 3 else middle
        count[size], count[size + 1] = unproved, unproved
        for k in range(unproved):
            members[size + 1, k] = members[size, k]

        at[1] += 2

    return steps
