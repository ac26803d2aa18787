"""Length predictors: what an online policy is told about outputs.

A predictor is a function from an instance and a random generator to columns of predictions. One
that has a name is registered by `predictor`; a file that defines more needs no list edited::

    @predictor("half", "half of the true output")
    def half() -> Guess:
        return lambda instance, generator: np.maximum(1, instance.output_tokens // 2)
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.errors import InputError
from optsched.instance import Instance
from optsched.specs import (
    Parameter,
    convert_all,
    is_file,
    load_attribute,
    parameters_of,
    parse_spec,
)

__all__ = [
    "Guess", "Predictor", "PredictorInfo", "check_predictor", "estimates", "predict", "predictor",
    "predictors",
]  # fmt: skip

Columns = ArrayLike | tuple[ArrayLike, ArrayLike] | Mapping[str, ArrayLike | None]
"""Points, a pair of interval ends, or columns by name."""

Guess = Callable[[Instance, Generator], Columns]
"""What a predictor does."""

Predictor = str | Guess | ArrayLike
"""A specification, a function, or the points themselves."""

COLUMNS = ("predicted", "predicted_lower", "predicted_upper")


@dataclass(frozen=True)
class PredictorInfo:
    """A registered predictor: ``make`` builds a `Guess` from keyword parameters."""

    name: str
    summary: str
    make: Callable[..., Guess]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by name, read from the signature of ``make``."""
        return parameters_of(self.make)


_REGISTRY: dict[str, PredictorInfo] = {}


def predictor(name: str, summary: str) -> Callable[[Callable[..., Guess]], Callable[..., Guess]]:
    """Register the decorated function as the maker of predictor ``name``."""

    def register(make: Callable[..., Guess]) -> Callable[..., Guess]:
        _REGISTRY[name] = PredictorInfo(name, summary, make)
        return make

    return register


def predictors() -> dict[str, PredictorInfo]:
    """Return every registered predictor by name, sorted."""
    return dict(sorted(_REGISTRY.items()))


def predict(instance: Instance, predictor: Predictor, *, seed: int | Generator = 0) -> Instance:
    """Return the instance with predictions in place of those that it had.

    Parameters
    ----------
    instance : Instance
    predictor : str, callable or array_like
        ``"name:key=value,..."`` with a name of `predictors` or a user's ``file.py:function``; a
        function of the instance and a generator; or one prediction per request. A function
        returns points, shape (n,), a pair of interval ends, or columns by name.
    seed : int or numpy.random.Generator

    Raises
    ------
    InputError
        An unknown predictor or parameter; a function that raises; predictions that are missing,
        no numbers, below 1, or intervals that are reversed or exclude the output. The error
        names the predictor and the request.
    """
    generator = np.random.default_rng(seed)
    if isinstance(predictor, str):
        name, guess = predictor, _guess(predictor)
    elif callable(predictor):
        name, guess = getattr(predictor, "__name__", type(predictor).__name__), predictor
    else:
        name, guess = "column", lambda _instance, _generator: predictor
    try:
        columns = _columns(guess(instance, generator))
    except InputError as error:
        raise InputError(f"predictor {name!r}: {error}") from None
    except Exception as error:
        raise InputError(f"predictor {name!r}: raised {error!r}") from error
    try:
        new: dict[str, Any] = dict.fromkeys(COLUMNS) | columns
        return replace(instance, **new)
    except InputError as error:
        raise InputError(f"predictor {name!r}: {error}") from None


def check_predictor(spec: str) -> None:
    """Check that a specification names a predictor and its parameters.

    Raises
    ------
    InputError
        It does not.
    """
    _guess(spec)


def _guess(spec: str) -> Guess:
    name, texts = parse_spec(spec, "predictor")
    if is_file(name):
        found: Guess = load_attribute(name, "predictor")
        if texts:
            raise InputError(f"predictor {spec!r}: a user's function takes no parameters here")
        return found
    info = _REGISTRY.get(name)
    if info is None:
        raise InputError(f"predictor {name!r} is unknown; known are {', '.join(predictors())}")
    values = convert_all(texts, info.parameters, f"predictor {name!r}")
    try:
        return info.make(**values)
    except InputError as error:
        raise InputError(f"predictor {spec!r}: {error}") from None


