"""Speed of schedulers and of the judge, on 10,000 requests in rounds and on a whole trace.

The trace is `AzureLLMInferenceTrace_conv.csv`, looked for below the folder that the environment
variable OPTSCHED_DATA names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from studies.trail import ALPACA

from optsched import Problem
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.predict import predict
from optsched.workloads.traces import read_trace

TRACE = "AzureLLMInferenceTrace_conv.csv"
COST_MODEL = "llama2-7b-a100-infermax"


@pytest.fixture(scope="module")
def rounds() -> Instance:
    """10,000 requests of the fitted lengths of real conversations, 2 per round, M = 16,492."""
    return generate("lognormal", seed=0, n=10_000, kv_capacity=16_492, rate=2.0, time_unit="round")


@pytest.fixture(scope="module")
def azure() -> Instance:
    folder = os.environ.get("OPTSCHED_DATA")
    if not folder:
        pytest.skip("the environment variable OPTSCHED_DATA names no folder with traces")
    found = sorted(Path(folder).rglob(TRACE))
    if not found:
        pytest.skip(f"no {TRACE} below {folder} (OPTSCHED_DATA)")
    return read_trace("azure", found[0])


def test_mc_sf_over_ten_thousand_requests_in_rounds(benchmark, rounds: Instance) -> None:
    simulate(rounds.subset(range(10)), "mc-sf")  # compile
    schedule = benchmark.pedantic(simulate, (rounds, "mc-sf"), rounds=3, iterations=1)
    assert schedule.batches >= rounds.output_tokens.max()


@pytest.mark.parametrize("spec", ["sarathi", "vllm"])
def test_scheduler_over_the_azure_trace(benchmark, azure: Instance, spec: str) -> None:
    simulate(Problem(azure.subset(range(10)), COST_MODEL), spec)
    schedule = benchmark.pedantic(simulate, (azure, spec, COST_MODEL), rounds=3, iterations=1)
    assert len(schedule.request) >= azure.output_tokens.sum()


def test_evaluate_mc_sf_in_rounds(benchmark, rounds: Instance) -> None:
    schedule = simulate(rounds, "mc-sf")
    evaluate(rounds, schedule)
    found = benchmark.pedantic(evaluate, (rounds, schedule), rounds=3, iterations=1)
    assert found.metrics["peak_kv"] <= rounds.kv_capacity


@pytest.mark.parametrize("spec", ["sarathi", "vllm"])
def test_evaluate_over_the_azure_trace(benchmark, azure: Instance, spec: str) -> None:
    schedule = simulate(Problem(azure, COST_MODEL), spec)
    evaluate(Problem(azure, COST_MODEL), schedule)
    found = benchmark.pedantic(evaluate, (azure, schedule, COST_MODEL), rounds=3, iterations=1)
    assert found.metrics["peak_kv"] <= azure.kv_capacity


def test_help_as_a_process(benchmark) -> None:
    command = [str(Path(sys.executable).with_name("optsched")), "--help"]
    done = benchmark.pedantic(
        subprocess.run, (command,), {"capture_output": True, "check": True}, rounds=5, iterations=1
    )
    assert b"solve" in done.stdout


@pytest.mark.parametrize("arrivals", [{"rate": 30.0}, {"arrivals": "all-at-once"}])
def test_trail_over_ten_thousand_requests(benchmark, arrivals: dict) -> None:
    instance = generate("lognormal", seed=0, n=10_000, kv_capacity=20_000, **ALPACA, **arrivals)
    told = predict(instance, "trail")
    simulate(Problem(instance.subset(range(10)), COST_MODEL), "trail")
    # Told outside of the clock, and not through the instance, whose digest would cover it.
    arguments = {"predictor": lambda *_: told.forecast}
    schedule = benchmark.pedantic(
        simulate, (instance, "trail", COST_MODEL), arguments, rounds=3, iterations=1
    )
    assert len(schedule.request) >= instance.output_tokens.sum()


def test_trails_predictor_over_ten_thousand_requests(benchmark) -> None:
    instance = generate("lognormal", seed=0, n=10_000, kv_capacity=20_000, **ALPACA)
    predict(instance.subset(range(10)), "trail")
    told = benchmark.pedantic(predict, (instance, "trail"), rounds=3, iterations=1)
    assert len(told.forecast.remaining) == instance.output_tokens.sum()


@pytest.mark.parametrize("spec", ["isrtf", "isrtf:workers=50"])
@pytest.mark.parametrize("kv_capacity", [100_000, 2_000])
def test_isrtf_over_ten_thousand_requests(benchmark, spec: str, kv_capacity: int) -> None:
    instance = generate(
        "lognormal", seed=0, n=10_000, arrivals="gamma", rate=30.0, kv_capacity=kv_capacity
    )
    told = predict(instance, "elis")
    simulate(Problem(instance.subset(range(10)), COST_MODEL), spec)
    arguments = {"predictor": lambda *_: told.forecast}
    schedule = benchmark.pedantic(
        simulate, (instance, spec, COST_MODEL), arguments, rounds=3, iterations=1
    )
    assert len(schedule.request) >= instance.output_tokens.sum()
