"""The judge's replay of a schedule of batches, compiled by numba.

The tests compare it with a second judge that was written independently, with dictionaries and no
shared code. A violation is returned as numbers, and `optsched.judge.batches` puts it into words.
Requests, workers and batches are records of structured arrays. Compiled code passes a record on
as one pointer, whereas it would count the references of every array in a named tuple of arrays.
Import this module lazily, since it loads numba.

In all functions `r` is the record of request i (fields: `LIFE` and `FIELDS`), `machine` that of
worker w (`WORKER`), j the number of a batch and p that of an entry, an eviction or a move. `share`
(s) and `moves` (m) are None where no prefixes are shared, or no KV may move.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optsched.costs.batch import Sums
from optsched.costs.machine import Machine
from optsched.judge import life
from optsched.judge.life import EMPTY, UNLIMITED, Floats, Ints, add_decode, add_prefill, record
from optsched.judge.memory import MEMORY, free, take
from optsched.judge.moves import DECODE, MOVING, PREFILL, Moves, leave, move, set_roles
from optsched.judge.sharing import SHARING, Sharing, claim, hold, release, retained_of, sharing_of
from optsched.judge.validity import WORDS
from optsched.problem import schedule
from optsched.problem.columns import read_only
from optsched.problem.drafts import Drafts
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.room import NO_WINDOW, KvWindow
from optsched.problem.schedule import EvictMode

read_start = njit(schedule.read_start)

# Rules of a schedule, in the order in which a batch is checked. A replay returns the number, and
# `optsched.judge.batches` has the words.
(
    OK, BAD_REQUEST, BAD_WORKER, EVICT_NOTHING, EVICT_MODE, CLAIM_HOLDS, CLAIM_BLOCKS, CLAIM_INPUT,
    DUPLICATE, FINISHED, NO_TOKENS, EMPTY_BATCH, DECODE_TOKENS, TOO_MANY_TOKENS, CHUNKED, HYBRID,
    BATCH_TOKENS, PREFILL_TOKENS, START_EARLY, ARRIVAL, OTHER_WORKER, STILL_BUSY, CLAIM_MISSING,
    KV_CAPACITY, MAX_RUNNING, UNFINISHED, RETAINED, AFTER, MOVE_FIRST, MOVE_NOTHING,
    MOVE_TO, MOVE_START, TAKES_IN, DECODES, PREFILLS, EVICT_MOVING,
) = range(36)  # fmt: skip


class Limits(NamedTuple):
    """What the instance and the kind of schedule allow. An absent limit is `UNLIMITED`.

    `eviction`: whether anybody may be evicted. `restart`: whether an evicted request loses the
    tokens that it has produced. `drafts` is None where decode steps yield one token.
    """

    kv_capacity: int
    kv_offset: int
    kv_block_tokens: int
    kv_window: KvWindow
    max_batch_tokens: int
    max_prefill_tokens: int
    max_running: int
    hybrid: bool
    chunked: bool
    eviction: bool
    restart: bool
    drafts: Drafts | None = None


LIMITS = ("max_batch_tokens", "max_prefill_tokens", "max_running")


def limits_of(instance: Instance, mode: EvictMode, drafts: Drafts | None = None) -> Limits:
    """Return an instance's limits for compiled code. `drafts`: None where none are verified.

    In rounds every eviction is a restart, so a schedule that says otherwise may evict nobody.
    """
    limits = instance.limits
    # In the order of the fields. The last but two: whether anybody may be evicted.
    return Limits(
        instance.kv_capacity,
        instance.kv_offset,
        instance.kv_block_tokens,
        instance.kv_window or NO_WINDOW,
        limits.max_batch_tokens or UNLIMITED,
        limits.max_prefill_tokens or UNLIMITED,
        limits.max_running or UNLIMITED,
        instance.hybrid_batching is not False,
        instance.chunked_prefill is not False,
        mode == "restart" or not instance.in_rounds,
        mode == "restart",
        drafts,
    )


class Columns(NamedTuple):
    """The flat columns of a schedule of batches. ``start`` is NaN where none is given."""

    batch_offsets: Ints
    request: Ints
    tokens: Ints
    evicted_offsets: Ints
    evicted: Ints
    start: Floats
    worker: Ints
    reused: Ints | None
    moves: Moves | None


class Origin(NamedTuple):
    """How the starts of a schedule are turned into times since the first arrival.

    One that is at most `blur` seconds, the rounding error of another clock, before the earliest
    possible start is read as that.
    """

    origin: float
    blur: float


class Breach(NamedTuple):
    """A broken rule, or `OK`, of a request, or of a whole batch (-1).

    `value` and `limit` go into the rule's words, see `optsched.judge.batches`. NaN: none.
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
    ("split", np.bool_),  # whether it processes part of a prefill
)

