"""Finishing a proof by enumeration: every schedule below a target, placement by placement.

Once the graph of `optsched.optimize.ramp.relaxation` is small, its paths can be followed with exact
memory. A **label** is a graph node together with the requests placed on the way there and the
tokens of the live ones in this and each earlier round. Labels are made layer by layer: after one
placement, after two, and so on. A placement that a schedule cannot make is left out: of a request
that is placed already, one that does not fit, one before its arrival. If no label is left, no
schedule is below the target. The labels of the last layer are schedules.

**Every schedule below the target is in the graph**, since the graph lost only paths that cost the
target or more. So labels and bounds may use the graph, and dominance may argue with schedules.

**Single counters.** For each node and each kind of requests, two tables hold the least cost to the
end with that kind never placed, and with it placed exactly once, above the node's plain cost. A
label whose requests of the kind are all placed but one, or all placed, costs at least as much. The
largest entry over all kinds counts. Entries are bytes in a unit that makes the slack 255, and are
rounded down.

**Dominance.** Let A and B be labels of one layer with m requests placed, of cost F_A and F_B in
rounds. Let A pass k more rounds, so that its cost is F_A + k m <= F_B. Let w_A(j) be A's tokens j
rounds earlier. Then A deletes B if

1. w_A(k + j) <= w_B(j) for all j >= 0;
2. A's clock after the k rounds equals B's. If neither has a clock, the round at which A may join
   the clock is then no later than B's. A label without a clock may pass rounds, then join, then
   pass more. If only A has a clock, it deletes nothing;
3. A and B have placed the same requests, or A has placed i where B has placed j, with i at least j
   in peak, output and earliest completion (arrival + output).

*Proof.* Take a completion of B: the rounds before now in which the others are placed. A passes k
rounds and then does the same, with j where B places i. By 1 the tokens of those placed before are
no more than B's, and by 3 those of j are at each round at most those of i: p_j - x <= p_i - x,
over a shorter run. So all fits. By 2 the clocks agree, so that each request completes as late as in
B's schedule, and j may complete wherever i may. The steps left are the same, with the same numbers
placed, or fewer if the start of the schedule became empty. So A has a completion of at most B's
total.

*No circle.* Labels are deleted one after another, each by a label that is there at that moment. Of
a label that is deleted follow the one that deleted it, and so on. The moments ascend, so this ends
at a label that stays. If any label of a layer has a completion below the target, so has one that
stays. The next label of this schedule is made in the next layer, because its path is in the graph.

**Rounds with nothing live.** Without a clock they cost m and change nothing, unless the label has
to wait to join the clock. In all other cases they are not followed: without them the schedule is
better, and a best completion has none.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.optimize.ramp.graph import INFINITE, Interrupted, label_costs
from optsched.optimize.ramp.relaxation import Relaxation

MAX_OUTPUT = 1024
"""The max rounds of a run, since a label holds its tokens for each round from now."""
MAX_COPIES = 255
"""The max number of equal requests."""
_BYTES = 2**29
"""The max bytes of one layer."""
_CHUNK = 1024
"""The number of labels that are followed before the stop flag is looked at."""
_TOP = 255
"""An entry of the tables that is beyond the cutoff."""
_STACK = 4096
"""The max number of chains of rounds that wait to be followed from one label."""
_DONE, _FULL = 0, 1
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


class _Graph(NamedTuple):
    """The graph, what its paths cost, the cost above which they do not matter, and the tables."""

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
    table: Any
    unit: Any


class _Kinds(NamedTuple):
    """The kinds of requests, the capacity, and the round at which paths join the clock."""

    cost: Any
    copies: Any
    peak: Any
    output: Any
    ready: Any
    larger: Any  # by kind, those that are at least as large, the nearest first, then -1
    sign: Any  # random numbers, whose sum over the placed requests is a label's key
    capacity: Any
    clock: Any


class _Layer(NamedTuple):
    """Labels after so many placements, by row."""

    node: Any
    rounds: Any  # cost in rounds
    clock: Any  # the present round, or -1 without a clock
    need: Any  # the least clock at which the label may join
    rest: Any  # how many of each kind are left
    tokens: Any  # live tokens now, one round earlier, ...
    key: Any
    after: Any  # the next row of the same key
    kept: Any
    parent: Any
    kind: Any
    passed: Any  # rounds since the placement before
    count: Any  # rows; rows kept


class _Scratch(NamedTuple):
    """A hash table of the keys of a layer, and what is used while one label is followed."""

    slots: Any
    stack: Any
    never: Any  # by kind, 255 where none is left
    once: Any  # by kind, 255 where one is left


@njit(cache=True, nogil=True)
def _counter_tables(
    graph: _Graph, value: Any, second: Any, kind: Any, cost: Any, out: Any
) -> None:  # fmt: skip
    """Fill in the tables of single counters, from the end backward.

    ``value`` is the least cost of each label and ``kind`` has it; ``second`` is the least cost of
    the label's other kinds.
    """
    kinds = cost.shape[0]
    nodes = graph.backward.shape[0]
    never = np.empty(kinds, dtype=np.int32)
    once = np.empty(kinds, dtype=np.int32)
    step = np.int32(graph.unit)
    most = np.int32(_TOP * graph.unit)
    out[nodes - 1, 0, :] = 0
    out[nodes - 1, 1, :] = _TOP
    for u in range(nodes - 2, -1, -1):
        never[:] = most
        once[:] = most
        here = np.int64(graph.backward[u])
        for a in range(graph.arc_start[u], graph.arc_start[u + 1]):
            v, label = graph.arc_target[a], graph.arc_label[a]
            more = np.int64(graph.backward[v]) - here
            if here >= INFINITE or graph.backward[v] >= INFINITE or more + value[label] >= most:
                continue
            add = np.int32(more + value[label])
            best = kind[label]
            if best >= 0:
                other = min(more + second[label], np.int64(most))
                without = min(np.int64(never[best]), other + step * np.int64(out[v, 0, best]))
                later = min(np.int64(once[best]), other + step * np.int64(out[v, 1, best]))
            for k in range(kinds):
                never[k] = min(never[k], add + step * np.int32(out[v, 0, k]))
                once[k] = min(once[k], add + step * np.int32(out[v, 1, k]))
            if best >= 0:
                never[best], once[best] = without, later
                bits = graph.mask[label]
                k = 0
                while bits != _ZERO:
                    if bits & _ONE:
                        now = more + cost[k] + step * np.int64(out[v, 0, k])
                        once[k] = min(np.int64(once[k]), now)
                    bits >>= _ONE
                    k += 1
        for k in range(kinds):
            out[u, 0, k] = never[k] // step
            out[u, 1, k] = once[k] // step


@njit(cache=True, nogil=True)
def _second_costs(mask: Any, kind: Any, cost: Any) -> Any:
    """Return the least cost of each label's kinds without the one of least cost."""
    second = np.full(kind.shape[0], INFINITE, dtype=np.int64)
    for label in range(kind.shape[0]):
        for k in range(cost.shape[0]):
            if (mask[label] >> np.uint64(k)) & _ONE and k != kind[label]:
                second[label] = min(second[label], cost[k])
    return second


