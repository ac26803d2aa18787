"""Finishing a proof by enumeration: every schedule below a target, placement by placement.

Once the graph of `optsched.optimize.ramp.relaxation` is small, its paths can be followed with exact
memory: `optsched.bounds.checker.enumeration` has the labels. If none is left, no schedule is below
the target. Those of the last layer are schedules.

**Targets from below.** The labels below a target grow exponentially with it. So targets are proved
one above another (`finish`): the first costs next to nothing, each is a bound, and they say how far
the labels that are allowed will reach.

**A share of the labels.** If only the labels of least cost to the end are kept in each layer
(`samples`), nothing is proved, but what remains in the last layer is a schedule.

**Rounds with nothing live.** Without a clock they are followed only to join the clock. Else they
cost m, the number of placements so far, and change nothing: the schedule is better without them.

Import this module lazily: it loads numba.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.enumeration import FROM, KIND, ORIGIN, PASSED, Enumeration
from optsched.bounds.checker.parts import Ints, TooLarge
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.relaxation import Relaxation

# The max placements of a layer that are tried, per label that is allowed in all.
_TRIED = 8
WIDER = 3
"""The factor from the width of one part of the labels to that of the next."""
# The max labels of a layer of the first part. It is one per so many nodes in the last part.
_WIDTH, _NODES_PER_WIDTH = 300, 100
LABELS_PER_S = 60_000
"""How many labels are made in a second, roughly."""
# The max number of labels of one target, and of all.
_MAX_LABELS, _ALL_LABELS = 50_000_000, 1_000_000_000
# The first target is the bound of the graph and one part in so many of the gap, or of one part in
# so many of the bound if that is less. It is low enough to cost next to nothing, even if it is
# below what is proved already: the number of its labels says how far more labels will reach.
_FIRST, _NEAR = 4, 125
# The factor by which labels may grow from one target to the next.
_AHEAD = 12.0
# A target takes at most this share of the labels left. It is proved only if it may take so many
# times the labels of the target before: to prepare the next one takes longer than the labels.
_SHARE, _MORE = 0.5, 1.5
# With more labels than this, two targets say how far the labels allowed will reach.
_TELLING = 500
# To prepare the enumeration takes as long for so many nodes as one label takes.
_NODES_PER_LABEL = 20
# After this share of the labels, it ends if so many times as many as allowed are predicted.
_SURE, _DOUBT = 0.05, 1.5


class _Ended(Exception):
    """Someone asked the enumeration to end."""


def refusal(relaxation: Relaxation) -> str:
    """Return why schedules cannot be enumerated, or an empty string."""
    if relaxation.jobs.arrival.any() and not relaxation.clock:
        return "found arrivals but no clock; expected a clock of a round or more"

    return ""


@dataclass(frozen=True, eq=False)
class Finished:
    """What the enumeration has shown: no schedule has a total latency below ``bound``, in rounds.

    ``starts`` is a schedule of that value, unless the bound is the target. ``labels`` has the
    numbers of labels that were kept, by layer.
    """

    bound: int
    starts: NDArray[np.int64] | None
    labels: list[int]


def finish(
    relaxation: Relaxation,
    max_labels: float,
    over: Callable[[], bool] | None = None,
    at_end: float = 0,
) -> None:
    """Prove targets by enumeration, one above another, as far as ``relaxation.upper``.

    Each target is a bound. Nothing happens where there is a `refusal`. `max_labels` may be made,
    tables included, or `at_end` if that should be enough for the last target.
    """
    if relaxation.graph is None or relaxation.closed or refusal(relaxation):
        return

    max_labels, at_end = min(max_labels, _ALL_LABELS), min(at_end, _ALL_LABELS)
    # What the graph shows without labels, the labels spent, and the copy below the last target.
    plain, spent, part = relaxation.graph_bound, 0.0, None
    # Better multipliers may have passed targets of before. These say nothing of the next ones.
    relaxation.shown = [(to, f) for to, f in relaxation.shown if to > plain]
    while not (relaxation.closed or (over is not None and over())):
        # The last target comes within reach: now as many labels are allowed as at the end.
        if relaxation.shown and reach(relaxation, _SHARE * (at_end - spent)) >= relaxation.upper:
            max_labels = max(max_labels, at_end)

        target = _next_target(relaxation, max_labels - spent)
        if target is None:
            return

        target = min(target, relaxation.upper)
        part = relaxation.below(target, part)  # with the multipliers of the target before
        relaxation.take(part)  # its multipliers alone may have shown more

        # Multipliers alone have proved the target: no schedule (None), and no labels.
        if part.closed:
            shown: Finished | None = Finished(target, None, [])
        else:
            spent += part.graph.nodes / _NODES_PER_LABEL
            # To prepare tables costs as much as labels do, so it is paid from the same sum.
            if max_labels - spent < 1:
                return

            allowed = int(min(max_labels - spent, _MAX_LABELS))
            like = relaxation.shown[-1][1] if relaxation.shown else None
            shown = enumerate_below(part, allowed, like=like, over=over)
            # Given up: too many labels, too large tables, or `over`.
            if shown is None:
                return

            part.take_enumeration(shown.bound, shown.starts)
            spent += sum(shown.labels)

        relaxation.shown.append((target, shown))
        relaxation.take(part)


def _next_target(relaxation: Relaxation, labels: float) -> int | None:
    """Return the target to prove next, with so many labels left, or None if none is worth it.

    ``relaxation.shown`` has a target that was proved and its `Finished` in each item.
    """
    plain = relaxation.graph_bound
    # The first one is so near that it costs next to nothing.
    if not relaxation.shown:
        rounds = min(relaxation.upper - plain, plain // _NEAR)
        return plain + max(1, -(-rounds // _FIRST))

    # An empty enumeration counts as two labels, as in `reach`. A target may take so many times the
    # labels of the one before, and a share of those left.
    before = max(2, sum(relaxation.shown[-1][1].labels))
    allowance = min(_AHEAD * before, _SHARE * labels)
    # The next target would take more labels than may be spent on it.
    if allowance < _MORE * before:
        return None
    # All labels that are left will not show more than is proved. Few labels could not tell so.
    if before > _TELLING and reach(relaxation, _SHARE * labels) <= relaxation.bound:
        return None

    return reach(relaxation, allowance)


def reach(relaxation: Relaxation, labels: float) -> int:
    """Return the target that so many labels are expected to prove, from those proved.

    The logarithm of the labels is taken to grow evenly with the target, as it does from the target
    proved before the last one (or the graph's bound, with a label) to the last one. ``shown`` has
    pairs of a target and its `Finished`.
    """
    # Targets with the logarithms of their labels. An empty enumeration counts as two labels.
    points = [(relaxation.graph_bound, 0.0)]
    points += [(to, math.log(max(2, sum(f.labels)))) for to, f in relaxation.shown[-2:]]
    last_target, last_log = points[-1]
    before_target, before_log = points[-2] if len(points) > 2 else points[0]
    # There is nothing to extrapolate from.
    if last_target <= before_target or labels < 2:
        return last_target

    # An even slope needs some growth: a factor of e at least.
    slope = max(last_log - before_log, 1.0) / (last_target - before_target)
    return last_target + max(1, int((math.log(labels) - last_log) / slope))


def samples(
    relaxation: Relaxation, over: Callable[[], bool] | None = None
) -> Iterator[NDArray[np.int64] | None]:
    """Follow a part of the labels, then a larger one, and so on.

    The first item is None and says that tables are ready. Others are the starts of a schedule below
    ``relaxation.upper``, or None where a part has none.
    """
    try:
        labels = enumeration_of(relaxation, over)
    except (TooLarge, _Ended):
        return

    yield None
    width, widest = _WIDTH, max(_WIDTH, relaxation.graph.nodes // _NODES_PER_WIDTH)
    # A part of the labels shows no bound; wider ones find better schedules.
    while width <= widest and not relaxation.closed:
        # With a width there are far fewer labels than this, so no part is given up for it. The
        # limit on placements follows from it.
        max_labels = 10 * width * relaxation.jobs.n
        shown = enumerate_below(relaxation, max_labels, width=width, labels=labels, over=over)
        yield None if shown is None else shown.starts
        width *= WIDER


def enumeration_of(relaxation: Relaxation, over: Callable[[], bool] | None = None) -> Enumeration:
    """Return the labels of a relaxation's graph, of which none is made yet, with their tables."""
    r, period = relaxation, relaxation.period

    def look() -> None:
        if r.stop[0]:
            raise Interrupted
        if over is not None and over():
            raise _Ended

    # The labels' costs are those of the present multipliers.
    period.to_end = r.rest()
    return Enumeration(period, r.graph, r.pi, r.scale, r.cutoff, look)


def enumerate_below(
    relaxation: Relaxation,
    max_labels: int,
    *,
    width: int | None = None,
    labels: Enumeration | None = None,
    like: Finished | None = None,
    over: Callable[[], bool] | None = None,
) -> Finished | None:
    """Enumerate the schedules whose total latency is below ``relaxation.upper``.

    Return what that shows, or None if there are more than `max_labels` or `over` ends it.

    `width`: the max number of labels of a layer. Those of the least cost to be expected are kept,
    so that a schedule may be found but no bound is shown. Default: all.
    `labels`: the `enumeration_of` the relaxation, if it has been made.
    `like`: what a lower target has shown. The number of labels is predicted from it, so that the
    enumeration ends early if they will be too many.
    """
    try:
        labels = labels or enumeration_of(relaxation, over)
        upper = relaxation.upper  # another thread may lower it meanwhile
        labels.start()
        labels.max_placements = min(labels.max_placements, _TRIED * max_labels)
        steps, sizes = [], []  # by layer: how its labels were made, and how many there are

        for m in range(relaxation.jobs.n):
            labels.place(m, width)  # now `labels` has the layer of m + 1 placements
            layer, placements = labels.layer, labels.placements
            # Behind those of the sets, which `sets[0]` counts, `first` has the number of labels,
            # and these are the first rows. For `_best`: the label before each of them, the kind
            # placed, and the rounds passed.
            placement = layer.labels[: layer.first[layer.sets[0]], ORIGIN]
            steps.append(placements[placement][:, [FROM, KIND, PASSED]])
            sizes.append(len(labels.labels))
            # Too many labels: the target is given up, and nothing is shown.
            if sum(sizes) > max_labels:
                return None
            if like is not None and _too_many(sizes, like.labels, max_labels):
                return None
            # If no label is left, no schedule is below the target, unless some were left out.
            if not sizes[-1]:
                return Finished(upper, None, sizes) if width is None else None
    except (TooLarge, _Ended):
        return None

    return _best(relaxation, upper, labels, steps, sizes)


def _too_many(labels: list[int], earlier: list[int], max_labels: int) -> bool:
    """Whether the labels of all layers are likely to be more than allowed.

    `labels` are the numbers of labels in the layers so far, and `earlier` those in all layers of a
    lower target. The other layers are expected to grow from it as these did.
    """
    so_far, labels_before = sum(labels), sum(earlier[: len(labels)])
    # A few labels say little, and without any there is no factor.
    if so_far <= _SURE * max_labels or labels_before == 0:
        return False

    return so_far * sum(earlier) / labels_before > _DOUBT * max_labels


def _best(
    r: Relaxation, upper: int, labels: Enumeration, steps: list[Ints], sizes: list[int]
) -> Finished:
    """Return what the last layer shows: its labels are schedules, of which the best is walked back.

    ``steps[m]`` has a row for each label after m + 1 placements: the label before it, the kind
    placed, and the rounds passed before that. ``upper`` is the target, and ``sizes`` are the
    numbers of labels by layer.
    """
    total = labels.totals() - r.latency_offset
    if total.min() >= upper:
        return Finished(upper, None, sizes)

    # Back from the best label of the last layer: by placement its kind, and the rounds that passed
    # since the one before. Added up they are the rounds from each completion to the last.
    label = int(labels.labels[np.argmin(total)])
    kinds, passed = np.empty((2, r.jobs.n), dtype=np.int64)
    for m in range(r.jobs.n - 1, -1, -1):
        label, kinds[m], passed[m] = steps[m][label]

    starts = r.starts(kinds, np.cumsum(passed))
    return Finished(r.jobs.total(starts), starts, sizes)
