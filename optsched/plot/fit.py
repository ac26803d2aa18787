"""How well a fitted cost model meets what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optsched.fit import Fit


def plot_fit(fit: Fit, ax: Axes | None = None) -> Axes:
    """Plot measured against predicted times, one colour per operator.

    Filled marks were held out, pale ones fitted; on the line they agree.

    Parameters
    ----------
    fit : Fit
    ax : matplotlib Axes, optional
        Default: new ones.
    """
    import matplotlib.pyplot as plt

    if ax is None:
        ax = plt.subplots(figsize=(6, 5), layout="constrained")[1]
    low, high = float("inf"), 0.0
    for k, o in enumerate(fit.operators):
        colour = f"C{k}"
        ax.plot(
            o.measured_ms[~o.tested], o.predicted_ms[~o.tested], ".", ms=3, alpha=0.15,
            color=colour, rasterized=True,
        )  # fmt: skip
        ax.plot(
            o.measured_ms[o.tested], o.predicted_ms[o.tested], ".", ms=5, color=colour,
            label=f"{o.operator} (mean error {o.mean:.1%})", rasterized=True,
        )  # fmt: skip
        if o.measured_ms.size:
            low = min(low, float(o.measured_ms.min()))
            high = max(high, float(o.measured_ms.max()))
    if high:
        ax.plot([low, high], [low, high], color="black", lw=0.8, zorder=0)
        ax.set_xscale("log")
        ax.set_yscale("log")
    ax.set(
        xlabel="measured [ms]", ylabel="predicted [ms]", title=f"{fit.cost_model.name}: held out"
    )
    ax.legend(fontsize="small")
    return ax
