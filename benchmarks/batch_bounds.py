"""Regenerate the table of docs/lab/batch-bounds.md: schedulers and bounds on a trace.

    OPTSCHED_DATA=DIR python benchmarks/batch_bounds.py [--rates 0.25,0.5,1,2,4,8] [--bound-s 90]
                      [--search-s 60] [--seed 0] [-o FILE.md]

DIR holds the Azure trace AzureLLMInferenceTrace_conv.csv (or azure/ with it). Rates scale
arrivals. Times are seconds of processor time, limits are of wall time.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from pathlib import Path

import numba
import numpy as np

import optsched
from optsched import Instance, evaluate, load_cost_model, simulate
from optsched.bounds import bounds, lower_bound
from optsched.costs.cost import BatchCost
from optsched.optimize.search.offline import improve
from optsched.policies import allows, policies
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.workloads.traces import read_trace

MODEL = "llama2-7b-a100-infermax"
METRICS = ("mean_latency", "makespan", "mean_ttft")
FILE = "AzureLLMInferenceTrace_conv.csv"


def trace(rate: float) -> Instance:
    """Return the conversation trace with its arrivals `rate` times as dense."""
    folder = Path(os.environ.get("OPTSCHED_DATA", "."))
    found = [p for p in (folder / FILE, folder / "azure" / FILE) if p.is_file()]
    if not found:
        sys.exit(f"{FILE}: not in OPTSCHED_DATA={folder}")
    return read_trace("azure", found[0], rate_scale=rate, kv_accounting="cached")


def row(rate: float, cost: BatchCost, bound_s: float, search_s: float, seed: int) -> list[str]:
    """Return the lines of one rate."""
    instance = trace(rate)
    out = [f"\n### x{rate:g}\n"]
    values: dict[str, dict[str, float]] = {}
    for name in policies():
        if allows(name, instance) is not None:
            continue
        begin = time.process_time()
        try:
            schedule = simulate(instance, name, cost, seed=seed)
        except OptschedError as error:
            out.append(f"{name}: {error}\n")
            continue
        wall = time.process_time() - begin
        values[name] = measure(instance, schedule, cost) | {"s": wall}
    begin = time.process_time()
    schedule, _ = improve(instance, cost, Budget(search_s), seed=seed)
    values["**offline search**"] = measure(instance, schedule, cost) | {
        "s": time.process_time() - begin
    }
    lower: dict[str, float] = {}
    for objective, metric in (("tel", "mean_latency"), ("makespan",) * 2, ("mean_ttft",) * 2):
        begin = time.process_time()
        for name, bound in bounds().items():
            if bound.time_unit != "second" or objective not in bound.objectives:
                continue
            before = time.process_time()
            value, _ = lower_bound(
                instance, cost_model=cost, objective=objective, method=name, time_limit_s=bound_s
            )
            assert value is not None
            value = value / instance.n if objective == "tel" else value
            out.append(
                f"- `{name}`: {metric} >= {value:.4f} s, {time.process_time() - before:.1f} s"
            )
            lower[metric] = max(lower.get(metric, 0.0), value)
    out += [
        "",
        "| scheduler | mean latency | / bound | makespan | / bound | mean TTFT | / bound | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells = " | ".join(f"**{lower[m]:.4f}** | " for m in METRICS)
    out.append(f"| **bound** | {cells} | |")
    for name, found in sorted(values.items(), key=lambda item: item[1]["mean_latency"]):
        cells = " | ".join(f"{found[m]:.3f} | {found[m] / lower[m]:.3f}" for m in METRICS)
        out.append(f"| {name} | {cells} | {found['s']:.1f} |")
    return out


def measure(instance: Instance, schedule: optsched.Schedule, cost: BatchCost) -> dict[str, float]:
    """Return the metrics of the table."""
    with warnings.catch_warnings():  # of batches beyond the cost model's range: see the docs
        warnings.simplefilter("ignore")
        metrics = evaluate(instance, schedule, cost).metrics
    return {name: float(metrics[name] or 0.0) for name in METRICS}


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="0.25,0.5,1,2,4,8")
    parser.add_argument("--bound-s", type=float, default=60.0, help="per bound")
    parser.add_argument("--search-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    cost = load_cost_model(MODEL)
    lines = [
        f"optsched {optsched.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, numba {numba.__version__}, {platform.machine()}, one thread, seed "
        f"{options.seed}; {options.bound_s:g} s per bound, {options.search_s:g} s of search."
    ]
    small = trace(1.0).subset(np.arange(20))  # loads what is compiled
    improve(small, cost, Budget(1.0))
    lower_bound(small, cost_model=cost, time_limit_s=2.0)
    for rate in map(float, options.rates.split(",")):
        lines += row(rate, cost, options.bound_s, options.search_s, options.seed)
        text = "\n".join(lines) + "\n"
        print(text.split("### ")[-1], flush=True)
        if options.output is not None:
            options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