def _columns(answer: Columns) -> dict[str, Any]:
    if isinstance(answer, Mapping):
        unknown = [key for key in answer if key not in COLUMNS]
        if unknown:
            raise InputError(f"column {unknown[0]!r} is unknown; known are {', '.join(COLUMNS)}")
        return dict(answer)
    if isinstance(answer, tuple) and len(answer) == 2 and np.ndim(answer[0]) == 1:
        return {"predicted_lower": answer[0], "predicted_upper": answer[1]}
    return {"predicted": answer}


def estimates(
    instance: Instance,
    lengths: Literal["predicted", "lower", "upper", "hindsight"] = "predicted",
    margin: int = 0,
) -> tuple[NDArray[np.int64], str]:
    """Return predicted output tokens as policies see them, and where they are from.

    Parameters
    ----------
    instance : Instance
    lengths : {"predicted", "lower", "upper", "hindsight"}
        The first of these that the instance has: for ``"predicted"`` its ``predicted`` (rounded
        up), then its ``predicted_upper``; for ``"lower"`` and ``"upper"`` that end of the
        interval, then ``predicted``; for ``"hindsight"`` only ``predicted``. Without any the
        truth (the oracle).
    margin : int
        Tokens added to each.

    Returns
    -------
    predicted : ndarray of int64, shape (n,)
        Capped so that the request's peak fits the KV capacity.
    source : {"predicted", "predicted_lower", "predicted_upper", "oracle"}
    """
    order = {
        "predicted": ("predicted", "predicted_upper"),
        "lower": ("predicted_lower", "predicted"),
        "upper": ("predicted_upper", "predicted"),
        "hindsight": ("predicted",),
    }[lengths]
    source = next((key for key in order if getattr(instance, key) is not None), "oracle")
    if source == "oracle" and margin == 0:
        return instance.output_tokens, source
    column = instance.output_tokens if source == "oracle" else getattr(instance, source)
    most = instance.kv_capacity - instance.prompt_tokens + 1 - instance.kv_offset
    values = np.minimum(np.ceil(column).astype(np.int64) + margin, most)
    values.setflags(write=False)  # as the instance's own columns: one compiled engine for both
    return values, source


# --- predictors -------------------------------------------------------------------------------


@predictor("oracle", "the true output")
def oracle() -> Guess:
    """Points without error."""
    return lambda instance, _: instance.output_tokens


@predictor("interval", "one interval for every request")
def interval(*, low: int = 1, high: int = 1000) -> Guess:
    """[low, high] for all (001, experiment 1)."""
    _ordered(low, high)

    def guess(instance: Instance, _: Generator) -> Columns:
        return np.full(instance.n, low), np.full(instance.n, high)

    return guess


@predictor("classes", "the class of width w that holds the output")
def classes(*, width: int = 100) -> Guess:
    """[k w + 1, (k + 1) w] (001, experiment 2)."""
    if width < 1:
        raise InputError(f"width: {width}; an integer >= 1 is right")

    def guess(instance: Instance, _: Generator) -> Columns:
        first = (instance.output_tokens - 1) // width * width
        return first + 1, first + width

    return guess


@predictor("relative", "max(1, floor((1 - x) o)) to ceil((1 + x) o)")
def relative(*, x: float = 0.1) -> Guess:
    """An interval around each output (001, experiment 3)."""
    if not 0 <= x <= 1:
        raise InputError(f"x: {x}; 0 <= x <= 1 is right")

    def guess(instance: Instance, _: Generator) -> Columns:
        o = instance.output_tokens
        # Whole numbers such as 0.9 * 10 must not be missed by a rounding error.
        lower = np.floor(np.round((1 - x) * o, 9)).astype(np.int64)
        upper = np.ceil(np.round((1 + x) * o, 9)).astype(np.int64)
        return np.maximum(1, lower), upper

    return guess


