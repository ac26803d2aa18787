"""Compiled loops of `optsched.optimize.ramp.finish`: labels, tables of counters and dominance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.optimize.ramp.graph import INFINITE, Paths
from optsched.problem.kernel import njit

TOP = 255
"""An entry of the tables that is beyond the cutoff."""
NEVER = 2**62
"""The estimate of a label that is not kept."""
DONE, FULL = 0, 1
"""Whether there was room for all labels."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


class Kinds(NamedTuple):
    """The kinds of requests, the capacity, and the round at which paths join the clock."""

    cost: Any
    copies: Any
    peak: Any
    output: Any
    ready: Any
    larger: Any  # by kind, those that are at least as large, the nearest first, then -1
    sign: Any  # random numbers, whose sum over the placed requests is a label's key
    capacity: Any
    clock: Any


class Layer(NamedTuple):
    """Labels after so many placements, by row."""

    node: Any
    rounds: Any  # cost in rounds
    clock: Any  # the present round, or -1 without a clock
    need: Any  # the least clock at which the label may join
    rest: Any  # how many of each kind are left
    tokens: Any  # live tokens now, one round earlier, ...
    key: Any
    after: Any  # the next row of the same key
    kept: Any
    parent: Any
    kind: Any
    passed: Any  # rounds since the placement before
    count: Any  # rows; rows kept


class Costs(NamedTuple):
    """What the labels of a graph cost, and the kinds that they may place."""

    value: Any  # the least cost of each label
    kind: Any  # the kind that has it
    second: Any  # the least cost of its other kinds
    start: Any  # where the label's kinds start in ``kinds``
    kinds: Any
    cost: Any  # of each kind


class Scratch(NamedTuple):
    """The tables, a hash table of the keys of a layer, and what following one label needs."""

    table: Any  # of single counters, in units
    unit: Any
    slots: Any
    stack: Any
    never: Any  # by kind, 255 where none is left
    once: Any  # by kind, 255 where one is left
    limit: Any  # the cost above which no label is made, its bucket, labels made, most (0: all)
    counts: Any  # labels made, by bucket of their estimate


