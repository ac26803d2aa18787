"""Interactive figures as JSON for plotly: requests, KV and batches over time, distributions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.judge.timeline import PHASES, Timeline
from optsched.show.data import (
    DISTRIBUTIONS,
    IDLE,
    CapacityCurves,
    batch_tokens,
    cumulative,
    distribution,
    kv_by_worker,
    rows_by_arrival,
    wide,
)
from optsched.show.plot.style import COLOURS, RED, shade
from optsched.show.plot.timelines import PHASE_COLOURS

APART = 4000
"""Max number of spans for which each is drawn as a bar of its own."""
_ROWS, _COLUMNS, _STEPS, _POINTS = 150, 360, 400, 400
_DASHES = ("solid", "dash", "dot", "dashdot")
_GRID = "#e5e5e5"
Floats = NDArray[np.float64]


def safe(text: object, limit: int = 60) -> str:
    """Return a text with its HTML escaped, since plotly reads some HTML in labels."""
    words = " ".join(str(text).split())
    return escape(words if len(words) <= limit else words[: limit - 1] + "…")


def timeline_figure(found: Timeline) -> dict[str, Any]:
    """Return the figure of a schedule: requests, KV memory and batches over one axis of time."""
    batches, per = _batches(found)
    traces = _bars(found) if len(found.span_start) <= APART else _shares(found)
    traces += _kv(found) + batches
    capacity = found.instance.kv_capacity
    grid = {"showgrid": True, "gridcolor": _GRID, "zeroline": False}
    below = {"font": {"size": 11}, "traceorder": "normal"}
    at_capacity = {"yref": "y2", "xref": "paper"}
    layout: dict[str, Any] = {
        "height": 900,
        "margin": {"l": 80, "r": 20, "t": 30, "b": 50},
        "barmode": "overlay",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "legend": {"y": 1.0, "font": {"size": 11}},
        "legend2": {"y": 0.48, **below},
        "legend3": {"y": 0.2, **below},
        "xaxis": {
            **grid, "title": {"text": f"time [{found.unit}]"}, "anchor": "y3",
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
            **grid, "domain": [0.0, 0.2], "title": {"text": per}, "rangemode": "tozero",
        },
        "shapes": [{
            **at_capacity, "type": "line", "x0": 0, "x1": 1, "y0": capacity, "y1": capacity,
            "line": {"color": RED, "dash": "dash", "width": 1.5},
        }],
        "annotations": [{
            **at_capacity, "x": 1, "xanchor": "right", "y": capacity, "yanchor": "bottom",
            "showarrow": False, "text": f"M = {capacity:,} tokens",
            "font": {"size": 11, "color": RED},
        }],
    }  # fmt: skip

    if found.instance.n <= 40:
        layout["yaxis"].update(
            tickvals=list(range(found.instance.n)),
            ticktext=[safe(found.name_of(int(i)), 20) for i in found.by_arrival],
            title={"text": ""},
            automargin=True,  # names may be long
        )

    return {"data": traces, "layout": layout}


def _bars(found: Timeline) -> list[dict[str, Any]]:
    instance, row = found.instance, rows_by_arrival(found)
    traces = []
    for phase, name in enumerate(PHASES):
        mine = np.flatnonzero(found.span_phase == phase)
        if not mine.size:
            continue

        request, start, end = found.span_request[mine], found.span_start[mine], found.span_end[mine]
        columns = (instance.prompt_tokens[request], instance.output_tokens[request],
                   found.span_tokens[mine])  # fmt: skip
        about = [
            [safe(found.name_of(i)), *counts, until]
            for i, until, *counts in zip(
                request.tolist(), _numbers(end), *(c.tolist() for c in columns), strict=True
            )
        ]
        tokens = "" if name in IDLE else "<br>tokens processed %{customdata[3]}"
        traces.append({
            "type": "bar", "orientation": "h", "name": name, "xaxis": "x", "yaxis": "y",
            "y": row[request].tolist(), "base": _numbers(start), "x": _numbers(end - start),
            "width": 0.35 if name in IDLE else 0.85, "customdata": about,
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
    # A cell's value is the number of its phase plus the root of the share of the group that is
    # present. The root makes a few requests of many visible. In each unit the colours go from
    # white to that of the phase.
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


def _line(axis: str, name: str, x: Floats, y: list[Any], **more: Any) -> dict[str, Any]:
    """Return a trace drawn as steps, on an axis below the requests."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "xaxis": "x", "yaxis": f"y{axis}",
        "legend": f"legend{axis}", "x": _numbers(x), "y": y, **more,
    }  # fmt: skip


