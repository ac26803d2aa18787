"""Figures of a schedule over time: its requests, its KV memory and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.judge.spans import DECODE, PHASES, PREFILL, REFILL
from optsched.judge.timeline import SEPARATE, Timeline
from optsched.show.plot import style
from optsched.show.plot.style import BLACK, BLUE, GREY, RED, axes, legend, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASE_COLOURS = dict(
    zip(PHASES, (GREY, BLUE, style.SKY, style.YELLOW, RED, style.PURPLE), strict=True)
)
"""A colour for each phase: waiting, prefill, decode, paused, evicted and refill."""

IDLE = ("waiting", "paused", "evicted")
"""The phases in which a request is in no batch. They are drawn thinner."""

_DISTINCT = (BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.YELLOW, GREY, BLACK)
ROWS_APART = 100
"""Max number of requests, or of sessions, that `plot_gantt` draws, each in a row of its own."""
# Max number of requests in the rows of sessions.
_MAX_CALLS = 2000
# Max number of rows with names beside them, and of vertical lines at the ends of batches.
_MAX_NAMES, _MAX_LINES = 40, 60
# Max number of steps of time in a stack. Figures of batches have a third of it.
_STEPS = 1500


def _over_time(timeline: Timeline, ax: Axes, what: str) -> Axes:
    """Label axes that show a quantity from 0 upwards over the time of a schedule."""
    ax.set_ylim(bottom=0)
    ax.set_ylabel(what)
    return _time_axis(timeline, ax)


def _time_axis(timeline: Timeline, ax: Axes) -> Axes:
    """Let the horizontal axis be the time of a schedule. There are no parts of rounds."""
    ax.set_xlim(timeline.begin, timeline.end)
    ax.set_xlabel(f"time [{timeline.unit}]")
    if timeline.instance.in_rounds:
        ax.locator_params(axis="x", integer=True)

    return ax


def rows_of(timeline: Timeline) -> NDArray[np.int64] | None:
    """Return the row of each request in a Gantt chart; None if there would be too many.

    Parameters
    ----------
    timeline : Timeline
    """
    # Without sessions a request's row is its rank by arrival.
    row, sessions = np.argsort(timeline.by_arrival), timeline.instance.sessions
    if sessions is not None and len(row) <= _MAX_CALLS:
        # Sessions in the order of their first calls: the rank of each, for all its calls.
        row = np.argsort(np.argsort(sessions.over(row, np.minimum)))[sessions.session]

    return row if row.max() < ROWS_APART else None


def plot_gantt(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw the phases of every request over time, in a row for each request by arrival.

    Calls of a session share the row of its first. However short a phase is, its box can be seen.
    Moves of KV between pools are black lines.

    More than `ROWS_APART` rows would be a wedge of thin lines; `plot_states` draws these.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    """
    from matplotlib.patches import Patch

    row = rows_of(timeline)
    if row is None:
        return plot_states(timeline, ax)

    n = int(row.max()) + 1
    ax = axes(ax, (9.0, min(7.0, 1.8 + 0.18 * n)))
    present = [p for p in range(len(PHASES)) if (timeline.span_phase == p).any()]
    _draw_boxes(timeline, row, present, ax)
    _name_rows(timeline, row, ax)
    patches = [Patch(color=PHASE_COLOURS[PHASES[p]], label=PHASES[p]) for p in present]
    moves, first = timeline.evaluation.moves, timeline.instance.first_arrival
    if moves is not None and len(moves.request):
        ends = moves.start + first, moves.end + first
        ax.hlines(row[moves.request], *ends, color=BLACK, lw=2, zorder=3, gid="moves")
        patches.append(Patch(color=BLACK, label="KV moves"))

    legend(ax, 9, handles=patches)  # beside the axes, as if it had 9 entries: not upon the boxes
    ax.set_ylim(n - 0.4, -0.6)  # the first row lies on top

    return _time_axis(timeline, ax)


def _draw_boxes(timeline: Timeline, row: NDArray[np.int64], present: list[int], ax: Axes) -> None:
    """Draw a box for each span. `row`: of each request. `present`: the phases that there are."""
    from matplotlib.collections import PolyCollection

    for phase in present:
        name, spans = PHASES[phase], timeline.span_phase == phase
        a, b = timeline.span_start[spans], timeline.span_end[spans]
        y = row[timeline.span_request[spans]].astype(float)
        half = 0.14 if name in IDLE else 0.4
        corners = np.stack([a, y - half, a, y + half, b, y + half, b, y - half], axis=1)
        boxes = list(corners.reshape(-1, 4, 2))
        # Outlines make each box at least so wide. Of two that are hardly wider the prefill lies on
        # top. There are two widths, since of one box and one width SVG would have no path of its
        # own.
        look: dict[str, Any] = {"color": PHASE_COLOURS[name], "linewidths": (1.0, 1.0)}
        look["zorder"] = 2.5 if phase in (PREFILL, REFILL) else 2.0
        ax.add_collection(PolyCollection(boxes, **look, label=name, gid=name))


