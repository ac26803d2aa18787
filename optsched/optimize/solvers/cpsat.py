"""CP-SAT: run a model with limits, progress and interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        With an objective; hints are part of it.
    options : SolveOptions
        ``warm_start`` is not read: give hints to the model.
    read : list of variables or expressions
        What ``values`` of the outcome holds, in this order.
    scale : float
        Objective and bound are divided by it.
    integral_objective : bool
        Whether the scaled objective of every solution is an integer.
    build_s : float
        Recorded in the outcome.

    Returns
    -------
    RawOutcome
        After Ctrl-C (in the main thread), a set ``options.stop`` or a limit: what was found.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    if options.time_limit_s is not None:
        parameters.max_time_in_seconds = float(options.time_limit_s)
    parameters.num_workers = options.thread_count
    parameters.random_seed = options.seed
    parameters.relative_gap_limit = float(options.mip_rel_gap)
    parameters.absolute_gap_limit = 0.0
    parameters.catch_sigint_signal = False

    begin = time.perf_counter()
    watch = _Watch(options.progress, begin, scale)
    callback = None
    if options.progress is not None:
        callback = _solution_callback(cp_model, watch)
        solver.best_bound_callback = watch.bound_found
    statuses: list[Any] = []
    with _log(solver, options):
        run_interruptibly(
            lambda: statuses.append(solver.solve(model, callback)),
            cancel=solver.stop_search,
            stop=options.stop,
        )
    solve_s = time.perf_counter() - begin

    native = solver.status_name(statuses[0])
    mapped = CPSAT_STATUS.get(native, Status.ERROR)
    objective = bound = values = None
    if mapped in (Status.OPTIMAL, Status.FEASIBLE):
        objective = solver.objective_value / scale
        values = np.array([solver.value(x) for x in read], dtype=np.float64)
    if mapped in (Status.OPTIMAL, Status.FEASIBLE, Status.NO_INCUMBENT):
        bound = solver.best_objective_bound / scale
        # Before the presolve ends there is no bound, and the field holds its default.
        if not math.isfinite(bound) or (mapped is Status.NO_INCUMBENT and bound == 0.0):
            bound = None
    status = settle_status(mapped, objective, bound, integral_objective=integral_objective)
    return RawOutcome(status, objective, bound, values, native, build_s, solve_s)


class _Watch:
    """Keeps the best incumbent and bound, and reports every change."""

    def __init__(
        self, progress: Callable[[Progress], None] | None, begin: float, scale: float
    ) -> None:
        self.progress = progress
        self.begin = begin
        self.scale = scale
        self.incumbent: float | None = None
        self.bound: float | None = None

    def bound_found(self, bound: float) -> None:
        self.bound = bound / self.scale if math.isfinite(bound) else None
        self._report()

    def solution_found(self, objective: float, bound: float) -> None:
        self.incumbent = objective / self.scale
        self.bound_found(bound)

    def _report(self) -> None:
        if self.progress is not None:
            elapsed = time.perf_counter() - self.begin
            self.progress(Progress(elapsed, self.incumbent, self.bound))


def _solution_callback(cp_model: Any, watch: _Watch) -> Any:
    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            watch.solution_found(self.objective_value, self.best_objective_bound)

    return Callback()


@contextmanager
def _log(solver: Any, options: SolveOptions) -> Iterator[None]:
    if options.log_path is None:
        yield
        return
    with open(options.log_path, "a", encoding="utf-8") as file:
        solver.parameters.log_search_progress = True
        solver.parameters.log_to_stdout = False
        solver.log_callback = lambda line: file.write(line + "\n")
        yield
        solver.log_callback = None
