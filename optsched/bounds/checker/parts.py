"""What the checkers of certificates share: checked integers, and a count of steps."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.fields import unknown_fields

Ints = NDArray[np.int64]
Cells = NDArray[np.int32]
Masks = NDArray[np.uint64]
Bytes = NDArray[np.uint8]
MAX_BITS = 1024
"""Max size of an integer in a certificate, about 300 digits."""
MAX_STEPS = 1_000_000_000
"""Max steps of a check. A second allows a million steps or more."""
COMPILED = 8
"""The number of compiled steps that count as one, rounded up, by default."""


class Rejected(ValueError):
    """The certificate does not prove its claim; the message says why."""


class TooLarge(Rejected):
    """The check would take too many steps or too much memory, so nothing is known of the claim."""


class Budget:
    """The steps that a check may still take.

    Before a loop its caller counts a rough number of steps by request, cell or the like.
    """

    def __init__(self, steps: int | None = None, per_step: int = COMPILED) -> None:
        self.steps = self.left = MAX_STEPS if steps is None else steps
        self.per_step = per_step  # compiled ones

    def spend(self, steps: int) -> None:
        """Count some steps, if possible before they are taken."""
        self.left -= steps
        if self.left < 0:
            raise TooLarge(f"found more than {self.steps} steps; too large to check")

    @property
    def compiled(self) -> int:
        """The compiled steps that a check may still take. A loop that takes more must end."""
        return self.per_step * self.left

    def spend_compiled(self, steps: int) -> None:
        """Count some compiled steps that were taken, since they are known only afterwards.

        They count rounded up: one more than `compiled` rejects the certificate, and so what a loop
        that ended early has left undone is never taken for a result.
        """
        self.spend(-(-steps // self.per_step))


class Unlimited(Budget):
    """What a prover may take: as many steps as its time allows."""

    def __init__(self) -> None:
        super().__init__(1 << 50)

    def spend(self, steps: int) -> None:
        """Count nothing."""


@dataclass(frozen=True)
class Limits:
    """How large what is made of a period of a ramp leaf may become.

    Nodes and arcs are of a level, and cells of 4 bytes each of its tracker's states. ``labels`` are
    different sets of kinds on the arcs of the levels so far, and ``rest`` arcs that are made until
    `Period.refine` looks whether to go on. A ``layer`` of an enumeration has so many labels before
    any is deleted. ``ways`` to join the clock has a label at first, and at most.
    """

    nodes: int = 60_000_000
    arcs: int = 240_000_000
    cells: int = 600_000_000
    labels: int = 1_000_000
    rest: int = 1_000_000
    layer: int = 8_000_000
    layer_bytes: int = 3 * 2**30
    table_bytes: int = 3 * 2**30
    ways: tuple[int, int] = (64, 2**20)


class Requests(NamedTuple):
    """What a period's replay needs of its requests: the different ones, and how many are alike."""

    kinds: list[tuple[int, int, int]]  # arrival, peak, floor
    copies: list[int]
    capacity: int
    clock: int  # the last round with one, 0 for none


@dataclass(frozen=True)
class Columns:
    """What the checker reads of an instance, in Python integers.

    ``offset`` is 1 where the newest token counts ("generated" accounting), else 0. ``block`` has
    the tokens of a KV block; bounds need not know it, since it only takes room away. ``batch``,
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
    block: int = 1


def columns_of(instance: Any) -> Columns:
    """Return the columns of an `optsched.problem.instance.Instance` in rounds."""
    expect(instance.time_unit == "round", "instance: found one in seconds; expected one in rounds")
    expect_known(instance)
    limits, offset = instance.limits, 1 if instance.kv_accounting == "generated" else 0
    # In the order of the fields of `Columns`.
    return Columns(
        instance.release_times.tolist(),
        instance.prompt_tokens.tolist(),
        instance.output_tokens.tolist(),
        int(instance.kv_capacity),
        offset,
        limits.max_batch_tokens,
        limits.max_prefill_tokens,
        limits.max_running,
        instance.hybrid_batching is not False,
        int(instance.kv_block_tokens),
    )


def expect(right: bool, message: str) -> None:
    """Reject the certificate with a message unless a condition is true."""
    if not right:
        raise Rejected(message)


def expect_fields(found: Any, place: str, names: Collection[str]) -> None:
    """Reject the certificate unless a value is an object of just these fields."""
    *others, last = names
    right, expected = isinstance(found, dict) and set(found) == {*names}, f"{last} alone"
    if others:
        expected = f"{', '.join(others)} and {last}"

    at = f"{place}: " if place else ""
    expect(right, f"{at}found other fields; expected {expected}")


def expect_known(instance: Any, others: frozenset[str] = frozenset()) -> None:
    """Reject the certificate if its instance has a field that the proofs do not allow for.

    `others` are fields that some of them do.
    """
    new = ", ".join(name for name in unknown_fields(instance) if name not in others)
    expect(not new, f"instance: found {new}, for which nothing is proved; expected no such field")


def same(found: Any, right: Any, place: str) -> None:
    """Reject the certificate unless a value and its type are the expected ones."""
    expect(
        type(found) is type(right) and found == right,
        f"{place}: found {found!r:.80}; expected {right!r}",
    )


def integer(value: Any, place: str) -> int:
    """Return a value after checking that it is an integer, no bool, and of few enough digits."""
    if type(value) is not int:
        raise Rejected(f"{place}: found {value!r:.60}; expected an integer")

    expect(
        value.bit_length() <= MAX_BITS, f"{place}: found more than {MAX_BITS} bits; expected fewer"
    )
    return value


def integers(
    values: Any, place: str, *, count: int | None = None, highest: int | None = None
) -> list[int]:
    """Return a list after checking that it holds such integers, so many, from 0 to the highest.

    Without a highest one, they may also be negative.
    """
    expect(isinstance(values, list), f"{place}: found {type(values).__name__}; expected a list")
    # Long lists are checked as a whole. Only if something is wrong (or the list is empty) each one
    # is, for a message about it.
    if set(map(type, values)) != {int} or max(max(values), -min(values)) >> MAX_BITS:
        for value in values:
            integer(value, place)

    right = count is None or len(values) == count
    expect(right, f"{place}: found {len(values)} integers; expected {count}")
    right = highest is None or not values or (min(values) >= 0 and max(values) <= highest)
    expect(right, f"{place}: found an integer out of range; expected 0 to {highest}")
    return values


def max_completed(ready: Ints, volume: Ints, copies: Ints, capacity: int, last: int) -> Ints:
    """Return by round, up to the last one, how many requests can have completed by then at most.

    By kind, ``ready`` is the first round in which a request can complete, ``volume`` its KV tokens,
    all rounds together, and ``copies`` how many requests there are. In t rounds there is room for t
    times the capacity of these tokens.
    """
    order = np.argsort(volume, kind="stable")
    ready, volume = np.repeat(ready[order], copies[order]), np.repeat(volume[order], copies[order])
    completed = np.zeros(last + 1, np.int64)
    marks = np.unique(ready[ready <= last])

    # Between two marks no other request becomes ready. The most that fit are those of least volume.
    for begin, end in pairwise([*marks.tolist(), last + 1]):
        used = np.cumsum(volume[ready <= begin])
        rounds = np.arange(begin, end)
        completed[begin:end] = np.searchsorted(used, capacity * rounds, side="right")

    return completed
