"""Figures of tables: rows by parameter as lines, bars or histograms, and claims beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.show.plot.style import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    axes,
    legend,
    plain,
    plain_ticks,
    series_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Labels = Mapping[Any, str]
Series = dict[str, dict[Any, list[float]]]
"""The values of each series by x, in order of appearance."""


def points(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    over: Any = None,
    labels: Labels | None = None,
) -> Series:
    """Return what `plot_lines` and `plot_bars` draw of rows, by the labels of the series."""
    words, columns = labels or {}, _listed(y)
    found: dict[Any, dict[Any, list[float]]] = {}
    for row in rows:
        for column in columns:
            if row.get(column) is None or row.get(x) is None:
                continue
            key = column if series is None else row[series]
            if series is not None and len(columns) > 1:
                key = f"{words.get(row[series], row[series])}: {words.get(column, column)}"
            found.setdefault(key, {}).setdefault(row[x], []).append(float(row[column]))
    if over is not None:
        base = {at: float(np.mean(values)) for at, values in found.pop(over, {}).items()}
        found = {
            key: {at: [v / base[at] for v in values] for at, values in at_x.items() if base.get(at)}
            for key, at_x in found.items()
        }
    return {str(words.get(key, key)): at_x for key, at_x in found.items() if at_x}


def _listed(columns: str | Sequence[str]) -> list[str]:
    return [columns] if isinstance(columns, str) else list(columns)


def plot_lines(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    over: Any = None,
    labels: Labels | None = None,
    reference: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot columns of rows against a parameter: a line per series through the means.

    Where several rows share a point, a band shows least to most.

    Parameters
    ----------
    rows : sequence of mappings
        Rows without a value are left out.
    x : str
        Column of numbers.
    y : str or sequence of str
        Columns, each a series.
    series : str, optional
        Column whose values are series.
    over : object, optional
        A series by which the others are divided.
    labels : mapping, optional
        Words for values of ``series`` and for columns.
    reference : mapping of str to float, optional
        Horizontal lines: what a paper states.
    ax : Axes, optional
    """
    found = points(rows, x, y, series=series, over=over, labels=labels)
    return draw_lines(found, axes(ax), reference=reference)


def draw_lines(
    found: Series,
    ax: Axes,
    *,
    order: Sequence[str] = (),
    reference: Mapping[str, float] | None = None,
) -> Axes:
    """Draw series as lines; ``order`` holds the labels whose places say their colours."""
    places_of = list(order or found)
    for label, at_x in found.items():
        k = places_of.index(label)
        places = sorted(at_x)
        middle = [float(np.mean(at_x[at])) for at in places]
        # Of lines that coincide, the earlier ones show as rims.
        ax.plot(places, middle, label=plain(label), ms=max(3.5, 7 - k), **series_style(k))
        if any(len(at_x[at]) > 1 for at in places):
            low, high = [min(at_x[at]) for at in places], [max(at_x[at]) for at in places]
            ax.fill_between(places, low, high, color=COLOURS[k % len(COLOURS)], alpha=0.15, lw=0)
    _references(ax, reference, horizontal=True)
    legend(ax)
    return ax


