"""Bounds on charges: instances with shared prefixes against their best schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from exhaustive_sharing import Sharing
from slow_judge import _block_of, of_rows, sequences_of
from test_certificate_seconds import forgeries

from optsched import Fleet, Problem, compare, from_batches
from optsched.bounds import batch, lower_bound, raise_bound, relaxations, service
from optsched.bounds.base import BoundTask
from optsched.bounds.certificate import certify, verify_certificate
from optsched.bounds.checker import parts as checker, prefixes
from optsched.bounds.checker.requests import Rates, exact_rates
from optsched.bounds.checker.seconds import proved_ticks
from optsched.bounds.service import most_within
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.limits import with_slos
from optsched.workloads.generate import generate

# The terms of a cost model in which `tiny` draws whole milliseconds.
TERMS = (
    "token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square",
    "prefill_cross", "prefill_kv", "prefill_token", "prefill_request", "prefill_base",
)  # fmt: skip


def tiny(rng: Random, decode: bool, most: int) -> tuple[Instance, BatchCost, str]:
    """Return a tiny instance, whole milliseconds per term, and what an eviction means."""
    n = rng.randint(2, most)
    block = rng.choice([1, 2, 2, 3])
    prompt = [rng.randint(1, 3 * block + 1) if block > 1 else rng.randint(1, 4) for _ in range(n)]
    output = [rng.randint(1, 3) if decode else 1 for _ in range(n)]
    size = [s + o for s, o in zip(prompt, output, strict=True)]
    parent, shared = [None], [0]
    for i in range(1, n):
        parent.append(rng.choice([None, *range(i), *range(i)]))
        longest = 0 if parent[i] is None else min(size[i], size[parent[i]])
        shared.append(rng.choice([rng.randint(0, longest), longest, longest // block * block]))
    peak = max(s + o for s, o in zip(prompt, output, strict=True))
    kv_block = rng.choice([1, block])
    peak = -(-peak // block) * block
    values = {
        "prefix_parent": parent,
        "prefix_tokens": shared,
        "prefix_block_tokens": block,
        "kv_block_tokens": kv_block,
        "kv_accounting": rng.choice(["generated", "cached"]),
        "kv_capacity": rng.choice([peak, peak + rng.randint(0, 2 * peak), 100]),
        "time_unit": "second",
        "chunked_prefill": rng.choice([None, True, False]),
        "limits": Limits(max_prefill_tokens=rng.choice([None, None, peak])),
    }
    spread = rng.choice([0, 5, 30])
    arrival = sorted(rng.randint(0, spread) / 1000 for _ in range(n))
    price = dict.fromkeys(TERMS, 0) | {"token": rng.randint(0, 4), "base": rng.randint(0, 5)}
    price["base"] += price["token"] + price["base"] == 0
    for name in TERMS[2:]:
        if rng.random() < 0.4:
            price[name] = rng.randint(1, 5)
    if rng.random() < 0.5:
        price["prefill_cross"] = 2 * price["prefill_square"]
    cost = BatchCost("tiny", 1, {name: str(value) for name, value in price.items()})
    mode = rng.choice(["recompute", "restart"])
    return Instance(arrival, prompt, output, **values), cost, mode


def best_of(instance, cost, mode, objective="tel", most=200_000):
    """Return the least value of an objective in seconds and the judge's word on it, if found."""
    price = {name: int(cost.coefficients.get(name, "0")) for name in TERMS}
    found = Sharing(instance, price, restart=mode == "restart").best(objective, most)
    if found is None:
        return None
    value, rows = found
    schedule = of_rows(
        instance,
        [[(i, one[0]) for i, one in enumerate(row) if one[0]] for _, row in rows],
        [[i for i, one in enumerate(row) if one[2]] for _, row in rows],
        evict_mode=mode,
        reused=[[one[3] for one in row if one[0]] for _, row in rows],
    )
    return value / 1000, evaluate(Problem(instance, cost), schedule)


# The bounds that `beaten` holds against the best schedule, by objective.
METHODS = {
    "tel": ("work", "busy-time", "shares"),
    "mean_ttft": ("prefill-work",),
    "makespan": ("work-makespan",),
}


