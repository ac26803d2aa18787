"""Runs schedulers that work in windows (`optsched.policies.base.Windows`).

Between two decisions of a worker nothing that happens elsewhere changes what it does, so a window
is run to its end when it begins; the events of the loop are arrivals and ends of windows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.judge.life import EMPTY, add_decode, add_prefill, batch_time
from optsched.policies.engine.common import DONE, STALLED, STUCK, grown, tokens_left

ORDERS = {"arrival": 0, "remaining": 1, "total": 2}
ARRIVAL, REMAINING, TOTAL = 0, 1, 2


@njit(cache=True)
def _merged(a: int, b: int, key: Any, rank: Any, left: Any, right: Any) -> int:
    """Return the root of two skew heaps merged; -1 is the empty one."""
    if a < 0 or b < 0:
        return a if b < 0 else b
    if key[b] < key[a] or (key[b] == key[a] and rank[b] < rank[a]):
        a, b = b, a
    root = a
    while True:
        rest = right[a]
        right[a] = left[a]
        if rest < 0:
            left[a] = b
            return root
        if key[b] < key[rest] or (key[b] == key[rest] and rank[b] < rank[rest]):
            rest, b = b, rest
        left[a] = rest
        a = rest


@njit(cache=True)
def _unlink(i: int, w: int, first: Any, before: Any, after: Any) -> None:
    """Take a request out of the list of its worker."""
    if before[i] >= 0:
        after[before[i]] = after[i]
    else:
        first[w] = after[i]
    if after[i] >= 0:
        before[after[i]] = before[i]


@njit(cache=True)
def _priority(
    i: int,
    order: int,
    aging: float,
    arrival: Any,
    total: Any,
    every: int,
    offsets: Any,
    remaining: Any,
    seen: Any,
    produced: Any,
) -> float:
    """Return the key by which a worker's requests are ranked, least first."""
    age = aging * arrival[i]
    if order == REMAINING:
        return age + tokens_left(every, offsets, remaining, i, seen[i], produced[i])
    if order == TOTAL:
        return age + total[i]
    return age


