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
from optsched.judge.memory import free, growth, kv_of, project, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import blocks, common
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
from optsched.problem.kernel import njit

# Codes of the words in `Rules`.
GROUPS = {
    "waiting": 0,
    "running": 1,
    "running_decode": 2,
    "running_prefill": 3,
    "all": 4,
    "prefill": 5,
}
NO_GROUP, WAITING, RUNNING, RUNNING_DECODE, RUNNING_PREFILL, ALL, PREFILL = -1, 0, 1, 2, 3, 4, 5
ADMISSIONS = {"present": 0, "lookahead": 1, "reserve": 2, "protect": 3}
PRESENT, LOOKAHEAD, RESERVE, PROTECT = 0, 1, 2, 3
OVERFLOWS = {"evict_latest": 0, "clear": 1, "evict_shortest": 2}
EVICT_LATEST, CLEAR, EVICT_SHORTEST = 0, 1, 2

SORTINGS = {"ratio": 1, "response": 1, "service": 2}
RANKED, BY_RATIO, BY_SERVICE, IN_GROUPS = 0, 1, 2, 3
"""Whether the queue is sorted anew before each batch, and how."""

SERVED = 2.0
"""Service of an output token, in prompt tokens (Sheng et al. 2024)."""

TIES = 2**31
"""Random numbers that break ties among waiting requests lie below this."""

MAX_STALLED_CLEARINGS = 100_000
"""More random clearings than this without a completion are an endless loop."""

PASSED_OVER, REFUSED = 0, -1
"""A request gets no tokens. `PASSED_OVER`: others of its group may. `REFUSED`: none may."""

REQUEST_FIELDS = (
    *common.FIELDS,
    ("estimate", np.int64),  # of its output, at present
    ("second", np.int64),  # its estimate once it is promoted
    ("peak", np.int64),  # KV that it will hold by its estimate
    ("in_batch", np.int64),  # number of its latest batch, from 1
    ("tie", np.float64),
    ("promoted", np.bool_),
    ("pace", np.float64),  # mean time that each later token may take; infinite: any
    ("late_after", np.float64),  # latest start for a first token in time; infinite: no matter
    ("later", np.float64),  # work of its decodes, in seconds, where prefills are ordered by it
    ("client", np.int64),  # the first request of its client or group, which counts for all of them
    # Service of the client, how many of the group wait, or how long its session's calls took.
    ("count", np.float64),
)

# Where prefixes are cached. The others come last, as in `optsched.policies.engine.vllm_v1`.
CACHE_FIELDS = (
    ("reused", np.int64),  # tokens that it finds in the cache in the batch
    ("row", np.int64),  # of the cache's table, while it runs; or -1
    ("rank", np.int64),  # by release
    *REQUEST_FIELDS,
)

STATE_FIELDS = (
    ("counter", np.int64),  # of those that began to wait
    ("partial", np.int64),  # running requests whose prefill is not complete
    ("admitted", np.int64),  # to the batch that is being formed: they stand behind those that run
    ("lost", np.int64),  # running requests that the batch evicts
    *memory.MEMORY,  # all of the input is allocated from the admission on
    ("reserved", np.int64),  # sum of peaks over running requests
    ("over", np.int64),  # projected batches above capacity
    ("freed", np.int64),  # by completions of the last batch, kept for those that wait
    ("clearings", np.int64),  # since the last completion
    ("cleared_at", np.int64),  # completions + arrivals at the last clearing of all
    ("without", np.int64),  # batches without a prefill since the last with one
    ("time_left", np.float64),  # for a batch with prefills, by the pace of those that run
    ("holding", np.bool_),  # whether those that are ahead of their pace wait for prefills
    ("finished", np.int64),  # requests, and
    ("seen", np.int64),  # tokens that they had
    ("stall", np.bool_),  # what was cleared is not enough: the time of a batch passes
    # What pauses prefills never changes. In `Settings`, which every call copies, these three made
    # all loops 10 % slower.
    ("gate", np.float64),  # seconds for each token that those who decode have left
    ("piece", np.float64),  # seconds of a batch with a prefill
    ("by_work", np.bool_),  # whether prefills are in the order of their work
    *blocks.STATE,
    ("changed", np.bool_),  # what the cache holds, since waiting requests were sorted
    ("patient", np.bool_),  # whether they wait for completions, and for each other
    ("newcomer", np.int64),  # client of the request that was admitted last
    ("fixed", np.float64),  # seconds of a decode batch whatever it holds, and
    ("setup", np.float64),  # of any prefills in it
    ("prefill_work", np.float64),  # seconds of the requests that have finished, without these
    ("decode_work", np.float64),
)

