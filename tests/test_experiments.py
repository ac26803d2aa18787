"""Named experiments: the same results however they are run, and what the papers report."""

from __future__ import annotations

import csv
import json
import os
import re
import sqlite3
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from optsched_studies import jaillet_models
from optsched_studies.infermax import MODEL, fixed, run_fixed, spec_of
from optsched_studies.parts import Count, claim, mean, measured, sweep
from typer.testing import CliRunner

from optsched.bounds.certificate import verify_certificate
from optsched.bounds.checker import parts as checker_parts
from optsched.cli import app
from optsched.experiments import Claim, experiments, get_experiment
from optsched.experiments.results import rows_as_csv
from optsched.experiments.runner import run_experiment
from optsched.problem.errors import InputError, SolverError
from optsched.workloads.generate import generate

pytestmark = pytest.mark.usefixtures("without_figures")

DATA = os.environ.get("OPTSCHED_DATA")
NAMES = {
    "chen-distributions", "chen-intervals", "elis-jct", "elis-scaling", "infermax-contention",
    "infermax-csp", "infermax-eviction-free", "infermax-memory", "infermax-ranking",
    "infermax-rmax", "infermax-validation", "jaillet-alpha", "jaillet-beta", "jaillet-memory",
    "jaillet-model-1", "jaillet-model-2", "jaillet-slopes", "jaillet-table-1", "kv-capacity",
    "trace-policies", "trail-c", "trail-lemma-1", "trail-predictions",
    "trail-rates", "trail-refined", "vllm-cpu", "vllm-measured",
}  # fmt: skip
EVICTION_FREE = "infermax-eviction-free"
# Few and short requests, so that a trial takes a moment.
SMALL = {"prompt": [1, 64], "output": 16, "requests": 64, "kv_capacity": 1000}


def files(folder: Path) -> tuple[str, str]:
    """Return the results and the summary that an experiment wrote."""
    return (folder / "results.csv").read_text(), (folder / "summary.json").read_text()


# --- what a study is made of ----------------------------------------------------------------------


def test_a_sweep_is_every_combination_with_the_last_factor_fastest() -> None:
    """Without what `where` leaves out, with fixed columns; `nest` makes a factor the slowest,
    and unknown values are refused."""
    trials = sweep(
        draw=Count("draws"), policy=lambda row, known: f"{known['name']}-{row['c']}", c="cs",
        keep=[False, True], n="n", seed="seed", where=lambda row: row["c"] > 1 or row["keep"],
    )  # fmt: skip
    parameters = {"draws": 2, "name": "p", "cs": [1, 2], "n": 9}
    rows = list(trials(parameters, 5))
    assert [(row["draw"], row["c"], row["keep"]) for row in rows] == [
        (0, 1, True), (0, 2, False), (0, 2, True), (1, 1, True), (1, 2, False), (1, 2, True),
    ]  # fmt: skip
    assert list(rows[0].items()) == [
        ("draw", 0), ("policy", "p-1"), ("c", 1), ("keep", True), ("n", 9), ("seed", 5),
    ]  # fmt: skip
    nested = sweep(a=[1, 2], b=[3, 4], nest=("b",))(parameters, 0)
    assert [(row["a"], row["b"]) for row in nested] == [(1, 3), (2, 3), (1, 4), (2, 4)]
    with pytest.raises(InputError, match=r"name:.*'q'"):
        list(sweep(name="name", known={"name": ["p"]})({"name": ["q"]}, 0))


def test_an_error_of_optsched_is_a_result_and_any_other_is_not() -> None:
    def run(trial: dict[str, Any]) -> dict[str, Any]:
        raise trial["error"]

    assert measured(run)({"error": SolverError("two\nlines")}) == {"error": "two lines"}
    assert measured(lambda trial: {"x": 1})({}) == {"x": 1, "error": None}
    with pytest.raises(ZeroDivisionError):
        measured(run)({"error": ZeroDivisionError()})


