"""Discrete-event simulation of SPRPT in an M/G/1 queue.

Preemption is limited (`simulate_queue`), or predictions are refined (`simulate_refined`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator

from optsched.problem.errors import InputError

from .jobs import Floats, Jobs, check_queue
from .refined import RefinedJobs

if TYPE_CHECKING:
    from .events import Run

EDGE = 0.05
"""The share of the arrivals that is left out at the start and at the end of a replication."""


@dataclass(frozen=True)
class Estimate:
    """A mean over independent replications.

    Parameters
    ----------
    mean : float
        The estimate.
    half_width : float
        Half the width of its 95 % confidence interval by Student's t.
    """

    mean: float
    half_width: float


@dataclass(frozen=True)
class Measured:
    """The results of a simulation, each averaged over the replications.

    Parameters
    ----------
    response_time : Estimate
        Mean time from arrival to completion, in units of time.
    mean_memory : Estimate
        Mean over time of the sum of the ages of all jobs in the system, in units of size.
    peak_memory : Estimate
        The largest such sum in a replication. It grows with the number of jobs.
    """

    response_time: Estimate
    mean_memory: Estimate
    peak_memory: Estimate


def estimate(values: Floats, control: Floats | None = None, expected: float = 0.0) -> Estimate:
    """Return the mean of independent values with its 95 % confidence interval.

    Parameters
    ----------
    values : ndarray of float64, shape (n,)
        One value for each replication.
    control : ndarray of float64, shape (n,), optional
        A control variate. It is another quantity of the same replications, whose mean is known.
        Its deviation from that mean explains much of the deviation of the values.
    expected : float
        The known mean of the control variate.
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
        Jobs that have a ``draw``.
    rate : float
        lambda, the arrivals per unit of time.
    c : float
        C in [0, 1], as in `optsched_studies.queueing.mean_response_time`.
    generator : numpy.random.Generator
    arrivals : int
        Arrivals of each replication, 100 or more. A replication begins with an empty system, and
        its first and last 5 % are left out.
    replications : int
        Number of independent replications, 3 or more.

    Returns
    -------
    Measured

    Raises
    ------
    InputError
        C is outside [0, 1], the load is outside (0, 1), the jobs have no ``draw``, there are fewer
        than 100 arrivals or 3 replications, or a draw is not a pair of n sizes and n predictions
        > 0.

    Notes
    -----
    The workload that arrivals find is the control variate of response time and mean memory. Under
    every work-conserving policy its mean is given by the formula of Pollaczek and Khinchine.
    """
    from .events import limited_preemption

    check_queue(rate, jobs.mean, c)
    draw = jobs.draw
    if draw is None:
        raise InputError("jobs: found no draw to simulate them; expected joint(density, draw)")

    def drawn(stream: Generator, n: int) -> tuple[Floats, Floats]:
        pair = draw(stream, n)
        if len(pair) != 2:
            raise InputError(
                f"draw: found {len(pair)} values; expected a pair of sizes and predictions"
            )

        size, prediction = (np.asarray(values, dtype=np.float64) for values in pair)
        for name, values in (("sizes", size), ("predictions", prediction)):
            if values.shape != (n,):
                raise InputError(f"draw: found {name} of shape {values.shape}; expected ({n},)")

            good = np.isfinite(values) & (values > 0)
            if not good.all():
                wrong = values[~good][0]
                raise InputError(f"draw: found {wrong:g} among {name}; expected numbers > 0")

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

    Returns
    -------
    Measured

    Raises
    ------
    InputError
        The load is outside (0, 1), or there are fewer than 100 arrivals or 3 replications.
    """
    from .events import stepwise_ranks

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
                f"arrivals, replications: found {arrivals}, {replications}; expected at least 100 "
                "and 3"
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
        # The formula of Pollaczek and Khinchine gives the mean under every work-conserving policy.
        expected = self.rate * self.square / (2 * (1 - self.rate * self.mean))
        return Measured(
            estimate(response, workload, expected),
            estimate(memory, workload, expected),
            estimate(peak),
        )
