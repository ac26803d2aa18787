"""Check whether a schedule's value and a bound can both be true.

`solve`, `bound` and `compare` use it.
"""

from numbers import Integral

import numpy as np

from optsched.judge.evaluate import Evaluation
from optsched.problem.errors import SolverError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective

AGREEMENT = 1e-6
"""The relative difference allowed between two computations of one value in seconds."""


TOLERANCE = 1e-9
"""The relative difference at which a value in seconds is said to meet its bound."""


def end_of(evaluation: Evaluation | None) -> float:
    """Return when a schedule ends, since the first arrival; 0 without one."""
    if evaluation is None:
        return 0.0

    return float(evaluation.finish.max() - evaluation.instance.first_arrival)


def is_met(value: float | None, bound: float | None, slack: float = 0.0) -> bool:
    """Return whether a schedule's value meets the bound on it, so that it is optimal.

    Integers meet if they are equal. Others may differ by `slack`, and by `TOLERANCE` of the value.
    """
    if value is None or bound is None:
        return False
    if isinstance(value, Integral) and isinstance(bound, Integral):
        return value == bound

    return abs(value - bound) <= max(slack, TOLERANCE * abs(value))


def rounding(evaluation: Evaluation, value: float) -> float:
    """Return by how much floats may change a value of a schedule in seconds.

    The judge's clock is rounded at every batch, and the value of all requests once each.
    """
    instance = evaluation.instance
    steps = instance.n + int(instance.output_tokens.sum())
    return steps * float(np.spacing(end_of(evaluation)) + np.spacing(abs(value)))


def float_noise(instance: Instance, name: str, value: float, end: float = 0.0) -> float:
    """Return by how much two computations of a value in seconds may differ.

    It is `AGREEMENT` times the value, and per request and token the rounding of a float64 clock at
    the last arrival or, if that is later, at the schedule's ``end`` (`end_of`), before which all
    delays of sessions lie: 5e-13 s after an hour, 4e-9 s after a year. A makespan is a time of day
    and is rounded once more.
    """
    latest = float(instance.given_arrivals.max() - instance.first_arrival)
    noise = float(np.spacing(max(latest, end)))
    noise *= instance.n + int(instance.output_tokens.sum())
    if name == "makespan":
        noise += float(np.spacing(abs(value)))
        value -= instance.first_arrival

    return noise + AGREEMENT * abs(value)


def reconcile(
    instance: Instance,
    objective: Objective,
    known: tuple[float | int | None, str | None],
    bound: tuple[float | int | None, str | None],
    end: float = 0.0,
) -> float | int | None:
    """Return the bound, or the schedule's value if the bound exceeds it by float noise only.

    `known` is the value of a schedule that the bound covers, and who found it; `bound` has its
    name. ``end`` is when the schedule ends (`end_of`). More than noise is an error: whole values
    have none.
    """
    (value, found_by), (bound_value, proved_by) = known, bound
    if value is None or bound_value is None:
        return bound_value

    excess = objective.signed(bound_value) - objective.signed(value)
    is_whole = objective.integral(instance)
    if excess > (0 if is_whole else float_noise(instance, objective.name, value, end)):
        raise SolverError(
            f"{proved_by}: its {objective} bound {bound_value} contradicts a schedule of "
            f"{objective} {value} "
            f"({found_by}); one of the two is wrong, which is an internal error"
        )

    return value if excess > 0 else bound_value
