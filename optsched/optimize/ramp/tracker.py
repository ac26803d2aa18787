"""Trackers of the ramp relaxation: automata that follow a path, compiled.

A tracker is a multiset of live items or a row of counters; `optsched.optimize.ramp.graph.product`
makes a graph finer by one. Import lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

MARGIN = 512
"""Room kept free in every growing array while one node is expanded."""
_ONE = np.uint64(1)


@dataclass(eq=False)
class Tracker:
    """A finite automaton that follows a path: states by number, made on demand.

    Multisets of (weight, floor) items, or tables made beforehand (``width`` 0).

    Parameters
    ----------
    symbol : ndarray of int32, shape (kinds,)
        What the tracker sees of a kind.
    peak, floor_class : ndarray of int32, shape (symbols,)
        The item that a symbol puts into the multiset.
    floor : ndarray of int32, shape (classes,)
        Weight after which an item of the class vanishes.
    heaviest : ndarray of int64, shape (classes, requests + 1)
        Peaks of the class's requests, the largest first, then -1.
    info : ndarray of int32, shape (room, 4)
        Of each state: number of items, their weight, the state a round earlier (-2: not known
        yet), and whether a path may end here.
    add : ndarray of int32, shape (symbols, room)
        The state after each symbol; -1: not allowed, -2: not known yet.
    """

    symbol: NDArray[np.int32]
    symbols: int
    width: int
    capacity: int
    peak: NDArray[np.int32]
    floor_class: NDArray[np.int32]
    floor: NDArray[np.int32]
    heaviest: NDArray[np.int64]
    items: NDArray[np.int32]
    info: NDArray[np.int32]
    add: NDArray[np.int32]
    slots: NDArray[np.int32]
    states: int


def multiset_tracker(
    peak: NDArray[np.int64],
    floor: NDArray[np.int64],
    copies: NDArray[np.int64],
    capacity: int,
    kind_of: NDArray[np.int64],
    own_peak: NDArray[np.int64],
) -> Tracker:
    """Return the tracker of live items, given each kind's peak and the floor it is given here.

    ``kind_of`` and ``own_peak`` are the requests' kinds and peaks, of which no more than there are
    may weigh so much at once.
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
    room = 4 * MARGIN
    tracker = Tracker(
        symbol=symbol.astype(np.int32),
        symbols=len(peaks),
        width=width,
        capacity=capacity,
        peak=peaks.astype(np.int32),
        floor_class=classes.astype(np.int32),
        floor=floors.astype(np.int32),
        heaviest=heaviest,
        items=np.zeros((room, width), dtype=np.int32),
        info=np.full((room, 4), -2, dtype=np.int32),
        add=np.full((len(peaks), room), -2, dtype=np.int32),
        slots=np.full(4 * MARGIN, -1, dtype=np.int32),
        states=1,
    )
    tracker.info[0] = 0, 0, 0, 1
    tracker.slots[int(_hash_items(tracker.items[0], 0)) & (len(tracker.slots) - 1)] = 0
    return tracker


def counting_tracker(groups: list[list[int]], copies: NDArray[np.int64]) -> Tracker:
    """Return the tracker that counts placements from each group of kinds, up to its copies."""
    caps = [int(copies[group].sum()) for group in groups]
    states = int(np.prod([c + 1 for c in caps], dtype=np.int64))
    symbol = np.zeros(len(copies), dtype=np.int32)
    add = np.zeros((len(groups) + 1, states), dtype=np.int32)
    number = np.arange(states)
    add[0] = number
    step = 1
    for g, (group, cap) in enumerate(zip(groups, caps, strict=True)):
        symbol[group] = g + 1
        digit = number // step % (cap + 1)
        add[g + 1] = np.where(digit < cap, number + step, -1)
        step *= cap + 1
    info = np.zeros((states, 4), dtype=np.int32)
    info[:, 2] = number
    info[-1, 3] = 1
    none = np.zeros(1, dtype=np.int32)
    return Tracker(
        symbol=symbol,
        symbols=len(groups) + 1,
        width=0,
        capacity=0,
        peak=np.zeros(len(groups) + 1, dtype=np.int32),
        floor_class=none,
        floor=none,
        heaviest=np.zeros((1, 1), dtype=np.int64),
        items=np.zeros((1, 1), dtype=np.int32),
        info=info,
        add=add,
        slots=np.full(1, -1, dtype=np.int32),
        states=states,
    )


