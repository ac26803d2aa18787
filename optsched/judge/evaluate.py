"""The one judge: replays a schedule, checks every constraint, derives every metric."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost, CostModel, UnitCost, cost_for
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.markup import number, table
from optsched.problem.metrics import derive, time_words
from optsched.problem.schedule import Schedule, check_columns

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

MAX_WORKERS = 1_000_000
"""Most workers that a schedule may number."""


@dataclass(frozen=True, eq=False)
class Clock:
    """When things happened, in the instance's unit since its first arrival.

    Parameters
    ----------
    first_start, first_token, finish : ndarray, shape (n,)
        When each request was first processed, and when its first and last token were produced
        (tokens lost in a restart do not count).
    batch_start, batch_end : ndarray, shape (batches,)
        For a schedule of starts: the maximal intervals between two changes of the running set.
    """

    first_start: NDArray[Any]
    first_token: NDArray[Any]
    finish: NDArray[Any]
    batch_start: NDArray[Any]
    batch_end: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Times, memory and metrics of a schedule that the judge accepted.

    Times are in the instance's unit (rounds or seconds), KV in tokens.

    Parameters
    ----------
    instance : Instance
    kind : str
        Kind of the schedule judged.
    clock : Clock
        Times since the first arrival. Latencies come from these: after a late first arrival a
        time of day has too few digits for them.
    served : ndarray, shape (n,)
        Time of all batches that processed it.
    evictions, pauses : ndarray of int64, shape (n,)
        How often it lost its KV; how often, since then, its worker's time passed it over while
        it held KV.
    batch_kv : ndarray of int64, shape (batches,)
        KV held after each batch, all requests of the batch included; for a schedule of starts,
        at the end of the interval (its largest value).
    workers : int
    mean_kv : float
        Mean KV held, weighted by batch time.
    busy_batches : int
        Number of batches (rounds in which something runs).
    split_prefill : bool
        Whether some prefill was processed in chunks.
    slo_ttft, slo_tpot : float, optional
        Objectives of service for `metrics`.
    """

    instance: Instance
    kind: str
    clock: Clock
    served: NDArray[Any]
    evictions: NDArray[np.int64]
    pauses: NDArray[np.int64]
    batch_kv: NDArray[np.int64]
    workers: int
    mean_kv: float
    busy_batches: int
    split_prefill: bool = False
    slo_ttft: float | None = None
    slo_tpot: float | None = None

    def __repr__(self) -> str:
        unit, metrics = f"{self.instance.time_unit}s", self.metrics
        return (
            f"<Evaluation {self.instance.name!r}: tel {metrics['tel']} {unit}, makespan "
            f"{metrics['makespan']} {unit}, peak_kv {metrics['peak_kv']} of "
            f"{self.instance.kv_capacity} tokens, {metrics['evictions']} evictions>"
        )

    def _repr_html_(self) -> str:
        unit, metrics = time_words(self.instance.time_unit), self.metrics
        rows: list[tuple[Any, ...]] = [
            (name, metrics[f"mean_{key}"], *(metrics[f"p{q}_{key}"] for q in (50, 90, 99)))
            for name, key in ((f"latency [{unit}]", "latency"), (f"TTFT [{unit}]", "ttft"))
        ]
        tpot = (metrics["mean_tpot"], None, None, metrics["p99_tpot"])
        rows.append((f"TPOT [{unit}/token]", *tpot))
        below = (
            f"total latency {number(metrics['tel'])} {unit}, makespan "
            f"{number(metrics['makespan'])} {unit}, peak KV {number(metrics['peak_kv'])} of "
            f"{self.instance.kv_capacity:,} tokens, {number(metrics['batches'])} batches, "
            f"{number(metrics['evictions'])} evictions"
        )
        title = f"Evaluation on {self.instance.name}"
        return table(title, ("", "mean", "p50", "p90", "p99"), rows, below)

    @cached_property
    def first_start(self) -> NDArray[Any]:
        """When each request was first processed, shape (n,)."""
        return self.instance.at(self.clock.first_start)

    @cached_property
    def first_token(self) -> NDArray[Any]:
        """When each request's first token was produced, shape (n,)."""
        return self.instance.at(self.clock.first_token)

    @cached_property
    def finish(self) -> NDArray[Any]:
        """When each request's last token was produced, shape (n,)."""
        return self.instance.at(self.clock.finish)

    @cached_property
    def batch_start(self) -> NDArray[Any]:
        """When each batch (or interval, see `Clock`) began, shape (batches,)."""
        return self.instance.at(self.clock.batch_start)

    @cached_property
    def batch_end(self) -> NDArray[Any]:
        """When each batch (or interval) ended, shape (batches,)."""
        return self.instance.at(self.clock.batch_end)

    @property
    def span(self) -> Any:
        """Time from the first arrival to the last completion."""
        return self.clock.finish.max()

    @cached_property
    def latency(self) -> NDArray[Any]:
        """Finish minus arrival of each request, shape (n,)."""
        return self.clock.finish - self.instance.arrival_since_first

    @cached_property
    def ttft(self) -> NDArray[Any]:
        """Time to first token of each request, shape (n,)."""
        return self.clock.first_token - self.instance.arrival_since_first

    @cached_property
    def tpot(self) -> NDArray[np.float64]:
        """Time per output token after the first, shape (n,); NaN where there is only one."""
        steps = (self.instance.output_tokens - 1).astype(np.float64)
        steps[steps == 0] = np.nan
        return np.asarray((self.clock.finish - self.clock.first_token) / steps, dtype=np.float64)

    @cached_property
    def queuing_delay(self) -> NDArray[Any]:
        """Time from arrival to the first batch of each request, shape (n,)."""
        return self.clock.first_start - self.instance.arrival_since_first

    @cached_property
    def waiting(self) -> NDArray[Any]:
        """Latency less the time of the batches that processed it, shape (n,)."""
        return np.maximum(self.latency - self.served, 0)  # 0 may come out as -1e-16

    @property
    def preemptions(self) -> int:
        """How often a running request was passed over or evicted, over all requests."""
        return int(self.pauses.sum() + self.evictions.sum())

    @property
    def outside_reason(self) -> str | None:
        """Why bounds on uninterrupted runs in rounds do not cover this schedule, or None.

        A schedule with restarts is covered: dropping every run but a request's last leaves an
        uninterrupted schedule with the same completions and no more KV. One that pauses a
        request while it holds KV, uses several workers, or splits a prefill under a token limit
        is not.
        """
        if not self.instance.in_rounds:
            return "the instance is in seconds"
        if self.workers > 1:
            return f"it uses {self.workers} workers"
        if self.pauses.any():
            return "it pauses running requests, which the round model's optimum may not"
        limits = self.instance.limits
        if self.split_prefill and (limits.max_batch_tokens or limits.max_prefill_tokens):
            return "it splits prefills under a token limit, which the optimum may not"
        return None

    @property
    def covered_by_hindsight(self) -> bool:
        """Whether the hindsight optimum and its bounds are bounds for this schedule."""
        return self.outside_reason is None

    @cached_property
    def metrics(self) -> dict[str, float | int | None]:
        """Every metric of `optsched.problem.metrics.TABLE` by name, None where unknown.

        ``tel`` is the sum of latencies, ``makespan`` the last completion, ``tps`` output tokens
        per time unit from the first arrival to the last completion, ``mean_waiting`` the time in
        no batch (the queuing delay and later interruptions), percentiles interpolate linearly,
        ``mean_kv`` is weighted by batch time. ``slo_attainment`` is the share of
        requests that meet both limits given, ``slo_goodput`` their number per time unit.
        """
        return derive(self)

    def table(self) -> pd.DataFrame:
        """Return one row per request: sizes, times, latency, TTFT, TPOT, delays, evictions."""
        import pandas as pd

        instance = self.instance
        return pd.DataFrame(
            {
                "id": list(instance.id) if instance.id is not None else range(instance.n),
                "arrival": instance.arrival,
                "prompt_tokens": instance.prompt_tokens,
                "output_tokens": instance.output_tokens,
                "first_start": self.first_start,
                "first_token": self.first_token,
                "finish": self.finish,
                "latency": self.latency,
                "ttft": self.ttft,
                "tpot": self.tpot,
                "queuing_delay": self.queuing_delay,
                "waiting": self.waiting,
                "evictions": self.evictions,
                "pauses": self.pauses,
            }
        )


