"""The compiled greedy of `optsched.bounds.service`. Import lazily: it loads numba.

A sequence of which the max up to a place is asked is kept as a `Tree` of its differences: each node
has the sum of those below it, and their max sum from the first of them on. To add to one difference
moves all values from there on.
"""

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Ints = NDArray[np.int64]


Tree = tuple[Ints, Ints]
"""By node, the sum and the max prefix sum of a sequence's differences: maxima take O(log n).

Node 1 is the root, and leaves have one difference each, after the first half of the array.
"""


@njit
def _new_tree(change: Ints) -> Tree:
    """Return the tree of a sequence from its differences."""
    size = 1
    while size < len(change):
        size *= 2

    total = np.zeros(2 * size, np.int64)
    for k in range(len(change)):  # a slice takes longer to compile
        # Leaves are in the second half of the arrays, and node k has the children 2 k and 2 k + 1.
        total[size + k] = change[k]

    best = total.copy()
    for k in range(size - 1, 0, -1):
        total[k] = total[2 * k] + total[2 * k + 1]
        best[k] = max(best[2 * k], total[2 * k] + best[2 * k + 1])

    return total, best


@njit
def _add_to_step(tree: Tree, place: int, change: int) -> None:
    """Add to one difference, which moves all values of the sequence from that place on.

    The nodes above it are computed again, up to the root.
    """
    total, best = tree
    k = place + len(total) // 2
    total[k] += change
    best[k] = total[k]
    k //= 2

    while k >= 1:
        total[k] = total[2 * k] + total[2 * k + 1]
        best[k] = max(best[2 * k], total[2 * k] + best[2 * k + 1])
        k //= 2


@njit
def _max_up_to(tree: Tree, last: int) -> int:
    """Return the largest value of the sequence up to the one at ``last``."""
    total, best = tree
    k = last + len(total) // 2
    highest = best[k]
    while k > 1:
        # From a right child the walk up passes a left sibling, whose values come earlier and whose
        # sum all later ones contain.
        if k % 2 == 1:
            highest = max(best[k - 1], total[k - 1] + highest)

        k //= 2

    return int(highest)


@njit
def fill(begin: Ints, end: Ints, work: Ints, order: Ints) -> Ints:
    """Return how much of each job fits if jobs are placed in this order, each as far as it fits.

    ``order`` has the indices of the jobs as they are placed. Begins and ends ascend together. Jobs
    a to b have ``end_b - begin_a`` less what is placed of them. So let each end lose what is placed
    up to it, and each begin what is placed before it: job i fits as far as the min end from i on is
    behind the max begin up to i. Both are prefix maxima: ends are kept from the last one back, each
    as what the last one is later than it is.
    """
    n = len(begin)
    done = np.zeros(n, np.int64)
    if n == 0:
        return done

    # Differences of the begins, and of the ends from the last one back, as ``latest`` less each.
    latest, end_steps, begin_steps = end[n - 1], np.zeros(n, np.int64), begin.copy()
    for i in range(1, n):  # slices take seconds more to compile
        begin_steps[i] -= begin[i - 1]
        end_steps[n - i] = end[i] - end[i - 1]

    begin_sums, end_sums = _new_tree(begin_steps), _new_tree(end_steps)

    # The loads that fit form a polymatroid, so taking the jobs of the least work first is optimal
    # (docstring of `service`, Counting: Edmonds 1970).
    for rank in range(n):
        i = order[rank]
        # The end of job i is at the place n - 1 - i, and those of later jobs are before it.
        slack = latest - _max_up_to(end_sums, n - 1 - i) - _max_up_to(begin_sums, i)
        amount = min(work[i], max(slack, 0))

        # Ends from i on and begins behind i lose the amount. All ends are relative to the last one,
        # so when this one falls those before i get it back.
        if amount > 0:
            done[i] = amount
            latest -= amount
            if i > 0:
                _add_to_step(end_sums, n - i, -amount)
            if i + 1 < n:
                _add_to_step(begin_sums, i + 1, -amount)

    return done
