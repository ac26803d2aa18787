"""Instances: what is refused, what the digest covers, and the shipped examples' optima."""

from __future__ import annotations

import hashlib
import json
import re

import numpy as np
import pytest

from optsched.files.read_write import example_instances, read_instance
from optsched.problem.columns import MAX_TOKENS, real_column, whole_column
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance, Limits


def make(**changes):
    """Two requests, 1 + 3 tokens at 0 and 2 + 4 tokens at 2, M = 10, but for changes."""
    fields = {"arrival": [0, 2], "prompt_tokens": [1, 2], "output_tokens": [3, 4]}
    return Instance(**{**fields, "kv_capacity": 10, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"arrival": [], "prompt_tokens": [], "output_tokens": []},
            "requests: found an empty list; expected one or more requests",
        ),
        ({"arrival": [0]}, "requests.prompt_tokens: found 2 values; expected 1, as many as"),
        (
            {"output_tokens": [3, 4, 5]},
            "requests.output_tokens: found 3 values; expected 2, as many as",
        ),
        ({"prompt_tokens": [1, -2]}, "requests.prompt_tokens: request 1: found -2"),
        (
            {"prompt_tokens": [0, 2]},
            "requests.prompt_tokens: request 0: found 0; expected a number from 1 to",
        ),
        (
            {"output_tokens": [3, 0]},
            "requests.output_tokens: request 1: found 0; expected a number from 1 to",
        ),
        (
            {"output_tokens": [3, 1.5]},
            "requests.output_tokens: request 1: found 1.5; expected an integer",
        ),
        (
            {"output_tokens": [3, True]},
            "requests.output_tokens: request 1: found True; expected an integer",
        ),
        (
            {"output_tokens": [3, "4"]},
            "requests.output_tokens: request 1: found '4'; expected an integer",
        ),
        (
            {"output_tokens": [3, None]},
            "requests.output_tokens: request 1: found None; expected an integer",
        ),
        (
            {"output_tokens": [3, [4]]},
            "requests.output_tokens: request 1: found [4]; expected an integer",
        ),
        (
            {"output_tokens": [[3], [4]]},
            "requests.output_tokens: request 0: found [3]; expected an",
        ),
        ({"output_tokens": "34"}, "requests.output_tokens: found '34'; expected a list of numbers"),
        ({"output_tokens": {"a": 1}}, "requests.output_tokens: found {'a': 1}; expected a list"),
        ({"output_tokens": np.ones((2, 2), dtype=int)}, "found 2 dimensions; expected a flat list"),
        ({"output_tokens": [3, MAX_TOKENS + 1]}, "request 1: found 2147483648"),
        ({"output_tokens": [3, 2**63]}, "request 1: found 9223372036854775808"),
        ({"output_tokens": [3, 10**30]}, "expected a number from 1 to"),
        ({"arrival": [0, -1]}, "requests.arrival: request 1: found -1"),
        (
            {"arrival": [0, 0.5]},
            "requests.arrival: request 1: found 0.5; expected an integer of rounds",
        ),
        (
            {"arrival": [0, float("nan")]},
            "requests.arrival: request 1: found nan; expected a finite",
        ),
        (
            {"arrival": [0, float("inf")]},
            "requests.arrival: request 1: found inf; expected a finite",
        ),
        (
            {"arrival": [0, float("nan")], "time_unit": "second"},
            "request 1: found nan; expected a finite",
        ),
        (
            {"arrival": [0.0, float("inf")], "time_unit": "second"},
            "request 1: found inf; expected a finite",
        ),
        ({"arrival": [0, True], "time_unit": "second"}, "request 1: found True; expected a number"),
        (
            {"arrival": [0, 2**53 + 1]},
            "requests.arrival: request 1: found 9007199254740993; expected",
        ),
        ({"kv_capacity": 0}, "kv_capacity: found 0; expected a number from 1 to"),
        ({"kv_capacity": 10.5}, "kv_capacity: found 10.5; expected an integer"),
        ({"kv_capacity": True}, "kv_capacity: found True; expected an integer"),
        ({"kv_capacity": "10"}, "kv_capacity: found '10'; expected an integer"),
        ({"kv_capacity": 2**63}, "kv_capacity: found 9223372036854775808"),
        ({"kv_capacity": float("nan")}, "kv_capacity: found nan; expected a finite number"),
        ({"time_unit": "minute"}, "time_unit: found 'minute'; expected one of round, second"),
        ({"kv_accounting": "none"}, "kv_accounting: found 'none'; expected"),
        ({"hybrid_batching": 1}, "hybrid_batching: found 1; expected true, false or null"),
        ({"name": 3}, "name: found 3; expected a string"),
        ({"id": ["a", "a"]}, "requests.id: request 1: found 'a', which request 0 has too"),
        ({"id": ["a"]}, "requests.id: found 1 values; expected 2, as many as arrival"),
        ({"id": [1, True]}, "requests.id: request 1: found True; expected a string or integer"),
        ({"id": 5}, "requests.id: found 5; expected a list of strings or integers"),
        ({"id": "ab"}, "requests.id: found 'ab'; expected a list of strings or integers"),
        ({"predicted": [0, 1]}, "requests.predicted: request 0: found 0"),
        (
            {"predicted_lower": [1, 1]},
            "requests.predicted_upper: found nothing; expected both ends",
        ),
        (
            {"predicted_lower": [4, 1], "predicted_upper": [5, 9]},
            "request 0: found the interval [4, 5] and output_tokens 3; expected lower <=",
        ),
        (
            {"predicted_lower": [5, 1], "predicted_upper": [4, 9]},
            "request 0: found the interval [5, 4] and output_tokens 3;",
        ),
    ],
)
def test_impossible_values_are_refused_with_field_request_and_value(changes, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("accounting", "capacity", "fits"),
    # Request 1: 2 prompt + 4 output = 6 at its peak, 5 when its newest token is not held.
    [("generated", 6, True), ("generated", 5, False), ("cached", 5, True), ("cached", 4, False)],
)
def test_a_request_fits_iff_its_peak_does(accounting, capacity, fits):
    if fits:
        assert make(kv_capacity=capacity, kv_accounting=accounting).peak_tokens.max() == capacity
    else:
        with pytest.raises(InputError, match=r"kv_capacity.*request 1"):
            make(kv_capacity=capacity, kv_accounting=accounting)


