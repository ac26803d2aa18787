"""Runs `optsched.policies.vllm_v1.VllmV1` step by step.

This loop differs from `optsched.policies.engine.rules` in three things. Running requests stand in
the order of their admission. KV is allocated chunk by chunk and not for the whole input. And a
request that is preempted may already have its place in the step. Where requests share prefixes,
`optsched.policies.engine.blocks` says what they find.
"""

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, beyond, growth, room
from optsched.judge.replay import Limits
from optsched.policies.engine import blocks, common, ledger
from optsched.policies.engine.blocks import Cache, Store
from optsched.policies.engine.common import REQUEST, REUSED, TOKENS, Worker, add_entry, push
from optsched.problem.kernel import njit

REQUEST_FIELDS = (
    *common.FIELDS,
    ("tokens", np.int64),  # that the step processes
)

# Where prefixes are cached. The others come last: numba would take a record with fields added at
# the end for one without.
CACHE_FIELDS = (
    ("reused", np.int64),  # tokens that it finds in the cache in the step
    ("row", np.int64),  # of the cache's table, while it runs; or -1
    ("rank", np.int64),  # by release
    # Name of a block that it computes and others may wait for, or -1; or blocks that it finds.
    ("mates", np.int64),
    ("begun", np.int64),  # prefill tokens that were processed before it began to wait
    *REQUEST_FIELDS,
)

STATE_FIELDS = (
    *MEMORY,
    *blocks.STATE,
    ("left", np.int64),  # tokens of the step's budget
    ("prefill_left", np.int64),  # of them for prefills
    ("steps", np.int64),  # since the engine was idle
    ("line", np.int64),  # requests that have begun to wait at the end of the line
    ("front", np.int64),  # and at its front
    ("decodes", np.int64),  # in the step
    ("prefills", np.int64),
    ("threshold", np.int64),  # max tokens of a request in the step; 0: no limit
    ("defer", np.bool_),  # whether prefills wait for a later step
    ("bound", np.bool_),  # requests were left waiting when prefills were last scheduled
    ("prefilled", np.int64),  # tokens of prefills so far
    # What `VllmV1` says:
    ("budget", np.int64),  # tokens of a step
    ("long_prefill", np.int64),  # max tokens of one prefill in it
    ("watermark", np.int64),  # KV tokens
    ("reserve", np.bool_),
    ("interval", np.int64),
    ("order", np.int64),
)

# Orders of waiting requests. The last three, SGLang's, go by what each would find in the cache.
FCFS, BY_PRIORITY, LPM, SHORTEST_PREFILL, HRRN = range(5)

# With more waiting requests than this, ``lpm`` and ``hrrn`` are first come, first served.
MAX_MATCHED = 128
# Of those that find no more tokens than this and share as many, all but the first are put back.
MIN_SHARED = 32


@njit(allocates=False)
def _wait(requests: Records, s: np.record, heap: Ints, i: int, back: bool) -> None:
    """Let a request wait: at its priority, or at the end or the front of the line."""
    r = requests[i]
    if s.order == BY_PRIORITY:
        r.key, r.place = r.order, r.seq
    elif back:
        s.line += 1
        r.place = s.line
    else:
        s.front -= 1
        r.place = s.front

    push(requests, heap, s, i)


