"""Compiled replay of one period of a ramp leaf, in 64-bit integers: the fast twin.

`optsched.bounds.checker.ramp` replays small periods in plain Python. This module does the same for
large ones, and tests hold both equal. It shares no code with what makes certificates.

`fits` shows first that no cost can overflow: a path has at most `MAX_NODES` steps, and the costs of
so many steps stay below 2**60. Arrays grow as they are filled. The nodes, arcs, states and labels
of a level are limited, to about 10 GiB in all, and what an enumeration adds to 3 GiB each of tables
and of labels. Products are in `product`, trackers in `states`, and the enumeration in `enumeration`
and `groups`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.bounds.checker.parts import Budget, TooLarge
from optsched.bounds.checker.product import (
    ARCS,
    KEPT,
    LABELS,
    NEVER,
    NODES,
    PARTS,
    Fine,
    Graph,
    Labels,
    Prices,
    enter_masks,
    label_of,
    learn,
    loops,
    places,
    product,
    thin,
)
from optsched.bounds.checker.states import (
    END,
    JOIN,
    MARGIN,
    MAX_CELLS,
    PLACE,
    ROUND,
    WORDS,
    Kinds,
    States,
    counters,
    mask_of,
    multisets,
    wider,
    with_room,
)
from optsched.problem.kernel import njit

MAX_NODES, MAX_ARCS = 60_000_000, 240_000_000
"""Max nodes and arcs of one level."""
MAX_LABELS = 1_000_000
"""Max different sets of kinds on the arcs of a period."""
_ONE, _TWO = np.uint64(1), np.uint64(2)


@njit(allocates=False)
def _place(end: Any, one: Any, two: Any, first: Any, other: Any, label: Any) -> None:
    """Put two properties of arcs in order of an end; ``first`` has zeros, two more than nodes."""
    for a in range(np.uint64(len(end))):
        first[np.uint64(end[a]) + _TWO] += 1
    for v in range(_ONE, np.uint64(len(first))):
        first[v] += first[v - _ONE]
    for a in range(np.uint64(len(end))):
        own = np.uint64(end[a]) + _ONE
        at = np.uint64(first[own])
        other[at], label[at] = one[a], two[a]
        first[own] += 1


def sorted_by(end: Any, nodes: int, one: Any, two: Any) -> tuple[Any, Any, Any]:
    """Return where each node's arcs begin, and two properties of the arcs in order of that end."""
    first = np.zeros(nodes + 2, np.int64)
    other, label = np.empty(len(end), np.int32), np.empty(len(end), np.int32)
    _place(end, one, two, first, other, label)
    return first[:-1], other, label


@njit(allocates=False)
def _costs_to_end(graph: Graph, price: Any, rest: Any) -> None:
    """Set each node's min cost to the end, where `NEVER` stands."""
    into, source, label = graph.into, graph.source, graph.label
    rest[-1] = 0
    for after in range(np.uint64(len(rest))):
        v = np.uint64(len(rest)) - _ONE - after
        if rest[v] < NEVER:
            for a in range(np.uint64(into[v]), np.uint64(into[v + _ONE])):
                u = np.uint64(source[a])
                rest[u] = min(rest[u], rest[v] + price[np.uint64(label[a])])


