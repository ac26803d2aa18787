"""Runs any `Rules` batch by batch.

Where prefixes are cached (`optsched.policies.engine.blocks`), waiting requests stand in the order
of the prefill that the cache leaves them, and `cached` has what each would find.
"""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.costs.batch import Sums
from optsched.judge import life, memory
from optsched.judge.life import EMPTY, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import growth, project, room, take
from optsched.policies.engine import blocks, common, evictions, ledger, prefills, queues
from optsched.policies.engine.blocks import Store
from optsched.policies.engine.common import REQUEST, REUSED, TOKENS, add_entry, push
from optsched.policies.engine.prefills import ALL, PREFILL, REFUSED, WAITING, Worker, is_ahead
from optsched.problem.kernel import njit

MAX_EMPTY = 0.125
"""Of those that run, how many others may have ended while prefills wait for each other."""


@njit(allocates=False, forceinline=True)
def _all_decode(requests: Records, s: np.record, at: Worker, sums: Sums) -> bool:
    """Whether every running request can decode, so that none of them need be looked at."""
    if s.partial > 0 or s.holding or s.closed:
        return False
    if not at.limits.hybrid and sums.prefill_requests > 0:
        return False
    if sums.tokens + s.running > min(at.limits.max_batch_tokens, s.max_batch_tokens):
        return False

    return evictions.kv_after_decodes(requests, s, at) <= at.limits.kv_capacity


@njit(allocates=False, forceinline=True)
def _decode_all(requests: Records, s: np.record, at: Worker, sums: Sums, cache: Store) -> Sums:
    """Let every running request decode; return the sums. Nearly all batches do only this."""
    first, latest = s.entries, s.latest
    for k in range(s.running):
        r = requests[at.running[k]]
        latest = max(latest, r.release)
        at.entries[REQUEST, first + k] = at.running[k]
        at.entries[TOKENS, first + k] = 1
        sums = add_decode(sums, r.cached)
        if cache is None:
            take(s, r, 1, at.limits)
        else:
            at.entries[REUSED, first + k] = 0
            blocks.take(r, at.running[k], s, 1, at.limits, cache)

    s.latest = latest
    s.entries += s.running
    return sums


@njit(allocates=False)
def _next_prefill(
    requests: Records, s: np.record, at: Worker, waits: bool, gate: float, cache: Store
) -> int:
    """Return the place among the running ones of the prefill with least work left.

    -1 stands for the first waiting request, where these are looked at, and -2 for none. With a
    gate, a prefill that takes longer is none.
    """
    found, least, alone = -2, np.inf, np.inf
    for k in range(s.running if s.partial > 0 else 0):
        r = requests[at.running[k]]
        if r.gone or not ledger.prefills(r) or r.in_batch == s.batches + 1:
            continue

        rest = prefills.alone(r, at.cost)
        if rest + r.later < least:
            found, least, alone = k, rest + r.later, rest

    if waits and s.waiting > 0:
        r = requests[at.heap[0]]
        ledger.look_up(r, at.heap[0], cache)
        rest = prefills.alone(r, at.cost)
        if rest + r.later < least:
            found, alone = -1, rest

    return found if alone <= gate else -2


@njit(allocates=False)
def _admissible(requests: Records, i: int, s: np.record, at: Worker, cache: Store) -> bool:
    """Return whether a waiting request may join the batch."""
    r = requests[i]
    size = s.running - s.lost + s.admitted + 1
    needed = ledger.admission_kv(r, i, s, r.prompt + r.produced, at.limits, cache)
    if size > at.limits.max_running or not room(s, needed, at.limits):
        return False
    if not ledger.may_come(r, s, s.lost):
        return False
    if s.sorting == prefills.IN_GROUPS and r.band > 0:  # too few of its group wait
        return False
    if s.admission == prefills.RESERVE:
        return bool(s.reserved + r.peak <= at.limits.kv_capacity)
    if s.admission == prefills.PROTECT:
        alone = s.held == 0 and s.overflow == prefills.EVICT_LATEST
        spare = s.held + needed <= s.threshold or alone
        return bool(spare and size <= at.limits.max_batch_tokens)
    if s.admission == prefills.LOOKAHEAD:
        if s.over > 0 or size > at.limits.max_batch_tokens:
            return False

        steps = r.estimate - r.produced
        return memory.fits(at.usage, s.batches, r.prompt + r.produced - 1, steps, at.limits)

    return True


@njit(allocates=False)
def _admit(requests: Records, s: np.record, at: Worker, cache: Store) -> None:
    """Admit the first waiting request."""
    i = at.heap[0]
    r = requests[i]
    common.pop(requests, at.heap, s)
    queues.leave(requests, i, s, at)
    at.running[s.running + s.admitted] = i
    s.admitted += 1
    tokens = r.prompt if ledger.comes(r) else life.rest_of(r)
    ledger.admit(r, i, s, tokens if cache is None else 0, at.limits, cache)
    s.reserved += r.peak
    evictions.reckon(s, at, r, r.estimate - r.produced, 1)


