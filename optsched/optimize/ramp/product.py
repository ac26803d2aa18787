"""The product of a graph of the ramp relaxation with a tracker, compiled.

A node of the product is a node of the coarse graph together with a state of the tracker. The
compiled walk runs until an array is full; `product` then makes room, and the walk goes on from
where it was. Import this module lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.judge.life import record
from optsched.optimize.ramp.graph import (
    INFINITE,
    Graph,
    Interrupted,
    Labels,
    TooLargeError,
    by_source,
    hash_mask,
    label_of,
    places,
    reversed_arcs,
)
from optsched.optimize.ramp.tracker import (
    AFTER,
    BEFORE,
    COLUMNS,
    END,
    JOIN,
    LAST,
    MARGIN,
    NUMBER,
    TABLE_MARGIN,
    UNKNOWN,
    Automaton,
    Tracker,
    state_after,
    wider,
)
from optsched.problem.kernel import njit

_DONE, _FULL, _STOPPED, _TOO_LARGE, _LOOP = 0, 1, 2, 3, 4
"""What compiled functions return. After `_FULL` the walk is called again."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)

_PART = record(
    ("column", np.int32),  # of the tracker's rows
    ("label", np.int32),
    ("low", np.int32),  # least cost of its kinds
)
_ABOUT = record(
    ("low", np.int64),  # least and largest cost of its kinds
    ("high", np.int64),
    ("first", np.int64),  # its parts are the rows first, ..., end - 1; -1 before it is split
    ("end", np.int64),
)
_PROGRESS = record(
    ("coarse", np.int64),  # node of the coarse graph that is being expanded
    ("arc", np.int64),  # arc into it that is being followed
    ("skip", np.int64),  # nodes of the arc's source that have been followed
    ("begin", np.int64),  # first node and first arc of the product there
    ("begin_arc", np.int64),
    ("nodes", np.int64),  # of the product so far
    ("arcs", np.int64),
    ("parts", np.int64),
    ("labels", np.int64),  # labels of which the range of costs is known
    ("full_nodes", np.int64),  # numbers beyond which there is no room to expand one more node
    ("full_arcs", np.int64),
    ("full_states", np.int64),
    ("full_table", np.int64),
    ("full_labels", np.int64),
    ("full_parts", np.int64),
)


class Prices(NamedTuple):
    """What paths cost, and which ones survive.

    Attributes
    ----------
    cost : ndarray of int64, shape (kinds,)
        The cost of placing a request of each kind (minus its multiplier).
    scale : int
        The cost of one round of one request.
    backward : ndarray of int32, shape (nodes of the coarse graph,)
        The least cost from each node to the end.
    cutoff : int
        Paths that cost more are deleted.
    """

    cost: NDArray[np.int64]
    scale: int
    backward: NDArray[np.int32]
    cutoff: int


class Room(NamedTuple):
    """How large a product may become.

    Attributes
    ----------
    nodes, arcs, states : int
    """

    nodes: int
    arcs: int
    states: int


class _Coarse(NamedTuple):
    """The coarse graph, its arcs in order of target, and what may be spent on it."""

    start: Any
    source: Any
    label: Any
    loop: Any
    backward: Any
    cutoff: Any
    scale: Any


class _Labels(NamedTuple):
    """Arrays of `Labels`, what is known of each label, and its parts by symbol."""

    mask: Any
    slots: Any
    count: Any
    cost: Any  # of each kind
    ascending: Any  # the costs in order
    cheapest: Any  # the masks of so many cheapest kinds
    symbol: Any  # of each kind, as the tracker sees it
    about: Any
    parts: Any
    by_symbol: Any  # masks, scratch space
    touched: Any


class _Fine(NamedTuple):
    """The product as far as it has been made."""

    first: Any  # node of each coarse node
    state: Any  # of each node
    here: Any  # cost of each node from the root
    source: Any
    target: Any
    label: Any


