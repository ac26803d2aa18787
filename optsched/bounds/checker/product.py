"""Graphs of a ramp leaf, and their products with trackers: compiled, part of `period`.

A path follows a schedule from its end backward. An arc of it passes a round, places a request at
its peak, joins the clock (from there on rounds have numbers, so that arrivals count), or ends. A
tracker is an automaton over what arcs do (`states`). The *cutoff* is the largest cost of the paths
that are kept.

Nodes of the finer graph are made in the order of the graph before, those of one of its nodes next
to each other. An arc is made only if some path through it may cost no more than the cutoff: the
cost so far, its own, and the cost to the end in the graph before. It keeps only such kinds.

Letters, in all functions here: u and v are nodes of the graph before, x and y nodes of the
product, a is an arc, k a kind of request, and s a state of the tracker. ``cost`` is by kind what
placing it costs, and ``count`` and ``limits`` are those of `NODES` and so on. Hot loops cast
indices to unsigned integers, since numba tests each signed one for whether it counts from the end.
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
    mix,
)
from optsched.problem.kernel import njit

NEVER = 2**62
"""The cost of a node that no path reaches."""
# Places of the counts of a level, and of their limits. While a product is made, `KEPT` is how many
# arcs lead into nodes that are complete: with more of them than its limit it returns, so that its
# caller can look at the clock. While a graph is thinned, it is the arc to be read next (`thin`).
NODES, ARCS, LABELS, PARTS, KEPT, CELLS, STATES = range(7)
_ONE, _ZERO = np.uint64(1), np.uint64(0)


class Graph(NamedTuple):
    """Nodes in topological order, and their arcs in order of target.

    Node v is entered by the arcs ``into[v]`` to ``into[v + 1] - 1``. ``loop[v]`` is the cost of a
    round that leaves it as it is, in rounds, or -1.
    """

    into: Ints
    source: Cells  # by arc, a node
    label: Cells  # by arc, a number of `Labels`
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

    first: Ints  # by node, and then the number of arcs
    target: Cells  # by arc
    label: Cells  # by arc
    loop: Cells  # as in `Graph`

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

    action: Ints  # `PLACE`, or the tracker's column: `ROUND`, `JOIN` or `END`
    rounds: Ints  # what an arc that places nothing costs, in rounds
    mask: Masks  # of the kinds that it places, by word: kind k is bit k % 64 of word k // 64
    low: Ints  # the min cost over the kinds, in units of the prices
    high: Ints  # the max cost
    first: Ints  # the parts that the tracker tells apart are ``first`` to ``end`` - 1; -1: unknown
    end: Ints
    part: Cells  # by part, the tracker's column and the part's own label
    slots: Ints  # a hash table of the masks


class Prices(NamedTuple):
    """What placing a kind costs, the denominator, and the costs that may still be reached."""

    cost: Ints
    ascending: Ints  # the costs in order
    cheapest: Masks  # row j has the mask of the j cheapest kinds
    unit: int  # the denominator: what a round costs in which one request waits
    to_end: Ints  # by node, the min cost from there to the end
    cutoff: int  # the largest cost of a path that is kept


class Fine(NamedTuple):
    """A product in the making: by node its state and cost so far, and its arcs by target.

    The arcs of one node of the graph before wait in three scratch arrays until all are there, in
    the order in which they are found. `to_node` has the target's state at first, then its node.
    """

    first: Ints  # by node of the graph before, its first node
    state: Cells  # by node, as all down to ``into``
    so_far: Ints
    into: Ints  # as in `Graph`, and so are ``source`` and ``label``
    source: Cells
    label: Cells
    from_node: Cells  # of the arcs that wait
    to_node: Cells
    by_label: Cells


class Kept(NamedTuple):
    """What stays of a graph: the cost so far by new number, and the new number by old one or -1."""

    so_far: Ints
    new_number: Cells


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
def set_costs(first: int, end: int, labels: Labels, cost: Ints) -> None:
    """Set the min and max cost of labels first, ..., end - 1, which place kinds; forget parts."""
    for label in range(first, end):
        low, high = np.int64(NEVER), np.int64(-NEVER)
        for k in range(cost.shape[0]):
            if places(labels.mask, label, k):
                low, high = min(low, cost[k]), max(high, cost[k])

        labels.low[label], labels.high[label], labels.first[label] = low, high, -1


@njit(allocates=False)
def _slot(label: int, masks: Masks, slots: Ints) -> Any:
    """Return the slot of a label's mask in the hash table, or the empty slot where it belongs."""
    words, key = masks.shape[1], _ZERO
    last = np.uint64(slots.shape[0] - 1)  # a power of two less one, so that & takes a remainder
    for word in range(words):
        key = mix(key ^ masks[label, word])

    slot = key & last
    # Open addressing: look on until the same mask or an empty slot is found. Half are empty.
    while slots[slot] >= 0:
        other, same = slots[slot], True
        for word in range(words):
            same &= masks[other, word] == masks[label, word]
        if same:
            break

        slot = (slot + _ONE) & last

    return slot


