"""Bounds from what requests cost by class of batch length, for tabulated models.

`optsched.bounds.checker.class_work` has what they cost, and the proof of sums and of the makespan;
`optsched.bounds.checker.slo_prices` that of requests within their SLOs. Here are the charges. What
the batches of a request may last matters where SLOs limit it, so there are classes as of paths;
where nothing does, charges that are valid for all batches are the least, and so one class will do.
"""

from typing import Any

import numpy as np

from optsched.bounds.base import MINORANTS, Bound, BoundTask, Proof, of_table
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.certificate import cost_model_dict
from optsched.bounds.charges import class_charges, targets_of
from optsched.bounds.checker.class_work import Floors, floors_of, with_floors
from optsched.bounds.checker.classes import exact_charges
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.seconds import parts_of
from optsched.bounds.checker.work import work_ticks
from optsched.bounds.class_paths import path_charges
from optsched.bounds.leaves import TICKS_PER_SECOND, class_work_leaf, seconds_of
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.errors import OutOfTimeError

# How far charges may be below the best ones, relatively.
_NEAR = 1e-3
# The share of the time that charges may take; prices have the rest.
_CHARGES_SHARE = 0.5


def machine_of(task: BoundTask) -> tuple[Any, Any]:
    """Return the instance and the cost model of a task as a certificate states them."""
    assert isinstance(task.cost_model, BatchCost)  # that of a problem in seconds
    return task.instance, cost_model_dict(task.cost_model)


def within_slos(task: BoundTask, budget: Budget) -> tuple[dict[str, Any], Floors] | None:
    """Return a leaf of charges by class and what they say; None if there is no time for any."""
    try:
        charges = path_charges(task, budget.part(_CHARGES_SHARE))
    except (Rejected, OutOfTimeError):
        return None

    leaf = class_work_leaf(charges.lo, charges.vectors[:, 0])
    return leaf, floors_of(machine_of(task), exact_charges(leaf))


def class_work(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on total latency, mean TTFT or makespan, in seconds."""
    instance, machine, goal = task.instance, machine_of(task), task.goal.name
    tokens = targets_of(instance, 2)[:1]
    # Only prefills count before the first tokens.
    mix = tokens * (0, 0, 0, 1, 1) if goal == "mean_ttft" else tokens
    order = np.argsort(instance.release_times, kind="stable").tolist()
    try:
        charges = class_charges(task, mix, (), budget, _NEAR)
        leaf = class_work_leaf(charges.lo, charges.vectors[:, 0])
        _, part = next(parts_of(*machine, TICKS_PER_SECOND, [order]))
        floors = floors_of(machine, exact_charges(leaf))
    except (Rejected, OutOfTimeError):
        return Proof(0.0)

    ticks = work_ticks(with_floors(part, floors), goal)
    value = seconds_of(ticks, TICKS_PER_SECOND * (instance.n if goal == "mean_ttft" else 1))
    if goal == "makespan":
        value += float(instance.first_arrival)

    return Proof(value, tree=leaf)


CLASS_WORK = Bound(
    "class-work",
    "charges by batch length on one preemptive machine, and prefills alone",
    "second",
    ("mean_ttft", "makespan"),  # of total latency `classes` proves more
    class_work,
    PROVED_FOR | MINORANTS,
    searches=True,
    suits=of_table,
    certifies=True,
)
