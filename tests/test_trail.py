"""TRAIL: preemption by hand, compiled against readable, and its predictor."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
from optsched_studies.queueing import exponential, mean_response_time, perfect
from readable_trail import ReadableTrail
from slow_judge import TIMED, random_instance
from test_simulate import cost_of, evicted_of, random_predictions, rows_of, run_or_error, same

from optsched import Problem, run
from optsched.analysis.compare import compare
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies import is_clairvoyant, make_policy
from optsched.policies.base import Batch, View
from optsched.policies.engine.simulate import simulate
from optsched.policies.trail import Trail
from optsched.problem.errors import InputError, LoopError, OptschedError
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import Schedule

MODULE = importlib.import_module("optsched.policies.engine.online")
LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""
STEP = BatchCost("step", 1, {"base": "1000"})
"""Every batch takes a second."""


class Open:
    """A policy that is asked before every batch."""

    evict_mode = "recompute"

    def __init__(self, policy: Trail) -> None:
        self.policy = policy

    def batch(self, view: View) -> Batch:
        return self.policy.batch(view)


# --- the compiled loop and its twin -------------------------------------------------------------

# TRAIL with all of its switches, the least C first.
SPECS = [
    f"trail:c={c},refine={refine},keep={keep}"
    for c in (0, 0.4, 1)
    for refine in ("true", "false")
    for keep in ("true", "false")
]


@pytest.mark.parametrize("spec", [*SPECS, "srpt"])
def test_the_compiled_loop_decides_as_the_readable_policy(spec: str, monkeypatch) -> None:
    monkeypatch.setattr(MODULE, "MAX_BATCHES_WITHOUT", 300)  # loops end soon
    policy = make_policy(spec)[0]
    rng = Random(spec)
    finished = evicting = pausing = 0
    for number in range(60):
        instance = random_predictions(rng, random_instance(rng, most=8))
        # The shipped 512 tokens would never bind here.
        policy.max_batch_tokens = rng.choice([None, rng.randint(1, 12)])
        policy.max_running = rng.choice([None, 1, 2, 3])
        fast = run_or_error(instance, policy, seed=number)
        slow = run_or_error(instance, ReadableTrail(policy), seed=number)
        if isinstance(fast, OptschedError) or isinstance(slow, OptschedError):
            assert type(fast) is type(slow) is LoopError, (fast, slow, instance.to_dict())
            continue
        assert same(fast, slow), (vars(policy), instance.to_dict(), rows_of(fast), rows_of(slow))
        # Asked as an object before every batch it does the same.
        if number % 4 == 0:
            assert same(
                fast, simulate(Problem(instance, cost_of(instance)), Open(policy), seed=number)
            )
        judged = evaluate(Problem(instance, cost_of(instance)), fast)
        finished += 1
        evicting += len(fast.evicted) > 0
        pausing += bool(judged.pauses.sum() > 0)
    assert finished >= 45  # of 60; the others end in a loop
    assert evicting >= 5  # both kinds of preemption are among them
    if "c=1" in spec and "keep=true" in spec:
        assert pausing >= 5


def test_only_what_can_never_run_is_reported_as_a_loop() -> None:
    """A hundred random runs with small batches and few seats end without a LoopError; the run that
    raises one could never have gone on."""
    rng = Random(3)
    for _ in range(100):
        instance = random_instance(rng, unit="second", most=8, limits=Limits())
        policy = Trail(max_batch_tokens=rng.randint(1, 9), max_running=rng.randint(1, 3))
        run(Problem(instance, TIMED), policy)
    # Refilling 3 + 3 tokens in one piece, where the machine takes 4, is impossible.
    fixed = {"limits": Limits(4), "chunked_prefill": False, "time_unit": "second"}
    instance = Instance([0, 2.5], [3, 1], [9, 1], kv_capacity=12, **fixed)
    with pytest.raises(LoopError, match=r"request 0.*6.*tokens.*max_batch"):
        simulate(Problem(instance, STEP), Trail(c=1, max_running=1))


# --- nothing is known ahead -----------------------------------------------------------------------


def batch_of_token(instance: Instance, schedule: Schedule, i: int, count: int) -> int:
    """Return the batch in which request ``i`` has first produced ``count`` tokens."""
    cached = produced = 0
    gone = evicted_of(schedule)
    for j, row in enumerate(rows_of(schedule)):
        if i in gone.get(j, []):
            cached = 0
            produced = 0 if schedule.evict_mode == "restart" else produced
        cached += row.get(i, 0)
        if i in row and cached == instance.prompt_tokens[i] + produced:
            produced += 1
            if produced == count:
                return j
    raise AssertionError("it never did")


@pytest.mark.parametrize("spec", SPECS[4:])
def test_later_entries_and_the_truth_change_no_decision_before_their_tokens(spec: str) -> None:
    """Two instances differ from where request i has `count` tokens on: in its true length, and
    in what the forecast then says of it. Batches are the same up to the one that makes this
    token."""
    rng = Random(spec)
    compared = 0
    for _ in range(80):
        instance = random_instance(rng, most=8)
        every, longest = rng.randint(1, 3), int(instance.output_tokens.max()) + 6
        entries = -(-longest // every)
        left = np.array([rng.uniform(0, 9) for _ in range(entries * instance.n)])
        offsets = np.arange(instance.n + 1) * entries
        i = rng.randrange(instance.n)
        most = instance.kv_capacity - instance.prompt_tokens[i] + 1 - instance.kv_offset
        count = rng.randint(1, int(instance.output_tokens[i]))
        outputs = instance.output_tokens.copy()
        outputs[i] = rng.randint(count, int(min(most, longest)))
        other = left.copy()  # what is said once `count` tokens are there
        other[i * entries + -(-count // every) : (i + 1) * entries] = rng.uniform(0, 9)
        one = replace(instance, forecast=Forecast(every, offsets, left))
        two = replace(instance, output_tokens=outputs, forecast=Forecast(every, offsets, other))
        found = [run_or_error(case, f"{spec},max_running=2") for case in (one, two)]
        if any(isinstance(schedule, OptschedError) for schedule in found):
            continue
        last = 1 + batch_of_token(one, found[0], i, count)
        story = (spec, i, count, one.to_dict(), two.to_dict())
        assert rows_of(found[0])[:last] == rows_of(found[1])[:last], story
        gone = [{j: e for j, e in evicted_of(s).items() if j < last} for s in found]
        assert gone[0] == gone[1], story
        compared += 1
    assert compared > 50  # of 80; the others end in an error


# --- against what is known of one machine ---------------------------------------------------------


def least_completions(arrival: list[int], output: list[int]) -> int:
    """Return the least sum of completion times of one preemptive machine, by trying everything."""

    @cache
    def rest(now: int, left: tuple[int, ...]) -> int:
        if not any(left):
            return 0
        here = [i for i, k in enumerate(left) if k and arrival[i] <= now]
        if not here:
            return rest(now + 1, left)
        return min(
            rest(now + 1, (*left[:i], left[i] - 1, *left[i + 1 :]))
            + (now + 1 if left[i] == 1 else 0)
            for i in here
        )

    return rest(0, tuple(output))


def test_srpt_alone_on_a_machine_is_optimal() -> None:
    """`least_completions` tries everything on one preemptive machine; latencies are completions
    less arrivals."""
    rng = Random(1)
    for _ in range(60):
        n = rng.randint(2, 4)
        arrival = [rng.randint(0, 6) for _ in range(n)]
        output = [rng.randint(1, 5) for _ in range(n)]
        instance = Instance(arrival, [1] * n, output, kv_capacity=1000)
        found = simulate(instance, "srpt:max_running=1,keep=true")
        tel = evaluate(instance, found).metrics["tel"]
        assert tel == least_completions(arrival, output) - sum(arrival)


def test_alone_on_a_machine_it_is_the_queue_of_lemma_1() -> None:
    # Exponential sizes, perfect predictions, KV kept: a token is a unit of work, and 100 of them
    # one in the lemma, whose corrected form gives 2.11, 1.94 and 1.87 at load 0.7.
    rng = np.random.default_rng(2)
    output = np.maximum(1, np.rint(rng.exponential(100, 30_000))).astype(int)
    arrival = np.floor(np.cumsum(rng.exponential(100 / 0.7, 30_000))).astype(int)
    instance = Instance(arrival, np.ones(30_000, dtype=int), output, kv_capacity=10**7)
    jobs = perfect(exponential())
    for c in (0.2, 0.5, 1.0):
        found = simulate(instance, f"trail:c={c},max_running=1,keep=true")
        # 2 % is for 30,000 random jobs; from one C to the next the formula falls by 8 and 4 %.
        mean = evaluate(instance, found).metrics["mean_latency"] / output.mean()
        assert mean == pytest.approx(mean_response_time(jobs, rate=0.7, c=c), rel=0.02)


# --- by hand ------------------------------------------------------------------------------------


def two(second_output: int, **fields) -> Instance:
    """A of 3 + 6 tokens at 0, and B of 1 + ``second_output`` that comes in A's third batch."""
    return Instance(
        [0, 2.5], [3, 1], [6, second_output], kv_capacity=100, time_unit="second", **fields
    )


