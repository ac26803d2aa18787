"""Lower bounds on what any schedule costs, found by a registry.

A bound is one `Bound` at the top level of a module of this package. Nothing else lists it. Users
call `optsched.bound`, which also looks for a schedule and writes certificates.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import REGISTRY, Bound, BoundTask, Completions, Proof, features_of
from optsched.bounds.relaxations import relax
from optsched.problem.budget import Budget
from optsched.problem.errors import TooLargeError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.workloads.problem import Problem, as_problem

# The share of the time for choosing among relaxations.
_CHOICE_SHARE = 0.2


def list_bounds() -> dict[str, Bound]:
    """Return every bound by name, sorted by name.

    Those of `optsched.optimize` are among them once it is loaded.
    """
    return REGISTRY.all()


def _about_total(task: BoundTask) -> BoundTask:
    """Return a task about mean latency as one about the total, of which it is a share."""
    return task.about(TOTAL_LATENCY) if task.goal.name == "mean_latency" else task


def usable(task: BoundTask, method: str = "auto", *, required: bool = False) -> list[Bound]:
    """Return the bounds that are proved for a task.

    With ``required`` a task is refused if there are bounds for it and none of them is proved. A
    bound that is named by ``method`` has to be one of those that are.
    """
    task = _about_total(task)
    applying = {name: bound for name, bound in list_bounds().items() if bound.applies(task)}
    # The features of the task, once relaxed, for which each bound is not proved.
    lacks: dict[str, list[str]] = {}
    for name, bound in applying.items():
        lacking = set[str]()
        for question in relax(task, bound.features):
            lacking |= set(bound.lacks(question.task))

        lacks[name] = sorted(lacking)

    able = {name: bound for name, bound in applying.items() if not lacks[name]}
    if method == "auto" and required and applying and not able:
        # Name what the nearest bound lacks. Bounds for just such tasks, as of pools, say more than
        # others that refuse the pools.
        nearest = min(lacks, key=lambda name: (not applying[name].needs, len(lacks[name])))
        raise UsageError(
            f"bound: no bound on {task.goal} is proved for {', '.join(lacks[nearest])}; "
            "expected an instance without"
        )

    # Bounds that do not search come first: they take next to no time.
    if method == "auto":
        return sorted(able.values(), key=lambda bound: (bound.searches, bound.name))
    if method not in list_bounds():
        raise UsageError(
            f"method: found {method!r}; expected auto, {', '.join(sorted(list_bounds()))}"
        )

    others = ", ".join(sorted(able)) or "none yet"
    if method not in applying:
        raise UsageError(
            f"method: found the bound {method!r}, which does not apply to {task.goal} on an "
            f"instance in {task.instance.time_unit}s; expected one of those that do: {others}"
        )

    if method not in able:
        raise UsageError(
            f"method: found the bound {method!r}, which is not proved for "
            f"{', '.join(lacks[method])}; expected one of those that are: {others}"
        )

    return [able[method]]


def raise_bound(
    task: BoundTask, budget: Budget, take: Callable[[str, Proof], None], method: str = "auto"
) -> None:
    """Run one bound, or all bounds that are proved for a task, and hand over each proof.

    Features that a bound is not proved for are left out by `optsched.bounds.relaxations`, where
    that is proved. Under a tabulated cost model a bound that is proved for linear ones alone runs
    once for every minorant.

    `budget`: bounds that search run one after another, each with its weight's share of the time
    that is left. When no time is left, a bound that searches runs only if it is named by
    ``method``, and then as briefly as it can.
    """
    if (total := _about_total(task)) is not task:

        def take_share(name: str, proof: Proof) -> None:
            """Hand over the mean. A certificate of the total is none of the mean."""
            share = proof.value / task.instance.n
            take(name, Proof(share, schedule=proof.schedule))

        raise_bound(total, budget.part(1.0), take_share, method)
        return

    choosing = budget.part(_CHOICE_SHARE)
    runs = [
        (bound, question)
        for bound in usable(task, method)
        for question in relax(task, bound.features, choosing)
        if method != "auto" or not bound.searches or bound.suits(question.task)
    ]

    for place, (bound, question) in enumerate(runs):
        # One bound always runs.
        if place > 0 and budget.stopped:
            break
        # All that search come last, so no other one is left out.
        if bound.searches and method == "auto" and budget.over:
            break

        weight_left = sum(b.weight for b, _ in runs[place:])
        share = bound.weight / weight_left if bound.searches else 1.0
        try:
            proof = bound.function(question.task, budget.part(share))
        except TooLargeError:
            if method != "auto":
                raise

            continue  # others may need less memory

        answer = question.answer(proof)
        take(bound.name, replace(answer, cost_model=question.task.cost_model))


def lower_bound(
    problem: Problem | Instance,
    *,
    method: str = "auto",
    time_limit_s: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    stop: threading.Event | None = None,
    completions: Completions | None = None,
) -> tuple[float | None, str | None]:
    """Return a value that the objective has in no schedule, or less, and the bound that gave it.

    `optsched.bound` is the public way to ask: it also looks for a schedule.

    Parameters
    ----------
    problem : Problem
        Or an instance in rounds.
    method : str
        One bound, or ``auto``: the largest of all bounds that are proved for the problem.
    time_limit_s : float
        Seconds for bounds that search.
    progress : callable, optional
        Called with ``(name, value)`` whenever the bound improves.
    stop : threading.Event, optional
        When it is set, no further bound begins.
    completions : callable, optional
        Where some bounds start, as in `BoundTask`.

    Returns
    -------
    value : int, float or None
        The bound, in the unit of the objective; None when no bound is known.
    name : str or None
        The bound that gave the value.
    """
    best: tuple[float | None, str | None] = (None, None)
    task = BoundTask.of(as_problem(problem), completions=completions)

    def take(name: str, proof: Proof) -> None:
        nonlocal best
        if best[0] is None or task.goal.signed(proof.value) > task.goal.signed(best[0]):
            best = proof.value, name
            if progress is not None:
                progress(name, proof.value)

    raise_bound(task, Budget(time_limit_s, stop=stop), take, method)
    return best


def shadow_prices(instance: Instance, *, time_limit_s: float = 20.0) -> NDArray[np.float64]:
    """Return the shadow price of one KV token over time.

    A price lambda_t is what one more token of capacity in round t alone would save, in rounds of
    total latency, against the dual (docs/formulations.md, "Prices of memory").

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    time_limit_s : float
        Seconds of wall time for the search of good prices.

    Returns
    -------
    ndarray of float64, shape (pieces, 2)
        First round of each piece, and the price from it on, in rounds of latency per token.
    """
    from optsched.bounds import memory_prices

    return memory_prices.best_prices(instance, time_limit_s=time_limit_s)[0].array()
