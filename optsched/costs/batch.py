"""The content of a batch as sums, and the time that it takes: the one place that prices a batch.

With c tokens processed and m KV tokens cached before the batch, per request, a batch takes, in
milliseconds (Kim et al. 2024, section 3.2)::

    layers * ( token * sum c + base
             + [decode]  ( decode_kv * sum m + decode_request * #decode + decode_base )
             + [prefill] ( prefill_square * sum c^2 + prefill_cross * sum c m
                         + prefill_kv * sum m + prefill_token * sum c
                         + prefill_request * #prefill + prefill_base ) )

Every function is plain Python. numba compiles the first ones unchanged (`optsched.judge.life`), so
that the judge, the schedulers' engines, the searches and the interpreter share one formula. The
last ones price a single request from the same coefficients, in floats, exact integers or whole
columns.

Whoever judges, schedules or searches has a further term from this file: the formula above, its
line in `TERMS`, a field of `Sums`, its line in `add_decode` or `add_prefill` and in `batch_time`,
and its part in `decode_ms`, `prefill_ms` or (of a batch) `fixed_ms`, and in `alone_ms`. Whoever
proves refuses it by name until somebody has looked: the bounds and the checker of certificates read
`optsched.bounds.checker.fields`, and exact methods have features (docs/develop/add-cost-term.md).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TERMS = {
    "token": "ms per token processed in the batch",
    "base": "ms per batch",
    "decode_kv": "ms per KV token cached before the batch, over the decode requests",
    "decode_request": "ms per decode request",
    "decode_base": "ms per batch that decodes",
    "prefill_square": "ms per squared token, per prefill request",
    "prefill_cross": "ms per token times cached KV token, per prefill request",
    "prefill_kv": "ms per KV token cached before the batch, over the prefill requests",
    "prefill_token": "ms per prefill token, beside `token`",
    "prefill_request": "ms per prefill request",
    "prefill_base": "ms per batch that prefills",
}
"""Coefficients of a batch's time, with the unit of each per layer."""

COEFFICIENTS = tuple(TERMS)
"""Names of the coefficients in the order of `BatchCost.array`, where ``layers`` comes first."""

LAYERS, TOKEN, BASE, DECODE_KV, DECODE_REQUEST, DECODE_BASE = range(6)
PREFILL_SQUARE, PREFILL_CROSS, PREFILL_KV = range(6, 9)
PREFILL_TOKEN, PREFILL_REQUEST, PREFILL_BASE = range(9, 1 + len(TERMS))
"""Places in `BatchCost.array`: ``layers`` stands before the coefficients."""

LINEAR = 1 + len(TERMS)
"""Length of the array of a model without tables."""

Coefficients = NDArray[np.float64] | Sequence[int]
"""`BatchCost.array`, or exact integers in the same places."""


class Sums(NamedTuple):
    """The content of a batch. Each request processes c tokens and had m KV tokens cached.

    `decode_requests`, `decode_kv`, `decode_kv_max`: over the requests that decode: their number,
    and the sum and the maximum of m.
    `prefill_requests`, `prefill_tokens`, `prefill_square`, `prefill_cross`, `prefill_kv`: over the
    requests that prefill: their number, and the sums of c, c^2, c m and m.
    """

    tokens: int
    decode_requests: int
    decode_kv: int
    decode_kv_max: int
    prefill_requests: int
    prefill_tokens: int
    prefill_square: int
    prefill_cross: int
    prefill_kv: int


EMPTY = Sums(0, 0, 0, 0, 0, 0, 0, 0, 0)
"""The sums of an empty batch."""


def add_decode(sums: Sums, m: int, c: int = 1) -> Sums:
    """Return the sums with one more request that decodes c tokens over m cached ones."""
    return Sums(
        sums.tokens + c,
        sums.decode_requests + 1,
        sums.decode_kv + m,
        max(sums.decode_kv_max, m),
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
        sums.decode_kv_max,
        sums.prefill_requests + 1,
        sums.prefill_tokens + c,
        sums.prefill_square + c * c,
        sums.prefill_cross + c * m,
        sums.prefill_kv + m,
    )


