"""ELIS (004): job completion times of FCFS, ISRTF and SJF, and peak throughput over workers.

LMSYS-Chat-1M and batch times of the paper's models are not at hand: requests have the published
statistics of its lengths, and a cost model is stretched in time to the published average latency.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from optsched.analysis.rates import alone_latency, at_rate, full_rate, peak_rate
from optsched.costs.cost import BatchCost, load_cost_model
from optsched.experiments.base import Claim, Experiment, Figure, Row, check_known, measured
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate

LATENCY_S = {
    "opt-6.7b": 1.3155, "opt-13b": 2.6432, "vicuna-13b": 2.9649,
    "llama2-7b": 6.5222, "llama2-13b": 8.6102,
}  # fmt: skip
"""Average latency of one request (004, Table 4)."""

TABLE_5 = {
    "opt-13b": ((77.83, 73.57, 20.35), (116.46, 98.74, 43.63), (118.13, 118.11, 43.63)),
    "opt-6.7b": ((45.08, 50.52, 13.21), (83.42, 72.33, 24.62), (73.93, 74.41, 31.91)),
    "vicuna-13b": ((93.42, 73.43, 32.34), (134.96, 118.22, 58.39), (144.23, 131.38, 60.98)),
    "llama2-13b": ((240.25, 212.60, 70.55), (350.55, 352.53, 133.11), (451.59, 377.29, 125.59)),
    "llama2-7b": ((91.28, 130.71, 37.02), (229.64, 200.34, 59.37), (251.66, 234.08, 89.64)),
}
"""Mean JCT of FCFS, ISRTF and SJF at 1x, 3x and 5x load, batch size 4 (004, Table 5), seconds."""

POLICIES = ["elis-fcfs", "isrtf", "elis-sjf"]
LOADS = [1.0, 3.0, 5.0]
KV_CAPACITY = 100_000


def stretched(cost: BatchCost, latency_s: float) -> BatchCost:
    """Return a cost model in which all times are longer or shorter by one factor.

    Parameters
    ----------
    cost : BatchCost
    latency_s : float
        Mean latency, alone, of a request with the published statistics of lengths.
    """
    factor = latency_s / _mean_alone(cost)
    coefficients = {k: repr(float(text) * factor) for k, text in cost.coefficients.items()}
    return BatchCost(f"{cost.name}-x{factor:.4g}", cost.layers, coefficients)


@cache
def _mean_alone(cost: BatchCost) -> float:
    return float(alone_latency(_requests(20_000, 2.0, 0), cost).mean())


def _requests(n: int, cv: float, seed: int | np.random.Generator) -> Instance:
    return generate(
        "lognormal", seed=seed, n=n, arrivals="gamma", cv=cv, kv_capacity=KV_CAPACITY
    )  # fmt: skip


def _spec(trial: Row) -> str:
    """Return the policy, which may carry parameters of its own, with the trial's."""
    policy: str = trial["policy"]
    joint = "," if ":" in policy else ":"
    return f"{policy}{joint}window={trial['window']},batch_size={trial['batch_size']}"


def _told(trial: Row) -> str | None:
    """Return the predictor: the paper's baselines need nothing, or know the truth."""
    return str(trial["predictor"]) if trial["policy"].startswith("isrtf") else None


