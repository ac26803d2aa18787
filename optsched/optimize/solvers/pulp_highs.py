"""HiGHS for a PuLP problem: its rows as arrays for `optsched.optimize.solvers.highs`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions, Status
from optsched.optimize.solvers.highs import solve_linear_model


class OutOfTime(Exception):
    """The time limit or an interruption came while a model was built."""


def watch(options: SolveOptions, begin: float) -> Callable[[], None]:
    """Return a function that raises `OutOfTime` once ``options`` allow no more.

    Parameters
    ----------
    options : SolveOptions
    begin : float
        When the time limit began to run, by `time.perf_counter`.
    """

    def check() -> None:
        if options.stop is not None and options.stop.is_set():
            raise OutOfTime("interrupted while the model was built")
        if time.perf_counter() - begin > options.time_limit:
            raise OutOfTime("time limit while the model was built")

    return check


def solve_pulp_problem(
    problem: Any,
    options: SolveOptions,
    *,
    integral_objective: bool,
    start: Iterable[tuple[Any, float]] | None = None,
) -> RawOutcome:
    """Minimize a PuLP problem and give its variables the incumbent's values, if there is one.

    PuLP's own ``solve`` has no room for a start, a stop and progress, and HiGHS in it does not
    keep the time limit.

    Parameters
    ----------
    problem : pulp.LpProblem
        A minimization. Its status is set to PuLP's word for the outcome.
    options : SolveOptions
        ``warm_start`` is not read: see ``start``.
    integral_objective : bool
        Whether a bound may be rounded up.
    start : iterable of (variable, value), optional
        A solution to start from; what is left out is 0, what stands in no row is passed over.

    Returns
    -------
    RawOutcome
        ``values`` by the problem's ``variables()``. A constant in the objective is left out.

    Raises
    ------
    OutOfTime
        Before HiGHS has the model.
    SolverError
        See `optsched.optimize.solvers.highs.solve_linear_model`.
    """
    import pulp

    begin = time.perf_counter()
    variables = problem.variables()
    column = {id(variable): k for k, variable in enumerate(variables)}
    model = _arrays(problem, variables, column, integral_objective, watch(options, begin))
    start_values = None
    if start is not None:
        start_values = np.zeros(model.columns)
        for variable, value in start:
            if id(variable) in column:
                start_values[column[id(variable)]] = value
    build_s = time.perf_counter() - begin
    outcome = solve_linear_model(model, options.after(build_s), start_values=start_values)
    if outcome.values is not None:
        for variable, value in zip(variables, outcome.values.tolist(), strict=True):
            variable.varValue = value
    problem.assignStatus(*_pulp_status(pulp, outcome.status))
    return RawOutcome(
        outcome.status, outcome.objective, outcome.bound, outcome.values, outcome.native_status,
        build_s + outcome.build_s, outcome.solve_s,
    )  # fmt: skip


def _arrays(
    problem: Any,
    variables: list[Any],
    column: dict[int, int],
    integral_objective: bool,
    check: Callable[[], None],
) -> LinearModel:
    cost = np.zeros(len(variables))
    for variable, factor in problem.objective.items():
        cost[column[id(variable)]] = factor
    index: list[int] = []
    value: list[float] = []
    lengths, lower, upper = [], [], []
    held = problem.constraints  # a mapping, in later versions a method
    for row in held() if callable(held) else held.values():
        check()
        index += [column[id(variable)] for variable in row]
        value += row.values()
        lengths.append(len(row))
        lower.append(_or(row.getLb(), -math.inf))
        upper.append(_or(row.getUb(), math.inf))
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    columns, values = np.array(index, dtype=np.int32), np.array(value, dtype=np.float64)
    kept = np.flatnonzero(values)
    order = kept[np.argsort(columns[kept], kind="stable")]
    start = np.zeros(len(variables) + 1, dtype=np.int32)
    np.cumsum(np.bincount(columns[order], minlength=len(variables)), out=start[1:])
    return LinearModel(
        cost=cost,
        lower=np.array([_or(v.lowBound, -math.inf) for v in variables], dtype=np.float64),
        upper=np.array([_or(v.upBound, math.inf) for v in variables], dtype=np.float64),
        integrality=np.array([v.isInteger() for v in variables], dtype=np.int32),
        start=start,
        index=rows[order],
        value=values[order],
        row_lower=np.array(lower, dtype=np.float64),
        row_upper=np.array(upper, dtype=np.float64),
        integral_objective=integral_objective,
    )


def _or(limit: float | None, default: float) -> float:
    return default if limit is None else float(limit)


def _pulp_status(pulp: Any, status: Status) -> tuple[int, int]:
    """Return PuLP's ``status`` and ``sol_status``, as its own HiGHS sets them."""
    return {
        Status.OPTIMAL: (pulp.LpStatusOptimal, pulp.LpSolutionOptimal),
        Status.FEASIBLE: (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible),
        Status.INFEASIBLE: (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible),
        Status.NO_INCUMBENT: (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound),
        Status.ERROR: (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound),
    }[status]
