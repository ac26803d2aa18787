"""Jobs of an M/G/1 queue: the joint law of a job's true size and its prediction.

The formulas need nothing of the joint density g(x, r) but the moments of what remains at an age,
``remaining(k, a, r)``: the integral of (x - a)^k g(x, r) over x > a, for k = 0, 1, 2.
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
"""Sizes and predictions of n jobs."""

_WIDEST = 40.0
"""Sizes and predictions are looked for between exp(-40) and exp(40)."""

_NEGLIGIBLE = 1e-8
"""Share of the mass and of the moments that may lie outside the grid, at each end."""

_LEAST_POINTS = 200
"""Of a grid of predictions, however narrow their range."""

_BLOCK = 1 << 21
"""Values of a density that are computed at a time."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """A distribution of sizes.

    Parameters
    ----------
    density : callable
        f(x) for an array of x > 0.
    sample : callable
        ``(generator, n)``: n sizes.
    """

    density: Callable[[Floats], Floats]
    sample: Callable[[Generator, int], Floats]


def weibull(shape: float, mean: float = 1.0) -> Sizes:
    """Return Weibull sizes: long tails for shapes below 1, exponential sizes for shape 1.

    Raises
    ------
    InputError
        A shape outside [0.3, 20] or a mean that is not positive.
    """
    if not 0.3 <= shape <= 20:
        raise InputError(f"shape: {shape!r}; 0.3 <= shape <= 20 is right")
    _check_positive(mean=mean)
    scale = mean / math.gamma(1 + 1 / shape)

    def density(x: Floats) -> Floats:
        z = np.log(x / scale)
        power = np.exp(np.minimum(shape * z, 700.0))  # further out the density is 0 anyway
        return np.asarray(shape / scale * np.exp((shape - 1) * z - power))

    return Sizes(density, lambda generator, n: scale * generator.weibull(shape, n))


def exponential(mean: float = 1.0) -> Sizes:
    """Return exponential sizes.

    Raises
    ------
    InputError
        A mean that is not positive.
    """
    return weibull(1.0, mean)


@dataclass(frozen=True, eq=False)
class Jobs:
    """A joint law of sizes and predictions; made by the functions of this module.

    Parameters
    ----------
    remaining : callable
        ``(k, a, r)`` for k = 0, 1, 2 and arrays a, r that broadcast: the integral of
        (x - a)^k g(x, r) over x > a.
    draw : callable or None
        ``(generator, n)``: sizes and predictions of n jobs. None: they cannot be simulated.
    low, high : float
        Predictions outside are negligible or impossible.
    step : float
        Distance of points of the grid in the logarithm, at most.
    """

    remaining: Callable[[int, Floats, Floats], Floats]
    draw: Draw | None
    low: float
    high: float
    step: float

    @cached_property
    def predictions(self) -> Floats:
        """Points, equidistant in their logarithm, that integrals over predictions run over."""
        count = max(_LEAST_POINTS, math.ceil(math.log(self.high / self.low) / self.step) + 1)
        return np.asarray(np.geomspace(self.low, self.high, count))

    @property
    def spacing(self) -> float:
        """Distance of `predictions` in the logarithm."""
        return math.log(self.high / self.low) / (len(self.predictions) - 1)

    @cached_property
    def densities(self) -> Floats:
        """Integrals of x^k g(x, r) over x for k = 0, 1, 2 at the predictions, shape (3, points)."""
        r = self.predictions
        return np.array([self.remaining(k, np.zeros_like(r), r) for k in range(3)])

    def cumulative(self, values: Floats) -> Floats:
        """Return the integrals of values at `predictions`, from the first to each of them.

        Notes
        -----
        The trapezoidal rule in the logarithm with its end corrections, of order 4; for smooth
        integrands that vanish at both ends the whole converges faster than any power.
        """
        h = self.spacing
        slopes = values * self.predictions
        bend = np.gradient(slopes, h, edge_order=2)
        parts = (slopes[1:] + slopes[:-1]) * h / 2 - (bend[1:] - bend[:-1]) * h**2 / 12
        return np.append(0.0, np.cumsum(parts))

    def integrate(self, values: Floats) -> float:
        """Return the integral over predictions of values at `predictions`."""
        return float(self.cumulative(values)[-1])

    @cached_property
    def moments(self) -> tuple[float, float, float]:
        """Total mass (1 up to the grid's error), E[X] and E[X^2]."""
        mass, mean, square = (self.integrate(row) for row in self.densities)
        return mass, mean, square

    @property
    def mean(self) -> float:
        """E[X]."""
        return self.moments[1]


def perfect(
    sizes: Sizes, *, step: float = 0.01, support: tuple[float, float] = (0.0, math.inf)
) -> Jobs:
    """Return jobs whose predictions are their sizes.

    Parameters
    ----------
    sizes : Sizes
    step : float
        Grid step in the logarithm of sizes.
    support : pair of float
        Where the density is positive, if it jumps there.

    Raises
    ------
    InputError
        A density that does not integrate to 1 or has no second moment.
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

    g(x, r) = f(x) exp(-r / x) / x. (Shahout et al. 2024, Appendix D, leave out
    the factor 1 / x.)

    Raises
    ------
    InputError
        A density that does not integrate to 1 or has no second moment.
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
        g(x, r) for arrays x, r > 0 that broadcast; smooth on the scale of ``step``.
    draw : callable, optional
        ``(generator, n)``: sizes and predictions of n jobs, for simulation.
    step : float
        Grid step in the logarithm of sizes and predictions. A density that is narrower than
        that needs a smaller one.
    support : pair of pairs of float
        Smallest and largest size, smallest and largest prediction. Needed where the density
        jumps to 0, as a uniform one does; otherwise found.

    Raises
    ------
    InputError
        A density that does not integrate to 1, has no second moment, or gives anything but
        finite numbers >= 0.
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
    # Sizes run from the largest down to the age, x - a in powers: Gauss rules in the logarithm.
    # The k-th moment of what is below `least` is negligible; x - a can be smaller than any size.
    # With a smallest size the moments do not fall towards it.
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
    """Return points and weights on [0, length]: panels of 16 points, about ``step`` apart."""
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
            f"density: shape {found.shape} for arguments of shape {shape}; one value each is right"
        )
    if not np.isfinite(found).all() or (found < 0).any():
        raise InputError("density: finite numbers >= 0 are right for all sizes, predictions > 0")
    return found


def _range(axis: Floats, mass: Floats, root: Floats) -> tuple[float, float]:
    """Return where mass, and mass times root^2, are not negligible."""
    wanted = np.zeros(len(axis), dtype=bool)
    for weight in (mass, mass * root**2):
        share = np.cumsum(weight) / max(float(weight.sum()), 1e-300)
        wanted |= (share > _NEGLIGIBLE) & (share < 1 - _NEGLIGIBLE)
    if not wanted.any():
        raise InputError(
            "density: 0 at all points from exp(-40) to exp(40) but one at most; 1 in total is "
            "right (a smaller step where it is narrow)"
        )
    first, last = np.flatnonzero(wanted)[[0, -1]]
    if axis[last] >= axis[-1] / math.e:
        raise InputError("density: E[X^2] is infinite or nearly so; a finite one is right")
    return float(axis[max(first - 1, 0)]), float(axis[last + 2])


def _clipped(found: tuple[float, float], support: tuple[float, float]) -> tuple[float, float]:
    low, high = support
    if not 0 <= low < high:
        raise InputError(f"support: {support!r}; 0 <= smallest < largest is right")
    # Just inside, where a density that jumps has its value.
    return max(found[0], low * (1 + 1e-12)), min(found[1], high * (1 - 1e-12))


def _normal(jobs: Jobs) -> Jobs:
    mass = jobs.moments[0]
    if not abs(mass - 1) <= 1e-3:
        raise InputError(
            f"density: integrates to {mass:.4g}; 1 is right (a smaller step than {jobs.step} "
            "where the density is narrow, its support where it jumps)"
        )
    return jobs


def _check_step(step: float) -> None:
    if not 1e-3 <= step <= 0.2:
        raise InputError(f"step: {step!r}; 0.001 <= step <= 0.2 is right")


def check_queue(rate: float, mean: float, c: float = 0.0) -> None:
    """Raise InputError unless the load rate * mean is in (0, 1) and C in [0, 1]."""
    if not 0 <= c <= 1:
        raise InputError(f"c: {c!r}; 0 <= C <= 1 is right")
    if not 0 < rate * mean < 1 - 1e-6:  # closer to 1 than quadrature can tell
        raise InputError(
            f"rate: {rate!r} is a load of {rate * mean:.4g}; above 0 and below {1 / mean:.4g} "
            "(load 1) is right"
        )


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name}: {value!r}; a number > 0 is right")
