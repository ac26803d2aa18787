"""Objectives beside total latency in rounds, and ratios and comparisons about any metric."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import brute_force
from command_line import answer, run

import optsched
import optsched.analysis.ratio.measure
from instances import small
from optsched import Instance, Problem, compare, ratios, solve, worst_case
from optsched.bounds import lower_bound
from optsched.problem.errors import UsageError
from optsched.problem.instance import Limits
from optsched.problem.schedule import from_starts
from optsched.workloads.generate import generate

# HiGHS has no program for the first and the last one.
GOALS = ("makespan", "mean_ttft", "mean_latency", "max_stretch")


def tiny(seed: int) -> Instance:
    """Return 2 to 4 requests, every third one with a limit or without mixed batches."""
    one = small(seed, 2 + seed % 3)
    if seed % 3 == 0:
        most = int(one.prompt_tokens.max()) + 1
        limits = Limits(max_running=2), Limits(max_batch_tokens=most), Limits()
        one = replace(one, limits=limits[seed % 9 // 3], hybrid_batching=seed % 2 == 0 or None)

    return one


@pytest.mark.parametrize("name", GOALS)
@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 510), marks=pytest.mark.slow)], ids=str
)
def test_exact_methods_find_what_brute_force_finds(name: str, seeds: range) -> None:
    for seed in seeds:
        instance = tiny(seed)
        least = float(brute_force(instance, name)[0])
        # HiGHS has no makespan and no max_stretch, the first and the last of GOALS.
        for method in ("cpsat",) if name in GOALS[::3] else ("cpsat", "highs"):
            found = solve(Problem(instance, None, name), method=method, threads=1)
            assert found.status == "optimal", (seed, method)
            assert found.value == pytest.approx(least, rel=1e-12), (seed, method)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 2100), marks=pytest.mark.slow)], ids=str
)
def test_bounds_are_below_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        instance = tiny(seed)
        for name in ("makespan", "mean_latency"):
            bound, _ = lower_bound(Problem(instance, None, name))
            assert bound <= brute_force(instance, name)[0], (seed, name)


def test_the_makespan_bound_by_hand() -> None:
    # M = 4. A request with s = 1, o = 2 holds 2 + 3 = 5 tokens over its run. Four of them that
    # arrive at 3 have 20 token-rounds: no end before 3 + 20 / 4 = 8.
    instance = Instance([0, 3, 3, 3, 3], [1] * 5, [2] * 5, kv_capacity=4)
    assert lower_bound(Problem(instance, None, "makespan")) == (8, "volume-makespan")


def test_first_tokens_by_hand_and_who_may_pause() -> None:
    # M = 4: one request with s = 1, o = 3 at a time, so that first tokens come after 1 and 4.
    instance = Instance([0, 0], [1, 1], [3, 3], kv_capacity=4)
    found = solve(Problem(instance, None, "mean_ttft"))
    # (1 + 4) / 2 = 2.5.
    assert (found.value, found.bound) == (2.5, 2.5)
    assert found.scope.without == {"pauses"}
    assert solve(Problem(instance, None, "makespan")).scope.without == frozenset()


def test_the_ramp_proves_first_tokens_of_twenty_requests() -> None:
    # Of uninterrupted runs, the sum of TTFT is total latency less o - 1 for each request.
    instance = generate("jaillet-model-1", seed=0, n=20)
    total, first = (
        solve(Problem(instance, None, name), method="ramp") for name in ("tel", "mean_ttft")
    )
    rest = int((instance.output_tokens - 1).sum())
    assert first.status == "optimal"
    assert first.value == pytest.approx((total.value - rest) / 20)


def test_what_total_latency_decides_is_bounded_and_searched_as_it_is() -> None:
    # Too many requests under a limit for the ramp: prices of memory, and the search.
    instance = generate("uniform", seed=1, n=60, kv_capacity=300, prompt_max=30, output_max=20)
    instance = replace(instance, limits=Limits(max_running=8))
    total, mean, first = (
        optsched.bound(Problem(instance, None, name), time_limit_s=1.0)
        for name in ("tel", "mean_latency", "mean_ttft")
    )
    # Of runs without pauses, the sum of TTFT is total latency less o - 1 for each request.
    rest = int((instance.output_tokens - 1).sum())
    for found, lost in (mean, 0), (first, rest):
        assert found.bound <= (total.value - lost) / 60
        assert (total.bound - lost) / 60 <= found.value
        # In rounds neither mean latency nor mean TTFT has certificates (`CERTIFIED`).
        assert found.certificate is None
    assert first.scope.without == {"pauses"}
    assert first.general is None


@pytest.mark.parametrize("seed", range(3))
def test_of_a_mean_is_proved_what_is_proved_of_the_total(seed: int) -> None:
    # For every schedule without pauses the sum of TTFT is total latency less o - 1 for each
    # request.
    instance = generate("jaillet-model-2", seed=seed, n=12)
    total, mean, first = (
        solve(Problem(instance, None, name), threads=1)
        for name in ("tel", "mean_latency", "mean_ttft")
    )
    assert total.status == mean.status == first.status == "optimal"
    assert mean.value == pytest.approx(total.value / 12, rel=1e-12)
    rest = int((instance.output_tokens - 1).sum())
    assert first.value == pytest.approx((total.value - rest) / 12, rel=1e-12)


def test_of_several_workers_first_tokens_and_the_makespan_are_proved() -> None:
    instance = Instance([0, 0, 0], [1, 1, 1], [3, 3, 3], kv_capacity=4)
    # Each holds 1 + 3 = 4 tokens at its end, all of M. Two begin at 0, and the third at 3.
    found = solve(Problem(instance, optsched.Fleet.of(2), "mean_ttft"))
    assert found.value == found.bound == pytest.approx((1 + 1 + 4) / 3)
    # Three runs of 3 rounds, one at a time on each of two workers: 6.
    found = solve(Problem(instance, optsched.Fleet.of(2), "makespan"))
    assert (found.value, found.bound, found.method) == (6, 6, "split")


# --- ratios and comparisons ---------------------------------------------------------------------


def test_a_ratio_of_makespans_by_hand() -> None:
    # M = 4, s = 1. The short ones (o = 1) hold 2 each and so fit together for a round. The long one
    # (o = 3) holds 2, 3, 4. With one short one in its first round all end after 3 + 1 = 4.
    instance = Instance([0, 0, 0], [1, 1, 1], [3, 1, 1], kv_capacity=4)
    row = ratios("mc-sf", [instance], objective="makespan").rows[0]
    assert (row.value, row.bound, row.best_known, row.low, row.high) == (4, 4, 4, 1, 1)


@pytest.mark.parametrize("name", ["makespan", "mean_ttft", "max_stretch"])
def test_ratios_are_of_the_objective(name: str) -> None:
    """Values are the policy's metric, least ratios are to what CP-SAT proves, and tables and
    words name it."""
    cases = [generate("uniform", seed=k, n=5, output_max=5) for k in range(4)]
    study = ratios(["mc-sf", "mc-benchmark"], [Problem(one, None, name) for one in cases])
    for row in study.rows:
        problem = Problem(cases[row.instance], None, name)
        assert row.value == pytest.approx(optsched.run(problem, row.policy).value)
        assert row.exact
        assert row.low == pytest.approx(row.value / solve(problem, method="cpsat").value)
    assert name in study.to_frame()
    assert f"times the {name} of" in str(study.pairs()[0])


def test_where_more_is_better_the_ratio_is_the_other_way_round() -> None:
    # A goal that is maximized: 2 of 3 requests can end within a round; fcfs serves the long one.
    # A short one holds 2 of 4 tokens in its round, so that both run in the first one.
    instance = Instance([0, 0, 0], [1, 1, 1], [3, 1, 1], kv_capacity=4)
    asked = Problem(instance, None, "slo_attainment:slo_latency=1")
    row = ratios("fcfs", [asked]).rows[0]
    best = solve(asked).value
    assert best == pytest.approx(2 / 3)
    assert row.value < best
    assert row.low == (best / row.value if row.value else np.inf)
    compared = compare(asked, ["fcfs", "mc-sf"])
    assert compared.value == best
    assert [one.ratio_to_best_known for one in compared.rows] == [
        pytest.approx(best / one.value if one.value else np.inf) for one in compared.rows
    ]
    assert compared.shown[0].value == best


def test_objectives_that_differ_or_that_nothing_bounds_are_refused() -> None:
    one, other = Problem("tiny", None, "makespan"), Problem("tiny")
    with pytest.raises(UsageError, match="instance 1"):
        ratios("mc-sf", [one, other])
    with pytest.raises(UsageError, match="max_stretch"):
        ratios("mc-sf", ["tiny"], "bound", objective="max_stretch")
    # A metric, but no objective.
    with pytest.raises(UsageError, match="'evictions'"):
        ratios("mc-sf", ["tiny"], objective="evictions")


def test_a_bad_case_of_another_objective_is_proved() -> None:
    found = worst_case("mc-sf", budget_s=1.0, n=4, kv_capacity=20, objective="makespan", seed=1)
    problem = Problem(found.instance, None, "makespan")
    assert found.value == optsched.run(problem, "mc-sf").value
    assert found.proved
    assert found.low == found.value / solve(problem).value > 1


def test_objectives_on_the_command_line() -> None:
    """compare and ratios take an objective: their values and ratios are of it, and two are
    refused."""
    found = answer("compare", "tiny", "--policy", "mc-sf", "--objective", "makespan")
    best = solve(Problem("tiny", None, "makespan")).value
    assert (found["objective_name"], found["best_known"]) == ("makespan", best)
    row = found["policies"][0]
    assert row["ratio_to_best_known"] == row["metrics"]["makespan"] / best
    assert "makespan" in run("compare", "tiny", "--policy", "mc-sf", "--objective", "makespan")
    study = answer("ratios", "--set", "n=4", "--trials", 2, "--objective", "mean_ttft")
    assert study["objective_name"] == "mean_ttft"
    assert min(study["ratios"]["low"]) >= 1
    words = run("ratios", "--set", "n=4", "--objective", "tps,tel", "--trials", 1, status=2)
    assert "expected one" in words


def test_starts_of_the_answer_are_those_of_the_instance() -> None:
    # A gap between two blocks: the answer's makespan counts it.
    instance = Instance([0, 1000], [1, 1], [3, 3], kv_capacity=4)
    found = solve(Problem(instance, None, "makespan"), method="cpsat")
    assert found.value == 1003
    assert optsched.evaluate(instance, from_starts([0, 1000], instance)).metrics["makespan"] == 1003


# --- optima that are kept -----------------------------------------------------------------------


def never(*_: object, **__: object) -> None:
    """Stand in for `solve` where nothing may be solved again."""
    raise AssertionError("it is solved again")


def test_an_optimum_is_solved_once_for_studies_comparisons_and_worst_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a study stores serves it again, with another policy, and a comparison; another
    objective is solved anew."""
    cases = [small(seed, 4) for seed in range(3)]
    first = ratios("mc-sf", cases, store=tmp_path, time_limit_s=120)
    other = ratios("mc-sf", cases, objective="makespan", store=tmp_path, time_limit_s=120)
    # Three schedules for each of two objectives, and three certificates.
    assert "files: 9, failures: 0" in run("verify", str(tmp_path))  # certificates of tel only
    monkeypatch.setattr("optsched.analysis.ratio.exact.solve", never)
    again = ratios(["mc-sf", "fcfs"], cases, store=tmp_path, time_limit_s=120)
    assert again.of("mc-sf") == list(first.rows)
    assert (
        ratios("mc-sf", cases, objective="makespan", store=tmp_path, time_limit_s=120).rows
        == other.rows
    )
    with pytest.raises(AssertionError, match="again"):
        ratios("mc-sf", cases, objective="mean_ttft", store=tmp_path, time_limit_s=120)

    compared = compare(cases[0], ["fcfs"], time_limit_s=0, store=tmp_path)
    assert compared.status == "optimal"
    assert compared.value == first.rows[0].best_known


