"""Do evictions always hurt? (InferMax, Kim et al. 2024, sections 4.3 to 4.5)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optsched import Problem
from optsched.costs.load import load_cost_model
from optsched.experiments.base import Claim, Experiment, Row
from optsched.optimize.solve import solve
from optsched.workloads.generate import generate

from .drawing import Figure
from .infermax import (
    COLUMNS,
    MODEL,
    PAPER,
    POWERS,
    SCHEDULERS,
    SHARED,
    extreme,
    pairs,
    run_fixed,
)
from .parts import (
    claim,
    distinct,
    judged,
    measured,
    quiet,
    select,
    sweep,
)

# --- eviction-free schedulers ---------------------------------------------------------------------

PUBLISHED = {
    # scheduler: TPS gain, TTFT factor, TPOT factor (None: not stated)
    "vllm": (1.069, 1800.0, 13.0),
    "sarathi": (1.017, 1.917, 6.5),
    "sarathi-pc": (1.031, None, None),
}


def eviction_free_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figure 8."""
    claims = []
    for variant in distinct(rows, "variant"):
        for scheduler, (tps, ttft, tpot) in PUBLISHED.items():
            here = select(rows, variant=variant, scheduler=scheduler)
            found = pairs(here, "eviction_free", False, True)
            back = pairs(here, "eviction_free", True, False)
            if not found:
                continue

            label = f"{variant}: {scheduler}"
            what = f"{label}: most TPS of eviction-free over original"
            claims.append(Claim(what, tps, extreme(found, "tps")))

            if ttft is not None and tpot is not None:
                what = f"{label}: most TTFT, the same"
                claims.append(Claim(what, ttft, extreme(found, "mean_ttft_s")))
                what = f"{label}: most TPOT of original over eviction-free"
                claims.append(Claim(what, tpot, extreme(back, "mean_tpot_s")))

            claims.append(
                claim(
                    f"{label}: eviction-free never lowers TPS",
                    "generally",
                    extreme(found, "tps", min),
                    lambda v: v >= 0.999,
                    "least ratio {:.3f}".format,
                )
            )

    for prompt, paper in ((1, 98.0), (1024, 49.0)):
        free = [
            r["mean_running"]
            for r in select(rows, prompt=prompt, eviction_free=True)
            if r.get("mean_running")
        ]
        if free:
            average = sum(free) / len(free)
            claims.append(Claim(f"mean running size, eviction-free, I = {prompt}", paper, average))

    return claims


EVICTION_FREE = Experiment(
    name="infermax-eviction-free",
    summary="eviction-free schedulers against the originals, O = B = 1024",
    paper=f"{PAPER}, section 4.3 (Figure 8)",
    parameters={"requests": 1024, "prompt": POWERS, "output": 1024, **SHARED},
    trials=sweep(
        requests="requests",
        variant="variants",
        output="output",
        prompt="prompt",
        scheduler="schedulers",
        eviction_free=[False, True],
        kv_capacity="kv_capacity",
        cost_model="cost_model",
    ),
    run=run_fixed,
    summarize=eviction_free_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            name,
            "prompt",
            column,
            series="eviction_free",
            over=False,
            panel="scheduler",
            log=log,
            where={"variant": "text"},
            labels={True: "eviction-free"},
            x_label="prompt I [tokens]",
            y_label=f"{words} over the original's",
        )
        for name, column, words, log in (
            ("tps", "tps", "tokens per second", "x"),
            ("ttft", "mean_ttft_s", "mean TTFT", "xy"),
            ("tpot", "mean_tpot_s", "mean TPOT", "xy"),
        )
    ],
)


# --- KV capacity ----------------------------------------------------------------------------------

GAINS = {  # M: most TPS of the original over eviction-free
    100: {"vllm": 2.2, "sarathi": 2.3},
    1000: {"vllm": 1.2, "sarathi": 1.3},
}
LOSSES = {10_000: {"vllm": 1.5, "sarathi": 1.3}}  # the same, inverted


