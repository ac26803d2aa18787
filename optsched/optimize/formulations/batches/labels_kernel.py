"""The compiled core of infermax's label-setting search. Import it lazily: it loads numba."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

Ints = NDArray[Any]

RUNNING, SOLVED, GROW = 0, 1, 2
"""What `expand` returns: its slice is used up; no open label is below the incumbent; or the arrays
are too small."""

LABELS, ENTRIES, BEST, GOAL, EXPANDED, DIVE = range(6)
"""Places of `Search.numbers`."""
IDLE, DECODE, PREFILL, EVICT, REFILL = range(5)
"""What a batch does with a request. ``REFILL`` evicts it first."""
CAPACITY, TOKENS, PREFILL_TOKENS, RUNNING_MAX, BASE, DECODE_BASE, PREFILL_BASE = range(7)
HYBRID, EVICTS, SHARED = 7, 8, 9
"""Places of `Tables.rules`."""
OPEN, CLOSED, DELETED = range(3)
"""Values of `Search.flag`."""
COLUMNS = ("rows", "acts", "time", "done", "low", "parent", "link", "flag")
"""Fields of `Search` by label."""
_DIVE_EVERY = 1024
# The max number of requests for which `_shared` is computed.
_MANY = 12
# Arrivals beyond the present time that the bound adds one by one.
_AHEAD = 6


class Tables(NamedTuple):
    """n requests in the order of their arrivals, equal ones side by side.

    By request (shape (n,)): `arrival`, `output`, `kind` (equal requests share one). By request and
    tokens produced k (shape (n, K)): `kv` held after token k; `decode` and `prefill`, the own work
    of token k + 1; `tokens` of its prefill; `calm`, 1 if no later refill in place pays; `decodes`,
    the own work of decoding from token k + 1 on. By request and code 2 k + held (shape (n, 2 K)):
    `work` and `fixed`, at least what it still needs. `suffix` (shape (n + 1,)): at least the sum of
    completions of the requests from m on, alone, or -1. `rules`: limits, fixed costs, switches.
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
    suffix: Ints
    rules: Ints


class Search(NamedTuple):
    """Labels: codes of the state, the batch that led to it, and what `numbers` counts.

    `time` and `done` are t and S, `low` is f. `link` chains the labels of a state, whose latest one
    is in the hash table `table`. `heap` has (f, - tokens produced, label).
    """

    rows: Ints
    acts: Ints
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
def _find(row: Ints, rows: Ints, table: Ints) -> Any:
    """Return the place of a state in the hash table: its own, or the empty one for it."""
    value: Any = np.uint64(1469598103934665603)
    for k in range(row.shape[0]):
        value = (value ^ np.uint64(row[k])) * np.uint64(1099511628211)

    value ^= value >> np.uint64(29)
    size = table.shape[0]
    at: Any = np.int64(value % np.uint64(size))
    while table[at] >= 0:
        known = table[at]
        same = True
        for k in range(row.shape[0]):
            if rows[known, k] != row[k]:
                same = False
                break

        if same:
            return at

        at += 1
        if at == size:
            at = 0

    return at


@njit
def enter(rows: Ints, old: Ints, table: Ints) -> None:
    """Fill an empty table with the states of a smaller one."""
    for place in range(old.shape[0]):
        if old[place] >= 0:
            table[_find(rows[old[place]], rows, table)] = old[place]


@njit
def enter_root(rows: Ints, table: Ints) -> None:
    """Enter the first label into an empty table."""
    table[_find(rows[0], rows, table)] = 0


@njit
def _before(heap: Ints, a: int, b: int) -> bool:
    return heap[a, 0] < heap[b, 0] or (heap[a, 0] == heap[b, 0] and heap[a, 1] < heap[b, 1])


@njit
def _swap(heap: Ints, a: int, b: int) -> None:
    for k in range(3):
        heap[a, k], heap[b, k] = heap[b, k], heap[a, k]


@njit
def _push(heap: Ints, size: int, f: int, tie: int, label: int) -> None:
    heap[size, 0], heap[size, 1], heap[size, 2] = f, tie, label
    at = size
    while at > 0 and _before(heap, at, (at - 1) >> 1):
        _swap(heap, at, (at - 1) >> 1)
        at = (at - 1) >> 1


