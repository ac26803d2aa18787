"""`bound`: a value that no schedule beats, and the best schedule found on the way to it."""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optsched.bounds import usable
from optsched.bounds.base import BoundTask
from optsched.bounds.certificate import certified_value
from optsched.costs.cost import CostModel
from optsched.files.results import result_dict
from optsched.optimize.bounded import Bounded
from optsched.optimize.certified import certificate_of
from optsched.optimize.exact import choose_if_able
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.optimize.narrow import narrow
from optsched.optimize.solvers.base import SolveOptions
from optsched.optimize.strategies import (
    can_search,
    load,
    prove,
    run_policies,
    search_offline,
    take_from_library,
)
from optsched.problem.budget import Budget, Progress, progress_columns
from optsched.problem.columns import check_whole
from optsched.problem.errors import InfeasibleError
from optsched.problem.instance import Instance
from optsched.problem.markup import number
from optsched.problem.objective import parse_objective
from optsched.workloads.problem import Problem, as_problem

# The share of the time limit for bounds. The rest is spent on schedules.
_BOUND_SHARE = 0.6


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BoundResult(Bounded):
    """A bound, its proof, and the best schedule found on the way.

    Parameters
    ----------
    cost_model : UnitCost or BatchCost
    general : tuple of (value, name) or None
        The best bound for every schedule on one worker, which is ``bound`` if ``scope`` has them
        all. The certificate is of such a bound, and proves ``certified``.
    first_bound_s : float or None
        Seconds until the first bound.
    bound_s : float
        Seconds spent on bounds, and on the schedules found on the way to them.
    """

    cost_model: CostModel
    general: tuple[float, str] | None = None
    first_bound_s: float | None = None
    bound_s: float = 0.0

    @property
    def _further(self) -> dict[str, str | None]:
        first = None if self.first_bound_s is None else f"{self.first_bound_s:.2f} s"
        why = f"nothing, since {self.certificate_missing}"
        certified = why if self.certified is None else number(self.certified)
        return {"certified": certified, "first bound after": first}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a result file.

        ``certificate`` is None. Whoever writes the certificate to a file puts the file's name
        there.
        """
        data = result_dict(
            self.instance,
            "bound",
            method=self.method,
            objective_name=self.objective_name,
            objective=self.value,
            bound=self.bound,
            status=self.status,
            gap=self.gap,
            gap_definition=self.gap_definition,
            metrics=self.metrics,
            policy=self.found_by,
            cost_model=self.cost_model,
            seed=self.seed,
            solve_s=self.bound_s,
        )
        data["progress"] = progress_columns(self.progress)
        data["scope"], data["certificate_missing"] = self.scope.to_dict(), self.certificate_missing
        data["general_bound"] = None if self.general is None else self.general[0]
        if self.certificate is not None:
            data["first_bound_s"], data["certified"] = self.first_bound_s, self.certified

        return data


def bound(
    problem: Problem | Instance | str | Path,
    *,
    method: str = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    certify: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> BoundResult:
    """Bound the objective of all schedules, and look for one close to the bound.

    Of several machines it gives the bound alone: the searches know one.

    ``auto`` is the search that `solve` and `compare` use, too (`optsched.optimize.narrow`): every
    policy that the instance allows, every bound that is proved for the features of the instance and
    the cost model (`optsched.bounds.features_of`), the searches, and then an exact method if one
    applies. Under limits on batches in rounds its bound holds for uninterrupted runs only, and the
    result says so (`BoundResult.scope`). In seconds the bound holds for every schedule.

    Parameters
    ----------
    problem : Problem
        The instance, its machines, and the metric to bound: from below, or from above where more is
        better (`Metric.sense`). Or an instance in rounds, its file or its name.
    method : str
        One bound by name (`optsched.bounds.bounds`), or ``"auto"``.
    time_limit_s : float
        Seconds for all of the work, >= 0.
    seed : int
    certify : bool
        Whether to make a certificate in seconds, which takes as long as to check it and does not
        count as time of the search. In rounds every certificate is kept.
    progress : callable, optional
        Called with a `Progress` whenever the bound or the schedule improves.
    stop : threading.Event, optional
        When it is set, the work ends and the best bound and schedule so far are kept.

    Returns
    -------
    BoundResult

    Raises
    ------
    UsageError
        The method is unknown, does not apply to the objective or the time unit, or is not proved
        for a feature of the instance; or several objectives are given.
    InputError
        ``time_limit_s`` is negative or not a number.
    SolverError
        A bound contradicts a schedule, which is an internal error.
    """
    check_whole(seed, "seed", 0)
    load()
    budget = Budget(time_limit_s, stop=stop, progress=progress)
    task = Task.of(as_problem(problem))
    parse_objective(task.objective)  # one, or an error
    queue = usable(BoundTask.of(task), method, required=True)
    interval = Interval(task, budget)

    on_several = task.pools is not None or task.workers > 1
    # One bound by name, or several machines, of which the searches know one: bounds, and then a
    # schedule. Else the search that `solve` shares.
    if on_several or method != "auto":
        searches = not on_several and any(way.searches for way in queue)
        prove(interval, budget.part(_BOUND_SHARE if searches else 1.0), method, seed=seed)
        if interval.incumbent is None and not on_several:
            _search_schedule(interval, seed)
    else:
        take_from_library(interval)
        options = SolveOptions(seed=seed, stop=stop)
        exact = None
        with suppress(InfeasibleError):  # the bound also holds where prefills must be split
            exact = choose_if_able(task)

        narrow(interval, exact, options=options, certify=True)

    bound_s = budget.spent_s
    certificate, why_none = certificate_of(interval, certify)
    # It may prove more than the bound in floats, for which less time was left.
    if certificate is not None and interval.certificate is None:
        interval.prove(certified_value(task.instance, certificate), interval.bound_origin or "")

    interval.reconcile()
    return BoundResult.of(
        interval,
        cost_model=task.cost_model,
        general=interval.general,
        certificate=certificate,
        certificate_missing=why_none,
        first_bound_s=interval.first_bound_s,
        bound_s=bound_s,
        seed=seed,
    )


def _search_schedule(interval: Interval, seed: int) -> None:
    """Spend the remaining time on policies and, in seconds, on the offline search."""
    budget, may_search = interval.budget, can_search(interval)
    run_policies(interval, budget.part(0.5 if may_search else 1.0), seed=seed)
    if may_search and not budget.over:
        search_offline(interval, budget, seed=seed)
