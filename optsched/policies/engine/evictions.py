"""Who gives KV back before it has finished, and what running requests will hold.

KV is given back before a batch (`evict_before_batch`), or while it is formed (`make_room`,
`pause_prefills`). Where the admission looks ahead, the KV of coming batches is projected here. The
fields of the records `requests` and `s`, the state, stand in `optsched.policies.engine.prefills`.
"""

import numpy as np
from numpy.random import Generator

from optsched.judge import life
from optsched.judge.life import Records
from optsched.judge.memory import by_token, growth, has_room, kv_of, project
from optsched.policies.engine import blocks, common, ledger, prefills, queues
from optsched.policies.engine.blocks import Store
from optsched.policies.engine.common import add_eviction, push
from optsched.policies.engine.prefills import Worker
from optsched.problem.kernel import njit

MAX_STALLED_CLEARINGS = 100_000
"""More random clearings than this without a completion are an endless loop."""


@njit(allocates=False)
def project_steps(s: np.record, w: Worker, r: np.record, steps: int, sign: int) -> None:
    """Add a request's next steps to the projection of KV, or with sign -1 remove them.

    Only the admission rule ``"lookahead"`` has a projection.
    """
    if s.admission == prefills.LOOKAHEAD:
        tokens = r.prompt + r.produced - 1
        s.over += project(w.usage, s.batches, tokens, steps, sign, w.limits)


@njit(allocates=False)
def free(requests: Records, i: int, s: np.record, w: Worker, cache: Store) -> None:
    """Free the KV of request i, the KV projected for it and its share of the reserved KV."""
    r = requests[i]
    project_steps(s, w, r, r.estimate - r.produced, -1)
    blocks.free(requests, i, s, w.limits, cache)
    s.reserved -= r.peak


@njit(allocates=False, forceinline=True)
def kv_after_decodes(requests: Records, s: np.record, w: Worker) -> int:
    """Return the KV held if every running request caches one more token."""
    # Without blocks and windows each takes one more KV token, and none need be looked at.
    if by_token(w.limits):
        return int(s.held + s.running)

    kv = s.held
    for k in range(s.running):
        kv += growth(requests[w.running[k]], 1, w.limits)

    return int(kv)


@njit
def _mark_shortest(
    requests: Records, s: np.record, w: Worker, kv_needed: int, random: Generator
) -> None:
    """Mark running requests for eviction, in ascending estimate, until the next batch fits.

    `kv_needed`: the KV after a batch in which all decode. It fits if it is within the capacity, or
    less what has just been freed where that is kept for requests that wait. For the sake of those
    only requests past their estimates are evicted.
    """
    kv_limit = w.limits.kv_capacity - (s.freed if s.waiting > 0 else 0)
    # Equal estimates are told apart at random. Nothing is drawn where nobody must leave.
    for k in range(s.running if kv_needed > kv_limit else 0):
        if not requests[w.running[k]].leaving:
            requests[w.running[k]].tie = random.random()

    while kv_needed > kv_limit:
        victim = -1
        for k in range(s.running):
            r = requests[w.running[k]]
            if r.leaving or not ledger.is_here(r):
                continue
            if kv_needed <= w.limits.kv_capacity and r.produced < r.estimate:
                continue  # only the kept room is lacking, for which nobody within its estimate goes
            if victim >= 0:
                best = requests[w.running[victim]]
                if (r.estimate, r.tie) >= (best.estimate, best.tie):
                    continue

            victim = k

        # The KV that is left is on its way here, or of requests that go before those that wait.
        if victim < 0:
            return

        r = requests[w.running[victim]]
        r.leaving = True
        add_eviction(w.evicted, s, w.running[victim])
        kv_needed -= kv_of(r.prompt + r.produced, w.limits)  # what it would hold after the batch


@njit
def _mark_overlong(requests: Records, s: np.record, w: Worker) -> int:
    """Mark for eviction requests that have reached their estimates.

    Return the KV that they would hold after the next batch. A request leaves for this only once.
    """
    kv = 0
    for k in range(s.running):
        r = requests[w.running[k]]
        if r.produced >= r.estimate and not r.promoted:
            r.leaving = True
            add_eviction(w.evicted, s, w.running[k])
            kv += kv_of(r.prompt + r.produced, w.limits)

    return kv


@njit
def _mark_drawn(requests: Records, s: np.record, w: Worker, random: Generator) -> None:
    """Mark each running request for eviction with probability ``beta``."""
    for k in range(s.running):
        r = requests[w.running[k]]
        if r.leaving or not ledger.is_here(r):
            continue
        # With probability 1 nothing is drawn, so that the run does not depend on the seed.
        if s.beta >= 1.0 or random.random() < s.beta:
            r.leaving = True
            add_eviction(w.evicted, s, w.running[k])


@njit
def _correct_estimate(r: np.record, s: np.record, w: Worker, overlong: bool) -> None:
    """Correct the estimate of a request that leaves before the batch, and evict it.

    `overlong`: it has reached its estimate, and its second one holds from now on.
    """
    # Since it has not finished, one more token comes at least. `EVICT_SHORTEST` follows its paper,
    # where the estimate rises to what has been produced.
    if overlong:
        r.estimate = max(r.second, r.produced + 1)
    elif s.overflow == prefills.EVICT_SHORTEST:
        r.estimate = max(r.estimate, r.produced)
    elif r.produced >= r.estimate:
        r.estimate = r.produced + 1

    # The KV in its last batch, which makes the last token without caching it.
    r.peak = kv_of(r.prompt + r.estimate - 1, w.limits)
    life.evict(r, w.limits.restart)


