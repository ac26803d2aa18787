"""Schedulers that decide once per window (Choi et al. 2025): by hand, compiled, judged."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from readable_windows import simulate_windows
from slow_judge import TIMED, random_instance
from typer.testing import CliRunner

from optsched import Fleet, Problem, run
from optsched.analysis.compare import compare
from optsched.analysis.ratio import ratios
from optsched.cli import app
from optsched.costs.cost import BatchCost
from optsched.files.read_write import read_schedule, write_instance
from optsched.judge.evaluate import evaluate
from optsched.policies import allows, is_clairvoyant, make_policy
from optsched.policies.base import Windows
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, LoopError, OptschedError, PolicyError
from optsched.problem.forecast import Forecast
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import COLUMNS, Schedule
from optsched.workloads.generate import generate

LINEAR = BatchCost("linear", 1, {"token": "1000", "base": "1000"})
"""A batch of c tokens takes c + 1 seconds."""

LLAMA = "llama2-7b-a100-infermax"


def rows_of(schedule: Schedule) -> list[dict[int, int]]:
    """Return the batches as {request: tokens}."""
    assert schedule.batch_offsets is not None
    assert schedule.request is not None
    assert schedule.tokens is not None
    return [
        dict(zip(schedule.request[a:b].tolist(), schedule.tokens[a:b].tolist(), strict=True))
        for a, b in pairwise(schedule.batch_offsets.tolist())
    ]


def evicted_of(schedule: Schedule) -> dict[int, list[int]]:
    """Return who is evicted before which batch."""
    assert schedule.evicted_offsets is not None
    assert schedule.evicted is not None
    pairs = enumerate(pairwise(schedule.evicted_offsets.tolist()))
    return {j: schedule.evicted[a:b].tolist() for j, (a, b) in pairs if b > a}


def random_forecast(rng: Random, instance: Instance) -> Instance:
    """Return the instance with no predictions, points, or a forecast without any sense."""
    outputs = instance.output_tokens.tolist()
    kind = rng.randrange(3)
    if kind == 0:
        return instance
    if kind == 1:
        return replace(instance, predicted=[max(1, o + rng.randint(-3, 3)) for o in outputs])
    every = rng.randint(1, 4)
    counts = [(o - 1) // every + 1 + rng.randint(0, 2) for o in outputs]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    left = [rng.uniform(0, 9) for _ in range(offsets[-1])]
    return replace(instance, forecast=Forecast(every, offsets, left))


def random_rules(rng: Random) -> tuple[Windows, int]:
    """Return a scheduler, and for how many workers."""
    order = rng.choice(["arrival", "remaining", "total"])
    window, size, workers = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 3)
    rules = Windows(order, window=window, batch_size=size, aging=rng.choice([0, 0, 0.5, 3.0]))
    return rules, workers


# --- compiled, readable, judged -----------------------------------------------------------------


def test_the_compiled_loop_decides_as_the_readable_twin_and_the_judge_accepts_it() -> None:
    """`simulate_windows` is the readable loop."""
    rng = Random(4)
    same = evictions = pauses = several = 0
    for _ in range(600):
        instance = random_forecast(rng, random_instance(rng, most=10))
        rules, workers = random_rules(rng)
        problem = Problem(instance, Fleet.of(workers, None if instance.in_rounds else TIMED))
        try:
            fast = simulate(problem, rules)
        except LoopError:
            with pytest.raises(LoopError, match="is not split"):
                simulate_windows(problem, rules)
            continue
        slow = simulate_windows(problem, rules)
        story = (rules, instance.to_dict())
        for name in COLUMNS:
            assert np.array_equal(getattr(fast, name), getattr(slow, name)), story
        assert (fast.worker is None) == (workers == 1)
        assert np.array_equal(fast.worker, slow.worker), story
        judged = evaluate(problem, fast)
        same += 1
        evictions += int(judged.evictions.sum())
        pauses += int(judged.pauses.sum())
        several += judged.workers > 1
    assert same > 550  # of 600; the others cannot end
    assert min(evictions, pauses, several) > 100  # all of these are among what is compared


def test_a_hidden_length_changes_nothing_on_any_worker_before_it_shows() -> None:
    """Request i is shorter in the second case. All that begins before it ends there is the same."""
    rng = Random(5)
    compared = 0
    for _ in range(300):
        instance = random_forecast(rng, random_instance(rng, most=8, limits=Limits()))
        rules, workers = random_rules(rng)
        fleet = Fleet.of(workers, None if instance.in_rounds else TIMED)
        i = rng.randrange(instance.n)
        outputs = instance.output_tokens.copy()
        outputs[i] = rng.randint(1, int(outputs[i]))  # a forecast of more tokens serves fewer
        if outputs[i] == instance.output_tokens[i] or (
            rules.uses_lengths(instance) and not instance.has_predictions
        ):
            continue
        changed = replace(instance, output_tokens=outputs)
        cases = (Problem(instance, fleet), Problem(changed, fleet))
        found = [simulate(case, rules) for case in cases]
        judged = [evaluate(case, one) for case, one in zip(cases, found, strict=True)]
        shows = judged[1].finish[i]
        heads = []
        for schedule, one in zip(found, judged, strict=True):
            evicted, rows = evicted_of(schedule), rows_of(schedule)
            worker = schedule.worker if schedule.worker is not None else [0] * len(rows)
            early = [j for j in range(len(rows)) if one.batch_start[j] < shows]
            heads.append(
                sorted(
                    (float(one.batch_start[j]), int(worker[j]), list(rows[j].items()),
                     evicted.get(j, []))
                    for j in early
                )
            )  # fmt: skip
        assert heads[0] == heads[1], (rules, instance.to_dict(), outputs)
        compared += 1
    assert compared > 100  # of 300; the others are left out above


# --- by hand ------------------------------------------------------------------------------------


def test_a_window_by_hand() -> None:
    # In seconds, c + 1 per batch; K = 2, two requests at a time. A: s 3, o 4; B: s 2, o 3; both
    # at 0. C: s 1, o 1, at 1. True lengths: B (3 left) before A (4 left).
    instance = Instance(
        [0, 0, 1], [3, 2, 1], [4, 3, 1], 40, time_unit="second", kv_accounting="cached"
    )
    found = simulate(Problem(instance, LINEAR), Windows("remaining", window=2, batch_size=2))
    assert rows_of(found) == [
        {1: 2, 0: 3},  # both prefills in one batch: the first token of each
        {1: 1, 0: 1},  # the second: the window is over. B has 1 left, A 2; C, 1, came after B
        {2: 1},  # C's prefill finishes it, and ends the window before B's turn
        {1: 1, 0: 1},  # B is done, and ends the window
        {0: 1},
    ]
    judged = evaluate(Problem(instance, LINEAR), found)
    # 5 + 1, 2 + 1, 1 + 1, 2 + 1, 1 + 1 seconds
    assert judged.batch_end.tolist() == [6.0, 9.0, 11.0, 14.0, 16.0]
    assert judged.finish.tolist() == [16.0, 14.0, 11.0]
    # C, there at 1, starts at 9.
    assert judged.queuing_delay.tolist() == [0.0, 0.0, 8.0]
    assert judged.waiting.tolist() == [2.0, 2.0, 8.0]  # A and B paused for C, and kept their KV
    assert judged.evictions.tolist() == [0, 0, 0]
    assert judged.pauses.tolist() == [1, 1, 0]


def test_first_come_first_served_lets_go_on_what_has_begun() -> None:
    instance = Instance([0, 1, 2], [1, 1, 1], [4, 1, 2], 40)
    rows = rows_of(simulate(instance, "elis-fcfs:window=1,batch_size=1"))
    assert rows == [{0: 1}, {0: 1}, {0: 1}, {0: 1}, {1: 1}, {2: 1}, {2: 1}]


def test_shortest_job_first_ranks_by_the_whole_output() -> None:
    # After 3 of 5 tokens, A has 2 left, less than B's 3; but 5 > 3.
    instance = Instance([0, 3], [1, 1], [5, 3], 40)
    spec = ":window=1,batch_size=1"
    by_total = rows_of(simulate(instance, f"elis-sjf{spec}"))
    assert by_total == [{0: 1}] * 3 + [{1: 1}] * 3 + [{0: 1}] * 2
    by_left = rows_of(simulate(instance, f"isrtf{spec}"))
    assert by_left == [{0: 1}] * 5 + [{1: 1}] * 3


def test_kv_stays_between_windows_and_the_last_in_order_loses_it_first() -> None:
    # M = 10, K = 2, one request at a time. A: s 3, o 8, at 0; B: s 3, o 5, at 1; C: s 4, o 1, at 9.
    instance = Instance(
        [0, 1, 9], [3, 3, 4], [8, 5, 1], 10, time_unit="second", kv_accounting="cached"
    )
    found = simulate(Problem(instance, LINEAR), Windows(window=2, batch_size=1))
    assert rows_of(found) == [
        {0: 3}, {0: 1},  # until 6: A has 6 left and holds 4 tokens
        {1: 3}, {1: 1},  # until 12: B has 3 left and holds 4 beside A's
        {2: 4},  # C has 1 left; 4 + 4 + 4 > 10, so A, the last in order, goes
        {1: 1}, {1: 1}, {1: 1},  # B kept its KV
        {0: 5}, {0: 1}, {0: 1}, {0: 1}, {0: 1}, {0: 1},  # A recomputes 3 + 2, its third token
    ]  # fmt: skip
    assert evicted_of(found) == {4: [0]}
    assert evaluate(Problem(instance, LINEAR), found).batch_kv.tolist() == [
        3, 4, 4 + 3, 4 + 4, 4 + 4, 5, 6, 7, 5, 6, 7, 8, 9, 10
    ]  # fmt: skip


def test_the_last_of_a_batch_leaves_it_when_the_batch_outgrows_the_memory() -> None:
    # M = 10, K = 3. B: s 4, o 3 before A: s 3, o 6. 7 tokens after the prefills, 9, then 11.
    instance = Instance([0, 0], [3, 4], [6, 3], 10, time_unit="second", kv_accounting="cached")
    found = simulate(Problem(instance, LINEAR), Windows(window=3))
    assert rows_of(found) == [
        # A goes before the third batch and computes its 3 + 2 tokens again when B has ended.
        {1: 4, 0: 3}, {1: 1, 0: 1}, {1: 1}, {0: 5}, {0: 1}, {0: 1}, {0: 1}
    ]  # fmt: skip
    assert evicted_of(found) == {2: [0]}
    evaluate(Problem(instance, LINEAR), found)


def test_in_rounds_an_evicted_request_starts_again_with_what_was_last_predicted() -> None:
    # M = 10, generated accounting, K = 2, one at a time. A: s 1, o 8, told 2, then 6 more.
    # B at 2: s 4, o 5, told 5. After its window A has 6 left: B goes on, and does not fit beside A
    # in its second window (3 + 7 = 10, then 3 + 8): A starts again, with 2 + 6 = 8 to go, not 2.
    forecast = Forecast(2, [0, 4, 7], [2, 6, 4, 2, 5, 3, 1])
    instance = Instance([0, 2], [1, 4], [8, 5], 10, forecast=forecast)
    found = simulate(instance, Windows(window=2, batch_size=1))
    assert rows_of(found) == [{0: 1}, {0: 1}, {1: 4}, *[{1: 1}] * 4, *[{0: 1}] * 8]
    assert evicted_of(found) == {5: [0]}
    assert evaluate(instance, found).finish.tolist() == [15, 7]


def test_a_request_goes_to_the_worker_with_the_fewest_and_stays() -> None:
    # K = 1, one request at a time; A (o 3) at 0 to worker 0, B (o 1) at 0 to worker 1, which is
    # free again at 1: C and D, at 1, go to worker 1 (none there, one on 0), then to 0 (one each).
    instance = Instance([0, 0, 1, 1], [1] * 4, [3, 1, 2, 1], 40)
    found = simulate(instance, "elis-fcfs:window=1,batch_size=1,workers=2")
    home: dict[int, set[int]] = {}
    for row, worker in zip(rows_of(found), found.worker, strict=True):
        for i in row:
            home.setdefault(i, set()).add(int(worker))
    assert home == {0: {0}, 1: {1}, 2: {1}, 3: {0}}
    assert evaluate(instance, found).finish.tolist() == [3, 1, 3, 4]


def test_workers_do_not_share_kv() -> None:
    # Each holds up to 10 tokens, which is all of a worker's KV.
    instance = Instance([0, 0], [5, 5], [5, 5], 10)
    alone = run(instance, "isrtf").evaluation
    both = run(instance, "isrtf:workers=2").evaluation
    assert alone.finish.tolist() == [5, 10]
    assert both.finish.tolist() == [5, 5]
    assert both.workers == 2


# --- known answers ------------------------------------------------------------------------------


def shortest_remaining(arrival: list[int], work: list[int]) -> int:
    """Return the least total completion time on one preemptive machine (Schrage's rule)."""
    left, now, total = dict(enumerate(work)), 0, 0
    while left:
        here = [i for i in left if arrival[i] <= now]
        now += 1
        if here:
            i = min(here, key=lambda i: (left[i], i))
            left[i] -= 1
            if left[i] == 0:
                total += now
                del left[i]
    return total


def test_one_at_a_time_with_true_lengths_is_the_optimal_preemptive_schedule() -> None:
    # In rounds, K = 1 and room for all KV, a request is o units of work on one machine.
    rng = Random(8)
    for _ in range(40):
        n = rng.randint(1, 8)
        arrival = [rng.randint(0, 12) for _ in range(n)]
        output = [rng.randint(1, 8) for _ in range(n)]
        instance = Instance(arrival, [1] * n, output, 1000)
        judged = run(instance, "isrtf:window=1,batch_size=1").evaluation
        assert judged.finish.sum() == shortest_remaining(arrival, output)


@pytest.mark.parametrize("batch_size", [1, pytest.param(2, marks=pytest.mark.whole), 4])
def test_ten_thousand_requests_are_judged_and_wrong_predictions_lie_between(batch_size: int):
    """By true lengths, by predictions that are 40 tokens off in the mean, and by arrival."""
    instance = generate("lognormal", seed=1, n=10_000, rate=2.0 * batch_size)
    mean = {}
    for spec in ("elis-fcfs", "isrtf:{}predictor=noisy,predictor.mae=40", "isrtf"):
        full = spec.format(f"batch_size={batch_size},")
        if full == spec:
            full += f":batch_size={batch_size}"
        judged = run(Problem(instance, LLAMA), full).evaluation
        mean[spec] = judged.metrics["mean_latency"]
    assert mean["isrtf"] < list(mean.values())[1] < mean["elis-fcfs"]


# --- against starvation -------------------------------------------------------------------------


def test_aging_lets_a_long_request_through_a_stream_of_short_ones() -> None:
    # A (20 tokens) and a request of 2 tokens every second round keep one place busy for 80
    # rounds. Without aging A waits for the last; with 1 token per round it stands level with the
    # one that arrives 20 - 2 rounds after it, came before it, and runs.
    arrival = [0, *range(0, 80, 2)]
    instance = Instance(arrival, [1] * 41, [20, *[2] * 40], 1000)
    spec = "isrtf:window=2,batch_size=1,aging="
    finish = [run(instance, f"{spec}{a}").evaluation.finish[0] for a in (0, 1)]
    assert finish[0] == 80 + 20
    assert finish[1] == 18 + 20


def test_nobody_is_passed_by_one_that_comes_later_than_its_length_over_the_aging() -> None:
    rng = Random(9)
    checked = 0
    for _ in range(60):
        instance = random_instance(rng, unit="round", most=10, limits=Limits())
        aging = rng.choice([0.5, 1.0, 2.0])
        rules = Windows("total", window=rng.randint(1, 3), batch_size=1, aging=aging)
        judged = run(instance, rules).evaluation
        for i in range(instance.n):
            # Its key, length + aging x arrival, is larger then, however short it is.
            late = instance.arrival > instance.arrival[i] + instance.output_tokens[i] / aging
            for j in np.flatnonzero(late):
                assert judged.finish[i] <= judged.first_start[j], (rules, instance.to_dict())
                checked += 1
    assert checked > 100  # pairs in 60 instances: the claim is not empty


def test_much_aging_is_first_come_first_served() -> None:
    rng = Random(10)
    for _ in range(40):
        instance = random_instance(rng, unit="round", most=8)
        if len(set(instance.arrival.tolist())) < instance.n or allows("isrtf", instance):
            continue
        # A round of waiting outweighs 10^6 tokens, and outputs are far shorter.
        one = simulate(instance, "isrtf:window=2,batch_size=2,aging=1e6")
        two = simulate(instance, "elis-fcfs:window=2,batch_size=2")
        assert rows_of(one) == rows_of(two)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("isrtf:window=0", "window: found 0; expected an integer from 1"),
        ("isrtf:window=2.5", "parameter window: found '2.5'; expected an integer"),
        ("isrtf:batch_size=0", "batch_size: found 0; expected an integer from 1"),
        ("elis-fcfs:workers=0", "workers: found 0; expected an integer from 1 to 10000"),
        ("elis-sjf:workers=10001", "workers: found 10001; expected an integer from 1 to 10000"),
        ("isrtf:aging=-1", "aging: found -1.0; expected a number of tokens >= 0"),
        ("isrtf:aging=nan", "aging: found 'nan'; expected a number"),
        ("elis-fcfs:aging=1", "parameter 'aging' is unknown"),
    ],
)
def test_impossible_parameters_are_named(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_policy(spec)


def test_rules_are_checked_when_they_are_made() -> None:
    with pytest.raises(InputError, match=r"order:.*'size'.*arrival"):
        Windows("size")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="window: found True"):
        Windows(window=True)
    for aging in (float("inf"), float("nan"), "1"):
        with pytest.raises(InputError, match="aging: "):
            Windows(aging=aging)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="window: found 1000000000000"):
        Windows(window=10**30)


