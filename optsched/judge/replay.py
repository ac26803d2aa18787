"""The judge's replay of a schedule of batches, compiled by numba.

The tests compare it with a second judge that was written independently, with dictionaries and no
shared code. A violation is returned as numbers, and `optsched.evaluate` puts it into words.
Requests, workers and batches are records of structured arrays. Compiled code passes a record on
as one pointer, whereas it would count the references of every array in a named tuple of arrays.
Import this module lazily, since it loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from optsched.judge.life import (
    EMPTY,
    UNLIMITED,
    Floats,
    Ints,
    add_decode,
    add_prefill,
    advance,
    batch_time,
    evict,
    new_requests,
    record,
    rest_of,
)
from optsched.judge.memory import MEMORY, free, room, take
from optsched.problem import schedule
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.schedule import EvictMode

read_start = njit(schedule.read_start)

# Rules of a schedule, in the order in which a batch is checked. A replay returns the number, and
# `optsched.evaluate` has the words.
OK = 0
BAD_REQUEST = 1
BAD_WORKER = 2
EVICT_NOTHING = 3
EVICT_MODE = 4
DUPLICATE = 5
FINISHED = 6
NO_TOKENS = 7
EMPTY_BATCH = 8
DECODE_TOKENS = 9
TOO_MANY_TOKENS = 10
CHUNKED = 11
HYBRID = 12
BATCH_TOKENS = 13
PREFILL_TOKENS = 14
START_EARLY = 15
ARRIVAL = 16
OTHER_WORKER = 17
STILL_BUSY = 18
KV_CAPACITY = 19
MAX_RUNNING = 20
UNFINISHED = 21


class Limits(NamedTuple):
    """What the instance and the kind of schedule allow. An absent limit is `UNLIMITED`.

    Attributes
    ----------
    kv_capacity : int
        Maximum number of KV tokens that a worker holds.
    kv_offset, kv_block_tokens : int
        See `Instance`.
    max_batch_tokens, max_prefill_tokens, max_running : int
        See `optsched.Limits`.
    hybrid, chunked : bool
        Whether a batch may mix prefills and decodes, and whether a prefill may be split.
    eviction : bool
        Whether evictions of the schedule's ``evict_mode`` are allowed.
    restart : bool
        Whether an evicted request loses the tokens that it has produced.
    """

    kv_capacity: int
    kv_offset: int
    kv_block_tokens: int
    max_batch_tokens: int
    max_prefill_tokens: int
    max_running: int
    hybrid: bool
    chunked: bool
    eviction: bool
    restart: bool


def limits_of(instance: Instance, mode: EvictMode) -> Limits:
    """Return an instance's limits for compiled code."""
    limits = instance.limits
    return Limits(
        instance.kv_capacity,
        instance.kv_offset,
        instance.kv_block_tokens,
        limits.max_batch_tokens or UNLIMITED,
        limits.max_prefill_tokens or UNLIMITED,
        limits.max_running or UNLIMITED,
        instance.hybrid_batching is not False,
        instance.chunked_prefill is not False,
        mode == "restart" or not instance.in_rounds,
        mode == "restart",
    )


class Columns(NamedTuple):
    """The flat columns of a schedule of batches. ``start`` is NaN where none is given.

    Attributes
    ----------
    batch_offsets, request, tokens, evicted_offsets, evicted, start, worker : ndarray
        See `optsched.Schedule`.
    """

    batch_offsets: Ints
    request: Ints
    tokens: Ints
    evicted_offsets: Ints
    evicted: Ints
    start: Floats
    worker: Ints


class Origin(NamedTuple):
    """How the starts of a schedule are turned into times since the first arrival.

    Attributes
    ----------
    origin : float
        See `optsched.problem.schedule.read_start`.
    blur : float
        Rounding error of a clock with another origin, in seconds. A start that lies before the
        earliest possible start by at most this much is read as the earliest possible start.
    """

    origin: float
    blur: float


class Breach(NamedTuple):
    """A broken rule.

    Attributes
    ----------
    rule : int
        One of the numbers above; `OK` if no rule is broken.
    request : int
        The request, or -1 if the whole batch breaks the rule.
    value, limit : float
        What was found and what is allowed; NaN where a rule has none.
    """

    rule: int
    request: int
    value: float
    limit: float


FINE = Breach(OK, -1, np.nan, np.nan)


