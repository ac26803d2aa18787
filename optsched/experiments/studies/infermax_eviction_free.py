"""Eviction-free schedulers beside their originals (003, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.studies.offline import (
    COLUMNS,
    MODEL,
    POWERS,
    SCHEDULERS,
    extreme,
    grid,
    pairs,
    run_fixed,
    worst_case,
)

PUBLISHED = {
    # scheduler: TPS gain, TTFT factor, TPOT factor (None: not stated)
    "vllm": (1.069, 1800.0, 13.0),
    "sarathi": (1.017, 1.917, 6.5),
    "sarathi-pc": (1.031, None, None),
}


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per variant, I, scheduler, and eviction-free or not."""
    return grid(
        requests=[parameters["requests"]],
        variant=parameters["variants"],
        output=[parameters["output"]],
        prompt=parameters["prompt"],
        scheduler=parameters["schedulers"],
        eviction_free=[False, True],
        kv_capacity=[parameters["kv_capacity"]],
        cost_model=[parameters["cost_model"]],
    )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figure 8."""
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for scheduler, (tps, ttft, tpot) in PUBLISHED.items():
            where = {"variant": variant, "scheduler": scheduler}
            found = pairs(rows, "eviction_free", False, True, **where)
            back = pairs(rows, "eviction_free", True, False, **where)
            if not found:
                continue
            label = f"{variant}: {scheduler}"
            claims.append(
                worst_case(f"{label}: most TPS of eviction-free over original", tps, found, "tps")
            )
            if ttft is not None and tpot is not None:
                claims += [
                    worst_case(f"{label}: most TTFT, the same", ttft, found, "mean_ttft_s"),
                    worst_case(
                        f"{label}: most TPOT of original over eviction-free", tpot, back,
                        "mean_tpot_s",
                    ),
                ]  # fmt: skip
            least = extreme(found, "tps", min)
            claims.append(
                Claim(
                    f"{label}: eviction-free never lowers TPS", "generally",
                    None if least is None else f"least ratio {least:.3f}",
                    None if least is None else least >= 0.999,
                )
            )  # fmt: skip
    for prompt, paper in ((1, 98.0), (1024, 49.0)):
        free = [
            r["mean_running"]
            for r in rows
            if r["prompt"] == prompt and r["eviction_free"] and r.get("mean_running")
        ]
        if free:
            mean = sum(free) / len(free)
            claims.append(Claim(f"mean running size, eviction-free, I = {prompt}", paper, mean))
    return claims


EXPERIMENT = Experiment(
    name="infermax-eviction-free",
    summary="eviction-free schedulers beside the originals, O = B = 1024",
    paper="003, section 4.3 (Figure 8)",
    parameters={
        "requests": 1024,
        "prompt": POWERS,
        "output": 1024,
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
        Figure(name, "prompt", column, series="eviction_free", over=False, panel="scheduler",
               log=log, where={"variant": "text"}, labels={True: "eviction-free"},
               x_label="prompt I [tokens]", y_label=f"{words} over the original's")
        for name, column, words, log in (
            ("tps", "tps", "tokens per second", "x"),
            ("ttft", "mean_ttft_s", "mean TTFT", "xy"),
            ("tpot", "mean_tpot_s", "mean TPOT", "xy"),
        )
    ],
)  # fmt: skip