@njit(allocates=False)
def _together(requests: Records, s: np.record, at: Worker, cache: Store) -> bool:
    """Return whether as many prefills can begin as should share a batch.

    q of them wait q / 2 completions each, and delay N requests by a batch's fixed cost once. So
    q is best as in the square root law of lot sizes. KV that comes from elsewhere is no prefill.
    """
    if cache is not None or s.running == 0 or s.waiting == 0 or s.partial > 0 or s.finished == 0:
        return True
    if ledger.comes(requests[at.heap[0]]):
        return True

    delayed = prefills.delay_factor(s)[0] * (s.running + s.waiting)
    wanted = min(np.sqrt(2.0 * s.setup * s.finished / s.now * delayed), MAX_EMPTY * s.running)
    while s.admitted < wanted and s.waiting > 0:
        i = at.heap[0]
        comes = ledger.comes(requests[i])
        # KV that begins to come cannot be taken back, and all of this is a trial.
        if comes or not _admissible(requests, i, s, at, cache):
            break

        _admit(requests, s, at, cache)

    enough = s.admitted >= wanted
    # The trial is undone: the batch admits in its own order, or not at all.
    while s.admitted > 0:
        s.admitted -= 1
        i = at.running[s.running + s.admitted]
        evictions.free(requests, i, s, at, cache)
        push(requests, at.heap, s, i)

    return bool(enough)


@njit(allocates=False)
def _tokens(requests: Records, i: int, s: np.record, at: Worker, sums: Sums, cache: Store) -> int:
    """Return how many tokens of a prefill the batch takes, `PASSED_OVER` or `REFUSED`.

    One that waits must be admitted, too. Where its KV comes, it has 1.
    """
    r = requests[i]
    waits = r.allocated == 0
    c = 1 if ledger.comes(r) else prefills.size_of(r, s, sums, at.limits, at.cost)
    if cache is not None and c > 0:
        if cache.block < c < life.rest_of(r):  # others find whole blocks only
            c -= (r.cached + c) % cache.block
        if not waits and not room(s, growth(r, c, at.limits), at.limits):
            evictions.pause(requests, i, s, at, cache)
            c = c if room(s, growth(r, c, at.limits), at.limits) else REFUSED
    if c > 0 and waits and not _admissible(requests, i, s, at, cache):
        return REFUSED

    return c


@njit(allocates=False, forceinline=True)
def _put_in(r: np.record, i: int, c: int, s: np.record, at: Worker, cache: Store) -> None:
    """Put tokens of a request that runs into the batch."""
    r.in_batch = s.batches + 1
    s.latest = max(s.latest, r.release)
    if cache is not None:
        at.entries[REUSED, s.entries] = r.reused
        r.reused = 0
        blocks.take(r, i, s, c, at.limits, cache)
    elif r.decoding:  # else its input has had room from the admission on
        take(s, r, c, at.limits)

    add_entry(at.entries, s, i, c)


@njit(allocates=False)
def _prefill(
    requests: Records, i: int, c: int, s: np.record, at: Worker, sums: Sums, cache: Store
) -> Sums:
    """Put tokens of a prefill into the batch, or only admit one whose KV comes; return the sums."""
    r = requests[i]
    if r.allocated == 0:
        _admit(requests, s, at, cache)
    if not ledger.is_here(r):
        return sums

    sums = add_prefill(sums, c, r.cached)
    s.closed = not at.limits.chunked and sums.tokens > s.max_prefill_tokens
    _put_in(r, i, c, s, at, cache)
    return sums


@njit(allocates=False)
def _line(
    requests: Records, s: np.record, at: Worker, group: int, sums: Sums, cache: Store
) -> Sums:
    """Take those of a group in their order: who runs, who waits, or all of them in one line.

    Return the sums. A refusal ends the line, but in the line of all only the admissions.
    """
    max_batch = min(at.limits.max_batch_tokens, s.max_batch_tokens)
    position = s.running if group == WAITING else 0
    admits = group in (WAITING, ALL)

    while not s.closed:
        fresh = admits and s.waiting > 0
        if fresh and position < s.running:
            fresh = common.ahead(requests[at.heap[0]], requests[at.running[position]])
        if fresh:
            i = at.heap[0]
        elif position < s.running:
            i = at.running[position]
            position += 1
        else:
            break

        r = requests[i]
        if group == (prefills.RUNNING_PREFILL if r.decoding else prefills.RUNNING_DECODE):
            continue
        if r.gone or not ledger.is_here(r) or r.in_batch == s.batches + 1:
            continue

        if r.decoding:
            if is_ahead(r, s) or (sums.prefill_requests > 0 and not at.limits.hybrid):
                continue
            if sums.tokens >= max_batch:
                break
            if not room(s, growth(r, 1, at.limits), at.limits):
                evictions.make_room(requests, i, s, at, cache)
                if r.gone:
                    continue

            sums = add_decode(sums, r.cached)
            _put_in(r, i, 1, s, at, cache)
            continue

        c = _tokens(requests, i, s, at, sums, cache)
        if c > 0:
            sums = _prefill(requests, i, c, s, at, sums, cache)
        elif c == REFUSED and group != ALL:
            break
        else:
            admits = admits and not fresh

    return sums


