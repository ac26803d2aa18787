"""Annealing over orders of requests, which are placed forward and backward in turn.

Forward, each request is placed at its earliest feasible start. Backward, the requests are placed in
order of completion, the last first, each as late as it fits; then each moves to its earliest start.
The search is deterministic from the seed unless a time limit ends it. Import this module lazily: it
loads numba.
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


_FORWARD, _BACKWARD, _RESUMED = 0, 1, 2
"""How orders are placed: by `serial`, `backward_serial` or `resumed`."""
_MAX_WINDOWS = 1 << 24
"""The max number of entries of `Windows.window`."""


class Windows(NamedTuple):
    """What is known of an order placed backward, before each of its requests is placed.

    Attributes
    ----------
    used : ndarray of int32
        Scratch space: the KV in use in each round, all zero, longer than any schedule.
    window : ndarray of int32, shape (n, longest output)
        The KV in use from ``moment`` on, in tokens.
    moment : ndarray of int64, shape (n,)
        When the request before was placed, in rounds before the end.
    cost : ndarray of int64, shape (n,)
        What the rounds up to then add to the sum of ends.
    """

    used: Any
    window: Any
    moment: Any
    cost: Any


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
) -> int:
    """Place the requests in order of completion, the last first. Return the sum of ends.

    In reverse time a request starts at its peak and only shrinks. So it fits at all later moments
    if it fits at the first one. Placed at a later moment, it is heavier from then on. So the last
    placement ends soonest if each request is placed at the first moment where it fits, but not
    before the request placed before it. Then the whole schedule moves until no request starts
    before its arrival. At last each request moves to its earliest feasible start, in order of
    completion.
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


@njit(allocates=False, nogil=True)
def resumed(
    order: Any, first: int, last: int, peak: Any, output: Any, capacity: int, kept: Windows,
    known: Any
) -> Any:  # fmt: skip
    """Return what `backward_serial` does before moving requests, where all arrive together.

    Only the requests from the position ``first`` on are placed. The others are where the order
    whose windows are kept has them. Once the requests behind ``last``, which the orders have in the
    same places, find the same KV in use, they add what they added before.

    Parameters
    ----------
    order : ndarray of int64, shape (n,)
    first, last : int
        The first and the last position at which it differs from the order that is kept.
    peak, output : ndarray of int64, shape (n,)
    capacity : int
    kept : Windows
    known : int
        The sum of ends of the order that is kept. If it is negative, ``order`` is kept from now on.
    """
    used, window, moment, cost = kept
    n, width, q = np.uint64(order.shape[0]), np.uint64(window.shape[1]), np.uint64(first)
    begin = at = np.uint64(moment[q])
    spent, total = cost[q], np.int64(-1)
    for j in range(width):
        used[at + j] = window[q, j]
    while q < n:
        i = np.uint64(order[q])
        if known < 0:
            moment[q], cost[q] = at, spent
            for j in range(width):
                window[q, j] = used[at + j]
        elif q > np.uint64(last) and used[at] == window[q, 0]:
            same = np.uint64(1)
            while same < width and used[at + same] == window[q, same]:
                same += np.uint64(1)
            if same == width:
                total = known + spent - cost[q]
                break
        room, before = capacity - peak[i], at
        while used[at] > room:
            at += np.uint64(1)
        spent += np.int64(q) * np.int64(at - before)
        for j in range(np.uint64(output[i])):
            used[at + j] += np.int32(peak[i] - np.int64(j))
        q += np.uint64(1)
    if total < 0:
        end = at
        while used[end] > 0:
            end += np.uint64(1)
        total = spent + np.int64(n) * np.int64(end - at)
    used[begin : at + width] = 0
    return total


class _Requests(NamedTuple):
    """The columns of `Jobs`, for compiled code."""

    arrival: Any
    first_kv: Any
    output: Any
    capacity: int


class _Run(NamedTuple):
    """An annealing run: temperatures in rounds, the orders to try, and how these are placed."""

    hot: float
    cold: float
    steps: int
    scheme: int


