"""What an experiment is: trials, a function that runs one, claims and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from optsched.problem.errors import InputError

Row = dict[str, Any]
"""A trial's parameters or results by column: numbers, texts, booleans or None."""

Run = Callable[[Row], Row]
"""Returns a trial's results."""

WITHIN = 0.15
"""Relative difference up to which a measured value counts as the published one."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper beside what was measured.

    Parameters
    ----------
    what : str
    paper : float or str
        The published value, or the statement in words.
    ours : float, str or None
        None: not measured in these trials.
    holds : bool, optional
        Whether the statement is met; for numbers by default within 15 %.
    """

    what: str
    paper: float | str
    ours: float | str | None
    holds: bool | None = None

    @property
    def verdict(self) -> bool | None:
        """Whether the statement is met, None if unknown."""
        if self.holds is not None or self.ours is None:
            return self.holds
        if isinstance(self.ours, str) or isinstance(self.paper, str):
            return None
        return abs(self.ours / self.paper - 1) <= WITHIN


@dataclass(frozen=True, eq=False)
class Figure:
    """A picture of an experiment's rows, drawn by `optsched.show.plot.rows`.

    Parameters
    ----------
    name : str
        Of the file, and of ``optsched plot --kind``.
    x : str
        Column; unused by histograms.
    y : str or sequence of str
        Columns: means over the rows that agree in ``x`` and series.
    kind : {"line", "bar", "histogram"}
    series, panel : str, optional
        Columns whose values are a line or bar each, and a panel each.
    over : object, optional
        A value of ``series`` by which the others are divided.
    where : mapping
        Values of columns that a row must have.
    labels : mapping
        Words for columns and for values of series and panels.
    published : mapping
        For bars: a paper's value by value of ``x``.
    reference : mapping of str to float
        Lines at values that a paper states.
    title, x_label, y_label : str
        With units; default: what the experiment's ``columns`` say.
    log : str
        Axes with logarithmic scales: "", "x", "y" or "xy".
    """

    name: str
    x: str
    y: str | Sequence[str]
    kind: Literal["line", "bar", "histogram"] = "line"
    series: str | None = None
    panel: str | None = None
    over: Any = None
    where: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[Any, str] = field(default_factory=dict)
    published: Mapping[Any, float] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log: str = ""


@dataclass(frozen=True, eq=False)
class Experiment:
    """A named experiment.

    Parameters
    ----------
    name, summary : str
    paper : str
        Where it is from.
    parameters : mapping
        Names and default values; a list of texts or numbers is given as ``key=a,b,c``.
    trials : callable
        ``(parameters, seed)``: the trials in order, each a dict of plain values that says all
        that its run needs. It may go on for ever where trials are random draws.
    run : callable
        ``(trial)``: the trial's results, without wall times. At the top level of its module, so
        that other processes can call it.
    summarize : callable
        ``(rows)``: the paper's statements beside ours.
    default_trials : int, optional
        How many trials run unless told; None: all.
    columns : mapping of str to str
        What the columns of the results mean.
    figures : sequence of Figure
        Pictures written beside the results.
    """

    name: str
    summary: str
    paper: str
    parameters: Mapping[str, Any]
    trials: Callable[[Mapping[str, Any], int], Iterable[Row]]
    run: Run
    summarize: Callable[[Sequence[Row]], list[Claim]]
    default_trials: int | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Figure] = ()

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with those given (texts are converted) in place.

        Raises
        ------
        InputError
            An unknown parameter or a value of the wrong kind.
        """
        values = dict(self.parameters)
        for key, value in given.items():
            if key not in values:
                known = ", ".join(values) or "none"
                raise InputError(
                    f"experiment {self.name}: parameter {key!r} is unknown; known are {known}"
                )
            values[key] = _converted(value, values[key], f"experiment {self.name}: {key}")
        return values


def _converted(value: Any, default: Any, where: str) -> Any:
    if isinstance(default, (list, tuple)):
        parts = value.split(",") if isinstance(value, str) else list(value)
        kind = default[0] if default else ""
        return [_converted(part, kind, where) for part in parts]
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null"):
        return None
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        if isinstance(default, int):
            return int(value)
        if isinstance(default, float):
            return float(value)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "an integer", float: "a number"}[type(default)]
        raise InputError(f"{where}: {value!r}; {words} is right") from None
    return value
