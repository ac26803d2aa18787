"""The formulas of TRAIL's queue against simulation: Lemma 1, memory by C, refined predictions.

The source is Shahout et al. 2024, Lemma 1 (corrected and as printed) and Appendices C to E.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from optsched.experiments.base import Claim, Experiment, Row

from . import queueing
from .drawing import Figure
from .parts import claim, distinct, measured, select, sweep

PAPER = "Shahout et al. 2024 (TRAIL)"
LAWS = {
    "perfect": queueing.perfect,
    "exponential": queueing.exponential_predictions,
}
LAST: dict[str, Any] = {"arrivals": "arrivals", "replications": "replications", "seed": "seed"}
"""The columns with which every sweep ends. All trials have the same seed, so that they differ only
in the policy and the law."""


@cache
def _jobs(kind: str, shape: float) -> queueing.Jobs:
    return LAWS[kind](queueing.weibull(shape))


@measured
def run_lemma(trial: Row) -> Row:
    """Return response time and memory, by simulation and by formula."""
    jobs = _jobs(trial["predictions"], trial["shape"])
    rate, c = trial["load"], trial["c"]  # the mean size is 1
    corrected = queueing.mean_response_time(jobs, rate=rate, c=c)
    printed = queueing.mean_response_time(jobs, rate=rate, c=c, printed=True)
    memory = queueing.mean_memory(jobs, rate=rate, c=c)
    found = queueing.simulate_queue(
        jobs,
        rate=rate,
        c=c,
        generator=np.random.default_rng(trial["seed"]),
        arrivals=trial["arrivals"],
        replications=trial["replications"],
    )
    simulated = found.response_time.mean

    return {
        "simulated": simulated,
        "half_width": found.response_time.half_width,
        "corrected": corrected,
        "corrected_error": corrected / simulated - 1,
        "printed": printed,
        "printed_error": printed / simulated - 1,
        "memory": memory,
        "memory_simulated": found.mean_memory.mean,
        "memory_half_width": found.mean_memory.half_width,
        "peak_memory": found.peak_memory.mean,
        "peak_half_width": found.peak_memory.half_width,
    }


def within(what: str, errors: Sequence[float]) -> Claim:
    """Return the claim that the largest of relative errors is at most 2 %."""
    worst = max(errors, key=abs)
    return claim(what, "within 2 %", worst, lambda v: abs(v) <= 0.02, "+.2%")


def lemma_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the largest errors of the formulas for each law, and the effect of C on memory."""
    good = [row for row in rows if row.get("simulated") is not None]
    claims = []
    for kind, shape in dict.fromkeys((row["predictions"], row["shape"]) for row in good):
        here = select(good, predictions=kind, shape=shape)
        law = f"{kind} predictions, Weibull sizes of shape {shape:g}"
        for formula in ("corrected", "printed"):
            what = f"Lemma 1, {formula}; {law}: largest error"
            claims.append(within(what, [row[f"{formula}_error"] for row in here]))

        least, most = min(distinct(here, "c")), max(distinct(here, "c"))
        for column, words in (
            ("memory_simulated", "mean memory"),
            ("simulated", "mean response time"),
        ):
            low, high = ({r["load"]: r[column] for r in select(here, c=c)} for c in (least, most))
            ratios = [low[load] / high[load] for load in low if load in high]
            if least == most or not ratios:
                continue  # only some of the trials have run

            what = f"{words} at C = {least:g} over C = {most:g}; {law}"
            falls = max(ratios) < 1 if words == "mean memory" else None
            ours = f"{min(ratios):.2f} to {max(ratios):.2f}"
            claims.append(Claim(what, "memory falls, time rises", ours, falls))

    if good:
        inside = [abs(r["corrected"] - r["simulated"]) <= r["half_width"] for r in good]
        what = "corrected formula inside the 95 % interval, share of trials"
        claims.append(Claim(what, 0.95, float(np.mean(inside))))
        what = "mean memory, formula against simulation: largest difference"
        claims.append(within(what, [r["memory_simulated"] / r["memory"] - 1 for r in good]))

    return claims


