"""Whatever a server answers, a request ends in time, and what it was is said in one line."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke, one_line_error

import optsched
from optsched import Instance
from optsched.engines.replay import replay

TIMEOUT_S = 0.4
HANGS_S = 20.0
"""Who has not ended by then hangs."""

Talk = Callable[[socket.socket], None]
# One request of 3 + 2 tokens.
ONE = Instance([0.0], [3], [2], kv_capacity=100, time_unit="second")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def says(*parts: bytes) -> Talk:
    """Return a server that sends some bytes and closes the connection."""
    return lambda end: end.sendall(b"".join(parts))


def trickles(first: bytes, rest: bytes, pause_s: float = 0.02) -> Talk:
    """Return a server that repeats bytes for ever; each comes well before a timeout."""

    def talk(end: socket.socket) -> None:
        end.sendall(first)
        while True:
            end.sendall(rest)
            time.sleep(pause_s)

    return talk


def is_silent(end: socket.socket) -> None:
    """Answer nothing for 20 s."""
    time.sleep(HANGS_S)


def event(**data: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def usage(count: bytes) -> Talk:
    """Return a server that streams two tokens and tells some count of them."""
    return says(
        HEAD, 2 * TOKEN, b'data: {"usage": {"completion_tokens": ' + count + b"}}\n\n", DONE
    )


def body(content: bytes, head: bytes = b"") -> Talk:
    """Return a server that answers with some content."""
    length = str(len(content)).encode()
    return says(b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n" + head + b"\r\n", content)


@pytest.fixture
def serve() -> Iterator[Callable[[Talk], str]]:
    """Yield a function that starts a server with one way to talk, and returns its address."""
    listening = []

    def start(talk: Talk) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        listening.append(server)

        def answer(end: socket.socket) -> None:
            with end:
                try:
                    end.recv(65536)
                    talk(end)
                    end.shutdown(socket.SHUT_WR)
                    end.recv(65536)  # a close with bytes unread would cut the answer off
                except OSError:
                    pass  # the client has had enough

        def accept() -> None:
            try:
                while True:
                    end, _ = server.accept()
                    threading.Thread(target=answer, args=(end,), daemon=True).start()
            except OSError:
                pass  # the test has ended

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in listening:
        server.close()


def in_time(work: Callable[[], Any]) -> Any:
    """Return what a function returns, which must not hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive(), "hangs"
    return results[0]


