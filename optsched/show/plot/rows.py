"""Figures of tables: rows as lines, and claims of papers with our values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.show.plot import style
from optsched.show.plot.style import BLACK, BLUE, COLOURS, GREY, ORANGE, axes, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Labels = Mapping[Any, str]
Series = dict[str, dict[Any, list[float]]]
"""The values of each series by x. Series and x stand in the order in which rows have them."""


def points(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    over: object = None,
    labels: Labels | None = None,
) -> Series:
    """Return the values that `plot_lines` draws, by the labels of the series, and for each by x.

    The arguments are those of `plot_lines`.
    """
    words, columns = labels or {}, [y] if isinstance(y, str) else list(y)
    values: dict[Any, dict[Any, list[float]]] = {}  # by series and x
    for row in rows:
        for column in columns:
            if row.get(column) is None or row.get(x) is None:
                continue

            key = column if series is None else row[series]
            if series is not None and len(columns) > 1:
                key = f"{words.get(row[series], row[series])}: {words.get(column, column)}"

            values.setdefault(key, {}).setdefault(row[x], []).append(float(row[column]))

    if over is not None:
        divisors = {at: float(np.mean(base)) for at, base in values.pop(over, {}).items()}
        for key, by_x in values.items():
            # Where there is no divisor, or it is 0, there is no point.
            kept = {at: column for at, column in by_x.items() if divisors.get(at)}
            values[key] = {at: [v / divisors[at] for v in column] for at, column in kept.items()}

    return {str(words.get(key, key)): by_x for key, by_x in values.items() if by_x}


def plot_lines(
    rows: Sequence[Row],
    x: str,
    y: str | Sequence[str],
    *,
    series: str | None = None,
    over: object = None,
    labels: Labels | None = None,
    order: Sequence[str] = (),
    reference: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw columns of rows against a parameter, with a line through the means of each series.

    Where several rows share a point, a band shows their range from min to max.

    Parameters
    ----------
    rows : sequence of mappings
        Rows without a value are left out.
    x : str
        A column of numbers.
    y : str or sequence of str
        The columns to draw. Each is a series if ``series`` is not given.
    series : str, optional
        A column each of whose values is a series.
    over : object, optional
        A series by which the others are divided.
    labels : mapping, optional
        Words for values of ``series`` and for columns.
    order : sequence of str
        All labels in the order that gives them their colours, so that panels agree. By default
        it is the order in which the rows have them.
    reference : mapping of str to float, optional
        Horizontal lines at values that a paper states, by their words.
    ax : Axes, optional
    """
    ax = axes(ax)
    lines = points(rows, x, y, series=series, over=over, labels=labels)
    all_labels = list(order or lines)
    for label, by_x in lines.items():
        k = all_labels.index(label)
        places = sorted(by_x)
        means = [float(np.mean(by_x[at])) for at in places]
        # Where lines coincide, the earlier ones have larger markers and show as rims.
        ax.plot(places, means, label=plain(label), ms=max(3.5, 7 - k), **style.series_style(k))

        if any(len(by_x[at]) > 1 for at in places):
            low, high = [min(by_x[at]) for at in places], [max(by_x[at]) for at in places]
            ax.fill_between(places, low, high, color=COLOURS[k % len(COLOURS)], alpha=0.15, lw=0)

    words = labels or {}
    ax.set_xlabel(plain(words.get(x, x)))
    if isinstance(y, str):
        ax.set_ylabel(plain(words.get(y, y)))

    references(ax, reference, horizontal=True)
    legend(ax)
    return ax


def plot_claims(claims: Sequence[tuple[str, float, float]], *, ax: Axes | None = None) -> Axes:
    """Draw the quotients of measured and published values, with a row for each statement.

    A statement counts as met within 15%, which is drawn as a band.

    Parameters
    ----------
    claims : sequence of (what, published, measured)
        Statements with two numbers of one sign. Others are left out.
    ax : Axes, optional
    """
    shown = [(what, paper, ours) for what, paper, ours in claims if paper * ours > 0]
    within = 0.15
    ax = axes(ax, (8.5, 1.4 + 0.28 * len(shown)))
    ratios = [ours / paper for _, paper, ours in shown]
    ax.axvspan(1 - within, 1 + within, color=GREY, alpha=0.4, lw=0, label=f"within {within:.0%}")
    ax.axvline(1.0, color=BLACK, lw=0.8)
    ax.hlines(range(len(shown)), [1.0] * len(shown), ratios, color=GREY, lw=1)

    is_met = [abs(ratio - 1) <= within for ratio in ratios]
    for met, label, colour, marker in (True, "met", BLUE, "o"), (False, "not met", ORANGE, "X"):
        picked = [k for k in range(len(ratios)) if is_met[k] == met]
        if picked:
            ax.plot([ratios[k] for k in picked], picked, marker, color=colour, ms=7, label=label)

    # On a linear axis the others would lie on one another.
    if ratios and (max(ratios) > 3 or min(ratios) < 1 / 3):
        ax.set_xscale("log")
        style.plain_ticks(ax.xaxis)

    texts = [f"{plain(what, 72)}  ({paper:.4g}; {ours:.4g})" for what, paper, ours in shown]
    ax.set_yticks(range(len(shown)), texts, fontsize="small")
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.set_xlabel("measured over published (published; measured in brackets)")
    legend(ax, 9)  # beside the axes, as if it had 9 entries

    return ax


def references(ax: Axes, reference: Mapping[str, float] | None, *, horizontal: bool) -> None:
    """Draw lines at values that a paper states, by their words."""
    for k, (label, value) in enumerate((reference or {}).items()):
        draw = ax.axhline if horizontal else ax.axvline
        style: Any = ("--", ":", "-.")[k % 3]
        draw(value, color=BLACK, lw=1.2, ls=style, label=f"{plain(label)}: {value:.4g}")


def plot_changes(
    rows: Sequence[tuple[str, float, float, float]],
    *,
    xlabel: str = "gain [%]",
    ax: Axes | None = None,
) -> Axes:
    """Draw what changes of a server gain, with their intervals.

    Parameters
    ----------
    rows : sequence of (str, float, float, float)
        A change, the share of the loss that it takes away, and the ends of its interval. More than
        is lost in all is drawn as that.
    xlabel : str
        Words for the shares in percent.
    ax : Axes, optional
    """
    ax = axes(ax, (8.5, 1.2 + 0.28 * len(rows)))
    ax.axvline(0.0, color=BLACK, lw=0.8)
    for k, (_, *shares) in enumerate(reversed(rows)):  # the first row lies on top
        gain, low, high = (100 * max(share, -1.0) for share in shares)
        colour = GREY  # it may gain or lose
        if low > 0 or high < 0:
            colour = style.GREEN if low > 0 else style.RED
        ax.plot([low, high], [k, k], color=colour, lw=5, alpha=0.45)
        ax.plot(gain, k, "o", color=colour, ms=6)

    # Long names are broken between settings, which a space after each comma allows.
    words = [fill(plain(row[0].replace(",", ", "), 120), 62) for row in reversed(rows)]
    ax.set_yticks(range(len(rows)), words, fontsize="small")
    ax.set_xlabel(xlabel)
    ax.grid(alpha=0.3, axis="x")
    return ax
