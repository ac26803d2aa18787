"""MC-SF on conversations at scale (Jaillet et al. 2025, section 5.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from optsched.experiments.base import Claim, Experiment, Row
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
    quiet,
    select,
    sweep,
)

PAPER = "Jaillet et al. 2025"
HIGH, LOW = 50.0, 10.0

TABLE_1 = {
    "mc-sf": 32.112,
    "mc-benchmark": 46.472,
    "alpha-protection:alpha=0.3": 51.933,
    "alpha-protection:alpha=0.25": 51.046,
    "alpha-beta:alpha=0.2,beta=0.2": 50.401,
    "alpha-beta:alpha=0.2,beta=0.1": 50.395,
    "alpha-beta:alpha=0.1,beta=0.1": 50.862,
    "alpha-beta:alpha=0.1,beta=0.2": 53.393,
}
"""Mean over 50 runs of 1000 requests of the average latency in seconds, as printed."""

COLUMNS = {
    "draw": "which draw of the requests",
    "policy": "specification",
    "requests": "number of conversations",
    "rate": "Poisson arrivals per second",
    "alpha": "share of the KV capacity protected",
    "beta": "probability that a running request is cleared",
    "kv_capacity": "M, tokens",
    "mean_latency_s": "mean end-to-end latency, s",
    "evictions": "restarted runs",
    "peak_share": "most KV held, over M",
    "busy_share": "mean KV held in the second half of the arrivals, over M",
    "error": "why there is no schedule: a loop",
}
SHARED = {"kv_capacity": 16492, "cost_model": "llama2-70b-tp2-a100-splitwise"}
LAST: dict[str, Any] = {"kv_capacity": "kv_capacity", "cost_model": "cost_model", "seed": "seed"}
"""Columns with which every sweep ends."""
LATENCY = "mean latency [s]"
RATES = {HIGH: "50 requests per second", LOW: "10 requests per second"}


@measured
def run(row: Row) -> Row:
    """Run one policy on conversations with the published statistics."""
    seed = 1000 * row["seed"] + row["draw"]
    capacity = row["kv_capacity"]
    instance = generate(
        "lognormal", seed=seed, n=row["requests"], rate=row["rate"], kv_capacity=capacity
    )
    with quiet():
        found = judged(instance, row["policy"], row["cost_model"], seed=seed)

    last = float(instance.release_times.max())
    early = (found.batch_start >= last / 2) & (found.batch_end <= last)
    length = found.batch_end - found.batch_start
    busy = None
    if early.any():
        busy = float((found.batch_kv[early] * length[early]).sum() / length[early].sum())

    return {
        "mean_latency_s": found.metrics["mean_latency"],
        "evictions": found.metrics["evictions"],
        "peak_share": (found.metrics["peak_kv"] or 0) / capacity,
        "busy_share": None if busy is None else busy / capacity,
    }


# --- Table 1 --------------------------------------------------------------------------------------


def _table_claims(rows: Sequence[Row]) -> list[Claim]:
    latency = {policy: mean(rows, "mean_latency_s", policy=policy) for policy in TABLE_1}
    base = latency["mc-sf"]
    claims = [Claim("mc-sf: mean latency, s", TABLE_1["mc-sf"], base)]

    for policy, value in list(TABLE_1.items())[1:]:
        paper = round(value / TABLE_1["mc-sf"], 3)
        claims.append(Claim(f"{policy} over mc-sf", paper, over(latency[policy], base)))

    return claims


TABLE = Experiment(
    name="jaillet-table-1",
    summary="average latency of eight policies over 1000 conversations at 50 per second",
    paper=f"{PAPER}, Table 1",
    parameters={"runs": 50, "requests": 1000, "rate": HIGH, **SHARED},
    trials=sweep(
        draw=Count("runs"), policy=list(TABLE_1), requests="requests", rate="rate", **LAST
    ),
    run=run,
    summarize=_table_claims,
    columns=COLUMNS,
    figures=[
        Figure("latency", "policy", "mean_latency_s", "bar", published=TABLE_1, x_label=LATENCY)
    ],
)


# --- Figure 3 -------------------------------------------------------------------------------------

PUBLISHED_SLOPES = {HIGH: (1 / 6, 1 / 2), LOW: (1 / 800, 1 / 100)}
"""The printed slopes of MC-SF and of the best other policy, by rate.

