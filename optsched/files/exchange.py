"""One request to a server that is not trusted: it ends in time and takes little memory."""

import http.client
import io
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from optsched.problem.errors import InputError

LINE_BYTES = 1 << 20
"""The max size of a line of an answer, and of an answer that is read whole."""


class Exchange(io.RawIOBase):
    """A connection for one request and its answer, with a point in time at which it breaks off.

    `http.client` speaks over it as over a socket, whose own timeout begins anew with each byte.
    `secure`: whether by HTTPS. `timeout_s` is for all of it, and `max_bytes` for the answer.
    """

    def __init__(
        self, secure: bool, host: str, port: int | None, *, timeout_s: float, max_bytes: int
    ) -> None:
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._deadline = time.perf_counter() + timeout_s
        self._connection = kind(host, port, timeout=timeout_s)
        self._max_bytes, self._left_bytes = max_bytes, max_bytes
        self._connection.connect()
        # `http.client` now reads and writes through this object, which stands before the socket.
        self._socket: socket.socket = self._connection.sock
        self._connection.sock = self

    def answer(
        self, method: str, path: str, body: str | None = None, head: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """Send the request, and return the answer once its head has come."""
        self._connection.request(method, path, body, head or {})
        return self._connection.getresponse()

    def sendall(self, data: bytes) -> None:
        """Send bytes, as a socket does."""
        self._set_timeout()
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what reads the answer, as a socket does."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return True, as `io.RawIOBase` asks for."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive some bytes, as `io.RawIOBase` does."""
        self._set_timeout()
        received = self._socket.recv_into(buffer)
        self._left_bytes -= received

        if self._left_bytes < 0:
            raise InputError(
                f"broke off: found more than {self._max_bytes} bytes; expected a shorter answer"
            )

        return received

    def close(self) -> None:
        """Do nothing: `http.client` calls this before it has read the answer."""

    def __exit__(self, *error: object) -> None:
        """Close the connection."""
        self._socket.close()

    def _set_timeout(self) -> None:
        """Let the next operation of the socket take no longer than until the deadline."""
        left_s = self._deadline - time.perf_counter()
        if left_s <= 0:
            raise TimeoutError("timed out")

        self._socket.settimeout(left_s)


def lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of an answer."""
    while line := answer.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            raise InputError(
                f"broke off: found a line of more than {LINE_BYTES} bytes; expected shorter ones"
            )

        yield line


def whole(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of a short answer."""
    body = answer.read(LINE_BYTES + 1)
    if len(body) > LINE_BYTES:
        raise InputError(f"found more than {LINE_BYTES} bytes; expected a shorter answer")

    return body
