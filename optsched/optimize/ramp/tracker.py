"""Trackers of the ramp relaxation: automata that follow a path, compiled.

A tracker is a multiset of live items or a row of counters. `optsched.optimize.ramp.product` makes a
graph finer by one. Import this module lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.judge.life import record
from optsched.problem.kernel import njit

MARGIN = 512
"""Room kept free in every growing array while one node is expanded."""
TABLE_MARGIN = 16 * MARGIN
"""The same for the table of a tracker: the rows of so many states."""
UNKNOWN, REFUSED = -2, -1
"""In place of a state: it has not been looked for yet, or a path may not go there."""
LAST, NUMBER, COLUMNS, BEFORE, AFTER = 0, 1, 2, 3, 4
"""Columns of a state's row: its last node in a product, its number, how many columns there are, the
state one round earlier, and from here on the states after the symbols."""
JOIN, END = -1, -2
"""In place of a column: steps that leave the state as it is; to end, it must be the final one."""
_ONE = np.uint64(1)
_STATE = record(
    ("items", np.int32),  # how many there are
    ("weight", np.int32),  # of all of them
    ("row", np.int32),  # where its row begins
)
_HUGE = 2**22


class Automaton(NamedTuple):
    """A tracker as compiled functions take it; see `Tracker` for its arrays.

    Attributes
    ----------
    width, capacity, final : int
    span : int
        An item is the number (class of its floor) x span + (its weight).
    peak, floor_class, floor, heaviest, items, info, table, slots, count : ndarray
    row : ndarray of int32
        Scratch space for the items of one state.
    """

    width: Any
    capacity: Any
    final: Any
    span: Any
    peak: Any
    floor_class: Any
    floor: Any
    heaviest: Any
    items: Any
    info: Any
    table: Any
    slots: Any
    count: Any
    row: Any


@dataclass(eq=False)
class Tracker:
    """A finite automaton that follows a path: its states are made on demand.

    A state is known by the place in one table where its row begins. Rows are as long as there are
    symbols that fit, so that the table is small beside the caches.

    A state is a multiset of (weight, floor) items. With ``width`` 0 it is a row of counters, and
    all states are there from the beginning.

    Parameters
    ----------
    symbol : ndarray of int32, shape (kinds,)
        What the tracker sees of a kind.
    width : int
        The number of items that a state may have, and one more.
    capacity : int
        The largest weight of a state.
    final : int
        The state in which a path may end.
    peak, floor_class : ndarray of int32, shape (symbols,)
        The item that a symbol puts into the multiset. Peaks ascend.
    floor : ndarray of int32, shape (classes,)
        The weight after which an item of the class vanishes.
    heaviest : ndarray of int64, shape (classes, requests + 1)
        The peaks of the class's requests, the largest first, then -1.
    items : ndarray of int32, shape (room, width)
        The items of each state in ascending order.
    info : ndarray of records, shape (room,)
        For each state the number of its items, their weight and its row, in order of numbers.
    table : ndarray of int32
        The rows of the states (`LAST`, ...), with `REFUSED` or `UNKNOWN` for a state. Symbols
        beyond the last column are refused.
    slots : ndarray of int32
        A hash table of the multisets.
    count : ndarray of int64, shape (2,)
        The number of states, and the length of their rows.
    """

    symbol: NDArray[np.int32]
    width: int
    capacity: int
    final: int
    peak: NDArray[np.int32]
    floor_class: NDArray[np.int32]
    floor: NDArray[np.int32]
    heaviest: NDArray[np.int64]
    items: NDArray[np.int32]
    info: NDArray[Any]
    table: NDArray[np.int32]
    slots: NDArray[np.int32]
    count: NDArray[np.int64]

    @property
    def symbols(self) -> int:
        """Number of symbols."""
        return len(self.peak)

    def compiled(self) -> Automaton:
        """Return the tracker as compiled functions take it."""
        return Automaton(
            self.width, self.capacity, self.final, self.capacity + 1, self.peak, self.floor_class,
            self.floor, self.heaviest, self.items, self.info, self.table, self.slots, self.count,
            np.zeros(self.width + 2, dtype=np.int32),
        )  # fmt: skip

    def make_room(self) -> None:
        """Make room for the states that the expansion of one node can add."""
        if self.width == 0:
            return
        count, entries = self.count.tolist()
        self.table = wider(self.table, entries + TABLE_MARGIN + 1)
        if count + MARGIN < len(self.info):
            return
        need = count + 2 * MARGIN
        self.items, self.info = wider(self.items, need), wider(self.info, need)
        if 2 * need > len(self.slots):
            self.slots = np.full(len(self.slots) * 4, -1, dtype=np.int32)
            _enter_all(self.compiled())


def multiset_tracker(
    peak: NDArray[np.int64],
    floor: NDArray[np.int64],
    copies: NDArray[np.int64],
    capacity: int,
    kind_of: NDArray[np.int64],
    own_peak: NDArray[np.int64],
) -> Tracker:
    """Return the tracker of live items, given each kind's peak and the floor it has here.

    ``kind_of`` and ``own_peak`` are the kinds and peaks of the requests. At no time does a state
    hold more items above some weight than there are requests with a peak above it.
    """
    pairs, symbol = np.unique(np.stack([peak, floor], axis=1), axis=0, return_inverse=True)
    floors, classes = np.unique(pairs[:, 1], return_inverse=True)
    symbol, classes, peaks = symbol.reshape(-1), classes.reshape(-1), pairs[:, 0]
    heaviest = np.full((len(floors), len(own_peak) + 1), -1, dtype=np.int64)
    class_of = classes[symbol[kind_of]]
    for c in range(len(floors)):
        mine = own_peak[class_of == c]
        heaviest[c, : len(mine)] = -np.sort(-mine)
    width = int(min(copies.sum(), capacity // floors.min())) + 1
    room, columns = 4 * MARGIN, AFTER + int(np.searchsorted(peaks, capacity, side="right"))
    tracker = Tracker(
        symbol=symbol.astype(np.int32),
        width=width,
        capacity=capacity,
        final=0,
        peak=peaks.astype(np.int32),
        floor_class=classes.astype(np.int32),
        floor=floors.astype(np.int32),
        heaviest=heaviest,
        items=np.zeros((room, width), dtype=np.int32),
        info=np.zeros(room, dtype=_STATE),
        table=np.zeros(4 * TABLE_MARGIN, dtype=np.int32),
        slots=np.full(4 * MARGIN, -1, dtype=np.int32),
        count=np.array([1, columns]),
    )
    tracker.table[:AFTER], tracker.table[AFTER:columns] = (-1, 0, columns, UNKNOWN), UNKNOWN
    tracker.info[0] = 0, 0, 0
    tracker.slots[int(_hash_items(tracker.items[0], 0)) & (len(tracker.slots) - 1)] = 0
    return tracker


def counting_tracker(groups: list[list[int]], copies: NDArray[np.int64]) -> Tracker:
    """Return the tracker that counts placements from each group of kinds, up to its copies."""
    caps = [int(copies[group].sum()) for group in groups]
    states = int(np.prod([c + 1 for c in caps], dtype=np.int64))
    symbol = np.zeros(len(copies), dtype=np.int32)
    number = np.arange(states)
    table = np.empty((states, AFTER + len(groups) + 1), dtype=np.int32)
    columns = table.shape[1]
    table[:] = columns * number[:, None]
    table[:, LAST], table[:, NUMBER], table[:, COLUMNS] = -1, number, columns
    step = 1
    for g, (group, cap) in enumerate(zip(groups, caps, strict=True), AFTER + 1):
        symbol[group] = g - AFTER
        table[:, g] = np.where(number // step % (cap + 1) < cap, columns * (number + step), REFUSED)
        step *= cap + 1
    none = np.zeros(1, dtype=np.int32)
    return Tracker(
        symbol=symbol,
        width=0,
        capacity=0,
        final=columns * (states - 1),
        peak=np.zeros(len(groups) + 1, dtype=np.int32),
        floor_class=none,
        floor=none,
        heaviest=np.zeros((1, 1), dtype=np.int64),
        items=np.zeros((1, 1), dtype=np.int32),
        info=np.zeros(states, dtype=_STATE),
        table=table.reshape(-1),
        slots=np.full(1, -1, dtype=np.int32),
        count=np.array([states, table.size]),
    )


def wider(array: NDArray[Any], needed: int) -> NDArray[Any]:
    """Return the array with at least so many rows; what new ones hold is not defined.

    A large array is the same one, of another size. No view of it may be in use.
    """
    if needed <= len(array):
        return array
    rows = max(needed, len(array) + len(array) // 2)
    if array.nbytes >= _HUGE:  # it moves to other addresses without a copy
        array.resize((rows, *array.shape[1:]), refcheck=False)
        return array
    more = np.empty((rows, *array.shape[1:]), dtype=array.dtype)
    # Records are copied as bytes: field by field it takes 40 times as long.
    raw = np.dtype((np.void, array.dtype.itemsize))
    more.view(raw)[: len(array)] = array.view(raw)
    return more


@njit(nogil=True)
def _hash_items(row: Any, length: int) -> np.uint64:
    h = np.uint64(1469598103934665603) + np.uint64(length)
    for k in range(length):
        h = (h ^ np.uint64(row[k])) * np.uint64(1099511628211)
        h ^= h >> np.uint64(29)
    return h >> np.uint64(8)


@njit(nogil=True)
def _enter_all(tracker: Automaton) -> None:
    """Enter every state in the hash table, which is empty."""
    slots = tracker.slots
    last = np.uint64(slots.shape[0] - 1)
    for s in range(tracker.count[0]):
        at = _hash_items(tracker.items[s], tracker.info[s].items) & last
        while slots[at] >= 0:
            at = (at + _ONE) & last
        slots[at] = s


@njit(nogil=True)
def state_after(row: int, column: int, tracker: Automaton) -> int:
    """Return the state after a symbol or a round that has not been followed from here before.

    A state may not hold more items of a class above a weight than requests have such a peak. One
    function does it all, since numba counts references to arrays that are passed on.
    """
    (
        _, capacity, _, span, peak, floor_class, floor, heaviest, items, info, table, slots, count,
        to,
    ) = tracker  # fmt: skip
    s, symbol = np.uint64(table[row + NUMBER]), column - AFTER
    held, length = info[s].items, 0
    if column == BEFORE:  # every item is one lighter, those at their floor are gone
        c, base, weight = 0, 0, 0
        for k in range(held):
            item = items[s, k]
            while item >= base + span:
                c, base = c + 1, base + span
            if item - base > floor[c]:
                to[length] = item - 1
                length += 1
                weight += item - base - 1
    elif peak[symbol] < floor[floor_class[symbol]]:
        table[row + column] = row  # it is there when it completes, but leaves no trace
        return row
    else:
        c = floor_class[symbol]
        base = c * span
        item = base + peak[symbol]
        while length < held and items[s, length] < item:
            to[length] = items[s, length]
            length += 1
        to[length] = item
        for k in range(length, held):
            to[k + 1] = items[s, k]
        length, weight, rank = held + 1, info[s].weight + peak[symbol], 0
        for k in range(held, -1, -1):
            if base <= to[k] < base + span:
                if to[k] - base > heaviest[c, rank]:
                    table[row + column] = REFUSED
                    return REFUSED
                rank += 1
    last = np.uint64(slots.shape[0] - 1)
    at = _hash_items(to, length) & last
    while slots[at] >= 0:
        s = np.uint64(slots[at])
        k = 0
        while k < length and items[s, k] == to[k]:
            k += 1
        if k == length and info[s].items == length:
            table[row + column] = info[s].row
            return info[s].row
        at = (at + _ONE) & last
    new, begin = count[0], count[1]
    slots[at] = new
    items[new, :length] = to[:length]
    info[new].items, info[new].weight, info[new].row = length, weight, begin
    end = begin + AFTER
    for p in peak:
        if weight + p > capacity:
            break
        table[end] = UNKNOWN
        end += 1
    table[begin + LAST], table[begin + NUMBER] = -1, new
    table[begin + COLUMNS], table[begin + BEFORE] = end - begin, UNKNOWN
    count[0], count[1] = new + 1, end
    table[row + column] = begin
    return begin
