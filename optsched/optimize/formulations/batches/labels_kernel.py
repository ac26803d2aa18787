"""The compiled core of infermax's label-setting search. Import it lazily: it loads numba.

`optsched.optimize.formulations.batches.labels` has the rules and the bounds, with their proofs.

A state (`row`, `child`) has one code for each request: 2 k + held, where k is its tokens produced,
and held is 1 if its KV is held, else 0. So ``code >> 1`` is k, and with ``code & 1`` it may decode,
and otherwise waits for a prefill. Code 0: it has not begun. Code 2 output: it has ended.

A label has a state, the time t at which the machine is free, S (`done`), what is counted up to t,
and f (`low`), a lower bound on what is counted in all. For the makespan and for misses S is 0, for
times per token t is. The incumbent is the best value so far.

The rules leave out, in short: 1 needless evictions; 2 refills in place of a decode that is no
dearer; 3 decodes without a resident; 4 waiting for an arrival while there is time for a batch;
5 prefills that could have been in the batch before; 6 idling with one token left, for the makespan.
Rules 3 and 5, and the bound of a batch in the making, are for quiet states: nothing is evicted from
there on, and all that is unfinished fits together.

Arguments that many functions have: ``row`` is a state, and ``t`` the time from which it goes on. A
batch in the making concerns the first ``size`` requests of ``scratch.who``, and the e-th of them
does ``choices[e, take[e]]``. ``slack`` or ``enough`` is the incumbent less what is counted so far:
a bound that reaches it leaves nothing better. ``sorts`` is scratch space (`new_sorts`).
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
"""Places of `Tables.rules`. The first four are limits of the first four sums of a batch, which are
tokens, tokens of prefills, KV tokens held, and requests that hold KV. Then there are fixed costs
(of each batch, of its decodes, of its prefills), and 1 or 0: whether a batch may decode and prefill
at once (HYBRID), may evict (EVICTS), whether `_bound_shared` holds (SHARED). ``COUNTED``: below."""
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
TRIED, MAX_TRIED = 6, 7
"""Further places of `Search.numbers`: steps in this slice, and their max."""
LABEL, START, MODE, SIZE, AFTER, FIRST_END, DEPTH, CHILD, QUIET, ALL_FIT, ANY_UNBEGUN, MAY_DIVE = (
    range(12)
)
"""Places of `Scratch.now`. LABEL: the label at hand, or -1. START: when the batch in the making
begins. MODE: in a quiet state 1 if it decodes, and 0 if not; else 0. SIZE: how many requests are in
`who`. AFTER: the first arrival later than START. FIRST_END: when a batch of one request could end.
DEPTH: the place in `who` whose choice is next, SIZE if all are made, -1 if the mode has no other
batch. CHILD: the child to dive into, or -1. And 1 or 0: the state is QUIET; the unfinished requests
and the peaks of their KV fit together (ALL_FIT); ANY_UNBEGUN; and the label MAY_DIVE."""
COLUMNS = ("rows", "acts", "more", "since", "time", "done", "low", "parent", "link", "flag")
"""Fields of `Search` by label."""
NEVER = 2**62
"""Later than every time."""
# A dive begins whenever so many more labels have been expanded.
_DIVE_EVERY = 1024
# The max number of weights (`by_kv` and `by_input` of `batch_count`).
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

    By label: `rows` are the codes, `acts` what the batch does with each request, `parent` the label
    that it began at, -1 for the root. After that batch all decode `more` times. `since`: when the
    last batch began if rule 5 looks at it, else -1. `time` and `done` are t and S, `low` is f.
    `link` chains the labels of a state (-1: no other), whose latest one is in the hash table
    `table` (-1: an empty place). `heap` has (f, - sum of codes, label), or a 0 in the middle where
    a slice ended amid a label's batches.
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
    """Return the scratch space for a label of n requests, with no label at hand.

    The arrays are in the order of the fields of `Scratch`. Codes have the type of ``rows``.
    """
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
    """Return the child that the search dives into, or the open label of the min f, or -1.

    A child stays in the heap when it is dived into, and is skipped there once it is closed.
    """
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
        place = i
        while place > 0 and kind[place - 1] == kind[place] and row[place - 1] < row[place]:
            row[place - 1], row[place] = row[place], row[place - 1]
            place -= 1


# Bounds


@njit
def _insert(values: Ints, size: int, value: int) -> None:
    """Insert a value into the first ``size`` values, which ascend; there is room for one more."""
    place = size
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1

    values[place] = value


@njit
def _bound_ends(ends: Ints, works: Ints, fixes: Ints, size: int, t: int) -> Any:
    """Return a lower bound on the sum of ``size`` completions from t on, by works and chains.

    The lists ascend: least ends, own works and fixed costs of requests.
    """
    total, work = np.int64(0), np.int64(t)
    for j in range(size):
        # By the j-th completion j requests are worked off, one of which has the j-th fixed costs.
        work += works[j]
        total += max(ends[j], work + fixes[j])

    return total


@njit
def bound_later(m: int, t: int, tables: Tables) -> Any:
    """Return a lower bound on L(m, t): what is counted for those from m on, alone, from t on."""
    moments, values, n = tables.moments, tables.values, tables.arrival.shape[0]
    # By how much the value rises at most if all begin a moment later.
    slope = 1 if tables.rules[COUNTED] == LATEST else n - m
    last, known = 0, tables.known[m]
    # Who begins later misses no fewer limits: the value at the m-th arrival, the only one, holds.
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

    They count as arrived. This is the second bound of `labels`, By what those in flight share. Its
    u is ``size`` here, v ``waiting``, h ``running``, and f ``batch``. Three lists ascend: own works
    of the prefills of who waits (``starts``), own works of the decodes still to come (``decodes``),
    and their numbers (``steps``). While prefill i is at hand, ``e`` is e_{i-1}, ``after`` is e_i,
    and ``cost[e]`` the least value so far, or 2**61 if no choice leads to it.
    """
    starts, decodes, steps = sorts[0], sorts[1], sorts[2]
    cost, next_cost, rules = sorts[3], sorts[4], tables.rules
    size, waiting = 0, 0
    for i in range(cut):
        code, output = np.int64(row[i]), tables.output[i]
        # It has finished.
        if code == 2 * output:
            continue

        k = code >> 1
        # It waits: its prefill produces token k + 1, and decodes the others.
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

    # From here on steps[e] is G(e), what the e requests with the fewest decodes need, in place.
    needed_before = np.int64(0)
    for j in range(size):
        needed_before, steps[j] = needed_before + batch * steps[j], needed_before
    for e in range(size + 1):
        cost[e] = 2**61
    cost[0] = 0

    # The i requests with the least prefills have begun, and the next one is at hand.
    for i in range(waiting):
        at_most = running + i  # so many can have ended
        for e in range(at_most + 1):
            next_cost[e] = 2**61
        for e in range(at_most + 1):
            # No choice of e_1, ..., e_i leads here.
            if cost[e] >= 2**61:
                continue

            # e_i rises to ``after``: all that have begun may have ended by then, but not everybody.
            for after in range(e, at_most + 1):
                # The one at hand has not ended before its own prefill.
                if after == size:
                    break
                value = cost[e] + starts[i] * (size - after)
                if after > e:
                    need = steps[after] - steps[e]
                    # What must be decoded first is bought at the cheaper of two prices: now, or
                    # earlier (docstring of `labels`, By what those in flight share).
                    in_flight = running + i - e
                    # Nobody in flight can decode now, so only the earlier price counts.
                    price = 2**61 if in_flight <= 0 else need * (waiting - i) // in_flight
                    if i > 0 and running + i - 1 > 0:
                        price = min(price, need * (waiting - i + 1) // (running + i - 1))

                    value += price
                # The first one, or another batch than that before: prefill_base is paid (again).
                if i == 0 or after > e:
                    value += rules[PREFILL_BASE] * (size - after)
                # Nobody is held, so the first batch does not decode, and its base is not in f.
                if i == 0 and running == 0:
                    value += rules[BASE] * size

                next_cost[after] = min(next_cost[after], value)

        for e in range(at_most + 1):
            cost[e] = next_cost[e]

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
    """Return a lower bound on the fixed costs of the batches that some requests still need.

    ``totals[d]``: what they weigh together by the d-th kind of weight. ``longest``: the most tokens
    that one of them still needs, each of them in another batch. ``largest[d]`` has the most that
    one batch can weigh, and whether this counts prefills (BY_INPUT) or all batches (BY_KV).
    """
    rules, batches, prefills = tables.rules, np.int64(longest), np.int64(0)
    # Each kind of weight says by itself how many batches hold its total: this is rounded up.
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

    Those from an arrival on take their own works, and the largest fixed cost of one of them, or
    that of the batches that they need together (`_bound_fixed_costs`), whichever is more.
    """
    arrival, output, totals = tables.arrival, tables.output, sorts[0]
    best, work, fixed, longest = np.int64(t), np.int64(0), np.int64(0), np.int64(0)
    n, kinds = row.shape[0], tables.largest.shape[0]
    totals[:kinds] = 0
    # From the last arrival back: the sums are of the requests from i on.
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
        # Without work nobody is unfinished.
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
    # Its first token is too late.
    if code == 0 and first > tables.due[i, 0]:
        return True

    return begin + tables.work[i, code] + tables.fixed[i, code] > tables.due[i, 1]


@njit
def _bound_missed(row: Ints, t: int, which: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on how many requests are never begun within their limits.

    It is ``NEVER`` if one that has begun cannot be within its limits any more. ``which``: the
    bound looks at the limits on first tokens (0) or on last ones (1).
    """
    best, too_late, size, rules = np.int64(0), np.int64(0), 0, tables.rules
    dues, works, untouched, all_before_arrived = sorts[0], sorts[1], first_untouched(row), True
    for i in range(row.shape[0]):
        code = np.int64(row[i])
        # The requests from i on may be left to the bound on them alone where none has begun. This
        # is tried at the first such i, and at the first that has not arrived.
        may_split = i == untouched or (all_before_arrived and tables.arrival[i] > t)
        if may_split and i >= untouched and tables.known[i] > 0:
            # What is known of the requests from i on adds to the bound of those before.
            best = max(best, too_late + _count_too_many(dues, works, size, t) + tables.values[i, 0])
        if tables.arrival[i] > t:
            all_before_arrived = False
        if code == 2 * tables.output[i]:
            continue
        if _is_late(i, code, t, tables):
            too_late += 1
            if code > 0:
                # It has begun, and those that have begun must be within their limits.
                return np.int64(NEVER)
            continue
        # Its first token is there.
        if which == 0 and code > 0:
            continue

        # The works must fit before the due times less the fixed costs of a request's batches.
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

    return max(best, too_late + _count_too_many(dues, works, size, t))


@njit
def _count_too_many(dues: Ints, works: Ints, size: int, t: int) -> Any:
    """Return how many works must be left out so that the others end when due, by Moore's rule.

    The first ``size`` works, one after another from t on, are in order of when they are due
    (``dues``). Where one is late, the largest one so far is left out: no other choice leaves more
    time to those that follow (Moore 1968).
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
        works[largest] = -works[largest] - 1  # negative: out, until the loop below restores it
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
    request ``late`` does not end before ``until``, if there is one. The requests are in order of
    arrival. At each i from which on none has begun, those before i are bounded here, those from i
    on by what is known of them alone (`bound_later`; if ``known[i]`` is 0, nothing is), and the sum
    is a bound.
    """
    arrival, output, known = tables.arrival, tables.output, tables.known
    work, fixed, rules = tables.work, tables.fixed, tables.rules
    ends, works, fixes = sorts[0], sorts[1], sorts[2]
    if rules[COUNTED] == LATEST:
        return _bound_last_end(row, t, tables, sorts)
    if rules[COUNTED] == PACES:
        # `work` has the time after first tokens, as often as it counts.
        total = np.int64(0)
        for i in range(row.shape[0]):
            total += work[i, row[i]]
        return total
    # By limits on first tokens (0), and by those on last ones (1).
    if rules[COUNTED] == MISSES:
        return max(_bound_missed(row, t, 0, tables, sorts), _bound_missed(row, t, 1, tables, sorts))

    n, size, best, later_arrivals, first_later = row.shape[0], 0, np.int64(0), 0, row.shape[0]
    # The bound by sharing knows of no request that ends late.
    untouched, may_share = first_untouched(row), rules[SHARED] and late < 0
    for i in range(n):
        if arrival[i] > t:
            first_later = min(first_later, i)
            later_arrivals += 1
            # Of later arrivals few are added one by one: the bound of the rest has the others.
            if later_arrivals > _AHEAD and known[i] > 0:
                break
        if i >= untouched and known[i] > 0:
            best = max(best, _bound_ends(ends, works, fixes, size, t) + bound_later(i, t, tables))
            if best >= enough:
                return best

        code = np.int64(row[i])
        # Nothing more of it counts.
        if code == 2 * output[i] or (rules[COUNTED] == FIRSTS and code > 0):
            continue

        own_work, own_fixed = work[i, code], fixed[i, code]
        end = max(t, arrival[i]) + own_work + own_fixed
        _insert(ends, size, max(end, until) if i == late else end)
        _insert(works, size, own_work)
        _insert(fixes, size, own_fixed)
        size += 1

    # The loop saw all requests, so this bound is of all of them.
    if later_arrivals <= _AHEAD:
        best = max(best, _bound_ends(ends, works, fixes, size, t))

    # The bound by sharing takes the square of the requests in time, so it is tried on few of them:
    # those before ``cut``, a few that are yet to arrive included, and the others are bounded alone.
    if may_share:
        for cut in range(untouched, min(n, first_later + _BEYOND) + 1):
            unfinished = 0
            for i in range(cut):
                unfinished += row[i] < 2 * output[i]
            if best < enough and 1 < unfinished <= _MANY and (cut == n or known[cut] > 0):
                value = _bound_shared(row, cut, t, tables, sorts)
                best = max(best, value + (bound_later(cut, t, tables) if cut < n else 0))

    return best


# Batches


@njit
def _is_forced(i: int, row: Ints, t: int, slack: int, tables: Tables, sorts: Ints) -> bool:
    """Whether by rule 3 a request decodes in every batch that decodes, or would once it is held.

    ``slack`` is what the incumbent leaves for what is still to come.
    """
    arrival, output, rules = tables.arrival, tables.output, tables.rules
    if row[i] == 2 * output[i] or arrival[i] > t:
        return False
    # Rule 3 does not hold where misses are counted. Of first tokens and of the makespan the proof
    # (`labels`, Other objectives) says it of every resident.
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
            # `ends` are times before which those to come do not end, ascending: this is the
            # (unfinished - arrived)-th.
            else:
                end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
                _insert(ends, unfinished - arrived - 1, end)

    # If i decodes now, it ends earlier by ``saved`` at least, and each request that ends before it
    # ends later by at most the work of i's last decode: a loss takes ``need`` of these.
    saved = rules[BASE] + rules[DECODE_BASE]
    need = -(-saved // max(1, tables.decode[i, output[i] - 1]))
    # Rule 3: there are not so many others.
    if unfinished - 1 < need:
        return True
    # Enough others are here to end before it, so nothing says that it ends late.
    if arrived - 1 >= need:
        return False

    # If enough others end before i, some of those to come do: need - (arrived - 1) of them, since
    # i has arrived itself, the last of which is at place need - arrived. So i ends no earlier, and
    # it is forced if the bound with this end of i leaves nothing below the incumbent.
    return bound_rest(row, t, slack, tables, sorts, i, ends[need - arrived]) >= slack


@njit
def _mark_forced(t: int, slack: int, tables: Tables, scratch: Scratch) -> tuple[bool, bool]:
    """Write `forced`: whom rule 3 has decode. Return whether the state is quiet, and peaks fit.

    Peaks fit if the unfinished requests, each with the KV of its last token, fit together. A quiet
    state, which evicts nobody from now on, asks as well that all their tokens fit into one batch
    and that no refill in place pays (`calm`). Only there rule 3 holds. ``slack`` is what the
    incumbent leaves for what is still to come.
    """
    row, rules, output = scratch.row, tables.rules, tables.output
    n, unfinished, held, tokens, quiet = row.shape[0], 0, np.int64(0), np.int64(0), True
    for i in range(n):
        if row[i] == 2 * output[i]:
            continue

        k = row[i] >> 1
        unfinished += 1
        # The peak of its KV, and its tokens if all are in one batch.
        held += tables.kv[i, output[i]]
        tokens += 1 if row[i] & 1 else tables.tokens[i, k]
        quiet &= tables.calm[i, k] == 1

    peaks_fit = held <= rules[CAPACITY] and unfinished <= rules[RUNNING_MAX]
    # The limit on prefill tokens is no larger than that on all tokens.
    quiet &= peaks_fit and tokens <= rules[PREFILL_TOKENS]
    for i in range(n):
        scratch.forced[i] = quiet and _is_forced(i, row, t, slack, tables, scratch.sorts)

    return quiet, peaks_fit


@njit
def _offer(
    size: int, mode: int, quiet: bool, peaks_fit: bool, tables: Tables, scratch: Scratch
) -> None:
    """Write what a batch may do with each of the first ``size`` requests of `who`, the best first.

    ``choices[d]`` gets the choices of ``who[d]``, and ``number[d]`` how many these are. In a quiet
    state mode 0 is for batches that do not decode, and mode 1 for those that do. Else mode 0 has
    all batches. ``peaks_fit``: by `_mark_forced`.
    """
    row, who, choices, rules = scratch.row, scratch.who, scratch.choices, tables.rules
    hybrid, evicts = rules[HYBRID] == 1, rules[EVICTS] == 1
    for d in range(size):
        i = who[d]
        k, options = row[i] >> 1, 2
        if row[i] & 1 == 0:
            choices[d, 0], choices[d, 1] = PREFILL, IDLE
        # Who is forced decodes in every batch that decodes (rule 3), and in mode 1 it has no other
        # choice, so batches without decodes are a mode of their own.
        elif quiet and mode == 0:
            choices[d, 0], options = IDLE, 1
        elif quiet:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            options -= scratch.forced[i]
        else:
            choices[d, 0], choices[d, 1] = DECODE, IDLE
            # Where all peaks fit, the batch fits without an eviction, which rule 1 puts off.
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
    """Set the sums after request d of `who` does ``act``. Return whether a batch may have these.

    The limits must hold, and hybrid batches be allowed if it decodes and prefills. Row d + 1 of the
    sums is row d with what this request adds, so that the search may step back. A sum with a limit
    stands at the place that the limit has in `Tables.rules` (TOKENS to RUNNING_MAX).
    """
    sums, i = scratch.sums, scratch.who[d]
    k, held = scratch.row[i] >> 1, scratch.row[i] & 1
    for s in range(_SUMS):
        sums[d + 1, s] = sums[d, s]
    # Who idles keeps the KV that it holds, if any.
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
        # For rule 5: who was there for the batch before, and whom of them rule 3 would have decode.
        # For rule 2: refills whose own work is no less than a decode's (`_is_needless`).
        sums[d + 1, LATE] += scratch.there[i]
        sums[d + 1, EARLY] += scratch.there[i] * scratch.forced[i]
        is_needless_refill = act == REFILL and tables.decode[i, k] <= tables.prefill[i, k]
        sums[d + 1, AGAIN] += is_needless_refill
    # Token k + 1 is produced, and the batch holds the KV with it.
    if act != IDLE and act != EVICT:
        sums[d + 1, CAPACITY] += tables.kv[i, k + 1]
        sums[d + 1, RUNNING_MAX] += 1
        sums[d + 1, NEW] += tables.arrival[i] == start

    # Without hybrid batches a batch decodes or prefills. The first four sums have limits.
    is_valid = tables.rules[HYBRID] == 1 or sums[d + 1, DECODES] == 0 or sums[d + 1, PREFILLS] == 0
    for s in range(4):
        is_valid &= sums[d + 1, s] <= tables.rules[s]

    return is_valid


@njit
def _bound_after(d: int, size: int, start: int, tables: Tables, scratch: Scratch) -> Any:
    """Return a lower bound on what is counted after a batch whose first d requests are decided.

    What it does with those of `who` from d on is open, and those to come are bounded alone. Quiet
    states only. ``size``: how many are in `who`. The batch begins at ``start``, and t is its end if
    it does no more. The proof: `labels`, Of a batch in the making.
    """
    row, who, rules, arrival = scratch.row, scratch.who, tables.rules, tables.arrival
    ends, works, fixes = scratch.sorts[0], scratch.sorts[1], scratch.sorts[2]
    fixed_now = rules[BASE] + max(rules[DECODE_BASE], rules[PREFILL_BASE])
    t, n = start + rules[BASE] + scratch.sums[d, WORK], row.shape[0]
    t += rules[PREFILL_BASE] * (scratch.sums[d, PREFILLS] > 0)
    t += rules[DECODE_BASE] * (scratch.sums[d, DECODES] > 0)
    for e in range(size):
        i = who[e]
        # The first batch of an undecided one may be this, so the largest fixed cost that it may
        # have there is left out. Who is decided has the code after the batch, unless it idles.
        code, left_out = row[i], fixed_now
        if e < d:
            left_out = 0
            if scratch.choices[e, scratch.take[e]] != IDLE:
                k = (code >> 1) + 1
                code = 2 * k + (k < tables.output[i])

        work, fixed = tables.work[i, code], tables.fixed[i, code] - left_out
        _insert(ends, e, t + work + fixed)
        _insert(works, e, work)
        _insert(fixes, e, fixed)

    bound = _bound_ends(ends, works, fixes, size, t)
    # The first that arrives after the start: all from it on are not in `who`.
    for m in range(first_untouched(row), n):
        if arrival[m] > start:
            return bound + bound_later(m, t, tables) if tables.known[m] > 0 else bound

    return bound


@njit
def _next_batch(d: int, slack: int, numbers: Ints, tables: Tables, scratch: Scratch) -> Any:
    """Go on from request d of `who` to the next batch. Return the request that it has come to.

    That is the number of those in `who` if there is a batch, -1 if there is none, and another if
    the slice is used up: go on from there. ``take[d]`` counts through the choices of request d,
    depth first, and is -1 before the first. ``slack``: what the incumbent leaves, or less than 0
    where it does not count. ``numbers`` is `Search.numbers`, in which the steps are counted.
    """
    size, start = scratch.now[SIZE], scratch.now[START]
    row, who, take, kind = scratch.row, scratch.who, scratch.take, tables.kind
    tried, max_tried = numbers[TRIED], numbers[MAX_TRIED]
    while 0 <= d < size and tried < max_tried:
        tried += 1
        i = who[d]
        # Equal requests in equal states have choices in order, so one begins where the one before
        # stands; the next line adds 1.
        if take[d] < 0 and d > 0:
            before = who[d - 1]
            if kind[before] == kind[i] and row[before] == row[i]:
                take[d] = take[d - 1] - 1

        take[d] += 1
        # All its choices are done: step back to the one before.
        if take[d] >= scratch.number[d]:
            d -= 1
            continue

        act = scratch.choices[d, take[d]]
        # Sums only grow, so all batches with this choice break the limit.
        if not _add_act(d, act, start, tables, scratch):
            continue
        # After a prefill the bound may say that no batch that begins like this is good enough.
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
    # Rule 5: all that it prefills were there for the batch before (LATE), and had better been in it
    # if one of them would decode in every batch from then on (EARLY).
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
        # Rule 1: the batch would fit with the KV that it evicts.
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
    """Whether a request that idles in a batch could do its next step in it.

    ``sums`` are those of the whole batch, and count the KV that it holds while it idles.
    """
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
    """Write the state after a batch into `child`. Return how many completions it has.

    If first tokens are counted, it is how many requests have their first token. ``size``: how many
    requests are in `who`.
    """
    row, child, ended = scratch.row, scratch.child, 0
    first = tables.rules[COUNTED] == FIRSTS
    for i in range(row.shape[0]):
        child[i] = row[i]
    for e in range(size):
        i, act = scratch.who[e], scratch.choices[e, scratch.take[e]]
        if act == EVICT:
            # Its tokens stay, its KV goes.
            child[i] = row[i] - (row[i] & 1)
        elif act != IDLE:
            # Token k is produced, and the KV is held unless it was the last one.
            k = (row[i] >> 1) + 1
            child[i] = 2 * k + (k < tables.output[i])
            ended += k == 1 if first else k == tables.output[i]

    _sort_equal_requests(child, tables.kind)
    return ended


@njit
def _may_only_decode(
    since: int, t: int, slack: int, tables: Tables, child: Ints, sorts: Ints
) -> bool:
    """Whether rules 3 to 5 leave only a batch that decodes all that are held, in a quiet state.

    ``child`` is the state, from time t on. ``since``: when the batch before began, if rule 5 looks
    at it, else -1. ``slack``: what the incumbent leaves for what is still to come (rule 3).
    """
    rules, held, next_arrival, min_work = tables.rules, 0, np.int64(NEVER), np.int64(NEVER)
    # Rule 5 is for total latency only.
    if rules[COUNTED] != FINISHES:
        since = -1
    for i in range(child.shape[0]):
        if child[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > t:
            next_arrival = min(next_arrival, tables.arrival[i])
            # To wait for it may be good.
            if rules[COUNTED] != FINISHES:
                return False
        elif child[i] & 1:
            held += 1
            min_work = min(min_work, tables.decode[i, child[i] >> 1])
        # It waits and was not there for the batch before, so it may be prefilled now.
        elif tables.arrival[i] > since:
            return False

    # Rule 4 lets the machine wait for an arrival before the first batch can end.
    if held == 0 or t + rules[BASE] + rules[DECODE_BASE] + min_work > next_arrival:
        return False

    # Rule 3 asks that of each that is held, and rule 5 of each that waits.
    for i in range(child.shape[0]):
        is_there = child[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        if is_there and not _is_forced(i, child, t, slack, tables, sorts):
            return False

    return True


@njit
def _decode_all(child: Ints, t: int, tables: Tables) -> tuple[int, int]:
    """Let all that are held decode from t on, in place. Return the end, and how many end then."""
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
    """Return how often a moment now counts, for the requests between first and last token."""
    rate = np.int64(0)
    for i in range(row.shape[0]):
        # It has at least one token, and not all.
        if 2 <= row[i] < 2 * tables.output[i]:
            rate += tables.rate[i]

    return rate


@njit
def _is_dominated(place: int, end: int, done: int, unfinished: int, search: Search) -> bool:
    """Delete labels of a state that are no better than (end, done). Return whether one is no worse.

    ``end`` and ``done`` are t and S of a label that may be added. ``place`` is that of its state in
    the hash table, whose labels are chained. What is put off by a moment counts at most
    ``unfinished`` more, one for each unfinished request.
    """
    known = search.table[place]
    while known >= 0:
        delay = search.time[known] - end
        # A schedule from (end, done), put off to where the known label is, counts so much more at
        # most: the known one is no worse (docstring of `labels`). The second test is the converse.
        if search.done[known] + unfinished * max(0, delay) <= done:
            return True
        if done + unfinished * max(0, -delay) <= search.done[known]:
            search.flag[known] = DELETED

        known = search.link[known]

    return False


@njit
def _progress_of(row: Ints) -> Any:
    """Return the sum of codes: twice the tokens produced, and one for each request held."""
    total = np.int64(0)
    for i in range(row.shape[0]):
        total += row[i]

    return total


@njit
def _is_nearer(a: int, b: int, search: Search) -> bool:
    """Whether the first of two labels goes first in a dive: by its bound, then its tokens."""
    if search.low[a] != search.low[b]:
        return search.low[a] < search.low[b]

    return _progress_of(search.rows[a]) > _progress_of(search.rows[b])


@njit
def _add_label(size: int, parent: int, place: int, search: Search, scratch: Scratch) -> Any:
    """Add the state after a batch (`child`) as a label. Return it.

    The caller writes its numbers: `time`, `done`, `low`, `more` and `since`. ``size``: how many
    requests are in `who`. ``place``: the state's place in the hash table.
    """
    child, numbers = scratch.child, search.numbers
    new = numbers[ROWS]
    numbers[ROWS] += 1
    for i in range(child.shape[0]):
        search.rows[new, i] = child[i]
        search.acts[new, i] = IDLE
    for e in range(size):
        search.acts[new, scratch.who[e]] = scratch.choices[e, scratch.take[e]]

    search.parent[new], search.flag[new] = parent, OPEN
    # It becomes the first in the chain of its state's labels.
    search.link[new], search.table[place] = search.table[place], new
    return new


@njit
def _is_in_time(size: int, end: int, tables: Tables, scratch: Scratch) -> bool:
    """Whether the first and last tokens that a batch produces at ``end`` are within limits.

    ``size``: how many requests are in `who`.
    """
    for e in range(size):
        i, act = scratch.who[e], scratch.choices[e, scratch.take[e]]
        if act in (IDLE, EVICT):
            continue

        # The batch produces token k, the one after those in the code 2 k + held.
        k = (scratch.row[i] >> 1) + 1
        late = k == 1 and end > tables.due[i, 0]
        if late or (k == tables.output[i] and end > tables.due[i, 1]):
            return False

    return True


@njit
def _take_if_done(new: int, search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Take a label as the incumbent if all that have begun have ended, where misses are counted.

    ``new`` is the label of the state `child`. Its value is how many were never begun. Return
    whether no schedule from here is better, so that the label is closed.
    """
    never_begun, numbers = np.int64(0), search.numbers
    for i in range(scratch.child.shape[0]):
        code = scratch.child[i]
        never_begun += code == 0
        # It has begun, and has not ended.
        if 0 < code < 2 * tables.output[i]:
            return False

    # Who was never begun is served after all others, too late.
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
    """Follow a batch that is made up to the label after it. Return it if it is open, else -1.

    ``size``: how many requests are in `who`. ``label``: the label that the batch begins at, whose
    state is ``quiet`` or not. The label after it is not open if it is late, dominated, no better
    than the incumbent, or solved at once. ``ended``: how many completions (or first tokens) the
    batch has. ``more`` and ``since``: as in `Search`.
    """
    rules, sums, numbers, arrival = tables.rules, scratch.sums, search.numbers, tables.arrival
    end = start + rules[BASE] + sums[size, WORK]
    end += rules[DECODE_BASE] * (sums[size, DECODES] > 0)
    end += rules[PREFILL_BASE] * (sums[size, PREFILLS] > 0)
    ended = _set_child(size, tables, scratch)
    done, best = search.done[label] + ended * end, numbers[BEST]
    more, since = 0, np.int64(-1)
    # S is 0 for the makespan. For times per token all are there, so t stays 0, and S counts each
    # batch as often as requests are between first and last token.
    if rules[COUNTED] == LATEST:
        done = np.int64(0)
    if rules[COUNTED] == PACES:
        done, end = search.done[label] + (end - start) * _running_rate(scratch.row, tables), start
    # Rule 5 looks at a batch with which nothing ended.
    if quiet and ended == 0 and rules[COUNTED] == FINISHES:
        since = np.int64(start)
    # The rules leave one batch: it is followed at once, and its state gets no label.
    while quiet and _may_only_decode(since, end, best - done, tables, scratch.child, scratch.sorts):
        begin = end
        end, ended = _decode_all(scratch.child, begin, tables)
        since = np.int64(-1) if ended else begin
        done += ended * end if rules[COUNTED] == FINISHES else 0
        more += 1
        # A step for each request, as the slice ends after so many steps.
        numbers[TRIED] += arrival.shape[0]

    if rules[COUNTED] == MISSES:
        done = np.int64(0)
        if not _is_in_time(size, end, tables, scratch):
            return -1

    place, unfinished = find(scratch.child, search.rows, search.table), 0
    for i in range(arrival.shape[0]):
        unfinished += scratch.child[i] < 2 * tables.output[i]
    # Of the makespan, a moment counts once even if nobody is unfinished: S is 0, and t its value.
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

    # What comes after it is solved if those from m on are left, and the machine waits for them:
    # their value from their arrival on can be had (`exact`), and `bound_rest` has found it.
    m, others_ended = first_untouched(scratch.child), rules[COUNTED] != MISSES
    for i in range(m):
        others_ended &= scratch.child[i] == 2 * tables.output[i]
    if rules[COUNTED] == MISSES and _take_if_done(new, search, tables, scratch):
        return -1

    solved = m == arrival.shape[0] or (end <= arrival[m] and tables.exact[m] == 1)
    if others_ended and solved:
        numbers[BEST], numbers[GOAL] = f, new
        search.flag[new] = CLOSED
        return -1

    push(search.heap, numbers[ENTRIES], f, -_progress_of(scratch.child), new)
    numbers[ENTRIES] += 1
    return new


@njit
def _begin_label(
    label: int, may_dive: bool, search: Search, tables: Tables, scratch: Scratch
) -> None:
    """Make a label the one at hand, before its first batch.

    ``may_dive``: whether its nearest child is taken up next. The state is quiet if nobody is
    evicted from here on. That needs more than ``peaks_fit``, by which the unfinished requests fit
    together at their largest KV (`_mark_forced`, which also writes whom rule 3 has decode).
    """
    row, now = scratch.row, scratch.now
    n, t = tables.arrival.shape[0], search.time[label]
    any_unbegun = False
    for i in range(n):
        row[i] = search.rows[label, i]
        any_unbegun |= row[i] == 0

    quiet, peaks_fit = _mark_forced(t, search.numbers[BEST] - search.done[label], tables, scratch)
    for i in range(n):
        # Rule 5 looks at those that were there when the batch before began; after -1 at nobody.
        scratch.there[i] = quiet and tables.arrival[i] <= search.since[label]

    now[LABEL], now[MAY_DIVE], now[ANY_UNBEGUN] = label, may_dive, any_unbegun
    now[QUIET], now[ALL_FIT] = quiet, peaks_fit
    now[FIRST_END], now[CHILD] = NEVER, -1
    _begin_batches(t, t, tables, scratch)


@njit
def _begin_batches(start: int, t: int, tables: Tables, scratch: Scratch) -> None:
    """Go over to the batches that begin at ``start``, the label's time t or a later arrival.

    Write who is there, the next arrival, and when a batch of one could end (`FIRST_END`, rule 4).
    The mode and the depth of -1 make `_next_mode` go on to mode 0.
    """
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
        # The batch of this request alone.
        k = row[i] >> 1
        shortest = tables.prefill[i, k] + rules[PREFILL_BASE]
        if row[i] & 1:
            shortest = tables.decode[i, k] + rules[DECODE_BASE]
        # Rule 4 says nothing of this one: for first tokens it is for requests that have not begun,
        # and where misses are counted for those that have.
        if rules[COUNTED] == FIRSTS and now[ANY_UNBEGUN] and k > 0:
            continue
        if rules[COUNTED] == MISSES and k == 0:
            continue

        now[FIRST_END] = min(now[FIRST_END], max(t, arrival[i]) + rules[BASE] + shortest)

    now[START], now[SIZE], now[AFTER], now[MODE], now[DEPTH] = start, size, after, -1, -1


@njit
def _next_mode(search: Search, tables: Tables, scratch: Scratch) -> bool:
    """Go over to the next mode of batches, or the next start. Return whether there is one.

    With it the choices of `_offer` are written, and the first batch is to be made from depth 0.
    """
    now, counted, quiet = scratch.now, tables.rules[COUNTED], scratch.now[QUIET] == 1
    now[MODE] += 1
    # Quiet states have mode 1, too, whose batches decode; for first tokens only if all have begun.
    decodes_apart = quiet and not (counted == FIRSTS and now[ANY_UNBEGUN])
    if now[MODE] == (2 if decodes_apart else 1):
        # Rule 4: with time for a batch before the next arrival, the machine does not wait for it.
        after = now[AFTER]
        if after == NEVER or (quiet and now[FIRST_END] <= after and counted != LATEST):
            return False

        _begin_batches(after, search.time[now[LABEL]], tables, scratch)
        now[MODE] = 0

    _offer(now[SIZE], now[MODE], quiet, now[ALL_FIT] == 1, tables, scratch)
    scratch.take[0] = -1
    now[DEPTH] = 0 if now[SIZE] > 0 else -1
    return True


@njit
def _follow_batches(search: Search, tables: Tables, scratch: Scratch) -> int:
    """Follow the batches of the label at hand, from where it was left.

    Return ``SOLVED`` if the label has no other batch (the search itself goes on), or else what
    `expand` is to return. ``now[DEPTH]`` is -1 if the mode has no other batch, and else the request
    of `who` to choose for next: at ``size`` all are chosen for, so that a batch is made.
    """
    now, sums, numbers = scratch.now, scratch.sums, search.numbers
    label, quiet, t = now[LABEL], now[QUIET] == 1, search.time[now[LABEL]]
    while True:
        if now[DEPTH] < 0 and not _next_mode(search, tables, scratch):
            numbers[DIVE] = now[CHILD]
            return SOLVED
        # Arrays only grow between two slices; the search goes on from this batch. `push` needs a
        # place for the new entry of the heap, and one more as scratch space.
        if numbers[ROWS] >= search.rows.shape[0] or numbers[ENTRIES] + 2 >= search.heap.shape[0]:
            return GROW

        # The bound of a batch in the making is for total latency only.
        prunes = quiet and tables.rules[COUNTED] == FINISHES
        slack = numbers[BEST] - search.done[label] if prunes else -1
        now[DEPTH] = _next_batch(now[DEPTH], slack, numbers, tables, scratch)
        size, start = now[SIZE], now[START]
        # No other batch of this mode.
        if now[DEPTH] < 0:
            continue
        # The slice is used up amid a batch.
        if now[DEPTH] < size:
            return RUNNING

        # A batch is made. The next one differs in the last request first.
        now[DEPTH] = size - 1
        # Without a token nothing is done; and who waits for an arrival prefills it, or could begin
        # before.
        if sums[size, TOKENS] == 0 or (start > t and sums[size, NEW] == 0):
            continue
        if now[MODE] == 1 and sums[size, DECODES] == 0:
            continue  # mode 0 has the batches without decodes (`_offer`)
        if _is_needless(size, tables, scratch):
            continue

        new = _follow_batch(size, start, label, quiet, search, tables, scratch)
        nearer = new >= 0 and (now[CHILD] < 0 or _is_nearer(new, now[CHILD], search))
        if nearer and now[MAY_DIVE] == 1:
            now[CHILD] = new


@njit
def expand(limit: int, search: Search, tables: tuple[Tables, Scratch]) -> int:
    """Expand up to ``limit`` labels. With the tables comes the label at hand.

    Return ``RUNNING``, ``SOLVED`` if nothing open is below the incumbent, or ``GROW`` if the arrays
    are too small. A label may have 2^n batches, so the slice ends amid one after so many steps,
    too. Such a label is open, and in the heap, for the sake of the bound. The next slice goes on
    with it.
    """
    data, scratch = tables
    numbers = search.numbers
    numbers[TRIED] = 0
    for _ in range(limit):
        is_new = scratch.now[LABEL] < 0
        if is_new:
            label = _next_label(search)
            if label < 0:
                return SOLVED

            # Dives find incumbents: one begins now and then, and goes on from child to child.
            may_dive = numbers[DIVE] >= 0 or numbers[EXPANDED] % _DIVE_EVERY == 0
            numbers[DIVE] = -1
            _begin_label(label, may_dive, search, data, scratch)

        label = scratch.now[LABEL]
        search.flag[label] = CLOSED
        ended = _follow_batches(search, data, scratch)
        if ended != SOLVED:
            search.flag[label] = OPEN
            # It left the heap when it was taken up; with a tie of 0 it comes after its equals.
            if is_new:
                push(search.heap, numbers[ENTRIES], search.low[label], 0, label)
                numbers[ENTRIES] += 1
            return ended

        scratch.now[LABEL] = -1
        numbers[EXPANDED] += 1

    return RUNNING
