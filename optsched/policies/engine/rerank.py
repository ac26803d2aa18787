"""Runs `optsched.policies.trail.Trail` batch by batch.

This loop differs from `optsched.policies.engine.rules`. There the order is fixed when a request
begins to wait, and running requests stand in a line that never changes. Here every token may move
a request, and the loop decides anew before every batch which requests hold KV.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.judge.life import (
    EMPTY,
    Floats,
    Ints,
    add_decode,
    add_prefill,
    advance,
    batch_time,
    evict,
    rest_of,
)
from optsched.judge.memory import kv_of
from optsched.judge.replay import Limits
from optsched.policies.engine.common import (
    DONE,
    FIELDS,
    REQUEST,
    STUCK,
    TOKENS,
    add_entry,
    add_eviction,
    after_batch,
    arriving,
    before,
    full,
    idle,
    note,
    pop,
    push,
    run_batch,
    tokens_left,
    with_room,
)
from optsched.problem.kernel import njit

REQUEST_FIELDS = (
    *FIELDS,
    ("first", np.int64),  # prediction of its output
    ("shield", np.int64),  # tokens from which on it is not preempted
    ("seen", np.int64),  # max tokens that it has ever produced
)

STATE_FIELDS = (
    ("clearings", np.int64),
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


class Shares(NamedTuple):
    """How many tokens each phase of a batch may process; ``front`` is the first in the line."""

    front: int
    alone: bool
    decodes: int
    prefills: int


@njit
def _rank(r: Any, i: int, settings: Settings, offsets: Ints, remaining: Floats) -> None:
    """Rank a request by the tokens that it is predicted to have left."""
    if settings.refine:
        r.key = tokens_left(settings.every, offsets, remaining, i, r.seen, r.produced)
    else:
        r.key = max(1.0, float(r.first - r.produced))


@njit
def _shield(r: Any) -> None:
    r.band = SHIELDED if r.produced >= r.shield else PREEMPTIBLE


@njit
def _sort_line(requests: Any, s: Any, running: Ints) -> int:
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


@njit
def _shares(
    requests: Any, s: Any, heap: Ints, running: Ints, decoding: int, settings: Settings
) -> Shares:
    """Return how much each phase may process. The first in the line always gets its tokens."""
    limits = settings.limits
    front = heap[0] if s.waiting > 0 else running[0]
    if s.running > 0 and before(requests[running[0]], requests[front]):
        front = running[0]

    first = requests[front]
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    need = 0 if first.decoding else rest_of(first)

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

    return Shares(front, alone, decodes, prefills)


@njit
def _choose(
    requests: Any,
    s: Any,
    heap: Ints,
    running: Ints,
    aside: Ints,
    entries: Ints,
    shares: Shares,
    settings: Settings,
) -> Any:
    """Choose which requests hold KV and what each processes; return the sums of the batch."""
    limits = settings.limits
    sums = EMPTY
    prefills = shares.prefills
    latest = 0.0
    used = kept = lost = admitted = position = 0
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
        work = 0
        if r.decoding:
            work = 1 if sums.decode_requests < shares.decodes else 0
            kv = kv_of(r.cached + work, limits)
        else:
            rest = rest_of(r)
            if not shares.alone or i == shares.front:
                if limits.chunked:
                    work = min(rest, prefills)
                elif rest <= prefills:
                    work = rest

            kv = kv_of(r.prompt + r.produced, limits)

        if (
            (fresh and work == 0)
            or kept + admitted + 1 > settings.seats
            or used + kv > limits.kv_capacity
        ):
            refused = True
            if not fresh:
                aside[lost] = i
                lost += 1

            continue

        used += kv
        if fresh:
            pop(requests, heap, s)
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
        add_entry(entries, s, i, work)

    s.used, s.kept, s.lost, s.admitted, s.latest = used, kept, lost, admitted, latest
    return sums


@njit
def _keep_all(s: Any, running: Ints, aside: Ints) -> None:
    """Let those that would lose their seats stay, because no batch was formed."""
    for k in range(s.lost):
        running[s.kept] = aside[k]
        s.kept += 1


@njit
def _give_up(
    requests: Any, s: Any, running: Ints, aside: Ints, evicted: Ints, settings: Settings
) -> None:
    """Change the seats. The KV of lost seats stays while nobody needs it, or is evicted at once."""
    limits = settings.limits
    holders = s.kept + s.admitted
    for k in range(s.lost):
        i = aside[k]
        r = requests[i]
        kv = kv_of(r.cached, limits)

        if settings.keep and holders < limits.max_running and s.used + kv <= limits.kv_capacity:
            holders += 1
            s.used += kv
            running[s.kept] = i
            s.kept += 1
            continue

        add_eviction(evicted, s, i)
        evict(r, limits.restart)
        r.band = PREEMPTIBLE

    for k in range(s.admitted):
        i = aside[aside.shape[0] - 1 - k]
        _shield(requests[i])
        running[s.kept] = i
        s.kept += 1

    s.running = s.kept


@njit
def _process(
    requests: Any,
    s: Any,
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
        if not advance(r, entries[TOKENS, k]):
            continue
        if note(r, s):
            finished += 1
            continue

        r.seen = max(r.seen, r.produced)
        _shield(r)
        _rank(r, i, settings, offsets, remaining)

    after_batch(requests, running, s, finished)


@njit
def run(
    requests: Any,
    state: Any,
    settings: Settings,
    cost: Floats,
    by_arrival: Ints,
    offsets: Ints,
    remaining: Floats,
    columns: Any,
    lines: Ints,
    until: float,
) -> Any:
    """Run the policy until every request has finished, or up to a time.

    `by_arrival`: the requests assigned so far. More may be when the loop is called again.
    """
    n = by_arrival.shape[0]
    s = state[0]
    heap, running, aside = lines[0], lines[1], lines[2]

    while s.done < n and s.outcome == DONE and s.now < until and s.turns > 0:
        s.turns -= 1
        i = arriving(requests, s, by_arrival)
        while i >= 0:
            _rank(requests[i], i, settings, offsets, remaining)
            push(requests, heap, s, i)
            i = arriving(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            idle(requests, s, by_arrival)
            continue

        if full(columns, s, s.running + s.waiting, s.running):
            columns = with_room(columns, s, s.running + s.waiting, s.running)

        decoding = _sort_line(requests, s, running)
        shares = _shares(requests, s, heap, running, decoding, settings)
        first = s.entries
        first_evicted = s.evicted
        sums = _choose(requests, s, heap, running, aside, columns.entries, shares, settings)

        if sums.tokens == 0:
            _keep_all(s, running, aside)
            if not idle(requests, s, by_arrival):
                if until < np.inf:  # the next request may change that
                    break

                s.outcome, s.about = STUCK, shares.front

            continue

        _give_up(requests, s, running, aside, columns.evicted, settings)
        for k in range(first_evicted, s.evicted):
            i = columns.evicted[k]
            if settings.limits.restart:
                _rank(requests[i], i, settings, offsets, remaining)

            push(requests, heap, s, i)

        run_batch(columns.batches, s, settings.origin, batch_time(cost, sums))
        _process(requests, s, running, columns.entries, first, settings, offsets, remaining)

    return columns
