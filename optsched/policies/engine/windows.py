"""Runs schedulers that work in windows (`optsched.policies.windows.Windows`).

Between two decisions of a worker, nothing that happens elsewhere changes what it does. A window is
therefore run to its end when it begins. The events of the loop are arrivals and ends of windows.
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
    record,
)
from optsched.judge.memory import MEMORY, free, growth, kv_of, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine.common import (
    DONE,
    FIELDS,
    STALLED,
    STUCK,
    Columns,
    add_entry,
    add_eviction,
    arriving,
    before,
    full,
    tokens_left,
    with_room,
)
from optsched.policies.runner import MAX_STALLED_BATCHES
from optsched.problem.kernel import njit

ORDERS = {"arrival": 0, "remaining": 1, "total": 2}
ARRIVAL, REMAINING, TOTAL = 0, 1, 2

REQUEST_FIELDS = (
    *FIELDS,
    ("total", np.int64),  # predicted output, for the order of that name
    ("seen", np.int64),  # max tokens that it has ever produced
    ("left", np.int64),  # its children in its worker's queue, a skew heap
    ("right", np.int64),
    ("previous", np.int64),  # its neighbours in its worker's list of those that hold KV
    ("next", np.int64),
    ("member", np.int64),  # the next member of its worker's window
    ("quota", np.int64),  # tokens that it has to produce in its window
    ("inside", np.bool_),  # in the batch of a window
    ("outdated", np.bool_),  # its key has risen since it was queued
)

WORKER = record(
    ("until", np.float64),  # end of the window that runs; infinite: idle
    ("queue", np.int64),  # root of its queue
    ("holder", np.int64),  # first of those that hold KV
    ("member", np.int64),  # first member of the window that runs
    ("holders", np.int64),
    *MEMORY,
    ("assigned", np.int64),  # unfinished requests
)

STATE_FIELDS = (
    ("members", np.int64),  # of the batch of a window
    ("position", np.int64),  # of the members whose prefill was looked at
    ("chosen", np.int64),  # members that the next step processes
    ("staying", np.int64),  # members that may keep their KV
    ("growth", np.int64),  # KV that the step adds
    ("ended", np.bool_),  # some member has finished
)


class Settings(NamedTuple):
    """`Windows` for compiled code, with the limits of each worker."""

    limits: Limits
    every: int  # tokens between predictions
    order: int
    window: int
    aging: float
    size: int  # max requests of a batch


@njit
def _merged(requests: Any, a: int, b: int) -> int:
    """Return the root of two skew heaps merged; -1 is the empty one."""
    if a < 0 or b < 0:
        return a if b < 0 else b
    if before(requests[b], requests[a]):
        a, b = b, a

    root = a
    while True:
        r = requests[a]
        rest = r.right
        r.right = r.left

        if rest < 0:
            r.left = b
            return root

        if before(requests[b], requests[rest]):
            rest, b = b, rest

        r.left = rest
        a = rest


@njit
def _queue(
    requests: Any, worker: Any, i: int, settings: Settings, offsets: Ints, remaining: Floats
) -> None:
    """Rank a request, and let it wait in its worker's queue."""
    r = requests[i]
    r.key = settings.aging * r.release
    if settings.order == REMAINING:
        r.key += tokens_left(settings.every, offsets, remaining, i, r.seen, r.produced)
    elif settings.order == TOTAL:
        r.key += r.total

    r.outdated = False
    r.left = r.right = -1
    worker.queue = _merged(requests, worker.queue, i)


@njit
def _unlink(requests: Any, worker: Any, i: int, limits: Limits) -> None:
    """Remove a request from those that hold KV on its worker."""
    r = requests[i]
    free(worker, r, limits)
    worker.holders -= 1

    if r.previous >= 0:
        requests[r.previous].next = r.next
    else:
        worker.holder = r.next

    if r.next >= 0:
        requests[r.next].previous = r.previous


