"""Counters: what the cost to the end rises by if just what is left of a few kinds is placed.

The plain cost of a node of `optsched.optimize.ramp.relaxation` lets a path place any kinds of
requests, each as often as it likes. Here the kinds are split into **groups** of similar peak. For
each node, each group and each way in which requests of the group may be left, a table holds the
least cost to the end of paths that place exactly those requests of the group, and any of other
kinds. A schedule places exactly what is left. So a label of `optsched.optimize.ramp.finish` costs
at least what the entry of each group says, and the largest counts.

**Entries** are bytes: what the least cost exceeds the node's plain one by, in a unit that makes the
slack 255. An entry is the least, over the arcs from its node, of what the arc adds and an entry of
the node that it leads to: the same one if the arc places nothing or a kind of another group, the
one with one less of the kind if it places a kind of the group that is left. What an arc adds is
rounded down, so that entries are never too large. If there are too many equal requests to tell
their numbers apart, the last entries stand for so many or more. These are 0.

A node whose only arc places nothing adds what the node behind it adds. Both **share a row**. With a
clock six of ten nodes only pass a round.

**Single counters**, with which small certificates are checked, are groups of one kind each, of
which none or one is left. Their entries are no larger than those of the groups here, which allow
fewer paths.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.product import places
from optsched.optimize.ramp.graph import INFINITE, Paths
from optsched.optimize.ramp.relaxation import Relaxation
from optsched.problem.kernel import njit

TOP = 255
"""An entry that is beyond the cutoff."""
WINDOW = 16
"""The max number of entries of a group. So many are computed at once."""
_SIZES, _BYTES = (16, 8, 4), 2**30
"""The max number of entries of a group: the first with which all tables have at most so many bytes,
or the last. Four are two bytes for each kind that has one request."""
_CHUNK = 200_000
"""The number of nodes whose tables are filled in before the stop flag is looked at."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


class Costs(NamedTuple):
    """What the labels of a graph's arcs cost, and the kinds that they may place."""

    value: Any  # the least cost of each label
    kind: Any  # the kind that has it, or -1
    start: Any  # where the label's kinds start in ``kinds``
    kinds: Any
    cost: Any  # of each kind


class Groups(NamedTuple):
    """Groups of kinds, and which entries they have: one after another, in order of what is left."""

    group: Any  # of each kind
    stride: Any  # by kind, how many entries further the one with one more left is
    top: Any  # by kind, the last number left that has an entry
    first: Any  # by group, the entry with nothing left, and at the end the number of entries


class Counters(NamedTuple):
    """Groups of kinds and their tables."""

    groups: Any
    row: Any  # of each node
    table: Any  # entries by row
    unit: Any


def costs_of(relaxation: Relaxation) -> Costs:
    """Return the costs of a relaxation's labels of arcs for compiled loops.

    Parameters
    ----------
    relaxation : Relaxation
    """
    r = relaxation
    value, kind = r.values(r.pi)
    mask = r.period.labels.mask[: len(value)]
    start, kinds = kinds_by_label(mask)
    return Costs(value, kind, start, kinds, -r.pi)


def groups_of(relaxation: Relaxation, rows: int) -> Groups:
    """Return groups of kinds of similar peak, as large as the memory for the tables allows.

    Parameters
    ----------
    relaxation : Relaxation
    rows : int
        Number of rows of the tables.
    """
    for size in _SIZES:
        groups = _split(relaxation, size)
        if rows * groups.first[-1] <= _BYTES:
            break
    return groups


def _split(relaxation: Relaxation, size: int) -> Groups:
    """Return groups of kinds of similar peak, of at most so many entries each."""
    r = relaxation
    top = np.minimum(r.copies, size - 1).astype(np.int64)
    group, stride, first = np.zeros_like(top), np.ones_like(top), [0, 1]
    for k in np.lexsort((r.peak - r.floor, r.peak)):  # by peak, and by output if equal
        entries = first[-1] - first[-2]
        if entries * (top[k] + 1) > size:
            first.append(first[-1] + 1)
            entries = 1
        group[k], stride[k] = len(first) - 2, entries
        first[-1] = first[-2] + entries * int(top[k] + 1)
    return Groups(group, stride, top, np.array(first, dtype=np.uint64))


