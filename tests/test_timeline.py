"""What a schedule does when, held against a twin with dictionaries that shares no code."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import optsched
from optsched.judge import spans
from optsched.judge.evaluate import evaluate
from optsched.judge.timeline import PHASES, Timeline
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, from_batches, from_starts

timelines: Any = import_module("optsched.judge.timeline")
MODEL = "llama2-7b-a100-infermax"
Span = tuple[str, float, float, int]


def slow_spans(instance: Instance, schedule: Schedule, start: list, end: list) -> dict:
    """Follow one request at a time through the batches, then fill what lies between."""
    columns = [schedule.batch_offsets, schedule.request, schedule.tokens]
    offsets, request, tokens = ([int(v) for v in c] for c in columns if c is not None)
    assert schedule.evicted_offsets is not None
    assert schedule.evicted is not None
    found = {}
    for i in range(instance.n):
        events: list[Span] = []
        cached, produced, evicted, decoding = 0, 0, False, False
        for j in range(len(start)):
            cut = schedule.evicted[schedule.evicted_offsets[j] : schedule.evicted_offsets[j + 1]]
            if i in cut.tolist():
                cached, evicted, decoding = 0, True, False
                produced = 0 if schedule.evict_mode == "restart" else produced
                events.append(("lost", start[j], start[j], 0))
            for p in range(offsets[j], offsets[j + 1]):
                if request[p] == i:
                    name = "decode" if decoding else "refill" if evicted else "prefill"
                    events.append((name, start[j], end[j], tokens[p]))
                    cached += tokens[p]
                    decoding = cached == int(instance.prompt_tokens[i]) + produced
                    produced += decoding
        found[i] = merged(list(filled(float(instance.arrival[i]), events)))
    return found


def filled(since: float, events: list[Span]) -> Iterator[Span]:
    """Yield what happens to a request with waiting, pauses and evictions between."""
    held, lost = False, False
    for name, a, b, tokens in events:
        if a > since:
            yield ("paused" if held else "evicted" if lost else "waiting", since, a, 0)
        since = max(since, b)
        if name == "lost":
            held, lost = False, True
        else:
            held = True
            yield (name, a, b, tokens)


def merged(parts: list[Span]) -> list[Span]:
    """Join neighbours of one phase that have tokens."""
    out: list[Span] = []
    for part in parts:
        if out and out[-1][0] == part[0] and out[-1][2] == part[1] and part[3]:
            out[-1] = (part[0], out[-1][1], part[2], out[-1][3] + part[3])
        else:
            out.append(part)
    return out


def of_request(found: Timeline, i: int) -> list[Span]:
    """Return a request's spans: phase, start, end, tokens."""
    mine = np.flatnonzero(found.span_request == i)
    return [
        (PHASES[found.span_phase[k]], float(found.span_start[k]), float(found.span_end[k]),
         int(found.span_tokens[k]))
        for k in mine
    ]  # fmt: skip


def loaded(seed: int, *, rounds: bool = False) -> Instance:
    """Draw requests that need three times the KV that there is."""
    rng = np.random.default_rng(seed)
    arrival = rng.integers(0, 40, 30) if rounds else rng.uniform(0, 0.2, 30)
    return Instance(
        arrival, rng.integers(1, 60, 30), rng.integers(1, 40, 30), kv_capacity=300,
        time_unit="round" if rounds else "second",
    )  # fmt: skip


# Policies that pause, evict and restart, in rounds and in seconds.
CASES = [
    (policy, rounds, seed)
    for policy in ("vllm", "sarathi", "vllm-hy", "fcfs", "mc-sf", "alpha-protection:alpha=0.3")
    for rounds in (False, True)
    for seed in (1, 2)
]


@pytest.mark.parametrize(("policy", "rounds", "seed"), CASES)
def test_spans_are_those_of_the_slow_twin(policy: str, rounds: bool, seed: int) -> None:
    """`slow_spans` follows one request after the other through the batches."""
    instance = loaded(seed, rounds=rounds)
    cost = None if rounds else MODEL
    schedule = optsched.run(optsched.Problem(instance, cost), policy).schedule
    found = optsched.timeline(optsched.Problem(instance, cost), schedule)
    expected = slow_spans(instance, schedule, found.batch_start.tolist(), found.batch_end.tolist())
    for i in range(instance.n):
        assert of_request(found, i) == expected[i], f"request {i}"
    assert np.array_equal(found.batch_kv, found.evaluation.batch_kv)
    lost = np.unique(found.span_request[found.span_phase == spans.REFILL])
    assert lost.tolist() == np.flatnonzero(found.evaluation.evictions).tolist()
    assert found.batch_evictions.sum() == found.evaluation.metrics["evictions"]