They are in no unit that fits the paper's own Table 1: 1/6 s for each of 9000 further requests would
be 1500 s. Their quotient needs no unit.
"""


def slope(rows: Sequence[Row], policy: str, rate: float) -> float | None:
    """Return the slope of average latency in seconds per request, by least squares."""
    found = [
        (row["requests"], row["mean_latency_s"])
        for row in select(rows, policy=policy, rate=rate)
        if row.get("mean_latency_s") is not None
    ]
    if len({n for n, _ in found}) < 2:
        return None

    n, latency = np.array(found, dtype=np.float64).T
    return float(np.polyfit(n, latency, 1)[0])


def _slope_claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for rate in distinct(rows, "rate"):
        if rate not in PUBLISHED_SLOPES:
            continue

        first, second = PUBLISHED_SLOPES[rate]
        slopes = {policy: slope(rows, policy, rate) for policy in distinct(rows, "policy")}
        own = slopes.pop("mc-sf", None)
        best = min((v for v in slopes.values() if v is not None), default=None)
        claims += [
            Claim(f"slope of mc-sf at {rate:g}/s, per request", first, own),
            Claim(f"slope of the best other at {rate:g}/s", second, best),
            Claim(
                f"slope of the best other over mc-sf's, {rate:g}/s", second / first, over(best, own)
            ),
        ]

    return claims


SLOPES = Experiment(
    name="jaillet-slopes",
    summary="average latency against the number of conversations, high and low demand",
    paper=f"{PAPER}, Figure 3",
    parameters={
        "runs": 1,
        "requests": [1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000],
        "rates": [HIGH, LOW],
        "policies": list(TABLE_1),
        **SHARED,
    },
    trials=sweep(
        draw=Count("runs"),
        policy="policies",
        requests="requests",
        rate="rates",
        **LAST,
        nest=("draw", "rate", "requests", "policy"),
    ),
    run=run,
    summarize=_slope_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            "latency",
            "requests",
            "mean_latency_s",
            series="policy",
            panel="rate",
            labels=RATES,
            y_label=LATENCY,
        )
    ],
)


# --- Figures 8 to 11 ------------------------------------------------------------------------------


def _alpha_trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield the plain policy (beta = 1) for every alpha, and the others where they end."""

    def policy(row: Row, _: Mapping[str, Any]) -> str:
        if row["beta"] < 1:
            return f"alpha-beta:alpha={row['alpha']:g},beta={row['beta']:g}"

        return f"alpha-protection:alpha={row['alpha']:g}"

    return sweep(
        draw=Count("runs"),
        policy=policy,
        requests="requests",
        rate="rates",
        alpha="alphas",
        beta=[1.0, *parameters["betas"]],
        **LAST,
        where=lambda row: row["beta"] == 1 or row["alpha"] >= parameters["betas_from"],
    )(parameters, seed)


def _best(rows: Sequence[Row], column: str) -> float | None:
    """Return the value of a column for which the mean latency is smallest."""
    curve = {
        value: mean(rows, "mean_latency_s", **{column: value})
        for value in sorted(set(distinct(rows, column)))
    }
    known = {value: latency for value, latency in curve.items() if latency is not None}
    return min(known, key=lambda value: known[value], default=None)


def _alpha_claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for rate, published, low, high in ((HIGH, 0.21, 0.15, 0.25), (LOW, 0.24, 0.10, 0.25)):
        here = select(rows, rate=rate)
        plain = select(here, beta=1.0)
        loops = {row["alpha"] for row in plain if row["error"]}
        safe = [a for a in sorted(set(distinct(plain, "alpha"))) if all(a > b for b in loops)]
        what = f"{rate:g}/s: smallest alpha that does not loop"
        claims.append(Claim(what, published, safe[0] if safe else None))

        for beta in sorted(set(distinct(here, "beta")) - {1.0}):
            best = _best(select(here, beta=beta), "alpha")
            if best is not None:
                what, paper = f"{rate:g}/s, beta {beta:g}: best alpha", f"in [{low}, {high}]"
                claims.append(Claim(what, paper, f"{best:g}", low <= best <= high))

    return claims


