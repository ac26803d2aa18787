"""Attainment of SLOs against the rate, or the number of workers, with what is impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from optsched.show.plot.style import BLACK, GREY, RED, axes, legend, plain, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


def plot_capacity(
    policies: Mapping[str, Points],
    bound: Points = (),
    *,
    attainment: float | None = None,
    impossible: float | None = None,
    xlabel: str = "rate, as a multiple of the instance's",
    ax: Axes | None = None,
) -> Axes:
    """Plot the share of requests within their SLOs against the rate, by policy.

    Parameters
    ----------
    policies : mapping of str to sequence of (float, float)
        By name: rates, or numbers of workers, ascending, with attainments.
    bound : sequence of (float, float)
        Rates, or numbers of workers, with shares that no schedule exceeds. They fall with the rate,
        and rise with workers. So between two points no schedule exceeds the larger share. The
        region above is shaded.
    attainment : float, optional
        A horizontal line: the share that is asked for.
    impossible : float, optional
        A vertical line: where this share is proved impossible.
    xlabel : str
        The words under the axis of rates or workers.
    ax : Axes, optional
        The axes to draw on. By default new ones are made.

    Returns
    -------
    Axes
    """
    ax = axes(ax, (8.0, 4.5))
    for k, (name, points) in enumerate(policies.items()):
        if points:
            at, share = zip(*points, strict=True)
            style = series_style(k)
            ax.plot(
                at, share, marker="o", ms=3.5, lw=1.4, color=style["color"],
                ls=style["linestyle"], label=plain(name),
            )  # fmt: skip

    if bound:
        at, share = zip(*sorted(bound), strict=True)
        where: Any = "post" if share[0] >= share[-1] else "pre"
        ax.step(at, share, where=where, color=RED, lw=1.2)
        ax.fill_between(
            at, share, 1.05, step=where, color=RED, alpha=0.15, lw=0, label="proved impossible"
        )

    if attainment is not None:
        ax.axhline(attainment, color=BLACK, lw=0.9, ls=":", label=f"attainment {attainment:g}")
    if impossible is not None:
        ax.axvline(impossible, color=GREY, lw=0.9, ls="--", label=f"impossible: {impossible:.4g}")

    ax.set(xlabel=xlabel, ylabel="share of requests within SLOs")
    ax.set_ylim(0, 1.05)
    ax.grid(alpha=0.3)
    legend(ax)

    return ax