@njit
def evict_before_batch(requests: Records, s: np.record, w: Worker, random: Generator) -> None:
    """Before the batch, evict requests that are longer than estimated, or for lack of KV.

    Evictions from ``first`` to ``overlong_end`` are of the former kind, later ones of the latter.
    No prefixes are cached here, since `Rules` that cache them have neither kind.
    """
    first = s.evicted
    kv_needed = kv_after_decodes(requests, s, w)
    if s.promote:
        kv_needed -= _mark_overlong(requests, s, w)

    overlong_end = s.evicted
    clearing = s.overflow == prefills.CLEAR and kv_needed > w.limits.kv_capacity
    if clearing:
        _mark_drawn(requests, s, w, random)
    elif s.overflow == prefills.EVICT_SHORTEST:
        _mark_shortest(requests, s, w, kv_needed, random)

    # What is evicted is there until the next batch begins. If KV would now come to the first that
    # waits, and nobody is here to run, there is no such batch: then nobody is evicted.
    would_pull = s.evicted > first and s.waiting > 0 and ledger.is_elsewhere(requests[w.heap[0]])
    if would_pull and ledger.none_is_here(requests, w.running, s):
        for k in range(first, s.evicted):
            requests[w.evicted[k]].leaving = False

        s.evicted, clearing = first, False

    # They wait again by the scheduler's rule, but promoted ones behind all others, in turn.
    for k in range(first, s.evicted):
        i = w.evicted[k]
        r = requests[i]
        free(requests, i, s, w, None)  # with the estimate by which it was counted
        _correct_estimate(r, s, w, k < overlong_end)
        if k < overlong_end:
            r.promoted, r.band, r.key, r.place = True, 1, 0.0, s.counter
            s.counter += 1
            push(requests, w.heap, s, i)
        else:
            queues.enter(requests, s, w, i, random)

    if s.evicted > first:
        common.remove_leaving(requests, w.running, s)

    s.stall = False
    if clearing:
        _count_clearing(requests, s, w)


@njit
def _count_clearing(requests: Records, s: np.record, w: Worker) -> None:
    """Count a clearing, and end the loop if clearings would go on for ever.

    If what was cleared is not enough (``s.stall``), time passes as for a batch, and the next turn
    clears again.
    """
    stalled = s.clearings >= MAX_STALLED_CLEARINGS
    s.clearings += 1
    s.stall = kv_after_decodes(requests, s, w) > w.limits.kv_capacity
    if stalled:
        s.outcome = common.STALLED
    elif s.beta >= 1.0 and s.admission in (prefills.PRESENT, prefills.PROTECT):
        # Nothing is drawn, and the admission looks at no estimate, which a clearing may raise. If
        # all were cleared before with as many requests done and arrived, the same will happen
        # again.
        if s.cleared_at == s.done + s.arrived:
            s.outcome, s.about = common.LOOP, w.heap[0]

        s.cleared_at = s.done + s.arrived


@njit(allocates=False)
def _evict(requests: Records, victim: int, s: np.record, w: Worker, cache: Store) -> None:
    """Evict a running request that is not in the batch."""
    r = requests[victim]
    r.leaving = True
    s.lost += 1
    if r.produced >= r.estimate:  # `decide` has projected one step of a request past its estimate
        project_steps(s, w, r, 1, -1)  # one step, which is removed

    free(requests, victim, s, w, cache)
    add_eviction(w.evicted, s, victim)


@njit(allocates=False)
def pause_prefills(requests: Records, i: int, s: np.record, w: Worker, cache: Store) -> None:
    """Evict all prefills that are not in the batch but request i (-1: none is spared).

    Little is lost, since the cache has their blocks.
    """
    for k in range(s.running):
        victim = w.running[k]
        r = requests[victim]
        # Batches are numbered from 1, and the one that is being formed has not been counted.
        if not (r.decoding or r.leaving or r.in_batch == s.batches + 1 or victim == i):
            _evict(requests, victim, s, w, cache)


@njit(allocates=False)
def make_room(requests: Records, i: int, s: np.record, w: Worker, cache: Store) -> None:
    """Evict running requests of lowest priority until request i can decode, itself last.

    The running requests stand by priority, so the search begins at the end. Where i itself is
    evicted, ``leaving`` tells the caller.
    """
    needed = growth(requests[i], 1, w.limits)
    k = s.running - 1

    # A request that is passed over stays so, and the search goes on where it stopped.
    while not has_room(s, needed, w.limits):
        # Nobody may go who leaves already, whose KV is on its way, or who is in this batch.
        while k >= 0:
            victim = w.running[k]
            r = requests[victim]
            if victim != i and not r.leaving and ledger.is_here(r) and r.in_batch != s.batches + 1:
                break

            k -= 1

        if k < 0:  # nobody else can go
            victim = i

        _evict(requests, victim, s, w, cache)
        if victim == i:
            break
