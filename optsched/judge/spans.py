"""The phases of every request, batch by batch, compiled by numba.

The loops check nothing, since `optsched.evaluate` has accepted the schedule. The tests compare
them with a twin that uses dictionaries and shares no code. Import this module lazily, since it
loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.judge.life import (
    Floats,
    Ints,
    advance,
    evict,
    new_requests,
    record,
)
from optsched.judge.memory import MEMORY, free, take
from optsched.judge.replay import Columns, Limits
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

WAITING = 0
PREFILL = 1
DECODE = 2
PAUSED = 3
EVICTED = 4
REFILL = 5

_NONE = -1

SPAN = record(
    ("request", np.int64),
    ("phase", np.int64),
    ("start", np.float64),
    ("end", np.float64),
    ("tokens", np.int64),
    ("worker", np.int64),  # -1: none
)

BATCH = record(
    ("prefill", np.int64),  # tokens processed, by phase
    ("decode", np.int64),
    ("refill", np.int64),
    ("evictions", np.int64),  # just before it
    ("kv", np.int64),  # KV tokens that its worker holds during it
    ("kv_left", np.int64),  # and once finished requests have gone
)

_MEMORY = record(*MEMORY)

_FIELDS = (
    ("lost", np.bool_),  # whether it has been evicted
    ("free_at", np.float64),  # end of the last thing that happened to it
    ("phase", np.int64),  # phase of its open span, or none
    ("since", np.float64),  # start of its open span
    ("tokens", np.int64),  # tokens processed in its open span
)
"""Fields of a request's record that `walk` adds to those of `optsched.judge.life.LIFE`."""


def requests_of(instance: Instance) -> Any:
    """Return the requests as they are before the first batch, for `walk`."""
    requests = new_requests(instance.prompt_tokens, instance.output_tokens, _FIELDS)
    requests["free_at"] = instance.release
    requests["phase"] = _NONE
    return requests


def grouped_requests(instance: Instance, group: Ints) -> Any:
    """Return the requests as they are before the first batch, with their groups, for `stack`."""
    requests = new_requests(instance.prompt_tokens, instance.output_tokens, (("group", np.int64),))
    requests["group"] = group
    return requests


@njit
def _with_room(spans: Any, needed: int) -> Any:
    if needed <= spans.shape[0]:
        return spans

    wider = np.zeros(2 * spans.shape[0], SPAN)
    wider[: spans.shape[0]] = spans
    return wider


@njit
def _write(
    span: Any, i: int, phase: int, start: float, end: float, tokens: int, worker: int
) -> None:
    span.request, span.phase, span.start = i, phase, start
    span.end, span.tokens, span.worker = end, tokens, worker


@njit
def _close(spans: Any, used: int, r: Any, i: int, w: int) -> int:
    """Write the open span of a request, if it has one, and return the number of spans."""
    if r.phase == _NONE:
        return used

    _write(spans[used], i, r.phase, r.since, r.free_at, r.tokens, w)
    r.phase = _NONE
    return used + 1


@njit
def _evicted(spans: Any, used: int, r: Any, i: int, w: int, t: float) -> int:
    """Write the spans of request i up to its eviction at t, and return the number of spans."""
    used = _close(spans, used, r, i, w)
    if t > r.free_at:
        _write(spans[used], i, PAUSED, r.free_at, t, 0, w)
        used += 1
        r.free_at = t

    return used


@njit
def _changed(spans: Any, used: int, r: Any, i: int, w: int, t: float, phase: int) -> int:
    """Write the spans of request i up to its new phase at t, and return the number of spans."""
    used = _close(spans, used, r, i, w)
    if t > r.free_at:
        away = PAUSED if r.cached > 0 else EVICTED if r.lost else WAITING
        _write(spans[used], i, away, r.free_at, t, 0, w if away == PAUSED else -1)
        used += 1

    r.phase, r.since, r.tokens = phase, t, 0
    return used


@njit
def walk(requests: Any, columns: Columns, end: Floats, limits: Limits, workers: int) -> Any:
    """Return the spans of every request and the content of every batch.

    `columns`: columns of the schedule, with the start of every batch since the first arrival.
    """
    offsets, request, tokens = columns.batch_offsets, columns.request, columns.tokens
    evicted_offsets, evicted = columns.evicted_offsets, columns.evicted
    begin, worker = columns.start, columns.worker
    memory = np.zeros(workers, _MEMORY)
    spans = np.zeros(4 * requests.shape[0], SPAN)
    used = 0
    batches = np.zeros(offsets.shape[0] - 1, BATCH)

    for j in range(batches.shape[0]):
        batch, w, t = batches[j], worker[j], begin[j]
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            r = requests[i]
            spans = _with_room(spans, used + 2)
            used = _evicted(spans, used, r, i, w, t)
            free(memory[w], r, limits)
            evict(r, limits.restart)
            r.lost = True
            batch.evictions += 1

        for p in range(offsets[j], offsets[j + 1]):
            i, c = request[p], tokens[p]
            r = requests[i]
            if r.decoding:
                phase = DECODE
                batch.decode += c
            elif r.lost:
                phase = REFILL
                batch.refill += c
            else:
                phase = PREFILL
                batch.prefill += c

            if r.phase != phase or t > r.free_at:
                spans = _with_room(spans, used + 2)
                used = _changed(spans, used, r, i, w, t, phase)

            r.tokens += c
            r.free_at = end[j]
            take(memory[w], r, c, limits)
            advance(r, c)

        batch.kv = memory[w].held
        for p in range(offsets[j], offsets[j + 1]):
            i = request[p]
            r = requests[i]
            if r.decoding and r.produced == r.output:
                spans = _with_room(spans, used + 1)
                used = _close(spans, used, r, i, w)
                free(memory[w], r, limits)
                r.cached = 0

        batch.kv_left = memory[w].held

    return spans[:used], batches


@njit
def stack(
    requests: Any,
    columns: Columns,
    limits: Limits,
    one: int,
    groups: int,
    sample: Ints,
) -> Any:
    """Return the KV that groups of requests hold on one worker at some batches."""
    offsets, request, tokens = columns.batch_offsets, columns.request, columns.tokens
    evicted_offsets, evicted = columns.evicted_offsets, columns.evicted
    memory = np.zeros(groups, _MEMORY)
    during = np.zeros((sample.shape[0], groups), np.int64)
    after = np.zeros((sample.shape[0], groups), np.int64)
    k = 0

    for j in range(offsets.shape[0] - 1):
        mine = columns.worker[j] == one
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            r = requests[evicted[p]]
            if mine:
                free(memory[r.group], r, limits)

            evict(r, limits.restart)

        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if mine:
                take(memory[r.group], r, tokens[p], limits)

            advance(r, tokens[p])

        taken = k < sample.shape[0] and sample[k] == j
        if taken:
            during[k] = memory["held"]
        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if r.decoding and r.produced == r.output:
                if mine:
                    free(memory[r.group], r, limits)

                r.cached = 0

        if taken:
            after[k] = memory["held"]
            k += 1

    return during, after
