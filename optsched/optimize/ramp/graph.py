"""Layered graphs of the ramp relaxation, compiled: product with a tracker, and sweeps.

A graph is a deterministic automaton without cycles: arcs of a node carry disjoint labels, nodes
are numbered in topological order, 0 is the root and the last one the end. A label is a fixed
step (a round that costs as many as are placed, the join to the part with a clock, the end) or
the set of kinds of requests, as a bit mask, that the arc may place. See
`optsched.optimize.ramp.relaxation` for what paths mean. Import lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.optimize.ramp.tracker import (
    MARGIN,
    Tracker,
    room_for_states,
    state_after,
    state_before,
    wider,
)

INFINITE = 2**30
"""Cost of a node without a path; costs stay below (`optsched.optimize.ramp.relaxation`)."""
ROUND, JOIN, END = -1, -2, -3
"""Symbols of fixed steps in a path; others are kinds."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


@dataclass(eq=False)
class Labels:
    """Labels by number: rounds at m = 0..n, the join, ends at t = 0..last, then masks.

    Parameters
    ----------
    mask : ndarray of uint64
        Kinds that the label may place; 0 for fixed steps.
    fixed : ndarray of int64
        Cost of a fixed step, in rounds.
    slots : ndarray of int32
        Hash table of the masks.
    count : ndarray of int64, shape (1,)
    join : int
        The label of the join; rounds are below it, ends above.
    first_mask : int
    """

    mask: NDArray[np.uint64]
    fixed: NDArray[np.int64]
    slots: NDArray[np.int32]
    count: NDArray[np.int64]
    join: int
    first_mask: int


