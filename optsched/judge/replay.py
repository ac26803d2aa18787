"""The judge's replay of a schedule of batches, compiled by numba.

`replay.py_func` is the same code run by the interpreter; a judge written independently, with
dictionaries and no shared code, is held against it in the tests. A violation is returned as
numbers; `optsched.evaluate` says it in words. Import this module lazily: it loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.judge.life import (
    EMPTY,
    Flags,
    Floats,
    Ints,
    Life,
    add_decode,
    add_prefill,
    advance,
    batch_time,
    evict,
    new_life,
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

    ``zero`` is the instance's time 0. Starts are as written (see `read_start`, which takes
    ``origin``); one that lies before the earliest start by no more than ``blur``, what a clock
    that begins elsewhere loses, is that start.
    """

    origin: float
    zero: float
    blur: float


class Breach(NamedTuple):
    """A rule that is broken: by which request (-1: the batch), what was found, and the limit."""

    rule: int
    request: int
    value: float
    limit: float


FINE = Breach(OK, -1, np.nan, np.nan)


class Replay(NamedTuple):
    """What a replay finds: the first violation, or times and KV of every batch and request.

    Parameters
    ----------
    rule, batch, request : int
        The first violation (``OK`` and -1 if there is none).
    value, limit : float
        What was found, and the limit that it breaks; NaN where the rule has none.
    batch_start, batch_end : ndarray of float64, shape (batches,)
    batch_kv, batch_tokens : ndarray of int64, shape (batches,)
        KV tokens held after each batch by its worker; tokens processed.
    first_start, first_token, finish : ndarray of float64, shape (n,)
        When each request was first processed, produced its first token, and its last.
    served : ndarray of float64, shape (n,)
        Time of all batches that processed each request.
    evictions, pauses : ndarray of int64, shape (n,)
        How often each request lost its KV, and how often a batch of its worker, or idle time,
        passed it over while it held KV (counted since its last eviction).
    chunked : bool
        Whether some prefill was split.
    """

    rule: int
    batch: int
    request: int
    value: float
    limit: float
    batch_start: NDArray[np.float64]
    batch_end: NDArray[np.float64]
    batch_kv: NDArray[np.int64]
    batch_tokens: NDArray[np.int64]
    first_start: NDArray[np.float64]
    first_token: NDArray[np.float64]
    finish: NDArray[np.float64]
    served: NDArray[np.float64]
    evictions: NDArray[np.int64]
    pauses: NDArray[np.int64]
    chunked: bool


class _Requests(NamedTuple):
    """What the replay knows of every request, beside its life; arrays of shape (n,)."""

    done: Flags
    home: Ints  # worker that holds its KV, or -1
    free_at: Floats  # end of its latest batch, or its latest eviction
    seen: Ints  # latest batch that processed it
    turn: Ints  # its worker's count of batches at that moment
    first_start: Floats
    first_token: Floats
    finish: Floats
    served: Floats
    evictions: Ints
    pauses: Ints


class _Workers(NamedTuple):
    """What the replay knows of every worker; arrays of shape (workers,)."""

    clock: Floats  # end of its latest batch
    turns: Ints  # batches so far
    held: Ints  # KV tokens, offset included
    running: Ints  # requests that hold KV


@njit(cache=True)
def _evictions(
    columns: Columns, j: int, limits: Limits, life: Life, known: _Requests, workers: _Workers
) -> Breach:
    """Carry out the evictions before a batch."""
    w = columns.worker[j]
    for p in range(columns.evicted_offsets[j], columns.evicted_offsets[j + 1]):
        i = columns.evicted[p]
        if i < 0 or i >= life.prompt.shape[0]:
            return Breach(BAD_REQUEST, i, float(i), float(life.prompt.shape[0] - 1))
        if not limits.eviction:
            return Breach(EVICT_MODE, i, np.nan, np.nan)
        if life.cached[i] == 0 or known.home[i] != w:
            return Breach(EVICT_NOTHING, i, np.nan, np.nan)
        workers.held[w] -= life.cached[i] + limits.kv_offset
        workers.running[w] -= 1
        evict(life, i, limits.restart)
        known.home[i] = -1
        known.pauses[i] = 0
        known.evictions[i] += 1
        if limits.restart:
            known.first_token[i] = np.nan
    return FINE


