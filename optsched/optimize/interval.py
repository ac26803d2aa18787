"""The interval in which an optimum lies: `solve`, `bound` and `compare` improve one."""

from dataclasses import dataclass
from typing import Any

from optsched.bounds.base import Proof
from optsched.judge.evaluate import Evaluation, evaluate, evaluate_quietly
from optsched.optimize.consistency import end_of, is_met, reconcile, rounding
from optsched.optimize.formulations.base import Task
from optsched.optimize.solvers.base import Status, round_up_bound
from optsched.problem.budget import Budget, History, Progress
from optsched.problem.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Incumbent:
    """The best schedule known, its judged value and the policy, search or method that found it."""

    value: float
    origin: str
    schedule: Schedule
    evaluation: Evaluation


class Interval:
    """A value that no schedule beats, the best schedule known, and the origin of both.

    Strategies (`optsched.optimize.strategies`) improve the interval: bounds the proved end,
    policies and searches the reached end, and exact methods both. Each schedule is judged once.
    `general` is the best bound for every schedule on the task's workers, and `scope` has those for
    which `bound` holds. `certificate` proves the largest value, which is at most `bound`; in
    seconds it is made of one of the proofs in `trees`, by `solve` if the interval `certifies`.
    `clock_s` of the budget had passed when the present strategy began, whose own clock
    `merge_progress` adds.
    """

    def __init__(self, task: Task, budget: Budget | None = None) -> None:
        self.task = task
        self.goal = task.objective[0]
        self.bound: float | None = None
        self.bound_origin: str | None = None
        self.scope = task.scope()
        self.general: tuple[float, str] | None = None
        self.certificate: dict[str, Any] | None = None
        self.trees: list[Proof] = []
        self.certifies = False
        self.incumbent: Incumbent | None = None
        self.first_bound_s: float | None = None
        self.begin(Budget() if budget is None else budget)

    def begin(self, budget: Budget) -> None:
        """Replace the budget, and begin a new history of progress."""
        self.budget, self.history, self.clock_s = budget, History(budget.progress), 0.0

    @property
    def value(self) -> float | None:
        """The incumbent's objective. None without an incumbent."""
        return None if self.incumbent is None else self.incumbent.value

    @property
    def closed(self) -> bool:
        """Whether the incumbent is proved optimal."""
        best = self.incumbent
        return best is not None and is_met(
            best.value, self.bound, rounding(best.evaluation, best.value)
        )

    @property
    def status(self) -> Status:
        """What the two ends prove."""
        if self.incumbent is None:
            return Status.NO_INCUMBENT

        return Status.OPTIMAL if self.closed else Status.FEASIBLE

    def judge(self, schedule: Schedule, *, quiet: bool = False) -> Evaluation:
        """Judge a schedule."""
        return (evaluate_quietly if quiet else evaluate)(self.task, schedule)

    def take(
        self, schedule: Schedule, evaluation: Evaluation, origin: str, *, at_ties: bool = False
    ) -> bool:
        """Make a judged schedule the incumbent if it is better than the present one.

        Return whether it is that now. ``at_ties``: one of the same value replaces it, too. One
        without a value of the objective never does.
        """
        value, known_value = self.goal.of(evaluation), self.value
        is_tie = at_ties and value == known_value
        if value is None or not (is_tie or self.goal.better(value, known_value)):
            return False

        self.incumbent = Incumbent(value, origin, schedule, evaluation)
        return True

    def prove(
        self,
        value: float,
        origin: str,
        certificate: dict[str, Any] | None = None,
        leaves_out: frozenset[str] = frozenset(),
    ) -> None:
        """Keep a bound if it is tighter than the present one, and a certificate likewise.

        ``leaves_out``: the kinds of schedules (`optsched.problem.scope.KINDS`) for which the bound
        does not hold. Only a bound without such may be the `general` one.
        """
        if self.first_bound_s is None:
            self.first_bound_s = self.budget.spent_s

        # Signed values grow as a bound gets tighter, whatever the sense of the objective. Of equal
        # bounds that for more schedules is kept.
        signed = self.goal.signed(value)
        is_tighter = self.bound is None or signed > self.goal.signed(self.bound)
        if is_tighter or (value == self.bound and leaves_out < self.scope.without):
            self.bound, self.bound_origin = value, origin
            self.scope = self.task.scope(leaves_out)

        known_general = None if self.general is None else self.goal.signed(self.general[0])
        if not leaves_out and (known_general is None or signed > known_general):
            self.general = value, origin

        if certificate is not None and (
            self.certificate is None
            or self.goal.signed(certificate["value"]) >= self.goal.signed(self.certificate["value"])
        ):
            self.certificate = certificate

    def merge_progress(self, state: Progress) -> None:
        """Report a strategy's progress, merged with what the interval knows.

        Signed values are smaller for better schedules and larger for tighter bounds, so the least
        and the largest one are reported. A solver's bound is a float, and is rounded up if values
        are whole.
        """
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

    def report(self) -> None:
        """Report the present bound and incumbent as progress."""
        self.history(Progress(self.budget.spent_s, self.value, self.bound))

    def reconcile(self) -> None:
        """Check that bound and incumbent agree, and remove float noise from the bound."""
        best, bound = self.incumbent, (self.bound, self.bound_origin)
        reached = (None, None) if best is None else (best.value, best.origin)
        end = end_of(None if best is None else best.evaluation)
        self.bound = reconcile(self.task.instance, self.goal, reached, bound, end)
