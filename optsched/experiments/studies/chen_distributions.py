"""Competitive ratios of 001 by simulation, beside their closed forms, as memory grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optsched.analysis import theory
from optsched.analysis.ratio.families import from_shares, two_point
from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance

SIDES = {"ratio": "simulated", "closed_form": "closed form", "bound": "bound"}


def _two_points(policy: str, capacities: Sequence[int]) -> Iterable[Row]:
    for short, long in ((10, 20), (10, 30), (10, 100)):
        for share in (0.5, 0.75, 0.9):
            for capacity in capacities:
                yield {
                    "policy": policy, "family": "two-point", "short": short, "long": long,
                    "share": share, "kv_capacity": capacity,
                }  # fmt: skip


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per policy, distribution, parameter and KV capacity."""
    capacities = parameters["kv_capacity"]
    rows: list[Row] = []
    for policy in ("a-min", "a-l", "a-max"):
        rows += _two_points(policy, capacities)
    for policy in ("a-min", "a-min:make_room=true"):
        for family in ("geometric", "weighted-geometric"):
            for q in parameters["q"]:
                for capacity in capacities:
                    rows.append(
                        {"policy": policy, "family": family, "q": q, "kv_capacity": capacity}
                    )
    for policy in ("a-min", "a-min:make_room=true"):
        for long in parameters["longest"]:
            for capacity in capacities:
                rows.append(
                    {"policy": policy, "family": "worst", "long": long, "kv_capacity": capacity}
                )
    for row in rows:
        n = parameters["requests_per_token"] * row["kv_capacity"]
        yield {**row, "requests": n, "seeds": parameters["seeds"], "seed": seed}


def run(trial: Row) -> Row:
    """Return the simulated ratio to H-SF, and the closed form for the same shares and s = 1."""
    return measured(lambda: _run(trial))


def _run(trial: Row) -> Row:
    n, capacity = trial["requests"], trial["kv_capacity"]
    family, policy = trial["family"], trial["policy"]
    if family == "two-point":
        short, long, share = trial["short"], trial["long"], trial["share"]
        instance = two_point(short, long, share, n, kv_capacity=capacity)
        alpha, t = short / long, share / (1 - share)
        shares = np.zeros(long - short + 1)
        shares[0], shares[-1] = share, 1 - share
        closed = {
            "a-min": lambda: theory.a_min_ratio(shares, first=short, prompt=1),
            "a-l": lambda: theory.a_l_two_point(alpha, t),
            "a-max": lambda: None,
        }[policy]()
        bound = {
            "a-min": theory.a_min_two_point_bound(alpha),
            "a-l": theory.a_l_bound(alpha),
            "a-max": theory.a_max_bounds(alpha)[1],
        }[policy]
    else:
        if family == "worst":
            longest = trial["long"]
            bound, shares = theory.largest_quotient(longest)
        else:
            longest = 200
            weighted = family == "weighted-geometric"
            make = theory.weighted_geometric_shares if weighted else theory.geometric_shares
            shares = make(trial["q"], longest)
            bound = 14 / 9 if weighted else 1.7
        shares = np.maximum(shares, 0.0)
        closed = theory.a_min_ratio(shares, prompt=1)
        instance = from_shares(shares, n, kv_capacity=max(capacity, longest + 1))
    found = [_tel(instance, policy, trial["seed"] + k) for k in range(trial["seeds"])]
    best = _tel(instance, "h-sf", 0)
    return {
        "ratio": float(np.mean(found)) / best,
        "closed_form": closed,
        "bound": bound,
    }


def _tel(instance: Instance, policy: str, seed: int) -> float:
    return float(evaluate(instance, simulate(instance, policy, seed=seed)).metrics["tel"] or 0)


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return, per distribution at the largest capacity, what is farthest from the theory."""
    good = [row for row in rows if row.get("ratio") is not None]
    claims = []
    for policy, family in dict.fromkeys((row["policy"], row["family"]) for row in good):
        here = [r for r in good if (r["policy"], r["family"]) == (policy, family)]
        most = max(r["kv_capacity"] for r in here)
        here = [r for r in here if r["kv_capacity"] == most]
        above = max(r["ratio"] / r["bound"] for r in here)
        claims.append(
            Claim(
                f"{policy}, {family}: largest ratio over bound, M = {most}",
                "<= 1",
                round(above, 4),
                above <= 1.01,
            )
        )
        off = [r["ratio"] / r["closed_form"] for r in here if r["closed_form"]]
        if off:
            least, largest = min(off), max(off)
            claims.append(
                Claim(
                    f"{policy}, {family}: ratio over closed form, M = {most}",
                    "1",
                    f"{least:.3f} to {largest:.3f}",
                    0.95 <= least <= largest <= 1.05,
                )
            )
    return claims


EXPERIMENT = Experiment(
    name="chen-distributions",
    summary="ratios to H-SF on two-point, geometric and worst-case outputs, beside the theorems",
    paper="001, sections 3 to 5 (Figures 1 to 3)",
    parameters={
        "kv_capacity": [500, 2000, 8000],
        "q": [0.3, 0.6, 0.8, 0.9, 0.95],
        "longest": [4, 16, 64, 256],
        "requests_per_token": 4,
        "seeds": 3,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "policy": "specification",
        "family": "distribution of outputs; worst: the shares of Figure 1",
        "kv_capacity": "M, tokens; prompts have 1 token, all arrive at 0",
        "ratio": "mean total latency over H-SF's",
        "closed_form": "Lemma 4.6 for s = 1, or the proof of Theorem 5.2 (s = 0)",
        "bound": "the theorem's bound; for worst, the largest Rayleigh quotient (s = 0)",
        "error": "why there is no schedule",
    },
    figures=[
        *(
            Figure(
                family, "q", ("ratio", "closed_form", "bound"), panel="policy",
                where={"family": family, "kv_capacity": 8000}, labels=SIDES,
                title=f"outputs of a {family} distribution, M = 8000",
                x_label="q", y_label="total latency over H-SF's",
            )
            for family in ("geometric", "weighted-geometric")
        ),
        Figure(
            "worst", "long", ("ratio", "closed_form", "bound"), panel="policy", log="x",
            where={"family": "worst", "kv_capacity": 8000}, labels=SIDES,
            title="worst shares of outputs, M = 8000",
            x_label="longest output [tokens]", y_label="total latency over H-SF's",
        ),
        Figure(
            "two-point", "share", ("ratio", "bound"), series="policy", panel="long",
            where={"family": "two-point", "kv_capacity": 8000},
            labels={**SIDES, 20: "10 and 20 tokens", 30: "10 and 30 tokens",
                    100: "10 and 100 tokens"},
            title="outputs of two lengths, M = 8000",
            x_label="share of the short outputs", y_label="total latency over H-SF's",
        ),
    ],
)  # fmt: skip
