"""The twin `vllm-v1` against vLLM's own scheduler (`make test-vllm`); skipped without vLLM."""

from __future__ import annotations

import pytest

from optsched import Problem

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from conformance import compare, decisions
from real_scheduler import TESTED, RealScheduler, version
from settings import AZURE, CACHED, COST, REQUESTS, SETTINGS, Setting

from optsched import Instance, evaluate
from optsched.costs.load import cost_for
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.policies.runner import waiting_rank
from optsched.problem.errors import ViolationError


def test_the_installed_vllm_is_one_that_the_twin_was_written_for() -> None:
    assert version() in TESTED, f"found vLLM {version()}; the twin is that of {', '.join(TESTED)}"


@pytest.mark.parametrize(
    "setting", [*SETTINGS, *CACHED], ids=lambda s: f"{s.requests}-{s.kv_capacity}-{s.spec}"
)
def test_every_batch_is_that_of_vllm(setting: Setting) -> None:
    if setting.requests.startswith("Azure") and not AZURE.is_file():
        pytest.skip("OPTSCHED_DATA does not name the Azure trace")
    assert setting.instance().n == REQUESTS
    found = compare(setting)
    assert found.difference == ""
    assert found.equal == found.batches > 100
    assert (found.hits > 0) == (setting in CACHED and "prefix_caching=false" not in setting.options)


def test_the_settings_reach_what_they_are_there_for() -> None:
    # A comparison where nothing is preempted or cut would say little.
    tight = compare(Setting("lognormal, 60 / s", 3_000, 16))
    assert tight.preemptions > 50
    cut = compare(
        Setting("lognormal, 60 / s", 100_000, 16, "max_num_batched_tokens=128,max_num_seqs=128")
    )
    assert cut.chunks > 50
    again = compare(Setting("prompts again", 2_000, 16))
    assert again.preemptions > 500
    assert again.hits > 50_000


def test_vllm_finds_blocks_that_were_never_computed_and_the_judge_refuses_them() -> None:
    # tests/test_vllm_cache.py has this instance and its arithmetic. vLLM names blocks when they are
    # allocated and keeps the names if the request is preempted in the same step (vllm#43569).
    instance = Instance(
        [0.0, 0.0001, 0.0], [28, 9, 4], [1, 1, 9], 40, "second", "cached",
        kv_block_tokens=4, prefix_block_tokens=4,
    )  # fmt: skip
    cost = cost_for(instance, COST)
    options = "policy=priority,priority=prompt,long_prefill_token_threshold=8"
    twin = make_policy(f"vllm-v1:{options},scheduler_reserve_full_isl=false")[0]
    mine = simulate(Problem(instance, cost), twin)
    rank = waiting_rank(twin.priority, instance, instance.output_tokens, cost)
    theirs = simulate(Problem(instance, cost), RealScheduler(instance, twin, rank))
    assert decisions(mine)[:3] == decisions(theirs)[:3]
    assert decisions(mine)[3][0][0] == (8, 16)
    assert decisions(theirs)[3][0][0] == (8, 20)
    evaluate(Problem(instance, cost), mine)
    with pytest.raises(ViolationError, match="claims 20 tokens, but all behind the first 16 were"):
        evaluate(Problem(instance, cost), theirs)
