"""Length predictors: what an online policy is told about outputs.

A predictor is a function from an instance and a random generator to columns of predictions. One
that has a name is registered by `predictor`; a file of this package that defines more needs no
list edited::

    @predictor("half", "half of the true output")
    def half() -> Guess:
        return lambda instance, generator: np.maximum(1, instance.output_tokens // 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError
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

__all__ = [
    "Columns", "Forecast", "Guess", "Predictor", "PredictorInfo", "check_predictor", "estimates",
    "forecast_of", "predict", "predictor", "predictors",
]  # fmt: skip

Columns = ArrayLike | tuple[ArrayLike, ArrayLike] | Forecast | Mapping[str, Any]
"""Points, a pair of interval ends, a forecast, or columns by name."""

Guess = Callable[[Instance, Generator], Columns]
"""What a predictor does."""

Predictor = str | Guess | ArrayLike
"""A specification, a function, or the points themselves."""


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


_REGISTRY: Registry[PredictorInfo] = Registry("predictor", __name__)


def predictor(name: str, summary: str) -> Callable[[Callable[..., Guess]], Callable[..., Guess]]:
    """Register the decorated function as the maker of predictor ``name``."""

    def register(make: Callable[..., Guess]) -> Callable[..., Guess]:
        _REGISTRY.add(name, PredictorInfo(name, summary, make))
        return make

    return register


def predictors() -> dict[str, PredictorInfo]:
    """Return every registered predictor by name, sorted."""
    return _REGISTRY.all()


def predict(instance: Instance, predictor: Predictor, *, seed: int | Generator = 0) -> Instance:
    """Return the instance with predictions in place of those that it had.

    Parameters
    ----------
    instance : Instance
    predictor : str, callable or array_like
        ``"name:key=value,..."`` with a name of `predictors` or a user's ``file.py:function``; a
        function of the instance and a generator; or one prediction per request. A function
        returns points, shape (n,), a pair of interval ends, a `Forecast` of what is left as a
        request runs, or columns by name.
    seed : int or numpy.random.Generator

    Raises
    ------
    InputError
        An unknown predictor or parameter; a function that raises, or tells nothing; predictions
        that are missing, no numbers, below 1, intervals that are reversed or exclude the output,
        or a forecast that is too short. The error names the predictor and the request.
    """
    if not isinstance(seed, Generator):
        # Apart from what the same seed draws elsewhere: `generate` would make errors that know
        # the lengths, and `simulate` ties that know the errors.
        seed = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    if isinstance(predictor, str):
        name, guess = predictor, _guess(predictor)
    elif callable(predictor):
        name, guess = getattr(predictor, "__name__", type(predictor).__name__), predictor
    else:
        name, guess = "column", lambda _instance, _generator: predictor
    try:
        columns = _columns(guess(instance, seed))
        if all(column is None for column in columns.values()):
            raise InputError("told nothing; a prediction per request is right")
    except InputError as error:
        raise InputError(f"predictor {name!r}: {error}") from None
    except Exception as error:
        raise InputError(f"predictor {name!r}: raised {error!r}") from error
    try:
        new: dict[str, Any] = dict.fromkeys(PREDICTIONS) | columns
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
    values = convert_all(texts, info.parameters, f"predictor {name!r}")
    try:
        return info.make(**values)
    except InputError as error:
        raise InputError(f"predictor {spec!r}: {error}") from None


def _columns(answer: Columns) -> dict[str, Any]:
    if isinstance(answer, Mapping):
        unknown = [key for key in answer if key not in PREDICTIONS]
        if unknown:
            words = ", ".join(PREDICTIONS)
            raise InputError(f"column {unknown[0]!r} is unknown; known are {words}")
        return dict(answer)
    if isinstance(answer, Forecast):
        return {"forecast": answer}
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
        up), what its forecast says before a request starts, then its ``predicted_upper``; for
        ``"lower"`` and ``"upper"`` that end of the interval, then ``predicted`` and the forecast;
        for ``"hindsight"`` only those two. Without any the truth (the oracle).
    margin : int
        Tokens added to each.

    Returns
    -------
    predicted : ndarray of int64, shape (n,)
        Capped so that the request's peak fits the KV capacity.
    source : {"predicted", "forecast", "predicted_lower", "predicted_upper", "oracle"}
    """
    order = {
        "predicted": ("predicted", "forecast", "predicted_upper"),
        "lower": ("predicted_lower", "predicted", "forecast"),
        "upper": ("predicted_upper", "predicted", "forecast"),
        "hindsight": ("predicted", "forecast"),
    }[lengths]
    source = next((key for key in order if getattr(instance, key) is not None), "oracle")
    if source == "oracle" and margin == 0:
        return instance.output_tokens, source
    column = instance.output_tokens if source == "oracle" else getattr(instance, source)
    if isinstance(column, Forecast):
        column = np.maximum(1.0, column.first)
    most = instance.kv_capacity - instance.prompt_tokens + 1 - instance.kv_offset
    values = np.minimum(np.ceil(column).astype(np.int64) + margin, most)
    values.setflags(write=False)  # as the instance's own columns: one compiled engine for both
    return values, source


def forecast_of(instance: Instance) -> Forecast:
    """Return what policies that look again as a request runs are told.

    The instance's forecast; without one a single entry per request, its point of `estimates`,
    from which the tokens produced are counted down (`optsched.problem.forecast.tokens_left`).
    """
    if instance.forecast is not None:
        return instance.forecast
    points, _ = estimates(instance)
    return Forecast(NEVER, np.arange(instance.n + 1), points.astype(np.float64))


NEVER = 2**62
"""Tokens between the predictions of a request that is predicted once."""
