"""Mean latency against the load: policies, the best known schedule and what no schedule reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from optsched.show.plot.style import (
    BLACK,
    GREY,
    axes,
    legend,
    plain,
    plain_ticks,
    series_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


def plot_load(
    policies: Mapping[str, Points],
    bound: Points,
    best: Points = (),
    *,
    xlabel: str = "rate, as a multiple of the instance's",
    ylabel: str = "mean latency [s]",
    ax: Axes | None = None,
) -> Axes:
    """Plot a mean over the rate by policy, with the region below a bound.

    Parameters
    ----------
    policies : mapping of str to sequence of (float, float)
        By name: rates > 0, ascending, with values > 0.
    bound : sequence of (float, float)
        Rates, ascending, with values that no schedule falls below. The region below is shaded.
    best : sequence of (float, float)
        Rates, ascending, with the values of the best known schedules.
    xlabel, ylabel : str
        The words at the axes, which are logarithmic.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ax = axes(ax, (8.0, 4.8))
    for k, (name, points) in enumerate(policies.items()):
        if points:
            ax.plot(*zip(*points, strict=True), ms=4, label=plain(name), **series_style(k))

    if best:
        ax.plot(*zip(*best, strict=True), color=BLACK, lw=1.6, label="best known schedule")

    at, low = zip(*bound, strict=True)
    bottom = 0.7 * min(low)
    ax.fill_between(at, bottom, low, color=GREY, alpha=0.45, lw=0, label="no schedule")
    ax.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    ax.set_ylim(bottom=bottom)
    ax.margins(x=0.02)
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    ax.grid(alpha=0.3)
    legend(ax)

    return ax
