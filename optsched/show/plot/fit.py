"""A figure that shows how well a fitted cost model predicts measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.show.plot.style import COLOURS, MARKERS, axes, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optsched.costs.fit import Fit


def plot_fit(fit: Fit, ax: Axes | None = None) -> Axes:
    """Plot predicted against measured times in milliseconds, with one colour per operator.

    Filled marks are measurements that were held out, pale marks those that were fitted. On the
    line the two times are equal.

    Parameters
    ----------
    fit : Fit
        A fitted cost model with its measurements.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ax = axes(ax, (6.0, 5.0))
    low, high = float("inf"), 0.0
    for k, o in enumerate(fit.operators):
        colour, mark = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
        ax.plot(
            o.measured_ms[~o.tested], o.predicted_ms[~o.tested], mark, ms=2, alpha=0.15,
            color=colour, rasterized=True,
        )  # fmt: skip
        ax.plot(
            o.measured_ms[o.tested], o.predicted_ms[o.tested], mark, ms=3.5, color=colour,
            label=f"{o.operator} (mean error {o.mean:.1%})", rasterized=True,
        )  # fmt: skip

        if o.measured_ms.size:
            low = min(low, float(o.measured_ms.min()))
            high = max(high, float(o.measured_ms.max()))

    if high:
        ax.plot([low, high], [low, high], color="black", lw=0.8, zorder=0)
        ax.set_xscale("log")
        ax.set_yscale("log")
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)

    ax.set(
        xlabel="measured [ms]", ylabel="predicted [ms]", title=f"{fit.cost_model.name}: held out"
    )
    ax.legend(fontsize="small")
    return ax
