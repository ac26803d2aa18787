"""Ranking mixed requests by arrival, input or output size (003, appendix A.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.base import measured
from optsched.experiments.studies.offline import (
    COLUMNS,
    MODEL,
    extreme,
    grid,
    pairs,
    run_on,
    share,
    worst_case,
)
from optsched.workloads.generate import generate

MIXES = ["SISO+SILO", "SISO+LISO", "SISO+LILO", "SILO+LISO", "SILO+LILO", "LISO+LILO"]


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per draw, mix, number of requests, variant and scheduler."""
    return grid(
        draw=range(parameters["draws"]),
        mix=parameters["mixes"],
        requests=parameters["requests"],
        variant=parameters["variants"],
        scheduler=["rank-org", "rank-input", "rank-output"],
        kv_capacity=[parameters["kv_capacity"]],
        cost_model=[parameters["cost_model"]],
        seed=[seed],
    )


def run(trial: Row) -> Row:
    """Draw the mix and run the scheduler; all three see the same requests."""
    instance = generate(
        "infermax-mix",
        seed=1000 * trial["seed"] + trial["draw"],
        n=trial["requests"],
        mix=trial["mix"],
        kv_capacity=trial["kv_capacity"],
    )
    options = {"text": "", "vidur": ":watermark=0.01"}[trial["variant"]]
    plain = {**trial, "scheduler": trial["scheduler"] + options, "variant": "text"}
    return measured(lambda: run_on(instance, plain))


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figures 15, 16 and 17."""
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        here = [r for r in rows if r["variant"] == variant]

        def against(first: str, second: str, pool: Sequence[Row] = here) -> list[tuple[Row, Row]]:
            return pairs(pool, "scheduler", f"rank-{first}", f"rank-{second}")

        other = [r for r in here if r["mix"] != "LISO+LILO"]
        alike = [r for r in here if r["mix"] == "LISO+LILO"]
        roomy = [r for r in here if "LILO" not in r["mix"]]
        frequent = [r for r in here if r["mix"] == "SILO+LILO"]
        tight = [r for r in here if "LILO" in r["mix"]]
        upto = [
            ("latency of rank-output over rank-input", 1.3, "makespan_s", "input", "output", here),
            ("latency of rank-org over rank-input", 1.4, "makespan_s", "input", "org", here),
            ("mean latency of rank-output over rank-input with SILO+LILO", 1.3, "tel_s", "input",
             "output", frequent),
            ("mean latency of rank-org over rank-input with SILO+LILO", 1.4, "tel_s", "input",
             "org", frequent),
            ("TTFT of rank-output over rank-input, but LILO+LISO", 3.0, "mean_ttft_s", "input",
             "output", other),
            ("TTFT of rank-org over rank-input, but LILO+LISO", 2.0, "mean_ttft_s", "input",
             "org", other),
            ("TTFT of rank-input over rank-output in LILO+LISO", 1.6, "mean_ttft_s", "output",
             "input", alike),
            ("TTFT of rank-org over rank-output in LILO+LISO", 2.1, "mean_ttft_s", "output",
             "org", alike),
            ("TPOT of rank-output over rank-input with LILO", 1.3, "mean_tpot_s", "input",
             "output", tight),
            ("TPOT of rank-input over rank-output without LILO", 1.7, "mean_tpot_s", "output",
             "input", roomy),
            ("TPOT of rank-org over rank-output without LILO", 1.3, "mean_tpot_s", "output",
             "org", roomy),
        ]  # fmt: skip
        for words, paper, metric, first, second, pool in upto:
            found = against(first, second, pool)
            if found:
                claims.append(worst_case(f"{variant}: most {words}", paper, found, metric))
        found = against("org", "input", other)
        if found:
            least = extreme(found, "mean_ttft_s", max)
            claims.append(
                Claim(
                    f"{variant}: rank-input has the lower TTFT of rank-org, but LILO+LISO",
                    "always",
                    share(found, lambda p: p[1]["mean_ttft_s"] <= 1.001 * p[0]["mean_ttft_s"]),
                    None if least is None else least <= 1.001,
                )
            )
    return claims


EXPERIMENT = Experiment(
    name="infermax-ranking",
    summary="mixes of short and long requests, ranked by arrival, input or output size",
    paper="003, appendix A.3 (Figures 15 to 17)",
    parameters={
        "draws": 3,
        "mixes": MIXES,
        "requests": [16, 32, 64, 128, 256, 512, 1024],
        "variants": ["text", "vidur"],
        "kv_capacity": 100_000,
        "cost_model": MODEL,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={**COLUMNS, "mix": "two groups, each of short or long input and output"},
    figures=[
        Figure(name, "requests", column, series="scheduler", panel="mix", log="x",
               over="rank-input", where={"variant": "text"},
               x_label="requests", y_label=f"{words} over rank-input's")
        for name, column, words in (
            ("ttft", "mean_ttft_s", "mean TTFT"), ("tpot", "mean_tpot_s", "mean TPOT"),
            ("makespan", "makespan_s", "makespan"),
        )
    ],
)  # fmt: skip
