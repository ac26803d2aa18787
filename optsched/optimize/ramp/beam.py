"""Beam search through a graph of the ramp relaxation, with exact memory, each request once.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.judge.life import record
from optsched.optimize.ramp.finish import kinds_of, paths_of
from optsched.optimize.ramp.finish_kernel import Kinds
from optsched.optimize.ramp.graph import INFINITE, Paths, places
from optsched.optimize.ramp.relaxation import Relaxation
from optsched.optimize.search.orders import Annealing
from optsched.problem.kernel import njit

_READ = 100
"""The max number of a beam's entries that become schedules."""
_STACK = 4096
"""The max number of chains of rounds that wait to be followed from one entry."""

_CANDIDATE = record(
    ("total", np.int64),  # its cost and the graph's cost to the end
    ("cost", np.int64),
    ("parent", np.int64),  # entry of the layer before
    ("kind", np.int64),  # that it places
    ("node", np.int64),  # where it comes to
    ("rounds", np.int64),  # since the placement before
)
_STEP = record(("parent", np.int32), ("kind", np.int32), ("rounds", np.int32))
_CHAIN = record(("node", np.int64), ("cost", np.int64), ("rounds", np.int64))


class _Layer(NamedTuple):
    """Entries after so many placements: where they are, and what they remember."""

    node: Any
    cost: Any
    placed: Any  # of each kind
    items: Any  # live ones: their weight and floor, in ascending order
    length: Any  # how many are live


@njit(nogil=True)
def _children(
    entry: int, layer: _Layer, graph: Paths, kinds: Kinds, candidates: Any, found: int, stack: Any
) -> int:  # fmt: skip
    """Append every placement that an entry can make next; return how many candidates there are.

    It follows chains of rounds, from the entry itself and from every join that it meets.
    """
    placed, items, length = layer.placed[entry], layer.items[entry], layer.length[entry]
    arc_target, arc_label, backward = graph.arc_target, graph.arc_label, graph.backward
    cost, copies, peak = kinds.cost, kinds.copies, kinds.peak
    chain = stack[0]
    chain.node, chain.cost, chain.rounds = layer.node[entry], layer.cost[entry], 0
    depth = 1
    while depth > 0:
        depth -= 1
        node, so_far, rounds = stack[depth].node, stack[depth].cost, stack[depth].rounds
        while True:
            live, weight = _live(items, length, rounds)
            onward = -1
            onward_cost = 0
            for a in range(graph.arc_start[node], graph.arc_start[node + 1]):
                v = arc_target[a]
                label = arc_label[a]
                if label < graph.join:
                    onward = v
                    onward_cost = label * graph.scale
                elif label == graph.join:
                    if so_far + backward[v] <= graph.cutoff and depth < stack.shape[0]:
                        chain = stack[depth]
                        chain.node, chain.cost, chain.rounds = v, so_far, rounds
                        depth += 1
                elif label >= graph.first_mask and backward[v] < INFINITE:
                    for k in range(copies.shape[0]):
                        if (
                            places(graph.mask, label, k)
                            and placed[k] < copies[k]
                            and weight + peak[k] <= kinds.capacity
                            and found < candidates.shape[0]
                            and so_far + cost[k] + backward[v] <= graph.cutoff
                        ):
                            new = candidates[found]
                            new.total = so_far + cost[k] + backward[v]
                            new.cost = so_far + cost[k]
                            new.parent, new.kind, new.node, new.rounds = entry, k, v, rounds
                            found += 1
            if onward < 0 and graph.loop[node] >= 0 and live > 0:
                onward = node
                onward_cost = graph.loop[node] * graph.scale
            if onward < 0 or so_far + onward_cost + backward[onward] > graph.cutoff:
                break
            node = onward
            so_far += onward_cost
            rounds += 1
    return found


@njit(nogil=True)
def _live(items: Any, length: int, rounds: int) -> Any:
    """Return how many items are live so many rounds earlier, and their weight."""
    live = 0
    weight = 0
    for k in range(length):
        w = items[k, 0] - rounds
        if w >= items[k, 1]:
            live += 1
            weight += w
    return live, weight


@njit(nogil=True, inline="always")
def _remember(candidate: Any, layer: _Layer, new: _Layer, at: int, kinds: Kinds) -> bool:
    """Write what a candidate remembers into the new layer; return whether there is room for it.

    Inlined, as `_hash_entry` is: a call would count the references of all arrays in the tuples.
    """
    e, kind, rounds = candidate.parent, candidate.kind, candidate.rounds
    items, before = new.items, layer.items
    live = 0
    for j in range(layer.length[e]):
        w = before[e, j, 0] - rounds
        if w >= before[e, j, 1]:
            items[at, live, 0], items[at, live, 1] = w, before[e, j, 1]
            live += 1
    if live >= items.shape[1]:
        return False
    # Insert in order, so that equal multisets look equal.
    peak = kinds.peak[kind]
    floor = peak - kinds.output[kind] + 1
    j = live
    while j > 0 and (
        items[at, j - 1, 0] > peak or (items[at, j - 1, 0] == peak and items[at, j - 1, 1] > floor)
    ):
        items[at, j, 0], items[at, j, 1] = items[at, j - 1, 0], items[at, j - 1, 1]
        j -= 1
    items[at, j, 0], items[at, j, 1] = peak, floor
    new.length[at] = live + 1
    for j in range(new.placed.shape[1]):
        new.placed[at, j] = layer.placed[e, j]
    new.placed[at, kind] += 1
    return True


