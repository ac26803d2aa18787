"""The compiled greedy of `optsched.bounds.service`. Import lazily: it loads numba."""

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Ints = NDArray[np.int64]


@njit
def _set(total: Ints, best: Ints, sign: int, i: int, change: int) -> None:
    """Add to the i-th difference; ``best`` is the min (sign 1) or max (-1) of prefix sums."""
    k = i + total.shape[0] // 2
    total[k] += change
    best[k] = total[k]
    k //= 2

    while k >= 1:
        total[k] = total[2 * k] + total[2 * k + 1]
        right = total[2 * k] + best[2 * k + 1]
        best[k] = min(best[2 * k], right) if sign > 0 else max(best[2 * k], right)
        k //= 2


@njit
def _first_max(total: Ints, best: Ints, last: int) -> int:
    """Return the largest of the prefix sums 0, ..., last."""
    k = last + total.shape[0] // 2
    found = best[k]
    while k > 1:
        if k % 2 == 1:
            found = max(best[k - 1], total[k - 1] + found)

        k //= 2

    return int(found)


@njit
def _last_min(total: Ints, best: Ints, first: int) -> int:
    """Return the smallest of the prefix sums first, first + 1, ..."""
    k = first + total.shape[0] // 2
    found = best[k]
    while k > 1:
        if k % 2 == 0:
            found = min(found, total[k] + best[k + 1])
        else:
            found += total[k - 1]

        k //= 2

    return int(found)


@njit
def fill(begin: Ints, end: Ints, work: Ints, order: Ints) -> Ints:
    """Return how much of each job fits, in the order of their ranks."""
    n = begin.shape[0]
    size = 1
    while size < n + 1:
        size *= 2

    huge = np.int64(2**62)
    low_sum, low_best = np.zeros(2 * size, np.int64), np.zeros(2 * size, np.int64)
    high_sum, high_best = np.zeros(2 * size, np.int64), np.zeros(2 * size, np.int64)

    for i in range(n):
        low_sum[size + i] = begin[i] - (begin[i - 1] if i > 0 else 0)
        high_sum[size + i] = end[i] - (end[i - 1] if i > 0 else 0)

    for i in range(n, size):  # never the max, never the min
        low_sum[size + i] = -huge if i == n else 0
        high_sum[size + i] = huge // 2 if i == n else 0

    low_best[size:], high_best[size:] = low_sum[size:], high_sum[size:]
    for k in range(size - 1, 0, -1):
        low_sum[k] = low_sum[2 * k] + low_sum[2 * k + 1]
        low_best[k] = max(low_best[2 * k], low_sum[2 * k] + low_best[2 * k + 1])
        high_sum[k] = high_sum[2 * k] + high_sum[2 * k + 1]
        high_best[k] = min(high_best[2 * k], high_sum[2 * k] + high_best[2 * k + 1])

    # The least work first, each as far as all windows leave room, fits the most requests.
    done = np.zeros(n, np.int64)
    for p in range(n):
        i = order[p]
        room = _last_min(high_sum, high_best, i) - _first_max(low_sum, low_best, i)
        part = min(work[i], max(room, 0))

        if part > 0:
            done[i] = part
            _set(high_sum, high_best, 1, i, -part)
            _set(low_sum, low_best, -1, i + 1, -part)

    return done
