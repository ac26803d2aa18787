"""Which policy carries most within SLOs: docs/lab/slo-policies.md.

    OPTSCHED_DATA=FOLDER python benchmarks/slo_policies.py [--page docs/lab/slo-policies.md]

FOLDER holds the public traces azure, llmservingsim and mooncake. Every policy runs on six
workloads, each under tight and loose SLOs, at rates between which the largest is searched that
keeps 95 % of the requests in time. `edf-decode` is given lengths that are predicted with a mean
absolute error of a quarter of their mean; no other policy knows any.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from slo import A100, CHAT, made, part

import optsched
from optsched import Instance, Problem, read_instance, read_trace
from optsched.costs.fit import fit

SLOS = (1.0, 0.05), (5.0, 0.1)
ATTAINMENT = 0.95
POLICIES = (
    "vllm-v1", "vllm", "sarathi", "spf", "patient", "edf", "least-slack", "late-last", "paced",
    "slai",
)  # fmt: skip
_MARK = "<!-- rows -->"


def workloads() -> Iterator[tuple[str, Instance, object]]:
    """Yield name, instance and cost model."""
    data = Path(os.environ["OPTSCHED_DATA"])
    run = data / "llmservingsim" / "rtx4090-llama-3.1-8b"
    measured = read_trace("llmservingsim", run / "requests.jsonl", kv_capacity=41_408)
    mooncake = data / "mooncake" / "conversation_trace_head2000.jsonl"
    long = read_trace("mooncake", mooncake, kv_capacity=400_000, prefixes=False)
    yield "demo", read_instance("demo"), A100
    yield "chats, CV 3", made(300, 5, CHAT, 3.0), A100
    for kind, first in (("conv", 3000), ("code", 0)):
        trace = read_trace("azure", data / "azure" / f"AzureLLMInferenceTrace_{kind}.csv")
        yield f"Azure {kind}", part(trace, first, 1500), A100
    yield "Mooncake", part(long, 0, 1000), "llama-3.1-8b-h100-torch"
    yield "RTX 4090's run", part(measured, 0, measured.n), fit(run / "profile").cost_model


def rates(instance: Instance, cost: object, slos: tuple[float, float]) -> dict[str, float | None]:
    """Return the largest rate scale of each policy, and the one proved impossible."""
    error = round(0.25 * float(instance.output_tokens.mean()), 1)
    policies = (*POLICIES, f"edf-decode:predictor=noisy,predictor.mae={error}")
    problem = Problem(instance, cost, slo_ttft=slos[0], slo_tpot=slos[1])
    found = optsched.capacity(problem, policies, attainment=ATTAINMENT)
    values = {row.policy.partition(":")[0]: row.value for row in found.rows}
    return {**values, "impossible from": found.bound}


def main() -> None:
    """Print, or write into the page, the table of policies and workloads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    columns: dict[str, dict[str, float | None]] = {}
    for name, instance, cost in workloads():
        for k, slos in enumerate(SLOS):
            key = f"{name}, {('tight', 'loose')[k]}"
            columns[key] = rates(replace(instance, name=name), cost, slos)
            print(key, columns[key], flush=True)

    lines = table(columns)
    print("\n".join(lines))
    if asked.page is not None:
        head, _, _ = asked.page.read_text().partition(_MARK)
        asked.page.write_text("\n".join([head + _MARK, "", *lines, ""]))


def table(columns: dict[str, dict[str, float | None]]) -> list[str]:
    """Return a row for each policy, with its mean share of the best on each workload."""
    names = list(next(iter(columns.values())))
    best = {key: max(v or 0.0 for name, v in one.items() if name != "impossible from")
            for key, one in columns.items()}  # fmt: skip
    lines = [f"| policy | {' | '.join(columns)} | of the best, mean | least |",
             "|" + "---|" * (len(columns) + 3)]  # fmt: skip
    for name in names:
        cells, shares = [], []
        for key, one in columns.items():
            value = one[name]
            share = (value or 0.0) / best[key] if best[key] else 0.0
            shares.append(share)
            text = "-" if value is None else f"{value:.3g}"
            cells.append(f"**{text}**" if share == 1 else text)

        last = "| | |" if name == "impossible from" else (
            f"| {sum(shares) / len(shares):.2f} | {min(shares):.2f} |")  # fmt: skip
        shown = name if name == "impossible from" else f"`{name}`"
        lines.append(f"| {shown} | {' | '.join(cells)} {last}")

    return lines


if __name__ == "__main__":
    main()
