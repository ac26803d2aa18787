"""A relaxation on its way up a ladder of floors, from coarse to exact.

Rounding floors up merges states and forgets the last token-rounds (in reverse time) of requests.
Floors are made exact from the largest down: a floor f becomes max(f, v), and v falls. So no two
kinds of different floors become alike, and every finer state has one coarser state. What the
coarser graph deletes is deleted for good. Other floors were tried: finer ones only for small peaks,
or only in the part with a clock, or {2, 4, 6} instead of {4, 5, 6}. They have fewer states for the
token-rounds that they forget, but led to larger graphs and lower bounds.

The number of states is counted without a graph. Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import TooLarge
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.jobs import max_completed_by
from optsched.optimize.ramp.relaxation import Growth, Relaxation
from optsched.problem.kernel import njit

Floors = NDArray[np.int64]

# The floors of all kinds, relative to the largest, before any is exact.
_ABOVE = (3.0, 2.0, 1.5, 1.25)
# The max number of distinct totals of weights, and of entries in a table by number and total.
_CELLS, _ENTRIES = 1 << 16, 1 << 24
# The factor by which the nodes should grow from one step of the ladder to the next.
_GROWTH = 8.0
# The factor by which graphs of a higher target may grow more at the same step.
_CAUTION = 1.5
# The min part (`Growth.part`) with which measured growth is extrapolated.
_MIN_PART = 0.4
CLOCKED_SHARE = 0.35
"""The share of (t, m) pairs times multisets that become nodes, measured on Poisson arrivals."""


@njit(nogil=True)
def _count_in_class(limit: Any, low: int, unit: int, width: int, cells: int, stop: Any) -> Any:
    """Return the number of multisets of weights from ``low`` on, by total in units of ``unit``.

    At most ``limit[w - low]`` weights are w or more, and at most `width` are in a set. Totals above
    `cells` are left out. A set stop flag leaves the count incomplete.
    """
    table = np.zeros((width + 1, cells + 1))  # sets by number of weights and total
    table[0, 0] = 1.0
    heaviest = (low + limit.shape[0] - 1) // unit

    # Weights are added from the heaviest down. So a set may have k weights once this one is added
    # only if so many items may be as heavy.
    for above in range(limit.shape[0] - 1, -1, -1):
        if stop[0] != 0:
            break

        weight = (low + above) // unit
        for k in range(1, min(width, limit[above]) + 1):
            # A set with this weight is one with k - 1 weights, which may include it, and it. Sets
            # of k weights from this one to the heaviest have no other totals.
            for total in range(k * weight, min(cells, k * heaviest) + 1):
                table[k, total] += table[k - 1, total - weight]

    counts = np.zeros(cells + 1)
    for k in range(width + 1):
        counts += table[k]

    return counts


@njit(nogil=True)
def _convolve(counts: Any, others: Any, stop: Any) -> Any:
    """Return the numbers of unions of two classes' sets, by total.

    Totals are those that the first array has a place for. A set stop flag leaves them incomplete.
    """
    cells = counts.shape[0]
    sums = np.zeros(cells)
    for added in range(cells):
        if stop[0] != 0:
            break
        # Most totals of a class are of no set.
        if others[added] != 0.0:
            for total in range(added, cells):
                sums[total] += others[added] * counts[total - added]

    return sums


def count_multisets(
    peak: Floors, floor: Floors, copies: Floors, capacity: int, stop: NDArray[np.int8] | None = None
) -> float:
    """Return the max number of multisets of live items, including the empty one.

    With a large capacity, totals count in units of several tokens, with each weight rounded down.
    So neither time nor memory grows with the capacity, and the count is slightly too large.

    `peak`, `floor`, `copies` (shape (kinds,)): the weight of a live item falls from its kind's peak
    to the floor, in tokens. Items below the floor are not counted. Items of equal weight and floor
    are alike. `stop`: a flag; once it is set, `Interrupted` is raised.
    """
    flag = np.zeros(1, dtype=np.int8) if stop is None else stop
    # A table has a row for each number of items that fit, and a column for each total in units. The
    # unit is one token if that is small enough.
    lightest = max(int(floor.min()), 1)
    rows = 1 + min(int(copies.sum()), capacity // lightest)
    # So many tokens that a table has at most `_ENTRIES` entries, and `_CELLS` in a row.
    unit = 1 + capacity // max(min(_CELLS, _ENTRIES // rows), 1)
    cells = capacity // unit
    counts = np.zeros(cells + 1)
    counts[0] = 1.0

    # Items of different floors are never alike, so each floor is a class by itself.
    for f in np.unique(floor):
        members = floor == f
        low = max(int(f), 1)
        # A live item of weight w is of a kind whose peak is w or more: `limit[w - low]` counts
        # their requests. If all peaks are below the floor, it has one entry, which is 0.
        limit = np.zeros(max(int(peak[members].max()) + 1 - low, 1), dtype=np.int64)
        for p, number in zip(peak[members], copies[members], strict=True):
            limit[: max(int(p) + 1 - low, 0)] += number

        width = int(min(limit[0], capacity // low))
        counts = _convolve(counts, _count_in_class(limit, low, unit, width, cells, flag), flag)
        if flag[0]:
            raise Interrupted

    return float(counts.sum())


@dataclass(eq=False)
class Ladder:
    """Floors of the kinds of a relaxation from coarse to exact, step by step.

    None rises from one step to the next, and those of the last are exact. ``steps`` has by step the
    floor of each kind, and ``_states`` the numbers of multisets that were counted so far.
    """

    relaxation: Relaxation
    steps: list[Floors] = field(init=False)
    _states: dict[int, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        exact = self.relaxation.floor
        top = int(exact.max())
        # The exact values are steps too, so that every kind becomes exact in turn.
        values = {*exact.tolist(), *(int(top * share) for share in _ABOVE)}
        self.steps = [np.maximum(exact, v) for v in sorted(values, reverse=True)]

    def states(self, step: int) -> float:
        """Return the max number of multisets with the floors of a step."""
        if step not in self._states:
            r = self.relaxation
            floors, capacity = self.steps[step], r.jobs.capacity
            self._states[step] = count_multisets(r.peak, floors, r.copies, capacity, r.stop)

        return self._states[step]

    def finest(self, since: int, max_states: float) -> int:
        """Return the last step from ``since`` on with so many states at most, else ``since``."""
        # Floors only fall from step to step, so states only grow: the first step with too many ends
        # it.
        while since + 1 < len(self.steps) and self.states(since + 1) <= max_states:
            since += 1

        return since


@dataclass
class Seen:
    """What was seen of the growth at one step of the ladder.

    The next time, the nodes of all paths below the known schedule are expected to grow by
    ``lowest`` at least, and by at most `_CAUTION` times ``growth``. For ``bend`` see `Growth`.
    """

    lowest: float = 1.0
    growth: float = math.inf
    bend: float = 1.0

    def learn(self, measured: float, expected: float, part: float) -> None:
        """Learn from the growth below one target, where `expected` is that of all paths.

        By `Growth` the logarithm of `measured` is `part` to the power of the bend, times that of
        `expected`, with a bend of 1 at first.
        """
        self.lowest, self.bend = 1.0, 1.0
        if measured >= expected:
            # More than was expected of all paths: now as much is, and with a bend of 0 below every
            # target.
            self.lowest, self.growth = measured, measured
            self.bend = 0.0 if part < 1.0 else 1.0
        elif measured > expected**part:
            # More than the bend 1 says: the bend is what leads to this growth. Here the part is
            # below 1 and the growth between 1 and what was expected, so all logarithms exist.
            self.growth = expected
            self.bend = math.log(math.log(measured) / math.log(expected)) / math.log(part)
        else:
            # Less: all paths grow less than expected. From a small part this is not extrapolated.
            self.growth = max(1.0, measured) ** (1.0 / max(_MIN_PART, part))


@dataclass(eq=False)
class Climb:
    """A relaxation on its way up the ladder of floors.

    ``seen`` is by the rungs where a step begins and ends, and all climbs share it. ``rung`` is the
    step of the ladder, -1 before the first one. ``share`` is the growth at the last step over the
    one predicted from the ladder's states.
    """

    relaxation: Relaxation
    ladder: Ladder
    seen: dict[tuple[int, int], Seen] = field(default_factory=dict)
    rung: int = -1
    share: float = 1.0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.relaxation.graph.nodes)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to refine."""
        r = self.relaxation
        return r.closed or r.graph is None or self.finest

    @property
    def finest(self) -> bool:
        """Whether floors are exact."""
        return self.rung == len(self.ladder.steps) - 1

    def fork(self) -> Climb:
        """Return another one that goes on from here."""
        return replace(self, relaxation=self.relaxation.fork())

    def plan(self, max_nodes: float, value: int) -> tuple[int, Growth]:
        """Return the next rung, and how nodes should grow up to it below a target.

        It is the finest one for which so many nodes should be enough, but the next one at least.
        ``value`` is of the known schedule.
        """
        r, ladder, rung = self.relaxation, self.ladder, self.rung
        first_nodes = r.tuning.first_nodes  # a graph of so many is built without smaller ones
        if rung < 0:
            # Nothing was pruned and the estimate is rough, so a quarter of the nodes is aimed at.
            # A factor of 0 says that there is nothing to grow from.
            states = min(first_nodes, max_nodes / 4) / _nodes_per_state(r)
            return min(len(ladder.steps) - 1, ladder.finest(0, states)), Growth(0.0, value)

        # Steps are small where memory would allow a large one: each graph prunes the next.
        nodes_per_state = self.share * self.nodes / ladder.states(rung)
        nodes = min(max_nodes, max(first_nodes, _GROWTH * self.nodes))
        to = ladder.finest(rung + 1, nodes / nodes_per_state)
        return to, Growth(self._expected(to), value, self._seen(to).bend)

    def take(self, to: int, max_nodes: int, value: int) -> None:
        """Go to a rung, with at most ``max_nodes`` nodes. ``value`` is of the known schedule.

        With more nodes `TooLarge` is raised, and the graph stays as it was.
        """
        r, floors = self.relaxation, self.ladder.steps[to]
        if self.rung < 0:
            r.use_floors(floors, max_nodes)
            self.rung = to
            return

        # What was expected belongs to this rung, so it is asked for before the rung changes. It is
        # the growth of all paths, of which the target asks for a part (`Growth`).
        before, predicted, expected = self.nodes, self._predicted(to), self._expected(to)
        seen = self.seen[self.rung, to] = self._seen(to)
        part = Growth(expected, value).part(r.upper, r.graph_bound)

        try:
            r.use_floors(floors, max_nodes)
        except TooLarge:
            # The growth is larger than this, by how much is not known: somewhat more is expected.
            seen.learn(max_nodes / before, expected, part)
            seen.lowest, seen.bend = _CAUTION * seen.lowest, seen.bend / 2.0
            raise

        seen.learn(r.made / before, expected, part)
        self.share *= seen.growth / predicted
        self.rung = to

    def _seen(self, to: int) -> Seen:
        """Return what was seen at the step to a rung."""
        return self.seen.get((self.rung, to), Seen())

    def _predicted(self, to: int) -> float:
        """Return the growth up to a rung if it is as large as at the step before."""
        return self.share * self.ladder.states(to) / self.ladder.states(self.rung)

    def _expected(self, to: int) -> float:
        """Return the growth up to a rung, as predicted, but within what was seen there."""
        seen = self._seen(to)
        return min(max(self._predicted(to), seen.lowest), _CAUTION * seen.growth)


def _nodes_per_state(relaxation: Relaxation) -> float:
    """Return roughly the number of nodes per multiset before anything is deleted.

    A state is a multiset with the number m of requests met and, with a clock, the round t. So there
    are n states of each multiset without a clock, and with one as many as there are pairs (t, m).
    """
    r = relaxation
    pairs = int((max_completed_by(r.jobs, r.clock) + 1).sum()) if r.clock else 0
    return r.jobs.n + CLOCKED_SHARE * pairs
