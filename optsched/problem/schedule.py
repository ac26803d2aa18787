"""A schedule holds decisions only. Times, memory and metrics exist only in an Evaluation."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.columns import plain_numbers
from optsched.problem.errors import InputError, check_kind
from optsched.problem.instance import Instance

EvictMode = Literal["restart", "recompute"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Start times of uninterrupted runs, or what every batch processes and evicts.

    Parameters
    ----------
    kind : {"starts", "batches"}
        ``"starts"``: one start per request, in the round model without preemption.
        ``"batches"``: flat columns that say what every batch does.
    starts : ndarray of int64, shape (n,), optional
        Start of each request, in rounds. The request runs in rounds start + 1 to start + o.
    batch_offsets : ndarray of int64, shape (batches + 1,), optional
        Batch j processes the entries ``batch_offsets[j]:batch_offsets[j+1]``.
    request, tokens : ndarray of int64, shape (entries,), optional
        Request of each entry, and the number of its tokens that the batch processes.
    evicted_offsets : ndarray of int64, shape (batches + 1,), optional
        The requests ``evicted[evicted_offsets[j]:evicted_offsets[j+1]]`` are evicted just
        before batch j.
    evicted : ndarray of int64, shape (evictions,), optional
        Requests whose KV is freed.
    start : ndarray of int64 (rounds) or float64 (seconds), shape (batches,), optional
        Start time of each batch. If absent, a batch starts when the worker's previous batch has
        ended and all its requests have arrived.
    worker : ndarray of int64, shape (batches,), optional
        Worker of each batch, numbered from 0. If absent, there is one worker.
    reused : ndarray of int64, shape (entries,), optional
        Cached tokens that the request of each entry claims before its tokens are processed. Only
        one that holds no KV may claim some. If absent, nothing is claimed.
    moved_offsets : ndarray of int64, shape (batches + 1,), optional
        The moves ``moved_offsets[j]:moved_offsets[j+1]`` come before batch j and its evictions. If
        absent, no KV moves to another worker.
    moved, moved_to : ndarray of int64, shape (moves,), optional
        Request whose KV moves, and the worker that receives it.
    moved_start : ndarray of int64 (rounds) or float64 (seconds), shape (moves,), optional
        Start time of each move. If absent, a move starts when the request's latest batch has
        ended, and not before the receiver's latest batch and move have begun.
    evict_mode : {"restart", "recompute"}
        Whether an evicted request loses the tokens that it has produced (``"restart"``), or
        keeps them and recomputes their KV (``"recompute"``).
    instance_sha256, cost_model_sha256 : str, optional
        Digests of the instance and the cost model that the schedule was made for.
    """

    kind: Literal["starts", "batches"]
    starts: NDArray[np.int64] | None = None
    batch_offsets: NDArray[np.int64] | None = None
    request: NDArray[np.int64] | None = None
    tokens: NDArray[np.int64] | None = None
    evicted_offsets: NDArray[np.int64] | None = None
    evicted: NDArray[np.int64] | None = None
    start: NDArray[Any] | None = None
    worker: NDArray[np.int64] | None = None
    reused: NDArray[np.int64] | None = None
    moved_offsets: NDArray[np.int64] | None = None
    moved: NDArray[np.int64] | None = None
    moved_to: NDArray[np.int64] | None = None
    moved_start: NDArray[Any] | None = None
    evict_mode: EvictMode = "recompute"
    instance_sha256: str | None = None
    cost_model_sha256: str | None = None

    def __repr__(self) -> str:
        if self.starts is not None:
            return f"<Schedule of starts: {len(self.starts)} requests>"

        batches = 0 if self.batch_offsets is None else len(self.batch_offsets) - 1
        entries = 0 if self.request is None else len(self.request)
        evictions = 0 if self.evicted is None else len(self.evicted)
        return (
            f"<Schedule of batches: {batches} batches, {entries} entries, {evictions} evictions, "
            f"{self.evict_mode}>"
        )

    @property
    def batches(self) -> int:
        """Number of batches of a schedule of batches."""
        if self.batch_offsets is None:
            raise InputError("schedule: found a schedule of starts; expected one of batches")

        return len(self.batch_offsets) - 1

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a schedule file, without columns that are absent."""
        data: dict[str, Any] = {
            "format": "optsched-schedule",
            "version": 1,
            "instance_sha256": self.instance_sha256,
            "kind": self.kind,
        }
        for name in ALL_COLUMNS:
            column = getattr(self, name)
            if column is not None:
                data[name] = plain_numbers(column)

        if self.kind == "batches":
            data["evict_mode"] = self.evict_mode
        if self.cost_model_sha256 is not None:
            data["cost_model_sha256"] = self.cost_model_sha256

        return data


def read_start(start: float, earliest: float, origin: float) -> float:
    """Return the time since ``origin`` at which a batch starts, from the start in a schedule.

    A start in a schedule is a rounded sum, and the later the first arrival, the coarser the
    rounding. A start that equals the rounded earliest start is therefore read as the earliest
    start. The judge and the engines compile this function, so that both read the same moment.
    """
    return earliest if origin + earliest == start else start - origin


COLUMNS = ("batch_offsets", "request", "tokens", "evicted_offsets", "evicted")
"""The flat columns that every schedule of batches has."""

MOVES = ("moved_offsets", "moved", "moved_to")
"""The flat columns of a schedule in which KV moves."""

TIMES = ("start", "moved_start")
"""The columns of times, which are optional."""

ALL_COLUMNS = ("starts", *COLUMNS, "start", "worker", "reused", *MOVES, "moved_start")
"""Every column of either kind of schedule, in the order of files."""


_AN_INSTANCE = "an optsched.Instance (optsched.read_instance reads one)"


def from_starts(starts: ArrayLike, instance: Instance) -> Schedule:
    """Return the schedule of uninterrupted runs that start at given rounds.

    `optsched.evaluate` says whether it is feasible.

    Parameters
    ----------
    starts : array_like of int, shape (n,)
        Start of each request, in rounds. The request runs in rounds start + 1 to start + o.
    instance : Instance
        What the schedule is for; its digest is recorded.
    """
    check_kind("instance", instance, Instance, _AN_INSTANCE)
    return Schedule(
        kind="starts",
        starts=_column(starts, "starts"),
        instance_sha256=instance.sha256,
        evict_mode="restart",
    )


def from_batches(
    batch_offsets: ArrayLike,
    request: ArrayLike,
    tokens: ArrayLike,
    *,
    instance: Instance,
    evicted_offsets: ArrayLike | None = None,
    evicted: ArrayLike | None = None,
    start: ArrayLike | None = None,
    worker: ArrayLike | None = None,
    reused: ArrayLike | None = None,
    moved_offsets: ArrayLike | None = None,
    moved: ArrayLike | None = None,
    moved_to: ArrayLike | None = None,
    moved_start: ArrayLike | None = None,
    evict_mode: EvictMode = "recompute",
    cost_model_sha256: str | None = None,
) -> Schedule:
    """Return a schedule of batches from its flat columns.

    `optsched.evaluate` says whether it is feasible.

    Parameters
    ----------
    batch_offsets : array_like of int, shape (batches + 1,)
        Batch j processes the entries ``batch_offsets[j]:batch_offsets[j+1]``.
    request, tokens : array_like of int, shape (entries,)
        Request of each entry, and the number of its tokens that the batch processes.
    instance : Instance
        What the schedule is for; its digest is recorded.
    evicted_offsets : array_like of int, shape (batches + 1,), optional
        Offsets into ``evicted`` of each batch; None: no evictions.
    evicted : array_like of int, shape (evictions,), optional
        Requests whose KV is freed just before a batch.
    start : array_like, shape (batches,), optional
        Start time of each batch, in rounds or seconds.
    worker : array_like of int, shape (batches,), optional
        Worker of each batch, numbered from 0.
    reused : array_like of int, shape (entries,), optional
        Cached tokens that each entry claims.
    moved_offsets, moved, moved_to, moved_start : array_like, optional
        The moves of KV to other workers, see `Schedule`.
    evict_mode : {"restart", "recompute"}
        See `Schedule`.
    cost_model_sha256 : str, optional
        Digest of the cost model that the schedule was made for.

    Raises
    ------
    InputError
        Lengths or offsets of the columns do not fit together, or a column does not hold
        integers.
    """
    check_kind("instance", instance, Instance, _AN_INSTANCE)
    offsets = _column(batch_offsets, "batch_offsets")
    batches = len(offsets) - 1
    if evicted_offsets is None:
        evicted_offsets, evicted = np.zeros(batches + 1, dtype=np.int64), []

    kind = np.int64 if instance.in_rounds else np.float64
    optional = {"worker": worker, "reused": reused, "moved_offsets": moved_offsets}
    optional |= {"moved": moved, "moved_to": moved_to}
    schedule = Schedule(
        kind="batches",
        batch_offsets=offsets,
        request=_column(request, "request"),
        tokens=_column(tokens, "tokens"),
        evicted_offsets=_column(evicted_offsets, "evicted_offsets"),
        evicted=_column([] if evicted is None else evicted, "evicted"),
        **{name: None if one is None else _column(one, name) for name, one in optional.items()},
        start=None if start is None else np.array(start, dtype=kind),
        moved_start=None if moved_start is None else np.array(moved_start, dtype=kind),
        evict_mode=evict_mode,
        instance_sha256=instance.sha256,
        cost_model_sha256=cost_model_sha256,
    )
    check_columns(schedule)
    return schedule


def runs_on(instance: Instance, starts: ArrayLike, workers: ArrayLike) -> Schedule:
    """Return the schedule of uninterrupted runs that start at given rounds on given workers."""
    # One entry for each round of each request: the prompt in its first, and then a token each.
    outputs = instance.output_tokens
    request = np.repeat(np.arange(instance.n), outputs)
    step = np.arange(len(request)) - np.repeat(np.cumsum(outputs) - outputs, outputs)
    tokens = np.where(step == 0, instance.prompt_tokens[request], 1)
    time = np.asarray(starts)[request] + step
    worker = np.asarray(workers)[request]

    # Entries of the same time and worker are a batch.
    order = np.lexsort((request, worker, time))
    time, worker = time[order], worker[order]
    first = np.flatnonzero(np.r_[True, (np.diff(time) > 0) | (np.diff(worker) != 0)])
    return from_batches(
        np.append(first, len(order)),
        request[order],
        tokens[order],
        instance=instance,
        start=time[first],
        worker=worker[first],
        evict_mode="restart",
    )


def in_parts(schedule: Schedule, instance: Instance) -> Schedule:
    """Return a schedule whose batches keep within the instance's tokens per batch.

    A batch with more tokens becomes several in a row: decodes come first, then prompts, of which
    one may be split. What is held and processed after the last part is what it was after the whole
    batch, and until then it is less, so every other limit still holds. Starts are left out.

    Where requests share prefixes it may be more until then: a block that two of them compute is
    shared only once it is whole. So claims are refused, and a schedule without them may not fit.
    """
    for name, what in (("reused", "claims"), ("moved", "moves")):
        if getattr(schedule, name) is not None:
            raise InputError(
                f"{name}: found {what} in batches to be split; expected none, since parts may "
                "hold more"
            )

    limit = instance.limits.max_batch_tokens
    offsets, request, tokens, evicted_offsets, evicted = check_columns(schedule)
    sizes = np.diff(np.append(0, np.cumsum(tokens))[offsets])  # tokens of each batch
    if limit is None or not (sizes > limit).any():
        return replace(schedule, instance_sha256=instance.sha256)

    entries: list[tuple[int, int]] = []  # the requests and tokens of all parts
    part_offsets = [0]
    batch_of_part: list[int] = []
    for j in range(schedule.batches):
        batch = slice(offsets[j], offsets[j + 1])
        free_tokens = limit
        # An entry of one token counts as a decode.
        decodes_first = sorted(
            zip(request[batch], tokens[batch], strict=True), key=lambda entry: entry[1] > 1
        )
        for i, c in decodes_first:
            # Fill the part with what fits of the request, and go on with its rest in a new one.
            while c > free_tokens:
                if free_tokens:
                    entries.append((i, free_tokens))

                part_offsets.append(len(entries))
                c, free_tokens = c - free_tokens, limit

            entries.append((i, c))
            free_tokens -= c

        part_offsets.append(len(entries))
        batch_of_part += [j] * (len(part_offsets) - 1 - len(batch_of_part))

    # All parts run where the batch did, and what it evicts goes before its first part: the offset
    # at the end of each part is that at the end of its batch.
    return from_batches(
        part_offsets,
        *np.array(entries).T,
        instance=instance,
        evicted_offsets=np.append(0, evicted_offsets[1:][batch_of_part]),
        evicted=evicted,
        worker=None if schedule.worker is None else schedule.worker[batch_of_part],
        evict_mode=schedule.evict_mode,
        cost_model_sha256=schedule.cost_model_sha256,
    )


def workers_of(schedule: Schedule, n: int) -> NDArray[np.int64]:
    """Return the worker of each request in a schedule of batches: that of its latest batch."""
    worker = np.zeros(n, dtype=np.int64)
    if schedule.worker is not None:
        offsets, request, *_ = check_columns(schedule)
        worker[request] = np.repeat(schedule.worker, np.diff(offsets))

    return worker


def check_columns(schedule: Schedule) -> tuple[NDArray[np.int64], ...]:
    """Check that a schedule's columns fit together; whether it is feasible is not checked.

    Return the column of starts alone, or those of `COLUMNS`.
    """
    check_kind("schedule", schedule, Schedule, "an optsched.Schedule (optsched.read_schedule)")
    if schedule.kind == "starts":
        if schedule.starts is None:
            raise InputError("starts: found nothing; expected one start per request")

        return (schedule.starts,)

    for name in COLUMNS:
        if getattr(schedule, name) is None:
            raise InputError(
                f"{name}: found nothing; expected the columns {', '.join(COLUMNS)} of a schedule "
                "of batches"
            )

    columns: tuple[NDArray[np.int64], ...] = tuple(getattr(schedule, name) for name in COLUMNS)
    offsets, request, tokens, evicted_offsets, evicted = columns
    if len(request) != len(tokens):
        raise InputError(
            f"tokens: found {len(tokens)} values; expected {len(request)}, as many as request has"
        )

    # Columns of offsets, and the length of the column that each of them cuts into parts.
    cuts = [("batch_offsets", offsets, len(request))]
    cuts.append(("evicted_offsets", evicted_offsets, len(evicted)))
    # `MOVES`: moved_offsets, moved and moved_to. They come together or not at all.
    present = [getattr(schedule, name) is not None for name in MOVES]
    moves = 0
    if any(present) or schedule.moved_start is not None:
        if not all(present):
            missing = MOVES[present.index(False)]
            raise InputError(f"{missing}: found nothing; expected the columns {', '.join(MOVES)}")

        assert schedule.moved is not None
        assert schedule.moved_offsets is not None
        moves = len(schedule.moved)
        cuts.append(("moved_offsets", schedule.moved_offsets, moves))

    for name, cut, length in cuts:
        reaches = len(cut) > 0 and cut[0] == 0 and cut[-1] == length
        if not reaches or (np.diff(cut) < 0).any():
            raise InputError(
                f"{name}: found {cut.tolist()!s:.60}; expected offsets that rise from 0 to the "
                f"column's length {length}"
            )

    batches = len(offsets) - 1
    for name, column, length in (
        ("evicted_offsets", evicted_offsets, batches + 1),
        ("start", schedule.start, batches),
        ("worker", schedule.worker, batches),
        ("reused", schedule.reused, len(request)),
        ("moved_offsets", schedule.moved_offsets, batches + 1),
        ("moved_to", schedule.moved_to, moves),
        ("moved_start", schedule.moved_start, moves),
    ):
        if column is not None and len(column) != length:
            raise InputError(f"{name}: found {len(column)} values; expected {length}")

    return columns


def _column(values: ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"schedule.{name}: found {array.dtype} values; expected integers")

    return array.astype(np.int64)
