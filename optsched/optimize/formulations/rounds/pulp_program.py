"""The hindsight program as Jaillet et al. 2025 write it, in PuLP: to be read and exported."""

from dataclasses import replace
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Readable, Task
from optsched.optimize.formulations.rounds import integer_program as models
from optsched.optimize.formulations.rounds.goals import GOALS
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.optimize.solvers.pulp_models import LONGEST, solve_pulp_problem
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.columns import check_whole
from optsched.problem.errors import OutOfTimeError, UsageError, named
from optsched.problem.memory import check_size, check_tokens
from optsched.problem.schedule import Schedule

# The bytes of a nonzero in PuLP, with its share of variables and names.
_ENTRY_BYTES = 200


def pulp_problem(
    prog: models.Program, budget: Budget = NO_LIMIT
) -> tuple[Any, list[dict[int, Any]], dict[int, Any]]:
    """Return the PuLP problem, its variables ``x_i_t`` by request and start, and ``y_t`` by round.

    Every family of rows of `optsched.optimize.formulations.rounds.integer_program` is one loop
    here, with all of its rows, which are named after it: ``memory_t``, ``phase_prefill_i_t``. Only
    rounds in which some request may run have rows.
    """
    import pulp

    data, limits = prog.data, prog.data.instance.limits
    # The paper's symbols: arrivals, prompt and output tokens.
    a, s, o = data.arrival.tolist(), data.prompt.tolist(), data.output.tolist()
    offset = data.instance.kv_offset
    requests = range(data.instance.n)
    # The rounds in which each request may run, by its first and its last start.
    spans = [range(a[i] + 1, int(prog.last[i]) + o[i] + 1) for i in requests]
    rounds = sorted(set().union(*spans))

    what = f"nonzeros in the readable program of {len(a)} requests"
    entries = models.entries_at_most(data, prog.last)
    check_size(entries, _ENTRY_BYTES, what, "highs has room for more")
    x: list[dict[int, Any]] = []
    for i in budget.through(requests):
        starts = range(a[i], int(prog.last[i]) + 1)
        x.append({t: pulp.LpVariable(f"x_{i}_{t}", cat=pulp.LpBinary) for t in starts})

    problem = pulp.LpProblem("hindsight", pulp.LpMinimize)
    _set_objective(problem, prog, x)
    for i in requests:
        started = pulp.lpSum(x[i].values())
        problem += (started <= 1 if prog.on_time else started == 1), f"once_{i}"

    def running(i: int, t: int, first: int = 1) -> list[tuple[int, Any]]:
        """Return the starts k, with variables, for which t is i's first-th or a later round."""
        return [(k, x[i][k]) for k in range(t - o[i], t - first + 1) if k in x[i]]

    for t in budget.through(rounds):
        # In round t a run from k holds t - k tokens more than q_i = s_i + offset - 1.
        load = pulp.lpSum(
            (s[i] + t - k + offset - 1) * var for i in requests for k, var in running(i, t)
        )
        problem += _at_most(load, data.instance.kv_capacity), f"memory_{t}"
        # Who starts at t - 1 prefills in round t.
        starting = [(i, x[i][t - 1]) for i in requests if t - 1 in x[i]]
        prompts = pulp.lpSum(s[i] * var for i, var in starting)

        if limits.max_running is not None:
            in_run = pulp.lpSum(var for i in requests for _, var in running(i, t))
            problem += _at_most(in_run, limits.max_running), f"running_{t}"

        if limits.max_batch_tokens is not None:
            decodes = pulp.lpSum(var for i in requests for _, var in running(i, t, first=2))
            problem += _at_most(prompts + decodes, limits.max_batch_tokens), f"batch_{t}"

        if limits.max_prefill_tokens is not None:
            problem += _at_most(prompts, limits.max_prefill_tokens), f"prefill_{t}"

    # y_t is 1 in a round with a prefill, and then nobody decodes in it.
    y: dict[int, Any] = {}
    if data.hybrid_off:
        for t in budget.through(rounds):
            y[t] = pulp.LpVariable(f"y_{t}", lowBound=0, upBound=1)
            for i in requests:
                if t - 1 in x[i]:
                    problem += x[i][t - 1] <= y[t], f"phase_prefill_{i}_{t}"

                decodes = running(i, t, first=2)
                if decodes:
                    decode_or_prefill = pulp.lpSum(var for _, var in decodes) + y[t]
                    problem += decode_or_prefill <= 1, f"phase_decode_{i}_{t}"

    return problem, x, y