BATCH = record(
    ("start", np.float64),
    ("end", np.float64),
    ("kv", np.int64),  # KV tokens that its worker holds after it
    ("tokens", np.int64),  # tokens processed
)

FIELDS = (
    ("arrival", np.float64),
    ("free_at", np.float64),  # end of its latest batch, or time of its latest eviction
    ("first_start", np.float64),
    ("first_token", np.float64),
    ("last_token", np.float64),  # end of the batch that produced its latest token
    ("gap", np.float64),  # largest time from one token to the next
    ("finish", np.float64),
    ("served", np.float64),
    ("home", np.int64),  # worker that holds its KV, or -1
    ("seen", np.int64),  # latest batch that processed it
    ("turn", np.int64),  # number of batches that its worker had run by then
    ("evictions", np.int64),
    ("pauses", np.int64),
    ("done", np.bool_),
)
"""Fields of a request's record that the replay adds to those of `LIFE`."""

WORKER = record(
    ("clock", np.float64),  # end of its latest batch
    ("turns", np.int64),  # batches so far
    *MEMORY,
    ("running", np.int64),  # requests that hold KV
)


def new_state(arrival: Floats, prompt: Ints, output: Ints, workers: int, zero: float) -> Any:
    """Return the requests and the workers as they are before the first batch."""
    requests = new_requests(prompt, output, FIELDS)
    requests["arrival"] = arrival
    for name in ("first_start", "first_token", "finish"):
        requests[name] = np.nan

    requests["home"] = requests["seen"] = -1
    machines = np.zeros(workers, dtype=WORKER)
    machines["clock"] = zero
    return requests, machines


@njit
def _evicted(r: Any, i: int, w: int, machine: Any, limits: Limits) -> Breach:
    """Evict request i from worker w, or return the rule that forbids it."""
    if not limits.eviction:
        return Breach(EVICT_MODE, i, np.nan, np.nan)
    if r.cached == 0 or r.home != w:
        return Breach(EVICT_NOTHING, i, np.nan, np.nan)

    free(machine, r, limits)
    machine.running -= 1
    evict(r, limits.restart)
    r.home = -1
    r.pauses = 0
    r.evictions += 1
    if limits.restart:
        r.first_token = np.nan

    return FINE


@njit
def _entry(r: Any, i: int, c: int, j: int, w: int, limits: Limits) -> Breach:
    """Check one entry of batch j: request i processes c tokens on worker w."""
    if r.seen == j:
        return Breach(DUPLICATE, i, np.nan, np.nan)
    if r.done:
        return Breach(FINISHED, i, float(r.output + 1), float(r.output))
    if c < 1:
        return Breach(NO_TOKENS, i, float(c), 1.0)
    if r.home >= 0 and r.home != w:
        return Breach(OTHER_WORKER, i, float(w), float(r.home))
    if r.decoding:
        return FINE if c == 1 else Breach(DECODE_TOKENS, i, float(c), 1.0)

    rest = rest_of(r)
    if c > rest:
        return Breach(TOO_MANY_TOKENS, i, float(c), float(rest))
    if c < rest and not limits.chunked:
        return Breach(CHUNKED, i, float(c), float(rest))

    return FINE


@njit
def _content(sums: Any, limits: Limits) -> Breach:
    """Check the rules about the whole content of a batch."""
    if sums.tokens == 0:
        return Breach(EMPTY_BATCH, -1, np.nan, np.nan)
    if sums.decode_requests > 0 and sums.prefill_requests > 0 and not limits.hybrid:
        return Breach(HYBRID, -1, float(sums.prefill_requests), 0.0)
    if sums.tokens > limits.max_batch_tokens:
        return Breach(BATCH_TOKENS, -1, float(sums.tokens), float(limits.max_batch_tokens))
    if sums.prefill_tokens > limits.max_prefill_tokens:
        limit = float(limits.max_prefill_tokens)
        return Breach(PREFILL_TOKENS, -1, float(sums.prefill_tokens), limit)

    return FINE


