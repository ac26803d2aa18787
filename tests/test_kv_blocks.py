"""KV in blocks: what a request holds, who counts it, and who refuses it.

Against a slow judge that counts block by block, twins of policies in plain Python, and exhaustive
search.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from brute_force import brute_force_tel
from command_line import run
from readable_rules import Readable
from readable_windows import simulate_windows
from slow_judge import TIMED, batches, random_batches, random_instance, slow_judge
from sweeps import parts
from test_simulate import RULES_SPECS, cost_of, due, run_or_error, same

from optsched import Problem, bound, compare, evaluate, solve
from optsched.bounds import BoundTask, list_bounds, lower_bound
from optsched.bounds.certificate import make_certificate, verify_certificate
from optsched.bounds.dual import Prices
from optsched.bounds.leaves import prices_leaf
from optsched.files.read_write import read_instance, write_instance
from optsched.judge.timeline import timeline
from optsched.optimize.search.offline import improve
from optsched.policies import allows, list_policies, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import (
    InputError,
    LoopError,
    OptschedError,
    UsageError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.schedule import from_starts


def two(**fields) -> Instance:
    """Two requests of 5 prompt and 4 output tokens in blocks of 4, "cached".

    Each takes 4 rounds and has 5, 6, 7 and 8 tokens, which are two blocks: 8 KV throughout.
    """
    values = {"kv_capacity": 16, "kv_accounting": "cached", "kv_block_tokens": 4, **fields}
    return Instance([0, 0], [5, 5], [4, 4], **values)


def in_blocks(rng: Random, instance: Instance) -> Instance:
    """Return the instance with blocks of a random size, and little more KV than a request needs."""
    block = rng.choice([2, 3, 5])
    capacity = int(instance.peak_tokens.max()) + block + rng.randint(0, 12)
    return replace(instance, kv_capacity=capacity, kv_block_tokens=block)


# --- what a request holds ---------------------------------------------------------------------


def test_a_request_holds_whole_blocks() -> None:
    # Tokens 5, 6, 7, 8 are 2 blocks of 4 in each round. With "generated" they are 6, 7, 8, 9.
    alone = [[5], [1], [1], [1]]
    for accounting, kv in (("cached", [16, 16, 16, 16]), ("generated", [16, 16, 16, 24])):
        instance = two(kv_accounting=accounting, kv_capacity=24)
        together = batches(instance, *({0: c, 1: c} for (c,) in alone))
        starts = from_starts([0, 0], instance)
        for schedule in (together, starts):
            judged = evaluate(instance, schedule)
            assert judged.metrics["peak_kv"] == max(kv)
            assert judged.metrics["mean_kv"] == sum(kv) / 4
        assert timeline(instance, together).batch_kv.tolist() == kv


def test_the_judge_counts_blocks() -> None:
    # 15 tokens hold the 2 x 5 prompts, and the 2 x 7 tokens of round 3; as blocks they take 16.
    tight = two(kv_capacity=15)
    together = batches(tight, {0: 5, 1: 5}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1})
    for schedule in (together, from_starts([0, 0], tight)):
        with pytest.raises(ViolationError, match=r"16.*tokens.*kv_capacity 15"):
            evaluate(tight, schedule)
    assert evaluate(two(), batches(two(), *[{0: 5, 1: 5}, *[{0: 1, 1: 1}] * 3])).metrics["tel"] == 8


def test_the_judge_agrees_with_the_slow_one() -> None:
    """`slow_judge` counts blocks one by one, and shares no code with the package's judge."""
    rng, accepted, rejected = Random(3), 0, 0
    for _ in range(200):
        # Decisions that suit single tokens: blocks make some of them break the capacity.
        loose = random_instance(rng)
        schedule = random_batches(rng, loose)
        if not schedule.batches:
            continue
        instance = in_blocks(rng, loose)
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
            assert timeline(
                Problem(instance, cost_of(instance)), schedule
            ).batch_kv.tolist() == list(slow.kv.values())
            accepted += 1
    assert min(accepted, rejected) >= 10  # some of each in 200 schedules


