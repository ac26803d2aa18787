"""Measured runs of vLLM: the files of LLMServingSim, the twin beside them, and the bound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from optsched_studies import vllm_measured
from test_table import write_profile
from trace_files import put, read

from optsched import Instance, Limits, Problem, evaluate, run
from optsched.experiments.runner import run_experiment
from optsched.optimize.search.offline import improve
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError
from optsched.problem.schedule import from_batches, in_parts

DATA = os.environ.get("OPTSCHED_DATA")
real = pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of measured runs")

TIMES = [(1.0, 1.5, 3.5), (2.0, 2.25, 2.75), (2.0, 3.0, 3.0)]
"""Queued, first token, last token."""
# Prompt and output tokens of the three requests.
TOKENS = [(100, 5), (300, 3), (40, 1)]


def lines() -> str:
    """Return the requests as LLMServingSim writes them."""
    return "".join(
        json.dumps({"request_id": f"r{k}", "input_toks": s, "output_toks": o, "queued_ts": q,
                    "arrival_time": 1e9, "scheduled_ts": q, "first_token_ts": f,
                    "last_token_ts": e}) + "\n"
        for k, ((q, f, e), (s, o)) in enumerate(zip(TIMES, TOKENS, strict=True))
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one run: profile, requests, two seats, 256 tokens a batch, 64 blocks
    of 16."""
    run = write_profile(tmp_path / "rtx4090-small")
    (run / "requests.jsonl").write_text(lines(), encoding="utf-8")
    meta = {"engine_kwargs": {"max_num_seqs": 2, "max_num_batched_tokens": 256},
            "kv_cache": {"block_size": 16, "num_kv_tokens": 1024}}  # fmt: skip
    (run / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return tmp_path


def test_times_count_from_when_a_request_was_queued(tmp_path: Path) -> None:
    arrival, prompt, output, report = read("llmservingsim", put(tmp_path, lines()))
    # `TIMES` has them queued at 1, 2 and 2 s; tokens are those of `TOKENS`.
    assert (arrival, prompt, output) == ([0.0, 1.0, 1.0], [100, 300, 40], [5, 3, 1])
    # TTFT and latency of `TIMES`: 1.5 - 1 and 3.5 - 1, then 0.25 and 0.75, and 1 and 1.
    assert report.measured is not None
    assert report.measured.ttft.tolist() == [0.5, 0.25, 1.0]
    assert report.measured.latency.tolist() == [2.5, 0.75, 1.0]


def test_the_table_of_a_run(folder: Path) -> None:
    outcome = run_experiment(
        "vllm-measured",
        {"folder": str(folder), "runs": "rtx4090-small", "policies": "least-work",
         "search_s": "0.1", "bound_s": "0.1"},
    )  # fmt: skip
    rows = {row["scheduler"]: row for row in outcome.rows}
    assert not any(row["error"] for row in rows.values())
    # (2.5 + 0.75 + 1) / 3; times per token of the two with more than one: 2 / 4 and 0.5 / 2.
    assert rows["measured"]["mean_latency"] == pytest.approx(4.25 / 3)
    assert rows["measured"]["mean_tpot"] == pytest.approx(0.375)
    assert rows["measured"]["makespan"] == pytest.approx(2.5)
    # 1,024 tokens are 64 blocks, of which vLLM keeps one: 63 times 16 tokens.
    instance, _, cost = vllm_measured.run_of(str(folder), "rtx4090-small")
    assert (instance.kv_capacity, instance.kv_block_tokens) == (1008, 16)
    twin = run(Problem(instance, cost), "vllm-v1").evaluation
    assert rows["vllm-v1"]["mean_latency"] == pytest.approx(twin.metrics["mean_latency"])
    known = [rows[name]["mean_latency"] for name in ("vllm-v1", "least-work", "search")]
    assert rows["bound"]["mean_latency"] <= min(known)
    ratio = rows["measured"]["mean_latency"] / rows["bound"]["mean_latency"]
    assert ratio in [claim.ours for claim in outcome.claims]


@pytest.mark.parametrize("policy", ["fcfs", "mc-sf", "least-work", "sarathi", "vllm-v1"])
def test_every_schedule_keeps_within_the_tokens_of_the_engine(folder: Path, policy: str) -> None:
    # A prompt has 300 tokens and the engine takes 256 in a batch. The judge refuses what has more.
    instance, _, cost = vllm_measured.run_of(str(folder), "rtx4090-small")
    assert instance.limits.max_batch_tokens == 256
    schedule = vllm_measured._scheduled(instance, policy, cost, 0)
    found = evaluate(Problem(instance, cost), schedule)
    assert found.split_prefill
    searched, _ = improve(Problem(instance, cost), Budget(1.0))
    best = evaluate(Problem(instance, cost), searched).metrics["mean_latency"]
    assert best <= found.metrics["mean_latency"] * (1 + 1e-9)


def test_batches_in_parts_have_decodes_first_and_hold_the_same_in_the_end() -> None:
    # 1 + 6 tokens, the single one being a decode, and then 2 + 5, with at most 4 in a batch.
    limits = Limits(max_batch_tokens=4)
    instance = Instance([0, 0, 0], [2, 6, 5], [3, 1, 1], kv_capacity=20, limits=limits)
    whole = from_batches(
        [0, 1, 3, 5],
        [0, 1, 0, 0, 2],
        [2, 6, 1, 1, 5],
        instance=instance,
        evicted_offsets=[0, 0, 0, 0],
        evicted=[],
        worker=[0, 0, 0],
    )
    parts = in_parts(whole, instance)
    assert parts.batch_offsets is not None
    assert parts.batch_offsets.tolist() == [0, 1, 3, 4, 6, 7]
    assert parts.request.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert parts.tokens.tolist() == [2, 1, 3, 3, 1, 3, 2]
    evaluate(instance, parts)
    assert in_parts(parts, instance).tokens.tolist() == parts.tokens.tolist()


def test_the_bound_is_below_a_run_that_finds_nothing_in_a_cache(folder: Path) -> None:
    instance, _, cost = vllm_measured.run_of(str(folder), "rtx4090-small")
    bound, _ = vllm_measured._bound(instance, cost, 0.0)
    best = run(Problem(instance, cost), "vllm-v1").evaluation
    assert bound is not None
    assert 0 < bound <= best.metrics["mean_latency"]


def test_a_run_that_is_not_there_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"meta\.json.*file"):
        vllm_measured.run_of(str(tmp_path), "rtx4090-none")
    monkeypatch.delenv("OPTSCHED_DATA", raising=False)
    with pytest.raises(InputError, match="OPTSCHED_DATA"):
        vllm_measured.run_of("", "rtx4090-none")


@real
@pytest.mark.parametrize(
    ("name", "within"), [("rtx4090-llama-3.1-8b", 0.06), ("rtxpro6000-llama-3.1-8b", 0.05)]
)
def test_the_twin_is_near_the_measured_runs(name: str, within: float) -> None:
    # The RTX 4090 preempts often, and vLLM's prefix cache, which the twin lacks, helped it there.
    instance, times, cost = vllm_measured.run_of("", name)
    found = run(Problem(instance, cost), "vllm-v1").evaluation
    real_times = vllm_measured.of_measured(instance, times)
    for metric in ("mean_latency", "mean_ttft", "mean_tpot"):
        assert found.metrics[metric] == pytest.approx(real_times[metric], rel=within), metric
