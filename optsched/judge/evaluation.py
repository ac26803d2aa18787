"""What the judge has derived from a schedule: times, memory and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.fleet import Fleet
from optsched.costs.machine import Machine
from optsched.problem.instance import Instance
from optsched.problem.markup import number, table
from optsched.problem.metrics import derive, time_words

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Clock:
    """Times of requests and batches since the first arrival: int64 rounds or float64 seconds.

    A request is processed from its `release` on, starts with the `first_start` of a batch, and has
    its `first_token` and its `finish` at the ends of batches; tokens that a restart discards do not
    count. For a schedule of starts, batches are the longest intervals in which the same requests
    run.
    """

    release: NDArray[Any]
    first_start: NDArray[Any]
    first_token: NDArray[Any]
    finish: NDArray[Any]
    batch_start: NDArray[Any]
    batch_end: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Reuse:
    """What a schedule reuses of shared prefixes, for an instance that has them.

    Parameters
    ----------
    reused : ndarray of int64, shape (n,)
        Tokens that each request claimed, after evictions again.
    asked : ndarray of int64, shape (n,)
        Tokens of each request's input, summed over the times that it took up KV: what might have
        been claimed, but for one token each.
    batch_shared : ndarray of int64, shape (batches,)
        KV tokens in blocks that two or more requests hold after each batch.
    batch_retained : ndarray of int64, shape (batches,)
        KV tokens retained for later claims in each batch, which no request holds.
    """

    reused: NDArray[np.int64]
    asked: NDArray[np.int64]
    batch_shared: NDArray[np.int64]
    batch_retained: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moved:
    """When the KV of which request moves, since the first arrival, in the order of the list."""

    request: NDArray[np.int64]
    start: NDArray[Any]
    end: NDArray[Any]


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
        KV held at the end of the interval, where it is largest. A block that several requests
        share counts once, and what must be retained for later claims counts, too.
    workers : int
    machines : tuple of Machine
        The machine of each worker, or one that all have.
    mean_kv : float
        Mean KV held, weighted by batch time.
    busy_batches : int
        Number of batches, or of rounds in which something runs.
    split_prefill : bool
        Whether some prefill was processed in chunks.
    gap : ndarray of float64, shape (n,)
        Largest time between two output tokens of each request in succession. Tokens that a restart
        discards do not count. NaN for a single output token.
    reuse : Reuse, optional
        What is reused; None if the instance has no shared prefixes.
    pools : Fleet, optional
        The machines, where KV may move between them.
    moves : Moved, optional
        When KV moves between pools.
    """

    instance: Instance
    kind: str
    clock: Clock
    served: NDArray[Any]
    evictions: NDArray[np.int64]
    pauses: NDArray[np.int64]
    batch_kv: NDArray[np.int64]
    workers: int
    machines: tuple[Machine, ...]
    mean_kv: float
    busy_batches: int
    gap: NDArray[np.float64]
    split_prefill: bool = False
    reuse: Reuse | None = None
    pools: Fleet | None = None
    moves: Moved | None = None

    def __repr__(self) -> str:
        unit, metrics = f"{self.instance.time_unit}s", self.metrics
        return (
            f"<Evaluation {self.instance.name!r}: tel {metrics['tel']} {unit}, makespan "
            f"{metrics['makespan']} {unit}, peak_kv {metrics['peak_kv']} of "
            f"{self.kv_capacity} tokens, {metrics['evictions']} evictions>"
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
            f"{self.kv_capacity:,} tokens, {number(metrics['batches'])} batches, "
            f"{number(metrics['evictions'])} evictions"
        )
        title = f"Evaluation on {self.instance.name}"

        return table(title, ("", "mean", "p50", "p90", "p99"), rows, below)

    @property
    def release_times(self) -> NDArray[Any]:
        """Time from which on each request might be processed, shape (n,): its arrival if given."""
        return self.instance.releases(self.finish)  # not `clock.release` with its rounding

    @property
    def release(self) -> NDArray[Any]:
        """`release_times` since the first arrival."""
        return self.clock.release

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
        return self.clock.finish - self.clock.release

    @cached_property
    def ttft(self) -> NDArray[Any]:
        """Time from arrival to the first output token of each request, shape (n,)."""
        return self.clock.first_token - self.clock.release

    @cached_property
    def tpot(self) -> NDArray[np.float64]:
        """Time per output token after the first, shape (n,); NaN for a single output token."""
        steps = (self.instance.output_tokens - 1).astype(np.float64)
        steps[steps == 0] = np.nan
        return np.asarray((self.clock.finish - self.clock.first_token) / steps, dtype=np.float64)

    @cached_property
    def queuing_delay(self) -> NDArray[Any]:
        """Time from arrival to the start of each request's first batch, shape (n,)."""
        return self.clock.first_start - self.clock.release

    @cached_property
    def waiting(self) -> NDArray[Any]:
        """Latency of each request less the time of the batches that processed it, shape (n,)."""
        return np.maximum(self.latency - self.served, 0)  # 0 may come out as -1e-16

    @property
    def weight(self) -> NDArray[np.int64] | None:
        """The instance's weights, shape (n,). None without any."""
        return self.instance.weight

    @property
    def stretch(self) -> NDArray[np.float64] | None:
        """Latency over the rounds that each request takes alone, shape (n,). None in seconds."""
        if not self.instance.in_rounds:
            return None

        return np.asarray(self.latency / self.instance.output_tokens)

    @cached_property
    def session_completion(self) -> NDArray[Any] | None:
        """Time from a session's first arrival to its last end, by session; None without any."""
        sessions = self.instance.sessions
        if sessions is None:
            return None

        last = sessions.over(self.clock.finish, np.maximum)
        return np.asarray(last - sessions.over(self.clock.release, np.minimum))

    @property
    def preemptions(self) -> int:
        """Number of pauses and evictions of running requests, over all requests."""
        return int(self.pauses.sum() + self.evictions.sum())

    @property
    def kv_capacity(self) -> int:
        """The KV tokens that the largest machine holds at any time."""
        return max(machine.capacity for machine in self.machines)

    @property
    def outside_reason(self) -> str | None:
        """Why bounds for uninterrupted runs in rounds do not cover this schedule; None if they do.

        They cover restarts: the last run of each request has the same completion and no more KV.
        They do not cover pauses with KV held, or prefills split under a token limit. In seconds
        bounds cover every schedule.
        """
        if not self.instance.in_rounds:
            return None
        if self.reuse is not None:
            return "its requests may share the KV of prefixes"
        if self.pauses.any():
            return "it pauses running requests, which the round model's optimum may not do"

        limits = self.instance.limits
        if self.split_prefill and (limits.max_batch_tokens or limits.max_prefill_tokens):
            return "it splits prefills under a token limit, which the optimum may not do"

        return None

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

    def to_frame(self) -> pd.DataFrame:
        """Return a table of requests with their sizes, times, latencies, delays and evictions.

        Times are in the instance's unit.
        """
        import pandas as pd

        instance = self.instance
        names = (
            *("first_start", "first_token", "finish", "latency", "ttft", "tpot", "gap"),
            *("queuing_delay", "waiting", "evictions", "pauses"),
        )
        return pd.DataFrame(
            {
                "id": list(instance.id) if instance.id is not None else range(instance.n),
                "arrival": self.release_times,
                "prompt_tokens": instance.prompt_tokens,
                "output_tokens": instance.output_tokens,
                **({} if self.weight is None else {"weight": self.weight}),
                **{name: getattr(self, name) for name in names},
                **({} if self.reuse is None else {"reused": self.reuse.reused}),
            }
        )
