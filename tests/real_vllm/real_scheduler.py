"""The scheduler of the installed vLLM, driven without a model: the one place that knows its code.

`RealScheduler` is a policy object. `optsched.run` asks it before every batch, it asks vLLM's
own ``Scheduler``, and the tokens that a model would have sampled are made up. So vLLM sees the same
arrivals at each step as any other policy, and its schedule can be judged and compared.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

sys.path.append(str(Path(__file__).parents[1]))

from slow_judge import sequences_of

from optsched.policies import Batch, View
from optsched.policies.vllm_v1 import VllmV1
from optsched.problem.instance import Instance

TESTED = ("0.32.0",)
"""The versions of vLLM whose scheduler was compared."""

MAX_MODEL_LEN = 1 << 20
TOKEN = 7
"""What every prompt consists of, and what is sampled."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def version() -> str:
    """Return the version of the installed vLLM, without the name of its build."""
    return str(vllm.__version__).partition("+")[0]


@functools.cache
def _model() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
        )


def scheduler(
    instance: Instance, policy: VllmV1, kind: type = Scheduler, more: dict | None = None
) -> Scheduler:
    """Return vLLM's scheduler, or one on it, set up as a policy is, with the KV of an instance."""
    block = instance.kv_block_tokens
    blocks = instance.kv_capacity // block + 1  # vLLM keeps one of them empty
    caching = instance.prefixes is not None and policy.prefix_caching
    cache = CacheConfig(block_size=block, enable_prefix_caching=caching)
    cache.num_gpu_blocks = blocks
    settings = SchedulerConfig(
        max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
        long_prefill_token_threshold=policy.long_prefill_token_threshold,
        watermark=policy.watermark,
        scheduler_reserve_full_isl=policy.scheduler_reserve_full_isl,
        prefill_schedule_interval=policy.prefill_schedule_interval,
        policy=policy.policy,
        async_scheduling=False,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
    )
    config = VllmConfig(
        model_config=_model(),
        cache_config=cache,
        scheduler_config=settings,
        additional_config=more or {},
    )
    layers = FullAttentionSpec(block_size=block, num_kv_heads=4, head_size=64, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layers)]
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return kind(config, kv, StructuredOutputManager(config), block_size=block)


class RealScheduler:
    """vLLM's scheduler as a policy object.

    Parameters
    ----------
    instance : Instance
        In seconds and with ``"cached"`` accounting. The object knows its output lengths, as a model
        does that ends each answer.
    policy : VllmV1
        The parameters.
    rank : sequence of int, optional
        Priorities, for ``policy="priority"``.
    kind, more : type, dict, optional
        The scheduler's class, and the ``additional_config`` of vLLM's configuration.
    """

    clairvoyant = False
    hybrid = chunked = True

    def __init__(
        self,
        instance: Instance,
        policy: VllmV1,
        rank: Any = None,
        kind: type = Scheduler,
        more: dict | None = None,
    ) -> None:
        self.instance, self.rank = instance, rank
        self.interval = policy.prefill_schedule_interval
        self.real = scheduler(instance, policy, kind, more)
        self.by_arrival = sorted(range(instance.n), key=lambda i: (instance.arrival[i], i))
        self.added = self.steps = 0
        self.last: Any = None
        self.texts: list[list[int]] | None = None  # prompts and outputs, where they matter
        self.hasher: Any = None
        if self.real.kv_cache_manager.enable_caching:
            numbers: dict[object, int] = {}
            self.texts = [
                [numbers.setdefault(token, len(numbers)) for token in sequence]
                for sequence in sequences_of(instance)
            ]
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(instance.kv_block_tokens, sha256)

    def __deepcopy__(self, memo: object) -> RealScheduler:
        """Return itself: it is made for one run, and vLLM's scheduler cannot be copied."""
        return self

    def batch(self, view: View) -> Batch:
        """Return what vLLM schedules next."""
        if self.last is not None:
            self._sample()
        if not self.real.has_unfinished_requests():
            self.steps = 0
        while self.added < self.instance.n and view.arrival[self.by_arrival[self.added]] >= 0:
            self.real.add_request(self._request(self.by_arrival[self.added]))
            self.added += 1
        self.last = self.real.schedule(self.interval > 1 and self.steps % self.interval != 0)
        self.steps += 1
        tokens = {int(i): c for i, c in self.last.num_scheduled_tokens.items()}
        preempted = [int(i) for i in self.last.preempted_req_ids or ()]
        held = {i for i in view.running if i not in preempted}
        # vLLM has counted the tokens of this step already.
        found = {
            i: self.real.requests[f"{i:08d}"].num_computed_tokens - c
            for i, c in tokens.items()
            if i not in held
        }
        return Batch(tokens, preempted, reused={i: c for i, c in found.items() if c > 0})

    def _request(self, i: int) -> Request:
        output, prompt = int(self.instance.output_tokens[i]), int(self.instance.prompt_tokens[i])
        return Request(
            f"{i:08d}",
            [TOKEN] * prompt if self.texts is None else self.texts[i][:prompt],
            SamplingParams(
                max_tokens=output, ignore_eos=True, detokenize=False, extra_args=self._extra(i)
            ),
            None,
            arrival_time=float(self.instance.arrival[i]),
            priority=0 if self.rank is None else int(self.rank[i]),
            block_hasher=self.hasher,
        )

    def _extra(self, i: int) -> dict[str, float] | None:
        """Return what a request says of its output."""
        told = self.instance.predicted
        return None if told is None else {"predicted_output_tokens": float(told[i])}

    def _sample(self) -> None:
        """Make up a token for each request whose whole input has been processed."""
        ids = list(self.last.num_scheduled_tokens)
        requests = [self.real.requests[i] for i in ids]
        sampled = [
            [self._next(r)] if r.num_computed_tokens == r.num_tokens else [] for r in requests
        ]
        output = ModelRunnerOutput(ids, {i: k for k, i in enumerate(ids)}, sampled)
        self.real.update_from_output(self.last, output)
        self.last = None

    def _next(self, r: Request) -> int:
        """Return the next token of a request."""
        return TOKEN if self.texts is None else self.texts[int(r.request_id)][r.num_tokens]
