"""Traces: the formats that are tables, each with a small file of its own and its traps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from trace_files import put, read, refused, skipped

FIRST, SECOND = 1_700_000_000_000_000_000, 1_700_000_000_500_000_000  # ns, half a second apart


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def metric(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit}


def aiperf(start: int, error: Any = None, **metrics: Any) -> dict[str, Any]:
    return {
        "metadata": {"request_start_ns": start, "was_cancelled": error is not None},
        "metrics": metrics,
        "error": error,
    }


# The two requests of the test below and one that failed, as each format has them.
AIPERF = lines(
    aiperf(
        FIRST,
        input_sequence_length=metric(550, "tokens"),
        output_sequence_length=metric(9, "tokens"),
        time_to_first_token=metric(0.2, "s"),
        request_latency=metric(297.5, "ms"),
    ),
    aiperf(SECOND, {"code": 499}, error_isl=metric(550, "tokens")),
    aiperf(
        SECOND,
        input_sequence_length=metric(140, "tokens"),
        output_sequence_length=metric(15, "tokens"),
        time_to_first_token=metric(250, "ms"),
        request_latency=metric(900, "ms"),
    ),
)
PERF = [
    {
        "start_time": 1000.5,
        "end_time": 1002.0,
        "error": None,
        "info": {"input_tokens": 550, "output_tokens": 9, "output_token_times": [1000.7, 1002.0]},
    },
    {
        "start_time": 1000.9,
        "end_time": 1001.0,
        "error": {"error_type": "ClientError"},
        "info": {"input_tokens": 50, "output_tokens": 0, "output_token_times": []},
    },
    {
        "start_time": 1001.0,
        "end_time": 1003.0,
        "error": None,
        "info": {
            "request_metrics": {"text": {"input_tokens": 140}},
            "response_metrics": {
                "output_tokens": 14,
                "output_token_times": [1001.25, 1003.0],
                "server_usage": {"completion_tokens": 15},
            },
        },
    },
]
GUIDE = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {
                        "request_start_time": 5.0,
                        "prompt_tokens": 550,
                        "output_tokens": 9,
                        "time_to_first_token_ms": 200.0,
                        "request_latency": 1.5,
                    },
                    {
                        "start_time": 5.5,
                        "prompt_tokens": 140,
                        "output_tokens": 15,
                        "time_to_first_token_ms": 250.0,
                        "request_latency": 2.0,
                    },
                ],
                "errored": [
                    {"request_start_time": 5.2, "prompt_tokens": 40, "output_tokens": None}
                ],
            }
        }
    ]
}
SPEND = """startTime,endTime,completionStartTime,prompt_tokens,completion_tokens,status
2026-06-01T10:00:00.5Z,2026-06-01T10:00:02Z,2026-06-01T10:00:00.7Z,550,9,success
2026-06-01T10:00:00.6Z,2026-06-01T10:00:00.7Z,,0,0,failure
2026-06-01 10:00:01+00:00,2026-06-01 10:00:03+00:00,2026-06-01 10:00:01.25+00:00,140,15,success
"""
BLIS = """status,send_time_us,first_chunk_time_us,last_chunk_time_us,input_tokens,output_tokens
ok,1771000000500000,1771000000700000,1771000002000000,550,9
timeout,1771000000600000,0,0,80,0
ok,1771000001000000,1771000001250000,1771000003000000,140,15
"""
LLMSERVINGSIM = lines(
    {
        "queued_ts": 10.5,
        "first_token_ts": 10.7,
        "last_token_ts": 12.0,
        "input_toks": 550,
        "output_toks": 9,
    },
    {"queued_ts": 10.6, "input_toks": 0, "output_toks": 0, "first_token_ts": 0, "last_token_ts": 0},
    {
        "queued_ts": 11.0,
        "first_token_ts": 11.25,
        "last_token_ts": 13.0,
        "input_toks": 140,
        "output_toks": 15,
    },
)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("aiperf", AIPERF),
        ("inference-perf", json.dumps(PERF)),
        ("guidellm", json.dumps(GUIDE)),
        ("litellm", SPEND),
        ("blis", BLIS),
        ("llmservingsim", LLMSERVINGSIM),
    ],
)
def test_a_log_of_a_server_has_arrivals_tokens_and_measured_times(tmp_path, format, text):
    # Each has the same two requests, half a second apart, of 550 + 9 and 140 + 15 tokens, and one
    # that failed between them. Times to the first token are 0.2 and 0.25 s; AIPERF's rows have
    # latencies of their own.
    arrival, prompt, output, report = read(format, put(tmp_path, text, "log"))
    assert (arrival, prompt, output) == ([0, 0.5], [550, 140], [9, 15])
    assert (report.dropped, report.unreadable) == (1, 0)
    latency = [0.2975, 0.9] if format == "aiperf" else [1.5, 2]
    assert report.measured.ttft.tolist() == pytest.approx([0.2, 0.25], abs=1e-12)
    assert report.measured.latency.tolist() == pytest.approx(latency, abs=1e-12)


def body(created: int, prompt: int, output: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"status_code": 200, "body": {"created": created, "usage": usage}}


BATCH = lines(
    {"custom_id": "a", "response": body(1_700_000_000, 6, 5), "error": None},
    {"custom_id": "b", "response": None, "error": {"code": "batch_expired"}},
    {"custom_id": "c", "response": {"status_code": 400, "body": {"error": {}}}, "error": None},
    {"custom_id": "d", "response": body(1_700_000_002, 7, 4), "error": None},
)


@pytest.mark.parametrize(
    ("format", "text", "dropped"),
    [
        ("openai-batch", BATCH, 2),
        (
            "bailian",
            lines(
                {"timestamp": 61.0, "input_length": 6, "output_length": 5, "chat_id": 1},
                {"timestamp": 63.0, "input_length": 7, "output_length": 4},
            ),
            0,
        ),
        ("servegen", "request_id,timestamp,input_tokens,output_tokens\n0,1.5,6,5\n1,3.5,7,4\n", 0),
        (
            "servegen",
            lines(
                {"timestamp": 1.5, "input_length": 6, "output_length": 5},
                {"timestamp": 3.5, "input_length": 7, "output_length": 4},
            ),
            0,
        ),
        (
            "llmservingsim-workload",
            lines(
                {"input_toks": 6, "output_toks": 5, "arrival_time_ns": 40_000_000},
                {"session_id": 1, "arrival_time_ns": 50_000_000, "sub_requests": []},
                {"input_toks": 7, "output_toks": 4, "arrival_time_ns": 2_040_000_000},
            ),
            1,
        ),
    ],
)
def test_a_workload_has_arrivals_and_tokens(tmp_path, format, text, dropped):
    arrival, prompt, output, report = read(format, put(tmp_path, text, "log"))
    assert (arrival, prompt, output) == ([0, 2], [6, 7], [5, 4])
    assert (report.dropped, report.measured) == (dropped, None)


def test_offline_workloads_have_no_arrivals(tmp_path):
    text = lines({"input_length": 6, "output_length": 5, "duration": 380})
    *_, report = read("servegen", put(tmp_path, text))
    assert report.arrivals is False
    assert report.notes[0].startswith("the trace has no arrivals")


def test_dates_and_numbers_are_both_in_the_logs_of_litellm(tmp_path):
    rows = [
        {
            "startTime": 1.5,
            "endTime": 2.5,
            "prompt_tokens": 6,
            "completion_tokens": 5,
            "status": "success",
        },
    ]
    report = read("litellm", put(tmp_path, json.dumps(rows)), unit="s")[3]
    assert report.measured.latency.tolist() == [1]
    assert report.measured.ttft is None  # no completionStartTime


@pytest.mark.parametrize("tail", ['{"timestamp": 9000, "inp', "junk", '{"timestamp": NaN}'])
def test_a_bad_line_of_json_costs_its_row_alone(tmp_path, tail):
    rows = [{"timestamp": 1000 * k, "input_length": 6 + k, "output_length": 5} for k in range(3)]
    good = lines(*rows).splitlines()
    for at in range(4):
        text = "\n".join([*good[:at], tail, *good[at:]])
        skipped(f"line {at + 1}: ", "mooncake", put(tmp_path, text))
        assert read("mooncake", tmp_path / "trace.csv")[1] == [6, 7, 8]
    # In a list only what stands before is kept.
    text = "[" + ",\n".join([*good[:2], '{"timestamp": 9000, "inp'])
    skipped("line 3: not JSON: the file is cut short", "mooncake", put(tmp_path, text))
    assert read("mooncake", tmp_path / "trace.csv")[1] == [6, 7]


def test_what_no_server_answered_is_left_out(tmp_path):
    # A warm-up (beside the failure that AIPERF has), and an answer from a cache.
    warm = aiperf(
        FIRST,
        input_sequence_length=metric(550, "tokens"),
        output_sequence_length=metric(9, "tokens"),
    )
    warm["metadata"]["benchmark_phase"] = "warmup"
    day = "2026-06-01 10:00:0"
    head = "startTime,endTime,prompt_tokens,completion_tokens,status,cache_hit\n"
    cached = f"{day}1,{day}2,6,5,success,True\n{day}3,{day}4,7,5,success,False\n"
    for format, text, failed in (
        ("aiperf", lines(warm) + AIPERF, 2),
        ("litellm", head + cached, 1),
    ):
        assert read(format, put(tmp_path, text, "log"))[3].failed == failed


def test_a_benchmark_may_stand_alone_and_another_document_is_named(tmp_path):
    file = put(tmp_path, json.dumps(GUIDE["benchmarks"][0]), "b.json")
    assert read("guidellm", file)[1] == [550, 140]
    file = put(tmp_path, json.dumps({"results": []}), "b.json")
    refused("line 1: expected the field prompt_tokens; found results", "guidellm", file)
