"""CP-SAT neighbourhoods: never worse, always feasible, deterministic, and the optimum when tiny."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from brute_force import brute_force_tel
from test_ramp import tiny_instance

from optsched.optimize.ramp.jobs import Jobs, periods
from optsched.optimize.search.neighbourhood import improve
from optsched.workloads.generate import generate


def in_line(jobs: Jobs, order: np.ndarray) -> np.ndarray:
    """Run the requests one after another, once all have arrived: a bad start."""
    starts = np.empty(jobs.n, dtype=np.int64)
    now = int(jobs.arrival.max())
    for i in order:
        starts[i] = now
        now += int(jobs.output[i])
    return starts


def jobs_of(output: list[int], first_kv: list[int], capacity: int) -> Jobs:
    n = len(output)
    return Jobs(
        arrival=np.zeros(n, dtype=np.int64),
        first_kv=np.array(first_kv, dtype=np.int64),
        output=np.array(output, dtype=np.int64),
        capacity=capacity,
        index=np.arange(n),
    )


def test_the_optimum_of_tiny_instances_is_found_from_a_bad_start() -> None:
    # At most five requests are all free at once: the first subproblem solved to the end is all.
    rng = np.random.default_rng(21)
    for turn in range(80):
        instance = tiny_instance(rng, turn, 5)
        optimum, _ = brute_force_tel(instance)
        value = 0
        for jobs in periods(instance):
            starts = in_line(jobs, rng.permutation(jobs.n))
            found = improve(jobs, starts, rng=rng, rounds=20, work=1.0)
            assert jobs.feasible(found)
            value += jobs.total(found)
        assert value == optimum, instance.to_dict()


def test_never_worse_and_always_feasible_with_and_without_arrivals() -> None:
    rng = np.random.default_rng(22)
    better = 0
    for turn in range(12):
        n = int(rng.integers(8, 16))
        output, first_kv = rng.integers(1, 9, n), rng.integers(1, 6, n)
        jobs = Jobs(
            arrival=rng.integers(0, (1, 20)[turn % 2], n),
            first_kv=first_kv,
            output=output,
            # Every third capacity is one that the largest request fills exactly.
            capacity=int((first_kv + output - 1).max()) + (0, 3, 9)[turn % 3],
            index=np.arange(n),
        )
        starts = in_line(jobs, rng.permutation(n))
        given = starts.copy()
        for rounds in (0, 1, 5):
            found = improve(jobs, starts, rng=rng, rounds=rounds, size=5, work=0.01)
            assert jobs.feasible(found)
            assert jobs.total(found) <= jobs.total(starts)
            better += jobs.total(found) < jobs.total(starts)
        assert (starts == given).all()
    assert better >= 20


def test_requests_that_fill_the_capacity_run_one_after_another_shortest_first() -> None:
    # Peaks 4 + 6 - 1 = 9, 7 + 3 - 1 = 9, 8 + 2 - 1 = 9 = M: completions 2, 5 and 11, sum 18.
    jobs = jobs_of([6, 3, 2], [4, 7, 8], 9)
    found = improve(jobs, in_line(jobs, np.arange(3)), rng=np.random.default_rng(0), rounds=5)
    assert found.tolist() == [5, 2, 0]
    assert jobs.total(found) == 18


def test_equal_requests_and_one_alone() -> None:
    # Output 2, KV 1 then 2, M = 3: peaks cannot coincide, 2 + 1 fits. Completions 2, 3, .. 7.
    jobs = jobs_of([2] * 6, [1] * 6, 3)
    found = improve(jobs, in_line(jobs, np.arange(6)), rng=np.random.default_rng(0), rounds=40)
    assert sorted((found + jobs.output).tolist()) == [2, 3, 4, 5, 6, 7]
    one = jobs_of([3], [2], 4)
    assert improve(one, np.array([0]), rng=np.random.default_rng(0), rounds=3).tolist() == [0]


def test_the_outcome_depends_on_the_seed_alone_if_rounds_end_the_search() -> None:
    jobs = periods(generate("jaillet-model-2", seed=3, n=25))[0]
    starts = in_line(jobs, np.arange(jobs.n))
    found = [improve(jobs, starts, rng=np.random.default_rng(s), rounds=6) for s in (1, 1, 2)]
    assert (found[0] == found[1]).all()
    assert (found[0] != found[2]).any()


def test_a_set_flag_or_a_passed_deadline_ends_the_search_before_it_begins() -> None:
    jobs = periods(generate("jaillet-model-1", seed=3, n=20))[0]
    starts = in_line(jobs, np.arange(jobs.n))
    rng = np.random.default_rng(0)
    one = np.ones(1, dtype=np.int8)
    assert (improve(jobs, starts, rng=rng, stop=one) == starts).all()
    now = time.perf_counter()
    assert (improve(jobs, starts, rng=rng, deadline=now) == starts).all()


def test_another_thread_stops_it() -> None:
    jobs = periods(generate("jaillet-model-1", seed=3, n=20))[0]
    starts = in_line(jobs, np.arange(jobs.n))
    stop = np.zeros(1, dtype=np.int8)
    found: list[np.ndarray] = []
    search = threading.Thread(
        target=lambda: found.append(improve(jobs, starts, rng=np.random.default_rng(0), stop=stop))
    )
    search.start()
    search.join(1)
    stop[0] = 1
    search.join(60)
    assert not search.is_alive()
    assert jobs.feasible(found[0])
    assert jobs.total(found[0]) <= jobs.total(starts)


def test_a_schedule_that_breaks_the_capacity_and_a_search_without_end_are_refused() -> None:
    jobs = jobs_of([2, 2], [2, 2], 3)
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="feasible"):
        improve(jobs, np.array([0, 0]), rng=rng, rounds=1)
    with pytest.raises(ValueError, match="expected one that ends the search"):
        improve(jobs, np.array([0, 2]), rng=rng)
