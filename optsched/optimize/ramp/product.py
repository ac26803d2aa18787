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
    label_of,
    reversed_arcs,
)
from optsched.optimize.ramp.tracker import (
    MARGIN,
    UNKNOWN,
    Automaton,
    Tracker,
    state_after,
    state_before,
    wider,
)
from optsched.problem.kernel import njit

_DONE, _FULL, _STOPPED, _TOO_LARGE = 0, 1, 2, 3
"""What the compiled walk returns. After `_FULL` it is called again."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)

_NODE = record(
    ("state", np.int32),
    ("here", np.int32),  # cost from the root
    ("loop", np.int16),
)
_PART = record(("symbol", np.int32), ("label", np.int32))
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
    """The coarse graph, its arcs in order of target, and what fixed steps cost on it."""

    start: Any
    source: Any
    label: Any
    loop: Any
    backward: Any
    cutoff: Any
    scale: Any
    join: Any
    first_mask: Any


class _Labels(NamedTuple):
    """Arrays of `Labels`, what is known of each label, and its parts by symbol."""

    mask: Any
    fixed: Any
    slots: Any
    count: Any
    cost: Any  # of each kind
    symbol: Any  # of each kind, as the tracker sees it
    about: Any
    parts: Any
    by_symbol: Any  # scratch space
    touched: Any


class _Fine(NamedTuple):
    """The product as far as it has been made."""

    first: Any  # node of each coarse node
    last: Any  # node of each state
    node: Any
    source: Any
    target: Any
    label: Any


@njit(nogil=True)
def _learn_ranges(labels: _Labels, p: Any) -> None:
    """Note the least and the largest cost of the kinds of every new label."""
    for label in range(p.labels, labels.count[0]):
        low = np.int64(INFINITE)
        high = np.int64(-INFINITE)
        mask = labels.mask[label]
        k = 0
        while mask != _ZERO:
            if mask & _ONE:
                low = min(low, labels.cost[k])
                high = max(high, labels.cost[k])
            mask >>= _ONE
            k += 1
        about = labels.about[label]
        about.low, about.high, about.first = low, high, -1
    p.labels = labels.count[0]


@njit(nogil=True)
def _within(label: Any, slack: Any, labels: _Labels) -> Any:
    """Return the label of those of a label's kinds that cost no more than ``slack``."""
    mask = labels.mask[label]
    kept = _ZERO
    for k in range(labels.cost.shape[0]):
        bit = _ONE << np.uint64(k)
        if mask & bit and labels.cost[k] <= slack:
            kept |= bit
    return label_of(kept, labels.mask, labels.slots, labels.count)


@njit(nogil=True)
def _split(label: Any, labels: _Labels, p: Any) -> None:
    """Part a label into labels of kinds that are the same symbol to the tracker."""
    mask, by_symbol, touched = labels.mask[label], labels.by_symbol, labels.touched
    found = 0
    for k in range(labels.symbol.shape[0]):
        bit = _ONE << np.uint64(k)
        if mask & bit:
            g = labels.symbol[k]
            if by_symbol[g] == _ZERO:
                touched[found] = g
                found += 1
            by_symbol[g] |= bit
    first = p.parts
    for k in range(found):
        g = touched[k]
        part = labels.parts[first + k]
        part.symbol = g
        part.label = label_of(by_symbol[g], labels.mask, labels.slots, labels.count)
        by_symbol[g] = _ZERO
    p.parts = first + found
    _learn_ranges(labels, p)
    labels.about[label].first, labels.about[label].end = first, first + found


@njit(nogil=True, inline="always")
def _node(t: int, begin: int, nodes: int, last: Any, node: Any) -> int:
    """Return the node with state ``t`` from ``begin`` on; it is ``nodes`` if it is new."""
    y = last[t]
    if y < begin:
        y = nodes
        last[t] = y
        node[y].state, node[y].here, node[y].loop = t, INFINITE, -1
    return y


@njit(nogil=True)
def _take_step(
    coarse: _Coarse, labels: _Labels, tracker: Automaton, fine: _Fine, p: Any
) -> bool:  # fmt: skip
    """Follow an arc with a fixed step; return whether there was room for all of it."""
    first, last, node, info = fine.first, fine.last, fine.node, tracker.info
    count = tracker.count
    u, label = coarse.source[p.arc], coarse.label[p.arc]
    low = labels.fixed[label] * coarse.scale
    rest = coarse.cutoff - coarse.backward[p.coarse]
    begin, nodes, arcs = p.begin, p.nodes, p.arcs
    full = False
    for x in range(first[u] + p.skip, first[u + 1]):
        if low > rest - node[x].here:
            continue
        full = nodes > p.full_nodes or arcs > p.full_arcs or count[0] > p.full_states
        if full:
            p.skip = x - first[u]
            break
        t = node[x].state
        if label < coarse.join:
            s = t
            t = info[s].before
            if t == UNKNOWN:
                t = state_before(s, tracker)
        elif label > coarse.join and info[t].final == 0:
            continue
        y = _node(t, begin, nodes, last, node)
        nodes = max(nodes, y + 1)
        node[y].here = min(np.int64(node[y].here), node[x].here + low)
        fine.source[arcs], fine.target[arcs], fine.label[arcs] = x, y, label
        arcs += 1
    p.nodes, p.arcs = nodes, arcs
    return not full


