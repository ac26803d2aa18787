"""HiGHS: a model as arrays in, incumbent and bound out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.errors import SolverError
from optsched.solvers.base import (
    HIGHS_STATUS,
    LinearModel,
    Progress,
    RawOutcome,
    SolveOptions,
    Status,
    run_interruptibly,
    settle_status,
)

_INTEGRAL_ABS_GAP = 0.999


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
        ``warm_start`` is not read: see ``start_values``.
    start_values : ndarray of float64, shape (columns,), optional
        A solution to start from.

    Returns
    -------
    RawOutcome
        After Ctrl-C (in the main thread), a set ``options.stop`` or a limit: what was found.

    Raises
    ------
    SolverError
        HiGHS refuses the model.
    """
    begin = time.perf_counter()
    highs = configured(options, integral_objective=model.integral_objective)
    pass_model(highs, model)
    if start_values is not None:
        set_start(highs, start_values)
    build_s = time.perf_counter() - begin
    return run(
        highs,
        options,
        integral_objective=model.integral_objective,
        mip=bool(model.integrality.any()),
        build_s=build_s,
    )


def configured(options: SolveOptions, *, integral_objective: bool) -> Any:
    """Return a ``highspy.Highs`` with the options set and a log to file only."""
    import highspy

    highs = highspy.Highs()
    highs.setOptionValue("log_to_console", False)
    if options.log_path is None:
        highs.setOptionValue("output_flag", False)
    for name, value in highs_options(options, integral_objective=integral_objective).items():
        if highs.setOptionValue(name, value) == highspy.HighsStatus.kError:
            raise SolverError(f"HiGHS: option {name} = {value!r} is refused")
    return highs


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


def pass_model(highs: Any, model: LinearModel) -> None:
    """Hand a model over as arrays.

    Raises
    ------
    SolverError
        HiGHS refuses it.
    """
    import highspy

    status = highs.passModel(
        model.columns,
        model.rows,
        model.entries,
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        model.cost,
        model.lower,
        model.upper,
        model.row_lower,
        model.row_upper,
        model.start,
        model.index,
        model.value,
        model.integrality,
    )
    if status == highspy.HighsStatus.kError:
        raise SolverError(
            f"HiGHS: refuses the model of {model.columns} columns, {model.rows} rows and "
            f"{model.entries} entries"
        )


def set_start(highs: Any, values: NDArray[np.float64]) -> None:
    """Give HiGHS a solution to start from (it checks it, and repairs it if it must)."""
    highs.setSolution(
        len(values), np.arange(len(values), dtype=np.int32), np.asarray(values, dtype=np.float64)
    )


def run(
    highs: Any,
    options: SolveOptions,
    *,
    integral_objective: bool,
    mip: bool = True,
    build_s: float = 0.0,
) -> RawOutcome:
    """Run a configured ``Highs`` that holds a model, and read what it found.

    It runs in a thread of its own, so that the main thread can receive Ctrl-C. HiGHS looks for
    an interruption between steps: within a relaxation of many columns that may take seconds.

    Parameters
    ----------
    highs : highspy.Highs
    options : SolveOptions
    integral_objective : bool
        Whether a bound may be rounded up.
    mip : bool
        Whether some column is an integer.
    build_s : float
        Recorded in the outcome.
    """
    import highspy

    cancelled = threading.Event()
    seen: list[float] = []
    begin = time.perf_counter()
    highs.setCallback(_callback(highspy, options.progress, cancelled, begin, seen), None)
    kinds = highspy.cb.HighsCallbackType
    for kind in (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackSimplexInterrupt,
        kinds.kCallbackIpmInterrupt,
        kinds.kCallbackMipLogging,
        kinds.kCallbackMipImprovingSolution,
    ):
        highs.startCallback(kind)

    def work() -> None:
        # The scheduler belongs to a thread and keeps its number of threads until it is reset.
        highspy.Highs.resetGlobalScheduler(True)
        highs.run()
        highspy.Highs.resetGlobalScheduler(False)

    run_interruptibly(work, cancel=cancelled.set, stop=options.stop)
    solve_s = time.perf_counter() - begin
    return _read(highs, highspy, mip, integral_objective, max(seen, default=None), build_s, solve_s)


def _callback(
    highspy: Any,
    progress: Callable[[Progress], None] | None,
    cancelled: threading.Event,
    begin: float,
    seen: list[float],
) -> Callable[[Any, str, Any, Any, Any], None]:
    kinds = highspy.cb.HighsCallbackType
    # Without output HiGHS does not call back for its log, so its looks for an interruption
    # report too.
    of_mip = (
        kinds.kCallbackMipInterrupt,
        kinds.kCallbackMipLogging,
        kinds.kCallbackMipImprovingSolution,
    )
    last: list[tuple[float | None, float | None]] = [(None, None)]

    def call(kind: Any, message: str, data_out: Any, data_in: Any, user_data: Any) -> None:
        if kind in of_mip:
            now = (_finite(data_out.mip_primal_bound), _finite(data_out.mip_dual_bound))
            if now[1] is not None:
                seen[:] = [max([now[1], *seen])]
            if progress is not None and now != last[0]:
                last[0] = now
                progress(Progress(time.perf_counter() - begin, *now))
        if data_in is not None and cancelled.is_set():
            data_in.user_interrupt = True

    return call


def _read(
    highs: Any,
    highspy: Any,
    mip: bool,
    integral_objective: bool,
    seen_bound: float | None,
    build_s: float,
    solve_s: float,
) -> RawOutcome:
    native = highs.getModelStatus().name
    mapped = HIGHS_STATUS.get(native, Status.ERROR)
    info = highs.getInfo()
    objective = bound = values = None
    if mapped in (Status.OPTIMAL, Status.FEASIBLE):
        if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            objective = _finite(info.objective_function_value)
            values = np.asarray(highs.getSolution().col_value, dtype=np.float64)
        if mip:
            # An interruption can leave the bound unset although progress had reported one.
            bound = _finite(info.mip_dual_bound)
            bound = seen_bound if bound is None else bound
        elif mapped is Status.OPTIMAL:
            bound = objective
    status = settle_status(mapped, objective, bound, integral_objective=integral_objective)
    return RawOutcome(status, objective, bound, values, native, build_s, solve_s)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) and abs(value) < 1e100 else None