def evaluate(
    instance: Instance,
    schedule: Schedule,
    cost_model: CostModel | str | Path | None = None,
    *,
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
) -> Evaluation:
    """Judge a schedule: check every constraint and derive every metric.

    Checked at every batch: requests and workers exist, none twice, none before its arrival,
    after its last token or on a worker that does not hold its KV; evictions lose KV that is
    there; a decode step has one token and a prefill no more than the rest of its input (all of
    it when chunking is forbidden); phases are not mixed when hybrid batching is forbidden; C, P,
    R_max and the KV capacity hold, requests that finish in the batch included. At the end every
    request has produced all its tokens.

    Parameters
    ----------
    instance : Instance
    schedule : Schedule
    cost_model : BatchCost or str, optional
        Needed for an instance in seconds, refused for one in rounds.
    slo_ttft, slo_tpot : float, optional
        Objectives of service, in the instance's time unit.

    Returns
    -------
    Evaluation

    Warns
    -----
    UserWarning
        The schedule leaves the cost model's range of validity.

    Raises
    ------
    ViolationError
        The first violation, with batch, request, value and limit.
    InputError, UsageError
        Columns that do not fit together, a schedule of another instance or cost model.
    """
    cost = cost_for(instance, cost_model)
    columns = check_columns(schedule)
    instance.check_digest(schedule.instance_sha256, "schedule.instance_sha256")
    if schedule.cost_model_sha256 not in (None, cost.sha256):
        raise InputError(
            f"schedule.cost_model_sha256: {schedule.cost_model_sha256} is another cost model's; "
            f"{cost.name} has {cost.sha256}"
        )
    for name, slo in (("slo_ttft", slo_ttft), ("slo_tpot", slo_tpot)):
        if slo is not None and not slo > 0:
            raise InputError(f"{name}: {slo!r} is not a time > 0")
    if schedule.kind == "starts":
        return _judge_starts(instance, columns[0], slo_ttft, slo_tpot)
    judged = _judge_batches(instance, schedule, columns, cost, slo_ttft, slo_tpot)
    if isinstance(cost, BatchCost) and cost.valid:
        from optsched.judge.validity import warn_outside

        warn_outside(instance, columns, schedule.evict_mode == "restart", cost)
    return judged


