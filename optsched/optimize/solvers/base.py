"""What every solver has in common: statuses, options, progress and the answer of a run."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optsched.problem.budget import Progress
from optsched.problem.errors import InputError
from optsched.problem.schedule import Schedule

BOUND_TOLERANCE = 1e-6
"""What a floating-point bound may exceed the true one by, relative to max(1, |bound|)."""
_POLL_S = 0.02
_DOUBLE_S = 0.5
"""Seconds within which a second Ctrl-C counts as the first."""


class Status(StrEnum):
    """What a solve established; a limit that was hit is never ``infeasible``."""

    OPTIMAL = "optimal"
    """An incumbent, and a bound that equals it."""
    FEASIBLE = "feasible"
    """An incumbent, not proved optimal."""
    INFEASIBLE = "infeasible"
    """A proof that there is no solution."""
    NO_INCUMBENT = "no_incumbent"
    """A limit or an interruption came before the first incumbent."""
    ERROR = "error"
    """The solver failed."""


@dataclass(frozen=True, eq=False)
class SolveOptions:
    """Limits and wishes for one solve.

    Parameters
    ----------
    time_limit_s : float or None
        Wall-clock seconds for the solver, >= 0; None is no limit.
    mip_rel_gap : float
        Relative gap at which the solver may stop, >= 0; 0 demands a proof. A solve that stops
        at a larger gap is ``feasible``, never ``optimal``.
    threads : int, optional
        None: as many as the machine has.
    seed : int
        Seed of the solver's own randomness, >= 0.
    log_path : path, optional
        File that the solver's log is written to.
    warm_start : Schedule, optional
        A schedule to start from.
    progress : callable, optional
        Called with a `Progress` now and then, from the solver's threads.
    stop : threading.Event, optional
        Set it to interrupt the solve; incumbent and bound are kept.

    Raises
    ------
    InputError
        A limit, gap, seed or number of threads that cannot be.
    """

    time_limit_s: float | None = 60.0
    mip_rel_gap: float = 0.0
    threads: int | None = None
    seed: int = 0
    log_path: str | Path | None = None
    warm_start: Schedule | None = None
    progress: Callable[[Progress], None] | None = None
    stop: threading.Event | None = None

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s >= 0:
            raise InputError(f"time_limit: {self.time_limit_s!r} is not a number of seconds >= 0")
        if not 0 <= self.mip_rel_gap < math.inf:
            raise InputError(f"mip_rel_gap: {self.mip_rel_gap!r} is not a finite number >= 0")
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise InputError(f"threads: {self.threads!r} is out of range; 1 to 4096 is right")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed: {self.seed!r} is out of range; 0 to {2**31 - 1} is right")

    @property
    def thread_count(self) -> int:
        """Threads to use: those asked for, or as many as the machine has."""
        return self.threads if self.threads is not None else os.cpu_count() or 1

    @property
    def time_limit(self) -> float:
        """Seconds allowed, infinite without a limit."""
        return math.inf if self.time_limit_s is None else float(self.time_limit_s)

    def after(self, seconds: float) -> SolveOptions:
        """Return the options with so many seconds of the time limit used up."""
        if self.time_limit_s is None:
            return self
        return replace(self, time_limit_s=max(0.0, self.time_limit_s - seconds))


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A mixed-integer linear program as arrays: minimize cost x over rows and bounds.

    Parameters
    ----------
    cost, lower, upper : ndarray of float64, shape (columns,)
    integrality : ndarray of int32, shape (columns,)
        1 where the column is an integer, else 0.
    start : ndarray of int32, shape (columns + 1,)
        Where each column's entries begin (compressed sparse columns).
    index : ndarray of int32, shape (entries,)
        Row of each entry.
    value : ndarray of float64, shape (entries,)
    row_lower, row_upper : ndarray of float64, shape (rows,)
    integral_objective : bool
        Whether every solution's objective is an integer, so that a bound may be rounded up.
    """

    cost: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    integrality: NDArray[np.int32]
    start: NDArray[np.int32]
    index: NDArray[np.int32]
    value: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    integral_objective: bool = False

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.cost)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    @property
    def entries(self) -> int:
        """Number of nonzeros."""
        return len(self.value)


@dataclass(frozen=True, eq=False)
class RawOutcome:
    """What a solver said, before any schedule is read from it.

    Parameters
    ----------
    status : Status
    objective, bound : float or None
        None where there is no incumbent, or no bound.
    values : ndarray of float64, shape (columns,), or None
        The incumbent.
    native_status : str
        The solver's own word.
    build_s, solve_s : float
        Seconds to hand the model over, and to solve it.
    """

    status: Status
    objective: float | None
    bound: float | None
    values: NDArray[np.float64] | None
    native_status: str
    build_s: float = 0.0
    solve_s: float = 0.0


