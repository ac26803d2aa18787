"""SPRPT with refined predictions (000, Appendix E): SOAP's formula beside simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from optsched.analysis import queueing
from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per load and chance that a unit of service reveals the size."""
    for load in parameters["load"]:
        for hit in parameters["hit"]:
            yield {
                "load": load, "hit": hit, "longest": parameters["longest"],
                "arrivals": parameters["arrivals"], "replications": parameters["replications"],
                "seed": seed,
            }  # fmt: skip


def run(trial: Row) -> Row:
    """Return the mean response time by formula and by simulation."""
    return measured(lambda: _run(trial))


def _run(trial: Row) -> Row:
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


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the formula's largest error, and what refinement gains."""
    good = [row for row in rows if row.get("simulated") is not None]
    claims = []
    if good:
        worst = max((row["soap_error"] for row in good), key=abs)
        claims.append(
            Claim("SOAP formula: largest error", "within 2 %", f"{worst:+.2%}", abs(worst) <= 0.02)
        )
    for load in dict.fromkeys(row["load"] for row in good):
        by_hit = {row["hit"]: row["soap"] for row in good if row["load"] == load}
        least, most = min(by_hit), max(by_hit)
        if least < most:
            ratio = by_hit[most] / by_hit[least]
            claims.append(
                Claim(
                    f"mean response time, hit = {most:g} over {least:g}, load {load:g}",
                    "refinement helps",
                    f"{ratio:.3f}",
                    ratio < 1,
                )
            )
    return claims


EXPERIMENT = Experiment(
    name="trail-refined",
    summary="SPRPT with refined predictions: SOAP's formula against simulation",
    paper="000, Appendix E",
    parameters={
        "load": [0.5, 0.7, 0.9],
        "hit": [0.0, 0.05, 0.2, 0.5, 1.0],
        "longest": 20,
        "arrivals": 100_000,
        "replications": 40,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "load": "arrivals per unit of time times the mean size",
        "hit": "chance that a unit of service reveals the size; the first prediction is a draw",
        "longest": "sizes are 1 to this many units, geometric with factor 0.9",
        "simulated": "mean response time in units of service, workload as control variate",
        "half_width": "of its 95 % interval over replications",
        "soap": "mean response time by SOAP",
        "soap_error": "formula over simulation, minus 1",
        "memory_simulated": "mean over time of the summed ages in the system",
        "peak_memory": "largest sum of ages in a replication, mean over replications",
        "error": "why there is no result",
    },
    figures=[
        Figure(
            "time", "hit", ("simulated", "soap"), panel="load", labels={"soap": "SOAP's formula"},
            x_label="chance that a unit reveals the size", y_label="mean response time [units]",
        )
    ],
)  # fmt: skip
