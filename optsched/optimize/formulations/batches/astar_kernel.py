"""The compiled core of infermax's exact search. Import it lazily: it loads numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

STAY, EVICT, DECODE, PREFILL, REFILL = 0, 1, 2, 3, 4

RUNNING, SOLVED, GROW, FULL = 0, 1, 2, 3
"""What `expand` comes back with: slice used up, queue empty (or nothing left below the
incumbent), arrays too small, state limit reached."""

# Places of `numbers`, the search's own counters.
STATES, HEAP, BEST, GOAL, EXPANDED = 0, 1, 2, 3, 4


@njit(cache=True)
def _pack(counts: Any, row: Any, by_request: bool) -> None:
    if not by_request:
        for v in range(counts.shape[0]):
            row[v] = counts[v]
        return
    at = 0
    for v in range(counts.shape[0]):
        for _ in range(counts[v]):
            row[at] = v + 1
            at += 1
    while at < row.shape[0]:
        row[at] = 0
        at += 1


@njit(cache=True)
def _unpack(row: Any, counts: Any, by_request: bool) -> None:
    if not by_request:
        for v in range(counts.shape[0]):
            counts[v] = row[v]
        return
    counts[:] = 0
    for at in range(row.shape[0]):
        if row[at] > 0:
            counts[row[at] - 1] += 1


@njit(cache=True)
def _hash(row: Any) -> Any:
    h = np.uint64(1469598103934665603)
    for at in range(row.shape[0]):
        h = (h ^ np.uint64(row[at])) * np.uint64(1099511628211)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    return h


@njit(cache=True)
def _find(row: Any, rows: Any, table: Any) -> Any:
    """Return the state of a row, or -1 - (free place in the table)."""
    mask = table.shape[0] - 1
    at = np.int64(_hash(row) & np.uint64(mask))
    while table[at] >= 0:
        known = table[at]
        same = True
        for k in range(row.shape[0]):
            if rows[known, k] != row[k]:
                same = False
                break
        if same:
            return known
        at = (at + 1) & mask
    return -1 - at


@njit(cache=True)
def rehash(rows: Any, states: int, table: Any) -> None:
    """Enter all states into an emptied table."""
    mask = table.shape[0] - 1
    table[:] = -1
    for state in range(states):
        at = np.int64(_hash(rows[state]) & np.uint64(mask))
        while table[at] >= 0:
            at = (at + 1) & mask
        table[at] = state


@njit(cache=True)
def _before(fa: int, ga: int, fb: int, gb: int) -> bool:
    return fa < fb or (fa == fb and ga > gb)


@njit(cache=True)
def _push(heap_f: Any, heap_g: Any, heap_s: Any, size: int, f: int, g: int, s: int) -> None:
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if not _before(f, g, heap_f[up], heap_g[up]):
            break
        heap_f[at] = heap_f[up]
        heap_g[at] = heap_g[up]
        heap_s[at] = heap_s[up]
        at = up
    heap_f[at] = f
    heap_g[at] = g
    heap_s[at] = s


@njit(cache=True)
def _pop(heap_f: Any, heap_g: Any, heap_s: Any, size: int) -> None:
    """Remove the first entry; ``size`` counts it still."""
    last = size - 1
    f, g, s = heap_f[last], heap_g[last], heap_s[last]
    at = 0
    while True:
        down = 2 * at + 1
        if down >= last:
            break
        if down + 1 < last and _before(
            heap_f[down + 1], heap_g[down + 1], heap_f[down], heap_g[down]
        ):
            down += 1
        if not _before(heap_f[down], heap_g[down], f, g):
            break
        heap_f[at] = heap_f[down]
        heap_g[at] = heap_g[down]
        heap_s[at] = heap_s[down]
        at = down
    heap_f[at] = f
    heap_g[at] = g
    heap_s[at] = s


@njit(cache=True)
def remaining_cost(
    counts: Any, node: Any, fixed: Any, weights: Any, most: Any, prefills: Any,
    prefill_most: Any, decodes: Any, occupied: Any,
) -> Any:  # fmt: skip
    """Return a lower bound on the cost of finishing the requests in a state.

    See `optsched.optimize.formulations.batches.astar` for its proof. ``occupied`` is scratch, shape
    (V,).
    """
    own = np.int64(0)
    chain = np.int64(0)
    size = 0
    for v in range(counts.shape[0]):
        if counts[v] > 0:
            occupied[size] = v
            size += 1
            own += counts[v] * node[v, 0]
            if node[v, 1] > chain:
                chain = node[v, 1]
    if fixed[3] == 0:
        return own
    if chain == 0:
        return np.int64(0)
    batches = chain
    decoding = np.int64(0)
    for d in range(weights.shape[0]):
        total = np.int64(0)
        part = np.int64(0)
        for q in range(size):
            v = occupied[q]
            total += counts[v] * weights[d, v]
            part += counts[v] * decodes[d, v]
        need = -(-total // most[d])
        if need > batches:
            batches = need
        need = -(-part // most[d])
        if need > decoding:
            decoding = need
    prefilling = np.int64(0)
    for d in range(prefills.shape[0]):
        total = np.int64(0)
        for q in range(size):
            v = occupied[q]
            total += counts[v] * prefills[d, v]
        need = -(-total // prefill_most[d])
        if need > prefilling:
            prefilling = need
    base, decode_base, prefill_base, swap = fixed[0], fixed[1], fixed[2], fixed[4]
    if prefilling > batches:
        batches = prefilling
    if prefill_base < decode_base:
        return own + base * batches + prefill_base * batches
    rest = batches - prefilling
    cost = own + base * batches + prefill_base * prefilling + decode_base * rest
    if decoding > rest:
        cost += swap * (decoding - rest)
    return cost


@njit(cache=True)
def expand(
    limit: int, rows: Any, cost: Any, parent: Any, table: Any, heap_f: Any, heap_g: Any,
    heap_s: Any, numbers: Any, by_request: bool, arc_start: Any, arcs: Any, node: Any,
    fixed: Any, weights: Any, most: Any, prefills: Any, prefill_most: Any, decodes: Any,
    limits: Any,
) -> int:  # fmt: skip
    """Expand up to ``limit`` states, best first.

    Parameters
    ----------
    limit : int
    rows, cost, parent, table : arrays
        States found so far, their least cost, where it came from, and a hash table of rows.
    heap_f, heap_g, heap_s : arrays
        Binary heap of (cost + bound, cost, state).
    numbers : ndarray of int64
        Counters, see `STATES` and the like; ``BEST`` is the incumbent's cost.
    by_request : bool
        Whether a row lists nodes or counts them.
    arc_start : ndarray, shape (V + 1,)
    arcs : ndarray, shape (A, 6)
        target, kind, tokens, kv, work, 1 where decoding costs no more than this refill.
    node : ndarray, shape (V, 5)
        Own bound, tokens left, rate of the objective, KV held, 1 where it may finish at once
        without harm (one token left).
    fixed : ndarray
        base, decode_base, prefill_base, 1 for makespan, cost of a decode batch spared by refills.
    limits : ndarray
        M, C, P, R_max, hybrid.
    """
    nodes = node.shape[0]
    width = rows.shape[1]
    counts = np.empty(nodes, dtype=np.int64)
    fresh = np.empty(nodes, dtype=np.int64)
    occupied = np.empty(nodes, dtype=np.int64)
    row = np.empty(width, dtype=rows.dtype)
    slots = arcs.shape[0] + 1
    slot_arc = np.empty(slots, dtype=np.int64)
    slot_first = np.empty(slots, dtype=np.bool_)
    slot_last = np.empty(slots, dtype=np.bool_)
    left = np.empty(slots + 1, dtype=np.int64)
    take = np.empty(slots + 1, dtype=np.int64)
    kv = np.zeros(slots + 1, dtype=np.int64)
    tokens = np.zeros(slots + 1, dtype=np.int64)
    prefill = np.zeros(slots + 1, dtype=np.int64)
    running = np.zeros(slots + 1, dtype=np.int64)
    work = np.zeros(slots + 1, dtype=np.int64)
    n_decode = np.zeros(slots + 1, dtype=np.int64)
    n_prefill = np.zeros(slots + 1, dtype=np.int64)
    n_refill = np.zeros(slots + 1, dtype=np.int64)
    room, most_tokens, most_prefill, most_running = limits[0], limits[1], limits[2], limits[3]
    hybrid = limits[4] == 1
    base, decode_base, prefill_base = fixed[0], fixed[1], fixed[2]
    makespan = fixed[3] == 1

    for _ in range(limit):
        if numbers[HEAP] == 0 or heap_f[0] >= numbers[BEST]:
            return SOLVED
        f_here, g, state = heap_f[0], heap_g[0], heap_s[0]
        _pop(heap_f, heap_g, heap_s, numbers[HEAP])
        numbers[HEAP] -= 1
        if g > cost[state]:
            continue
        numbers[EXPANDED] += 1
        _unpack(rows[state], counts, by_request)
        rate = np.int64(1) if makespan else np.int64(0)
        total = 0
        for v in range(nodes):
            if counts[v] == 0:
                continue
            if not makespan:
                rate += counts[v] * node[v, 2]
            for a in range(arc_start[v], arc_start[v + 1]):
                slot_arc[total] = a
                slot_first[total] = a == arc_start[v]
                slot_last[total] = a == arc_start[v + 1] - 1
                if slot_first[total]:
                    left[total] = counts[v]
                total += 1
        s = 0
        take[0] = -1
        while s >= 0:
            if s == total:
                s -= 1
                if tokens[total] == 0:
                    continue
                nd, np_, nr = n_decode[total], n_prefill[total], n_refill[total]
                if nr > 0 and (nd > 0 or (np_ == nr and decode_base <= prefill_base)):
                    continue
                length = base + work[total]
                if nd > 0:
                    length += decode_base
                if np_ > 0:
                    length += prefill_base
                g2 = g + length * rate
                if g2 >= numbers[BEST]:
                    continue
                # Evictions that make no room are put off; what could finish now, does.
                skip = False
                for q in range(total):
                    if take[q] == 0:
                        continue
                    a = slot_arc[q]
                    kind = arcs[a, 1]
                    if kind == EVICT:
                        v = _source(arc_start, a)
                        if kv[total] + node[v, 3] <= room and running[total] < most_running:
                            skip = True
                            break
                    elif kind == STAY and makespan:
                        v = _source(arc_start, a)
                        if node[v, 4] == 1:
                            b = a + 1
                            if b < arc_start[v + 1] and (
                                (arcs[b, 1] == DECODE and nd > 0)
                                or (arcs[b, 1] == PREFILL and np_ > 0)
                            ):
                                grown = kv[total] - arcs[a, 3] + arcs[b, 3]
                                more = running[total] + (arcs[a, 3] == 0)
                                extra = arcs[b, 2] if arcs[b, 1] == PREFILL else 0
                                if (
                                    grown <= room
                                    and more <= most_running
                                    and tokens[total] + arcs[b, 2] <= most_tokens
                                    and prefill[total] + extra <= most_prefill
                                ):
                                    skip = True
                                    break
                if skip:
                    continue
                fresh[:] = 0
                unfinished = False
                for q in range(total):
                    if take[q] > 0:
                        target = arcs[slot_arc[q], 0]
                        if target >= 0:
                            fresh[target] += take[q]
                            unfinished = True
                _pack(fresh, row, by_request)
                known = _find(row, rows, table)
                if known >= 0 and g2 >= cost[known]:
                    continue
                f = g2
                if unfinished:
                    f += remaining_cost(
                        fresh, node, fixed, weights, most, prefills, prefill_most, decodes,
                        occupied,
                    )  # fmt: skip
                    if f >= numbers[BEST]:
                        continue
                if known < 0:
                    new = numbers[STATES]
                    table[-1 - known] = new
                    rows[new, :] = row
                    numbers[STATES] += 1
                    known = new
                cost[known] = g2
                parent[known] = state
                if not unfinished:
                    numbers[BEST] = g2
                    numbers[GOAL] = known
                    continue
                _push(heap_f, heap_g, heap_s, numbers[HEAP], f, g2, known)
                numbers[HEAP] += 1
                if (
                    numbers[HEAP] + 2 >= heap_f.shape[0]
                    or numbers[STATES] + 1 >= rows.shape[0]
                    or 2 * numbers[STATES] >= table.shape[0]
                ):
                    # Expand this state once more when there is room again.
                    _push(heap_f, heap_g, heap_s, numbers[HEAP], f_here, g, state)
                    numbers[HEAP] += 1
                    return GROW
                continue
            if take[s] < 0:
                if not slot_first[s]:
                    left[s] = left[s - 1] - take[s - 1]
                take[s] = left[s] if slot_last[s] else 0
            elif slot_last[s] or take[s] >= left[s]:
                s -= 1
                continue
            else:
                take[s] += 1
            a, x = slot_arc[s], take[s]
            kind = arcs[a, 1]
            kv[s + 1] = kv[s] + x * arcs[a, 3]
            tokens[s + 1] = tokens[s] + x * arcs[a, 2]
            work[s + 1] = work[s] + x * arcs[a, 4]
            running[s + 1] = running[s] + (x if arcs[a, 3] > 0 else 0)
            n_decode[s + 1] = n_decode[s] + (x if kind == DECODE else 0)
            n_prefill[s + 1] = n_prefill[s] + (x if kind >= PREFILL else 0)
            n_refill[s + 1] = n_refill[s] + (x if kind == REFILL and arcs[a, 5] == 1 else 0)
            prefill[s + 1] = prefill[s] + (x * arcs[a, 2] if kind >= PREFILL else 0)
            if (
                kv[s + 1] > room
                or tokens[s + 1] > most_tokens
                or prefill[s + 1] > most_prefill
                or running[s + 1] > most_running
                or (not hybrid and n_decode[s + 1] > 0 and n_prefill[s + 1] > 0)
                or (n_refill[s + 1] > 0 and n_decode[s + 1] > 0)
            ):
                if slot_last[s] or x > 0:  # more of the same only makes it worse
                    s -= 1
                continue
            s += 1
            take[s] = -1
    return RUNNING


@njit(cache=True)
def _source(arc_start: Any, a: int) -> int:
    low, high = 0, arc_start.shape[0] - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if arc_start[middle] <= a:
            low = middle
        else:
            high = middle
    return low


def first_state(counts: Any, rows: Any, table: Any, by_request: bool) -> None:
    """Enter the first state."""
    row = np.empty(rows.shape[1], dtype=rows.dtype)
    _pack(counts, row, by_request)
    place = _find(row, rows, table)
    rows[0, :] = row
    table[-1 - place] = 0


def counts_of(row: Any, nodes: int, by_request: bool) -> Any:
    """Return the number of requests in each node for a state's row."""
    counts = np.zeros(nodes, dtype=np.int64)
    _unpack(row, counts, by_request)
    return counts