def test_means_and_claims_of_rows_that_are_not_there_are_unknown() -> None:
    """The mean of two, and of none; a claim with its value rounded to two digits or as a
    percentage."""
    rows = [{"p": "a", "x": 1.0}, {"p": "a", "x": 2.0}, {"p": "b"}]
    assert (mean(rows, "x", p="a"), mean(rows, "x", p="b")) == (1.5, None)
    assert claim("w", "above 1", 1.23456, lambda v: v > 1, 2) == Claim("w", "above 1", 1.23, True)
    assert claim("w", "about 1", 0.5, lambda v: v > 1, ".1%") == Claim(
        "w", "about 1", "50.0%", False
    )
    assert claim("w", 2.0, None, lambda v: v > 1).verdict is None


def test_a_claim_holds_within_15_percent() -> None:
    # Of 2.0 the claim may be 1.7 to 2.3.
    assert Claim("x", 2.0, 2.29).verdict is True
    assert Claim("x", 2.0, 1.6).verdict is False
    assert Claim("x", 2.0, None).verdict is None
    assert Claim("x", "always", "22 of 33").verdict is None
    assert Claim("x", "always", "22 of 33", False).verdict is False


@pytest.mark.parametrize(
    ("name", "settings", "trials", "departures"),
    [
        ("jaillet-model-1", {"n": 4}, 2, ["n = 4", "trials = 2"]),
        ("infermax-csp", {"output": 2, "prompt": [1, 8]}, None, ["output = 2", "prompt = [1, 8]"]),
        ("infermax-csp", {"time_limit_s": 99.0}, 1, ["trials = 1"]),
        ("chen-distributions", {"seeds": 1}, 1, ["seeds = 1", "trials = 1"]),
    ],
)
def test_there_is_a_verdict_only_with_the_parameters_of_the_paper(
    name: str, settings: dict, trials: int | None, departures: list[str]
) -> None:
    outcome = run_experiment(name, settings, trials=trials)
    assert outcome.departures == departures
    assert outcome.claims
    assert {claim.verdict for claim in outcome.claims} == {None}
    assert {claim["holds"] for claim in outcome.summary()["claims"]} == {None}


def test_a_study_with_its_own_parameters_has_verdicts() -> None:
    # More seconds, or another solver, are no other problem.
    outcome = run_experiment("infermax-csp", {"time_limit_s": 99.0})
    assert outcome.departures == []
    assert {claim.verdict for claim in outcome.claims} - {None}


def test_csv_keeps_every_digit_and_leaves_unknown_values_empty() -> None:
    assert rows_as_csv([{"a": "=1"}, {"a": -1.5}, {"a": "x-1"}]) == "a\n'=1\n-1.5\nx-1\n"
    assert rows_as_csv([{"a": 0.1 + 0.2, "b": None}, {"a": 1, "c": "x,y"}]) == (
        'a,b,c\n0.30000000000000004,,\n1,,"x,y"\n'
    )


def test_every_experiment_of_the_papers_is_registered() -> None:
    assert set(experiments()) == NAMES | {"ratios"}
    for name, experiment in experiments().items():
        assert experiment.name == name
        assert experiment.summary
        assert experiment.columns


@pytest.mark.parametrize("name", sorted(NAMES - {"infermax-validation"}))
def test_trials_differ_and_claims_need_no_results(name: str) -> None:
    experiment = get_experiment(name)
    trials = list(islice(experiment.trials(experiment.settings({}), 0), 500))
    assert len({json.dumps(trial) for trial in trials}) == len(trials)
    without = [{"trial": k, **trial, "error": "none"} for k, trial in enumerate(trials)]
    for rows in ([], without, without[::7]):  # none, all, and some
        for found in experiment.summarize(rows):
            assert isinstance(found, Claim)


# --- how they run ---------------------------------------------------------------------------------


