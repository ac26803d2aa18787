"""Speculative decoding: several tokens a step, by hand, by a slow judge, and by exhaustion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from command_line import run
from exhaustive_batches import Exhaustive
from readable_vllm import ReadableVllm
from slow_judge import (
    TIMED,
    batches,
    made_of,
    random_batches,
    random_instance,
    slow_judge,
    with_drafts,
)
from sweeps import parts
from test_simulate import cost_of, rows_of, run_or_error, same
from test_vllm_v1 import random_policy

import optsched
from optsched import Problem
from optsched.bounds import lower_bound, raise_bound, usable
from optsched.bounds.base import BoundTask, Proof
from optsched.bounds.certificate import certify, verify_certificate
from optsched.costs.cost import BatchCost, UnitCost
from optsched.files.read_write import instance_from_dict
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import (
    InputError,
    OptschedError,
    PolicyError,
    UsageError,
    ViolationError,
)
from optsched.problem.instance import Instance, Limits

# A batch of c tokens takes c + 1 s.
LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""


def one(**fields) -> Instance:
    """A request with a prompt of 3 that yields 1 + 3 + 1 + 2 tokens if all drafts are verified."""
    values = {"num_speculative_tokens": 2, "accepted": [[2, 0, 2]], "kv_capacity": 40, **fields}
    return Instance([0], [3], [7], time_unit="second", kv_accounting="cached", **values)


def test_a_step_yields_its_accepted_drafts_and_one_token_more() -> None:
    # The prefill takes 4 s, and each step of 3 tokens 4 s. The third step would yield 3 tokens, of
    # which 2 are left. KV: 3 at first, then 3 + 3, (3 + 3) + 3, (3 + 3 + 1) + 3.
    found = evaluate(Problem(one(), LINEAR), batches(one(), {0: 3}, {0: 3}, {0: 3}, {0: 3}))
    assert found.finish.tolist() == [16.0]
    assert found.batch_kv.tolist() == [3, 6, 9, 10]
    assert found.tpot.tolist() == [12 / 6]  # from 4 s to 16 s, over the 6 tokens after the first
    assert found.gap.tolist() == [4.0]  # from each step to the next


def test_a_step_with_fewer_drafts_yields_no_more_than_its_tokens_nor_than_its_run() -> None:
    # Steps of 2: 2 of the run of 3, its last one, 1 of the run of 1, 2 of 2.
    # The prefill takes 4 s, and each of four steps 2 + 1 = 3 s.
    found = evaluate(Problem(one(), LINEAR), batches(one(), {0: 3}, *[{0: 2}] * 4))
    assert found.finish.tolist() == [4 + 4 * 3.0]


def test_without_accepted_drafts_every_draft_is_accepted() -> None:
    # 1 + 3 + 3 tokens.
    given = one(accepted=None)
    found = evaluate(Problem(given, LINEAR), batches(given, {0: 3}, {0: 3}, {0: 3}))
    assert found.finish.tolist() == [4 + 2 * 4.0]


def test_a_step_has_no_more_drafts_than_the_server_verifies() -> None:
    with pytest.raises(ViolationError, match=r"decodes 4.*tokens.*3"):
        evaluate(Problem(one(), LINEAR), batches(one(), {0: 3}, {0: 4}))


def test_drafts_need_room_while_they_are_verified() -> None:
    # 3 + 7 - 1 = 9 tokens are held at the end without drafts; the last step needs 7 + 3.
    tight = one(kv_capacity=9)
    evaluate(Problem(tight, LINEAR), batches(tight, {0: 3}, {0: 3}, {0: 3}, {0: 2}))
    with pytest.raises(ViolationError, match="holds 10 KV tokens"):
        evaluate(Problem(tight, LINEAR), batches(tight, {0: 3}, {0: 3}, {0: 3}, {0: 3}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accepted": [[2]]}, "accepted: request 0: found steps that yield 3 tokens; expected at"),
        (
            {"accepted": [[3, 2]]},
            "accepted: request 0, step 0: found 3; expected a number from 0 t",
        ),
        ({"accepted": [[2], [2]]}, "requests.accepted: found 2 values; expected 1"),
        ({"num_speculative_tokens": None}, "expected it beside num_speculative_tokens"),
        (
            {"num_speculative_tokens": -1},
            "num_speculative_tokens: found -1; expected a number from",
        ),
        ({"prefix_block_tokens": 2}, "found 2 beside shared prefixes; expected none"),
    ],
)
def test_wrong_columns_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        one(**fields)


def test_files_and_subsets_keep_the_column() -> None:
    again = instance_from_dict(one().to_dict(), name="")
    assert again.sha256 == one().sha256 != one(accepted=None).sha256
    assert one().subset([0, 0]).accepted == ((2, 0, 2), (2, 0, 2))
    plain = one(accepted=None, num_speculative_tokens=None).to_dict()
    assert "accepted" not in plain["requests"]
    assert "num_speculative_tokens" not in plain


def test_a_server_without_drafts_is_one_of_which_nothing_is_said() -> None:
    plain = one(num_speculative_tokens=None, accepted=None)
    assert one(num_speculative_tokens=0, accepted=[[0] * 6]).sha256 == plain.sha256


@pytest.mark.parametrize("numbers", parts(200, 6000))
def test_the_judge_agrees_with_a_slow_one(numbers: range) -> None:
    """`slow_judge` finds the rule that breaks, or the same times and KV; it shares no code with
    the judge."""
    for number in numbers:
        rng = Random(number)
        instance = with_drafts(rng, random_instance(rng))
        schedule = random_batches(rng, instance)
        slow = slow_judge(instance, schedule, layers=TIMED.layers, coefficients=TIMED.coefficients)
        cost = None if instance.in_rounds else TIMED
        if slow.broken:
            with pytest.raises(ViolationError) as caught:
                evaluate(Problem(instance, cost), schedule)
            assert caught.value.rule in slow.broken, number
            continue
        found = evaluate(Problem(instance, cost), schedule)
        assert found.finish.tolist() == pytest.approx([float(t) for t in slow.finish]), number
        assert found.first_token.tolist() == pytest.approx([float(t) for t in slow.first_token])
        assert found.batch_kv.tolist() == [slow.kv[j] for j in range(len(slow.kv))], number
        gaps = [np.nan if gap is None else float(gap) for gap in slow.gap]
        assert found.gap.tolist() == pytest.approx(gaps, nan_ok=True), number


def test_the_twin_of_vllm_verifies_all_drafts_and_keeps_what_is_accepted() -> None:
    # A (prompt 3, output 7) as above, and B (prompt 2, output 3), whose only step yields 2 of 2.
    # Batch 0 prefills 3 + 2; batch 1 decodes 3 + 3; A goes on alone: times 6, 7, 4, 4.
    pair = Instance(
        [0, 0], [3, 2], [7, 3], 40, "second", "cached", num_speculative_tokens=2,
        accepted=[[2, 0, 2], [1]],
    )  # fmt: skip
    problem = Problem(pair, LINEAR)
    found = evaluate(problem, simulate(problem, "vllm-v1"))
    # B ends with batch 1 at 6 + 7 = 13 s, and A at 13 + 4 + 4 = 21 s.
    assert found.finish.tolist() == [21.0, 13.0]
    # A holds 3 + 3 beside B's 2 + 3, then 6 + 3, of which 2 are not accepted, and 7 + 3.
    assert found.batch_kv.tolist() == [5, 6 + 5, 9, 10]


def test_a_step_of_vllm_takes_drafts_as_far_as_its_budget_goes() -> None:
    # Three decode at once under 5 tokens: 3 + 2 + 0.
    three = Instance(
        [0] * 3, [1] * 3, [3] * 3, 40, "second", "cached", Limits(5), num_speculative_tokens=2
    )
    schedule = simulate(Problem(three, LINEAR), "vllm-v1")
    # Batch 0 prefills 1 + 1 + 1; batch 1 has 3 and 2 tokens, and nothing is left for the third.
    assert schedule.tokens.tolist()[:5] == [1, 1, 1, 3, 2]


def test_the_compiled_twin_decides_as_the_readable_one() -> None:
    rng, finished, preempted = Random(47), 0, 0
    for number in range(300):
        room = rng.choice([3, 8, 20])
        instance = with_drafts(rng, random_instance(rng, most=8))
        # Room for little more than the largest request, so that some are preempted.
        peak = int(instance.peak_tokens.max())
        instance = replace(instance, kv_capacity=peak + instance.num_speculative_tokens + room)
        policy, cost = random_policy(rng), cost_of(instance)
        fast = run_or_error(instance, policy)
        if isinstance(fast, OptschedError):
            # Only where prefills are whole may a prompt not fit into a batch.
            assert instance.chunked_prefill is False, number
            continue
        slow = run_or_error(instance, ReadableVllm(policy, instance, cost or UnitCost()))
        assert same(fast, slow), (number, rows_of(fast), rows_of(slow))
        preempted += evaluate(Problem(instance, cost), fast).metrics["evictions"] > 0
        finished += 1
    # Of 300 runs most were compared, and some of them with preemptions.
    assert finished > 200
    assert preempted > 20


def test_a_request_whose_drafts_never_have_room_is_named() -> None:
    with pytest.raises(PolicyError, match=r"request 0.*2.*11 of 9.*tokens"):
        simulate(Problem(one(kv_capacity=9), LINEAR), "vllm-v1")


def test_who_verifies_no_drafts_decides_as_without() -> None:
    """The other policies' schedules are the same, and the judge finds the same of them."""
    rng = Random(5)
    for _ in range(20):
        plain = random_instance(rng, unit="second", chunked_prefill=True, hybrid_batching=True)
        drafts = with_drafts(rng, plain)
        for policy in ("mc-sf", "sarathi", "vllm", "srpt"):
            mine = simulate(Problem(drafts, TIMED), policy)
            other = simulate(Problem(plain, TIMED), policy)
            assert same(mine, other)
            ends = [
                evaluate(Problem(x, TIMED), schedule).finish.tolist()
                for x, schedule in ((drafts, mine), (plain, other))
            ]
            assert ends[0] == ends[1]