def counters_of(
    relaxation: Relaxation, graph: Paths, costs: Costs, over: Callable[[], bool] | None = None
) -> Counters:
    """Return groups of a relaxation's kinds and their tables.

    Parameters
    ----------
    relaxation : Relaxation
    graph : Paths
        Its graph.
    costs : Costs
        Those of its labels.
    over : callable, optional
        Whether to end early. The tables are then incomplete.
    """
    r, nodes = relaxation, relaxation.graph.nodes
    number, rows = rows_of(graph, costs.kind)
    groups = groups_of(r, rows)
    width, unit = int(groups.first[-1]), max(0, r.cutoff - int(r.backward[0])) // TOP + 1
    second = second_costs(costs, groups.group)
    masks = _masks(groups, r.copies)
    flat = np.empty(rows * width + WINDOW, dtype=np.uint8)
    table = flat[: rows * width].reshape(rows, width)
    table[1] = TOP  # of the last node
    table[1, groups.first[:-1]] = 0
    table[1] &= masks[-1]
    row, save = np.empty(width + WINDOW, dtype=np.uint8), np.empty(WINDOW, dtype=np.uint8)
    for last in range(nodes - 1, 0, -_CHUNK):
        if r.stop[0] or (over is not None and over()):
            break
        begin = max(0, last - _CHUNK)
        fill_tables(begin, last, graph, costs, second, groups, masks, unit, number, row, save, flat)
    return Counters(groups, number, table, unit)


