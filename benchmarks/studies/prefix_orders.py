"""Orders of prefills that share prefixes beside the optimum, which Horn's algorithm finds.

All requests are there at once, their outputs are one token, and every block fits: prefills alone,
one after another. What is shared beyond prompts is cut off. With the cost model `tokens` a token
takes a millisecond. Other cost models have fixed costs of batches, and Horn's order is best for
them where the machine has one seat.
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
from optsched.costs.cost import BatchCost
from optsched.costs.load import cost_for
from optsched.experiments.base import Claim, Experiment, Row
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.batches.horn import horn_bound
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits
from optsched.problem.objective import parse_objectives
from optsched.workloads.traces import read_trace_report

from .kv_capacity import source
from .parts import judged, measured, over, quiet, select

TRACE = "mooncake/conversation_trace.jsonl.gz"
ORDERS = {
    "arrival": "one-by-one",
    "prefix": "one-by-one:by=prefix",
    "prompt": "one-by-one:by=prompt",
    "uncached": "one-by-one:by=uncached",
    "horn": "horn",
}
REUSE, ALONE = "bound", "bound without reuse"


@lru_cache(maxsize=2)
def prefills_of(text: str, seed: int) -> Instance:
    """Return the prefills of an instance, or of Mooncake's conversations, all there at once."""
    if text:
        instance = source(text, seed)
    else:
        data = os.environ.get("OPTSCHED_DATA")
        if data is None:
            raise InputError("instance: found none; expected one, or OPTSCHED_DATA with mooncake")

        options: dict[str, Any] = {"prefixes": True, "kv_capacity": 2**50}
        instance, _ = read_trace_report("mooncake", Path(data) / TRACE, **options)

    shared, prompt = instance.prefix_tokens, instance.prompt_tokens
    if shared is not None and instance.prefix_parent is not None:
        shared = np.minimum(shared, np.minimum(prompt, prompt[instance.prefix_parent]))
        shared[instance.prefix_parent < 0] = 0

    return replace(
        instance.without_predictions(),
        arrival=np.zeros(instance.n),
        output_tokens=np.ones(instance.n, dtype=np.int64),
        prefix_tokens=shared,
        time_unit="second",
        kv_accounting="cached",
        kv_capacity=2**50,
        limits=Limits(max_running=1),
        known=None,
    )


def trials(parameters: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Yield one trial per cost model and order, and two for the bounds."""
    for cost in parameters["cost_models"]:
        for order in (*ORDERS, REUSE, ALONE):
            yield {
                "instance": parameters["instance"],
                "cost_model": cost,
                "order": order,
                "seed": seed,
            }


@measured
@quiet()
def run(trial: Row) -> Row:
    """Serve the prefills in an order, or compute what no order beats."""
    instance, order = prefills_of(trial["instance"], trial["seed"]), trial["order"]
    tokens = BatchCost("tokens", 1, {"token": "1"})
    cost = tokens if trial["cost_model"] == "tokens" else cost_for(instance, trial["cost_model"])
    goal = parse_objectives("tel")
    if order in ORDERS:
        metrics = judged(instance, ORDERS[order], cost).metrics
        hits = metrics["prefix_hit_rate"]
    else:
        if order == ALONE:
            instance = replace(
                instance, prefix_parent=None, prefix_tokens=None, prefix_block_tokens=None
            )

        metrics = {"tel": horn_bound(Task.of(Problem(instance, cost, goal)))}
        hits = None

    return {"mean_latency": over(metrics["tel"], instance.n), "hit_rate": hits}


def summarize(rows: Sequence[Row]) -> list[Claim]:
    """Return each row over the bound."""
    claims = []
    for cost in dict.fromkeys(row["cost_model"] for row in rows):
        mine = {row["order"]: row.get("mean_latency") for row in select(rows, cost_model=cost)}
        bound = mine.pop(REUSE, None)
        for order, value in mine.items():
            what = f"{cost}: {order} over the bound"
            claims.append(Claim(what, "not in the paper", over(value, bound)))

    return claims


EXPERIMENT = Experiment(
    name="prefix-orders",
    summary="orders of prefills that share prefixes beside the optimum (Horn 1972)",
    paper="ours",
    parameters={"instance": "", "cost_models": ["tokens", "llama2-7b-a100-infermax"]},
    trials=trials,
    run=run,
    summarize=summarize,
    columns={
        "instance": "file or generator; empty: Mooncake's conversations in OPTSCHED_DATA",
        "cost_model": "tokens: a millisecond each",
        "order": "by arrival, prefix found, prompt, uncached tokens, Horn's; or a bound",
        "mean_latency": "mean completion of the prefills in seconds",
        "hit_rate": "share of the prompts' tokens that was found in the cache",
        "error": "why there is no result",
    },
)
