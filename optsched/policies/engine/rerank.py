"""Runs `optsched.policies.trail.Trail` batch by batch.

Apart from `optsched.policies.engine.rules`: there an order is fixed when a request begins to wait,
and running requests stand in a line that never changes; here every token may move a request, and
who holds KV is decided again before every batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.judge.life import EMPTY, add_decode, add_prefill, batch_time
from optsched.judge.replay import read_start
from optsched.policies.engine.common import (
    DONE,
    MAX_STALLED_BATCHES,
    STALLED,
    STUCK,
    grown,
    tokens_left,
)


@njit(cache=True)
def _before(i: int, j: int, shielded: Any, left: Any, place: Any) -> bool:
    """Whether request i stands before j in the line."""
    if shielded[i] != shielded[j]:
        return bool(shielded[i])
    if left[i] != left[j]:
        return bool(left[i] < left[j])
    return bool(place[i] < place[j])


@njit(cache=True)
def _push(heap: Any, size: int, i: int, shielded: Any, left: Any, place: Any) -> int:
    k = size
    while k > 0:
        parent = (k - 1) // 2
        if _before(heap[parent], i, shielded, left, place):
            break
        heap[k] = heap[parent]
        k = parent
    heap[k] = i
    return size + 1


@njit(cache=True)
def _pop(heap: Any, size: int, shielded: Any, left: Any, place: Any) -> int:
    size -= 1
    i = heap[size]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child], shielded, left, place):
            child += 1
        if not _before(heap[child], i, shielded, left, place):
            break
        heap[k] = heap[child]
        k = child
    heap[k] = i
    return size


@njit(cache=True)
def run(
    arrival: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    first: NDArray[np.int64],
    every: int,
    offsets: NDArray[np.int64],
    remaining: NDArray[np.float64],
    capacity: int,
    offset: int,
    hard_batch: int,
    hard_prefill: int,
    hard_running: int,
    cost: NDArray[np.float64],
    origin: float,
    by_arrival: NDArray[np.int64],
    c: float,
    refine: bool,
    keep: bool,
    own_batch: int,
    own_running: int,
    hybrid: bool,
    chunked: bool,
    restart: bool,
) -> Any:
    """Run the policy to the end; `optsched.policies.trail.Trail.batch` says what it does.

    Returns
    -------
    tuple
        What `optsched.policies.engine.rules.run` returns.
    """
    n = arrival.shape[0]
    most_batch = min(own_batch, hard_batch)
    seats = min(own_running, hard_running)
    cached = np.zeros(n, dtype=np.int64)
    produced = np.zeros(n, dtype=np.int64)
    seen = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    shielded = np.zeros(n, dtype=np.bool_)  # holds KV and has run too long to be preempted
    left = np.zeros(n)
    place = np.empty(n, dtype=np.int64)
    place[by_arrival] = np.arange(n)
    shield = np.empty(n, dtype=np.int64)
    for i in range(n):
        shield[i] = int(np.floor(c * first[i]))

    heap = np.empty(n + 1, dtype=np.int64)
    waiting = 0
    running = np.empty(n, dtype=np.int64)
    n_running = 0
    lost = np.empty(n, dtype=np.int64)
    admitted = np.empty(n, dtype=np.int64)
    next_arrival = 0
    now = end = 0.0
    done = batches = entries = n_evicted = since = 0
    off_default = False
    longest = int(output.max())
    batch_offsets = np.zeros(1024, dtype=np.int64)
    evicted_offsets = np.zeros(1024, dtype=np.int64)
    start = np.empty(1024)
    request = np.empty(4096, dtype=np.int64)
    tokens = np.empty(4096, dtype=np.int64)
    evicted = np.empty(256, dtype=np.int64)
    outcome, about = DONE, -1

    while done < n:
        while next_arrival < n and arrival[by_arrival[next_arrival]] <= now:
            i = by_arrival[next_arrival]
            next_arrival += 1
            if refine:
                left[i] = tokens_left(every, offsets, remaining, i, 0, 0)
            else:
                left[i] = first[i]
            waiting = _push(heap, waiting, i, shielded, left, place)
        if n_running == 0 and waiting == 0:
            now = arrival[by_arrival[next_arrival]]
            continue

        # The line of running requests, nearly sorted since the last batch.
        n_decoding = 0
        for k in range(n_running):
            i = running[k]
            n_decoding += decoding[i]
            position = k
            while position > 0 and _before(i, running[position - 1], shielded, left, place):
                running[position] = running[position - 1]
                position -= 1
            running[position] = i

        # How many tokens each phase may process; the first in the line goes in any case.
        front = heap[0] if waiting > 0 else running[0]
        if n_running > 0 and _before(running[0], front, shielded, left, place):
            front = running[0]
        room = min(hard_batch, hard_prefill)
        need = 0 if decoding[front] else prompt[front] + produced[front] - cached[front]
        if chunked:
            need = min(need, 1)
        elif need > room:
            need = 0
        alone = need > own_batch
        decodes = 0 if alone else min(n_decoding, most_batch - need)
        if not hybrid and need > 0:
            decodes = 0
        prefill_left = room if alone else min(most_batch - decodes, hard_prefill)
        if not hybrid and need == 0:
            prefill_left = 0

        # Who holds KV, and what it processes.
        first_entry = entries
        sums = EMPTY
        latest = 0.0
        used = holders = kept = n_lost = position = 0
        was_running = n_running
        n_admitted = 0
        refused = False
        while True:
            fresh = (
                not refused
                and waiting > 0
                and (
                    position >= was_running
                    or _before(heap[0], running[position], shielded, left, place)
                )
            )
            if fresh:
                i = heap[0]
            elif position < was_running:
                i = running[position]
                position += 1
            else:
                break
            if decoding[i]:
                work = 1 if sums.decode_requests < decodes else 0
                kv = cached[i] + work + offset
            else:
                rest = prompt[i] + produced[i] - cached[i]
                work = 0
                if not alone or i == front:
                    if chunked:
                        work = min(rest, prefill_left)
                    elif rest <= prefill_left:
                        work = rest
                kv = prompt[i] + produced[i] + offset
            if (fresh and work == 0) or holders + 1 > seats or used + kv > capacity:
                refused = True
                if not fresh:
                    lost[n_lost] = i
                    n_lost += 1
                continue
            holders += 1
            used += kv
            if fresh:
                waiting = _pop(heap, waiting, shielded, left, place)
                n_admitted += 1
                admitted[n_admitted - 1] = i
            else:
                running[kept] = i
                kept += 1
            if work == 0:
                continue
            if decoding[i]:
                sums = add_decode(sums, cached[i])
            else:
                prefill_left -= work
                sums = add_prefill(sums, work, cached[i])
            latest = max(latest, arrival[i])
            if entries == request.shape[0]:
                request = grown(request, entries + 1)
                tokens = grown(tokens, entries + 1)
            request[entries] = i
            tokens[entries] = work
            entries += 1

        if sums.tokens == 0:
            for k in range(n_lost):
                running[kept] = lost[k]
                kept += 1
            if next_arrival == n:
                outcome, about = STUCK, front
                break
            now = arrival[by_arrival[next_arrival]]
            continue

        # Those who lost their seats: their KV stays while nobody needs it, or goes at once.
        for k in range(n_lost):
            i = lost[k]
            if keep and holders < hard_running and used + cached[i] + offset <= capacity:
                holders += 1
                used += cached[i] + offset
                running[kept] = i
                kept += 1
                continue
            evicted = grown(evicted, n_evicted + 1)
            evicted[n_evicted] = i
            n_evicted += 1
            cached[i] = 0
            decoding[i] = False
            shielded[i] = False
            if restart:
                produced[i] = 0
                if refine:
                    left[i] = tokens_left(every, offsets, remaining, i, seen[i], 0)
                else:
                    left[i] = first[i]
            waiting = _push(heap, waiting, i, shielded, left, place)
        for k in range(n_admitted):
            i = admitted[k]
            shielded[i] = produced[i] >= shield[i]
            running[kept] = i
            kept += 1
        n_running = kept

        # Process it.
        written = origin + now
        now = read_start(written, max(end, latest), origin)
        off_default = off_default or now != max(end, latest)
        if batches + 2 > batch_offsets.shape[0]:
            batch_offsets = grown(batch_offsets, batches + 2)
            evicted_offsets = grown(evicted_offsets, batches + 2)
            start = grown(start, batches + 2)
        start[batches] = written
        batches += 1
        batch_offsets[batches] = entries
        evicted_offsets[batches] = n_evicted
        now += batch_time(cost, sums)
        end = now
        finished = 0
        for k in range(first_entry, entries):
            i = request[k]
            cached[i] += tokens[k]
            if cached[i] < prompt[i] + produced[i]:
                continue
            decoding[i] = True
            produced[i] += 1
            if produced[i] == output[i]:
                finished += 1
                continue
            seen[i] = max(seen[i], produced[i])
            shielded[i] = produced[i] >= shield[i]
            if refine:
                left[i] = tokens_left(every, offsets, remaining, i, seen[i], produced[i])
            else:
                left[i] = max(1.0, float(first[i] - produced[i]))
        if finished > 0:
            done += finished
            since = 0
            kept = 0
            for k in range(n_running):
                i = running[k]
                if produced[i] < output[i]:
                    running[kept] = i
                    kept += 1
            n_running = kept
        else:
            since += 1
            if since > MAX_STALLED_BATCHES + longest:
                outcome, about = STALLED, -1
                break

    size = prompt[about] + produced[about] if about >= 0 else 0
    return (
        outcome, about, size, batches, now, batch_offsets[: batches + 1], request[:entries],
        tokens[:entries], evicted_offsets[: batches + 1], evicted[:n_evicted], start[:batches],
        off_default,
    )  # fmt: skip
