"""Enumeration at the end of a ramp leaf: is there a schedule below a value? Compiled.

A label is a graph node together with the requests placed on a way there and the tokens of the live
ones, in this and each earlier round. Labels are made layer by layer, one for each number of
placements. Those of the last layer are schedules. docs/formulations.md ("Ramp relaxation",
Enumeration) says which labels delete others (`_deletes`), and proves that one as good always stays.
Where A deletes B, A may join the clock whenever B may. If a schedule starts without a clock, at the
earliest round that arrivals and live requests allow, A's start is no later than B's for the same
reasons. The next layer has what is needed: a schedule up to the cutoff is a path of the graph,
which only lost paths that cost more.

Numbers stay below 2**62 (`optsched.bounds.checker.replay.expect_fitting`). Labels that have placed
the same form a set, and the labels of a set lie next to each other, in order of cost. So each is
compared with those before it, and what belongs to a set is looked up once for all its labels. A
layer is made in three passes: find the placements, keep what no label of the same set deletes, and
delete by swaps. Of the kinds that are larger than one, only the nearest that is left is tried
instead of it, and only the `_LOOKS` cheapest labels of a set. So some labels stay that others could
delete. Tables are of groups of kinds (`optsched.bounds.checker.groups`).
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
from optsched.bounds.checker.states import JOIN, ROUND, wider
from optsched.problem.kernel import njit

MAX_OUTPUT = 2**24
"""Max rounds of a run: a label has its tokens for each."""
_LOOKS = 16  # labels of another set that may delete one
_ROWS = 4000  # placements and sets that a layer has room for at first
_CANDIDATES = 3  # placements that are tried per label of a layer that has a width
_PAUSE = 3_000_000  # steps from one look whether to go on to the next
_DONE, _NO_ROW, _NO_WAY, _REST = 0, 1, 2, 3  # all is done, or what a layer ran short of
_ONE = np.uint64(1)
NODE, COST, CLOCK, NEED, NOW, ALL, ORIGIN, _ABOUT = range(8)
"""Columns of a label: its node, its cost in rounds, the present round or -1 without a clock, the
least clock at which it may join, its tokens now, and in all, and the placement it was made by."""
TO, SET, FROM, KIND, PASSED, SPENT, WHEN, TOKENS, LOWEST, _COLUMNS = range(10)
"""Columns of a placement: the node, the set, the label of the layer before, the kind, the rounds
passed since, then cost, clock and tokens in all of the label, and the min cost of its schedules."""
# Places of counts: the set to go on with, placements, steps, the cost of what the set has placed,
# the steps after which to rest, and the steps that are allowed in all.
_NEXT, _FOUND, _STEPS, _PLACED, _UNTIL, _ALLOWED = range(6)


class Paths(NamedTuple):
    """The last graph, its arcs in order of source, and what its paths cost."""

    graph: Leaving
    what: Ints  # of each label
    lowest: Ints  # by arc, the min cost from its source to the end
    move: Moves
    group: Groups
    rest: Ints
    row: Cells  # of each node in the table
    table: Bytes  # what the cost to the end rises by (`groups`)
    step: int  # the unit of the table
    unit: int
    cutoff: int


class Sizes(NamedTuple):
    """The kinds of requests."""

    copies: Ints
    peak: Ints
    output: Ints
    volume: Ints  # tokens of a request, all rounds together
    ready: Ints
    larger: Ints  # by kind, those at least as large, the nearest first, then -1
    code: Masks  # by kind, a random number, see `Layer.key`
    capacity: int
    clock: int


class Layer(NamedTuple):
    """Labels after so many placements, in sets of those that have placed the same."""

    unplaced: Bytes  # by set, the requests of each kind that are left
    key: Masks  # by set, the sum modulo 2**64 of the codes of the requests placed
    slots: Cells  # a hash table of the keys
    sets: Ints  # their number
    first: Ints  # by set, its first label; then the number of labels
    about: Ints  # labels: see `NODE` and so on
    tokens: Bytes  # of each label's live requests, in this round, one round earlier, and so on
    alive: NDArray[np.bool_]


class Scratch(NamedTuple):
    """What following labels takes, and the placements that it finds."""

    placements: Ints  # see `TO` and so on
    column: Ints  # by group, the column of a table's row for what is left
    after: Ints  # by kind, the set after placing it; -1 if not known yet
    stack: Ints  # ways to join the clock that wait to be followed
    number: Ints  # see `_NEXT` and so on


class Making(NamedTuple):
    """What a layer is made of: the one before, itself, and the same for all layers."""

    old: Layer
    new: Layer
    paths: Paths
    of: Sizes
    scratch: Scratch


@njit(allocates=False)
def _deletes(a: int, b: int, m: int, about: Ints, tokens: Bytes, join: int) -> bool:
    """Whether a, some rounds later, is where b is and holds no more tokens at any time."""
    width = tokens.shape[1]
    gain = about[b, COST] - about[a, COST]
    # In each round that a waits it loses at most the tokens of this round, and after `width` rounds
    # it has none. Most labels are told apart here.
    lost = min(gain, m * width) * about[a, NOW]
    if gain < 0 or (about[a, ALL] - about[b, ALL]) * m > lost:
        return False

    waits = gain // m
    clock_a, clock_b = about[a, CLOCK], about[b, CLOCK]
    if clock_a >= 0:
        # Both are on the clock: a waits until it is where b is, for which its lower cost has to
        # pay.
        is_valid = clock_b >= 0 and 0 <= clock_a - clock_b <= waits
        waits = clock_a - clock_b
    elif clock_b >= 0:
        before = waits - join + clock_b
        is_valid = before >= 0 and about[a, NEED] - before <= join
    else:
        is_valid = max(about[a, NEED] - waits, join) <= about[b, NEED]

    j = 0
    while is_valid and j + waits < width:
        is_valid = tokens[a, j + waits] <= tokens[b, j]
        j += 1

    return is_valid


@njit(allocates=False)
def _find_slot(key: Any, unplaced: Bytes, row: int, less: int, more: int, layer: Layer) -> Any:
    """Return the slot of a set, or the empty one where it belongs.

    What is left for it is a row of ``left`` with one less of a kind and one more of another. A kind
    of -1 changes nothing.
    """
    by_set, keys, slots = layer.unplaced, layer.key, layer.slots
    last = np.uint64(len(slots) - 1)
    slot = (key >> np.uint64(7)) & last

    while slots[slot] >= 0:
        s = slots[slot]
        # Keys are random sums, so the counts of what is left decide.
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
        layer.slots[_find_slot(layer.key[s], layer.unplaced, s, -1, -1, layer)] = s


@njit(allocates=False)
def _set_after_placing(s: int, k: int, old: Layer, new: Layer, code: Masks) -> Any:
    """Return the new layer's set that has placed one request of kind k more than the old set s.

    A set that is not there yet is added. Return -1 if the new layer has no row left for it.
    """
    key, added = old.key[s] + code[k], new.sets[0]
    slot = _find_slot(key, old.unplaced, s, k, -1, new)
    if new.slots[slot] < 0:
        # Arrays only grow between two calls, so the caller makes more rows and begins the set
        # again.
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
    """
    old, new, paths, of, scratch = making
    graph, what, lowest, move, grouped, rest, at, table, step, unit, cutoff = paths
    first, target, label, loop = graph
    begin, placed_kinds, cost = move.begin, move.kinds, move.cost
    group, stride = grouped.of, grouped.stride
    placements, column, after, stack, number = scratch
    about, tokens, unplaced = old.about, old.tokens, old.unplaced
    peak, capacity, join, need = of.peak, of.capacity, of.clock, about[e, NEED]
    placed = number[_PLACED]
    stack[0, 0], stack[0, 1] = about[e, NODE], 0
    stack[0, 2], stack[0, 3] = about[e, CLOCK], about[e, ALL]
    depth = 1

    while depth > 0:
        depth -= 1
        node, passed = stack[depth, 0], stack[depth, 1]
        clock, total = stack[depth, 2], stack[depth, 3]

        # What the graph or the table prices beyond the cutoff is in no schedule that is looked for.
        while node >= 0:
            number[_STEPS] += 1
            if number[_STEPS] > number[_ALLOWED]:
                return _REST

            here, spent = np.uint64(node), about[e, COST] + m * passed
            spare = cutoff - spent * unit - placed
            if rest[here] > spare or rest[here] + rises(at[here], table, column) * step > spare:
                break

            live = np.int64(tokens[e, passed]) if passed < tokens.shape[1] else np.int64(0)
            early = clock < 0 and need - passed > join
            number[_STEPS] += first[here + _ONE] - first[here]
            # A round with nothing live and no arrival to wait for changes nothing, and costs m.
            onward = node if loop[here] >= 0 and (live > 0 or early) else np.int64(-1)

            for a in range(np.uint64(first[here]), np.uint64(first[here + _ONE])):
                # Every path through this arc costs more than the cutoff (lowest: arc and the min
                # from there).
                if lowest[a] > spare:
                    continue

                v, arc = np.uint64(target[a]), np.uint64(label[a])
                number[_STEPS] += begin[arc + _ONE] - begin[arc]
                if what[arc] == ROUND:
                    onward = np.int64(v)
                # The clock can be joined here, or rounds later: both ways are followed.
                elif what[arc] == JOIN and not early:
                    if depth == len(stack):
                        return _NO_WAY

                    stack[depth, 0], stack[depth, 1] = v, passed
                    stack[depth, 2], stack[depth, 3] = join, total
                    depth += 1

                for j in range(np.uint64(begin[arc]), np.uint64(begin[arc + _ONE])):
                    k = np.uint64(placed_kinds[j])
                    slack = spare - cost[k] - rest[v]
                    # The request must be there, fit beside what is live, and leave a path up to the
                    # cutoff.
                    if unplaced[s, k] == 0 or live + peak[k] > capacity or slack < 0:
                        continue
                    if group[k] >= 0:
                        # The table is asked for what is left once this request is placed, and the
                        # column put back.
                        column[np.uint64(group[k])] -= stride[k]

                    rise = rises(at[v], table, column) * step
                    if group[k] >= 0:
                        column[np.uint64(group[k])] += stride[k]
                    # By the table, a path that places just what is left costs more than this.
                    if rise > slack:
                        continue
                    if after[k] < 0:
                        after[k] = _set_after_placing(s, np.int64(k), old, new, of.code)
                    if after[k] < 0 or number[_FOUND] == len(placements):
                        return _NO_ROW

                    row = placements[number[_FOUND]]
                    row[TO], row[SET], row[FROM], row[KIND] = v, after[k], e, k
                    row[PASSED], row[SPENT], row[WHEN] = passed, spent, clock
                    row[TOKENS], row[LOWEST] = total + of.volume[k], cutoff - slack + rise
                    number[_FOUND] += 1

            node, passed, clock, total = onward, passed + 1, max(clock - 1, -1), total - live

    return _DONE