def jct_trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per model, batch size, load, draw and policy."""
    check_known("models", parameters["models"], LATENCY_S)
    for model in parameters["models"]:
        for batch_size in parameters["batch_size"]:
            for load in parameters["load"]:
                for draw in range(parameters["draws"]):
                    for policy in parameters["policies"]:
                        yield {
                            "model": model, "batch_size": batch_size, "load": load, "draw": draw,
                            "policy": policy, "predictor": parameters["predictor"],
                            "requests": parameters["requests"], "cv": parameters["cv"],
                            "window": parameters["window"],
                            "cost_model": parameters["cost_model"], "seed": seed,
                        }  # fmt: skip


def run_jct(trial: Row) -> Row:
    """Return the delays of one run of one policy."""
    return measured(lambda: _run_jct(trial))


def _run_jct(trial: Row) -> Row:
    cost = stretched(load_cost_model(trial["cost_model"]), LATENCY_S[trial["model"]])
    # All policies, loads and batch sizes serve the same requests; each model has its own.
    place = list(LATENCY_S).index(trial["model"])
    rng = np.random.default_rng([trial["seed"], trial["draw"], place])
    instance = _requests(trial["requests"], trial["cv"], rng)
    rate = trial["load"] * full_rate(_requests(20_000, 2.0, 0), trial["batch_size"], cost)
    instance = at_rate(instance, rate)
    schedule = simulate(instance, _spec(trial), cost, seed=trial["draw"], predictor=_told(trial))
    judged = evaluate(instance, schedule, cost)
    return {
        "rate": rate,
        "jct_s": judged.metrics["mean_latency"],
        "queuing_s": judged.metrics["mean_queuing_delay"],
        "waiting_s": judged.metrics["mean_waiting"],
        "p99_s": judged.metrics["p99_latency"],
        "most_s": float(judged.latency.max()),
        "makespan_s": judged.metrics["makespan"],
        "evictions": judged.metrics["evictions"],
    }


def mean(rows: Sequence[Row], column: str, **where: Any) -> float | None:
    """Return the mean of a column over the trials that fit, None without any."""
    found = [
        float(row[column])
        for row in rows
        if row.get(column) is not None and all(row[k] == v for k, v in where.items())
    ]
    return float(np.mean(found)) if found else None


def _over(rows: Sequence[Row], column: str, policy: str, **where: Any) -> float | None:
    one = mean(rows, column, policy=policy, **where)
    base = mean(rows, column, policy="elis-fcfs", **where)
    return None if one is None or not base else one / base


def summarize_jct(rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's figures beside ours: ratios to FCFS, then Table 5."""
    claims = []

    def claim(what: str, paper: float, ours: float | None) -> None:
        claims.append(Claim(what, round(paper, 4), None if ours is None else round(ours, 4)))

    for place, policy in ((1, "isrtf"), (2, "elis-sjf")):
        paper = [row[place] / row[0] for table in TABLE_5.values() for row in table]
        ours = [
            _over(rows, "jct_s", policy, model=model, load=load, batch_size=4)
            for model in TABLE_5
            for load in LOADS
        ]
        known = [value for value in ours if value is not None]
        mean_ratio = float(np.mean(known)) if known else None
        average = float(np.mean(paper))
        claim(f"{policy} over FCFS, JCT, mean of all models and loads", average, mean_ratio)
        claim(f"{policy} over FCFS, JCT, least", min(paper), min(known, default=None))
    gain = _over(rows, "queuing_s", "isrtf", model="llama2-13b", load=5.0, batch_size=4)
    claim("isrtf over FCFS, queuing delay, llama2-13b at 5x", 1 - 0.1675, gain)
    gain = _over(rows, "jct_s", "isrtf", load=1.0, batch_size=1)
    claim("isrtf over FCFS, JCT, batch size 1 at 1x", 1 - 0.1958, gain)
    for model, table in TABLE_5.items():
        for load, published in zip(LOADS, table, strict=True):
            for policy, paper_s in zip(POLICIES, published, strict=True):
                ours_s = mean(rows, "jct_s", model=model, load=load, policy=policy, batch_size=4)
                claim(f"JCT of {policy}, {model} at {load:g}x, s", paper_s, ours_s)
    return claims


_NAMES = {"elis-fcfs": "FCFS", "isrtf": "ISRTF", "elis-sjf": "SJF, oracle"}

JCT = Experiment(
    name="elis-jct",
    summary="job completion times of FCFS, ISRTF and SJF by load and batch size",
    paper="004, sections 6.2 and 6.3 (Figures 5 and 6, Table 5)",
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
    trials=jct_trials,
    run=run_jct,
    summarize=summarize_jct,
    columns={
        "model": "whose average latency the cost model is stretched to",
        "batch_size": "most requests of a batch",
        "load": "request rate, in multiples of batch size / average latency",
        "draw": "which draw of the requests",
        "policy": "specification",
        "predictor": "what isrtf is told; the other two need nothing or the truth",
        "requests": "per draw",
        "cv": "coefficient of variation of the gaps between arrivals (Gamma)",
        "window": "K, tokens",
        "cost_model": "before it is stretched",
        "rate": "requests per second",
        "jct_s": "mean time from arrival to completion, s",
        "queuing_s": "mean time from arrival to the first batch, s",
        "waiting_s": "mean time in no batch, s",
        "p99_s": "99th percentile of the time from arrival to completion, s",
        "most_s": "largest time from arrival to completion, s",
        "makespan_s": "last completion, s",
        "evictions": "requests that lost their KV",
        "error": "why there is no schedule",
    },
    figures=[
        Figure(
            "jct", "load", "jct_s", series="policy", panel="model", where={"batch_size": 4},
            labels=_NAMES, title="batch size 4", x_label="load", y_label="mean JCT [s]",
        ),
        Figure(
            "batch-sizes", "load", "jct_s", series="policy", panel="batch_size", over="elis-fcfs",
            labels=_NAMES, title="all models", x_label="load", y_label="mean JCT over FCFS's",
        ),
    ],
)  # fmt: skip


