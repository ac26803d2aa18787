"""Enumeration at the end of a ramp leaf: is there a schedule below a value? Compiled.

A label is a graph node together with the requests placed on a way there and the tokens of the live
ones, in this and each earlier round. Labels are made layer by layer, one for each number of
placements. Those of the last layer are schedules.

**Deletion.** Label A deletes label B of the same layer if both have placed the same requests, or A
has placed one of kind i where B has placed one of kind j, with i at least j in peak, output and
arrival + output; and if A, some rounds later, is where B is: its cost is then at most B's, its
tokens in this round and each earlier one are at most B's, and it may join the clock whenever B may
(`_deletes`).

*Proof.* Let B have a completion: its other requests are placed in earlier rounds, up to a start of
the schedule. A waits and then does the same, with j where B places i, which B has left to place.
Request j holds p_j - x tokens x rounds before it completes, for x < o_j. These are at most the
p_i - x of i, and there are no more rounds of them. So A's requests fit where B's fit. B's i
completes at a_i + o_i or later, and so does j, as a_j + o_j is no later. If the schedule starts
without a clock, at the earliest round that arrivals and live requests allow, A's start is no later
for the same reasons. So A has a completion that costs no more than B's.

*No circle.* Labels are deleted one after another, each by one that is there at that moment. The
one that deleted B may be deleted later, by one that is there later. These moments ascend, so they
end at a label that stays, and it has a completion of at most B's cost.

*The next layer has it.* A schedule up to the cutoff is a path of the graph, because the graph only
lost paths that cost more. So the label that the completion passes next is made.

Numbers stay below 2**62 (`optsched.bounds.checker.period.expect_fitting`). Labels that have placed
the same form a set, and the labels of a set lie next to each other, in order of cost. So each is
compared with those before it, and what belongs to a set is looked up once for all its labels. A
layer is made in three passes: find the placements, keep what no label of the same set deletes, and
delete by swaps. Of the kinds that are larger than one, only the nearest that is left is tried
instead of it, and only the `_LOOKS` cheapest labels of a set. So some labels stay that others could
delete. Tables are of groups of kinds (`optsched.bounds.checker.groups`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.groups import TOP, groups, moves, rises, rows_of, tables
from optsched.bounds.checker.parts import Budget, Ints, TooLarge
from optsched.bounds.checker.product import LABELS
from optsched.bounds.checker.states import JOIN, ROUND, wider
from optsched.problem.kernel import njit

MAX_LABELS = 8_000_000
"""Max labels of a layer before any is deleted, if they take at most `MAX_BYTES`."""
MAX_BYTES = 3 * 2**30
MAX_OUTPUT = 2**24
"""Max rounds of a run: a label has its tokens for each."""
_LOOKS = 16  # labels of another set that may delete one
_FEW = 4000  # placements and sets that a layer has room for at first
_DEEP, _DEEPEST = 64, 2**20  # ways to join the clock that a label has at first, and at most
_DONE, _NO_ROW, _NO_WAY, _NO_STEPS = 0, 1, 2, 3  # what a layer ran short of
_ONE = np.uint64(1)
_NODE, _COST, _CLOCK, _NEED, _NOW, _ALL, _ROWS = range(7)  # of a label; tokens now, and in all
_TO, _SET, _FROM, _KIND, _PASSED, _SPENT, _WHEN, _TOKENS, _COLUMNS = range(9)  # of a placement
_NEXT, _FOUND, _STEPS = 0, 1, 2  # the set to go on with, placements, steps


class Paths(NamedTuple):
    """The last graph, its arcs in order of source, and what its paths cost."""

    first: Any
    target: Any
    label: Any
    loop: Any
    what: Any  # of each label
    least: Any  # by arc, the least cost from its source to the end
    begin: Any  # of the kinds of each label
    kinds: Any
    rest: Any
    row: Any  # of each node in the table
    table: Any  # what the cost to the end rises by (`groups`)
    of: Any  # of each kind, its group or -1
    stride: Any
    columns: Any  # by group, the first one
    step: Any  # the unit of the table
    cost: Any  # of each kind
    unit: Any
    cutoff: Any


class Of(NamedTuple):
    """The kinds of requests."""

    copies: Any
    peak: Any
    output: Any
    volume: Any  # tokens of a request, all rounds together
    ready: Any
    larger: Any  # by kind, those at least as large, the nearest first, then -1
    sign: Any
    capacity: Any
    clock: Any


class Sets(NamedTuple):
    """What is left for the labels of each set, and where they are."""

    left: Any  # requests of each kind
    key: Any
    slots: Any  # a hash table of the keys
    count: Any
    first: Any  # by set, its first label; at the end the number of labels


class Labels(NamedTuple):
    """Labels: integers (see `_NODE` and so on), live tokens, and whether they are still there."""

    about: Any
    tokens: Any
    there: Any


@njit(allocates=False)
def _deletes(a: int, b: int, m: int, about: Any, tokens: Any, join: int) -> bool:
    """Whether a, some rounds later, is where b is and holds no more tokens at any time."""
    width = tokens.shape[1]
    gain = about[b, _COST] - about[a, _COST]
    # In each round that a waits it loses at most the tokens of this round, and after `width` rounds
    # it has none. Most labels are told apart here.
    lost = min(gain, m * width) * about[a, _NOW]
    if gain < 0 or (about[a, _ALL] - about[b, _ALL]) * m > lost:
        return False
    waits = gain // m
    clock_a, clock_b = about[a, _CLOCK], about[b, _CLOCK]
    if clock_a >= 0:
        right = clock_b >= 0 and 0 <= clock_a - clock_b <= waits
        waits = clock_a - clock_b
    elif clock_b >= 0:
        before = waits - join + clock_b
        right = before >= 0 and about[a, _NEED] - before <= join
    else:
        right = max(about[a, _NEED] - waits, join) <= about[b, _NEED]
    j = 0
    while right and j + waits < width:
        right = tokens[a, j + waits] <= tokens[b, j]
        j += 1
    return right


@njit(allocates=False)
def _slot(key: Any, left: Any, row: int, less: int, more: int, sets: Sets) -> Any:
    """Return the slot of a set, or the empty one where it belongs.

    What is left for it is a row of ``left`` with one less of a kind and one more of another.
    """
    own, keys, slots = sets.left, sets.key, sets.slots
    last = np.uint64(len(slots) - 1)
    at = (key >> np.uint64(7)) & last
    while slots[at] >= 0:
        s = slots[at]
        same = keys[s] == key
        for k in range(left.shape[1] if same else 0):
            same &= np.int64(own[s, k]) == np.int64(left[row, k]) - (k == less) + (k == more)
        if same:
            break
        at = (at + _ONE) & last
    return at


@njit(allocates=False)
def _enter_keys(sets: Sets) -> None:
    """Enter the sets in their hash table, which is empty."""
    for s in range(sets.count[0]):
        sets.slots[_slot(sets.key[s], sets.left, s, -1, -1, sets)] = s


@njit(allocates=False)
def _set_after(s: int, k: int, old: Sets, new: Sets, sign: Any) -> Any:
    """Return the set of the labels of set s that place kind k next, or -1 without room for it."""
    key, row = old.key[s] + sign[k], new.count[0]
    at = _slot(key, old.left, s, k, -1, new)
    if new.slots[at] < 0:
        if row == len(new.key):
            return np.int64(-1)
        for j in range(old.left.shape[1]):
            new.left[row, j] = old.left[s, j] - (j == k)
        new.key[row], new.slots[at] = key, row
        new.count[0] += 1
    return np.int64(new.slots[at])


@njit(allocates=False)
def _follow(
    e: int, s: int, m: int, placed: int, old: Sets, labels: Labels, new: Sets, found: Any,
    paths: Paths, of: Of, few: Any, after: Any, stack: Any, number: Any, most: int
) -> int:  # fmt: skip
    """Find what may be placed after label e of set s; return what was too little, or `_DONE`."""
    first, target, label, loop, what = paths[:5]
    least, begin, listed, rest, at, table = paths[5:11]
    group, stride, _, step, cost, unit, cutoff = paths[11:]
    about, tokens, left = labels.about, labels.tokens, old.left
    peak, capacity, join, need = of.peak, of.capacity, of.clock, about[e, _NEED]
    stack[0, 0], stack[0, 1] = about[e, _NODE], 0
    stack[0, 2], stack[0, 3] = about[e, _CLOCK], about[e, _ALL]
    depth = 1
    while depth > 0:
        depth -= 1
        node, passed = stack[depth, 0], stack[depth, 1]
        clock, total = stack[depth, 2], stack[depth, 3]
        while node >= 0:
            number[_STEPS] += 1
            if number[_STEPS] > most:
                return _NO_STEPS
            here, spent = np.uint64(node), about[e, _COST] + m * passed
            spare = cutoff - spent * unit - placed
            if rest[here] > spare or rest[here] + rises(at[here], table, few) * step > spare:
                break
            live = np.int64(tokens[e, passed]) if passed < tokens.shape[1] else np.int64(0)
            early = clock < 0 and need - passed > join
            number[_STEPS] += first[here + _ONE] - first[here]
            onward = node if loop[here] >= 0 and (live > 0 or early) else np.int64(-1)
            for a in range(np.uint64(first[here]), np.uint64(first[here + _ONE])):
                if least[a] > spare:
                    continue
                v, arc = np.uint64(target[a]), np.uint64(label[a])
                number[_STEPS] += begin[arc + _ONE] - begin[arc]
                if what[arc] == ROUND:
                    onward = np.int64(v)
                elif what[arc] == JOIN and not early:
                    if depth == len(stack):
                        return _NO_WAY
                    stack[depth, 0], stack[depth, 1] = v, passed
                    stack[depth, 2], stack[depth, 3] = join, total
                    depth += 1
                for j in range(np.uint64(begin[arc]), np.uint64(begin[arc + _ONE])):
                    k = np.uint64(listed[j])
                    room = spare - cost[k] - rest[v]
                    if left[s, k] == 0 or live + peak[k] > capacity or room < 0:
                        continue
                    if group[k] >= 0:
                        few[np.uint64(group[k])] -= stride[k]
                    more = rises(at[v], table, few) * step
                    if group[k] >= 0:
                        few[np.uint64(group[k])] += stride[k]
                    if more > room:
                        continue
                    if after[k] < 0:
                        after[k] = _set_after(s, np.int64(k), old, new, of.sign)
                    if after[k] < 0 or number[_FOUND] == len(found):
                        return _NO_ROW
                    row = found[number[_FOUND]]
                    row[_TO], row[_SET], row[_FROM], row[_KIND] = v, after[k], e, k
                    row[_PASSED], row[_SPENT], row[_WHEN] = passed, spent, clock
                    row[_TOKENS] = total + of.volume[k]
                    number[_FOUND] += 1
            node, passed, clock, total = onward, passed + 1, max(clock - 1, -1), total - live
    return _DONE


@njit(allocates=False)
def _find(
    m: int, old: Sets, labels: Labels, new: Sets, found: Any, paths: Paths, of: Of, few: Any,
    after: Any, stack: Any, number: Any, most: int
) -> int:  # fmt: skip
    """Find what may be placed after the labels of each set, from a set on, in so many steps.

    Returns what was too little, or `_DONE`. The set in which it was begins again with the next
    call. A step is a node that a label meets, an arc there, or a kind
    that an arc may place. ``few``, ``after`` and ``stack`` are scratch space.
    """
    copies, cost, group, stride = of.copies, paths.cost, paths.of, paths.stride
    while number[_NEXT] < old.count[0]:
        s, before, placed = number[_NEXT], number[_FOUND], np.int64(0)
        for g in range(len(few)):
            few[g] = paths.columns[g]
        for k in range(len(cost)):
            after[k] = -1
            placed += (copies[k] - old.left[s, k]) * cost[k]
            if group[k] >= 0:
                few[group[k]] += old.left[s, k] * stride[k]
        for e in range(old.first[s], old.first[s + 1]):
            short = _DONE
            if labels.there[e]:
                short = _follow(
                    e, s, m, placed, old, labels, new, found, paths, of, few, after, stack, number,
                    most
                )  # fmt: skip
            if short != _DONE:
                number[_FOUND] = before
                return short
        number[_NEXT] += 1
    return _DONE


@njit(allocates=False)
def _write(row: Any, at: int, old: Labels, new: Labels, of: Of) -> None:
    """Write the label of a placement into a row."""
    e, k, passed, clock = row[_FROM], row[_KIND], row[_PASSED], row[_WHEN]
    live, tokens, about, peak = old.tokens, new.tokens, new.about, of.peak[k]
    width = tokens.shape[1]
    need = max(old.about[e, _NEED] - passed, of.clock)
    if clock < 0:
        need = max(need, of.ready[k])
    for j in range(width):
        tokens[at, j] = live[e, j + passed] if j + passed < width else 0
    for j in range(of.output[k]):
        tokens[at, j] += peak - j
    about[at, _NODE], about[at, _COST], about[at, _CLOCK] = row[_TO], row[_SPENT], clock
    about[at, _NEED], about[at, _NOW], about[at, _ALL] = need, tokens[at, 0], row[_TOKENS]


@njit(allocates=False)
def _keep(
    m: int, order: Any, found: Any, old: Labels, sets: Sets, new: Labels, of: Of, most: int
) -> Any:  # fmt: skip
    """Write the labels of placements, but those that one of the same set deletes.

    They come in order of set and cost. Returns the number of steps, where it ends with `most`: a
    step is a label that another is compared with.
    """
    about, tokens, there, join = new.about, new.tokens, new.there, of.clock
    wide, kept, begun, steps = 1 + tokens.shape[1] // 64, 0, 0, np.int64(0)
    for x in order:
        while begun <= found[x, _SET]:
            sets.first[begun] = kept
            begun += 1
        _write(found[x], kept, old, new, of)
        a = sets.first[begun - 1]
        steps += 1
        while a < kept and not _deletes(a, kept, m, about, tokens, join):
            steps += wide
            a += 1
        if a == kept:
            there[kept] = True
            kept += 1
        if steps > most:
            break
    sets.first[begun : sets.count[0] + 1] = kept
    return steps


@njit(allocates=False)
def _swap(m: int, sets: Sets, labels: Labels, of: Of, most: int) -> Any:
    """Delete labels by those that have placed a larger request instead of one of theirs.

    Of the larger ones that are left only the nearest is tried, in place of each kind, and of
    labels that have placed the same only the first `_LOOKS`. Returns the number of steps.
    """
    left, first, copies, larger = sets.left, sets.first, of.copies, of.larger
    about, tokens, there = labels.about, labels.tokens, labels.there
    kinds, steps, wide = len(copies), np.int64(0), 1 + tokens.shape[1] // 64
    for s in range(sets.count[0] if first[sets.count[0]] else 0):
        for j in range(kinds if first[s] < first[s + 1] and steps <= most else 0):
            c = 0
            while c < kinds and larger[j, c] >= 0 and left[s, larger[j, c]] == 0:
                c += 1
            i = larger[j, c] if c < kinds else -1
            if i < 0 or left[s, j] == copies[j]:
                continue
            steps += 1
            other = sets.slots[_slot(sets.key[s] - of.sign[j] + of.sign[i], left, s, i, j, sets)]
            for b in range(first[s], first[s + 1] if other >= 0 else 0):
                last = min(first[other] + _LOOKS, first[other + 1])
                a = first[other]
                while a < last and there[b] and about[a, _COST] <= about[b, _COST]:
                    steps += wide
                    if there[a] and _deletes(a, b, m, about, tokens, of.clock):
                        there[b] = False
                    a += 1
    return steps


def _sets(rows: int, copies: Ints, like: Sets | None = None) -> Sets:
    """Return room for so many sets, with those of another one if given."""
    number = np.uint8 if copies.max() < 256 else np.int32
    left, key = np.empty((0, len(copies)), number), np.empty(0, np.uint64)
    count = np.zeros(1, np.int64)
    if like is not None:
        left, key, count = like.left, like.key, like.count
    slots = np.full(2 << rows.bit_length(), -1, np.int32)
    sets = Sets(wider(left, rows), wider(key, rows), slots, count, np.zeros(rows + 1, np.int64))
    _enter_keys(sets)
    return sets


def _room(rows: int, width: int, capacity: int) -> Labels:
    """Return room for so many labels. Memory is taken only for rows that are written."""
    tokens = np.uint8 if capacity < 256 else np.int32  # they only fall from round to round
    return Labels(
        np.empty((rows, _ROWS), np.int64), np.empty((rows, width), tokens),
        np.empty(rows, np.bool_),
    )  # fmt: skip


class _Layers:
    """Makes one layer after another.

    Parameters
    ----------
    paths : Paths
    of : Of
    budget : Budget
    """

    def __init__(self, paths: Paths, of: Of, budget: Budget) -> None:
        self._paths, self._of, self._budget = paths, of, budget
        self._width, kinds = int(of.output.max()), len(of.copies)
        self._most = min(MAX_LABELS, MAX_BYTES // (200 + 2 * kinds + 8 * self._width))
        self._found = np.empty((min(_FEW, self._most), _COLUMNS), np.int64)
        self._few, self._after = np.empty(len(paths.columns), np.int64), np.empty(kinds, np.int64)
        self._stack = np.empty((_DEEP, 4), np.int64)
        self.sets, self.labels = _sets(1, of.copies), _room(1, self._width, of.capacity)
        self.sets.left[0], self.sets.key[0], self.sets.count[0] = of.copies, 0, 1
        self.sets.first[:] = 0, 1
        self.labels.about[0], self.labels.tokens[0] = (0, 0, -1, of.clock, 0, 0), 0
        self.labels.there[0] = True

    def place(self, m: int) -> None:
        """Make the labels with one more request placed than m."""
        number, copies = np.zeros(3, np.int64), self._of.copies
        new, short = _sets(len(self._found), copies), -1
        while short != _DONE:
            short = _find(
                m, self.sets, self.labels, new, self._found, self._paths, self._of, self._few,
                self._after, self._stack, number, self._budget.compiled
            )  # fmt: skip
            self._budget.spend_compiled(int(number[_STEPS]))
            number[_STEPS] = 0
            if short == _NO_WAY:
                if len(self._stack) >= _DEEPEST:
                    raise TooLarge(
                        f"found more than {_DEEPEST} ways to join the clock; too large to check"
                    )
                self._stack = np.empty((2 * len(self._stack), 4), np.int64)
            elif short == _NO_ROW:
                if len(self._found) >= self._most:
                    raise TooLarge(f"found more than {self._most} labels; too large to check")
                rows = min(self._most, 4 * len(self._found))
                self._found, new = wider(self._found, rows), _sets(rows, copies, new)
        found = self._found[: number[_FOUND]]
        order = np.lexsort((found[:, _TOKENS], found[:, _SPENT], found[:, _SET]))
        labels = _room(len(found) + 1, self._width, self._of.capacity)
        most = self._budget.compiled
        self._budget.spend_compiled(
            _keep(m + 1, order, found, self.labels, new, labels, self._of, most)
        )  # fmt: skip
        most = self._budget.compiled
        self._budget.spend_compiled(_swap(m + 1, new, labels, self._of, most))
        self.sets, self.labels = new, labels


def larger_kinds(arrival: Any, peak: Any, output: Any) -> Any:
    """Return by kind the larger ones, the nearest first, then -1.

    A label that placed one of these instead of the kind may delete one that did not. They are at
    least as large in peak, output and arrival + output.
    """
    sizes = np.stack([peak, output, arrival + output])
    away = sizes[:, None, :] - sizes[:, :, None]  # by kind, how much larger each kind is
    right = (away >= 0).all(axis=0) & ~np.eye(sizes.shape[1], dtype=bool)
    distance = np.where(right, away.sum(axis=0), np.iinfo(np.int64).max)
    order = np.argsort(distance, axis=1, kind="stable")
    return np.where(np.take_along_axis(right, order, axis=1), order, -1)


def none_left(
    period: Any, outward: Any, price: Any, pi: Any, unit: int, cutoff: int, budget: Budget
) -> bool:
    """Return whether no schedule costs at most the cutoff.

    Parameters
    ----------
    period : optsched.bounds.checker.period.Period
        With the last graph and each node's cost to the end.
    outward : tuple of ndarray
        The arcs by the node that they leave: the first of each node, the nodes that they reach,
        and the numbers of their labels.
    price : ndarray
        Of each label the least cost, and the kind of this cost or -1.
    pi : list of int
    unit, cutoff : int
    budget : Budget

    Raises
    ------
    TooLarge
        The labels are too many.
    """
    graph, labels, rest, kinds = period.graph, period.labels, period.rest, period.kinds
    count, cost = int(period.count[LABELS]), -pi
    step = max(0, cutoff - int(rest[0])) // TOP + 1
    first, targets, numbers = outward
    ready, peak, floor, copies = kinds[:4]
    output = peak - floor + 1
    if output.max() > MAX_OUTPUT:
        raise TooLarge(f"found more than {MAX_OUTPUT} tokens of output; too large to check")
    row = rows_of(first, targets, price[numbers, 1])
    group = groups(peak, copies, int(row[-1]) + 1)
    move = moves(labels.mask[:count], price, cost, group)
    table = tables(rest, row, first, targets, numbers, move, group, step)
    paths = Paths(
        first, targets, numbers, graph.loop, labels.what[:count],
        rest[targets] + price[numbers, 0], move.begin, move.kinds, rest, row, table,
        group.of, group.stride, group.first[:-1].copy(), step, cost, unit, cutoff,
    )  # fmt: skip
    of = Of(
        copies, peak, output, output * (peak + floor) // 2,
        ready if (ready > output).any() else np.zeros_like(peak),
        larger_kinds(ready - output, peak, output),
        np.random.default_rng(1).integers(1, 2**64, len(cost), dtype=np.uint64),
        kinds.capacity, period.clock,
    )  # fmt: skip
    layers = _Layers(paths, of, budget)
    for m in range(period.n):
        layers.place(m)
    sets, (about, tokens, there) = layers.sets, layers.labels
    some = slice(int(sets.first[sets.count[0]]))
    clock, need = about[some, _CLOCK], about[some, _NEED]
    since = np.where(clock < 0, np.maximum(need, (tokens[some] > 0).sum(axis=1)), clock)
    total = (about[some, _COST] + period.n * since) * unit + int((copies * cost).sum())
    return not bool((total[there[some]] <= cutoff).any())