@njit(cache=True, nogil=True, inline="always")
def _extra(node: int, graph: _Graph, scratch: _Scratch) -> Any:
    """Return what the tables add to the cost to the end for what is left of each kind."""
    best = np.uint8(0)
    for k in range(scratch.never.shape[0]):
        entry = (graph.table[node, 0, k] & scratch.never[k]) | (
            graph.table[node, 1, k] & scratch.once[k]
        )
        best = entry if entry > best else best
    return np.int64(best) * graph.unit


@njit(cache=True, nogil=True, inline="always")
def _left(k: int, rest: Any, scratch: _Scratch) -> None:
    """Note how many of kind k are left."""
    scratch.never[k] = 255 if rest == 0 else 0
    scratch.once[k] = 255 if rest == 1 else 0


@njit(cache=True, nogil=True, inline="always")
def _waits(a: int, b: int, m: int, layer: _Layer, join: int) -> Any:
    """Return the rounds that label a passes to be where label b is, or -1 if it cannot."""
    spare = np.int64(layer.rounds[b]) - layer.rounds[a]
    waits = spare // m
    need = np.int64(layer.need[a])
    if spare < 0:
        waits = -1
    elif layer.clock[a] >= 0:
        exact = np.int64(layer.clock[a]) - layer.clock[b]
        waits = exact if layer.clock[b] >= 0 and 0 <= exact <= waits else -1
    elif layer.clock[b] >= 0:
        before = waits - (join - layer.clock[b])  # rounds before the label joins
        waits = waits if before >= 0 and need - before <= join else -1
    elif max(need - waits, join) > layer.need[b]:
        waits = -1
    return waits


