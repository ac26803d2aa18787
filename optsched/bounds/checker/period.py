"""One period of a ramp leaf: its graph, which is refined level by level in 64-bit integers.

The checker replays certificates with it, and the prover (`optsched.optimize.ramp`) makes them: it
chooses floors, multipliers and targets. Tests hold a plain replay of Python integers against it.

Arrays grow as they are filled. The nodes, arcs, states and labels of a level are
limited, to about 10 GiB in all, and what an enumeration adds to 3 GiB each of tables and of labels.
Products are in `product`, trackers in `states`, and the enumeration in `enumeration` and `groups`.

``pi`` are multipliers by kind, over the denominator ``unit``: to place a request of kind k costs
minus pi[k], and a round costs the unit for each request that waits in it.
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
def _sort_arcs(
    by: Cells, other: Cells, label: Cells, first: Ints, sorted_other: Cells, sorted_label: Cells
) -> None:
    """Sort arcs by the node ``by`` at one end: write their other ends and labels in that order.

    ``first`` has zeros, two more than there are nodes. Then entry v is where the arcs of v begin.
    """
    # A counting sort. Counts of node v stand two places on. Once they are added up, entry v + 1 is
    # where the arcs of v begin, and rises with each that is put there, up to where those of v + 1
    # begin.
    for a in range(np.uint64(len(by))):
        first[np.uint64(by[a]) + _TWO] += 1
    for v in range(_ONE, np.uint64(len(first))):
        first[v] += first[v - _ONE]
    for a in range(np.uint64(len(by))):
        after = np.uint64(by[a]) + _ONE
        place = np.uint64(first[after])
        sorted_other[place], sorted_label[place] = other[a], label[a]
        first[after] += 1


def sort_arcs(by: Cells, nodes: int, other: Cells, label: Cells) -> tuple[Ints, Cells, Cells]:
    """Return where the arcs of each node begin, sorted by the node at one end, and the sorted arcs.

    `by` has that node of each arc, `other` the one at its other end.
    """
    first = np.zeros(nodes + 2, np.int64)
    sorted_other, sorted_label = np.empty(len(by), np.int32), np.empty(len(by), np.int32)
    _sort_arcs(by, other, label, first, sorted_other, sorted_label)
    return first[:-1], sorted_other, sorted_label


def outward(graph: Graph) -> Leaving:
    """Return a graph with its arcs in order of source."""
    target = np.repeat(np.arange(graph.nodes, dtype=np.int32), np.diff(graph.into))
    return Leaving(*sort_arcs(graph.source, graph.nodes, target, graph.label), graph.loop)


def inward(graph: Leaving) -> Graph:
    """Return a graph with its arcs in order of target."""
    source = np.repeat(np.arange(graph.nodes, dtype=np.int32), np.diff(graph.first))
    return Graph(*sort_arcs(graph.target, graph.nodes, source, graph.label), graph.loop)


@njit(allocates=False, nogil=True)
def _set_costs_to_end(graph: Graph, price: Ints, to_end: Ints) -> None:
    """Set each node's min cost to the end, by the price of each label; `NEVER` stands there."""
    into, source, label = graph.into, graph.source, graph.label
    to_end[-1] = 0
    # Nodes are in topological order: from the end backward each cost is known when it is passed on.
    for nodes_after in range(np.uint64(len(to_end))):
        v = np.uint64(len(to_end)) - _ONE - nodes_after
        if to_end[v] < NEVER:
            for a in range(np.uint64(into[v]), np.uint64(into[v + _ONE])):
                u = np.uint64(source[a])
                to_end[u] = min(to_end[u], to_end[v] + price[np.uint64(label[a])])


@njit(nogil=True)
def _price_labels(mask: Masks, rounds: Ints, fixed: int, cost: Ints, order: Ints) -> Ints:
    """Return by label its min cost and the kind of this cost, or -1 if it places nothing.

    The first ``fixed`` labels place nothing, and cost ``rounds``. ``order`` has the kinds in order
    of cost.
    """
    price = np.empty((len(mask), 2), np.int64)
    for label in range(len(mask)):
        # A label that is not fixed and places no kind is on no arc. Its cost is large, but a sum
        # with it does not overflow.
        price[label, 0], price[label, 1] = NEVER // 4, -1
        if label < fixed:
            price[label, 0] = rounds[label]
        # For one that places nothing there is no kind to look at.
        for k in order if label >= fixed else order[:0]:
            # Kinds come in order of cost, so the first that the label places is the cheapest.
            if places(mask, label, k):
                price[label, 0], price[label, 1] = cost[k], k
                break

    return price


