"""Runs any `Rules` batch by batch.

In a turn requests arrive (`queues`), running ones may leave for lack of KV (`evictions`), a batch
is formed group by group (`prefills` says how large a prefill may be), and it is processed. Where
prefixes are cached (`optsched.policies.engine.blocks`), waiting requests stand in the order of the
prefill that the cache leaves them, and their field ``cached`` has what each would find. `requests`
and the state `s` are records, whose fields stand in `prefills` as those of the worker `w` do.

A request's *seat* is its place in ``w.running``: it has one while it holds KV. While a batch is
formed, admitted requests stand behind the first ``s.running``, and evicted ones are only marked
(``leaving``); `_move_seats` then sorts the former in and takes the latter out. ``s.admitted`` and
``s.lost`` count them, and ``s.partial`` the running requests whose prefill is not complete. `sums`
is what the batch holds so far.
"""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.costs.batch import Sums
from optsched.judge import life, memory
from optsched.judge.life import EMPTY, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import growth, has_room, project, take
from optsched.policies.engine import blocks, common, evictions, ledger, prefills, queues
from optsched.policies.engine.blocks import Store
from optsched.policies.engine.common import REQUEST, REUSED, TOKENS, add_entry, push
from optsched.policies.engine.prefills import ALL, PREFILL, REFUSED, WAITING, Worker, is_ahead
from optsched.problem.kernel import njit

MAX_EMPTY = 0.125
"""Prefills wait for each other until this share of the running requests can begin together."""

FIRST_WAITING, NOBODY = -1, -2
"""What `_next_prefill` returns in place of the position of a running request."""


@njit(allocates=False, forceinline=True)
def _all_decode(requests: Records, s: np.record, w: Worker, sums: Sums) -> bool:
    """Whether every running request can decode, so that none of them need be looked at.

    None is in a prefill or ahead of its pace, tokens and KV suffice, no prefill of this batch
    must run alone (`s.closed`), and if it has prefills, the phases may mix.
    """
    if s.partial > 0 or s.holding or s.closed:
        return False
    if not w.limits.hybrid and sums.prefill_requests > 0:
        return False
    if sums.tokens + s.running > min(w.limits.max_batch_tokens, s.max_batch_tokens):
        return False

    return evictions.kv_after_decodes(requests, s, w) <= w.limits.kv_capacity


@njit(allocates=False, forceinline=True)
def _decode_all(requests: Records, s: np.record, w: Worker, sums: Sums, cache: Store) -> Sums:
    """Let every running request decode; return the sums. Nearly all batches do only this.

    It does what `_take_group` would do, without its questions.
    """
    first, latest = s.entries, s.latest  # `latest`: the last release of a request in the batch
    for k in range(s.running):
        r = requests[w.running[k]]
        latest = max(latest, r.release)
        w.entries[REQUEST, first + k] = w.running[k]
        w.entries[TOKENS, first + k] = 1
        sums = add_decode(sums, r.cached)
        if cache is None:
            take(s, r, 1, w.limits)
        else:
            w.entries[REUSED, first + k] = 0
            blocks.take(r, w.running[k], s, 1, w.limits, cache)

    s.latest = latest
    s.entries += s.running
    return sums


@njit(allocates=False)
def _next_prefill(
    requests: Records, s: np.record, w: Worker, with_waiting: bool, gate: float, cache: Store
) -> int:
    """Return the position among the running requests of the prefill with the least work left.

    `FIRST_WAITING`: it is the first waiting request, which counts only `with_waiting`. `NOBODY`:
    there is no prefill, or it takes longer than the gate, in seconds. Work is the seconds of the
    prefill and, where the order counts them, of the decodes after it (``later``, else 0).
    """
    place, least_work, prefill_s = NOBODY, np.inf, np.inf
    # Without a prefill that has begun, nobody who runs need be looked at.
    for k in range(s.running if s.partial > 0 else 0):
        r = requests[w.running[k]]
        # Evicted, in no prefill, or in this batch already, which is not counted in ``batches`` yet.
        if r.leaving or not ledger.prefills_next(r) or r.in_batch == s.batches + 1:
            continue

        own_s = prefills.time_alone(r, w.cost)
        if own_s + r.later < least_work:
            place, least_work, prefill_s = k, own_s + r.later, own_s

    if with_waiting and s.waiting > 0:
        r = requests[w.heap[0]]
        ledger.look_up_prefix(r, w.heap[0], cache)
        own_s = prefills.time_alone(r, w.cost)
        if own_s + r.later < least_work:
            place, prefill_s = FIRST_WAITING, own_s

    return place if prefill_s <= gate else NOBODY


