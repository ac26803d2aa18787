"""Chrome trace events: what Perfetto is given."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import optsched
from optsched.cli import app
from optsched.judge.timeline import PHASES, Timeline
from optsched.problem.instance import Instance
from optsched.problem.schedule import from_batches
from optsched.show.perfetto import REQUESTS, trace_events, write_trace

MODEL = "llama2-7b-a100-infermax"


def seconds() -> Timeline:
    rng = np.random.default_rng(2)
    instance = Instance(
        rng.uniform(0, 0.5, 40), rng.integers(1, 60, 40), rng.integers(1, 40, 40), kv_capacity=400,
        time_unit="second", id=[f'<b>"{i}"</b>' for i in range(40)],
    )  # fmt: skip
    return optsched.timeline(instance, optsched.simulate(instance, "vllm", MODEL), MODEL)


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == kind]


def test_a_slice_for_every_span_and_batch() -> None:
    found = seconds()
    events = list(trace_events(found))
    slices = of_kind(events, "X")
    requests = [e for e in slices if e["pid"] == REQUESTS]
    assert len(requests) == len(found.span_start)
    assert len(slices) - len(requests) == len(found.batch_start)
    for event, k in zip(requests, range(len(requests)), strict=True):
        assert event["tid"] == found.span_request[k] + 1
        assert event["name"] == PHASES[found.span_phase[k]]
        assert event["ts"] == pytest.approx(1e6 * found.span_start[k], abs=1e-3)
        assert event["dur"] >= 0
    assert {"waiting", "prefill", "decode", "evicted", "refill"} <= {e["name"] for e in requests}


def test_slices_of_a_thread_never_overlap() -> None:
    threads = defaultdict(list)
    for event in of_kind(list(trace_events(seconds())), "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        for (_, end), (start, _) in pairwise(slices):
            assert start >= end - 1e-6


def test_counters_follow_the_judge_and_fall_to_nothing() -> None:
    found = seconds()
    counters = of_kind(list(trace_events(found)), "C")
    kv = [e for e in counters if e["name"] == "KV held [tokens]"]
    assert max(e["args"]["value"] for e in kv) == found.evaluation.metrics["peak_kv"]
    last = {e["name"]: e["args"]["value"] for e in counters}
    assert set(last.values()) == {0}
    assert all(one["ts"] <= other["ts"] for one, other in pairwise(kv))


def test_threads_have_the_names_of_requests() -> None:
    names = {
        event["tid"]: event["args"]["name"]
        for event in of_kind(list(trace_events(seconds())), "M")
        if (event["name"], event["pid"]) == ("thread_name", REQUESTS)
    }
    assert names[1] == '<b>"0"</b>'
    assert len(names) == 40


def test_each_worker_is_a_process_with_its_counters() -> None:
    instance = Instance([0, 0], [2, 3], [2, 1], kv_capacity=9)
    schedule = from_batches([0, 1, 2, 3], [0, 1, 0], [2, 3, 1], worker=[0, 1, 0], instance=instance)
    events = list(trace_events(optsched.timeline(instance, schedule)))
    batches = [e for e in of_kind(events, "X") if e["cat"] == "batch"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in batches] == [
        (2, 0, 1000), (3, 0, 1000), (2, 1000, 1000),  # a round is a millisecond
    ]  # fmt: skip
    assert {e["pid"] for e in of_kind(events, "C")} == {2, 3}


def test_the_file_is_json_and_may_be_compressed(tmp_path: Path) -> None:
    found = seconds()
    events = write_trace(found, tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert len(data["traceEvents"]) == events
    assert data["displayTimeUnit"] == "ms"
    assert data["otherData"]["instance_sha256"] == found.instance.sha256
    write_trace(found, tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes())) == data


def test_pauses_are_merged_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optsched.show.perfetto.MAX_SLICES", 10)
    write_trace(seconds(), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["otherData"]["pauses"] == "part of the phase around them"
    assert "paused" not in {event["name"] for event in data["traceEvents"]}


def test_the_command_line_writes_a_trace(tmp_path: Path) -> None:
    def run(*words: object) -> Any:
        return CliRunner().invoke(app, [str(word) for word in words])

    schedule, out = tmp_path / "s.json", tmp_path / "t.json"
    run("simulate", "tiny-seconds", "--policy", "vllm", "--cost-model", MODEL, "--schedule-out",
        schedule)  # fmt: skip
    # The schedule names its cost model by its digest, which is a shipped one's.
    result = run("trace", "tiny-seconds", schedule, "-o", out)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["traceEvents"]
    result = run("trace", "tiny-seconds", schedule, "-o", tmp_path / "t.txt")
    assert result.exit_code == 2
    assert "a name ending in .json or .json.gz is right" in result.output
    result = run("trace", "tiny", schedule, "-o", out)
    assert result.exit_code == 2
    assert "is another instance's; 'tiny' has" in result.output
