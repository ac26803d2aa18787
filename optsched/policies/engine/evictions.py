"""Who gives KV back before it has finished, and what running requests will hold.

Before a batch (`leave`), or while it is formed (`make_room`, `pause`).
"""

import numpy as np
from numpy.random import Generator

from optsched.judge import life
from optsched.judge.life import Records
from optsched.judge.memory import by_token, growth, kv_of, project, room
from optsched.policies.engine import blocks, common, ledger, prefills, queues
from optsched.policies.engine.blocks import Store
from optsched.policies.engine.common import add_eviction, push
from optsched.policies.engine.prefills import Worker
from optsched.problem.kernel import njit

MAX_STALLED_CLEARINGS = 100_000
"""More random clearings than this without a completion are an endless loop."""


@njit(allocates=False)
def reckon(s: np.record, at: Worker, r: np.record, steps: int, sign: int) -> None:
    """Add a request's next steps to the KV that is projected, or with sign -1 remove them."""
    if s.admission == prefills.LOOKAHEAD:
        tokens = r.prompt + r.produced - 1
        s.over += project(at.usage, s.batches, tokens, steps, sign, at.limits)


@njit(allocates=False)
def free(requests: Records, i: int, s: np.record, at: Worker, cache: Store) -> None:
    """Free the KV of request i, and what it was to take."""
    r = requests[i]
    reckon(s, at, r, r.estimate - r.produced, -1)
    blocks.free(requests, i, s, at.limits, cache)
    s.reserved -= r.peak


@njit(allocates=False, forceinline=True)
def kv_after_decodes(requests: Records, s: np.record, at: Worker) -> int:
    """Return the KV held if every running request caches one more token."""
    if by_token(at.limits):
        return int(s.held + s.running)

    kv = s.held
    for k in range(s.running):
        kv += growth(requests[at.running[k]], 1, at.limits)

    return int(kv)


@njit
def _mark_shortest(
    requests: Records, s: np.record, at: Worker, next_kv: int, random: Generator
) -> None:
    """Evict in ascending estimate until the rest fits beside the room kept for those that wait."""
    room = at.limits.kv_capacity - (s.freed if s.waiting > 0 else 0)
    # Equal estimates are told apart at random, drawn only where somebody must leave.
    for k in range(s.running if next_kv > room else 0):
        if not requests[at.running[k]].gone:
            requests[at.running[k]].tie = random.random()

    while next_kv > room:
        victim = -1
        for k in range(s.running):
            r = requests[at.running[k]]
            if (
                r.gone
                or not ledger.is_here(r)
                or (next_kv <= at.limits.kv_capacity and r.produced < r.estimate)
            ):
                continue  # to make room for others only a request past its estimate is evicted
            if victim >= 0:
                best = requests[at.running[victim]]
                if (r.estimate, r.tie) >= (best.estimate, best.tie):
                    continue

            victim = k

        # The rest is on its way here, or has a claim that goes before those who wait.
        if victim < 0:
            return

        r = requests[at.running[victim]]
        r.gone = True
        add_eviction(at.evicted, s, at.running[victim])
        next_kv -= kv_of(r.prompt + r.produced, at.limits)


@njit
def _mark_longer(requests: Records, s: np.record, at: Worker) -> int:
    """Let requests go that have reached their estimates; return the KV that they had next."""
    kv = 0
    for k in range(s.running):
        r = requests[at.running[k]]
        if r.produced >= r.estimate and not r.promoted:
            r.gone = True
            add_eviction(at.evicted, s, at.running[k])
            kv += kv_of(r.prompt + r.produced, at.limits)

    return kv


@njit
def _mark_drawn(requests: Records, s: np.record, at: Worker, random: Generator) -> None:
    """Let each running request go by the toss of a coin."""
    for k in range(s.running):
        r = requests[at.running[k]]
        if r.gone or not ledger.is_here(r):
            continue
        if s.beta >= 1.0 or random.random() < s.beta:
            r.gone = True
            add_eviction(at.evicted, s, at.running[k])