@njit(allocates=False)
def label_of(labels: Labels, cost: Ints, count: Ints) -> Any:
    """Return the label of a mask, a new one if there was none.

    The caller has written the mask in the first row behind the labels that are in use.
    """
    new = count[LABELS]
    slot = _slot(new, labels.mask, labels.slots)
    if labels.slots[slot] < 0:
        labels.action[new], labels.rounds[new], labels.slots[slot] = PLACE, 0, new
        set_costs(new, new + 1, labels, cost)
        count[LABELS] += 1

    return np.int64(labels.slots[slot])


@njit(allocates=False)
def enter_masks(labels: Labels, first: int, end: int) -> None:
    """Enter the labels first, ..., end - 1 in the hash table, which is empty."""
    for k in range(first, end):
        labels.slots[_slot(k, labels.mask, labels.slots)] = k


@njit(allocates=False)
def _split_label(label: int, labels: Labels, cost: Ints, t: States, count: Ints) -> None:
    """Split a label into parts that the tracker tells apart, in order of the tracker's symbols.

    A part places those kinds of the label that are members of one symbol. Its mask is written in
    the first row that no label uses yet (``new``), where `label_of` looks for it.
    """
    masks, members, words = labels.mask, t.members, t.members.shape[1]
    labels.first[label] = count[PARTS]
    # A label that places nothing has an empty mask, and so this one part.
    if labels.action[label] != PLACE:
        labels.part[count[PARTS], 0] = labels.action[label]
        labels.part[count[PARTS], 1] = label
        count[PARTS] += 1

    for symbol in range(len(members)):
        new, any_kind = count[LABELS], _ZERO
        for word in range(words):
            masks[new, word] = masks[label, word] & members[symbol, word]
            any_kind |= masks[new, word]

        # Most symbols share no kind with the label. Only others become a label, see `label_of`.
        if any_kind != _ZERO:
            part = labels.part[count[PARTS]]
            part[0], part[1] = SYMBOLS + symbol, label_of(labels, cost, count)
            count[PARTS] += 1

    labels.end[label] = count[PARTS]


@njit(allocates=False)
def _cut_label(label: Any, slack: Any, labels: Labels, p: Prices, count: Ints) -> Any:
    """Return the label of those kinds of a label that cost at most ``slack``.

    The caller has checked that its cheapest kind does, so that at least one kind stays. The mask is
    written in the first row that no label uses yet (``new``), where `label_of` looks for it.
    """
    masks, cheapest, number, new = labels.mask, p.cheapest, len(p.ascending), count[LABELS]
    # Costs ascend, so the kinds that fit into the slack are so many of the cheapest.
    while p.ascending[number - 1] > slack:
        number -= 1
    for word in range(masks.shape[1]):
        masks[new, word] = masks[label, word] & cheapest[number, word]

    return label_of(labels, p.cost, count)


@njit(allocates=False)
def _is_short(new_arcs: int, states: Ints, count: Ints, limits: Ints) -> bool:
    """Whether one more node of the graph before may need more than there is space for.

    `new_arcs`: those that are to come beside the ones that are counted. `states`: the numbers of
    cells and of states of the tracker. Limits are set low enough that what is added between two
    calls fits behind them (`period`).
    """
    return (
        count[NODES] > limits[NODES]
        or count[ARCS] + new_arcs > limits[ARCS]
        or count[LABELS] > limits[LABELS]
        or count[PARTS] > limits[PARTS]
        or states[0] > limits[CELLS]
        or states[1] > limits[STATES]
    )


@njit(allocates=False)
def _find_node(s: Any, begin: int, nodes: int, rows: Cells, state: Cells, so_far: Ints) -> Any:
    """Return the node of a state among those from ``begin`` on; it is ``nodes`` if it is new.

    The nodes from ``begin`` on are those of one node of the graph before. A new one gets its state,
    and no cost so far yet (`NEVER`); the caller counts it.
    """
    last, new = np.uint64(s + LAST), np.uint64(nodes)
    node = np.int64(rows[last])
    # The tracker notes the last node of each state. It may belong to an earlier node of the graph
    # before, or to one that is made again after arrays were too short: then it is not used.
    if begin <= node < nodes and state[np.uint64(node)] == s:
        return node

    state[new], so_far[new], rows[last] = s, NEVER, nodes
    return nodes


