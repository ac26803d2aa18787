"""What `solve`, `bound` and `compare` return in common: a schedule's value, and a bound on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from optsched.bounds.certificate import certified_value
from optsched.judge.evaluate import Evaluation
from optsched.optimize.interval import Interval
from optsched.optimize.solvers.base import Status
from optsched.problem.budget import Progress
from optsched.problem.errors import NoIncumbentError
from optsched.problem.instance import Instance
from optsched.problem.markup import facts, number
from optsched.problem.metrics import TABLE, Metric, time_words
from optsched.problem.schedule import Schedule
from optsched.problem.scope import ONE_WORKER, Scope

if TYPE_CHECKING:
    import pandas as pd


def relative_gap(value: float | None, bound: float | None, maximized: bool = False) -> float | None:
    """Return |value - bound| / value, which is negative where the bound is beaten.

    None if one of the two is unknown or the value is 0.
    """
    if not value or bound is None:
        return None

    return float(bound - value if maximized else value - bound) / value


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Bounded:
    """The best schedule found, as judged, and a bound that no schedule beats.

    Values are in the instance's time unit, rounds or seconds. None means unknown.

    Parameters
    ----------
    instance : Instance
    objective_name : str
        The objectives, separated by commas, the most important first.
    status : Status
        What the value and the bound prove.
    value : int, float or None
        The first objective of ``schedule``.
    bound : int, float or None
        No schedule of ``scope`` has a smaller first objective, or a larger one where more is
        better. It is rounded up if the objective is integral.
    schedule : Schedule or None
    evaluation : Evaluation or None
    method : str or None
        What proved the bound; of `solve`, what ran.
    found_by : str or None
        The policy, bound or search that found ``schedule``.
    scope : Scope
        The schedules for which the bound holds, and among which an optimal schedule is optimal. An
        exact method of a formulation without pauses, for example, says nothing of schedules that
        pause.
    certificate : dict or None
        A proof that anyone can check (`optsched.verify`), of ``certified``.
    certificate_missing : str or None
        Why there is no certificate.
    seed : int
    progress : tuple of Progress
        The schedule's value and the bound whenever one of them changed, and at the end.
    """

    instance: Instance
    objective_name: str
    status: Status
    value: float | None
    bound: float | None
    schedule: Schedule | None
    evaluation: Evaluation | None
    method: str | None
    found_by: str | None = None
    scope: Scope = ONE_WORKER
    certificate: dict[str, Any] | None = None
    certificate_missing: str | None = None
    seed: int = 0
    progress: tuple[Progress, ...] = ()

    @classmethod
    def of(cls, interval: Interval, **own: Any) -> Self:
        """Return what an interval holds, with a class's own fields.

        Parameters
        ----------
        interval : Interval
        **own
        """
        best, goals = interval.incumbent, interval.task.objective
        known: dict[str, Any] = {
            "instance": interval.task.instance,
            "objective_name": ",".join(map(str, goals)),
            "status": interval.status,
            "value": interval.value,
            "bound": interval.bound,
            "schedule": None if best is None else best.schedule,
            "evaluation": None if best is None else best.evaluation,
            "method": interval.bound_origin,
            "found_by": None if best is None else best.origin,
            "scope": interval.scope,
            "certificate": interval.certificate,
            "progress": interval.history.until(
                interval.budget.spent_s, interval.value, interval.bound
            ),
        }
        return cls(**(known | own))

    @property
    def maximized(self) -> bool:
        """Whether more is better, so that the bound is an upper one."""
        return self._metric.sense == "max"

    @property
    def _metric(self) -> Metric:
        return TABLE[self.objective_name.partition(",")[0].partition(":")[0]]

    @property
    def metrics(self) -> dict[str, float | int | None] | None:
        """Every metric of the schedule (`Evaluation.metrics`). None without a schedule."""
        return None if self.evaluation is None else self.evaluation.metrics

    @property
    def certified(self) -> float | None:
        """The value that the certificate proves, no tighter than `bound`; None without one."""
        if self.certificate is None or self.bound is None:
            return None

        weaker = max if self.maximized else min
        return weaker(certified_value(self.instance, self.certificate), self.bound)

    @property
    def gap(self) -> float | None:
        """The relative gap |value - bound| / value. None if it is unknown."""
        return relative_gap(self.value, self.bound, self.maximized)

    @property
    def gap_definition(self) -> str:
        """The formula of `gap` in the words of a result file, which calls the value objective."""
        ends = "bound - objective" if self.maximized else "objective - bound"
        return f"({ends}) / objective"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.instance.name!r} in {self.instance.time_unit}s: "
            f"{self.status}, {self.objective_name} {self.value}, bound {self.bound}, "
            f"by {self.method}>"
        )

    def _repr_html_(self) -> str:
        words = f"{self._metric.words} (times in {time_words(self.instance.time_unit)})"
        return facts(
            f"{type(self).__name__} on {self.instance.name}",
            [
                ("status", self.status.value),
                (words, number(self.value)),
                ("bound", number(self.bound)),
                ("holds for", None if self.bound is None else str(self.scope)),
                ("gap", None if self.gap is None else f"{self.gap:.2%}"),
                ("by", self.method),
                *self._further.items(),
            ],
        )

    @property
    def _further(self) -> dict[str, str | None]:
        """What else a notebook shows."""
        return {"certificate": None if self.certificate is None else "yes"}

    def to_frame(self) -> pd.DataFrame:
        """Return a table of requests with their times (`Evaluation.to_frame`)."""
        if self.evaluation is None:
            raise NoIncumbentError(f"{self.instance.name}: found no schedule; expected one to show")

        return self.evaluation.to_frame()
