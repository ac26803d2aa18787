"""Whether a schedule's value and a bound can both be true: asked by `solve`, `bound`, `compare`."""

from __future__ import annotations

import numpy as np

from optsched.problem.errors import SolverError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective

AGREEMENT = 1e-6
"""Relative difference allowed between two computations of one value in seconds."""


def float_noise(instance: Instance, name: str, value: float) -> float:
    """Return by how much two computations of a value in seconds may differ.

    `AGREEMENT` of the value (of one second at least), and for every token what a float64 clock
    that counts from the first arrival loses at the last one: 3e-14 s after an hour of arrivals,
    4e-9 s after a year. A makespan is a time of day and is rounded once more.

    Parameters
    ----------
    instance : Instance
        In seconds.
    name : str
        The objective.
    value : float
    """
    noise = float(np.spacing(instance.release.max()))
    noise *= instance.n + int(instance.output_tokens.sum())
    if name == "makespan":
        noise += float(np.spacing(abs(value)))
        value -= instance.first_arrival
    return noise + AGREEMENT * max(1.0, abs(value))


def reconcile(
    instance: Instance,
    objective: Objective,
    known: tuple[float | int | None, str | None],
    bound: tuple[float | int | None, str | None],
) -> float | int | None:
    """Return the bound, or the schedule's value where the bound passes it by float noise.

    Parameters
    ----------
    instance : Instance
    objective : Objective
    known, bound : tuple
        A value with its origin: of a schedule that the bound covers, and of the bound.

    Raises
    ------
    SolverError
        The bound says that the schedule cannot exist.
    """
    (value, found_by), (limit, proved_by) = known, bound
    if value is None or limit is None:
        return limit
    excess = objective.signed(limit) - objective.signed(value)
    exact = objective.integral(instance)
    if excess > (0 if exact else float_noise(instance, objective.name, value)):
        raise SolverError(
            f"{proved_by}: its {objective} bound {limit} contradicts a schedule of "
            f"{objective} {value} "
            f"({found_by}); one of the two is wrong, which is an internal error"
        )
    return value if excess > 0 else limit