@njit(nogil=True)
def _place(
    coarse: _Coarse, labels: _Labels, tracker: Automaton, fine: _Fine, p: Any
) -> bool:  # fmt: skip
    """Follow an arc that places a request; return whether there was room for all of it."""
    first, last, node, info, add = fine.first, fine.last, fine.node, tracker.info, tracker.add
    about, parts, peak = labels.about, labels.parts, tracker.peak
    count, label_count = tracker.count, labels.count
    u, whole = coarse.source[p.arc], np.int64(coarse.label[p.arc])
    low, high = about[whole].low, about[whole].high
    rest = coarse.cutoff - coarse.backward[p.coarse]
    begin, nodes, arcs = p.begin, p.nodes, p.arcs
    full = False
    for x in range(first[u] + p.skip, first[u + 1]):
        slack = rest - node[x].here
        if low > slack:
            continue
        full = nodes > p.full_nodes or arcs > p.full_arcs or count[0] > p.full_states
        label = whole
        if not full and (high > slack or about[label].first < 0):
            full = label_count[0] > p.full_labels or p.parts > p.full_parts
            if not full:
                if high > slack:
                    label = _within(label, slack, labels)
                    _learn_ranges(labels, p)
                if about[label].first < 0:
                    _split(label, labels, p)
        if full:
            p.skip = x - first[u]
            break
        s = node[x].state
        spare = tracker.capacity - info[s].weight
        for k in range(about[label].first, about[label].end):
            g = parts[k].symbol
            if peak[g] > spare:
                continue
            t = add[g, s]
            if t == UNKNOWN:
                t = state_after(s, g, tracker)
            if t < 0:
                continue
            y = _node(t, begin, nodes, last, node)
            nodes = max(nodes, y + 1)
            part = parts[k].label
            node[y].here = min(np.int64(node[y].here), node[x].here + about[part].low)
            fine.source[arcs], fine.target[arcs], fine.label[arcs] = x, y, part
            arcs += 1
    p.nodes, p.arcs = nodes, arcs
    return not full


@njit(nogil=True)
def _add_lighter(tracker: Automaton, fine: _Fine, p: Any, stop: Any) -> int:
    """Add every state that rounds lead to from the nodes of one coarse node."""
    x = p.begin
    while x < p.nodes:
        if stop[0] != 0:
            return _STOPPED
        if p.nodes > p.full_nodes or tracker.count[0] > p.full_states:
            return _FULL
        s = fine.node[x].state
        t = tracker.info[s].before
        if t == UNKNOWN:
            t = state_before(s, tracker)
        y = _node(t, p.begin, p.nodes, fine.last, fine.node)
        p.nodes = max(p.nodes, y + 1)
        x += 1
    return _DONE


