"""Graphs of a ramp leaf, and their products with trackers: compiled, part of `period`.

Nodes of the finer graph are made in the order of the graph before, those of one of its nodes next
to each other. An arc is made only if some path through it may cost no more than the cutoff: the
cost so far, its own, and the cost to the end in the graph before. It keeps only such kinds.
"""

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Cells, Ints, Masks
from optsched.bounds.checker.states import (
    ITEMS,
    LAST,
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
NODES, ARCS, LABELS, PARTS, KEPT, CELLS, STATES = range(7)
"""Places of the counts of a level, and of the room for it. `KEPT` is of the arcs of the nodes that
are complete: with more of them than its room, a product rests."""
_ONE, _ZERO = np.uint64(1), np.uint64(0)


class Graph(NamedTuple):
    """Nodes in topological order, and their arcs in order of target.

    Node v is entered by the arcs ``into[v]`` to ``into[v + 1] - 1``. ``loop[v]`` is the cost of a
    round that leaves it as it is, or -1.
    """

    into: Ints
    source: Cells
    label: Cells
    loop: Cells

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.loop)

    @property
    def arcs(self) -> int:
        """Number of arcs."""
        return len(self.label)


class Leaving(NamedTuple):
    """A graph, its arcs in order of source: where those that leave each node begin."""

    first: Ints
    target: Cells
    label: Cells
    loop: Cells

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.loop)

    @property
    def arcs(self) -> int:
        """Number of arcs."""
        return len(self.label)


class Labels(NamedTuple):
    """What arcs do: pass rounds, join the clock, end, or place a request of a set of kinds."""

    what: Ints  # `PLACE`, or the tracker's column
    rounds: Ints
    mask: Masks  # of the kinds that it places, by word: kind k is bit k % 64 of word k // 64
    low: Ints  # the min and the max cost
    high: Ints
    first: Ints  # the parts that the tracker tells apart, from here on; -1 if not known yet
    end: Ints
    part: Cells  # the tracker's column and the label of each
    slots: Ints  # a hash table of the masks


class Prices(NamedTuple):
    """What placing a kind costs, the denominator, and the costs that may still be reached."""

    cost: Ints
    ascending: Ints  # the costs in order
    cheapest: Masks  # the masks of so many cheapest kinds
    unit: int
    rest: Ints
    cutoff: int


class Fine(NamedTuple):
    """A product in the making: by node its state and cost so far, and its arcs by target.

    The arcs of one node of the graph before wait in three scratch arrays until all are there. They
    reach states at first, then nodes.
    """

    first: Ints  # by node of the graph before, its first node
    state: Cells
    here: Ints
    into: Ints
    source: Cells
    label: Cells
    from_node: Cells
    to_node: Cells
    by_label: Cells


class Kept(NamedTuple):
    """What is left of a graph: the cost so far by new number, and the new number or -1."""

    here: Ints
    place: Cells


class Level(NamedTuple):
    """What a level is made of: a graph, what its arcs do and cost, a tracker, and the product."""

    graph: Graph
    labels: Labels
    prices: Prices
    states: States
    fine: Fine


