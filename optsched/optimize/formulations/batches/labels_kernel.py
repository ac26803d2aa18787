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
AT, START, MODE, SIZE, AFTER, FIRST_END, DEPTH, CHILD, QUIET, ALL_FIT, FRESH, DIVES = range(12)
"""Places of `Scratch.now`: the label at hand, or -1; of the batch in the making its start, its mode
(see `_offer`), how many it may hold, the next arrival and the request of `who` to go on from, or
-1; the first end of a batch of one; the child to dive into, or -1; and what holds for the label."""
COLUMNS = ("rows", "acts", "more", "since", "time", "done", "low", "parent", "link", "flag")
"""Fields of `Search` by label."""
NEVER = 2**62
"""Later than every time."""
_DIVE_EVERY = 1024
# The max number of weights.
_WEIGHTS = 16
# The max number of requests for which `_bound_shared` is computed.
_MANY = 12
# Arrivals beyond the present time that bounds add one by one: that by works, `_bound_shared`.
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
    before. `child`: the state that it leads to. `sorts`: space for `bound_rest`. `now`: how far the
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
def new_sorts(n: int) -> Ints:
    """Return the scratch space that `bound_rest` needs for n requests."""
    return np.zeros((5, max(n + 1, _WEIGHTS)), np.int64)


@njit
def new_scratch(n: int, rows: Ints) -> Scratch:
    """Return the scratch space for a label of n requests, with no label at hand."""
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
        new_sorts(n),
        np.full(12, -1, np.int64),
    )


# States and the queue


@njit
def _next_label(search: Search) -> Any:
    """Return the child that the search dives into, or the open label of the min f, or -1."""
    heap, numbers, flag, low = search.heap, search.numbers, search.flag, search.low
    label = numbers[DIVE]
    if label >= 0 and flag[label] == OPEN and low[label] < numbers[BEST]:
        return label

    # The heap is in order of f: from the first entry at the incumbent on, none can be better.
    while numbers[ENTRIES] > 0 and heap[0, 0] < numbers[BEST]:
        label = heap[0, 2]
        pop(heap, numbers[ENTRIES])
        numbers[ENTRIES] -= 1
        if flag[label] == OPEN:
            return label

    return -1


@njit
def _sort_equal_requests(row: Ints, kind: Ints) -> None:
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
    place = size
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1

    values[place] = value


@njit
def _bound_ends(ends: Ints, works: Ints, fixes: Ints, size: int, t: int) -> Any:
    """Return the bound on completions by works and chains; each list ascends."""
    total, work = np.int64(0), np.int64(t)
    for j in range(size):
        work += works[j]
        total += max(ends[j], work + fixes[j])

    return total


@njit
def bound_later(m: int, t: int, tables: Tables) -> Any:
    """Return a lower bound on what is counted for the requests from m on, alone, from t on."""
    moments, values, n = tables.moments, tables.values, tables.arrival.shape[0]
    slope = 1 if tables.rules[COUNTED] == LATEST else n - m
    last, known = 0, tables.known[m]
    if tables.rules[COUNTED] == MISSES:
        return values[m, 0]
    # The last moment up to t that is known: L does not fall with t.
    while last + 1 < known and moments[m, last + 1] <= t:
        last += 1

    value = values[m, last]
    if last + 1 < known:
        # L(m, t) >= L(m, t + d) - c d (docstring of `labels`, By later arrivals).
        return max(value, values[m, last + 1] - slope * (moments[m, last + 1] - t))
    # From the last arrival on only time passes, so L rises by c d.
    if moments[m, last] >= tables.arrival[n - 1]:
        value += slope * max(0, t - moments[m, last])

    return value


