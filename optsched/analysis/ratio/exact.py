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
    """Return the optimum of a problem, or what is known of it, from a store or by `solve`.

    `solve` runs on one thread, since studies run side by side. It starts from what the store has,
    and the store keeps what it adds.
    """
    asked: dict[str, Any] = {"threads": 1, "time_limit_s": time_limit_s, **options}
    if store is not None:
        known, search_is_in_vain = store.known(problem, time_limit_s)
        if known is not None and search_is_in_vain:
            return known

        asked["certify"] = True
        if known is not None and known.schedule is not None:
            asked.setdefault("warm_start", known.schedule)

    # Of a dozen requests in rounds, ramp proves the optimum far faster than general solvers.
    try:
        result = solve(problem, method="ramp", **asked)
    except UsageError:
        result = solve(problem, **asked)  # ramp does not know this kind of problem
    if store is None:
        return result

    store.keep(problem, result)
    # The store may have been better in one of the two ends. Nothing is searched here, hence 0 s.
    kept, _ = store.known(problem, 0.0)
    return kept or result
