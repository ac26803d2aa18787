"""Large-neighbourhood search over starts in the round model, compiled.

A step removes a few requests, chosen among the neighbours, in start order, of a request that waits.
It puts them back one by one at their earliest feasible starts. Their order is drawn anew: by noisy
start, by KV volume, by noisy completion or at random. The step is kept if the total latency does
not rise by more than an exponential random number. The mean of that number, the *heat*, falls as
the search goes on (threshold annealing). Kinds of steps are chosen by their gain per work.

With several workers the rounds of one stand behind those of another on one axis, of which each has
``length`` rounds. A request is put back where it starts the earliest on any of them.

The search is deterministic from the seed if steps are limited and time is not.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.timeline import Ints
from optsched.judge.life import record
from optsched.optimize.formulations.rounds.horizon import RoundData
from optsched.optimize.search.placement import compact, earliest, fill, put
from optsched.problem.budget import Budget
from optsched.problem.kernel import njit

CHUNK = 2000
"""The number of steps between two checks of the clock. They take about 10 ms."""
# The max rounds of outputs in these steps, so that long ones take no longer.
_CHUNK_ROUNDS = 20_000_000
_MAX_REMOVED = 24
_BY_START, _BY_VOLUME, _RANDOM, _BY_END = range(4)
_RULES = [(_BY_START, noise) for noise in (20.0, 60.0, 200.0)]
_RULES += [(_BY_VOLUME, 0.2), (_RANDOM, 0.0), (_BY_END, 50.0)]
# The heat at the beginning, in mean outputs.
_HOT = 0.15
# In the order of `_KIND`. All begin with the same gain per work, so that each is tried.
_KINDS = [
    (width, largest, rule, noise, 1.0, 1.0)
    for width, largest, (rule, noise) in product(
        (15, 30, 60, 120, 250, 500, 1000), (2, 3, 5, 10), _RULES
    )
]
_KIND = record(
    ("width", np.int64),  # of the neighbourhood
    ("largest", np.int64),  # max number of requests that are removed
    ("rule", np.int64),
    ("noise", np.float64),
    ("work", np.float64),  # that steps of this kind took so far, and
    ("gain", np.float64),  # rounds that they gained
)

_REQUEST = record(
    ("arrival", np.int64),
    ("output", np.int64),
    ("base", np.int64),  # ``base + j`` tokens are held in the j-th round of its run
    ("deadline", np.int64),
    ("volume", np.int64),
)
# A request that a step has removed.
_REMOVED = record(
    ("request", np.int64),
    ("start", np.int64),  # before the step
    ("key", np.float64),  # they are put back in ascending order of it
)


class _Machine(NamedTuple):
    """All that steps work on. Workers' rounds stand one behind another on one axis."""

    requests: Any  # records of `_REQUEST`
    capacity: int
    use: Ints  # KV in each round of the axis
    starts: Ints  # of the requests, on the axis
    length: int  # rounds of each worker


@njit(nogil=True, inline="always")
def _random(state):  # type: ignore[no-untyped-def]
    """Return a random number in [0, 1), by xorshift64* (Vigna 2016). ``state``: one uint64."""
    # The shifts and the factor are the paper's.
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x

    # The upper 53 bits, over 2**53.
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit(nogil=True)
def _draw_kind(kinds, state):  # type: ignore[no-untyped-def]
    """Draw a kind of step, most often the better one of two by gain per work.

    ``kinds`` has records of `_KIND`, and ``state`` is that of `_random`.
    """
    a = kinds[int(_random(state) * len(kinds))]
    # At times any kind is taken, so that each is tried again as the schedule changes.
    if _random(state) > 0.15:
        b = kinds[int(_random(state) * len(kinds))]
        if b.gain * a.work > a.gain * b.work:  # gain / work, without a division
            return b

    return a