@njit(allocates=False)
def _shortest(requests: Records, s: np.record, at: Worker, sums: Sums, cache: Store) -> Sums:
    """Take prefills in ascending work that is left: those begun, and the first that waits.

    With a gate, none may be longer; patient ones begin together, or not now. Return the sums.
    """
    gate = np.inf
    if s.partial + s.waiting > 0 and (s.patient or s.gate < np.inf):
        gate = prefills.gate_of(requests, s, at.running, at.cost)
        if s.patient and not _together(requests, s, at, cache):
            return sums

    admits = True
    while not s.closed:
        place = _next_prefill(requests, s, at, admits, gate, cache)
        if place < -1:
            break

        fresh = place == -1
        i = at.heap[0] if fresh else at.running[place]
        c = _tokens(requests, i, s, at, sums, cache)
        if c > 0:
            sums = _prefill(requests, i, c, s, at, sums, cache)
        elif fresh:
            admits = False
        else:
            # What the least work left cannot have, no longer prefill gets before it.
            break

    return sums


@njit(allocates=False, forceinline=True)
def form(requests: Records, s: np.record, at: Worker, cache: Store) -> Sums:
    """Form the next batch group by group; return its sums."""
    sums = EMPTY
    s.latest, s.closed = 0.0, False
    s.admitted = s.lost = 0
    if s.paced:
        s.time_left = prefills.time_left(requests, s, at.running)

    # The last prompt tokens of those whose KV came stand before decodes that would shut them out.
    begun = s.partial > 0 and not (at.limits.hybrid or at.limits.chunked)
    first = prefills.RUNNING_PREFILL if begun else prefills.NO_GROUP
    for group in (first, s.first_group, s.second_group, s.third_group):
        if group == PREFILL:
            sums = _shortest(requests, s, at, sums, cache)
        elif group in (prefills.RUNNING, prefills.RUNNING_DECODE) and _all_decode(
            requests, s, at, sums
        ):
            sums = _decode_all(requests, s, at, sums, cache)
        elif group != prefills.NO_GROUP:
            sums = _line(requests, s, at, group, sums, cache)

    if cache is not None and s.partial > 0 and sums.tokens > 0:
        evictions.pause(requests, -1, s, at, cache)

    return sums


@njit(allocates=False)
def _holds(requests: Records, s: np.record, at: Worker, cache: Store) -> bool:
    """Whether there are prefills for which those ahead of their pace should wait."""
    if s.partial > 0 or s.waiting == 0:
        return bool(s.partial > 0)

    s.admitted = s.lost = 0
    first = at.heap[0]
    return requests[first].band == 0 and _admissible(requests, first, s, at, cache)


@njit(allocates=False)
def _runs_before(a: np.record, b: np.record, s: np.record) -> bool:
    """Return whether request a is taken before b among the running ones."""
    return common.ahead(a, b) if s.first_group == ALL else bool(a.seq < b.seq)


@njit
def _settle(requests: Records, s: np.record, at: Worker, random: Generator) -> None:
    """Let evicted requests wait again, and sort admitted ones into the running ones by priority."""
    first, last = s.running, s.running + s.admitted
    for k in range(s.evicted - s.lost, s.evicted):
        r = requests[at.evicted[k]]
        r.gone = True
        s.partial -= not r.decoding
        life.evict(r, at.limits.restart)
        queues.enter(requests, s, at, at.evicted[k], random)

    if s.lost > 0:
        common.drop_gone(requests, at.running, s)
    # Those that run are sorted and few join at a time, so that each is inserted.
    for k in range(first, last):
        i = at.running[k]
        position = s.running
        while position > 0 and _runs_before(requests[i], requests[at.running[position - 1]], s):
            at.running[position] = at.running[position - 1]
            position -= 1

        at.running[position] = i
        s.running += 1
        s.partial += 1


