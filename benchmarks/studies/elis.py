"""ELIS (Choi et al. 2025): job completion times, and peak throughput by number of workers.

LMSYS-Chat-1M and batch times of the paper's models are not at hand. Requests have the published
statistics of its lengths instead. A cost model is stretched in time to the published average
latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.experiments.base import Claim, Experiment, Row
from optsched.problem.instance import Instance
from optsched.problem.streams import Seed
from optsched.workloads.generate import generate

from .drawing import Figure
from .parts import (
    Count,
    claim,
    distinct,
    judged,
    mean,
    measured,
    over,
    picked,
    quiet,
    sweep,
)
from .rates import alone_latency, at_rate, full_rate, peak_rate

PAPER = "Choi et al. 2025 (ELIS)"
LATENCY_S = {
    "opt-6.7b": 1.3155,
    "opt-13b": 2.6432,
    "vicuna-13b": 2.9649,
    "llama2-7b": 6.5222,
    "llama2-13b": 8.6102,
}
"""Average latency of one request in seconds, by model (Table 4)."""

TABLE_5 = {
    "opt-13b": ((77.83, 73.57, 20.35), (116.46, 98.74, 43.63), (118.13, 118.11, 43.63)),
    "opt-6.7b": ((45.08, 50.52, 13.21), (83.42, 72.33, 24.62), (73.93, 74.41, 31.91)),
    "vicuna-13b": ((93.42, 73.43, 32.34), (134.96, 118.22, 58.39), (144.23, 131.38, 60.98)),
    "llama2-13b": ((240.25, 212.60, 70.55), (350.55, 352.53, 133.11), (451.59, 377.29, 125.59)),
    "llama2-7b": ((91.28, 130.71, 37.02), (229.64, 200.34, 59.37), (251.66, 234.08, 89.64)),
}
"""Mean JCT of FCFS, ISRTF and SJF in seconds, at 1x, 3x and 5x load and batch size 4 (Table 5)."""

POLICIES = ["elis-fcfs", "isrtf", "elis-sjf"]
LOADS = [1.0, 3.0, 5.0]
KV_CAPACITY = 100_000
METRICS = {
    "jct_s": "mean_latency",
    "queuing_s": "mean_queuing_delay",
    "waiting_s": "mean_waiting",
    "p99_s": "p99_latency",
}


def stretched(cost: BatchCost, latency_s: float) -> BatchCost:
    """Return a cost model in which all times are longer or shorter by one factor.

    `latency_s`: the mean latency in seconds that requests with the published statistics of lengths
    shall have when they are alone.
    """
    factor = latency_s / _mean_alone(cost)
    coefficients = {k: repr(float(text) * factor) for k, text in cost.coefficients.items()}
    return BatchCost(f"{cost.name}-x{factor:.4g}", cost.layers, coefficients)


@cache
def _mean_alone(cost: BatchCost) -> float:
    return float(alone_latency(_requests(20_000, 2.0, 0), cost).mean())


def _requests(n: int, cv: float, seed: Seed) -> Instance:
    return generate("lognormal", seed=seed, n=n, arrivals="gamma", cv=cv, kv_capacity=KV_CAPACITY)


def _spec(trial: Row) -> str:
    """Return the policy's specification with the trial's parameters added to its own."""
    policy: str = trial["policy"]
    joint = "," if ":" in policy else ":"
    return f"{policy}{joint}window={trial['window']},batch_size={trial['batch_size']}"


def _told(trial: Row) -> str | None:
    """Return the predictor, or None: the paper's baselines need none, or know true lengths."""
    return str(trial["predictor"]) if trial["policy"].startswith("isrtf") else None


# --- job completion times -------------------------------------------------------------------------


@measured
def run_jct(trial: Row) -> Row:
    """Run one policy and return its delays."""
    cost = stretched(load_cost_model(trial["cost_model"]), LATENCY_S[trial["model"]])
    # All policies, loads and batch sizes serve the same requests; each model has its own.
    place = list(LATENCY_S).index(trial["model"])
    seed = [trial["seed"], trial["draw"], place]
    instance = _requests(trial["requests"], trial["cv"], seed)
    rate = trial["load"] * full_rate(_requests(20_000, 2.0, 0), trial["batch_size"], cost)
    instance = at_rate(instance, rate)
    found = judged(instance, _spec(trial), cost, seed=trial["draw"], predictor=_told(trial))

    return {
        "rate": rate,
        **picked(found.metrics, METRICS),
        "most_s": float(found.latency.max()),
        **picked(found.metrics, {"makespan_s": "makespan", "evictions": "evictions"}),
    }