class Drafting(Exhaustive):
    """All batches of an instance with drafts. Room for what is not accepted is free at once."""

    def __init__(self, instance, cost_model, **options) -> None:
        super().__init__(instance, cost_model, **options)
        self.instance = instance

    def options(self, i, state):
        for tokens, phase, evicted, after in super().options(i, state):
            yield tokens, phase, evicted, after
            if phase and phase[0] == "decode":
                produced, cached, _ = state
                for c in range(1, 2 + self.instance.num_speculative_tokens):
                    made = made_of(self.instance, i, produced, c)
                    yield c, phase, evicted, (produced + made, cached + made, True)


# Every batch takes 1 s, as a round does.
UNIT = BatchCost("unit", 1, {"base": "1000"})
"""Every batch takes a second, as every batch of an instance in rounds takes a round."""


def proofs_of(problem: Problem, name: str) -> list[Proof]:
    """Return the proofs that a bound tells of, under a budget of no time."""
    found: list[Proof] = []
    raise_bound(BoundTask.of(problem), Budget(0.0), lambda _, proof: found.append(proof), name)
    return found


SUMS = ("tel", "weighted_latency", "mean_ttft", "makespan")


def tiny(rng: Random) -> tuple[Instance, BatchCost | None]:
    """Two or three requests with drafts, and a cost model for those in seconds."""
    n, unit = rng.choice([2, 2, 3]), rng.choice(["round", "second"])
    prompt = [rng.randint(1, 3) for _ in range(n)]
    output = [rng.randint(1, 6 if n == 2 else 4) for _ in range(n)]
    offset = rng.choice(["generated", "cached"])
    peak = max(s + o for s, o in zip(prompt, output, strict=True))
    instance = Instance(
        sorted(rng.choice([0, 0, 1, 2]) for _ in range(n)), prompt, output,
        peak + rng.randint(0, 6), unit, offset, Limits(rng.choice([None, None, 5])),
        hybrid_batching=rng.choice([None, False]), chunked_prefill=False,
        weight=[rng.randint(1, 3) for _ in range(n)],
    )  # fmt: skip
    coefficients = {
        name: str(rng.choice([0, 0, 10, 40, 300])) for name in TIMED.coefficients if name != "base"
    }
    cost = BatchCost("drawn", 1, {**coefficients, "base": str(rng.choice([100, 500]))})
    return with_drafts(rng, instance, kv_block_tokens=rng.choice([1, 1, 2])), (
        None if unit == "round" else cost
    )