@njit(nogil=True)
def _learn_ranges(labels: _Labels, p: Any) -> None:
    """Note the least and the largest cost of the kinds of every new label."""
    for label in range(p.labels, labels.count[0]):
        low = np.int64(INFINITE)
        high = np.int64(-INFINITE)
        for k in range(labels.cost.shape[0]):
            if places(labels.mask, label, k):
                low = min(low, labels.cost[k])
                high = max(high, labels.cost[k])
        about = labels.about[label]
        about.low, about.high, about.first = low, high, -1
    p.labels = labels.count[0]


@njit(nogil=True)
def _learn(low: Any, high: Any, labels: _Labels, p: Any) -> Any:
    """Return the label of a mask, given its words.

    It is parted into kinds that are the same symbol to the tracker.
    """
    label = np.int64(label_of(low, high, labels.mask, labels.slots, labels.count))
    by_symbol, touched = labels.by_symbol, labels.touched
    found = 0
    for k in range(labels.symbol.shape[0]):
        if places(labels.mask, label, k):
            g = labels.symbol[k]
            if by_symbol[g, 0] == _ZERO and by_symbol[g, 1] == _ZERO:
                touched[found] = g
                found += 1
            by_symbol[g, k >> 6] |= _ONE << np.uint64(k & 63)
    first = p.parts
    for k in range(found):
        g = touched[k]
        part = labels.parts[first + k]
        part.column = AFTER + g
        part.label = label_of(
            by_symbol[g, 0], by_symbol[g, 1], labels.mask, labels.slots, labels.count
        )
        by_symbol[g] = _ZERO
    p.parts = first + found
    _learn_ranges(labels, p)
    for k in range(first, first + found):
        part = labels.parts[k]
        part.low = labels.about[part.label].low
    labels.about[label].first, labels.about[label].end = first, first + found
    return label


@njit(nogil=True)
def _follow(
    coarse: _Coarse, labels: _Labels, tracker: Automaton, fine: _Fine, room: Room, p: Any,
    stop: Any
) -> int:  # fmt: skip
    """Make the nodes of one coarse node after another, up to one that rounds may not leave.

    Arrays get names before the loops, in which functions that take arrays are rarely called: numba
    counts references to an array when it is taken out of a tuple and when it is passed on. Places
    are unsigned: numba asks of signed ones whether they count from the end.
    """
    start, source, arc_label, loop, backward, cutoff, _ = coarse
    first, state, here, sources, targets, numbers = fine
    mask, slots, count, _, ascending, cheapest, _, about, parts, _, _ = labels
    table, states, final = tracker.table, tracker.count, tracker.final
    full_nodes, full_arcs = p.full_nodes, p.full_arcs
    full_states, full_table = p.full_states, p.full_table
    kinds, last_slot = ascending.shape[0], np.uint64(slots.shape[0] - 1)
    begin, nodes, arcs, skip = p.begin, p.nodes, p.arcs, p.skip
    status = _DONE
    for v in range(p.coarse, loop.shape[0]):
        spare = cutoff - backward[v]
        for a in range(p.arc, start[v + 1]):
            if backward[v] >= INFINITE:
                break
            u, whole = source[a], np.uint64(arc_label[a])
            low, high = about[whole].low, about[whole].high
            for x in range(first[u] + skip, first[u + 1]):
                sofar = here[np.uint64(x)]
                slack = spare - sofar
                if low > slack:
                    continue
                label, left, right = np.int64(whole), mask[whole, 0], mask[whole, 1]
                if high > slack:  # some of its kinds cost too much
                    few = kinds - 1
                    while ascending[few - 1] > slack:
                        few -= 1
                    left &= cheapest[few, 0]
                    right &= cheapest[few, 1]
                    at = hash_mask(left, right) & last_slot
                    label = np.int64(slots[at])
                    while label >= 0 and (
                        mask[np.uint64(label), 0] != left or mask[np.uint64(label), 1] != right
                    ):
                        at = (at + _ONE) & last_slot
                        label = np.int64(slots[at])
                full = nodes > full_nodes or arcs > full_arcs
                full = full or states[0] > full_states or states[1] > full_table
                if not full and (label < 0 or about[np.uint64(label)].first < 0):
                    full = count[0] > p.full_labels or p.parts > p.full_parts
                    if not full:
                        label = np.int64(_learn(left, right, labels, p))
                if full:
                    p.skip, p.arc, status = x - first[u], a, _FULL
                    break
                s, known = np.int64(state[np.uint64(x)]), about[np.uint64(label)]
                columns = table[np.uint64(s + COLUMNS)]
                for k in range(np.uint64(known.first), np.uint64(known.end)):
                    column = parts[k].column
                    if column >= columns or (column == END and s != final):
                        continue
                    t = s if column < 0 else np.int64(table[np.uint64(s + column)])
                    if t == UNKNOWN:
                        t = np.int64(state_after(s, column, tracker))
                    if t < 0:
                        continue
                    y, then = np.int64(table[np.uint64(t + LAST)]), np.int32(sofar + parts[k].low)
                    if y < begin:
                        y = nodes
                        nodes += 1
                        table[np.uint64(t + LAST)] = y
                        state[np.uint64(y)], here[np.uint64(y)] = t, then
                    elif then < here[np.uint64(y)]:
                        here[np.uint64(y)] = then
                    at = np.uint64(arcs)
                    sources[at], targets[at], numbers[at] = x, y, parts[k].label
                    arcs += 1
            if status == _DONE and stop[0] != 0:
                status = _STOPPED
            if status != _DONE:
                break
            skip = 0
        p.coarse, p.nodes, p.arcs = v, nodes, arcs
        if status != _DONE:
            return status
        p.skip, p.arc = 0, start[v + 1]
        if loop[v] >= 0 and nodes > begin:
            return _LOOP
        if not _close(first, states, room, p):
            return _TOO_LARGE
        begin = nodes
    return _DONE