@njit
def _link(requests: Any, worker: Any, i: int) -> None:
    """Add a request to those that hold KV, which is not counted yet."""
    r = requests[i]
    worker.holders += 1
    r.previous, r.next = -1, worker.holder
    if worker.holder >= 0:
        requests[worker.holder].previous = i

    worker.holder = i


@njit
def _end_window(
    requests: Any, worker: Any, s: Any, settings: Settings, offsets: Ints, remaining: Floats
) -> None:
    """Let the requests whose window ends now wait again, unless they are done."""
    worker.until = np.inf
    i = worker.member
    worker.member = -1

    while i >= 0:
        r = requests[i]
        r.inside = False
        if r.produced == r.output:
            s.done += 1
            worker.assigned -= 1
        else:
            _queue(requests, worker, i, settings, offsets, remaining)

        i = r.member


@njit
def _least_busy(machines: Any) -> int:
    w = 0
    for v in range(1, machines.shape[0]):
        if machines[v].assigned < machines[w].assigned:
            w = v

    return w


@njit
def _choose(
    requests: Any,
    worker: Any,
    s: Any,
    members: Ints,
    settings: Settings,
    offsets: Ints,
    remaining: Floats,
) -> None:
    """Choose the batch of a window: the first requests of the queue that fit together."""
    s.members = 0
    need = 0
    while s.members < settings.size and worker.queue >= 0:
        i = worker.queue
        r = requests[i]
        if r.outdated:
            worker.queue = _merged(requests, r.left, r.right)
            _queue(requests, worker, i, settings, offsets, remaining)
            continue

        need += kv_of(r.prompt + r.produced, settings.limits)
        if need > settings.limits.kv_capacity:
            break

        worker.queue = _merged(requests, r.left, r.right)
        members[s.members] = i
        s.members += 1
        r.member = worker.member
        worker.member = i
        r.quota = settings.window
        r.inside = True


@njit
def _next_prefills(requests: Any, s: Any, members: Ints, step: Ints, limits: Limits) -> None:
    """Choose the next prefills, as many members as C and P allow."""
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    s.chosen = s.growth = 0
    s.staying = s.members
    tokens = 0

    while s.position < s.members:
        i = members[s.position]
        r = requests[i]
        if r.cached == 0 and r.quota > 0:
            c = r.prompt + r.produced
            if tokens + c > room:
                if s.chosen == 0:
                    s.outcome, s.about = STUCK, i

                return

            step[s.chosen] = i
            s.chosen += 1
            tokens += c
            s.growth += kv_of(c, limits)

        s.position += 1


@njit
def _next_decodes(requests: Any, s: Any, members: Ints, step: Ints, limits: Limits) -> None:
    """Choose the next decodes: every member, except those that the KV alone cannot hold."""
    kv = 0
    for k in range(s.members):
        r = requests[members[k]]
        kv += kv_of(r.cached, limits)
        if r.quota > 0:
            step[s.chosen] = members[k]
            s.chosen += 1
            s.growth += growth(r, 1, limits)

    while kv + s.growth > limits.kv_capacity:
        s.staying -= 1
        r = requests[members[s.staying]]
        kv -= kv_of(r.cached, limits)

        if r.quota > 0:
            s.chosen -= 1
            s.growth -= growth(r, 1, limits)


@njit
def _make_room(
    requests: Any, worker: Any, s: Any, members: Ints, evicted: Ints, fresh: int, limits: Limits
) -> None:
    """Evict by lowest priority until the step fits, requests outside the batch first."""
    while True:
        victim = -1
        if not room(worker, s.growth, limits) or worker.holders + fresh > limits.max_running:
            h = worker.holder
            while h >= 0:
                if not requests[h].inside and (victim < 0 or before(requests[victim], requests[h])):
                    victim = h

                h = requests[h].next

        if victim >= 0:
            requests[victim].outdated = limits.restart
        elif s.members > s.staying:
            s.members -= 1
            victim = members[s.members]
        else:
            return

        _unlink(requests, worker, victim, limits)
        evict(requests[victim], limits.restart)
        add_eviction(evicted, s, victim)


