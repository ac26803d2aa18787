"""Runs `optsched.policies.vllm_v1.VllmV1` step by step.

This loop differs from `optsched.policies.engine.rules` in three things. Running requests stand in
the order of their admission. KV is allocated chunk by chunk and not for the whole input. And a
request that is preempted may already have its place in the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.judge import life
from optsched.judge.life import EMPTY, Floats, Ints, Records, add_decode, add_prefill, batch_time
from optsched.judge.memory import MEMORY, free, growth, kv_of, room, take
from optsched.judge.replay import Limits
from optsched.policies.engine import common
from optsched.policies.engine.common import REQUEST, TOKENS, Columns, add_entry, add_eviction, push
from optsched.problem.kernel import njit

REQUEST_FIELDS = (
    *common.FIELDS,
    ("tokens", np.int64),  # that the step processes
)

STATE_FIELDS = (
    *MEMORY,
    ("left", np.int64),  # tokens of the step's budget
    ("prefill_left", np.int64),  # of them for prefills
    ("steps", np.int64),  # since the engine was idle
    ("line", np.int64),  # requests that have begun to wait at the end of the line
    ("front", np.int64),  # and at its front
    ("decodes", np.int64),  # in the step
    ("prefills", np.int64),
    ("threshold", np.int64),  # max tokens of a request in the step; 0: no limit
    ("defer", np.bool_),  # whether prefills wait for a later step
    ("bound", np.bool_),  # requests were left waiting when prefills were last scheduled
)


class Settings(NamedTuple):
    """`VllmV1` for compiled code, with the instance's limits; seats and budget are the tighter."""

    limits: Limits
    origin: float
    budget: int  # tokens of a step
    threshold: int
    watermark: int  # KV tokens
    reserve: bool
    interval: int
    by_priority: bool


@njit(allocates=False)
def _wait(
    requests: Records, s: np.record, heap: Ints, i: int, back: bool, by_priority: bool
) -> None:
    """Let a request wait: at its priority, or at the end or the front of the line."""
    r = requests[i]
    if by_priority:
        r.key, r.place = r.order, r.seq
    elif back:
        s.line += 1
        r.place = s.line
    else:
        s.front -= 1
        r.place = s.front

    push(requests, heap, s, i)


@njit(allocates=False)
def _begin(requests: Records, s: np.record, running: Ints, settings: Settings) -> None:
    """Begin a step with its budget, and say whether it defers prefills."""
    s.left, s.prefill_left = settings.budget, settings.limits.max_prefill_tokens
    s.decodes = s.prefills = 0
    s.threshold = settings.threshold if s.running + s.waiting > 1 else 0
    s.defer = False
    if s.steps % settings.interval > 0 and not s.bound:
        for k in range(s.running):
            s.defer = s.defer or requests[running[k]].decoding


@njit(allocates=False)
def _share(r: np.record, s: np.record, settings: Settings) -> int:
    """Return how many tokens of a request the step takes; 0 if none."""
    limits = settings.limits
    tokens = life.rest_of(r)
    if 0 < s.threshold < tokens:
        tokens = s.threshold
    if not limits.hybrid and (s.prefills if r.decoding else s.decodes) > 0:
        return 0
    if r.decoding:
        return min(tokens, s.left)

    room = min(s.left, s.prefill_left)
    if limits.chunked:
        return min(tokens, room)
    if s.decodes + s.prefills == 0:  # what is longer than the budget runs alone
        room = min(limits.max_batch_tokens, limits.max_prefill_tokens)

    return tokens if tokens <= room else 0


@njit(allocates=False)
def _give(r: np.record, s: np.record, tokens: int, sign: int) -> None:
    """Give a request tokens of the step, or with sign -1 take them back."""
    s.left -= sign * tokens
    if r.decoding:
        s.decodes += sign
    else:
        s.prefills += sign
        s.prefill_left -= sign * tokens

    r.tokens = tokens if sign > 0 else 0


@njit(allocates=False)
def _preempt(
    requests: Records, s: np.record, lines: Ints, evicted: Ints, settings: Settings
) -> int:
    """Preempt the last running request, or the one of lowest priority; return its position."""
    running = lines[1]
    at = s.running - 1
    if settings.by_priority:
        for k in range(s.running):
            if common.ahead(requests[running[at]], requests[running[k]]):
                at = k

    i = running[at]
    r = requests[i]
    free(s, r, settings.limits)
    if r.tokens > 0:
        _give(r, s, r.tokens, -1)

    life.evict(r, settings.limits.restart)
    add_eviction(evicted, s, i)
    for k in range(at, s.running - 1):
        running[k] = running[k + 1]

    s.running -= 1
    _wait(requests, s, lines[0], i, False, settings.by_priority)
    return int(at)


