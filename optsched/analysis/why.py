"""Why each request takes as long as it does: what it waits for, batch by batch.

Every latency is cut into parts that sum to it. While a request is in no batch, each batch of its
worker is blamed on the first of these that holds for it; while it is in batches, what they take
beyond the request alone on the machine is theirs.

- ``arrival``: the batch had begun before the request came.
- ``memory``: the KV that it needed did not fit beside what the worker held; and what an eviction
  made it compute again.
- ``seats``: as many requests held KV as may.
- ``batch``: the batch had no tokens left for its prefill; and what its own batches take longer
  because others share them.
- ``order``: it would have fitted, and another was served, or nobody.
- ``alone``: its own work, alone on the machine.

The rules look at one request at a time. Where many wait, each is told what stood in *its* way, so
memory that was given to another in the same batch counts as memory, though an order gave it away.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import alone_ms
from optsched.costs.cost import BatchCost, CostModel
from optsched.files.results import cost_model_reference, head
from optsched.judge.spans import DECODE, EVICTED, PAUSED, PREFILL, REFILL, WAITING
from optsched.judge.timeline import Timeline, timeline
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.markup import html_of_frame
from optsched.problem.schedule import Schedule, check_columns
from optsched.workloads.problem import Problem, as_problem

if TYPE_CHECKING:
    import pandas as pd

CAUSES = ("arrival", "memory", "seats", "batch", "order", "alone")
"""The parts of a latency, in the order of tables."""
_ARRIVAL, _MEMORY, _SEATS, _BATCH, _ORDER, _ALONE = range(len(CAUSES))
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Why:
    """What the requests of a schedule wait for, and what another schedule does otherwise.

    Attributes
    ----------
    instance : Instance
    cost_model : UnitCost or BatchCost
    parts : ndarray of float64, shape (causes, n)
        The part of each cause of `CAUSES` in each latency, in the instance's unit of time.
    against : Why or None
        The same of the schedule that this one is held against.
    """

    instance: Instance
    cost_model: CostModel
    parts: Floats
    against: Why | None = None

    @property
    def latency(self) -> Floats:
        """The latency of each request, shape (n,)."""
        return np.asarray(self.parts.sum(axis=0))

    @property
    def lost(self) -> Floats:
        """The part of each cause less that in the other schedule; without one, the parts."""
        return self.parts if self.against is None else self.parts - self.against.parts

    def totals(self) -> dict[str, float]:
        """Return `lost`, summed over the requests, by cause."""
        return dict(zip(CAUSES, self.lost.sum(axis=1).tolist(), strict=True))

    def ranked(self, count: int) -> list[int]:
        """Return the requests that lose the largest amounts, and with another schedule gain them.

        Parameters
        ----------
        count : int
            How many of each to return at most.
        """
        total = self.lost.sum(axis=0)
        order = np.argsort(-total, kind="stable")
        worst = [int(i) for i in order[:count] if total[i] > 0]
        gained = [int(i) for i in order[::-1][:count] if total[i] < 0]
        return worst + gained[::-1]

    def __repr__(self) -> str:
        return f"<Why on {self.instance.name!r}: {self.totals()}>"

    _repr_html_ = html_of_frame

    def to_frame(self, count: int = 10) -> pd.DataFrame:
        """Return all requests and those of `ranked`, with a column for each cause and a ``total``.

        Parameters
        ----------
        count : int
            As for `ranked`.
        """
        import pandas as pd

        names, lost = self.instance.id or range(self.instance.n), self.lost
        losses = {"all": lost.sum(axis=1)}  # by cause
        losses |= {str(names[i]): lost[:, i] for i in self.ranked(count)}
        rows = [(name, *loss.tolist(), float(loss.sum())) for name, loss in losses.items()]
        return pd.DataFrame(rows, columns=["request", *CAUSES, "total"])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``why --json``."""

        def columns(parts: Floats) -> dict[str, list[float]]:
            return dict(zip(CAUSES, parts.tolist(), strict=True))

        return {
            **head("optsched-why", "why", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "total": self.totals(),
            "requests": columns(self.parts),
            "against": None if self.against is None else columns(self.against.parts),
        }


def why(
    problem: Problem | Instance | str | Path,
    schedule: Schedule,
    *,
    against: Schedule | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    stop: threading.Event | None = None,
) -> Why:
    """Say what each request of a schedule waits for, and what another schedule does otherwise.

    Parameters
    ----------
    problem : Problem
        The instance and its machines. Or an instance in rounds, its file or its name.
    schedule : Schedule
    against : Schedule, optional
        Another schedule of the instance, such as the best known. In neither does KV move.
    max_num_seqs, max_num_batched_tokens : int, optional
        The scheduler's own limits of requests that hold KV and of tokens in a batch, beside the
        instance's. A schedule holds decisions only and does not name them.
    stop : threading.Event, optional
        When it is set before the other schedule's turn, the answer is of this one alone.

    Returns
    -------
    Why
    """
    problem = as_problem(problem)
    check_columns(schedule)
    # Between pools requests wait for a link as well, and no cause of `CAUSES` is that.
    if schedule.moved is not None or problem.pools is not None:
        raise UsageError("why: found KV that moves between pools; expected a schedule without")

    instance, cost = problem.instance, problem.cost_model
    limits = instance.limits
    seats = min(limits.max_running or np.inf, max_num_seqs or np.inf)
    tokens = min(limits.max_batch_tokens or np.inf, max_num_batched_tokens or np.inf)
    parts = _parts(timeline(problem, schedule), cost, seats, tokens)
    other = None
    if against is not None and not (stop is not None and stop.is_set()):
        other = why(problem, against)  # within the instance's limits, since nobody states others

    return Why(instance, cost, parts, other)


def _parts(laid_out: Timeline, cost: CostModel, seats: float, max_tokens: float) -> Floats:
    """Return the parts of every latency, shape (causes, n).

    `seats`: how many requests may hold KV. `max_tokens`: of a batch.
    """
    instance, phase, request = laid_out.instance, laid_out.span_phase, laid_out.span_request
    length = laid_out.span_end - laid_out.span_start
    parts = np.zeros((len(CAUSES), instance.n))

    def total(spans: NDArray[np.bool_]) -> Floats:
        return np.bincount(request[spans], length[spans], instance.n).astype(np.float64)

    # A span is a time in one phase. A refill computes again what an eviction lost, and a request
    # that is paused holds KV and is in no batch.
    parts[_MEMORY] = total(phase == REFILL)
    parts[_ORDER] = total(phase == PAUSED)
    parts[_ALONE] = instance.output_tokens  # in rounds, of which each makes a token
    if isinstance(cost, BatchCost):
        # `alone_ms` is of one layer, and in milliseconds. With ``fixed`` it has the fixed costs of
        # batches, which a request pays that is alone on the machine.
        sizes = instance.prompt_tokens.astype(float), instance.output_tokens.astype(float)
        parts[_ALONE] = cost.layers * alone_ms(cost.array, *sizes, fixed=True) / 1000.0

    in_batches = ~np.isin(phase, (WAITING, EVICTED, PAUSED, REFILL))
    parts[_BATCH] = total(in_batches) - parts[_ALONE]
    _add_waiting(parts, laid_out, seats, max_tokens)
    return parts


def _add_waiting(parts: Floats, laid_out: Timeline, seats: float, max_tokens: float) -> None:
    """Add the spans in which a request waits or is evicted: each batch of its worker to a cause.

    `parts`: of every latency, shape (causes, n), to which is added. `seats`, `max_tokens`: as for
    `_parts`.
    """
    instance, phase = laid_out.instance, laid_out.span_phase
    start, end = laid_out.batch_start, laid_out.batch_end
    tokens = laid_out.batch_prefill + laid_out.batch_decode + laid_out.batch_refill
    batches_of = {w: np.flatnonzero(laid_out.batch_worker == w) for w in range(laid_out.workers)}
    holding = np.zeros(len(start), np.int64)  # by batch, requests of its worker that hold KV
    for w, of_worker in batches_of.items():
        counts = laid_out.phase_counts(start[of_worker], w)
        holding[of_worker] = counts[[PREFILL, DECODE, PAUSED, REFILL]].sum(axis=0)

    for k in np.flatnonzero((phase == WAITING) | (phase == EVICTED)):
        i = laid_out.span_request[k]
        since, until = laid_out.span_start[k], laid_out.span_end[k]
        # Such a span is followed by one of the same request, on the worker that serves it then.
        # Those of its batches count that have some time in common with the span. -1 (none) is as 0.
        batches = batches_of[max(int(laid_out.span_worker[k + 1]), 0)]
        low = np.searchsorted(end[batches], since, "right")
        high = np.searchsorted(start[batches], until, "left")
        batches = batches[low:high]
        spent = np.minimum(end[batches], until) - np.maximum(start[batches], since)

        # An evicted request computes its output so far again, beside its prompt: `span_tokens` are
        # those that it processes in the next span.
        again = int(laid_out.span_tokens[k + 1]) if phase[k] == EVICTED else 0
        size = max(int(instance.prompt_tokens[i]), again)
        needed_kv = instance.kv_of(size)
        # A prefill that may not be split needs tokens for all of it, any other one for its first.
        needed_tokens = size if instance.chunked_prefill is False else 1
        causes = np.select(
            [
                (start[batches] < since) & (phase[k] == WAITING),
                laid_out.batch_kv[batches] + needed_kv > laid_out.evaluation.kv_capacity,
                holding[batches] >= seats,
                max_tokens - tokens[batches] < needed_tokens,
            ],
            [_ARRIVAL, _MEMORY, _SEATS, _BATCH],
            _ORDER,
        )
        shares = np.bincount(causes, spent, len(CAUSES))
        shares[_ORDER] += until - since - spent.sum()  # the worker stood idle
        parts[:, i] += shares
