"""Regenerate the tables behind docs/lab/batch-bounds.md: schedulers and bounds on a trace.

    OPTSCHED_DATA=DIR python benchmarks/batch_bounds.py [--rates 0.25,0.5,1,2,4,8] [--bound-s 90]
                      [--search-s 60] [--seed 0] [-o FILE.md] [--picture FILE.png]
                      [--model MODEL] [--trace azure|azure-code|mooncake] [--loads 0.5,0.9]
                      [--first N] [--policies vllm,mc-sf] [--bounds busy-time,pieces]
                      [--kv-capacity TOKENS[,TOKENS]] [--prefixes]

DIR holds the Azure traces AzureLLMInferenceTrace_conv.csv and _code.csv (or azure/ with them), or a
trace in mooncake/. Rates scale arrivals. Loads do too: at load 1 the work that no schedule avoids
takes as long as the trace. With prefixes, engines may claim cached blocks; loads stay those of work
without reuse, at the first KV capacity. Behind the tables of all rates stands one with a row a
capacity and rate. The picture has a point for each rate. Times are seconds of processor
time, limits are of wall time.
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
from optsched import Instance, Problem, evaluate, load_cost_model
from optsched.bounds import lower_bound, raise_bound, usable
from optsched.bounds.base import BoundTask, Proof
from optsched.bounds.batch import unavoidable_work
from optsched.bounds.certificate import certified_value, certify
from optsched.costs.cost import BatchCost
from optsched.optimize.search.offline import improve
from optsched.policies import allows, list_policies
from optsched.policies.engine.simulate import completions, simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.problem.instance import canonical_json
from optsched.problem.objective import parse_objective
from optsched.show.plot import plot_load, style
from optsched.workloads.traces import read_trace

MODEL = "llama2-7b-a100-infermax"
METRICS = ("mean_latency", "makespan", "mean_ttft")
TRACES = {
    "azure": ("AzureLLMInferenceTrace_conv.csv", "azure/AzureLLMInferenceTrace_conv.csv"),
    "azure-code": ("AzureLLMInferenceTrace_code.csv", "azure/AzureLLMInferenceTrace_code.csv"),
    "mooncake": ("mooncake/*.jsonl",),
}
SHOWN = ("vllm", "sarathi", "fcfs", "mc-sf", "least-work")
"""The schedulers of the picture."""


def trace(rate: float, capacity: int, options: argparse.Namespace, prefixes: bool) -> Instance:
    """Return a trace, or its first requests, with its arrivals `rate` times as dense."""
    name, first = options.trace, options.first
    folder = Path(os.environ.get("OPTSCHED_DATA", "."))
    found = [path for pattern in TRACES[name] for path in sorted(folder.glob(pattern))]
    if not found:
        sys.exit(f"{TRACES[name][0]}: not in OPTSCHED_DATA={folder}")
    layout = name.partition("-")[0]
    instance = read_trace(
        layout,
        found[0],
        rate_scale=rate,
        kv_accounting="cached",
        kv_capacity=capacity,
        prefixes=prefixes,
    )
    return instance if first is None else instance.subset(np.arange(min(first, instance.n)))


def rate_at(load: float, instance: Instance, cost: BatchCost) -> float:
    """Return how much denser arrivals must be for a load."""
    span = float(instance.release.max())
    return load * span / float(unavoidable_work(instance, cost).total.sum())


def row(
    instance: Instance, rate: float, cost: BatchCost, options: argparse.Namespace
) -> tuple[list[str], dict[str, float]]:
    """Return the lines of one rate, and mean latencies by scheduler."""
    out = [f"\n### x{rate:g}\n"]
    values: dict[str, dict[str, float]] = {}
    for name in options.policies.split(",") if options.policies else list_policies():
        if allows(name, instance) is not None:
            continue
        begin = time.process_time()
        try:
            schedule = simulate(Problem(instance, cost), name, seed=options.seed)
        except OptschedError as error:
            out.append(f"{name}: {error}\n")
            continue
        wall = time.process_time() - begin
        values[name] = measure(instance, schedule, cost) | {"s": wall}
    begin = time.process_time()
    schedule, _ = improve(Problem(instance, cost), Budget(options.search_s), seed=options.seed)
    values["**offline search**"] = measure(instance, schedule, cost) | {
        "s": time.process_time() - begin
    }
    lower: dict[str, float] = {}
    for objective, metric in (("tel", "mean_latency"), ("makespan",) * 2, ("mean_ttft",) * 2):
        begin = time.process_time()
        goal = parse_objective(objective)
        task = BoundTask(instance, cost, goal, completions=completions)
        for bound in usable(task):
            name = bound.name
            wanted = bound.suits(task)
            if options.bounds is not None and metric == "mean_latency":
                wanted = name in options.bounds.split(",")
            if not wanted:
                continue
            before, begin_s = time.process_time(), time.perf_counter()
            proofs: list[Proof] = []
            told = proofs.append
            raise_bound(task, Budget(options.bound_s), lambda _, one, told=told: told(one), name)
            proof = max(proofs, key=lambda one: one.value)
            value = proof.value / instance.n if objective == "tel" else proof.value
            out.append(
                f"- `{name}`: {metric} >= {value:.4f} s, {time.process_time() - before:.1f} s in "
                f"{time.perf_counter() - begin_s:.0f} s{certified(task, proof)}"
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
    latencies = {name: found["mean_latency"] for name, found in values.items()}
    return out, latencies | {"bound": lower["mean_latency"], "best": min(latencies.values())}


def certified(task: BoundTask, proof: Proof) -> str:
    """Return words on what is certified of a proof, and what checking that takes."""
    if proof.tree is None:
        return ""
    instance, before = task.instance, time.process_time()
    made = certify(instance, task.batch_cost, task.goal.name, proof.tree)
    spent, size = time.process_time() - before, len(canonical_json(made)) / 1e6
    value = certified_value(instance, made) / (instance.n if task.goal.name == "tel" else 1)
    return f"; certified {value:.4f} s in {spent:.1f} s, {size:.1f} MB"


def draw(points: dict[float, dict[str, float]], path: Path) -> None:
    """Write the picture: mean latency over the rate."""
    at = sorted(points)
    series = {name: [(rate, points[rate][name]) for rate in at] for name in points[at[0]]}
    policies = {name: series[name] for name in SHOWN if name in series}
    figure = style.figure()
    plot_load(policies, series["bound"], series["best"], ax=figure.subplots())
    figure.savefig(path, dpi=150, bbox_inches="tight")


def measure(instance: Instance, schedule: optsched.Schedule, cost: BatchCost) -> dict[str, float]:
    """Return the metrics of the table."""
    with warnings.catch_warnings():  # of batches beyond the cost model's range: see the docs
        warnings.simplefilter("ignore")
        metrics = evaluate(Problem(instance, cost), schedule).metrics
    return {name: float(metrics[name] or 0.0) for name in METRICS}


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="0.25,0.5,1,2,4,8")
    parser.add_argument("--bound-s", type=float, default=60.0, help="per bound")
    parser.add_argument("--search-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--trace", choices=TRACES, default="azure")
    parser.add_argument("--loads", help="instead of rates")
    parser.add_argument("--policies", help="default: all")
    parser.add_argument("--bounds", help="on mean latency; default: those that suit")
    parser.add_argument("--kv-capacity", default="100000")
    parser.add_argument("--prefixes", action="store_true", help="prompts share what they do")
    parser.add_argument("--first", type=int, help="only so many requests")
    options = parser.parse_args()
    cost = load_cost_model(options.model)
    lines = [
        f"optsched {optsched.__version__}, Python {platform.python_version()}, numpy "
        f"{np.__version__}, numba {numba.__version__}, {platform.machine()}, one thread, seed "
        f"{options.seed}; {options.bound_s:g} s per bound, {options.search_s:g} s of search."
    ]
    capacities = [int(capacity) for capacity in options.kv_capacity.split(",")]
    whole = trace(1.0, capacities[0], options, False)
    small = whole.subset(np.arange(20))  # loads what is compiled
    improve(Problem(small, cost), Budget(1.0))
    lower_bound(Problem(small, cost), time_limit_s=2.0, completions=completions)
    rates = [float(rate) for rate in options.rates.split(",")]
    if options.loads is not None:
        rates = [rate_at(float(load), whole, cost) for load in options.loads.split(",")]
    summary = []
    for capacity in capacities:
        points: dict[float, dict[str, float]] = {}
        for rate in rates:
            instance = trace(rate, capacity, options, options.prefixes)
            rows, points[rate] = row(instance, rate, cost, options)
            lines += [f"\n## M = {capacity}", *rows]
            summary.append({"M": capacity, "rate": rate, **points[rate]})
            print("\n".join(rows), flush=True)
            if options.picture is not None:
                draw(points, options.picture)

    names = list(summary[0])
    lines += ["", f"| {' | '.join(names)} | best / bound |", "|---" * (len(names) + 1) + "|"]
    for one in summary:
        cells = " | ".join(f"{one.get(name, np.nan):.4g}" for name in names)
        lines.append(f"| {cells} | **{one['best'] / one['bound']:.3f}** |")

    text = "\n".join(lines) + "\n"
    print(text[text.rindex("\n\n") :], flush=True)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
