"""Every policy on decode machines that are nearly full: no schedule that the judge refuses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_fleet import each_batch

from optsched import Problem, run
from optsched.costs.cost import BatchCost
from optsched.costs.fleet import Fleet
from optsched.costs.machine import Link, Machine
from optsched.judge.evaluate import evaluate
from optsched.policies import Batch, View, allows, kv_after, list_policies
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, LoopError, PolicyError
from optsched.problem.instance import Instance, Limits

# Why a policy may refuse to run on these pools.
REFUSED = (
    "found a scheduler that runs whole windows",
    "found a router; expected none",
    "and is not split",  # an input that an eviction has made longer than a batch
)
LOOPING = ("alpha-protection", "alpha-beta")
"""They run into endless loops on one machine, too, and say so; in rounds, where an eviction loses
all progress, others do that as well."""
TIMES = [("500", "1"), ("1000", "100"), ("260", "10")]  # ms of a batch, and of a token
COSTS = [BatchCost("some", 1, {"base": base, "token": token}) for base, token in TIMES]
ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}


def tight(seed: int) -> tuple[Instance, Fleet, str]:
    """Return a few requests, pools with little KV or few seats, and options for the policy."""
    rng = np.random.default_rng(seed)
    n, rounds = int(rng.integers(2, 7)), rng.random() < 0.2
    prompt, output = rng.integers(1, 9, n), rng.integers(1, 8, n)
    spread = rng.choice([0, 3, 10])
    arrival = rng.integers(0, 6, n) if rounds else np.round(rng.random(n) * spread, 2)
    more: dict = {}
    if rng.random() < 0.4:
        more["limits"] = Limits(max_running=int(rng.integers(1, 4)))
    elif rng.random() < 0.4:
        more["limits"] = Limits(max_batch_tokens=int(rng.integers(9, 20)))
    if rng.random() < 0.4:
        more["predicted"] = np.maximum(1, output + rng.integers(-3, 4, n))
    for name in ("hybrid_batching", "chunked_prefill"):
        if rng.random() < 0.25:
            more[name] = bool(rng.random() < 0.5)

    block = int(rng.choice([1, 1, 1, 4]))
    room = -(-int((prompt + output).max()) // block) * block + block * int(rng.integers(0, 12))
    instance = Instance(
        np.sort(arrival), prompt, output, room, kv_block_tokens=block,
        predicted_lower=np.maximum(1, output - 2), predicted_upper=output + 2,
        time_unit="round" if rounds else "second",
        kv_accounting=str(rng.choice(["cached", "generated"])), **more,
    )  # fmt: skip
    roles = str(rng.choice(["pd", "pd", "ppd", "pdd", "pm", "pdm"]))
    models = [None if rounds else COSTS[k] for k in rng.integers(len(COSTS), size=len(roles))]
    machines = [
        Machine(cost_model=model, kv_capacity=room, limits=instance.limits, role=ROLES[role])
        for role, model in zip(roles, models, strict=True)
    ]
    rates = (0, 0), (1, 0), (2, 1)
    slow = (0.0, 0.0), (0.5, 0.0), (0.5, 0.25), (2.0, 0.25)
    chosen = (rates if rounds else slow)[int(rng.integers(3 if rounds else 4))]
    link = Link(*chosen, recompute_last=bool(rng.random() < 0.3))
    options = f"workers={len(roles)}" + (",reserve=true" if rng.random() < 0.25 else "")
    return instance, Fleet(machines, link, int(rng.choice([0, 0, 4]))), options


def sweep(seeds: range) -> Counter[str]:
    """Run every policy on tight pools, let the judge see each schedule, and count them."""
    ran: Counter[str] = Counter()
    for seed in seeds:
        instance, pools, options = tight(seed)
        for name in list_policies():
            if allows(name, instance) is not None:
                continue
            try:
                schedule = simulate(
                    Problem(instance, pools), f"{name}:{options}", budget=Budget(60)
                )
            except (InputError, PolicyError, LoopError) as error:
                loops = isinstance(error, LoopError) and (name in LOOPING or instance.in_rounds)
                if not loops and not any(text in str(error) for text in REFUSED):
                    raise

                ran["refused"] += 1
                continue

            found = evaluate(
                Problem(instance, pools), schedule
            )  # all requests end, and every rule holds
            ran[name] += 1
            ran["moves"] += int(found.metrics["moves"])
            ran["evictions"] += int(found.metrics["evictions"])

    return ran


def test_no_policy_breaks_a_rule_on_decode_machines_that_are_nearly_full() -> None:
    ran = sweep(range(8))
    # `sweep` counts runs by policy, moves and evictions. KV moved and was short, and nearly all
    # policies ran.
    assert ran["moves"] > 500
    assert ran["evictions"] > 200
    assert len(ran) > 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 4000, 250))
def test_no_policy_breaks_a_rule_on_three_thousand_tight_pools(seed: int) -> None:
    assert len(sweep(range(seed, seed + 250))) > 40


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("srpt", 116),
        ("srpt", 128),
        ("trail", 128),
        ("a-l", 24),
        ("a-l", 28),
        ("gsa", 2),
        ("gsa", 33),
        ("gsa", 9002),  # those who decode make room for one whose last prompt token is recomputed
    ],
)
def test_nobody_is_evicted_for_kv_while_no_batch_begins(name: str, seed: int) -> None:
    """Some decode machine would evict all that run for KV, and no batch begins before it is there.

    Then that of those who leave is there, too, until it begins: they decode on, and the KV waits.
    """
    instance, pools, options = tight(seed)
    schedule = simulate(Problem(instance, pools), f"{name}:{options}")
    assert evaluate(Problem(instance, pools), schedule).metrics["moves"] > 0


class Alone:
    """Admits the latest request alone, and evicts whoever runs for it, at once or a turn before."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def batch(self, view: View) -> Batch:
        if view.waiting and (self.at_once or not view.running):
            last = max(view.waiting)
            return Batch({last: view.rest(last)}, list(view.running))
        if view.waiting:
            return Batch({}, list(view.running))

        return Batch(dict.fromkeys(view.running, 1))


