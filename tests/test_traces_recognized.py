"""`diagnose` finds out which format a file is in, or asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error, run
from test_traces_layouts import AIPERF, BATCH, BLIS, GUIDE, LLMSERVINGSIM, PERF, SPEND, lines
from trace_files import OLD, put

from optsched.problem.errors import InputError
from optsched.workloads.traces import read_trace_report, trace_formats
from optsched.workloads.traces.recognized import recognize

DATA = os.environ.get("OPTSCHED_DATA")
LENGTHS = {"input_length": 600, "output_length": 9}
TALK = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]
SPOKEN = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
RUN = {
    "input_lens": [100, 200], "output_lens": [3, 4], "start_times": [10.0, 10.5],
    "ttfts": [0.2, 0.3], "latencies": [1.5, 2.0],
}  # fmt: skip
AGENT = {"arrival_time_ns": 0, "sub_requests": [
    {"input_toks": 9, "output_toks": 5}, {"input_toks": 20, "output_toks": 5}]}  # fmt: skip
CALL = {"t": 0.0, "in": 128, "out": 9, "hash_ids": [1, 2], "api_time": 1.0}
TURN = {"conversation_id": "a", "start_time_ms": 5000.0, "input_num_tokens": 100,
        "output_num_tokens": 10, "ttft_ms": 40.0, "latency_ms": 130.0}  # fmt: skip
# A small file of every format.
FILES = {
    "aiperf": AIPERF,
    "api-log": lines({"created": 1700000000, "usage": {"prompt_tokens": 6, "completion_tokens": 5},
                      "duration_ms": 400.0}),
    "azure": OLD,
    "bailian": lines(*({"chat_id": k, "parent_chat_id": -1, "timestamp": 60.0 * k, **LENGTHS,
                        "hash_ids": [k]} for k in range(3))),
    "blis": BLIS,
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens\n5,m,10,5\n50,m,20,6\n",
    "csv": "arrival,prompt_tokens,output_tokens\n1.5,6,5\n3.5,7,4\n",
    "guidellm": json.dumps(GUIDE),
    "inference-perf": json.dumps(PERF),
    "jsonl": lines({"arrival": 1.5, "prompt_tokens": 6, "output_tokens": 5, "latency": 0.4}),
    "litellm": SPEND,
    "llmservingsim": LLMSERVINGSIM,
    "llmservingsim-workload": lines(*({"input_toks": 6, "output_toks": 5, "arrival_time_ns": t}
                                      for t in (4 * 10**7, 2 * 10**9))),
    "lmsys": json.dumps([{"conversation": SPOKEN}]),
    "mooncake": lines(*({"timestamp": 3000 * k, **LENGTHS, "hash_ids": [k]} for k in range(3))),
    "openai-batch": BATCH,
    "servegen": "request_id,timestamp,input_tokens,output_tokens\n0,1.5,6,5\n1,3.5,7,4\n",
    "sglang": json.dumps({"backend": "sglang", **RUN}),
    "sharegpt": json.dumps([{"conversations": TALK}]),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0,374,44\n2,396,109\n",
    "vllm": json.dumps({"backend": "openai", **RUN}),
    "vllm-multi-turn": json.dumps([TURN]),
    "weka": json.dumps([{"block_size": 64, "requests": [CALL]}]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(trace_formats()))
def test_a_file_of_each_format_is_taken_for_what_it_is(tmp_path, name):
    assert recognize(put(tmp_path, FILES[name], "file")) == name


@pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of public traces")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("azure/AzureLLMInferenceTrace_code.csv", "azure"),
        ("azure/AzureLLMInferenceTrace_conv.csv", "azure"),
        ("llmservingsim/rtx4090-llama-3.1-8b/requests.jsonl", "llmservingsim"),
        ("llmservingsim/rtxpro6000-llama-3.1-8b/requests.jsonl", "llmservingsim"),
        ("mooncake/conversation_trace.jsonl.gz", "mooncake"),
        ("mooncake/conversation_trace_head2000.jsonl", "mooncake"),
        ("weka/sessions_up_to_100k.jsonl.gz", "weka"),
        ("llmservingsim/rtx4090-llama-3.1-8b/timeseries.csv", None),
        ("llmservingsim/rtx4090-llama-3.1-8b/profile/skew.csv", None),
        ("splitwise/perf_model.csv", None),
        ("vidur-a100/Llama-2-7b-hf/attention_sample.csv", None),
    ],
)
def test_public_files_are_taken_for_what_they_are(file: str, name: str | None) -> None:
    """A file, and its format: None for tables that are no traces."""
    path = Path(str(DATA)) / file
    if name is None:
        with pytest.raises(InputError, match="found no format that it is in"):
            recognize(path)
    else:
        assert recognize(path) == name


GPU = ("--gpu", "h100-80gb", "--model", "llama3-8b")
BARE = [{"timestamp": 3000 * k, **LENGTHS} for k in range(3)]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (BARE, "mooncake or servegen"),  # milliseconds or seconds
        ([{**one, "request_id": k} for k, one in enumerate(BARE)], "mooncake or servegen"),
        ([{"request_start_time": 5.0, "prompt_tokens": 5, "output_tokens": 9}], "guidellm"),
        ([{"start": 5.0, "prompt_tokens": 5, "output_tokens": 9}], "jsonl"),  # whose arrivals?
    ],
)
def test_a_file_that_may_be_in_several_formats_is_asked_about(
    tmp_path: Path, rows: Any, names: str
) -> None:
    file = put(tmp_path, lines(*rows), "requests.jsonl")
    error = one_line_error(invoke("diagnose", file, *GPU))
    assert names in error
    assert "expected --format NAME" in error


def test_the_format_that_is_named_or_found_is_said(tmp_path: Path) -> None:
    file = put(tmp_path, lines(*BARE), "requests.jsonl")
    assert "taken as mooncake, 3 requests" in run("diagnose", file, *GPU, "--format", "mooncake")
    file = put(tmp_path, FILES["mooncake"], "own.jsonl")
    assert "taken as mooncake, 3 requests" in run("diagnose", file, *GPU)


@pytest.mark.parametrize("backend", ["vllm", "sglang-oai", "openai"])
def test_measured_times_are_not_dropped_where_a_run_has_no_arrivals(
    tmp_path: Path, backend: str
) -> None:
    without = {key: value for key, value in RUN.items() if key != "start_times"}
    file = put(tmp_path, json.dumps({"backend": backend, "request_rate": 4.0, **without}), "b.json")
    error = one_line_error(invoke("diagnose", file, *GPU))
    assert "found latencies, but no arrivals" in error
    assert "import " in error


START, TOOK = 1_700_000_000, {"ttft_ms": 250.0, "latency_ms": 1250.0}
USED = {"prompt_tokens": 100, "completion_tokens": 50}


@pytest.mark.parametrize(
    "rows",
    [
        [{"timestamp": START + k / 2, **USED, **TOOK} for k in range(3)],
        [
            {"created": START + k / 2, "usage": USED, "ttft": 0.25, "duration": 1.25}
            for k in range(3)
        ],
        [{"timestamp_ms": 1000 * START + 500 * k, **USED, **TOOK} for k in range(3)],
        [{"timestamp": 1000 * START + 500 * k, **USED, **TOOK} for k in range(3)],
        [{"request_time": f"2026-09-01T10:00:0{k / 2}Z", **USED, **TOOK} for k in range(3)],
    ],
)
def test_logs_with_the_names_of_openai_say_the_units_of_their_times(
    tmp_path: Path, rows: Any
) -> None:
    """The same three requests, half a second apart, each with 0.25 s to its first token and 1.25
    s in all."""
    names = rows[0].keys()
    table = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    texts = [lines(*rows), *([] if "usage" in names else ["\n".join(table)])]
    for text in texts:
        file = put(tmp_path, text, "log")
        assert recognize(file) == "api-log"
        instance, report = read_trace_report("api-log", file, kv_capacity=1000)
        assert instance.release.tolist() == [0, 0.5, 1.0]
        assert report.measured is not None
        assert report.measured.ttft is not None
        assert report.measured.latency.tolist() == [1.25] * 3
        assert report.measured.ttft.tolist() == [0.25] * 3


DETAIL = {"model_id": "meta-llama/Llama-3.1-8B", "request_rate": 4.0, "num_prompts": 2,
          "max_concurrency": None, "completed": 2}  # fmt: skip
WHOLE = json.dumps({"backend": "vllm", **DETAIL, **RUN})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"backend": "vllm", **DETAIL}), "with --save-result and --save-detailed"),
        (WHOLE[:-9], "the file is cut short"),
        (WHOLE + "\n" + WHOLE, "found 2 runs; expected one; run=N (--run N) picks it"),
        (
            WHOLE.replace("Llama-3.1-8B", "Llama-2-7b-hf"),
            "found meta-llama/Llama-2-7b-hf; expected",
        ),
    ],
)
def test_a_benchmark_that_cannot_be_used_says_why_as_import_does(
    tmp_path: Path, text: str, words: str
) -> None:
    assert words in one_line_error(invoke("diagnose", put(tmp_path, text, "run.json"), *GPU))


def test_a_long_benchmark_is_recognized_by_the_beginnings_of_its_lists(tmp_path: Path) -> None:
    n = 60_000  # 1.4 MB, so that only its beginning is looked at
    one = {"backend": "vllm", "num_prompts": n, "completed": n, "request_rate": 2.0,
           "input_lens": [9] * n, "output_lens": [2] * n, "ttfts": [0.5] * n,
           "itls": [[0.25]] * n, "start_times": [*map(float, range(n))]}  # fmt: skip
    for indent in (None, 1):
        (tmp_path / "long.json").write_text(json.dumps(one, indent=indent))
        assert recognize(tmp_path / "long.json") == "vllm"
    (tmp_path / "two.json").write_text("\n".join([json.dumps(one), json.dumps(one)]))
    assert recognize(tmp_path / "two.json", run=2) == "vllm"


def test_a_run_of_several_can_be_picked(tmp_path: Path) -> None:
    file = put(tmp_path, WHOLE + "\n" + WHOLE.replace("1.5,", "1.25,"), "run.json")
    error = invoke("diagnose", file, *GPU, "--run", 3).stderr
    assert "found 3; expected a run of the 2" in error
    said = run("diagnose", file, *GPU, "--run", 2, "--max-num-seqs", 4, status=2)
    assert "taken as vllm, 2 requests" in said
