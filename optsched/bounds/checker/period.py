"""One period of a ramp leaf: its graph, which is refined level by level in 64-bit integers.

The checker replays certificates with it, and the prover (`optsched.optimize.ramp`) makes them: it
chooses floors, multipliers and targets. Tests hold a plain replay of Python integers against it.

Arrays grow as they are filled. The nodes, arcs, states and labels of a level are
limited, to about 10 GiB in all, and what an enumeration adds to 3 GiB each of tables and of labels.
Products are in `product`, trackers in `states`, and the enumeration in `enumeration` and `groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from optsched.bounds.checker.parts import Budget, Cells, Ints, Limits, Masks, TooLarge
from optsched.bounds.checker.product import (
    ARCS,
    KEPT,
    LABELS,
    NEVER,
    NODES,
    PARTS,
    Fine,
    Graph,
    Kept,
    Labels,
    Leaving,
    Level,
    Prices,
    enter_masks,
    label_of,
    loop_costs,
    places,
    product,
    set_costs,
    thin,
)
from optsched.bounds.checker.states import (
    END,
    JOIN,
    MARGIN,
    ROUND,
    Kinds,
    States,
    masks_of,
    new_tracker,
    wider,
    with_space,
)
from optsched.problem.kernel import njit

_ONE, _TWO = np.uint64(1), np.uint64(2)


@njit(allocates=False, nogil=True)
def _sort_arcs(end: Cells, one: Cells, two: Cells, first: Ints, other: Cells, label: Cells) -> None:
    """Put two properties of arcs in order of an end; ``first`` has zeros, two more than nodes."""
    for a in range(np.uint64(len(end))):
        # A counting sort. Counts stand two places on, so that after the sums each entry is where
        # the arcs of its node begin, one place on, and rises as they are put there.
        first[np.uint64(end[a]) + _TWO] += 1
    for v in range(_ONE, np.uint64(len(first))):
        first[v] += first[v - _ONE]
    for a in range(np.uint64(len(end))):
        after = np.uint64(end[a]) + _ONE
        place = np.uint64(first[after])
        other[place], label[place] = one[a], two[a]
        first[after] += 1


def sorted_by(end: Cells, nodes: int, one: Cells, two: Cells) -> tuple[Ints, Cells, Cells]:
    """Return where each node's arcs begin, and two properties of the arcs in order of that end."""
    first = np.zeros(nodes + 2, np.int64)
    other, label = np.empty(len(end), np.int32), np.empty(len(end), np.int32)
    _sort_arcs(end, one, two, first, other, label)
    return first[:-1], other, label


def outward(graph: Graph) -> Leaving:
    """Return a graph with its arcs in order of source."""
    target = np.repeat(np.arange(graph.nodes, dtype=np.int32), np.diff(graph.into))
    return Leaving(*sorted_by(graph.source, graph.nodes, target, graph.label), graph.loop)


def inward(graph: Leaving) -> Graph:
    """Return a graph with its arcs in order of target."""
    source = np.repeat(np.arange(graph.nodes, dtype=np.int32), np.diff(graph.first))
    return Graph(*sorted_by(graph.target, graph.nodes, source, graph.label), graph.loop)


@njit(allocates=False, nogil=True)
def _costs_to_end(graph: Graph, price: Ints, rest: Ints) -> None:
    """Set each node's min cost to the end, where `NEVER` stands."""
    into, source, label = graph.into, graph.source, graph.label
    rest[-1] = 0
    # Nodes are in topological order: from the end backward each cost is known when it is passed on.
    for after in range(np.uint64(len(rest))):
        v = np.uint64(len(rest)) - _ONE - after
        if rest[v] < NEVER:
            for a in range(np.uint64(into[v]), np.uint64(into[v + _ONE])):
                u = np.uint64(source[a])
                rest[u] = min(rest[u], rest[v] + price[np.uint64(label[a])])