def _judge_starts(
    instance: Instance,
    starts: NDArray[np.int64],
    slo_ttft: float | None,
    slo_tpot: float | None,
) -> Evaluation:
    """Judge uninterrupted runs in O(n log n), whatever the distance between arrivals.

    KV use rises between two completions (every running request gains a token per round), so it
    is largest at completions; tokens per round are largest where a prefill starts.
    """
    if not instance.in_rounds:
        raise InputError("schedule.kind: 'starts' needs an instance in rounds; 'batches' is right")
    if len(starts) != instance.n:
        raise InputError(
            f"schedule.starts: has {len(starts)} values; {instance.n} requests need one each"
        )
    prompt, output = instance.prompt_tokens, instance.output_tokens
    early = starts < instance.arrival
    if early.any():
        i = int(np.argmax(early))
        raise ViolationError(
            f"request {i}: starts in round {starts[i]}, before its arrival {instance.arrival[i]}",
            rule="arrival", request=i, value=int(starts[i]), limit=int(instance.arrival[i]),
        )  # fmt: skip
    # Every sum below is at most n times the last completion, prompts included.
    first = int(instance.first_arrival)
    last = int(starts.max()) - first + int((prompt + output).max())
    if instance.n * last >= 2**63 or int(starts.max()) + int(output.max()) >= 2**63:
        i = int(np.argmax(starts))
        raise InputError(
            f"schedule.starts: request {i} starts in round {starts[i]}; {instance.n} completions "
            "that late do not fit into 64-bit sums; earlier starts are right"
        )
    starts = starts - first
    finish = starts + output
    events = np.unique(np.concatenate([starts, finish]))
    # After the events up to time t, running requests hold sum(s - k) + (t + offset - 1) * count
    # while they produce a token in round t: start k adds (s - k, 1) to all rounds in (k, k + o].
    rank_start = np.searchsorted(events, starts)
    rank_finish = np.searchsorted(events, finish)
    count = np.zeros(len(events) + 1, dtype=np.int64)
    base = np.zeros(len(events) + 1, dtype=np.int64)
    np.add.at(count, rank_start, 1)
    np.add.at(count, rank_finish, -1)
    np.add.at(base, rank_start, prompt - starts)
    np.add.at(base, rank_finish, starts - prompt)
    count, base = np.cumsum(count)[:-1], np.cumsum(base)[:-1]
    begin, end = events[:-1], events[1:]
    count, base = count[:-1], base[:-1]
    shift = instance.kv_offset - 1
    kv_end = (base + (end + shift) * count).astype(np.int64)
    if (kv_end > instance.kv_capacity).any():
        j = int(np.argmax(kv_end > instance.kv_capacity))
        raise ViolationError(
            f"round {end[j] + first}: running requests hold {kv_end[j]} KV tokens; kv_capacity is "
            f"{instance.kv_capacity}",
            rule="kv_capacity", batch=int(end[j] + first), value=int(kv_end[j]),
            limit=instance.kv_capacity,
        )  # fmt: skip
    new = np.zeros(len(events), dtype=np.int64)
    prefill = np.zeros(len(events), dtype=np.int64)
    np.add.at(new, rank_start, 1)
    np.add.at(prefill, rank_start, prompt)
    new, prefill = new[:-1], prefill[:-1]
    limits = instance.limits
    checks = (
        ("max_running", "running requests", count, limits.max_running),
        ("max_batch_tokens", "tokens", prefill + count - new, limits.max_batch_tokens),
        ("max_prefill_tokens", "prefill tokens", prefill, limits.max_prefill_tokens),
    )
    for rule, what, values, limit in checks:
        if limit is not None and (values > limit).any():
            j = int(np.argmax(values > limit))
            raise ViolationError(
                f"round {begin[j] + first + 1}: {values[j]} {what}; {rule} is {limit}",
                rule=rule, batch=int(begin[j] + first) + 1, value=int(values[j]), limit=limit,
            )  # fmt: skip
    if instance.hybrid_batching is False and ((new > 0) & (count > new)).any():
        j = int(np.argmax((new > 0) & (count > new)))
        raise ViolationError(
            f"round {begin[j] + first + 1}: {new[j]} prefills beside {count[j] - new[j]} decodes; "
            "hybrid batching is forbidden",
            rule="hybrid_batching", batch=int(begin[j] + first) + 1, value=int(new[j]), limit=0,
        )  # fmt: skip
    busy = count > 0
    rounds = int((end - begin)[busy].sum())
    zeros = np.zeros(instance.n, dtype=np.int64)
    return Evaluation(
        instance=instance,
        kind="starts",
        clock=Clock(starts, starts + 1, finish, begin[busy], end[busy]),
        served=output,
        evictions=zeros,
        pauses=zeros,
        batch_kv=kv_end[busy],
        workers=1,
        mean_kv=float(int(instance.volume.sum()) / rounds),
        busy_batches=rounds,
        slo_ttft=slo_ttft,
        slo_tpot=slo_tpot,
    )


