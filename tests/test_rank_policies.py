"""Schedulers of Table 1 and the ranked ones: what they take first, and whom they evict."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from readable_rules import Readable

from optsched import Problem
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies import list_policies, make_policy
from optsched.policies.base import Rules
from optsched.policies.engine.simulate import simulate
from optsched.policies.runner import Order, waiting_rank
from optsched.problem.errors import InputError, LoopError
from optsched.problem.instance import Instance, Limits

MODEL = "llama2-7b-a100-infermax-paper"
# The schedulers of the paper's Table 1, and those that rank by what is known of a request.
TABLE_1 = ("vllm", "vllm-hy", "sarathi", "sarathi-pc", "sarathi-nocp", "sarathi-nohy")
RANKED = ("rank-org", "rank-input", "rank-output")


def offline(prompt: list[int], output: list[int], capacity: int) -> Instance:
    """Return requests that are all there at 0, in seconds."""
    return Instance(
        arrival=np.zeros(len(prompt)),
        prompt_tokens=prompt,
        output_tokens=output,
        kv_capacity=capacity,
        kv_accounting="cached",
        time_unit="second",
    )


def batches(instance: Instance, spec: str) -> list[dict[int, int]]:
    """Return a policy's batches as {request: tokens}, after the judge has accepted them."""
    schedule = simulate(Problem(instance, MODEL), spec)
    evaluate(Problem(instance, MODEL), schedule)
    request, tokens = schedule.request.tolist(), schedule.tokens.tolist()
    return [
        dict(zip(request[a:b], tokens[a:b], strict=True))
        for a, b in pairwise(schedule.batch_offsets)
    ]


@pytest.mark.parametrize(
    ("order", "first_to_last"),
    [
        ("prompt", [1, 3, 2, 0]),  # 40, 1, 4, 2
        ("output", [0, 2, 3, 1]),  # 1, 8, 3, 6
        ("total", [2, 3, 1, 0]),  # 41, 9, 7, 8
        ("volume", [2, 3, 0, 1]),  # s o + o (o + 1) / 2: 41, 44, 18, 33
        ("work", [2, 0, 3, 1]),  # s + 10 (o - 1): 40, 71, 24, 52
        ("deadline", [3, 2, 1, 0]),  # arrival + SLO on TTFT: 50, 5.5, 4.1, 3.7
        ("slack", [2, 3, 1, 0]),  # less a prefill alone, s + 0.5: 9.5, 4, -0.4, 1.2
    ],
)
def test_an_order_compares_what_it_says(order: Order, first_to_last: list[int]) -> None:
    instance = Instance(
        [0.0, 0.5, 0.6, 0.9], [40, 1, 4, 2], [1, 8, 3, 6], 100, time_unit="second",
        slo_ttft=[50.0, 5.0, 3.5, 2.8],
    )  # fmt: skip
    cost = BatchCost("ten", 1, {"token": "1000", "decode_request": "9000", "base": "500"})
    rank = waiting_rank(order, instance, instance.output_tokens, cost)
    assert np.argsort(rank).tolist() == first_to_last


def test_a_request_that_is_promoted_is_not_cleared_at_the_same_time() -> None:
    """The judge looks at 60 random runs, of which five at least must end, with evictions."""
    rng, served = np.random.default_rng(0), 0
    rules = Rules(overflow="clear", promote=True, lengths="lower", beta=0.5, admission="present")
    for _ in range(60):
        prompt, output = rng.integers(1, 8, 8), rng.integers(2, 9, 8)
        instance = Instance(
            np.sort(np.round(rng.random(8) * 0.1, 3)), prompt, output,
            int((prompt + output).max() * 1.7), time_unit="second", kv_accounting="cached",
            predicted_lower=np.maximum(1, output - 3), predicted_upper=output + 2,
        )  # fmt: skip
        try:
            schedule = simulate(Problem(instance, MODEL), rules)
        except LoopError:
            continue

        served += evaluate(Problem(instance, MODEL), schedule).evictions.sum() > 0

    assert served >= 5


def test_every_scheduler_of_the_paper_takes_the_same_parameters() -> None:
    common = {"eviction_free", "max_running", "max_prefill_tokens", "watermark"}
    for name in RANKED:
        assert set(list_policies()[name].parameters) == common
    for name in TABLE_1:
        assert set(list_policies()[name].parameters) == common | {"evicted_first"}


def test_table_1_is_as_the_paper_prints_it() -> None:
    # Hybrid batching, chunked prefill, and prefill tokens of a batch.
    expected = {
        "vllm": (False, False, 4096),
        "sarathi": (True, True, 512),
        "sarathi-pc": (True, True, 4096),
        "sarathi-nocp": (True, False, 4096),
        "vllm-hy": (True, False, 4096),
        "sarathi-nohy": (False, False, 4096),
    }
    for name, (hybrid, chunked, prefill) in expected.items():
        rules, _ = make_policy(name)
        assert isinstance(rules, Rules)
        assert (rules.hybrid, rules.chunked, rules.max_prefill_tokens) == (hybrid, chunked, prefill)
        # vLLM's serve those first who wait.
        assert (rules.groups[0] == "waiting") == name.startswith("vllm")