@pytest.mark.parametrize(("policy", "rounds", "seed"), CASES[::3])
def test_spans_tile_the_time_from_arrival_to_finish(policy: str, rounds: bool, seed: int) -> None:
    instance = loaded(seed, rounds=rounds)
    cost = None if rounds else MODEL
    found = optsched.timeline(
        optsched.Problem(instance, cost),
        optsched.run(optsched.Problem(instance, cost), policy).schedule,
    )
    for i in range(instance.n):
        parts = of_request(found, i)
        assert parts[0][1] == instance.arrival[i]
        assert parts[-1][2] == found.evaluation.finish[i]
        assert all(one[2] == two[1] for one, two in pairwise(parts))
    # Every token of a batch belongs to one phase, and to one span.
    tokens = found.batch_prefill + found.batch_decode + found.batch_refill
    assert tokens.sum() == found.span_tokens.sum()


def test_an_evicted_request_waits_runs_loses_its_kv_and_is_refilled() -> None:
    # M = 10, two requests of 3 + 4 tokens: after two batches of both, 10 tokens are held.
    instance = Instance([0, 0], [3, 3], [4, 4], kv_capacity=10, time_unit="round")
    schedule = from_batches(
        [0, 2, 4, 5, 6, 7, 8, 9, 10], [0, 1, 0, 1, 0, 0, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1, 3, 1, 1, 1],
        evicted_offsets=[0, 0, 0, 1, 1, 1, 1, 1, 1], evicted=[1], evict_mode="restart",
        instance=instance,
    )  # fmt: skip
    found = optsched.timeline(instance, schedule)
    assert of_request(found, 0) == [("prefill", 0, 1, 3), ("decode", 1, 4, 3)]
    assert of_request(found, 1) == [
        ("prefill", 0, 1, 3), ("decode", 1, 2, 1), ("evicted", 2, 4, 0), ("refill", 4, 5, 3),
        ("decode", 5, 8, 3),
    ]  # fmt: skip
    assert found.batch_evictions.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert found.batch_kv.tolist() == [8, 10, 6, 7, 4, 5, 6, 7]  # "generated": one more each
    assert found.batch_kv_left.tolist() == [8, 10, 6, 0, 4, 5, 6, 0]  # less who ends
    times, kv, labels = found.kv_by_group()
    assert labels == ["request 0", "request 1"]
    assert kv.tolist() == [[4, 5, 6, 7, 0, 0, 0, 0, 0], [4, 5, 0, 0, 4, 5, 6, 7, 0]]
    assert times.tolist() == list(range(9))


def test_runs_and_rounds_are_the_same_schedule() -> None:
    instance = optsched.read_instance("tiny")
    schedule = optsched.solve(instance).schedule
    assert schedule is not None
    assert schedule.starts is not None
    found = optsched.timeline(instance, schedule)
    # One batch per round in which something runs: the judge counts as many.
    assert len(found.batch_start) == found.evaluation.busy_batches
    assert found.batch_kv.max() == found.evaluation.metrics["peak_kv"]
    assert found.batch_kv.mean() == pytest.approx(found.evaluation.mean_kv)
    for i, start in enumerate(schedule.starts.tolist()):
        last = of_request(found, i)[-1]
        assert last[2] == start + instance.output_tokens[i]


def test_a_pause_is_told_from_an_eviction() -> None:
    # Request 0 holds its KV while batch 1 takes request 1 alone.
    instance = Instance([0, 0], [2, 2], [2, 1], kv_capacity=9, time_unit="round")
    schedule = from_batches([0, 1, 2, 3], [0, 1, 0], [2, 2, 1], instance=instance)
    found = optsched.timeline(instance, schedule)
    assert of_request(found, 0) == [
        ("prefill", 0, 1, 2), ("paused", 1, 2, 0), ("decode", 2, 3, 1),
    ]  # fmt: skip
    assert of_request(found, 1) == [("waiting", 0, 1, 0), ("prefill", 1, 2, 2)]


def test_pauses_can_be_taken_into_the_phase_around_them() -> None:
    # As above: the pause between its prefill and its decode is gone.
    instance = Instance([0, 0], [2, 2], [2, 1], kv_capacity=9, time_unit="round")
    schedule = from_batches([0, 1, 2, 3], [0, 1, 0], [2, 2, 1], instance=instance)
    found = optsched.timeline(instance, schedule).without_pauses()
    assert of_request(found, 0) == [("prefill", 0, 1, 2), ("decode", 2, 3, 1)]
    loads = loaded(5)
    whole = optsched.timeline(
        optsched.Problem(loads, MODEL),
        optsched.run(optsched.Problem(loads, MODEL), "vllm").schedule,
    )
    less = whole.without_pauses()
    # Half of the spans and more are pauses, or parts of what these had cut.
    assert (whole.span_phase == spans.PAUSED).sum() > 20
    assert len(less.span_start) < len(whole.span_start) / 2
    assert less.span_tokens.sum() == whole.span_tokens.sum()
    for i in range(loads.n):
        parts = of_request(less, i)
        assert all(one[2] <= two[1] and one[0] != two[0] for one, two in pairwise(parts))
        assert parts[-1][2] == whole.evaluation.finish[i]
        kept = [name for name, *_ in of_request(whole, i) if name != "paused"]
        again = [name for k, name in enumerate(kept) if k == 0 or kept[k - 1] != name]
        assert [name for name, *_ in parts] == again


