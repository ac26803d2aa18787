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
from optsched.judge.spans import EVICTED, PAUSED, REFILL, WAITING
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
        columns = {"all": lost.sum(axis=1)}
        columns |= {str(names[i]): lost[:, i] for i in self.ranked(count)}
        rows = [(name, *c.tolist(), float(c.sum())) for name, c in columns.items()]
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
    if schedule.moved is not None or problem.pools is not None:
        raise UsageError("why: found KV that moves between pools; expected a schedule without")

    instance, cost = problem.instance, problem.cost_model
    limits = instance.limits
    seats = min(limits.max_running or np.inf, max_num_seqs or np.inf)
    tokens = min(limits.max_batch_tokens or np.inf, max_num_batched_tokens or np.inf)
    parts = _parts(timeline(problem, schedule), cost, seats, tokens)
    other = None
    if against is not None and not (stop is not None and stop.is_set()):
        other = why(problem, against)

    return Why(instance, cost, parts, other)


def _parts(found: Timeline, cost: CostModel, seats: float, room: float) -> Floats:
    """Return the parts of every latency."""
    instance, phase, request = found.instance, found.span_phase, found.span_request
    length, n = found.span_end - found.span_start, found.instance.n
    parts = np.zeros((len(CAUSES), n))

    def total(of: NDArray[np.bool_]) -> Floats:
        return np.bincount(request[of], length[of], n).astype(np.float64)

    idle = np.isin(phase, (WAITING, EVICTED, PAUSED))
    parts[_MEMORY] = total(phase == REFILL)
    parts[_ALONE] = instance.output_tokens
    if isinstance(cost, BatchCost):
        sizes = instance.prompt_tokens.astype(float), instance.output_tokens.astype(float)
        parts[_ALONE] = cost.layers * alone_ms(cost.array, *sizes, fixed=True) / 1000.0

    parts[_BATCH] = total(~idle & (phase != REFILL)) - parts[_ALONE]
    parts[_ORDER] = total(phase == PAUSED)
    held = found.phase_counts(found.batch_start)[[1, 2, PAUSED, REFILL]].sum(axis=0)
    taken = found.batch_prefill + found.batch_decode + found.batch_refill
    workers = {w: np.flatnonzero(found.batch_worker == w) for w in range(found.workers)}
    split = instance.chunked_prefill is not False
    capacity = found.evaluation.kv_capacity

    for k in np.flatnonzero((phase == WAITING) | (phase == EVICTED)):
        i, begin, end = request[k], found.span_start[k], found.span_end[k]
        mine = workers[max(int(found.span_worker[k + 1]), 0)]  # the one that serves it then
        low = np.searchsorted(found.batch_end[mine], begin, "right")
        high = np.searchsorted(found.batch_start[mine], end, "left")
        mine = mine[low:high]
        spent = np.minimum(found.batch_end[mine], end) - np.maximum(found.batch_start[mine], begin)
        anew = int(found.span_tokens[k + 1]) if phase[k] == EVICTED else 0
        size = max(int(instance.prompt_tokens[i]), anew)
        need = instance.kv_of(size)
        causes = np.select(
            [
                (found.batch_start[mine] < begin) & (phase[k] == WAITING),
                found.batch_kv[mine] + need > capacity,
                held[mine] >= seats,
                room - taken[mine] < (1 if split else size),
            ],
            [_ARRIVAL, _MEMORY, _SEATS, _BATCH],
            _ORDER,
        )
        shares = np.bincount(causes, spent, len(CAUSES))
        shares[_ORDER] += end - begin - spent.sum()  # the worker stood idle
        parts[:, i] += shares

    return parts
