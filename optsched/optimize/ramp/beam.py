"""Beam search through a graph of the ramp relaxation, with exact memory, each request once.

Import lazily: it loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from optsched.optimize.ramp.relaxation import Relaxation
from optsched.optimize.search.orders import Annealing

_READ = 100
"""Entries of a beam that are made schedules."""


@njit(cache=True, nogil=True)
def _children(
    u: int, g: int, entry: int, placed: Any, items: Any, length: int, capacity: int,
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any, mask: Any,
    join: int, first_mask: int, cutoff: int, cost: Any, scale: int, copies: Any, peak: Any,
    out: Any, found: int, stack: Any
) -> int:  # fmt: skip
    """Append every placement that an entry can make next: (f, g, parent, kind, node, rounds)."""
    # Chains of rounds, from the entry itself and from every join met on the way.
    stack[0, 0], stack[0, 1], stack[0, 2] = u, g, 0
    depth = 1
    row = np.empty(length + 1, dtype=np.int64)
    while depth > 0:
        depth -= 1
        node, cost_so_far, rounds = stack[depth]
        while True:
            live = 0
            total = 0
            for k in range(length):
                w = items[k, 0] - rounds
                if w >= items[k, 1]:
                    row[live] = w
                    live += 1
                    total += w
            onward = -1
            onward_cost = 0
            for a in range(arc_start[node], arc_start[node + 1]):
                v = arc_target[a]
                label = arc_label[a]
                if label < join:
                    onward = v
                    onward_cost = label * scale
                elif label == join:
                    if cost_so_far + backward[v] <= cutoff and depth < stack.shape[0]:
                        stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, cost_so_far, rounds
                        depth += 1
                elif label >= first_mask:
                    bits = mask[label]
                    k = 0
                    while bits != np.uint64(0):
                        if (
                            bits & np.uint64(1)
                            and placed[k] < copies[k]
                            and total + peak[k] <= capacity
                            and found < out.shape[0]
                        ):
                            f = cost_so_far + cost[k] + backward[v]
                            if f <= cutoff and backward[v] < 2**30:
                                out[found, 0] = f
                                out[found, 1] = cost_so_far + cost[k]
                                out[found, 2] = entry
                                out[found, 3] = k
                                out[found, 4] = v
                                out[found, 5] = rounds
                                found += 1
                        bits >>= np.uint64(1)
                        k += 1
            if onward < 0 and loop[node] >= 0 and live > 0:
                onward = node
                onward_cost = loop[node] * scale
            if onward < 0 or cost_so_far + onward_cost + backward[onward] > cutoff:
                break
            node = onward
            cost_so_far += onward_cost
            rounds += 1
    return found


@njit(cache=True, nogil=True)
def _beam(
    width: int, n: int, arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any,
    mask: Any, join: int, first_mask: int, cutoff: int, cost: Any, scale: int, copies: Any,
    peak: Any, floor: Any, capacity: int, slots: int, stop: Any
) -> Any:  # fmt: skip
    """Return kinds and rounds between placements of the best complete entries, layer by layer."""
    kinds = copies.shape[0]
    room = width * 24 + 4096
    out = np.empty((room, 6), dtype=np.int64)
    stack = np.empty((4096, 3), dtype=np.int64)
    node = np.zeros(width, dtype=np.int64)
    cost_of = np.zeros(width, dtype=np.int64)
    placed = np.zeros((width, kinds), dtype=np.int16)
    items = np.zeros((width, slots, 2), dtype=np.int64)
    length = np.zeros(width, dtype=np.int64)
    new_placed = placed.copy()
    new_items = items.copy()
    new_length = length.copy()
    back_parent = np.zeros((n, width), dtype=np.int32)
    back_kind = np.zeros((n, width), dtype=np.int32)
    back_rounds = np.zeros((n, width), dtype=np.int32)
    entries = 1
    bits = 1
    while bits < 4 * width:
        bits *= 2
    seen = np.zeros(bits, dtype=np.uint64)
    for m in range(n):
        if stop[0] != 0:
            return 0, back_parent, back_kind, back_rounds
        found = 0
        for e in range(entries):
            found = _children(
                node[e], cost_of[e], e, placed[e], items[e], length[e], capacity, arc_start,
                arc_target, arc_label, loop, backward, mask, join, first_mask, cutoff, cost,
                scale, copies, peak, out, found, stack
            )  # fmt: skip
        if found == 0:
            return 0, back_parent, back_kind, back_rounds
        order = np.argsort(out[:found, 0])
        seen[:] = 0
        taken = 0
        for c in order:
            e, k, v, rounds = out[c, 2], out[c, 3], out[c, 4], out[c, 5]
            live = 0
            for j in range(length[e]):
                w = items[e, j, 0] - rounds
                if w >= items[e, j, 1]:
                    new_items[taken, live, 0] = w
                    new_items[taken, live, 1] = items[e, j, 1]
                    live += 1
            if live >= slots:
                continue
            # Insert in order, so that equal multisets look equal.
            at = live
            while at > 0 and (
                new_items[taken, at - 1, 0] > peak[k]
                or (
                    new_items[taken, at - 1, 0] == peak[k]
                    and new_items[taken, at - 1, 1] > floor[k]
                )
            ):
                new_items[taken, at, 0] = new_items[taken, at - 1, 0]
                new_items[taken, at, 1] = new_items[taken, at - 1, 1]
                at -= 1
            new_items[taken, at, 0] = peak[k]
            new_items[taken, at, 1] = floor[k]
            live += 1
            h = np.uint64(v + 1) * np.uint64(0x9E3779B97F4A7C15)
            for j in range(live):
                h = (
                    h ^ np.uint64(new_items[taken, j, 0] * 65537 + new_items[taken, j, 1])
                ) * np.uint64(1099511628211)
                h ^= h >> np.uint64(31)
            for j in range(kinds):
                new_placed[taken, j] = placed[e, j]
            new_placed[taken, k] += 1
            for j in range(kinds):
                h = (h ^ np.uint64(new_placed[taken, j] + 1)) * np.uint64(1099511628211)
                h ^= h >> np.uint64(29)
            spot = h & np.uint64(bits - 1)
            double = False
            while seen[spot] != np.uint64(0):
                if seen[spot] == h:
                    double = True
                    break
                spot = (spot + np.uint64(1)) & np.uint64(bits - 1)
            if double:
                continue
            seen[spot] = h
            new_length[taken] = live
            node[taken] = v  # node and cost of parents are not read any more
            cost_of[taken] = out[c, 1]
            back_parent[m, taken] = e
            back_kind[m, taken] = k
            back_rounds[m, taken] = rounds
            taken += 1
            if taken == width:
                break
        entries = taken
        placed, new_placed = new_placed, placed
        items, new_items = new_items, items
        length, new_length = new_length, length
    return entries, back_parent, back_kind, back_rounds


def beam(relaxation: Relaxation, annealing: Annealing, width: int) -> None:
    """Walk the relaxation's graph with exact memory and each request once, ``width`` at a time.

    Entries after m placements are ranked by cost so far plus the graph's cost to the end, and
    given up beyond the known schedule. What arrives is offered to ``annealing``, in the order
    that it has and placed again.
    """
    graph, labels, jobs = relaxation.graph, relaxation.labels, relaxation.jobs
    if graph is None or relaxation.closed:
        return
    slots = int(min(jobs.n, jobs.capacity // int(relaxation.floor.min()))) + 1
    entries, parent, kind, rounds = _beam(
        width, jobs.n, graph.arc_start, graph.arc_target, graph.arc_label, graph.loop,
        relaxation.backward, labels.mask, labels.join, labels.first_mask, relaxation.cutoff,
        -relaxation.pi, relaxation.scale, relaxation.copies, relaxation.peak, relaxation.floor,
        jobs.capacity, slots, relaxation.stop
    )  # fmt: skip
    for entry in range(min(entries, _READ)):
        kinds = np.empty(jobs.n, dtype=np.int64)
        steps = np.empty(jobs.n, dtype=np.int64)
        at = entry
        for m in range(jobs.n - 1, -1, -1):
            kinds[m], steps[m] = kind[m, at], rounds[m, at]
            at = parent[m, at]
        annealing.offer(relaxation.starts(kinds, np.cumsum(steps)))
    relaxation.offer(annealing.value)