def run_interruptibly(
    work: Callable[[], None], *, cancel: Callable[[], None], stop: threading.Event | None
) -> None:
    """Run ``work`` in a thread; at Ctrl-C, or once ``stop`` is set, ask it to end by ``cancel``.

    Python delivers Ctrl-C only between bytecodes of the main thread, which would sit in the
    solver. A second Ctrl-C gives up waiting, unless it comes at once: ``timeout -s INT`` sends two.

    Parameters
    ----------
    work : callable
        Its exceptions are raised here.
    cancel : callable
        Called again and again until ``work`` ends.
    stop : threading.Event, optional

    Raises
    ------
    KeyboardInterrupt
        At a second Ctrl-C.
    """
    failure: list[BaseException] = []
    interrupted: float | None = None
    # An interrupted `Thread.join` takes its thread for dead, an interrupted wait does not.
    ended = threading.Event()

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=guarded, name="optsched-solver", daemon=True)
    thread.start()
    # The second of two signals may come after the work has ended: it must find us here.
    while not ended.is_set() or (
        interrupted is not None and time.monotonic() - interrupted < _DOUBLE_S
    ):
        try:
            (time.sleep if ended.is_set() else ended.wait)(_POLL_S)
        except KeyboardInterrupt:
            now = time.monotonic()
            if interrupted is not None and now - interrupted > _DOUBLE_S:
                raise
            interrupted = now if interrupted is None else interrupted
        if interrupted is not None or (stop is not None and stop.is_set()):
            cancel()
    if failure:
        raise failure[0]


def round_up_bound(bound: float) -> int:
    """Return the least integer that a floating-point bound on an integral objective proves."""
    return math.ceil(bound - BOUND_TOLERANCE * max(1.0, abs(bound)))


def settle_status(
    native: Status,
    objective: float | None,
    bound: float | None,
    *,
    integral_objective: bool,
) -> Status:
    """Return the status that objective and bound bear out, whatever the solver calls it.

    A solver's "optimal" may mean a gap of 1e-4 (or the gap asked for); and a limit may have
    come just after the gap closed.

    Parameters
    ----------
    native : Status
        The solver's own status, mapped.
    objective, bound : float or None
        Of a minimization.
    integral_objective : bool
        Whether the bound may be rounded up.
    """
    if native in (Status.INFEASIBLE, Status.ERROR):
        return native
    if objective is None:
        return Status.NO_INCUMBENT
    if bound is None:
        return Status.FEASIBLE
    if integral_objective:
        return Status.OPTIMAL if round_up_bound(bound) >= objective - 0.5 else Status.FEASIBLE
    slack = BOUND_TOLERANCE * abs(objective)
    return Status.OPTIMAL if objective - bound <= slack else Status.FEASIBLE


HIGHS_STATUS: dict[str, Status] = {
    "kOptimal": Status.OPTIMAL,
    "kModelEmpty": Status.OPTIMAL,
    "kInfeasible": Status.INFEASIBLE,
    "kUnboundedOrInfeasible": Status.ERROR,
    "kUnbounded": Status.ERROR,
    "kObjectiveBound": Status.FEASIBLE,
    "kObjectiveTarget": Status.FEASIBLE,
    "kTimeLimit": Status.FEASIBLE,
    "kIterationLimit": Status.FEASIBLE,
    "kSolutionLimit": Status.FEASIBLE,
    "kMemoryLimit": Status.FEASIBLE,
    "kInterrupt": Status.FEASIBLE,
    "kHighsInterrupt": Status.FEASIBLE,
    "kUnknown": Status.FEASIBLE,
    "kNotset": Status.ERROR,
    "kLoadError": Status.ERROR,
    "kModelError": Status.ERROR,
    "kPresolveError": Status.ERROR,
    "kSolveError": Status.ERROR,
    "kPostsolveError": Status.ERROR,
}
"""HiGHS model statuses. ``FEASIBLE`` stands for "stopped": without an incumbent it becomes
``NO_INCUMBENT``, and with a closed gap ``OPTIMAL`` (`settle_status`)."""

CPSAT_STATUS: dict[str, Status] = {
    "OPTIMAL": Status.OPTIMAL,
    "FEASIBLE": Status.FEASIBLE,
    "INFEASIBLE": Status.INFEASIBLE,
    "UNKNOWN": Status.NO_INCUMBENT,
    "MODEL_INVALID": Status.ERROR,
}
"""CP-SAT statuses. Its objective and bound are 0 where it has none: they are read only where
the status says that there is one."""

PULP_STATUS: dict[int, Status] = {
    1: Status.OPTIMAL,
    2: Status.FEASIBLE,
    0: Status.NO_INCUMBENT,
    -1: Status.INFEASIBLE,
    -2: Status.ERROR,
}
"""PuLP's ``sol_status``. Its ``status`` says Optimal at a time limit, whatever the gap."""