def batch_time(cost: NDArray[np.float64], sums: Sums) -> float:
    """Return the time of one batch in seconds, or 1 in rounds; 0 for an empty batch.

    Parameters
    ----------
    cost : ndarray of float64
        `BatchCost.array` or `UnitCost.array`: ``layers`` and the coefficients. A tabulated model
        goes on as `optsched.costs.table.CostTable.array` says.
    sums : Sums
    """
    if sums.tokens == 0:
        return 0.0
    if cost[LAYERS] == 0.0:  # `UnitCost`: the instance is in rounds
        return 1.0

    # A linear model has one form, and a tabulated one its minorants: each is at most the time of
    # every batch. Coefficients begin at `at + TOKEN`, so `at` is the place before them: `layers`,
    # or of tables the number of minorants and then each minorant's last number.
    at, forms = 0, 1
    if len(cost) > LINEAR:  # tabulated: the minorants stand in the place of the coefficients
        at, forms = LINEAR, int(cost[LINEAR])

    # The largest of the linear forms.
    ms = 0.0
    for _ in range(forms):
        form = cost[at + TOKEN] * sums.tokens + cost[at + BASE]
        if sums.decode_requests > 0:
            form += (
                cost[at + DECODE_KV] * sums.decode_kv
                + cost[at + DECODE_REQUEST] * sums.decode_requests
                + cost[at + DECODE_BASE]
            )

        if sums.prefill_requests > 0:
            form += (
                cost[at + PREFILL_SQUARE] * sums.prefill_square
                + cost[at + PREFILL_CROSS] * sums.prefill_cross
                + cost[at + PREFILL_KV] * sums.prefill_kv
                + cost[at + PREFILL_TOKEN] * sums.prefill_tokens
                + cost[at + PREFILL_REQUEST] * sums.prefill_requests
                + cost[at + PREFILL_BASE]
            )

        ms = max(ms, form)
        at += LINEAR - 1

    if len(cost) == LINEAR:
        return float(cost[LAYERS] * ms / 1000.0)

    # The number of grids and the grids follow, and from here on `at` is the next place to read. A
    # batch takes the sum of the grids. Decodes hold `kv` tokens in the mean, and the one that holds
    # most has `uneven` more. In the order of `QUANTITIES`:
    kv = sums.decode_kv / max(sums.decode_requests, 1)
    uneven = sums.decode_kv_max - kv
    requests = sums.decode_requests + sums.prefill_requests
    quantities = np.array(
        [sums.tokens, requests, sums.prefill_tokens, sums.prefill_kv, sums.decode_requests, kv]
    )
    total, grids, at = 0.0, int(cost[at + 1]), at + 2

    # A grid is the number of its axes, of each axis the quantity, n and n values, and then the
    # cells, in which the last axis runs fastest.
    for grid in range(grids):
        axes = int(cost[at])
        at += 1
        place, share, stride = np.zeros(axes, np.int64), np.zeros(axes), np.ones(axes, np.int64)
        size = 1

        # On each axis: the value at or below x, and the share of the way to the next one. Below
        # the first it is 0, and beyond the last more than 1, so the line goes on.
        for a in range(axes):
            x, n, first = quantities[int(cost[at])], int(cost[at + 1]), at + 2
            low, high = 0, n - 1
            while high - low > 1:
                middle = (low + high) // 2
                if cost[first + middle] <= x:
                    low = middle
                else:
                    high = middle

            place[a] = low
            share[a] = max(0.0, (x - cost[first + low]) / (cost[first + high] - cost[first + low]))
            for b in range(a):  # a slice is twice as much to compile
                stride[b] *= n

            size *= n
            at = first + n

        # Multilinear interpolation. Bit a of a corner's number says which end of axis a it is at.
        value = 0.0
        for corner in range(1 << axes):
            weight, cell = 1.0, at
            for a in range(axes):
                up = (corner >> a) & 1
                weight *= share[a] if up else 1.0 - share[a]
                cell += (place[a] + up) * stride[a]

            value += weight * cost[cell]

        at += size
        if grid == 0:  # the skew: the share of `uneven` that the other grids add to `kv`
            quantities[-1] = kv + min(max(value, 0.0), 1.0) * uneven
        else:
            total += value

    return float(cost[LAYERS] * max(ms, total) / 1000.0)


# One request, in milliseconds per layer


def decode_ms(cost: Coefficients, m: Any) -> Any:
    """Return what a request adds to a batch in which it decodes over m cached tokens."""
    return cost[TOKEN] + cost[DECODE_REQUEST] + cost[DECODE_KV] * m


def prefill_ms(cost: Coefficients, c: Any, m: Any = 0) -> Any:
    """Return what a request adds to a batch in which it prefills c tokens over m cached ones."""
    return (
        (cost[TOKEN] + cost[PREFILL_TOKEN]) * c
        + cost[PREFILL_SQUARE] * c * c
        + cost[PREFILL_CROSS] * c * m
        + cost[PREFILL_KV] * m
        + cost[PREFILL_REQUEST]
    )


def fixed_ms(cost: Coefficients, decodes: bool, prefills: bool) -> Any:
    """Return the fixed cost of a batch, which depends on its phases and not on its requests."""
    return cost[BASE] + cost[DECODE_BASE] * decodes + cost[PREFILL_BASE] * prefills


def alone_ms(cost: Coefficients, s: Any, o: Any, *, fixed: bool) -> Any:
    """Return the cost of a request over all its batches, if its prefill is whole and it stays.

    One batch prefills its s tokens. Then o - 1 batches decode, the k-th over s + k - 1 cached
    tokens.

    Parameters
    ----------
    cost : ndarray of float64 or sequence of int
        `BatchCost.array`, or exact integers in the same places.
    s, o : float or int, or ndarray for many requests
        Prompt and output tokens.
    fixed : bool
        Whether to count the fixed costs of these batches, as for a request that is alone on the
        machine. If not, only what the request adds to its batches counts.

    Returns
    -------
    number or ndarray
        Milliseconds per layer, in the unit of ``cost``.
    """
    base, decode_base, prefill_base = (cost[k] * fixed for k in (BASE, DECODE_BASE, PREFILL_BASE))
    prefill = (cost[TOKEN] + cost[PREFILL_TOKEN] + cost[PREFILL_SQUARE] * s) * s
    prefill += base + cost[PREFILL_REQUEST] + prefill_base  # `prefill_cross` has no cached token
    step = cost[TOKEN] + base + cost[DECODE_REQUEST] + decode_base
    read = s * (o - 1) + (o - 1) * (o - 2) / 2  # sum of the KV tokens cached before each decode

    return prefill + step * (o - 1) + cost[DECODE_KV] * read