@njit(cache=True)
def _entry(i: int, c: int, j: int, w: int, limits: Limits, life: Life, known: _Requests) -> Breach:
    """Check one entry of a batch: request i processes c tokens on worker w."""
    if i < 0 or i >= life.prompt.shape[0]:
        return Breach(BAD_REQUEST, i, float(i), float(life.prompt.shape[0] - 1))
    if known.seen[i] == j:
        return Breach(DUPLICATE, i, np.nan, np.nan)
    if known.done[i]:
        return Breach(FINISHED, i, float(life.output[i] + 1), float(life.output[i]))
    if c < 1:
        return Breach(NO_TOKENS, i, float(c), 1.0)
    if known.home[i] >= 0 and known.home[i] != w:
        return Breach(OTHER_WORKER, i, float(w), float(known.home[i]))
    if life.decoding[i]:
        return FINE if c == 1 else Breach(DECODE_TOKENS, i, float(c), 1.0)
    rest = rest_of(life, i)
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
def _begin(columns: Columns, j: int, earliest: float, known: _Requests, origin: Origin) -> float:
    """Return when a batch starts whose requests are all there at ``earliest``."""
    if np.isnan(columns.start[j]):
        return earliest
    for p in range(columns.batch_offsets[j], columns.batch_offsets[j + 1]):
        earliest = max(earliest, known.free_at[columns.request[p]])
    begin = read_start(columns.start[j], earliest, origin.origin)
    if earliest - origin.blur <= begin < earliest:
        begin = earliest
    return float(begin)


@njit(cache=True)
def _process(
    i: int,
    c: int,
    w: int,
    span: tuple[float, float],
    waited: bool,
    life: Life,
    known: _Requests,
    workers: _Workers,
) -> None:
    """Let request i process c tokens on worker w from ``span[0]`` to ``span[1]``."""
    begin, end = span
    if life.cached[i] == 0:
        workers.running[w] += 1
        known.home[i] = w
    elif known.turn[i] != workers.turns[w] or waited:
        known.pauses[i] += 1
    known.turn[i] = workers.turns[w] + 1
    workers.held[w] += c
    known.free_at[i] = end
    known.served[i] += end - begin
    if np.isnan(known.first_start[i]):
        known.first_start[i] = begin
    if advance(life, i, c):
        if life.produced[i] == 1:
            known.first_token[i] = end
        if life.produced[i] == life.output[i]:
            known.done[i] = True
            known.finish[i] = end


