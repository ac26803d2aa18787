"""The interval in which an optimum lies: `solve`, `bound` and `compare` improve one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.consistency import reconcile
from optsched.optimize.formulations.base import Task
from optsched.optimize.solvers.base import round_up_bound
from optsched.problem.budget import Budget, History, Progress
from optsched.problem.objective import service_limits
from optsched.problem.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Incumbent:
    """The best schedule known.

    Parameters
    ----------
    value : int or float
        Its objective, as judged.
    origin : str
        Who found it.
    schedule : Schedule
    evaluation : Evaluation
    """

    value: float
    origin: str
    schedule: Schedule
    evaluation: Evaluation


class Interval:
    """A value that no schedule beats, the best schedule known, and who found them.

    Strategies improve either end (`optsched.optimize.strategies`): bounds the one, policies and
    searches the other, exact methods both. A schedule is judged once, and its evaluation is kept.

    Parameters
    ----------
    task : Task
        Its first objective is the interval's.
    budget : Budget, optional
        The deadline, the wish to stop and who is told of progress; see also `begin`.

    Attributes
    ----------
    bound, bound_origin
        The end that is proved, and its proof's name; None while there is none.
    incumbent : Incumbent or None
        The end that is reached.
    certificate : dict or None
        Of the largest value that a certificate carries, at most ``bound``.
    first_bound_s : float or None
        Seconds until there was a bound.
    history : History
        What was told.
    clock_s : float
        Seconds of the budget that had passed when the strategy began whose clock `heard` reads.
    """

    def __init__(self, task: Task, budget: Budget | None = None) -> None:
        self.task = task
        self.goal = task.objective[0]
        self.bound: float | None = None
        self.bound_origin: str | None = None
        self.certificate: dict[str, Any] | None = None
        self.incumbent: Incumbent | None = None
        self.first_bound_s: float | None = None
        self.begin(Budget() if budget is None else budget)

    def begin(self, budget: Budget) -> None:
        """Take a budget whose clock has just begun: from now on it counts, and its progress."""
        self.budget, self.history, self.clock_s = budget, History(budget.progress), 0.0

    @property
    def value(self) -> float | None:
        """The incumbent's value, None without one."""
        return None if self.incumbent is None else self.incumbent.value

    @property
    def closed(self) -> bool:
        """Whether the incumbent is proved optimal."""
        return self.bound is not None and self.bound == self.value

    def judge(self, schedule: Schedule, *, quiet: bool = False) -> Evaluation:
        """Judge a schedule with the limits of service that the objectives are about.

        Parameters
        ----------
        schedule : Schedule
        quiet : bool
            Whether to leave out the warning of batches beyond the cost model's range.

        Raises
        ------
        ViolationError, InputError
            It is no schedule of the instance.
        """
        task = self.task
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            limits = service_limits(task.objective)
            return evaluate(task.instance, schedule, task.cost_model, **limits)

    def take(
        self, schedule: Schedule, evaluation: Evaluation, origin: str, *, at_ties: bool = False
    ) -> bool:
        """Take a judged schedule if it is the best so far, or as good ``at_ties``."""
        value = self.goal.of(evaluation)
        known = self.value
        if value is None or not (
            self.goal.better(value, known) or (at_ties and value == known)
        ):  # fmt: skip
            return False
        self.incumbent = Incumbent(value, origin, schedule, evaluation)
        return True

    def prove(self, value: float, origin: str, certificate: dict[str, Any] | None = None) -> None:
        """Take a bound if it is tighter than those before, and a certificate if it proves more."""
        if self.first_bound_s is None:
            self.first_bound_s = self.budget.spent_s
        if self.bound is None or self.goal.signed(value) > self.goal.signed(self.bound):
            self.bound, self.bound_origin = value, origin
        if certificate is not None and (
            self.certificate is None or certificate["value"] >= self.certificate["value"]
        ):
            self.certificate = certificate

    def heard(self, state: Progress) -> None:
        """Tell what a strategy says of itself, with what is known besides."""
        values = [v for v in (state.incumbent, self.value) if v is not None]
        bound = state.bound
        if bound is not None and self.goal.integral(self.task.instance):
            bound = round_up_bound(bound)
        bounds = [b for b in (bound, self.bound) if b is not None]
        self.history(
            Progress(
                self.clock_s + state.elapsed_s,
                min(values, key=self.goal.signed, default=None),
                max(bounds, key=self.goal.signed, default=None),
            )
        )

    def tell(self) -> None:
        """Tell both ends as they are."""
        self.history(Progress(self.budget.spent_s, self.value, self.bound))

    def reconcile(self) -> None:
        """Check that both ends can be true; float noise is taken off the bound.

        Raises
        ------
        SolverError
            The bound says that the schedule cannot exist.
        """
        found_by = None if self.incumbent is None else self.incumbent.origin
        self.bound = reconcile(
            self.task.instance, self.goal, (self.value, found_by), (self.bound, self.bound_origin)
        )
