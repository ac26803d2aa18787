"""The ramp bound. It is registered here since its relaxation uses the searches of this package."""

from optsched.bounds.base import ANY_INSTANCE, REGISTRY, Bound, BoundTask, Proof
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY

RAMP_REQUESTS, RAMP_CAPACITY = 100, 100
"""The max requests and KV tokens for which the ramp relaxation has few enough states."""


def prove_by_ramp(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound of the ramp relaxation, its certificate and its schedule.

    The bound ignores limits on batches, which only rule schedules out. The schedule may break them.
    """
    from optsched.optimize.formulations.base import Task
    from optsched.optimize.formulations.rounds.ramp import solve_by_ramp
    from optsched.optimize.solvers.base import SolveOptions

    options = SolveOptions(
        time_limit_s=budget.left_s,
        seed=task.seed,
        warm_start=task.known,
        progress=budget.progress,
        stop=budget.stop,
    )
    answer = solve_by_ramp(Task(task.instance, objective=(TOTAL_LATENCY,)), options)
    return Proof(int(answer.certificate["value"]), answer.certificate, answer.schedule)


def suits_ramp(instance: Instance) -> bool:
    """Return whether the relaxation has few enough states to be of use."""
    return instance.n <= RAMP_REQUESTS and instance.kv_capacity <= RAMP_CAPACITY


RAMP = REGISTRY.add(
    "ramp",
    Bound(
        "ramp",
        "reverse-time ramp relaxation; for up to about 60 requests",
        "round",
        ("tel",),
        prove_by_ramp,
        ANY_INSTANCE,
        searches=True,
        certifies=True,
        suits=lambda task: suits_ramp(task.instance),
    ),
)
