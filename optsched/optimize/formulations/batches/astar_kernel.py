"""The compiled core of infermax's exact search. Import it lazily: it loads numba."""

from typing import Any, NamedTuple

import numpy as np

from optsched.optimize.formulations.batches.network import DECODE, EVICT, PREFILL, STAY
from optsched.optimize.formulations.batches.queue_kernel import (
    BEST,
    ENTRIES,
    EXPANDED,
    GOAL,
    GROW,
    ROWS,
    RUNNING,
    SOLVED,
    Ints,
    enter,
    find,
    pop,
    push,
)
from optsched.problem.kernel import njit

__all__ = ["enter"]  # for `astar`

OWN, LEFT, RATE, HELD, MAY_FINISH = range(5)
"""Columns of `Tables.node`."""
BASE, DECODE_BASE, PREFILL_BASE = range(3)
"""Places of `Tables.fixed`."""
KV, TOKENS, PREFILL_TOKENS, RUNS, WORK, DECODES, PREFILLS, REFILLS = range(8)
"""What a batch holds: places of `Tables.limits`, first columns of `Tables.arcs` and of slots."""
TARGET, KIND = 8, 9
"""Further columns of `Tables.arcs`."""
NODE, ARC, FIRST, LAST, REST, TAKE = range(8, 14)
"""Further columns of slots (`_begin`)."""
IN_ALL, PREFILLING = range(2)
"""Roles of `Tables.weights`: batches needed in all, and those that prefill."""


class Tables(NamedTuple):
    """A network of V nodes and A arcs, and an objective.

    Arcs from node v begin at ``arc_start[v]``; `arcs` (shape (A, 10)) has what one request adds to
    a batch, the target and the kind. ``REFILLS`` counts refills that a decode could replace at no
    more cost. `node` (shape (V, 5)): own bound, tokens left, rate of the objective, KV held, and 1
    if the request may finish at once. `fixed`: base, decode_base and prefill_base. `weights` (shape
    (D, V)) and `largest` (shape (D, 2)), the max sum in a batch and the role, bound the number of
    batches. `limits` are those of a batch.
    """

    arc_start: Ints
    arcs: Ints
    limits: Ints
    node: Ints
    fixed: Ints
    weights: Ints
    largest: Ints
    makespan: bool
    hybrid: bool


class Search(NamedTuple):
    """States found so far, by request or by node.

    `table` is a hash table of the `rows`, `heap` (shape (H, 3)) a binary heap of (cost + bound, -
    cost, state). Of the `numbers`, ``BEST`` is the incumbent's cost, and ``GOAL`` its state or -1.
    """

    rows: Ints
    cost: Ints
    parent: Ints
    table: Ints
    heap: Ints
    numbers: Ints
    by_request: bool


# States as rows


@njit
def pack(counts: Ints, row: Ints, by_request: bool) -> None:
    """Write a state as a row (`Search.rows`): the number of requests in each node.

    With `by_request`, the shorter row if there are fewer requests than nodes: 1 + its node for each
    unfinished request, in order of nodes, and then 0 for each finished one.
    """
    if not by_request:
        row[:] = counts
        return

    at = 0
    for v in range(counts.shape[0]):
        for _ in range(counts[v]):
            row[at] = v + 1
            at += 1

    row[at:] = 0


@njit
def unpack(row: Ints, counts: Ints, by_request: bool) -> None:
    """Read the number of requests in each node from a row that `pack` has written."""
    if not by_request:
        counts[:] = row
        return

    counts[:] = 0
    for at in range(row.shape[0]):
        if row[at] > 0:  # else the request has finished
            counts[row[at] - 1] += 1


# Bound and batches


