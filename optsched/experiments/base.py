"""The parts of an experiment: its trials, a function that runs one, its claims and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from optsched.problem.errors import named
from optsched.problem.specs import Parameter, convert

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Row = dict[str, Any]
"""A trial's parameters or results by column: numbers, texts, booleans or None."""

Run = Callable[[Row], Row]
"""A function that takes a trial and returns its results."""

WITHIN = 0.15
"""Max relative difference at which a measured value counts as equal to the published one."""

_HOW_FOUND = ("method", "time_limit", "time_limit_s", "cpu_limit", "certificate_every", "data")
"""Parameters that say how something is found, and not what."""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper with the value that was measured here.

    Parameters
    ----------
    what : str
        What the statement is about.
    paper : float or str
        The published value, or the statement in words.
    ours : float, str or None
        The measured value. None if these trials do not measure it.
    holds : bool, optional
        Whether the statement holds here. By default a number holds if it is within 15 % of the
        published one.
    comparable : bool
        Whether the parameters are the paper's. There is no verdict where they are not.
    """

    what: str
    paper: float | str
    ours: float | str | None
    holds: bool | None = None
    comparable: bool = True

    @property
    def verdict(self) -> bool | None:
        """Whether the statement holds here, or None if that is unknown."""
        if not self.comparable:
            return None
        if self.holds is not None or self.ours is None:
            return self.holds
        if isinstance(self.ours, str) or isinstance(self.paper, str):
            return None

        return abs(self.ours / self.paper - 1) <= WITHIN


class Figure(Protocol):
    """A figure of an experiment's rows, which knows how to draw itself.

    The studies have one that is declared by columns, ``optsched_studies.drawing.Figure``.
    """

    @property
    def name(self) -> str:
        """Name of the file, and of the figure for ``optsched plot --kind``."""

    def draw(self, experiment: Experiment, rows: Sequence[Row]) -> Canvas | None:
        """Return the figure of an experiment's rows, or None if no row has what it shows."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """A named experiment.

    Parameters
    ----------
    name : str
        The name by which the registry and the command line know it.
    summary : str
        One line that says what it measures.
    paper : str
        The paper, section or figure that it repeats.
    parameters : mapping
        Names of the parameters and their default values. On the command line a list of texts or
        numbers is given as ``key=a,b,c``.
    trials : callable
        ``trials(parameters, seed)`` yields the trials in order. Each is a dict of plain values that
        has all that its run needs. It may have no end where trials are random draws.
    run : callable
        ``run(trial)`` returns the trial's results, without wall times. It must be at the top level
        of its module, so that other processes can call it.
    summarize : callable
        ``summarize(rows)`` returns the paper's statements with our values.
    default_trials : int, optional
        How many trials run by default. None for all.
    columns : mapping of str to str
        The meaning of each column of the results.
    figures : sequence of Figure
        The figures that are written with the results.
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
        """Return all parameters, with texts converted and default values for the others."""
        values = dict(self.parameters)
        for key, value in given.items():
            default = named(f"experiment {self.name}: parameter", key, values)
            values[key] = _convert(value, default, f"experiment {self.name}: {key}")

        return values

    def departures(self, parameters: Mapping[str, Any]) -> list[str]:
        """Return in words which parameters are not those of the paper that is repeated."""
        # It repeats no paper.
        if self.paper.startswith("ours"):
            return []

        defaults = self.settings({})
        asked = {key: value for key, value in parameters.items() if key not in _HOW_FOUND}
        return [f"{key} = {value}" for key, value in asked.items() if value != defaults[key]]


def _convert(value: Any, default: Any, where: str) -> Any:
    """Return a text as a value of the default's type, part by part if that is a list.

    The parts of an empty list are texts. What is no text was given in Python, and stays as it is.
    `where`: what errors begin with.
    """
    if isinstance(default, (list, tuple)):
        parts = value.split(",") if isinstance(value, str) else list(value)
        kind = default[0] if default else ""
        return [_convert(part, kind, where) for part in parts]

    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null"):
        return None

    return convert(value, Parameter(type(default), False, default), where)


def studies_folder() -> Path:
    """Return the folder of the studies, in a checkout or an installed wheel."""
    inside = Path(str(resources.files("optsched"))) / "_data" / "studies"
    beside = Path(__file__).resolve().parents[2] / "benchmarks" / "studies"
    return inside if inside.is_dir() else beside
