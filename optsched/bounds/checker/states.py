"""Trackers of the compiled replay: what nodes of a finer graph distinguish, as numbered states.

A tracker says which state follows when a request of a kind is placed, and when a round passes. Two
kinds of tracker share the form `States`: multisets of live items, which are found and numbered as
they are met, and counters of placed requests, which are all known in advance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Budget, TooLarge
from optsched.problem.kernel import njit

MAX_CELLS = 600_000_000
"""Max cells of 4 bytes for the states of one level."""
MARGIN = 512
"""Room for what is added from one look at the room to the next: one node, one state, and at most
129 arcs, labels or parts of a label."""
UNKNOWN, REFUSED = -2, -1
SIZE, WEIGHT, ROUND, JOIN, END, LAST, ITEMS, SYMBOLS = range(8)
"""Columns of a state: the number of its items, their weight, the states that follow when a round
passes, at the join and at the end, its last node in the product, the column of its first item, then
from `SYMBOLS` on the states after a placement of each symbol that fits."""
PLACE = 0
"""What arcs do is a column, or this where they place."""
WORDS = 2
"""The words of a mask, which has a bit for each kind: kind k has bit k % 64 of word k // 64."""
_ONE = np.uint64(1)


class States(NamedTuple):
    """A tracker: multisets of (class of floor, weight), or counters if ``bits`` is 0.

    ``rows`` has the columns of one state after another (`SIZE` and so on), and the number of a
    state is where its own begin. An item is class * 2**bits + weight. Symbols ascend in peak, and a
    state has columns only for those that fit beside it. A state that may not follow is `REFUSED`,
    and one that is not computed yet `UNKNOWN`.
    """

    bits: Any
    capacity: Any
    symbol: Any  # of each kind
    alike: Any  # by symbol, the mask of its kinds
    peak: Any  # by symbol
    own: Any  # by symbol, the class of its floor
    floor: Any  # by class
    heavy: Any  # by class, the peaks of its requests, the largest first
    rows: Any
    slots: Any  # a hash table of the multisets
    row: Any  # items to be looked up
    count: Any  # of cells of ``rows``, and of states


@njit(allocates=False)
def mixed(x: Any) -> np.uint64:
    """Return a hash of an integer."""
    x = np.uint64(x) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(31)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))


@njit(allocates=False)
def _enter_multisets(cells: int, rows: Any, slots: Any) -> None:
    """Enter the states in the hash table, which is empty."""
    last, s = np.uint64(len(slots) - 1), 0
    while s < cells:
        at = _key(s + rows[s + ITEMS], rows[s + SIZE], rows) & last
        while slots[at] >= 0:
            at = (at + _ONE) & last
        slots[at] = s
        s += rows[s + ITEMS] + rows[s + SIZE]


@njit(allocates=False)
def _key(first: int, size: int, row: Any) -> np.uint64:
    h = mixed(size + 1)
    for k in range(np.uint64(first), np.uint64(first + size)):
        h = mixed(h ^ np.uint64(row[k] + 1))
    return h


@njit(allocates=False)
def _multiset(size: int, weight: Any, t: States) -> Any:
    """Return the number of the state with the items in ``t.row``."""
    rows, slots, row, peak = t.rows, t.slots, t.row, t.peak
    last = np.uint64(len(slots) - 1)
    at = _key(0, size, row) & last
    while slots[at] >= 0:
        s = np.int64(slots[at])
        same, first = rows[s + SIZE] == size, s + rows[s + ITEMS]
        for k in range(size if same else 0):
            same &= rows[first + k] == row[k]
        if same:
            return s
        at = (at + _ONE) & last
    new, fit = t.count[0], 0
    while fit < len(peak) and weight + peak[fit] <= t.capacity:
        rows[new + SYMBOLS + fit] = UNKNOWN
        fit += 1
    first = SYMBOLS + fit
    for k in range(size):
        rows[new + first + k] = row[k]
    rows[new + SIZE], rows[new + WEIGHT], rows[new + ITEMS] = size, weight, first
    rows[new + ROUND], rows[new + LAST] = UNKNOWN, -1
    rows[new + JOIN], rows[new + END] = new, new if size == 0 else REFUSED
    slots[at] = new
    t.count[0] += first + size
    t.count[1] += 1
    return np.int64(new)


