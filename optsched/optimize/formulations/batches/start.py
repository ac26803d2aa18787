"""Plans that infermax's methods start from: a given schedule, or a policy's."""

from fractions import Fraction

from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.batches.plans import Plan, exact_times, plan_of
from optsched.optimize.formulations.batches.problem import (
    LARGEST_UNITS,
    BatchProblem,
    Times,
    problem,
)
from optsched.optimize.solvers.base import SolveOptions
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError, UsageError
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

# Policies that never evict, that may, and that may split prefills where these are allowed.
_POLICIES = ("least-work", "mc-sf", "sarathi-nohy", "vllm", "sarathi")
# The seconds for each of them, but the first, without which there is no schedule.
_POLICY_S = 2.0
# The max product of requests and output tokens, beyond which exact methods are refused.
_MAX_PRODUCT = 10_000_000


def start_of(
    task: Task, options: SolveOptions, largest: int = LARGEST_UNITS
) -> tuple[BatchProblem, Plan | None, Times | None]:
    """Return a task's problem, whose budget begins now, and a plan to start from with its times.

    The plan is that of the warm start, or a policy's best. There is none if the problem rules all
    of them out. ``largest``: the largest level that the method can hold.
    """
    prob, warm_start = problem(task, options.budget(), largest), options.warm_start
    if prob.n * sum(prob.output) > _MAX_PRODUCT:
        raise UsageError(
            f"formulation infermax: found {prob.n} requests with {sum(prob.output)} output tokens, "
            "beyond the exact methods; expected the method search"
        )

    best: tuple[tuple[Fraction, ...], Plan, Times] | None = None
    if warm_start is not None and _is_admitted(prob, warm_start):
        schedules = [warm_start]
    else:
        schedules = _run_policies(prob, options.seed)

    for plan in map(plan_of, schedules):
        times = exact_times(prob, plan)
        levels = prob.levels(times)
        if best is None or levels < best[0]:
            best = levels, plan, times

    # A plan that is not below the value asked for is none to start from.
    if best is None or (prob.cutoff is not None and best[0][0] / prob.shrink >= prob.cutoff):
        return prob, None, None

    return prob, best[1], best[2]


def _run_policies(prob: BatchProblem, seed: int) -> list[Schedule]:
    """Return schedules of policies that the problem allows."""
    admitted, task = list[Schedule](), Problem(prob.instance, prob.model)
    for spec in _POLICIES:
        # One schedule is enough when time is up. Until there is one a policy has no limit.
        if admitted and prob.budget.over:
            break
        try:
            budget = Budget(_POLICY_S if admitted else None, stop=prob.budget.stop)
            schedule = simulate(task, spec, seed=seed, budget=budget)
        except OptschedError:
            continue  # it loops, takes too long, or the instance rules it out
        if _is_admitted(prob, schedule):
            admitted.append(schedule)

    return admitted


def _is_admitted(prob: BatchProblem, schedule: Schedule) -> bool:
    """Whether the judge accepts a schedule, and the models could have found it.

    They have one worker, evictions with recompute, and split prefills only if these are asked for.
    """
    if schedule.kind != "batches":
        return False
    try:
        judged = evaluate(Problem(prob.instance, prob.model), schedule)
    except OptschedError:
        return False

    split = judged.split_prefill and not prob.chunked
    evicts = judged.evictions.any() and (prob.eviction_free or schedule.evict_mode != "recompute")
    return judged.workers == 1 and not split and not evicts
