"""Tables for the compiled enumeration: what placing just these requests of a few kinds costs.

Kinds of similar peak form a group. A row of the table of a node has an entry for each group and
each choice of how many requests of each of its kinds are left: how much more than the node's cost
to the end the paths cost that place exactly those, and anything of other groups. A schedule that
goes on from the node places exactly what is left, so it costs at least what any of these entries
says. Entries are bytes in units of a step, rounded down at each arc, and stop at 255. Kinds with
more than `WINDOW` - 1 requests are in no group. A node with a single arc, which places nothing, has
the entries of the next one, and shares its row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import Bytes, Cells, Ints, Masks
from optsched.bounds.checker.product import NEVER, Leaving
from optsched.problem.kernel import njit

_ZERO, _ONE = np.uint64(0), np.uint64(1)
WINDOW = 16
"""Max entries of a group. They are fewer if tables would be too large."""
TOP = 255
"""An entry of so many steps or more."""
# So many nodes are filled in between two looks whether to go on.
_NODES = 500_000


class Groups(NamedTuple):
    """Groups of kinds, and the columns of the table that they have."""

    of: Ints  # by kind, its group or -1
    stride: Ints  # by kind, the columns from one number left to the next
    first: Ints  # by group, the column with nothing left; at the end the number of columns
    holds: NDArray[np.bool_]  # by kind and column of its group, whether one is left


class Moves(NamedTuple):
    """What arcs do, by label: the kinds that they place, and costs."""

    begin: Ints  # of the kinds of each label
    kinds: Ints  # of all labels, those of one after those of another
    best: Ints  # the kind of min cost, or -1
    lowest: Ints  # the min cost
    outside: Ints  # the min cost of kinds that are not in the group of the best
    cost: Ints  # of each kind


class Bars(NamedTuple):
    """`WINDOW` bytes from the first column of a group: 255 for columns that may not be lowered."""

    foreign: Bytes  # by group: those are columns of other groups
    barred: Bytes  # by kind: of other groups, or where none of the kind is left
    saved: Bytes  # scratch space


def rows_of(graph: Leaving, kind: Ints) -> Cells:
    """Return the row of each node, in order; `kind`: the cheapest that a label places, or -1."""
    row = np.empty(len(graph.first) - 1, np.int32)
    # They are numbered 0, -1, and so on from the end: shifted, the first row is 0.
    row += _number_rows_back(graph, kind, row) - 1
    return row


@njit(allocates=False, nogil=True)
def _number_rows_back(graph: Leaving, kind: Ints, row: Cells) -> int:
    """Number the table's rows from the end backward, 0, -1, ..., and return how many there are.

    ``row`` receives that of each node. ``kind`` is by label one that it places, or -1 for none.
    """
    first, target, label = graph[:3]
    rows, u = 0, np.uint64(len(row))
    while u > _ZERO:
        u -= _ONE
        arc = np.uint64(first[u])
        # A single arc that places nothing has the entries of its target: the row is shared.
        if first[u + _ONE] - first[u] == 1 and kind[label[arc]] < 0:
            row[u] = row[np.uint64(target[arc])]
        else:
            row[u] = -rows
            rows += 1

    return rows


def groups(peak: Ints, copies: Ints, rows: int, max_bytes: int) -> Groups:
    """Return groups of kinds of similar peak, as large as the bytes for so many rows allow.

    A group of kinds with c requests each (``copies``) has the product of all c + 1 as entries.
    """
    for max_entries in (WINDOW, WINDOW // 2, WINDOW // 4, 2, 1):  # with 1 no kind is in any group
        of, stride, first = np.full(len(peak), -1), np.ones(len(peak), np.int64), [0]
        entries = max_entries  # of the present group, which is full at first
        for k in np.argsort(peak, kind="stable"):
            # So many requests of one kind have more entries than a group may have: the kind is in
            # none, and what is left of it prices nothing.
            if copies[k] >= max_entries:
                continue
            # Entries multiply within a group, so a kind that would make too many opens the next
            # one.
            if entries * (copies[k] + 1) > max_entries:
                first.append(first[-1])
                entries = 1

            of[k], stride[k] = len(first) - 2, entries
            entries *= int(copies[k]) + 1
            first[-1] = first[-2] + entries

        # Larger groups say more. If tables of these take too much memory, smaller ones are tried.
        if rows * first[-1] <= max_bytes:
            break

    # As in a number of mixed digits, a column's digit for a kind says how many of it are left.
    column = np.arange(WINDOW)
    holds = column // stride[:, None] % (copies[:, None] + 1) > 0
    return Groups(of, stride, np.array(first), holds)


def moves(mask: Masks, price: Ints, cost: Ints, kinds: Groups) -> Moves:
    """Return what the arcs of each label do.

    `mask` (shape (labels, words)) has the kinds that each label places, as bits, and `price` (shape
    (labels, 2)) its min cost and the kind of this cost or -1. `cost` is by kind.
    """
    # Bit k of a row, in bytes from the lowest on, becomes column k.
    bits = np.unpackbits(mask.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    places = bits[:, : len(cost)].astype(bool)
    best = price[:, 1]
    # A kind without a group has no column that it could lower, so all others are outside.
    home = np.where(best >= 0, kinds.of[best], -1)
    is_outside = places & ((kinds.of[None, :] != home[:, None]) | (home[:, None] < 0))
    outside = np.where(is_outside, cost, NEVER).min(axis=1, initial=NEVER)
    label, kind = np.nonzero(places)  # in order of label
    begin = np.searchsorted(label, np.arange(len(mask) + 1))

    return Moves(begin, kind, best, np.ascontiguousarray(price[:, 0]), outside, cost)


class Costs(NamedTuple):
    """What the entries of a table follow from."""

    graph: Leaving
    row: Cells  # of each node
    move: Moves
    group: Groups
    step: int  # the unit of the entries


def tables(to_end: Ints, costs: Costs, between: Callable[[], None] | None = None) -> Bytes:
    """Return the rows, made from the end backward: each follows from those of later nodes.

    ``to_end`` has the cost to the end by node. ``between`` is called now and then.
    """
    row, group = costs.row, costs.group
    rows, width = int(row[-1]) + 1, int(group.first[-1])
    # Loops go over `WINDOW` columns also from the last group's first one on, hence so many more.
    flat = np.empty(rows * width + WINDOW, np.uint8)
    # At the end a path places nothing: nothing may be left, and all else costs `TOP` or more.
    flat[(rows - 1) * width :] = TOP
    flat[(rows - 1) * width + group.first[:-1]] = 0
    column, entries = np.arange(WINDOW), np.diff(group.first, append=group.first[-1])
    foreign = np.where(column < entries[:, None], 0, TOP).astype(np.uint8)
    # For a kind without a group, -1, this is the last group's row: it is never read.
    barred = np.where(group.holds, foreign[group.of], TOP).astype(np.uint8)
    bars = Bars(foreign, barred, np.empty(WINDOW, np.uint8))

    for last in range(len(to_end) - 1, 0, -_NODES):
        if between is not None:
            between()

        part = np.array([max(0, last - _NODES), last])
        _fill_rows(part, flat, to_end, costs, bars)

    return flat[: rows * width].reshape(rows, width)


@njit(allocates=False)
def _lower(to: Any, at: Any, add: Any, bar: Bytes, flat: Bytes) -> None:
    """Lower `WINDOW` bytes from ``to`` on to those from ``at`` on plus a cost, if these are less.

    Bytes where ``bar`` has 255 stay as they are.
    """
    headroom = np.uint8(TOP - add)
    for j in range(np.uint64(WINDOW)):
        # Sums are cut at TOP, so that they fit into a byte, and a bar of 255 makes them TOP.
        flat[to + j] = min(flat[to + j], np.uint8(add + min(headroom, flat[at + j] | bar[j])))


@njit(allocates=False, nogil=True)
def _fill_rows(part: Ints, flat: Bytes, to_end: Ints, costs: Costs, bars: Bars) -> None:
    """Fill in the rows of nodes part[1] - 1 to part[0], which lie one after another, backward.

    ``flat`` has the rows of all nodes, the first node's first: node u's begins at its row number
    times ``width``. The row of node part[1] is there.

    Bytes are compared many at a time. So an arc lowers the whole row by its cheapest kind. Then the
    columns of the group of this kind are as before, but lowered by the kinds outside the group, and
    those of each kind by this kind. An entry is at most what any schedule adds that places exactly
    what is left, since such a schedule leaves the node by one of the arcs.
    """
    (foreign, barred, saved), (graph, row, move, group, step) = bars, costs
    first, target, label = graph[:3]
    begin, kinds, bests, lowest, outside, cost = move
    of, stride, starts, _ = group
    width, unit, beyond = np.uint64(starts[-1]), np.uint64(step), TOP * step
    end, u, window = np.uint64(part[0]), np.uint64(part[1]), np.uint64(WINDOW)
    last_row = row[u]

    while u > end:
        u -= _ONE
        # Backward, each further row has a smaller number; else the node shares one that is there.
        if row[u] >= last_row:
            continue

        last_row = row[u]
        base = np.uint64(last_row) * width
        for j in range(width):
            flat[base + j] = np.uint8(TOP)
        for a in range(np.uint64(first[u]), np.uint64(first[u + _ONE])):
            v, number = np.uint64(target[a]), np.uint64(label[a])
            # What the cost to the end rises by on this arc, but for what the arc itself costs.
            rise = to_end[v] - to_end[u]
            # Through this arc all entries are TOP or more, and there is nothing to lower.
            if rise + lowest[number] >= beyond:
                continue

            after, best = np.uint64(row[v]) * width, bests[number]
            home = of[best] if best >= 0 else np.int64(-1)
            low = np.uint64(starts[max(home, 0)])  # without a home nothing reads what is saved
            for j in range(window):
                saved[j] = flat[base + low + j]

            # Divisions round down: an entry may say too little, but never too much.
            add = np.uint8(np.uint64(rise + lowest[number]) // unit)
            headroom = np.uint8(TOP - add)
            for j in range(width):
                flat[base + j] = min(flat[base + j], np.uint8(add + min(headroom, flat[after + j])))
            # The cheapest kind may not be placed where none of it is left: restore the columns of
            # its group, and lower them by the kinds outside the group.
            if home >= 0:
                bar = foreign[home]
                for j in range(window):
                    flat[base + low + j] = flat[base + low + j] if bar[j] else saved[j]
                if outside[number] < NEVER and rise + outside[number] < beyond:
                    add = np.uint8(np.uint64(rise + outside[number]) // unit)
                    _lower(base + low, after + low, add, bar, flat)

            for i in range(np.uint64(begin[number]), np.uint64(begin[number + _ONE])):
                k = np.uint64(kinds[i])
                # With one of kind k left, the schedule may place it here: the entry is that of one
                # less.
                if of[k] >= 0 and rise + cost[k] < beyond:
                    low = np.uint64(starts[of[k]])
                    add = np.uint8(np.uint64(rise + cost[k]) // unit)
                    _lower(base + low, after + low - np.uint64(stride[k]), add, barred[k], flat)


@njit(allocates=False)
def rises(row: Any, table: Bytes, columns: Ints) -> Any:
    """Return by how many steps the cost to the end rises at least, if just so much is left.

    ``columns`` has, by group, the column of what is left of its kinds.
    """
    highest, at = np.uint8(0), np.uint64(row)
    for g in range(np.uint64(len(columns))):
        # Each entry is a lower bound on the same rise, so the max of them is one.
        highest = max(highest, table[at, np.uint64(columns[g])])

    return np.int64(highest)