def _expect_at_most(count: int, largest: int, what: str) -> None:
    if count > largest:
        raise TooLarge(f"a level of more than {largest} {what}; too large to check")


def _widen_if_full(array: Any, rows: int, margin: int) -> Any:
    """Return the array, or one four times as long if less than twice the margin is free.

    `rows` of it are in use. The margin is what one node may add before the next look.
    """
    return array if len(array) >= rows + 2 * margin else wider(array, 4 * (rows + margin))


class Period:
    """The graph of a period, refined level by level.

    ``completed`` says how many requests can have completed by each round with a clock at most.
    """

    to_end: Ints | None
    """Each node's cost to the end by the last multipliers, None before the first ones."""

    def __init__(self, kinds: Kinds, completed: Ints, budget: Budget, limits: Limits) -> None:
        self.kinds, self.limits = kinds, limits
        self.n, self.clock, self.budget = len(kinds.peaks), len(completed) - 1, budget
        self.to_end = None
        # Space that is kept free for what one step may add, more with many kinds (`MARGIN`).
        self._margin = MARGIN + 4 * len(kinds.copies)

        # Labels that place nothing, and their cost in rounds: label m is a round in which m
        # requests have not completed earlier, so that each pays for it. Then come the join, and an
        # end in each round t of the clock: all n complete t rounds later than the walk counts.
        rounds = [(ROUND, m) for m in range(self.n + 1)]
        fixed = [*rounds, (JOIN, 0), *((END, self.n * t) for t in range(self.clock + 1))]
        self.join, self.fixed = self.n + 1, len(fixed)
        # Places `product.NODES` to `KEPT`: of these only labels are there.
        self.count = np.array([0, 0, self.fixed, 0, 0])

        none, words = np.zeros(0, np.int64), -(-len(kinds.copies) // 64)
        mask, part = np.zeros((0, words), np.uint64), np.zeros((0, 2), np.int32)
        # All columns are empty at first; `_widen_labels` makes room for these labels.
        self.labels = Labels(none, none, mask, none, none, none, none, part, none)
        self._widen_labels(self.fixed + 4 * self._margin, 4 * self._margin)
        self.labels.action[: self.fixed], self.labels.rounds[: self.fixed] = np.array(fixed).T
        self.labels.mask[: self.fixed] = 0
        self.graph = self._first_graph(completed)

    def _first_graph(self, completed: Ints) -> Graph:
        """Return the graph of the nodes (m) without a clock, then of (t, m) with one, t down to 0.

        Going backward, m is how many of the n requests are placed. A clock of any length is valid;
        0 means none. By round t only some requests can have completed, and all others are placed
        before it is reached, so that m is at least n minus their number.
        """
        n, ready = self.n, self.kinds.ready
        everything = self._label_of(range(len(ready)))
        # The rounds in which further kinds can complete, and the label of all that can by then.
        marks = np.unique(ready)
        ready_by_mark = np.array([self._label_of(np.flatnonzero(ready <= t)) for t in marks])

        # Nodes with a clock come after the n + 1 without, from its last round back. In round t they
        # are those of m = n - completed[t] (``number``), ..., n; `m_of` and `round_of` are by node.
        rounds = np.arange(self.clock, -1, -1) if self.clock else np.arange(0)
        number = completed[rounds]
        first = n + 1 + np.concatenate([[0], np.cumsum(number + 1)])
        end = int(first[-1])
        round_of = np.repeat(rounds, number + 1)
        m_of = n - np.repeat(number + first[:-1], number + 1) + np.arange(n + 1, end)

        # Each node has two places for arcs, of (target, label): first one that places or ends.
        arcs = np.zeros((end, 2, 2), np.int32)
        is_there = np.ones((end, 2), bool)

        # Without a clock: node m places any kind, and node n ends, if there is no clock to join.
        # (The label of an end in round t is 1 + t behind that of the join.) The second arc joins
        # the clock at its last round, in the node of the same m, if that is there.
        m = np.arange(n + 1)
        arcs[m, 0] = np.stack([m + 1, np.full(n + 1, everything)], axis=1)
        is_there[n, 0] = not self.clock
        arcs[n, 0] = end, self.join + 1
        joined = m - (n - number[0]) if self.clock else m - n - 1
        is_there[m, 1] = joined >= 0
        arcs[m, 1] = np.stack([n + 1 + joined, np.full(n + 1, self.join)], axis=1)

        # With a clock, in round t: a node places a kind that may complete by t, or it ends there if
        # all are placed. The second arc goes to the node of the same m, one round back; its label
        # is that of a round, which is number m.
        node = np.arange(n + 1, end)
        mark = np.searchsorted(marks, round_of, side="right") - 1  # -1: no kind completes by then
        is_there[node, 0] = (m_of == n) | (mark >= 0)
        arcs[node, 0, 0] = np.where(m_of == n, end, node + 1)
        label = ready_by_mark[np.maximum(mark, 0)]
        arcs[node, 0, 1] = np.where(m_of == n, self.join + 1 + round_of, label)
        # Of the nodes one round back; n + 1, which no m is, where there is no such round.
        min_m = np.repeat(n - np.append(number, -1)[1:], number + 1)
        is_there[node, 1] = m_of >= min_m
        arcs[node, 1, 0] = np.repeat(first[1:], number + 1) + m_of - min_m
        arcs[node, 1, 1] = m_of

        # Where nothing is live, a round without a clock leaves a node as it is. It costs m.
        loop = np.full(end + 1, -1, np.int32)
        loop[1 : n + 1] = m[1:]
        source = np.repeat(np.arange(end, dtype=np.int32), is_there.sum(axis=1))
        target, label = arcs[is_there].T

        return Graph(*sort_arcs(target, end + 1, source, label), loop)

    def _label_of(self, kinds: Any) -> int:
        """Return the label that places one of some kinds."""
        self.labels.mask[self.count[LABELS]] = masks_of([kinds], len(self.kinds.copies))[0]
        return int(label_of(self.labels, np.zeros(len(self.kinds.copies), np.int64), self.count))

    def fork(self) -> Period:
        """Return another one that can be refined further while this one stays as it is.

        Both have the same arrays of the graph. `refine` with floors only reads them, but `thin`
        overwrites them.
        """
        other, used = copy(self), slice(int(self.count[LABELS]))
        other.count = self.count.copy()
        # The first seven columns of labels are by label. Parts are made anew at each level, and the
        # hash table by `_widen_labels`, as columns without spare rows are too short for it.
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
            return self.to_end is None or self.thin(pi, unit, cutoff)

        graph, limits, tracker = self.graph, self.limits, new_tracker(self.kinds, floors)
        prices = self._set_prices(pi, unit, cutoff)
        sizes = (graph.nodes, limits.nodes), (graph.arcs, limits.arcs)
        # A product has a few times the nodes of its graph: what is not written takes no memory.
        rows = [min(32 * (2 * self._margin + x), top + 4 * self._margin) for x, top in sizes]
        # By node, ``rows[0]``; by arc, ``rows[1]``: source, label and the three scratch arrays.
        first, state = np.zeros(graph.nodes + 1, np.int64), np.empty(rows[0], np.int32)
        so_far, into = np.empty(rows[0], np.int64), np.zeros(rows[0], np.int64)
        fine = Fine(first, state, so_far, into, *(np.empty(rows[1], np.int32) for _ in range(5)))

        self.count[[NODES, ARCS, PARTS, KEPT]] = v = 0
        while v < graph.nodes:
            if between is not None:
                between()

            tracker, fine, max_count = self._widen(tracker, fine)
            level = Level(graph, self.labels, prices, tracker, fine)
            v = product(v, level, self.count, max_count)

        self._expect_small_level(tracker)
        nodes, used = int(self.count[NODES]), int(self.count[ARCS])
        self.budget.spend_compiled(nodes + used)
        # The end is the last node of the graph before. It has no node: no path reaches it.
        if fine.first[-1] == fine.first[-2]:
            return False

        loop = loop_costs(graph.loop, fine, tracker)
        self.graph = Graph(fine.into[: nodes + 1], fine.source[:used], fine.label[:used], loop)
        return True

    def _set_prices(self, pi: Ints, unit: int, cutoff: int) -> Prices:
        """Set what labels cost by multipliers, and return the prices of kinds and nodes.

        Before the first multipliers there is no cutoff: it is one that no path reaches.
        """
        cost, labels, some = -pi, self.labels, slice(self.fixed)
        order = np.argsort(cost, kind="stable")
        cheapest = masks_of((order[:number] for number in range(len(order) + 1)), len(order))
        # Labels that place nothing cost their rounds. Their parts, as all parts, are unknown (-1).
        labels.low[some] = labels.high[some] = labels.rounds[some] * unit
        labels.first[some] = -1
        set_costs(self.fixed, int(self.count[LABELS]), labels, cost)
        to_end, limit = self.to_end, cutoff
        if to_end is None:
            to_end, limit = np.zeros(self.graph.nodes, np.int64), 2**61

        return Prices(cost, cost[order], cheapest, unit, to_end, limit)

    def thin(self, pi: Ints, unit: int, cutoff: int) -> bool:
        """Keep the paths up to the cutoff and their costs to the end; return whether any is left.

        The graph's arrays are overwritten. What is returned of them are views of their beginnings.
        """
        (into, source, label, loop), prices = self.graph, self._set_prices(pi, unit, cutoff)
        kept = Kept(np.empty(len(loop) + 1, np.int64), np.empty(len(loop), np.int32))
        kept.so_far[0] = 0
        self.count[[NODES, ARCS, KEPT]] = v = 0

        while v < len(loop):
            # No parts are needed: the tracker of the next level makes its own.
            self._widen_labels(2 * int(self.count[LABELS]) + 4 * self._margin, 0)
            max_labels = len(self.labels.action) - self._margin
            v = thin(v, self.graph, self.labels, prices, kept, self.count, max_labels)

        nodes, arcs = int(self.count[NODES]), int(self.count[ARCS])
        self.budget.spend_compiled(nodes + arcs)
        self.graph = Graph(into[: nodes + 1], source[:arcs], label[:arcs], loop[:nodes])
        self.to_end = prices.to_end[:nodes]

        # A path is left if the end, the last node, is kept.
        return bool(kept.new_number[-1] >= 0)

    def _expect_small_level(self, tracker: States) -> None:
        """Refuse a level that is too large."""
        _expect_at_most(int(self.count[NODES]), self.limits.nodes, "nodes")
        _expect_at_most(int(self.count[ARCS]), self.limits.arcs, "arcs")
        _expect_at_most(int(tracker.made[0]), self.limits.cells, "cells")

    def _widen(self, tracker: States, fine: Fine) -> tuple[States, Fine, Ints]:
        """Return wider arrays and how far they may be filled, unless a level is too large.

        The third value has a limit for each count of a level (`product.NODES` and so on).
        """
        self._expect_small_level(tracker)
        margin = self._margin
        # The last one is `KEPT`: the arcs into nodes that are complete. After `rest` more of them
        # `product` stops, for a look whether to go on.
        nodes, arcs, labels, parts, complete_arcs = self.count.tolist()
        # Only rows that are written take memory, and copies take time. What is short of space gets
        # more than twice of it, since the node that was short is made again.
        by_node = (_widen_if_full(column, nodes, margin) for column in fine[1:4])
        # Rounds that leave a node before as it is may add an arc for each node.
        source, label = (_widen_if_full(column, arcs + nodes, margin) for column in fine[4:6])
        scratch = list(fine[6:])
        if len(fine.from_node) < len(source):  # what is in it is not needed any more
            scratch = [np.empty(len(source), np.int32) for _ in scratch]

        tracker, states = with_space(tracker, len(tracker.peak) + 2, self.limits.cells)
        self._widen_labels(4 * (labels + margin), 4 * (parts + margin))
        fine = Fine._make([fine.first, *by_node, source, label, *scratch])
        sizes = len(fine.state), len(fine.source), len(self.labels.action), len(self.labels.part)
        until = complete_arcs + self.limits.rest

        return tracker, fine, np.array([*(x - margin for x in sizes), until, *states])

    def _widen_labels(self, labels: int, parts: int) -> None:
        """Make room for so many labels and so many parts of theirs, unless there are too many.

        Parts and the cost of labels that are in use stay as they are.
        """
        _expect_at_most(int(self.count[LABELS]), self.limits.labels, "labels")
        *columns, part, slots = self.labels
        # Slots are twice as many as labels, so that few masks share one.
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
        self.to_end = np.full(self.graph.nodes, NEVER, np.int64)
        _set_costs_to_end(self.graph, price, self.to_end)
        return None if self.to_end[0] >= NEVER else int(self.to_end[0])

    def prices(self, pi: Ints, unit: int) -> Ints:
        """Return each label's min cost, and the kind of this cost or -1."""
        count, cost, labels = int(self.count[LABELS]), -pi, self.labels
        order = np.argsort(cost, kind="stable")
        rounds = labels.rounds[:count] * unit
        prices: Ints = _price_labels(labels.mask[:count], rounds, self.fixed, cost, order)
        return prices
