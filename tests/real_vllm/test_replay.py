"""A replay on vLLM in a process of its own: every request is served as the instance says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from real_scheduler import LLAMA

import optsched
from optsched.costs.profiles import read_profile

SETTINGS = ("dtype=float32", "enforce_eager=true", "max_model_len=512", "block_size=32",
            "num_gpu_blocks_override=40", "max_num_seqs=8")  # fmt: skip


def run(folder: Path, *words: str, code: str | None = None) -> str:
    """Run a command there as a process of its own, and return what it prints."""
    start = ["-m", "optsched"] if code is None else ["-c", code]
    done = subprocess.run(
        [sys.executable, *start, *words],
        cwd=folder,
        env=os.environ,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_requests_are_served_with_their_lengths_and_too_long_ones_are_told(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(20, 150, 12), rng.integers(2, 20, 12)
    prompt[5] = 600  # beyond the model's context
    instance = optsched.Instance(
        np.arange(12) * 0.02, prompt, output, kv_capacity=2000, time_unit="second"
    )
    optsched.write_instance(instance, tmp_path / "i.json")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))
    words = [
        "gpu",
        "replay",
        "i.json",
        "--server",
        f"vllm:{tmp_path}",
        "-o",
        "m.json",
        "--vocabulary",
    ]
    words += ["200", *(word for setting in SETTINGS for word in ("--vllm", setting))]
    run(tmp_path, *words)
    found = optsched.read_measured(tmp_path / "m.json")
    assert found.instance_sha256 == instance.sha256
    assert list(found.errors) == [5]
    assert found.errors[5].startswith("refused: ")
    served = np.arange(12) != 5
    assert (found.latency[served] >= found.ttft[served]).all()
    assert (found.ttft[served] > 0).all()


COUNTING = """
import atexit
from vllm.v1.engine.llm_engine import LLMEngine
from optsched.cli import main

step, counted = LLMEngine.step, {}

def noting(engine):
    found = step(engine)
    counted.update((f.request_id, f.num_cached_tokens) for f in found)
    return found

LLMEngine.step = noting
atexit.register(lambda: print("CACHED", *(counted[str(i)] for i in range(6))))
main()
"""
"""The command line, which prints at its end how many prompt tokens vLLM took from its cache."""


def test_calls_of_sessions_find_what_was_said_before_them(tmp_path: Path) -> None:
    # Two sessions of three calls, whose prompts repeat all before; blocks of 32 tokens.
    prompt, output = [300, 340, 380, 310, 350, 390], [9, 6, 3, 5, 8, 2]
    shared = [0, 309, 346, 0, 315, 358]
    before = [None, 0, 1, None, 3, 4]
    columns = {"prefix_parent": before, "prefix_tokens": shared, "prefix_block_tokens": 32}
    instance = optsched.Instance(
        [0, None, None, 0.1, None, None], prompt, output, 1280, "second", after=before,
        delay=[None, 0.2, 0.1, None, 0, 0.3], kv_block_tokens=32, **columns,
    )  # fmt: skip
    optsched.write_instance(instance, tmp_path / "i.json")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))

    for cached in ("false", "true"):
        words = ["gpu", "replay", "i.json", "--server", f"vllm:{tmp_path}", "-o", "m.json"]
        words += ["--vocabulary", "900", "--vllm", f"enable_prefix_caching={cached}"]
        words += [word for setting in SETTINGS for word in ("--vllm", setting)]
        (shown,) = [x for x in run(tmp_path, *words, code=COUNTING).splitlines() if "CACHED" in x]
        optsched.read_measured(tmp_path / "m.json").check(instance)

        # Whole blocks of the last call's prompt and answer. Of an answer the last token is in no
        # cache, since nobody computed it: 308 // 32 = 9 blocks, 345 // 32 = 10, 314 // 32 = 9 and
        # 357 // 32 = 11.
        found = [0, 9 * 32, 10 * 32, 0, 9 * 32, 11 * 32] if cached == "true" else [0] * 6
        assert [int(x) for x in shown.split()[1:]] == found


def test_a_profile_goes_on_where_it_stopped_and_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))
    words = ["gpu", "profile", "vllm", ".", "-o", "p", "--max-tokens", "64", "--max-requests", "4"]
    words += ["--max-kv", "512", "--runs", "2"]
    words += [word for setting in SETTINGS[:2] for word in ("--vllm", setting)]
    for seen in ("", "again"):
        shown = run(tmp_path, *words, "--vllm", "block_size=32")
        rows = (tmp_path / "p" / "steps.csv").read_text().splitlines()
        assert f"p: {len(rows) - 1} of {len(rows) - 1} batches measured" in shown, seen
    (table,) = read_profile(tmp_path / "p", hardware="cpu").tables
    assert len(table.measured_ms) == len(rows) - 1
    assert set(table.operator.tolist()) == {"prefill", "decode", "both"}
