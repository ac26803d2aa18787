"""Runs schedulers that work in windows (`optsched.policies.windows.Windows`).

Between two decisions of a worker, nothing that happens elsewhere changes what it does. A window is
therefore run to its end when it begins, even if others decide before that. C and P are the limits
on the tokens and on the prefill tokens of a batch. `requests` and the state `s` are records, whose
fields stand in `REQUEST_FIELDS` and `STATE_FIELDS`.
"""

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, has_room, kv_of, take
from optsched.policies.engine import common
from optsched.policies.engine.common import Columns, Worker, precedes
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
    ("members", np.int64),  # number of the window's members, which keep their KV
    ("position", np.int64),  # of the next member whose prefill is to be looked at
    ("chosen", np.int64),  # number of members that the next step processes
    ("fresh", np.int64),  # how many of them it prefills: all or none
    ("staying", np.int64),  # number of members that may keep their KV
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
def _enqueue(requests: Records, s: np.record, w: Worker, i: int, settings: Settings) -> None:
    """Rank a request, and let it wait in the queue.

    The key is in tokens: what it has left or in total, and ``aging`` for each second of arrival.
    Ties go by the place. Places ascend with arrival, as ``aging`` times the release does: in the
    order of arrival, whose key is that alone, the place alone counts.
    """
    r = requests[i]
    r.key = settings.aging * r.release
    if settings.order == REMAINING:
        every, offsets, remaining = settings.every, settings.offsets, settings.remaining
        r.key += common.tokens_left(every, offsets, remaining, i, r.seen, r.produced)
    elif settings.order == TOTAL:
        r.key += r.total

    r.outdated = False
    common.push(requests, w.lines[QUEUE], s, i)


@njit
def _free_holder(requests: Records, s: np.record, w: Worker, i: int) -> None:
    """Free the KV of a request, and remove it from the list of those that hold some."""
    holders = w.lines[HOLDERS]
    free(s, requests[i], w.limits)
    k = 0
    while holders[k] != i:
        k += 1

    s.running -= 1
    holders[k] = holders[s.running]  # the list has no order


@njit
def _end_window(requests: Records, s: np.record, w: Worker, size: int, settings: Settings) -> None:
    """Let the requests of a window of so many wait again, unless they are done."""
    for k in range(size):
        i = w.lines[BATCH, k]
        r = requests[i]
        r.inside = False
        # A completion ends the window, so the last token of whoever is done has come just now.
        if common.note_token(r, s):
            s.since_progress = 0
            s.done += 1
            _free_holder(requests, s, w, i)
        else:
            _enqueue(requests, s, w, i, settings)


@njit
def _choose_members(requests: Records, s: np.record, w: Worker, settings: Settings) -> None:
    """Choose the batch of a window: the first requests of the queue that fit together."""
    queue, limits = w.lines[QUEUE], w.limits
    s.members = kv = 0
    while s.members < settings.size and s.waiting > 0:
        i = queue[0]
        r = requests[i]
        # Since its key has risen it may not be the first any more, so it is queued again.
        if r.outdated:
            common.pop(requests, queue, s)
            _enqueue(requests, s, w, i, settings)
            continue

        kv += kv_of(r.prompt + r.produced, limits)
        # The first that does not fit ends the batch, so that no shorter one overtakes it.
        if kv > limits.kv_capacity:
            break

        common.pop(requests, queue, s)
        w.lines[BATCH, s.members] = i
        s.members += 1
        r.quota = settings.window
        r.inside = True


@njit
def _next_prefills(requests: Records, s: np.record, w: Worker) -> None:
    """Choose the next prefills, as many members as the token limits C and P allow.

    They are the first ``s.chosen`` of line `STEP`. 0: no member needs one any more, or the outcome
    says that one is too large.
    """
    lines, limits = w.lines, w.limits
    max_tokens = min(limits.max_batch_tokens, limits.max_prefill_tokens)
    s.chosen = s.growth = 0
    s.staying = s.members
    batch_tokens = 0

    while s.position < s.members:
        i = lines[BATCH, s.position]
        r = requests[i]
        # A member that has kept its KV since an earlier window needs no prefill, nor does one that
        # has produced its quota of the window.
        if r.cached == 0 and r.quota > 0:
            tokens = r.prompt + r.produced
            # The batch is full, and the next one begins with this member. If it alone is too large
            # for a batch, the loop is stuck.
            if batch_tokens + tokens > max_tokens:
                if s.chosen == 0:
                    s.outcome, s.about = common.STUCK, i

                return

            lines[STEP, s.chosen] = i
            s.chosen += 1
            batch_tokens += tokens
            s.growth += kv_of(tokens, limits)

        s.position += 1