@njit(allocates=False)
def _admissible(requests: Records, i: int, s: np.record, w: Worker, cache: Store) -> bool:
    """Return whether a waiting request may join the batch: by seats, KV and the admission rule."""
    r = requests[i]
    size = s.running - s.lost + s.admitted + 1  # requests that hold KV with it
    needed = ledger.admission_kv(r, i, s, r.prompt + r.produced, w.limits, cache)
    if size > w.limits.max_running or not has_room(s, needed, w.limits):
        return False
    # KV from another machine does not begin to come while evictions wait for their batch.
    if not ledger.may_pull(r, s, s.lost):
        return False
    if s.sorting == prefills.IN_GROUPS and r.band > 0:  # too few of its group wait
        return False
    # What the rules mean stands in `Rules`; ``"present"`` asks for no more than the above.
    if s.admission == prefills.RESERVE:  # `reserved`: the peaks of all that run
        return bool(s.reserved + r.peak <= w.limits.kv_capacity)
    if s.admission == prefills.PROTECT:
        # A request beyond the threshold runs if nobody else holds KV: else it would never run.
        alone = s.held == 0 and s.overflow == prefills.EVICT_LATEST
        spare = s.held + needed <= s.threshold or alone
        return bool(spare and size <= w.limits.max_batch_tokens)
    if s.admission == prefills.LOOKAHEAD:
        # Where some projected batch is over the capacity already, nothing more can fit. Nor where
        # a batch has no token for each: the projection has all of them take a step in every batch.
        if s.over > 0 or size > w.limits.max_batch_tokens:
            return False

        # After k steps it has cached its input and k - 1 tokens more (`memory.project`).
        steps = r.estimate - r.produced
        return memory.fits(w.usage, s.batches, r.prompt + r.produced - 1, steps, w.limits)

    return True


@njit(allocates=False)
def _admit(requests: Records, s: np.record, w: Worker, cache: Store) -> None:
    """Admit the first waiting request: it leaves the queue and takes the KV of its whole input.

    With a cache it takes its KV chunk by chunk instead, in `_add_to_batch`. Until the batch is
    formed it stands behind the running requests, and is none of them yet.
    """
    i = w.heap[0]
    r = requests[i]
    common.pop(requests, w.heap, s)
    queues.after_admission(requests, s, w)
    w.running[s.running + s.admitted] = i
    s.admitted += 1
    # KV that comes takes the room of the whole prompt, though its last token may be computed here.
    tokens = r.prompt if ledger.is_elsewhere(r) else life.rest_of(r)
    ledger.admit(r, i, s, tokens if cache is None else 0, w.limits, cache)
    s.reserved += r.peak
    evictions.project_steps(s, w, r, r.estimate - r.produced, 1)  # 1: they are added


@njit(allocates=False)
def _enough_begin(requests: Records, s: np.record, w: Worker, cache: Store) -> bool:
    """Return whether as many prefills can begin as should share a batch.

    q of them wait q / 2 completions each, and delay N requests by a batch's fixed cost (``setup``,
    in seconds) once. So q is best as in the square root law of lot sizes: sqrt(2 x fixed cost x
    completions a second x N), where ``finished / now`` is the completions a second. N counts a
    delay as often as the queue passes it on (`prefills.delay_factor`). The answer is yes where
    there is no choice to make: nobody to wait for, or a prefill that has begun.
    """
    if cache is not None or s.running == 0 or s.waiting == 0 or s.partial > 0 or s.finished == 0:
        return True
    if ledger.is_elsewhere(requests[w.heap[0]]):  # KV that comes needs no prefill
        return True

    # Of `delay_factor` only the factor is used, and not the decodes' share.
    delayed = prefills.delay_factor(s)[0] * (s.running + s.waiting)
    # At most a share of the running requests' number are waited for (`MAX_EMPTY`).
    wanted = min(np.sqrt(2.0 * s.setup * s.finished / s.now * delayed), MAX_EMPTY * s.running)
    while s.admitted < wanted and s.waiting > 0:
        i = w.heap[0]
        elsewhere = ledger.is_elsewhere(requests[i])
        # This is a trial, and KV that begins to come could not be sent back.
        if elsewhere or not _admissible(requests, i, s, w, cache):
            break

        _admit(requests, s, w, cache)

    enough = s.admitted >= wanted
    # Undo the trial: the batch admits in its own order, or not at all.
    while s.admitted > 0:
        s.admitted -= 1
        i = w.running[s.running + s.admitted]
        evictions.free(requests, i, s, w, cache)
        push(requests, w.heap, s, i)

    return bool(enough)


