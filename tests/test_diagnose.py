"""`optsched diagnose`: runs whose best change is known, made by the twin with noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import answer, run
from test_table import LINEAR, tabulated

import optsched
from optsched.analysis.diagnose import diagnose
from optsched.costs.cost import roofline
from optsched.files.measured import Measured
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

SLOS = {"slo_ttft": 1.0, "slo_tpot": 0.05}


def served(instance: Instance, seqs: int, tokens: int, noise: float = 0.05) -> Measured:
    """Return the times of the twin on a machine 1.5 and 1.3 times as slow as the roofline."""
    from optsched.analysis.diagnose import _scaled

    slow = _scaled(roofline("llama3-8b", "h100-80gb"), 1.5, 1.3)
    spec = f"vllm-v1:max_num_seqs={seqs},max_num_batched_tokens={tokens}"
    judged = optsched.evaluate(instance, optsched.simulate(instance, spec, slow), slow)
    rng = np.random.default_rng(5)
    factor = rng.lognormal(0, noise, instance.n)
    return Measured(judged.latency * factor, judged.ttft * factor)


def requests(n: int, rate: float, prompt: float, output: float, kv: int = 400_000) -> Instance:
    rng = np.random.default_rng(3)
    sizes = [
        np.clip(rng.lognormal(np.log(m), 0.6, n), 8, 4000).astype(int) for m in (prompt, output)
    ]
    return Instance(np.cumsum(rng.exponential(1 / rate, n)), *sizes, kv, "second")


def few_seats() -> tuple[Instance, int, int, str]:
    return requests(150, 8.0, 200, 150), 8, 2048, "max_num_seqs"


def little_memory() -> tuple[Instance, int, int, str]:
    return requests(150, 10.0, 600, 200, kv=9000), 256, 2048, "kv_capacity"


def blocking_prompts() -> tuple[Instance, int, int, str]:
    base = requests(200, 4.0, 100, 60)
    prompt = base.prompt_tokens.copy()
    prompt[::4] = 12_000  # one step of all of it stops every decode for half a second
    columns = base.arrival, prompt, base.output_tokens, base.kv_capacity, "second"
    return Instance(*columns), 256, 16_384, "token"


@pytest.mark.parametrize("made", [few_seats, little_memory, blocking_prompts])
def test_the_known_best_change_is_the_first(made: Any) -> None:
    instance, seqs, tokens, expected = made()
    measured = served(instance, seqs, tokens)
    slos = SLOS if expected != "token" else {"slo_ttft": 2.0, "slo_gap": 0.1}
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    found = diagnose(
        instance, roofline("llama3-8b", "h100-80gb"), measured=measured, **limits, **slos
    )
    assert found.error is not None
    assert found.error < 0.1
    assert found.first is not None
    assert expected in found.first.what
    assert found.first.low <= found.first.gain <= found.first.high
    assert found.bound <= found.base["mean_latency"]


def test_a_run_that_the_twin_does_not_repeat_is_refused() -> None:
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens)
    rng = np.random.default_rng(0)
    strange = Measured(rng.permutation(measured.latency) * rng.lognormal(0, 1.5, instance.n))
    with pytest.raises(InputError, match="expected at most 30%"):
        diagnose(instance, roofline("llama3-8b", "h100-80gb"), measured=strange, **SLOS)


def test_the_command_goes_from_a_benchmark_to_a_verdict(tmp_path: Path) -> None:
    instance, seqs, tokens, _ = few_seats()
    measured = served(instance, seqs, tokens)
    assert measured.ttft is not None
    bench = {
        "input_lens": instance.prompt_tokens.tolist(),
        "output_lens": instance.output_tokens.tolist(),
        "start_times": (100 + instance.release_times).tolist(),
        "ttfts": measured.ttft.tolist(),
        "latencies": measured.latency.tolist(),
    }
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    words = ("diagnose", tmp_path / "bench.json", "--gpu", "h100-80gb", "--model",
             "meta-llama/Llama-3.1-8B", "--slo-ttft", "1s", "--slo-tpot", "50ms",
             "--max-num-seqs", seqs)  # fmt: skip
    text = run(*words)
    assert "first: max_num_seqs=" in text
    assert "repeats the run" in text
    data = answer(*words)
    assert data["first"]["what"].startswith("max_num_seqs")
    assert data["error"] < 0.1

    instance_file = tmp_path / "alone.json"
    optsched.write_instance(instance, instance_file)
    alone = run("diagnose", instance_file, *words[2:])
    assert "no measured times" in alone
    assert "no format" in run("diagnose", __file__, *words[2:], status=2)


def test_of_a_tabulated_cost_model_the_linear_approximation_is_taken() -> None:
    load = requests(6, 4.0, 50, 5)
    found = diagnose(load, tabulated(), max_num_seqs=2)
    assert found.cost_model.table is None
    assert {k: float(v) for k, v in found.cost_model.coefficients.items()} == {
        name: float(text) for name, text in LINEAR.items()
    }