@njit(nogil=True)
def _close(first: Any, states: Any, room: Room, p: Any) -> bool:
    """Go on to the next coarse node, unless the product is too large."""
    first[p.coarse + 1] = p.nodes
    p.begin, p.begin_arc = p.nodes, p.arcs
    p.coarse += 1
    return p.nodes <= room.nodes and p.arcs <= room.arcs and states[0] <= room.states


@njit(nogil=True)
def _add_lighter(tracker: Automaton, fine: _Fine, p: Any, stop: Any) -> int:
    """Add every state that rounds lead to from the nodes of one coarse node."""
    state, here, table, count = fine.state, fine.here, tracker.table, tracker.count
    x = p.begin
    while x < p.nodes:
        if stop[0] != 0:
            return _STOPPED
        if p.nodes > p.full_nodes or count[0] > p.full_states or count[1] > p.full_table:
            return _FULL
        t = np.int64(table[state[x] + BEFORE])
        if t == UNKNOWN:
            t = np.int64(state_after(state[x], BEFORE, tracker))
        if table[t + LAST] < p.begin:
            table[t + LAST], state[p.nodes], here[p.nodes] = p.nodes, t, INFINITE
            p.nodes += 1
        x += 1
    return _DONE


@njit(nogil=True)
def _heaviest_first(tracker: Automaton, fine: _Fine, p: Any) -> None:
    """Put the nodes of one coarse node in order, so that rounds lead from each to later ones."""
    state, here, target, table = fine.state, fine.here, fine.target, tracker.table
    begin, end = p.begin, p.nodes
    weight = np.empty(end - begin, dtype=np.int64)
    for x in range(begin, end):
        weight[x - begin] = -tracker.info[table[state[x] + NUMBER]].weight
    order = np.argsort(weight)
    states, costs = state[begin:end][order], here[begin:end][order]
    state[begin:end], here[begin:end] = states, costs
    number = np.empty(end - begin, dtype=np.int64)
    for k in range(end - begin):
        number[order[k]] = begin + k
        table[states[k] + LAST] = begin + k
    for a in range(p.begin_arc, p.arcs):
        target[a] = number[target[a] - begin]


