"""Figures of experiments that are declared by the columns they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from optsched.experiments.base import Experiment, Row
from optsched.show.plot import rows as drawing, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure of an experiment's rows, declared by columns, which `optsched.show.plot.rows` draws.

    Parameters
    ----------
    name : str
        Name of the file, and of the figure for ``optsched plot --kind``.
    x : str
        The column on the horizontal axis. Histograms do not use it.
    y : str or sequence of str
        The columns on the vertical axis. A point is the mean over the rows that agree in ``x`` and
        in ``series``.
    kind : {"line", "bar", "histogram"}
        What is drawn.
    series : str, optional
        A column each of whose values is a line, or a bar of its own colour.
    panel : str, optional
        A column each of whose values has a panel of its own.
    over : object, optional
        A value of ``series``. The values of the other series are divided by its values.
    where : mapping
        Columns and the values that a row must have in them.
    labels : mapping
        Words for columns and for values of ``series`` and ``panel``.
    published : mapping
        The paper's values for bars, by value of ``x``.
    reference : mapping of str to float
        Lines at values that the paper states, by their words.
    title, x_label, y_label : str
        Texts with units. By default the experiment's ``summary`` and ``columns`` give them.
    log : {"", "x", "y", "xy"}
        The axes with logarithmic scales.
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

    def draw(self, experiment: Experiment, rows: Sequence[Row]) -> Canvas | None:
        """Draw the figure. Returns None if no row has the columns that it shows."""
        return _draw(self, experiment, rows)


def _draw(wanted: Figure, experiment: Experiment, rows: Sequence[Row]) -> Canvas | None:
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