LATE = "no end within 0.4 s"
TOO_LONG = "broke off: found a line of more than 1048576 bytes"
NO_COUNT = "expected an integer >= 0"


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        # Bytes that never end, in every part of an answer: none of them stops the clock.
        pytest.param(is_silent, LATE, id="silent"),
        pytest.param(trickles(b"", b"x"), LATE, id="status without an end"),
        pytest.param(trickles(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), LATE, id="continue for ever"),
        pytest.param(trickles(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.1), LATE, id="slow headers"),
        pytest.param(trickles(b"HTTP/1.1 200 OK\r\nA: ", b"x"), LATE, id="header without an end"),
        pytest.param(trickles(HEAD, b"x"), LATE, id="line without an end"),
        pytest.param(trickles(HEAD, b": still here\n\n"), LATE, id="comments for ever"),
        pytest.param(trickles(HEAD, TOKEN), LATE, id="tokens for ever"),
        pytest.param(trickles(CHUNKED, b"0"), LATE, id="size of a chunk without an end"),
        pytest.param(trickles(CHUNKED, b"1\r\nx\r\n"), LATE, id="chunks without a line feed"),
        pytest.param(trickles(CHUNKED + b"0\r\n", b"A: b\r\n"), LATE, id="trailers for ever"),
        pytest.param(
            trickles(b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n", b"", 0.1),
            LATE,
            id="refusal without its words",
        ),
        # More bytes than anyone needs.
        pytest.param(says(HEAD, b"data: ", b"x" * (1 << 21), b"\n\n"), TOO_LONG, id="long line"),
        pytest.param(
            says(CHUNKED, b"200000\r\n", b"x" * 0x200000, b"\r\n0\r\n\r\n"),
            TOO_LONG,
            id="long chunk",
        ),
        pytest.param(
            trickles(HEAD, (b": " + b"x" * 9000 + b"\n") * 99, 0.0),
            "more than 1179648 bytes",
            id="many lines",
        ),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\nA: ", b"x" * 100_000, b"\r\n\r\n"),
            "broke off",
            id="long header",
        ),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 500, b"\r\n"), "broke off", id="many headers"
        ),
        # What is no HTTP, no stream, no JSON or no event.
        pytest.param(says(b"SSH-2.0-OpenSSH\r\n"), "broke off", id="no HTTP"),
        pytest.param(says(b""), "broke off", id="closed at once"),
        pytest.param(says(HEAD, TOKEN), "answered with 1 of 2", id="closed midway"),
        pytest.param(says(CHUNKED, b"ffff\r\ndata: {"), "broke off", id="closed within a chunk"),
        pytest.param(
            says(CHUNKED, b"-5\r\nx\r\n0\r\n\r\n"), "broke off", id="chunk of negative size"
        ),
        pytest.param(says(CHUNKED, b"zz\r\nx\r\n0\r\n\r\n"), "of 2 tokens", id="chunk of no size"),
        pytest.param(
            body(b"\x1f\x8b\x08\x00junk", b"Content-Encoding: gzip\r\n"),
            "answered with 0 of 2",
            id="compressed junk",
        ),
        pytest.param(
            says(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
            "refused with status 302",
            id="redirect to itself",
        ),
        pytest.param(
            body(b"<html>busy</html>", b"Content-Type: text/html\r\n"),
            "answered with 0 of 2",
            id="a page",
        ),
        pytest.param(
            body(b'{"choices": [{"text": "a"}]}', b"Content-Type: application/json\r\n"),
            "answered with 0 of 2",
            id="no stream",
        ),
        pytest.param(
            says(HEAD, b"data: ", b"[" * 100_000, b"\n\n"), "nested too deeply", id="deep JSON"
        ),
        pytest.param(says(HEAD, b"data: \xff\xfe\n\n"), "broke off", id="no UTF-8"),
        pytest.param(says(HEAD, b'data: {"x": NaN}\n\n'), "NaN", id="NaN"),
        pytest.param(says(HEAD, b'data: {"x": 1e999}\n\n'), "1e999", id="infinite"),
        pytest.param(says(HEAD, b'data: "text"\n\n'), "found no event", id="a text"),
        pytest.param(
            says(HEAD, event(choices={"a": 1}, usage=[]), DONE),
            "answered with 1 of 2",
            id="an object of choices",
        ),
        pytest.param(says(HEAD, event(usage="many")), NO_COUNT, id="a text as usage"),
        pytest.param(says(HEAD, event(usage={"x": 1})), NO_COUNT, id="usage without a count"),
        *(
            pytest.param(usage(count), NO_COUNT, id=f"{count[:9]!r} tokens")
            for count in (b"-1", b"2.5", b'"2"', b"true", b"[2]", b"null", b"{}")
        ),
        pytest.param(usage(b"9" * 5000), "digits", id="a count of many digits"),
        pytest.param(usage(b"1" + b"0" * 100), "answered with 1000", id="a huge count"),
    ],
)
def test_a_request_ends_in_time_and_says_why(
    serve: Callable[[Talk], str], talk: Talk, words: str, tmp_path: Path
) -> None:
    """What the server does when it is sent the request, and words of the error."""
    address = serve(talk)
    found = in_time(lambda: replay(ONE, address, model="m", timeout_s=TIMEOUT_S))
    assert words in found.errors[0]
    assert len(found.errors[0]) < 600  # no answer is quoted whole
    optsched.write_measured(found, tmp_path / "m.json")
    assert optsched.read_measured(tmp_path / "m.json").errors == found.errors