def test_a_kept_schedule_is_judged(tmp_path: Path) -> None:
    case = small(0, 4)
    ratios("mc-sf", [case], store=tmp_path)
    file = next(tmp_path.glob("*-schedule.json"))
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "starts": [0] * 4}))
    with pytest.raises(optsched.OptschedError):
        ratios("mc-sf", [case], store=tmp_path)


def test_a_policy_that_is_added_to_a_study_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["ratios", "--set", "n=4", "--trials", 2, "--out", "study", "--policy", "mc-sf"]
    first = answer(*words)
    monkeypatch.setattr("optsched.analysis.ratio.exact.solve", never)
    ran: list[str] = []
    measured = optsched.analysis.ratio.measure._Plan._value

    def counted(self: object, number: int, problem: Problem, spec: str, seeds: int) -> object:
        ran.append(spec)
        return measured(self, number, problem, spec, seeds)

    monkeypatch.setattr(optsched.analysis.ratio.measure._Plan, "_value", counted)
    both = answer(*words, "--policy", "fcfs")
    assert ran == ["fcfs", "fcfs"]
    # Rows of the two policies take turns. The two optima have a schedule and a certificate each.
    assert both["ratios"]["low"][::2] == first["ratios"]["low"]
    assert "files: 4, failures: 0" in run("verify", "study/optima")


