"""HiGHS for a PuLP problem, whose rows become arrays for `optsched.optimize.solvers.highs`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from optsched.optimize.solvers.base import RawOutcome, SolveOptions
from optsched.optimize.solvers.highs import solve_linear_model
from optsched.optimize.solvers.rows import Rows


def solve_pulp_problem(
    problem: Any,
    options: SolveOptions,
    *,
    integral_objective: bool,
    start: Iterable[tuple[Any, float]] | None = None,
) -> RawOutcome:
    """Minimize a PuLP problem by HiGHS. Its variables get the values of the incumbent, if any.

    PuLP's own ``solve`` takes no start, no stop and no callback for progress, and its HiGHS does
    not keep the time limit.

    `start`: a solution to start from. Variables that are left out are 0, and variables that the
    problem does not use are ignored.
    """
    budget = options.budget()
    variables = problem.variables()
    column = {id(variable): k for k, variable in enumerate(variables)}
    rows = Rows()
    held = problem.constraints  # a mapping, in later versions a method

    for row in held() if callable(held) else held.values():
        budget.check("the model was handed over")
        rows.add(
            ((column[id(variable)], value) for variable, value in row.items()),
            lower=_or(row.getLb(), -math.inf),
            upper=_or(row.getUb(), math.inf),
        )

    cost = np.zeros(len(variables))
    for variable, factor in problem.objective.items():
        cost[column[id(variable)]] = factor

    model = rows.model(
        cost=cost,
        lower=[_or(v.lowBound, -math.inf) for v in variables],
        upper=[_or(v.upBound, math.inf) for v in variables],
        integrality=[v.isInteger() for v in variables],
        integral_objective=integral_objective,
    )
    start_values = None
    if start is not None:
        start_values = np.zeros(model.columns)
        for variable, value in start:
            if id(variable) in column:
                start_values[column[id(variable)]] = value

    build_s = budget.spent_s
    outcome = solve_linear_model(model, options.after(build_s), start_values=start_values)
    if outcome.values is not None:
        for variable, value in zip(variables, outcome.values.tolist(), strict=True):
            variable.varValue = value

    return replace(outcome, build_s=build_s + outcome.build_s)


def _or(limit: float | None, default: float) -> float:
    return default if limit is None else float(limit)
