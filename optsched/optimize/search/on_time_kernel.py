"""Whom to let go on a machine without batches. Import lazily: it loads numba."""

import heapq

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.problem.kernel import njit

# Of a longer stretch, only so many of the latest requests may be let go. So the time of a pass
# grows with the number of requests, and not with its square.
_LATEST = 4096
# A job is late if it ends later than this after its deadline, in seconds.
_LATE = 1e-9


@njit
def _took_up(of: Floats, after: Floats, m: int, deadline: float, clock: float) -> int:
    """Note that the machine takes up a job of a deadline. Return how many deadlines are kept."""
    if m > 0 and np.isnan(after[m - 1]):
        after[m - 1] = clock
    while m > 0 and of[m - 1] <= deadline:
        m -= 1

    of[m], after[m] = deadline, np.nan
    return m + 1


@njit
def _pass(release: Floats, due: Floats, work: Floats, order: Ints, gone: NDArray[np.bool_]) -> int:
    """Serve all by earliest deadlines, and let go whoever is too much; return how many.

    The clock is then set back by what was done of it, perhaps too far: the next pass sees to it.
    """
    n, jobs = len(gone), len(release)
    rest = work.copy()
    # Deadlines that the machine worked for, in order of time, without those before a later one, and
    # when it took up the job that came after them.
    of, after = np.empty(2 * jobs + 2), np.empty(2 * jobs + 2)
    latest = np.nan  # the deadline that it works for
    heap = [(0.0, np.int64(0))]
    heap.pop()
    clock, k, m, count = 0.0, 0, 0, 0

    while k < jobs or len(heap) > 0:
        if len(heap) == 0 and release[order[k]] > clock:
            m = _took_up(of, after, m, np.inf, clock)
            latest = np.inf
            clock = release[order[k]]

        while k < jobs and release[order[k]] <= clock:
            j = order[k]
            k += 1
            if not gone[j % n] and due[j] < np.inf:
                heapq.heappush(heap, (due[j], j))

        if len(heap) == 0:
            continue

        deadline, j = heap[0]
        if gone[j % n]:
            heapq.heappop(heap)
            continue

        until = release[order[k]] if k < jobs else np.inf
        run = min(rest[j], until - clock)
        if latest != deadline:
            m = _took_up(of, after, m, deadline, clock)
            latest = deadline

        clock += run
        rest[j] -= run
        if clock <= deadline + _LATE:
            if rest[j] <= 0.0:
                heapq.heappop(heap)

            continue

        since = 0.0
        if m > 1:  # the last of them is the deadline, those before it are later
            since = after[m - 2]

        largest, top = int(j % n), 0.0
        for p in range(k - 1, max(-1, k - 1 - 2 * _LATEST), -1):
            i = order[p]
            if release[i] < since - _LATE:
                break
            if i >= n or gone[i]:
                continue

            size = work[i] if due[i] <= deadline else 0.0
            size += work[n + i] if due[n + i] <= deadline else 0.0
            if size > top or (size == top and i < largest):
                largest, top = int(i), size

        gone[largest] = True
        count += 1
        done = work[largest] - rest[largest] + work[n + largest] - rest[n + largest]
        clock = max(since, clock - done)

    return count


@njit
def let_go(
    release: Floats, first_due: Floats, last_due: Floats, prefill: Floats, decodes: Floats
) -> NDArray[np.bool_]:
    """Return whom to let go so that earliest deadlines, or infinity, serve all others in time."""
    n = len(release)
    both = np.concatenate((release, release))
    due, work = np.concatenate((first_due, last_due)), np.concatenate((prefill, decodes))
    order = np.argsort(both)
    gone = np.zeros(n, dtype=np.bool_)
    while _pass(both, due, work, order, gone) > 0:
        pass

    return gone