@njit(cache=True, nogil=True, inline="always")
def _dominates(a: int, b: int, m: int, layer: _Layer, join: int) -> bool:
    """Whether conditions 1 and 2 of the module's text hold for some number of rounds."""
    waits = _waits(a, b, m, layer, join)
    width = layer.tokens.shape[1]
    below = waits >= 0
    j = 0
    while below and j + waits < width:
        below = layer.tokens[a, j + waits] <= layer.tokens[b, j]
        j += 1
    return below


@njit(cache=True, nogil=True, inline="always")
def _left_alike(a: int, b: int, j: int, i: int, layer: _Layer) -> bool:
    """Whether the same is left of labels a and b, but one more of kind j and one less of i."""
    alike = True
    for k in range(layer.rest.shape[1]):
        alike &= layer.rest[a, k] == layer.rest[b, k] + (k == j) - (k == i)
    return alike


@njit(cache=True, nogil=True, inline="always")
def _slot(key: Any, layer: _Layer, slots: Any) -> Any:
    """Return the slot of the labels with a key, or the empty one where they would be."""
    last = np.uint64(slots.shape[0] - 1)
    at = (key ^ (key >> np.uint64(29))) & last
    while slots[at] >= 0 and layer.key[slots[at]] != key:
        at = (at + _ONE) & last
    return np.int64(at)


@njit(cache=True, nogil=True, inline="always")
def _enter(m: int, layer: _Layer, kinds: _Kinds, slots: Any) -> None:
    """Keep the label in the row after the last one, unless another deletes it.

    Those that it deletes are no longer kept.
    """
    new = layer.count[0]
    at = _slot(layer.key[new], layer, slots)
    row = slots[at]
    wanted = True
    while row >= 0 and wanted:
        if layer.kept[row] and _left_alike(row, new, -1, -1, layer):
            if _dominates(row, new, m, layer, kinds.clock):
                wanted = False
            elif _dominates(new, row, m, layer, kinds.clock):
                layer.kept[row] = False
                layer.count[1] -= 1
        row = layer.after[row]
    if wanted:
        layer.after[new] = slots[at]
        slots[at] = new
        layer.kept[new] = True
        layer.count[0] += 1
        layer.count[1] += 1


@njit(cache=True, nogil=True, inline="always")
def _write(
    e: int, v: int, k: int, so_far: Any, old: _Layer, new: _Layer, kinds: _Kinds
) -> None:  # fmt: skip
    """Write the label that places kind k after label e into the row after the last one."""
    cost, passed, clock = so_far
    at = new.count[0]
    new.node[at], new.rounds[at], new.clock[at] = v, cost, clock
    need = max(np.int64(old.need[e]) - passed, kinds.clock)
    new.need[at] = max(need, kinds.ready[k]) if clock < 0 else need
    for j in range(kinds.copies.shape[0]):
        new.rest[at, j] = old.rest[e, j]
    new.rest[at, k] -= 1
    width = new.tokens.shape[1]
    for j in range(width):
        new.tokens[at, j] = old.tokens[e, j + passed] if j + passed < width else 0
    for j in range(kinds.output[k]):
        new.tokens[at, j] += kinds.peak[k] - j
    new.key[at] = old.key[e] + kinds.sign[k]
    new.parent[at], new.kind[at], new.passed[at] = e, k, passed


