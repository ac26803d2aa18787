"""A relaxation on its way up from coarse floors to exact ones.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from optsched.bounds.checker.parts import TooLarge
from optsched.optimize.ramp.floors import Ladder
from optsched.optimize.ramp.jobs import max_completed_by
from optsched.optimize.ramp.relaxation import Growth, Relaxation

_GROWTH = 8.0
"""The factor by which the nodes should grow from one step of the ladder to the next."""
_CAUTION = 1.5
"""The factor by which graphs of a higher target may grow more at the same step."""
_FEWEST = 0.4
"""The least part (`Growth.part`) with which measured growth is extrapolated."""
CLOCKED_SHARE = 0.35
"""The share of (t, m) pairs times multisets that become nodes, measured on Poisson arrivals."""


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
        """Learn from one step."""
        self.lowest, self.bend = 1.0, 1.0
        if measured >= expected:
            self.lowest, self.growth = measured, measured
            self.bend = 0.0 if part < 1.0 else 1.0
        elif measured > expected**part:
            self.growth = expected
            self.bend = math.log(math.log(measured) / math.log(expected)) / math.log(part)
        else:
            self.growth = max(1.0, measured) ** (1.0 / max(_FEWEST, part))


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

    def plan(self, room: float, value: int) -> tuple[int, Growth]:
        """Return the next rung, and how nodes should grow, with ``value`` of the known schedule."""
        r, ladder, rung = self.relaxation, self.ladder, self.rung
        first = r.tuning.first_nodes
        if rung < 0:
            states = min(first, room / 4) / _first_nodes(r)
            return min(len(ladder.steps) - 1, ladder.finest(0, states)), Growth(0.0, value)

        per_state = self.share * self.nodes / ladder.states(rung)
        states = min(room, max(first, _GROWTH * self.nodes)) / per_state
        to = ladder.finest(rung + 1, states)
        return to, Growth(self._expected(to), value, self._seen(to).bend)

    def take(self, to: int, max_nodes: int, value: int) -> None:
        """Go to a rung, with at most ``max_nodes`` nodes. ``value`` is of the known schedule."""
        r, floors = self.relaxation, self.ladder.steps[to]
        if self.rung < 0:
            r.use_floors(floors, max_nodes)
            self.rung = to
            return

        before, predicted, expected = self.nodes, self._predicted(to), self._expected(to)
        seen = self.seen[self.rung, to] = self._seen(to)
        part = Growth(expected, value).part(r.upper, r.graph_bound)

        try:
            r.use_floors(floors, max_nodes)
        except TooLarge:
            seen.learn(max_nodes / before, expected, part)
            seen.lowest, seen.bend = _CAUTION * seen.lowest, seen.bend / 2.0
            raise

        seen.learn(r.made / before, expected, part)
        self.share *= seen.growth / predicted
        self.rung = to

    def _seen(self, to: int) -> Seen:
        return self.seen.get((self.rung, to), Seen())

    def _predicted(self, to: int) -> float:
        """Return the growth up to a rung if it is as large as at the step before."""
        return self.share * self.ladder.states(to) / self.ladder.states(self.rung)

    def _expected(self, to: int) -> float:
        """Return the growth up to a rung, after what was seen there."""
        seen = self._seen(to)
        return min(max(self._predicted(to), seen.lowest), _CAUTION * seen.growth)


def _first_nodes(relaxation: Relaxation) -> float:
    """Return roughly the number of nodes per state."""
    r = relaxation
    pairs = int((max_completed_by(r.jobs, r.clock) + 1).sum()) if r.clock else 0
    return r.jobs.n + CLOCKED_SHARE * pairs