def test_starts_are_judged_as_the_slow_judge_does() -> None:
    """`slow_judge` counts blocks one by one; some starts are feasible, some break the capacity."""
    rng, rules = Random(4), set()
    for _ in range(150):
        instance = in_blocks(rng, random_instance(rng, unit="round"))
        starts = [int(a) + rng.randint(0, 6) for a in instance.arrival]
        slow = slow_judge(instance, from_starts(starts, instance))
        try:
            judged = evaluate(instance, from_starts(starts, instance))
        except ViolationError as error:
            assert error.rule in slow.broken  # noqa: PT017
            rules.add(error.rule)
            continue
        assert not slow.broken
        assert judged.metrics["peak_kv"] == max(slow.kv.values())
        busy = [kv for kv in slow.kv.values() if kv]
        assert judged.metrics["mean_kv"] == pytest.approx(sum(busy) / len(busy))
        rules.add(None)
    assert {None, "kv_capacity"} <= rules


# --- schedulers and searches ------------------------------------------------------------------


@pytest.mark.parametrize("numbers", parts(4, 25))
@pytest.mark.parametrize("spec", RULES_SPECS)
def test_rules_count_blocks_as_their_readable_twin_does(spec: str, numbers: range) -> None:
    """`Readable` is `Rules` in plain Python, written by itself: both make the same schedules."""
    rules, rng, finished = make_policy(spec)[0], Random(f"{spec} {numbers.start}"), 0
    for seed in numbers:
        instance = due(in_blocks(rng, random_instance(rng, most=8)))
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


def test_windows_count_blocks_as_their_readable_twin_does() -> None:
    """The policy's own windows: at most 3 requests for 2 tokens each, also in plain Python."""
    rng = Random(5)
    for _ in range(60):
        instance = in_blocks(rng, random_instance(rng, most=8, unit="second"))
        windows = make_policy("isrtf:window=2,batch_size=3")[0]
        fast = run_or_error(instance, windows)
        if not isinstance(fast, OptschedError):
            assert same(fast, simulate_windows(Problem(instance, TIMED), windows))
            evaluate(Problem(instance, TIMED), fast)


@pytest.mark.parametrize("name", sorted(list_policies()))
def test_the_judge_accepts_what_policies_do_with_blocks(name: str) -> None:
    """Of 15 instances for each policy, those that it may not have or cannot serve are left out."""
    rng, finished = Random(name), 0
    for seed in range(15):
        instance = due(in_blocks(rng, random_instance(rng)))
        if allows(name, instance) is not None:
            continue
        schedule = run_or_error(instance, name, seed=seed)
        if not isinstance(schedule, OptschedError):
            evaluate(Problem(instance, cost_of(instance)), schedule)
            finished += 1
    assert finished >= 3  # each policy served some


def test_the_loop_of_trail_decides_as_its_batch() -> None:
    """`trail` has a compiled loop. `Asked` has its `batch` alone, and is asked batch by batch."""

    class Asked:
        def __init__(self, policy) -> None:
            self.batch = policy.batch

    rng = Random(6)
    for _ in range(40):
        instance = in_blocks(rng, random_instance(rng, most=8))
        trail = make_policy("trail:keep=true")[0]
        fast, slow = run_or_error(instance, trail), run_or_error(instance, Asked(trail))
        if not isinstance(fast, OptschedError):
            assert same(fast, slow)


def test_the_offline_search_counts_blocks() -> None:
    # Alone each holds 8 of 8 tokens: one after the other. Without blocks 2 x 5 do not fit either,
    # but 12 tokens hold 5 + 5 at once, and as blocks they do not.
    instance = replace(two(), time_unit="second", kv_capacity=12)
    schedule, _ = improve(Problem(instance, TIMED), Budget(0.5))
    assert evaluate(Problem(instance, TIMED), schedule).metrics["peak_kv"] == 8


# --- bounds and exact methods -----------------------------------------------------------------


def test_bounds_without_blocks_hold_with_them() -> None:
    # Rounding up only takes schedules away, so the optimum with blocks is the larger one.
    rng, larger = Random(8), 0
    for _ in range(25):
        plain = random_instance(rng, unit="round", most=4, chunked_prefill=False)
        plain = replace(plain, limits=replace(plain.limits, max_batch_tokens=None,
                                              max_prefill_tokens=None))  # fmt: skip
        instance = in_blocks(rng, plain)
        with_blocks = brute_force_tel(instance)[0]
        larger += with_blocks > brute_force_tel(replace(instance, kv_block_tokens=1))[0]
        for method in ("srpt", "dual"):
            value, _ = lower_bound(instance, method=method, time_limit_s=0.05)
            assert value <= with_blocks, (method, instance.to_dict())
    assert larger >= 2  # so that blocks matter in some


