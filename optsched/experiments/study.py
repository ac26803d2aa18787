"""What studies are made of: a sweep of factors, metrics of a policy, means of rows, claims.

A study is an `Experiment` whose ``trials`` is a `sweep`, whose ``run`` is `measured`, and whose
``summarize`` makes a `claim` of each statement of its paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import Any

import numpy as np

from optsched.experiments.base import Claim, Row, Run
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.policies.base import Rules
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance


class Count(str):
    """The name of a parameter that says how many values a factor has: 0, 1, ..."""


def sweep(
    *,
    known: Mapping[str, Iterable[str]] | None = None,
    where: Callable[[Row], bool] | None = None,
    nest: Sequence[str] = (),
    **columns: Any,
) -> Callable[[Mapping[str, Any], int], Iterator[Row]]:
    """Return the trials of a study: every combination of its factors, the last one fastest.

    Parameters
    ----------
    known : mapping, optional
        By parameter the values that it may have.
    where : callable, optional
        Says of a trial whether it takes part.
    nest : sequence of str, optional
        The factors, the last one fastest, where that is not the order of the columns.
    **columns
        Columns of a trial in order. A text names a parameter, or ``"seed"``: a list is swept,
        any other value stands in every trial. A `Count` names a parameter as well. A list is
        swept. A function of the trial's other columns and the parameters gives one value.
    """

    def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
        for name, values in (known or {}).items():
            check_known(name, parameters[name], values)
        given = {**parameters, "seed": seed}
        axes: dict[str, Sequence[Any]] = {}
        for column, source in columns.items():
            value = given[source] if isinstance(source, str) else source
            if isinstance(source, Count):
                axes[column] = range(value)
            elif not callable(value):
                axes[column] = value if isinstance(value, list) else [value]
        order = sorted(axes, key=[*nest, *axes].index)
        for values in product(*(axes[column] for column in order)):
            row = dict(zip(order, values, strict=True))
            row = {c: row[c] if c in row else columns[c](row, parameters) for c in columns}
            if where is None or where(row):
                yield row

    return trials


def check_known(name: str, values: Iterable[Any], known: Iterable[str]) -> None:
    """Check that every value of a parameter is one of those known.

    Raises
    ------
    InputError
        One is not.
    """
    names = list(known)
    for value in values:
        if value not in names:
            raise InputError(f"{name}: {value!r} is unknown; known are {', '.join(names)}")


def measured(run: Run) -> Run:
    """Return a trial's function that states an error of optsched in the column ``error``.

    Such a trial has finished: its question has no answer, such as a scheduler that cannot place a
    request. Where there are results the column is None.
    """

    @wraps(run)
    def answer(trial: Row) -> Row:
        try:
            return {**run(trial), "error": None}
        except OptschedError as error:
            return {"error": " ".join(str(error).split())}

    return answer


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the judge's warning: leaving the profiles' range is the point of some sweeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def judged(instance: Instance, policy: str | Rules, cost: Any = None, **options: Any) -> Evaluation:
    """Return the judge's evaluation of a policy's schedule; arguments are `simulate`'s."""
    return evaluate(instance, simulate(instance, policy, cost, **options), cost)


def picked(metrics: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Return metrics by column, None for those that the instance does not have."""
    return {column: metrics.get(name) for column, name in columns.items()}


def distinct(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the values of a column in order of appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in where.items())]


def mean(rows: Sequence[Row], column: str, **where: Any) -> float | None:
    """Return the mean of a column over the rows that have these values, None without any."""
    found = [float(row[column]) for row in select(rows, **where) if row.get(column) is not None]
    return float(np.mean(found)) if found else None


def over(first: float | None, second: float | None) -> float | None:
    """Return a quotient, None where a side is missing."""
    return None if first is None or not second else first / second


def claim(
    what: str,
    paper: float | str,
    value: Any,
    holds: Callable[[Any], bool | None] | None = None,
    show: Callable[[Any], float | str] | str | int | None = None,
) -> Claim:
    """Return a statement beside a measured value.

    Parameters
    ----------
    what, paper
        As for `Claim`.
    value : object
        None: not measured.
    holds : callable, optional
        Says of the value whether the statement is met.
    show : int, str or callable, optional
        Decimals to round to, a format to print in, or a function that returns what is shown.
    """
    if value is None:
        return Claim(what, paper, None)
    ours = value
    if isinstance(show, int):
        ours = round(value, show)
    elif isinstance(show, str):
        ours = format(value, show)
    elif show is not None:
        ours = show(value)
    return Claim(what, paper, ours, None if holds is None else holds(value))