@njit(allocates=False, nogil=True)
def _find_placements(m: int, making: Making) -> int:
    """Find the placements that may follow the labels of each set, from a set on, in so many steps.

    Return what ran short, or `_DONE`. The set in which it was begins again with the next
    call. A step is a node that a label meets, an arc there, or a kind that an arc may place.
    """
    old, _, paths, of, scratch = making
    copies, cost, group, stride = of.copies, paths.move.cost, paths.group.of, paths.group.stride
    column, after, number = scratch.column, scratch.after, scratch.number
    while number[_NEXT] < old.sets[0]:
        # A set is begun only with steps to spare, so that the caller can look at the clock.
        if number[_STEPS] > number[_UNTIL]:
            return _REST

        s, before, placed = number[_NEXT], number[_FOUND], np.int64(0)
        for g in range(len(column)):
            column[g] = paths.group.first[g]
        for k in range(len(cost)):
            after[k] = -1
            placed += (copies[k] - old.unplaced[s, k]) * cost[k]
            if group[k] >= 0:
                column[group[k]] += old.unplaced[s, k] * stride[k]

        number[_PLACED] = placed

        for e in range(old.first[s], old.first[s + 1]):
            reason = _DONE
            if old.alive[e]:
                reason = _follow_label(e, s, m, making)
            # Placements of a set that was not completed are forgotten: it begins again.
            if reason != _DONE:
                number[_FOUND] = before
                return reason

        number[_NEXT] += 1

    return _DONE