FIELDS = (
    ("release", np.float64),  # from when on it may be processed, by what has ended so far
    ("delay", np.float64),  # from the end of its last predecessor to its release
    ("missing", np.int64),  # predecessors that have not ended
    ("free_at", np.float64),  # end of its latest batch, or time of its latest eviction
    ("first_start", np.float64),
    ("first_token", np.float64),
    ("last_token", np.float64),  # end of the batch that produced its latest token
    ("gap", np.float64),  # largest time from one token to the next
    ("finish", np.float64),
    ("served", np.float64),
    ("home", np.int64),  # worker that holds its KV, or -1
    ("seen", np.int64),  # number of the latest batch that processed it
    ("turn", np.int64),  # its worker's ``turns`` after that batch; -1 after a move
    ("evictions", np.int64),
    ("pauses", np.int64),  # since its latest eviction
    ("reused", np.int64),  # tokens claimed
    ("asked", np.int64),  # tokens of its input whenever it took up KV
    ("done", np.bool_),
    ("handed", np.bool_),  # whether its KV has moved since its prefill was over
)
"""Fields of a request's record that the replay adds to those of `LIFE`."""

WORKER = record(
    ("clock", np.float64),  # end of its latest batch
    ("turns", np.int64),  # batches so far
    *MEMORY,
    *SHARING,
    *MOVING,
    ("running", np.int64),  # requests that hold KV
    ("kv_capacity", np.int64),  # what its machine allows
    *((name, np.int64) for name in LIMITS),
    ("cost_from", np.int64),  # where its coefficients stand among those of all
    ("cost_to", np.int64),
)

EXTREMES = record(*((name, np.int64) for name in WORDS))
"""What a worker has come to, by the limits of validity of cost models; 0: no such batch."""


Shares = Sharing | None
Moving = Moves | None
"""None where nothing is shared, or nothing may move: compiled code then leaves all of it out."""


class Replayed(NamedTuple):
    """What a replay has derived, by request, by batch and by worker.

    `cached` has what was cached of each entry's request before it, or -1 - that if it is prefilled.
    `sharing` has records of batches, see `optsched.judge.sharing.SHARED`, or is None.
    """

    requests: Any
    batches: Any
    extremes: Any
    cached: Ints
    sharing: Any = None


def _new_workers(machines: Sequence[Machine], workers: int, zero: float) -> tuple[Any, Floats]:
    """Return the records of the workers before the first batch, and all cost models' coefficients.

    `zero`: the worker's time since the first arrival at which its clock begins. A single machine
    stands for all workers: its values go to each of them.
    """
    workers_before = np.zeros(workers, dtype=WORKER)
    workers_before["clock"] = zero
    workers_before["kv_capacity"] = [machine.kv_capacity for machine in machines]
    set_roles(workers_before, machines, zero)
    for name in LIMITS:
        workers_before[name] = [getattr(machine.limits, name) or UNLIMITED for machine in machines]

    costs = [machine.cost.array for machine in machines]
    workers_before["cost_to"] = np.cumsum([len(cost) for cost in costs])
    workers_before["cost_from"] = workers_before["cost_to"] - [len(cost) for cost in costs]
    all_costs = np.concatenate(costs)
    all_costs.setflags(write=False)  # as each is, or pricing is compiled twice
    return workers_before, all_costs


