"""What a policy is told inside vLLM; `tests/real_vllm` has vLLM itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from slow_judge import TIMED, random_instance
from test_kv_blocks import in_blocks
from test_simulate import run_or_error, same

from optsched import Problem, run
from optsched.engines.vllm import Desk
from optsched.policies import Rules, make_policy
from optsched.policies.base import Batch, View
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import OptschedError, PolicyError, UsageError
from optsched.problem.instance import Instance, Limits


class AtTheDesk:
    """Asks a desk, which numbers requests as they come, before every batch."""

    clairvoyant = False

    def __init__(self, desk: Desk) -> None:
        self.desk, self.numbers = desk, list[int]()

    def batch(self, view: View) -> Batch:
        for i in view.waiting:
            if i not in self.numbers:
                self.desk.add(view.arrival[i], int(view.prompt_tokens[i]), view.predicted[i])
                self.numbers.append(i)
        number = {i: k for k, i in enumerate(self.numbers)}
        answer = self.desk.ask(
            view.now, [number[i] for i in view.waiting], [number[i] for i in view.running],
            *(a[self.numbers] for a in (view.generated, view.cached, view.decoding)),
        )  # fmt: skip
        tokens = {self.numbers[k]: c for k, c in answer.tokens.items()}
        return Batch(tokens, [self.numbers[k] for k in answer.evict], answer.stall)


def desk(instance: Instance, policy, **options) -> Desk:
    """Return the desk of a policy in a server with the instance's KV and limits."""
    made = make_policy(policy)[0] if isinstance(policy, str) else policy
    kv = (instance.kv_capacity, instance.kv_block_tokens)
    return Desk(made, TIMED, *kv, instance.limits, **options)


@pytest.mark.parametrize(
    "spec",
    [
        "fcfs",
        "mc-sf",
        "sarathi",
        "least-work",
        "rank-output",
        "trail",
        "sorted-f",
        "gsa",
        "gba",
        "spf",
        "spf-work:gate=0.5,piece=3",
        "patient",
        "patient-work",
        "hrrn",
        "wait:gather=2",
    ],
)
def test_asked_about_requests_as_they_come_a_policy_decides_as_in_the_simulation(spec: str) -> None:
    """`AtTheDesk` numbers requests as they come and asks the desk of the plug-in before every
    batch; in the simulation the policy sees the instance."""
    rng, finished = Random(spec), 0
    for seed in range(25):
        instance = in_blocks(rng, random_instance(rng, most=8, unit="second"))
        instance = replace(
            instance, kv_accounting="cached", hybrid_batching=None, chunked_prefill=None
        )
        if instance.limits.max_prefill_tokens is not None:  # vLLM has no such limit
            limits = replace(instance.limits, max_prefill_tokens=None)
            instance = replace(instance, limits=limits)
        # In whole blocks, and in order of arrival, as a server has them.
        whole = instance.kv_capacity - instance.kv_capacity % instance.kv_block_tokens
        instance = replace(instance, kv_capacity=whole)
        instance = instance.subset(np.argsort(instance.arrival, kind="stable"))
        policy = make_policy(spec)[0]
        if isinstance(policy, Rules):  # what vLLM preempts keeps its tokens
            policy = replace(policy, evict_mode="recompute")
        else:
            policy.evict_mode = "recompute"
        fast = run_or_error(instance, policy, seed=seed)
        if isinstance(fast, OptschedError):
            continue
        assert same(fast, simulate(Problem(instance, TIMED), AtTheDesk(desk(instance, policy))))
        finished += 1
    assert finished >= 10  # of 25; the others end in an error


@pytest.mark.parametrize(
    "spec", ["fcfs", "mc-sf", "mc-benchmark", "least-work", "rank-output", "hrrn", "vllm"]
)
def test_rules_that_split_no_prefill_end_requests_longer_than_a_step(spec: str) -> None:
    """Some prompts are longer than a step of vLLM. The rules do not split them, so the desk
    does."""
    rng, policy, parts = Random(spec), make_policy(spec)[0], 0
    for _ in range(15):
        n, step = rng.randint(2, 9), rng.randint(3, 9)
        prompt = [rng.choice([2, 3, step, step + 1, 2 * step + 3]) for _ in range(n)]
        output = [rng.randint(1, 6) for _ in range(n)]
        arrival = sorted(round(rng.uniform(0, 0.05), 3) for _ in range(n))
        kv = max(map(sum, zip(prompt, output, strict=True))) + rng.choice([0, 5, 60])
        limits = Limits(step, None, rng.randint(1, step))
        instance = Instance(arrival, prompt, output, kv, "second", "cached", limits)

        asked = AtTheDesk(desk(instance, replace(policy, evict_mode="recompute")))
        asked.chunked = True
        found = run(Problem(instance, TIMED), asked).evaluation
        assert (found.finish > 0).all()
        parts += sum(s > step for s in prompt)

    assert parts > 10  # prompts longer than a step: the case was there


