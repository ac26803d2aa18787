"""Hindsight at any scale, without a model.

The Lagrangian dual gives the bound, and a large-neighbourhood search the schedule. See
`optsched.optimize.search.anytime`.
"""

import sys

import numpy as np

from optsched.bounds.base import ANY_INSTANCE, WORKERS
from optsched.bounds.timeline import Ints
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.rounds.goals import LATENCY, by_latency
from optsched.optimize.formulations.rounds.horizon import search_data
from optsched.optimize.solvers.base import SolveOptions, Status, run_search
from optsched.problem.budget import Budget, work_time
from optsched.problem.schedule import runs_on

STEPS, STEPS_PER_REQUEST = 20_000, 8_000
"""The steps of the search on several workers if there is no time limit."""


def solve_by_lns(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule found, the bound proved and its certificate.

    Without a time limit it ends after 20,000 steps and another 8,000 per request. With one the time
    alone ends it. The time of the first bound counts as that to build the model (`Answer.solve_s`).
    """
    if task.workers > 1:
        return _on_workers(task, options)

    from optsched.optimize.search.anytime import explore

    search_data(task.instance)  # it refuses what the search ignores
    search = run_search(
        options,
        lambda budget: explore(
            task.instance,
            budget,
            max_steps=None if options.time_limit_s is None else sys.maxsize,
            gap=options.mip_rel_gap,
            seed=options.seed,
            warm_start=options.warm_start,
        ),
    )
    proved = search.objective is not None and search.objective <= search.bound
    return Answer(
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        schedule=search.schedule,
        objective=search.objective,
        bound=search.bound,
        native_status=f"{search.steps} steps, bound by {search.origin}",
        solve_s=search.search_s - search.first_bound_s,
        certificate=search.certificate(),
    )


def _on_workers(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule that the search finds on several workers, without a bound."""
    from optsched.optimize.search.anytime import orders
    from optsched.optimize.search.lns import Search
    from optsched.optimize.search.placement import place_in_order

    data, n = search_data(task.instance), task.instance.n
    workers = min(task.workers, n)
    # With a time limit the time alone ends the search.
    max_steps = STEPS + STEPS_PER_REQUEST * n if options.time_limit_s is None else sys.maxsize

    def place(order: Ints) -> tuple[Ints, Ints]:
        """Return starts and workers of requests placed in an order."""
        starts, workers_of = np.zeros((2, n), dtype=np.int64)
        # The rounds that may be in use, a copy of the outputs and the tokens held before the first
        # one are as in `horizon.place`.
        end = data.end + int(data.output.max()) + 2
        columns = data.arrival, data.output.copy(), data.first_kv - 1, task.instance.kv_capacity
        use = np.zeros((workers, end), dtype=np.int64)
        place_in_order(order, *columns, use, starts, workers_of)
        return starts, workers_of

    def search(budget: Budget) -> Search:
        """Improve the best of the orders until the budget is used up."""
        starts, workers_of = min(map(place, orders(data)), key=lambda result: data.tel(result[0]))
        result = Search(data, starts, seed=options.seed, homes=workers_of, workers=workers)

        def report() -> None:
            budget.tell(incumbent=float(result.best_value))

        result.anneal(budget, max_steps, lambda: budget.over, report)
        return result

    begin = work_time()
    result = run_search(options, search)
    return Answer(
        Status.FEASIBLE,
        runs_on(task.instance, result.best + data.shift, result.homes),
        objective=result.best_value,
        native_status=f"{result.steps} steps",
        solve_s=work_time() - begin,
    )


_SUMMARY = "Lagrangian dual and large-neighbourhood search, at any scale"
_FEATURES = ANY_INSTANCE | WORKERS
_LNS = Method(_SUMMARY, by_latency(solve_by_lns), LATENCY, solvers=("numba",), features=_FEATURES)
METHODS = {"hindsight": {"lns": _LNS}}
