"""Queueing theory of TRAIL (Shahout et al. 2024): SPRPT with limited preemption in an M/G/1 queue.

Jobs of the second kind refine their predictions while they are served. The formulas are exact up
to the error of quadrature. `simulate_queue` and `simulate_refined` simulate the same queues event
by event.

Examples
--------
>>> from optsched.experiments import load_studies
>>> _ = load_studies()
>>> from optsched_studies import queueing
>>> jobs = queueing.perfect(queueing.exponential())
>>> round(queueing.mean_response_time(jobs, rate=0.8, c=1.0), 4)  # SRPT
2.3528
"""

from .jobs import (
    Jobs,
    Sizes,
    exponential,
    exponential_predictions,
    joint,
    perfect,
    weibull,
)
from .lemma import mean_memory, mean_response_time, response_time
from .refined import (
    RefinedJobs,
    learned,
    refined_jobs,
    refined_response_time,
)
from .simulation import (
    Estimate,
    Measured,
    simulate_queue,
    simulate_refined,
)

__all__ = [
    "Estimate",
    "Jobs",
    "Measured",
    "RefinedJobs",
    "Sizes",
    "exponential",
    "exponential_predictions",
    "joint",
    "learned",
    "mean_memory",
    "mean_response_time",
    "perfect",
    "refined_jobs",
    "refined_response_time",
    "response_time",
    "simulate_queue",
    "simulate_refined",
    "weibull",
]
