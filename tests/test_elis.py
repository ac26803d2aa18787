"""ELIS beside its schedulers: the iterative predictor, load and peak rate, the experiments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from optsched_studies.elis import LATENCY_S, TABLE_5, stretched, summarize_jct
from optsched_studies.rates import alone_latency, at_rate, full_rate, peak_rate

from optsched import Problem, run
from optsched.costs.cost import BatchCost
from optsched.costs.load import load_cost_model
from optsched.experiments.runner import run_experiment
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict

LLAMA = "llama2-7b-a100-infermax"
# A batch of c tokens takes c + 1 s.
LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""


def seconds(*columns: list, capacity: int = 1000) -> Instance:
    """Return an instance in seconds: arrivals, prompts, outputs; M = 1000 tokens."""
    return Instance(*columns, capacity, time_unit="second", kv_accounting="cached")


# --- the predictor ------------------------------------------------------------------------------


def errors(instance: Instance, spec: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the error of every prediction, and after how many windows it was made."""
    forecast = predict(instance, spec, seed=2).forecast
    assert forecast is not None
    counts = np.diff(forecast.offsets)
    past = np.arange(forecast.offsets[-1]) - np.repeat(forecast.offsets[:-1], counts)
    left = np.repeat(instance.output_tokens, counts) - forecast.every * past
    return forecast.remaining - left, past


@pytest.fixture(scope="module")
def lengths() -> Instance:
    """60,000 requests with lognormal outputs, whose predictions are compared with the truth."""
    return generate("lognormal", seed=3, n=60_000)


def test_the_errors_are_those_that_the_paper_reports(lengths: Instance) -> None:
    # Section 4.2 of the paper, to which the predictor's two parameters are fitted.
    error, _ = errors(lengths, "elis")
    assert np.abs(error).mean() == pytest.approx(19.923, rel=0.015)
    assert np.sqrt((error**2).mean()) == pytest.approx(34.327, rel=0.03)


def test_the_error_falls_with_every_window(lengths: Instance) -> None:
    error, past = errors(lengths, "elis")
    by_window = [np.abs(error[past == k]).mean() for k in range(10)]
    assert by_window == sorted(by_window, reverse=True)
    # The paper shows in Figure 2b that it falls; 23.1 in the first window and 11.3 in the seventh
    # (less than half) is what the docstring of the predictor says.
    assert by_window[0] == pytest.approx(23.1, rel=0.02)
    assert by_window[6] < by_window[0] / 2


def test_predictions_are_at_least_a_token_and_one_per_window() -> None:
    instance = seconds([0, 0, 0], [1, 1, 1], [1, 50, 51])
    forecast = predict(instance, "elis:error=50", seed=1).forecast
    assert forecast is not None
    assert forecast.offsets.tolist() == [0, 1, 2, 4]  # ceil(o / 50)
    assert forecast.remaining.min() == 1.0
    # With windows of 7 tokens 1, 50 and 51 tokens are 1, 8 and 8 windows.
    assert (predict(instance, "elis:window=7").forecast.offsets == [0, 1, 9, 17]).all()


def test_without_error_the_forecast_is_the_truth() -> None:
    instance = generate("lognormal", seed=5, n=300, rate=100.0)
    oracle = simulate(Problem(instance, LLAMA), "isrtf")
    told = simulate(Problem(instance, LLAMA), "isrtf:predictor=elis,predictor.error=0")
    assert np.array_equal(oracle.request, told.request)


def test_a_worse_predictor_makes_isrtf_worse() -> None:
    instance = generate("lognormal", seed=6, n=600, rate=100.0, arrivals="gamma")
    mean = []
    for error in (0, 1, 10):
        spec = f"isrtf:predictor=elis,predictor.error={error}"
        found = simulate(Problem(instance, LLAMA), spec)
        mean.append(evaluate(Problem(instance, LLAMA), found).metrics["mean_latency"])
    assert mean == sorted(mean)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("elis:window=0", "window: found 0; expected an integer >= 1"),
        ("elis:error=-1", "error: found -1; expected a factor >= 0"),
        ("elis:decay=0", "decay: found 0; expected 0 < decay <= 1"),
        ("elis:decay=1.5", "decay: found 1.5; expected 0 < decay <= 1"),
        ("elis:mae=3", "parameter 'mae' is unknown; known are window, error, decay"),
    ],
)
def test_a_predictor_that_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predict(seconds([0], [1], [1]), spec)


# --- load and peak rate -------------------------------------------------------------------------


