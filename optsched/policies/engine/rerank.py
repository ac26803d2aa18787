"""Runs `optsched.policies.trail.Trail` batch by batch.

This loop differs from `optsched.policies.engine.rules`. There the order is fixed when a request
begins to wait, and running requests stand in a line that never changes. Here every token may move
a request, and the loop decides anew before every batch which requests hold KV.
"""

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import kv_of
from optsched.policies.engine import common, ledger
from optsched.policies.engine.common import REQUEST, TOKENS, Worker, add_eviction, before, push
from optsched.problem.kernel import njit

REQUEST_FIELDS = (
    *common.FIELDS,
    ("first", np.int64),  # prediction of its output
    ("shield", np.int64),  # tokens from which on it is not preempted
    ("seen", np.int64),  # max tokens that it has ever produced
)

STATE_FIELDS = (
    ("front", np.int64),  # the first in the line
    ("kept", np.int64),  # running requests that keep their seats
    ("lost", np.int64),  # those that lose them, at the front of the list aside
    ("admitted", np.int64),  # those that win them, from its end
    ("used", np.int64),  # KV of those that have seats, after the batch
    # What `Trail` says, with `Settings` of its own:
    ("every", np.int64),  # tokens between predictions
    ("refine", np.bool_),
    ("keep", np.bool_),
    ("own_batch", np.int64),
    ("seats", np.int64),
)

SHIELDED, PREEMPTIBLE = 0, 1
"""Bands of the line: requests that hold KV and can no longer be preempted, and all others."""


@njit(allocates=False, forceinline=True)
def _rank(r: np.record, i: int, s: np.record, offsets: Ints, remaining: Floats) -> None:
    """Rank a request by the tokens that it is predicted to have left."""
    if s.refine:
        r.key = common.tokens_left(s.every, offsets, remaining, i, r.seen, r.produced)
    else:
        r.key = max(1.0, float(r.first - r.produced))


@njit(allocates=False)
def _sort_line(requests: Records, s: np.record, running: Ints) -> int:
    """Sort the running requests, which are nearly sorted already; return how many decode."""
    decoding = 0
    for k in range(s.running):
        i = running[k]
        r = requests[i]
        decoding += r.decoding
        position = k

        while position > 0 and before(r, requests[running[position - 1]]):
            running[position] = running[position - 1]
            position -= 1

        running[position] = i

    return decoding


@njit(allocates=False, forceinline=True)
def _shares(requests: Records, s: np.record, at: Worker, decoding: int) -> tuple[bool, int, int]:
    """Return how many tokens decodes and prefills may have. The first in the line gets its own.

    Before them stands whether nobody else is prefilled, since it takes a batch for itself.
    """
    heap, running, limits = at.lines[0], at.lines[1], at.limits
    front = heap[0] if s.waiting > 0 else running[0]
    if s.running > 0 and before(requests[running[0]], requests[front]):
        front = running[0]

    s.front, first = front, requests[front]
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    need = life.rest_of(first) if ledger.prefills(first) else 0
    max_batch = min(s.own_batch, limits.max_batch_tokens)

    # In chunks one token is enough to go on; a prefill that no batch can hold has no claim.
    if limits.chunked:
        need = min(need, 1)
    elif need > room:
        need = 0

    alone = need > s.own_batch
    decodes = 0 if alone else min(decoding, max_batch - need)
    if not limits.hybrid and need > 0:
        decodes = 0

    prefills = room if alone else min(max_batch - decodes, limits.max_prefill_tokens)
    if not limits.hybrid and need == 0:
        prefills = 0

    return alone, decodes, prefills


@njit(allocates=False, forceinline=True)
def _choose(requests: Records, s: np.record, at: Worker, shares: tuple[bool, int, int]) -> Sums:
    """Choose which requests hold KV and what each processes; return the sums of the batch."""
    heap, running, aside, limits = at.lines[0], at.lines[1], at.lines[2], at.limits
    sums = EMPTY
    alone, decodes, prefills = shares
    latest = 0.0
    kept = lost = admitted = position = 0
    seats = min(s.seats, limits.max_running)
    seated, used = ledger.kv_on_its_way(requests, running, s, limits)
    refused = False

    while True:
        fresh = (
            not refused
            and s.waiting > 0
            and (position >= s.running or before(requests[heap[0]], requests[running[position]]))
        )
        if fresh:
            i = heap[0]
        elif position < s.running:
            i = running[position]
            position += 1
        else:
            break

        r = requests[i]
        # KV on its way cannot be sent back: its seat was counted above.
        if not ledger.is_here(r):
            running[kept] = i
            kept += 1
            continue

        work, comes = 0, ledger.comes(r)
        if comes:
            kv = kv_of(r.cached, limits)
        elif r.decoding:
            work = 1 if sums.decode_requests < decodes else 0
            kv = kv_of(r.cached + work, limits)
        else:
            kv = kv_of(r.prompt + r.produced, limits)
            if not alone or i == s.front:
                rest = life.rest_of(r)
                work = min(rest, prefills) if limits.chunked or rest <= prefills else 0

        fits = seated < seats and used + kv <= limits.kv_capacity
        # Nobody who waits may overtake whoever is refused; those that run may keep their seats.
        if not fits or (fresh and work == 0 and not comes):
            refused = True
            if not fresh:
                aside[lost] = i
                lost += 1

            continue

        used += kv
        seated += 1
        if fresh:
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
        common.add_entry(at.columns.entries, s, i, work)

    s.used, s.kept, s.lost, s.admitted, s.latest = used, kept, lost, admitted, latest
    return sums


