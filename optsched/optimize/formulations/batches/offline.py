"""InferMax beyond the reach of the exact methods, without a model.

`optsched.optimize.search.offline` searches for schedules, and `optsched.bounds` bounds the work.
"""

from __future__ import annotations

import warnings

from optsched.bounds.base import ANY_INSTANCE, MINORANTS, WORKERS
from optsched.bounds.tail import TAIL
from optsched.costs.batch import COEFFICIENTS
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.problem import SWITCHES, problem
from optsched.optimize.solvers.base import Progress, SolveOptions, Status, run_search
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError
from optsched.problem.objective import service_limits

_BOUND_SHARE = 0.3
"""The share of the time limit for the bounds."""
_PATIENT_S = 60.0
"""The seconds for the bounds if there is no time limit."""

SEARCHED = (
    "makespan", "tel", "mean_ttft", "latency_and_ttft", "slo_attainment", *TAIL.objectives,
)  # fmt: skip
"""The objectives of the offline search."""


def solve_offline(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule found and the best bound known. It is optimal if the two meet.

    The schedule obeys the formulation. Prefills are in one piece unless the instance allows chunks,
    and there are no evictions if the task forbids them. Without a time limit the search ends after
    a number of candidates without an improvement.
    """
    from optsched.bounds import lower_bound
    from optsched.optimize.search.offline import improve
    from optsched.policies.engine.simulate import completions

    problem(task)  # for its checks
    goal, cost = task.objective[0], task.cost_model

    def inside(evaluation: Evaluation) -> bool:
        if evaluation.split_prefill and task.instance.chunked_prefill is not True:
            return False

        return not (task.extras.get("eviction_free") and evaluation.evictions.any())

    def search(budget: Budget) -> Answer:
        limit = options.time_limit_s
        bound, origin = lower_bound(
            task.instance, cost_model=cost, objective=goal, stop=budget.stop, workers=task.workers,
            time_limit_s=_PATIENT_S if limit is None else _BOUND_SHARE * limit,
            completions=completions,
        )  # fmt: skip
        bound_s = budget.spent_s

        def report(found: Progress) -> None:
            budget.tell(incumbent=found.incumbent, bound=bound)

        try:
            schedule, found_by = improve(
                task.instance, cost, budget.part(1.0, report), objective=goal,
                admit=inside, seed=options.seed, workers=task.workers,
                known=[] if options.warm_start is None else [options.warm_start],
            )  # fmt: skip
        except NoIncumbentError as error:
            return Answer(Status.NO_INCUMBENT, bound=bound, native_status=str(error))

        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            limits = service_limits(task.objective)
            value = goal.of(evaluate(task.instance, schedule, cost, **limits))

        assert value is not None
        proved = bound is not None and not goal.better(bound, value)
        return Answer(
            Status.OPTIMAL if proved else Status.FEASIBLE,
            schedule=schedule,
            objective=value,
            bound=bound,
            native_status=f"{found_by}; bound by {origin}",
            solve_s=budget.spent_s - bound_s,
        )

    return run_search(options, search)


_SEARCH = Method(
    "offline search under a rule with parameters, bounds from GPU work, at any scale",
    solve_offline,
    SEARCHED,
    SWITCHES,
    extras=frozenset({"eviction_free"}),
    solvers=("numba",),
    # The judge prices the schedules.
    features=ANY_INSTANCE | MINORANTS | WORKERS | {f"cost.{name}" for name in COEFFICIENTS},
)
METHODS = {"infermax": {"search": _SEARCH}}
