"""Runs schedulers that work in windows (`optsched.policies.windows.Windows`).

Between two decisions of a worker, nothing that happens elsewhere changes what it does. A window is
therefore run to its end when it begins. The events of the loop are arrivals and ends of windows.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, kv_of, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import common
from optsched.policies.engine.common import Columns, before
from optsched.policies.runner import MAX_STALLED_BATCHES
from optsched.problem.kernel import njit

ORDERS = {"arrival": 0, "remaining": 1, "total": 2}
ARRIVAL, REMAINING, TOTAL = 0, 1, 2

QUEUE, HOLDERS, BATCH, STEP = 0, 1, 2, 3
"""A worker's lines: the queue, a heap; those that hold KV; members of its window, and of a step."""

REQUEST_FIELDS = (
    *common.FIELDS,
    ("total", np.int64),  # predicted output, for the order of that name
    ("seen", np.int64),  # max tokens that it has ever produced
    ("quota", np.int64),  # tokens that it has to produce in its window
    ("inside", np.bool_),  # in the batch of a window
    ("outdated", np.bool_),  # its key has risen since it was queued
)

WORKER = life.record(
    ("until", np.float64),  # end of the window that runs; infinite: idle
    ("waiting", np.int64),  # lengths of its lines
    ("holders", np.int64),
    ("members", np.int64),
    *MEMORY,
    ("assigned", np.int64),  # unfinished requests
)

STATE_FIELDS = (
    ("members", np.int64),  # of the batch of a window, which keep their KV
    ("position", np.int64),  # of the members whose prefill was looked at
    ("chosen", np.int64),  # members that the next step processes
    ("fresh", np.int64),  # of them, those that it prefills: all or none
    ("staying", np.int64),  # members that may keep their KV
    ("growth", np.int64),  # KV that the step adds
    ("ended", np.bool_),  # some member has finished
)


class Settings(NamedTuple):
    """`Windows` for compiled code, with the limits of each worker."""

    limits: Limits
    cost: Floats
    every: int  # tokens between predictions, which `offsets` and `remaining` hold
    offsets: Ints
    remaining: Floats
    order: int
    window: int
    aging: float
    size: int  # max requests of a batch


@njit
def _queue(requests: Records, worker: np.record, line: Ints, i: int, settings: Settings) -> None:
    """Rank a request, and let it wait in its worker's queue."""
    r = requests[i]
    r.key = settings.aging * r.release
    if settings.order == REMAINING:
        every, offsets, remaining = settings.every, settings.offsets, settings.remaining
        r.key += common.tokens_left(every, offsets, remaining, i, r.seen, r.produced)
    elif settings.order == TOTAL:
        r.key += r.total

    r.outdated = False
    common.push(requests, line, worker, i)


@njit
def _drop(requests: Records, worker: np.record, holders: Ints, i: int, limits: Limits) -> None:
    """Remove a request from those that hold KV on its worker."""
    free(worker, requests[i], limits)
    k = 0
    while holders[k] != i:
        k += 1

    last = worker.holders - 1
    holders[k], worker.holders = holders[last], last


@njit
def _end_window(requests: Records, worker: np.record, lines: Ints, settings: Settings) -> int:
    """Let the requests of a window that ends wait again, unless they are done; count these."""
    worker.until = np.inf
    done = 0
    for k in range(worker.members):
        i = lines[BATCH, k]
        r = requests[i]
        r.inside = False
        if r.produced == r.output:
            done += 1
        else:
            _queue(requests, worker, lines[QUEUE], i, settings)

    worker.members = 0
    worker.assigned -= done
    return done


@njit
def _choose(requests: Records, worker: np.record, lines: Ints, settings: Settings) -> None:
    """Choose the batch of a window: the first requests of the queue that fit together."""
    queue = lines[QUEUE]
    need = 0
    while worker.members < settings.size and worker.waiting > 0:
        i = queue[0]
        r = requests[i]
        if r.outdated:
            common.pop(requests, queue, worker)
            _queue(requests, worker, queue, i, settings)
            continue

        need += kv_of(r.prompt + r.produced, settings.limits)
        if need > settings.limits.kv_capacity:
            break

        common.pop(requests, queue, worker)
        lines[BATCH, worker.members] = i
        worker.members += 1
        r.quota = settings.window
        r.inside = True


@njit
def _next_prefills(requests: Records, s: np.record, lines: Ints, limits: Limits) -> None:
    """Choose the next prefills, as many members as C and P allow."""
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    s.chosen = s.growth = 0
    s.staying = s.members
    tokens = 0

    while s.position < s.members:
        i = lines[BATCH, s.position]
        r = requests[i]
        if r.cached == 0 and r.quota > 0:
            c = r.prompt + r.produced
            if tokens + c > room:
                if s.chosen == 0:
                    s.outcome, s.about = common.STUCK, i

                return

            lines[STEP, s.chosen] = i
            s.chosen += 1
            tokens += c
            s.growth += kv_of(c, limits)

        s.position += 1


