"""The gain of a larger KV capacity: any policies, and the bound, over a sweep of M."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from optsched import Problem
from optsched.bounds import lower_bound
from optsched.costs.load import cost_for
from optsched.experiments.base import Claim, Experiment, Row
from optsched.files.read_write import read_instance
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate, parse_parameters

from .parts import distinct, judged, measured, picked, quiet, select

METRICS = ("tel", "makespan", "tps", "mean_ttft", "mean_tpot", "evictions", "mean_kv")


@lru_cache(maxsize=4)
def source(text: str, seed: int) -> Instance:
    """Return an instance from a file, or from a generator ``NAME[:key=value;...]``."""
    if text.endswith((".json", ".json.gz")):
        return read_instance(Path(text))

    name, _, tail = text.partition(":")
    texts = dict(part.partition("=")[::2] for part in filter(None, tail.split(";")))
    return generate(name, seed=seed, **parse_parameters(name, texts))


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per capacity and policy, and one per capacity for the bound."""
    instance = source(parameters["instance"], seed)
    for factor in parameters["factors"]:
        for policy in [*parameters["policies"], "bound"]:
            yield {
                "instance": parameters["instance"],
                "instance_sha256": instance.sha256,
                "kv_capacity": max(1, round(factor * instance.kv_capacity)),
                "policy": policy.replace(";", ","),
                "cost_model": None if instance.in_rounds else parameters["cost_model"],
                "seed": seed,
            }


@measured
@quiet()
def run(trial: Row) -> Row:
    """Run the policy, or compute the best bound."""
    drawn = source(trial["instance"], trial["seed"])
    instance = replace(drawn, kv_capacity=trial["kv_capacity"], known=None)
    cost = cost_for(instance, trial["cost_model"])

    if trial["policy"] == "bound":
        value, origin = lower_bound(Problem(instance, None if instance.in_rounds else cost))
        return {"tel": value, "origin": origin}

    found = judged(instance, trial["policy"], cost, seed=trial["seed"])
    return picked(found.metrics, dict(zip(METRICS, METRICS, strict=True)))


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return the gain in total latency from the smallest to the largest M, for each policy."""
    claims = []
    for policy in distinct(rows, "policy"):
        mine = [row for row in select(rows, policy=policy) if row.get("tel") is not None]
        if len(mine) > 1:
            low, high = mine[0]["kv_capacity"], mine[-1]["kv_capacity"]
            what = f"{policy}: total latency at M = {high} over M = {low}"
            gain = float(mine[-1]["tel"] / mine[0]["tel"])
            claims.append(Claim(what, "not in the paper", gain))

    return claims


EXPERIMENT = Experiment(
    name="kv-capacity",
    summary="a sweep of M for any policies and the bound, over any instance",
    paper="ours",
    parameters={
        "instance": "lognormal:n=300",
        "factors": [0.25, 0.5, 1.0, 2.0, 4.0],
        "policies": ["mc-sf", "mc-benchmark", "fcfs"],
        "cost_model": "llama2-7b-a100-infermax",
    },
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "policy": "policy specification; in rows of bound, tel is a bound that no schedule beats",
        "tel": "total latency in the instance's time unit, as are makespan and mean_ttft",
        "origin": "name of the largest bound",
    },
)
