"""Trackers of the compiled replay: what nodes of a finer graph distinguish, as numbered states.

A tracker says which state follows when a request of a kind is placed, and when a round passes. Two
kinds of tracker share the form `States`: multisets of live items, which are found and numbered as
they are met, and counters of placed requests, which are all known in advance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_parts import Budget, Rejected
from optsched.problem.kernel import njit

MAX_CELLS = 600_000_000
"""Max cells of 4 bytes for the states of one level."""
MARGIN = 512
"""Room for the states that one node of the graph before adds."""
UNKNOWN, REFUSED = -2, -1
PLACE, ROUND, JOIN, END = 0, -3, -2, -1
"""What arcs do. All but the first are also columns of `States.after`."""
_ONE = np.uint64(1)


class States(NamedTuple):
    """A tracker: multisets of (class of floor, weight), or counters if ``span`` is 0.

    ``after`` has a column of each symbol of a placement, then `ROUND`, `JOIN` and `END` from the
    end. A state that may not go there has `REFUSED`, and `UNKNOWN` is not computed yet.
    """

    span: Any
    capacity: Any
    symbol: Any  # of each kind
    alike: Any  # by symbol, the mask of its kinds
    peak: Any  # by symbol
    own: Any  # by symbol, the class of its floor
    floor: Any  # by class
    heavy: Any  # by class, the peaks of its requests, the largest first
    items: Any
    size: Any
    weight: Any
    after: Any
    slots: Any  # a hash table of the multisets
    row: Any  # items to be looked up
    count: Any  # of states


@njit
def mixed(x: Any) -> np.uint64:
    """Return a hash of an integer."""
    x = np.uint64(x) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(31)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(29))


@njit
def _enter_multisets(t: States) -> None:
    """Enter the states in the hash table, which is empty."""
    last = np.uint64(t.slots.shape[0] - 1)
    for s in range(t.count[0]):
        at = _key(t.items[s], t.size[s]) & last
        while t.slots[at] >= 0:
            at = (at + _ONE) & last
        t.slots[at] = s


@njit
def _key(row: Any, size: int) -> np.uint64:
    h = mixed(size + 1)
    for k in range(size):
        h = mixed(h ^ np.uint64(row[k] + 1))
    return h


@njit
def _multiset(size: int, weight: Any, t: States) -> int:
    """Return the number of the state whose items are in ``t.row``."""
    slots, items, sizes, row = t.slots, t.items, t.size, t.row
    last = np.uint64(slots.shape[0] - 1)
    at = _key(row, size) & last
    while slots[at] >= 0:
        s = slots[at]
        same = sizes[s] == size
        for k in range(size if same else 0):
            same &= items[s, k] == row[k]
        if same:
            return s
        at = (at + _ONE) & last
    new = t.count[0]
    items[new, :size] = row[:size]
    sizes[new], t.weight[new] = size, weight
    t.after[new, :] = UNKNOWN
    t.after[new, JOIN], t.after[new, END] = new, new if size == 0 else REFUSED
    slots[at] = new
    t.count[0] += 1
    return new


@njit
def before_round(s: Any, t: States) -> int:
    """Return the state one round earlier."""
    if t.after[s, ROUND] == UNKNOWN:
        items, row, span, floor = t.items[s], t.row, t.span, t.floor
        size = weight = 0
        for k in range(t.size[s]):
            own, w = divmod(items[k], span)
            if w > floor[own]:
                row[size] = items[k] - 1
                size += 1
                weight += w - 1
        t.after[s, ROUND] = _multiset(size, weight, t)
    return t.after[s, ROUND]


@njit
def after_placing(s: Any, g: Any, t: States) -> int:
    """Return the state with one more request of symbol g, or `REFUSED` if no schedule has it."""
    own, peak = t.own[g], t.peak[g]
    found = REFUSED
    if t.weight[s] + peak <= t.capacity:
        if peak < t.floor[own]:
            found = s
        else:
            items, row, span, heavy = t.items[s], t.row, t.span, t.heavy[own]
            new = own * span + peak
            k = t.size[s]
            while k > 0 and items[k - 1] > new:
                row[k] = items[k - 1]
                k -= 1
            row[k] = new
            row[:k] = items[:k]
            rank, right = 0, True
            for k in range(t.size[s], -1, -1):  # the heaviest first
                if row[k] // span == own:
                    right &= rank < heavy.shape[0] and row[k] % span <= heavy[rank]
                    rank += 1
            if right:
                found = _multiset(t.size[s] + 1, t.weight[s] + peak, t)
    t.after[s, g] = found
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
    span = max(kinds.capacity, max(p for p, _ in pairs)) + 1
    numbers = [symbols.index(pair) for pair in pairs]
    t = _tracker(span, kinds.capacity, numbers, 8 * MARGIN, len(symbols), width)._replace(
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
    Rejected
        There are too many states.
    """
    full = [sum(kinds.copies[k] for k in group) for group in groups]
    states = 1
    for most in full:
        budget.spend(states)
        states *= most + 1
        if states > MAX_CELLS:
            raise Rejected(f"a level of more than {MAX_CELLS} cells; too large to check")
    member = [tuple(k in group for group in groups) for k in range(len(kinds.about))]
    symbols = sorted(set(member))
    if states * (len(symbols) + 8) > MAX_CELLS:
        raise Rejected(f"a level of more than {MAX_CELLS} cells; too large to check")
    numbers = [symbols.index(m) for m in member]
    t = _tracker(0, kinds.capacity, numbers, states, len(symbols), 1)
    budget.spend(states * len(symbols) * (1 + len(groups)) // 8)
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
    for j, may in enumerate(allowed):
        t.after[:, j] = np.where(may, number + total[j], REFUSED)
    t.after[:, ROUND], t.after[:, JOIN], t.weight[:] = number, number, 0
    t.after[:, END] = np.where(right, number, REFUSED)
    t.count[0] = states
    return t


def _tracker(
    span: int, capacity: int, symbol: list[int], rows: int, symbols: int, width: int
) -> States:
    """Return a tracker without states."""
    alike = np.zeros(symbols, np.uint64)
    for k, g in enumerate(symbol):
        alike[g] |= np.uint64(1 << k)
    none = np.zeros(1, np.int64)
    return States(
        span, capacity, np.array(symbol), alike, none, none, none, none.reshape(1, 1),
        np.empty((rows, width), np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32),
        np.empty((rows, symbols + 3), np.int32), np.full(2 << rows.bit_length(), -1, np.int32),
        np.empty(width + 1, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


def with_rows(t: States, rows: int) -> States:
    """Return a tracker with room for so many states, or as it is if it has room or is complete."""
    if not t.span or rows <= len(t.size):
        return t
    t = t._replace(
        items=wider(t.items, rows), size=wider(t.size, rows), weight=wider(t.weight, rows),
        after=wider(t.after, rows),
        slots=np.full(2 << rows.bit_length(), -1, np.int32),
    )  # fmt: skip
    _enter_multisets(t)
    return t
