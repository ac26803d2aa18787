"""Runs `optsched.policies.trail.Trail` batch by batch.

This loop differs from `optsched.policies.engine.rules`. There the order is fixed when a request
begins to wait, and running requests stand in a line that never changes. Here every token may move
a request, and the loop decides anew before every batch which requests hold KV, that is have a
*seat*. A request that holds KV and has produced as many tokens as its *shield* says is no longer
preempted.

Line 0 of a worker (``w.lines[0]``) is the queue, a heap, line 1 has the running requests, and
line 2 is scratch for those that change their seats. `requests` and the state `s` are records, whose
fields stand in `REQUEST_FIELDS` and `STATE_FIELDS`.
"""

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import kv_of
from optsched.policies.engine import common, ledger
from optsched.policies.engine.common import REQUEST, TOKENS, Worker, add_eviction, precedes, push
from optsched.problem.kernel import njit

REQUEST_FIELDS = (
    *common.FIELDS,
    ("first", np.int64),  # prediction of its output
    ("shield", np.int64),  # tokens from which on it is not preempted
    ("seen", np.int64),  # max tokens that it has ever produced
)

STATE_FIELDS = (
    ("front", np.int64),  # the first request in the order, whether it runs or waits
    ("kept", np.int64),  # running requests that keep their seats
    ("lost", np.int64),  # those that lose them: the first entries of the worker's line 2
    ("admitted", np.int64),  # waiting requests that get a seat: the last entries of that line
    ("kv_used", np.int64),  # KV of those that have seats, after the batch
    # What `Trail` says:
    ("every", np.int64),  # tokens between predictions
    ("refine", np.bool_),
    ("keep", np.bool_),
    ("max_batch_tokens", np.int64),
    ("max_running", np.int64),
)

SHIELDED, PREEMPTIBLE = 0, 1
"""Bands of the line: requests that hold KV and can no longer be preempted, and all others."""


@njit(allocates=False, forceinline=True)
def _rank(r: np.record, i: int, s: np.record, offsets: Ints, remaining: Floats) -> None:
    """Rank a request by the tokens that it is predicted to have left.

    `offsets` and `remaining` are those of the instance's `Forecast`, which is asked with `refine`.
    Else the first prediction holds, and whoever is longer has one token left.
    """
    if s.refine:
        r.key = common.tokens_left(s.every, offsets, remaining, i, r.seen, r.produced)
    else:
        r.key = max(1.0, float(r.first - r.produced))


@njit(allocates=False)
def _sort_line(requests: Records, s: np.record, running: Ints) -> int:
    """Sort the running requests, which are nearly sorted already; return how many decode."""
    # Insertion takes linear time on a line that is nearly sorted.
    decoding = 0
    for k in range(s.running):
        i = running[k]
        r = requests[i]
        decoding += r.decoding
        position = k

        while position > 0 and precedes(r, requests[running[position - 1]]):
            running[position] = running[position - 1]
            position -= 1

        running[position] = i

    return decoding


@njit(allocates=False, forceinline=True)
def _budgets(requests: Records, s: np.record, w: Worker, decoding: int) -> tuple[bool, int, int]:
    """Return (alone, max tokens for decodes, max tokens for prefills), shares of the next batch.

    The first request in the order, whether it runs or waits, has a claim if it is in a prefill:
    decodes get what it leaves. `alone`: its prefill is larger than the scheduler's own limit, and
    it is the only one in the batch. ``s.front`` gets this request.
    """
    heap, running, limits = w.lines[0], w.lines[1], w.limits
    front = heap[0] if s.waiting > 0 else running[0]
    if s.running > 0 and precedes(requests[running[0]], requests[front]):
        front = running[0]

    s.front, first = front, requests[front]
    claim = life.rest_of(first) if ledger.prefills_next(first) else 0
    # The scheduler's own limit is for the batch, unless one prefill beyond it runs alone.
    max_prefill = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    batch_tokens = min(s.max_batch_tokens, limits.max_batch_tokens)

    # In chunks one token is enough to go on. A prefill that no batch can hold has no claim.
    if limits.chunked:
        claim = min(claim, 1)
    elif claim > max_prefill:
        claim = 0

    alone = claim > s.max_batch_tokens
    # Where phases are apart, the batch is of prefills if the first request is in one, else of
    # decodes.
    decodes = 0 if alone else min(decoding, batch_tokens - claim)
    if not limits.hybrid and claim > 0:
        decodes = 0

    prefills = max_prefill if alone else min(batch_tokens - decodes, limits.max_prefill_tokens)
    if not limits.hybrid and claim == 0:
        prefills = 0

    return alone, decodes, prefills


