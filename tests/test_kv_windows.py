"""Windows of attention: what a request holds, who counts it, and what bounds make of it.

Against a slow judge that counts layer by layer, twins of policies in plain Python, and exhaustive
search.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from brute_force import brute_force_tel
from exhaustive_batches import Exhaustive
from readable_rules import Readable
from readable_vllm import ReadableVllm
from readable_windows import simulate_windows
from slow_judge import (
    TIMED,
    batches,
    random_batches,
    random_instance,
    slow_judge,
    with_drafts,
)
from sweeps import parts
from test_drafts import SUMS, UNIT, Drafting, proofs_of
from test_simulate import RULES_SPECS, cost_of, due, run_or_error, same
from test_vllm_v1 import random_policy

import optsched
from optsched import Problem, bound, evaluate, solve
from optsched.bounds import BoundTask, lower_bound, usable
from optsched.bounds.certificate import certify, verify_certificate
from optsched.costs.cost import BatchCost, UnitCost
from optsched.files.read_write import read_instance, write_instance
from optsched.judge.timeline import timeline
from optsched.policies import allows, list_policies, make_policy
from optsched.problem.errors import InputError, LoopError, OptschedError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.room import KvWindow, most_tokens, room_of
from optsched.problem.schedule import from_starts


def two(**fields) -> Instance:
    """Two requests of 5 prompt and 4 output tokens; 1 of 2 layers keeps their last 3 alone.

    Each takes 4 rounds and holds (5 + 3) / 2 tokens at first and (8 + 3) / 2, rounded up 6, at
    last: together 12, all that there is. Without the window it would be 8 each at last.
    """
    values = {"kv_capacity": 12, "kv_accounting": "cached", "kv_window": "3:1/2", **fields}
    return Instance([0, 0], [5, 5], [4, 4], **values)


def in_windows(rng: Random, instance: Instance) -> Instance:
    """Return the instance with a window, at times in blocks, and little more KV than it needs."""
    layers = rng.choice([1, 2, 3, 6])
    window = KvWindow(rng.randint(1, 6), rng.randint(1, layers), layers)
    block = rng.choice([1, 1, 2, 3])
    loose = replace(instance, kv_capacity=2**40, kv_block_tokens=block, kv_window=window)
    drafts = instance.num_speculative_tokens or 0
    peak = loose.kv_of(loose.peak_tokens - loose.kv_offset + drafts).max()
    return replace(loose, kv_capacity=int(peak) + rng.randint(0, 12))


# --- what a request holds ---------------------------------------------------------------------


def test_layers_of_a_window_keep_its_last_tokens() -> None:
    # 5 to 8 tokens hold 5 + 3, ..., 8 + 3 in two layers: 4, 4.5, 5, 5.5 tokens of both, rounded up
    # 4, 5, 5, 6. Two requests hold 8, 10, 10, 12.
    together = [{0: 5, 1: 5}, *[{0: 1, 1: 1}] * 3]
    for schedule in (batches(two(), *together), from_starts([0, 0], two())):
        found = evaluate(two(), schedule)
        assert found.metrics["peak_kv"] == 12
        assert found.metrics["mean_kv"] == (8 + 10 + 10 + 12) / 4
    assert timeline(two(), batches(two(), *together)).batch_kv.tolist() == [8, 10, 10, 12]


def test_the_judge_counts_windows() -> None:
    # 12 tokens in the last rounds, as above; the capacity is one less.
    tight = two(kv_capacity=11)
    for schedule in (
        batches(tight, {0: 5, 1: 5}, *[{0: 1, 1: 1}] * 3),
        from_starts([0, 0], tight),
    ):
        with pytest.raises(ViolationError, match=r"12.*tokens.*kv_capacity 11"):
            evaluate(tight, schedule)


@pytest.mark.parametrize("numbers", parts(150, 4000))
def test_the_judge_agrees_with_the_slow_one(numbers: range) -> None:
    """`slow_judge` counts layer by layer, and shares no code with the package's judge."""
    rng, accepted, rejected = Random(numbers.start), 0, 0
    for number in numbers:
        # Decisions that suit the KV of all layers, or half of it, so that windows matter.
        loose = random_instance(rng)
        if number % 3 == 0:
            loose = with_drafts(rng, loose)
        schedule = random_batches(rng, replace(loose, kv_capacity=2 * loose.kv_capacity))
        if not schedule.batches:
            continue
        instance = in_windows(rng, loose)
        schedule = replace(schedule, instance_sha256=instance.sha256)
        slow = slow_judge(instance, schedule, layers=TIMED.layers, coefficients=TIMED.coefficients)
        try:
            judged = evaluate(Problem(instance, cost_of(instance)), schedule)
        except ViolationError as error:
            assert error.rule in slow.broken  # noqa: PT017
            rejected += error.rule == "kv_capacity"
        else:
            assert not slow.broken
            assert judged.batch_kv.tolist() == list(slow.kv.values())
            accepted += 1
    assert min(accepted, rejected) >= len(numbers) / 20  # a twentieth each, at least


