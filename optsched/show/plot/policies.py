"""Figures of several policies: distributions over requests, comparisons, and solving progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.show.data import DISTRIBUTIONS, cumulative, distribution, wide
from optsched.show.plot.style import (
    BLACK,
    BLUE,
    GREY,
    RED,
    axes,
    legend,
    plain,
    plain_ticks,
    series_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optsched.judge.evaluate import Evaluation

_POINTS = 2000
_NAMED = 8
"""Max number of policies that have a marker of their own in `plot_tradeoff`."""


def plot_distribution(
    evaluations: Mapping[str, Evaluation], metric: str = "latency", ax: Axes | None = None
) -> Axes:
    """Plot the cumulative distribution of latency, TTFT or TPOT over requests, by policy.

    Parameters
    ----------
    evaluations : mapping of str to Evaluation
        An evaluation for each policy's name.
    metric : {"latency", "ttft", "tpot"}
        The quantity. Requests of one output token have no TPOT and are left out of it.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes

    Raises
    ------
    ValueError
        The metric is another one.
    """
    if metric not in DISTRIBUTIONS:
        raise ValueError(f"metric: found {metric!r}; expected one of {', '.join(DISTRIBUTIONS)}")

    ax = axes(ax, (8.0, 4.5))
    found = {name: distribution(one, metric) for name, one in evaluations.items()}
    units = {unit for _, unit in found.values()}

    for k, (name, (values, _)) in enumerate(found.items()):
        if values.size:
            style = series_style(k)
            ax.step(
                *cumulative(values, _POINTS), where="post", color=style["color"],
                label=plain(name), lw=max(1.2, 3.2 - 0.4 * k), ls=style["linestyle"],
            )  # fmt: skip

    if wide(values for values, _ in found.values()):
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)

    ax.set(xlabel=f"{DISTRIBUTIONS[metric]} [{', '.join(units)}]", ylabel="share of requests")
    ax.set_ylim(0, 1.02)
    ax.grid(alpha=0.3)
    legend(ax)

    return ax


def plot_comparison(
    policies: Sequence[tuple[str, float]],
    *,
    best_known: float | None = None,
    bound: float | None = None,
    clairvoyant: Sequence[str] = (),
    outside: Sequence[str] = (),
    unit: str = "rounds",
    ax: Axes | None = None,
) -> Axes:
    """Plot the total latency of policies with the best known value and a bound.

    Parameters
    ----------
    policies : sequence of (name, total latency)
        The policies. They are drawn in the order of their latencies.
    best_known, bound : float, optional
        Vertical lines. Ratios are to the best known value.
    clairvoyant : sequence of str
        Names of policies that see true output lengths. Their bars are hatched.
    outside : sequence of str
        Names of policies whose schedules are outside the model of the best known value and the
        bound. They get no ratio.
    unit : str
        The unit of the latencies.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ranked = sorted(policies, key=lambda row: row[1])
    ax = axes(ax, (8.0, 1.4 + 0.32 * len(ranked)))
    names, values = [name for name, _ in ranked], [value for _, value in ranked]
    bars = ax.barh(range(len(ranked)), values, color=BLUE, height=0.7, edgecolor="white")

    for bar, name in zip(bars, names, strict=True):
        if name in clairvoyant:
            bar.set_hatch("//")

    for k, (name, length) in enumerate(ranked):
        ratio = f"{length / best_known:.3f} × best" if best_known else f"{length:.4g}"
        words = "no ratio" if name in outside else ratio
        ax.text(length, k, f"  {words}", va="center", fontsize="small")

    lines = ((best_known, BLACK, "-", "best known"), (bound, RED, "--", "bound"))
    for line, colour, dashes, label in lines:
        if line is not None:
            value = f"{line:,.0f}" if line >= 1e4 else f"{line:.5g}"
            ax.axvline(line, color=colour, ls=dashes, lw=1.2, label=f"{label}: {value}")

    ax.set_yticks(range(len(ranked)), [plain(name) for name in names])
    ax.invert_yaxis()
    if values:
        ax.set_xlim(0, 1.32 * max(values))

    ax.set_xlabel(f"total latency [{unit}]")
    handles: list[Any] = ax.get_legend_handles_labels()[0]
    if any(name in clairvoyant for name in names):
        from matplotlib.patches import Patch

        handles.append(Patch(fc=BLUE, hatch="//", ec="white", label="knows the output lengths"))

    if handles:
        legend(ax, 9, handles=handles)

    return ax


