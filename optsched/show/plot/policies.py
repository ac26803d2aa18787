"""Figures of several policies: distributions over requests, and total latencies beside a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.analysis.comparison import outwards
from optsched.analysis.why import Why
from optsched.judge.evaluate import Evaluation
from optsched.show.plot import style
from optsched.show.plot.style import BLACK, BLUE, RED, axes, labelled, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTRIBUTIONS = {"latency": "latency", "ttft": "time to first token", "tpot": "time per token"}
"""The columns of an Evaluation whose distributions are drawn, and words for them."""
# Of a longer distribution so many points are drawn.
_POINTS = 2000


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
    # `ends`: the smallest and the largest value above 0 of each policy, for the kind of the axis.
    units, ends = set(), []
    for k, (name, evaluation) in enumerate(evaluations.items()):
        in_rounds = evaluation.instance.in_rounds
        scale, unit = 1, "rounds" if in_rounds else "s"
        if metric == "tpot":
            scale, unit = (1, "rounds/token") if in_rounds else (1000, "ms/token")

        units.add(unit)
        values = scale * np.sort(np.asarray(getattr(evaluation, metric), dtype=np.float64))
        values = values[~np.isnan(values)]
        picked = style.thinned(len(values), _POINTS)  # the places of the values to draw
        if not picked:
            continue

        if values[-1] > 0:
            ends += [*values[values > 0][[0, -1]]]
        # From share 0 at the smallest value, a step up at each one that is drawn, to the share of
        # the values up to there.
        x, count = np.append(values[0], values[picked]), np.array([-1, *picked]) + 1
        # Where lines coincide, the earlier ones are wider and show as rims.
        look = {"label": plain(name), "lw": max(1.2, 3.2 - 0.4 * k), **style.line_style(k)}
        ax.step(x, count / len(values), where="post", **look)

    if ends and max(ends) > 300 * min(ends):  # too wide a range for a linear axis
        ax.set_xscale("log")
        style.plain_ticks(ax.xaxis)

    words = f"{DISTRIBUTIONS[metric]} [{', '.join(units)}]"
    return labelled(ax, xlabel=words, ylabel="share of requests", ylim=(0, 1.02))


def plot_comparison(
    policies: Sequence[tuple[str, float]],
    *,
    best_known: float | None = None,
    bound: float | None = None,
    clairvoyant: Sequence[str] = (),
    outside: Sequence[str] = (),
    label: str = "total latency [rounds]",
    ax: Axes | None = None,
) -> Axes:
    """Draw an objective of policies with the best known value and a bound.

    Parameters
    ----------
    policies : sequence of (name, value)
        The policies. They are drawn in the order of their values.
    best_known, bound : float, optional
        Vertical lines. Ratios are to the best known value.
    clairvoyant : sequence of str
        Names of policies that see true output lengths. Their bars are hatched.
    outside : sequence of str
        Names of policies whose schedules are outside the model of the best known value and the
        bound. They get no ratio.
    label : str
        The objective, and its unit.
    ax : Axes, optional
    """
    ranked = sorted(policies, key=lambda row: row[1])
    ax = axes(ax, (8.0, 1.4 + 0.32 * len(ranked)))
    names, values = [name for name, _ in ranked], [value for _, value in ranked]
    bars = ax.barh(range(len(ranked)), values, color=BLUE, height=0.7, edgecolor="white")

    for bar, name in zip(bars, names, strict=True):
        if name in clairvoyant:
            bar.set_hatch("//")

    # As in tables: where no optimum is proved, a ratio to the best known value is rounded down.
    rounded = round if bound == best_known else floor
    for k, (name, value) in enumerate(ranked):
        words = f"{value:.4g}"
        if name in outside:
            words = "no ratio"
        elif best_known and value:
            ratio = max(value / best_known, best_known / value)  # the inverse where more is better
            words = f"{outwards(ratio, rounded, 3)} × best"

        ax.text(value, k, f"  {words}", va="center", fontsize="small")

    lines = ((best_known, BLACK, "-", "best known"), (bound, RED, "--", "bound"))
    for end, colour, dashes, words in lines:
        if end is not None:
            text = f"{end:,.0f}" if end >= 1e4 else f"{end:.5g}"
            ax.axvline(end, color=colour, ls=dashes, lw=1.2, label=f"{words}: {text}")

    ax.set_yticks(range(len(ranked)), [plain(name) for name in names])
    ax.invert_yaxis()
    if values:
        ax.set_xlim(0, 1.32 * max(values))  # with room for the words beside bars

    ax.set_xlabel(label)
    handles: list[Any] = ax.get_legend_handles_labels()[0]
    if any(name in clairvoyant for name in names):
        from matplotlib.patches import Patch

        handles.append(Patch(fc=BLUE, hatch="//", ec="white", label="knows the output lengths"))

    if handles:
        legend(ax, 9, handles=handles)  # beside the axes, as if it had 9 entries

    return ax


def plot_ratios(
    ratios: Mapping[str, Sequence[Any]], ax: Axes | None = None, reference: str = "the reference"
) -> Axes:
    """Draw the share of instances within each ratio, by policy.

    Where a reference is not known exactly, a band goes from the lower to the upper end of the
    ratios.

    Parameters
    ----------
    ratios : mapping of str to sequence, or DataFrame
        Columns ``policy``, ``low`` and ``high``, as `Study.to_frame` returns them.
    ax : Axes, optional
    reference : str
        What the ratios are to, such as ``study.reference``.
    """
    ax = axes(ax, (8.0, 4.5))
    policies, is_open = list(ratios["policy"]), False
    lows, highs = (np.array(ratios[name], dtype=float) for name in ("low", "high"))
    for k, policy in enumerate(dict.fromkeys(policies)):
        rows = np.array([name == policy for name in policies]) & ~np.isnan(lows)
        # Without a bound, the upper end is infinite.
        low, high = (np.sort(np.nan_to_num(end[rows], nan=np.inf)) for end in (lows, highs))
        # A line rises from 0 at the smallest ratio. One without ratios has no points, and a name.
        share = np.arange(1, len(low) + 1) / max(1, len(low))
        look = {**style.line_style(k), "where": "post"}
        ax.step([*low[:1], *low], [0.0, *share] if len(low) else [], label=plain(policy), **look)
        band: dict[str, Any] = {"color": look["color"], "alpha": 0.2, "lw": 0, "step": "pre"}
        ax.fill_betweenx(share, low, high, **band)
        is_open |= bool((low < high).any())

    if is_open:
        ax.fill_between([], [], color="grey", alpha=0.2, lw=0, label=f"{reference} not proved")

    words = f"ratio to {reference}"
    return labelled(ax, xlabel=words, ylabel="share of instances", ylim=(0, 1.02))


def plot_gap(found: Why, ax: Axes | None = None) -> Axes:
    """Draw who loses and who gains against another schedule, over the time of arrival.

    Each request has a point for each cause that changes its latency, and the legend has the sum of
    each cause, as `Why.totals`.

    Parameters
    ----------
    found : Why
        From `optsched.analysis.why.why`; without another schedule it is the whole latency.
    ax : Axes, optional
    """
    ax = axes(ax, (8.0, 4.5))
    unit = "rounds" if found.instance.in_rounds else "s"
    lost, arrival = found.lost, found.instance.release_times
    for k, (name, total) in enumerate(found.totals().items()):
        changed = np.abs(lost[k]) > 1e-9  # by request; less is the rounding of floats
        if changed.any():
            words, colour = f"{name}: {total:+.4g} {unit} in all", style.COLOURS[k]
            ax.scatter(arrival[changed], lost[k, changed], s=12, color=colour, label=words)

    ax.axhline(0.0, color=BLACK, lw=0.8)
    words = f"latency lost to each cause [{unit}]"
    return labelled(ax, xlabel=f"arrival [{unit}]", ylabel=words)