def new_labels(n: int, last: int) -> Labels:
    """Return the fixed labels for n requests and a clock from 0 to ``last``."""
    fixed = np.concatenate([np.arange(n + 1), [0], n * np.arange(last + 1)])
    room = len(fixed) + 4 * MARGIN
    mask = np.zeros(room, dtype=np.uint64)
    costs = np.zeros(room, dtype=np.int64)
    costs[: len(fixed)] = fixed
    slots = np.full(4 * MARGIN, -1, dtype=np.int32)
    return Labels(mask, costs, slots, np.array([len(fixed)]), n + 1, len(fixed))


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, their arcs and the loops of rounds that change nothing.

    Parameters
    ----------
    arc_start : ndarray of int64, shape (nodes + 1,)
    arc_target, arc_label : ndarray of int32, shape (arcs,)
    loop : ndarray of int16, shape (nodes,)
        Requests placed, where a round leads back to the node itself; else -1. A loop costs
        something and changes nothing, so sweeps ignore it; a product must not.
    """

    arc_start: NDArray[np.int64]
    arc_target: NDArray[np.int32]
    arc_label: NDArray[np.int32]
    loop: NDArray[np.int16]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.loop)

    @property
    def arcs(self) -> int:
        """Number of arcs."""
        return len(self.arc_target)


@njit(cache=True, nogil=True)
def _hash_key(key: Any) -> np.uint64:
    h = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    return h >> np.uint64(20)


@njit(cache=True, nogil=True)
def _label(mask: Any, label_mask: Any, slots: Any, count: Any) -> int:
    """Return the number of the label with that mask, new if it has none."""
    last = np.uint64(slots.shape[0] - 1)
    at = _hash_key(np.int64(mask)) & last
    while slots[at] >= 0:
        if label_mask[slots[at]] == mask:
            return slots[at]
        at = (at + _ONE) & last
    k = count[0]
    label_mask[k] = mask
    slots[at] = k
    count[0] = k + 1
    return k


@njit(cache=True, nogil=True)
def _range(mask: Any, cost: Any) -> Any:
    """Return the least and largest cost of the kinds in a mask."""
    low = np.int64(INFINITE)
    high = np.int64(-INFINITE)
    k = 0
    while mask != _ZERO:
        if mask & _ONE:
            low = min(low, cost[k])
            high = max(high, cost[k])
        mask >>= _ONE
        k += 1
    return low, high


@njit(cache=True, nogil=True, inline="always")
def _node(t: int, begin: int, done: int, at: Any, state: Any, here: Any, out_loop: Any) -> int:
    """Return the node with state ``t`` among those from ``begin`` on, ``done`` if it is new."""
    y = at[t]
    if y < begin:
        y = done
        at[t] = y
        state[y], here[y], out_loop[y] = t, INFINITE, -1
    return y


@njit(cache=True, nogil=True)
def _room_for_labels(label_mask: Any, label_fixed: Any, slots: Any, count: Any, first: int) -> Any:
    """Return the arrays of labels with room for what one node can add."""
    need = count[0] + 2 * MARGIN
    label_mask = wider(label_mask, need, 0)
    label_fixed = wider(label_fixed, need, 0)
    if 2 * need > slots.shape[0]:
        slots = np.full(slots.shape[0] * 4, -1, dtype=np.int32)
        last = np.uint64(slots.shape[0] - 1)
        for k in range(first, count[0]):
            at = _hash_key(np.int64(label_mask[k])) & last
            while slots[at] >= 0:
                at = (at + _ONE) & last
            slots[at] = k
    return label_mask, label_fixed, slots


@njit(cache=True, nogil=True)
def _kept(mask: Any, cost: Any, slack: int) -> Any:
    """Return the kinds of a mask that cost no more than ``slack``."""
    kept = _ZERO
    for k in range(cost.shape[0]):
        bit = _ONE << np.uint64(k)
        if mask & bit and cost[k] <= slack:
            kept |= bit
    return kept


@njit(cache=True, nogil=True)
def _split(
    mask: Any, symbol_of: Any, by_symbol: Any, touched: Any, parts: Any, at: int, label_mask: Any,
    slots: Any, count: Any
) -> int:  # fmt: skip
    """Write the parts of a mask, by symbol, from row ``at`` on; return the row after the last."""
    found = 0
    for k in range(symbol_of.shape[0]):
        bit = _ONE << np.uint64(k)
        if mask & bit:
            g = symbol_of[k]
            if by_symbol[g] == _ZERO:
                touched[found] = g
                found += 1
            by_symbol[g] |= bit
    for k in range(found):
        g = touched[k]
        parts[at, 0] = g
        parts[at, 1] = _label(by_symbol[g], label_mask, slots, count)
        by_symbol[g] = _ZERO
        at += 1
    return at


@njit(cache=True, nogil=True)
def _product(
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any, cutoff: int,
    cost: Any, scale: int, join: int, first_mask: int, label_mask: Any, label_fixed: Any,
    label_slots: Any, label_count: Any, symbol_of: Any, symbols: int,
    width: int, capacity: int, peak: Any, floor_class: Any, floor: Any, heaviest: Any,
    items: Any, info: Any, add: Any, slots: Any, states: int, max_nodes: int, max_arcs: int,
    max_states: int, stop: Any
) -> Any:  # fmt: skip
    """Make the nodes of one coarse node after another, from those of its predecessors.

    So the nodes of a coarse node are next to each other, and whether a state is there already is
    asked of one array over the states.
    """
    coarse_nodes = loop.shape[0]
    end = coarse_nodes - 1
    span = capacity + 1
    count = np.array([states])
    row = np.zeros(width + 2, dtype=np.int32)
    # Of each label: least and largest cost, first and last row of its parts.
    about = np.full((label_mask.shape[0], 4), -1, dtype=np.int64)
    known = first_mask
    parts = np.zeros((4 * MARGIN, 2), dtype=np.int32)
    n_parts = 0
    by_symbol = np.zeros(symbols, dtype=np.uint64)
    touched = np.empty(symbols, dtype=np.int64)

    in_start, in_source, in_label = _reversed(arc_start, arc_target, arc_label, stop)
    first = np.zeros(coarse_nodes + 1, dtype=np.int64)
    at = np.full(info.shape[0], -1, dtype=np.int32)  # of each state, its last node
    state = np.empty(4 * MARGIN, dtype=np.int32)
    here = np.empty(4 * MARGIN, dtype=np.int32)  # cost from the root
    out_loop = np.empty(4 * MARGIN, dtype=np.int16)
    source = np.empty(4 * MARGIN, dtype=np.int32)
    target = np.empty(4 * MARGIN, dtype=np.int32)
    out_label = np.empty(4 * MARGIN, dtype=np.int32)
    done = 0
    arcs = 0
    status = 1 if stop[0] != 0 else 0  # `_reversed` may not have ended

    for v in range(coarse_nodes if status == 0 else 0):
        begin = done
        first[v] = begin
        if v == 0:
            state[0], here[0], out_loop[0] = 0, 0, -1
            at[0] = 0
            done = 1
        first_arc = arcs
        for a in range(in_start[v], in_start[v + 1]):
            if backward[v] >= INFINITE:
                break
            u = in_source[a]
            whole = np.int64(in_label[a])
            low = high = np.int64(0)
            if whole < first_mask:
                low = label_fixed[whole] * scale
            else:
                while known < label_count[0]:
                    about[known, 0], about[known, 1] = _range(label_mask[known], cost)
                    known += 1
                low, high = about[whole, 0], about[whole, 1]
            rest = cutoff - backward[v]
            for x in range(first[u], first[u + 1]):
                slack = rest - here[x]
                if low > slack:
                    continue
                if width > 0 and count[0] + MARGIN > info.shape[0]:
                    items, info, add, slots = room_for_states(items, info, add, slots, count)
                    at = wider(at, info.shape[0], -1)
                if done + MARGIN > state.shape[0]:
                    state = wider(state, done + MARGIN, 0)
                    here = wider(here, done + MARGIN, 0)
                    out_loop = wider(out_loop, done + MARGIN, 0)
                if arcs + MARGIN > source.shape[0]:
                    source = wider(source, arcs + MARGIN, 0)
                    target = wider(target, arcs + MARGIN, 0)
                    out_label = wider(out_label, arcs + MARGIN, 0)
                s = state[x]
                label = whole
                if label < first_mask:
                    t = s
                    if label < join:
                        t = info[s, 2]
                        if t == -2:
                            t = state_before(s, span, floor, row, items, info, slots, count)
                    elif label > join and info[s, 3] == 0:
                        continue
                    y = _node(t, begin, done, at, state, here, out_loop)
                    done = max(done, y + 1)
                    here[y] = min(np.int64(here[y]), here[x] + low)
                    source[arcs], target[arcs], out_label[arcs] = x, y, label
                    arcs += 1
                    continue
                if high > slack or about[label, 2] < 0:
                    if label_count[0] + MARGIN > label_mask.shape[0]:
                        label_mask, label_fixed, label_slots = _room_for_labels(
                            label_mask, label_fixed, label_slots, label_count, first_mask
                        )
                        about = wider(about, label_mask.shape[0], -1)
                    if high > slack:
                        mask = _kept(label_mask[label], cost, slack)
                        label = np.int64(_label(mask, label_mask, label_slots, label_count))
                    if about[label, 2] < 0:
                        if n_parts + MARGIN > parts.shape[0]:
                            parts = wider(parts, n_parts + 2 * MARGIN, 0)
                        about[label, 2] = n_parts
                        n_parts = _split(
                            label_mask[label], symbol_of, by_symbol, touched, parts,
                            n_parts, label_mask, label_slots, label_count
                        )  # fmt: skip
                        about[label, 3] = n_parts
                        while known < label_count[0]:
                            about[known, 0], about[known, 1] = _range(label_mask[known], cost)
                            known += 1
                spare = capacity - info[s, 1]
                for k in range(about[label, 2], about[label, 3]):
                    if peak[parts[k, 0]] > spare:
                        continue
                    t = add[parts[k, 0], s]
                    if t == -2:
                        t = state_after(
                            s, parts[k, 0], span, capacity, peak, floor_class, floor, heaviest, row,
                            items, info, add, slots, count
                        )  # fmt: skip
                    if t < 0:
                        continue
                    y = _node(t, begin, done, at, state, here, out_loop)
                    done = max(done, y + 1)
                    part = parts[k, 1]
                    here[y] = min(np.int64(here[y]), here[x] + about[part, 0])
                    source[arcs], target[arcs], out_label[arcs] = x, y, part
                    arcs += 1
            if stop[0] != 0:
                status = 1
                break
        if status != 0:
            break
        if loop[v] >= 0 and done > begin:
            # Rounds that the coarse graph does not see: all lighter states too, the heaviest first.
            x = begin
            while x < done and stop[0] == 0:
                if width > 0 and count[0] + MARGIN > info.shape[0]:
                    items, info, add, slots = room_for_states(items, info, add, slots, count)
                    at = wider(at, info.shape[0], -1)
                state = wider(state, done + 1, 0)
                here = wider(here, done + 1, 0)
                out_loop = wider(out_loop, done + 1, 0)
                t = state_before(state[x], span, floor, row, items, info, slots, count)
                y = _node(t, begin, done, at, state, here, out_loop)
                done = max(done, y + 1)
                x += 1
            if x < done:
                status = 1
                break
            weight = np.empty(done - begin, dtype=np.int64)
            for x in range(begin, done):
                weight[x - begin] = -info[state[x], 1]
            order = np.argsort(weight)
            state[begin:done] = state[begin:done][order]
            here[begin:done] = here[begin:done][order]
            number = np.empty(done - begin, dtype=np.int64)
            for k in range(done - begin):
                number[order[k]] = begin + k
                at[state[begin + k]] = begin + k
            for a in range(first_arc, arcs):
                target[a] = number[target[a] - begin]
            for x in range(begin, done):
                t = state_before(state[x], span, floor, row, items, info, slots, count)
                then = np.int64(here[x]) + loop[v] * scale
                if t == state[x]:
                    out_loop[x] = loop[v]
                elif then + backward[v] <= cutoff:
                    source = wider(source, arcs + 1, 0)
                    target = wider(target, arcs + 1, 0)
                    out_label = wider(out_label, arcs + 1, 0)
                    here[at[t]] = min(np.int64(here[at[t]]), then)
                    source[arcs], target[arcs], out_label[arcs] = x, at[t], loop[v]
                    arcs += 1
        first[v + 1] = done
        if done > max_nodes or arcs > max_arcs or count[0] > max_states:
            status = 2
            break
    ended = status == 0 and first[end] < first[end + 1]
    if not ended:
        done = arcs = 0
    start, target, out_label = _by_source(
        done, source[:arcs], target[:arcs], out_label[:arcs], stop
    )  # fmt: skip
    if stop[0] != 0:
        status = 1
    return (
        status, ended, start, target, out_label, out_loop[:done].copy(), label_mask, label_fixed,
        label_slots, count[0], items, info, add, slots
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _by_source(nodes: int, source: Any, target: Any, label: Any, stop: Any) -> Any:
    """Return where the arcs of each node start, and targets and labels in order of source.

    Not all of them, where the stop flag has been set.
    """
    start = np.zeros(nodes + 1, dtype=np.int64)
    for x in source:
        start[x + 1] += 1
    for x in range(nodes):
        start[x + 1] += start[x]
    targets = np.empty(source.shape[0], dtype=np.int32)
    labels = np.empty(source.shape[0], dtype=np.int32)
    for a in range(source.shape[0]):
        if a % 65536 == 0 and stop[0] != 0:
            break
        at = start[source[a]]
        targets[at] = target[a]
        labels[at] = label[a]
        start[source[a]] = at + 1
    start[1:] = start[:-1].copy()
    start[0] = 0
    return start, targets, labels


@njit(cache=True, nogil=True)
def _reversed(arc_start: Any, arc_target: Any, arc_label: Any, stop: Any) -> Any:
    """Return where the arcs into each node start, and sources and labels in that order."""
    source = np.empty(arc_target.shape[0], dtype=np.int32)
    for u in range(arc_start.shape[0] - 1):
        source[arc_start[u] : arc_start[u + 1]] = u
    return _by_source(arc_start.shape[0] - 1, arc_target, source, arc_label, stop)


class Interrupted(Exception):
    """The stop flag was set while a kernel ran."""


class TooLargeError(Exception):
    """A graph would exceed what memory allows."""


def product(
    graph: Graph,
    labels: Labels,
    tracker: Tracker,
    *,
    backward: NDArray[np.int32],
    cutoff: int,
    cost: NDArray[np.int64],
    scale: int,
    stop: NDArray[np.int8],
    max_nodes: int,
    max_arcs: int,
    max_states: int,
) -> Graph | None:
    """Return the graph of the paths that both take, less those that cost more than ``cutoff``.

    A path of cost at most ``cutoff`` survives: at each of its nodes (u, state) the cheapest way
    there plus what the coarse graph says about the rest (``backward``) is no more than its cost.

    Parameters
    ----------
    graph, labels, tracker
        Labels and the tracker's states are added to in place.
    backward : ndarray of int32, shape (graph.nodes,)
        Least cost from each node to the end.
    cutoff : int
    cost : ndarray of int64, shape (kinds,)
        Cost of placing a request of each kind (minus its multiplier).
    scale : int
        Cost of one round of one request.

    Returns
    -------
    Graph or None
        None: no such path.

    Raises
    ------
    Interrupted, TooLargeError
    """
    out = _product(
        graph.arc_start, graph.arc_target, graph.arc_label, graph.loop, backward, cutoff, cost,
        scale, labels.join, labels.first_mask, labels.mask, labels.fixed, labels.slots,
        labels.count, tracker.symbol, tracker.symbols,
        tracker.width, tracker.capacity, tracker.peak, tracker.floor_class, tracker.floor,
        tracker.heaviest, tracker.items, tracker.info, tracker.add, tracker.slots,
        tracker.states, max_nodes, max_arcs, max_states, stop,
    )  # fmt: skip
    status, ended, start, target, label, loop = out[:6]
    labels.mask, labels.fixed, labels.slots = out[6:9]
    tracker.states, tracker.items, tracker.info, tracker.add, tracker.slots = out[9:]
    if status == 1:
        raise Interrupted
    if status == 2:
        raise TooLargeError
    return Graph(start, target, label, loop) if ended else None


@njit(cache=True, nogil=True)
def label_costs(mask: Any, fixed: Any, count: int, first_mask: int, cost: Any, scale: int) -> Any:
    """Return the cost of each label, and the kind of least cost where it places one, else -1."""
    value = np.empty(count, dtype=np.int32)
    kind = np.full(count, -1, dtype=np.int32)
    for k in range(first_mask):
        value[k] = fixed[k] * scale
    for k in range(first_mask, count):
        best = np.int64(INFINITE)
        bits = mask[k]
        j = 0
        while bits != _ZERO:
            if bits & _ONE and cost[j] < best:
                best = cost[j]
                kind[k] = j
            bits >>= _ONE
            j += 1
        value[k] = best
    return value, kind


@njit(cache=True, nogil=True)
def sweep_backward(arc_start: Any, arc_target: Any, arc_label: Any, value: Any) -> Any:
    """Return the least cost from each node to the end."""
    nodes = arc_start.shape[0] - 1
    out = np.empty(nodes, dtype=np.int32)
    out[nodes - 1] = 0
    for u in range(nodes - 2, -1, -1):
        best = INFINITE
        for a in range(arc_start[u], arc_start[u + 1]):
            c = out[arc_target[a]] + value[arc_label[a]]
            if c < best:
                best = c
        # A node without a way to the end stays so, whatever negative costs lead there.
        out[u] = best if best < INFINITE // 2 else INFINITE
    return out


@njit(cache=True, nogil=True)
def _sweep_forward(arc_start: Any, arc_target: Any, arc_label: Any, value: Any) -> Any:
    """Return the least cost from the root to each node."""
    nodes = arc_start.shape[0] - 1
    out = np.full(nodes, INFINITE, dtype=np.int32)
    out[0] = 0
    for u in range(nodes - 1):
        here = out[u]
        if here >= INFINITE // 2:
            continue
        for a in range(arc_start[u], arc_start[u + 1]):
            c = here + value[arc_label[a]]
            if c < out[arc_target[a]]:
                out[arc_target[a]] = c
    return out


@njit(cache=True, nogil=True)
def least_totals(
    arc_start: Any, arc_target: Any, arc_label: Any, value: Any, backward: Any, shift: int,
    scale: int, offset: int, low: int, high: int
) -> Any:  # fmt: skip
    """Return on how many nodes the best path has the total latency low, low + 1, ..., high - 1.

    Rounded up, and what is less counts as low. ``shift``, ``scale`` and ``offset`` turn a path's
    cost c into (c + shift) / scale - offset.
    """
    forward = _sweep_forward(arc_start, arc_target, arc_label, value)
    count = np.zeros(max(high - low, 0), dtype=np.int64)
    for u in range(forward.shape[0]):
        if forward[u] < INFINITE and backward[u] < INFINITE:
            cost = np.int64(forward[u]) + backward[u] + shift
            total = max(-(-cost // scale) - offset, low)
            if total < high:
                count[total - low] += 1
    return count


@njit(cache=True, nogil=True)
def _pruned(
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, forward: Any, backward: Any,
    value: Any, cutoff: int
) -> Any:  # fmt: skip
    """Return the graph without nodes and arcs through which every path exceeds the cutoff."""
    nodes = loop.shape[0]
    number = np.empty(nodes, dtype=np.int32)
    kept = 0
    arcs = 0
    for u in range(nodes):
        number[u] = -1
        if forward[u] < INFINITE and np.int64(forward[u]) + backward[u] <= cutoff:
            number[u] = kept
            kept += 1
            slack = cutoff - forward[u]
            for a in range(arc_start[u], arc_start[u + 1]):
                v = arc_target[a]
                if backward[v] < INFINITE and value[arc_label[a]] + backward[v] <= slack:
                    arcs += 1
    start = np.empty(kept + 1, dtype=np.int64)
    target = np.empty(arcs, dtype=np.int32)
    label = np.empty(arcs, dtype=np.int32)
    out_loop = np.empty(kept, dtype=np.int16)
    arcs = 0
    for u in range(nodes):
        if number[u] < 0:
            continue
        start[number[u]] = arcs
        out_loop[number[u]] = loop[u]
        slack = cutoff - forward[u]
        for a in range(arc_start[u], arc_start[u + 1]):
            v = arc_target[a]
            if backward[v] < INFINITE and value[arc_label[a]] + backward[v] <= slack:
                target[arcs] = number[v]
                label[arcs] = arc_label[a]
                arcs += 1
    start[kept] = arcs
    return start, target, label, out_loop, number


def pruned(
    graph: Graph, value: NDArray[np.int32], backward: NDArray[np.int32], cutoff: int
) -> tuple[Graph, NDArray[np.int32]]:
    """Return the graph without what only paths above ``cutoff`` use, and ``backward`` on it.

    There must be a path of cost at most ``cutoff``. Labels keep all of their kinds.
    """
    forward = _sweep_forward(graph.arc_start, graph.arc_target, graph.arc_label, value)
    *parts, number = _pruned(
        graph.arc_start, graph.arc_target, graph.arc_label, graph.loop, forward, backward, value,
        cutoff,
    )  # fmt: skip
    return Graph(*parts), backward[number >= 0]


@njit(cache=True, nogil=True)
def best_path(
    arc_start: Any, arc_target: Any, arc_label: Any, value: Any, backward: Any, kind: Any,
    join: int, first_mask: int
) -> Any:  # fmt: skip
    """Return the symbols of a cheapest path, and the fixed labels' numbers (-1 for kinds)."""
    end = arc_start.shape[0] - 2
    symbols = np.empty(256, dtype=np.int32)
    label_of = np.empty(256, dtype=np.int32)
    length = 0
    u = 0
    while u != end:
        symbols = wider(symbols, length + 1, 0)
        label_of = wider(label_of, length + 1, 0)
        for a in range(arc_start[u], arc_start[u + 1]):
            label = arc_label[a]
            if backward[arc_target[a]] < INFINITE and (
                backward[arc_target[a]] + value[label] == backward[u]
            ):
                break
        if label >= first_mask:
            symbols[length] = kind[label]
            label_of[length] = -1
        else:
            symbols[length] = ROUND if label < join else (JOIN if label == join else END)
            label_of[length] = label
        length += 1
        u = arc_target[a]
    return symbols[:length].copy(), label_of[:length].copy()


@njit(cache=True, nogil=True)
def accepts(
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, mask: Any, join: int,
    first_mask: int, symbols: Any
) -> bool:  # fmt: skip
    """Whether the graph has the path with these symbols."""
    u = 0
    for k in range(symbols.shape[0]):
        found = -1
        for a in range(arc_start[u], arc_start[u + 1]):
            label = arc_label[a]
            if symbols[k] >= 0:
                hit = label >= first_mask and (mask[label] >> np.uint64(symbols[k])) & _ONE != _ZERO
            elif symbols[k] == ROUND:
                hit = label < join
            elif symbols[k] == JOIN:
                hit = label == join
            else:
                hit = join < label < first_mask
            if hit:
                found = arc_target[a]
                break
        if found < 0:
            if symbols[k] == ROUND and loop[u] >= 0:
                found = u
            else:
                return False
        u = found
    return u == arc_start.shape[0] - 2
