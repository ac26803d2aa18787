"""Orders of requests that make schedules, annealed: forward and backward in turn.

Forward each request is placed at its earliest feasible start; backward, in order of completion, the
last first, each as late as fits, then moved to its earliest start. Deterministic from the seed,
but for what a time limit cuts off. Import lazily: it loads numba.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.optimize.ramp.relaxation import Jobs
from optsched.optimize.search.placement import put

CHUNK = 2000
"""Orders between two looks at the clock, and"""
_CHUNK_ROUNDS = 20_000_000
"""most rounds of runs in them: some 0.1 s, however long outputs are."""


@njit(cache=True, nogil=True, inline="always")
def _soonest(used: Any, capacity: int, first_kv: int, output: int, start: int) -> int:
    """Return the earliest feasible start from ``start`` on.

    As `optsched.optimize.search.placement.earliest`, but each run is looked at from its peak
    backward: the first conflict found asks for the longest jump, which is twice as fast where many
    are live.
    """
    k = start
    while True:
        later = k
        for j in range(output - 1, -1, -1):
            room = capacity - used[k + 1 + j]
            if first_kv + j > room:
                later = k + j - (room - first_kv) if room >= first_kv else k + 1 + j
                break
        if later == k:
            return k
        k = later


@njit(cache=True, nogil=True, inline="always")
def move(order: Any, a: int, b: int) -> None:
    """Move what stands at ``a`` to ``b``; what is between moves up or down."""
    moved = order[a]
    step = 1 if a < b else -1
    for k in range(a, b, step):
        order[k] = order[k + step]
    order[b] = moved


@njit(cache=True, nogil=True)
def serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any
) -> int:
    """Place the requests in order, each at its earliest feasible start; return sum of ends.

    ``used`` is all zero before and after, and longer than any schedule.
    """
    total = 0
    end = 0
    for i in order:
        f = first_kv[i]
        o = output[i]
        k = _soonest(used, capacity, f, o, arrival[i])
        put(used, f - 1, o, k, 1)
        starts[i] = k
        total += k + o
        end = max(end, k + o)
    used[: end + 1] = 0
    return total


@njit(cache=True, nogil=True)
def backward_serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any,
    worth: int
) -> int:  # fmt: skip
    """Place the requests in order of completion, the last first; return the sum of ends.

    In reverse time a request starts at its peak and only shrinks, so it fits at all later moments
    if it fits at the first, and one placed later is heavier at every moment after: each at the
    first moment where it fits, not before the one placed before it, ends the last placement
    soonest. The whole is moved until none starts too early; then, if the value is at most
    ``worth``, each request, the first completion first, to its earliest feasible start.
    """
    n = order.shape[0]
    at = 0
    finish = 0
    top = 0
    for i in order:
        o = output[i]
        peak = first_kv[i] + o - 1
        while used[at] + peak > capacity:
            at += 1
        for j in range(o):
            used[at + j] += peak - j
        starts[i] = at
        top = max(top, at + o)
        finish = max(finish, at + o + arrival[i])
    used[: top + 1] = 0
    total = 0
    for i in order:
        starts[i] = finish - starts[i] - output[i]
        total += starts[i] + output[i]
    if total > worth:
        return total
    for i in order:
        put(used, first_kv[i] - 1, output[i], starts[i], 1)
    for _ in range(2):
        moved = False
        for b in range(n - 1, -1, -1):
            i = order[b]
            if starts[i] == arrival[i]:
                continue
            f = first_kv[i]
            o = output[i]
            was = starts[i]
            put(used, f - 1, o, was, -1)
            k = _soonest(used, capacity, f, o, arrival[i])
            put(used, f - 1, o, k, 1)
            if k < was:
                starts[i] = k
                total -= was - k
                moved = True
        if not moved:
            break
    for i in order:
        used[starts[i] + 1 : starts[i] + 1 + output[i]] = 0
    return total


class _Requests(NamedTuple):
    """The columns of `Jobs`, for compiled code."""

    arrival: Any
    first_kv: Any
    output: Any
    capacity: int


class _Run(NamedTuple):
    """An annealing run: temperatures in rounds, orders to try, the direction of placement."""

    hot: float
    cold: float
    steps: int
    forward: bool


class _Reached(NamedTuple):
    """How far a run is: the sums of ends of the present order and the best one, orders tried."""

    value: int
    best: int
    steps: int


@njit(cache=True, nogil=True)
def _anneal_orders(
    requests: _Requests, run: _Run, reached: _Reached, steps: int, order: Any, best_starts: Any,
    used: Any, rng: Any
) -> _Reached:  # fmt: skip
    """Try more orders, from ``order`` on, which stays the present one; return how far it is now."""
    arrival, first_kv, output, capacity = requests
    value, best, first = reached
    starts = np.empty_like(best_starts)
    n = order.shape[0]
    arrives = arrival.max() > 0
    trial = order.copy()
    for step in range(first, first + steps):
        temperature = run.hot * (run.cold / run.hot) ** (step / run.steps)
        trial[:] = order
        a = rng.integers(0, n)
        if rng.random() < 0.5:
            reach = max(2, n // 3)
            b = min(n - 1, max(0, a + rng.integers(-reach, reach + 1)))
        else:
            b = rng.integers(0, n)
        if a == b:
            continue
        if rng.random() < 0.4:
            trial[a], trial[b] = trial[b], trial[a]
        else:
            move(trial, a, b)
        if run.forward:
            new = serial(trial, arrival, first_kv, output, capacity, used, starts)
        else:
            worth = 2**62 if arrives else value + int(4 * temperature) + 1
            new = backward_serial(trial, arrival, first_kv, output, capacity, used, starts, worth)
        if new <= value or rng.random() < math.exp((value - new) / temperature):
            order[:] = trial
            value = new
            if value < best:
                best = value
                best_starts[:] = starts
    return _Reached(value, best, first + steps)


class Annealing:
    """An annealing search that can be run in slices; the best starts so far are always at hand.

    Parameters
    ----------
    jobs : Jobs
    rng : numpy.random.Generator
    starts : ndarray of int64, optional
        A feasible schedule to begin from.
    """

    def __init__(
        self, jobs: Jobs, rng: np.random.Generator, starts: NDArray[np.int64] | None = None
    ) -> None:
        self.jobs, self.rng = jobs, rng
        self._used = np.zeros(2 * jobs.rounds + int(jobs.output.max()) + 2, dtype=np.int64)
        index = np.arange(jobs.n)
        keys = (jobs.volume, jobs.output, jobs.peak, jobs.arrival + jobs.volume // jobs.capacity)
        self.starts = in_line(jobs) if starts is None else starts
        self.value = jobs.total(self.starts)
        for key in keys:
            self.offer_order(np.lexsort((index, jobs.arrival, key)))
        self._runs = 0

    def offer_order(self, order: NDArray[np.int64]) -> int:
        """Place requests in that order, keep the result if it is the best, return its value."""
        jobs, starts = self.jobs, np.empty(self.jobs.n, dtype=np.int64)
        serial(
            order, jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, self._used, starts
        )  # fmt: skip
        value = jobs.total(starts)
        if value < self.value:
            self.value, self.starts = value, starts
        return value

    def offer(self, starts: NDArray[np.int64]) -> int:
        """Take a schedule if it is feasible, place its requests again in order of start."""
        value = self.jobs.total(starts)
        if value < self.value and self.jobs.feasible(starts):
            self.value, self.starts = value, starts.copy()
        return self.offer_order(np.argsort(starts, kind="stable"))

    def anneal(
        self, steps: int, *, deadline: float = math.inf, hot: float = 0.0, stop: Any = None,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        """Anneal once from the best schedule, until ``deadline`` (of `time.perf_counter`).

        Parameters
        ----------
        steps : int
            Orders to try.
        hot : float
            First temperature in rounds; 0: about half the mean latency over the root of n.
        fresh : bool
            Begin from a random order instead, roughly the smallest volume first.
        """
        jobs = self.jobs
        if jobs.n == 1:
            return
        if hot <= 0:
            hot = max(2.0, 0.6 * self.value / jobs.n**1.5)
        forward = self._runs % 2 == 1
        self._runs += 1
        starts = np.empty(jobs.n, dtype=np.int64)
        if fresh:
            noise = self.rng.uniform(0.5, 2.0, jobs.n)
            ready = jobs.arrival + noise * jobs.volume / jobs.capacity * math.sqrt(jobs.n)
            order = np.argsort(ready if forward else -ready, kind="stable")
        elif forward:
            order = np.argsort(self.starts, kind="stable")
        else:
            order = np.argsort(-(self.starts + jobs.output), kind="stable")
        requests = _Requests(jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity)
        if forward:
            value = serial(order, *requests, self._used, starts)
        else:
            value = backward_serial(order, *requests, self._used, starts, 2**62)
        run, reached = _Run(hot, 0.4, steps, forward), _Reached(value, value, 0)
        chunk = min(CHUNK, 1 + _CHUNK_ROUNDS // int(jobs.output.sum()))
        while reached.steps < steps and time.perf_counter() < deadline and not (
            stop is not None and stop[0]
        ):  # fmt: skip
            more = min(chunk, steps - reached.steps)
            reached = _anneal_orders(
                requests, run, reached, more, order, starts, self._used, self.rng
            )
        self.offer(starts)


def anneal(annealing: Annealing, orders: int, deadline: float, stop: Any) -> None:
    """Try so many orders: many runs, from the best schedule and from random orders in turn.

    Several runs of moderate length find more than a long one.
    """
    steps, turn, most = CHUNK, 0, max(CHUNK, 60 * annealing.jobs.n**2)
    while orders > 0 and time.perf_counter() < deadline and not stop[0]:
        for _ in range(2):
            annealing.anneal(steps, deadline=deadline, stop=stop, fresh=turn % 2 == 1)
        orders -= 2 * steps
        steps = min(3 * steps, most)
        turn += 1


def in_line(jobs: Jobs) -> NDArray[np.int64]:
    """Return starts that run the requests one after another, the shortest waiting first."""
    starts = np.empty(jobs.n, dtype=np.int64)
    now = 0
    left = set(range(jobs.n))
    while left:
        ready = [i for i in left if jobs.arrival[i] <= now]
        if not ready:
            now = min(int(jobs.arrival[i]) for i in left)
            continue
        i = min(ready, key=lambda i: (int(jobs.output[i]), i))
        starts[i] = now
        now += int(jobs.output[i])
        left.remove(i)
    return starts
