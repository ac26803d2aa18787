"""Time counts from the first arrival: late arrivals cost no digits, and no integer wraps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optsched import BatchCost, Instance, Problem, evaluate, from_batches, from_starts, run, solve
from optsched.analysis.compare import compare
from optsched.bounds import lower_bound
from optsched.files.read_write import read_schedule, write_schedule
from optsched.judge.timeline import timeline
from optsched.policies import allows, list_policies
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, LoopError, ViolationError
from optsched.problem.instance import MAX_SECOND

# One layer, milliseconds: 1 per token, 10 per batch, 5 for decoding, 7 for prefilling.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10", "decode_base": "5", "prefill_base": "7"})
EPOCH = 1_700_000_000.0
"""A Unix time stamp: float64 counts it in steps of 2.4e-7 s."""
# Under load, and in eighths of a second, so that adding EPOCH to an arrival is exact.
BUSY = Instance(
    np.arange(24) // 3 / 8, [9, 4, 7, 2, 8, 5] * 4, [6, 9, 3, 8, 5, 7] * 4, kv_capacity=40,
    time_unit="second",
)  # fmt: skip
# A policy whose schedules have starts of their own.
STALLS = "alpha-beta:alpha=0.05,beta=0.3"


def later(instance: Instance, shift: float | int) -> Instance:
    """Return an instance that arrives so much later."""
    return replace(instance, arrival=instance.arrival + shift, known=None)


def some_policies(instance: Instance) -> list[str]:
    """Return the policies that the instance allows, and one that chooses starts."""
    return [STALLS, *(name for name in list_policies() if allows(name, instance) is None)]


@pytest.mark.parametrize("shift", [EPOCH, 2.0**41, 0.375])
def test_a_late_first_arrival_changes_no_decision_and_no_latency(shift: float) -> None:
    # Float64 has steps of 2.4e-7 at EPOCH and of 2**-11 at 2**41, so that eighths stay exact.
    moved = later(BUSY, shift)
    step = float(np.spacing(shift))
    compared = chosen = 0
    for spec in some_policies(BUSY):
        try:
            here = simulate(Problem(BUSY, PLAIN), spec)
        except LoopError:
            continue
        there = simulate(Problem(moved, PLAIN), spec)
        for name in ("batch_offsets", "request", "tokens", "evicted_offsets", "evicted"):
            assert getattr(here, name).tolist() == getattr(there, name).tolist(), (spec, name)
        one, two = evaluate(Problem(BUSY, PLAIN), here), evaluate(Problem(moved, PLAIN), there)
        assert one.pauses.tolist() == two.pauses.tolist(), spec
        if here.start is None:
            assert one.latency.tolist() == two.latency.tolist(), spec
            assert {**one.metrics, "makespan": 0} == {**two.metrics, "makespan": 0}, spec
        else:  # chosen starts are written as times of day, each rounded by half a step
            assert two.latency == pytest.approx(one.latency, abs=len(here.start) * step), spec
        assert two.finish == pytest.approx(one.finish + shift, rel=1e-15)
        compared += 1
        chosen += here.start is not None
    assert compared - chosen > 20  # of some 30 policies
    assert chosen


def test_stalls_have_starts_that_the_judge_reads_as_they_were_meant() -> None:
    for shift in (0.375, 1 / 3, 12345.678, EPOCH, 2.0**41):
        moved = later(BUSY, shift)
        schedule = simulate(Problem(moved, PLAIN), STALLS, seed=1)
        assert schedule.start is not None
        judged = evaluate(Problem(moved, PLAIN), schedule)
        assert judged.batch_start == pytest.approx(schedule.start, rel=1e-15)


def test_starts_that_another_program_summed_up_are_within_their_own_rounding() -> None:
    # Ten batches one after another, their ends added up from the first arrival as floats.
    first = 0.1
    instance = Instance([first], [3], [10], kv_capacity=99, time_unit="second")
    start, tokens = [first], [3] + [1] * 9
    for c in tokens[:-1]:  # 10 + 7 + 3 = 20 ms for the prefill, 10 + 5 + 1 = 16 ms for a decode
        start.append(start[-1] + (0.020 if c > 1 else 0.016))
    offsets = np.arange(11)
    schedule = from_batches(offsets, [0] * 10, tokens, instance=instance, start=start)
    assert evaluate(Problem(instance, PLAIN), schedule).metrics["tel"] == pytest.approx(
        0.020 + 9 * 0.016
    )
    start[5] -= 1e-9
    early = from_batches(offsets, [0] * 10, tokens, instance=instance, start=start)
    with pytest.raises(ViolationError, match="batch 5"):
        evaluate(Problem(instance, PLAIN), early)


@pytest.mark.parametrize(
    "arrival",
    [
        [EPOCH, EPOCH + 0.5],
        [0.0, 106 * 86400.0],
        [0.0, 108 * 86400.0],  # 2^63 picoseconds are 106.8 days
        [0.0, EPOCH],
        [1e10, 1e10],
        [1.7e12, 1.7e12],
    ],
)
def test_bounds_in_seconds_lie_below_schedules_whenever_requests_arrive(arrival: Any) -> None:
    """A bound over 0.3 of the value, a value within what it can be by hand, and bounds below."""
    instance = Instance(arrival, [40, 10], [3, 2], kv_capacity=1000, time_unit="second")
    found = compare(Problem(instance, PLAIN), ["fcfs", "mc-sf"], time_limit_s=1)
    assert found.bound is not None
    assert found.value is not None
    # The bound is over 0.3 of the value, however late the arrivals.
    assert 0 <= found.gap < 0.7
    # Alone they take 57 + 2 * 16 and 27 + 16 ms; together no more than one after the other.
    # 10 + 7 + 40 = 57 ms and 10 + 7 + 10 = 27 ms for the prefills, 10 + 5 + 1 = 16 for a decode.
    assert found.value + 1e-6 >= 0.089 + 0.043
    assert found.value <= 2 * 0.089 + 0.043 + 1e-6
    assert lower_bound(Problem(instance, PLAIN))[0] <= found.value + 1e-6
    for objective in ("makespan", "mean_ttft"):
        bound, _ = lower_bound(Problem(instance, PLAIN, objective))
        value = run(Problem(instance, PLAIN), "fcfs").metrics[objective]
        assert bound is not None
        assert bound <= value + 1e-6


@pytest.mark.parametrize("method", ["cpsat", "search"])
@pytest.mark.parametrize("objective", ["tel", "makespan"])
def test_infermax_proves_as_much_at_a_time_stamp(method: str, objective: str) -> None:
    instance = Instance([0.0, 0.125, 0.125], [4, 2, 3], [2, 3, 1], 12, time_unit="second")
    one = solve(Problem(instance, PLAIN, objective), method=method, time_limit_s=20)
    moved = later(instance, EPOCH)
    two = solve(Problem(moved, PLAIN, objective), method=method, time_limit_s=20)
    shift = EPOCH if objective == "makespan" else 0
    assert method == "search" or one.status == two.status == "optimal"
    assert two.value == pytest.approx(one.value + shift, rel=1e-12)
    assert two.bound == pytest.approx(one.bound + shift, rel=1e-12)


@pytest.mark.parametrize("method", ["labels", "pulp-bigm"])
def test_methods_without_arrivals_take_one_late_arrival(method: str) -> None:
    instance = Instance([EPOCH] * 2, [4, 2], [2, 2], 12, time_unit="second")
    asked = {"method": method, "time_limit_s": 20}
    early = solve(Problem(later(instance, -EPOCH), PLAIN, "makespan"), **asked)
    result = solve(Problem(instance, PLAIN, "makespan"), **asked)
    assert result.status == early.status == "optimal"
    assert result.value == pytest.approx(EPOCH + early.value, rel=1e-15)
    assert result.metrics["tps"] == pytest.approx(early.metrics["tps"], rel=1e-9)


def test_the_last_rounds_allowed_are_counted_one_by_one(tmp_path) -> None:
    """In round 2^53 and after, where floats count by twos: policies, exact methods, and files."""
    # Alone, 3 and 2 rounds; together they fit: 5 in all, from the last round allowed.
    late = 2**53
    instance = Instance([late, late], [4, 1], [3, 2], kv_capacity=100)
    for spec in some_policies(instance):
        try:
            judged = run(instance, spec).evaluation
        except LoopError:
            continue
        assert judged.finish.min() > late, spec
        assert judged.metrics["tel"] >= 5, spec
    for method in ("highs", "cpsat", "pulp", "ramp", "lns"):
        result = solve(instance, method=method, time_limit_s=10)
        assert (result.status, result.value, result.bound) == ("optimal", 5, 5), method
        assert result.evaluation.finish.tolist() == [late + 3, late + 2]
        assert result.metrics["makespan"] == late + 3
        assert result.metrics["tps"] == 5 / 3  # 5 tokens in 3 rounds
    schedule = simulate(instance, "mc-sf")
    for made in (from_starts([late, late + 1], instance), schedule):
        write_schedule(made, tmp_path / "schedule.json")
        again = evaluate(instance, read_schedule(tmp_path / "schedule.json", instance))
        assert again.finish.tolist() == evaluate(instance, made).finish.tolist()


def test_rounds_after_a_first_arrival_are_the_same_rounds() -> None:
    instance = Instance([0, 0, 1, 4], [3, 2, 5, 1], [4, 6, 2, 3], kv_capacity=14)
    moved = later(instance, 1000)
    for spec in some_policies(instance):
        try:
            here = simulate(instance, spec)
        except LoopError:
            continue
        there = simulate(moved, spec)
        one, two = evaluate(instance, here), evaluate(moved, there)
        assert (one.finish + 1000).tolist() == two.finish.tolist(), spec
        assert (one.batch_start + 1000).tolist() == two.batch_start.tolist(), spec
        spans = timeline(instance, here).span_start + 1000
        assert spans.tolist() == timeline(moved, there).span_start.tolist(), spec


def test_no_time_is_minus_zero() -> None:
    # Workers that start at time 0 start at 0.0; a file would show -0.0.
    judged = run(Problem(BUSY, PLAIN), "isrtf:workers=3").evaluation
    assert judged.batch_start.min() == 0
    for times in (judged.batch_start, judged.first_start, judged.queuing_delay):
        assert not np.signbit(times).any()


def test_seconds_beyond_milliseconds_are_refused() -> None:
    # MAX_SECOND is 2^42 = 4.4e12 s.
    Instance([MAX_SECOND], [1], [1], kv_capacity=9, time_unit="second")
    with pytest.raises(InputError, match=r"requests.arrival.*request 0.*9000000000000000.0"):
        Instance([9e15], [1], [1], kv_capacity=9, time_unit="second")


def test_starts_whose_sum_does_not_fit_are_refused() -> None:
    # 2,100 completions near 2^53 sum to 1.9e19, more than 2^63 = 9.2e18.
    instance = Instance([0] * 2100, [1] * 2100, [1] * 2100, kv_capacity=10**5)
    starts = from_starts([2**53 - 1] * 2100, instance)
    with pytest.raises(InputError, match=r"schedule.starts.*request 0.*64"):
        evaluate(instance, starts)
    one = Instance([0], [1], [1], kv_capacity=2)
    with pytest.raises(InputError, match=r"schedule.starts.*request 0.*64"):
        evaluate(one, from_starts([2**63 - 1], one))
    # A thousand of them fit, 9e18, and are counted exactly.
    instance = Instance([0] * 1000, [1] * 1000, [1] * 1000, kv_capacity=10**5)
    judged = evaluate(instance, from_starts([2**53 - 1] * 1000, instance))
    assert judged.metrics["tel"] == 1000 * 2**53


def test_squares_of_prompts_are_counted_or_refused() -> None:
    squares = BatchCost("squares", 1, {"base": "1", "prefill_square": "1"})
    longest = 2**31 - 1

    def prompts(n: int, **changes: Any) -> Instance:
        return Instance(
            [0.0] * n, [longest] * n, [1] * n, time_unit="second",
            **{"kv_capacity": 2**40, "kv_accounting": "cached", **changes},
        )  # fmt: skip

    two = prompts(2)  # (2^31 - 1)^2 twice is 2^63 - 2^33 + 2
    schedule = from_batches([0, 2], [0, 1], [longest] * 2, instance=two)
    makespan = evaluate(Problem(two, squares), schedule).metrics["makespan"]
    assert makespan == pytest.approx((1 + 2 * longest**2) / 1000, rel=1e-15)
    # 3 (2^31 - 1)^2 = 1.384e19, more than 2^63 = 9.2e18.
    with pytest.raises(InputError, match=r"1.384e.19"):
        prompts(3)
    # Where the KV capacity keeps them apart, or nothing is squared, they may come.
    assert prompts(3, kv_capacity=2 * longest).n == 3
    assert Instance([0] * 3, [longest] * 3, [1] * 3, kv_capacity=2**40).n == 3