@njit
def _bound_shared(row: Ints, cut: int, t: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the sum of the completions of the requests before ``cut``.

    They count as arrived. The second bound of `optsched.optimize.formulations.batches.labels`.
    """
    starts, decodes, steps = sorts[0], sorts[1], sorts[2]
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

        _insert(decodes, size, tables.decodes[i, k])
        _insert(steps, size, output - k)
        size += 1

    running = size - waiting
    batch = rules[BASE] + rules[DECODE_BASE]
    total = np.int64(0)
    for j in range(size):
        # The j-th least own work of decodes is in size - j completions; the fixed cost of a step is
        # in that of its own request.
        total += t + (size - j) * decodes[j] + batch * steps[j]

    # Nobody waits for a prefill, so that the other kinds of time are 0.
    if waiting == 0:
        return total

    # In place: counts[e] is what the e requests with the fewest decodes need.
    credit = np.int64(0)
    for j in range(size):
        credit, steps[j] = credit + batch * steps[j], credit
    for e in range(size + 1):
        cost[e] = 2**61
    cost[0] = 0

    for i in range(waiting):  # so many have begun; next is one more
        at_most = running + i
        for e in range(at_most + 1):
            new[e] = 2**61
        for e in range(at_most + 1):
            # No choice of e_1, ..., e_i leads here.
            if cost[e] >= 2**61:
                continue

            # e_i rises to ``after``: all that have begun may have ended by then, but not everybody.
            for after in range(e, at_most + 1):
                if after == size:
                    break
                value = cost[e] + starts[i] * (size - after)
                if after > e:
                    need = steps[after] - steps[e]
                    # What must be decoded first is bought at the cheaper of two prices: now, or
                    # earlier (docstring of `labels`, By what those in flight share).
                    flying = running + i - e
                    price = 2**61 if flying <= 0 else need * (waiting - i) // flying
                    if i > 0 and running + i - 1 > 0:
                        price = min(price, need * (waiting - i + 1) // (running + i - 1))

                    value += price
                # Two batches, so prefill_base is paid again.
                if i == 0 or after > e:
                    value += rules[PREFILL_BASE] * (size - after)
                if i == 0 and running == 0:
                    value += rules[BASE] * size

                new[after] = min(new[after], value)

        for e in range(at_most + 1):
            cost[e] = new[e]

    lowest = np.int64(2**61)
    for e in range(size):
        lowest = min(lowest, cost[e])

    return total + lowest


@njit
def first_untouched(row: Ints) -> Any:
    """Return the first request from which on none has begun."""
    m = row.shape[0]
    while m > 0 and row[m - 1] == 0:
        m -= 1

    return m


@njit
def _bound_fixed_costs(totals: Ints, longest: int, tables: Tables) -> Any:
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
    # Prefills are the cheaper batches, so all of them might be.
    if prefill_base < decode_base:
        return (base + prefill_base) * batches

    return base * batches + prefill_base * prefills + decode_base * (batches - prefills)


@njit
def _bound_last_end(row: Ints, t: int, tables: Tables, sorts: Ints) -> Any:
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
        # Requests of one arrival count together, and those that are here only with all the others.
        if work > 0 and (i == 0 or (arrival[i] > t and arrival[i - 1] < arrival[i])):
            fixed = max(fixed, _bound_fixed_costs(totals, longest, tables))
            best = max(best, max(t, arrival[i]) + work + fixed)

    untouched = first_untouched(row)
    if untouched < n and tables.known[untouched] > 0:
        best = max(best, bound_later(untouched, t, tables))

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
def _bound_missed(row: Ints, t: int, which: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the requests never begun, or ``NEVER`` if one has begun in vain.

    ``which``: it looks at the limits on first tokens (0) or on last ones (1).
    """
    best, missed, size, rules = np.int64(0), np.int64(0), 0, tables.rules
    dues, works, untouched, cut = sorts[0], sorts[1], first_untouched(row), True
    for i in range(row.shape[0]):
        code = np.int64(row[i])
        new = i == untouched or (cut and tables.arrival[i] > t)
        if new and i >= untouched and tables.known[i] > 0:
            # What is known of the requests from i on adds to the bound of those before.
            best = max(best, missed + _count_too_many(dues, works, size, t) + tables.values[i, 0])
        if tables.arrival[i] > t:
            cut = False
        if code == 2 * tables.output[i]:
            continue
        if _is_late(i, code, t, tables):
            missed += 1
            if code > 0:
                # It has begun, and those that have begun must be within their limits.
                return np.int64(NEVER)
            continue
        if which == 0 and code > 0:
            continue

        work, due = tables.prefill[i, 0], tables.due[i, 0] - rules[BASE] - rules[PREFILL_BASE]
        if which == 1:
            work, due = tables.work[i, code], tables.due[i, 1] - tables.fixed[i, code]

        place = size
        # Moore's rule takes works in order of when they are due.
        while place > 0 and dues[place - 1] > due:
            dues[place], works[place] = dues[place - 1], works[place - 1]
            place -= 1

        dues[place], works[place] = due, work
        size += 1

    return max(best, missed + _count_too_many(dues, works, size, t))


@njit
def _count_too_many(dues: Ints, works: Ints, size: int, t: int) -> Any:
    """Return how many works must be left out so that the others end when due, by Moore's rule.

    They are in order of when they are due. Where one is late, the largest one so far is left out.
    """
    total, removed = np.int64(t), 0
    for j in range(size):
        total += works[j]
        # It is in time with all before, so nothing has to go.
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
def bound_rest(
    row: Ints, t: int, enough: int, tables: Tables, sorts: Ints, late: int = -1, until: int = 0
) -> Any:
    """Return a lower bound on what is counted for unfinished requests from time t on.

    With a bound of ``enough`` or more it may stop. ``sorts``: space of shape (5, n + 1). The
    request ``late`` does not end before ``until``, if there is one.
    """
    arrival, output, known = tables.arrival, tables.output, tables.known
    work, fixed, rules = tables.work, tables.fixed, tables.rules
    ends, works, fixes = sorts[0], sorts[1], sorts[2]
    if rules[COUNTED] == LATEST:
        return _bound_last_end(row, t, tables, sorts)
    if rules[COUNTED] == PACES:
        total = np.int64(0)
        for i in range(row.shape[0]):
            total += work[i, row[i]]
        return total
    if rules[COUNTED] == MISSES:
        return max(_bound_missed(row, t, 0, tables, sorts), _bound_missed(row, t, 1, tables, sorts))

    n, size, best, ahead, cut = row.shape[0], 0, np.int64(0), 0, row.shape[0]
    untouched, together = first_untouched(row), rules[SHARED] and late < 0
    for i in range(n):
        if arrival[i] > t:
            cut = min(cut, i)
            ahead += 1
            # Of later arrivals few are added one by one: the bound of the rest has the others.
            if ahead > _AHEAD and known[i] > 0:
                break
        if i >= untouched and known[i] > 0:
            best = max(best, _bound_ends(ends, works, fixes, size, t) + bound_later(i, t, tables))
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
        best = max(best, _bound_ends(ends, works, fixes, size, t))

    if together:
        for stop in range(untouched, min(n, cut + _BEYOND) + 1):
            count = 0
            for i in range(stop):
                count += row[i] < 2 * output[i]
            if best < enough and 1 < count <= _MANY and (stop == n or known[stop] > 0):
                shared = _bound_shared(row, stop, t, tables, sorts)
                best = max(best, shared + (bound_later(stop, t, tables) if stop < n else 0))

    return best


# Batches


@njit
def _is_forced(i: int, row: Ints, t: int, slack: int, tables: Tables, sorts: Ints) -> bool:
    """Whether by rule 3 a request decodes in every batch that decodes, or would once it is held.

    ``slack`` is what the incumbent leaves for the rest.
    """
    arrival, output, rules = tables.arrival, tables.output, tables.rules
    if row[i] == 2 * output[i] or arrival[i] > t:
        return False
    if rules[COUNTED] == MISSES:
        return False
    if rules[COUNTED] != FINISHES:
        return True

    unfinished, arrived, ends = 0, 0, sorts[3]
    for j in range(row.shape[0]):
        if row[j] < 2 * output[j]:
            unfinished += 1
            if arrival[j] <= t:
                arrived += 1
            else:
                end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
                _insert(ends, unfinished - arrived - 1, end)

    saved = rules[BASE] + rules[DECODE_BASE]
    need = -(-saved // max(1, tables.decode[i, output[i] - 1]))  # others that end before it
    # Rule 3: there are not so many others.
    if unfinished - 1 < need:
        return True
    # Enough others are here to end before it, so nothing says that it ends late.
    if arrived - 1 >= need:
        return False

    return bound_rest(row, t, slack, tables, sorts, i, ends[need - arrived]) >= slack


@njit
def _mark_forced(t: int, slack: int, tables: Tables, scratch: Scratch) -> tuple[bool, bool]:
    """Return whether the state is quiet, and whether all peaks fit.

    Requests that rule 3 has decode are marked: ``slack`` is what the incumbent leaves for the rest.
    """
    row, rules, output = scratch.row, tables.rules, tables.output
    n, unfinished, held, tokens, quiet = row.shape[0], 0, np.int64(0), np.int64(0), True
    for i in range(n):
        if row[i] == 2 * output[i]:
            continue

        k = row[i] >> 1
        unfinished += 1
        held += tables.kv[i, output[i]]
        tokens += 1 if row[i] & 1 else tables.tokens[i, k]
        quiet &= tables.calm[i, k] == 1

    peaks_fit = held <= rules[CAPACITY] and unfinished <= rules[RUNNING_MAX]
    quiet &= peaks_fit and tokens <= rules[PREFILL_TOKENS]
    for i in range(n):
        scratch.forced[i] = quiet and _is_forced(i, row, t, slack, tables, scratch.sorts)

    return quiet, peaks_fit


@njit
def _offer(
    size: int, mode: int, quiet: bool, peaks_fit: bool, tables: Tables, scratch: Scratch
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
        # Who is forced decodes in every batch that decodes (rule 3), so batches without decodes are
        # a mode of their own.
        elif quiet and mode == 0:
            choices[d, 0], options = IDLE, 1
        elif quiet:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            options -= scratch.forced[i]
        else:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            if evicts and not peaks_fit:
                choices[d, options] = EVICT
                options += 1
            # Rule 2 allows a refill in place only where it is cheaper, or no decode may stand here.
            dearer = tables.decode[i, k] + rules[DECODE_BASE] > tables.prefill[i, k]
            if evicts and (dearer or not hybrid):
                choices[d, options] = REFILL
                options += 1

        scratch.number[d] = options


@njit
def _add_act(d: int, act: int, start: int, tables: Tables, scratch: Scratch) -> bool:
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

    is_valid = tables.rules[HYBRID] == 1 or sums[d + 1, DECODES] == 0 or sums[d + 1, PREFILLS] == 0
    for q in range(4):
        is_valid &= sums[d + 1, q] <= tables.rules[q]

    return is_valid


@njit
def _bound_after(d: int, size: int, start: int, tables: Tables, scratch: Scratch) -> Any:
    """Return a lower bound on what is counted after a batch whose first d requests are decided.

    What it does with those of `who` from d on is open. Quiet states only.
    """
    row, who, rules, arrival = scratch.row, scratch.who, tables.rules, tables.arrival
    ends, works, fixes = scratch.sorts[0], scratch.sorts[1], scratch.sorts[2]
    fixed_now = rules[BASE] + max(rules[DECODE_BASE], rules[PREFILL_BASE])
    t, n = start + rules[BASE] + scratch.sums[d, WORK], row.shape[0]
    t += rules[PREFILL_BASE] * (scratch.sums[d, PREFILLS] > 0)
    t += rules[DECODE_BASE] * (scratch.sums[d, DECODES] > 0)
    for e in range(size):
        i = who[e]
        code, saved = row[i], fixed_now
        if e < d:
            saved = 0
            if scratch.choices[e, scratch.take[e]] != IDLE:
                k = (code >> 1) + 1
                code = 2 * k + (k < tables.output[i])

        work, fixed = tables.work[i, code], tables.fixed[i, code] - saved
        _insert(ends, e, t + work + fixed)
        _insert(works, e, work)
        _insert(fixes, e, fixed)

    bound = _bound_ends(ends, works, fixes, size, t)
    for m in range(first_untouched(row), n):
        if arrival[m] > start:
            return bound + bound_later(m, t, tables) if tables.known[m] > 0 else bound

    return bound


@njit
def _next_batch(d: int, slack: int, numbers: Ints, tables: Tables, scratch: Scratch) -> Any:
    """Go on from request d of `who` to the next batch. Return the request that it has come to.

    That is the number of those in `who` if there is a batch, -1 if there is none, and another if
    the slice is used up: go on from there. Equal requests in equal states have choices in order.
    ``slack``: what the incumbent leaves, or less than 0 where it does not count.
    """
    size, start = scratch.now[SIZE], scratch.now[START]
    row, who, take, kind = scratch.row, scratch.who, scratch.take, tables.kind
    tried, max_tried = numbers[TRIED], numbers[MOST]
    while 0 <= d < size and tried < max_tried:
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
        # Sums only grow, so all batches with this choice break the limit.
        if not _add_act(d, act, start, tables, scratch):
            continue
        # After a prefill the bound of the batch in the making may say that all of them are too
        # late.
        prunes = slack >= 0 and act == PREFILL and d + 1 < size
        if prunes and _bound_after(d + 1, size, start, tables, scratch) >= slack:
            continue

        d += 1
        if d < size:
            take[d] = -1

    numbers[TRIED] = tried
    return d


@njit
def _is_needless(size: int, tables: Tables, scratch: Scratch) -> bool:
    """Whether rule 1, 2, 5 or 6 leaves a batch out."""
    sums, rules = scratch.sums[size], tables.rules
    # Rule 5: all that it prefills could have been in the batch before.
    if sums[PREFILLS] == sums[LATE] and sums[EARLY] > 0:
        return True
    # Rule 2: a decode in place of such a refill is no dearer, and may stand here.
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
        # Rule 6: its last token would fit into this batch.
        elif act == IDLE and rules[COUNTED] == LATEST and k + 1 == tables.output[i]:
            phase = sums[DECODES] if held else sums[PREFILLS]
            dearer = held == 1 and tables.decode[i, k] > tables.prefill[i, k]
            if phase > 0 and not dearer and _would_fit(i, sums, tables, scratch):
                return True

    return False


@njit
def _would_fit(i: int, sums: Ints, tables: Tables, scratch: Scratch) -> bool:
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
def _set_child(size: int, tables: Tables, scratch: Scratch) -> int:
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

    _sort_equal_requests(child, tables.kind)
    return ended


@njit
def _may_only_decode(
    since: int, t: int, slack: int, tables: Tables, child: Ints, sorts: Ints
) -> bool:
    """Whether rules 3 to 5 leave only a batch that decodes all that are held, in a quiet state."""
    rules, held, next_arrival, min_work = tables.rules, 0, np.int64(NEVER), np.int64(NEVER)
    if rules[COUNTED] != FINISHES:
        since = -1
    for i in range(child.shape[0]):
        if child[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > t:
            next_arrival = min(next_arrival, tables.arrival[i])
            if rules[COUNTED] != FINISHES:
                return False
        elif child[i] & 1:
            held += 1
            min_work = min(min_work, tables.decode[i, child[i] >> 1])
        elif tables.arrival[i] > since:
            return False

    # Rule 4 lets the machine wait for an arrival before the first batch can end.
    if held == 0 or t + rules[BASE] + rules[DECODE_BASE] + min_work > next_arrival:
        return False

    for i in range(child.shape[0]):
        here = child[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        if here and not _is_forced(i, child, t, slack, tables, sorts):
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
def _running_rate(row: Ints, tables: Tables) -> Any:
    """Return how often time counts from a first token to a last one."""
    rate = np.int64(0)
    for i in range(row.shape[0]):
        if 2 <= row[i] < 2 * tables.output[i]:
            rate += tables.rate[i]

    return rate


@njit
def _is_dominated(place: int, end: int, done: int, unfinished: int, search: Search) -> bool:
    """Whether a label of the state is no worse, and deletes those that are no better.

    A moment later costs ``many`` at most.
    """
    known = search.table[place]
    while known >= 0:
        delay = search.time[known] - end
        # The other one, put off to this time, has counted no more: it is no worse (docstring of
        # `labels`).
        if search.done[known] + unfinished * max(0, delay) <= done:
            return True
        if done + unfinished * max(0, -delay) <= search.done[known]:
            search.flag[known] = DELETED

        known = search.link[known]

    return False


@njit
def _progress_of(row: Ints) -> Any:
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

    return _progress_of(search.rows[a]) > _progress_of(search.rows[b])


@njit
def _add_label(size: int, parent: int, place: int, search: Search, scratch: Scratch) -> Any:
    """Add the state after a batch, whose place in the hash table is given. Return its label."""
    child, numbers = scratch.child, search.numbers
    new = numbers[ROWS]
    numbers[ROWS] += 1
    for i in range(child.shape[0]):
        search.rows[new, i] = child[i]
        search.acts[new, i] = IDLE
    for e in range(size):
        search.acts[new, scratch.who[e]] = scratch.choices[e, scratch.take[e]]

    search.parent[new], search.link[new], search.flag[new] = parent, search.table[place], OPEN
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
def _take_if_done(new: int, search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Take a label as the incumbent if who has begun has ended. Return whether none is better."""
    never_begun, numbers = np.int64(0), search.numbers
    for i in range(scratch.child.shape[0]):
        code = scratch.child[i]
        never_begun += code == 0
        if 0 < code < 2 * tables.output[i]:
            return False

    if never_begun < numbers[BEST]:
        numbers[BEST], numbers[GOAL] = never_begun, new
    # More are left than the bound says, so a schedule that begins some of them may be better.
    if never_begun > search.low[new]:
        return False

    search.flag[new] = CLOSED
    return True


@njit
def _follow_batch(
    size: int, start: int, label: int, quiet: bool, search: Search, tables: Tables, scratch: Scratch
) -> Any:
    """Follow a batch to the label after it. Return it if it is open, else -1."""
    rules, sums, numbers, arrival = tables.rules, scratch.sums, search.numbers, tables.arrival
    end = start + rules[BASE] + sums[size, WORK]
    end += rules[DECODE_BASE] * (sums[size, DECODES] > 0)
    end += rules[PREFILL_BASE] * (sums[size, PREFILLS] > 0)
    ended = _set_child(size, tables, scratch)
    done, best, more, since = search.done[label] + ended * end, numbers[BEST], 0, np.int64(-1)
    if rules[COUNTED] == LATEST:
        done = np.int64(0)
    if rules[COUNTED] == PACES:  # all are there, so no time counts but that of tokens
        done, end = search.done[label] + (end - start) * _running_rate(scratch.row, tables), start
    if quiet and ended == 0 and rules[COUNTED] == FINISHES:
        since = np.int64(start)
    # The rules leave one batch: it is followed at once, and its state gets no label.
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

    place, unfinished = find(scratch.child, search.rows, search.table), 0
    for i in range(arrival.shape[0]):
        unfinished += scratch.child[i] < 2 * tables.output[i]
    if _is_dominated(place, end, done, max(1, unfinished), search):
        return -1

    bound = bound_rest(scratch.child, end, best - done, tables, scratch.sorts)
    f = max(search.low[label], done + bound)
    # No schedule from here is better than the incumbent.
    if f >= best:
        return -1

    new = _add_label(size, label, place, search, scratch)
    search.time[new], search.done[new], search.low[new] = end, done, f
    search.more[new], search.since[new] = more, since

    # What comes after it is solved if those from m on are left, and the machine waits for them.
    m, alone = first_untouched(scratch.child), rules[COUNTED] != MISSES
    for i in range(m):
        alone &= scratch.child[i] == 2 * tables.output[i]
    if rules[COUNTED] == MISSES and _take_if_done(new, search, tables, scratch):
        return -1

    solved = m == arrival.shape[0] or (end <= arrival[m] and tables.exact[m] == 1)
    if alone and solved:
        numbers[BEST], numbers[GOAL] = f, new
        search.flag[new] = CLOSED
        return -1

    push(search.heap, numbers[ENTRIES], f, -_progress_of(scratch.child), new)
    numbers[ENTRIES] += 1
    return new


@njit
def _begin_label(at: int, dives: bool, search: Search, tables: Tables, scratch: Scratch) -> None:
    """Make a label the one at hand, before its first batch."""
    row, now, n, t = scratch.row, scratch.now, tables.arrival.shape[0], search.time[at]
    fresh = False
    for i in range(n):
        row[i] = search.rows[at, i]
        fresh |= row[i] == 0

    quiet, fits = _mark_forced(t, search.numbers[BEST] - search.done[at], tables, scratch)
    for i in range(n):
        scratch.there[i] = quiet and tables.arrival[i] <= search.since[at]

    now[AT], now[DIVES], now[QUIET], now[ALL_FIT], now[FRESH] = at, dives, quiet, fits, fresh
    now[FIRST_END], now[CHILD] = NEVER, -1
    _begin_batches(t, t, tables, scratch)


@njit
def _begin_batches(start: int, t: int, tables: Tables, scratch: Scratch) -> None:
    """Go over to the batches that begin at ``start``, after a label's time t."""
    row, now, rules, arrival = scratch.row, scratch.now, tables.rules, tables.arrival
    size, after = 0, np.int64(NEVER)
    for i in range(arrival.shape[0]):
        if row[i] == 2 * tables.output[i]:
            continue
        if arrival[i] > start:
            after = min(after, arrival[i])
            continue

        # It cannot be within its limits any more, so it is served after all others.
        if rules[COUNTED] == MISSES and row[i] == 0 and _is_late(i, 0, start, tables):
            continue

        scratch.who[size] = i
        size += 1
        k = row[i] >> 1
        shortest = tables.prefill[i, k] + rules[PREFILL_BASE]
        if row[i] & 1:
            shortest = tables.decode[i, k] + rules[DECODE_BASE]
        if rules[COUNTED] == FIRSTS and now[FRESH] and k > 0:
            continue
        if rules[COUNTED] == MISSES and k == 0:
            continue

        now[FIRST_END] = min(now[FIRST_END], max(t, arrival[i]) + rules[BASE] + shortest)

    now[START], now[SIZE], now[AFTER], now[MODE], now[DEPTH] = start, size, after, -1, -1


@njit
def _next_mode(search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Go over to the next mode of batches, or the next start. Return whether there is one."""
    now, counted, quiet = scratch.now, tables.rules[COUNTED], scratch.now[QUIET] == 1
    now[MODE] += 1
    if now[MODE] == (2 if quiet and not (counted == FIRSTS and now[FRESH]) else 1):
        # Rule 4: with time for a batch before the next arrival, the machine does not wait for it.
        after = now[AFTER]
        if after == NEVER or (quiet and now[FIRST_END] <= after and counted != LATEST):
            return False

        _begin_batches(after, search.time[now[AT]], tables, scratch)
        now[MODE] = 0

    _offer(now[SIZE], now[MODE], quiet, now[ALL_FIT] == 1, tables, scratch)
    scratch.take[0] = -1
    now[DEPTH] = 0 if now[SIZE] > 0 else -1
    return True


@njit
def _follow_batches(search: Search, tables: Tables, scratch: Scratch) -> int:
    """Follow the batches of the label at hand, from where it was left.

    Return ``SOLVED`` if all are done, or else what `expand` is to return.
    """
    now, sums, numbers = scratch.now, scratch.sums, search.numbers
    label, quiet, t = now[AT], now[QUIET] == 1, search.time[now[AT]]
    while True:
        if now[DEPTH] < 0 and not _next_mode(search, tables, scratch):
            numbers[DIVE] = now[CHILD]
            return SOLVED
        # Arrays only grow between two slices; the search goes on from this batch.
        if numbers[ROWS] >= search.rows.shape[0] or numbers[ENTRIES] + 2 >= search.heap.shape[0]:
            return GROW

        prunes = quiet and tables.rules[COUNTED] == FINISHES
        slack = numbers[BEST] - search.done[label] if prunes else -1
        now[DEPTH] = _next_batch(now[DEPTH], slack, numbers, tables, scratch)
        size, start = now[SIZE], now[START]
        if now[DEPTH] < 0:
            continue
        if now[DEPTH] < size:
            return RUNNING

        now[DEPTH] = size - 1
        # Without a token nothing is done; and who waits for an arrival prefills it, or could begin
        # before.
        if sums[size, TOKENS] == 0 or (start > t and sums[size, NEW] == 0):
            continue
        if now[MODE] == 1 and sums[size, DECODES] == 0:
            continue  # mode 0 has it
        if _is_needless(size, tables, scratch):
            continue

        new = _follow_batch(size, start, label, quiet, search, tables, scratch)
        nearer = new >= 0 and (now[CHILD] < 0 or _is_nearer(new, now[CHILD], search))
        if nearer and now[DIVES] == 1:
            now[CHILD] = new


@njit
def expand(limit: int, search: Search, tables: tuple[Tables, Scratch]) -> int:
    """Expand up to ``limit`` labels. With the tables comes the label at hand.

    A label may have 2^n batches, so the slice ends amid one after so many steps, too. Such a label
    is open, and in the heap, for the sake of the bound. The next slice goes on with it.
    """
    data, scratch = tables
    numbers = search.numbers
    numbers[TRIED] = 0
    for _ in range(limit):
        is_new = scratch.now[AT] < 0
        if is_new:
            label = _next_label(search)
            if label < 0:
                return SOLVED

            # Dives find incumbents: one begins now and then, and goes on from child to child.
            dives = numbers[DIVE] >= 0 or numbers[EXPANDED] % _DIVE_EVERY == 0
            numbers[DIVE] = -1
            _begin_label(label, dives, search, data, scratch)

        label = scratch.now[AT]
        search.flag[label] = CLOSED
        ended = _follow_batches(search, data, scratch)
        if ended != SOLVED:
            search.flag[label] = OPEN
            if is_new:
                push(search.heap, numbers[ENTRIES], search.low[label], 0, label)
                numbers[ENTRIES] += 1
            return ended

        scratch.now[AT] = -1
        numbers[EXPANDED] += 1

    return RUNNING
