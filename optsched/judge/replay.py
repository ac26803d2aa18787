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

from optsched.costs import cost
from optsched.problem import schedule

batch_time = njit(cache=True)(cost.batch_time)
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

UNLIMITED = np.iinfo(np.int64).max


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


@njit(cache=True)
def replay(
    arrival: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    kv_capacity: int,
    kv_offset: int,
    max_batch_tokens: int,
    max_prefill_tokens: int,
    max_running: int,
    hybrid_allowed: bool,
    chunking_allowed: bool,
    cost: NDArray[np.float64],
    batch_offsets: NDArray[np.int64],
    request: NDArray[np.int64],
    tokens: NDArray[np.int64],
    evicted_offsets: NDArray[np.int64],
    evicted: NDArray[np.int64],
    start: NDArray[np.float64],
    origin: float,
    zero: float,
    blur: float,
    worker: NDArray[np.int64],
    workers: int,
    restart: bool,
    eviction_allowed: bool,
) -> Any:
    """Replay every batch in order; see `Replay` for what comes back, as a flat tuple.

    Times are counted from the first arrival, and ``zero`` is the instance's time 0. Starts are as
    written (see `read_start`); one that lies before the earliest start by no more than ``blur``,
    what a clock that begins elsewhere loses, is that start.
    """
    n = arrival.shape[0]
    batches = batch_offsets.shape[0] - 1
    cached = np.zeros(n, dtype=np.int64)  # KV tokens stored
    produced = np.zeros(n, dtype=np.int64)  # output tokens so far
    decoding = np.zeros(n, dtype=np.bool_)  # its whole input is cached
    done = np.zeros(n, dtype=np.bool_)
    home = np.full(n, -1, dtype=np.int64)  # worker that holds its KV
    free_at = np.zeros(n, dtype=np.float64)  # end of its latest batch, or its latest eviction
    seen = np.full(n, -1, dtype=np.int64)  # latest batch that processed it
    turn = np.zeros(n, dtype=np.int64)  # its worker's count of batches at that moment
    first_start = np.full(n, np.nan)
    first_token = np.full(n, np.nan)
    finish = np.full(n, np.nan)
    served = np.zeros(n, dtype=np.float64)
    evictions = np.zeros(n, dtype=np.int64)
    pauses = np.zeros(n, dtype=np.int64)
    clock = np.full(workers, zero)
    turns = np.zeros(workers, dtype=np.int64)
    held = np.zeros(workers, dtype=np.int64)  # KV tokens on the worker, offset included
    running = np.zeros(workers, dtype=np.int64)
    batch_start = np.zeros(batches)
    batch_end = np.zeros(batches)
    batch_kv = np.zeros(batches, dtype=np.int64)
    batch_tokens = np.zeros(batches, dtype=np.int64)
    chunked = False
    rule, at, who, value, limit = OK, -1, -1, np.nan, np.nan

    for j in range(batches):
        w = worker[j]
        if w < 0 or w >= workers:
            rule, at, value, limit = BAD_WORKER, j, w, workers - 1
            break
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            if i < 0 or i >= n:
                rule, at, who, value, limit = BAD_REQUEST, j, i, i, n - 1
                break
            if not eviction_allowed:
                rule, at, who = EVICT_MODE, j, i
                break
            if cached[i] == 0 or home[i] != w:
                rule, at, who = EVICT_NOTHING, j, i
                break
            held[w] -= cached[i] + kv_offset
            running[w] -= 1
            cached[i] = 0
            decoding[i] = False
            home[i] = -1
            pauses[i] = 0
            evictions[i] += 1
            if restart:
                produced[i] = 0
                first_token[i] = np.nan
        if rule != OK:
            break

        total = 0
        n_decode = decode_kv = 0
        n_prefill = prefill_tokens = prefill_square = prefill_cross = prefill_kv = 0
        latest = 0.0
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            c = tokens[p]
            if i < 0 or i >= n:
                rule, at, who, value, limit = BAD_REQUEST, j, i, i, n - 1
                break
            if seen[i] == j:
                rule, at, who = DUPLICATE, j, i
                break
            if done[i]:
                rule, at, who, value, limit = FINISHED, j, i, output[i] + 1, output[i]
                break
            if c < 1:
                rule, at, who, value, limit = NO_TOKENS, j, i, c, 1
                break
            if home[i] >= 0 and home[i] != w:
                rule, at, who, value, limit = OTHER_WORKER, j, i, w, home[i]
                break
            if decoding[i]:
                if c != 1:
                    rule, at, who, value, limit = DECODE_TOKENS, j, i, c, 1
                    break
                n_decode += 1
                decode_kv += cached[i]
            else:
                rest = prompt[i] + produced[i] - cached[i]
                if c > rest:
                    rule, at, who, value, limit = TOO_MANY_TOKENS, j, i, c, rest
                    break
                if c < rest:
                    chunked = True
                    if not chunking_allowed:
                        rule, at, who, value, limit = CHUNKED, j, i, c, rest
                        break
                n_prefill += 1
                prefill_tokens += c
                prefill_square += c * c
                prefill_cross += c * cached[i]
                prefill_kv += cached[i]
            seen[i] = j
            total += c
            latest = max(latest, arrival[i])
        if rule != OK:
            break
        if total == 0:
            rule, at = EMPTY_BATCH, j
            break
        if n_decode > 0 and n_prefill > 0 and not hybrid_allowed:
            rule, at, value, limit = HYBRID, j, n_prefill, 0
            break
        if total > max_batch_tokens:
            rule, at, value, limit = BATCH_TOKENS, j, total, max_batch_tokens
            break
        if prefill_tokens > max_prefill_tokens:
            rule, at, value, limit = PREFILL_TOKENS, j, prefill_tokens, max_prefill_tokens
            break

        begin = max(clock[w], latest)
        if not np.isnan(start[j]):
            earliest = begin
            for p in range(batch_offsets[j], batch_offsets[j + 1]):
                earliest = max(earliest, free_at[request[p]])
            begin = read_start(start[j], earliest, origin)
            if earliest - blur <= begin < earliest:
                begin = earliest
            if begin < clock[w]:
                rule, at, value, limit = START_EARLY, j, begin, clock[w]
                break
        end = begin + batch_time(
            cost, total, n_decode, decode_kv, n_prefill, prefill_tokens, prefill_square,
            prefill_cross, prefill_kv,
        )  # fmt: skip
        waited = begin > clock[w]
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            free_at[evicted[p]] = max(free_at[evicted[p]], begin)
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            c = tokens[p]
            if begin < arrival[i]:
                rule, at, who, value, limit = ARRIVAL, j, i, begin, arrival[i]
                break
            if begin < free_at[i]:
                rule, at, who, value, limit = STILL_BUSY, j, i, begin, free_at[i]
                break
            if cached[i] == 0:
                held[w] += kv_offset
                running[w] += 1
                home[i] = w
            elif turn[i] != turns[w] or waited:
                pauses[i] += 1
            turn[i] = turns[w] + 1
            held[w] += c
            cached[i] += c
            free_at[i] = end
            served[i] += end - begin
            if np.isnan(first_start[i]):
                first_start[i] = begin
            if cached[i] == prompt[i] + produced[i]:
                decoding[i] = True
                produced[i] += 1
                if produced[i] == 1:
                    first_token[i] = end
                if produced[i] == output[i]:
                    done[i] = True
                    finish[i] = end
        if rule != OK:
            break
        if held[w] > kv_capacity:
            rule, at, value, limit = KV_CAPACITY, j, held[w], kv_capacity
            break
        if running[w] > max_running:
            rule, at, value, limit = MAX_RUNNING, j, running[w], max_running
            break
        clock[w] = end
        turns[w] += 1
        batch_start[j] = begin
        batch_end[j] = end
        batch_kv[j] = held[w]
        batch_tokens[j] = total
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            if done[i]:  # its KV counted in this batch, and is free for the next
                held[w] -= cached[i] + kv_offset
                running[w] -= 1
                cached[i] = 0
                home[i] = -1

    if rule == OK:
        for i in range(n):
            if not done[i]:
                rule, at, who, value, limit = UNFINISHED, batches - 1, i, produced[i], output[i]
                break
    return (
        rule, at, who, float(value), float(limit), batch_start, batch_end, batch_kv,
        batch_tokens, first_start, first_token, finish, served, evictions, pauses, chunked,
    )  # fmt: skip
