"""The laboratory: studies with intervals, worst cases, and where a gap comes from."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import answer, run

import optsched
from instances import small
from optsched import Problem
from optsched.analysis.compare import compare
from optsched.analysis.optima import Optima
from optsched.analysis.ratio import FAMILIES, against, ratios, two_point, worst_case
from optsched.analysis.ratio.worst import quick_optimum
from optsched.experiments.ratios import RATIOS, study_of
from optsched.files.read_write import read_instance
from optsched.judge.evaluate import evaluate
from optsched.optimize.solve import solve
from optsched.optimize.solvers.base import Status
from optsched.policies import Batch, View
from optsched.problem.errors import InputError, SolverError, UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import from_starts
from optsched.workloads.generate import generate

# --- studies ------------------------------------------------------------------------------------


def test_ratios_to_the_optimum_are_exact_and_at_least_1() -> None:
    instances = [small(seed) for seed in range(6)]
    study = ratios(["mc-sf", "mc-benchmark"], instances, time_limit_s=120)
    # Of each instance: the value over the optimum, which `solve` finds by itself.
    for row in study.rows:
        best = solve(instances[row.instance], threads=1).value
        assert row.exact
        assert row.low == pytest.approx(row.value / best)
        assert row.low >= 1
    # Of all: mean, interval and worst case are those of the rows.
    mean = study.mean("mc-sf")
    assert mean.exact
    assert mean.low == pytest.approx(np.mean([row.low for row in study.of("mc-sf")]))
    assert mean.interval[0] <= mean.low <= mean.interval[1]
    assert study.worst("mc-sf").low == max(row.low for row in study.of("mc-sf"))
    assert "| mc-sf |" in study.to_markdown()


def test_references_are_ordered() -> None:
    # bound <= optimum <= best known <= H-SF: the ratios the other way round.
    instances = [small(seed) for seed in range(4)]
    found = {
        reference: ratios("mc-benchmark", instances, reference, time_limit_s=120)
        for reference in ("bound", "optimum", "best-known", "h-sf")
    }
    rows = {name: study.of("mc-benchmark") for name, study in found.items()}
    for k in range(4):
        bound, optimum, known, h_sf = (rows[name][k] for name in rows)
        assert bound.low == 1
        assert bound.high >= optimum.high == optimum.low >= known.low >= h_sf.low


def test_an_optimum_that_is_not_proved_gives_an_interval(monkeypatch) -> None:
    import optsched.analysis.ratio.measure as module

    def unproved(instance, *_, **options):
        return replace(solve(instance, threads=1), bound=1.0)

    monkeypatch.setattr(module, "optimum", unproved)
    study = ratios("mc-sf", [small(1)])
    (row,) = study.rows
    assert not row.exact
    # A bound of 1 makes the upper ratio the value itself.
    assert row.low < row.high == row.value
    mean = study.mean("mc-sf")
    assert not mean.exact
    assert mean.interval[0] <= mean.low < mean.high <= mean.interval[1]


def test_a_known_optimum_is_found_again() -> None:
    instance = read_instance("tiny")
    # MC-SF has a total latency of 48 and the optimum is 33.
    (row,) = ratios("mc-sf", [instance]).rows
    assert row.low == row.high == 48 / 33


@pytest.mark.parametrize(
    "reference", ["optimum", "bound", pytest.param("best-known", marks=pytest.mark.whole)]
)
@pytest.mark.parametrize(
    "known", [{"optimum": 99}, {"optimum": 1}, {"bound": 500}, {"best_known": 2, "bound": 1}]
)
def test_what_an_instance_says_of_itself_is_not_believed(reference, known) -> None:
    instance = read_instance("tiny")
    told = ratios("fcfs", [replace(instance, known=known)], reference)
    bare = ratios("fcfs", [replace(instance, known=None)], reference)
    assert told.rows == bare.rows
    assert told.rows[0].low >= 1


@pytest.mark.parametrize(
    "reference", ["optimum", "bound", pytest.param("worst case", marks=pytest.mark.whole)]
)
def test_a_ratio_below_1_to_what_is_proved_is_an_error(reference: str, monkeypatch) -> None:
    """What is "proved" is made too large: 50 more than the optimum, or a bound of 10,000."""

    import optsched.analysis.ratio.measure as study
    import optsched.analysis.ratio.worst as worst

    def lies(instance, *_, **options):
        found = solve(instance, threads=1)
        return replace(found, value=found.value + 50, bound=found.value + 50)

    monkeypatch.setattr(study, "optimum", lies)
    monkeypatch.setattr(worst, "optimum", lies)
    monkeypatch.setattr(study, "lower_bound", lambda *_, **__: (10_000.0, "a lie"))
    if reference == "worst case":
        with pytest.raises(SolverError, match="contradicts a schedule of tel"):
            worst_case("mc-sf", "offline", 0.2, n=3, kv_capacity=20, progress=False)
    else:
        with pytest.raises(SolverError, match=r"contradicts a schedule of tel .*, below 1"):
            ratios("mc-sf", [small(0)], reference)


def test_a_policy_below_the_best_schedule_found_is_the_best_known(monkeypatch) -> None:
    """The search is made to end with a schedule that is 1,000 worse than the optimum and a bound
    of 1."""

    import optsched.analysis.ratio.measure as module

    def stopped(instance, *_, **options):
        found = solve(instance, threads=1)
        return replace(found, value=found.value + 1000, bound=1.0)

    monkeypatch.setattr(module, "optimum", stopped)
    (row,) = ratios("mc-sf", [small(0)]).rows
    assert row.low == 1 < row.high


def test_every_instance_has_a_certificate_or_is_named(tmp_path: Path) -> None:
    known = read_instance("tiny")
    limited = replace(small(0), limits=Limits(max_running=1), name="limited")
    phases = replace(small(1), hybrid_batching=False, name="phases")
    study = ratios("mc-sf", [known, limited, phases], store=tmp_path / "c")
    # Of `limited` and `phases` a lower bound is certified, and not the optimum.
    assert len(list((tmp_path / "c").glob("*-certificate.json"))) == 3
    assert study.uncertified == ("limited: solved by cpsat", "phases: solved by cpsat")
    words = "certificates of the optimum: none for 2 instances, the first limited: solved by cpsat"
    assert words in study.to_markdown()
    assert study.to_dict()["uncertified"] == study.uncertified
    # Three schedules and three certificates.
    text = run("verify", str(tmp_path / "c"))
    assert "files: 6, failures: 0\noptima: 3, of which certificates prove 1" in text


def test_a_policy_whose_file_has_changed_runs_again_and_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """
from optsched.policies import Batch

