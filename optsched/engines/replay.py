"""Send the requests of an instance to a real engine, and record when their tokens come.

The engine is a server that speaks OpenAI's completions protocol with streaming, as vLLM's and
SGLang's do, or vLLM in this process (`optsched.engines.in_process`). Prompts are random token ids
of the right number, which share the prefixes that the instance says, and none otherwise. Outputs
have their length forced by ``ignore_eos`` and ``max_tokens``. Requests that come after others are
sent when these have ended and the delay has passed.
"""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from optsched.engines.sending import TIMEOUT_S, VOCABULARY, Progress, Sending
from optsched.files.exchange import LINE_BYTES, Exchange, lines, whole
from optsched.files.measured import Measured
from optsched.files.read_write import as_instance
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.text_files import parse_json

# The max seconds for a server's list of models, and those after which nobody waits any more.
_LIST_S, _GRACE_S = 10.0, 1.0
# The max size of what a server sends for each token that was asked for.
_TOKEN_BYTES = 1 << 16
# The max length of a model's name.
_NAME = 200


class Engine(Protocol):
    """What serves requests and notes when their tokens come: see `connect`."""

    def serve(self, sending: Sending) -> Measured:
        """Serve requests at their arrivals, until all have ended or ``sending.stop`` is set.

        Parameters
        ----------
        sending : Sending
            What is sent, and told of tokens and ends.

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
    """
    if address.startswith("vllm:"):
        if model is not None:
            what_is_found = f"model: found {model!r} with vLLM in this process"
            raise UsageError(f"{what_is_found}; expected it with a server only")

        from optsched.engines.in_process import InProcess

        return InProcess(address.removeprefix("vllm:"), options or {})

    if options:
        what_is_found = f"options: found {', '.join(options)} with a server"
        raise UsageError(f"{what_is_found}; expected them with vllm:FOLDER only")

    return _Server(address, model)


