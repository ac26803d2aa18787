"""Bounds of the batch model: below every policy's schedule, and exact where they can be."""

from __future__ import annotations

import numpy as np
import pytest

from optsched import BatchCost, Instance, Limits, evaluate, load_cost_model, simulate
from optsched.bounds.batch import unavoidable_work, work_makespan, work_tel, work_ttft
from optsched.errors import OptschedError

# One layer, milliseconds: 1 per token, 10 per batch, 5 for decoding, 7 for prefilling.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10", "decode_base": "5", "prefill_base": "7"})


def test_one_request_alone_is_its_chain() -> None:
    # Prefill of 3 tokens: 10 + 7 + 3 = 20 ms; two decodes: 10 + 5 + 1 = 16 ms each; 52 in all.
    instance = Instance([1.0], [3], [3], kv_capacity=5, time_unit="second", kv_accounting="cached")
    metrics = evaluate(instance, simulate(instance, "fcfs", PLAIN), PLAIN).metrics
    assert metrics["tel"] == pytest.approx(0.052)
    assert work_tel(instance, PLAIN) == pytest.approx(0.052, rel=1e-6)
    assert work_makespan(instance, PLAIN) == pytest.approx(1.052, rel=1e-6)
    assert work_ttft(instance, PLAIN) == pytest.approx(0.020, rel=1e-6)


def test_shares_of_fixed_costs_fill_a_full_batch() -> None:
    # M = 5 and s = 5, o = 1: each request alone fills the KV, so its share is the whole fixed
    # cost: 10 + 7 + 5 = 22 ms. Two of them complete at 22 and 44 at best, and do.
    instance = Instance(
        [0.0, 0.0], [5, 5], [1, 1], kv_capacity=5, time_unit="second", kv_accounting="cached"
    )
    assert unavoidable_work(instance, PLAIN).total == pytest.approx([0.022, 0.022], rel=1e-6)
    assert work_tel(instance, PLAIN) == pytest.approx(0.066, rel=1e-6)
    metrics = evaluate(instance, simulate(instance, "fcfs", PLAIN), PLAIN).metrics
    assert metrics["tel"] == pytest.approx(0.066)


def test_a_split_prompt_costs_no_less_than_the_bound_says() -> None:
    # square 1, cross 0: 4 tokens whole cost 16, as 2 + 2 cost 8, as 1 + 1 + 1 + 1 cost 4.
    cost = BatchCost("squares", 1, {"base": "1", "prefill_square": "1"})
    free = Instance([0.0], [4], [1], kv_capacity=4, time_unit="second", kv_accounting="cached")
    whole = Instance(
        [0.0], [4], [1], kv_capacity=4, time_unit="second", kv_accounting="cached",
        chunked_prefill=False,
    )  # fmt: skip
    # Own work and the share of base: 4 + 1 = 5 ms; unsplit 16 + 1 = 17 ms.
    assert unavoidable_work(free, cost).total == pytest.approx([0.005], rel=1e-6)
    assert unavoidable_work(whole, cost).total == pytest.approx([0.017], rel=1e-6)


@pytest.mark.parametrize("model", ["llama2-7b-a100-infermax", "llama2-7b-a100-fit", "plain"])
def test_no_policy_beats_a_bound(model: str) -> None:
    cost = PLAIN if model == "plain" else load_cost_model(model)
    generator = np.random.default_rng(7)
    judged = 0
    for _ in range(150):
        n = int(generator.integers(1, 7))
        capacity = int(generator.integers(8, 30))
        prompt = generator.integers(1, 6, n)
        output = np.array([generator.integers(1, capacity - s + 1) for s in prompt])
        token_limit = None if generator.random() < 0.6 else int(generator.integers(3, 9))
        instance = Instance(
            generator.random(n) * generator.choice([0.0, 0.05, 0.5]), prompt, output,
            kv_capacity=capacity, time_unit="second",
            kv_accounting="generated" if generator.random() < 0.5 else "cached",
            limits=Limits(max_batch_tokens=token_limit),
        )  # fmt: skip
        bounds = {
            "tel": work_tel(instance, cost),
            "makespan": work_makespan(instance, cost),
            "mean_ttft": work_ttft(instance, cost),
        }
        for policy in ("fcfs", "vllm", "sarathi", "sarathi:max_prefill_tokens=3", "mc-sf"):
            try:
                metrics = evaluate(instance, simulate(instance, policy, cost), cost).metrics
            except OptschedError:
                continue  # a prompt beyond a hard limit that the policy does not split
            judged += 1
            for name, bound in bounds.items():
                value = metrics[name]
                assert bound is not None
                assert value is not None
                assert bound <= value * (1 + 1e-12)
    assert judged > 300
