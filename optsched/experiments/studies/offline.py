"""What InferMax's experiments share: all requests at 0, one scheduler, its metrics and ratios."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from optsched.costs.cost import load_cost_model
from optsched.experiments import Claim, Row
from optsched.experiments.base import measured
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance

MODEL = "llama2-7b-a100-infermax-paper"
POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
SCHEDULERS = ["vllm", "sarathi", "sarathi-pc"]
VARIANTS = {"text": "", "vidur": "watermark=0.01,evicted_first=true"}
"""Schedulers as the paper's text has them, and with the two habits of the simulator it extends."""

COLUMNS = {
    "scheduler": "policy of Table 1",
    "variant": "text: as the paper's text; vidur: watermark of 1 % and evicted requests first",
    "eviction_free": "whether admission reserves I + O - 1",
    "requests": "B",
    "prompt": "I, tokens",
    "output": "O, tokens",
    "kv_capacity": "M, tokens",
    "max_running": "R_max, empty: unlimited",
    "makespan_s": "latency of all requests",
    "tps": "output tokens per second",
    "mean_ttft_s": "mean time to first token",
    "mean_tpot_s": "mean time per output token",
    "tel_s": "sum of the requests' latencies",
    "evictions": "number of evictions",
    "batches": "number of batches",
    "mean_kv": "mean KV held, tokens, weighted by time",
    "peak_kv": "largest KV held, tokens",
    "mean_running": "mean requests in a batch, weighted by time",
    "error": "why there is no schedule",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the judge's warning: leaving the profiles' range is the point of some sweeps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def spec_of(trial: Row) -> str:
    """Return the policy specification of a trial."""
    name, _, own = trial["scheduler"].partition(":")
    options = [own, VARIANTS[trial.get("variant", "text")]]
    if trial.get("eviction_free"):
        options = [own, "eviction_free=true"]
    if trial.get("max_running") is not None:
        options.append(f"max_running={trial['max_running']}")
    tail = ",".join(filter(None, options))
    return f"{name}:{tail}" if tail else name


def fixed(trial: Row) -> Instance:
    """Return ``requests`` equal requests at 0."""
    n = trial["requests"]
    return Instance(
        arrival=np.zeros(n),
        prompt_tokens=np.full(n, trial["prompt"]),
        output_tokens=np.full(n, trial["output"]),
        kv_capacity=trial["kv_capacity"],
        time_unit="second",
        kv_accounting="cached",
    )


def run_fixed(trial: Row) -> Row:
    """Run one scheduler over equal requests."""
    return measured(lambda: run_on(fixed(trial), trial))


def run_on(instance: Instance, trial: Row) -> Row:
    """Run one scheduler over an instance and return its metrics."""
    cost = load_cost_model(trial["cost_model"])
    with quiet():
        schedule = simulate(instance, spec_of(trial), cost)
        judged = evaluate(instance, schedule, cost)
    metrics = judged.metrics
    assert schedule.batch_offsets is not None  # schedulers make batches
    sizes = np.diff(schedule.batch_offsets)
    length = (judged.batch_end - judged.batch_start).astype(float)
    return {
        "makespan_s": metrics["makespan"],
        "tps": metrics["tps"],
        "mean_ttft_s": metrics["mean_ttft"],
        "mean_tpot_s": metrics.get("mean_tpot"),
        "tel_s": metrics["tel"],
        "evictions": metrics["evictions"],
        "batches": metrics["batches"],
        "mean_kv": metrics["mean_kv"],
        "peak_kv": metrics["peak_kv"],
        "mean_running": float((sizes * length).sum() / length.sum()),
    }


def grid(**axes: Iterable[Any]) -> Iterator[Row]:
    """Yield every combination, the last axis fastest."""
    names = list(axes)

    def walk(k: int, row: Row) -> Iterator[Row]:
        if k == len(names):
            yield dict(row)
            return
        for value in axes[names[k]]:
            yield from walk(k + 1, {**row, names[k]: value})

    yield from walk(0, {})


def pairs(
    rows: Sequence[Row], axis: str, first: Any, second: Any, **where: Any
) -> list[tuple[Row, Row]]:
    """Return pairs of rows that differ in one axis only: first and second value."""
    skip = {"trial", axis, *COLUMNS_OF_RESULTS}
    chosen = [
        row
        for row in rows
        if row.get("error") is None and all(row.get(k) == v for k, v in where.items())
    ]

    def identity(row: Row) -> tuple[Any, ...]:
        return tuple((k, row[k]) for k in sorted(row) if k not in skip)

    seconds = {identity(row): row for row in chosen if row[axis] == second}
    return [
        (row, seconds[identity(row)])
        for row in chosen
        if row[axis] == first and identity(row) in seconds
    ]


COLUMNS_OF_RESULTS = {
    "makespan_s", "tps", "mean_ttft_s", "mean_tpot_s", "tel_s", "evictions", "batches", "mean_kv",
    "peak_kv", "mean_running", "error",
}  # fmt: skip


def extreme(
    found: Sequence[tuple[Row, Row]],
    metric: str,
    pick: Callable[[Iterable[float]], float] = max,
) -> float | None:
    """Return the extreme of second / first in a metric, None without pairs."""
    values = [
        b[metric] / a[metric]
        for a, b in found
        if a.get(metric) and b.get(metric) is not None
    ]  # fmt: skip
    return float(pick(values)) if values else None


def worst_case(what: str, paper: float, found: Sequence[tuple[Row, Row]], metric: str) -> Claim:
    """Return a claim "up to": the largest of second / first."""
    return Claim(what, paper, extreme(found, metric))


def share(found: Sequence[Any], test: Callable[[Any], bool]) -> str:
    """Return in words how many rows or pairs meet a test."""
    return f"{sum(map(test, found))} of {len(found)}"
