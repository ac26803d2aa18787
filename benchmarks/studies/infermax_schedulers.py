"""Which scheduler, which batch size, which order (InferMax, Kim et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optsched.experiments.base import Claim, Experiment, Row
from optsched.workloads.generate import generate

from .drawing import Figure
from .infermax import (
    COLUMNS,
    MODEL,
    PAPER,
    POWERS,
    SHARED,
    extreme,
    pairs,
    run_fixed,
    run_on,
    share,
)
from .parts import (
    Count,
    claim,
    distinct,
    measured,
    select,
    sweep,
)

LIMITED = "sarathi:max_running=128"
"""Sarathi with the batch size that its simulator has by default."""


# --- contention -----------------------------------------------------------------------------------


def contention_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figures 5, 6 and 12."""
    claims = []
    for variant in distinct(rows, "variant"):
        high = [r for r in select(rows, variant=variant) if r["requests"] >= 1024]
        low = [r for r in select(rows, variant=variant) if r["requests"] <= 32]
        found = pairs(high, "scheduler", "vllm", "sarathi")
        limited = pairs([r for r in high if r["output"] >= 32], "scheduler", "vllm", LIMITED)
        back = pairs(high, "scheduler", "sarathi", "vllm")
        where = f"{variant}: B = 1024"

        if found:
            fast = share(found, lambda a, b: b["tps"] <= 1.001 * a["tps"])
            least, drop = extreme(found, "tps", min), 1 - 0.409
            claims += [
                Claim(f"{where}, vLLM's TPS is at least Sarathi's", "mostly", fast),
                Claim(f"{where}, least TPS of Sarathi over vLLM's", drop, least),
                Claim(
                    f"{variant}: the same for Sarathi with R_max = 128, O >= 32",
                    drop,
                    extreme(limited, "tps", min),
                ),
                Claim(
                    f"{where}, most TPOT of vLLM over Sarathi's", 5.0, extreme(back, "mean_tpot_s")
                ),
            ]

        where = f"{variant}: B = 32"
        if low:
            evicted = sum(r.get("evictions") or 0 for r in low)
            claims.append(Claim(f"{where}, evictions", "none", str(evicted), not evicted))
            for other in ("sarathi", "sarathi-nohy"):
                slower = share(
                    pairs(low, "scheduler", "vllm", other),
                    lambda a, b: b["makespan_s"] >= 0.999 * a["makespan_s"],
                )
                claims.append(Claim(f"{where}, {other} no faster than vLLM", "always", slower))

            worst = extreme(pairs(low, "scheduler", "vllm", "sarathi-nohy"), "makespan_s")
            if worst is not None:
                what = f"{where}, most latency of sarathi-nohy over vLLM's"
                paper = "much higher as I grows"
                claims.append(claim(what, paper, worst, lambda v: v > 1.3, ".2f"))

    return claims


OUTPUTS = {o: f"output O = {o} tokens" for o in (1, 32, 1024)}

CONTENTION = Experiment(
    name="infermax-contention",
    summary="Table 1's schedulers over I and O, 1024 and 32 requests at once",
    paper=f"{PAPER}, sections 4.2 and A.1 (Figures 5, 6, 12)",
    parameters={
        "requests": [1024, 32],
        "prompt": POWERS,
        "output": [1, 32, 1024],
        **SHARED,
        "schedulers": [
            "vllm",
            "vllm-hy",
            "sarathi",
            "sarathi-pc",
            "sarathi-nocp",
            "sarathi-nohy",
            LIMITED,
        ],
    },
    trials=sweep(
        requests="requests",
        variant="variants",
        output="output",
        prompt="prompt",
        scheduler="schedulers",
        kv_capacity="kv_capacity",
        cost_model="cost_model",
    ),
    run=run_fixed,
    summarize=contention_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            "tps-1024",
            "prompt",
            "tps",
            series="scheduler",
            panel="output",
            log="x",
            over="vllm",
            where={"requests": 1024, "variant": "text"},
            labels=OUTPUTS,
            reference={"least published for Sarathi": 1 - 0.409},
            title="1024 requests: throughput",
            x_label="prompt I [tokens]",
            y_label="tokens per second over vLLM's",
        ),
        Figure(
            "makespan-32",
            "prompt",
            "makespan_s",
            series="scheduler",
            panel="output",
            log="x",
            over="vllm",
            where={"requests": 32, "variant": "text"},
            labels=OUTPUTS,
            title="32 requests: makespan",
            x_label="prompt I [tokens]",
            y_label="makespan over vLLM's",
        ),
    ],
)


