"""Figures of experiments that are declared by the columns they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from optsched.experiments.base import Experiment, Row
from optsched.show.plot import rows as drawing, style
from optsched.show.plot.style import COLOURS, GREY, axes, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
        plot_histogram(rows, wanted.y, labels=words, reference=shared, ax=ax)
        return

    options = {"series": wanted.series, "over": wanted.over, "labels": words}
    options |= {"order": order, "reference": shared, "ax": ax}
    if wanted.kind == "bar":
        plot_bars(rows, wanted.x, wanted.y, published=wanted.published, **options)
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


def plot_bars(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    over: object = None,
    labels: drawing.Labels | None = None,
    order: Sequence[str] = (),
    reference: Mapping[str, float] | None = None,
    published: Mapping[Any, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw means of columns as horizontal bars, in a group for each value of ``x``.

    Parameters
    ----------
    rows, y, series, over, order
        As in `plot_lines`.
    x : str
        A column each of whose values has a group of bars.
    labels : mapping, optional
        Words for values of ``x`` and ``series``, and for columns.
    reference : mapping of str to float, optional
        Vertical lines at values that a paper states, by their words.
    published : mapping, optional
        The values that a paper publishes, by value of ``x``. They are drawn as bars of their own.
    ax : Axes, optional
    """
    ax, words = axes(ax), labels or {}
    found = drawing.points(rows, x, y, series=series, over=over, labels=labels)
    groups = list(dict.fromkeys(at for at_x in found.values() for at in at_x))
    means = {
        label: {at: float(np.mean(v)) for at, v in at_x.items()} for label, at_x in found.items()
    }
    places_of = list(order or means)

    if published:
        if len(means) == 1:
            means, places_of = {"measured": next(iter(means.values()))}, ["measured"]

        means["published"] = dict(published)
        places_of.append("published")

    thick = 0.8 / max(1, len(places_of))
    for label, value in means.items():
        k, paper = places_of.index(label), bool(published) and label == "published"
        shown = [g for g, at in enumerate(groups) if at in value]
        places = [g + (k - (len(places_of) - 1) / 2) * thick for g in shown]
        look: dict[str, Any] = {"height": thick, "edgecolor": "white", "label": plain(label)}
        look |= {"color": GREY, "hatch": "//"} if paper else {"color": COLOURS[k % len(COLOURS)]}
        ax.barh(places, [value[groups[g]] for g in shown], **look)

    ax.set_yticks(range(len(groups)), [plain(words.get(at, at)) for at in groups])
    ax.invert_yaxis()
    drawing.references(ax, reference, horizontal=False)
    if len(places_of) > 1 or reference:
        legend(ax, 9)  # bars leave no room inside

    return ax


def plot_histogram(
    rows: Sequence[Row],
    columns: str | Sequence[str],
    *,
    labels: drawing.Labels | None = None,
    reference: Mapping[str, float] | None = None,
    bins: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Draw a histogram of each column, all with the same bins.

    Parameters
    ----------
    rows : sequence of mappings
        Rows without a value are left out.
    columns : str or sequence of str
        The columns of numbers.
    labels : mapping of column to str, optional
        Words for columns.
    reference : mapping of str to float, optional
        Vertical lines at values that a paper states, by their words.
    bins : int
        Number of bins.
    ax : Axes, optional
    """
    ax, listed = axes(ax), [columns] if isinstance(columns, str) else columns
    values = {c: [float(r[c]) for r in rows if r.get(c) is not None] for c in listed}
    everything = [v for column in values.values() for v in column]

    if everything:
        edges = np.histogram_bin_edges(everything, bins=bins).tolist()
        for k, (column, numbers) in enumerate(values.items()):
            colour = COLOURS[k % len(COLOURS)]
            label = plain((labels or {}).get(column, column))
            ax.hist(numbers, edges, color=colour, alpha=0.35, label=label)
            ax.hist(numbers, edges, color=colour, histtype="step", lw=1.5)

    drawing.references(ax, reference, horizontal=False)
    legend(ax)
    ax.set_ylabel("number")
    return ax
