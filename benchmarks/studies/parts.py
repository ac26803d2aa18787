"""The parts that studies are made of: a sweep of factors, metrics of a policy, means and claims.

A study is an `Experiment`. Its ``trials`` is a `sweep`, its ``run`` is `measured`, and its
``summarize`` makes a `claim` of each statement of the paper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import product
from typing import Any

import numpy as np

from optsched import Problem, run
from optsched.experiments.base import Claim, Row, Run
from optsched.judge.evaluate import Evaluation
from optsched.policies.base import Rules
from optsched.problem.columns import check_choice
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance


class Count(str):
    """The name of a parameter that is the number of a factor's values 0, 1, ..."""


def sweep(
    *,
    known: Mapping[str, Iterable[str]] | None = None,
    where: Callable[[Row], bool] | None = None,
    nest: Sequence[str] = (),
    **columns: Any,
) -> Callable[[Mapping[str, Any], int], Iterator[Row]]:
    """Return the ``trials`` of a study: every combination of its factors.

    The last factor changes fastest.

    Parameters
    ----------
    known : mapping, optional
        The values that a parameter may have, by its name.
    where : callable, optional
        ``where(trial)`` says whether the trial takes part.
    nest : sequence of str, optional
        The order of the factors, where it is not that of the columns. The last one changes
        fastest.
    **columns
        Columns of a trial in order. A text names a parameter, or is ``"seed"``. If the parameter
        is a list, it is swept; any other value is the same in every trial. A `Count` names a
        parameter that says how many values 0, 1, ... are swept. A list is swept itself. A
        function of the trial's other columns and of the parameters gives one value.

    Returns
    -------
    callable
        ``trials(parameters, seed)``, as `Experiment` takes it. It raises InputError for a value
        that is not known.
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
    """Check that every value of a parameter is a known one.

    Parameters
    ----------
    name : str
        The parameter.
    values : iterable
        Its values.
    known : iterable of str
        The values that it may have.

    Raises
    ------
    InputError
        A value is not known.
    """
    names = list(known)
    for value in values:
        check_choice(value, name, names)


def measured(run: Run) -> Run:
    """Return a run that puts an error of optsched in the column ``error``.

    A trial with such an error has finished. Its question has no answer, for example because a
    scheduler cannot place a request. In a trial with results the column is None.

    Parameters
    ----------
    run : callable
        The run of one trial, as `Experiment` takes it.

    Returns
    -------
    callable
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
    """Silence warnings that a batch lies outside a profile's range, which some sweeps intend.

    Yields
    ------
    None
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def judged(instance: Instance, policy: str | Rules, cost: Any = None, **options: Any) -> Evaluation:
    """Run a policy on an instance, and evaluate its schedule.

    Parameters
    ----------
    instance : Instance
    policy : str or Rules
        As for `optsched.run`.
    cost : CostModel, optional
        An instance in seconds needs one.
    **options
        Further options of `optsched.run`, such as ``seed``.

    Returns
    -------
    Evaluation
    """
    return run(Problem(instance, cost), policy, **options).evaluation


def picked(metrics: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Return metrics under the names of columns.

    Parameters
    ----------
    metrics : mapping
        As in `Evaluation.metrics`.
    columns : mapping of str to str
        The metric's name for each column.

    Returns
    -------
    dict
        The metrics by column. None for a metric that the instance does not have.
    """
    return {column: metrics.get(name) for column, name in columns.items()}


def distinct(rows: Iterable[Row], column: str) -> list[Any]:
    """Return the distinct values of a column in order of appearance.

    Parameters
    ----------
    rows : iterable of dict
    column : str
    """
    return list(dict.fromkeys(row[column] for row in rows))


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Return the rows that have given values.

    Parameters
    ----------
    rows : iterable of dict
    **where
        Columns and the values that they must have.
    """
    return [row for row in rows if all(row.get(k) == v for k, v in where.items())]


def mean(rows: Sequence[Row], column: str, **where: Any) -> float | None:
    """Return the mean of a column over the rows that have given values.

    Parameters
    ----------
    rows : sequence of dict
    column : str
        The column. Rows without a value in it do not count.
    **where
        Columns and the values that they must have.

    Returns
    -------
    float or None
        None if no row counts.
    """
    found = [float(row[column]) for row in select(rows, **where) if row.get(column) is not None]
    return float(np.mean(found)) if found else None


def over(first: float | None, second: float | None) -> float | None:
    """Return a quotient, or None where it has no value.

    Parameters
    ----------
    first, second : float or None
        The quotient is first / second. It has none if a side is None, or ``second`` is 0.
    """
    return None if first is None or not second else first / second


def claim(
    what: str,
    paper: float | str,
    value: Any,
    holds: Callable[[Any], bool | None] | None = None,
    show: Callable[[Any], float | str] | str | int | None = None,
) -> Claim:
    """Return a statement of a paper with a measured value.

    Parameters
    ----------
    what, paper
        As for `Claim`.
    value : object
        The measured value. None if it was not measured.
    holds : callable, optional
        ``holds(value)`` says whether the statement holds.
    show : int, str or callable, optional
        How the value is shown: the decimals to round it to, the format to print it in, or a
        function that returns what is shown.

    Returns
    -------
    Claim
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
