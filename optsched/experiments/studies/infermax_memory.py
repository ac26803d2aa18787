"""The KV capacity from 100 to a million tokens, with and without evictions (003, section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.studies.offline import (
    COLUMNS,
    MODEL,
    POWERS,
    SCHEDULERS,
    grid,
    pairs,
    run_fixed,
    worst_case,
)

GAINS = {  # M: most TPS of the original over eviction-free
    100: {"vllm": 2.2, "sarathi": 2.3},
    1000: {"vllm": 1.2, "sarathi": 1.3},
}
LOSSES = {10_000: {"vllm": 1.5, "sarathi": 1.3}}  # the same, inverted


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per variant, M, I, scheduler and mode where a request fits into M."""
    return (
        row
        for row in grid(
            requests=[parameters["requests"]],
            variant=parameters["variants"],
            output=[parameters["output"]],
            kv_capacity=parameters["kv_capacity"],
            prompt=parameters["prompt"],
            scheduler=parameters["schedulers"],
            eviction_free=[False, True],
            cost_model=[parameters["cost_model"]],
        )
        if row["prompt"] + row["output"] - 1 <= row["kv_capacity"]
    )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figure 9."""
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        for table, free_first, words in (
            (GAINS, True, "TPS of original over eviction-free"),
            (LOSSES, False, "TPS of eviction-free over original"),
        ):
            for capacity, values in table.items():
                for scheduler, paper in values.items():
                    found = pairs(
                        rows, "eviction_free", free_first, not free_first, variant=variant,
                        kv_capacity=capacity, scheduler=scheduler,
                    )  # fmt: skip
                    if found:
                        what = f"{variant}: M = {capacity}, {scheduler}: most {words}"
                        claims.append(worst_case(what, paper, found, "tps"))
        used = [
            r["mean_kv"] / r["kv_capacity"]
            for r in rows
            if r["variant"] == variant
            and r["kv_capacity"] == 1_000_000
            and r["scheduler"] != "vllm"
            and r.get("mean_kv")
        ]
        if used:
            claims.append(
                Claim(
                    f"{variant}: M = 1M, most mean KV of Sarathi and Sarathi P = C",
                    "below 20 % of M",
                    f"{max(used):.1%}",
                    max(used) < 0.2,
                )
            )
    return claims


EXPERIMENT = Experiment(
    name="infermax-memory",
    summary="M from 100 to 1M tokens, O = 32, 1024 requests, with and without evictions",
    paper="003, section 4.4 (Figure 9)",
    parameters={
        "requests": 1024,
        "prompt": POWERS,
        "output": 32,
        "kv_capacity": [100, 1000, 10_000, 100_000, 1_000_000],
        "schedulers": SCHEDULERS,
        "variants": ["text", "vidur"],
        "cost_model": MODEL,
    },
    trials=trials,
    run=run_fixed,
    summarize=summarize,
    columns=COLUMNS,
    figures=[
        Figure(f"tps-{scheduler}", "prompt", "tps", series="eviction_free", over=False,
               panel="kv_capacity", log="x", where={"variant": "text", "scheduler": scheduler},
               labels={True: "eviction-free", "kv_capacity": "M ="},
               title=f"{scheduler} without evictions over itself",
               x_label="prompt I [tokens]", y_label="tokens per second over the original's")
        for scheduler in SCHEDULERS
    ],
)  # fmt: skip
