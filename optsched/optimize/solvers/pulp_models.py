"""PuLP problems: solved by HiGHS as arrays, and written to files without loss of digits in rows."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions
from optsched.optimize.solvers.highs import solve_linear_model
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import UsageError

LONGEST = 10**12
"""Integers below it have at most the 12 digits that PuLP writes."""


def solve_pulp_problem(
    problem: Any,
    options: SolveOptions,
    *,
    integral_objective: bool,
    start: Iterable[tuple[Any, float]] | None = None,
) -> RawOutcome:
    """Minimize a PuLP problem by HiGHS. Its variables get the values of the incumbent, if any.

    PuLP's own ``solve`` takes no start, no stop and no progress, and does not keep the time limit.
    `start`: variables with values. Those that it leaves out are 0, and those of other problems are
    ignored.
    """
    budget = options.budget()
    variables = problem.variables()
    model = arrays_of(problem, integral_objective, budget)
    values = None
    if start is not None:
        # By identity, since PuLP's variables overload == to make rows.
        column = {id(variable): k for k, variable in enumerate(variables)}
        values = np.zeros(model.columns)
        for variable, value in start:
            if id(variable) in column:
                values[column[id(variable)]] = value

    outcome = solve_linear_model(model, options.after(budget.spent_s), start_values=values)
    if outcome.values is not None:
        for variable, value in zip(variables, outcome.values.tolist(), strict=True):
            variable.varValue = value

    return outcome


def arrays_of(problem: Any, integral: bool, budget: Budget = NO_LIMIT) -> LinearModel:
    """Return a PuLP problem as arrays, with columns in the order of its variables.

    `integral`: whether every solution's objective is an integer. Once the budget is over,
    `OutOfTimeError` is raised.
    """
    from scipy.sparse import csr_array

    variables = problem.variables()
    column = {id(variable): k for k, variable in enumerate(variables)}
    # Compressed sparse rows, which scipy turns into the columns of a `LinearModel`.
    rows, columns, values, ends = _rows_of(problem), list[int](), list[float](), [0]
    for row in rows:
        budget.check("the model was handed over")
        columns += [column[id(variable)] for variable in row]
        values += row.values()
        ends.append(len(columns))

    shape = len(rows), len(variables)
    matrix = csr_array((np.array(values, dtype=np.float64), columns, ends), shape=shape).tocsc()
    matrix.eliminate_zeros()  # a factor of 0 is no entry
    cost = np.zeros(len(variables))
    for variable, factor in problem.objective.items():
        cost[column[id(variable)]] = factor

    def array_of(limits: Iterable[float | None], default: float) -> Any:
        return np.array([default if limit is None else limit for limit in limits], dtype=np.float64)

    return LinearModel(
        cost=cost,
        lower=array_of((v.lowBound for v in variables), -math.inf),
        upper=array_of((v.upBound for v in variables), math.inf),
        integrality=np.array([v.isInteger() for v in variables], dtype=np.int32),
        start=matrix.indptr.astype(np.int32),
        index=matrix.indices.astype(np.int32),
        value=matrix.data,
        row_lower=array_of((row.getLb() for row in rows), -math.inf),
        row_upper=array_of((row.getUb() for row in rows), math.inf),
        integral_objective=integral,
    )


def _rows_of(problem: Any) -> list[Any]:
    """Return the rows of a PuLP problem, in any version of PuLP."""
    rows = problem.constraints  # a mapping, in later versions a method
    return list(rows() if callable(rows) else rows.values())


def write_problem(problem: Any, format_name: str, path: str | Path, notes: Sequence[str]) -> None:
    """Write a PuLP problem as an LP or MPS file that begins with some notes.

    PuLP writes 12 significant digits. Rows of integers must not lose any; costs are rounded.
    """
    # PuLP's own writers give no sign that they lose digits, so each number is tried before.
    for row in _rows_of(problem):
        for number in (*row.values(), row.constant):
            # Fractions may be rounded, but an integer has to come back as it was.
            if number == round(number) and float(f"{number:.12g}") != number:
                raise UsageError(
                    f"export: found {round(abs(number))} in row {row.name}; expected numbers of at "
                    f"most 12 digits, as {format_name} files have them (json has all digits)"
                )

    (problem.writeLP if format_name == "lp" else problem.writeMPS)(str(path))
    mark = "\\" if format_name == "lp" else "*"
    text = Path(path).read_text(encoding="utf-8")
    lines = [f"{mark} {note}\n" for note in notes]
    Path(path).write_text("".join([*lines, text]), encoding="utf-8")