# --- to the paper -------------------------------------------------------------------------------


def test_a_family_of_ones_own_is_drawn_and_changed() -> None:
    """An instance of `draw` is changed by `change`, and some ratio above 1 is found."""
    seen: list[Instance] = []
    stop = threading.Event()

    def draw(policy: str, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
        outputs = rng.integers(1, kv_capacity, n)
        return Instance([0] * n, [1] * n, outputs, kv_capacity=kv_capacity, name="drawn")

    def change(instance: Instance, rng: np.random.Generator) -> Instance:
        output = instance.output_tokens.copy()
        output[rng.integers(instance.n)] = rng.integers(1, instance.kv_capacity)
        seen.append(replace(instance, output_tokens=output, name="changed"))
        stop.set()
        return seen[-1]

    found = worst_case("mc-benchmark", draw, 600, n=4, kv_capacity=12, change=change, stop=stop)
    assert found.instance.prompt_tokens.tolist() == [1] * 4
    assert not found.instance.arrival.any()
    assert seen
    assert 1 < found.low <= found.high
    assert "times the best tel" in repr(found)


def test_in_seconds_a_worst_case_is_proved_by_labels() -> None:
    def draw(policy: str, kv_capacity: int, n: int, rng: np.random.Generator) -> Instance:
        arrival = np.sort(rng.integers(0, 20, n)) / 100
        return Instance(
            arrival - arrival[0], rng.integers(20, 90, n), rng.integers(1, 3, n),
            kv_capacity=kv_capacity, time_unit="second",
        )  # fmt: skip

    fleet = "llama2-7b-a100-infermax"
    found = worst_case("fcfs", draw, 2.0, n=3, kv_capacity=120, fleet=fleet)
    problem = Problem(found.instance, fleet)
    assert found.value == optsched.run(problem, "fcfs").value
    assert found.low == pytest.approx(found.value / solve(problem, method="cpsat").value)


def test_labels_and_mathematics_on_the_command_line(tmp_path: Path) -> None:
    """Labels stand for policies in JSON and, with their signs escaped, in LaTeX."""
    words = ["ratios", "--set", "n=4", "--trials", 2, "--policy", "mc-sf", "--policy", "fcfs"]
    named = [*words, "--label", "MC_SF", "--label", "First & come"]
    assert set(answer(*named)["ratios"]["policy"]) == {"MC_SF", "First & come"}
    assert "expected 2 that differ" in run(*words, "--label", "one", status=2)
    study = ratios(["mc-sf", "fcfs"], [small(0, 4), small(1, 4)]).labelled(
        ["MC_SF", "First & come"]
    )
    latex = study.to_latex()
    assert "MC\\_SF & $" in latex
    assert "First \\& come & $" in latex
    assert "95\\% interval" in latex
    # An interval, or 1 alone where every ratio is 1.
    assert f"$[{study.mean('MC_SF').interval[0]:.4f}, " in latex or "$1.0000$" in latex
    assert repr(study.mean("MC_SF")).startswith("<Mean 1.")