def replay(
    instance: Instance,
    mode: EvictMode,
    machines: Sequence[Machine],
    workers: int,
    columns: Columns,
    origin: Origin,
    *,
    recorded: bool = False,
) -> tuple[Breach, int, Replayed]:
    """Replay a schedule of batches, up to the first that breaks a rule; return that rule and batch.

    Whether what is retained has room is checked last, when all claims are known. Times count from
    the first arrival. There is one machine for each worker, or one for all. `recorded`: whether
    `Replayed.cached` is written, which only the spans of `optsched.judge.timeline` are made of.
    """
    requests = life.new_requests(instance.prompt_tokens, instance.output_tokens, FIELDS)
    # By request, where those that come after it begin, and these requests; without sessions none.
    links = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    requests["release"] = instance.given_release
    if (sessions := instance.sessions) is not None:
        requests["missing"], requests["delay"] = sessions.count, sessions.delay
        # The ends of those that it comes after will raise it (`_tell_followers`).
        requests["release"][sessions.count > 0] = -np.inf
        links = sessions.next_offsets, sessions.next

    for name in ("first_start", "first_token", "finish"):
        requests[name] = np.nan

    requests["home"] = requests["seen"] = -1
    # Clocks begin at 0. "0.0 - x" and not "-x", since -0.0 would show in the times.
    states, costs = _new_workers(machines, workers, 0.0 - instance.first_arrival)
    batches = np.zeros(len(columns.worker), dtype=BATCH)
    extremes = np.zeros(workers, dtype=EXTREMES)
    cached = np.empty(len(columns.request) if recorded else 0, dtype=np.int64)
    limits = limits_of(instance, mode, instance.drafts)
    worker = columns.worker
    share = sharing_of(instance, columns.reused, columns.request, worker, workers)
    # What is absent comes as an argument of its own: compiled code for None leaves it out.
    moves = columns.moves
    # A file's columns are read-only, another type for numba: it would compile all loops again.
    plain_columns = Columns(*map(read_only, columns[:-2]), None, None)  # type: ignore[call-arg]
    fixed, written = (costs, *links, origin, limits), (batches, extremes, cached)
    breach, batch = _replay((requests, states), fixed, plain_columns, share, moves, written)
    # Only now is it known which blocks later claims found, and so what was retained in between.
    if share is not None and breach.rule == OK:
        retained = retained_of(share, worker)
        share.done["retained"] = retained
        share.done["left"] += retained
        batches["kv"] += retained
        capacity = states["kv_capacity"][worker]
        if (over := batches["kv"] > capacity).any():
            batch = int(np.argmax(over))
            breach = Breach(RETAINED, -1, float(batches["kv"][batch]), float(capacity[batch]))

    sharing = None if share is None else share.done
    return breach, int(batch), Replayed(requests, batches, extremes, cached, sharing)


