"""Pictures of a schedule over time: requests, KV memory and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optsched.judge.timeline import DECODE, EVICTED, PHASES, PREFILL, REFILL, SEPARATE
from optsched.show.plot.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    axes,
    legend,
    plain,
    series_style,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optsched.judge.timeline import Timeline

PHASE_COLOURS = dict(zip(PHASES, (GREY, BLUE, SKY, YELLOW, RED, PURPLE), strict=True))
"""Waiting, prefill, decode, paused, evicted, refill."""

ROWS_APART = 300
"""Requests up to which `plot_gantt` draws each one."""
_NAMED = 40
_GRID = 60
_STEPS = 1500


def plot_gantt(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Plot what every request does when: a row per request, in order of arrival.

    With more than `ROWS_APART` requests a row is a group of requests that arrived one after
    another: the colour is the phase that most of those present are in, stronger the more of the
    group are there, and dots are evictions.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    """
    n = timeline.instance.n
    ax = axes(ax, (9.0, min(7.0, 1.8 + 0.18 * n)))
    row = np.empty(n, dtype=np.int64)
    row[timeline.by_arrival] = np.arange(n)
    present = [p for p in range(len(PHASES)) if (timeline.span_phase == p).any()]
    if n <= ROWS_APART:
        _bars(timeline, row, present, ax)
    else:
        _raster(timeline, row, present, ax)
    from matplotlib.patches import Patch

    handles = [Patch(color=PHASE_COLOURS[PHASES[p]], label=PHASES[p]) for p in present]
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small",
        frameon=False,
    )  # fmt: skip
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set_ylim(n - 0.4, -0.6)
    ax.set_xlabel(f"time [{timeline.unit}]")
    return ax


def _bars(timeline: Timeline, row: NDArray[np.int64], present: list[int], ax: Axes) -> None:
    from matplotlib.collections import PolyCollection

    n = timeline.instance.n
    for phase in present:
        mine = timeline.span_phase == phase
        a, b = timeline.span_start[mine], timeline.span_end[mine]
        y = row[timeline.span_request[mine]].astype(float)
        half = 0.14 if PHASES[phase] in ("waiting", "evicted", "paused") else 0.4
        corners = np.stack([a, y - half, a, y + half, b, y + half, b, y - half], axis=1)
        boxes = PolyCollection(
            list(corners.reshape(-1, 4, 2)),
            facecolor=PHASE_COLOURS[PHASES[phase]],
            edgecolor="none",
            zorder=2,
        )
        boxes.set_label(PHASES[phase])
        ax.add_collection(boxes)
    edges = np.unique(np.concatenate([timeline.batch_start, timeline.batch_end]))
    if len(edges) <= _GRID and n <= _NAMED:
        ax.vlines(edges, -0.5, n - 0.5, color=BLACK, lw=0.3, alpha=0.5, zorder=1)
    if n <= _NAMED:
        names = [plain(timeline.name_of(int(i)), 24) for i in timeline.by_arrival]
        ax.set_yticks(range(n), names, fontsize="small")
    else:
        ax.set_ylabel("requests by arrival")


