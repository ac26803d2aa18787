"""`optsched.bound`, the one door: every bound by name, what it refuses, what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from brute_force import brute_force_tel

from optsched import BatchCost, Instance, Limits, Problem, bound, compare, evaluate, solve
from optsched.bounds import Proof, list_bounds
from optsched.bounds.base import REGISTRY, Bound, features_of
from optsched.bounds.certificate import verify_certificate
from optsched.optimize.interval import Interval
from optsched.problem.budget import Budget, Progress
from optsched.problem.errors import InputError, UsageError

# M = 6. Both from 0 would hold 3 + 4 in round 2, so one waits a round: 3 + 2 + 1 = 6.
TINY = Instance([0, 0], [1, 2], [3, 2], 6, name="tiny")
"""Optimum 6: request 1 in rounds 1, 2 (3, 4 tokens), request 0 in rounds 2, 3, 4 (2, 3, 4):
round 2 holds 4 + 2 = 6; latencies 2 + 4."""
SECONDS = Instance([0.0, 0.0], [2, 2], [3, 1], kv_capacity=5, time_unit="second")
PLAIN = BatchCost("plain", 1, {"token": "1", "base": "10"})


def test_the_dual_and_the_ramp_are_registered_like_every_other_bound() -> None:
    assert {"dual", "ramp", "srpt", "work", "shares"} <= set(list_bounds())
    for name in ("dual", "ramp"):
        assert list_bounds()[name].certifies


def test_every_bound_is_known_whatever_was_loaded_before() -> None:
    asks = (
        "from optsched.bounds import list_bounds as b; assert {'dual', 'ramp', 'work'} <= set(b())"
    )
    for first in ("solve", "strategies", "bound"):
        code = f"import optsched.optimize.{first}; {asks}"
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["dual", "ramp"])
def test_a_bound_that_certifies_gives_a_certificate_of_its_value(name: str) -> None:
    """By name: the certificate proves the bound, which is not above the optimum, and a schedule
    is not below it."""
    found = bound(TINY, method=name, time_limit_s=60)
    assert found.method == name
    assert found.certificate is not None
    assert verify_certificate(TINY, found.certificate) == found.certified == found.bound
    assert found.bound is not None
    assert 5 <= found.bound <= brute_force_tel(TINY)[0] == 6  # 5 = the sum of outputs
    assert found.value is not None
    assert found.value >= 6


def test_the_ramp_claims_no_optimum_where_its_schedule_breaks_a_limit_on_batches() -> None:
    # Three fit into the KV at once: 3 + 2 + 1 tokens take 6 rounds, one after the other more.
    free = Instance([0, 0, 0], [1, 1, 1], [3, 2, 1], 12)
    for seats, claim in ((3, "optimal"), (1, "bound")):
        instance = replace(free, limits=Limits(max_running=seats))
        found = bound(instance, method="ramp", time_limit_s=60)
        assert found.certificate is not None
        assert found.certificate["claim"] == claim
        assert verify_certificate(instance, found.certificate) == found.bound == 6
        assert found.bound <= brute_force_tel(instance)[0]


def test_auto_closes_a_small_instance_and_keeps_its_schedule_judged() -> None:
    """The optimum, no gap, and a schedule whose metrics are the judge's."""
    # 6 is the optimum of TINY, whose comment has the arithmetic.
    found = bound(TINY, time_limit_s=10)
    assert found.bound == found.value == 6
    assert found.gap == 0
    assert found.evaluation is not None
    assert found.schedule is not None
    assert found.metrics == evaluate(TINY, found.schedule).metrics
    assert repr(found).startswith("<BoundResult 'tiny' in rounds: optimal, tel 6, bound 6, by ")


def test_limits_are_kept_by_the_schedule_and_used_by_the_bound() -> None:
    # One request at a time, shortest first: 2, 2 + 3, 5 + 4 and 9 + 5 rounds after 0.
    limits = Limits(max_running=1)
    instance = Instance([0] * 4, [2, 2, 3, 1], [4, 3, 2, 5], kv_capacity=30, limits=limits)
    found = bound(instance, time_limit_s=20)
    assert found.bound == found.value == 2 + 5 + 9 + 14
    assert found.method == "cpsat"
    # The ramp relaxation knows no limits: its bound holds, its schedule is not taken.
    ramp = bound(instance, method="ramp", time_limit_s=5)
    assert ramp.bound is not None
    # 30 = 2 + 5 + 9 + 14, the optimum.
    assert ramp.bound <= 30 <= (ramp.value or 30)
    assert ramp.found_by != "ramp"


def test_the_file_has_the_fields_of_a_result() -> None:
    """In their order, with the values of an optimum; `certified` stands where there is a
    certificate."""
    data = json.loads(json.dumps(bound(TINY, time_limit_s=5).to_dict(), allow_nan=False))
    assert list(data)[:6] == [
        "format", "version", "optsched", "command", "instance", "time_unit",
    ]  # fmt: skip
    assert (data["format"], data["command"]) == ("optsched-result", "bound")
    assert (data["bound"], data["objective"], data["certified"]) == (6, 6, 6)
    assert (data["status"], data["certificate"]) == ("optimal", None)  # no file of it is named
    assert {"elapsed_s", "incumbent", "bound"} == set(data["progress"])
    # A bound without a certificate has nothing certified.
    without = bound(TINY, method="srpt").to_dict()
    assert "certified" not in without
    assert without["method"] == "srpt"