@njit(nogil=True)
def _follow_loop(
    coarse: _Coarse, tracker: Automaton, fine: _Fine, p: Any, stop: Any
) -> int:  # fmt: skip
    """Follow rounds that the coarse graph does not see: the coarse node stays the same."""
    status = _add_lighter(tracker, fine, p, stop)
    if status != _DONE:
        return status
    if p.arcs + p.nodes - p.begin > fine.source.shape[0]:
        return _FULL
    _heaviest_first(tracker, fine, p)
    _, state, here, source, target, label = fine
    table = tracker.table
    placed, arcs = coarse.loop[p.coarse], p.arcs
    for x in range(p.begin, p.nodes):
        y = table[table[state[x] + BEFORE] + LAST]
        then = np.int64(here[x]) + placed * coarse.scale
        if y != x and then + coarse.backward[p.coarse] <= coarse.cutoff:
            here[y] = min(np.int64(here[y]), then)
            source[arcs], target[arcs], label[arcs] = x, y, placed
            arcs += 1
    p.arcs = arcs
    return _DONE


@njit(nogil=True)
def _walk(
    coarse: _Coarse, labels: _Labels, tracker: Automaton, fine: _Fine, room: Room, progress: Any,
    stop: Any
) -> int:  # fmt: skip
    """Make the nodes of one coarse node after another, from those of its predecessors.

    The nodes of a coarse node are thus next to each other, and one array over the states says
    whether a state is there already.
    """
    p = progress[0]
    _learn_ranges(labels, p)
    status = _follow(coarse, labels, tracker, fine, room, p, stop)
    while status == _LOOP:
        status = _follow_loop(coarse, tracker, fine, p, stop)
        if status == _DONE:
            status = _TOO_LARGE
            if _close(fine.first, tracker.count, room, p):
                status = _follow(coarse, labels, tracker, fine, room, p, stop)
    return status


@njit(nogil=True)
def _loops(loop: Any, fine: _Fine, table: Any) -> Any:
    """Return `Graph.loop` of the product."""
    first, state = fine.first, fine.state
    out = np.full(first[-1], -1, dtype=np.int16)
    for v in range(loop.shape[0]):
        if loop[v] >= 0:
            for x in range(first[v], first[v + 1]):
                if table[state[x] + BEFORE] == state[x]:
                    out[x] = loop[v]
    return out


@dataclass(eq=False)
class _Made:
    """A product in the making.

    Parameters
    ----------
    labels : Labels
    tracker : Tracker
    known : _Labels
    fine : _Fine

    Attributes
    ----------
    progress : ndarray of records, shape (1,)
        Where the walk is, and how much room it has.
    """

    labels: Labels
    tracker: Tracker
    known: _Labels
    fine: _Fine
    progress: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = np.zeros(1, dtype=_PROGRESS)
        self.progress["nodes"] = 1
        self.progress["labels"] = self.progress["parts"] = self.labels.first_mask

    def make_room(self) -> None:
        """Make room to expand more nodes, one array after another."""
        labels, tracker, p = self.labels, self.tracker, self.progress[0]
        labels.make_room()
        tracker.make_room()
        self.known = self.known._replace(
            mask=labels.mask,
            slots=labels.slots,
            about=wider(self.known.about, len(labels.mask)),
            parts=wider(self.known.parts, int(p.parts) + MARGIN),
        )
        nodes = int(p.nodes) + MARGIN
        arcs = int(p.arcs) + MARGIN + int(p.nodes - p.begin)  # a loop adds an arc per node
        first, state, here, *steps = self.fine
        steps = [wider(array, arcs) for array in steps]
        self.fine = _Fine(first, wider(state, nodes), wider(here, nodes), *steps)
        p.full_nodes, p.full_arcs = len(self.fine.state) - MARGIN, len(self.fine.source) - MARGIN
        grows = tracker.width > 0
        p.full_states = len(tracker.info) - (MARGIN if grows else 0)
        p.full_table = len(tracker.table) - (TABLE_MARGIN if grows else 0)
        p.full_labels = len(labels.mask) - MARGIN
        p.full_parts = len(self.known.parts) - MARGIN


