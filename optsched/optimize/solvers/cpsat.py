"""CP-SAT: solve a model with limits, progress and interruption."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from optsched.optimize.solvers.base import (
    CPSAT_STATUS,
    Progress,
    RawOutcome,
    SolveOptions,
    Status,
    run_interruptibly,
    settle_status,
)


def cpsat_version() -> str:
    """Return the version of OR-tools."""
    from importlib.metadata import version

    return version("ortools")


def solve_cp_model(
    model: Any,
    options: SolveOptions,
    *,
    read: list[Any],
    scale: float = 1.0,
    integral_objective: bool = True,
    build_s: float = 0.0,
) -> RawOutcome:
    """Minimize a CP-SAT model.

    Parameters
    ----------
    model : ortools.sat.python.cp_model.CpModel
        A model with an objective. Hints are part of the model.
    options : SolveOptions
        ``warm_start`` is ignored; give hints to the model instead.
    read : list of variables or expressions
        Their values are the ``values`` of the outcome, in this order.
    scale : float
        Objective and bound are divided by it.
    integral_objective : bool
        Whether the scaled objective of every solution is an integer.
    build_s : float
        The seconds spent on building the model, for the outcome.

    Returns
    -------
    RawOutcome
        After Ctrl-C (in the main thread), a set ``options.stop`` or a limit, it holds what was
        found until then.
    """
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    if options.time_limit_s is not None:
        parameters.max_time_in_seconds = float(options.time_limit_s)
    parameters.num_workers = options.thread_count
    parameters.random_seed = options.seed
    parameters.relative_gap_limit = float(options.mip_rel_gap)
    parameters.absolute_gap_limit = 0.0
    parameters.catch_sigint_signal = False

    begin = time.perf_counter()
    callback = _reporting(solver, options, begin, scale) if options.progress else None
    statuses: list[Any] = []
    with ExitStack() as stack:
        if options.log_path is not None:
            file = stack.enter_context(open(options.log_path, "a", encoding="utf-8"))
            parameters.log_search_progress = True
            parameters.log_to_stdout = False
            solver.log_callback = lambda line: file.write(line + "\n")
        run_interruptibly(
            lambda: statuses.append(solver.solve(model, callback)),
            cancel=solver.stop_search,
            stop=options.stop,
        )
        solver.log_callback = None
    solve_s = time.perf_counter() - begin

    native = solver.status_name(statuses[0])
    mapped = CPSAT_STATUS.get(native, Status.ERROR)
    objective = bound = values = None
    if mapped in (Status.OPTIMAL, Status.FEASIBLE):
        objective = solver.objective_value / scale
        values = np.array([solver.value(x) for x in read], dtype=np.float64)
    if mapped in (Status.OPTIMAL, Status.FEASIBLE, Status.NO_INCUMBENT):
        bound = solver.best_objective_bound / scale
        # Before the end of the presolve there is no bound, and the field holds its default.
        if not math.isfinite(bound) or (mapped is Status.NO_INCUMBENT and bound == 0.0):
            bound = None
    status = settle_status(mapped, objective, bound, integral_objective=integral_objective)
    return RawOutcome(status, objective, bound, values, native, build_s, solve_s)


def _reporting(solver: Any, options: SolveOptions, begin: float, scale: float) -> Any:
    """Make a solver report every change of its bound. Return the callback for its solutions."""
    from ortools.sat.python import cp_model

    incumbent: list[float | None] = [None]

    def report(bound: float) -> None:
        assert options.progress is not None
        known = bound / scale if math.isfinite(bound) else None
        options.progress(Progress(time.perf_counter() - begin, incumbent[0], known))

    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            incumbent[0] = self.objective_value / scale
            report(self.best_objective_bound)

    solver.best_bound_callback = report
    return Callback()