def _name_rows(timeline: Timeline, row: NDArray[np.int64], ax: Axes) -> None:
    """Write the names of a few rows beside them, and draw lines at the ends of a few batches."""
    n = int(row.max()) + 1
    edges = np.unique(np.concatenate([timeline.batch_start, timeline.batch_end]))
    if len(edges) <= _MAX_LINES and n <= _MAX_NAMES:
        ax.vlines(edges, -0.5, n - 0.5, color=BLACK, lw=0.3, alpha=0.5, zorder=1)
    if n <= _MAX_NAMES:
        by_arrival = timeline.by_arrival
        # The request of each row that arrives first.
        first = by_arrival[np.unique(row[by_arrival], return_index=True)[1]]
        names = [plain(timeline.name_of(int(i)), 24) for i in first]
        ax.set_yticks(range(n), names, fontsize="small")

    if n > _MAX_NAMES or n < timeline.instance.n:
        ax.set_ylabel(f"{'requests' if n == timeline.instance.n else 'sessions'} by arrival")


def plot_states(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """Draw the number of requests in each phase over time, stacked.

    Of a long schedule it is the mean over each step of time, so that no phase is too short for it.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    """
    ax = axes(ax, (9.0, 4.0))
    times = np.unique(np.concatenate([timeline.span_start, timeline.span_end]))
    if len(times) > _STEPS:
        times = np.linspace(timeline.begin, timeline.end, _STEPS)
        # A mean for each step between two times; the last one stands for the last time, too.
        counts: NDArray[Any] = timeline.phase_means(times)[:, [*range(_STEPS - 1), -1]]
    else:
        counts = timeline.phase_counts(times)

    # What is in batches lies at the bottom, and then the others in their usual order.
    order = dict.fromkeys([PREFILL, REFILL, DECODE, *range(len(PHASES))])
    _stack(ax, times, {PHASES[p]: counts[p] for p in order if counts[p].any()})
    legend(ax, len(PHASES))

    return _over_time(timeline, ax, "requests")


def plot_kv(
    timeline: Timeline, ax: Axes | None = None, *, groups: int = 10, worker: int | None = None
) -> Axes:
    """Draw the KV memory held over time in tokens, stacked by request, and the capacity M.

    On machines that differ there is a line for each capacity. If requests share prefixes, what is
    private, shared and retained for later claims is stacked.

    With many requests, groups of requests that arrived one after another are stacked. With several
    workers there is a line for each of the first 32, unless one worker is asked for.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    groups : int
        Number of groups, where there are too many requests to stack each.
    worker : int, optional
        The worker to draw, counted from 0.
    """
    ax = axes(ax, (9.0, 4.0))
    # There is a machine for each worker, or one that all have.
    machines = timeline.evaluation.machines
    if worker is not None and len(machines) > 1:
        machines = machines[worker : worker + 1]

    capacities = sorted({machine.capacity for machine in machines})
    is_grouped = False
    if worker is None and timeline.workers > 1:
        for w in range(min(timeline.workers, 32)):  # of so many, lines can be told apart
            times, kv = _kv_of_worker(timeline, groups, w)
            look = {**style.line_style(w), "lw": 1, "where": "post"}
            ax.step(times, kv, label=timeline.worker_name(w), **look)
    elif timeline.batch_shared is not None:  # requests share prefixes
        times, kinds = timeline.kv_by_kind(_STEPS, worker or 0)
        colours = [BLUE, style.GREEN, GREY]
        ax.stackplot(times, *kinds.values(), labels=kinds, step="post", lw=0, colors=colours)
    else:
        times, kv, labels = timeline.kv_by_group(groups, _STEPS, worker or 0)
        words = [plain(label, 24) for label in labels]
        ax.stackplot(times, *kv, labels=words, step="post", lw=0, colors=_shades(len(labels)))
        ax.step(times, kv.sum(axis=0), where="post", color=BLACK, lw=0.6)
        is_grouped = timeline.workers == 1 and len(labels) < timeline.instance.n

    for capacity in capacities:
        ax.axhline(capacity, color=RED, ls="--", lw=1.2, label=f"M = {capacity:,} tokens")

    # Beside the axes, as if it had 9 entries.
    legend(ax, 9, title="requests by arrival" if is_grouped else None, title_fontsize="small")
    _over_time(timeline, ax, "KV held [tokens]").set_ylim(0, 1.06 * capacities[-1])
    return ax


def _kv_of_worker(timeline: Timeline, groups: int, worker: int) -> tuple[Any, Any]:
    """Return moments and the KV of a worker from each on; what requests share counts once.

    Where KV moves between workers it is the most of the batches that start in each step of time.
    """
    if timeline.evaluation.pools is not None:
        # `runs`: the batches that start in each step of time.
        edges, runs = timeline.batch_bins(_STEPS, worker)
        # There is one edge more than steps, and at the end nothing is held. A worker without
        # batches has no edges at all.
        largest = [int(timeline.batch_kv[run].max(initial=0)) for run in runs]
        return edges, np.append(largest, 0)[: len(edges)]
    if timeline.batch_shared is not None:
        times, kinds = timeline.kv_by_kind(_STEPS, worker)
        return times, sum(kinds.values())

    times, kv, _ = timeline.kv_by_group(groups, _STEPS, worker)
    return times, kv.sum(axis=0)


def _shades(count: int) -> list[str]:
    """Return the colours of a stack: distinct ones for few requests, shades for ordered groups."""
    if count <= SEPARATE:
        return list(_DISTINCT[:count])

    return [style.shade(k, count) for k in range(count)]


def plot_batches(timeline: Timeline, ax: Axes | None = None, *, worker: int = 0) -> Axes:
    """Draw the tokens of prefill, decode and refill that each batch processes, stacked.

    With many batches, each step of time shows the mean over the batches that start in it.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    worker : int
        The worker to draw, counted from 0.
    """
    ax = axes(ax, (9.0, 3.5))
    # `runs`: the batches that start in each step. `edges`: the times between steps, one more.
    edges, runs = timeline.batch_bins(_STEPS // 3, worker)
    means = {}
    for name in ("decode", "prefill", "refill"):
        column = getattr(timeline, f"batch_{name}")
        if column.any():
            mean = [float(column[run].mean()) if len(run) else 0.0 for run in runs]
            means[name] = [*mean, *mean[-1:]]  # at the last edge, as before it

    _stack(ax, edges, means)
    legend(ax, 9)  # beside the axes, as if it had 9 entries
    single = all(len(run) == 1 for run in runs)
    return _over_time(timeline, ax, "tokens per batch" if single else "mean tokens per batch")


def _stack(ax: Axes, times: NDArray[np.float64], layers: Mapping[str, ArrayLike]) -> None:
    """Draw a layer for each phase upon one another."""
    colours = [PHASE_COLOURS[name] for name in layers]
    ax.stackplot(times, *layers.values(), labels=list(layers), colors=colours, step="post", lw=0)


def plot_batch_times(timeline: Timeline, ax: Axes | None = None, *, worker: int = 0) -> Axes:
    """Draw the time of each batch, in milliseconds or rounds, over the time of the schedule.

    With many batches, each step of time shows the mean over the batches that start in it, and a
    band from the shortest to the longest.

    Parameters
    ----------
    timeline : Timeline
    ax : Axes, optional
    worker : int
        The worker to draw, counted from 0.
    """
    ax = axes(ax, (9.0, 3.0))
    scale, unit = (1.0, "rounds") if timeline.instance.in_rounds else (1000.0, "ms")
    edges, runs = timeline.batch_bins(_STEPS // 3, worker)
    length = scale * (timeline.batch_end - timeline.batch_start)
    # Steps with the lengths of the batches that start in them, and the end of the last step.
    steps = [(float(edges[k]), length[run]) for k, run in enumerate(runs) if len(run)]
    steps += [(float(edges[-1]), lengths) for _, lengths in steps[-1:]]
    times, means = [t for t, _ in steps], [float(lengths.mean()) for _, lengths in steps]
    ax.step(times, means, where="post", color=BLUE, lw=1, label="mean")

    if any(len(lengths) > 1 for _, lengths in steps):
        low, high = zip(*((lengths.min(), lengths.max()) for _, lengths in steps), strict=True)
        look: dict[str, Any] = {"color": BLUE, "alpha": 0.2, "lw": 0, "step": "post"}
        ax.fill_between(times, low, high, label="shortest to longest", **look)
        legend(ax, 9)  # beside the axes, as if it had 9 entries

    return _over_time(timeline, ax, f"batch time [{unit}]")
