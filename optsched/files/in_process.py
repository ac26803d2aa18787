"""vLLM in this process as the engine of a replay. Only this module needs vLLM, when it is called.

vLLM's engine for CPUs does not start in a process that has loaded numba.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from optsched.files.measured import Measured
from optsched.files.recorder import Recorder
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

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

    add("warm-up", prompt(0), 2)
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
            except ValueError as error:  # for example longer than the model's context
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
