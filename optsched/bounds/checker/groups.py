"""Tables for the compiled enumeration: what placing just these requests of a few kinds costs.

Kinds of similar peak form a group. A row of the table of a node has an entry for each group and
each choice of how many requests of each of its kinds are left: how much more than the node's cost
to the end the paths cost that place exactly those, and anything of other groups. A schedule that
goes on from the node places exactly what is left, so it costs at least what any of these entries
says. Entries are bytes in units of a step, rounded down at each arc, and stop at 255. Kinds with
more than `MOST` - 1 requests are in no group. A node with a single arc, which places nothing, has
the entries of the next one, and shares its row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.product import NEVER
from optsched.problem.kernel import njit

_ZERO, _ONE = np.uint64(0), np.uint64(1)
MOST = 16
"""Max entries of a group. They are fewer if tables would have more than `MAX_BYTES`."""
MAX_BYTES = 3 * 2**30
TOP = 255
"""An entry of so many steps or more."""


class Groups(NamedTuple):
    """Groups of kinds, and the columns of the table that they have."""

    of: Any  # of each kind, or -1
    stride: Any  # by kind, the columns from one number left to the next
    first: Any  # by group, the column with nothing left; at the end the number of columns
    holds: Any  # by kind and column of its group, whether one is left


class Moves(NamedTuple):
    """What arcs do, by label: the kinds that they place, and costs."""

    begin: Any  # of the kinds of each label
    kinds: Any
    best: Any  # the kind of least cost, or -1
    least: Any  # the least cost
    outside: Any  # the least cost of kinds that are not in the group of the best
    cost: Any  # of each kind


def rows_of(first: Any, target: Any, kind: Any) -> Any:
    """Return the row of each node. They are in order of nodes: the last row is that of the end.

    Parameters
    ----------
    first, target : ndarray
        The arcs by the node that they leave: the first of each node, and the node that each
        reaches.
    kind : ndarray
        Of each arc the cheapest kind that it places, or -1.
    """
    row = np.empty(len(first) - 1, np.int32)
    row += _count_back(first, target, kind, row) - 1
    return row


@njit(allocates=False)
def _count_back(first: Any, target: Any, kind: Any, row: Any) -> int:
    """Number the rows from the end backward, 0, -1, and so on, and return how many there are."""
    rows, u = 0, np.uint64(len(row))
    while u > _ZERO:
        u -= _ONE
        a = np.uint64(first[u])
        if first[u + _ONE] - first[u] == 1 and kind[a] < 0:
            row[u] = row[np.uint64(target[a])]
        else:
            row[u] = -rows
            rows += 1
    return rows


def groups(peak: Any, copies: Any, rows: int) -> Groups:
    """Return groups of kinds of similar peak, as large as memory for so many rows allows.

    Parameters
    ----------
    peak, copies : ndarray of int64
        Of each kind.
    rows : int

    Returns
    -------
    Groups
    """
    for most in (MOST, MOST // 2, MOST // 4, 2, 1):
        of, stride, first = np.full(len(peak), -1), np.ones(len(peak), np.int64), [0]
        size = most  # of the present group, which is full at first
        for k in np.argsort(peak, kind="stable"):
            if copies[k] >= most:
                continue
            if size * (copies[k] + 1) > most:
                first.append(first[-1])
                size = 1
            of[k], stride[k] = len(first) - 2, size
            size *= int(copies[k]) + 1
            first[-1] = first[-2] + size
        if rows * first[-1] <= MAX_BYTES:
            break
    column = np.arange(MOST)
    holds = column // stride[:, None] % (copies[:, None] + 1) > 0
    return Groups(of, stride, np.array(first), holds)


def moves(mask: Any, price: Any, cost: Any, kinds: Groups) -> Moves:
    """Return what the arcs of each label do.

    Parameters
    ----------
    mask : ndarray of uint64, shape (labels, words)
        The kinds that each label places, as bits.
    price : ndarray of int64, shape (labels, 2)
        The least cost of each label, and the kind of this cost or -1.
    cost : ndarray of int64
        Of each kind.
    kinds : Groups

    Returns
    -------
    Moves
    """
    bits = np.unpackbits(mask.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    there = bits[:, : len(cost)].astype(bool)
    best = price[:, 1]
    # A kind without a group has no column that it could lower, so all others are outside.
    home = np.where(best >= 0, kinds.of[best], -1)
    apart = there & ((kinds.of[None, :] != home[:, None]) | (home[:, None] < 0))
    outside = np.where(apart, cost, NEVER).min(axis=1, initial=NEVER)
    number, kind = np.nonzero(there)
    begin = np.searchsorted(number, np.arange(len(mask) + 1))
    return Moves(begin, kind, best, np.ascontiguousarray(price[:, 0]), outside, cost)


def tables(
    rest: Any, row: Any, first: Any, target: Any, label: Any, move: Moves, group: Groups, step: int
) -> Any:
    """Return the rows.

    Parameters
    ----------
    rest : ndarray of int64
        The cost to the end of each node.
    row : ndarray
        The row of each node (`rows_of`).
    first, target, label : ndarray
        The arcs by the node that they leave: the first of each node, and of each arc the node that
        it reaches and its label.
    move : Moves
    group : Groups
    step : int
    """
    rows, width = int(row[-1]) + 1, int(group.first[-1])
    flat = np.full(rows * width + MOST, TOP, np.uint8)
    flat[(rows - 1) * width + group.first[:-1]] = 0
    column, size = np.arange(MOST), np.diff(group.first, append=group.first[-1])
    # By group, and by kind: 0 for the columns from its first one on that are its own (and have
    # one of the kind left), 255 for the others. A kind without a group has none.
    foreign = np.where(column < size[:, None], 0, TOP).astype(np.uint8)
    barred = np.where(group.holds, foreign[group.of], TOP).astype(np.uint8)
    save = np.empty(MOST, np.uint8)
    _fill(flat, rest, row, first, target, label, move, group, foreign, barred, step, save)
    return flat[: rows * width].reshape(rows, width)


@njit(allocates=False)
def _lower(to: Any, at: Any, add: Any, bar: Any, flat: Any) -> None:
    """Lower `MOST` bytes to others and a cost, but not those where ``bar`` has 255."""
    most = np.uint8(TOP - add)
    for j in range(np.uint64(MOST)):
        flat[to + j] = min(flat[to + j], np.uint8(add + min(most, flat[at + j] | bar[j])))


@njit(allocates=False)
def _fill(
    flat: Any, rest: Any, row: Any, first: Any, target: Any, label: Any, move: Moves, group: Groups,
    foreign: Any, barred: Any, step: int, save: Any
) -> None:  # fmt: skip
    """Fill in the rows, which lie one after another, from the end backward.

    Bytes are compared many at a time. So an arc lowers the whole row by its cheapest kind. Then the
    columns of the group of this kind are as before, but lowered by the kinds outside the group, and
    those of each kind by this kind. ``save`` is scratch space for `MOST` bytes.
    """
    begin, kinds, bests, least, outside, cost = move
    of, stride, starts, _ = group
    width, unit, beyond = np.uint64(starts[-1]), np.uint64(step), TOP * step
    u, most, made = np.uint64(len(rest) - 1), np.uint64(MOST), row[-1]
    while u > _ZERO:
        u -= _ONE
        if row[u] >= made:
            continue  # it shares a row that is there
        made = row[u]
        own = np.uint64(made) * width
        for a in range(np.uint64(first[u]), np.uint64(first[u + _ONE])):
            v, number = np.uint64(target[a]), np.uint64(label[a])
            more = rest[v] - rest[u]
            if more + least[number] >= beyond:
                continue
            at, best = np.uint64(row[v]) * width, bests[number]
            home = of[best] if best >= 0 else np.int64(-1)
            low = np.uint64(starts[max(home, 0)])
            for j in range(most):
                save[j] = flat[own + low + j]
            add = np.uint8(np.uint64(more + least[number]) // unit)
            room = np.uint8(TOP - add)
            for j in range(width):
                flat[own + j] = min(flat[own + j], np.uint8(add + min(room, flat[at + j])))
            if home >= 0:
                other = foreign[home]
                for j in range(most):
                    flat[own + low + j] = flat[own + low + j] if other[j] else save[j]
                if outside[number] < NEVER and more + outside[number] < beyond:
                    add = np.uint8(np.uint64(more + outside[number]) // unit)
                    _lower(own + low, at + low, add, other, flat)
            for i in range(np.uint64(begin[number]), np.uint64(begin[number + _ONE])):
                k = np.uint64(kinds[i])
                if of[k] >= 0 and more + cost[k] < beyond:
                    low = np.uint64(starts[of[k]])
                    add = np.uint8(np.uint64(more + cost[k]) // unit)
                    _lower(own + low, at + low - np.uint64(stride[k]), add, barred[k], flat)


@njit(allocates=False)
def rises(row: Any, table: Any, columns: Any) -> Any:
    """Return by how much the cost to the end rises, in steps, for the columns of what is left."""
    most, at = np.uint8(0), np.uint64(row)
    for g in range(np.uint64(len(columns))):
        most = max(most, table[at, np.uint64(columns[g])])
    return np.int64(most)
