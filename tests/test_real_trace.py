"""The main job on the real Azure conversation trace; skipped where the data is not at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import optsched

FOLDER = os.environ.get("OPTSCHED_DATA")
TRACE = Path(FOLDER or "") / "azure" / "AzureLLMInferenceTrace_conv.csv"
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(
        FOLDER is None or not TRACE.is_file(), reason="OPTSCHED_DATA does not name the Azure trace"
    ),
]
MODEL = "llama2-7b-a100-infermax"
WITH_PEAK = """
import atexit, pathlib, sys
out, status = pathlib.Path(sys.argv.pop(1)), pathlib.Path("/proc/self/status")
atexit.register(lambda: out.write_text(status.read_text()))
from optsched.cli import main
main()
"""
"""The command line, writing its own peak memory at the end (Linux): what the operating system
says of a child includes the memory of the process that started it."""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="Linux tells peak memory")
def test_the_whole_trace_is_compared_within_a_gibibyte(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "optsched"]
    trace, table = tmp_path / "trace.json", tmp_path / "table.json"
    subprocess.run([*run, "import", "azure", str(TRACE), "-o", str(trace)], check=True)
    policies = ["vllm", "sarathi", "fcfs", "mc-sf"]
    picks = [word for policy in policies for word in ("--policy", policy)]
    peak = tmp_path / "status"
    subprocess.run(
        [sys.executable, "-c", WITH_PEAK, str(peak), "compare", str(trace), "--cost-model", MODEL,
         *picks, "--json", str(table), "--time-limit", "5"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert int(peak.read_text().split("VmHWM:")[1].split()[0]) < 2**20  # KiB
    rows = {row["policy"]: row for row in json.loads(table.read_text())["policies"]}
    assert set(rows) == set(policies)
    for row in rows.values():
        # An instance without a KV capacity of its own has 100,000 tokens.
        assert row["metrics"]["peak_kv"] <= 100_000
        assert row["metrics"]["makespan"] > 3501.7  # the last request arrives then
        assert row["ratio_to_bound"] >= 1
    # Looking ahead and shortest first, MC-SF waits least; prefill first, vLLM waits most.
    order = sorted(policies, key=lambda name: rows[name]["metrics"]["tel"])
    assert order[0] == "mc-sf"
    assert order[-1] == "vllm"


def test_a_slice_in_rounds_is_solved_to_a_proved_optimum_that_memory_binds() -> None:
    slice_ = optsched.read_trace(
        "azure", TRACE, offset=100, limit=10, round_seconds=0.05, kv_capacity=2500
    )
    assert slice_.n == 10
    result = optsched.solve(slice_, time_limit_s=60)
    assert result.status == "optimal"
    assert result.value == result.bound
    assert result.value > slice_.output_tokens.sum()  # someone has to wait for KV
    again = optsched.evaluate(slice_, result.schedule)
    assert again.metrics["tel"] == result.value
    mc_sf = optsched.run(slice_, "mc-sf").evaluation
    assert mc_sf.metrics["tel"] >= result.value
