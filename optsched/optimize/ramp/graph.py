"""What compiled sweeps find in the graphs of the ramp relaxation.

`optsched.bounds.checker.product` makes the graphs. A graph is a deterministic automaton without
cycles. The arcs of a node carry disjoint labels, the nodes are numbered in topological order, node
0 is the root and the last one is the end. A label is a fixed step (a round that costs as many as
are placed, the join to the part with a clock, the end) or the set of kinds of requests that the arc
may place. `optsched.optimize.ramp.relaxation` says what paths mean. Here arcs are in order of their
source: those of node u are from ``arc_start[u]`` to ``arc_start[u + 1]``, and arc a leads to the
node ``arc_target[a]`` at the cost ``value[arc_label[a]]`` of its label. ``backward`` is the least
cost from each node to the end. Import this module lazily: it loads numba.
"""

from typing import NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Cells, Ints
from optsched.bounds.checker.product import Leaving
from optsched.problem.kernel import njit

INFINITE = 2**30
"""Cost of a node without a path; costs stay below (`optsched.optimize.ramp.relaxation`)."""
ROUND, JOIN, END = -1, -2, -3
"""Symbols of fixed steps in a path; others are kinds."""


class Interrupted(Exception):
    """The stop flag was set while a kernel ran."""


@njit(nogil=True)
def sweep_backward(graph: Leaving, value: Cells) -> Cells:
    """Return the least cost from each node to the end; ``value`` is the cost of each label.

    Places are unsigned here and below: signed ones take three times as long.
    """
    arc_start, arc_target, arc_label, _ = graph
    nodes = arc_start.shape[0] - 1
    costs = np.empty(nodes, dtype=np.int32)
    costs[nodes - 1] = 0

    # Nodes are in topological order, so from the end backward targets come first.
    for u in range(nodes - 2, -1, -1):
        best = np.int32(INFINITE)
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            cost = np.int32(costs[np.uint32(arc_target[a])] + value[np.uint32(arc_label[a])])
            best = min(best, cost)

        # A node without a way to the end stays so, whatever negative costs lead there. Real costs
        # are below INFINITE / 4 and sums of two stay in 32 bits.
        costs[u] = best if best < INFINITE // 2 else INFINITE

    return costs


@njit(nogil=True)
def _sweep_forward(graph: Leaving, value: Cells) -> Cells:
    """Return the least cost from the root to each node."""
    arc_start, arc_target, arc_label, _ = graph
    nodes = arc_start.shape[0] - 1
    costs = np.full(nodes, INFINITE, dtype=np.int32)
    costs[0] = 0

    for u in range(nodes - 1):
        here = costs[u]
        # No path leads here, so none goes on from here. A label that cannot be taken costs
        # INFINITE, from which negative costs take less than a half (see `sweep_backward`).
        if here >= INFINITE // 2:
            continue
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            v = np.uint32(arc_target[a])
            costs[v] = min(costs[v], np.int32(here + value[np.uint32(arc_label[a])]))

    return costs


class Latency(NamedTuple):
    """How a path's cost c becomes a total latency: (c + shift) / scale - offset."""

    shift: int
    scale: int
    offset: int