@njit(allocates=False)
def _prefill_tokens(
    requests: Records, i: int, s: np.record, w: Worker, sums: Sums, cache: Store
) -> int:
    """Return how many tokens of a prefill the batch takes, `PASSED_OVER` (0) or `REFUSED` (-1).

    A request that waits must be admissible, too. Where its KV comes from elsewhere, 1 stands for
    its admission. With a cache, prefills that are not in the batch may be evicted for this one.
    """
    r = requests[i]
    is_waiting = r.allocated == 0  # else it runs, and has had room from its admission on
    c = 1 if ledger.is_elsewhere(r) else prefills.prefill_size(r, s, sums, w.limits, w.cost)
    if cache is not None and c > 0:
        # A part of more than a block ends where a block does, since others find whole blocks only.
        if cache.block < c < life.rest_of(r):
            c -= (r.cached + c) % cache.block
        if not is_waiting and not has_room(s, growth(r, c, w.limits), w.limits):
            evictions.pause_prefills(requests, i, s, w, cache)
            c = c if has_room(s, growth(r, c, w.limits), w.limits) else REFUSED
    if c > 0 and is_waiting and not _admissible(requests, i, s, w, cache):
        return REFUSED

    return c


@njit(allocates=False, forceinline=True)
def _add_to_batch(r: np.record, i: int, c: int, s: np.record, w: Worker, cache: Store) -> None:
    """Put c tokens of a running request into the batch, and take the KV that they need."""
    r.in_batch = s.batches + 1  # batches are numbered from 1, and this one has not been counted
    s.latest = max(s.latest, r.release)
    if cache is not None:
        w.entries[REUSED, s.entries] = r.reused
        r.reused = 0
        blocks.take(r, i, s, c, w.limits, cache)
    elif r.decoding:  # a prefill has had room from the admission on
        take(s, r, c, w.limits)

    add_entry(w.entries, s, i, c)


@njit(allocates=False)
def _add_prefill(
    requests: Records, i: int, c: int, s: np.record, w: Worker, sums: Sums, cache: Store
) -> Sums:
    """Put tokens of a prefill into the batch, or only admit one whose KV comes; return the sums."""
    r = requests[i]
    if r.allocated == 0:  # it waits
        _admit(requests, s, w, cache)
    if not ledger.is_here(r):  # its KV has just begun to come
        return sums

    sums = add_prefill(sums, c, r.cached)
    # A prefill beyond the scheduler's own limit runs alone: nobody else joins the batch.
    s.closed = not w.limits.chunked and sums.tokens > s.max_prefill_tokens
    _add_to_batch(r, i, c, s, w, cache)
    return sums


@njit(allocates=False)
def _take_group(
    requests: Records, s: np.record, w: Worker, group: int, sums: Sums, cache: Store
) -> Sums:
    """Add requests of a group to the batch in the group's order; return the sums.

    A group has running requests, waiting ones, or all of them in one order. A refusal ends it. In
    the group of all it ends the admissions only.
    """
    max_batch = min(w.limits.max_batch_tokens, s.max_batch_tokens)
    position = s.running if group == WAITING else 0  # of the next running request to look at
    admits = group in (WAITING, ALL)

    while not s.closed:
        from_queue = admits and s.waiting > 0
        if from_queue and position < s.running:
            from_queue = common.outranks(requests[w.heap[0]], requests[w.running[position]])
        if from_queue:
            i = w.heap[0]
        elif position < s.running:
            i = w.running[position]
            position += 1
        else:
            break

        r = requests[i]
        # A group of one phase passes over requests in the other.
        if group == (prefills.RUNNING_PREFILL if r.decoding else prefills.RUNNING_DECODE):
            continue
        # Evicted, waiting for its KV, or in the batch already by an earlier group.
        if r.leaving or not ledger.is_here(r) or r.in_batch == s.batches + 1:
            continue

        if r.decoding:
            # It waits for prefills, being ahead of its pace, or the batch is of the other phase.
            if is_ahead(r, s) or (sums.prefill_requests > 0 and not w.limits.hybrid):
                continue
            if sums.tokens >= max_batch:
                break
            if not has_room(s, growth(r, 1, w.limits), w.limits):
                evictions.make_room(requests, i, s, w, cache)
                if r.leaving:  # there was nobody else to evict
                    continue

            sums = add_decode(sums, r.cached)
            _add_to_batch(r, i, 1, s, w, cache)
            continue

        c = _prefill_tokens(requests, i, s, w, sums, cache)
        if c > 0:
            sums = _add_prefill(requests, i, c, s, w, sums, cache)
        elif c == REFUSED and group != ALL:
            break
        else:
            # Nobody who waits overtakes a waiting request; a running one is passed over alone.
            admits = admits and not from_queue

    return sums


