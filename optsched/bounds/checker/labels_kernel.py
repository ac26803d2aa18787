"""The compiled search for a schedule below what a leaf ``labels`` claims.

`optsched.bounds.checker.labels` has the rules and the bounds, with their proofs; "module's text"
below is its docstring. A state is a row with a *code* for each request, 2 k + held: it has produced
k tokens, and its KV is held (1) or not (0). A request has completed at 2 output.

A request is *there* if it has arrived and not completed, and a *resident* if its KV is held. A
state is *quiet* if all that are unfinished fit at their peaks, in one batch, also as prefills, and
no refill in place of a decode may pay (rule 3). In it a request is *forced* (rule 4) if, where its
KV is held, no batch has to be followed that decodes without it. A *layer* has the labels of equally
many tokens produced.

In all functions ``row`` is a state, the machine is free from ``t`` on, a batch begins at ``start``,
``slack`` is what a claim leaves for what is not counted yet, and ``lists`` are scratch space.
"""

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.problem.kernel import njit

# Values of `Tables.counts`: what a claim is about. With 0 the sum of completions counts.
LATEST, FIRSTS = 1, 2
NEVER = 2**62  # later than all times
# How a search ends: it is through, has found a schedule below the claim, has taken its steps, needs
# more space for labels; or it does not end yet.
PROVED, FOUND, PAUSE, GROW, GO_ON = range(5)
# What a batch may do with a request. `REFILL` prefills again one whose KV is held.
IDLE, DECODE, PREFILL, EVICT, REFILL = range(5)
# Sums of a batch: the first four have limits. Then own work, how many decode and prefill, how many
# arrive as it begins, and how many of its prefills were there for the batch before, and of these,
# are forced.
TOKENS, PROMPTS, HELD, RUNS, WORK, DECODES, PREFILLS, NEW, EARLY, FORCED, SUMS = range(11)
# Places of counters: labels, the layer to go on with, and steps.
COUNT, LAYER, STEPS = range(3)


class Tables(NamedTuple):
    """Requests in order of arrival, equal ones side by side; by request and tokens produced k.

    `kv` is held after token k; `decode` and `prefill` are own work of token k + 1, `tokens` of its
    prefill, and `refills` says whether a later token may be refilled in place. By code, 2 k + held,
    `work` and `fixed` are the least that is needed. `begin` and `least` are the claims that are
    proved, so many as `known`. `kind` is the number of the first of equal requests. `limits` are
    those of the first four sums of a batch (`TOKENS` and so on), and `hybrid` is 1 if a batch may
    decode and prefill. `counts` says what a claim counts: 0, `LATEST` or `FIRSTS`.
    """

    arrival: Ints
    output: Ints
    kind: Ints
    kv: Ints
    decode: Ints
    prefill: Ints
    tokens: Ints
    refills: Ints
    work: Ints
    fixed: Ints
    begin: Ints
    least: Ints
    known: Ints
    limits: Ints
    base: int
    decode_base: int
    prefill_base: int
    hybrid: int
    counts: int


class Labels(NamedTuple):
    """By label: its state, t, what is counted so far (S), and when the batch before began.

    The last one is -1 where rule 5 does not look at it. `other` is the next label of its state, and
    `following` the next of its layer, which has all with as many tokens produced; -1: none. `head`
    has the first label of each layer. `alive` is 0 for a label that another has made needless.
    """

    rows: Ints
    time: Ints
    counted: Ints
    before_began: Ints
    other: Ints
    following: Ints
    alive: Ints
    head: Ints
    slots: Ints  # a hash table of states: the first label of each
    counters: Ints  # see `COUNT` and so on