def test_a_request_ends_in_time_where_the_server_reads_nothing() -> None:
    # A prompt of 300,000 token ids is some 2 MB, more than the system keeps for the server.
    large = Instance([0.0], [300_000], [2], kv_capacity=10**6, time_unit="second")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        found = in_time(lambda: replay(large, address, model="m", timeout_s=TIMEOUT_S))
    assert found.errors == {0: LATE}


def test_a_request_ends_in_time_where_a_handshake_never_ends(
    serve: Callable[[Talk], str],
) -> None:
    # The first bytes of a TLS record of 16 KiB, whose rest comes byte by byte.
    address = serve(trickles(b"\x16\x03\x03\x40\x00", b"x")).replace("http:", "https:")
    found = in_time(lambda: replay(ONE, address, model="m", timeout_s=TIMEOUT_S))
    assert found.errors == {0: LATE}


def test_a_host_whose_name_is_looked_up_for_ever_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **more: go.wait(HANGS_S) and [])
    found = in_time(lambda: replay(ONE, "http://slow.invalid", model="m", timeout_s=TIMEOUT_S))
    go.set()
    assert found.errors == {0: LATE}


def test_a_server_s_words_do_nothing_to_a_terminal(
    serve: Callable[[Talk], str], tmp_path: Path
) -> None:
    busy = b"\x1b[2J[red]busy[/red]\x07"
    address = serve(says(b"HTTP/1.1 429 No\r\nContent-Length: 21\r\n\r\n", busy))
    optsched.write_instance(ONE, tmp_path / "i.json")
    words = ("--model", "m", "-o", tmp_path / "m.json")
    done = invoke("gpu", "replay", tmp_path / "i.json", "--server", address, *words)
    assert done.exit_code == 4
    assert "refused with status 429: ?[2J[red]busy[/red]?" in done.stdout


NO_LIST = "found no list of models; expected an OpenAI-compatible server"


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        pytest.param(body(b"[" * 200_000 + b"]" * 200_000), NO_LIST, id="deep"),
        pytest.param(body(b"<html>"), NO_LIST, id="page"),
        pytest.param(body(b"\xff\xfe{"), NO_LIST, id="no UTF-8"),
        pytest.param(body(b'{"data": []}'), NO_LIST, id="empty"),
        pytest.param(body(b'{"data": [{"id": null}]}'), NO_LIST, id="no name"),
        pytest.param(body(b'{"data": [{"id": "\\u001b[2J"}]}'), NO_LIST, id="name of controls"),
        pytest.param(body(b'{"data": [{"id": "' + b"x" * 999 + b'"}]}'), NO_LIST, id="long name"),
        pytest.param(body(b'{"data": [{"id": 1e999}]}'), NO_LIST, id="number"),
        pytest.param(body(b"[1, 2]"), NO_LIST, id="list"),
        pytest.param(body(b"x" * (1 << 21)), "found no answer (found more than", id="large"),
        pytest.param(
            trickles(HEAD, b"x" * 65536, 0.0), "found no answer (found more", id="endless"
        ),
        pytest.param(
            says(b"HTTP/1.1 302 Found\r\nLocation: /v1/models\r\n\r\n"),
            "status 302",
            id="redirect to itself",
        ),
        pytest.param(says(b""), "found no answer (", id="closed"),
        pytest.param(
            says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), NO_LIST, id="cut short"
        ),
        pytest.param(says(CHUNKED, b"zz\r\n"), "found no answer (", id="chunk of no size"),
    ],
)
def test_a_list_of_models_that_is_none_is_refused_in_one_line(
    serve: Callable[[Talk], str], talk: Talk, words: str, tmp_path: Path
) -> None:
    """What the server does when it is asked for its models, and words of the error."""
    optsched.write_instance(ONE, tmp_path / "i.json")
    out = tmp_path / "m.json"
    done = in_time(
        lambda: invoke("gpu", "replay", tmp_path / "i.json", "--server", serve(talk), "-o", out)
    )
    assert words in one_line_error(done)
    assert not out.exists()