MAX_EMPTY = 0.125
"""Of those that run, how many others may have ended while prefills wait for each other."""

UNKNOWN = 2**40
"""Tokens left of a request that is longer than predicted: nobody waits for it."""

MAX_LOAD = 0.85
"""The load that patient prefills reckon with at most. Beyond it a queue does not empty."""


class Settings(NamedTuple):
    """`Rules` for compiled code, with the instance's limits."""

    limits: Limits
    origin: float
    groups: tuple[int, int, int]
    admission: int
    overflow: int
    threshold: float
    beta: float
    requeue_back: bool
    random_ties: bool
    by_estimate: bool
    promote: bool
    make_room: bool
    late_last: bool
    paced: bool
    hold: float
    spare: float  # share of its limit that a later token does not need
    lump: float  # of prefills, in tokens' time
    short: bool  # some prediction is too short
    max_batch_tokens: int  # of the scheduler itself
    max_prefill_tokens: int  # not more
    sorting: int
    gather: int  # waiting requests that are admitted together


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
def _look_up(requests: Records, i: int, cache: Cache, cost: Floats) -> float:
    """Note what a waiting request would find now. Return the work that is left of it."""
    r = requests[i]
    r.cached = 0
    r.cached = cache.block * blocks.find(cache, i, (life.rest_of(r) - 1) // cache.block)
    return float(batch_time(cost, add_prefill(EMPTY, life.rest_of(r), r.cached)) + r.later)


@njit(allocates=False)
def _sort_by_cache(requests: Records, s: np.record, heap: Ints, cache: Cache, cost: Floats) -> None:
    """Sort waiting requests by the work that the cache leaves them."""
    size, s.waiting, s.changed = s.waiting, 0, False
    for k in range(size):
        requests[heap[k]].key = _look_up(requests, heap[k], cache, cost)
        push(requests, heap, s, heap[k])


@njit(allocates=False)
def _take(r: np.record, i: int, s: np.record, tokens: int, limits: Limits, cache: Cache) -> None:
    """Allocate KV for tokens of request i in the batch, and name the blocks that they fill."""
    whole = r.cached // cache.block
    take(s, r, tokens, limits)
    blocks.fill(r, i, s, cache, whole, limits)
    s.changed = s.changed or r.allocated // cache.block > whole


@njit(allocates=False)
def _free(requests: Records, i: int, s: np.record, cache: Store, limits: Limits) -> None:
    """Free the KV of request i."""
    r = requests[i]
    if cache is not None:
        blocks.leave(requests, i, s, cache)
        s.changed = True

    free(s, r, limits)
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
    grouped = settings.sorting == IN_GROUPS
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
        elif settings.sorting == BY_SERVICE:
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


@njit
def _forget(usage: Ints, s: np.record, r: np.record, steps: int, limits: Limits) -> None:
    """Remove a request from the projection of the KV held in the next batches."""
    s.over += project(usage, s.batches, r.prompt + r.produced - 1, steps, -1, limits)


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
    requests: Records,
    s: np.record,
    running: Ints,
    evicted: Ints,
    next_kv: int,
    limits: Limits,
    random: Generator,
) -> None:
    """Evict in ascending estimate until the rest fits beside the room kept for those that wait."""
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
        add_eviction(evicted, s, running[victim])
        next_kv -= kv_of(r.prompt + r.produced, limits)


