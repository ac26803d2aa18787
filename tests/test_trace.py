"""Chrome trace events: what Perfetto is given."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from instances import MODEL, in_seconds, two_workers
from optsched.judge.timeline import PHASES, Timeline
from optsched.show.perfetto import REQUESTS, trace_events, write_trace


def seconds() -> Timeline:
    """Return a timeline of 40 requests within half a second, with KV for 400 tokens: many are
    evicted."""
    return in_seconds("vllm", 40, 400, span=0.5, most=(60, 40))


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return events of one kind: X is a slice, C a counter, M a name."""
    return [event for event in events if event["ph"] == kind]


def test_a_slice_for_every_span_and_batch() -> None:
    """`seconds` has too little KV, so that every phase is there."""
    found = seconds()
    events = list(trace_events(found))
    slices = of_kind(events, "X")
    requests = [e for e in slices if e["pid"] == REQUESTS]
    assert len(requests) == len(found.span_start)
    assert len(slices) - len(requests) == len(found.batch_start)
    for event, k in zip(requests, range(len(requests)), strict=True):
        assert event["tid"] == found.span_request[k] + 1
        assert event["name"] == PHASES[found.span_phase[k]]
        assert event["ts"] == pytest.approx(1e6 * found.span_start[k], abs=1e-3)  # microseconds
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
    # Threads count from 1, and requests of `in_seconds` have such names.
    assert names[1] == '<b>"0"</b>'
    # `seconds` has 40 requests.
    assert len(names) == 40


def test_each_worker_is_a_process_with_its_counters() -> None:
    events = list(trace_events(two_workers()))
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
    """Ten slices are far fewer than the schedule has."""
    monkeypatch.setattr("optsched.show.perfetto.MAX_SLICES", 10)
    write_trace(seconds(), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data["otherData"]["pauses"] == "part of the phase around them"
    assert "paused" not in {event["name"] for event in data["traceEvents"]}


def test_the_command_line_writes_a_trace(tmp_path: Path) -> None:
    schedule, out = tmp_path / "s.json", tmp_path / "t.json"
    run("simulate", "tiny-seconds", "--policy", "vllm", "--cost-model", MODEL, "--schedule-out",
        schedule)  # fmt: skip
    # The schedule names its cost model by its digest, which is a shipped one's.
    run("plot", schedule, "--instance", "tiny-seconds", "-o", out)
    assert json.loads(out.read_text())["traceEvents"]
    text = run("plot", schedule, "--instance", "tiny-seconds", "-o", tmp_path / "t.txt", status=2)
    assert "t.txt" in text
    text = run("plot", schedule, "--instance", "tiny", "-o", out, status=2)
    assert "the instance that" in text