@njit(allocates=False)
def places(masks: Masks, label: int, k: int) -> bool:
    """Whether the label places kind k."""
    return bool(masks[label, k // 64] >> np.uint64(k % 64) & _ONE)


@njit(allocates=False)
def learn(first: int, end: int, labels: Labels, cost: Ints) -> None:
    """Note what the labels first, ..., end - 1, which place, cost; no parts are known."""
    for label in range(first, end):
        low, high = np.int64(NEVER), np.int64(-NEVER)
        for k in range(cost.shape[0]):
            if places(labels.mask, label, k):
                low, high = min(low, cost[k]), max(high, cost[k])

        labels.low[label], labels.high[label], labels.first[label] = low, high, -1


@njit(allocates=False)
def _slot(label: int, masks: Masks, slots: Ints) -> Any:
    """Return the place of a label's mask in the hash table, or the empty one for it."""
    last, words, key = np.uint64(slots.shape[0] - 1), masks.shape[1], _ZERO
    for word in range(words):
        key = mixed(key ^ masks[label, word])

    at = key & last
    while slots[at] >= 0:
        other, same = slots[at], True
        for word in range(words):
            same &= masks[other, word] == masks[label, word]
        if same:
            break

        at = (at + _ONE) & last

    return at


@njit(allocates=False)
def label_of(labels: Labels, cost: Ints, count: Ints) -> Any:
    """Return the label that places one of the kinds in a mask, a new one if there was none."""
    new = count[LABELS]
    at = _slot(new, labels.mask, labels.slots)
    if labels.slots[at] < 0:
        labels.what[new], labels.rounds[new], labels.slots[at] = PLACE, 0, new
        learn(new, new + 1, labels, cost)
        count[LABELS] += 1

    return np.int64(labels.slots[at])


@njit(allocates=False)
def enter_masks(labels: Labels, first: int, end: int) -> None:
    """Enter the labels first, ..., end - 1 in the hash table, which is empty."""
    for k in range(first, end):
        labels.slots[_slot(k, labels.mask, labels.slots)] = k


@njit(allocates=False)
def _split(label: int, labels: Labels, cost: Ints, t: States, count: Ints) -> None:
    """Part a label by what the tracker tells apart, in order of the tracker's symbols."""
    masks, members, words = labels.mask, t.members, t.members.shape[1]
    labels.first[label] = count[PARTS]
    if labels.what[label] != PLACE:
        labels.part[count[PARTS], 0] = labels.what[label]
        labels.part[count[PARTS], 1] = label
        count[PARTS] += 1

    for g in range(len(members)):
        new, some = count[LABELS], _ZERO
        for word in range(words):
            masks[new, word] = masks[label, word] & members[g, word]
            some |= masks[new, word]

        if some != _ZERO:
            part = labels.part[count[PARTS]]
            part[0], part[1] = SYMBOLS + g, label_of(labels, cost, count)
            count[PARTS] += 1

    labels.end[label] = count[PARTS]


@njit(allocates=False)
def _within(label: Any, slack: Any, labels: Labels, p: Prices, count: Ints) -> Any:
    """Return the label of those kinds of a label that cost at most ``slack``; there are some."""
    masks, cheapest, number, new = labels.mask, p.cheapest, len(p.ascending), count[LABELS]
    while p.ascending[number - 1] > slack:
        number -= 1
    for word in range(masks.shape[1]):
        masks[new, word] = masks[label, word] & cheapest[number, word]

    return label_of(labels, p.cost, count)


@njit(allocates=False)
def _short(more: int, states: Ints, count: Ints, room: Ints) -> bool:
    """Whether there may be too little room for one more node of the graph before."""
    return (
        count[NODES] > room[NODES]
        or count[ARCS] + more > room[ARCS]
        or count[LABELS] > room[LABELS]
        or count[PARTS] > room[PARTS]
        or states[0] > room[CELLS]
        or states[1] > room[STATES]
    )


@njit(allocates=False)
def _node(s: Any, begin: int, nodes: int, rows: Cells, state: Cells, here: Ints) -> Any:
    """Return the node of a state among those from ``begin`` on; it is ``nodes`` if it is new."""
    last, new = np.uint64(s + LAST), np.uint64(nodes)
    y = np.int64(rows[last])
    if begin <= y < nodes and state[np.uint64(y)] == s:
        return y

    state[new], here[new], rows[last] = s, NEVER, nodes
    return nodes


@njit(allocates=False)
def _follow(v: int, level: Level, count: Ints, room: Ints) -> Any:
    """Make the nodes of v and of later nodes by the arcs into them: first arcs, then their nodes.

    Returns the first node for which room is short, or that rounds may leave as it is, and whether
    room is short. After the first symbol that does not fit none does. Places are unsigned: of
    signed ones it is asked each time if they count from the end.

    An arc through which every path costs more than the cutoff is left out: a schedule of at most
    this cost is another path. So are the kinds of an arc that cost too much.
    """
    graph, labels, p, t, f = level
    begins, state, here, _, _, _, source, target, number = f
    rows, states, rest = t.rows, t.made, p.rest
    low, high, first, end, part = labels.low, labels.high, labels.first, labels.end, labels.part
    enter, before, by, loop = graph.into, graph.source, graph.label, graph.loop

    while v < len(loop):
        begin, spare, a = begins[v], p.cutoff - rest[v], _ZERO
        count[NODES], count[ARCS] = begin, count[KEPT]
        if count[KEPT] > room[KEPT] or _short(0, states, count, room):
            return v, True

        full = np.uint64(room[ARCS] - count[KEPT])
        if v == 0:
            here[_node(0, 0, 0, rows, state, here)] = 0
            count[NODES] = 1

        for into in range(enter[v], enter[v + 1] if rest[v] < NEVER else 0):
            u, label = np.uint64(before[into]), np.uint64(by[into])
            for x in range(np.uint64(begins[u]), np.uint64(begins[u + _ONE])):
                so_far = here[x]
                slack = spare - so_far
                if so_far == NEVER or low[label] > slack:
                    continue
                if a > full:
                    count[ARCS] += np.int64(a)
                    return v, True

                whole = label
                if high[label] > slack:  # some of its kinds cost too much
                    whole = np.uint64(_within(label, slack, labels, p, count))
                if first[whole] < 0:
                    _split(np.int64(whole), labels, p.cost, t, count)
                    if _short(0, states, count, room):
                        return v, True

                s = np.int64(state[x])
                columns = rows[np.uint64(s + ITEMS)]
                for j in range(np.uint64(first[whole]), np.uint64(end[whole])):
                    column, new = np.int64(part[j, 0]), np.uint64(part[j, 1])
                    if column >= columns:
                        break

                    y = np.int64(rows[np.uint64(s + column)])
                    if y == UNKNOWN:
                        place = column - SYMBOLS
                        y = before_round(s, t) if place < 0 else after_placing(s, place, t)
                        if _short(0, states, count, room):
                            return v, True

                    if y > REFUSED:
                        source[a], target[a], number[a] = x, y, new
                        a += _ONE

        count[ARCS] += np.int64(a)

        nodes = count[NODES]
        for w in range(a):  # the states that arcs reach become nodes
            y = _node(target[w], begin, nodes, rows, state, here)
            nodes, at = max(nodes, y + 1), np.uint64(y)
            target[w] = y
            here[at] = min(here[at], here[np.uint64(source[w])] + low[np.uint64(number[w])])

            if nodes > room[NODES]:
                count[NODES] = nodes
                return v, True

        count[NODES] = nodes
        if loop[v] >= 0:
            return v, False

        v += 1
        _by_target(v, f, count)

    return v, False


@njit(allocates=False)
def _by_target(v: int, f: Fine, count: Ints) -> None:
    """Put the arcs of the node before v in order of target, and go on to v."""
    into, source, label, from_node, to_node, by_label = f[3:]
    kept, begin, end = count[KEPT], f.first[v - 1], count[NODES]
    into[begin + 1 : end + 2] = 0
    for a in range(np.uint64(count[ARCS] - kept)):
        into[np.uint64(to_node[a]) + np.uint64(2)] += 1

    into[begin + 1] = kept
    for y in range(begin + 2, end + 2):
        into[y] += into[y - 1]
    for a in range(np.uint64(count[ARCS] - kept)):
        after = np.uint64(to_node[a]) + _ONE
        at = np.uint64(into[after])
        source[at], label[at] = from_node[a], by_label[a]
        into[after] += 1

    f.first[v], count[KEPT] = end, count[ARCS]


@njit(allocates=False)
def _sort_up(key: Ints) -> None:
    """Sort numbers (Shell 1959)."""
    gap = key.shape[0] // 2
    while gap > 0:
        for k in range(gap, key.shape[0]):
            value, at = key[k], k
            while at >= gap and key[at - gap] > value:
                key[at] = key[at - gap]
                at -= gap

            key[at] = value

        gap //= 2


@njit
def _heaviest_first(begin: int, t: States, f: Fine, count: Ints) -> None:
    """Put the nodes of one node of the graph before in order, so that rounds lead to later ones."""
    end, x, weight = count[NODES], begin + 1, t.rows[WEIGHT:]
    while x < end and weight[f.state[x - 1]] >= weight[f.state[x]]:
        x += 1
    if x >= end:
        return  # they are: arrays are made only otherwise

    # Keys are unique, so that equal weights keep their order. numba's `argsort` compiles for 4 s.
    nodes = end - begin
    key, place = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    was = np.empty((nodes, 2), np.int64)
    for k in range(nodes):
        key[k] = k - np.int64(weight[f.state[begin + k]]) * nodes
        was[k, 0], was[k, 1] = f.state[begin + k], f.here[begin + k]

    _sort_up(key)
    for k in range(nodes):
        before = key[k] % nodes
        place[before] = begin + k
        f.state[begin + k], f.here[begin + k] = was[before, 0], was[before, 1]

    for x in range(begin, end):
        t.rows[f.state[x] + LAST] = x
    for a in range(count[ARCS] - count[KEPT]):
        f.to_node[a] = place[f.to_node[a] - begin]


@njit
def _follow_loop(v: int, level: Level, count: Ints, room: Ints) -> bool:
    """Follow rounds that leave node v of the graph before as it is; return if room is short."""
    graph, _, p, t, f = level
    loop, begin, spare, rows = graph.loop[v], f.first[v], p.cutoff - p.rest[v], t.rows
    cost = loop * p.unit
    x = begin
    while x < count[NODES]:
        y = _node(before_round(f.state[x], t), begin, count[NODES], rows, f.state, f.here)
        count[NODES] = max(count[NODES], y + 1)
        if _short(count[NODES] - begin, t.made, count, room):
            return True

        x += 1

    _heaviest_first(begin, t, f, count)
    for x in range(begin, count[NODES]):
        y, a = rows[rows[f.state[x] + ROUND] + LAST], count[ARCS] - count[KEPT]
        if y != x and f.here[x] < NEVER and f.here[x] + cost <= spare:
            f.from_node[a], f.to_node[a], f.by_label[a] = x, y, loop
            f.here[y] = min(f.here[y], f.here[x] + cost)
            count[ARCS] += 1

    return False


@njit(nogil=True)
def product(v: int, level: Level, count: Ints, room: Ints) -> int:
    """Make the nodes of v and of later nodes; return the first one for which room is short."""
    v, short = _follow(v, level, count, room)
    while v < len(level.graph.loop) and not short:
        if _follow_loop(v, level, count, room):
            return v

        v += 1
        _by_target(v, level.fine, count)
        v, short = _follow(v, level, count, room)

    return v


@njit(nogil=True)
def loops(loop: Cells, f: Fine, t: States) -> Cells:
    """Return of each node the cost of a round that leaves it as it is, or -1."""
    out = np.full(f.first[-1], -1, np.int32)
    for v in range(len(loop)):
        for x in range(f.first[v], f.first[v + 1] if loop[v] >= 0 else 0):
            if t.rows[f.state[x] + ROUND] == f.state[x]:
                out[x] = loop[v]

    return out


@njit(allocates=False, nogil=True)
def thin(
    v: int, graph: Graph, labels: Labels, p: Prices, kept: Kept, count: Ints, room: int
) -> int:
    """Move v and later nodes forward in their arrays, but only paths up to the cutoff.

    The cost so far of the first node is given. Returns the node at which there may be too few
    labels; the next call goes on with the next of its arcs.
    """
    (into, source, label, loop), (here, place) = graph, kept
    rest, low, high = p.rest, labels.low, labels.high
    while v < len(rest):
        nodes, arcs, spare = count[NODES], np.uint64(count[ARCS]), p.cutoff - rest[v]
        first, last = np.uint64(count[KEPT]), np.uint64(into[v + 1])

        # The min cost from the start to an arc, the arc and the rest are added up: every path
        # through the arc costs this or more. Of a node that is kept, a cheapest path to the end is
        # kept, too, so that its rest stays what it is.
        for a in range(first, last if rest[v] < NEVER else first):
            u, old = np.int64(place[np.uint64(source[a])]), np.uint64(label[a])
            if u < 0 or low[old] > spare - here[np.uint64(u)]:
                continue

            so_far = here[np.uint64(u)]
            if high[old] > spare - so_far:  # some of its kinds cost too much
                if count[LABELS] > room:
                    count[ARCS], count[KEPT] = arcs, a
                    return v

                old = np.uint64(_within(old, spare - so_far, labels, p, count))

            here[nodes] = min(here[nodes], so_far + low[old])
            source[arcs], label[arcs] = u, old
            arcs += _ONE

        place[v] = -1
        if here[nodes] < NEVER:
            place[v], loop[nodes], rest[nodes], into[nodes + 1] = nodes, loop[v], rest[v], arcs
            count[NODES], count[ARCS], here[nodes + 1] = nodes + 1, arcs, NEVER

        count[KEPT] = last
        v += 1

    return v