@njit(allocates=False)
def before_round(s: Any, t: States) -> Any:
    """Return the state one round earlier."""
    rows, row, light = t.rows, t.row, (1 << t.bits) - 1
    if rows[s + ROUND] == UNKNOWN:
        size, weight = 0, np.int64(0)
        first = s + rows[s + ITEMS]
        for k in range(first, first + rows[s + SIZE]):
            item = np.int64(rows[k])
            w = item & light
            if w > t.floor[item >> t.bits]:
                row[size] = item - 1
                size += 1
                weight += w - 1
        rows[s + ROUND] = _multiset(size, weight, t)
    return np.int64(rows[s + ROUND])


@njit(allocates=False)
def after_placing(s: Any, g: Any, t: States) -> Any:
    """Return the state with one more request of symbol g, which fits, or `REFUSED`.

    No schedule has more live requests above a weight than there are such requests.
    """
    own, peak, bits, rows, row = t.own[g], t.peak[g], t.bits, t.rows, t.row
    size, found = rows[s + SIZE], np.int64(REFUSED)
    if peak < t.floor[own]:
        found = np.int64(s)
    else:
        heavy, new, light = t.heavy, (own << bits) + peak, (1 << bits) - 1
        k, first = size, s + rows[s + ITEMS]
        while k > 0 and rows[first + k - 1] > new:
            row[k] = rows[first + k - 1]
            k -= 1
        row[k] = new
        for j in range(k):
            row[j] = rows[first + j]
        rank, right = 0, True
        for k in range(size, -1, -1):  # the heaviest first
            if row[k] >> bits == own:
                right &= rank < heavy.shape[1] and row[k] & light <= heavy[own, rank]
                rank += 1
        if right:
            found = _multiset(size + 1, rows[s + WEIGHT] + peak, t)
    rows[s + SYMBOLS + g] = found
    return found


def wider(array: Any, rows: int) -> Any:
    """Return the array with so many rows, or as it is if it has them."""
    if rows <= len(array):
        return array
    more = np.empty((rows, *array.shape[1:]), array.dtype)
    more[: len(array)] = array
    return more


class Kinds(NamedTuple):
    """The different requests of a period."""

    about: list[Any]  # arrival, peak and floor of each kind
    copies: list[int]
    capacity: int