def _judge_batches(
    instance: Instance,
    schedule: Schedule,
    columns: tuple[NDArray[np.int64], ...],
    cost: CostModel,
    slo_ttft: float | None,
    slo_tpot: float | None,
) -> Evaluation:
    from optsched.judge import replay as judge
    from optsched.judge.life import UNLIMITED

    batches = len(columns[0]) - 1
    worker = schedule.worker if schedule.worker is not None else np.zeros(batches, dtype=np.int64)
    workers = min(int(worker.max()) + 1, MAX_WORKERS) if batches and worker.max() >= 0 else 1
    start, blur = np.full(batches, np.nan), 0.0
    if schedule.start is not None:
        start = np.asarray(schedule.start)
        if not np.isfinite(start).all():
            raise InputError("schedule.start: must hold finite times")
        if instance.in_rounds:
            start = start - instance.first_arrival
        elif instance.first_arrival and batches:
            blur = batches * float(np.spacing(np.abs(start).max()))
        start = start.astype(np.float64)
    limits = instance.limits
    compiled: Any = judge.replay
    found = judge.Replay(
        *compiled(
            instance.release,
            instance.prompt_tokens,
            instance.output_tokens,
            judge.Limits(
                instance.kv_capacity,
                instance.kv_offset,
                limits.max_batch_tokens or UNLIMITED,
                limits.max_prefill_tokens or UNLIMITED,
                limits.max_running or UNLIMITED,
                instance.hybrid_batching is not False,
                instance.chunked_prefill is not False,
                schedule.evict_mode == "restart" or not instance.in_rounds,
                schedule.evict_mode == "restart",
            ),
            cost.array,
            judge.Columns(*columns, start, worker),  # type: ignore[call-arg, arg-type]
            judge.Origin(instance.clock_origin, -float(instance.first_arrival), blur),
            workers,
        )
    )
    if found.rule != judge.OK:
        raise _violation(found, instance)
    times: list[NDArray[Any]] = [
        found.first_start, found.first_token, found.finish, found.batch_start, found.batch_end,
        found.served,
    ]  # fmt: skip
    if isinstance(cost, UnitCost):
        times = [np.rint(column).astype(np.int64) for column in times]
    length = (found.batch_end - found.batch_start).astype(np.float64)
    return Evaluation(
        instance=instance,
        kind="batches",
        clock=Clock(*times[:5]),
        served=times[5],
        evictions=found.evictions,
        pauses=found.pauses,
        batch_kv=found.batch_kv,
        workers=workers,
        mean_kv=float((found.batch_kv * length).sum() / length.sum()),
        busy_batches=batches,
        split_prefill=bool(found.chunked),
        slo_ttft=slo_ttft,
        slo_tpot=slo_tpot,
    )