def test_a_shorter_request_preempts_and_the_longer_one_is_computed_again() -> None:
    """`two(2)`: A of 3 + 6 tokens at 0, and B of 1 + 2 that comes in A's third batch."""
    # After three batches A has 3 of 6 tokens: 3 left, B has 2. One seat: A goes, and comes back
    # with its 3 + 3 tokens to refill, which produces the fourth.
    found = simulate(Problem(two(2), STEP), "srpt:max_running=1")
    assert rows_of(found) == [{0: 3}, {0: 1}, {0: 1}, {1: 1}, {1: 1}, {0: 6}, {0: 1}, {0: 1}]
    assert evicted_of(found) == {3: [0]}
    # With 3 left each, the earlier arrival stays.
    assert not len(simulate(Problem(two(3), STEP), "srpt:max_running=1").evicted)


@pytest.mark.parametrize(("c", "preempted"), [(1, True), (0.67, True), (0.66, False), (0, False)])
def test_beyond_floor_c_r_tokens_nobody_is_preempted(c: float, preempted: bool) -> None:
    # r = 6 and 3 tokens produced: floor(0.67 * 6) = 4 is beyond them, floor(0.66 * 6) = 3 not.
    found = simulate(Problem(two(2), STEP), f"trail:c={c},max_running=1")
    assert bool(len(found.evicted)) is preempted