@njit(allocates=False)
def _write_label(row: Ints, place: int, old: Layer, new: Layer, of: Sizes) -> None:
    """Write the label that a placement makes of the label before: what is live, cost and clock."""
    parent, k, passed, clock = row[FROM], row[KIND], row[PASSED], row[WHEN]
    live, tokens, about, peak = old.tokens, new.tokens, new.about, of.peak[k]
    width = tokens.shape[1]
    # A schedule starts no sooner than its requests can have arrived and completed.
    need = max(old.about[parent, NEED] - passed, of.clock)
    if clock < 0:
        need = max(need, of.ready[k])
    for j in range(width):
        tokens[place, j] = live[parent, j + passed] if j + passed < width else 0
    for j in range(of.output[k]):
        tokens[place, j] += peak - j

    about[place, NODE], about[place, COST], about[place, CLOCK] = row[TO], row[SPENT], clock
    about[place, NEED], about[place, NOW], about[place, ALL] = need, tokens[place, 0], row[TOKENS]


@njit(allocates=False, nogil=True)
def _keep_undeleted(m: int, order: Ints, making: Making) -> int:
    """Write the labels of placements, but those that one of the same set deletes.

    They come in order of set and cost. A step is a label that another is compared with.
    """
    old, new, _, of, scratch = making
    placements, number, first, join = scratch.placements, scratch.number, new.first, of.clock
    about, tokens, alive = new.about, new.tokens, new.alive
    test_steps, kept, begun = 1 + tokens.shape[1] // 64, number[_FOUND], number[_PLACED]
    while number[_NEXT] < len(order) and number[_STEPS] <= number[_UNTIL]:
        placement = order[number[_NEXT]]
        while begun <= placements[placement, SET]:
            first[begun] = kept
            begun += 1

        _write_label(placements[placement], kept, old, new, of)
        about[kept, ORIGIN] = placement

        # Any schedule that goes on from here has one of no higher cost that goes on from a.
        a = first[begun - 1]
        number[_STEPS] += 1
        while a < kept and not _deletes(a, kept, m, about, tokens, join):
            number[_STEPS] += test_steps
            a += 1

        if a == kept:
            alive[kept] = True
            kept += 1

        number[_NEXT] += 1

    first[begun : new.sets[0] + 1] = kept
    number[_FOUND], number[_PLACED] = kept, begun
    return _DONE if number[_NEXT] == len(order) else _REST