@predictor("noisy", "a point with a given mean absolute error and bias")
def noisy(*, mae: float = 20.0, bias: float = 0.0) -> Guess:
    """Truth plus a normal error, never below 1 token.

    Notes
    -----
    The error's mean and spread are those at which, over the requests of the instance, the
    predictions *after* the cut at 1 have expected mean absolute error ``mae`` and mean error
    ``bias``. They are rounded to one of the two neighbouring integers at random, without bias;
    absolute error and cut are linear between integers, so the rounding changes neither figure.
    """
    if not (mae >= 0 and mae >= abs(bias)):
        raise InputError(f"mae: {mae:g}; at least the size of the bias {bias:g} is right")

    def guess(instance: Instance, generator: Generator) -> Columns:
        o = instance.output_tokens.astype(np.float64)
        shift, spread = _calibrated(o, mae, bias)
        real = np.maximum(1.0, o + shift + spread * generator.standard_normal(len(o)))
        whole = np.floor(real)
        return (whole + (generator.random(len(o)) < real - whole)).astype(np.int64)

    return guess


@predictor("column", "columns of a CSV file with a header: predicted, predicted_lower, ...")
def column(*, file: str) -> Guess:
    """One row per request, in the instance's order; other columns are ignored."""

    def guess(instance: Instance, _: Generator) -> Columns:
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file}: {error}") from None
        rows = list(csv.DictReader(text.splitlines()))
        names = [key for key in COLUMNS if rows and key in rows[0]]
        if not names:
            raise InputError(f"{file}: has no column of {', '.join(COLUMNS)}")
        return {key: [_number(row[key], i, file, key) for i, row in enumerate(rows)]
                for key in names}  # fmt: skip

    return guess


def _number(text: str | None, i: int, file: str, key: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise InputError(f"{file}: {key}: request {i}: {text!r} is not a number") from None


def _ordered(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise InputError(f"low, high: {low}, {high}; 1 <= low <= high is right")


_NODES = 64


def _calibrated(o: NDArray[np.float64], mae: float, bias: float) -> tuple[float, float]:
    """Return mean and spread of a normal error for which the cut predictions are as wanted.

    For a given spread the mean error rises with the shift, and at that shift the mean absolute
    error rises with the spread, from |bias| to below 2 (mean(o) - 1) + bias.

    Raises
    ------
    InputError
        Such errors cannot be: predictions are at least 1.
    """
    most = 2 * (float(o.mean()) - 1) + bias
    if mae == abs(bias) == 0:
        return 0.0, 0.0
    if not (bias > 1 - o.mean() and mae < most):
        raise InputError(
            f"mae: {mae:g} with bias {bias:g}: predictions are at least 1 token and outputs "
            f"{o.mean():g} on average; a bias above {1 - o.mean():g} and mae below {most:g} is "
            "right"
        )
    lengths, counts = np.unique(o, return_counts=True)
    weights, cuts = counts / counts.sum(), 1.0 - lengths  # errors are never below the cut

    def errors(shift: float, spread: float) -> tuple[float, float]:
        """Return mean and mean absolute error of max(1, o + shift + spread Z)."""
        mean = float(weights @ (cuts + _mean_above(shift, spread, cuts)))
        # |max(cut, e)| = 2 max(0, e) - max(cut, e) since cut <= 0
        return mean, 2 * float(_mean_above(shift, spread, np.zeros(1))[0]) - mean

    def shift_for(spread: float) -> float:
        low, high = 1.0 - float(o.max()) - 20 * spread - 1, bias + 1.0
        while errors(high, spread)[0] < bias:
            high = 2 * high + 1
        for _ in range(_NODES):
            middle = (low + high) / 2
            low, high = (middle, high) if errors(middle, spread)[0] < bias else (low, middle)
        return (low + high) / 2

    low, high = 0.0, 1.0
    while errors(shift_for(high), high)[1] < mae:
        low, high = high, 2 * high
        if high > 1e9:
            raise InputError(f"mae: {mae:g}: too close to the limit {most:g}")
    for _ in range(40):
        middle = (low + high) / 2
        if errors(shift_for(middle), middle)[1] < mae:
            low = middle
        else:
            high = middle
    spread = (low + high) / 2
    return shift_for(spread), spread


def _mean_above(shift: float, spread: float, cut: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return E max(0, X - cut) for X normal of this mean and spread."""
    if spread <= 0:
        return np.maximum(0.0, shift - cut)
    d = np.clip((shift - cut) / spread, -30.0, None)
    below = np.array([math.erfc(v) for v in (-d / math.sqrt(2)).tolist()]) / 2
    density = np.exp(-d * d / 2) / math.sqrt(2 * math.pi)
    return np.asarray((shift - cut) * below + spread * density)
