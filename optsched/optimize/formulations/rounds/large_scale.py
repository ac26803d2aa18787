"""Hindsight at any scale, without a model.

The Lagrangian dual gives the bound, and a large-neighbourhood search the schedule. See
`optsched.optimize.search.anytime`.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.solvers.base import SolveOptions, Status, run_search


def solve_by_lns(task: Task, options: SolveOptions) -> Answer:
    """Return the best schedule found, the bound proved and its certificate.

    With a time limit the search goes on until the limit, or until bound and schedule meet. Without
    one it ends after 20,000 steps and another 8,000 per request.

    Parameters
    ----------
    task : Task
    options : SolveOptions

    Returns
    -------
    Answer

    Raises
    ------
    UsageError
        The time axis is too long for an array of rounds, or the instance has limits on batches.
    """
    from optsched.optimize.search.anytime import explore
    from optsched.optimize.search.placement import room_of

    room_of(task.instance)
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
        build_s=found.first_bound_s,
        solve_s=found.search_s - found.first_bound_s,
        certificate=found.certificate(),
        versions={"numba": version("numba")},
    )


METHODS = {
    "hindsight": {
        "lns": Method(
            "Lagrangian dual and large-neighbourhood search, at any scale",
            solve_by_lns,
            ("tel",),
        )
    }
}
