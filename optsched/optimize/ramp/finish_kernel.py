"""Compiled loops of `optsched.optimize.ramp.finish`: labels and dominance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.optimize.ramp.counters import Groups
from optsched.optimize.ramp.graph import INFINITE, Paths
from optsched.problem.kernel import njit

NEVER = 2**62
"""The estimate of a label that is not kept."""
DONE, FULL = 0, 1
"""Whether there was room for all labels."""
NODE, ROUNDS, CLOCK, NEED, AFTER, PARENT, KIND, PASSED, ABOUT = range(9)
"""Of a label: its node, its cost in rounds, the present round or -1 without a clock, the least
clock at which it may join, the next row of the same key in order of rounds, and how it was made:
the row of the layer before, the kind placed and the rounds since the placement before."""
FOUND = 5
"""Of a placement to be tried: the node it leads to, the kind, and cost, passed rounds and clock of
the label."""
_LOOKS = 16
"""How many labels that have placed the same may each delete one, at most."""
FEW_SLOTS = 1024
"""The slots in use when a layer is empty."""
_UPPER = -(2**32)  # the bits of a key that its slot holds


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
    """Labels after so many placements, by row, and a hash table of their keys."""

    about: Any  # integers: see `NODE` and so on
    rest: Any  # how many of each kind are left
    tokens: Any  # live tokens now, one round earlier, ...
    key: Any
    kept: Any
    slots: Any  # of each key the upper half and the first row; -1: empty
    count: Any  # rows; rows kept; slots in use


class Scratch(NamedTuple):
    """The tables, and what following one label needs."""

    counters: Any
    above: Any  # what each arc costs at least above the plain cost of its node
    start: Any  # where the kinds of each label of arcs start in ``kinds``
    kinds: Any
    runs: Any  # the tokens of each kind when it completes, one round earlier, ...
    stack: Any
    found: Any  # placements to be tried: see `FOUND`
    at: Any  # by group of kinds, the entry of a row of the tables for what is left
    limit: Any  # the cost above which no label is made, its bucket, labels made, most (0: all)
    counts: Any  # labels made, by bucket of their estimate


@njit(nogil=True)
def arcs_above(graph: Paths, value: Any) -> Any:
    """Return what each arc costs at least above the plain cost of its node."""
    arc_start, arc_target, arc_label = graph.arc_start, graph.arc_target, graph.arc_label
    backward = graph.backward
    out = np.empty(arc_target.shape[0], dtype=np.int32)
    for u in range(arc_start.shape[0] - 1):
        for a in range(arc_start[u], arc_start[u + 1]):
            least = np.int64(backward[arc_target[a]]) + value[arc_label[a]] - backward[u]
            out[a] = min(least, INFINITE)
    return out


@njit(nogil=True)
def _extra(table: Any, row: Any, at: Any) -> Any:
    """Return, in units, what a row of the tables adds to the cost to the end for what is left."""
    best = np.uint8(0)
    for g in range(at.shape[0]):
        best = max(best, table[np.uint64(row), at[g]])
    return np.int64(best)


@njit(nogil=True)
def _look_up(e: int, rest: Any, groups: Groups, at: Any) -> None:
    """Note the entries for what is left of label e."""
    group, stride, top, first = groups.group, groups.stride, groups.top, groups.first
    for g in range(at.shape[0]):
        at[g] = first[g]
    for k in range(group.shape[0]):
        at[group[k]] += np.uint64(min(np.int64(rest[e, k]), top[k]) * stride[k])


@njit(nogil=True)
def _dominates(a: int, b: int, m: int, about: Any, tokens: Any, join: int) -> bool:
    """Whether conditions 1 and 2 of the module's text hold for some number of rounds."""
    spare = np.int64(about[b, ROUNDS]) - about[a, ROUNDS]
    if spare < 0:
        return False
    waits = spare // m
    need, clock = np.int64(about[a, NEED]), np.int64(about[b, CLOCK])
    if about[a, CLOCK] >= 0:
        exact = about[a, CLOCK] - clock
        if clock < 0 or exact < 0 or exact > waits:
            return False
        waits = exact
    elif clock >= 0:
        before = waits - (join - clock)  # rounds before the label joins
        if before < 0 or need - before > join:
            return False
    elif max(need - waits, join) > about[b, NEED]:
        return False
    j, rounds = 0, tokens.shape[1] - waits
    while j < rounds and tokens[a, j + waits] <= tokens[b, j]:
        j += 1
    return j >= rounds


