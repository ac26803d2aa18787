"""The requests of an instance as they are sent to a real engine, and when their tokens came."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optsched.files.measured import Measured
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.notes import warn

TIMEOUT_S = 600.0
"""Default of the seconds after which a request is given up."""
FIRST_ID, VOCABULARY = 100, 10_000
"""Token ids of prompts are at least the first and, by default, less than the second."""
PREDICTED = "predicted_output_tokens"
"""What an instance's predictions are called where they are sent: ``SamplingParams.extra_args``."""
# Requests that are sent later than this make a warning.
_LATE_S = 0.1

Progress = Callable[[int, int], None]
"""``progress(ended, failed)`` is called whenever a request ends."""


@dataclass(eq=False)
class Sending:
    """The requests as `replay` sends them, and when tokens came, in seconds since `begin`.

    ``due[i]`` is when request i is to be sent, inf until the requests that it comes after have
    ended. ``errors`` says of failed requests why, and ``outputs`` has the tokens answered, as far
    as they are known.
    """

    instance: Instance
    priority: Sequence[int] | None = None
    timeout_s: float = TIMEOUT_S
    vocabulary: int = VOCABULARY
    seed: int = 0
    progress: Progress | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        n, ids = self.instance.n, self.vocabulary
        if self.instance.in_rounds:
            raise UsageError("replay: found an instance in rounds; expected one in seconds")
        if not self.timeout_s > 0:
            raise InputError(f"timeout: found {self.timeout_s!r}; expected seconds > 0")
        if ids <= FIRST_ID:
            raise InputError(f"vocabulary: found {ids!r}; expected more than {FIRST_ID}")
        if self.priority is not None and len(self.priority) != n:
            raise InputError(f"priority: found {len(self.priority)} values; expected {n}")

        self.due: list[float] = self.instance.given_release.tolist()
        self.late = f"no end within {self.timeout_s:g} s"
        self.errors: dict[int, str] = {}
        self.outputs: dict[int, list[int]] = {}
        self._prompts: dict[int, NDArray[np.int32]] = {}
        self._first, self._last = np.full(n, np.nan), np.full(n, np.nan)
        self._delay_s = 0.0
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self.begin()

    @property
    def order(self) -> list[int]:
        """The requests with given arrivals, in the order in which they arrive."""
        by_due: list[int] = np.argsort(self.due, kind="stable").tolist()
        return [request for request in by_due if self.due[request] < np.inf]

    def prompt(self, request: int) -> list[int]:
        """Return the token ids of a prompt, which begins as that of its prefix parent does.

        Behind the parent's prompt come the tokens that the engine answered, as far as it says them.
        """
        # The request and its ancestors without a prompt yet; the oldest is last.
        ancestors, instance = [request], self.instance
        parent, prefix_tokens = instance.prefix_parent, instance.prefix_tokens
        if parent is not None:
            while (ancestor := int(parent[ancestors[-1]])) >= 0 and ancestor not in self._prompts:
                ancestors.append(ancestor)

        for i in reversed(ancestors):
            # Each prompt has a generator of its own, so the order of sending changes none.
            generator = np.random.default_rng([self.seed, i])
            size = int(instance.prompt_tokens[i])
            tokens = generator.integers(FIRST_ID, self.vocabulary, size).astype(np.int32)
            if parent is not None and prefix_tokens is not None:
                parent_of_i = int(parent[i])  # none, -1, shares no tokens
                before = [*self._prompts.get(parent_of_i, ()), *self.outputs.get(parent_of_i, ())]
                shared_tokens = before[: min(size, int(prefix_tokens[i]))]
                tokens[: len(shared_tokens)] = shared_tokens
                self._prompts[i] = tokens

        return tokens.tolist()

    def predicted(self, request: int) -> dict[str, int]:
        """Return what the engine is told of a request's output: its prediction, if it has one."""
        if self.instance.predicted is None:
            return {}

        return {PREDICTED: round(float(self.instance.predicted[request]))}

    def begin(self) -> None:
        """Let the replay begin now."""
        self._begin_s = time.perf_counter()

    def now(self) -> float:
        """Return the seconds since the replay began."""
        return time.perf_counter() - self._begin_s

    def sent(self, request: int) -> float:
        """Note that a request is sent now, and return the time."""
        now = self.now()
        self._delay_s = max(self._delay_s, now - self.due[request])
        return now

    def token(self, request: int) -> None:
        """Note that some token of a request has come."""
        self._last[request] = now = self.now()
        if np.isnan(self._first[request]):
            self._first[request] = now

    def end(self, request: int, tokens: int | None = None, error: str | None = None) -> list[int]:
        """Note that a request has ended, with so many tokens or with an error.

        Return the requests that are released thereby, which are `due` from now on.
        """
        expected = int(self.instance.output_tokens[request])
        if error is None and tokens != expected:
            error = f"answered with {tokens} of {expected} tokens"
        if error is None and np.isnan(self._first[request]):
            error = f"found {tokens} tokens at once; expected a stream of tokens"
        # Threads end requests. The first end of a request counts, such as a timeout.
        with self._lock:
            if request in self._ended:
                return []

            self._ended.add(request)
            if error is not None:
                # A server's words may hold sequences that a terminal obeys.
                words = " ".join(error.split())
                self.errors[request] = "".join(c if c.isprintable() else "?" for c in words)

            ended, failed = len(self._ended), len(self.errors)
            released = self._release_followers(request) if error is None else []

        if self.progress is not None:
            self.progress(ended, failed)

        return released

    def _release_followers(self, request: int) -> list[int]:
        """Let the requests be due that come after a request and others that all have ended."""
        sessions = self.instance.sessions
        if sessions is None:
            return []

        released = []
        for k in sessions.followers(request):
            before = sessions.after[k]  # its predecessors: all must have ended, and none failed
            if self._ended.issuperset(before) and self.errors.keys().isdisjoint(before):
                self.due[k] = float(self._last[list(before)].max() + sessions.delay[k])
                released.append(k)

        return released

    def measured(self, name: str) -> Measured:
        """Return what was measured; requests that have not ended have an error.

        Requests of sessions are looked at after those that they come after, so that a failure is
        passed on to all behind it.
        """
        sessions = self.instance.sessions
        for request in range(self.instance.n) if sessions is None else sessions.order:
            failed_before = [] if sessions is None else self.errors.keys() & sessions.after[request]
            error = "interrupted"
            if failed_before:
                error = f"comes after request {min(failed_before)}, which failed"

            self.end(request, error=error)  # of those that have not ended
        if self._delay_s > _LATE_S:
            warn(f"requests were sent up to {self._delay_s:.2g} s late", stacklevel=3)

        return Measured(
            latency=self._last - self.due,
            ttft=self._first - self.due,
            name=name,
            instance_sha256=self.instance.sha256,
            requests_sha256=self.instance.requests_sha256,
            errors=dict(self.errors),
        )