def test_starts_are_judged_as_the_slow_judge_does() -> None:
    """`slow_judge` counts layer by layer; some starts are feasible, some break the capacity."""
    rng, rules = Random(4), set()
    for _ in range(150):
        instance = in_windows(rng, random_instance(rng, unit="round"))
        starts = [int(a) + rng.randint(0, 6) for a in instance.arrival]
        slow = slow_judge(instance, from_starts(starts, instance))
        try:
            judged = evaluate(instance, from_starts(starts, instance))
        except ViolationError as error:
            assert error.rule in slow.broken  # noqa: PT017
            rules.add(error.rule)
            continue
        assert not slow.broken
        busy = [kv for kv in slow.kv.values() if kv]
        assert judged.metrics["peak_kv"] == max(busy)
        assert judged.metrics["mean_kv"] == pytest.approx(sum(busy) / len(busy))
        rules.add(None)
    assert {None, "kv_capacity"} <= rules


def test_the_largest_request_that_fits_is_the_last_whose_room_does() -> None:
    """`most_tokens` by a formula against the room of 1, 2, ..., 299 tokens."""
    rng = Random(1)
    for _ in range(500):
        layers = rng.randint(1, 8)
        window = KvWindow(rng.randint(1, 9), rng.randint(0, layers - 1), layers)
        block, capacity = rng.randint(1, 4), rng.randint(4, 30)
        fits = np.flatnonzero(room_of(np.arange(1, 300), block, window) <= capacity) + 1
        assert most_tokens(capacity, block, window) == fits.max()
    # Where no layer keeps everything a request of any length (the largest int32) fits beside its
    # window.
    assert most_tokens(8, 1, KvWindow(8, 1, 1)) == 2**31 - 1 > most_tokens(7, 1, KvWindow(8, 1, 1))