@njit(allocates=False)
def _take_shortest(requests: Records, s: np.record, w: Worker, sums: Sums, cache: Store) -> Sums:
    """Add prefills in ascending work left, begun ones and the first that waits; return the sums.

    With a gate (`prefills.gate_seconds`), none may take longer. Patient prefills begin together, or
    not now. This is the group ``"prefill"`` of `Rules`.
    """
    gate = np.inf
    if s.partial + s.waiting > 0 and (s.patient or s.gate < np.inf):
        gate = prefills.gate_seconds(requests, s, w.running, w.cost)
        if s.patient and not _enough_begin(requests, s, w, cache):
            return sums

    admits = True
    while not s.closed:
        place = _next_prefill(requests, s, w, admits, gate, cache)
        if place == NOBODY:  # nobody is left, or the one with the least work is beyond the gate
            break

        from_queue = place == FIRST_WAITING
        i = w.heap[0] if from_queue else w.running[place]
        c = _prefill_tokens(requests, i, s, w, sums, cache)
        if c > 0:
            sums = _add_prefill(requests, i, c, s, w, sums, cache)
        elif from_queue:
            admits = False  # prefills that have begun may still fit
        else:
            # No longer prefill gets the tokens that the one with the least work cannot have.
            break

    return sums


@njit(allocates=False, forceinline=True)
def form_batch(requests: Records, s: np.record, w: Worker, cache: Store) -> Sums:
    """Form the next batch group by group (`Rules` says what each group is); return its sums.

    `RUNNING` has all that run, `RUNNING_DECODE` and `RUNNING_PREFILL` those of them in one phase,
    `WAITING` the queue, each in its line's order. `PREFILL` joins the begun prefills and the first
    request that waits, and each time takes the one with the least work left.
    """
    sums = EMPTY
    # `latest`: the last release of a request in the batch, before which it cannot start. `closed`:
    # a prefill in it must run alone, so nobody else joins.
    s.latest, s.closed = 0.0, False
    s.admitted = s.lost = 0
    # Seconds that a batch with prefills may take.
    if s.paced:
        s.time_left = prefills.time_left(requests, s, w.running)

    # Where phases are apart and prefills whole, only requests whose KV came are in a prefill: of
    # their last prompt token. They go first, since a decode in the batch would shut them out.
    begun = s.partial > 0 and not (w.limits.hybrid or w.limits.chunked)
    first = prefills.RUNNING_PREFILL if begun else prefills.NO_GROUP
    for group in (first, s.first_group, s.second_group, s.third_group):
        if group == PREFILL:
            sums = _take_shortest(requests, s, w, sums, cache)
        # The short cut gives what `_take_group` would give.
        elif group in (prefills.RUNNING, prefills.RUNNING_DECODE) and _all_decode(
            requests, s, w, sums
        ):
            sums = _decode_all(requests, s, w, sums, cache)
        elif group != prefills.NO_GROUP:
            sums = _take_group(requests, s, w, group, sums, cache)

    # With a cache a prefill that gets no tokens leaves its blocks to the cache, to be found later.
    if cache is not None and s.partial > 0 and sums.tokens > 0:
        evictions.pause_prefills(requests, -1, s, w, cache)  # -1: none is spared

    return sums


