"""HiGHS on a model as arrays: run in this process, or as a process of its own that can be ended.

Inside presolve, a relaxation or a round of cuts HiGHS looks neither at its time limit nor for an
interruption, for as long as a minute. `optsched.optimize.solvers.highs` therefore starts this file
as a script, which imports nothing of optsched, and ends it where it does not end itself.

**What goes through the pipes**, pickled: to stdin the parent's ``sys.path``, the job, then a
byte where HiGHS shall stop; its end ends this process. From stdout what `solve` tells.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

Message = tuple[Any, ...]
"""``("bounds", incumbent, bound)``, ``("incumbent", objective, values)``, and at the end one of
``("done", native, objective, bound, values)``, ``("refused", why)``, ``("failed", why)``."""


class Job(TypedDict):
    """A model to minimize and how.

    ``model`` holds columns, rows, entries, cost, lower and upper bounds, row bounds, starts,
    indices, values and integrality, the arguments of ``passModel`` in order.
    """

    model: tuple[Any, ...]
    options: dict[str, Any]
    start: Any
    mip: bool
    began: float
    """Time of day at which the time limit began to run."""


def solve(job: Job, tell: Callable[[Message], None], cancelled: Callable[[], bool]) -> None:
    """Solve a job, telling what is found and at last how it ended.

    Parameters
    ----------
    job : Job
    tell : callable
        Called from HiGHS's threads, one at a time.
    cancelled : callable
        Whether HiGHS shall stop.
    """
    import highspy
    import numpy as np

    try:
        highs = configured(job["options"])
        pass_model(highs, job["model"])
    except ValueError as error:
        tell(("refused", str(error)))
        return
    if job["start"] is not None:
        columns = np.arange(len(job["start"]), dtype=np.int32)
        highs.setSolution(len(columns), columns, job["start"])
    kinds = highspy.cb.HighsCallbackType
    highs.setCallback(_callback(kinds, tell, cancelled), None)
    for kind in (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackSimplexInterrupt,
        kinds.kCallbackIpmInterrupt,
        kinds.kCallbackMipLogging,
        kinds.kCallbackMipImprovingSolution,
    ):
        highs.startCallback(kind)
    limit = job["options"]["time_limit"]
    if math.isfinite(limit):
        used = min(max(time.time() - job["began"], 0.0), limit)
        highs.setOptionValue("time_limit", limit - used)
    # The scheduler belongs to a thread and keeps its number of threads until it is reset.
    highspy.Highs.resetGlobalScheduler(True)
    highs.run()
    highspy.Highs.resetGlobalScheduler(False)

    native = highs.getModelStatus().name
    info = highs.getInfo()
    objective = bound = values = None
    if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
        objective = finite(info.objective_function_value)
        values = np.asarray(highs.getSolution().col_value, dtype=np.float64)
    if job["mip"]:
        bound = finite(info.mip_dual_bound)
    elif native == "kOptimal":
        bound = objective
    tell(("done", native, objective, bound, values))


def configured(options: dict[str, Any]) -> Any:
    """Return a ``highspy.Highs`` with options set by name and a log to a file only.

    Raises
    ------
    ValueError
        HiGHS refuses an option.
    """
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("log_to_console", False)
    highs.setOptionValue("output_flag", "log_file" in options)
    for name, value in options.items():
        if highs.setOptionValue(name, value) == highspy.HighsStatus.kError:
            raise ValueError(f"option {name} = {value!r} is refused")
    return highs


def pass_model(highs: Any, model: tuple[Any, ...]) -> None:
    """Hand a `Job`'s model over.

    Raises
    ------
    ValueError
        HiGHS refuses it.
    """
    import highspy

    columns, rows, entries, *arrays = model
    layout, sense = int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMinimize)
    if highs.passModel(columns, rows, entries, layout, sense, 0.0, *arrays) == (
        highspy.HighsStatus.kError
    ):
        raise ValueError(
            f"refuses the model of {columns} columns, {rows} rows and {entries} entries"
        )


def _callback(
    kinds: Any, tell: Callable[[Message], None], cancelled: Callable[[], bool]
) -> Callable[[Any, str, Any, Any, Any], None]:
    # Without output HiGHS does not call back for its log, so its looks for an interruption
    # report too.
    of_mip = (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackMipLogging,
        kinds.kCallbackMipImprovingSolution,
    )
    last: list[tuple[float | None, float | None]] = [(None, None)]
    one = threading.Lock()

    def call(kind: Any, message: str, data_out: Any, data_in: Any, user_data: Any) -> None:
        if kind in of_mip:
            with one:
                if kind == kinds.kCallbackMipImprovingSolution:
                    values = data_out.mip_solution.copy()
                    tell(("incumbent", finite(data_out.objective_function_value), values))
                now = (finite(data_out.mip_primal_bound), finite(data_out.mip_dual_bound))
                if now != last[0]:
                    last[0] = now
                    tell(("bounds", *now))
        if data_in is not None and cancelled():
            data_in.user_interrupt = True

    return call


def finite(value: float) -> float | None:
    """Return a number, or None where HiGHS means infinity."""
    return float(value) if math.isfinite(value) and abs(value) < 1e100 else None


def main() -> None:
    """Solve the job that comes through stdin; see the module's head."""
    orders = sys.stdin.buffer
    # What native code prints to stdout must not get between the messages.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = pickle.load(orders)
    job: Job = pickle.load(orders)
    stop = threading.Event()

    def listen() -> None:
        if orders.read(1):
            stop.set()
            orders.read(1)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()

    def tell(message: Message) -> None:
        pickle.dump(message, out, protocol=5)
        out.flush()

    try:
        solve(job, tell, stop.is_set)
    except BaseException as error:
        tell(("failed", f"{type(error).__name__}: {error}".rstrip(": ")))
    os._exit(0)


if __name__ == "__main__":
    main()
