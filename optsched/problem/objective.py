"""Objectives: a metric to optimize, with its sense and the parameters that it depends on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optsched.problem.errors import UsageError, check_kind, named, unknown
from optsched.problem.metrics import METRICS, TABLE, Metric, check_parameter
from optsched.problem.specs import Parameter, convert_all, parse_spec, split_specs

if TYPE_CHECKING:
    from optsched.problem.instance import Instance


@dataclass(frozen=True)
class Objective:
    """A metric to minimize, or to maximize where more is better.

    Parameters
    ----------
    name : str
        A metric of `optsched.list_metrics`.
    parameters : tuple of (str, float)
        Limits that it depends on, times > 0 in the instance's unit, by name.
    """

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        metric = named("objective:", self.name, TABLE, UsageError)
        known = metric.parameters
        for key, value in self.parameters:
            place = f"objective: {self.name}: parameter"
            named(place, key, dict.fromkeys(known), UsageError)
            expected = check_parameter(value)
            if expected is not None:
                raise UsageError(
                    f"objective: {self.name}: {key}: found {value!r}; expected {expected}"
                )

    def __str__(self) -> str:
        """Return the text that `parse_objective` reads, such as ``slo_goodput:slo_ttft=1``."""
        whole = {key: int(v) if float(v).is_integer() else v for key, v in self.parameters}
        pairs = ",".join(f"{key}={value}" for key, value in whole.items())
        return f"{self.name}:{pairs}" if pairs else self.name

    @property
    def metric(self) -> Metric:
        """The metric's row in the table of metrics."""
        return TABLE[self.name]

    @property
    def maximized(self) -> bool:
        """Whether more is better, so that a bound lies above every schedule's value."""
        return self.metric.sense == "max"

    def check(self, instance: Instance) -> None:
        """Check that the metric has what it needs: sessions, weights, or its own limits or SLOs.

        Parameters
        ----------
        instance : Instance
        """
        if instance.after is None and "session_completion" in self.metric.needs:
            raise UsageError(
                f"objective: {self.name}: found an instance without sessions; expected one with "
                "the column after"
            )

        if instance.weight is None and "weight" in self.metric.needs:
            raise UsageError(
                f"objective: {self.name}: found an instance without weights; expected one with the "
                "column weight"
            )

        known = self.metric.parameters
        if known and not self.parameters and not instance.slos:
            raise UsageError(
                f"objective: {self.name}: found no limit; expected {' or '.join(known)}, as in "
                f"{self.name}:{known[0]}=1, or as a column of the instance"
            )

    def within(self, limits: Mapping[str, float]) -> Objective:
        """Return the objective with those of some limits that its metric takes, beside its own.

        Parameters
        ----------
        limits : mapping of str to float
        """
        more = tuple((key, limits[key]) for key in self.metric.parameters if key in limits)
        if not more:
            return self

        both = service_limits([self, Objective(self.name, more)])
        return Objective(self.name, tuple(both.items()))

    def integral(self, instance: Instance) -> bool:
        """Whether the value is an integer for every schedule of an instance.

        Parameters
        ----------
        instance : Instance
        """
        return self.metric.is_whole(instance)

    def of(self, evaluation: Any) -> float | int | None:
        """Return the value that an evaluation has for the objective.

        Parameters
        ----------
        evaluation : Evaluation
        """
        value: float | int | None = evaluation.metrics[self.name]
        return value

    def signed(self, value: float) -> float:
        """Return the value with its sign turned where more is better, so that less is better.

        Parameters
        ----------
        value : float
        """
        return -value if self.maximized else value

    def quotient(self, value: float, reference: float) -> float:
        """Return value over reference, or the inverse where more is better. 0 over 0 is 1.

        Parameters
        ----------
        value, reference : float
        """
        above, below = (reference, value) if self.maximized else (value, reference)
        if above == below:  # 0 over 0, too
            return 1.0

        return above / below if below else float("inf")

    def better(self, one: float | None, other: float | None) -> bool:
        """Whether one value is strictly better than another. Any value is better than None.

        Parameters
        ----------
        one, other : float or None
        """
        if one is None or other is None:
            return other is None and one is not None

        return self.signed(one) < self.signed(other)


TOTAL_LATENCY = Objective("tel")
"""The default objective."""


def parse_objectives(
    given: str | Objective | Sequence[str | Objective],
    known: Collection[str] = METRICS,
    where: str = "",
) -> tuple[Objective, ...]:
    """Return objectives from their text, the most important first.

    `known`: the metrics that are allowed. `where`: who allows them, for the error.
    """
    words = "the name of a metric, an Objective, or several"
    check_kind("objective", given, (str, Objective, Sequence), words)
    parts = [given] if isinstance(given, (str, Objective)) else list(given)
    for part in parts:
        check_kind("objective", part, (str, Objective), words)

    # One text may hold several, with commas between them.
    singles: list[str | Objective] = []
    for part in parts:
        singles += split_specs(part) if isinstance(part, str) else [part]

    objectives = [_objective(single, known, where) for single in singles]
    names = [objective.name for objective in objectives]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UsageError(f"objective: found {name!r} twice; expected each metric once")

    if not objectives:
        raise UsageError(f"objective: found none; expected one or more of {', '.join(known)}")

    service_limits(objectives)  # which refuses two values of one limit
    return tuple(objectives)


def parse_objective(given: str | Objective | Sequence[Objective]) -> Objective:
    """Return one objective from its text."""
    found = parse_objectives(given)
    if len(found) > 1:
        raise UsageError(f"objective: found several, {','.join(map(str, found))}; expected one")

    return found[0]


def goal_of_file(data: Mapping[str, Any]) -> Metric:
    """Return the metric of the first objective of a result's or a comparison's file."""
    return first_metric(data.get("objective_name")) or TOTAL_LATENCY.metric


def first_metric(text: object) -> Metric | None:
    """Return the metric of the first objective in a file's text."""
    return TABLE.get(str(text).partition(",")[0].partition(":")[0])


def service_limits(objectives: Iterable[Objective]) -> dict[str, float]:
    """Return the parameters of all objectives, as keyword arguments of `optsched.evaluate`."""
    limits: dict[str, float] = {}
    for objective in objectives:
        for key, value in objective.parameters:
            if limits.setdefault(key, value) != value:
                raise UsageError(
                    f"objective: {key}: found both {limits[key]:g} and {value:g}; expected one "
                    "value"
                )

    return limits


def _objective(given: str | Objective, known: Collection[str], where: str) -> Objective:
    """Return one objective, checked to be among the known metrics."""
    texts = dict[str, str]()
    if isinstance(given, Objective):
        name = given.name
    else:
        name, texts = parse_spec(given, "objective")

    if name not in known:
        to = f" to {where}" if where else ""
        words = unknown("objective:", name, known)
        raise UsageError(words.replace(" is unknown", f" is unknown{to}", 1))

    if isinstance(given, Objective):
        return given

    # Numbers, which may not be None and need not be given.
    allowed = {key: Parameter(float, False, None) for key in TABLE[name].parameters}
    values: dict[str, Any] = convert_all(texts, allowed, f"objective {name!r}")
    return Objective(name, tuple(values.items()))
