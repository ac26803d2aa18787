"""Interactive figures as plotly's JSON: requests, KV and batches over time, distributions."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.judge.timeline import PHASES, Timeline
from optsched.show.plot.policies import DISTRIBUTIONS
from optsched.show.plot.style import COLOURS, thinned
from optsched.show.plot.timelines import PHASE_COLOURS

APART = 4000
"""Spans up to which each is a bar of its own."""
_ROWS, _COLUMNS, _STEPS, _POINTS = 150, 360, 400, 400
_DASHES = ("solid", "dash", "dot", "dashdot")


def safe(text: object, limit: int = 60) -> str:
    """Return text for plotly, which reads a little HTML in labels."""
    words = " ".join(str(text).split())
    return escape(words if len(words) <= limit else words[: limit - 1] + "…")


def timeline_figure(found: Timeline) -> dict[str, Any]:
    """Return requests, KV memory and batches of a schedule over one axis of time."""
    few = len(found.span_start) <= APART
    traces = _bars(found) if few else _shares(found)
    traces += _kv(found)
    batches, per = _batches(found)
    traces += batches
    unit = found.unit
    grid = {"showgrid": True, "gridcolor": "#e5e5e5", "zeroline": False}
    capacity = found.instance.kv_capacity
    layout: dict[str, Any] = {
        "height": 900,
        "margin": {"l": 80, "r": 20, "t": 30, "b": 50},
        "barmode": "overlay",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "legend": {"y": 1.0, "font": {"size": 11}},
        "legend2": {"y": 0.48, "font": {"size": 11}, "traceorder": "normal"},
        "legend3": {"y": 0.2, "font": {"size": 11}, "traceorder": "normal"},
        "xaxis": {
            **grid, "title": {"text": f"time [{unit}]"}, "anchor": "y3",
            "range": [found.begin, found.end],
        },
        "yaxis": {
            **grid, "domain": [0.52, 1.0], "title": {"text": "requests by arrival"},
            "range": [found.instance.n - 0.5, -0.5],
        },
        "yaxis2": {
            **grid, "domain": [0.24, 0.48], "title": {"text": "KV held [tokens]"},
            "range": [0, 1.08 * capacity],
        },
        "yaxis3": {
            **grid, "domain": [0.0, 0.2], "title": {"text": per},
            "rangemode": "tozero",
        },
        "shapes": [
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "y0": capacity,
                "y1": capacity, "line": {"color": "#D55E00", "dash": "dash", "width": 1.5},
            }
        ],
        "annotations": [
            {
                "xref": "paper", "x": 1, "xanchor": "right", "yref": "y2", "y": capacity,
                "yanchor": "bottom", "showarrow": False, "text": f"M = {capacity:,} tokens",
                "font": {"size": 11, "color": "#D55E00"},
            }
        ],
    }  # fmt: skip
    if found.instance.n <= 40:
        layout["yaxis"]["tickvals"] = list(range(found.instance.n))
        layout["yaxis"]["ticktext"] = [safe(found.name_of(int(i)), 20) for i in found.by_arrival]
        layout["yaxis"]["title"] = {"text": ""}
        layout["yaxis"]["automargin"] = True  # names may be long
    return {"data": traces, "layout": layout}


def _bars(found: Timeline) -> list[dict[str, Any]]:
    row = np.empty(found.instance.n, dtype=np.int64)
    row[found.by_arrival] = np.arange(found.instance.n)
    traces = []
    for phase, name in enumerate(PHASES):
        mine = np.flatnonzero(found.span_phase == phase)
        if not mine.size:
            continue
        request = found.span_request[mine]
        about = [
            [safe(found.name_of(i)), int(p), int(o), int(t), _number(b)]
            for i, p, o, t, b in zip(
                request.tolist(), found.instance.prompt_tokens[request],
                found.instance.output_tokens[request], found.span_tokens[mine],
                found.span_end[mine], strict=True,
            )
        ]  # fmt: skip
        idle = name in ("waiting", "paused", "evicted")
        tokens = "" if idle else "<br>tokens processed %{customdata[3]}"
        traces.append({
            "type": "bar", "orientation": "h", "name": name, "xaxis": "x", "yaxis": "y",
            "y": row[request].tolist(), "base": _numbers(found.span_start[mine]),
            "x": _numbers(found.span_end[mine] - found.span_start[mine]),
            "width": 0.35 if idle else 0.85, "customdata": about,
            "marker": {"color": PHASE_COLOURS[name], "line": {"width": 0}},
            "hovertemplate": "<b>%{customdata[0]}</b>: " + name + f"<br>%{{base}} to "
            f"%{{customdata[4]}} {found.unit}<br>prompt %{{customdata[1]}}, output "
            f"%{{customdata[2]}} tokens{tokens}<extra></extra>",
        })  # fmt: skip
    return traces


def _shares(found: Timeline) -> list[dict[str, Any]]:
    rows = min(_ROWS, found.instance.n)
    shares = found.phase_shares(rows, _COLUMNS)
    most = shares.argmax(axis=0)
    present = np.clip(shares.sum(axis=0), 0, 0.98)
    # A cell is its phase's number plus the root of the share of the group that is there (a few
    # of many shall be seen); the scale of colours goes from white to the phase's in each unit.
    level = np.round(most + np.sqrt(present), 2)
    shown = [
        [v if there else None for v, there in zip(line, here, strict=True)]
        for line, here in zip(level.tolist(), (present >= 0.005).tolist(), strict=True)
    ]
    steps = len(PHASES)
    scale = [
        [(k + end) / steps, colour]
        for k, name in enumerate(PHASES)
        for end, colour in ((0, "#ffffff"), (1, PHASE_COLOURS[name]))
    ]
    size, width = found.instance.n / rows, (found.end - found.begin) / _COLUMNS
    used = [name for k, name in enumerate(PHASES) if (most[present >= 0.005] == k).any()]
    heat = {
        "type": "heatmap", "name": "", "xaxis": "x", "yaxis": "y", "z": shown,
        "x0": found.begin + width / 2, "dx": width, "y0": size / 2 - 0.5, "dy": size,
        "zmin": 0, "zmax": steps, "colorscale": scale, "showscale": False, "meta": list(PHASES),
        "hovertemplate": f"%{{x:.6g}} {found.unit}, requests about %{{y:.0f}}<br>%{{text}}"
        "<extra></extra>",
    }  # fmt: skip
    keys = [
        {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name,
            "marker": {"color": PHASE_COLOURS[name], "symbol": "square", "size": 10},
            "xaxis": "x", "yaxis": "y", "hoverinfo": "skip",
        }
        for name in used
    ]  # fmt: skip
    return [heat, *keys]


def _kv(found: Timeline) -> list[dict[str, Any]]:
    traces = []
    for worker in range(min(found.workers, 16)):
        times, kv, labels = found.kv_by_group(groups=8, most=_STEPS, worker=worker)
        if found.workers > 1:
            kv, labels = kv.sum(axis=0)[None, :], [f"worker {worker}"]
        for k, (label, column) in enumerate(zip(labels, kv, strict=True)):
            colour = _shade(k, len(labels)) if found.workers == 1 else COLOURS[worker % 8]
            trace: dict[str, Any] = {
                "type": "scatter", "mode": "lines", "name": safe(label, 24), "xaxis": "x",
                "yaxis": "y2", "x": _numbers(times), "y": column.tolist(),
                "line": {"shape": "hv", "width": 0.3, "color": colour},
                "hovertemplate": f"{safe(label, 24)}<br>%{{x:.6g}} {found.unit}: %{{y:,}} tokens"
                "<extra></extra>",
                "legend": "legend2",
            }  # fmt: skip
            if found.workers == 1:
                trace.update(stackgroup="kv", fillcolor=colour)
            else:
                trace["line"]["width"] = 1.2
            traces.append(trace)
    return traces


def _shade(k: int, count: int) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](0.5 if count == 1 else k / (count - 1)))


def _batches(found: Timeline) -> tuple[list[dict[str, Any]], str]:
    """Return the batches' tokens over time, and what one value is."""
    edges, runs = found.batch_bins(_STEPS)
    per = "tokens per batch" if all(len(run) == 1 for run in runs) else "mean tokens per batch"
    traces = []
    for name, column in (
        ("decode", found.batch_decode), ("prefill", found.batch_prefill),
        ("refill", found.batch_refill),
    ):  # fmt: skip
        if not column.any():
            continue
        mean = [float(column[run].mean()) if len(run) else 0.0 for run in runs]
        traces.append({
            "type": "scatter", "mode": "lines", "name": f"{name} tokens", "xaxis": "x",
            "yaxis": "y3", "x": _numbers(edges), "y": _numbers(np.array([*mean, *mean[-1:]])),
            "stackgroup": "batch", "fillcolor": PHASE_COLOURS[name], "legend": "legend3",
            "line": {"shape": "hv", "width": 0.3, "color": PHASE_COLOURS[name]},
            "hovertemplate": f"%{{x:.6g}} {found.unit}: %{{y:.4g}} {name}, {per}<extra></extra>",
        })  # fmt: skip
    return traces, per


