"""Objectives as values: a metric, its sense and parameters, read from text in one place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optsched.problem.errors import UsageError
from optsched.problem.metrics import METRICS, TABLE, Metric
from optsched.problem.specs import Parameter, convert_all, parse_spec, split_specs

if TYPE_CHECKING:
    from optsched.problem.instance import Instance


@dataclass(frozen=True)
class Objective:
    """A metric to make small, or large where more is better.

    Parameters
    ----------
    name : str
        The name of a metric in `optsched.problem.metrics.TABLE`.
    parameters : tuple of (str, float)
        Limits that the metric depends on, by name: times > 0 in the instance's unit.

    Raises
    ------
    UsageError
        No such metric, a parameter that it does not have or that is no time > 0, or a metric
        that has no value without one.
    """

    name: str
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in TABLE:
            raise UsageError(
                f"objective: {self.name!r} is no metric; known are {', '.join(METRICS)}"
            )
        known = self.metric.parameters
        for key, value in self.parameters:
            if key not in known:
                words = ", ".join(known) or "none"
                raise UsageError(
                    f"objective: {self.name}: parameter {key!r} is unknown; known are {words}"
                )
            if not 0 < value < float("inf"):
                raise UsageError(f"objective: {self.name}: {key}: {value!r} is not a time > 0")
        if known and not self.parameters:
            raise UsageError(
                f"objective: {self.name} needs {' or '.join(known)}, as in {self.name}:{known[0]}=1"
            )

    def __str__(self) -> str:
        texts = (f"{k}={int(v) if float(v).is_integer() else v}" for k, v in self.parameters)
        return ":".join(filter(None, (self.name, ",".join(texts))))

    @property
    def metric(self) -> Metric:
        """The row of the table of metrics."""
        return TABLE[self.name]

    @property
    def maximized(self) -> bool:
        """Whether more is better, so that bounds lie above."""
        return self.metric.sense == "max"

    def integral(self, instance: Instance) -> bool:
        """Whether its value is an integer for every schedule of an instance."""
        return self.metric.is_whole(instance)

    def of(self, evaluation: Any) -> float | int | None:
        """Return its value for an `Evaluation`, made with the limits of `service_limits`."""
        value: float | int | None = evaluation.metrics[self.name]
        return value

    def signed(self, value: float) -> float:
        """Return the value, negative where more is better: of two, the less is the better."""
        return -value if self.maximized else value

    def better(self, one: float | None, other: float | None) -> bool:
        """Whether one value is strictly better than another; any is better than None."""
        if one is None or other is None:
            return other is None and one is not None
        return self.signed(one) < self.signed(other)


TOTAL_LATENCY = Objective("tel")
"""What is minimized where nothing else is said."""


def parse_objectives(
    given: str | Objective | Sequence[str | Objective],
    known: Collection[str] = METRICS,
    where: str = "",
) -> tuple[Objective, ...]:
    """Return objectives, the most important first.

    Parameters
    ----------
    given : str, Objective, or a sequence of them
        A text holds names with parameters, ``tel``, ``tel,makespan`` or
        ``slo_goodput:slo_ttft=1,slo_tpot=0.1,tel``.
    known : collection of str
        The metrics that may be named.
    where : str
        Who knows them, for the error.

    Raises
    ------
    UsageError
        A metric that is unknown or given twice, none at all, or as for `Objective`.
    InputError
        A parameter that is no number.
    """
    parts = [given] if isinstance(given, (str, Objective)) else list(given)
    texts = [one for p in parts for one in (split_specs(p) if isinstance(p, str) else [p])]
    found = [_objective(text, known, where) for text in texts]
    names = [one.name for one in found]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UsageError(f"objective: {name!r} is given twice")
    if not found:
        raise UsageError(f"objective: none is given; known are {', '.join(known)}")
    service_limits(found)
    return tuple(found)


def first_metric(text: object) -> Metric | None:
    """Return the metric of the first objective that a file names, None where there is no such."""
    return TABLE.get(str(text).partition(",")[0].partition(":")[0])


def service_limits(objectives: Iterable[Objective]) -> dict[str, float]:
    """Return the parameters of objectives by name, as `optsched.evaluate` takes them.

    Raises
    ------
    UsageError
        Two objectives that give one limit different values.
    """
    limits: dict[str, float] = {}
    for objective in objectives:
        for key, value in objective.parameters:
            if limits.setdefault(key, value) != value:
                raise UsageError(f"objective: {key} is both {limits[key]:g} and {value:g}")
    return limits


def _objective(given: str | Objective, known: Collection[str], where: str) -> Objective:
    if isinstance(given, Objective):
        name, texts = given.name, dict[str, str]()
    else:
        name, texts = parse_spec(given, "objective")
    if name not in known:
        to = f" to {where}" if where else ""
        raise UsageError(f"objective: {name!r} is unknown{to}; known are {', '.join(known)}")
    if isinstance(given, Objective):
        return given
    allowed = {key: Parameter(float, False, None) for key in TABLE[name].parameters}
    values: dict[str, Any] = convert_all(texts, allowed, f"objective {name!r}")
    return Objective(name, tuple(values.items()))
