"""Measured runs of vLLM beside its twin, the best schedule known and a bound.

The runs are those of LLMServingSim (Cho et al. 2026), and the cost models are fitted to profiles of
the same GPUs alone. vLLM's prefix cache was on. The published runs do not say which request found
what in the cache, only what share of all prompt tokens could be found.

The bound and the twin are those of an engine that finds nothing there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from optsched import Problem
from optsched.bounds import lower_bound
from optsched.costs.cost import BatchCost
from optsched.costs.devices import DEVICES, device
from optsched.costs.fit import fit
from optsched.experiments.base import Claim, Experiment, Row
from optsched.files.measured import Measured
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.offline import improve
from optsched.policies.engine.simulate import completions, simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, PolicyError
from optsched.problem.instance import Instance, Limits
from optsched.problem.metrics import Times
from optsched.problem.schedule import Schedule, in_parts
from optsched.problem.text_files import read_object
from optsched.workloads.traces import read_trace_report

from .drawing import Figure
from .parts import measured, over, picked, quiet, select

METRICS = ("mean_latency", "mean_ttft", "mean_tpot", "makespan", "evictions")
TWIN, SHORTER = "vllm-v1", "vllm-v1, prompts shorter"
"""The twin, and the twin with all prompts shorter by the share that the cache may hold."""


@lru_cache(maxsize=4)
def run_of(folder: str, name: str, link_gb_s: float = 0.0) -> tuple[Instance, Measured, BatchCost]:
    """Return a measured run: its instance with vLLM's limits, its times and its cost model."""
    data = os.environ.get("OPTSCHED_DATA")
    if not folder and data is None:
        raise InputError("folder: found none; expected one, or OPTSCHED_DATA with llmservingsim")

    path = Path(folder or Path(data or "") / "llmservingsim") / name
    if not (path / "meta.json").is_file():
        raise InputError(f"{path / 'meta.json'}: no such file; expected a measured run")

    first = name.partition("-")[0]
    known = max((one for one in DEVICES if name.startswith(one)), key=len, default=first)
    peak = device(known)
    if link_gb_s:
        peak = replace(peak, link_gb_s=link_gb_s)

    cost = fit(path, hardware=peak).cost_model
    meta = read_object(path / "meta.json", "a measured run")
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache", {})
    block = cache.get("block_size", 16)
    tokens = cache.get("num_kv_tokens", cost.kv_capacity_tokens)

    if tokens is None:
        raise InputError(
            f"{path / 'meta.json'}: kv_cache: found no KV tokens; expected num_kv_tokens"
        )

    limits = Limits(
        max_batch_tokens=engine["max_num_batched_tokens"], max_running=engine["max_num_seqs"]
    )
    instance, report = read_trace_report(
        "llmservingsim",
        path / "requests.jsonl",
        kv_capacity=(tokens // block - 1) * block,  # vLLM keeps a block empty
        kv_block_tokens=block,
    )
    assert report.measured is not None
    instance = replace(instance, name=name, limits=limits, chunked_prefill=True)

    return instance, replace(report.measured, instance_sha256=instance.sha256), cost


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per run and row of its table."""
    for run in parameters["runs"]:
        for scheduler in ("measured", TWIN, SHORTER, *parameters["policies"], "search", "bound"):
            yield {
                "run": run,
                "scheduler": scheduler.replace(";", ","),
                "folder": parameters["folder"],
                "found": parameters["found"],
                "link_gb_s": parameters["link_gb_s"],
                "search_s": parameters["search_s"],
                "bound_s": parameters["bound_s"],
                "seed": seed,
            }


@measured
@quiet()
def run(trial: Row) -> Row:
    """Return the metrics of one row."""
    instance, times, cost = run_of(trial["folder"], trial["run"], trial["link_gb_s"])
    scheduler = trial["scheduler"]
    if scheduler == "measured":
        return of_measured(instance, times)
    if scheduler == "bound":
        value, origin = _bound(instance, cost, trial["bound_s"])
        return {"mean_latency": value, "origin": origin}

    if scheduler == SHORTER:
        kept = (1 - trial["found"]) * instance.prompt_tokens
        shorter = np.maximum(1, np.rint(kept).astype(np.int64))
        instance, scheduler = replace(instance, prompt_tokens=shorter), TWIN

    if scheduler == "search":
        schedule, _ = improve(
            Problem(instance, cost), Budget(trial["search_s"]), seed=trial["seed"]
        )
    else:
        schedule = _scheduled(instance, scheduler, cost, trial["seed"])

    metrics = evaluate(Problem(instance, cost), schedule).metrics
    return picked(metrics, dict(zip(METRICS, METRICS, strict=True)))


def _scheduled(instance: Instance, policy: str, cost: BatchCost, seed: int) -> Schedule:
    """Return a policy's schedule, with prompts longer than a batch in parts if it splits none."""
    try:
        return simulate(Problem(instance, cost), policy, seed=seed)
    except PolicyError:
        tokens = max(int(instance.prompt_tokens.max()), instance.limits.max_batch_tokens or 0)
        roomier = replace(instance, limits=replace(instance.limits, max_batch_tokens=tokens))
        return in_parts(simulate(Problem(roomier, cost), policy, seed=seed), instance)


def of_measured(instance: Instance, times: Measured) -> Row:
    """Return the metrics of a measured run. Its makespan is when the last token comes."""
    assert times.ttft is not None
    later = instance.output_tokens - 1
    seen = Times(instance, times.latency, released=times.released(instance))
    whole = seen.session_completion
    longest = {} if whole is None else {"mean_session_completion": float(whole.mean())}
    tpot = (times.latency - times.ttft)[later > 0] / later[later > 0]

    return {
        "mean_latency": float(times.latency.mean()),
        "mean_ttft": float(times.ttft.mean()),
        "mean_tpot": float(tpot.mean()),
        "makespan": float(seen.span),
        **longest,
    }


def _bound(instance: Instance, cost: BatchCost, limit_s: float) -> tuple[float | None, str | None]:
    """Return the bound on mean latency."""
    total, origin = lower_bound(
        Problem(instance, cost), time_limit_s=limit_s, completions=completions
    )
    return max(0.0, (total or 0.0) / instance.n), origin


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the errors of the twin, and what lies between the measured run and the bound."""
    claims = []
    for name in dict.fromkeys(row["run"] for row in rows):
        mine = {row["scheduler"]: row for row in select(rows, run=name) if not row.get("error")}
        real = mine.get("measured", {})
        for metric in METRICS[:3]:
            for twin in (TWIN, SHORTER):
                value = over(mine.get(twin, {}).get(metric), real.get(metric))
                near = None if value is None else abs(value - 1) <= 0.05
                what = f"{name}: {metric} of {twin} over measured"
                claims.append(Claim(what, "within 5 %", value, near))

        known = {
            k: row["mean_latency"]
            for k, row in mine.items()
            if k not in ("measured", "bound", SHORTER)
        }
        if not known or "bound" not in mine:
            continue

        best, bound = min(known, key=known.__getitem__), mine["bound"]["mean_latency"]
        what = f"{name}: mean latency, "
        claims += [
            Claim(
                f"{what}measured over the bound",
                "not in the paper",
                over(real.get("mean_latency"), bound),
            ),
            Claim(
                f"{what}measured over the best known ({best})",
                "not in the paper",
                over(real.get("mean_latency"), known[best]),
            ),
            Claim(f"{what}best known over the bound", "not in the paper", over(known[best], bound)),
        ]

    return claims


EXPERIMENT = Experiment(
    name="vllm-measured",
    summary="measured runs of vLLM beside its twin, the best schedule known and a bound",
    paper="ours, on runs of Cho et al. 2026",
    parameters={
        "folder": "",
        "runs": ["rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b"],
        "policies": [
            "vllm-v1:policy=priority;priority=output",
            "vllm-v1:policy=priority;priority=work",
            "fcfs",
            "sarathi",
            "mc-sf",
            "least-work",
            "spf-work",
            "spf-work:cheap=true",
        ],
        "found": 0.076,
        "link_gb_s": 0.0,
        "search_s": 60.0,
        "bound_s": 60.0,
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "run": "folder of the run, named after its GPU and its model",
        "scheduler": "measured, a policy, the offline search, or a bound that no schedule beats",
        "folder": "where the runs are; empty: llmservingsim in OPTSCHED_DATA",
        "found": "share of all prompt tokens by which the twin's prompts are shorter in one row",
        "link_gb_s": "bandwidth between GPUs that share every layer, in GB/s; 0: its peak",
        "search_s": "seconds of the offline search",
        "bound_s": "seconds of the bounds",
        "mean_latency": "seconds from arrival to last token, as are mean_ttft, mean_tpot, makespan",
        "origin": "name of the largest bound",
        "error": "why there is no result",
    },
    figures=[
        Figure("latency", "scheduler", ("mean_latency",), panel="run", y_label="mean latency [s]")
    ],
)
