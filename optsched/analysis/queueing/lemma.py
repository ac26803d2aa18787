"""SPRPT with limited preemption in M/G/1 by quadrature.

Shahout et al. 2024, Lemma 1 and Appendices C and D, corrected.

A job of size x with prediction r has rank r - a at age a while a < C r, then minus infinity: it
can no longer be preempted. The least rank is served, ties by arrival. The derivation is in
docs/lab/trail-lemma-1.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from optsched.analysis.queueing.jobs import Floats, Jobs, check_queue
from optsched.problem.errors import InputError

Table = Callable[[Floats], Floats]

_POINTS, _WEIGHTS = (np.asarray(v) for v in np.polynomial.legendre.leggauss(48))
_POINTS, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2  # on [0, 1]


def mean_response_time(jobs: Jobs, *, rate: float, c: float, printed: bool = False) -> float:
    """Return E[T], the mean time from arrival to completion.

    Parameters
    ----------
    jobs : Jobs
    rate : float
        lambda, arrivals per unit of time; the server does one unit of size per unit of time.
    c : float
        C in [0, 1]: preemption is allowed up to age C r. At 0 nothing is preempted and the
        shortest prediction goes first, at 1 it is SPRPT (SRPT with perfect predictions).
    printed : bool
        Lemma 1 as printed instead of the corrected formula; see `response_time`.

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
        They broadcast.
    jobs, rate, c, printed
        As in `mean_response_time`.

    Raises
    ------
    InputError
        As `mean_response_time`, or a size or prediction that is no number > 0.

    Notes
    -----
    Departures from Lemma 1 as printed, which ``printed=True`` gives:

    - A recycled job I has what remains of it when its rank first is at most r, at age
      min(r_I - r, C r_I), not r_I - r; and every r_I > r counts, not r_I > r + a_0 only.
    - J's own a_0 is min(x, C r): a job that ends before age C r is not served further.
    """
    size, prediction = np.asarray(x, dtype=np.float64), np.asarray(r, dtype=np.float64)
    for name, values in (("x", size), ("r", prediction)):
        if not (np.isfinite(values) & (values > 0)).all():
            raise InputError(f"{name}: finite numbers > 0 are right")
    queue = _Queue(jobs, rate, c, printed)
    last = c * prediction + 0 * size if printed else np.minimum(size, c * prediction)
    age = last[..., None] * _POINTS
    slower = queue.load(prediction[..., None] - age)
    residence = last * ((slower / (1 - slower)) @ _WEIGHTS) + size
    return np.asarray(queue.waiting(prediction) + residence)


def mean_memory(jobs: Jobs, *, rate: float, c: float) -> float:
    """Return the mean over time of the summed ages of all jobs in the system.

    Appendix D of the paper takes a job's memory as its age and simulates the peak. The mean has a
    formula: by Little's law it is rate times the expected integral of a job's age over its time
    in the system, and at age a < min(x, C r) a job stays 1 / (1 - rho'(r - a)) per unit of age.

    Parameters
    ----------
    jobs, rate, c
        As in `mean_response_time`.

    Raises
    ------
    InputError
        As `mean_response_time`.
    """
    queue = _Queue(jobs, rate, c, printed=False)
    return rate * (jobs.integrate(queue.served(jobs.predictions, 1)) + jobs.moments[2] / 2)


class _Queue:
    """What the formulas share for one law of jobs, rate and C."""

    def __init__(self, jobs: Jobs, rate: float, c: float, printed: bool) -> None:
        check_queue(rate, jobs.mean, c)
        self.jobs, self.rate, self.c, self.printed = jobs, rate, c, printed
        from scipy.interpolate import CubicHermiteSpline

        r = jobs.predictions

        def table(values: Floats) -> Table:
            """Return a cumulative integral by the logarithm of predictions."""
            return CubicHermiteSpline(np.log(r), jobs.cumulative(values), values * r)

        self._first, self._second = map(table, jobs.densities[1:])
        # E[(remaining at age C t)^2; prediction > t]: the whole minus what is up to t.
        self._late = table(jobs.remaining(2, c * r, r))

    def _read(self, table: Table, r: ArrayLike) -> Floats:
        """Return a table's value at any predictions, also at those beyond its ends."""
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
        """Return E[X_1^old(r)^2], by predictions t in (r, r / (1 - C)) and those beyond.

        The substitution t = r + span z^4 puts points where t - r is small against the sizes.
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

        As printed, X > 0 takes the place of X > a.
        """
        age = self.c * r[:, None] * _POINTS
        load = self.load(r[:, None] - age)
        alive = self.jobs.remaining(0, 0 * age if self.printed else age, r[:, None])
        return np.asarray((alive * age**power * load / (1 - load)) @ _WEIGHTS * self.c * r)
