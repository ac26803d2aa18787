"""SPRPT with refined predictions in M/G/1 (Shahout et al. 2024, Appendix E), exactly.

A job has a whole number of units. After a units it has a new prediction Y_a of its total size,
which depends on the size and on the prediction before, and its rank during the next unit is
Y_a - a. The paper gives the components of SOAP's theorem as sums over all lists of predictions;
here they are recursions over ages, because the list is a Markov chain: the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.analysis.queueing.jobs import Floats, check_queue
from optsched.problem.errors import InputError

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RefinedJobs:
    """Jobs with Markovian predictions; made by `refined_jobs` or `learned`.

    Parameters
    ----------
    shares : ndarray, shape (n,)
        P(X = x) for x = 1..n units.
    values : ndarray, shape (k,)
        What can be predicted as the total size.
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
        """E[X]."""
        return float(self.shares @ np.arange(1, len(self.shares) + 1))

    def draw(self, generator: Generator, n: int) -> tuple[Ints, Floats]:
        """Return n sizes, and the ranks of each job at ages 0, 1, ..., size - 1, job after job."""
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
    """Return the index that each uniform number falls on; one row of probabilities, or one each."""
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
        As in `RefinedJobs`; ``initial`` and ``steps`` broadcast over sizes.

    Raises
    ------
    InputError
        Shapes that do not fit, or probabilities that are negative or do not sum to 1.
    """
    p, v = np.asarray(shares, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if p.ndim != 1 or v.ndim != 1 or not len(p) or not len(v) or not np.isfinite(v).all():
        raise InputError("shares, values: two lists of finite numbers are right")
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
            raise InputError(f"{name}: shape {given.shape}; {shape} is right") from None
        if not (np.isfinite(table) & (table >= 0)).all():
            raise InputError(f"{name}: numbers >= 0 are right")
        total = table.sum(axis=-1)
        if not np.allclose(total, 1, atol=1e-9):
            worst = float(np.ravel(total)[np.argmax(np.abs(np.ravel(total) - 1))])
            raise InputError(f"{name}: sums to {worst:.6g}; 1 is right")
        found.append(table)
    return RefinedJobs(found[0], v, found[1], found[2])


def learned(shares: ArrayLike, hit: float) -> RefinedJobs:
    """Return jobs that are first predicted at random, and known exactly sooner or later.

    Parameters
    ----------
    shares : array_like, shape (n,)
        P(X = x) for x = 1..n. The first prediction is an independent draw of it.
    hit : float
        Probability that a unit of service reveals the true size, if it is not known yet.

    Raises
    ------
    InputError
        A probability outside [0, 1], or as `refined_jobs`.
    """
    if not 0 <= hit <= 1:
        raise InputError(f"hit: {hit!r}; 0 <= hit <= 1 is right")
    n = len(np.asarray(shares))
    steps = np.zeros((n, n, n))
    steps[:, np.arange(n), np.arange(n)] = 1 - hit
    steps[np.arange(n), :, np.arange(n)] += hit
    return refined_jobs(shares, np.arange(1, n + 1), shares, steps)


@dataclass(frozen=True, eq=False)
class Components:
    """What SOAP's theorem needs, per rank (Shahout et al. 2024, Appendix E).

    Parameters
    ----------
    ranks : ndarray, shape (m,)
        All that occur, ascending.
    new : ndarray, shape (m,)
        E[X^new[r-]]: service of a new job until it ends or its rank is r or more.
    original : ndarray, shape (m,)
        E[X_0^old[r]]: service until the job ends or its rank exceeds r.
    squares : ndarray, shape (m,)
        The sum over i >= 0 of E[X_i^old[r]^2]: over the runs of units with rank at most r.
    """

    ranks: Floats
    new: Floats
    original: Floats
    squares: Floats


def components(jobs: RefinedJobs) -> Components:
    """Return the components of SOAP's theorem for every rank."""
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
    """Return E[T] of SPRPT with refined predictions (Appendix E; Theorem 5.5 of SOAP).

    Parameters
    ----------
    jobs : RefinedJobs
    rate : float
        lambda, arrivals per unit of time; the server does one unit of size per unit of time.

    Raises
    ------
    InputError
        A load rate * E[X] outside (0, 1).

    Notes
    -----
    Where the text is ambiguous:

    - Ties go by arrival, so that an old job counts while its rank is at most r and a new one
      while it is below. The paper's indicator for X_0^old has "below".
    - The worst future rank at age a is over a <= b < x; the paper has a < b.
    - A job whose first rank exceeds r has no original work; c_0 = inf{a > 0: ...} would give it
      a unit.
    - Sums over ages end at x - 1 and carry P(X = x), which the paper's g leaves out.
    """
    check_queue(rate, jobs.mean)
    parts = components(jobs)
    slower = 1 / (1 - rate * parts.new)
    waiting = rate * parts.squares / (2 * (1 - rate * parts.original)) * slower
    # P(rank <= r at every age from `age` on), for jobs with more units than `age`.
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
    """Return masses of shape (ranks, sizes, values) after one more unit."""
    return np.asarray(np.einsum("rxi,xij->rxj", mass, jobs.steps))


def _ages(
    jobs: RefinedJobs, ranks: Floats
) -> Iterator[tuple[int, Callable[[np.ufunc], NDArray[np.bool_]], Floats]]:
    """Yield each age, a comparison of ranks then with thresholds, and shares of longer jobs."""
    n = len(jobs.shares)
    for age in range(n):
        rank = jobs.values - age

        def low(compare: np.ufunc, rank: Floats = rank) -> NDArray[np.bool_]:
            return np.asarray(compare(rank[None, None, :], ranks[:, None, None]))

        yield age, low, jobs.shares * (np.arange(1, n + 1) > age)