@njit(cache=True)
def run(
    arrival: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    every: int,
    offsets: NDArray[np.int64],
    remaining: NDArray[np.float64],
    total: NDArray[np.int64],
    capacity: int,
    offset: int,
    max_batch: int,
    max_prefill: int,
    max_running: int,
    cost: NDArray[np.float64],
    rank: NDArray[np.int64],
    order: int,
    window: int,
    batch_size: int,
    workers: int,
    aging: float,
    restart: bool,
    patience: int,
) -> Any:
    """Run a scheduler to the end.

    Parameters
    ----------
    arrival, prompt, output : ndarray, shape (n,)
    every, offsets, remaining
        Columns of a `Forecast`.
    total : ndarray of int64, shape (n,)
        Predicted output tokens, for the order of that name.
    capacity, offset, max_batch, max_prefill, max_running : int
        M, the accounting's offset, C, P and R_max of each worker.
    cost : ndarray, shape (12,)
    rank : ndarray of int64, shape (n,)
        Place of each request by (arrival, index).
    order, window, batch_size, workers, aging
        As in `Windows`, the order by its number in ``ORDERS``.
    restart : bool
        Whether an eviction loses the tokens produced.
    patience : int
        Most batches without a completion under restart.

    Returns
    -------
    tuple
        As of `optsched.policies.engine.rules.run` (starts are always the default ones), then
        worker.
    """
    n = arrival.shape[0]
    by_arrival = np.empty(n, dtype=np.int64)
    for i in range(n):
        by_arrival[rank[i]] = i
    key = np.zeros(n)
    outdated = np.zeros(n, dtype=np.bool_)  # its key has risen since it was queued
    left = np.full(n, -1, dtype=np.int64)  # queues: one heap per worker
    right = np.full(n, -1, dtype=np.int64)
    queue = np.full(workers, -1, dtype=np.int64)
    before = np.full(n, -1, dtype=np.int64)  # those that hold KV: one list per worker
    after = np.full(n, -1, dtype=np.int64)
    first_holder = np.full(workers, -1, dtype=np.int64)
    holders = np.zeros(workers, dtype=np.int64)
    held = np.zeros(workers, dtype=np.int64)  # KV tokens, offset included
    cached = np.zeros(n, dtype=np.int64)
    produced = np.zeros(n, dtype=np.int64)
    seen = np.zeros(n, dtype=np.int64)  # most tokens ever produced
    assigned = np.zeros(workers, dtype=np.int64)  # unfinished requests
    until = np.full(workers, np.inf)  # end of the window that runs; inf: idle
    size = min(n, batch_size, max_batch, max_running)
    members = np.empty(size, dtype=np.int64)
    first_member = np.full(workers, -1, dtype=np.int64)  # of the window that runs
    next_member = np.full(n, -1, dtype=np.int64)
    inside = np.zeros(n, dtype=np.bool_)  # in the batch of a window
    quota = np.zeros(size, dtype=np.int64)  # tokens that a member has to produce
    step = np.empty(size, dtype=np.int64)

    batch_offsets = np.zeros(1024, dtype=np.int64)
    evicted_offsets = np.zeros(1024, dtype=np.int64)
    worker = np.zeros(1024, dtype=np.int64)
    request = np.empty(4096, dtype=np.int64)
    tokens = np.empty(4096, dtype=np.int64)
    evicted = np.empty(256, dtype=np.int64)
    batches = entries = n_evicted = 0
    outcome, about, blocked = DONE, -1, 0
    done = next_arrival = since = 0
    now = 0.0

    while done < n and outcome == DONE:
        now = until.min()
        if next_arrival < n:
            now = min(now, arrival[by_arrival[next_arrival]])
        for w in range(workers):  # windows that end now
            if until[w] > now:
                continue
            until[w] = np.inf
            i = first_member[w]
            first_member[w] = -1
            while i >= 0:
                j = next_member[i]
                inside[i] = False
                if produced[i] == output[i]:
                    done += 1
                    assigned[w] -= 1
                else:
                    key[i] = _priority(
                        i, order, aging, arrival, total, every, offsets, remaining, seen, produced
                    )
                    outdated[i] = False
                    left[i] = right[i] = -1
                    queue[w] = _merged(queue[w], i, key, rank, left, right)
                i = j
        while next_arrival < n and arrival[by_arrival[next_arrival]] <= now:
            i = by_arrival[next_arrival]
            next_arrival += 1
            w = 0
            for v in range(1, workers):
                if assigned[v] < assigned[w]:
                    w = v
            assigned[w] += 1
            key[i] = _priority(
                i, order, aging, arrival, total, every, offsets, remaining, seen, produced
            )
            queue[w] = _merged(queue[w], i, key, rank, left, right)

        for w in range(workers):
            if until[w] != np.inf or queue[w] < 0:
                continue
            # The batch: the first of the queue whose next tokens fit together.
            n_batch = 0
            need = 0
            while n_batch < size and queue[w] >= 0:
                i = queue[w]
                if outdated[i]:
                    queue[w] = _merged(left[i], right[i], key, rank, left, right)
                    key[i] = _priority(
                        i, order, aging, arrival, total, every, offsets, remaining, seen, produced
                    )
                    outdated[i] = False
                    left[i] = right[i] = -1
                    queue[w] = _merged(queue[w], i, key, rank, left, right)
                    continue
                need += prompt[i] + produced[i] + offset
                if need > capacity:
                    break
                queue[w] = _merged(left[i], right[i], key, rank, left, right)
                members[n_batch] = i
                next_member[i] = first_member[w]
                first_member[w] = i
                quota[n_batch] = window
                inside[i] = True
                n_batch += 1

            # Its window: prefills first, in as few batches as C and P allow, then decodes.
            clock = now
            position = 0  # of the members whose prefill was looked at
            ended = False
            while not ended:
                chosen = 0
                sums = EMPTY
                growth = 0
                prefill = False
                while position < n_batch:
                    i = members[position]
                    if cached[i] == 0 and quota[position] > 0:
                        c = prompt[i] + produced[i]
                        if sums.tokens + c > min(max_batch, max_prefill):
                            if not prefill:
                                outcome, about, blocked = STUCK, i, c
                            break
                        prefill = True
                        step[chosen] = position
                        chosen += 1
                        sums = add_prefill(sums, c, 0)
                        growth += c + offset
                    position += 1
                if outcome != DONE:
                    break
                staying = n_batch
                if not prefill:
                    own = 0  # KV of the members alone: those that it cannot hold will leave
                    for k in range(n_batch):
                        own += cached[members[k]] + offset
                        if quota[k] > 0:
                            step[chosen] = k
                            chosen += 1
                            growth += 1
                    while own + growth > capacity:
                        staying -= 1
                        own -= cached[members[staying]] + offset
                        if quota[staying] > 0:
                            chosen -= 1
                            growth -= 1
                    if chosen == 0:
                        break
                # Room for it: the lowest priority leaves, outside the batch first.
                fresh = chosen if prefill else 0
                while True:
                    victim = -1
                    h = first_holder[w]
                    if held[w] + growth <= capacity and holders[w] + fresh <= max_running:
                        h = -1
                    while h >= 0:
                        if not inside[h] and (
                            victim < 0
                            or key[h] > key[victim]
                            or (key[h] == key[victim] and rank[h] > rank[victim])
                        ):
                            victim = h
                        h = after[h]
                    if victim >= 0:
                        outdated[victim] = restart
                    elif n_batch > staying:
                        n_batch -= 1
                        victim = members[n_batch]
                    else:
                        break
                    held[w] -= cached[victim] + offset
                    holders[w] -= 1
                    _unlink(victim, w, first_holder, before, after)
                    cached[victim] = 0
                    if restart:
                        produced[victim] = 0
                    evicted = grown(evicted, n_evicted + 1)
                    evicted[n_evicted] = victim
                    n_evicted += 1

                request = grown(request, entries + chosen)
                tokens = grown(tokens, entries + chosen)
                for p in range(chosen):
                    k = step[p]
                    i = members[k]
                    request[entries + p] = i
                    if prefill:
                        tokens[entries + p] = cached[i] = prompt[i] + produced[i]
                        held[w] += cached[i] + offset
                        holders[w] += 1
                        before[i] = -1
                        after[i] = first_holder[w]
                        if first_holder[w] >= 0:
                            before[first_holder[w]] = i
                        first_holder[w] = i
                    else:
                        tokens[entries + p] = 1
                        sums = add_decode(sums, cached[i])
                        cached[i] += 1
                        held[w] += 1
                    quota[k] -= 1
                    produced[i] += 1
                    seen[i] = max(seen[i], produced[i])
                    if produced[i] == output[i]:
                        ended = True
                entries += chosen
                batches += 1
                since += 1
                batch_offsets = grown(batch_offsets, batches + 1)
                evicted_offsets = grown(evicted_offsets, batches + 1)
                worker = grown(worker, batches)
                batch_offsets[batches] = entries
                evicted_offsets[batches] = n_evicted
                worker[batches - 1] = w
                clock += batch_time(cost, sums)
            until[w] = clock
            if outcome != DONE:
                break
            for k in range(n_batch):  # what is done holds nothing in the next window
                i = members[k]
                if produced[i] == output[i]:
                    since = 0
                    held[w] -= cached[i] + offset
                    holders[w] -= 1
                    _unlink(i, w, first_holder, before, after)
                    cached[i] = 0
            if restart and since > patience:
                outcome, about = STALLED, members[0]
                break
    return (
        outcome, about, blocked, batches, now, batch_offsets[: batches + 1], request[:entries],
        tokens[:entries], evicted_offsets[: batches + 1], evicted[:n_evicted], np.empty(0), False,
        worker[:batches],
    )  # fmt: skip
