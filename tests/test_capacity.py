"""How much load fits within SLOs: by policy, and proved for all."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke as run, one_line_error

import optsched
from optsched import Fleet, Instance, Limits, Problem, write_instance
from optsched.analysis.capacity_answer import Capacity
from optsched.analysis.capacity_question import scale_arrivals
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import Ask
from optsched.costs.load import load_cost_model
from optsched.files.schemas import check_shape
from optsched.files.strict_json import check_format
from optsched.policies import behind
from optsched.problem.budget import Budget, Progress
from optsched.problem.errors import InputError, UsageError
from optsched.problem.limits import all_limits

MODEL = "llama2-7b-a100-infermax"


def capacity(*given: object, **more: object) -> Capacity:
    """Policies and the bound, without the search that nobody asked for."""
    return optsched.capacity(*given, **{"search_s": 0.0, **more})


def stream(n: int = 250, rate: float = 4.0, seed: int = 2) -> Instance:
    """Return Poisson arrivals with prompts of 50 to 1499 tokens and outputs of 2 to 149."""
    generator = np.random.default_rng(seed)
    return Instance(
        np.cumsum(generator.exponential(1 / rate, n)), generator.integers(50, 1500, n),
        generator.integers(2, 150, n), kv_capacity=60_000, time_unit="second", name="stream",
    )  # fmt: skip


# A first token within 1 s, and 50 ms a token after it.
SLOS = {"slo_ttft": 1.0, "slo_tpot": 0.05}


def attainment(instance: Instance, spec: str, scale: float) -> float:
    """Return the share within SLOS of a policy at a rate scale, by a simulation."""
    at = scale_arrivals(instance, scale)
    share = optsched.run(Problem(at, MODEL, **SLOS), spec).metrics["slo_attainment"]
    return float(share or 0)


def test_the_largest_rate_is_attained_and_the_next_is_not() -> None:
    instance = stream()
    found = capacity(Problem(instance, MODEL, **SLOS), ["fcfs", "sarathi"], attainment=0.95)
    for row in found.rows:
        assert attainment(instance, row.policy, row.value) == row.attainment >= 0.95
        assert attainment(instance, row.policy, row.missed) < 0.95  # as was asked for
        # The search ends within the tolerance of 1 %.
        assert row.value < row.missed <= row.value * 1.01
        assert row.missed <= found.bound
    assert found.best.value == max(row.value for row in found.rows)


def test_what_is_impossible_stays_impossible_at_every_larger_rate() -> None:
    instance, cost = stream(n=120), load_cost_model(MODEL)
    found = capacity(Problem(instance, MODEL, **SLOS), ["fcfs"], attainment=0.95)
    need = math.ceil(0.95 * instance.n)
    assert found.bound_origin == "slo-prices"
    # At the bound itself work alone (`most_within`) still allows as many as are needed.
    assert most_within(scale_arrivals(instance, found.bound), cost, SLOS) >= need
    for factor in (1.01, 1.05, 1.3, 2.0, 10.0):
        at = scale_arrivals(instance, factor * found.bound)
        priced = Ask(at, cost, all_limits(at, SLOS)).between(need, Budget(None)).most
        assert min(most_within(at, cost, SLOS), priced) < need, factor


def test_the_curve_lies_above_every_schedule_and_below_what_is_asked_from_the_bound_on() -> None:
    instance = stream(n=120)
    found = capacity(Problem(instance, MODEL, **SLOS), ["fcfs", "paced"], attainment=0.9)
    curve = found.bound_points
    for row in found.rows:
        for rate, share in row.points:
            proved = [least for at, least in curve if at <= rate]
            assert not proved or share <= proved[-1], (row.policy, rate)
    assert all(share < 0.9 for at, share in curve if at >= found.bound)  # 0.9 is asked for


def test_more_workers_carry_more_and_longer_limits_too() -> None:
    instance = stream()

    def ends(workers: int = 1, ttft: float = 1.0) -> tuple[float, float]:
        found = capacity(
            Problem(instance, Fleet.of(workers, MODEL), slo_ttft=ttft, slo_tpot=0.05), ["sarathi"]
        )
        assert found.rows[0].value < found.bound
        return found.rows[0].value, found.bound

    # One worker within 1 s, two workers, and one within 5 s.
    one, two, patient = ends(), ends(2), ends(ttft=5.0)
    assert one[0] < two[0]
    assert one[1] < two[1]
    assert one[0] <= patient[0]
    assert one[1] <= patient[1]


def test_of_sessions_the_rate_is_of_users_and_nothing_is_proved_impossible() -> None:
    """At twice the rate first calls come in half the time, and what follows is as it was; no
    bound is given."""
    few = {"n": 4, "calls": 3, "first_tokens": 500, "context": 3000, "think_s": 2.0}
    agents = optsched.generate("agent-sessions", seed=1, rate=0.5, kv_capacity=60_000, **few)
    twice = scale_arrivals(agents, 2)
    assert np.ptp(twice.given_arrivals) == pytest.approx(np.ptp(agents.given_arrivals) / 2)
    assert twice.after == agents.after
    assert np.array_equal(twice.delay, agents.delay)  # users think for as long as before

    found = capacity(Problem(agents, MODEL, slo_latency=30.0), ["vllm-v1"], tolerance=0.5)
    assert found.value is not None
    assert found.bound is None
    assert "sessions/s" in found.verdict
    assert "no bound on SLOs is proved for sessions" in found.verdict


def test_the_fewest_workers_at_a_rate() -> None:
    instance = stream()
    found = capacity(
        Problem(instance, MODEL, **SLOS), ["fcfs", "isrtf"], rate_scale=6.0, fewest=True
    )
    fast = scale_arrivals(instance, 6.0)

    def share(spec: str, workers: int) -> float:
        problem = Problem(fast, Fleet.of(workers, MODEL), **SLOS)
        done = optsched.run(problem, behind(spec, "least-requests"))
        return float(done.metrics["slo_attainment"] or 0)

    for row in found.rows:
        if row.value is not None:
            # 0.99 is asked for where nothing is said.
            assert share(row.policy, row.value) == row.attainment >= 0.99
            assert row.missed is None or share(row.policy, row.missed) < 0.99
            assert found.bound is None or row.value > found.bound
    assert found.rows[0].value > 1
    assert (found.question.fewest, found.searched) == (True, "workers")


def test_slos_may_be_columns_and_classes() -> None:
    instance = stream(120)
    tight = replace(instance, slo_ttft=[0.5] * 120, slo_tpot=[0.05] * 120)
    mixed = replace(
        instance, slo_ttft=[0.5, None] * 60, slo_tpot=[0.05, 0.2] * 60
    )  # half of the requests wait
    found = [capacity(Problem(one, MODEL), ["edf"], attainment=0.9) for one in (tight, mixed)]
    assert found[0].rows[0].value < found[1].rows[0].value
    same = capacity(Problem(instance, MODEL, slo_ttft=0.5, slo_tpot=0.05), ["edf"], attainment=0.9)
    assert same.rows == tuple(replace(row, wall_s=same.rows[0].wall_s) for row in found[0].rows)


def test_by_default_schedulers_for_slos_run_beside_the_usual_ones() -> None:
    found = capacity(Problem(stream(40), MODEL, slo_ttft=1.0))
    assert [row.policy for row in found.rows] == [
        "fcfs", "vllm-v1", "sarathi", "edf", "least-slack", "late-last",
    ]  # fmt: skip


def test_rounds_have_a_number_of_workers_and_no_rate() -> None:
    # One request of 4 tokens at a time, five at once, all due by round 2: three workers serve six,
    # and two only four, which is the bound.
    instance = Instance([0] * 5, [3] * 5, [1] * 5, kv_capacity=4)
    found = capacity(Problem(instance, slo_ttft=2), ["fcfs"], attainment=1.0, fewest=True)
    # The bound is the most workers that are proved too few.
    assert (found.rows[0].value, found.bound) == (3, 2)
    with pytest.raises(InputError, match="found one time only; expected arrivals over time"):
        capacity(Problem(instance, slo_ttft=2), ["fcfs"])
    apart = Instance([0, 9], [3, 3], [1, 1], kv_capacity=4)
    with pytest.raises(InputError, match=r"'round'.*'second'"):
        capacity(Problem(apart, slo_ttft=1), ["fcfs"], time_limit_s=0.0)  # however short the time


def test_more_workers_than_requests_are_not_tried() -> None:
    # A worker serves one request at a time, for a round: only alone on its worker each is in time.
    instance = Instance([0, 0, 0], [3, 3, 3], [1, 1, 1], kv_capacity=4)
    found = capacity(
        Problem(instance, slo_ttft=1), ["fcfs:max_running=1"], attainment=1, fewest=True
    )
    assert found.rows[0].value == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"slo_ttft": 0}, "slo_ttft: found 0; expected a time > 0"),
        ({"slo_ttft": None}, "SLO: found none; expected one of slo_ttft"),
        ({"attainment": 1.5}, "attainment: found 1.5; expected a share > 0 and <= 1"),
        ({"attainment": 0}, "attainment: found 0; expected a share > 0"),
        ({"workers": 0}, "workers: found 0; expected an integer from 1 to 10000"),
        ({"router": "best"}, "router 'best' is unknown; known are least-requests"),
        ({"rate_scale": -1}, "rate_scale: found -1; expected a number > 0"),
        ({"rate_scale": 3}, "rate_scale: found 3 and a number of workers.*the fewest workers"),
        ({"tolerance": 0}, "tolerance: found 0; expected a number > 0 and < 1"),
        ({"policies": []}, "policies: found an empty list"),
        ({"policies": ["fcfs:workers=2"]}, "found workers in it; expected them as the fleet"),
        ({"policies": ["nope"]}, "policy 'nope' is unknown"),
        ({"slo_ttft": 1e-6}, r"found 30 of 30 requests that cannot be within theirs even alone"),
        ({"slo_tpot": 1e-6}, r"found 30 of 30 .* expected longer limits$"),
    ],
)
def test_what_cannot_be_asked_is_one_line(more: dict, words: str) -> None:
    asked = {"policies": ["fcfs"], "slo_ttft": 1.0, **more}
    slos = {name: asked.pop(name) for name in ("slo_ttft", "slo_tpot") if name in asked}
    with pytest.raises((InputError, UsageError), match=words):
        capacity(Problem(stream(30), Fleet.of(asked.pop("workers", 1), MODEL), **slos), **asked)


def test_a_stop_keeps_what_is_known() -> None:
    """The six points of the first policy and the bound are kept; the second is interrupted; no
    time gives no value."""
    stop = threading.Event()
    seen = list[Progress]()

    def told(state: Progress) -> None:
        seen.append(state)
        if len(seen) == 6:  # after six simulations
            stop.set()

    found = capacity(Problem(stream(), MODEL, **SLOS), ["fcfs", "vllm"], progress=told, stop=stop)
    assert found.interrupted
    assert len(found.rows[0].points) == 6
    assert found.bound is not None
    assert found.rows[1].error == "interrupted"
    none = capacity(Problem(stream(), MODEL, **SLOS), ["fcfs"], time_limit_s=1e-9)
    assert (none.interrupted, none.rows[0].value) == (True, None)


def test_a_stop_keeps_how_many_workers_are_known_to_be_too_few() -> None:
    # Both policies need more than one worker at this rate. The stop comes after a simulation each.
    stop = threading.Event()
    tried: list[tuple[str, float]] = []

    def told(state: Progress) -> None:
        spec, at = state.doing.partition(":")[0].split(" at ")
        tried.append((spec, float(at)))
        if spec == "vllm":
            stop.set()

    found = capacity(
        Problem(stream(), MODEL, **SLOS),
        ["fcfs", "vllm"],
        rate_scale=9.0,
        stop=stop,
        progress=told,
        fewest=True,
    )
    assert found.interrupted
    assert found.rows[0].value is not None
    assert found.bound is not None
    (at,) = (value for spec, value in tried if spec == "vllm")
    assert (found.rows[1].missed, found.rows[1].error) == (at, "interrupted")
    data = found.to_dict()
    assert data["workers"]["fewest"] == found.rows[0].value


@pytest.mark.parametrize("workers", [1, "auto"])
def test_a_stop_in_the_offline_search_is_told(workers: int | str) -> None:
    stop = threading.Event()

    def told(state: Progress) -> None:
        if state.doing.startswith("offline search at "):
            stop.set()

    asked = {"fewest": True, "rate_scale": 9.0} if workers == "auto" else {}
    found = capacity(
        Problem(stream(), MODEL, **SLOS), ["fcfs"], stop=stop, progress=told, search_s=60.0, **asked
    )
    assert found.interrupted
    # Row 1 is the offline search. It is told after its first value, and so it tries no second one.
    assert len(found.rows[1].points) == 1


def test_each_policy_has_a_share_of_the_time_limit(monkeypatch) -> None:
    # A simulation takes 10 s of a clock that nothing else moves. Of 65 s the first of two policies
    # has 32.5, so 4 simulations; the second has what is left, 25 s, so 3.
    now = [0.0]
    monkeypatch.setattr("optsched.problem.budget.work_time.now", lambda: now[0])

    def told(_: Progress) -> None:
        now[0] += 10.0

    found = capacity(
        Problem(stream(40), MODEL, slo_ttft=1.0), ["fcfs", "vllm"], time_limit_s=65.0, progress=told
    )
    assert [len(row.points) for row in found.rows] == [4, 3]


def test_points_of_the_bound_for_pictures_are_computed_when_asked_for() -> None:
    found = capacity(Problem(stream(60), MODEL, **SLOS), ["fcfs"])
    assert len(found.bounded) < len(found.bound_points)
    at = [scale for scale, _ in found.bound_points]
    assert at == sorted(at)
    # Beyond the impossible rate a picture goes on for 30 % and more.
    assert max(at) >= 1.3 * found.bound
    share = [share for _, share in found.bound_points]
    assert share == sorted(share, reverse=True)


def test_the_command_writes_a_table_a_file_and_a_picture(tmp_path, monkeypatch) -> None:
    """Words, then a file of the right shape with the best rate below the impossible one, a plot
    of it, and the number of workers at 8 times the rate."""
    monkeypatch.chdir(tmp_path)

    write_instance(stream(60), "stream.json")
    words = ("stream.json", "--cost-model", MODEL, "--slo-ttft", 1, "--slo-tpot", 0.05)
    shown = run("capacity", *words, "--search", 0, "--policy", "fcfs", "--json", "found.json")
    assert shown.exit_code == 0, shown.stderr
    assert "fcfs attains it up to rate scale" in shown.stdout
    assert "impossible for any schedule from rate scale" in shown.stdout
    with open("found.json", encoding="utf-8") as file:
        data = json.load(file)
    assert check_format(data, "capacity") in (None, "capacity")
    check_shape("capacity", data)
    assert data["best_origin"] == "fcfs"
    assert data["best_rate_scale"] == data["policies"][0]["rate_scale"]
    assert data["best_rate_scale"] < data["impossible_rate_scale"]
    assert run("plot", "found.json", "-o", "found.png").exit_code == 0
    auto = run("capacity", *words, "--search", 0, "--policy", "fcfs", "--workers", "auto",
               "--rate-scale", 8, "--json", "-")  # fmt: skip
    workers = json.loads(auto.stdout)["workers"]
    assert workers["fewest"] > (workers["impossible"] or 0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--slo-ttft", 0), "--slo-ttft"),
        (("--slo-ttft", 1, "--attainment", 2), "attainment: found 2.0"),
        (("--slo-ttft", 1, "--workers", "two"), "--workers: found 'two'"),
        (("--slo-ttft", 1, "--workers", 0), "workers: found 0"),
        (("--slo-ttft", 1, "--workers", 2, "--router", "least-work"), "found no predictions"),
        ((), "SLO: found none"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    tmp_path, monkeypatch, more: tuple, words: str
) -> None:
    monkeypatch.chdir(tmp_path)

    write_instance(stream(30), "stream.json")
    shown = run(
        "capacity", "stream.json", "--search", 0, "--cost-model", MODEL, "--policy", "fcfs", *more
    )
    assert words in one_line_error(shown, 2)


def test_a_rate_at_the_end_of_the_search_is_a_least_value(tmp_path, monkeypatch) -> None:
    # Two short requests: at any rate both are done within 1000 s.
    monkeypatch.chdir(tmp_path)
    write_instance(
        Instance([0.0, 1.0], [5, 5], [2, 2], kv_capacity=99, time_unit="second"), "two.json"
    )
    shown = run("capacity", "two.json", "--search", 0, "--cost-model", MODEL, "--slo-latency",
                1000, "--policy", "fcfs")  # fmt: skip
    # 2097152 = 2^21 is the largest rate scale that is tried.
    assert "fcfs attains it at least up to rate scale 2097152 (" in shown.stdout


@pytest.mark.parametrize("command", ["solve", "bound", "compare", "simulate"])
def test_every_command_takes_slos_as_options(command: str, tmp_path, monkeypatch) -> None:
    # One of two requests at a time, a round each: within a round of their arrival is one of them.
    monkeypatch.chdir(tmp_path)
    write_instance(Instance([0, 0], [2, 2], [1, 1], kv_capacity=3), "two.json")
    more = {
        "solve": ("--objective", "slo_attainment"), "bound": ("--objective", "slo_attainment"),
        "compare": ("--policy", "late-last"), "simulate": ("--policy", "late-last"),
    }  # fmt: skip
    shown = run(command, "two.json", "--slo-ttft", 1, *more[command], "--json", "-")
    data = json.loads(shown.stdout)
    metrics = data["policies"][0]["metrics"] if command == "compare" else data["metrics"]
    assert metrics["slo_attainment"] == 0.5
    if command in ("solve", "bound"):
        assert data["bound"] == 0.5
        assert data["objective_name"] == "slo_attainment:slo_ttft=1"
        twice = run(command, "two.json", "--slo-ttft", 1, "--objective",
                    "slo_attainment:slo_ttft=2")  # fmt: skip
        assert "slo_ttft: found both 2 and 1; expected one value" in one_line_error(twice, 2)


def test_simulate_refuses_a_policy_without_its_slos_as_compare_does(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_instance(Instance([0, 0], [2, 2], [1, 1], kv_capacity=3), "two.json")
    refused = run("simulate", "two.json", "--policy", "edf")
    assert "policy 'edf': the instance has no slo_ttft" in one_line_error(refused, 2)


@pytest.mark.parametrize("policy", ["fcfs", "vllm-v1", "sarathi"])
def test_workers_that_do_not_help_end_the_search(policy: str, tmp_path: Path) -> None:
    # The three requests of a session come at once and go to one worker, however many there are: two
    # wait for the prefills before theirs, so 2 and 3 times as long as one alone, where 1.5 times is
    # allowed. A third is in time, and 0.9 is asked for.
    n, each = 90, 3
    sessions = Instance(
        np.repeat(np.arange(n // each) * 1.0, each), [2000] * n, [2] * n, kv_capacity=100_000,
        time_unit="second", limits=Limits(max_batch_tokens=2000),
        id=[f"s{i // each}/{i % each}" for i in range(n)],
    )  # fmt: skip
    file = tmp_path / "sessions.json"
    write_instance(sessions, file)
    words = ("--policy", policy, "--workers", "auto", "--router", "sticky", "--attainment", 0.9)
    model = "llama2-7b-a100-infermax"
    alone = optsched.run(Problem(sessions.subset([0]), model), policy).evaluation
    limit = 1.5 * float(alone.metrics["mean_ttft"])
    limits = ("--slo-ttft", limit, "--cost-model", model, "--json", tmp_path / "found.json")
    result = run("capacity", file, "--search", 0, *words, *limits)
    assert "more workers do not help: it attains" in result.output
    found = json.loads((tmp_path / "found.json").read_text())
    # A quarter of the most that were tried do as well: without an end it would try all 90.
    assert found["workers"]["fewest"] is None
    (policy,) = found["policies"]
    # At most 30 = 90 / 3, the number of sessions, are tried.
    assert max(at for at, _ in policy["points"]) <= n / 3
