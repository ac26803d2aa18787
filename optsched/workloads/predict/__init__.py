"""Length predictors: what an online policy knows about outputs.

A predictor is a function from an instance and a random generator to columns of predictions. The
decorator `predictor` registers one under a name. A new file of this package needs no entry in any
list::

    @predictor("half", "half of the true output")
    def half() -> Guess:
        return lambda instance, generator: np.maximum(1, instance.output_tokens // 2)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.files.read_write import as_instance
from optsched.problem.errors import InputError, OptschedError, named, raised
from optsched.problem.forecast import Forecast
from optsched.problem.instance import PREDICTIONS, Instance
from optsched.problem.registry import Registry
from optsched.problem.specs import (
    Parameter,
    convert_all,
    is_file,
    load_attribute,
    parameters_of,
    parse_spec,
)
from optsched.problem.streams import Seed, stream

Columns = ArrayLike | tuple[ArrayLike, ArrayLike] | Forecast | Mapping[str, Any]
"""One prediction per request, a pair of interval ends, a forecast, or columns by name."""

Guess = Callable[[Instance, Generator], Columns]
"""The function that makes predictions for an instance."""

Predictor = str | Guess | ArrayLike
"""A specification, a function, or one prediction per request."""


@dataclass(frozen=True)
class PredictorInfo:
    """A registered predictor.

    Parameters
    ----------
    name : str
    summary : str
        One line on what it predicts.
    make : callable
        Returns the predicting function (`Guess`) for given keyword parameters.
    """

    name: str
    summary: str
    make: Callable[..., Guess]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters of the predictor by name, read from the signature of ``make``."""
        return parameters_of(self.make)


_REGISTRY: Registry[PredictorInfo] = Registry("predictor", __name__)


def predictor(name: str, summary: str) -> Callable[[Callable[..., Guess]], Callable[..., Guess]]:
    """Return a decorator that registers a function as the maker of a predictor.

    Parameters
    ----------
    name : str
    summary : str
        One line on what it predicts.

    Returns
    -------
    callable
        Decorator of a function of keyword parameters that returns a `Guess`.
    """

    def register(make: Callable[..., Guess]) -> Callable[..., Guess]:
        _REGISTRY.add(name, PredictorInfo(name, summary, make))
        return make

    return register


def predictors() -> dict[str, PredictorInfo]:
    """Return every registered predictor, sorted by name."""
    return _REGISTRY.all()


def predict(
    instance: Instance | str | Path, predictor: Predictor, *, seed: Seed | Generator = 0
) -> Instance:
    """Return the instance with new predictions in place of its own.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
    predictor : str, callable or array_like
        One of three things. A text ``"name:key=value,..."`` names one of `predictors` or a user's
        ``file.py:function``. A function takes the instance and a ``numpy.random.Generator``, and
        returns one prediction per request, a pair of interval ends, a `Forecast`, or columns by
        name. An array of shape (n,) holds one prediction per request, in tokens.
    seed : int, sequence of int or numpy.random.Generator
        Seed of the generator that the predictor draws from, or the generator.
    """
    instance = as_instance(instance)
    if not isinstance(seed, Generator):
        seed = stream(seed, "predictor")

    if isinstance(predictor, str):
        name, guess = predictor, _guess(predictor)
    elif callable(predictor):
        name, guess = getattr(predictor, "__name__", type(predictor).__name__), predictor
    else:
        name, guess = "column", lambda _instance, _generator: predictor

    try:
        columns = _columns(guess(instance, seed))
        if all(column is None for column in columns.values()):
            raise InputError("found no predictions; expected one per request")

        new: dict[str, Any] = dict.fromkeys(PREDICTIONS) | columns
        return replace(instance, **new)
    except OptschedError as error:
        raise InputError(f"predictor {name!r}: {error}") from None
    except Exception as error:
        raise InputError(f"predictor {name!r}: raised {raised(error)}") from error


def check_predictor(spec: str) -> None:
    """Check that a specification names a predictor and gives it valid parameters."""
    _guess(spec)


def _guess(spec: str) -> Guess:
    """Return the function of a specification: a registered predictor's, or a user's own."""
    name, texts = parse_spec(spec, "predictor")
    if is_file(name):
        guess: Guess = load_attribute(name, "predictor")
        if texts:
            raise InputError(
                f"predictor {spec!r}: found parameters; expected none after a user's function"
            )

        return guess

    info = _REGISTRY.get(name)
    values = convert_all(texts, info.parameters, f"predictor {name!r}")
    try:
        return info.make(**values)
    except InputError as error:
        raise InputError(f"predictor {spec!r}: {error}") from None


def _columns(answer: Columns) -> dict[str, Any]:
    """Return what a predictor answered as fields of an instance, by name."""
    if isinstance(answer, Mapping):
        for key in answer:
            named("column", str(key), dict.fromkeys(PREDICTIONS))

        return dict(answer)
    if isinstance(answer, Forecast):
        return {"forecast": answer}
    # Two columns are the ends of intervals; a tuple of two numbers is one column of two requests.
    if isinstance(answer, tuple) and len(answer) == 2 and np.ndim(answer[0]) == 1:
        return {"predicted_lower": answer[0], "predicted_upper": answer[1]}

    return {"predicted": answer}


def estimates(
    instance: Instance,
    lengths: Literal["predicted", "lower", "upper", "hindsight"] = "predicted",
    margin: int = 0,
) -> tuple[NDArray[np.int64], str]:
    """Return predicted output tokens as policies see them, and where they come from.

    The first kind that the instance has is taken. For ``"predicted"`` this is ``predicted``, the
    forecast before a request starts, or the upper end of the interval; for ``"lower"`` or
    ``"upper"`` that end, ``predicted``, or the forecast; for ``"hindsight"`` ``predicted`` or the
    forecast. An instance with none of them has its true output tokens (the oracle).
    They are rounded up, raised by the margin, and capped so that a request's peak fits into the KV
    capacity. Read-only.
    """
    fields = {
        "predicted": ("predicted", "forecast", "predicted_upper"),
        "lower": ("predicted_lower", "predicted", "forecast"),
        "upper": ("predicted_upper", "predicted", "forecast"),
        "hindsight": ("predicted", "forecast"),
    }[lengths]
    source = next((name for name in fields if getattr(instance, name) is not None), "oracle")
    if source == "oracle" and margin == 0:
        return instance.output_tokens, source

    column = instance.output_tokens if source == "oracle" else getattr(instance, source)
    if isinstance(column, Forecast):
        column = np.maximum(1.0, column.first)

    # A request of s + o tokens holds s + o - 1 + kv_offset at its peak (`Instance.peak_tokens`).
    longest = instance.largest_held - instance.prompt_tokens + 1 - instance.kv_offset
    values = np.minimum(np.ceil(column).astype(np.int64) + margin, longest)
    # Read-only like the instance's own columns, so that engines are compiled once for both.
    values.setflags(write=False)

    return values, source


def forecast_of(instance: Instance) -> Forecast:
    """Return the forecast for policies that ask for new predictions while a request runs.

    Parameters
    ----------
    instance : Instance

    Returns
    -------
    Forecast
        The instance's own. If it has none, one with a single entry per request, its prediction
        of `estimates`. `optsched.problem.forecast.tokens_left` then takes off the tokens produced.
    """
    if instance.forecast is not None:
        return instance.forecast

    points, _ = estimates(instance)
    return Forecast(NEVER, np.arange(instance.n + 1), points.astype(np.float64))


NEVER = 2**62
"""Tokens between two predictions of a request that is predicted only once."""
