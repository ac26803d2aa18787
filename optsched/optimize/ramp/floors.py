"""Which floors to give the kinds of the ramp relaxation, from coarse to exact.

Rounding floors up merges states and forgets the last token-rounds (in reverse time) of requests.
Floors are made exact from the largest down: with max(f, v) for a floor f, v falling, no two kinds
that were told apart become alike, so a finer state has one coarser state, and what the coarser
graph deletes is deleted for good. Floors that are finer only for small peaks, or only in the part
with a clock, or {2, 4, 6} instead of {4, 5, 6}, have fewer states for the token-rounds that they
forget, and led to larger graphs and lower bounds (`docs/small-scale.md`).

How many states floors lead to is counted without a graph. Import lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.optimize.ramp.relaxation import Relaxation

Floors = NDArray[np.int64]

_ABOVE = (3.0, 2.0, 1.5, 1.25)
"""Floors for all, over the largest, before any is exact."""


@njit(cache=True, nogil=True)
def _of_class(most: Any, low: int, capacity: int, out: Any) -> None:
    """Count, by total weight, multisets of weights from ``low`` on, ``most[w]`` of at least w."""
    width = min(most[low], capacity // max(low, 1))
    table = np.zeros((width + 1, capacity + 1))
    table[0, 0] = 1.0
    for w in range(most.shape[0] - 1, low - 1, -1):
        for k in range(1, min(width, most[w]) + 1):
            for total in range(w, capacity + 1):
                table[k, total] += table[k - 1, total - w]
    for total in range(capacity + 1):
        for k in range(width + 1):
            out[total] += table[k, total]


def count_multisets(peak: Floors, floor: Floors, copies: Floors, capacity: int) -> float:
    """Return how many multisets of live items there are at most, the empty one included.

    Parameters
    ----------
    peak, floor, copies : ndarray of int64, shape (kinds,)
        A live item of a kind weighs from its peak down to its floor; one below it is not counted.
        Kinds of equal floor are not told apart.
    capacity : int
        Largest total weight.

    Returns
    -------
    float
        The states of the tracker (`optsched.optimize.ramp.tracker.multiset_tracker`) when every
        multiset can be reached.
    """
    counts = np.zeros(capacity + 1)
    counts[0] = 1.0
    for f in np.unique(floor):
        mine = floor == f
        most = np.zeros(max(int(peak[mine].max()), int(f)) + 1, dtype=np.int64)
        for p, number in zip(peak[mine], copies[mine], strict=True):
            most[: p + 1] += number
        own = np.zeros(capacity + 1)
        _of_class(most, int(f), capacity, own)
        counts = np.convolve(counts, own)[: capacity + 1]
    return float(counts.sum())


@dataclass(eq=False)
class Ladder:
    """Floors from coarse to exact, step by step.

    Parameters
    ----------
    relaxation : Relaxation
        Only its kinds are used.

    Attributes
    ----------
    steps : list of ndarray of int64, shape (kinds,)
        Floors; none rises from one step to the next, and those of the last are exact.
    """

    relaxation: Relaxation
    steps: list[Floors] = field(init=False)
    _states: dict[int, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        own = self.relaxation.floor
        top = int(own.max())
        values = {*own.tolist(), *(int(top * share) for share in _ABOVE)}
        self.steps = [np.maximum(own, v) for v in sorted(values, reverse=True)]

    def states(self, step: int) -> float:
        """Return how many multisets the floors of a step lead to at most."""
        if step not in self._states:
            r = self.relaxation
            self._states[step] = count_multisets(
                r.peak, self.steps[step], r.copies, r.jobs.capacity
            )  # fmt: skip
        return self._states[step]

    def finest(self, since: int, states: float) -> int:
        """Return the last step from ``since`` on with at most so many states, else ``since``."""
        while since + 1 < len(self.steps) and self.states(since + 1) <= states:
            since += 1
        return since