def _masks(
    groups: Groups, copies: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Return three masks of bytes.

    By group, 255 for those of the `WINDOW` bytes from its start that belong to other groups. By
    kind, 255 for these and for entries with none of it left. For a row, 0 for the entries that add
    nothing.
    """
    first = groups.first.astype(np.int64)
    window = np.arange(WINDOW)
    others = np.where(window < np.diff(first)[:, None], np.uint8(0), np.uint8(255))
    none = np.empty((len(copies), WINDOW), dtype=np.uint8)
    counts = np.full(first[-1], 255, dtype=np.uint8)
    for k, g in enumerate(groups.group):
        left = window // groups.stride[k] % (groups.top[k] + 1)
        none[k] = np.where(left == 0, np.uint8(255), others[g])
        if copies[k] > groups.top[k]:
            counts[first[g] + np.flatnonzero((left == groups.top[k]) & (others[g] == 0))] = 0
    return others, none, counts


@njit(nogil=True)
def kinds_by_label(mask: Any) -> Any:
    """Return where the kinds of each label start, and these kinds."""
    start = np.zeros(mask.shape[0] + 1, dtype=np.int64)
    for label in range(mask.shape[0]):
        start[label + 1] = start[label]
        for bits in mask[label]:
            while bits != _ZERO:
                bits &= bits - _ONE
                start[label + 1] += 1
    kinds = np.empty(start[-1], dtype=np.uint8)
    for label in range(mask.shape[0]):
        at = start[label]
        k = 0
        while at < start[label + 1]:
            if places(mask, label, k):
                kinds[at] = k
                at += 1
            k += 1
    return start, kinds


@njit(nogil=True)
def rows_of(graph: Paths, kind: Any) -> Any:
    """Return the row of each node, from the last node on, and how many rows there are.

    ``kind`` is the cheapest kind of each label of arcs, or -1 where it places nothing. No node has
    row 0, since a window may begin before the row that it is read for.
    """
    arc_start, arc_target, arc_label = graph.arc_start, graph.arc_target, graph.arc_label
    last = arc_start.shape[0] - 2
    row, rows = np.ones(last + 1, dtype=np.uint32), 2
    for u in range(last - 1, -1, -1):
        a = arc_start[u]
        if arc_start[u + 1] - a == 1 and kind[arc_label[a]] < 0:
            row[u] = row[arc_target[a]]
        else:
            row[u] = rows
            rows += 1
    return row, rows


@njit(nogil=True)
def second_costs(costs: Costs, group: Any) -> Any:
    """Return the least cost of each label's kinds that are not in the group of its cheapest."""
    start, listed, kind, cost = costs.start, costs.kinds, costs.kind, costs.cost
    second = np.full(kind.shape[0], INFINITE, dtype=np.int64)
    for label in range(kind.shape[0]):
        for i in range(start[label], start[label + 1]):
            k = listed[i]
            if group[k] != group[kind[label]]:
                second[label] = min(second[label], cost[k])
    return second


@njit(allocates=False, nogil=True)
def _lower(row: Any, to: Any, out: Any, at: Any, mask: Any, add: Any) -> None:
    """Set a window of the row to entries of another one and a cost, where these are less."""
    room = np.uint8(TOP - add)
    for j in range(np.uint64(WINDOW)):
        entry = np.uint8(min(np.uint8(out[at + j] | mask[j]), room) + add)
        row[to + j] = min(row[to + j], entry)


@njit(allocates=False, nogil=True)
def fill_tables(
    begin: int, last: int, graph: Paths, costs: Costs, second: Any, groups: Groups, masks: Any,
    unit: Any, number: Any, row: Any, save: Any, out: Any
) -> None:  # fmt: skip
    """Fill in the tables for the nodes ``last - 1`` down to ``begin``.

    Bytes are added and compared many at a time. So an arc first lowers all entries by its cheapest
    kind. Then the group of this kind is set back, and lowered by the cheapest kind of other groups.
    At last each kind lowers the entries of its group where it is left. ``number`` has
    the row of each node, and ``out`` all rows one after another, and a window behind them. ``row``,
    with a window behind it, and the window ``save`` are scratch space.
    """
    arc_start, arc_target, arc_label = graph.arc_start, graph.arc_target, graph.arc_label
    backward, value, kind = graph.backward, costs.value, costs.kind
    start, listed, cost = costs.start, costs.kinds, costs.cost
    group, stride, first = groups.group, groups.stride, groups.first
    others, none, counts = masks
    width, window, beyond, size = first[-1], np.uint64(WINDOW), TOP * unit, np.uint32(unit)
    for u in range(last - 1, begin - 1, -1):
        if arc_start[u + 1] - arc_start[u] == 1 and number[u] == number[arc_target[arc_start[u]]]:
            continue
        for j in range(width):
            row[j] = TOP
        here = np.int64(backward[u])
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            v, label = np.uint64(arc_target[a]), np.uint64(arc_label[a])
            more = np.int64(backward[v]) - here
            least = more + value[label]
            if here >= INFINITE or backward[v] >= INFINITE or least >= beyond:
                continue
            best, at = kind[label], np.uint64(number[v]) * width
            to = first[group[best]] if best >= 0 else np.uint64(0)
            for j in range(window if best >= 0 else 0):
                save[j] = row[to + j]
            add = np.uint8(np.uint32(least) // size)
            room = np.uint8(TOP - add)
            for j in range(width):
                entry = np.uint8(min(out[at + j], room) + add)
                row[j] = min(row[j], entry)
            if best < 0:
                continue
            other = others[group[best]]
            for j in range(window):
                row[to + j] = row[to + j] if other[j] else save[j]
            least = more + second[label]
            if least < beyond:
                _lower(row, to, out, at + to, other, np.uint8(np.uint32(least) // size))
            for i in range(np.uint64(start[label]), np.uint64(start[label + 1])):
                k = listed[i]
                least = more + cost[k]
                if least < beyond:
                    add, to = np.uint8(np.uint32(least) // size), first[group[k]]
                    _lower(row, to, out, at + to - np.uint64(stride[k]), none[k], add)
        at = np.uint64(number[u]) * width
        for j in range(width):
            out[at + j] = row[j] & counts[j]
