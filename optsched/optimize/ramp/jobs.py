"""What the ramp relaxation works on: requests of a busy period, their kinds, and chains of levels.

Requests of equal prompt, output and arrival are one kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from optsched.bounds.blocks import blocks_of
from optsched.bounds.checker.parts import Ints, max_completed
from optsched.problem.instance import Instance

MAX_KINDS = 128
"""The max number of kinds in one busy period."""
# The max of (rounds with a clock) x (requests) in one busy period.
_MAX_CLOCK = 4_000_000
BEYOND = 2**28
"""Every cost of a path stays below, far from `optsched.optimize.ramp.graph.INFINITE`."""
# The denominator of the multipliers, if costs allow.
_SCALE = 100


@dataclass(frozen=True, eq=False)
class Jobs:
    """Requests of one busy period, times counted from its first arrival, in rounds.

    ``first_kv`` is the KV tokens that a request holds in its first round, s or s + 1; it holds one
    more in each later round. ``index`` has the requests' numbers in the instance.
    """

    arrival: Ints
    first_kv: Ints
    output: Ints
    capacity: int
    index: Ints

    @property
    def n(self) -> int:
        """Number of requests."""
        return len(self.arrival)

    @property
    def rounds(self) -> int:
        """The number of rounds within which every schedule without needless idling ends."""
        return int(self.arrival.max() + self.output.sum()) + 2

    @cached_property
    def peak(self) -> Ints:
        """KV tokens held in a request's last round, shape (n,)."""
        return self.first_kv + self.output - 1

    @cached_property
    def volume(self) -> Ints:
        """Token-rounds of each request: its KV summed over its rounds, shape (n,)."""
        return self.output * self.first_kv + self.output * (self.output - 1) // 2

    def total(self, starts: Ints) -> int:
        """Return the total latency of starts, in rounds."""
        return int((starts + self.output - self.arrival).sum())

    def feasible(self, starts: Ints) -> bool:
        """Whether starts respect arrivals and the KV capacity."""
        if (starts < self.arrival).any():
            return False

        used = np.zeros(int((starts + self.output).max()) + 1, dtype=np.int64)
        for k, o, first_kv in zip(starts, self.output, self.first_kv, strict=True):
            # It runs in rounds k + 1 to k + o, and holds first_kv + j - 1 tokens in the j-th.
            used[k + 1 : k + 1 + o] += first_kv + np.arange(o)

        return bool(used.max() <= self.capacity)


def periods(instance: Instance) -> list[Jobs]:
    """Divide the requests into busy periods, the blocks of `optsched.bounds.blocks`.

    Their bounds add up, and so do the best schedules if each ends within its `Jobs.rounds`.
    """
    order = np.argsort(instance.release_times, kind="stable")
    block = blocks_of(instance).of[order]
    jobs_of_periods = []

    # In order of arrival the requests of a block lie next to each other.
    for index in np.split(order, np.flatnonzero(np.diff(block)) + 1):
        arrival = instance.release_times[index].astype(np.int64)
        jobs_of_periods.append(
            Jobs(
                arrival=arrival - arrival[0],
                first_kv=instance.prompt_tokens[index] + instance.kv_offset,
                output=instance.output_tokens[index],
                capacity=instance.kv_capacity,
                index=index,
            )
        )

    return jobs_of_periods


def needed_clock(jobs: Jobs) -> int:
    """Return the round after which arrivals rule out no completion, 0 if all arrive at once."""
    return int((jobs.arrival + jobs.output).max()) if jobs.arrival.any() else 0


def max_completed_by(jobs: Jobs, last: int) -> Ints:
    """Return how many requests can have completed by each round, by arrivals and token-rounds."""
    ready = jobs.arrival + jobs.output
    # Each request counts by itself, as a kind of one copy.
    return max_completed(ready, jobs.volume, np.ones_like(ready), jobs.capacity, last)


def kinds_of(jobs: Jobs) -> tuple[Ints, ...]:
    """Return the kinds of requests, in five arrays.

    By kind the earliest completion, the peak and the floor, by request its kind, and by kind the
    number of its requests.
    """
    triples = np.stack([jobs.arrival + jobs.output, jobs.peak, jobs.first_kv], axis=1)
    kinds, kind_of, copies = np.unique(triples, axis=0, return_inverse=True, return_counts=True)
    # In NumPy 2.0 the inverse along an axis has two dimensions.
    return *(np.ascontiguousarray(c) for c in kinds.T), kind_of.reshape(-1), copies


def refusal(jobs: Jobs) -> str:
    """Return why the relaxation cannot be set up for a busy period, or an empty string."""
    kinds = len(kinds_of(jobs)[-1])
    if kinds > MAX_KINDS:
        return f"found {kinds} kinds of requests in a busy period; expected at most {MAX_KINDS}"

    clock = needed_clock(jobs)
    if clock * jobs.n > _MAX_CLOCK:
        return (
            f"found {clock} rounds with a clock for {jobs.n} requests; expected a product of at "
            f"most {_MAX_CLOCK}"
        )

    # Items of states are class * span + weight in 32 bits: there are at most n classes, and a span
    # is longer than any weight.
    if (jobs.capacity + 1) * jobs.n >= 2**31:
        return (
            f"found a KV capacity of {jobs.capacity} for {jobs.n} requests; expected "
            "(capacity + 1) * requests < 2**31"
        )

    if scale_of(jobs) < 1:
        return "found total latencies too large for 32-bit sweeps; expected fewer or shorter runs"

    return ""


def scale_of(jobs: Jobs) -> int:
    """Return the denominator of the multipliers: the largest with which costs stay small enough.

    A path costs at most n for each round, and no path has more rounds than are counted here. After
    each of the n placements it has at most the longest output until nothing is live. Its part with
    a clock has at most the last arrival and the longest output. Half of the allowed costs are left
    for the multipliers (`optsched.optimize.ramp.relaxation`).
    """
    rounds = int(jobs.output.max()) * (jobs.n + 1) + int(jobs.arrival.max())
    return int(min(_SCALE, BEYOND // (2 * rounds * jobs.n)))


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

    A chain has jobs, a value, a denominator, a clock (the last round with one, 0 for none) and
    levels: one floor and one multiplier per request, in order of (arrival, index). A chain without
    levels proves the sum of its outputs. The leaf proves the sum of the values
    (`optsched.bounds.checker.ramp.check_ramp`).
    """

    def as_list(numbers: Ints | None) -> list[int] | None:
        return None if numbers is None else numbers.tolist()

    periods = []
    # Nothing writes ``counters`` now, but the format has a place for them.
    for _, value, denominator, clock, levels in chains:
        steps = [
            {"floors": as_list(x.floors), "counters": [], "multipliers": as_list(x.multipliers)}
            for x in levels
        ]
        numbers = {"value": int(value), "denominator": int(denominator), "clock": int(clock)}
        periods.append({**numbers, "levels": steps})

    return {"relaxation": "ramp", "periods": periods}