def distribution_figure(schedules: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return the distributions of latency, TTFT and TPOT by schedule, side by side."""
    traces = []
    layout: dict[str, Any] = {
        "height": 340, "margin": {"l": 60, "r": 20, "t": 30, "b": 50}, "plot_bgcolor": "white",
        "hovermode": "closest", "legend": {"font": {"size": 11}},
    }  # fmt: skip
    for place, (metric, words) in enumerate(DISTRIBUTIONS.items()):
        axis = "" if place == 0 else str(place + 1)
        per = "/token" if metric == "tpot" else ""
        unit = next(iter(schedules.values())).unit
        scale = 1000.0 if metric == "tpot" and unit == "s" else 1.0
        shown = ("ms" if scale > 1 else unit) + per
        layout[f"xaxis{axis}"] = {
            "domain": [place / 3 + 0.02 * bool(place), (place + 1) / 3 - 0.03],
            "title": {"text": f"{words} [{shown}]"}, "gridcolor": "#e5e5e5", "anchor": f"y{axis}",
            "type": "log" if _wide(metric, schedules) else "linear",
        }  # fmt: skip
        layout[f"yaxis{axis}"] = {
            "range": [0, 1.02], "gridcolor": "#e5e5e5", "anchor": f"x{axis}",
            "title": {"text": "share of requests" if place == 0 else ""},
        }  # fmt: skip
        for k, (label, found) in enumerate(schedules.items()):
            values = np.sort(np.asarray(getattr(found.evaluation, metric), dtype=np.float64))
            values = scale * values[~np.isnan(values)]
            if not values.size:
                continue
            picked = thinned(len(values), _POINTS)
            share = np.append(0.0, (np.array(picked) + 1) / len(values))  # rises from none
            traces.append({
                "type": "scatter", "mode": "lines", "name": safe(label), "xaxis": f"x{axis}",
                "yaxis": f"y{axis}", "y": _numbers(share),
                "x": _numbers(np.append(values[:1], values[picked])), "legendgroup": str(k),
                "showlegend": place == 0,
                "line": {
                    "shape": "hv", "color": COLOURS[k % len(COLOURS)],
                    "dash": _DASHES[k // len(COLOURS) % 4],
                },
                "hovertemplate": f"{safe(label)}: %{{y:.1%}} within %{{x:.4g}} {shown}"
                "<extra></extra>",
            })  # fmt: skip
    return {"data": traces, "layout": layout}


def _wide(metric: str, schedules: Mapping[str, Timeline]) -> bool:
    """Whether a metric's values are too far apart for a linear axis."""
    values = np.concatenate([getattr(s.evaluation, metric) for s in schedules.values()])
    values = values[values > 0]
    return bool(values.size) and values.max() / values.min() > 300


def _number(value: float) -> float:
    return float(f"{value:.7g}")


def _numbers(values: NDArray[np.float64]) -> list[float]:
    return [_number(v) for v in values.tolist()]