def test_a_prompt_beyond_a_hard_token_limit_needs_chunks():
    limits = Limits(max_batch_tokens=1)
    with pytest.raises(InputError, match=r"limits\.max_batch_tokens.*request 1.*1.*2"):
        make(limits=limits, chunked_prefill=False)
    assert make(limits=limits).n == 2


def test_sums_beyond_64_bits_are_refused():
    # 2^20 requests of 2^31 rounds each, one after the other, end by 2^51: as many completions may
    # sum to 2^71, beyond 2^63.
    with pytest.raises(InputError, match="64-bit"):
        Instance([0], [1], [MAX_TOKENS], kv_capacity=2**40).subset([0] * 2**20)


def test_unsorted_arrivals_are_kept_in_order():
    assert make(arrival=[7, 0]).arrival.tolist() == [7, 0]


def test_columns_are_read_only_and_do_not_follow_the_caller_s():
    mine = np.array([3, 4])
    instance = make(output_tokens=mine)
    mine[0] = 1
    assert instance.output_tokens.tolist() == [3, 4]
    with pytest.raises(ValueError, match="read-only"):
        instance.output_tokens[0] = 1


def test_volume_is_the_kv_held_over_the_run():
    # s = 1, o = 3: holds 2 + 3 + 4 = 9, or 1 + 2 + 3 = 6; s = 2, o = 4: 3+4+5+6 = 18, or 14.
    assert make().volume.tolist() == [9, 18]
    assert make(kv_accounting="cached").volume.tolist() == [6, 14]


def test_sha256_ignores_names_ids_and_what_is_known():
    plain = make()
    named = make(name="x", id=["a", "b"], known={"optimum": 9})
    assert plain.sha256 == named.sha256


def test_sha256_does_not_tell_1_from_1_0():
    floats = make(arrival=[0.0, 2.0], output_tokens=np.array([3.0, 4.0]), kv_capacity=10.0)
    assert floats.sha256 == make().sha256
    assert (
        make(time_unit="second", arrival=[0, 2]).sha256
        == make(time_unit="second", arrival=[0.0, 2.0]).sha256
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_capacity": 11}, {"arrival": [0, 3]}, {"prompt_tokens": [2, 2]},
        {"output_tokens": [3, 3]}, {"time_unit": "second"}, {"kv_accounting": "cached"},
        {"limits": Limits(max_running=2)}, {"hybrid_batching": False}, {"chunked_prefill": False},
        {"predicted": [3, 4]}, {"predicted_lower": [1, 1], "predicted_upper": [4, 4]},
    ],
)  # fmt: skip
def test_sha256_covers_everything_else(changes):
    assert make(**changes).sha256 != make().sha256


