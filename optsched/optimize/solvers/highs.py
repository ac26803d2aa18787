"""HiGHS: a model as arrays in, incumbent and bound out, within the limits.

Inside presolve, a relaxation or a round of cuts HiGHS makes no callback and looks at no limit: of
the hindsight programs, 33,000 nonzeros take it 2 seconds, 355,000 take it 12 in which it hears
nothing. Models of more than a few thousand nonzeros therefore go to a process of their own
(`optsched.optimize.solvers.highs_worker`), which is ended from outside. `multiprocessing` would
run the user's script once more in it, unless that has a guard.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.solvers import highs_worker
from optsched.optimize.solvers.base import (
    HIGHS_STATUS,
    LinearModel,
    Progress,
    RawOutcome,
    SolveOptions,
    Status,
    run_interruptibly,
    settle_status,
)
from optsched.optimize.solvers.highs_worker import Job, Message
from optsched.problem.errors import SolverError

_INTEGRAL_ABS_GAP = 0.999
_ENTRIES_HERE = 5_000
"""Nonzeros up to which HiGHS looks for limits often enough: starting a process takes 0.2 s."""
_GRACE_S = 1.0
"""Seconds that a process has to end by itself after the time limit."""
_LONGEST_S = 1e8
"""Time limits from here on are none: three years."""
_FEASIBILITY = 1e-6
_STDERR_CHARS = 300


def highs_version() -> str:
    """Return the version of highspy."""
    import highspy

    return str(highspy.Highs().version())


def solve_linear_model(
    model: LinearModel,
    options: SolveOptions,
    *,
    start_values: NDArray[np.float64] | None = None,
) -> RawOutcome:
    """Minimize a model by HiGHS.

    Parameters
    ----------
    model : LinearModel
    options : SolveOptions
        ``warm_start`` is not read: see ``start_values``. The time limit includes the start of a
        process; it and an interruption are exceeded by at most about a second.
    start_values : ndarray of float64, shape (columns,), optional
        A solution to start from.

    Returns
    -------
    RawOutcome
        After Ctrl-C (in the main thread), a set ``options.stop`` or a limit: what was found. If
        HiGHS crashes or runs out of memory: the status ``error``, with what was found until then.

    Raises
    ------
    SolverError
        HiGHS refuses the model, or its process cannot be started.
    """
    begin = time.perf_counter()
    job = Job(
        model=arguments(model),
        options=highs_options(options, integral_objective=model.integral_objective),
        start=None if start_values is None else np.asarray(start_values, dtype=np.float64),
        mip=bool(model.integrality.any()),
        began=time.time(),
    )
    found = _Found(options.progress, begin)
    if model.entries <= _ENTRIES_HERE:
        cancelled = threading.Event()
        run_interruptibly(
            lambda: highs_worker.solve(job, found.hear, cancelled.is_set),
            cancel=cancelled.set,
            stop=options.stop,
        )
    else:
        _solve_apart(job, found, options)
    if found.refused is not None:
        raise SolverError(f"HiGHS: {found.refused}")
    return _outcome(model, job, found, time.perf_counter() - begin)


def highs_options(options: SolveOptions, *, integral_objective: bool) -> dict[str, Any]:
    """Return the HiGHS options by name.

    The absolute gap is 0, unless the objective is integral: then a gap below 1 proves the
    incumbent optimal, since the bound may be rounded up.
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
    """Return a model as `highs_worker.Job` has it."""
    return (
        model.columns, model.rows, model.entries, model.cost, model.lower, model.upper,
        model.row_lower, model.row_upper, model.start, model.index, model.value,
        model.integrality,
    )  # fmt: skip