def summarize_jct(rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's numbers with ours: first the ratios to FCFS, then Table 5."""

    def gain(column: str, policy: str, **where: object) -> float | None:
        one, base = (mean(rows, column, policy=p, **where) for p in (policy, "elis-fcfs"))
        return over(one, base)

    claims = []
    for place, policy in ((1, "isrtf"), (2, "elis-sjf")):
        paper = [row[place] / row[0] for table in TABLE_5.values() for row in table]
        ours = [
            gain("jct_s", policy, model=model, load=load, batch_size=4)
            for model in TABLE_5
            for load in LOADS
        ]
        known = [value for value in ours if value is not None]
        mean_ratio = float(np.mean(known)) if known else None
        what = f"{policy} over FCFS, JCT, mean of all models and loads"
        claims.append(claim(what, round(float(np.mean(paper)), 4), mean_ratio, show=4))
        least = min(known, default=None)
        what = f"{policy} over FCFS, JCT, least"
        claims.append(claim(what, round(min(paper), 4), least, show=4))

    queuing = gain("queuing_s", "isrtf", model="llama2-13b", load=5.0, batch_size=4)
    alone = gain("jct_s", "isrtf", load=1.0, batch_size=1)
    what = "isrtf over FCFS, queuing delay, llama2-13b at 5x"
    claims.append(claim(what, round(1 - 0.1675, 4), queuing, show=4))
    what = "isrtf over FCFS, JCT, batch size 1 at 1x"
    claims.append(claim(what, round(1 - 0.1958, 4), alone, show=4))

    for model, table in TABLE_5.items():
        for load, published in zip(LOADS, table, strict=True):
            for policy, paper_s in zip(POLICIES, published, strict=True):
                ours_s = mean(rows, "jct_s", model=model, load=load, policy=policy, batch_size=4)
                what = f"JCT of {policy}, {model} at {load:g}x, s"
                claims.append(claim(what, paper_s, ours_s, show=4))

    return claims


COMMON_COLUMNS = {
    "policy": "policy specification",
    "draw": "which draw of the requests",
    "requests": "requests in each draw",
    "batch_size": "max number of requests in a batch",
    "window": "K, tokens",
    "cv": "coefficient of variation of the gaps between arrivals (Gamma)",
    "predictor": "the predictor of isrtf; the other policies need none, or know true lengths",
    "cost_model": "the cost model before it is stretched",
    "error": "why there is no result",
}
_NAMES = {"elis-fcfs": "FCFS", "isrtf": "ISRTF", "elis-sjf": "SJF, oracle"}

JCT = Experiment(
    name="elis-jct",
    summary="job completion times of FCFS, ISRTF and SJF by load and batch size",
    paper=f"{PAPER}, sections 6.2 and 6.3 (Figures 5 and 6, Table 5)",
    parameters={
        "models": list(LATENCY_S),
        "batch_size": [1, 2, 4],
        "load": LOADS,
        "draws": 10,
        "policies": POLICIES,
        "predictor": "elis",
        "requests": 200,
        "cv": 2.0,
        "window": 50,
        "cost_model": "llama2-7b-a100-infermax",
    },
    trials=sweep(
        model="models",
        batch_size="batch_size",
        load="load",
        draw=Count("draws"),
        policy="policies",
        predictor="predictor",
        requests="requests",
        cv="cv",
        window="window",
        cost_model="cost_model",
        seed="seed",
        known={"models": LATENCY_S},
    ),
    run=run_jct,
    summarize=summarize_jct,
    columns={
        **COMMON_COLUMNS,
        "model": "the model to whose average latency the cost model is stretched",
        "load": "request rate in multiples of batch size / average latency",
        "rate": "requests per second",
        "jct_s": "mean time from arrival to completion, s",
        "queuing_s": "mean time from arrival to the first batch, s",
        "waiting_s": "mean time outside of batches, s",
        "p99_s": "99th percentile of the time from arrival to completion, s",
        "most_s": "largest time from arrival to completion, s",
        "makespan_s": "last completion, s",
        "evictions": "number of evictions",
    },
    figures=[
        Figure(
            "jct",
            "load",
            "jct_s",
            series="policy",
            panel="model",
            where={"batch_size": 4},
            labels=_NAMES,
            title="batch size 4",
            x_label="load",
            y_label="mean JCT [s]",
        ),
        Figure(
            "batch-sizes",
            "load",
            "jct_s",
            series="policy",
            panel="batch_size",
            over="elis-fcfs",
            labels=_NAMES,
            title="all models",
            x_label="load",
            y_label="mean JCT over FCFS's",
        ),
    ],
)


# --- peak throughput ------------------------------------------------------------------------------

PEAKS = {10: 2.31, 50: 18.77}
"""Peak throughput in requests per second, by number of workers (section 6.4, on H100)."""


@measured
def run_scaling(trial: Row) -> Row:
    """Return the peak throughput for one draw of requests."""
    cost = stretched(load_cost_model(trial["cost_model"]), trial["latency_s"])
    seed = [trial["seed"], trial["draw"], trial["workers"]]
    instance = _requests(trial["requests"], trial["cv"], seed)

    with quiet():
        found = peak_rate(
            f"{_spec(trial)},workers={trial['workers']}",
            instance,
            cost,
            max_delay_s=trial["max_delay_s"],
            predictor=_told(trial),
            seed=trial["draw"],
        )

    full = full_rate(_requests(20_000, 2.0, 0), trial["batch_size"], cost)
    return {
        "peak": found.rate,
        "peak_per_worker": found.rate / trial["workers"],
        "load": found.rate / (full * trial["workers"]),
        "delay_s": float(found.delay[0]),
    }


def summarize_scaling(rows: Sequence[Row]) -> list[Claim]:
    """Return the peaks, and how near they are to growth in proportion to the workers."""
    by_workers = sorted(set(distinct(rows, "workers")))
    peaks = {w: mean(rows, "peak", workers=w, policy="isrtf") for w in {*by_workers, *PEAKS}}
    claims = [
        claim(f"peak with {workers} workers, requests/s", paper, peaks[workers], show=3)
        for workers, paper in PEAKS.items()
    ]
    growth = over(peaks[50], peaks[10])
    what = "growth of the peak from 10 to 50 workers, over 5"
    ours = None if growth is None else growth / 5
    claims.append(claim(what, 18.77 / 2.31 / 5, ours, show=3))
    known = [peaks[w] for w in by_workers]

    if len(by_workers) > 2 and None not in known:
        fit = float(np.corrcoef(by_workers, np.array(known, dtype=float))[0, 1] ** 2)
        claims.append(claim("R2 of peaks on workers", "near-linear", fit, lambda v: v >= 0.99, 4))

    return claims


SCALING = Experiment(
    name="elis-scaling",
    summary="largest request rate with a mean queuing delay of 0.5 s, from 10 to 50 workers",
    paper=f"{PAPER}, section 6.4 (Figure 7)",
    parameters={
        "policies": ["isrtf"],
        "workers": [10, 20, 30, 40, 50],
        "draws": 5,
        "requests_per_worker": 100,
        "batch_size": 4,
        "window": 50,
        "max_delay_s": 0.5,
        "cv": 2.0,
        "predictor": "elis",
        "latency_s": LATENCY_S["llama2-13b"],
        "cost_model": "llama2-7b-a100-infermax",
    },
    trials=sweep(
        policy="policies",
        workers="workers",
        draw=Count("draws"),
        requests=lambda row, parameters: parameters["requests_per_worker"] * row["workers"],
        batch_size="batch_size",
        window="window",
        max_delay_s="max_delay_s",
        cv="cv",
        predictor="predictor",
        latency_s="latency_s",
        cost_model="cost_model",
        seed="seed",
    ),
    run=run_scaling,
    summarize=summarize_scaling,
    columns={
        **COMMON_COLUMNS,
        "workers": "machines behind the least-loaded balancer",
        "max_delay_s": "limit of the mean queuing delay, s",
        "latency_s": "average latency of one request to which the cost model is stretched, s",
        "peak": "largest rate within the limit, requests/s",
        "peak_per_worker": "peak over the number of workers, requests/s",
        "load": "peak per worker in multiples of batch size / average latency",
        "delay_s": "mean queuing delay at the peak, s",
    },
    figures=[
        Figure(
            "peak",
            "workers",
            "peak",
            series="policy",
            labels=_NAMES,
            x_label="workers",
            y_label="peak throughput [requests/s]",
        ),
    ],
)