@njit
def _process(
    r: Any, i: int, c: int, machine: Any, begin: float, end: float, limits: Limits
) -> Breach:
    """Process c tokens of request i in the batch from ``begin`` to ``end``."""
    if begin < r.arrival:
        return Breach(ARRIVAL, i, begin, r.arrival)
    if begin < r.free_at:
        return Breach(STILL_BUSY, i, begin, r.free_at)
    if r.cached == 0:
        machine.running += 1
    elif r.turn != machine.turns or begin > machine.clock:
        r.pauses += 1

    r.turn = machine.turns + 1
    take(machine, r, c, limits)
    r.free_at = end
    r.served += end - begin
    if np.isnan(r.first_start):
        r.first_start = begin
    if advance(r, c):
        if r.produced == 1:
            r.first_token = end
            r.gap = 0.0
        else:
            r.gap = max(r.gap, end - r.last_token)

        r.last_token = end
        if r.produced == r.output:
            r.done = True
            r.finish = end

    return FINE


@njit
def replay(
    requests: Any,
    machines: Any,
    limits: Limits,
    cost: Floats,
    columns: Columns,
    origin: Origin,
    batches: Any,
) -> tuple[Breach, int, bool]:
    """Replay every batch in order, up to the first that breaks a rule.

    All times are counted from the first arrival.
    """
    n, workers = requests.shape[0], machines.shape[0]
    offsets, request, tokens = columns.batch_offsets, columns.request, columns.tokens
    evicted_offsets, evicted, start = columns.evicted_offsets, columns.evicted, columns.start
    chunked = False

    for j in range(batches.shape[0]):
        w = columns.worker[j]
        if w < 0 or w >= workers:
            return Breach(BAD_WORKER, -1, float(w), float(workers - 1)), j, chunked

        machine = machines[w]
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            i = evicted[p]
            breach = Breach(BAD_REQUEST, i, float(i), float(n - 1))
            if 0 <= i < n:
                breach = _evicted(requests[i], i, w, machine, limits)
            if breach.rule != OK:
                return breach, j, chunked

        sums = EMPTY
        latest = 0.0
        for p in range(offsets[j], offsets[j + 1]):
            i, c = request[p], tokens[p]
            if i < 0 or i >= n:
                return Breach(BAD_REQUEST, i, float(i), float(n - 1)), j, chunked

            r = requests[i]
            chunked = chunked or (not r.decoding and 0 < c < rest_of(r))
            breach = _entry(r, i, c, j, w, limits)
            if breach.rule != OK:
                return breach, j, chunked
            if r.decoding:
                sums = add_decode(sums, r.cached)
            else:
                sums = add_prefill(sums, c, r.cached)

            r.seen = j
            latest = max(latest, r.arrival)

        breach = _content(sums, limits)
        if breach.rule != OK:
            return breach, j, chunked

        begin = max(machine.clock, latest)
        if not np.isnan(start[j]):
            earliest = begin
            for p in range(offsets[j], offsets[j + 1]):
                earliest = max(earliest, requests[request[p]].free_at)

            begin = read_start(start[j], earliest, origin.origin)
            if earliest - origin.blur <= begin < earliest:
                begin = earliest
            if begin < machine.clock:
                return Breach(START_EARLY, -1, begin, machine.clock), j, chunked

        end = begin + batch_time(cost, sums)
        for p in range(evicted_offsets[j], evicted_offsets[j + 1]):
            r = requests[evicted[p]]
            r.free_at = max(r.free_at, begin)

        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if r.cached == 0:
                r.home = w

            breach = _process(r, request[p], tokens[p], machine, begin, end, limits)
            if breach.rule != OK:
                return breach, j, chunked

        if not room(machine, 0, limits):
            breach = Breach(KV_CAPACITY, -1, float(machine.held), float(limits.kv_capacity))
            return breach, j, chunked

        if machine.running > limits.max_running:
            breach = Breach(MAX_RUNNING, -1, float(machine.running), float(limits.max_running))
            return breach, j, chunked

        machine.clock = end
        machine.turns += 1
        batch = batches[j]
        batch.start, batch.end, batch.kv, batch.tokens = begin, end, machine.held, sums.tokens

        for p in range(offsets[j], offsets[j + 1]):
            r = requests[request[p]]
            if r.done:  # its KV counts in this batch and is free in the next
                free(machine, r, limits)
                machine.running -= 1
                r.cached = 0
                r.home = -1

    for i in range(n):
        r = requests[i]
        if not r.done:
            breach = Breach(UNFINISHED, i, float(r.produced), float(r.output))
            return breach, batches.shape[0] - 1, chunked

    return FINE, -1, chunked