@njit(nogil=True)
def fill_tables(
    first: int, last: int, graph: Paths, labels: Costs, unit: int, out: Any
) -> None:  # fmt: skip
    """Fill in the tables of single counters for the nodes ``last - 1`` down to ``first``.

    A row of ``out`` holds the bytes of all kinds placed never, then those of all kinds placed once.
    Each arc adds what it costs above the node's plain cost, in units and rounded down.
    """
    kinds = labels.cost.shape[0]
    row = np.empty(2 * kinds, dtype=np.uint8)
    for u in range(last - 1, first - 1, -1):
        row[:] = TOP
        here = np.int64(graph.backward[u])
        for a in range(graph.arc_start[u], graph.arc_start[u + 1]):
            v, label = graph.arc_target[a], graph.arc_label[a]
            more = np.int64(graph.backward[v]) - here
            least = more + labels.value[label]
            if here >= INFINITE or graph.backward[v] >= INFINITE or least >= TOP * unit:
                continue
            best = labels.kind[label]
            if best >= 0:
                other = (more + labels.second[label]) // unit
                without = min(np.int64(row[best]), other + out[v, best])
                later = min(np.int64(row[kinds + best]), other + out[v, kinds + best])
            add = np.uint8(least // unit)
            room = np.uint8(TOP - add)
            for j in range(2 * kinds):  # in bytes, so that it is done for many kinds at once
                entry = out[v, j]
                entry = room if entry > room else entry
                entry = np.uint8(entry + add)
                row[j] = entry if entry < row[j] else row[j]
            if best >= 0:
                row[best], row[kinds + best] = without, later
                for i in range(labels.start[label], labels.start[label + 1]):
                    k = labels.kinds[i]
                    now = (more + labels.cost[k]) // unit + out[v, k]
                    row[kinds + k] = min(np.int64(row[kinds + k]), now)
        out[u] = row


@njit(nogil=True)
def kinds_by_label(mask: Any) -> Any:
    """Return where the kinds of each label start, and these kinds."""
    start = np.zeros(mask.shape[0] + 1, dtype=np.int64)
    for label in range(mask.shape[0]):
        start[label + 1] = start[label]
        bits = mask[label]
        while bits != _ZERO:
            bits &= bits - _ONE
            start[label + 1] += 1
    kinds = np.empty(start[-1], dtype=np.uint8)
    for label in range(mask.shape[0]):
        at = start[label]
        for k in range(64 if mask[label] else 0):
            if (mask[label] >> np.uint64(k)) & _ONE:
                kinds[at] = k
                at += 1
    return start, kinds


@njit(nogil=True)
def second_costs(mask: Any, kind: Any, cost: Any) -> Any:
    """Return the least cost of each label's kinds without the one of least cost."""
    second = np.full(kind.shape[0], INFINITE, dtype=np.int64)
    for label in range(kind.shape[0]):
        for k in range(cost.shape[0]):
            if (mask[label] >> np.uint64(k)) & _ONE and k != kind[label]:
                second[label] = min(second[label], cost[k])
    return second


@njit(nogil=True, inline="always")
def _extra(node: int, scratch: Scratch) -> Any:
    """Return what the tables add to the cost to the end for what is left of each kind."""
    best = np.uint8(0)
    for k in range(scratch.never.shape[0]):
        entry = (scratch.table[node, 0, k] & scratch.never[k]) | (
            scratch.table[node, 1, k] & scratch.once[k]
        )
        best = entry if entry > best else best
    return np.int64(best) * scratch.unit


@njit(nogil=True, inline="always")
def _left(k: int, rest: Any, scratch: Scratch) -> None:
    """Note how many of kind k are left."""
    scratch.never[k] = 255 if rest == 0 else 0
    scratch.once[k] = 255 if rest == 1 else 0


@njit(nogil=True, inline="always")
def _waits(a: int, b: int, m: int, layer: Layer, join: int) -> Any:
    """Return the rounds that label a passes to be where label b is, or -1 if it cannot."""
    spare = np.int64(layer.rounds[b]) - layer.rounds[a]
    waits = spare // m
    need = np.int64(layer.need[a])
    if spare < 0:
        waits = -1
    elif layer.clock[a] >= 0:
        exact = np.int64(layer.clock[a]) - layer.clock[b]
        waits = exact if layer.clock[b] >= 0 and 0 <= exact <= waits else -1
    elif layer.clock[b] >= 0:
        before = waits - (join - layer.clock[b])  # rounds before the label joins
        waits = waits if before >= 0 and need - before <= join else -1
    elif max(need - waits, join) > layer.need[b]:
        waits = -1
    return waits


@njit(nogil=True, inline="always")
def _dominates(a: int, b: int, m: int, layer: Layer, join: int) -> bool:
    """Whether conditions 1 and 2 of the module's text hold for some number of rounds."""
    waits = _waits(a, b, m, layer, join)
    width = layer.tokens.shape[1]
    below = waits >= 0
    j = 0
    while below and j + waits < width:
        below = layer.tokens[a, j + waits] <= layer.tokens[b, j]
        j += 1
    return below


@njit(nogil=True, inline="always")
def _left_alike(a: int, b: int, j: int, i: int, layer: Layer) -> bool:
    """Whether the same is left of labels a and b, but one more of kind j and one less of i."""
    alike = True
    for k in range(layer.rest.shape[1]):
        alike &= layer.rest[a, k] == layer.rest[b, k] + (k == j) - (k == i)
    return alike


@njit(nogil=True, inline="always")
def _slot(key: Any, layer: Layer, slots: Any) -> Any:
    """Return the slot of the labels with a key, or the empty one where they would be."""
    last = np.uint64(slots.shape[0] - 1)
    at = (key ^ (key >> np.uint64(29))) & last
    while slots[at] >= 0 and layer.key[slots[at]] != key:
        at = (at + _ONE) & last
    return np.int64(at)


@njit(nogil=True, inline="always")
def _enter(m: int, layer: Layer, kinds: Kinds, slots: Any) -> None:
    """Keep the label in the row after the last one, unless another deletes it.

    Those that it deletes are no longer kept.
    """
    new = layer.count[0]
    at = _slot(layer.key[new], layer, slots)
    row = slots[at]
    wanted = True
    while row >= 0 and wanted:
        if layer.kept[row]:
            if _dominates(row, new, m, layer, kinds.clock):
                wanted = not _left_alike(row, new, -1, -1, layer)
            elif _dominates(new, row, m, layer, kinds.clock) and _left_alike(
                row, new, -1, -1, layer
            ):
                layer.kept[row] = False
                layer.count[1] -= 1
        row = layer.after[row]
    if wanted:
        layer.after[new] = slots[at]
        slots[at] = new
        layer.kept[new] = True
        layer.count[0] += 1
        layer.count[1] += 1


@njit(nogil=True, inline="always")
def _write(
    e: int, v: int, k: int, so_far: Any, old: Layer, new: Layer, kinds: Kinds
) -> None:  # fmt: skip
    """Write the label that places kind k after label e into the row after the last one."""
    cost, passed, clock = so_far
    at = new.count[0]
    new.node[at], new.rounds[at], new.clock[at] = v, cost, clock
    need = max(np.int64(old.need[e]) - passed, kinds.clock)
    new.need[at] = max(need, kinds.ready[k]) if clock < 0 else need
    for j in range(kinds.copies.shape[0]):
        new.rest[at, j] = old.rest[e, j]
    new.rest[at, k] -= 1
    width = new.tokens.shape[1]
    for j in range(width):
        new.tokens[at, j] = old.tokens[e, j + passed] if j + passed < width else 0
    for j in range(kinds.output[k]):
        new.tokens[at, j] += kinds.peak[k] - j
    new.key[at] = old.key[e] + kinds.sign[k]
    new.parent[at], new.kind[at], new.passed[at] = e, k, passed


@njit(nogil=True, inline="always")
def _lower(cost: Any, graph: Paths, scratch: Scratch) -> None:
    """Count a label of this estimate, and lower the limit if there are more than wanted."""
    limit, counts = scratch.limit, scratch.counts
    low = np.int64(graph.backward[0])
    size = (graph.cutoff - low) // counts.shape[0] + 1
    counts[min(max(cost - low, 0) // size, counts.shape[0] - 1)] += 1
    limit[2] += 1
    while limit[1] > 0 and limit[2] - counts[limit[1]] >= limit[3]:
        limit[2] -= counts[limit[1]]
        limit[1] -= 1
        limit[0] = low + (limit[1] + 1) * size - 1


@njit(nogil=True, inline="always")
def _place(
    e: int, a: int, so_far: Any, m: int, old: Layer, new: Layer, graph: Paths, kinds: Kinds,
    scratch: Scratch
) -> int:  # fmt: skip
    """Make the labels that place a request by arc a, some rounds after label e."""
    cost, passed, reduced, clock = so_far
    v = graph.arc_target[a]
    spare = scratch.limit[0] - reduced - graph.backward[v]
    room = np.int64(kinds.capacity)
    if passed < old.tokens.shape[1]:
        room -= old.tokens[e, passed]
    bits = graph.mask[graph.arc_label[a]]
    k = -1
    while bits != _ZERO:
        k += 1
        take = bits & _ONE
        bits >>= _ONE
        rest = old.rest[e, k]
        if not take or rest == 0 or kinds.peak[k] > room or kinds.cost[k] > spare:
            continue
        _left(k, rest - 1, scratch)
        extra = _extra(v, scratch)
        _left(k, rest, scratch)
        if kinds.cost[k] + extra > spare:
            continue
        if new.count[0] == new.node.shape[0]:
            return FULL
        if scratch.limit[3] > 0:
            _lower(scratch.limit[0] - spare + kinds.cost[k] + extra, graph, scratch)
            spare = scratch.limit[0] - reduced - graph.backward[v]
        _write(e, v, k, (cost, passed, clock), old, new, kinds)
        _enter(m + 1, new, kinds, scratch.slots)
    return DONE


@njit(nogil=True, inline="always")
def _follow_one(
    e: int, m: int, old: Layer, new: Layer, graph: Paths, kinds: Kinds, scratch: Scratch
) -> int:  # fmt: skip
    """Make the labels that follow label e, after any number of rounds and a join or none."""
    placed = np.int64(0)
    for k in range(kinds.cost.shape[0]):
        placed += (kinds.copies[k] - old.rest[e, k]) * kinds.cost[k]
        _left(k, old.rest[e, k], scratch)
    stack = scratch.stack
    stack[0, 0], stack[0, 1], stack[0, 2] = old.node[e], 0, old.clock[e]
    depth = 1
    while depth > 0:
        depth -= 1
        node, passed, clock = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        while node >= 0:
            cost = np.int64(old.rounds[e]) + passed * m
            reduced = cost * graph.scale + placed
            spare = scratch.limit[0] - reduced - graph.backward[node]
            if spare < 0 or _extra(node, scratch) > spare:
                break
            waiting = clock < 0 and old.need[e] - passed > kinds.clock
            onward = np.int64(-1)
            for a in range(graph.arc_start[node], graph.arc_start[node + 1]):
                v, label = graph.arc_target[a], graph.arc_label[a]
                if label < graph.join:
                    onward = v
                elif label == graph.join and not waiting:
                    if depth == stack.shape[0]:
                        return FULL
                    stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, passed, kinds.clock
                    depth += 1
                elif label >= graph.first_mask and graph.backward[v] < INFINITE:
                    so_far = cost, passed, reduced, clock
                    if _place(e, a, so_far, m, old, new, graph, kinds, scratch) == FULL:
                        return FULL
            live = passed < old.tokens.shape[1] and old.tokens[e, passed] > 0
            if onward < 0 and graph.loop[node] >= 0 and (live or waiting):
                onward = np.int64(node)
            node = onward
            passed += 1
            clock = clock - 1 if clock >= 0 else clock
    return DONE


@njit(nogil=True)
def follow(
    rows: Any, m: int, old: Layer, new: Layer, graph: Paths, kinds: Kinds, scratch: Scratch
) -> int:  # fmt: skip
    """Make the labels that follow those in some rows."""
    for e in rows:
        if _follow_one(e, m, old, new, graph, kinds, scratch) == FULL:
            return FULL
    return DONE


@njit(nogil=True)
def estimate(layer: Layer, graph: Paths, kinds: Kinds, scratch: Scratch, out: Any) -> None:
    """Write the least cost of a completion of each label that is kept, by row."""
    for e in range(layer.count[0]):
        cost = np.int64(layer.rounds[e]) * graph.scale + graph.backward[layer.node[e]]
        for k in range(kinds.cost.shape[0]):
            cost += (kinds.copies[k] - layer.rest[e, k]) * kinds.cost[k]
            _left(k, layer.rest[e, k], scratch)
        out[e] = cost + _extra(layer.node[e], scratch) if layer.kept[e] else NEVER


@njit(nogil=True)
def swap(m: int, layer: Layer, kinds: Kinds, slots: Any) -> None:
    """Delete labels by those that placed a larger request instead of one of theirs.

    Only the nearest larger one that is left is tried: others delete next to nothing more.
    """
    number = kinds.copies.shape[0]
    rest = layer.rest
    for b in range(layer.count[0]):
        for j in range(number):
            if not layer.kept[b]:
                break
            if rest[b, j] == kinds.copies[j]:
                continue
            i = 0
            while i < number and kinds.larger[j, i] >= 0 and rest[b, kinds.larger[j, i]] == 0:
                i += 1
            if i == number or kinds.larger[j, i] < 0:
                continue
            i = kinds.larger[j, i]
            a = slots[_slot(layer.key[b] - kinds.sign[j] + kinds.sign[i], layer, slots)]
            while a >= 0 and layer.kept[b]:
                if (
                    layer.kept[a]
                    and _dominates(a, b, m, layer, kinds.clock)
                    and _left_alike(a, b, j, i, layer)
                ):
                    layer.kept[b] = False
                    layer.count[1] -= 1
                a = layer.after[a]
