"""MC-SF against the hindsight optimum on two synthetic models (Jaillet et al. 2025, section 5.1).

Of some trials the optimum is known only as a certified interval.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from optsched.bounds.certificate import verify_certificate
from optsched.experiments.base import Claim, Experiment, Row
from optsched.optimize.solve import solve
from optsched.problem.errors import ViolationError
from optsched.workloads.generate import generate

from .drawing import Figure
from .parts import judged, measured

PRINTED = {
    "jaillet-model-1": {"best": 1.0, "mean": 1.005, "worst": 1.074, "optimal": 114 / 200},
    "jaillet-model-2": {"best": 1.0, "mean": 1.047, "worst": 1.227},
}
"""Ratios MC-SF / optimum over 200 trials, and the share of trials where MC-SF is optimal."""


def trials(model: str, parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield trials without end. Each is a draw with a seed of its own."""
    draw = seed
    while True:
        yield {"model": model, "seed": draw, **parameters}
        draw += 1


@measured
def run(trial: Row) -> Row:
    """Bound the optimum, and compare MC-SF with the best schedule known and with the bound.

    The certificate of every few seeds is checked, and kept as it would stand in a file. One that is
    too large to check is kept with the checker's reason. A trial whose certificate is wrong fails.
    """
    fixed = {k: trial[k] for k in ("n", "kv_capacity") if trial[k]}
    instance = generate(trial["model"], seed=trial["seed"], **fixed)
    mc_sf = judged(instance, "mc-sf").metrics["tel"]
    _compile(trial["model"], trial["method"])

    with cpu_limit(trial["cpu_limit"]) as stop:
        found = solve(
            instance, method=trial["method"], time_limit_s=trial["time_limit"], threads=1, stop=stop
        )

    assert mc_sf is not None
    assert found.value is not None
    assert found.bound is not None
    every = trial["certificate_every"]
    certificate = found.certificate if every and trial["seed"] % every == 0 else None
    certified = refused = None

    if certificate is not None:
        try:
            certified = verify_certificate(instance, certificate)
        except ViolationError as error:
            if error.rule != "certificate_size":
                raise

            refused = str(error)

    return {
        "requests": instance.n,
        "capacity": instance.kv_capacity,
        "mc_sf": mc_sf,
        "best_known": found.value,
        "bound": found.bound,
        "proved": found.status == "optimal",
        "ratio_to_best_known": mc_sf / found.value,
        "ratio_to_bound": mc_sf / found.bound,
        "certified": certified,
        "refused": refused,
        "certificate": None if certificate is None else json.dumps(certificate),
    }


@cache
def _compile(model: str, method: str) -> None:
    """Solve a small instance first, so that compiling takes no time of the first trial's limits."""
    solve(generate(model, seed=0, n=8), method=method, threads=1)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[threading.Event]:
    """Yield an event that is set once this process has used so many more seconds of CPU time."""
    stop, done = threading.Event(), threading.Event()
    used = time.process_time()

    def watch() -> None:
        while not done.wait(0.05):
            if time.process_time() - used >= seconds:
                stop.set()

    if seconds:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield stop
    finally:
        done.set()


def _mean(ratios: list[float]) -> float:
    return sum(ratios) / len(ratios)


def summarize(model: str, rows: Sequence[Row]) -> list[Claim]:
    """Return the paper's ratios with the certified intervals of ours."""
    rows = [row for row in rows if row.get("bound")]
    if not rows:
        return []

    low = [row["ratio_to_best_known"] for row in rows]
    high = [row["ratio_to_bound"] for row in rows]
    claims = []
    printed = PRINTED[model]

    for name, fold in (("best", min), ("mean", _mean), ("worst", max)):
        least, most = fold(low), fold(high)
        met = least - 5e-4 <= printed[name] <= most + 5e-4
        what, ours = f"MC-SF / optimum, {name}", f"{least:.4f} to {most:.4f}"
        claims.append(Claim(what, printed[name], ours, met))

    if "optimal" in printed:
        surely = sum(ratio == 1 for ratio in high) / len(rows)
        possibly = sum(ratio == 1 for ratio in low) / len(rows)
        what, ours = "share of trials where MC-SF is optimal", f"{surely:.3f} to {possibly:.3f}"
        met = surely <= printed["optimal"] <= possibly
        claims.append(Claim(what, printed["optimal"], ours, met))

    proved = sum(row["proved"] for row in rows)
    claims.append(Claim("trials with a proved optimum", "all", f"{proved} of {len(rows)}"))
    checked = [row for row in rows if row["certificate"]]

    if checked:
        certified = sum(row["certified"] == row["bound"] for row in checked)
        what, ours = "bounds that a checked certificate proves", f"{certified} of {len(checked)}"
        claims.append(Claim(what, "none", ours))

    return claims


MODEL_1, MODEL_2 = (
    Experiment(
        name=model,
        summary=f"MC-SF against the optimum, {arrivals}",
        paper="Jaillet et al. 2025, section 5.1 (Figure 2)",
        parameters={
            "n": 0,
            "kv_capacity": 0,
            "time_limit": 60.0,
            "cpu_limit": 0.0,
            "method": "ramp",
            "certificate_every": 0,
        },
        trials=partial(trials, model),
        run=run,
        summarize=partial(summarize, model),
        default_trials=200,
        columns={
            "n": "number of requests asked for; 0: drawn as in the paper; likewise kv_capacity",
            "time_limit": "seconds for a proof; cpu_limit: CPU seconds for it, 0 for no limit",
            "certificate_every": "the certificate of every so many seeds is checked; 0: none",
            "requests": "number of requests drawn",
            "capacity": "KV capacity drawn, tokens",
            "mc_sf": "total latency of MC-SF, rounds",
            "best_known": "smallest total latency found, rounds",
            "bound": "lower bound of the total latency, rounds",
            "proved": "whether best_known equals the bound",
            "ratio_to_best_known": "mc_sf / best_known, a lower bound of the ratio to the optimum",
            "ratio_to_bound": "mc_sf / bound, an upper bound of the ratio to the optimum",
            "certified": "the bound that the certificate proves. Where an interrupted run has not "
            "got beyond the bound from sorting, it is less than the bound",
            "refused": "why the certificate is too large to check",
            "certificate": "the certificate that was checked, as JSON",
        },
        figures=[
            Figure(
                "ratios",
                "seed",
                ("ratio_to_best_known", "ratio_to_bound"),
                "histogram",
                labels={
                    "ratio_to_best_known": "over the best known",
                    "ratio_to_bound": "over the bound",
                },
                reference={
                    f"published {name}": ratio
                    for name, ratio in PRINTED[model].items()
                    if name != "optimal"
                },
                x_label="total latency of MC-SF over the optimum's, which lies between",
            )
        ],
    )
    for model, arrivals in (
        ("jaillet-model-1", "all requests at 0"),
        ("jaillet-model-2", "Poisson arrivals"),
    )
)
