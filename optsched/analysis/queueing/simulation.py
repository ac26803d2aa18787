"""Discrete-event simulation of M/G/1 under SPRPT with limited preemption, and with refinement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.analysis.queueing.jobs import Floats, Jobs, check_queue
from optsched.analysis.queueing.refined import RefinedJobs
from optsched.problem.errors import InputError

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045,
)  # fmt: skip
"""Quantiles of Student's t at 97.5 % for 1 to 29 degrees of freedom."""

Run = tuple[Floats, tuple[Floats, float, float]]
"""Workload found by each arrival; response times, mean and peak memory."""

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
    # Beyond 29 degrees of freedom within 0.003 of the quantile.
    quantile = _T_975[freedom - 1] if freedom <= 29 else 1.96 + 2.4 / freedom
    error = math.sqrt(float(residual @ residual) / freedom * spread)
    return Estimate(float(values.mean()) + shift, quantile * error)


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

    def replicate(stream: Generator, window: tuple[int, int]) -> Run:
        drawn = draw(stream, arrivals)
        if len(drawn) != 2:
            raise InputError("draw: a pair of sizes and predictions is right")
        size, prediction = (np.asarray(values, dtype=np.float64) for values in drawn)
        for name, values in (("sizes", size), ("predictions", prediction)):
            if values.shape != (arrivals,) or not (np.isfinite(values) & (values > 0)).all():
                raise InputError(f"draw: {name}; {arrivals} finite numbers > 0 are right")
        arrival = np.cumsum(stream.exponential(1 / rate, arrivals))
        return _workload(arrival, size), limited_preemption(arrival, size, prediction, c, *window)

    square = jobs.moments[2]
    return _replicated(replicate, generator, arrivals, replications, rate, jobs.mean, square)


def simulate_refined(
    jobs: RefinedJobs,
    *,
    rate: float,
    generator: Generator,
    arrivals: int = 200_000,
    replications: int = 10,
) -> Measured:
    """Simulate SPRPT with refined predictions (000, Appendix E).

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

    def replicate(stream: Generator, window: tuple[int, int]) -> Run:
        size, rank = jobs.draw(stream, arrivals)
        arrival = np.cumsum(stream.exponential(1 / rate, arrivals))
        return _workload(arrival, size), stepwise_ranks(arrival, size, rank, *window)

    square = float(jobs.shares @ np.arange(1, len(jobs.shares) + 1) ** 2)
    return _replicated(replicate, generator, arrivals, replications, rate, jobs.mean, square)


def _workload(arrival: Floats, size: NDArray[Any]) -> Floats:
    """Return the work in the system that each arrival finds (Lindley's recursion)."""
    ahead = np.cumsum(size) - size - arrival + arrival[0]
    return np.asarray(ahead - np.minimum.accumulate(ahead))


def _replicated(
    replicate: Callable[[Generator, tuple[int, int]], Run],
    generator: Generator,
    arrivals: int,
    replications: int,
    rate: float,
    mean: float,
    square: float,
) -> Measured:
    if arrivals < 100 or replications < 3:
        raise InputError(
            f"arrivals, replications: {arrivals}, {replications}; at least 100 and 3 are right"
        )
    first = int(EDGE * arrivals)
    window = (first, arrivals - first)
    found = []
    for stream in generator.spawn(replications):
        workload, (response, memory, peak) = replicate(stream, window)
        found.append(
            (response[slice(*window)].mean(), memory, peak, workload[slice(*window)].mean())
        )
    response, memory, peak, workload = np.array(found).T
    expected = rate * square / (2 * (1 - rate * mean))  # Pollaczek-Khinchine, under any policy
    return Measured(
        estimate(response, workload, expected), estimate(memory, workload, expected), estimate(peak)
    )
