"""Bounds on charges: instances with shared prefixes against their best schedules."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from exhaustive_sharing import Sharing
from sharing_cases import schedule_of

from optsched.bounds import lower_bound, relaxations
from optsched.bounds.service import most_within
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.problem.instance import Instance, Limits

TERMS = (
    "token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square",
    "prefill_cross", "prefill_kv", "prefill_token", "prefill_request", "prefill_base",
)  # fmt: skip


def tiny(rng: Random, decode: bool, most: int) -> tuple[Instance, BatchCost, str]:
    """Return a tiny instance, whole milliseconds per term, and what an eviction means."""
    n = rng.randint(2, most)
    block = rng.choice([1, 2, 2, 3])
    prompt = [rng.randint(1, 3 * block + 1) if block > 1 else rng.randint(1, 4) for _ in range(n)]
    output = [rng.randint(1, 3) if decode else 1 for _ in range(n)]
    size = [s + o for s, o in zip(prompt, output, strict=True)]
    parent, shared = [None], [0]
    for i in range(1, n):
        parent.append(rng.choice([None, *range(i), *range(i)]))
        longest = 0 if parent[i] is None else min(size[i], size[parent[i]])
        shared.append(rng.choice([rng.randint(0, longest), longest, longest // block * block]))
    peak = max(s + o for s, o in zip(prompt, output, strict=True))
    kv_block = rng.choice([1, block])
    peak = -(-peak // block) * block
    values = {
        "prefix_parent": parent,
        "prefix_tokens": shared,
        "prefix_block_tokens": block,
        "kv_block_tokens": kv_block,
        "kv_accounting": rng.choice(["generated", "cached"]),
        "kv_capacity": rng.choice([peak, peak + rng.randint(0, 2 * peak), 100]),
        "time_unit": "second",
        "chunked_prefill": rng.choice([None, True, False]),
        "limits": Limits(max_prefill_tokens=rng.choice([None, None, peak])),
    }
    spread = rng.choice([0, 5, 30])
    arrival = sorted(rng.randint(0, spread) / 1000 for _ in range(n))
    price = dict.fromkeys(TERMS, 0) | {"token": rng.randint(0, 4), "base": rng.randint(0, 5)}
    price["base"] += price["token"] + price["base"] == 0
    for name in TERMS[2:]:
        if rng.random() < 0.4:
            price[name] = rng.randint(1, 5)
    if rng.random() < 0.5:
        price["prefill_cross"] = 2 * price["prefill_square"]
    cost = BatchCost("tiny", 1, {name: str(value) for name, value in price.items()})
    mode = rng.choice(["recompute", "restart"])
    return Instance(arrival, prompt, output, **values), cost, mode


def best_of(instance, cost, mode, objective="tel", most=200_000):
    """Return the least value of an objective in seconds and the judge's word on it, if found."""
    price = {name: int(cost.coefficients.get(name, "0")) for name in TERMS}
    found = Sharing(instance, price, restart=mode == "restart").best(objective, most)
    if found is None:
        return None
    value, rows = found
    schedule = schedule_of(
        instance,
        [[(i, one[0]) for i, one in enumerate(row) if one[0]] for _, row in rows],
        [[i for i, one in enumerate(row) if one[2]] for _, row in rows],
        mode=mode,
        reused=[[one[3] for one in row if one[0]] for _, row in rows],
    )
    return value / 1000, evaluate(instance, schedule, cost)


METHODS = {
    "tel": ("work", "busy-time", "shares"),
    "mean_ttft": ("prefill-work",),
    "makespan": ("work-makespan",),
}


def beaten(case, monkeypatch, most: int = 10_000) -> list | None:
    """Return the bounds that the best schedules of an instance beat; None if those are too many."""
    instance, cost, mode = case
    found = []
    for objective, methods in METHODS.items():
        if objective == "mean_ttft" and mode == "restart":  # the judge counts the last run's token
            continue
        best = best_of(*case, objective, most)
        if best is None:
            return None
        value, judged = best
        reached = value / (instance.n if objective == "mean_ttft" else 1)
        assert judged.metrics[objective] == pytest.approx(reached)
        for within in (0, 1):
            monkeypatch.setattr(relaxations, "_WITHIN_S", (within,))
            for method in methods:
                asked = {"objective": objective, "cost_model": cost, "method": method}
                bound, _ = lower_bound(instance, **asked, time_limit_s=0.005)
                if bound > reached + 1e-9:
                    found.append((objective, method, within, bound, reached))

        for limit, column in (("slo_ttft", judged.ttft), ("slo_latency", judged.latency)):
            for at in column:
                good = replace(judged, **{limit: at}).metrics["slo_attainment"] * instance.n
                if most_within(instance, cost, {limit: at}) < good - 1e-9:
                    found.append((limit, at))
    return found


def sweep(seeds, decode: bool, monkeypatch, n: int) -> list:
    """Return what is beaten on instances of some seeds, and how many could be solved."""
    found, solved = [], 0
    for seed in seeds:
        one = beaten(tiny(Random(seed), decode, n), monkeypatch)
        solved += one is not None
        found += [(seed, *row) for row in one or ()]
    return [found, solved]


@pytest.mark.parametrize(("decode", "n"), [(False, 3), (True, 2)])
def test_no_schedule_of_a_tiny_instance_beats_a_bound(monkeypatch, decode, n):
    found, solved = sweep(range(30), decode, monkeypatch, n)
    assert not found
    assert solved >= 25


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "n"), [(False, 4), (True, 3)])
def test_no_schedule_of_2000_tiny_instances_beats_a_bound(monkeypatch, decode, n):
    found, solved, seed = [], 0, 1000
    while solved < 2000:
        more, some = sweep(range(seed, seed + 100), decode, monkeypatch, n)
        found, solved, seed = found + more, solved + some, seed + 100
        print(seed, solved, found[:5], flush=True)
        assert not found