@njit(allocates=False, nogil=True)
def _delete_by_swaps(m: int, making: Making) -> int:
    """Delete labels by those that have placed a larger request instead of one of theirs.

    Only the nearest larger one left is tried, and of a set only the first `_LOOKS` labels.
    """
    _, layer, _, of, scratch = making
    number, unplaced, first = scratch.number, layer.unplaced, layer.first
    copies, larger = of.copies, of.larger
    about, tokens, alive = layer.about, layer.tokens, layer.alive
    kinds, test_steps = len(copies), 1 + tokens.shape[1] // 64

    while number[_NEXT] < layer.sets[0] and number[_STEPS] <= number[_UNTIL]:
        s = number[_NEXT]
        for j in range(kinds if first[s] < first[s + 1] else 0):
            near = 0
            # Kinds with no request left cannot be placed instead; of the others the nearest is
            # tried.
            while near < kinds and larger[j, near] >= 0 and unplaced[s, larger[j, near]] == 0:
                near += 1

            i = larger[j, near] if near < kinds else -1
            if i < 0 or unplaced[s, j] == copies[j]:
                continue

            number[_STEPS] += 1
            key = layer.key[s] - of.code[j] + of.code[i]
            other = layer.slots[_find_slot(key, unplaced, s, i, j, layer)]

            # With the larger request in place of theirs, what b goes on with fits after a, too.
            for b in range(first[s], first[s + 1] if other >= 0 else 0):
                # Labels come in order of cost, and only one of no higher cost deletes another.
                last = min(first[other] + _LOOKS, first[other + 1])
                a = first[other]
                while a < last and alive[b] and about[a, COST] <= about[b, COST]:
                    number[_STEPS] += test_steps
                    if alive[a] and _deletes(a, b, m, about, tokens, of.clock):
                        alive[b] = False

                    a += 1

        number[_NEXT] += 1

    return _DONE if number[_NEXT] == layer.sets[0] else _REST