def plot_bars(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    labels: Labels | None = None,
    reference: Mapping[str, float] | None = None,
    published: Mapping[Any, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot means of columns as horizontal bars, a group per value of ``x``.

    What is not listed is as in `plot_lines`; references are vertical lines here.

    Parameters
    ----------
    published : mapping of value of ``x`` to float, optional
        A paper's values, drawn beside ours.
    """
    found = points(rows, x, y, series=series, labels=labels)
    return draw_bars(found, axes(ax), labels=labels, reference=reference, published=published)


def draw_bars(
    found: Series,
    ax: Axes,
    *,
    order: Sequence[str] = (),
    labels: Labels | None = None,
    reference: Mapping[str, float] | None = None,
    published: Mapping[Any, float] | None = None,
) -> Axes:
    """Draw series as bars, as `draw_lines` draws lines."""
    words = labels or {}
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
        places = [g for g, at in enumerate(groups) if at in value]
        ax.barh(
            [g + (k - (len(places_of) - 1) / 2) * thick for g in places],
            [value[groups[g]] for g in places],
            height=thick,
            color=GREY if paper else COLOURS[k % len(COLOURS)],
            hatch="//" if paper else None,
            edgecolor="white",
            label=plain(label),
        )
    ax.set_yticks(range(len(groups)), [plain(words.get(at, at)) for at in groups])
    ax.invert_yaxis()
    _references(ax, reference, horizontal=False)
    if len(places_of) > 1 or reference:
        legend(ax, 9)  # bars leave no room inside
    return ax


def plot_histogram(
    rows: Sequence[Row],
    columns: str | Sequence[str],
    *,
    labels: Mapping[Any, str] | None = None,
    reference: Mapping[str, float] | None = None,
    bins: int = 30,
    ax: Axes | None = None,
) -> Axes:
    """Plot how often values of columns occur, over the same bins.

    Parameters
    ----------
    rows : sequence of mappings
    columns : str or sequence of str
    labels : mapping of column to str, optional
    reference : mapping of str to float, optional
        Vertical lines: what a paper states.
    bins : int
    ax : Axes, optional
    """
    ax = axes(ax)
    values = {c: [float(r[c]) for r in rows if r.get(c) is not None] for c in _listed(columns)}
    everything = [v for column in values.values() for v in column]
    if everything:
        edges = np.histogram_bin_edges(everything, bins=bins).tolist()
        for k, (column, numbers) in enumerate(values.items()):
            colour = COLOURS[k % len(COLOURS)]
            label = plain((labels or {}).get(column, column))
            ax.hist(numbers, edges, color=colour, alpha=0.35, label=label)
            ax.hist(numbers, edges, color=colour, histtype="step", lw=1.5)
    _references(ax, reference, horizontal=False)
    legend(ax)
    ax.set_ylabel("number")
    return ax


def plot_ratios(
    low: Sequence[float],
    high: Sequence[float] | None = None,
    *,
    published: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the histogram of a policy's ratios to the optimum (Jaillet et al. 2025, Figure 2).

    Parameters
    ----------
    low : sequence of float
        Ratio to the best schedule known, per trial.
    high : sequence of float, optional
        Ratio to a proved bound: the ratio to the optimum lies between the two.
    published : mapping of str to float, optional
        Statements of a paper, as vertical lines.
    ax : Axes, optional
    """
    rows: list[Row] = [{"low": value} for value in low]
    rows += [{"high": value} for value in high] if high is not None else []
    names = {"low": "ratio to the best known", "high": "ratio to the bound"}
    shown = ["low"] if high is None else ["low", "high"]
    ax = plot_histogram(rows, shown, labels=names, reference=published, ax=ax)
    ax.set(xlabel="total latency over the optimum's", ylabel="trials")
    return ax


def plot_claims(
    claims: Sequence[tuple[str, float, float]], *, within: float = 0.15, ax: Axes | None = None
) -> Axes:
    """Plot measured values over published ones, a line per statement.

    Parameters
    ----------
    claims : sequence of (what, published, measured)
        Numbers that are not 0.
    within : float
        Relative difference that counts as met, drawn as a band.
    ax : Axes, optional
    """
    shown = [c for c in claims if c[1] * c[2] > 0]
    ax = axes(ax, (8.5, 1.4 + 0.28 * len(shown)))
    ratios = [ours / paper for _, paper, ours in shown]
    ax.axvspan(1 - within, 1 + within, color=GREY, alpha=0.4, lw=0, label=f"within {within:.0%}")
    ax.axvline(1.0, color=BLACK, lw=0.8)
    ax.hlines(range(len(shown)), [1.0] * len(shown), ratios, color=GREY, lw=1)
    for met, colour, marker, label in ((True, BLUE, "o", "met"), (False, ORANGE, "X", "not met")):
        picked = [k for k, ratio in enumerate(ratios) if (abs(ratio - 1) <= within) == met]
        if picked:
            ax.plot([ratios[k] for k in picked], picked, marker, color=colour, ms=7, label=label)
    if ratios and (max(ratios) > 3 or min(ratios) < 1 / 3):
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    texts = [f"{plain(what, 72)}  ({paper:.4g}; {ours:.4g})" for what, paper, ours in shown]
    ax.set_yticks(range(len(shown)), texts, fontsize="small")
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlabel("measured over published (published; measured in brackets)")
    legend(ax, 9)
    return ax


def _references(ax: Axes, reference: Mapping[str, float] | None, *, horizontal: bool) -> None:
    for k, (label, value) in enumerate((reference or {}).items()):
        draw = ax.axhline if horizontal else ax.axvline
        style: Any = ("--", ":", "-.")[k % 3]
        draw(value, color=BLACK, lw=1.2, ls=style, label=f"{plain(label)}: {value:.4g}")
