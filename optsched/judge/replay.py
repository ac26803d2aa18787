"""The judge's replay of a schedule of batches, compiled by numba.

A judge written independently, with dictionaries and no shared code, is held against it in the
tests. A violation is returned as numbers; `optsched.evaluate` says it in words. Requests, workers
and batches are records of structured arrays: compiled code passes a record on as one pointer,
where a named tuple of arrays would count the references of each. Import this module lazily: it
loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from optsched.judge.life import (
    EMPTY,
    Floats,
    Ints,
    add_decode,
    add_prefill,
    advance,
    batch_time,
    evict,
    new_requests,
    record,
    rest_of,
)
from optsched.problem import schedule

read_start = njit(cache=True)(schedule.read_start)

# Rules of a schedule, in the order in which a batch is checked. The number is what a replay
# returns; the words are in `optsched.evaluate`.
OK = 0
BAD_REQUEST = 1
BAD_WORKER = 2
EVICT_NOTHING = 3
EVICT_MODE = 4
DUPLICATE = 5
FINISHED = 6
NO_TOKENS = 7
EMPTY_BATCH = 8
DECODE_TOKENS = 9
TOO_MANY_TOKENS = 10
CHUNKED = 11
HYBRID = 12
BATCH_TOKENS = 13
PREFILL_TOKENS = 14
START_EARLY = 15
ARRIVAL = 16
OTHER_WORKER = 17
STILL_BUSY = 18
KV_CAPACITY = 19
MAX_RUNNING = 20
UNFINISHED = 21


class Limits(NamedTuple):
    """What the instance and the schedule's kind allow; a limit that is absent is `UNLIMITED`."""

    kv_capacity: int
    kv_offset: int
    max_batch_tokens: int
    max_prefill_tokens: int
    max_running: int
    hybrid: bool
    chunked: bool
    eviction: bool
    restart: bool


class Columns(NamedTuple):
    """The flat columns of a schedule of batches; ``start`` is NaN where none is given."""

    batch_offsets: Ints
    request: Ints
    tokens: Ints
    evicted_offsets: Ints
    evicted: Ints
    start: Floats
    worker: Ints


class Origin(NamedTuple):
    """Where times are counted from: the first arrival.

    Starts are as written (see `read_start`, which takes ``origin``). One that lies before the
    earliest start by no more than ``blur``, what a clock that begins elsewhere loses, is that
    start.
    """

    origin: float
    blur: float


class Breach(NamedTuple):
    """A rule that is broken: by which request (-1: the batch), what was found, and the limit."""

    rule: int
    request: int
    value: float
    limit: float


FINE = Breach(OK, -1, np.nan, np.nan)


BATCH = record(
    ("start", np.float64),
    ("end", np.float64),
    ("kv", np.int64),  # KV tokens that its worker holds after it
    ("tokens", np.int64),  # processed
)

FIELDS = (
    ("arrival", np.float64),
    ("free_at", np.float64),  # end of its latest batch, or its latest eviction
    ("first_start", np.float64),
    ("first_token", np.float64),
    ("finish", np.float64),
    ("served", np.float64),
    ("home", np.int64),  # worker that holds its KV, or -1
    ("seen", np.int64),  # latest batch that processed it
    ("turn", np.int64),  # its worker's count of batches at that moment
    ("evictions", np.int64),
    ("pauses", np.int64),
    ("done", np.bool_),
)
"""What the replay knows of a request beside its life."""

WORKER = record(
    ("clock", np.float64),  # end of its latest batch
    ("turns", np.int64),  # batches so far
    ("held", np.int64),  # KV tokens, offset included
    ("running", np.int64),  # requests that hold KV
)


def new_state(arrival: Floats, prompt: Ints, output: Ints, workers: int, zero: float) -> Any:
    """Return the requests and the workers before the first batch, as structured arrays."""
    requests = new_requests(prompt, output, FIELDS)
    requests["arrival"] = arrival
    for name in ("first_start", "first_token", "finish"):
        requests[name] = np.nan
    requests["home"] = requests["seen"] = -1
    machines = np.zeros(workers, dtype=WORKER)
    machines["clock"] = zero
    return requests, machines


@njit(cache=True)
def _evicted(r: Any, i: int, w: int, machine: Any, limits: Limits) -> Breach:
    """Evict request i from worker w."""
    if not limits.eviction:
        return Breach(EVICT_MODE, i, np.nan, np.nan)
    if r.cached == 0 or r.home != w:
        return Breach(EVICT_NOTHING, i, np.nan, np.nan)
    machine.held -= r.cached + limits.kv_offset
    machine.running -= 1
    evict(r, limits.restart)
    r.home = -1
    r.pauses = 0
    r.evictions += 1
    if limits.restart:
        r.first_token = np.nan
    return FINE


@njit(cache=True)
def _entry(r: Any, i: int, c: int, j: int, w: int, limits: Limits) -> Breach:
    """Check one entry of batch j: request i processes c tokens on worker w."""
    if r.seen == j:
        return Breach(DUPLICATE, i, np.nan, np.nan)
    if r.done:
        return Breach(FINISHED, i, float(r.output + 1), float(r.output))
    if c < 1:
        return Breach(NO_TOKENS, i, float(c), 1.0)
    if r.home >= 0 and r.home != w:
        return Breach(OTHER_WORKER, i, float(w), float(r.home))
    if r.decoding:
        return FINE if c == 1 else Breach(DECODE_TOKENS, i, float(c), 1.0)
    rest = rest_of(r)
    if c > rest:
        return Breach(TOO_MANY_TOKENS, i, float(c), float(rest))
    if c < rest and not limits.chunked:
        return Breach(CHUNKED, i, float(c), float(rest))
    return FINE