@njit(nogil=True)
def _lowest_by_arc(graph: Leaving, rest: Ints, price: Ints) -> Ints:
    """Return by arc the min cost from its source to the end."""
    target, label = graph.target, graph.label
    costs = np.empty(len(target), np.int64)
    for a in range(np.uint64(len(target))):
        costs[a] = rest[np.uint64(target[a])] + price[np.uint64(label[a])]

    return costs


def _new_layer(sets: int, labels: int, of: Sizes, like: Layer | None = None) -> Layer:
    """Return an empty layer for so many sets and labels; only rows that are written take memory."""
    kinds, width = len(of.copies), int(of.output.max())
    number = np.uint8 if of.copies.max() < 256 else np.int32
    unplaced, key = np.empty((0, kinds), number), np.empty(0, np.uint64)
    made = np.zeros(1, np.int64)
    if like is not None:
        unplaced, key, made = like.unplaced, like.key, like.sets

    kind = np.uint8 if of.capacity < 256 else np.int32  # tokens only fall from round to round
    unplaced, key, first = wider(unplaced, sets), wider(key, sets), np.zeros(sets + 1, np.int64)
    slots = np.full(2 << sets.bit_length(), -1, np.int32)
    about, tokens = np.empty((labels, _ABOUT), np.int64), np.empty((labels, width), kind)
    alive = np.empty(labels, np.bool_)
    layer = Layer(unplaced, key, slots, made, first, about, tokens, alive)
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
        kinds, rest, count = period.kinds, period.rest, int(period.count[LABELS])
        if rest is None:
            raise ValueError("found no multipliers; expected those of the last graph")

        ready, peak, floor, copies = kinds[:4]
        cost, output = -pi, peak - floor + 1
        if output.max() > MAX_OUTPUT:
            raise TooLarge(f"found more than {MAX_OUTPUT} tokens of output; too large to check")

        self._budget, self._limits, self._between = period.budget, period.limits, between
        self.n, self._pi = period.n, pi
        price, step = period.prices(pi, unit), max(0, cutoff - int(rest[0])) // TOP + 1
        row = rows_of(graph, price[:, 1])
        group = groups(peak, copies, int(row[-1]) + 1, period.limits.table_bytes)
        move = moves(period.labels.mask[:count], price, cost, group)
        table = tables(rest, Costs(graph, row, move, group, step), between)
        what, lowest = period.labels.what[:count], _lowest_by_arc(graph, rest, move.lowest)
        self._paths = Paths(graph, what, lowest, move, group, rest, row, table, step, unit, cutoff)
        volume, larger = output * (peak + floor) // 2, larger_kinds(ready - output, peak, output)
        code = np.random.default_rng(1).integers(1, 2**64, len(cost), dtype=np.uint64)
        ready = ready if (ready > output).any() else np.zeros_like(peak)
        sizes = copies, peak, output, volume, ready, larger, code
        self._of = Sizes(*sizes, kinds.capacity, period.clock)
        limits, row_bytes = period.limits, 216 + 2 * len(cost) + 8 * int(output.max())
        self.max_placements = min(limits.layer, limits.layer_bytes // row_bytes)
        found = min(_ROWS, self.max_placements), _COLUMNS
        shapes = found, len(group.first) - 1, len(cost), (limits.ways[0], 4), 6
        self._scratch = Scratch._make(np.zeros(shape, np.int64) for shape in shapes)
        self.start()

    def start(self) -> None:
        """Begin with a layer of one label, which has placed nothing."""
        of = self._of
        self.layer = _new_layer(1, 1, of)
        self.layer.unplaced[0], self.layer.key[0], self.layer.sets[0] = of.copies, 0, 1
        self.layer.first[:] = 0, 1
        self.layer.about[0], self.layer.tokens[0] = (0, 0, -1, of.clock, 0, 0, -1), 0
        self.layer.alive[0] = True
        self.placements = self._scratch.placements[:0]

    @property
    def labels(self) -> Ints:
        """The labels of the present layer that are there."""
        layer = self.layer
        return np.flatnonzero(layer.alive[: int(layer.first[layer.sets[0]])])

    def place(self, m: int, width: int | None = None) -> None:
        """Make the labels with one more request placed than m.

        With a `width` only so many of the lowest estimates, with which nothing is shown.
        """
        of, new = self._of, _new_layer(len(self._scratch.placements), 0, self._of)

        def find() -> int:
            nonlocal new
            short: int = _find_placements(m, self._making(new))
            if short == _NO_WAY:
                self._lengthen_stack()
            elif short == _NO_ROW:
                new = self._more_rows(new)

            return short

        self._finish(find)
        found = self._scratch.placements[: self._scratch.number[_FOUND]]
        order = np.arange(len(found))
        if width is not None and len(found) > _CANDIDATES * width:
            order = np.argpartition(found[:, LOWEST], _CANDIDATES * width)[: _CANDIDATES * width]

        order = order[np.lexsort(found[order][:, [TOKENS, SPENT, SET]].T)]
        arrays = _new_layer(1, len(order) + 1, of)
        new = new._replace(about=arrays.about, tokens=arrays.tokens, alive=arrays.alive)
        making = self._making(new)
        self._finish(lambda: _keep_undeleted(m + 1, order, making))
        self._finish(lambda: _delete_by_swaps(m + 1, making))
        self.layer, self.placements = new, found

        if width is not None and len(self.labels) > width:
            lowest = found[new.about[self.labels, ORIGIN], LOWEST]
            new.alive[self.labels[np.argpartition(lowest, width)[width:]]] = False

    def _making(self, new: Layer) -> Making:
        return Making(self.layer, new, self._paths, self._of, self._scratch)

    def totals(self) -> Ints:
        """Return what the labels of the last layer cost, which are schedules: in rounds."""
        layer, some = self.layer, self.labels
        about, live = layer.about[some], (layer.tokens[some] > 0).sum(axis=1)
        since = about[:, CLOCK]  # rounds from the start to the last placement
        since = np.where(since < 0, np.maximum(about[:, NEED], live), since)
        totals: Ints = about[:, COST] + self.n * since

        return totals

    def _finish(self, go_on: Callable[[], int]) -> None:
        """Call a pass that goes on where it stopped until it is done, and charge its steps."""
        number, short = self._scratch.number, _REST
        number[:] = 0
        while short != _DONE:
            if self._between is not None:
                self._between()

            number[_ALLOWED] = self._budget.compiled
            number[_UNTIL] = min(_PAUSE, self._budget.compiled)
            short = go_on()
            self._budget.spend_compiled(int(number[_STEPS]))
            number[_STEPS] = 0

    def _lengthen_stack(self) -> None:
        stack, (_, deepest) = self._scratch.stack, self._limits.ways
        if len(stack) >= deepest:
            raise TooLarge(f"found more than {deepest} ways to join the clock; too large to check")

        self._scratch = self._scratch._replace(stack=np.empty((2 * len(stack), 4), np.int64))

    def _more_rows(self, new: Layer) -> Layer:
        found = self._scratch.placements
        if len(found) >= self.max_placements:
            raise TooLarge(f"found more than {self.max_placements} labels; too large to check")

        rows = min(self.max_placements, 4 * len(found))
        self._scratch = self._scratch._replace(placements=wider(found, rows))
        return _new_layer(rows, 0, self._of, new)


def larger_kinds(arrival: Ints, peak: Ints, output: Ints) -> Ints:
    """Return by kind those as large in peak, output and arrival + output, nearest first."""
    sizes = np.stack([peak, output, arrival + output])
    away = sizes[:, None, :] - sizes[:, :, None]  # by kind, how much larger each kind is
    is_larger = (away >= 0).all(axis=0) & ~np.eye(sizes.shape[1], dtype=bool)
    distance = np.where(is_larger, away.sum(axis=0), np.iinfo(np.int64).max)
    order = np.argsort(distance, axis=1, kind="stable")

    return np.where(np.take_along_axis(is_larger, order, axis=1), order, -1)
