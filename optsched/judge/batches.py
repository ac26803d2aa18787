"""Judges a schedule of batches: calls the replay, and puts into words what it finds.

Import this module lazily, since it loads numba.
"""

import numpy as np
from numpy.typing import NDArray

from optsched.judge import replay as rules
from optsched.judge.evaluation import Clock, Evaluation, Moved, Reuse
from optsched.judge.moves import Moves, moves_of
from optsched.judge.replay import Breach, Columns, Origin, Replayed, replay
from optsched.judge.validity import warn_outside
from optsched.problem.errors import InputError, ViolationError, some
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns
from optsched.workloads.problem import Problem

MAX_WORKERS = 1_000_000
"""Maximum number of workers of a schedule."""

_WORDS = """
ok:
request: does not exist; expected 0 to {limit}
worker: worker {value} does not exist; expected 0 to {limit}
eviction: is evicted, but its worker holds none of its KV
evict_mode: found evict_mode 'recompute'; expected 'restart', the only one in the round model
reused: claims {value} tokens with {limit} of its tokens cached; expected 0
reused: claims {value} tokens; expected whole blocks of {limit}
reused: claims {value} tokens; expected at most {limit}, its input less one
duplicate: found twice in the batch; expected once
finished: is processed after its last token {limit}
tokens: processes {value} tokens; expected at least 1
empty_batch: processes nothing; expected one or more requests
tokens: decodes {value} tokens; expected at most {limit}
tokens: prefills {value} tokens; expected at most the {limit} left of its input
chunked_prefill: prefills {value} tokens; expected all {limit}, since chunked prefill is forbidden
hybrid_batching: holds prefills and decodes; expected one kind, since hybrid batching is forbidden
max_batch_tokens: processes {value} tokens; expected at most max_batch_tokens {limit}
max_prefill_tokens: prefills {value} tokens; expected at most max_prefill_tokens {limit}
start: starts at {value}, before the worker is free at {limit}
arrival: is processed at {value}, before its arrival {limit}
worker: is processed on worker {value}, but worker {limit} holds its KV
start: is processed at {value}, but a batch or a move holds it until {limit}
reused: claims {value} tokens, but all behind the first {limit} were never computed on its worker
kv_capacity: holds {value} KV tokens at its end; expected at most kv_capacity {limit}
max_running: holds KV of {value} requests at its end; expected at most max_running {limit}
unfinished: produced {value} tokens by the end of the schedule; expected {limit}
kv_capacity: holds and retains {value} KV tokens at its end; expected at most kv_capacity {limit}
after: is processed before {value} of those that it comes after have ended; expected {limit}
start: starts at {value}, but the move to its worker that stands before it starts at {limit}
moved: moves, but no worker holds its KV
moved: moves to worker {value}, which holds its KV; expected another one
moved: moves at {value}; expected {limit} or later, as its batch and the receiver's batches allow
kv_capacity: {value} KV tokens are held while KV comes in; expected at most kv_capacity {limit}
role: produces token {limit} on worker {value}, a prefill machine; expected the first one only
role: is prefilled on worker {value}, a decode machine; expected its KV from a prefill machine
eviction: is evicted at {value}, before its move is over at {limit}
"""
WORDS = [line.split(": ", 1) for line in _WORDS.strip().splitlines()]
"""The short name of each rule, in their order, and what is said of its batch or request."""


def judge_batches(problem: Problem, schedule: Schedule) -> Evaluation:
    """Judge a schedule of batches on a machine for each worker, or on one that stands for all."""
    instance, machines, pools = problem.instance, problem.machines, problem.pools
    flat = check_columns(schedule)  # batch_offsets, request, tokens, evicted_offsets, evicted
    batches = len(flat[0]) - 1
    worker = schedule.worker if schedule.worker is not None else np.zeros(batches, dtype=np.int64)
    workers = problem.workers
    # One machine stands for as many workers as the schedule names, since all are like it. The
    # replay refuses a negative number, and one beyond the maximum.
    if workers == 1 and batches and pools is None:
        workers = min(max(int(worker.max()), 0) + 1, MAX_WORKERS)

    start = _since_first(schedule.start, "start", instance)
    moved_start = _since_first(schedule.moved_start, "moved_start", instance)
    given = [times for times in (start, moved_start) if times is not None and len(times)]
    blur = 0.0
    # `blur`, see `Origin`: a clock that began long before the first arrival is coarser than the
    # replay, which counts from there, and its errors may add up from batch to batch.
    if given and instance.first_arrival and not instance.in_rounds:
        blur = batches * float(np.spacing(max(np.abs(times).max() for times in given)))
    if start is None:
        start = np.full(batches, np.nan)

    reused = schedule.reused
    if reused is not None and reused.any() and instance.prefixes is None:
        p = int(np.argmax(reused != 0))
        raise InputError(
            f"schedule.reused: request {flat[1][p]}: found {reused[p]} claimed tokens; expected "
            "none, since the instance has neither prefix_parent nor prefix_block_tokens"
        )

    moves = moves_of(instance, schedule, batches, pools, moved_start)
    flat_columns = Columns(*flat, start, worker, reused, moves)  # type: ignore[call-arg, arg-type]
    origin = Origin(instance.clock_origin, blur)
    mode = schedule.evict_mode
    breach, batch, replayed = replay(instance, mode, machines, workers, flat_columns, origin)
    if breach.rule != rules.OK:
        holders = np.zeros(0, dtype=np.int64)
        # All requests that hold KV break these together, so the error names all of them.
        if breach.rule in (rules.KV_CAPACITY, rules.MAX_RUNNING):
            r = replayed.requests
            holders = np.flatnonzero((r["cached"] > 0) & (r["home"] == worker[batch]))

        raise _violation(breach, batch, instance, holders)

    warn_outside(machines, replayed.extremes)
    return _evaluation(problem, replayed, workers, moves)