def _set_objective(problem: Any, prog: models.Program, x: list[dict[int, Any]]) -> None:
    """Set the objective: minus those in time, or the sum or the largest of what requests count.

    ``x`` has the variables by request and start (`pulp_problem`).
    """
    import pulp

    if prog.on_time:
        problem += -pulp.lpSum(var for starts in x for var in starts.values()), "in_time"
        return

    goal, arrival = prog.goal, prog.data.arrival.tolist()
    slope, base = goal.slope.tolist(), goal.base.tolist()
    counted = [
        pulp.lpSum((slope[i] * (t - arrival[i]) + base[i]) * var for t, var in starts.items())
        for i, starts in enumerate(x)
    ]
    value = pulp.LpVariable("largest") if goal.largest else pulp.lpSum(counted)
    # With slopes of 1 the sum is the total latency, up to a constant.
    problem += value, "total_latency" if goal.equal == 1 else "value"
    for i in range(len(x)) if goal.largest else ():
        problem += value >= counted[i], f"counted_{i}"


def _at_most(load: Any, limit: int) -> Any:
    """Return the row that limits a load of binaries.

    Files hold few digits, so a limit that is too long for one is put at the largest load possible,
    which is that of all binaries at 1.
    """
    return load <= (limit if limit < LONGEST else min(limit, max(1, sum(load.values()))))


def readable(task: Task, length: int | None = None) -> Readable:
    """Return the program of a task to which rows may be added.

    Starts are rounds of the instance, gaps included. Windows of starts (`horizon.start_windows`)
    hold for the unchanged problem only. So each request may start until all others could have run
    one by one after the last arrival, or as late as a length in rounds allows. A length below
    what that needs is refused.
    """
    instance = task.instance
    goal = named("model: objective", task.names[0], GOALS, UsageError)(instance)
    prog, release = models.program(instance, goal, windows=False), instance.release_times
    sufficient = int(release.max() + instance.output_tokens.sum())
    end = check_whole(sufficient if length is None else length, "length", sufficient)
    data = replace(prog.data, arrival=release, shift=np.zeros_like(release))
    prog = replace(prog, data=data, last=end - instance.output_tokens)
    problem, x, y = pulp_problem(prog)
    variables: dict[tuple[str | int, ...], Any] = {
        ("x", i, t): var for i, starts in enumerate(x) for t, var in starts.items()
    }
    binaries = list(variables.values())

    def schedule() -> Schedule:
        values = np.array([var.varValue for var in binaries], dtype=np.float64)
        return data.schedule(models.read_starts(prog, values))

    notes = (
        "x_I_K = 1: request I starts at K, and runs in rounds K + 1 to K + its output tokens.",
        f"Starts are not limited to what an optimum needs, so rows may be added: all runs end by "
        f"round {end}. {sufficient} suffices to run the requests one by one after the last "
        "arrival.",
        "optsched evaluate INSTANCE SOLUTION reads the solution that a solver writes.",
    )
    variables |= {("y", t): var for t, var in y.items()}
    # In rounds the objective is whole: True.
    return Readable(problem, variables, schedule, goal.value, True, end, notes)


def solve_by_pulp(task: Task, options: SolveOptions) -> Answer:
    """Build the readable program in PuLP, and solve it by HiGHS."""
    budget = options.budget()
    check_tokens(int(task.instance.peak_tokens.max()), "pulp")
    prog = models.program_of(task, options.warm_start)
    try:
        problem, x, y = pulp_problem(prog, budget)
        # The values to start from: the starts at hand, and their rounds as those of prefills.
        in_window = [(i, k) for i, k in enumerate(prog.warm.tolist()) if k in x[i]]
        start = [(x[i][k], 1.0) for i, k in in_window]
        start += [(y[k + 1], 1.0) for _, k in in_window if y]
        remaining = prog.options_left(options, budget)
        # The variable of the largest value is not in the hint, and would count as 0 there.
        hint = None if prog.goal.largest and not prog.on_time else start
        raw = solve_pulp_problem(problem, remaining, integral_objective=True, start=hint)
    except OutOfTimeError as why:
        # The starts at hand are a schedule.
        raw = RawOutcome(Status.FEASIBLE, float(prog.known), None, None, str(why))
        return models.answer(prog, raw, prog.warm)

    if raw.values is None:
        return models.answer(prog, raw, None)

    values = [var.varValue for starts in x for _, var in sorted(starts.items())]
    return models.answer(prog, raw, models.read_starts(prog, np.array(values, dtype=np.float64)))
