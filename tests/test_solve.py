"""`solve`: defaults, what it refuses, and that it believes no solver."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from brute_force import brute_force_tel

from optsched import BatchCost, Instance, Limits, Problem, evaluate, from_starts, run
from optsched.bounds.base import ANY_INSTANCE
from optsched.optimize.formulations import (
    Answer,
    Formulation,
    Method,
    Task,
    automatic,
    check_method,
    demands,
    get,
)
from optsched.optimize.formulations.rounds.horizon import serial_schedule
from optsched.optimize.solve import Result, solve
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Progress
from optsched.problem.errors import (
    InfeasibleError,
    InputError,
    OptschedError,
    OutOfTimeError,
    SolverError,
    UsageError,
    ViolationError,
)

exact = import_module("optsched.optimize.exact")

TINY = Instance([0, 0], [1, 2], [3, 2], 6, name="tiny")
"""Optimum 6: request 1 in rounds 1, 2 (3, 4 tokens), request 0 in rounds 2, 3, 4 (2, 3, 4):
round 2 holds 4 + 2 = 6; latencies 2 + 4."""


def larger(n: int = 25) -> Instance:
    """Return requests that are all there at 0; each has a peak of at most M = 40."""
    rng = np.random.default_rng(8)
    s = rng.integers(1, 6, n)
    o = np.array([rng.integers(1, 41 - v) for v in s])
    return Instance(np.zeros(n, dtype=int), s, o, 40)


def test_rounds_are_solved_as_hindsight_for_total_latency():
    """The optimum of `TINY` is 6: proved, whole, without a gap, and what brute force finds."""
    result = solve(TINY)
    assert (result.formulation, result.objective_name) == ("hindsight", "tel")
    assert result.status is Status.OPTIMAL
    assert result.value == result.bound == 6 == brute_force_tel(TINY)[0]
    assert type(result.value) is type(result.bound) is int
    assert result.gap == 0.0
    assert result.method in get("hindsight").methods
    assert result.evaluation is not None
    assert result.evaluation.metrics["tel"] == 6


@pytest.mark.parametrize("method", ["auto", "highs", "cpsat", "pulp"])
def test_every_method_gives_the_same_result(method):
    """The optimum of `TINY` is 6."""
    result = solve(TINY, method=method, threads=1)
    assert (result.status, result.value, result.bound) == (Status.OPTIMAL, 6, 6)
    assert result.threads == 1


def test_the_result_file_is_as_documented():
    data = solve(TINY, seed=3, threads=1).to_dict()
    assert list(data) == [
        "format", "version", "optsched", "command", "instance", "time_unit", "formulation",
        "method", "workers", "objective_name", "status", "objective", "objectives", "bound",
        "scope", "gap", "gap_definition", "certificate", "certificate_missing", "metrics",
        "build_s", "solve_s", "progress", "seed", "threads", "versions", "schedule",
    ]  # fmt: skip
    assert data["instance"] == {"name": "tiny", "sha256": TINY.sha256, "requests": 2}
    assert data["gap_definition"] == "(objective - bound) / objective"
    assert (data["status"], data["seed"], data["threads"]) == ("optimal", 3, 1)
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text)["objective"] == 6  # see `TINY`
    assert '"objective": 6,' in text


def test_unknown_values_are_null():
    unknown = dict.fromkeys(("value", "bound", "schedule", "evaluation"))
    ran = {"formulation": "hindsight", "method": "highs", "build_s": 0.0, "solve_s": 0.0}
    empty = Result(
        instance=TINY, objective_name="tel", status=Status.NO_INCUMBENT, **unknown, **ran, threads=1
    )
    data = empty.to_dict()
    for name in ("objective", "objectives", "bound", "gap", "metrics", "schedule", "certificate"):
        assert data[name] is None


def test_hindsight_on_seconds_points_to_import():
    instance = Instance([0.5], [1], [1], 4, time_unit="second")
    with pytest.raises(UsageError, match="import --rounds"):
        solve(Problem(instance, "llama2-7b-a100-infermax"), formulation="hindsight")


def test_a_cost_model_on_rounds_is_refused():
    with pytest.raises(UsageError, match="in rounds"):
        solve(Problem(TINY, "llama2-7b-a100-infermax"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formulation": "hindsite"}, "known are hindsight"),
        ({"method": "gurobi"}, "hindsight, one of .*cpsat, .*highs"),
        ({"objective": "p50_latency"}, "known are makespan, .*slo_attainment, tel"),
        ({"objective": "tel,tel"}, "found 'tel' twice"),
        ({"eviction_free": True}, "cannot do eviction_free"),
        ({"time_limit_s": -1.0}, "time_limit"),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_has(options, message):
    with pytest.raises((UsageError, InputError), match=message):
        solve(Problem(TINY, objective=options.pop("objective", "tel")), **options)


def test_a_prompt_beyond_a_limit_is_infeasible():
    instance = Instance([0, 0], [2, 5], [1, 1], 9, limits=Limits(max_batch_tokens=4))
    with pytest.raises(InfeasibleError, match="request 1"):
        solve(instance)


@pytest.mark.parametrize("method", ["highs", "cpsat", "pulp"])
@pytest.mark.parametrize("limit", [0, 1e-6])
def test_without_time_the_warm_start_and_a_bound_remain(method, limit):
    instance = larger()
    start = serial_schedule(instance)
    result = solve(instance, method=method, time_limit_s=limit, warm_start=start, threads=2)
    tel = evaluate(instance, start).metrics["tel"]
    assert result.status is Status.FEASIBLE
    assert result.value is not None
    assert result.value <= tel
    assert result.bound is not None
    assert 0 < result.bound < result.value
    assert result.gap == pytest.approx(1 - result.bound / result.value)


def test_the_result_is_never_worse_than_the_warm_start():
    instance = larger(12)
    best = solve(instance, method="cpsat", time_limit_s=1, threads=2)
    again = solve(instance, method="highs", time_limit_s=0, warm_start=best.schedule, threads=2)
    assert again.value is not None
    assert best.value is not None
    assert again.value <= best.value


def test_a_policy_can_be_the_warm_start():

    instance = larger()
    tel = run(instance, "mc-sf").metrics["tel"]
    result = solve(instance, method="placement", warm_start="mc-sf")
    assert result.value <= tel
    with pytest.raises(InputError, match="unknown"):
        solve(instance, warm_start="mc-fs")


def test_a_warm_start_that_breaks_a_rule_is_refused():
    both = from_starts([0, 0], TINY)  # round 2 holds 3 + 4 = 7 > 6
    with pytest.raises(ViolationError, match="kv_capacity"):
        solve(TINY, warm_start=both)


def test_an_interruption_keeps_incumbent_and_bound():
    stop = threading.Event()
    timer = threading.Timer(1.5, stop.set)
    timer.start()
    # Without a time limit, it is the interruption that ends it.
    result = solve(larger(14), method="highs", time_limit_s=None, threads=2, stop=stop)
    timer.cancel()
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert result.value is not None
    assert result.bound is not None


@pytest.mark.parametrize("method", ["highs", "pulp"])
def test_ctrl_c_inside_the_first_relaxation_keeps_incumbent_and_bound(method):
    instance = larger(40)
    timers: list[threading.Timer] = []

    def begun(state: Progress) -> None:
        if not timers:
            timers.append(threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)))
            timers[0].start()

    result = solve(instance, method=method, time_limit_s=None, threads=1, progress=begun)
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert result.value is not None
    assert result.bound is not None
    assert 0 < result.bound <= result.value


def test_progress_knows_the_warm_start_and_the_proved_bound_from_the_start(monkeypatch):
    """The fake method tells worse numbers than the start and the bound, and then better ones,
    and returns no schedule; so the answer is what was known before."""

    from optsched.bounds import lower_bound

    def silent(task, options):
        options.progress(Progress(1.0, None, 0.5))
        options.progress(Progress(2.0, 1e9, 1e-3))
        options.progress(Progress(3.0, start - 1, proved + 0.2))
        return Answer(Status.NO_INCUMBENT)

    instance = larger(12)
    proved, _ = lower_bound(instance)
    start = evaluate(instance, serial_schedule(instance)).metrics["tel"]
    seen = []
    _fake_method(monkeypatch, silent)
    schedule = serial_schedule(instance)
    result = solve(instance, method="fake", warm_start=schedule, progress=seen.append)
    assert (result.value, result.bound) == (start, proved)
    assert [(p.incumbent, p.bound) for p in seen] == [
        (start, proved),
        (start, proved),
        (start, proved),
        (start - 1, proved + 1),  # rounded up
    ]
    elapsed = [p.elapsed_s for p in seen]
    assert elapsed[0] == 0
    assert elapsed == sorted(elapsed)


def test_every_method_starts_from_the_best_of_policies_and_placement(monkeypatch):
    from optsched.policies import list_policies

    instance = larger(12)
    given = []

    def note(task, options):
        given.append(options.warm_start)
        return Answer(Status.NO_INCUMBENT)

    _fake_method(monkeypatch, note)
    result = solve(instance, method="fake")
    known = [evaluate(instance, serial_schedule(instance)).metrics["tel"]]
    for spec in list_policies():
        with suppress(OptschedError):
            known.append(run(instance, spec).metrics["tel"])
    assert result.value is not None
    assert result.value <= min(known)
    assert evaluate(instance, given[0]).metrics["tel"] == result.value


def test_a_failed_method_is_an_error_that_keeps_the_warm_start(monkeypatch):
    """The start has a total latency of 6, the optimum of `TINY`."""
    _fake_method(monkeypatch, lambda task, options: Answer(Status.ERROR, native_status="died"))
    result = solve(TINY, method="fake", warm_start=from_starts([1, 0], TINY))
    assert (result.status, result.value, result.native_status) == (Status.ERROR, 6, "died")


def test_every_objective_has_its_value():
    """Two objectives in order: the first one's value is the result's."""
    instance = Instance([0.0, 0.0], [3, 2], [2, 1], 12, time_unit="second")
    names = ("makespan", "tel")
    result = solve(Problem(instance, "llama2-7b-a100-infermax", names), method="cpsat", threads=1)
    assert result.metrics is not None
    assert result.objectives == tuple(result.metrics[name] for name in names)
    assert result.value == result.objectives[0]
    assert result.to_dict()["objectives"] == list(result.objectives)


def test_ctrl_c_before_the_solver_runs_keeps_the_warm_start(monkeypatch):
    def pressed(task, options):
        raise KeyboardInterrupt

    _fake_method(monkeypatch, pressed)
    result = solve(TINY, method="fake", warm_start="mc-sf")
    assert result.value is not None
    assert result.evaluation is not None


def test_schedules_to_start_from_come_out_of_the_time_limit(monkeypatch):
    # Every look at the clock takes a second: at 0 the solve begins, and of seven policies to start
    # from only the first is made, since the next look says 1 s, which is the limit.
    tried, left = [], []

    def noted(problem, spec, **options):
        tried.append(spec)
        return simulate(problem, spec, **options)

    def note(task, options):
        left.append(options.time_limit)
        return Answer(Status.NO_INCUMBENT)

    every_second = map(float, range(100)).__next__
    monkeypatch.setattr("optsched.problem.budget.work_time.now", every_second)
    monkeypatch.setattr(import_module("optsched.policies.engine.simulate"), "simulate", noted)
    _fake_method(monkeypatch, note)
    result = solve(TINY, method="fake", time_limit_s=1)
    assert (len(tried), left) == (1, [0.0])
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert result.value == run(TINY, tried[0]).metrics["tel"]
    tried.clear()
    # Without a limit all seven run.
    solve(TINY, method="fake", time_limit_s=None)
    assert len(tried) == 7


def test_very_long_outputs_leave_a_schedule_and_a_bound():
    # Policies take minutes here: two runs of 10^7 rounds that do not fit beside each other. One
    # after the other, the latencies are 10^7 + 2 x 10^7.
    long = 10**7
    instance = Instance([0, 0], [1, 1], [long, long], kv_capacity=long + 5)
    task, methods = Task(instance, objective=("tel",)), get("hindsight").methods
    result = solve(instance, method="ramp", time_limit_s=1)
    answer = methods["placement"].run(task, SolveOptions(time_limit_s=1))
    for low, high in ((result.bound, result.value), (answer.bound, answer.objective)):
        assert low <= high <= 3 * long
    with pytest.raises(UsageError, match=r"found up to 2e\+07 output tokens, an interval each"):
        methods["cpsat"].run(task, SolveOptions())
    with pytest.raises(UsageError, match=r"up to 5e\+08 rounds in hindsight"):
        serial_schedule(Instance([0, 0], [1, 1], [10**8, 2 * 10**8], kv_capacity=3 * 10**8))


def test_a_model_that_takes_too_long_to_build_is_given_up():
    instance = larger()
    task, options = Task(instance, objective=("tel",)), SolveOptions(time_limit_s=0.0)
    for method in ("cpsat", "highs"):
        with pytest.raises(OutOfTimeError, match="time limit while the model was built"):
            get("hindsight").methods[method].run(task, options)


def _fake_method(monkeypatch, run):
    """Let the method "fake" of the round model be a function."""
    real = get("hindsight")
    fake = Method("made up", run, ("tel",), real.switches)
    patched = replace(real, methods={**real.methods, "fake": fake})
    monkeypatch.setattr(exact, "get", lambda name: patched)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        # Both at once: 7 tokens in round 2.
        (Answer(Status.OPTIMAL, from_starts([0, 0], TINY), 5, 5), "that is not feasible"),
        # Serial: latencies 3 + 5 = 8, not 7.
        (Answer(Status.OPTIMAL, from_starts([0, 3], TINY), 7, 7), r"found tel 7 claimed .* 8, as"),
        (Answer(Status.OPTIMAL, from_starts([0, 3], TINY), None, 6), "found tel None claimed"),
        # A bound above a schedule that exists.
        (Answer(Status.OPTIMAL, from_starts([0, 3], TINY), 8, 8), "bound 8 contradicts"),
        (Answer(Status.INFEASIBLE), "found the status infeasible"),
    ],
)
def test_a_corrupted_answer_is_caught(monkeypatch, answer, message):
    _fake_method(monkeypatch, lambda task, options: answer)
    with pytest.raises(SolverError, match=message):
        solve(TINY, method="fake", warm_start=from_starts([1, 0], TINY))


def test_a_solver_that_shifts_its_values_is_caught(monkeypatch):
    """The values are other starts than those whose objective the solver tells: what the judge
    finds contradicts it."""

    from optsched.optimize.solvers import highs

    real = highs.solve_linear_model

    def shifted(model, options, *, start_values=None):
        outcome = real(model, options, start_values=start_values)
        values = np.zeros_like(outcome.values)
        values[[0, model.columns - 1]] = 1.0  # the first start of one, the last of the other
        return replace(outcome, values=values)

    monkeypatch.setattr(highs, "solve_linear_model", shifted)
    with pytest.raises(SolverError):
        solve(TINY, method="highs")


def test_optimal_needs_a_bound_that_says_so(monkeypatch):
    instance = larger()
    best = run(Problem(instance), "mc-sf")
    answer = Answer(Status.OPTIMAL, best.schedule, best.value, 4.2)
    _fake_method(monkeypatch, lambda task, options: answer)
    result = solve(instance, method="fake")
    # 4.2 is no proof of the value, nor are the bounds at the root.
    assert result.status is Status.FEASIBLE
    assert 4.2 < result.bound < result.value <= best.value


def test_an_integral_bound_is_rounded_up(monkeypatch):
    # Total latencies are whole: 6 is meant, and 5.0001 is 6 at least.
    answer = Answer(Status.FEASIBLE, from_starts([1, 0], TINY), 6.0000001, 5.0001)
    _fake_method(monkeypatch, lambda task, options: answer)
    result = solve(TINY, method="fake")
    assert (result.status, result.value, result.bound) == (Status.OPTIMAL, 6, 6)
    assert type(result.bound) is int


def test_a_method_that_cannot_do_a_switch_names_one_that_can():
    def nothing(task, options):
        raise AssertionError

    formulation = Formulation(
        "toy", "", "round",
        {
            "plain": Method("", nothing, ("tel",)),
            "able": Method("", nothing, ("tel",), frozenset({"max_running"})),
        },
        choose=lambda task: "plain", switches=frozenset({"max_running"}),
    )  # fmt: skip
    instance = Instance([0], [1], [1], 4, limits=Limits(max_running=1, max_batch_tokens=3))
    task = Task(instance, objective=("tel",))
    with pytest.raises(UsageError, match="max_running"):
        check_method(formulation, "plain", task)
    assert check_method(formulation, "able", task) is formulation.methods["able"]
    both = replace(task, objective=("tel", "makespan"))
    with pytest.raises(UsageError, match="no method of toy can"):
        check_method(formulation, "able", both)
    # Of two that cannot, "auto" names the nearer one: plain lacks max_running, too.
    assert automatic(formulation, both) == "able"


def test_a_term_of_the_cost_model_that_a_method_lacks_is_refused_by_name():
    plain, able = (
        Method("", None, ("tel",), features=ANY_INSTANCE | terms)
        for terms in ({"cost.token"}, {"cost.token", "cost.base"})
    )
    model = Formulation(
        "toy", "", "second", {"plain": plain, "able": able}, choose=lambda task: "plain"
    )
    instance = Instance([0.0], [1], [1], kv_capacity=2, time_unit="second")
    for terms, usual in (({"token": "1"}, "plain"), ({"token": "1", "base": "2"}, "able")):
        task = Task(instance, BatchCost("toy", 1, terms), ("tel",))
        assert automatic(model, task) == usual
    with pytest.raises(UsageError, match=r"cost\.base"):
        check_method(model, "plain", task)


def test_demands_are_what_an_instance_forbids_or_limits():
    instance = Instance(
        [0], [1], [1], 4, limits=Limits(max_running=1), hybrid_batching=False,
        chunked_prefill=True,
    )  # fmt: skip
    assert demands(instance) == {"max_running", "hybrid_batching_off", "chunked_prefill"}
    # Chunking has no meaning in the round model.
    assert solve(instance).value == 1


def test_a_method_can_be_registered_from_another_file(tmp_path, monkeypatch):
    import optsched.optimize.formulations as package

    (tmp_path / "toy_extra.py").write_text(
        "from optsched.optimize.formulations.base import Method\n"
        "METHODS = {'hindsight': {'toy': Method('a toy', None, ('tel',))}}\n"
    )
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    package._registry.cache_clear()
    try:
        assert "toy" in package.get("hindsight").methods
        assert "highs" in package.get("hindsight").methods
    finally:
        package._registry.cache_clear()


def test_auto_takes_a_method_that_can_where_the_usual_choice_cannot():
    usual, able = (Method(name, None, (name,)) for name in ("tel", "makespan"))
    model = Formulation(
        "toy", "", "round", {"usual": usual, "able": able}, choose=lambda task: "usual"
    )
    instance = Instance([0], [1], [1], kv_capacity=2)
    assert automatic(model, Task(instance, objective=("tel",))) == "usual"
    assert automatic(model, Task(instance, objective=("makespan",))) == "able"
    # Where none can, no choice is made by sizes, and the first that lacks least says why.
    assert automatic(model, Task(instance, objective=("tps",))) == "able"


def test_a_chunking_schedule_is_no_start_where_the_model_splits_no_prefill() -> None:
    # Sarathi splits prompts under P = 3 and ends before any schedule without chunks can.
    instance = Instance(
        [0, 0, 0], [2, 2, 2], [1, 2, 3], 6, time_unit="second", kv_accounting="cached",
        hybrid_batching=False, limits=Limits(max_prefill_tokens=3),
    )  # fmt: skip
    paper = "llama2-7b-a100-infermax-paper"
    result = solve(Problem(instance, paper, "makespan"))
    assert result.status == "optimal"
    assert result.value == result.metrics["makespan"]


def test_of_a_maximized_objective_below_asks_for_more_where_models_are_too_large() -> None:
    rng, n = np.random.default_rng(0), 24
    columns = np.sort(rng.random(n)), rng.integers(50, 300, n), rng.integers(10, 200, n)
    instance = Instance(*columns, kv_capacity=900, time_unit="second")
    cost = "llama2-7b-a100-infermax"
    # vLLM serves everyone within 4 s, and no share is above 1.
    judged = run(Problem(instance, cost), "vllm").evaluation
    assert judged.latency.max() < 4
    problem = Problem(instance, cost, "slo_attainment:slo_latency=4")
    some = solve(problem, below=0.9, time_limit_s=8.0)
    assert (some.status, some.method, some.value) == (Status.FEASIBLE, "search", 1)
    none = solve(problem, below=1.0, time_limit_s=8.0)
    assert (none.status, none.method, none.bound) == (Status.INFEASIBLE, "bounds", 1)