@njit(allocates=False)
def _sort(requests: Records, s: np.record, heap: Ints, cache: Cache) -> None:
    """Sort waiting requests by what each would find now, as SGLang does before every batch."""
    size, deep = s.waiting, -(-MIN_SHARED // cache.block)
    exact = size <= MAX_MATCHED or s.order == SHORTEST_PREFILL
    for k in range(size):
        i = heap[k]
        r = requests[i]
        r.key, r.mates = 0.0, -1
        if not exact:
            continue

        asked = life.rest_of(r)
        found = blocks.find(cache, i, (asked - 1) // cache.block) * cache.block
        if s.order == LPM:
            r.key = -found
        elif s.order == SHORTEST_PREFILL:
            r.key = asked - found
        else:
            r.key = -(s.prefilled - r.begun) / (r.prompt - found) if found < r.prompt else -np.inf
        if found <= MIN_SHARED and asked >= deep * cache.block:
            r.mates = blocks.name_of(cache, i, deep - 1)
            cache.leader[r.mates] = -1

    for k in range(size):
        r = requests[heap[k]]
        if r.mates >= 0:
            leader = cache.leader[r.mates]
            if leader < 0 or r.place < requests[leader].place:
                cache.leader[r.mates] = heap[k]

    # Of those that share what the cache lacks, the first computes it, and the others find it later.
    # The heap is built anew in its own array: a push writes to no place still to be read.
    s.waiting = 0
    for k in range(size):
        r = requests[heap[k]]
        r.band = r.mates >= 0 and cache.leader[r.mates] != heap[k]
        push(requests, heap, s, heap[k])


@njit(allocates=False)
def _begin(requests: Records, s: np.record, running: Ints, limits: Limits) -> None:
    """Begin a step with its budget, and say whether it defers prefills."""
    s.left, s.prefill_left = s.budget, limits.max_prefill_tokens
    s.decodes = s.prefills = 0
    s.threshold = s.long_prefill if s.running + s.waiting > 1 else 0
    s.defer = False
    if s.steps % s.interval > 0 and not s.bound:
        # Prefills wait for the sake of decodes, and if nobody decodes there is no reason to.
        for k in range(s.running):
            s.defer = s.defer or requests[running[k]].decoding


@njit(allocates=False)
def _share(r: np.record, s: np.record, limits: Limits) -> int:
    """Return how many tokens of a request the step takes; 0 if none."""
    tokens = life.tokens_of_step(limits.drafts) if r.decoding else life.rest_of(r)
    if 0 < s.threshold < tokens:
        tokens = s.threshold
    if not limits.hybrid and (s.prefills if r.decoding else s.decodes) > 0:
        return 0
    if r.decoding:
        return min(tokens, s.left)

    room = min(s.left, s.prefill_left)
    if limits.chunked:
        return min(tokens, room)
    if s.decodes + s.prefills == 0:  # what is longer than the budget runs alone
        room = min(limits.max_batch_tokens, limits.max_prefill_tokens)

    return tokens if tokens <= room else 0


@njit(allocates=False)
def _give(r: np.record, s: np.record, tokens: int, sign: int) -> None:
    """Give a request tokens of the step, or with sign -1 take them back."""
    s.left -= sign * tokens
    if r.decoding:
        s.decodes += sign
    else:
        s.prefills += sign
        s.prefill_left -= sign * tokens

    r.tokens = tokens if sign > 0 else 0


@njit(allocates=False)
def _preempt(requests: Records, s: np.record, at: Worker, cache: Store) -> int:
    """Preempt the last running request, or the one of lowest priority; return its position."""
    running, last = at.lines[1], s.running - 1
    while not ledger.is_here(requests[running[last]]):  # KV on its way is not sent back
        last -= 1
    if s.order == BY_PRIORITY:
        for k in range(s.running):
            r = requests[running[k]]
            if ledger.is_here(r) and common.ahead(requests[running[last]], r):
                last = k

    i = running[last]
    r = requests[i]
    blocks.free(requests, i, s, at.limits, cache)
    if cache is not None:
        r.begun = s.prefilled
    if r.tokens > 0:
        _give(r, s, r.tokens, -1)

    life.evict(r, at.limits.restart)
    common.add_eviction(at.columns.evicted, s, i)
    # The order of admission stays, since it decides who is preempted next.
    for k in range(last, s.running - 1):
        running[k] = running[k + 1]

    s.running -= 1
    _wait(requests, s, at.lines[0], i, False)
    return int(last)


@njit(allocates=False)
def _schedule_running(requests: Records, s: np.record, at: Worker, cache: Store) -> None:
    """Give running requests their tokens. Preempt others, and at last itself, for want of KV."""
    running, limits, k = at.lines[1], at.limits, 0
    while k < s.running and s.left > 0:
        r = requests[running[k]]
        waits = not ledger.is_here(r) or (s.defer and not r.decoding)
        tokens = 0 if waits else _share(r, s, limits)
        if tokens == 0:
            k += 1
            continue

        more = beyond(r, tokens, limits)
        while not room(s, growth(r, more, limits), limits):
            gone = _preempt(requests, s, at, cache)
            # As in vLLM, a request that preempts itself ends the turn of those that run.
            if gone == k:
                return
            if gone < k:
                k -= 1

        _give(r, s, tokens, 1)
        blocks.take(r, running[k], s, more, limits, cache)
        k += 1


@njit(allocates=False)
def _admit(requests: Records, s: np.record, at: Worker, cache: Store) -> None:
    """Admit waiting requests, up to the first that must wait on."""
    heap, running, limits = at.lines[0], at.lines[1], at.limits
    while s.left > 0 and s.waiting > 0 and s.running < limits.max_running:
        i = heap[0]
        r, comes = requests[i], ledger.comes(requests[i])
        ledger.look_up(r, i, cache)
        size = life.rest_of(r)
        tokens = 0 if comes or (s.defer and size > 1) else _share(r, s, limits)
        kept = r.cached + (size if s.reserve else 1 if comes else tokens)
        kv = ledger.admission_kv(r, i, s, kept, limits, cache)
        if s.running > 0:
            kv += s.watermark

        # Whatever the order is, nobody overtakes the first that must wait on.
        if (tokens == 0 and not comes) or not room(s, kv, limits) or not ledger.may_come(r, s):
            ledger.forget(r, cache)
            break

        common.pop(requests, heap, s)
        running[s.running] = i
        s.running += 1
        if not comes:
            _give(r, s, tokens, 1)

        ledger.admit(r, i, s, r.cached if comes else tokens, limits, cache)

    if not s.defer:
        s.bound = s.waiting > 0


@njit(allocates=False)
def _entries(requests: Records, s: np.record, at: Worker, cache: Store) -> Sums:
    """Write the entries of a batch; return its sums."""
    sums, running, entries = EMPTY, at.lines[1], at.columns.entries
    s.latest = 0.0
    for k in range(s.running):
        r = requests[running[k]]
        if r.tokens == 0:
            continue
        if r.decoding:
            sums = add_decode(sums, r.cached, r.tokens)
        else:
            sums = add_prefill(sums, r.tokens, r.cached)

        s.latest = max(s.latest, r.release)
        if cache is not None:
            entries[REUSED, s.entries] = r.reused
            r.reused = 0

        add_entry(entries, s, running[k], r.tokens)

    return sums


@njit(allocates=False)
def _process(requests: Records, s: np.record, at: Worker, first: int, cache: Store) -> None:
    """Process the entries of a batch from ``first`` on."""
    finished, entries = 0, at.columns.entries
    for k in range(first, s.entries):
        i = entries[REQUEST, k]
        r = requests[i]
        r.tokens = 0
        if life.advance(r, entries[TOKENS, k], i, at.limits.drafts) and common.note(r, s):
            finished += 1
            blocks.free(requests, i, s, at.limits, cache)

    common.after_batch(requests, at.lines[1], s, finished)


@njit(allocates=False)
def run(requests: Records, state: Records, at: Worker, cache: Store) -> None:
    """Run the policy until the requests assigned so far have finished, or up to a time.

    The running ones stand by admission.
    """
    s = state[0]
    while True:
        new = common.turn(requests, s, at)
        if new < 0:
            return
        if s.running == 0 and s.waiting == 0:  # it was idle, even if they are just arriving
            s.steps = 0
        for k in range(s.arrived - new, s.arrived):
            _wait(requests, s, at.lines[0], at.coming[k], True)
            if cache is not None:
                requests[at.coming[k]].begun = s.prefilled

        _begin(requests, s, at.lines[1], at.limits)
        if cache is not None and cache.ttl > 0:
            blocks.expire(s, cache)
        if cache is not None and s.order >= LPM:
            _sort(requests, s, at.lines[0], cache)

        first, before = s.entries, s.evicted
        _schedule_running(requests, s, at, cache)
        if s.evicted == before:
            _admit(requests, s, at, cache)

        s.steps += 1
        sums = _entries(requests, s, at, cache)
        if sums.tokens > 0:
            s.prefilled += sums.prefill_tokens
            common.run_batch(at.columns.batches, s, batch_time(at.cost, sums))
            _process(requests, s, at, first, cache)
        elif s.evicted == before:
            about = at.lines[0, 0] if s.waiting > 0 else at.lines[1, 0]
            if not common.waits(requests, s, at, about):
                return
