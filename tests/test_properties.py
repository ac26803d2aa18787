"""A schedule that cannot be right is never accepted, and no policy beats the optimum."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from brute_force import brute_force_tel
from hypothesis import assume, given, settings, strategies as st
from slow_judge import TIMED, batches, random_instance
from sweeps import parts

from optsched import Problem, run
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.policies import allows, list_policies, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import LoopError, UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import Schedule, from_starts

SEEDS = st.integers(0, 2**32 - 1)
SCHEDULERS = [
    "fcfs", "mc-sf", "sarathi:max_prefill_tokens=3", "vllm", "alpha-beta:alpha=0.2,beta=0.5",
]  # fmt: skip
Rows = list[dict[int, int]]
Evictions = dict[int, list[int]]


def cost_of(instance: Instance):
    """Return what a batch costs: nothing is named in rounds, and `TIMED` in seconds."""
    return None if instance.in_rounds else TIMED


def scheduled(
    rng: Random, *, evicting: bool = False, **fields
) -> tuple[Instance, Schedule, Rows, Evictions]:
    """Return an instance and a schedule of it that the judge accepts, taken apart."""
    while True:
        instance = random_instance(rng, **fields)
        spec = rng.choice(SCHEDULERS)
        if allows(spec, instance) is not None:
            continue
        try:
            schedule = simulate(Problem(instance, cost_of(instance)), spec, seed=rng.randrange(100))
        except LoopError:
            continue
        evaluate(Problem(instance, cost_of(instance)), schedule)
        if evicting and not len(schedule.evicted):
            continue
        request, tokens = schedule.request.tolist(), schedule.tokens.tolist()
        rows = [
            dict(zip(request[a:b], tokens[a:b], strict=True))
            for a, b in pairwise(schedule.batch_offsets.tolist())
        ]
        evictions = {
            j: schedule.evicted[a:b].tolist()
            for j, (a, b) in enumerate(pairwise(schedule.evicted_offsets.tolist()))
        }
        return instance, schedule, rows, evictions


def reassembled(
    instance: Instance, schedule: Schedule, rows: Rows, evictions: Evictions, **more
) -> Schedule:
    """Return the schedule of rows and evictions, otherwise as one that is there."""
    options = {"evict_mode": schedule.evict_mode, "start": schedule.start, **more}
    return batches(instance, *rows, evict=evictions, **options)


def rejected(instance: Instance, schedule: Schedule) -> ViolationError:
    """Return the judge's error about a schedule, which it must not accept."""
    with pytest.raises(ViolationError) as caught:
        evaluate(Problem(instance, cost_of(instance)), schedule)
    return caught.value


