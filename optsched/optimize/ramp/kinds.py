"""Kinds of requests, and what the ramp relaxation can be set up for.

Requests of equal prompt, output and arrival are one kind. If there are too many, the two kinds of
equal floor that differ least are merged, with the smaller peak and the earlier completion. Then
less is live and more may complete, so every schedule is still a path. The limits on items above a
weight stay those of the requests. After a merge, schedules of kinds need not be schedules, so none
are enumerated and refinement may end below the optimum. Every path of separate requests is also a
path of merged kinds. So a checker that keeps the requests separate finds a bound that is at least
as high.
"""

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.optimize.ramp.jobs import Jobs, needed_clock
from optsched.optimize.ramp.tuning import MEASURED, Tuning

_MAX_CLOCK = 4_000_000
"""The max of (rounds with a clock) x (requests) in one busy period."""
BEYOND = 2**28
"""Every cost of a path stays below, far from `optsched.optimize.ramp.graph.INFINITE`."""
_SCALE = 100
"""The denominator of the multipliers, if costs allow."""


def merged_kinds(jobs: Jobs, max_kinds: int) -> tuple[Ints, ...]:
    """Return the kinds of a busy period, merged until there are at most so many."""
    triples = np.stack([jobs.arrival + jobs.output, jobs.peak, jobs.first_kv], axis=1)
    kinds, kind_of = np.unique(triples, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    copies = np.bincount(kind_of).astype(np.int64)

    while len(kinds) > max_kinds:
        ready, peak, floor = kinds.T
        heavy, light = np.maximum.outer(peak, peak), np.minimum.outer(peak, peak)
        cost = (heavy - light) * (heavy + light) / 2
        if jobs.arrival.any():
            cost += np.abs(np.subtract.outer(ready, ready)) * light

        cost = cost * np.minimum.outer(copies, copies)
        cost[np.not_equal.outer(floor, floor) | np.eye(len(kinds), dtype=bool)] = np.inf
        i, j = sorted(int(k) for k in np.unravel_index(np.argmin(cost), cost.shape))
        kinds[i] = np.minimum(kinds[i], kinds[j])
        copies[i] += copies[j]
        kinds, copies = np.delete(kinds, j, axis=0), np.delete(copies, j)
        kind_of = np.where(kind_of == j, i, kind_of - (kind_of > j))

    return *(np.ascontiguousarray(c) for c in kinds.T), kind_of, copies


def unsupported(jobs: Jobs, tuning: Tuning = MEASURED) -> str:
    """Return why the relaxation cannot be set up for a busy period."""
    floors, highest = len(np.unique(jobs.first_kv)), tuning.max_kinds
    if floors > highest:
        return f"found {floors} lengths of prompts in a busy period; expected at most {highest}"

    clock = needed_clock(jobs)
    if clock * jobs.n > _MAX_CLOCK:
        return (
            f"found {clock} rounds with a clock for {jobs.n} requests; expected a product of at "
            f"most {_MAX_CLOCK}"
        )

    if (jobs.capacity + 1) * jobs.n >= 2**31:
        return (
            f"found a KV capacity of {jobs.capacity} for {jobs.n} requests; expected "
            "(capacity + 1) * requests < 2**31"
        )

    if scale_of(jobs) < 1:
        return "found total latencies too large for 32-bit sweeps; expected fewer or shorter runs"

    return ""


def scale_of(jobs: Jobs) -> int:
    """Return the denominator of the multipliers, with which costs of paths are small enough."""
    rounds = int(jobs.output.max()) * (jobs.n + 1) + int(jobs.arrival.max())
    return int(min(_SCALE, BEYOND // (2 * rounds * jobs.n)))