def test_results_comparisons_and_bounds_begin_alike() -> None:
    answers = (solve(TINY), compare(TINY, ["mc-sf"]), bound(TINY, time_limit_s=5))
    heads = [list(answer.to_dict().items())[:6] for answer in answers]
    for found in heads:
        assert [value for key, value in found if key not in ("format", "command")] == [
            value for key, value in heads[0] if key not in ("format", "command")
        ]


def test_other_objectives_have_bounds_of_their_own() -> None:
    """Makespan and mean TTFT: the bound by name, not above the value, which is that of the
    schedule."""
    for objective, name in (("makespan", "work-makespan"), ("mean_ttft", "prefill-work")):
        found = bound(Problem(SECONDS, PLAIN, objective), time_limit_s=1)
        # The search by labels is exact, if there is time for it.
        assert found.method in (name, "labels")
        assert found.objective_name == objective
        assert found.bound is not None
        assert found.value is not None
        assert 0 < found.bound <= found.value
        assert found.metrics is not None
        assert found.value == found.metrics[objective]
        assert found.to_dict()["objective_name"] == objective


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "found 'magic'; expected auto, "),
        ({"method": "work"}, "'work', which does not apply to tel on an instance in rounds"),
        ({"method": "srpt", "objective": "makespan"}, "does not apply to makespan"),
        ({"objective": "tel,makespan"}, "found several, tel,makespan; expected one"),
        ({"cost_model": PLAIN}, "in rounds"),
        ({"time_limit_s": -1.0}, "time_limit"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    cost, goal = options.pop("cost_model", None), options.pop("objective", "tel")
    with pytest.raises((UsageError, InputError), match=message):
        bound(Problem(TINY, cost, goal), **options)


def test_no_bound_is_known_for_what_none_is_proved_for() -> None:
    found = bound(Problem(TINY, objective="peak_kv"), time_limit_s=1)
    assert (found.bound, found.method, found.gap) == (None, None, None)
    assert found.value is not None


def test_a_bound_is_given_where_the_round_model_has_no_schedule() -> None:
    # A prompt of 4 tokens in batches of 3 must be split: CP-SAT cannot, the bound holds for all.
    split = Instance([0], [4], [3], 14, limits=Limits(max_batch_tokens=3))
    # A round for each of the 3 output tokens.
    assert bound(split, time_limit_s=1).bound == 3


def test_an_objective_with_parameters_is_shown_with_its_words() -> None:
    goal = "slo_goodput:slo_ttft=1"
    found = bound(Problem(TINY, objective=goal), time_limit_s=0)
    assert found.objective_name == goal
    assert "SLO goodput" in replace(found, bound=1.0, method="mine")._repr_html_()


def test_what_policies_took_counts_in_the_times_of_a_bound(monkeypatch) -> None:
    from optsched.optimize import narrow as door

    def an_hour(interval: Interval, budget: Budget, *, seed: int = 0) -> list[str]:
        # As if the policies had taken an hour.
        interval.budget.begin -= 3600
        return []

    monkeypatch.setattr(door, "run_policies", an_hour)
    limited = Instance([0, 0], [1, 2], [3, 2], 6, limits=Limits(max_running=1))
    found = bound(limited, time_limit_s=10_000)
    assert found.first_bound_s is not None
    assert found.first_bound_s < 3600 <= found.bound_s
    assert found.progress[-1].elapsed_s >= 3600


def test_a_stop_leaves_a_bound() -> None:
    """Ask for bounds with a stop that is set before they begin."""
    stop = threading.Event()
    stop.set()
    for instance, cost in ((TINY, None), (SECONDS, PLAIN)):
        found = bound(Problem(instance, cost), time_limit_s=600, stop=stop)
        assert found.bound is not None


def test_progress_rises_below_and_falls_above() -> None:
    seen: list[Progress] = []
    found = bound(TINY, time_limit_s=5, progress=seen.append)
    lower = [state.bound for state in seen if state.bound is not None]
    upper = [state.incumbent for state in seen if state.incumbent is not None]
    assert lower == sorted(lower)
    assert upper == sorted(upper, reverse=True)
    assert (found.progress[-1].bound, found.progress[-1].incumbent) == (6, 6)


def test_a_bound_from_elsewhere_is_run_under_the_budget_it_is_given(monkeypatch) -> None:
    given: list[Budget] = []

    def prove(task: Any, budget: Budget) -> Proof:
        given.append(budget)
        return Proof(5)

    mine = Bound("mine", "", "round", ("tel",), prove, features_of(TINY), searches=True)
    monkeypatch.setitem(REGISTRY._values, "mine", mine)
    found = bound(TINY, method="mine", time_limit_s=10)
    assert (found.bound, found.method) == (5, "mine")
    assert 0 < given[0].limit_s <= 10
    # Another instance has a feature more.
    later = Instance([0, 1], [1, 2], [3, 2], 6)
    with pytest.raises(UsageError, match=r"'mine'.*arrivals"):
        bound(later, method="mine")
