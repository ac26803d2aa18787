"""What all solvers share: statuses, options, progress and the outcome of a run."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from optsched.problem.budget import Budget, Progress, work_time
from optsched.problem.errors import InputError
from optsched.problem.schedule import Schedule

Found = TypeVar("Found")

BOUND_TOLERANCE = 1e-6
"""By how much a floating-point bound may exceed the true one, relative to max(1, |bound|)."""
_POLL_S = 0.02
# A second Ctrl-C within so many seconds of the first is ignored.
_DOUBLE_S = 0.5


class Status(StrEnum):
    """What a solve established. A solve that hits a limit is never ``infeasible``."""

    OPTIMAL = "optimal"
    """There is an incumbent, and the bound equals its objective."""
    FEASIBLE = "feasible"
    """There is an incumbent, but it is not proved optimal."""
    INFEASIBLE = "infeasible"
    """There is no solution, and this is proved."""
    NO_INCUMBENT = "no_incumbent"
    """A limit or an interruption ended the solve before the first incumbent."""
    ERROR = "error"
    """The solver failed."""


@dataclass(frozen=True, eq=False)
class SolveOptions:
    """Limits and options of one solve.

    Parameters
    ----------
    time_limit_s : float or None
        Wall-clock seconds for the solver, >= 0. None is no limit.
    mip_rel_gap : float
        Relative gap at which the solver may stop, finite and >= 0. With 0 it stops only at a proof.
        A solve that stops at a larger gap is ``feasible``, never ``optimal``.
    threads : int, optional
        Number of threads, 1 to 4096. Default: as many as the machine has.
    seed : int
        Seed of the solver's own randomness, 0 to 2**31 - 1.
    log_path : path, optional
        File for the solver's log.
    warm_start : Schedule, optional
        A known schedule, for the methods that begin with one.
    progress : callable, optional
        Called with a `Progress` now and then, from the solver's threads.
    stop : threading.Event, optional
        Set it to interrupt the solve. Incumbent and bound are kept.
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
            raise InputError(f"time_limit: found {self.time_limit_s!r}; expected seconds >= 0")
        if not 0 <= self.mip_rel_gap < math.inf:
            raise InputError(
                f"mip_rel_gap: found {self.mip_rel_gap!r}; expected a finite number >= 0"
            )

        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise InputError(f"threads: found {self.threads!r}; expected 1 to 4096")
        if not 0 <= self.seed < 2**31:
            raise InputError(f"seed: found {self.seed!r}; expected 0 to {2**31 - 1}")

    @property
    def thread_count(self) -> int:
        """The number of threads to use: `threads`, or as many as the machine has."""
        return self.threads if self.threads is not None else os.cpu_count() or 1

    @property
    def time_limit(self) -> float:
        """The time limit in seconds, infinite without a limit."""
        return math.inf if self.time_limit_s is None else float(self.time_limit_s)

    def budget(self) -> Budget:
        """Return a budget of the time limit that begins now, with the progress and the stop."""
        return Budget(self.time_limit_s, stop=self.stop, progress=self.progress)

    def after(self, seconds: float) -> SolveOptions:
        """Return the options with less time.

        Parameters
        ----------
        seconds : float
            What to subtract from the time limit, which does not fall below 0.
        """
        if self.time_limit_s is None:
            return self

        return replace(self, time_limit_s=max(0.0, self.time_limit_s - seconds))

    def reporting(self, value: Callable[[float], float | None]) -> SolveOptions:
        """Return options that report each of the solver's numbers as the value that it means.

        Parameters
        ----------
        value : callable
            Returns what a number of the solver means, or None if it means nothing.
        """
        progress = self.progress
        if progress is None:
            return self

        def report(state: Progress) -> None:
            # None means that there is no incumbent or no bound yet.
            low, high = (x if x is None else value(x) for x in (state.incumbent, state.bound))
            progress(Progress(state.elapsed_s, low, high))

        return replace(self, progress=report)


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A mixed-integer linear program as arrays.

    Minimize ``cost @ x`` subject to ``lower <= x <= upper`` and
    ``row_lower <= A @ x <= row_upper``. A is stored in compressed sparse columns: column j has the
    entries from ``start[j]`` to ``start[j + 1]`` of `index` (their rows) and of `value`.

    `integrality` (shape (columns,)): 1 if the column is an integer, else 0.
    `integral_objective`: whether every solution's objective is an integer, so that a bound may be
    rounded up.
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
    """What a solver returned, before a schedule is read from it.

    Parameters
    ----------
    status : Status
    objective : float, int or None
        The incumbent's objective. None without an incumbent.
    bound : float, int or None
        The bound on the objective. None without a bound. An integer is exact.
    values : ndarray of float64 or int64, shape (columns,), or None
        The incumbent. None without one.
    native_status : str
        The status in the solver's own words.
    solve_s : float
        Wall-clock seconds to solve it.
    """

    status: Status
    objective: float | None
    bound: float | None
    values: NDArray[Any] | None
    native_status: str
    solve_s: float = 0.0


