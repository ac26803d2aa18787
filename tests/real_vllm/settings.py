"""The settings in which optsched's twin and vLLM's own scheduler are compared."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from optsched.problem.instance import Instance
from optsched.workloads.generate import generate
from optsched.workloads.traces import read_trace

COST = "llama2-7b-a100-infermax"
REQUESTS = 500
AZURE = Path(os.environ.get("OPTSCHED_DATA") or "nowhere") / "azure/AzureLLMInferenceTrace_conv.csv"


@dataclass(frozen=True)
class Setting:
    """Requests, the KV for them, and the parameters of the scheduler."""

    requests: str
    kv_capacity: int
    kv_block_tokens: int
    options: str = ""

    @property
    def spec(self) -> str:
        """The policy's specification."""
        return f"vllm-v1:{self.options}" if self.options else "vllm-v1"

    def instance(self) -> Instance:
        """Return the instance. Blocks that requests share are vLLM's blocks."""
        drawn = DRAWS[self.requests]()
        shared = {"prefix_block_tokens": self.kv_block_tokens} if drawn.prefixes else {}
        kv = {"kv_capacity": self.kv_capacity, "kv_block_tokens": self.kv_block_tokens}
        return replace(drawn, **kv, **shared)


def _azure(rate_scale: float) -> Instance:
    return read_trace("azure", AZURE, limit=REQUESTS, kv_capacity=1 << 20, rate_scale=rate_scale)


def _trees(seed: int, **options) -> Instance:
    return generate("prefix-trees", seed=seed, n=REQUESTS, kv_capacity=1 << 20, **options)


DRAWS = {
    "Azure, 4 x": lambda: _azure(4.0),
    "Azure, 20 x": lambda: _azure(20.0),
    "lognormal, 5 / s": lambda: generate(
        "lognormal", seed=1, n=REQUESTS, rate=5.0, kv_capacity=1 << 20
    ),
    "lognormal, 60 / s": lambda: generate(
        "lognormal", seed=2, n=REQUESTS, rate=60.0, kv_capacity=1 << 20
    ),
    "lognormal, bursts": lambda: generate(
        "lognormal", seed=3, n=REQUESTS, arrivals="gamma", cv=4.0, rate=20.0, kv_capacity=1 << 20
    ),
    "lognormal, all at 0": lambda: generate(
        "lognormal", seed=4, n=REQUESTS, arrivals="all-at-once", kv_capacity=1 << 20
    ),
    "trees, 20 / s": lambda: _trees(5, rate=20.0),
    "trees, 80 / s": lambda: _trees(6, rate=80.0, reuse=0.7, output_max=128),
    "trees, deep": lambda: _trees(7, rate=60.0, trees=1, depth=40, reuse=0.95, output_max=200),
    "trees, many": lambda: _trees(8, rate=60.0, trees=40, depth=8, reuse=0.8, output_max=200),
    "trees, all at 0": lambda: _trees(9, arrivals="all-at-once", reuse=0.8, output_max=100),
    "trees, bursts": lambda: _trees(10, arrivals="gamma", cv=4.0, rate=40.0, reuse=0.9),
    "prompts again": lambda: _trees(
        11, rate=60.0, trees=12, depth=1, reuse=1.0, prompt_min=128, prompt_max=128, output_max=200
    ),
}
"""Requests by name; ``4 x`` is four times as fast as in the trace."""

