"""Robust policies under interval predictions, and their ratios (Chen, Ye and Zhou 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.ratio.families import (
    from_shares,
    geometric_shares,
    two_point,
    weighted_geometric_shares,
)
from optsched.experiments.base import Claim, Experiment, Row
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

from .chen_ratios import (
    a_l_bound,
    a_l_two_point,
    a_max_bounds,
    a_min_ratio,
    a_min_two_point_bound,
)
from .drawing import Figure
from .parts import (
    Count,
    claim,
    judged,
    mean,
    measured,
    over,
    picked,
    quiet,
    select,
    sweep,
)

PAPER = "Chen, Ye and Zhou 2025"

# --- interval predictions -------------------------------------------------------------------------

SETTINGS = {
    "1000": "interval:low=1,high=1000",
    "classes": "classes:width=100",
    "x=0.1": "relative:x=0.1",
    "x=0.95": "relative:x=0.95",
    "x=0.99": "relative:x=0.99",
}


@measured
def run_intervals(trial: Row) -> Row:
    """Run one policy on a random subset of 2000 requests that all arrive at 0."""
    seed = 1000 * trial["seed"] + trial["draw"]
    whole = generate(
        "lognormal", seed=seed, n=2000, arrivals="all-at-once", kv_capacity=trial["kv_capacity"]
    )
    pick = np.random.default_rng([seed, trial["requests"]]).permutation(2000)
    instance = predict(whole.subset(pick[: trial["requests"]]), SETTINGS[trial["prediction"]])
    with quiet():
        found = judged(instance, trial["policy"], trial["cost_model"], seed=seed)

    columns = {"mean_latency_s": "mean_latency", "evictions": "evictions", "mean_kv": "mean_kv"}
    return picked(found.metrics, columns)


def interval_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of section 6, measured at the largest number of requests."""
    here = select(rows, requests=max((row["requests"] for row in rows), default=None))

    def ratio(first: tuple[str, str], second: tuple[str, str]) -> float | None:
        one, two = (
            mean(here, "mean_latency_s", policy=policy, prediction=setting)
            for policy, setting in (first, second)
        )
        return over(one, two)

    claims = []
    robust = ("a-max", "a-max:sample=all")
    for setting in SETTINGS:
        ours = ratio(("a-min", setting), ("h-sf", setting))
        claims.append(claim(f"{setting}: A_min over H-SF", "about 1", ours, lambda v: v <= 1.15, 4))
        for policy in robust:
            ours = ratio((policy, setting), ("a-min", setting))
            what = f"{setting}: {policy} over A_min"
            claims.append(claim(what, "above 1", ours, lambda v: v >= 1, 4))

    for policy in robust:
        ours = ratio((policy, "classes"), (policy, "1000"))
        what = f"{policy}: classes over one interval"
        claims.append(claim(what, "nearly halves", ours, lambda v: v <= 0.6, 4))
        ours = ratio((policy, "x=0.99"), (policy, "x=0.1"))
        what = f"{policy}: x = 0.99 over x = 0.1"
        claims.append(claim(what, "far worse", ours, lambda v: v > 1.1, 4))

    return claims


INTERVALS = Experiment(
    name="chen-intervals",
    summary="A_max and A_min against H-SF: one interval, ten classes, relative intervals",
    paper=f"{PAPER}, section 6 (Figures 5 to 7)",
    parameters={
        "draws": 5,
        "settings": list(SETTINGS),
        "requests": [200, 400, 600, 800, 1000, 1200, 1400, 1600, 1800, 2000],
        "policies": ["h-sf", "a-min", "a-max", "a-max:sample=all"],
        "kv_capacity": 16492,
        "cost_model": "llama2-70b-tp2-a100-splitwise",
    },
    trials=sweep(
        draw=Count("draws"),
        prediction="settings",
        requests="requests",
        policy="policies",
        kv_capacity="kv_capacity",
        cost_model="cost_model",
        seed="seed",
        known={"settings": SETTINGS},
    ),
    run=run_intervals,
    summarize=interval_claims,
    columns={
        "draw": "which draw of the 2000 requests",
        "prediction": "1000: [1, 1000]; classes: of width 100; x: max(1, (1 - x) o) to (1 + x) o",
        "requests": "size of the subset; all arrive at 0",
        "policy": "policy specification",
        "kv_capacity": "M, tokens",
        "mean_latency_s": "mean end-to-end latency, s",
        "evictions": "number of restarted runs",
        "mean_kv": "mean KV held, tokens",
        "error": "why there is no schedule",
    },
    figures=[
        Figure(
            "latency",
            "requests",
            "mean_latency_s",
            series="policy",
            panel="prediction",
            labels={
                "1000": "one interval [1, 1000]",
                "classes": "ten classes of 100 tokens",
                **{x: f"relative intervals, {x}" for x in ("x=0.1", "x=0.95", "x=0.99")},
            },
            x_label="requests, all at 0",
            y_label="mean latency [s]",
        )
    ],
)


