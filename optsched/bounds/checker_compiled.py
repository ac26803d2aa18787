"""Compiled replay of one period of a ramp leaf, in 64-bit integers: the fast twin.

`optsched.bounds.checker_ramp` replays small periods in plain Python. This module does the same for
large ones, and tests hold both equal. It shares no code with what makes certificates.

`fits` shows first that no cost can overflow: a path has at most `MAX_NODES` steps, and the costs of
so many steps stay below 2**60. Arrays grow as they are filled. The nodes, arcs, states and labels
of a level are limited, to about 10 GiB in all. Trackers are in `optsched.bounds.checker_states`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_parts import Budget, Rejected
from optsched.bounds.checker_states import (
    MARGIN,
    MAX_CELLS,
    UNKNOWN,
    Kinds,
    States,
    after_placing,
    before_round,
    counters,
    mixed,
    multisets,
    wider,
    with_rows,
)
from optsched.problem.kernel import njit

MAX_NODES, MAX_ARCS = 60_000_000, 240_000_000
"""Max nodes and arcs of one level."""
_NEVER = 2**62  # the cost of a node that no path reaches
_ROUND, _JOIN, _END, _PLACE = 0, 1, 2, 3
_ONE, _ZERO = np.uint64(1), np.uint64(0)
_NODES, _ARCS, _LABELS, _KEPT = 0, 1, 2, 3  # of the counts of a level


class Graph(NamedTuple):
    """Nodes in topological order, and their arcs in order of target.

    Node v is entered by the arcs ``into[v]`` to ``into[v + 1] - 1``. ``loop[v]`` is the cost of a
    round that leaves it as it is, or -1.
    """

    into: Any
    source: Any
    label: Any
    loop: Any


class Labels(NamedTuple):
    """What arcs do: pass rounds, join the clock, end, or place a request of a set of kinds."""

    what: Any
    rounds: Any
    mask: Any
    slots: Any  # a hash table of the masks


class Prices(NamedTuple):
    """What placing a kind costs, the denominator, and the costs that may still be reached."""

    cost: Any
    least: Any  # of each label
    ascending: Any  # the costs in order
    cheapest: Any  # the masks of so many cheapest kinds
    unit: Any
    rest: Any
    cutoff: Any


class Fine(NamedTuple):
    """A product in the making: by node its state and cost so far, and its arcs."""

    first: Any  # by node of the graph before, its first node
    last: Any  # by state, its last node
    state: Any
    here: Any
    loop: Any
    source: Any
    target: Any
    label: Any


@njit(inline="always")
def _label_of(mask: Any, labels: Labels, count: Any) -> Any:
    """Return the number of the label that places one of these kinds."""
    last = np.uint64(labels.slots.shape[0] - 1)
    at = mixed(mask) & last
    while labels.slots[at] >= 0 and labels.mask[labels.slots[at]] != mask:
        at = (at + _ONE) & last
    if labels.slots[at] < 0:
        new = count[_LABELS]
        labels.what[new], labels.rounds[new], labels.mask[new] = _PLACE, 0, mask
        labels.slots[at] = new
        count[_LABELS] += 1
    return np.int64(labels.slots[at])


@njit
def _enter_masks(labels: Labels, first: int, end: int) -> None:
    """Enter the labels first, ..., end - 1 in the hash table, which is empty."""
    last = np.uint64(labels.slots.shape[0] - 1)
    for k in range(first, end):
        at = mixed(labels.mask[k]) & last
        while labels.slots[at] >= 0:
            at = (at + _ONE) & last
        labels.slots[at] = k


@njit(inline="always")
def _node(s: Any, begin: int, f: Fine, count: Any) -> Any:
    """Return the node of a state among those from ``begin`` on, a new one if it has none."""
    y = np.int64(f.last[s])
    if y < begin or y >= count[_NODES] or f.state[y] != s:
        y = count[_NODES]
        f.state[y], f.here[y], f.loop[y], f.last[s] = s, _NEVER, -1, y
        count[_NODES] += 1
    return y


@njit(inline="always")
def _arc(x: int, y: int, label: int, cost: int, f: Fine, count: Any) -> None:
    """Add an arc, and what its target costs by it."""
    a = count[_ARCS]
    f.source[a], f.target[a], f.label[a] = x, y, label
    f.here[y] = min(f.here[y], f.here[x] + cost)
    count[_ARCS] += 1


@njit(inline="always")
def _follow(
    x: int, label: int, slack: int, begin: int, labels: Labels, p: Prices, t: States, f: Fine,
    count: Any
) -> None:  # fmt: skip
    """Add the arcs from x by a label, at a cost of at most ``slack``."""
    s = f.state[x]
    if labels.what[label] != _PLACE:
        cost = labels.rounds[label] * p.unit
        if cost <= slack and (labels.what[label] != _END or t.final[s]):
            y = np.int64(s)
            if labels.what[label] == _ROUND:
                y = np.int64(t.before[s])
                if y == UNKNOWN:
                    y = np.int64(before_round(s, t))
            _arc(x, _node(y, begin, f, count), label, cost, f, count)
    else:
        few = len(p.ascending)
        while few > 0 and p.ascending[few - 1] > slack:
            few -= 1
        left = labels.mask[label] & p.cheapest[few]
        k = 0
        while left != _ZERO:
            while not (left >> np.uint64(k)) & _ONE:
                k += 1
            g = t.symbol[k]
            part = left & t.alike[g]
            left &= ~part
            y = np.int64(t.after[s, g])
            if y == UNKNOWN:
                y = np.int64(after_placing(s, g, t))
            if y >= 0:
                cost, rest, j = np.int64(_NEVER), part >> np.uint64(k), k
                while rest != _ZERO:
                    if rest & _ONE:
                        cost = min(cost, p.cost[j])
                    rest >>= _ONE
                    j += 1
                number = _label_of(part, labels, count)
                _arc(x, _node(y, begin, f, count), number, cost, f, count)


@njit
def _follow_loop(v: int, loop: int, begin: int, first_arc: int, work: Any, count: Any) -> None:
    """Follow rounds that leave node v of the graph before as it is, the heaviest states first."""
    _, p, t, f = work
    end = count[_NODES]
    x = begin + 1
    while x < end and t.weight[f.state[x - 1]] >= t.weight[f.state[x]]:
        x += 1
    if x < end:  # not in order: arrays are made only then
        order = np.argsort(-t.weight[f.state[begin:end]], kind="mergesort")
        place = np.empty(end - begin, np.int64)
        place[order] = np.arange(begin, end)
        f.state[begin:end], f.here[begin:end] = f.state[begin:end][order], f.here[begin:end][order]
        for x in range(begin, end):
            f.last[f.state[x]] = x
        for a in range(first_arc, count[_ARCS]):
            f.target[a] = place[f.target[a] - begin]
    for x in range(begin, end):
        s = f.state[x]
        if t.before[s] == s:
            f.loop[x] = loop
        elif f.here[x] < _NEVER and f.here[x] + loop * p.unit + p.rest[v] <= p.cutoff:
            _arc(x, f.last[t.before[s]], loop, loop * p.unit, f, count)


@njit(inline="always")
def _full(more: int, labels: Labels, t: States, f: Fine, count: Any) -> bool:
    """Whether there may be too little room for one more node of the graph before."""
    return (
        count[_NODES] + MARGIN > f.state.shape[0]
        or count[_ARCS] + MARGIN + more > f.source.shape[0]
        or (t.span > 0 and t.count[0] + MARGIN > t.size.shape[0])
        or count[_LABELS] + MARGIN > labels.what.shape[0]
    )


@njit
def _product(v: int, graph: Graph, work: Any, count: Any) -> int:
    """Make the nodes of v and of later nodes; return the first one for which room is short.

    Its nodes and arcs are counted, but made again by the next call.
    """
    labels, p, t, f = work
    count[_NODES], count[_ARCS] = f.first[v], count[_KEPT]
    while v < graph.loop.shape[0]:
        begin, first_arc = count[_NODES], count[_ARCS]
        count[_KEPT] = first_arc
        if v == 0:
            _node(0, 0, f, count)
            f.here[0] = 0
        short = _full(0, labels, t, f, count)
        for a in range(graph.into[v], graph.into[v + 1] if p.rest[v] < _NEVER else 0):
            u = graph.source[a]
            for x in range(f.first[u], f.first[u + 1]):
                slack = p.cutoff - f.here[x] - p.rest[v]
                if short or f.here[x] == _NEVER or p.least[graph.label[a]] > slack:
                    continue
                short = _full(0, labels, t, f, count)
                if not short:
                    _follow(x, graph.label[a], slack, begin, labels, p, t, f, count)
        x = begin
        while graph.loop[v] >= 0 and x < count[_NODES] and not short:
            _node(before_round(f.state[x], t), begin, f, count)
            x += 1
            short = _full(count[_NODES] - begin, labels, t, f, count)
        if short:
            return v
        if graph.loop[v] >= 0:
            _follow_loop(v, graph.loop[v], begin, first_arc, work, count)
        v += 1
        f.first[v] = count[_NODES]
    return v


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
    rest = np.full(len(graph.loop), _NEVER, np.int64)
    rest[-1] = 0
    for v in range(len(rest) - 1, -1, -1):
        if rest[v] < _NEVER:
            for a in range(graph.into[v], graph.into[v + 1]):
                cost = rest[v] + price[graph.label[a]]
                rest[graph.source[a]] = min(rest[graph.source[a]], cost)
    return rest


@njit
def _prices(mask: Any, rounds: Any, fixed: int, cost: Any) -> Any:
    price = np.empty((len(mask), 3), np.int64)
    for label in range(len(mask)):
        # A label of no kinds is on no arc.
        least = rounds[label] if label < fixed else np.int64(_NEVER // 4)
        price[label, 0], price[label, 1], price[label, 2] = least, -1, _NEVER
        for k in range(len(cost)):
            if (mask[label] >> np.uint64(k)) & _ONE:
                if cost[k] < price[label, 0]:
                    price[label, 2], price[label, 0] = price[label, 0], cost[k]
                    price[label, 1] = k
                elif cost[k] < price[label, 2]:
                    price[label, 2] = cost[k]
        if price[label, 2] == _NEVER // 4:
            price[label, 2] = _NEVER
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
        and (kinds + 1) * (capacity + 1) < 2**31
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
        fixed = [(_ROUND, m) for m in range(self.n + 1)] + [(_JOIN, 0)]
        fixed += [(_END, self.n * t) for t in range(clock + 1)]
        room = len(fixed) + 8 * MARGIN
        what, rounds = np.zeros(room, np.int64), np.zeros(room, np.int64)
        what[: len(fixed)], rounds[: len(fixed)] = np.array(fixed).T
        self.labels = Labels(
            what, rounds, np.zeros(room, np.uint64), np.full(16 * MARGIN, -1, np.int32)
        )
        self.count = np.array([0, 0, len(fixed), 0])
        self.fixed = len(fixed)
        number, place = {}, {pair: at for at, pair in enumerate(fixed)}
        for at, label in enumerate(base.labels):
            kind = {"round": _ROUND, "join": _JOIN, "end": _END, "place": _PLACE}[label.what]
            mask = np.uint64(sum(1 << k for k in label.kinds))
            if kind == _PLACE:
                number[at] = _label_of(mask, self.labels, self.count)
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
        prices = Prices(cost, self.prices(pi, unit)[:, 0], cost[order], masks, unit, rest, most)
        rows = 16 * MARGIN
        last = np.full(len(tracker.size), -1, np.int32)
        fine = Fine(
            np.zeros(len(graph.loop) + 1, np.int64), last, np.empty(rows, np.int32),
            np.empty(rows, np.int64), np.empty(rows, np.int32),
            *(np.empty(4 * rows, np.int32) for _ in range(3)),
        )  # fmt: skip
        self.count[_KEPT] = v = 0
        while True:
            v = _product(v, graph, (self.labels, prices, tracker, fine), self.count)
            if v == len(graph.loop):
                break
            tracker, fine = self._more_room(tracker, fine)
        nodes, arcs = int(self.count[_NODES]), int(self.count[_ARCS])
        self._budget.spend((nodes + arcs) // 8)
        if fine.first[-1] == fine.first[-2]:
            return False
        by_target = sorted_by(fine.target[:arcs], nodes, fine.source, fine.label)
        self.graph = Graph(*by_target, fine.loop[:nodes].copy())
        return True

    def _more_room(self, tracker: States, fine: Fine) -> tuple[States, Fine]:
        """Return wider arrays, unless a level is too large."""
        (nodes, arcs, labels, _), states = self.count.tolist(), int(tracker.count[0])
        cells = states * (tracker.after.shape[1] + tracker.items.shape[1] + 8)
        for found, most, what in (
            (nodes, MAX_NODES, "nodes"), (arcs, MAX_ARCS, "arcs"), (cells, MAX_CELLS, "cells")
        ):  # fmt: skip
            if found > most:
                raise Rejected(f"a level of more than {most} {what}; too large to check")
        rows = [2 * x + 4 * MARGIN for x in (nodes, arcs + nodes, states, labels)]
        fine = fine._replace(
            state=wider(fine.state, rows[0]), here=wider(fine.here, rows[0]),
            loop=wider(fine.loop, rows[0]), source=wider(fine.source, rows[1]),
            target=wider(fine.target, rows[1]), label=wider(fine.label, rows[1]),
        )  # fmt: skip
        tracker = with_rows(tracker, rows[2])
        last = wider(fine.last, len(tracker.size))
        last[len(fine.last) :] = -1
        fine = fine._replace(last=last)
        if rows[3] > len(self.labels.what):
            self.labels = Labels(
                wider(self.labels.what, rows[3]),
                wider(self.labels.rounds, rows[3]),
                wider(self.labels.mask, rows[3]),
                np.full(2 << rows[3].bit_length(), -1, np.int32),
            )
            _enter_masks(self.labels, self.fixed, labels)
        return tracker, fine

    def bound(self, pi: list[int], unit: int) -> int | None:
        """Return the least cost of a path, in units, and keep each node's cost to the end."""
        price = self.prices(pi, unit)[:, 0]
        self.rest = _costs_to_end(self.graph, price)
        return None if self.rest[0] >= _NEVER else int(self.rest[0])

    def prices(self, pi: list[int], unit: int) -> Any:
        """Return each label's least cost, the kind of this cost or -1, and the next least cost."""
        count = int(self.count[_LABELS])
        cost = -np.array(pi, dtype=np.int64)
        labels = self.labels
        return _prices(labels.mask[:count], labels.rounds[:count] * unit, self.fixed, cost)

    def none_left(self, pi: list[int], unit: int, cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""
        from optsched.bounds.checker_enumerate import none_left

        graph, nodes = self.graph, len(self.graph.loop)
        target = np.repeat(np.arange(nodes, dtype=np.int32), np.diff(graph.into))
        outward = sorted_by(graph.source, nodes, target, graph.label)
        return none_left(self, outward, pi, unit, cutoff, self._budget)
