"""Prefills that pause and claim: by hand, before the judge, and with room for all that was held."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from sharing_cases import engine_instance
from slow_judge import TIMED, _block_of, _names, sequences_of
from test_simulate import cost_of
from test_vllm_cache import APART, TWICE, found, sharing, tight

from optsched import Problem, run
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.offline import improve
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, LoopError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule
from optsched.workloads.generate import generate

# With a cache that loses what was used the longest ago, or what is used next the latest.
SPECS = ("spf:caching=lru", "spf:caching=next-use", "spf-work:caching=lru", "spf-work")


def test_what_is_cached_is_claimed_up_to_the_last_token() -> None:
    # `found` returns the tokens of each claim by request (test_vllm_cache.py).
    later = replace(TWICE, arrival=[0.0, 1.0])
    for spec in SPECS:
        assert found(later, spec) == {1: [4]}  # 8 tokens in 2 blocks; the last one is computed
        assert found(TWICE, spec) == {1: [4]}  # computed in the same batch
    assert simulate(Problem(TWICE, TIMED), "spf:caching=none").reused is None
    plain = replace(TWICE, prefix_parent=None, prefix_tokens=None, prefix_block_tokens=None)
    assert simulate(Problem(plain, TIMED), "spf").reused is None


def test_the_shortest_is_the_one_with_least_that_is_not_cached() -> None:
    # When request 0 has gone, request 1 has 20 tokens, of which 16 are cached, and request 2 has 8:
    # 4 are left of the one and 8 of the other, and without a cache 20 and 8.
    shared = sharing([17, 20, 8], [1, 1, 1], [None, 0, None], [0, 16, 0], 400, [0.0, 0.001, 0.001])
    cost = BatchCost("tokens", 1, {"token": "1"})
    first, alone = (
        simulate(Problem(shared, cost), f"spf:max_batch_tokens=20,caching={word}").request.tolist()
        for word in ("lru", "none")
    )
    assert first == [0, 1, 2]
    assert alone.index(2) < alone.index(1)


def test_a_prefill_that_pauses_leaves_its_blocks_and_claims_them_again() -> None:
    # 8 tokens a batch: request 0 has computed 8 of its 20 when request 1 comes, which has 8.
    instance = sharing([20, 8], [1, 1], [None, None], [0, 0], 40, [0.0, 0.001])
    schedule = simulate(Problem(instance, TIMED), "spf:max_batch_tokens=8")
    rows = list(
        zip(
            schedule.request.tolist(),
            schedule.tokens.tolist(),
            schedule.reused.tolist(),
            strict=True,
        )
    )
    # A row is the request, the tokens it computes and those it claims: 8 are claimed, 8 computed,
    # and the last 4 of 20 in another batch.
    assert rows == [(0, 8, 0), (1, 8, 0), (0, 8, 8), (0, 4, 0)]
    assert evaluate(Problem(instance, TIMED), schedule).metrics["evictions"] == 1  # the pause


def test_next_use_keeps_what_comes_sooner() -> None:
    # Five blocks; request 3 repeats the two of 0, request 4 those of 1. Request 2 takes one that
    # holds something: LRU's choice is the second of 0, and that of next use the second of 1.
    prompt, output = [8, 8, 8, 9, 9], [1] * 5
    instance = sharing(prompt, output, [None, None, None, 0, 1], [0, 0, 0, 8, 8], 20, [*APART, 4.0])
    assert found(instance, "spf") == {3: [4]}
    assert found(instance, "spf:caching=next-use") == {3: [8], 4: [4]}
    # If request 4 is expected before 3, it is the other way round.
    rules = replace(make_policy("spf-work")[0], served=(0, 1, 2, 4, 3))
    assert found(instance, rules) == {3: [4], 4: [8]}
    with pytest.raises(InputError, match=r"caching:.*'ttl'"):
        make_policy("spf:caching=ttl")
    with pytest.raises(InputError, match=r"caching:.*'lru'.*'prefill'"):
        replace(rules, groups=("running", "waiting"), gate=np.inf, caching="lru")


def claimed(instance: Instance, seed: int) -> tuple[Schedule, dict[str, float]]:
    """Run one of the policies with small batches, and let the judge look."""
    rng = Random(seed)
    rules = replace(
        make_policy(SPECS[seed % len(SPECS)])[0],
        max_batch_tokens=rng.choice([3, 5, 9, 40]),
        gate=rng.choice([0.1, 1.0, 10.0]),
        piece=rng.choice([1.0, 4.0, 512.0]),
        admission=rng.choice(["lookahead", "present"]),
        order=rng.choice(["prompt", "work"]),
        max_running=rng.choice([None, 1, 3]),
    )
    cost = cost_of(instance)
    schedule = simulate(Problem(instance, cost), rules)
    return schedule, evaluate(Problem(instance, cost), schedule).metrics


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 30_000), marks=pytest.mark.slow)]
)
def test_the_judge_accepts_all_claims(seeds: range) -> None:
    """Nine of ten runs end without a loop; evictions, claims and a cache occur in a tenth."""
    values = []
    for seed in seeds:
        try:
            metrics = claimed(tight(Random(seed)), seed)[1]
        except LoopError:
            continue
        values.append([metrics[k] for k in ("evictions", "prefix_hit_tokens", "peak_retained_kv")])
    assert len(values) > 0.9 * len(seeds)
    evictions, hits, kept = np.array(values).T
    assert min((evictions > 0).mean(), (hits > 0).mean(), (kept > 0).mean()) > 0.1


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 3000), marks=pytest.mark.slow)]
)
def test_with_room_for_all_everything_that_was_held_is_found(seeds: range) -> None:
    """With KV for all the cache loses nothing: each prefill claims all blocks computed before.

    The schedule is replayed: `known` has the names of blocks computed so far. A name stands for a
    block and all before it. The last token of an input is always computed.
    """
    for seed in seeds:
        instance = replace(engine_instance(Random(seed)), kv_capacity=10_000)
        schedule, _ = claimed(instance, seed)
        block, sequences = _block_of(instance), sequences_of(instance)
        cached, produced = [0] * instance.n, [0] * instance.n
        known: set = set()
        for j in range(schedule.batches):
            for p in range(schedule.evicted_offsets[j], schedule.evicted_offsets[j + 1]):
                cached[schedule.evicted[p]] = 0
            for p in range(schedule.batch_offsets[j], schedule.batch_offsets[j + 1]):
                i = int(schedule.request[p])
                size = int(instance.prompt_tokens[i]) + produced[i]
                if not cached[i]:
                    names = _names(sequences[i], (size - 1) // block * block, block)
                    assert schedule.reused[p] == block * len(names & known), (seed, j, i)
                cached[i] += int(schedule.reused[p]) + int(schedule.tokens[p])
                known |= _names(sequences[i], cached[i], block)
                produced[i] += cached[i] == size


def test_where_others_come_after_nobody_knows_the_next_use() -> None:
    """Then `spf-work` keeps by last use, as `spf` does: a block of 4 of the 8 tokens is found."""
    chain = replace(TWICE, arrival=[0.0, None], after=[None, 0], delay=[0.0, 0.5])
    assert found(chain, "spf-work") == found(chain, "spf") == {1: [4]}


def test_the_search_claims_and_is_no_worse_than_the_policies() -> None:
    """Total latency at most that of each of SPECS, with tokens claimed."""
    instance, gpu = (
        generate("prefix-trees", seed=1, n=40, rate=20, kv_capacity=1200),
        "llama2-7b-a100-infermax",
    )
    schedule, _ = improve(Problem(instance, gpu), Budget(2.0))
    policies = [run(Problem(instance, gpu), s).metrics["tel"] for s in SPECS]
    judged = evaluate(Problem(instance, gpu), schedule).metrics
    assert judged["tel"] <= min(policies)
    assert judged["prefix_hit_tokens"] > 0
