"""Runs schedulers that work in windows (`optsched.policies.windows.Windows`).

Between two decisions of a worker, nothing that happens elsewhere changes what it does. A window is
therefore run to its end when it begins, even if others decide before that.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, kv_of, room, take
from optsched.policies.engine import common
from optsched.policies.engine.common import Columns, Worker, before
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

STATE_FIELDS = (
    *MEMORY,
    ("members", np.int64),  # of the batch of a window, which keep their KV
    ("position", np.int64),  # of the members whose prefill was looked at
    ("chosen", np.int64),  # members that the next step processes
    ("fresh", np.int64),  # of them, those that it prefills: all or none
    ("staying", np.int64),  # members that may keep their KV
    ("growth", np.int64),  # KV that the step adds
    ("ended", np.bool_),  # some member has finished
)


class Settings(NamedTuple):
    """`Windows` for compiled code."""

    every: int  # tokens between predictions, which `offsets` and `remaining` hold
    offsets: Ints
    remaining: Floats
    order: int
    window: int
    aging: float
    size: int  # max requests of a batch


@njit
def _queue(requests: Records, s: np.record, at: Worker, i: int, settings: Settings) -> None:
    """Rank a request, and let it wait in the queue."""
    r = requests[i]
    r.key = settings.aging * r.release
    if settings.order == REMAINING:
        every, offsets, remaining = settings.every, settings.offsets, settings.remaining
        r.key += common.tokens_left(every, offsets, remaining, i, r.seen, r.produced)
    elif settings.order == TOTAL:
        r.key += r.total

    r.outdated = False
    common.push(requests, at.lines[QUEUE], s, i)


@njit
def _drop(requests: Records, s: np.record, at: Worker, i: int) -> None:
    """Remove a request from those that hold KV."""
    holders = at.lines[HOLDERS]
    free(s, requests[i], at.limits)
    k = 0
    while holders[k] != i:
        k += 1

    s.running -= 1
    holders[k] = holders[s.running]


@njit
def _end_window(requests: Records, s: np.record, at: Worker, size: int, settings: Settings) -> None:
    """Let the requests of a window of so many wait again, unless they are done."""
    for k in range(size):
        i = at.lines[BATCH, k]
        r = requests[i]
        r.inside = False
        if common.note(r, s):
            s.since = 0
            s.done += 1
            _drop(requests, s, at, i)
        else:
            _queue(requests, s, at, i, settings)


@njit
def _choose(requests: Records, s: np.record, at: Worker, settings: Settings) -> None:
    """Choose the batch of a window: the first requests of the queue that fit together."""
    queue, limits = at.lines[QUEUE], at.limits
    s.members = need = 0
    while s.members < settings.size and s.waiting > 0:
        i = queue[0]
        r = requests[i]
        # Since its key has risen it may not be the first any more, so it is queued again.
        if r.outdated:
            common.pop(requests, queue, s)
            _queue(requests, s, at, i, settings)
            continue

        need += kv_of(r.prompt + r.produced, limits)
        # The first that does not fit ends the batch, so that no shorter one overtakes it.
        if need > limits.kv_capacity:
            break

        common.pop(requests, queue, s)
        at.lines[BATCH, s.members] = i
        s.members += 1
        r.quota = settings.window
        r.inside = True


@njit
def _next_prefills(requests: Records, s: np.record, at: Worker) -> None:
    """Choose the next prefills, as many members as C and P allow."""
    lines, limits = at.lines, at.limits
    room = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    s.chosen = s.growth = 0
    s.staying = s.members
    tokens = 0

    while s.position < s.members:
        i = lines[BATCH, s.position]
        r = requests[i]
        if r.cached == 0 and r.quota > 0:
            c = r.prompt + r.produced
            # The batch is full, and the next one begins with this member, unless none can hold it.
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
def _next_decodes(requests: Records, s: np.record, at: Worker) -> None:
    """Choose the next decodes: every member, except those that the KV alone cannot hold."""
    lines, limits = at.lines, at.limits
    kv, staying = 0, s.members
    for k in range(s.members):
        r = requests[lines[BATCH, k]]
        kv += kv_of(r.cached, limits)
        if r.quota > 0:
            lines[STEP, s.chosen] = lines[BATCH, k]
            s.chosen += 1
            s.growth += growth(r, 1, limits)

    # Members stand by priority, so the last ones give up their KV, and their part in the step.
    while kv + s.growth > limits.kv_capacity:
        staying -= 1
        r = requests[lines[BATCH, staying]]
        kv -= kv_of(r.cached, limits)

        if r.quota > 0:
            s.chosen -= 1
            s.growth -= growth(r, 1, limits)

    s.staying = staying


@njit
def _make_room(requests: Records, s: np.record, at: Worker, evicted: Ints) -> None:
    """Evict by lowest priority until the step fits, requests outside the batch first."""
    members, holders, limits = at.lines[BATCH], at.lines[HOLDERS], at.limits
    while True:
        victim = -1
        if not room(s, s.growth, limits) or s.running + s.fresh > limits.max_running:
            for k in range(s.running):
                h = holders[k]
                if not requests[h].inside and (victim < 0 or before(requests[victim], requests[h])):
                    victim = h

        if victim >= 0:
            # A restart loses its tokens, so that more is left than when it was queued.
            requests[victim].outdated = limits.restart
        elif s.members > s.staying:
            s.members -= 1
            victim = members[s.members]
        else:
            return

        _drop(requests, s, at, victim)
        life.evict(requests[victim], limits.restart)
        common.add_eviction(evicted, s, victim)


@njit
def _step(requests: Records, s: np.record, at: Worker, entries: Ints) -> Sums:
    """Process the chosen members; return the sums of the batch."""
    sums = EMPTY
    s.latest = 0.0
    for k in range(s.chosen):
        i = at.lines[STEP, k]
        r = requests[i]
        c = 1

        if s.fresh > 0:
            c = r.prompt + r.produced
            sums = add_prefill(sums, c, 0)
            at.lines[HOLDERS, s.running] = i
            s.running += 1
        else:
            sums = add_decode(sums, r.cached)

        common.add_entry(entries, s, i, c)
        take(s, r, c, at.limits)
        s.latest = max(s.latest, r.release)
        life.advance(r, c)
        r.quota -= 1
        r.seen = max(r.seen, r.produced)
        s.ended = s.ended or r.produced == r.output

    return sums


@njit
def _run_window(requests: Records, s: np.record, at: Worker) -> Columns:
    """Run a window; return the columns. Prefills come first, in as few batches as C and P allow."""
    columns = at.columns
    s.position, s.ended = 0, False
    # A completion ends the window early, so that others take the seat.
    while not s.ended:
        _next_prefills(requests, s, at)
        s.fresh = s.chosen
        if s.fresh == 0:
            _next_decodes(requests, s, at)
        if s.chosen == 0 or s.outcome != common.DONE:
            break
        if common.full(columns, s, s.chosen, s.running):
            columns = common.with_room(columns, s, s.chosen, s.running)
            s.turns = 0  # the loop begins anew, with these

        _make_room(requests, s, at, columns.evicted)
        sums = _step(requests, s, at, columns.entries)
        common.run_batch(columns.batches, s, batch_time(at.cost, sums))
        s.since += 1

    return columns


@njit
def run(requests: Records, state: Records, at: Worker, settings: Settings) -> Columns:
    """Run until the requests assigned so far are done, or up to a time; return the columns."""
    s, columns = state[0], at.columns
    while True:
        new = common.turn(requests, s, at)
        if new < 0:
            return columns

        for k in range(s.arrived - new, s.arrived):
            requests[at.coming[k]].place = requests[at.coming[k]].seq
            _queue(requests, s, at, at.coming[k], settings)

        _choose(requests, s, at, settings)
        size = s.members
        columns = _run_window(requests, s, at)
        _end_window(requests, s, at, size, settings)
        stalled = at.limits.restart and s.since > MAX_STALLED_BATCHES
        if stalled and s.outcome == common.DONE:
            s.outcome, s.about = common.STALLED, at.lines[BATCH, 0]
