"""Predictors of single numbers and intervals: from the truth, with an error, or from a file."""

import csv
import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.text_files import read_text
from optsched.workloads.bisection import bisect
from optsched.workloads.predict import Columns, Guess, predictor

COLUMNS = ("predicted", "predicted_lower", "predicted_upper")
"""Columns that a CSV file of predictions may have."""


@predictor("oracle", "the true output")
def oracle() -> Guess:
    """Return the predictor of the true output tokens."""
    return lambda instance, _: instance.output_tokens


@predictor("interval", "one interval for every request")
def interval(*, low: int = 1, high: int = 1000) -> Guess:
    """Return the predictor of [low, high] for all requests (Chen, Ye and Zhou 2025, experiment 1).

    Parameters
    ----------
    low, high : int
        Ends of the interval, in tokens: 1 <= low <= high.
    """
    if not 1 <= low <= high:
        raise InputError(f"low, high: found {low}, {high}; expected 1 <= low <= high")

    return lambda instance, _: (np.full(instance.n, low), np.full(instance.n, high))


@predictor("classes", "the class of width w that holds the output")
def classes(*, width: int = 100) -> Guess:
    """Return the predictor of classes of outputs (Chen, Ye and Zhou 2025, experiment 2).

    It predicts the interval [k w + 1, (k + 1) w] that contains the output.

    Parameters
    ----------
    width : int
        Width w of a class in tokens, >= 1.
    """
    check_whole(width, "width", 1)

    def guess(instance: Instance, _: Generator) -> Columns:
        first = (instance.output_tokens - 1) // width * width
        return first + 1, first + width

    return guess


@predictor("relative", "max(1, floor((1 - x) o)) to ceil((1 + x) o)")
def relative(*, x: float = 0.1) -> Guess:
    """Return the predictor of intervals around outputs (Chen, Ye and Zhou 2025, experiment 3).

    For an output of o tokens it predicts max(1, floor((1 - x) o)) to ceil((1 + x) o).

    Parameters
    ----------
    x : float
        Relative half-width of the interval, from 0 to 1.
    """
    if not 0 <= x <= 1:
        raise InputError(f"x: found {x}; expected 0 <= x <= 1")

    def guess(instance: Instance, _: Generator) -> Columns:
        o = instance.output_tokens
        # A rounding error must not push whole numbers such as 0.9 * 10 past floor or ceil.
        lower = np.floor(np.round((1 - x) * o, 9)).astype(np.int64)
        upper = np.ceil(np.round((1 + x) * o, 9)).astype(np.int64)
        return np.maximum(1, lower), upper

    return guess


@predictor("noisy", "a point with a given mean absolute error and bias")
def noisy(*, mae: float = 20.0, bias: float = 0.0) -> Guess:
    """Return the predictor of the truth plus a normal error, never below 1 token.

    Parameters
    ----------
    mae : float
        Mean absolute error over the requests of an instance, in tokens: at least ``abs(bias)``.
    bias : float
        Mean error, in tokens.

    Returns
    -------
    Guess
        It raises an `InputError` for an instance whose outputs allow no such errors.

    Notes
    -----
    The mean and the spread of the normal error are chosen such that the predictions *after* the
    cut at 1 have the expected mean absolute error ``mae`` and mean error ``bias`` over the requests
    of the instance. A prediction is then rounded to one of its two neighbouring integers at
    random, without bias. The absolute error and the cut are linear between integers, so the
    rounding changes neither figure.
    """
    if not (mae >= 0 and mae >= abs(bias)):
        raise InputError(f"mae: found {mae:g}; expected at least the size of the bias {bias:g}")

    def guess(instance: Instance, generator: Generator) -> Columns:
        o = instance.output_tokens.astype(np.float64)
        shift, spread = _calibrate(o, mae, bias)
        real = np.maximum(1.0, o + shift + spread * generator.standard_normal(len(o)))
        whole = np.floor(real)
        rounds_up = generator.random(len(o)) < real - whole

        return (whole + rounds_up).astype(np.int64)

    return guess