# --- how many requests run at once ----------------------------------------------------------------

BEST = {32: 512, 1024: 128}
"""The R_max at which the paper finds the highest TPS, by O."""


def rmax_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the R_max at which TPS peaks, for every scheduler and I (Figure 11)."""
    claims = []
    for variant in distinct(rows, "variant"):
        for output, paper in BEST.items():
            best: dict[tuple[str, int], Row] = {}
            for row in select(rows, variant=variant, output=output):
                key = row["scheduler"], row["prompt"]
                # The smallest of equals counts, since a limit that does not bind is no better.
                least = 1.002 * best[key]["tps"] if key in best else 0
                if row.get("tps") and row["tps"] > least:
                    best[key] = row

            for scheduler in distinct(best.values(), "scheduler"):
                peaks = [row["max_running"] for key, row in best.items() if key[0] == scheduler]
                claims.append(
                    Claim(
                        f"{variant}: O = {output}, {scheduler}: R_max of the highest TPS by I",
                        f"up to {paper}" if output == 32 else str(paper),
                        " ".join(map(str, peaks)),
                        (max(peaks) if output == 32 else peaks[0]) == paper,
                    )
                )

    return claims


RMAX = Experiment(
    name="infermax-rmax",
    summary="R_max from 32 to 512, O = 32 and 1024, 1024 requests",
    paper=f"{PAPER}, section 4.6 (Figure 11)",
    parameters={
        "requests": 1024,
        "prompt": POWERS,
        "output": [32, 1024],
        "max_running": [32, 64, 128, 256, 512],
        **SHARED,
    },
    trials=sweep(
        requests="requests",
        variant="variants",
        output="output",
        prompt="prompt",
        scheduler="schedulers",
        max_running="max_running",
        kv_capacity="kv_capacity",
        cost_model="cost_model",
    ),
    run=run_fixed,
    summarize=rmax_claims,
    columns=COLUMNS,
    figures=[
        Figure(
            f"tps-o{output}",
            "max_running",
            "tps",
            series="prompt",
            panel="scheduler",
            log="x",
            where={"variant": "text", "output": output},
            labels={i: f"I = {i}" for i in POWERS},
            title=f"throughput by R_max, output O = {output} tokens",
            x_label="R_max [requests]",
            y_label="tokens per second",
        )
        for output in BEST
    ],
)


# --- ranking --------------------------------------------------------------------------------------

MIXES = ["SISO+SILO", "SISO+LISO", "SISO+LILO", "SILO+LISO", "SILO+LILO", "LISO+LILO"]
PLACES: dict[str, Callable[[str], bool]] = {
    "": lambda mix: True,
    " with SILO+LILO": lambda mix: mix == "SILO+LILO",
    ", but LILO+LISO": lambda mix: mix != "LISO+LILO",
    " in LILO+LISO": lambda mix: mix == "LISO+LILO",
    " with LILO": lambda mix: "LILO" in mix,
    " without LILO": lambda mix: "LILO" not in mix,
}
UP_TO = [
    # words, metric, ranked by, over ranked by, where, published
    ("latency", "makespan_s", "output", "input", "", 1.3),
    ("latency", "makespan_s", "org", "input", "", 1.4),
    ("mean latency", "tel_s", "output", "input", " with SILO+LILO", 1.3),
    ("mean latency", "tel_s", "org", "input", " with SILO+LILO", 1.4),
    ("TTFT", "mean_ttft_s", "output", "input", ", but LILO+LISO", 3.0),
    ("TTFT", "mean_ttft_s", "org", "input", ", but LILO+LISO", 2.0),
    ("TTFT", "mean_ttft_s", "input", "output", " in LILO+LISO", 1.6),
    ("TTFT", "mean_ttft_s", "org", "output", " in LILO+LISO", 2.1),
    ("TPOT", "mean_tpot_s", "output", "input", " with LILO", 1.3),
    ("TPOT", "mean_tpot_s", "input", "output", " without LILO", 1.7),
    ("TPOT", "mean_tpot_s", "org", "output", " without LILO", 1.3),
]


@measured
def run_mix(trial: Row) -> Row:
    """Draw the mix and run the scheduler. All three rankings see the same requests."""
    seed = 1000 * trial["seed"] + trial["draw"]
    drawn = {name: trial[name] for name in ("mix", "kv_capacity")}
    instance = generate("infermax-mix", seed=seed, n=trial["requests"], **drawn)
    options = {"text": "", "vidur": ":watermark=0.01"}[trial["variant"]]
    plain = {**trial, "scheduler": trial["scheduler"] + options, "variant": "text"}

    return run_on(instance, plain)


def ranking_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return the statements of Figures 15, 16 and 17."""
    claims = []
    for variant in distinct(rows, "variant"):
        here = select(rows, variant=variant)
        for words, metric, first, second, place, paper in UP_TO:
            pool = [row for row in here if PLACES[place](row["mix"])]
            found = pairs(pool, "scheduler", f"rank-{second}", f"rank-{first}")
            if found:
                what = f"{variant}: most {words} of rank-{first} over rank-{second}{place}"
                claims.append(Claim(what, paper, extreme(found, metric)))

        pool = [row for row in here if row["mix"] != "LISO+LILO"]
        found = pairs(pool, "scheduler", "rank-org", "rank-input")
        lower = share(found, lambda a, b: b["mean_ttft_s"] <= 1.001 * a["mean_ttft_s"])
        what = f"{variant}: rank-input has the lower TTFT of rank-org, but LILO+LISO"

        if found:
            worst = extreme(found, "mean_ttft_s")
            claims.append(Claim(what, "always", lower, worst is not None and worst <= 1.001))

    return claims


