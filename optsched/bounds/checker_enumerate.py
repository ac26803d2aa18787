"""Compiled enumeration at the end of a ramp leaf: the twin of `optsched.bounds.checker_labels`.

Numbers stay below 2**60 (`optsched.bounds.checker_compiled.fits`). A layer has at most `MAX_LABELS`
labels in at most `MAX_BYTES`. Of the kinds that are larger than one, only the nearest that is left
is tried instead of it. So some labels stay that the twin deletes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_parts import Budget, Rejected
from optsched.bounds.checker_states import JOIN, PLACE, ROUND
from optsched.problem.kernel import njit

MAX_LABELS = 4_000_000
MAX_BYTES = 3 * 2**30
_NEVER = 2**62
_TOP = 255
_FEW = 1000  # rows of a layer at first
_DEEP = 64  # ways to join the clock that one label has at first
_DONE, _NO_ROW, _NO_WAY, _NO_STEPS = 0, 1, 2, 3  # what a layer ran short of
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_NODE, _COST, _CLOCK, _NEED, _NEXT, _ROWS = 0, 1, 2, 3, 4, 5


class Paths(NamedTuple):
    """The last graph, its arcs in order of source, and what its paths cost."""

    first: Any
    target: Any
    label: Any
    loop: Any
    what: Any  # of each label
    mask: Any
    rest: Any
    never: Any  # by node and kind, what the cost to the end rises by with none of the kind
    once: Any  # or with exactly one
    step: Any  # the unit of both
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


@njit
def _counters(paths: Paths, into: Any, source: Any, label: Any, price: Any) -> None:
    """Fill in the tables, from the end backward; the arcs are in order of target.

    ``price`` has the least cost of each label, the kind of this cost or -1, and the least cost of
    its other kinds.
    """
    never, once, kinds = paths.never, paths.once, len(paths.cost)
    never[:] = _TOP
    once[:] = _TOP
    never[-1] = 0
    for v in range(len(into) - 2, -1, -1):
        for a in range(into[v], into[v + 1] if paths.rest[v] < _NEVER else 0):
            u, number = source[a], label[a]
            more = paths.rest[v] - paths.rest[u]
            best = price[number, 1]
            before, before_once = np.int64(never[u, best]), np.int64(once[u, best])
            usual = (more + price[number, 0]) // paths.step
            for k in range(kinds if usual < _TOP else 0):
                never[u, k] = min(np.int64(never[u, k]), usual + never[v, k])
                once[u, k] = min(np.int64(once[u, k]), usual + once[v, k])
            if best < 0:
                continue
            other = (more + price[number, 2]) // paths.step if price[number, 2] < _NEVER else _TOP
            never[u, best] = min(before, other + never[v, best])
            once[u, best] = min(before_once, other + once[v, best])
            for k in range(kinds):
                if (paths.mask[number] >> np.uint64(k)) & _ONE:
                    placed = (more + paths.cost[k]) // paths.step + never[v, k]
                    once[u, k] = min(np.int64(once[u, k]), placed)


@njit(inline="always")
def _may(node: Any, spent: Any, left: Any, paths: Paths) -> bool:
    """Whether a label may be completed at a cost up to the cutoff."""
    spare = paths.cutoff - spent - paths.rest[node]
    extra = np.uint8(0)
    if paths.rest[node] < _NEVER and spare >= 0:
        for k in range(left.shape[0]):
            if left[k] == 0:
                extra = max(extra, paths.never[node, k])
            elif left[k] == 1:
                extra = max(extra, paths.once[node, k])
    return paths.rest[node] < _NEVER and np.int64(extra) * paths.step <= spare


@njit(inline="always")
def _deletes(a: int, b: int, m: int, layer: Layer, join: int) -> bool:
    """Whether a, some rounds later, is where b is and holds no more tokens at any time."""
    about, tokens = layer.about, layer.tokens
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
    j = 0
    while right and j + waits < tokens.shape[1]:
        right = tokens[a, j + waits] <= tokens[b, j]
        j += 1
    return right


@njit
def _slot(key: Any, keys: Any, slots: Any) -> Any:
    """Return the slot of the labels with a key, or the empty one where it belongs."""
    last = np.uint64(len(slots) - 1)
    at = (key >> np.uint64(7)) & last
    while slots[at] >= 0 and keys[slots[at]] != key:
        at = (at + _ONE) & last
    return at


@njit
def _left_alike(a: int, b: int, j: int, i: int, left: Any) -> bool:
    """Whether labels a and b have the same left, but a one more of kind j and one less of i."""
    same = True
    for k in range(left.shape[1]):
        same &= np.int64(left[a, k]) == np.int64(left[b, k]) + (k == j) - (k == i)
    return same


@njit(inline="always")
def _enter(m: int, layer: Layer, join: int) -> int:
    """Keep the label in the next row unless one that has placed the same deletes it.

    Returns the number of labels that were looked at.
    """
    new, seen, wanted = layer.count[0], 1, True
    at = _slot(layer.key[new], layer.key, layer.slots)
    row = layer.slots[at]
    while row >= 0 and wanted:
        seen += 1
        if layer.there[row] and _left_alike(row, new, -1, -1, layer.left):
            if _deletes(row, new, m, layer, join):
                wanted = False
            elif _deletes(new, row, m, layer, join):
                layer.there[row] = False
        row = layer.about[row, _NEXT]
    if wanted:
        layer.about[new, _NEXT] = layer.slots[at]
        layer.slots[at] = new
        layer.there[new] = True
        layer.count[0] += 1
    return seen


@njit
def _swap(m: int, layer: Layer, of: Of) -> None:
    """Delete labels by those that have placed a larger request instead of one of theirs.

    Of the larger ones that are left only the nearest is tried, in place of each kind.
    """
    left, kinds = layer.left, len(of.copies)
    for b in range(layer.count[0]):
        for j in range(kinds):
            if not layer.there[b] or left[b, j] == of.copies[j]:
                continue
            c = 0
            while c < kinds and of.larger[j, c] >= 0 and left[b, of.larger[j, c]] == 0:
                c += 1
            i = of.larger[j, c] if c < kinds else -1
            if i < 0:
                continue
            key = layer.key[b] - of.sign[j] + of.sign[i]
            a = layer.slots[_slot(key, layer.key, layer.slots)]
            layer.count[1] += 1
            while a >= 0 and layer.there[b]:
                layer.count[1] += 1
                if layer.there[a] and _left_alike(a, b, j, i, left):
                    layer.there[b] = not _deletes(a, b, m, layer, of.clock)
                a = layer.about[a, _NEXT]


@njit(inline="always")
def _write(e: int, v: Any, k: int, where: Any, old: Layer, new: Layer, of: Of) -> None:
    """Write the label that follows label e into the next row."""
    cost, passed, clock = where
    at = new.count[0]
    need = max(old.about[e, _NEED] - passed, of.clock)
    if clock < 0:
        need = max(need, of.ready[k])
    new.about[at, _NODE], new.about[at, _COST] = v, cost
    new.about[at, _CLOCK], new.about[at, _NEED] = clock, need
    new.left[at] = old.left[e]
    new.left[at, k] -= 1
    width = new.tokens.shape[1]
    for j in range(width):
        live = old.tokens[e, j + passed] if j + passed < width else 0
        new.tokens[at, j] = live + (of.peak[k] - j if j < of.output[k] else 0)
    new.key[at] = old.key[e] + of.sign[k]


@njit
def _layer(m: int, old: Layer, new: Layer, paths: Paths, of: Of, stack: Any, most: int) -> int:
    """Make the labels with one more request placed, in at most so many steps.

    Returns what was too little, or `_DONE`. A step is a node that a label meets, or a label that
    a new one is compared with; ``new.count`` has how many were taken.
    """
    new.count[:] = 0
    wide = 1 + new.tokens.shape[1] // 64  # steps of a comparison
    new.slots[:] = -1
    for e in range(old.count[0]):
        left = old.left[e]
        placed = np.int64(0)
        for k in range(len(left)):
            placed += (of.copies[k] - left[k]) * paths.cost[k]
        stack[0, 0], stack[0, 1], stack[0, 2] = old.about[e, _NODE], 0, old.about[e, _CLOCK]
        depth = 1 if old.there[e] else 0
        while depth > 0:
            depth -= 1
            node, passed, clock = stack[depth, 0], stack[depth, 1], stack[depth, 2]
            while node >= 0:
                new.count[1] += 1
                if new.count[1] > most:
                    return _NO_STEPS
                cost = old.about[e, _COST] + m * passed
                spent = cost * paths.unit + placed
                if not _may(node, spent, left, paths):
                    break
                live = old.tokens[e, passed] if passed < old.tokens.shape[1] else 0
                early = clock < 0 and old.about[e, _NEED] - passed > of.clock
                onward = node if paths.loop[node] >= 0 and (live > 0 or early) else -1
                for a in range(paths.first[node], paths.first[node + 1]):
                    v, number = np.int64(paths.target[a]), paths.label[a]
                    if paths.what[number] == ROUND:
                        onward = v
                    elif paths.what[number] == JOIN and not early:
                        if depth == len(stack):
                            return _NO_WAY
                        stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, passed, of.clock
                        depth += 1
                    for k in range(len(left) if paths.what[number] == PLACE else 0):
                        if not (paths.mask[number] >> np.uint64(k)) & _ONE or left[k] == 0:
                            continue
                        if live + of.peak[k] > of.capacity:
                            continue
                        left[k] -= 1
                        may = _may(v, spent + paths.cost[k], left, paths)
                        left[k] += 1
                        if may:
                            if new.count[0] == len(new.key):
                                return _NO_ROW
                            _write(e, v, k, (cost, passed, clock), old, new, of)
                            new.count[1] += wide * _enter(m + 1, new, of.clock)
                node, passed, clock = onward, passed + 1, max(clock - 1, -1)
    _swap(m + 1, new, of)
    return _DONE


def _empty(rows: int, kinds: int, width: int) -> Layer:
    """Return a layer. Memory is taken only for rows that are written."""
    return Layer(
        np.empty((rows, _ROWS), np.int64), np.empty((rows, kinds), np.uint8),
        np.zeros((rows, width), np.int32), np.empty(rows, np.uint64), np.empty(rows, np.bool_),
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
        Of each label: see `_counters`.
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
    step = max(0, cutoff - int(engine.rest[0])) // _TOP + 1
    first, targets, numbers = outward
    paths = Paths(
        first, targets, numbers, graph.loop, labels.what[:count], labels.mask[:count], engine.rest,
        np.empty((nodes, len(cost)), np.uint8), np.empty((nodes, len(cost)), np.uint8),
        step, cost, unit, cutoff,
    )  # fmt: skip
    _counters(paths, graph.into, graph.source, graph.label, price)
    arrival, peak, floor = np.array(engine.kinds, dtype=np.int64).T
    output = peak - floor + 1
    of = Of(
        np.array(engine.copies), peak, output,
        arrival + output if arrival.any() else np.zeros_like(peak),
        larger_kinds(arrival, peak, output),
        np.random.default_rng(1).integers(1, 2**64, len(cost), dtype=np.uint64),
        engine.capacity, engine.clock,
    )  # fmt: skip
    width = int(output.max())
    most = min(MAX_LABELS, MAX_BYTES // (64 + len(cost) + 4 * width))
    old, new = (_empty(min(_FEW, most), len(cost), width) for _ in range(2))
    old.about[0], old.left[0], old.tokens[0] = (0, 0, -1, of.clock, -1), of.copies, 0
    old.key[0], old.there[0], old.count[0] = 0, True, 1
    stack = np.empty((_DEEP, 3), np.int64)
    for m in range(engine.n):
        short = -1
        while short != _DONE:
            short = _layer(m, old, new, paths, of, stack, budget.left)
            budget.spend(int(new.count[1]))
            if short == _NO_WAY:
                stack = np.empty((2 * len(stack), 3), np.int64)  # never more than the steps taken
            elif short == _NO_ROW:
                if len(new.key) >= most:
                    raise Rejected(f"found more than {most} labels; too large to check")
                new = _empty(min(most, 8 * len(new.key)), len(cost), width)
        old, new = new, old
    some = slice(int(old.count[0]))
    clock, need = old.about[some, _CLOCK], old.about[some, _NEED]
    since = np.where(clock < 0, np.maximum(need, (old.tokens[some] > 0).sum(axis=1)), clock)
    total = (old.about[some, _COST] + engine.n * since) * unit
    total += int((of.copies * cost).sum())
    return not bool((total[old.there[some]] <= cutoff).any())