@predictor("column", "columns of a CSV file with a header: predicted, predicted_lower, ...")
def column(*, file: str) -> Guess:
    """Return the predictor that reads `COLUMNS` of a CSV file, with a row per request in order."""

    def guess(instance: Instance, _: Generator) -> Columns:
        text = read_text(file, "a table of predictions")
        try:
            rows = list(csv.DictReader(text.splitlines()))
        except csv.Error as error:  # a cell of thousands of characters
            raise InputError(f"{file}: {error}; expected numbers") from None

        names = [key for key in COLUMNS if rows and key in rows[0]]
        if not names:
            raise InputError(
                f"{file}: found no column of predictions; expected {', '.join(COLUMNS)}"
            )

        return {
            key: [_number(row[key], i, file, key) for i, row in enumerate(rows)] for key in names
        }

    return guess


def _number(text: str | None, i: int, file: str, key: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise InputError(f"{file}: {key}: request {i}: found {text!r}; expected a number") from None


def _calibrate(o: NDArray[np.float64], mae: float, bias: float) -> tuple[float, float]:
    """Return the mean and the spread of a normal error that give the cut predictions their errors.

    For a given spread, the mean error rises with the shift. At the shift that gives ``bias``, the
    mean absolute error rises with the spread from |bias| to just below 2 (mean(o) - 1) + bias. Two
    nested bisections therefore find both.
    """
    limit = 2 * (float(o.mean()) - 1) + bias
    if mae == abs(bias) == 0:
        return 0.0, 0.0
    if not (bias > 1 - o.mean() and mae < limit):
        raise InputError(
            f"mae: found {mae:g} with bias {bias:g}; expected a bias above {1 - o.mean():g} and "
            f"mae below {limit:g}, since predictions are at least 1 token and outputs "
            f"{o.mean():g} on average"
        )

    # Requests of one length have one distribution of errors, so each length is taken once.
    lengths, counts = np.unique(o, return_counts=True)
    weights, cuts = counts / counts.sum(), 1.0 - lengths  # errors are never below the cut

    def errors(shift: float, spread: float) -> tuple[float, float]:
        """Return the mean error and the mean absolute error of max(1, o + shift + spread Z)."""
        # An error is max(cut, e) = cut + max(0, e - cut); `_mean_above` is the mean of the last.
        mean = float(weights @ (cuts + _mean_above(shift, spread, cuts)))
        # |max(cut, e)| = 2 max(0, e) - max(cut, e) since cut <= 0
        return mean, 2 * float(_mean_above(shift, spread, np.zeros(1))[0]) - mean

    def shift_for(spread: float) -> float:
        # At `low` all predictions are cut to 1, with a mean error below any that was asked for.
        low, high = 1.0 - float(o.max()) - 20 * spread - 1, bias + 1.0
        while errors(high, spread)[0] < bias:
            high = 2 * high + 1

        return bisect(lambda shift: errors(shift, spread)[0] < bias, low, high, 64)

    def falls_short(spread: float) -> bool:
        return errors(shift_for(spread), spread)[1] < mae

    # Double until the spread is large enough. Close to the limit it would have to be infinite.
    low, high = 0.0, 1.0
    while falls_short(high):
        low, high = high, 2 * high
        if high > 1e9:
            raise InputError(f"mae: found {mae:g}; expected less, since the limit is {limit:g}")

    spread = bisect(falls_short, low, high, 40)
    return shift_for(spread), spread


def _mean_above(shift: float, spread: float, cut: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return E max(0, X - cut) for a normal X with mean ``shift`` and deviation ``spread``.

    With d = (shift - cut) / spread this is (shift - cut) Phi(d) + spread phi(d).
    """
    if spread <= 0:
        return np.maximum(0.0, shift - cut)

    d = np.clip((shift - cut) / spread, -30.0, None)  # farther below both are next to nothing
    cumulative = np.array([math.erfc(v) for v in (-d / math.sqrt(2)).tolist()]) / 2
    density = np.exp(-d * d / 2) / math.sqrt(2 * math.pi)
    return np.asarray((shift - cut) * cumulative + spread * density)
