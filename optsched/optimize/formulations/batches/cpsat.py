"""Infermax by CP-SAT: the method for arrivals, max TPOT and several objectives in order."""

import math
from dataclasses import replace

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches import plans, problem as csp
from optsched.optimize.formulations.batches.cpsat_model import Model
from optsched.optimize.formulations.batches.problem import BatchProblem
from optsched.optimize.formulations.batches.start import begun
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.problem.errors import OutOfTimeError

# Added to each chosen start, so that rounding does not put it before its predecessor's end.
_MARGIN_S = 1e-12


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve infermax by CP-SAT, for one objective after the other."""
    prob, start, times = begun(task, options)
    try:
        built = Model(prob, plans.max_batches(prob, times), start)
    except OutOfTimeError as late:
        return plans.unbuilt(prob, start, late)

    if prob.cutoff is not None:
        built.model.add(built.level(prob.objectives[0]) <= math.ceil(prob.cutoff) - 1)

    left = options.after(prob.budget.spent_s)
    outcomes = _in_order(built, left, plans.known_level(prob, times))
    found = [raw for raw in outcomes if raw.values is not None]
    plan, chosen = None, None

    if found:
        plan, starts = built.decisions(found[-1].values)
        if built.chosen_starts or built.late:
            chosen = _starts(prob, plan, starts)

    status = outcomes[0].status
    if status is Status.OPTIMAL and outcomes[-1].status is not Status.OPTIMAL:
        status = Status.FEASIBLE

    claim = plans.Claim(status, plan, plans.UNITS.level(outcomes[0].bound), start=chosen)
    native, solve_s = outcomes[-1].native_status, sum(raw.solve_s for raw in outcomes)
    return plans.answer(prob, claim, native, solve_s, fallback=start, room=built.batches)


def _in_order(built: Model, left: SolveOptions, known: int | None) -> list[RawOutcome]:
    """Solve for one objective after the other, as long as each is proved."""
    from optsched.optimize.solvers.cpsat import solve_cp_model

    model, read = built.model, built.read()
    left = plans.UNITS.told(left, built.prob)
    outcomes: list[RawOutcome] = []

    for name in built.prob.objectives:
        level = built.level(name)
        model.minimize(level)
        raw = solve_cp_model(model, left, read=read, known=known)
        outcomes.append(raw)
        left, known = replace(left.after(raw.solve_s), progress=None), None
        if raw.status is not Status.OPTIMAL or raw.objective is None or raw.values is None:
            break

        model.add(level <= round(raw.objective))
        model.clear_hints()
        for expression, value in zip(read, raw.values.tolist(), strict=True):
            if hasattr(expression, "proto") or hasattr(expression, "index"):
                model.add_hint(expression, round(value))

    return outcomes


def _starts(prob: BatchProblem, plan: plans.Plan, starts: list[int]) -> list[float] | None:
    """Return the chosen starts in seconds since the first arrival; None if the earliest do."""
    unit = prob.costs.unit_s
    chosen = [float(t * unit) + (j + 1) * _MARGIN_S for j, t in enumerate(starts)]
    levels, early = (prob.levels(plans.exact_times(prob, plan, s)) for s in (chosen, None))
    return None if early <= levels else chosen


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
