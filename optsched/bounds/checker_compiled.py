"""Compiled replay of one period of a ramp leaf, in 64-bit integers: the fast twin.

`optsched.bounds.checker_ramp` replays small periods in plain Python. This module does the same for
large ones, and tests hold both equal. It shares no code with what makes certificates.

`fits` shows first that no cost can overflow: a path has at most `MAX_NODES` steps, and the costs of
so many steps stay below 2**60. Arrays grow as they are filled. The nodes, arcs, states and labels
of a level are limited, to about 10 GiB in all. Products are in `optsched.bounds.checker_product`,
trackers in `checker_states`, and the enumeration in `checker_enumerate` and `checker_groups`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optsched.bounds.checker_parts import Budget, Rejected
from optsched.bounds.checker_product import (
    ARCS,
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
    product,
)
from optsched.bounds.checker_states import (
    END,
    JOIN,
    MARGIN,
    MAX_CELLS,
    PLACE,
    ROUND,
    Kinds,
    States,
    counters,
    multisets,
    wider,
    with_rows,
)
from optsched.problem.kernel import njit

MAX_NODES, MAX_ARCS = 60_000_000, 240_000_000
"""Max nodes and arcs of one level."""
MAX_LABELS = 1_000_000
"""Max different sets of kinds on the arcs of a period."""
_ONE = np.uint64(1)


@njit
def _by(end: Any, nodes: int, one: Any, two: Any, other: Any) -> Any:
    """Return where the arcs of each node begin, and their other end and label in that order."""
    first = np.zeros(nodes + 1, np.int64)
    for v in end:
        first[v + 1] += 1
    first = np.cumsum(first)
    at = first.copy()
    for a in range(len(end)):
        place = at[end[a]]
        other[0][place], other[1][place] = one[a], two[a]
        at[end[a]] += 1
    return first


def sorted_by(end: Any, nodes: int, one: Any, two: Any) -> tuple[Any, Any, Any]:
    """Return where each node's arcs begin, and two properties of the arcs in order of that end."""
    other = np.empty(len(end), np.int32), np.empty(len(end), np.int32)
    return _by(end, nodes, one, two, other), *other


@njit
def _costs_to_end(graph: Graph, price: Any) -> Any:
    """Return each node's min cost to the end."""
    rest = np.full(len(graph.loop), NEVER, np.int64)
    rest[-1] = 0
    for v in range(len(rest) - 1, -1, -1):
        if rest[v] < NEVER:
            for a in range(graph.into[v], graph.into[v + 1]):
                cost = rest[v] + price[graph.label[a]]
                rest[graph.source[a]] = min(rest[graph.source[a]], cost)
    return rest


@njit
def _pruned(graph: Graph, price: Any, rest: Any, cutoff: int) -> Any:
    """Return the graph of the paths that cost at most the cutoff, and the costs to its end.

    What is least from the start to an arc, the arc and the rest are added up. Of a node that is
    kept, a cheapest path to the end is kept too.
    """
    begin = np.full(len(rest), NEVER, np.int64)
    number = np.empty(len(rest), np.int32)
    into, loop, least = np.zeros(len(rest) + 1, np.int64), graph.loop.copy(), rest.copy()
    source, label = np.empty_like(graph.source), np.empty_like(graph.label)
    begin[0] = nodes = arcs = 0
    for v in range(len(rest)):
        for a in range(graph.into[v], graph.into[v + 1] if rest[v] < NEVER else 0):
            u = graph.source[a]
            if begin[u] < NEVER and begin[u] + price[graph.label[a]] + rest[v] <= cutoff:
                begin[v] = min(begin[v], begin[u] + price[graph.label[a]])
                source[arcs], label[arcs] = number[u], graph.label[a]
                arcs += 1
        if begin[v] < NEVER:
            number[v], loop[nodes], least[nodes] = nodes, graph.loop[v], rest[v]
            nodes += 1
            into[nodes] = arcs
    kept = Graph(into[: nodes + 1], source[:arcs], label[:arcs], loop[:nodes])
    return kept, least[:nodes], begin[-1] < NEVER


