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
        """Return the instance."""
        return replace(
            DRAWS[self.requests](),
            kv_capacity=self.kv_capacity,
            kv_block_tokens=self.kv_block_tokens,
        )


def _azure(rate_scale: float) -> Instance:
    return read_trace("azure", AZURE, limit=REQUESTS, kv_capacity=1 << 20, rate_scale=rate_scale)


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
