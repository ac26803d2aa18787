"""Annealing over orders: every order becomes a feasible schedule, and the best are optimal.

Against the plain rule of placement, and exhaustive search.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from brute_force import brute_force_tel

from optsched.optimize.ramp.jobs import Jobs, periods
from optsched.optimize.search import orders
from optsched.optimize.search.orders import Annealing
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate


def instances(count: int, most: int) -> list[Instance]:
    """Draw instances of few requests, half of them with arrivals."""
    rng = np.random.default_rng(5)
    drawn = []
    for turn in range(count):
        n = int(rng.integers(2, most + 1))
        prompt, output = rng.integers(1, 6, n), rng.integers(1, 7, n)
        arrival = rng.integers(0, 9, n) * (turn % 2)
        room = int((prompt + output).max()) + int(rng.integers(0, 8))
        drawn.append(Instance(arrival, prompt, output, kv_capacity=room))
    return drawn


def placed(jobs: Jobs, order: Sequence[int]) -> tuple[int, np.ndarray]:
    """Place an order from scratch."""
    kept, starts = orders.new_kept(jobs), np.empty(jobs.n, dtype=np.int64)
    requests = orders.Requests(jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity)
    ends = orders.place_backward(np.array(order), 0, jobs.n, True, kept, requests, starts)
    assert not kept.used.any()
    return ends, starts


def ends_of(jobs: Jobs, order: Sequence[int]) -> list[int]:
    """Return the completions, the last first, by the plain rule."""
    used, moments, at = [0] * (2 * jobs.rounds), [], 0
    for i in order:
        while used[at] + jobs.peak[i] > jobs.capacity:
            at += 1
        for j in range(jobs.output[i]):
            used[at + j] += int(jobs.peak[i]) - j
        moments.append(at)
    ready = [int(jobs.arrival[i] + jobs.output[i]) for i in order]
    # A completion is as late as any earlier one asks for.
    return [
        max(ready[j] + moments[j] - moments[k] for j in range(k, jobs.n)) for k in range(jobs.n)
    ]


def test_every_order_of_completion_becomes_a_feasible_schedule_with_it() -> None:
    """All orders of up to five requests; `ends_of` has the plain rule that says when each ends."""
    for instance in instances(40, 5):
        for jobs in periods(instance):
            for order in permutations(range(jobs.n)):
                ends, starts = placed(jobs, order)
                assert jobs.feasible(starts)
                completions = (starts + jobs.output)[list(order)]
                assert ends == completions.sum()
                assert completions.tolist() == ends_of(jobs, order)


def test_an_arrival_delays_only_what_completes_later() -> None:
    # C is to complete last, B before it and A first. 4 tokens. C arrives at 5 and ends at 7. A and
    # B end as if C were not there: A at 2 with 2 tokens, B, of 2 tokens at that time, a round
    # later.
    jobs = Jobs(
        arrival=np.array([0, 0, 5]), first_kv=np.array([1, 2, 1]), output=np.array([2, 2, 2]),
        capacity=4, index=np.arange(3),
    )  # fmt: skip
    _, starts = placed(jobs, (2, 1, 0))
    assert (starts + jobs.output).tolist() == [2, 3, 7]


@pytest.mark.parametrize("windows", [1, 60, 1 << 22])
@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
def test_an_order_that_differs_in_part_is_placed_as_from_scratch(
    model: str, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order changed from place a to b is placed from what is kept, as `placed` does anew.

    `windows` is the memory for what is kept of an order: 1 keeps the KV of one place, 2^22 of all.
    `used` is scratch, and zero afterwards.
    """
    monkeypatch.setattr(orders, "_WINDOWS", windows)
    rng = np.random.default_rng(2)
    for jobs in periods(generate(model, seed=3, n=25)):
        kept, requests = orders.new_kept(jobs), orders.Requests(
            jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity
        )  # fmt: skip
        order, starts = rng.permutation(jobs.n), np.empty(jobs.n, dtype=np.int64)
        orders.place_backward(order, 0, jobs.n, True, kept, requests, starts)
        for turn in range(300):
            a, b = sorted(rng.integers(0, jobs.n, 2))
            trial = order.copy()
            orders.move(trial, *((a, b) if turn % 2 else (b, a)))
            ends, expected = placed(jobs, trial)
            assert orders.place_backward(trial, a, b, False, kept, requests, starts) == ends
            assert starts.tolist() == expected.tolist()
            if turn % 3 == 0:
                order = trial
                assert orders.place_backward(order, a, b, True, kept, requests, starts) == ends
                assert starts.tolist() == expected.tolist()
            assert not kept.used.any()


def test_annealing_finds_the_optimum_of_tiny_instances() -> None:
    """The optimum by exhaustive search; three anneals of 300 steps find it in all 300."""
    for turn, instance in enumerate(instances(300, 5)):
        value = 0
        for jobs in periods(instance):
            annealing = Annealing(jobs, np.random.default_rng(turn))
            for fresh in (False, True, True):
                annealing.anneal(300, fresh=fresh)
            assert jobs.feasible(annealing.starts)
            value += annealing.value
        assert value == brute_force_tel(instance)[0], instance.to_dict()
