"""The prefix cache of vLLM's twin: compiled against readable, by hand, and before the judge."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from readable_vllm import ReadableVllm
from sharing_cases import engine_instance, sharing_instance
from test_simulate import cost_of, rows_of, same
from test_vllm_v1 import random_policy

from optsched.costs.cost import UnitCost
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance

RULES = (
    {},
    {"eviction": "next-use"},
    {"eviction": "ttl", "ttl": 0.001},
    {"eviction": "ttl", "ttl": 5.0},
    {"eviction": "t-lru", "tail_tokens": 3},
    {"merge_blocks": True},
    {"policy": "lpm", "priority": "arrival"},
    {"policy": "shortest-prefill-first", "priority": "arrival", "merge_blocks": True},
    {"policy": "hrrn", "priority": "arrival"},
)


def tight(rng: Random) -> Instance:
    """Return requests with shared prefixes that arrive one after another, with little room."""
    if rng.random() < 0.5:
        instance = engine_instance(rng)
    else:
        instance = sharing_instance(rng, most=8)
        largest = int(instance.peak_tokens.max()) + instance.kv_block_tokens
        instance = replace(instance, kv_capacity=largest + rng.randint(0, 12))
    gap = rng.choice([0, 0, 3]) if instance.in_rounds else rng.choice([0.0, 0.0, 0.002, 0.02])
    return replace(instance, arrival=[gap * k for k in range(instance.n)])


def alike(seed: int) -> np.ndarray:
    """Run both twins; return evictions, tokens found, and what was kept."""
    rng = Random(seed)
    instance, rule = tight(rng), RULES[seed % len(RULES)]
    policy, cost = replace(random_policy(rng), **rule), cost_of(instance)
    fast = simulate(instance, policy, cost)
    slow = simulate(instance, ReadableVllm(policy, instance, cost or UnitCost()), cost)
    reused = np.zeros_like(fast.tokens) if slow.reused is None else slow.reused
    assert same(fast, slow), (seed, rows_of(fast), rows_of(slow))
    assert np.array_equal(fast.reused, reused), (seed, fast.reused, reused)
    judged = evaluate(instance, fast, cost)
    names = ("evictions", "prefix_hit_tokens", "peak_retained_kv")
    return np.array([judged.metrics[name] for name in names])


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.slow)]
)
def test_the_compiled_cache_finds_what_the_readable_one_finds(seeds) -> None:
    evictions, hits, kept = np.array([alike(seed) for seed in seeds]).T
    assert (evictions > 0).mean() > 0.1
    assert (hits > 0).mean() > 0.3
    assert (kept > 0).mean() > 0.1