class Own:
    def batch(self, view):
        first = (view.running or sorted(view.waiting, key=lambda i: KEY * i))[0]
        return Batch({first: view.rest(first)})
"""
    study = ("ratios", "--policy", "own.py:Own", "--policy", "mc-sf", "--set", "n=3",
             "--trials", "2", "--out", "study", "--store", "optima")  # fmt: skip
    found = []
    for key in "1", "-1", "1":
        Path("own.py").write_text(text.replace("KEY", key))
        found.append(answer(*study)["ratios"]["tel"])

    # The first request first, and the last: the second policy's values stay, and so do those of a
    # file that is as before.
    assert found[0] == found[2] != found[1]
    assert found[0][1::2] == found[1][1::2]
    # Two instances under mc-sf and under either text of own.py.
    assert len(list(Path("optima/rows").iterdir())) == 2 * 3


def test_optima_in_seconds_are_kept_with_certificates_and_cost_models(tmp_path: Path) -> None:
    models = ("llama2-7b-a100-infermax", "llama2-7b-a100-vidur-fit")
    cases = [
        Problem(replace(read_instance("tiny-seconds"), chunked_prefill=False), m) for m in models
    ]
    study = ratios("mc-sf", cases, store=tmp_path, time_limit_s=60)
    assert study.uncertified == ()
    # Of each a schedule and a certificate, and each is checked under its own model.
    text = run("verify", str(tmp_path))
    assert "files: 4, failures: 0\noptima: 2, of which certificates prove 2" in text
    # With the files of the two models exchanged, neither schedules nor certificates are right.
    named = {key: str(key.with_suffix(".kept")) for key in tmp_path.glob("*-model.toml")}
    first, second = (key.rename(kept).read_text() for key, kept in named.items())
    for key, text in zip(named, (second, first), strict=True):
        key.write_text(text)
    assert "files: 4, failures: 4" in run("verify", str(tmp_path), status=5)


def test_a_store_keeps_the_better_end_of_each_search(tmp_path: Path) -> None:
    instance, store = small(0), Optima(tmp_path)
    best = solve(instance, threads=1)
    worst = from_starts(best.schedule.starts + 3, instance)
    value = evaluate(instance, worst).metrics["tel"]
    poor = replace(best, value=value, schedule=worst, bound=best.value, status=Status.FEASIBLE)
    good = replace(best, bound=best.value - 2, status=Status.FEASIBLE, certificate=None)
    assert value > best.value
    # One has the bound and the other the schedule: together they are an optimum.
    for first, second in ((poor, good), (good, poor)):
        for found in (first, second):
            store.keep(Problem(instance), found)
        known, over = store.known(Problem(instance), 1e9)
        # However long: nothing is left to search for.
        assert over
        assert (known.value, known.bound, known.status) == (best.value, best.value, "optimal")
        (result,) = tmp_path.glob("*-result.json")
        data = json.loads(result.read_text())
        assert (data["status"], data["gap"], data["objective"]) == ("optimal", 0, best.value)
        result.unlink()


def test_policies_that_come_later_are_measured_against_the_same_optimum() -> None:
    given = RATIOS.settings({"policies": ["a", "b"]})
    ends = {"error": None, "rule": None, "value": 9.0}
    first = {"bound": 5.0, "best_known": 8.0, "low": 9 / 8, "high": 9 / 5, **ends}
    later = {"bound": 6.0, "best_known": 9.0, "low": 1.0, "high": 9 / 6, **ends}
    row = {
        f"{name}: {key}": v for name, one in (("a", first), ("b", later)) for key, v in one.items()
    }
    row |= {"trial": 0, "instance": "one", "failed": None}
    assert [(one.low, one.high) for one in study_of(given, [row]).rows] == [(9 / 8, 9 / 6)] * 2
    # Of the two references the better ends count for both: 8 is the best known and 6 the bound.
    text = study_of(given, [row]).to_markdown()
    assert "optimum: not proved on 1 of 1, the first one" in text


def test_a_command_and_a_function_throw_the_same_coins() -> None:
    words = ["ratios", "--set", "n=5", "--trials", 3, "--seed", 4, "--runs", 2]
    found = answer(*words, "--policy", "a-random", "--reference", "h-sf")
    cases = [generate("jaillet-model-1", seed=4 + k, n=5) for k in range(3)]
    rows = ratios("a-random", cases, "h-sf", seeds=2, seed=4).rows
    assert found["ratios"]["tel"] == [row.value for row in rows]
    # Alone, but called the third (first=2), the last case has the coins that it had in the study.
    (last,) = ratios("a-random", cases[2:], "h-sf", seeds=2, seed=4, first=2).rows
    assert last.value == rows[2].value


@pytest.mark.parametrize("reference", ["bound", "h-sf", "best-known"])
def test_certificates_of_another_reference_are_refused(reference: str, tmp_path: Path) -> None:
    words = f"store: found reference {reference}; expected optimum"
    with pytest.raises(UsageError, match=words):
        ratios("mc-sf", [small(0)], reference, store=tmp_path / "c")

    asked = ["--set", "n=4", "--trials", 1, "--reference", reference]
    assert words in run("ratios", *asked, "--store", str(tmp_path / "c"), status=2)


def test_policies_are_compared_in_pairs() -> None:
    # Sixty requests, four fifths of 2 output tokens and the others of 12: most are short, as a-min
    # hopes.
    instances = [two_point(2, 12, 0.8, 60, kv_capacity=60 + k) for k in range(8)]
    study = ratios(["a-min", "a-max"], instances, "h-sf", seeds=3)
    pair = study.paired("a-min", "a-max")
    assert pair.quotient < 1
    assert pair.interval[0] <= pair.quotient <= pair.interval[1] < 1
    assert (pair.wins, pair.ties, pair.losses) == (8, 0, 0)
    back = study.paired("a-max", "a-min")
    assert back.quotient == pytest.approx(1 / pair.quotient)


def test_the_same_seed_gives_the_same_study() -> None:
    instances = [small(seed) for seed in range(3)]
    one, two = (ratios("a-random", instances, seeds=2) for _ in range(2))
    assert one.rows == two.rows
    assert one.mean("a-random") == two.mean("a-random")


def test_progress_counts_instances() -> None:
    seen: list[tuple[int, int]] = []
    ratios("mc-sf", [small(0), small(1)], "h-sf", progress=lambda k, n: seen.append((k, n)))
    assert seen == [(1, 2), (2, 2)]


def test_in_seconds_ratios_are_to_h_sf_a_bound_or_the_optimum() -> None:
    instance = generate("lognormal", n=20)
    model = "llama2-70b-tp2-a100-splitwise"
    study = ratios(["mc-sf", "vllm"], [Problem(one, model) for one in [instance]], "h-sf")
    # h-sf is mc-sf with true lengths, and without predictions mc-sf knows them, too.
    assert study.of("mc-sf")[0].low == pytest.approx(1.0)
    bound = ratios("mc-sf", [Problem(one, model) for one in [instance]], "bound").rows[0]
    assert bound.low == 1 < bound.high
    few = Instance([0, 0.1, 0.1], [50, 80, 20], [3, 2, 4], kv_capacity=100, time_unit="second")
    few = Problem(few, model)
    row = ratios("mc-sf", [few]).rows[0]
    assert row.exact
    assert row.bound == pytest.approx(solve(few, method="cpsat").value)


def bad_with_five(folder: Path, statement: str) -> str:
    """Return a policy that does something bad if the instance has five requests."""
    file = folder / "bad.py"
    file.write_text(
        "import os\n"
        "from optsched import Batch\n"
        "class Bad:\n"
        "    def batch(self, view):\n"
        "        if len(view.arrival) == 5:\n"
        f"            {statement}\n"
        "        i = (view.running or view.waiting)[0]\n"
        "        return Batch({i: view.rest(i)})\n"
    )
    return f"{file}:Bad"


def test_a_policy_that_fails_loses_nothing_of_the_study(tmp_path: Path) -> None:
    """The policy raises an error where there are five requests, as in the second of three
    instances."""
    spec = bad_with_five(tmp_path, "raise KeyError('x')")
    instances = [small(0, 4), small(1, 5), small(2, 4)]
    study = ratios([spec, "mc-sf"], instances)
    assert [row.error is None for row in study.of(spec)] == [True, False, True]
    assert "batch 0: raised KeyError('x')" in study.of(spec)[1].error
    assert study.mean(spec).failed == 1
    assert study.mean("mc-sf").failed == 0
    # Pairs are of the two instances that both policies have run.
    assert study.paired(spec, "mc-sf").wins + study.paired(spec, "mc-sf").losses <= 2
    assert "(1 failed)" in study.to_markdown()


def test_a_policy_that_ends_its_process_costs_one_instance(tmp_path: Path) -> None:
    spec = bad_with_five(tmp_path, "os.abort()")
    words = ("ratios", "--policy", spec, "--set", "n=5", "--trials", 1, "--reference", "h-sf")
    assert "its process was ended by SIGABRT, 2 times" in run(*words, "--jobs", 2, status=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("mc-sf", []), "expected at least one of each"),
        (([], [small(0)]), "expected at least one of each"),
        (("mc-sf", [small(0)], "best"), "reference: found 'best'"),
        (("mc-fs", [small(0)]), "policy 'mc-fs' is unknown"),
        ((["mc-sf", "mc-sf"], [small(0)]), "found mc-sf twice"),
    ],
)
def test_a_bad_study_is_refused(arguments, text: str) -> None:
    with pytest.raises(InputError, match=text):
        ratios(*arguments)
    with pytest.raises(InputError):
        ratios("mc-sf", [small(0)], seeds=0)


def test_a_policy_that_is_not_there_is_refused() -> None:
    study = ratios("mc-sf", [small(0)], "h-sf")
    with pytest.raises(InputError, match="expected one of mc-sf"):
        study.mean("fcfs")


# --- papers -----------------------------------------------------------------------------------


class OneByOne:
    clairvoyant = False

    def __init__(self, name: str) -> None:
        self.name = name

    def batch(self, view: View) -> Batch:
        i = (view.running or view.waiting)[0]
        return Batch({i: view.rest(i)})


def test_objects_have_rows_under_their_labels() -> None:
    instances = [small(seed) for seed in range(3)]
    # The labels are a mapping's keys, or what the objects are called; they change no value.
    study = ratios({"mine": OneByOne("a"), "theirs": "mc-sf"}, instances)
    assert study.policies == ("mine", "theirs")
    by_name = ratios([OneByOne("a"), OneByOne("b")], instances)
    assert by_name.policies == ("a", "b")
    assert [r.value for r in by_name.of("b")] == [r.value for r in study.of("mine")]
    with pytest.raises(InputError, match="found a twice"):
        ratios([OneByOne("a"), OneByOne("a")], instances)
    # In a comparison and in a worst case, too.
    compared = compare(instances[0], {"mine": OneByOne("a"), "mc-sf": "mc-sf"}).rows
    assert [row.policy for row in compared] == ["mine", "mc-sf"]
    assert compared[0].value == study.of("mine")[0].value
    assert not compared[0].clairvoyant
    found = worst_case(OneByOne("mine"), budget_s=0.5, n=3, kv_capacity=20, progress=False)
    assert found.policy == "mine"


def test_a_study_ends_in_tables_and_a_picture(tmp_path: Path, monkeypatch) -> None:
    import optsched.analysis.ratio.measure as module
    from optsched.show import plot
    from optsched.show.plot import style

    def unproved(instance, *_, **options):
        return replace(solve(instance, threads=1), bound=1.0)

    # With bounds of 1 ratios are intervals: in the table, the summary, LaTeX and the picture.
    monkeypatch.setattr(module, "optimum", unproved)
    study = ratios(["mc-sf", "fcfs"], [small(1), small(2)])
    frame = study.to_frame()
    assert frame["policy"].tolist() == ["mc-sf", "fcfs"] * 2
    study.to_frame().to_csv(tmp_path / "rows.csv", index=False)
    assert (tmp_path / "rows.csv").read_text().splitlines()[0] == ",".join(frame.columns)
    lows, highs = ([getattr(row, end) for row in study.of("mc-sf")] for end in ("low", "high"))
    worst = study.summary().set_index("policy")["worst"]["mc-sf"]
    assert worst == f"{max(lows):.4f} to {max(highs):.4f}"
    assert f"mc-sf & $[{np.mean(lows):.4f}, {np.mean(highs):.4f}]$ &" in study.to_latex()
    drawn = plot.plot_ratios(frame, style.figure().subplots(), study.reference)
    lines = {line.get_label(): line.get_xdata().tolist() for line in drawn.get_lines()}
    # A curve of shares rises at each ratio, from the least one on.
    assert lines["mc-sf"] == [min(lows), *sorted(lows)]
    assert drawn.get_xlabel() == "ratio to optimum"
    assert "optimum not proved" in drawn.get_legend_handles_labels()[1]


def test_a_policy_without_any_ratio_has_a_name_in_the_picture_and_no_points() -> None:
    from optsched.show import plot
    from optsched.show.plot import style

    rows = {"policy": ["mc-sf", "fcfs"], "low": [1.0, np.nan], "high": [1.5, np.nan]}
    drawn = plot.plot_ratios(rows, style.figure().subplots())
    lines = {line.get_label(): line.get_xdata().tolist() for line in drawn.get_lines()}
    assert lines == {"mc-sf": [1.0, 1.0], "fcfs": []}


def test_ratios_on_the_command_line_go_on_and_their_certificates_are_verified(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = bad_with_five(tmp_path, "pass")
    words = ["ratios", "--policy", spec, "--policy", "mc-sf", "--set", "n=5", "--out", "study"]
    words += ["--store", "certificates", "--time-limit", "20"]
    # Two trials, and a third beside them: the rows are those that Python has.
    run(*words, "--trials", 2)
    found = answer(*words, "--trials", 3)
    cases = [generate("jaillet-model-1", seed=k, n=5) for k in range(3)]
    study = ratios([spec, "mc-sf"], cases, time_limit_s=20)
    assert found["ratios"]["low"] == [row.low for row in study.rows]
    assert found["paired"][0]["losses"] + found["paired"][0]["ties"] == 3  # it never beats MC-SF
    # Three instances with a schedule and a certificate each.
    assert "files: 6, failures: 0" in run("verify", "certificates")
    # A value less than is sealed fails; so does all that has no instance (status 5).
    forged = next(Path("certificates").glob("*-certificate.json"))
    data = json.loads(forged.read_text())
    forged.write_text(json.dumps({**data, "value": data["value"] - 1}))
    assert "files: 6, failures: 1" in run("verify", "certificates", status=5)
    next(Path("certificates").glob("*-instance.json")).unlink()
    assert "found no instance of it" in run("verify", "certificates", status=5)
    Path("bad.py").write_text(Path("bad.py").read_text() + "# another policy\n")
    again = answer(*words, "--trials", 3)  # a changed file runs again
    assert again["ratios"] == found["ratios"]
    assert "expected one, or an instance and a FILE" in run("verify", "tiny", status=2)


def test_ctrl_c_keeps_the_ratios_that_have_run(tmp_path: Path, monkeypatch) -> None:
    from optsched.experiments import ratios

    ran: list[int] = []

    def stopped(trial):
        ran.append(trial["seed"])
        if len(ran) == 3:
            raise KeyboardInterrupt
        return ratios._run(trial)

    experiment = replace(ratios.RATIOS, run=stopped)
    monkeypatch.setattr(ratios, "RATIOS", experiment)
    text = run("ratios", "--set", "n=5", "--trials", 9, status=130)
    # Two of nine had ended when the third was interrupted.
    assert "stopped early: 7 instances have not run" in text
    assert "mc-sf" in text
    # Now the first trial is taken for the third, so that none has ended.
    ran[:] = [0, 0]
    text = run("ratios", "--set", "n=5", "--trials", 9, status=130)
    assert text == "error: interrupted: stopped before any instance was finished\n"


# Policies that never answer, answer nothing, take too much KV, or raise the judge's words.
FOREVER = """
from optsched import Batch

