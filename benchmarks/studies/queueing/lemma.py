"""SPRPT with limited preemption in M/G/1 by quadrature.

Shahout et al. 2024, Lemma 1 and Appendices C and D, corrected.

A job of size x with prediction r has rank r - a at age a while a < C r. From age C r on its rank
is minus infinity, so that it can no longer be preempted. The server serves the job of the smallest
rank and breaks ties by arrival. The derivation is in docs/lab/trail-lemma-1.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from optsched.problem.errors import InputError

from .jobs import Floats, Jobs, check_queue

Table = Callable[[Floats], Floats]

_POINTS, _WEIGHTS = (np.asarray(v) for v in np.polynomial.legendre.leggauss(48))
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2  # on [0, 1]


def mean_response_time(jobs: Jobs, *, rate: float, c: float, printed: bool = False) -> float:
    """Return E[T], the mean time from arrival to completion (Shahout et al. 2024, Lemma 1).

    Parameters
    ----------
    jobs : Jobs
        The joint law of sizes and predictions.
    rate : float
        lambda, the arrivals per unit of time. The server does one unit of size per unit of time.
    c : float
        C in [0, 1]. Preemption is allowed up to age C r. With C = 0 no job is preempted and the
        shortest prediction goes first. C = 1 is SPRPT, which is SRPT if predictions are perfect.
    printed : bool
        Whether to use Lemma 1 as printed instead of the corrected formula; see `response_time`.

    Returns
    -------
    float
        E[T] in units of time.

    Raises
    ------
    InputError
        C outside [0, 1], or a load rate * E[X] outside (0, 1).
    """
    queue = _Queue(jobs, rate, c, printed)
    r = jobs.predictions
    waiting = queue.waiting(r) * jobs.densities[0]
    return jobs.integrate(waiting + queue.served(r, 0)) + jobs.mean


def response_time(
    x: ArrayLike, r: ArrayLike, jobs: Jobs, *, rate: float, c: float, printed: bool = False
) -> Floats:
    """Return E[T(x, r)] of jobs of size x with prediction r (Shahout et al. 2024, Lemma 1).

    Parameters
    ----------
    x, r : array_like
        Sizes and predictions, all > 0. The two arrays broadcast.
    jobs, rate, c, printed
        As in `mean_response_time`.

    Returns
    -------
    ndarray of float64
        E[T(x, r)] in units of time, of the shape that ``x`` and ``r`` broadcast to.

    Raises
    ------
    InputError
        C is outside [0, 1], the load is outside (0, 1), or a size or prediction is not a finite
        number > 0.

    Notes
    -----
    The formula departs from Lemma 1 as printed in two places. ``printed=True`` gives the printed
    one.

    - A recycled job I brings the work that remains of it when its rank first is r or less. That
      is at age min(r_I - r, C r_I) and not at r_I - r. Every job with r_I > r can be recycled,
      and not only one with r_I > r + a_0.
    - The age a_0 of the job itself is min(x, C r). A job that ends before age C r is not served
      any further.
    """
    size, prediction = np.asarray(x, dtype=np.float64), np.asarray(r, dtype=np.float64)
    for name, values in (("x", size), ("r", prediction)):
        good = np.isfinite(values) & (values > 0)
        if not good.all():
            raise InputError(
                f"{name}: found {values[~good].flat[0]:g}; expected finite numbers > 0"
            )

    queue = _Queue(jobs, rate, c, printed)
    last = c * prediction + 0 * size if printed else np.minimum(size, c * prediction)
    age = last[..., None] * _POINTS
    slower = queue.load(prediction[..., None] - age)
    residence = last * ((slower / (1 - slower)) @ _WEIGHTS) + size

    return np.asarray(queue.waiting(prediction) + residence)


def mean_memory(jobs: Jobs, *, rate: float, c: float) -> float:
    """Return the mean over time of the summed ages of all jobs in the system.

    Shahout et al. 2024, Appendix D, take a job's memory as its age and simulate the peak. The mean
    has a formula. By Little's law it is the rate times the expected integral of a job's age over
    its time in the system. At age a < min(x, C r) a job stays 1 / (1 - rho'(r - a)) per unit of
    age.

    Parameters
    ----------
    jobs, rate, c
        As in `mean_response_time`.

    Returns
    -------
    float
        The mean sum of ages, in units of size.

    Raises
    ------
    InputError
        C is outside [0, 1], or the load is outside (0, 1).
    """
    queue = _Queue(jobs, rate, c, printed=False)
    return rate * (jobs.integrate(queue.served(jobs.predictions, 1)) + jobs.moments[2] / 2)


class _Queue:
    """The parts that the formulas share for one law of jobs, one rate and one C."""

    def __init__(self, jobs: Jobs, rate: float, c: float, printed: bool) -> None:
        check_queue(rate, jobs.mean, c)
        self.jobs, self.rate, self.c, self.printed = jobs, rate, c, printed
        from scipy.interpolate import CubicHermiteSpline

        r = jobs.predictions

        def table(values: Floats) -> Table:
            """Return a cumulative integral as a function of the predictions' logarithm."""
            return CubicHermiteSpline(np.log(r), jobs.cumulative(values), values * r)

        self._first, self._second = map(table, jobs.densities[1:])
        # E[(remaining at age C t)^2; prediction > t] is the total minus the part up to t.
        self._late = table(jobs.remaining(2, c * r, r))

    def _read(self, table: Table, r: ArrayLike) -> Floats:
        """Return a table's value at any predictions; beyond its ends it is constant."""
        return np.asarray(table(np.log(np.clip(r, self.jobs.low, self.jobs.high))))

    def load(self, r: Floats) -> Floats:
        """Return rho'(r), the load of jobs with predictions up to r."""
        return self.rate * self._read(self._first, r)

    def waiting(self, r: Floats) -> Floats:
        """Return the mean time from arrival to first service."""
        original = self._read(self._second, r)
        return np.asarray(
            self.rate * (original + self._recycled(r)) / (2 * (1 - self.load(r)) ** 2)
        )

    def _recycled(self, r: Floats) -> Floats:
        """Return E[X_1^old(r)^2]: the predictions t in (r, r / (1 - C)), then those beyond.

        The substitution t = r + span z^4 puts many points where t - r is small beside the sizes.
        """
        start = np.maximum((1 + self.c) * r if self.printed else r, self.jobs.low)
        end = np.full_like(r, self.jobs.high)
        if not self.printed and self.c < 1:
            end = np.minimum(end, r / (1 - self.c))

        span = np.maximum(end - start, 0.0)[..., None]
        t = start[..., None] + span * _POINTS**4
        near = self.jobs.remaining(2, t - r[..., None], t)
        value = (near * span) @ (4 * _POINTS**3 * _WEIGHTS)

        if not self.printed and self.c < 1:
            value = value + (
                self._read(self._late, self.jobs.high) - self._read(self._late, r / (1 - self.c))
            )

        return np.asarray(value)

    def served(self, r: Floats, power: int) -> Floats:
        """Return the integral over ages a < C r of P(X > a, r) a^power rho'(r-a) / (1-rho'(r-a)).

        The printed lemma has X > 0 in the place of X > a.
        """
        age = self.c * r[:, None] * _POINTS
        load = self.load(r[:, None] - age)
        alive = self.jobs.remaining(0, 0 * age if self.printed else age, r[:, None])
        return np.asarray((alive * age**power * load / (1 - load)) @ _WEIGHTS * self.c * r)