def test_kv_may_stay_until_it_is_in_the_way() -> None:
    """`two(2)`: A of 3 + 6 tokens at 0, and B of 1 + 2 that comes in A's third batch. One runs
    at a time, and B is shorter."""
    kept = simulate(Problem(two(2), STEP), "srpt:max_running=1,keep=true")
    assert rows_of(kept) == [{0: 3}, {0: 1}, {0: 1}, {1: 1}, {1: 1}, {0: 1}, {0: 1}, {0: 1}]
    assert not len(kept.evicted)
    assert evaluate(Problem(two(2), STEP), kept).pauses.tolist() == [1, 0]
    # A holds 5 cached tokens and the newest one. A B of 3 prompt tokens holds 3 + 1, then 4 + 1: 10
    # tokens hold both at first, and A goes when B grows.
    tight = replace(two(2), prompt_tokens=[3, 3], kv_capacity=10)
    gone = simulate(Problem(tight, STEP), "srpt:max_running=1,keep=true")
    assert evicted_of(gone) == {4: [0]}


def test_refined_predictions_reorder_running_requests() -> None:
    # Both are thought to be 4 long, A first. After a token A turns out to have 9 left, so that B
    # goes on; refine=false believes the 3 that are left of the first prediction.
    forecast = Forecast(1, [0, 3, 5], [4.0, 9.0, 1.0, 4.0, 1.0])
    instance = Instance(
        [0, 0.5], [1, 1], [3, 2], kv_capacity=50, time_unit="second", forecast=forecast
    )
    one = "max_running=1,c=1"
    again = rows_of(simulate(Problem(instance, STEP), f"trail:{one}"))
    # A comes back with its prompt and its token, 2. True outputs are 3 and 2.
    assert again == [{0: 1}, {1: 1}, {1: 1}, {0: 2}, {0: 1}]
    first = rows_of(simulate(Problem(instance, STEP), f"trail:{one},refine=false"))
    assert first == [{0: 1}, {0: 1}, {0: 1}, {1: 1}, {1: 1}]


