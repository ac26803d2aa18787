"""The phases of every request and the content of every batch, over time.

Plots, Perfetto traces and reports draw a timeline and compute nothing themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.judge import spans
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.judge.spans import PHASES
from optsched.problem.errors import InputError, check_kind
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns, runs_on
from optsched.workloads.problem import Problem, as_problem

MAX_ENTRIES = 50_000_000
"""Maximum number of output tokens of a schedule of starts, which is expanded round by round."""

SEPARATE = 8
"""Maximum number of requests for which each is a group of its own."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """The phases of every request and the content of every batch.

    A request is *waiting* from its arrival to its first batch. Then it is in *prefill*, and later
    in *decode*. It is *paused* while it holds KV and no batch processes it, and *evicted* while
    its KV is lost. In *refill*, its input and the tokens that it had produced are computed again.
    Times are in the instance's unit.

    Make one with `optsched.timeline`.

    Parameters
    ----------
    instance : Instance
    evaluation : Evaluation
    span_request, span_phase : ndarray of int64, shape (spans,)
        Request and phase (an index of `PHASES`) of each span. Spans are sorted by request and
        then by start.
    span_start, span_end : ndarray of float64, shape (spans,)
    span_tokens : ndarray of int64, shape (spans,)
        Tokens processed in the span.
    span_worker : ndarray of int64, shape (spans,)
        Worker that holds the request, or -1 where none does.
    batch_start, batch_end : ndarray of float64, shape (batches,)
        Times. For a schedule of starts, every round in which something runs is a batch.
    batch_worker, batch_requests : ndarray of int64, shape (batches,)
        Worker and number of requests of each batch.
    batch_prefill, batch_decode, batch_refill : ndarray of int64, shape (batches,)
        Tokens processed in each phase.
    batch_evictions : ndarray of int64, shape (batches,)
        Evictions just before the batch.
    batch_kv : ndarray of int64, shape (batches,)
        KV tokens that the batch's worker holds during the batch.
    batch_kv_left : ndarray of int64, shape (batches,)
        KV tokens that the worker holds once the finished requests have gone.
    batch_shared, batch_retained : ndarray of int64, shape (batches,), optional
        KV tokens among ``batch_kv`` that two or more requests hold, and that no request holds; None
        for an instance without shared prefixes.
    _changes
        How the KV changes that requests hold; for `kv_by_group`.
    """

    instance: Instance
    evaluation: Evaluation
    span_request: NDArray[np.int64]
    span_phase: NDArray[np.int64]
    span_start: NDArray[np.float64]
    span_end: NDArray[np.float64]
    span_tokens: NDArray[np.int64]
    span_worker: NDArray[np.int64]
    batch_start: NDArray[np.float64]
    batch_end: NDArray[np.float64]
    batch_worker: NDArray[np.int64]
    batch_requests: NDArray[np.int64]
    batch_prefill: NDArray[np.int64]
    batch_decode: NDArray[np.int64]
    batch_refill: NDArray[np.int64]
    batch_evictions: NDArray[np.int64]
    batch_kv: NDArray[np.int64]
    batch_kv_left: NDArray[np.int64]
    _changes: spans.Changes = field(repr=False)
    batch_shared: NDArray[np.int64] | None = None
    batch_retained: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return (
            f"<Timeline {self.instance.name!r}: {self.instance.n} requests, "
            f"{len(self.span_start)} spans, {len(self.batch_start)} batches>"
        )

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.evaluation.workers

    @property
    def unit(self) -> str:
        """Unit of times as labels show it: ``"rounds"`` or ``"s"``."""
        return "rounds" if self.instance.in_rounds else "s"

    def name_of(self, request: int) -> str:
        """Return a request's name for labels: its external id, or ``"request"`` and its index.

        Parameters
        ----------
        request : int
        """
        names = self.instance.id
        return f"request {request}" if names is None else str(names[request])

    def worker_name(self, worker: int) -> str:
        """Return a worker's name for labels, with its role in pools, such as ``worker 0: decode``.

        Parameters
        ----------
        worker : int
        """
        pools = self.evaluation.pools
        role = "" if pools is None else f": {pools.machines[worker].role}"
        return f"worker {worker}{role}"

    @property
    def begin(self) -> float:
        """Time of the first arrival."""
        return float(self.instance.first_arrival)

    @property
    def end(self) -> float:
        """Time of the last completion."""
        return float(self.evaluation.finish.max())

    def phase_counts(
        self, times: NDArray[np.float64], worker: int | None = None
    ) -> NDArray[np.int64]:
        """Return how many requests are in each phase just after given times.

        Parameters
        ----------
        times : ndarray of float64, shape (k,)
            In the instance's unit.
        worker : int, optional
            Only those of this worker count.

        Returns
        -------
        ndarray of int64, shape (phases, k)
        """
        counts = np.zeros((len(PHASES), len(times)), dtype=np.int64)
        for phase in range(len(PHASES)):
            in_phase = self.span_phase == phase
            if worker is not None:
                in_phase &= self.span_worker == worker

            # Spans that have begun by a time, itself included, less those that have ended by then.
            starts, ends = np.sort(self.span_start[in_phase]), np.sort(self.span_end[in_phase])
            counts[phase] = np.searchsorted(starts, times, "right") - np.searchsorted(
                ends, times, "right"
            )

        return counts

    def phase_means(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how many requests are in each phase in the mean, from each time to the next.

        Parameters
        ----------
        times : ndarray of float64, shape (k,)
            In the instance's unit, increasing.

        Returns
        -------
        ndarray of float64, shape (phases, k - 1)
        """
        totals = np.zeros((len(PHASES), len(times)))
        for phase in range(len(PHASES)):
            for sign, moments in (1, self.span_start), (-1, self.span_end):
                moments = np.sort(moments[self.span_phase == phase])
                # Up to time t a span that began at u has lasted t - u: the sum over the spans that
                # have begun, less the same sum over those that have ended.
                before = np.searchsorted(moments, times)
                totals[phase] += sign * (before * times - np.append(0, np.cumsum(moments))[before])

        # Rounding may take a difference of large sums below 0.
        return np.maximum(np.diff(totals) / np.diff(times), 0.0)

    def without_pauses(self) -> Timeline:
        """Return the timeline with every pause merged into the phase around it.

        Where prefills interrupt decodes, as in vLLM, nearly all spans are pauses.
        """
        keep = np.flatnonzero(self.span_phase != spans.PAUSED)
        request, phase = self.span_request[keep], self.span_phase[keep]
        # A span goes on with the one before it if only a pause stood between them.
        goes_on = (request[1:] == request[:-1]) & (phase[1:] == phase[:-1])
        first = np.flatnonzero(np.append(True, ~goes_on))
        last = np.append(first[1:] - 1, len(keep) - 1)

        return replace(
            self,
            span_request=request[first],
            span_phase=phase[first],
            span_start=self.span_start[keep][first],
            span_end=self.span_end[keep][last],
            span_tokens=np.add.reduceat(self.span_tokens[keep], first),
            span_worker=self.span_worker[keep][first],
        )

    @property
    def by_arrival(self) -> NDArray[np.int64]:
        """Indices of the requests sorted by arrival, then by index; shape (n,)."""
        return np.argsort(self.evaluation.release_times, kind="stable")

    def batch_bins(self, most: int, worker: int = 0) -> tuple[NDArray[np.float64], list[Any]]:
        """Divide the batches of a worker into runs that follow each other in time.

        Parameters
        ----------
        most : int
            Maximum number of runs.
        worker : int

        Returns
        -------
        edges : ndarray of float64, shape (runs + 1,)
            Times between the runs. With up to ``most`` batches, every batch is a run, and these
            are the starts of the batches and the last end. With more, runs are equal parts of
            time.
        batches : list of ndarray of int64
            The batches that start in each run, after the one that is running at its start.
        """
        mine = np.flatnonzero(self.batch_worker == worker)
        # Few batches are shown as they are; equal parts of time would cut them.
        if len(mine) <= most:
            edges = np.append(self.batch_start[mine], self.batch_end[mine[-1:]])
            return edges, [mine[k : k + 1] for k in range(len(mine))]

        start = self.batch_start[mine]
        edges = np.linspace(start[0], self.batch_end[mine[-1]], most + 1)
        first = np.searchsorted(start, edges[:-1], "left")
        last = np.append(first[1:], len(mine))
        # A batch that runs on into the next part of time holds its KV there, too, so it is in both.
        previous = np.maximum(first - 1, 0)
        runs_on = (first > 0) & (self.batch_end[mine[previous]] > edges[:-1])
        first = np.where(runs_on, previous, first)

        return edges, [mine[a:b] for a, b in zip(first, last, strict=True)]

    def kv_by_kind(
        self, most: int = 1500, worker: int = 0
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
        """Return the KV of a worker over time that is private, shared and retained.

        For an instance with shared prefixes. Requests hold what is private alone, and what is
        shared with others; nobody holds what is retained for later claims.

        Parameters
        ----------
        most : int
            Maximum number of time steps, as for `kv_by_group`.
        worker : int

        Returns
        -------
        times : ndarray of float64, shape (k,)
            Each value holds until the next time; the last value is 0.
        kv : dict of str to ndarray of int64, shape (k,)
            KV tokens by kind.
        """
        assert self.batch_shared is not None
        assert self.batch_retained is not None
        times, runs = self.batch_bins(most, worker)
        # The batch of each run with the most KV; -1: there is no batch in this part of time.
        peak = np.array([run[np.argmax(self.batch_kv[run])] if len(run) else -1 for run in runs])

        def over_time(column: NDArray[np.int64]) -> NDArray[np.int64]:
            """Return a column where the KV of each run is largest, and 0 at the end."""
            return np.append(np.where(peak < 0, 0, column[peak]), 0)

        shared, retained = self.batch_shared, self.batch_retained
        private = self.batch_kv - shared - retained
        kinds = {"private": private, "shared": shared, "retained": retained}
        return times, {name: over_time(column) for name, column in kinds.items()}

    def _groups(self, groups: int) -> tuple[NDArray[np.int64], list[str]]:
        """Return the group of each request, and the labels of the groups, see `kv_by_group`."""
        n, order = self.instance.n, self.by_arrival
        group = np.empty(n, dtype=np.int64)
        if n <= max(SEPARATE, groups):
            group[order] = np.arange(n)
            return group, [self.name_of(int(i)) for i in order]

        # The place p in the order of arrival is in group p groups // n, so group k begins at the
        # first p that is not below k n / groups.
        group[order] = np.arange(n) * groups // n
        edges = [-(-k * n // groups) for k in range(groups + 1)]
        return group, [f"{a} to {b - 1}" if a + 1 < b else f"{a}" for a, b in pairwise(edges)]

    def kv_by_group(
        self, groups: int = 10, most: int = 1500, worker: int = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], list[str]]:
        """Return the KV that requests hold over time, one by one or in groups.

        Parameters
        ----------
        groups : int
            Number of groups, in order of arrival. If there are no more requests than that (or
            than `SEPARATE`), each request is a group of its own.
        most : int
            Maximum number of time steps. With more batches, each step shows the batch that holds
            the most KV in it.
        worker : int

        Returns
        -------
        times : ndarray of float64, shape (k,)
            Each value holds until the next time; the last value is 0.
        kv : ndarray of int64, shape (groups, k)
            KV tokens of each group.
        labels : list of str
            Names of the requests; or of the groups, by their first and last place in the order
            of arrival, from 0.
        """
        if self.evaluation.moves is not None and len(self.evaluation.moves.start):
            raise InputError("kv_by_group: found KV that moves between workers; expected none")

        group, labels = self._groups(groups)
        times, runs = self.batch_bins(most, worker)
        if not runs:
            return np.zeros(1), np.zeros((len(labels), 1), dtype=np.int64), labels

        # Each run shows its batch with the most KV, and then what is left after its last batch.
        peak = [int(run[np.argmax(self.batch_kv[run])]) if len(run) else -1 for run in runs]
        ends = [int(run[-1]) if len(run) else -1 for run in runs]
        # Only these batches are drawn, so the KV of groups is summed up at no other moments.
        sample = np.unique([j for j in (*peak, *ends) if j >= 0])
        moment = self._changes.moment
        on_worker = self.batch_worker[moment // 2] == worker

        def held_at(moments: NDArray[np.int64]) -> NDArray[np.int64]:
            """Return the KV of each group up to some moments (`spans.Changes`), a row for each."""
            # A change goes to the row of the first moment that is not before it, and to a last row
            # if it is after all of them. That one is left out.
            row = np.searchsorted(moments, moment[on_worker]) * len(labels)
            cell = row + group[self._changes.request[on_worker]]
            size = (len(moments) + 1) * len(labels)
            change = np.bincount(cell, self._changes.kv[on_worker], size).reshape(-1, len(labels))
            return np.cumsum(change[:-1].astype(np.int64), axis=0)

        # In a batch and after it, see `spans.Changes.moment`.
        during, after = held_at(2 * sample), held_at(2 * sample + 1)
        place = {int(j): k for k, j in enumerate(sample)}
        kv_times: list[float] = []
        kv: list[NDArray[np.int64]] = []
        held = np.zeros(len(labels), dtype=np.int64)

        for k, (peak_batch, last_batch) in enumerate(zip(peak, ends, strict=True)):
            kv_times.append(float(times[k]))
            # In a part of time without a batch the KV stays as the last one has left it.
            kv.append(held if peak_batch < 0 else during[place[peak_batch]])
            if last_batch >= 0:
                held = after[place[last_batch]]
                batch_end = float(self.batch_end[last_batch])
                if batch_end < times[k + 1]:  # idle until the next run
                    kv_times.append(batch_end)
                    kv.append(held)

        kv_times.append(float(times[-1]))
        kv.append(np.zeros(len(labels), dtype=np.int64))
        return np.array(kv_times), np.array(kv).T, labels


def timeline(
    problem: Problem | Instance | str | Path,
    schedule: Schedule,
    *,
    evaluation: Evaluation | None = None,
) -> Timeline:
    """Return the phases of every request and the content of every batch of a schedule.

    Parameters
    ----------
    problem : Problem
        As for `optsched.evaluate`.
    schedule : Schedule
    evaluation : Evaluation, optional

    Examples
    --------
    >>> import optsched
    >>> instance = optsched.Instance([0, 0], [2, 2], [2, 1], kv_capacity=4)
    >>> found = optsched.timeline(instance, optsched.from_starts([0, 2], instance))
    >>> found.span_start.tolist(), found.span_end.tolist()
    ([0.0, 1.0, 0.0, 2.0], [1.0, 2.0, 2.0, 3.0])
    """
    problem = as_problem(problem)
    instance = problem.instance
    from optsched.judge.moves import moves_of
    from optsched.judge.replay import Columns, Origin, replay

    judged = evaluate(problem, schedule) if evaluation is None else evaluation
    check_kind("evaluation", judged, Evaluation, "an optsched.Evaluation")
    first: Any = instance.first_arrival  # all times below count from it, up to the last statement
    begin = judged.clock.batch_start.astype(np.float64)
    end = judged.clock.batch_end.astype(np.float64)
    if schedule.kind == "starts":
        entries = int(instance.output_tokens.sum())
        if entries > MAX_ENTRIES:
            raise InputError(
                f"schedule: found {entries} output tokens; expected at most {MAX_ENTRIES}, since "
                "the timeline expands every round"
            )

        # The judge's batches of starts are intervals (`Clock`). Here every round is a batch.
        schedule = runs_on(instance, check_columns(schedule)[0], np.zeros(instance.n, np.int64))
        assert schedule.start is not None
        begin = (schedule.start - first).astype(np.float64)
        end = begin + 1

    columns = check_columns(schedule)  # batch_offsets first, see `schedule.COLUMNS`
    batches = len(columns[0]) - 1
    worker = schedule.worker if schedule.worker is not None else np.zeros(batches, dtype=np.int64)
    moved = None if judged.moves is None else judged.moves.start.astype(np.float64)
    moves = moves_of(instance, schedule, batches, judged.pools, moved)
    flat_columns = Columns(*columns, begin, worker, schedule.reused, moves)  # type: ignore[call-arg, arg-type]
    mode, machines, workers = schedule.evict_mode, judged.machines, judged.workers
    # The times are those that the judge has derived. They count from the first arrival (origin 0),
    # and no rounding is left to forgive (blur 0).
    origin = Origin(0.0, 0.0)
    *_, recorded = replay(instance, mode, machines, workers, flat_columns, origin, recorded=True)
    events = spans.events_of(columns, recorded.cached)
    changes = spans.changes_of(events, instance)
    found_spans = spans.spans_of(events, judged.clock.release, begin, end, worker)

    def tokens_in(phase: int) -> NDArray[np.int64]:
        """Return the tokens of each batch that are processed in a phase."""
        in_phase = events.phase == phase
        sums = np.bincount(events.batch[in_phase], events.tokens[in_phase], batches)
        return sums.astype(np.int64)

    freed = changes.moment % 2 == 1  # after a batch, see `spans.Changes`
    kv, reuse = recorded.batches["kv"].copy(), recorded.sharing
    change = np.bincount(changes.moment[freed] // 2, changes.kv[freed], batches)
    kv_left = kv + change.astype(np.int64)
    return Timeline(
        instance=instance,
        evaluation=judged,
        span_request=found_spans.request,
        span_phase=found_spans.phase,
        span_start=found_spans.start + first,
        span_end=found_spans.end + first,
        span_tokens=found_spans.tokens,
        span_worker=found_spans.worker,
        batch_start=begin + first,
        batch_end=end + first,
        batch_worker=worker,
        batch_requests=np.diff(columns[0]),
        batch_prefill=tokens_in(spans.PREFILL),
        batch_decode=tokens_in(spans.DECODE),
        batch_refill=tokens_in(spans.REFILL),
        batch_evictions=np.diff(columns[3]),  # of evicted_offsets
        batch_kv=kv,
        batch_kv_left=kv_left if reuse is None else reuse["left"].copy(),
        batch_shared=None if reuse is None else reuse["shared"].copy(),
        batch_retained=None if reuse is None else reuse["retained"].copy(),
        _changes=changes,
    )
