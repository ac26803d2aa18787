"""Mean latency and mean TTFT together: bounds, the curve between them, policies, pictures."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from test_batch_bounds import PLAIN, poisson

import optsched
from instances import MODEL
from optsched.bounds import lower_bound
from optsched.files.schemas import check_shape
from optsched.optimize.strategies import allowed_policies
from optsched.optimize.tradeoff import Tradeoff, TradeoffPoint, WeightedBound, tradeoff
from optsched.problem.errors import InputError, SolverError, UsageError
from optsched.problem.instance import Instance
from optsched.show import plot
from optsched.show.plot import style

ALONE = Instance([1.0], [3], [3], kv_capacity=5, time_unit="second", kv_accounting="cached")
BY_HAND = Tradeoff(
    ALONE,
    PLAIN,
    (WeightedBound(0.0, 10.0, "a"), WeightedBound(0.5, 8.0, "b"), WeightedBound(1.0, 2.0, "c")),
    (TradeoffPoint("mine", 12.0, 5.0),),
)


def test_the_curve_by_hand() -> None:
    # x >= 10, x / 2 + y / 2 >= 8, y >= 2: corners at (10, 6) and (14, 2).
    assert BY_HAND.curve() == [(10.0, 6.0), (14.0, 2.0)]
    assert BY_HAND.ttft_at(9.9) is None
    assert [BY_HAND.ttft_at(x) for x in (10.0, 12.0, 14.0, 99.0)] == [6.0, 4.0, 2.0, 2.0]
    data = BY_HAND.to_dict()
    check_shape("tradeoff", data)
    assert data["policies"][0]["mean_ttft_bound"] == 4.0
    assert "mean latency >= 10 s, mean TTFT >= 2 s" in repr(BY_HAND)
    assert "mine" in BY_HAND._repr_html_()


def test_a_curve_needs_neither_end() -> None:
    # Only 0.75 x + 0.25 y >= 6: y >= 24 - 3 x, which is 0 from x = 8 on.
    one = Tradeoff(ALONE, PLAIN, (WeightedBound(0.25, 6.0, "a"),), ())
    assert [one.ttft_at(x) for x in (0.0, 4.0, 8.0, 9.0)] == [24.0, 12.0, 0.0, 0.0]
    only = Tradeoff(ALONE, PLAIN, (WeightedBound(0.0, 6.0, "a"),), ())
    assert only.curve() == [(6.0, 0.0)]


def test_one_request_alone_meets_its_bounds() -> None:
    # Prefill 20 ms; two decodes of 16 ms each: 52 in all, and 36 with half of the weight on TTFT.
    found = tradeoff(ALONE, ["fcfs"], cost_model=PLAIN, weights=(0, 0.5, 1), time_limit_s=1)
    values = [one.value for one in found.bounds]
    assert values == pytest.approx([0.052, 0.036, 0.020], rel=1e-6)
    (point,) = found.points
    assert (point.mean_latency, point.mean_ttft) == pytest.approx((0.052, 0.020))
    assert found.curve() == [pytest.approx((0.052, 0.020), rel=1e-6)]


def test_no_policy_crosses_the_curve_and_it_says_more_than_ttft_alone() -> None:
    instance = poisson(30.0, n=400)
    slow = {"gba", "gsa", "sorted-f"}
    named = sorted(set(allowed_policies(instance)) - slow)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Bounds end by themselves here, after a second: no result depends on the time limit.
        found = tradeoff(instance, named, cost_model=MODEL, weights=(0, 0.5, 1), time_limit_s=300)
    assert len(found.points) > 10
    for point in found.points:
        floor = found.ttft_at(point.mean_latency)
        assert floor is not None
        assert floor <= point.mean_ttft
    alone, _ = lower_bound(
        instance, cost_model=optsched.load_cost_model(MODEL), objective="mean_ttft"
    )
    assert alone is not None
    joint = found.ttft_at(found.points[0].mean_latency)
    assert joint is not None
    assert joint > 1.5 * alone
    corners = np.array(found.curve())
    assert (np.diff(corners[:, 0]) > 0).all()
    assert (np.diff(corners[:, 1]) < 0).all()


def test_a_policy_beyond_the_curve_is_an_error(monkeypatch) -> None:
    from optsched.optimize import tradeoff as module

    monkeypatch.setattr(module, "_run", lambda *_: [TradeoffPoint("liar", 0.03, 0.01)])
    with pytest.raises(SolverError, match="liar"):
        tradeoff(ALONE, cost_model=PLAIN, time_limit_s=0)


def test_an_interruption_keeps_what_is_known() -> None:
    stop = threading.Event()
    stop.set()
    found = tradeoff(ALONE, cost_model=PLAIN, stop=stop)
    assert found.interrupted
    assert found.points == ()
    assert found.bounds[0].value == pytest.approx(0.052, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": ()}, "weights: found an empty list; expected at least one"),
        ({"weights": (0.5, -1)}, "ttft_weight: found -1.0; expected a weight from 0 to 1"),
        ({"time_limit_s": -1}, "time_limit: found -1; expected seconds >= 0"),
        ({"policies": ["nobody"]}, "nobody"),
    ],
)
def test_bad_input_is_refused(options, message: str) -> None:
    with pytest.raises((UsageError, InputError), match=message):
        tradeoff(ALONE, cost_model=PLAIN, **options)


def test_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="found an instance in rounds; expected one in seconds"):
        tradeoff(optsched.read_instance("tiny"))


def test_the_search_minimizes_the_weighted_sum() -> None:
    goal = "latency_and_ttft:ttft_weight=0.5"
    instance = optsched.read_instance("tiny-seconds")
    result = optsched.solve(instance, objective=goal, cost_model=MODEL, time_limit_s=1)
    fcfs = optsched.simulate(instance, "fcfs", MODEL)
    metrics = optsched.evaluate(instance, fcfs, MODEL, ttft_weight=0.5).metrics
    both = metrics["mean_latency"] / 2 + metrics["mean_ttft"] / 2
    assert metrics["latency_and_ttft"] == pytest.approx(both)
    assert result.method == "search"
    assert result.bound <= result.objective <= both
    assert optsched.bound(instance, objective=goal, cost_model=MODEL, time_limit_s=1).value > 0


def test_the_picture_shades_what_is_impossible() -> None:
    ax = style.figure().subplots()
    plot.plot_tradeoff(BY_HAND.curve(), [("mine", 12.0, 5.0)], ax=ax)
    (shade,) = ax.collections
    (path,) = shade.get_paths()
    for place, impossible in {(9.9, 7): True, (10.1, 7): False, (12, 3.9): True}.items():
        assert path.contains_point(place) == impossible
    (text, _) = (one.get_text() for one in ax.get_legend().get_texts())
    assert text == "no schedule"


def test_the_command_prints_and_writes_both(tmp_path: Path) -> None:
    words = ("tradeoff", "tiny-seconds", "--cost-model", MODEL, "--policy", "fcfs")
    shown = run(*words, "--time-limit", 0)
    assert "TTFT weight" in shown
    assert "any schedule so fast" in shown
    file, image = tmp_path / "t.json", tmp_path / "t.png"
    data = answer(*words, "--time-limit", 0)
    check_shape("tradeoff", data)
    assert [row["policy"] for row in data["policies"]] == ["fcfs"]
    file.write_text(json.dumps(data))
    run("plot", file, "-o", image)
    assert image.stat().st_size > 10_000
    data["curve"]["mean_ttft"].pop()
    file.write_text(json.dumps(data))
    assert "curve: found" in one_line_error(invoke("plot", file, "-o", image))
    assert "expected one in seconds" in one_line_error(invoke("tradeoff", "tiny"))
