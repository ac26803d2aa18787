"""The moves of KV from one worker to another, compiled by numba.

A move takes its KV on the receiver when it starts, and frees it on the sender when it ends: until
then both hold it. Moves to a worker stand in the list among its batches, in the order of their
starts. In all functions m are the moves of the schedule (`Moves`), and p is the number of one.
Import this module lazily, since it loads numba.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optsched.costs.fleet import Fleet
from optsched.costs.machine import ROLES, Link, Machine
from optsched.judge.life import Floats, Ints
from optsched.judge.memory import kv_of, take
from optsched.problem.columns import read_only
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit
from optsched.problem.schedule import Schedule

MIXED, PREFILL, DECODE = range(len(ROLES))

MOVING = (
    ("role", np.int64),
    ("began", np.float64),  # start of its latest batch, or of the latest move to it
    ("latest", np.int64),  # number of its latest batch, or -1
    ("came", np.bool_),  # whether KV has come to it since then
    ("leaving", np.int64),  # the latest move from it that is not over, or -1 (`Moves.next`)
)
"""Fields of a worker's record."""


class Moves(NamedTuple):
    """The moves of a schedule, as its columns have them, and what pools say of moves.

    `offsets`: by batch, the first of the moves before it. All down to `next` are by move.
    `start`: since the first arrival, NaN where none is given; the replay writes when each move
    starts and ends. `kv`: what the sender holds until the end. `next`: an earlier move from the
    same sender that is not over, or -1. A move takes `latency` and `per_token` for each token of
    KV, in seconds. `recompute`: whether the receiver computes the last prompt token again, and so
    makes the first output token. `deflect_below`: shorter prompts may be prefilled on decode
    machines.
    `blur`: a move that ends so much later than something begins is over by then, see `Origin`.
    """

    offsets: Ints
    request: Ints
    to: Ints
    start: Floats
    end: Floats
    kv: Ints
    next: Ints
    latency: float
    per_token: float
    recompute: bool
    deflect_below: int
    blur: float


def moves_of(
    instance: Instance, schedule: Schedule, batches: int, pools: Fleet | None, start: Floats | None
) -> Moves | None:
    """Return the moves before each batch, or None without pools, where nothing may move.

    `start`: where given, since the first arrival.
    """
    empty = np.zeros(0, dtype=np.int64)
    offsets, moved, to = schedule.moved_offsets, schedule.moved, schedule.moved_to
    if pools is None:
        if offsets is None or moved is None or to is None:
            return None

        raise InputError(
            "schedule.moved: found moves of KV on a fleet without a link; expected one with it, as "
            "in Fleet.of('2p6d'), or --pools, or the result of `simulate --pools --json`"
        )

    if offsets is None or moved is None or to is None:
        offsets, moved, to = np.zeros(batches + 1, dtype=np.int64), empty, empty
    elif instance.prefixes is not None:
        raise InputError("schedule.moved: found moves of KV in an instance with shared prefixes")

    times = np.full(len(moved), np.nan) if start is None else start
    link, deflect_below = pools.link or Link(), pools.deflect_below
    rates = float(link.latency_s), float(link.seconds_per_token), link.recompute_last
    # The ends, the KV and the next open moves, which the replay writes (`move`).
    written = np.zeros(len(moved)), np.zeros_like(moved), np.zeros_like(moved)
    blur, given_start = 0.0, schedule.moved_start
    # Given starts are rounded as on their own clock, which began long before the first arrival. The
    # errors may add up from batch to batch. Rounds are exact.
    late_clock = instance.first_arrival and not instance.in_rounds
    if late_clock and given_start is not None and len(given_start):
        blur = batches * float(np.spacing(np.abs(given_start).max()))

    # Read-only as in `replay`, whose loops know the columns of a file and of a policy as one type.
    offsets, moved, to = read_only(offsets), read_only(moved), read_only(to)
    # In the order of the fields.
    return Moves(offsets, moved, to, times.copy(), *written, *rates, deflect_below, blur)


def set_roles(workers: Any, machines: Sequence[Machine], zero: float) -> None:
    """Write the roles of machines into the workers' records, before the first batch."""
    workers["role"] = [ROLES.index(one.role) for one in machines]
    workers["began"] = zero
    workers["latest"] = workers["leaving"] = -1


@njit(allocates=False)
def move(r: Any, source: Any, target: Any, m: Moves, p: int, begin: float, limits: Any) -> int:
    """Let move p of a request begin; return the KV that the receiver takes.

    A request whose prefill is over is handed over: it may then be prefilled again on a decode
    machine if it is evicted there, or if its last prompt token is computed again. `source` and
    `target` are the records of both workers. From now on both hold its KV (see the module's text).
    """
    tokens = r.cached
    r.handed = r.handed or r.decoding
    # With `recompute` the receiver makes the first token, and the one of the sender does not count.
    # Of a single prompt token the KV moves (`Link.moved`).
    if m.recompute and r.decoding and r.produced == 1 and r.prompt > 1:
        tokens -= 1
        r.produced, r.decoding, r.first_token = 0, False, np.nan

    m.start[p], m.end[p] = begin, begin + (m.latency + tokens * m.per_token)
    m.kv[p] = kv_of(r.allocated, limits)
    # The move is the first in the linked list of those that leave the sender.
    m.next[p] = source.leaving
    source.leaving = p
    # The request holds KV on the receiver from now on; `leave` frees the sender's by `m.kv`.
    r.cached, r.allocated = tokens, 0
    take(target, r, tokens, limits)
    target.running += 1
    target.began, target.came = begin, True
    # Turn -1: its next batch is not compared with the one before, since a move is no pause.
    r.free_at, r.turn = m.end[p], -1
    return kv_of(tokens, limits)


@njit(allocates=False)
def leave(worker: Any, m: Moves, until: float) -> None:
    """Free the KV that has moved from a worker by a time, and its seats.

    ``worker.leaving`` is the first of the linked list of its open moves, `m.next` the others; -1
    ends it.
    """
    previous, p = -1, worker.leaving  # `previous`: the last move that stays in the list, or -1
    # A short move may be over before a longer one that began earlier, so look at all open ones.
    while p >= 0:
        if m.end[p] <= until + m.blur:  # take it out of the linked list
            worker.held -= m.kv[p]
            worker.running -= 1
            if previous < 0:
                worker.leaving = m.next[p]
            else:
                m.next[previous] = m.next[p]
        else:
            previous = p

        p = m.next[p]