def beaten(case, monkeypatch, most: int = 10_000) -> list | None:
    """Return the bounds that the best schedules of an instance beat; None if those are too many."""
    instance, cost, mode = case
    found = []
    for objective, methods in METHODS.items():
        if objective == "mean_ttft" and mode == "restart":  # the judge counts the last run's token
            continue
        best = best_of(*case, objective, most)
        if best is None:
            return None
        value, judged = best
        reached = value / (instance.n if objective == "mean_ttft" else 1)
        assert judged.metrics[objective] == pytest.approx(reached)
        for within in (0, 1):
            monkeypatch.setattr(relaxations, "_WITHIN_S", (within,))
            for method in methods:
                problem = Problem(instance, cost, objective)
                bound, _ = lower_bound(problem, method=method, time_limit_s=0.005)
                if bound > reached + 1e-9:
                    found.append((objective, method, within, bound, reached))

        for limit, column in (("slo_ttft", judged.ttft), ("slo_latency", judged.latency)):
            for at in column:
                limited = with_slos(instance, {limit: float(at)})
                good = replace(judged, instance=limited).metrics["slo_attainment"] * instance.n
                if most_within(instance, cost, {limit: at}) < good - 1e-9:
                    found.append((limit, at))
    return found


def sweep(seeds, decode: bool, monkeypatch, n: int) -> list:
    """Return what is beaten on instances of some seeds, and how many could be solved."""
    found, solved = [], 0
    for seed in seeds:
        one = beaten(tiny(Random(seed), decode, n), monkeypatch)
        solved += one is not None
        found += [(seed, *row) for row in one or ()]
    return [found, solved]


@pytest.mark.parametrize(("decode", "n"), [(False, 3), (True, 2)])
def test_no_schedule_of_a_tiny_instance_beats_a_bound(monkeypatch, decode, n):
    found, solved = sweep(range(20), decode, monkeypatch, n)
    assert not found
    assert solved >= 15  # of 20; the others have too many schedules to try


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "n"), [(False, 4), (True, 3)])
def test_no_schedule_of_2000_tiny_instances_beats_a_bound(monkeypatch, decode, n):
    """Whether outputs have up to 3 tokens (else 1), and the most requests of an instance."""
    found, solved, seed = [], 0, 1000
    while solved < 2000:
        more, some = sweep(range(seed, seed + 100), decode, monkeypatch, n)
        found, solved, seed = found + more, solved + some, seed + 100
        print(seed, solved, found[:5], flush=True)
        assert not found


def made_of(parent, shared, prompt, output, block, cost, *, capacity=100, arrival=None):
    """Return an instance of the judge's default accounting, its costs, and recompute."""
    columns = {"prefix_parent": parent, "prefix_tokens": shared, "prefix_block_tokens": block}
    times = [0] * len(prompt) if arrival is None else arrival
    instance = Instance(
        times, prompt, output, time_unit="second", kv_capacity=capacity, **columns
    )  # fmt: skip
    return instance, BatchCost("tiny", 1, cost), "recompute"


LATER = made_of(
    [None, 0], [0, 10], [11, 11], [1, 1], 10, {"token": "1"}, arrival=[0, 0.011]
)  # the first one's work is done when the second one arrives, which so takes one token
TOGETHER = made_of(
    [None, 0], [0, 6], [7, 7], [3, 3], 6, {"base": "1", "decode_base": "5"}, capacity=14
)  # held tokens sum to half as much again as the capacity
# Name, text of the checker's prefixes.py, what replaces it, and the case that catches it: the
# arguments of `tiny`, or an instance made by hand.
TRAPS = [
    ("a prompt that ends on a block", "if v not in self.ending:", "if True:", (19, False, 3)),
    ("blocks that decodes make", "if self.makers[v] > 0:", "if False:", (19, True, 2)),
    ("one of several users pays", "// payers[v]", "// 1", (3, False, 3)),
    ("alone only what nobody did before", "else earliest[0] >= came", "else True", LATER),
    ("released with what is paid", "release = min(release, earliest)", "pass", LATER),
    ("KV held by several counts once", "s - self.public[i] * self.block", "s", TOGETHER),
    ("a block computed twice at once", "0 if self.whole[i] > claimed < self.public[i] else tokens",
     "tokens", (1574, False, 4)),
    ("a refill of one token", "", "", (50, True, 2)),
]  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS, ids=[trap[0] for trap in TRAPS])
def test_each_trap_is_caught_without_its_repair(monkeypatch, trap):
    """As the text stands the case beats no bound. With the repair taken out of prefixes.py (or,
    for the refill, with rates that find nothing cached) the best schedule does."""
    _, repair, without, case = trap
    if len(case) == 3 and isinstance(case[0], int):
        case = tiny(Random(case[0]), *case[1:])
    relaxations._shared.cache_clear()  # of the trap before, about the same instance
    assert beaten(case, monkeypatch) == []

    text = Path(prefixes.__file__).read_text()
    assert not repair or text.count(repair) >= 1
    changed: dict = {"__name__": prefixes.__name__}
    exec(compile(text.replace(repair, without) if repair else text, "changed", "exec"), changed)
    relaxations._charged.cache_clear()
    relaxations._shared.cache_clear()
    monkeypatch.setattr(relaxations, "Shared", changed["Shared"])
    monkeypatch.setattr(service, "charges_of", changed["charges_of"])
    if not repair:
        monkeypatch.setattr(batch, "exact_rates", _nothing_found)
    assert beaten(case, monkeypatch)