# --- competitive ratios ---------------------------------------------------------------------------

ADAPTIVE = ["a-min", "a-min:make_room=true"]


def ratio_trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per policy, distribution, parameter and KV capacity."""
    last: dict[str, Any] = {
        "kv_capacity": "kv_capacity",
        "requests": lambda row, known: known["requests_per_token"] * row["kv_capacity"],
        "seeds": "seeds",
        "seed": "seed",
    }
    for policy in ("a-min", "a-l", "a-max"):
        for short, long in ((10, 20), (10, 30), (10, 100)):
            yield from sweep(
                policy=[policy],
                family=["two-point"],
                short=[short],
                long=[long],
                share=[0.5, 0.75, 0.9],
                **last,
            )(parameters, seed)

    families = ["geometric", "weighted-geometric"]
    yield from sweep(policy=ADAPTIVE, family=families, q="q", **last)(parameters, seed)
    yield from sweep(policy=ADAPTIVE, family=["worst"], long="longest", **last)(parameters, seed)


@measured
def run_ratio(trial: Row) -> Row:
    """Return the simulated ratio to H-SF with the closed form for the same shares and s = 1."""
    draw = _two_point if trial["family"] == "two-point" else _shares
    instance, closed, bound = draw(trial)
    runs = ([trial["seed"], run] for run in range(trial["seeds"]))
    found = [_tel(instance, trial["policy"], run) for run in runs]
    ratio = float(np.mean(found)) / _tel(instance, "h-sf", 0)

    return {"ratio": ratio, "closed_form": closed, "bound": bound}


def _two_point(trial: Row) -> tuple[Instance, float | None, float]:
    short, long, share = trial["short"], trial["long"], trial["share"]
    instance = two_point(short, long, share, trial["requests"], kv_capacity=trial["kv_capacity"])
    alpha = short / long

    if trial["policy"] == "a-l":
        closed = a_l_two_point(alpha, share / (1 - share))
        return instance, closed, a_l_bound(alpha)

    if trial["policy"] == "a-max":
        return instance, None, a_max_bounds(alpha)[1]

    shares = np.zeros(long - short + 1)
    shares[0], shares[-1] = share, 1 - share
    closed = a_min_ratio(shares, first=short, prompt=1)
    return instance, closed, a_min_two_point_bound(alpha)


def rayleigh_matrices(u: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return A_u and B_u of Chen et al., Corollary 4.8, where s = 0 and l = 1."""
    i = np.arange(1, u + 1, dtype=np.float64)
    smaller = np.minimum.outer(i, i)
    product, total = np.multiply.outer(i, i), np.add.outer(i, i)
    return smaller**2 / product * (total**2 / 2 - smaller**2), smaller**2


