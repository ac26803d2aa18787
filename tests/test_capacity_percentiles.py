"""The load at which percentiles are within limits: by policy, by the search, and proved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import invoke, one_line_error
from test_capacity import stream
from test_service_bound import most_by_search

import optsched
from optsched import BatchCost, Instance, Problem, verify, write_instance
from optsched.analysis.capacity_answer import Capacity
from optsched.analysis.capacity_question import (
    Question,
    min_within,
    scale_arrivals,
    with_percentiles_as_slos,
)
from optsched.analysis.capacity_search import CapacitySearch
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, UsageError

MODEL = "llama2-7b-a100-infermax"


def capacity(instance: Instance, limits: dict[str, float], **more: Any) -> Capacity:
    """Policies fcfs and sarathi and the bound, without the search unless asked for."""
    asked: dict[str, Any] = {"search_s": 0.0, "percentiles": limits, **more}
    return optsched.capacity(Problem(instance, MODEL), ["fcfs", "sarathi"], **asked)


def test_the_percentile_is_within_its_limit_at_the_largest_rate_and_not_at_the_next() -> None:
    instance, limits = stream(120), {"p90_ttft": 0.8, "p99_tpot": 0.06}
    found = capacity(instance, limits)
    for row in found.rows:
        # `missed` is the smallest rate tried at which a percentile is above its limit.
        for rate, kept in ((row.value, True), (row.missed, False)):
            problem = Problem(scale_arrivals(instance, rate), MODEL, slo_ttft=0.8, slo_tpot=0.06)
            metrics = optsched.run(problem, row.policy).metrics
            assert kept == all(metrics[name] <= limit for name, limit in limits.items())
        assert row.missed <= found.bound
    assert found.verdict.startswith("p90_ttft <= 0.8, p99_tpot <= 0.06: ")
    assert found.to_dict()["percentiles"] == limits


def test_each_limit_is_kept_by_whichever_requests() -> None:
    # Separately kept limits ask for no more than the same share within both.
    instance = stream(120)
    apart = capacity(instance, {"p90_ttft": 0.8, "p99_tpot": 0.06})
    both = optsched.capacity(
        Problem(instance, MODEL, slo_ttft=0.8, slo_tpot=0.06), ["fcfs"], attainment=0.99,
        search_s=0.0,
    )  # fmt: skip
    assert apart.rows[0].value >= both.rows[0].value
    assert apart.bound >= both.bound


@pytest.mark.parametrize("n", [1, 2, 3, 10, 11, 99, 100, 101, 150, 199, 200, 201, 250])
@pytest.mark.parametrize("name", ["p50_ttft", "p90_ttft", "p99_ttft"])
def test_how_many_are_within_the_limit_of_a_percentile_at_least(n: int, name: str) -> None:
    # Those that are late are late for ever. One more of them, and no percentile is within.
    instance = Instance([0.0] * n, [1] * n, [1] * n, kv_capacity=999, time_unit="second")
    some = min_within(instance, name)
    share = int(name[1:3])
    late = np.inf if (n - 1) * share % 100 == 0 else 2.0  # else the next one counts in part
    kept = np.append(np.full(some, 0.0), np.full(n - some, late))
    assert np.percentile(kept, share, method="lower") == 0
    one_less = np.append(np.full(some - 1, 0.0), np.full(n - some + 1, np.inf))
    assert np.percentile(one_less, share, method="lower") == np.inf
    # One token has no TPOT, so it is within its limit.
    assert min_within(instance, "p99_tpot") == n


def contradicted(seed: int, count: int) -> int:
    """Check that prices leave those in time of schedules that keep percentiles; count proofs."""
    generator, proofs = np.random.default_rng(seed), 0
    names = ["p50_ttft", "p90_ttft", "p90_latency", "p99_tpot", "p99_latency"]
    for k in range(count):
        instance = stream(int(generator.integers(5, 40)), float(generator.choice([4, 9])), seed + k)
        metrics = optsched.run(Problem(instance, MODEL), "spf").metrics
        some = generator.choice(names, 2, replace=False).tolist()
        asked = {name: float(metrics[name]) for name in some}
        if some[0][3:] == some[1][3:]:  # of one time
            del asked[some[1]]
        problem, share = with_percentiles_as_slos(Problem(instance, MODEL), asked)
        for ask, need in Question(problem, share, percentiles=asked).asks():
            assert ask.between(need, Budget(None)).most >= need, (asked, instance.to_dict())
            proofs += ask.between(need, Budget(None), 4.0, 4.0).most < need
    return proofs


def test_no_schedule_that_keeps_its_percentiles_is_contradicted() -> None:
    assert contradicted(1, 6) > 0  # and something is proved at a higher load


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_the_same_by_the_hundred(seed: int) -> None:
    # Proofs at a higher load: prices leave out somebody at times.
    assert contradicted(seed, 150) > 10


def test_the_median_of_three_is_that_of_two_in_exhaustive_search() -> None:
    # 0.6 s a batch whatever it holds, 0.3 s apart: the first batch ends at 0.6 or later, the
    # next at 1.2, and then at most two are within 0.9 s, whoever waits.
    cost = BatchCost("whole", 1, {"base": "600"})
    instance = Instance(np.arange(3) * 0.3, [1] * 3, [1] * 3, kv_capacity=100, time_unit="second")
    most = most_by_search(instance, cost, {"slo_ttft": 0.9})
    # The median of three is the second: two within 0.9 s are enough.
    assert most >= min_within(instance, "p50_ttft") == 2
    problem, share = with_percentiles_as_slos(Problem(instance, cost), {"p50_ttft": 0.9})
    search = CapacitySearch(
        Question(problem, share, percentiles={"p50_ttft": 0.9}), Budget(None), None
    )
    # At scale 1, which is the instance as it is, two can be in time.
    impossible = search.impossible()
    assert impossible is None or impossible > 1


def test_the_search_is_judged_by_percentiles() -> None:
    instance, limits = stream(60), {"p90_ttft": 0.5}
    found = capacity(instance, limits, search_s=3.0)
    assert found.served is not None
    assert found.best_schedule.metrics["p90_ttft"] <= 0.5  # the limit asked for
    assert found.served[0] < found.bound


def test_the_command_takes_percentiles_and_proves_one(tmp_path: Path) -> None:
    write_instance(stream(60), tmp_path / "stream.json")
    file, proof = str(tmp_path / "stream.json"), str(tmp_path / "proof.json")
    words = ("capacity", file, MODEL, "--search", 0, "--policy", "fcfs")
    made = invoke(*words, "--percentile", "p90_ttft=500ms", "--certificate-out", proof)
    assert made.exit_code == 0, made.stderr
    assert "p90_ttft <= 0.5: fcfs attains it up to rate scale" in made.stdout
    # 0.9 * 59 = 53.1, so 54 are within the limit at least, and 53 are too few.
    # Of 60 values, counted from 0, the 90th percentile lies at place 0.9 * 59.
    assert json.loads(Path(proof).read_text())["value"] == 53
    assert verify(Problem(stream(60), MODEL), proof) > 1  # a rate scale above the file's own load
    two = ("--percentile", "p90_ttft=500ms", "--percentile", "p99_tpot=60ms")
    assert invoke(*words, *two).exit_code == 0
    # Nothing certifies two percentiles together.
    refused = invoke(*words, *two, "--certificate-out", proof)
    assert "expected one machine in seconds" in one_line_error(refused, 2)
    both = invoke(*words, *two, "--attainment", 0.95)
    assert "found 0.95 beside limits of percentiles" in one_line_error(both, 2)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"p98_ttft": 1.0}, "percentile 'p98_ttft' is unknown"),
        ({"p99_queuing_delay": 1.0}, "percentile 'p99_queuing_delay' is unknown"),
        ({"p99_ttft": 0}, "p99_ttft: found 0; expected a time > 0"),
        ({"p99_ttft": 1.0, "p50_ttft": 0.5}, "found two of one time"),
    ],
)
def test_what_is_no_limit_of_a_percentile_is_one_line(limits: dict, words: str) -> None:
    with pytest.raises((InputError, UsageError), match=words):
        capacity(stream(20), limits)
    with pytest.raises(UsageError, match="found SLOs as well"):
        optsched.capacity(
            Problem(stream(20), MODEL, slo_ttft=1.0), ["fcfs"], percentiles={"p99_ttft": 1.0}
        )