def test_sha256_is_that_of_the_canonical_json():
    text = (
        '{"format":"optsched-instance","kv_accounting":"generated","kv_capacity":10,"requests":'
        '{"arrival":[0,2],"output_tokens":[3,4],"prompt_tokens":[1,2]},"time_unit":"round",'
        '"version":1}'
    )
    assert make(name="x").sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert json.loads(text)["kv_capacity"] == 10


def test_column_errors_can_name_other_items():
    with pytest.raises(InputError, match=r"tokens:.*entry 1.*'x'"):
        whole_column([1, "x"], "tokens", 0, item="entry")
    with pytest.raises(InputError, match=r"start:.*batch 0"):
        real_column([float("nan")], "start", 0, 9, item="batch")


def test_numpy_and_generators_are_columns_too():
    instance = make(arrival=(i for i in [0, 2]), prompt_tokens=np.array([1, 2], dtype=np.uint8))
    assert instance.sha256 == make().sha256


def best_tel(instance: Instance, known: int) -> int:
    """The least TEL over all start times: depth first, dearest outputs first, exact."""
    arrival, prompt, output = (
        column.tolist()
        for column in (instance.arrival, instance.prompt_tokens, instance.output_tokens)
    )
    order = sorted(range(instance.n), key=lambda i: -output[i])
    rest = [sum(output[i] for i in order[k:]) for k in range(len(order) + 1)]
    held = [0] * (max(arrival) + sum(output) + 2)
    best = known + 1

    def place(k: int, tel: int) -> None:
        nonlocal best
        if k == len(order):
            best = min(best, tel)
            return
        i = order[k]
        start = arrival[i]
        # Whoever starts later costs a round more, and all others at least their outputs.
        while tel + start + output[i] - arrival[i] + rest[k + 1] < best:
            rounds = range(start + 1, start + output[i] + 1)
            if all(held[t] + prompt[i] + t - start <= instance.kv_capacity for t in rounds):
                for t in rounds:
                    held[t] += prompt[i] + t - start
                place(k + 1, tel + start + output[i] - arrival[i])
                for t in rounds:
                    held[t] -= prompt[i] + t - start
            start += 1

    place(0, 0)
    return best


@pytest.mark.parametrize("name", ["tiny", "chen-example-3-2"])
def test_known_optimum_is_the_least_over_all_start_times(name):
    instance = read_instance(name)
    optimum = instance.known["optimum"]
    assert best_tel(instance, optimum) == optimum  # one that costs at most the optimum exists


def test_memory_binds_in_tiny():
    instance = read_instance("tiny")
    # Without memory every request would start at its arrival: 9 + 7 + 1 + 3 + 1 + 4 = 25 < 33.
    assert instance.output_tokens.sum() == 25
    assert instance.known["optimum"] == 33


def test_known_optimum_of_theorem_4_1_is_the_least_over_the_long_start():
    instance = read_instance("jaillet-theorem-4-1")
    capacity, arrival = instance.kv_capacity, int(instance.arrival.max())
    shorts = instance.n - 1
    assert (capacity, shorts, arrival) == (64, 32, 60)  # r = b + M - sqrt(M) / 2 with b = 0
    costs = []
    for start in range(arrival + shorts + 1):
        # Equal requests of one round are best run as early as the long one's memory lets them.
        tel, left, t = start + capacity - 1, shorts, arrival
        while left:
            t += 1
            long = 1 + t - start if start < t < start + capacity else 0
            ran = min(left, (capacity - long) // 2)
            left -= ran
            tel += ran * (t - arrival)
        costs.append(tel)
    assert min(costs) == instance.known["optimum"] == 142
    # At once, as a work-conserving scheduler does: 63 + 1 in round 61 + 31 in round 64.
    assert costs[0] == 63 + 1 * 1 + 31 * 4


def test_every_shipped_instance_reads_under_its_own_name():
    assert {"tiny", "tiny-seconds", "jaillet-theorem-4-1"} <= set(example_instances())
    for name in example_instances():
        assert read_instance(name).name == name
