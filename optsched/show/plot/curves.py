"""Figures of curves: capacity, load, solving progress, prices of memory, and fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from optsched.show.plot import style
from optsched.show.plot.style import BLACK, BLUE, GREEN, GREY, RED, axes, curves, labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optsched.costs.fit import Fit

Points = Sequence[tuple[float, float]]
# How many times more late requests than may be `plot_capacity` shows.
_LATE = 8.0


def plot_capacity(
    policies: Mapping[str, Points],
    bound: Points = (),
    *,
    attainment: float | None = None,
    impossible: float | None = None,
    rates: bool = True,
    per_second: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of requests within their SLOs against the rate, by policy.

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
    rates : bool
        Whether the horizontal axis has rates, on a logarithmic scale, and not workers.
    per_second : bool
        Whether rates are in requests per second, and not multiples of the instance's.
    ax : Axes, optional

    Notes
    -----
    The axis of shares begins where so many more requests are late than may be, that no policy is of
    use there.
    """
    ax = axes(ax, (8.0, 4.5))
    curves(ax, policies, ms=4, lw=1.4)
    if bound:
        x, share = zip(*sorted(bound), strict=True)
        # Between two points the larger share holds: the left one where shares fall.
        where: Any = "post" if share[0] >= share[-1] else "pre"
        ax.step(x, share, where=where, color=BLACK, lw=1.2)
        look: dict[str, Any] = {"color": GREY, "alpha": 0.45, "lw": 0, "step": where}
        ax.fill_between(x, share, 1.05, label="no schedule", **look)  # to beyond the axis

    if attainment is not None:
        ax.axhline(attainment, color=BLACK, lw=0.9, ls=":", label=f"attainment {attainment:g}")
    if impossible is not None:
        ax.axvline(impossible, color=GREY, lw=0.9, ls="--", label=f"impossible: {impossible:.4g}")

    if rates:
        ax.set_xscale("log")
        style.plain_ticks(ax.xaxis)

    xlabel = "workers"
    if rates:
        xlabel = "requests per second" if per_second else "rate, as a multiple of the instance's"

    # One in a hundred counts as one that may be late, so that an attainment of 1 leaves an axis.
    bottom = 0.0 if attainment is None else max(0.0, 1 - _LATE * max(0.01, 1 - attainment))
    ax.set_ylim(bottom, 1 + 0.03 * (1 - bottom))
    return labelled(ax, xlabel=xlabel, ylabel="share of requests within SLOs")


def plot_percentiles(
    runs: Mapping[str, Sequence[float]], *, xlabel: str = "latency [s]", ax: Axes | None = None
) -> Axes:
    """Draw distributions that percentiles describe, such as measured and predicted ones.

    Parameters
    ----------
    runs : mapping of str to sequence of float
        By name: percentiles at equal distances, from the smallest value to the largest.
    xlabel : str
    ax : Axes, optional
    """
    ax = axes(ax, (8.0, 4.5))
    for k, (name, values) in enumerate(runs.items()):
        share = np.linspace(0.0, 1.0, len(values))
        look: dict[str, Any] = {"lw": max(1.2, 3.2 - 0.8 * k), **style.line_style(k)}
        ax.plot(values, share, label=style.plain(name), **look)

    return labelled(ax, xlabel=xlabel, ylabel="share of requests")


def plot_splits(
    rows: Sequence[tuple[str, float | None, float | None, str]],
    *,
    more_is_better: bool = False,
    ylabel: str = "mean latency [s]",
    ax: Axes | None = None,
) -> Axes:
    """Draw an interval for each split of machines into pools, and who is proved worse.

    Parameters
    ----------
    rows : sequence of (str, float, float, str)
        The split's name, the bound, the best value found, and the verdict. None: not known.
    more_is_better : bool
        Whether the metric is maximized, so that bounds lie above.
    ylabel : str
        The words at the axis, which is logarithmic if values differ by more than a factor of 3.
    ax : Axes, optional
    """
    ax = axes(ax, (8.0, 4.5))
    verdicts = [verdict for *_, verdict in rows]
    for k, (_, bound, found, verdict) in enumerate(rows):
        colour = {"best": GREEN, "possible": BLUE}.get(verdict, RED)
        ends = [value for value in (bound, found) if value is not None]
        label = verdict if verdicts.index(verdict) == k else None  # each once in the legend
        ax.plot([k] * len(ends), ends, color=colour, lw=6, alpha=0.35, label=label)
        for end, marker in ((bound, "_"), (found, "o")):
            if end is not None:
                ax.plot(k, end, marker=marker, ms=12, mew=2, color=colour)

    best = [found for _, _, found, verdict in rows if verdict == "best" and found is not None]
    if best:
        ax.axhline(best[0], color=BLACK, lw=0.9, ls=":", label=f"best found: {best[0]:.4g}")
    for marker, label in (("_", "bound"), ("o", "found")):
        ax.plot([], [], marker, ms=8, mew=2, color=BLACK, label=label)

    low, high = ax.get_yaxis().get_data_interval()
    if not more_is_better and high > 3 * low > 0:
        ax.set_yscale("log")
        style.plain_ticks(ax.yaxis)

    ax.set_xticks(range(len(rows)), [name for name, *_ in rows])
    return labelled(ax, grid="y", xlabel="prefill and decode machines", ylabel=ylabel)


