"""vLLM in this process as the engine of a replay. Only this module needs vLLM, when it is called.

vLLM's engine for CPUs does not start in a process that has loaded numba. What the environment says
of vLLM holds; where it says nothing, the engine's core runs in this process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``) and a CPU has 1 GiB of KV (``VLLM_CPU_KVCACHE_SPACE=1``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from optsched.files.measured import Measured
from optsched.files.recorder import Recorder
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
DEFAULTS = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
"""Arguments of ``vllm.LLM``, unless others are given."""


def start(folder: str, options: Mapping[str, Any]) -> Any:
    """Start vLLM's engine on a model's folder. A folder without weights gets made-up ones.

    Parameters
    ----------
    folder : str
        With ``config.json``.
    options : mapping
        Arguments of ``vllm.LLM``.

    Returns
    -------
    vllm.LLM

    Raises
    ------
    InputError
        vLLM is not installed, the folder has no configuration, or vLLM refuses it.
    """
    path = Path(folder)
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path / 'config.json'}: expected a model's configuration; found {error}"
        ) from None
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError:
        raise InputError(
            "engine: vLLM is not installed; expected the extra optsched[vllm]"
        ) from None
    weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
    given = {**DEFAULTS, "load_format": "auto" if weights else "dummy", **options}
    try:
        return LLM(model=str(path), **given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: vLLM does not start ({error})") from None


def serve(
    instance: Instance,
    folder: str,
    prompt: Callable[[int], list[int]],
    options: Mapping[str, Any],
    timeout_s: float,
    progress: Callable[[int, int], None] | None,
    stop: Event,
) -> Measured:
    """Serve an instance's requests by vLLM in this process; see `optsched.files.replay.replay`.

    Parameters
    ----------
    instance : Instance
    folder : str
        The model's folder.
    prompt : callable
        The token ids of a request's prompt.
    options : mapping
        Arguments of ``vllm.LLM``.
    timeout_s : float
        Seconds after which a request is given up.
    progress : callable or None
        As for `optsched.files.replay.replay`.
    stop : threading.Event

    Returns
    -------
    Measured
    """
    engine = start(folder, options).llm_engine
    from vllm import SamplingParams

    def add(name: str, tokens: list[int], output: int) -> None:
        exact = SamplingParams(
            max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False, temperature=0
        )
        engine.add_request(name, {"prompt_token_ids": tokens}, exact)

    middle = int(np.argsort(instance.prompt_tokens)[instance.n // 2])
    with suppress(Exception):  # if it is too long it is refused again below
        add("warm-up", prompt(middle), min(8, int(instance.output_tokens[middle])))
    while engine.has_unfinished_requests():
        engine.step()
    recorder = Recorder(instance, progress)
    waiting = np.argsort(instance.release, kind="stable").tolist()[::-1]
    running: dict[str, int] = {}
    while (waiting or running) and not stop.is_set():
        while waiting and recorder.due[waiting[-1]] <= recorder.now():
            request = waiting.pop()
            recorder.late_s = max(recorder.late_s, recorder.now() - recorder.due[request])
            running[str(request)] = request
            try:
                add(str(request), prompt(request), int(instance.output_tokens[request]))
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
        over = [n for n, r in running.items() if recorder.now() - recorder.due[r] > timeout_s]
        if over:
            engine.abort_request(over)
        for name in over:
            recorder.end(running.pop(name), error=f"no end within {timeout_s:g} s")
    return recorder.measured("vllm")
