"""`optsched.engines.vllm.PolicyScheduler` with vLLM's KV manager, and inside the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optsched import Problem, run

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from conformance import decisions
from real_scheduler import LLAMA, RealScheduler
from settings import COST

from optsched import Instance, evaluate
from optsched.engines.vllm import PolicyScheduler
from optsched.policies.engine.simulate import simulate
from optsched.policies.vllm_v1 import VllmV1
from optsched.problem.errors import UsageError
from optsched.problem.instance import Limits
from optsched.workloads.generate import generate

OWN = VllmV1(max_num_seqs=64, max_num_batched_tokens=1024)
POLICIES = (
    "fcfs", "mc-sf", "mc-benchmark", "least-work", "sarathi", "sarathi:eviction_free=true",
    "vllm-hy:watermark=0.05", "rank-input", "rank-output", "a-min", "trail:max_running=32",
    "spf", "spf-work",
)  # fmt: skip


MINE = """
from optsched.policies import Batch, admit, decode_all, evict_until_fits


class LeastPrompt:
    clairvoyant = False

    def batch(self, view):
        tokens, evicted = evict_until_fits(view, decode_all(view))
        smallest = sorted(view.waiting, key=lambda i: (view.prompt_tokens[i], i))[:2]
        return Batch(admit(view, tokens, [] if evicted else smallest, evicted), evicted)
"""


def requests(kv_capacity: int, **fields) -> Instance:
    """200 requests at 60 a second, for a server with the limits of `OWN`."""
    drawn = generate("lognormal", seed=5, n=200, rate=60.0, kv_capacity=1 << 20)
    limits = Limits(OWN.max_num_batched_tokens, None, OWN.max_num_seqs)
    return replace(drawn, kv_capacity=kv_capacity, kv_block_tokens=16, limits=limits, **fields)


def inside(instance: Instance, policy: str) -> RealScheduler:
    """Return vLLM's scheduler with a policy in it, as a policy object."""
    more = {"optsched": {"policy": policy, "cost_model": COST}}
    return RealScheduler(instance, OWN, kind=PolicyScheduler, more=more)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_inside_vllm_makes_the_batches_of_the_simulation(policy: str) -> None:
    told = requests(4_000)
    told = replace(told, predicted=told.output_tokens + told.prompt_tokens % 7)  # up to 6 too long
    mine = simulate(Problem(told, COST), policy)
    theirs = simulate(Problem(told, COST), inside(told, policy))
    assert decisions(theirs) == decisions(mine)
    assert (evaluate(Problem(told, COST), theirs).finish > 0).all()


def test_a_users_object_is_asked_inside_vllm(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    instance = requests(4_000)
    theirs = simulate(Problem(instance, COST), inside(instance, f"{file}:LeastPrompt"))
    assert decisions(theirs) == decisions(simulate(Problem(instance, COST), f"{file}:LeastPrompt"))


def test_a_policy_that_preempts_loses_no_request() -> None:
    tight = requests(2_400)
    found = run(Problem(tight, COST), inside(tight, "sarathi")).evaluation
    assert found.metrics["evictions"] > 20
    assert found.evictions.max() > 0


def test_rules_that_split_no_prefill_end_one_longer_than_a_step() -> None:
    told = requests(8_000)
    prompt = told.prompt_tokens.copy()
    prompt[::20] = 2_500
    told = replace(told, prompt_tokens=prompt)
    for policy in ("fcfs", "least-work"):
        found = run(Problem(told, COST), inside(told, policy)).evaluation
        assert (found.finish > 0).all()


def test_a_policy_that_cannot_be_asked_is_refused() -> None:
    for policy in ("vllm-v1", "isrtf"):
        with pytest.raises(UsageError, match="runs as a whole; expected Rules or an object"):
            inside(requests(4_000), policy)
    with pytest.raises(UsageError, match=r"additional_config\.optsched: found \{\}; expected a"):
        RealScheduler(requests(4_000), OWN, kind=PolicyScheduler)


def test_in_the_real_engine_the_batches_are_those_of_the_simulation(tmp_path) -> None:
    # 16 KV blocks of 32 tokens. All requests are there at 0, so batch times do not matter.
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(20, 150, 30), rng.integers(5, 60, 30)
    options = {"block_size": 32, "num_gpu_blocks_override": 17, "max_num_seqs": 8,
               "max_num_batched_tokens": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 512}))
    wanted = {
        "policy": "sarathi", "options": options, "outputs": output.tolist(),
        "prompts": [rng.integers(3, 1000, n).tolist() for n in prompt],
    }  # fmt: skip
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    script = Path(__file__).with_name("run_engine.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=600)
    done = json.loads((tmp_path / "done.json").read_text())
    steps, lost = [], []
    for tokens, preempted in done["steps"]:
        lost += preempted
        if tokens:  # a step that only preempts belongs to the next
            steps.append((dict(tokens), sorted(lost)))
            lost = []
    instance = Instance(
        [0.0] * 30, prompt, output, 16 * 32, "second", "cached", Limits(256, None, 8),
        kv_block_tokens=32,
    )  # fmt: skip
    expected = [(a, b) for a, b, _ in decisions(simulate(Problem(instance, COST), "sarathi"))]
    assert steps == expected
    assert [len(tokens) for tokens in done["together"]] == output.tolist()
    # Who was preempted and computed again says what it says alone.
    assert len(done["alone"]) > 0
    for i, tokens in done["alone"].items():
        assert done["together"][int(i)] == tokens
