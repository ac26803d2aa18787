"""TRAIL's experiments: what they pair, what they claim, and that they run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from optsched_studies.trail import (
    POLICIES,
    SETTINGS,
    errors,
    mean,
    ratio,
    summarize_c,
    summarize_predictions,
    summarize_rates,
    workload,
)

from optsched.experiments.runner import run_experiment
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance


def c_row(draw: int, c: float, latency: float) -> dict:
    """Return a row of a run: mean KV grows with C, and peak KV falls."""
    return {
        "setting": "seats", "keep": True, "draw": draw, "c": c, "mean_latency_s": latency,
        "mean_ttft_s": 1.0 + c, "mean_kv": 100 + c, "peak_kv": 100 - c,
    }  # fmt: skip


def test_ratios_are_of_the_same_draw() -> None:
    # 2 / 1 and 30 / 10: mean 2.5, standard error 0.5, t(1) = 12.7062047.
    rows = [c_row(0, 1, 2), c_row(0, 0.8, 1), c_row(1, 0.8, 10), c_row(1, 1, 30)]
    found = ratio(rows, "mean_latency_s", {"c": 1}, {"c": 0.8})
    assert found is not None
    assert (found.mean, found.half_width) == pytest.approx((2.5, 12.7062047 / 2))
    assert mean(rows, "mean_latency_s", c=0.5) is None
    assert mean(rows[:2], "mean_latency_s", c=1) is None  # an interval needs two draws


def test_claims_about_c_hold_as_the_paper_orders_it_and_not_else() -> None:
    # As in the paper, 0.8 is the best C, and three draws say so alike.
    latency = {0.0: 9.0, 0.2: 3.0, 0.5: 2.0, 0.8: 1.0, 1.0: 4.0}
    rows = [c_row(k, c, v + 0.01 * k) for k in range(3) for c, v in latency.items()]
    verdicts = {claim.what: claim.verdict for claim in summarize_c(rows)}
    assert verdicts["seats, kept KV: C by mean latency"] is True
    assert verdicts["seats, kept KV: mean latency, C = 1 over 0.8"] is True
    assert verdicts["seats, kept KV: mean latency, C = 0.2 over 0.8"] is True
    # `c_row` has mean KV of 100 + C, which grows as claimed, and peak KV of 100 - C, which falls.
    assert verdicts["seats, kept KV: mean KV, C = 1 over 0.2"] is True
    assert verdicts["seats, kept KV: peak KV, C = 1 over 0.2"] is False
    # There are no rows of `memory`, so nothing is said of it.
    assert verdicts["memory, kept KV: C by mean latency"] is None
    # Now 0.8 is slower than 1.0.
    latency[0.8] = 5.0
    rows = [c_row(k, c, v) for k in range(3) for c, v in latency.items()]
    verdicts = {claim.what: claim.verdict for claim in summarize_c(rows)}
    assert verdicts["seats, kept KV: C by mean latency"] is False
    assert verdicts["seats, kept KV: mean latency, C = 1 over 0.8"] is False


def test_claims_about_rates_compare_policies_at_each_rate() -> None:
    """`trail-bert` goes by first predictions. Of what has no rows nothing is said: None."""
    latency = {"vllm-fcfs": 20.0, "vllm-sjf": 19.0, "trail": 10.0, "trail-bert": 11.0}
    rows = [
        {
            "setting": "memory", "draw": draw, "rate": rate, "policy": POLICIES[name],
            "mean_latency_s": value * (rate or 1), "mean_ttft_s": value,
        }
        for draw in range(2)
        for rate in (14.0, 20.0, None)
        for name, value in latency.items()
    ]  # fmt: skip
    claims = {claim.what: claim for claim in summarize_rates(rows)}
    found = claims["memory, trail: mean latency of vllm-fcfs over it"]
    assert (found.ours, found.verdict) == ("2.00 to 2.00", True)  # 20 / 10
    assert claims["memory: mean latency of vllm-fcfs over vllm-sjf"].verdict is True
    assert claims["memory, trail: mean latency of first predictions over it"].verdict is True
    assert claims["memory, burst, trail: mean TTFT of vllm-fcfs over it"].verdict is True
    assert claims["memory, trail-keep: mean latency of vllm-fcfs over it"].verdict is None
    assert claims["seats, trail: mean latency of vllm-fcfs over it"].verdict is None


def test_errors_count_every_token_that_a_request_has_produced() -> None:
    # 3 tokens: after 1 and 2, 2 and 1 are left. The forecast says 4 and 1: errors 2 and 0. The
    # first prediction, 5, leaves 4 and 3: errors 2 and 2.
    told = Instance([0], [1], [3], kv_capacity=9, forecast=Forecast(1, [0, 3], [5.0, 4.0, 1.0]))
    assert errors(told) == (1.0, 2.0)


def test_the_workload_is_the_same_at_every_rate() -> None:
    slow, fast, burst = (workload(500, rate, 20_000, 3) for rate in (10.0, 20.0, None))
    for other in (fast, burst):
        assert other.output_tokens.tolist() == slow.output_tokens.tolist()
        assert other.prompt_tokens.tolist() == slow.prompt_tokens.tolist()
    assert slow.arrival.tolist() == pytest.approx((2 * fast.arrival).tolist())
    assert not burst.arrival.any()
    assert slow.output_tokens.max() <= 512  # the longest of Alpaca


def test_the_experiments_run_and_keep_or_discard_what_is_preempted() -> None:
    small = {"draws": 2, "requests": 150, "max_running": 8, "seats_rate": 5.0, "both_rate": 5.0}
    outcome = run_experiment("trail-c", {**small, "memory_rate": 5.0, "c": [0.2, 1.0]})
    # Three settings, kept or not, two draws, two values of c.
    assert len(outcome.rows) == 3 * 2 * 2 * 2
    assert all(row["error"] is None for row in outcome.rows)
    # Where seats are short, kept KV is never lost, and discarded KV is; no run exceeds its KV.
    seats = [row for row in outcome.rows if row["setting"] == "seats"]
    assert all(row["evictions"] == 0 for row in seats if row["keep"])
    assert sum(row["evictions"] for row in seats if not row["keep"]) > 0
    assert all(row["peak_kv"] <= SETTINGS[row["setting"]] for row in outcome.rows)

    # All at once (no rate): more policies than at the rates.
    few = {"draws": 2, "requests": 60, "burst": 60, "max_running": 8}
    outcome = run_experiment("trail-rates", {**few, "seats_rates": [2.0], "memory_rates": [2.0]})
    burst = [row for row in outcome.rows if row["rate"] is None]
    assert {row["policy"] for row in burst} > set(POLICIES.values())
    assert all(row["error"] is None for row in outcome.rows)


def test_predictions_are_2_66_times_better_than_one_off_ones() -> None:
    outcome = run_experiment(
        "trail-predictions", {"draws": 3, "requests": 1500, "noise": [60.0], "bias": [0.21]}
    )
    # The paper's ratio is 2.66. Changed settings leave claims without a verdict, and as
    # `comparable` they have one.
    (once, raw, _) = (replace(claim, comparable=True) for claim in outcome.claims)
    assert (once.paper, once.verdict, raw.verdict) == (2.66, True, True)
    assert summarize_predictions([])[0].ours is None
    assert np.isfinite([row["printed"] for row in outcome.rows]).all()
