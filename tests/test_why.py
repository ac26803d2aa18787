"""Why requests wait: parts that sum to latencies, and causes that are known beforehand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, run

import optsched
from optsched import Problem
from optsched.analysis.why import CAUSES, why
from optsched.problem.instance import Instance
from optsched.problem.schedule import runs_on

MODEL = "llama2-7b-a100-infermax"


def causes(instance: Instance, policy: str, **more: Any) -> dict[str, float]:
    """Return the parts of the total latency of a policy, which must sum to it."""
    cost = None if instance.in_rounds else MODEL
    schedule = optsched.run(optsched.Problem(instance, cost), policy).schedule
    found = why(Problem(instance, cost), schedule, **more)
    judged = optsched.evaluate(optsched.Problem(instance, cost), schedule)
    np.testing.assert_allclose(found.latency, judged.latency, rtol=1e-9)
    return found.totals()


def test_each_cause_is_found_where_it_alone_can_be() -> None:
    # KV for one of two equal requests: the second waits 5 rounds for the memory of the first.
    two = Instance([0, 0], [5, 5], [5, 5], kv_capacity=10)
    # What is no waiting is `alone`: 5 + 5.
    assert causes(two, "fcfs") == dict.fromkeys(CAUSES, 0) | {"memory": 5, "alone": 10}
    # Memory enough and one seat.
    roomy = Instance([0, 0], [2, 2], [5, 5], kv_capacity=70)
    assert causes(roomy, "fcfs:max_running=1", max_num_seqs=1)["seats"] == 5
    # The same without a word of seats: it would have fitted, so it was an order.
    assert causes(roomy, "fcfs:max_running=1")["order"] == 5
    # A batch has room for one prompt: the other waits for the next.
    small = "vllm-v1:max_num_seqs=2,max_num_batched_tokens=2"
    assert causes(roomy, small, max_num_batched_tokens=2)["batch"] >= 1


def test_seats_are_counted_by_worker() -> None:
    # Each of two workers has two seats and runs one request. The third waits for 5 rounds on the
    # first worker, whose other seat is free: that is an order.
    three = Instance([0] * 3, [2] * 3, [5] * 3, kv_capacity=70)
    problem = Problem(three, optsched.Fleet.of(2, None))
    found = why(problem, runs_on(three, [0, 0, 5], [0, 1, 0]), max_num_seqs=2).totals()
    assert found["order"] == 5
    assert found["seats"] == 0


def test_in_seconds_who_comes_within_a_batch_waits_for_its_end_and_sharing_slows() -> None:
    """Request 1 comes 1 ms after 2,000 tokens of request 0 have begun; KV is no limit."""
    instance = Instance([0.0, 0.001], [2000, 10], [2, 2], 10_000, "second")
    found = why(
        Problem(instance, MODEL), optsched.run(optsched.Problem(instance, MODEL), "fcfs").schedule
    )
    parts = dict(zip(CAUSES, found.parts, strict=True))
    first = optsched.run(optsched.Problem(instance, MODEL), "fcfs").evaluation
    assert parts["arrival"][1] == pytest.approx(first.first_start[1] - 0.001)
    assert parts["arrival"][0] == parts["memory"].sum() == 0
    assert parts["batch"].sum() > 0  # batches of both take longer


@pytest.mark.parametrize("policy", ["vllm", "vllm-v1", "sarathi", "mc-sf", "least-work"])
def test_parts_sum_to_latencies_with_evictions_and_pauses(policy: str) -> None:
    """`causes` holds the sums against the judge. 60 requests of up to 798 tokens share KV for
    2,000, so some wait for memory."""
    rng = np.random.default_rng(4)
    sizes = rng.integers(20, 400, (2, 60))
    instance = Instance(np.sort(rng.uniform(0, 3, 60)), *sizes, 2000, "second")
    found = causes(instance, policy)
    assert found["memory"] > 0
    assert min(found.values()) >= -1e-9


def test_the_table_has_the_rows_of_the_command() -> None:
    tiny = optsched.read_instance("tiny")
    best = optsched.solve(tiny).schedule
    found = why(tiny, optsched.run(tiny, "mc-sf").schedule, against=best)
    table = found.to_frame(count=2)
    assert list(table.columns) == ["request", *CAUSES, "total"]
    # mc-sf takes 48 rounds, and the optimum is 33.
    assert table.iloc[0]["total"] == 48 - 33
    assert (table[list(CAUSES)].sum(axis=1) == table["total"]).all()
    assert len(table) == 1 + len(found.ranked(2))


def test_the_command_says_who_lost_and_gained(answers: Path, tmp_path: Path) -> None:
    words = ("why", "tiny", answers / "all/mc-sf.json", "--against", answers / "best.json")
    data = answer(*words)
    assert sum(data["total"].values()) == 48 - 33  # total latencies of mc-sf and the optimum
    text = run(*words)
    assert "lost" in text
    # The fourth line has the totals, and its last word the sum: 48 - 33.
    assert text.splitlines()[3].split()[-1] == "15"
    picture = tmp_path / "gap.png"
    run("plot", answers / "all/mc-sf.json", "--kind", "gap", "--against", answers / "best.json",
        "-o", picture)  # fmt: skip
    assert picture.stat().st_size > 1000  # a drawing, and no empty file
    assert "expected both" in run(
        "plot", answers / "best.json", "--kind", "gap", "-o", picture, status=2
    )
    run("why", "tiny", answers / "comparison.json", status=2)


def test_an_interruption_keeps_the_parts_of_the_schedule_itself() -> None:
    instance, stop = Instance([0, 0], [5, 5], [5, 5], kv_capacity=10), threading.Event()
    one, other = (optsched.run(instance, name).schedule for name in ("fcfs", "mc-sf"))
    whole = why(instance, one, against=other, stop=stop)
    assert whole.against is not None
    stop.set()
    found = why(instance, one, against=other, stop=stop)
    assert found.against is None
    assert (found.parts == whole.parts).all()