def test_an_input_that_no_batch_holds_is_named() -> None:
    # The prompt fits P = 4; after an eviction the input of 3 + 2 does not.
    instance = Instance(
        [0, 1, 9], [3, 3, 4], [8, 5, 1], 10, time_unit="second", kv_accounting="cached",
        limits=Limits(max_prefill_tokens=4),
    )  # fmt: skip
    assert allows("isrtf", instance) is None
    with pytest.raises(LoopError, match=r"request 0.*5.*tokens"):
        simulate(Problem(instance, LINEAR), Windows(window=2, batch_size=1))
    narrow = replace(instance, limits=Limits(max_batch_tokens=3))
    assert "request 2: prompt_tokens 4 exceeds max_batch_tokens 3" in str(allows("isrtf", narrow))
    with pytest.raises(PolicyError, match="request 2"):
        simulate(Problem(narrow, LINEAR), "isrtf")


def test_who_uses_true_lengths_says_so() -> None:
    instance = Instance([0], [1], [3], 10)
    told = replace(instance, forecast=Forecast(50, [0, 1], [9.0]))
    for spec, oracle in (("isrtf", True), ("elis-sjf", True), ("elis-fcfs", False)):
        made, info = make_policy(spec)
        assert info.clairvoyant == oracle == is_clairvoyant(made, info, instance)
        assert not is_clairvoyant(made, info, told)


