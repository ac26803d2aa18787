"""The chain of levels that leads to a bound, and the certificate's leaf that it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optsched.bounds.checker.parts import Ints
from optsched.optimize.ramp.jobs import Jobs


@dataclass(frozen=True, eq=False)
class Level:
    """One step of the chain that led to a bound: a tracker, then multipliers.

    ``floors`` are those of the requests' classes, in tokens. A level without floors only deletes,
    by the multipliers of the level before. ``multipliers`` are pi_i times the denominator. The last
    level may have none: schedules are then enumerated (`optsched.optimize.ramp.finish`).
    """

    floors: Ints | None
    multipliers: Ints | None


def ramp_leaf(chains: Sequence[tuple[Jobs, int, int, int, Sequence[Level]]]) -> dict[str, Any]:
    """Return a certificate's leaf from the chains of all busy periods, in order of time.

    A chain has a value, a denominator, a clock (the last round with one, 0 for none) and levels:
    one floor and one multiplier per request, in order of (arrival, index). A chain without
    levels proves the sum of its outputs. The leaf proves the sum of the values
    (`optsched.bounds.checker.ramp.check_ramp`).
    """

    def listed(numbers: Ints | None) -> list[int] | None:
        return None if numbers is None else numbers.tolist()

    periods = []
    for _, value, denominator, clock, levels in chains:
        steps = [
            {"floors": listed(x.floors), "counters": [], "multipliers": listed(x.multipliers)}
            for x in levels
        ]
        numbers = {"value": int(value), "denominator": int(denominator), "clock": int(clock)}
        periods.append({**numbers, "levels": steps})

    return {"relaxation": "ramp", "periods": periods}