def test_alone_latency_is_that_of_the_request_on_its_own() -> None:
    # s 3, o 3: 3 + 1, then twice 1 + 1 seconds.
    assert alone_latency(seconds([0], [3], [3]), LINEAR).tolist() == [4 + 2 + 2]
    instance = generate("lognormal", seed=1, n=8)
    for cost in (LLAMA, "llama2-7b-a100-fit"):
        alone = alone_latency(instance, cost)
        for i in range(instance.n):
            one = replace(instance.subset([i]), arrival=[0.0])
            judged = run(Problem(one, cost), "isrtf").evaluation
            assert alone[i] == pytest.approx(judged.latency[0], rel=1e-12)
    rounds = Instance([0, 0], [9, 9], [4, 7], 100)
    assert alone_latency(rounds).tolist() == [4, 7]


def test_full_load_is_batch_size_over_mean_latency() -> None:
    # 8 and 4 seconds alone: 4 / 6 requests per second.
    instance = seconds([0, 0], [3, 3], [3, 1])
    assert full_rate(instance, 4, LINEAR) == pytest.approx(4 / 6)
    with pytest.raises(InputError, match="batch_size: found 0"):
        full_rate(instance, 0, LINEAR)


def test_stretching_keeps_the_pattern_and_sets_the_rate() -> None:
    """Arrivals times one factor; no time to stretch, rounds, and rates that are none are
    refused."""
    moved = at_rate(seconds([1, 2, 5], [1] * 3, [1] * 3), 0.3)
    assert moved.arrival.tolist() == pytest.approx([2, 4, 10])  # 3 requests in 10 s
    with pytest.raises(InputError, match="found only 0"):
        at_rate(seconds([0, 0], [1, 1], [1, 1]), 1.0)
    with pytest.raises(InputError, match=r"expected .second."):
        at_rate(Instance([1], [1], [1], 10), 1.0)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="rate: "):
            at_rate(moved, rate)


def test_the_peak_rate_of_a_single_server_in_closed_form() -> None:
    """The rate, the delay there, that the next rate is refused, and that of two servers."""
    # Arrivals at d, 2 d, ..., n d; each request takes 4 s (s 3, o 1), one at a time. If d < 4 the
    # k-th waits k (4 - d), on average (n - 1) / 2 (4 - d): 0.5 s at d = 4 - 1 / (n - 1).
    n = 11
    instance = seconds(list(range(1, n + 1)), [3] * n, [1] * n)
    found = peak_rate("isrtf:batch_size=1", instance, LINEAR, tolerance=1e-6)
    assert found.rate == pytest.approx(1 / (4 - 1 / (n - 1)), rel=1e-5)
    assert found.rate < found.above <= found.rate * (1 + 1e-6)
    assert found.delay[0] == pytest.approx(0.5, rel=1e-3)
    # Two workers serve every other request each. They wait 0 to 5 and 0 to 4 times 4 - 2 d, 25 / 11
    # of it on average: 0.5 s at d = 1.89. The rate is 0.529, and over 1.9 times 1 / 3.9 = 0.256.
    both = peak_rate("isrtf:batch_size=1,workers=2", instance, LINEAR, tolerance=1e-6)
    assert both.rate > 1.9 * found.rate


def test_the_peak_is_of_the_mean_over_instances() -> None:
    cases = [generate("lognormal", seed=k, n=100, arrivals="gamma") for k in range(3)]
    each = [peak_rate("isrtf", case, LLAMA).rate for case in cases]
    found = peak_rate("isrtf", cases, LLAMA)
    assert min(each) <= found.rate <= max(each)
    assert found.delay.shape == (3,)  # one delay for each instance
    # A peak rate is the largest with a mean queuing delay of 0.5 s.
    assert found.delay.mean() <= 0.5


def test_no_peak_is_said_to_be_none() -> None:
    few = seconds([1, 2], [3, 3], [1, 1])
    # Two workers and two requests: nobody waits at any rate.
    with pytest.raises(InputError, match=r"stays below it .* expected more requests"):
        peak_rate("isrtf:workers=2", few, LINEAR)
    # Both come at once at any rate: the second waits 3 + 1 s, half of that on average.
    together = seconds([1, 1], [3, 3], [1, 1])
    with pytest.raises(InputError, match=r"stays above it .* expected a larger limit"):
        peak_rate("isrtf:batch_size=1", together, LINEAR)  # the second always waits 4 s
    for options, text in (
        ({"max_delay_s": 0.0}, "max_delay_s: found 0.0"),
        ({"tolerance": -1.0}, "tolerance: found -1.0"),
    ):
        with pytest.raises(InputError, match=text):
            peak_rate("isrtf", few, LINEAR, **options)
    with pytest.raises(InputError, match="found an empty list"):
        peak_rate("isrtf", [], LINEAR)
    with pytest.raises(UsageError, match="cost model"):
        peak_rate("isrtf", Instance([0, 1], [1, 1], [1, 1], 10), LLAMA)


