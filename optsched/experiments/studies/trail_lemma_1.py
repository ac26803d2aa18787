"""Lemma 1 of 000, corrected and as printed, beside simulation; memory against C (Appendix D)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from optsched.analysis import queueing
from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.problem.errors import InputError

PREDICTIONS = {
    "perfect": queueing.perfect,
    "exponential": queueing.exponential_predictions,
}


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per distribution of sizes, kind of prediction, load and C.

    All have the same seed, so that they differ by the policy and the law and not by luck.
    """
    for kind in parameters["predictions"]:
        if kind not in PREDICTIONS:
            raise InputError(f"predictions: {kind!r}; {' or '.join(PREDICTIONS)} is right")
        for shape in parameters["shape"]:
            for load in parameters["load"]:
                for c in parameters["c"]:
                    yield {
                        "predictions": kind, "shape": shape, "load": load, "c": c,
                        "arrivals": parameters["arrivals"],
                        "replications": parameters["replications"], "seed": seed,
                    }  # fmt: skip


@cache
def _jobs(kind: str, shape: float) -> queueing.Jobs:
    return PREDICTIONS[kind](queueing.weibull(shape))


def run(trial: Row) -> Row:
    """Return simulated response time and memory beside their formulas."""
    return measured(lambda: _run(trial))


def _run(trial: Row) -> Row:
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


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the formulas' largest errors per law, and what C does to memory."""
    good = [row for row in rows if row.get("simulated") is not None]
    claims = []
    for kind, shape in dict.fromkeys((row["predictions"], row["shape"]) for row in good):
        here = [r for r in good if (r["predictions"], r["shape"]) == (kind, shape)]
        law = f"{kind} predictions, Weibull sizes of shape {shape:g}"
        for formula in ("corrected", "printed"):
            worst = max((r[f"{formula}_error"] for r in here), key=abs)
            claims.append(
                Claim(
                    f"Lemma 1, {formula}; {law}: largest error",
                    "within 2 %",
                    f"{worst:+.2%}",
                    abs(worst) <= 0.02,
                )
            )
        least, most = min(r["c"] for r in here), max(r["c"] for r in here)
        if least < most:
            for what in ("memory_simulated", "simulated"):
                value = {(r["load"], r["c"]): r[what] for r in here}
                loads = [load for load, c in value if c == least and (load, most) in value]
                if not loads:
                    continue  # only some of the trials have run
                ratios = [value[load, least] / value[load, most] for load in loads]
                name = "mean memory" if what != "simulated" else "mean response time"
                claims.append(
                    Claim(
                        f"{name} at C = {least:g} over C = {most:g}; {law}",
                        "memory falls, time rises",
                        f"{min(ratios):.2f} to {max(ratios):.2f}",
                        max(ratios) < 1 if name == "mean memory" else None,
                    )
                )
    inside = [abs(r["corrected"] - r["simulated"]) <= r["half_width"] for r in good]
    if inside:
        claims.append(
            Claim("corrected formula inside the 95 % interval, share of trials", 0.95,
                  float(np.mean(inside)))
        )  # fmt: skip
        off = max((r["memory_simulated"] / r["memory"] - 1 for r in good), key=abs)
        claims.append(
            Claim(
                "mean memory, formula against simulation: largest difference",
                "within 2 %",
                f"{off:+.2%}",
                abs(off) <= 0.02,
            )
        )
    return claims


EXPERIMENT = Experiment(
    name="trail-lemma-1",
    summary="Lemma 1 corrected and as printed against simulation; memory against C",
    paper="000, Lemma 1, Appendices C and D",
    parameters={
        "predictions": ["perfect", "exponential"],
        "shape": [1.0, 0.5, 2.0],
        "load": [0.5, 0.6, 0.7, 0.8, 0.9],
        "c": [0.0, 0.2, 0.5, 0.8, 1.0],
        "arrivals": 200_000,
        "replications": 40,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "shape": "of the Weibull sizes, of mean 1; 1 is exponential",
        "load": "arrivals per unit of time",
        "simulated": "mean response time, with the workload as control variate",
        "half_width": "of its 95 % interval over replications",
        "corrected": "mean response time by the corrected formula",
        "printed": "mean response time by Lemma 1 as printed",
        "corrected_error": "formula over simulation, minus 1",
        "printed_error": "formula over simulation, minus 1",
        "memory": "mean over time of the summed ages in the system, by formula",
        "peak_memory": "largest sum of ages in a replication, mean over replications",
        "error": "why there is no result",
    },
    figures=[
        *(
            Figure(
                f"time-{kind}", "c", ("simulated", "corrected", "printed"), panel="load",
                where={"predictions": kind, "shape": 1.0}, title=f"{kind} predictions of "
                "exponential sizes", x_label="C", y_label="mean response time [mean sizes]",
                labels={"corrected": "Lemma 1, corrected", "printed": "Lemma 1, printed"},
            )
            for kind in PREDICTIONS
        ),
        Figure(
            "memory", "c", ("memory_simulated", "memory"), panel="load",
            where={"predictions": "exponential", "shape": 1.0}, x_label="C",
            y_label="mean sum of ages [mean sizes]", title="exponential predictions of "
            "exponential sizes", labels={"memory_simulated": "simulated", "memory": "formula"},
        ),
    ],
)  # fmt: skip
