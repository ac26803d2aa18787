"""CP-SAT: solve a model with limits, progress and interruption, and doubt its proofs.

CP-SAT counts in 64-bit integers. Two of its rules are wrong in OR-Tools 9.15, and are switched off
(`_WITHOUT_WRONG_RULES`):

- Presolve sums up the Boolean terms of a row in a 32-bit integer, to see whether an enforcement
  literal is needed. Above 2^31 the sum wraps around, the literal is removed, and a row that held
  under a condition holds always. Only the search for at-most-ones in rows does so.
- The detection of "greater than at least one of" reads the rows that a clause enforces, and adds a
  propagator that excludes solutions.

Both ruled out optimal schedules of two and three requests. A proof that contradicts a known
solution is not believed either: the model is then solved once more without presolve.

**Sizes.** CP-SAT refuses a model in which the sum of a row may leave 64 bits. infermax keeps levels
below 2^52 (`Problem.shrink`). Bounds are read as integers, since their floats are rounded.
"""

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from optsched.optimize.solvers import base
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.problem.errors import UsageError

_WITHOUT_WRONG_RULES = {
    "presolve_inclusion_work_limit": 0,
    "auto_detect_greater_than_at_least_one_of": False,
}


def solve_cp_model(
    model: Any, options: SolveOptions, *, read: list[Any], known: int | None = None
) -> RawOutcome:
    """Minimize a CP-SAT model with an integer objective.

    `read`: the expressions whose values the outcome has, in this order. If a proof contradicts a
    `known` objective, the model is solved once more, without presolve.
    """
    first = _run(model, options, read, {})
    if not _contradicts(first, known):
        return first

    # In the time that is left. The second outcome is believed.
    second = _run(model, options.after(first.solve_s), read, {"cp_model_presolve": False})
    return replace(second, solve_s=first.solve_s + second.solve_s)


def _contradicts(outcome: RawOutcome, known: int | None) -> bool:
    """Whether a proof excludes a solution that exists: the known one, or the outcome's own."""
    values = [value for value in (known, outcome.objective) if value is not None]
    if not values:
        return False

    best = min(values)
    above = outcome.bound is not None and outcome.bound > best
    return outcome.status is Status.INFEASIBLE or above


def _run(
    model: Any, options: SolveOptions, read: list[Any], settings: Mapping[str, object]
) -> RawOutcome:
    """Solve a model once, with CP-SAT's parameters `settings` beside those of the options.

    `read`: the expressions whose values the outcome has.
    """
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    parameters = solver.parameters
    if options.time_limit_s is not None:
        parameters.max_time_in_seconds = float(options.time_limit_s)

    for name, value in {
        "num_workers": options.thread_count,
        "random_seed": options.seed,
        "relative_gap_limit": float(options.mip_rel_gap),
        "absolute_gap_limit": 0.0,
        "catch_sigint_signal": False,  # `run_interruptibly` does
        **_WITHOUT_WRONG_RULES,
        **settings,
    }.items():
        setattr(parameters, name, value)

    begin = time.perf_counter()
    callback = _reporting(solver, options, begin) if options.progress else None
    statuses: list[Any] = []  # one, from the other thread

    with ExitStack() as stack:
        if options.log_path is not None:
            file = stack.enter_context(open(options.log_path, "a", encoding="utf-8"))
            parameters.log_search_progress = True
            parameters.log_to_stdout = False
            solver.log_callback = lambda line: file.write(line + "\n")

        def work() -> None:
            statuses.append(solver.solve(model, callback))

        # CP-SAT keeps the time limit itself, so no deadline is handed over.
        base.run_interruptibly(work, cancel=solver.stop_search, stop=options.stop)
        solver.log_callback = None  # the file is closed from here on

    return _outcome(model, solver, statuses[0], read, time.perf_counter() - begin)


def _outcome(model: Any, solver: Any, status: Any, read: list[Any], solve_s: float) -> RawOutcome:
    """Return what a solver that has run has to say."""
    native = solver.status_name(status)
    if native == "MODEL_INVALID":
        raise UsageError(
            "method: found numbers of which CP-SAT says that they may overflow 64-bit integers; "
            f"expected smaller ones, or another method ({' '.join(model.validate().split())[:200]})"
        )

    # CP-SAT reports 0 for what it does not have, so only the status says what to read.
    mapped = base.CPSAT_STATUS.get(native, Status.ERROR)
    objective = bound = values = None
    if mapped in (Status.OPTIMAL, Status.FEASIBLE):
        objective = round(solver.objective_value)
        values = np.array([solver.value(x) for x in read], dtype=np.int64)

    if mapped in (Status.OPTIMAL, Status.FEASIBLE, Status.NO_INCUMBENT):
        bound = _exact_bound(model, solver)
        # Before the end of the presolve there is no bound, and the field holds its default.
        if mapped is Status.NO_INCUMBENT and solver.best_objective_bound == 0.0:
            bound = None

    settled = base.settle_status(mapped, objective, bound, integral_objective=True)
    return RawOutcome(settled, objective, bound, values, native, solve_s)


def _exact_bound(model: Any, solver: Any) -> int | None:
    """Return CP-SAT's lower bound as an exact integer, or None if it is infinite.

    `best_objective_bound` is a float, and is rounded where presolve has divided the objective by a
    factor. `inner_objective_lower_bound` is an integer, and bounds the objective without its
    constant (the offset).
    """
    if not math.isfinite(solver.best_objective_bound):
        return None

    # The objective is minimized and has integer terms (`solve_cp_model`), so no factor scales it.
    offset = round(model.proto.objective.offset)
    return int(solver.response_proto.inner_objective_lower_bound) + offset


def _reporting(solver: Any, options: SolveOptions, begin: float) -> Any:
    """Make a solver report every change of its bound. Return the callback for its solutions.

    The callback reports too. `begin`: the time of `time.perf_counter` that reports count from.
    """
    from ortools.sat.python import cp_model

    incumbent: list[float | None] = [None]  # one entry, which the callback changes

    def report(bound: float) -> None:
        assert options.progress is not None
        known = bound if math.isfinite(bound) else None
        options.progress(base.Progress(time.perf_counter() - begin, incumbent[0], known))

    class Callback(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            incumbent[0] = self.objective_value
            report(self.best_objective_bound)

    solver.best_bound_callback = report
    return Callback()
