"""Annealing over orders of completion.

The requests are placed in this order, the last first, each as late as it fits. Then each moves to
its earliest feasible start. The search is deterministic from the seed unless a time limit ends it.
Import this module lazily: it loads numba.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.timeline import Ints
from optsched.optimize.ramp.jobs import Jobs
from optsched.optimize.search.placement import place_in_order, put
from optsched.problem.budget import work_time
from optsched.problem.kernel import njit

CHUNK = 2000
"""The number of orders between two checks of the clock."""
# The max rounds of runs in these orders. They take some 0.1 s, however long outputs are.
_CHUNK_ROUNDS = 20_000_000
# The max number of entries of `Kept.window`.
_WINDOWS = 1 << 22
# The max orders of a run, per square of the number of requests.
_LONG = 150


@njit(nogil=True, inline="always")
def _earliest(used: Ints, capacity: int, first_kv: int, output: int, start: int) -> int:
    """Return the earliest feasible start from ``start`` on.

    ``used`` is the KV of the others by round, from which this request's own run was taken out.
    Started in round k, it holds first_kv + j tokens in round k + 1 + j, for j from 0 on.
    Unlike `optsched.optimize.search.placement.earliest` it checks each run from its peak backward,
    so that the first conflict asks for the longest jump: twice as fast if many are live.
    """
    k = start
    while True:
        later = k
        for j in range(output - 1, -1, -1):
            free = capacity - used[k + 1 + j]
            if first_kv + j > free:
                # A later start holds less in this round. It moves until that fits or, where not
                # even the first round of a run fits, until it begins after this round.
                later = k + j - (free - first_kv) if free >= first_kv else k + 1 + j
                break

        if later == k:
            return k

        k = later


@njit(nogil=True, inline="always")
def move(order: Ints, a: int, b: int) -> None:
    """Move the entry at ``a`` to ``b``. The entries between move by one place."""
    moved = order[a]
    step = 1 if a < b else -1
    for k in range(a, b, step):
        order[k] = order[k + step]

    order[b] = moved


class Requests(NamedTuple):
    """The columns of `Jobs`, for compiled code. They have the shape (n,), but for `capacity`."""

    arrival: Ints
    first_kv: Ints
    output: Ints
    capacity: int


class Kept(NamedTuple):
    """What is known of an order that `place_backward` has placed.

    `moment` (shape (n,)) is when each is placed, in rounds before the end, and `window` the KV in
    use before every `step`-th, from the moment of the last one on (`step` is n / rows, rounded up).
    `used` (KV in use, all zero) and `trial` are scratch space.
    """

    used: Ints
    moment: Ints
    window: Ints
    trial: Ints


def new_kept(jobs: Jobs) -> Kept:
    """Return the arrays for a first order, which is placed from position 0 with `keep`."""
    longest = int(jobs.output.max())
    # A row for every request, unless outputs are so long that this would take too much memory.
    rows = max(1, min(jobs.n, _WINDOWS // longest))
    # `used` has room for the last end. Moments are within the sum of outputs, so an end is at most
    # the last arrival, the longest output and this sum together.
    return Kept(
        used=np.zeros(2 * jobs.rounds + longest + 2, dtype=np.int64),
        moment=np.zeros(jobs.n, dtype=np.int64),
        window=np.zeros((rows, longest), dtype=np.int64),
        trial=np.zeros(jobs.n, dtype=np.int64),
    )


@njit(allocates=False, nogil=True)
def place_backward(
    order: Ints, first: int, last: int, keep: bool, kept: Kept, requests: Requests, starts: Ints
) -> int:
    """Place the requests in order of completion, the last first. Return the sum of ends.

    In reverse time a request starts at its peak and only shrinks. So it fits at all later moments
    if it fits at the first one. Placed at a later moment, it is heavier from then on. So the last
    placement ends soonest if each request is placed at the first moment where it fits, but not
    before the request placed before it.

    Then time runs forward, and completions that would be too early for an arrival move, together
    with all later ones. This breaks no limit, since those that move hold less in each round, and
    the others are further away.

    The order differs from the kept one at most at the positions from `first` to `last`, both
    included. Once the requests behind `last` find the same KV in use as in the kept order, they
    follow in the same distances. With `keep` this order is the kept one from now on; without, it
    is a trial, and `kept` still describes the order kept before. `starts` is written.
    """
    used, moment, window, trial = kept
    arrival, first_kv, output, capacity = requests
    # Positions and moments are unsigned, since compiled code checks signed ones for negative ones.
    n, width = np.uint64(order.shape[0]), np.uint64(window.shape[1])
    # `window` has a row for every `step`-th position, so placing begins at the last row before
    # `first`. Up to there the order is the kept one, and its moments hold.
    step = (n + np.uint64(window.shape[0]) - np.uint64(1)) // np.uint64(window.shape[0])
    row = np.uint64(first) // step
    first_placed = row * step
    now = np.uint64(0)  # a moment, in rounds before the end
    for k in range(first_placed):
        trial[k] = moment[k]
        now = np.uint64(moment[k])

    # No run is longer than a row, so nothing else of the kept requests is in use from here on.
    since = now
    for k in range(width):
        used[now + k] = window[row, k]

    q = first_placed  # the position to place next
    while q < n:
        # At a row, `keep` writes it, and otherwise it says whether the rest is as it was.
        if q == row * step:
            if keep:
                for k in range(width):
                    window[row, k] = used[now + k]
            elif q > np.uint64(last):
                j = np.uint64(0)
                # With the same KV in use here, all that follows keeps its distances, and comes as
                # much later as the one before, at position q - 1, does.
                while j < width and used[now + j] == window[row, j]:
                    j += np.uint64(1)
                if j == width:
                    later = np.int64(now) - moment[q - np.uint64(1)]
                    while q < n:
                        trial[q] = moment[q] + later
                        q += np.uint64(1)

                    break

            row += np.uint64(1)

        i = np.uint64(order[q])
        length = np.uint64(output[i])
        peak = first_kv[i] + output[i] - 1
        # `now` never goes back, so all requests together look at each moment once.
        while used[now] > capacity - peak:
            now += np.uint64(1)
        for k in range(length):
            used[now + k] += peak - np.int64(k)

        trial[q] = now
        q += np.uint64(1)

    used[since : now + width] = 0  # the scratch space is left empty
    total = end = 0
    before = np.int64(trial[n - np.uint64(1)])

    # Forward in time: `end` is the completion of the present request, as far from the one before as
    # their moments are, or later if its own arrival asks for it.
    while q > 0:
        q -= np.uint64(1)
        i = np.uint64(order[q])
        end = max(end + before - trial[q], arrival[i] + output[i])
        before = trial[q]
        starts[i] = end - output[i]
        total += end
        if keep:
            moment[q] = trial[q]

    return total


@njit(nogil=True)
def _advance(order: Ints, requests: Requests, used: Ints, starts: Ints) -> int:
    """Move each request to its earliest feasible start. Return the rounds gained.

    ``order`` (by completion, the last first) is put into the new order. ``used`` is scratch space,
    all zero before and after. `put` adds a run (1) or removes it (-1), and takes first_kv - 1,
    since it counts the rounds of a run from 1.
    """
    arrival, first_kv, output, capacity = requests
    gain = 0
    for i in order:
        put(used, first_kv[i] - 1, output[i], starts[i], 1)
    # Whoever moves leaves room for those that moved before, so all move a second time.
    for _ in range(2):
        before = gain
        # From the first completion on. Who starts at its arrival cannot move.
        for b in range(order.shape[0] - 1, -1, -1):
            i = order[b]
            old = starts[i]
            if old > arrival[i]:
                put(used, first_kv[i] - 1, output[i], old, -1)
                starts[i] = _earliest(used, capacity, first_kv[i], output[i], arrival[i])
                put(used, first_kv[i] - 1, output[i], starts[i], 1)
                gain += old - starts[i]

        # Nobody has moved, so nobody would the second time.
        if gain == before:
            break

    for i in order:
        used[starts[i] + 1 : starts[i] + 1 + output[i]] = 0
    # Few ends have changed their order, so that each is inserted where it belongs now. Without a
    # gain the order is as it was.
    for b in range(1, order.shape[0] if gain > 0 else 0):
        i = order[b]
        end = starts[i] + output[i]
        while b > 0 and starts[order[b - 1]] + output[order[b - 1]] < end:
            order[b] = order[b - 1]
            b -= 1

        order[b] = i

    return gain


@njit(nogil=True)
def _copy(values: Ints, to: Ints) -> None:
    """Copy an array into another. Slices take seconds more to compile."""
    for k in range(values.shape[0]):
        to[k] = values[k]


class _Run(NamedTuple):
    """An annealing run: temperatures in rounds, and the orders to try."""

    hot: float  # the first temperature
    cold: float  # the last one
    steps: int  # the orders of the whole run, of which `_anneal_orders` tries a part


class _Progress(NamedTuple):
    """How far a run has come: sums of ends, and orders tried."""

    placed: int  # of the present order
    best: int  # of all schedules
    steps: int  # orders tried so far


@njit(nogil=True)
def _anneal_orders(
    requests: Requests,
    run: _Run,
    progress: _Progress,
    steps: int,
    order: Ints,
    best_starts: Ints,
    kept: Kept,
    rng: np.random.Generator,
) -> _Progress:
    """Try ``steps`` orders more, each near the present ``order``. Return how far the run has come.

    An order has the requests by completion, the last first. ``order`` and ``best_starts`` (of the
    best schedule) are changed in place. In ``kept``, `moment` and `window` are of the present
    order, and the others are scratch space. Where an order is taken, its requests are advanced, and
    their new order of completion is the present one from then on.
    """
    placed, best, tried = progress
    starts, trial = np.empty_like(order), order.copy()
    n = order.shape[0]
    reach = max(2, n // 3)

    for step in range(tried, tried + steps):
        # From hot to cold by the same factor at every step.
        temperature = run.hot * (run.cold / run.hot) ** (step / run.steps)
        # Two positions, half of the time near each other.
        a = rng.integers(0, n)
        if rng.random() < 0.5:
            b = min(n - 1, max(0, a + rng.integers(-reach, reach + 1)))
        else:
            b = rng.integers(0, n)

        if a == b:
            continue

        # Their requests change places, or one moves to the other's position.
        _copy(order, trial)
        if rng.random() < 0.4:
            trial[a], trial[b] = trial[b], trial[a]
        else:
            move(trial, a, b)

        # A trial, without `keep`: it differs from the present order from `first` to `last` alone.
        first, last = min(a, b), max(a, b)
        new = place_backward(trial, first, last, False, kept, requests, starts)
        # Worse orders are taken too, with a chance that falls as the run cools down.
        if new > placed and rng.random() >= math.exp((placed - new) / temperature):
            continue

        _copy(trial, order)
        # `used` is scratch space, all zero between calls, and belongs to no order.
        gain = _advance(order, requests, kept.used, starts)
        if new - gain < best:
            best = new - gain
            _copy(starts, best_starts)

        # The new order is placed once more, now with `keep`, so that `kept` is of it. Before the
        # position `first` it is as it was, unless somebody has advanced, which may change it
        # anywhere. `last` counts only without `keep`, so n is as good as any.
        placed = place_backward(order, 0 if gain > 0 else first, n, True, kept, requests, starts)

    return _Progress(placed, best, tried + steps)


class Annealing:
    """An annealing search from feasible starts, in slices; its best starts are always ready."""

    def __init__(self, jobs: Jobs, rng: np.random.Generator, starts: Ints | None = None) -> None:
        self.jobs, self.rng = jobs, rng
        self._kept = new_kept(jobs)
        # The first schedule is the given one, or runs the requests one by one. Then orders by four
        # keys are tried, the smallest first.
        index = np.arange(jobs.n)
        keys = (jobs.volume, jobs.output, jobs.peak, jobs.arrival + jobs.volume // jobs.capacity)
        self.starts = in_line(jobs) if starts is None else starts
        self.value = jobs.total(self.starts)
        for key in keys:
            self.offer_order(np.lexsort((index, jobs.arrival, key)))

    def offer_order(self, order: Ints) -> int:
        """Place requests in an order, keep the result if it is the best, and return its value."""
        jobs, used = self.jobs, self._kept.used
        starts, homes = np.zeros((2, jobs.n), dtype=np.int64)
        # `place_in_order` counts the rounds of a run from 1, and so takes first_kv - 1.
        columns = jobs.arrival, jobs.output, jobs.first_kv - 1, jobs.capacity
        # One worker, so one row of rounds, and `homes` are all 0.
        place_in_order(order, *columns, used[None], starts, homes)
        # The scratch space is left empty; only these rounds were touched.
        used[: int((starts + jobs.output).max()) + 1] = 0
        value = jobs.total(starts)
        if value < self.value:
            self.value, self.starts = value, starts

        return value

    def offer(self, starts: Ints) -> int:
        """Keep a feasible schedule if it is the best; return the value of its order of starts."""
        value = self.jobs.total(starts)
        if value < self.value and self.jobs.feasible(starts):
            self.value, self.starts = value, starts.copy()

        return self.offer_order(np.argsort(starts, kind="stable"))

    def anneal(
        self, steps: int, *, deadline: float = math.inf, stop: Any = None, fresh: bool = False
    ) -> None:
        """Anneal once from the best schedule, until ``deadline`` (a time of `work_time`).

        The first temperature is about half the mean latency over the root of n, and 2 rounds at
        least. At the last one, 0.4 rounds, an order that is a round worse is taken in one of twelve
        cases. `fresh` begins from a random order instead, with small volumes roughly first. `stop`:
        an array whose first entry is set to end the run.
        """
        jobs = self.jobs
        if jobs.n == 1:  # there is one order
            return

        hot = max(2.0, 0.6 * self.value / jobs.n**1.5)
        starts = np.empty(jobs.n, dtype=np.int64)
        if fresh:
            noise = self.rng.uniform(0.5, 2.0, jobs.n)
            ready = jobs.arrival + noise * jobs.volume / jobs.capacity * math.sqrt(jobs.n)
            order = np.argsort(-ready, kind="stable")
        else:
            order = np.argsort(-(self.starts + jobs.output), kind="stable")

        requests = Requests(jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity)
        # From position 0 on, and kept (True): before there is no kept order.
        placed = place_backward(order, 0, jobs.n, True, self._kept, requests, starts)
        run, progress = _Run(hot, 0.4, steps), _Progress(placed, placed, 0)
        # A chunk is short enough to look at the clock often, however long outputs are.
        chunk = min(CHUNK, 1 + _CHUNK_ROUNDS // int(jobs.output.sum()))

        # Compiled code cannot look at the clock, so orders are tried in chunks.
        while progress.steps < steps and work_time() < deadline:
            if stop is not None and stop[0]:
                break

            more = min(chunk, steps - progress.steps)
            arrays = order, starts, self._kept, self.rng
            progress = _anneal_orders(requests, run, progress, more, *arrays)

        self.offer(starts)


def anneal(annealing: Annealing, orders: int, deadline: float, stop: Any) -> None:
    """Try a number of orders in many runs, from the best schedule and random orders in turn.

    Several runs of moderate length find more than one long run, and later ones are longer. Two runs
    begin from the best schedule, the next two from random orders, and so on.
    """
    steps, round_number, longest = CHUNK, 0, max(CHUNK, _LONG * annealing.jobs.n**2)
    while orders > 0 and work_time() < deadline and not stop[0]:
        for _ in range(2):
            annealing.anneal(steps, deadline=deadline, stop=stop, fresh=round_number % 2 == 1)

        orders -= 2 * steps
        steps = min(3 * steps, longest)
        round_number += 1


def in_line(jobs: Jobs) -> Ints:
    """Return starts that run the requests one by one, the shortest of those waiting first."""
    starts = np.empty(jobs.n, dtype=np.int64)
    arrival, output = jobs.arrival.tolist(), jobs.output.tolist()
    unserved, now = set(range(jobs.n)), 0
    while unserved:
        # All who wait could start now; if nobody does, the next to arrive is served.
        i = min(unserved, key=lambda i: (max(now, arrival[i]), output[i], i))
        starts[i] = max(now, arrival[i])
        now = starts[i] + output[i]
        unserved.remove(i)

    return starts