@njit(cache=True, nogil=True, inline="always")
def _place(
    e: int, a: int, so_far: Any, m: int, old: _Layer, new: _Layer, graph: _Graph, kinds: _Kinds,
    scratch: _Scratch
) -> int:  # fmt: skip
    """Make the labels that place a request by arc a, some rounds after label e."""
    cost, passed, reduced, clock = so_far
    v = graph.arc_target[a]
    spare = graph.cutoff - reduced - graph.backward[v]
    room = np.int64(kinds.capacity)
    if passed < old.tokens.shape[1]:
        room -= old.tokens[e, passed]
    bits = graph.mask[graph.arc_label[a]]
    k = -1
    while bits != _ZERO:
        k += 1
        take = bits & _ONE
        bits >>= _ONE
        rest = old.rest[e, k]
        if not take or rest == 0 or kinds.peak[k] > room or kinds.cost[k] > spare:
            continue
        _left(k, rest - 1, scratch)
        extra = _extra(v, graph, scratch)
        _left(k, rest, scratch)
        if kinds.cost[k] + extra > spare:
            continue
        if new.count[0] == new.node.shape[0]:
            return _FULL
        _write(e, v, k, (cost, passed, clock), old, new, kinds)
        _enter(m + 1, new, kinds, scratch.slots)
    return _DONE


@njit(cache=True, nogil=True, inline="always")
def _follow(
    e: int, m: int, old: _Layer, new: _Layer, graph: _Graph, kinds: _Kinds, scratch: _Scratch
) -> int:  # fmt: skip
    """Make the labels that follow label e, after any number of rounds and a join or none."""
    placed = np.int64(0)
    for k in range(kinds.cost.shape[0]):
        placed += (kinds.copies[k] - old.rest[e, k]) * kinds.cost[k]
        _left(k, old.rest[e, k], scratch)
    stack = scratch.stack
    stack[0, 0], stack[0, 1], stack[0, 2] = old.node[e], 0, old.clock[e]
    depth = 1
    while depth > 0:
        depth -= 1
        node, passed, clock = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        while node >= 0:
            cost = np.int64(old.rounds[e]) + passed * m
            reduced = cost * graph.scale + placed
            spare = graph.cutoff - reduced - graph.backward[node]
            if spare < 0 or _extra(node, graph, scratch) > spare:
                break
            waiting = clock < 0 and old.need[e] - passed > kinds.clock
            onward = np.int64(-1)
            for a in range(graph.arc_start[node], graph.arc_start[node + 1]):
                v, label = graph.arc_target[a], graph.arc_label[a]
                if label < graph.join:
                    onward = v
                elif label == graph.join and not waiting:
                    if depth == stack.shape[0]:
                        return _FULL
                    stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, passed, kinds.clock
                    depth += 1
                elif label >= graph.first_mask and graph.backward[v] < INFINITE:
                    so_far = cost, passed, reduced, clock
                    if _place(e, a, so_far, m, old, new, graph, kinds, scratch) == _FULL:
                        return _FULL
            live = passed < old.tokens.shape[1] and old.tokens[e, passed] > 0
            if onward < 0 and graph.loop[node] >= 0 and (live or waiting):
                onward = np.int64(node)
            node = onward
            passed += 1
            clock = clock - 1 if clock >= 0 else clock
    return _DONE


@njit(cache=True, nogil=True)
def _follow_all(
    rows: Any, m: int, old: _Layer, new: _Layer, graph: _Graph, kinds: _Kinds, scratch: _Scratch
) -> int:  # fmt: skip
    """Make the labels that follow those in some rows."""
    for e in rows:
        if _follow(e, m, old, new, graph, kinds, scratch) == _FULL:
            return _FULL
    return _DONE


@njit(cache=True, nogil=True)
def _swap(m: int, layer: _Layer, kinds: _Kinds, slots: Any) -> None:
    """Delete labels by those that placed a larger request instead of one of theirs.

    Only the nearest larger one that is left is tried: others delete next to nothing more.
    """
    number = kinds.copies.shape[0]
    rest = layer.rest
    for b in range(layer.count[0]):
        for j in range(number):
            if not layer.kept[b]:
                break
            if rest[b, j] == kinds.copies[j]:
                continue
            i = 0
            while i < number and kinds.larger[j, i] >= 0 and rest[b, kinds.larger[j, i]] == 0:
                i += 1
            if i == number or kinds.larger[j, i] < 0:
                continue
            i = kinds.larger[j, i]
            a = slots[_slot(layer.key[b] - kinds.sign[j] + kinds.sign[i], layer, slots)]
            while a >= 0 and layer.kept[b]:
                if (
                    layer.kept[a]
                    and _dominates(a, b, m, layer, kinds.clock)
                    and _left_alike(a, b, j, i, layer)
                ):
                    layer.kept[b] = False
                    layer.count[1] -= 1
                a = layer.after[a]


