r"""Branching on who waits for whom: the bound of `optsched.bounds.clock` on a short piece.

The clock Psi, exclusive time X_i, progress c_i, x_i, d, T_i, R_i and r_i are those of that module.
Requests are in order of arrival. a_k and C_k are the arrival and the completion of k. Let sigma_i
be the clock when i's progress begins, and U_i = Psi(C_i) - T_i. It is at least sigma_i, for
progress grows at most as fast as the clock. Progress at Psi is at least Psi - U_i before C_i.

*Branching.* Either i begins before k completes, sigma_i < Psi(C_k), or it is *after* k. A node of
the search has decided this for some pairs. Let s_i be a lower bound on sigma_i, and e_k = s_k + T_k
one on Psi(C_k). Where i is after k, s_i is at least e_k.

*The clock at arrivals.* At most G_i(c) of exclusive time has passed at progress c, where G_i(c) is
x_i for c < d, and then x_i + r_i (c - d) plus the exclusive part of one token, but never more
than R_i. Progress at a_k is at most Psi(a_k) - s_i. So with

    F_A(L) = L + sum_{i < k, i in A} G_i(max(0, L - s_i))

a_k = Psi(a_k) + sum_i X_i(a_k) <= F_A(Psi(a_k)) for A = all. F_A does not fall, so Psi(a_k) is at
least the level L_k at which F_A reaches a_k, and at least L_j for j < k. And s_k is at least L_k.

*Completions.* Let S be the set of requests that are after k. Their exclusive time may have passed
before k arrived, and then k does not wait for it. So let B = Psi(a_k) + sum_{i in S} X_i(a_k). As
above, a_k <= F_A(B) with A = all but S, so B is at least the level L_k^S at which F_A reaches a_k.
C_k = Psi(C_k) + sum_i X_i(C_k), where Psi(C_k) = T_k + U_k, U_k >= Psi(a_k) and X_i(C_k) >=
X_i(a_k). So

    C_k >= max(U_k, L_k^S) + T_k + R_k + sum_{i != k, not in S} X_i(C_k),
    X_i(C_k) >= x_i [U_i < e_k or i begins before k completes]
                + r_i min(T_i - d, max(0, e_k - U_i - d)).

Summed over k, the terms with U_i stand alone: with b_i = max(s_i, L_i^S) they are at least

    b_i + min_{u >= 0} [ u + sum_{k != i, i not after k} h_ik(e_k - b_i - u) ],

h_ik(y) = x_i [y > 0 or i begins before k completes] + r_i min(T_i - d, max(0, y - d)) being the
right-hand side of X_i(C_k) with y = e_k - U_i. (For U_i < b_i nothing is gained, since h falls with
U_i.) This function of u is piecewise linear and falls by jumps, so its least value is at the
corners e_k, e_k - d and e_k - T_i, or at 0.

*Search.* The node with the least value is taken first. The request i that would gain most from
u > 0 is decided against the last k that it waits for. The least value among open nodes is a bound,
whenever the search ends. A node where no undecided pair would gain keeps its value.

*Rounding* is as in that module: levels are lowered by 1e-9 of the time of arrival, and 1e-9 of the
sum of completions is subtracted.
"""

from __future__ import annotations

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
    """Requests of a piece in order of arrival; columns have the shape (n,).

    Attributes
    ----------
    arrival : ndarray of float64
        Seconds since the first arrival.
    prefill : ndarray of float64
        Own work of the prefill, in seconds: x of the module's text.
    fixed : float
        Fixed cost of a batch that prefills, in seconds: d.
    need : ndarray of float64
        Seconds of the clock that a request needs: T.
    rate : ndarray of float64
        Exclusive time per second of progress in decode steps: r.
    slack : ndarray of float64
        The exclusive part of one token, in seconds.
    """

    arrival: Floats
    prefill: Floats
    fixed: float
    need: Floats
    rate: Floats
    slack: Floats


@njit
def _level(piece: Piece, k: int, begins: Floats, decided: NDArray[np.int8], late: bool) -> float:
    """Return where F of the module's text reaches a_k; without those after k if ``late``."""
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

    The last is u of the module's text.
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
            least = before
            for i in range(n):
                if decided[k, i] == _AFTER:
                    least = max(least, begins[i] + need[i])

            if least > begins[k] + _SAFETY:
                begins[k] = least
                changed = True

        if not changed:
            break

    ends = begins + need
    total = completions = most = 0.0
    first = second = -1

    for i in range(n):
        base = begins[i]
        if (decided[:i, i] == _AFTER).any():
            base = max(base, _level(piece, i, begins, decided, True))

        alone = base + need[i] + prefill[i] + rate[i] * (need[i] - fixed)
        at_once, gain, wait = _gain(piece, i, base, ends, decided)
        total += alone + at_once - gain - arrival[i]
        completions += alone + at_once

        if gain > most + _EPSILON:
            last = -1
            for k in range(n):
                open_pair = k != i and decided[i, k] == 0 and ends[k] > base + _EPSILON
                if open_pair and ends[k] <= base + wait + _EPSILON:
                    last = k if last < 0 or ends[k] > ends[last] else last

            if last >= 0:
                most, first, second = gain, i, last

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