# --- the experiments ----------------------------------------------------------------------------


def test_a_stretched_cost_model_has_the_latency_asked_for() -> None:
    # 8.6102 s is the mean latency of Llama-2-13B alone in Table 4 of the paper.
    base = load_cost_model(LLAMA)
    slow = stretched(base, 8.6102)
    instance = generate("lognormal", seed=9, n=50)
    ratio = alone_latency(instance, slow) / alone_latency(instance, base)
    # All times are stretched by one factor. Over 20,000 other requests the mean is near what was
    # asked for.
    assert np.ptp(ratio) < 1e-9
    everyone = generate("lognormal", seed=10, n=20_000)
    assert alone_latency(everyone, slow).mean() == pytest.approx(8.6102, rel=0.03)


def test_orders_of_the_paper_hold_in_small() -> None:
    settings = {"models": ["llama2-13b"], "draws": 2, "requests": 100, "batch_size": [4]}
    outcome = run_experiment("elis-jct", settings)
    # Three loads, two draws, three policies.
    assert len(outcome.rows) == 3 * 2 * 3
    assert not any(row["error"] for row in outcome.rows)
    for load in (1.0, 3.0, 5.0):
        jct = {
            policy: np.mean([r["jct_s"] for r in outcome.rows
                             if (r["policy"], r["load"]) == (policy, load)])
            for policy in ("elis-fcfs", "isrtf", "elis-sjf")
        }  # fmt: skip
        assert jct["isrtf"] < jct["elis-fcfs"]
        assert jct["elis-sjf"] < jct["elis-fcfs"]
    # What is not in the trials is not claimed.
    claims = {claim.what: claim for claim in outcome.claims}
    assert claims["JCT of isrtf, opt-13b at 1x, s"].ours is None
    assert claims["JCT of isrtf, llama2-13b at 1x, s"].ours is not None


def test_the_papers_own_figures_are_its_table() -> None:
    # "an average of 7.36 % and a maximum of 21.40 %": the largest is in the table; the average
    # of its 15 pairs is another figure.
    rows = [
        {"model": model, "load": load, "batch_size": 4, "policy": policy, "jct_s": value,
         "queuing_s": value}
        for model, table in TABLE_5.items()
        for load, row in zip((1.0, 3.0, 5.0), table, strict=True)
        for policy, value in zip(("elis-fcfs", "isrtf", "elis-sjf"), row, strict=True)
    ]  # fmt: skip
    claims = {claim.what: claim for claim in summarize_jct(rows)}
    least = claims["isrtf over FCFS, JCT, least"]
    assert least.ours == least.paper == pytest.approx(1 - 0.214, abs=1e-3)  # the 21.40 %
    assert set(TABLE_5) == set(LATENCY_S)


def test_peaks_grow_with_the_workers() -> None:
    settings = {"workers": [2, 4], "draws": 2, "requests_per_worker": 50}
    rows = run_experiment("elis-scaling", settings).rows
    assert not any(row["error"] for row in rows)
    # A peak rate is the largest with a mean queuing delay of 0.5 s.
    assert all(row["delay_s"] <= 0.5 for row in rows)
    two, four = ([r["peak"] for r in rows if r["workers"] == w] for w in (2, 4))
    assert np.mean(four) > 1.5 * np.mean(two)  # twice the workers: towards 2, and not 1


@pytest.mark.slow
def test_the_experiments_at_their_size() -> None:
    rows = run_experiment("elis-jct", {"draws": 5}).rows
    jct = {
        policy: np.array([r["jct_s"] for r in rows if r["policy"] == policy]).reshape(-1, 5)
        for policy in ("elis-fcfs", "isrtf", "elis-sjf")
    }
    # Every model, batch size and load: ISRTF far below FCFS, and close to the oracle.
    # Far below is 40 % less, and close is within 15 %.
    assert (jct["isrtf"].mean(axis=1) < 0.6 * jct["elis-fcfs"].mean(axis=1)).all()
    assert (jct["isrtf"].mean(axis=1) < 1.15 * jct["elis-sjf"].mean(axis=1)).all()
    claims = {c.what: c for c in run_experiment("elis-scaling", {"draws": 2}).claims}
    for what in ("R2 of peaks on workers", "growth of the peak from 10 to 50 workers, over 5"):
        assert replace(claims[what], comparable=True).verdict
