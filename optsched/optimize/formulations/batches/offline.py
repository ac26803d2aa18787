"""InferMax beyond the reach of the exact methods, without a model.

`optsched.optimize.search.offline` searches for schedules, and `optsched.bounds` bounds the work.
"""

from optsched.bounds.base import ANY_INSTANCE, MINORANTS, WORKERS
from optsched.bounds.tail import TAIL
from optsched.costs.batch import COEFFICIENTS
from optsched.judge.evaluate import Evaluation
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.problem import SWITCHES, problem
from optsched.optimize.solvers.base import SolveOptions, Status, run_search
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError

# The share of the time limit for the bounds.
_BOUND_SHARE = 0.3
# The seconds for the bounds if there is no time limit.
_MAX_BOUND_S = 60.0

_MEANS = ("makespan", "tel", "mean_latency", "mean_ttft", "slo_attainment")
SEARCHED = (*_MEANS, *TAIL.objectives)
"""The objectives of the offline search."""


def solve_offline(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule found and the best bound known. It is optimal if the two meet.

    The schedule obeys the formulation. Without a time limit the search ends after a number of
    candidates without an improvement.
    """
    from optsched.optimize.interval import Interval
    from optsched.optimize.search.offline import improve
    from optsched.optimize.strategies import prove

    problem(task)  # it refuses what infermax does not model
    goal = task.goal

    def obeys(evaluation: Evaluation) -> bool:
        """Whether the formulation allows a schedule."""
        if evaluation.split_prefill and task.instance.chunked_prefill is not True:
            return False

        return not (task.extras.get("eviction_free") and evaluation.evictions.any())

    def search(budget: Budget) -> Answer:
        """Bound first, then search for schedules in what is left of the time."""
        interval = Interval(task, budget)
        limited = options.time_limit_s is not None
        # A share of no limit would be no limit, too.
        patience = Budget(_MAX_BOUND_S, stop=budget.stop)
        prove(interval, budget.part(_BOUND_SHARE) if limited else patience)
        bound, bounded_s = interval.bound, budget.spent_s
        known = [] if options.warm_start is None else [options.warm_start]
        # The search's own clock begins with 0, and that of reports with the bounds.
        interval.clock_s = bounded_s
        part = budget.part(1.0, interval.merge_progress)
        try:
            schedule, found_by = improve(task, part, admit=obeys, seed=options.seed, known=known)
        except NoIncumbentError as error:
            return Answer(Status.NO_INCUMBENT, bound=bound, native_status=str(error))

        value = goal.of(interval.judge(schedule, quiet=True))
        assert value is not None  # the schedule finishes every request
        proved = bound is not None and not goal.better(bound, value)
        native = f"{found_by}; bound by {interval.bound_origin}"
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        return Answer(status, schedule, value, bound, native, budget.spent_s - bounded_s)

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
