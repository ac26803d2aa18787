"""Horn's order of prefills that share prefixes, held against dynamic programming over sets."""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from sharing_cases import random_claims

from optsched import Instance, Limits, evaluate, simulate, solve
from optsched.costs.cost import BatchCost
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.batches.horn import horn_bound
from optsched.problem.errors import OptschedError, PolicyError, UsageError
from optsched.problem.objective import parse_objectives

ORDERS = ("horn", "arrival", "prompt", "uncached", "prefix")


def cost_of(rng: Random, *, chunks_matter: bool = False) -> BatchCost:
    """Return a cost model in which prefills of a block take as long whole as in parts."""
    square = rng.choice([0, 0, 1, 5]) / 64
    values = {
        "token": rng.randint(1, 9) / 8,
        "base": rng.choice([0, 0, 1, 7]) / 4,
        "prefill_square": square,
        "prefill_cross": 2 * square,
        "prefill_kv": rng.choice([0, 0, 1]) / 16,
        "prefill_request": rng.choice([0, 1]) / 2,
        "prefill_base": rng.choice([0, 1]) / 4,
    }
    if chunks_matter:
        values |= {"prefill_cross": rng.randint(0, 20) / 64, "prefill_kv": rng.randint(0, 24) / 8}
    texts = {name: str(value) for name, value in values.items()}
    return BatchCost("drawn", 1, texts)


def sequences(rng: Random, n: int, block: int, *, ends: bool) -> list[list[int]]:
    """Return prompts, token by token, that share beginnings; `ends`: some end on a block."""
    prompts: list[list[int]] = []
    for _ in range(n):
        prompt = list(rng.choice(prompts))[: rng.randint(0, 12)] if prompts else []
        prompt += [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
        if not ends and len(prompt) % block == 0:
            prompt.append(rng.randint(0, 9))
        prompts.append(prompt)
    return prompts


def shares(a: list[int], b: list[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


def instance_of(prompts: list[list[int]], block: int, **more) -> Instance:
    """Return the instance: the parent of each is the first with which it shares most."""
    parent, shared = [None], [0]
    for i in range(1, len(prompts)):
        same = [shares(prompts[i], prompts[q]) for q in range(i)]
        parent.append(int(np.argmax(same)))
        shared.append(max(same))
    values = {
        "prefix_parent": parent,
        "prefix_tokens": shared,
        "prefix_block_tokens": block,
        "kv_capacity": 10_000,
        "time_unit": "second",
        **more,
    }
    n = len(prompts)
    return Instance([0.0] * n, [len(p) for p in prompts], [1] * n, **values)


def least_sum(prompts: list[list[int]], block: int, cost: BatchCost) -> float:
    """Return the least sum of completions one by one, by dynamic programming over sets.

    Whoever comes next finds what it shares, in whole blocks and but for one token, with any of the
    set.
    """
    n, price = len(prompts), {name: float(text) for name, text in cost.coefficients.items()}

    def seconds(i: int, done: int) -> float:
        found = max([shares(prompts[i], prompts[q]) for q in range(n) if done >> q & 1] or [0])
        m = min(found, len(prompts[i]) - 1) // block * block
        c = len(prompts[i]) - m
        ms = price["token"] * c + price["base"] + price["prefill_base"] + price["prefill_request"]
        ms += price["prefill_square"] * c * c + price["prefill_cross"] * c * m
        return (ms + price["prefill_kv"] * m) / 1000

    best: dict[int, dict[float, float]] = {0: {0.0: 0.0}}
    for done in range((1 << n) - 1):
        for clock, total in best.get(done, {}).items():
            for i in range(n):
                if not done >> i & 1:
                    end = round(clock + seconds(i, done), 12)
                    into = best.setdefault(done | 1 << i, {})
                    into[end] = min(into.get(end, np.inf), total + end)
    return min(best[(1 << n) - 1].values())


def check_random_trees(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        block, cost = rng.choice([1, 2, 3, 4]), cost_of(rng)
        if block == 1:
            block = 2
        prompts = sequences(rng, rng.randint(1, 6), block, ends=False)
        fixed = float(cost.coefficients["base"]) + float(cost.coefficients["prefill_base"])
        limits = Limits(max_running=1) if fixed or rng.random() < 0.5 else Limits()
        instance = instance_of(prompts, block, limits=limits)
        best = least_sum(prompts, block, cost)
        found = solve(instance, method="horn", cost_model=cost, objective="tel")
        assert found.status.value == "optimal", seed
        assert found.objective == pytest.approx(best, rel=1e-9), seed
        assert found.bound == pytest.approx(best, rel=1e-9), seed


def test_horn_is_the_best_order_of_random_trees():
    check_random_trees(range(100))


@pytest.mark.slow
def test_horn_is_the_best_order_of_2000_random_trees():
    check_random_trees(range(1000, 3000))


def check_random_schedules(seeds: range) -> tuple[int, int]:
    """Hold the bound against schedules of all kinds; return how many come near, and how many."""
    near = valid = 0
    for seed in seeds:
        rng = Random(seed)
        block, cost = rng.choice([1, 2, 3]), cost_of(rng, chunks_matter=True)
        limits = Limits(max_running=rng.choice([None, 1, 2]))
        prompts = sequences(rng, rng.randint(1, 4), block, ends=True)
        instance = instance_of(prompts, block, limits=limits)
        bound = horn_bound(Task(instance, cost, parse_objectives("tel")))
        for _ in range(20):
            schedule = random_claims(rng, instance, wrong=0)
            if schedule.worker is not None:
                continue
            try:
                value = evaluate(instance, schedule, cost).metrics["tel"]
            except OptschedError:
                continue  # too many seats
            valid += 1
            near += value < 1.05 * bound
            assert value >= bound * (1 - 1e-9), seed
    return near, valid


def test_no_random_schedule_with_claims_is_below_the_bound():
    near, valid = check_random_schedules(range(60))
    assert near > 5
    assert valid > 300


@pytest.mark.slow
def test_no_random_schedule_of_many_is_below_the_bound():
    check_random_schedules(range(1000, 5000))
