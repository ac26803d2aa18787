"""The compiled search for a schedule below what a leaf ``labels`` claims.

`optsched.bounds.checker.labels` has the rules and the bounds, with their proofs.
"""

from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Ints
from optsched.problem.kernel import njit

LATEST, FIRSTS = 1, 2
"""Values of `Tables.counts`. With 0 completions count."""
NEVER = 2**62
PROVED, FOUND, PAUSE, GROW, GO_ON = range(5)
IDLE, DECODE, PREFILL, EVICT, REFILL = range(5)
# Sums of a batch: the first four have limits. Then own work, how many decode and prefill, who
# arrives as it begins, and of its prefills, who was there for the batch before, and is forced.
TOKENS, PROMPTS, HELD, RUNS, WORK, DECODES, PREFILLS, NEW, EARLY, FORCED, SUMS = range(11)
COUNT, LAYER, STEPS = range(3)


class Tables(NamedTuple):
    """Requests in order of arrival, equal ones side by side; by request and tokens produced k.

    `kv` is held after token k; `decode` and `prefill` are own work of token k + 1, `tokens` of its
    prefill, and `refills` says whether a later token may be refilled in place. By code, 2 k + held,
    `work` and `fixed` are the least that is needed. `begin` and `least` are the claims that are
    proved, so many as `known`.
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
    """By label: state, t, S, and when the batch before began if 5 looks at it, else -1.

    `other` is the next label of its state, `following` of its layer, the tokens produced.
    """

    rows: Ints
    time: Ints
    done: Ints
    since: Ints
    other: Ints
    following: Ints
    alive: Ints
    head: Ints
    slots: Ints
    number: Ints


class Scratch(NamedTuple):
    """The label at hand, and the batch in the making of the requests in `who`."""

    row: Ints
    child: Ints
    forced: Ints
    there: Ints
    who: Ints
    choices: Ints
    many: Ints
    take: Ints
    sums: Ints
    sorts: Ints


@njit
def _find_slot(row: Ints, labels: Labels) -> Any:
    """Return the place of a state among the slots, or the empty one for it."""
    code = np.uint64(88172645463325252)
    for i in range(row.shape[0]):
        code = (code + np.uint64(row[i]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(31)

    mask = np.uint64(labels.slots.shape[0] - 1)
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
def _insert(values: Ints, size: int, value: int) -> None:
    place = size
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1

    values[place] = value


@njit
def _bound_completions(t: int, size: int, sorts: Ints) -> Any:
    """Return a bound on the sum of so many completions, from ends alone, works and fixed costs.

    Lists ascend, and the j-th completion is at least both of the j-th numbers (docstring, Bounds).
    """
    total, now = np.int64(0), np.int64(t)
    for j in range(size):
        now += sorts[1, j]
        total += max(sorts[0, j], now + sorts[2, j])

    return total


@njit
def _bound_by_claims(m: int, t: int, tables: Tables) -> Any:
    """Return what proved claims say of the requests from m on, if the machine is free from t on."""
    n, best, t = tables.arrival.shape[0], np.int64(0), max(t, tables.arrival[m])
    many = 1 if tables.counts == LATEST else n - m
    for k in range(tables.known[m]):
        value, begin = tables.least[m, k], tables.begin[m, k]
        if begin > t:
            # L(m, t) >= L(m, t + d) - c d (docstring, Claims).
            value -= many * (begin - t)
        elif begin >= tables.arrival[n - 1]:
            value += many * (t - begin)

        best = max(best, value)

    return best


@njit
def _bound_last_end(row: Ints, t: int, tables: Tables) -> Any:
    best, work, fixed, n = np.int64(t), np.int64(0), np.int64(0), row.shape[0]
    untouched = True
    for i in range(n - 1, -1, -1):
        untouched &= row[i] == 0
        if row[i] < 2 * tables.output[i]:
            work += tables.work[i, row[i]]
            fixed = max(fixed, tables.fixed[i, row[i]])
            best = max(best, max(t, tables.arrival[i]) + work + fixed)
        if untouched:
            best = max(best, _bound_by_claims(i, t, tables))

    return best


@njit
def _bound_rest(
    row: Ints, t: int, enough: int, tables: Tables, sorts: Ints, late: int = -1, until: int = 0
) -> Any:
    """Return a bound on what is still to be counted; with one of ``enough`` the search may stop.

    The request ``late`` does not end before ``until``.
    """
    n, size, best = row.shape[0], 0, np.int64(0)
    if tables.counts == LATEST:
        return _bound_last_end(row, t, tables)

    untouched = n
    while untouched > 0 and row[untouched - 1] == 0:
        untouched -= 1
    for i in range(n):
        # From the first request on that has not begun, nor any after it, a claim about the rest may
        # be added to the bound of those before.
        if i >= untouched and tables.known[i] > 0:
            best = max(best, _bound_completions(t, size, sorts) + _bound_by_claims(i, t, tables))
            if best >= enough:
                return best

        code = np.int64(row[i])
        # It has completed, or its first token is out: it counts no more.
        if code == 2 * tables.output[i] or (tables.counts == FIRSTS and code > 0):
            continue

        work, fixed = tables.work[i, code], tables.fixed[i, code]
        end = max(t, tables.arrival[i]) + work + fixed
        _insert(sorts[0], size, max(end, until) if i == late else end)
        _insert(sorts[1], size, work)
        _insert(sorts[2], size, fixed)
        size += 1

    return max(best, _bound_completions(t, size, sorts))


@njit
def _bound_after_batch(d: int, size: int, start: int, tables: Tables, s: Scratch) -> Any:
    """Return a bound on completions after a batch, of which the first d of `who` are decided."""
    sums, present, t = s.sums[d], s.row.shape[0], start + tables.base + s.sums[d, WORK]
    t += tables.decode_base * (sums[DECODES] > 0) + tables.prefill_base * (sums[PREFILLS] > 0)
    for e in range(size):
        i = s.who[e]
        code, saved = np.int64(s.row[i]), 0
        # The fixed cost of this batch is paid already, by those that are decided.
        if e >= d:
            saved = tables.base + max(tables.decode_base, tables.prefill_base)
        elif s.choices[e, s.take[e]] != IDLE:
            k = (code >> 1) + 1
            code = 2 * k + (k < tables.output[i])

        work, fixed = tables.work[i, code], tables.fixed[i, code] - saved
        _insert(s.sorts[0], e, t + work + fixed)
        _insert(s.sorts[1], e, work)
        _insert(s.sorts[2], e, fixed)

    while present > 0 and tables.arrival[present - 1] > start:
        present -= 1

    bound = _bound_completions(t, size, s.sorts)
    return bound + (_bound_by_claims(present, start, tables) if present < s.row.shape[0] else 0)


@njit
def _is_forced(i: int, row: Ints, t: int, slack: int, tables: Tables, sorts: Ints) -> bool:
    """Whether rule 4 forces a request that is there: ``slack`` is what the claim leaves."""
    output, arrival = tables.output, tables.arrival
    if row[i] == 2 * output[i] or arrival[i] > t:
        return False
    if tables.counts == LATEST:
        return True

    saved, here, later = tables.base + tables.decode_base, 0, 0
    for j in range(row.shape[0]):
        if j == i or row[j] == 2 * output[j]:
            continue
        if arrival[j] <= t:
            here += 1
        else:
            end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
            _insert(sorts[3], later, end)
            later += 1

    needed = -(-saved // max(1, tables.decode[i, output[i] - 1]))
    # Rule 4: so many others would have to end before i, and there are not as many.
    if here + later < needed:
        return True
    # They may be served already, so nothing says that i is late.
    if here >= needed:
        return False

    return _bound_rest(row, t, slack, tables, sorts, i, sorts[3, needed - here - 1]) >= slack


@njit
def _is_quiet(row: Ints, tables: Tables) -> tuple[bool, bool]:
    """Return whether a state is quiet (rule 3), and whether all peaks fit."""
    held, runs, tokens, needs_no_refill = np.int64(0), 0, np.int64(0), True
    for i in range(row.shape[0]):
        if row[i] < 2 * tables.output[i]:
            k = row[i] >> 1
            held += tables.kv[i, tables.output[i]]
            runs += 1
            tokens += 1 if row[i] & 1 else tables.tokens[i, k]
            needs_no_refill &= tables.refills[i, k] == 0

    fits = held <= tables.limits[HELD] and runs <= tables.limits[RUNS]
    fit_in_one = tokens <= tables.limits[TOKENS] and tokens <= tables.limits[PROMPTS]
    return fits and fit_in_one and needs_no_refill, fits


@njit
def _add_to_batch(d: int, act: int, start: int, tables: Tables, s: Scratch) -> bool:
    """Set the sums after request d of `who`. Return whether the batch is within the limits."""
    sums, i = s.sums, s.who[d]
    k, held = s.row[i] >> 1, s.row[i] & 1
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
        after[EARLY] += s.there[i]
        after[FORCED] += s.there[i] * s.forced[i]
    if act == IDLE and held:
        after[HELD] += tables.kv[i, k]
        after[RUNS] += 1
    elif act != IDLE and act != EVICT:
        after[HELD] += tables.kv[i, k + 1]
        after[RUNS] += 1
        after[NEW] += tables.arrival[i] == start

    for q in range(4):
        # Sums only grow as requests are added, so all batches from here on break this limit.
        if after[q] > tables.limits[q]:
            return False

    return tables.hybrid == 1 or after[DECODES] == 0 or after[PREFILLS] == 0


@njit
def _may_skip_batch(size: int, tables: Tables, s: Scratch) -> bool:
    """Whether rule 1 or rule 5 leaves a batch out."""
    sums = s.sums[size]
    # Rule 5: the batch prefills only requests that could have been in the one before.
    if sums[PREFILLS] > 0 and sums[PREFILLS] == sums[EARLY] and sums[FORCED] > 0:
        return True

    for d in range(size):
        i = s.who[d]
        # Rule 1: what is evicted here would still fit.
        if s.choices[d, s.take[d]] == EVICT:
            would_fit = sums[HELD] + tables.kv[i, s.row[i] >> 1] <= tables.limits[HELD]
            if would_fit and sums[RUNS] < tables.limits[RUNS]:
                return True

    return False


@njit
def _offer(size: int, decodes: bool, quiet: bool, fits: bool, tables: Tables, s: Scratch) -> None:
    """Write what may be done with each request. In quiet states batches decode, or they do not."""
    for d in range(size):
        i = s.who[d]
        k, many = s.row[i] >> 1, 2
        if s.row[i] & 1 == 0:
            s.choices[d, 0], s.choices[d, 1] = PREFILL, IDLE
        elif quiet and not decodes:
            s.choices[d, 0], many = IDLE, 1
        else:
            s.choices[d, 0], s.choices[d, 1] = DECODE, IDLE
            # Rule 4: a batch that decodes decodes all forced residents.
            if quiet and s.forced[i]:
                many = 1
            if not quiet and not fits:
                s.choices[d, many] = EVICT
                many += 1

            # Rule 2: a refill in place of a decode that is no dearer is never needed.
            dearer = tables.decode[i, k] + tables.decode_base > tables.prefill[i, k]
            if not quiet and (dearer or tables.hybrid == 0):
                s.choices[d, many] = REFILL
                many += 1

        s.many[d] = many


@njit
def _sort_equal_requests(row: Ints, kind: Ints) -> None:
    """Put the codes of equal requests in order, the most advanced first."""
    for i in range(1, row.shape[0]):
        at = i
        # Equal requests are exchangeable, so that one order stands for all.
        while at > 0 and kind[at - 1] == kind[at] and row[at - 1] < row[at]:
            row[at - 1], row[at] = row[at], row[at - 1]
            at -= 1


@njit
def _must_decode(since: int, t: int, slack: int, tables: Tables, row: Ints, sorts: Ints) -> bool:
    """Whether rules 3 to 5 leave only a batch that decodes all residents, in a quiet state."""
    held, next_arrival, min_work = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(row.shape[0]):
        if row[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > t:
            next_arrival = min(next_arrival, tables.arrival[i])
        elif row[i] & 1:
            held += 1
            min_work = min(min_work, tables.decode[i, row[i] >> 1])
        # It was not there for the batch before, so rule 5 does not forbid to prefill it now.
        elif tables.arrival[i] > since:
            return False

    # The machine may wait for an arrival, as no batch ends before it (rule 3).
    if held == 0 or t + tables.base + tables.decode_base + min_work > next_arrival:
        return False

    for i in range(row.shape[0]):
        there = row[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        if there and not _is_forced(i, row, t, slack, tables, sorts):
            return False

    return True


@njit
def _keep(unfinished: int, end: int, done: int, since: int, labels: Labels, child: Ints) -> int:
    """Keep a label unless another of its state is as good; drop those that it is as good as.

    ``unfinished``: how many requests end later if this state is reached later.
    """
    number, slot = labels.number, _find_slot(child, labels)
    known = labels.slots[slot]
    while known >= 0:
        number[STEPS] += 1
        later = labels.time[known] - end
        # The other label, put off to this time, has counted no more (docstring, Labels).
        if labels.done[known] + unfinished * max(0, later) <= done:
            return GO_ON
        if done + unfinished * max(0, -later) <= labels.done[known]:
            labels.alive[known] = 0

        known = labels.other[known]

    new, layer = number[COUNT], 0
    # Arrays only grow between two calls, after which the label is followed again.
    if new == labels.time.shape[0]:
        return GROW

    number[COUNT] += 1
    for i in range(child.shape[0]):
        labels.rows[new, i] = child[i]
        layer += child[i] >> 1

    labels.time[new], labels.done[new], labels.since[new] = end, done, since
    labels.other[new], labels.slots[slot], labels.alive[new] = labels.slots[slot], new, 1
    labels.following[new], labels.head[layer] = labels.head[layer], new
    return GO_ON


@njit
def _follow_batch(
    label: int,
    size: int,
    start: int,
    quiet: bool,
    cut: int,
    labels: Labels,
    tables: Tables,
    s: Scratch,
) -> int:
    """Follow the batch in the making, and the batches that are the only ones after it."""
    child, sums, sums_up = s.child, s.sums[size], tables.counts != LATEST
    end, ended, done = start + tables.base + sums[WORK], 0, labels.done[label]
    end += tables.decode_base * (sums[DECODES] > 0) + tables.prefill_base * (sums[PREFILLS] > 0)
    child[:] = s.row
    for d in range(size):
        i, act = s.who[d], s.choices[d, s.take[d]]
        if act == EVICT:
            child[i] = s.row[i] & ~1
        elif act != IDLE:
            k = (s.row[i] >> 1) + 1
            child[i] = 2 * k + (k < tables.output[i])
            ended += k == 1 if tables.counts == FIRSTS else k == tables.output[i]

    done += ended * end if sums_up else 0
    _sort_equal_requests(child, tables.kind)
    follows = quiet and tables.counts == 0
    since = np.int64(start) if follows and ended == 0 else np.int64(-1)
    # The next batch is known, so it is taken at once and its state has no label.
    while follows and _must_decode(since, end, cut - done, tables, child, s.sorts):
        since, ended = end, 0
        end += tables.base + tables.decode_base
        for i in range(child.shape[0]):
            if child[i] & 1:
                k = (child[i] >> 1) + 1
                end += tables.decode[i, k - 1]
                child[i] = 2 * k + (k < tables.output[i])
                ended += k == tables.output[i]

        done += ended * end
        since = np.int64(-1) if ended else since
        labels.number[STEPS] += child.shape[0]

    labels.number[STEPS] += child.shape[0]
    unfinished = 0
    for i in range(child.shape[0]):
        unfinished += child[i] == 0 if tables.counts == FIRSTS else child[i] < 2 * tables.output[i]
    # After all first tokens the rest counts for nothing, but there must be one.
    if unfinished == 0 and (tables.counts != FIRSTS or _is_quiet(child, tables)[0]):
        return FOUND if (done if sums_up else end) < cut else GO_ON
    # Whatever goes on from there reaches the claim.
    if done + _bound_rest(child, end, cut - done, tables, s.sorts) >= cut:
        return GO_ON

    return _keep(unfinished, end, done, since, labels, child)


@njit
def _find_present(start: int, t: int, tables: Tables, s: Scratch) -> tuple[Any, Any, Any]:
    """Write who is there at a start; return their number and when the next request arrives.

    Return the first end of a batch of one, too, of a first token if these count.
    """
    size, after, first_end = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(tables.arrival.shape[0]):
        if s.row[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > start:
            after = min(after, tables.arrival[i])
            continue

        s.who[size] = i
        size += 1
        k = s.row[i] >> 1
        shortest = tables.prefill[i, k] + tables.prefill_base
        if s.row[i] & 1:
            shortest = tables.decode[i, k] + tables.decode_base
        if k == 0 or tables.counts != FIRSTS:
            first_end = min(first_end, max(t, tables.arrival[i]) + tables.base + shortest)

    return size, after, first_end


@njit
def _follow_all_batches(label: int, cut: int, labels: Labels, tables: Tables, s: Scratch) -> int:
    """Follow all batches from a label on. Return GO_ON, or what ends the search."""
    t, n, take = labels.time[label], s.row.shape[0], s.take
    s.row[:] = labels.rows[label]
    # Before the first batch the bound may prove the claim by itself.
    if label == 0 and _bound_rest(s.row, t, cut, tables, s.sorts) >= cut:
        return GO_ON

    quiet, fits = _is_quiet(s.row, tables)
    for i in range(n):
        s.there[i] = tables.arrival[i] <= labels.since[label]
        s.forced[i] = 0
        if quiet and tables.counts != FIRSTS:
            slack = cut - labels.done[label]
            s.forced[i] = _is_forced(i, s.row, t, slack, tables, s.sorts)

    start, modes = t, 1 + (quiet and tables.counts != FIRSTS)
    while True:
        size, after, first_end = _find_present(start, t, tables, s)
        for mode in range(modes if size else 0):
            _offer(size, mode == 1, quiet, fits, tables, s)
            d, take[0] = 0, -1
            while d >= 0:
                if take[d] < 0 and d > 0:  # equal requests: what comes first goes first
                    i, j = s.who[d - 1], s.who[d]
                    if tables.kind[i] == tables.kind[j] and s.row[i] == s.row[j]:
                        take[d] = take[d - 1] - 1

                take[d] += 1
                if take[d] >= s.many[d]:
                    d -= 1
                    continue

                labels.number[STEPS] += 1
                if not _add_to_batch(d, s.choices[d, take[d]], start, tables, s):
                    continue
                if d + 1 < size:
                    # The bound of a batch in the making is asked only where it may say more: after
                    # a prefill.
                    prunes = quiet and tables.counts == 0 and s.choices[d, take[d]] == PREFILL
                    labels.number[STEPS] += size * prunes
                    slack = cut - labels.done[label]
                    if prunes and _bound_after_batch(d + 1, size, start, tables, s) >= slack:
                        continue

                    d += 1
                    take[d] = -1
                    continue

                sums = s.sums[size]
                # Without a token nothing is done; and after a wait a batch has someone who has just
                # arrived, or else it could begin before.
                if sums[TOKENS] == 0 or (start > t and sums[NEW] == 0):
                    continue
                if (mode == 1 and sums[DECODES] == 0) or _may_skip_batch(size, tables, s):
                    continue

                ended = _follow_batch(label, size, start, quiet, cut, labels, tables, s)
                if ended != GO_ON:
                    return ended

        # Nobody arrives any more, or rule 3: the machine does not wait where a batch ends before
        # the arrival.
        if after == NEVER or (quiet and tables.counts != LATEST and first_end <= after):
            return GO_ON

        start = after


@njit
def search_below(cut: int, limit: int, labels: Labels, tables: Tables) -> int:
    """Search below a claim, from the label where it was left, for so many steps.

    A label that found no room for those after it begins again; what it has made is there already.
    """
    n, number = tables.arrival.shape[0], labels.number
    s = Scratch(
        labels.rows[0].copy(),
        labels.rows[0].copy(),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, 4), np.int64),
        np.zeros(n, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros((n + 1, SUMS), np.int64),
        np.zeros((4, n + 1), np.int64),
    )
    while number[LAYER] < labels.head.shape[0]:
        # Labels come in order of tokens produced: all of a state are known before it is left.
        label = labels.head[number[LAYER]]
        if label < 0:
            number[LAYER] += 1
            continue
        if number[STEPS] > limit:
            return PAUSE
        if labels.alive[label]:
            ended = _follow_all_batches(label, cut, labels, tables, s)
            if ended != GO_ON:
                return ended

        labels.head[number[LAYER]] = labels.following[label]

    return PROVED