@njit
def _pop(heap: Ints, size: int) -> None:
    """Remove the first entry of a heap of ``size``."""
    last, at = size - 1, 0
    _swap(heap, 0, last)
    while True:
        down = 2 * at + 1
        if down >= last:
            break
        if down + 1 < last and _before(heap, down + 1, down):
            down += 1
        if not _before(heap, down, at):
            break

        _swap(heap, at, down)
        at = down


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
def _shared(
    row: Ints,
    t: int,
    arrival: Ints,
    output: Ints,
    prefill: Ints,
    decodes: Ints,
    rules: Ints,
    sorts: Ints,
) -> Any:
    """Return a lower bound on the sum of the completions of the requests that have arrived by t.

    The second bound of `optsched.optimize.formulations.batches.labels`.
    """
    starts, owns, counts = sorts[0], sorts[1], sorts[2]
    cost, new = sorts[3], sorts[4]
    n, size, waiting = row.shape[0], 0, 0
    for i in range(n):
        code = np.int64(row[i])
        if arrival[i] > t or code == 2 * output[i]:
            continue

        k = code >> 1
        if code & 1 == 0:
            _insert(starts, waiting, prefill[i, k])
            waiting += 1
            k += 1

        _insert(owns, size, decodes[i, k])
        _insert(counts, size, output[i] - k)
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
def remaining(row: Ints, t: int, tables: Tables, sorts: Ints) -> Any:
    """Return a lower bound on the sum of the completions of unfinished requests from time t on.

    `optsched.optimize.formulations.batches.labels` has the proof. ``sorts``: scratch space of shape
    (5, n + 1).
    """
    arrival, output, suffix = tables.arrival, tables.output, tables.suffix
    work, fixed, rules = tables.work, tables.fixed, tables.rules
    ends, works, fixes = sorts[0], sorts[1], sorts[2]
    n, size, best, ahead, later = row.shape[0], 0, np.int64(0), 0, np.int64(0)
    for i in range(n):
        if arrival[i] > t:
            if suffix[i] >= 0:
                best = max(best, _least_sum(ends, works, fixes, size, t) + suffix[i])
                if ahead == 0:
                    later = suffix[i]

            ahead += 1
            if ahead > _AHEAD and suffix[i] >= 0:
                break

        code = np.int64(row[i])
        if code == 2 * output[i]:
            continue

        w, f = work[i, code], fixed[i, code]
        _insert(ends, size, max(t, arrival[i]) + w + f)
        _insert(works, size, w)
        _insert(fixes, size, f)
        size += 1

    if ahead <= _AHEAD:
        best = max(best, _least_sum(ends, works, fixes, size, t))
    if rules[SHARED] and 1 < size - ahead <= _MANY:
        now = _shared(row, t, arrival, output, tables.prefill, tables.decodes, rules, sorts)
        best = max(best, now + later)

    return best


@njit
def _ordered(row: Ints, kind: Ints) -> None:
    """Sort the codes of equal requests, the most advanced first; equal codes keep their order."""
    for i in range(1, row.shape[0]):
        at = i
        while at > 0 and kind[at - 1] == kind[at] and row[at - 1] < row[at]:
            row[at - 1], row[at] = row[at], row[at - 1]
            at -= 1