LEMMA = Experiment(
    name="trail-lemma-1",
    summary="Lemma 1 corrected and as printed against simulation; memory against C",
    paper=f"{PAPER}, Lemma 1, Appendices C and D",
    parameters={
        "predictions": list(LAWS),
        "shape": [1.0, 0.5, 2.0],
        "load": [0.5, 0.6, 0.7, 0.8, 0.9],
        "c": [0.0, 0.2, 0.5, 0.8, 1.0],
        "arrivals": 200_000,
        "replications": 40,
    },
    trials=sweep(
        predictions="predictions",
        shape="shape",
        load="load",
        c="c",
        **LAST,
        known={"predictions": LAWS},
    ),
    run=run_lemma,
    summarize=lemma_claims,
    columns={
        "shape": "shape of the Weibull sizes of mean 1; shape 1 is exponential",
        "load": "arrivals per unit of time",
        "simulated": "mean response time, with the workload as control variate",
        "half_width": "half width of the 95 % interval of simulated, over replications",
        "corrected": "mean response time by the corrected formula",
        "printed": "mean response time by Lemma 1 as printed",
        "corrected_error": "corrected over simulated, minus 1",
        "printed_error": "printed over simulated, minus 1",
        "memory": "mean over time of the sum of ages in the system, by formula",
        "peak_memory": "largest sum of ages in a replication, mean over replications",
        "error": "why there is no result",
    },
    figures=[
        *(
            Figure(
                f"time-{kind}",
                "c",
                ("simulated", "corrected", "printed"),
                panel="load",
                where={"predictions": kind, "shape": 1.0},
                title=f"{kind} predictions of exponential sizes",
                x_label="C",
                y_label="mean response time [mean sizes]",
                labels={"corrected": "Lemma 1, corrected", "printed": "Lemma 1, printed"},
            )
            for kind in LAWS
        ),
        Figure(
            "memory",
            "c",
            ("memory_simulated", "memory"),
            panel="load",
            where={"predictions": "exponential", "shape": 1.0},
            x_label="C",
            y_label="mean sum of ages [mean sizes]",
            title="exponential predictions of exponential sizes",
            labels={"memory_simulated": "simulated", "memory": "formula"},
        ),
    ],
)


# --- refined predictions --------------------------------------------------------------------------


@measured
def run_refined(trial: Row) -> Row:
    """Return the mean response time by formula and by simulation."""
    shares = 0.9 ** np.arange(trial["longest"])
    jobs = queueing.learned(shares / shares.sum(), trial["hit"])
    rate = trial["load"] / jobs.mean
    soap = queueing.refined_response_time(jobs, rate=rate)
    found = queueing.simulate_refined(
        jobs,
        rate=rate,
        generator=np.random.default_rng(trial["seed"]),
        arrivals=trial["arrivals"],
        replications=trial["replications"],
    )
    simulated = found.response_time.mean

    return {
        "simulated": simulated,
        "half_width": found.response_time.half_width,
        "soap": soap,
        "soap_error": soap / simulated - 1,
        "memory_simulated": found.mean_memory.mean,
        "peak_memory": found.peak_memory.mean,
    }


def refined_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the largest error of the formula, and the gain by refinement."""
    good = [row for row in rows if row.get("simulated") is not None]
    claims = []
    if good:
        claims.append(within("SOAP formula: largest error", [row["soap_error"] for row in good]))
    for load in distinct(good, "load"):
        by_hit = {row["hit"]: row["soap"] for row in select(good, load=load)}
        least, most = min(by_hit), max(by_hit)
        if least < most:
            what = f"mean response time, hit = {most:g} over {least:g}, load {load:g}"
            ratio = by_hit[most] / by_hit[least]
            claims.append(claim(what, "refinement helps", ratio, lambda v: v < 1, ".3f"))

    return claims


REFINED = Experiment(
    name="trail-refined",
    summary="SPRPT with refined predictions: SOAP's formula against simulation",
    paper=f"{PAPER}, Appendix E",
    parameters={
        "load": [0.5, 0.7, 0.9],
        "hit": [0.0, 0.05, 0.2, 0.5, 1.0],
        "longest": 20,
        "arrivals": 100_000,
        "replications": 40,
    },
    trials=sweep(load="load", hit="hit", longest="longest", **LAST),
    run=run_refined,
    summarize=refined_claims,
    columns={
        "load": "arrivals per unit of time times the mean size",
        "hit": "chance that a unit of service reveals the size; the first prediction is a draw",
        "longest": "sizes are 1 to this many units, geometric with factor 0.9",
        "simulated": "mean response time in units of service, workload as control variate",
        "half_width": "half width of the 95 % interval of simulated, over replications",
        "soap": "mean response time by SOAP's formula",
        "soap_error": "soap over simulated, minus 1",
        "memory_simulated": "mean over time of the sum of ages in the system",
        "peak_memory": "largest sum of ages in a replication, mean over replications",
        "error": "why there is no result",
    },
    figures=[
        Figure(
            "time",
            "hit",
            ("simulated", "soap"),
            panel="load",
            labels={"soap": "SOAP's formula"},
            x_label="chance that a unit reveals the size",
            y_label="mean response time [units]",
        )
    ],
)
