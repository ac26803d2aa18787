"""Kinds of requests, and what the ramp relaxation can be set up for.

Requests of equal prompt, output and arrival are one kind.
"""

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.optimize.ramp.jobs import Jobs, needed_clock

MAX_KINDS = 128
"""The max number of kinds in one busy period."""
_MAX_CLOCK = 4_000_000
"""The max of (rounds with a clock) x (requests) in one busy period."""
BEYOND = 2**28
"""Every cost of a path stays below, far from `optsched.optimize.ramp.graph.INFINITE`."""
_SCALE = 100
"""The denominator of the multipliers, if costs allow."""


def kinds_of(jobs: Jobs) -> tuple[Ints, ...]:
    """Return by kind the earliest completion, peak and floor; each request's kind; the copies."""
    triples = np.stack([jobs.arrival + jobs.output, jobs.peak, jobs.first_kv], axis=1)
    kinds, kind_of, copies = np.unique(triples, axis=0, return_inverse=True, return_counts=True)
    return *(np.ascontiguousarray(c) for c in kinds.T), kind_of.reshape(-1), copies


def unsupported(jobs: Jobs) -> str:
    """Return why the relaxation cannot be set up for a busy period."""
    kinds = len(kinds_of(jobs)[-1])
    if kinds > MAX_KINDS:
        return f"found {kinds} kinds of requests in a busy period; expected at most {MAX_KINDS}"

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