@njit(nogil=True)
def count_nodes_by_total(
    graph: Leaving, value: Cells, backward: Cells, latency: Latency, low: int, high: int
) -> Ints:
    """Return on how many nodes the best path has the total latency low, ..., high - 1.

    Latencies are rounded up, and those below ``low`` count as ``low``. ``backward`` is the least
    cost from each node to the end. Nodes that are on no path, or only on worse ones, do not count.
    """
    # The best path through a node takes the best way to it, and from it the best way to the end.
    forward = _sweep_forward(graph, value)
    count = np.zeros(max(high - low, 0), dtype=np.int64)
    for u in range(forward.shape[0]):
        if forward[u] < INFINITE and backward[u] < INFINITE:
            cost = np.int64(forward[u]) + backward[u] + latency.shift
            total = max(-(-cost // latency.scale) - latency.offset, low)
            if total < high:
                count[total - low] += 1

    return count


@njit(nogil=True)
def prune(graph: Leaving, backward: Cells, value: Cells, cutoff: int) -> tuple[Leaving, Cells]:
    """Delete the nodes and arcs through which every path exceeds the cutoff.

    Return the graph that is left and the costs ``backward`` of its nodes. No path up to the cutoff
    is lost, and there must be one. Labels keep all of their kinds. ``loop`` is the cost of a round
    in which nothing is live and the path stays at the node, -1 where there is none.
    """
    arc_start, arc_target, arc_label, loop = graph
    nodes = loop.shape[0]
    forward = np.full(nodes, INFINITE, dtype=np.int32)  # by paths that are kept
    forward[0] = 0
    number = np.empty(nodes, dtype=np.int32)  # the new number of each node that is kept
    # Pages of these that are not written take no memory.
    start = np.empty(nodes + 1, dtype=np.int64)
    target = np.empty(arc_target.shape[0], dtype=np.int32)
    label = np.empty(arc_target.shape[0], dtype=np.int32)
    out_loop = np.empty(nodes, dtype=np.int32)
    out_backward = np.empty(nodes, dtype=np.int32)
    kept = 0
    arcs = np.uint64(0)

    # Nodes are in topological order, so all arcs into a node were looked at before its turn.
    for u in range(nodes):
        here = np.int64(forward[u])
        slack = cutoff - here
        # Every path through this node exceeds the cutoff.
        if here >= INFINITE or backward[u] > slack:
            continue

        number[u] = kept
        start[kept], out_loop[kept], out_backward[kept] = arcs, loop[u], backward[u]
        kept += 1

        # Of its arcs, those stay by which the cheapest path is within the cutoff.
        for a in range(np.uint64(arc_start[u]), np.uint64(arc_start[u + 1])):
            v = np.uint32(arc_target[a])
            cost = value[np.uint32(arc_label[a])]
            if backward[v] < INFINITE and cost + backward[v] <= slack:
                target[arcs], label[arcs] = v, arc_label[a]
                arcs += np.uint64(1)
                forward[v] = min(forward[v], np.int32(here + cost))

    start[kept] = arcs
    # An arc that was kept leads to a node that was kept, which has its number by now.
    for a in range(arcs):
        target[a] = number[np.uint32(target[a])]

    smaller = Leaving(start[: kept + 1], target[:arcs], label[:arcs], out_loop[:kept])
    return smaller, out_backward[:kept]


@njit(nogil=True)
def best_path(
    graph: Leaving, value: Cells, backward: Cells, kind: Cells, join: int, first_mask: int
) -> tuple[Cells, Cells]:
    """Return the symbols of a cheapest path, and the fixed labels' numbers (-1 for kinds).

    Both have an entry for each arc, from the root to the end. ``kind`` is the cheapest kind of each
    label. Labels below `join` are rounds, those from `first_mask` on are sets of kinds, and between
    them are `join` and the ends.
    """
    arc_start, arc_target, arc_label, _ = graph
    end = arc_start.shape[0] - 2
    # No node comes twice. Pages that are not written take no memory.
    symbols, number = np.empty(end + 1, dtype=np.int32), np.empty(end + 1, dtype=np.int32)
    length = 0
    u = 0

    while u != end:
        # Stop at the first arc on a cheapest path: its cost and the target's add up to the node's.
        # There is one, and the loop leaves it in `a`.
        for a in range(arc_start[u], arc_start[u + 1]):
            label = arc_label[a]
            if backward[arc_target[a]] < INFINITE and (
                backward[arc_target[a]] + value[label] == backward[u]
            ):
                break

        number[length] = label if label < first_mask else -1
        if label >= first_mask:
            symbols[length] = kind[label]
        elif label < join:
            symbols[length] = ROUND
        else:
            symbols[length] = JOIN if label == join else END

        length += 1
        u = arc_target[a]

    return symbols[:length].copy(), number[:length].copy()
