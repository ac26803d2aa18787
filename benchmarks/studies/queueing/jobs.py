"""Jobs of an M/G/1 queue: the joint law of a job's true size and its prediction.

The formulas use the joint density g(x, r) only through the moments of the size that remains at an
age. ``remaining(k, a, r)`` is the integral of (x - a)^k g(x, r) over x > a, for k = 0, 1, 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

Floats = NDArray[np.float64]

Draw = Callable[[Generator, int], tuple[Floats, Floats]]
"""A function of a generator and n that returns the sizes and predictions of n jobs."""

_WIDEST = 40.0
"""Sizes and predictions are looked for between exp(-40) and exp(40)."""

_NEGLIGIBLE = 1e-8
"""The share of the mass and of the moments that may lie outside the grid at each end."""

_LEAST_POINTS = 200
"""The min number of points in a grid of predictions, however narrow their range."""

_BLOCK = 1 << 21
"""How many values of a density are computed at a time."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """A distribution of sizes.

    Parameters
    ----------
    density : callable
        ``f(x)`` returns the density at an array of sizes x > 0.
    sample : callable
        ``sample(generator, n)`` returns n sizes as an ndarray of shape (n,).
    """

    density: Callable[[Floats], Floats]
    sample: Callable[[Generator, int], Floats]


def weibull(shape: float, mean: float = 1.0) -> Sizes:
    """Return Weibull sizes.

    Parameters
    ----------
    shape : float
        Shape parameter in [0.3, 20]. A shape below 1 has a long tail, shape 1 is exponential.
    mean : float
        Mean size, > 0.

    Returns
    -------
    Sizes

    Raises
    ------
    InputError
        The shape is outside [0.3, 20], or the mean is not positive.
    """
    if not 0.3 <= shape <= 20:
        raise InputError(f"shape: found {shape!r}; expected 0.3 <= shape <= 20")

    _check_positive(mean=mean)
    scale = mean / math.gamma(1 + 1 / shape)

    def density(x: Floats) -> Floats:
        z = np.log(x / scale)
        power = np.exp(np.minimum(shape * z, 700.0))  # beyond, the density is 0 in float64
        return np.asarray(shape / scale * np.exp((shape - 1) * z - power))

    return Sizes(density, lambda generator, n: scale * generator.weibull(shape, n))


def exponential(mean: float = 1.0) -> Sizes:
    """Return exponential sizes.

    Parameters
    ----------
    mean : float
        Mean size, > 0.

    Returns
    -------
    Sizes

    Raises
    ------
    InputError
        The mean is not positive.
    """
    return weibull(1.0, mean)


@dataclass(frozen=True, eq=False)
class Jobs:
    """A joint law of sizes and predictions, as the functions of this module make it.

    Parameters
    ----------
    remaining : callable
        ``remaining(k, a, r)`` returns the integral of (x - a)^k g(x, r) over x > a, for k = 0, 1,
        2 and arrays ``a`` and ``r`` that broadcast.
    draw : callable or None
        ``draw(generator, n)`` returns the sizes and the predictions of n jobs, each of shape
        (n,). Without it the jobs cannot be simulated.
    low, high : float
        Range of the predictions. Those outside are negligible or impossible.
    step : float
        Max distance of neighbouring points of the grid, in the logarithm.
    """

    remaining: Callable[[int, Floats, Floats], Floats]
    draw: Draw | None
    low: float
    high: float
    step: float

    @cached_property
    def predictions(self) -> Floats:
        """The grid of predictions that integrals run over, equidistant in the logarithm."""
        count = max(_LEAST_POINTS, math.ceil(math.log(self.high / self.low) / self.step) + 1)
        return np.asarray(np.geomspace(self.low, self.high, count))

    @property
    def spacing(self) -> float:
        """The distance of neighbouring `predictions` in the logarithm."""
        return math.log(self.high / self.low) / (len(self.predictions) - 1)

    @cached_property
    def densities(self) -> Floats:
        """The integrals of x^k g(x, r) over x for k = 0, 1, 2, of shape (3, points)."""
        r = self.predictions
        return np.array([self.remaining(k, np.zeros_like(r), r) for k in range(3)])

    def cumulative(self, values: Floats) -> Floats:
        """Return the integrals of a function from the first prediction to each of them.

        Parameters
        ----------
        values : ndarray of float64, shape (points,)
            The function's values at `predictions`.

        Returns
        -------
        ndarray of float64, shape (points,)

        Notes
        -----
        This is the trapezoidal rule in the logarithm with its end corrections, of order 4. For
        smooth integrands that vanish at both ends the total converges faster than any power.
        """
        h = self.spacing
        slopes = values * self.predictions
        bend = np.gradient(slopes, h, edge_order=2)
        parts = (slopes[1:] + slopes[:-1]) * h / 2 - (bend[1:] - bend[:-1]) * h**2 / 12

        return np.append(0.0, np.cumsum(parts))

    def integrate(self, values: Floats) -> float:
        """Return the integral of a function over all predictions.

        Parameters
        ----------
        values : ndarray of float64, shape (points,)
            The function's values at `predictions`.
        """
        return float(self.cumulative(values)[-1])

    @cached_property
    def moments(self) -> tuple[float, float, float]:
        """The total mass (1 up to the grid's error), E[X] and E[X^2]."""
        mass, mean, square = (self.integrate(row) for row in self.densities)
        return mass, mean, square

    @property
    def mean(self) -> float:
        """E[X], the mean size."""
        return self.moments[1]


def perfect(
    sizes: Sizes, *, step: float = 0.01, support: tuple[float, float] = (0.0, math.inf)
) -> Jobs:
    """Return jobs whose predictions are their sizes.

    Parameters
    ----------
    sizes : Sizes
        The distribution of sizes.
    step : float
        Grid step in the logarithm of sizes, from 0.001 to 0.2.
    support : pair of float
        Smallest and largest size. It is needed only where the density jumps to 0.

    Returns
    -------
    Jobs

    Raises
    ------
    InputError
        The density does not integrate to 1 or has no second moment, or the step or the support is
        out of range.
    """
    _check_step(step)

    def density(x: Floats) -> Floats:
        return _checked(sizes.density(x), x.shape)

    def remaining(k: int, a: Floats, r: Floats) -> Floats:
        return np.asarray(density(r) * (r > a) * np.maximum(r - a, 0.0) ** k)

    def draw(generator: Generator, n: int) -> tuple[Floats, Floats]:
        x = sizes.sample(generator, n)
        return x, x

    x = _axis(step)
    low, high = _clipped(_range(x, density(x) * x, x), support)
    return _normal(Jobs(remaining, draw, low, high, step))


def exponential_predictions(sizes: Sizes, *, step: float = 0.1) -> Jobs:
    """Return jobs whose prediction is exponential with the job's size as its mean.

    The joint density is g(x, r) = f(x) exp(-r / x) / x. Shahout et al. 2024, Appendix D, leave out
    the factor 1 / x.

    Parameters
    ----------
    sizes : Sizes
        The distribution of sizes.
    step : float
        Grid step in the logarithm of sizes and predictions, from 0.001 to 0.2.

    Returns
    -------
    Jobs

    Raises
    ------
    InputError
        The density does not integrate to 1 or has no second moment, or the step is out of range.
    """

    def density(x: Floats, r: Floats) -> Floats:
        return np.asarray(sizes.density(x) * np.exp(-r / x) / x)

    def draw(generator: Generator, n: int) -> tuple[Floats, Floats]:
        x = sizes.sample(generator, n)
        return x, x * generator.exponential(size=n)

    return joint(density, draw, step=step)


def joint(
    density: Callable[[Floats, Floats], ArrayLike],
    draw: Draw | None = None,
    *,
    step: float = 0.05,
    support: tuple[tuple[float, float], tuple[float, float]] = ((0.0, math.inf), (0.0, math.inf)),
) -> Jobs:
    """Return jobs with any joint density of size and prediction.

    Parameters
    ----------
    density : callable
        ``g(x, r)`` returns the density for arrays x, r > 0 that broadcast. It must be smooth on
        the scale of ``step``.
    draw : callable, optional
        ``draw(generator, n)`` returns the sizes and predictions of n jobs. Only simulation needs
        it.
    step : float
        Grid step in the logarithm of sizes and predictions, from 0.001 to 0.2. A narrower density
        needs a smaller step.
    support : pair of pairs of float
        Smallest and largest size, then smallest and largest prediction. It is needed where the
        density jumps to 0, as a uniform one does. Otherwise the range is found.

    Returns
    -------
    Jobs

    Raises
    ------
    InputError
        The density does not integrate to 1, has no second moment, or gives anything but finite
        numbers >= 0; or the step or the support is out of range.
    """
    _check_step(step)

    def g(x: Floats, r: Floats) -> Floats:
        return _checked(density(x, r), np.broadcast_shapes(x.shape, r.shape))

    axis = _axis(step)
    by_size, by_prediction, square = (np.zeros(len(axis)) for _ in range(3))
    for part in np.array_split(np.arange(len(axis)), math.ceil(len(axis) ** 2 / _BLOCK)):
        mass = g(axis, axis[part, None]) * axis * axis[part, None]  # rows are predictions
        by_size += mass.sum(axis=0)
        by_prediction[part] = mass.sum(axis=1)
        square[part] = mass @ axis**2

    smallest, largest = _clipped(_range(axis, by_size, axis), support[0])
    root = np.sqrt(square / np.maximum(by_prediction, 1e-300))
    low, high = _clipped(_range(axis, by_prediction, root), support[1])
    mean = float(by_size @ axis / by_size.sum())
    floor = smallest if support[0][0] else 0.0
    # The sizes of an integral run from the largest one down to the age. Gauss rules in the
    # logarithm suit the powers of x - a. The k-th moment of what is below `least` is negligible,
    # since x - a can be smaller than any size. With a smallest size the moments do not fall
    # towards it.
    lowest = min(smallest, _NEGLIGIBLE * mean)
    rules = []

    for k in range(3):
        least = lowest if floor or k == 0 else mean * _NEGLIGIBLE ** (1 / k)
        down, weights = _gauss(math.log(largest / least), step)
        rules.append((np.exp(-down), weights))

    def remaining(k: int, a: Floats, r: Floats) -> Floats:
        a, r = np.broadcast_arrays(a, r)
        share, weights = rules[k]
        out = np.zeros(a.size)
        rows = max(1, _BLOCK // len(share))

        for at in range(0, a.size, rows):
            here = slice(at, at + rows)
            age = a.flat[here][:, None]
            start = np.maximum(age, floor)
            offset = np.maximum(largest - start, 0.0) * share
            x = np.maximum(start + offset, 1e-300)
            out[here] = (g(x, r.flat[here][:, None]) * (x - age) ** k * offset) @ weights

        return out.reshape(a.shape)

    return _normal(Jobs(remaining, draw, low, high, step))


def _gauss(length: float, step: float) -> tuple[Floats, Floats]:
    """Return points and weights on [0, length], in panels of 16 points about ``step`` apart."""
    points, weights = (np.asarray(v) for v in np.polynomial.legendre.leggauss(16))
    panels = math.ceil(length / (16 * step))
    half = length / panels / 2
    starts = 2 * half * np.arange(panels)[:, None]

    return (starts + half * (points + 1)).ravel(), np.tile(half * weights, panels)


def _axis(step: float) -> Floats:
    return np.asarray(np.exp(np.arange(-_WIDEST, _WIDEST, step)))


def _checked(values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.shape != shape:
        raise InputError(
            f"density: found shape {found.shape} for arguments of shape {shape}; expected one "
            "value for each"
        )

    if not np.isfinite(found).all() or (found < 0).any():
        wrong = found[~(np.isfinite(found) & (found >= 0))].flat[0]
        raise InputError(
            f"density: found {wrong:g}; expected finite numbers >= 0 for all sizes and predictions"
        )

    return found


def _range(axis: Floats, mass: Floats, root: Floats) -> tuple[float, float]:
    """Return the range of the axis where mass, or mass times root^2, is not negligible."""
    wanted = np.zeros(len(axis), dtype=bool)
    for weight in (mass, mass * root**2):
        share = np.cumsum(weight) / max(float(weight.sum()), 1e-300)
        wanted |= (share > _NEGLIGIBLE) & (share < 1 - _NEGLIGIBLE)

    if not wanted.any():
        raise InputError(
            "density: found 0 at all points from exp(-40) to exp(40), or at all but one; expected "
            "1 in total (give a smaller step where the density is narrow)"
        )

    first, last = np.flatnonzero(wanted)[[0, -1]]
    if axis[last] >= axis[-1] / math.e:
        raise InputError(
            "density: found E[X^2] to be infinite, or nearly so; expected a finite one"
        )

    return float(axis[max(first - 1, 0)]), float(axis[last + 2])


def _clipped(found: tuple[float, float], support: tuple[float, float]) -> tuple[float, float]:
    low, high = support
    if not 0 <= low < high:
        raise InputError(f"support: found {support!r}; expected 0 <= smallest < largest")

    # The ends lie just inside the support, where a density that jumps has its value.
    return max(found[0], low * (1 + 1e-12)), min(found[1], high * (1 - 1e-12))


def _normal(jobs: Jobs) -> Jobs:
    mass = jobs.moments[0]
    if not abs(mass - 1) <= 1e-3:
        raise InputError(
            f"density: found an integral of {mass:.4g}; expected 1 (give a step below {jobs.step} "
            "where the density is narrow, and its support where it jumps)"
        )

    return jobs


def _check_step(step: float) -> None:
    if not 1e-3 <= step <= 0.2:
        raise InputError(f"step: found {step!r}; expected 0.001 <= step <= 0.2")


def check_queue(rate: float, mean: float, c: float = 0.0) -> None:
    """Raise InputError unless the load is in (0, 1) and C is in [0, 1].

    Parameters
    ----------
    rate : float
        Arrivals per unit of time.
    mean : float
        Mean size of a job. The load is ``rate * mean``.
    c : float
        C, the share of its prediction up to which a job can be preempted.

    Raises
    ------
    InputError
        The load is outside (0, 1), or C is outside [0, 1].
    """
    if not 0 <= c <= 1:
        raise InputError(f"c: found {c!r}; expected 0 <= C <= 1")
    if not 0 < rate * mean < 1 - 1e-6:  # quadrature cannot tell a load this close to 1 from 1
        raise InputError(
            f"rate: found {rate!r}, a load of {rate * mean:.4g}; expected a rate above 0 and below "
            f"{1 / mean:.4g} (load 1)"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name}: found {value!r}; expected a number > 0")