RANKING = Experiment(
    name="infermax-ranking",
    summary="mixes of short and long requests, ranked by arrival, input or output size",
    paper=f"{PAPER}, appendix A.3 (Figures 15 to 17)",
    parameters={
        "draws": 3,
        "mixes": MIXES,
        "requests": [16, 32, 64, 128, 256, 512, 1024],
        "variants": ["text", "vidur"],
        "kv_capacity": 100_000,
        "cost_model": MODEL,
    },
    trials=sweep(
        draw=Count("draws"),
        mix="mixes",
        requests="requests",
        variant="variants",
        scheduler=["rank-org", "rank-input", "rank-output"],
        kv_capacity="kv_capacity",
        cost_model="cost_model",
        seed="seed",
    ),
    run=run_mix,
    summarize=ranking_claims,
    columns={**COLUMNS, "mix": "two groups, each of short or long input and output"},
    figures=[
        Figure(
            name,
            "requests",
            column,
            series="scheduler",
            panel="mix",
            log="x",
            over="rank-input",
            where={"variant": "text"},
            x_label="requests",
            y_label=f"{words} over rank-input's",
        )
        for name, column, words in (
            ("ttft", "mean_ttft_s", "mean TTFT"),
            ("tpot", "mean_tpot_s", "mean TPOT"),
            ("makespan", "makespan_s", "makespan"),
        )
    ],
)
