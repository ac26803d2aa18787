"""vLLM in this process as the engine of a replay. Only this module needs vLLM, when it is called.

vLLM's engine for CPUs does not start in a process that has loaded numba. What the environment says
of vLLM holds; where it says nothing, the engine's core runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``) and a CPU has 1 GiB of KV (``VLLM_CPU_KVCACHE_SPACE=1``).
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from optsched.engines.sending import Sending
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
    # It raises an error if the folder has no model's configuration.
    configuration(path)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError:
        raise InputError(
            "engine: found no vLLM in this environment; expected it beside optsched"
        ) from None

    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    arguments = {**DEFAULTS, "load_format": "auto" if has_weights else "dummy", **options}
    try:
        return LLM(model=str(path), **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        what_is_found = f"{path}: found that vLLM does not start ({' '.join(str(error).split())})"
        raise InputError(f"{what_is_found}; expected a model and arguments that it takes") from None


def submit(
    engine: Any, name: str, prompt: list[int], output: int, extra: Any = None, priority: int = 0
) -> None:
    """Add a request to a started engine, which serves the smallest priority first.

    It produces exactly ``output`` tokens, whatever they are. ``extra`` goes along for a scheduler.
    """
    from vllm import SamplingParams

    forced = {"max_tokens": output, "ignore_eos": True, "detokenize": False, "temperature": 0}
    params = SamplingParams(**forced, extra_args=extra or None)
    engine.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)


def drain(engine: Any) -> None:
    """Run an engine until it has no request left."""
    while engine.has_unfinished_requests():
        engine.step()


class InProcess:
    """vLLM in this process as the engine of replays; ``options`` are arguments of ``vllm.LLM``."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self.engine = start(folder, options).llm_engine
        self.warm = False

    def serve(self, sending: Sending) -> Measured:
        """See `optsched.engines.replay.Engine.serve`."""
        engine, stop = self.engine, sending.stop
        if not self.warm:
            self._warm_up(sending)

        # Neither the warm-up nor an earlier replay leaves anything that this one could find.
        engine.reset_prefix_cache()
        sending.begin()
        waiting = [(sending.due[request], request) for request in sending.order]  # a heap
        running: dict[str, int] = {}

        # One loop sends what is due, has the engine take a step, and gives up what takes too long.
        # `running`: requests by the name that the engine has for them.
        while (waiting or running) and not stop.is_set():
            while waiting and waiting[0][0] <= sending.now():
                _, request = heappop(waiting)
                sending.sent(request)
                try:
                    self._add(sending, request, str(request))
                    running[str(request)] = request
                except Exception as error:  # their classes differ between versions of vLLM
                    sending.end(request, error=f"refused: {error}")

            if not running:
                if waiting:
                    stop.wait(min(0.1, max(0.0, waiting[0][0] - sending.now())))

                continue

            for output in engine.step():
                # It was given up before, as it took too long.
                if output.request_id not in running:
                    continue

                request = running[output.request_id]
                sending.token(request)
                if output.finished:
                    del running[output.request_id]
                    sending.outputs[request] = tokens = list(output.outputs[0].token_ids)
                    for k in sending.end(request, len(tokens)):
                        heappush(waiting, (sending.due[k], k))

            # The timeout counts from when a request is due, and not from when it was sent.
            earliest_due = sending.now() - sending.timeout_s
            timed_out = [name for name, i in running.items() if sending.due[i] < earliest_due]
            if timed_out:
                engine.abort_request(timed_out)
            for name in timed_out:
                sending.end(running.pop(name), error=sending.late)

        if running:
            engine.abort_request(list(running))

        return sending.measured("vllm")

    def _add(self, sending: Sending, request: int, name: str, max_output: float = math.inf) -> None:
        """Submit a request of a replay, with at most so many output tokens."""
        output = int(min(max_output, sending.instance.output_tokens[request]))
        priority = 0 if sending.priority is None else int(sending.priority[request])
        prompt, extra_args = sending.prompt(request), sending.predicted(request)
        submit(self.engine, name, prompt, output, extra_args, priority)

    def _warm_up(self, sending: Sending) -> None:
        """Serve a request of middle length, so that the first does not pay for what comes once.

        A few tokens will do. It is no request of the replay: none of its times is noted.
        """
        prompts = sending.instance.prompt_tokens
        middle = sorted(range(len(prompts)), key=prompts.__getitem__)[len(prompts) // 2]
        with suppress(Exception):  # if it is too long it is refused again later
            self._add(sending, middle, "warm-up", max_output=8)

        drain(self.engine)
        self.warm = True