def test_results_are_the_same_bit_for_bit_however_they_came_about(tmp_path: Path) -> None:
    small = {**SMALL, "requests": 16}
    whole = run_experiment(EVICTION_FREE, small, trials=8, out=tmp_path / "whole")
    assert (whole.ran, whole.resumed) == (8, 0)
    # Interrupted after 3 trials, then resumed by two jobs.
    run_experiment(EVICTION_FREE, small, trials=3, out=tmp_path / "parts")
    rest = run_experiment(EVICTION_FREE, small, trials=8, jobs=2, out=tmp_path / "parts")
    assert (rest.ran, rest.resumed) == (5, 3)
    assert files(tmp_path / "whole") == files(tmp_path / "parts")
    again = run_experiment(EVICTION_FREE, small, trials=8, out=tmp_path / "parts", resume=False)
    assert again.ran == 8
    assert files(tmp_path / "whole") == files(tmp_path / "parts")
    assert again.rows == whole.rows
    assert "wall" not in files(tmp_path / "whole")[0]
    # A header and 8 trials.
    assert (tmp_path / "whole" / "timings.csv").read_text().count("\n") == 9


def test_an_interrupted_trial_leaves_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = get_experiment(EVICTION_FREE)
    calls = 0

    def stop_at_fifth(trial: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return run_fixed(trial)

    monkeypatch.setitem(experiment.__dict__, "run", stop_at_fifth)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, SMALL, out=tmp_path)
    monkeypatch.undo()
    # The fifth trial was interrupted, and four had ended.
    assert run_experiment(experiment, SMALL, out=tmp_path).resumed == 4


def test_other_seeds_are_other_trials(tmp_path: Path) -> None:
    small = {"draws": 1, "mixes": ["SISO+SILO"], "requests": [16], "variants": ["text"]}
    first = run_experiment("infermax-ranking", small, out=tmp_path / "0")
    other = run_experiment("infermax-ranking", small, seed=1, out=tmp_path / "1")
    assert other.resumed == 0
    assert [r["tel_s"] for r in first.rows] != [r["tel_s"] for r in other.rows]
    # One draw under each of three schedulers.
    assert run_experiment("infermax-ranking", small, seed=1, out=tmp_path / "1").resumed == 3