@pytest.mark.parametrize("numbers", parts(200, 4000))
def test_no_bound_exceeds_an_exhaustive_optimum_and_certificates_are_accepted(
    numbers: range,
) -> None:
    # `Drafting` tries every batch with every number of drafts.
    checked, certificates, met = 0, 0, 0
    for number in numbers:
        rng = Random(number)
        try:
            instance, cost = tiny(rng)
        except InputError:  # a request does not fit in whole blocks
            continue
        goal = rng.choice(SUMS)
        alike = replace(instance, time_unit="second")
        search = Drafting(alike, cost or UNIT, restart=cost is None, split=False)
        (optimum,) = search.best(goal)
        problem = Problem(instance, cost, goal)
        for one in usable(BoundTask.of(problem)):
            for proof in proofs_of(problem, one.name):
                assert proof.value <= optimum * (1 + 1e-9) + 1e-9, (number, one.name)
                met += proof.value >= optimum * (1 - 1e-6)
                checked += 1
                made = proof.certificate
                if proof.tree is not None:
                    made = certify(instance, cost, goal, proof.tree)
                if made is not None:
                    assert verify_certificate(instance, made) <= optimum * (1 + 1e-9), number
                    certificates += 1
    # The claims above are not empty: more than a proof for each instance, certificates for a third,
    # and for a tenth a bound that is the optimum itself.
    assert checked > len(numbers)
    assert certificates > len(numbers) / 3
    assert met > len(numbers) / 10


