"""Lower bounds on what any schedule costs, found by a registry.

A bound is one `Bound` at the top level of a module of this package; nothing else lists it.
"""

from __future__ import annotations

import pkgutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY, Objective


@dataclass(frozen=True)
class Bound:
    """A lower bound that holds for every schedule of an instance.

    Parameters
    ----------
    name : str
    summary : str
        One line for people.
    time_unit : {"round", "second"}
        The instances that it is proved for.
    objectives : tuple of str
        The metrics that it bounds from below (`optsched.problem.metrics.TABLE`).
    function : callable
        ``(instance, cost_model) -> value``: the bound in the instance's time unit, or ``None``
        where it says nothing. The proof stands in its docstring.
    timed : bool
        Whether it searches: the function then takes a third argument, seconds, and `lower_bound`
        calls it only within a time limit.
    """

    name: str
    summary: str
    time_unit: str
    objectives: tuple[str, ...]
    function: Callable[..., float | None]
    timed: bool = False


@cache
def bounds() -> dict[str, Bound]:
    """Return every bound of this package by name."""
    found: dict[str, Bound] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for value in vars(import_module(f"{__name__}.{module}")).values():
            if isinstance(value, Bound):
                found[value.name] = value
    return found


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
        Needed by bounds for instances in seconds.
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
        An unknown method, or one that does not apply to the instance or objective.
    """
    goal = objective if isinstance(objective, str) else objective.name
    usable = {
        name: bound
        for name, bound in bounds().items()
        if bound.time_unit == instance.time_unit and goal in bound.objectives
    }
    if method != "auto":
        if method not in bounds():
            raise UsageError(
                f"method: {method!r} is no bound; known are auto, {', '.join(sorted(bounds()))}"
            )
        if method not in usable:
            able = ", ".join(sorted(usable)) or "none yet"
            raise UsageError(
                f"method: the bound {method!r} does not apply to {goal} on an instance in "
                f"{instance.time_unit}s; those that do: {able}"
            )
        usable = {method: usable[method]}
    begin = time.perf_counter()
    best: float | None = None
    origin: str | None = None
    queue = sorted(usable, key=lambda name: (usable[name].timed, name))
    for place, name in enumerate(queue):
        bound = usable[name]
        if stop is not None and stop.is_set() and best is not None:
            break
        if bound.timed:
            left = time_limit_s - (time.perf_counter() - begin)
            if left <= 0 and method == "auto":
                break
            value = bound.function(instance, cost_model, max(0.0, left) / (len(queue) - place))
        else:
            value = bound.function(instance, cost_model)
        if value is not None and (best is None or value > best):
            best, origin = value, name
            if progress is not None:
                progress(name, value)
    return best, origin


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
