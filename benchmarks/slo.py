"""The load within SLOs on six workloads: by policy, by the search, and what is impossible.

    OPTSCHED_DATA=FOLDER python benchmarks/slo.py [SECONDS]

FOLDER holds azure/AzureLLMInferenceTrace_conv.csv and llmservingsim/rtx4090-llama-3.1-8b. The
policy `edf-decode` runs with lengths that are predicted with a mean absolute error of a quarter of
their mean, and with true ones. SECONDS are those of the search for each workload (default: 30).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optsched
from optsched import Instance, Problem, generate, read_instance, read_trace
from optsched.costs.fit import fit

A100 = "llama2-7b-a100-infermax"
CHAT = {
    "prompt_mean": 1154.7, "prompt_median": 1020, "prompt_max": 14050, "output_mean": 211.1,
    "output_median": 129, "output_max": 1000,
}  # fmt: skip
CODE = {
    "prompt_mean": 2048, "prompt_median": 1600, "prompt_max": 8000, "output_mean": 28,
    "output_median": 14, "output_max": 300,
}  # fmt: skip


def made(n: int, seed: int, lengths: dict[str, float], cv: float = 1.0, rate: float = 4.0,
         kv_capacity: int = 100_000) -> Instance:  # fmt: skip
    """Return lognormal lengths with gamma gaps."""
    common = {"n": n, "rate": rate, "kv_capacity": kv_capacity, "time_unit": "second"}
    return generate("lognormal", seed=seed, arrivals="gamma", cv=cv, **common, **lengths)


def part(trace: Instance, first: int, n: int) -> Instance:
    """Return some requests of a trace in succession."""
    rows = slice(first, first + n)
    columns = trace.arrival[rows], trace.prompt_tokens[rows], trace.output_tokens[rows]
    return Instance(*columns, kv_capacity=trace.kv_capacity, time_unit="second")


def workloads() -> Iterator[tuple[str, Instance, object, float, float, float]]:
    """Yield name, instance, cost model, TTFT, TPOT and attainment."""
    data = Path(os.environ["OPTSCHED_DATA"])
    azure = read_trace("azure", data / "azure" / "AzureLLMInferenceTrace_conv.csv")
    small = fit(data / "llmservingsim" / "rtx4090-llama-3.1-8b" / "profile").cost_model
    yield "demo", read_instance("demo"), A100, 1.0, 0.05, 0.95
    yield "300 chats, CV 3", made(300, 5, CHAT, 3.0), A100, 1.0, 0.05, 0.99
    yield "400 of code, CV 1", made(400, 5, CODE), A100, 1.0, 0.05, 0.95
    yield "Azure 3000-4499", part(azure, 3000, 1500), A100, 1.0, 0.05, 0.99
    yield "Azure 10000-11499", part(azure, 10000, 1500), A100, 5.0, 0.1, 0.99
    less = made(300, 7, CHAT, 2.0, 1.0, 40_000)
    yield "RTX 4090, 300 chats, CV 2", less, small, 2.0, 0.1, 0.95


def main() -> None:
    """Print a row for each workload."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    warnings.simplefilter("ignore")
    print("| workload | SLOs | `paced` | `edf-decode`, predicted | known | search | impossible |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, instance, cost, ttft, tpot, share in workloads():
        begin = time.process_time()
        error = round(0.25 * float(instance.output_tokens.mean()), 1)
        noisy = f"predictor=noisy,predictor.mae={error}"
        policies = (
            "paced",
            f"edf-decode:{noisy}",
            "edf-decode:trust=1,floor=0.3,share=0.5,smallest=0.2",
        )
        problem = Problem(replace(instance, name=name), cost, slo_ttft=ttft, slo_tpot=tpot)
        found = optsched.capacity(problem, policies, attainment=share, search_s=seconds)
        values = ["-" if row.value is None else f"{row.value:.3f}" for row in found.rows]
        bound = "-" if found.bound is None else f"{found.bound:.3f}"
        slos = f"{ttft:g} s, {1000 * tpot:g} ms, {share:g}"
        print(f"| {name} | {slos} | {' | '.join(values)} | {bound} |", flush=True)
        print(f"  {time.process_time() - begin:.0f} s of processor time", file=sys.stderr)


if __name__ == "__main__":
    main()