@njit(nogil=True)
def _heaviest_first(tracker: Automaton, fine: _Fine, p: Any) -> None:
    """Put the nodes of one coarse node in order, so that rounds lead from each to later ones."""
    begin, end = p.begin, p.nodes
    weight = np.empty(end - begin, dtype=np.int64)
    for x in range(begin, end):
        weight[x - begin] = -tracker.info[fine.node[x].state].weight
    order = np.argsort(weight)
    before = fine.node[begin:end].copy()
    number = np.empty(end - begin, dtype=np.int64)
    for k in range(end - begin):
        number[order[k]] = begin + k
        old = before[order[k]]
        new = fine.node[begin + k]
        new.state, new.here, new.loop = old.state, old.here, old.loop
        fine.last[old.state] = begin + k
    for a in range(p.begin_arc, p.arcs):
        fine.target[a] = number[fine.target[a] - begin]


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
    node, last, info = fine.node, fine.last, tracker.info
    placed, arcs = coarse.loop[p.coarse], p.arcs
    for x in range(p.begin, p.nodes):
        t = info[node[x].state].before
        then = np.int64(node[x].here) + placed * coarse.scale
        if t == node[x].state:
            node[x].loop = placed
        elif then + coarse.backward[p.coarse] <= coarse.cutoff:
            y = last[t]
            node[y].here = min(np.int64(node[y].here), then)
            fine.source[arcs], fine.target[arcs], fine.label[arcs] = x, y, placed
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
    while p.coarse < coarse.loop.shape[0]:
        v = p.coarse
        if coarse.backward[v] >= INFINITE:
            p.arc = coarse.start[v + 1]
        while p.arc < coarse.start[v + 1]:
            if coarse.label[p.arc] < coarse.first_mask:
                followed = _take_step(coarse, labels, tracker, fine, p)
            else:
                followed = _place(coarse, labels, tracker, fine, p)
            if not followed:
                return _FULL
            p.skip = 0
            p.arc += 1
            if stop[0] != 0:
                return _STOPPED
        if coarse.loop[v] >= 0 and p.nodes > p.begin:
            status = _follow_loop(coarse, tracker, fine, p, stop)
            if status != _DONE:
                return status
        fine.first[v + 1] = p.nodes
        if p.nodes > room.nodes or p.arcs > room.arcs or tracker.count[0] > room.states:
            return _TOO_LARGE
        p.begin, p.begin_arc = p.nodes, p.arcs
        p.coarse = v + 1
    return _DONE


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
        self.progress["labels"] = self.labels.first_mask

    def make_room(self) -> None:
        """Make room to expand more nodes, one array after another."""
        labels, tracker, p = self.labels, self.tracker, self.progress[0]
        labels.make_room()
        tracker.make_room()
        self.known = self.known._replace(
            mask=labels.mask,
            fixed=labels.fixed,
            slots=labels.slots,
            about=wider(self.known.about, len(labels.mask)),
            parts=wider(self.known.parts, int(p.parts) + MARGIN),
        )
        nodes = int(p.nodes) + MARGIN
        arcs = int(p.arcs) + MARGIN + int(p.nodes - p.begin)  # a loop adds an arc per node
        states = len(self.fine.last)
        self.fine = self.fine._replace(last=wider(self.fine.last, len(tracker.info)))
        self.fine.last[states:] = -1
        self.fine = self.fine._replace(node=wider(self.fine.node, nodes))
        self.fine = self.fine._replace(source=wider(self.fine.source, arcs))
        self.fine = self.fine._replace(target=wider(self.fine.target, arcs))
        self.fine = self.fine._replace(label=wider(self.fine.label, arcs))
        p.full_nodes, p.full_arcs = len(self.fine.node) - MARGIN, len(self.fine.source) - MARGIN
        p.full_states = len(tracker.info) - (MARGIN if tracker.width > 0 else 0)
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
) -> Graph | None:
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
    Graph or None
        None if there is no such path.

    Raises
    ------
    Interrupted, TooLargeError
    """
    start, source, label = reversed_arcs(graph.arc_start, graph.arc_target, graph.arc_label, stop)
    if stop[0] != 0:
        raise Interrupted
    coarse = _Coarse(
        start, source, label, graph.loop, prices.backward, int(prices.cutoff), int(prices.scale),
        labels.join, labels.first_mask,
    )  # fmt: skip
    made = _Made(
        labels, tracker, _new_known(labels, tracker, prices.cost), _root(graph.nodes, tracker)
    )
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
    if fine.first[end - 1] == fine.first[end]:
        return None
    nodes, arcs = int(made.progress[0].nodes), int(made.progress[0].arcs)
    start, target, label = by_source(
        nodes, fine.source[:arcs], fine.target[:arcs], fine.label[:arcs], stop
    )
    if stop[0] != 0:
        raise Interrupted
    return Graph(start, target, label, fine.node["loop"][:nodes].copy())


def _new_known(labels: Labels, tracker: Tracker, cost: NDArray[np.int64]) -> _Labels:
    """Return labels of which neither the range of costs nor the parts are known yet."""
    symbols = tracker.symbols
    return _Labels(
        labels.mask, labels.fixed, labels.slots, labels.count, cost, tracker.symbol,
        np.zeros(len(labels.mask), dtype=_ABOUT), np.zeros(4 * MARGIN, dtype=_PART),
        np.zeros(symbols, dtype=np.uint64), np.empty(symbols, dtype=np.int64),
    )  # fmt: skip


def _root(coarse_nodes: int, tracker: Tracker) -> _Fine:
    """Return a product that has the root only."""
    rows = 16 * MARGIN
    last = np.full(len(tracker.info), -1, dtype=np.int32)
    last[0] = 0
    node = np.zeros(rows, dtype=_NODE)
    node["loop"][0] = -1
    source, target, label = (np.empty(rows, dtype=np.int32) for _ in range(3))
    return _Fine(np.zeros(coarse_nodes + 1, dtype=np.int64), last, node, source, target, label)
