"""Runs any `Rules` batch by batch.

Where prefixes are cached (`optsched.policies.engine.blocks`), waiting requests stand in the order
of the prefill that the cache leaves them, and `cached` has what each would find.
"""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.costs.batch import Sums
from optsched.judge import life, memory
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import growth, kv_of, project, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import blocks, common, prefills
from optsched.policies.engine.blocks import Cache, Store
from optsched.policies.engine.common import (
    REQUEST,
    REUSED,
    TOKENS,
    Columns,
    add_entry,
    add_eviction,
    push,
)
from optsched.policies.engine.prefills import (
    ALL,
    NO_GROUP,
    PREFILL,
    REFUSED,
    RUNNING,
    RUNNING_DECODE,
    RUNNING_PREFILL,
    WAITING,
    Settings,
    is_ahead,
)
from optsched.problem.kernel import njit

SERVED = 2.0
"""Service of an output token, in prompt tokens (Sheng et al. 2024)."""

MAX_EMPTY = 0.125
"""Of those that run, how many others may have ended while prefills wait for each other."""

TIES = 2**31
"""Random numbers that break ties among waiting requests lie below this."""

MAX_STALLED_CLEARINGS = 100_000
"""More random clearings than this without a completion are an endless loop."""


class Lists(NamedTuple):
    """The lists that a batch changes, for what rarely runs (`form` says why only for that)."""

    heap: Ints
    running: Ints
    usage: Ints
    evicted: Ints


@njit
def _queue(
    requests: Records, s: np.record, heap: Ints, i: int, settings: Settings, random: Generator
) -> None:
    """Let a request wait: at its rank, behind those that wait, or at random among its equals."""
    r = requests[i]
    r.band, r.key = 0, 0.0
    if settings.random_ties:
        r.key = float(r.estimate) if settings.by_estimate else 0.0
        r.place = int(random.random() * TIES)
    elif settings.requeue_back:
        r.place = s.counter
    else:
        r.key, r.place = r.order, r.seq

    s.counter += 1
    push(requests, heap, s, i)


