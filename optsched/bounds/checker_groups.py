"""Tables for the compiled enumeration: what placing just these requests of a few kinds costs.

Kinds of similar peak form a group. A row of the table of a node has an entry for each group and
each choice of how many requests of each of its kinds are left: how much more than the node's cost
to the end the paths cost that place exactly those, and anything of other groups. A schedule that
goes on from the node places exactly what is left, so it costs at least what any of these entries
says. Entries are bytes in units of a step, rounded down at each arc, and stop at 255. Kinds with
more than `MOST` - 1 requests are in no group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_product import NEVER
from optsched.problem.kernel import njit

MOST = 16
"""Max entries of a group. They are fewer if tables would have more than `MAX_BYTES`."""
MAX_BYTES = 2**30
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


def groups(peak: Any, copies: Any, nodes: int) -> Groups:
    """Return groups of kinds of similar peak, as large as memory for so many nodes allows.

    Parameters
    ----------
    peak, copies : ndarray of int64
        Of each kind.
    nodes : int

    Returns
    -------
    Groups
    """
    for most in (MOST, MOST // 2, MOST // 4, 2):
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
        if nodes * first[-1] <= MAX_BYTES:
            break
    column = np.arange(MOST)
    holds = column // stride[:, None] % (copies[:, None] + 1) > 0
    return Groups(of, stride, np.array(first), holds)


def moves(mask: Any, price: Any, cost: Any, kinds: Groups) -> Moves:
    """Return what the arcs of each label do.

    Parameters
    ----------
    mask : ndarray of uint64
        The kinds that each label places.
    price : ndarray of int64, shape (labels, 2)
        The least cost of each label, and the kind of this cost or -1.
    cost : ndarray of int64
        Of each kind.
    kinds : Groups

    Returns
    -------
    Moves
    """
    bits = np.arange(len(cost), dtype=np.uint64)
    there = (mask[:, None] >> bits & np.uint64(1)).astype(bool)
    best = price[:, 1]
    # A kind without a group has no column that it could lower, so all others are outside.
    home = np.where(best >= 0, kinds.of[best], -1)
    apart = there & ((kinds.of[None, :] != home[:, None]) | (home[:, None] < 0))
    outside = np.where(apart, cost, NEVER).min(axis=1, initial=NEVER)
    number, kind = np.nonzero(there)
    begin = np.searchsorted(number, np.arange(len(mask) + 1))
    return Moves(begin, kind, best, np.ascontiguousarray(price[:, 0]), outside, cost)


@njit(allocates=False)
def fill(
    table: Any, rest: Any, into: Any, source: Any, label: Any, move: Moves, group: Groups,
    step: int, save: Any
) -> None:  # fmt: skip
    """Fill in the table, from the end backward; the arcs are in order of target.

    ``rest`` has the cost to the end of each node. ``save`` is scratch space for `MOST` bytes.
    """
    begin, kinds, bests, least, outside, cost = move
    of, stride, first, holds = group
    width = first[-1]
    table[:] = TOP
    for g in range(len(first) - 1):
        table[-1, first[g]] = 0
    for v in range(len(into) - 2, -1, -1):
        for a in range(into[v], into[v + 1] if rest[v] < NEVER else 0):
            u, number = source[a], label[a]
            more = rest[v] - rest[u]
            usual = (more + least[number]) // step
            if usual >= TOP:
                continue  # and all that the arc may do costs as much
            best = bests[number]
            home = of[best] if best >= 0 else -1
            low = first[home] if home >= 0 else 0
            high = first[home + 1] if home >= 0 else 0
            for j in range(low, high):
                save[j - low] = table[u, j]
            add, most = np.uint8(usual), np.uint8(TOP - usual)
            for j in range(width):  # in bytes: many at a time
                table[u, j] = min(table[u, j], np.uint8(add + min(most, table[v, j])))
            other = (more + outside[number]) // step if outside[number] < NEVER else TOP
            for j in range(low, high):
                table[u, j] = min(np.int64(save[j - low]), other + table[v, j])
            for i in range(begin[number], begin[number + 1]):
                k = kinds[i]
                g, placed = of[k], (more + cost[k]) // step
                for j in range(first[g], first[g + 1] if g >= 0 and placed < TOP else 0):
                    if holds[k, j - first[g]]:
                        table[u, j] = min(np.int64(table[u, j]), placed + table[v, j - stride[k]])


@njit(allocates=False)
def rises(node: Any, table: Any, columns: Any) -> Any:
    """Return by how much the cost to the end rises, in steps, for the columns of what is left."""
    most = np.uint8(0)
    for g in range(len(columns)):
        most = max(most, table[node, columns[g]])
    return np.int64(most)
