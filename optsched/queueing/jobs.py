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

from optsched.errors import InputError

Floats = NDArray[np.float64]

Draw = Callable[[Generator, int], tuple[Floats, Floats]]
"""Sizes and predictions of n jobs."""

_WIDEST = 40.0
"""Sizes and predictions are looked for between exp(-40) and exp(40)."""

_NEGLIGIBLE = 1e-8
"""Share of the mass and of the moments that may lie outside the grid, at each end."""

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
        A shape outside [0.2, 20] or a mean that is not positive.
    """
    if not 0.2 <= shape <= 20:
        raise InputError(f"shape: {shape!r}; 0.2 <= shape <= 20 is right")
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
        Predictions outside are negligible.
    step : float
        Ratio of neighbouring points of the grid, minus 1, about.
    """

    remaining: Callable[[int, Floats, Floats], Floats]
    draw: Draw | None
    low: float
    high: float
    step: float

    @cached_property
    def predictions(self) -> Floats:
        """Points, equidistant in their logarithm, that integrals over predictions run over."""
        count = math.ceil(math.log(self.high / self.low) / self.step) + 1
        return np.asarray(self.low * np.exp(self.step * np.arange(count)))

    @cached_property
    def densities(self) -> Floats:
        """Integrals of x^k g(x, r) over x for k = 0, 1, 2 at the predictions, shape (3, points)."""
        r = self.predictions
        return np.array([self.remaining(k, np.zeros_like(r), r) for k in range(3)])

    def integrate(self, values: Floats) -> float:
        """Return the integral over predictions of values at `predictions`.

        Notes
        -----
        The trapezoidal rule in the logarithm, which for smooth integrands that vanish at both
        ends converges faster than any power of the step.
        """
        return float((values * self.predictions).sum() * self.step)

    @cached_property
    def moments(self) -> tuple[float, float, float]:
        """Total mass (1 up to the grid's error), E[X] and E[X^2]."""
        mass, mean, square = (self.integrate(row) for row in self.densities)
        return mass, mean, square

    @property
    def mean(self) -> float:
        """E[X]."""
        return self.moments[1]


def perfect(sizes: Sizes, *, step: float = 0.01) -> Jobs:
    """Return jobs whose predictions are their sizes.

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
    low, high = _range(x, density(x) * x, x)
    return _normal(Jobs(remaining, draw, low, high, step))


def exponential_predictions(sizes: Sizes, *, step: float = 0.1) -> Jobs:
    """Return jobs whose prediction is exponential with the job's size as its mean.

    g(x, r) = f(x) exp(-r / x) / x. (000, Appendix D, prints it without the factor 1 / x.)

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
        that, or jumps, needs a smaller one; the error of a jump is about half a step.

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
    smallest, largest = _range(axis, by_size, axis)
    low, high = _range(axis, by_prediction, np.sqrt(square / np.maximum(by_prediction, 1e-300)))
    mean = float(by_size @ axis / by_size.sum())
    grids = []
    for k in range(3):
        # What remains may be smaller than any size. Its k-th power is negligible below this.
        least = min(smallest, mean * _NEGLIGIBLE ** (1 / (k + 1)))
        offsets = np.exp(np.arange(math.log(least), math.log(largest) + step, step))
        grids.append((offsets, offsets ** (k + 1) * step))

    def remaining(k: int, a: Floats, r: Floats) -> Floats:
        a, r = np.broadcast_arrays(a, r)
        offsets, weights = grids[k]
        out = np.empty(a.size)
        rows = max(1, _BLOCK // len(offsets))
        for at in range(0, a.size, rows):
            here = slice(at, at + rows)
            out[here] = g(a.flat[here][:, None] + offsets, r.flat[here][:, None]) @ weights
        return out.reshape(a.shape)

    return _normal(Jobs(remaining, draw, low, high, step))


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
    if not mass.any():
        raise InputError("density: 0 everywhere between exp(-40) and exp(40); 1 in total is right")
    wanted = np.zeros(len(axis), dtype=bool)
    for weight in (mass, mass * root**2):
        share = np.cumsum(weight) / weight.sum()
        wanted |= (share > _NEGLIGIBLE) & (share < 1 - _NEGLIGIBLE)
    first, last = np.flatnonzero(wanted)[[0, -1]]
    if last >= len(axis) - 2 - round(1 / (axis[1] / axis[0] - 1)):
        raise InputError("density: E[X^2] is infinite; a finite one is right")
    return float(axis[max(first - 1, 0)]), float(axis[min(last + 1, len(axis) - 1)])


def _normal(jobs: Jobs) -> Jobs:
    mass = jobs.moments[0]
    if not abs(mass - 1) <= 1e-3:
        raise InputError(
            f"density: integrates to {mass:.4g}; 1 is right (a smaller step than {jobs.step} if "
            "the density is narrow or jumps)"
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