def _kv(found: Timeline) -> list[dict[str, Any]]:
    if found.workers > 1:
        layers = kv_by_worker(found, 16, 8, _STEPS)
        colours, width = [*COLOURS, *COLOURS], 1.2
    else:
        times, kv, labels = found.kv_by_group(groups=8, most=_STEPS)
        layers = [(label, times, held) for label, held in zip(labels, kv, strict=True)]
        colours, width = [shade(k, len(labels)) for k in range(len(labels))], 0.3

    traces = []
    for (label, times, held), colour in zip(layers, colours, strict=False):
        name = safe(label, 24)
        stacked = {"stackgroup": "kv", "fillcolor": colour} if found.workers == 1 else {}
        traces.append(_line(
            "2", name, times, held.tolist(), **stacked,
            line={"shape": "hv", "width": width, "color": colour},
            hovertemplate=f"{name}<br>%{{x:.6g}} {found.unit}: %{{y:,}} tokens<extra></extra>",
        ))  # fmt: skip

    return traces


def _batches(found: Timeline) -> tuple[list[dict[str, Any]], str]:
    """Return the traces of the batches' tokens over time, and words for their values."""
    edges, means, per = batch_tokens(found, _STEPS)
    traces = [
        _line(
            "3", f"{name} tokens", edges, _numbers(mean), stackgroup="batch",
            fillcolor=PHASE_COLOURS[name],
            line={"shape": "hv", "width": 0.3, "color": PHASE_COLOURS[name]},
            hovertemplate=f"%{{x:.6g}} {found.unit}: %{{y:.4g}} {name}, {per}<extra></extra>",
        )
        for name, mean in means.items()
    ]  # fmt: skip
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
        columns = [distribution(found.evaluation, metric) for found in schedules.values()]
        unit = columns[0][1]
        layout[f"xaxis{axis}"] = {
            "domain": [place / 3 + 0.02 * bool(place), (place + 1) / 3 - 0.03],
            "title": {"text": f"{words} [{unit}]"}, "gridcolor": _GRID, "anchor": f"y{axis}",
            "type": "log" if wide(values for values, _ in columns) else "linear",
        }  # fmt: skip
        layout[f"yaxis{axis}"] = {
            "range": [0, 1.02], "gridcolor": _GRID, "anchor": f"x{axis}",
            "title": {"text": "share of requests" if place == 0 else ""},
        }  # fmt: skip

        for k, (label, (values, _)) in enumerate(zip(schedules, columns, strict=True)):
            if not values.size:
                continue

            x, share = cumulative(values, _POINTS)
            name, colour = safe(label), COLOURS[k % len(COLOURS)]
            traces.append({
                "type": "scatter", "mode": "lines", "name": name, "xaxis": f"x{axis}",
                "yaxis": f"y{axis}", "y": _numbers(share), "x": _numbers(x),
                "legendgroup": str(k), "showlegend": place == 0,
                "line": {"shape": "hv", "color": colour, "dash": _DASHES[k // len(COLOURS) % 4]},
                "hovertemplate": f"{name}: %{{y:.1%}} within %{{x:.4g}} {unit}<extra></extra>",
            })  # fmt: skip

    return {"data": traces, "layout": layout}


def capacity_figure(found: CapacityCurves) -> dict[str, Any]:
    """Return attainment against the rate, or the number of workers, with what is impossible."""
    traces = []
    if found.bound:
        at, share = (_numbers(column) for column in zip(*found.bound, strict=True))
        top = {
            "type": "scatter",
            "x": at,
            "showlegend": False,
            "hoverinfo": "skip",
            "mode": "lines",
        }
        traces += [
            {**top, "y": [1.05] * len(at), "line": {"width": 0}},
            {**top, "y": share, "name": "proved impossible", "showlegend": True, "fill": "tonexty",
             "fillcolor": "rgba(213, 94, 0, 0.15)",
             "line": {"color": RED, "width": 1.2, "shape": "hv" if found.rates else "vh"},
             "hoverinfo": "x+y+name"},
        ]  # fmt: skip

    for k, (policy, points) in enumerate(found.policies.items()):
        if points:
            at, share = (_numbers(column) for column in zip(*points, strict=True))
            name, dash = safe(policy), _DASHES[k // len(COLOURS) % 4]
            traces.append({
                "type": "scatter", "mode": "lines+markers", "name": name, "x": at, "y": share,
                "line": {"color": COLOURS[k % len(COLOURS)], "dash": dash}, "marker": {"size": 5},
                "hovertemplate": f"{name}: %{{y:.2%}} at {found.what} %{{x:.4g}}<extra></extra>",
            })  # fmt: skip

    line = {"type": "line", "line": {"color": "#222222", "dash": "dot", "width": 1}}
    shapes = [{**line, "xref": "paper", "x0": 0, "x1": 1, "y0": found.attainment,
               "y1": found.attainment}]  # fmt: skip
    if found.impossible is not None:
        here = found.impossible
        shapes.append({**line, "yref": "paper", "y0": 0, "y1": 1, "x0": here, "x1": here})

    grid = {"gridcolor": _GRID, "zeroline": False}
    layout = {
        "height": 420, "margin": {"l": 60, "r": 20, "t": 30, "b": 50}, "plot_bgcolor": "white",
        "hovermode": "closest", "shapes": shapes,
        "xaxis": {**grid, "title": {"text": found.axis}},
        "yaxis": {**grid, "title": {"text": "share of requests within SLOs"}, "range": [0, 1.05]},
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _numbers(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
