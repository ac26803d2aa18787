"""The judge: one tiny schedule per rule, metrics by hand, and a slow judge that agrees."""

from __future__ import annotations

import math
import warnings
from random import Random

import numpy as np
import pytest
from slow_judge import TIMED, batches, corrupted, random_batches, random_instance, slow_judge
from sweeps import parts

import optsched.judge.replay
from optsched import Problem
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.judge.validity import WORDS
from optsched.optimize.strategies import outside_reason
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.instance import Instance, Limits
from optsched.problem.metrics import METRICS, TABLE
from optsched.problem.schedule import Schedule, from_batches, from_starts

# A batch of c tokens takes c + 1 s.
LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""


def pair(**fields) -> Instance:
    """A: at 0, s = 3, o = 2. B: at 0, s = 2, o = 3. Both peak at 5 (generated)."""
    values = {"arrival": [0, 0], "kv_capacity": 40, **fields}
    return Instance(prompt_tokens=[3, 2], output_tokens=[2, 3], **values)


A, B = 0, 1
# Both prompts in batch 0; A ends with batch 1, B with batch 2.
WHOLE = ({A: 3, B: 2}, {A: 1, B: 1}, {B: 1})
"""A and B together from batch 0: KV 7, 9 (A finishes in it), then B alone 5 (generated)."""


def violation(instance: Instance, schedule: Schedule, cost_model=None) -> ViolationError:
    """Return the error, of one line, with which the judge refuses a schedule."""
    with pytest.raises(ViolationError) as caught:
        evaluate(Problem(instance, cost_model), schedule)
    assert "\n" not in str(caught.value)
    return caught.value