@njit(allocates=False, forceinline=True)
def _choose(requests: Records, s: np.record, w: Worker, shares: tuple[bool, int, int]) -> Sums:
    """Choose which requests hold KV and what each processes; return the sums of the batch.

    Running and waiting requests are merged in their order. Each takes a seat if there is one, and
    the KV that it holds after the batch, where a prefill counts with its whole input. `shares` are
    from `_budgets`. The list of running requests is compacted in its own array, since ``kept``
    never passes ``position``. In ``aside`` requests that lose their seats stand from the front, and
    admitted ones from the end.
    """
    heap, running, aside, limits = w.lines[0], w.lines[1], w.lines[2], w.limits
    sums = EMPTY
    alone, decodes, prefills = shares  # the two numbers are max tokens of each phase
    latest = 0.0  # the last release of a request in the batch
    kept = lost = admitted = position = 0
    seats = min(s.max_running, limits.max_running)
    # Seats and KV taken so far, at first by KV on its way.
    seated, kv_used = ledger.kv_on_its_way(requests, running, s, limits)
    refused = False  # whether somebody was refused: from then on nobody is admitted

    while True:
        from_queue = s.waiting > 0 and not refused
        if from_queue and position < s.running:
            from_queue = precedes(requests[heap[0]], requests[running[position]])
        if from_queue:
            i = heap[0]
        elif position < s.running:
            i = running[position]
            position += 1
        else:
            break

        r = requests[i]
        # KV on its way cannot be sent back, and its seat was counted above.
        if not ledger.is_here(r):
            running[kept] = i
            kept += 1
            continue

        # The tokens that it processes, and the KV that it holds after the batch.
        work, elsewhere = 0, ledger.is_elsewhere(r)
        if elsewhere:
            kv = kv_of(r.cached, limits)
        elif r.decoding:
            work = 1 if sums.decode_requests < decodes else 0
            kv = kv_of(r.cached + work, limits)
        else:
            kv = kv_of(r.prompt + r.produced, limits)
            # `prefills` is what earlier ones have left of the share. With `alone`, the first in the
            # order (`s.front`) has a prefill beyond the scheduler's limit, and the batch is its.
            if not alone or i == s.front:
                rest = life.rest_of(r)
                work = min(rest, prefills) if limits.chunked or rest <= prefills else 0

        fits = seated < seats and kv_used + kv <= limits.kv_capacity
        # Nobody who waits may overtake a request that is refused. Others that run may keep their
        # seats.
        if not fits or (from_queue and work == 0 and not elsewhere):
            refused = True
            if not from_queue:
                aside[lost] = i
                lost += 1

            continue

        kv_used += kv
        seated += 1
        if from_queue:
            common.pop(requests, heap, s)
            admitted += 1
            aside[aside.shape[0] - admitted] = i
        else:
            running[kept] = i
            kept += 1

        if work == 0:
            continue
        if r.decoding:
            sums = add_decode(sums, r.cached)
        else:
            prefills -= work
            sums = add_prefill(sums, work, r.cached)

        latest = max(latest, r.release)
        common.add_entry(w.columns.entries, s, i, work)

    s.kv_used, s.kept, s.lost, s.admitted, s.latest = kv_used, kept, lost, admitted, latest
    return sums