class _Reached(NamedTuple):
    """The state of a run: the sums of ends of the present and the best order, and orders tried."""

    value: int
    best: int
    steps: int


@njit(nogil=True)
def _anneal_orders(
    requests: _Requests, run: _Run, reached: _Reached, steps: int, order: Any, best_order: Any,
    used: Any, kept: Windows, rng: Any
) -> _Reached:  # fmt: skip
    """Try more orders, beginning at the present ``order``, changed in place. Return the state."""
    arrival, first_kv, output, capacity = requests
    value, best, tried = reached
    starts, peak = np.empty_like(order), first_kv + output - 1
    n = order.shape[0]
    reach = max(2, n // 3)
    for step in range(tried, tried + steps):
        temperature = run.hot * (run.cold / run.hot) ** (step / run.steps)
        a = rng.integers(0, n)
        if rng.random() < 0.5:
            b = min(n - 1, max(0, a + rng.integers(-reach, reach + 1)))
        else:
            b = rng.integers(0, n)
        if a == b:
            continue
        swapped = rng.random() < 0.4
        if swapped:
            order[a], order[b] = order[b], order[a]
        else:
            move(order, a, b)
        first, last = min(a, b), max(a, b)
        if run.scheme == _FORWARD:
            new = serial(order, arrival, first_kv, output, capacity, used, starts)
        elif run.scheme == _BACKWARD:
            new = backward_serial(order, arrival, first_kv, output, capacity, used, starts)
        else:
            new = resumed(order, first, last, peak, output, capacity, kept, value)
        if new <= value or rng.random() < math.exp((value - new) / temperature):
            value = new
            if run.scheme == _RESUMED:
                resumed(order, first, last, peak, output, capacity, kept, -1)
            if value < best:
                best = value
                best_order[:] = order
        elif swapped:
            order[a], order[b] = order[b], order[a]
        else:
            move(order, b, a)
    return _Reached(value, best, tried + steps)


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
        self._runs = 0
        longest = int(jobs.output.max())
        fits = not jobs.arrival.any() and jobs.n * longest <= _MAX_WINDOWS
        rows = jobs.n if fits else 0
        self._kept = Windows(
            used=np.zeros(jobs.rounds + 2 * longest, dtype=np.int32),
            window=np.zeros((rows, longest), dtype=np.int32),
            moment=np.zeros(rows, dtype=np.int64),
            cost=np.zeros(rows, dtype=np.int64),
        )

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
        # Without arrivals the forward scheme takes three times as long and ends far higher.
        forward = self._runs % 2 == 1 and bool(jobs.arrival.any())
        self._runs += 1
        if fresh:
            noise = self.rng.uniform(0.5, 2.0, jobs.n)
            ready = jobs.arrival + noise * jobs.volume / jobs.capacity * math.sqrt(jobs.n)
            order = np.argsort(ready if forward else -ready, kind="stable")
        elif forward:
            order = np.argsort(self.starts, kind="stable")
        else:
            order = np.argsort(-(self.starts + jobs.output), kind="stable")
        requests = _Requests(jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity)
        place, scheme = (serial, _FORWARD) if forward else (backward_serial, _BACKWARD)
        starts, best = np.empty_like(order), order.copy()
        if len(self._kept.window):
            scheme = _RESUMED
            value = resumed(order, 0, 0, jobs.peak, jobs.output, jobs.capacity, self._kept, -1)
        else:
            value = place(order, *requests, self._used, starts)
        run, reached = _Run(hot, 0.4, steps, scheme), _Reached(value, value, 0)
        chunk = min(CHUNK, 1 + _CHUNK_ROUNDS // int(jobs.output.sum()))
        while reached.steps < steps and time.perf_counter() < deadline and not (
            stop is not None and stop[0]
        ):  # fmt: skip
            more = min(chunk, steps - reached.steps)
            reached = _anneal_orders(
                requests, run, reached, more, order, best, self._used, self._kept, self.rng
            )
        place(best, *requests, self._used, starts)
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
