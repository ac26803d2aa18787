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

# So many events are encoded at a time, which is far faster than each by itself.
_CHUNK = 10_000

US_PER_ROUND = 1000.0
"""The microseconds of the trace that stand for a round: a round is shown as a millisecond."""


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a schedule in the Chrome trace event format.

    Requests in order of arrival are threads of the process "requests", with a slice for each phase.
    Each batch is a slice on its worker, which has counters of KV, requests and tokens. Worker w is
    the process w + 2. Times are in microseconds, and a round is shown as a millisecond.
    """
    scale = US_PER_ROUND if timeline.instance.in_rounds else 1e6
    instance = timeline.instance
    yield _meta("process_name", REQUESTS, 0, name="requests")
    yield _meta("process_sort_index", REQUESTS, 0, sort_index=1000)  # below all workers

    # Threads count from 1, since above 0 stands for the process as a whole.
    for place, i in enumerate(timeline.by_arrival.tolist()):
        yield _meta("thread_name", REQUESTS, i + 1, name=timeline.name_of(i))
        yield _meta("thread_sort_index", REQUESTS, i + 1, sort_index=place)

    for w in np.unique(timeline.batch_worker).tolist():
        yield _meta("process_name", w + 2, 0, name=timeline.worker_name(w))
        yield _meta("process_sort_index", w + 2, 0, sort_index=w)
        yield _meta("thread_name", w + 2, 1, name="batches")

    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    spans = ("request", "phase", "start", "end", "tokens", "worker")
    for i, phase, start, end, tokens, worker in _rows(timeline, "span", spans):
        details: dict[str, Any] = {"prompt_tokens": prompt[i], "output_tokens": output[i]}
        if tokens:  # it is in batches
            details = {"tokens": tokens, "worker": worker, **details}

        track, ends = (REQUESTS, i + 1), (scale * start, scale * end)
        yield _slice("request", PHASES[phase], track, ends, details)

    yield from _batch_events(timeline, scale)


def _batch_events(timeline: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    """Yield the events of workers. `scale`: microseconds of the trace for a unit of time."""
    columns = ("worker", "start", "end", "requests", "evictions", "kv", "kv_left")
    token_columns = ("prefill", "decode", "refill")
    kv_kinds = () if timeline.batch_shared is None else ("shared", "retained")
    last: dict[int, tuple[float, int]] = {}  # by worker: the end of its last batch, and the KV then
    for j, row in enumerate(_rows(timeline, "batch", (*columns, *token_columns, *kv_kinds))):
        worker, start, end, requests, evictions, kv, kv_left, *counts = row
        tokens, kv_by_kind = counts[: len(token_columns)], counts[len(token_columns) :]
        process = worker + 2  # in which the batches are thread 1
        # Idle since the previous batch, it holds what that left, and no request and no token.
        if worker in last and last[worker][0] < start:
            yield from _counters(process, scale * last[worker][0], last[worker][1], 0, 0)

        named = zip((f"{name}_tokens" for name in token_columns), tokens, strict=True)
        details = {"requests": requests, **dict(named), "evictions": evictions, "kv_tokens": kv}
        yield _slice("batch", f"batch {j}", (process, 1), (scale * start, scale * end), details)
        yield from _counters(process, scale * start, kv, requests, sum(tokens))
        for kind, value in zip(kv_kinds, kv_by_kind, strict=True):
            yield _counter(process, scale * start, f"KV {kind} [tokens]", value)

        last[worker] = (end, kv_left)

    for worker, (end, kv_left) in last.items():
        yield from _counters(worker + 2, scale * end, kv_left, 0, 0)


def _rows(timeline: Timeline, kind: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Return the rows of spans or batches, as plain numbers."""
    return zip(*(getattr(timeline, f"{kind}_{name}").tolist() for name in columns), strict=True)


def _counters(process: int, time: float, *values: int) -> Iterator[dict[str, Any]]:
    """Yield what a worker holds and processes from a time on: KV, requests and tokens."""
    names = ("KV held [tokens]", "batch size [requests]", "batch size [tokens]")
    for name, value in zip(names, values, strict=True):
        yield _counter(process, time, name, value)


def _counter(process: int, time: float, name: str, value: int) -> dict[str, Any]:
    """Return the event of one counter's value."""
    return {"ph": "C", "name": name, "pid": process, "ts": round(time, 3), "args": {"value": value}}


def _slice(
    kind: str, name: str, track: tuple[int, int], ends: tuple[float, float], details: dict[str, Any]
) -> dict[str, Any]:
    """Return the event of a slice. `track`: its process and thread. `ends`: in microseconds."""
    start, end = (round(time, 3) for time in ends)  # so that slices that touch still touch
    head = {"ph": "X", "cat": kind, "name": name, "pid": track[0], "tid": track[1]}
    return {**head, "ts": start, "dur": round(end - start, 3), "args": details}


def _meta(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    """Return an event that says something of a process or a thread: its name, or its place."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


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
    is_merged = len(timeline.span_start) > MAX_SLICES
    if is_merged:
        timeline = timeline.without_pauses()

    facts = {
        "optsched": __version__,
        "instance": instance.name,
        "instance_sha256": instance.sha256,
        "time_unit": instance.time_unit,
        "scale": "1 round is shown as 1 ms" if instance.in_rounds else "seconds as they are",
        "kv_capacity": timeline.evaluation.kv_capacity,
        "pauses": "part of the phase around them" if is_merged else "slices of their own",
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    events = trace_events(timeline)
    count, parts = 0, []

    while chunk := list(islice(events, _CHUNK)):
        parts.append(encode(chunk)[1:-1])  # without the brackets of this part
        count += len(chunk)

    head = f'{{"displayTimeUnit":"ms","otherData":{encode(facts)},"traceEvents":[\n'
    write_bytes((head + ",\n".join(parts) + "\n]}\n").encode(), path)
    return count
