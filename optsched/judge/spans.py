"""What every request does when, batch by batch, compiled by numba; import it lazily.

The loops trust their schedule: `optsched.evaluate` has accepted it. A twin with dictionaries and
no shared code is held against them in the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

WAITING = 0
PREFILL = 1
DECODE = 2
PAUSED = 3
EVICTED = 4
REFILL = 5

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@njit(cache=True)
def _put(
    spans: Floats, k: int, i: int, phase: int, start: float, end: float, tokens: int, worker: int
) -> None:
    spans[k, 0], spans[k, 1], spans[k, 2] = i, phase, start
    spans[k, 3], spans[k, 4], spans[k, 5] = end, tokens, worker


@njit(cache=True)
def walk(
    arrival: Floats,
    prompt: Ints,
    output: Ints,
    kv_offset: int,
    batch_offsets: Ints,
    request: Ints,
    tokens: Ints,
    evicted_offsets: Ints,
    evicted: Ints,
    begin: Floats,
    end: Floats,
    worker: Ints,
    workers: int,
    restart: bool,
) -> Any:
    """Return the spans of every request, in the order in which they end, and what batches hold.

    Returns
    -------
    spans : float64 (k, 6)
        Request, phase, start, end, tokens, worker (-1: none).
    batches : int64 (batches, 6)
        Tokens of prefill, decode and refill; evictions before it; KV held by its worker during
        the batch, and after what finished has left.
    """
    n = arrival.shape[0]
    batches = batch_offsets.shape[0] - 1
    cached = np.zeros(n, dtype=np.int64)
    produced = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    lost = np.zeros(n, dtype=np.bool_)  # has been evicted
    free_at = arrival.copy()  # end of what was last known of it
    phase = np.full(n, -1, dtype=np.int64)  # of its open span
    since = np.zeros(n)
    count = np.zeros(n, dtype=np.int64)
    held = np.zeros(workers, dtype=np.int64)
    spans = np.zeros((4 * n, 6))
    used = 0
    found = np.zeros((batches, 6), dtype=np.int64)
    for j in range(batches):
        w = worker[j]
        t = begin[j]
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            if used + 2 > spans.shape[0]:
                spans = np.concatenate((spans, np.zeros_like(spans)))
            if phase[i] >= 0:
                _put(spans, used, i, phase[i], since[i], free_at[i], count[i], w)
                used += 1
                phase[i] = -1
            if t > free_at[i]:
                _put(spans, used, i, PAUSED, free_at[i], t, 0, w)
                used += 1
                free_at[i] = t
            held[w] -= cached[i] + kv_offset
            cached[i] = 0
            decoding[i] = False
            lost[i] = True
            if restart:
                produced[i] = 0
            found[j, 3] += 1
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            c = tokens[p]
            if used + 3 > spans.shape[0]:
                spans = np.concatenate((spans, np.zeros_like(spans)))
            now = DECODE if decoding[i] else REFILL if lost[i] else PREFILL
            found[j, 0 if now == PREFILL else 1 if now == DECODE else 2] += c
            if phase[i] >= 0 and (phase[i] != now or t > free_at[i]):
                _put(spans, used, i, phase[i], since[i], free_at[i], count[i], w)
                used += 1
                phase[i] = -1
            if t > free_at[i]:
                away = PAUSED if cached[i] > 0 else EVICTED if lost[i] else WAITING
                _put(spans, used, i, away, free_at[i], t, 0, w if away == PAUSED else -1)
                used += 1
            if phase[i] < 0:
                phase[i] = now
                since[i] = t
                count[i] = 0
            count[i] += c
            free_at[i] = end[j]
            if cached[i] == 0:
                held[w] += kv_offset
            held[w] += c
            cached[i] += c
            if cached[i] == prompt[i] + produced[i]:
                decoding[i] = True
                produced[i] += 1
        found[j, 4] = held[w]
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            if decoding[i] and produced[i] == output[i]:
                held[w] -= cached[i] + kv_offset
                cached[i] = 0
                _put(spans, used, i, phase[i], since[i], free_at[i], count[i], w)
                used += 1
                if used + 1 > spans.shape[0]:
                    spans = np.concatenate((spans, np.zeros_like(spans)))
        found[j, 5] = held[w]
    return spans[:used], found


@njit(cache=True)
def stack(
    prompt: Ints,
    output: Ints,
    kv_offset: int,
    batch_offsets: Ints,
    request: Ints,
    tokens: Ints,
    evicted_offsets: Ints,
    evicted: Ints,
    worker: Ints,
    restart: bool,
    one: int,
    group: Ints,
    groups: int,
    sample: Ints,
) -> Any:
    """Return the KV that groups of requests hold on worker ``one``, at some batches.

    Returns
    -------
    during, after : int64 (samples, groups)
        KV during each batch of ``sample`` (ascending), and once what finished has left.
    """
    n = prompt.shape[0]
    cached = np.zeros(n, dtype=np.int64)
    produced = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    held = np.zeros(groups, dtype=np.int64)
    during = np.zeros((sample.shape[0], groups), dtype=np.int64)
    after = np.zeros((sample.shape[0], groups), dtype=np.int64)
    k = 0
    for j in range(batch_offsets.shape[0] - 1):
        mine = worker[j] == one
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            if mine:
                held[group[i]] -= cached[i] + kv_offset
            cached[i] = 0
            decoding[i] = False
            if restart:
                produced[i] = 0
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            if mine:
                held[group[i]] += tokens[p] + (kv_offset if cached[i] == 0 else 0)
            cached[i] += tokens[p]
            if cached[i] == prompt[i] + produced[i]:
                decoding[i] = True
                produced[i] += 1
        taken = k < sample.shape[0] and sample[k] == j
        if taken:
            during[k] = held
        for p in range(batch_offsets[j], batch_offsets[j + 1]):
            i = request[p]
            if decoding[i] and produced[i] == output[i]:
                if mine:
                    held[group[i]] -= cached[i] + kv_offset
                cached[i] = 0
        if taken:
            after[k] = held
            k += 1
    return during, after