# --- schedulers -------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", parts(4, 60))
@pytest.mark.parametrize("spec", RULES_SPECS)
def test_rules_count_windows_as_their_readable_twin_does(spec: str, numbers: range) -> None:
    """`Readable` is `Rules` in plain Python, written by itself: both make the same schedules."""
    rules, rng, finished = make_policy(spec)[0], Random(f"{spec} {numbers.start}"), 0
    for seed in numbers:
        instance = due(in_windows(rng, random_instance(rng, most=8)))
        fast = run_or_error(instance, rules, seed=seed)
        if isinstance(fast, OptschedError):
            continue
        slow = run_or_error(instance, Readable(rules, instance), seed=seed)
        if isinstance(slow, LoopError) and rules.beta < 1:
            continue  # with chances below 1 the compiled loop is more patient with draws
        assert not isinstance(slow, OptschedError), (slow, instance.to_dict())
        assert same(fast, slow), instance.to_dict()
        evaluate(Problem(instance, cost_of(instance)), fast)
        finished += 1
    assert finished >= -(-len(numbers) // 5)  # a fifth at least was compared


@pytest.mark.parametrize("numbers", parts(60, 2000))
def test_vllm_counts_windows_as_its_readable_twin_does(numbers: range) -> None:
    """`ReadableVllm` is vLLM's scheduler in plain Python, written by itself: the same schedules."""
    rng, finished = Random(f"vllm {numbers.start}"), 0
    for seed in numbers:
        plain = random_instance(rng, most=8)
        plain = with_drafts(rng, plain) if seed % 3 == 0 else plain
        instance = in_windows(rng, plain)
        policy, cost = random_policy(rng), cost_of(instance) or UnitCost()
        fast = run_or_error(instance, policy, seed=seed)
        if isinstance(fast, OptschedError):
            continue
        slow = run_or_error(instance, ReadableVllm(policy, instance, cost), seed=seed)
        assert not isinstance(slow, OptschedError), (slow, instance.to_dict())
        assert same(fast, slow), instance.to_dict()
        evaluate(Problem(instance, cost_of(instance)), fast)
        finished += 1
    assert finished >= len(numbers) / 2  # half at least was compared


def test_elis_counts_windows_as_its_readable_twin_does() -> None:
    # ELIS has windows of tokens of its own (`isrtf`): 2 tokens for at most 3 requests at a time.
    rng = Random(5)
    for _ in range(60):
        instance = in_windows(rng, random_instance(rng, most=8, unit="second"))
        policy = make_policy("isrtf:window=2,batch_size=3")[0]
        fast = run_or_error(instance, policy)
        if not isinstance(fast, OptschedError):
            assert same(fast, simulate_windows(Problem(instance, TIMED), policy))
            evaluate(Problem(instance, TIMED), fast)


@pytest.mark.parametrize("name", sorted(list_policies()))
def test_the_judge_accepts_what_policies_do_with_windows(name: str) -> None:
    """Of 15 instances for each policy, those that it may not have or cannot serve are left out."""
    rng, finished = Random(name), 0
    for seed in range(15):
        instance = due(in_windows(rng, random_instance(rng)))
        if allows(name, instance) is not None:
            continue
        schedule = run_or_error(instance, name, seed=seed)
        if not isinstance(schedule, OptschedError):
            evaluate(Problem(instance, cost_of(instance)), schedule)
            finished += 1
    assert finished >= 3  # each policy served some


def test_a_request_longer_than_the_capacity_runs_where_its_window_fits() -> None:
    # All layers slide, so that 20 tokens hold 8 of the capacity of 8.
    instance = Instance([0.0], [15], [6], 8, "second", "cached", kv_window=(8, 1, 1))
    for name in ("vllm-v1", "mc-sf", "fcfs", "trail"):
        found = optsched.run(Problem(instance, TIMED), name)
        assert found.evaluation.metrics["peak_kv"] == 8


# --- bounds and exact methods -----------------------------------------------------------------


def tiny(rng: Random) -> tuple[Instance, BatchCost | None]:
    """Two or three requests with a window, and a cost model for those in seconds."""
    n, unit = rng.choice([2, 2, 3]), rng.choice(["round", "second"])
    plain = Instance(
        sorted(rng.choice([0, 0, 1, 2]) for _ in range(n)),
        [rng.randint(1, 5) for _ in range(n)],
        [rng.randint(1, 5 if n == 2 else 3) for _ in range(n)],
        2**40, unit, rng.choice(["generated", "cached"]),
        hybrid_batching=rng.choice([None, False]), chunked_prefill=False,
        weight=[rng.randint(1, 3) for _ in range(n)],
    )  # fmt: skip
    plain = with_drafts(rng, plain) if rng.random() < 0.25 else plain
    coefficients = {
        name: str(rng.choice([0, 0, 10, 40, 300])) for name in TIMED.coefficients if name != "base"
    }
    cost = BatchCost("drawn", 1, {**coefficients, "base": str(rng.choice([100, 500]))})
    return in_windows(rng, plain), None if unit == "round" else cost


@pytest.mark.parametrize("numbers", parts(200, 2200))
def test_no_bound_exceeds_an_exhaustive_optimum_and_certificates_are_accepted(
    numbers: range,
) -> None:
    """Every bound against the best of all batches; a round is a batch of one second there."""
    checked, certificates, met, shared = 0, 0, 0, 0
    for number in numbers:
        rng = Random(number)
        instance, cost = tiny(rng)
        goal = rng.choice(SUMS)
        searched = Exhaustive if instance.drafts is None else Drafting
        alike = replace(instance, time_unit="second")
        search = searched(alike, cost or UNIT, restart=cost is None, split=False)
        (optimum,) = search.best(goal)
        shared += instance.kv_capacity < int(instance.peak_tokens.max())
        for one in usable(BoundTask.of(Problem(instance, cost, goal))):
            for proof in proofs_of(Problem(instance, cost, goal), one.name):
                assert proof.value <= optimum * (1 + 1e-9) + 1e-9, (number, one.name)
                met += proof.value >= optimum * (1 - 1e-6)
                checked += 1
                made = proof.certificate
                if proof.tree is not None:
                    made = certify(instance, cost, goal, proof.tree)
                if made is not None:
                    assert verify_certificate(instance, made) <= optimum * (1 + 1e-9), number
                    certificates += 1
    # The claims above are not empty: a proof for each instance, a certificate for a third.
    assert checked > len(numbers)
    assert certificates > len(numbers) / 3
    assert met > len(numbers) / 10
    # Bounds are attained in a tenth; in a twentieth a request has more tokens than the capacity.
    assert shared > len(numbers) / 20


def test_a_window_that_no_request_reaches_changes_no_bound() -> None:
    # The window is as long as the largest request ever gets.
    rng = Random(6)
    for _ in range(20):
        plain = random_instance(rng, most=4, chunked_prefill=False)
        wide = replace(plain, kv_window=(int(plain.peak_tokens.max()), 1, 2))
        for goal in ("tel", "makespan", "mean_ttft", "p90_latency"):
            values = [lower_bound(Problem(x, cost_of(x), goal)) for x in (plain, wide)]
            assert values[0] == values[1]


def test_bounds_in_rounds_hold_by_enumerating_starts() -> None:
    """No bound is above the optimum; in some instances it is smaller than without the window."""
    rng, smaller = Random(8), 0
    for _ in range(40):
        plain = random_instance(rng, unit="round", most=4, chunked_prefill=False)
        plain = replace(plain, limits=optsched.Limits())
        instance = in_windows(rng, plain)
        best = brute_force_tel(instance)[0]
        without = replace(instance, kv_window=None, kv_capacity=max(
            instance.kv_capacity, int(plain.peak_tokens.max()) + 2))  # fmt: skip
        smaller += best < brute_force_tel(without)[0]
        assert bound(instance, time_limit_s=0.5).bound <= best
    assert smaller >= 2  # of 40: the window is of use in some


def test_bound_and_compare_run_and_exact_methods_refuse_by_name() -> None:
    # 12 tokens: both at once, and each takes 4 rounds: 4 + 4 = 8. Without the window they hold 16,
    # and run one after the other.
    assert (bound(two(), time_limit_s=20).value, solve(two(), time_limit_s=20).value) == (8, 8)
    for method in ("cpsat", "highs", "ramp", "lns"):
        with pytest.raises(UsageError, match="cannot do kv_window"):
            solve(two(), method=method)
    with pytest.raises(UsageError, match="cannot do kv_window"):
        solve(Problem(two(time_unit="second"), TIMED), method="cpsat")


# --- files ------------------------------------------------------------------------------------


def test_files_keep_the_window_and_none_leaves_the_digest_as_it_was(tmp_path) -> None:
    # 3:1/2 is a window of 3 tokens in 1 of 2 layers. A name is no part of the digest.
    write_instance(two(name="two"), tmp_path / "two.json")
    again = read_instance(tmp_path / "two.json")
    assert (again.kv_window, again.sha256) == (KvWindow(3, 1, 2), two().sha256)
    # A window that 0 of 2 layers have is none.
    assert two(kv_window=None, kv_capacity=16).sha256 == two(
        kv_window="3:0/2", kv_capacity=16
    ).sha256 != two(kv_capacity=16).sha256  # fmt: skip
    assert "kv_window" not in two(kv_window=None, kv_capacity=16).to_dict()


def test_a_request_that_does_not_fit_is_named() -> None:
    # At its end it holds 8 tokens in a layer and 3 in the other: 5.5 of both, rounded up.
    with pytest.raises(InputError, match=r"found 5; expected at least 6.*windows of 3:1/2"):
        two(kv_capacity=5)


@pytest.mark.parametrize(
    "value", ["128", "128:12", "0:1/2", "8:3/2", (8, 1), 8, [8, 1, 2.0], "8:1/0"]
)
def test_a_window_is_tokens_and_layers(value) -> None:
    with pytest.raises(InputError, match="kv_window: found"):
        two(kv_window=value)


def test_windows_beside_shared_prefixes_are_refused() -> None:
    with pytest.raises(InputError, match=r"kv_window.*3.*1.*2"):
        two(prefix_block_tokens=2)