class Forever:
    def batch(self, view):
        while True:
            pass

class Nothing:
    def batch(self, view):
        return Batch()

class TooMuch:
    clairvoyant = False

    def batch(self, view):
        prompts = {i: int(view.prompt_tokens[i]) for i in view.waiting}
        return Batch({**prompts, **dict.fromkeys(view.running, 1)})

class Wordy:
    def batch(self, view):
        raise RuntimeError("the judge rejects its schedule")
"""


def test_a_policy_that_never_answers_or_is_broken_loses_its_row_in_ratios(
    tmp_path: Path, monkeypatch
) -> None:
    """`FOREVER` has a policy that never answers, one that answers nothing, one that takes too
    much KV, and one that raises the judge's words."""
    monkeypatch.chdir(tmp_path)
    Path("m1.py").write_text(FOREVER)
    study = ["--set", "n=4", "--trials", 1, "--reference", "h-sf", "--time-limit", 0.5]
    for jobs in 1, 2:
        text = run(
            "ratios", "--policy", "m1.py:Forever", *study, "--policy", "mc-sf", "--jobs", jobs
        )
        assert "m1.py:Forever: failed on 1 of 1 instances, the first jaillet" in text
        assert ": time limit while" in text

    text = run("ratios", "--policy", "m1.py:Nothing", "--policy", "mc-sf", *study)
    assert text.count("m1.py:Nothing") == 2  # its row, and a line that says why
    row = next(line for line in text.splitlines() if line.startswith("m1.py:Nothing"))
    # No ratio of any kind, of 0 instances.
    assert row.split()[1:] == ["-", "-", "-", "-", "0", "(1", "failed)"]
    # Without another policy nothing is left (status 4); what the judge rejects is an error (5).
    assert "no policy found" in run("ratios", "--policy", "m1.py:Nothing", *study, status=4)
    assert "rejects" in run("ratios", "--policy", "m1.py:TooMuch", *study[2:], status=5)
    found = answer("ratios", "--policy", "m1.py:TooMuch", *study[2:], status=5)
    assert found["ratios"]["rule"] == ["kv_capacity"]

    # What is broken is not told from words, which a policy could say as well.
    words = ("ratios", "--policy", "m1.py:Wordy", "--policy", "mc-sf", *study)
    assert "rejects" in run(*words)
    assert answer(*words)["ratios"]["rule"] == [None, None]