def test_results_say_what_they_hold(tmp_path: Path) -> None:
    """Numbered rows of both capacities, a summary with its claims, and as many rows in the
    database."""
    run_experiment("infermax-memory", {**SMALL, "kv_capacity": "100,1000"}, out=tmp_path)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["trial"]) for r in rows] == list(range(len(rows)))
    assert {r["kv_capacity"] for r in rows} == {"100", "1000"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["format"] == "optsched-experiment"
    assert all({"what", "paper", "ours", "holds"} == set(c) for c in summary["claims"])
    with sqlite3.connect(tmp_path / "results.sqlite") as store:
        assert store.execute("SELECT count(*) FROM trials").fetchone()[0] == len(rows)


@pytest.mark.parametrize(
    ("name", "settings", "options", "message"),
    [
        ("infermax", {}, {}, "experiment 'infermax' is unknown; did you mean 'infermax-"),
        (
            "infermax-memory",
            {"colour": "red"},
            {},
            "parameter 'colour' is unknown; known are requests",
        ),
        ("infermax-memory", {"requests": "x"}, {}, "requests: found 'x'; expected an integer"),
        ("infermax-memory", {"kv_capacity": "10"}, {}, "found no trial"),
        ("infermax-memory", {}, {"trials": 0}, "trials: found 0"),
        ("infermax-memory", {}, {"jobs": 0}, "jobs: found 0"),
        ("infermax-memory", {}, {"engine": "moon"}, "local or dask"),
    ],
)
def test_bad_input_is_one_line(name: str, settings: dict, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        run_experiment(name, settings, **options)
    assert "\n" not in str(caught.value)


# --- what they find -------------------------------------------------------------------------------


def test_policy_specifications_of_trials() -> None:
    trial = {"scheduler": "sarathi:max_running=128", "variant": "vidur"}
    assert spec_of(trial) == "sarathi:max_running=128,watermark=0.01,evicted_first=true"
    free = {"scheduler": "vllm", "variant": "vidur", "eviction_free": True, "max_running": 32}
    assert spec_of(free) == "vllm:eviction_free=true,max_running=32"
    assert spec_of({"scheduler": "vllm"}) == "vllm"


def test_mean_running_size_of_eviction_free_schedulers_is_what_memory_allows() -> None:
    # M / (I + O - 1) = 1000 / 25 = 40 requests of 10 + 16 - 1 tokens at most; 200 come in
    # 5 waves of 40.
    trial = {
        "scheduler": "vllm", "eviction_free": True, "requests": 200, "prompt": 10, "output": 16,
        "kv_capacity": 1000, "cost_model": MODEL,
    }  # fmt: skip
    row = run_fixed(trial)
    assert row["error"] is None
    assert row["evictions"] == 0
    assert row["peak_kv"] == 1000
    assert row["mean_running"] == pytest.approx(40, rel=1e-9)
    assert fixed(trial).n == 200


def test_evictions_follow_the_paper_at_full_size() -> None:
    settings = {"prompt": [1, 1024], "variants": ["vidur"]}
    outcome = run_experiment(EVICTION_FREE, settings)
    assert outcome.departures == ["prompt = [1, 1024]", "variants = ['vidur']"]
    # Changed settings leave claims without a verdict; as `comparable` they have one.
    held = {c.what: replace(c, comparable=True).verdict for c in outcome.claims}
    assert held["vidur: vllm: most TPS of eviction-free over original"]
    assert held["vidur: vllm: most TTFT, the same"]
    assert held["vidur: sarathi: most TTFT, the same"]
    assert held["mean running size, eviction-free, I = 1"]


def test_the_optimum_of_the_csp_crosses_over() -> None:
    outcome = run_experiment("infermax-csp", {"prompt": [1, 64, 1024]})
    # Rows are those of the three prompts. tests/test_infermax.py has the optima by another method,
    # and the eviction-free one.
    # Only with the shortest prompts does the optimum evict.
    assert [row["evictions"] for row in outcome.rows] == [4, 0, 0]
    assert outcome.rows[0]["optimum_ms"] == pytest.approx(40.336, abs=1e-3)
    assert outcome.rows[0]["ef_optimum_ms"] == pytest.approx(53.422, abs=1e-3)
    assert outcome.rows[2]["optimum_ms"] == pytest.approx(329.382, abs=1e-3)


def test_a_larger_kv_capacity_never_raises_the_bound() -> None:
    outcome = run_experiment("kv-capacity", {"instance": "lognormal:n=40"})
    bounds = [row["tel"] for row in outcome.rows if row["policy"] == "bound"]
    # A row for a quarter, a half, one, two and four times the capacity, which rises.
    assert len(bounds) == 5
    assert bounds == sorted(bounds, reverse=True)
    found = [row for row in outcome.rows if row["policy"] != "bound" and row["error"] is None]
    assert {row["policy"] for row in found} == {"mc-sf", "mc-benchmark", "fcfs"}
    assert min(row["tel"] for row in found) >= bounds[-1]


@pytest.mark.parametrize("model", ["jaillet-model-1", "jaillet-model-2"])
def test_mc_sf_beside_the_proved_optimum_of_the_synthetic_models(model: str) -> None:
    settings = {"n": "6", "time_limit": 600, "certificate_every": 2}
    for row in run_experiment(model, settings, trials=4).rows:
        assert row["error"] is None
        assert row["requests"] == 6
        assert row["proved"]
        # Proved: the interval is a point, and MC-SF is never below the optimum.
        assert row["ratio_to_best_known"] == row["ratio_to_bound"] >= 1
        # Seeds 0 and 2 keep what anybody can check again.
        assert (row["certificate"] is None) == (row["seed"] in (1, 3))
        if row["certificate"]:
            instance = generate(model, seed=row["seed"], n=6)
            assert verify_certificate(instance, json.loads(row["certificate"])) == row["bound"]


def test_an_interrupted_trial_says_what_its_certificate_proves() -> None:
    settings = {"time_limit": 0.01, "certificate_every": 1}
    (row,) = run_experiment("jaillet-model-1", settings, trials=1).rows
    assert row["error"] is None
    # The bound is that from sorting at least, the certificate that of the relaxation.
    assert 0 < row["certified"] <= row["bound"] < row["best_known"]


def test_a_certificate_that_is_too_large_to_check_costs_no_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is kept but counts as refused, and the trial has no error; the claim counts none of
    one."""
    monkeypatch.setattr(checker_parts, "MAX_STEPS", 100)
    settings = {"n": "6", "time_limit": 600, "certificate_every": 2}
    outcome = run_experiment("jaillet-model-1", settings, trials=2)
    checked, other = outcome.rows
    assert checked["error"] is None
    assert checked["refused"].startswith("certificate: ")
    assert checked["refused"].endswith("found more than 100 steps; too large to check")
    assert checked["certified"] is None
    assert json.loads(checked["certificate"])["value"] == checked["bound"]
    assert other["refused"] is None
    (claim,) = [c for c in outcome.claims if "certificate" in c.what]
    # Every second trial keeps a certificate, so the first one alone, which is not checked.
    assert claim.ours == "0 of 1"


def test_a_trial_with_a_wrong_certificate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jaillet_models.solve

    def wrong(*args: Any, **settings: Any) -> Any:
        solution = right(*args, **settings)
        return replace(solution, certificate={**solution.certificate, "value": 1})

    monkeypatch.setattr(jaillet_models, "solve", wrong)
    settings = {"n": "6", "time_limit": 600, "certificate_every": 2}
    # Every second trial checks its certificate, so the first one alone.
    bad, good = run_experiment("jaillet-model-1", settings, trials=2).rows
    assert "certificate: " in bad["error"]
    assert good["error"] is None


def test_validation_without_data_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTSCHED_DATA", raising=False)
    with pytest.raises(InputError, match=r"perf_model\.csv"):
        run_experiment("infermax-validation")


@pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of public profiles")
def test_fitted_times_meet_the_measured_end_to_end_times() -> None:
    models = ["llama2-70b-tp2-a100-splitwise-fit"]
    outcome = run_experiment("infermax-validation", {"data": DATA, "cost_models": models})
    errors = [abs(row["e2e_error"]) for row in outcome.rows if row["plausible"]]
    # Measurements that the devices' peaks allow.
    assert len(errors) == 12
    # The claim of the experiment: Vidur's errors are 9 % or less.
    assert sum(errors) / len(errors) < 0.09


# --- the command ----------------------------------------------------------------------------------


def test_command_lists_and_runs(tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["experiment", "list"])
    assert listed.exit_code == 0
    assert "infermax-ranking" in listed.stdout
    words = ["experiment", "infermax-memory", "--out", str(tmp_path), "--trials", "4"]
    # Of all combinations `--trials 4` takes the first four.
    words += ["--set", "requests=8", "--set", "prompt=1,2", "--json", "-"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0
    assert json.loads(found.stdout)["trials"] == 4  # as asked for
    assert (tmp_path / "results.csv").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("infermax-memory", "--set", "prompt=one"),
            "experiment infermax-memory: prompt: found 'one'",
        ),
        (("trail-c", "--set", "c=2", "--trials", "1"), "no trial succeeded: .*c"),
        (("jaillet-table-1", "--set", "rate=0", "--trials", "1"), "no trial succeeded: "),
        (("elis-jct", "--set", "models=foo"), "models: found 'foo'; expected one of "),
    ],
)
def test_settings_that_leave_no_result_are_bad_input(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["experiment", *words])
    assert result.exit_code == 2
    assert re.search("error: .*" + said, result.stderr.splitlines()[-1])
