"""Run HiGHS on a model given as arrays, in this process or in a process of its own.

`optsched.optimize.solvers.highs` says why. A process of its own tells the messages of `solve`, and
one every half second, so that time is told although HiGHS is silent.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from optsched.problem.errors import in_words
from optsched.problem.processes import tell

Message = tuple[Any, ...]
"""``("bounds", incumbent, bound)``, ``("found", objective, values)``, ``("beat",)``, and at the end
one of ``("done", native, bound)``, ``("refused", why)``, ``("failed", why)``."""

_BEAT_S = 0.5


class Job(NamedTuple):
    """A model to minimize and how.

    ``model`` has the arguments of ``passModel`` but for layout, sense and offset: columns, rows,
    entries, cost, lower and upper bounds, row bounds, starts, indices, values, integrality.
    ``began`` is the time of day at which the time limit began to run.
    """

    model: tuple[Any, ...]
    options: dict[str, Any]
    start: Any
    mip: bool
    began: float


def solve(job: Job, tell: Callable[[Message], None], cancelled: Callable[[], bool]) -> None:
    """Solve a job. Tell what is found, and at the end how the solve ended.

    It ends early once `cancelled` returns True, where HiGHS looks.
    """
    import highspy
    import numpy as np

    try:
        highs = loaded(job.model, job.options)
    except ValueError as error:
        tell(("refused", str(error)))
        return

    # A start is the incumbent once HiGHS has accepted it.
    if job.start is not None:
        columns = np.arange(len(job.start), dtype=np.int32)
        highs.setSolution(len(columns), columns, job.start)

    _watch(highs, tell, cancelled)
    # The time to start a process and to hand over the model counts, too.
    limit = job.options["time_limit"]
    if math.isfinite(limit):
        used = min(max(time.time() - job.began, 0.0), limit)
        highs.setOptionValue("time_limit", limit - used)

    # The scheduler belongs to a thread and keeps its number of threads until it is reset. With True
    # the call returns only when all that it holds is free.
    highspy.Highs.resetGlobalScheduler(True)
    highs.run()
    highspy.Highs.resetGlobalScheduler(False)

    native = highs.getModelStatus().name
    info = highs.getInfo()
    objective = None
    if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
        objective = _finite(info.objective_function_value)
    if objective is not None:
        tell(("found", objective, np.asarray(highs.getSolution().col_value, dtype=np.float64)))

    # A linear program without integers has no dual bound of its own: its optimum is the bound, and
    # at a limit there is none.
    optimum = objective if native == "kOptimal" else None
    tell(("done", native, _finite(info.mip_dual_bound) if job.mip else optimum))


def loaded(model: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a ``highspy.Highs`` with a `Job`'s model and options, and a log to a file only."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("log_to_console", False)
    highs.setOptionValue("output_flag", "log_file" in options)

    for name, value in options.items():
        if highs.setOptionValue(name, value) == highspy.HighsStatus.kError:
            raise ValueError(f"found the option {name} = {value!r}; expected one that HiGHS knows")

    columns, rows, entries, *arrays = model
    layout, sense = int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMinimize)
    # 0.0: the objective has no constant.
    passed = highs.passModel(columns, rows, entries, layout, sense, 0.0, *arrays)

    if passed == highspy.HighsStatus.kError:
        raise ValueError(
            f"found a model of {columns} columns, {rows} rows and {entries} entries that it "
            "refuses; expected one that it accepts"
        )

    return highs


def _watch(highs: Any, tell: Callable[[Message], None], cancelled: Callable[[], bool]) -> None:
    """Let HiGHS tell solutions and bounds while it runs, and end it once `cancelled`."""
    import highspy

    kinds = highspy.cb.HighsCallbackType
    # Without output HiGHS makes no callback for its log, so the callbacks that check for an
    # interruption report progress too.
    of_mip = (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackMipLogging,
        kinds.kCallbackMipImprovingSolution,
    )
    last: list[tuple[float | None, float | None]] = [(None, None)]  # what was told

    def call(kind: Any, message: str, data_out: Any, data_in: Any, user_data: Any) -> None:
        if kind in of_mip:
            if kind == kinds.kCallbackMipImprovingSolution:
                tell(("found", data_out.objective_function_value, data_out.mip_solution.copy()))

            # Callbacks come often, and most change nothing.
            now = (_finite(data_out.mip_primal_bound), _finite(data_out.mip_dual_bound))
            if now != last[0]:
                last[0] = now
                tell(("bounds", *now))

        # Only the callbacks that check for an interruption have an answer to write into.
        if data_in is not None and cancelled():
            data_in.user_interrupt = True

    highs.setCallback(call, None)
    for kind in (*of_mip, kinds.kCallbackSimplexInterrupt, kinds.kCallbackIpmInterrupt):
        highs.startCallback(kind)


def _finite(value: float) -> float | None:
    """Return a number, or None if it means infinity to HiGHS."""
    return float(value) if math.isfinite(value) and abs(value) < 1e100 else None


def solve_apart(job: tuple[Any, ...]) -> None:
    """Solve a `Job`, given as a plain tuple, in a process whose parent hears the messages."""

    def beat() -> None:
        # The thread is a daemon, so it ends with the process.
        while True:
            time.sleep(_BEAT_S)
            tell(("beat",))

    threading.Thread(target=beat, daemon=True).start()
    try:
        solve(Job(*job), tell, lambda: False)  # the parent ends the process instead
    except BaseException as error:
        tell(("failed", in_words(error)))