@njit(cache=True)
def _content(sums: Any, limits: Limits) -> Breach:
    """Check what a batch holds in all."""
    if sums.tokens == 0:
        return Breach(EMPTY_BATCH, -1, np.nan, np.nan)
    if sums.decode_requests > 0 and sums.prefill_requests > 0 and not limits.hybrid:
        return Breach(HYBRID, -1, float(sums.prefill_requests), 0.0)
    if sums.tokens > limits.max_batch_tokens:
        return Breach(BATCH_TOKENS, -1, float(sums.tokens), float(limits.max_batch_tokens))
    if sums.prefill_tokens > limits.max_prefill_tokens:
        limit = float(limits.max_prefill_tokens)
        return Breach(PREFILL_TOKENS, -1, float(sums.prefill_tokens), limit)
    return FINE


@njit(cache=True)
def _process(r: Any, i: int, c: int, machine: Any, begin: float, end: float) -> Breach:
    """Let request i process c tokens from ``begin`` to ``end``."""
    if begin < r.arrival:
        return Breach(ARRIVAL, i, begin, r.arrival)
    if begin < r.free_at:
        return Breach(STILL_BUSY, i, begin, r.free_at)
    if r.cached == 0:
        machine.running += 1
    elif r.turn != machine.turns or begin > machine.clock:
        r.pauses += 1
    r.turn = machine.turns + 1
    machine.held += c
    r.free_at = end
    r.served += end - begin
    if np.isnan(r.first_start):
        r.first_start = begin
    if advance(r, c):
        if r.produced == 1:
            r.first_token = end
        if r.produced == r.output:
            r.done = True
            r.finish = end
    return FINE


@njit(cache=True)
def replay(
    requests: Any,
    machines: Any,
    limits: Limits,
    cost: Floats,
    columns: Columns,
    origin: Origin,
    batches: Any,
) -> tuple[Breach, int, bool]:
    """Replay every batch in order, in place; return the first breach, its batch, and `chunked`.

    Parameters
    ----------
    requests, machines : ndarray of records
        As `new_state` makes them; times are counted from the first arrival, as all times here.
    limits : Limits
    cost : ndarray of float64, shape (12,)
        `BatchCost.array` or `UnitCost.array`.
    columns : Columns
    origin : Origin
    batches : ndarray of `BATCH` records, shape (batches,)
        What is found of every batch.
    """
    n, workers = requests.shape[0], machines.shape[0]
    offsets, request, tokens = columns.batch_offsets, columns.request, columns.tokens
    evicted_offsets, evicted, start = columns.evicted_offsets, columns.evicted, columns.start
    chunked = False
    for j in range(batches.shape[0]):
        w = columns.worker[j]
        if w < 0 or w >= workers:
            return Breach(BAD_WORKER, -1, float(w), float(workers - 1)), j, chunked
        machine = machines[w]
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            breach = Breach(BAD_REQUEST, i, float(i), float(n - 1))
            if 0 <= i < n:
                breach = _evicted(requests[i], i, w, machine, limits)
            if breach.rule != OK:
                return breach, j, chunked

        sums = EMPTY
        latest = 0.0
        for p in range(offsets[j], offsets[j + 1]):
            i, c = request[p], tokens[p]
            if i < 0 or i >= n:
                return Breach(BAD_REQUEST, i, float(i), float(n - 1)), j, chunked
            r = requests[i]
            chunked = chunked or (not r.decoding and 0 < c < rest_of(r))
            breach = _entry(r, i, c, j, w, limits)
            if breach.rule != OK:
                return breach, j, chunked
            if r.decoding:
                sums = add_decode(sums, r.cached)
            else:
                sums = add_prefill(sums, c, r.cached)
            r.seen = j
            latest = max(latest, r.arrival)
        breach = _content(sums, limits)
        if breach.rule != OK:
            return breach, j, chunked

        begin = max(machine.clock, latest)
        if not np.isnan(start[j]):
            earliest = begin
            for p in range(offsets[j], offsets[j + 1]):
                earliest = max(earliest, requests[request[p]].free_at)
            begin = read_start(start[j], earliest, origin.origin)
            if earliest - origin.blur <= begin < earliest:
                begin = earliest
            if begin < machine.clock:
                return Breach(START_EARLY, -1, begin, machine.clock), j, chunked
        end = begin + batch_time(cost, sums)
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            r = requests[evicted[p]]
            r.free_at = max(r.free_at, begin)
        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if r.cached == 0:
                machine.held += limits.kv_offset
                r.home = w
            breach = _process(r, request[p], tokens[p], machine, begin, end)
            if breach.rule != OK:
                return breach, j, chunked
        if machine.held > limits.kv_capacity:
            breach = Breach(KV_CAPACITY, -1, float(machine.held), float(limits.kv_capacity))
            return breach, j, chunked
        if machine.running > limits.max_running:
            breach = Breach(MAX_RUNNING, -1, float(machine.running), float(limits.max_running))
            return breach, j, chunked
        machine.clock = end
        machine.turns += 1
        batch = batches[j]
        batch.start, batch.end, batch.kv, batch.tokens = begin, end, machine.held, sums.tokens
        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if r.done:  # its KV counted in this batch, and is free for the next
                machine.held -= r.cached + limits.kv_offset
                machine.running -= 1
                r.cached = 0
                r.home = -1
    for i in range(n):
        r = requests[i]
        if not r.done:
            breach = Breach(UNFINISHED, i, float(r.produced), float(r.output))
            return breach, batches.shape[0] - 1, chunked
    return FINE, -1, chunked
