"""The hindsight program on several equal workers: who runs where, and when.

The integer program of one worker (`optsched.optimize.formulations.rounds.integer_program`) is
repeated for each worker, with one row "once" per request over all of them. Last starts are those of
one worker: what runs on a worker takes no more rounds than all requests together.
"""

from dataclasses import replace

import numpy as np

from optsched.bounds.timeline import Floats
from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.formulations.rounds import integer_program as models
from optsched.optimize.formulations.rounds.on_time import as_shares
from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions, Status
from optsched.problem.memory import check_size
from optsched.problem.schedule import Schedule, runs_on


def solve_on_workers(task: Task, options: SolveOptions) -> Answer:
    """Solve the hindsight program on several workers, by HiGHS, whatever the router."""
    from optsched.optimize.solvers.highs import solve_linear_model

    budget = options.budget()
    instance, counted = task.instance, task.names[:1] == ("slo_attainment",)
    workers = min(task.workers, instance.n)
    # On one worker fewer last starts are of use, since others take up its time.
    prog = models.program_of(task) if counted else models.program(instance, windows=False)

    if counted and (prog.last < prog.data.arrival).all():  # solvers have no answer to an empty one
        raw = RawOutcome(Status.OPTIMAL, 0.0, 0.0, None, "nobody can be in time")
    else:
        entries = workers * models.entries_at_most(prog.data, prog.last)
        what = f"nonzeros in the integer program of {workers} workers"
        check_size(entries, models.ENTRY_BYTES, what, "lns has no such limit")
        model = _repeated(models.linear_model(prog, budget), instance.n, workers)
        raw = solve_linear_model(model, prog.left(options, budget))

    starts, place = prog.last + 1, np.zeros(instance.n, dtype=np.int64)
    if raw.values is not None:
        for worker, values in enumerate(raw.values.reshape(workers, -1)):
            request, begin = models.chosen_starts(prog, values)
            starts[request], place[request] = begin, worker

    schedule: Schedule | None = None
    objective, bound = raw.objective, raw.bound
    if counted:
        objective, bound = as_shares(raw, instance.n)
    if raw.values is not None or (counted and raw.status is Status.OPTIMAL):
        begin = starts + prog.data.shift
        late = starts > prog.last
        end = int((begin + instance.output_tokens)[~late].max(initial=instance.release_times.max()))

        for i in np.flatnonzero(late).tolist():
            begin[i] = end
            end += int(instance.output_tokens[i])

        schedule = runs_on(instance, begin, place)

    return Answer(raw.status, schedule, objective, bound, raw.native_status, raw.solve_s)


def _repeated(model: LinearModel, shared: int, times: int) -> LinearModel:
    """Return a model with several copies of all columns and rows but the first, shared ones."""
    own = len(model.row_lower) - shared
    copies = range(times)
    index = [np.where(model.index < shared, model.index, model.index + w * own) for w in copies]
    starts = [model.start[:-1] + w * len(model.index) for w in copies]

    def rows(limits: Floats) -> Floats:
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