@njit
def _release(usage: Ints, s: np.record, r: np.record, settings: Settings, promoted: bool) -> None:
    """Free the KV of a request that leaves before the batch, and correct its estimate."""
    limits = settings.limits
    if settings.admission == LOOKAHEAD:
        _forget(usage, s, r, r.estimate - r.produced, limits)

    free(s, r, limits)
    s.reserved -= r.peak
    if promoted:
        r.estimate = max(r.second, r.produced + 1)
    elif settings.overflow == EVICT_SHORTEST:
        r.estimate = max(r.estimate, r.produced)
    elif r.produced >= r.estimate:
        r.estimate = r.produced + 1

    r.peak = kv_of(r.prompt + r.estimate - 1, limits)
    life.evict(r, limits.restart)


@njit
def _leave(
    requests: Records,
    s: np.record,
    lines: Ints,
    usage: Ints,
    evicted: Ints,
    settings: Settings,
    random: Generator,
) -> None:
    """Before the batch, evict requests that are longer than estimated, or for lack of KV."""
    heap, running = lines[0], lines[1]
    limits = settings.limits
    first = s.evicted
    next_kv = _kv_after_decodes(requests, s, running, limits)
    for k in range(s.running if settings.promote else 0):
        r = requests[running[k]]
        if r.produced >= r.estimate and not r.promoted:
            r.promoted = r.gone = True
            add_eviction(evicted, s, running[k])
            next_kv -= kv_of(r.prompt + r.produced, limits)

    promoted = s.evicted
    clearing = settings.overflow == CLEAR and next_kv > limits.kv_capacity
    if clearing:
        for k in range(s.running):
            if requests[running[k]].ready > 0.0:
                continue
            if settings.beta >= 1.0 or random.random() < settings.beta:
                requests[running[k]].gone = True
                add_eviction(evicted, s, running[k])
    elif settings.overflow == EVICT_SHORTEST:
        _evict_shortest(requests, s, running, evicted, next_kv, limits, random)

    for k in range(first, s.evicted):
        i = evicted[k]
        r = requests[i]
        _release(usage, s, r, settings, k < promoted)

        if k < promoted:
            r.band, r.key, r.place = 1, 0.0, s.counter
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
    elif settings.beta >= 1.0 and settings.admission in (PRESENT, PROTECT):
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
            _take(r, running[k], s, 1, limits, cache)

    s.latest = latest
    s.entries += s.running
    return sums


@njit(allocates=False)
def _put_out(
    requests: Records,
    v: int,
    s: np.record,
    usage: Ints,
    evicted: Ints,
    settings: Settings,
    cache: Store,
) -> None:
    """Evict running request v, which is not in the batch."""
    r = requests[v]
    r.gone = True
    s.lost += 1
    _free(requests, v, s, cache, settings.limits)
    if settings.admission == LOOKAHEAD:  # past its estimate it counts one token more
        _forget(usage, s, r, max(1, r.estimate - r.produced), settings.limits)

    add_eviction(evicted, s, v)


@njit(allocates=False)
def _pause(
    requests: Records,
    s: np.record,
    running: Ints,
    usage: Ints,
    evicted: Ints,
    i: int,
    settings: Settings,
    cache: Store,
) -> None:
    """Put out prefills that are not in the batch, but for request i: the cache has their blocks."""
    for k in range(s.running):
        r = requests[running[k]]
        if not (r.decoding or r.gone or r.in_batch == s.batches + 1 or running[k] == i):
            _put_out(requests, running[k], s, usage, evicted, settings, cache)


@njit(allocates=False)
def _make_room(
    requests: Records,
    s: np.record,
    running: Ints,
    usage: Ints,
    evicted: Ints,
    i: int,
    settings: Settings,
    cache: Store,
) -> None:
    """Evict running requests of lowest priority until request i can decode, itself last."""
    limits = settings.limits
    needed = growth(requests[i], 1, limits)
    victim = s.running - 1

    while not room(s, needed, limits):
        while victim >= 0:
            v = running[victim]
            r = requests[v]
            if v != i and not r.gone and r.ready == 0.0 and r.in_batch != s.batches + 1:
                break

            victim -= 1

        if victim < 0:
            v = i

        _put_out(requests, v, s, usage, evicted, settings, cache)
        if v == i:
            break