def plot_tradeoff(
    curve: Sequence[tuple[float, float]],
    policies: Sequence[tuple[str, float, float]] = (),
    *,
    ax: Axes | None = None,
) -> Axes:
    """Plot mean TTFT over mean latency: policies, and the region where no schedule can be.

    Parameters
    ----------
    curve : sequence of (float, float)
        Corners of the region's edge: mean latency and mean TTFT in seconds, as
        `optsched.optimize.tradeoff.Tradeoff.curve` returns them.
    policies : sequence of (name, mean latency, mean TTFT)
        Those of the smallest latencies have a marker and a name of their own, if no such marker
        is there already.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ax = axes(ax, (8.0, 5.0))
    ranked = sorted(policies, key=lambda row: row[1])
    places = [*curve, *((x, y) for _, x, y in ranked)]
    right = 1.25 * max(x for x, _ in places)
    top = 1.6 * max(y for _, y in places)
    low_x, low_y = (0.8 * min(v for v in values if v > 0) for values in zip(*places, strict=True))
    # Straight lines between corners are curves on logarithmic axes.
    xs = np.concatenate([
        np.geomspace(max(x, low_x), max(z, low_x), 50)
        for (x, _), (z, _) in pairwise([*curve, (right, curve[-1][1])])
    ])  # fmt: skip
    ys: Any = np.interp(xs, [x for x, _ in curve], [y for _, y in curve])
    xs, ys = np.append([low_x, xs[0]], xs), np.append([top, top], np.maximum(ys, low_y))
    ax.fill_between(xs, low_y, ys, color=GREY, alpha=0.45, lw=0, label="no schedule")
    ax.plot(xs[1:], ys[1:], color=BLACK, lw=1.2)
    named: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []

    for name, x, y in ranked:
        if len(named) == _NAMED or any(np.allclose((x, y), one, rtol=0.02) for one in named):
            others.append((x, y))
            continue

        style = series_style(len(named))
        ax.plot(x, y, style["marker"], color=style["color"], ms=7, ls="", label=plain(name))
        named.append((x, y))

    if others:
        ax.plot(*zip(*others, strict=True), ".", color=BLUE, ms=4, label="other policies")

    ax.set(xscale="log", yscale="log", xlim=(low_x, right), ylim=(low_y, top))
    ax.set(xlabel="mean latency [s]", ylabel="mean TTFT [s]")
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    ax.grid(alpha=0.3)
    legend(ax)

    return ax


def plot_progress(
    progress: Sequence[Any] | Mapping[str, Sequence[float | None]],
    ax: Axes | None = None,
    *,
    ylabel: str = "objective",
) -> Axes:
    """Plot incumbent and bound over solving time.

    Parameters
    ----------
    progress : sequence of Progress, or mapping
        `optsched.Result.progress`, or the columns ``elapsed_s``, ``incumbent`` and ``bound`` of
        a result file.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.
    ylabel : str
        Words for the objective, with its unit.

    Returns
    -------
    Axes
    """
    ax = axes(ax, (8.0, 4.0))
    names = ("elapsed_s", "incumbent", "bound")
    if isinstance(progress, Mapping):
        states = list(zip(*(progress[name] for name in names), strict=True))
    else:
        states = [tuple(getattr(state, name) for name in names) for state in progress]

    rows = [row for row in states if row[0] is not None]
    curves = []
    for column, name, colour, dashes in ((1, "incumbent", BLUE, "-"), (2, "bound", RED, "--")):
        known = [(float(row[0]), float(row[column])) for row in rows if row[column] is not None]
        curves.append(known)
        if known:
            x, y = zip(*known, strict=True)
            ax.step(
                x, y, where="post", color=colour, ls=dashes, label=f"{name}: {known[-1][1]:.6g}",
                marker="o" if len(known) < 50 else None, ms=3,
            )  # fmt: skip

    if all(curves):
        times = np.unique([t for curve in curves for t, _ in curve])
        upper, lower = (np.array([_at(curve, float(t)) for t in times]) for curve in curves)
        ax.fill_between(times, lower, upper, step="post", color=GREY, alpha=0.3, lw=0)

    ax.set(xlabel="solving time [s]", ylabel=ylabel)
    ax.grid(alpha=0.3)
    legend(ax)
    return ax


def _at(curve: Sequence[tuple[float, float]], time: float) -> float:
    known = [value for t, value in curve if t <= time]
    return known[-1] if known else float("nan")