def test_every_bound_but_the_ramp_allows_for_blocks_and_proves_what_it_does_without() -> None:
    """Only `ramp` refuses blocks; three bounds in seconds have the same value with and without."""
    seconds = replace(two(), time_unit="second")
    for name, one in list_bounds().items():
        about = Problem(two()) if one.time_unit == "round" else Problem(seconds, TIMED)
        task = BoundTask.of(about)
        assert one.lacks(task) == (["kv_block_tokens"] if name == "ramp" else [])
    for method in ("work", "busy-time", "shares"):
        with_blocks, without = (
            lower_bound(Problem(x, TIMED), method=method)[0]
            for x in (seconds, replace(seconds, kv_block_tokens=1))
        )
        assert with_blocks == without


def test_bound_and_compare_run_and_solve_refuses_by_name() -> None:
    # 12 tokens: without blocks both run together until one holds 8 and the other has gone. In
    # blocks each holds 8 of 12, so they run one after the other, for 4 rounds each.
    instance = two(kv_capacity=12)
    found = bound(instance, time_limit_s=20)
    assert found.value == 4 + 8  # one after the other
    assert found.bound <= 12
    assert verify_certificate(instance, found.certificate) <= found.bound
    assert compare(instance, ["mc-sf"], time_limit_s=20).value == 12
    for method in ("cpsat", "highs", "ramp", "lns"):
        with pytest.raises(UsageError, match="cannot do kv_block_tokens"):
            solve(instance, method=method)
    # What no exact method can do, policies and bounds answer.
    assert solve(instance, time_limit_s=20).value == 12
    with pytest.raises(UsageError, match="cannot do kv_block_tokens"):
        solve(Problem(replace(instance, time_unit="second"), TIMED), method="cpsat")


def test_a_certificate_of_optimality_counts_blocks() -> None:
    # Both at once, for a total of 2 + 2: without blocks 12 tokens are enough for 2 x 6. In blocks
    # of 4 these are 2 x 8 = 16. The same claim is made of both.
    plain = Instance([0, 0], [5, 5], [2, 2], 12, kv_accounting="cached")
    sum_of_outputs = prices_leaf(Prices(np.array([1]), np.array([0]), 1))
    for instance, fits in ((plain, True), (replace(plain, kv_block_tokens=4), False)):
        claim = make_certificate(
            instance, sum_of_outputs, value=4, denominator=1, schedule=from_starts([0, 0], instance)
        )
        if fits:
            assert verify_certificate(instance, claim) == 4
        else:
            with pytest.raises(ViolationError, match="found 16 KV tokens; expected at most 12"):
                verify_certificate(instance, claim)


# --- files ------------------------------------------------------------------------------------


def test_files_keep_the_block_and_single_tokens_leave_the_digest_as_it_was(tmp_path) -> None:
    """Blocks of one token are not written at all; a name is no part of the digest."""
    write_instance(two(name="two"), tmp_path / "two.json")
    again = read_instance(tmp_path / "two.json")
    assert (again.kv_block_tokens, again.sha256) == (4, two().sha256)
    assert "kv_block_tokens" not in two(kv_block_tokens=1).to_dict()
    assert two(kv_block_tokens=1).sha256 != two().sha256


def test_a_request_that_does_not_fit_in_whole_blocks_is_named() -> None:
    # 5 + 4 - 1 = 8 tokens fit into 9 of them, but the only block of 5 that 9 holds takes 5.
    with pytest.raises(InputError, match=r"request 0.*9.*10.*5"):
        two(kv_capacity=9, kv_block_tokens=5)


@pytest.mark.parametrize("value", [0, -1, 1.5, "16", True, None])
def test_a_block_is_a_positive_integer(value) -> None:
    with pytest.raises(InputError, match="kv_block_tokens"):
        two(kv_block_tokens=value)


def test_import_takes_the_block(tmp_path) -> None:
    (tmp_path / "t.csv").write_text("arrival,prompt_tokens,output_tokens\n0,5,4\n")
    out = tmp_path / "t.json"
    run(
        "import", "csv", tmp_path / "t.csv", "--kv-capacity", 32, "--kv-block-tokens", 16, "-o", out
    )
    assert json.loads(out.read_text())["kv_block_tokens"] == 16
    # A prefill, which yields the first of 4 tokens, and 3 decodes.
    assert simulate(Problem(read_instance(out), TIMED), "fcfs").batches == 4