def multisets(kinds: Kinds, floors: list[int]) -> States:
    """Return the tracker of live items, with one state: none is live.

    Parameters
    ----------
    kinds : Kinds
    floors : list of int
        The floor of each kind that is tracked.

    Returns
    -------
    States
    """
    pairs = [(p, up) for (_, p, _), up in zip(kinds.about, floors, strict=True)]
    symbols, classes = sorted(set(pairs)), sorted({up for _, up in pairs})
    peaks: list[list[int]] = [[] for _ in classes]
    for (p, up), c in zip(pairs, kinds.copies, strict=True):
        peaks[classes.index(up)] += [p] * c
    n = sum(kinds.copies)
    heavy = np.full((len(classes), n + 1), -1, np.int64)
    for c, mine in enumerate(peaks):
        heavy[c, : len(mine)] = sorted(mine, reverse=True)
    width = min(n, kinds.capacity // min(classes)) + 2
    bits = max(kinds.capacity, max(p for p, _ in pairs)).bit_length()
    numbers = [symbols.index(pair) for pair in pairs]
    t = _tracker(bits, kinds.capacity, numbers, 8 * MARGIN, width)._replace(
        peak=np.array([p for p, _ in symbols]), floor=np.array(classes), heavy=heavy,
        own=np.array([classes.index(up) for _, up in symbols]),
    )  # fmt: skip
    _multiset(0, 0, t)
    return t


def counters(kinds: Kinds, groups: list[set[int]], budget: Budget) -> States:
    """Return the tracker that counts how often each group of kinds was placed.

    Parameters
    ----------
    kinds : Kinds
    groups : list of set of int
    budget : Budget

    Returns
    -------
    States

    Raises
    ------
    TooLarge
        There are too many states.
    """
    full = [sum(kinds.copies[k] for k in group) for group in groups]
    states = 1
    for most in full:
        budget.spend(states)
        states *= most + 1
        if states > MAX_CELLS:
            raise TooLarge(f"a level of more than {MAX_CELLS} cells; too large to check")
    member = [tuple(k in group for group in groups) for k in range(len(kinds.about))]
    symbols = sorted(set(member))
    if states * (SYMBOLS + len(symbols)) > MAX_CELLS:
        raise TooLarge(f"a level of more than {MAX_CELLS} cells; too large to check")
    numbers = [symbols.index(m) for m in member]
    cells = SYMBOLS + len(symbols)  # of a state
    t = _tracker(0, kinds.capacity, numbers, states * cells, 1)
    budget.spend_compiled(states * len(symbols) * (1 + len(groups)))
    number, step = np.arange(states, dtype=np.int32), 1
    total, right = np.zeros(len(symbols), np.int32), np.ones(states, bool)
    allowed = np.ones((len(symbols), states), bool)
    for g, most in enumerate(full):
        digit = number // step % (most + 1)
        right &= digit == most
        for j, groups_of in enumerate(symbols):
            if groups_of[g]:
                allowed[j] &= digit < most
                total[j] += step
        step *= most + 1
    rows = t.rows.reshape(states, cells)
    for j, may in enumerate(allowed):
        rows[:, SYMBOLS + j] = np.where(may, (number + total[j]) * cells, REFUSED)
    rows[:, ROUND] = rows[:, JOIN] = number * cells
    rows[:, END] = np.where(right, number * cells, REFUSED)
    rows[:, [SIZE, WEIGHT]], rows[:, LAST], rows[:, ITEMS] = 0, -1, cells
    t.count[0] = states * cells
    return t


def mask_of(kinds: Iterable[int]) -> Any:
    """Return the mask of some different kinds."""
    bits = sum(1 << int(k) for k in kinds)
    return np.frombuffer(bits.to_bytes(8 * WORDS, "little"), "<u8")


def _tracker(bits: int, capacity: int, symbol: list[int], cells: int, width: int) -> States:
    """Return a tracker without states."""
    symbols = max(symbol) + 1
    members = ([k for k, own in enumerate(symbol) if own == g] for g in range(symbols))
    alike = np.array([mask_of(kinds) for kinds in members], np.uint64)
    none = np.zeros(1, np.int64)
    return States(
        bits, capacity, np.array(symbol), alike, np.zeros(symbols, np.int64), none, none,
        none.reshape(1, 1), np.empty(cells, np.int32), np.full(2 * MARGIN, -1, np.int32),
        np.empty(width + 1, np.int64), np.zeros(2, np.int64),
    )  # fmt: skip


def with_room(t: States, new: int) -> tuple[States, tuple[int, int]]:
    """Return a tracker with room for so many new states, and how far it may then be filled.

    There is always room for so many, and a quarter of the hash table is free.
    """
    if not t.bits:
        return t, (2 * MAX_CELLS, 2 * MAX_CELLS)
    cells, states = t.count.tolist()
    # A state has no more cells than its columns, one for each symbol, and the items.
    margin = new * (SYMBOLS + len(t.peak) + len(t.row))
    if len(t.rows) < cells + 2 * margin:
        t = t._replace(rows=wider(t.rows, min(16 * cells, MAX_CELLS) + 4 * margin))
    if 3 * len(t.slots) // 4 < states + 2 * new:
        t = t._replace(slots=np.full(2 << (states + new).bit_length(), -1, np.int32))
        _enter_multisets(cells, t.rows, t.slots)
    return t, (len(t.rows) - margin, 3 * len(t.slots) // 4 - new)
