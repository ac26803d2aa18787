"""Sessions: requests that are released when others end, from the file to the judge and bounds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, one_line_error, run
from session_cases import best_in_rounds, best_in_seconds, chains, forest, sharing_chains
from slow_judge import TIMED, slow_judge
from sweeps import seeds

import optsched
from optsched import (
    BatchCost,
    Instance,
    Problem,
    bound,
    evaluate,
    from_starts,
    solve,
    timeline,
)
from optsched.bounds import features_of, list_bounds, lower_bound
from optsched.bounds.sessions import alone_times, chains_of
from optsched.files.read_write import read_instance, write_instance
from optsched.policies import allows, list_policies
from optsched.policies.base import Rules
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, UsageError, ViolationError
from optsched.problem.metrics import TABLE
from optsched.problem.schedule import from_batches
from optsched.workloads.traces import TraceWarning, read_trace

DATA = os.environ.get("OPTSCHED_DATA")

# Milliseconds: 20 for a batch, 1 for a token, and a quarter for each token of KV that decodes read.
COST = BatchCost("small", 1, {"base": "20", "token": "1", "decode_kv": "0.25"})
TREE = Instance(
    [0, None, None, None, 3], [2, 2, 2, 3, 2], [1, 2, 1, 1, 1], kv_capacity=20,
    after=[None, 0, 0, [1, 2], None], delay=[None, 3, 0, 1, None], id=list("abcde"),
)  # fmt: skip
"""Request 0 calls 1 and 2, which both end before 3 is released; 4 is a session of its own."""


def test_a_file_keeps_sessions_and_their_digest(tmp_path: Path) -> None:
    # `TREE`: 0 calls 1 (after 3) and 2, 3 waits for both (1 more), and 4 is a session of its own.
    data = TREE.to_dict()["requests"]
    assert data["after"] == [None, 0, 0, [1, 2], None]
    assert data["delay"] == [None, 3, 0, 1, None]
    assert data["arrival"] == [0, None, None, None, 3]
    write_instance(TREE, tmp_path / "tree.json")
    again = read_instance(tmp_path / "tree.json")
    assert again.sha256 == TREE.sha256
    assert again.after == ((), (0,), (0,), (1, 2), ())
    assert TREE.sessions is not None
    assert TREE.sessions.session.tolist() == [0, 0, 0, 0, 1]
    # What schedules are bound to differs with who comes after whom, and with every delay.
    others = (replace(TREE, delay=[0, 3, 0, 2, 0]), replace(TREE, after=[None, 0, 0, 1, None]))
    assert len({TREE.sha256, *(one.sha256 for one in others)}) == 3


def test_columns_in_which_nothing_comes_after_anything_are_absent_ones() -> None:
    # Digest, runs of every policy, and bounds are those of an instance without the columns.
    plain = Instance([0, 2], [1, 2], [3, 1], kv_capacity=6)
    same = Instance([0, 2], [1, 2], [3, 1], kv_capacity=6, after=[None, []], delay=[0, None])
    assert same.sha256 == plain.sha256
    assert same.sessions is None
    seconds = {"time_unit": "second", "predicted": [2.0, 1.0], "slo_ttft": [9.0, 9.0]}
    pairs = [(plain, same, None), (replace(plain, **seconds), replace(same, **seconds), COST)]
    for one, other, cost in pairs:
        for policy in sorted(list_policies()):
            if allows(policy, one) is None:
                found = [optsched.run(Problem(x, cost), policy).evaluation for x in (one, other)]
                assert found[0].metrics == found[1].metrics, policy
        values = [bound(Problem(x, cost), time_limit_s=0).bound for x in (one, other)]
        assert values[0] == values[1]


def test_a_part_has_whole_sessions() -> None:
    """`TREE`: 1 and 2 come after 0, and 3 after both; 4 is alone."""
    part = TREE.subset([2, 0])
    assert part.after == ((1,), ())
    assert part.arrival.tolist() == [-1, 0]
    with pytest.raises(InputError, match=r"request 3.*request 1"):
        TREE.subset([0, 2, 3])


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"after": [1, 0], "arrival": [None, None]}, "requests.after: request 0: found 1, after"),
        ({"after": [None, 1]}, "requests.after: request 1: found 1; expected other requests"),
        ({"after": [None, [0, 0]]}, "request 1: found [0, 0]; expected other requests, each once"),
        ({"after": [None, 2]}, "requests.after: request 1: found 2; expected a number from 0 to 1"),
        ({"after": [None, "a"]}, "requests.after: request 1: found 'a'; expected a request"),
        ({"after": [None, 0], "arrival": [0, 4]}, "requests.arrival: request 1: found 4, and"),
        ({"after": [None, None]}, "requests.arrival: request 1: found None; expected an integer"),
        ({"after": [0]}, "requests.after: found 1 values; expected 2"),
        ({"after": "01"}, "requests.after: found '01'; expected a list"),
        (
            {"after": [None, 0], "delay": [1, 1]},
            "requests.delay: request 0: found 1; expected null",
        ),
        ({"after": [None, 0], "delay": [0, -1]}, "requests.delay: request 1: found -1; expected a"),
        ({"after": [None, 0], "delay": [0, 0.5]}, "requests.delay: request 1: found 0.5; expected"),
        ({"delay": [0, 1]}, "requests.after: found nothing; expected it beside delay"),
    ],
)
def test_what_is_no_forest_is_refused_in_one_line(
    columns: dict[str, Any], error: str, tmp_path: Path
) -> None:
    requests = {"arrival": [0, None], "prompt_tokens": [1, 1], "output_tokens": [1, 1], **columns}
    data = {"format": "optsched-instance", "version": 1, "time_unit": "round", "kv_capacity": 9,
            "kv_accounting": "generated", "requests": requests}  # fmt: skip
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    said = one_line_error(invoke("simulate", path, "--policy", "fcfs"))
    assert error in said


def test_a_release_is_the_end_of_the_last_predecessor_and_the_delay() -> None:
    """0 ends at 1. 1 is released at 4 and ends at 6, 2 ends at 2, so 3 is released at 7."""
    found = evaluate(TREE, from_starts([0, 4, 1, 7, 4], TREE))
    assert found.release_times.tolist() == [0, 4, 1, 7, 3]
    assert found.latency.tolist() == [1, 2, 1, 1, 2]
    assert found.session_completion is not None
    assert found.session_completion.tolist() == [8, 2]
    assert found.metrics["session_completion"] == 10
    assert found.metrics["mean_session_completion"] == 5
    assert found.to_frame()["arrival"].tolist() == [0, 4, 1, 7, 3]
    with pytest.raises(ViolationError, match=r"request 3.*round 6.*arrival 7"):
        evaluate(TREE, from_starts([0, 4, 1, 6, 4], TREE))


def test_a_request_stands_behind_those_that_it_comes_after() -> None:
    """Starts are right, 0 and 1, but the batch of request 1 is listed before that of request 0."""
    two = Instance([0, None], [1, 1], [1, 1], kv_capacity=9, after=[None, 0])
    apart = from_batches([0, 1, 2], [1, 0], [1, 1], start=[1, 0], worker=[1, 0], instance=two)
    with pytest.raises(ViolationError, match=r"request 1.*before 1"):
        evaluate(two, apart)
    assert slow_judge(two, apart).rule == "after"
    right = from_batches([0, 1, 2], [0, 1], [1, 1], start=[0, 1], worker=[0, 1], instance=two)
    assert evaluate(two, right).finish.tolist() == [1, 2]


def test_slos_and_phases_count_from_the_true_release() -> None:
    limited = replace(TREE, slo_ttft=[1.0] * 5)
    # Releases are 0, 4, 1, 7 and 3: all but the last one start at once.
    schedule = from_starts([0, 4, 1, 7, 4], limited)
    assert evaluate(limited, schedule).metrics["slo_attainment"] == 0.8  # of five only 4 waits
    found = timeline(limited, schedule)
    waits = found.span_end[found.span_phase == 0] - found.span_start[found.span_phase == 0]
    assert waits.sum() == 1


# Every policy, on one worker and on two.
SPECS = [
    f"{name}{more}" for name in sorted(list_policies()) for more in ("", ":workers=2,router=sticky")
]


@pytest.mark.parametrize("rounds", [True, False])
def test_a_closed_loop_is_the_open_one_at_the_releases_that_it_found(rounds: bool) -> None:
    """Given the releases as arrivals, a policy does the same: it knows of nothing before."""
    cost = None if rounds else COST
    for seed, spec in enumerate(SPECS):
        instance = forest(seed, 3, rounds=rounds)
        # `sticky` sends calls by their ids: `forest` has four calls in each block.
        ids = [f"{i // 4}/{i}" for i in range(instance.n)]
        instance = replace(instance, id=ids)
        name = spec.partition(":")[0]
        if name.startswith("program-") or allows(name, instance) is not None:
            continue
        schedule = simulate(Problem(instance, cost), spec)
        found = evaluate(Problem(instance, cost), schedule)
        opened = replace(instance, arrival=found.clock.release, after=None, delay=None)
        same = simulate(Problem(opened, cost), spec)
        for column in ("request", "tokens", "batch_offsets", "evicted", "worker"):
            one, other = getattr(schedule, column), getattr(same, column)
            assert (one is None and other is None) or one.tolist() == other.tolist(), spec
        assert (schedule.start is None) == (same.start is None)
        ends = evaluate(Problem(opened, cost), same).clock.finish
        # A policy that waits names starts: sums of seconds, which may differ in the last digit.
        finish, exact = found.clock.finish.tolist(), schedule.start is None
        assert ends.tolist() == (finish if exact else pytest.approx(finish, rel=1e-14))
        if not rounds:
            continue
        slow = slow_judge(instance, schedule)
        assert slow.rule is None
        assert slow.finish == found.finish.tolist()


@pytest.mark.parametrize("router", ["least-requests", "power-of-two", "round-robin", "affinity"])
def test_routers_send_calls_when_they_are_released(router: str) -> None:
    """The slow judge, which shares no code with the package's, finds the same ends and no broken
    rule."""
    for seed in range(4):
        instance = forest(seed, rounds=False)
        schedule = simulate(Problem(instance, TIMED), f"vllm-v1:workers=2,router={router}")
        found = evaluate(Problem(instance, TIMED), schedule)
        slow = slow_judge(instance, schedule, layers=3, coefficients=TIMED.coefficients)
        assert slow.rule is None
        assert np.allclose([float(t) for t in slow.finish], found.finish, rtol=1e-12)


def test_a_call_stays_with_its_session_unless_the_other_worker_is_worth_more() -> None:
    """The session of 0 and 1 runs on worker 0, and 2, which comes while 0 runs, on worker 1.
    Asserted is that 1 stays; of what goes, see
    `test_of_two_calls_before_it_a_call_finds_the_longer_one`."""
    instance = Instance(
        [0, None, 1], [10, 13, 40], [3, 1, 60], kv_capacity=500, after=[None, 0, None]
    )
    placed = {
        router: simulate(instance, f"fcfs:workers=2,router={router}").worker
        for router in ("session", "affinity", "least-tokens")
    }
    homes = {}
    for router in placed:
        schedule = simulate(instance, f"fcfs:workers=2,router={router}")
        assert schedule.worker is not None
        assert schedule.request is not None
        assert schedule.batch_offsets is not None
        each = np.repeat(schedule.worker, np.diff(schedule.batch_offsets))
        homes[router] = [int(each[schedule.request == i][0]) for i in range(3)]
    # Request 2 goes to worker 1, since 0 is still there. When 1 comes, worker 0 is free.
    assert homes == {name: [0, 0, 1] for name in placed}


def test_of_two_calls_before_it_a_call_finds_the_longer_one() -> None:
    # Requests 0 and 1 run on worker 0 one after the other, where 2 waits with 15 tokens when 3
    # comes. Each left it 10 of its tokens, the same ones: 15 - 10 is more than nothing elsewhere.
    instance = Instance(
        [0, 1, 2, None], [9, 9, 15, 10], [1, 1, 9, 1], kv_capacity=500,
        after=[None, None, None, [0, 1]], delay=[None, None, None, 1],
    )  # fmt: skip
    schedule = simulate(instance, "fcfs:workers=2,router=affinity")
    assert schedule.worker is not None
    assert schedule.batch_offsets is not None
    each = np.repeat(schedule.worker, np.diff(schedule.batch_offsets))
    assert [int(each[schedule.request == i][0]) for i in range(4)] == [0, 0, 0, 1]


def test_orders_of_programs() -> None:
    """Sessions a (0, then 1), b (2) and c (3). When 0 has ended at 3, 1, 2 and 3 wait, one at a
    time: for 2 rounds each, so that they start at 3, 5 and 7 in some order."""
    instance = Instance(
        [0, None, 2, 3], [4, 4, 4, 4], [3, 2, 2, 2], kv_capacity=8, after=[None, 0, None, None],
        time_unit="round",
    )  # fmt: skip
    first = {
        order: optsched.run(instance, Rules(order=order)).evaluation.first_start.tolist()
        for order in ("arrival", "session", "attained")
    }
    assert first["arrival"] == [0, 5, 3, 7]  # released at 0, 3, 2 and 3
    assert first["session"] == [0, 3, 5, 7]  # a arrived first
    assert first["attained"] == [0, 7, 3, 5]  # a has been served


def test_response_ratios_are_of_whole_programs() -> None:
    """Call 1 waits from 1 to 5 and ends at 6. Then 2 comes after it, and 3 has waited since 5."""
    instance = Instance(
        [0, 1, None, 5], [4, 4, 4, 4], [5, 1, 1, 1], kv_capacity=9, after=[None, None, 1, None],
        time_unit="round",
    )  # fmt: skip
    first = {
        order: optsched.run(
            instance, Rules(order=order, max_running=1)
        ).evaluation.first_start.tolist()
        for order in ("attained", "ratio", "response")
    }
    assert first["attained"] == [0, 5, 7, 6]  # work 5 has been done for 2, none for 3
    assert first["ratio"] == [0, 5, 7, 6]  # 0 / 5 and 1 / 5
    assert first["response"] == [0, 5, 6, 7]  # (5 + 0) / (5 + 5) and 1 / 5


def test_response_ratios_of_single_calls_are_those_of_hrrn() -> None:
    """Each of 30 requests is a session of its own, so a program is its only call."""
    rng = np.random.default_rng(1)
    arrival = np.sort(rng.uniform(0, 0.5, 30))
    prompt, output = rng.integers(20, 400, 30), rng.integers(1, 20, 30)
    instance = Instance(arrival, prompt, output, 600, time_unit="second", kv_accounting="cached")
    gpu = "llama2-7b-a100-infermax"
    calls, programs, fcfs = (
        simulate(Problem(instance, gpu), f"{name}:max_running=2")
        for name in ("hrrn", "program-hrrn", "fcfs")
    )
    for name in ("request", "tokens", "batch_offsets", "evicted"):
        assert getattr(calls, name).tolist() == getattr(programs, name).tolist()

    assert calls.request.tolist() != fcfs.request.tolist()


def test_deadlines_count_from_the_release() -> None:
    """1 is released at 1 and due at 4, 2 arrives at 0 and is due at 9; only one fits at a time."""
    instance = Instance(
        [0, None, 0], [4, 4, 4], [1, 2, 2], kv_capacity=7, after=[None, 0, None],
        slo_ttft=[1.0, 3.0, 9.0],
    )  # fmt: skip
    found = optsched.run(instance, Rules(order="deadline")).evaluation
    assert found.first_start.tolist() == [0, 1, 3]


def _agree(seed: int, shared: bool = False) -> None:
    """Hold exhaustive search, both judges, bounds and policies together on one instance."""
    instance = sharing_chains(seed) if shared else chains(seed)
    least, starts = best_in_rounds(instance)
    judged = evaluate(instance, from_starts(starts, instance))
    assert judged.metrics["session_completion"] == least
    if not shared:  # of starts it knows no shared KV
        assert slow_judge(instance, from_starts(starts, instance)).rule is None
    proved = lower_bound(Problem(instance, objective="session_completion"))[0]
    assert proved is not None
    assert proved <= least
    # Latencies of a chain telescope.
    assert instance.delay is not None
    assert judged.metrics["tel"] == least - int(instance.delay.sum())
    total = lower_bound(instance)[0]
    assert total is not None
    assert total <= least - int(instance.delay.sum())
    for policy in ("vllm-v1",) if shared else ("fcfs", "mc-sf", "program-fcfs"):
        found = optsched.run(instance, policy).metrics
        assert found["session_completion"] >= least
        assert lower_bound(Problem(instance, objective="makespan"))[0] <= found["makespan"]
        p99 = lower_bound(Problem(instance, objective="p99_session_completion"))[0]
        assert p99 <= found["p99_session_completion"]


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_no_schedule_of_six_sessions_contradicts(seed: int) -> None:
    _agree(seed, seed % 2 > 0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_no_schedule_of_500_times_six_sessions_contradicts(shared: bool) -> None:
    for seed in range(30, 530):
        _agree(seed, shared)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_in_seconds_is_below_the_bound(seed: int) -> None:
    """`best_in_seconds` tries all schedules that split no prefill and evict nobody, without code of
    the package."""
    rng = Random(seed)
    coefficients = {"base": "7", "token": "1.5", "decode_kv": "0.25", "prefill_square": "0.125"}
    cost = BatchCost("few-terms", 3, coefficients)
    instance = Instance(
        [0.0, None, rng.uniform(0, 0.1), None], [rng.randint(1, 9) for _ in range(4)],
        [rng.randint(1, 2) for _ in range(4)], rng.randint(12, 40), time_unit="second",
        after=[None, 0, None, 2], delay=[0, rng.uniform(0, 0.05), 0, rng.uniform(0, 0.05)],
        chunked_prefill=False,
    )  # fmt: skip
    least = float(best_in_seconds(instance, 3, coefficients))
    proved = lower_bound(Problem(instance, cost, "session_completion"))[0]
    assert proved is not None
    assert proved <= least
    judged = optsched.run(Problem(instance, cost), "fcfs").evaluation
    assert judged.metrics["session_completion"] >= least * (1 - 1e-9)


def test_alone_a_session_takes_its_chain() -> None:
    """On an idle machine the longest way (earliest start, own time, tail behind) is the chain that
    `chains_of` sums, and no run releases a call before its earliest start."""
    for seed in range(5):
        instance = forest(seed, 1, 5, rounds=False)
        if sum(not row for row in instance.after or ()) > 1:
            continue
        instance = replace(instance, kv_capacity=10_000, hybrid_batching=True)
        sessions = instance.sessions
        assert sessions is not None
        alone = alone_times(instance, COST)
        head = np.array(sessions.earliest(instance.given_release.tolist(), alone.tolist()))
        longest = (head + alone + sessions.tails(alone.tolist())).max()
        chain = chains_of(instance, sessions, alone)[0]
        assert longest - instance.given_release.min() == pytest.approx(chain)
        judged = optsched.run(Problem(instance, COST), "vllm-v1").evaluation
        assert (judged.clock.release >= head - 1e-9).all()


def test_what_does_not_know_sessions_refuses_them_by_name() -> None:
    assert "after" in features_of(TREE)
    # Bounds and exact methods, in rounds and in seconds, name the column `after`.
    for method in ("ramp", "dual", "srpt"):
        with pytest.raises(UsageError, match="not proved for after"):
            lower_bound(TREE, method=method)
    for method in ("highs", "cpsat", "lns", "ramp", "placement"):
        with pytest.raises(UsageError, match="after"):
            solve(TREE, method=method)
    seconds = forest(1, 2, rounds=False)
    for method in ("labels", "cpsat", "pulp-bigm"):
        with pytest.raises(UsageError, match="after"):
            solve(Problem(seconds, COST), method=method)
    # Policies and bounds know them, so without a method there is an answer.
    for problem in (Problem(TREE), Problem(seconds, COST)):
        found = solve(problem, time_limit_s=5)
        assert found.bound <= found.value
    with pytest.raises(UsageError, match=r"requests\.after"):
        _ = TREE.release
    able = {name for name, one in list_bounds().items() if "after" in one.features}
    assert able == {"sessions", "sessions-work"}


def test_an_objective_on_sessions_needs_some() -> None:
    plain = Instance([0], [1], [1], kv_capacity=3)
    with pytest.raises(UsageError, match="session_completion"):
        bound(Problem(plain, objective="session_completion"))
    assert TABLE["session_completion"].is_whole(TREE)


def test_the_command_line_bounds_and_compares_sessions(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    write_instance(TREE, path)
    words = ("--objective", "session_completion", "--time-limit", "2")
    found = answer("bound", path, *words)
    assert found["method"] == "sessions"
    assert found["bound"] == 9  # chains of 8 and 1
    assert found["objective"] == 9
    compared = answer("compare", path, "--policy", "fcfs", "--policy", "program-las", *words[2:])
    rows = {row["policy"]: row["metrics"] for row in compared["policies"]}
    # Two sessions, which take 8 and 1 rounds with fcfs.
    assert rows["fcfs"]["mean_session_completion"] == 4.5
    assert compared["bound"] <= rows["fcfs"]["tel"]
    write_instance(forest(3, 2, rounds=False), path)
    given = ("--cost-model", "llama2-7b-a100-infermax", "--time-limit", "2")
    found = answer("bound", path, *words[:2], *given)
    assert found["bound"] <= found["objective"]
    compared = answer("compare", path, "--policy", "vllm-v1", *given)
    assert compared["bound"] <= compared["best_known"]
    schedule, page = tmp_path / "schedule.json", tmp_path / "page.html"
    run("simulate", path, "--policy", "vllm-v1", *given[:2], "--schedule-out", schedule)
    judged = answer("evaluate", path, schedule, *given[:2])
    assert judged["metrics"]["session_completion"] > 0
    run("plot", schedule, "--instance", path, *given[:2], "-o", tmp_path / "trace.json")
    run("report", schedule, path, "-o", page)


def _weka(path: Path, *sessions: list[dict[str, Any]]) -> Path:
    """Write sessions of Weka, one a line."""
    path.write_text("\n".join(json.dumps({"requests": calls}) for calls in sessions))
    return path


def _call(t: float, think: float | None = None, api: float = 2.5, **more: Any) -> dict[str, Any]:
    """Return a call of 10 + 3 tokens that took 2.5 s, if nothing else is said."""
    think_time = {} if think is None else {"think_time": think}
    return {"t": t, "in": 10, "out": 3, "api_time": api, "hash_ids": [], **think_time, **more}


AGENT = [
    _call(0.0, 0.0), _call(5.0, 2.5), {"t": 10.0, "requests": [_call(0.0, 0.0), _call(4.0, 1.5)]},
    _call(20.0, 12.5), _call(30.0, 7.0, out=0), _call(40.0, 9.0),
]  # fmt: skip
"""The sub-agent comes after call 1, which ends at 7.5, and ends at 16.5; call 4 waits for it. The
call at 30 has no output and is left out."""


def test_sessions_of_weka_are_read_in_closed_loop(tmp_path: Path) -> None:
    path = _weka(tmp_path / "w.jsonl", AGENT, [_call(0.0), _call(9.0)])
    with pytest.warns(TraceWarning, match="dropped"):
        instance = read_trace("weka", path, sessions=True, rate=0.1, seed=3)
    assert instance.after == ((), (0,), (1,), (2,), (1, 3), (4,), (), (6,))
    assert instance.delay is not None
    # See AGENT: 10 - 7.5 before the sub-agent, 20 - 16.5 behind it, and else what calls say: 2.5,
    # 1.5 and 9. Of the other session 9 - 2.5.
    assert instance.delay.tolist() == [0, 2.5, 2.5, 1.5, 3.5, 9.0, 0, 6.5]
    assert instance.arrival[0] == 0 < instance.arrival[6]
    with pytest.warns(TraceWarning, match="dropped"):
        half = read_trace("weka", path, sessions=True, think_scale=0.5)
    assert half.delay is not None
    assert half.delay.tolist() == (instance.delay / 2).tolist()
    with pytest.warns(TraceWarning, match="dropped"):
        given = read_trace("weka", path)  # original start times
    assert given.after is None
    out = tmp_path / "w.json"
    run("import", "weka", path, "--sessions", "--rounds", 1, "--kv-capacity", 99, "-o", out)
    # In rounds of a second delays are rounded down.
    rounds = read_instance(out)
    assert rounds.delay is not None
    assert rounds.delay.tolist() == [0, 2, 2, 1, 3, 9, 0, 6]


BURST = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens
5,a,2,m,10,5
6,b,1.5,m,4,2
8,b,1,m,4,0
9,a,1,m,20,6
30,b,1,m,9,3
31,,1,m,7,1
32,,1,m,7,1
"""
"""Session a thinks for 2 s, b for 22.5 s: its second call failed. The last two are alone."""


