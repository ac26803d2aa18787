"""Serial placement: each request in turn at its earliest feasible start, compiled.

A request that starts in round k holds base + j tokens in round k + j, for j = 1 to its output.
``use`` is the KV in use by round. `put` adds a run to it (sign 1) or removes one (-1).
"""

from optsched.problem.kernel import njit


@njit(nogil=True, inline="always")
def earliest(use, capacity, base, output, start, last):  # type: ignore[no-untyped-def]
    """Return the first feasible start from ``start`` to ``last``, or -1.

    A request that starts in round k holds base + j tokens in round k + j, for j = 1 to output.
    Round t has room for a request that starts at or after t - (capacity - use - base). If the run
    does not fit in round t, the start moves there. The rounds checked before stay feasible, since a
    later start holds less in them. So every round is looked at once. ``use`` has so many rounds
    that the run ends within it for each start up to ``last``.
    """
    k = start
    t = k
    while t < k + output:
        t += 1
        free = capacity - use[t] - base
        if t - k > free:
            k = t - free if free > 0 else t  # no room at all: the run is after round t
            if k > last:
                return -1

    return k


@njit(nogil=True, inline="always")
def put(use, base, output, start, sign):  # type: ignore[no-untyped-def]
    """Add the KV of a run to the use of each round (``sign`` 1), or remove it (-1)."""
    # Two loops, so that the inner one has no product.
    if sign > 0:
        for j in range(1, output + 1):
            use[start + j] += base + j
    else:
        for j in range(1, output + 1):
            use[start + j] -= base + j


@njit(nogil=True)
def place_in_order(order, arrival, output, base, capacity, use, starts, homes):  # type: ignore[no-untyped-def]
    """Fill in each request's earliest feasible start on any worker, and in `homes` this worker.

    ``use`` has a row of rounds for each worker, and is filled as well. In the j-th round of its run
    a request holds base + j tokens.
    """
    end = 0  # of all that is placed so far
    for i in order:
        # There every worker is empty, so that this start is feasible in any case.
        starts[i] = max(end, arrival[i])
        for w in range(len(use)):
            # A further worker counts only if it is sooner: of equal ones the first is taken.
            last = starts[i] - 1 if w > 0 else starts[i]
            k = earliest(use[w], capacity, base[i], output[i], arrival[i], last)
            # Without a conflict `earliest` returns the arrival, even where that is beyond `last`.
            if arrival[i] <= k <= last:
                starts[i], homes[i] = k, w

        put(use[homes[i]], base[i], output[i], starts[i], 1)
        end = max(end, starts[i] + output[i])


@njit(nogil=True)
def compact(arrival, output, base, capacity, use, starts, order):  # type: ignore[no-untyped-def]
    """Move every request in turn to its earliest feasible start. Return the rounds gained.

    ``use`` includes the runs of all, at their ``starts``.
    """
    # Its old start is feasible still, so the new one is no later.
    gain = 0
    for i in order:
        old = starts[i]
        put(use, base[i], output[i], old, -1)
        starts[i] = earliest(use, capacity, base[i], output[i], arrival[i], old)
        put(use, base[i], output[i], starts[i], 1)
        gain += old - starts[i]

    return gain


@njit(nogil=True)
def fill(output, base, use, starts):  # type: ignore[no-untyped-def]
    """Add the KV of every run to the use of each round."""
    for i in range(len(starts)):
        put(use, base[i], output[i], starts[i], 1)