@njit
def _prices(mask: Any, rounds: Any, fixed: int, cost: Any) -> Any:
    price = np.empty((len(mask), 2), np.int64)
    for label in range(len(mask)):
        # A label of no kinds is on no arc.
        least = rounds[label] if label < fixed else np.int64(NEVER // 4)
        price[label, 0], price[label, 1] = least, -1
        for k in range(len(cost)):
            if (mask[label] >> np.uint64(k)) & _ONE and cost[k] < price[label, 0]:
                price[label, 0], price[label, 1] = cost[k], k
    return price


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
        kinds <= 60
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
            none, none, none.astype(np.uint64), none, none, none, none,
            np.zeros((0, 2), np.int32), none,
        )  # fmt: skip
        self._more_labels(len(fixed) + 4 * MARGIN, 4 * MARGIN)
        self.labels.what[: self.fixed], self.labels.rounds[: self.fixed] = np.array(fixed).T
        self.labels.mask[: self.fixed] = 0
        number, place = {}, {pair: at for at, pair in enumerate(fixed)}
        for at, label in enumerate(base.labels):
            kind = {"round": ROUND, "join": JOIN, "end": END, "place": PLACE}[label.what]
            mask = np.uint64(sum(1 << k for k in label.kinds))
            if kind == PLACE:
                number[at] = label_of(mask, self.labels, np.zeros(len(kinds), np.int64), self.count)
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
        graph = self.graph
        of = Kinds(self.kinds, self.copies, self.capacity)
        tracker = counters(of, groups, self._budget) if floors is None else multisets(of, floors)
        cost = -np.array(pi, dtype=np.int64)
        order = np.argsort(cost, kind="stable")
        masks = np.concatenate([[0], np.cumsum(1 << order)]).astype(np.uint64)
        rest = np.zeros(len(graph.loop), np.int64) if self.rest is None else self.rest
        most = 2**61 if self.rest is None else cutoff
        prices = Prices(cost, cost[order], masks, unit, rest, most)
        labels, some = self.labels, slice(self.fixed)
        labels.low[some] = labels.high[some] = labels.rounds[some] * unit
        labels.first[some] = -1
        learn(self.fixed, int(self.count[LABELS]), labels, cost)
        rows = 16 * MARGIN
        fine = Fine(
            np.zeros(len(graph.loop) + 1, np.int64), np.full(len(tracker.rows), -1, np.int32),
            np.empty(rows, np.int32), np.empty(rows, np.int64),
            *(np.empty(4 * rows, np.int32) for _ in range(3)),
        )  # fmt: skip
        self.count[PARTS:] = v = 0
        while v < len(graph.loop):
            tracker, fine, room = self._more_room(tracker, fine)
            v = product(v, graph, self.labels, prices, tracker, fine, self.count, room)
        nodes, arcs = int(self.count[NODES]), int(self.count[ARCS])
        self._budget.spend((nodes + arcs) // 8)
        if fine.first[-1] == fine.first[-2]:
            return False
        by_target = sorted_by(fine.target[:arcs], nodes, fine.source, fine.label)
        self.graph = Graph(*by_target, loops(graph.loop, fine, tracker))
        return True

    def _more_room(self, tracker: States, fine: Fine) -> tuple[States, Fine, Any]:
        """Return wider arrays and how far they may be filled, unless a level is too large."""
        nodes, arcs, labels, parts, _ = self.count.tolist()
        states = int(tracker.count[0])
        cells = states * (tracker.rows.shape[1] + 6)
        for found, most, what in (
            (nodes, MAX_NODES, "nodes"), (arcs, MAX_ARCS, "arcs"), (cells, MAX_CELLS, "cells"),
            (labels, MAX_LABELS, "labels"),
        ):  # fmt: skip
            if found > most:
                raise Rejected(f"a level of more than {most} {what}; too large to check")
        # Twice what is there, since the nodes that were short of room are made again.
        rows = [2 * x + 4 * MARGIN for x in (nodes, arcs + nodes, labels, parts, states)]
        state, here = wider(fine.state, rows[0]), wider(fine.here, rows[0])
        arrays = (wider(column, rows[1]) for column in fine[4:])
        tracker = with_rows(tracker, rows[4])
        last = wider(fine.last, len(tracker.rows))
        last[len(fine.last) :] = -1
        self._more_labels(rows[2], rows[3])
        fine = Fine(fine.first, last, state, here, *arrays)
        full = len(state), len(fine.source), len(self.labels.what), len(self.labels.part), 0
        states = len(tracker.rows) if tracker.bits else 2 * MAX_CELLS
        return tracker, fine, np.array([*full, states]) - MARGIN

    def _more_labels(self, labels: int, parts: int) -> None:
        """Make room for so many labels and so many parts of theirs."""
        *columns, part, _ = self.labels
        slots = np.full(2 << labels.bit_length(), -1, np.int32)
        wide = [*(wider(column, labels) for column in columns), wider(part, parts), slots]
        self.labels = Labels._make(wide)
        enter_masks(self.labels, self.fixed, int(self.count[LABELS]))

    def bound(self, pi: list[int], unit: int) -> int | None:
        """Return the least cost of a path, in units, and keep each node's cost to the end."""
        price = self.prices(pi, unit)[:, 0]
        self.rest = _costs_to_end(self.graph, price)
        return None if self.rest[0] >= NEVER else int(self.rest[0])

    def prices(self, pi: list[int], unit: int) -> Any:
        """Return each label's least cost, and the kind of this cost or -1."""
        count = int(self.count[LABELS])
        cost = -np.array(pi, dtype=np.int64)
        labels = self.labels
        return _prices(labels.mask[:count], labels.rounds[:count] * unit, self.fixed, cost)

    def none_left(self, pi: list[int], unit: int, cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""
        from optsched.bounds.checker_enumerate import none_left

        price = self.prices(pi, unit)
        kept, self.rest, ends = _pruned(self.graph, price[:, 0], self.rest, cutoff)
        if not ends:
            return True
        self.graph, nodes = kept, len(kept.loop)
        target = np.repeat(np.arange(nodes, dtype=np.int32), np.diff(kept.into))
        outward = sorted_by(kept.source, nodes, target, kept.label)
        return none_left(self, outward, price, pi, unit, cutoff, self._budget)
