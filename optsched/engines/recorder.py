"""When the tokens of requests came from a real engine."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

import numpy as np

from optsched.files.measured import Measured
from optsched.problem.instance import Instance

_LATE_S = 0.1
"""Requests that are sent later than this make a warning."""


class Recorder:
    """When the tokens of requests came, in seconds since the replay began.

    Parameters
    ----------
    instance : Instance
    progress : callable, optional
        ``progress(ended, failed)`` is called whenever a request ends.
    """

    def __init__(self, instance: Instance, progress: Callable[[int, int], None] | None) -> None:
        self.instance, self.progress = instance, progress
        self.due = instance.release.tolist()
        self.first = np.full(instance.n, np.nan)
        self.last = np.full(instance.n, np.nan)
        self.errors: dict[int, str] = {}
        self.late_s = 0.0
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self._began = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the replay began."""
        return time.perf_counter() - self._began

    def token(self, request: int) -> None:
        """Note that some token of a request has come."""
        now = self.now()
        if np.isnan(self.first[request]):
            self.first[request] = now

        self.last[request] = now

    def end(self, request: int, tokens: int | None = None, error: str | None = None) -> None:
        """Note that a request has ended, with so many tokens or with an error."""
        wanted = int(self.instance.output_tokens[request])
        if error is None and tokens != wanted:
            error = f"answered with {tokens} of {wanted} tokens"
        if error is None and np.isnan(self.first[request]):
            error = f"found {tokens} tokens at once; expected a stream of tokens"
        with self._lock:
            if request in self._ended:
                return

            self._ended.add(request)
            if error is not None:
                # A server's words may hold sequences that a terminal obeys.
                words = " ".join(error.split())
                self.errors[request] = "".join(c if c.isprintable() else "?" for c in words)

            ended, failed = len(self._ended), len(self.errors)

        if self.progress is not None:
            self.progress(ended, failed)

    def measured(self, name: str) -> Measured:
        """Return what was measured; requests that have not ended have an error."""
        for request in range(self.instance.n):
            self.end(request, error="interrupted")
        if self.late_s > _LATE_S:
            warnings.warn(f"requests were sent up to {self.late_s:.2g} s late", stacklevel=3)

        return Measured(
            latency=self.last - self.due,
            ttft=self.first - self.due,
            name=name,
            instance_sha256=self.instance.sha256,
            errors=dict(self.errors),
        )