@njit(allocates=False)
def _make_nodes(v: int, level: Level, count: Ints, limits: Ints) -> Any:
    """Make the nodes of v and of later nodes by the arcs into them: first arcs, then their nodes.

    Return the first node that was not made, and whether that is since arrays are too short; else
    it is one that rounds may leave as it is, for `_make_loop`.

    An arc through which every path costs more than the cutoff is left out: a schedule of at most
    this cost is another path. So are the kinds of an arc that cost too much.
    """
    graph, labels, prices, tracker, fine = level
    first_node, state, so_far, _, _, _, from_node, to_node, by_label = fine
    # ``rows`` has the tracker's states, and ``states`` how many cells and states these are.
    rows, states, to_end = tracker.rows, tracker.made, prices.to_end
    low, high, first, end, part = labels.low, labels.high, labels.first, labels.end, labels.part
    arcs_into, arc_source, arc_label, loop = graph.into, graph.source, graph.label, graph.loop

    while v < len(loop):
        # ``spare`` is what a path may cost up to v, and ``arcs`` counts those into its nodes. What
        # an earlier call has made of v, until arrays were too short, is overwritten.
        begin, spare, arcs = first_node[v], prices.cutoff - to_end[v], _ZERO
        count[NODES], count[ARCS] = begin, count[KEPT]
        # No arcs (0) are looked at ahead: they are counted one by one below.
        if count[KEPT] > limits[KEPT] or _is_short(0, states, count, limits):
            return v, True

        space = np.uint64(limits[ARCS] - count[KEPT])
        if v == 0:
            # The start: state 0, in which nothing is live, is node 0, and nothing is paid.
            so_far[_find_node(0, 0, 0, rows, state, so_far)] = 0
            count[NODES] = 1

        # A node from which no path reaches the end needs no arcs.
        for into in range(arcs_into[v], arcs_into[v + 1] if to_end[v] < NEVER else 0):
            u, label = np.uint64(arc_source[into]), np.uint64(arc_label[into])
            for x in range(np.uint64(first_node[u]), np.uint64(first_node[u + _ONE])):
                # The cheapest path through this arc, which is x's cost so far, the arc, and the
                # cost to the end, is dearer than the cutoff.
                paid = so_far[x]
                slack = spare - paid
                if paid == NEVER or low[label] > slack:
                    continue
                # Arrays are only made wider between two calls, and v is made again by the next one.
                if arcs > space:
                    count[ARCS] += np.int64(arcs)
                    return v, True

                kept = label
                if high[label] > slack:  # some of its kinds cost too much
                    kept = np.uint64(_cut_label(label, slack, labels, prices, count))
                if first[kept] < 0:
                    _split_label(np.int64(kept), labels, prices.cost, tracker, count)
                    if _is_short(0, states, count, limits):
                        return v, True

                s = np.int64(state[x])
                columns = rows[np.uint64(s + ITEMS)]
                for j in range(np.uint64(first[kept]), np.uint64(end[kept])):
                    column, number = np.int64(part[j, 0]), np.uint64(part[j, 1])
                    # Symbols ascend in peak, and a state has columns only for those that fit: this
                    # part places one that does not, and so do all after it.
                    if column >= columns:
                        break

                    after = np.int64(rows[np.uint64(s + column)])
                    if after == UNKNOWN:
                        if column < SYMBOLS:  # a round; joins and ends are known from the start
                            after = before_round(s, tracker)
                        else:
                            after = after_placing(s, column - SYMBOLS, tracker)
                        if _is_short(0, states, count, limits):
                            return v, True

                    # The tracker proves that no schedule goes on from a refused state.
                    if after > REFUSED:
                        from_node[arcs], to_node[arcs], by_label[arcs] = x, after, number
                        arcs += _ONE

        count[ARCS] += np.int64(arcs)

        nodes = count[NODES]
        # The cost so far of a node is the min over its arcs, whose sources are complete by now.
        for a in range(arcs):
            y = _find_node(to_node[a], begin, nodes, rows, state, so_far)
            nodes, node = max(nodes, y + 1), np.uint64(y)
            to_node[a] = y
            paid = so_far[np.uint64(from_node[a])] + low[np.uint64(by_label[a])]
            so_far[node] = min(so_far[node], paid)

            if nodes > limits[NODES]:
                count[NODES] = nodes
                return v, True

        count[NODES] = nodes
        if loop[v] >= 0:
            return v, False

        v += 1
        _sort_by_target(v, fine, count)

    return v, False