@njit
def _prices(mask: Any, rounds: Any, fixed: int, cost: Any) -> Any:
    price = np.empty((len(mask), 2), np.int64)
    for label in range(len(mask)):
        # A label of no kinds is on no arc.
        least = rounds[label] if label < fixed else np.int64(NEVER // 4)
        price[label, 0], price[label, 1] = least, -1
        for k in range(len(cost)):
            if places(mask, label, k) and cost[k] < price[label, 0]:
                price[label, 0], price[label, 1] = cost[k], k
    return price


def _limit(found: int, most: int, what: str) -> None:
    if found > most:
        raise TooLarge(f"a level of more than {most} {what}; too large to check")


def _roomy(array: Any, rows: int) -> Any:
    """Return the array with room for four times as many rows if so many nearly fill it."""
    return array if len(array) >= rows + 2 * MARGIN else wider(array, 4 * (rows + MARGIN))


def fits(
    requests: Any, kinds: int, numbers: list[int], unit: int, clock: int, capacity: int
) -> bool:
    """Return whether the integers of arrays and masks hold all that a replay can meet.

    Parameters
    ----------
    requests : list of (arrival, peak, floor)
    kinds : int
        The number of different requests.
    numbers : list of int
        All floors and multipliers of the period, and its value.
    unit, clock, capacity : int
    """
    sizes = [x for request in requests for x in request]
    n = len(requests)
    step = n * unit + max(map(abs, numbers), default=0)
    return (
        kinds <= 64 * WORDS
        and n <= 255
        and max(sizes) < 2**24
        and (kinds + 1) << max(capacity, *sizes).bit_length() < 2**31
        and sum(peak for _, peak, _ in requests) < 2**31
        and max(map(abs, numbers), default=0) < 2**31
        and step * (MAX_NODES + clock + sum(sizes)) < 2**60
    )


class Compiled:
    """The graph of a period, refined level by level."""

    def __init__(self, base: Any, kinds: list[Any], copies: list[int], capacity: int,
                 clock: int, budget: Budget) -> None:  # fmt: skip
        self.kinds, self.copies, self.capacity = kinds, copies, capacity
        self.n, self.clock, self._budget = sum(copies), clock, budget
        self.rest: Any = None
        fixed = [(ROUND, m) for m in range(self.n + 1)] + [(JOIN, 0)]
        fixed += [(END, self.n * t) for t in range(clock + 1)]
        self.count = np.array([0, 0, len(fixed), 0, 0])
        self.fixed = len(fixed)
        none = np.zeros(0, np.int64)
        self.labels = Labels(
            none, none, np.zeros((0, WORDS), np.uint64), none, none, none, none,
            np.zeros((0, 2), np.int32), none,
        )  # fmt: skip
        self._more_labels(len(fixed) + 4 * MARGIN, 4 * MARGIN)
        self.labels.what[: self.fixed], self.labels.rounds[: self.fixed] = np.array(fixed).T
        self.labels.mask[: self.fixed] = 0
        number, place = {}, {pair: at for at, pair in enumerate(fixed)}
        for at, label in enumerate(base.labels):
            kind = {"round": ROUND, "join": JOIN, "end": END, "place": PLACE}[label.what]
            if kind == PLACE:
                free = np.zeros(len(kinds), np.int64)
                number[at] = label_of(*mask_of(label.kinds), self.labels, free, self.count)
            else:
                number[at] = place[kind, label.rounds]
        nodes = len(base.loop)
        source = np.repeat(np.arange(nodes), np.diff(np.array(base.first)))
        labels = np.array([number[x] for x in base.label])
        target = np.array(base.target)
        self.graph = Graph(
            *sorted_by(target, nodes, source, labels), np.array(base.loop, dtype=np.int32)
        )

    def refine(self, floors: list[int] | None, groups: list[set[int]], pi: list[int], unit: int,
               cutoff: int) -> bool:  # fmt: skip
        """Take the product with a tracker, for multipliers; return whether a path is left.

        Before the first multipliers, nothing is deleted.
        """
        if floors is None and not groups and self.rest is not None:
            return self._thin(pi, unit, cutoff)
        graph = self.graph
        of = Kinds(self.kinds, self.copies, self.capacity)
        tracker = counters(of, groups, self._budget) if floors is None else multisets(of, floors)
        prices = self._learn(pi, unit, cutoff)
        sizes = (len(graph.loop), MAX_NODES), (len(graph.label), MAX_ARCS)
        rows = [min(32 * (2 * MARGIN + x), most + 4 * MARGIN) for x, most in sizes]
        fine = Fine(
            np.zeros(len(graph.loop) + 1, np.int64), np.empty(rows[0], np.int32),
            np.empty(rows[0], np.int64), np.zeros(rows[0], np.int64),
            *(np.empty(rows[1], np.int32) for _ in range(5)),
        )  # fmt: skip
        self.count[[NODES, ARCS, PARTS, KEPT]] = v = 0
        while v < len(graph.loop):
            tracker, fine, room = self._more_room(tracker, fine)
            v = product(v, graph, self.labels, prices, tracker, fine, self.count, room)
        self._limit_level(tracker)
        nodes, arcs = int(self.count[NODES]), int(self.count[ARCS])
        self._budget.spend_compiled(nodes + arcs)
        if fine.first[-1] == fine.first[-2]:
            return False
        loop = loops(graph.loop, fine, tracker)
        self.graph = Graph(fine.into[: nodes + 1], fine.source[:arcs], fine.label[:arcs], loop)
        return True

    def _learn(self, pi: list[int], unit: int, cutoff: int) -> Prices:
        """Note what labels cost. Before the first multipliers, there is no cutoff."""
        cost, labels, some = -np.array(pi, dtype=np.int64), self.labels, slice(self.fixed)
        order = np.argsort(cost, kind="stable")
        masks = np.array([mask_of(order[:few]) for few in range(len(order) + 1)], np.uint64)
        labels.low[some] = labels.high[some] = labels.rounds[some] * unit
        labels.first[some] = -1
        learn(self.fixed, int(self.count[LABELS]), labels, cost)
        if self.rest is None:
            return Prices(cost, cost[order], masks, unit, np.zeros(len(self.graph.loop), np.int64),
                          2**61)  # fmt: skip
        return Prices(cost, cost[order], masks, unit, self.rest, cutoff)

    def _thin(self, pi: list[int], unit: int, cutoff: int) -> bool:
        """Keep the paths up to the cutoff and their costs to the end; return if one is left."""
        (into, source, label, loop), prices = self.graph, self._learn(pi, unit, cutoff)
        here, place = np.empty(len(loop) + 1, np.int64), np.empty(len(loop), np.int32)
        here[0] = 0
        self.count[[NODES, ARCS, KEPT]] = v = 0
        while v < len(loop):
            self._more_labels(2 * int(self.count[LABELS]) + 4 * MARGIN, 0)
            room = len(self.labels.what) - MARGIN
            v = thin(v, self.graph, self.labels, prices, here, place, self.count, room)
        nodes, arcs, _, _, _ = self.count.tolist()
        self._budget.spend_compiled(nodes + arcs)
        self.graph = Graph(into[: nodes + 1], source[:arcs], label[:arcs], loop[:nodes])
        self.rest = self.rest[:nodes]
        return bool(place[-1] >= 0)

    def _limit_level(self, tracker: States) -> None:
        """Refuse a level that is too large."""
        _limit(int(self.count[NODES]), MAX_NODES, "nodes")
        _limit(int(self.count[ARCS]), MAX_ARCS, "arcs")
        _limit(int(tracker.count[0]), MAX_CELLS, "cells")

    def _more_room(self, tracker: States, fine: Fine) -> tuple[States, Fine, Any]:
        """Return wider arrays and how far they may be filled, unless a level is too large."""
        self._limit_level(tracker)
        nodes, arcs, labels, parts, _ = self.count.tolist()
        # Only rows that are written take memory, and copies take time. What is short of room gets
        # more than twice of it, since the node that was short is made again.
        by_node = (_roomy(column, nodes) for column in fine[1:4])
        source, label = (_roomy(column, arcs + nodes) for column in fine[4:6])
        scratch = list(fine[6:])
        if len(fine.from_node) < len(source):  # what is in it is not needed any more
            scratch = [np.empty(len(source), np.int32) for _ in scratch]
        tracker, states = with_room(tracker, len(tracker.peak) + 2)
        self._more_labels(4 * (labels + MARGIN), 4 * (parts + MARGIN))
        fine = Fine._make([fine.first, *by_node, source, label, *scratch])
        full = len(fine.state), len(fine.source), len(self.labels.what), len(self.labels.part)
        return tracker, fine, np.array([*(x - MARGIN for x in full), 0, *states])

    def _more_labels(self, labels: int, parts: int) -> None:
        """Make room for so many labels and so many parts of theirs, unless there are too many."""
        _limit(int(self.count[LABELS]), MAX_LABELS, "labels")
        *columns, part, _ = self.labels
        slots = np.full(2 << labels.bit_length(), -1, np.int32)
        wide = [*(wider(column, labels) for column in columns), wider(part, parts), slots]
        self.labels = Labels._make(wide)
        enter_masks(self.labels, self.fixed, int(self.count[LABELS]))

    def bound(self, pi: list[int], unit: int) -> int | None:
        """Return the least cost of a path, in units, and keep each node's cost to the end."""
        price = self.prices(pi, unit)[:, 0]
        self.rest = np.full(len(self.graph.loop), NEVER, np.int64)
        _costs_to_end(self.graph, price, self.rest)
        return None if self.rest[0] >= NEVER else int(self.rest[0])

    def prices(self, pi: list[int], unit: int) -> Any:
        """Return each label's least cost, and the kind of this cost or -1."""
        count = int(self.count[LABELS])
        cost = -np.array(pi, dtype=np.int64)
        labels = self.labels
        return _prices(labels.mask[:count], labels.rounds[:count] * unit, self.fixed, cost)

    def none_left(self, pi: list[int], unit: int, cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""
        from optsched.bounds.checker.enumeration import none_left

        if not self._thin(pi, unit, cutoff):
            return True
        graph, price = self.graph, self.prices(pi, unit)
        target = np.repeat(np.arange(len(graph.loop), dtype=np.int32), np.diff(graph.into))
        outward = sorted_by(graph.source, len(graph.loop), target, graph.label)
        return none_left(self, outward, price, pi, unit, cutoff, self._budget)
