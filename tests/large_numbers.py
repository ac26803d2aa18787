"""Random instances whose numbers are hard for solvers, and what exhaustive search says of them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from brute_force import brute_force_tel
from exhaustive_batches import SCALE, Exhaustive

from optsched import BatchCost, Instance, Limits
from optsched.problem.columns import MAX_TOKENS

TOPS = (50, 10**5, 10**6, 10**9, MAX_TOKENS - 10)
"""The sizes of prompts, up to the largest that a file may have."""


def large_rounds(rng: np.random.Generator) -> Instance:
    """Return up to 4 requests whose KV or prompts fit together, or do not, by a few tokens."""
    n = int(rng.integers(1, 5))
    output = rng.integers(1, 5, n)
    top = int(rng.choice(TOPS))
    prompt = rng.integers(1, top + 1, n)
    if rng.random() < 0.7:
        prompt = np.maximum(1, top // rng.integers(2, 5) + rng.integers(-3, 4, n))
    accounting = str(rng.choice(["generated", "cached"]))
    peak = prompt + output - (accounting == "cached")
    some = rng.random(n) < 0.6
    limits = {}
    for name, chance, spare in (("max_prefill_tokens", 0.3, 2), ("max_batch_tokens", 0.3, 3)):
        if rng.random() < chance:
            limit = int(prompt[some].sum()) + int(rng.integers(-1, spare))
            limits[name] = max(int(prompt.max()), limit)
    if rng.random() < 0.2:
        limits["max_running"] = int(rng.integers(1, n + 1))
    return Instance(
        rng.integers(0, 5, n) * rng.integers(0, 2, n), prompt, output,
        max(int(peak.max()), int(peak[some].sum()) + int(rng.integers(-4, 3))),
        kv_accounting=accounting, limits=Limits(**limits),
        hybrid_batching=False if rng.random() < 0.2 else None,
    )  # fmt: skip


def least_latency(instance: Instance, workers: int = 1) -> float:
    """Return the least total latency on equal workers: the best of all splits of the requests."""
    if workers == 1:
        return brute_force_tel(instance)[0]
    best = math.inf
    for members in range(2 ** (instance.n - 1)):  # the last request is on the second worker
        own = np.array([members >> i & 1 == 1 for i in range(instance.n)])
        parts = [np.flatnonzero(part) for part in (own, ~own) if part.any()]
        best = min(best, sum(least_latency(instance.subset(part)) for part in parts))
    return best


def odd_costs(rng: np.random.Generator) -> BatchCost:
    """Return a cost model whose coefficients have up to 14 decimals, as fits have."""
    values = {
        "token": rng.uniform(0.01, 0.2), "base": rng.uniform(0, 8),
        "decode_kv": rng.uniform(0, 0.002), "decode_base": rng.uniform(0, 1),
        "prefill_square": rng.uniform(0, 1e-4), "prefill_base": rng.uniform(0, 2),
    }  # fmt: skip
    digits = int(rng.integers(1, 15))
    return BatchCost("odd", 1, {name: f"{value:.{digits}f}" for name, value in values.items()})


def batches(rng: np.random.Generator, *, apart: bool = False) -> Instance:
    """Return 2 or 3 requests in seconds with prompts of up to 60 tokens, or of many."""
    n = int(rng.integers(2, 4))
    output = rng.integers(1, 3, n)
    top = int(rng.choice([6, 60, 60, 60, 10**4]))
    prompt = rng.integers(1, top + 1, n)
    peak = prompt + output - 1
    room = int(rng.integers(peak.max(), peak.sum() + 1))
    arrival = np.round(rng.random(n) * 0.02, 3) if apart else np.zeros(n)
    return Instance(
        arrival, prompt, output, room, time_unit="second", kv_accounting="cached",
        chunked_prefill=False,
    )  # fmt: skip


def exact_best(instance: Instance, cost: BatchCost, objective: str) -> Fraction:
    """Return the least value of an objective in seconds as a fraction."""
    assert SCALE >= 10**14
    return min(value for (value,) in Exhaustive(instance, cost).values(objective))
