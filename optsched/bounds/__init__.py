"""Lower bounds on what any schedule costs, found by a registry.

A bound is one `Bound` at the top level of a module of this package; nothing else lists it.
`optsched.bound` is the door for users: it also looks for a schedule and writes certificates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import REGISTRY, Bound, BoundTask, Proof, features_of
from optsched.costs.cost import CostModel, UnitCost
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY, Objective

__all__ = [
    "Bound", "BoundTask", "Proof", "bounds", "features_of", "lower_bound", "raise_bound",
    "shadow_prices", "usable",
]  # fmt: skip


_FURTHER = ("optsched.optimize.bound",)
"""Modules above this package that add bounds of their own to the registry when they are loaded."""


def bounds() -> dict[str, Bound]:
    """Return every bound by name."""
    for module in _FURTHER:
        import_module(module)
    return REGISTRY.all()


def usable(task: BoundTask, method: str = "auto") -> list[Bound]:
    """Return the bounds that are proved for a task, those that search last.

    Parameters
    ----------
    task : BoundTask
    method : str
        One bound by name, or ``"auto"`` for all.

    Raises
    ------
    UsageError
        An unknown method, one that does not apply to the objective and the time unit, or one
        that is not proved for a feature of the instance or of its cost model.
    """
    applying = {name: bound for name, bound in bounds().items() if bound.applies(task)}
    able = {name: bound for name, bound in applying.items() if not bound.lacks(task)}
    if method == "auto":
        return sorted(able.values(), key=lambda bound: (bound.searches, bound.name))
    if method not in bounds():
        raise UsageError(
            f"method: {method!r} is no bound; known are auto, {', '.join(sorted(bounds()))}"
        )
    others = ", ".join(sorted(able)) or "none yet"
    if method not in applying:
        raise UsageError(
            f"method: the bound {method!r} does not apply to {task.objective} on an instance in "
            f"{task.instance.time_unit}s; those that do: {others}"
        )
    if method not in able:
        lacks = ", ".join(applying[method].lacks(task))
        raise UsageError(
            f"method: the bound {method!r} is not proved for {lacks}; those that are: {others}"
        )
    return [able[method]]


def raise_bound(
    task: BoundTask, budget: Budget, take: Callable[[str, Proof], None], method: str = "auto"
) -> None:
    """Run one bound, or all that are proved for a task, and hand their proofs over.

    Parameters
    ----------
    task : BoundTask
    budget : Budget
        Bounds that search run one after another, each with an equal share of what is left. When
        nothing is left they run only if asked for by name, as briefly as they can.
    take : callable
        Called as ``take(name, proof)`` with every proof.
    method : str

    Raises
    ------
    UsageError
        As `usable`.
    """
    queue = usable(task, method)
    if method == "auto":
        queue = [bound for bound in queue if not bound.searches or bound.suits(task)]
    for place, bound in enumerate(queue):
        started = place > 0
        if started and budget.stopped:
            break
        if bound.searches and method == "auto" and budget.over:
            break
        share = 1.0 / (len(queue) - place) if bound.searches else 1.0
        take(bound.name, bound.function(task, budget.part(share)))


def lower_bound(
    instance: Instance,
    *,
    method: str = "auto",
    cost_model: CostModel | None = None,
    objective: str | Objective = TOTAL_LATENCY,
    time_limit_s: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    stop: threading.Event | None = None,
) -> tuple[float | None, str | None]:
    """Return the largest of the bounds that apply, and its name.

    In rounds it holds for uninterrupted runs and for policies that restart: the last run of a
    request that restarts is uninterrupted, and the earlier ones only take room.

    Parameters
    ----------
    instance : Instance
    method : str
        One bound by name, or ``"auto"`` for the best of all.
    cost_model : CostModel, optional
        An instance in seconds has no bound without.
    objective : str or Objective
    time_limit_s : float
        Seconds for the bounds that search, one after another, each with an equal share of what
        is left; with 0 they run only if asked for by name, as briefly as they can.
    progress : callable, optional
        Called as ``progress(name, value)`` with every bound that is better than those before.
    stop : threading.Event, optional
        When set, no further bound starts.

    Returns
    -------
    value : int, float or None
        ``None`` when no bound is known.
    name : str or None
        The bound that gave the value.

    Raises
    ------
    UsageError
        An unknown method, or one that does not apply to the instance or objective, or that is
        not proved for a feature of the instance.
    """
    best: tuple[float | None, str | None] = (None, None)

    def take(name: str, proof: Proof) -> None:
        nonlocal best
        if best[0] is None or proof.value > best[0]:
            best = proof.value, name
            if progress is not None:
                progress(name, proof.value)

    goal = Objective(objective) if isinstance(objective, str) else objective
    task = BoundTask(instance, cost_model or UnitCost(), goal)
    raise_bound(task, Budget(time_limit_s, stop=stop), take, method)
    return best


def shadow_prices(instance: Instance, *, time_limit_s: float = 20.0) -> NDArray[np.float64]:
    """Return the price of one KV token over time: see `optsched.bounds.shadow`.

    Parameters
    ----------
    instance : Instance
        In rounds.
    time_limit_s : float

    Returns
    -------
    ndarray of float64, shape (pieces, 2)
        First round of each piece, and the price from it on.
    """
    from optsched.bounds import shadow

    return shadow.shadow_prices(instance, time_limit_s=time_limit_s)