def test_a_finished_study_is_printed_again_without_its_folder_of_certificates(
    tmp_path: Path, monkeypatch
) -> None:
    """A study that has ended runs nothing again, with or without --store, and prints its LaTeX.

    Another store or a cost model, with which the trials did not run, is refused (exit status 2).
    """
    monkeypatch.chdir(tmp_path)
    words = [
        "ratios",
        "--set",
        "n=4",
        "--trials",
        1,
        "--out",
        "study",
        "--store",
        "proofs",
    ]
    run(*words, "--policy", "mc-sf", "--policy", "fcfs")
    # The same study without --store, which need not be said again.
    text = run(*words[:-2], "--policy", "mc-sf", "--policy", "fcfs", "--latex")
    assert "\\begin{tabular}{lrrrlr}" in text
    assert "fcfs & $1." in text  # a ratio to the optimum: 1 or more
    assert "stopped" not in text
    again = run(*words[:-1], "others", "--policy", "mc-sf", "--policy", "fcfs", status=2)
    assert "found trials with store = 'proofs'; expected 'others' (use another" in again
    costly = [*words, "--policy", "mc-sf", "--policy", "fcfs", "--cost-model", "a.toml"]
    assert "cost_model = ''; expected 'a.toml' " in run(*costly, status=2)


