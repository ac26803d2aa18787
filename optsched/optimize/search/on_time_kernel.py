"""Whom to let go on a machine without batches (`optsched.optimize.search.on_time`).

Import this module lazily: it loads numba.
"""

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
def _push_deadline(
    deadlines: Floats, left_at: Floats, depth: int, deadline: float, clock: float
) -> int:
    """Put the deadline that the machine works for from now on upon a stack. Return its new depth.

    Deadlines fall from the bottom of the stack to its top: those that are no later than the new one
    go. ``left_at`` says when the machine turned from each of them, NaN for the one at the top.
    """
    if depth > 0 and np.isnan(left_at[depth - 1]):
        left_at[depth - 1] = clock
    while depth > 0 and deadlines[depth - 1] <= deadline:
        depth -= 1

    deadlines[depth], left_at[depth] = deadline, np.nan
    return depth + 1


@njit
def _let_go_in_a_pass(
    release: Floats, due: Floats, work: Floats, order: Ints, gone: NDArray[np.bool_]
) -> int:
    """Serve all by earliest deadlines, and set `gone` for whoever is too much; return how many.

    With n requests, job i < n is the prefill of request i and job n + i its decodes. ``release``,
    ``due`` and ``work`` are by job, in seconds, and ``order`` has the jobs by release. Whom an
    earlier pass has set in `gone` (by request) is not served.

    A request that is let go at a missed deadline may have been worked for already. The clock is
    then set back by that work, perhaps too far: the next pass, from the beginning, sees to it.
    """
    n, jobs = len(gone), len(release)
    remaining = work.copy()
    # Idle time counts as work for an infinite deadline. Deadlines on the stack differ, so there are
    # no more of them than jobs, and infinity. The arrays have more than enough places.
    deadlines, left_at = np.empty(2 * jobs + 2), np.empty(2 * jobs + 2)
    depth = 0
    served = np.nan  # the deadline that the machine works for
    heap = [(0.0, np.int64(0))]  # of (deadline, job); numba needs an entry to know the type
    heap.pop()
    clock, arrived, count = 0.0, 0, 0

    while arrived < jobs or len(heap) > 0:
        if len(heap) == 0 and release[order[arrived]] > clock:
            depth = _push_deadline(deadlines, left_at, depth, np.inf, clock)
            served = np.inf
            clock = release[order[arrived]]

        while arrived < jobs and release[order[arrived]] <= clock:
            j = order[arrived]
            arrived += 1
            # A job without a deadline is left out: all others go before it, and it is never late.
            if not gone[j % n] and due[j] < np.inf:
                heapq.heappush(heap, (due[j], j))

        # All that have arrived were let go or have no deadline.
        if len(heap) == 0:
            continue

        deadline, j = heap[0]
        # Its request was let go after the job had come.
        if gone[j % n]:
            heapq.heappop(heap)
            continue

        # A job runs until it is done or the next one comes, which may have an earlier deadline.
        until = release[order[arrived]] if arrived < jobs else np.inf
        run = min(remaining[j], until - clock)
        if served != deadline:
            depth = _push_deadline(deadlines, left_at, depth, deadline, clock)
            served = deadline

        clock += run
        remaining[j] -= run
        if clock <= deadline + _LATE:
            if remaining[j] <= 0.0:
                heapq.heappop(heap)

            continue

        # This deadline is missed. Since the machine turned from a later one (or from idling), it
        # has only worked for this one and earlier ones, so one request of that time must go. At the
        # top of the stack is this deadline, and next below it the later one.
        since = left_at[depth - 2] if depth > 1 else 0.0

        # The one with the most work due by then goes; of equal ones, that of the smallest number.
        # It looks back over those that have come since then, with two jobs of each request.
        largest, largest_size = int(j % n), 0.0
        for k in range(arrived - 1, max(-1, arrived - 1 - 2 * _LATEST), -1):
            i = order[k]
            if release[i] < since - _LATE:
                break
            # A request counts once, at its prefill.
            if i >= n or gone[i]:
                continue

            size = work[i] if due[i] <= deadline else 0.0
            size += work[n + i] if due[n + i] <= deadline else 0.0
            if size > largest_size or (size == largest_size and i < largest):
                largest, largest_size = int(i), size

        # The time that it has taken is free again, but nothing before `since` can change.
        gone[largest] = True
        count += 1
        done = work[largest] - remaining[largest] + work[n + largest] - remaining[n + largest]
        clock = max(since, clock - done)

    return count


def let_go(
    release: Floats, first_due: Floats, last_due: Floats, prefill: Floats, decodes: Floats
) -> NDArray[np.bool_]:
    """Return whom to let go so that earliest deadlines serve all others in time.

    By request (shape (n,)), in seconds: its release, the deadlines of its first and last token
    (infinite without one), and the work of its prefill and of its decodes.
    """
    # Job i is the prefill of request i, and job n + i its decodes, which come at the same time.
    n = len(release)
    both = np.concatenate((release, release))
    due, work = np.concatenate((first_due, last_due)), np.concatenate((prefill, decodes))
    order = np.argsort(both, kind="stable")
    gone = np.zeros(n, dtype=np.bool_)
    # Each pass starts anew without those let go, until one lets nobody go.
    while _let_go_in_a_pass(both, due, work, order, gone) > 0:
        pass

    return gone
