"""Send the requests of an instance to a real engine, and record when their tokens come.

The engine is a server that speaks OpenAI's completions protocol with streaming, as vLLM's and
SGLang's do, or vLLM in this process (`optsched.engines.in_process`). Prompts are random token ids
of the right number, so that no two share a prefix. Outputs have their length forced by
``ignore_eos`` and ``max_tokens``.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from optsched.engines.recorder import Recorder
from optsched.engines.sending import TIMEOUT_S, VOCABULARY, Progress, Sending
from optsched.files.measured import Measured
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance

_LIST_S = 10.0
"""The max seconds for a server's list of models."""


class Engine(Protocol):
    """What serves requests and notes when their tokens come: see `connect`."""

    def serve(self, sending: Sending, progress: Progress | None, stop: threading.Event) -> Measured:
        """Serve requests at their arrivals, until all have ended or ``stop`` is set.

        Parameters
        ----------
        sending : Sending
        progress : callable or None
            See `Progress`.
        stop : threading.Event

        Returns
        -------
        Measured
        """


def connect(
    address: str, *, model: str | None = None, options: Mapping[str, Any] | None = None
) -> Engine:
    """Return a real engine that is ready to serve, for several replays one after another.

    Parameters
    ----------
    address : str
        ``http://HOST:PORT`` or ``https://HOST:PORT`` of an OpenAI-compatible server, or
        ``vllm:FOLDER``, a model's folder for vLLM in this process.
    model : str, optional
        Name of the server's model. By default the first that it lists.
    options : mapping, optional
        Arguments of ``vllm.LLM``, for vLLM in this process.

    Returns
    -------
    Engine

    Raises
    ------
    InputError
        The engine cannot be reached or does not start.
    UsageError
        A model's name for vLLM in this process, or its options for a server.
    """
    if address.startswith("vllm:"):
        if model is not None:
            raise UsageError(
                f"model: found {model!r} with vLLM in this process; expected it with a server only"
            )
        from optsched.engines.in_process import InProcess

        return InProcess(address.removeprefix("vllm:"), options or {})
    if options:
        raise UsageError(
            f"options: found {', '.join(options)} with a server; expected them with vllm:FOLDER "
            "only"
        )
    return _Server(address, model)


def replay(
    instance: Instance,
    engine: str | Engine,
    *,
    model: str | None = None,
    priority: Sequence[int] | None = None,
    timeout_s: float = TIMEOUT_S,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Measured:
    """Send an instance's requests to a real engine at their arrivals, and measure their times.

    Predictions of the instance go along, for `optsched.engines.vllm.PolicyScheduler`.

    Parameters
    ----------
    instance : Instance
        An instance in seconds. Latencies count from its arrivals, not from when requests are sent.
    engine : str or Engine
        An address as for `connect`, or what `connect` returned. Requests go there and nowhere else.
    model : str, optional
        See `connect`.
    priority : sequence of int, optional
        A priority for each request, for an engine that serves the smallest first.
    timeout_s : float
        Seconds after which a request is given up, > 0.
    vocabulary : int
        Token ids of prompts are less than this.
    seed : int
        Seed of the prompts.
    options : mapping, optional
        See `connect`.
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
        The instance is in rounds, or an argument does not go with the engine.
    InputError
        The engine cannot be reached, or an argument is out of range.
    """
    sending = Sending(instance, priority, timeout_s, vocabulary, seed)
    if isinstance(engine, str):
        engine = connect(engine, model=model, options=options)
    return engine.serve(sending, progress, stop or threading.Event())


class _Server:
    """An OpenAI-compatible server at an address."""

    def __init__(self, address: str, model: str | None) -> None:
        self.address = address
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
        self.model = model or self.first_model()

    def serve(self, sending: Sending, progress: Progress | None, stop: threading.Event) -> Measured:
        """See `Engine.serve`. Each request has a thread."""
        recorder = Recorder(sending.instance, progress)
        threads = []
        for request in sending.order:
            if stop.wait(max(0.0, recorder.due[request] - recorder.now())):
                break
            body = self._body(sending, request)
            recorder.late_s = max(recorder.late_s, recorder.now() - recorder.due[request])
            work = threading.Thread(
                target=_ask, args=(self, request, body, sending.timeout_s, recorder), daemon=True
            )
            work.start()
            threads.append(work)
        for work in threads:
            while work.is_alive() and not stop.is_set():
                work.join(0.1)
        return recorder.measured(self.model)

    def _body(self, sending: Sending, request: int) -> dict[str, Any]:
        output = int(sending.instance.output_tokens[request])
        body = {
            "model": self.model, "prompt": sending.prompt(request), "temperature": 0,
            "ignore_eos": True, "max_tokens": output, "min_tokens": output,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if sending.priority is not None:
            body["priority"] = int(sending.priority[request])
        if told := sending.told(request):
            body["vllm_xargs"] = told
        return body

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        assert self.host is not None
        return kind(self.host, self.port, timeout=timeout_s)

    def first_model(self) -> str:
        """Return the name of the first model that the server lists."""
        connection = self.connect(_LIST_S)
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
                f"{self.address}: found no answer ({error or type(error).__name__}); expected an "
                "OpenAI-compatible server"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise InputError(
                f"{self.address}: found no list of models; expected an OpenAI-compatible server, "
                "or the name of its model"
            ) from None
        finally:
            connection.close()

    def stream(self, body: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion, until its end or the timeout."""
        end = time.perf_counter() + timeout_s
        connection = self.connect(timeout_s)
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


def _ask(
    server: _Server, request: int, body: Mapping[str, Any], timeout_s: float, recorder: Recorder
) -> None:
    """Send one request, and record its tokens and its end."""
    tokens = 0
    try:
        for event in server.stream(body, timeout_s):
            if event.get("error"):
                raise InputError(f"failed: {json.dumps(event['error'])[:300]}")
            if event.get("choices"):
                recorder.token(request)
                tokens += 1
            if event.get("usage"):
                tokens = int(event["usage"]["completion_tokens"])
        recorder.end(request, tokens)
    except TimeoutError:
        recorder.end(request, error=f"no end within {timeout_s:g} s")
    except InputError as error:
        recorder.end(request, error=str(error))
    except Exception as error:  # whatever a server answers ends one request only
        recorder.end(request, error=f"broke off: {error or type(error).__name__}")