@njit(allocates=False)
def _sort_by_target(v: int, fine: Fine, count: Ints) -> None:
    """Put the arcs of the node before v in order of target, and note where the nodes of v begin.

    The arcs come from the scratch arrays, and go behind those of earlier nodes.
    """
    into, source, label, from_node, to_node, by_label = fine[3:]
    # Arcs before ``settled`` have their places. Nodes begin, ..., end - 1 are of the node before v.
    settled, begin, end = count[KEPT], fine.first[v - 1], count[NODES]
    # A counting sort: count the arcs into each node, add up, and put each in its place. Counts of
    # node y stand two places on, so that once they are added up entry y + 1 is where the next arc
    # into y goes. When all are there it is where the arcs of node y + 1 begin.
    into[begin + 1 : end + 2] = 0
    for a in range(np.uint64(count[ARCS] - settled)):
        into[np.uint64(to_node[a]) + np.uint64(2)] += 1

    into[begin + 1] = settled
    for y in range(begin + 2, end + 2):
        into[y] += into[y - 1]
    for a in range(np.uint64(count[ARCS] - settled)):
        after = np.uint64(to_node[a]) + _ONE
        place = np.uint64(into[after])
        source[place], label[place] = from_node[a], by_label[a]
        into[after] += 1

    fine.first[v], count[KEPT] = end, count[ARCS]


@njit(allocates=False)
def _sort_ascending(key: Ints) -> None:
    """Sort numbers in place (Shell 1959): by insertion, first of those that are far apart."""
    gap = key.shape[0] // 2
    while gap > 0:
        for k in range(gap, key.shape[0]):
            value, place = key[k], k
            while place >= gap and key[place - gap] > value:
                key[place] = key[place - gap]
                place -= gap

            key[place] = value

        gap //= 2


@njit
def _put_heaviest_first(begin: int, tracker: States, fine: Fine, count: Ints) -> None:
    """Put the nodes of one node of the graph before in order of weight, the heaviest first.

    In a round live items only lose tokens, so that arcs of rounds then lead to later nodes: the
    order stays topological.
    """
    end, node = count[NODES], begin + 1
    weight = tracker.rows[WEIGHT:]  # a view: at a state's number it has the state's weight
    while node < end and weight[fine.state[node - 1]] >= weight[fine.state[node]]:
        node += 1
    if node >= end:
        return  # they are in order: arrays are made only otherwise

    # Keys are unique, so that equal weights keep their order. numba's `argsort` compiles for 4 s.
    nodes = end - begin
    key, place = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    old = np.empty((nodes, 2), np.int64)
    for k in range(nodes):
        key[k] = k - np.int64(weight[fine.state[begin + k]]) * nodes
        old[k, 0], old[k, 1] = fine.state[begin + k], fine.so_far[begin + k]

    _sort_ascending(key)
    for k in range(nodes):
        from_place = key[k] % nodes  # keys are k - weight * nodes, so this is k again
        place[from_place] = begin + k
        fine.state[begin + k], fine.so_far[begin + k] = old[from_place, 0], old[from_place, 1]

    # What points to the nodes follows them: the tracker's last nodes, and the arcs that wait, whose
    # sources are earlier nodes.
    for node in range(begin, end):
        tracker.rows[fine.state[node] + LAST] = node
    for a in range(count[ARCS] - count[KEPT]):
        fine.to_node[a] = place[fine.to_node[a] - begin]


@njit
def _make_loop(v: int, level: Level, count: Ints, limits: Ints) -> bool:
    """Add the rounds that leave node v of the graph before as it is; whether arrays are too short.

    In such a round the tracker's state may change: then it is an arc between two nodes of v.
    """
    graph, _, prices, tracker, fine = level
    state, so_far, rows = fine.state, fine.so_far, tracker.rows
    loop, begin, spare = graph.loop[v], fine.first[v], prices.cutoff - prices.to_end[v]
    cost = loop * prices.unit
    x = begin
    while x < count[NODES]:
        # A round may lead to a state that is no node yet: it becomes one, and is followed in turn.
        y = _find_node(before_round(state[x], tracker), begin, count[NODES], rows, state, so_far)
        count[NODES] = max(count[NODES], y + 1)
        # Each of these nodes may add one arc.
        if _is_short(count[NODES] - begin, tracker.made, count, limits):
            return True

        x += 1

    # Sorted, each node's cost so far is known before a round passes it on.
    _put_heaviest_first(begin, tracker, fine, count)
    for x in range(begin, count[NODES]):
        y, a = rows[rows[state[x] + ROUND] + LAST], count[ARCS] - count[KEPT]
        # The round leads from x to y. One that changes nothing is a loop of the node, and one
        # beyond the cutoff leads to no schedule that is looked for.
        if y != x and so_far[x] < NEVER and so_far[x] + cost <= spare:
            # The label of a round that costs m is number m, and so is that of a loop.
            fine.from_node[a], fine.to_node[a], fine.by_label[a] = x, y, loop
            so_far[y] = min(so_far[y], so_far[x] + cost)
            count[ARCS] += 1

    return False


