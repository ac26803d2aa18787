"""Schedulers that decide by when first tokens are due."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from optsched import BatchCost, Instance, Problem, compare, run
from optsched.policies import allows
from optsched.policies.engine.simulate import simulate
from optsched.policies.rules import Rules
from optsched.problem.errors import InputError, PolicyError
from optsched.problem.metrics import served_well

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def order_of(instance: Instance, spec: str, cost: BatchCost | None = None) -> list[int]:
    """Return the requests in the order of their first tokens."""
    first = run(Problem(instance, cost), spec).evaluation.first_token
    return sorted(range(instance.n), key=lambda i: float(first[i]))


def one_at_a_time(slo_ttft: list, arrival: list | None = None) -> Instance:
    """Return requests that each fill M = 3 for a round, with these limits of TTFT."""
    n = len(slo_ttft)
    return Instance(arrival or [0] * n, [2] * n, [1] * n, kv_capacity=3, slo_ttft=slo_ttft)


def test_the_earliest_deadline_goes_first() -> None:
    assert order_of(one_at_a_time([3, 1, 2]), "edf") == [1, 2, 0]
    # Deadlines 0 + 9, 1 + 2, 2 + None: at 1 the second, at 2 the third has none and is last.
    mixed = one_at_a_time([9, 2, None, 1], [0, 0, 0, 2])
    assert order_of(mixed, "edf") == [1, 0, 3, 2]


def test_equal_slos_are_first_come_first_served() -> None:
    instance = one_at_a_time([5] * 4, [0, 1, 1, 2])
    assert order_of(instance, "edf") == order_of(instance, "fcfs") == [0, 1, 2, 3]


def test_a_long_prompt_has_less_slack() -> None:
    # Due at 100 and 101 ms; prefills take 10 + 5 and 10 + 40 ms: start by 85 and by 51 ms.
    instance = Instance(
        [0.0, 0.0], [5, 40], [2, 2], kv_capacity=43, time_unit="second", slo_ttft=[0.1, 0.101]
    )
    assert order_of(instance, "edf", PLAIN) == [0, 1]
    assert order_of(instance, "least-slack", PLAIN) == [1, 0]


@pytest.mark.parametrize("spec", ["late-last", "edf:late_last=true", "least-slack:late_last=true"])
def test_who_is_late_lets_others_pass(spec: str) -> None:
    # One fits at a time, for a round. Due by 1, 1 and 2: after the first has run until 1, the
    # second cannot be there by 1.
    instance = one_at_a_time([1, 1, 2])
    assert order_of(instance, spec) == [0, 2, 1]
    found = run(instance, spec).evaluation
    assert served_well(found).tolist() == [True, False, True]


def test_who_is_just_in_time_is_not_late() -> None:
    # A prefill of 10 tokens takes 20 ms. Due by 20 and 40 ms, one after the other: both in time.
    instance = Instance(
        [0.0, 0.0, 0.0], [10] * 3, [1] * 3, kv_capacity=11, time_unit="second",
        slo_ttft=[0.0201, 0.0401, 1.0],
    )  # fmt: skip
    assert order_of(instance, "late-last", PLAIN) == [0, 1, 2]
    # Due by 39 ms the second would have had to start by 19 ms, and the first runs until 20.
    tight = Instance(
        [0.0, 0.0, 0.0], [10] * 3, [1] * 3, kv_capacity=11, time_unit="second",
        slo_ttft=[0.0201, 0.039, 1.0],
    )  # fmt: skip
    assert order_of(tight, "late-last", PLAIN) == [0, 2, 1]


def test_late_requests_behind_one_that_is_admitted_are_passed_over_too() -> None:
    # Request 0 holds all of 6 tokens until 1; requests 2 and 0 are due by 1. At 1 two of 2 + 1
    # tokens fit together: requests 1 and 3, which are in time, before 2, which is late.
    instance = Instance(
        [0, 0, 0, 0, 0], [5, 2, 2, 2, 2], [1] * 5, kv_capacity=6, slo_ttft=[1, 9, 1, 9, 9]
    )
    found = run(instance, "late-last").evaluation
    assert found.first_token.tolist() == [1, 2, 3, 2, 3]


@pytest.mark.parametrize("name", ["edf", "least-slack", "late-last"])
def test_without_an_slo_they_are_not_allowed(name: str) -> None:
    bare = Instance([0], [1], [1], kv_capacity=3)
    assert "no slo_ttft" in str(allows(name, bare))
    with pytest.raises(PolicyError, match=f"policy '{name}': the instance has no slo_ttft"):
        simulate(bare, name)
    assert "no slo_ttft" in compare(bare, [name], bound=False).rows[0].error
    assert allows(name, one_at_a_time([1])) is None


def rows(instance: Instance, spec: str) -> list[dict[int, int]]:
    """Return the tokens of every batch by request."""
    schedule = simulate(Problem(instance, PLAIN), spec)
    offsets = schedule.batch_offsets.tolist()
    return [
        dict(zip(schedule.request[a:b].tolist(), schedule.tokens[a:b].tolist(), strict=True))
        for a, b in pairwise(offsets)
    ]


def paced_pair(arrival: float, output: int, slo_tpot: float) -> Instance:
    """Return a request with 5 prompt tokens, and one with 40 that arrives while it decodes."""
    return Instance(
        [0.0, arrival], [5, 40], [output, 2], kv_capacity=100, time_unit="second",
        slo_ttft=[1.0, 1.0], slo_tpot=[slo_tpot, 1.0],
    )  # fmt: skip


def test_a_chunk_keeps_the_pace_of_those_that_decode() -> None:
    # The first batch takes 10 + 5 ms. A batch with a decode and c prompt tokens takes 11 + c ms,
    # and 30.1 ms are allowed per token: 19 tokens, 19 with 0.2 ms to spare, and then the last 2.
    found = rows(paced_pair(0.001, 9, 0.0301), "paced")
    assert found[:4] == [{0: 5}, {0: 1, 1: 19}, {0: 1, 1: 19}, {0: 1, 1: 2}]
    # Decodes that nothing delays take 11 ms, so they are 19.1 ms ahead after each: by the token
    # after 59 ms, 4 x 19.1 + 30.1 = 106.5 ms are left, which is enough for the whole prompt.
    assert rows(paced_pair(0.05, 9, 0.0301), "paced:hold=9")[5] == {0: 1, 1: 40}


def test_who_is_ahead_lets_prefills_go_first() -> None:
    # Tokens at 15, 26, 37, 48 and 59 ms; the next is due at 15 + 5 * 100 ms: 456 ms ahead.
    instance = paced_pair(0.05, 6, 0.1)
    assert rows(instance, "paced")[5:7] == [{1: 40}, {0: 1, 1: 1}]  # 456 > 2 * 100
    assert rows(instance, "paced:hold=5")[5] == {0: 1, 1: 40}


def test_who_has_fallen_behind_does_not_stop_prefills() -> None:
    # A decode step takes 11 ms, more than its limit of 10, and leaves no time for others.
    assert rows(paced_pair(0.001, 3, 0.01), "paced")[1:4] == [{0: 1}, {0: 1}, {1: 40}]
    # Limits of 100 ms. The long prompt and the short one are prefilled together until 1040 ms. Then
    # half of the limit, 50 ms, goes on if the short one is behind: 38 tokens beside two decodes.
    behind = Instance(
        [0.0, 0.0, 0.001], [1000, 30, 100], [2, 3, 2], kv_capacity=2000, time_unit="second",
        slo_ttft=[9.0] * 3, slo_tpot=[0.1, 0.02, 0.1],
    )  # fmt: skip
    assert rows(behind, "paced")[:2] == [{0: 1000, 1: 30}, {0: 1, 1: 1, 2: 38}]


def test_pacing_needs_what_it_goes_by() -> None:
    assert "no slo_tpot" in str(allows("paced", one_at_a_time([1])))
    assert "no slo_ttft" in str(allows("paced", Instance([0], [1], [1], kv_capacity=3)))
    # `hold` is 1 or more, and pacing takes chunked prefills, which these rules lack.
    with pytest.raises(InputError, match=r"hold:.*0.5.*1"):
        simulate(Problem(paced_pair(0.0, 2, 1.0), PLAIN), "paced:hold=0.5")
    with pytest.raises(InputError, match="paced:"):
        Rules(paced=True)


def test_who_has_time_to_spare_makes_room_for_a_prompt_that_is_due() -> None:
    # The first may hold 60 tokens, which is all. Its last token is due at 20 ms + 49 * 100 ms; it
    # takes 49 * 11 ms, and a refill some 40 ms. The second is due at 200 ms, before the first ends.
    instance = Instance(
        [0.0, 0.1], [10, 10], [50, 2], kv_capacity=60, time_unit="second",
        slo_ttft=[0.1, 0.1], slo_tpot=[0.1, 0.1],
    )  # fmt: skip
    # After some 8 tokens it has 4.92 - 0.11 - 41 * 0.011 - 0.04 = 4.3 s to spare: more than 0.5
    # and less than 4.6. With 0 nobody is evicted.
    for evict, served in ((0.0, [True, False]), (0.5, [True, True]), (4.6, [True, False])):
        spec = f"edf-decode:predictor=oracle,trust=1,floor=0.3,reserve=1,evict={evict}"
        found = run(Problem(instance, PLAIN), spec)
        assert served_well(found.evaluation).tolist() == served
        assert found.metrics["evictions"] == sum(served) - 1


def test_late_last_goes_with_fixed_orders_only() -> None:
    for more in ({"groups": ("all",)}, {"order": "output", "ties": "random", "overflow": "clear"}):
        with pytest.raises(InputError, match="late_last: found"):
            Rules(late_last=True, **more)


def test_simulate_and_compare_tell_policies_the_slos_that_are_given() -> None:
    due = one_at_a_time([1, 1, 1])
    bare = replace(due, slo_ttft=None)
    told = simulate(Problem(bare, **{"slo_ttft": 1.0, "slo_gap": None}), "late-last")
    assert told.request.tolist() == simulate(due, "late-last").request.tolist()
    # One fits at a time and they start their tokens at 1, 2 and 3, so two of three are in time.
    rows = compare(Problem(bare, slo_ttft=2.0), ["late-last", "fcfs"], bound=False).rows
    assert rows[0].metrics["slo_attainment"] == rows[1].metrics["slo_attainment"] == 2 / 3
    assert "no slo_ttft" in compare(bare, ["edf"], bound=False).rows[0].error
    assert "edf" in {row.policy for row in compare(Problem(bare, slo_ttft=2.0), bound=False).rows}
