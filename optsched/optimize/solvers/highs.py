"""HiGHS: solve a model given as arrays, within the limits, and return incumbent and bound.

Inside presolve, a relaxation or a round of cuts HiGHS makes no callback and checks no limit. For a
hindsight program of 33,000 nonzeros this lasts 2 seconds, for one of 355,000 nonzeros 12. So models
of more than a few thousand nonzeros run in a process of their own
(`optsched.problem.processes`), which can be ended from outside.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from optsched.bounds.timeline import Floats
from optsched.optimize.solvers import base, highs_worker
from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions, Status
from optsched.optimize.solvers.highs_worker import Job, Message
from optsched.problem.budget import work_time
from optsched.problem.errors import SolverError
from optsched.problem.processes import DiedError, Process, call_in_file

_INTEGRAL_ABS_GAP = 0.999
# The max nonzeros for which HiGHS checks limits often enough. Starting a process takes 0.2 s.
_ENTRIES_HERE = 5_000
# The seconds after the time limit in which a process may end by itself.
_GRACE_S = 1.0


def solve_linear_model(
    model: LinearModel, options: SolveOptions, *, start_values: Floats | None = None
) -> RawOutcome:
    """Minimize a model by HiGHS.

    `options`: ``warm_start`` is ignored. The time limit includes the start of a process. The solve
    ends within about a second of the limit or an interruption.
    `start_values`: a solution, which is the incumbent until there is a better one.
    """
    begin, native_options = time.perf_counter(), highs_options(options, model.integral_objective)
    start = None if start_values is None else np.asarray(start_values, dtype=np.float64)
    # The last two: whether there are integers, and when the time limit began to run.
    job = Job(arguments(model), native_options, start, bool(model.integrality.any()), time.time())
    record = _Record(options.progress, begin)
    if model.entries > _ENTRIES_HERE:
        _solve_apart(job, record, options)
    else:
        cancelled = threading.Event()
        solve = partial(highs_worker.solve, job, record.hear, cancelled.is_set)
        base.run_interruptibly(solve, cancel=cancelled.set, stop=options.stop)

    return _outcome(model, job, record, time.perf_counter() - begin)


def highs_options(options: SolveOptions, integral_objective: bool) -> dict[str, Any]:
    """Return the options of HiGHS by name.

    For an integral objective a gap below 1 is a proof, since the bound may be rounded up.
    """
    values: dict[str, Any] = {
        "mip_rel_gap": float(options.mip_rel_gap),
        "mip_abs_gap": _INTEGRAL_ABS_GAP if integral_objective else 0.0,
        "threads": options.thread_count,
        "random_seed": options.seed,
        "time_limit": options.time_limit,
    }
    if options.log_path is not None:
        values["log_file"] = str(options.log_path)

    return values


def arguments(model: LinearModel) -> tuple[Any, ...]:
    """Return a model as the tuple that `highs_worker.Job` holds."""
    m = model
    columns, rows = (m.cost, m.lower, m.upper), (m.row_lower, m.row_upper)
    matrix = m.start, m.index, m.value
    return (m.columns, m.rows, m.entries, *columns, *rows, *matrix, m.integrality)


@dataclass(eq=False)
class _Record:
    """What HiGHS has reported so far: a solution, the best bound, and how it ended.

    ``incumbent`` is its own number for the objective, which may be ahead of the solution.
    """

    progress: Callable[[base.Progress], None] | None
    begin: float  # of the solve, a time of `time.perf_counter`
    objective: float | None = None
    values: Floats | None = None
    bound: float | None = None
    native: str | None = None  # how it ended
    failed: bool = False
    incumbent: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, message: Message) -> None:
        """Record one message of `highs_worker.solve`."""
        kind, *content = message
        with self.lock:
            if kind == "refused":
                raise SolverError(f"HiGHS: {content[0]}")
            if kind == "found":
                objective, values = content
                # The final solution is told once more at the end: of equal ones the last stays.
                if self.objective is None or objective <= self.objective:
                    self.objective, self.values = objective, values
            elif kind == "bounds":
                # A bound holds once it was told, even if a later one is lower.
                self.incumbent, bound = content
                known = [b for b in (bound, self.bound) if b is not None]
                self.bound = max(known, default=None)
            elif kind == "done":
                # An interruption can leave the bound unset although a callback reported one.
                self.native, bound = content
                self.bound = self.bound if bound is None else bound
                self.incumbent = self.objective
            elif kind == "failed":
                self.native, self.failed = content[0], True

            if self.progress is not None and kind in ("bounds", "done", "beat"):
                elapsed = time.perf_counter() - self.begin
                self.progress(base.Progress(elapsed, self.incumbent, self.bound))


def _solve_apart(job: Job, record: _Record, options: SolveOptions) -> None:
    """Solve a job in a process of its own, and end it at the limit or when cancelled."""
    worker, ends = Process(quiet=True), list[str]()  # why it was ended from here, if it was
    deadline = work_time() + options.time_limit + _GRACE_S

    def end() -> None:
        # It is called until the process has ended. The first reason counts.
        ends.append("kTimeLimit" if work_time() >= deadline else "kInterrupt")
        worker.end()

    def talk() -> None:
        try:
            # By file, since to import the package would take seconds.
            solve = call_in_file, highs_worker.__file__, "solve_apart"
            worker.ask(*solve, tuple(job), on_message=record.hear)
        except DiedError as died:
            native = f"{ends[0]}, ended from outside" if ends else f"its process {died}"
            # A process that died after it had said how the solve ended has done its work.
            if record.native is None:
                record.native, record.failed = native, not ends

    try:
        base.run_interruptibly(talk, cancel=end, stop=options.stop, deadline=deadline)
    finally:
        worker.end()


def _outcome(model: LinearModel, job: Job, record: _Record, seconds: float) -> RawOutcome:
    """Return what a record proves about a model, after so many seconds."""
    # Behind a comma stands that the process was ended from outside (`_solve_apart`).
    native = record.native or ""
    status_name = "" if record.failed else native.partition(",")[0]
    mapped = base.HIGHS_STATUS.get(status_name, Status.ERROR)

    # Without any solution of the model there is neither a bound nor an incumbent.
    bound, values = record.bound, record.values
    if mapped is Status.INFEASIBLE:
        bound = values = None
    elif values is None:
        values = job.start  # it had no time to accept the start, which is an incumbent

    objective = None if values is None else _value(model, values)
    if bound is not None and model.integral_objective:
        bound = base.round_up_bound(bound)

    status = base.settle_status(
        mapped, objective, bound, integral_objective=model.integral_objective
    )
    return RawOutcome(status, objective, bound, values, native, seconds)


def _value(model: LinearModel, values: Floats) -> float:
    """Return the objective of a solution, in integers if it is one."""
    if not model.integral_objective:
        return float(model.cost @ values)

    # Then all columns with a cost are integers, of which the values have rounding errors. None is
    # negative, and those that are 0 add nothing.
    used = np.flatnonzero(values > 0.5)
    whole = model.cost[used].astype(np.int64) * np.rint(values[used]).astype(np.int64)
    return int(whole.sum())
