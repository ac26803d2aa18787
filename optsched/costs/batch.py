"""What a batch holds, as sums, and how long that takes: the one place that prices a batch.

Every function is plain Python that numba compiles as it stands (`optsched.judge.life`), so that
the judge, the schedulers' engines and the searches share one formula with the interpreter. A
further term of the cost model is a coefficient, a field of `Sums`, its line in `add_decode` or
`add_prefill`, and its line in `batch_time`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COEFFICIENTS = (
    "token",
    "base",
    "decode_kv",
    "decode_request",
    "decode_base",
    "prefill_square",
    "prefill_cross",
    "prefill_kv",
    "prefill_token",
    "prefill_request",
    "prefill_base",
)
"""Coefficients of a batch's time in the order of `BatchCost.array`, after ``layers``."""


class Sums(NamedTuple):
    """What a batch holds: c tokens are processed and m KV tokens were cached, per request.

    Attributes
    ----------
    tokens : int
        Sum of c over the batch.
    decode_requests, decode_kv : int
        Number of requests that decode, and the sum of their m.
    prefill_requests, prefill_tokens, prefill_square, prefill_cross, prefill_kv : int
        Over the requests that prefill: their number, the sums of c, c^2, c m and m.
    """

    tokens: int
    decode_requests: int
    decode_kv: int
    prefill_requests: int
    prefill_tokens: int
    prefill_square: int
    prefill_cross: int
    prefill_kv: int


EMPTY = Sums(0, 0, 0, 0, 0, 0, 0, 0)
"""A batch before anything is added to it."""


def add_decode(sums: Sums, m: int) -> Sums:
    """Return the sums with one more request that decodes over m cached tokens."""
    return Sums(
        sums.tokens + 1,
        sums.decode_requests + 1,
        sums.decode_kv + m,
        sums.prefill_requests,
        sums.prefill_tokens,
        sums.prefill_square,
        sums.prefill_cross,
        sums.prefill_kv,
    )


def add_prefill(sums: Sums, c: int, m: int) -> Sums:
    """Return the sums with one more request that prefills c tokens over m cached ones."""
    return Sums(
        sums.tokens + c,
        sums.decode_requests,
        sums.decode_kv,
        sums.prefill_requests + 1,
        sums.prefill_tokens + c,
        sums.prefill_square + c * c,
        sums.prefill_cross + c * m,
        sums.prefill_kv + m,
    )


def batch_time(cost: NDArray[np.float64], sums: Sums) -> float:
    """Return the time of one batch: seconds, or 1 in rounds; one that holds nothing takes none.

    Parameters
    ----------
    cost : ndarray of float64, shape (12,)
        `BatchCost.array` or `UnitCost.array`.
    sums : Sums
    """
    if sums.tokens == 0:
        return 0.0
    if cost[0] == 0.0:
        return 1.0
    ms = cost[1] * sums.tokens + cost[2]
    if sums.decode_requests > 0:
        ms += cost[3] * sums.decode_kv + cost[4] * sums.decode_requests + cost[5]
    if sums.prefill_requests > 0:
        ms += (
            cost[6] * sums.prefill_square
            + cost[7] * sums.prefill_cross
            + cost[8] * sums.prefill_kv
            + cost[9] * sums.prefill_tokens
            + cost[10] * sums.prefill_requests
            + cost[11]
        )
    return float(cost[0] * ms / 1000.0)
