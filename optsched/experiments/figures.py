"""The figures of an experiment, and that of its claims, as files beside its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optsched.experiments.base import Claim, Experiment, Figure, Row
from optsched.show.plot import rows as drawing, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def numeric(claims: Iterable[Claim]) -> list[tuple[str, float, float]]:
    """Return ``(what, paper, ours)`` of the claims whose two values are numbers of one sign.

    The figure draws quotients of the two (`plot_claims`).
    """
    return [
        (claim.what, float(claim.paper), float(claim.ours))
        for claim in claims
        if not isinstance(claim.paper, str)
        and claim.ours is not None
        and not isinstance(claim.ours, str)
        and claim.paper * claim.ours > 0
    ]


@dataclass(frozen=True)
class _OfClaims:
    """The figure of claims, as experiments have others."""

    claims: Sequence[Claim]
    name = "claims"

    def draw(self, experiment: Experiment, rows: Sequence[Row]) -> Canvas:
        stated = numeric(self.claims)
        canvas = style.figure((9.5, 1.4 + 0.28 * len(stated)))
        drawing.plot_claims(stated, ax=canvas.subplots())
        canvas.suptitle(f"{experiment.name}: {experiment.paper}", fontsize="medium")
        return canvas


def figures_of(experiment: Experiment, claims: Sequence[Claim]) -> dict[str, Figure]:
    """Return an experiment's figures by name: its own, then that of the claims."""
    figures = [*experiment.figures, *([_OfClaims(claims)] if numeric(claims) else [])]
    return {figure.name: figure for figure in figures}


def write_figures(
    experiment: Experiment, rows: Sequence[Row], claims: Sequence[Claim], folder: Path
) -> list[Path]:
    """Write every figure of an experiment as ``NAME.png``, and return the files."""
    files = []
    for name, figure in figures_of(experiment, claims).items():
        canvas = figure.draw(experiment, rows)
        # None: no row has what the figure shows.
        if canvas is not None:
            style.save(canvas, folder / f"{name}.png")
            files.append(folder / f"{name}.png")

    return files
