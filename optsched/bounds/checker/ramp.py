"""Independent check of ramp leaves: one pass of the dynamic program per level, integers only.

docs/formulations.md, "Ramp relaxation", proves the relaxation, and
`optsched.optimize.ramp.jobs.ramp_leaf` has the form of a leaf. Nothing of these is imported here.
Each level takes the product of the previous graph with a tracker. It drops the paths that by the
previous multipliers cost a period's ``value`` or more. Each period proves the min of its ``value``
and the bound of its last level. A last level without multipliers proves ``value`` if no schedule
below it can be enumerated. The leaf proves their sum.

Compiled code replays a period (`optsched.bounds.checker.replay`). The work of a check is limited in
advance: the levels, the rounds with a clock, the nodes, arcs and cells of one level, and all steps
together.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from optsched.bounds.checker.parts import (
    Budget,
    Columns,
    Requests,
    TooLarge,
    expect,
    expect_fields,
    integer,
    integers,
    same,
)

MAX_LEVELS = 1000
"""Max levels of one period."""
MAX_CLOCK = 5_000_000
"""Max product of the rounds with a clock and the requests, and one more of each."""


Kind = tuple[int, int, int]
"""Arrival, peak and floor of a request."""


class Replay(Protocol):
    """What replays a period, level by level. Tests give a slow one that can be read."""

    def refine(self, floors: list[int] | None, pi: list[int], cutoff: int) -> bool:
        """Take a level by the multipliers of the one before; return whether a path is left."""

    def bound(self, pi: list[int]) -> int | None:
        """Return the min cost of a path in units, or None if there is none."""

    def none_left(self, pi: list[int], cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""


Replays = Callable[[Requests, int, list[list[int]], Budget], Replay]
"""Makes a `Replay` of requests, for a denominator and the multipliers of all levels."""


def check_ramp(
    columns: Columns,
    leaf: dict[str, Any],
    budget: Budget | None = None,
    replays: Replays | None = None,
) -> int:
    """Return the bound on total latency, in rounds, that a leaf proves.

    ``replays`` makes what replays a period: by default `compiled` does.
    """
    budget = budget or Budget()
    expect_fields(leaf, "", ("relaxation", "periods"))
    budget.spend(2 * len(columns.arrival))
    groups: list[list[Kind]] = []  # by period
    latest = outputs = origin = 0

    # Where a request arrives when all before it have ended, even if one after another from the
    # latest arrival on, a period begins: optima of periods add up.
    for i in sorted(range(len(columns.arrival)), key=lambda i: (columns.arrival[i], i)):
        arrival, output = columns.arrival[i], columns.output[i]
        if not groups or arrival >= latest + outputs:
            groups.append([])
            outputs, origin = 0, arrival

        # The tokens of a run in its first round; they rise by one each round up to the peak.
        floor = columns.prompt[i] + columns.offset
        groups[-1].append((arrival - origin, floor + output - 1, floor))
        latest, outputs = arrival, outputs + output

    periods, replays = leaf["periods"], replays or compiled
    right = isinstance(periods, list) and len(periods) == len(groups)
    expect(right, f"periods: found another number; expected {len(groups)}")
    pairs = zip(groups, periods, strict=True)

    return sum(_prove_period(group, p, columns.capacity, budget, replays) for group, p in pairs)


class _Level(NamedTuple):
    """A level by kind: its floors or None, its multipliers or None."""

    floors: list[int] | None
    pi: list[int] | None


def _prove_period(
    requests: list[Kind], period: Any, capacity: int, budget: Budget, replays: Replays
) -> int:
    """Return the bound on the total latency of a period's requests that its levels prove."""
    expect_fields(period, "period", ("value", "denominator", "clock", "levels"))
    value, unit, clock = (integer(period[f], f) for f in ("value", "denominator", "clock"))
    right = unit >= 1 and clock >= 0
    expect(right, f"found denominator {unit}, clock {clock}; expected >= 1 and >= 0")
    levels = period["levels"]
    right = isinstance(levels, list) and len(levels) <= MAX_LEVELS
    expect(right, f"levels: found no such list; expected at most {MAX_LEVELS}")
    kinds = sorted(set(requests))
    number = {kind: k for k, kind in enumerate(kinds)}
    kind_of = [number[r] for r in requests]
    count = Counter(kind_of)
    copies = [count[k] for k in range(len(kinds))]
    steps = [_read_level(level, kind_of) for level in levels]
    arrivals, outputs = sum(a for a, _, _ in requests), sum(p - f + 1 for _, p, f in requests)
    last_arrival = max(a for a, _, _ in requests)

    _expect_levels(steps, kinds, has_clock=last_arrival == 0 or clock > 0)

    # Without a level nothing is proved beyond each request's output.
    budget.spend(4 * len(requests) * len(levels))
    if not steps:
        return min(value, outputs)

    # The multipliers and their denominator are used in lowest terms.
    common = math.gcd(unit, *(x for step in steps for x in step.pi or ()))
    unit //= common
    multipliers = [[x // common for x in step.pi or ()] for step in steps]
    # The requests one after another are a schedule. So no more is proved by a larger value.
    limit = min(value, len(requests) * (last_arrival + outputs) + 1)
    _expect_clock(kinds, len(requests), clock, budget)
    replay = replays(Requests(kinds, copies, capacity, clock), unit, multipliers, budget)
    pi, proved = [0] * len(kinds), outputs

    # Each level drops the paths that by the multipliers before it cost the limit or more. Once no
    # path is left, no schedule costs less. A path is in units, and counts ends (latencies and
    # arrivals), less what multipliers give for the requests of each kind.
    for step, next_pi in zip(steps, multipliers, strict=True):
        cutoff = (limit - 1 + arrivals) * unit - sum(map(int.__mul__, copies, pi))
        if step.pi is None:
            none_left = replay.none_left(pi, cutoff)
            expect(none_left, f"found a schedule below {value}; expected none")
            return limit

        if not replay.refine(step.floors, pi, cutoff):
            return limit

        pi = next_pi
        lowest = replay.bound(pi)
        if lowest is None:
            return limit

        proved = -(-(lowest + sum(map(int.__mul__, copies, pi))) // unit) - arrivals

    return min(limit, proved)


def _expect_levels(steps: list[_Level], kinds: list[Kind], has_clock: bool) -> None:
    """Reject floors below those of requests, and an enumeration that is not the end.

    `has_clock`: the period has a clock, or needs none as all arrive at 0.
    """
    for j, step in enumerate(steps):
        # A level without floors has none to check.
        for (_, _, f), raised in zip(kinds, step.floors or (), strict=step.floors is not None):
            expect(f <= raised, f"floors: found {raised}; expected at least {f}")
        # Only a last level without floors may lack multipliers: there schedules are enumerated, by
        # the multipliers of the level before.
        if step.pi is None:
            is_last = j == len(steps) - 1 and step.floors is None
            expect(is_last and j > 0, "multipliers: found none; expected a list")
            expect(has_clock, "clock: found none; expected one to enumerate schedules")


def _expect_clock(kinds: list[Kind], n: int, clock: int, budget: Budget) -> None:
    """Reject a clock that goes on when nothing else can complete, or is too long to check."""
    longest = max(a + p - f + 1 for a, p, f in kinds)
    expect(clock <= longest, f"clock: found {clock} rounds; expected at most {longest}")
    rounds = clock + 1 if clock else 0
    if rounds * (n + 1) > MAX_CLOCK:
        raise TooLarge(f"clock: found {clock} rounds; too large to check")

    budget.spend(rounds * (n + len(kinds) + 1) + n * len(kinds))


def _read_level(level: Any, kind_of: list[int]) -> _Level:
    """Return a level by kind; the certificate has it by request, the same for equal ones.

    ``kind_of`` has the number of each request's kind.
    """
    expect_fields(level, "level", ("floors", "counters", "multipliers"))
    same(level["counters"], [], "counters")  # the format has a place for what nothing writes now

    def by_kind(name: str) -> list[int] | None:
        """Return a field by kind, or None if it is null."""
        if level[name] is None:
            return None

        values = integers(level[name], name, count=len(kind_of))
        value_of = dict(zip(kind_of, values, strict=True))
        equal = all(value_of[k] == v for k, v in zip(kind_of, values, strict=True))
        expect(equal, f"{name}: found different ones of equal requests; expected equal ones")
        return [value_of[k] for k in range(len(value_of))]

    return _Level(by_kind("floors"), by_kind("multipliers"))


def compiled(requests: Requests, unit: int, multipliers: list[list[int]], budget: Budget) -> Replay:
    """Return what replays a period by compiled code."""
    from optsched.bounds.checker.replay import Compiled

    return Compiled(requests, unit, multipliers, budget)
