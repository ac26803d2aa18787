"""Splits of machines into prefill and decode pools on a public trace: intervals and verdicts.

    OPTSCHED_DATA=DIR python benchmarks/splits.py [--trace code|conv] [--rate 4] [--workers 8]
        [--policy vllm] [--pooled]

DIR holds the Azure traces of 2023, AzureLLMInferenceTrace_code.csv and _conv.csv, or a folder azure
with them. `--pooled` prints the bound for equal workers instead, from work alone and with prices of
machine time, for 4 and 8 workers at 4 and 8 times the rate.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import optsched
from optsched import Fleet, Instance, Problem, load_cost_model
from optsched.analysis.capacity_question import scale_arrivals
from optsched.bounds import lower_bound
from optsched.workloads.traces import read_trace

MODEL = "llama2-7b-a100-infermax"
LINK = "latency=1ms,bandwidth=25GB/s,model=llama2-7b"
SLOS = {"code": (5.0, 0.1), "conv": (1.0, 0.1)}
"""Limits on TTFT and TPOT by trace, in seconds."""


def trace(name: str, rate: float) -> Instance:
    folder, file = Path(os.environ.get("OPTSCHED_DATA", ".")), f"AzureLLMInferenceTrace_{name}.csv"
    found = [path for path in (folder / file, folder / "azure" / file) if path.exists()]
    if not found:
        sys.exit(f"{file}: not in OPTSCHED_DATA={folder}")

    instance = read_trace("azure", found[0], kv_accounting="cached", prefixes=False)
    return scale_arrivals(replace(instance, kv_capacity=100_000), rate)


def pooled(name: str) -> None:
    cost = load_cost_model(MODEL)
    print("| trace | workers | rate | work alone | with prices |\n|---|---|---|---|---|")
    for workers in (4, 8):
        for rate in (4.0, 8.0):
            instance, values = trace(name, rate), []
            for method in ("work", "busy-time"):
                value, _ = lower_bound(
                    Problem(instance, Fleet.of(workers, cost)), method=method, time_limit_s=60.0
                )
                values.append(f"{(value or 0) / instance.n:.3f}")
            print(f"| {name} | {workers} | x{rate:g} | {' | '.join(values)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=tuple(SLOS), default="code")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--pooled", action="store_true")
    options = parser.parse_args()
    if options.pooled:
        pooled(options.trace)
        return

    instance, (ttft, tpot) = trace(options.trace, options.rate), SLOS[options.trace]
    wall, cpu = time.perf_counter(), time.process_time()
    specs = options.policy or ["vllm"]
    found = optsched.splits(
        optsched.Problem(
            instance,
            optsched.Fleet.of(options.workers, MODEL, link=LINK),
            slo_ttft=ttft,
            slo_tpot=tpot,
        ),
        specs,
        progress=lambda state: print(state.doing, file=sys.stderr, flush=True),
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for metric in found.metrics:
        print(f"\n{metric}\n\n| split | bound | found | policy | verdict |\n|---|---|---|---|---|")
        for row in found.rows:
            bound, reached = row.bounds.get(metric), row.found.get(metric)
            shown = " | ".join(
                "" if value is None else f"{value:.4g}" for value in (bound, reached)
            )
            policy, verdict = row.policies.get(metric, ""), found.verdict(row, metric)
            print(f"| {row.pools} | {shown} | {policy} | {verdict} |")

    for row in found.rows:
        for error in row.errors:
            print(f"{row.pools}: {error}")

    print(f"\n{wall:.0f} s, {cpu:.0f} s of processor time")


if __name__ == "__main__":
    main()
