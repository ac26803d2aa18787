"""How many requests should run at once (003, section 4.6)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.studies.offline import COLUMNS, MODEL, POWERS, SCHEDULERS, grid, run_fixed

BEST = {32: 512, 1024: 128}
"""R_max of the highest TPS by O."""


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per variant, O, I, scheduler and R_max."""
    return grid(
        requests=[parameters["requests"]],
        variant=parameters["variants"],
        output=parameters["output"],
        prompt=parameters["prompt"],
        scheduler=parameters["schedulers"],
        max_running=parameters["max_running"],
        kv_capacity=[parameters["kv_capacity"]],
        cost_model=[parameters["cost_model"]],
    )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return where TPS peaks, for every scheduler and I (Figure 11)."""
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for output, paper in BEST.items():
            best: dict[tuple[str, int], Row] = {}
            for row in rows:
                if row["variant"] != variant or row["output"] != output or not row.get("tps"):
                    continue
                key = row["scheduler"], row["prompt"]
                # Among equals the smallest: a limit that does not bind is not better.
                if key not in best or row["tps"] > 1.002 * best[key]["tps"]:
                    best[key] = row
            for scheduler in dict.fromkeys(key[0] for key in best):
                peaks = [row["max_running"] for key, row in best.items() if key[0] == scheduler]
                claims.append(
                    Claim(
                        f"{variant}: O = {output}, {scheduler}: R_max of the highest TPS by I",
                        f"up to {paper}" if output == 32 else str(paper),
                        " ".join(map(str, peaks)),
                        max(peaks) == paper if output == 32 else peaks[0] == paper,
                    )
                )
    return claims


EXPERIMENT = Experiment(
    name="infermax-rmax",
    summary="R_max from 32 to 512, O = 32 and 1024, 1024 requests",
    paper="003, section 4.6 (Figure 11)",
    parameters={
        "requests": 1024,
        "prompt": POWERS,
        "output": [32, 1024],
        "max_running": [32, 64, 128, 256, 512],
        "schedulers": SCHEDULERS,
        "variants": ["text", "vidur"],
        "kv_capacity": 100_000,
        "cost_model": MODEL,
    },
    trials=trials,
    run=run_fixed,
    summarize=summarize,
    columns=COLUMNS,
    figures=[
        Figure(f"tps-o{output}", "max_running", "tps", series="prompt", panel="scheduler", log="x",
               where={"variant": "text", "output": output},
               labels={i: f"I = {i}" for i in POWERS},
               title=f"throughput by R_max, output O = {output} tokens",
               x_label="R_max [requests]", y_label="tokens per second")
        for output in BEST
    ],
)  # fmt: skip
