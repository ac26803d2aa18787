"""The compiled core of infermax's label-setting search. Import it lazily: it loads numba.

`optsched.optimize.formulations.batches.labels` has the rules and the bounds, with their proofs.
"""

from typing import Any, NamedTuple

import numpy as np

from optsched.optimize.formulations.batches.queue_kernel import (
    BEST,
    DIVE,
    ENTRIES,
    EXPANDED,
    GOAL,
    GROW,
    ROWS,
    RUNNING,
    SOLVED,
    Ints,
    enter,
    find,
    pop,
    push,
)
from optsched.problem.kernel import njit

__all__ = ["ENTRIES", "GOAL", "enter"]  # for `labels`

IDLE, DECODE, PREFILL, EVICT, REFILL = range(5)
"""What a batch does with a request. ``REFILL`` evicts it first."""
TOKENS, PREFILL_TOKENS, CAPACITY, RUNNING_MAX, BASE, DECODE_BASE, PREFILL_BASE = range(7)
HYBRID, EVICTS, SHARED, COUNTED = 7, 8, 9, 10
"""Places of `Tables.rules`. The first four are limits of the first four sums of a batch."""
FINISHES, LATEST, FIRSTS, PACES, MISSES = range(5)
"""Values of ``COUNTED``: the sum of completions, the latest one, the sum of first tokens, that of
each request's time per token, and how many are never begun as they cannot be within limits."""
WORK, DECODES, PREFILLS, NEW, LATE, EARLY, AGAIN = range(4, 11)
"""Further sums of a batch: own work, its decodes and prefills, who arrives when it begins, and by
rule 5: prefills that could have been in the batch before, and those that had better been there, and
by rule 2 refills whose own work is no less than that of a decode."""
_SUMS = 11
BY_KV, BY_INPUT = range(2)
"""Kinds of weights: of the batches that produce tokens, and of those that prefill."""
OPEN, CLOSED, DELETED = range(3)
"""Values of `Search.flag`."""
TRIED, MOST = 6, 7
"""Further places of `Search.numbers`: steps in this slice, and the most of them."""
AT, START, MODE, SIZE, AFTER, FIRST_END, DEPTH, CHILD, QUIET, ROOMY, FRESH, DIVES = range(12)
"""Places of `Scratch.now`: the label at hand, or -1; of the batch in the making its start, its mode
(see `_options`), how many it may hold, the next arrival and the request of `who` to go on from, or
-1; the first end of a batch of one; the child to dive into, or -1; and what holds for the label."""
COLUMNS = ("rows", "acts", "more", "since", "time", "done", "low", "parent", "link", "flag")
"""Fields of `Search` by label."""
NEVER = 2**62
"""Later than every time."""
_DIVE_EVERY = 1024
# The max number of weights.
_WEIGHTS = 16
# The max number of requests for which `_shared` is computed.
_MANY = 12
# Arrivals beyond the present time that the bounds add one by one: that by works, and `_shared`.
_AHEAD, _BEYOND = 6, 2


class Tables(NamedTuple):
    """n requests in the order of their arrivals, equal ones side by side.

    By request (shape (n,)): `arrival`, `output`, `kind` (equal requests share one). By request and
    tokens produced k (shape (n, K)): `kv` held after token k; `decode` and `prefill`, the own work
    of token k + 1; `tokens` of its prefill; `calm`, 1 if no later refill in place pays; `decodes`,
    the own work of decoding from token k + 1 on. By request and code 2 k + held (shape (n, 2 K)):
    `work` and `fixed`, at least what it still needs. For the requests from m on alone, if the
    machine is free from ``moments[m, k]`` on, ``values[m, k]`` is at least what is counted, for
    the first ``known[m]`` k; ``exact[m]``: the first is what can be had. `rules`: limits, fixed
    costs, switches. ``due[i]`` has the last moments of a first and of a last token within limits,
    and ``rate[i]`` says how often a request's time per token counts. For the makespan, what is
    still to come weighs ``weights[i, code, d]``, and ``largest[d]`` is the largest weight of a
    batch, and the kind of the weights.
    """

    arrival: Ints
    output: Ints
    kind: Ints
    kv: Ints
    decode: Ints
    prefill: Ints
    tokens: Ints
    calm: Ints
    decodes: Ints
    work: Ints
    fixed: Ints
    moments: Ints
    values: Ints
    known: Ints
    exact: Ints
    rules: Ints
    due: Ints
    rate: Ints
    weights: Ints
    largest: Ints


class Scratch(NamedTuple):
    """The label at hand: its `row`, and for each request, 1 if rule 3 has it decode (`forced`), and
    if it was there for the batch before, to which rule 5 applies (`there`).

    A batch in the making: the requests that it may hold (`who`), what it may do with each
    (`choices`, so many as `number`), which of them it does (`take`), and the `sums` of those
    before. `child`: the state that it leads to. `sorts`: room for `remaining`. `now`: how far the
    search has come with the label.
    """

    row: Ints
    child: Ints
    forced: Ints
    there: Ints
    who: Ints
    choices: Ints
    number: Ints
    take: Ints
    sums: Ints
    sorts: Ints
    now: Ints


