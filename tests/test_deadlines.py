"""Schedulers that decide by when first tokens are due."""

from __future__ import annotations

import pytest

from optsched import BatchCost, Instance, evaluate, simulate
from optsched.policies import allows
from optsched.policies.rules import Rules
from optsched.problem.errors import InputError
from optsched.problem.metrics import served_well

# One layer, milliseconds: 1 per token, 10 per batch.
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def order_of(instance: Instance, spec: str, cost: BatchCost | None = None) -> list[int]:
    """Return the requests in the order of their first tokens."""
    first = evaluate(instance, simulate(instance, spec, cost), cost).first_token
    return sorted(range(instance.n), key=lambda i: float(first[i]))


def one_at_a_time(slo_ttft: list, arrival: list | None = None) -> Instance:
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
    # Due by 1, 1 and 2: after the first has run until 1, the second cannot be there by 1.
    instance = one_at_a_time([1, 1, 2])
    assert order_of(instance, spec) == [0, 2, 1]
    found = evaluate(instance, simulate(instance, spec))
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
    # At 1 two fit together: the first of those in time, and then the next in time, not a late one.
    instance = Instance(
        [0, 0, 0, 0, 0], [5, 2, 2, 2, 2], [1] * 5, kv_capacity=6, slo_ttft=[1, 9, 1, 9, 9]
    )
    found = evaluate(instance, simulate(instance, "late-last"))
    assert found.first_token.tolist() == [1, 2, 3, 2, 3]


@pytest.mark.parametrize("name", ["edf", "least-slack", "late-last"])
def test_without_an_slo_they_are_not_allowed(name: str) -> None:
    bare = Instance([0], [1], [1], kv_capacity=3)
    assert "no slo_ttft" in str(allows(name, bare))
    assert allows(name, one_at_a_time([1])) is None


def test_late_last_goes_with_fixed_orders_only() -> None:
    for more in ({"groups": ("all",)}, {"order": "output", "ties": "random", "overflow": "clear"}):
        with pytest.raises(InputError, match="late_last: found"):
            Rules(late_last=True, **more)
