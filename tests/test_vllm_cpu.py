"""The experiment that runs vLLM on this machine; a simulation with noise stands for vLLM."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optsched_studies import vllm_cpu
from test_profile import write

from optsched import Measured, evaluate, read_instance, simulate, write_measured
from optsched.costs.fit import fit
from optsched.engines.profiling import shapes
from optsched.experiments.runner import run_experiment

SETTINGS = {"requests": "60", "loads": "1,3", "repetitions": "2", "search_s": "0.1",
            "bound_s": "0.1"}  # fmt: skip


class Machine:
    """What the commands would do: batches take as long as the profile says, but for 2 %."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, *words: Any) -> None:
        texts = [str(word) for word in words]
        self.calls.append(texts)
        given = [value for flag, value in pairwise(texts) if flag == "-o"]
        options = dict(v.split("=", 1) for flag, v in pairwise(texts) if flag == "--set")
        if texts[0] == "profile":
            out = Path(given[0])
            out.parent.mkdir(parents=True, exist_ok=True)
            write(out, shapes(512, 16, 1024))
            return
        files = texts[1 : texts.index("-o")]
        policy = "vllm-v1"
        if "additional_config" in options:
            policy = json.loads(options["additional_config"])["optsched"]["policy"]
        elif options.get("scheduling_policy") == '"priority"':
            policy += ":policy=priority,priority=" + texts[texts.index("--priority") + 1]
        cost = fit(Path(files[0]).parent / "profiles" / "0", hardware="cpu").cost_model
        noise = np.random.default_rng(len(self.calls)).uniform(0.98, 1.02)
        for file, out in zip(files, given, strict=True):
            instance = read_instance(file)
            found = evaluate(instance, simulate(instance, policy, cost), cost)
            latency, ttft = noise * found.latency, noise * found.ttft
            write_measured(Measured(latency, ttft, "vllm", instance.sha256), out)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(vllm_cpu, "_optsched", made)
    return made


def test_the_runs_of_every_scheduler_stand_beside_what_is_computed(
    machine: Machine, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    settings = {**SETTINGS, "folder": str(folder)}
    outcome = run_experiment("vllm-cpu", settings)
    assert not any(row["error"] for row in outcome.rows)
    # Two repetitions of three schedulers at two loads, and five computed rows at each load.
    assert len(outcome.rows) == 2 * 3 * 2 + 5 * 2
    # In each repetition a profile, and then one start of vLLM for each scheduler.
    assert [call[0] for call in machine.calls] == ["profile", *["replay"] * 3] * 2
    claims = {claim.what: claim for claim in outcome.claims}
    for scheduler in vllm_cpu.SCHEDULERS:
        near = claims[f"load 3: mean_latency of {scheduler}: twin over measured"]
        assert near.ours == pytest.approx(1, abs=0.02)
        assert near.holds is True
    rows = {row["scheduler"]: row for row in outcome.rows if row["source"] == "model"}
    ratio = rows["priority"]["mean_latency"] / rows["fcfs"]["mean_latency"]
    assert claims["load 3: mean latency of priority over fcfs, predicted"].ours == ratio
    assert ratio < 0.95
    told = claims["load 3: mean latency of priority over fcfs, measured"].ours
    assert isinstance(told, str)
    assert float(told.split()[0]) == pytest.approx(ratio, rel=0.04)
    assert "2 repetitions" in told
    assert rows["bound"]["mean_latency"] <= rows["search"]["mean_latency"]
    over = claims["load 3: mean latency, fcfs measured over the bound"].ours
    assert isinstance(over, float)
    assert over >= 1
    # What was measured stays, and a second run measures nothing.
    again = run_experiment("vllm-cpu", settings)
    assert len(machine.calls) == 8
    real = [row["mean_latency"] for row in outcome.rows if row["source"] == "measured"]
    assert real == [row["mean_latency"] for row in again.rows if row["source"] == "measured"]


def test_requests_at_two_loads_are_the_same_but_for_their_arrivals(
    machine: Machine, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    run_experiment("vllm-cpu", {**SETTINGS, "folder": str(folder)}, trials=1)
    slow, fast = (read_instance(folder / f"load-{load}.json") for load in (1, 3))
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert slow.predicted is not None
    assert fast.predicted is not None
    assert slow.predicted.tolist() == fast.predicted.tolist() != slow.output_tokens.tolist()
    assert slow.arrival == pytest.approx(3 * fast.arrival, abs=1e-5)


def test_files_of_other_requests_and_commands_that_fail_are_told(
    machine: Machine, tmp_path: Path, monkeypatch
) -> None:
    settings = {**SETTINGS, "folder": str(tmp_path / "runs")}
    run_experiment("vllm-cpu", settings, trials=1)
    (row,) = run_experiment("vllm-cpu", {**settings, "requests": "61"}, trials=1).rows
    assert "instance_sha256" in row["error"]
    monkeypatch.undo()
    (row,) = run_experiment("vllm-cpu", {**settings, "folder": str(tmp_path)}, trials=1).rows
    assert row["error"].startswith("optsched profile: found exit status 2 (engine: found no vLLM")