def _raster(timeline: Timeline, row: NDArray[np.int64], present: list[int], ax: Axes) -> None:
    from matplotlib.colors import to_rgb

    n = timeline.instance.n
    shares = timeline.phase_shares(min(n, ROWS_APART), 900)
    most = shares.argmax(axis=0)
    colours = np.array([to_rgb(PHASE_COLOURS[name]) for name in PHASES])
    # The root, so that a few of many are seen.
    strength = np.sqrt(np.clip(shares.sum(axis=0), 0, 1))[:, :, None]
    image = strength * colours[most] + (1 - strength)
    ax.imshow(
        image, extent=(timeline.begin, timeline.end, n - 0.5, -0.5), aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    if EVICTED in present:
        spans = np.flatnonzero(timeline.span_phase == EVICTED)
        spans = spans[thinned(len(spans), 3000)]
        ax.plot(
            timeline.span_start[spans], row[timeline.span_request[spans]], ",",
            color=PHASE_COLOURS["evicted"], label="evictions",
        )  # fmt: skip
    ax.set_ylabel("requests by arrival")


def plot_states(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Plot how many requests are in each phase over time, stacked.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    """
    ax = axes(ax, (9.0, 4.0))
    times = np.unique(np.concatenate([timeline.span_start, timeline.span_end]))
    if len(times) > _STEPS:
        times = np.linspace(timeline.begin, timeline.end, _STEPS)
    counts = timeline.phase_counts(times)
    order = [PREFILL, REFILL, DECODE, *(p for p in range(len(PHASES)) if p not in _RUNNING)]
    shown = [p for p in order if counts[p].any()]
    ax.stackplot(
        times, *(counts[p] for p in shown), labels=[PHASES[p] for p in shown], step="post",
        colors=[PHASE_COLOURS[PHASES[p]] for p in shown], lw=0,
    )  # fmt: skip
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set(xlabel=f"time [{timeline.unit}]", ylabel="requests")
    ax.set_ylim(bottom=0)
    legend(ax, len(PHASES))
    return ax


_RUNNING = (PREFILL, REFILL, DECODE)


def plot_kv(
    timeline: Timeline, ax: Axes | None = None, *, groups: int = 10, worker: int | None = None
) -> Axes:
    """Plot the KV memory held over time against the capacity M, stacked by request.

    With many requests, groups of those that arrived one after another are stacked. With several
    workers there is a line for each of the first 32, unless one is asked for.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    groups : int
    worker : int, optional
    """
    ax = axes(ax, (9.0, 4.0))
    capacity = timeline.instance.kv_capacity
    if worker is None and timeline.workers > 1:
        for k in range(min(timeline.workers, 32)):
            times, kv, _ = timeline.kv_by_group(groups, worker=k)
            ax.step(
                times, kv.sum(axis=0), where="post", color=series_style(k)["color"],
                ls=series_style(k)["linestyle"], lw=1, label=f"worker {k}",
            )  # fmt: skip
    else:
        times, kv, labels = timeline.kv_by_group(groups, worker=worker or 0)
        ax.stackplot(
            times, *kv, labels=[plain(label, 24) for label in labels], step="post", lw=0,
            colors=_shades(len(labels)),
        )  # fmt: skip
        ax.step(times, kv.sum(axis=0), where="post", color=BLACK, lw=0.6)
    ax.axhline(capacity, color=RED, ls="--", lw=1.2, label=f"M = {capacity:,} tokens")
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set_ylim(0, 1.06 * capacity)
    ax.set(xlabel=f"time [{timeline.unit}]", ylabel="KV held [tokens]")
    grouped = timeline.workers == 1 and kv.shape[0] < timeline.instance.n
    legend(ax, 9, title="requests by arrival" if grouped else None, title_fontsize="small")
    return ax


def _shades(count: int) -> list[str]:
    """Return colours for a stack: of single requests, or of groups in order."""
    if count <= SEPARATE:
        return [BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY, BLACK][:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](k / (count - 1))) for k in range(count)]


def plot_batches(timeline: Timeline, ax: Axes | None = None, *, worker: int = 0) -> Axes:
    """Plot how many tokens of prefill, decode and refill each batch processes, stacked.

    With many batches, the mean of those that start in a step of time.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    worker : int
    """
    ax = axes(ax, (9.0, 3.5))
    edges, runs = timeline.batch_bins(_STEPS // 3, worker)
    parts = [
        (timeline.batch_decode, "decode"), (timeline.batch_prefill, "prefill"),
        (timeline.batch_refill, "refill"),
    ]  # fmt: skip
    shown = [(column, name) for column, name in parts if column.any()]
    mean = [[float(column[run].mean()) if len(run) else 0.0 for run in runs] for column, _ in shown]
    ax.stackplot(
        edges, *([*values, *values[-1:]] for values in mean), step="post", lw=0,
        labels=[name for _, name in shown],
        colors=[PHASE_COLOURS[name] for _, name in shown],
    )  # fmt: skip
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set_ylim(bottom=0)
    per = "tokens per batch" if all(len(run) == 1 for run in runs) else "mean tokens per batch"
    ax.set(xlabel=f"time [{timeline.unit}]", ylabel=per)
    legend(ax, 9)
    return ax


def plot_batch_times(timeline: Timeline, ax: Axes | None = None, *, worker: int = 0) -> Axes:
    """Plot how long each batch takes over time.

    With many batches, the mean of those that start in a step of time, and a band from the
    shortest to the longest.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    worker : int
    """
    ax = axes(ax, (9.0, 3.0))
    scale, unit = (1.0, "rounds") if timeline.instance.in_rounds else (1000.0, "ms")
    edges, runs = timeline.batch_bins(_STEPS // 3, worker)
    length = scale * (timeline.batch_end - timeline.batch_start)
    known = [(float(edges[k]), length[run]) for k, run in enumerate(runs) if len(run)]
    known += [(float(edges[-1]), values) for _, values in known[-1:]]
    at = [t for t, _ in known]
    ax.plot(at, [float(v.mean()) for _, v in known], color=BLUE, lw=1, label="mean",
            drawstyle="steps-post")  # fmt: skip
    if any(len(v) > 1 for _, v in known):
        ax.fill_between(
            at, [float(v.min()) for _, v in known], [float(v.max()) for _, v in known],
            color=BLUE, alpha=0.2, lw=0, step="post", label="shortest to longest",
        )  # fmt: skip
        legend(ax, 9)
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set_ylim(bottom=0)
    ax.set(xlabel=f"time [{timeline.unit}]", ylabel=f"batch time [{unit}]")
    return ax
