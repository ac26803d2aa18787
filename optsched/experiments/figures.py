"""Draw the figures of an experiment, and write them into the folder of its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.experiments.base import Claim, Experiment, Figure, Row
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

    return _draw(experiment, next(f for f in experiment.figures if f.name == name), rows)


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


def _draw(experiment: Experiment, wanted: Figure, rows: Sequence[Row]) -> Canvas | None:
    columns = [wanted.y] if isinstance(wanted.y, str) else list(wanted.y)
    chosen = wanted.where.items()
    rows = [row for row in rows if all(row.get(k) == v for k, v in chosen)]
    kept = [row for row in rows if any(row.get(c) is not None for c in columns)]
    if not kept:
        return None

    panels = list(dict.fromkeys(row.get(wanted.panel or "") for row in kept))
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    canvas = style.figure((4.6 * across + 2.4, 3.6 * down + 0.4))
    grid = canvas.subplots(down, across, squeeze=False).flatten().tolist()
    order = list(_points(wanted, kept))

    for ax, value in zip(grid, panels, strict=False):
        _panel(wanted, [r for r in kept if r.get(wanted.panel or "") == value], order, ax)
        ax.set_xlabel(wanted.x_label or experiment.columns.get(wanted.x, wanted.x))

        if wanted.kind == "line":
            if grid.index(ax) % across == 0:
                ax.set_ylabel(wanted.y_label or experiment.columns.get(columns[0], columns[0]))

            ax.grid(alpha=0.3)

        if wanted.panel is not None:
            name = wanted.labels.get(wanted.panel, wanted.panel)
            ax.set_title(style.plain(wanted.labels.get(value, f"{name} {value}")), fontsize="small")

    for ax in grid[len(panels) :]:
        ax.remove()

    _one_legend(grid[: len(panels)])
    title = f"{wanted.title or experiment.summary}\n{experiment.paper}"
    canvas.suptitle(title, fontsize="medium")
    return canvas


def _points(wanted: Figure, rows: Sequence[Row]) -> drawing.Series:
    return drawing.points(
        rows, wanted.x, wanted.y, series=wanted.series, over=wanted.over, labels=wanted.labels
    )


def _panel(wanted: Figure, rows: list[Row], order: list[str], ax: Any) -> None:
    words, shared = wanted.labels, wanted.reference
    if wanted.kind == "histogram":
        drawing.plot_histogram(rows, wanted.y, labels=words, reference=shared, ax=ax)
        return

    options = {"series": wanted.series, "over": wanted.over, "labels": words}
    options |= {"order": order, "reference": shared, "ax": ax}
    if wanted.kind == "bar":
        drawing.plot_bars(rows, wanted.x, wanted.y, published=wanted.published, **options)
    else:
        drawing.plot_lines(rows, wanted.x, wanted.y, **options)

    if "x" in wanted.log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")

    if "y" in wanted.log:
        ax.set_yscale("log")
        style.plain_ticks(ax.yaxis)


def _one_legend(panels: Sequence[Any]) -> None:
    """Replace the panels' legends by one where several panels show the same series."""
    if len(panels) == 1:
        return

    entries: dict[str, Any] = {}
    for ax in panels:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
        if ax.get_legend() is not None:
            ax.get_legend().remove()

    place = {"loc": "outside right upper", "fontsize": "small", "frameon": False}
    panels[0].figure.legend(list(entries.values()), list(entries), **place)
