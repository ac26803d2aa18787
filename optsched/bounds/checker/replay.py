"""Replays one period of a ramp leaf by compiled code, after a look whether its numbers fit.

A path places each of the n requests, and passes rounds: up to the largest peak before each
placement, since by then nothing is live that any tracker remembers, and those of the clock. The
costs of so many steps stay below 2**60.
"""

import numpy as np

from optsched.bounds.checker.enumeration import Enumeration
from optsched.bounds.checker.parts import Budget, Limits, Requests, TooLarge, max_completed
from optsched.bounds.checker.period import Period, outward
from optsched.bounds.checker.states import kinds_of


def expect_fitting(requests: Requests, multipliers: list[int], unit: int) -> None:
    """Reject numbers that the integers of arrays may not hold.

    Of requests in kinds (arrival, peak, floor), the max rounds of a path times the unit, and the
    multipliers of n placements, with a factor of 2 for sums of two such costs. Items of states are
    class * span + weight in 32 bits.
    """
    n, pairs = sum(requests.copies), list(zip(requests.kinds, requests.copies, strict=True))
    largest = max(requests.capacity, *(peak for _, peak, _ in requests.kinds), 0)
    # No less than the last arrival and all outputs together, by which `ramp` limits a cutoff.
    ends = sum(c * (arrival + peak - floor + 1) for (arrival, peak, floor), c in pairs)
    rounds = (n + 1) * (largest + 1) + requests.clock + ends
    highest = max(map(abs, multipliers), default=0)
    if 2 * n * (rounds * unit + highest) >= 2**60 or n * (largest + 1) >= 2**31:
        raise TooLarge("found numbers of too many digits; too large to check")


class Compiled:
    """Replays a period of a certificate; ``multipliers`` are over the denominator ``unit``."""

    def __init__(
        self,
        requests: Requests,
        unit: int,
        multipliers: list[list[int]],
        budget: Budget,
        limits: Limits | None = None,
    ) -> None:
        numbers = [x for level in multipliers for x in level]
        expect_fitting(requests, numbers, unit)
        kinds = kinds_of(requests.kinds, requests.copies, requests.capacity)
        ready, peak, floor, copies, capacity, _ = kinds
        # The tokens of a run, from the floor up to the peak, added up over its rounds.
        volume = (peak - floor + 1) * (peak + floor) // 2
        completed = max_completed(ready, volume, copies, capacity, requests.clock)
        self._period, self._unit = Period(kinds, completed, budget, limits or Limits()), unit
        self._max_floor = int(kinds.peak.max()) + 1  # above all peaks: `refine` cuts floors to it

    def refine(self, floors: list[int] | None, pi: list[int], cutoff: int) -> bool:
        """Take a level by the multipliers of the one before; return whether a path is left."""
        # Nothing is ever live above all peaks, so that all such floors are alike. A floor may have
        # more digits than an array's integers.
        highest = self._max_floor
        cut = None if floors is None else np.array([min(f, highest) for f in floors], np.int64)
        return self._period.refine(cut, np.array(pi, np.int64), self._unit, cutoff)

    def bound(self, pi: list[int]) -> int | None:
        """Return the min cost of a path in units, or None if there is none."""
        return self._period.bound(np.array(pi, np.int64), self._unit)

    def none_left(self, pi: list[int], cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""
        period, unit, multipliers = self._period, self._unit, np.array(pi, np.int64)
        if not period.thin(multipliers, unit, cutoff):
            return True

        # Paths up to the cutoff are left: enumerate the schedules among them.
        labels = Enumeration(period, outward(period.graph), multipliers, unit, cutoff)
        for m in range(period.n):
            labels.place(m)

        # In units of paths, as in `bound`: to place a request costs minus the multiplier of its
        # kind, and a schedule places each once.
        totals = labels.totals() * unit - int((period.kinds.copies * multipliers).sum())
        return not bool((totals <= cutoff).any())
