"""Schedulers under high and low contention (003, section 4.2 and appendix A.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optsched.experiments import Claim, Experiment, Figure, Row
from optsched.experiments.studies.offline import (
    COLUMNS,
    MODEL,
    POWERS,
    extreme,
    grid,
    pairs,
    run_fixed,
    share,
    worst_case,
)

OUTPUTS = {o: f"output O = {o} tokens" for o in (1, 32, 1024)}
LIMITED = "sarathi:max_running=128"
"""Sarathi with the batch size that its simulator has by default."""
SCHEDULERS = [
    "vllm", "vllm-hy", "sarathi", "sarathi-pc", "sarathi-nocp", "sarathi-nohy", LIMITED,
]  # fmt: skip


def trials(parameters: Mapping[str, Any], seed: int) -> Iterable[Row]:
    """Yield one trial per number of requests, variant, O, I and scheduler."""
    return grid(
        requests=parameters["requests"],
        variant=parameters["variants"],
        output=parameters["output"],
        prompt=parameters["prompt"],
        scheduler=parameters["schedulers"],
        kv_capacity=[parameters["kv_capacity"]],
        cost_model=[parameters["cost_model"]],
    )


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figures 5, 6 and 12."""
    claims = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        here = {"variant": variant}
        high = [r for r in rows if r["requests"] >= 1024]
        found = pairs(high, "scheduler", "vllm", "sarathi", **here)
        if found:
            fast = share(found, lambda p: p[1]["tps"] <= 1.001 * p[0]["tps"])
            claims += [
                Claim(f"{variant}: B = 1024, vLLM's TPS is at least Sarathi's", "mostly", fast),
                Claim(
                    f"{variant}: B = 1024, least TPS of Sarathi over vLLM's",
                    1 - 0.409,
                    extreme(found, "tps", min),
                ),
                Claim(
                    f"{variant}: the same for Sarathi with R_max = 128, O >= 32",
                    1 - 0.409,
                    extreme(
                        pairs(
                            [r for r in high if r["output"] >= 32],
                            "scheduler",
                            "vllm",
                            LIMITED,
                            **here,
                        ),
                        "tps",
                        min,
                    ),
                ),
                worst_case(
                    f"{variant}: B = 1024, most TPOT of vLLM over Sarathi's",
                    5.0,
                    pairs(high, "scheduler", "sarathi", "vllm", **here),
                    "mean_tpot_s",
                ),
            ]
        low = [r for r in rows if r["requests"] <= 32 and r["variant"] == variant]
        if low:
            evicted = sum(r["evictions"] or 0 for r in low)
            claims.append(Claim(f"{variant}: B = 32, evictions", "none", str(evicted), not evicted))
            for other in ("sarathi", "sarathi-nohy"):
                found = pairs(low, "scheduler", "vllm", other)
                slower = share(found, lambda p: p[1]["makespan_s"] >= 0.999 * p[0]["makespan_s"])
                claims.append(
                    Claim(f"{variant}: B = 32, {other} no faster than vLLM", "always", slower)
                )
            worst = extreme(pairs(low, "scheduler", "vllm", "sarathi-nohy"), "makespan_s")
            if worst is not None:
                claims.append(
                    Claim(
                        f"{variant}: B = 32, most latency of sarathi-nohy over vLLM's",
                        "much higher as I grows",
                        f"{worst:.2f}",
                        worst > 1.3,
                    )
                )
    return claims


EXPERIMENT = Experiment(
    name="infermax-contention",
    summary="Table 1's schedulers over I and O, 1024 and 32 requests at once",
    paper="003, sections 4.2 and A.1 (Figures 5, 6, 12)",
    parameters={
        "requests": [1024, 32],
        "prompt": POWERS,
        "output": [1, 32, 1024],
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
        Figure("tps-1024", "prompt", "tps", series="scheduler", panel="output", log="x",
               over="vllm", where={"requests": 1024, "variant": "text"}, labels=OUTPUTS,
               reference={"least published for Sarathi": 1 - 0.409},
               title="1024 requests: throughput", x_label="prompt I [tokens]",
               y_label="tokens per second over vLLM's"),
        Figure("makespan-32", "prompt", "makespan_s", series="scheduler", panel="output", log="x",
               over="vllm", where={"requests": 32, "variant": "text"}, labels=OUTPUTS,
               title="32 requests: makespan", x_label="prompt I [tokens]",
               y_label="makespan over vLLM's"),
    ],
)  # fmt: skip