def _evaluation(
    problem: Problem, replayed: Replayed, workers: int, moves: Moves | None
) -> Evaluation:
    """Return what follows from a replay that broke no rule."""
    instance = problem.instance
    requests, batches = replayed.requests, replayed.batches
    length = batches["end"] - batches["start"]
    # In the order of `Clock`.
    columns = [requests[name] for name in ("release", "first_start", "first_token", "finish")]
    columns += [batches["start"], batches["end"]]
    reuse = None
    if (by_batch := replayed.sharing) is not None:
        columns_of = requests["reused"], requests["asked"], by_batch["shared"], by_batch["retained"]
        reuse = Reuse(*(column.copy() for column in columns_of))

    def in_unit(column: NDArray[np.float64]) -> NDArray[np.float64] | NDArray[np.int64]:
        """Return times in seconds, or rounds as integers."""
        whole = instance.in_rounds
        return np.rint(column).astype(np.int64) if whole else np.ascontiguousarray(column)

    moved = None
    if moves is not None:
        moved = Moved(moves.request, in_unit(moves.start), in_unit(moves.end))

    # Columns of records are copied, so that the records can go.
    return Evaluation(
        instance=instance,
        kind="batches",
        clock=Clock(*(in_unit(column) for column in columns)),
        served=in_unit(requests["served"]),
        evictions=requests["evictions"].copy(),
        pauses=requests["pauses"].copy(),
        batch_kv=batches["kv"].copy(),
        workers=workers,
        machines=problem.machines,
        mean_kv=float((batches["kv"] * length).sum() / length.sum()),
        busy_batches=len(batches),
        gap=np.where(instance.output_tokens > 1, requests["gap"], np.nan),
        split_prefill=bool(batches["split"].any()),
        reuse=reuse,
        pools=problem.pools,
        moves=moved,
    )


def _since_first(
    column: NDArray[np.float64] | None, name: str, instance: Instance
) -> NDArray[np.float64] | None:
    """Return the times of a column: in rounds since the first arrival, in seconds as they are.

    The replay turns seconds into times since the first arrival itself, by `Origin`.
    """
    if column is None:
        return None
    if not np.isfinite(column).all():
        raise InputError(f"schedule.{name}: found NaN or infinity; expected finite times")

    return np.asarray(column - instance.first_arrival if instance.in_rounds else column, np.float64)


def _violation(
    breach: Breach, batch: int, instance: Instance, holders: NDArray[np.int64]
) -> ViolationError:
    """Return the error of a breach, with the requests that hold KV where these break a limit.

    `batch`: its number, -1 without batches. `holders`: those requests, or none.
    """
    i, origin = int(breach.request), 0.0
    moving = (rules.MOVE_FIRST, rules.MOVE_START, rules.EVICT_MOVING)
    # The replay counts from the first arrival, and the reader's clock does not.
    if breach.rule in (*moving, rules.START_EARLY, rules.ARRIVAL, rules.STILL_BUSY):
        origin = float(instance.first_arrival)

    value, limit = (_number(float(v + origin)) for v in (breach.value, breach.limit))
    rule, text = WORDS[breach.rule]
    # What is unfinished is so at the end, and not in a batch. Without batches there is no number.
    where = [f"batch {batch}"] if breach.rule != rules.UNFINISHED and batch >= 0 else []
    # -1 stands for the whole batch, but a request that does not exist may have this number.
    if i >= 0 or breach.rule == rules.BAD_REQUEST:
        where.append(f"request {i}")

    text = text.format(value=value, limit=limit)
    if len(holders):
        text += f"; held by requests {some([str(i) for i in holders])}"

    return ViolationError(
        f"{', '.join(where)}: {text}",
        rule=rule,
        batch=batch if batch >= 0 else None,
        request=i if i >= 0 else None,
        value=value,
        limit=limit,
    )


def _number(value: float) -> float | int | None:
    """Return a number as errors show it: whole ones without a point, and None for NaN."""
    if np.isnan(value):
        return None

    return int(value) if value.is_integer() else value
