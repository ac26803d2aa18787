"""Fleet: machines with roles, between which the KV of requests moves.

Moments are computed by hand: nearly always a batch takes 1 s (ONE). Random moves are judged by a
slow judge, too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from slow_judge import CONSTANT, TIMED, corrupted_moves, random_moves, slow_judge
from test_fleet import each_batch

import optsched
from optsched import Problem
from optsched.analysis.diagnose import diagnose
from optsched.analysis.splits import best_split
from optsched.analysis.why import why
from optsched.costs.fleet import Fleet, kv_link, parse_link, roles_of
from optsched.costs.machine import Link, Machine
from optsched.files.read_write import read_schedule, write_schedule
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, PolicyError, UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import Schedule, from_batches
from optsched.workloads.generate import generate

MODEL = "llama2-7b-a100-infermax"
# Every batch takes 1 s.
ONE = each_batch(1.0)


def pair(**options) -> Instance:
    """Two requests at 0, of 4 + 3 and 2 + 2 tokens."""
    return Instance(
        [0, 0], [4, 2], [3, 2], 20, time_unit="second", kv_accounting="cached", **options
    )


SOME = Link(0.5, 0.25)


def pools(link: Link = SOME, receiver: int = 20, deflect_below: int = 0) -> Fleet:
    """A prefill and a decode machine. Moves of 4 and 2 tokens take 0.5 + 1 s and 0.5 + 0.5 s."""
    machines = (
        Machine(cost_model=ONE, kv_capacity=20, role="prefill"),
        Machine(cost_model=ONE, kv_capacity=receiver, role="decode"),
    )
    return Fleet(machines, link, deflect_below)


def handed(instance: Instance, **changes) -> Schedule:
    """Both prompts on worker 0 until 1, both moves to worker 1, and there two batches.

    These are of both requests and of request 0 alone, which has a third token. `moved_offsets`,
    as `batch_offsets`, has the place where each batch's moves begin, and the end: both moves
    stand before batch 1.
    """
    columns = {
        "batch_offsets": [0, 2, 4, 5],
        "request": [0, 1, 0, 1, 0],
        "tokens": [4, 2, 1, 1, 1],
        "worker": [0, 1, 1],
        "moved_offsets": [0, 0, 2, 2],
        "moved": [0, 1],
        "moved_to": [1, 1],
        **changes,
    }
    return from_batches(**columns, instance=instance)


def test_a_request_goes_on_where_its_kv_is_once_the_move_is_over() -> None:
    found = evaluate(Problem(pair(), pools()), handed(pair()))
    assert found.first_token.tolist() == [1.0, 1.0]  # of the prefill machine
    assert found.moves is not None
    # From 1 on moves take 0.5 + 0.25 x 4 = 1.5 s and 0.5 + 0.25 x 2 = 1 s, 2.5 s together.
    assert found.moves.start.tolist() == [1.0, 1.0]
    assert found.moves.end.tolist() == [2.5, 2.0]
    assert found.finish.tolist() == [4.5, 3.5]  # two batches of 1 s after the longer move
    assert (found.metrics["moves"], found.metrics["move_time"]) == (2, 2.5)
    # 4 + 2 on worker 0, then 5 + 3 and 6 on worker 1.
    assert found.batch_kv.tolist() == [6, 8, 6]
    assert found.pauses.tolist() == [0, 0]


def test_the_last_prompt_token_is_computed_again_where_an_engine_does_so() -> None:
    # The first batch on worker 1 computes the last prompt tokens again, so there are three there. A
    # prefill machine's batch yields no token then; where it does, each request has one too many.
    again = handed(
        pair(),
        batch_offsets=[0, 2, 4, 6, 7],
        request=[0, 1, 0, 1, 0, 1, 0],
        tokens=[4, 2, 1, 1, 1, 1, 1],
        worker=[0, 1, 1, 1],
        moved_offsets=[0, 0, 2, 2, 2],
    )
    found = evaluate(Problem(pair(), pools(Link(0.5, 0.25, recompute_last=True))), again)
    # Moves of 3 and 1 tokens take 0.5 + 0.25 x 3 = 1.25 s and 0.75 s: the later one ends at 2.25.
    assert found.first_token.tolist() == [2.25 + 1, 2.25 + 1]
    # On worker 1 batches begin at 2.25, 3.25 and 4.25; request 1 is in the first two.
    assert found.finish.tolist() == [5.25, 4.25]
    with pytest.raises(ViolationError, match=r"finished|is processed after its last token"):
        evaluate(Problem(pair(), pools()), again)


def test_both_ends_hold_the_kv_of_a_move_until_it_is_over() -> None:
    one = Instance([0, 0], [4, 4], [2, 1], 20, time_unit="second", kv_accounting="cached")
    two = from_batches(  # the second prompt is prefilled while the first moves, then the decode
        [0, 1, 2, 3], [0, 1, 0], [4, 4, 1], instance=one, worker=[0, 0, 1],
        moved_offsets=[0, 0, 1, 1], moved=[0], moved_to=[1],
    )  # fmt: skip
    # Batch 1 holds 4 of its own and, while they leave, the other 4. Batch 2 holds 4 + 1.
    slow, fast = pools(Link(1.25)), pools(Link(0.75))
    assert evaluate(Problem(one, slow), two).batch_kv.tolist() == [4, 8, 5]
    assert evaluate(Problem(one, fast), two).batch_kv.tolist() == [
        4,
        8,
        5,
    ]  # begins before it is over
    later = from_batches(
        [0, 1, 2, 3], [0, 1, 0], [4, 4, 1], instance=one, worker=[0, 0, 1], start=[0, 2, 3],
        moved_offsets=[0, 0, 1, 1], moved=[0], moved_to=[1],
    )  # fmt: skip
    # Now batch 1 begins at 2: the move from 1 to 2.25 is not over then, that from 1 to 1.75 is.
    assert evaluate(Problem(one, slow), later).batch_kv.tolist() == [4, 8, 5]
    assert evaluate(Problem(one, fast), later).batch_kv.tolist() == [4, 4, 5]


def test_an_idle_machine_holds_no_more_than_it_has_room_for() -> None:
    """Two requests of 4 tokens go over machine 1, which has room for 7, to machine 2 at once."""
    both = Instance([0, 0], [4, 4], [2, 2], 20, time_unit="second", kv_accounting="cached")
    columns = {
        "batch_offsets": [0, 2, 4], "request": [0, 1, 0, 1], "tokens": [4, 4, 1, 1],
        "worker": [0, 2], "moved_offsets": [0, 0, 4], "moved": [0, 1, 0, 1],
        "moved_to": [1, 1, 2, 2], "instance": both,
    }  # fmt: skip
    # With room for 8 it takes 1 s of prefill, two moves of 0.5 s, and 1 s of decode: 3 s.
    for room in (7, 8):
        rooms = [("prefill", 20), ("decode", room), ("decode", 20)]
        over = Fleet(
            [Machine(cost_model=ONE, kv_capacity=kv, role=role) for role, kv in rooms], Link(0.5)
        )
        if room == 8:
            assert evaluate(Problem(both, over), from_batches(**columns)).finish.tolist() == [
                3.0,
                3.0,
            ]
        else:
            with pytest.raises(ViolationError, match="8 KV tokens are held while KV comes in"):
                evaluate(Problem(both, over), from_batches(**columns))


def test_rounding_does_not_let_kv_meet_what_a_batch_evicts_at_the_same_time() -> None:
    """Request 1 moves for `latency`. Then a batch evicts request 0, and request 2 moves.

    Machine 1 holds 9. That batch has 5 tokens of request 1 while the 4 of request 2 come, once
    the 2 of request 0 are gone. So this move must not begin before the batch, which waits for
    the end of the other move; that end, (first + 1) + latency, and first + (1 + latency), where
    this move begins, are rounded differently.
    """
    # A Unix time, where floats are 2.4e-7 s apart: sums with each of these latencies are rounded.
    first = 1.7e9
    unix = Instance(
        [first] * 3, [2, 4, 4], [2, 2, 2], 20, time_unit="second", kv_accounting="cached"
    )
    for latency in (0.3, 0.31, 0.32, 0.33, 0.34, 0.35):
        starts = np.array([0, 0, 1 + latency, 3])
        columns = {
            "batch_offsets": [0, 2, 3, 4, 6], "request": [1, 2, 0, 1, 0, 2],
            "tokens": [4, 4, 2, 1, 3, 1], "worker": [0, 1, 1, 1], "start": first + starts,
            "evicted_offsets": [0, 0, 0, 1, 1], "evicted": [0],
            "moved_offsets": [0, 0, 0, 2, 2], "moved": [1, 2], "moved_to": [1, 1],
            "instance": unix,
        }  # fmt: skip
        there = pools(Link(latency), 9, deflect_below=3)
        # The moves begin at 0 + 1 and at 1 + latency + 0.
        moved = from_batches(**columns, moved_start=first + starts[1:3] + [1, 0])
        found = evaluate(Problem(unix, there), moved)
        # 4 + 4; 2 of request 0; 5 of request 1 and the 4 that come of request 2; 3 + 5.
        assert found.batch_kv.tolist() == [8, 2, 9, 8]
        # A millisecond before the batch: 4 of request 1, 2 of request 0 and 4 that come.
        sooner = from_batches(**columns, moved_start=first + 1 + np.array([0, latency - 1e-3]))
        with pytest.raises(ViolationError, match="10 KV tokens are held while KV comes in"):
            evaluate(Problem(unix, there), sooner)


def test_kv_that_comes_in_counts_in_the_batch_that_runs_meanwhile() -> None:
    one = Instance([0, 0], [4, 2], [2, 1], 20, time_unit="second", kv_accounting="cached")
    columns = {
        "batch_offsets": [0, 1, 2, 3], "request": [0, 1, 0], "tokens": [4, 2, 1],
        "worker": [0, 1, 1], "start": [0, 0.5, 2], "moved_offsets": [0, 0, 0, 1], "moved": [0],
        "moved_to": [1], "instance": one,
    }  # fmt: skip
    two = from_batches(**columns)
    # Worker 1 prefills 2 tokens from 0.5 to 1.5. At 1 another 4 begin to come: 2 + 4. Then request
    # 1 is done, and request 0 decodes with 4 + 1. With room for 5 the move waits until 1.5.
    assert evaluate(Problem(one, pools(Link(), deflect_below=3)), two).batch_kv.tolist() == [
        4,
        6,
        5,
    ]
    with pytest.raises(ViolationError, match="6 KV tokens are held while KV comes in; expected at"):
        evaluate(Problem(one, pools(Link(), receiver=5, deflect_below=3)), two)
    after = from_batches(**columns, moved_start=[1.5])
    found = evaluate(Problem(one, pools(Link(), receiver=5, deflect_below=3)), after)
    assert found.batch_kv.tolist() == [4, 2, 5]


@pytest.mark.parametrize(
    ("changes", "link", "message"),
    [
        ({"moved_start": [0.5, 1]}, Link(), "request 0: moves at 0.5; expected 1 or later"),
        ({"moved_to": [0, 1]}, Link(), "moves to worker 0, which holds its KV"),
        ({"moved_to": [2, 1]}, Link(), "request 0: worker 2 does not exist; expected 0 to 1"),
        ({"moved": [2, 1]}, Link(), "request 2: does not exist; expected 0 to 1"),
        ({"moved_offsets": [0, 2, 2, 2]}, Link(), "request 0: moves, but no worker holds its KV"),
        ({"start": [0, 2, 3]}, Link(0.5, 0.25), "at 2, but a batch or a move holds it until 2.5"),
        ({"start": [0, 1, 2], "moved_start": [1.5, 1.5]}, Link(), "the move to its worker that st"),
        ({"worker": [0, 0, 0], "moved": [], "moved_to": [], "moved_offsets": [0] * 4}, Link(),
         "request 0: produces token 2 on worker 0, a prefill machine; expected the first one only"),
        ({"batch_offsets": [0, 2, 3, 4], "request": [0, 1, 1, 0], "tokens": [4, 2, 1, 5],
          "evicted_offsets": [0, 0, 1, 1], "evicted": [0]}, SOME,
         "batch 1, request 0: is evicted at 2, before its move is over at 2.5"),
        ({"worker": [1, 0, 0], "moved_to": [0, 0]}, Link(),
         "request 0: is prefilled on worker 1, a decode machine; expected its KV from a prefill"),
    ],
)  # fmt: skip
def test_each_rule_of_moves_is_named(changes: dict, link: Link, message: str) -> None:
    with pytest.raises(ViolationError, match=message):
        evaluate(Problem(pair(), pools(link)), handed(pair(), **changes))


def test_a_decode_machine_prefills_what_it_has_lost_and_what_is_deflected() -> None:
    lost = handed(
        pair(),
        batch_offsets=[0, 2, 4, 5, 6],
        request=[0, 1, 0, 1, 0, 0],
        tokens=[4, 2, 1, 1, 6, 1],
        worker=[0, 1, 1, 1],
        moved_offsets=[0, 0, 2, 2, 2],
        evicted_offsets=[0, 0, 0, 1, 1],
        evicted=[0],
    )
    with pytest.raises(ViolationError, match="token 3"):
        evaluate(Problem(pair(), pools()), lost)  # 4 prompt tokens and 2 produced make the third
    # The moves end at 2.5 and 2 s. Both decode until 3.5, and request 0, which is refilled, has its
    # third token at 4.5.
    assert evaluate(Problem(pair(), pools()), handed(pair(), **{
        "request": lost.request[:5], "tokens": lost.tokens[:5],
        "evicted_offsets": [0, 0, 0, 1], "evicted": [0],
    })).finish.tolist() == [4.5, 3.5]  # fmt: skip
    # A prompt of 2 is prefilled on worker 1 if the threshold is 3, and not if it is 2.
    alone = from_batches([0, 1, 2], [0, 0], [2, 1], instance=pair().subset([1]), worker=[1, 1])
    with pytest.raises(ViolationError, match="worker 1"):
        evaluate(Problem(pair().subset([1]), pools(deflect_below=2)), alone)
    assert evaluate(Problem(pair().subset([1]), pools(deflect_below=3)), alone).finish.tolist() == [
        2.0  # a prefill and a decode of 1 s
    ]


def test_moves_need_pools_and_whole_columns() -> None:
    """Moves without a link are refused, and columns of `handed` that do not fit together."""
    mixed = (Machine(cost_model=ONE, kv_capacity=20), Machine(cost_model=ONE, kv_capacity=20))
    with pytest.raises(
        InputError, match=r"found moves of KV on a fleet without a link; expected one with it"
    ):
        evaluate(Problem(pair(), mixed), handed(pair()))
    for changes, message in (
        ({"moved": None}, "moved: found nothing; expected the columns moved_offsets, moved, moved"),
        ({"moved_to": [1]}, "moved_to: found 1 values; expected 2"),
        ({"moved_start": [1.0]}, "moved_start: found 1 values; expected 2"),
        ({"moved_offsets": [0, 0, 1, 1]}, "moved_offsets: found .* expected offsets that rise"),
        ({"moved_offsets": [0, 2]}, "moved_offsets: found 2 values; expected 4"),
    ):
        with pytest.raises(InputError, match=message):
            handed(pair(), **changes)


@pytest.mark.parametrize("columns", ["json", "parquet"])
def test_moves_are_read_as_they_were_written(tmp_path: Path, columns) -> None:
    schedule = handed(pair(), moved_start=[1.0, 1.25])
    write_schedule(schedule, tmp_path / "moves.json", columns=columns)
    again = read_schedule(tmp_path / "moves.json", pair())
    for name in ("moved_offsets", "moved", "moved_to", "moved_start"):
        assert getattr(again, name).tolist() == getattr(schedule, name).tolist()
    assert "moved" not in from_batches([0, 1], [0], [4], instance=pair()).to_dict()


def _agree(seed: int, changes: int) -> tuple[int, int]:
    """Hold both judges against each other; return whether one is good, and how many refused."""
    rng = Random(seed)
    instance, there, schedule = random_moves(rng)
    if not schedule.batches:
        return 0, 0
    refused, good = 0, 0
    cases = [schedule, *(corrupted_moves(rng, instance, there, schedule) for _ in range(changes))]
    for k, case in enumerate(cases):
        slow = slow_judge(instance, case, layers=1, coefficients=CONSTANT, pools=there)
        if slow.broken:
            with pytest.raises(ViolationError) as error:
                evaluate(Problem(instance, there), case)
            assert error.value.rule in slow.broken, (seed, k)
            refused += k > 0
            continue
        fast = evaluate(Problem(instance, there), case)
        good += k == 0
        for exact, found in ((slow.finish, fast.finish), (slow.first_token, fast.first_token)):
            np.testing.assert_allclose(found, [float(t) for t in exact], atol=1e-9)
        assert [slow.kv[j] for j in sorted(slow.kv)] == fast.batch_kv.tolist(), (seed, k)
    return good, refused


def test_both_judges_agree_on_moves() -> None:
    found = np.array([_agree(seed, 2) for seed in range(120)])
    # Of 120 schedules most are good, and of two changes to each nearly one is refused, so that the
    # judges agree on both.
    assert found[:, 0].sum() > 0.8 * len(found)
    assert found[:, 1].sum() > 0.8 * len(found)


@pytest.mark.slow
def test_both_judges_refuse_ten_thousand_corrupted_schedules() -> None:
    refused, seed = 0, 1000
    while refused < 10_000:
        refused += _agree(seed, 10)[1]
        seed += 1


def test_pools_and_links_are_read_from_texts() -> None:
    assert roles_of("2p1d") == ["prefill", "prefill", "decode"]
    made = Fleet.of("2p6d", MODEL, link="latency=50us,bandwidth=50GB/s")
    assert (made.having("prefill"), len(made.having("decode", "mixed"))) == ([0, 1], 6)
    # 32 layers x 2 x 4096 x 2 bytes are 524,288 bytes for a token of Llama-2-7B.
    assert made.link == Link(50e-6, 524_288 / 50e9) == kv_link("llama2-7b", 50.0, 50e-6)
    assert parse_link("latency=1ms,token=2us,recompute_last=true") == Link(0.001, 2e-6, True)
    assert made.on(pair()).machines[0].limits == pair().limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bandwidth=50", "bandwidth: found '50'; expected a number with one of KB/s, MB/s"),
        ("latency=soon", "latency: found 'soon'; expected a number with one of s, ms, us"),
        ("token=1us,bandwidth=1GB/s", "token: found beside bandwidth; expected one of both"),
        ("latency=1e999999999s,token=1us", "latency: found '1e999999999s'; expected a number"),
        ("speed=1", "parameter 'speed' is unknown; known are latency, token, bandwidth"),
        ("bandwidth=0GB/s,model=llama2-7b", "found 0.0; expected a number > 0"),
        ("bandwidth=1GB/s", "model: found nothing; expected a model, whose KV moves"),
    ],
)
def test_a_wrong_link_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_link(text, "my-own")


def test_wrong_pools_are_refused() -> None:
    for text in ("2", "p", "0m", "2x", "3p1"):
        with pytest.raises(InputError, match="pools"):
            roles_of(text)
    with pytest.raises(UsageError, match="found only prefill machines; expected both kinds"):
        Fleet.of("2p", MODEL)
    # Moves take whole rounds, so that half a round is refused.
    rounds = optsched.Instance([0], [2], [2], 10)
    with pytest.raises(UsageError, match=r"latency_s.*0.5"):
        evaluate(
            Problem(rounds, Fleet.of("1p1d", link=Link(0.5))),
            from_batches([0, 1], [0], [2], instance=rounds),
        )
    with pytest.raises(InputError, match=r"seconds_per_token.*-1.*0"):
        Link(0.0, -1)


def busy() -> Instance:
    """Return 40 random requests, 60 a second, with little KV."""
    return generate("lognormal", seed=3, n=40, kv_capacity=1500, rate=60.0, time_unit="second")


POLICIES = ("vllm", "vllm-v1", "trail", "mc-sf", "sarathi", "gsa")
MOVING = "latency=5ms,token=20us"  # every move takes 5 ms or more


@pytest.mark.parametrize("spec", ["gsa", "gba", "sorted-f"])
def test_policies_in_python_compute_the_last_prompt_token_again(spec: str) -> None:
    again = pools(Link(0.5, 0.25, recompute_last=True))
    schedule = optsched.run(optsched.Problem(pair(), again), spec).schedule
    assert evaluate(Problem(pair(), again), schedule).metrics["moves"] == 2


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("link", [MOVING, f"{MOVING},recompute_last=true"])
def test_every_policy_runs_on_a_prefill_and_a_decode_pool(spec: str, link: str) -> None:
    """Most requests move. Where the last prompt token is computed again, first tokens come later.

    They are then those of the decode machine, behind a move of 5 ms or more; `long` are the
    requests of which this is true.
    """
    instance = busy()
    if spec == "gsa" and "recompute" in link:
        pytest.skip("an object that never goes on with a prefill does not compute the last token")
    for text, reserve in (("1p1d", ""), ("2p1d1m", ""), ("1p2d", ":workers=3,reserve=true")):
        there = Fleet.of(text, MODEL, link=link)
        schedule = optsched.run(optsched.Problem(instance, there), f"{spec}{reserve}").schedule
        found = evaluate(Problem(instance, there), schedule)  # every rule of moves and roles
        long = instance.prompt_tokens > 1 if "recompute" in link else instance.output_tokens > 0
        last = (found.first_token - instance.arrival)[long & (instance.output_tokens > 1)]
        assert found.metrics["moves"] > 0.5 * instance.n
        assert (last > (0.005 if "recompute" in link else 0)).sum() > 0.5 * len(last)


@pytest.mark.parametrize("spec", ["paced", "slai"])
def test_those_who_keep_a_pace_receive_kv_in_a_batch_of_nobody(spec: str) -> None:
    """With limits on TPOT: every request moves, though nobody else is on the decode machine."""
    one = replace(pair(), slo_ttft=[0.5, 9.0], slo_tpot=[2.0, 2.0])
    for instance in (one, one.subset(np.array([0]))):
        for link in (Link(), SOME, Link(0.5, 0.25, recompute_last=True)):
            there = pools(link)
            schedule = simulate(optsched.Problem(instance, there), spec, budget=Budget(60))
            assert evaluate(Problem(instance, there), schedule).metrics["moves"] == instance.n


def test_a_loop_that_has_lost_a_request_says_so() -> None:
    # Both requests have arrived by the loop's count, but nobody is in a line or in a batch. One
    # worker is to go on until 5, the other to the end of all.
    from optsched.judge.replay import limits_of
    from optsched.policies.engine import common

    requests, state = common.new_requests(pair(), common.FIELDS), common.new_state((), pair())
    state["arrived"] = 2
    limits, lines = limits_of(pair(), "recompute"), np.zeros((3, 3), np.int64)
    told = (np.zeros(0), np.arange(2)), (common.one_batch_columns(2), lines[0], lines)
    by_5, at_last = (common.Worker(limits, *told[0], until, *told[1]) for until in (5.0, np.inf))
    assert not common.let_time_pass(requests, state[0], by_5, -1)
    assert state[0].outcome == common.DONE  # another request may come by then
    assert not common.let_time_pass(requests, state[0], at_last, -1)
    assert (state[0].outcome, state[0].about) == (common.LOST, -1)


@pytest.mark.parametrize("spec", ["patient", "patient-work"])
@pytest.mark.parametrize("again", [False, True])
def test_patient_policies_do_not_take_kv_that_comes_for_prefills(spec: str, again: bool) -> None:
    """A decode machine of two seats for three requests: the judge accepts, and each moves once."""
    instance = Instance(
        [0, 0, 0], [1, 1, 6], [4, 3, 3], 34, time_unit="second", kv_accounting="cached"
    )
    limits = Limits(max_running=2)
    machines = (
        Machine(cost_model=TIMED, kv_capacity=17, role="prefill"),
        Machine(cost_model=TIMED, kv_capacity=34, limits=limits, role="decode"),
    )
    there = Fleet(machines, Link(0.01, 0.05, again))
    schedule = optsched.run(optsched.Problem(instance, there), spec).schedule
    assert evaluate(Problem(instance, there), schedule).metrics["moves"] == 3


def test_on_mixed_machines_everything_is_as_without_pools() -> None:
    """One mixed machine is as no pools at all, two are as two workers behind a router."""
    instance = busy()
    alone = optsched.run(optsched.Problem(instance, MODEL), "vllm").schedule
    one = Fleet.of("1m", MODEL, link=MOVING)
    same = optsched.run(optsched.Problem(instance, one), "vllm").schedule
    assert same.moved is None
    plain = evaluate(Problem(instance, MODEL), alone).metrics
    assert {**plain, "moves": 0, "move_time": 0.0} == evaluate(Problem(instance, one), same).metrics
    two = Fleet.of("2m", MODEL, link=MOVING)
    behind = optsched.run(optsched.Problem(instance, MODEL), "vllm:workers=2").schedule
    found = optsched.run(Problem(instance, two), "vllm").evaluation
    assert found.finish.tolist() == evaluate(Problem(instance, MODEL), behind).finish.tolist()


def test_a_request_alone_takes_its_prefill_its_move_and_its_decodes() -> None:
    # 1 s of prefill, 0.5 + 4 x 0.25 s of move, and two decodes of 1 s.
    one = pair().subset([0])
    schedule = optsched.run(optsched.Problem(one, pools()), "vllm").schedule
    assert evaluate(Problem(one, pools()), schedule).finish.tolist() == [1 + 1.5 + 2]
    again = pools(Link(0.5, 0.25, recompute_last=True))  # 3 tokens, and a third batch
    found = optsched.run(Problem(one, again), "vllm").evaluation
    assert (found.first_token.tolist(), found.finish.tolist()) == ([1 + 1.25 + 1], [5.25])


def test_kv_waits_on_the_prefill_machine_until_there_is_room() -> None:
    # The decode machine has room for one: 4 + 2 tokens. The other's KV keeps the prefill machine
    # full, so the third prompt waits until the first has ended there, and the second has moved.
    three = Instance([0, 0, 0], [4, 4, 4], [3, 3, 3], 8, time_unit="second", kv_accounting="cached")
    there = Fleet(
        [
            Machine(cost_model=ONE, kv_capacity=8, role="prefill"),
            Machine(cost_model=ONE, kv_capacity=6, role="decode"),
        ],
        Link(1.0),
    )
    found = optsched.run(Problem(three, there), "vllm").evaluation
    # Prefills until 1; moves 1 to 2, decodes until 4; moves 4 to 5, decodes until 7.
    # The first KV has left at 2: the third prompt is prefilled from 2 to 3, and moves 7 to 8.
    assert found.first_token.tolist() == [1, 1, 3]
    assert found.finish.tolist() == [4, 7, 10]
    early = optsched.run(optsched.Problem(three, there), "vllm:workers=2,reserve=true").schedule
    # Only one has room at a time: prefilled when the one before has ended.
    # After the end at 4 the second is prefilled until 5, moves until 6, and decodes until 8.
    assert evaluate(Problem(three, there), early).first_token.tolist() == [1, 5, 9]


def test_short_prompts_are_deflected_below_a_threshold() -> None:
    there = pools(deflect_below=3)
    found = optsched.run(optsched.Problem(pair(), there), "vllm").schedule
    assert found.moved is not None
    assert found.moved.tolist() == [0]  # the prompt of 4; that of 2 is prefilled where it decodes
    # 1 s of prefill and 1 s of decode, and no move.
    assert evaluate(Problem(pair(), there), found).finish.tolist()[1] == 2.0


def test_sessions_go_on_from_the_decode_pool() -> None:
    two = Instance(
        [0, None], [4, 4], [2, 2], 20, time_unit="second", after=[[], [0]], delay=[0, 0.5]
    )
    there = pools(Link(0.5))
    found = optsched.run(Problem(two, there), "vllm").evaluation
    # 1 + 0.5 + 1 = 2.5, and the same again from 3 on.
    assert found.finish.tolist() == [2.5, 5.5]
    # Without a link and a delay no batch waits for longer than it must.
    free = pools(Link())
    at_once = replace(two, delay=[0, 0])
    found = optsched.run(Problem(at_once, free), "vllm").evaluation
    assert found.finish.tolist() == [2, 4]


def test_what_does_not_know_pools_refuses_them() -> None:
    there = Fleet.of("1p1d", MODEL)
    with pytest.raises(PolicyError, match="found a scheduler that runs whole windows"):
        optsched.run(optsched.Problem(busy(), there), "isrtf")
    with pytest.raises(UsageError, match="found 3 workers; expected 2, the machines"):
        optsched.run(optsched.Problem(busy(), there), "vllm:workers=3")
    with pytest.raises(InputError, match="'nearest'"):
        optsched.run(optsched.Problem(busy(), there), "vllm:workers=2,decode_router=nearest")
    schedule = optsched.run(optsched.Problem(busy(), there), "vllm").schedule
    with pytest.raises(InputError, match="kv_by_group"):
        optsched.timeline(optsched.Problem(busy(), there), schedule).kv_by_group()

    # `why` explains no moves, neither of a schedule nor of another beside it, and no roles.
    alone = optsched.run(optsched.Problem(busy(), MODEL), "vllm").schedule
    for one, against in ((schedule, None), (alone, schedule)):
        with pytest.raises(UsageError, match="why:"):
            why(Problem(busy(), MODEL), one, against=against)
    with pytest.raises(UsageError, match="why:"):
        why(Problem(busy(), there), alone)
    with pytest.raises(UsageError, match="diagnose:"):
        diagnose(Problem(busy(), there))


def test_a_report_and_a_plot_take_the_pools_from_the_files_that_name_schedules(
    tmp_path: Path,
) -> None:
    optsched.write_instance(busy(), tmp_path / "busy.json")
    files, about = tmp_path / "busy.json", ("--cost-model", MODEL)
    pools = ("--pools", "1p1d", "--link", "latency=1ms,token=2us")
    schedule, result, page = (str(tmp_path / name) for name in ("s.json", "r.json", "r.html"))
    asked = ("--policy", "fcfs", "--schedule-out", schedule, "--json", result)
    run("simulate", str(files), *about, *pools, *asked)
    compared = ("--no-bound", "--policy", "fcfs", "--schedules-out", str(tmp_path / "all"))
    run("compare", str(files), *about, *pools, *compared, "--json", str(tmp_path / "c.json"))

    run("report", str(files), result, str(tmp_path / "c.json"), "--out", page)
    replayed = f"replayed by the judge: tel {json.loads(Path(result).read_text())['objective']}"
    assert replayed in Path(page).read_text()  # with another link it would be another
    run("plot", result, "--instance", str(files), "--kind", "latency", "-o", f"{page}.png")

    alone = invoke("report", files, schedule, *about, "--out", page)
    assert "or the result" in one_line_error(alone)
    broken = {**json.loads(Path(result).read_text()), "pools": {"roles": ["prefill"]}}
    Path(result).write_text(json.dumps(broken))
    assert "expected roles, link" in one_line_error(invoke("report", files, result, "-o", page))


def test_compare_and_simulate_take_pools_on_the_command_line(tmp_path: Path) -> None:
    """Each command on one prefill and two decode machines: what it says, draws or refuses."""
    file, out = tmp_path / "busy.json", tmp_path / "out.json"
    optsched.write_instance(busy(), file)
    common = ("--cost-model", MODEL, "--pools", "1p2d", "--link", "latency=50us,bandwidth=50GB/s")
    # compare: bounds are of pools, and what knows none is left out or told.
    done = run("compare", str(file), "--policy", "vllm", "--policy", "isrtf", *common)
    assert "searches are left out, since they know one machine" in done
    assert "the bound holds for any schedule on pools of 1 prefill, 2 decode" in done
    assert "\nbound" in done  # a row beside those of policies
    assert "isrtf: no schedule: pools: found a scheduler that runs whole windows" in done
    # simulate and plot: the file has roles and link, and pictures name machines.
    more = ("--schedule-out", str(out), "--json", str(tmp_path / "result.json"))
    run("simulate", str(file), "--policy", "vllm", *common, *more)
    said = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["pools"]
    assert said["roles"] == ["prefill", "decode", "decode"]
    assert said["link"]["latency_s"] == 50e-6
    for kind in ("gantt", "kv", "ttft"):
        picture = tmp_path / f"{kind}.svg"
        drawn = ("--instance", str(file), *common, "--kind", kind, "-o", str(picture))
        run("plot", str(out), *drawn)
        words = {"gantt": "KV moves", "kv": "worker 1: decode", "ttft": "vllm"}[kind]
        assert words in picture.read_text(encoding="utf-8") or kind == "ttft"

    run("plot", str(out), "--instance", str(file), *common, "-o", str(tmp_path / "trace.json"))
    assert "worker 0: prefill" in (tmp_path / "trace.json").read_text(encoding="utf-8")
    # capacity: a policy's rate, but no fewest machines and no search on pools.
    slo = ("--slo-ttft", "0.05", "--policy", "vllm", "--attainment", "0.5")
    reached = run("capacity", str(file), *slo, *common)
    assert "attainment 0.5: vllm attains it" in reached
    auto = invoke("capacity", file, *slo, *common, "--workers", "auto")
    assert "fewest: found 3 machines; expected one" in one_line_error(auto)
    search = invoke("capacity", file, *slo, *common, "--search", "1")
    assert "search: found machines with roles, or that differ; expected equal" in one_line_error(
        search
    )
    shown = run("evaluate", str(file), str(out), *common)
    assert "moves" in shown
    alone = ("simulate", file, "--policy", "vllm", "--cost-model", MODEL, "--link", "x=1")
    assert "found without --pools, --workers or --fleet" in one_line_error(invoke(*alone))


@pytest.mark.parametrize("spec", ["fcfs", "vllm", "vllm-v1", "trail", "gsa", "mc-sf"])
def test_waiting_kv_and_moves_that_just_end_are_counted_as_the_judge_counts_them(spec: str) -> None:
    """KV waits on a machine of one seat, and the next prefill begins when its move ends.

    Since the first arrival is not 0, that end is computed twice with different rounding. `run` has
    every schedule judged.
    """
    for first in (0.53, 1.38, 2.09, 3.02):
        two = Instance(
            [first, first + 0.1, first + 0.1], [6, 5, 4], [4, 3, 2], 40, time_unit="second",
            limits=Limits(max_running=1),
        )  # fmt: skip
        machines = [
            Machine(cost_model=ONE, kv_capacity=40, limits=two.limits, role=role)
            for role in ("prefill", "decode")
        ]
        there = Fleet(machines, Link(0.5, 0.25))
        found = optsched.run(Problem(two, there), spec).evaluation
        assert found.metrics["moves"] == 3


def test_kv_comes_only_when_what_is_evicted_for_it_is_gone() -> None:
    # All are prefilled by 0.41. The KV of request 0 comes by 0.41 + 0.5 + 8 x 0.25 = 2.91, that of
    # request 1 by 1.91, and the decode machine has room for 15: 8 + 4, but not another 4. Request 1
    # decodes three times until 1.91 + 3 x 0.26 = 2.69 and holds 7 then; an eighth does not fit. At
    # 2.69 it is evicted, and only KV that is on its way stays: no batch begins then, and until the
    # next one at 2.91 there is no room for request 2.
    quick = each_batch(0.26)
    three = Instance(
        [0, 0, 0], [8, 4, 4], [3, 6, 5], 17, time_unit="second", kv_accounting="cached"
    )
    machines = (
        Machine(cost_model=each_batch(0.41), kv_capacity=17, role="prefill"),
        Machine(cost_model=quick, kv_capacity=15, role="decode"),
    )
    there = Fleet(machines, Link(0.5, 0.25))
    found = optsched.run(Problem(three, there), "fcfs").evaluation
    assert found.metrics["evictions"] > 0


CHOSEN = ("--workers", 2, "--pools", "auto")


def test_auto_takes_the_best_split_and_says_what_the_others_have(tmp_path: Path) -> None:
    """Each split is compared by itself first; `auto` takes the one with the least mean latency."""
    file = tmp_path / "busy.json"
    optsched.write_instance(busy(), file)
    asked = ("compare", file, "--policy", "vllm", "--cost-model", MODEL, "--no-bound")
    link = ("--link", "latency=5ms,token=20us")
    found = {}
    for text in ("1p2d", "2p1d", "3m"):
        found[text] = answer(*asked, "--pools", text, *link)["policies"][0]["metrics"]

    best = min(found, key=lambda text: found[text]["mean_latency"])
    done = invoke(*asked, "--workers", 3, "--pools", "auto", *link, "--json", "-")
    assert done.stderr.count("\n") == 1
    assert f"pools: {best} is taken, with a mean latency of" in done.stderr
    others = done.stderr.split("others have: ")[1]
    assert all((text in others) == (text != best) for text in found)
    row = json.loads(done.stdout)["policies"][0]
    assert row["metrics"]["mean_latency"] == found[best]["mean_latency"]
    for spec in ("vllm", "vllm:workers=3,decode_router=round-robin"):
        assert best_split(Problem(busy(), Fleet.of(3, MODEL, link=MOVING)), [spec])[0] in found

    assert best_split(Problem(busy(), Fleet.of(3, MODEL, link=MOVING)), ["vllm"])[0] == best


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (("--pools", "auto"), 2, "--pools auto: found no --workers; expected both"),
        (("--workers", 65, "--pools", "auto"), 2, "workers: found 65; expected an integer from 2"),
        ((*CHOSEN, "--time-limit", 0), 4, "pools: found no split with a schedule (no time)"),
    ],
)
def test_auto_needs_a_number_of_machines_and_time(
    tmp_path: Path, more: tuple, status: int, message: str
) -> None:
    optsched.write_instance(busy(), tmp_path / "busy.json")
    asked = ("compare", tmp_path / "busy.json", "--policy", "vllm", "--cost-model", MODEL)
    assert message in one_line_error(invoke(*asked, *more), status)


def each_kind() -> dict[str, Instance]:
    """Tiny instances with each feature, by the name of what refuses KV that moves, if anything."""
    plain = {"time_unit": "second", "kv_capacity": 400}
    sizes = [40, 64, 64], [4, 5, 3]
    seconds = Instance([0.0, 0.1, 0.2], *sizes, **plain)
    after = {"after": [[], [0], [1]], "delay": [0, 0.1, 0.2]}
    family = {"prefix_parent": [-1, 0, 0], "prefix_tokens": [0, 32, 32], "prefix_block_tokens": 16}
    return {
        "rounds": Instance([0, 1, 2], *sizes, kv_capacity=400),
        "sessions": Instance([0.0, None, None], *sizes, **plain, **after),
        "shared prefixes": replace(seconds, **family),
        "predicted": replace(seconds, predicted=[3, 5, 9]),
        "intervals": replace(seconds, predicted_lower=[2, 2, 2], predicted_upper=[8, 8, 8]),
        "slos": replace(seconds, slo_ttft=[1.0] * 3, slo_tpot=[0.1] * 3),
        "blocks": replace(seconds, kv_block_tokens=16),
    }


def meetings() -> list[Any]:
    """Return pools with kinds of instances; without a link most are of the whole."""
    mixed = [("2m", kind) for kind in each_kind()]
    quick = [("2m", "rounds"), ("2m", "shared prefixes")]
    whole = [pytest.param(*one, marks=pytest.mark.whole) for one in mixed if one not in quick]
    return [*(("1p1d", kind) for kind in each_kind()), *quick, *whole]


@pytest.mark.parametrize(("text", "kind"), meetings())
def test_whatever_meets_pools_works_or_is_refused_by_name(
    tmp_path: Path, kind: str, text: str
) -> None:
    """Each kind of instance on a prefill and a decode machine (1p1d) and on two mixed ones (2m)."""
    instance, file, out = each_kind()[kind], tmp_path / "some.json", tmp_path / "out.json"
    optsched.write_instance(instance, file)
    model = () if instance.in_rounds else ("--cost-model", MODEL)
    link = "latency=1" if instance.in_rounds else "latency=1ms,token=2us"
    given = (*model, "--pools", text, "--link", link)
    asked = ("simulate", file, *given, "--policy", "vllm-v1", "--schedule-out", out)
    # Shared prefixes on roles are refused by every command.
    if kind == "shared prefixes" and text == "1p1d":
        for words in (asked, ("compare", file, *given, "--policy", "fcfs")):
            assert "found an instance with shared prefixes" in one_line_error(invoke(*words))
        assert "proved for prefix_block_tokens" in one_line_error(invoke("bound", file, *given))
        return

    # All others are simulated, judged and drawn, but not explained or compared with another.
    run(*asked)
    drawn = ("plot", out, "--instance", file, *given, "-o", tmp_path / "some.svg")
    for words in (
        ("evaluate", file, out, *given),
        ("verify", file, out, *given),
        ("plot", out, "--instance", file, *given, "-o", tmp_path / "trace.json"),
        (*drawn, "--kind", "states"),
        (*drawn, "--kind", "kv"),
    ):
        run(*words)
    gap = invoke(*drawn, "--kind", "gap", "--against", out)
    assert "--pools: found with --kind gap; expected none" in one_line_error(gap)
    if text == "1p1d":
        error = one_line_error(invoke("evaluate", file, out, *model))
        assert "found moves of KV on a fleet without a link; expected one with it" in error
        assert "why: found KV that moves" in one_line_error(invoke("why", file, out, *model))

    # Bounds are proved but for rounds and shared prefixes.
    compared = ("--policy", "fcfs", "--time-limit", 1)
    done = run("compare", file, *given, *compared)
    unproved = {"rounds": "pools", "shared prefixes": "prefix_block_tokens"}
    assert ("bound: none known" in done) == (kind in unproved)
    assert f"is proved for {unproved.get(kind, '')}" in done or kind not in unproved
    if kind in unproved:
        refused = one_line_error(invoke("bound", file, *given))
        assert f"is proved for {unproved[kind]}" in refused
    if kind != "rounds":
        load = ("capacity", file, *given, "--policy", "fcfs", "--slo-ttft", 5, "--time-limit", 1)
        loaded = invoke(*load)
        assert loaded.exit_code == 0 or "error: " in one_line_error(loaded, loaded.exit_code)
        both = one_line_error(invoke(*load, "--workers", 2))
        assert "--workers, --pools, --link: found together" in both


def test_machines_that_differ_and_a_link_are_read_from_a_file(tmp_path: Path) -> None:
    """What the file does not say of a machine is the command's cost model and the instance's KV."""
    file, table = tmp_path / "busy.json", tmp_path / "pools.toml"
    optsched.write_instance(busy(), file)
    fast = "roofline:llama2-7b,device=h100,tp=2"
    table.write_text(
        f'[machines.1p]\ncost_model = "{fast}"\nkv_capacity = 3000\nmax_running = 8\n'
        '[machines.2d]\n[link]\nlatency = "5ms"\ntoken = "20us"\nrecompute_last = true\n',
        encoding="utf-8",
    )
    made = Fleet.of(str(table), MODEL).on(busy())
    assert [one.role for one in made.machines] == ["prefill", "decode", "decode"]
    # One machine of the file's 3,000 tokens, two of the 1,500 of `busy`.
    assert [one.kv_capacity for one in made.machines] == [3000, 1500, 1500]
    assert [one.limits.max_running for one in made.machines] == [8, None, None]
    assert made.link == Link(0.005, 20e-6, recompute_last=True)
    assert len({one.cost.sha256 for one in made.machines}) == 2
    given = ("--cost-model", MODEL, "--pools", table)
    out = tmp_path / "out.json"
    run("simulate", file, *given, "--policy", "vllm", "--schedule-out", out)
    assert "valid schedule" in run("verify", file, out, *given)
    done = run("compare", file, *given, "--policy", "vllm", "--time-limit", 2)
    assert "the bound holds for any schedule on pools of 1 prefill, 2 decode" in done

    # What is refused, in one line each. 6,000 and 4,001 machines are more than the 10,000 allowed.
    for text, message in (
        ("[machines]", "found machines, link; expected tables link, machines.2p"),
        ("machines = 3", "found machines, link; expected tables link, machines.2p"),
        ("[other]", "found machines, link, other; expected tables link, machines.2p"),
        ("[machines.2x]", "pools '2x': expected such as 2p6d, 4m, 2p2d4m or a .toml file"),
        (
            "[machines.6000m]\n[machines.4001d]",
            "'4001d': found 4001 machines and 6000 others; expec",
        ),
        ("[machines.2m]\nspeed = 2", "machines: 2m: parameter 'speed' is unknown; known are cost_"),
        ("[machines.2m]\nkv_capacity = 'x'", "parameter kv_capacity: found 'x'; expected an int"),
        ("[machines.2m]\n[link]\nspeed = 2", "parameter 'speed' is unknown; known are latency"),
        ("[machines", "not a readable TOML file"),
    ):
        table.write_text(text, encoding="utf-8")
        assert message in one_line_error(invoke("bound", file, *given)), text


def test_a_comparison_on_pools_is_drawn_without_naming_them(tmp_path: Path) -> None:
    file, out = tmp_path / "compared.json", tmp_path / "some.svg"
    pools = ("--pools", "1p1d")
    run(
        "compare", "tiny-seconds", "--cost-model", MODEL, *pools, "--policy", "fcfs",
        "--no-bound", "--json", file,
    )  # fmt: skip
    run("plot", file, "-o", out)
    assert out.is_file()
    refused = one_line_error(invoke("plot", file, *pools, "-o", out))
    assert "--pools: found with --kind policies; expected none" in refused
