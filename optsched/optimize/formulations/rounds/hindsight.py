"""The hindsight formulation of the round model: its methods, and which of them to take."""

from dataclasses import replace

import numpy as np

from optsched.bounds.base import ANY_INSTANCE, WORKERS
from optsched.bounds.timeline import Floats
from optsched.optimize.formulations.base import (
    LIMITS,
    Answer,
    Formulation,
    Method,
    Readable,
    Task,
    check_method,
)
from optsched.optimize.formulations.rounds import horizon, integer_program as models
from optsched.optimize.formulations.rounds.cpsat import solve_by_cpsat
from optsched.optimize.formulations.rounds.goals import COMPLETIONS, GOALS, SUMS, goal_of, in_values
from optsched.optimize.formulations.rounds.on_time import as_shares
from optsched.optimize.formulations.rounds.pulp_program import readable, solve_by_pulp
from optsched.optimize.plan import method_in_rounds
from optsched.optimize.solvers.base import LinearModel, RawOutcome, SolveOptions, Status
from optsched.problem.budget import work_time
from optsched.problem.memory import check_size
from optsched.problem.schedule import Schedule, runs_on

_ALL, _SUMS = (*GOALS, "slo_attainment"), (*SUMS, "slo_attainment")
_READABLE = (*_SUMS, "makespan")


def solve_by_highs(task: Task, options: SolveOptions) -> Answer:
    """Solve the integer program by HiGHS, which receives it as arrays."""
    from optsched.optimize.solvers.highs import solve_linear_model

    if task.workers > 1:
        return _on_workers(task, options)

    budget = options.budget()
    prog = models.program_of(task, options.warm_start)
    model = models.linear_model(prog, budget)
    remaining = prog.options_left(options, budget)
    raw = solve_linear_model(model, remaining, start_values=models.start_values(prog, model))
    starts = None if raw.values is None else models.read_starts(prog, raw.values)
    return models.answer(prog, raw, starts)


def _on_workers(task: Task, options: SolveOptions) -> Answer:
    """Solve the hindsight program on several workers: who runs where, and when.

    The integer program of one worker is repeated for each, with one row "once" per request over all
    of them. Last starts are those of one worker: what runs on a worker takes no more rounds than
    all requests together.
    """
    from optsched.optimize.solvers.highs import solve_linear_model

    budget = options.budget()
    instance, counted = task.instance, task.names[:1] == ("slo_attainment",)
    workers = min(task.workers, instance.n)
    # The windows of one worker do not hold on several, since they take the others' latency to be
    # at least that on one machine (`horizon.volume_bound`). A deadline of a block holds.
    prog = (
        models.program_of(task)
        if counted
        else models.program(instance, goal_of(task), windows=False)
    )

    if counted and (prog.last < prog.data.arrival).all():  # solvers have no answer to an empty one
        raw = RawOutcome(Status.OPTIMAL, 0.0, 0.0, None, "nobody can be in time")
    else:
        entries = workers * models.entries_at_most(prog.data, prog.last)
        what = f"nonzeros in the integer program of {workers} workers"
        check_size(entries, models.ENTRY_BYTES, what, "lns has no such limit")
        model = _repeat_model(models.linear_model(prog, budget), instance.n, workers)
        raw = solve_linear_model(model, prog.options_left(options, budget))

    # One more than the last start says that a request is left out. Each worker has its own copy of
    # the columns, so its part of the values says who starts there.
    starts, worker_of = prog.last + 1, np.zeros(instance.n, dtype=np.int64)
    if raw.values is not None:
        for worker, values in enumerate(raw.values.reshape(workers, -1)):
            request, begin = models.chosen_starts(prog, values)
            starts[request], worker_of[request] = begin, worker

    schedule: Schedule | None = None
    objective, bound = in_values(raw, prog.goal)
    if counted:
        objective, bound = as_shares(raw, instance.n)
    # Without values and optimal nobody can be in time: then all are served one by one.
    if raw.values is not None or (counted and raw.status is Status.OPTIMAL):
        # Starts in the instance's rounds, whose long gaps between arrivals the model leaves out.
        begin = starts + prog.data.shift
        left_out = starts > prog.last
        ends = (begin + instance.output_tokens)[~left_out]
        end = int(ends.max(initial=instance.release_times.max()))
        # Who is left out is late in any case, and is served one by one after all others.
        for i in np.flatnonzero(left_out).tolist():
            begin[i] = end
            end += int(instance.output_tokens[i])

        schedule = runs_on(instance, begin, worker_of)

    return Answer(raw.status, schedule, objective, bound, raw.native_status, raw.solve_s)