class Search(NamedTuple):
    """Labels: codes of the state, the batch that led to it, and what `numbers` counts.

    After that batch all decode `more` times. `since`: when the last batch began if rule 5 looks at
    it, else -1. `time` and `done` are t and S, `low` is f. `link` chains the labels of a state,
    whose latest one is in the hash table `table`. `heap` has (f, - tokens produced, label).
    """

    rows: Ints
    acts: Ints
    more: Ints
    since: Ints
    time: Ints
    done: Ints
    low: Ints
    parent: Ints
    link: Ints
    flag: Ints
    heap: Ints
    table: Ints
    numbers: Ints


@njit
def sorts_for(n: int) -> Ints:
    """Return the room that `remaining` needs for n requests."""
    return np.zeros((5, max(n + 1, _WEIGHTS)), np.int64)


@njit
def scratch_for(n: int, rows: Ints) -> Scratch:
    """Return room for n requests."""
    return Scratch(
        np.zeros(n, rows.dtype),
        np.zeros(n, rows.dtype),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, 4), np.int64),
        np.zeros(n, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros((n + 1, _SUMS), np.int64),
        sorts_for(n),
        np.full(12, -1, np.int64),
    )


# States and the queue


@njit
def _next_label(search: Search) -> Any:
    """Return the child that the search dives into, or the open label of the least f, or -1."""
    heap, numbers, flag, low = search.heap, search.numbers, search.flag, search.low
    at = numbers[DIVE]
    if at >= 0 and flag[at] == OPEN and low[at] < numbers[BEST]:
        return at

    while numbers[ENTRIES] > 0 and heap[0, 0] < numbers[BEST]:
        at = heap[0, 2]
        pop(heap, numbers[ENTRIES])
        numbers[ENTRIES] -= 1
        if flag[at] == OPEN:
            return at

    return -1


@njit
def _ordered(row: Ints, kind: Ints) -> None:
    """Sort the codes of equal requests, the most advanced first; equal codes keep their order."""
    for i in range(1, row.shape[0]):
        at = i
        while at > 0 and kind[at - 1] == kind[at] and row[at - 1] < row[at]:
            row[at - 1], row[at] = row[at], row[at - 1]
            at -= 1


# Bounds


@njit
def _insert(values: Ints, size: int, value: int) -> None:
    """Insert a value into the first ``size`` values, which are sorted."""
    at = size
    while at > 0 and values[at - 1] > value:
        values[at] = values[at - 1]
        at -= 1

    values[at] = value


@njit
def _least_sum(ends: Ints, works: Ints, fixes: Ints, size: int, t: int) -> Any:
    total, work = np.int64(0), np.int64(t)
    for j in range(size):
        work += works[j]
        total += max(ends[j], work + fixes[j])

    return total


@njit
def later(m: int, t: int, tables: Tables) -> Any:
    """Return a lower bound on what is counted for the requests from m on, alone, from t on."""
    moments, values, n = tables.moments, tables.values, tables.arrival.shape[0]
    slope = 1 if tables.rules[COUNTED] == LATEST else n - m
    last, known = 0, tables.known[m]
    if tables.rules[COUNTED] == MISSES:
        return values[m, 0]
    while last + 1 < known and moments[m, last + 1] <= t:
        last += 1

    value = values[m, last]
    if last + 1 < known:
        return max(value, values[m, last + 1] - slope * (moments[m, last + 1] - t))
    if moments[m, last] >= tables.arrival[n - 1]:
        value += slope * max(0, t - moments[m, last])

    return value