def test_ratios_say_early_that_nothing_is_proved_and_no_interval_for_one(monkeypatch) -> None:
    """One trial, whose optimum is made to lie between 1 and 5."""

    import optsched.analysis.ratio.measure as module

    class Open:
        bound, value, certificate, certified = 1.0, 5.0, None, None

    monkeypatch.setattr(module, "optimum", lambda *_, **__: Open())
    text = run("ratios", "--set", "n=4", "--trials", 1)
    assert "note: optimum not proved on 1 of 1; a smaller n or a longer --time-limit helps" in text
    assert any(line.split()[-2:] == ["jaillet-model-1-seed0", "1"] for line in text.splitlines())
    row = ratios(["mc-sf", "fcfs"], [small(0)], "h-sf")
    assert set(row.summary()["95% interval"]) == {"-"}
    assert "times the tel of fcfs: " in str(row.pairs()[0])


# --- long work --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt_at(k: int):
    """Return a function for progress that presses Ctrl-C once k are done."""

    def tell(done: float, *_: object) -> None:
        if done >= k:
            raise KeyboardInterrupt

    return tell


def test_ctrl_c_keeps_the_instances_that_have_finished() -> None:
    instances = [small(seed) for seed in range(6)]
    whole = ratios(["mc-sf", "fcfs"], instances, "h-sf")
    # Interrupted after two of six: their rows are those of the whole study, and four are told.
    study = ratios(["mc-sf", "fcfs"], instances, "h-sf", progress=interrupt_at(2))
    assert len(study.rows) == 2 * 2  # two instances under two policies
    assert set(study.rows) <= set(whole.rows)
    assert (whole.unfinished, study.unfinished) == (0, 4)
    assert study.mean("mc-sf").count == 2
    assert study.paired("mc-sf", "fcfs").wins + study.paired("mc-sf", "fcfs").ties == 2
    assert study.to_markdown().endswith("stopped early: 4 instances have not run")
    assert "stopped early" not in whole.to_markdown()