@pytest.mark.parametrize("at_once", [False, True])
def test_an_object_that_evicts_all_for_kv_to_come_makes_progress(at_once: bool) -> None:
    three = Instance([0, 1, 2], [4] * 3, [5, 3, 2], 9, time_unit="second", kv_accounting="cached")
    # The decode machine holds 9 tokens, of which one request needs up to 8, 4 + 5 - 1.
    rooms = ("prefill", 20), ("decode", 9)
    there = Fleet(
        [Machine(cost_model=each_batch(1.0), kv_capacity=kv, role=role) for role, kv in rooms],
        Link(2.0),
    )
    found = run(Problem(three, there), Alone(at_once)).evaluation
    assert found.metrics["moves"] == 3  # each request moves once


def test_kv_that_would_come_counts_in_a_batch() -> None:
    """4 tokens cached elsewhere, of which a view says 1 is left, take 5."""
    seen = []

    class Looking:
        def batch(self, view: View) -> Batch:
            tokens = {i: view.rest(i) for i in view.waiting} | dict.fromkeys(view.running, 1)
            seen.append(({i: int(view.cached[i]) for i in view.waiting}, kv_after(view, tokens)))
            return Batch(tokens)

    one = Instance([0], [4], [2], 9, time_unit="second", kv_accounting="cached")
    machines = [
        Machine(cost_model=each_batch(1.0), kv_capacity=9, role=role)
        for role in ("prefill", "decode")
    ]
    simulate(Problem(one, Fleet(machines, Link(2.0))), Looking())
    assert seen[:2] == [({0: 0}, 4), ({0: 4}, 5)]


@pytest.mark.parametrize("pooled", [False, True])
def test_a_loop_that_loses_a_request_names_it(
    monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    """The loop's eviction is replaced by one that forgets whom it evicts. `Alone` evicts request
    0 for the next one, so nobody serves request 0 again."""

    from optsched.policies.engine import online

    def forget(loop: online._Loop, requests: list[int], evicted: object) -> None:
        loop.running = [i for i in loop.running if i not in requests]

    monkeypatch.setattr(online._Loop, "evict", forget)
    two = Instance([0, 1.5], [4, 4], [4, 2], 9, time_unit="second", kv_accounting="cached")
    one = Machine(cost_model=each_batch(1.0), kv_capacity=9)
    there = (
        Fleet([one, Machine(cost_model=each_batch(1.0), kv_capacity=9)], Link()) if pooled else one
    )
    three = two.subset([0, 1, 1]) if pooled else two  # of which 0 and 2 meet
    with pytest.raises(LoopError, match=r"'Alone'.*request 0"):
        simulate(Problem(three, there), Alone(at_once=True), budget=Budget(20))
