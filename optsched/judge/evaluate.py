"""The one judge, which replays a schedule, checks every constraint and derives every metric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost, CostModel, UnitCost, cost_for
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance, whole_blocks
from optsched.problem.markup import number, table
from optsched.problem.metrics import check_parameter, derive, time_words
from optsched.problem.schedule import Schedule, check_columns

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

MAX_WORKERS = 1_000_000
"""Maximum number of workers of a schedule."""


@dataclass(frozen=True, eq=False)
class Clock:
    """Times of requests and batches since the first arrival, in the instance's unit.

    Arrays are int64 in rounds and float64 in seconds.

    Parameters
    ----------
    first_start : ndarray, shape (n,)
        Start of the first batch that processed each request.
    first_token, finish : ndarray, shape (n,)
        End of the batches that produced its first and its last output token. Tokens that a
        restart discards do not count.
    batch_start, batch_end : ndarray, shape (batches,)
        Start and end of each batch. For a schedule of starts, these are the longest intervals
        in which the same requests run.
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
    kind : {"starts", "batches"}
        Kind of the judged schedule.
    clock : Clock
        Times since the first arrival. Latencies are computed from these, since a time stamp with
        a late origin has too few digits left for small differences.
    served : ndarray, shape (n,)
        Total time of the batches that processed each request.
    evictions : ndarray of int64, shape (n,)
        Number of times that each request lost its KV.
    pauses : ndarray of int64, shape (n,)
        Number of times that a request held KV while its worker ran a batch without it or stood
        idle, counted since its last eviction.
    batch_kv : ndarray of int64, shape (batches,)
        KV held after each batch, including requests that finish in it. For a schedule of starts,
        KV held at the end of the interval, where it is largest.
    workers : int
        Number of workers.
    mean_kv : float
        Mean KV held, weighted by batch time.
    busy_batches : int
        Number of batches, or of rounds in which something runs.
    split_prefill : bool
        Whether some prefill was processed in chunks.
    gap : ndarray of float64, shape (n,)
        Largest time between two output tokens of each request in succession. Tokens that a restart
        discards do not count. NaN for a single output token.
    slo_ttft, slo_tpot, slo_gap, slo_latency : float, optional
        SLOs of every request, in place of those of the instance (`evaluate`).
    ttft_weight : float, optional
        The weight of TTFT beside latency in the metric ``latency_and_ttft``, from 0 to 1.
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
    gap: NDArray[np.float64]
    split_prefill: bool = False
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    slo_gap: float | None = None
    slo_latency: float | None = None
    ttft_weight: float | None = None

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
        """Time at which each request was first processed, shape (n,)."""
        return self.instance.at(self.clock.first_start)

    @cached_property
    def first_token(self) -> NDArray[Any]:
        """Time at which each request's first output token was produced, shape (n,)."""
        return self.instance.at(self.clock.first_token)

    @cached_property
    def finish(self) -> NDArray[Any]:
        """Time at which each request's last output token was produced, shape (n,)."""
        return self.instance.at(self.clock.finish)

    @cached_property
    def batch_start(self) -> NDArray[Any]:
        """Start of each batch, or of each interval (see `Clock`), shape (batches,)."""
        return self.instance.at(self.clock.batch_start)

    @cached_property
    def batch_end(self) -> NDArray[Any]:
        """End of each batch, or of each interval (see `Clock`), shape (batches,)."""
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
        """Time from arrival to the first output token of each request, shape (n,)."""
        return self.clock.first_token - self.instance.arrival_since_first

    @cached_property
    def tpot(self) -> NDArray[np.float64]:
        """Time per output token after the first, shape (n,); NaN for a single output token."""
        steps = (self.instance.output_tokens - 1).astype(np.float64)
        steps[steps == 0] = np.nan
        return np.asarray((self.clock.finish - self.clock.first_token) / steps, dtype=np.float64)

    @cached_property
    def queuing_delay(self) -> NDArray[Any]:
        """Time from arrival to the start of each request's first batch, shape (n,)."""
        return self.clock.first_start - self.instance.arrival_since_first

    @cached_property
    def waiting(self) -> NDArray[Any]:
        """Latency of each request less the time of the batches that processed it, shape (n,)."""
        return np.maximum(self.latency - self.served, 0)  # 0 may come out as -1e-16

    @property
    def preemptions(self) -> int:
        """Number of pauses and evictions of running requests, over all requests."""
        return int(self.pauses.sum() + self.evictions.sum())

    @property
    def outside_reason(self) -> str | None:
        """Why bounds for uninterrupted runs in rounds do not cover this schedule; None if they do.

        A schedule with restarts is covered. Dropping every run of a request but its last leaves
        an uninterrupted schedule with the same completions and no more KV. Not covered are
        schedules that pause a request while it holds KV, use several workers, or split a prefill
        under a token limit.
        """
        if not self.instance.in_rounds:
            return "the instance is in seconds"
        if self.workers > 1:
            return f"it uses {self.workers} workers"
        if self.pauses.any():
            return "it pauses running requests, which the round model's optimum may not do"

        limits = self.instance.limits
        if self.split_prefill and (limits.max_batch_tokens or limits.max_prefill_tokens):
            return "it splits prefills under a token limit, which the optimum may not do"

        return None

    @property
    def covered_by_hindsight(self) -> bool:
        """Whether bounds on the hindsight optimum in rounds are bounds on this schedule too."""
        return self.outside_reason is None

    @cached_property
    def metrics(self) -> dict[str, float | int | None]:
        """Every metric of `optsched.problem.metrics.TABLE` by name; None where it is unknown.

        ``tel`` is the sum of latencies and ``makespan`` the last completion. ``tps`` counts
        output tokens per time unit from the first arrival to the last completion.
        ``mean_waiting`` is the mean time in no batch: the queuing delay and later interruptions.
        ``mean_kv`` is weighted by batch time. ``slo_attainment`` is the share of requests within
        all their SLOs, and ``slo_goodput`` their number per time unit. Percentiles are
        interpolated linearly.
        """
        return derive(self)

    def table(self) -> pd.DataFrame:
        """Return a table of requests with their sizes, times, latencies, delays and evictions.

        Returns
        -------
        pandas.DataFrame
            One row per request. Times are in the instance's unit.
        """
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
                "gap": self.gap,
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
    slo_gap: float | None = None,
    slo_latency: float | None = None,
    ttft_weight: float | None = None,
) -> Evaluation:
    """Judge a schedule: check every constraint and derive every metric.

    The judge checks these rules at every batch:

    - Requests and workers exist, and no request stands twice in a batch.
    - No request is processed before its arrival, after its last token, or on a worker other than
      the one that holds its KV. Only a request that holds KV is evicted.
    - A decode step has one token. A prefill has at most the rest of the request's input, and all
      of it when chunked prefill is forbidden.
    - Prefills and decodes are not mixed when hybrid batching is forbidden.
    - The limits C, P and R_max and the KV capacity hold, counting requests that finish in the
      batch.

    At the end every request has produced all its tokens.

    Parameters
    ----------
    instance : Instance
    schedule : Schedule
    cost_model : BatchCost, str or path, optional
        Cost model, or the name or file of one. An instance in seconds needs it; one in rounds
        refuses it.
    slo_ttft, slo_tpot, slo_gap, slo_latency : float, optional
        Service level objectives of every request, in the instance's time unit: the max TTFT, TPOT,
        gap between two output tokens, and latency of a request that is served well. Each that is
        given replaces the instance's column of its name.
    ttft_weight : float, optional
        The weight of TTFT beside latency in the metric ``latency_and_ttft``, from 0 to 1.

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
        The schedule breaks a rule. The error names the first violation with its batch, request,
        value and limit.
    InputError
        Columns do not fit together, the schedule was made for another instance or cost model, or
        an SLO is not a time > 0, or the weight is not in its range.
    UsageError
        An instance in seconds without a cost model, or one in rounds with one.
    """
    cost = cost_for(instance, cost_model)
    columns = check_columns(schedule)
    instance.check_digest(schedule.instance_sha256, "schedule.instance_sha256")

    if schedule.cost_model_sha256 not in (None, cost.sha256):
        raise InputError(
            f"schedule.cost_model_sha256: found {schedule.cost_model_sha256}, which is another "
            f"cost model's; expected {cost.sha256} of {cost.name}"
        )

    given: dict[str, Any] = {
        "slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "slo_gap": slo_gap, "slo_latency": slo_latency,
        "ttft_weight": ttft_weight,
    }  # fmt: skip
    for name, value in given.items():
        expected = None if value is None else check_parameter(name, value)
        if expected is not None:
            raise InputError(f"{name}: found {value!r}; expected {expected}")

    if schedule.kind == "starts":
        judged = _judge_starts(instance, columns[0])
    else:
        judged = _judge_batches(instance, schedule, columns, cost)

    if isinstance(cost, BatchCost) and cost.valid:
        from optsched.judge.validity import warn_outside

        warn_outside(instance, columns, schedule.evict_mode == "restart", cost)

    return replace(judged, **given)


