"""Which floors to give the kinds of the ramp relaxation, from coarse to exact.

Rounding floors up merges states and forgets the last token-rounds (in reverse time) of requests.
Floors are made exact from the largest down: a floor f becomes max(f, v), and v falls. So no two
kinds of different floors become alike, and every finer state has one coarser state. What the
coarser graph deletes is deleted for good. Other floors were tried: finer ones only for small peaks,
or only in the part with a clock, or {2, 4, 6} instead of {4, 5, 6}. They have fewer states for the
token-rounds that they forget, but led to larger graphs and lower bounds
(`docs/lab/notes/small-scale.md`).

The number of states is counted without a graph. Import this module lazily: it loads numba.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.relaxation import Relaxation
from optsched.problem.kernel import njit

Floors = NDArray[np.int64]

_ABOVE = (3.0, 2.0, 1.5, 1.25)
"""The floors of all kinds, relative to the largest, before any is exact."""


_CELLS, _ENTRIES = 1 << 16, 1 << 24
"""The max number of distinct totals of weights, and of entries in a table by number and total."""


@njit(nogil=True)
def _of_class(limit: Any, low: int, unit: int, width: int, cells: int, stop: Any) -> Any:
    """Return the number of multisets of weights from ``low`` on, by total in units.

    At most ``limit[w - low]`` weights are w or more. A set stop flag leaves the count incomplete.
    """
    table = np.zeros((width + 1, cells + 1))
    table[0, 0] = 1.0
    heaviest = (low + limit.shape[0] - 1) // unit

    for above in range(limit.shape[0] - 1, -1, -1):
        if stop[0] != 0:
            break

        weight = (low + above) // unit
        for k in range(1, min(width, limit[above]) + 1):
            for total in range(k * weight, min(cells, k * heaviest) + 1):
                table[k, total] += table[k - 1, total - weight]

    out = np.zeros(cells + 1)
    for k in range(width + 1):
        out += table[k]

    return out


@njit(nogil=True)
def _of_both(counts: Any, others: Any, stop: Any) -> Any:
    """Return the convolution of two counts, as long as the first one; see `_of_class`."""
    cells = counts.shape[0]
    out = np.zeros(cells)
    for added in range(cells):
        if stop[0] != 0:
            break
        if others[added] != 0.0:
            for total in range(added, cells):
                out[total] += others[added] * counts[total - added]

    return out


def count_multisets(
    peak: Floors, floor: Floors, copies: Floors, capacity: int, stop: NDArray[np.int8] | None = None
) -> float:
    """Return the max number of multisets of live items, including the empty one.

    With a large capacity, totals count in units of several tokens, with each weight rounded down.
    So neither time nor memory grows with the capacity, and the count is slightly too large.

    `peak`, `floor`, `copies` (shape (kinds,)): the weight of a live item falls from its kind's peak
    to the floor, in tokens. Items below the floor are not counted. Items of equal weight and floor
    are alike.
    """
    flag = np.zeros(1, dtype=np.int8) if stop is None else stop
    fewest = max(int(floor.min()), 1)
    cells = min(_CELLS, _ENTRIES // (1 + min(int(copies.sum()), capacity // fewest)))
    unit = 1 + capacity // max(cells, 1)
    cells = capacity // unit
    counts = np.zeros(cells + 1)
    counts[0] = 1.0

    for f in np.unique(floor):
        members = floor == f
        low = max(int(f), 1)
        limit = np.zeros(max(int(peak[members].max()) + 1 - low, 1), dtype=np.int64)
        for p, number in zip(peak[members], copies[members], strict=True):
            limit[: max(int(p) + 1 - low, 0)] += number

        width = int(min(limit[0], capacity // low))
        counts = _of_both(counts, _of_class(limit, low, unit, width, cells, flag), flag)
        if flag[0]:
            raise Interrupted

    return float(counts.sum())


@dataclass(eq=False)
class Ladder:
    """Floors of the kinds of a relaxation from coarse to exact, step by step.

    None rises from one step to the next, and those of the last are exact.
    """

    relaxation: Relaxation
    steps: list[Floors] = field(init=False)
    _states: dict[int, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        exact = self.relaxation.floor
        top = int(exact.max())
        values = {*exact.tolist(), *(int(top * share) for share in _ABOVE)}
        self.steps = [np.maximum(exact, v) for v in sorted(values, reverse=True)]

    def states(self, step: int) -> float:
        """Return the max number of multisets with the floors of a step."""
        if step not in self._states:
            r = self.relaxation
            floors, capacity = self.steps[step], r.jobs.capacity
            self._states[step] = count_multisets(r.peak, floors, r.copies, capacity, r.stop)

        return self._states[step]

    def finest(self, since: int, states: float) -> int:
        """Return the last step from ``since`` on with at most so many states, else ``since``."""
        while since + 1 < len(self.steps) and self.states(since + 1) <= states:
            since += 1

        return since
