"""Compiled enumeration at the end of a ramp leaf: the twin of `optsched.bounds.checker_labels`.

Numbers stay below 2**60 (`optsched.bounds.checker_compiled.fits`). A layer has at most `MAX_LABELS`
labels in at most `MAX_BYTES`. Of the kinds that are larger than one, only the nearest that is left
is tried instead of it. So some labels stay that the twin deletes. Tables are of groups of kinds
(`optsched.bounds.checker_groups`), where the twin's are of single kinds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_groups import MOST, TOP, fill, groups, moves, rises
from optsched.bounds.checker_parts import Budget, Rejected
from optsched.bounds.checker_states import JOIN, ROUND
from optsched.problem.kernel import njit

MAX_LABELS = 4_000_000
MAX_BYTES = 3 * 2**30
_LOOKS = 16  # labels that may delete one, of those that have placed the same
_FEW = 1000  # rows of a layer at first
_DEEP = 64  # ways to join the clock that one label has at first
_DONE, _NO_ROW, _NO_WAY, _NO_STEPS = 0, 1, 2, 3  # what a layer ran short of
_ONE = np.uint64(1)
_NODE, _COST, _CLOCK, _NEED, _NEXT, _NOW, _ALL, _ROWS = range(8)


class Paths(NamedTuple):
    """The last graph, its arcs in order of source, and what its paths cost."""

    first: Any
    target: Any
    label: Any
    loop: Any
    what: Any  # of each label
    least: Any  # by arc, the least cost from its source to the end
    begin: Any  # of the kinds of each label
    kinds: Any
    rest: Any
    table: Any  # by node, what its cost to the end rises by (`checker_groups`)
    of: Any  # of each kind, its group or -1
    stride: Any
    columns: Any  # by group, the first one
    step: Any  # the unit of the table
    cost: Any  # of each kind
    unit: Any
    cutoff: Any


class Of(NamedTuple):
    """The kinds of requests."""

    copies: Any
    peak: Any
    output: Any
    ready: Any
    larger: Any  # by kind, those at least as large, the nearest first, then -1
    sign: Any
    capacity: Any
    clock: Any


class Layer(NamedTuple):
    """Labels: integers (see `_NODE` and so on), what is left, live tokens, key, still there."""

    about: Any
    left: Any
    tokens: Any
    key: Any
    there: Any
    slots: Any
    count: Any  # rows, and the steps that they took


@njit(allocates=False)
def _deletes(a: int, b: int, m: int, about: Any, tokens: Any, join: int) -> bool:
    """Whether a, some rounds later, is where b is and holds no more tokens at any time."""
    gain = about[b, _COST] - about[a, _COST]
    waits, right = gain // m, gain >= 0
    clock_a, clock_b = about[a, _CLOCK], about[b, _CLOCK]
    if clock_a >= 0:
        right &= clock_b >= 0 and 0 <= clock_a - clock_b <= waits
        waits = clock_a - clock_b
    elif clock_b >= 0:
        before = waits - join + clock_b
        right &= before >= 0 and about[a, _NEED] - before <= join
    else:
        right &= max(about[a, _NEED] - waits, join) <= about[b, _NEED]
    # Tokens only fall, so this many are left of a at least.
    right &= about[a, _ALL] - waits * about[a, _NOW] <= about[b, _ALL]
    j = 0
    while right and j + waits < tokens.shape[1]:
        right = tokens[a, j + waits] <= tokens[b, j]
        j += 1
    return right


@njit(allocates=False)
def _slot(key: Any, keys: Any, slots: Any) -> Any:
    """Return the slot of the labels with a key, or the empty one where it belongs."""
    last = np.uint64(len(slots) - 1)
    at = (key >> np.uint64(7)) & last
    while slots[at] >= 0 and keys[slots[at]] != key:
        at = (at + _ONE) & last
    return at


@njit(allocates=False)
def _left_alike(a: int, b: int, j: int, i: int, left: Any) -> bool:
    """Whether labels a and b have the same left, but a one more of kind j and one less of i."""
    same = True
    for k in range(left.shape[1]):
        same &= np.int64(left[a, k]) == np.int64(left[b, k]) + (k == j) - (k == i)
    return same


@njit(allocates=False)
def _enter(m: int, layer: Layer, join: int) -> int:
    """Keep the label in the next row unless one that has placed the same deletes it.

    Returns the number of labels that were looked at.
    """
    about, left, tokens, keys, there, slots, count = layer
    new, seen, wanted = count[0], 1, True
    at = _slot(keys[new], keys, slots)
    row = slots[at]
    while row >= 0 and wanted:
        seen += 1
        if there[row]:
            if _deletes(row, new, m, about, tokens, join):
                wanted = not _left_alike(row, new, -1, -1, left)
            elif _deletes(new, row, m, about, tokens, join):
                there[row] = not _left_alike(row, new, -1, -1, left)
        row = about[row, _NEXT]
    if wanted:
        about[new, _NEXT] = slots[at]
        slots[at] = new
        there[new] = True
        count[0] += 1
    return seen


@njit(allocates=False)
def _swap(m: int, layer: Layer, of: Of) -> None:
    """Delete labels by those that have placed a larger request instead of one of theirs.

    Of the larger ones that are left only the nearest is tried, in place of each kind, and of
    labels that have placed the same only the last `_LOOKS`.
    """
    about, left, tokens, keys, there, slots, count = layer
    copies, larger, sign, join = of.copies, of.larger, of.sign, of.clock
    kinds = len(copies)
    for b in range(count[0]):
        for j in range(kinds):
            if not there[b] or left[b, j] == copies[j]:
                continue
            c = 0
            while c < kinds and larger[j, c] >= 0 and left[b, larger[j, c]] == 0:
                c += 1
            i = larger[j, c] if c < kinds else -1
            if i < 0:
                continue
            a = slots[_slot(keys[b] - sign[j] + sign[i], keys, slots)]
            count[1] += 1
            looks = 0
            while a >= 0 and there[b] and looks < _LOOKS:
                looks += 1
                count[1] += 1
                if there[a] and _deletes(a, b, m, about, tokens, join):
                    there[b] = not _left_alike(a, b, j, i, left)
                a = about[a, _NEXT]


@njit(allocates=False)
def _write(e: int, v: Any, k: int, where: Any, old: Layer, new: Layer, of: Of) -> None:
    """Write the label that follows label e into the next row."""
    cost, passed, clock = where
    about, left, tokens, at = new.about, new.left, new.tokens, new.count[0]
    live, before, peak, width = old.tokens, old.left, of.peak[k], tokens.shape[1]
    need = max(old.about[e, _NEED] - passed, of.clock)
    if clock < 0:
        need = max(need, of.ready[k])
    about[at, _NODE], about[at, _COST], about[at, _CLOCK], about[at, _NEED] = v, cost, clock, need
    for j in range(left.shape[1]):
        left[at, j] = before[e, j] - (j == k)
    for j in range(width):
        tokens[at, j] = live[e, j + passed] if j + passed < width else 0
    for j in range(of.output[k]):
        tokens[at, j] += peak - j
    total = np.int64(0)
    for j in range(width):
        total += tokens[at, j]
    about[at, _NOW], about[at, _ALL] = tokens[at, 0], total
    new.key[at] = old.key[e] + of.sign[k]


@njit(allocates=False)
def _layer(
    m: int, old: Layer, new: Layer, paths: Paths, of: Of, few: Any, stack: Any, most: int
) -> int:  # fmt: skip
    """Make the labels with one more request placed, in at most so many steps.

    Returns what was too little, or `_DONE`. A step is a node that a label meets, or a label that
    a new one is compared with; ``new.count`` has how many were taken. ``few`` is scratch space.
    """
    first, target, label, loop, what = paths[:5]
    least, begin, listed, rest, table = paths[5:10]
    group, stride, columns, step, cost, unit, cutoff = paths[10:]
    about, left, tokens, there = old.about, old.left, old.tokens, old.there
    count, rows = new.count, len(new.key)
    copies, peak, capacity, join = of.copies, of.peak, of.capacity, of.clock
    count[:] = 0
    wide = 1 + tokens.shape[1] // 64  # steps of a comparison
    new.slots[:] = -1
    for e in range(old.count[0]):
        placed = np.int64(0)
        for g in range(len(few)):
            few[g] = columns[g]
        for k in range(len(cost)):
            placed += (copies[k] - left[e, k]) * cost[k]
            if group[k] >= 0:
                few[group[k]] += left[e, k] * stride[k]
        stack[0, 0], stack[0, 1], stack[0, 2] = about[e, _NODE], 0, about[e, _CLOCK]
        depth = 1 if there[e] else 0
        while depth > 0:
            depth -= 1
            node, passed, clock = stack[depth, 0], stack[depth, 1], stack[depth, 2]
            while node >= 0:
                count[1] += 1
                if count[1] > most:
                    return _NO_STEPS
                so_far = about[e, _COST] + m * passed
                spare = cutoff - so_far * unit - placed
                if rest[node] > spare or rest[node] + rises(node, table, few) * step > spare:
                    break
                live = np.int64(tokens[e, passed]) if passed < tokens.shape[1] else 0
                early = clock < 0 and about[e, _NEED] - passed > join
                onward = node if loop[node] >= 0 and (live > 0 or early) else -1
                for a in range(first[node], first[node + 1]):
                    if least[a] > spare:
                        continue
                    v, number = np.int64(target[a]), label[a]
                    if what[number] == ROUND:
                        onward = v
                    elif what[number] == JOIN and not early:
                        if depth == len(stack):
                            return _NO_WAY
                        stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, passed, join
                        depth += 1
                    for j in range(begin[number], begin[number + 1]):
                        k = listed[j]
                        room = spare - cost[k] - rest[v]
                        if left[e, k] == 0 or live + peak[k] > capacity or room < 0:
                            continue
                        if group[k] >= 0:
                            few[group[k]] -= stride[k]
                        more = rises(v, table, few) * step
                        if group[k] >= 0:
                            few[group[k]] += stride[k]
                        if more <= room:
                            if count[0] == rows:
                                return _NO_ROW
                            _write(e, v, k, (so_far, passed, clock), old, new, of)
                            count[1] += wide * _enter(m + 1, new, join)
                node, passed, clock = onward, passed + 1, max(clock - 1, -1)
    _swap(m + 1, new, of)
    return _DONE


def _empty(rows: int, kinds: int, width: int, capacity: int) -> Layer:
    """Return a layer. Memory is taken only for rows that are written."""
    tokens = np.uint8 if capacity < 256 else np.int32  # they only fall from round to round
    return Layer(
        np.empty((rows, _ROWS), np.int64), np.empty((rows, kinds), np.uint8),
        np.empty((rows, width), tokens), np.empty(rows, np.uint64), np.empty(rows, np.bool_),
        np.empty(2 << rows.bit_length(), np.int32), np.zeros(2, np.int64),
    )  # fmt: skip


def larger_kinds(arrival: Any, peak: Any, output: Any) -> Any:
    """Return by kind the larger ones, the nearest first, then -1.

    A label that placed one of these instead of the kind may delete one that did not. They are at
    least as large in peak, output and arrival + output.
    """
    sizes = np.stack([peak, output, arrival + output])
    away = sizes[:, None, :] - sizes[:, :, None]  # by kind, how much larger each kind is
    right = (away >= 0).all(axis=0) & ~np.eye(sizes.shape[1], dtype=bool)
    distance = np.where(right, away.sum(axis=0), np.iinfo(np.int64).max)
    order = np.argsort(distance, axis=1, kind="stable")
    return np.where(np.take_along_axis(right, order, axis=1), order, -1)


def none_left(
    engine: Any, outward: Any, price: Any, pi: list[int], unit: int, cutoff: int, budget: Budget
) -> bool:
    """Return whether no schedule costs at most the cutoff.

    Parameters
    ----------
    engine : optsched.bounds.checker_compiled.Compiled
        With the last graph and each node's cost to the end.
    outward : tuple of ndarray
        The arcs by the node that they leave: the first of each node, the nodes that they reach,
        and the numbers of their labels.
    price : ndarray
        Of each label the least cost, and the kind of this cost or -1.
    pi : list of int
    unit, cutoff : int
    budget : Budget

    Raises
    ------
    Rejected
        The labels are too many.
    """
    graph, labels, count = engine.graph, engine.labels, int(engine.count[2])
    nodes = len(graph.loop)
    cost = -np.array(pi, dtype=np.int64)
    step = max(0, cutoff - int(engine.rest[0])) // TOP + 1
    first, targets, numbers = outward
    arrival, peak, floor = np.array(engine.kinds, dtype=np.int64).T
    output, copies = peak - floor + 1, np.array(engine.copies)
    group = groups(peak, copies, nodes)
    move = moves(labels.mask[:count], price, cost, group)
    table = np.empty((nodes, group.first[-1]), np.uint8)
    save = np.empty(MOST, np.uint8)
    fill(table, engine.rest, graph.into, graph.source, graph.label, move, group, step, save)
    paths = Paths(
        first, targets, numbers, graph.loop, labels.what[:count],
        engine.rest[targets] + price[numbers, 0], move.begin, move.kinds, engine.rest, table,
        group.of, group.stride, group.first[:-1].copy(), step, cost, unit, cutoff,
    )  # fmt: skip
    of = Of(
        copies, peak, output,
        arrival + output if arrival.any() else np.zeros_like(peak),
        larger_kinds(arrival, peak, output),
        np.random.default_rng(1).integers(1, 2**64, len(cost), dtype=np.uint64),
        engine.capacity, engine.clock,
    )  # fmt: skip
    width = int(output.max())
    most = min(MAX_LABELS, MAX_BYTES // (64 + len(cost) + 4 * width))
    old, new = (_empty(min(_FEW, most), len(cost), width, engine.capacity) for _ in range(2))
    old.about[0], old.left[0], old.tokens[0] = (0, 0, -1, of.clock, -1, 0, 0), of.copies, 0
    old.key[0], old.there[0], old.count[0] = 0, True, 1
    few, stack = np.empty(len(paths.columns), np.int64), np.empty((_DEEP, 3), np.int64)
    for m in range(engine.n):
        short = -1
        while short != _DONE:
            short = _layer(m, old, new, paths, of, few, stack, budget.left)
            budget.spend(int(new.count[1]))
            if short == _NO_WAY:
                stack = np.empty((2 * len(stack), 3), np.int64)  # never more than the steps taken
            elif short == _NO_ROW:
                if len(new.key) >= most:
                    raise Rejected(f"found more than {most} labels; too large to check")
                new = _empty(min(most, 8 * len(new.key)), len(cost), width, engine.capacity)
        old, new = new, old
    some = slice(int(old.count[0]))
    clock, need = old.about[some, _CLOCK], old.about[some, _NEED]
    since = np.where(clock < 0, np.maximum(need, (old.tokens[some] > 0).sum(axis=1)), clock)
    total = (old.about[some, _COST] + engine.n * since) * unit
    total += int((of.copies * cost).sum())
    return not bool((total[old.there[some]] <= cutoff).any())