def plot_load(
    policies: Mapping[str, Points],
    bound: Points,
    best: Points = (),
    *,
    ax: Axes | None = None,
) -> Axes:
    """Draw the mean latency over the rate by policy, with the region below a bound.

    Parameters
    ----------
    policies : mapping of str to sequence of (float, float)
        By name: rates > 0, ascending, with values > 0.
    bound : sequence of (float, float)
        Rates, ascending, with values that no schedule falls below. The region below is shaded.
    best : sequence of (float, float)
        Rates, ascending, with the values of the best known schedules.
    ax : Axes, optional
    """
    ax = axes(ax, (8.0, 4.8))
    curves(ax, policies, ms=4)
    if best:
        ax.plot(*zip(*best, strict=True), color=BLACK, lw=1.6, label="best known schedule")

    x, low = zip(*bound, strict=True)
    bottom = 0.7 * min(low)  # the region begins here, so that it has some height everywhere
    ax.fill_between(x, bottom, low, color=GREY, alpha=0.45, lw=0, label="no schedule")
    ax.margins(x=0.02)
    style.logarithmic(ax, bottom=bottom)
    xlabel = "rate, as a multiple of the instance's"
    return labelled(ax, xlabel=xlabel, ylabel="mean latency [s]")


def plot_progress(
    progress: Sequence[Any] | Mapping[str, Sequence[float | None]],
    ax: Axes | None = None,
    *,
    ylabel: str = "objective",
) -> Axes:
    """Draw incumbent and bound over solving time.

    Parameters
    ----------
    progress : sequence of Progress, or mapping
        `optsched.Result.progress`, or the columns ``elapsed_s``, ``incumbent`` and ``bound`` of
        a result file.
    ax : Axes, optional
    ylabel : str
        Words for the objective, with its unit.
    """
    import pandas as pd

    ax = axes(ax, (8.0, 4.0))
    names = ("elapsed_s", "incumbent", "bound")
    if not isinstance(progress, Mapping):
        progress = {name: [getattr(state, name) for state in progress] for name in names}

    states = pd.DataFrame({name: progress[name] for name in names}, dtype=float)
    states = states.dropna(subset="elapsed_s").set_index("elapsed_s")
    for name, colour, dashes in (("incumbent", BLUE, "-"), ("bound", RED, "--")):
        known = states[name].dropna()
        if len(known):
            label = f"{name}: {known.iloc[-1]:.6g}"
            marker = "o" if len(known) < 50 else None  # more of them would be a thick line
            look: dict[str, Any] = {"color": colour, "ls": dashes, "marker": marker, "ms": 3}
            ax.step(known.index, known, where="post", label=label, **look)

    # There is a gap to shade if both are known at some time. Each holds until the next one.
    if states.notna().any().all():
        last = states.ffill()
        look = {"step": "post", "color": GREY, "alpha": 0.3, "lw": 0}
        ax.fill_between(last.index, last["bound"], last["incumbent"], **look)

    return labelled(ax, xlabel="solving time [s]", ylabel=ylabel)


def plot_shadow_prices(prices: ArrayLike, ax: Axes | None = None) -> Axes:
    """Draw the price of one KV token over time.

    Parameters
    ----------
    prices : array_like, shape (pieces, 2)
        The first round and the price of each piece, as `optsched.bounds.shadow_prices`
        returns them. A price is in rounds of total latency for one token during one round.
    ax : Axes, optional
    """
    ax = axes(ax)
    rows = np.asarray(prices, dtype=np.float64).reshape(-1, 2)
    ax.step(rows[:, 0], rows[:, 1], where="post", color=BLUE, lw=1)
    ax.fill_between(rows[:, 0], rows[:, 1], step="post", color=BLUE, alpha=0.2, lw=0)
    ax.set_xlabel("time [rounds]")
    ax.set_ylabel("price of a KV token for a round\n[rounds of total latency]")
    ax.set_ylim(bottom=0)

    return ax


def plot_fit(fit: Fit, ax: Axes | None = None) -> Axes:
    """Draw predicted against measured times in milliseconds, with one colour per operator.

    Filled marks are measurements that were held out, pale marks those that were fitted. On the
    line the two times are equal.

    Parameters
    ----------
    fit : Fit
    ax : Axes, optional
    """
    ax = axes(ax, (6.0, 5.0))
    low, high = float("inf"), 0.0
    for k, fitted in enumerate(fit.operators):
        measured, predicted, tested = fitted.measured_ms, fitted.predicted_ms, fitted.tested
        look = {**style.series_style(k), "linestyle": "", "rasterized": True}
        label = f"{fitted.operator} (mean error {fitted.mean:.1%})"
        ax.plot(measured[~tested], predicted[~tested], **look, ms=2, alpha=0.15)
        ax.plot(measured[tested], predicted[tested], **look, ms=3.5, label=label)
        if measured.size:
            low = min(low, float(measured.min()))
            high = max(high, float(measured.max()))

    if high:
        ax.plot([low, high], [low, high], color="black", lw=0.8, zorder=0)
        style.logarithmic(ax)

    ax.set(xlabel="measured [ms]", ylabel="predicted [ms]")
    ax.set_title(f"{fit.cost_model.name}: held out")
    ax.legend(fontsize="small")
    return ax