def test_a_users_file_may_hold_windows(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from optsched.policies import Windows\n"
        "EAGER = Windows(window=1, batch_size=1)\n"
        "def wide(*, size: int = 8) -> Windows:\n"
        "    return Windows(batch_size=size)\n"
    )
    instance = Instance([0, 0], [1, 1], [3, 1], 40)
    assert rows_of(simulate(instance, f"{file}:EAGER")) == [{1: 1}, *[{0: 1}] * 3]
    assert rows_of(simulate(instance, f"{file}:wide:size=2")) == [{1: 1, 0: 1}, *[{0: 1}] * 2]
    with pytest.raises(OptschedError, match="batch_size: found 0"):
        simulate(instance, f"{file}:wide:size=0")


# --- files and commands -------------------------------------------------------------------------


def test_a_schedule_of_several_workers_survives_a_file_and_the_command_line(tmp_path) -> None:
    # `simulate` writes the schedule, and `evaluate` reads it with its workers; both commands and
    # the table of requests have the judge's numbers.
    instance = generate("lognormal", seed=2, n=40, rate=5.0, arrivals="gamma")
    write_instance(instance, tmp_path / "in.json")
    schedule, table = str(tmp_path / "out.json"), str(tmp_path / "requests.csv")
    words = [str(tmp_path / "in.json"), "--cost-model", LLAMA]
    spec = ["--policy", "isrtf:workers=3,batch_size=1,predictor=elis"]
    run = CliRunner().invoke(app, ["simulate", *words, *spec, "--schedule-out", schedule])
    assert run.exit_code == 0, run.output
    assert "mean queuing delay" in run.output
    judged = CliRunner().invoke(
        app,
        [
            "evaluate",
            words[0],
            schedule,
            *words[1:],
            "--requests-out",
            table,
            "--json",
            "-",
        ],
    )
    assert judged.exit_code == 0, judged.output
    read = evaluate(Problem(instance, LLAMA), read_schedule(schedule, instance))
    assert read.workers == 3  # as the policy asks
    metrics = json.loads(judged.stdout)["metrics"]
    assert metrics["mean_queuing_delay"] == read.metrics["mean_queuing_delay"] > 0
    assert metrics["mean_waiting"] >= metrics["mean_queuing_delay"]
    with Path(table).open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["queuing_delay"]) for row in rows] == read.queuing_delay.tolist()
    assert [float(row["waiting"]) for row in rows] == read.waiting.tolist()