def test_a_solve_that_takes_ctrl_c_for_its_own_end_ends_the_study_too(monkeypatch) -> None:
    import optsched.analysis.ratio.measure as module

    instances = [small(seed) for seed in range(5)]
    solved: list[Instance] = []

    def interrupted(instance: Instance, *_: object, **options: object):
        solved.append(instance)
        if len(solved) == 3:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return solve(instance, threads=1)

    monkeypatch.setattr(module, "optimum", interrupted)
    study = ratios("mc-sf", instances)
    assert [row.instance for row in study.rows] == [0, 1]  # the third was cut short
    assert study.unfinished == 3
    with pytest.raises(KeyboardInterrupt):  # as everywhere else again
        signal.raise_signal(signal.SIGINT)


def test_an_event_stops_a_study_from_another_thread() -> None:
    stop = threading.Event()
    stop.set()
    study = ratios("mc-sf", [small(0), small(1)], "h-sf", stop=stop)
    # The event is looked at behind the first instance.
    assert (len(study.rows), study.unfinished) == (1, 1)


def test_with_nothing_finished_there_is_nothing_to_keep(monkeypatch) -> None:
    """Ctrl-C in the first instance is raised; a study without rows is not returned."""

    import optsched.analysis.ratio.measure as module

    monkeypatch.setattr(module._Plan, "rows", lambda *_: interrupt_at(0)(0))
    with pytest.raises(KeyboardInterrupt):
        ratios("mc-sf", [small(0)], "h-sf")