def _judge_starts(
    instance: Instance,
    starts: NDArray[np.int64],
) -> Evaluation:
    """Judge uninterrupted runs in O(n log n), however far apart the arrivals are.

    Every running request gains a token per round, so KV rises between two completions and is
    largest at a completion. Tokens per round are largest where a prefill starts.
    """
    if not instance.in_rounds:
        raise InputError(
            "schedule.kind: found 'starts' for an instance in seconds; expected 'batches'"
        )

    if len(starts) != instance.n:
        raise InputError(
            f"schedule.starts: found {len(starts)} values; expected {instance.n}, one per request"
        )

    prompt, output = instance.prompt_tokens, instance.output_tokens
    early = starts < instance.arrival
    if early.any():
        i = int(np.argmax(early))
        raise ViolationError(
            f"request {i}: starts in round {starts[i]}, before its arrival {instance.arrival[i]}",
            rule="arrival", request=i, value=int(starts[i]), limit=int(instance.arrival[i]),
        )  # fmt: skip

    # No sum below exceeds n times the last completion, prompts included.
    first = int(instance.first_arrival)
    last = int(starts.max()) - first + int((prompt + output).max())
    if instance.n * last >= 2**63 or int(starts.max()) + int(output.max()) >= 2**63:
        i = int(np.argmax(starts))
        raise InputError(
            f"schedule.starts: request {i}: found round {starts[i]}; expected an earlier start, "
            f"since {instance.n} completions that late may exceed 64-bit sums"
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
    volume = int(instance.volume.sum())

    if instance.kv_block_tokens > 1:
        kv_end = _blocks_held(instance, starts, end)
        volume = _block_volume(instance)

    if (kv_end > instance.kv_capacity).any():
        j = int(np.argmax(kv_end > instance.kv_capacity))
        raise ViolationError(
            f"round {end[j] + first}: running requests hold {kv_end[j]} KV tokens; expected at "
            f"most kv_capacity {instance.kv_capacity}",
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
                f"round {begin[j] + first + 1}: found {values[j]} {what}; expected at most {rule} "
                f"{limit}",
                rule=rule, batch=int(begin[j] + first) + 1, value=int(values[j]), limit=limit,
            )  # fmt: skip

    if instance.hybrid_batching is False and ((new > 0) & (count > new)).any():
        j = int(np.argmax((new > 0) & (count > new)))
        raise ViolationError(
            f"round {begin[j] + first + 1}: found {new[j]} prefills beside {count[j] - new[j]} "
            "decodes; expected one kind, since hybrid batching is forbidden",
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
        mean_kv=float(volume / rounds),
        busy_batches=rounds,
        gap=np.where(output > 1, 1.0, np.nan),
    )


def _blocks_held(
    instance: Instance, starts: NDArray[np.int64], rounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the KV that runs from ``starts`` on hold in some rounds, in whole blocks."""
    held = np.zeros(len(rounds), dtype=np.int64)
    for j, t in enumerate(rounds):
        on = (starts < t) & (t <= starts + instance.output_tokens)
        tokens = instance.prompt_tokens[on] + (t - starts[on]) + (instance.kv_offset - 1)
        held[j] = whole_blocks(tokens, instance.kv_block_tokens).sum()

    return held


def _block_volume(instance: Instance) -> int:
    """Return the KV that uninterrupted runs hold, in whole blocks, summed over their rounds."""
    block = instance.kv_block_tokens
    before = instance.prompt_tokens + (instance.kv_offset - 1)

    def up_to(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        full, rest = tokens // block, tokens % block
        return np.asarray(block * (block * full * (full + 1) // 2 + rest * (full + 1)))

    return int((up_to(before + instance.output_tokens) - up_to(before)).sum())


def _judge_batches(
    instance: Instance,
    schedule: Schedule,
    columns: tuple[NDArray[np.int64], ...],
    cost: CostModel,
) -> Evaluation:
    from optsched.judge import replay as judge

    batches = len(columns[0]) - 1
    worker = schedule.worker if schedule.worker is not None else np.zeros(batches, dtype=np.int64)
    workers = min(int(worker.max()) + 1, MAX_WORKERS) if batches and worker.max() >= 0 else 1
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

    requests, machines = judge.new_state(
        instance.release,
        instance.prompt_tokens,
        instance.output_tokens,
        workers,
        0.0 - instance.first_arrival,  # not -0.0, which would show in the times
    )
    found = np.zeros(batches, dtype=judge.BATCH)
    breach, at, split = judge.replay(
        requests,
        machines,
        judge.limits_of(instance, schedule.evict_mode),
        cost.array,
        judge.Columns(*columns, start, worker),  # type: ignore[call-arg, arg-type]
        judge.Origin(instance.clock_origin, blur),
        found,
    )
    if breach.rule != judge.OK:
        raise _violation(breach, int(at), instance)

    times: list[NDArray[Any]] = [
        requests["first_start"], requests["first_token"], requests["finish"], found["start"],
        found["end"], requests["served"],
    ]  # fmt: skip
    if isinstance(cost, UnitCost):
        times = [np.rint(column).astype(np.int64) for column in times]
    else:
        times = [np.ascontiguousarray(column) for column in times]

    length = found["end"] - found["start"]
    return Evaluation(
        instance=instance,
        kind="batches",
        clock=Clock(*times[:5]),
        served=times[5],
        evictions=requests["evictions"].copy(),
        pauses=requests["pauses"].copy(),
        batch_kv=found["kv"].copy(),
        workers=workers,
        mean_kv=float((found["kv"] * length).sum() / length.sum()),
        busy_batches=batches,
        gap=np.where(instance.output_tokens > 1, requests["gap"], np.nan),
        split_prefill=bool(split),
    )


def _violation(found: Any, batch: int, instance: Instance) -> ViolationError:
    from optsched.judge import replay as judge

    i, j = int(found.request), batch
    value, limit = _number(found.value), _number(found.limit)
    if int(found.rule) in (judge.START_EARLY, judge.ARRIVAL, judge.STILL_BUSY):
        value, limit = (_number(float(v + instance.first_arrival)) for v in found[2:])

    words: dict[int, tuple[str, str]] = {
        judge.BAD_REQUEST: ("request", f"does not exist; expected 0 to {instance.n - 1}"),
        judge.BAD_WORKER: ("worker", f"worker {value} does not exist; expected 0 to {limit}"),
        judge.EVICT_NOTHING: ("eviction", "is evicted, but its worker holds none of its KV"),
        judge.EVICT_MODE: (
            "evict_mode",
            "found evict_mode 'recompute'; expected 'restart', the only one in the round model",
        ),
        judge.DUPLICATE: ("duplicate", "found twice in the batch; expected once"),
        judge.FINISHED: ("finished", f"is processed after its last token {limit}"),
        judge.NO_TOKENS: ("tokens", f"processes {value} tokens; expected at least 1"),
        judge.EMPTY_BATCH: ("empty_batch", "processes nothing; expected one or more requests"),
        judge.DECODE_TOKENS: ("tokens", f"decodes {value} tokens; expected 1"),
        judge.TOO_MANY_TOKENS: (
            "tokens",
            f"prefills {value} tokens; expected at most the {limit} left of its input",
        ),
        judge.CHUNKED: (
            "chunked_prefill",
            f"prefills {value} tokens; expected all {limit}, since chunked prefill is forbidden",
        ),
        judge.HYBRID: (
            "hybrid_batching",
            "holds prefills and decodes; expected one kind, since hybrid batching is forbidden",
        ),
        judge.BATCH_TOKENS: (
            "max_batch_tokens",
            f"processes {value} tokens; expected at most max_batch_tokens {limit}",
        ),
        judge.PREFILL_TOKENS: (
            "max_prefill_tokens",
            f"prefills {value} tokens; expected at most max_prefill_tokens {limit}",
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
            f"holds {value} KV tokens at its end; expected at most kv_capacity {limit}",
        ),
        judge.MAX_RUNNING: (
            "max_running",
            f"holds KV of {value} requests at its end; expected at most max_running {limit}",
        ),
        judge.UNFINISHED: (
            "unfinished",
            f"produced {value} tokens by the end of the schedule; expected {limit}",
        ),
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
