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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.finish_kernel import (
    FULL,
    TOP,
    Kinds,
    Layer,
    Paths,
    Scratch,
    fill_tables,
    follow,
    second_costs,
    swap,
)
from optsched.optimize.ramp.graph import Interrupted, label_costs
from optsched.optimize.ramp.relaxation import Relaxation

MAX_OUTPUT = 1024
"""The max rounds of a run, since a label holds its tokens for each round from now."""
MAX_COPIES = 255
"""The max number of equal requests."""
_BYTES = 2**29
"""The max bytes of one layer."""
_CHUNK = 1024
"""The number of labels that are followed before the stop flag is looked at."""
_STACK = 4096
"""The max number of chains of rounds that wait to be followed from one label."""


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
    second = second_costs(labels.mask[:count], kind, -r.pi)
    unit = max(0, r.cutoff - int(r.backward[0])) // TOP + 1
    out = np.empty((r.graph.nodes, 2, len(r.copies)), dtype=np.uint8)
    fill_tables(_paths(r, out, unit), value, second, kind, -r.pi, out)
    return out, unit


def _paths(relaxation: Relaxation, table: NDArray[np.uint8], unit: int) -> Paths:
    r, graph, labels = relaxation, relaxation.graph, relaxation.labels
    return Paths(
        graph.arc_start, graph.arc_target, graph.arc_label, graph.loop, r.backward, labels.mask,
        labels.join, labels.first_mask, r.scale, r.cutoff, table, unit,
    )  # fmt: skip


def _kinds(relaxation: Relaxation) -> Kinds:
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
    return Kinds(
        -r.pi, r.copies, r.peak, output, ready, larger, sign, r.jobs.capacity, r.clock
    )  # fmt: skip


def _new_layer(rows: int, kinds: int, width: int) -> Layer:
    """Return an empty layer. Memory is taken only for rows that are written."""
    small = [np.empty(rows, dtype=np.int32) for _ in range(8)]
    return Layer(
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


def _root(layer: Layer, kinds: Kinds) -> None:
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


def finish(relaxation: Relaxation, most: int) -> None:
    """Enumerate the schedules below ``relaxation.upper``, and give it the bound that this shows.

    It does nothing where enumeration is `refused`, or where there are more labels than allowed.

    Parameters
    ----------
    relaxation : Relaxation
        With multipliers for its graph (`Relaxation.ascend`).
    most : int
        The max number of labels.

    Raises
    ------
    Interrupted
        The stop flag was set.
    """
    if relaxation.graph is None or relaxation.closed or refused(relaxation):
        return
    shown = enumerate_below(relaxation, most)
    if shown is not None:
        relaxation.enumerated(shown.bound, shown.starts)


def enumerate_below(relaxation: Relaxation, most: int) -> Finished | None:
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
    graph = _paths(r, *counter_tables(r))
    width = int(kinds.output.max())
    rows = max(2, min(most, _BYTES // (48 + len(r.copies) + 4 * width)))
    old, new = (_new_layer(rows, len(r.copies), width) for _ in range(2))
    scratch = Scratch(
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
            if follow(some, m, old, new, graph, kinds, scratch) == FULL:
                return None
        swap(m + 1, new, kinds, scratch.slots)
        made = slice(int(new.count[0]))
        steps.append([a[made].copy() for a in (new.parent, new.kind, new.passed)])
        labels.append(int(new.count[1]))
        if sum(labels) > most:
            return None
        if not labels[-1]:
            return Finished(upper, None, labels)
        old, new = new, old
    return _best(r, old, steps, labels)


def _best(r: Relaxation, layer: Layer, steps: list[Any], labels: list[int]) -> Finished:
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
