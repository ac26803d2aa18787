"""The optimum that ratios are measured against."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from optsched.optimize.solve import Result, solve
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance


def optimum(instance: Instance, **options: Any) -> Result:
    """Return the hindsight program's answer for an instance in rounds, on one thread.

    By the method ``ramp``, which proves a dozen requests many times as fast as the general
    solvers do; where it does not apply, by the formulation's own choice. Options are those of
    `optsched.solve`.
    """
    with suppress(UsageError):
        return solve(instance, method="ramp", threads=1, **options)
    return solve(instance, threads=1, **options)
