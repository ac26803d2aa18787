"""Serial placement: each request in turn at its earliest feasible start, at any scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Ints, Model, model_of
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

MAX_ROUNDS = 1 << 27
"""The max length of an array of rounds (8 bytes each)."""


@dataclass(frozen=True, eq=False)
class Room:
    """What placement needs of an instance, in rounds with the gaps between blocks cut out.

    ``base + j`` tokens are held in the j-th round of a run, which must have ended by its
    `deadline`, so that it does not reach the next block.
    """

    model: Model
    arrival: Ints
    output: Ints
    base: Ints
    deadline: Ints
    capacity: int

    def tel(self, starts: Ints) -> int:
        """Return the total latency of starts, in rounds."""
        return int((starts + self.output - self.arrival).sum())

    def real(self, starts: Ints) -> Ints:
        """Return the starts in the instance's own time."""
        return starts + self.model.blocks.shift


def room_of(instance: Instance) -> Room:
    """Return what placement needs of an instance in rounds."""
    if instance.kv_block_tokens > 1:
        raise UsageError(f"search: found kv_block_tokens {instance.kv_block_tokens}; expected 1")
    if instance.limits.as_dict() or instance.hybrid_batching is False:
        raise UsageError(
            "search: found limits on batches; expected none (the method placement takes them)"
        )

    model = model_of(instance, max_units=1 << 62)
    ends = model.blocks.end[model.blocks.of]
    if int(ends.max()) > MAX_ROUNDS:
        raise UsageError(
            f"search: found a time axis of up to {int(ends.max()):.2g} rounds; expected at most "
            f"{MAX_ROUNDS:.2g} (fewer requests or smaller outputs)"
        )

    return Room(
        model=model,
        arrival=model.arrival,
        output=instance.output_tokens,
        base=instance.prompt_tokens + (instance.kv_offset - 1),
        deadline=ends,
        capacity=instance.kv_capacity,
    )


@njit(nogil=True, inline="always")
def earliest(use, capacity, base, output, start, last):  # type: ignore[no-untyped-def]
    """Return the first feasible start from ``start`` to ``last``, or -1.

    Round t has room for a request that starts at or after t - (capacity - use - base). If the run
    does not fit in round t, the start moves there. The rounds checked before stay feasible, since a
    later start holds less in them. So every round is looked at once.
    """
    k = start
    t = k
    while t < k + output:
        t += 1
        free = capacity - use[t] - base
        if t - k > free:
            k = t - free if free > 0 else t
            if k > last:
                return -1

    return k


@njit(nogil=True, inline="always")
def put(use, base, output, start, sign):  # type: ignore[no-untyped-def]
    """Add the KV of a run to the use of each round, or remove it."""
    if sign > 0:
        for j in range(1, output + 1):
            use[start + j] += base + j
    else:
        for j in range(1, output + 1):
            use[start + j] -= base + j


@njit(nogil=True)
def place_in_order(order, arrival, output, base, capacity, use, starts, homes):  # type: ignore[no-untyped-def]
    """Fill in each request's earliest feasible start on any worker, and this worker."""
    top = 0
    for i in order:
        starts[i] = max(top, arrival[i])  # there everything placed has ended
        for w in range(len(use)):
            last = starts[i] - 1 if w > 0 else starts[i]
            k = earliest(use[w], capacity, base[i], output[i], arrival[i], last)
            if arrival[i] <= k <= last:
                starts[i], homes[i] = k, w

        put(use[homes[i]], base[i], output[i], starts[i], 1)
        top = max(top, starts[i] + output[i])


@njit(nogil=True)
def compact(arrival, output, base, capacity, use, starts, order):  # type: ignore[no-untyped-def]
    """Move every request in turn to its earliest feasible start. Return the rounds gained."""
    gain = 0
    for i in order:
        was = starts[i]
        put(use, base[i], output[i], was, -1)
        starts[i] = earliest(use, capacity, base[i], output[i], arrival[i], was)
        put(use, base[i], output[i], starts[i], 1)
        gain += was - starts[i]

    return gain


@njit(nogil=True)
def fill(output, base, use, starts):  # type: ignore[no-untyped-def]
    """Add the KV of every run to the use of each round."""
    for i in range(len(starts)):
        put(use, base[i], output[i], starts[i], 1)


def place(room: Room, order: Ints) -> Ints:
    """Return the starts if each request takes its earliest feasible one in turn, block by block.

    `order` (shape (n,)): The requests in the order in which those of a block take their turns.

    Each block ends by its deadline, since a request starts no later than its arrival or the end of
    the requests placed before it, whichever is later.
    """
    # All homes are worker 0, the only one.
    starts, homes = np.zeros((2, len(order)), dtype=np.int64)
    grouped = order[np.argsort(room.model.blocks.of[order], kind="stable")]
    use = np.zeros((1, int(room.deadline.max()) + 1), dtype=np.int64)
    columns = room.arrival, room.output, room.base, room.capacity
    place_in_order(grouped, *columns, use, starts, homes)
    return starts


def orders(room: Room, means: NDArray[np.float64] | None = None) -> list[Ints]:
    """Return orders to place requests in: by volume, and by soft-min mean starts of the dual."""
    index = np.arange(len(room.arrival))
    volume = room.model.instance.volume
    if means is None:
        return [
            np.lexsort((index, room.arrival, volume)),
            np.lexsort((index, volume, room.arrival)),
        ]

    return [
        np.lexsort((index, means + share * room.output)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