def test_compare_runs_them_beside_the_others() -> None:
    instance = generate("lognormal", seed=2, n=40, rate=5.0)
    found = compare(
        Problem(instance, LLAMA), ["isrtf", "elis-fcfs:workers=2", "fcfs"], time_limit_s=1
    )
    rows = {row.policy: row for row in found.rows}
    assert not any(row.error for row in rows.values())
    assert rows["isrtf"].ratio_to_bound is not None
    # The bound is one for one worker.
    assert rows["elis-fcfs:workers=2"].ratio_to_bound is None
    assert "it uses 2 workers" in " ".join(rows["elis-fcfs:workers=2"].notes)


def test_several_workers_and_pauses_get_no_ratio_to_the_optimum() -> None:
    instance = Instance([0, 1], [1, 1], [6, 1], 20)
    specs = ["isrtf:workers=2", "isrtf:window=1,batch_size=1", "elis-fcfs:window=1,batch_size=1"]
    study = ratios(specs, [instance], "optimum")
    two, paused, plain = study.rows
    assert (two.value, two.low) == (6 + 1, None)
    assert two.error == "no ratio: it uses 2 workers"
    # B takes A's second round.
    assert (paused.value, paused.low) == (1 + 7, None)
    assert "pauses running requests" in str(paused.error)
    # B, there at 1, waits until A has ended at 6, and ends at 7: 6 + 6.
    assert (plain.value, plain.low, plain.error) == (6 + 6, 12 / 7, None)  # 7: both at once
