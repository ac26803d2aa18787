"""The load within SLOs on six workloads, by policy: docs/lab/within-slos.md.

    OPTSCHED_DATA=FOLDER python benchmarks/slo.py [--page PAGE] [--search SECONDS]

FOLDER holds azure/AzureLLMInferenceTrace_conv.csv and llmservingsim/rtx4090-llama-3.1-8b. With
--search the offline search runs for so many seconds at each workload, beside what is impossible.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optsched
from optsched import Instance, Problem, generate, read_instance, read_trace
from optsched.analysis.capacity_question import Question
from optsched.analysis.capacity_search import CapacitySearch
from optsched.costs.fit import fit
from optsched.problem.budget import Budget

_MARK = "<!-- rows -->"

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


def specs(instance: Instance) -> dict[str, str]:
    """Return the policies by what the table calls them.

    Lengths are predicted with a mean absolute error of a quarter of their mean.
    """
    error = round(0.25 * float(instance.output_tokens.mean()), 1)
    known = ("vllm-v1", "sarathi", "spf", "slai", "edf", "least-slack", "late-last", "paced")
    return {f"`{name}`": name for name in known} | {
        "`vllm-v1`, short prompts first": "vllm-v1:policy=priority,priority=prompt",
        "`edf-decode`, predicted": f"edf-decode:predictor=noisy,predictor.mae={error}",
        "`edf-decode`, true lengths": "edf-decode:trust=1,floor=0.3,share=0.5,smallest=0.2",
    }


def main() -> None:
    """Print, or write into the page, a row for each policy and a column for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path)
    parser.add_argument("--search", type=float, default=0.0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    heads: list[str] = []
    found: dict[str, list[float | None]] = {}
    for name, instance, cost, ttft, tpot, share in workloads():
        begin = time.process_time()
        heads.append(f"{name}: {ttft:g} s, {1000 * tpot:g} ms, {share:g}")
        problem = Problem(replace(instance, name=name), cost, slo_ttft=ttft, slo_tpot=tpot)
        for label, spec in specs(instance).items():
            search = CapacitySearch(Question(problem, share, tolerance=0.02), Budget(), None)
            found.setdefault(label, []).append(search.reach(spec, None, 1.0).value)
            print(name, label, found[label][-1], file=sys.stderr, flush=True)

        if asked.search:
            best = optsched.capacity(problem, ["paced"], attainment=share, search_s=asked.search)
            found.setdefault("the search", []).append(best.value)
            found.setdefault("impossible from", []).append(best.bound)

        print(f"  {time.process_time() - begin:.0f} s of processor time", file=sys.stderr)

    lines = [f"| policy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    online = [row for label, row in found.items() if "true" not in label and "`" in label]
    most = [max(one or 0.0 for one in column) for column in zip(*online, strict=True)]
    for label, row in found.items():
        cells = ["-" if one is None else f"{one:.2f}" for one in row]
        shown = [
            f"**{cell}**" if row in online and one == top else cell
            for cell, one, top in zip(cells, row, most, strict=True)
        ]
        lines.append(f"| {label} | {' | '.join(shown)} |")

    print("\n".join(lines))
    if asked.page is not None:
        head, _, _ = asked.page.read_text().partition(_MARK)
        asked.page.write_text("\n".join([head + _MARK, "", *lines, ""]))


if __name__ == "__main__":
    main()