@njit(nogil=True)
def _left_alike(a: int, b: int, j: int, i: int, rest: Any) -> bool:
    """Whether the same is left of labels a and b, but one more of kind j and one less of i."""
    alike = True
    for k in range(rest.shape[1]):
        alike &= rest[a, k] == rest[b, k] + (k == j) - (k == i)
    return alike


@njit(nogil=True)
def _slot(key: Any, slots: Any, size: int) -> Any:
    """Return the slot of the labels with a key, or the empty one where they would be.

    A slot holds the upper half of the key, and in the lower one the row of the label of fewest
    rounds. Keys of equal upper halves may share a slot, so what is left has to be compared, too.
    """
    at = key & (size - 1)
    while slots[at] != -1 and (slots[at] ^ key) >> 32 != 0:
        at = (at + 1) & (size - 1)
    return at


@njit(nogil=True)
def _grow(key: Any, slots: Any, count: Any) -> None:
    """Use twice the slots."""
    used = slots[: count[2]].copy()
    count[2] *= 2
    slots[: count[2]] = -1
    for entry in used:
        if entry != -1:
            slots[_slot(key[np.int32(entry)], slots, count[2])] = entry


@njit(nogil=True)
def _enter(m: int, layer: Layer, join: int) -> None:
    """Keep the label in the row after the last one, unless another deletes it.

    Those that it deletes are no longer kept.
    """
    about, rest, tokens, key, kept = layer.about, layer.rest, layer.tokens, layer.key, layer.kept
    slots, count = layer.slots, layer.count
    new = count[0]
    at = _slot(key[new], slots, count[2])
    row, before = np.int32(slots[at]), np.int32(-1)
    while row >= 0:
        if kept[row]:
            if _dominates(row, new, m, about, tokens, join):
                if _left_alike(row, new, -1, -1, rest):
                    return
            elif _dominates(new, row, m, about, tokens, join) and _left_alike(
                row, new, -1, -1, rest
            ):
                kept[row] = False
                count[1] -= 1
        if about[row, ROUNDS] <= about[new, ROUNDS]:
            before = row
        row = about[row, AFTER]
    if before < 0:
        about[new, AFTER] = slots[at]
        slots[at] = (key[new] & _UPPER) | new
    else:
        about[new, AFTER] = about[before, AFTER]
        about[before, AFTER] = new
    kept[new] = True
    count[0] += 1
    count[1] += 1
    if 2 * count[0] > count[2]:
        _grow(key, slots, count)