SETTINGS = (
    # Budgets and seats, with ample KV.
    Setting("Azure, 4 x", 200_000, 16),
    Setting("Azure, 20 x", 200_000, 16, "max_num_batched_tokens=512,max_num_seqs=64"),
    Setting("Azure, 20 x", 200_000, 16, "max_num_batched_tokens=8192,max_num_seqs=1024"),
    Setting("lognormal, 5 / s", 50_000, 16, "max_num_batched_tokens=128,max_num_seqs=128"),
    Setting("lognormal, 60 / s", 100_000, 16, "max_num_seqs=8"),
    Setting("lognormal, all at 0", 200_000, 16, "max_num_batched_tokens=1024"),
    # KV from tight to wide.
    Setting("Azure, 20 x", 8_000, 16),
    Setting("Azure, 20 x", 16_000, 16),
    Setting("Azure, 4 x", 20_000, 16),
    Setting("lognormal, 60 / s", 3_000, 16),
    Setting("lognormal, bursts", 2_500, 16),
    # Blocks, and a capacity that is no multiple of them.
    Setting("Azure, 20 x", 16_000, 1),
    Setting("Azure, 20 x", 16_000, 128),
    Setting("lognormal, 60 / s", 4_001, 7),
    Setting("lognormal, bursts", 2_600, 32, "max_num_batched_tokens=256"),
    # Each parameter.
    Setting("Azure, 20 x", 30_000, 16, "long_prefill_token_threshold=200"),
    Setting("Azure, 20 x", 12_000, 16, "long_prefill_token_threshold=64,max_num_seqs=32"),
    Setting("Azure, 20 x", 12_000, 16, "watermark=0.05"),
    Setting("lognormal, 60 / s", 3_000, 16, "watermark=0.3"),
    Setting("Azure, 20 x", 12_000, 16, "scheduler_reserve_full_isl=false"),
    Setting(
        "lognormal, 60 / s", 3_000, 16,
        "scheduler_reserve_full_isl=false,max_num_batched_tokens=64,max_num_seqs=64",
    ),
    Setting("Azure, 20 x", 30_000, 16, "prefill_schedule_interval=4"),
    Setting("lognormal, 5 / s", 3_000, 16, "prefill_schedule_interval=7"),
    # By priority.
    Setting("Azure, 20 x", 16_000, 16, "policy=priority"),
    Setting("Azure, 20 x", 16_000, 16, "policy=priority,priority=output"),
    Setting("Azure, 20 x", 12_000, 16, "policy=priority,priority=work,watermark=0.02"),
    Setting(
        "Azure, 20 x", 12_000, 16,
        "policy=priority,priority=prompt,scheduler_reserve_full_isl=false",
    ),
    Setting(
        "lognormal, 60 / s", 3_000, 1,
        "policy=priority,priority=total,max_num_batched_tokens=256",
    ),
    Setting(
        "lognormal, bursts", 3_000, 32,
        "policy=priority,priority=volume,prefill_schedule_interval=5,max_num_seqs=40",
    ),
    Setting(
        "lognormal, all at 0", 5_000, 16,
        "policy=priority,priority=output,long_prefill_token_threshold=32,watermark=0.1",
    ),
)  # fmt: skip
"""From ample KV to tight, all parameters, both policies."""

CACHED = (
    # KV from ample to tight.
    Setting("trees, 20 / s", 200_000, 16),
    Setting("trees, 20 / s", 6_000, 16),
    Setting("trees, 20 / s", 3_000, 16),
    Setting("trees, 80 / s", 20_000, 16),
    Setting("trees, 80 / s", 8_000, 16),
    Setting("trees, 80 / s", 3_000, 16),
    Setting("trees, 80 / s", 1_600, 16),
    Setting("trees, deep", 6_000, 16),
    Setting("trees, deep", 2_000, 16),
    Setting("trees, many", 10_000, 16),
    Setting("trees, many", 2_400, 16),
    Setting("trees, all at 0", 20_000, 16),
    Setting("trees, all at 0", 3_000, 16),
    Setting("trees, bursts", 4_000, 16),
    # Whole prompts that are found again, and end on a block.
    Setting("prompts again", 8_000, 16),
    Setting("prompts again", 2_000, 16),
    Setting("prompts again", 2_000, 128),
    # Blocks, and a capacity that is no multiple of them.
    Setting("trees, 80 / s", 3_001, 1),
    Setting("trees, many", 4_001, 7),
    Setting("trees, deep", 2_600, 32),
    Setting("trees, many", 6_000, 128),
    # Each parameter.
    Setting("trees, many", 3_000, 16, "max_num_batched_tokens=64,max_num_seqs=64"),
    Setting("trees, all at 0", 4_000, 16, "max_num_batched_tokens=128,max_num_seqs=32"),
    Setting("trees, all at 0", 6_000, 16, "max_num_batched_tokens=100,max_num_seqs=100"),
    Setting("trees, deep", 3_000, 16, "long_prefill_token_threshold=40"),
    Setting("prompts again", 3_000, 16, "long_prefill_token_threshold=48,max_num_seqs=40"),
    Setting("trees, many", 3_000, 16, "watermark=0.1"),
    Setting("trees, 80 / s", 2_400, 16, "watermark=0.3"),
    Setting("trees, many", 2_400, 16, "scheduler_reserve_full_isl=false"),
    Setting(
        "trees, 80 / s", 2_000, 16,
        "scheduler_reserve_full_isl=false,max_num_batched_tokens=64,max_num_seqs=64",
    ),
    Setting("trees, 80 / s", 8_000, 16, "prefill_schedule_interval=4"),
    Setting("trees, deep", 3_000, 16, "prefill_schedule_interval=7"),
    Setting("trees, 80 / s", 3_000, 16, "prefix_caching=false"),
    # By priority, where nobody finds what was never computed (docs/lab/vllm-conformance.md).
    Setting("trees, many", 8_000, 16, "policy=priority,priority=output"),
    Setting("trees, all at 0", 6_000, 16, "policy=priority,priority=work"),
    Setting("trees, 80 / s", 8_000, 16, "policy=priority,priority=prompt,watermark=0.05"),
    Setting("trees, many", 3_000, 16, "policy=priority,priority=output"),
    Setting(
        "trees, deep", 2_000, 1,
        "policy=priority,priority=output,max_num_batched_tokens=256,max_num_seqs=128",
    ),
)  # fmt: skip
"""Requests that share prefixes, with vLLM's prefix cache."""