@njit(nogil=True)
def _cheapest_kinds(mask: Masks, rounds: Ints, fixed: int, cost: Ints, order: Ints) -> Ints:
    price = np.empty((len(mask), 2), np.int64)
    for label in range(len(mask)):
        # A label of no kinds is on no arc.
        price[label, 0], price[label, 1] = NEVER // 4, -1
        if label < fixed:
            price[label, 0] = rounds[label]
        for k in order if label >= fixed else order[:0]:  # the cheapest first
            # Kinds come in order of cost, so the first that the label places is the cheapest.
            if places(mask, label, k):
                price[label, 0], price[label, 1] = cost[k], k
                break

    return price


def _expect_at_most(count: int, largest: int, what: str) -> None:
    if count > largest:
        raise TooLarge(f"a level of more than {largest} {what}; too large to check")


def _widen_if_full(array: Any, rows: int, margin: int) -> Any:
    """Return the array with room for four times as many rows if so many nearly fill it."""
    return array if len(array) >= rows + 2 * margin else wider(array, 4 * (rows + margin))


class Period:
    """The graph of a period, refined level by level.

    ``completed`` says how many requests can have completed by each round with a clock at most.
    """

    rest: Ints | None
    """Each node's cost to the end by the last multipliers, None before the first ones."""

    def __init__(self, kinds: Kinds, completed: Ints, budget: Budget, limits: Limits) -> None:
        self.kinds, self.limits = kinds, limits
        self.n, self.clock, self.budget = len(kinds.peaks), len(completed) - 1, budget
        self.rest = None
        self._margin = MARGIN + 4 * len(kinds.copies)
        rounds = [(ROUND, m) for m in range(self.n + 1)]
        fixed = [*rounds, (JOIN, 0), *((END, self.n * t) for t in range(self.clock + 1))]
        self.join, self.fixed = self.n + 1, len(fixed)
        self.count = np.array([0, 0, self.fixed, 0, 0])
        none, words = np.zeros(0, np.int64), -(-len(kinds.copies) // 64)
        mask, part = np.zeros((0, words), np.uint64), np.zeros((0, 2), np.int32)
        self.labels = Labels(none, none, mask, none, none, none, none, part, none)
        self._widen_labels(self.fixed + 4 * self._margin, 4 * self._margin)
        self.labels.what[: self.fixed], self.labels.rounds[: self.fixed] = np.array(fixed).T
        self.labels.mask[: self.fixed] = 0
        self.graph = self._first_graph(completed)

    def _first_graph(self, completed: Ints) -> Graph:
        """Return the graph of the nodes (m) without a clock, then of (t, m) with one, t down to 0.

        A clock of any length is valid; 0 means none. By round t only some requests can have
        completed, so that m is at least n minus their number.
        """
        n, ready = self.n, self.kinds.ready
        everything = self._label_of(range(len(ready)))
        marks = np.unique(ready)
        placing = np.array([self._label_of(np.flatnonzero(ready <= t)) for t in marks])
        # Nodes of the part with a clock, from its last round back: round and m of each.
        rounds = np.arange(self.clock, -1, -1) if self.clock else np.arange(0)
        number = completed[rounds]
        first = n + 1 + np.concatenate([[0], np.cumsum(number + 1)])
        end = int(first[-1])
        t = np.repeat(rounds, number + 1)
        met = n - np.repeat(number + first[:-1], number + 1) + np.arange(n + 1, end)

        # Two arcs of each node at most: one that places or ends, then one a round back; before
        # them those without a clock, that place (or end, where there is no clock) and join.
        arcs = np.zeros((end, 2, 2), np.int32)
        is_there = np.ones((end, 2), bool)
        m = np.arange(n + 1)
        arcs[m, 0] = np.stack([m + 1, np.full(n + 1, everything)], axis=1)
        is_there[n, 0] = not self.clock
        arcs[n, 0] = end, self.join + 1
        joined = m - (n - number[0]) if self.clock else m - n - 1
        is_there[m, 1] = joined >= 0
        arcs[m, 1] = np.stack([n + 1 + joined, np.full(n + 1, self.join)], axis=1)

        node = np.arange(n + 1, end)
        place = np.searchsorted(marks, t, side="right") - 1
        is_there[node, 0] = (met == n) | (place >= 0)
        arcs[node, 0, 0] = np.where(met == n, end, node + 1)
        arcs[node, 0, 1] = np.where(met == n, self.join + 1 + t, placing[np.maximum(place, 0)])
        fewest = np.repeat(n - np.append(number, -1)[1:], number + 1)  # met one round before
        is_there[node, 1] = met >= fewest
        arcs[node, 1, 0] = np.repeat(first[1:], number + 1) + met - fewest
        arcs[node, 1, 1] = met

        loop = np.full(end + 1, -1, np.int32)
        loop[1 : n + 1] = m[1:]
        source = np.repeat(np.arange(end, dtype=np.int32), is_there.sum(axis=1))
        target, label = arcs[is_there].T

        return Graph(*sorted_by(target, end + 1, source, label), loop)

    def _label_of(self, kinds: Any) -> int:
        """Return the label that places one of some kinds."""
        self.labels.mask[self.count[LABELS]] = masks_of([kinds], len(self.kinds.copies))[0]
        return int(label_of(self.labels, np.zeros(len(self.kinds.copies), np.int64), self.count))

    def fork(self) -> Period:
        """Return another one that can be refined further while this one stays as it is."""
        other, used = copy(self), slice(int(self.count[LABELS]))
        other.count = self.count.copy()
        columns = [column[used].copy() for column in self.labels[:7]]
        other.labels = Labels._make([*columns, np.zeros((0, 2), np.int32), self.labels.slots])
        other._widen_labels(2 * used.stop + 4 * self._margin, 4 * self._margin)

        return other

    @property
    def made(self) -> int:
        """The number of nodes that were made for the last level."""
        return int(self.count[NODES])

    def refine(
        self,
        floors: Ints | None,
        pi: Ints,
        unit: int,
        cutoff: int,
        between: Callable[[], None] | None = None,
    ) -> bool:
        """Take the product with a tracker, for multipliers; return whether a path is left.

        Before the first multipliers, nothing is deleted. Without floors there is no tracker, and
        paths above the cutoff are only deleted. ``between`` is called now and then, and with an
        error that it raises the graph stays as it was.
        """
        if floors is None:
            return self.rest is None or self.thin(pi, unit, cutoff)

        graph, limits, tracker = self.graph, self.limits, new_tracker(self.kinds, floors)
        prices = self._set_prices(pi, unit, cutoff)
        sizes = (graph.nodes, limits.nodes), (graph.arcs, limits.arcs)
        rows = [min(32 * (2 * self._margin + x), top + 4 * self._margin) for x, top in sizes]
        first, state = np.zeros(graph.nodes + 1, np.int64), np.empty(rows[0], np.int32)
        here, into = np.empty(rows[0], np.int64), np.zeros(rows[0], np.int64)
        fine = Fine(first, state, here, into, *(np.empty(rows[1], np.int32) for _ in range(5)))

        self.count[[NODES, ARCS, PARTS, KEPT]] = v = 0
        while v < graph.nodes:
            if between is not None:
                between()

            tracker, fine, room = self._widen(tracker, fine)
            level = Level(graph, self.labels, prices, tracker, fine)
            v = product(v, level, self.count, room)

        self._expect_small_level(tracker)
        nodes, used = int(self.count[NODES]), int(self.count[ARCS])
        self.budget.spend_compiled(nodes + used)
        if fine.first[-1] == fine.first[-2]:
            return False

        loop = loop_costs(graph.loop, fine, tracker)
        self.graph = Graph(fine.into[: nodes + 1], fine.source[:used], fine.label[:used], loop)
        return True

    def _set_prices(self, pi: Ints, unit: int, cutoff: int) -> Prices:
        """Note what labels cost. Before the first multipliers, there is no cutoff."""
        cost, labels, some = -pi, self.labels, slice(self.fixed)
        order = np.argsort(cost, kind="stable")
        cheapest = masks_of((order[:number] for number in range(len(order) + 1)), len(order))
        labels.low[some] = labels.high[some] = labels.rounds[some] * unit
        labels.first[some] = -1
        set_costs(self.fixed, int(self.count[LABELS]), labels, cost)
        rest, limit = self.rest, cutoff
        if rest is None:
            rest, limit = np.zeros(self.graph.nodes, np.int64), 2**61

        return Prices(cost, cost[order], cheapest, unit, rest, limit)

    def thin(self, pi: Ints, unit: int, cutoff: int) -> bool:
        """Keep the paths up to the cutoff and their costs to the end; return if one is left."""
        (into, source, label, loop), prices = self.graph, self._set_prices(pi, unit, cutoff)
        kept = Kept(np.empty(len(loop) + 1, np.int64), np.empty(len(loop), np.int32))
        kept.here[0] = 0
        self.count[[NODES, ARCS, KEPT]] = v = 0

        while v < len(loop):
            self._widen_labels(2 * int(self.count[LABELS]) + 4 * self._margin, 0)
            room = len(self.labels.what) - self._margin
            v = thin(v, self.graph, self.labels, prices, kept, self.count, room)

        nodes, arcs = int(self.count[NODES]), int(self.count[ARCS])
        self.budget.spend_compiled(nodes + arcs)
        self.graph = Graph(into[: nodes + 1], source[:arcs], label[:arcs], loop[:nodes])
        self.rest = prices.rest[:nodes]

        return bool(kept.place[-1] >= 0)

    def _expect_small_level(self, tracker: States) -> None:
        """Refuse a level that is too large."""
        _expect_at_most(int(self.count[NODES]), self.limits.nodes, "nodes")
        _expect_at_most(int(self.count[ARCS]), self.limits.arcs, "arcs")
        _expect_at_most(int(tracker.made[0]), self.limits.cells, "cells")

    def _widen(self, tracker: States, fine: Fine) -> tuple[States, Fine, Ints]:
        """Return wider arrays and how far they may be filled, unless a level is too large."""
        self._expect_small_level(tracker)
        margin = self._margin
        nodes, arcs, labels, parts, kept = self.count.tolist()
        # Only rows that are written take memory, and copies take time. What is short of room gets
        # more than twice of it, since the node that was short is made again.
        by_node = (_widen_if_full(column, nodes, margin) for column in fine[1:4])
        source, label = (_widen_if_full(column, arcs + nodes, margin) for column in fine[4:6])
        scratch = list(fine[6:])
        if len(fine.from_node) < len(source):  # what is in it is not needed any more
            scratch = [np.empty(len(source), np.int32) for _ in scratch]

        tracker, states = with_space(tracker, len(tracker.peak) + 2, self.limits.cells)
        self._widen_labels(4 * (labels + margin), 4 * (parts + margin))
        fine = Fine._make([fine.first, *by_node, source, label, *scratch])
        sizes = len(fine.state), len(fine.source), len(self.labels.what), len(self.labels.part)
        until = kept + self.limits.rest

        return tracker, fine, np.array([*(x - margin for x in sizes), until, *states])

    def _widen_labels(self, labels: int, parts: int) -> None:
        """Make room for so many labels and so many parts of theirs, unless there are too many."""
        _expect_at_most(int(self.count[LABELS]), self.limits.labels, "labels")
        *columns, part, slots = self.labels
        if len(slots) < 2 * labels or len(columns[0]) < labels:
            slots = np.full(2 << labels.bit_length(), -1, np.int32)
            wide = [*(wider(column, labels) for column in columns), wider(part, parts), slots]
            self.labels = Labels._make(wide)
            enter_masks(self.labels, self.fixed, int(self.count[LABELS]))
        else:
            self.labels = self.labels._replace(part=wider(part, parts))

    def bound(self, pi: Ints, unit: int) -> int | None:
        """Return the min cost of a path, in units, and keep each node's cost to the end."""
        price = self.prices(pi, unit)[:, 0]
        self.rest = np.full(self.graph.nodes, NEVER, np.int64)
        _costs_to_end(self.graph, price, self.rest)
        return None if self.rest[0] >= NEVER else int(self.rest[0])

    def prices(self, pi: Ints, unit: int) -> Ints:
        """Return each label's min cost, and the kind of this cost or -1."""
        count, cost, labels = int(self.count[LABELS]), -pi, self.labels
        order = np.argsort(cost, kind="stable")
        rounds = labels.rounds[:count] * unit
        prices: Ints = _cheapest_kinds(labels.mask[:count], rounds, self.fixed, cost, order)
        return prices
