"""Spending a time limit on bound and schedule of an instance in rounds, method by method."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optsched.judge.evaluate import evaluate
from optsched.optimize.consistency import reconcile
from optsched.optimize.formulations import Task, get
from optsched.optimize.formulations.base import Answer
from optsched.optimize.formulations.rounds.hindsight import RAMP_CAPACITY, RAMP_REQUESTS
from optsched.optimize.search.anytime import explore
from optsched.optimize.solvers.base import Progress, SolveOptions, round_up_bound
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance
from optsched.problem.markup import facts, number
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule

_FEW_SHARE = 0.1


@dataclass(frozen=True, eq=False)
class Bounded:
    """The best bound, schedule and certificate of several methods.

    Parameters
    ----------
    bound : int
    origin : str
        The method that proved the bound.
    schedule : Schedule or None
    objective : int or None
    certificate : dict
        Of ``certified``, which is at most ``bound``.
    certified : int
    first_bound_s : float
        Seconds until the first bound.
    """

    bound: int
    origin: str
    schedule: Schedule | None
    objective: int | None
    certificate: dict[str, Any]
    certified: int
    first_bound_s: float

    def _repr_html_(self) -> str:
        return facts(
            "Bound on total latency, in rounds",
            [
                ("bound", f"{number(self.bound)} ({self.origin})"),
                ("certified", self.certified),
                ("best schedule", number(self.objective)),
                ("first bound after", f"{self.first_bound_s:.2f} s"),
            ],
        )


def bound_within(
    instance: Instance,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    search: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Bounded:
    """Spend a time limit on bound and schedule of an instance in rounds.

    Few requests: `explore` briefly, then a method of formulation hindsight: ``ramp`` where KV is
    short, whose relaxation is far stronger there but grows with the number of its states; else
    CP-SAT, if that is what ``auto`` would take. Many: `explore`.

    ``search`` False: only the dual.

    Raises
    ------
    UsageError
        The instance is in seconds.
    SolverError
        The bound contradicts the schedule.
    """
    begin = time.perf_counter()
    name = _exact(instance) if search else None
    share = 1.0 if name is None else _FEW_SHARE
    found = explore(
        instance,
        time_limit_s=share * time_limit_s,
        seed=seed,
        search=search,
        certify=True,
        progress=progress,
        stop=stop,
    )
    best = Bounded(
        found.bound, found.origin, found.schedule, found.objective, found.certificate(),
        found.proved, found.first_bound_s,
    )  # fmt: skip
    left = time_limit_s - (time.perf_counter() - begin)
    over = left <= 0 or (stop is not None and stop.is_set())
    if name is None or over or found.objective == found.proved:
        return _consistent(instance, best, "search")

    def report(state: Progress) -> None:
        if progress is not None:
            bounds = [b for b in (best.bound, state.bound) if b is not None]
            values = [v for v in (best.objective, state.incumbent) if v is not None]
            elapsed = time.perf_counter() - begin
            progress(Progress(elapsed, min(values, default=None), max(bounds, default=None)))

    options = SolveOptions(
        time_limit_s=left,
        seed=seed,
        warm_start=best.schedule,
        progress=report,
        stop=stop,
    )
    try:
        answer = (
            get("hindsight").methods[name].run(Task(instance, objective=(TOTAL_LATENCY,)), options)
        )
    except OptschedError:
        # Limits or sizes that the method does not take.
        return _consistent(instance, best, "search")
    return _better_of(instance, best, answer, name)


def _exact(instance: Instance) -> str | None:
    """Return the method that follows the dual, None where there is none to follow."""
    if not instance.in_rounds or instance.n > RAMP_REQUESTS:
        return None
    if instance.kv_capacity <= RAMP_CAPACITY:
        return "ramp"
    chosen = get("hindsight").choose(Task(instance, objective=(TOTAL_LATENCY,)))
    return chosen if chosen == "cpsat" else None


def _better_of(instance: Instance, best: Bounded, answer: Answer, name: str) -> Bounded:
    schedule, objective, found_by = best.schedule, best.objective, "search"
    if answer.schedule is not None:
        value = TOTAL_LATENCY.of(evaluate(instance, answer.schedule))
        assert value is not None
        if objective is None or value < objective:
            schedule, objective, found_by = answer.schedule, int(value), name
    bound, origin = best.bound, best.origin
    if answer.bound is not None and round_up_bound(answer.bound) > bound:
        bound, origin = round_up_bound(answer.bound), name
    certificate, certified = best.certificate, best.certified
    if isinstance(answer.certificate, dict) and answer.certificate["value"] >= certified:
        certificate, certified = answer.certificate, int(answer.certificate["value"])
    better = Bounded(bound, origin, schedule, objective, certificate, certified, best.first_bound_s)
    return _consistent(instance, better, found_by)


def _consistent(instance: Instance, best: Bounded, found_by: str) -> Bounded:
    """Return what was found, whose bound must not exceed its schedule's value."""
    known, bound = (best.objective, found_by), (best.bound, best.origin)
    reconcile(instance, TOTAL_LATENCY, known, bound)
    return best
