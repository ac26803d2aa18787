"""Compiled product of a graph of a ramp leaf with a tracker: part of `checker_compiled`.

Nodes of the finer graph are made in the order of the graph before, those of one of its nodes next
to each other. An arc is made only if some path through it may cost no more than the cutoff: the
cost so far, its own, and the cost to the end in the graph before. It keeps only such kinds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker_states import (
    PLACE,
    REFUSED,
    ROUND,
    SYMBOLS,
    UNKNOWN,
    WEIGHT,
    States,
    after_placing,
    before_round,
    mixed,
)
from optsched.problem.kernel import njit

NEVER = 2**62
"""The cost of a node that no path reaches."""
NODES, ARCS, LABELS, PARTS, KEPT, STATES = 0, 1, 2, 3, 4, 5
"""Places of the counts of a level. The last one is of the arcs of the nodes that are complete."""
_ONE, _ZERO = np.uint64(1), np.uint64(0)


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

    what: Any  # `PLACE`, or the tracker's column
    rounds: Any
    mask: Any
    low: Any  # the least and the largest cost
    high: Any
    first: Any  # the parts that the tracker tells apart, from here on; -1 if not known yet
    end: Any
    part: Any  # the tracker's column and the label of each
    slots: Any  # a hash table of the masks


class Prices(NamedTuple):
    """What placing a kind costs, the denominator, and the costs that may still be reached."""

    cost: Any
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
    source: Any
    target: Any
    label: Any


@njit(allocates=False)
def learn(first: int, end: int, labels: Labels, cost: Any) -> None:
    """Note what the labels first, ..., end - 1, which place, cost; no parts are known."""
    for label in range(first, end):
        low, high = np.int64(NEVER), np.int64(-NEVER)
        for k in range(cost.shape[0]):
            if (labels.mask[label] >> np.uint64(k)) & _ONE:
                low, high = min(low, cost[k]), max(high, cost[k])
        labels.low[label], labels.high[label], labels.first[label] = low, high, -1


@njit(allocates=False)
def _slot(mask: Any, masks: Any, slots: Any) -> Any:
    """Return the place of a mask in the hash table, or the empty one where it belongs."""
    last = np.uint64(slots.shape[0] - 1)
    at = mixed(mask) & last
    while slots[at] >= 0 and masks[slots[at]] != mask:
        at = (at + _ONE) & last
    return at


@njit(allocates=False)
def label_of(mask: Any, labels: Labels, cost: Any, count: Any) -> Any:
    """Return the number of the label that places one of these kinds."""
    at = _slot(mask, labels.mask, labels.slots)
    if labels.slots[at] < 0:
        new = count[LABELS]
        labels.what[new], labels.rounds[new], labels.mask[new] = PLACE, 0, mask
        labels.slots[at] = new
        learn(new, new + 1, labels, cost)
        count[LABELS] += 1
    return np.int64(labels.slots[at])


@njit(allocates=False)
def enter_masks(labels: Labels, first: int, end: int) -> None:
    """Enter the labels first, ..., end - 1 in the hash table, which is empty."""
    for k in range(first, end):
        labels.slots[_slot(labels.mask[k], labels.mask, labels.slots)] = k


@njit(allocates=False)
def _split(label: int, labels: Labels, cost: Any, t: States, count: Any) -> None:
    """Part a label by what the tracker tells apart."""
    left, k = labels.mask[label], 0
    labels.first[label] = count[PARTS]
    if labels.what[label] != PLACE:
        labels.part[count[PARTS], 0] = labels.what[label]
        labels.part[count[PARTS], 1] = label
        count[PARTS] += 1
    while left != _ZERO:
        if (left >> np.uint64(k)) & _ONE:
            same = t.alike[t.symbol[k]]
            part = labels.part[count[PARTS]]
            part[0] = SYMBOLS + t.symbol[k]
            part[1] = label_of(left & same, labels, cost, count)
            count[PARTS] += 1
            left &= ~same
        k += 1
    labels.end[label] = count[PARTS]


@njit(allocates=False)
def _short(more: int, states: Any, count: Any, room: Any) -> bool:
    """Whether there may be too little room for one more node of the graph before."""
    return (
        count[NODES] > room[NODES]
        or count[ARCS] + more > room[ARCS]
        or count[LABELS] > room[LABELS]
        or count[PARTS] > room[PARTS]
        or states[0] > room[STATES]
    )


@njit(allocates=False)
def _node(s: Any, begin: int, nodes: int, last: Any, state: Any, here: Any) -> Any:
    """Return the node of a state among those from ``begin`` on; it is ``nodes`` if it is new."""
    y = last[s]
    if begin <= y < nodes and state[y] == s:
        return np.int64(y)
    state[nodes], here[nodes], last[s] = s, NEVER, nodes
    return nodes


@njit(allocates=False)
def _follow(
    v: int, graph: Graph, labels: Labels, p: Prices, t: States, f: Fine, count: Any, room: Any
) -> Any:  # fmt: skip
    """Make the nodes of v and of later nodes by the arcs into them.

    Returns the first node for which room is short, or that rounds may leave as it is, and whether
    room is short.
    """
    begins, last, state, here, source, target, number = f
    bits, capacity, _, _, peak, _, floor, _, rows, hashed, items, states = t
    first_item, rest = SYMBOLS + len(peak), p.rest
    _, _, masks, least, high, first, end, part, slots = labels
    ascending, cheapest = p.ascending, p.cheapest
    enter, before, by, loop = graph.into, graph.source, graph.label, graph.loop
    while v < len(loop):
        begin, spare = begins[v], p.cutoff - rest[v]
        count[NODES], count[ARCS] = begin, count[KEPT]
        if v == 0:
            here[_node(0, 0, 0, last, state, here)] = 0
            count[NODES] = 1
        for into in range(enter[v], enter[v + 1] if rest[v] < NEVER else 0):
            u, label = before[into], np.int64(by[into])
            for x in range(begins[u], begins[u + 1]):
                slack = spare - here[x]
                if here[x] == NEVER or least[label] > slack:
                    continue
                if _short(0, states, count, room):
                    return v, True
                whole = label
                if high[label] > slack:  # some of its kinds cost too much
                    few = len(ascending)
                    while ascending[few - 1] > slack:
                        few -= 1
                    mask = masks[label] & cheapest[few]
                    whole = np.int64(slots[_slot(mask, masks, slots)])
                    if whole < 0:
                        whole = label_of(mask, labels, p.cost, count)
                if first[whole] < 0:
                    _split(whole, labels, p.cost, t, count)
                s, nodes, a = state[x], count[NODES], count[ARCS]
                for j in range(first[whole], end[whole]):
                    column, new = part[j, 0], part[j, 1]
                    y, g = np.int64(rows[s, column]), column - SYMBOLS
                    if y == UNKNOWN and g < 0:
                        y = before_round(s, bits, floor, first_item, rows, hashed, items, states)
                    elif y == UNKNOWN and rows[s, WEIGHT] + peak[g] <= capacity:
                        y = after_placing(s, g, t, rows, hashed, items, states)
                    if y > REFUSED:
                        y = _node(y, begin, nodes, last, state, here)
                        nodes = max(nodes, y + 1)
                        source[a], target[a], number[a] = x, y, new
                        here[y] = min(here[y], here[x] + least[new])
                        a += 1
                count[NODES], count[ARCS] = nodes, a
        if loop[v] >= 0:
            return v, False
        v += 1
        begins[v], count[KEPT] = count[NODES], count[ARCS]
    return v, False


@njit
def _heaviest_first(begin: int, first_arc: int, t: States, f: Fine, count: Any) -> None:
    """Put the nodes of one node of the graph before in order, so that rounds lead to later ones."""
    end, x, weight = count[NODES], begin + 1, t.rows[:, WEIGHT]
    while x < end and weight[f.state[x - 1]] >= weight[f.state[x]]:
        x += 1
    if x >= end:
        return  # they are: arrays are made only otherwise
    order = np.argsort(-weight[f.state[begin:end]], kind="mergesort")
    place = np.empty(end - begin, np.int64)
    place[order] = np.arange(begin, end)
    f.state[begin:end], f.here[begin:end] = f.state[begin:end][order], f.here[begin:end][order]
    for x in range(begin, end):
        f.last[f.state[x]] = x
    for a in range(first_arc, count[ARCS]):
        f.target[a] = place[f.target[a] - begin]


@njit
def _follow_loop(
    v: int, loop: int, p: Prices, t: States, f: Fine, count: Any, room: Any
) -> bool:  # fmt: skip
    """Follow rounds that leave node v of the graph before as it is; return if room is short."""
    begin, spare, cost = f.first[v], p.cutoff - p.rest[v], loop * p.unit
    x, first_item = begin, SYMBOLS + len(t.peak)
    while x < count[NODES]:
        s = before_round(
            f.state[x], t.bits, t.floor, first_item, t.rows, t.slots, t.row, t.count
        )  # fmt: skip
        y = _node(s, begin, count[NODES], f.last, f.state, f.here)
        count[NODES] = max(count[NODES], y + 1)
        if _short(count[NODES] - begin, t.count, count, room):
            return True
        x += 1
    _heaviest_first(begin, count[KEPT], t, f, count)
    for x in range(begin, count[NODES]):
        y, a = f.last[t.rows[f.state[x], ROUND]], count[ARCS]
        if y != x and f.here[x] < NEVER and f.here[x] + cost <= spare:
            f.source[a], f.target[a], f.label[a] = x, y, loop
            f.here[y] = min(f.here[y], f.here[x] + cost)
            count[ARCS] += 1
    return False


@njit
def product(
    v: int, graph: Graph, labels: Labels, p: Prices, t: States, f: Fine, count: Any, room: Any
) -> int:  # fmt: skip
    """Make the nodes of v and of later nodes; return the first one for which room is short.

    Its nodes and arcs are counted, but made again by the next call.
    """
    v, short = _follow(v, graph, labels, p, t, f, count, room)
    while v < len(graph.loop) and not short:
        if _follow_loop(v, graph.loop[v], p, t, f, count, room):
            return v
        f.first[v + 1], count[KEPT] = count[NODES], count[ARCS]
        v, short = _follow(v + 1, graph, labels, p, t, f, count, room)
    return v


@njit
def loops(loop: Any, f: Fine, t: States) -> Any:
    """Return of each node the cost of a round that leaves it as it is, or -1."""
    out = np.full(f.first[-1], -1, np.int32)
    for v in range(len(loop)):
        for x in range(f.first[v], f.first[v + 1] if loop[v] >= 0 else 0):
            if t.rows[f.state[x], ROUND] == f.state[x]:
                out[x] = loop[v]
    return out