def _violation(found: Any, instance: Instance) -> ViolationError:
    from optsched.judge import replay as judge

    i, j = int(found.request), int(found.batch)
    value, limit = _number(found.value), _number(found.limit)
    if int(found.rule) in (judge.START_EARLY, judge.ARRIVAL, judge.STILL_BUSY):
        value, limit = (_number(float(v + instance.first_arrival)) for v in found[3:5])
    words: dict[int, tuple[str, str]] = {
        judge.BAD_REQUEST: ("request", f"does not exist; 0 to {instance.n - 1} is right"),
        judge.BAD_WORKER: ("worker", f"worker {value} does not exist; 0 to {limit} is right"),
        judge.EVICT_NOTHING: ("eviction", "is evicted, but its worker holds none of its KV"),
        judge.EVICT_MODE: (
            "evict_mode",
            "is evicted to be recomputed; in the round model only restart exists",
        ),
        judge.DUPLICATE: ("duplicate", "stands twice in the batch"),
        judge.FINISHED: ("finished", f"is processed after its last token {limit}"),
        judge.NO_TOKENS: ("tokens", f"processes {value} tokens; at least 1 is right"),
        judge.EMPTY_BATCH: ("empty_batch", "the batch processes nothing"),
        judge.DECODE_TOKENS: ("tokens", f"decodes {value} tokens; 1 is right"),
        judge.TOO_MANY_TOKENS: (
            "tokens",
            f"prefills {value} tokens, but only {limit} of its input are left",
        ),
        judge.CHUNKED: (
            "chunked_prefill",
            f"prefills {value} of {limit} tokens; chunked prefill is forbidden",
        ),
        judge.HYBRID: ("hybrid_batching", "holds prefills and decodes; hybrid batching is off"),
        judge.BATCH_TOKENS: (
            "max_batch_tokens",
            f"processes {value} tokens; max_batch_tokens is {limit}",
        ),
        judge.PREFILL_TOKENS: (
            "max_prefill_tokens",
            f"prefills {value} tokens; max_prefill_tokens is {limit}",
        ),
        judge.START_EARLY: (
            "start",
            f"starts at {value}, before the worker is free at {limit}",
        ),
        judge.ARRIVAL: ("arrival", f"is processed at {value}, before its arrival {limit}"),
        judge.OTHER_WORKER: (
            "worker",
            f"is processed on worker {value}, but worker {limit} holds its KV",
        ),
        judge.STILL_BUSY: (
            "start",
            f"is processed at {value}, but another batch holds it until {limit}",
        ),
        judge.KV_CAPACITY: (
            "kv_capacity",
            f"{value} KV tokens are held after it; kv_capacity is {limit}",
        ),
        judge.MAX_RUNNING: (
            "max_running",
            f"{value} requests hold KV after it; max_running is {limit}",
        ),
        judge.UNFINISHED: ("unfinished", f"produced {value} of its {limit} tokens"),
    }
    rule, text = words[int(found.rule)]
    where = [f"batch {j}"] if rule != "unfinished" and j >= 0 else []
    if i >= 0 or int(found.rule) == judge.BAD_REQUEST:
        where.append(f"request {i}")
    return ViolationError(
        f"{', '.join(where)}: {text}",
        rule=rule,
        batch=j if j >= 0 else None,
        request=i if i >= 0 else None,
        value=value,
        limit=limit,
    )


def _number(value: float) -> float | int | None:
    if np.isnan(value):
        return None
    return int(value) if float(value).is_integer() else float(value)