@njit
def _next_decodes(requests: Records, s: np.record, w: Worker) -> None:
    """Choose the next decodes: every member, but for the last ones if KV cannot hold all.

    `_next_prefills`, which found none, has left `s.chosen` and `s.growth` at 0.
    """
    lines, limits = w.lines, w.limits
    kv, staying = 0, s.members  # KV that the members hold, and how many of them stay
    for k in range(s.members):
        r = requests[lines[BATCH, k]]
        kv += kv_of(r.cached, limits)
        if r.quota > 0:
            lines[STEP, s.chosen] = lines[BATCH, k]
            s.chosen += 1
            s.growth += growth(r, 1, limits)

    # Members stand by priority, so the last ones give up their KV and their part in the step:
    # `_make_room` evicts those from ``s.staying`` on.
    while kv + s.growth > limits.kv_capacity:
        staying -= 1
        r = requests[lines[BATCH, staying]]
        kv -= kv_of(r.cached, limits)

        # Those chosen stand in the members' order, so it is the last of them.
        if r.quota > 0:
            s.chosen -= 1
            s.growth -= growth(r, 1, limits)

    s.staying = staying


@njit
def _make_room(requests: Records, s: np.record, w: Worker, evicted: Ints) -> None:
    """Evict until the step fits: requests outside the window first, each time the last in order.

    Then the members go that may not stay (``s.staying``). Victim -1: nobody outside goes.
    """
    members, holders, limits = w.lines[BATCH], w.lines[HOLDERS], w.limits
    while True:
        victim = -1
        # Each prefill of the step takes a seat.
        if not has_room(s, s.growth, limits) or s.running + s.fresh > limits.max_running:
            for k in range(s.running):
                i = holders[k]
                if requests[i].inside:
                    continue
                if victim < 0 or precedes(requests[victim], requests[i]):
                    victim = i

        if victim >= 0:
            # A restart loses its tokens, so that more is left than when it was queued.
            requests[victim].outdated = limits.restart
        elif s.members > s.staying:
            s.members -= 1
            victim = members[s.members]
        else:
            return

        _free_holder(requests, s, w, victim)
        life.evict(requests[victim], limits.restart)
        common.add_eviction(evicted, s, victim)


@njit
def _step(requests: Records, s: np.record, w: Worker, entries: Ints) -> Sums:
    """Process the chosen members in one batch, all prefilled or all decoded; return its sums.

    They take their KV, and ``s.ended`` is set if one has finished (`_end_window` sees to it).
    """
    sums = EMPTY
    s.latest = 0.0  # the last release of a request in the batch
    for k in range(s.chosen):
        i = w.lines[STEP, k]
        r = requests[i]
        tokens = 1

        if s.fresh > 0:  # all of them are prefilled
            tokens = r.prompt + r.produced
            sums = add_prefill(sums, tokens, 0)
            w.lines[HOLDERS, s.running] = i
            s.running += 1
        else:
            sums = add_decode(sums, r.cached)

        common.add_entry(entries, s, i, tokens)
        take(s, r, tokens, w.limits)
        s.latest = max(s.latest, r.release)
        life.advance(r, tokens)
        r.quota -= 1  # a prefill counts as one token of the window
        r.seen = max(r.seen, r.produced)
        s.ended = s.ended or r.produced == r.output

    return sums


@njit
def _run_window(requests: Records, s: np.record, w: Worker) -> Columns:
    """Run a window; return the columns. Prefills come first, in as few batches as C and P allow."""
    columns = w.columns
    s.position, s.ended = 0, False
    # A completion ends the window early, so that others take the seat.
    while not s.ended:
        _next_prefills(requests, s, w)
        s.fresh = s.chosen  # how many the step prefills: all that are chosen, or none
        if s.fresh == 0:
            _next_decodes(requests, s, w)
        if s.chosen == 0 or s.outcome != common.DONE:
            break
        if common.lacks_room(columns, s, s.chosen, s.running):
            columns = common.with_room(columns, s, s.chosen, s.running)
            s.turns = 0  # the loop begins anew, with these

        _make_room(requests, s, w, columns.evicted)
        sums = _step(requests, s, w, columns.entries)
        common.run_batch(columns.batches, s, batch_time(w.cost, sums))
        s.since_progress += 1

    return columns


@njit
def run(requests: Records, state: Records, w: Worker, settings: Settings) -> Columns:
    """Run until the requests assigned so far are done, or up to a time; return the columns."""
    s, columns = state[0], w.columns
    while True:
        new = common.take_arrivals(requests, s, w)  # how many have come; -1: return
        if new < 0:
            return columns

        for k in range(s.arrived - new, s.arrived):
            requests[w.coming[k]].place = requests[w.coming[k]].seq
            _enqueue(requests, s, w, w.coming[k], settings)

        _choose_members(requests, s, w, settings)
        size = s.members  # with those that the window will evict: these wait again, too
        columns = _run_window(requests, s, w)
        _end_window(requests, s, w, size, settings)
        # Where evictions lose no tokens, every window produces new ones, so this comes to an end.
        stalled = w.limits.restart and s.since_progress > MAX_STALLED_BATCHES
        if stalled and s.outcome == common.DONE:
            s.outcome, s.about = common.STALLED, w.lines[BATCH, 0]
