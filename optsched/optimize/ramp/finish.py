"""Finishing a proof by enumeration: every schedule below a target, placement by placement.

Once the graph of `optsched.optimize.ramp.relaxation` is small, its paths can be followed with exact
memory. A **label** is a graph node together with the requests placed on the way there and the
tokens of the live ones in this and each earlier round. Labels are made layer by layer: after one
placement, after two, and so on. A placement that a schedule cannot make is left out: of a request
that is placed already, one that does not fit, one before its arrival. If no label is left, no
schedule is below the target. The labels of the last layer are schedules.

**Every schedule below the target is in the graph**, since the graph lost only paths that cost the
target or more. So labels and bounds may use the graph, and dominance may argue with schedules.

**Counters.** A label costs at least the graph's cost to the end, and what this rises by if a few
kinds of requests are placed exactly as often as they are left: `optsched.optimize.ramp.counters`.

**Dominance.** Let A and B be labels of one layer with m requests placed, of cost F_A and F_B in
rounds. Let A pass k more rounds, so that its cost is F_A + k m <= F_B. Let w_A(j) be A's tokens j
rounds earlier. Then A deletes B if

1. w_A(k + j) <= w_B(j) for all j >= 0;
2. A's clock after the k rounds equals B's. If neither has a clock, A's need after the k rounds is
   at most B's. The need of a label without a clock is the least round at which it may join the
   clock: max over the requests placed of (arrival + output, less the rounds passed since), and at
   least the first round of the clock. A round that passes lowers it by one. A label without a clock
   may pass rounds, then join, then pass more. If only A has a clock, it deletes nothing;
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

**Targets from below.** The labels below a target grow exponentially with it. So targets are proved
one above another (`finish`): the first costs next to nothing, each is a bound, and they say how far
the labels that are allowed will reach.

**A share of the labels.** If only the best labels of each layer are kept (`samples`), nothing is
proved, but what remains in the last layer is a schedule. The best are those that may be completed
at the least cost, by the graph and counters. While a layer is made, a limit on this cost
falls, so that labels which would not be kept are not written.

**Rounds with nothing live.** Without a clock they cost m and change nothing, unless the label has
to wait to join the clock. In all other cases they are not followed: without them the schedule is
better, and a best completion has none.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.counters import Counters, costs_of, counters_of
from optsched.optimize.ramp.finish_kernel import (
    ABOUT,
    CLOCK,
    FEW_SLOTS,
    FOUND,
    FULL,
    NEED,
    NODE,
    PARENT,
    PASSED,
    ROUNDS,
    Kinds,
    Layer,
    Scratch,
    arcs_above,
    estimate,
    follow,
    swap,
)
from optsched.optimize.ramp.graph import Interrupted, Paths
from optsched.optimize.ramp.relaxation import Relaxation

MAX_OUTPUT = 1024
"""The max rounds of a run, since a label holds its tokens for each round from now."""
MAX_COPIES = 255
"""The max number of equal requests."""
_BYTES = 2**29
"""The max bytes of one layer."""
_CHUNK = 1024
"""The number of labels that are followed before the stop flag is looked at."""
WIDER = 3
"""The factor from the width of one part of the labels to that of the next."""
_WIDTH, _NODES_PER_WIDTH = 300, 100
"""The max labels of a layer of the first part. It is one per so many nodes in the last part."""
LABELS_PER_S = 60_000
"""How many labels are made in a second, roughly."""
_MAX_LABELS = 50_000_000
"""The max number of labels of one target."""
_FIRST, _NEAR = 4, 125
"""The first target is the bound of the graph and one part in so many of the gap, or of one part in
so many of the bound if that is less. It is low enough to cost next to nothing, even if it is below
what is proved already: the number of its labels says how far more labels will reach."""
_AHEAD = 12.0
"""The factor by which labels may grow from one target to the next."""
_SHARE, _MORE = 0.5, 1.5
"""A target takes at most this share of the labels left. It is proved only if it may take so many
times the labels of the target before: to prepare the next one takes longer than the labels."""
_TELLING = 500
"""With more labels than this, two targets say how far the labels allowed will reach."""
_NODES_PER_LABEL = 20
"""To prepare the enumeration takes as long for so many nodes as one label takes."""
_SURE, _DOUBT = 0.05, 1.5
"""After this share of the labels, it ends if so many times as many as allowed are predicted."""
_CANDIDATES = 3
"""The number of labels, per label that a layer may keep, after which the limit falls."""
_BUCKETS = 4096
"""The number of buckets of estimates."""
_STACK = 4096
"""The max number of chains of rounds that wait to be followed from one label."""
_PLACEMENTS = 65536
"""The max number of placements that are tried after one label."""


def paths_of(relaxation: Relaxation) -> Paths:
    """Return the graph of a relaxation for compiled loops.

    Parameters
    ----------
    relaxation : Relaxation
    """
    r, period = relaxation, relaxation.period
    return Paths(
        *r.arcs, period.graph.loop, r.backward, period.labels.mask, period.join, period.fixed,
        r.scale, r.cutoff,
    )  # fmt: skip


def kinds_of(relaxation: Relaxation) -> Kinds:
    """Return the kinds of a relaxation for compiled loops.

    Parameters
    ----------
    relaxation : Relaxation
    """
    r = relaxation
    output = r.peak - r.floor + 1
    ready = r.ready if r.jobs.arrival.any() else np.zeros_like(r.ready)
    sizes = np.stack([r.peak, output, ready])
    larger = np.all(sizes[:, :, None] <= sizes[:, None, :], axis=0)
    larger &= ~np.eye(len(r.copies), dtype=bool)
    away = np.abs(sizes[:, :, None] - sizes[:, None, :]).sum(axis=0)
    order = np.argsort(np.where(larger, away, np.iinfo(np.int64).max), axis=1, kind="stable")
    larger = np.where(np.take_along_axis(larger, order, axis=1), order, -1)
    sign = np.random.default_rng(0).integers(-(2**63), 2**63, len(r.copies))
    return Kinds(
        -r.pi, r.copies, r.peak, output, ready, larger, sign, r.jobs.capacity, r.clock
    )  # fmt: skip


def _new_layer(rows: int, kinds: Kinds) -> Layer:
    """Return an empty layer. Memory is taken only for rows that are written."""
    tokens = np.uint8 if kinds.capacity <= np.iinfo(np.uint8).max else np.int32
    return Layer(
        about=np.empty((rows, ABOUT), dtype=np.int32),
        rest=np.empty((rows, len(kinds.copies)), dtype=np.uint8),
        tokens=np.empty((rows, int(kinds.output.max())), dtype=tokens),
        key=np.empty(rows, dtype=np.int64),
        kept=np.empty(rows, dtype=np.bool_),
        slots=np.empty(max(FEW_SLOTS, 1 << (2 * rows).bit_length()), dtype=np.int64),
        count=np.zeros(3, dtype=np.int64),
    )


def _row_bytes(kinds: Kinds) -> int:
    """Return the bytes of a label."""
    return sum(a.nbytes // len(a) for a in _new_layer(1, kinds)[:-2])


def _runs(kinds: Kinds) -> NDArray[np.int64]:
    """Return the tokens of each kind when it completes, one round earlier, and so on."""
    rounds = np.arange(kinds.output.max())
    return np.where(rounds < kinds.output[:, None], kinds.peak[:, None] - rounds, 0)


def _clear(layer: Layer) -> None:
    """Make a layer empty."""
    layer.count[:] = 0, 0, FEW_SLOTS
    layer.slots[:FEW_SLOTS] = -1


def _root(layer: Layer, kinds: Kinds) -> None:
    """Make a layer that has the root only."""
    layer.about[0, [NODE, ROUNDS, CLOCK, NEED]] = 0, 0, -1, kinds.clock
    layer.rest[0], layer.tokens[0], layer.key[0] = kinds.copies, 0, 0
    layer.kept[0] = True
    layer.count[:2] = 1


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


def finish(
    relaxation: Relaxation,
    most: float,
    over: Callable[[], bool] | None = None,
    at_end: float = 0,
) -> None:
    """Prove targets by enumeration, one above another, as far as ``relaxation.upper``.

    The number of labels grows exponentially with the target. So the first targets cost next to
    nothing, they say how far the labels allowed will reach, and each of them is a bound. Nothing
    happens where enumeration is `refused`.

    Parameters
    ----------
    relaxation : Relaxation
        With multipliers for its graph (`Relaxation.ascend`).
    most : float
        The max number of labels of all targets together.
    over : callable, optional
        Whether to end early.
    at_end : float
        The max number of labels if they are expected to prove ``relaxation.upper``.

    Raises
    ------
    Interrupted
        The stop flag was set.
    """
    if relaxation.graph is None or relaxation.closed or refused(relaxation):
        return
    plain, spent, part = relaxation.graph_bound, 0.0, None
    # Better multipliers may have passed targets of before. These say nothing of the next ones.
    relaxation.shown = [(to, f) for to, f in relaxation.shown if to > plain]
    while not (relaxation.closed or (over is not None and over())):
        shown = relaxation.shown[-1][1] if relaxation.shown else None
        if shown is None:
            near = min(relaxation.upper - plain, plain // _NEAR)
            target = plain + max(1, -(-near // _FIRST))
        else:
            before = max(2, sum(shown.labels))
            if reach(relaxation, _SHARE * (at_end - spent)) >= relaxation.upper:
                most = max(most, at_end)
            room = min(_AHEAD * before, _SHARE * (most - spent))
            target = reach(relaxation, room)
            if room < _MORE * before:
                return
            if before > _TELLING and reach(relaxation, _SHARE * (most - spent)) <= relaxation.bound:
                return  # more than is proved will not be shown
        target = min(target, relaxation.upper)
        part = relaxation.below(target, part)
        relaxation.take(part)  # its multipliers alone may have shown more
        if part.closed:
            shown = Finished(target, None, [])
        else:
            spent += part.graph.nodes / _NODES_PER_LABEL
            if most - spent < 1:
                return
            allowed = int(min(most - spent, _MAX_LABELS))
            shown = enumerate_below(part, allowed, like=shown, over=over)
            if shown is None:
                return
            part.enumerated(shown.bound, shown.starts)
            spent += sum(shown.labels)
        relaxation.shown.append((target, shown))
        relaxation.take(part)


def reach(relaxation: Relaxation, labels: float) -> int:
    """Return the target that so many labels are expected to prove, from those proved.

    Parameters
    ----------
    relaxation : Relaxation
        Nothing is expected beyond its graph's bound before a target has been proved.
    labels : float
    """
    points = [(relaxation.graph_bound, 0.0)]
    points += [(to, math.log(max(2, sum(f.labels)))) for to, f in relaxation.shown[-2:]]
    (near, few), (far, many) = points[0], points[-1]
    if len(points) > 2:
        near, few = points[-2]
    if far <= near or labels < 2:
        return far
    slope = max(many - few, 1.0) / (far - near)
    return far + max(1, int((math.log(labels) - many) / slope))


def samples(
    relaxation: Relaxation, over: Callable[[], bool] | None = None
) -> Iterator[NDArray[np.int64] | None]:
    """Follow a part of the labels, then a larger one, and so on.

    Parameters
    ----------
    relaxation : Relaxation
        With multipliers for its graph (`Relaxation.ascend`), and not `refused`.
    over : callable, optional
        Whether to end early.

    Yields
    ------
    ndarray of int64, shape (n,), or None
        At first None, when the tables are there, which all parts share. Then the starts of a
        schedule below ``relaxation.upper``, if a part has one.

    Raises
    ------
    Interrupted
        The stop flag was set.
    """
    counters = counters_of(relaxation, paths_of(relaxation), costs_of(relaxation), over)
    yield None
    width, widest = _WIDTH, max(_WIDTH, relaxation.graph.nodes // _NODES_PER_WIDTH)
    while width <= widest and not relaxation.closed:
        most = 10 * width * relaxation.jobs.n
        shown = enumerate_below(relaxation, most, width=width, counters=counters, over=over)
        yield None if shown is None else shown.starts
        width *= WIDER


def enumerate_below(
    relaxation: Relaxation,
    most: int,
    *,
    width: int | None = None,
    counters: Counters | None = None,
    like: Finished | None = None,
    over: Callable[[], bool] | None = None,
) -> Finished | None:
    """Enumerate the schedules whose total latency is below ``relaxation.upper``.

    Parameters
    ----------
    relaxation : Relaxation
        With multipliers for its graph (`Relaxation.ascend`), and not `refused`.
    most : int
        The max number of labels.
    width : int, optional
        The max number of labels of a layer. Those of the least cost to be expected are kept, so
        that a schedule may be found but no bound is shown. Default: all.
    counters : Counters, optional
        What `counters_of` returns for this graph and these multipliers.
    like : Finished, optional
        What a lower target has shown. The number of labels is predicted from it, so that the
        enumeration ends early if they will be too many.
    over : callable, optional
        Whether to end early.

    Returns
    -------
    Finished or None
        None if there are more labels, or it ended early.

    Raises
    ------
    Interrupted
        The stop flag was set.
    """
    r, jobs, upper = relaxation, relaxation.jobs, relaxation.upper
    kinds, graph = kinds_of(r), paths_of(r)
    costs = costs_of(r)
    counters = counters or counters_of(r, graph, costs, over)
    rows = max(2, min(most, _BYTES // _row_bytes(kinds)))
    old, new = _new_layer(rows, kinds), _new_layer(rows, kinds)
    scratch = Scratch(
        counters=counters,
        above=arcs_above(graph, costs.value),
        start=costs.start,
        kinds=costs.kinds,
        runs=_runs(kinds).astype(old.tokens.dtype),
        stack=np.empty((_STACK, 3), dtype=np.int64),
        found=np.empty((_PLACEMENTS, FOUND), dtype=np.int64),
        at=np.empty(len(counters.groups.first) - 1, dtype=np.uint64),
        limit=np.array([r.cutoff, _BUCKETS - 1, 0, 0]),
        counts=np.zeros(_BUCKETS, dtype=np.int64),
    )
    _root(old, kinds)
    estimates = np.zeros(1, dtype=np.int64)
    steps, labels = [], []
    for m in range(jobs.n):
        _clear(new)
        kept = np.flatnonzero(old.kept[: old.count[0]])
        if width is not None:
            kept = kept[np.argsort(estimates[kept], kind="stable")]
            scratch.limit[:] = r.cutoff, _BUCKETS - 1, 0, _CANDIDATES * width
            scratch.counts[:] = 0
        for begin in range(0, len(kept), _CHUNK):
            if r.stop[0]:
                raise Interrupted
            some = kept[begin : begin + _CHUNK]
            if over is not None and over():
                return None
            if follow(some, m, old, new, graph, kinds, scratch) == FULL:
                return None
        swap(m + 1, new, kinds)
        if width is not None:
            estimates = np.empty(int(new.count[0]), dtype=np.int64)
            estimate(new, graph, kinds, scratch, estimates)
            if new.count[1] > width:
                new.kept[: len(estimates)] = False
                new.kept[np.argpartition(estimates, width)[:width]] = True
                new.count[1] = width
        steps.append(new.about[: new.count[0], PARENT : PASSED + 1].copy())
        labels.append(int(new.count[1]))
        if sum(labels) > most or (like is not None and _too_many(labels, like.labels, most)):
            return None
        if not labels[-1]:
            return Finished(upper, None, labels) if width is None else None
        old, new = new, old
    return _best(r, old, steps, labels)


def _too_many(labels: list[int], before: list[int], most: int) -> bool:
    """Whether the labels of all layers are likely to be more than allowed.

    Parameters
    ----------
    labels, before : list of int
        By layer, those made so far and those of a lower target.
    most : int
    """
    same = sum(before[: len(labels)])
    so_far = sum(labels)
    return so_far > _SURE * most and same > 0 and so_far * sum(before) / same > _DOUBT * most


def _best(r: Relaxation, layer: Layer, steps: list[Any], labels: list[int]) -> Finished:
    """Return what the last layer shows: its labels are schedules."""
    made = slice(int(layer.count[0]))
    about = layer.about[made].astype(np.int64)
    live = (layer.tokens[made] > 0).sum(axis=1)
    since = about[:, CLOCK]  # rounds from the start to the last placement
    since = np.where(since < 0, np.maximum(about[:, NEED], live), since)
    total = about[:, ROUNDS] + r.jobs.n * since - r.latency_offset
    total[~layer.kept[made]] = np.iinfo(np.int64).max
    at = int(np.argmin(total))
    if total[at] >= r.upper:
        return Finished(r.upper, None, labels)
    kinds, passed = np.empty((2, r.jobs.n), dtype=np.int64)
    for m in range(r.jobs.n - 1, -1, -1):
        at, kinds[m], passed[m] = steps[m][at]
    starts = r.starts(kinds, np.cumsum(passed))
    return Finished(r.jobs.total(starts), starts, labels)
