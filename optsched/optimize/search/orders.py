"""Annealing over orders of completion.

The requests are placed in this order, the last first, each as late as it fits. Then each moves to
its earliest feasible start. The search is deterministic from the seed unless a time limit ends it.
Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.jobs import Jobs
from optsched.optimize.search.placement import put
from optsched.problem.kernel import njit

CHUNK = 2000
"""The number of orders between two checks of the clock."""
_CHUNK_ROUNDS = 20_000_000
"""The max rounds of runs in these orders. They take some 0.1 s, however long outputs are."""
_LONG = 150
"""The max orders of a run, per square of the number of requests."""


@njit(nogil=True, inline="always")
def _soonest(used: Any, capacity: int, first_kv: int, output: int, start: int) -> int:
    """Return the earliest feasible start from ``start`` on.

    It works as `optsched.optimize.search.placement.earliest`, but checks each run from its peak
    backward. So the first conflict found asks for the longest jump. This is twice as fast if many
    requests are live.
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


@njit(nogil=True, inline="always")
def move(order: Any, a: int, b: int) -> None:
    """Move the entry at ``a`` to ``b``. The entries between move by one place.

    Parameters
    ----------
    order : ndarray of int64
        Changed in place.
    a, b : int
    """
    moved = order[a]
    step = 1 if a < b else -1
    for k in range(a, b, step):
        order[k] = order[k + step]
    order[b] = moved