@njit(nogil=True, inline="always")
def _hash_entry(node: int, new: _Layer, at: int) -> np.uint64:
    """Return a hash of an entry at a node with what it remembers."""
    items, placed = new.items, new.placed
    h = np.uint64(node + 1) * np.uint64(0x9E3779B97F4A7C15)
    for j in range(new.length[at]):
        h = (h ^ np.uint64(items[at, j, 0] * 65537 + items[at, j, 1])) * np.uint64(1099511628211)
        h ^= h >> np.uint64(31)
    for j in range(placed.shape[1]):
        h = (h ^ np.uint64(placed[at, j] + 1)) * np.uint64(1099511628211)
        h ^= h >> np.uint64(29)
    return h


@njit(nogil=True)
def _enter(h: Any, seen: Any) -> bool:
    """Enter a hash into the table; return whether it was not there."""
    last = np.uint64(seen.shape[0] - 1)
    spot = h & last
    while seen[spot] != np.uint64(0):
        if seen[spot] == h:
            return False
        spot = (spot + np.uint64(1)) & last
    seen[spot] = h
    return True


@njit(nogil=True)
def _choose(
    candidates: Any, layer: _Layer, new: _Layer, kinds: Kinds, seen: Any, steps: Any
) -> int:  # fmt: skip
    """Make the new layer of the candidates of least total, each once; return its entries."""
    seen[:] = 0
    taken = 0
    for c in np.argsort(candidates.total):
        candidate = candidates[c]
        if not _remember(candidate, layer, new, taken, kinds):
            continue
        if not _enter(_hash_entry(candidate.node, new, taken), seen):
            continue
        # The layers share nodes and costs: those of parents are not read any more.
        new.node[taken], new.cost[taken] = candidate.node, candidate.cost
        step = steps[taken]
        step.parent, step.kind = candidate.parent, candidate.kind
        step.rounds = candidate.rounds
        taken += 1
        if taken == steps.shape[0]:
            break
    return taken


@njit(nogil=True)
def _beam(
    width: int, n: int, slots: int, graph: Paths, kinds: Kinds, stop: Any, steps: Any
) -> int:  # fmt: skip
    """Return the number of complete entries, and in ``steps`` how each was reached.

    Parameters
    ----------
    width : int
        The most entries of a layer.
    n : int
        The number of requests.
    slots : int
        The most items that an entry may remember.
    graph, kinds
    stop : ndarray of int8, shape (1,)
    steps : ndarray of records, shape (n, width)
    """
    candidates = np.empty(width * 24 + 4096, dtype=_CANDIDATE)
    stack = np.empty(_STACK, dtype=_CHAIN)
    node = np.zeros(width, dtype=np.int64)
    cost = np.zeros(width, dtype=np.int64)
    placed = np.zeros((2, width, kinds.copies.shape[0]), dtype=np.int16)
    items = np.zeros((2, width, slots, 2), dtype=np.int64)
    length = np.zeros((2, width), dtype=np.int64)
    layer = _Layer(node, cost, placed[0], items[0], length[0])
    new = _Layer(node, cost, placed[1], items[1], length[1])
    entries = 1
    size = 1
    while size < 4 * width:
        size *= 2
    seen = np.zeros(size, dtype=np.uint64)
    for m in range(n):
        found = 0
        if stop[0] == 0:
            for entry in range(entries):
                found = _children(entry, layer, graph, kinds, candidates, found, stack)
        if found == 0:
            return 0
        entries = _choose(candidates[:found], layer, new, kinds, seen, steps[m])
        layer, new = new, layer
    return entries


def beam(relaxation: Relaxation, annealing: Annealing, width: int) -> None:
    """Walk the relaxation's graph with exact memory and each request once, ``width`` at a time.

    Entries after m placements are ranked by their cost so far plus the graph's cost to the end.
    Those beyond the known schedule are given up. Each one that arrives is offered to ``annealing``
    as a schedule, which also places its requests again in order of their starts.
    """
    graph, jobs = relaxation.graph, relaxation.jobs
    if graph is None or relaxation.closed:
        return
    slots = int(min(jobs.n, jobs.capacity // int(relaxation.floor.min()))) + 1
    paths, kinds = paths_of(relaxation), kinds_of(relaxation)
    steps = np.zeros((jobs.n, width), dtype=_STEP)
    entries = _beam(width, jobs.n, slots, paths, kinds, relaxation.stop, steps)
    order = np.arange(jobs.n)[::-1]
    for entry in range(min(entries, _READ)):
        path = np.empty(jobs.n, dtype=_STEP)
        at = entry
        for m in order:
            path[m] = steps[m, at]
            at = path["parent"][m]
        starts = relaxation.starts(path["kind"], np.cumsum(path["rounds"], dtype=np.int64))
        annealing.offer(starts)
    relaxation.offer(annealing.value)