@njit
def _step(
    requests: Any, worker: Any, s: Any, step: Ints, entries: Ints, fresh: int, limits: Limits
) -> Any:
    """Process the chosen members; return the sums of the batch."""
    sums = EMPTY
    for k in range(s.chosen):
        i = step[k]
        r = requests[i]
        c = 1

        if fresh > 0:
            c = r.prompt + r.produced
            sums = add_prefill(sums, c, 0)
            _link(requests, worker, i)
        else:
            sums = add_decode(sums, r.cached)

        add_entry(entries, s, i, c)
        take(worker, r, c, limits)
        advance(r, c)
        r.quota -= 1
        r.seen = max(r.seen, r.produced)
        s.ended = s.ended or r.produced == r.output

    return sums


@njit
def _run_window(
    requests: Any,
    worker: Any,
    s: Any,
    members: Ints,
    step: Ints,
    limits: Limits,
    cost: Floats,
    columns: Columns,
) -> Columns:
    """Run a window: first prefills, in as few batches as C and P allow, then decodes."""
    clock = s.now
    s.position = 0
    s.ended = False

    while not s.ended:
        _next_prefills(requests, s, members, step, limits)
        if s.outcome != DONE:
            break

        fresh = s.chosen
        if fresh == 0:
            _next_decodes(requests, s, members, step, limits)
            if s.chosen == 0:
                break

        if full(columns, s, s.chosen, worker.holders):
            columns = with_room(columns, s, s.chosen, worker.holders)

        _make_room(requests, worker, s, members, columns.evicted, fresh, limits)
        sums = _step(requests, worker, s, step, columns.entries, fresh, limits)
        clock += batch_time(cost, sums)
        b = columns.batches[s.batches]
        b.entries, b.evicted = s.entries, s.evicted
        s.batches += 1
        s.since += 1

    worker.until = clock
    for k in range(s.members):  # a finished request holds nothing in the next window
        r = requests[members[k]]
        if r.produced == r.output:
            s.since = 0
            _unlink(requests, worker, members[k], limits)
            r.cached = 0

    return columns


@njit
def run(
    requests: Any,
    machines: Any,
    state: Any,
    settings: Settings,
    cost: Floats,
    offsets: Ints,
    remaining: Floats,
    columns: Columns,
) -> Columns:
    """Run a scheduler to the end."""
    n = requests.shape[0]
    limits = settings.limits
    s = state[0]
    by_arrival = np.empty(n, dtype=np.int64)
    for i in range(n):
        by_arrival[requests[i].place] = i

    members = np.empty(settings.size, dtype=np.int64)
    step = np.empty(settings.size, dtype=np.int64)
    while s.done < n and s.turns > 0:
        s.turns -= 1
        s.now = np.inf if s.arrived == n else requests[by_arrival[s.arrived]].release
        for w in range(machines.shape[0]):
            s.now = min(s.now, machines[w].until)
        for w in range(machines.shape[0]):
            if machines[w].until <= s.now:
                _end_window(requests, machines[w], s, settings, offsets, remaining)

        i = arriving(requests, s, by_arrival)
        while i >= 0:
            worker = machines[_least_busy(machines)]
            worker.assigned += 1
            _queue(requests, worker, i, settings, offsets, remaining)
            i = arriving(requests, s, by_arrival)

        for w in range(machines.shape[0]):
            worker = machines[w]
            if worker.until != np.inf or worker.queue < 0:
                continue

            _choose(requests, worker, s, members, settings, offsets, remaining)
            first = s.batches
            columns = _run_window(requests, worker, s, members, step, limits, cost, columns)
            for j in range(first, s.batches):
                columns.batches[j].worker = w
            if limits.restart and s.since > MAX_STALLED_BATCHES and s.outcome == DONE:
                s.outcome, s.about = STALLED, members[0]
            if s.outcome != DONE:
                return columns

    return columns