def run_interruptibly(
    work: Callable[[], None],
    *,
    cancel: Callable[[], None],
    stop: threading.Event | None,
    deadline: float = math.inf,
) -> None:
    """Run ``work`` in a thread, and call ``cancel`` at Ctrl-C, once ``stop`` is set, or in time.

    Python delivers Ctrl-C only between bytecodes of the main thread. If the solver ran in the main
    thread, Ctrl-C would wait for it. A second Ctrl-C gives up waiting. It is ignored if it follows
    the first one at once, since ``timeout -s INT`` sends two.

    `cancel`: asks ``work`` to end. It is called repeatedly until ``work`` ends. `deadline`: a time
    of `work_time` from which on it is called.
    """
    failure: list[BaseException] = []
    interrupted: float | None = None  # when the first Ctrl-C came
    # An interrupted `Thread.join` takes its thread for dead; an interrupted wait does not.
    ended = threading.Event()

    def run_and_keep_error() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run_and_keep_error, name="optsched-solver", daemon=True)
    thread.start()
    # The second of two signals may come after the work has ended, and must be caught here.
    while not ended.is_set() or (
        interrupted is not None and time.monotonic() - interrupted < _DOUBLE_S
    ):
        try:
            # Once `ended` is set a wait returns at once, so that only sleep lets time pass.
            (time.sleep if ended.is_set() else ended.wait)(_POLL_S)
        except KeyboardInterrupt:
            now = time.monotonic()
            # A second Ctrl-C that does not follow at once gives up waiting.
            if interrupted is not None and now - interrupted > _DOUBLE_S:
                raise

            interrupted = now if interrupted is None else interrupted

        # The first Ctrl-C and `stop` are remembered, so it is asked to end at each look.
        stopped = interrupted is not None or (stop is not None and stop.is_set())
        if stopped or work_time() >= deadline:
            cancel()

    # An error of the other thread is one of this call.
    if failure:
        raise failure[0]


def run_search(options: SolveOptions, search: Callable[[Budget], Found]) -> Found:
    """Run a search that looks at its budget, and return what it returns.

    `options`: the budget has their time limit and progress. It is stopped by their ``stop`` and by
    Ctrl-C (`run_interruptibly`).
    `search`: ``search(budget)`` returns the best that it has found once `Budget.over` is true. Its
    exceptions are raised here.
    """
    stop = threading.Event()
    budget = Budget(options.time_limit_s, stop=stop, progress=options.progress)
    results: list[Found] = []  # one, from the other thread
    run_interruptibly(lambda: results.append(search(budget)), cancel=stop.set, stop=options.stop)

    return results[0]


def round_up_bound(bound: float) -> int:
    """Return the integer bound that a solver's bound on an integral objective proves.

    A float may exceed it by `BOUND_TOLERANCE`, relative to max(1, |bound|). An integer is exact.
    """
    if isinstance(bound, (int, np.integer)):
        return int(bound)

    return math.ceil(bound - BOUND_TOLERANCE * max(1.0, abs(bound)))


def settle_status(
    native: Status,
    objective: float | None,
    bound: float | None,
    *,
    integral_objective: bool,
    slack: float | None = None,
) -> Status:
    """Return the status that objective and bound prove, whatever the solver calls it.

    A solver's "optimal" may mean a gap of 1e-4, or a limit may come just after the gap closed.
    `slack` is by how much an objective may exceed the bound, by default `BOUND_TOLERANCE` of it.
    """
    # Neither says anything about these two: the solver's word is all that there is.
    if native in (Status.INFEASIBLE, Status.ERROR):
        return native
    if objective is None:
        return Status.NO_INCUMBENT
    if bound is None:
        return Status.FEASIBLE
    if integral_objective:
        # Both are integers, of which the objective may be given with a rounding error.
        return Status.OPTIMAL if round_up_bound(bound) >= objective - 0.5 else Status.FEASIBLE

    # Both are floats, so that equal ones may differ by a rounding error.
    slack = BOUND_TOLERANCE * abs(objective) if slack is None else slack
    return Status.OPTIMAL if objective - bound <= slack else Status.FEASIBLE


HIGHS_STATUS = {
    native: status
    for status, names in {
        Status.OPTIMAL: "kOptimal kModelEmpty",
        Status.INFEASIBLE: "kInfeasible",
        Status.FEASIBLE: "kObjectiveBound kObjectiveTarget kTimeLimit kIterationLimit kUnknown "
        "kSolutionLimit kMemoryLimit kInterrupt kHighsInterrupt",
        Status.ERROR: "kUnboundedOrInfeasible kUnbounded kNotset kLoadError kModelError "
        "kPresolveError kSolveError kPostsolveError",
    }.items()
    for native in names.split()
}
"""HiGHS's model statuses. ``FEASIBLE`` means that HiGHS stopped. `settle_status` makes it
``NO_INCUMBENT`` without an incumbent, and ``OPTIMAL`` if the gap is closed."""

CPSAT_STATUS = {s.name: s for s in (Status.OPTIMAL, Status.FEASIBLE, Status.INFEASIBLE)}
CPSAT_STATUS |= {"UNKNOWN": Status.NO_INCUMBENT, "MODEL_INVALID": Status.ERROR}
"""CP-SAT's statuses. CP-SAT reports 0 for an objective or a bound that it does not have, so they
are read only if the status says that they exist."""

PULP_STATUS = dict(zip((1, 2, -1, 0, -2), Status, strict=True))
"""PuLP's ``sol_status``. PuLP's ``status`` is Optimal at a time limit, whatever the gap."""
