"""Runs of a fixed number of clients are no open traffic, and are said not to be."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run
from test_traces_layouts import lines
from trace_files import put

from optsched.files.read_write import read_instance

SAID = "clients waited for their answers"


def closed(clients: int, n: int = 60, pause: float = 0.002) -> list[tuple[float, float]]:
    """Return start and latency of requests of clients that pause for a moment between two."""
    rng, free = np.random.default_rng(1), [0.0] * clients
    found = []
    for _ in range(n):
        start = heapq.heappop(free)
        took = float(rng.uniform(0.5, 1.5))
        heapq.heappush(free, start + took + pause)
        found.append((start, took))

    return found


def open_loop(rate: float, n: int = 60) -> list[tuple[float, float]]:
    """Return Poisson arrivals, with latencies of a second on average."""
    rng = np.random.default_rng(2)
    starts = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    return list(zip(starts, rng.uniform(0.5, 1.5, n).tolist(), strict=True))


def bench(rows: list[tuple[float, float]], **more: Any) -> str:
    """Return a file of `vllm bench serve` or SGLang, of starts and latencies."""
    n = len(rows)
    lens = {"input_lens": [500] * n, "output_lens": [20] * n, "ttfts": [0.1] * n}
    starts, latencies = zip(*rows, strict=True)
    return json.dumps({**lens, "start_times": starts, "latencies": latencies, **more})


def guide(rows: list[tuple[float, float]], strategy: Any, place: str = "config") -> str:
    """Return a file of GuideLLM with this strategy, at this place of the file."""
    requests = [
        {"request_start_time": start, "request_latency": took, "prompt_tokens": 500,
         "output_tokens": 20, "time_to_first_token_ms": 100.0}
        for start, took in rows
    ]  # fmt: skip
    run = {place: {"strategy": strategy}, "requests": {"successful": requests}}
    return json.dumps({"benchmarks": [run]})


def log(rows: list[tuple[float, float]], **more: Any) -> str:
    """Return lines of JSON, one for each request."""
    tokens = {"prompt_tokens": 500, "output_tokens": 20, **more}
    return lines(*({"arrival": start, "latency": took, **tokens} for start, took in rows))


def concurrent(streams: int) -> dict[str, Any]:
    return {"type_": "concurrent", "streams": streams}


# Runs of four clients, and of open traffic of 6 requests a second.
FOUR, BUSY = closed(4), open_loop(6.0)
# The format, a file, and the number of clients that is found in it (None: open traffic).
RUNS = {
    "vLLM says so": ("vllm", bench(FOUR, max_concurrency=4), 4),
    "SGLang says so, of few requests": ("sglang", bench(FOUR[:9], max_concurrency=4), 4),
    "GuideLLM's streams": ("guidellm", guide(FOUR, concurrent(4)), 4),
    "one after the other": ("guidellm", guide(closed(1), {"type_": "synchronous"}, "args"), 1),
    "all that it can": ("guidellm", guide(FOUR, "throughput"), 4),
    "a column says so": ("jsonl", log(BUSY, concurrency=8), 8),
    "the times show it": ("jsonl", log(FOUR), 4),
    "and of one client": ("vllm", bench(closed(1)), 1),
    "and of many": ("vllm", bench(closed(32, 400)), 32),
    "open traffic": ("vllm", bench(BUSY), None),
    "open and slow": ("vllm", bench(open_loop(0.3)), None),
    "open and faster than the server": ("jsonl", log(open_loop(50.0)), None),
    "a limit that nobody meets": ("vllm", bench(BUSY, max_concurrency=50), None),
    "a rate": ("guidellm", guide(BUSY, {"type_": "poisson", "rate": 6.0}), None),
}


@pytest.mark.parametrize("kind", RUNS)
def test_import_says_that_clients_waited_and_the_instance_keeps_their_number(tmp_path, kind):
    form, text, clients = RUNS[kind]
    file, out = put(tmp_path, text, "file"), tmp_path / "o.json"
    said = run("import", form, file, "-o", out, "--strict")
    found = read_instance(out)
    assert (SAID in said, found.clients) == (clients is not None, clients)

    # A rate draws new arrivals, which wait for nobody's answer.
    drawn = run("import", form, file, "-o", out, "--rate", 5)
    assert (SAID in drawn, read_instance(out).clients) == (False, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("capacity", "--slo-latency", "9s", "--time-limit", 1, "--policy", "vllm-v1",
          "--cost-model", "llama2-7b-a100-infermax"), "and no limit of such clients"),
        (("diagnose", "--gpu", "a100-80gb", "--model", "llama2-7b"), "at these times, and not of"),
    ],
)  # fmt: skip
def test_commands_say_what_it_does_to_their_answers(
    tmp_path: Path, words: tuple[Any, ...], said: str
) -> None:
    out = tmp_path / "o.json"
    for rows, expected in ((closed(4, 20), True), (open_loop(6.0, 20), False)):
        run("import", "vllm", put(tmp_path, bench(rows)), "-o", out, "--kv-capacity", 20_000)
        assert (said in run(words[0], out, *words[1:])) == expected


def test_clients_change_no_digest(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    run("import", "vllm", put(tmp_path, bench(FOUR)), "-o", out)
    data = json.loads(out.read_text())
    assert data.pop("clients") == 4  # those of FOUR
    with_them = read_instance(out).sha256
    out.write_text(json.dumps(data))
    assert read_instance(out).sha256 == with_them
