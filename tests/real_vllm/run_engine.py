"""Runs requests through the real engine on the CPU, with a policy inside, and writes what it did.

A process of its own, since vLLM's engine on a CPU does not start once numba is loaded: it looks
into every module for kernels, and fails at llvmlite's (vLLM 0.32.0).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

from optsched.engines.vllm import PolicyScheduler


class Recorded(PolicyScheduler):
    """Notes what each step processes and preempts."""

    steps: ClassVar[list[Any]] = []

    def schedule(self, throttle_prefills: bool = False):
        step = super().schedule(throttle_prefills)
        tokens = [(self._number[i], c) for i, c in step.num_scheduled_tokens.items()]
        self.steps.append((tokens, sorted(self._number[i] for i in step.preempted_req_ids)))
        return step


def main(folder: Path) -> None:
    """Read ``wanted.json``, run its requests all at once and then some alone; write ``done.json``.

    Those that were preempted are run again alone.
    """
    wanted = json.loads((folder / "wanted.json").read_text())
    engine = LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, seed=0,
        scheduler_cls=Recorded, additional_config={"optsched": {"policy": wanted["policy"]}},
        max_model_len=512, **wanted["options"],
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in wanted["prompts"]]
    params = [
        SamplingParams(max_tokens=o, temperature=0, ignore_eos=True, detokenize=False)
        for o in wanted["outputs"]
    ]

    def answers(which: list[int]) -> list[list[int]]:
        found = engine.generate(
            [prompts[i] for i in which], [params[i] for i in which], use_tqdm=False
        )
        return [list(one.outputs[0].token_ids) for one in found]

    together = answers(list(range(len(prompts))))
    steps = list(Recorded.steps)
    preempted = sorted({i for _, lost in steps for i in lost})
    alone = {i: answers([i])[0] for i in preempted}
    done = {"steps": steps, "together": together, "alone": alone}
    (folder / "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