@njit
def expand(limit: int, search: Search, tables: Tables) -> int:
    """Expand up to ``limit`` labels."""
    rows, acts, times, done = search.rows, search.acts, search.time, search.done
    low, parent, link, flag = search.low, search.parent, search.link, search.flag
    heap, table, numbers = search.heap, search.table, search.numbers
    arrival, output, kind, kv = tables.arrival, tables.output, tables.kind, tables.kv
    decode, prefill, tokens, calm = tables.decode, tables.prefill, tables.tokens, tables.calm
    rules = tables.rules
    n = arrival.shape[0]
    hybrid, evicts = rules[HYBRID] == 1, rules[EVICTS] == 1
    base, decode_base, prefill_base = rules[BASE], rules[DECODE_BASE], rules[PREFILL_BASE]
    sorts = np.zeros((5, n + 1), dtype=np.int64)
    row, child = np.zeros(n, dtype=rows.dtype), np.zeros(n, dtype=rows.dtype)
    who = np.zeros(n, dtype=np.int64)
    choices = np.zeros((n, 4), dtype=np.int64)
    number = np.zeros(n, dtype=np.int64)
    take = np.zeros(n + 1, dtype=np.int64)
    # Sums of the requests before: tokens, of prefills, KV, runs, work, decodes, prefills, new.
    sums = np.zeros((n + 1, 8), dtype=np.int64)
    forced = np.zeros(n, dtype=np.bool_)

    for _ in range(limit):
        at = numbers[DIVE]
        if at < 0 or flag[at] != OPEN or low[at] >= numbers[BEST]:
            at = -1
            while numbers[ENTRIES] > 0:
                first = heap[0, 2]
                if heap[0, 0] >= numbers[BEST]:
                    return SOLVED
                _pop(heap, numbers[ENTRIES])
                numbers[ENTRIES] -= 1
                if flag[first] == OPEN:
                    at = first
                    break

            if at < 0:
                return SOLVED

        dives = numbers[DIVE] >= 0 or numbers[EXPANDED] % _DIVE_EVERY == 0
        numbers[DIVE] = -1
        numbers[EXPANDED] += 1
        flag[at] = CLOSED
        t, ended = times[at], done[at]
        left, held_at_most, most_tokens, quiet = 0, np.int64(0), np.int64(0), True
        for i in range(n):
            row[i] = rows[at, i]
            if row[i] < 2 * output[i]:
                left += 1
                held_at_most += kv[i, output[i]]
                most_tokens += 1 if row[i] & 1 else tokens[i, row[i] >> 1]
                quiet &= calm[i, row[i] >> 1] == 1

        roomy = held_at_most <= rules[CAPACITY] and left <= rules[RUNNING_MAX]
        quiet &= roomy and most_tokens <= rules[TOKENS]
        # Rule 3.
        for i in range(n):
            size = output[i] - 1
            forced[i] = quiet and (left - 1) * decode[i, size] < base + decode_base

        best_child, best_low = np.int64(-1), np.int64(2**62)
        start = t
        first_end = np.int64(2**62)  # earliest end of a batch of one request
        while True:
            # Requests that a batch from `start` on may hold.
            size = 0
            for i in range(n):
                if row[i] < 2 * output[i] and arrival[i] <= start:
                    who[size] = i
                    size += 1
                    k, ready = row[i] >> 1, row[i] & 1
                    alone = decode[i, k] + decode_base if ready else prefill[i, k] + prefill_base
                    first_end = min(first_end, max(t, arrival[i]) + base + alone)

            for mode in range(2 if quiet else 1):
                for d in range(size):
                    i = who[d]
                    k, options = row[i] >> 1, 0
                    if row[i] & 1 == 0:
                        choices[d, 0], choices[d, 1], options = PREFILL, IDLE, 2
                    elif quiet:
                        if mode == 0:
                            choices[d, 0], options = IDLE, 1
                        else:
                            choices[d, 0], options = DECODE, 1
                            if not forced[i]:
                                choices[d, 1], options = IDLE, 2
                    else:
                        choices[d, 0], choices[d, 1], options = DECODE, IDLE, 2
                        if evicts and not roomy:
                            choices[d, options] = EVICT
                            options += 1
                        # Rule 2.
                        if evicts and not (hybrid and decode[i, k] + decode_base <= prefill[i, k]):
                            choices[d, options] = REFILL
                            options += 1

                    number[d] = options

                d = 0
                take[0] = -1
                while d >= 0:
                    if d < size:
                        i = who[d]
                        if take[d] < 0 and d > 0:
                            # Equal requests in equal states: choices in order.
                            before = who[d - 1]
                            if kind[before] == kind[i] and row[before] == row[i]:
                                take[d] = take[d - 1] - 1

                        take[d] += 1
                        if take[d] >= number[d]:
                            d -= 1
                            continue

                        act, k = choices[d, take[d]], row[i] >> 1
                        for q in range(8):
                            sums[d + 1, q] = sums[d, q]
                        if act == IDLE:
                            if row[i] & 1:
                                sums[d + 1, 2] += kv[i, k]
                                sums[d + 1, 3] += 1
                        elif act != EVICT:
                            decodes = act == DECODE
                            count = 1 if decodes else tokens[i, k]
                            sums[d + 1, 0] += count
                            sums[d + 1, 2] += kv[i, k + 1]
                            sums[d + 1, 3] += 1
                            sums[d + 1, 7] += arrival[i] == start
                            if decodes:
                                sums[d + 1, 4] += decode[i, k]
                                sums[d + 1, 5] += 1
                            else:
                                sums[d + 1, 1] += count
                                sums[d + 1, 4] += prefill[i, k]
                                sums[d + 1, 6] += 1

                        if (
                            sums[d + 1, 0] > rules[TOKENS]
                            or sums[d + 1, 1] > rules[PREFILL_TOKENS]
                            or sums[d + 1, 2] > rules[CAPACITY]
                            or sums[d + 1, 3] > rules[RUNNING_MAX]
                            or (not hybrid and sums[d + 1, 5] > 0 and sums[d + 1, 6] > 0)
                        ):
                            continue

                        d += 1
                        take[d] = -1
                        continue

                    # A batch of all requests looked at.
                    d -= 1
                    if sums[size, 0] == 0 or (start > t and sums[size, 7] == 0):
                        continue
                    if mode == 1 and sums[size, 5] == 0:
                        continue  # mode 0 has it

                    # Rule 1.
                    needless = False
                    for e in range(size):
                        if choices[e, take[e]] == EVICT:
                            i = who[e]
                            needless |= (
                                sums[size, 2] + kv[i, row[i] >> 1] <= rules[CAPACITY]
                                and sums[size, 3] + 1 <= rules[RUNNING_MAX]
                            )
                    if needless:
                        continue

                    end = start + base + sums[size, 4]
                    if sums[size, 5] > 0:
                        end += decode_base
                    if sums[size, 6] > 0:
                        end += prefill_base

                    if numbers[LABELS] >= rows.shape[0] or numbers[ENTRIES] + 2 >= heap.shape[0]:
                        flag[at] = OPEN
                        _push(heap, numbers[ENTRIES], low[at], 0, at)
                        numbers[ENTRIES] += 1
                        return GROW

                    finished, still = ended, left
                    for i in range(n):
                        child[i] = row[i]
                    for e in range(size):
                        i, act = who[e], choices[e, take[e]]
                        if act == EVICT:
                            child[i] = row[i] & ~1
                        elif act != IDLE:
                            k = (row[i] >> 1) + 1
                            child[i] = 2 * k + 1
                            if k == output[i]:
                                child[i] = 2 * k
                                finished += end
                                still -= 1

                    _ordered(child, kind)
                    bound = remaining(child, end, tables, sorts)
                    f = max(low[at], finished + bound)
                    if f >= numbers[BEST]:
                        continue

                    place = _find(child, rows, table)
                    worse = False
                    known = table[place]
                    while known >= 0:
                        if times[known] <= end and done[known] <= finished:
                            worse = True
                            break
                        if end <= times[known] and finished <= done[known]:
                            flag[known] = DELETED

                        known = link[known]

                    if worse:
                        continue

                    new = numbers[LABELS]
                    numbers[LABELS] += 1
                    produced = np.int64(0)
                    for i in range(n):
                        rows[new, i] = child[i]
                        acts[new, i] = IDLE
                        produced += child[i]
                    for e in range(size):
                        acts[new, who[e]] = choices[e, take[e]]

                    times[new], done[new], low[new] = end, finished, f
                    parent[new], link[new], flag[new] = at, table[place], OPEN
                    table[place] = new
                    if still == 0:
                        numbers[BEST], numbers[GOAL] = f, new
                        flag[new] = CLOSED
                        continue

                    _push(heap, numbers[ENTRIES], f, -produced, new)
                    numbers[ENTRIES] += 1
                    if f < best_low or (f == best_low and produced > best_child):
                        best_low, best_child = f, produced
                        if dives:
                            numbers[DIVE] = new

            # The next arrival after `start`.
            later = np.int64(2**62)
            for i in range(n):
                if row[i] < 2 * output[i] and arrival[i] > start:
                    later = min(later, arrival[i])
            # Rule 4.
            if later == 2**62 or (quiet and first_end <= later):
                break

            start = later

    return RUNNING
