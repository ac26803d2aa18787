"""Runs `optsched.policies.trail.Trail` batch by batch.

This loop differs from `optsched.policies.engine.rules`. There the order is fixed when a request
begins to wait, and running requests stand in a line that never changes. Here every token may move
a request, and the loop decides anew before every batch which requests hold KV.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import kv_of
from optsched.judge.replay import Limits
from optsched.policies.engine import common
from optsched.policies.engine.common import REQUEST, TOKENS, Columns, add_eviction, before, push
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
)

SHIELDED, PREEMPTIBLE = 0, 1
"""Bands of the line: requests that hold KV and can no longer be preempted, and all others."""


class Settings(NamedTuple):
    """`Trail` for compiled code, with the instance's limits; ``seats`` is the tighter limit."""

    limits: Limits
    origin: float
    every: int  # tokens between predictions
    refine: bool
    keep: bool
    own_batch: int
    max_batch: int
    seats: int


@njit(allocates=False, forceinline=True)
def _rank(r: np.record, i: int, settings: Settings, offsets: Ints, remaining: Floats) -> None:
    """Rank a request by the tokens that it is predicted to have left."""
    if settings.refine:
        r.key = common.tokens_left(settings.every, offsets, remaining, i, r.seen, r.produced)
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


@njit(allocates=False)
def _shares(
    requests: Records, s: np.record, lines: Ints, decoding: int, settings: Settings
) -> tuple[bool, int, int]:
    """Return how many tokens decodes and prefills may have. The first in the line gets its own.

    Before them stands whether nobody else is prefilled, since it takes a batch for itself.
    """
    heap, running, limits = lines[0], lines[1], settings.limits
    front = heap[0] if s.waiting > 0 else running[0]
    if s.running > 0 and before(requests[running[0]], requests[front]):
        front = running[0]

    s.front, first = front, requests[front]
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    need = 0 if first.decoding or first.away or first.ready > 0.0 else life.rest_of(first)

    if limits.chunked:
        need = min(need, 1)
    elif need > room:
        need = 0

    alone = need > settings.own_batch
    decodes = 0 if alone else min(decoding, settings.max_batch - need)
    if not limits.hybrid and need > 0:
        decodes = 0

    prefills = room if alone else min(settings.max_batch - decodes, limits.max_prefill_tokens)
    if not limits.hybrid and need == 0:
        prefills = 0

    return alone, decodes, prefills


@njit(allocates=False)
def _choose(
    requests: Records,
    s: np.record,
    lines: Ints,
    entries: Ints,
    shares: tuple[bool, int, int],
    settings: Settings,
) -> Sums:
    """Choose which requests hold KV and what each processes; return the sums of the batch."""
    heap, running, aside, limits = lines[0], lines[1], lines[2], settings.limits
    sums = EMPTY
    alone, decodes, prefills = shares
    latest = 0.0
    used = kept = lost = admitted = position = 0
    seats = min(settings.seats, limits.max_running)
    refused, moving = False, s.moving  # those whose KV comes and that are not counted yet
    for k in range(s.running if moving > 0 else 0):
        r = requests[running[k]]
        used += kv_of(r.cached, limits) if r.ready > 0.0 else 0

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
        if r.ready > 0.0:
            moving -= 1
            running[kept] = i
            kept += 1
            continue

        work = 0
        if r.decoding:
            work = 1 if sums.decode_requests < decodes else 0
            kv = kv_of(r.cached + work, limits)
        else:
            kv = kv_of(r.prompt + r.produced, limits)
            if not alone or i == s.front:
                rest = life.rest_of(r)
                work = min(rest, prefills) if limits.chunked or rest <= prefills else 0
            if r.away:
                work, kv = 1, kv_of(r.cached, limits)

        seated = kept + admitted + moving < seats and used + kv <= limits.kv_capacity
        if not seated or (fresh and work == 0):
            refused = True
            if not fresh:
                aside[lost] = i
                lost += 1

            continue

        used += kv
        if fresh:
            common.pop(requests, heap, s)
            admitted += 1
            aside[aside.shape[0] - admitted] = i
        else:
            running[kept] = i
            kept += 1

        if work == 0 or r.away:
            continue
        if r.decoding:
            sums = add_decode(sums, r.cached)
        else:
            prefills -= work
            sums = add_prefill(sums, work, r.cached)

        latest = max(latest, r.release)
        common.add_entry(entries, s, i, work)

    s.used, s.kept, s.lost, s.admitted, s.latest = used, kept, lost, admitted, latest
    return sums


