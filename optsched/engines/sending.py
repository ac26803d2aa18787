"""The requests of an instance as they are sent to a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance

TIMEOUT_S = 600.0
"""Default of the seconds after which a request is given up."""
FIRST_ID, VOCABULARY = 100, 10_000
"""Token ids of prompts are at least the first and, by default, less than the second."""
PREDICTED = "predicted_output_tokens"
"""What an instance's predictions are called where they are sent: ``SamplingParams.extra_args``."""

Progress = Callable[[int, int], None]
"""``progress(ended, failed)`` is called whenever a request ends."""


@dataclass(frozen=True, eq=False)
class Sending:
    """The requests of an instance, as they are sent.

    Parameters
    ----------
    instance : Instance
    priority : sequence of int, optional
        See `optsched.engines.replay.replay`, as for the other parameters.
    timeout_s : float
    vocabulary, seed : int
    """

    instance: Instance
    priority: Sequence[int] | None = None
    timeout_s: float = TIMEOUT_S
    vocabulary: int = VOCABULARY
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instance.in_rounds:
            raise UsageError("replay: found an instance in rounds; expected one in seconds")
        if not self.timeout_s > 0:
            raise InputError(f"timeout: found {self.timeout_s!r}; expected seconds > 0")
        if self.vocabulary <= FIRST_ID:
            raise InputError(
                f"vocabulary: found {self.vocabulary!r}; expected more than {FIRST_ID}"
            )

        if self.priority is not None and len(self.priority) != self.instance.n:
            raise InputError(
                f"priority: found {len(self.priority)} values; expected {self.instance.n}"
            )

    @property
    def order(self) -> list[int]:
        """The requests in the order in which they arrive."""
        found: list[int] = np.argsort(self.instance.release, kind="stable").tolist()
        return found

    def prompt(self, request: int) -> list[int]:
        """Return the token ids of a prompt."""
        generator = np.random.default_rng([self.seed, request])
        size = int(self.instance.prompt_tokens[request])
        found: list[int] = generator.integers(FIRST_ID, self.vocabulary, size).tolist()
        return found

    def told(self, request: int) -> dict[str, int]:
        """Return what the engine is told of a request's output: its prediction, if it has one."""
        if self.instance.predicted is None:
            return {}

        return {PREDICTED: round(float(self.instance.predicted[request]))}
