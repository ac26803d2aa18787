"""A search over who waits for whom: the bound of `optsched.bounds.clock` on a short piece.

`optsched.bounds.checker.clock` has the notation and the proof of what a node says. The node with
the least value is taken first. The request i that would gain most from u > 0 is decided against the
last k that it waits for. The least value among open nodes is a bound, whenever the search ends. A
node where no undecided pair would gain keeps its value.

Levels are lowered by 1e-9 of the time of arrival, and 1e-9 of the sum of completions is subtracted,
for rounding.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Floats = NDArray[np.float64]

_BEFORE, _AFTER = 1, 2
_SAFETY = 1e-9
_EPSILON = 1e-12


class Piece(NamedTuple):
    """Requests of a piece in order of arrival; times in seconds, columns of the shape (n,).

    ``arrival`` counts from the first one. In the notation of the proof ``prefill`` is x, ``fixed``
    d, ``need`` T, and ``rate`` r. ``slack`` is the exclusive part of one token.
    """

    arrival: Floats
    prefill: Floats
    fixed: float
    need: Floats
    rate: Floats
    slack: Floats


@njit
def _level(piece: Piece, k: int, begins: Floats, decided: NDArray[np.int8], late: bool) -> float:
    """Return where F of the proof reaches a_k; without those after k if ``late``."""
    arrival, prefill, fixed, need, rate, slack = piece
    counted = np.empty(k, np.int64)
    m = 0
    level = now = 0.0

    for i in range(k):
        if late and decided[i, k] == _AFTER:
            continue

        counted[m] = i
        m += 1
        now += prefill[i]
        if begins[i] + fixed <= 0:
            now += min(slack[i], rate[i] * (need[i] - fixed))

    while now < arrival[k]:
        end, slope = level + (arrival[k] - now), 1.0
        for q in range(m):
            i = counted[q]
            first = begins[i] + fixed
            last = first + need[i] - fixed - slack[i] / max(rate[i], 1e-300)

            if level < first:
                end = min(end, first)
            elif level < last:
                slope += rate[i]
                end = min(end, last)

        if now + (end - level) * slope >= arrival[k] or end <= level:  # what is left is no time
            level += (arrival[k] - now) / slope
            break

        now += (end - level) * slope
        for q in range(m):
            first = begins[counted[q]] + fixed
            if level < first <= end:
                i = counted[q]
                now += min(slack[i], rate[i] * (need[i] - fixed))

        level = end

    return max(0.0, level - _SAFETY * arrival[k])


@njit
def _gain(
    piece: Piece, i: int, base: float, ends: Floats, decided: NDArray[np.int8]
) -> tuple[float, float, float]:
    """Return what others pay for i if it does not wait, the most that waiting gains, and how long.

    The last is u of the proof.
    """
    _, prefill, fixed, need, rate, _ = piece
    n = ends.shape[0]
    corners = np.empty(3 * n + 1)
    corners[0], m = 0.0, 1

    for k in range(n):
        after = ends[k] - base
        if k != i and decided[i, k] != _AFTER and after > 0:
            for u in (after, after - fixed, after - need[i]):
                if u > 0:
                    corners[m] = u
                    m += 1

    at_once = best = wait = 0.0
    for q in range(m):
        value = corners[q]
        for k in range(n):
            if k == i or decided[i, k] == _AFTER:
                continue

            y = ends[k] - base - corners[q]
            if decided[i, k] == _BEFORE or y > _EPSILON:
                value += prefill[i]

            value += rate[i] * max(0.0, min(y, need[i]) - fixed)

        if q == 0:
            at_once = best = value
        elif value < best:
            best, wait = value, corners[q]

    return at_once, at_once - best, wait


@njit
def node_value(piece: Piece, decided: NDArray[np.int8]) -> tuple[float, int, int]:
    """Return what the decisions prove about the total latency, and the pair to decide next."""
    arrival, prefill, fixed, need, rate, _ = piece
    n = arrival.shape[0]
    begins = np.zeros(n)

    for _ in range(n + 2):  # a cycle of waiting raises them forever; each round is valid
        changed = False
        before = 0.0
        for k in range(n):
            before = max(before, _level(piece, k, begins, decided, False))
            earliest = before
            for i in range(n):
                if decided[k, i] == _AFTER:
                    earliest = max(earliest, begins[i] + need[i])

            if earliest > begins[k] + _SAFETY:
                begins[k] = earliest
                changed = True

        if not changed:
            break

    ends = begins + need
    total = completions = largest = 0.0
    first = second = -1

    for i in range(n):
        base = begins[i]
        if (decided[:i, i] == _AFTER).any():
            base = max(base, _level(piece, i, begins, decided, True))

        alone = base + need[i] + prefill[i] + rate[i] * (need[i] - fixed)
        at_once, gain, wait = _gain(piece, i, base, ends, decided)
        total += alone + at_once - gain - arrival[i]
        completions += alone + at_once

        if gain > largest + _EPSILON:
            last = -1
            for k in range(n):
                open_pair = k != i and decided[i, k] == 0 and ends[k] > base + _EPSILON
                if open_pair and ends[k] <= base + wait + _EPSILON:
                    last = k if last < 0 or ends[k] > ends[last] else last

            if last >= 0:
                largest, first, second = gain, i, last

    return total - _SAFETY * completions, first, second


@njit(nogil=True)
def searched(piece: Piece, nodes: int) -> tuple[float, NDArray[np.int64]]:
    """Return the bound on total latency that a search of so many nodes proves, and its tree."""
    n = piece.arrival.shape[0]
    decided = np.zeros((nodes + 2, n, n), np.int8)
    pairs = np.zeros((nodes + 2, 2), np.int64)
    children = np.zeros(nodes + 2, np.int64)  # the first of two, or 0
    value, i, k = node_value(piece, decided[0])
    pairs[0] = i, k
    open_nodes = [(value, 0)]
    used = 1

    # Every schedule belongs to an open node, so the least of their values is a bound.
    while True:
        value, at = heapq.heappop(open_nodes)
        i, k = pairs[at]
        if i < 0 or used + 2 > nodes:
            return value, _in_order(n, pairs, children, used)

        children[at] = used
        for choice in (_BEFORE, _AFTER):
            decided[used] = decided[at]
            decided[used, i, k] = choice
            found, first, second = node_value(piece, decided[used])
            pairs[used] = first, second
            heapq.heappush(open_nodes, (max(value, found), used))
            used += 1


@njit
def _in_order(
    n: int, pairs: NDArray[np.int64], children: NDArray[np.int64], used: int
) -> NDArray[np.int64]:
    """Return a code for each node of a tree, before those of its children."""
    branches = np.zeros(used, np.int64)
    stack = [0]
    for place in range(used):
        at = stack.pop()
        if children[at] > 0:
            branches[place] = 1 + pairs[at, 0] * n + pairs[at, 1]
            stack.append(children[at] + 1)
            stack.append(children[at])

    return branches