# Each case: fields of `pair`, rows, options of `batches`; rule, batch, request, value, limit.
BROKEN = {
    # B comes at 1 and is processed at 0.
    "arrival": (
        {"arrival": [0, 1]}, ({B: 2},), {"start": [0]},
        ("arrival", 0, B, 0, 1),
    ),
    # Batch 1: A holds 4 + 1 and B 3 + 1. A finishes in that batch, and still counts.
    "kv_generated": ({"kv_capacity": 8}, WHOLE, {}, ("kv_capacity", 1, None, 9, 8)),
    # The same without the newest tokens: 4 + 3.
    "kv_cached": (
        {"kv_capacity": 6, "kv_accounting": "cached"}, WHOLE, {},
        ("kv_capacity", 1, None, 7, 6),
    ),
    # A paused request keeps its KV: A holds 3 + 1, and B needs 2 + 1 beside it.
    "kv_of_a_paused_request": (
        {"kv_capacity": 6}, ({A: 3}, {B: 2}), {},
        ("kv_capacity", 1, None, 7, 6),
    ),
    "max_batch_tokens": (
        {"limits": Limits(4)}, WHOLE, {},
        ("max_batch_tokens", 0, None, 5, 4),
    ),
    # Decodes count towards C: 1 + 2 > 2 (A's prompt in two chunks).
    "max_batch_tokens_with_a_decode": (
        {"limits": Limits(2)}, ({A: 2}, {A: 1}, {A: 1, B: 2}), {},
        ("max_batch_tokens", 2, None, 3, 2),
    ),
    "max_prefill_tokens": (
        {"limits": Limits(None, 4)}, WHOLE, {},
        ("max_prefill_tokens", 0, None, 5, 4),
    ),
    "max_running": (
        {"limits": Limits(None, None, 1)}, WHOLE, {},
        ("max_running", 0, None, 2, 1),
    ),
    # R_max counts who holds KV, not who is processed.
    "max_running_counts_the_paused": (
        {"limits": Limits(None, None, 1)}, ({A: 3}, {B: 2}), {},
        ("max_running", 1, None, 2, 1),
    ),
    "hybrid": (
        {"hybrid_batching": False}, ({A: 3}, {A: 1, B: 2}), {},
        ("hybrid_batching", 1, None, 1, 0),
    ),
    "chunked": (
        {"chunked_prefill": False}, ({A: 2}, {A: 1}), {},
        ("chunked_prefill", 0, A, 2, 3),
    ),
    "decode_tokens": ({}, ({A: 3}, {A: 2}), {}, ("tokens", 1, A, 2, 1)),
    "too_many_tokens": ({}, ({A: 4},), {}, ("tokens", 0, A, 4, 3)),
    "too_many_tokens_of_the_rest": ({}, ({A: 2}, {A: 2}), {}, ("tokens", 1, A, 2, 1)),
    "no_tokens": ({}, ({A: 0},), {}, ("tokens", 0, A, 0, 1)),
    "negative_tokens": ({}, ({A: 3, B: -1},), {}, ("tokens", 0, B, -1, 1)),
    "finished": ({}, ({A: 3}, {A: 1}, {A: 1}), {}, ("finished", 2, A, 3, 2)),
    "unfinished": ({}, ({A: 3, B: 2}, {A: 1, B: 1}), {}, ("unfinished", 1, B, 2, 3)),
    "never_started": ({}, ({A: 3}, {A: 1}), {}, ("unfinished", 1, B, 0, 3)),
    "unknown_request": ({}, ({2: 3},), {}, ("request", 0, 2, 2, 1)),
    "negative_request": ({}, ({-1: 3},), {}, ("request", 0, None, -1, 1)),
    "unknown_eviction": ({}, ({A: 3},), {"evict": {0: [7]}}, ("request", 0, 7, 7, 1)),
    "eviction_of_nothing": (
        {}, ({A: 3},), {"evict": {0: [B]}, "evict_mode": "restart"},
        ("eviction", 0, B, None, None),
    ),
    "eviction_of_the_finished": (
        {}, ({A: 3}, {A: 1}, {B: 2}), {"evict": {2: [A]}, "evict_mode": "restart"},
        ("eviction", 2, A, None, None),
    ),
    "eviction_twice": (
        {}, ({A: 3}, {B: 2}), {"evict": {1: [A, A]}, "evict_mode": "restart"},
        ("eviction", 1, A, None, None),
    ),
    "recompute_in_rounds": (
        {}, ({A: 3}, {B: 2}), {"evict": {1: [A]}, "evict_mode": "recompute"},
        ("evict_mode", 1, A, None, None),
    ),
    "empty_batch": ({}, ({A: 3}, {}), {}, ("empty_batch", 1, None, None, None)),
    "start_before_the_worker_is_free": (
        {}, ({A: 3}, {A: 1}), {"start": [0, 0]},
        ("start", 1, None, 0, 1),
    ),
    "other_worker": (
        {}, ({A: 3}, {A: 1}), {"worker": [0, 1], "start": [0, 1]},
        ("worker", 1, A, 1, 0),
    ),
    "eviction_by_another_worker": (
        {}, ({A: 3}, {B: 2}), {"worker": [0, 1], "evict": {1: [A]}, "evict_mode": "restart"},
        ("eviction", 1, A, None, None),
    ),
    # A's batch lasts until 1, then worker 0 evicts it; worker 1 is free at 0, but A is not.
    "busy_elsewhere": (
        {}, ({A: 3}, {B: 2}, {A: 3}),
        {"worker": [0, 0, 1], "evict": {1: [A]}, "evict_mode": "restart"},
        ("start", 2, A, 0, 1),
    ),
    # Worker 0 holds A's KV until it evicts A at 5.
    "still_held_elsewhere": (
        {}, ({A: 3}, {B: 2}, {A: 3}),
        {
            "worker": [0, 0, 1], "start": [0, 5, 3],
            "evict": {1: [A]}, "evict_mode": "restart",
        },
        ("start", 2, A, 3, 5),
    ),
    "negative_worker": ({}, ({A: 3},), {"worker": [-1]}, ("worker", 0, None, -1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_every_rule_has_a_schedule_that_breaks_it_and_nothing_else(name: str) -> None:
    fields, rows, options, (rule, batch, request, value, limit) = BROKEN[name]
    instance = pair(**fields)
    schedule = batches(instance, *rows, **options)
    error = violation(instance, schedule)
    found = (error.rule, error.batch, error.request, error.value, error.limit)
    assert found == (rule, batch, request, value, limit), error
    assert set(slow_judge(instance, schedule).broken) == {rule}


def test_the_named_schedules_break_every_rule_of_the_judge() -> None:
    rules = {expected[0] for *_, expected in BROKEN.values()}
    assert rules == {
        "arrival", "kv_capacity", "max_batch_tokens", "max_prefill_tokens", "max_running",
        "hybrid_batching", "chunked_prefill", "tokens", "finished", "unfinished", "request",
        "eviction", "evict_mode", "empty_batch", "start", "worker",
    }  # fmt: skip
    # And "duplicate", which rows as dictionaries cannot say: A twice in batch 0, 1 + 2 tokens.
    instance = pair()
    twice = from_batches([0, 2], [A, A], [1, 2], instance=instance)
    error = violation(instance, twice)
    assert (error.rule, error.batch, error.request) == ("duplicate", 0, A)


def test_no_batch_starts_before_time_zero() -> None:
    instance = pair()
    error = violation(instance, batches(instance, {A: 3}, start=[-1]))
    assert (error.rule, error.batch, error.value, error.limit) == ("start", 0, -1, 0)


def test_a_worker_of_an_absurd_number_is_refused_without_memory_for_all_below_it() -> None:
    instance = pair()
    schedule = batches(instance, {A: 3}, worker=[10**15])
    error = violation(instance, schedule)
    assert (error.rule, error.batch, error.value) == ("worker", 0, 10**15)


# Starts of A and B; round, value and limit of what breaks.
BROKEN_STARTS = {
    "arrival": ({"arrival": [0, 1]}, [0, 0], ("arrival", None, B, 0, 1)),
    # Round 2: A holds 3 + 2 and completes, B holds 2 + 2.
    "kv_generated": ({"kv_capacity": 8}, [0, 0], ("kv_capacity", 2, None, 9, 8)),
    "kv_cached": (
        {"kv_capacity": 6, "kv_accounting": "cached"}, [0, 0], ("kv_capacity", 2, None, 7, 6),
    ),
    # B at 1: round 2 holds A 3 + 2 and B 2 + 1.
    "kv_of_a_prefill_beside_a_decode": (
        {"kv_capacity": 7}, [0, 1], ("kv_capacity", 2, None, 8, 7),
    ),
    "max_running": ({"limits": Limits(None, None, 1)}, [0, 1], ("max_running", 2, None, 2, 1)),
    "max_batch_tokens": ({"limits": Limits(4)}, [0, 0], ("max_batch_tokens", 1, None, 5, 4)),
    # Round 2: B's prompt of 2 and one decode.
    "max_batch_tokens_with_a_decode": (
        {"limits": Limits(2)}, [3, 4], ("max_batch_tokens", 4, None, 3, 2),
    ),
    "max_prefill_tokens": (
        {"limits": Limits(None, 4)}, [0, 0], ("max_prefill_tokens", 1, None, 5, 4),
    ),
    "hybrid": ({"hybrid_batching": False}, [0, 1], ("hybrid_batching", 2, None, 1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_STARTS)
def test_every_rule_of_rounds_has_starts_that_break_it(name: str) -> None:
    # The slow judge of tests/slow_judge.py, which shares no code with the judge, finds that rule,
    # too.
    fields, starts, (rule, batch, request, value, limit) = BROKEN_STARTS[name]
    instance = pair(**fields)
    schedule = from_starts(starts, instance)
    error = violation(instance, schedule)
    found = (error.rule, error.batch, error.request, error.value, error.limit)
    assert found == (rule, batch, request, value, limit), error
    assert rule in slow_judge(instance, schedule).broken


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (([0, 1], [A], [3, 1], {}), "tokens: found 2 values; expected 1, as many as request has"),
        (
            ([0, 2], [A], [3], {}),
            "expected offsets that rise from 0 to the column's length 1",
        ),
        (([1, 1], [A], [3], {}), "batch_offsets"),
        (([0, 2, 1, 2], [A, B], [3, 2], {}), "batch_offsets"),
        (([], [], [], {}), "batch_offsets"),
        (([0, 1], [A], [3], {"evicted_offsets": [0], "evicted": []}), "evicted_offsets"),
        (([0, 1], [A], [3], {"evicted_offsets": [0, 1], "evicted": []}), "evicted_offsets"),
        (([0, 1], [A], [3], {"start": [0, 1]}), "start: found 2 values; expected 1"),
        (([0, 1], [A], [3], {"worker": []}), "worker: found 0 values; expected 1"),
        (([0, 1], [0.5], [3], {}), "request: found float64 values; expected integers"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(options, text: str) -> None:
    offsets, request, tokens, more = options
    with pytest.raises(InputError, match=text):
        from_batches(offsets, request, tokens, instance=pair(), **more)


def test_what_cannot_be_judged_is_an_input_error() -> None:
    """A schedule of another size, instance, unit or cost model, an SLO of 0, starts in seconds,
    and no number."""
    instance = pair()
    good = batches(instance, *WHOLE)
    with pytest.raises(InputError, match="expected 2, one per request"):
        evaluate(instance, from_starts([0], instance))
    with pytest.raises(InputError, match="another instance's"):
        evaluate(pair(kv_capacity=41), good)
    with pytest.raises(UsageError, match="expected none, or an instance in seconds"):
        evaluate(Problem(instance, LINEAR), good)
    with pytest.raises(InputError, match="slo_ttft"):
        evaluate(Problem(instance, slo_ttft=0), good)
    seconds = pair(time_unit="second")
    # WHOLE with the digest of LINEAR: it needs a cost model, and no other one.
    made = batches(seconds, *WHOLE, cost_model_sha256=LINEAR.sha256)
    with pytest.raises(UsageError, match="expected one, shipped are"):
        evaluate(seconds, made)
    with pytest.raises(InputError, match="another cost model's"):
        evaluate(Problem(seconds, TIMED), made)
    with pytest.raises(InputError, match=r"found .starts. for an instance in seconds"):
        evaluate(Problem(seconds, LINEAR), from_starts([0, 0], seconds))
    with pytest.raises(InputError, match="finite"):
        evaluate(Problem(seconds, LINEAR), batches(seconds, *WHOLE, start=[0.0, math.nan, 9.0]))


def test_metrics_by_hand_in_rounds() -> None:
    """Times, KV and every metric of three requests by hand; counts are integers; a pause is
    outside the model."""
    # A: at 0, s 3, o 2. B: at 1, s 2, o 3. C: at 1, s 1, o 1. B pauses in batch 2.
    instance = Instance([0, 1, 1], [3, 2, 1], [2, 3, 1], kv_capacity=40)
    found = evaluate(
        Problem(instance, slo_ttft=2, slo_tpot=1),
        batches(instance, {0: 3}, {0: 1, 1: 2}, {2: 1}, {1: 1}, {1: 1}),
    )
    # Batches end at 1, ..., 5. A has its tokens with the first two, C with the third, and B with
    # the second, the fourth and the fifth.
    assert found.first_token.tolist() == [1, 2, 3]
    assert found.finish.tolist() == [2, 5, 3]
    assert found.latency.tolist() == [2, 4, 2]
    assert found.ttft.tolist() == [1, 1, 2]
    # A: (2 - 1) / 1; B: (5 - 2) / 2; C has one token.
    assert found.tpot[:2].tolist() == [1.0, 1.5]
    assert math.isnan(found.tpot[2])
    # 3+1; 4+1 and 2+1; 3 kept, 1+1 (B's newest counts: 2+1); 3+1; 4+1.
    assert found.batch_kv.tolist() == [4, 8, 5, 4, 5]
    assert found.metrics == pytest.approx(
        {
            "tel": 8,
            "mean_latency": 8 / 3,
            "p50_latency": 2,
            "p90_latency": 3.6,  # 2, 2, 4: at place 0.9 * 2 = 1.8
            "p99_latency": 3.96,  # at place 0.99 * 2 = 1.98
            "mean_ttft": 4 / 3,
            "p50_ttft": 1,
            "p90_ttft": 1.8,  # 1, 1, 2
            "p99_ttft": 1.98,  # at place 1.98, too
            "mean_tpot": 1.25,
            "p99_tpot": 1.495,  # 1, 1.5: at place 0.99
            "max_tpot": 1.5,
            "p99_gap": 1.99,  # A: 1; B: tokens at 2, 4, 5, so 2
            "max_gap": 2,
            "mean_queuing_delay": 1 / 3,  # C begins at 2
            "p99_queuing_delay": 0.98,  # 0, 0, 1: at place 1.98
            "mean_waiting": 2 / 3,  # C once, B once while C runs
            "makespan": 5,
            "max_stretch": 2,  # C, 2 rounds for one token; A has 2 / 2 and B 4 / 3
            "tps": 6 / 5,
            "peak_kv": 8,
            "mean_kv": 26 / 5,  # 4 + 8 + 5 + 4 + 5, from above
            "batches": 5,
            "evictions": 0,
            "slo_attainment": 2 / 3,  # B misses 1 round per token; C has no TPOT to miss
            "slo_goodput": 2 / 5,
        }
    )
    assert tuple(found.metrics) == tuple(
        name
        for name in METRICS
        if not {"reuse", "moves", "session_completion", "weight"} & {*TABLE[name].needs}
    )
    assert all(isinstance(found.metrics[k], int) for k in ("tel", "makespan", "peak_kv"))
    # B held KV while its worker ran C.
    assert found.pauses.tolist() == [0, 1, 0]
    assert found.outside_reason is not None
    assert "pauses" in str(found.outside_reason)


def test_metrics_by_hand_in_seconds() -> None:
    """Times, KV and waits of two requests by hand, then each metric that seconds change."""
    # A batch of c tokens takes c + 1 s. A at 0.5, B at 2; both in batch 1.
    instance = pair(arrival=[0.5, 2.0], time_unit="second", kv_accounting="cached")
    schedule = batches(instance, {A: 3}, {A: 1, B: 2}, {B: 1}, {B: 1})
    found = evaluate(Problem(instance, LINEAR, slo_ttft=4.0, slo_tpot=3.0), schedule)
    # [0.5, 4.5], [4.5, 8.5], [8.5, 10.5], [10.5, 12.5]
    assert found.batch_start.tolist() == [0.5, 4.5, 8.5, 10.5]
    assert found.batch_end.tolist() == [4.5, 8.5, 10.5, 12.5]
    assert found.first_token.tolist() == [4.5, 8.5]
    assert found.finish.tolist() == [8.5, 12.5]  # A with batch 1, B with batch 3
    assert found.tpot.tolist() == [4.0, 2.0]  # (8.5 - 4.5) / 1 and (12.5 - 8.5) / 2
    assert found.batch_kv.tolist() == [3, 4 + 2, 3, 4]  # without the newest token: "cached"
    metrics = found.metrics
    assert metrics["tel"] == 8.0 + 10.5  # 8.5 - 0.5 and 12.5 - 2
    assert metrics["mean_ttft"] == (4.0 + 6.5) / 2  # 4.5 - 0.5 and 8.5 - 2
    # Both run without a break; B from 4.5 on.
    assert found.queuing_delay.tolist() == found.waiting.tolist() == [0.0, 2.5]
    assert metrics["makespan"] == 12.5
    assert metrics["tps"] == pytest.approx(5 / 12.0)  # from the first arrival, 0.5
    # 3 for 4 s, 6 for 4 s, 3 for 2 s, 4 for 2 s.
    assert metrics["mean_kv"] == pytest.approx((12 + 24 + 6 + 8) / 12)
    assert metrics["slo_attainment"] == 0.0  # A: TPOT 4 > 3; B: TTFT 6.5 > 4
    assert (
        evaluate(Problem(instance, LINEAR, slo_ttft=6.5), schedule).metrics["slo_attainment"] == 1.0
    )
    assert evaluate(Problem(instance, LINEAR), schedule).metrics["slo_goodput"] is None


def test_every_term_of_the_cost_model_counts_as_defined() -> None:
    # One decode of m = 3 beside a chunk c = 2 onto m = 1 and a whole prompt c = 4, m = 0:
    # layers 3 * ( 1.5 * 7 + 7
    #            + 0.25 * 3 + 2 * 1 + 11
    #            + 0.125 * (4 + 16) + 0.375 * 2 * 1 + 0.0625 * 1 + 0.5 * 6 + 3 * 2 + 13 ) ms
    instance = Instance([0.0] * 3, [3, 5, 4], [2, 1, 1], kv_capacity=99, time_unit="second")
    rows = ({0: 3}, {1: 1}, {0: 1, 1: 2, 2: 4}, {1: 2})
    eleven = {  # a term that is added later has a test of its own
        name: TIMED.coefficients[name]
        for name in (
            "token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square",
            "prefill_cross", "prefill_kv", "prefill_token", "prefill_request", "prefill_base",
        )
    }  # fmt: skip
    cost = BatchCost("eleven", 3, eleven)
    found = evaluate(Problem(instance, cost), batches(instance, *rows))
    lasted = found.batch_end - found.batch_start
    # The same, summed by coefficient: base and tokens 17.5, decodes 13.75, then prefills' terms.
    assert lasted[2] == pytest.approx(
        3 * (17.5 + 13.75 + 2.5 + 0.75 + 0.0625 + 3.0 + 6.0 + 13.0) / 1000
    )


# Each limit of validity and what the schedule below comes to.
EXTREMES = {
    "max_batch_tokens": 9,  # 1 + 1 + 7
    "min_prefill_chunk_tokens": 2,  # chunks of 3, 2, 4, 7 and 3 tokens
    "max_prefill_chunk_tokens": 7,
    "min_decode_requests": 1,  # 2 and 1, and in two batches none
    "max_decode_requests": 2,
    "max_request_kv_tokens": 7,  # decodes over 5, 4 and 6; chunks over 3 and 7
    "max_kv_tokens": 13,  # 3, 5 + 4, 6 + 7
}


@pytest.mark.parametrize("name", EXTREMES)
def test_a_schedule_is_outside_a_range_that_is_narrower_by_one(name: str) -> None:
    # At EXTREMES[name] the model holds and nothing is said; one less of a most, or one more of a
    # least, is warned of in its words.
    instance = Instance([0.0] * 3, [5, 4, 10], [3, 2, 1], kv_capacity=99, time_unit="second")
    rows = ({0: 3}, {0: 2, 1: 4}, {0: 1, 1: 1, 2: 7}, {0: 1, 2: 3})
    for limit, words in ((EXTREMES[name], []), (EXTREMES[name] + (-1, 1)["min" in name], [name])):
        cost = BatchCost(f"valid to {limit}", 1, {"base": "1"}, valid={name: limit})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            evaluate(Problem(instance, cost), batches(instance, *rows))
        assert [str(one.message) for one in caught] == [
            f"cost model {cost.name!r} is used outside its range of validity: "
            + WORDS[one].format(limit)
            for one in words
        ]


def test_a_restart_loses_tokens_and_a_recompute_keeps_them() -> None:
    # One request, s 2, o 3, evicted before batch 2, having produced two tokens.
    instance = Instance([0.0], [2], [3], kv_capacity=9, time_unit="second")
    head, gone = ({0: 2}, {0: 1}), {2: [0]}
    kept = evaluate(Problem(instance, LINEAR), batches(instance, *head, {0: 4}, evict=gone))
    # 3 s, 2 s, then prompt and two tokens again in 5 s, which produces the third.
    assert (kept.first_token[0], kept.finish[0]) == (3.0, 10.0)
    # Two tokens after the first in 10 - 3 s: 7 / 2 = 3.5.
    assert kept.tpot[0] == 3.5
    lost = evaluate(
        Problem(instance, LINEAR),
        batches(instance, *head, {0: 2}, {0: 1}, {0: 1}, evict=gone, evict_mode="restart"),
    )
    # From nothing at 5 s: 3 s, 2 s, 2 s; the first token that counts comes at 8.
    assert (lost.first_token[0], lost.finish[0]) == (8.0, 12.0)
    # (12 - 8) / 2 = 2.
    assert lost.tpot[0] == 2.0
    assert kept.metrics["evictions"] == lost.metrics["evictions"] == 1
    assert lost.first_start[0] == 0.0
    # Each mode refuses the other's refill.
    with pytest.raises(ViolationError, match="at most the 2 left of its input"):
        evaluate(
            Problem(instance, LINEAR),
            batches(instance, *head, {0: 4}, evict=gone, evict_mode="restart"),
        )


def test_a_restart_in_rounds_is_covered_and_idle_time_with_kv_is_not() -> None:
    instance = Instance([0], [2], [2], kv_capacity=9)
    again = batches(instance, {0: 2}, {0: 2}, {0: 1}, evict={1: [0]}, evict_mode="restart")
    assert evaluate(instance, again).outside_reason is None
    # B waits while A prefills, decodes, and starts again after batch 2, now without a pause.
    two = pair()
    rows = ({B: 2}, {A: 3}, {B: 1, A: 1}, {B: 2}, {B: 1}, {B: 1})
    lost = evaluate(two, batches(two, *rows, evict={3: [B]}, evict_mode="restart"))
    assert lost.pauses.tolist() == [0, 0]
    assert lost.outside_reason is None
    # Batch 1 starts at 4 and the prefill ends at 1, so for three rounds KV is held and nothing
    # runs.
    waiting = evaluate(instance, batches(instance, {0: 2}, {0: 1}, start=[0, 4]))
    assert waiting.finish[0] == 5
    assert waiting.pauses[0] == 1
    assert waiting.outside_reason is not None


def test_a_schedule_outside_the_model_of_uninterrupted_runs_says_why() -> None:
    two = pair()
    apart = batches(two, {A: 3}, {B: 2}, {A: 1}, {B: 1}, {B: 1}, worker=[0, 1, 0, 1, 1])
    found = evaluate(two, apart)
    assert found.workers == 2
    assert found.finish.tolist() == [2, 3]  # two batches on worker 0, three on worker 1
    assert outside_reason(found, Problem(two)) == "it uses 2 workers"
    # A's prompt of 3 comes in 2 and 1 tokens, as `tight` has 2 prompt tokens a batch at most.
    rows = ({A: 2}, {A: 1}, {A: 1, B: 2}, {B: 1}, {B: 1})
    assert evaluate(two, batches(two, *rows)).outside_reason is None  # no limit of tokens
    tight = pair(limits=Limits(None, 2))
    assert "splits prefills" in str(evaluate(tight, batches(tight, *rows)).outside_reason)
    seconds = pair(time_unit="second")
    judged = evaluate(Problem(seconds, LINEAR), batches(seconds, *rows))
    assert judged.outside_reason is None  # there, bounds cover every schedule


def test_the_table_has_a_row_per_request_with_its_external_id() -> None:
    instance = pair(id=["a", "b"])
    table = evaluate(instance, batches(instance, *WHOLE)).to_frame()
    assert table["id"].tolist() == ["a", "b"]
    # WHOLE ends A with its second batch, and B with its third.
    assert table["finish"].tolist() == [2, 3]
    assert table["latency"].tolist() == [2, 3]


def test_starts_a_billion_rounds_apart_need_no_long_array() -> None:
    far = 10**9
    instance = Instance([0, far, 2 * far], [3, 2, 1], [2, 3, 1], kv_capacity=6)
    found = evaluate(instance, from_starts([0, far, 2 * far], instance))
    assert found.finish.tolist() == [2, far + 3, 2 * far + 1]
    # Nobody waits, so the latencies are the outputs: 2 + 3 + 1, which are as many rounds with a
    # batch.
    assert found.metrics["tel"] == 6
    assert found.metrics["batches"] == 6
    # 4 + 5, 3 + 4 + 5, 2 over six busy rounds.
    assert found.metrics["mean_kv"] == pytest.approx(23 / 6)


def as_batches(instance: Instance, starts: list[int]) -> Schedule:
    """Return the batches that uninterrupted runs mean, round by round."""
    rows: dict[int, dict[int, int]] = {}
    for i, k in enumerate(starts):
        for j in range(int(instance.output_tokens[i])):
            rows.setdefault(k + j, {})[i] = int(instance.prompt_tokens[i]) if j == 0 else 1
    times = sorted(rows)
    return batches(instance, *(rows[t] for t in times), start=times, evict_mode="restart")


def outcome(instance: Instance, schedule: Schedule) -> Evaluation | ViolationError:
    """Return the evaluation of a schedule, under TIMED in seconds, or the rule that it breaks."""
    try:
        return evaluate(Problem(instance, None if instance.in_rounds else TIMED), schedule)
    except ViolationError as error:
        return error


def random_starts(rng: Random, instance: Instance) -> list[int]:
    """Return starts up to 0, 2, 8 or 40 rounds after the arrivals."""
    slack = rng.choice([0, 2, 8, 40])
    return [int(a) + rng.randint(0, slack) for a in instance.arrival]


@pytest.mark.parametrize("numbers", parts(500, 5000))
def test_starts_and_the_same_runs_as_batches_are_judged_alike(numbers: range) -> None:
    """Starts against `slow_judge`, and against the judge's replay of the batches that they mean."""
    rng = Random(numbers.start)
    for _ in numbers:
        instance = random_instance(rng, unit="round")
        starts = random_starts(rng, instance)
        by_starts, by_batches = from_starts(starts, instance), as_batches(instance, starts)
        slow = slow_judge(instance, by_starts)
        found = outcome(instance, by_starts)
        if isinstance(found, ViolationError):
            # The sweep looks at one rule after another, the replay at one batch after another.
            at = (found.batch, found.request if found.rule == "arrival" else None)
            assert at in slow.broken[found.rule], (found, instance.to_dict(), starts)
            assert found.rule != "kv_capacity" or found.value == slow.kv[found.batch]
            with pytest.raises(ViolationError) as caught:
                evaluate(instance, by_batches)
            assert caught.value.rule in slow.broken
            continue
        assert not slow.broken, (slow.broken, instance.to_dict(), starts)
        assert found.finish.tolist() == slow.finish
        assert [None if math.isnan(t) else t for t in found.gap] == slow.gap
        twin = evaluate(instance, by_batches)
        assert found.metrics == pytest.approx(twin.metrics)
        assert found.outside_reason is None
        assert twin.outside_reason is None
        for name in ("first_start", "first_token", "finish", "waiting", "evictions", "pauses"):
            assert getattr(found, name).tolist() == getattr(twin, name).tolist()


@pytest.mark.parametrize("numbers", parts(400, 4000))
def test_the_slow_judge_agrees_on_good_and_corrupted_schedules(numbers: range) -> None:
    """`slow_judge` finds the rule that breaks at that batch, or the same times and KV."""
    rng = Random(numbers.start)
    for _ in numbers:
        instance = random_instance(rng)
        schedule = random_batches(rng, instance)
        if schedule.batches == 0:
            continue
        for case in (schedule, corrupted(rng, instance, schedule)):
            slow = slow_judge(instance, case, layers=TIMED.layers, coefficients=TIMED.coefficients)
            found = outcome(instance, case)
            story = (slow.broken, found, instance.to_dict(), case.to_dict())
            if isinstance(found, ViolationError):
                where = [j for j, _ in slow.broken.get(found.rule, [])]
                assert found.rule in slow.broken, story
                assert found.rule == "unfinished" or found.batch in where, story
                continue
            assert not slow.broken, story
            assert found.finish == pytest.approx([float(t) for t in slow.finish], rel=1e-9)
            assert found.first_token == pytest.approx(
                [float(t) for t in slow.first_token], rel=1e-9
            )
            assert found.served == pytest.approx([float(t) for t in slow.served], rel=1e-9)
            gaps = [math.nan if t is None else float(t) for t in slow.gap]
            assert found.gap == pytest.approx(gaps, rel=1e-9, abs=1e-9, nan_ok=True)
            assert found.batch_kv.tolist() == list(slow.kv.values()), story


def test_random_schedules_are_mostly_good_before_they_are_corrupted() -> None:
    rng = Random(7)
    rules: dict[str | None, int] = {}
    for _ in range(300):
        instance = random_instance(rng)
        schedule = random_batches(rng, instance)
        if schedule.batches:
            found = outcome(instance, schedule)
            rule = found.rule if isinstance(found, ViolationError) else None
            rules[rule] = rules.get(rule, 0) + 1
    # Nothing but endless ones may break a rule; the comparison above is not of errors alone.
    assert set(rules) <= {None, "unfinished"}, rules
    assert rules[None] > 150, rules  # over half of 300


def test_the_compiled_replay_and_its_source_find_the_same(monkeypatch) -> None:
    """Compiled and as Python: the same error in all its fields, or the same columns and metrics."""
    rng = Random(11)
    cases = []
    for _ in range(60):
        instance = random_instance(rng)
        schedule = random_batches(rng, instance)
        if schedule.batches:
            cases += [(instance, schedule), (instance, corrupted(rng, instance, schedule))]
    compiled = [outcome(*case) for case in cases]
    # Some 20 errors and 20 evaluations are compared.
    assert 20 < sum(isinstance(fast, ViolationError) for fast in compiled) < len(cases) - 20
    for name, value in vars(optsched.judge.replay).items():
        if hasattr(value, "py_func"):
            monkeypatch.setattr(optsched.judge.replay, name, value.py_func)
    for case, fast in zip(cases, compiled, strict=True):
        slow = outcome(*case)
        assert type(slow) is type(fast)
        if isinstance(fast, ViolationError):
            assert str(slow) == str(fast)
            assert vars(slow) == vars(fast)
        else:
            for name in ("first_start", "first_token", "finish", "served", "evictions", "pauses",
                         "batch_start", "batch_end", "batch_kv"):  # fmt: skip
                assert np.array_equal(getattr(slow, name), getattr(fast, name)), name
            assert slow.metrics == fast.metrics
