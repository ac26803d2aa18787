"""Robust policies under interval predictions (001, section 6, Figures 5 to 7)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optsched.experiments.base import Claim, Experiment, Figure, Row, check_known, measured
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

SETTINGS = {
    "1000": "interval:low=1,high=1000",
    "classes": "classes:width=100",
    "x=0.1": "relative:x=0.1",
    "x=0.95": "relative:x=0.95",
    "x=0.99": "relative:x=0.99",
}
POLICIES = ["h-sf", "a-min", "a-max", "a-max:sample=all"]


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per draw, prediction, number of requests and policy."""
    check_known("settings", parameters["settings"], SETTINGS)
    for draw in range(parameters["draws"]):
        for setting in parameters["settings"]:
            for requests in parameters["requests"]:
                for policy in parameters["policies"]:
                    yield {
                        "draw": draw,
                        "prediction": setting,
                        "requests": requests,
                        "policy": policy,
                        "kv_capacity": parameters["kv_capacity"],
                        "cost_model": parameters["cost_model"],
                        "seed": seed,
                    }


def run(trial: Row) -> Row:
    """Run one policy over a random subset of 2000 requests that all arrive at 0."""
    return measured(lambda: _run(trial))


def _run(trial: Row) -> Row:
    seed = 1000 * trial["seed"] + trial["draw"]
    whole = generate(
        "lognormal", seed=seed, n=2000, arrivals="all-at-once", kv_capacity=trial["kv_capacity"]
    )
    pick = np.random.default_rng([seed, trial["requests"]]).permutation(2000)
    instance = predict(whole.subset(pick[: trial["requests"]]), SETTINGS[trial["prediction"]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches beyond the profiles' range
        schedule = simulate(instance, trial["policy"], trial["cost_model"], seed=seed)
        metrics = evaluate(instance, schedule, trial["cost_model"]).metrics
    return {
        "mean_latency_s": metrics["mean_latency"],
        "evictions": metrics["evictions"],
        "mean_kv": metrics["mean_kv"],
    }


def mean(rows: Sequence[Row], **where: Any) -> float | None:
    """Return the mean latency over draws, None without rows."""
    found = [
        float(row["mean_latency_s"])
        for row in rows
        if row.get("mean_latency_s") is not None and all(row[k] == v for k, v in where.items())
    ]
    return float(np.mean(found)) if found else None


def _over(rows: Sequence[Row], first: Mapping[str, Any], second: Mapping[str, Any]) -> float | None:
    one, two = mean(rows, **first), mean(rows, **second)
    return None if one is None or not two else one / two


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of section 6, at the largest number of requests."""
    most = max(row["requests"] for row in rows)

    def at(policy: str, setting: str) -> dict[str, Any]:
        return {"policy": policy, "prediction": setting, "requests": most}

    def claim(what: str, paper: str, value: float | None, holds: bool | None) -> Claim:
        return Claim(what, paper, None if value is None else round(value, 4), holds)

    claims = []
    for setting in SETTINGS:
        ours = _over(rows, at("a-min", setting), at("h-sf", setting))
        near = None if ours is None else ours <= 1.15
        claims.append(claim(f"{setting}: A_min over H-SF", "about 1", ours, near))
        for policy in ("a-max", "a-max:sample=all"):
            ours = _over(rows, at(policy, setting), at("a-min", setting))
            above = None if ours is None else ours >= 1
            claims.append(claim(f"{setting}: {policy} over A_min", "above 1", ours, above))
    for policy in ("a-max", "a-max:sample=all"):
        ours = _over(rows, at(policy, "classes"), at(policy, "1000"))
        halved = None if ours is None else ours <= 0.6
        claims.append(claim(f"{policy}: classes over one interval", "nearly halves", ours, halved))
        ours = _over(rows, at(policy, "x=0.99"), at(policy, "x=0.1"))
        worse = None if ours is None else ours > 1.1
        claims.append(claim(f"{policy}: x = 0.99 over x = 0.1", "far worse", ours, worse))
    return claims


EXPERIMENT = Experiment(
    name="chen-intervals",
    summary="A_max and A_min against H-SF: one interval, ten classes, relative intervals",
    paper="001, section 6 (Figures 5 to 7)",
    parameters={
        "draws": 5,
        "settings": list(SETTINGS),
        "requests": [200, 400, 600, 800, 1000, 1200, 1400, 1600, 1800, 2000],
        "policies": POLICIES,
        "kv_capacity": 16492,
        "cost_model": "llama2-70b-tp2-a100-splitwise",
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "draw": "which draw of the 2000 requests",
        "prediction": "1000: [1, 1000]; classes: of width 100; x: max(1, (1 - x) o) to (1 + x) o",
        "requests": "size of the subset; all arrive at 0",
        "policy": "specification",
        "kv_capacity": "M, tokens",
        "mean_latency_s": "mean end-to-end latency, s",
        "evictions": "restarted runs",
        "mean_kv": "mean KV held, tokens",
        "error": "why there is no schedule",
    },
    figures=[
        Figure(
            "latency", "requests", "mean_latency_s", series="policy", panel="prediction",
            labels={"1000": "one interval [1, 1000]", "classes": "ten classes of 100 tokens",
                    **{x: f"relative intervals, {x}" for x in ("x=0.1", "x=0.95", "x=0.99")}},
            x_label="requests, all at 0", y_label="mean latency [s]",
        )
    ],
)  # fmt: skip
