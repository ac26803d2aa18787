"""Instances and timelines that several tests share."""

from __future__ import annotations

import numpy as np

import optsched
from optsched.judge.timeline import Timeline
from optsched.problem.instance import Instance
from optsched.problem.schedule import from_batches

MODEL = "llama2-7b-a100-infermax"


def small(seed: int, n: int = 5) -> Instance:
    """Return a few requests in rounds whose optimum is found at once."""
    rng = np.random.default_rng(seed)
    return Instance(
        np.sort(rng.integers(0, 5, n)), rng.integers(1, 5, n), rng.integers(1, 5, n),
        kv_capacity=11, name=f"small-{seed}",
    )  # fmt: skip


def evicting() -> Timeline:
    """Return two requests of which one is evicted: see tests/test_timeline.py."""
    instance = Instance([0, 0], [3, 3], [4, 4], kv_capacity=10, id=["a", "b$b$"], name="two")
    schedule = from_batches(
        [0, 2, 4, 5, 6, 7, 8, 9, 10], [0, 1, 0, 1, 0, 0, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1, 3, 1, 1, 1],
        evicted_offsets=[0, 0, 0, 1, 1, 1, 1, 1, 1], evicted=[1], evict_mode="restart",
        instance=instance,
    )  # fmt: skip
    return optsched.timeline(instance, schedule)


def two_workers() -> Timeline:
    """Return two requests, each on a worker of its own."""
    instance = Instance([0, 0], [2, 3], [2, 1], kv_capacity=9)
    schedule = from_batches([0, 1, 2, 3], [0, 1, 0], [2, 3, 1], worker=[0, 1, 0], instance=instance)
    return optsched.timeline(instance, schedule)


def in_seconds(
    policy: str, n: int, kv_capacity: int, *, span: float = 60.0, most: tuple[int, int] = (400, 200)
) -> Timeline:
    """Return random requests over a span of seconds, with at most so many tokens, by a policy."""
    rng = np.random.default_rng(1)
    instance = Instance(
        np.sort(rng.uniform(0, span, n)), rng.integers(1, most[0], n), rng.integers(1, most[1], n),
        kv_capacity=kv_capacity, time_unit="second", id=[f'<b>"{i}"</b>' for i in range(n)],
    )  # fmt: skip
    return optsched.timeline(
        optsched.Problem(instance, MODEL),
        optsched.run(optsched.Problem(instance, MODEL), policy).schedule,
    )
