"""Common parts of the studies of InferMax (Kim et al. 2024): runs on equal requests, ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from optsched import Problem
from optsched.costs.load import load_cost_model
from optsched.experiments.base import Row
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance

from .parts import (
    measured,
    picked,
    quiet,
    select,
)

PAPER = "Kim et al. 2024 (InferMax)"
MODEL = "llama2-7b-a100-infermax-paper"
POWERS = [2**k for k in range(11)]
SCHEDULERS = ["vllm", "sarathi", "sarathi-pc"]
VARIANTS = {"text": "", "vidur": "watermark=0.01,evicted_first=true"}
"""The schedulers by the paper's text, and with two habits of the simulator that it extends."""

METRICS = {
    "makespan_s": "makespan",
    "tps": "tps",
    "mean_ttft_s": "mean_ttft",
    "mean_tpot_s": "mean_tpot",
    "tel_s": "tel",
    "evictions": "evictions",
    "batches": "batches",
    "mean_kv": "mean_kv",
    "peak_kv": "peak_kv",
}
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
SHARED = {
    "schedulers": SCHEDULERS,
    "variants": ["text", "vidur"],
    "kv_capacity": 100_000,
    "cost_model": MODEL,
}


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
    """Return an instance of ``requests`` equal requests that arrive at 0."""
    n = trial["requests"]
    return Instance(
        arrival=np.zeros(n),
        prompt_tokens=np.full(n, trial["prompt"]),
        output_tokens=np.full(n, trial["output"]),
        kv_capacity=trial["kv_capacity"],
        time_unit="second",
        kv_accounting="cached",
    )


@measured
def run_fixed(trial: Row) -> Row:
    """Run one scheduler on equal requests and return its metrics."""
    return run_on(fixed(trial), trial)


def run_on(instance: Instance, trial: Row) -> Row:
    """Run one scheduler on an instance and return its metrics."""
    cost = load_cost_model(trial["cost_model"])
    with quiet():
        schedule = simulate(Problem(instance, cost), spec_of(trial))
        found = evaluate(Problem(instance, cost), schedule)

    assert schedule.batch_offsets is not None  # schedulers make batches
    sizes = np.diff(schedule.batch_offsets)
    length = (found.batch_end - found.batch_start).astype(float)
    mean_running = float((sizes * length).sum() / length.sum())

    return {**picked(found.metrics, METRICS), "mean_running": mean_running}


Pairs = list[tuple[Row, Row]]


def pairs(rows: Sequence[Row], axis: str, first: Any, second: Any, **where: Any) -> Pairs:
    """Return pairs of rows that differ only in one column, which has the first or second value."""
    skip = {"trial", axis, "mean_running", "error", *METRICS}

    def identity(row: Row) -> tuple[Any, ...]:
        return tuple((k, row[k]) for k in sorted(row) if k not in skip)

    chosen = [row for row in select(rows, **where) if row.get("error") is None]
    seconds = {identity(row): row for row in chosen if row[axis] == second}
    firsts = [row for row in chosen if row[axis] == first]
    return [(row, seconds[identity(row)]) for row in firsts if identity(row) in seconds]


def extreme(
    found: Pairs, metric: str, pick: Callable[[Iterable[float]], float] = max
) -> float | None:
    """Return the extreme of a metric's quotient second / first, or None without pairs."""
    values = [
        b[metric] / a[metric] for a, b in found if a.get(metric) and b.get(metric) is not None
    ]
    return float(pick(values)) if values else None


def share(found: Pairs, test: Callable[[Row, Row], bool]) -> str:
    """Return a text that says how many pairs meet a test."""
    return f"{sum(test(*pair) for pair in found)} of {len(found)}"