def _nothing_found(*given: Any, **more: Any) -> Rates:
    """Rates by which refilled tokens are never found cached."""
    rates = exact_rates(*given, **more)
    return replace(rates, refilled=rates.cost["token"] + rates.cost["prefill_token"])


def named_by_hand(instance: Instance, within: int) -> list[tuple]:
    """Return tokens paid, and alone, by the definition: every block has its text as a name."""
    block, n = _block_of(instance), instance.n
    arrival = [round(1000 * t) for t in instance.arrival.tolist()]
    prompt, texts = instance.prompt_tokens.tolist(), sequences_of(instance)
    ends = [len(text) - 1 for text in texts]
    users, makers, own = {}, set(), []
    for i in range(n):
        names = [tuple(texts[i][:end]) for end in range(block, ends[i] + 1, block)]
        for d, name in enumerate(names):
            if (d + 1) * block <= prompt[i]:
                users.setdefault(name, []).append(i)
            else:
                makers.add(name)
        own.append(names[: (prompt[i] - 1) // block])
    ending = {tuple(texts[i][: prompt[i]]) for i in range(n) if prompt[i] % block == 0}
    found = []
    for i in range(n):
        tail = prompt[i] - len(own[i]) * block
        paid, alone, release = Fraction(tail), tail, arrival[i]
        for name in own[i]:
            first = min(arrival[k] for k in users[name])
            near = [k for k in users[name] if arrival[k] <= first + within]
            if name in makers:
                continue
            alone += block * (first >= arrival[i])
            if i in near and name not in ending:
                paid += Fraction(block, len(near))
                release = min(release, first)
        found.append((paid, alone, arrival[i] - release))
    return found


def test_charges_are_those_of_blocks_one_by_one():
    """By hand every block has its text as a name, and what is paid is a fraction; charges are
    whole numbers of 1 / FINE tokens."""
    for seed in range(400):
        instance, _, _ = tiny(Random(seed), seed % 2 > 0, 6)
        arrival = [round(1000 * t) for t in instance.arrival.tolist()]
        for within in (0, 3, 100):
            charged = prefixes.charges_of(instance, arrival, within)
            expected = named_by_hand(instance, within)
            for one, (paid, alone, lag) in zip(charged, expected, strict=True):
                # FINE is 2^20; a thousandth of a token is far more than its roundings.
                assert abs(Fraction(one.tokens, prefixes.FINE) - paid) < Fraction(1, 1000)
                assert (one.alone_tokens, one.lag) == (alone, lag)


def certified(seed: int, monkeypatch) -> Iterator[tuple]:
    """Return an instance, its costs, and certificates of what bounds prove for it."""
    instance, cost, _ = tiny(Random(seed), seed % 2 > 0, 3)
    for method in ("work", "busy-time", "shares", "pieces"):
        monkeypatch.setattr(relaxations, "_WITHIN_S", (seed % 3 // 2,))
        proofs: dict = {}
        raise_bound(BoundTask(instance, cost), Budget(0.01), proofs.__setitem__, method)
        proof = proofs[method]
        good = json.loads(json.dumps(certify(instance, cost, "tel", proof.tree)))
        low = proof.value - 0.05 * abs(proof.value)
        assert verify_certificate(instance, good, cost) > low, (seed, method)
        yield instance, cost, good


def test_a_tree_of_charges_says_within_what_time_users_pay(monkeypatch):
    """`certified` yields trees with `within` at their top. Without it, with a wrong one, without
    a tree below or with a word more, no certificate is made."""
    for seed in range(3):
        for instance, cost, good in certified(seed, monkeypatch):
            right = good["tree"]
            for tree in (right["tree"], {**right, "within": -1}, {**right, "within": 0.5},
                         {"within": right["within"]}, {**right, "more": 1}):  # fmt: skip
                with pytest.raises(UsageError):
                    certify(instance, cost, "tel", tree)


def forge(monkeypatch, seed: int, count: int) -> None:
    """Corrupt and forge certificates until so many are refused, or still true."""
    tried = passed = 0
    rng = np.random.default_rng(seed)
    while tried < count:
        seed += 1
        best = best_of(*tiny(Random(seed), seed % 2 > 0, 3), most=10_000)
        for instance, cost, good in certified(seed, monkeypatch) if best else ():
            optimum = Fraction(round(1000 * best[0]), 1000)
            more = forgeries(rng, instance, cost, good, optimum, 15)
            tried, passed = tried + more[0], passed + more[1]
    assert passed < tried


def test_corrupted_and_forged_certificates_are_refused_or_still_true(monkeypatch):
    """90 of them, from seed 100 on (`forge`)."""
    forge(monkeypatch, 100, 90)


@pytest.mark.parametrize("ticks", [1, 10, 1000])
def test_coarse_ticks_let_nobody_pay_for_what_was_nearly_done(ticks):
    # Ten prompts share a block that takes 1 s: nine come at 0.99 s, all in tick 0 of a second. They
    # find it at 1 s, after 0.01 s, so latencies are 1.1 s, and 0.21 to 1.01 s of the others.
    shared = {"prefix_parent": [None] + [0] * 9, "prefix_tokens": [0] + [10] * 9}
    instance = Instance(
        [0.0] + [0.99] * 9, [11] * 10, [1] * 10, 1000, time_unit="second",
        prefix_block_tokens=10, **shared,
    )  # fmt: skip
    cost = BatchCost("tenth", 1, {"token": "100"})
    good = certify(instance, cost, "tel", {"within": 0, "tree": {"relaxation": "work"}})
    found = proved_ticks(instance, {**good, "ticks_per_second": ticks}, checker.Budget(10**9))
    # 1.1 + 9 * (0.21 + 1.01) / 2 = 6.59.
    assert found / ticks <= 6.59


@pytest.mark.slow
def test_ten_thousand_corruptions_are_refused_or_still_true(monkeypatch):
    forge(monkeypatch, 200, 10_000)


@pytest.mark.parametrize("leaf", [{"relaxation": "clock", "branches": [0]}, {"relaxation": "ramp"}])
def test_leaves_that_are_not_proved_for_charges_are_refused(leaf):
    instance, cost, _ = tiny(Random(0), True, 3)
    with pytest.raises(UsageError, match=r"shared prefixes|expected work"):
        certify(instance, cost, "tel", {"within": 0, "tree": leaf})


def test_bounds_that_are_not_proved_refuse_by_the_columns():
    instance, cost, _ = tiny(Random(1), True, 3)
    for method in ("clock", "classes"):
        with pytest.raises(UsageError, match="prefix_parent"):
            lower_bound(Problem(instance, cost), method=method)


def test_pieces_are_cut_after_charging():
    """A piece whose requests share with an earlier piece pays for none of it."""
    n, gap = 130, 100.0
    parent, shared = [None, *range(n - 1)], [0] + [60] * (n - 1)
    case = made_of(parent, shared, [61] * n, [2] * n, 4, {"token": "1", "base": "1"},
                   arrival=[gap * k for k in range(n)])  # fmt: skip
    instance, cost, _ = case
    found = lower_bound(Problem(instance, cost), method="pieces", time_limit_s=0.2)[0]
    # The first prompt is computed whole, the others' last tokens alone. Each request has two
    # batches: 1 + 1 tokens and 2 times the base.
    # One more prompt that is paid for whole would add 60 / 580, ten percent.
    assert found == pytest.approx((60 + n * (1 + 1 + 2)) / 1000, rel=0.01)


def test_a_prompt_in_parts_is_charged_the_least_squares_of_all_ways_to_split_it():
    # Four tokens of 1 ms, with 4 c^2 + 2 c m of a chunk of c over m: 64 at once, and one by one
    # 4 + 6, 4 + 4, 4 + 2 and 4 over 3, 2, 1 and 0 cached ones, so 28.
    instance = Instance([0.0], [4], [1], 10, time_unit="second", prefix_block_tokens=1)
    terms = {"token": "1", "prefill_square": "4", "prefill_cross": "2"}
    cost = BatchCost("square", 1, terms)
    schedule = from_batches([0, 1, 2, 3, 4], [0] * 4, [1] * 4, instance=instance)
    assert evaluate(Problem(instance, cost), schedule).metrics["tel"] == pytest.approx(0.032)
    assert lower_bound(Problem(instance, cost), method="work")[0] == pytest.approx(0.032)


def test_several_workers_share_one_charge():
    instance, cost, mode = TOGETHER
    one = lower_bound(Problem(instance, cost), method="work")[0]
    two = lower_bound(Problem(instance, Fleet.of(2, cost)), method="work")[0]
    assert two <= one <= best_of(instance, cost, mode)[0]


def test_compare_says_why_a_bound_is_missing():
    instance = generate("prefix-trees", n=5, time_unit="round", kv_capacity=900)
    found = compare(instance, ["fcfs"], time_limit_s=0.2)
    assert found.bound is None
    assert any("prefix_parent" in note for note in found.notes)
