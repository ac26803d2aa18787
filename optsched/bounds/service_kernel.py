"""The compiled greedy of `optsched.bounds.service`. Import lazily: it loads numba."""

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Ints = NDArray[np.int64]


Tree = tuple[Ints, Ints]
"""Sums of the differences of a sequence, and the largest of their prefix sums, by node."""


@njit
def _tree(change: Ints) -> Tree:
    """Return the tree of a sequence from its differences."""
    size = 1
    while size < len(change):
        size *= 2

    total = np.zeros(2 * size, np.int64)
    for k in range(len(change)):  # a slice takes longer to compile
        total[size + k] = change[k]

    best = total.copy()
    for k in range(size - 1, 0, -1):
        total[k] = total[2 * k] + total[2 * k + 1]
        best[k] = max(best[2 * k], total[2 * k] + best[2 * k + 1])

    return total, best


@njit
def _add(tree: Tree, i: int, change: int) -> None:
    """Add to the i-th difference."""
    total, best = tree
    k = i + len(total) // 2
    total[k] += change
    best[k] = total[k]
    k //= 2

    while k >= 1:
        total[k] = total[2 * k] + total[2 * k + 1]
        best[k] = max(best[2 * k], total[2 * k] + best[2 * k + 1])
        k //= 2


@njit
def _first_max(tree: Tree, last: int) -> int:
    """Return the largest of the first values, up to the one at ``last``."""
    total, best = tree
    k = last + len(total) // 2
    found = best[k]
    while k > 1:
        if k % 2 == 1:
            found = max(best[k - 1], total[k - 1] + found)

        k //= 2

    return int(found)


@njit
def fill(begin: Ints, end: Ints, work: Ints, order: Ints) -> Ints:
    """Return how much of each job fits, in the order of their ranks.

    The ends are looked at from the last one back: the least of those from i on is the last one less
    the largest of what that is later than them.
    """
    n = len(begin)
    done = np.zeros(n, np.int64)
    if n == 0:
        return done

    latest, later, begins = end[n - 1], np.zeros(n, np.int64), begin.copy()
    for i in range(1, n):  # slices take seconds more to compile
        begins[i] -= begin[i - 1]
        later[n - i] = end[i] - end[i - 1]

    low, high = _tree(begins), _tree(later)

    # The least work first, each as far as all windows leave room, fits the most requests.
    for p in range(n):
        i = order[p]
        room = latest - _first_max(high, n - 1 - i) - _first_max(low, i)
        part = min(work[i], max(room, 0))

        if part > 0:
            done[i] = part
            latest -= part
            if i > 0:
                _add(high, n - i, -part)
            if i + 1 < n:
                _add(low, i + 1, -part)

    return done