@njit(allocates=False)
def _look_up(requests: Records, i: int, cache: Cache) -> None:
    """Note what a waiting request would find now."""
    r = requests[i]
    r.cached = 0
    r.cached = cache.block * blocks.find(cache, i, (life.rest_of(r) - 1) // cache.block)


@njit(allocates=False)
def _sort_by_cache(requests: Records, s: np.record, heap: Ints, cache: Cache, cost: Floats) -> None:
    """Sort waiting requests by the work that the cache leaves them."""
    size, s.waiting, s.changed = s.waiting, 0, False
    for k in range(size):
        r = requests[heap[k]]
        _look_up(requests, heap[k], cache)
        r.key = prefills.alone(r, cost) + r.later
        push(requests, heap, s, heap[k])


@njit(allocates=False)
def _reckon(
    usage: Ints, s: np.record, r: np.record, steps: int, sign: int, settings: Settings
) -> None:
    """Add a request's next steps to the KV that is projected, or with sign -1 remove them."""
    if settings.admission == prefills.LOOKAHEAD:
        tokens = r.prompt + r.produced - 1
        s.over += project(usage, s.batches, tokens, steps, sign, settings.limits)


@njit(allocates=False)
def _free(
    requests: Records, i: int, s: np.record, usage: Ints, settings: Settings, cache: Store
) -> None:
    """Free the KV of request i, and what it was to take."""
    r = requests[i]
    _reckon(usage, s, r, r.estimate - r.produced, -1, settings)
    blocks.free(requests, i, s, settings.limits, cache)
    s.reserved -= r.peak


@njit(allocates=False)
def _lift(requests: Records, s: np.record, heap: Ints, r: np.record) -> None:
    """Let a client that comes back have had no less service than others that wait."""
    smallest = np.inf if s.waiting > 0 else requests[s.newcomer].count
    for k in range(s.waiting):
        other = requests[heap[k]]
        if other.client == r.client:
            return

        smallest = min(smallest, requests[other.client].count)

    requests[r.client].count = max(requests[r.client].count, smallest)


@njit(allocates=False)
def _sort(requests: Records, s: np.record, heap: Ints, settings: Settings) -> None:
    """Sort the queue by what has happened since requests began to wait."""
    grouped = settings.sorting == prefills.IN_GROUPS
    if grouped:
        for k in range(s.waiting):
            requests[requests[heap[k]].client].count = 0
        for k in range(s.waiting):
            requests[requests[heap[k]].client].count += 1

    size, s.waiting = s.waiting, 0
    for k in range(size):
        r = requests[heap[k]]
        count = requests[r.client].count
        if grouped:
            r.band = count < settings.gather and s.running > 0
        elif settings.sorting == prefills.BY_SERVICE:
            r.key = count
        else:
            r.key = (r.release - s.now - r.count) / r.order

        push(requests, heap, s, heap[k])


@njit
def _pass_late(requests: Records, s: np.record, heap: Ints) -> None:
    """Let those at the head that can no longer be in time stand behind all others."""
    while s.waiting > 0:
        i = heap[0]
        r = requests[i]
        if r.band > 0 or r.produced > 0 or s.now <= r.late_after:
            return

        common.pop(requests, heap, s)
        r.band = 1
        push(requests, heap, s, i)


@njit(allocates=False)
def _kv_after_decodes(requests: Records, s: np.record, running: Ints, limits: Limits) -> int:
    """Return the KV held if every running request caches one more token."""
    if limits.kv_block_tokens == 1:
        return int(s.held + s.running)

    kv = s.held
    for k in range(s.running):
        kv += growth(requests[running[k]], 1, limits)

    return int(kv)


@njit
def _evict_shortest(
    requests: Records, s: np.record, at: Lists, next_kv: int, limits: Limits, random: Generator
) -> None:
    """Evict in ascending estimate until the rest fits beside the room kept for those that wait."""
    running = at.running
    room = limits.kv_capacity - (s.freed if s.waiting > 0 else 0)
    for k in range(s.running if next_kv > room else 0):
        if not requests[running[k]].gone:
            requests[running[k]].tie = random.random()

    while next_kv > room:
        victim = -1
        for k in range(s.running):
            r = requests[running[k]]
            if (
                r.gone
                or r.ready > 0.0
                or (next_kv <= limits.kv_capacity and r.produced < r.estimate)
            ):
                continue  # to make room for others only a request past its estimate is evicted
            if victim >= 0:
                best = requests[running[victim]]
                if (r.estimate, r.tie) >= (best.estimate, best.tie):
                    continue

            victim = k

        if victim < 0:
            return

        r = requests[running[victim]]
        r.gone = True
        add_eviction(at.evicted, s, running[victim])
        next_kv -= kv_of(r.prompt + r.produced, limits)


@njit
def _correct(r: np.record, settings: Settings, promoted: bool) -> None:
    """Correct the estimate of a request that leaves before the batch, and evict it."""
    if promoted:
        r.estimate = max(r.second, r.produced + 1)
    elif settings.overflow == prefills.EVICT_SHORTEST:
        r.estimate = max(r.estimate, r.produced)
    elif r.produced >= r.estimate:
        r.estimate = r.produced + 1

    r.peak = kv_of(r.prompt + r.estimate - 1, settings.limits)
    life.evict(r, settings.limits.restart)


@njit
def _leave(
    requests: Records, s: np.record, at: Lists, settings: Settings, random: Generator
) -> None:
    """Before the batch, evict requests that are longer than estimated, or for lack of KV."""
    heap, running, evicted, limits = at.heap, at.running, at.evicted, settings.limits
    first = s.evicted
    next_kv = _kv_after_decodes(requests, s, running, limits)
    for k in range(s.running if settings.promote else 0):
        r = requests[running[k]]
        if r.produced >= r.estimate and not r.promoted:
            r.gone = True
            add_eviction(evicted, s, running[k])
            next_kv -= kv_of(r.prompt + r.produced, limits)

    promoted = s.evicted
    clearing = settings.overflow == prefills.CLEAR and next_kv > limits.kv_capacity
    if clearing:
        for k in range(s.running):
            if requests[running[k]].gone or requests[running[k]].ready > 0.0:
                continue
            if settings.beta >= 1.0 or random.random() < settings.beta:
                requests[running[k]].gone = True
                add_eviction(evicted, s, running[k])
    elif settings.overflow == prefills.EVICT_SHORTEST:
        _evict_shortest(requests, s, at, next_kv, limits, random)

    stays = s.evicted == first or s.waiting == 0 or not requests[heap[0]].away
    for k in range(0 if stays else s.running):
        r = requests[running[k]]
        stays = stays or not (r.gone or r.ready > 0.0)

    if not stays:  # no batch begins now, and KV would come beside that of those who leave
        for k in range(first, s.evicted):
            requests[evicted[k]].gone = False

        s.evicted, clearing = first, False

    for k in range(first, s.evicted):
        i = evicted[k]
        r = requests[i]
        _free(requests, i, s, at.usage, settings, None)
        _correct(r, settings, k < promoted)
        if k < promoted:
            r.promoted, r.band, r.key, r.place = True, 1, 0.0, s.counter
            s.counter += 1
            push(requests, heap, s, i)
        else:
            _queue(requests, s, heap, i, settings, random)

    if s.evicted > first:
        common.drop_gone(requests, running, s)

    s.stall = False
    if not clearing:
        return

    stalled = s.clearings >= MAX_STALLED_CLEARINGS
    s.clearings += 1
    s.stall = _kv_after_decodes(requests, s, running, limits) > limits.kv_capacity
    if stalled:
        s.outcome = common.STALLED
    elif settings.beta >= 1.0 and settings.admission in (prefills.PRESENT, prefills.PROTECT):
        if s.cleared_at == s.done + s.arrived:
            s.outcome, s.about = common.LOOP, heap[0]

        s.cleared_at = s.done + s.arrived


@njit(allocates=False)
def _decode_all(
    requests: Records,
    s: np.record,
    running: Ints,
    entries: Ints,
    sums: Sums,
    limits: Limits,
    cache: Store,
) -> Sums:
    """Let every running request decode. This is the common case, without any checks."""
    at, latest = s.entries, s.latest
    for k in range(s.running):
        r = requests[running[k]]
        latest = max(latest, r.release)
        entries[REQUEST, at + k] = running[k]
        entries[TOKENS, at + k] = 1
        sums = add_decode(sums, r.cached)
        if cache is None:
            take(s, r, 1, limits)
        else:
            entries[REUSED, at + k] = 0
            blocks.take(r, running[k], s, 1, limits, cache)

    s.latest = latest
    s.entries += s.running
    return sums


@njit(allocates=False)
def _put_out(
    requests: Records, v: int, s: np.record, at: Lists, settings: Settings, cache: Store
) -> None:
    """Evict running request v, which is not in the batch."""
    r = requests[v]
    r.gone = True
    s.lost += 1
    if r.produced >= r.estimate:  # past its estimate it counts one token more
        _reckon(at.usage, s, r, 1, -1, settings)

    _free(requests, v, s, at.usage, settings, cache)
    add_eviction(at.evicted, s, v)


@njit(allocates=False)
def _pause(
    requests: Records, i: int, s: np.record, at: Lists, settings: Settings, cache: Store
) -> None:
    """Put out prefills that are not in the batch, but for request i: the cache has their blocks."""
    for k in range(s.running):
        v = at.running[k]
        r = requests[v]
        if not (r.decoding or r.gone or r.in_batch == s.batches + 1 or v == i):
            _put_out(requests, v, s, at, settings, cache)


@njit(allocates=False)
def _make_room(
    requests: Records, i: int, s: np.record, at: Lists, settings: Settings, cache: Store
) -> None:
    """Evict running requests of lowest priority until request i can decode, itself last."""
    limits = settings.limits
    needed = growth(requests[i], 1, limits)
    victim = s.running - 1

    while not room(s, needed, limits):
        while victim >= 0:
            v = at.running[victim]
            r = requests[v]
            if v != i and not r.gone and r.ready == 0.0 and r.in_batch != s.batches + 1:
                break

            victim -= 1

        if victim < 0:
            v = i

        _put_out(requests, v, s, at, settings, cache)
        if v == i:
            break


@njit(allocates=False)
def _next_prefill(
    requests: Records, s: np.record, at: Lists, waits: bool, gate: float, cost: Floats, cache: Store
) -> int:
    """Return the place among the running ones of the prefill with least work left.

    -1 stands for the first waiting request, where these are looked at, and -2 for none. With a
    gate, a prefill that takes longer is none.
    """
    found, least, alone = -2, np.inf, np.inf
    for k in range(s.running if s.partial > 0 else 0):
        r = requests[at.running[k]]
        if r.decoding or r.gone or r.ready > 0.0 or r.in_batch == s.batches + 1:
            continue

        rest = prefills.alone(r, cost)
        if rest + r.later < least:
            found, least, alone = k, rest + r.later, rest

    if waits and s.waiting > 0:
        if cache is not None:
            _look_up(requests, at.heap[0], cache)

        r = requests[at.heap[0]]
        rest = prefills.alone(r, cost)
        if rest + r.later < least:
            found, alone = -1, rest

    return found if alone <= gate else -2


@njit(allocates=False)
def _admissible(
    requests: Records, i: int, s: np.record, usage: Ints, settings: Settings, cache: Store
) -> bool:
    """Return whether a waiting request may join the batch."""
    r, limits = requests[i], settings.limits
    size = s.running - s.lost + s.admitted + 1
    needed = kv_of(r.prompt + r.produced, limits)
    if cache is not None:
        needed += blocks.extra(s, cache, i, r.cached // cache.block)
    if size > limits.max_running or not room(s, needed, limits) or common.barred(r, s, s.lost):
        return False
    if settings.sorting == prefills.IN_GROUPS and r.band > 0:
        return False
    if settings.admission == prefills.RESERVE:
        return bool(s.reserved + r.peak <= limits.kv_capacity)
    if settings.admission == prefills.PROTECT:
        alone = s.held == 0 and settings.overflow == prefills.EVICT_LATEST
        spare = s.held + needed <= settings.threshold or alone
        return bool(spare and size <= limits.max_batch_tokens)
    if settings.admission == prefills.LOOKAHEAD:
        if s.over > 0 or size > limits.max_batch_tokens:
            return False

        steps = r.estimate - r.produced
        return memory.fits(usage, s.batches, r.prompt + r.produced - 1, steps, limits)

    return True


@njit(allocates=False)
def _admit(requests: Records, s: np.record, at: Lists, settings: Settings, cache: Store) -> None:
    """Admit the first waiting request."""
    i = at.heap[0]
    r = requests[i]
    common.pop(requests, at.heap, s)
    if settings.late_last:
        _pass_late(requests, s, at.heap)
    if settings.sorting == prefills.BY_SERVICE:
        requests[r.client].count += r.prompt
        s.newcomer = r.client
        _sort(requests, s, at.heap, settings)

    at.running[s.running + s.admitted] = i
    s.admitted += 1
    if cache is not None:
        r.reused = r.cached
        blocks.seat(r, i, s, cache, r.cached // cache.block, settings.limits)
    else:
        take(s, r, r.prompt if r.away else life.rest_of(r), settings.limits)

    s.reserved += r.peak
    if r.away:
        common.pull(r, s)

    _reckon(at.usage, s, r, r.estimate - r.produced, 1, settings)


@njit(allocates=False)
def _together(requests: Records, s: np.record, at: Lists, settings: Settings, cache: Store) -> bool:
    """Return whether as many prefills can begin as should share a batch.

    q of them wait q / 2 completions each, and delay N requests by a batch's fixed cost once. So
    q is best as in the square root law of lot sizes. KV that comes from elsewhere is no prefill.
    """
    if cache is not None or s.running == 0 or s.waiting == 0 or s.partial > 0 or s.finished == 0:
        return True
    if requests[at.heap[0]].away:
        return True

    delayed = prefills.amplified(s)[0] * (s.running + s.waiting)
    wanted = min(np.sqrt(2.0 * s.setup * s.finished / s.now * delayed), MAX_EMPTY * s.running)
    while s.admitted < wanted and s.waiting > 0:
        i = at.heap[0]
        if requests[i].away or not _admissible(requests, i, s, at.usage, settings, cache):
            break

        _admit(requests, s, at, settings, cache)

    enough = s.admitted >= wanted
    while s.admitted > 0:
        s.admitted -= 1
        i = at.running[s.running + s.admitted]
        _free(requests, i, s, at.usage, settings, cache)
        push(requests, at.heap, s, i)

    return bool(enough)


@njit(allocates=False)
def form(
    requests: Records,
    s: np.record,
    lines: Ints,
    usage: Ints,
    entries: Ints,
    evicted: Ints,
    settings: Settings,
    cost: Floats,
    cache: Store,
) -> Sums:
    """Form the next batch group by group; return its sums.

    The columns come as arrays: passed as one tuple they made all loops 12 % slower.
    """
    heap, running, limits = lines[0], lines[1], settings.limits
    at = Lists(heap, running, usage, evicted)
    max_batch = min(limits.max_batch_tokens, settings.max_batch_tokens)
    sums = EMPTY
    s.latest = 0.0
    s.admitted = s.lost = 0
    if settings.paced:
        s.time_left = prefills.time_left(requests, s, running, settings)

    closed = False  # by a prefill beyond the scheduler's own limit
    # The last prompt tokens of those whose KV came stand before decodes that would shut them out.
    begun = s.partial > 0 and not (limits.hybrid or limits.chunked)
    for group in (RUNNING_PREFILL if begun else NO_GROUP, *settings.groups):
        # Nearly all batches only decode. Where every running request can, none need be looked at.
        if (
            group in (RUNNING, RUNNING_DECODE)
            and s.partial == 0
            and not (s.holding or closed)
            and (limits.hybrid or sums.prefill_requests == 0)
            and sums.tokens + s.running <= max_batch
            and _kv_after_decodes(requests, s, running, limits) <= limits.kv_capacity
        ):
            sums = _decode_all(requests, s, running, entries, sums, limits, cache)
            continue

        position, gate = 0, np.inf
        if group == PREFILL and s.partial + s.waiting > 0 and (s.patient or s.gate < np.inf):
            gate = prefills.gate_of(requests, s, running, cost)
            if s.patient and not _together(requests, s, at, settings, cache):
                continue

        refused = False  # a waiting request was, in the group of all: the running ones go on
        while not closed and group != NO_GROUP:
            fresh = s.waiting > 0 and group == WAITING
            if group == PREFILL:
                position = _next_prefill(requests, s, at, not refused, gate, cost, cache)
                fresh = position == -1
                if position < -1:
                    break
            if group == ALL and s.waiting > 0 and not refused:
                fresh = position >= s.running or common.ahead(
                    requests[heap[0]], requests[running[position]]
                )

            if fresh:
                i = heap[0]
            elif group == WAITING or position >= s.running:
                break
            else:
                i = running[position]
                position += 1

            r = requests[i]
            c = 1
            if begun and not fresh and r.in_batch == s.batches + 1:
                continue
            if (
                r.gone
                or r.ready > 0.0
                or group == (RUNNING_PREFILL if r.decoding else RUNNING_DECODE)
            ):
                continue
            if r.decoding:
                if is_ahead(r, s, settings) or (sums.prefill_requests > 0 and not limits.hybrid):
                    continue
                if sums.tokens + 1 > max_batch:
                    break
                if not room(s, growth(r, c, limits), limits):
                    _make_room(requests, i, s, at, settings, cache)
                    if r.gone:
                        continue

                sums = add_decode(sums, r.cached)
                if cache is None:
                    take(s, r, c, limits)
            else:
                c = 1 if r.away else prefills.size_of(r, s, sums, settings, cost)
                if cache is not None and c > 0:
                    if cache.block < c < life.rest_of(r):
                        c -= (r.cached + c) % cache.block
                    if not fresh and not room(s, growth(r, c, limits), limits):
                        _pause(requests, i, s, at, settings, cache)
                        c = c if room(s, growth(r, c, limits), limits) else REFUSED
                if c > 0 and fresh and not _admissible(requests, i, s, usage, settings, cache):
                    c = REFUSED
                if c <= 0:
                    if not fresh and group == PREFILL:
                        break
                    if group == WAITING or (c == REFUSED and group not in (ALL, PREFILL)):
                        break

                    refused = refused or fresh
                    continue

                if fresh:
                    _admit(requests, s, at, settings, cache)
                if r.ready > 0.0:
                    continue

                sums = add_prefill(sums, c, r.cached)
                closed = not limits.chunked and sums.tokens > settings.max_prefill_tokens

            r.in_batch = s.batches + 1
            s.latest = max(s.latest, r.release)
            if cache is not None:
                entries[REUSED, s.entries] = r.reused
                r.reused = 0
                blocks.take(r, i, s, c, limits, cache)

            add_entry(entries, s, i, c)

    if cache is not None and s.partial > 0 and sums.tokens > 0:
        _pause(requests, -1, s, at, settings, cache)

    return sums


@njit(allocates=False)
def _holds(
    requests: Records, s: np.record, heap: Ints, usage: Ints, settings: Settings, cache: Store
) -> bool:
    """Whether there are prefills for which those ahead of their pace should wait."""
    if s.partial > 0 or s.waiting == 0:
        return bool(s.partial > 0)

    s.admitted = s.lost = 0
    first = heap[0]
    return requests[first].band == 0 and _admissible(requests, first, s, usage, settings, cache)


@njit(allocates=False)
def _runs_before(a: np.record, b: np.record, settings: Settings) -> bool:
    """Return whether request a is taken before b among the running ones."""
    return common.ahead(a, b) if settings.groups[0] == ALL else bool(a.seq < b.seq)


@njit
def _settle(
    requests: Records,
    s: np.record,
    lines: Ints,
    evicted: Ints,
    settings: Settings,
    random: Generator,
) -> None:
    """Let evicted requests wait again, and sort admitted ones into the running ones by priority."""
    heap, running = lines[0], lines[1]
    first, last = s.running, s.running + s.admitted
    for k in range(s.evicted - s.lost, s.evicted):
        r = requests[evicted[k]]
        r.gone = True
        s.partial -= not r.decoding
        life.evict(r, settings.limits.restart)
        _queue(requests, s, heap, evicted[k], settings, random)

    if s.lost > 0:
        common.drop_gone(requests, running, s)
    for k in range(first, last):
        i = running[k]
        position = s.running
        while position > 0 and _runs_before(requests[i], requests[running[position - 1]], settings):
            running[position] = running[position - 1]
            position -= 1

        running[position] = i
        s.running += 1
        s.partial += 1


@njit
def show(
    requests: Records,
    s: np.record,
    lines: Ints,
    usage: Ints,
    waiting: Ints,
    queued: NDArray[np.bool_],
    settings: Settings,
    random: Generator,
) -> None:
    """Count in the requests that run, and let others wait, where a batch is asked for alone.

    `queued`: which of those that wait have waited before.
    """
    heap, running, limits = lines[0], lines[1], settings.limits
    for k in range(s.running):
        r = requests[running[k]]
        r.band = 0
        size = r.prompt + r.produced
        take(s, r, max(r.cached, 0 if r.decoding else size), limits)
        s.reserved += r.peak
        s.partial += not r.decoding
        _reckon(usage, s, r, r.estimate - r.produced, 1, settings)

    for k in range(waiting.size):
        i = waiting[k]
        if queued[k] and (settings.random_ties or (settings.promote and requests[i].band > 0)):
            push(requests, heap, s, i)
        else:
            _queue(requests, s, heap, i, settings, random)


@njit(allocates=False)
def decide(
    requests: Records,
    s: np.record,
    lines: Ints,
    usage: Ints,
    entries: Ints,
    evicted: Ints,
    settings: Settings,
    cost: Floats,
    random: Generator,
    cache: Store,
) -> Sums:
    """Form the next batch after the evictions that precede it; return its sums."""
    heap, running = lines[0], lines[1]
    if settings.overflow != prefills.EVICT_LATEST or settings.promote:
        _leave(requests, s, Lists(heap, running, usage, evicted), settings, random)
    if s.outcome != common.DONE or s.stall:
        return EMPTY
    if settings.admission == prefills.LOOKAHEAD and settings.short:
        for k in range(s.running):  # one past its estimate takes a token more, whenever that is
            r = requests[running[k]]
            if r.produced >= r.estimate:
                _reckon(usage, s, r, 1, 1, settings)
    if settings.late_last:
        _pass_late(requests, s, heap)
    if settings.sorting != prefills.RANKED:
        _sort(requests, s, heap, settings)

    s.holding = settings.paced and _holds(requests, s, heap, usage, settings, cache)
    if cache is not None and s.changed:
        _sort_by_cache(requests, s, heap, cache, cost)

    sums = form(requests, s, lines, usage, entries, evicted, settings, cost, cache)
    if s.holding and sums.tokens == 0:
        s.holding = False
        if s.admitted + s.lost > 0:  # KV may come to those who have just been given room
            _settle(requests, s, lines, evicted, settings, random)

        sums = form(requests, s, lines, usage, entries, evicted, settings, cost, cache)

    return sums


@njit(allocates=False)
def _stand_still(
    requests: Records, s: np.record, running: Ints, usage: Ints, limits: Limits
) -> None:
    """Let what is projected of prefills that the last batch did not complete come a batch later."""
    now = s.batches - 1
    for k in range(s.running):
        r = requests[running[k]]
        if r.decoding or r.gone:
            continue

        tokens, steps = r.prompt + r.produced - 1, r.estimate - r.produced
        s.over += project(usage, now, tokens, steps, -1, limits)
        s.over += project(usage, now, tokens, 1, 1, limits)
        s.over += project(usage, now + 1, tokens, steps, 1, limits)


@njit(allocates=False)
def _process(
    requests: Records,
    s: np.record,
    running: Ints,
    usage: Ints,
    entries: Ints,
    settings: Settings,
    cost: Floats,
    cache: Store,
) -> None:
    """Process the entries of a batch."""
    finished = completed = 0
    held = s.held
    for k in range(entries.shape[1]):
        r = requests[entries[REQUEST, k]]
        completed += not r.decoding
        if not life.advance(r, entries[TOKENS, k]):
            completed -= 1
            continue

        if settings.sorting == prefills.BY_SERVICE:
            requests[r.client].count += SERVED

        if common.note(r, s):
            finished += 1
            prefills.end(r, s, cost)
            _free(requests, entries[REQUEST, k], s, usage, settings, cache)

    s.partial -= completed
    s.freed = held - s.held if settings.make_room else 0
    if settings.admission == prefills.LOOKAHEAD:
        if s.partial:
            _stand_still(requests, s, running, usage, settings.limits)
        s.over -= usage[s.batches] > settings.limits.kv_capacity
    if finished > 0:
        s.clearings = 0

    common.after_batch(requests, running, s, finished)


@njit(allocates=False)
def run(
    requests: Records,
    state: Records,
    settings: Settings,
    cost: Floats,
    by_arrival: Ints,
    columns: Columns,
    random: Generator,
    lines: Ints,
    usage: Ints,
    cache: Store,
    until: float,
) -> None:
    """Run a scheduler until the requests assigned so far have finished, or up to a time.

    `usage` has room for the longest request that begins in the last row of the columns.
    """
    s = state[0]
    heap, running = lines[0], lines[1]
    entries, evicted = columns.entries, columns.evicted

    while common.goes_on(s, by_arrival.shape[0], until, columns):
        if s.moving > 0:
            s.partial -= common.landed(requests, running, s)

        i = common.arriving(requests, s, by_arrival)
        while i >= 0:
            if settings.sorting == prefills.BY_SERVICE:
                _lift(requests, s, heap, requests[i])

            _queue(requests, s, heap, i, settings, random)
            s.changed = True
            i = common.arriving(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            if not common.waits(requests, s, by_arrival, until, -1):
                break

            continue

        first = s.entries
        sums = decide(requests, s, lines, usage, entries, evicted, settings, cost, random, cache)
        if s.outcome != common.DONE:
            break
        if s.stall:  # the time of the batch that could not run
            for k in range(s.running):
                sums = add_decode(sums, requests[running[k]].cached)

            s.now += batch_time(cost, sums)
            continue

        if s.admitted + s.lost > 0:
            _settle(requests, s, lines, evicted, settings, random)
        if sums.tokens == 0:
            about = heap[0] if s.waiting > 0 else running[0]
            if not common.waits(requests, s, by_arrival, until, about):
                break

            continue

        s.without = 0 if sums.prefill_requests > 0 else s.without + 1
        common.run_batch(columns.batches, s, settings.origin, batch_time(cost, sums))
        rows = entries[:, first : s.entries]
        _process(requests, s, running, usage, rows, settings, cost, cache)
