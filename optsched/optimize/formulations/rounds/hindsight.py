"""The hindsight formulation of the round model: its methods, and which of them to take."""

from __future__ import annotations

from pathlib import Path

from optsched.bounds.base import ANY_INSTANCE, WORKERS
from optsched.optimize.formulations.base import LIMITS, Answer, Formulation, Method, Task
from optsched.optimize.formulations.rounds.cpsat import solve_by_cpsat
from optsched.optimize.formulations.rounds.horizon import (
    round_data,
    serial_schedule,
    volume_bound,
)
from optsched.optimize.formulations.rounds.integer_program import (
    answer,
    linear_model,
    program_of,
    read_starts,
    start_values,
)
from optsched.optimize.formulations.rounds.on_time import in_shares
from optsched.optimize.formulations.rounds.pulp_program import solve_by_pulp, write_lp, write_mps
from optsched.optimize.formulations.rounds.workers import solve_on_workers
from optsched.optimize.plan import method_in_rounds
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.problem.budget import work_time

COUNTS = ("tel", "slo_attainment")
"""The objectives of the methods that have the program with starts in time."""


def solve_by_highs(task: Task, options: SolveOptions) -> Answer:
    """Solve the integer program by HiGHS, which receives it as arrays."""
    from optsched.optimize.solvers.highs import solve_linear_model

    if task.workers > 1:
        return solve_on_workers(task, options)

    budget = options.budget()
    prog = program_of(task, options.warm_start)
    model = linear_model(prog, budget)
    left = in_shares(options, task.instance.n) if prog.on_time else options
    left = left.after(budget.spent_s)
    raw = solve_linear_model(model, left, start_values=start_values(prog, model))

    return answer(prog, raw, None if raw.values is None else read_starts(prog, raw.values))


def solve_by_placement(task: Task, options: SolveOptions) -> Answer:
    """Return the placement of `serial_schedule` and the bound of `volume_bound`, without a search.

    ``auto`` falls back on it if an exact model would not fit into memory.
    """
    begin = work_time()
    if task.names[:1] == ("slo_attainment",):
        return _placed_in_time(task, options, begin)

    data = round_data(task.instance)
    schedule = serial_schedule(task.instance)
    assert schedule.starts is not None
    objective, bound = data.tel(schedule.starts - data.shift), volume_bound(data)

    return Answer(
        status=Status.OPTIMAL if objective == bound else Status.FEASIBLE,
        schedule=schedule,
        objective=objective,
        bound=bound,
        native_status="placed",
        solve_s=work_time() - begin,
    )


def _placed_in_time(task: Task, options: SolveOptions, begin: float) -> Answer:
    """Return the best of some placements, and the bound that each request alone gives."""
    prog = program_of(task, options.warm_start)
    able, served = int((prog.last >= prog.data.arrival).sum()), int((prog.warm <= prog.last).sum())
    raw = RawOutcome(
        Status.OPTIMAL if able == served else Status.FEASIBLE, -served, -able, None, "placed",
        solve_s=work_time() - begin,
    )  # fmt: skip
    return answer(prog, raw, prog.warm)


def _leaves_out(task: Task) -> frozenset[str]:
    """Return the kinds of schedules that may beat every choice of uninterrupted runs.

    A run without interruption that ends with the last run of a request holds no more KV in any
    round, and holds it in no further round. So pauses and split prefills gain nothing for total
    latency, unless a limit counts what requests process or forbids to mix phases. The first token
    may come earlier with a pause after it, so they may serve more requests within SLOs.
    """
    instance, kinds = task.instance, set[str]()
    limited = instance.limits.max_batch_tokens or instance.limits.max_prefill_tokens
    if task.names != ("tel",) or limited or instance.hybrid_batching is False:
        kinds.add("pauses")
    if limited and instance.chunked_prefill is not False:
        kinds.add("split_prefills")

    return frozenset(kinds)


def _export(task: Task, format_name: str, path: str | Path) -> None:
    (write_lp if format_name == "lp" else write_mps)(task.instance, path)


FORMULATION = Formulation(
    name="hindsight",
    summary="hindsight-optimal program of uninterrupted runs in rounds (Jaillet et al. 2025)",
    time_unit="round",
    default_objective="tel",
    methods={
        "highs": Method(
            "time-indexed integer program by HiGHS, as arrays",
            solve_by_highs,
            COUNTS,
            LIMITS,
            solvers=("highspy",),
            features=ANY_INSTANCE | WORKERS,
        ),
        "cpsat": Method(
            "staircase cumulative with pair separation by CP-SAT",
            solve_by_cpsat,
            COUNTS,
            LIMITS,
            solvers=("ortools",),
        ),
        "placement": Method(
            "greedy placement and the volume bound, no search",
            solve_by_placement,
            COUNTS,
            LIMITS,
        ),
        "pulp": Method(
            "the paper's program, readable, by PuLP and HiGHS",
            solve_by_pulp,
            COUNTS,
            LIMITS,
            solvers=("pulp", "highspy"),
        ),
    },
    choose=method_in_rounds,
    switches=LIMITS,
    leaves_out=_leaves_out,
    export=_export,
)
