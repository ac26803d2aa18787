"""A problem is made once: the instance, the machines and the objective that all doors take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run as command

import optsched
from optsched import Fleet, Instance, Limits, Link, Machine, Problem, run
from optsched.problem.errors import InputError, NoIncumbentError, UsageError, ViolationError

MODEL = "llama2-7b-a100-infermax"


def busy(n: int = 12) -> Instance:
    """Return requests of up to 299 + 39 tokens, some 50 a second, with KV for 3,000."""
    rng = np.random.default_rng(5)
    prompt, output = rng.integers(20, 300, n), rng.integers(2, 40, n)
    return Instance(np.cumsum(rng.exponential(0.02, n)), prompt, output, 3000, time_unit="second")


def test_slos_are_columns_and_leave_the_digest() -> None:
    # A limit for all is a column of the instance, of which the digest says nothing. It is refused
    # where it is given twice, or lacks where the objective needs one.
    instance = busy()
    for problem in (
        Problem(instance, MODEL, slo_ttft=0.5),
        Problem(instance, MODEL, "slo_attainment:slo_ttft=0.5"),
    ):
        assert problem.instance.slo_ttft is not None
        assert set(problem.instance.slo_ttft.tolist()) == {0.5}
        assert problem.instance.sha256 == instance.sha256
        assert problem.about("tel").instance is problem.instance
    with pytest.raises(UsageError, match=r"slo_ttft.*both 1 and 2"):
        Problem("tiny", objective="slo_attainment:slo_ttft=1", slo_ttft=2)
    with pytest.raises(UsageError, match="slo_attainment"):
        Problem("tiny", objective="slo_attainment")


def test_a_certificate_of_a_problem_with_slos_is_one_of_the_instance() -> None:
    found = optsched.bound(Problem("tiny", slo_ttft=5), time_limit_s=1)
    assert found.certificate is not None
    assert optsched.verify("tiny", found.certificate) == found.certified > 0


def test_a_single_machine_is_that_of_the_instance() -> None:
    machine = Machine(kv_capacity=20, limits=Limits(max_running=2))
    problem = Problem("tiny", machine)
    tiny = optsched.read_instance("tiny")
    assert (problem.instance.kv_capacity, problem.instance.limits.max_running) == (20, 2)
    assert problem.instance.sha256 != tiny.sha256  # what is proved of it is not proved of tiny
    assert Problem("tiny", Machine()).instance is not None
    assert Problem("tiny", Machine(kv_capacity=tiny.kv_capacity)).instance.sha256 == tiny.sha256
    larger = Problem(Instance([0], [2], [2], 99), machine).on("tiny")
    assert larger.instance.sha256 == problem.instance.sha256


def test_a_fleet_is_a_number_a_text_a_file_or_machines(tmp_path: Path) -> None:
    # A number of equal machines, their split by roles, or a file that gives some of them other KV;
    # a number and a split that disagree are refused.
    assert [len(Fleet.of(n, MODEL)) for n in (1, 4)] == [1, 4]
    assert Fleet.of(4, MODEL).equal
    split = Fleet.of(4, MODEL).split("1p3d")
    assert split.having("prefill") == [0]
    assert split.link == Link() == Fleet.of("1p3d", MODEL).link
    assert split.words == "1 prefill, 3 decode"
    (tmp_path / "two.toml").write_text("[machines.1m]\nkv_capacity = 2000\n[machines.2m]\n")
    made = Fleet.of(tmp_path / "two.toml", MODEL).on(busy())
    # Two machines name no KV and have that of `busy`.
    assert [one.kv_capacity for one in made.machines] == [2000, 3000, 3000]
    assert made.sha256 == Problem(busy(), MODEL).hardware.sha256
    with pytest.raises(UsageError, match="found 4 machines; expected 3 for 1p2d"):
        Fleet.of(4, MODEL).split("1p2d")


def test_workers_in_a_policys_text_are_machines_like_the_problems_one() -> None:
    instance, text = busy(), "vllm:router=least-requests"
    four = run(Problem(instance, Fleet.of(4, MODEL)), text)
    named = run(Problem(instance, MODEL), f"{text},workers=4")
    assert four.schedule.to_dict() == named.schedule.to_dict()
    assert four.metrics == named.metrics
    with pytest.raises(UsageError, match="found 3 workers; expected 4, the machines"):
        run(Problem(instance, Fleet.of(4, MODEL)), f"{text},workers=3")


def test_a_run_has_the_schedule_and_what_the_judge_says() -> None:
    problem = Problem(busy(), MODEL, "makespan")
    found = run(problem, "sarathi", seed=3)
    assert found.metrics == optsched.evaluate(problem, found.schedule).metrics
    assert found.value == found.metrics["makespan"]
    data = found.to_dict()
    assert (data["policy"], data["objective_name"], data["seed"]) == ("sarathi", "makespan", 3)
    assert len(found.to_frame()) == problem.instance.n


def test_of_several_machines_that_differ_nothing_is_proved() -> None:
    fleet = Fleet([Machine(MODEL, 3000), Machine(MODEL, 2500)])
    with pytest.raises(UsageError, match="proved for other_machines"):
        optsched.bound(Problem(busy(), fleet))
    found = optsched.compare(Problem(busy(), fleet), ["vllm"], time_limit_s=1)
    assert found.bound is None
    assert found.rows[0].metrics is not None


def test_a_bound_for_two_equal_machines_is_below_what_runs_on_them() -> None:
    """Two workers, or pools of two mixed machines: then the certificate names its pools."""
    for fleet in (Fleet.of(2, MODEL), Fleet.of("2m", MODEL)):
        problem = Problem(busy(), fleet)
        value = optsched.bound(problem, time_limit_s=1).bound
        assert value is not None
        assert 0 < value <= (run(problem, "vllm").value or 0)
    proof = optsched.bound(Problem(busy(), Fleet.of("2m", MODEL)), time_limit_s=1).certificate
    with pytest.raises(UsageError, match="a certificate about pools"):
        optsched.verify(Problem(busy(), Fleet.of(2, MODEL)), proof)
    assert optsched.verify(Problem(busy(), Fleet.of("2m", MODEL)), proof) > 0
    with pytest.raises(ViolationError, match="found other ones"):
        optsched.verify(Problem(busy(), Fleet.of("3m", MODEL)), proof)


@pytest.mark.parametrize("given", [("--workers", "2"), ("--fleet", "two.toml")])
def test_commands_take_a_fleet(given: tuple[str, str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.toml").write_text("[machines.2m]\n")
    optsched.write_instance(busy(), "busy.json")
    options = ("busy.json", "--cost-model", MODEL, *given, "--json", "-")
    done = json.loads(command("simulate", *options, "--policy", "vllm"))
    kind = Fleet.of(2, MODEL) if given[0] == "--workers" else Fleet.of("2m", MODEL)
    assert done["metrics"] == run(Problem(busy(), kind), "vllm").metrics
    assert done["workers"] == 2
    bound = json.loads(command("bound", *options, "--time-limit", 1))
    assert bound["bound"] <= done["metrics"]["tel"]


def test_what_is_no_problem_is_one_line() -> None:
    for given, words in (
        ((3,), "instance: found int 3"),
        (("tiny", MODEL), "cost model: found one for an instance in rounds"),
        (("tiny-seconds",), "cost model: found none for an instance in seconds"),
        (("tiny", None, "nosuch"), "'nosuch' is unknown"),
        (("tiny", Fleet.of("1p1d", link=Link(0.5))), "latency_s: found 0.5; expected whole rounds"),
    ):
        with pytest.raises((InputError, UsageError), match=words):
            Problem(*given)  # type: ignore[arg-type]


def test_solve_bound_and_compare_say_one_thing_in_one_word() -> None:
    tiny = optsched.read_instance("tiny")  # its optimum is 33
    for found in (optsched.solve(tiny), optsched.bound(tiny), optsched.compare(tiny, ["mc-sf"])):
        assert (found.value, found.bound, found.gap, found.status) == (33, 33, 0, "optimal")
        assert optsched.evaluate(tiny, found.schedule).metrics["tel"] == 33
        assert found.metrics["tel"] == 33
        assert found.method
        assert found.found_by
        data = found.to_dict()
        assert (data["bound"], data["gap"], data["status"]) == (33, 0, "optimal")
    assert optsched.bound(tiny, time_limit_s=0).to_frame()["latency"].sum() >= 33


def test_a_gap_of_what_is_maximized_is_above_its_value() -> None:
    """It is (bound - value) / value, and so a result says."""
    problem = Problem("tiny", objective="slo_attainment:slo_latency=8")
    found = optsched.bound(problem, time_limit_s=5)
    assert found.maximized
    assert found.gap == pytest.approx((found.bound - found.value) / found.value)
    assert found.to_dict()["gap_definition"] == found.gap_definition
    with pytest.raises(NoIncumbentError, match="found no schedule"):
        replace(found, evaluation=None).to_frame()


def test_every_table_is_a_frame_and_html() -> None:
    problem = Problem("tiny", slo_latency=12)
    reached = optsched.capacity(problem, ["fcfs"], attainment=1, fewest=True, search_s=0.0)
    split = optsched.splits(Problem("tiny", Fleet.of(2)), ["vllm"], prove=False)
    scored = optsched.score("mc-sf", ["tiny-n4"])
    why = optsched.why(problem, run(problem, "mc-sf").schedule)
    study = optsched.ratios("mc-sf", [problem], "h-sf", progress=False)
    for answer, first in (
        (reached, "policy"), (split, "metric"), (scored, "instance"), (why, "request"),
        (study, "policy"),
    ):  # fmt: skip
        # Each is a table by its first column, HTML, and a short text instead of one.
        assert answer.to_frame().columns[0] == first
        assert "<table>" in answer._repr_html_()
        assert len(repr(answer)) < 200
    assert reached.value == reached.best.value
    assert scored.bound <= scored.value
    assert scored.gap == pytest.approx((scored.value - scored.bound) / scored.value)