def test_two_workers_have_their_own_kv() -> None:
    instance = Instance([0, 0], [2, 3], [2, 1], kv_capacity=9, time_unit="round")
    schedule = from_batches([0, 1, 2, 3], [0, 1, 0], [2, 3, 1], worker=[0, 1, 0], instance=instance)
    found = optsched.timeline(instance, schedule)
    assert found.workers == 2
    # "generated": 2 + 1 of request 0, 3 + 1 of request 1, and then 3 + 1 of request 0.
    assert found.batch_kv.tolist() == [3, 4, 4]
    assert found.kv_by_group(worker=0)[1].tolist() == [[3, 4, 0], [0, 0, 0]]
    assert found.kv_by_group(worker=1)[1].tolist() == [[0, 0], [4, 0]]


def test_idle_time_holds_what_pauses() -> None:
    # Batch 1 starts at 5 though batch 0 ended at 1; request 0 keeps 3 tokens meanwhile.
    instance = Instance([0, 5], [2, 1], [2, 1], kv_capacity=9, time_unit="round")
    schedule = from_batches([0, 1, 3], [0, 0, 1], [2, 1, 1], start=[0, 5], instance=instance)
    times, kv, _ = optsched.timeline(instance, schedule).kv_by_group()
    assert times.tolist() == [0, 1, 5, 6]
    assert kv.tolist() == [[3, 3, 4, 0], [0, 0, 2, 0]]


def test_groups_and_steps_keep_the_peaks() -> None:
    instance = loaded(3)
    found = optsched.timeline(
        optsched.Problem(instance, MODEL),
        optsched.run(optsched.Problem(instance, MODEL), "vllm").schedule,
    )
    assert len(found.batch_start) > 50  # more than the 20 steps asked for
    times, kv, labels = found.kv_by_group(groups=4, most=20)
    # 30 requests in four groups: 8, 7, 8 and 7.
    assert labels == ["0 to 7", "8 to 14", "15 to 22", "23 to 29"]
    assert kv.shape == (4, len(times))
    assert kv.sum(axis=0).max() == found.batch_kv.max()
    assert (np.diff(times) > 0).all()
    exact_times, exact, _ = found.kv_by_group(groups=4, most=10_000)
    at = np.searchsorted(exact_times, found.batch_start, "right") - 1
    assert np.array_equal(exact.sum(axis=0)[at], found.batch_kv)


def test_counts_agree_with_the_spans() -> None:
    """Against a count of all spans around each time."""
    instance = loaded(4)
    found = optsched.timeline(
        optsched.Problem(instance, MODEL),
        optsched.run(optsched.Problem(instance, MODEL), "vllm").schedule,
    )
    rng = np.random.default_rng(0)
    times = rng.uniform(found.begin, found.end, 50)
    counts = found.phase_counts(times)
    for k, t in enumerate(times):
        inside = (found.span_start <= t) & (t < found.span_end)
        expected = np.bincount(found.span_phase[inside], minlength=len(PHASES))
        assert counts[:, k].tolist() == expected.tolist()


def test_means_count_what_is_shorter_than_a_step() -> None:
    """Against what all spans have in common with each of seven steps, over its length."""
    instance = loaded(4)
    found = optsched.timeline(
        optsched.Problem(instance, MODEL),
        optsched.run(optsched.Problem(instance, MODEL), "vllm").schedule,
    )
    times = np.linspace(found.begin, found.end, 8)
    means = found.phase_means(times)
    for k in range(7):
        start, end = (
            np.maximum(found.span_start, times[k]),
            np.minimum(found.span_end, times[k + 1]),
        )
        inside = np.bincount(found.span_phase, np.maximum(end - start, 0), len(PHASES))
        assert means[:, k] == pytest.approx(inside / (times[k + 1] - times[k]), abs=1e-9)


def test_a_schedule_that_the_judge_refuses_has_no_timeline() -> None:
    instance = Instance([0, 1], [2, 2], [2, 1], kv_capacity=9)
    with pytest.raises(ViolationError, match="before its arrival"):
        optsched.timeline(instance, from_starts([0, 0], instance))


def test_a_schedule_too_long_to_lay_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_ENTRIES", 2)
    # Outputs of 2 + 1 tokens.
    instance = Instance([0, 0], [2, 2], [2, 1], kv_capacity=9)
    with pytest.raises(InputError, match="3 output tokens; expected at most 2, since the timeline"):
        optsched.timeline(instance, from_starts([0, 0], instance))


def test_an_evaluation_at_hand_is_not_made_again() -> None:
    instance = optsched.read_instance("tiny")
    schedule = optsched.run(instance, "vllm").schedule
    judged = evaluate(instance, schedule)
    assert optsched.timeline(instance, schedule, evaluation=judged).evaluation is judged