ALPHA = Experiment(
    name="jaillet-alpha",
    summary="average latency against alpha, and the smallest alpha that does not loop",
    paper=f"{PAPER}, Figures 8 and 10",
    parameters={
        "runs": 3,
        "requests": 1000,
        "rates": [HIGH, LOW],
        "alphas": [
            0.0,
            0.01,
            0.02,
            0.03,
            0.05,
            0.07,
            0.1,
            0.13,
            0.15,
            0.18,
            0.2,
            0.21,
            0.22,
            0.23,
            0.24,
            0.25,
            0.28,
            0.3,
            0.35,
            0.4,
        ],
        "betas": [0.1, 0.2],
        "betas_from": 0.02,  # below this, requests evict each other for hours of simulated time
        **SHARED,
    },
    trials=_alpha_trials,
    run=run,
    summarize=_alpha_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            "latency",
            "alpha",
            "mean_latency_s",
            series="beta",
            panel="rate",
            labels={**RATES, 1.0: "clear all", 0.1: "beta 0.1", 0.2: "beta 0.2"},
            y_label=LATENCY,
        )
    ],
)


def _beta_claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for rate, high in ((HIGH, 0.25), (LOW, 0.20)):
        for alpha in sorted(set(distinct(rows, "alpha"))):
            here = select(rows, rate=rate, alpha=alpha)
            best = _best(here, "beta")
            if best is None:
                continue

            cleared = sum(r.get("evictions") or 0 for r in here)
            holds = None if not cleared else 0.05 <= best <= high
            words = f"{best:g}" if cleared else "any: nothing is ever cleared"
            what, paper = f"{rate:g}/s, alpha {alpha:g}: best beta", f"in [0.05, {high}]"
            claims.append(Claim(what, paper, words, holds))

    return claims


BETA = Experiment(
    name="jaillet-beta",
    summary="average latency against beta",
    paper=f"{PAPER}, Figures 9 and 11",
    parameters={
        "runs": 2,
        "requests": 1000,
        "rates": [HIGH, LOW],
        "alphas": [0.06, 0.07, 0.1],
        "betas": [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7],
        **SHARED,
    },
    trials=sweep(
        draw=Count("runs"),
        policy=lambda row, _: f"alpha-beta:alpha={row['alpha']:g},beta={row['beta']:g}",
        requests="requests",
        rate="rates",
        alpha="alphas",
        beta="betas",
        **LAST,
    ),
    run=run,
    summarize=_beta_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            "latency",
            "beta",
            "mean_latency_s",
            series="alpha",
            panel="rate",
            labels={**RATES, 0.06: "alpha 0.06", 0.07: "alpha 0.07", 0.1: "alpha 0.1"},
            y_label=LATENCY,
        )
    ],
)


# --- Figures 6 and 7 ------------------------------------------------------------------------------


def _memory_claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for rate in distinct(rows, "rate"):
        peak, busy = (mean(rows, key, rate=rate) for key in ("peak_share", "busy_share"))
        what = f"{rate:g}/s: peak KV of mc-sf over M"
        claims.append(claim(what, "never above 1", peak, lambda v: v <= 1))
        what = f"{rate:g}/s: mean KV of mc-sf over M, second half of the arrivals"
        claims.append(claim(what, "near 1", busy, lambda v: v >= 0.85))

    return claims


MEMORY = Experiment(
    name="jaillet-memory",
    summary="KV held by MC-SF over time, high and low demand",
    paper=f"{PAPER}, Figures 6 and 7",
    parameters={"runs": 5, "requests": 1000, "rates": [HIGH, LOW], **SHARED},
    trials=sweep(draw=Count("runs"), policy=["mc-sf"], requests="requests", rate="rates", **LAST),
    run=run,
    summarize=_memory_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            "shares",
            "rate",
            ("peak_share", "busy_share"),
            "bar",
            reference={"M": 1.0},
            labels={**RATES, "peak_share": "peak", "busy_share": "mean, second half"},
            x_label="KV held over M",
        )
    ],
)
