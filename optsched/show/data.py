"""The data of figures as plain columns, for matplotlib's and plotly's figures alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from optsched.judge.evaluate import Evaluation
    from optsched.judge.timeline import Timeline

Floats = NDArray[np.float64]

DISTRIBUTIONS = {"latency": "latency", "ttft": "time to first token", "tpot": "time per token"}
"""The columns of an Evaluation whose distributions are drawn, and words for them."""

IDLE = ("waiting", "paused", "evicted")
"""The phases in which a request is in no batch. They are drawn thinner."""


class CapacityCurves(NamedTuple):
    """What is drawn of a capacity file: attainment against rates, or numbers of workers.

    ``policies`` has points by policy, ``bound`` the shares that no schedule exceeds. ``rates`` says
    what lies along the ``axis``, which ``what`` says in a word.
    """

    rates: bool
    policies: dict[str, list[tuple[float, float]]]
    bound: list[tuple[float, float]]
    attainment: float
    impossible: float | None

    @property
    def what(self) -> str:
        """What lies along the axis, in a word or two."""
        return "rate scale" if self.rates else "workers"

    @property
    def axis(self) -> str:
        """The words under the axis."""
        return "rate, as a multiple of the instance's" if self.rates else "workers"


def capacity_of(data: Mapping[str, Any]) -> CapacityCurves:
    """Return what is drawn of a capacity file. Points that are no pairs of numbers are left out.

    The bound ends a little beyond the largest rate of a policy or the impossible one: where nothing
    is proved impossible, the search for it has tried rates up to a million. A bound that is 1
    everywhere says nothing, and is left out.
    """

    def points(given: object) -> list[tuple[float, float]]:
        rows = given if isinstance(given, list) else []
        pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
        numbers = (int, float)
        return sorted(
            (float(at), float(share)) for at, share in pairs
            if isinstance(at, numbers) and isinstance(share, numbers) and math.isfinite(at + share)
        )  # fmt: skip

    rates = data.get("searched") != "workers"
    workers = data.get("workers") or {}
    policies = {str(row["policy"]): points(row.get("points")) for row in data["policies"]}
    bound = points(data.get("bound_points"))
    impossible = data.get("impossible_rate_scale") if rates else workers.get("impossible")
    tried = [at for reached in policies.values() for at, _ in reached]

    if rates and tried:
        edge = 1.3 * max(*tried, impossible or 0.0)
        shown = [point for point in bound if point[0] <= edge]
        if shown and len(shown) < len(bound):
            bound = [*shown, (edge, shown[-1][1])]  # shares fall with the rate

    if all(share >= 1 for _, share in bound):
        bound = []

    return CapacityCurves(rates, policies, bound, data["attainment"], impossible)


def thinned(n: int, most: int) -> list[int]:
    """Return at most ``most`` of the indices 0..n-1, evenly spread and with both ends."""
    if n <= most:
        return list(range(n))

    return sorted({round(k * (n - 1) / (most - 1)) for k in range(most)})


def distribution(evaluation: Evaluation, metric: str) -> tuple[Floats, str]:
    """Return the sorted values of a metric over the requests that have it, and their unit."""
    scale, unit = 1, "rounds" if evaluation.instance.in_rounds else "s"
    if metric == "tpot":
        scale, unit = (1, "rounds/token") if unit == "rounds" else (1000, "ms/token")

    values = np.sort(np.asarray(getattr(evaluation, metric), dtype=np.float64))
    return values[~np.isnan(values)] * scale, unit


def cumulative(values: Floats, most: int) -> tuple[Floats, Floats]:
    """Return values and shares of the cumulative distribution of sorted values, from 0 to 1."""
    picked = thinned(len(values), most)
    share = (np.array(picked) + 1) / len(values)
    return np.append(values[:1], values[picked]), np.append(0.0, share)


def wide(columns: Iterable[Floats]) -> bool:
    """Return whether the positive values span too wide a range for a linear axis."""
    positive = [values[values > 0] for values in columns]
    ends = [(values.min(), values.max()) for values in positive if values.size]
    return bool(ends) and max(high for _, high in ends) / min(low for low, _ in ends) > 300


def rows_by_arrival(timeline: Timeline) -> NDArray[np.int64]:
    """Return each request's place in the order of arrivals, shape (n,)."""
    row = np.empty(timeline.instance.n, dtype=np.int64)
    row[timeline.by_arrival] = np.arange(timeline.instance.n)
    return row


def kv_by_worker(
    timeline: Timeline, most_workers: int, groups: int, steps: int
) -> list[tuple[str, Floats, NDArray[np.int64]]]:
    """Return ``(label, times, tokens)`` of the KV that each worker holds over time."""
    found = []
    for worker in range(min(timeline.workers, most_workers)):
        times, kv, _ = timeline.kv_by_group(groups, steps, worker)
        found.append((f"worker {worker}", times, kv.sum(axis=0)))

    return found


def batch_tokens(
    timeline: Timeline, most: int, worker: int = 0
) -> tuple[Floats, dict[str, list[float]], str]:
    """Return times, the mean tokens of a batch by phase from each time on, and words for these."""
    edges, runs = timeline.batch_bins(most, worker)
    means = {}
    for name in ("decode", "prefill", "refill"):
        column = getattr(timeline, f"batch_{name}")
        if column.any():
            mean = [float(column[run].mean()) if len(run) else 0.0 for run in runs]
            means[name] = [*mean, *mean[-1:]]

    single = all(len(run) == 1 for run in runs)
    return edges, means, "tokens per batch" if single else "mean tokens per batch"
