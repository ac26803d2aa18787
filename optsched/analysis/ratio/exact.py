"""The optimum that ratios are measured against."""

from contextlib import suppress
from typing import Any

from optsched.optimize.solve import Result, solve
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.workloads.problem import Problem


def optimum(problem: Problem | Instance, **options: Any) -> Result:
    """Return what `solve` answers on one thread.

    Of a dozen requests in rounds ``ramp`` proves the optimum far faster than general solvers.
    """
    with suppress(UsageError):
        return solve(problem, method="ramp", threads=1, **options)

    return solve(problem, threads=1, **options)