def test_memory_evicts_the_longest_even_beyond_preemption() -> None:
    # Generated accounting: 2 + 1 and 2 + 1 at first, one more each per batch, M = 9: at 4 + 4
    # after two batches, then 5 + 5 do not fit and B, later in the line, goes, c = 0 or not.
    instance = Instance(
        [0, 0], [2, 2], [4, 5], kv_capacity=9, time_unit="second", kv_accounting="generated"
    )
    found = simulate(Problem(instance, STEP), "trail:c=0")
    assert rows_of(found)[:4] == [{0: 2, 1: 2}, {0: 1, 1: 1}, {0: 1}, {0: 1}]
    assert evicted_of(found) == {2: [1]}


def test_decodes_have_the_tokens_of_a_batch_before_prefills() -> None:
    # Three tokens a batch. A decodes, so that B's prompt of 5 comes in 2, 2 and 1 beside it.
    instance = Instance([0, 0.5], [1, 5], [5, 6], kv_capacity=99, time_unit="second")
    found = rows_of(simulate(Problem(instance, STEP), "trail:max_batch_tokens=3"))
    assert found[:4] == [{0: 1}, {0: 1, 1: 2}, {0: 1, 1: 2}, {0: 1, 1: 1}]
    # A shorter B is at the head of the line: a token of each batch is its own in any case.
    short = replace(instance, output_tokens=[5, 2])
    found = rows_of(simulate(Problem(short, STEP), "trail:max_batch_tokens=1,c=1"))
    # Five tokens of its prompt, and one that it decodes.
    assert found[:7] == [{0: 1}, *[{1: 1}] * 6]


def test_without_hybrid_batches_the_head_of_the_line_decides_the_phase() -> None:
    instance = Instance(
        [0, 0.5], [1, 2], [5, 2], kv_capacity=99, time_unit="second", hybrid_batching=False
    )
    # At 1 s request 1, with 2 left and not 4, is at the head: its prefill, then decodes of both.
    found = rows_of(simulate(Problem(instance, STEP), "srpt"))
    assert found[:4] == [{0: 1}, {1: 2}, {1: 1, 0: 1}, {0: 1}]


def test_a_prompt_that_may_not_be_split_runs_alone() -> None:
    """A batch takes 3 tokens, and the prompt of 4 has one to itself."""
    instance = Instance(
        [0, 0.5], [1, 4], [5, 2], kv_capacity=99, time_unit="second", chunked_prefill=False
    )
    found = rows_of(simulate(Problem(instance, STEP), "trail:max_batch_tokens=3,c=1"))
    assert found[:3] == [{0: 1}, {1: 4}, {1: 1, 0: 1}]


def test_in_rounds_a_preempted_request_starts_again() -> None:
    # After 3 of its 6 rounds request 0 gives way to the shorter one, and then runs all 6 again.
    instance = Instance([0, 3], [3, 1], [6, 2], kv_capacity=100)
    found = simulate(instance, "srpt:max_running=1")
    assert found.evict_mode == "restart"
    assert rows_of(found) == [{0: 3}, {0: 1}, {0: 1}, {1: 1}, {1: 1}, {0: 3}, *[{0: 1}] * 5]