@njit(nogil=True)
def product(v: int, level: Level, count: Ints, limits: Ints) -> int:
    """Make the nodes of v and of later nodes; return the first for which arrays are too short.

    It is the number of nodes of the graph before if all are made. `_make_nodes` stops at a node
    that rounds may leave as it is, whose rounds `_make_loop` adds before its arcs are sorted.
    """
    v, short = _make_nodes(v, level, count, limits)
    while v < len(level.graph.loop) and not short:
        if _make_loop(v, level, count, limits):
            return v

        v += 1
        _sort_by_target(v, level.fine, count)
        v, short = _make_nodes(v, level, count, limits)

    return v


@njit(nogil=True)
def loop_costs(loop: Cells, fine: Fine, tracker: States) -> Cells:
    """Return the cost of a round that leaves each node as it is, or -1 where none does."""
    costs = np.full(fine.first[-1], -1, np.int32)
    for v in range(len(loop)):
        for x in range(fine.first[v], fine.first[v + 1] if loop[v] >= 0 else 0):
            # A round has to leave both as they are, the node before and the tracker's state.
            if tracker.rows[fine.state[x] + ROUND] == fine.state[x]:
                costs[x] = loop[v]

    return costs


@njit(allocates=False, nogil=True)
def thin(
    v: int, graph: Graph, labels: Labels, prices: Prices, kept: Kept, count: Ints, max_labels: int
) -> int:
    """Move v and later nodes forward in their arrays, but only paths up to the cutoff.

    What stays is written over what was read. Old node v is read from its arc ``count[KEPT]`` on.
    ``count[NODES]`` and ``count[ARCS]`` say how many new nodes and arcs there are, and so the
    numbers of the next ones. These counts begin at 0, and the caller sets the cost so far of the
    first node to 0. A label's ``low`` and ``high`` are the least and the largest cost of its kinds.

    Return the number of old nodes when all is done, or the node at whose arc ``count[KEPT]`` labels
    may run short, as there are more than ``max_labels``: the next call goes on there.
    """
    (into, source, label, loop), (so_far, new_number) = graph, kept
    to_end, low, high = prices.to_end, labels.low, labels.high
    while v < len(to_end):
        nodes, arcs, spare = count[NODES], np.uint64(count[ARCS]), prices.cutoff - to_end[v]
        # The arcs of v that are still to be read; none if no path leads from v to the end.
        first, last = np.uint64(count[KEPT]), np.uint64(into[v + 1])

        # The min cost from the start to an arc, the arc and the cost to the end are added up: every
        # path through the arc costs this or more. Of a node that is kept, a cheapest path to the
        # end is kept, too, so that its cost to the end stays what it is.
        for a in range(first, last if to_end[v] < NEVER else first):
            # Here u is the new number of the arc's source, and -1 if the source was deleted.
            u, number = np.int64(new_number[np.uint64(source[a])]), np.uint64(label[a])
            if u < 0 or low[number] > spare - so_far[np.uint64(u)]:
                continue

            paid = so_far[np.uint64(u)]
            if high[number] > spare - paid:  # some of its kinds cost too much
                # Labels are only made wider between two calls: the next one begins with arc a.
                if count[LABELS] > max_labels:
                    count[ARCS], count[KEPT] = arcs, a
                    return v

                number = np.uint64(_cut_label(number, spare - paid, labels, prices, count))

            so_far[nodes] = min(so_far[nodes], paid + low[number])
            # Arcs and nodes only move forward, so nothing is overwritten before it is read.
            source[arcs], label[arcs] = u, number
            arcs += _ONE

        # Without an arc that stays, v is deleted. The first node has none, but a cost so far of 0.
        new_number[v] = -1
        if so_far[nodes] < NEVER:
            new_number[v], loop[nodes], to_end[nodes] = nodes, loop[v], to_end[v]
            into[nodes + 1] = arcs
            count[NODES], count[ARCS], so_far[nodes + 1] = nodes + 1, arcs, NEVER

        count[KEPT] = last
        v += 1

    return v