@njit
def remaining_cost(
    counts: Ints, node: Ints, weights: Ints, largest: Ints, fixed: Ints, makespan: bool, seen: Ints
) -> Any:
    """Return a lower bound on the cost of finishing the requests in a state.

    `optsched.optimize.formulations.batches.astar` has the proof. ``seen`` is scratch space of
    shape (V,).
    """
    own, chain, size = np.int64(0), np.int64(0), 0
    for v in range(counts.shape[0]):
        if counts[v] > 0:
            seen[size] = v
            size += 1
            own += counts[v] * node[v, OWN]
            chain = max(chain, node[v, LEFT])

    if not makespan or size == 0:
        return own

    batches, prefilling = chain, np.int64(0)
    for d in range(weights.shape[0]):
        total = np.int64(0)
        for q in range(size):
            total += counts[seen[q]] * weights[d, seen[q]]

        need = -(-total // largest[d, 0])
        if largest[d, 1] == IN_ALL:
            batches = max(batches, need)
        else:
            prefilling = max(prefilling, need)

    batches = max(batches, prefilling)
    base, decode_base, prefill_base = fixed[BASE], fixed[DECODE_BASE], fixed[PREFILL_BASE]
    if prefill_base < decode_base:
        return own + (base + prefill_base) * batches

    rest = batches - prefilling
    return own + base * batches + prefill_base * prefilling + decode_base * rest


# The batches of a state. Their arrays are passed one by one: taking them out of a tuple counts
# references, once per batch.


@njit
def _begin(counts: Ints, arc_start: Ints, slots: Ints) -> int:
    """Make a slot for every arc of an occupied node. Return the number of slots.

    A slot takes ``TAKE`` of the ``REST`` requests that the slots before it leave (-1: none yet).
    Its sums are those of the slots before it.
    """
    total = 0
    for v in range(counts.shape[0]):
        if counts[v] == 0:
            continue

        begin, end = arc_start[v], arc_start[v + 1]
        slots[total, REST] = counts[v]
        for a in range(begin, end):
            slots[total, NODE] = v
            slots[total, ARC] = a
            slots[total, FIRST] = a == begin
            slots[total, LAST] = a == end - 1
            total += 1

    slots[0, TAKE] = -1
    return total


@njit
def _next(s: int, total: int, slots: Ints, arcs: Ints, limits: Ints, hybrid: bool) -> bool:
    """Go on from a slot to the next batch within the limits. Return whether there is one."""
    while s >= 0:
        if s == total:
            if slots[s, TOKENS] > 0:
                return True

            s -= 1
            continue

        last = slots[s, LAST] == 1
        if slots[s, TAKE] < 0:
            if slots[s, FIRST] == 0:
                slots[s, REST] = slots[s - 1, REST] - slots[s - 1, TAKE]

            x = slots[s, REST] if last else 0
        elif last or slots[s, TAKE] >= slots[s, REST]:
            s -= 1
            continue
        else:
            x = slots[s, TAKE] + 1

        slots[s, TAKE] = x
        a = slots[s, ARC]
        beyond = False
        for k in range(8):
            slots[s + 1, k] = slots[s, k] + x * arcs[a, k]
            beyond |= slots[s + 1, k] > limits[k]

        # A refill beside a decode is left out if a decode instead is no more work.
        apart = slots[s + 1, REFILLS] > 0 or (not hybrid and slots[s + 1, PREFILLS] > 0)
        if beyond or (apart and slots[s + 1, DECODES] > 0):
            if last or x > 0:  # more of the same only makes it worse
                s -= 1

            continue

        s += 1
        slots[s, TAKE] = -1

    return False


@njit
def _length(slots: Ints, total: int, fixed: Ints) -> Any:
    """Return the time of a batch."""
    length = fixed[BASE] + slots[total, WORK]
    if slots[total, DECODES] > 0:
        length += fixed[DECODE_BASE]
    if slots[total, PREFILLS] > 0:
        length += fixed[PREFILL_BASE]

    return length


@njit
def _needless(
    slots: Ints, total: int, arcs: Ints, node: Ints, limits: Ints, fixed: Ints, makespan: bool
) -> bool:
    """Whether another batch is no worse: it evicts only for room, and adds last tokens that fit."""
    refills, prefills = slots[total, REFILLS], slots[total, PREFILLS]
    if refills > 0 and refills == prefills and fixed[DECODE_BASE] <= fixed[PREFILL_BASE]:
        return True

    kv, runs = slots[total, KV], slots[total, RUNS]
    for q in range(total):
        if slots[q, TAKE] == 0:
            continue

        v, a = slots[q, NODE], slots[q, ARC]
        kind = arcs[a, KIND]
        if kind == EVICT:
            if kv + node[v, HELD] <= limits[KV] and runs < limits[RUNS]:
                return True
        elif kind == STAY and makespan and node[v, MAY_FINISH] == 1 and slots[q, LAST] == 0:
            phase = arcs[a + 1, KIND]
            if (
                (phase == DECODE and slots[total, DECODES] > 0)
                or (phase == PREFILL and prefills > 0)
            ) and (
                kv - arcs[a, KV] + arcs[a + 1, KV] <= limits[KV]
                and runs - arcs[a, RUNS] + arcs[a + 1, RUNS] <= limits[RUNS]
                and slots[total, TOKENS] + arcs[a + 1, TOKENS] <= limits[TOKENS]
                and slots[total, PREFILL_TOKENS] + arcs[a + 1, PREFILL_TOKENS]
                <= limits[PREFILL_TOKENS]
            ):
                return True

    return False


@njit
def _after(slots: Ints, total: int, arcs: Ints, counts: Ints) -> bool:
    """Set the number of requests in each node after a batch. Return whether any are left."""
    counts[:] = 0
    unfinished = False
    for q in range(total):
        if slots[q, TAKE] > 0:
            target = arcs[slots[q, ARC], TARGET]
            if target >= 0:
                counts[target] += slots[q, TAKE]
                unfinished = True

    return unfinished


@njit
def _rate(counts: Ints, node: Ints, makespan: bool) -> Any:
    """Return how often a batch's time counts in a state."""
    rate = np.int64(makespan)
    for v in range(counts.shape[0]):
        rate += counts[v] * node[v, RATE]

    return rate


@njit
def step(before: Ints, after: Ints, price: int, tables: Tables) -> Any:
    """Return a batch, by arc, between two states at ``price``, found again since none is stored."""
    arcs, limits, fixed = tables.arcs, tables.limits, tables.fixed
    slots = np.zeros((arcs.shape[0] + 1, 14), np.int64)
    counts, found = np.empty_like(before), np.zeros(arcs.shape[0], np.int64)
    rate = _rate(before, tables.node, tables.makespan)
    total, s = _begin(before, tables.arc_start, slots), 0

    while _next(s, total, slots, arcs, limits, tables.hybrid):
        s = total - 1
        if _length(slots, total, fixed) * rate <= price:
            _after(slots, total, arcs, counts)
            if (counts == after).all():
                found[:] = 0
                for q in range(total):
                    found[slots[q, ARC]] = slots[q, TAKE]

    return found


@njit
def expand(limit: int, search: Search, tables: Tables) -> int:
    """Expand up to ``limit`` states, best first."""
    rows, cost, parent, table, heap, numbers, by_request = search
    arc_start, arcs, limits, node, fixed, weights, largest, makespan, hybrid = tables
    counts = np.empty(node.shape[0], np.int64)
    fresh, scratch = np.empty_like(counts), np.empty_like(counts)
    row = np.empty(rows.shape[1], rows.dtype)
    slots = np.zeros((arcs.shape[0] + 1, 14), np.int64)

    for _ in range(limit):
        if numbers[ENTRIES] == 0 or heap[0, 0] >= numbers[BEST]:
            return SOLVED

        f_here, g, state = heap[0, 0], -heap[0, 1], heap[0, 2]
        pop(heap, numbers[ENTRIES])
        numbers[ENTRIES] -= 1
        if g > cost[state]:
            continue

        numbers[EXPANDED] += 1
        unpack(rows[state], counts, by_request)
        rate = _rate(counts, node, makespan)
        total, s = _begin(counts, arc_start, slots), 0

        while _next(s, total, slots, arcs, limits, hybrid):
            s = total - 1
            g2 = g + _length(slots, total, fixed) * rate
            if g2 >= numbers[BEST] or _needless(slots, total, arcs, node, limits, fixed, makespan):
                continue

            unfinished = _after(slots, total, arcs, fresh)
            pack(fresh, row, by_request)
            place = find(row, rows, table)
            known = table[place]
            if known >= 0 and g2 >= cost[known]:
                continue

            f = g2
            if unfinished:
                f += remaining_cost(fresh, node, weights, largest, fixed, makespan, scratch)
                if f >= numbers[BEST]:
                    continue

            if known < 0:
                table[place] = numbers[ROWS]
                known = numbers[ROWS]
                rows[known, :] = row
                numbers[ROWS] += 1

            cost[known] = g2
            parent[known] = state
            if not unfinished:
                numbers[BEST] = g2
                numbers[GOAL] = known
                continue

            push(heap, numbers[ENTRIES], f, -g2, known)
            numbers[ENTRIES] += 1
            if (
                numbers[ENTRIES] + 3 >= heap.shape[0]
                or numbers[ROWS] + 1 >= rows.shape[0]
                or 2 * numbers[ROWS] >= table.shape[0]
            ):
                # The state is expanded again when there is room.
                push(heap, numbers[ENTRIES], f_here, -g, state)
                numbers[ENTRIES] += 1
                return GROW

    return RUNNING
