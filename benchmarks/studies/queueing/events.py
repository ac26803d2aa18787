"""The compiled event loop of the simulations: one server, which serves the smallest rank first.

Jobs of equal rank are served in the order of their arrivals.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

from .jobs import Floats

Ints = NDArray[np.int64]
Run = tuple[Floats, float, float]
"""Response times of shape (n,), then the mean and the largest sum of ages in the system."""


def limited_preemption(
    arrival: Floats, size: Floats, prediction: Floats, c: float, first: int, last: int
) -> Run:
    """Serve jobs by SPRPT with limited preemption.

    The sums of ages, of which the mean and the largest are returned, are those between the
    arrivals ``first`` and ``last``.
    """
    once = np.ones(len(size), dtype=np.int64)
    return _serve(arrival, size, once, prediction, c, True, first, last)


def stepwise_ranks(arrival: Floats, size: Ints, rank: Floats, first: int, last: int) -> Run:
    """Serve jobs whose rank changes after every unit of service.

    ``rank`` holds the ranks of the first job, then those of the second, and so on. The answer is
    that of `limited_preemption`.
    """
    return _serve(arrival, np.ones(len(size)), size, rank, 1.0, False, first, last)


@njit
def _serve(
    arrival: Floats,
    length: Floats,
    stages: Ints,
    rank: Floats,
    c: float,
    falls: bool,
    first: int,
    last: int,
) -> Run:
    """Serve jobs in stages. Each stage takes the job's ``length`` and has a rank of its own.

    Where ranks fall during a stage (``falls``), a job whose service in the stage has reached the
    share ``c`` of the stage's first rank is not preempted any more.
    """
    n = len(arrival)
    response = np.empty(n)
    done = np.zeros(n, dtype=np.int64)
    part = np.zeros(n)  # service received in the present stage
    at = np.cumsum(stages) - stages
    waiting = [(0.0, 0) for _ in range(0)]
    clock = held = area = peak = 0.0
    running, known = -1, 0

    while known < n or running >= 0:
        if running < 0:
            clock = arrival[known]
            running = known
            known += 1
            continue

        left = length[running] - part[running]
        arrives = known < n and arrival[known] < clock + left
        step = arrival[known] - clock if arrives else left

        if first < known <= last:
            area += (held + step / 2) * step
            peak = max(peak, held + step)

        held += step
        clock += step
        if arrives:
            part[running] += step
            own, new = rank[at[running] + done[running]], rank[at[known]]
            free = not falls or part[running] < c * own
            if falls:
                own -= part[running]
            if free and new < own:
                heapq.heappush(waiting, (own, running))
                running = known
            else:
                heapq.heappush(waiting, (new, known))

            known += 1
            continue

        done[running] += 1
        part[running] = 0.0
        if done[running] < stages[running]:
            own = rank[at[running] + done[running]]
            if len(waiting) > 0:
                running = heapq.heappushpop(waiting, (own, running))[1]

            continue

        response[running] = clock - arrival[running]
        held -= stages[running] * length[running]
        running = -1

        if len(waiting) > 0:
            running = heapq.heappop(waiting)[1]
        else:
            held = 0.0  # so that rounding errors end with the busy period

    return response, area / (arrival[last] - arrival[first]), peak
