"""The twin of vLLM's version 1 scheduler: by hand, and compiled against readable."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from readable_vllm import ReadableVllm
from slow_judge import TIMED, random_instance
from test_kv_blocks import in_blocks
from test_simulate import cost_of, evicted_of, random_predictions, rows_of, run_or_error, same

from optsched import Problem
from optsched.costs.cost import UnitCost
from optsched.judge.evaluate import evaluate
from optsched.policies import is_clairvoyant, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.policies.vllm_v1 import VllmV1
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance, Limits


def seconds(prompt: list[int], output: list[int], kv_capacity: int, **fields) -> Instance:
    """Requests that are all there at 0, in order of index."""
    options = {"time_unit": "second", "kv_accounting": "cached", **fields}
    return Instance([0.0] * len(prompt), prompt, output, kv_capacity, **options)


def random_policy(rng: Random) -> VllmV1:
    """Draw the twin's parameters, small enough to bind."""
    by_priority = rng.random() < 0.5
    return VllmV1(
        max_num_seqs=rng.choice([1, 2, 3, 256]),
        max_num_batched_tokens=rng.choice([1, 3, 5, 8, 2048]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
        watermark=rng.choice([0.0, 0.0, 0.1, 0.4]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        prefill_schedule_interval=rng.choice([1, 1, 2, 5]),
        policy="priority" if by_priority else "fcfs",
        priority=rng.choice(["arrival", "prompt", "output", "work"]) if by_priority else "arrival",
    )


def test_the_compiled_loop_decides_as_the_readable_twin_and_the_judge_accepts_it() -> None:
    rng, finished, preempted = Random(31), 0, 0
    for number in range(400):
        instance = random_predictions(rng, random_instance(rng, most=8))
        if number % 2:
            instance = in_blocks(rng, instance)
        policy, cost = random_policy(rng), cost_of(instance)
        fast = run_or_error(instance, policy)
        if isinstance(fast, OptschedError):
            # Nothing else is refused: a prompt that may not be split may fit into no step.
            assert instance.chunked_prefill is False
            continue
        slow = run_or_error(instance, ReadableVllm(policy, instance, cost or UnitCost()))
        assert not isinstance(slow, OptschedError), (slow, vars(policy), instance.to_dict())
        assert same(fast, slow), (vars(policy), instance.to_dict(), rows_of(fast), rows_of(slow))
        preempted += evaluate(Problem(instance, cost), fast).metrics["evictions"] > 0
        finished += 1
    assert finished > 300  # of 400
    assert preempted > 30  # runs in which somebody lost KV: they agree on that, too


def test_running_requests_come_first_and_a_prompt_is_cut_at_the_budget() -> None:
    # Budget 6. Request 0 and 2 tokens of request 1; then 0 decodes beside 5 more; then both.
    schedule = simulate(
        Problem(seconds([4, 8], [3, 2], 40), TIMED), "vllm-v1:max_num_batched_tokens=6"
    )
    assert rows_of(schedule) == [{0: 4, 1: 2}, {0: 1, 1: 5}, {0: 1, 1: 1}, {1: 1}]


def test_the_whole_input_must_fit_before_its_first_chunk_is_admitted() -> None:
    # Request 0 holds 4 of 10 tokens. All 8 of request 1 do not fit beside, its first 2 do.
    instance, budget = seconds([4, 8], [2, 1], 10), "vllm-v1:max_num_batched_tokens=6"
    assert rows_of(simulate(Problem(instance, TIMED), budget)) == [{0: 4}, {0: 1}, {1: 6}, {1: 2}]
    first = simulate(Problem(instance, TIMED), f"{budget},scheduler_reserve_full_isl=false")
    # 4 + 2; then 5 + 7 do not fit into 10, and request 1 loses its 2 tokens again.
    assert rows_of(first) == [{0: 4, 1: 2}, {0: 1}, {1: 6}, {1: 2}]


def test_the_last_admitted_is_preempted_and_waits_first() -> None:
    # 3 + 3 + 3 of 10 tokens. In the next step each takes one more: 12 do not fit, so request 2
    # goes, and with 8 of 10 nobody is admitted in that step. In the one after, its 4 do not fit
    # beside 10. Requests 0 and 1 are done then, and it is before request 3.
    instance = seconds([3, 3, 3, 1], [3, 3, 3, 1], 10)
    schedule = simulate(Problem(instance, TIMED), "vllm-v1:max_num_seqs=3")
    assert evicted_of(schedule) == {1: [2]}
    assert rows_of(schedule) == [
        {0: 3, 1: 3, 2: 3}, {0: 1, 1: 1}, {0: 1, 1: 1}, {2: 4, 3: 1}, {2: 1},
    ]  # fmt: skip


def test_by_priority_the_least_urgent_is_preempted_though_it_has_its_tokens_already() -> None:
    # Request 0 came first and has the longest output: it loses its place to request 1.
    # Of 9 tokens 4 + 4 are held, and only one of the two may have its next.
    instance = seconds([4, 4], [5, 2], 9)
    first = simulate(Problem(instance, TIMED), "vllm-v1:policy=priority,priority=output")
    assert rows_of(first)[:2] == [{1: 4, 0: 4}, {1: 1}]
    assert evicted_of(first) == {1: [0]}
    late = replace(instance, arrival=[0.0, 0.001])
    last = simulate(Problem(late, TIMED), "vllm-v1:policy=priority,priority=output")
    assert rows_of(last)[:3] == [{0: 4}, {0: 1, 1: 4}, {1: 1}]
    assert evicted_of(last) == {2: [0]}


def test_who_runs_behind_a_preempted_request_is_served_in_the_same_step() -> None:
    # 5 + 3 + 3 of 12 tokens. Request 0 takes the last one; for request 1 it is then preempted, as
    # the least urgent, and request 2 has its token, too: 4 + 4.
    instance = seconds([4, 3, 3], [9, 2, 3], 12)
    late = replace(instance, arrival=[0.0, 0.001, 0.001])
    schedule = simulate(Problem(late, TIMED), "vllm-v1:policy=priority,priority=output")
    assert rows_of(schedule)[:3] == [{0: 4}, {0: 1, 1: 3, 2: 3}, {1: 1, 2: 1}]
    assert evicted_of(schedule) == {2: [0]}


def test_the_watermark_is_kept_free_unless_nothing_runs() -> None:
    # 0.3 of 10 blocks and the one that vLLM keeps empty: 3 tokens stay free. 4 + 4 + 3 > 10.
    instance = seconds([4, 4], [1, 1], 10)
    assert rows_of(simulate(Problem(instance, TIMED), "vllm-v1")) == [{0: 4, 1: 4}]
    assert rows_of(simulate(Problem(instance, TIMED), "vllm-v1:watermark=0.3")) == [{0: 4}, {1: 4}]
    alone = seconds([10], [1], 10)
    assert rows_of(simulate(Problem(alone, TIMED), "vllm-v1:watermark=0.9")) == [{0: 10}]


def test_a_long_prefill_is_held_back_only_where_others_are_served() -> None:
    spec = "vllm-v1:long_prefill_token_threshold=3"
    assert rows_of(simulate(Problem(seconds([8], [1], 20), TIMED), spec)) == [{0: 8}]
    # Beside request 1 it gets 3 tokens; when request 1 is done it is alone and gets the rest.
    assert rows_of(simulate(Problem(seconds([8, 1], [1, 1], 20), TIMED), spec)) == [
        {0: 3, 1: 1},
        {0: 5},
    ]


def test_prefills_are_deferred_between_the_steps_of_the_interval() -> None:
    # Request 1 comes in step 1. Request 0 decodes alone until step 3.
    instance = replace(seconds([2, 4], [6, 1], 20), arrival=[0.0, 0.001])
    schedule = simulate(Problem(instance, TIMED), "vllm-v1:prefill_schedule_interval=3")
    assert rows_of(schedule)[:4] == [{0: 2}, {0: 1}, {0: 1}, {0: 1, 1: 4}]


def test_blocks_decide_whether_a_token_needs_room() -> None:
    # Prompts of 4 fill a block of 4. The first decode takes another block: 4 blocks of 4 for two.
    instance = seconds([4, 4], [2, 2], 12, kv_block_tokens=4)
    schedule = simulate(Problem(instance, TIMED), "vllm-v1")
    assert evicted_of(schedule) == {1: [1]}
    assert rows_of(schedule) == [{0: 4, 1: 4}, {0: 1}, {1: 5}]


def test_limits_of_the_instance_hold_beside_its_own() -> None:
    instance = seconds([4, 4], [2, 2], 20, limits=Limits(max_running=1))
    assert rows_of(simulate(Problem(instance, TIMED), "vllm-v1")) == [
        {0: 4},
        {0: 1},
        {1: 4},
        {1: 1},
    ]
    apart = seconds([4, 4], [2, 1], 20, hybrid_batching=False)
    rows = rows_of(simulate(Problem(apart, TIMED), "vllm-v1:max_num_batched_tokens=6"))
    assert rows == [{0: 4, 1: 2}, {0: 1}, {1: 2}]  # the first of a step decides its phase
    # Of 5 tokens the first prompt leaves 1, and the second is not split: it comes beside a decode.
    whole = seconds([4, 4], [2, 1], 20, chunked_prefill=False)
    assert rows_of(simulate(Problem(whole, TIMED), "vllm-v1:max_num_batched_tokens=5")) == [
        {0: 4}, {0: 1, 1: 4},
    ]  # fmt: skip


def test_in_rounds_a_preempted_request_starts_again() -> None:
    instance = Instance([0, 0], [3, 3], [3, 3], 8, kv_accounting="cached")
    schedule = simulate(instance, "vllm-v1")
    assert schedule.evict_mode == "restart"
    # Both hold 3 and then 4; 5 + 5 do not fit into 8.
    assert rows_of(schedule) == [{0: 3, 1: 3}, {0: 1, 1: 1}, {0: 1}, {1: 3}, {1: 1}, {1: 1}]


def test_only_priorities_by_length_are_clairvoyant() -> None:
    instance = seconds([1], [1], 4)
    for spec, uses in (
        ("vllm-v1", False),
        ("vllm-v1:policy=priority", False),
        ("vllm-v1:policy=priority,priority=prompt", False),
        ("vllm-v1:policy=priority,priority=work", True),
    ):
        assert is_clairvoyant(*make_policy(spec), instance) is uses


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("max_num_seqs=0", "max_num_seqs: found 0; expected an integer >= 1"),
        ("max_num_batched_tokens=0", "max_num_batched_tokens: found 0"),
        ("long_prefill_token_threshold=-1", "expected an integer >= 0"),
        ("prefill_schedule_interval=0", "prefill_schedule_interval: found 0"),
        ("watermark=1", "watermark: found 1.0; expected 0 <= watermark < 1"),
        ("policy=sjf", "policy: found 'sjf'; expected one of fcfs, priority, lpm"),
        ("policy=priority,priority=random", "priority: found 'random'; expected one of arrival"),
        ("priority=output", "priority: found 'output'; expected it with policy=priority"),
    ],
)
def test_a_bad_parameter_is_named(options: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_policy(f"vllm-v1:{options}")
