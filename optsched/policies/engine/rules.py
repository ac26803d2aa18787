"""Runs any `Rules` batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.judge.life import EMPTY, add_decode, add_prefill, batch_time
from optsched.judge.replay import read_start
from optsched.policies.engine.common import DONE, LOOP, MAX_STALLED_BATCHES, STALLED, STUCK, grown

# Codes of what `Rules` say in words.
GROUPS = {"waiting": 0, "running": 1, "running_decode": 2, "running_prefill": 3, "all": 4}
WAITING, RUNNING, RUNNING_DECODE, RUNNING_PREFILL, ALL = 0, 1, 2, 3, 4
ADMISSIONS = {"present": 0, "lookahead": 1, "reserve": 2, "protect": 3}
PRESENT, LOOKAHEAD, RESERVE, PROTECT = 0, 1, 2, 3
OVERFLOWS = {"evict_latest": 0, "clear": 1, "evict_shortest": 2}
EVICT_LATEST, CLEAR, EVICT_SHORTEST = 0, 1, 2

TIES = 2**31
"""Random numbers that break a tie in the order of waiting requests; lengths lie below it too."""
BACK = 2**62
"""First key behind every length with its tie-breaker."""

MAX_STALLED_CLEARINGS = 100_000
"""Random clearings without a completion that count as an endless loop."""


@njit(cache=True)
def _push(heap: Any, size: int, key: int, item: int, keys: Any) -> int:
    keys[item] = key
    k = size
    while k > 0:
        parent = (k - 1) // 2
        if keys[heap[parent]] <= key:
            break
        heap[k] = heap[parent]
        k = parent
    heap[k] = item
    return size + 1


@njit(cache=True)
def _pop(heap: Any, size: int, keys: Any) -> int:
    size -= 1
    item = heap[size]
    key = keys[item]
    k = 0
    while True:
        child = 2 * k + 1
        if child >= size:
            break
        if child + 1 < size and keys[heap[child + 1]] < keys[heap[child]]:
            child += 1
        if keys[heap[child]] >= key:
            break
        heap[k] = heap[child]
        k = child
    heap[k] = item
    return size


@njit(cache=True)
def _drawn(length: int, generator: Any) -> int:
    """Return the key of a length whose ties break at random."""
    return length * TIES + int(generator.random() * TIES)


@njit(cache=True)
def _without_gone(running: Any, n_running: int, gone: Any) -> int:
    """Drop the requests marked ``gone`` in place, order kept; return how many stay."""
    kept = 0
    for k in range(n_running):
        if gone[running[k]]:
            gone[running[k]] = False
        else:
            running[kept] = running[k]
            kept += 1
    return kept


@njit(cache=True)
def run(
    arrival: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    predicted: NDArray[np.int64],
    second: NDArray[np.int64],
    capacity: int,
    offset: int,
    hard_batch: int,
    hard_prefill: int,
    hard_running: int,
    cost: NDArray[np.float64],
    origin: float,
    by_arrival: NDArray[np.int64],
    priority: NDArray[np.int64],
    rank: NDArray[np.int64],
    requeue_back: bool,
    random_ties: bool,
    by_estimate: bool,
    groups: NDArray[np.int64],
    admission: int,
    threshold: float,
    overflow: int,
    beta: float,
    promote: bool,
    make_room: bool,
    hybrid: bool,
    chunked: bool,
    own_batch: int,
    own_prefill: int,
    restart: bool,
    generator: Any,
) -> Any:
    """Run a scheduler to the end; `optsched.simulate` says what the arguments mean.

    Returns
    -------
    tuple
        outcome, request it is about and its input in tokens, number of batches and time at the
        outcome, then the flat columns of the schedule: batch_offsets, request, tokens,
        evicted_offsets, evicted, start, and whether the starts differ from the default ones.
    """
    n = arrival.shape[0]
    estimate = predicted.copy()
    cached = np.zeros(n, dtype=np.int64)  # while prefilling; a decoding one has s + produced - 1
    produced = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    peak = prompt + estimate - 1 + offset
    gone = np.zeros(n, dtype=np.bool_)  # evicted while this batch is formed
    in_batch = np.zeros(n, dtype=np.int64)  # number of its latest batch, from 1

    keys = np.zeros(n, dtype=np.int64)
    heap = np.empty(n + 1, dtype=np.int64)
    waiting = 0
    counter = 0
    running = np.empty(n, dtype=np.int64)  # ascending priority
    n_running = 0
    n_partial = 0  # running requests whose prefill is not complete
    short = False  # some prediction is
    for i in range(n):
        short = short or predicted[i] < output[i]
    admitted = np.empty(n, dtype=np.int64)
    next_arrival = 0

    promoted = np.zeros(n, dtype=np.bool_)  # told its second estimate
    leaving = np.empty(n, dtype=np.int64)
    ties = np.empty(n if overflow == EVICT_SHORTEST else 0)

    span = 2 + max(int(estimate.max()), int(second.max()), int(output.max()))
    usage = np.zeros(4 * span, dtype=np.int64)  # projected KV of batch b at cell b
    over = 0  # projected batches above capacity

    held = 0  # KV allocated to running requests: all of the input from the admission on
    reserved = 0  # sum of peak over running
    now = 0.0
    end = 0.0
    done = 0
    batches = 0
    entries = 0
    n_evicted = 0
    since = 0  # batches since the last completion
    clearings = 0  # since the last completion
    cleared_at = -1  # completions + arrivals at the last clearing of all
    off_default = False
    longest = int(output.max())

    batch_offsets = np.zeros(1024, dtype=np.int64)
    evicted_offsets = np.zeros(1024, dtype=np.int64)
    start = np.empty(1024)
    request = np.empty(4096, dtype=np.int64)
    tokens = np.empty(4096, dtype=np.int64)
    evicted = np.empty(256, dtype=np.int64)
    outcome, about = DONE, -1
    freed = 0  # by completions of the last batch, kept for those that wait

    while done < n:
        while next_arrival < n and arrival[by_arrival[next_arrival]] <= now:
            i = by_arrival[next_arrival]
            next_arrival += 1
            key = counter if requeue_back else rank[i]
            if random_ties:
                key = _drawn(estimate[i] if by_estimate else 0, generator)
            counter += 1
            waiting = _push(heap, waiting, key, i, keys)
        if n_running == 0 and waiting == 0:
            now = arrival[by_arrival[next_arrival]]
            continue

        # Who must leave before the batch: known to be longer than thought, or for want of KV.
        n_leaving = 0
        next_kv = held + n_running
        if promote:
            for k in range(n_running):
                i = running[k]
                if produced[i] >= estimate[i] and not promoted[i]:
                    promoted[i] = True
                    gone[i] = True
                    leaving[n_leaving] = i
                    n_leaving += 1
                    next_kv -= prompt[i] + produced[i] + offset
        n_promoted = n_leaving
        stall = False
        clearing = overflow == CLEAR and next_kv > capacity
        if clearing:
            for k in range(n_running):
                i = running[k]
                if beta >= 1.0 or generator.random() < beta:
                    gone[i] = True
                    leaving[n_leaving] = i
                    n_leaving += 1
        elif overflow == EVICT_SHORTEST and next_kv > capacity - (freed if waiting > 0 else 0):
            room = capacity - (freed if waiting > 0 else 0)  # what running requests may hold
            for k in range(n_running):
                if not gone[running[k]]:
                    ties[k] = generator.random()
            while next_kv > room:
                least = -1
                for k in range(n_running):
                    i = running[k]
                    if gone[i] or (next_kv <= capacity and produced[i] < estimate[i]):
                        continue  # for the room of others only what is past its estimate goes
                    if (
                        least < 0
                        or estimate[i] < estimate[running[least]]
                        or (estimate[i] == estimate[running[least]] and ties[k] < ties[least])
                    ):
                        least = k
                if least < 0:
                    break
                i = running[least]
                gone[i] = True
                leaving[n_leaving] = i
                n_leaving += 1
                next_kv -= prompt[i] + produced[i] + offset
        for k in range(n_leaving):
            i = leaving[k]
            if admission == LOOKAHEAD:
                for ahead in range(1, estimate[i] - produced[i] + 1):
                    cell = batches + ahead
                    was = usage[cell]
                    usage[cell] -= prompt[i] + produced[i] + ahead - 1 + offset
                    over -= was > capacity >= usage[cell]
            held -= prompt[i] + produced[i] - 1 + offset
            reserved -= peak[i]
            if k < n_promoted:
                estimate[i] = max(second[i], produced[i] + 1)
            elif overflow == EVICT_SHORTEST:
                estimate[i] = max(estimate[i], produced[i])
            elif produced[i] >= estimate[i]:
                estimate[i] = produced[i] + 1
            peak[i] = prompt[i] + estimate[i] - 1 + offset
            evicted = grown(evicted, n_evicted + 1)
            evicted[n_evicted] = i
            n_evicted += 1
            cached[i] = 0
            decoding[i] = False
            if restart:
                produced[i] = 0
            key = counter if requeue_back else rank[i]
            if k < n_promoted:
                key = BACK + counter
            elif random_ties:
                key = _drawn(estimate[i] if by_estimate else 0, generator)
            counter += 1
            waiting = _push(heap, waiting, key, i, keys)
        if n_leaving > 0:
            n_running = _without_gone(running, n_running, gone)
        if clearing:
            clearings += 1
            if clearings > MAX_STALLED_CLEARINGS:
                outcome = STALLED
                break
            if beta >= 1.0 and (admission in (PRESENT, PROTECT)):
                if cleared_at == done + next_arrival:
                    outcome, about = LOOP, heap[0]
                    break
                cleared_at = done + next_arrival
            stall = held + n_running > capacity
        if stall:  # the time of the batch that could not run
            sums = EMPTY
            for k in range(n_running):
                sums = add_decode(sums, prompt[running[k]] + produced[running[k]] - 1)
            now += batch_time(cost, sums)
            continue

        if batches + span > usage.shape[0]:
            wider = np.zeros(2 * usage.shape[0], dtype=np.int64)
            wider[: usage.shape[0]] = usage
            usage = wider
        if admission == LOOKAHEAD and short:  # past its estimate: one more token
            for k in range(n_running):
                i = running[k]
                if produced[i] >= estimate[i]:
                    cell = batches + 1
                    was = usage[cell]
                    usage[cell] += prompt[i] + produced[i] + offset
                    over += was <= capacity < usage[cell]

        # Form the batch.
        first = entries
        sums = EMPTY
        latest = 0.0
        n_admitted = 0
        lost = 0
        closed = False
        evicted_before = n_evicted
        for g in range(groups.shape[0]):
            group = groups[g]
            position = 0
            refused = False  # in the group of all, a waiting request was: the running ones go on
            if (
                group in (RUNNING, RUNNING_DECODE)
                and n_partial == 0
                and (hybrid or sums.prefill_requests == 0)
                and held + n_running <= capacity
                and sums.tokens + n_running <= hard_batch
                and sums.tokens + n_running <= own_batch
                and not closed
            ):  # the common case, without a question: every running request decodes
                request = grown(request, entries + n_running)
                tokens = grown(tokens, entries + n_running)
                for k in range(n_running):
                    i = running[k]
                    latest = max(latest, arrival[i])
                    request[entries + k] = i
                    tokens[entries + k] = 1
                    sums = add_decode(sums, prompt[i] + produced[i] - 1)
                entries += n_running
                held += n_running
                continue
            while not closed:
                fresh = group == WAITING
                if group == ALL:
                    fresh = (
                        not refused
                        and waiting > 0
                        and (position >= n_running or rank[heap[0]] < rank[running[position]])
                    )
                if fresh:
                    if waiting == 0:
                        break
                    i = heap[0]
                else:
                    if position >= n_running:
                        break
                    i = running[position]
                    position += 1
                    if gone[i] or (group == RUNNING_DECODE and not decoding[i]):
                        continue
                    if group == RUNNING_PREFILL and decoding[i]:
                        continue
                if decoding[i]:
                    if not hybrid and sums.prefill_requests > 0:
                        continue
                    if sums.tokens + 1 > hard_batch or sums.tokens + 1 > own_batch:
                        break
                    victim = n_running - 1
                    while held + 1 > capacity:  # evict the lowest priority, itself last
                        while victim >= 0:
                            v = running[victim]
                            if v != i and not gone[v] and in_batch[v] != batches + 1:
                                break
                            victim -= 1
                        v = running[victim] if victim >= 0 else i
                        gone[v] = True
                        lost += 1
                        held -= offset + (
                            prompt[v] + produced[v] - 1 if decoding[v] else prompt[v] + produced[v]
                        )
                        reserved -= peak[v]
                        if admission == LOOKAHEAD:  # past its estimate it counts one token more
                            for ahead in range(1, max(1, estimate[v] - produced[v]) + 1):
                                cell = batches + ahead
                                was = usage[cell]
                                usage[cell] -= prompt[v] + produced[v] + ahead - 1 + offset
                                over -= was > capacity >= usage[cell]
                        evicted = grown(evicted, n_evicted + 1)
                        evicted[n_evicted] = v
                        n_evicted += 1
                        if v == i:
                            break
                    if gone[i]:
                        continue
                    c = 1
                    sums = add_decode(sums, prompt[i] + produced[i] - 1)
                    held += 1
                else:
                    if not hybrid and sums.decode_requests > 0:
                        if group == WAITING:
                            break
                        refused = refused or fresh
                        continue
                    rest = prompt[i] + produced[i] - cached[i]
                    c = rest
                    if chunked:
                        c = min(c, own_batch - sums.tokens, own_prefill - sums.tokens)
                        c = min(c, hard_batch - sums.tokens, hard_prefill - sums.prefill_tokens)
                        if c < 1:
                            if group != ALL:
                                break
                            refused = refused or fresh
                            continue
                    else:
                        alone = sums.tokens + c > own_batch or sums.tokens + c > own_prefill
                        if (
                            sums.tokens + c > hard_batch
                            or sums.prefill_tokens + c > hard_prefill
                            or (alone and sums.tokens > 0)
                        ):
                            if group != ALL:
                                break
                            refused = refused or fresh
                            continue
                        closed = alone  # beyond the scheduler's own limit
                    if fresh:
                        size = n_running - lost + n_admitted + 1
                        fits = size <= hard_running
                        needed = prompt[i] + produced[i] + offset
                        if admission == RESERVE:
                            fits = fits and reserved + peak[i] <= capacity
                        elif admission == PROTECT:
                            fits = fits and held + needed <= threshold and size <= hard_batch
                        elif admission == LOOKAHEAD:
                            fits = fits and over == 0 and size <= hard_batch
                            ahead = estimate[i] - produced[i]
                            while fits and ahead >= 1:  # the last batch holds most
                                use = usage[batches + ahead] + needed + ahead - 1
                                fits = use <= capacity
                                ahead -= 1
                        fits = fits and held + needed <= capacity
                        if not fits:
                            closed = False
                            if group != ALL:
                                break
                            refused = True
                            continue
                        waiting = _pop(heap, waiting, keys)
                        admitted[n_admitted] = i
                        n_admitted += 1
                        held += needed
                        reserved += peak[i]
                        if admission == LOOKAHEAD:
                            for ahead in range(1, estimate[i] - produced[i] + 1):
                                usage[batches + ahead] += needed + ahead - 1
                    sums = add_prefill(sums, c, cached[i])
                in_batch[i] = batches + 1
                latest = max(latest, arrival[i])
                if entries == request.shape[0]:
                    request = grown(request, entries + 1)
                    tokens = grown(tokens, entries + 1)
                request[entries] = i
                tokens[entries] = c
                entries += 1

        # Evicted requests wait again; newly admitted ones run. Both orders are by priority.
        for k in range(evicted_before, n_evicted):
            i = evicted[k]
            gone[i] = True
            n_partial -= not decoding[i]
            cached[i] = 0
            decoding[i] = False
            if restart:
                produced[i] = 0
            key = counter if requeue_back else rank[i]
            counter += 1
            waiting = _push(heap, waiting, key, i, keys)
        if lost > 0:
            n_running = _without_gone(running, n_running, gone)

        if sums.tokens == 0:
            if next_arrival == n:
                outcome, about = STUCK, heap[0] if waiting > 0 else running[0]
                break
            now = arrival[by_arrival[next_arrival]]
            continue

        for k in range(n_admitted):
            i = admitted[k]
            position = n_running
            while position > 0 and priority[running[position - 1]] > priority[i]:
                running[position] = running[position - 1]
                position -= 1
            running[position] = i
            n_running += 1
            n_partial += 1

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
        freed = 0
        for k in range(first, entries):
            i = request[k]
            if not decoding[i]:
                cached[i] += tokens[k]
                if cached[i] < prompt[i] + produced[i]:
                    continue
                decoding[i] = True
                n_partial -= 1
            produced[i] += 1
            if produced[i] < output[i]:
                continue
            finished += 1
            if make_room:
                freed += prompt[i] + produced[i] - 1 + offset
            gone[i] = True
            held -= prompt[i] + produced[i] - 1 + offset
            reserved -= peak[i]
            if admission == LOOKAHEAD:
                for ahead in range(1, estimate[i] - produced[i] + 1):
                    cell = batches + ahead
                    was = usage[cell]
                    usage[cell] -= prompt[i] + produced[i] + ahead - 1 + offset
                    over -= was > capacity >= usage[cell]
        if admission == LOOKAHEAD:
            over -= usage[batches] > capacity
        if finished > 0:
            done += finished
            since = 0
            clearings = 0
            n_running = _without_gone(running, n_running, gone)
        else:
            since += 1
            if since > MAX_STALLED_BATCHES + longest:
                outcome = STALLED
                break

    size = prompt[about] + produced[about] if about >= 0 else 0
    return (
        outcome, about, size, batches, now, batch_offsets[: batches + 1], request[:entries],
        tokens[:entries], evicted_offsets[: batches + 1], evicted[:n_evicted], start[:batches],
        off_default,
    )  # fmt: skip
