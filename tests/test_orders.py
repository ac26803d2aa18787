"""Annealing over orders: every order becomes a feasible schedule, and the best are optimal."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from brute_force import brute_force_tel

from optsched.optimize.ramp.jobs import Jobs, periods
from optsched.optimize.search.orders import Annealing, backward_serial
from optsched.problem.instance import Instance


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


def placed(jobs: Jobs, order: tuple[int, ...]) -> tuple[int, np.ndarray]:
    used = np.zeros(int(jobs.output.sum() + jobs.output.max()) + 2, dtype=np.int64)
    starts = np.empty(jobs.n, dtype=np.int64)
    ends = backward_serial(
        np.array(order), jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, used, starts
    )
    assert not used.any()
    return ends, starts


def test_every_order_of_completion_becomes_a_feasible_schedule_with_it() -> None:
    for instance in instances(40, 5):
        for jobs in periods(instance):
            for order in permutations(range(jobs.n)):
                ends, starts = placed(jobs, order)
                assert jobs.feasible(starts)
                completions = (starts + jobs.output)[list(order)]
                assert ends == completions.sum()
                assert (np.diff(completions) <= 0).all()


def test_an_arrival_delays_only_what_completes_later() -> None:
    # 4 tokens. C arrives at 5 and ends at 7. A and B end as if C were not there: A at 2 with 2
    # tokens, B, of 2 tokens at that time, a round later.
    jobs = Jobs(
        arrival=np.array([0, 0, 5]), first_kv=np.array([1, 2, 1]), output=np.array([2, 2, 2]),
        capacity=4, index=np.arange(3),
    )  # fmt: skip
    _, starts = placed(jobs, (2, 1, 0))
    assert (starts + jobs.output).tolist() == [2, 3, 7]


def test_annealing_finds_the_optimum_of_tiny_instances() -> None:
    for turn, instance in enumerate(instances(300, 5)):
        value = 0
        for jobs in periods(instance):
            annealing = Annealing(jobs, np.random.default_rng(turn))
            for fresh in (False, True, True):
                annealing.anneal(300, fresh=fresh)
            assert jobs.feasible(annealing.starts)
            value += annealing.value
        assert value == brute_force_tel(instance)[0], instance.to_dict()
