"""What the checkers of certificates share: checked integers, and steps that are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_BITS = 1024
"""Size of an integer beyond which a certificate is refused: about 300 digits."""
MAX_STEPS = 1_000_000_000
"""Steps, of which a second allows a million or more, beyond which a certificate is refused."""


class Rejected(ValueError):
    """The certificate does not prove its claim; the message says why."""


class Budget:
    """The steps that a check may still take."""

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Take that many steps, or refuse to."""
        self.left -= steps
        if self.left < 0:
            raise Rejected(f"more than {MAX_STEPS} steps; too large to check")


@dataclass(frozen=True)
class Columns:
    """What the checker knows of an instance, in Python integers.

    ``offset`` is 1 where the newest token counts ("generated" accounting), else 0; ``batch``,
    ``prefill`` and ``running`` are the limits C, P and R_max.
    """

    arrival: list[int]
    prompt: list[int]
    output: list[int]
    capacity: int
    offset: int
    batch: int | None = None
    prefill: int | None = None
    running: int | None = None
    hybrid: bool = True


def columns_of(instance: Any) -> Columns:
    """Return the columns of an `optsched.problem.instance.Instance` in rounds."""
    expect(instance.time_unit == "round", "the instance is in seconds; rounds are right")
    limits = instance.limits
    return Columns(
        instance.arrival.tolist(), instance.prompt_tokens.tolist(), instance.output_tokens.tolist(),
        int(instance.kv_capacity), 1 if instance.kv_accounting == "generated" else 0,
        limits.max_batch_tokens, limits.max_prefill_tokens, limits.max_running,
        instance.hybrid_batching is not False,
    )  # fmt: skip


def expect(right: bool, message: str) -> None:
    """Reject the certificate unless it is right."""
    if not right:
        raise Rejected(message)


def same(found: Any, right: Any, place: str) -> None:
    """Reject the certificate unless a value, type included, is the one that is right."""
    expect(
        type(found) is type(right) and found == right, f"{place}: {found!r:.80}; {right!r} is right"
    )


def integer(value: Any, place: str) -> int:
    """Return a value that is an integer, no bool and not of thousands of digits."""
    if type(value) is not int:
        raise Rejected(f"{place}: {value!r:.60} is no integer")
    expect(value.bit_length() <= MAX_BITS, f"{place}: more than {MAX_BITS} bits")
    return value


def integers(values: Any, place: str) -> list[int]:
    """Return a list of such integers."""
    expect(isinstance(values, list), f"{place}: no list")
    return [integer(v, place) for v in values]