@njit(nogil=True)
def _lower(cost: Any, low: Any, cutoff: Any, limit: Any, counts: Any) -> None:
    """Count a label of this estimate, and lower the limit if there are more than wanted."""
    size = (cutoff - low) // counts.shape[0] + 1
    counts[min(max(cost - low, 0) // size, counts.shape[0] - 1)] += 1
    limit[2] += 1
    while limit[1] > 0 and limit[2] - counts[limit[1]] >= limit[3]:
        limit[2] -= counts[limit[1]]
        limit[1] -= 1
        limit[0] = low + (limit[1] + 1) * size - 1


@njit(nogil=True)
def _search(e: int, m: int, old: Layer, graph: Paths, kinds: Kinds, scratch: Scratch) -> Any:
    """Find what may be placed after label e, after any number of rounds and a join or none.

    Returns the cost of what is placed, and how many placements are in ``scratch.found``, or -1
    where there was no room.
    """
    arc_start, arc_target, arc_label = graph.arc_start, graph.arc_target, graph.arc_label
    backward, loop, join, first_mask = graph.backward, graph.loop, graph.join, graph.first_mask
    about, rest, tokens = old.about, old.rest, old.tokens
    cost, peak, capacity, last_clock = kinds.cost, kinds.peak, kinds.capacity, kinds.clock
    above, start, listed, limit = scratch.above, scratch.start, scratch.kinds, scratch.limit
    table, unit, at = scratch.counters.table, scratch.counters.unit, scratch.at
    row = scratch.counters.row
    stack, found = scratch.stack, scratch.found
    placed, number, depth = np.int64(0), 0, 1
    for k in range(cost.shape[0]):
        placed += (kinds.copies[k] - rest[e, k]) * cost[k]
    _look_up(e, rest, scratch.counters.groups, at)
    stack[0, 0], stack[0, 1], stack[0, 2] = about[e, NODE], 0, about[e, CLOCK]
    while depth > 0:
        depth -= 1
        node, passed, clock = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        while node >= 0:
            rounds = np.int64(about[e, ROUNDS]) + passed * m
            room = limit[0] - rounds * graph.scale - placed
            spare = room - backward[node]
            if spare < 0 or _extra(table, row[node], at) * unit > spare:
                break
            if number + cost.shape[0] > found.shape[0]:
                return placed, -1
            live = np.int64(tokens[e, passed]) if passed < tokens.shape[1] else 0
            waiting = clock < 0 and about[e, NEED] - passed > last_clock
            onward = np.int64(-1)
            for a in range(arc_start[node], arc_start[node + 1]):
                label = arc_label[a]
                if label < join:
                    onward = np.int64(arc_target[a])
                elif label == join and not waiting:
                    if depth == stack.shape[0]:
                        return placed, -1
                    stack[depth, 0], stack[depth, 1] = arc_target[a], passed
                    stack[depth, 2] = last_clock
                    depth += 1
                elif label >= first_mask and above[a] <= spare:
                    v = arc_target[a]
                    for i in range(start[label], start[label + 1]):
                        k = listed[i]
                        if (
                            rest[e, k] > 0
                            and live + peak[k] <= capacity
                            and cost[k] + backward[v] <= room
                        ):
                            found[number, 0], found[number, 1], found[number, 2] = v, k, rounds
                            found[number, 3], found[number, 4] = passed, clock
                            number += 1
            if onward < 0 and loop[node] >= 0 and (live > 0 or waiting):
                onward = node
            node = onward
            passed += 1
            clock = clock - 1 if clock >= 0 else clock
    return placed, number


@njit(nogil=True)
def _make(
    e: int, m: int, placed: Any, number: int, old: Layer, new: Layer, graph: Paths, kinds: Kinds,
    scratch: Scratch
) -> int:  # fmt: skip
    """Make the labels of the placements that were found after label e."""
    backward, found, limit = graph.backward, scratch.found, scratch.limit
    table, unit, left = scratch.counters.table, scratch.counters.unit, scratch.at
    row = scratch.counters.row
    groups, cost, count = scratch.counters.groups, kinds.cost, new.count
    group, stride, top = groups.group, groups.stride, groups.top
    about, rest, tokens, key = new.about, new.rest, new.tokens, new.key
    old_about, old_rest, old_tokens = old.about, old.rest, old.tokens
    runs, width = scratch.runs, tokens.shape[1]
    for i in range(number):
        v, k, rounds = found[i, 0], found[i, 1], found[i, 2]
        passed, clock = found[i, 3], found[i, 4]
        least = rounds * graph.scale + placed + cost[k] + backward[v]
        if least > limit[0]:
            continue
        fewer = np.uint64(stride[k] if old_rest[e, k] <= top[k] else 0)
        left[group[k]] -= fewer
        least += _extra(table, row[v], left) * unit
        left[group[k]] += fewer
        if least > limit[0]:
            continue
        at = count[0]
        if at == about.shape[0]:
            return FULL
        if limit[3] > 0:
            _lower(least, np.int64(backward[0]), graph.cutoff, limit, scratch.counts)
        about[at, NODE], about[at, ROUNDS], about[at, CLOCK] = v, rounds, clock
        need = max(np.int64(old_about[e, NEED]) - passed, kinds.clock)
        about[at, NEED] = max(need, kinds.ready[k]) if clock < 0 else need
        about[at, PARENT], about[at, KIND], about[at, PASSED] = e, k, passed
        for j in range(rest.shape[1]):
            rest[at, j] = old_rest[e, j]
        rest[at, k] -= 1
        live = max(width - passed, 0)
        for j in range(live):
            tokens[at, j] = old_tokens[e, j + passed] + runs[k, j]
        for j in range(live, width):
            tokens[at, j] = runs[k, j]
        key[at] = old.key[e] + kinds.sign[k]
        _enter(m + 1, new, kinds.clock)
    return DONE


@njit(nogil=True)
def follow(
    rows: Any, m: int, old: Layer, new: Layer, graph: Paths, kinds: Kinds, scratch: Scratch
) -> int:  # fmt: skip
    """Make the labels that follow those in some rows."""
    for e in rows:
        placed, number = _search(e, m, old, graph, kinds, scratch)
        if number < 0:
            return FULL
        if number and _make(e, m, placed, number, old, new, graph, kinds, scratch) == FULL:
            return FULL
    return DONE


@njit(nogil=True)
def estimate(layer: Layer, graph: Paths, kinds: Kinds, scratch: Scratch, out: Any) -> None:
    """Write the least cost of a completion of each label that is kept, by row."""
    about, rest, backward, at = layer.about, layer.rest, graph.backward, scratch.at
    cost, copies, counters = kinds.cost, kinds.copies, scratch.counters
    for e in range(layer.count[0]):
        node = about[e, NODE]
        least = np.int64(about[e, ROUNDS]) * graph.scale + backward[node]
        for k in range(cost.shape[0]):
            least += (copies[k] - rest[e, k]) * cost[k]
        _look_up(e, rest, counters.groups, at)
        least += _extra(counters.table, counters.row[node], at) * counters.unit
        out[e] = least if layer.kept[e] else NEVER


@njit(nogil=True)
def swap(m: int, layer: Layer, kinds: Kinds) -> None:
    """Delete labels by those that placed a larger request instead of one of theirs.

    Only the nearest larger one that is left is tried, and of labels that have placed the same only
    the first `_LOOKS`: others delete next to nothing more.
    """
    about, rest, tokens, key, kept = layer.about, layer.rest, layer.tokens, layer.key, layer.kept
    slots, count, copies, larger = layer.slots, layer.count, kinds.copies, kinds.larger
    sign, number = kinds.sign, copies.shape[0]
    for b in range(count[0]):
        for j in range(number if kept[b] else 0):
            if rest[b, j] == copies[j]:
                continue
            i = 0
            while i < number and larger[j, i] >= 0 and rest[b, larger[j, i]] == 0:
                i += 1
            if i == number or larger[j, i] < 0:
                continue
            i = larger[j, i]
            a = np.int32(slots[_slot(key[b] - sign[j] + sign[i], slots, count[2])])
            looks = 0
            while (
                a >= 0 and looks < _LOOKS and about[a, ROUNDS] <= about[b, ROUNDS] and kept[b]
            ):  # fmt: skip
                looks += 1
                if (
                    kept[a]
                    and _dominates(a, b, m, about, tokens, kinds.clock)
                    and _left_alike(a, b, j, i, rest)
                ):
                    kept[b] = False
                    count[1] -= 1
                a = about[a, AFTER]
            if not kept[b]:
                break
