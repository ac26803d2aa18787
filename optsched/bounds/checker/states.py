"""Trackers: what nodes of a finer graph distinguish, as numbered states.

A tracker says which state follows when a request of a kind is placed, and when a round passes. Its
states are multisets of live items, which are found and numbered as they are met.

Time goes backward (`product`). A *live item* is a request that was placed, and its *weight* the
tokens that it holds: its peak at first, one less with each round that passes. It is forgotten after
the round in which it holds its *floor*. Requests of equal floor are a *class*, and kinds of equal
peak and floor a *symbol*. In all functions s is a state's number, g a symbol and t the tracker.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Cells, Ints, Masks
from optsched.problem.kernel import njit

MARGIN = 512
"""Space for what is added from one look at the space to the next: one node, one state, and at most
`MARGIN` / 4 arcs, labels or parts of a label for each 128 kinds."""
# In place of the state that follows: it is not computed yet, or there may be none.
UNKNOWN, REFUSED = -2, -1
# Columns of a state: the number of its items, their weight, the states that follow when a round
# passes, at the join and at the end, its last node in the product, the column of its first item,
# then from `SYMBOLS` on the states after a placement of each symbol that fits.
SIZE, WEIGHT, ROUND, JOIN, END, LAST, ITEMS, SYMBOLS = range(8)
# What arcs do is a column, or this where they place.
PLACE = 0
_ONE = np.uint64(1)


class States(NamedTuple):
    """A tracker: multisets of (class of floor, weight).

    ``rows`` has the columns of one state after another (`SIZE` and so on), and the number of a
    state is where its own begin. An item is class * span + weight. Symbols ascend in peak, and a
    state has columns only for those that fit beside it. A state that may not follow is `REFUSED`,
    and one that is not computed yet `UNKNOWN`.
    """

    span: int  # more than any weight
    capacity: int
    members: Masks  # by symbol, the mask of its kinds
    peak: Ints  # by symbol
    home: Ints  # by symbol, the class of its floor
    floor: Ints  # by class
    heavy: Ints  # by class, the peaks of its requests, the largest first, then -1
    rows: Cells
    slots: Cells  # a hash table of the multisets: states, or -1; its size is a power of 2
    items: Ints  # scratch: the items of the state to be looked up
    made: Ints  # how many cells of ``rows`` are in use, and how many states there are


@njit(allocates=False)
def mix(x: Any) -> np.uint64:
    """Return a hash of an integer: odd multipliers and shifts mix all of its bits."""
    x = np.uint64(x) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(31)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))


@njit(allocates=False)
def _enter_states(cells: int, rows: Cells, slots: Cells) -> None:
    """Enter the states in the hash table, which is empty.

    They fill so many cells of ``rows``. The size of the table is a power of 2, so that & with
    ``last`` takes a remainder.
    """
    last, s = np.uint64(len(slots) - 1), 0
    while s < cells:
        slot = _hash_of(s + rows[s + ITEMS], rows[s + SIZE], rows) & last
        # All states differ, so each takes the first empty slot from its hash on.
        while slots[slot] >= 0:
            slot = (slot + _ONE) & last

        slots[slot] = s
        s += rows[s + ITEMS] + rows[s + SIZE]  # the next state begins behind this one's items


@njit(allocates=False)
def _hash_of(first: int, size: int, row: Cells | Ints) -> np.uint64:
    """Return a hash of ``size`` items of a row, from ``first`` on."""
    key = mix(size + 1)
    for k in range(np.uint64(first), np.uint64(first + size)):
        key = mix(key ^ np.uint64(row[k] + 1))

    return key


@njit(allocates=False)
def _find_state(size: int, weight: Any, t: States) -> Any:
    """Return the number of the state of the first ``size`` items in ``t.items``, perhaps a new one.

    ``weight`` is the sum of their weights. The items ascend, so that a multiset is one row.
    """
    rows, slots, items, peak = t.rows, t.slots, t.items, t.peak
    last = np.uint64(len(slots) - 1)  # a power of two less one, so that & takes a remainder
    slot = _hash_of(0, size, items) & last  # from item 0 on

    while slots[slot] >= 0:
        s = np.int64(slots[slot])
        same, first = rows[s + SIZE] == size, s + rows[s + ITEMS]
        # Hashes may agree by chance, so the items decide.
        for k in range(size if same else 0):
            same &= rows[first + k] == items[k]
        if same:
            return s

        slot = (slot + _ONE) & last

    new, symbols = t.made[0], 0
    # Symbols ascend in peak: those from the first that does not fit on need no column.
    while symbols < len(peak) and weight + peak[symbols] <= t.capacity:
        rows[new + SYMBOLS + symbols] = UNKNOWN
        symbols += 1

    first = SYMBOLS + symbols
    for k in range(size):
        rows[new + first + k] = items[k]

    rows[new + SIZE], rows[new + WEIGHT], rows[new + ITEMS] = size, weight, first
    rows[new + ROUND], rows[new + LAST] = UNKNOWN, -1
    # To join the clock changes nothing. At the end, which is a schedule's start, nothing is live.
    rows[new + JOIN], rows[new + END] = new, new if size == 0 else REFUSED
    slots[slot] = new
    t.made[0] += first + size
    t.made[1] += 1

    return np.int64(new)


@njit(allocates=False)
def before_round(s: Any, t: States) -> Any:
    """Return the state one round earlier: each item loses a token, and leaves at its floor."""
    rows, items = t.rows, t.items
    # Each state's answer is kept in its row, and computed once.
    if rows[s + ROUND] == UNKNOWN:
        size, weight, home, base = 0, np.int64(0), 0, np.int64(0)
        first = s + rows[s + ITEMS]
        for k in range(first, first + rows[s + SIZE]):
            item = np.int64(rows[k])
            # An item is class * span + weight. Items ascend, so the class (``home``) only rises.
            while item >= base + t.span:
                home, base = home + 1, base + t.span
            # At its floor a request is forgotten, which only allows more schedules.
            if item - base > t.floor[home]:
                items[size] = item - 1
                size += 1
                weight += item - base - 1

        rows[s + ROUND] = _find_state(size, weight, t)

    return np.int64(rows[s + ROUND])


@njit(allocates=False)
def after_placing(s: Any, g: Any, t: States) -> Any:
    """Return the state with one more request of symbol g, which fits, or `REFUSED`.

    It is kept in the row of s, so that it is computed once.
    """
    home, peak, rows, items = t.home[g], t.peak[g], t.rows, t.items
    size, after = rows[s + SIZE], np.int64(REFUSED)
    # A request that is forgotten at once changes no state.
    if peak < t.floor[home]:
        after = np.int64(s)
    else:
        heavy, base = t.heavy, home * t.span
        k, first = size, s + rows[s + ITEMS]
        # Items stay in order: those that are larger move up by one, and the new one takes the gap.
        while k > 0 and rows[first + k - 1] > base + peak:
            items[k] = rows[first + k - 1]
            k -= 1

        items[k] = base + peak
        for j in range(k):
            items[j] = rows[first + j]

        # In a schedule the r-th largest live item of a class is at most the r-th largest peak of
        # the class's requests. (``heavy`` has these peaks.) No schedule has a state that is not so.
        rank, is_valid = 0, True
        for k in range(size, -1, -1):
            if base <= items[k] < base + t.span:
                is_valid &= rank < heavy.shape[1] and items[k] - base <= heavy[home, rank]
                rank += 1

        if is_valid:
            after = _find_state(size + 1, rows[s + WEIGHT] + peak, t)

    rows[s + SYMBOLS + g] = after
    return after


def wider(array: Any, rows: int) -> Any:
    """Return a copy of the array with so many rows, or the array itself if it has them."""
    if rows <= len(array):
        return array

    more = np.empty((rows, *array.shape[1:]), array.dtype)
    more[: len(array)] = array
    return more


class Kinds(NamedTuple):
    """The different requests of a period."""

    ready: Ints  # by kind, the round in which it completes at the earliest: arrival + output
    peak: Ints  # by kind
    floor: Ints  # by kind, the tokens that it holds in its first round
    copies: Ints  # by kind, how many requests are of it
    capacity: int
    peaks: Ints  # by request, not by kind: those of one kind after those of another


def kinds_of(requests: list[tuple[int, int, int]], copies: list[int], capacity: int) -> Kinds:
    """Return the kinds of requests given by arrival, peak and floor."""
    arrival, peak, floor = np.array(requests, np.int64).T
    ready, number = arrival + peak - floor + 1, np.array(copies, np.int64)
    return Kinds(ready, peak, floor, number, capacity, np.repeat(peak, number))


def new_tracker(kinds: Kinds, floors: Ints) -> States:
    """Return a tracker of live items, whose only state is that none is live.

    ``floors`` has by kind the tokens with which an item of it is forgotten. Kinds of equal peak and
    floor have the same symbol, and those of equal floor are a class. `with_space` widens ``rows``
    and ``slots``, so at first they need no more than a few states.
    """
    # By symbol a row (peak, floor), and by kind its symbol; by symbol the class of its floor.
    pairs, symbol = np.unique(np.stack([kinds.peak, floors], axis=1), axis=0, return_inverse=True)
    classes, home = np.unique(pairs[:, 1], return_inverse=True)
    symbol = symbol.reshape(-1)
    heavy = np.full((len(classes), len(kinds.peaks) + 1), -1, np.int64)
    home_of_request = np.repeat(home[symbol], kinds.copies)

    # `kinds.peaks` is by request, in the order of ``home_of_request``. By class the largest come
    # first. A row has one entry more than there are requests, so that it ends with -1.
    for c in range(len(classes)):
        peaks = kinds.peaks[home_of_request == c]
        heavy[c, : len(peaks)] = -np.sort(-peaks)

    # No more items are live than there are requests, or fit with the smallest floor. Two more: the
    # one that is being placed, and one to spare.
    width = min(len(kinds.peaks), kinds.capacity // int(classes[0])) + 2
    span = 1 + max(kinds.capacity, int(kinds.peak.max()))  # more than any weight
    t = States(
        span=span,
        capacity=kinds.capacity,
        members=masks_of((np.flatnonzero(symbol == g) for g in range(len(pairs))), len(symbol)),
        peak=np.ascontiguousarray(pairs[:, 0]),
        home=home,
        floor=classes,
        heavy=heavy,
        rows=np.empty(8 * MARGIN, np.int32),
        slots=np.full(2 * MARGIN, -1, np.int32),
        items=np.empty(width + 1, np.int64),
        made=np.zeros(2, np.int64),
    )
    _find_state(0, 0, t)  # of no items, whose weight is 0: it becomes state 0

    return t


def masks_of(sets: Iterable[Iterable[int]], kinds: int) -> Masks:
    """Return the mask of each set of kinds: kind k has bit k % 64 of word k // 64."""
    words = -(-kinds // 64)
    masks = [sum(1 << int(k) for k in members).to_bytes(8 * words, "little") for members in sets]
    return np.frombuffer(b"".join(masks), "<u8").reshape(len(masks), words).astype(np.uint64)


def with_space(t: States, new: int, max_cells: int) -> tuple[States, tuple[int, int]]:
    """Return a tracker with space for so many more states, and how far it may be filled.

    The latter says how many cells and how many states it may have before the next look: then there
    is still space for ``new`` states. Rows grow some sixteenfold, but to little more than
    ``max_cells`` cells.
    """
    cells, states = t.made.tolist()  # that are in use
    # A state has no more cells than its columns, one for each symbol, and the items.
    cells_of_new = new * (SYMBOLS + len(t.peak) + len(t.items))
    # Space for twice as many is looked for, so that after this look some may be added before the
    # limit is reached, behind which ``new`` states still fit.
    if len(t.rows) < cells + 2 * cells_of_new:
        t = t._replace(rows=wider(t.rows, min(16 * cells, max_cells) + 4 * cells_of_new))
    # At most three quarters of the slots are taken, so that few states share a hash.
    if 3 * len(t.slots) // 4 < states + 2 * new:
        t = t._replace(slots=np.full(2 << (states + new).bit_length(), -1, np.int32))
        _enter_states(cells, t.rows, t.slots)

    return t, (len(t.rows) - cells_of_new, 3 * len(t.slots) // 4 - new)