def largest_quotient(u: int) -> tuple[float, NDArray[np.float64]]:
    """Return the largest Rayleigh quotient over all vectors, and a vector that attains it.

    The quotient is the largest eigenvalue of B^-1 A. It bounds the competitive ratio of A_min for
    outputs in [1, u]. The vector has no negative entry, as was computed for every u up to 1000. It
    is therefore the shares of a worst case, and the bound is the ratio itself, which Chen et al.
    show in Figure 1.

    Notes
    -----
    B = L L' with L_ij = sqrt(2 j - 1) for i >= j, because min(i, j)^2 is the sum of the first
    min(i, j) odd numbers. L^-1 takes differences of neighbouring rows.
    """
    a, _ = rayleigh_matrices(u)
    root = np.sqrt(2 * np.arange(1, u + 1, dtype=np.float64) - 1)

    def solved(m: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.diff(m, axis=0, prepend=0.0) / root[:, None]

    symmetric = solved(solved(a).T)
    y = np.ones(u) / math.sqrt(u)
    value = 0.0

    for _ in range(10_000):  # power iteration, since one eigenvalue is far above the others
        ahead = symmetric @ y
        last, value = value, float(np.linalg.norm(ahead))
        change = float(np.abs(ahead / value - y).max())
        y = ahead / value
        if change < 1e-14 and value == last:
            break

    z = y / root
    x = z - np.append(z[1:], 0.0)  # L' x = y
    return value, x if x.sum() >= 0 else -x


def _shares(trial: Row) -> tuple[Instance, float, float]:
    longest = trial.get("long", 200)
    if trial["family"] == "worst":
        bound, shares = largest_quotient(longest)
    elif trial["family"] == "geometric":
        bound, shares = 1.7, geometric_shares(trial["q"], longest)
    else:
        bound, shares = 14 / 9, weighted_geometric_shares(trial["q"], longest)

    shares = np.maximum(shares, 0.0)
    capacity = max(trial["kv_capacity"], longest + 1)
    instance = from_shares(shares, trial["requests"], kv_capacity=capacity)
    return instance, a_min_ratio(shares, prompt=1), bound


def _tel(instance: Instance, policy: str, seed: int | Sequence[int]) -> float:
    return float(judged(instance, policy, seed=seed).metrics["tel"] or 0)


def ratio_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return, for each distribution, the values farthest from theory at the largest capacity."""
    good = [row for row in rows if row.get("ratio") is not None]
    claims = []
    for policy, family in dict.fromkeys((row["policy"], row["family"]) for row in good):
        here = select(good, policy=policy, family=family)
        most = max(row["kv_capacity"] for row in here)
        here = select(here, kv_capacity=most)
        above = max(row["ratio"] / row["bound"] for row in here)
        what = f"{policy}, {family}: largest ratio over bound, M = {most}"
        claims.append(claim(what, "<= 1", above, lambda v: v <= 1.01, 4))
        off = [row["ratio"] / row["closed_form"] for row in here if row["closed_form"]]

        if off:
            least, largest = min(off), max(off)
            what = f"{policy}, {family}: ratio over closed form, M = {most}"
            near = 0.95 <= least <= largest <= 1.05
            claims.append(Claim(what, "1", f"{least:.3f} to {largest:.3f}", near))

    return claims


SIDES = {"ratio": "simulated", "closed_form": "closed form", "bound": "bound"}

DISTRIBUTIONS = Experiment(
    name="chen-distributions",
    summary="ratios to H-SF on two-point, geometric and worst-case outputs, against the theorems",
    paper=f"{PAPER}, sections 3 to 5 (Figures 1 to 3)",
    parameters={
        "kv_capacity": [500, 2000, 8000],
        "q": [0.3, 0.6, 0.8, 0.9, 0.95],
        "longest": [4, 16, 64, 256],
        "requests_per_token": 4,
        "seeds": 3,
    },
    trials=ratio_trials,
    run=run_ratio,
    summarize=ratio_claims,
    columns={
        "policy": "policy specification",
        "family": "distribution of outputs; worst: the shares of Figure 1",
        "kv_capacity": "M, tokens; prompts have 1 token, all arrive at 0",
        "ratio": "mean total latency over that of H-SF",
        "closed_form": "ratio by Lemma 4.6 for s = 1, or by the proof of Theorem 5.2 (s = 0)",
        "bound": "the theorem's bound; for worst, the largest Rayleigh quotient (s = 0)",
        "error": "why there is no schedule",
    },
    figures=[
        *(
            Figure(
                family,
                "q",
                ("ratio", "closed_form", "bound"),
                panel="policy",
                where={"family": family, "kv_capacity": 8000},
                labels=SIDES,
                title=f"outputs of a {family} distribution, M = 8000",
                x_label="q",
                y_label="total latency over H-SF's",
            )
            for family in ("geometric", "weighted-geometric")
        ),
        Figure(
            "worst",
            "long",
            ("ratio", "closed_form", "bound"),
            panel="policy",
            log="x",
            where={"family": "worst", "kv_capacity": 8000},
            labels=SIDES,
            title="worst shares of outputs, M = 8000",
            x_label="longest output [tokens]",
            y_label="total latency over H-SF's",
        ),
        Figure(
            "two-point",
            "share",
            ("ratio", "bound"),
            series="policy",
            panel="long",
            where={"family": "two-point", "kv_capacity": 8000},
            labels={
                **SIDES,
                20: "10 and 20 tokens",
                30: "10 and 30 tokens",
                100: "10 and 100 tokens",
            },
            title="outputs of two lengths, M = 8000",
            x_label="share of the short outputs",
            y_label="total latency over H-SF's",
        ),
    ],
)