def test_a_bound_grants_each_step_what_is_recorded_or_else_all_of_its_drafts() -> None:
    # In rounds, alone: a prefill and three steps (1 + 3 + 1 + 2), or two of 3.
    for accepted, rounds in (([[2, 0, 2]], 4), (None, 3)):
        given = replace(one(accepted=accepted), time_unit="round", kv_accounting="generated")
        found = optsched.bound(given, time_limit_s=2.0)
        assert (found.bound, found.value, found.certified) == (rounds, rounds, rounds)


def test_without_accepted_drafts_bounds_are_those_without_drafts() -> None:
    rng = Random(8)
    for _ in range(30):
        plain = random_instance(rng, chunked_prefill=False)
        rows = [[0] * (o - 1) for o in plain.output_tokens.tolist()]
        drafts = replace(plain, num_speculative_tokens=2, accepted=rows)
        cost = None if plain.in_rounds else TIMED
        for goal in ("tel", "makespan", "mean_ttft", "p90_latency"):
            values = [lower_bound(Problem(x, cost, goal)) for x in (plain, drafts)]
            assert values[0] == values[1]


@pytest.mark.parametrize("goal", ["slo_attainment:slo_tpot=1", "slo_goodput:slo_ttft=1"])
def test_objectives_that_the_proof_does_not_cover_are_refused_by_name(goal: str) -> None:
    task = BoundTask.of(Problem(one(), LINEAR, goal))
    with pytest.raises(UsageError, match=r"accepted.*num_speculative_tokens"):
        usable(task, required=True)


def test_exact_methods_refuse_drafts_by_name() -> None:
    given = replace(one(), time_unit="round")
    with pytest.raises(UsageError, match="accepted, num_speculative_tokens"):
        optsched.solve(given, method="cpsat")


def accepted_of(*given: object, **options: object) -> list[list[int]]:
    """Return the accepted drafts that `with_drafts` gives the request `one`."""
    found = optsched.with_drafts(one(), *given, **options)  # type: ignore[arg-type]
    return [list(row) for row in found.accepted or ()]


def test_a_share_is_spread_evenly_as_blis_does() -> None:
    # 5 drafts, of which 0.7: steps yield 1 + 3, then 1 + 4; 4 and 2 are left of 6 tokens.
    # 0.7 of 5 is 3.5 a step: 3, then 4.
    assert accepted_of(5, share=0.7) == [[3, 4]]


def test_a_mean_is_drawn_from_the_two_numbers_beside_it_as_aisimulate_does() -> None:
    long = replace(one(), output_tokens=[20_000], accepted=None, kv_capacity=30_000)
    (row,) = optsched.with_drafts(long, 3, accepted=1.99, seed=42).accepted
    assert set(row) == {1, 2}
    # 20,000 / 2.99 = 6,700 steps of deviation 0.1: their mean has 0.0012, and 0.005 is four times
    # that.
    assert np.mean(row[:-1]) == pytest.approx(1.99, abs=0.005)


def test_rates_are_the_shares_of_steps_that_accept_each_draft_as_vllm_logs_them() -> None:
    long = replace(one(), output_tokens=[20_000], accepted=None, kv_capacity=30_000)
    (row,) = optsched.with_drafts(long, 3, rates=[0.8, 0.5, 0.3], seed=1).accepted
    shares = [np.mean(np.array(row[:-1]) >= j) for j in (1, 2, 3)]
    # 20,000 / (1 + 0.8 + 0.5 + 0.3) = 7,700 steps: shares have a deviation of 0.5 / sqrt(7,700) =
    # 0.006 at most, and 0.02 is over three times that.
    assert shares == pytest.approx([0.8, 0.5, 0.3], abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accepted": 4}, "accepted: found 4; expected 0 to 3"),
        ({"rates": [0.5, 0.6, 0.1]}, "expected 3 falling shares"),
        ({"share": 1.5}, "share: found 1.5; expected 0 to 1"),
        ({"share": 0.5, "accepted": 1}, "found accepted and share; expected one"),
    ],
)
def test_wrong_acceptances_are_named(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        optsched.with_drafts(one(), 3, **options)


def test_drafts_are_given_verified_and_bounded_on_the_command_line(tmp_path: Path) -> None:
    """export gives them, bound and verify say so; the plain file has no such certificate (5),
    and "x" is no number of drafts (2)."""
    plain, drafts, proof = (tmp_path / f"{name}.json" for name in ("plain", "drafts", "proof"))
    optsched.write_instance(Instance([0, 1], [3, 2], [7, 5], 20), plain)
    run("export", plain, "--drafts", "3:accepted=1.99", "--seed", "42", "-o", drafts)
    granted = "with 3 drafts a step, accepted as recorded"
    assert granted in run("bound", drafts, "--time-limit", "2", "--certificate-out", proof)
    assert granted in run("verify", drafts, proof)
    assert "instance_sha256" in run("verify", plain, proof, status=5)
    assert "as in 3:accepted=1.99" in run("export", plain, "--drafts", "x", "-o", drafts, status=2)