@njit(allocates=False)
def _change_seats(requests: Records, s: np.record, w: Worker) -> None:
    """Change the seats: evict requests that lost theirs, and let admitted ones run.

    With the setting ``keep`` a request without a seat keeps its KV while there is room for it, and
    runs on in the list. Whoever is admitted below its shield may be preempted later.
    """
    # In `aside` those that lost their seats stand from the front, and the admitted from the end.
    running, aside, limits = w.lines[1], w.lines[2], w.limits
    holders = s.kept + s.admitted  # requests that hold KV in any case
    kept = s.kept
    # The first in the order keeps its KV first.
    for k in range(s.lost):
        i = aside[k]
        r = requests[i]
        kv = kv_of(r.cached, limits)
        stays = holders < limits.max_running and s.kv_used + kv <= limits.kv_capacity
        if s.keep and stays:
            holders += 1
            s.kv_used += kv
            running[kept] = i
            kept += 1
        else:
            add_eviction(w.columns.evicted, s, i)
            life.evict(r, limits.restart)
            r.band = PREEMPTIBLE

    for k in range(s.admitted):
        i = aside[aside.shape[0] - 1 - k]
        r = requests[i]
        r.band = SHIELDED if r.produced >= r.shield else PREEMPTIBLE
        ledger.pull(r, s)  # its KV begins to come, if it is elsewhere
        running[kept] = i
        kept += 1

    s.running = kept


@njit(allocates=False, forceinline=True)
def decide(requests: Records, s: np.record, w: Worker) -> Sums:
    """Form the next batch after the evictions that precede it; return its sums.

    If it has no tokens, though requests lost seats, nobody loses one, and those that run try once
    more without the queue. `_choose` leaves ``kept``, ``lost`` and ``admitted``, the numbers of
    requests that keep, lose and get a seat; the last two kinds stand in line 2 of the worker.
    """
    running, aside, waiting_before = w.lines[1], w.lines[2], s.waiting
    while True:
        shares = _budgets(requests, s, w, _sort_line(requests, s, running))
        sums = _choose(requests, s, w, shares)
        if sums.tokens > 0 or s.lost == 0:
            break

        # Without tokens no batch begins for which KV would have to go: nobody loses a seat.
        for k in range(s.lost):
            running[s.kept + k] = aside[k]
        if s.admitted == 0:  # the running ones were alone already
            break
        # Nor does KV come in its place: admitted requests wait on, and the running ones try alone.
        for k in range(s.admitted):
            push(requests, w.lines[0], s, aside[aside.shape[0] - 1 - k])

        # The next try sees no queue. Its entries stay where they are.
        s.waiting = 0

    s.waiting = waiting_before - s.admitted
    if sums.tokens > 0 or s.admitted > 0:
        _change_seats(requests, s, w)

    return sums


@njit(allocates=False, forceinline=True)
def _process(
    requests: Records, s: np.record, w: Worker, first: int, offsets: Ints, remaining: Floats
) -> None:
    """Process the entries of a batch, which are those from ``first`` on, and rank its requests.

    Bands and keys change with each token. `offsets`, `remaining`: as for `_rank`.
    """
    finished, entries = 0, w.columns.entries
    for k in range(first, s.entries):
        i = entries[REQUEST, k]
        r = requests[i]
        if not life.advance(r, entries[TOKENS, k]):
            continue
        if common.note_token(r, s):
            finished += 1
            continue

        r.seen = max(r.seen, r.produced)
        r.band = SHIELDED if r.produced >= r.shield else PREEMPTIBLE
        _rank(r, i, s, offsets, remaining)

    common.after_batch(requests, w.lines[1], s, finished)


@njit(allocates=False)
def run(requests: Records, state: Records, w: Worker, offsets: Ints, remaining: Floats) -> None:
    """Run the policy until the requests assigned so far have finished, or up to a time.

    `offsets`, `remaining`: the forecast, as for `_rank`. Where nothing can run, ``s.front``, the
    first in the order, is whom an error names.
    """
    s = state[0]
    while True:
        new = common.take_arrivals(requests, s, w)  # how many have come; -1: return
        if new < 0:
            return

        # Ties in the order are broken by arrival.
        for k in range(s.arrived - new, s.arrived):
            i = w.coming[k]
            _rank(requests[i], i, s, offsets, remaining)
            requests[i].place = requests[i].seq
            push(requests, w.lines[0], s, i)

        first, first_evicted = s.entries, s.evicted  # where those of this batch begin
        sums = decide(requests, s, w)
        for k in range(first_evicted, s.evicted):
            i = w.columns.evicted[k]
            if w.limits.restart:  # it has more tokens left than before
                _rank(requests[i], i, s, offsets, remaining)

            push(requests, w.lines[0], s, i)

        if sums.tokens > 0:
            common.run_batch(w.columns.batches, s, batch_time(w.cost, sums))
            _process(requests, s, w, first, offsets, remaining)
        elif not common.let_time_pass(requests, s, w, s.front):
            return