def test_a_long_prefill_goes_in_parts_beside_all_decodes_and_no_other_does() -> None:
    # 10 tokens a step, 8 beside two decodes. What has begun with 15 has 7 left, which have room.
    # The last request has ended.
    here = Desk(make_policy("least-work")[0], TIMED, 100, 1, Limits(10, None, 4))
    for prompt in (3, 3, 15, 10, 3):
        here.add(0.0, prompt, 5)

    # Tokens generated, tokens cached, and who decodes.
    state = tuple(
        map(np.array, ([1, 1, 0, 0, 5], [3, 3, 0, 0, 7], [True, True, False, False, True]))
    )
    assert here.ask(0.0, [2], [0, 1], *state).tokens == {0: 1, 1: 1, 2: 8}
    assert here.ask(0.0, [3], [0, 1], *state).tokens == {0: 1, 1: 1}
    state[1][2] = 8
    assert here.ask(0.0, [], [0, 1, 2], *state).tokens == {0: 1, 1: 1, 2: 7}
    # With 5 cached 10 are left, of which 8 have room.
    state[1][2] = 5
    assert here.ask(0.0, [], [0, 1, 2], *state).tokens == {0: 1, 1: 1, 2: 8}


def test_a_policy_that_serves_nobody_is_told_of() -> None:
    class Idle:
        def batch(self, view: View) -> Batch:
            return Batch()

    here = Desk(Idle(), TIMED, 100, 1, Limits(10, None, 4))
    here.add(0.0, 15, 5)
    zero = np.zeros(1, np.int64)
    with pytest.warns(UserWarning, match="found an empty batch while request 0 of 15 tokens waits"):
        here.ask(0.0, [0], [], zero, zero, zero > 0)


def test_a_prediction_that_cannot_fit_is_cut() -> None:
    # 30 of 32 tokens are whole blocks of 10. A prompt of 8 leaves room for 23 output tokens,
    # the last of which is never cached.
    instance = Instance([0.0], [8], [5], 32, "second", "cached", kv_block_tokens=10)
    here = desk(instance, "mc-sf")
    here.add(0.0, 8, 1000)
    assert here.predicted == [23]
    zero, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    assert here.ask(0.0, [0], [], zero, zero, no).tokens == {0: 8}


def test_what_cannot_be_asked_or_answers_nonsense_is_refused() -> None:
    """Policies with a loop of their own cannot be asked, and None is no batch."""
    instance = Instance([0.0], [8], [5], 32, "second", "cached")
    for spec in ("vllm-v1", "isrtf"):
        with pytest.raises(UsageError, match="policy:"):
            desk(instance, spec)

    class Silent:
        def batch(self, view: View) -> None:
            return None

    here = desk(instance, Silent(), chunked=False)
    here.add(0.0, 8, 5)
    zero, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    with pytest.raises(PolicyError, match="policy:"):
        here.ask(0.0, [0], [], zero, zero, no)


def test_limits_of_the_server_are_shown() -> None:
    seen = []

    class Looks:
        def batch(self, view: View) -> Batch:
            seen.append((view.kv_capacity, view.kv_block_tokens, view.limits.max_running))
            return Batch({0: 8})

    here = Desk(Looks(), TIMED, 35, 16, Limits(max_running=3))
    here.add(0.0, 8, 5)
    here.ask(0.0, [0], [], np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.bool_))
    # 35 tokens are two whole blocks of 16.
    assert seen == [(32, 16, 3)]


# The plug-in in a scheduler that has only what it uses of vLLM's.
INSIDE = """
import sys
from types import SimpleNamespace as Of
from optsched.engines.vllm import _PolicyMixin

class Base:  # what the plug-in uses of vLLM's scheduler
    def __init__(self, config):
        self.scheduler_config = Of(enable_chunked_prefill=True)
        self.kv_cache_config = Of(num_blocks=5)
        self.block_size, self.max_num_scheduled_tokens, self.max_num_running_reqs = 4, 100, 8

    def add_request(self, request):
        pass

Plugged = type("Plugged", (_PolicyMixin, Base), {})
config = Of(
    cache_config=Of(enable_prefix_caching=False), scheduler_config=Of(async_scheduling=False),
    parallel_config=Of(pipeline_parallel_size=1), speculative_config=None, lora_config=None,
    kv_transfer_config=None, ec_transfer_config=None,
    model_config=Of(is_encoder_decoder=False, is_multimodal_model=False, runner_type="generate"),
    additional_config={"optsched": {"policy": "mc-sf"}},
)
scheduler = Plugged(config)
for number, longest in enumerate((9, 2, 3)):
    scheduler.add_request(Of(
        request_id=str(number), arrival_time=0.0, num_prompt_tokens=4, max_tokens=longest,
        sampling_params=Of(extra_args=None),
    ))
import numpy as np
answer = scheduler._desk.ask(
    0.0, [0, 1, 2], [], np.zeros(3, int), np.zeros(3, int), np.zeros(3, bool)
)
print(dict(answer.tokens))
"""


def test_inside_vllm_rules_decide_about_requests_as_they_come() -> None:
    # 16 tokens of KV in blocks of 4. Outputs of 2 and 3 need 8 each at their ends, so the request
    # of 9, which alone would take 12, waits.
    done = subprocess.run(
        [sys.executable, "-c", INSIDE], capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("{1: 4, 2: 4}\n", "")
