"""The optimum that ratios are measured against."""

from __future__ import annotations

from optsched.optimize.solve import Result, solve
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule


def optimum(
    instance: Instance,
    *,
    time_limit_s: float,
    seed: int = 0,
    warm_start: Schedule | None = None,
) -> Result:
    """Return the hindsight program's answer for an instance in rounds, on one thread.

    By the method ``ramp``, which proves a dozen requests many times as fast as the general
    solvers do; where it does not apply, by the formulation's own choice.
    """
    for method in ("ramp", "auto"):
        try:
            return solve(
                instance,
                method=method,
                time_limit_s=time_limit_s,
                threads=1,
                seed=seed,
                warm_start=warm_start,
            )
        except UsageError:
            if method == "auto":
                raise
    raise AssertionError  # the loop returns or raises