def memory_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figure 9."""
    claims = []
    for variant in distinct(rows, "variant"):
        for table, first, words in (
            (GAINS, True, "TPS of original over eviction-free"),
            (LOSSES, False, "TPS of eviction-free over original"),
        ):
            for capacity, published in table.items():
                for scheduler, paper in published.items():
                    where = {"variant": variant, "kv_capacity": capacity, "scheduler": scheduler}
                    found = pairs(rows, "eviction_free", first, not first, **where)
                    if found:
                        what = f"{variant}: M = {capacity}, {scheduler}: most {words}"
                        claims.append(Claim(what, paper, extreme(found, "tps")))

        used = [
            r["mean_kv"] / r["kv_capacity"]
            for r in select(rows, variant=variant, kv_capacity=1_000_000)
            if r["scheduler"] != "vllm" and r.get("mean_kv")
        ]
        what = f"{variant}: M = 1M, most mean KV of Sarathi and Sarathi P = C"
        if used:
            claims.append(claim(what, "below 20 % of M", max(used), lambda v: v < 0.2, ".1%"))

    return claims


MEMORY = Experiment(
    name="infermax-memory",
    summary="M from 100 to 1M tokens, O = 32, 1024 requests, with and without evictions",
    paper=f"{PAPER}, section 4.4 (Figure 9)",
    parameters={
        "requests": 1024,
        "prompt": POWERS,
        "output": 32,
        **SHARED,
        "kv_capacity": [100, 1000, 10_000, 100_000, 1_000_000],
    },
    trials=sweep(
        requests="requests",
        variant="variants",
        output="output",
        kv_capacity="kv_capacity",
        prompt="prompt",
        scheduler="schedulers",
        eviction_free=[False, True],
        cost_model="cost_model",
        where=lambda row: row["prompt"] + row["output"] - 1 <= row["kv_capacity"],
    ),
    run=run_fixed,
    summarize=memory_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            f"tps-{scheduler}",
            "prompt",
            "tps",
            series="eviction_free",
            over=False,
            panel="kv_capacity",
            log="x",
            where={"variant": "text", "scheduler": scheduler},
            labels={True: "eviction-free", "kv_capacity": "M ="},
            title=f"{scheduler} without evictions over itself",
            x_label="prompt I [tokens]",
            y_label="tokens per second over the original's",
        )
        for scheduler in SCHEDULERS
    ],
)


# --- the optimum ----------------------------------------------------------------------------------

EXTRAS: dict[str, dict[str, Any]] = {"": {}, "ef_": {"eviction_free": True}}
SPECS = {"vllm_ms": "vllm", "vllm_ef_ms": "vllm:eviction_free=true", "sarathi_ms": "sarathi"}


@measured
@quiet()
def run_csp(trial: Row) -> Row:
    """Find the optimum with and without evictions, and run the schedulers."""
    instance = generate(
        "infermax-fixed",
        n=trial["requests"],
        **{name: trial[name] for name in ("prompt", "output", "kv_capacity")},
    )
    cost = load_cost_model(trial["cost_model"])
    row: Row = {}

    for label, extras in EXTRAS.items():
        result = solve(
            Problem(instance, cost, "makespan"),
            formulation="infermax",
            method=trial["method"],
            time_limit_s=trial["time_limit_s"],
            threads=1,
            **extras,
        )
        row[f"{label}status"] = result.status
        row[f"{label}optimum_ms"] = _ms(result.value)
        row[f"{label}bound_ms"] = _ms(result.bound)
        if not label and result.evaluation is not None:
            row["evictions"] = result.evaluation.metrics["evictions"]

    for column, spec in SPECS.items():
        row[column] = _ms(judged(instance, spec, cost).metrics["makespan"])

    return row


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def csp_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of section 4.5."""
    solved = [r for r in rows if r.get("optimum_ms") and r.get("ef_optimum_ms")]
    if not solved:
        return []

    proved = all(r["status"] == r["ef_status"] == "optimal" for r in solved)
    evicting = max((r["prompt"] for r in solved if r["evictions"]), default=0)
    gain = max(r["ef_optimum_ms"] / r["optimum_ms"] - 1 for r in solved)
    loss = [1 - r["vllm_ef_ms"] / r["vllm_ms"] for r in solved if r["prompt"] >= 128]
    close = max(min(r["vllm_ms"], r["vllm_ef_ms"]) / r["optimum_ms"] for r in solved)
    words = f"<= {evicting} (of powers of 2)" if evicting else "never"
    what = "vLLM, the better of the two, over the optimum: most"
    claims = [
        Claim("every case proved optimal", "yes", "yes" if proved else "no", proved),
        Claim("the optimum evicts for I", "< 128", words, evicting == 64),
        Claim("most latency of the eviction-free optimum over the optimum, less 1", 0.352, gain),
        claim(what, "close to the optimum", close, lambda v: v <= 1.15, ".3f"),
    ]

    if loss:
        what = "most latency saved by eviction-free vLLM over vLLM, I >= 128"
        claims.append(Claim(what, 0.275, max(loss)))

    return claims


CSP = Experiment(
    name="infermax-csp",
    summary="the optimum of four equal requests, with and without evictions, over I",
    paper=f"{PAPER}, section 4.5",
    parameters={
        "requests": 4,
        "output": 4,
        "prompt": POWERS,
        "method": "labels",
        "time_limit_s": 60.0,
        "cost_model": MODEL,
    },
    trials=sweep(
        requests="requests",
        output="output",
        prompt="prompt",
        kv_capacity=lambda row, _: max(2 * row["prompt"], row["prompt"] + row["output"] - 1),
        method="method",
        time_limit_s="time_limit_s",
        cost_model="cost_model",
    ),
    run=run_csp,
    summarize=csp_claims,
    columns={
        "optimum_ms": "smallest makespan found, ms; ef_optimum_ms is that without evictions",
        "bound_ms": "lower bound of the makespan, ms; equal to the optimum when it is proved",
        "evictions": "number of evictions in the optimum",
        "vllm_ms": "makespan of vLLM, ms; likewise of eviction-free vLLM and of Sarathi",
    },
    figures=[
        Figure(
            "makespan",
            "prompt",
            ("optimum_ms", "ef_optimum_ms", *SPECS),
            log="xy",
            labels={
                "optimum_ms": "optimum",
                "ef_optimum_ms": "optimum without evictions",
                "vllm_ms": "vLLM",
                "vllm_ef_ms": "vLLM without evictions",
                "sarathi_ms": "Sarathi",
            },
            x_label="prompt I [tokens]",
            y_label="makespan [ms]",
        )
    ],
)