def _repeat_model(model: LinearModel, n_shared: int, times: int) -> LinearModel:
    """Return a model with several copies of all columns and rows but the first rows, shared ones.

    ``n_shared``: how many rows at the beginning, "once" by request, the copies have in common.
    """
    rows_of_copy = len(model.row_lower) - n_shared
    copies = range(times)
    # Copy w has its own rows and entries after those of the copies before it.
    is_shared = model.index < n_shared
    index = [np.where(is_shared, model.index, model.index + w * rows_of_copy) for w in copies]
    starts = [model.start[:-1] + w * len(model.index) for w in copies]

    def rows(limits: Floats) -> Floats:
        """Return the limits of the shared rows, and those of each copy's."""
        return np.concatenate([limits[:n_shared], np.tile(limits[n_shared:], times)])

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


def solve_by_placement(task: Task, options: SolveOptions) -> Answer:
    """Return a placement of the requests and a bound, without a search.

    ``auto`` falls back on this method if an exact model would not fit into memory.
    """
    begin = work_time()
    # The bound: all that can be in time (counted below 0, since the models minimize), or for sums
    # the volume bound, or that nobody waits.
    if task.names[:1] == ("slo_attainment",):
        prog = models.program_of(task, options.warm_start)
        starts, data = prog.warm, prog.data
        value, bound = prog.known, -int((prog.last >= data.arrival).sum())
    else:
        prog = models.program(task.instance, goal_of(task), windows=False)
        starts, value, bound = prog.warm, prog.known, prog.goal.units(prog.data.arrival * 0)
        # All requests have one weight, so that the total latency alone decides.
        if prog.goal.equal:
            bound = int(prog.goal.of_latency(horizon.volume_bound(prog.data)))

    status = Status.OPTIMAL if value == bound else Status.FEASIBLE
    # None: there are no columns with values, as the starts are at hand.
    raw = RawOutcome(status, value, bound, None, "placed", work_time() - begin)
    return models.answer(prog, raw, starts)


def _leaves_out(task: Task) -> frozenset[str]:
    """Return the kinds of schedules that may beat every choice of uninterrupted runs.

    Where completions count, pauses and split prefills gain nothing, unless a limit counts what
    requests process or forbids to mix phases. With a pause after the first token, first tokens may
    come sooner, and more be within SLOs.
    """
    instance, kinds = task.instance, set[str]()
    limited = instance.limits.max_batch_tokens or instance.limits.max_prefill_tokens
    if not set(task.names) <= set(COMPLETIONS) or limited or instance.hybrid_batching is False:
        kinds.add("pauses")
    if limited and instance.chunked_prefill is not False:
        kinds.add("split_prefills")

    return frozenset(kinds)


def _readable(task: Task, length: int | None) -> Readable:
    check_method(FORMULATION, "pulp", task)
    return readable(task, length)


_HIGHS = "time-indexed integer program by HiGHS, as arrays"
_CPSAT = "staircase cumulative with pair separation by CP-SAT"
_PLACEMENT = "greedy placement and the volume bound, no search"
_PULP = "the paper's program, readable, by PuLP and HiGHS"
_WORKERS = ANY_INSTANCE | WORKERS
FORMULATION = Formulation(
    name="hindsight",
    summary="hindsight-optimal program of uninterrupted runs in rounds (Jaillet et al. 2025)",
    time_unit="round",
    methods={
        "highs": Method(
            _HIGHS, solve_by_highs, _SUMS, LIMITS, solvers=("highspy",), features=_WORKERS
        ),
        "cpsat": Method(_CPSAT, solve_by_cpsat, _ALL, LIMITS, solvers=("ortools",)),
        "placement": Method(_PLACEMENT, solve_by_placement, _ALL, LIMITS),
        "pulp": Method(_PULP, solve_by_pulp, _READABLE, LIMITS, solvers=("pulp", "highspy")),
    },
    choose=method_in_rounds,
    switches=LIMITS,
    leaves_out=_leaves_out,
    readable=_readable,
)