def never_evicted(instance: Instance, schedule: Schedule) -> list[int]:
    """Return requests that process exactly s + o - 1 tokens, whatever the order."""
    gone = set(schedule.evicted.tolist())
    return [i for i in range(instance.n) if i not in gone]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_taken_apart_and_reassembled_a_schedule_is_the_same(seed: int) -> None:
    instance, schedule, rows, evictions = scheduled(Random(seed))
    again = reassembled(instance, schedule, rows, evictions)
    # But for the cost model, which `batches` does not name.
    assert again.to_dict() | {"cost_model_sha256": 0} == schedule.to_dict() | {
        "cost_model_sha256": 0
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_an_extra_token_is_rejected(seed: int) -> None:
    # A request that loses no KV processes s + o - 1 tokens: one more is early or too many.
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    kept = never_evicted(instance, schedule)
    places = [(j, i) for j, row in enumerate(rows) for i in row if i in kept]
    assume(places)
    j, i = rng.choice(places)
    rows[j][i] += 1
    rejected(instance, reassembled(instance, schedule, rows, evictions))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_missing_batch_is_rejected(seed: int) -> None:
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    kept = set(never_evicted(instance, schedule))
    places = [j for j, row in enumerate(rows) if kept & row.keys()]
    assume(places)
    j = rng.choice(places)
    # Later batches move up by one with their evictions; those of batch j go with it.
    moved = {k - (k > j): [] for k in range(len(rows) + 1)}
    for k, gone in evictions.items():
        if k != j:
            moved[k - (k > j)] += gone
    start = None
    if schedule.start is not None:
        start = [t for k, t in enumerate(schedule.start.tolist()) if k != j]
    del rows[j]
    rejected(instance, reassembled(instance, schedule, rows, moved, start=start))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_request_that_comes_too_early_is_rejected(seed: int) -> None:
    # Batches start where they did, but one starts just before the latest arrival in it; if it
    # is not early for its worker it is early for that request.
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    start = evaluate(Problem(instance, cost_of(instance)), schedule).batch_start.tolist()
    places = [j for j, row in enumerate(rows) if max(instance.arrival[list(row)]) > 0]
    assume(places)
    j = rng.choice(places)
    latest = max(instance.arrival[list(rows[j])].tolist())
    start[j] = latest - (1 if instance.in_rounds else latest / 2)
    error = rejected(instance, reassembled(instance, schedule, rows, evictions, start=start))
    assert error.rule in ("arrival", "start")
    assert error.batch == j


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_batch_that_starts_before_the_last_one_ends_is_rejected(seed: int) -> None:
    """A batch of an accepted schedule begins a round, or a microsecond, before the last one
    ends."""
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    found = evaluate(Problem(instance, cost_of(instance)), schedule)
    assume(len(rows) > 1)
    start = found.batch_start.tolist()
    j = rng.randrange(1, len(rows))
    start[j] = found.batch_end[j - 1] - (1 if instance.in_rounds else 1e-6)
    if instance.in_rounds:
        start[j] = int(start[j])
    error = rejected(instance, reassembled(instance, schedule, rows, evictions, start=start))
    assert error.rule == "start"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SEEDS)
def test_a_dropped_eviction_is_rejected(seed: int) -> None:
    # The refill comes all the same: more than s + o - 1 tokens for a request that lost nothing,
    # if KV has not overflowed before.
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng, evicting=True, most=8)
    i = rng.choice(sorted(set(schedule.evicted.tolist())))
    kept = {j: [k for k in row if k != i] for j, row in evictions.items()}
    rejected(instance, reassembled(instance, schedule, rows, kept))


def test_a_dropped_eviction_overflows_the_kv() -> None:
    # M = 8 cached, s 3, o 4 twice: 4 + 4 after batch 2, of which 1 goes before batch 3. If it
    # stays, batch 3 has 5 + 4.
    instance = Instance([0, 0], [3, 3], [4, 4], kv_capacity=8, kv_accounting="cached")
    rows = [{0: 3}, {1: 3}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {1: 3}, {1: 1}, {1: 1}, {1: 1}]
    good = batches(instance, *rows, evict={3: [1]}, evict_mode="restart")
    evaluate(instance, good)
    error = rejected(instance, batches(instance, *rows, evict_mode="restart"))
    assert (error.rule, error.batch, error.value, error.limit) == ("kv_capacity", 3, 9, 8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_two_requests_of_different_work_cannot_change_places(seed: int) -> None:
    # Each would process the other's s + o - 1 tokens.
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    kept = never_evicted(instance, schedule)
    work = (instance.prompt_tokens + instance.output_tokens).tolist()
    pairs = [(i, k) for i in kept for k in kept if work[i] < work[k]]
    assume(pairs)
    i, k = rng.choice(pairs)
    other = {i: k, k: i}
    rows = [{other.get(r, r): c for r, c in row.items()} for row in rows]
    rejected(instance, reassembled(instance, schedule, rows, evictions))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SEEDS)
