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

    Without a time limit it ends after 20,000 steps and another 8,000 per request.
    """
    if task.workers > 1:
        return _on_workers(task, options)

    from optsched.optimize.search.anytime import explore

    search_data(task.instance)
    found = run_search(
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
    proved = found.objective is not None and found.objective <= found.bound
    return Answer(
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        schedule=found.schedule,
        objective=found.objective,
        bound=found.bound,
        native_status=f"{found.steps} steps, bound by {found.origin}",
        solve_s=found.search_s - found.first_bound_s,
        certificate=found.certificate(),
    )


def _on_workers(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule that the search finds on several workers, without a bound."""
    from optsched.optimize.search.anytime import orders
    from optsched.optimize.search.lns import Search
    from optsched.optimize.search.placement import place_in_order

    data, n = search_data(task.instance), task.instance.n
    workers = min(task.workers, n)
    max_steps = STEPS + STEPS_PER_REQUEST * n if options.time_limit_s is None else sys.maxsize

    def placed(order: Ints) -> tuple[Ints, Ints]:
        starts, homes = np.zeros((2, n), dtype=np.int64)
        end = data.end + int(data.output.max()) + 2
        columns = data.arrival, data.output.copy(), data.first_kv - 1, task.instance.kv_capacity
        place_in_order(order, *columns, np.zeros((workers, end), dtype=np.int64), starts, homes)
        return starts, homes

    def search(budget: Budget) -> Search:
        starts, homes = min(map(placed, orders(data)), key=lambda found: data.tel(found[0]))
        found = Search(data, starts, seed=options.seed, homes=homes, workers=workers)

        def tell() -> None:
            budget.tell(incumbent=float(found.best_value))

        found.anneal(budget, max_steps, lambda: budget.over, tell)
        return found

    begin = work_time()
    found = run_search(options, search)
    return Answer(
        Status.FEASIBLE,
        runs_on(task.instance, found.best + data.shift, found.homes),
        objective=found.best_value,
        native_status=f"{found.steps} steps",
        solve_s=work_time() - begin,
    )


_SUMMARY = "Lagrangian dual and large-neighbourhood search, at any scale"
_FEATURES = ANY_INSTANCE | WORKERS
_LNS = Method(_SUMMARY, by_latency(solve_by_lns), LATENCY, solvers=("numba",), features=_FEATURES)
METHODS = {"hindsight": {"lns": _LNS}}
