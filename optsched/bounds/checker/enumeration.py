"""Enumeration at the end of a ramp leaf: is there a schedule below a value? Compiled.

A label is a graph node together with the requests placed on a way there and the tokens of the live
ones, in this and each earlier round. Labels are made layer by layer, one for each number of
placements. Those of the last layer are schedules. docs/formulations.md ("Ramp relaxation",
Enumeration) says which labels delete others (`_deletes`), and proves that one as good always stays.
Where A deletes B, A may join the clock whenever B may. If a schedule starts without a clock, at the
earliest round that arrivals and live requests allow, A's start is no later than B's for the same
reasons. The next layer has what is needed: a schedule up to the cutoff is a path of the graph,
which only lost paths that cost more.

*The clock.* A way goes from a schedule's end backward. Without a clock, any kind may be placed in
any round. With one, which is joined at the round `Sizes.clock`, rounds are counted down to 0, and a
kind may be placed only from its round `Sizes.ready` on, which the graph sees to.

Numbers stay below 2**62 (`optsched.bounds.checker.replay.expect_fitting`). Labels that have placed
the same form a set, and the labels of a set lie next to each other, in order of cost. So each is
compared with those before it, and what belongs to a set is looked up once for all its labels. A
layer is made in three passes: find the placements, keep what no label of the same set deletes, and
delete by swaps. Of the kinds that are larger than one, only the nearest that is left is tried
instead of it, and only the `_LOOKS` cheapest labels of a set. So some labels stay that others could
delete. Tables are of groups of kinds (`optsched.bounds.checker.groups`).

In all passes m is how many requests the labels at hand have placed, each of which waits in a round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.groups import (
    TOP,
    Costs,
    Groups,
    Moves,
    groups,
    moves,
    rises,
    rows_of,
    tables,
)
from optsched.bounds.checker.parts import Bytes, Cells, Ints, Masks, TooLarge
from optsched.bounds.checker.period import Period
from optsched.bounds.checker.product import LABELS, Leaving
from optsched.bounds.checker.states import JOIN, ROUND, Kinds, wider
from optsched.problem.kernel import njit

MAX_OUTPUT = 2**24
"""Max rounds of a run: a label has its tokens for each."""
_LOOKS = 16  # labels of another set that may delete one
_ROWS = 4000  # placements and sets that a layer has space for at first
_CANDIDATES = 3  # placements that are tried per label of a layer that has a width
_PAUSE = 3_000_000  # steps from one look whether to go on to the next
# Why a pass returned: it is done, or short of rows, of places for ways to join, or of steps.
_DONE, _NO_ROW, _NO_WAY, _NO_STEP = 0, 1, 2, 3
_ONE = np.uint64(1)
# Columns of a label: its node, its cost in rounds, the present round or -1 without a clock, the
# least clock at which it may join, the tokens of its live requests now, and in this and all earlier
# rounds together, and the placement it was made by.
NODE, COST, CLOCK, MIN_CLOCK, TOKENS_NOW, TOKENS_IN_ALL, ORIGIN, _FIELDS = range(8)
# Columns of a placement: the node, the set, the label of the layer before, the kind, the rounds
# passed since, then cost, clock and tokens in all of the label, and the min cost of its schedules.
TO, SET, FROM, KIND, PASSED, SPENT, WHEN, TOKENS, LOWEST, _COLUMNS = range(10)
# Places of counts: the set to go on with, placements (then labels that are kept), steps, the cost
# of what the set has placed (then sets that are begun), the steps after which to return for a look
# at the clock, and the steps that are allowed in all.
_NEXT, _FOUND, _STEPS, _PLACED, _UNTIL, _ALLOWED = range(6)


class Paths(NamedTuple):
    """The last graph, its arcs in order of source, and what its paths cost."""

    graph: Leaving
    action: Ints  # of each label, as `product.Labels` has it
    lowest: Ints  # by arc, the min cost from its source to the end
    move: Moves
    group: Groups
    to_end: Ints  # by node, the min cost to the end
    row: Cells  # of each node in the table
    table: Bytes  # what the cost to the end rises by (`groups`)
    step: int  # the unit of the table
    unit: int  # what a round costs in which one request waits
    cutoff: int  # the largest cost of a schedule that is looked for


class Sizes(NamedTuple):
    """The kinds of requests."""

    copies: Ints  # by kind, how many requests are of it
    peak: Ints
    output: Ints
    volume: Ints  # tokens of a request, all rounds together
    ready: Ints  # by kind, the round in which it completes at the earliest; 0 if all arrive at 0
    larger: Ints  # by kind, those at least as large, the nearest first, then -1
    code: Masks  # by kind, a random number, see `Layer.key`
    capacity: int
    clock: int  # the round of the clock that is joined, its last one


class Layer(NamedTuple):
    """Labels after so many placements, in sets of those that have placed the same."""

    unplaced: Bytes  # by set, the requests of each kind that are left
    key: Masks  # by set, the sum modulo 2**64 of the codes of the requests placed
    slots: Cells  # a hash table of the keys
    sets: Ints  # their number
    first: Ints  # by set, its first label; then the number of labels
    labels: Ints  # see `NODE` and so on
    tokens: Bytes  # of each label's live requests, in this round, one round earlier, and so on
    alive: NDArray[np.bool_]  # by label, whether none has deleted it


class Scratch(NamedTuple):
    """What following labels takes, and the placements that it finds."""

    placements: Ints  # see `TO` and so on
    column: Ints  # by group, the column of a table's row for what is left
    after: Ints  # by kind, the set after placing it; -1 if not known yet
    stack: Ints  # ways that wait to be followed: node, rounds passed, clock, tokens from then on
    counters: Ints  # see `_NEXT` and so on


class Making(NamedTuple):
    """What a layer is made of: the one before, itself, and the same for all layers."""

    old: Layer
    new: Layer
    paths: Paths
    sizes: Sizes
    scratch: Scratch


@njit(allocates=False)
def _deletes(a: int, b: int, m: int, labels: Ints, tokens: Bytes, join: int) -> bool:
    """Whether a, some rounds later, is where b is and holds no more tokens at any time.

    Both have placed m requests, so each round that a waits costs m. ``join`` is the round of the
    clock that is joined. ``tokens`` has by label the tokens of its live requests, in this round and
    in earlier ones.
    """
    width = tokens.shape[1]
    cheaper_by = labels[b, COST] - labels[a, COST]
    # In each round that a waits it loses at most the tokens of this round, and after `width` rounds
    # it has none. Most labels are told apart here.
    # Both sides are times m, as it waits for ``cheaper_by`` / m rounds at most.
    lost = min(cheaper_by, m * width) * labels[a, TOKENS_NOW]
    more_tokens = labels[a, TOKENS_IN_ALL] - labels[b, TOKENS_IN_ALL]
    if cheaper_by < 0 or more_tokens * m > lost:
        return False

    # It waits as long as its lower cost pays for, unless the clocks say how long.
    max_waits = waits = cheaper_by // m
    clock_a, clock_b = labels[a, CLOCK], labels[b, CLOCK]
    if clock_a >= 0:
        # Both are on the clock: a waits until it is where b is, for which its lower cost has to
        # pay.
        waits = clock_a - clock_b
        is_valid = clock_b >= 0 and 0 <= waits <= max_waits
    elif clock_b >= 0:
        # Only b is: a has to have joined early enough to be in b's round by now, and allowed to.
        before_join = max_waits - (join - clock_b)
        is_valid = before_join >= 0 and labels[a, MIN_CLOCK] - before_join <= join
    else:
        # Neither is: once a has waited, it may join whenever b may.
        is_valid = max(labels[a, MIN_CLOCK] - max_waits, join) <= labels[b, MIN_CLOCK]

    j = 0
    while is_valid and j + waits < width:
        is_valid = tokens[a, j + waits] <= tokens[b, j]
        j += 1

    return is_valid


@njit(allocates=False)
def _find_slot(key: Any, unplaced: Bytes, row: int, less: int, more: int, layer: Layer) -> Any:
    """Return the slot of a set, or the empty one where it belongs.

    It is the set that leaves a row of ``unplaced``, but one less of kind ``less`` and one more of
    kind ``more``. A kind of -1 changes nothing. ``key`` is the set's (`Layer.key`).
    """
    by_set, keys, slots = layer.unplaced, layer.key, layer.slots
    last = np.uint64(len(slots) - 1)  # a power of two less one, so that & takes a remainder
    # Keys are sums of random codes (`Sizes.code`), so any of their bits will do.
    slot = (key >> np.uint64(7)) & last

    while slots[slot] >= 0:
        s = slots[slot]
        # Different sets may have the same key by chance, so the counts of what is left decide.
        same = keys[s] == key
        for k in range(unplaced.shape[1] if same else 0):
            same &= np.int64(by_set[s, k]) == np.int64(unplaced[row, k]) - (k == less) + (k == more)
        if same:
            break

        slot = (slot + _ONE) & last

    return slot


@njit(allocates=False)
def _enter_keys(layer: Layer) -> None:
    """Enter the sets in their hash table, which is empty."""
    for s in range(layer.sets[0]):
        # No kind less, and none more (-1): set s itself.
        layer.slots[_find_slot(layer.key[s], layer.unplaced, s, -1, -1, layer)] = s


@njit(allocates=False)
def _set_after_placing(s: int, k: int, old: Layer, new: Layer, code: Masks) -> Any:
    """Return the new layer's set that has placed one request of kind k more than the old set s.

    A set that is not there yet is added. Return -1 if the new layer has no row left for it.
    """
    key, added = old.key[s] + code[k], new.sets[0]
    # What is left: one less of kind k, and no kind (-1) more.
    slot = _find_slot(key, old.unplaced, s, k, -1, new)
    if new.slots[slot] < 0:
        # Arrays only grow between two calls: the caller makes more rows and begins the set again.
        if added == len(new.key):
            return np.int64(-1)
        for j in range(old.unplaced.shape[1]):
            new.unplaced[added, j] = old.unplaced[s, j] - (j == k)

        new.key[added], new.slots[slot] = key, added
        new.sets[0] += 1

    return np.int64(new.slots[slot])


@njit(allocates=False)
def _follow_label(e: int, s: int, m: int, making: Making) -> int:
    """Find all placements that may follow label e of set s; return what ran short, or `_DONE`.

    A schedule goes on by waiting and then by placing a request that is left and fits. It costs at
    least what the graph and the table say, so that what is beyond the cutoff may be left out.

    Ways are followed one after another: a row of ``stack`` has the node to go on from, the rounds
    passed since the label, the clock or -1, and the label's tokens from then on. ``column`` has by
    group the table's column for what is left, and ``after`` by kind the set after placing it, or
    -1 if not known yet. Placements get into the next rows of ``placements`` (see `TO` and so on).
    """
    old, new, paths, sizes, scratch = making
    graph, action, lowest, move, grouped, to_end, table_row, table, step, unit, cutoff = paths
    first, target, arc_label, loop = graph
    begin, placed_kinds, cost = move.begin, move.kinds, move.cost
    group, stride = grouped.of, grouped.stride
    placements, column, after, stack, count = scratch
    labels, tokens, unplaced = old.labels, old.tokens, old.unplaced
    peak, capacity, join = sizes.peak, sizes.capacity, sizes.clock
    min_clock, placed = labels[e, MIN_CLOCK], count[_PLACED]  # what the set has placed costs this
    stack[0, 0], stack[0, 1] = labels[e, NODE], 0
    stack[0, 2], stack[0, 3] = labels[e, CLOCK], labels[e, TOKENS_IN_ALL]
    depth = 1

    while depth > 0:
        depth -= 1
        node, passed = stack[depth, 0], stack[depth, 1]
        clock, total = stack[depth, 2], stack[depth, 3]

        # Wait round after round, until no arc of a round leads on or the cost is beyond the cutoff:
        # what the graph or the table prices beyond it is in no schedule that is looked for.
        while node >= 0:
            count[_STEPS] += 1
            if count[_STEPS] > count[_ALLOWED]:
                return _NO_STEP

            # ``rounds_paid`` is what the label and the waits since have paid, each round ``unit``;
            # ``spare`` is the cutoff less that, and less the price of what the set has placed.
            u, rounds_paid = np.uint64(node), labels[e, COST] + m * passed
            spare = cutoff - rounds_paid * unit - placed
            if to_end[u] > spare or to_end[u] + rises(table_row[u], table, column) * step > spare:
                break

            # The tokens of the label's requests in this round; none beyond the largest output.
            live = np.int64(tokens[e, passed]) if passed < tokens.shape[1] else np.int64(0)
            # The clock may not be joined yet: each round that passes brings the start one nearer.
            too_early = clock < 0 and min_clock - passed > join
            count[_STEPS] += first[u + _ONE] - first[u]
            # A round with nothing live and no arrival to wait for changes nothing, and costs m.
            onward = node if loop[u] >= 0 and (live > 0 or too_early) else np.int64(-1)

            for a in range(np.uint64(first[u]), np.uint64(first[u + _ONE])):
                # Every path through this arc costs more than the cutoff.
                if lowest[a] > spare:
                    continue

                v, number = np.uint64(target[a]), np.uint64(arc_label[a])
                count[_STEPS] += begin[number + _ONE] - begin[number]
                if action[number] == ROUND:
                    onward = np.int64(v)
                # The clock can be joined here, or rounds later: both ways are followed.
                elif action[number] == JOIN and not too_early:
                    if depth == len(stack):
                        return _NO_WAY

                    stack[depth, 0], stack[depth, 1] = v, passed
                    stack[depth, 2], stack[depth, 3] = join, total
                    depth += 1

                for j in range(np.uint64(begin[number]), np.uint64(begin[number + _ONE])):
                    k = np.uint64(placed_kinds[j])
                    slack = spare - cost[k] - to_end[v]
                    # A request of the kind must be left, fit beside what is live, and leave a path
                    # up to the cutoff.
                    if unplaced[s, k] == 0 or live + peak[k] > capacity or slack < 0:
                        continue

                    # The table is asked for what is left once this request is placed, and then the
                    # column put back.
                    if group[k] >= 0:
                        column[np.uint64(group[k])] -= stride[k]

                    rise = rises(table_row[v], table, column) * step
                    if group[k] >= 0:
                        column[np.uint64(group[k])] += stride[k]
                    # By the table, a path that places just what is left costs more than this.
                    if rise > slack:
                        continue
                    if after[k] < 0:
                        after[k] = _set_after_placing(s, np.int64(k), old, new, sizes.code)
                    if after[k] < 0 or count[_FOUND] == len(placements):
                        return _NO_ROW

                    # By the graph the cheapest schedule through here costs the cutoff less what is
                    # left of it, and by the table so much more.
                    row = placements[count[_FOUND]]
                    row[TO], row[SET], row[FROM], row[KIND] = v, after[k], e, k
                    row[PASSED], row[SPENT], row[WHEN] = passed, rounds_paid, clock
                    row[TOKENS], row[LOWEST] = total + sizes.volume[k], cutoff - slack + rise
                    count[_FOUND] += 1

            # One round earlier: the clock counts down (-1: none), and the tokens that were live in
            # this round are behind.
            node, passed, clock, total = onward, passed + 1, max(clock - 1, -1), total - live

    return _DONE


@njit(allocates=False, nogil=True)
def _find_placements(m: int, making: Making) -> int:
    """Find the placements that may follow the labels of each set, from a set on, in so many steps.

    Return what ran short, or `_DONE`. The set in which it was begins again with the next
    call. A step is a node that a label meets, an arc there, or a kind that an arc may place.
    """
    old, _, paths, sizes, scratch = making
    copies, cost, group, stride = sizes.copies, paths.move.cost, paths.group.of, paths.group.stride
    column, after, count = scratch.column, scratch.after, scratch.counters
    while count[_NEXT] < old.sets[0]:
        # A set is begun only with steps to spare, so that the caller can look at the clock.
        if count[_STEPS] > count[_UNTIL]:
            return _NO_STEP

        # What holds for all labels of a set: the cost of what it has placed, and by group the
        # table's column for what is left.
        s, found_before, placed = count[_NEXT], count[_FOUND], np.int64(0)
        for g in range(len(column)):
            column[g] = paths.group.first[g]
        for k in range(len(cost)):
            after[k] = -1
            placed += (copies[k] - old.unplaced[s, k]) * cost[k]
            if group[k] >= 0:
                column[group[k]] += old.unplaced[s, k] * stride[k]

        count[_PLACED] = placed

        for e in range(old.first[s], old.first[s + 1]):
            reason = _DONE
            if old.alive[e]:
                reason = _follow_label(e, s, m, making)
            # Placements of a set that was not completed are forgotten: it begins again.
            if reason != _DONE:
                count[_FOUND] = found_before
                return reason

        count[_NEXT] += 1

    return _DONE


@njit(allocates=False)
def _write_label(row: Ints, new_label: int, old: Layer, new: Layer, sizes: Sizes) -> None:
    """Write the label that a placement makes of the label before: what is live, cost and clock.

    ``row`` is the placement (see `TO` and so on), and ``new_label`` the number of the label.
    """
    parent, k, passed, clock = row[FROM], row[KIND], row[PASSED], row[WHEN]
    tokens, labels, peak = new.tokens, new.labels, sizes.peak[k]
    width = tokens.shape[1]
    # A schedule starts no sooner than its requests can have arrived and completed. Each round
    # that has passed brings the start one nearer, down to the round that is joined. With a clock
    # the graph sees to it.
    min_clock = max(old.labels[parent, MIN_CLOCK] - passed, sizes.clock)
    if clock < 0:
        min_clock = max(min_clock, sizes.ready[k])

    # Tokens in this round, one round earlier, and so on: what was live is `passed` rounds further,
    # and the new request ends in this round, at its peak.
    for j in range(width):
        tokens[new_label, j] = old.tokens[parent, j + passed] if j + passed < width else 0
    for j in range(sizes.output[k]):
        tokens[new_label, j] += peak - j

    labels[new_label, NODE], labels[new_label, COST] = row[TO], row[SPENT]
    labels[new_label, CLOCK], labels[new_label, MIN_CLOCK] = clock, min_clock
    labels[new_label, TOKENS_NOW] = tokens[new_label, 0]
    labels[new_label, TOKENS_IN_ALL] = row[TOKENS]


@njit(allocates=False, nogil=True)
def _keep_undeleted(m: int, order: Ints, making: Making) -> int:
    """Write the labels of placements, but those that one of the same set deletes.

    ``order`` has the placements by set and then by cost. Return whether all are done, or steps ran
    short. A step is a label that another is compared with.
    """
    old, new, _, sizes, scratch = making
    placements, count, first, join = scratch.placements, scratch.counters, new.first, sizes.clock
    labels, tokens, alive = new.labels, new.tokens, new.alive
    # A comparison reads `width` bytes or fewer: 64 of them count as a step.
    steps_per_test = 1 + tokens.shape[1] // 64
    kept, begun = count[_FOUND], count[_PLACED]  # labels that are kept, sets that are begun
    while count[_NEXT] < len(order) and count[_STEPS] <= count[_UNTIL]:
        placement = order[count[_NEXT]]
        # All sets up to this placement's begin here: those before it may have no label.
        while begun <= placements[placement, SET]:
            first[begun] = kept
            begun += 1

        # Written behind those that are kept. If it is deleted, the next one is written over it.
        _write_label(placements[placement], kept, old, new, sizes)
        labels[kept, ORIGIN] = placement

        # Label a is one of the same set that is kept. If it deletes this one, any schedule that
        # goes on from here has one of no higher cost that goes on from a.
        a = first[begun - 1]
        count[_STEPS] += 1
        while a < kept and not _deletes(a, kept, m, labels, tokens, join):
            count[_STEPS] += steps_per_test
            a += 1

        if a == kept:
            alive[kept] = True
            kept += 1

        count[_NEXT] += 1

    # Sets that are not begun have no label yet, and at the end stands the number of labels.
    first[begun : new.sets[0] + 1] = kept
    count[_FOUND], count[_PLACED] = kept, begun
    return _DONE if count[_NEXT] == len(order) else _NO_STEP


@njit(allocates=False, nogil=True)
def _delete_by_swaps(m: int, making: Making) -> int:
    """Delete labels by those that have placed a larger request i instead of one of theirs, j.

    All of them have placed m requests. Only the nearest larger one left is tried, and of a set only
    the first `_LOOKS` labels. Return whether all are done, or steps ran short.
    """
    _, layer, _, sizes, scratch = making
    count, unplaced, first = scratch.counters, layer.unplaced, layer.first
    copies, larger = sizes.copies, sizes.larger
    labels, tokens, alive = layer.labels, layer.tokens, layer.alive
    kinds, steps_per_test = len(copies), 1 + tokens.shape[1] // 64  # as in `_keep_undeleted`

    while count[_NEXT] < layer.sets[0] and count[_STEPS] <= count[_UNTIL]:
        s = count[_NEXT]
        # A set without labels has nothing to delete.
        for j in range(kinds if first[s] < first[s + 1] else 0):
            # Kinds with no request left cannot be placed instead; of the others the nearest is
            # tried.
            near = 0
            while near < kinds and larger[j, near] >= 0 and unplaced[s, larger[j, near]] == 0:
                near += 1

            # Nothing larger is left, or this set has placed no j that could be swapped.
            i = larger[j, near] if near < kinds else -1
            if i < 0 or unplaced[s, j] == copies[j]:
                continue

            # ``other`` is the set that has placed i instead of j: i is left once less, j once more.
            count[_STEPS] += 1
            key = layer.key[s] - sizes.code[j] + sizes.code[i]
            other = layer.slots[_find_slot(key, unplaced, s, i, j, layer)]

            # With the larger request in place of theirs, what b goes on with fits after a, too.
            for b in range(first[s], first[s + 1] if other >= 0 else 0):
                # Labels come in order of cost, and only one of no higher cost deletes another.
                last = min(first[other] + _LOOKS, first[other + 1])
                a = first[other]
                while a < last and alive[b] and labels[a, COST] <= labels[b, COST]:
                    count[_STEPS] += steps_per_test
                    if alive[a] and _deletes(a, b, m, labels, tokens, sizes.clock):
                        alive[b] = False

                    a += 1

        count[_NEXT] += 1

    return _DONE if count[_NEXT] == layer.sets[0] else _NO_STEP


@njit(nogil=True)
def _lowest_by_arc(graph: Leaving, rest: Ints, price: Ints) -> Ints:
    """Return by arc the min cost from its source to the end."""
    target, label = graph.target, graph.label
    costs = np.empty(len(target), np.int64)
    for a in range(np.uint64(len(target))):
        costs[a] = rest[np.uint64(target[a])] + price[np.uint64(label[a])]

    return costs


def _new_layer(sets: int, labels: int, sizes: Sizes, like: Layer | None = None) -> Layer:
    """Return a layer with space for so many sets and labels.

    It has no labels, and the sets of the layer `like`, if there is one. Only rows that are written
    take memory.
    """
    kinds, width = len(sizes.copies), int(sizes.output.max())
    unplaced_type = np.uint8 if sizes.copies.max() < 256 else np.int32
    unplaced, key = np.empty((0, kinds), unplaced_type), np.empty(0, np.uint64)
    sets_in_use = np.zeros(1, np.int64)
    if like is not None:
        unplaced, key, sets_in_use = like.unplaced, like.key, like.sets

    tokens_type = np.uint8 if sizes.capacity < 256 else np.int32
    layer = Layer(
        wider(unplaced, sets),
        wider(key, sets),
        slots=np.full(2 << sets.bit_length(), -1, np.int32),
        sets=sets_in_use,
        first=np.zeros(sets + 1, np.int64),
        labels=np.empty((labels, _FIELDS), np.int64),
        tokens=np.empty((labels, width), tokens_type),
        alive=np.empty(labels, np.bool_),
    )
    _enter_keys(layer)
    return layer


class Enumeration:
    """The labels of schedules that may cost at most a cutoff, layer by layer.

    ``period`` has each node's cost to the end, and ``graph`` is its last one. ``between`` is called
    now and then. It may raise an error, after which there is no use of what was made.
    """

    def __init__(
        self,
        period: Period,
        graph: Leaving,
        pi: Ints,
        unit: int,
        cutoff: int,
        between: Callable[[], None] | None = None,
    ) -> None:
        kinds, to_end, count = period.kinds, period.to_end, int(period.count[LABELS])
        if to_end is None:
            raise ValueError("found no multipliers; expected those of the last graph")

        self._sizes = _sizes_of(kinds, period.clock)
        self._budget, self._limits, self._between = period.budget, period.limits, between
        self.n = period.n

        # ``price`` has by label its min cost, and the kind of this cost or -1.
        # The step is the smallest with which an entry of `TOP` steps is beyond the cutoff.
        cost, price = -pi, period.prices(pi, unit)
        step = max(0, cutoff - int(to_end[0])) // TOP + 1
        row = rows_of(graph, price[:, 1])
        group = groups(kinds.peak, kinds.copies, int(row[-1]) + 1, period.limits.table_bytes)
        move = moves(period.labels.mask[:count], price, cost, group)
        table = tables(to_end, Costs(graph, row, move, group, step), between)
        action, lowest = period.labels.action[:count], _lowest_by_arc(graph, to_end, move.lowest)
        self._paths = Paths(
            graph, action, lowest, move, group, to_end, row, table, step, unit, cutoff
        )

        # A label takes at most so many bytes with its placement and its set: 216 for numbers and
        # slots, by kind what is left, and by round its tokens.
        row_bytes = 216 + 2 * len(cost) + 8 * int(self._sizes.output.max())
        limits = period.limits
        self.max_placements = min(limits.layer, limits.layer_bytes // row_bytes)
        placements = min(_ROWS, self.max_placements), _COLUMNS
        # The fields of `Scratch`: placements, by group, by kind, ways to join, and counts.
        shapes = placements, len(group.first) - 1, len(cost), (limits.ways[0], 4), 6
        self._scratch = Scratch._make(np.zeros(shape, np.int64) for shape in shapes)
        self.start()

    def start(self) -> None:
        """Begin with a layer of one label, which has placed nothing."""
        sizes = self._sizes
        self.layer = _new_layer(1, 1, sizes)
        self.layer.unplaced[0], self.layer.key[0], self.layer.sets[0] = sizes.copies, 0, 1
        self.layer.first[:] = 0, 1
        # At the first node, at no cost, without a clock (-1), which it may join at once, with
        # nothing live, and made by nothing (-1): see `NODE` and so on.
        self.layer.labels[0], self.layer.tokens[0] = (0, 0, -1, sizes.clock, 0, 0, -1), 0
        self.layer.alive[0] = True
        self.placements = self._scratch.placements[:0]

    @property
    def labels(self) -> Ints:
        """The numbers of the labels of the present layer that are not deleted."""
        layer = self.layer
        return np.flatnonzero(layer.alive[: int(layer.first[layer.sets[0]])])

    def place(self, m: int, width: int | None = None) -> None:
        """Make the labels with one more request placed than m.

        With a `width` only so many of the lowest estimates, with which nothing is shown.
        """
        sizes = self._sizes
        # At first for sets alone: how many labels there can be is known after `find`.
        new = _new_layer(len(self._scratch.placements), 0, sizes)

        def find() -> int:
            """Go on finding placements, in longer arrays if they were too short."""
            nonlocal new
            short: int = _find_placements(m, self._making(new))
            if short == _NO_WAY:
                self._lengthen_stack()
            elif short == _NO_ROW:
                new = self._more_rows(new)

            return short

        self._finish(find)
        placements = self._scratch.placements[: self._scratch.counters[_FOUND]]
        order = np.arange(len(placements))
        # Many placements are deleted, so a few times as many as `width` are tried.
        if width is not None and len(placements) > _CANDIDATES * width:
            tried = _CANDIDATES * width
            order = np.argpartition(placements[:, LOWEST], tried)[:tried]

        # By set, then by cost, then by tokens (the last key of `lexsort` comes first): so those
        # that may delete a label lie before it.
        order = order[np.lexsort(placements[order][:, [TOKENS, SPENT, SET]].T)]
        # The sets stay those of ``new``, which gets only the arrays of labels from this layer.
        arrays = _new_layer(1, len(order) + 1, sizes)
        new = new._replace(labels=arrays.labels, tokens=arrays.tokens, alive=arrays.alive)
        making = self._making(new)
        self._finish(lambda: _keep_undeleted(m + 1, order, making))
        self._finish(lambda: _delete_by_swaps(m + 1, making))
        self.layer, self.placements = new, placements

        if width is not None and len(self.labels) > width:
            lowest = placements[new.labels[self.labels, ORIGIN], LOWEST]
            new.alive[self.labels[np.argpartition(lowest, width)[width:]]] = False

    def _making(self, new: Layer) -> Making:
        return Making(self.layer, new, self._paths, self._sizes, self._scratch)

    def totals(self) -> Ints:
        """Return what the labels of the last layer cost, which are schedules: in rounds."""
        layer, numbers = self.layer, self.labels
        labels = layer.labels[numbers]
        # Rounds from the start to the last placement. Without a clock the schedule starts as early
        # as its arrivals allow, but not before its live requests have produced all tokens.
        live_rounds = (layer.tokens[numbers] > 0).sum(axis=1)
        earliest = np.maximum(labels[:, MIN_CLOCK], live_rounds)
        since = np.where(labels[:, CLOCK] < 0, earliest, labels[:, CLOCK])
        totals: Ints = labels[:, COST] + self.n * since

        return totals

    def _finish(self, go_on: Callable[[], int]) -> None:
        """Call a pass that goes on where it stopped until it is done, and charge its steps."""
        count, short = self._scratch.counters, _NO_STEP
        count[:] = 0
        while short != _DONE:
            if self._between is not None:
                self._between()

            # The steps that are left in all, and those after which it returns for a look.
            count[_ALLOWED] = self._budget.compiled
            count[_UNTIL] = min(_PAUSE, self._budget.compiled)
            short = go_on()
            self._budget.spend_compiled(int(count[_STEPS]))
            count[_STEPS] = 0

    def _lengthen_stack(self) -> None:
        stack, (_, deepest) = self._scratch.stack, self._limits.ways
        if len(stack) >= deepest:
            raise TooLarge(f"found more than {deepest} ways to join the clock; too large to check")

        self._scratch = self._scratch._replace(stack=np.empty((2 * len(stack), 4), np.int64))

    def _more_rows(self, new: Layer) -> Layer:
        """Make space for more placements, and return the new layer with space for as many sets."""
        placements = self._scratch.placements
        if len(placements) >= self.max_placements:
            raise TooLarge(f"found more than {self.max_placements} labels; too large to check")

        rows = min(self.max_placements, 4 * len(placements))
        self._scratch = self._scratch._replace(placements=wider(placements, rows))
        return _new_layer(rows, 0, self._sizes, new)


def _sizes_of(kinds: Kinds, clock: int) -> Sizes:
    """Return the kinds of requests as labels need them."""
    ready, peak, floor, copies, capacity, _ = kinds
    output = peak - floor + 1
    if output.max() > MAX_OUTPUT:
        raise TooLarge(f"found more than {MAX_OUTPUT} tokens of output; too large to check")

    # Arrivals are ``ready - output``. Codes are hashes of kinds, the same ones in every check.
    volume, larger = output * (peak + floor) // 2, larger_kinds(ready - output, peak, output)
    code = np.random.default_rng(1).integers(1, 2**64, len(peak), dtype=np.uint64)
    # If all arrive at 0, no request makes a schedule start later.
    if not (ready > output).any():
        ready = np.zeros_like(peak)

    return Sizes(copies, peak, output, volume, ready, larger, code, capacity, clock)


def larger_kinds(arrival: Ints, peak: Ints, output: Ints) -> Ints:
    """Return by kind those as large in peak, output and arrival + output, nearest first.

    Shape (kinds, kinds); where there are fewer of them, the rest of a row is -1.
    """
    sizes = np.stack([peak, output, arrival + output])
    away = sizes[:, None, :] - sizes[:, :, None]  # by kind, how much larger each kind is
    is_larger = (away >= 0).all(axis=0) & ~np.eye(sizes.shape[1], dtype=bool)
    distance = np.where(is_larger, away.sum(axis=0), np.iinfo(np.int64).max)
    order = np.argsort(distance, axis=1, kind="stable")

    return np.where(np.take_along_axis(is_larger, order, axis=1), order, -1)