def test_ctrl_c_keeps_the_worst_case_so_far() -> None:
    def interrupt(done: int, of: int) -> None:
        # Progress is in seconds of the budget.
        assert of == 600
        if done > 1:  # the first climb has begun
            raise KeyboardInterrupt

    found = worst_case("mc-sf", "online", budget_s=600, n=5, kv_capacity=40, progress=interrupt)
    assert found.low > 1
    tel = optsched.run(found.instance, "mc-sf").metrics["tel"]
    best = evaluate(found.instance, found.schedule).metrics["tel"]
    assert found.low == tel / best


def test_an_event_ends_the_search_for_a_worst_case() -> None:
    stop = threading.Event()
    stop.set()
    found = worst_case("mc-sf", "online", budget_s=600, n=5, kv_capacity=40, stop=stop)
    assert found.evaluations == 10  # what it had drawn
    assert found.low >= 1


def test_progress_is_for_terminals_and_goes_when_the_work_ends(monkeypatch) -> None:
    """`Terminal` says that it is one. The last bytes clear the line."""

    def shown(terminal: io.StringIO, **options: object) -> str:
        monkeypatch.setattr(sys, "stderr", terminal)
        ratios("mc-sf", [small(0), small(1)], "h-sf", **options)
        return terminal.getvalue()

    text = shown(Terminal())
    assert "0 of 2 instances" in text
    assert text.endswith("\x1b[2K")
    assert shown(Terminal(), progress=False) == ""
    assert shown(io.StringIO()) == ""