def test_rank_input_takes_small_prompts_first() -> None:
    # P = 6: prompts 2 and 3 are 5 tokens, and with the prompt of 4 they would be 9. So it comes
    # in the next batch, beside the decodes of the others.
    first, second = batches(offline([4, 3, 2], [2, 2, 2], 100), "rank-input:max_prefill_tokens=6")[
        :2
    ]
    assert first == {2: 2, 1: 3}
    assert second == {2: 1, 1: 1, 0: 4}


def test_rank_output_takes_short_outputs_first() -> None:
    # P = 6 holds two prompts of 3: those of outputs 1 and 5.
    first = batches(offline([3, 3, 3], [9, 5, 1], 100), "rank-output:max_prefill_tokens=6")[0]
    assert list(first) == [2, 1]


def test_ranked_schedulers_evict_the_last_by_rank() -> None:
    # 5 + 2 tokens fill M = 8 but for one: the first decodes need 2, so one request must go:
    # the latest by arrival (request 1) under rank-org, the larger prompt (request 0) by input.
    instance = offline([5, 2], [3, 3], 8)
    evicted = {spec: simulate(Problem(instance, MODEL), spec).evicted[0] for spec in RANKED[:2]}
    assert evicted == {"rank-org": 1, "rank-input": 0}


def test_a_refused_waiting_request_stops_the_waiting_but_not_the_running() -> None:
    # Input order 0 (2), 1 (6), 2 (7). M = 10: 0 and 1 run; 2 never fits beside them, and both
    # decode while it waits: 2 + 6 + 1 + 1 = 10.
    got = batches(offline([2, 6, 7], [2, 2, 2], 10), "rank-input")
    assert got[:3] == [{0: 2, 1: 6}, {0: 1, 1: 1}, {2: 7}]


def test_the_group_of_all_stands_alone() -> None:
    with pytest.raises(InputError, match="'all' alone"):
        Rules(groups=("all", "waiting"))
    with pytest.raises(InputError, match="requeue"):
        Rules(groups=("all",), requeue="back")


@pytest.mark.parametrize("hybrid", [None, False])
def test_what_is_projected_of_chunks_is_that_of_the_readable_scheduler(hybrid: bool | None) -> None:
    # Outputs may be longer than predicted, and prompts longer than a batch. So the projection may
    # exceed the capacity where the batch does not, and what is past counts no more.
    rng = np.random.default_rng(23)
    rules = Rules(order="output", admission="lookahead", chunked=True)
    for _ in range(60):
        n = int(rng.integers(3, 9))
        prompt, output = rng.integers(1, 10, n), rng.integers(1, 9, n)
        instance = Instance(
            np.round(rng.integers(0, 11, n) * 0.01, 2), prompt, output,
            int((prompt + output).max() + rng.integers(0, 9)), time_unit="second",
            predicted=np.maximum(1, output + rng.integers(-5, 3, n)),
            limits=Limits(max_batch_tokens=4), hybrid_batching=hybrid,
        )  # fmt: skip
        fast, slow = (
            simulate(Problem(instance, MODEL), one) for one in (rules, Readable(rules, instance))
        )
        for column in ("batch_offsets", "request", "tokens", "evicted_offsets", "evicted"):
            np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column))
        evaluate(Problem(instance, MODEL), fast)


@pytest.mark.parametrize("name", [*TABLE_1, *RANKED])
def test_compiled_and_readable_schedulers_agree(name: str) -> None:
    """`Readable` (tests/readable_rules.py) is the twin in plain Python."""
    generator = np.random.default_rng(17)
    for _ in range(12):
        n = int(generator.integers(2, 12))
        prompt, output = generator.integers(1, 12, n), generator.integers(1, 9, n)
        instance = Instance(
            arrival=np.sort(generator.integers(0, 8, n)) * 0.01,
            prompt_tokens=prompt,
            output_tokens=output,
            kv_capacity=int((prompt + output).max() + generator.integers(0, 20)),
            time_unit="second",
            hybrid_batching=None if generator.random() < 0.7 else False,
        )
        free = str(generator.random() < 0.3).lower()
        first = str(generator.random() < 0.5).lower()
        spec = (
            f"{name}:max_prefill_tokens={generator.integers(4, 14)},eviction_free={free},"
            f"watermark={generator.choice([0.0, 0.1])}"
        )
        if name in TABLE_1:
            spec += f",evicted_first={first}"
        rules, _ = make_policy(spec)
        assert isinstance(rules, Rules)
        fast = simulate(Problem(instance, MODEL), rules)
        slow = simulate(Problem(instance, MODEL), Readable(rules, instance))
        for column in ("batch_offsets", "request", "tokens", "evicted_offsets", "evicted"):
            np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column))