@njit(allocates=False)
def _give_up(requests: Records, s: np.record, at: Worker) -> None:
    """Change the seats. The KV of lost seats stays while nobody needs it, or is evicted at once."""
    running, aside, limits = at.lines[1], at.lines[2], at.limits
    holders = s.kept + s.admitted
    kept = s.kept
    # Whoever stands first in the line keeps its KV first.
    for k in range(s.lost):
        i = aside[k]
        r = requests[i]
        kv = kv_of(r.cached, limits)
        stays = holders < limits.max_running and s.used + kv <= limits.kv_capacity
        if s.keep and stays:
            holders += 1
            s.used += kv
            running[kept] = i
            kept += 1
        else:
            add_eviction(at.columns.evicted, s, i)
            life.evict(r, limits.restart)
            r.band = PREEMPTIBLE

    for k in range(s.admitted):
        i = aside[aside.shape[0] - 1 - k]
        r = requests[i]
        r.band = SHIELDED if r.produced >= r.shield else PREEMPTIBLE
        ledger.pull(r, s)
        running[kept] = i
        kept += 1

    s.running = kept


@njit(allocates=False, forceinline=True)
def decide(requests: Records, s: np.record, at: Worker) -> Sums:
    """Form the next batch after the evictions that precede it; return its sums.

    The third line has room for those that change their seats.
    """
    running, aside, waiting = at.lines[1], at.lines[2], s.waiting
    while True:
        shares = _shares(requests, s, at, _sort_line(requests, s, running))
        sums = _choose(requests, s, at, shares)
        if sums.tokens > 0 or s.lost == 0:
            break

        for k in range(s.lost):  # nobody loses a seat: no batch begins for which its KV would go
            running[s.kept + k] = aside[k]
        if s.admitted == 0:
            break
        for k in range(s.admitted):  # nor does KV come in its place: those that run go on alone
            push(requests, at.lines[0], s, aside[aside.shape[0] - 1 - k])

        # The next try admits nobody: it sees no queue, whose entries stay where they are.
        s.waiting = 0

    s.waiting = waiting - s.admitted
    if sums.tokens > 0 or s.admitted > 0:
        _give_up(requests, s, at)

    return sums


@njit(allocates=False, forceinline=True)
def _process(
    requests: Records, s: np.record, at: Worker, first: int, offsets: Ints, remaining: Floats
) -> None:
    """Process the entries of a batch from ``first`` on."""
    finished, entries = 0, at.columns.entries
    for k in range(first, s.entries):
        i = entries[REQUEST, k]
        r = requests[i]
        if not life.advance(r, entries[TOKENS, k]):
            continue
        if common.note(r, s):
            finished += 1
            continue

        r.seen = max(r.seen, r.produced)
        r.band = SHIELDED if r.produced >= r.shield else PREEMPTIBLE
        _rank(r, i, s, offsets, remaining)

    common.after_batch(requests, at.lines[1], s, finished)


@njit(allocates=False)
def run(requests: Records, state: Records, at: Worker, offsets: Ints, remaining: Floats) -> None:
    """Run the policy until the requests assigned so far have finished, or up to a time."""
    s = state[0]
    while True:
        new = common.turn(requests, s, at)
        if new < 0:
            return

        for k in range(s.arrived - new, s.arrived):
            i = at.coming[k]
            _rank(requests[i], i, s, offsets, remaining)
            requests[i].place = requests[i].seq
            push(requests, at.lines[0], s, i)

        first, first_evicted = s.entries, s.evicted
        sums = decide(requests, s, at)
        for k in range(first_evicted, s.evicted):
            i = at.columns.evicted[k]
            if at.limits.restart:
                _rank(requests[i], i, s, offsets, remaining)

            push(requests, at.lines[0], s, i)

        if sums.tokens > 0:
            common.run_batch(at.columns.batches, s, batch_time(at.cost, sums))
            _process(requests, s, at, first, offsets, remaining)
        elif not common.waits(requests, s, at, s.front):
            return
