"""Infermax by CP-SAT: the method for arrivals, max TPOT and several objectives in order."""

import math
from dataclasses import replace

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches import plans, problem as csp
from optsched.optimize.formulations.batches.cpsat_model import Model
from optsched.optimize.formulations.batches.problem import BatchProblem
from optsched.optimize.formulations.batches.start import start_of
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.problem.errors import OutOfTimeError

# Added to each chosen start, so that rounding does not put it before its predecessor's end.
_MARGIN_S = 1e-12


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve infermax by CP-SAT, for one objective after the other.

    Starts are read only where the model chose them, or where its time begins after the first
    arrival. Else each batch starts as early as it may.
    """
    prob, start, times = start_of(task, options)
    try:
        built = Model(prob, plans.max_batches(prob, times), start)
    except OutOfTimeError as late:
        return plans.unbuilt(prob, start, late)

    # Levels are whole, and below the value asked for.
    if prob.cutoff is not None:
        built.model.add(built.level(prob.objectives[0]) <= math.ceil(prob.cutoff) - 1)

    remaining = options.after(prob.budget.spent_s)
    outcomes = _solve_in_order(built, remaining, plans.known_level(prob, times))
    solved = [raw for raw in outcomes if raw.values is not None]
    plan, chosen_starts = None, None

    if solved:
        plan, starts = built.decisions(solved[-1].values)
        if built.chosen_starts or built.late:
            chosen_starts = _useful_starts(prob, plan, starts)

    # The first objective's proof counts only if the others, in order, are proved, too.
    status = outcomes[0].status
    if status is Status.OPTIMAL and outcomes[-1].status is not Status.OPTIMAL:
        status = Status.FEASIBLE

    claim = plans.Claim(status, plan, plans.UNITS.level(outcomes[0].bound), start=chosen_starts)
    native, solve_s = outcomes[-1].native_status, sum(raw.solve_s for raw in outcomes)
    return plans.answer(prob, claim, native, solve_s, fallback=start, room=built.batches)


def _solve_in_order(built: Model, remaining: SolveOptions, known: int | None) -> list[RawOutcome]:
    """Solve for one objective after the other, as long as each is proved.

    ``known``: a level of the first one that a schedule reaches.
    """
    from optsched.optimize.solvers.cpsat import solve_cp_model

    model, read = built.model, built.read()
    remaining = plans.UNITS.in_values(remaining, built.prob)
    outcomes: list[RawOutcome] = []

    for name in built.prob.objectives:
        level = built.level(name)
        model.minimize(level)
        raw = solve_cp_model(model, remaining, read=read, known=known)
        outcomes.append(raw)
        # Progress and the known level are of the first objective.
        remaining, known = replace(remaining.after(raw.solve_s), progress=None), None
        if raw.status is not Status.OPTIMAL or raw.objective is None or raw.values is None:
            break

        # The next one may not spoil this one. Its search begins with the solution found.
        model.add(level <= round(raw.objective))
        model.clear_hints()
        for expression, value in zip(read, raw.values.tolist(), strict=True):
            # Constants are read, too, and have no hints.
            if hasattr(expression, "proto") or hasattr(expression, "index"):
                model.add_hint(expression, round(value))

    return outcomes


def _useful_starts(prob: BatchProblem, plan: plans.Plan, starts: list[int]) -> list[float] | None:
    """Return the chosen starts in seconds since the first arrival; None if the earliest do.

    ``starts`` are by batch, in the models' unit. Levels of all objectives are compared in order.
    """
    unit = prob.costs.unit_s
    chosen = [float(t * unit) + (j + 1) * _MARGIN_S for j, t in enumerate(starts)]
    with_chosen, earliest = (prob.levels(plans.exact_times(prob, plan, s)) for s in (chosen, None))
    return None if earliest <= with_chosen else chosen


_CPSAT = Method(
    "conditionals as they stand, by CP-SAT in exact integers",
    solve_by_cpsat,
    (*csp.OBJECTIVES, csp.COUNTED),
    csp.SWITCHES,
    lexicographic=True,
    extras=csp.EXTRAS,
    solvers=("ortools",),
    features=csp.MODELLED,
)
METHODS = {"infermax": {"cpsat": _CPSAT}}