@njit(cache=True, nogil=True)
def wider(array: Any, needed: int, fill: int) -> Any:
    """Return the array with at least so many rows, the new ones full of ``fill``."""
    if needed <= array.shape[0]:
        return array
    rows = max(needed, array.shape[0] + array.shape[0] // 2)
    more = np.empty((rows,) + array.shape[1:], dtype=array.dtype)  # noqa: RUF005 (numba)
    more[: array.shape[0]] = array
    more[array.shape[0] :] = fill
    return more


@njit(cache=True, nogil=True)
def _hash_items(row: Any, length: int) -> np.uint64:
    h = np.uint64(1469598103934665603) + np.uint64(length)
    for k in range(length):
        h = (h ^ np.uint64(row[k])) * np.uint64(1099511628211)
        h ^= h >> np.uint64(29)
    return h >> np.uint64(8)


@njit(cache=True, nogil=True)
def _state(row: Any, length: int, total: int, items: Any, info: Any, slots: Any, count: Any) -> int:
    """Return the number of the multiset in ``row``, new if it has none."""
    mask = np.uint64(slots.shape[0] - 1)
    at = _hash_items(row, length) & mask
    while slots[at] >= 0:
        s = slots[at]
        if info[s, 0] == length:
            same = True
            for k in range(length):
                if items[s, k] != row[k]:
                    same = False
                    break
            if same:
                return s
        at = (at + _ONE) & mask
    s = count[0]
    for k in range(length):
        items[s, k] = row[k]
    info[s, 0] = length
    info[s, 1] = total
    info[s, 2] = -2
    info[s, 3] = 1 if length == 0 else 0
    slots[at] = s
    count[0] = s + 1
    return s


@njit(cache=True, nogil=True)
def state_before(
    s: int, span: int, floor: Any, row: Any, items: Any, info: Any, slots: Any, count: Any
) -> int:  # fmt: skip
    """Return the state one round earlier: every item one lighter, those at their floor gone."""
    if info[s, 2] != -2:
        return info[s, 2]
    length = 0
    total = 0
    for k in range(info[s, 0]):
        item = items[s, k]
        w = item % span
        if w > floor[item // span]:
            row[length] = item - 1
            length += 1
            total += w - 1
    t = _state(row, length, total, items, info, slots, count)
    info[s, 2] = t
    return t


@njit(cache=True, nogil=True)
def state_after(
    s: int, symbol: int, span: int, capacity: int, peak: Any, floor_class: Any, floor: Any,
    heaviest: Any, row: Any, items: Any, info: Any, add: Any, slots: Any, count: Any
) -> int:  # fmt: skip
    """Return the state with one more item, or -1 where it does not fit."""
    if add[symbol, s] != -2:
        return add[symbol, s]
    p = peak[symbol]
    total = info[s, 1] + p
    if total > capacity:
        add[symbol, s] = -1
        return -1
    c = floor_class[symbol]
    if p < floor[c]:  # it is there when it completes, but leaves no trace
        add[symbol, s] = s
        return s
    code = c * span + p
    length = info[s, 0]
    at = 0
    while at < length and items[s, at] < code:
        row[at] = items[s, at]
        at += 1
    row[at] = code
    for k in range(at, length):
        row[k + 1] = items[s, k]
    # No more live items of a class than requests that heavy.
    rank = 0
    for k in range(length, -1, -1):
        if row[k] // span == c:
            if row[k] % span > heaviest[c, rank]:
                add[symbol, s] = -1
                return -1
            rank += 1
    t = _state(row, length + 1, total, items, info, slots, count)
    add[symbol, s] = t
    return t


@njit(cache=True, nogil=True)
def room_for_states(items: Any, info: Any, add: Any, slots: Any, count: Any) -> Any:
    """Return the arrays of a tracker's states with room for what one node can add."""
    need = count[0] + 2 * MARGIN
    items = wider(items, need, 0)
    info = wider(info, need, -2)
    if need > add.shape[1]:
        more = np.full((add.shape[0], info.shape[0]), -2, dtype=np.int32)
        more[:, : add.shape[1]] = add
        add = more
    if 2 * need > slots.shape[0]:
        slots = np.full(slots.shape[0] * 4, -1, dtype=np.int32)
        last = np.uint64(slots.shape[0] - 1)
        for s in range(count[0]):
            at = _hash_items(items[s], info[s, 0]) & last
            while slots[at] >= 0:
                at = (at + _ONE) & last
            slots[at] = s
    return items, info, add, slots