@njit
def _slack(r: np.record, s: np.record, settings: Settings) -> float:
    """Return the time until a request's next token is due by its pace, and by what it has left."""
    later = max(0, r.estimate - r.produced - 1)
    return float(r.first_at + r.pace * (r.produced + settings.spare * later) - s.now)


@njit
def _held(r: np.record, s: np.record, settings: Settings) -> bool:
    """Whether a request that decodes waits for prefills, since it is ahead of its pace."""
    return bool(s.holding and _slack(r, s, settings) > settings.hold * r.pace)


@njit
def _time_left(requests: Records, s: np.record, running: Ints, settings: Settings) -> float:
    """Return how long a batch may take such that nobody who runs falls behind its pace.

    A held request needs a token's time for the next batch. Where less than a lump is left, some
    batches have no prefills, and then one may take a lump in any case, so that prefills never stop.
    """
    left, lump = np.inf, 0.0
    for k in range(s.running):
        r = requests[running[k]]
        if r.decoding and r.pace < np.inf:
            slack = _slack(r, s, settings)
            left = min(left, slack - r.pace if _held(r, s, settings) else slack)
            lump = max(lump, r.pace * settings.lump)

    if left < lump and s.without + 1 < 2 * settings.lump:
        return 0.0

    return max(left, lump)


@njit
def _tokens_within(r: np.record, sums: Sums, tokens: int, cost: Floats, time: float) -> int:
    """Return how many tokens of a prefill, of at most so many, leave the batch within a time."""
    if tokens < 1 or batch_time(cost, add_prefill(sums, tokens, r.cached)) <= time:
        return tokens

    inside = 0
    while tokens - inside > 1:
        middle = (inside + tokens) // 2
        if batch_time(cost, add_prefill(sums, middle, r.cached)) <= time:
            inside = middle
        else:
            tokens = middle

    return inside


@njit
def _prefill_size(r: np.record, s: np.record, sums: Sums, settings: Settings, cost: Floats) -> int:
    """Return how many tokens of a prefill the batch can take, `PASSED_OVER` or `REFUSED`."""
    limits = settings.limits
    if not limits.hybrid and sums.decode_requests > 0:
        return PASSED_OVER

    c = life.rest_of(r)
    soft = settings.max_prefill_tokens - sums.tokens
    batch, prefill = limits.max_batch_tokens, limits.max_prefill_tokens
    hard = min(batch - sums.tokens, prefill - sums.prefill_tokens)
    if not limits.chunked:
        return c if c <= hard and (c <= soft or sums.tokens == 0) else REFUSED

    c = min(c, soft, hard)
    if settings.paced:
        c = _tokens_within(r, sums, c, cost, s.time_left)
    if s.piece < np.inf:  # one token goes on in any case, however long the decodes take
        c = max(min(c, 1), _tokens_within(r, sums, c, cost, s.piece))

    return c if c >= 1 else REFUSED