def test_wrong_forecasts_make_no_endless_loop_in_rounds() -> None:
    # Every request is thought to be nearly done until it runs, then to be endless: who forgot
    # that when it starts again would be preempted by the other for ever.
    left = [1.0, 50.0, 50.0, 50.0]
    forecast = Forecast(1, [0, 4, 8], left * 2)
    instance = Instance([0, 0], [1, 1], [4, 4], kv_capacity=20, forecast=forecast)
    found = simulate(instance, "srpt:max_running=1")
    evaluate(instance, found)
    assert len(found.evicted) <= 8  # one for each of 4 + 4 tokens at most


# --- vLLM's variants ----------------------------------------------------------------------------


def test_vllm_sjf_takes_the_shortest_that_waits_and_never_preempts() -> None:
    instance = Instance([0, 0, 1.5], [2, 2, 2], [3, 9, 1], kv_capacity=99, time_unit="second")
    # Request 0 runs until 3 s. Then request 2, there since 1.5 s, is shorter than 1.
    found = simulate(Problem(instance, STEP), "vllm-sjf:max_running=1")
    order = np.argsort(evaluate(Problem(instance, STEP), found).first_start)
    assert order.tolist() == [0, 2, 1]
    found = simulate(Problem(instance, STEP), "vllm-fcfs:max_running=1")
    order = np.argsort(evaluate(Problem(instance, STEP), found).first_start)
    assert order.tolist() == [0, 1, 2]


def test_new_requests_have_the_tokens_of_a_batch_first() -> None:
    # 300 tokens of A's second prompt are left after 512; B's 400 go first, and 112 of A.
    instance = Instance([0, 0.5], [812, 400], [2, 2], kv_capacity=9999, time_unit="second")
    for spec in ("vllm-sjf", "vllm-fcfs"):
        found = rows_of(simulate(Problem(instance, STEP), spec))
        assert found[:2] == [{0: 512}, {1: 400, 0: 112}]


# --- specifications -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("trail:c=1.5", "c: found 1.5; expected 0 <= c <= 1"),
        ("trail:c=-0.1", "c: found -0.1"),
        ("trail:c=x", "c: found 'x'; expected a number"),
        ("trail:refine=1", "refine: found '1'; expected true or false"),
        ("trail:max_running=0", "max_running: found 0; expected an integer >= 1"),
        ("trail:max_batch_tokens=0", "max_batch_tokens: found 0; expected an integer >= 1"),
        ("srpt:c=1", "parameter 'c' is unknown; known are refine, keep"),
        ("vllm-sjf:c=1", "parameter 'c' is unknown; known are max_running"),
    ],
)
def test_a_bad_specification_says_what_would_be_right(spec: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make_policy(spec)


def test_comparisons_say_which_features_the_instance_switches_off() -> None:
    plain = Instance([0, 0], [1, 2], [3, 1], kv_capacity=9)
    fixed = replace(plain, hybrid_batching=False, chunked_prefill=False)
    notes = [compare(i, ["trail"], bound=False).rows[0].notes for i in (plain, fixed)]
    assert not [note for note in notes[0] if "by the instance" in note]
    assert [note for note in notes[1] if "by the instance" in note] == [
        "hybrid batching is off by the instance", "chunked prefill is off by the instance",
    ]  # fmt: skip


def test_trail_is_clairvoyant_only_without_predictions() -> None:
    for spec in ("trail", "srpt", "vllm-sjf"):
        instance = two(2)
        assert is_clairvoyant(*make_policy(spec), instance)
        assert not is_clairvoyant(*make_policy(spec), replace(instance, predicted=[5, 5]))
    assert not is_clairvoyant(*make_policy("vllm-fcfs"), two(2))
