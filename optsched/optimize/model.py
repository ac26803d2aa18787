"""The program of a problem in PuLP, to which rows of one's own may be added."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optsched.optimize.consistency import AGREEMENT
from optsched.optimize.exact import Exact, accept, question
from optsched.optimize.formulations import Answer, Formulation, Task
from optsched.optimize.formulations.base import Readable
from optsched.optimize.interval import Interval
from optsched.optimize.solve import Result, result_of
from optsched.optimize.solvers.base import LinearModel, SolveOptions, Status, round_up_bound
from optsched.problem.budget import Progress
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.workloads.problem import Problem, as_problem

_ORIGIN = "HiGHS, of your model"


@dataclass(eq=False)
class Model:
    """A program to which rows may be added, as `model` returns it.

    Variables have keys. In rounds ``model["x", i, t]`` is 1 if request i starts at t, and runs in
    rounds t + 1 to t + its output tokens. In seconds they are those of Kim et al. 2024, section
    3.3, for request i and batch j from 1 on: ``model["c", i, j]`` are the tokens that it processes,
    and ``model["g", i, j]`` is 1 if it produces a token (docs/formulations.md has all).

    Parameters
    ----------
    task : Problem
    formulation : Formulation
    readable : Readable

    Attributes
    ----------
    program : pulp.LpProblem
        The program. Rows may be added to it, with variables of one's own.
    """

    task: Task
    formulation: Formulation
    readable: Readable

    @property
    def program(self) -> Any:
        """The PuLP problem."""
        return self.readable.problem

    @program.setter
    def program(self, problem: Any) -> None:
        if problem is not self.readable.problem:  # ``model.program += row`` gives it back
            raise UsageError("model: found another PuLP problem; expected rows added to its own")

    def __repr__(self) -> str:
        size = f"{self.program.numVariables()} variables, {self.program.numConstraints()} rows"
        return f"<Model {self.formulation.name} of {self.task.instance.name!r}: {size}>"

    def __getitem__(self, key: tuple[str | int, ...]) -> Any:
        """Return a variable by its name and places."""
        try:
            return self.readable.variables[key]
        except KeyError:
            known = dict.fromkeys(f"{name}{place}" for name, *place in self.readable.variables)
            ends = f"{next(iter(known))} to {next(reversed(known))}"
            raise UsageError(f"model: found no variable {key!r}; expected {ends}") from None

    def start(self, request: int) -> Any:
        """Return the start of a request as an expression, in rounds.

        Parameters
        ----------
        request : int
            From 0 on.
        """
        n = self.task.instance.n
        if request not in range(n):
            raise UsageError(f"model: request: found {request!r}; expected 0 to {n - 1}")

        variables = self.readable.variables.items()
        return _total((k[2], var) for k, var in variables if k[0] == "x" and k[1] == request)

    def prefills(self, place: int) -> Any:
        """Return how many requests prefill in a round, or in a batch, as an expression.

        Parameters
        ----------
        place : int
            A round or a batch, from 1 on.
        """
        variables = self.readable.variables.items()
        if self.task.instance.in_rounds:
            return _total((1, var) for k, var in variables if k[0] == "x" and k[2] == place - 1)

        signs = {"cz": 1, "dg": -1}  # what is processed, but for decodes
        return _total(
            (signs[str(k[0])], var) for k, var in variables if k[0] in signs and k[2] == place
        )

    def add(self, row: Any, name: str | None = None) -> None:
        """Add a row, such as ``model.prefills(5) <= 3``.

        Parameters
        ----------
        row : pulp.LpConstraint
            Or True, of a comparison without variables, which changes nothing.
        name : str, optional
        """
        if row is False:
            raise UsageError("model: found a row without variables that never holds")
        if row is True:
            return
        if not hasattr(row, "sense"):
            raise UsageError(f"model: found {row}; expected a row, with <=, >= or ==")

        from pulp import PulpError

        try:
            self.program.addConstraint(row, name)
        except PulpError as error:  # the name is another row's
            raise UsageError(f"model: name: {error}") from None

    def arrays(self) -> LinearModel:
        """Return the program as arrays, whose columns are in the order of ``program.variables()``.

        `scipy.optimize.milp` and HiGHS take them as they are.
        """
        from optsched.optimize.solvers.pulp_models import arrays_of

        return arrays_of(self.program, self.readable.integral)

    def write(self, path: str | Path, format_name: str = "lp") -> None:
        """Write the program as an LP or MPS file.

        Parameters
        ----------
        path : path
        format_name : {"lp", "mps"}
        """
        from optsched.optimize.solvers.pulp_models import write_problem

        write_problem(self.program, format_name, path, self.readable.notes)

    def solve(
        self,
        *,
        time_limit_s: float | None = 60.0,
        threads: int | None = None,
        seed: int = 0,
        log: str | Path | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Result:
        """Minimize the objective over what all rows allow, by HiGHS, and have the answer judged.

        The bound holds for the schedules that the rows allow, as the result's scope says. The
        judge knows no rows: it says what the schedule is worth, and that it breaks no other rule.

        Parameters
        ----------
        time_limit_s : float or None
        threads : int, optional
        seed : int
        log : path, optional
        progress : callable, optional
            These are as of `optsched.solve`.

        Returns
        -------
        Result

        Raises
        ------
        SolverError
            The schedule is not feasible, or not worth what HiGHS says, which is so if the objective
            of the program was changed.
        """
        from optsched.optimize.solvers.pulp_models import solve_pulp_problem

        options = SolveOptions(time_limit_s, 0.0, threads, seed, log, progress=progress)
        interval, is_whole = Interval(self.task, options.budget()), self.readable.integral
        in_values = options.reporting(self.readable.value)
        raw = solve_pulp_problem(self.program, in_values, integral_objective=is_whole)
        value, bound = (self._in_values(end) for end in (raw.objective, raw.bound))
        if raw.bound is not None and is_whole:
            bound = self._in_values(round_up_bound(raw.bound))
        is_proved = raw.status is Status.OPTIMAL and None not in (value, bound)
        if is_proved and math.isclose(value or 0, bound or 0, rel_tol=AGREEMENT):
            bound = value  # HiGHS has floats, and so has its proof

        schedule = None if raw.values is None else self.readable.schedule()
        answer = Answer(raw.status, schedule, value, bound, raw.native_status, raw.solve_s)
        # The rows of one's own leave out schedules, too.
        left_out = self.formulation.leaves_out(self.task) | {"own_rows"}
        with_rows = replace(self.formulation, leaves_out=lambda task: left_out)
        method = "pulp" if self.task.instance.in_rounds else "pulp-bigm"
        exact = Exact(with_rows, _ORIGIN, with_rows.methods[method], self.task)
        status = accept(exact, interval, answer)
        result = result_of((with_rows, method), interval, answer, status, options)
        return replace(result, method=_ORIGIN)

    def _in_values(self, number: float | None) -> float | None:
        """Return what a number of the program means in the metric; None if it is unknown."""
        is_known = number is not None and math.isfinite(number)
        return self.readable.value(number) if is_known and number is not None else None


def _total(terms: Any) -> Any:
    """Return the sum of factors times variables as an expression."""
    import pulp

    return pulp.lpSum(factor * var for factor, var in terms)


def model(problem: Problem | Instance | str | Path, *, length: int | None = None) -> Model:
    """Return the program of a problem, to which rows may be added.

    In rounds it is the hindsight program of Jaillet et al. 2025, whose starts are rounds of the
    instance and not limited to what an optimum of the unchanged problem needs. In seconds it is the
    program of Kim et al. 2024 with its Big-M rows.

    Parameters
    ----------
    problem : Problem
        Or an instance in rounds, its file or its name.
    length : int, optional
        The round by which all runs end, or the number of batches. Default: what suffices to run the
        requests one by one after the last arrival. A row that needs more time needs more.

    Raises
    ------
    UsageError
        The program has no such objective, limit or feature.

    Examples
    --------
    >>> import optsched
    >>> model = optsched.model("tiny")
    >>> for t in range(1, model.readable.length + 1):
    ...     model.add(model.prefills(t) <= 1)
    >>> model.solve().value
    38
    """
    formulation, task = question(as_problem(problem), None, {})
    assert formulation.readable is not None
    return Model(task, formulation, formulation.readable(task, length))
