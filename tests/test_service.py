"""Service level objectives: per request or for all, attainment and goodput."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from optsched import BatchCost, Instance, Problem, compare, evaluate, read_instance, write_instance
from optsched.bounds import features_of
from optsched.optimize.formulations import Task
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, UsageError
from optsched.problem.metrics import served_well
from optsched.problem.objective import parse_objectives
from optsched.problem.schedule import from_batches, from_starts

ROUNDS = Instance([0, 1, 1], [3, 2, 1], [2, 3, 1], kv_capacity=40)
# A: rounds 1, 2. B: rounds 2, 4, 5. C: round 3.
PAUSED = from_batches(
    [0, 1, 3, 4, 5, 6], [0, 0, 1, 2, 1, 1], [3, 1, 2, 1, 1, 1], instance=ROUNDS
)  # fmt: skip


def test_the_largest_gap_is_between_two_tokens_in_succession() -> None:
    # B's tokens come at 2, 4 and 5: gaps 2 and 1, TPOT 1.5. C has one token and no gap.
    found = evaluate(ROUNDS, PAUSED)
    assert found.gap[:2].tolist() == [1.0, 2.0]
    assert math.isnan(found.gap[2])
    assert (found.metrics["max_gap"], found.metrics["mean_tpot"]) == (2.0, 1.25)


def test_a_run_without_pauses_has_gaps_of_one_round() -> None:
    found = evaluate(ROUNDS, from_starts([0, 1, 2], ROUNDS))
    assert found.gap[:2].tolist() == [1.0, 1.0]
    assert math.isnan(found.gap[2])


@pytest.mark.parametrize(("mode", "gap"), [("recompute", 5.0), ("restart", 2.0)])
def test_tokens_that_a_restart_discards_count_in_no_gap(mode: str, gap: float) -> None:
    # A batch of c tokens takes c + 1 s, s = 2, o = 3. Tokens at 3 and 5, then an eviction.
    cost = BatchCost("line", 1, {"token": "1000", "base": "1000"})
    instance = Instance([0.0], [2], [3], kv_capacity=9, time_unit="second")
    kept = mode == "recompute"
    batches = [2, 1, 4] if kept else [2, 1, 2, 1, 1]
    schedule = from_batches(
        list(range(len(batches) + 1)), [0] * len(batches), batches, instance=instance,
        evicted_offsets=[0, 0, 0] + [1] * (len(batches) - 2), evicted=[0], evict_mode=mode,
    )  # fmt: skip
    # Kept: tokens at 3, 5 and, after a prefill of 2 + 2 tokens, at 10: gaps 2 and 5.
    # Lost: tokens at 8, 10 and 12: gaps of 2; the tokens at 3 and 5 are discarded.
    assert evaluate(Problem(instance, cost), schedule).gap.tolist() == [gap]


@pytest.mark.parametrize(
    ("slos", "good"),
    [
        ({"slo_ttft": 1}, [True, True, False]),  # TTFT 1, 1, 2
        ({"slo_tpot": 1}, [True, False, True]),  # TPOT 1, 1.5, none
        ({"slo_gap": 1.5}, [True, False, True]),  # gaps 1, 2, none
        ({"slo_latency": 3}, [True, False, True]),  # latency 2, 4, 2
        ({"slo_ttft": 1, "slo_gap": 2}, [True, True, False]),
    ],
)
def test_a_request_is_served_well_within_all_its_slos(slos: dict, good: list[bool]) -> None:
    found = evaluate(Problem(ROUNDS, **slos), PAUSED)
    assert served_well(found).tolist() == good
    assert found.metrics["slo_attainment"] == sum(good) / 3
    assert found.metrics["slo_goodput"] == sum(good) / 5  # the last completion is at 5


def classes(**slos) -> Instance:
    """Return the requests of `ROUNDS` with SLOs; KV for 40 tokens is room for all."""
    return Instance([0, 1, 1], [3, 2, 1], [2, 3, 1], kv_capacity=40, **slos)


def test_requests_may_have_slos_of_their_own() -> None:
    # TTFT 1, 1, 2 against 1, none, 1.5; latencies 2, 3, 2 against 1, 4, none.
    mixed = classes(slo_ttft=[1, None, 1.5], slo_latency=np.array([1.0, 4.0, np.inf]))
    starts = from_starts([0, 1, 2], mixed)
    assert served_well(evaluate(mixed, starts)).tolist() == [False, True, False]
    # One that is given replaces the column of its name, and only that.
    assert served_well(evaluate(Problem(mixed, slo_latency=9), starts)).tolist() == [
        True,
        True,
        False,
    ]
    assert list(mixed.slos) == ["slo_ttft", "slo_latency"]


def test_slos_are_columns_of_the_file(tmp_path) -> None:
    """None in the file is no limit; a part of the requests has its part of the column."""
    mixed = classes(slo_ttft=[1, None, 1.5])
    write_instance(mixed, tmp_path / "mixed.json")
    text = json.loads((tmp_path / "mixed.json").read_text())
    assert text["requests"]["slo_ttft"] == [1, None, 1.5]
    again = read_instance(tmp_path / "mixed.json")
    assert again.slo_ttft.tolist() == [1.0, math.inf, 1.5]
    assert again.sha256 == mixed.sha256 != classes().sha256
    assert mixed.subset([2, 0]).slo_ttft.tolist() == [1.5, 1.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 0, 1], "requests.slo_ttft: request 1: found 0; expected a time > 0"),
        ([1, -2.5, 1], "requests.slo_ttft: request 1: found -2.5; expected a number from 0"),
        ([1, "soon", 1], "requests.slo_ttft: request 1: found 'soon'; expected a number"),
        ([1, math.nan, 1], "requests.slo_ttft: request 1: found nan; expected a finite number"),
        ([1, 2], "requests.slo_ttft: found 2 values; expected 3"),
        (1.0, "requests.slo_ttft: found 1.0; expected a list of numbers"),
    ],
)
def test_a_column_of_slos_is_checked(values, words: str) -> None:
    with pytest.raises(InputError, match=words):
        classes(slo_ttft=values)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["slo_ttft", "slo_tpot", "slo_gap", "slo_latency"])
def test_an_slo_for_all_is_checked(name: str, value) -> None:
    with pytest.raises(InputError, match=rf"{name}: found .*; expected a time > 0"):
        evaluate(Problem(ROUNDS, **{name: value}), PAUSED)


def test_an_objective_takes_slos_from_the_instance_or_as_parameters() -> None:
    Task(classes(slo_gap=[1, 1, 1]), objective=parse_objectives("slo_attainment"))
    Task(ROUNDS, objective=parse_objectives("slo_attainment:slo_gap=1,slo_latency=2"))
    with pytest.raises(UsageError, match=r"slo_ttft.*slo_tpot"):
        Task(ROUNDS, objective=parse_objectives("slo_attainment"))


def test_slos_change_no_schedule_and_no_feature() -> None:
    mixed = classes(slo_ttft=[1, None, 1.5])
    assert features_of(mixed) == features_of(ROUNDS)
    assert simulate(mixed, "mc-sf").request.tolist() == simulate(ROUNDS, "mc-sf").request.tolist()


def test_compare_has_the_attainment_of_every_slo() -> None:
    mixed = classes(slo_latency=[2, 2, 2])
    # Only the request of one token can end within a round, and those of one or two within two.
    rows = compare(mixed, ["fcfs"], bound=False).rows
    tight = compare(Problem(mixed, slo_latency=1), ["fcfs"], bound=False).rows
    assert rows[0].metrics["slo_attainment"] > tight[0].metrics["slo_attainment"]