@njit(allocates=False)
def _schedule_running(
    requests: Records, s: np.record, lines: Ints, evicted: Ints, settings: Settings
) -> None:
    """Give running requests their tokens. Preempt others, and at last itself, for want of KV."""
    running, limits = lines[1], settings.limits
    at = 0
    while at < s.running and s.left > 0:
        r = requests[running[at]]
        tokens = 0 if s.defer and not r.decoding else _share(r, s, settings)
        if tokens == 0:
            at += 1
            continue

        while not room(s, growth(r, tokens, limits), limits):
            gone = _preempt(requests, s, lines, evicted, settings)
            if gone == at:
                return
            if gone < at:
                at -= 1

        _give(r, s, tokens, 1)
        take(s, r, tokens, limits)
        at += 1


@njit(allocates=False)
def _admit(requests: Records, s: np.record, lines: Ints, settings: Settings) -> None:
    """Admit waiting requests, up to the first that must wait on."""
    heap, running, limits = lines[0], lines[1], settings.limits
    while s.left > 0 and s.waiting > 0 and s.running < limits.max_running:
        i = heap[0]
        r = requests[i]
        size = life.rest_of(r)
        if s.defer and size > 1:
            break

        tokens = _share(r, s, settings)
        needed = kv_of(size if settings.reserve else tokens, limits)
        if s.running > 0:
            needed += settings.watermark
        if tokens == 0 or not room(s, needed, limits):
            break

        common.pop(requests, heap, s)
        running[s.running] = i
        s.running += 1
        _give(r, s, tokens, 1)
        take(s, r, tokens, limits)

    if not s.defer:
        s.bound = s.waiting > 0


@njit(allocates=False)
def _entries(requests: Records, s: np.record, running: Ints, entries: Ints) -> Sums:
    """Write the entries of a batch; return its sums."""
    sums = EMPTY
    s.latest = 0.0
    for k in range(s.running):
        r = requests[running[k]]
        if r.tokens == 0:
            continue
        if r.decoding:
            sums = add_decode(sums, r.cached)
        else:
            sums = add_prefill(sums, r.tokens, r.cached)

        s.latest = max(s.latest, r.release)
        add_entry(entries, s, running[k], r.tokens)

    return sums


@njit(allocates=False)
def _process(
    requests: Records, s: np.record, running: Ints, entries: Ints, first: int, limits: Limits
) -> None:
    """Process the entries of a batch from ``first`` on."""
    finished = 0
    for k in range(first, s.entries):
        r = requests[entries[REQUEST, k]]
        r.tokens = 0
        if life.advance(r, entries[TOKENS, k]) and common.note(r, s):
            finished += 1
            free(s, r, limits)

    common.after_batch(requests, running, s, finished)


@njit
def run(
    requests: Records,
    state: Records,
    settings: Settings,
    cost: Floats,
    by_arrival: Ints,
    columns: Columns,
    lines: Ints,
    until: float,
) -> Columns:
    """Run the policy until the requests assigned so far have finished, or up to a time.

    `lines` (shape (2, n + 1)) is room for the queue, and for the running ones by admission.
    """
    n = by_arrival.shape[0]
    s = state[0]
    heap, running = lines[0], lines[1]

    while s.done < n and s.outcome == common.DONE and s.now < until and s.turns > 0:
        s.turns -= 1
        if s.running == 0 and s.waiting == 0:  # idle, even if the next request is just arriving
            s.steps = 0

        i = common.arriving(requests, s, by_arrival)
        while i >= 0:
            _wait(requests, s, heap, i, True, settings.by_priority)
            i = common.arriving(requests, s, by_arrival)

        if s.running == 0 and s.waiting == 0:
            common.idle(requests, s, by_arrival)
            continue

        if common.full(columns, s, s.running + s.waiting, s.running):
            columns = common.with_room(columns, s, s.running + s.waiting, s.running)

        _begin(requests, s, running, settings)
        first, before = s.entries, s.evicted
        _schedule_running(requests, s, lines, columns.evicted, settings)
        if s.evicted == before:
            _admit(requests, s, lines, settings)

        s.steps += 1
        sums = _entries(requests, s, running, columns.entries)
        if sums.tokens == 0:
            if s.evicted == before and not common.idle(requests, s, by_arrival):
                if until < np.inf:  # the next request may change that
                    break

                s.outcome, s.about = common.STUCK, heap[0] if s.waiting > 0 else running[0]
                break

            continue

        common.run_batch(columns.batches, s, settings.origin, batch_time(cost, sums))
        _process(requests, s, running, columns.entries, first, settings.limits)
        if s.outcome != common.DONE:
            break

    return columns
