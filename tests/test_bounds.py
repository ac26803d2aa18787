"""Lower bounds in rounds never exceed an optimum that was found by trying everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from brute_force import OBJECTIVES, brute_force, brute_force_tel

from optsched import BatchCost, Problem, bound, compare, solve
from optsched.bounds import BoundTask, features_of, list_bounds, lower_bound
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.metrics import TABLE

# Each objective to minimize with each of its bounds in rounds that does not search.
IN_ROUNDS = [
    (objective, name)
    for name, one in list_bounds().items()
    if one.time_unit == "round" and not (one.searches or one.needs)
    for objective in one.objectives
    if TABLE[objective].sense == "min"
]
"""Every pair of a bound in rounds and a metric that it bounds from below.

Those that bound a metric from above have an exhaustive search of their own
(`test_service_bound.py`).
"""


def tiny_instance(rng: np.random.Generator, accounting: str) -> Instance:
    """Return 1 to 4 requests that compete for KV, small enough to try every schedule."""
    n = int(rng.integers(1, 5))
    prompt = rng.integers(1, 5, n)
    output = rng.integers(1, 6, n)
    peak = int((prompt + output).max())
    return Instance(
        rng.integers(0, rng.choice([1, 4, 9]), n),
        prompt,
        output,
        kv_capacity=peak + int(rng.integers(0, 8)),
        kv_accounting=accounting,
    )


@cache
def least(instance: Instance, objective: str) -> float:
    """Return the optimum by brute force."""
    return brute_force(instance, objective)[0]


@pytest.mark.parametrize("accounting", ["generated", "cached"])
def test_no_bound_exceeds_the_optimum_of_a_thousand_tiny_instances(accounting: str) -> None:
    rng = np.random.default_rng(20240607)
    instances = [tiny_instance(rng, accounting) for _ in range(1000)]
    instances = [replace(one, weight=rng.integers(1, 9, one.n)) for one in instances]
    reached = {}
    for objective, name in IN_ROUNDS:
        assert objective in OBJECTIVES, f"{name}: write {objective} in tests/brute_force.py"
        reached[objective, name] = 0
        for instance in instances:
            value, origin = lower_bound(Problem(instance, objective=objective), method=name)
            assert origin == name
            assert value is not None
            optimum = least(instance, objective)
            assert value <= optimum, (name, instance.to_dict())
            reached[objective, name] += value == optimum
    # A bound that is never reached would be of no use here.
    assert all(count > 100 for count in reached.values()), reached


def test_srpt_bound_by_hand() -> None:
    # M = 4, two requests s = 1, o = 2 at 0: volume 2 + 3 = 5 each, so the machine completes
    # them at 5/4 and 10/4 rounds: 2 and 3 in whole rounds. Together they would hold 6 > 4.
    instance = Instance([0, 0], [1, 1], [2, 2], kv_capacity=4)
    assert lower_bound(instance, method="srpt") == (5, "srpt")
    # The second starts after round 1 at the earliest: at t = 2 they hold 3 + 2 > 4. So 2 + 4.
    assert brute_force_tel(instance)[0] == 6


def test_srpt_preempts_a_long_request_for_a_short_one() -> None:
    # M = 10. A: s = 5, o = 5, volume 40, at 0; B: s = 1, o = 1, volume 2, at 1. SRPT serves B
    # over [1, 1.2) and A until 4.2: completions ceil to 2 and 5, as early as a + o allows.
    instance = Instance([0, 1], [5, 1], [5, 1], kv_capacity=10)
    assert lower_bound(instance, method="srpt") == (6, "srpt")


def test_the_best_bound_is_taken_and_named() -> None:
    instance = Instance([0] * 9, [1] * 9, [1] * 9, kv_capacity=2)
    # One fits at a time, so they end after 1, 2, ..., 9 rounds.
    assert lower_bound(instance) == (45, "pairs")
    assert lower_bound(instance, method="srpt") == (45, "srpt")


def test_arrivals_a_billion_rounds_apart_take_no_memory_and_keep_every_unit() -> None:
    far = 10**9
    instance = Instance([0, far, 2 * far, 3 * far], [3] * 4, [7] * 4, kv_capacity=10)
    for name in (name for objective, name in IN_ROUNDS if objective == "tel"):
        # No two requests meet, so each takes its 7 rounds, 4 * 7 = 28 in all; the volume bounds
        # come close.
        value, _ = lower_bound(instance, method=name)
        assert value is not None
        assert 0 < value <= 28
    assert lower_bound(instance)[0] == 28


@pytest.mark.parametrize("arrivals", ["all at 0", "4 per round", "1 per round"])
def test_ten_thousand_requests_are_bounded_by_more_than_their_outputs(arrivals: str) -> None:
    # Asserted is "no less": each request takes at least a round for each token of output.
    n = 10_000
    rng = np.random.default_rng(1)
    arrival = {"all at 0": np.zeros(n), "4 per round": np.arange(n) // 4, "1 per round": range(n)}
    instance = Instance(
        np.asarray(arrival[arrivals], dtype=np.int64),
        rng.integers(1, 2000, n),
        rng.integers(1, 1000, n),
        kv_capacity=16_492,
    )
    value, _ = lower_bound(instance)
    assert value is not None
    assert value >= instance.output_tokens.sum()


def test_bounds_say_where_they_do_not_apply() -> None:
    instance = Instance([0.0], [1], [1], kv_capacity=2, time_unit="second")
    problem = Problem(instance, PLAIN)
    # Nothing bounds peak_kv, srpt is of rounds, and no bound is named magic.
    assert lower_bound(problem.about("peak_kv")) == (None, None)
    with pytest.raises(UsageError, match="does not apply"):
        lower_bound(problem, method="srpt")
    with pytest.raises(UsageError, match="expected auto, "):
        lower_bound(problem, method="magic")


@dataclass(frozen=True, eq=False)
class PaddedInstance(Instance):
    """An instance as a later version may have it: prompts that are padded to some length."""

    pad_tokens: int = 1


# Two requests, each of which holds 3 tokens at its peak.
PAIR = {"arrival": [0, 0], "prompt_tokens": [1, 1], "output_tokens": [2, 2], "kv_capacity": 8}
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def test_no_bound_is_given_for_a_feature_that_it_is_not_proved_for() -> None:
    # Three tokens more than they need may be held by each: every proof by volume would be wrong.
    # Without padding both fit and take 2 rounds each: 2 + 2 = 4. Some bounds ask for weights.
    assert lower_bound(PaddedInstance(**PAIR))[0] == 4
    padded = PaddedInstance(**PAIR, pad_tokens=4, weight=[1] * len(PAIR["arrival"]))
    assert features_of(padded) == {"evictions", "kv_generated", "pad_tokens"}
    assert lower_bound(padded) == (None, None)
    weight = [1] * len(PAIR["arrival"])
    seconds = PaddedInstance(**PAIR, pad_tokens=4, time_unit="second", weight=weight)
    assert lower_bound(Problem(seconds, PLAIN)) == (None, None)
    for name, one in list_bounds().items():
        if one.needs:  # of sessions
            continue
        about = Problem(padded) if one.time_unit == "round" else Problem(seconds, PLAIN)
        limited = replace(about, objective=(one.objectives[0],), slo_ttft=1.0)
        with pytest.raises(UsageError, match=f"'{name}', which is not proved for pad_tokens"):
            lower_bound(limited, method=name)


def test_no_optimum_is_claimed_for_what_no_method_models() -> None:
    """Solving is refused, comparing goes on without a bound and says why, and a pad of 1 is no
    padding."""
    # An exact method's bound is a bound: it would call 4 optimal without looking at the padding.
    padded = PaddedInstance(**PAIR, pad_tokens=4)
    for method in ("auto", "cpsat", "highs", "ramp", "lns"):
        with pytest.raises(UsageError, match="cannot do pad_tokens"):
            solve(padded, method=method)
    seconds = PaddedInstance(**PAIR, pad_tokens=4, time_unit="second")
    with pytest.raises(UsageError, match="cannot do pad_tokens"):
        solve(Problem(seconds, PLAIN))
    beside = compare(padded, ["mc-sf"], time_limit_s=1)
    assert beside.bound is None
    assert beside.found_by == "mc-sf"
    assert any("pad_tokens" in note for note in beside.notes)
    assert solve(PaddedInstance(**PAIR)).status == "optimal"


def test_no_bound_is_given_for_a_cost_that_it_is_not_proved_for(monkeypatch) -> None:
    from optsched.costs import cost

    seconds = Instance(**PAIR, time_unit="second")
    assert lower_bound(Problem(seconds, PLAIN))[1] == "work"
    monkeypatch.setattr(cost, "COEFFICIENTS", (*cost.COEFFICIENTS, "decode_square"))
    squares = BatchCost("squares", 1, {"token": "1", "base": "10", "decode_square": "0.5"})
    assert "cost.decode_square" in features_of(seconds, squares)
    assert lower_bound(Problem(seconds, squares)) == (None, None)
    for name in ("work", "busy-time", "shares"):
        with pytest.raises(
            UsageError, match=f"'{name}', which is not proved for cost.decode_square"
        ):
            lower_bound(Problem(seconds, squares), method=name)
    # What costs nothing is no feature.
    free = BatchCost("free", 1, {"token": "1", "base": "10", "decode_square": "0"})
    assert lower_bound(Problem(seconds, free))[1] == "work"


def test_features_are_what_an_instance_has() -> None:
    everything = Instance(
        [0.0, 1.0], [1, 1], [2, 2], 8, time_unit="second", kv_accounting="cached",
        limits=Limits(max_batch_tokens=4, max_running=1), hybrid_batching=False,
    )  # fmt: skip
    assert features_of(everything, PLAIN) == {
        "arrivals", "evictions", "kv_cached", "max_batch_tokens", "max_running", "cost.token",
        "cost.base", "hybrid_batching_off", "chunked_prefill",
    }  # fmt: skip
    # In rounds nobody splits a prefill unless the instance says so.
    assert features_of(Instance(**PAIR)) == {"evictions", "kv_generated"}
    assert "chunked_prefill" in features_of(Instance(**PAIR, chunked_prefill=True))
    task = BoundTask(everything, PLAIN)
    for name in ("work", "busy-time", "shares"):
        assert list_bounds()[name].applies(task)
        assert not list_bounds()[name].lacks(task)


def test_bounds_of_one_kind_of_request_match_each_other_over_a_grid() -> None:
    # A single request: every bound but the plain volume must be its own output.
    for s, o in product(range(1, 6), range(1, 6)):
        instance = Instance([3], [s], [o], kv_capacity=s + o)
        assert lower_bound(instance)[0] == o


def test_few_requests_with_much_kv_are_bounded_by_cp_sat() -> None:
    # Two of these fit into 900 tokens at a time and never three, so one starts when the shortest
    # ends: 30, 40 and 30 + 50.
    instance = Instance([0, 0, 0], [300, 300, 300], [50, 40, 30], kv_capacity=900)
    found = bound(instance, time_limit_s=20)
    assert found.bound == found.value == 30 + 40 + 80
    assert found.method == "cpsat"
    assert found.certified <= found.bound