@njit
def show(
    requests: Records,
    s: np.record,
    at: Worker,
    waiting: Ints,
    queued: NDArray[np.bool_],
    random: Generator,
) -> None:
    """Count in the requests that run, and let others wait, where a batch is asked for alone.

    `queued`: which of those that wait have waited before.
    """
    for k in range(s.running):
        r = requests[at.running[k]]
        r.band = 0
        size = r.prompt + r.produced
        take(s, r, max(r.cached, 0 if r.decoding else size), at.limits)
        s.reserved += r.peak
        s.partial += not r.decoding
        evictions.reckon(s, at, r, r.estimate - r.produced, 1)

    for k in range(waiting.size):
        i = waiting[k]
        # Whoever has waited before keeps the place that was drawn for it, or its place at the back.
        if queued[k] and (s.random_ties or (s.promote and requests[i].band > 0)):
            push(requests, at.heap, s, i)
        else:
            queues.enter(requests, s, at, i, random)


@njit(allocates=False)
def decide(requests: Records, s: np.record, at: Worker, random: Generator, cache: Store) -> Sums:
    """Form the next batch after the evictions that precede it; return its sums."""
    if s.overflow != prefills.EVICT_LATEST or s.promote:
        evictions.leave(requests, s, at, random)
    if s.outcome != common.DONE or s.stall:
        return EMPTY
    if s.admission == prefills.LOOKAHEAD and s.short:
        for k in range(s.running):  # one past its estimate takes a token more, whenever that is
            r = requests[at.running[k]]
            if r.produced >= r.estimate:
                evictions.reckon(s, at, r, 1, 1)

    queues.sort(requests, s, at)
    s.holding = s.paced and _holds(requests, s, at, cache)
    queues.sort_by_cache(requests, s, at, cache)
    while True:
        sums = form(requests, s, at, cache)
        if sums.tokens > 0 or not s.holding:
            return sums

        # No prefill fits for which the others should wait, so these go on.
        s.holding = False
        if s.admitted + s.lost > 0:  # KV may come to those who have just been given room
            _settle(requests, s, at, random)


@njit(allocates=False)
def _stand_still(requests: Records, s: np.record, at: Worker) -> None:
    """Let what is projected of prefills that the last batch did not complete come a batch later."""
    now = s.batches - 1
    for k in range(s.running):
        r = requests[at.running[k]]
        if r.decoding or r.gone:
            continue

        tokens, steps = r.prompt + r.produced - 1, r.estimate - r.produced
        s.over += project(at.usage, now, tokens, steps, -1, at.limits)
        s.over += project(at.usage, now, tokens, 1, 1, at.limits)
        s.over += project(at.usage, now + 1, tokens, steps, 1, at.limits)


@njit(allocates=False, forceinline=True)
def _process(requests: Records, s: np.record, at: Worker, rows: Ints, cache: Store) -> None:
    """Process the entries of a batch."""
    finished = completed = 0
    held = s.held
    for k in range(rows.shape[1]):
        r = requests[rows[REQUEST, k]]
        completed += not r.decoding
        if not life.advance(r, rows[TOKENS, k]):
            completed -= 1
            continue

        if common.note(r, s):
            finished += 1
            prefills.end(r, s, at.cost)
            evictions.free(requests, rows[REQUEST, k], s, at, cache)

    s.partial -= completed
    s.freed = held - s.held if s.make_room else 0
    if s.admission == prefills.LOOKAHEAD:
        if s.partial:
            _stand_still(requests, s, at)
        # The batch is past, so it counts no longer among the projected ones.
        s.over -= at.usage[s.batches] > at.limits.kv_capacity
    if finished > 0:
        s.clearings = 0

    common.after_batch(requests, at.running, s, finished)


@njit(allocates=False)
def run(
    requests: Records, state: Records, told: common.Worker, random: Generator, cache: Store
) -> None:
    """Run a scheduler until the requests assigned so far have finished, or up to a time.

    The projection has room for the longest request that begins in the last row of the columns.
    """
    s, entries = state[0], told.columns.entries
    lists = (told.lines[0], told.lines[1], told.usage, entries, told.columns.evicted)
    at = Worker(*lists, told.limits, told.cost)
    while True:
        new = common.turn(requests, s, told)
        if new < 0:
            return

        s.partial -= s.landed
        s.changed = s.changed or new > 0
        for k in range(s.arrived - new, s.arrived):
            queues.enter(requests, s, at, told.coming[k], random)

        first = s.entries
        sums = decide(requests, s, at, random, cache)
        if s.outcome != common.DONE:
            return
        if s.stall:  # the time of the batch that could not run
            for k in range(s.running):
                sums = add_decode(sums, requests[at.running[k]].cached)

            s.now += batch_time(at.cost, sums)
            continue

        if s.admitted + s.lost > 0:
            _settle(requests, s, at, random)
        if sums.tokens > 0:
            common.run_batch(told.columns.batches, s, batch_time(at.cost, sums))
            rows = entries[:, first : s.entries]
            _process(requests, s, at, rows, cache)
        else:
            about = at.heap[0] if s.waiting > 0 else at.running[0]
            if not common.waits(requests, s, told, about):
                return
