"""The prefix cache of vLLM's twin: compiled against readable, by hand, and before the judge."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from command_line import run
from readable_vllm import ReadableVllm
from sharing_cases import engine_instance, sharing_instance
from slow_judge import TIMED
from test_simulate import cost_of, evicted_of, rows_of, same
from test_vllm_v1 import random_policy

from optsched import Problem
from optsched.analysis.compare import compare
from optsched.costs.cost import UnitCost
from optsched.files.read_write import write_instance
from optsched.judge.evaluate import evaluate
from optsched.policies import Batch, View, is_clairvoyant, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, PolicyError, TooLargeError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule
from optsched.workloads.generate import generate

# Parameters of the twin, of which each seed takes one.
RULES = (
    {},
    {"eviction": "next-use"},
    {"eviction": "next-use", "max_num_batched_tokens": 5},
    {"eviction": "ttl", "ttl": 0.001},
    {"eviction": "ttl", "ttl": 5.0},
    {"merge_blocks": True},
    {"policy": "lpm", "priority": "arrival"},
    {"policy": "shortest-prefill-first", "priority": "arrival", "merge_blocks": True},
    {"policy": "hrrn", "priority": "arrival"},
)


def tight(rng: Random) -> Instance:
    """Return requests with shared prefixes that arrive one after another, with little room."""
    if rng.random() < 0.5:
        instance = engine_instance(rng)
    else:
        instance = sharing_instance(rng, most=8)
        largest = int(instance.peak_tokens.max()) + instance.kv_block_tokens
        instance = replace(instance, kv_capacity=largest + rng.randint(0, 12))
    gap = rng.choice([0, 0, 3]) if instance.in_rounds else rng.choice([0.0, 0.0, 0.002, 0.02])
    return replace(instance, arrival=[gap * k for k in range(instance.n)])


def claim_alike(one: Schedule, two: Schedule) -> bool:
    """Return whether two schedules claim the same tokens."""
    zeros = np.zeros_like(one.tokens)
    return np.array_equal(
        *(zeros if schedule.reused is None else schedule.reused for schedule in (one, two))
    )


def alike(seed: int) -> np.ndarray:
    """Run both twins; return evictions, tokens found, and what was kept."""
    rng = Random(seed)
    instance, rule = tight(rng), RULES[seed % len(RULES)]
    policy, cost = replace(random_policy(rng), **rule), cost_of(instance)
    fast = simulate(Problem(instance, cost), policy)
    slow = simulate(Problem(instance, cost), ReadableVllm(policy, instance, cost or UnitCost()))
    assert same(fast, slow), (seed, rows_of(fast), rows_of(slow))
    assert claim_alike(fast, slow), (seed, fast.reused, slow.reused)
    judged = evaluate(Problem(instance, cost), fast)
    names = ("evictions", "prefix_hit_tokens", "peak_retained_kv")
    return np.array([judged.metrics[name] for name in names])


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 30_000), marks=pytest.mark.slow)]
)
def test_the_compiled_cache_finds_what_the_readable_one_finds(seeds) -> None:
    evictions, hits, kept = np.array([alike(seed) for seed in seeds]).T
    # Shares of runs with evictions, with tokens found and with KV kept: none is rare.
    assert (evictions > 0).mean() > 0.1
    assert (hits > 0).mean() > 0.3
    assert (kept > 0).mean() > 0.1


def sharing(prompt, output, parent, shared, kv_capacity, arrival=None, block=4, **fields):
    """Requests in seconds whose blocks of 4 tokens can be shared, all there at 0 or apart."""
    return Instance(
        [0.0] * len(prompt) if arrival is None else arrival, prompt, output, kv_capacity, "second",
        "cached", prefix_parent=parent, prefix_tokens=shared, prefix_block_tokens=block,
        **{"kv_block_tokens": block, **fields},
    )  # fmt: skip


def found(instance: Instance, spec: str = "vllm-v1") -> dict[int, list[int]]:
    """Run a policy, let the judge look, and return what requests claim, in order."""
    schedule = simulate(Problem(instance, TIMED), spec)
    evaluate(Problem(instance, TIMED), schedule)
    claims: dict[int, list[int]] = {}
    for i, r in zip(schedule.request.tolist(), schedule.reused.tolist(), strict=True):
        if r:
            claims.setdefault(i, []).append(r)
    return claims


# One after another: at 1 s the first has long ended.
APART = [0.0, 1.0, 2.0, 3.0]
TWICE = sharing([8, 8], [1, 1], [None, 0], [0, 8], 40)
"""The same prompt twice, which ends on a block."""


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again() -> None:
    """`TWICE` is one prompt of 8 tokens, twice, in blocks of 4."""
    later = replace(TWICE, arrival=[0.0, 1.0])
    assert rows_of(simulate(Problem(later, TIMED), "vllm-v1")) == [{0: 8}, {1: 4}]
    assert found(later) == {1: [4]}
    # With pages of one token it is the last token.
    assert found(replace(later, prefix_block_tokens=1, kv_block_tokens=1)) == {1: [7]}


def test_what_an_earlier_request_of_the_step_computes_is_found_in_it() -> None:
    # Of 8 tokens the second finds a block of 4.
    assert rows_of(simulate(Problem(TWICE, TIMED), "vllm-v1")) == [{0: 8, 1: 4}]
    assert found(TWICE) == {1: [4]}
    # Budget 6: request 0 fills one block in the first step, and both in the second.
    assert found(TWICE, "vllm-v1:max_num_batched_tokens=6") == {1: [4]}


def test_outputs_are_found_by_the_next_turn_up_to_the_last_token_that_was_cached() -> None:
    # 6 + 4 tokens, of which the last is never cached: 9 tokens are two blocks.
    assert found(sharing([6, 12], [4, 1], [None, 0], [0, 10], 40, [0.0, 1.0])) == {1: [8]}
    # Of 6 + 2 tokens 7 are cached: one block.
    assert found(sharing([6, 12], [2, 1], [None, 0], [0, 8], 40, [0.0, 1.0])) == {1: [4]}


def test_nothing_is_found_without_columns_or_with_caching_off() -> None:
    """`TWICE` is one prompt of 8 tokens, twice."""
    off = simulate(Problem(TWICE, TIMED), "vllm-v1:prefix_caching=false")
    assert off.reused is None
    assert rows_of(off) == [{0: 8, 1: 8}]
    plain = replace(TWICE, prefix_parent=None, prefix_tokens=None, prefix_block_tokens=None)
    assert simulate(Problem(plain, TIMED), "vllm-v1").reused is None


def test_the_last_block_of_who_finished_first_is_taken_first() -> None:
    # 4 blocks. Request 0 leaves 2 and 1 of them is empty, so request 1 takes request 0's second.
    arrival = APART[:3]
    instance = sharing([8, 9, 12], [1, 1, 1], [None, None, 0], [0, 0, 8], 16, arrival)
    assert found(instance) == {2: [4]}
    assert found(replace(instance, kv_capacity=20)) == {2: [8]}


def test_a_preempted_request_finds_its_own_blocks() -> None:
    # 4 blocks of 4 hold 8 + 7 tokens. In the second step request 0 takes a fifth, and request 1
    # goes, whose last block was not full. Its first is still there when it comes back.
    instance = sharing([8, 7], [2, 2], [None, None], [0, 0], 16)
    schedule = simulate(Problem(instance, TIMED), "vllm-v1")
    assert evicted_of(schedule) == {1: [1]}
    assert rows_of(schedule) == [{0: 8, 1: 7}, {0: 1}, {1: 4}]
    assert found(instance) == {1: [4]}


def test_equal_blocks_that_two_compute_are_two_unless_they_are_merged() -> None:
    # 12 tokens each, 4 a step. Request 1 finds the first block in the first step and computes the
    # second, which request 0 computes after it. Before the third step 4 blocks are taken unmerged,
    # and 3 merged: then the third of request 0 fits into 16 tokens without that of request 1.
    instance = sharing([12, 12], [1, 1], [None, 0], [0, 12], 16)
    spec = "vllm-v1:long_prefill_token_threshold=4,scheduler_reserve_full_isl=false"
    apart = simulate(Problem(instance, TIMED), spec)
    assert rows_of(apart)[:2] == [{0: 4, 1: 4}, {0: 4, 1: 4}]
    assert evaluate(Problem(instance, TIMED), apart).batch_kv.max() == 12
    tight = replace(instance, kv_capacity=12)
    assert evicted_of(simulate(Problem(tight, TIMED), spec)) != {}
    assert evicted_of(simulate(Problem(tight, TIMED), f"{spec},merge_blocks=true")) == {}


def test_who_is_preempted_in_the_step_of_its_tokens_is_not_found_with_them() -> None:
    # 10 blocks, at most 8 tokens of a request in a step. In the third step request 2 has 2 blocks,
    # request 0 has computed 4 and is given 2 more, and then request 1, which is urgent, lacks one
    # for its ninth token. Request 0 goes; the last of its 6 blocks is taken, and the fifth would be
    # found if its name were kept.
    instance = sharing([28, 9, 4], [1, 1, 9], [None] * 3, [0] * 3, 40, [0.0, 0.0001, 0.0])
    spec = (
        "vllm-v1:policy=priority,priority=prompt,long_prefill_token_threshold=8,"
        "scheduler_reserve_full_isl=false"
    )
    schedule = simulate(Problem(instance, TIMED), spec)
    assert evicted_of(schedule) == {2: [0]}
    assert rows_of(schedule)[:4] == [
        {2: 4, 0: 8}, {2: 1, 0: 8, 1: 8}, {2: 1, 1: 1}, {2: 1, 0: 8},
    ]  # fmt: skip
    assert found(instance, spec) == {0: [16]}


def test_next_use_keeps_what_comes_back_and_says_that_it_looks_ahead() -> None:
    # 5 blocks. Request 0 leaves 2, request 1 leaves 2, and request 2 takes 3: the empty one and,
    # with LRU, those of request 0, which request 3 asks for.
    prompt, parent, shared = [8, 8, 9, 12], [None, None, None, 0], [0, 0, 0, 8]
    instance = sharing(prompt, [1, 1, 1, 1], parent, shared, 20, APART)
    assert found(instance) == {}
    assert found(instance, "vllm-v1:eviction=next-use") == {3: [8]}
    for spec, ahead in (("vllm-v1", False), ("vllm-v1:eviction=next-use", True)):
        assert is_clairvoyant(*make_policy(spec), instance) is ahead


def test_what_lives_is_not_taken_for_an_admission_while_another_runs() -> None:
    # 6 blocks. Request 0 leaves 2. Requests 1 and 2 come together, for 2 and 3 blocks: beside
    # request 1 there is no room for request 2 that is not kept. Once request 1 is done and leaves
    # 2, request 2 runs alone, and takes the last block of request 0 all the same.
    prompt, parent, shared = [8, 8, 9, 12], [None, None, None, 0], [0, 0, 0, 8]
    instance = sharing(prompt, [1, 3, 1, 1], parent, shared, 24, [0.0, 1.0, 1.0, 2.0])
    assert rows_of(simulate(Problem(instance, TIMED), "vllm-v1"))[1] == {1: 8, 2: 9}
    lives = simulate(Problem(instance, TIMED), "vllm-v1:eviction=ttl,ttl=5")
    assert rows_of(lives)[1] == {1: 8}
    assert found(instance, "vllm-v1:eviction=ttl,ttl=5") == {3: [4]}
    assert rows_of(simulate(Problem(instance, TIMED), "vllm-v1:eviction=ttl,ttl=0.5"))[1] == {
        1: 8,
        2: 9,
    }


def waiting(count: int) -> Instance:
    """Return a request that runs alone, and others that come meanwhile and begin like it or not."""
    prompt = [64, *(80 + 16 * (k % 3) for k in range(count))]
    parent = [None, *(0 if k % 2 else None for k in range(count))]
    shared = [0, *(48 if k % 2 else 0 for k in range(count))]
    arrival = [0.0, *(0.0001 * (k + 1) for k in range(count))]
    return sharing(prompt, [40] + [1] * count, parent, shared, 4000, arrival, 16)


def served(instance: Instance, policy: str) -> list[int]:
    """Return the requests in the order in which they begin, one after another."""
    schedule = simulate(Problem(instance, TIMED), f"vllm-v1:max_num_seqs=1,policy={policy}")
    evaluate(Problem(instance, TIMED), schedule)
    return list(dict.fromkeys(schedule.request.tolist()))


def test_waiting_requests_are_sorted_by_what_they_would_find() -> None:
    # 1, 3 and 5 find nothing of 80, 112 and 96; 2, 4 and 6 find 48 of 96, 80 and 112 tokens.
    instance = waiting(6)
    assert served(instance, "fcfs") == [0, 1, 2, 3, 4, 5, 6]
    assert served(instance, "lpm") == [0, 2, 4, 6, 1, 3, 5]
    assert served(instance, "shortest-prefill-first") == [0, 4, 2, 6, 1, 5, 3]
    # Tokens that have been prefilled meanwhile over those to be prefilled: 0 for all, then it ages.
    assert served(instance, "hrrn")[0] == 0


@pytest.mark.parametrize(("count", "sorts"), [(128, True), (129, False)])
def test_lpm_is_first_come_first_served_with_more_than_128_waiting(count, sorts) -> None:
    order = served(waiting(count), "lpm")[1:3]
    assert order == ([2, 4] if sorts else [1, 2])
    assert served(waiting(129), "shortest-prefill-first")[1] == 4


def test_of_those_that_would_compute_the_same_prefix_one_goes_first() -> None:
    # 1, 2 and 3 share 48 tokens, 3 blocks, that are not cached. So 2 and 3 wait for 1, even behind
    # 4, which is longer.
    instance = sharing(
        [16, 64, 64, 64, 96], [9, 1, 1, 1, 1], [None, None, 1, 1, None], [0, 0, 48, 48, 0], 1000,
        [0.0] + [0.001] * 4, 16,
    )  # fmt: skip
    spec = "vllm-v1:max_num_seqs=3,policy=shortest-prefill-first"
    schedule = simulate(Problem(instance, TIMED), spec)
    begun = [set(row) - {0} for row in rows_of(schedule) if set(row) - {0}]
    assert begun[0] == {1, 4}  # the seats that request 0 leaves of three
    assert found(instance, spec) == {2: [48], 3: [48]}
    assert found(instance, "vllm-v1:max_num_seqs=3") == {2: [48], 3: [48]}


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 600), marks=pytest.mark.slow)])
def test_the_orders_of_the_readable_twin_are_those_of_the_compiled_loop(seeds) -> None:
    sorted_late = 0
    for seed in seeds:
        rng = Random(seed)
        draw = {"trees": 3, "reuse": 0.8, "prompt_max": 90, "output_max": 20, "rate": 300.0}
        instance = generate("prefix-trees", seed=seed, n=24, kv_capacity=700, **draw)
        block = rng.choice([1, 4, 16, 48])
        instance = replace(instance, prefix_block_tokens=block, kv_block_tokens=block)
        order = ["lpm", "shortest-prefill-first", "hrrn"][seed % 3]
        policy = replace(random_policy(rng), policy=order, priority="arrival", max_num_seqs=3)
        cost = cost_of(instance)
        fast = simulate(Problem(instance, cost), policy)
        slow = simulate(Problem(instance, cost), ReadableVllm(policy, instance, cost))
        assert same(fast, slow), (seed, vars(policy))
        assert claim_alike(fast, slow), seed
        evaluate(Problem(instance, cost), fast)
        sorted_late += served_order(fast) != sorted(served_order(fast))
    assert sorted_late > len(seeds) / 2  # mostly the order is another than by arrival


def served_order(schedule) -> list[int]:
    """Return the requests in the order in which they begin."""
    return list(dict.fromkeys(schedule.request.tolist()))


def test_each_worker_behind_a_router_has_a_cache_of_its_own() -> None:
    instance = sharing([8] * 4, [1] * 4, [None, 0, 0, 0], [0, 8, 8, 8], 40, APART)
    for eviction in ("lru", "next-use"):
        spec = f"vllm-v1:workers=2,router=round-robin,eviction={eviction}"
        schedule = simulate(Problem(instance, TIMED), spec)
        evaluate(Problem(instance, TIMED), schedule)
        # The first request on either worker finds nothing, and the second there the first block of
        # its two.
        assert schedule.reused.tolist() == [0, 0, 4, 4]


class Claims:
    """A policy object that runs one request after another, and claims for the second."""

    clairvoyant = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def batch(self, view: View) -> Batch:
        i = (view.running or view.waiting)[0]
        claim = {1: self.tokens} if i == 1 and not view.running else {}
        if view.decoding[i]:
            return Batch({i: 1}, reused={i: 4} if self.tokens < 0 else {})
        return Batch({i: int(view.prompt_tokens[i]) - claim.get(i, 0)}, reused=claim)


def test_a_users_object_may_claim() -> None:
    """`Claims(k)` claims k tokens for request 1; of k < 0 it claims 4 for a request that
    decodes."""
    schedule = simulate(Problem(TWICE, TIMED), Claims(4))
    assert schedule.reused.tolist() == [0, 4]
    evaluate(Problem(TWICE, TIMED), schedule)
    assert simulate(Problem(TWICE, TIMED), Claims(0)).reused is None
    words = "request 0: found a claim of 4 cached tokens; expected one of a request in the batch"
    with pytest.raises(PolicyError, match=words):
        simulate(Problem(sharing([8], [2], [None], [0], 40), TIMED), Claims(-1))
    plain = replace(TWICE, prefix_parent=None, prefix_tokens=None, prefix_block_tokens=None)
    with pytest.raises(PolicyError, match="that holds no KV and may share prefixes"):
        simulate(Problem(plain, TIMED), Claims(4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("eviction=mru", "eviction: found 'mru'; expected one of lru, next-use, ttl"),
        ("ttl=1", "ttl: found 1.0 with eviction=lru; expected it with eviction=ttl"),
        ("eviction=ttl", "ttl: found 0.0 with eviction=ttl"),
        ("eviction=ttl,ttl=-1", "ttl: found -1.0 with eviction=ttl"),
    ],
)
def test_a_bad_option_of_the_cache_is_named(options: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_policy(f"vllm-v1:{options}")


def test_too_many_blocks_are_refused_before_they_are_made() -> None:
    huge = sharing([10**9, 10**9], [1, 1], [None, 0], [0, 10**9], 1 << 31, block=1)
    with pytest.raises(TooLargeError, match="larger prefix_block_tokens"):
        simulate(Problem(huge, TIMED), "vllm-v1")


def test_comparisons_show_hit_rates(tmp_path) -> None:
    file = tmp_path / "i.json"
    write_instance(TWICE, file)
    words = ("compare", file, "--policy", "vllm-v1", "--cost-model", "llama2-7b-a100-infermax")
    shown = run(*words, "--no-bound")
    assert "prefix hit rate" in " ".join(shown.split())
    comparison = compare(Problem(TWICE, TIMED), ["vllm-v1"], bound=False)
    assert "prefix hit rate" in comparison._repr_html_()
    # Of 8 + 8 tokens of prompts the second finds its first block, and computes its last again.
    assert comparison.rows[0].metrics["prefix_hit_rate"] == 4 / 16