@njit(allocates=False)
def _should_hold(requests: Records, s: np.record, w: Worker, cache: Store) -> bool:
    """Whether requests ahead of their pace should wait, since a prefill has begun or can begin."""
    if s.partial > 0 or s.waiting == 0:
        return bool(s.partial > 0)

    s.admitted = s.lost = 0  # no batch is being formed yet, and `_admissible` looks at these
    first = w.heap[0]
    # In a higher band it stands behind all others, such as those too late: nobody waits for these.
    return requests[first].band == 0 and _admissible(requests, first, s, w, cache)


@njit(allocates=False)
def _runs_before(a: np.record, b: np.record, s: np.record) -> bool:
    """Return whether request a is taken before b among the running ones."""
    return common.outranks(a, b) if s.first_group == ALL else bool(a.seq < b.seq)


@njit
def _move_seats(requests: Records, s: np.record, w: Worker, random: Generator) -> None:
    """Let requests that the batch evicted wait again, and sort admitted ones into the running ones.

    The ``s.admitted`` requests stand behind the running ones in their list, and the ``s.lost``
    evicted ones, whose KV is free already, still among them.
    """
    first, last = s.running, s.running + s.admitted
    # The batch's own evictions are the last in the column.
    for k in range(s.evicted - s.lost, s.evicted):
        r = requests[w.evicted[k]]
        r.leaving = True
        s.partial -= not r.decoding
        life.evict(r, w.limits.restart)
        queues.enter(requests, s, w, w.evicted[k], random)

    if s.lost > 0:
        common.remove_leaving(requests, w.running, s)
    # Running requests are sorted and few join at a time, so insertion is quick.
    for k in range(first, last):
        i = w.running[k]
        position = s.running
        while position > 0 and _runs_before(requests[i], requests[w.running[position - 1]], s):
            w.running[position] = w.running[position - 1]
            position -= 1

        w.running[position] = i
        s.running += 1
        s.partial += 1  # also where its KV comes: `run` takes off those that have `landed`


@njit
def count_in(
    requests: Records,
    s: np.record,
    w: Worker,
    waiting: Ints,
    queued: NDArray[np.bool_],
    random: Generator,
) -> None:
    """Write into the state what follows from running and waiting requests, before a single batch.

    `Stepwise` calls it, where an engine owns the loop and only asks for the next batch.
    `queued`: which of the waiting requests have waited before.
    """
    for k in range(s.running):
        r = requests[w.running[k]]
        # Whoever runs has left its place at the back: evicted again, it enters the queue anew.
        r.band = 0
        size = r.prompt + r.produced
        # A prefill has room for its whole input.
        take(s, r, max(r.cached, 0 if r.decoding else size), w.limits)
        s.reserved += r.peak
        s.partial += not r.decoding
        evictions.project_steps(s, w, r, r.estimate - r.produced, 1)  # 1: they are added

    for k in range(waiting.size):
        i = waiting[k]
        # Whoever has waited before keeps the place that was drawn for it, or its place at the back.
        if queued[k] and (s.random_ties or (s.promote and requests[i].band > 0)):
            push(requests, w.heap, s, i)
        else:
            queues.enter(requests, s, w, i, random)


@njit(allocates=False)
def decide(requests: Records, s: np.record, w: Worker, random: Generator, cache: Store) -> Sums:
    """Evict whom the overflow rule asks for, and form the next batch; return its sums.

    They are empty where the loop ends (``outcome``), where it stalls, as clearings left too little
    room (``stall``), and where nothing fits. ``holding``: requests that are ahead of their pace
    wait for prefills.
    """
    # `EVICT_LATEST` evicts while the batch is formed: before it, only `promote` has anybody leave.
    if s.overflow != prefills.EVICT_LATEST or s.promote:
        evictions.evict_before_batch(requests, s, w, random)
    if s.outcome != common.DONE or s.stall:
        return EMPTY
    if s.admission == prefills.LOOKAHEAD and s.short:
        # A request past its estimate has no steps projected. One more is, before every batch.
        for k in range(s.running):
            r = requests[w.running[k]]
            if r.produced >= r.estimate:
                evictions.project_steps(s, w, r, 1, 1)  # one step, which is added

    queues.sort(requests, s, w)
    s.holding = s.paced and _should_hold(requests, s, w, cache)
    queues.sort_by_cache(requests, s, w, cache)
    while True:
        sums = form_batch(requests, s, w, cache)
        if sums.tokens > 0 or not s.holding:
            return sums

        # No prefill fits for which the others should wait, so the batch is formed without waiting.
        s.holding = False
        if s.admitted + s.lost > 0:  # requests without tokens: those whose KV comes from elsewhere
            _move_seats(requests, s, w, random)


