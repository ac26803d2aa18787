"""Runs `optsched.policies.vllm_v1.VllmV1` step by step.

This loop differs from `optsched.policies.engine.rules` in three things. Running requests stand in
the order of their admission. KV is allocated chunk by chunk and not for the whole input. And a
request that is preempted may already have its place in the step. Where requests share prefixes,
`optsched.policies.engine.blocks` says what they find. Line 0 of a worker (``w.lines[0]``) is the
queue, a heap, and line 1 has the running requests. `requests` and the state `s` are records, whose
fields stand in `REQUEST_FIELDS`, `CACHE_FIELDS` and `STATE_FIELDS`.
"""

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, beyond, growth, has_room
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
    # Name of a block that the cache lacks and that others may share, or -1, see `_sort_by_cache`.
    ("shared_name", np.int64),
    ("work_before", np.int64),  # prefill tokens that the engine had processed when it began to wait
    *REQUEST_FIELDS,
)

STATE_FIELDS = (
    *MEMORY,
    *blocks.STATE,
    ("budget_left", np.int64),  # tokens of the step's budget
    ("prefill_left", np.int64),  # of them for prefills
    ("steps", np.int64),  # since the engine was idle
    ("queue_end", np.int64),  # place of the latest request that began to wait at the end
    ("queue_front", np.int64),  # of the latest one that did so at the front, below all others
    ("decodes", np.int64),  # in the step
    ("prefills", np.int64),
    ("threshold", np.int64),  # max tokens of a request in the step; 0: no limit
    ("defer", np.bool_),  # whether prefills wait for a later step
    ("left_waiting", np.bool_),  # requests were left waiting when prefills were last scheduled
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
# Of requests that find at most so many tokens, and share as many, only the first keeps its place.
MIN_SHARED = 32


@njit(allocates=False)
def _enqueue(requests: Records, s: np.record, heap: Ints, i: int, back: bool) -> None:
    """Let a request wait: by its priority, or at the end or the front of the queue.

    The queue is sorted by ``band``, ``key`` and ``place``. Places at the front are below 0.
    """
    r = requests[i]
    if s.order == BY_PRIORITY:
        r.key, r.place = r.order, r.seq
    elif back:
        s.queue_end += 1
        r.place = s.queue_end
    else:
        s.queue_front -= 1
        r.place = s.queue_front

    push(requests, heap, s, i)


@njit(allocates=False)
def _sort_by_cache(requests: Records, s: np.record, heap: Ints, cache: Cache) -> None:
    """Sort waiting requests by what each would find now, as SGLang does before every batch.

    The lowest key goes first. Then requests of the same `MIN_SHARED` first tokens, which the cache
    lacks, stand behind all others but for the first of them: band 1. ``cache.leader`` has this
    first one by the name of their last shared block; -1: nobody yet.
    """
    size, min_blocks = s.waiting, -(-MIN_SHARED // cache.block)  # whole blocks, rounded up
    # Else all keys are 0, and the place decides: first come, first served.
    by_match = size <= MAX_MATCHED or s.order == SHORTEST_PREFILL
    for k in range(size):
        i = heap[k]
        r = requests[i]
        r.key, r.shared_name = 0.0, -1
        if not by_match:
            continue

        # Whoever waits holds no KV, so this is the whole input. Its last token is computed anyway.
        input_left = life.rest_of(r)
        cached = blocks.cached_blocks(cache, i, (input_left - 1) // cache.block) * cache.block
        if s.order == LPM:
            r.key = -cached
        elif s.order == SHORTEST_PREFILL:
            r.key = input_left - cached
        elif cached < r.prompt:  # the response ratio: prefills that it has waited for, over its own
            r.key = -(s.prefilled - r.work_before) / (r.prompt - cached)
        else:  # it has no prefill of its own, and so goes first
            r.key = -np.inf
        # Requests share their first blocks if the last of these has the same name.
        if cached <= MIN_SHARED and input_left >= min_blocks * cache.block:
            r.shared_name = blocks.name_of(cache, i, min_blocks - 1)
            cache.leader[r.shared_name] = -1

    for k in range(size):
        r = requests[heap[k]]
        if r.shared_name >= 0:
            leader = cache.leader[r.shared_name]
            if leader < 0 or r.place < requests[leader].place:
                cache.leader[r.shared_name] = heap[k]

    # Of requests that share what the cache lacks, the first computes it, and the others find it.
    # The heap is built anew in its own array: a push writes to no place still to be read.
    s.waiting = 0
    for k in range(size):
        r = requests[heap[k]]
        r.band = r.shared_name >= 0 and cache.leader[r.shared_name] != heap[k]
        push(requests, heap, s, heap[k])


@njit(allocates=False)
def _begin_step(requests: Records, s: np.record, running: Ints, limits: Limits) -> None:
    """Begin a step: set its budget, and decide whether it defers prefills (``s.defer``).

    Prefills run in every ``interval``-th step since the engine was idle. The steps between defer
    them, unless the last step with prefills left requests waiting (``left_waiting``, by `_admit`).
    """
    s.budget_left, s.prefill_left = s.budget, limits.max_prefill_tokens
    s.decodes = s.prefills = 0
    # A request that is alone has the whole step, however long its prefill is.
    s.threshold = s.long_prefill if s.running + s.waiting > 1 else 0
    s.defer = False
    if s.steps % s.interval > 0 and not s.left_waiting:
        # Prefills wait for the sake of decodes, so they do not if nobody decodes.
        for k in range(s.running):
            s.defer = s.defer or requests[running[k]].decoding


@njit(allocates=False)
def _tokens_in_step(r: np.record, s: np.record, limits: Limits) -> int:
    """Return how many tokens of a request the step takes; 0 if none.

    A request asks for one token, with drafts for more, or for the rest of its input. A threshold
    of 0 is none. ``s.decodes`` and ``s.prefills`` count the requests that have got tokens so far.
    """
    tokens = life.tokens_of_step(limits.drafts) if r.decoding else life.rest_of(r)
    if 0 < s.threshold < tokens:
        tokens = s.threshold
    if not limits.hybrid and (s.prefills if r.decoding else s.decodes) > 0:
        return 0  # the step is of the other phase
    if r.decoding:
        return min(tokens, s.budget_left)

    limit = min(s.budget_left, s.prefill_left)
    if limits.chunked:
        return min(tokens, limit)
    if s.decodes + s.prefills == 0:  # a prefill beyond the step's own budget runs alone
        limit = min(limits.max_batch_tokens, limits.max_prefill_tokens)

    return tokens if tokens <= limit else 0


@njit(allocates=False)
def _grant(r: np.record, s: np.record, tokens: int, sign: int) -> None:
    """Grant a request tokens of the step, or with sign -1 take them back."""
    s.budget_left -= sign * tokens
    if r.decoding:
        s.decodes += sign
    else:
        s.prefills += sign
        s.prefill_left -= sign * tokens

    r.tokens = tokens if sign > 0 else 0


@njit(allocates=False)
def _preempt(requests: Records, s: np.record, w: Worker, cache: Store) -> int:
    """Preempt the last running request, or the one of lowest priority; return its position."""
    running, victim = w.lines[1], s.running - 1
    # KV on its way is not sent back. That of whoever asks is here, so somebody is found.
    while not ledger.is_here(requests[running[victim]]):
        victim -= 1
    if s.order == BY_PRIORITY:
        for k in range(s.running):
            r = requests[running[k]]
            if ledger.is_here(r) and common.outranks(requests[running[victim]], r):
                victim = k

    i = running[victim]
    r = requests[i]
    blocks.free(requests, i, s, w.limits, cache)
    if cache is not None:  # it begins to wait anew
        r.work_before = s.prefilled
    if r.tokens > 0:  # it already had its place in the step
        _grant(r, s, r.tokens, -1)

    life.evict(r, w.limits.restart)
    common.add_eviction(w.columns.evicted, s, i)
    # The order of admission stays, since it decides who is preempted next.
    for k in range(victim, s.running - 1):
        running[k] = running[k + 1]

    s.running -= 1
    _enqueue(requests, s, w.lines[0], i, False)  # at the front
    return int(victim)


@njit(allocates=False)
def _schedule_running(requests: Records, s: np.record, w: Worker, cache: Store) -> None:
    """Grant running requests their tokens, in the order of their admission.

    For want of KV a request preempts others, and itself if it is the last.
    """
    running, limits, k = w.lines[1], w.limits, 0
    while k < s.running and s.budget_left > 0:
        r = requests[running[k]]
        # Its KV is on its way, or the step defers prefills and has tokens for decodes only.
        waits = not ledger.is_here(r) or (s.defer and not r.decoding)
        tokens = 0 if waits else _tokens_in_step(r, s, limits)
        if tokens == 0:
            k += 1
            continue

        # Tokens that need room. That of drafts which were not accepted is used again.
        more = beyond(r, tokens, limits)
        while not has_room(s, growth(r, more, limits), limits):
            preempted = _preempt(requests, s, w, cache)
            # As in vLLM, a request that preempts itself ends the schedule of running requests.
            if preempted == k:
                return
            if preempted < k:  # the list has moved up
                k -= 1

        _grant(r, s, tokens, 1)  # 1: they are given, and not taken back
        blocks.take(r, running[k], s, more, limits, cache)
        k += 1


@njit(allocates=False)
def _admit(requests: Records, s: np.record, w: Worker, cache: Store) -> None:
    """Admit waiting requests, up to the first that must wait on.

    Whatever the order is, nobody overtakes that one. ``s.left_waiting`` notes for `_begin_step`
    whether somebody waits on: then the next step prefills too, whatever the interval is.
    """
    heap, running, limits = w.lines[0], w.lines[1], w.limits
    while s.budget_left > 0 and s.waiting > 0 and s.running < limits.max_running:
        i = heap[0]
        # `elsewhere`: prefilled on another machine. It is admitted so that its KV can come, which
        # takes room from now on and no tokens of the step.
        r, elsewhere = requests[i], ledger.is_elsewhere(requests[i])
        ledger.look_up_prefix(r, i, cache)
        rest = life.rest_of(r)
        # A step that defers prefills (`_begin_step`) takes only one of a single token.
        waits = elsewhere or (s.defer and rest > 1)
        tokens = 0 if waits else _tokens_in_step(r, s, limits)
        # With a reserve there must be KV for the whole input, though only the tokens take it now.
        ahead = 1 if elsewhere else tokens
        ahead = rest if s.reserve else ahead
        kv = ledger.admission_kv(r, i, s, r.cached + ahead, limits, cache)
        # The watermark stays free for requests that run, so it counts only if there are some.
        if s.running > 0:
            kv += s.watermark
        gets_none = tokens == 0 and not elsewhere
        if gets_none or not has_room(s, kv, limits) or not ledger.may_pull(r, s):
            ledger.forget_prefix(r, cache)
            break

        common.pop(requests, heap, s)
        running[s.running] = i
        s.running += 1
        if not elsewhere:
            _grant(r, s, tokens, 1)

        ledger.admit(r, i, s, r.cached if elsewhere else tokens, limits, cache)

    # Only a step that schedules prefills says whether they left requests waiting.
    if not s.defer:
        s.left_waiting = s.waiting > 0


@njit(allocates=False)
def _write_entries(requests: Records, s: np.record, w: Worker, cache: Store) -> Sums:
    """Write the entries of running requests that were granted tokens; return the batch's sums."""
    sums, running, entries = EMPTY, w.lines[1], w.columns.entries
    s.latest = 0.0  # the last release of a request in the batch
    for k in range(s.running):
        r = requests[running[k]]
        if r.tokens == 0:
            continue
        if r.decoding:
            sums = add_decode(sums, r.cached, r.tokens)
        else:
            sums = add_prefill(sums, r.tokens, r.cached)

        s.latest = max(s.latest, r.release)
        if cache is not None:  # what it claims counts in its first batch alone
            entries[REUSED, s.entries] = r.reused
            r.reused = 0

        add_entry(entries, s, running[k], r.tokens)

    return sums


@njit(allocates=False)
def _process(requests: Records, s: np.record, w: Worker, first: int, cache: Store) -> None:
    """Process the entries of a batch, which are those from ``first`` on."""
    finished, entries = 0, w.columns.entries
    for k in range(first, s.entries):
        i = entries[REQUEST, k]
        r = requests[i]
        r.tokens = 0  # for the next step
        if life.advance(r, entries[TOKENS, k], i, w.limits.drafts) and common.note_token(r, s):
            finished += 1
            blocks.free(requests, i, s, w.limits, cache)

    common.after_batch(requests, w.lines[1], s, finished)


@njit(allocates=False)
def run(requests: Records, state: Records, w: Worker, cache: Store) -> None:
    """Run the policy until the requests assigned so far have finished, or up to a time.

    A turn is a step of vLLM: running requests are scheduled, then waiting ones unless somebody was
    preempted. Without tokens it is repeated after a preemption, else time passes.
    """
    s = state[0]
    while True:
        new = common.take_arrivals(requests, s, w)  # how many have come; -1: return
        if new < 0:
            return
        # The engine was idle until the requests that are just arriving: steps are counted anew, of
        # which every ``interval``-th runs prefills.
        if s.running == 0 and s.waiting == 0:
            s.steps = 0
        for k in range(s.arrived - new, s.arrived):
            _enqueue(requests, s, w.lines[0], w.coming[k], True)  # at the end
            if cache is not None:
                requests[w.coming[k]].work_before = s.prefilled

        _begin_step(requests, s, w.lines[1], w.limits)
        if cache is not None and cache.ttl > 0:
            blocks.expire(s, cache)
        if cache is not None and s.order >= LPM:  # an order by what is cached
            _sort_by_cache(requests, s, w.lines[0], cache)

        first = s.entries
        evicted_before = s.evicted
        _schedule_running(requests, s, w, cache)
        if s.evicted == evicted_before:
            _admit(requests, s, w, cache)

        s.steps += 1
        sums = _write_entries(requests, s, w, cache)
        if sums.tokens > 0:
            s.prefilled += sums.prefill_tokens
            common.run_batch(w.columns.batches, s, batch_time(w.cost, sums))
            _process(requests, s, w, first, cache)
        elif s.evicted == evicted_before:
            about = w.lines[0, 0] if s.waiting > 0 else w.lines[1, 0]
            if not common.let_time_pass(requests, s, w, about):
                return
