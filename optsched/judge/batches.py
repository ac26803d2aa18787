"""Judges a schedule of batches: calls the replay, and puts into words what it finds.

Import this module lazily, since it loads numba.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.costs.machine import Machine
from optsched.judge import replay as rules
from optsched.judge.evaluation import Clock, Evaluation, Reuse
from optsched.judge.replay import Breach, Columns, Origin, replay
from optsched.judge.validity import warn_outside
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns

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
tokens: decodes {value} tokens; expected 1
tokens: prefills {value} tokens; expected at most the {limit} left of its input
chunked_prefill: prefills {value} tokens; expected all {limit}, since chunked prefill is forbidden
hybrid_batching: holds prefills and decodes; expected one kind, since hybrid batching is forbidden
max_batch_tokens: processes {value} tokens; expected at most max_batch_tokens {limit}
max_prefill_tokens: prefills {value} tokens; expected at most max_prefill_tokens {limit}
start: starts at {value}, before the worker is free at {limit}
arrival: is processed at {value}, before its arrival {limit}
worker: is processed on worker {value}, but worker {limit} holds its KV
start: is processed at {value}, but another batch holds it until {limit}
reused: claims {value} tokens, but all behind the first {limit} were never computed on its worker
kv_capacity: holds {value} KV tokens at its end; expected at most kv_capacity {limit}
max_running: holds KV of {value} requests at its end; expected at most max_running {limit}
unfinished: produced {value} tokens by the end of the schedule; expected {limit}
kv_capacity: holds and retains {value} KV tokens at its end; expected at most kv_capacity {limit}
after: is processed before {value} of those that it comes after have ended; expected {limit}
"""
WORDS = [line.split(": ", 1) for line in _WORDS.strip().splitlines()]
"""The short name of each rule, in their order, and what is said of its batch or request."""


def judge_batches(
    instance: Instance, schedule: Schedule, machines: tuple[Machine, ...]
) -> Evaluation:
    """Judge a schedule of batches on machines: one for each worker, or one for all."""
    flat = check_columns(schedule)
    batches = len(flat[0]) - 1
    worker = schedule.worker if schedule.worker is not None else np.zeros(batches, dtype=np.int64)
    workers = len(machines)
    if workers == 1 and batches:
        workers = min(max(int(worker.max()), 0) + 1, MAX_WORKERS)

    start, blur = np.full(batches, np.nan), 0.0
    if schedule.start is not None:
        start = np.asarray(schedule.start)
        if not np.isfinite(start).all():
            raise InputError("schedule.start: found NaN or infinity; expected finite times")
        if instance.in_rounds:
            start = start - instance.first_arrival
        elif instance.first_arrival and batches:
            blur = batches * float(np.spacing(np.abs(start).max()))

        start = start.astype(np.float64)

    reused = schedule.reused
    if reused is not None and reused.any() and instance.prefixes is None:
        p = int(np.argmax(reused != 0))
        raise InputError(
            f"schedule.reused: request {flat[1][p]}: found {reused[p]} claimed tokens; expected "
            "none, since the instance has neither prefix_parent nor prefix_block_tokens"
        )

    given = Columns(*flat, start, worker, reused)  # type: ignore[call-arg, arg-type]
    origin = Origin(instance.clock_origin, blur)
    breach, at, found = replay(instance, schedule.evict_mode, machines, workers, given, origin)
    if breach.rule != rules.OK:
        raise _violation(breach, at, instance)

    warn_outside(machines, found.extremes)
    requests, done = found.requests, found.batches
    length = done["end"] - done["start"]
    columns = [requests[name] for name in ("release", "first_start", "first_token", "finish")]
    columns += [done["start"], done["end"]]
    reuse = None
    if (by_batch := found.sharing) is not None:
        columns_of = requests["reused"], requests["asked"], by_batch["shared"], by_batch["retained"]
        reuse = Reuse(*(column.copy() for column in columns_of))

    def times(column: NDArray[np.float64]) -> NDArray[np.float64] | NDArray[np.int64]:
        whole = instance.in_rounds
        return np.rint(column).astype(np.int64) if whole else np.ascontiguousarray(column)

    return Evaluation(
        instance=instance,
        kind="batches",
        clock=Clock(*(times(column) for column in columns)),
        served=times(requests["served"]),
        evictions=requests["evictions"].copy(),
        pauses=requests["pauses"].copy(),
        batch_kv=done["kv"].copy(),
        workers=workers,
        machines=machines,
        mean_kv=float((done["kv"] * length).sum() / length.sum()),
        busy_batches=batches,
        gap=np.where(instance.output_tokens > 1, requests["gap"], np.nan),
        split_prefill=bool(done["split"].any()),
        reuse=reuse,
    )


def _violation(found: Breach, batch: int, instance: Instance) -> ViolationError:
    i, since = int(found.request), 0.0
    if found.rule in (rules.START_EARLY, rules.ARRIVAL, rules.STILL_BUSY):
        since = float(instance.first_arrival)

    value, limit = (_number(float(v + since)) for v in (found.value, found.limit))
    rule, text = WORDS[found.rule]
    where = [f"batch {batch}"] if found.rule != rules.UNFINISHED and batch >= 0 else []
    if i >= 0 or found.rule == rules.BAD_REQUEST:
        where.append(f"request {i}")

    return ViolationError(
        f"{', '.join(where)}: {text.format(value=value, limit=limit)}",
        rule=rule,
        batch=batch if batch >= 0 else None,
        request=i if i >= 0 else None,
        value=value,
        limit=limit,
    )


def _number(value: float) -> float | int | None:
    if np.isnan(value):
        return None

    return int(value) if value.is_integer() else value
