"""Lower bounds on percentiles of latency and TTFT."""

from __future__ import annotations

import warnings
from operator import add

import brute_force
import numpy as np
import pytest
from test_capacity import stream
from test_most_in_time import tiny

from optsched import BatchCost, Instance, Problem, bound, evaluate, load_cost_model, run
from optsched.bounds.base import BoundTask
from optsched.bounds.tail import percentile
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.problem.objective import Objective

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})
METRICS = [f"p{q}_{column}" for column in ("latency", "ttft") for q in (50, 90, 99)]


def value(instance: Instance, metric: str, cost: BatchCost | None = None) -> float:
    """Return the bound on a percentile."""
    task = BoundTask(instance, cost, Objective(metric))
    return percentile(task, Budget(60.0)).value


def test_slos_of_the_instance_make_no_request_slower() -> None:
    # All three run together from 0: outputs of 1, 1 and 10 tokens end at 1, 1 and 10.
    plain = Instance([0] * 3, [5] * 3, [1, 1, 10], kv_capacity=1000)
    strict = Instance([0] * 3, [5] * 3, [1, 1, 10], kv_capacity=1000, slo_ttft=[0.5, 9, 9],
                      slo_tpot=[0.5] * 3)  # fmt: skip
    for metric, least in (("p50_latency", 1), ("p90_ttft", 1)):
        assert value(strict, metric) == value(plain, metric) <= least


def test_one_at_a_time_by_hand() -> None:
    # Three rounds one after another: times 1, 2 and 3. The median is 2, and p90 lies at 1.8 of the
    # places 0, 1, 2: 0.2 * 2 + 0.8 * 3 = 2.8.
    instance = Instance([0] * 3, [2] * 3, [1] * 3, kv_capacity=3)
    assert value(instance, "p50_latency") == 2
    assert value(instance, "p90_ttft") == pytest.approx(2.8)
    found = bound(Problem(instance, objective="p90_latency"), time_limit_s=1)
    assert (found.method, found.bound, found.value) == ("tail-volume", pytest.approx(2.8),
                                                          pytest.approx(2.8))  # fmt: skip


def test_prefills_in_seconds_by_hand() -> None:
    # M = 10, prompts of 10 fill it: 20 ms each. Of five at 0 the third is there by 60 ms at best.
    instance = Instance(
        [0.0] * 5, [10] * 5, [1] * 5, kv_capacity=10, time_unit="second", kv_accounting="cached"
    )
    # The bound is bisected until it is known to a thousandth.
    assert value(instance, "p50_ttft", PLAIN) == pytest.approx(0.06, rel=3e-3)
    judged = run(Problem(instance, PLAIN), "fcfs").metrics["p50_ttft"]
    assert judged == pytest.approx(0.06)


def test_no_starts_in_rounds_are_quicker() -> None:
    """Of each place k brute force finds the least time within which more than k requests can be.
    No schedule is quicker at all places, so the percentile of these times is none that a
    schedule beats, and the bound is below it."""
    generator = np.random.default_rng(6)
    for _ in range(25):
        instance = tiny(generator)
        n = instance.n
        for column, counted in (
            ("latency", lambda a, o, s: s + o - a), ("ttft", lambda a, o, s: s + 1 - a),
        ):  # fmt: skip
            best = []  # of each place alone: no schedule has all of them smaller
            for k in range(n):
                x = 0
                while True:
                    x += 1
                    brute_force.OBJECTIVES["late"] = (
                        lambda a, o, s, x=x, counted=counted: int(counted(a, o, s) > x), add
                    )  # fmt: skip
                    late = brute_force.brute_force(instance, "late")[0]
                    del brute_force.OBJECTIVES["late"]
                    if n - late > k:
                        break
                best.append(x)
            for q in (50, 90, 99):
                assert value(instance, f"p{q}_{column}") <= np.percentile(best, q) + 1e-9


@pytest.mark.parametrize(
    "model", ["plain", pytest.param("llama2-7b-a100-infermax", marks=pytest.mark.whole)]
)
def test_no_policy_is_quicker(model: str) -> None:
    cost = PLAIN if model == "plain" else load_cost_model(model)
    generator = np.random.default_rng(7)
    close = 0
    for _ in range(12):
        n, capacity = int(generator.integers(1, 30)), int(generator.integers(20, 80))
        prompt = generator.integers(1, 18, n)
        instance = Instance(
            generator.random(n) * generator.choice([0.0, 0.2, 1.0]), prompt,
            generator.integers(1, capacity - prompt + 1).clip(1, 12), kv_capacity=capacity,
            time_unit="second",
        )  # fmt: skip
        least = {metric: value(instance, metric, cost) for metric in METRICS}
        for policy in ("fcfs", "vllm", "least-work"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    schedule = simulate(Problem(instance, cost), policy)
                except OptschedError:
                    continue
                found = evaluate(Problem(instance, cost), schedule).metrics
            for metric in METRICS:
                assert least[metric] <= found[metric] * (1 + 1e-9)
                # So that bounds are not all far too low.
                close += least[metric] > 0.3 * found[metric]
    assert close > 20


def test_prices_prove_more_and_no_policy_is_quicker() -> None:
    instance = stream(n=120, rate=6.0)
    cost = load_cost_model("llama2-7b-a100-infermax")
    task = BoundTask(instance, cost, Objective("p99_ttft"))
    work, priced = (percentile(task, Budget(seconds)).value for seconds in (0.2, 5.0))
    assert work <= priced
    for policy in ("fcfs", "spf", "sarathi"):
        assert priced <= run(Problem(instance, cost), policy).metrics["p99_ttft"]