def product(
    graph: Graph,
    labels: Labels,
    tracker: Tracker,
    *,
    prices: Prices,
    room: Room,
    stop: NDArray[np.int8],
) -> tuple[Graph | None, int]:
    """Return the graph of the paths that both take, without those that cost more than the cutoff.

    A path of cost at most ``prices.cutoff`` survives. At each of its nodes (u, state) the cheapest
    way there, plus what the coarse graph says about the rest (``prices.backward``), is no more than
    its cost.

    Parameters
    ----------
    graph : Graph
        The coarse graph.
    labels : Labels
        New labels are added in place.
    tracker : Tracker
        New states are added in place.
    prices : Prices
    room : Room
    stop : ndarray of int8, shape (1,)
        Ends the walk when set to 1 by another thread.

    Returns
    -------
    graph : Graph or None
        None if there is no such path.
    made : int
        The number of nodes that were made on the way, up to where no path was left.

    Raises
    ------
    Interrupted, TooLargeError
    """
    start, source, label = reversed_arcs(graph.arc_start, graph.arc_target, graph.arc_label, stop)
    if stop[0] != 0:
        raise Interrupted
    coarse = _Coarse(
        start, source, label, graph.loop, prices.backward, int(prices.cutoff), int(prices.scale)
    )  # fmt: skip
    made = _Made(labels, tracker, _new_known(labels, tracker, prices), _root(graph.nodes, tracker))
    status = _FULL
    while status == _FULL:
        made.make_room()
        status = _walk(
            coarse, made.known, tracker.compiled(), made.fine, room, made.progress, stop
        )  # fmt: skip
    if status == _STOPPED:
        raise Interrupted
    if status == _TOO_LARGE:
        raise TooLargeError
    fine, end = made.fine, graph.nodes
    nodes, arcs = int(made.progress[0].nodes), int(made.progress[0].arcs)
    if fine.first[end - 1] == fine.first[end]:
        return None, nodes
    start, target, label = by_source(
        nodes, fine.source[:arcs], fine.target[:arcs], fine.label[:arcs], stop
    )
    if stop[0] != 0:
        raise Interrupted
    return Graph(start, target, label, _loops(graph.loop, fine, tracker.table)), nodes


def _new_known(labels: Labels, tracker: Tracker, prices: Prices) -> _Labels:
    """Return labels of which only those of fixed steps are known: each is its own only part."""
    fixed, cost = labels.first_mask, prices.cost
    number = np.arange(fixed)
    parts = np.zeros(fixed + 4 * MARGIN, dtype=_PART)
    steps = (number > labels.join, number == labels.join)
    parts["column"][:fixed] = np.select(steps, (END, JOIN), BEFORE)
    parts["label"][:fixed] = number
    parts["low"][:fixed] = labels.fixed[:fixed] * prices.scale
    about = np.zeros(len(labels.mask), dtype=_ABOUT)
    about["low"][:fixed] = about["high"][:fixed] = parts["low"][:fixed]
    about["first"][:fixed], about["end"][:fixed] = number, number + 1
    order = np.argsort(cost)
    bits = np.zeros((len(order) + 1, labels.mask.shape[1]), dtype=np.uint64)
    bits[np.arange(1, len(bits)), order >> 6] = _ONE << (order & 63).astype(np.uint64)
    return _Labels(
        labels.mask, labels.slots, labels.count, cost, cost[order],
        np.bitwise_or.accumulate(bits), tracker.symbol, about, parts,
        np.zeros((tracker.symbols, bits.shape[1]), dtype=np.uint64),
        np.empty(tracker.symbols, dtype=np.int64),
    )  # fmt: skip


def _root(coarse_nodes: int, tracker: Tracker) -> _Fine:
    """Return a product that has the root only."""
    rows = 16 * MARGIN
    tracker.table[LAST] = 0
    state, here = np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
    source, target, label = (np.empty(rows, dtype=np.int32) for _ in range(3))
    first = np.zeros(coarse_nodes + 1, dtype=np.int64)
    return _Fine(first, state, here, source, target, label)