@njit
def _correct(r: np.record, s: np.record, at: Worker, promoted: bool) -> None:
    """Correct the estimate of a request that leaves before the batch, and evict it."""
    if promoted:
        r.estimate = max(r.second, r.produced + 1)
    elif s.overflow == prefills.EVICT_SHORTEST:
        r.estimate = max(r.estimate, r.produced)
    elif r.produced >= r.estimate:
        r.estimate = r.produced + 1

    r.peak = kv_of(r.prompt + r.estimate - 1, at.limits)
    life.evict(r, at.limits.restart)


@njit
def leave(requests: Records, s: np.record, at: Worker, random: Generator) -> None:
    """Before the batch, evict requests that are longer than estimated, or for lack of KV."""
    first = s.evicted
    next_kv = kv_after_decodes(requests, s, at)
    if s.promote:
        next_kv -= _mark_longer(requests, s, at)

    promoted = s.evicted
    clearing = s.overflow == prefills.CLEAR and next_kv > at.limits.kv_capacity
    if clearing:
        _mark_drawn(requests, s, at, random)
    elif s.overflow == prefills.EVICT_SHORTEST:
        _mark_shortest(requests, s, at, next_kv, random)

    # Where no batch begins now, KV would come beside that of those who leave.
    comes = s.evicted > first and s.waiting > 0 and ledger.comes(requests[at.heap[0]])
    if comes and ledger.all_come(requests, at.running, s):
        for k in range(first, s.evicted):
            requests[at.evicted[k]].gone = False

        s.evicted, clearing = first, False

    for k in range(first, s.evicted):
        i = at.evicted[k]
        r = requests[i]
        free(requests, i, s, at, None)
        _correct(r, s, at, k < promoted)
        if k < promoted:
            r.promoted, r.band, r.key, r.place = True, 1, 0.0, s.counter
            s.counter += 1
            push(requests, at.heap, s, i)
        else:
            queues.enter(requests, s, at, i, random)

    if s.evicted > first:
        common.drop_gone(requests, at.running, s)

    s.stall = False
    if not clearing:
        return

    stalled = s.clearings >= MAX_STALLED_CLEARINGS
    s.clearings += 1
    s.stall = kv_after_decodes(requests, s, at) > at.limits.kv_capacity
    if stalled:
        s.outcome = common.STALLED
    elif s.beta >= 1.0 and s.admission in (prefills.PRESENT, prefills.PROTECT):
        # All were put out before with as many done and arrived: the same would come again for ever.
        if s.cleared_at == s.done + s.arrived:
            s.outcome, s.about = common.LOOP, at.heap[0]

        s.cleared_at = s.done + s.arrived


@njit(allocates=False)
def _put_out(requests: Records, v: int, s: np.record, at: Worker, cache: Store) -> None:
    """Evict running request v, which is not in the batch."""
    r = requests[v]
    r.gone = True
    s.lost += 1
    if r.produced >= r.estimate:  # past its estimate it counts one token more
        reckon(s, at, r, 1, -1)

    free(requests, v, s, at, cache)
    add_eviction(at.evicted, s, v)


@njit(allocates=False)
def pause(requests: Records, i: int, s: np.record, at: Worker, cache: Store) -> None:
    """Put out prefills that are not in the batch, but for request i: the cache has their blocks."""
    for k in range(s.running):
        v = at.running[k]
        r = requests[v]
        if not (r.decoding or r.gone or r.in_batch == s.batches + 1 or v == i):
            _put_out(requests, v, s, at, cache)


@njit(allocates=False)
def make_room(requests: Records, i: int, s: np.record, at: Worker, cache: Store) -> None:
    """Evict running requests of lowest priority until request i can decode, itself last."""
    needed = growth(requests[i], 1, at.limits)
    victim = s.running - 1

    # Whoever is passed over stays so, and the search for victims goes on where it stopped.
    while not room(s, needed, at.limits):
        while victim >= 0:
            v = at.running[victim]
            r = requests[v]
            if v != i and not r.gone and ledger.is_here(r) and r.in_batch != s.batches + 1:
                break

            victim -= 1

        if victim < 0:
            v = i

        _put_out(requests, v, s, at, cache)
        if v == i:
            break