def counter_tables(relaxation: Relaxation) -> tuple[NDArray[np.uint8], int]:
    """Return the tables of single counters, and the unit of their entries.

    Parameters
    ----------
    relaxation : Relaxation

    Returns
    -------
    table : ndarray of uint8, shape (nodes, 2, kinds)
        By node, placed never (0) or once (1), and kind: see the module's text.
    unit : int
    """
    r, labels = relaxation, relaxation.labels
    count = int(labels.count[0])
    value, kind = label_costs(labels.mask, labels.fixed, count, labels.first_mask, -r.pi, r.scale)
    second = _second_costs(labels.mask[:count], kind, -r.pi)
    unit = max(0, r.cutoff - int(r.backward[0])) // _TOP + 1
    out = np.empty((r.graph.nodes, 2, len(r.copies)), dtype=np.uint8)
    _counter_tables(_graph(r, out, unit), value, second, kind, -r.pi, out)
    return out, unit


def _graph(relaxation: Relaxation, table: NDArray[np.uint8], unit: int) -> _Graph:
    r, graph, labels = relaxation, relaxation.graph, relaxation.labels
    return _Graph(
        graph.arc_start, graph.arc_target, graph.arc_label, graph.loop, r.backward, labels.mask,
        labels.join, labels.first_mask, r.scale, r.cutoff, table, unit,
    )  # fmt: skip


def _kinds(relaxation: Relaxation) -> _Kinds:
    r = relaxation
    output = r.peak - r.floor + 1
    ready = r.ready if r.jobs.arrival.any() else np.zeros_like(r.ready)
    sizes = np.stack([r.peak, output, ready])
    larger = np.all(sizes[:, :, None] <= sizes[:, None, :], axis=0)
    larger &= ~np.eye(len(r.copies), dtype=bool)
    away = np.abs(sizes[:, :, None] - sizes[:, None, :]).sum(axis=0)
    order = np.argsort(np.where(larger, away, np.iinfo(np.int64).max), axis=1, kind="stable")
    larger = np.where(np.take_along_axis(larger, order, axis=1), order, -1)
    sign = np.random.default_rng(0).integers(0, 2**64, len(r.copies), dtype=np.uint64)
    return _Kinds(
        -r.pi, r.copies, r.peak, output, ready, larger, sign, r.jobs.capacity, r.clock
    )  # fmt: skip


def _new_layer(rows: int, kinds: int, width: int) -> _Layer:
    """Return an empty layer. Memory is taken only for rows that are written."""
    small = [np.empty(rows, dtype=np.int32) for _ in range(8)]
    return _Layer(
        node=small[0],
        rounds=small[1],
        clock=small[2],
        need=small[3],
        rest=np.empty((rows, kinds), dtype=np.uint8),
        tokens=np.empty((rows, width), dtype=np.int32),
        key=np.empty(rows, dtype=np.uint64),
        after=small[4],
        kept=np.empty(rows, dtype=np.bool_),
        parent=small[5],
        kind=small[6],
        passed=small[7],
        count=np.zeros(2, dtype=np.int64),
    )


def _root(layer: _Layer, kinds: _Kinds) -> None:
    """Make a layer that has the root only."""
    layer.node[0] = layer.rounds[0] = layer.key[0] = 0
    layer.clock[0], layer.need[0] = -1, kinds.clock
    layer.rest[0], layer.tokens[0] = kinds.copies, 0
    layer.kept[0] = True
    layer.count[:] = 1


