"""Every policy on every trace at hand: where prefills that pause are the best, and where not.

Traces are scaled to a load: at load 1 the work that no schedule avoids takes as long as the trace.
Measured runs keep their arrivals, their limits and their tabulated cost models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from optsched import Problem
from optsched.bounds.batch import unavoidable_work
from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.experiments.base import Claim, Experiment, Row
from optsched.judge.evaluate import evaluate
from optsched.policies import is_clairvoyant, list_policies, make_policy, runner_of
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.workloads.traces import read_trace

from .drawing import Figure
from .parts import check_known, measured, over, quiet
from .vllm_measured import run_of

WITHIN = 1.02
"""A policy whose mean latency is at most so many times the best one's counts as the best."""
NEW = ("spf", "spf-work")
METRICS = ("mean_latency", "p99_latency", "mean_ttft", "mean_tpot", "evictions")


class Source(NamedTuple):
    """A trace: its format, its file below OPTSCHED_DATA, and the KV capacity in tokens."""

    format: str
    file: str
    kv_capacity: int


TRACES = {
    "azure-conversation": Source("azure", "azure/AzureLLMInferenceTrace_conv.csv", 100_000),
    "azure-code": Source("azure", "azure/AzureLLMInferenceTrace_code.csv", 100_000),
    "mooncake": Source("mooncake", "mooncake/conversation_trace.jsonl.gz", 250_000),
    "weka": Source("weka", "weka/sessions_up_to_100k.jsonl.gz", 250_000),
}
RUNS = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")
AS_MEASURED = 0.0
"""The load of a measured run, which keeps its arrivals."""


@lru_cache(maxsize=4)
def case(trace: str, load: float, requests: int, model: str) -> tuple[Instance, BatchCost]:
    """Return the first requests of a trace at a load, or a measured run, with its cost model."""
    if trace in RUNS:
        instance, _, cost = run_of("", trace)
        return instance, cost

    data = os.environ.get("OPTSCHED_DATA")
    if data is None:
        raise InputError("OPTSCHED_DATA: found nothing; expected a folder with traces")

    source, cost = TRACES[trace], load_cost_model(model)
    file = Path(data) / source.file
    whole = read_trace(source.format, file, kv_capacity=source.kv_capacity)
    first = whole.subset(np.arange(min(requests or whole.n, whole.n)))
    work = float(unavoidable_work(first, cost).total.sum())
    scale = load * float(first.release.max()) / work
    again = read_trace(source.format, file, kv_capacity=source.kv_capacity, rate_scale=scale)
    return again.subset(np.arange(first.n), name=f"{trace}, load {load:g}"), cost


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial for each policy, trace and load."""
    known = list_policies()
    check_known("traces", parameters["traces"], [*TRACES, *RUNS])
    chosen = parameters["policies"] or list(known)
    shared = {name: parameters[name] for name in ("requests", "limit_s", "cost_model")}
    for trace in parameters["traces"]:
        for load in [AS_MEASURED] if trace in RUNS else parameters["loads"]:
            for policy in chosen:
                row = {"trace": trace, "load": load, "policy": policy.replace(";", ",")}
                yield {**row, **shared, "seed": seed}


@measured
@quiet()
def run(trial: Row) -> Row:
    """Return the metrics of one policy on one trace."""
    instance, cost = case(trial["trace"], trial["load"], trial["requests"], trial["cost_model"])
    made, info = make_policy(trial["policy"])
    lengths = is_clairvoyant(made, info, instance)
    if (reason := runner_of(made).allows(instance)) is not None:
        return {"clairvoyant": lengths, "refused": reason}

    budget = Budget(trial["limit_s"])
    schedule = simulate(Problem(instance, cost), trial["policy"], seed=trial["seed"], budget=budget)
    found = evaluate(Problem(instance, cost), schedule).metrics
    return {name: found[name] for name in METRICS} | {"clairvoyant": lengths, "refused": None}


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return how far the new policies are from the best ones that know as much as they do."""
    claims = []
    for trace, load in dict.fromkeys((row["trace"], row["load"]) for row in rows):
        here = [row for row in rows if (row["trace"], row["load"]) == (trace, load)]
        ended = {row["policy"]: row for row in here if row.get("mean_latency") is not None}
        where = trace if load == AS_MEASURED else f"{trace}, load {load:g}"
        for name in NEW:
            if name not in ended:
                continue

            knows = ended[name]["clairvoyant"]
            times = {p: r["mean_latency"] for p, r in ended.items() if r["clairvoyant"] <= knows}
            best = min(times, key=times.__getitem__)
            ratio = over(times[name], times[best])
            what = f"{where}: mean latency of {name} over that of {best}"
            holds = ratio is not None and ratio <= WITHIN
            claims.append(Claim(what, f"at most {WITHIN}", ratio, holds))

    return claims


EXPERIMENT = Experiment(
    name="trace-policies",
    summary="every policy on every trace at hand: where prefills that pause are the best",
    paper="ours",
    parameters={
        "traces": [*TRACES, *RUNS],
        "loads": [0.5, 0.9],
        "policies": [],
        "requests": 2000,
        "limit_s": 20.0,
        "cost_model": "llama2-7b-a100-infermax",
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "trace": "name of the trace, or folder of a measured run",
        "load": "work that no schedule avoids over the span of arrivals; 0: arrivals as measured",
        "policy": "specification of the policy",
        "requests": "how many requests of a trace are taken; 0: all",
        "limit_s": "seconds after which a policy is stopped",
        "cost_model": "cost model of the traces; measured runs have tables of their own",
        "mean_latency": "seconds from arrival to last token, as are p99_latency and mean_ttft",
        "mean_tpot": "seconds per token after the first",
        "clairvoyant": "whether the policy uses the true output lengths",
        "refused": "why the policy does not run on the instance",
        "error": "why there is no result, such as the time limit",
    },
    figures=[
        Figure("latency", "policy", "mean_latency", "bar", panel="trace", where={"load": 0.9})
    ],
)
