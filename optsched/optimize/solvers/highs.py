"""HiGHS: a model as arrays in, incumbent and bound out, within the limits.

Models of more than a few thousand nonzeros go to a process of their own
(`optsched.optimize.solvers.highs_worker`), which is ended where it does not end in time.
"""

from __future__ import annotations

import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
"""Nonzeros up to which HiGHS looks for limits often enough: starting a process takes 0.2 s; with
20,000 nonzeros its looks are 1.4 s apart, with 90,000 four and more."""
_GRACE_S = 1.0
"""Seconds that a process has to end by itself after the time limit or an interruption."""
_POLL_S = 0.05
_BEAT_S = 0.5
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
        model=_arguments(model),
        options=highs_options(options, integral_objective=model.integral_objective),
        start=None if start_values is None else np.asarray(start_values, dtype=np.float64),
        mip=bool(model.integrality.any()),
        began=time.time(),
    )
    found = _Found(options.progress, begin)
    cancelled = threading.Event()
    host = _here if model.entries <= _ENTRIES_HERE else _apart
    run_interruptibly(lambda: host(job, found, cancelled), cancel=cancelled.set, stop=options.stop)
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


def configured(options: SolveOptions, *, integral_objective: bool) -> Any:
    """Return a ``highspy.Highs`` with the options set and a log to file only."""
    named = highs_options(options, integral_objective=integral_objective)
    try:
        return highs_worker.configured(named)
    except ValueError as error:
        raise SolverError(f"HiGHS: {error}") from error


def pass_model(highs: Any, model: LinearModel) -> None:
    """Hand a model over as arrays.

    Raises
    ------
    SolverError
        HiGHS refuses it.
    """
    try:
        highs_worker.pass_model(highs, _arguments(model))
    except ValueError as error:
        raise SolverError(f"HiGHS: {error}") from error


def _arguments(model: LinearModel) -> tuple[Any, ...]:
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
    told: float = 0.0

    def hear(self, message: Message) -> None:
        """Take in one message of `highs_worker.solve`."""
        kind, *rest = message
        if kind == "incumbent":
            self._better(*rest)
        elif kind == "bounds":
            incumbent, bound = rest
            if bound is not None:
                self.bound = bound if self.bound is None else max(self.bound, bound)
            self.incumbent = incumbent
            self._report()
        elif kind == "done":
            self.native, objective, bound, values = rest
            if values is not None:
                self._better(objective, values)
            # An interruption can leave the bound unset although progress had reported one.
            self.bound = self.bound if bound is None else bound
            self.incumbent = self.objective
            self._report()
        elif kind == "refused":
            self.refused = rest[0]
        else:
            self.fail(rest[0])

    def beat(self) -> None:
        """Report that time passes, where HiGHS has been silent."""
        if time.perf_counter() - self.told > _BEAT_S:
            self._report()

    def _report(self) -> None:
        self.told = time.perf_counter()
        if self.progress is not None:
            self.progress(Progress(self.told - self.begin, self.incumbent, self.bound))

    def fail(self, why: str) -> None:
        """Record that HiGHS failed."""
        self.native, self.failed = why, True

    def _better(self, objective: float | None, values: NDArray[np.float64]) -> None:
        if objective is not None and (self.objective is None or objective <= self.objective):
            self.objective, self.values = objective, values


def _here(job: Job, found: _Found, cancelled: threading.Event) -> None:
    """Solve a job in this process."""
    highs_worker.solve(job, found.hear, cancelled.is_set)


def _apart(job: Job, found: _Found, cancelled: threading.Event) -> None:
    """Solve a job in a process of its own, and end it at the limit or when cancelled."""
    limit = job["options"]["time_limit"]
    end = time.perf_counter() + limit + _GRACE_S
    asked = False
    with tempfile.TemporaryFile() as errors:
        worker = _started(errors)
        sent = threading.Event()
        mail: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=_send, args=(worker, job, sent), daemon=True),
            threading.Thread(target=_receive, args=(worker, mail), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            while found.native is None and found.refused is None:
                try:
                    message = mail.get(timeout=_POLL_S)
                except queue.Empty:
                    found.beat()
                else:
                    if message is None:
                        found.fail(_death(worker, errors))
                        return
                    found.hear(message)
                if cancelled.is_set() and not asked:
                    asked = True
                    end = min(end, time.perf_counter() + _GRACE_S)
                    if sent.is_set():
                        _ask_to_stop(worker)
                if found.native is None and time.perf_counter() > end:
                    found.native = "kInterrupt" if asked else "kTimeLimit"
                    found.native += ", ended from outside"
        finally:
            worker.kill()
            worker.wait()
            for thread in threads:
                thread.join()
            for pipe in filter(None, (worker.stdin, worker.stdout)):
                # What was not written yet cannot be.
                with suppress(OSError):
                    pipe.close()


def _started(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the process, out of reach of the terminal's Ctrl-C."""
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    command = [sys.executable, "-P", str(Path(highs_worker.__file__))]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, **apart)
    except OSError as error:
        raise SolverError(f"HiGHS: its process {command[0]} cannot be started: {error}") from error


def _send(worker: subprocess.Popen[bytes], job: Job, sent: threading.Event) -> None:
    assert worker.stdin is not None
    try:
        pickle.dump(sys.path, worker.stdin)
        pickle.dump(job, worker.stdin, protocol=5)
        worker.stdin.flush()
    except Exception:
        worker.kill()  # ended already, or it would wait for the rest; the receiver finds out
        return
    sent.set()


def _receive(worker: subprocess.Popen[bytes], mail: queue.SimpleQueue[Message | None]) -> None:
    assert worker.stdout is not None
    try:
        while True:
            mail.put(pickle.load(worker.stdout))
    except Exception:  # its end, or half a message
        mail.put(None)


def _ask_to_stop(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None
    with suppress(OSError):
        worker.stdin.write(b"s")
        worker.stdin.flush()


def _death(worker: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    """Return why a process ended without an answer."""
    try:
        code = worker.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return "its process fell silent"
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
    elif objective is None and job["start"] is not None and _feasible(model, job["start"]):
        # HiGHS had no time to take it up, but it is an incumbent.
        values = job["start"]
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