@njit(allocates=False)
def _give_up(
    requests: Records, s: np.record, lines: Ints, evicted: Ints, settings: Settings
) -> None:
    """Change the seats. The KV of lost seats stays while nobody needs it, or is evicted at once."""
    running, aside, limits = lines[1], lines[2], settings.limits
    holders = s.kept + s.admitted
    kept = s.kept
    for k in range(s.lost):
        i = aside[k]
        r = requests[i]
        kv = kv_of(r.cached, limits)
        stays = holders < limits.max_running and s.used + kv <= limits.kv_capacity
        if settings.keep and stays:
            holders += 1
            s.used += kv
            running[kept] = i
            kept += 1
        else:
            add_eviction(evicted, s, i)
            life.evict(r, limits.restart)
            r.band = PREEMPTIBLE

    for k in range(s.admitted):
        i = aside[aside.shape[0] - 1 - k]
        requests[i].band = SHIELDED if requests[i].produced >= requests[i].shield else PREEMPTIBLE
        if requests[i].away:
            common.pull(requests[i], s)

        running[kept] = i
        kept += 1

    s.running = kept


@njit(allocates=False)
def decide(
    requests: Records, s: np.record, lines: Ints, columns: Columns, settings: Settings
) -> Sums:
    """Form the next batch after the evictions that precede it; return its sums.

    `lines`: the queue, a heap; the running requests; and room for those that change their seats.
    """
    running, aside, waiting = lines[1], lines[2], s.waiting
    while True:
        shares = _shares(requests, s, lines, _sort_line(requests, s, running), settings)
        sums = _choose(requests, s, lines, columns.entries, shares, settings)
        if sums.tokens > 0 or s.lost == 0:
            break

        for k in range(s.lost):  # nobody loses a seat: no batch begins for which its KV would go
            running[s.kept + k] = aside[k]
        if s.admitted == 0:
            break
        for k in range(s.admitted):  # nor does KV come in its place: those that run go on alone
            push(requests, lines[0], s, aside[aside.shape[0] - 1 - k])

        s.waiting = 0

    s.waiting = waiting - s.admitted
    if sums.tokens > 0 or s.admitted > 0:
        _give_up(requests, s, lines, columns.evicted, settings)

    return sums


@njit(allocates=False)
def _process(
    requests: Records,
    s: np.record,
    running: Ints,
    entries: Ints,
    first: int,
    settings: Settings,
    offsets: Ints,
    remaining: Floats,
) -> None:
    """Process the entries of a batch from ``first`` on."""
    finished = 0
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
        _rank(r, i, settings, offsets, remaining)

    common.after_batch(requests, running, s, finished)


@njit(allocates=False)
def run(
    requests: Records,
    state: Records,
    settings: Settings,
    cost: Floats,
    by_arrival: Ints,
    offsets: Ints,
    remaining: Floats,
    columns: Columns,
    lines: Ints,
    until: float,
) -> None:
    """Run the policy until the requests assigned so far have finished, or up to a time."""
    s = state[0]
    heap, running = lines[0], lines[1]

    while common.goes_on(s, by_arrival.shape[0], until, columns):
        if s.moving > 0:
            common.landed(requests, running, s)

        i = common.arriving(requests, s, by_arrival)
        while i >= 0:
            _rank(requests[i], i, settings, offsets, remaining)
            requests[i].place = requests[i].seq
            push(requests, heap, s, i)
            i = common.arriving(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            if not common.waits(requests, s, by_arrival, until, -1):
                break

            continue

        first, first_evicted = s.entries, s.evicted
        sums = decide(requests, s, lines, columns, settings)
        for k in range(first_evicted, s.evicted):
            i = columns.evicted[k]
            if settings.limits.restart:
                _rank(requests[i], i, settings, offsets, remaining)

            push(requests, heap, s, i)

        if sums.tokens == 0:
            if not common.waits(requests, s, by_arrival, until, s.front):
                break

            continue

        common.run_batch(columns.batches, s, settings.origin, batch_time(cost, sums))
        _process(requests, s, running, columns.entries, first, settings, offsets, remaining)