@njit(allocates=False)
def _delay_projection(requests: Records, s: np.record, w: Worker) -> None:
    """Move what is projected of the prefills that the last batch left incomplete a batch back.

    Each keeps its input for one batch more, and its steps follow from there. `project` takes the
    batch from which steps count, the tokens before them, their number, and 1 to add or -1 to take
    away.
    """
    now = s.batches - 1  # the last batch was to take the first of the steps that count from here
    for k in range(s.running):
        r = requests[w.running[k]]
        if r.decoding or r.leaving:
            continue

        tokens, steps = r.prompt + r.produced - 1, r.estimate - r.produced
        s.over += project(w.usage, now, tokens, steps, -1, w.limits)
        s.over += project(w.usage, now, tokens, 1, 1, w.limits)
        s.over += project(w.usage, now + 1, tokens, steps, 1, w.limits)


@njit(allocates=False, forceinline=True)
def _process(requests: Records, s: np.record, w: Worker, rows: Ints, cache: Store) -> None:
    """Process the entries of a batch, of which ``rows`` has requests and tokens.

    Tokens are noted, the KV of requests that finish is freed, and they leave the running ones.
    """
    finished = completed = 0  # requests, and prefills
    held = s.held
    for k in range(rows.shape[1]):
        r = requests[rows[REQUEST, k]]
        completed += not r.decoding
        if not life.advance(r, rows[TOKENS, k]):  # a prefill that goes on
            completed -= 1
            continue

        if common.note_token(r, s):
            finished += 1
            prefills.note_end(r, s, w.cost)
            evictions.free(requests, rows[REQUEST, k], s, w, cache)

    s.partial -= completed
    # What completions free is kept for those that wait, where the overflow rule says so.
    s.freed = held - s.held if s.make_room else 0
    if s.admission == prefills.LOOKAHEAD:
        if s.partial:
            _delay_projection(requests, s, w)
        # The batch is past, so it counts no longer among the projected ones. `run_batch` has
        # counted it, so it has the number ``s.batches``.
        s.over -= w.usage[s.batches] > w.limits.kv_capacity
    if finished > 0:
        s.clearings = 0  # they are counted since the last completion

    common.after_batch(requests, w.running, s, finished)


@njit(allocates=False)
def run(
    requests: Records, state: Records, worker: common.Worker, random: Generator, cache: Store
) -> None:
    """Run a scheduler until the requests assigned so far have finished, or up to a time.

    The worker's columns get the batches. Its ``usage``, the KV projected for each batch to come, is
    not lengthened here: `Compiled.step` makes it longer than the columns by the longest request,
    and `common.take_arrivals` ends the loop when these are full.
    """
    s, entries = state[0], worker.columns.entries
    lists = (worker.lines[0], worker.lines[1], worker.usage, entries, worker.columns.evicted)
    w = Worker(*lists, worker.limits, worker.cost)
    while True:
        new = common.take_arrivals(requests, s, worker)  # how many have come; -1: return
        if new < 0:
            return

        s.partial -= s.landed  # requests whose KV has come and that need no prefill
        s.changed = s.changed or new > 0  # with a cache, the queue must be sorted anew
        for k in range(s.arrived - new, s.arrived):
            queues.enter(requests, s, w, worker.coming[k], random)

        first = s.entries
        sums = decide(requests, s, w, random, cache)
        if s.outcome != common.DONE:
            return
        # The overflow rule ``"clear"`` has evicted too few for the others to decode. The time of
        # the batch that could not run passes, and the next turn clears again.
        if s.stall:
            for k in range(s.running):
                sums = add_decode(sums, requests[w.running[k]].cached)

            s.now += batch_time(w.cost, sums)
            continue

        if s.admitted + s.lost > 0:
            _move_seats(requests, s, w, random)
        if sums.tokens > 0:
            common.run_batch(worker.columns.batches, s, batch_time(w.cost, sums))
            rows = entries[:, first : s.entries]
            _process(requests, s, w, rows, cache)
        else:
            # The request that an error names if nothing can ever run.
            about = w.heap[0] if s.waiting > 0 else w.running[0]
            if not common.let_time_pass(requests, s, worker, about):
                return