@njit(nogil=True)
def serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any
) -> int:
    """Place the requests in order, each at its earliest feasible start. Return the sum of ends.

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


@njit(nogil=True)
def backward_serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any
) -> int:  # fmt: skip
    """Place the requests in order of completion, the last first. Return the sum of ends.

    In reverse time a request starts at its peak and only shrinks. So it fits at all later moments
    if it fits at the first one. Placed at a later moment, it is heavier from then on. So the last
    placement ends soonest if each request is placed at the first moment where it fits, but not
    before the request placed before it.

    Then time runs forward, and completions that would be too early for an arrival move, together
    with all later ones. This breaks no limit, since those that move hold less in each round, and
    the others are further away.

    ``used`` is all zero before and after, and longer than any schedule.
    """
    at = 0
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
    used[: top + 1] = 0
    total = 0
    end = 0
    for b in range(order.shape[0] - 1, -1, -1):
        i = order[b]
        end = max(end + at - starts[i], arrival[i] + output[i])
        at = starts[i]
        starts[i] = end - output[i]
        total += end
    return total


@njit(nogil=True)
def _advance(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any
) -> int:  # fmt: skip
    """Move each request to its earliest feasible start. Return the rounds gained.

    ``order`` is that of completion, the last first, before and after.
    """
    gain = 0
    for i in order:
        put(used, first_kv[i] - 1, output[i], starts[i], 1)
    for _ in range(2):
        before = gain
        for b in range(order.shape[0] - 1, -1, -1):
            i = order[b]
            was = starts[i]
            if was > arrival[i]:
                put(used, first_kv[i] - 1, output[i], was, -1)
                starts[i] = _soonest(used, capacity, first_kv[i], output[i], arrival[i])
                put(used, first_kv[i] - 1, output[i], starts[i], 1)
                gain += was - starts[i]
        if gain == before:
            break
    for i in order:
        used[starts[i] + 1 : starts[i] + 1 + output[i]] = 0
    for b in range(1, order.shape[0] if gain > 0 else 0):
        i = order[b]
        end = starts[i] + output[i]
        while b > 0 and starts[order[b - 1]] + output[order[b - 1]] < end:
            order[b] = order[b - 1]
            b -= 1
        order[b] = i
    return gain


class _Requests(NamedTuple):
    """The columns of `Jobs`, for compiled code."""

    arrival: Any
    first_kv: Any
    output: Any
    capacity: int


class _Run(NamedTuple):
    """An annealing run: temperatures in rounds, and the orders to try."""

    hot: float
    cold: float
    steps: int


class _Reached(NamedTuple):
    """The state of a run: sums of ends, and orders tried."""

    placed: int  # of the present order as it was placed
    value: int  # of the schedule that it led to
    best: int
    steps: int


@njit(nogil=True)
def _anneal_orders(
    requests: _Requests, run: _Run, reached: _Reached, steps: int, order: Any, best_starts: Any,
    used: Any, rng: Any
) -> _Reached:  # fmt: skip
    """Try more orders, beginning at the present ``order``, changed in place. Return the state.

    Requests are advanced only if the order is almost as good as the present one was before that.
    The order becomes that of the schedule which this leads to.
    """
    arrival, first_kv, output, capacity = requests
    placed, value, best, first = reached
    starts = np.empty_like(best_starts)
    n = order.shape[0]
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
        new = backward_serial(trial, arrival, first_kv, output, capacity, used, starts)
        if new > placed + int(4 * temperature) + 1:
            continue
        gain = _advance(trial, arrival, first_kv, output, capacity, used, starts)
        if new - gain <= value or rng.random() < math.exp((value - new + gain) / temperature):
            order[:] = trial
            placed, value = new, new - gain
            if value < best:
                best = value
                best_starts[:] = starts
    return _Reached(placed, value, best, first + steps)


class Annealing:
    """An annealing search that runs in slices and always has its best starts ready.

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

    def offer_order(self, order: NDArray[np.int64]) -> int:
        """Place the requests in an order, and keep the result if it is the best.

        Parameters
        ----------
        order : ndarray of int64, shape (n,)

        Returns
        -------
        int
            The total latency of the result, in rounds.
        """
        jobs, starts = self.jobs, np.empty(self.jobs.n, dtype=np.int64)
        serial(
            order, jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, self._used, starts
        )  # fmt: skip
        value = jobs.total(starts)
        if value < self.value:
            self.value, self.starts = value, starts
        return value

    def offer(self, starts: NDArray[np.int64]) -> int:
        """Place a schedule's requests again in order of start. Keep the best if it is feasible.

        Parameters
        ----------
        starts : ndarray of int64, shape (n,)
            Starts in rounds, which need not be feasible.
        """
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
            The first temperature in rounds. With 0, it is about half the mean latency divided by
            the square root of n.
        fresh : bool
            Whether to begin from a random order instead, with small volumes roughly first.
        """
        jobs = self.jobs
        if jobs.n == 1:
            return
        if hot <= 0:
            hot = max(2.0, 0.6 * self.value / jobs.n**1.5)
        starts = np.empty(jobs.n, dtype=np.int64)
        if fresh:
            noise = self.rng.uniform(0.5, 2.0, jobs.n)
            ready = jobs.arrival + noise * jobs.volume / jobs.capacity * math.sqrt(jobs.n)
            order = np.argsort(-ready, kind="stable")
        else:
            order = np.argsort(-(self.starts + jobs.output), kind="stable")
        requests = _Requests(jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity)
        placed = backward_serial(order, *requests, self._used, starts)
        value = placed - _advance(order, *requests, self._used, starts)
        run, reached = _Run(hot, 0.4, steps), _Reached(placed, value, value, 0)
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
    """Try a number of orders in many runs, from the best schedule and random orders in turn.

    Several runs of moderate length find more than one long run.
    """
    steps, turn, most = CHUNK, 0, max(CHUNK, _LONG * annealing.jobs.n**2)
    while orders > 0 and time.perf_counter() < deadline and not stop[0]:
        for _ in range(2):
            annealing.anneal(steps, deadline=deadline, stop=stop, fresh=turn % 2 == 1)
        orders -= 2 * steps
        steps = min(3 * steps, most)
        turn += 1


def in_line(jobs: Jobs) -> NDArray[np.int64]:
    """Return starts that run the requests one by one, the shortest of those waiting first."""
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
