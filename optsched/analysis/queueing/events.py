"""Compiled event loops of the simulations: one server, the least (rank, arrival) is served."""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.analysis.queueing.jobs import Floats

Ints = NDArray[np.int64]


@njit(cache=True)
def limited_preemption(
    arrival: Floats, size: Floats, prediction: Floats, c: float, first: int, last: int
) -> tuple[Floats, float, float]:
    """Serve jobs by SPRPT with limited preemption.

    Returns every response time, and the mean and the largest sum of ages in the system between
    the arrivals ``first`` and ``last``.
    """
    n = len(arrival)
    response = np.empty(n)
    age = np.zeros(n)
    waiting = [(0.0, 0) for _ in range(0)]
    clock = held = area = peak = 0.0
    running, known = -1, 0
    while known < n or running >= 0:
        if running < 0:
            clock = arrival[known]
            running = known
            known += 1
            continue
        left = size[running] - age[running]
        arrives = known < n and arrival[known] < clock + left
        step = arrival[known] - clock if arrives else left
        if first < known <= last:
            area += (held + step / 2) * step
            peak = max(peak, held + step)
        held += step
        clock += step
        if arrives:
            age[running] += step
            rank = prediction[running] - age[running]
            if age[running] < c * prediction[running] and prediction[known] < rank:
                heapq.heappush(waiting, (rank, running))
                running = known
            else:
                heapq.heappush(waiting, (prediction[known], known))
            known += 1
        else:
            response[running] = clock - arrival[running]
            held -= size[running]
            running = -1
            if len(waiting) > 0:
                running = heapq.heappop(waiting)[1]
            else:
                held = 0.0  # no rounding errors beyond a busy period
    return response, area / (arrival[last] - arrival[first]), peak


@njit(cache=True)
def stepwise_ranks(
    arrival: Floats, size: Ints, rank: Floats, first: int, last: int
) -> tuple[Floats, float, float]:
    """Serve jobs whose rank changes after every unit of service; ``rank`` has job after job.

    Returns what `limited_preemption` does.
    """
    n = len(arrival)
    response = np.empty(n)
    done = np.zeros(n, dtype=np.int64)
    part = np.zeros(n)  # of the present unit
    at = np.zeros(n, dtype=np.int64)
    at[1:] = np.cumsum(size)[:-1]
    waiting = [(0.0, 0) for _ in range(0)]
    clock = held = area = peak = 0.0
    running, known = -1, 0
    while known < n or running >= 0:
        if running < 0:
            clock = arrival[known]
            running = known
            known += 1
            continue
        left = 1.0 - part[running]
        arrives = known < n and arrival[known] < clock + left
        step = arrival[known] - clock if arrives else left
        if first < known <= last:
            area += (held + step / 2) * step
            peak = max(peak, held + step)
        held += step
        clock += step
        own = rank[at[running] + done[running]]
        if arrives:
            part[running] += step
            if rank[at[known]] < own:
                heapq.heappush(waiting, (own, running))
                running = known
            else:
                heapq.heappush(waiting, (rank[at[known]], known))
            known += 1
            continue
        done[running] += 1
        part[running] = 0.0
        if done[running] < size[running]:
            own = rank[at[running] + done[running]]
            if len(waiting) > 0:
                running = heapq.heappushpop(waiting, (own, running))[1]
            continue
        response[running] = clock - arrival[running]
        held -= size[running]
        running = -1
        if len(waiting) > 0:
            running = heapq.heappop(waiting)[1]
        else:
            held = 0.0
    return response, area / (arrival[last] - arrival[first]), peak
