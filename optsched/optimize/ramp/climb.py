"""A relaxation on its way up from coarse floors to exact ones, and then to counters.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from optsched.optimize.ramp.floors import Ladder
from optsched.optimize.ramp.jobs import most_completed
from optsched.optimize.ramp.relaxation import Relaxation

_COUNTERS = 3
"""The number of kinds that get counters at a time."""
_GROWTH = 8.0
"""The factor by which the nodes should grow from one step of the ladder to the next."""
_FIRST = 1_000_000
"""The max nodes of a graph that is built without smaller graphs before it."""
_CAUTION = 1.5
"""The factor by which graphs of a higher target may grow more at the same step."""
_FEWEST = 0.4
"""The least power (`Relaxation.growth_below`) with which measured growth is extrapolated."""
CLOCKED_SHARE = 0.35
"""The share of (t, m) pairs times multisets that become nodes, measured on Poisson arrivals."""


@dataclass(eq=False)
class Climb:
    """A relaxation on its way up the ladder of floors, then to counters.

    Parameters
    ----------
    relaxation : Relaxation
    ladder : Ladder
    grown : dict
        The factor by which the nodes of all paths below the known schedule would have grown at
        each step the last time. All climbs share it.
    rung : int
        The step of the ladder. It is -1 before the first step, and beyond the last one once kinds
        are counted.
    share : float
        That factor over the one predicted from the ladder's states.
    """

    relaxation: Relaxation
    ladder: Ladder
    grown: dict[tuple[int, int], float] = field(default_factory=dict)
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
        return r.closed or r.graph is None or len(r.counted) == len(r.copies)

    def fork(self) -> Climb:
        """Return another one that goes on from here."""
        return replace(self, relaxation=self.relaxation.fork())

    def plan(self, room: float) -> tuple[int, float]:
        """Return the next rung, and the factor by which nodes should grow up to it.

        This is the growth of the graph of all paths below the known schedule. Below a target it is
        less (`Relaxation.growth_below`).
        """
        r, ladder, rung = self.relaxation, self.ladder, self.rung
        last = len(ladder.steps) - 1
        if rung < 0:
            states = min(_FIRST, room / 4) / _first_nodes(r)
            return min(last, ladder.finest(0, states)), 0.0
        if rung < last:
            per_state = self.share * self.nodes / ladder.states(rung)
            states = min(room, max(_FIRST, _GROWTH * self.nodes)) / per_state
            to = ladder.finest(rung + 1, states)
            growth = per_state * ladder.states(to) / self.nodes
        else:
            to = rung + 1
            for kinds in range(min(_COUNTERS, len(r.copies) - len(r.counted)), 1, -1):
                if self.grown.get((rung, rung + kinds), 2.0**kinds) * self.nodes <= room:
                    to = rung + kinds
                    break
            growth = 2.0 ** (to - rung)
        return to, min(growth, _CAUTION * self.grown.get((rung, to), math.inf))

    def take(self, to: int, most: int, value: int) -> None:
        """Go to a rung, with at most ``most`` nodes. ``value`` is that of the known schedule.

        Raises
        ------
        Interrupted, TooLargeError
            The rung was not reached, and nothing has changed.
        """
        r, rung = self.relaxation, self.rung
        last, before = len(self.ladder.steps) - 1, self.nodes
        power = max(_FEWEST, r.growth_below(r.upper, value))
        if rung < last:
            r.use_floors(self.ladder.steps[to], most)
        else:
            order = np.argsort(-r.violation, kind="stable").tolist()
            r.count([k for k in order if k not in r.counted][: to - rung], most)
        self.rung = to
        if r.graph is None:  # hardly any nodes were left to make
            self.grown[rung, to] = 1.0
        elif rung >= 0:
            self.grown[rung, to] = (self.nodes / before) ** (1 / power)
            if to <= last:
                expected = self.ladder.states(to) / self.ladder.states(rung)
                self.share = self.grown[rung, to] / expected


def _first_nodes(relaxation: Relaxation) -> float:
    """Return roughly the number of nodes per state."""
    r = relaxation
    pairs = int((most_completed(r.jobs, r.clock) + 1).sum()) if r.clock else 0
    return r.jobs.n + CLOCKED_SHARE * pairs
