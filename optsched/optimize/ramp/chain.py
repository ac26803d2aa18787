"""The chain of levels that leads to a bound, and the certificate's leaf that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.jobs import Jobs


@dataclass(frozen=True, eq=False)
class Level:
    """One step of the chain that led to a bound: a tracker, then multipliers.

    A level without floors and without counters only deletes, by the multipliers of the level
    before.

    Parameters
    ----------
    floors : ndarray of int64, shape (n,), or None
        The floor of each request's class in tokens, if the tracker is a multiset.
    counters : list of list of int
        The groups of requests that are counted, if the tracker is a row of counters.
    multipliers : ndarray of int64, shape (n,), or None
        pi_i times the denominator. The last level may have none: schedules are then enumerated
        (`optsched.optimize.ramp.finish`).
    """

    floors: NDArray[np.int64] | None
    counters: list[list[int]]
    multipliers: NDArray[np.int64] | None


def ramp_leaf(chains: Sequence[tuple[Jobs, int, int, int, Sequence[Level]]]) -> dict[str, Any]:
    """Return a certificate's leaf from the chains of all busy periods of an instance.

    ``{"relaxation": "ramp", "periods": [{"value", "denominator", "clock", "levels": [...]},
    ...]}``, the periods in order of time, their requests in order of (arrival, index), as
    `periods` makes them. ``clock`` is the last round with a clock, 0 for none. A level is
    ``{"floors": [...] or null, "counters": [[...], ...], "multipliers": [...]}``, one floor and one
    multiplier (over the denominator) per request of the period; a counter lists the positions of
    identical requests in the period; a level with neither only deletes. In the last level
    ``multipliers`` may be null: schedules are enumerated. ``value`` is what the
    period's chain proves; a chain without levels proves the sum of its outputs. The leaf proves the
    sum of the values (`optsched.bounds.checker.ramp.check_ramp`).
    """
    return {
        "relaxation": "ramp",
        "periods": [
            {
                "value": int(value),
                "denominator": int(denominator),
                "clock": int(clock),
                "levels": [
                    {
                        "floors": None if level.floors is None else level.floors.tolist(),
                        "counters": level.counters,
                        "multipliers": (
                            None if level.multipliers is None else level.multipliers.tolist()
                        ),
                    }
                    for level in levels
                ],
            }
            for _, value, denominator, clock, levels in chains
        ],
    }