@njit
def _next_decodes(requests: Records, s: np.record, lines: Ints, limits: Limits) -> None:
    """Choose the next decodes: every member, except those that the KV alone cannot hold."""
    kv, staying = 0, s.members
    for k in range(s.members):
        r = requests[lines[BATCH, k]]
        kv += kv_of(r.cached, limits)
        if r.quota > 0:
            lines[STEP, s.chosen] = lines[BATCH, k]
            s.chosen += 1
            s.growth += growth(r, 1, limits)

    while kv + s.growth > limits.kv_capacity:
        staying -= 1
        r = requests[lines[BATCH, staying]]
        kv -= kv_of(r.cached, limits)

        if r.quota > 0:
            s.chosen -= 1
            s.growth -= growth(r, 1, limits)

    s.staying = staying


@njit
def _make_room(
    requests: Records, worker: np.record, s: np.record, lines: Ints, evicted: Ints, limits: Limits
) -> None:
    """Evict by lowest priority until the step fits, requests outside the batch first."""
    members, holders = lines[BATCH], lines[HOLDERS]
    while True:
        victim = -1
        if not room(worker, s.growth, limits) or worker.holders + s.fresh > limits.max_running:
            for k in range(worker.holders):
                h = holders[k]
                if not requests[h].inside and (victim < 0 or before(requests[victim], requests[h])):
                    victim = h

        if victim >= 0:
            requests[victim].outdated = limits.restart
        elif s.members > s.staying:
            s.members -= 1
            victim = members[s.members]
        else:
            return

        _drop(requests, worker, holders, victim, limits)
        life.evict(requests[victim], limits.restart)
        common.add_eviction(evicted, s, victim)


@njit
def _step(
    requests: Records, worker: np.record, s: np.record, lines: Ints, entries: Ints, limits: Limits
) -> Sums:
    """Process the chosen members; return the sums of the batch."""
    sums = EMPTY
    for k in range(s.chosen):
        i = lines[STEP, k]
        r = requests[i]
        c = 1

        if s.fresh > 0:
            c = r.prompt + r.produced
            sums = add_prefill(sums, c, 0)
            lines[HOLDERS, worker.holders] = i
            worker.holders += 1
        else:
            sums = add_decode(sums, r.cached)

        common.add_entry(entries, s, i, c)
        take(worker, r, c, limits)
        life.advance(r, c)
        r.quota -= 1
        r.seen = max(r.seen, r.produced)
        s.ended = s.ended or r.produced == r.output

    return sums


@njit
def _run_window(
    requests: Records,
    worker: np.record,
    s: np.record,
    lines: Ints,
    settings: Settings,
    columns: Columns,
) -> Columns:
    """Run a window: first prefills, in as few batches as C and P allow, then decodes."""
    limits, members, clock = settings.limits, lines[BATCH], s.now
    while not s.ended:
        _next_prefills(requests, s, lines, limits)
        s.fresh = s.chosen
        if s.fresh == 0:
            _next_decodes(requests, s, lines, limits)
        if s.chosen == 0 or s.outcome != common.DONE:
            break
        if common.full(columns, s, s.chosen, worker.holders):
            columns = common.with_room(columns, s, s.chosen, worker.holders)

        _make_room(requests, worker, s, lines, columns.evicted, limits)
        sums = _step(requests, worker, s, lines, columns.entries, limits)
        clock += batch_time(settings.cost, sums)
        b = columns.batches[s.batches]
        b.entries, b.evicted = s.entries, s.evicted
        s.batches += 1
        s.since += 1

    worker.until = clock
    for k in range(s.members):  # a finished request holds nothing in the next window
        r = requests[members[k]]
        if r.produced == r.output:
            s.since = 0
            _drop(requests, worker, lines[HOLDERS], members[k], limits)
            r.cached = 0

    return columns


@njit
def run(
    requests: Records,
    machines: Records,
    state: Records,
    settings: Settings,
    columns: Columns,
    lines: Ints,
) -> Columns:
    """Run a scheduler to the end."""
    n, workers = requests.shape[0], machines.shape[0]
    s = state[0]
    by_arrival = np.empty(n, np.int64)
    for i in range(n):
        by_arrival[requests[i].seq] = i

    while s.done < n and s.turns > 0:
        s.turns -= 1
        s.now = np.inf if s.arrived == n else requests[by_arrival[s.arrived]].release
        for w in range(workers):
            s.now = min(s.now, machines[w].until)
        for w in range(workers):
            worker = machines[w]
            if worker.until <= s.now:
                s.done += _end_window(requests, worker, lines[w], settings)

        i = common.arriving(requests, s, by_arrival)
        while i >= 0:  # each to the worker of the fewest unfinished requests
            w = 0
            for v in range(1, workers):
                if machines[v].assigned < machines[w].assigned:
                    w = v

            machines[w].assigned += 1
            _queue(requests, machines[w], lines[w, QUEUE], i, settings)
            i = common.arriving(requests, s, by_arrival)

        for w in range(workers):
            worker = machines[w]
            if worker.until != np.inf or worker.waiting == 0:
                continue

            _choose(requests, worker, lines[w], settings)
            s.members, s.position, s.ended = worker.members, 0, False
            first = s.batches
            columns = _run_window(requests, worker, s, lines[w], settings, columns)
            for j in range(first, s.batches):
                columns.batches[j].worker = w
            if (
                settings.limits.restart
                and s.since > MAX_STALLED_BATCHES
                and s.outcome == common.DONE
            ):
                s.outcome, s.about = common.STALLED, lines[w, BATCH, 0]
            if s.outcome != common.DONE:
                return columns

    return columns
