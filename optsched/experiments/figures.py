"""The figures of an experiment, and that of its claims, as files beside its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optsched.experiments.base import Claim, Experiment, Row
from optsched.show.plot import rows as drawing, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

CLAIMS = "claims"
"""Name of the figure that compares the paper's numbers with ours."""


def numeric(claims: Iterable[Claim]) -> list[tuple[str, float, float]]:
    """Return ``(what, paper, ours)`` of the claims whose two values are numbers of one sign."""
    return [
        (c.what, float(c.paper), float(c.ours))
        for c in claims
        if not isinstance(c.paper, str)
        and c.ours is not None
        and not isinstance(c.ours, str)
        and c.paper * c.ours > 0
    ]


def figure_names(experiment: Experiment, claims: Sequence[Claim]) -> list[str]:
    """Return the names of an experiment's figures: its own, then that of the claims."""
    names = [f.name for f in experiment.figures]
    return [*names, CLAIMS] if numeric(claims) else names


def draw_figure(
    experiment: Experiment, name: str, rows: Sequence[Row], claims: Sequence[Claim]
) -> Canvas | None:
    """Draw the figure of a name. Returns None if no row has the columns that it shows."""
    if name == CLAIMS:
        stated = numeric(claims)
        canvas = style.figure((9.5, 1.4 + 0.28 * len(stated)))
        drawing.plot_claims(stated, ax=canvas.subplots())
        canvas.suptitle(f"{experiment.name}: {experiment.paper}", fontsize="medium")

        return canvas

    return next(f for f in experiment.figures if f.name == name).draw(experiment, rows)


def write_figures(
    experiment: Experiment, rows: Sequence[Row], claims: Sequence[Claim], folder: Path
) -> list[Path]:
    """Write every figure of an experiment as ``NAME.png``, and return the files."""
    files = []
    for name in figure_names(experiment, claims):
        canvas = draw_figure(experiment, name, rows, claims)
        if canvas is not None:
            style.save(canvas, folder / f"{name}.png")
            files.append(folder / f"{name}.png")

    return files