PEAKS = {10: 2.31, 50: 18.77}
"""Peak throughput by number of workers, requests per second (004, section 6.4, on H100)."""


def scaling_trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per policy, number of workers and draw."""
    for policy in parameters["policies"]:
        for workers in parameters["workers"]:
            for draw in range(parameters["draws"]):
                yield {
                    "policy": policy, "workers": workers, "draw": draw,
                    "requests": parameters["requests_per_worker"] * workers,
                    "batch_size": parameters["batch_size"], "window": parameters["window"],
                    "max_delay_s": parameters["max_delay_s"], "cv": parameters["cv"],
                    "predictor": parameters["predictor"], "latency_s": parameters["latency_s"],
                    "cost_model": parameters["cost_model"], "seed": seed,
                }  # fmt: skip


def run_scaling(trial: Row) -> Row:
    """Return the peak throughput of one draw."""
    return measured(lambda: _run_scaling(trial))


def _run_scaling(trial: Row) -> Row:
    cost = stretched(load_cost_model(trial["cost_model"]), trial["latency_s"])
    rng = np.random.default_rng([trial["seed"], trial["draw"], trial["workers"]])
    instance = _requests(trial["requests"], trial["cv"], rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches beyond the profiles' range
        found = peak_rate(
            f"{_spec(trial)},workers={trial['workers']}", instance, cost,
            max_delay_s=trial["max_delay_s"], predictor=_told(trial), seed=trial["draw"],
        )  # fmt: skip
    full = full_rate(_requests(20_000, 2.0, 0), trial["batch_size"], cost)
    return {
        "peak": found.rate,
        "peak_per_worker": found.rate / trial["workers"],
        "load": found.rate / (full * trial["workers"]),
        "delay_s": float(found.delay[0]),
    }


def summarize_scaling(rows: Sequence[Row]) -> list[Claim]:
    """Return the peaks, and how far they are from a line through the origin."""
    claims = []
    ours = {w: mean(rows, "peak", workers=w, policy="isrtf") for w in PEAKS}
    for workers, paper in PEAKS.items():
        value = ours[workers]
        claims.append(
            Claim(
                f"peak with {workers} workers, requests/s",
                paper,
                None if value is None else round(value, 3),
            )
        )
    low, high = ours[10], ours[50]
    growth = None if not low or high is None else round(high / low / 5, 3)
    claims.append(
        Claim("growth of the peak from 10 to 50 workers, over 5", 18.77 / 2.31 / 5, growth)
    )
    by_workers = sorted({row["workers"] for row in rows})
    peaks = [mean(rows, "peak", workers=w, policy="isrtf") for w in by_workers]
    if len(by_workers) > 2 and None not in peaks:
        fit = float(np.corrcoef(by_workers, np.array(peaks, dtype=float))[0, 1] ** 2)
        claims.append(Claim("R2 of peaks on workers", "near-linear", round(fit, 4), fit >= 0.99))
    return claims


SCALING = Experiment(
    name="elis-scaling",
    summary="largest request rate with a mean queuing delay of 0.5 s, from 10 to 50 workers",
    paper="004, section 6.4 (Figure 7)",
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
    trials=scaling_trials,
    run=run_scaling,
    summarize=summarize_scaling,
    columns={
        "policy": "specification",
        "workers": "machines behind the least-loaded balancer",
        "draw": "which draw of the requests",
        "requests": "per draw",
        "batch_size": "most requests of a batch",
        "window": "K, tokens",
        "max_delay_s": "limit of the mean queuing delay, s",
        "cv": "coefficient of variation of the gaps between arrivals (Gamma)",
        "predictor": "what isrtf is told",
        "latency_s": "average latency of one request that the cost model is stretched to, s",
        "cost_model": "before it is stretched",
        "peak": "largest rate within the limit, requests/s",
        "peak_per_worker": "the same over the number of workers",
        "load": "the same in multiples of batch size / average latency, per worker",
        "delay_s": "mean queuing delay at that rate, s",
        "error": "why there is no rate",
    },
    figures=[
        Figure(
            "peak", "workers", "peak", series="policy", labels=_NAMES,
            x_label="workers", y_label="peak throughput [requests/s]",
        ),
    ],
)  # fmt: skip
