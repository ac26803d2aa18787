"""Large-neighbourhood search over starts in the round model, compiled.

A step takes a few requests out, chosen among neighbours in start order of a request that waits,
and puts them back one by one at their earliest feasible starts, in an order drawn anew: by noisy
start, by KV volume, by noisy completion or at random. It is kept if the total latency does not
rise by more than an exponential random number whose mean, the *heat*, falls as the search goes
on (threshold annealing). Kinds of step are chosen by what they gained for the work they took.

Deterministic from the seed where iterations are limited and time is not.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
from numba import njit

from optsched.bounds.timeline import Ints
from optsched.optimize.search.placement import Room, compact, earliest, fill, put

CHUNK = 2000
"""Steps between two looks at the clock; about 10 ms."""
_MOST = 24
_BY_START, _BY_VOLUME, _RANDOM, _BY_END = range(4)
_RULES = (
    (_BY_START, 20.0), (_BY_START, 60.0), (_BY_START, 200.0),
    (_BY_VOLUME, 0.2), (_RANDOM, 0.0), (_BY_END, 50.0),
)  # fmt: skip
_HOT = 0.15
"""Heat at the beginning, in mean outputs."""
_KINDS = np.array(
    [
        (width, most, rule, noise)
        for width, most, (rule, noise) in product(
            (15, 30, 60, 120, 250, 500, 1000), (2, 3, 5, 10), _RULES
        )
    ]
)
"""Kinds of step: width of the neighbourhood, most requests taken out, rule, noise."""


@njit(cache=True, nogil=True, inline="always")
def _random(state):  # type: ignore[no-untyped-def]
    """A number in [0, 1), by xorshift64* (Vigna 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit(cache=True, nogil=True)
def _steps(  # type: ignore[no-untyped-def]
    arrival, output, base, deadline, volume, capacity, use, starts,
    order, late, state, steps, heat, kinds, work_of, gain_of,
):  # fmt: skip
    """Make steps; return by how much the sum of starts fell."""
    n = len(starts)
    chosen, old = np.empty(_MOST, np.int64), np.empty(_MOST, np.int64)
    key = np.empty(_MOST)
    taken = np.zeros(n, np.bool_)
    end = len(use) - 1
    fallen = 0
    for _ in range(steps):
        c = int(_random(state) * len(kinds))
        if _random(state) > 0.15:
            d = int(_random(state) * len(kinds))
            if gain_of[d] * work_of[c] > gain_of[c] * work_of[d]:
                c = d
        width = min(n, int(kinds[c, 0]))
        count = min(width, 2 + int(_random(state) * (kinds[c, 1] - 1)))
        rule, noise = int(kinds[c, 2]), kinds[c, 3]

        # Take out.
        size = 0
        at = int(_random(state) * (n - width + 1))
        if len(late) > 0 and _random(state) < 0.9:
            middle = late[int(_random(state) * len(late))]
            at = min(max(middle - width // 2, 0), n - width)
            chosen[0] = order[middle]
            taken[order[middle]] = True
            size = 1
        for _ in range(3 * count):
            if size == count:
                break
            i = order[at + int(_random(state) * width)]
            if not taken[i]:
                taken[i] = True
                chosen[size] = i
                size += 1
        cost, work, since = 0, 40, starts[chosen[0]]
        for j in range(size):
            i = chosen[j]
            taken[i] = False
            old[j] = starts[i]
            put(use, base[i], output[i], starts[i], -1)
            cost += starts[i]
            work += 2 * output[i] + 20
            since = min(since, starts[i])
            if rule == _BY_START:
                key[j] = starts[i] + noise * (_random(state) - 0.5)
            elif rule == _BY_VOLUME:
                key[j] = volume[i] * (1.0 + noise * (_random(state) - 0.5))
            elif rule == _BY_END:
                key[j] = starts[i] + output[i] + noise * (_random(state) - 0.5)
            else:
                key[j] = _random(state)
        for j in range(1, size):
            k0, i0, o0 = key[j], chosen[j], old[j]
            p = j - 1
            while p >= 0 and key[p] > k0:
                key[p + 1], chosen[p + 1], old[p + 1] = key[p], chosen[p], old[p]
                p -= 1
            key[p + 1], chosen[p + 1], old[p + 1] = k0, i0, o0

        # Put back, as long as what is spent and the least that is to come keep the limit. Room
        # has been made from the first start taken out on: earlier starts are seldom possible,
        # and looking for them costs more than it gains (`compact` does now and then).
        limit = cost
        if heat > 0.0:
            limit += int(-heat * math.log(1.0 - _random(state)))
        coming = 0
        for j in range(size):
            coming += max(arrival[chosen[j]], since)
        spent, done, kept = 0, 0, True
        for j in range(size):
            i = chosen[j]
            low = max(arrival[i], since)
            coming -= low
            last = min(limit - spent - coming, deadline[i] - output[i], end - output[i])
            k = -1
            if last >= low:
                k = earliest(use, capacity, base[i], output[i], low, last)
                work += (k if k >= 0 else last) - low + output[i]
            if k < 0 or k > last:
                kept = False
                break
            put(use, base[i], output[i], k, 1)
            starts[i] = k
            spent += k
            done += 1
        work_of[c] += work
        if kept:
            fallen += cost - spent
            if spent < cost:
                gain_of[c] += cost - spent
            continue
        for j in range(done):
            i = chosen[j]
            put(use, base[i], output[i], starts[i], -1)
        for j in range(size):
            i = chosen[j]
            starts[i] = old[j]
            put(use, base[i], output[i], old[j], 1)
    return fallen


class Search:
    """A schedule under improvement.

    Parameters
    ----------
    room : Room
    starts : ndarray of int64, shape (n,)
        A feasible schedule, gaps cut out; copied.
    seed : int

    Attributes
    ----------
    starts, best : ndarray of int64, shape (n,)
        The present schedule, and the best one seen between two chunks.
    value, best_value : int
        Their total latencies, in rounds.
    steps : int
        Steps made.
    """

    def __init__(self, room: Room, starts: Ints, *, seed: int) -> None:
        self.room = room
        self.starts = starts.astype(np.int64)
        self.best = self.starts.copy()
        self.value = self.best_value = room.tel(starts)
        self.steps = 0
        # SplitMix64's constant spreads small seeds over all bits, and 0 is none.
        state = ((seed + 1) * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        self._state = np.array([state], dtype=np.uint64)
        longest = int(room.output.max())
        end = int((self.starts + room.output).max()) + 2 * longest + 1
        self._use = np.zeros(end + 1, dtype=np.int64)
        fill(room.output, room.base, self._use, self.starts)
        self._work = np.ones(len(_KINDS))
        self._gain = np.ones(len(_KINDS))

    def run(self, steps: int, heat: float) -> int:
        """Make at most `CHUNK` steps at one heat; return by how much the value fell."""
        room = self.room
        before = self.value
        order = np.argsort(self.starts, kind="stable")
        late = np.flatnonzero((self.starts > room.arrival)[order])
        steps = min(steps, CHUNK)
        self.value -= _steps(
            room.arrival, room.output, room.base, room.deadline, room.model.instance.volume,
            room.capacity, self._use, self.starts, order, late, self._state, steps, heat,
            _KINDS, self._work, self._gain,
        )  # fmt: skip
        self.steps += steps
        # Forget slowly: what helps changes as the schedule gets better.
        self._work = self._work * 0.98 + 1e-3
        self._gain = self._gain * 0.98 + 1e-4
        if self.steps % (20 * CHUNK) < steps:
            self.compact(order)
        self._keep()
        return before - self.value

    def compact(self, order: Ints | None = None) -> None:
        """Move every request to its earliest feasible start, in order of start."""
        room = self.room
        if order is None:
            order = np.argsort(self.starts, kind="stable")
        self.value -= compact(
            room.arrival, room.output, room.base, room.capacity, self._use, self.starts, order
        )
        self._keep()

    def _keep(self) -> None:
        if self.value < self.best_value:
            self.best_value = self.value
            self.best[:] = self.starts


def heat_at(share: float, scale: float) -> float:
    """Return the heat after a share of the search, in rounds.

    Parameters
    ----------
    share : float
        From 0 to 1.
    scale : float
        Mean output, in rounds.
    """
    return _HOT * scale * max(0.0, 1.0 - share)
