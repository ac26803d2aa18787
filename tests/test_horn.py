"""Horn's order of prefills that share prefixes, held against dynamic programming over sets."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from sharing_cases import random_claims, sharing_instance
from slow_judge import of_rows, sequences_of

from optsched import Fleet, Instance, Limits, Problem, evaluate, run, solve
from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.cost import BatchCost
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.batches.horn import horn_bound
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import OptschedError, PolicyError, UsageError
from optsched.problem.objective import parse_objectives

ORDERS = ("horn", "arrival", "prompt", "uncached", "prefix")


def cost_of(rng: Random, *, chunks_matter: bool = False) -> BatchCost:
    """Return a cost model in which prefills of a block take as long whole as in parts."""
    square = rng.choice([0, 0, 1, 5]) / 64
    values = {
        "token": rng.randint(1, 9) / 8,
        "base": rng.choice([0, 0, 1, 7]) / 4,
        "prefill_square": square,
        "prefill_cross": 2 * square,
        "prefill_kv": rng.choice([0, 0, 1]) / 16,
        "prefill_request": rng.choice([0, 1]) / 2,
        "prefill_base": rng.choice([0, 1]) / 4,
    }
    if chunks_matter:
        values |= {"prefill_cross": rng.randint(0, 20) / 64, "prefill_kv": rng.randint(0, 24) / 8}
    texts = {name: str(value) for name, value in values.items()}
    return BatchCost("drawn", 1, texts)


def sequences(rng: Random, n: int, block: int, *, ends: bool) -> list[list[int]]:
    """Return prompts, token by token, that share beginnings; `ends`: some end on a block."""
    prompts: list[list[int]] = []
    for _ in range(n):
        prompt = list(rng.choice(prompts))[: rng.randint(0, 12)] if prompts else []
        prompt += [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
        if not ends and len(prompt) % block == 0:
            prompt.append(rng.randint(0, 9))
        prompts.append(prompt)
    return prompts


def shares(a: list[int], b: list[int]) -> int:
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same


def instance_of(prompts: list[list[int]], block: int, **more) -> Instance:
    """Return the instance: the parent of each is the first with which it shares most."""
    parent, shared = [None], [0]
    for i in range(1, len(prompts)):
        same = [shares(prompts[i], prompts[q]) for q in range(i)]
        parent.append(int(np.argmax(same)))
        shared.append(max(same))
    values = {
        "prefix_parent": parent,
        "prefix_tokens": shared,
        "prefix_block_tokens": block,
        "kv_capacity": 10_000,
        "time_unit": "second",
        **more,
    }
    n = len(prompts)
    return Instance([0.0] * n, [len(p) for p in prompts], [1] * n, **values)


def least_sum(
    prompts: list[list[int]], block: int, cost: BatchCost, begin: int = 0, at: float = 0.0
) -> float:
    """Return the least sum of completions one by one, by dynamic programming over sets.

    Whoever comes next finds what it shares, in whole blocks and but for one token, with any of the
    set. Those in `begin` have ended.
    """
    n, price = len(prompts), {name: float(text) for name, text in cost.coefficients.items()}

    def seconds(i: int, done: int) -> float:
        found = max([shares(prompts[i], prompts[q]) for q in range(n) if done >> q & 1] or [0])
        m = min(found, len(prompts[i]) - 1) // block * block
        c = len(prompts[i]) - m
        ms = price["token"] * c + price["base"] + price["prefill_base"] + price["prefill_request"]
        ms += price["prefill_square"] * c * c + price["prefill_cross"] * c * m
        return (ms + price["prefill_kv"] * m) / 1000

    best: dict[int, dict[float, float]] = {begin: {at: 0.0}}
    for done in range(begin, (1 << n) - 1):
        for clock, total in best.get(done, {}).items():
            for i in range(n):
                if not done >> i & 1:
                    end = round(clock + seconds(i, done), 12)
                    into = best.setdefault(done | 1 << i, {})
                    into[end] = min(into.get(end, np.inf), total + end)
    return min(best[(1 << n) - 1].values())


def check_random_trees(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        block, cost = rng.choice([1, 2, 3, 4]), cost_of(rng)
        if block == 1:
            block = 2
        prompts = sequences(rng, rng.randint(1, 6), block, ends=False)
        fixed = float(cost.coefficients["base"]) + float(cost.coefficients["prefill_base"])
        limits = Limits(max_running=1) if fixed or rng.random() < 0.5 else Limits()
        instance = instance_of(prompts, block, limits=limits)
        best = least_sum(prompts, block, cost)
        found = solve(Problem(instance, cost), method="horn")
        assert found.status.value == "optimal", seed
        assert found.value == pytest.approx(best, rel=1e-9), seed
        assert found.bound == pytest.approx(best, rel=1e-9), seed


def test_horn_is_the_best_order_of_random_trees():
    check_random_trees(range(100))


@pytest.mark.slow
def test_horn_is_the_best_order_of_2000_random_trees():
    check_random_trees(range(1000, 3000))


def test_horn_looks_anew_when_others_come():
    for seed in range(40):
        rng = Random(seed)
        cost, block = cost_of(rng), 2
        prompts = sequences(rng, rng.randint(3, 6), block, ends=False)
        later = [0.0, *[1e-9] * (len(prompts) - 1)]
        instance = replace(instance_of(prompts, block), arrival=later)
        finish = run(Problem(instance, cost), "horn").evaluation.finish
        assert finish[0] == finish.min()
        best = least_sum(prompts, block, cost, begin=1, at=float(finish[0]))
        assert finish[1:].sum() == pytest.approx(best, rel=1e-9), seed


def served(instance: Instance, by: str, cost: BatchCost) -> tuple[list[int], list[int]]:
    """Return whom an order serves, and the tokens that each finds, with all sequences at hand."""
    block, tokens = instance.prefixes.block, sequences_of(instance)
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    known: set[tuple[int, ...]] = set()
    now, order, finds, waiting = 0.0, [], [], list(range(instance.n))

    def found(i: int) -> int:
        m = 0
        while m + block < prompt[i] and tuple(tokens[i][: m + block]) in known:
            m += block
        return m

    keys = {
        "arrival": lambda i: 0,
        "prompt": lambda i: prompt[i],
        "uncached": lambda i: prompt[i] - found(i),
        "prefix": lambda i: -found(i),
    }
    while waiting:
        now = max(now, min(instance.arrival[i] for i in waiting))
        here = [i for i in waiting if instance.arrival[i] <= now]
        i = min(here, key=lambda i: (keys[by](i), instance.arrival[i], i))
        waiting.remove(i)
        m = found(i)
        order.append(i)
        finds.append(m)
        now += batch_time(cost.array, add_prefill(EMPTY, prompt[i] - m, m))
        for k in range(output[i] - 1):
            now += batch_time(cost.array, add_decode(EMPTY, prompt[i] + k))
        known |= {tuple(tokens[i][:d]) for d in range(block, prompt[i] + output[i], block)}
    return order, finds


def test_orders_are_those_of_a_readable_server():
    hits = 0
    for seed in range(60):
        rng = Random(seed)
        instance = sharing_instance(rng, most=8, time_unit="second")
        if instance.prefixes is None or instance.prefix_parent is None:
            continue
        cost = cost_of(rng)
        instance = replace(instance, arrival=[rng.choice([0, 0, 0.01]) for _ in range(instance.n)])
        for by in ORDERS[1:]:
            schedule = simulate(Problem(instance, cost), f"one-by-one:by={by}")
            evaluate(Problem(instance, cost), schedule)
            order, finds = served(instance, by, cost)
            assert list(dict.fromkeys(schedule.request.tolist())) == order, (seed, by)
            assert schedule.reused[schedule.reused > 0].tolist() == [m for m in finds if m]
            hits += sum(finds)
    assert hits > 500


def test_a_prompt_beyond_a_limit_is_split():
    limits = Limits(max_batch_tokens=3)
    instance = instance_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8, 9]], 2, limits=limits)
    schedule = simulate(Problem(instance, BatchCost("one", 1, {"token": "1"})), "horn")
    assert schedule.tokens.tolist() == [3, 2, 3, 1]
    assert schedule.reused.tolist() == [0, 0, 4, 0]


def test_what_horn_does_not_order_is_refused_by_name():
    cost = BatchCost("one", 1, {"token": "1"})
    prompts = [[1, 2, 3], [1, 2, 4]]
    instance = instance_of(prompts, 2)

    def refused(changed: Instance, words: str, **more) -> None:
        fleet = Fleet.of(more.pop("workers", 1), cost)
        problem = Problem(changed, fleet, more.pop("objective", "tel"))
        with pytest.raises(UsageError, match=words):
            solve(problem, method="horn")

    refused(replace(instance, output_tokens=[1, 2]), "request 1: found output_tokens 2; expected 1")
    refused(replace(instance, arrival=[0, 1]), "cannot do arrivals")
    refused(instance, "cannot do objective 'makespan'", objective="makespan")
    refused(instance, "cannot do workers", workers=2)
    tight = replace(instance, kv_capacity=5)
    with pytest.raises(PolicyError, match="kv_capacity: found 5; expected 9, to keep every block"):
        simulate(Problem(tight, cost), "horn")
    without = replace(instance, prefix_parent=None, prefix_tokens=None, prefix_block_tokens=None)
    with pytest.raises(PolicyError, match="needs an instance with shared prefixes"):
        simulate(Problem(without, cost), "horn")
    with pytest.raises(OptschedError, match="by: found 'x'; expected one of"):
        simulate(Problem(instance, cost), "one-by-one:by=x")


def test_prompts_that_end_on_a_block_leave_an_interval():
    # The second prompt is the first two blocks of the first: it computes the last one itself.
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    cost = BatchCost("one", 1, {"token": "1"})
    found = solve(Problem(instance_of(prompts, 2), cost), method="horn")
    assert found.status.value == "feasible"
    # The second first: 4 ms, and 1 more. Horn's bound: 2 shared, 2 of the second, 1 of the first;
    # that of charges may be nearer.
    assert found.value == pytest.approx(0.004 + 0.005)
    assert 0.003 + 0.005 <= found.bound <= found.value


@pytest.mark.parametrize(
    ("prompts", "price", "rows"),
    [
        # Both prompts in one batch pay its fixed cost once.
        ([[1, 2, 3], [4, 5, 6]], {"token": "1", "base": "9"}, [[(0, 3), (1, 3)]]),
        # Chunks of a token cost 1 each where nobody pays for what is cached, and the whole 16.
        ([[1, 2, 3, 4]], {"token": "0.125", "prefill_square": "1"}, [[(0, 1)]] * 4),
    ],
)
def test_batches_and_chunks_do_not_beat_the_bound(prompts, price, rows):
    instance, cost = instance_of(prompts, 5), BatchCost("one", 1, price)
    nothing = [[0] * len(row) for row in rows]
    schedule = of_rows(instance, rows, [[]] * len(rows), evict_mode="recompute", reused=nothing)
    value = evaluate(Problem(instance, cost), schedule).metrics["tel"]
    assert horn_bound(Task(instance, cost, parse_objectives("tel"))) <= value * (1 + 1e-12)


def check_random_schedules(seeds: range) -> tuple[int, int]:
    """Hold the bound against schedules of all kinds; return how many come near, and how many."""
    near = valid = 0
    for seed in seeds:
        rng = Random(seed)
        block, cost = rng.choice([1, 2, 3]), cost_of(rng, chunks_matter=True)
        limits = Limits(max_running=rng.choice([None, 1, 2]))
        prompts = sequences(rng, rng.randint(1, 4), block, ends=True)
        instance = instance_of(prompts, block, limits=limits)
        bound = horn_bound(Task(instance, cost, parse_objectives("tel")))
        for _ in range(20):
            schedule = random_claims(rng, instance, wrong=0)
            if schedule.worker is not None:
                continue
            try:
                value = evaluate(Problem(instance, cost), schedule).metrics["tel"]
            except OptschedError:
                continue  # too many seats
            valid += 1
            near += value < 1.05 * bound
            assert value >= bound * (1 - 1e-9), seed
    return near, valid


def test_no_random_schedule_with_claims_is_below_the_bound():
    near, valid = check_random_schedules(range(60))
    assert near > 5
    assert valid > 300


@pytest.mark.slow
def test_no_random_schedule_of_many_is_below_the_bound():
    check_random_schedules(range(1000, 5000))
