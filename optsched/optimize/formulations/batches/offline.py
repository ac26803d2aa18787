"""InferMax beyond the reach of the exact methods, without a model.

`optsched.optimize.search.offline` searches for schedules, and `optsched.bounds` bounds the work.
"""

from __future__ import annotations

import threading
import time
import warnings
from importlib.metadata import version

from optsched.bounds.base import ANY_INSTANCE
from optsched.costs.batch import COEFFICIENTS
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.problem import SWITCHES, problem
from optsched.optimize.solvers.base import Progress, SolveOptions, Status, run_interruptibly
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError

_BOUND_SHARE = 0.3
"""The share of the time limit for the bounds."""
_PATIENT_S = 60.0
"""The seconds for the bounds if there is no time limit."""


def solve_offline(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule found and the best bound known. It is optimal if the two meet.

    The schedule obeys the formulation. Prefills are in one piece unless the instance allows chunks,
    and there are no evictions if the task forbids them. Without a time limit the search ends after
    a number of candidates without an improvement.

    Parameters
    ----------
    task : Task
    options : SolveOptions

    Returns
    -------
    Answer

    Raises
    ------
    UsageError, InfeasibleError, InputError
        As `optsched.optimize.formulations.batches.problem.problem`.
    """
    from optsched.bounds import lower_bound
    from optsched.optimize.search.offline import improve

    problem(task)  # for its checks
    begin = time.perf_counter()
    name, cost = task.names[0], task.cost_model
    limit = options.time_limit_s
    stop = threading.Event()
    answers: list[Answer] = []

    def inside(evaluation: Evaluation) -> bool:
        if evaluation.split_prefill and task.instance.chunked_prefill is not True:
            return False
        return not (task.extras.get("eviction_free") and evaluation.evictions.any())

    def work() -> None:
        bound, origin = lower_bound(
            task.instance, cost_model=cost, objective=name, stop=stop,
            time_limit_s=_PATIENT_S if limit is None else _BOUND_SHARE * limit,
        )  # fmt: skip
        bound_s = time.perf_counter() - begin

        def report(found: Progress) -> None:
            if options.progress is not None:
                elapsed_s = time.perf_counter() - begin
                options.progress(Progress(elapsed_s, found.incumbent, bound))

        left_s = None if limit is None else max(0.0, limit - bound_s)
        try:
            schedule, found_by = improve(
                task.instance, cost, Budget(left_s, stop=stop, progress=report), objective=name,
                admit=inside, seed=options.seed,
                known=[] if options.warm_start is None else [options.warm_start],
            )  # fmt: skip
        except NoIncumbentError as error:
            answers.append(Answer(Status.NO_INCUMBENT, bound=bound, native_status=str(error)))
            return
        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            value = evaluate(task.instance, schedule, cost).metrics[name]
        assert value is not None
        answers.append(
            Answer(
                Status.OPTIMAL if bound is not None and value <= bound else Status.FEASIBLE,
                schedule=schedule,
                objective=value,
                bound=bound,
                native_status=f"{found_by}; bound by {origin}",
                build_s=bound_s,
                solve_s=time.perf_counter() - begin - bound_s,
                versions={"numba": version("numba")},
            )
        )

    run_interruptibly(work, cancel=stop.set, stop=options.stop)
    return answers[0]


METHODS = {
    "infermax": {
        "search": Method(
            "offline search under a rule with parameters, bounds from GPU work, at any scale",
            solve_offline,
            ("makespan", "tel", "mean_ttft"),
            switches=SWITCHES,
            extras=frozenset({"eviction_free"}),
            features=ANY_INSTANCE | {f"cost.{name}" for name in COEFFICIENTS},  # the judge's prices
        )
    }
}
