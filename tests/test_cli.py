"""The command line: exit statuses, one-line errors, JSON, and what it leaves behind.

Statuses (docs/files.md): 0 an answer, 1 an internal error, 2 bad usage or input, 3 infeasible,
4 nothing within the limits or a policy that loops, 5 what does not verify, 130 Ctrl-C.
"""

from __future__ import annotations

import csv
import functools
import inspect
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run as checked
from typer import Context
from typer.main import get_command

import optsched
from instances import MODEL
from optsched import Instance, Problem, evaluate, load_cost_model, solve
from optsched.cli import app
from optsched.files.read_write import read_schedule, write_instance
from optsched.policies import list_policies
from optsched.problem.notes import warn

BASE: dict[str, Any] = {
    "format": "optsched-instance",
    "version": 1,
    "name": "five",
    "time_unit": "round",
    "kv_capacity": 10,
    "kv_accounting": "generated",
    "requests": {
        "arrival": [0, 0, 1, 2, 2],
        "prompt_tokens": [2, 3, 1, 2, 1],
        "output_tokens": [5, 2, 3, 4, 1],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return BASE with the field at a dotted path set to a value, or removed if it is ...."""
    data = json.loads(json.dumps(BASE))
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def in_seconds() -> dict[str, Any]:
    """Return the five requests of BASE in seconds, on a machine with room for all."""
    data = changed("time_unit", "second")
    data["kv_capacity"] = 100_000
    return data


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command line in an empty folder and return its result."""
    monkeypatch.chdir(tmp_path)
    return invoke


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """The file five.json: BASE, five requests in rounds with M = 10 and 15 tokens of output."""
    path = tmp_path / "five.json"
    path.write_text(json.dumps(BASE))
    return path


@pytest.fixture
def seconds(tmp_path: Path) -> Path:
    """The file seconds.json: the five requests in seconds, which need a cost model."""
    path = tmp_path / "seconds.json"
    path.write_text(json.dumps(in_seconds()))
    return path


def test_help_and_version(run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("solve", "compare", "bound", "simulate", "verify", "import", "list", "gpu"):
        assert f"  {command} " in result.stdout
        assert run(command, "--help").exit_code == 0
    assert run("--version").stdout == "optsched 1.0.0rc1\n"


def leaves(group: Any, *words: str) -> dict[tuple[str, ...], Any]:
    """Return every command by its words, also those that the help does not show, with options."""
    found = {}
    for name, one in group.commands.items():
        one.get_params(Context(one))
        inner = leaves(one, *words, name) if hasattr(one, "commands") else {(*words, name): one}
        found |= inner
    return found


def test_there_are_at_most_25_commands_and_the_help_of_each_fits_a_screen(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted with those below `gpu`. A screen has 40 lines of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    every = leaves(get_command(app))
    shown = [words for words, one in every.items() if not one.hidden and words[0] != "library"]
    assert len(shown) <= 25
    for words in [(), ("gpu",), ("library",), *every]:
        lines = run(*words, "--help").stdout.splitlines()
        # The help of `optsched` alone, which has no words, may have a line more.
        assert len(lines) <= 40 + (not words), words
        assert max(map(len, lines)) <= 80, words


def test_commands_of_other_names_are_the_same_ones() -> None:
    group = get_command(app)
    every = leaves(group)
    for name in ("fit", "roofline"):
        one, other = every[(name,)], every["gpu", name]
        assert one.hidden
        assert inspect.unwrap(one.callback) is inspect.unwrap(other.callback)


def test_one_idea_has_one_option() -> None:
    options = [one for each in leaves(get_command(app)).values() for one in each.params]
    names = {name for one in options for name in one.opts}
    assert not names & {"--device", "--timeout", "--seconds", "--repeats", "--times", "--count"}
    # The names of options that name a file to write.
    written = {
        max(one.opts, key=len)
        for one in options
        if one.metavar is not None and str(getattr(one, "help", "")).startswith(("Write", "Plot"))
    }
    others = {name for name in written if not name.endswith("-out")}
    assert others == {"--json", "--log"}  # --log writes a solver's own file


def test_the_cost_model_may_be_the_second_argument(run, seconds: Path) -> None:
    fcfs = ("--policy", "fcfs")
    asked = ("bound", "--time-limit", 1), ("compare", "--no-bound", *fcfs), ("simulate", *fcfs)
    for words in asked:
        name, *more = words
        assert run(name, seconds, MODEL, *more).exit_code == 0, words
    error = one_line_error(run("bound", seconds, MODEL, "--cost-model", MODEL))
    assert error == f"error: --cost-model: found it beside MODEL {MODEL!r}; expected one"


def test_defaults_of_the_environment(
    run, instance: Path, seconds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cost model by a variable is that of the option; rounds need none, and the library has
    its own; wrong values are named, and an option counts before the variable."""
    words = ("bound", seconds, "--time-limit", 1)
    given = answer(*words, "--cost-model", MODEL)
    monkeypatch.setenv("OPTSCHED_COST_MODEL", MODEL)
    assert answer(*words)["bound"] == pytest.approx(given["bound"], rel=1e-3)  # as time allows
    assert run("simulate", instance, "--policy", "fcfs").exit_code == 0  # rounds need none
    # The library's own cost model comes first.
    text = answer("simulate", "library/chat-x1", "--policy", "fcfs")["metrics"]
    monkeypatch.setenv("OPTSCHED_COST_MODEL", "nothing")
    assert answer("simulate", "library/chat-x1", "--policy", "fcfs")["metrics"] == text
    error = one_line_error(run("simulate", seconds, "--policy", "fcfs"))
    assert error.startswith("error: OPTSCHED_COST_MODEL: cost model: 'nothing' is unknown")

    for text, found in (("-1", "OPTSCHED_TIME_LIMIT: found -1.0"), ("x", "OPTSCHED_TIME_LIMIT")):
        monkeypatch.setenv("OPTSCHED_TIME_LIMIT", text)
        assert found in one_line_error(run("solve", instance))
        assert run("solve", instance, "--time-limit", 9).exit_code == 0


def test_a_shell_completes_commands_and_options(run, monkeypatch: pytest.MonkeyPatch) -> None:
    # The shell may not be known.
    assert "internal error" not in run("--show-completion").stderr
    monkeypatch.setenv("_OPTSCHED_COMPLETE", "complete_bash")
    for words, place, found in (
        ("optsched so", "1", "solve"),
        ("optsched solve --ti", "2", "--ti"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", place)
        assert run().stdout.startswith(found)


def test_what_is_told_is_logged_too(run, instance: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "optsched")
    run("simulate", instance, "--policy", "nothing")
    assert [(one.levelname, one.name) for one in caplog.records] == [("ERROR", "optsched")]
    assert "policy 'nothing' is unknown" in caplog.text
    caplog.clear()
    with pytest.warns(UserWarning, match="out of its range"):
        warn("out of its range")
    assert caplog.record_tuples == [("optsched", logging.WARNING, "out of its range")]


def test_the_command_alone_says_what_to_do_first(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few lines, of which all commands but the demo run as they stand, on the trace that lies
    there."""
    monkeypatch.chdir(tmp_path)
    Path("TRACE.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 6  # a few lines that any screen has room for
    assert max(map(len, lines)) <= 100
    steps = [shlex.split(line, comments=True) for line in lines if line.startswith("  optsched ")]
    assert [step[1] for step in steps] == ["demo", "compare", "import", "--help"]
    for step in steps[1:]:  # as they stand
        assert run(*step[1:]).exit_code == 0
    assert run("compare", "mine.json", "--cost-model", MODEL).exit_code == 0


def test_lists(run) -> None:
    """Every list has a name that is known, by itself too; other names are refused with what was
    meant; schemas have their titles."""
    assert "mc-sf" in run("policies").stdout
    for kind, known in {
        "policies": "mc-sf", "bounds": "ramp", "methods": "hindsight:cpsat",
        "formulations": "hindsight",
        "metrics": "p99_ttft", "models": MODEL, "gpus": "h100-80gb", "formats": "azure",
        "generators": "lognormal", "predictors": "noisy", "data": "azure-2023-conv",
        "experiments": "trail-c", "schemas": "certificate", "library": "tiny-n8",
    }.items():  # fmt: skip
        assert re.search(rf"^{known} ", run("list", kind).stdout, re.MULTILINE), kind
        assert known in run("list", kind, known).stdout
    assert run("list", "models").stdout == run("models").stdout
    assert "'bound' is unknown; did you mean 'bounds'?" in one_line_error(run("list", "bound"))
    assert "did you mean 'ramp'?" in one_line_error(run("list", "bounds", "rampp"))
    shown = run("list", "generators").stdout
    assert "prefix_block_tokens" in shown
    for name in ("instance", "schedule", "result", "comparison", "certificate"):
        assert json.loads(run("schema", name).stdout)["title"] == f"optsched-{name}"
    assert "known are" in one_line_error(run("schema", "nothing"), 2)


def test_simulate_says_which_predictor_a_policy_names(run, instance: Path) -> None:
    noisy = run("simulate", instance, "--policy", "mc-sf:predictor=noisy,predictor.mae=1")
    assert "predictor: noisy:mae=1 (the policy's own)" in noisy.stdout
    assert "oracle" not in noisy.stdout
    spec = "trail:predictor=trail:noise=2"
    data = answer("simulate", instance, "--policy", spec)
    assert data["predictor"] == "trail:noise=2"


def test_a_negative_seed_is_bad_usage(run, instance: Path) -> None:
    for words in (("simulate", instance, "--policy", "a-min"), ("generate", "uniform")):
        assert "--seed" in one_line_error(run(*words, "--seed", "-1"), 2)


def test_simulate_evaluate_and_verify_agree(run, instance: Path) -> None:
    """A schedule that simulate writes has the same metrics by evaluate, and verify states its
    value."""
    data = answer("simulate", instance, "--policy", "mc-sf", "--schedule-out", "s.json")
    assert data["format"] == "optsched-result"
    assert data["predictor"] == "oracle"
    assert data["schedule"] == "s.json"
    judged = answer("evaluate", instance, "s.json")
    assert judged["metrics"] == data["metrics"]
    checked = run("verify", instance, "s.json")
    assert checked.exit_code == 0
    assert f"tel {data['objective']} rounds" in checked.stdout


def test_table_of_requests_as_csv(run, instance: Path) -> None:
    """A header and a row for each request; another ending is refused."""
    result = run("simulate", instance, "--policy", "fcfs", "--requests-out", "r.csv")
    assert result.exit_code == 0, result.stderr
    lines = Path("r.csv").read_text().splitlines()
    assert lines[0].startswith("id,arrival,prompt_tokens,output_tokens,")
    assert len(lines) == 1 + 5  # a header and five requests
    assert "oracle" in result.stdout
    assert ".csv or .parquet" in one_line_error(
        run("simulate", instance, "--policy", "fcfs", "--requests-out", "r.txt"), 2
    )


def test_a_spreadsheet_runs_no_id_of_a_table_of_requests(run, instance: Path) -> None:
    ids = ["=1+1", "+1", "-2+3", "@SUM(1)", "\t=1+1", "\r=1", "a=b", "-"]
    columns = {"arrival": [0] * 8, "prompt_tokens": [1] * 8, "output_tokens": [1] * 8, "id": ids}
    Path("evil.json").write_text(json.dumps({**BASE, "requests": columns}))
    words = ("simulate", "evil.json", "--policy", "fcfs", "--requests-out")
    assert run(*words, "r.csv").exit_code == 0
    with open("r.csv", newline="", encoding="utf-8") as file:
        read = [row["id"] for row in csv.DictReader(file)]
    # A quote stands before what a spreadsheet takes for a formula: = + - @, also after a tab or a
    # return.
    assert read == ["'=1+1", "'+1", "'-2+3", "'@SUM(1)", "'\t=1+1", "'\r=1", "a=b", "'-"]
    # In Parquet every id is as it was.
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert run(*words, "r.parquet").exit_code == 0
    assert pd.read_parquet("r.parquet")["id"].tolist() == ids


def piped(text: str) -> str:
    """Return the name of a pipe that holds a text, as ``<(cat FILE)`` gives: read once, no more."""
    out, into = os.pipe()
    with os.fdopen(into, "w", encoding="utf-8") as file:
        file.write(text)
    return f"/dev/fd/{out}"


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="no names for open files here")
def test_every_command_reads_a_file_once_so_that_it_may_be_a_pipe(run, instance: Path) -> None:
    assert run("solve", instance, "--schedule-out", "s.json").exit_code == 0
    assert run("bound", instance, "--certificate-out", "c.json", "--time-limit", 5).exit_code == 0
    five, schedule, certificate = (
        Path(name).read_text() for name in (instance, "s.json", "c.json")
    )
    for words in (
        ("verify", piped(five), piped(schedule)),
        ("verify", piped(five), piped(certificate)),
        ("evaluate", piped(five), piped(schedule)),
        ("plot", piped(schedule), "--instance", piped(five), "-o", "t.json"),
        ("plot", piped(schedule), "--instance", piped(five), "-o", "s.png"),
        ("solve", piped(five), "--warm-start", piped(schedule), "--method", "placement"),
        ("report", piped(five), piped(schedule), piped(certificate), "-o", "r.html"),
    ):
        result = run(*words)
        assert result.exit_code == 0, (words, result.stderr)


def test_a_path_with_a_nul_is_bad_input(run, instance: Path) -> None:
    pytest.importorskip("pyarrow")
    data = {"format": "optsched-schedule", "version": 1, "kind": "starts"}
    Path("nul.json").write_text(json.dumps({**data, "columns": "\0.parquet"}))
    for words in (("evaluate", instance), ("verify", instance)):
        error = one_line_error(run(*words, "nul.json"), 2)
        assert "nul.json: columns: expected '\\x00.parquet' beside this file" in error


def test_a_schedule_that_breaks_a_rule_exits_5_with_the_reason(run, instance: Path) -> None:
    # All at once at their arrivals: at t = 1 requests 0 and 1 hold 3 + 4, at t = 2 with
    # request 2 that is 4 + 5 + 2 = 11 > 10.
    data = {"format": "optsched-schedule", "version": 1, "kind": "starts"}
    Path("bad.json").write_text(json.dumps({**data, "starts": [0, 0, 1, 2, 2]}))
    for words in (("evaluate", instance), ("verify", instance)):
        assert "11 KV tokens" in one_line_error(run(*words, "bad.json"), 5)


def test_verify_recognises_what_it_is_given(run, instance: Path) -> None:
    sha = "0" * 64
    Path("c.json").write_text(json.dumps({"format": "optsched-certificate", "version": 1}))
    assert "found nothing" in one_line_error(run("verify", instance, "c.json"), 2)
    Path("other.json").write_text(json.dumps({"format": "recipe"}))
    assert "optsched-schedule" in one_line_error(run("verify", instance, "other.json"), 2)
    # A digest of 64 zeros is of no instance: `verify` refuses that as a violation (5), and
    # `evaluate` as wrong input (2).
    foreign = {"format": "optsched-schedule", "version": 1, "instance_sha256": sha}
    Path("foreign.json").write_text(json.dumps({**foreign, "kind": "starts", "starts": [0] * 5}))
    assert sha in one_line_error(run("verify", instance, "foreign.json"), 5)
    assert sha in one_line_error(run("evaluate", instance, "foreign.json"), 2)


def test_verify_says_that_a_schedule_names_no_instance(run, instance: Path) -> None:
    """Nothing where it does, and one line of a note, though valid, where it does not."""
    run("solve", instance, "--schedule-out", "s.json")
    assert run("verify", instance, "s.json").stderr == ""
    data = json.loads(Path("s.json").read_text())
    del data["instance_sha256"]
    Path("s.json").write_text(json.dumps(data))
    result = run("verify", instance, "s.json")
    assert result.exit_code == 0
    assert result.stderr.startswith("note: s.json names no instance")
    assert result.stderr.count("\n") == 1


def test_solve_proves_the_optimum_and_its_schedule_verifies(run, instance: Path) -> None:
    """The bound is the value, the schedule is valid, and other starts end at the same value."""
    result = run("solve", instance, "--schedule-out", "s.json", "--json", "r.json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(Path("r.json").read_text())
    assert data["status"] == "optimal"
    assert data["formulation"] == "hindsight"
    assert data["objective"] == data["bound"] == data["metrics"]["tel"]
    assert data["gap"] == 0
    assert data["schedule"] == "s.json"
    assert run("verify", instance, "s.json").exit_code == 0
    again = answer("solve", instance, "--warm-start", "s.json", "--method", "cpsat")
    assert again["objective"] == data["objective"]
    warm = answer("solve", instance, "--warm-start", "mc-sf", "--eviction-free")
    assert warm["objective"] == data["objective"]


def test_solve_answers_whether_a_policy_can_be_beaten(run, instance: Path) -> None:
    """Yes half a round above the optimum, no (status 3) at the optimum itself; JSON and words
    say it once; --below takes --than."""
    optimum = answer("solve", instance)["objective"]
    tel = answer("simulate", instance, "--policy", "fcfs")["objective"]
    phi = (optimum + 0.5) / tel
    yes = answer("solve", instance, "--below", phi, "--than", "fcfs")
    assert yes["below"]["answer"] == "yes"
    no = run("solve", instance, "--below", str(optimum / tel), "--than", "fcfs", "--json", "-")
    assert no.exit_code == 3
    data = json.loads(no.stdout)
    assert data["below"]["answer"] == "no"
    assert data["below"]["best_known"] == data["bound"] == optimum
    assert (data["status"], data["objective"], data["metrics"]) == ("infeasible", None, None)
    assert no.stderr.endswith("none exists\n")
    assert no.stderr.startswith("a schedule below")
    words = run("solve", instance, "--below", str(optimum / tel), "--than", "fcfs")
    assert (words.exit_code, words.stderr) == (3, "")
    assert words.stdout.count("none exists") == 1
    assert "expected both" in one_line_error(run("solve", instance, "--below", "0.9"), 2)


def test_bound_is_below_the_optimum(run, instance: Path) -> None:
    optimum = answer("solve", instance)["objective"]
    data = answer("bound", instance)
    assert data["command"] == "bound"
    assert data["certificate"] is None
    assert 15 <= data["bound"] <= optimum <= data["objective"]  # 15 = sum of outputs
    # The bound, and for whom it holds.
    assert run("bound", instance, "--method", "srpt").stdout.count("\n") == 2
    assert "expected auto" in one_line_error(run("bound", instance, "--method", "guess"), 2)


@pytest.mark.parametrize("method", ["auto", "dual", "ramp"])
def test_a_certificate_of_a_bound_by_name_verifies(run, instance: Path, method: str) -> None:
    """The value certified is at most the bound and at least the sum of outputs, and verify
    states it."""
    words = ("--method", method, "--certificate-out", "c.json", "--time-limit", 3)
    data = json.loads(run("bound", instance, *words, "--json", "-").stdout)
    assert data["certificate"] == "c.json"
    assert 15 <= data["certified"] <= data["bound"]  # 15 = sum of outputs
    assert method in ("auto", data["method"])
    verified = run("verify", instance, "c.json")
    assert verified.exit_code == 0
    assert f"{data['certified']} rounds" in verified.stdout


def test_bound_takes_another_objective(run, seconds: Path) -> None:
    """The bound is by a method for makespans and below the value found; an unknown objective is
    refused."""
    words = ("--cost-model", MODEL, "--time-limit", 1, "--objective", "makespan")
    data = json.loads(run("bound", seconds, *words, "--json", "-").stdout)
    assert data["objective_name"] == "makespan"
    assert data["method"] in ("work-makespan", "labels")  # exact, if there is time for it
    assert data["bound"] <= data["objective"] == data["metrics"]["makespan"]
    assert "makespan of any schedule >= " in run("bound", seconds, *words).stdout
    unknown = run("bound", seconds, "--cost-model", MODEL, "--objective", "beauty")
    assert "beauty" in one_line_error(unknown, 2)


@pytest.mark.parametrize("objective", ["p99_latency", "max_gap"])
def test_bound_exits_4_where_no_bound_is_known(run, instance: Path, objective: str) -> None:
    result = run("bound", instance, "--objective", objective, "--time-limit", 0)
    error = one_line_error(result, 4)
    assert "no bound is known" in error
    assert "tel" in error.partition("expected one of ")[2]


def test_bound_in_seconds_is_below_what_it_found(run, seconds: Path) -> None:
    # `checked` is `run` of command_line.py: it wants exit status 0 and returns the output.
    words = ("bound", seconds, "--cost-model", MODEL, "--time-limit", 1)
    assert "total latency of any schedule >=" in checked(*words)
    data = answer(*words)
    assert 0 < data["bound"] <= data["objective"]


def test_compare_prints_ratios_bound_and_predictor(run, instance: Path) -> None:
    """Words on the screen; a file in which the optimum is proved; every schedule is valid, and
    no ratio is below 1."""
    result = run("compare", instance, "--json", "c.json", "--schedules-out", "all")
    assert result.exit_code == 0, result.stderr
    assert "clairvoyant" in result.stdout
    assert "bound " in result.stdout
    assert "best known " in result.stdout
    assert "predictor: oracle" in result.stdout
    data = json.loads(Path("c.json").read_text())
    assert data["format"] == "optsched-comparison"
    assert data["bound"] == data["best_known"]  # five requests are solved to the optimum
    done = [row for row in data["policies"] if row["metrics"] is not None]
    assert len(done) > 10  # without --policy all that it allows run
    for row in done:
        assert run("verify", instance, row["schedule"]).exit_code == 0
    inside = [row["ratio_to_bound"] for row in done if row["ratio_to_bound"] is not None]
    assert len(inside) > 5  # the next line is not of an empty list
    assert min(inside) >= 1


def test_compare_alone_on_standard_output_is_json(run, instance: Path) -> None:
    result = run("compare", instance, "--policy", "mc-sf", "--no-bound", "--json", "-")
    data = json.loads(result.stdout)
    assert result.stderr == ""
    assert data["bound"] is None
    assert [row["policy"] for row in data["policies"]] == ["mc-sf"]


def test_compare_says_what_ratios_mean_unless_no_bound_is_asked_for(run) -> None:
    one = ("generate", "uniform", "--set", "n=6", "-o", "small.json")
    assert run(*one).exit_code == 0
    shown = run("compare", "small.json", "--policy", "mc-sf", "--policy", "fcfs").stdout
    assert "times the optimum" in shown
    without = run("compare", "small.json", "--policy", "mc-sf", "--no-bound").stdout
    assert "times the optimum" not in without


def test_seconds_take_a_cost_model(run, seconds: Path) -> None:
    """By name; without one two commands say which there are."""
    data = answer("compare", seconds, "--cost-model", MODEL, "--policy", "vllm")
    assert data["cost_model"]["name"] == MODEL
    assert data["time_unit"] == "second"
    assert MODEL in one_line_error(run("compare", seconds), 2)
    assert MODEL in one_line_error(run("simulate", seconds, "--policy", "vllm"), 2)


def test_generate_and_export(run) -> None:
    """A seed gives the same file again, each format is written, and other words are refused."""
    result = run("generate", "jaillet-model-1", "--seed", "3", "--set", "n=4")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert len(data["requests"]["arrival"]) == 4
    assert run("generate", "jaillet-model-1", "--seed", "3", "--set", "n=4", "-o", "g.json")
    assert json.loads(Path("g.json").read_text()) == data
    for kind in ("lp", "mps", "json"):
        result = run("export", "g.json", "--format", kind, "-o", f"m.{kind}")
        assert result.exit_code == 0, result.stderr
        assert Path(f"m.{kind}").stat().st_size > 0
    assert "lp, mps or json" in one_line_error(
        run("export", "g.json", "--format", "xls", "-o", "x"), 2
    )
    one_line_error(run("generate", "nothing"), 2)
    one_line_error(run("generate", "jaillet-model-1", "--set", "n"), 2)
    one_line_error(run("generate", "jaillet-model-1", "--set", "colour=red"), 2)


def test_import_a_trace(run) -> None:
    Path("trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.0,3,4\n2023-11-16 18:17:03.5,2,2\n"
        "2023-11-16 18:17:04.0,7,0\n2023-11-16 18:17:04.25,5,1\n"
    )
    words = ("import", "azure", "trace.csv", "--kv-capacity", "100")
    result = run(*words, "-o", "i.json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("warning: ")  # line 4 generates nothing
    assert result.stderr.count("\n") == 1
    data = json.loads(Path("i.json").read_text())
    assert data["requests"]["output_tokens"] == [4, 2, 1]
    # The first two arrive 0.5 s apart, which are two rounds of 0.25 s.
    rounds = json.loads(run(*words, "--rounds", "0.25", "--limit", "2").stdout)
    assert rounds["time_unit"] == "round"
    assert rounds["requests"]["arrival"] == [0, 2]
    # Line 4 is an error with --strict; then a format and a file that are not there.
    one_line_error(run(*words, "--strict"), 2)
    one_line_error(run("import", "nothing", "trace.csv"), 2)
    one_line_error(run("import", "azure", "missing.csv", "--kv-capacity", "100"), 2)


POLICY = """

import os
import sys
from dataclasses import dataclass

from optsched import Batch, Rules

print("loaded")
os.write(1, b"written\\n")


@dataclass
class OneByOne:
    step: int = 1

    def __post_init__(self):
        print("made")

    def batch(self, view):
        print("asked")
        i = [*view.running, *view.waiting][0]
        return Batch({i: view.rest(i)})


class Blind(OneByOne):
    clairvoyant = False


class Seer(OneByOne):
    clairvoyant = True


class Quits(OneByOne):
    def batch(self, view):
        sys.exit(0)


class QuitsAtOnce(OneByOne):
    def __post_init__(self):
        sys.exit(0)


class Interrupts(OneByOne):
    def batch(self, view):
        raise KeyboardInterrupt


BY_PROMPT = Rules(order="prompt")
BY_OUTPUT = Rules(order="output")


def by_prompt(*, max_running: int | None = None):
    return Rules(order="prompt", max_running=max_running)


def nothing():
    return None
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """The file mine.py: POLICY, with the policies OneByOne, Blind and Seer, and rules."""
    (tmp_path / "mine.py").write_text(POLICY)
    return "mine.py"


def test_json_is_alone_in_process_too(run, instance: Path, mine: str) -> None:
    result = run("simulate", instance, "--policy", f"{mine}:OneByOne", "--json=-")
    assert json.loads(result.stdout)["policy"] == "mine.py:OneByOne"
    assert "asked" in result.stderr
    assert "Usage" in run("simulate", "--json", "-", "--help").stdout


def test_a_policy_file_that_has_changed_is_executed_again(run, instance: Path) -> None:
    tel = []
    for limit in (1, 100):
        Path("m.py").write_text(
            f"from optsched import Rules\nRULES = Rules(order='prompt', max_running={limit})\n"
        )
        tel.append(answer("simulate", instance, "--policy", "m.py:RULES")["objective"])
    # At most one request at a time waits longer than at most 100 together.
    assert tel[1] < tel[0]


def test_rules_of_a_users_file_run_as_data_or_from_a_function(
    run, instance: Path, mine: str
) -> None:
    """Both give the same schedule; a parameter that data do not have, no rules and no name are
    refused."""

    def tel(name: str) -> int:
        return answer("simulate", instance, "--policy", f"{mine}:{name}")["objective"]

    assert tel("BY_PROMPT") == tel("by_prompt") <= tel("by_prompt:max_running=1")
    wrong = run("simulate", instance, "--policy", f"{mine}:BY_PROMPT:order=prompt")
    assert wrong.exit_code == 2
    assert "'order' is unknown" in wrong.stderr
    for name, words in (
        ("nothing", "found None; expected Rules"),
        ("gone", "and no Rules or Windows"),
    ):
        result = run("simulate", instance, "--policy", f"{mine}:{name}", "--json", "-")
        assert result.exit_code == 2
        assert words in result.stderr


def test_only_what_says_so_is_called_clairvoyant(run, instance: Path, mine: str) -> None:
    def said(name: str) -> str:
        return run("simulate", instance, "--policy", f"{mine}:{name}").stdout

    assert "mine.py:OneByOne may use the true output lengths" in said("OneByOne")
    assert "true output lengths" not in said("Blind")
    assert "mine.py:Seer is clairvoyant: it uses" in said("Seer")
    assert "true output lengths" not in said("BY_PROMPT")
    assert "mine.py:BY_OUTPUT is clairvoyant: it uses" in said("BY_OUTPUT")
    words = [w for name in ("OneByOne", "Blind", "Seer") for w in ("--policy", f"{mine}:{name}")]
    rows = answer("compare", instance, *words, "--no-bound")["policies"]
    assert [row["clairvoyant"] for row in rows] == [True, False, True]
    # Seer says that it is clairvoyant and Blind that it is not; OneByOne says nothing, so it gets a
    # note.
    assert [bool(row["notes"]) for row in rows] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("Quits", 2, "error: policy 'mine.py:Quits': batch 0: raised SystemExit(0)"),
        ("QuitsAtOnce", 2, "error: policy 'mine.py:QuitsAtOnce': cannot be made: SystemExit(0)"),
        ("Interrupts", 130, "error: interrupted"),
    ],
)
def test_a_policy_that_ends_the_process_is_an_error(
    run, instance: Path, mine: str, name: str, status: int, words: str
) -> None:
    result = run("simulate", instance, "--policy", f"{mine}:{name}")
    assert result.exit_code == status
    (line,) = result.stderr.splitlines()
    assert line.startswith(words)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, RecursionError, MemoryError])
def test_whatever_is_raised_exits_1_in_one_line(
    run, instance: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise kind(0)

    monkeypatch.setattr("optsched.policies.run.simulate", broken)
    result = run("simulate", instance, "--policy", "mc-sf")
    assert result.exit_code == 1
    assert result.stderr == f"internal error: {kind.__name__}: 0 (--debug for the traceback)\n"


def test_columns_of_a_large_schedule_are_parquet_beside_it(
    run, instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three commands, and such files are read again; without pyarrow the columns stay inside."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    monkeypatch.setattr("optsched.files.read_write.INLINE_ENTRIES", 4)  # five requests are more
    for words in (
        ("simulate", instance, "--policy", "mc-sf", "--schedule-out", "s.json"),
        ("solve", instance, "--schedule-out", "s.json"),
        ("compare", instance, "--policy", "mc-sf", "--no-bound", "--schedules-out", "."),
    ):
        file = "mc-sf.json" if words[0] == "compare" else "s.json"
        result = run(*words)
        assert result.exit_code == 0, result.stderr
        assert f"entries are in {file.removesuffix('.json')}.columns.parquet" in result.stderr
        assert json.loads(Path(file).read_text())["columns"].endswith(".columns.parquet")
        assert run("verify", instance, file).exit_code == 0
        assert run("evaluate", instance, file).exit_code == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("simulate", instance, "--policy", "mc-sf", "--schedule-out", "inline.json")
    assert "inside the JSON; with the package pyarrow" in result.stderr
    assert "columns" not in json.loads(Path("inline.json").read_text())


def test_tables_keep_to_the_width_there_is(
    run, instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 columns without a terminal, 80 in one of 80, where the columns left out are named; at
    60 the mark of clairvoyance is a line."""
    # Without a terminal or COLUMNS long texts wrap at 160 characters, and no column is left out.
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in ("models", "policies", "methods", "bounds"):
        assert max(map(len, run("list", name).stdout.splitlines())) <= 160
    words = ("compare", instance, "--policy", "mc-sf", "--policy", "fcfs", "--no-bound")
    whole = run(*words).stdout
    for header in ("p99 TTFT", "mean TTFT", "makespan", "evictions", "wall"):
        assert header in whole
    assert "too narrow" not in whole
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run(*words).stdout
    table, _, rest = narrow.partition("(the terminal is too narrow for: ")
    assert max(map(len, table.splitlines())) <= 80
    for header in ("p99 TTFT", "p99 latency"):
        assert header in table
    assert rest.startswith("mean latency, mean TTFT, mean TPOT, makespan, evictions, wall)\n")
    assert "clairvoyant" in narrow
    monkeypatch.setenv("COLUMNS", "60")
    assert "clairvoyant: mc-sf, fcfs\n" in run(*words).stdout  # its column has gone


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="no names for open files here")
@pytest.mark.parametrize("kind", ["lp", "mps", "json"])
def test_export_into_a_pipe(run, instance: Path, kind: str) -> None:
    words = ("export", instance, "--format", kind, "-o")
    out, into = os.pipe()
    piped = run(*words, f"/dev/fd/{into}")
    os.close(into)
    assert (piped.exit_code, piped.stdout) == (0, ""), piped.stderr
    assert run(*words, "m").exit_code == 0
    with os.fdopen(out, "rb") as file:
        assert file.read() == Path("m").read_bytes()


def test_an_export_that_fails_leaves_the_old_file(
    run, instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(program: Any, ending: str, path: Path, notes: Any) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    Path("m.lp").write_text("old")
    monkeypatch.setattr("optsched.optimize.solvers.pulp_models.write_problem", broken)
    one_line_error(run("export", instance, "--format", "lp", "-o", "m.lp"), 2)
    assert Path("m.lp").read_text() == "old"
    assert sorted(p.name for p in Path().iterdir()) == ["five.json", "m.lp"]


BAD_FILES = {
    "not JSON": ("", "{", "not JSON"),
    "a list": ("", "[]", "object"),
    "NaN": ("requests.arrival", [0, 0, 1, 2, float("nan")], "NaN"),
    "infinity": ("requests.arrival", [0, 0, 1, 2, float("inf")], "Infinity"),
    "wrong format": ("format", "optsched-recipe", "optsched-instance"),
    "wrong version": ("version", 2, "version"),
    "unequal columns": ("requests.arrival", [0, 0, 1], "prompt_tokens"),
    "negative": ("requests.prompt_tokens", [2, 3, 1, 2, -1], "request 4"),
    "fraction": ("requests.output_tokens", [2, 3, 1.5, 2, 1], "request 2"),
    "boolean": ("requests.output_tokens", [2, True, 1, 2, 1], "request 1"),
    "string": ("requests.output_tokens", ["2", 3, 1, 2, 1], "request 0"),
    "overflow": ("requests.prompt_tokens", [2, 3, 2**70, 2, 1], "request 2"),
    "capacity overflow": ("kv_capacity", 2**70, "kv_capacity"),
    "zero outputs": ("requests.output_tokens", [2, 3, 0, 2, 1], "request 2"),
    "too large": ("requests.prompt_tokens", [2, 9, 1, 2, 1], "request 1"),
    "empty": ("requests", {key: [] for key in BASE["requests"]}, "one or more requests"),
    "duplicate ids": ("requests.id", ["a", "b", "c", "d", "a"], "'a'"),
    "missing field": ("kv_capacity", ..., "kv_capacity"),
    "unknown field": ("requests.colour", [], "colour"),
}
"""What is wrong with a file: a field of BASE, its value, and words of the error; or all text."""


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("command", ["solve", "simulate", "compare", "bound"])
def test_a_bad_instance_is_one_line_and_writes_nothing(run, name: str, command: str) -> None:
    # BAD_FILES has the field that is changed, its value (or the whole text), and a word of the
    # error.
    field, value, expected = BAD_FILES[name]
    Path("bad.json").write_text(json.dumps(changed(field, value)) if field else value)
    before = sorted(Path().iterdir())
    words = ["--json", "out.json"]
    if command == "simulate":
        words += ["--policy", "mc-sf", "--schedule-out", "s.json", "--requests-out", "r.csv"]
    if command == "solve":
        words += ["--schedule-out", "s.json", "--log", "l.txt"]
    if command == "compare":
        words += ["--schedules-out", "folder"]
    line = one_line_error(run(command, "bad.json", *words), 2)
    assert "bad.json" in line
    assert expected in line
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("solve", "missing.json"), "missing.json: no such file"),
        (("solve", "five.json", "--cost-model", MODEL), "rounds"),
        (("solve", "five.json", "--formulation", "nothing"), "hindsight"),
        (("solve", "five.json", "--method", "nothing"), "highs"),
        (("solve", "five.json", "--objective", "beauty"), "beauty"),
        (("solve", "five.json", "--time-limit", "nan"), "--time-limit"),
        (("solve", "five.json", "--time-limit", "-1"), "--time-limit"),
        (("solve", "five.json", "--threads", "0"), "threads"),
        (("solve", "five.json", "--mip-rel-gap", "-1"), "mip_rel_gap"),
        (("solve", "five.json", "--warm-start", "gone.json"), "gone.json"),
        (("solve", "five.json", "--nothing"), "`optsched solve --help` says what is expected"),
        (("solve",), "Missing argument 'INSTANCE'; `optsched solve --help`"),
        (("solve", "seconds.json", "--formulation", "hindsight", "--cost-model", MODEL), "rounds"),
        (("solve", "seconds.json", "--formulation", "hindsight"), "import --rounds"),
        (("solve", "seconds.json"), MODEL),
        (("export", "seconds.json", "--format", "lp", "-o", "x.lp"), "shipped are"),
        (
            ("export", "seconds.json", "--formulation", "hindsight", "--format", "lp", "-o", "x"),
            "import --rounds",
        ),
        (("simulate", "five.json"), "--policy"),
        (("simulate", "five.json", "--policy", "nothing"), "mc-sf"),
        (("simulate", "five.json", "--policy", "mc-sf:colour=red"), "colour"),
        (("simulate", "five.json", "--policy", "alpha-protection:alpha=red"), "alpha"),
        (("compare", "five.json", "--policy", "nothing"), "mc-sf"),
        (("compare", "five.json", "--slo-ttft", "0"), "--slo-ttft"),
        (("simulate", "seconds.json", "--policy", "vllm", "--cost-model", "no"), MODEL),
        (("simulate", "seconds.json", "--policy", "vllm", "--cost-model", "no.toml"), "no.toml"),
        (("simulate", "seconds.json", "--policy", "vllm", "--cost-model", "bad.toml"), "unit"),
        (("verify", "five.json", "missing.json"), "missing.json"),
        (("nothing",), "No such command 'nothing'; `optsched --help` says what is expected"),
        (("bound", "five.json", "--method", "srpt", "--certificate-out", "c.json"), "certificate"),
        (
            ("bound", "five.json", "--objective", "p99_ttft", "--certificate-out", "c.json"),
            "found the objective p99_ttft in rounds, whose bounds have no certificates; expected",
        ),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(
    run, instance: Path, seconds: Path, words: tuple[str, ...], expected: str
) -> None:
    Path("bad.toml").write_text(
        'format = "optsched-cost-model"\nversion = 1\nlayers = 32\n[coefficients]\ntoken = 0.1\n'
    )
    before = sorted(Path().iterdir())
    assert expected in one_line_error(run(*words), 2)
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("option", ["--json", "--schedule-out", "--log"])
@pytest.mark.parametrize(
    "target", ["no/folder/x.json", ".", "five.json/x.json", "loop", "a\0b", "y" * 300, ""]
)
def test_an_output_that_cannot_be_written_is_found_before_the_solve(
    run, instance: Path, option: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(solve)
    def too_late(*args: Any, **options: Any) -> None:
        raise AssertionError("solved before the outputs were checked")

    monkeypatch.setattr("optsched.optimize.solve.solve", too_late)
    Path("loop").symlink_to("loop")
    one_line_error(run("solve", instance, option, target), 2)
    assert "two outputs" in one_line_error(
        run("solve", instance, "--json", "x", "--schedule-out", "./x"), 2
    )


@pytest.mark.parametrize(
    "words",
    [
        ("solve", "five.json", "--json"),
        ("bound", "five.json", "--certificate-out"),
        ("compare", "five.json", "--json"),
        ("compare", "five.json", "--schedules-out"),
        (
            "capacity",
            "seconds.json",
            "--cost-model",
            MODEL,
            "--slo-ttft",
            "1",
            "--policy",
            "fcfs",
            "--json",
        ),
        ("simulate", "five.json", "--policy", "fcfs", "--schedule-out"),
        ("simulate", "five.json", "--policy", "fcfs", "--requests-out"),
        ("evaluate", "five.json", "none.json", "--json"),
        ("generate", "jaillet-model-1", "-o"),
        ("import", "azure", "none.csv", "-o"),
        ("export", "five.json", "--format", "lp", "-o"),
        ("fit", "nowhere", "--out"),
        ("fit", "nowhere", "--plot-out"),
        ("gpu", "roofline", "llama2-7b", "--out"),
        ("plot", "none.json", "-o"),
        ("plot", "none.json", "--instance", "five.json", "-o"),
        ("report", "none.json", "-o"),
        ("gpu", "replay", "seconds.json", "--server", "http://127.0.0.1:1", "-o"),
        ("gpu", "profile", "vllm", "nowhere", "--out"),
        ("experiment", "jaillet-model-1", "--out"),
        ("experiment", "jaillet-model-1", "--json"),
    ],
    ids=lambda words: " ".join((*words[:1], words[-1])),
)
def test_an_output_onto_a_loop_of_links_is_one_line(
    run, instance: Path, seconds: Path, words: tuple[str, ...], tmp_path: Path
) -> None:
    suffix = {"--requests-out": ".csv", "--plot-out": ".png"}.get(words[-1], ".json")
    suffix = {"plot": ".png", "report": ".html", "export": ".lp"}.get(words[0], suffix)
    loop = Path(f"loop{suffix}")
    loop.symlink_to(loop)
    before = sorted(tmp_path.iterdir())
    error = one_line_error(run(*words, loop), 2)
    assert "cannot be written: too many levels of symbolic links" in error
    assert sorted(tmp_path.iterdir()) == before


def test_an_unexpected_error_is_one_line_and_debug_shows_the_traceback(
    run, instance: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1 in both cases, with --debug before or behind the command."""

    def broken(*args: Any, **options: Any) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("optsched.policies.run.simulate", broken)
    words = ("simulate", instance, "--policy", "mc-sf")
    result = run(*words)
    assert result.exit_code == 1
    assert result.stderr == "internal error: ValueError: two lines (--debug for the traceback)\n"
    for line in (("--debug", *words), (*words, "--debug")):
        result = run(*line)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr


def test_a_policy_that_loops_exits_4(run) -> None:
    """By simulate and, where it is alone, by compare; beside another policy it loses only its
    row."""
    # Two requests that fit together only at first (twice 1 + 6 tokens at the end, of 10): with
    # alpha = 0 both are admitted, overflow and are cleared together for ever.
    data = changed(
        "requests", {"arrival": [0, 0], "prompt_tokens": [1, 1], "output_tokens": [6, 6]}
    )
    Path("loop.json").write_text(json.dumps(data))
    line = one_line_error(run("simulate", "loop.json", "--policy", "alpha-protection:alpha=0"), 4)
    assert "loop" in line
    result = run("compare", "loop.json", "--policy", "alpha-protection:alpha=0", "--no-bound")
    assert result.exit_code == 4
    words = ("--policy", "alpha-protection:alpha=0", "--policy", "mc-sf", "--no-bound")
    looped, fine = answer("compare", "loop.json", *words)["policies"]
    assert "loop" in looped["error"]
    assert looped["metrics"] is None
    assert fine["metrics"]["tel"] > 0


def command(*words: str) -> list[str]:
    """Return the words that run the command line in a process of its own."""
    return [sys.executable, "-c", "from optsched.cli import main; main()", *words]


@pytest.mark.whole
def test_ctrl_c_keeps_the_incumbent_and_the_bound(tmp_path: Path) -> None:
    # Fifty requests are not solved to the optimum in seconds.
    checked("generate", "jaillet-model-1", "--set", "n=50", "-o", tmp_path / "hard.json")
    words = "solve hard.json --method highs --warm-start mc-sf --time-limit 300 --json r.json"
    process = subprocess.Popen(
        command(*words.split(), "--log", "solver.log"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        begin = time.monotonic()
        log = tmp_path / "solver.log"
        while not (log.exists() and log.stat().st_size) and time.monotonic() - begin < 60:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["status"] in ("feasible", "optimal")
    assert data["objective"] == data["metrics"]["tel"]


def test_a_closed_pipe_is_no_error() -> None:
    process = subprocess.Popen(
        command("schema", "instance"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    "command_name", ["compare", pytest.param("simulate", marks=pytest.mark.whole)]
)
def test_json_is_alone_from_any_folder_whatever_a_policy_prints(
    tmp_path: Path, instance: Path, mine: str, command_name: str
) -> None:
    """Standard output is JSON, what the policy prints is on standard error, and no file is left."""
    (tmp_path / "elsewhere").mkdir()
    words = [command_name, "../five.json", "--policy", f"../{mine}:OneByOne", "--json", "-"]
    if command_name == "compare":
        words += ["--policy", "mc-sf", "--policy", "vllm"]

    result = subprocess.run(
        command(*words), cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["command"] == command_name
    said = result.stderr.splitlines()
    assert said.count("loaded") == said.count("written") == 1  # the file is executed once
    assert {"made", "asked"} < set(said)
    if command_name == "compare":  # the first run after an installation also compiles
        others = {line for line in said if "compiling loops" not in line}
        assert others == {"loaded", "written", "made", "asked"}
    left = {p.name for p in tmp_path.iterdir()} - {"__pycache__"}  # that of mine.py
    assert left == {"elsewhere", "five.json", "mine.py"}
    assert not any((tmp_path / "elsewhere").iterdir())


def test_below_is_answered_in_seconds_too(run) -> None:
    question = [
        "solve", "infermax-b4-o4-i64", "--cost-model", "llama2-7b-a100-infermax-paper",
        "--than", "vllm", "--objective", "makespan",
    ]  # fmt: skip
    # The optimum is 69.118 ms (test_infermax.py, 64 tokens) and vLLM takes 71.572, so the ratio is
    # 0.9657.
    assert answer(*question, "--below", "0.97")["below"]["answer"] == "yes"
    assert answer(*question, "--below", "0.96", status=3)["status"] == "infeasible"
    # More tokens per second are better, so that nobody asks for a schedule below.
    one_line_error(run(*question[:-1], "tps", "--below", "0.96"), 2)


def test_generate_names_its_own_way_to_give_the_kv_capacity(run) -> None:
    words = ("generate", "uniform", "--cost-model", MODEL, "--set", "kv_capacity=9")
    error = one_line_error(run(*words), 2)
    assert error.startswith("error: --set kv_capacity: found 9 beside --cost-model")


def test_bounds_and_a_search_say_what_is_below_where_models_are_too_large(run, tmp_path) -> None:
    rng, n = np.random.default_rng(0), 24
    columns = np.sort(rng.random(n)), rng.integers(50, 300, n), rng.integers(10, 200, n)
    instance = Instance(*columns, kv_capacity=900, time_unit="second")
    cost = load_cost_model("llama2-7b-a100-infermax")
    value = optsched.run(Problem(instance, cost), "vllm").metrics["tel"]
    # Nobody takes less than alone on the machine, whatever the others do.
    ones = (
        Instance([0], [s], [o], 900, time_unit="second") for s, o in zip(*columns[1:], strict=True)
    )
    alone = sum(optsched.run(Problem(one, cost), "vllm").metrics["tel"] for one in ones)
    # So there is room between what is asked for below: 0.99 * value can be met and 0.99 * alone
    # not.
    assert 1.01 * alone < 0.9 * value
    file = tmp_path / "many.json"
    write_instance(instance, file)

    words = ["solve", file, "--cost-model", cost.name, "--objective", "tel", "--than", "vllm"]
    words += ["--time-limit", 20, "--below"]
    yes = answer(*words, 0.99, "--schedule-out", tmp_path / "found.json")
    assert (yes["below"]["answer"], yes["method"]) == ("yes", "search")
    found = evaluate(Problem(instance, cost), read_schedule(tmp_path / "found.json", instance))
    assert found.metrics["tel"] == yes["objective"] < 0.99 * value
    no = answer(*words, 0.99 * alone / value, status=3)
    assert (no["below"]["answer"], no["method"]) == ("no", "bounds")
    assert 0.99 * alone <= no["bound"] <= yes["objective"]


def test_tokens_per_second_are_no_seconds(run) -> None:
    found = run(
        "solve", "infermax-b4-o4-i64", "--cost-model", "llama2-7b-a100-infermax-paper",
        "--objective", "tps",
    )  # fmt: skip
    assert found.exit_code == 0
    last = found.stdout.strip().splitlines()[-1]
    assert "tokens/s, bound" in last
    assert "-0.00" not in last


def test_another_solver_of_pulp_is_taken_by_name(run) -> None:
    words = [
        "solve", "infermax-b4-o4-i64", "--cost-model", "llama2-7b-a100-infermax-paper",
        "--time-limit", "2", "--objective", "makespan",
    ]  # fmt: skip
    unknown = run(*words, "--method", "pulp-bigm", "--pulp-solver", "NOSUCH")
    assert "NOSUCH" in one_line_error(unknown, 2)
    other = run(*words, "--method", "labels", "--pulp-solver", "PULP_CBC_CMD")
    assert "expected pulp-bigm" in one_line_error(other, 2)


def test_a_warning_is_printed_once_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from optsched.cli.application import _warn_once

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _warn_once()
        for text in ("two\nlines", "another", "two\nlines"):
            warnings.warn(text, stacklevel=1)
    assert capsys.readouterr().err == "warning: two lines\nwarning: another\n"


def test_tables_are_csv_or_latex_and_alone(run) -> None:
    """One table of values in CSV or LaTeX and no other words; a file's name is refused; the next
    call prints as ever."""

    import csv

    words = ("compare", "tiny", "--policy", "mc-sf", "--policy", "fcfs")
    found = run(*words, "--csv")
    rows = list(csv.DictReader(found.stdout.splitlines()))  # one table
    assert {row["policy"]: row["TEL [rounds]"] for row in rows if row["policy"] != "bound"} == {
        "best known": "33", "mc-sf": "48", "fcfs": "63",
    }  # fmt: skip
    (fcfs,) = (row for row in rows if row["policy"] == "fcfs")
    # 33 is the optimum of `tiny`. 63 / 33 = 1.909 and, below, 48 / 33 = 1.455.
    assert fcfs["in words"] == "1.909 times the optimum"
    assert "the bound holds for" in found.stderr
    assert "the bound holds for" not in found.stdout
    assert "`> t.csv` writes it there" in one_line_error(run(*words, "--csv", "t.csv"))
    latex = run("--latex", *words).stdout
    assert latex.startswith("\\begin{tabular}")
    assert "mc-sf & clairvoyant & $48$ & $1.455$" in latex
    assert "/ best" in run(*words).stdout  # the next call is as ever


def test_one_policy_is_told_of_in_detail(run, tmp_path: Path) -> None:
    """Its words, its parameter, an unknown name (status 2), and that `vllm` is `vllm-v0`."""
    text = run("policies", "vllm-v0").stdout
    assert "prefill first, no hybrid batches, no chunking" in text
    assert "watermark" in text
    assert run("policies", "vlm").exit_code == 2
    both = [run("simulate", "tiny", "--policy", name).stdout for name in ("vllm", "vllm-v0")]
    assert both[0] == both[1]


def test_every_policy_has_its_page(run) -> None:
    for name, info in list_policies().items():
        found = run("policies", name)
        assert found.exit_code == 0, (name, found.stderr)
        assert all(key in found.stdout for key in info.parameters), name

    assert "policy     " in run("policies", "vllm-v1").stdout


def test_a_policy_s_error_has_its_file_and_its_line(run, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def batch(self, view):\n        return 1 / 0\n")
    text = run("simulate", "tiny", "--policy", f"{file}:Mine").stderr
    assert f"raised ZeroDivisionError('division by zero') ({file}, line 3)" in text
    file.write_text("x = 1\nx.y\n")
    text = run("simulate", "tiny", "--policy", f"{file}:Mine").stderr
    assert f"({file}, line 2)" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("library show chat", "'chat' is a family; expected one of chat-"),
        ("diagnose /dev/null --gpu h100-80gb --model llama2-7b", "with anything in it"),
        ("simulate tiny --policy vllm-v1:ttl=5", "expected it with eviction=ttl"),
        ("simulate tiny --policy vllm-v1:eviction=ttl", "as in vllm-v1:eviction=ttl,ttl="),
    ],
)
def test_errors_say_what_to_do(run, words: str, text: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert text in result.stderr


def test_what_goes_by_a_cache_that_is_empty_is_said(run) -> None:
    assert "shares no prefixes" in run("simulate", "tiny", "--policy", "vllm-v1:policy=lpm").stdout