class Scratch(NamedTuple):
    """The label at hand, and the batch in the making, which is decided request by request."""

    row: Ints  # the label's state
    child: Ints  # the state after the batch
    forced: Ints  # by request, whether rule 4 forces it
    was_there: Ints  # by request, whether it was there for the batch before, if rule 5 looks at it
    present: Ints  # the requests that are there as the batch begins
    choices: Ints  # by place in `present`, what may be done with the request
    options: Ints  # how many of these there are
    chosen: Ints  # which of them is chosen
    sums: Ints  # row d has the sums of the first d in `present`, see `TOKENS` and so on
    lists: Ints  # scratch: ascending lists for bounds


@njit
def _find_slot(row: Ints, labels: Labels) -> Any:
    """Return the slot of a state, or the empty slot where it belongs."""
    # A hash: any numbers would be right here, since states are compared below.
    code = np.uint64(88172645463325252)
    for i in range(row.shape[0]):
        code = (code + np.uint64(row[i]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(31)

    mask = np.uint64(labels.slots.shape[0] - 1)  # of a power of two: & takes a remainder
    slot = code & mask
    while labels.slots[slot] >= 0:
        # Open addressing: go on to the next slot until the state or an empty one is met.
        known, same = labels.slots[slot], True
        for i in range(row.shape[0]):
            if labels.rows[known, i] != row[i]:
                same = False
                break
        if same:
            break

        slot = (slot + np.uint64(1)) & mask

    return slot


@njit
def enter_states(labels: Labels, slots: Ints) -> None:
    """Enter the states of smaller slots, each with its first label."""
    for slot in range(slots.shape[0]):
        if slots[slot] >= 0:
            labels.slots[_find_slot(labels.rows[slots[slot]], labels)] = slots[slot]


@njit
def _insert_sorted(values: Ints, size: int, value: int) -> None:
    """Insert a value into an ascending list of so many."""
    place = size
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1

    values[place] = value


@njit
def _bound_completions(t: int, size: int, lists: Ints) -> Any:
    """Return a bound on the sum of ``size`` completions from t on.

    Each of three lists ascends: by request the end if it is served alone, its work, and its fixed
    costs. The j-th completion is at least the j-th end, and at least t, the j least works and the
    j-th fixed cost together (module's text, Bounds).
    """
    total, now = np.int64(0), np.int64(t)
    for j in range(size):
        now += lists[1, j]
        total += max(lists[0, j], now + lists[2, j])

    return total


@njit
def _bound_by_claims(m: int, t: int, tables: Tables) -> Any:
    """Return what proved claims say of the requests from m on, if the machine is free from t on.

    A claim is that they count ``least`` or more if the machine is free from ``begin`` on: L(m,
    begin). L does not fall with t. From t to t + d it rises by c d at most, if c ends count, and by
    just that from the last arrival on (module's text, Claims).
    """
    n, best, t = tables.arrival.shape[0], np.int64(0), max(t, tables.arrival[m])
    # How many ends the value counts: the latest, or one of each request. A begin that is d later
    # moves each of them by at most d.
    ends = 1 if tables.counts == LATEST else n - m
    for k in range(tables.known[m]):
        value, begin = tables.least[m, k], tables.begin[m, k]
        if begin > t:
            # The machine is free earlier than the claim says, so each end may be as much earlier.
            value -= ends * (begin - t)
        elif begin >= tables.arrival[n - 1]:
            # All have arrived, so a later begin makes each end as much later.
            value += ends * (t - begin)
        # Otherwise the claim is about an earlier time, and holds at t as it is: L does not fall.

        best = max(best, value)

    return best


@njit
def _bound_last_end(row: Ints, t: int, tables: Tables) -> Any:
    """Return a bound on the latest completion of a state at t (module's text, Bounds).

    Requests are added from the last arrival back: all of them arrive at the present one or later.
    """
    best, work, fixed, n = np.int64(t), np.int64(0), np.int64(0), row.shape[0]
    untouched = True
    for i in range(n - 1, -1, -1):
        untouched &= row[i] == 0
        if row[i] < 2 * tables.output[i]:  # it has not completed
            # Works of several add up. Their batches may be the same, so of fixed costs the largest
            # counts.
            work += tables.work[i, row[i]]
            fixed = max(fixed, tables.fixed[i, row[i]])
            best = max(best, max(t, tables.arrival[i]) + work + fixed)
        # A claim is about all requests from i on, of which none has begun.
        if untouched:
            best = max(best, _bound_by_claims(i, t, tables))

    return best


@njit
def _bound_uncounted(
    row: Ints, t: int, enough: int, tables: Tables, lists: Ints, late: int = -1, until: int = 0
) -> Any:
    """Return a bound V on what is still to be counted from a state on; ``enough`` will do.

    It may be returned as soon as it is so much. The request ``late``, if any, does not end before
    ``until``. ``lists`` get by request its end alone, its work and its fixed cost.
    """
    n, size, best = row.shape[0], 0, np.int64(0)
    if tables.counts == LATEST:
        return _bound_last_end(row, t, tables)

    # From ``untouched`` on all have the code 0: none of them has begun.
    untouched = n
    while untouched > 0 and row[untouched - 1] == 0:
        untouched -= 1
    for i in range(n):
        # There a claim about the rest may be added to the bound of those before.
        if i >= untouched and tables.known[i] > 0:
            best = max(best, _bound_completions(t, size, lists) + _bound_by_claims(i, t, tables))
            if best >= enough:
                return best

        code = np.int64(row[i])
        # It has completed, or its first token is out: it counts no more.
        if code == 2 * tables.output[i] or (tables.counts == FIRSTS and code > 0):
            continue

        work, fixed = tables.work[i, code], tables.fixed[i, code]
        end = max(t, tables.arrival[i]) + work + fixed
        _insert_sorted(lists[0], size, max(end, until) if i == late else end)
        _insert_sorted(lists[1], size, work)
        _insert_sorted(lists[2], size, fixed)
        size += 1

    return max(best, _bound_completions(t, size, lists))


@njit
def _bound_after_batch(d: int, size: int, start: int, tables: Tables, s: Scratch) -> Any:
    """Return a bound on what completes after a batch in the making, from a quiet state on.

    Of the ``size`` requests in `present` the first d are decided. The batch ends at t or later,
    since it does at least what is decided. The others' work and completions come later. ``lists``
    get by request its end alone, its work and its fixed cost.
    """
    sums, arrived, t = s.sums[d], s.row.shape[0], start + tables.base + s.sums[d, WORK]
    t += tables.decode_base * (sums[DECODES] > 0) + tables.prefill_base * (sums[PREFILLS] > 0)
    for e in range(size):
        i = s.present[e]
        code, saved = np.int64(s.row[i]), 0
        # This batch may also serve those that are not decided, and its fixed cost is in t already.
        # So it comes off theirs, with the larger of both bases, as it may decode or prefill them.
        if e >= d:
            saved = tables.base + max(tables.decode_base, tables.prefill_base)
        # Whoever is decided and not idle has one token more, and is held unless it has completed:
        # in a quiet state nothing is evicted.
        elif s.choices[e, s.chosen[e]] != IDLE:
            k = (code >> 1) + 1
            code = 2 * k + (k < tables.output[i])

        work, fixed = tables.work[i, code], tables.fixed[i, code] - saved
        _insert_sorted(s.lists[0], e, t + work + fixed)
        _insert_sorted(s.lists[1], e, work)
        _insert_sorted(s.lists[2], e, fixed)

    # Those that arrive after the start are not in `present`. Claims say what they add.
    while arrived > 0 and tables.arrival[arrived - 1] > start:
        arrived -= 1

    bound = _bound_completions(t, size, s.lists)
    return bound + (_bound_by_claims(arrived, start, tables) if arrived < s.row.shape[0] else 0)


@njit
def _is_forced(i: int, row: Ints, t: int, slack: int, tables: Tables, lists: Ints) -> bool:
    """Whether rule 4 forces a request that is there: ``slack`` is what the claim leaves.

    That is, others would have to end before request i, so many and so late that the claim is met.
    """
    output, arrival = tables.output, tables.arrival
    if row[i] == 2 * output[i] or arrival[i] > t:  # it has completed, or is not there yet
        return False
    # For the latest completion a batch that decodes has all residents (module's text).
    if tables.counts == LATEST:
        return True

    # Rule 4 needs u others with u w >= base + decode_base, where w is the own work of i's last
    # decode: ``needed`` is the least u. A w of 0 counts as 1, with which fewer are forced.
    saved, here, later = tables.base + tables.decode_base, 0, 0
    for j in range(row.shape[0]):
        if j == i or row[j] == 2 * output[j]:
            continue
        if arrival[j] <= t:
            here += 1
        else:
            end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
            _insert_sorted(lists[3], later, end)
            later += 1

    needed = -(-saved // max(1, tables.decode[i, output[i] - 1]))
    # There are not as many.
    if here + later < needed:
        return True
    # So many are here, and may end before i at once: nothing says that i is late.
    if here >= needed:
        return False

    # Those that are here may end first. So i is behind needed - here of those that arrive, at best
    # those of the earliest ends.
    return _bound_uncounted(row, t, slack, tables, lists, i, lists[3, needed - here - 1]) >= slack


@njit
def _is_quiet(row: Ints, tables: Tables) -> tuple[bool, bool]:
    """Return whether a state is quiet (rule 3), and whether all peaks fit together."""
    held, runs, tokens, needs_no_refill = np.int64(0), 0, np.int64(0), True
    for i in range(row.shape[0]):
        if row[i] < 2 * tables.output[i]:  # it has not completed
            k = row[i] >> 1  # tokens produced
            held += tables.kv[i, tables.output[i]]
            runs += 1
            tokens += 1 if row[i] & 1 else tables.tokens[i, k]  # a decode's input, or a prefill's
            needs_no_refill &= tables.refills[i, k] == 0

    fits = held <= tables.limits[HELD] and runs <= tables.limits[RUNS]
    fit_in_one = tokens <= tables.limits[TOKENS] and tokens <= tables.limits[PROMPTS]
    return fits and fit_in_one and needs_no_refill, fits


@njit
def _add_to_batch(d: int, act: int, start: int, tables: Tables, s: Scratch) -> bool:
    """Set the sums after request d of `present`. Return whether the batch is within the limits.

    ``act`` is what the batch does with it: `IDLE` and so on.
    """
    sums, i = s.sums, s.present[d]
    k, held = s.row[i] >> 1, s.row[i] & 1  # tokens produced, and whether its KV is held
    for q in range(SUMS):
        sums[d + 1, q] = sums[d, q]

    after = sums[d + 1]
    if act == DECODE:
        after[TOKENS] += 1
        after[WORK] += tables.decode[i, k]
        after[DECODES] += 1
    elif act in (PREFILL, REFILL):
        after[TOKENS] += tables.tokens[i, k]
        after[PROMPTS] += tables.tokens[i, k]
        after[WORK] += tables.prefill[i, k]
        after[PREFILLS] += 1
        after[EARLY] += s.was_there[i]
        after[FORCED] += s.was_there[i] * s.forced[i]
    # KV after the batch: as it is, or with the token that the batch produces, or none.
    if act == IDLE and held:
        after[HELD] += tables.kv[i, k]
        after[RUNS] += 1
    elif act != IDLE and act != EVICT:
        after[HELD] += tables.kv[i, k + 1]
        after[RUNS] += 1
        after[NEW] += tables.arrival[i] == start

    for q in range(4):  # the sums that have limits
        # They only grow as requests are added, so all batches from here on break this limit.
        if after[q] > tables.limits[q]:
            return False

    # Without hybrid batching no batch has both.
    return tables.hybrid == 1 or after[DECODES] == 0 or after[PREFILLS] == 0


@njit
def _may_skip_batch(size: int, tables: Tables, s: Scratch) -> bool:
    """Whether rule 1 or rule 5 leaves out a batch about the first ``size`` of `present`."""
    sums = s.sums[size]
    # Rule 5: the batch prefills only requests that could have been in the one before, and one of
    # them is forced.
    if sums[PREFILLS] > 0 and sums[PREFILLS] == sums[EARLY] and sums[FORCED] > 0:
        return True

    for d in range(size):
        i = s.present[d]
        # Rule 1: nothing is evicted that would still fit.
        if s.choices[d, s.chosen[d]] == EVICT:
            # Kept idle, it would hold the KV of the tokens that it has produced, row[i] >> 1.
            would_fit = sums[HELD] + tables.kv[i, s.row[i] >> 1] <= tables.limits[HELD]
            if would_fit and sums[RUNS] < tables.limits[RUNS]:
                return True

    return False


@njit
def _list_choices(
    size: int, decodes: bool, quiet: bool, fits: bool, tables: Tables, s: Scratch
) -> None:
    """Write what a batch may do with each of the first ``size`` requests in `present`.

    In quiet states there are two kinds of batches: with ``decodes``, or without any. ``fits`` is
    whether the peaks of all that are unfinished fit together.
    """
    for d in range(size):
        i = s.present[d]
        k, options = s.row[i] >> 1, 2  # k tokens are produced; most have two choices
        if s.row[i] & 1 == 0:  # its KV is not held
            s.choices[d, 0], s.choices[d, 1] = PREFILL, IDLE
        elif quiet and not decodes:
            s.choices[d, 0], options = IDLE, 1
        else:
            s.choices[d, 0], s.choices[d, 1] = DECODE, IDLE
            # Rule 4: a batch that decodes decodes all forced residents.
            if quiet and s.forced[i]:
                options = 1
            # Rule 1: where all peaks fit, nothing is evicted.
            if not quiet and not fits:
                s.choices[d, options] = EVICT
                options += 1

            # Rule 2: a refill in place of a decode that is no dearer is never needed, if the decode
            # may stand there: without hybrid batching it may not stand beside prefills.
            dearer = tables.decode[i, k] + tables.decode_base > tables.prefill[i, k]
            if not quiet and (dearer or tables.hybrid == 0):
                s.choices[d, options] = REFILL
                options += 1

        s.options[d] = options


@njit
def _sort_equal_requests(row: Ints, kind: Ints) -> None:
    """Sort the codes of equal requests, the most advanced first.

    Equal requests lie side by side and are exchangeable, so that one order stands for all.
    """
    for i in range(1, row.shape[0]):
        place = i
        while place > 0 and kind[place - 1] == kind[place] and row[place - 1] < row[place]:
            row[place - 1], row[place] = row[place], row[place - 1]
            place -= 1


@njit
def _must_decode(
    before_began: int, t: int, slack: int, tables: Tables, row: Ints, lists: Ints
) -> bool:
    """Whether rules 3 to 5 leave only a batch that decodes all residents, in a quiet state.

    ``before_began`` is when the batch before began if rule 5 looks at it, else -1.
    """
    held, next_arrival, min_work = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(row.shape[0]):
        if row[i] == 2 * tables.output[i]:  # it has completed
            continue
        if tables.arrival[i] > t:
            next_arrival = min(next_arrival, tables.arrival[i])
        elif row[i] & 1:  # a resident, which has produced row[i] >> 1 tokens
            held += 1
            min_work = min(min_work, tables.decode[i, row[i] >> 1])
        # It was not there for the batch before, so rule 5 does not forbid to prefill it now; nor
        # any other one, where ``before_began`` is -1.
        elif tables.arrival[i] > before_began:
            return False

    # The machine may wait for an arrival, as no batch ends before it (rule 3).
    if held == 0 or t + tables.base + tables.decode_base + min_work > next_arrival:
        return False

    for i in range(row.shape[0]):
        is_present = row[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        # Who is not forced may be left out of the decodes (rule 4), or be prefilled (rule 5).
        if is_present and not _is_forced(i, row, t, slack, tables, lists):
            return False

    return True


@njit
def _keep_label(
    unfinished: int, end: int, counted: int, before_began: int, labels: Labels, child: Ints
) -> int:
    """Keep a label of the state ``child`` unless another is as good; drop those that are no better.

    ``end`` is its t, ``counted`` its S, and ``before_began`` is as in `Labels`. ``unfinished``: how
    many requests end later if this state is reached later. Those that are dropped have `alive` 0.
    Return `GO_ON`, or `GROW` if there is no space for it.
    """
    count, slot = labels.counters, _find_slot(child, labels)
    known = labels.slots[slot]
    while known >= 0:
        count[STEPS] += 1
        later = labels.time[known] - end
        # Of two labels the one of the earlier time may wait. The one of the later time pays the
        # difference for each request that is unfinished (module's text, Labels).
        if labels.counted[known] + unfinished * max(0, later) <= counted:
            return GO_ON
        if counted + unfinished * max(0, -later) <= labels.counted[known]:
            labels.alive[known] = 0

        known = labels.other[known]

    new, layer = count[COUNT], 0
    # Arrays only grow between two calls, after which the label is followed again.
    if new == labels.time.shape[0]:
        return GROW

    count[COUNT] += 1
    for i in range(child.shape[0]):
        labels.rows[new, i] = child[i]
        layer += child[i] >> 1  # its tokens produced

    labels.time[new], labels.counted[new], labels.before_began[new] = end, counted, before_began
    # It comes first in the list of its state, and in that of its layer.
    labels.other[new], labels.slots[slot], labels.alive[new] = labels.slots[slot], new, 1
    labels.following[new], labels.head[layer] = labels.head[layer], new
    return GO_ON


@njit
def _follow_batch(
    label: int,
    size: int,
    start: int,
    quiet: bool,
    claim: int,
    labels: Labels,
    tables: Tables,
    s: Scratch,
) -> int:
    """Follow the batch in the making, and the batches that are the only ones after it.

    It begins at ``start`` and decides the first ``size`` requests in `present`. ``quiet`` says
    whether the label's state is. ``claim`` is the number below which a schedule is looked for. The
    state that follows is written in `child`, and kept as a label if need be. Return `GO_ON`, or
    `FOUND` or `GROW`, which end the search.
    """
    # ``counted`` is S, to which all that ends with the batch adds its end (but for the latest
    # completion, which is the end itself).
    child, sums, sums_up = s.child, s.sums[size], tables.counts != LATEST
    end, ends_now, counted = start + tables.base + sums[WORK], 0, labels.counted[label]
    end += tables.decode_base * (sums[DECODES] > 0) + tables.prefill_base * (sums[PREFILLS] > 0)
    child[:] = s.row
    for d in range(size):
        i, act = s.present[d], s.choices[d, s.chosen[d]]
        if act == EVICT:
            child[i] = s.row[i] & ~1  # the same code, but not held
        elif act != IDLE:
            # Token k is produced, and the KV held if others follow: 2 k + 1, or 2 output.
            k = (s.row[i] >> 1) + 1
            child[i] = 2 * k + (k < tables.output[i])
            # How many tokens that count come with this batch: first ones or last ones.
            ends_now += k == 1 if tables.counts == FIRSTS else k == tables.output[i]

    counted += ends_now * end if sums_up else 0
    _sort_equal_requests(child, tables.kind)

    # Rules 4 and 5 are for completions in quiet states, and 5 only where nothing ended with the
    # batch before.
    may_be_forced = quiet and tables.counts == 0
    before_began = np.int64(start) if may_be_forced and ends_now == 0 else np.int64(-1)
    # The next batch is known, so it is taken at once and its state has no label.
    while may_be_forced and _must_decode(
        before_began, end, claim - counted, tables, child, s.lists
    ):
        before_began, ends_now = end, 0
        end += tables.base + tables.decode_base
        for i in range(child.shape[0]):
            if child[i] & 1:  # its KV is held, so it decodes
                k = (child[i] >> 1) + 1
                end += tables.decode[i, k - 1]
                child[i] = 2 * k + (k < tables.output[i])
                ends_now += k == tables.output[i]

        counted += ends_now * end
        before_began = np.int64(-1) if ends_now else before_began
        labels.counters[STEPS] += child.shape[0]

    labels.counters[STEPS] += child.shape[0]
    unfinished = 0  # how many still count: of first tokens those that have none
    for i in range(child.shape[0]):
        unfinished += child[i] == 0 if tables.counts == FIRSTS else child[i] < 2 * tables.output[i]
    # After all first tokens the rest counts for nothing, but there must be one. In a quiet state
    # there is (module's text).
    if unfinished == 0 and (tables.counts != FIRSTS or _is_quiet(child, tables)[0]):
        return FOUND if (counted if sums_up else end) < claim else GO_ON
    # Whatever goes on from there reaches the claim.
    if counted + _bound_uncounted(child, end, claim - counted, tables, s.lists) >= claim:
        return GO_ON

    return _keep_label(unfinished, end, counted, before_began, labels, child)


@njit
def _find_present(start: int, t: int, tables: Tables, s: Scratch) -> tuple[Any, Any, Any]:
    """Write who is there at a start; return their number and when the next request arrives.

    The third number is the first end of a batch of one request from t on; where first tokens count,
    of one that produces a first token.
    """
    size, next_arrival, first_end = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(tables.arrival.shape[0]):
        if s.row[i] == 2 * tables.output[i]:  # it has completed
            continue
        if tables.arrival[i] > start:
            next_arrival = min(next_arrival, tables.arrival[i])
            continue

        s.present[size] = i
        size += 1
        k = s.row[i] >> 1  # tokens produced
        shortest = tables.prefill[i, k] + tables.prefill_base
        if s.row[i] & 1:  # its KV is held
            shortest = tables.decode[i, k] + tables.decode_base
        # Alone in a batch. Where first tokens count, a later token ends nothing that counts.
        if k == 0 or tables.counts != FIRSTS:
            first_end = min(first_end, max(t, tables.arrival[i]) + tables.base + shortest)

    return size, next_arrival, first_end


@njit
def _follow_all_batches(label: int, claim: int, labels: Labels, tables: Tables, s: Scratch) -> int:
    """Follow all batches from a label on. Return GO_ON, or what ends the search.

    A batch begins at the label's time, or, after a wait, at a later arrival. For each such start
    the choices of all requests that are there are enumerated, depth first.
    """
    t, n, chosen = labels.time[label], s.row.shape[0], s.chosen
    s.row[:] = labels.rows[label]
    # Before the first batch the bound may prove the claim by itself. Later labels were asked when
    # they were made.
    if label == 0 and _bound_uncounted(s.row, t, claim, tables, s.lists) >= claim:
        return GO_ON

    quiet, fits = _is_quiet(s.row, tables)
    # Where rule 5 does not look at the batch before (-1), nobody counts as there for it.
    for i in range(n):
        s.was_there[i] = tables.arrival[i] <= labels.before_began[label]
        s.forced[i] = 0
        if quiet and tables.counts != FIRSTS:
            slack = claim - labels.counted[label]
            s.forced[i] = _is_forced(i, s.row, t, slack, tables, s.lists)

    # In a quiet state mode 0 has the batches without a decode, and mode 1 those with one. Where
    # first tokens count, nothing decodes in such a state, so there is no mode 1. In other states
    # mode 0 has all batches.
    start, modes = t, 1 + (quiet and tables.counts != FIRSTS)
    while True:
        size, next_arrival, first_end = _find_present(start, t, tables, s)
        for mode in range(modes if size else 0):
            _list_choices(size, mode == 1, quiet, fits, tables, s)
            # Those before place d are decided. ``chosen[d]`` is the number of the choice of the one
            # there, -1 before its first; after its last one the one before it gets its next.
            d, chosen[0] = 0, -1
            while d >= 0:
                # An equal request in an equal state begins with the choice of the one before it:
                # choices in another order lead to the same state.
                if chosen[d] < 0 and d > 0:
                    i, j = s.present[d - 1], s.present[d]
                    if tables.kind[i] == tables.kind[j] and s.row[i] == s.row[j]:
                        # One less, since 1 is added below.
                        chosen[d] = chosen[d - 1] - 1

                chosen[d] += 1
                if chosen[d] >= s.options[d]:
                    d -= 1
                    continue

                labels.counters[STEPS] += 1
                if not _add_to_batch(d, s.choices[d, chosen[d]], start, tables, s):
                    continue
                if d + 1 < size:
                    # The bound of a batch in the making is asked only where it may say more: after
                    # a prefill.
                    prunes = quiet and tables.counts == 0 and s.choices[d, chosen[d]] == PREFILL
                    labels.counters[STEPS] += size * prunes
                    slack = claim - labels.counted[label]
                    if prunes and _bound_after_batch(d + 1, size, start, tables, s) >= slack:
                        continue

                    d += 1
                    chosen[d] = -1
                    continue

                # All requests are decided. Without a token nothing is done; and after a wait a
                # batch has someone who has just arrived, or else it could begin before.
                sums = s.sums[size]
                if sums[TOKENS] == 0 or (start > t and sums[NEW] == 0):
                    continue
                if (mode == 1 and sums[DECODES] == 0) or _may_skip_batch(size, tables, s):
                    continue

                result = _follow_batch(label, size, start, quiet, claim, labels, tables, s)
                if result != GO_ON:
                    return result

        # Nobody arrives any more, or rule 3: the machine does not wait where a batch ends before
        # the arrival.
        no_wait = quiet and tables.counts != LATEST and first_end <= next_arrival
        if next_arrival == NEVER or no_wait:
            return GO_ON

        start = next_arrival


@njit
def search_below(claim: int, limit: int, labels: Labels, tables: Tables) -> int:
    """Search below a claim, from the label where it was left, for so many steps.

    Return how it ends (`PROVED` and so on). A label that found no room for those after it begins
    again; what it has made is there already.
    """
    n, count = tables.arrival.shape[0], labels.counters
    # A request has four choices at most: decode (or prefill), idle, evict and refill. ``lists`` are
    # for ends, works, fixed costs and the ends of those who arrive later.
    s = Scratch(
        row=labels.rows[0].copy(),
        child=labels.rows[0].copy(),
        forced=np.zeros(n, np.int64),
        was_there=np.zeros(n, np.int64),
        present=np.zeros(n, np.int64),
        choices=np.zeros((n, 4), np.int64),
        options=np.zeros(n, np.int64),
        chosen=np.zeros(n + 1, np.int64),
        sums=np.zeros((n + 1, SUMS), np.int64),
        lists=np.zeros((4, n + 1), np.int64),
    )
    while count[LAYER] < labels.head.shape[0]:
        # Labels come in order of tokens produced: all of a state are known before it is left.
        label = labels.head[count[LAYER]]
        if label < 0:
            count[LAYER] += 1
            continue
        if count[STEPS] > limit:
            return PAUSE
        if labels.alive[label]:
            result = _follow_all_batches(label, claim, labels, tables, s)
            if result != GO_ON:
                return result

        # The label is done, and the layer goes on with its next one.
        labels.head[count[LAYER]] = labels.following[label]

    return PROVED
