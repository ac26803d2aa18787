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
    """Return what is kept of a problem, or what `solve` answers on one thread, which is kept then.

    Of a dozen requests in rounds ``ramp`` proves the optimum far faster than general solvers.
    """
    known = None if store is None else store.known(problem, time_limit_s)
    if known is not None:
        return known

    certify = store is not None
    asked = {"threads": 1, "time_limit_s": time_limit_s, "certify": certify, **options}
    try:
        found = solve(problem, method="ramp", **asked)
    except UsageError:
        found = solve(problem, **asked)
    if store is not None:
        store.keep(problem, found)

    return found