@dataclass(eq=False)
class _Found:
    """What HiGHS has told so far."""

    progress: Callable[[Progress], None] | None
    begin: float
    objective: float | None = None
    values: NDArray[np.float64] | None = None
    bound: float | None = None
    native: str | None = None
    failed: bool = False
    refused: str | None = None
    incumbent: float | None = None
    one: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, message: Message) -> None:
        """Take in one message of `highs_worker.solve`."""
        kind, *rest = message
        with self.one:
            if kind == "incumbent":
                self._better(*rest)
            elif kind == "bounds":
                self.incumbent, bound = rest
                if bound is not None:
                    self.bound = bound if self.bound is None else max(self.bound, bound)
            elif kind == "done":
                self.native, objective, bound, values = rest
                if values is not None:
                    self._better(objective, values)
                # An interruption can leave the bound unset although progress had reported one.
                self.bound = self.bound if bound is None else bound
                self.incumbent = self.objective
            elif kind == "refused":
                self.refused = rest[0]
            elif kind == "failed":
                self.fail(rest[0])
            if self.progress is not None and kind in ("bounds", "done", "beat"):
                elapsed = time.perf_counter() - self.begin
                self.progress(Progress(elapsed, self.incumbent, self.bound))

    def fail(self, why: str) -> None:
        """Record that HiGHS failed."""
        self.native, self.failed = why, True

    @property
    def ended(self) -> bool:
        """Whether HiGHS has said how it ended."""
        return self.native is not None or self.refused is not None

    def _better(self, objective: float | None, values: NDArray[np.float64]) -> None:
        if objective is not None and (self.objective is None or objective <= self.objective):
            self.objective, self.values = objective, values


def _solve_apart(job: Job, found: _Found, options: SolveOptions) -> None:
    """Solve a job in a process of its own, and end it at the limit or when cancelled."""
    with tempfile.TemporaryFile() as errors:
        worker = _started(errors)
        ends: list[str] = []

        def end(why: str) -> None:
            ends.append(why)
            worker.kill()

        limit = threading.Timer(min(options.time_limit, _LONGEST_S) + _GRACE_S, end, ["kTimeLimit"])
        limit.daemon = True
        limit.start()
        try:
            run_interruptibly(
                lambda: _converse(worker, job, found),
                cancel=lambda: end("kInterrupt"),
                stop=options.stop,
            )
        finally:
            limit.cancel()
            if not found.ended and not ends:
                with suppress(subprocess.TimeoutExpired):
                    worker.wait(_GRACE_S)
            worker.kill()
            worker.wait()
        if not found.ended and ends:
            found.native = f"{ends[0]}, ended from outside"
        elif not found.ended:
            found.fail(_death(worker.returncode, errors))


def _started(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", str(Path(highs_worker.__file__))]
    # It imports what this process can import.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, env=environment,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
        )  # fmt: skip
    except OSError as error:
        raise SolverError(f"HiGHS: its process {command[0]} cannot be started: {error}") from error


def _converse(worker: subprocess.Popen[bytes], job: Job, found: _Found) -> None:
    """Hand a process its job and hear what it tells, to the end."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(OSError), worker.stdin as orders:  # it may have ended already
        pickle.dump(tuple(job), orders, protocol=5)
    with worker.stdout as told:
        while not found.ended:
            try:
                message = pickle.load(told)
            except Exception:  # its end, or half a message
                return
            found.hear(message)


def _death(code: int, errors: IO[bytes]) -> str:
    """Return why a process ended without an answer."""
    how = f"exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        how = f"signal {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    errors.seek(0)
    said = " ".join(errors.read().decode(errors="replace").split())[-_STDERR_CHARS:]
    return f"its process ended by {how}" + (f": {said}" if said else "")


def _outcome(model: LinearModel, job: Job, found: _Found, seconds: float) -> RawOutcome:
    native = found.native or ""
    mapped = Status.ERROR
    if not found.failed:
        mapped = HIGHS_STATUS.get(native.partition(",")[0], Status.ERROR)
    objective, bound, values = found.objective, found.bound, found.values
    if mapped is Status.INFEASIBLE:
        objective = bound = values = None
    elif objective is None and job.start is not None and _feasible(model, job.start):
        # HiGHS had no time to take it up, but it is an incumbent.
        values = job.start
        objective = float(model.cost @ values)
    status = settle_status(mapped, objective, bound, integral_objective=model.integral_objective)
    return RawOutcome(status, objective, bound, values, native, 0.0, seconds)


def _feasible(model: LinearModel, values: NDArray[np.float64]) -> bool:
    """Whether values keep every bound, row and integrality."""
    whole = model.integrality == 1
    if np.abs(values[whole] - np.rint(values[whole])).max(initial=0.0) > _FEASIBILITY:
        return False
    use = model.value * np.repeat(values, np.diff(model.start))
    rows = np.bincount(model.index, weights=use, minlength=model.rows)
    slack = _FEASIBILITY * np.maximum(1.0, np.abs(rows))
    return bool(
        (values >= model.lower - _FEASIBILITY).all()
        and (values <= model.upper + _FEASIBILITY).all()
        and (rows >= model.row_lower - slack).all()
        and (rows <= model.row_upper + slack).all()
    )