def test_sessions_of_burstgpt_are_read_in_closed_loop(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text(BURST)
    with pytest.warns(TraceWarning, match="dropped 1 of 7 rows"):
        found = read_trace("burstgpt", tmp_path / "b.csv", sessions=True)
    assert found.after == ((), (), (0,), (1,), (), ())
    assert found.arrival.tolist() == [0, 1, -1, -1, 26, 27]  # 6, 31 and 32 less 5
    assert found.delay is not None
    assert found.delay.tolist() == [0, 0, 2, 22.5, 0, 0]  # 9 - (5 + 2), and 30 - (6 + 1.5)
    (tmp_path / "old.csv").write_text("Timestamp,Request tokens,Response tokens\n5,10,5\n")
    with pytest.raises(InputError, match=r"column.*'Session ID'"):
        read_trace("burstgpt", tmp_path / "old.csv", sessions=True)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("azure", "--sessions"), "--sessions: found with the format 'azure'; expected only with"),
        (
            ("weka", "--sessions", "--sample", 2),
            "--sample: found with --sessions; expected --limit",
        ),
        (("weka", "--think-scale", 2), "--think-scale: found without --sessions; expected both"),
    ],
)
def test_what_no_session_has_is_refused(words: tuple[Any, ...], error: str, tmp_path: Path) -> None:
    path = _weka(tmp_path / "w.jsonl", AGENT)
    assert error in one_line_error(invoke("import", words[0], path, *words[1:]))


@pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of public traces")
def test_real_sessions_are_bounded_and_served() -> None:
    path = Path(str(DATA)) / "weka" / "sessions_up_to_100k.jsonl.gz"
    instance = read_trace("weka", path, sessions=True, rate=0.01, limit=12, kv_capacity=400_000)
    assert instance.sessions is not None
    assert instance.sessions.session.max() == 11  # twelve sessions
    found = bound(Problem(instance, COST, "session_completion"), time_limit_s=0)
    judged = optsched.run(Problem(instance, COST), "vllm-v1").evaluation
    assert found.bound is not None
    assert found.bound <= judged.metrics["session_completion"]
