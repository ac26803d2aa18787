"""Layered graphs of the ramp relaxation, and what compiled sweeps find in them.

A graph is a deterministic automaton without cycles. The arcs of a node carry disjoint labels, the
nodes are numbered in topological order, node 0 is the root and the last one is the end. A label is
a fixed step (a round that costs as many as are placed, the join to the part with a clock, the end)
or the set of kinds of requests, as a bit mask, that the arc may place.
`optsched.optimize.ramp.relaxation` says what paths mean, and `optsched.optimize.ramp.product` makes
graphs finer. Import this module lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.tracker import MARGIN, wider
from optsched.problem.kernel import njit

INFINITE = 2**30
"""Cost of a node without a path; costs stay below (`optsched.optimize.ramp.relaxation`)."""
ROUND, JOIN, END = -1, -2, -3
"""Symbols of fixed steps in a path; others are kinds."""
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_WORDS = 2
"""The number of words of a mask. The first 64 bits are in the first word."""


@dataclass(eq=False)
class Labels:
    """Labels by number: rounds at m = 0..n, the join, ends at t = 0..last, then masks.

    Parameters
    ----------
    mask : ndarray of uint64, shape (room, 2)
        The kinds that the label may place, as bits; 0 for fixed steps.
    fixed : ndarray of int64
        The cost of a fixed step, in rounds.
    slots : ndarray of int32
        A hash table of the masks.
    count : ndarray of int64, shape (1,)
        The number of labels.
    join : int
        The label of the join. Rounds have labels below it, ends have labels above it.
    first_mask : int
        The first label that is a mask.
    """

    mask: NDArray[np.uint64]
    fixed: NDArray[np.int64]
    slots: NDArray[np.int32]
    count: NDArray[np.int64]
    join: int
    first_mask: int

    def make_room(self) -> None:
        """Make room for the labels that the expansion of one node can add."""
        count = int(self.count[0])
        if count + MARGIN <= len(self.mask):
            return
        need = count + 2 * MARGIN
        self.mask, self.fixed = wider(self.mask, need), wider(self.fixed, need)
        self.fixed[count:] = 0
        if 2 * need > len(self.slots):
            self.slots = np.full(len(self.slots) * 4, -1, dtype=np.int32)
            _enter_all(self.mask, self.slots, self.first_mask, count)


def new_labels(n: int, last: int) -> Labels:
    """Return the fixed labels for n requests and a clock from 0 to ``last``."""
    fixed = np.concatenate([np.arange(n + 1), [0], n * np.arange(last + 1)])
    room = len(fixed) + 4 * MARGIN
    mask = np.zeros((room, _WORDS), dtype=np.uint64)
    costs = np.zeros(room, dtype=np.int64)
    costs[: len(fixed)] = fixed
    slots = np.full(4 * MARGIN, -1, dtype=np.int32)
    return Labels(mask, costs, slots, np.array([len(fixed)]), n + 1, len(fixed))


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, their arcs, and the loops of rounds that change nothing.

    Parameters
    ----------
    arc_start : ndarray of int64, shape (nodes + 1,)
    arc_target, arc_label : ndarray of int32, shape (arcs,)
    loop : ndarray of int16, shape (nodes,)
        The number of requests placed where a round leads back to the node itself, else -1. A loop
        costs something and changes nothing, so sweeps ignore it; a product must not.
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


class Paths(NamedTuple):
    """A graph with its labels, what paths cost, and the cost above which they do not matter."""

    arc_start: Any
    arc_target: Any
    arc_label: Any
    loop: Any
    backward: Any
    mask: Any
    join: Any
    first_mask: Any
    scale: Any
    cutoff: Any


@njit(nogil=True)
def hash_mask(low: np.uint64, high: np.uint64) -> np.uint64:
    """Return a hash of a mask, given its words."""
    h = (low ^ (high * np.uint64(0xC2B2AE3D27D4EB4F))) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    return h >> np.uint64(20)


@njit(nogil=True, inline="always")
def places(mask: Any, label: int, kind: int) -> bool:
    """Whether a label may place a kind."""
    return (mask[label, kind >> 6] >> np.uint64(kind & 63)) & _ONE != _ZERO


@njit(nogil=True)
def _enter_all(mask: Any, slots: Any, first: int, count: int) -> None:
    """Enter the masks of the labels from ``first`` on in the hash table, which is empty."""
    last = np.uint64(slots.shape[0] - 1)
    for k in range(first, count):
        at = hash_mask(mask[k, 0], mask[k, 1]) & last
        while slots[at] >= 0:
            at = (at + _ONE) & last
        slots[at] = k


@njit(nogil=True)
def label_of(low: Any, high: Any, mask: Any, slots: Any, count: Any) -> int:
    """Return the number of the label whose mask has these words, a new one if it has none."""
    last = np.uint64(slots.shape[0] - 1)
    at = hash_mask(low, high) & last
    while slots[at] >= 0:
        if mask[slots[at], 0] == low and mask[slots[at], 1] == high:
            return slots[at]
        at = (at + _ONE) & last
    k = count[0]
    mask[k, 0], mask[k, 1] = low, high
    slots[at] = k
    count[0] = k + 1
    return k


@njit(nogil=True)
def by_source(nodes: int, source: Any, target: Any, label: Any, stop: Any) -> Any:
    """Return where the arcs of each node start, and targets and labels in order of source.

    They are incomplete if the stop flag has been set.
    """
    start = np.zeros(nodes + 1, dtype=np.int64)
    for x in source:
        start[np.uint32(x) + np.uint32(1)] += 1
    for x in range(nodes):
        start[x + 1] += start[x]
    targets = np.empty(source.shape[0], dtype=np.int32)
    labels = np.empty(source.shape[0], dtype=np.int32)
    for a in range(source.shape[0]):
        if a % 65536 == 0 and stop[0] != 0:
            break
        x = np.uint32(source[a])
        at = np.uint64(start[x])
        targets[at], labels[at] = target[a], label[a]
        start[x] += 1
    start[1:] = start[:-1].copy()
    start[0] = 0
    return start, targets, labels


@njit(nogil=True)
def reversed_arcs(arc_start: Any, arc_target: Any, arc_label: Any, stop: Any) -> Any:
    """Return where the arcs into each node start, and sources and labels in that order."""
    source = np.empty(arc_target.shape[0], dtype=np.int32)
    for u in range(arc_start.shape[0] - 1):
        source[arc_start[u] : arc_start[u + 1]] = u
    return by_source(arc_start.shape[0] - 1, arc_target, source, arc_label, stop)


class Interrupted(Exception):
    """The stop flag was set while a kernel ran."""


class TooLargeError(Exception):
    """A graph would exceed what memory allows."""


@njit(nogil=True)
def label_costs(mask: Any, fixed: Any, count: int, first_mask: int, cost: Any, scale: int) -> Any:
    """Return the cost of each label, and the kind of least cost where it places one, else -1."""
    value = np.empty(count, dtype=np.int32)
    kind = np.full(count, -1, dtype=np.int32)
    for k in range(first_mask):
        value[k] = fixed[k] * scale
    for k in range(first_mask, count):
        best = np.int64(INFINITE)
        for j in range(cost.shape[0]):
            if cost[j] < best and places(mask, k, j):
                best = cost[j]
                kind[k] = j
        value[k] = best
    return value, kind


@njit(nogil=True)
def sweep_backward(arc_start: Any, arc_target: Any, arc_label: Any, value: Any) -> Any:
    """Return the least cost from each node to the end.

    Places are unsigned here and below: else numba asks of each whether it counts from the end, and
    a sweep takes three times as long.
    """
    nodes = arc_start.shape[0] - 1
    out = np.empty(nodes, dtype=np.int32)
    out[nodes - 1] = 0
    for u in range(nodes - 2, -1, -1):
        best = np.int32(INFINITE)
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            c = np.int32(out[np.uint32(arc_target[a])] + value[np.uint32(arc_label[a])])
            best = min(best, c)
        # A node without a way to the end stays so, whatever negative costs lead there.
        out[u] = best if best < INFINITE // 2 else INFINITE
    return out


@njit(nogil=True)
def _sweep_forward(arc_start: Any, arc_target: Any, arc_label: Any, value: Any) -> Any:
    """Return the least cost from the root to each node."""
    nodes = arc_start.shape[0] - 1
    out = np.full(nodes, INFINITE, dtype=np.int32)
    out[0] = 0
    for u in range(nodes - 1):
        here = out[u]
        if here >= INFINITE // 2:
            continue
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            v = np.uint32(arc_target[a])
            out[v] = min(out[v], np.int32(here + value[np.uint32(arc_label[a])]))
    return out


class Latency(NamedTuple):
    """How a path's cost c becomes a total latency: (c + shift) / scale - offset.

    Attributes
    ----------
    shift, scale, offset : int
    """

    shift: Any
    scale: Any
    offset: Any


@njit(nogil=True)
def least_totals(
    arc_start: Any, arc_target: Any, arc_label: Any, value: Any, backward: Any, latency: Latency,
    low: int, high: int
) -> Any:  # fmt: skip
    """Return on how many nodes the best path has the total latency low, low + 1, ..., high - 1.

    Latencies are rounded up, and those below ``low`` count as ``low``.
    """
    forward = _sweep_forward(arc_start, arc_target, arc_label, value)
    count = np.zeros(max(high - low, 0), dtype=np.int64)
    for u in range(forward.shape[0]):
        if forward[u] < INFINITE and backward[u] < INFINITE:
            cost = np.int64(forward[u]) + backward[u] + latency.shift
            total = max(-(-cost // latency.scale) - latency.offset, low)
            if total < high:
                count[total - low] += 1
    return count


@njit(nogil=True)
def _pruned(
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any, value: Any,
    cutoff: int
) -> Any:  # fmt: skip
    """Return the graph without nodes and arcs through which every path exceeds the cutoff.

    Arcs that are deleted do not count for the cost from the root. They do not matter: where such an
    arc is on the cheapest way to a node, the node is deleted, too.
    """
    nodes = loop.shape[0]
    forward = np.full(nodes, INFINITE, dtype=np.int32)
    forward[0] = 0
    number = np.empty(nodes, dtype=np.int32)
    # Pages of these that are not written take no memory.
    start = np.empty(nodes + 1, dtype=np.int64)
    target = np.empty(arc_target.shape[0], dtype=np.int32)
    label = np.empty(arc_target.shape[0], dtype=np.int32)
    out_loop = np.empty(nodes, dtype=np.int16)
    out_backward = np.empty(nodes, dtype=np.int32)
    kept = 0
    arcs = np.uint64(0)
    for u in range(nodes):
        here = np.int64(forward[u])
        slack = cutoff - here
        if here >= INFINITE or backward[u] > slack:
            continue
        number[u] = kept
        start[kept], out_loop[kept], out_backward[kept] = arcs, loop[u], backward[u]
        kept += 1
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            v = np.uint32(arc_target[a])
            cost = value[np.uint32(arc_label[a])]
            if backward[v] < INFINITE and cost + backward[v] <= slack:
                target[arcs], label[arcs] = v, arc_label[a]
                arcs += np.uint64(1)
                forward[v] = min(forward[v], np.int32(here + cost))
    start[kept] = arcs
    for a in range(arcs):
        target[a] = number[np.uint32(target[a])]
    graph = start[: kept + 1], target[:arcs], label[:arcs], out_loop[:kept]
    return graph, out_backward[:kept]


def pruned(
    graph: Graph, value: NDArray[np.int32], backward: NDArray[np.int32], cutoff: int
) -> tuple[Graph, NDArray[np.int32]]:
    """Return the graph without what only paths above ``cutoff`` use, and ``backward`` on it.

    There must be a path of cost at most ``cutoff``. Labels keep all of their kinds.
    """
    parts, backward = _pruned(
        graph.arc_start, graph.arc_target, graph.arc_label, graph.loop, backward, value, cutoff
    )
    return Graph(*parts), backward


@njit(nogil=True)
def _twice(array: Any) -> Any:
    """Return the array with twice the room."""
    more = np.empty(2 * array.shape[0], dtype=array.dtype)
    more[: array.shape[0]] = array
    return more


@njit(nogil=True)
def best_path(
    arc_start: Any, arc_target: Any, arc_label: Any, value: Any, backward: Any, kind: Any,
    join: int, first_mask: int
) -> Any:  # fmt: skip
    """Return the symbols of a cheapest path, and the fixed labels' numbers (-1 for kinds)."""
    end = arc_start.shape[0] - 2
    symbols = np.empty(256, dtype=np.int32)
    number = np.empty(256, dtype=np.int32)
    length = 0
    u = 0
    while u != end:
        if length == symbols.shape[0]:
            symbols, number = _twice(symbols), _twice(number)
        for a in range(arc_start[u], arc_start[u + 1]):
            label = arc_label[a]
            if backward[arc_target[a]] < INFINITE and (
                backward[arc_target[a]] + value[label] == backward[u]
            ):
                break
        if label >= first_mask:
            symbols[length] = kind[label]
            number[length] = -1
        else:
            symbols[length] = ROUND if label < join else (JOIN if label == join else END)
            number[length] = label
        length += 1
        u = arc_target[a]
    return symbols[:length].copy(), number[:length].copy()


@njit(nogil=True)
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
                hit = label >= first_mask and places(mask, label, symbols[k])
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