def test_starts_moved_to_before_an_arrival_or_into_an_overflow_are_rejected(seed: int) -> None:
    rng = Random(seed)
    plain = {"limits": Limits(), "hybrid_batching": None, "chunked_prefill": None}
    instance = random_instance(rng, unit="round", **plain)
    found = run(instance, "mc-sf").evaluation
    starts = (found.finish - instance.output_tokens).tolist()
    evaluate(instance, from_starts(starts, instance))
    early = list(starts)
    i = rng.randrange(instance.n)
    early[i] = int(instance.arrival[i]) - 1
    error = rejected(instance, from_starts(early, instance))
    assert (error.rule, error.request) == ("arrival", i)
    # All complete in one round: their peaks stand side by side there.
    together = int(max(instance.arrival + instance.output_tokens))
    peaks = int(instance.peak_tokens.sum())
    moved = from_starts(together - instance.output_tokens, instance)
    if peaks > instance.kv_capacity:
        assert rejected(instance, moved).rule == "kv_capacity"
    else:
        assert evaluate(instance, moved).metrics["peak_kv"] == peaks


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SEEDS)
def test_one_token_of_capacity_below_the_peak_is_rejected(seed: int) -> None:
    """The peak of an accepted schedule is capacity enough, and one token less is not."""
    rng = Random(seed)
    instance, schedule, rows, evictions = scheduled(rng)
    peak = evaluate(Problem(instance, cost_of(instance)), schedule).metrics["peak_kv"]
    assert peak is not None
    assume(peak - 1 >= instance.peak_tokens.max())
    smaller = replace(instance, kv_capacity=int(peak) - 1)
    error = rejected(smaller, reassembled(smaller, schedule, rows, evictions))
    assert (error.rule, error.value, error.limit) == ("kv_capacity", error.value, peak - 1)
    exact = replace(instance, kv_capacity=int(peak))
    evaluate(Problem(exact, cost_of(exact)), reassembled(exact, schedule, rows, evictions))


# --- no policy beats the optimum ------------------------------------------------------------------

# Every policy, also without evictions where it can, and with other parameters.
SPECS = [
    *list_policies(),
    *(
        f"{n}:eviction_free=true"
        for n, p in list_policies().items()
        if "eviction_free" in p.parameters
    ),
    "alpha-beta:alpha=0.1,beta=0.5",
    "sarathi:max_prefill_tokens=2",
]


def judged(instance: Instance, spec: str, seed: int) -> Evaluation | None:
    """Return what the judge says of a policy's run, None where it cannot run or does not end."""
    if allows(spec, instance) is not None:
        return None
    try:
        return run(instance, spec, seed=seed).evaluation
    except (LoopError, UsageError):
        return None


@pytest.mark.parametrize("numbers", parts(12, 120))
@pytest.mark.parametrize("limited", [False, True])
def test_no_policy_beats_the_optimum_of_its_model(limited: bool, numbers: range) -> None:
    rng = Random(99 + limited + 1000 * numbers.start)
    reached: dict[str, int] = dict.fromkeys(SPECS, 0)
    plain = {"limits": Limits(), "hybrid_batching": None, "chunked_prefill": None}
    for number in numbers:
        instance = random_instance(rng, unit="round", most=4, **({} if limited else plain))
        optimum, starts = brute_force_tel(instance)
        if not starts:
            continue
        assert evaluate(instance, from_starts(starts, instance)).metrics["tel"] == optimum
        for spec in SPECS:
            found = judged(instance, spec, number)
            if found is None or found.outside_reason is not None:
                continue
            assert found.metrics["tel"] >= optimum, (spec, instance.to_dict())
            reached[spec] += found.metrics["tel"] == optimum
    # An optimum that no policy ever reaches would not be of their model.
    assert reached["mc-sf"] > len(numbers) // 6, reached


def test_a_paused_schedule_may_beat_the_optimum_and_is_not_covered() -> None:
    # A: s 1, o 6, at 0. B: s 4, o 1, at 1; C = 4, so B's prompt fills a round. Uninterrupted: A
    # 0-6 and B 6-7, latencies 6 + 6; or B 1-2 and A 2-8, 1 + 8. Pausing A for B's round: 7 + 1.
    instance = Instance([0, 1], [1, 4], [6, 1], kv_capacity=20, limits=Limits(4))
    optimum, _ = brute_force_tel(instance)
    assert optimum == min(6 + 6, 1 + 8)
    paused = evaluate(instance, batches(instance, {0: 1}, {1: 4}, *[{0: 1}] * 5))
    assert paused.metrics["tel"] == 7 + 1 < optimum
    assert paused.outside_reason is not None


def test_every_registered_policy_can_be_made_and_says_what_it_is() -> None:
    for name, info in list_policies().items():
        assert info.summary
        made, same = make_policy(name)
        assert made is not None
        assert same is info
