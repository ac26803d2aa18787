"""SPRPT with refined predictions in an M/G/1 queue, exactly (Shahout et al. 2024, Appendix E).

A job has a whole number of units. After a units it has a new prediction Y_a of its total size.
This depends on the size and on the prediction before. The job's rank during the next unit is
Y_a - a. The paper gives the components of SOAP's theorem as sums over all lists of predictions.
Since such a list is a Markov chain, recursions over ages give the same values here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

from .jobs import Floats, check_queue

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RefinedJobs:
    """Jobs with Markovian predictions, as `refined_jobs` and `learned` make them.

    Parameters
    ----------
    shares : ndarray, shape (n,)
        P(X = x) for x = 1..n units.
    values : ndarray, shape (k,)
        The total sizes that can be predicted.
    initial : ndarray, shape (n, k)
        P(Y_0 = values[j] | X = x).
    steps : ndarray, shape (n, k, k)
        P(Y_a = values[j] | X = x, Y_{a-1} = values[i]), for every a.
    """

    shares: Floats
    values: Floats
    initial: Floats
    steps: Floats

    @property
    def mean(self) -> float:
        """E[X], the mean size in units."""
        return float(self.shares @ np.arange(1, len(self.shares) + 1))

    def draw(self, generator: Generator, n: int) -> tuple[Ints, Floats]:
        """Draw jobs: their sizes, and the rank of each job at every age.

        Parameters
        ----------
        generator : numpy.random.Generator
        n : int
            How many jobs.

        Returns
        -------
        sizes : ndarray of int64, shape (n,)
            Units of each job.
        ranks : ndarray of float64, shape (sum of the sizes,)
            Ranks of the first job at ages 0, 1, ..., size - 1, then those of the second job, and
            so on.
        """
        size = np.asarray(1 + _choose(np.cumsum(self.shares), generator.random(n)), dtype=np.int64)
        at = np.cumsum(size) - size
        rank = np.empty(int(size.sum()))
        alive = np.arange(n)
        state = _choose(np.cumsum(self.initial, axis=1)[size - 1], generator.random(n))
        rows = np.cumsum(self.steps, axis=2)

        for age in range(int(size.max())):
            if age:
                keep = size[alive] > age
                alive, state = alive[keep], state[keep]
                row = rows[size[alive] - 1, state]
                state = _choose(row, generator.random(len(alive)))

            rank[at[alive] + age] = self.values[state] - age

        return size, rank


def _choose(cumulative: Floats, uniform: Floats) -> Ints:
    """Return the index that each uniform number falls on.

    All numbers share one row of cumulative probabilities, or each has a row of its own.
    """
    return np.asarray(
        np.minimum((uniform[:, None] >= cumulative).sum(axis=-1), cumulative.shape[-1] - 1)
    )


def refined_jobs(
    shares: ArrayLike, values: ArrayLike, initial: ArrayLike, steps: ArrayLike
) -> RefinedJobs:
    """Return jobs with Markovian predictions.

    Parameters
    ----------
    shares, values, initial, steps
        As in `RefinedJobs`. ``initial`` and ``steps`` broadcast over sizes.

    Returns
    -------
    RefinedJobs

    Raises
    ------
    InputError
        The shapes do not fit, or probabilities are negative or do not sum to 1.
    """
    p, v = np.asarray(shares, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if p.ndim != 1 or v.ndim != 1 or not len(p) or not len(v) or not np.isfinite(v).all():
        raise InputError(
            f"shares, values: found shapes {p.shape}, {v.shape}; expected two flat lists of finite "
            "numbers"
        )

    n, k = len(p), len(v)
    found = []
    for name, given, shape in (
        ("shares", p, (n,)),
        ("initial", np.asarray(initial, dtype=np.float64), (n, k)),
        ("steps", np.asarray(steps, dtype=np.float64), (n, k, k)),
    ):
        try:
            table = np.broadcast_to(given, shape)
        except ValueError:
            raise InputError(
                f"{name}: found shape {given.shape}; expected one that broadcasts to {shape}"
            ) from None

        good = np.isfinite(table) & (table >= 0)
        if not good.all():
            raise InputError(f"{name}: found {table[~good].flat[0]:g}; expected numbers >= 0")

        total = table.sum(axis=-1)
        if not np.allclose(total, 1, atol=1e-9):
            worst = float(np.ravel(total)[np.argmax(np.abs(np.ravel(total) - 1))])
            raise InputError(f"{name}: found a sum of {worst:.6g}; expected 1")

        found.append(table)

    return RefinedJobs(found[0], v, found[1], found[2])


def learned(shares: ArrayLike, hit: float) -> RefinedJobs:
    """Return jobs that are first predicted at random, and whose size service then reveals.

    Parameters
    ----------
    shares : array_like, shape (n,)
        P(X = x) for x = 1..n. The first prediction is drawn from it, independently of the size.
    hit : float
        Probability in [0, 1] that a unit of service reveals the true size, if it is not known yet.

    Returns
    -------
    RefinedJobs

    Raises
    ------
    InputError
        ``hit`` is outside [0, 1], or the shares are negative or do not sum to 1.
    """
    if not 0 <= hit <= 1:
        raise InputError(f"hit: found {hit!r}; expected 0 <= hit <= 1")

    n = len(np.asarray(shares))
    steps = np.zeros((n, n, n))
    steps[:, np.arange(n), np.arange(n)] = 1 - hit
    steps[np.arange(n), :, np.arange(n)] += hit

    return refined_jobs(shares, np.arange(1, n + 1), shares, steps)


@dataclass(frozen=True, eq=False)
class Components:
    """The moments that SOAP's theorem needs for each rank r (Shahout et al. 2024, Appendix E).

    Parameters
    ----------
    ranks : ndarray of float64, shape (m,)
        All ranks that occur, in ascending order.
    new : ndarray of float64, shape (m,)
        E[X^new[r-]], the mean service of a new job until it ends or its rank is r or more.
    original : ndarray of float64, shape (m,)
        E[X_0^old[r]], the mean service of a job until it ends or its rank exceeds r.
    squares : ndarray of float64, shape (m,)
        The sum over i >= 0 of E[X_i^old[r]^2], where X_i^old[r] is the length of the job's i-th
        run of units with a rank of r or less.
    """

    ranks: Floats
    new: Floats
    original: Floats
    squares: Floats


def components(jobs: RefinedJobs) -> Components:
    """Return the components of SOAP's theorem for every rank that occurs.

    Parameters
    ----------
    jobs : RefinedJobs

    Returns
    -------
    Components
    """
    ranks = _ranks(jobs)
    start = jobs.initial
    new, original, squares = (np.zeros(len(ranks)) for _ in range(3))
    below = upto = run = mass = np.zeros(0)

    for age, low, alive in _ages(jobs, ranks):
        fits = low(np.less_equal)
        if age == 0:
            mass = start
            below, upto = start * low(np.less), start * fits
            run = upto
        else:
            mass = _advance(jobs, mass[None])[0]
            below = _advance(jobs, below) * low(np.less)
            upto = _advance(jobs, upto) * fits
            run = (_advance(jobs, run) + mass) * fits

        # A run of length L has the square 1 + 3 + ... + (2 L - 1).
        for total, part in ((new, below), (original, upto), (squares, 2 * run - mass * fits)):
            total += part.sum(axis=2) @ alive

    return Components(ranks, new, original, squares)


def refined_response_time(jobs: RefinedJobs, *, rate: float) -> float:
    """Return E[T] of SPRPT with refined predictions.

    The formula is that of Shahout et al. 2024, Appendix E, which applies Theorem 5.5 of SOAP
    (Scully, Harchol-Balter and Scheller-Wolf 2018).

    Parameters
    ----------
    jobs : RefinedJobs
    rate : float
        lambda, the arrivals per unit of time. The server does one unit of size per unit of time.

    Returns
    -------
    float
        E[T] in units of time.

    Raises
    ------
    InputError
        The load rate * E[X] is outside (0, 1).

    Notes
    -----
    Appendix E leaves some points open, or is taken differently here:

    - Ties are broken by arrival. An old job therefore counts while its rank is r or less, and a
      new one while its rank is below r. The paper's indicator for X_0^old has "below".
    - The worst future rank at age a is the largest over a <= b < x. The paper has a < b.
    - A job whose first rank exceeds r has no original work. The paper's c_0 = inf{a > 0: ...}
      would give it one unit.
    - Sums over ages end at x - 1 and carry P(X = x), which the paper's g leaves out.
    """
    check_queue(rate, jobs.mean)
    parts = components(jobs)
    slower = 1 / (1 - rate * parts.new)
    waiting = rate * parts.squares / (2 * (1 - rate * parts.original)) * slower
    # `stay` is P(rank <= r at every age from `age` on), for jobs with more units than `age`.
    n = len(jobs.shares)
    stay = np.ones((len(parts.ranks), n, len(jobs.values)))
    masses = [jobs.initial]
    for _ in range(n - 1):
        masses.append(_advance(jobs, masses[-1][None])[0])

    total = 0.0
    for age, low, alive in reversed(list(_ages(jobs, parts.ranks))):
        later = np.einsum("xij,rxj->rxi", jobs.steps, stay)
        ends = (np.arange(1, n + 1) == age + 1)[:, None]
        stay = np.where(ends, 1.0, later) * low(np.less_equal)
        upto = (stay * masses[age]).sum(axis=2) @ alive  # the worst future rank is at most r
        share = np.diff(upto, prepend=0.0)
        total += float(share @ slower)
        if age == 0:
            total += float(share @ waiting)

    return total


def _ranks(jobs: RefinedJobs) -> Floats:
    return np.unique(np.subtract.outer(jobs.values, np.arange(len(jobs.shares))))


def _advance(jobs: RefinedJobs, mass: Floats) -> Floats:
    """Return masses of shape (ranks, sizes, values) after one more unit of service."""
    return np.asarray(np.einsum("rxi,xij->rxj", mass, jobs.steps))


def _ages(
    jobs: RefinedJobs, ranks: Floats
) -> Iterator[tuple[int, Callable[[np.ufunc], NDArray[np.bool_]], Floats]]:
    """Yield every age with two things that hold at it.

    These are a function that compares the jobs' ranks with the thresholds ``ranks``, and the
    shares of the jobs that are longer than the age.
    """
    n = len(jobs.shares)
    for age in range(n):
        rank = jobs.values - age

        def low(compare: np.ufunc, rank: Floats = rank) -> NDArray[np.bool_]:
            return np.asarray(compare(rank[None, None, :], ranks[:, None, None]))

        yield age, low, jobs.shares * (np.arange(1, n + 1) > age)