@njit(nogil=True)
def _choose_requests(kind, order, waiting, marked, removed, state):  # type: ignore[no-untyped-def]
    """Write requests to remove, most often near one that waits, into `removed`. Return how many.

    ``order`` has the requests by start, and ``waiting`` the places in it of those that start after
    their arrival. ``marked`` (by request) is scratch space, False before and after. ``kind`` is a
    record of `_KIND`, and ``state`` that of `_random`.
    """
    n = len(order)
    width = min(n, kind.width)
    wanted = min(width, 2 + int(_random(state) * (kind.largest - 1)))
    count = 0
    first = int(_random(state) * (n - width + 1))  # place where the neighbourhood begins

    # Only requests that wait can gain, so one of them is mostly the middle and is removed itself.
    # Else the neighbourhood is anywhere.
    if len(waiting) > 0 and _random(state) < 0.9:
        middle = waiting[int(_random(state) * len(waiting))]
        first = min(max(middle - width // 2, 0), n - width)
        removed[0].request = order[middle]
        marked[order[middle]] = True
        count = 1

    # Draws may hit somebody again, so there are more of them, but not without end.
    for _ in range(3 * wanted):
        if count == wanted:
            break

        i = order[first + int(_random(state) * width)]
        if not marked[i]:
            marked[i] = True
            removed[count].request = i
            count += 1

    for j in range(count):
        marked[removed[j].request] = False

    return count


@njit(nogil=True)
def _draw_key(kind, r, start, state):  # type: ignore[no-untyped-def]
    """Draw the key of a removed request: those of smaller keys are put back first.

    ``r`` is its record and ``start`` its start, in rounds of its worker. The noise is in rounds, or
    a share of the volume.
    """
    x = _random(state)
    if kind.rule == _BY_START:
        return start + kind.noise * (x - 0.5)
    if kind.rule == _BY_VOLUME:
        return r.volume * (1.0 + kind.noise * (x - 0.5))
    if kind.rule == _BY_END:
        return start + r.output + kind.noise * (x - 0.5)

    return x  # `_RANDOM`


@njit(nogil=True)
def _sort(removed, count):  # type: ignore[no-untyped-def]
    """Sort the first `count` removed requests by key, by insertion, since they are few."""
    for j in range(1, count):
        request, start, key = removed[j].request, removed[j].start, removed[j].key
        p = j - 1
        while p >= 0 and removed[p].key > key:
            a, b = removed[p], removed[p + 1]  # by field: copying records takes longer
            b.request, b.start, b.key = a.request, a.start, a.key
            p -= 1

        removed[p + 1].request, removed[p + 1].start, removed[p + 1].key = request, start, key


@njit(nogil=True)
def _put_back(requests, capacity, use, starts, length, removed, count, limit):  # type: ignore[no-untyped-def]
    """Put ``count`` requests back, as long as their starts can still sum to at most ``limit``.

    Return how many were put back, the sum of their starts, and the work: about the number of rounds
    that were looked at. Starts in sums and limits are in rounds of each worker, not of the axis.
    The search begins at the first start that was removed, since earlier ones are seldom possible.
    ``removed`` has records of `_REMOVED`, in the order to put back. For the first five arguments
    see `_Machine`.
    """
    end = length - 1  # the last round of a worker
    since = removed[0].start % length
    for j in range(1, count):
        since = min(since, removed[j].start % length)

    coming = 0  # the min sum of the starts of the requests to come
    for j in range(count):
        coming += max(requests[removed[j].request].arrival, since)

    total = work = 0
    for j in range(count):
        i = removed[j].request
        r = requests[i]
        base, output, low = r.base, r.output, max(r.arrival, since)
        coming -= low
        # After a later start the sum would exceed the limit, however early the others start.
        last = min(limit - total - coming, r.deadline - output, end - output)
        if last < low:
            return j, total, work

        best = -1
        for first in range(0, len(use), length):  # the first round of each worker on the axis
            k = earliest(use, capacity, base, output, first + low, first + last)
            # From the first start looked at to the one found, or to the last, and a whole run.
            work += (k - first if k >= 0 else last) - low + output
            if k >= 0:
                best = k
                # The next worker counts only if it is sooner.
                last = k - first - 1
                if last < low:
                    break

        if best < 0:
            return j, total, work

        put(use, base, output, best, 1)
        starts[i] = best
        total += best % length

    return count, total, work


@njit(nogil=True)
def _make_steps(machine, order, waiting, kinds, state, steps, heat):  # type: ignore[no-untyped-def]
    """Make steps, which change starts and KV in place. Return by how much the sum of starts fell.

    For ``order`` and ``waiting`` see `_choose_requests`. They stay as they were at the beginning.
    For ``kinds`` and ``state`` see `_draw_kind`. `put` adds a run to the KV (1) or removes it (-1).
    """
    requests, capacity, use, starts, length = machine
    removed = np.zeros(_MAX_REMOVED, _REMOVED)
    marked = np.zeros(len(starts), np.bool_)
    fall = 0

    for _ in range(steps):
        kind = _draw_kind(kinds, state)
        count = _choose_requests(kind, order, waiting, marked, removed, state)
        before = 0  # the sum of their starts
        # In rounds looked at: 40 for the step itself, and below 20 for each request beside its run,
        # which is taken out and put back.
        work = 40

        for j in range(count):
            i = removed[j].request
            r, start = requests[i], starts[i]
            base, output = r.base, r.output
            put(use, base, output, start, -1)
            removed[j].start = start
            removed[j].key = _draw_key(kind, r, start % length, state)
            before += start % length
            work += 2 * r.output + 20

        _sort(removed, count)
        # Now and then the sum may rise: by an exponential random number with the mean `heat`.
        limit = before
        if heat > 0.0:
            limit += int(-heat * math.log(1.0 - _random(state)))

        # It gives up where the sum must exceed the limit, so whoever is missing rejects the step.
        back, after, looked = _put_back(
            requests, capacity, use, starts, length, removed, count, limit
        )
        kind.work += work + looked
        # All are back: the step is kept. A rise that was allowed is no gain of its kind.
        if back == count:
            fall += before - after
            if after < before:
                kind.gain += before - after

            continue

        # The step failed: whoever was put back goes out again, and all return to where they were.
        for j in range(back):
            i = removed[j].request
            base, output, start = requests[i].base, requests[i].output, starts[i]
            put(use, base, output, start, -1)

        for j in range(count):
            i = removed[j].request
            base, output, start = requests[i].base, requests[i].output, removed[j].start
            starts[i] = start
            put(use, base, output, start, 1)

    return fall


class Search:
    """A schedule that the search improves.

    It is made with feasible `starts` (shape (n,)), in rounds since the first arrival, and `homes`,
    the workers, by default all 0. Then `starts` are those of the present schedule on the axis of
    all workers, and `best`, in rounds of each worker, and `homes` belong to the best schedule that
    was seen between two chunks of steps.
    """

    def __init__(
        self,
        data: RoundData,
        starts: Ints,
        *,
        seed: int,
        homes: Ints | None = None,
        workers: int = 1,
    ) -> None:
        self.data, capacity = data, data.instance.kv_capacity
        self.best = starts.astype(np.int64)
        self.homes = np.zeros_like(self.best) if homes is None else homes.copy()
        self.value = self.best_value = data.tel(starts)
        self.steps = 0
        # SplitMix64's constant spreads small seeds over all bits. The state must not be 0.
        state = ((seed + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        self._state = np.array([state], dtype=np.uint64)
        longest = int(data.output.max())
        # Steps may move the last requests beyond the present end, but not beyond these rounds.
        self._length = int((starts + data.output).max()) + 2 * longest + 2
        # One axis for all workers: worker w has the rounds from w * `_length` on.
        self.starts = self.best + self._length * self.homes
        self._use = np.zeros(workers * self._length, dtype=np.int64)
        # `put` counts the rounds of a run from 1: in the j-th, base + j tokens are held.
        self._base = data.first_kv - 1
        fill(data.output, self._base, self._use, self.starts)
        requests = np.zeros(len(starts), dtype=_REQUEST)
        for name in ("arrival", "output", "deadline"):
            requests[name] = getattr(data, name)

        requests["base"], requests["volume"] = self._base, data.instance.volume
        self._machine = _Machine(requests, capacity, self._use, self.starts, self._length)
        self._kinds = np.array(_KINDS, dtype=_KIND)

    def run(self, steps: int, heat: float) -> int:
        """Make at most `CHUNK` steps at one heat. Return by how much the value fell.

        With long outputs they are fewer, so that the caller looks at the clock as often.
        """
        before, starts = self.value, self.starts % self._length
        order = np.argsort(starts, kind="stable")
        waiting = np.flatnonzero((starts > self.data.arrival)[order])
        steps = min(steps, CHUNK, 1 + _CHUNK_ROUNDS // int(self.data.output.max()))
        self.value -= _make_steps(
            self._machine, order, waiting, self._kinds, self._state, steps, heat
        )
        self.steps += steps
        # Forget slowly, since the best kind of step changes as the schedule gets better. What is
        # added keeps both above 0.
        self._kinds["work"] = self._kinds["work"] * 0.98 + 1e-3
        self._kinds["gain"] = self._kinds["gain"] * 0.98 + 1e-4
        # Once in so many steps the gaps that they have left are closed. It is done in the order of
        # before the steps, and any order is valid.
        if self.steps % (20 * CHUNK) < steps:
            self.compact(order)

        self._keep()
        return before - self.value

    def anneal(
        self, budget: Budget, max_steps: int, over: Callable[[], bool], tell: Callable[[], None]
    ) -> None:
        """Make steps at a heat that falls with the time and the steps, until it is `over`.

        `tell` is called after every chunk of steps.
        """
        scale, begin = float(self.data.output.mean()), budget.spent_s
        time_s = max(budget.limit_s - begin, 1e-9)
        # Gaps of the first schedule are closed at once: steps would find them one by one.
        self.compact()

        while not over() and self.steps < max_steps:
            # The share of what may be used that is used: of the steps or, if it is more, the time.
            share = max(self.steps / max_steps, (budget.spent_s - begin) / time_s)
            heat = _HOT * scale * max(0.0, 1.0 - share)
            self.run(max_steps - self.steps, heat)
            tell()

    def compact(self, order: Ints | None = None) -> None:
        """Move every request to its earliest feasible start, in order of start."""
        data, capacity = self.data, self.data.instance.kv_capacity
        if order is None:
            order = np.argsort(self.starts % self._length, kind="stable")

        # Arrivals on the axis, since each request stays on its worker.
        arrival = data.arrival + self.starts // self._length * self._length
        use, starts = self._use, self.starts
        self.value -= compact(arrival, data.output, self._base, capacity, use, starts, order)
        self._keep()

    def _keep(self) -> None:
        """Keep the present schedule if it is the best."""
        if self.value < self.best_value:
            self.best_value = self.value
            self.best[:] = self.starts % self._length
            self.homes[:] = self.starts // self._length
