"""The KV that a worker holds: the one place that knows what tokens take, compiled by numba.

A ledger is any record with the fields of `MEMORY`, and an entry any record with those of
`optsched.judge.life.LIFE`. The judge allocates what a batch caches. A scheduler may allocate ahead:
the whole input at admission, say. Policies that look into the future keep a projection of the KV
that will be held in the next batches. Import this module lazily: it loads numba.
"""

from typing import Any

import numpy as np

from optsched.problem import room as rooms
from optsched.problem.kernel import njit

room_of = njit(rooms.room_of)

MEMORY = (("held", np.int64),)
"""Fields of a ledger: the KV tokens allocated, with every request's offset and in whole blocks."""


@njit
def kv_of(tokens: int, limits: Any) -> int:
    """Return the KV that a request takes with so many tokens, at least 1, cached."""
    return room_of(tokens + limits.kv_offset, limits.kv_block_tokens, limits.kv_window)


@njit
def by_token(limits: Any) -> bool:
    """Whether every token that a request has cached takes as much KV as the others."""
    return bool(limits.kv_block_tokens == 1 and limits.kv_window.sliding == 0)


@njit
def beyond(r: Any, tokens: int, limits: Any) -> int:
    """Return for how many tokens room must be taken, so that a request can process some.

    Without drafts it is for all of them. Room of drafts that were not accepted is used again.
    """
    return tokens if limits.drafts is None else r.cached + tokens - r.allocated


@njit
def growth(r: Any, tokens: int, limits: Any) -> int:
    """Return the KV that room for more tokens of a request takes in addition."""
    if r.allocated == 0:
        return kv_of(tokens, limits)
    if by_token(limits):  # the usual case, without two divisions
        return tokens

    return kv_of(r.allocated + tokens, limits) - kv_of(r.allocated, limits)


@njit
def has_room(memory: Any, kv: int, limits: Any) -> bool:
    """Whether so much more KV fits."""
    return bool(memory.held + kv <= limits.kv_capacity)


@njit
def take(memory: Any, r: Any, tokens: int, limits: Any) -> None:
    """Allocate KV for more tokens of a request, whether there is room or not."""
    memory.held += growth(r, tokens, limits)
    r.allocated += tokens


@njit
def free(memory: Any, r: Any, limits: Any) -> None:
    """Free the KV of a request that has some."""
    memory.held -= kv_of(r.allocated, limits)
    r.allocated = 0


@njit
def project(usage: Any, batch: int, tokens: int, steps: int, sign: int, limits: Any) -> int:
    """Add a request to a projection of KV, or with sign -1 remove it.

    ``usage`` is the projection: KV by batch. The request caches ``tokens + k`` tokens by batch
    ``batch + k``, k = 1, ..., ``steps``. Returned is how many more batches come to lie above the
    capacity.
    """
    capacity, over = limits.kv_capacity, 0
    for k in range(1, steps + 1):
        before = usage[batch + k]
        after = before + sign * kv_of(tokens + k, limits)
        usage[batch + k] = after
        over += int(after > capacity) - int(before > capacity)

    return over


@njit
def fits(usage: Any, batch: int, tokens: int, steps: int, limits: Any) -> bool:
    """Whether a request as in `project` leaves every batch within the capacity."""
    for k in range(steps, 0, -1):  # a request holds most in its last batch
        if usage[batch + k] + kv_of(tokens + k, limits) > limits.kv_capacity:
            return False

    return True
