"""Discrete-event simulation of M/G/1 under SPRPT with limited preemption, and with refinement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from optsched.analysis.queueing.jobs import Floats, Jobs, check_queue
from optsched.analysis.queueing.refined import RefinedJobs
from optsched.problem.errors import InputError

if TYPE_CHECKING:
    from optsched.analysis.queueing.events import Run

EDGE = 0.05
"""Share of the arrivals that does not count, at the start and at the end of a replication."""


@dataclass(frozen=True)
class Estimate:
    """A mean over independent replications.

    Parameters
    ----------
    mean : float
    half_width : float
        Half of the 95 % interval (Student's t).
    """

    mean: float
    half_width: float


@dataclass(frozen=True)
class Measured:
    """What a simulation measured; each is an average over replications.

    Parameters
    ----------
    response_time : Estimate
        Mean time from arrival to completion.
    mean_memory : Estimate
        Mean over time of the summed ages of all jobs in the system.
    peak_memory : Estimate
        Largest such sum of a replication. It grows with the number of jobs.
    """

    response_time: Estimate
    mean_memory: Estimate
    peak_memory: Estimate


def estimate(values: Floats, control: Floats | None = None, expected: float = 0.0) -> Estimate:
    """Return the mean of independent values with its 95 % interval.

    Parameters
    ----------
    values : ndarray, shape (n,)
    control : ndarray, shape (n,), optional
        A control variate: what was measured in the same replications and has a known mean. Its
        deviation from it explains most of the deviation of the values.
    expected : float
        The known mean.
    """
    from scipy.special import stdtrit  # quantiles of Student's t

    n = len(values)
    freedom = n - 1
    spread, shift = 1 / n, 0.0
    residual = values - values.mean()
    if control is not None and n > 2 and np.ptp(control) > 0:
        centred = control - control.mean()
        slope = float(centred @ residual / (centred @ centred))
        shift = slope * (expected - float(control.mean()))
        spread += (expected - float(control.mean())) ** 2 / float(centred @ centred)
        residual = residual - slope * centred
        freedom -= 1
    error = math.sqrt(float(residual @ residual) / freedom * spread)
    return Estimate(float(values.mean()) + shift, float(stdtrit(freedom, 0.975)) * error)


def simulate_queue(
    jobs: Jobs,
    *,
    rate: float,
    c: float,
    generator: Generator,
    arrivals: int = 200_000,
    replications: int = 10,
) -> Measured:
    """Simulate SPRPT with limited preemption.

    Parameters
    ----------
    jobs : Jobs
        With ``draw``.
    rate : float
        lambda, arrivals per unit of time.
    c : float
        C in [0, 1], as in `optsched.analysis.queueing.mean_response_time`.
    generator : numpy.random.Generator
    arrivals : int
        Of each replication, which begins empty; the first and the last 5 % do not count.
    replications : int

    Notes
    -----
    The workload that arrivals find is the control variate of response time and mean memory: its
    mean is that of Pollaczek and Khinchine under every work-conserving policy.

    Raises
    ------
    InputError
        C outside [0, 1], a load outside (0, 1), jobs without ``draw``, fewer than 100 arrivals
        or 3 replications, or a draw that is no pair of n sizes and n predictions > 0.
    """
    from optsched.analysis.queueing.events import limited_preemption

    check_queue(rate, jobs.mean, c)
    draw = jobs.draw
    if draw is None:
        raise InputError("jobs: no draw to simulate them; joint(density, draw) is right")

    def drawn(stream: Generator, n: int) -> tuple[Floats, Floats]:
        pair = draw(stream, n)
        if len(pair) != 2:
            raise InputError("draw: a pair of sizes and predictions is right")
        size, prediction = (np.asarray(values, dtype=np.float64) for values in pair)
        for name, values in (("sizes", size), ("predictions", prediction)):
            if values.shape != (n,) or not (np.isfinite(values) & (values > 0)).all():
                raise InputError(f"draw: {name}; {n} finite numbers > 0 are right")
        return size, prediction

    def serve(arrival: Floats, size: Floats, rank: Floats, first: int, last: int) -> Run:
        return limited_preemption(arrival, size, rank, c, first, last)

    queue = _Queue(rate, jobs.mean, jobs.moments[2], drawn, serve)
    return queue.measured(generator, arrivals, replications)


def simulate_refined(
    jobs: RefinedJobs,
    *,
    rate: float,
    generator: Generator,
    arrivals: int = 200_000,
    replications: int = 10,
) -> Measured:
    """Simulate SPRPT with refined predictions (Shahout et al. 2024, Appendix E).

    Parameters
    ----------
    jobs : RefinedJobs
    rate, generator, arrivals, replications
        As in `simulate_queue`.

    Raises
    ------
    InputError
        As `simulate_queue`.
    """
    from optsched.analysis.queueing.events import stepwise_ranks

    check_queue(rate, jobs.mean)

    square = float(jobs.shares @ np.arange(1, len(jobs.shares) + 1) ** 2)
    queue = _Queue(rate, jobs.mean, square, jobs.draw, stepwise_ranks)
    return queue.measured(generator, arrivals, replications)


@dataclass(frozen=True)
class _Queue:
    """How jobs come and are served, and the first two moments of their sizes."""

    rate: float
    mean: float
    square: float
    draw: Callable[[Generator, int], tuple[Any, Floats]]
    serve: Callable[[Floats, Any, Floats, int, int], Run]

    def measured(self, generator: Generator, arrivals: int, replications: int) -> Measured:
        if arrivals < 100 or replications < 3:
            raise InputError(
                f"arrivals, replications: {arrivals}, {replications}; at least 100 and 3 are right"
            )
        first = int(EDGE * arrivals)
        inner = slice(first, arrivals - first)
        found = []
        for stream in generator.spawn(replications):
            size, rank = self.draw(stream, arrivals)
            arrival = np.cumsum(stream.exponential(1 / self.rate, arrivals))
            # The work that each arrival finds in the system, by Lindley's recursion.
            ahead = np.cumsum(size) - size - arrival + arrival[0]
            workload = ahead - np.minimum.accumulate(ahead)
            response, memory, peak = self.serve(arrival, size, rank, inner.start, inner.stop)
            found.append((response[inner].mean(), memory, peak, workload[inner].mean()))
        response, memory, peak, workload = np.array(found).T
        # Pollaczek and Khinchine's mean, under every work-conserving policy.
        expected = self.rate * self.square / (2 * (1 - self.rate * self.mean))
        return Measured(
            estimate(response, workload, expected),
            estimate(memory, workload, expected),
            estimate(peak),
        )