@njit(allocates=False)
def _free_kv(r: Any, i: int, w: int, machine: Any, limits: Limits, share: Shares) -> None:
    """Free the KV of request i on worker w, which it held in the worker's latest batch."""
    if share is not None:
        release(share, i, w, r.cached // share.block, machine.turns, machine)

    free(machine, r, limits)
    machine.running -= 1
    r.home = -1


@njit(allocates=False)
def _evict(
    requests: Any, columns: Columns, j: int, machine: Any, limits: Limits, share: Shares
) -> Breach:
    """Evict the requests that batch j evicts from its worker, or return the rule that forbids it.

    Their KV is free at once, but ``free_at`` is raised in `_replay_batch`, once it is known when
    the batch begins. A restart forgets the first token, which will be produced again.
    """
    n, w = requests.shape[0], columns.worker[j]
    for p in range(columns.evicted_offsets[j], columns.evicted_offsets[j + 1]):
        i = columns.evicted[p]
        if i < 0 or i >= n:
            return Breach(BAD_REQUEST, i, float(i), float(n - 1))

        r = requests[i]
        if not limits.eviction:
            return Breach(EVICT_MODE, i, np.nan, np.nan)
        if r.cached == 0 or r.home != w:
            return Breach(EVICT_NOTHING, i, np.nan, np.nan)

        _free_kv(r, i, w, machine, limits, share)
        life.evict(r, limits.restart)
        r.pauses = 0  # they count from the latest eviction on
        r.evictions += 1
        if limits.restart:
            r.first_token = np.nan

    return FINE


@njit(allocates=False)
def _read_given_start(start: float, earliest: float, origin: Origin) -> float:
    """Return a start that a schedule gives, since the first arrival.

    One that is at most the rounding error before the earliest possible start is read as that.
    """
    begin = read_start(start, earliest, origin.origin)
    return earliest if earliest - origin.blur <= begin < earliest else begin


@njit(allocates=False)
def _kv_while_idle(machine: Any, m: Moving, until: float) -> int:
    """Return the most KV that an idle machine holds up to a time, or 0 if none has come to it.

    While it is idle KV only leaves, so it holds the most when that begins: at the end of its latest
    batch, or when the latest move to it began. What has left by then is freed here.
    """
    idle_from = max(machine.began, machine.clock)
    # Without KV that came in, the machine holds what its latest batch left, which has been checked.
    if m is None or not machine.came or idle_from >= until - m.blur:
        return 0

    leave(machine, m, idle_from)
    return int(machine.held)


@njit(allocates=False)
def _move_kv(requests: Any, machines: Any, batches: Any, p: int, m: Moves, rules: Any) -> Breach:
    """Let move p of a request's KV begin, or return the rule that forbids it.

    It begins after the request's latest batch, and not before what stands before it in the list of
    its receiver. `rules`: the limits and the origin. The request is at home on the receiver from
    then on, but its KV is there only at the end of the move (``free_at``).
    """
    limits, origin = rules
    i, to = m.request[p], m.to[p]
    if i < 0 or i >= requests.shape[0]:
        return Breach(BAD_REQUEST, i, float(i), float(requests.shape[0] - 1))

    r = requests[i]
    if to < 0 or to >= machines.shape[0]:
        return Breach(BAD_WORKER, i, float(to), float(machines.shape[0] - 1))
    if r.home < 0:
        return Breach(MOVE_NOTHING, i, np.nan, np.nan)
    if to == r.home:
        return Breach(MOVE_TO, i, float(to), float(r.home))

    source, target = machines[r.home], machines[to]
    # Where no start is given (NaN), the move begins as early as it can.
    begin = earliest = max(r.free_at, target.began)
    if not np.isnan(m.start[p]):
        begin = _read_given_start(m.start[p], earliest, origin)
        if begin < earliest:
            return Breach(MOVE_START, i, begin, earliest)
        # Rounding alone must not let a move begin beside a batch that it follows.
        if target.clock - origin.blur <= begin < target.clock:
            begin = target.clock

    # Sender and receiver may have been idle with KV that came in since their latest batches.
    for machine in (source, target):
        held = _kv_while_idle(machine, m, begin)
        if held > machine.kv_capacity:
            return Breach(TAKES_IN, i, float(held), float(machine.kv_capacity))

    leave(target, m, begin)
    r.home = to
    kv = move(r, source, target, m, p, begin, limits)
    if begin < target.clock:  # its latest batch runs beside the move
        during = batches[target.latest]
        during.kv += kv
        if during.kv > target.kv_capacity:
            return Breach(TAKES_IN, i, float(during.kv), float(target.kv_capacity))

    return FINE


@njit(allocates=False)
def _claim(r: Any, i: int, j: int, tokens: int, share: Sharing) -> Breach:
    """Let request i begin batch j with claimed tokens cached, or return the rule that forbids it.

    Whether the tokens are there is checked later, in `_hold_blocks`.
    """
    input_tokens = r.prompt + r.produced
    if r.seen == j or r.done:
        return FINE  # it is twice in the batch, or done: `_check_entry` refuses it
    if tokens != 0 and r.home >= 0:
        return Breach(CLAIM_HOLDS, i, float(tokens), float(r.cached))
    if tokens < 0 or tokens % share.block != 0:
        return Breach(CLAIM_BLOCKS, i, float(tokens), float(share.block))
    if tokens >= input_tokens:  # the last token is computed, since it gives the next one
        return Breach(CLAIM_INPUT, i, float(tokens), float(input_tokens - 1))
    # It takes up KV, and may claim: of what is `asked` for, its input, all but the last token.
    if r.home < 0:
        r.cached = tokens
        r.reused += tokens
        r.asked += input_tokens

    return FINE


@njit(allocates=False)
def _hold_blocks(
    requests: Any, columns: Columns, j: int, w: int, machine: Any, s: Sharing
) -> Breach:
    """Let the requests of batch j hold the blocks that they compute, then those that they claim.

    In this order, a claim finds what others compute in the same batch. A block that nobody has held
    on the worker breaks a rule.
    """
    request, tokens, block = columns.request, columns.tokens, s.block
    first, last = columns.batch_offsets[j], columns.batch_offsets[j + 1]
    for p in range(first, last):
        held = requests[request[p]].cached  # after the batch
        hold(s, request[p], w, (held - tokens[p]) // block, held // block, machine)

    for p in range(first, last):
        if s.reused[p] > 0:
            blocks = s.reused[p] // block
            # The batch is the worker's next one: `turns` has not counted it yet.
            missing = claim(s, request[p], w, blocks, machine.turns + 1, machine)
            if missing >= 0:
                first_missing = float(missing * block)
                return Breach(CLAIM_MISSING, request[p], float(s.reused[p]), first_missing)

    return FINE


@njit(allocates=False)
def _check_entry(
    r: Any, i: int, c: int, place: tuple[int, int, int], limits: Limits, moves: Moving
) -> Breach:
    """Check one entry: request i processes c tokens. `place`: batch, worker, the worker's role.

    ``seen`` is its latest batch, ``missing`` how many of its predecessors have not ended, ``home``
    the worker that holds its KV, or -1. Its times are checked in `_process`.
    """
    j, w, role = place
    if r.seen == j:
        return Breach(DUPLICATE, i, np.nan, np.nan)
    if r.done:
        return Breach(FINISHED, i, float(r.output + 1), float(r.output))
    if r.missing > 0:
        return Breach(AFTER, i, float(r.missing), 0.0)
    if c < 1:
        return Breach(NO_TOKENS, i, float(c), 1.0)
    if r.home >= 0 and r.home != w:
        return Breach(OTHER_WORKER, i, float(w), float(r.home))
    # In pools prefill machines make first tokens only, and decode machines prefill only requests
    # that were handed over, or are so short that they are deflected.
    if moves is not None:
        if role == PREFILL and r.produced > 0:
            return Breach(DECODES, i, float(w), float(r.produced + 1))
        if role == DECODE and not (r.decoding or r.handed or r.prompt < moves.deflect_below):
            return Breach(PREFILLS, i, float(w), np.nan)
    if r.decoding:
        max_tokens = life.tokens_of_step(limits.drafts)
        return FINE if c <= max_tokens else Breach(DECODE_TOKENS, i, float(c), float(max_tokens))

    input_left = life.rest_of(r)
    if c > input_left:
        return Breach(TOO_MANY_TOKENS, i, float(c), float(input_left))
    if c < input_left and not limits.chunked:
        return Breach(CHUNKED, i, float(c), float(input_left))

    return FINE


@njit(allocates=False)
def _check_content(sums: Any, machine: Any, limits: Limits) -> Breach:
    """Check the rules about the whole content of a batch."""
    if sums.tokens == 0:
        return Breach(EMPTY_BATCH, -1, np.nan, np.nan)
    if sums.decode_requests > 0 and sums.prefill_requests > 0 and not limits.hybrid:
        return Breach(HYBRID, -1, float(sums.prefill_requests), 0.0)
    if sums.tokens > machine.max_batch_tokens:
        return Breach(BATCH_TOKENS, -1, float(sums.tokens), float(machine.max_batch_tokens))
    if sums.prefill_tokens > machine.max_prefill_tokens:
        limit = float(machine.max_prefill_tokens)
        return Breach(PREFILL_TOKENS, -1, float(sums.prefill_tokens), limit)

    return FINE


@njit(allocates=False)
def _process(
    r: Any, i: int, c: int, machine: Any, begin: float, end: float, limits: Limits
) -> Breach:
    """Process c tokens of request i from ``begin`` to ``end``, or return why it cannot be then.

    KV is allocated, and the request's times, tokens and pauses are noted.
    """
    if begin < r.release:
        return Breach(ARRIVAL, i, begin, r.release)
    if begin < r.free_at:
        return Breach(STILL_BUSY, i, begin, r.free_at)
    if r.allocated == 0:  # it takes up KV, and with it a seat
        machine.running += 1
    elif r.turn >= 0 and (r.turn != machine.turns or begin > machine.clock):
        # Its worker ran a batch without it, or stood idle: it was paused. A move is no pause.
        r.pauses += 1

    r.turn = machine.turns + 1  # this batch's number on its worker, which has not counted it yet
    # Claimed tokens take room, too. That of drafts which were not accepted is used again.
    take(machine, r, r.cached + c - r.allocated, limits)
    r.free_at = end
    r.served += end - begin
    if np.isnan(r.first_start):
        r.first_start = begin
    if life.advance(r, c, i, limits.drafts):
        # With drafts several tokens may come at once. The gap is from one batch to the next.
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


@njit(allocates=False)
def _tell_followers(requests: Any, offsets: Ints, followers: Ints, i: int, end: float) -> None:
    """Count request i as ended for the requests that come after it.

    The release of such a request is its delay after the last end of those that it comes after.
    """
    for p in range(offsets[i], offsets[i + 1]):
        r = requests[followers[p]]
        r.missing -= 1
        r.release = max(r.release, end)
        if r.missing == 0:
            r.release += r.delay


@njit(allocates=False)
def _extend_extremes(extremes: Any, sums: Any, largest: int) -> None:
    """Extend a worker's extremes by a batch. `largest`: the max KV cached of those in a prefill.

    A minimum of 0 stands for no batch so far. `_read_entries` extends those of prefill chunks.
    """
    x, decodes = extremes, sums.decode_requests
    x.max_batch_tokens = max(x.max_batch_tokens, sums.tokens)
    x.max_request_kv_tokens = max(x.max_request_kv_tokens, largest, sums.decode_kv_max)
    x.max_kv_tokens = max(x.max_kv_tokens, sums.decode_kv + sums.prefill_kv)
    if decodes > 0:
        x.max_decode_requests = max(x.max_decode_requests, decodes)
        x.min_decode_requests = min(x.min_decode_requests or decodes, decodes)


@njit(allocates=False)
def _begin_of(
    requests: Any, columns: Columns, j: int, machine: Any, latest: float, rules: Any, freed: int
) -> tuple[Breach, float]:
    """Return FINE and when batch j begins, or the rule that it breaks and a time of no meaning.

    `latest`: before then none of its requests may begin (from `_read_entries`). `rules`: the origin
    and the moves. `freed`: the KV that the batch evicts, which `_evict` has taken off already.
    """
    origin, moves = rules
    # The end of its latest batch, and the start of that or of the latest move to it.
    begin = max(machine.clock, machine.began, latest)
    # A given start holds as it is, unless rounding alone puts it before the earliest moment.
    if not np.isnan(columns.start[j]):
        earliest = begin
        for p in range(columns.batch_offsets[j], columns.batch_offsets[j + 1]):
            earliest = max(earliest, requests[columns.request[p]].free_at)

        begin = _read_given_start(columns.start[j], earliest, origin)
        # Requests that are not free yet are reported later, by `_process`.
        if begin < machine.clock:
            return Breach(START_EARLY, -1, begin, machine.clock), begin
        if begin < machine.began:
            return Breach(MOVE_FIRST, -1, begin, machine.began), begin

    held = _kv_while_idle(machine, moves, begin)
    if held > 0 and held + freed > machine.kv_capacity:  # what the batch evicts is still there
        return Breach(TAKES_IN, -1, float(held + freed), float(machine.kv_capacity)), begin

    return FINE, begin


@njit(allocates=False)
def _check_end(requests: Any, machines: Any, m: Moving) -> Breach:
    """Check after the last batch that all requests are done, and the KV of idle machines."""
    for i in range(requests.shape[0]):
        r = requests[i]
        if not r.done:
            return Breach(UNFINISHED, i, float(r.produced), float(r.output))

    for machine in machines:
        held = _kv_while_idle(machine, m, np.inf)
        if held > machine.kv_capacity:
            return Breach(TAKES_IN, -1, float(held), float(machine.kv_capacity))

    return FINE


@njit(allocates=False, forceinline=True)
def _read_entries(
    state: Any, j: int, fixed: Any, columns: Columns, share: Shares, moves: Moving, written: Any
) -> tuple[Breach, Sums, float]:
    """Check the entries of batch j before any is processed, or return the rule that one breaks.

    Beside it are the batch's sums, and the time before which no batch of these requests begins:
    their latest release, or end of a move. For `state`, `fixed` and `written` see `_replay`. The
    worker's extremes (x) and, if recorded, what was cached of each entry are written.
    """
    (requests, machines), limits = state, fixed[-1]
    batches, extremes, cached = written
    request, tokens = columns.request, columns.tokens
    w, n = columns.worker[j], requests.shape[0]
    machine, x, recorded = machines[w], extremes[w], cached.shape[0] > 0
    sums, earliest, largest = EMPTY, 0.0, 0
    for p in range(columns.batch_offsets[j], columns.batch_offsets[j + 1]):
        i, c = request[p], tokens[p]
        if i < 0 or i >= n:
            return Breach(BAD_REQUEST, i, float(i), float(n - 1)), sums, earliest

        r = requests[i]
        if share is not None:
            breach = _claim(r, i, j, share.reused[p], share)
            if breach.rule != OK:
                return breach, sums, earliest

        breach = _check_entry(r, i, c, (j, w, machine.role), limits, moves)
        if breach.rule != OK:
            return breach, sums, earliest

        if recorded:  # -1 - cached tells a prefill from a decode, see `Replayed`
            cached[p] = r.cached if r.decoding else -1 - r.cached
        if r.decoding:
            sums = add_decode(sums, r.cached, c)
        else:
            sums = add_prefill(sums, c, r.cached)
            largest = max(largest, r.cached)
            x.max_prefill_chunk_tokens = max(x.max_prefill_chunk_tokens, c)
            # Extremes of 0 say that there was no prefill yet.
            x.min_prefill_chunk_tokens = min(x.min_prefill_chunk_tokens or c, c)
            batches[j].split = batches[j].split or c < life.rest_of(r)

        r.seen = j
        earliest = max(earliest, r.release)
        if moves is not None and r.turn < 0:  # its KV has moved since its last batch
            earliest = max(earliest, r.free_at)

    _extend_extremes(x, sums, largest)
    return _check_content(sums, machine, limits), sums, earliest


@njit(allocates=False, forceinline=True)
def _replay_batch(
    state: Any, j: int, fixed: Any, columns: Columns, share: Shares, moves: Moving, written: Any
) -> Breach:
    """Replay batch j on its worker, or return the first rule that it breaks.

    `state`, `fixed` and `written` are as in `_replay`. In turn: evictions, a check of the entries,
    the start, the entries, the KV at the end, and last what requests that end in it leave.
    """
    requests, machines = state
    costs, next_offsets, followers, origin, limits = fixed
    w, request, tokens = columns.worker[j], columns.request, columns.tokens
    machine, batch = machines[w], written[0][j]
    first, last = columns.batch_offsets[j], columns.batch_offsets[j + 1]
    freed = machine.held  # before the evictions
    breach = _evict(requests, columns, j, machine, limits, share)
    if breach.rule != OK:
        return breach

    freed -= machine.held  # the KV that the batch evicts
    breach, sums, earliest = _read_entries(state, j, fixed, columns, share, moves, written)
    if breach.rule != OK:
        return breach

    breach, begin = _begin_of(requests, columns, j, machine, earliest, (origin, moves), freed)
    if breach.rule != OK:
        return breach

    if moves is not None:
        leave(machine, moves, begin)

    end = begin + life.batch_time(costs[machine.cost_from : machine.cost_to], sums)
    # Evictions take place when the batch begins. Only now is that known. After that a request may
    # be in a batch elsewhere, which begins no earlier.
    for p in range(columns.evicted_offsets[j], columns.evicted_offsets[j + 1]):
        i = columns.evicted[p]
        r = requests[i]
        if begin < r.free_at - origin.blur:  # its KV is still on its way
            return Breach(EVICT_MOVING, i, begin, r.free_at)

        r.free_at = max(r.free_at, begin)

    for p in range(first, last):
        r = requests[request[p]]
        r.home = w
        breach = _process(r, request[p], tokens[p], machine, begin, end, limits)
        if breach.rule != OK:
            return breach

    # Requests that end in the batch count. A block that several hold counts once.
    held = machine.held
    if share is not None:
        breach = _hold_blocks(requests, columns, j, w, machine, share)
        if breach.rule != OK:
            return breach

        held -= share.block * machine.twice  # blocks held beyond the first of a name
        share.done[j].shared = share.block * machine.shared

    if held > machine.kv_capacity:
        return Breach(KV_CAPACITY, -1, float(held), float(machine.kv_capacity))
    if machine.running > machine.max_running:
        return Breach(MAX_RUNNING, -1, float(machine.running), float(machine.max_running))

    machine.clock = end
    # What moves to it will look at: nothing has come to it since this batch began.
    machine.began, machine.latest, machine.came = begin, j, False
    machine.turns += 1
    batch.start, batch.end, batch.kv = begin, end, held
    # The KV of a request that ends in this batch is free in the next.
    for p in range(first, last):
        r = requests[request[p]]
        if r.done:
            _free_kv(r, request[p], w, machine, limits, share)
            r.cached = 0
            if followers.shape[0] > 0:
                _tell_followers(requests, next_offsets, followers, request[p], end)

    if share is not None:
        share.done[j].left = machine.held - share.block * machine.twice

    return FINE


@njit(allocates=False)
def _replay(
    state: Any, fixed: Any, columns: Columns, share: Shares, moves: Moving, written: Any
) -> tuple[Breach, int]:
    """Replay every batch in order; return the first broken rule, or `OK`, and its batch.

    `state`: the records of requests and of workers. `fixed`: the coefficients of all cost models,
    the offsets and the requests that come after each, the origin and the limits.
    `written`: batches, extremes and what was cached of each entry, as in `Replayed`. An end counts
    for what stands behind it in the list, so a request's last batch precedes all batches of the
    requests that come after it.
    """
    (requests, machines), batches = state, written[0]
    rules = fixed[-1], fixed[-2]  # the limits and the origin
    for j in range(batches.shape[0]):
        w, workers = columns.worker[j], machines.shape[0]
        if w < 0 or w >= workers:
            return Breach(BAD_WORKER, -1, float(w), float(workers - 1)), j

        if moves is not None:
            for p in range(moves.offsets[j], moves.offsets[j + 1]):
                breach = _move_kv(requests, machines, batches, p, moves, rules)
                if breach.rule != OK:
                    return breach, j

        breach = _replay_batch(state, j, fixed, columns, share, moves, written)
        if breach.rule != OK:
            return breach, j

    return _check_end(requests, machines, moves), batches.shape[0] - 1