def refused(relaxation: Relaxation) -> str:
    """Return why schedules cannot be enumerated.

    Parameters
    ----------
    relaxation : Relaxation

    Returns
    -------
    str
        One line, or an empty string if they can.
    """
    r, jobs = relaxation, relaxation.jobs
    own = np.stack([jobs.arrival + jobs.output, jobs.peak, jobs.first_kv])
    if np.unique(own, axis=1).shape[1] > len(r.copies):
        return "found kinds of requests that were merged; expected none"
    if jobs.arrival.any() and not r.clock:
        return "found arrivals but no clock; expected a clock of a round or more"
    if jobs.output.max() > MAX_OUTPUT:
        return f"found an output of {jobs.output.max()} tokens; expected at most {MAX_OUTPUT}"
    if r.copies.max() > MAX_COPIES:
        return f"found {r.copies.max()} equal requests; expected at most {MAX_COPIES}"
    return ""


@dataclass(frozen=True, eq=False)
class Finished:
    """What the enumeration has shown.

    Parameters
    ----------
    bound : int
        No schedule has a lower total latency, in rounds.
    starts : ndarray of int64, shape (n,), or None
        A schedule of that value, unless the bound is the target.
    labels : list of int
        The number of labels that were kept, by layer.
    """

    bound: int
    starts: NDArray[np.int64] | None
    labels: list[int]


def finish(relaxation: Relaxation, most: int) -> Finished | None:
    """Enumerate all schedules whose total latency is below ``relaxation.upper``.

    Parameters
    ----------
    relaxation : Relaxation
        With multipliers for its graph (`Relaxation.ascend`), and not `refused`.
    most : int
        The max number of labels.

    Returns
    -------
    Finished or None
        None if there are more labels.

    Raises
    ------
    Interrupted
        The stop flag was set.
    """
    r, jobs, upper = relaxation, relaxation.jobs, relaxation.upper
    kinds = _kinds(r)
    graph = _graph(r, *counter_tables(r))
    width = int(kinds.output.max())
    rows = max(2, min(most, _BYTES // (48 + len(r.copies) + 4 * width)))
    old, new = (_new_layer(rows, len(r.copies), width) for _ in range(2))
    scratch = _Scratch(
        slots=np.empty(1 << (2 * rows - 1).bit_length(), dtype=np.int32),
        stack=np.empty((_STACK, 3), dtype=np.int64),
        never=np.zeros(len(r.copies), dtype=np.uint8),
        once=np.zeros(len(r.copies), dtype=np.uint8),
    )
    _root(old, kinds)
    steps, labels = [], []
    for m in range(jobs.n):
        new.count[:] = 0
        scratch.slots[:] = -1
        kept = np.flatnonzero(old.kept[: old.count[0]])
        for begin in range(0, len(kept), _CHUNK):
            if r.stop[0]:
                raise Interrupted
            some = kept[begin : begin + _CHUNK]
            if _follow_all(some, m, old, new, graph, kinds, scratch) == _FULL:
                return None
        _swap(m + 1, new, kinds, scratch.slots)
        made = slice(int(new.count[0]))
        steps.append([a[made].copy() for a in (new.parent, new.kind, new.passed)])
        labels.append(int(new.count[1]))
        if sum(labels) > most:
            return None
        if not labels[-1]:
            return Finished(upper, None, labels)
        old, new = new, old
    return _best(r, old, steps, labels)


def _best(r: Relaxation, layer: _Layer, steps: list[Any], labels: list[int]) -> Finished:
    """Return what the last layer shows: its labels are schedules."""
    made = slice(int(layer.count[0]))
    live = (layer.tokens[made] > 0).sum(axis=1)
    since = layer.clock[made].astype(np.int64)  # rounds from the start to the last placement
    since = np.where(since < 0, np.maximum(layer.need[made], live), since)
    total = layer.rounds[made] + r.jobs.n * since - r.latency_offset
    total[~layer.kept[made]] = np.iinfo(np.int64).max
    at = int(np.argmin(total))
    if total[at] >= r.upper:
        return Finished(r.upper, None, labels)
    kinds, passed = np.empty((2, r.jobs.n), dtype=np.int64)
    for m in range(r.jobs.n - 1, -1, -1):
        kinds[m], passed[m] = steps[m][1][at], steps[m][2][at]
        at = int(steps[m][0][at])
    starts = r.starts(kinds, np.cumsum(passed))
    return Finished(r.jobs.total(starts), starts, labels)
