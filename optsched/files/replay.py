"""Send the requests of an instance to a real engine, and record when their tokens come.

The engine is a server that speaks OpenAI's completions protocol with streaming, as vLLM's and
SGLang's do, or vLLM in this process (`optsched.files.in_process`). Prompts are random token ids of
the right number, so that no two share a prefix. Outputs have their length forced by ``ignore_eos``
and ``max_tokens``.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from optsched.files.measured import Measured
from optsched.files.recorder import Recorder
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance

_LIST_S = 10.0
"""The max seconds for a server's list of models."""
TIMEOUT_S = 600.0
"""Default of the seconds after which a request is given up."""
FIRST_ID, VOCABULARY = 100, 10_000
"""Token ids of prompts are at least the first and, by default, less than the second."""


def replay(
    instance: Instance,
    engine: str,
    *,
    model: str | None = None,
    timeout_s: float = TIMEOUT_S,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> Measured:
    """Send an instance's requests to a real engine at their arrivals, and measure their times.

    Parameters
    ----------
    instance : Instance
        An instance in seconds. Latencies count from its arrivals, not from when requests are sent.
    engine : str
        ``http://HOST:PORT`` or ``https://HOST:PORT`` of an OpenAI-compatible server, or
        ``vllm:FOLDER``, a model's folder for vLLM in this process. Requests go to that address and
        nowhere else.
    model : str, optional
        Name of the server's model. By default the first that it lists.
    timeout_s : float
        Seconds after which a request is given up, > 0.
    vocabulary : int
        Token ids of prompts are less than this.
    seed : int
        Seed of the prompts.
    options : mapping, optional
        Arguments of ``vllm.LLM``, for vLLM in this process.
    progress : callable, optional
        ``progress(ended, failed)`` is called whenever a request ends.
    stop : threading.Event, optional
        When it is set, the replay ends, and what was measured is kept.

    Returns
    -------
    Measured
        Requests that failed, timed out or had another number of tokens are in ``errors``.

    Raises
    ------
    UsageError
        The instance is in rounds.
    InputError
        The engine cannot be reached, or an argument is out of range.
    """
    if instance.in_rounds:
        raise UsageError("replay: found an instance in rounds; expected one in seconds")
    if not timeout_s > 0:
        raise InputError(f"timeout: found {timeout_s!r}; expected seconds > 0")
    if vocabulary <= FIRST_ID:
        raise InputError(f"vocabulary: found {vocabulary!r}; expected more than {FIRST_ID}")
    stop = stop or threading.Event()

    def prompt(request: int) -> list[int]:
        generator = np.random.default_rng([seed, request])
        size = int(instance.prompt_tokens[request])
        found: list[int] = generator.integers(FIRST_ID, vocabulary, size).tolist()
        return found

    if engine.startswith("vllm:"):
        from optsched.files.in_process import serve

        folder = engine.removeprefix("vllm:")
        return serve(instance, folder, prompt, dict(options or {}), timeout_s, progress, stop)
    server = _Server(engine, timeout_s)
    name = model or server.first_model()
    recorder = Recorder(instance, progress)
    threads = []
    for request in np.argsort(instance.release, kind="stable").tolist():
        if stop.wait(max(0.0, recorder.due[request] - recorder.now())):
            break
        body = {
            "model": name, "prompt": prompt(request), "temperature": 0, "ignore_eos": True,
            "max_tokens": int(instance.output_tokens[request]),
            "min_tokens": int(instance.output_tokens[request]),
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        recorder.late_s = max(recorder.late_s, recorder.now() - recorder.due[request])
        work = threading.Thread(target=_ask, args=(server, request, body, recorder), daemon=True)
        work.start()
        threads.append(work)
    for work in threads:
        while work.is_alive() and not stop.is_set():
            work.join(0.1)
    return recorder.measured(name)


class _Server:
    """An OpenAI-compatible server at an address."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self.timeout_s = address, timeout_s
        try:
            parts = urlsplit(address)
            self.host, self.port = parts.hostname, parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not self.host:
            raise InputError(
                f"engine: found {address!r}; expected http://HOST:PORT, https://HOST:PORT or "
                "vllm:FOLDER"
            )
        self.secure = parts.scheme == "https"
        self.path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        assert self.host is not None
        return kind(self.host, self.port, timeout=timeout_s)

    def first_model(self) -> str:
        """Return the name of the first model that the server lists."""
        connection = self.connect(min(self.timeout_s, _LIST_S))
        try:
            connection.request("GET", f"{self.path}/models")
            answer = connection.getresponse()
            if answer.status != 200:
                raise InputError(
                    f"{self.address}: found status {answer.status} for {self.path}/models; "
                    "expected an OpenAI-compatible server"
                )
            return str(json.loads(answer.read())["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            raise InputError(
                f"{self.address}: no answer ({error or type(error).__name__}); expected an "
                "OpenAI-compatible server"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise InputError(
                f"{self.address}: found no list of models; expected an OpenAI-compatible server, "
                "or the name of its model"
            ) from None
        finally:
            connection.close()

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion, until its end or the timeout."""
        end = time.perf_counter() + self.timeout_s
        connection = self.connect(self.timeout_s)
        try:
            connection.connect()
            socket = connection.sock  # the connection forgets it once the answer has begun
            head = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            connection.request("POST", f"{self.path}/completions", json.dumps(body), head)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(300).decode(errors="replace")
                raise InputError(f"refused with status {answer.status}: {text}")
            while line := answer.readline():
                left = end - time.perf_counter()
                if left <= 0:
                    raise TimeoutError
                socket.settimeout(left)
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if not isinstance(event, dict):
                        raise InputError("broke off: found no event; expected a JSON object")
                    yield event
        finally:
            connection.close()


def _ask(server: _Server, request: int, body: Mapping[str, Any], recorder: Recorder) -> None:
    """Send one request, and record its tokens and its end."""
    tokens = 0
    try:
        for event in server.stream(body):
            if event.get("error"):
                raise InputError(f"failed: {json.dumps(event['error'])[:300]}")
            if event.get("choices"):
                recorder.token(request)
                tokens += 1
            if event.get("usage"):
                tokens = int(event["usage"]["completion_tokens"])
        recorder.end(request, tokens)
    except TimeoutError:
        recorder.end(request, error=f"no end within {server.timeout_s:g} s")
    except InputError as error:
        recorder.end(request, error=str(error))
    except Exception as error:  # whatever a server answers ends one request only
        recorder.end(request, error=f"broke off: {error or type(error).__name__}")
