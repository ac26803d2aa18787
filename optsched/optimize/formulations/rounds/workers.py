"""The most requests within their SLOs on several equal workers: who runs where, and when.

The integer program of one worker (`optsched.optimize.formulations.rounds.integer_program`) is
repeated for each worker, with one row "once" per request over all of them. Last starts are those of
one worker: what runs on a worker takes no more rounds than all requests together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.rounds.integer_program import linear_model, program_of
from optsched.optimize.solvers.base import LinearModel, SolveOptions
from optsched.policies.routers import check_workers
from optsched.problem.errors import SolverError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective
from optsched.problem.schedule import Schedule, from_batches

Ints = NDArray[np.int64]


def most_on_workers(
    instance: Instance,
    slos: Mapping[str, float] | None = None,
    workers: int = 2,
    options: SolveOptions | None = None,
) -> tuple[int, int, Schedule]:
    """Return the most requests within their SLOs on several workers, by HiGHS.

    Parameters
    ----------
    instance : Instance
        In rounds. Each request runs without a pause on one worker, whichever the router.
    slos : mapping of str to float, optional
        SLOs of every request, in place of the instance's columns of these names.
    workers : int
    options : SolveOptions, optional

    Returns
    -------
    count : int
        Requests within their SLOs in the schedule, not counting those that are left to the end.
    bound : int
        No schedule has more. It is the count unless a limit ended the work.
    schedule : Schedule
        Who is left runs on worker 0 after all others.

    Raises
    ------
    UsageError, InfeasibleError
        See `program_of`; there is no SLO.
    InputError
        The number of workers is out of range.
    SolverError
        HiGHS found nothing.
    """
    from optsched.optimize.solvers.highs import solve_linear_model

    workers = check_workers(workers)
    goal = Objective("slo_attainment", tuple((slos or {}).items()))
    prog = program_of(Task(instance, objective=(goal,)))
    able = prog.last >= prog.data.arrival
    starts, place = prog.last + 1, np.zeros(instance.n, dtype=np.int64)
    bound = 0
    if able.any():
        model = _repeated(linear_model(prog), instance.n, workers)
        raw = solve_linear_model(model, options or SolveOptions())
        if raw.values is None or raw.bound is None:
            raise SolverError(f"solver: found {raw.native_status}; expected an incumbent")
        bound = int(np.floor(1e-6 - raw.bound))
        before = prog.columns_before
        for worker, values in enumerate(raw.values.reshape(workers, -1)):
            chosen = np.flatnonzero(values[: before[-1]] > 0.5)
            request = np.searchsorted(before, chosen, side="right") - 1
            starts[request] = chosen - before[request] + prog.data.arrival[request]
            place[request] = worker
    on_time = starts <= prog.last
    begin = starts + prog.data.shift
    end = int((begin + instance.output_tokens)[on_time].max(initial=instance.arrival.max()))
    for i in np.flatnonzero(~on_time).tolist():
        begin[i] = end
        end += int(instance.output_tokens[i])
    return int(on_time.sum()), bound, _schedule(instance, begin, place)


def _repeated(model: LinearModel, shared: int, times: int) -> LinearModel:
    """Return a model with several copies of all columns and rows but the first, shared ones."""
    own = len(model.row_lower) - shared
    copies = range(times)
    index = [np.where(model.index < shared, model.index, model.index + w * own) for w in copies]
    starts = [model.start[:-1] + w * len(model.index) for w in copies]

    def rows(limits: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([limits[:shared], np.tile(limits[shared:], times)])

    return replace(
        model,
        **{  # type: ignore[arg-type]
            name: np.tile(getattr(model, name), times)
            for name in ("cost", "lower", "upper", "integrality", "value")
        },
        start=np.concatenate([*starts, [times * len(model.index)]]).astype(model.start.dtype),
        index=np.concatenate(index).astype(model.index.dtype),
        row_lower=rows(model.row_lower),
        row_upper=rows(model.row_upper),
    )


def _schedule(instance: Instance, begin: Ints, place: Ints) -> Schedule:
    """Return the schedule of runs without pauses that begin at these times on these workers."""
    outputs = instance.output_tokens
    request = np.repeat(np.arange(instance.n), outputs)
    step = np.arange(len(request)) - np.repeat(np.cumsum(outputs) - outputs, outputs)
    tokens = np.where(step == 0, instance.prompt_tokens[request], 1)
    time, worker = begin[request] + step, place[request]
    order = np.lexsort((request, worker, time))
    time, worker = time[order], worker[order]
    first = np.flatnonzero(np.r_[True, (np.diff(time) > 0) | (np.diff(worker) != 0)])
    return from_batches(
        np.append(first, len(order)), request[order], tokens[order], instance=instance,
        start=time[first], worker=worker[first], evict_mode="restart",
    )  # fmt: skip