@njit(cache=True)
def replay(
    arrival: Floats,
    prompt: Ints,
    output: Ints,
    limits: Limits,
    cost: Floats,
    columns: Columns,
    origin: Origin,
    workers: int,
) -> Any:
    """Replay every batch in order; see `Replay` for what comes back, as a flat tuple.

    Parameters
    ----------
    arrival : ndarray of float64, shape (n,)
        Since the first arrival, as all times here.
    prompt, output : ndarray of int64, shape (n,)
    limits : Limits
    cost : ndarray of float64, shape (12,)
        `BatchCost.array` or `UnitCost.array`.
    columns : Columns
    origin : Origin
    workers : int
    """
    n = arrival.shape[0]
    batches = columns.batch_offsets.shape[0] - 1
    life = new_life(prompt, output)
    known = _Requests(
        np.zeros(n, dtype=np.bool_), np.full(n, -1, dtype=np.int64), np.zeros(n),
        np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64), np.full(n, np.nan),
        np.full(n, np.nan), np.full(n, np.nan), np.zeros(n), np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
    )  # fmt: skip
    machine = _Workers(
        np.full(workers, origin.zero), np.zeros(workers, dtype=np.int64),
        np.zeros(workers, dtype=np.int64), np.zeros(workers, dtype=np.int64),
    )  # fmt: skip
    batch_start, batch_end = np.zeros(batches), np.zeros(batches)
    batch_kv = np.zeros(batches, dtype=np.int64)
    batch_tokens = np.zeros(batches, dtype=np.int64)
    chunked = False
    breach, at = FINE, -1
    for j in range(batches):
        at = j
        w = columns.worker[j]
        if w < 0 or w >= workers:
            breach = Breach(BAD_WORKER, -1, float(w), float(workers - 1))
            break
        breach = _evictions(columns, j, limits, life, known, machine)
        if breach.rule != OK:
            break
        first, last = columns.batch_offsets[j], columns.batch_offsets[j + 1]
        sums = EMPTY
        latest = 0.0
        for p in range(first, last):
            i, c = columns.request[p], columns.tokens[p]
            breach = _entry(i, c, j, w, limits, life, known)
            if breach.rule != OK:
                break
            if life.decoding[i]:
                sums = add_decode(sums, life.cached[i])
            else:
                sums = add_prefill(sums, c, life.cached[i])
                chunked = chunked or c < rest_of(life, i)
            known.seen[i] = j
            latest = max(latest, arrival[i])
        if breach.rule == OK:
            breach = _content(sums, limits)
        if breach.rule != OK:
            break

        begin = _begin(columns, j, max(machine.clock[w], latest), known, origin)
        if begin < machine.clock[w]:
            breach = Breach(START_EARLY, -1, begin, machine.clock[w])
            break
        end = begin + batch_time(cost, sums)
        waited = begin > machine.clock[w]
        for p in range(columns.evicted_offsets[j], columns.evicted_offsets[j + 1]):
            i = columns.evicted[p]
            known.free_at[i] = max(known.free_at[i], begin)
        for p in range(first, last):
            i = columns.request[p]
            if begin < arrival[i]:
                breach = Breach(ARRIVAL, i, begin, arrival[i])
            elif begin < known.free_at[i]:
                breach = Breach(STILL_BUSY, i, begin, known.free_at[i])
            if breach.rule != OK:
                break
            machine.held[w] += limits.kv_offset * (life.cached[i] == 0)
            _process(i, columns.tokens[p], w, (begin, end), waited, life, known, machine)
        if breach.rule == OK and machine.held[w] > limits.kv_capacity:
            breach = Breach(KV_CAPACITY, -1, float(machine.held[w]), float(limits.kv_capacity))
        elif breach.rule == OK and machine.running[w] > limits.max_running:
            breach = Breach(MAX_RUNNING, -1, float(machine.running[w]), float(limits.max_running))
        if breach.rule != OK:
            break
        machine.clock[w] = end
        machine.turns[w] += 1
        batch_start[j], batch_end[j] = begin, end
        batch_kv[j], batch_tokens[j] = machine.held[w], sums.tokens
        for p in range(first, last):
            i = columns.request[p]
            if known.done[i]:  # its KV counted in this batch, and is free for the next
                machine.held[w] -= life.cached[i] + limits.kv_offset
                machine.running[w] -= 1
                life.cached[i] = 0
                known.home[i] = -1
    if breach.rule == OK:
        at = -1
        for i in range(n):
            if not known.done[i]:
                at = batches - 1
                breach = Breach(UNFINISHED, i, float(life.produced[i]), float(life.output[i]))
                break
    return (
        breach.rule, at, breach.request, breach.value, breach.limit, batch_start, batch_end,
        batch_kv, batch_tokens, known.first_start, known.first_token, known.finish, known.served,
        known.evictions, known.pauses, chunked,
    )  # fmt: skip
