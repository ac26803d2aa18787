"""vLLM in this process as the engine of a replay. Only this module needs vLLM, when it is called.

vLLM's engine for CPUs does not start in a process that has loaded numba. What the environment says
of vLLM holds; where it says nothing, the engine's core runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``) and a CPU has 1 GiB of KV (``VLLM_CPU_KVCACHE_SPACE=1``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from optsched.engines.recorder import Recorder
from optsched.engines.sending import Progress, Sending
from optsched.files.measured import Measured
from optsched.problem.errors import InputError
from optsched.problem.text_files import read_object

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
DEFAULTS = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
"""Arguments of ``vllm.LLM``, unless others are given."""


def configuration(folder: str | Path) -> dict[str, Any]:
    """Return a model's configuration."""
    return read_object(Path(folder) / "config.json", "a model's configuration")


def start(folder: str, options: Mapping[str, Any]) -> Any:
    """Start vLLM's engine on a model's folder. A folder without weights gets made-up ones."""
    path = Path(folder)
    configuration(path)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError:
        raise InputError(
            "engine: found no vLLM in this environment; expected it beside optsched"
        ) from None

    weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    given = {**DEFAULTS, "load_format": "auto" if weights else "dummy", **options}
    try:
        return LLM(model=str(path), **given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: found that vLLM does not start ({' '.join(str(error).split())}); expected a "
            "model and arguments that it takes"
        ) from None


class InProcess:
    """vLLM in this process as the engine of replays.

    Parameters
    ----------
    folder : str
        The model's folder.
    options : mapping
        Arguments of ``vllm.LLM``.
    """

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self.engine = start(folder, options).llm_engine
        self.warm = False

    def serve(self, sending: Sending, progress: Progress | None, stop: Event) -> Measured:
        """See `optsched.engines.replay.Engine.serve`."""
        engine, output = self.engine, sending.instance.output_tokens
        if not self.warm:
            self._warm_up(sending)

        recorder = Recorder(sending.instance, progress)
        waiting = sending.order[::-1]
        running: dict[str, int] = {}

        while (waiting or running) and not stop.is_set():
            while waiting and recorder.due[waiting[-1]] <= recorder.now():
                request = waiting.pop()
                recorder.late_s = max(recorder.late_s, recorder.now() - recorder.due[request])
                running[str(request)] = request

                try:
                    self._add(str(request), sending, request, int(output[request]))
                except Exception as error:  # their classes differ between versions of vLLM
                    del running[str(request)]
                    recorder.end(request, error=f"refused: {error}")

            if not running:
                if waiting:
                    stop.wait(min(0.1, max(0.0, recorder.due[waiting[-1]] - recorder.now())))

                continue

            for found in engine.step():
                if found.request_id not in running:
                    continue

                request = running[found.request_id]
                recorder.token(request)
                if found.finished:
                    recorder.end(request, len(found.outputs[0].token_ids))
                    del running[found.request_id]

            late = sending.timeout_s
            over = [n for n, r in running.items() if recorder.now() - recorder.due[r] > late]
            if over:
                engine.abort_request(over)
            for name in over:
                recorder.end(running.pop(name), error=f"no end within {late:g} s")

        if running:
            engine.abort_request(list(running))

        return recorder.measured("vllm")

    def _add(self, name: str, sending: Sending, request: int, output: int) -> None:
        from vllm import SamplingParams

        exact = SamplingParams(
            max_tokens=output, ignore_eos=True, detokenize=False, temperature=0,
            extra_args=sending.told(request) or None,
        )  # fmt: skip
        first = 0 if sending.priority is None else int(sending.priority[request])
        tokens = {"prompt_token_ids": sending.prompt(request)}
        self.engine.add_request(name, tokens, exact, priority=first)

    def _warm_up(self, sending: Sending) -> None:
        """Serve a request of middle length, so that the first does not pay for what comes once."""
        prompts = sending.instance.prompt_tokens
        middle = sorted(range(len(prompts)), key=prompts.__getitem__)[len(prompts) // 2]
        with suppress(Exception):  # if it is too long it is refused again later
            output = min(8, int(sending.instance.output_tokens[middle]))
            self._add("warm-up", sending, middle, output)

        while self.engine.has_unfinished_requests():
            self.engine.step()

        self.warm = True