@njit(allocates=False)
def end(r: np.record, s: np.record, cost: Floats) -> None:
    """Note what a request that has finished has taken."""
    s.finished += 1
    s.seen += r.produced
    if s.patient:
        step = batch_time(cost, add_decode(EMPTY, r.prompt + r.produced // 2)) - s.fixed
        s.decode_work += step * (r.produced - 1)
        s.prefill_work += batch_time(cost, add_prefill(EMPTY, r.prompt, 0)) - s.fixed


@njit(allocates=False)
def _amplified(s: np.record) -> tuple[float, float]:
    """Return by how much the queue multiplies a delay, and the decodes' share of the work.

    A delay is passed on until the queue is empty, 1 / (1 - load) times. The load is the work that
    has arrived over the time so far.
    """
    work = s.prefill_work + s.decode_work
    if work <= 0.0:
        return 1.0, 0.0

    arrived = s.finished + s.running + s.waiting
    load = min(MAX_LOAD, work / s.finished * arrived / s.now)
    return 1.0 / (1.0 - load), s.decode_work / work


@njit
def _gate(requests: Records, s: np.record, running: Ints, cost: Floats) -> float:
    """Return how many seconds of a prefill may run beside those that decode.

    What they have left is predicted, or the mean of an exponential law that fits those seen so far:
    all tokens produced, over the number of requests that have finished.
    """
    decodes, produced, prefills, total, sums = 0, s.seen, s.waiting, 0, EMPTY
    patient = s.patient and s.finished > 0
    left = np.empty(s.running if patient and s.by_work else 0, np.int64)
    for k in range(s.running):
        r = requests[running[k]]
        if r.gone:
            continue

        produced += r.produced
        if r.decoding:
            if left.size > 0:
                left[decodes] = r.estimate - r.produced if r.estimate > r.produced else UNKNOWN
            if patient:
                sums = add_decode(sums, r.cached)

            total += max(1, r.estimate - r.produced)
            decodes += 1
        else:
            prefills += 1

    if decodes == 0:
        return np.inf

    mean = total / decodes if s.by_work else produced / max(1, s.finished)
    time = s.gate * mean * max(1.0, prefills / decodes)
    if not patient:
        return float(time)

    left = np.sort(left[:decodes])
    soonest = np.inf if s.by_work else mean / decodes
    for m in range(decodes if s.by_work else 0):
        soonest = min(soonest, left[m] / (m + 1))

    # With N requests in the system, m of k completions within t seconds are worth waiting for if
    # m w > c t N / k. What waits has no part in the decodes: their share of the work counts as
    # often as the queue passes a delay on.
    times, share = _amplified(s)
    share = 1.0 - share + share * times
    wait = share * soonest * batch_time(cost, sums) * (s.running + s.waiting) / decodes
    return float(min(time, wait))


@njit(allocates=False)
def _next_prefill(
    requests: Records,
    s: np.record,
    heap: Ints,
    running: Ints,
    waits: bool,
    gate: float,
    cost: Floats,
    cache: Store,
) -> int:
    """Return the place among the running ones of the prefill with least work left.

    -1 stands for the first waiting request, where these are looked at, and -2 for none. With a
    gate, a prefill that takes longer is none.
    """
    found, least, alone = -2, np.inf, np.inf
    for k in range(s.running if s.partial > 0 else 0):
        r = requests[running[k]]
        if r.decoding or r.gone or r.ready > 0.0 or r.in_batch == s.batches + 1:
            continue

        rest = batch_time(cost, add_prefill(EMPTY, life.rest_of(r), r.cached))
        if rest + r.later < least:
            found, least, alone = k, rest + r.later, rest

    if waits and s.waiting > 0:
        r = requests[heap[0]]
        if cache is not None:
            _look_up(requests, heap[0], cache, cost)

        rest = batch_time(cost, add_prefill(EMPTY, life.rest_of(r), r.cached))
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
    if size > limits.max_running or not room(s, needed, limits):
        return False
    if settings.sorting == IN_GROUPS and r.band > 0:
        return False
    if settings.admission == RESERVE:
        return bool(s.reserved + r.peak <= limits.kv_capacity)
    if settings.admission == PROTECT:
        spare = s.held + needed <= settings.threshold or (s.patient and s.held == 0)
        return bool(spare and size <= limits.max_batch_tokens)
    if settings.admission == LOOKAHEAD:
        if s.over > 0 or size > limits.max_batch_tokens:
            return False

        steps = r.estimate - r.produced
        return memory.fits(usage, s.batches, r.prompt + r.produced - 1, steps, limits)

    return True


@njit(allocates=False)
def _admit(
    requests: Records,
    s: np.record,
    heap: Ints,
    running: Ints,
    usage: Ints,
    settings: Settings,
    cache: Store,
) -> None:
    """Admit the first waiting request."""
    i = heap[0]
    r = requests[i]
    common.pop(requests, heap, s)
    if settings.late_last:
        _pass_late(requests, s, heap)
    if settings.sorting == BY_SERVICE:
        requests[r.client].count += r.prompt
        s.newcomer = r.client
        _sort(requests, s, heap, settings)

    running[s.running + s.admitted] = i
    s.admitted += 1
    if cache is not None:
        r.reused = r.cached
        blocks.seat(r, i, s, cache, r.cached // cache.block, settings.limits)
    else:
        take(s, r, r.prompt if r.away else life.rest_of(r), settings.limits)

    s.reserved += r.peak
    if r.away:
        common.pull(r, s)

    if settings.admission == LOOKAHEAD:
        steps = r.estimate - r.produced
        project(usage, s.batches, r.prompt + r.produced - 1, steps, 1, settings.limits)


@njit(allocates=False)
def _together(
    requests: Records,
    s: np.record,
    heap: Ints,
    running: Ints,
    usage: Ints,
    settings: Settings,
    cache: Store,
) -> bool:
    """Return whether as many prefills can begin as should share a batch.

    q of them wait q / 2 completions each, and delay N requests by a batch's fixed cost once. So
    q is best as in the square root law of lot sizes.
    """
    if cache is not None or s.running == 0 or s.waiting == 0 or s.partial > 0 or s.finished == 0:
        return True

    delayed = _amplified(s)[0] * (s.running + s.waiting)
    wanted = min(np.sqrt(2.0 * s.setup * s.finished / s.now * delayed), MAX_EMPTY * s.running)
    while s.admitted < wanted and s.waiting > 0:
        if not _admissible(requests, heap[0], s, usage, settings, cache):
            break

        _admit(requests, s, heap, running, usage, settings, cache)

    enough = s.admitted >= wanted
    while s.admitted > 0:
        s.admitted -= 1
        r = requests[running[s.running + s.admitted]]
        free(s, r, settings.limits)
        s.reserved -= r.peak
        if settings.admission == LOOKAHEAD:
            steps = r.estimate - r.produced
            project(usage, s.batches, r.prompt + r.produced - 1, steps, -1, settings.limits)

        push(requests, heap, s, running[s.running + s.admitted])

    return bool(enough)


@njit
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
    heap, running = lines[0], lines[1]
    limits = settings.limits
    max_batch = min(limits.max_batch_tokens, settings.max_batch_tokens)
    sums = EMPTY
    s.latest = 0.0
    s.admitted = s.lost = 0
    if settings.paced:
        s.time_left = _time_left(requests, s, running, settings)

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
            gate = _gate(requests, s, running, cost)
            if s.patient and not _together(requests, s, heap, running, usage, settings, cache):
                continue

        refused = False  # a waiting request was, in the group of all: the running ones go on
        while not closed and group != NO_GROUP:
            fresh = s.waiting > 0 and group == WAITING
            if group == PREFILL:
                position = _next_prefill(requests, s, heap, running, not refused, gate, cost, cache)
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
                if _held(r, s, settings) or (sums.prefill_requests > 0 and not limits.hybrid):
                    continue
                if sums.tokens + 1 > max_batch:
                    break
                if not room(s, growth(r, c, limits), limits):
                    _make_room(requests, s, running, usage, evicted, i, settings, cache)
                    if r.gone:
                        continue

                sums = add_decode(sums, r.cached)
                if cache is None:
                    take(s, r, c, limits)
            else:
                c = 1 if r.away else _prefill_size(r, s, sums, settings, cost)
                if cache is not None and c > 0:
                    if cache.block < c < life.rest_of(r):
                        c -= (r.cached + c) % cache.block
                    if not fresh and not room(s, growth(r, c, limits), limits):
                        _pause(requests, s, running, usage, evicted, i, settings, cache)
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
                    _admit(requests, s, heap, running, usage, settings, cache)
                if r.ready > 0.0:
                    continue

                sums = add_prefill(sums, c, r.cached)
                closed = not limits.chunked and sums.tokens > settings.max_prefill_tokens

            r.in_batch = s.batches + 1
            s.latest = max(s.latest, r.release)
            if cache is not None:
                entries[REUSED, s.entries] = r.reused
                r.reused = 0
                _take(r, i, s, c, limits, cache)

            add_entry(entries, s, i, c)

    if cache is not None and s.partial > 0 and sums.tokens > 0:
        _pause(requests, s, running, usage, evicted, -1, settings, cache)

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
        s.over += project(usage, 0, size - 1, r.estimate - r.produced, 1, limits)

    for k in range(waiting.size):
        i = waiting[k]
        if queued[k] and (settings.random_ties or (settings.promote and requests[i].band > 0)):
            push(requests, heap, s, i)
        else:
            _queue(requests, s, heap, i, settings, random)


@njit
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
    if settings.overflow != EVICT_LATEST or settings.promote:
        _leave(requests, s, lines, usage, evicted, settings, random)
    if s.outcome != common.DONE or s.stall:
        return EMPTY
    if settings.admission == LOOKAHEAD and settings.short:
        for k in range(s.running):  # one past its estimate takes a token more, whenever that is
            r = requests[running[k]]
            if r.produced >= r.estimate:
                tokens = r.prompt + r.produced - 1
                s.over += project(usage, s.batches, tokens, 1, 1, settings.limits)
    if settings.late_last:
        _pass_late(requests, s, heap)
    if settings.sorting != RANKED:
        _sort(requests, s, heap, settings)

    s.holding = settings.paced and _holds(requests, s, heap, usage, settings, cache)
    if cache is not None and s.changed:
        _sort_by_cache(requests, s, heap, cache, cost)

    sums = form(requests, s, lines, usage, entries, evicted, settings, cost, cache)
    if s.holding and sums.tokens == 0:
        s.holding = False
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

        if settings.sorting == BY_SERVICE:
            requests[r.client].count += SERVED

        if common.note(r, s):
            finished += 1
            end(r, s, cost)
            _free(requests, entries[REQUEST, k], s, cache, settings.limits)
            if settings.admission == LOOKAHEAD:
                _forget(usage, s, r, r.estimate - r.produced, settings.limits)

    s.partial -= completed
    s.freed = held - s.held if settings.make_room else 0
    if settings.admission == LOOKAHEAD:
        if s.partial:
            _stand_still(requests, s, running, usage, settings.limits)
        s.over -= usage[s.batches] > settings.limits.kv_capacity
    if finished > 0:
        s.clearings = 0

    common.after_batch(requests, running, s, finished)


@njit
def run(
    requests: Records,
    state: Records,
    settings: Settings,
    cost: Floats,
    by_arrival: Ints,
    span: int,
    columns: Columns,
    random: Generator,
    lines: Ints,
    usage: Ints,
    cache: Store,
    until: float,
) -> tuple[Columns, Ints]:
    """Run a scheduler until the requests assigned so far have finished, or up to a time."""
    n = by_arrival.shape[0]
    s = state[0]
    heap, running = lines[0], lines[1]
    entries, evicted = columns.entries, columns.evicted

    while s.done < n and s.outcome == common.DONE and s.now < until and s.turns > 0:
        if s.pulled > 0:
            break

        s.turns -= 1
        if s.moving > 0:
            s.partial -= common.landed(requests, running, s)

        i = common.arriving(requests, s, by_arrival)
        while i >= 0:
            if settings.sorting == BY_SERVICE:
                _lift(requests, s, heap, requests[i])

            _queue(requests, s, heap, i, settings, random)
            s.changed = True
            i = common.arriving(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            common.idle(requests, s, by_arrival, until)
            continue

        if common.full(columns, s, s.running + s.waiting, s.running):
            columns = common.with_room(columns, s, s.running + s.waiting, s.running)
            entries, evicted = columns.entries, columns.evicted
        if s.batches + span > usage.shape[0]:
            usage = common.grown(usage, s.batches + span)

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
            if not common.idle(requests, s, by_arrival, until):
                if until < np.inf or s.pulled > 0:  # a request may change that
                    break

                s.outcome = common.STUCK
                s.about = heap[0] if s.waiting > 0 else running[0]

            continue

        s.without = 0 if sums.prefill_requests > 0 else s.without + 1
        common.run_batch(columns.batches, s, settings.origin, batch_time(cost, sums))
        rows = entries[:, first : s.entries]
        _process(requests, s, running, usage, rows, settings, cost, cache)

    return columns, usage