def replay(
    instance: Instance | str | Path,
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
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
        An instance in seconds. Latencies count from its arrivals, or from when requests are
        released that come after others, and not from when they are sent.
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
    instance = as_instance(instance)
    events = (progress, stop or threading.Event())
    sending = Sending(instance, priority, timeout_s, vocabulary, seed, *events)
    if isinstance(engine, str):
        engine = connect(engine, model=model, options=options)

    return engine.serve(sending)


class _Server:
    """An OpenAI-compatible server at an address."""

    def __init__(self, address: str, model: str | None) -> None:
        self.address = address
        try:
            parts = urlsplit(address)
            self.host, self.port = parts.hostname, parts.port
        except ValueError:
            # A port that is no number, for example: refused below, as nothing names a scheme.
            parts = urlsplit("")

        if parts.scheme not in ("http", "https") or not self.host:
            ways = "http://HOST:PORT, https://HOST:PORT or vllm:FOLDER"
            raise InputError(f"engine: found {address!r}; expected {ways}")

        self.secure = parts.scheme == "https"
        # The address may end with /v1 or not.
        self.path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.model = model or self._first_model()

    def serve(self, sending: Sending) -> Measured:
        """See `Engine.serve`. Each request has a thread, from when it is released."""
        sending.begin()
        stop = sending.stop
        threads: list[tuple[int, float, threading.Thread]] = []

        def send(request: int) -> None:
            """Start a request's thread, and note when nobody waits for it any more."""
            give_up_s = max(sending.now(), sending.due[request]) + sending.timeout_s + _GRACE_S
            thread = threading.Thread(target=ask_when_due, args=(request,), daemon=True)
            thread.start()
            threads.append((request, give_up_s, thread))

        def ask_when_due(request: int) -> None:
            """Send a request when it is due, and then those that its end releases."""
            if not stop.wait(max(0.0, sending.due[request] - sending.now())):
                for follower in self._ask(sending, request):
                    send(follower)

        # In the order of arrivals. Those that come after others are sent when these have ended.
        for request in sending.order:
            if stop.wait(max(0.0, sending.due[request] - sending.now())):
                break

            send(request)

        # A thread sends what its end releases before it ends, so the list grows while it is read.
        # Names of hosts may be looked up and several addresses tried for longer than the timeout,
        # where nobody can break off, so that the wait has an end of its own.
        for request, give_up_s, thread in threads:
            while thread.is_alive() and not stop.is_set() and sending.now() < give_up_s:
                thread.join(0.1)
            # Of a request that has ended, this changes nothing (`Sending.end`).
            if not stop.is_set():
                sending.end(request, error=sending.late)

        return sending.measured(self.model)

    def _body(self, sending: Sending, request: int) -> dict[str, Any]:
        """Return the JSON body of a request: exactly its number of tokens, streamed.

        The last event counts them (``include_usage``). Predictions go where vLLM's server has its
        own arguments, and prompts that go on from others need the tokens that were answered.
        """
        output = int(sending.instance.output_tokens[request])
        body = {"model": self.model, "prompt": sending.prompt(request), "temperature": 0}
        body |= {"ignore_eos": True, "max_tokens": output, "min_tokens": output}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sending.priority is not None:
            body["priority"] = int(sending.priority[request])
        if predicted := sending.predicted(request):
            body["vllm_xargs"] = predicted
        if sending.instance.prefix_parent is not None:
            body["return_token_ids"] = True

        return body

    def _open(self, timeout_s: float, max_bytes: int) -> Exchange:
        """Connect for one request."""
        assert self.host is not None
        return Exchange(self.secure, self.host, self.port, timeout_s=timeout_s, max_bytes=max_bytes)

    def _first_model(self) -> str:
        """Return the name of the first model that the server lists."""
        expected, path = "expected an OpenAI-compatible server", f"{self.path}/models"
        try:
            with self._open(_LIST_S, 2 * LINE_BYTES) as exchange:
                answer = exchange.answer("GET", path)
                status, body = answer.status, whole(answer)
        except (InputError, OSError, http.client.HTTPException, UnicodeError) as error:
            words = str(error) or type(error).__name__
            raise InputError(f"{self.address}: found no answer ({words}); {expected}") from None

        if status != 200:
            raise InputError(f"{self.address}: found status {status} for {path}; {expected}")

        try:
            name = parse_json(body.decode())["data"][0]["id"]
            if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME:
                raise ValueError
        except (InputError, ValueError, LookupError, TypeError):
            raise InputError(
                f"{self.address}: found no list of models; {expected}, or the name of its model"
            ) from None

        return name

    def _ask(self, sending: Sending, request: int) -> list[int]:
        """Send one request, note its tokens and its end, and return what that releases."""
        tokens, body = 0, self._body(sending, request)
        sending.sent(request)
        try:
            for event in self._events(body, sending.timeout_s):
                if event.get("error"):
                    raise InputError(f"failed: {json.dumps(event['error'])[:300]}")
                if event.get("choices"):
                    sending.token(request)
                    tokens += 1
                    sending.outputs.setdefault(request, []).extend(_token_ids(event["choices"]))
                # The last event counts the tokens, of which an event may hold several.
                if usage := event.get("usage"):
                    n_tokens = usage.get("completion_tokens") if isinstance(usage, dict) else usage
                    if type(n_tokens) is not int or n_tokens < 0:
                        what_is_found = f"broke off: completion_tokens: found {str(n_tokens)[:40]}"
                        raise InputError(f"{what_is_found}; expected an integer >= 0")

                    tokens = n_tokens

            return sending.end(request, tokens)
        except TimeoutError:
            return sending.end(request, error=sending.late)
        except InputError as error:
            return sending.end(request, error=str(error))
        except Exception as error:  # whatever a server answers ends one request only
            return sending.end(request, error=f"broke off: {error or type(error).__name__}")

    def _events(self, body: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion, until its end or the timeout.

        An event is a line ``data: JSON``, and the last one is ``data: [DONE]``. Other lines say
        nothing of tokens.
        """
        max_bytes = LINE_BYTES + _TOKEN_BYTES * int(body["max_tokens"])
        with self._open(timeout_s, max_bytes) as exchange:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            answer = exchange.answer("POST", f"{self.path}/completions", json.dumps(body), headers)
            if answer.status != 200:
                text = answer.read(300).decode(errors="replace")
                raise InputError(f"refused with status {answer.status}: {text}")

            for line in lines(answer):
                if not line.startswith(b"data:"):
                    continue

                data = line[5:].strip()
                if data == b"[DONE]":
                    return

                try:
                    event = parse_json(data.decode())
                except InputError as error:
                    raise InputError(f"broke off: {error}") from None

                if not isinstance(event, dict):
                    raise InputError("broke off: found no event; expected a JSON object")

                yield event


def _token_ids(choices: Any) -> list[int]:
    """Return the ids of an event's tokens, or none if the server does not say them."""
    first = choices[0] if isinstance(choices, list) else None
    ids = first.get("token_ids") if isinstance(first, dict) else None
    return [i for i in ids if type(i) is int and 0 <= i < 1 << 31] if isinstance(ids, list) else []
