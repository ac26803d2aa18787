"""Schedules as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from optsched.files.outputs import write_bytes
from optsched.judge.timeline import PHASES, Timeline
from optsched.problem.version import __version__

REQUESTS = 1
"""The process number of the requests, each of which is a thread. Worker k is process k + 2."""

MAX_SLICES = 300_000
"""Max number of requests' spans for which `write_trace` shows pauses as slices of their own."""

_CHUNK = 10_000

US_PER_ROUND = 1000.0
"""The microseconds of the trace that stand for a round: a round is shown as a millisecond."""


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a schedule in the Chrome trace event format.

    Requests in order of arrival are threads of the process "requests", with a slice for each phase.
    Each batch is a slice on its worker, which has counters of KV, requests and tokens. Times are in
    microseconds, and a round is shown as a millisecond.
    """
    scale = US_PER_ROUND if timeline.instance.in_rounds else 1e6
    instance = timeline.instance
    yield _name("process_name", REQUESTS, 0, "requests")
    yield {**_meta("process_sort_index", REQUESTS, 0), "args": {"sort_index": 1000}}

    for place, i in enumerate(timeline.by_arrival.tolist()):
        yield _name("thread_name", REQUESTS, i + 1, timeline.name_of(i))
        yield {**_meta("thread_sort_index", REQUESTS, i + 1), "args": {"sort_index": place}}

    for k in np.unique(timeline.batch_worker).tolist():
        yield _name("process_name", k + 2, 0, timeline.worker_name(k))
        yield {**_meta("process_sort_index", k + 2, 0), "args": {"sort_index": k}}
        yield _name("thread_name", k + 2, 1, "batches")

    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    spans = ("request", "phase", "start", "end", "tokens", "worker")
    for i, phase, start, end, tokens, worker in _rows(timeline, "span", spans):
        about: dict[str, Any] = {"prompt_tokens": prompt[i], "output_tokens": output[i]}
        if tokens:
            about = {"tokens": tokens, "worker": worker, **about}

        yield _slice(
            "request", PHASES[phase], (REQUESTS, i + 1), (scale * start, scale * end), about
        )

    yield from _batches(timeline, scale)


def _batches(timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    tokens = ("prefill", "decode", "refill")
    columns = ("worker", "start", "end", "requests", "evictions", "kv", "kv_left", *tokens)
    kinds = () if timeline.batch_shared is None else ("shared", "retained")
    last: dict[int, tuple[float, int]] = {}
    for j, row in enumerate(_rows(timeline, "batch", (*columns, *kinds))):
        worker, start, end, requests, evictions, kv, left, *rest = row
        processed, by_kind = rest[: len(tokens)], rest[len(tokens) :]
        pid = worker + 2
        if worker in last and last[worker][0] < start:  # idle since the previous batch
            yield from _counters(pid, scale * last[worker][0], last[worker][1], 0, 0)

        counts = zip((f"{name}_tokens" for name in tokens), processed, strict=True)
        about = {"requests": requests, **dict(counts), "evictions": evictions, "kv_tokens": kv}
        yield _slice("batch", f"batch {j}", (pid, 1), (scale * start, scale * end), about)
        yield from _counters(pid, scale * start, kv, requests, sum(processed))
        for kind, value in zip(kinds, by_kind, strict=True):
            yield _counter(pid, scale * start, f"KV {kind} [tokens]", value)

        last[worker] = (end, left)

    for worker, (end, left) in last.items():
        yield from _counters(worker + 2, scale * end, left, 0, 0)


def _rows(timeline: Timeline, kind: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Return the rows of spans or batches, as plain numbers."""
    return zip(*(getattr(timeline, f"{kind}_{name}").tolist() for name in columns), strict=True)


def _counters(pid: int, at: float, *values: int) -> Iterator[dict[str, Any]]:
    names = ("KV held [tokens]", "batch size [requests]", "batch size [tokens]")
    for name, value in zip(names, values, strict=True):
        yield _counter(pid, at, name, value)


def _counter(pid: int, at: float, name: str, value: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "ts": round(at, 3), "args": {"value": value}}


def _slice(
    category: str, name: str, track: tuple[int, int], at: tuple[float, float], about: dict[str, Any]
) -> dict[str, Any]:
    begin, end = (round(time, 3) for time in at)  # so that slices that touch still touch
    kind = {"ph": "X", "cat": category, "name": name, "pid": track[0], "tid": track[1]}
    return {**kind, "ts": begin, "dur": round(end - begin, 3), "args": about}


def _meta(kind: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid}


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {**_meta(kind, pid, tid), "args": {"name": name}}


def write_trace(timeline: Timeline, path: str | Path) -> int:
    """Write a schedule as a trace file.

    With more than `MAX_SLICES` spans, pauses become part of the phase around them.

    Parameters
    ----------
    timeline : Timeline
    path : str or Path
        The file. It is compressed if its name ends in ``.gz``.

    Returns
    -------
    int
        Number of events.
    """
    instance = timeline.instance
    merged = len(timeline.span_start) > MAX_SLICES
    if merged:
        timeline = timeline.without_pauses()

    about = {
        "optsched": __version__,
        "instance": instance.name,
        "instance_sha256": instance.sha256,
        "time_unit": instance.time_unit,
        "scale": "1 round is shown as 1 ms" if instance.in_rounds else "seconds as they are",
        "kv_capacity": timeline.evaluation.kv_capacity,
        "pauses": "part of the phase around them" if merged else "slices of their own",
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    events = trace_events(timeline)
    count, parts = 0, []

    while chunk := list(islice(events, _CHUNK)):  # encoding many events at once is far faster
        parts.append(encode(chunk)[1:-1])
        count += len(chunk)

    head = f'{{"displayTimeUnit":"ms","otherData":{encode(about)},"traceEvents":[\n'
    write_bytes((head + ",\n".join(parts) + "\n]}\n").encode(), path)
    return count