@njit
def _shared(row: Ints, cut: int, t: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the sum of the completions of the requests before ``cut``.

    They count as arrived. The second bound of `optsched.optimize.formulations.batches.labels`.
    """
    starts, owns, counts = sorts[0], sorts[1], sorts[2]
    cost, new, rules = sorts[3], sorts[4], tables.rules
    size, waiting = 0, 0
    for i in range(cut):
        code, output = np.int64(row[i]), tables.output[i]
        if code == 2 * output:
            continue

        k = code >> 1
        if code & 1 == 0:
            _insert(starts, waiting, tables.prefill[i, k])
            waiting += 1
            k += 1

        _insert(owns, size, tables.decodes[i, k])
        _insert(counts, size, output - k)
        size += 1

    running = size - waiting
    batch = rules[BASE] + rules[DECODE_BASE]
    total = np.int64(0)
    for j in range(size):
        total += t + (size - j) * owns[j] + batch * counts[j]

    if waiting == 0:
        return total

    # In place: counts[e] is what the e requests with the fewest decodes need.
    credit = np.int64(0)
    for j in range(size):
        credit, counts[j] = credit + batch * counts[j], credit
    for e in range(size + 1):
        cost[e] = 2**61
    cost[0] = 0

    for i in range(waiting):  # so many have begun; next is one more
        at_most = running + i
        for e in range(at_most + 1):
            new[e] = 2**61
        for e in range(at_most + 1):
            if cost[e] >= 2**61:
                continue

            for after in range(e, at_most + 1):
                if after == size:
                    break
                value = cost[e] + starts[i] * (size - after)
                if after > e:
                    need = counts[after] - counts[e]
                    flying = running + i - e
                    price = 2**61 if flying <= 0 else need * (waiting - i) // flying
                    if i > 0 and running + i - 1 > 0:
                        price = min(price, need * (waiting - i + 1) // (running + i - 1))

                    value += price
                if i == 0 or after > e:
                    value += rules[PREFILL_BASE] * (size - after)
                if i == 0 and running == 0:
                    value += rules[BASE] * size

                new[after] = min(new[after], value)

        for e in range(at_most + 1):
            cost[e] = new[e]

    least = np.int64(2**61)
    for e in range(size):
        least = min(least, cost[e])

    return total + least


@njit
def begins_at(row: Ints) -> Any:
    """Return the first request from which on none has begun."""
    m = row.shape[0]
    while m > 0 and row[m - 1] == 0:
        m -= 1

    return m


@njit
def _fixed_costs(totals: Ints, longest: int, tables: Tables) -> Any:
    """Return at least the fixed costs of batches, by what requests weigh and the longest output."""
    rules, batches, prefills = tables.rules, np.int64(longest), np.int64(0)
    for d in range(tables.largest.shape[0]):
        need = -(-totals[d] // tables.largest[d, 0])
        if tables.largest[d, 1] == BY_INPUT:
            prefills = max(prefills, need)
        else:
            batches = max(batches, need)

    batches = max(batches, prefills)
    base, decode_base, prefill_base = rules[BASE], rules[DECODE_BASE], rules[PREFILL_BASE]
    if prefill_base < decode_base:
        return (base + prefill_base) * batches

    return base * batches + prefill_base * prefills + decode_base * (batches - prefills)


@njit
def _latest(row: Ints, t: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the last completion, by the requests from each arrival on.

    Their works, and the fixed costs of the longest chain or of the batches that they need.
    """
    arrival, output, totals = tables.arrival, tables.output, sorts[0]
    best, work, fixed, longest = np.int64(t), np.int64(0), np.int64(0), np.int64(0)
    n, kinds = row.shape[0], tables.largest.shape[0]
    totals[:kinds] = 0
    for back in range(n):
        i = n - 1 - back
        code = np.int64(row[i])
        if code < 2 * output[i]:
            work += tables.work[i, code]
            fixed = max(fixed, tables.fixed[i, code])
            longest = max(longest, output[i] - (code >> 1))
            for d in range(kinds):
                totals[d] += tables.weights[i, code, d]
        if work > 0 and (i == 0 or (arrival[i] > t and arrival[i - 1] < arrival[i])):
            fixed = max(fixed, _fixed_costs(totals, longest, tables))
            best = max(best, max(t, arrival[i]) + work + fixed)

    fresh = begins_at(row)
    if fresh < n and tables.known[fresh] > 0:
        best = max(best, later(fresh, t, tables))

    return best


@njit
def _is_late(i: int, code: int, t: int, tables: Tables) -> bool:
    """Whether a request cannot be within its limits any more if it is served from t on."""
    rules, begin = tables.rules, max(t, tables.arrival[i])
    first = begin + tables.prefill[i, 0] + rules[BASE] + rules[PREFILL_BASE]
    if code == 0 and first > tables.due[i, 0]:
        return True

    return begin + tables.work[i, code] + tables.fixed[i, code] > tables.due[i, 1]


@njit
def _missed(row: Ints, t: int, which: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the requests never begun, or ``NEVER`` if one has begun in vain.

    ``which``: it looks at the limits on first tokens (0) or on last ones (1).
    """
    best, missed, size, rules = np.int64(0), np.int64(0), 0, tables.rules
    dues, works, fresh, cut = sorts[0], sorts[1], begins_at(row), True
    for i in range(row.shape[0]):
        code = np.int64(row[i])
        new = i == fresh or (cut and tables.arrival[i] > t)
        if new and i >= fresh and tables.known[i] > 0:
            best = max(best, missed + _too_many(dues, works, size, t) + tables.values[i, 0])
        if tables.arrival[i] > t:
            cut = False
        if code == 2 * tables.output[i]:
            continue
        if _is_late(i, code, t, tables):
            missed += 1
            if code > 0:
                return np.int64(NEVER)
            continue
        if which == 0 and code > 0:
            continue

        work, due = tables.prefill[i, 0], tables.due[i, 0] - rules[BASE] - rules[PREFILL_BASE]
        if which == 1:
            work, due = tables.work[i, code], tables.due[i, 1] - tables.fixed[i, code]

        at = size
        while at > 0 and dues[at - 1] > due:
            dues[at], works[at] = dues[at - 1], works[at - 1]
            at -= 1

        dues[at], works[at] = due, work
        size += 1

    return max(best, missed + _too_many(dues, works, size, t))


@njit
def _too_many(dues: Ints, works: Ints, size: int, t: int) -> Any:
    """Return how many works must be left out so that the others end when due, by Moore's rule.

    They are in order of when they are due. Where one is late, the largest one so far is left out.
    """
    total, removed = np.int64(t), 0
    for j in range(size):
        total += works[j]
        if total <= dues[j]:
            continue

        largest = 0
        for k in range(j + 1):
            if works[k] > works[largest]:
                largest = k

        total -= works[largest]
        works[largest] = -works[largest] - 1  # out, and what it was
        removed += 1

    for j in range(size):
        if works[j] < 0:
            works[j] = -works[j] - 1

    return removed


@njit
def remaining(
    row: Ints, t: int, enough: int, tables: Tables, sorts: Ints, late: int = -1, until: int = 0
) -> Any:
    """Return a lower bound on what is counted for unfinished requests from time t on.

    A bound of ``enough`` or more is as good as any. ``sorts``: room of shape (5, n + 1). The
    request ``late`` does not end before ``until``, if there is one.
    """
    arrival, output, known = tables.arrival, tables.output, tables.known
    work, fixed, rules = tables.work, tables.fixed, tables.rules
    ends, works, fixes = sorts[0], sorts[1], sorts[2]
    if rules[COUNTED] == LATEST:
        return _latest(row, t, tables, sorts)
    if rules[COUNTED] == PACES:
        total = np.int64(0)
        for i in range(row.shape[0]):
            total += work[i, row[i]]
        return total
    if rules[COUNTED] == MISSES:
        return max(_missed(row, t, 0, tables, sorts), _missed(row, t, 1, tables, sorts))

    n, size, best, ahead, cut = row.shape[0], 0, np.int64(0), 0, row.shape[0]
    fresh, together = begins_at(row), rules[SHARED] and late < 0
    for i in range(n):
        if arrival[i] > t:
            cut = min(cut, i)
            ahead += 1
            if ahead > _AHEAD and known[i] > 0:
                break
        if i >= fresh and known[i] > 0:
            best = max(best, _least_sum(ends, works, fixes, size, t) + later(i, t, tables))
            if best >= enough:
                return best

        code = np.int64(row[i])
        if code == 2 * output[i] or (rules[COUNTED] == FIRSTS and code > 0):
            continue

        w, f = work[i, code], fixed[i, code]
        end = max(t, arrival[i]) + w + f
        _insert(ends, size, max(end, until) if i == late else end)
        _insert(works, size, w)
        _insert(fixes, size, f)
        size += 1

    if ahead <= _AHEAD:
        best = max(best, _least_sum(ends, works, fixes, size, t))

    if together:
        for at in range(fresh, min(n, cut + _BEYOND) + 1):
            many = 0
            for i in range(at):
                many += row[i] < 2 * output[i]
            if best < enough and 1 < many <= _MANY and (at == n or known[at] > 0):
                now = _shared(row, at, t, tables, sorts)
                best = max(best, now + (later(at, t, tables) if at < n else 0))

    return best


# Batches


@njit
def _is_forced(i: int, row: Ints, t: int, room: int, tables: Tables, sorts: Ints) -> bool:
    """Whether by rule 3 a request decodes in every batch that decodes, or would once it is held.

    ``room`` is what the incumbent leaves for the rest.
    """
    arrival, output, rules = tables.arrival, tables.output, tables.rules
    if row[i] == 2 * output[i] or arrival[i] > t:
        return False
    if rules[COUNTED] == MISSES:
        return False
    if rules[COUNTED] != FINISHES:
        return True

    left, arrived, ends = 0, 0, sorts[3]
    for j in range(row.shape[0]):
        if row[j] < 2 * output[j]:
            left += 1
            if arrival[j] <= t:
                arrived += 1
            else:
                end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
                _insert(ends, left - arrived - 1, end)

    saved = rules[BASE] + rules[DECODE_BASE]
    need = -(-saved // max(1, tables.decode[i, output[i] - 1]))  # others that end before it
    if left - 1 < need:
        return True
    if arrived - 1 >= need:
        return False

    return remaining(row, t, room, tables, sorts, i, ends[need - arrived]) >= room


@njit
def _survey(t: int, room: int, tables: Tables, scratch: Scratch) -> tuple[bool, bool]:
    """Return whether the state is quiet, and whether all peaks fit.

    Requests that rule 3 has decode are marked: ``room`` is what the incumbent leaves for the rest.
    """
    row, rules, output = scratch.row, tables.rules, tables.output
    n, left, held, tokens, quiet = row.shape[0], 0, np.int64(0), np.int64(0), True
    for i in range(n):
        if row[i] == 2 * output[i]:
            continue

        k = row[i] >> 1
        left += 1
        held += tables.kv[i, output[i]]
        tokens += 1 if row[i] & 1 else tables.tokens[i, k]
        quiet &= tables.calm[i, k] == 1

    roomy = held <= rules[CAPACITY] and left <= rules[RUNNING_MAX]
    quiet &= roomy and tokens <= rules[PREFILL_TOKENS]
    for i in range(n):
        scratch.forced[i] = quiet and _is_forced(i, row, t, room, tables, scratch.sorts)

    return quiet, roomy


@njit
def _options(
    size: int, mode: int, quiet: bool, roomy: bool, tables: Tables, scratch: Scratch
) -> None:
    """Write what a batch may do with each of the first ``size`` requests of `who`.

    In a quiet state mode 0 is for batches that do not decode, and mode 1 for those that do.
    """
    row, who, choices, rules = scratch.row, scratch.who, scratch.choices, tables.rules
    hybrid, evicts = rules[HYBRID] == 1, rules[EVICTS] == 1
    for d in range(size):
        i = who[d]
        k, options = row[i] >> 1, 2
        if row[i] & 1 == 0:
            choices[d, 0], choices[d, 1] = PREFILL, IDLE
        elif quiet and mode == 0:
            choices[d, 0], options = IDLE, 1
        elif quiet:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            options -= scratch.forced[i]
        else:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            if evicts and not roomy:
                choices[d, options] = EVICT
                options += 1
            # Rule 2.
            dearer = tables.decode[i, k] + rules[DECODE_BASE] > tables.prefill[i, k]
            if evicts and (dearer or not hybrid):
                choices[d, options] = REFILL
                options += 1

        scratch.number[d] = options


@njit
def _add(d: int, act: int, start: int, tables: Tables, scratch: Scratch) -> bool:
    """Set the sums after request d of `who`. Return whether the batch is within the limits."""
    sums, i = scratch.sums, scratch.who[d]
    k, held = scratch.row[i] >> 1, scratch.row[i] & 1
    for q in range(_SUMS):
        sums[d + 1, q] = sums[d, q]
    if act == IDLE:
        sums[d + 1, CAPACITY] += tables.kv[i, k] * held
        sums[d + 1, RUNNING_MAX] += held
    elif act == DECODE:
        sums[d + 1, TOKENS] += 1
        sums[d + 1, WORK] += tables.decode[i, k]
        sums[d + 1, DECODES] += 1
    elif act != EVICT:
        sums[d + 1, TOKENS] += tables.tokens[i, k]
        sums[d + 1, PREFILL_TOKENS] += tables.tokens[i, k]
        sums[d + 1, WORK] += tables.prefill[i, k]
        sums[d + 1, PREFILLS] += 1
        sums[d + 1, LATE] += scratch.there[i]
        sums[d + 1, EARLY] += scratch.there[i] * scratch.forced[i]
        again = act == REFILL and tables.decode[i, k] <= tables.prefill[i, k]
        sums[d + 1, AGAIN] += again
    if act != IDLE and act != EVICT:
        sums[d + 1, CAPACITY] += tables.kv[i, k + 1]
        sums[d + 1, RUNNING_MAX] += 1
        sums[d + 1, NEW] += tables.arrival[i] == start

    within = tables.rules[HYBRID] == 1 or sums[d + 1, DECODES] == 0 or sums[d + 1, PREFILLS] == 0
    for q in range(4):
        within &= sums[d + 1, q] <= tables.rules[q]

    return within


@njit
def _at_least(d: int, size: int, start: int, tables: Tables, scratch: Scratch) -> Any:
    """Return a lower bound on what is counted after a batch that does so with the first requests.

    What it does with those of `who` from d on is open. Quiet states only.
    """
    row, who, rules, arrival = scratch.row, scratch.who, tables.rules, tables.arrival
    ends, works, fixes = scratch.sorts[0], scratch.sorts[1], scratch.sorts[2]
    spare = rules[BASE] + max(rules[DECODE_BASE], rules[PREFILL_BASE])
    t, n = start + rules[BASE] + scratch.sums[d, WORK], row.shape[0]
    t += rules[PREFILL_BASE] * (scratch.sums[d, PREFILLS] > 0)
    t += rules[DECODE_BASE] * (scratch.sums[d, DECODES] > 0)
    for e in range(size):
        i = who[e]
        code, less = row[i], spare
        if e < d:
            less = 0
            if scratch.choices[e, scratch.take[e]] != IDLE:
                k = (code >> 1) + 1
                code = 2 * k + (k < tables.output[i])

        work, fixed = tables.work[i, code], tables.fixed[i, code] - less
        _insert(ends, e, t + work + fixed)
        _insert(works, e, work)
        _insert(fixes, e, fixed)

    bound = _least_sum(ends, works, fixes, size, t)
    for m in range(begins_at(row), n):
        if arrival[m] > start:
            return bound + later(m, t, tables) if tables.known[m] > 0 else bound

    return bound


@njit
def _next_batch(d: int, room: int, numbers: Ints, tables: Tables, scratch: Scratch) -> Any:
    """Go on from request d of `who` to the next batch. Return the request that it has come to.

    That is the number of those in `who` if there is a batch, -1 if there is none, and another if
    the slice is used up: go on from there. Equal requests in equal states have choices in order.
    ``room``: what the incumbent leaves, or less than 0 where it does not count.
    """
    size, start = scratch.now[SIZE], scratch.now[START]
    row, who, take, kind = scratch.row, scratch.who, scratch.take, tables.kind
    tried, most = numbers[TRIED], numbers[MOST]
    while 0 <= d < size and tried < most:
        tried += 1
        i = who[d]
        if take[d] < 0 and d > 0:
            before = who[d - 1]
            if kind[before] == kind[i] and row[before] == row[i]:
                take[d] = take[d - 1] - 1

        take[d] += 1
        if take[d] >= scratch.number[d]:
            d -= 1
            continue

        act = scratch.choices[d, take[d]]
        if not _add(d, act, start, tables, scratch):
            continue
        cut = room >= 0 and act == PREFILL and d + 1 < size
        if cut and _at_least(d + 1, size, start, tables, scratch) >= room:
            continue

        d += 1
        if d < size:
            take[d] = -1

    numbers[TRIED] = tried
    return d


@njit
def _is_needless(size: int, tables: Tables, scratch: Scratch) -> bool:
    """Whether rules 1, 2, 5 or 6 leave a batch out."""
    sums, rules = scratch.sums[size], tables.rules
    if sums[PREFILLS] == sums[LATE] and sums[EARLY] > 0:
        return True
    if sums[AGAIN] > 0 and (
        sums[DECODES] > 0
        or (sums[AGAIN] == sums[PREFILLS] and rules[DECODE_BASE] <= rules[PREFILL_BASE])
    ):
        return True

    for e in range(size):
        i, act = scratch.who[e], scratch.choices[e, scratch.take[e]]
        k, held = scratch.row[i] >> 1, scratch.row[i] & 1
        if act == EVICT:
            if (
                sums[CAPACITY] + tables.kv[i, k] <= rules[CAPACITY]
                and sums[RUNNING_MAX] + 1 <= rules[RUNNING_MAX]
            ):
                return True
        elif act == IDLE and rules[COUNTED] == LATEST and k + 1 == tables.output[i]:
            phase = sums[DECODES] if held else sums[PREFILLS]
            dearer = held == 1 and tables.decode[i, k] > tables.prefill[i, k]
            if phase > 0 and not dearer and _fits(i, sums, tables, scratch):
                return True

    return False


@njit
def _fits(i: int, sums: Ints, tables: Tables, scratch: Scratch) -> bool:
    """Whether a request that idles in a batch could do its next step in it."""
    rules, k, held = tables.rules, scratch.row[i] >> 1, scratch.row[i] & 1
    tokens = 1 if held else tables.tokens[i, k]
    return (
        sums[TOKENS] + tokens <= rules[TOKENS]
        and sums[PREFILL_TOKENS] + tokens * (1 - held) <= rules[PREFILL_TOKENS]
        and sums[CAPACITY] + tables.kv[i, k + 1] - tables.kv[i, k] * held <= rules[CAPACITY]
        and sums[RUNNING_MAX] + 1 - held <= rules[RUNNING_MAX]
    )


@njit
def _lead(size: int, tables: Tables, scratch: Scratch) -> int:
    """Set the state after a batch. Return how many requests that are counted end or begin."""
    row, child, ended = scratch.row, scratch.child, 0
    first = tables.rules[COUNTED] == FIRSTS
    for i in range(row.shape[0]):
        child[i] = row[i]
    for e in range(size):
        i, act = scratch.who[e], scratch.choices[e, scratch.take[e]]
        if act == EVICT:
            child[i] = row[i] - (row[i] & 1)
        elif act != IDLE:
            k = (row[i] >> 1) + 1
            child[i] = 2 * k + (k < tables.output[i])
            ended += k == 1 if first else k == tables.output[i]

    _ordered(child, tables.kind)
    return ended


@njit
def _may_only_decode(
    since: int, t: int, room: int, tables: Tables, child: Ints, sorts: Ints
) -> bool:
    """Whether rules 3 to 5 leave only a batch that decodes all that are held, in a quiet state."""
    rules, held, after, least = tables.rules, 0, np.int64(NEVER), np.int64(NEVER)
    if rules[COUNTED] != FINISHES:
        since = -1
    for i in range(child.shape[0]):
        if child[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > t:
            after = min(after, tables.arrival[i])
            if rules[COUNTED] != FINISHES:
                return False
        elif child[i] & 1:
            held += 1
            least = min(least, tables.decode[i, child[i] >> 1])
        elif tables.arrival[i] > since:
            return False

    if held == 0 or t + rules[BASE] + rules[DECODE_BASE] + least > after:
        return False

    for i in range(child.shape[0]):
        here = child[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        if here and not _is_forced(i, child, t, room, tables, sorts):
            return False

    return True


@njit
def _decode_all(child: Ints, t: int, tables: Tables) -> tuple[int, int]:
    """Let all that are held decode from t on. Return the end, and how many requests end then."""
    end, ended = t + tables.rules[BASE] + tables.rules[DECODE_BASE], 0
    for i in range(child.shape[0]):
        if child[i] & 1:
            k = child[i] >> 1
            end += tables.decode[i, k]
            child[i] = 2 * (k + 1) + (k + 1 < tables.output[i])
            ended += k + 1 == tables.output[i]

    return end, ended


@njit
def _rate(row: Ints, tables: Tables) -> Any:
    """Return how often time counts from a first token to a last one."""
    rate = np.int64(0)
    for i in range(row.shape[0]):
        if 2 <= row[i] < 2 * tables.output[i]:
            rate += tables.rate[i]

    return rate


@njit
def _is_dominated(place: int, end: int, done: int, many: int, search: Search) -> bool:
    """Whether a label of the state is no worse, and deletes those that are no better.

    A moment later costs ``many`` at most.
    """
    known = search.table[place]
    while known >= 0:
        later = search.time[known] - end
        if search.done[known] + many * max(0, later) <= done:
            return True
        if done + many * max(0, -later) <= search.done[known]:
            search.flag[known] = DELETED

        known = search.link[known]

    return False


@njit
def _produced(row: Ints) -> Any:
    """Return a number that grows with the tokens produced and held."""
    total = np.int64(0)
    for i in range(row.shape[0]):
        total += row[i]

    return total


@njit
def _is_nearer(a: int, b: int, search: Search) -> bool:
    """Whether the first of two labels is to be preferred in a dive."""
    if search.low[a] != search.low[b]:
        return search.low[a] < search.low[b]

    return _produced(search.rows[a]) > _produced(search.rows[b])


@njit
def _add_label(size: int, at: int, place: int, search: Search, scratch: Scratch) -> Any:
    """Add the state after a batch, whose place in the hash table is given. Return its label."""
    child, numbers = scratch.child, search.numbers
    new = numbers[ROWS]
    numbers[ROWS] += 1
    for i in range(child.shape[0]):
        search.rows[new, i] = child[i]
        search.acts[new, i] = IDLE
    for e in range(size):
        search.acts[new, scratch.who[e]] = scratch.choices[e, scratch.take[e]]

    search.parent[new], search.link[new], search.flag[new] = at, search.table[place], OPEN
    search.table[place] = new
    return new


@njit
def _is_in_time(size: int, end: int, tables: Tables, scratch: Scratch) -> bool:
    """Whether a batch's first and last tokens are within limits."""
    for e in range(size):
        i, act = scratch.who[e], scratch.choices[e, scratch.take[e]]
        if act in (IDLE, EVICT):
            continue

        k = (scratch.row[i] >> 1) + 1
        late = k == 1 and end > tables.due[i, 0]
        if late or (k == tables.output[i] and end > tables.due[i, 1]):
            return False

    return True


@njit
def _leave_the_rest(new: int, search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Take a label as the incumbent if who has begun has ended. Return whether none is better."""
    left, numbers = np.int64(0), search.numbers
    for i in range(scratch.child.shape[0]):
        code = scratch.child[i]
        left += code == 0
        if 0 < code < 2 * tables.output[i]:
            return False

    if left < numbers[BEST]:
        numbers[BEST], numbers[GOAL] = left, new
    if left > search.low[new]:
        return False

    search.flag[new] = CLOSED
    return True


@njit
def _reach(
    size: int, start: int, at: int, quiet: bool, search: Search, tables: Tables, scratch: Scratch
) -> Any:
    """Follow a batch to the label after it. Return it if it is open, else -1."""
    rules, sums, numbers, arrival = tables.rules, scratch.sums, search.numbers, tables.arrival
    end = start + rules[BASE] + sums[size, WORK]
    end += rules[DECODE_BASE] * (sums[size, DECODES] > 0)
    end += rules[PREFILL_BASE] * (sums[size, PREFILLS] > 0)
    ended = _lead(size, tables, scratch)
    done, best, more, since = search.done[at] + ended * end, numbers[BEST], 0, np.int64(-1)
    if rules[COUNTED] == LATEST:
        done = np.int64(0)
    if rules[COUNTED] == PACES:  # all are there, so no time counts but that of tokens
        done, end = search.done[at] + (end - start) * _rate(scratch.row, tables), start
    if quiet and ended == 0 and rules[COUNTED] == FINISHES:
        since = np.int64(start)
    while quiet and _may_only_decode(since, end, best - done, tables, scratch.child, scratch.sorts):
        begin = end
        end, ended = _decode_all(scratch.child, begin, tables)
        since = np.int64(-1) if ended else begin
        done += ended * end if rules[COUNTED] == FINISHES else 0
        more += 1
        numbers[TRIED] += arrival.shape[0]

    if rules[COUNTED] == MISSES:
        done = np.int64(0)
        if not _is_in_time(size, end, tables, scratch):
            return -1

    place, many = find(scratch.child, search.rows, search.table), 0
    for i in range(arrival.shape[0]):
        many += scratch.child[i] < 2 * tables.output[i]
    if _is_dominated(place, end, done, max(1, many), search):
        return -1

    bound = remaining(scratch.child, end, best - done, tables, scratch.sorts)
    f = max(search.low[at], done + bound)
    if f >= best:
        return -1

    new = _add_label(size, at, place, search, scratch)
    search.time[new], search.done[new], search.low[new] = end, done, f
    search.more[new], search.since[new] = more, since

    # What comes after it is solved if those from m on are left, and the machine waits for them.
    m, alone = begins_at(scratch.child), rules[COUNTED] != MISSES
    for i in range(m):
        alone &= scratch.child[i] == 2 * tables.output[i]
    if rules[COUNTED] == MISSES and _leave_the_rest(new, search, tables, scratch):
        return -1

    solved = m == arrival.shape[0] or (end <= arrival[m] and tables.exact[m] == 1)
    if alone and solved:
        numbers[BEST], numbers[GOAL] = f, new
        search.flag[new] = CLOSED
        return -1

    push(search.heap, numbers[ENTRIES], f, -_produced(scratch.child), new)
    numbers[ENTRIES] += 1
    return new


@njit
def _begin(at: int, dives: bool, search: Search, tables: Tables, scratch: Scratch) -> None:
    """Make a label the one at hand, before its first batch."""
    row, now, n, t = scratch.row, scratch.now, tables.arrival.shape[0], search.time[at]
    fresh = False
    for i in range(n):
        row[i] = search.rows[at, i]
        fresh |= row[i] == 0

    quiet, roomy = _survey(t, search.numbers[BEST] - search.done[at], tables, scratch)
    for i in range(n):
        scratch.there[i] = quiet and tables.arrival[i] <= search.since[at]

    now[AT], now[DIVES], now[QUIET], now[ROOMY], now[FRESH] = at, dives, quiet, roomy, fresh
    now[FIRST_END], now[CHILD] = NEVER, -1
    _begin_at(t, t, tables, scratch)


@njit
def _begin_at(start: int, t: int, tables: Tables, scratch: Scratch) -> None:
    """Go over to the batches that begin at ``start``, after a label's time t."""
    row, now, rules, arrival = scratch.row, scratch.now, tables.rules, tables.arrival
    size, after = 0, np.int64(NEVER)
    for i in range(arrival.shape[0]):
        if row[i] == 2 * tables.output[i]:
            continue
        if arrival[i] > start:
            after = min(after, arrival[i])
            continue

        if rules[COUNTED] == MISSES and row[i] == 0 and _is_late(i, 0, start, tables):
            continue

        scratch.who[size] = i
        size += 1
        k = row[i] >> 1
        alone = tables.prefill[i, k] + rules[PREFILL_BASE]
        if row[i] & 1:
            alone = tables.decode[i, k] + rules[DECODE_BASE]
        if rules[COUNTED] == FIRSTS and now[FRESH] and k > 0:
            continue
        if rules[COUNTED] == MISSES and k == 0:
            continue

        now[FIRST_END] = min(now[FIRST_END], max(t, arrival[i]) + rules[BASE] + alone)

    now[START], now[SIZE], now[AFTER], now[MODE], now[DEPTH] = start, size, after, -1, -1


@njit
def _next_mode(search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Go over to the next mode of batches, or the next start. Return whether there is one."""
    now, counted, quiet = scratch.now, tables.rules[COUNTED], scratch.now[QUIET] == 1
    now[MODE] += 1
    if now[MODE] == (2 if quiet and not (counted == FIRSTS and now[FRESH]) else 1):
        # Rule 4.
        after = now[AFTER]
        if after == NEVER or (quiet and now[FIRST_END] <= after and counted != LATEST):
            return False

        _begin_at(after, search.time[now[AT]], tables, scratch)
        now[MODE] = 0

    _options(now[SIZE], now[MODE], quiet, now[ROOMY] == 1, tables, scratch)
    scratch.take[0] = -1
    now[DEPTH] = 0 if now[SIZE] > 0 else -1
    return True


@njit
def _follow(search: Search, tables: Tables, scratch: Scratch) -> int:
    """Follow the batches of the label at hand, from where it was left.

    Return ``SOLVED`` if all are done, or else what `expand` is to return.
    """
    now, sums, numbers = scratch.now, scratch.sums, search.numbers
    at, quiet, t = now[AT], now[QUIET] == 1, search.time[now[AT]]
    while True:
        if now[DEPTH] < 0 and not _next_mode(search, tables, scratch):
            numbers[DIVE] = now[CHILD]
            return SOLVED
        if numbers[ROWS] >= search.rows.shape[0] or numbers[ENTRIES] + 2 >= search.heap.shape[0]:
            return GROW

        counts = quiet and tables.rules[COUNTED] == FINISHES
        room = numbers[BEST] - search.done[at] if counts else -1
        now[DEPTH] = _next_batch(now[DEPTH], room, numbers, tables, scratch)
        size, start = now[SIZE], now[START]
        if now[DEPTH] < 0:
            continue
        if now[DEPTH] < size:
            return RUNNING

        now[DEPTH] = size - 1
        if sums[size, TOKENS] == 0 or (start > t and sums[size, NEW] == 0):
            continue
        if now[MODE] == 1 and sums[size, DECODES] == 0:
            continue  # mode 0 has it
        if _is_needless(size, tables, scratch):
            continue

        new = _reach(size, start, at, quiet, search, tables, scratch)
        nearer = new >= 0 and (now[CHILD] < 0 or _is_nearer(new, now[CHILD], search))
        if nearer and now[DIVES] == 1:
            now[CHILD] = new


@njit
def expand(limit: int, search: Search, tables: tuple[Tables, Scratch]) -> int:
    """Expand up to ``limit`` labels. With the tables comes the label at hand.

    A label may have 2^n batches, so the slice ends amid one after so many steps, too. Such a label
    is open, and in the heap, for the sake of the bound. The next slice goes on with it.
    """
    given, scratch = tables
    numbers = search.numbers
    numbers[TRIED] = 0
    for _ in range(limit):
        is_new = scratch.now[AT] < 0
        if is_new:
            at = _next_label(search)
            if at < 0:
                return SOLVED

            dives = numbers[DIVE] >= 0 or numbers[EXPANDED] % _DIVE_EVERY == 0
            numbers[DIVE] = -1
            _begin(at, dives, search, given, scratch)

        at = scratch.now[AT]
        search.flag[at] = CLOSED
        ended = _follow(search, given, scratch)
        if ended != SOLVED:
            search.flag[at] = OPEN
            if is_new:
                push(search.heap, numbers[ENTRIES], search.low[at], 0, at)
                numbers[ENTRIES] += 1
            return ended

        scratch.now[AT] = -1
        numbers[EXPANDED] += 1

    return RUNNING