# --- worst cases --------------------------------------------------------------------------------


def test_the_quick_schedule_is_feasible_and_never_better_than_the_optimum() -> None:
    hits = 0
    for seed in range(12):
        instance = small(seed, 6)
        value, starts = quick_optimum(instance)
        assert evaluate(instance, from_starts(starts, instance)).metrics["tel"] == value
        best = solve(instance, threads=1).value
        assert value >= best
        hits += value == best
    assert hits >= 9  # of 12: it may miss the optimum, but seldom does
    with pytest.raises(UsageError):  # it knows no limits
        quick_optimum(replace(instance, limits=Limits(max_running=2)))


def test_worst_case_finds_6_times_the_optimum_online() -> None:
    # With `enough` it ends at a ratio of 6.
    found = worst_case("mc-sf", "online", 600.0, n=10, kv_capacity=100, enough=6.0)
    assert found.proved
    assert found.low >= 6
    assert found.instance.n <= 10
    assert optsched.run(found.instance, "mc-sf").metrics["tel"] == found.value
    optimum = found.instance.known["optimum"]
    assert found.low == found.value / optimum
    assert evaluate(found.instance, found.schedule).metrics["tel"] == optimum


def test_worst_case_finds_2_times_the_optimum_with_all_arrivals_at_0() -> None:
    found = worst_case("mc-sf", "offline", 600.0, n=10, kv_capacity=100, enough=2.0)
    assert found.low >= 2
    assert not found.instance.arrival.any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_attacks_a_robust_policy(family: str) -> None:
    found = worst_case("a-min", family, 0.5, n=6, kv_capacity=24, seeds=2)
    assert 1 <= found.low <= found.high
    # The theorem's adversary has M / 2 + 1 = 13 requests; no family has more.
    assert found.instance.n <= 13


def test_a_family_may_be_a_function_and_policies_may_be_objects() -> None:
    from optsched.policies import make_policy

    seen: list[tuple[int, int]] = []
    found = worst_case(
        make_policy("fcfs")[0],
        lambda policy, capacity, n, rng: small(int(rng.integers(100)), n),
        1.5,
        n=4,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert found.low >= 1
    assert found.policy == "Rules"
    assert all(0 <= done <= of == 2 for done, of in seen)  # 1.5 s, rounded up


def test_a_bad_search_is_refused() -> None:
    with pytest.raises(InputError, match=r"family:.*'x'"):
        worst_case("mc-sf", "x", 1)
    with pytest.raises(InputError, match="budget_s"):
        worst_case("mc-sf", "online", 0)
    with pytest.raises(InputError, match="an integer >= 4"):
        against("mc-sf", 3)


@pytest.mark.parametrize("name", ["worst-mc-sf-online", "worst-mc-sf-offline"])
def test_the_worst_cases_that_are_shipped(name: str) -> None:
    instance = read_instance(name)
    result = solve(instance, threads=1, time_limit_s=60)
    tel = optsched.run(instance, "mc-sf").metrics["tel"]
    assert result.value == result.bound == instance.known["optimum"]
    # Of MC-SF and the optimum: 990 / 109 = 9.08 online, and 390 / 129 = 3.02 with all at 0.
    assert tel / result.value >= (6 if name.endswith("online") else 3)
    assert instance.n <= 10
    assert instance.kv_capacity <= 100


# --- gaps ---------------------------------------------------------------------------------------
