"""The optimum that ratios are measured against."""

from typing import Any

from optsched.analysis.optima import Optima
from optsched.optimize.bounded import Bounded
from optsched.optimize.solve import solve
from optsched.problem.errors import UsageError
from optsched.workloads.problem import Problem


def optimum(
    problem: Problem, store: Optima | None = None, *, time_limit_s: float, **options: Any
) -> Bounded:
    """Return what is kept of a problem, or what `solve` answers on one thread, which starts from
    what is kept, and adds to it.

    Of a dozen requests in rounds ``ramp`` proves the optimum far faster than general solvers.
    """
    asked: dict[str, Any] = {"threads": 1, "time_limit_s": time_limit_s, **options}
    if store is not None:
        known, over = store.known(problem, time_limit_s)
        if known is not None and over:
            return known

        asked["certify"] = True
        if known is not None and known.schedule is not None:
            asked.setdefault("warm_start", known.schedule)

    try:
        found = solve(problem, method="ramp", **asked)
    except UsageError:
        found = solve(problem, **asked)
    if store is None:
        return found

    store.keep(problem, found)
    return store.known(problem, 0.0)[0] or found
