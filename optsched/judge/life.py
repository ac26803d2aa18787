"""The life of a request: what a batch and an eviction do to it, compiled by numba.

The judge, the schedulers' engines and the timelines all use `advance` when a batch processes a
request and `evict` when it loses its KV. They price batches by the functions of
`optsched.costs.batch`. Import this module lazily, since it loads numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs import batch
from optsched.problem import instance
from optsched.problem.kernel import njit

add_decode = njit(batch.add_decode)
add_prefill = njit(batch.add_prefill)
batch_time = njit(batch.batch_time)
whole_blocks = njit(instance.whole_blocks)

EMPTY = batch.EMPTY
UNLIMITED = np.iinfo(np.int64).max

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a record whose fields are attributes, in Python and compiled code.

    Parameters
    ----------
    *fields : tuple of (str, dtype)
        Name and dtype of each field.

    Returns
    -------
    numpy.dtype
    """
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


LIFE = (
    ("prompt", np.int64),  # prompt tokens
    ("output", np.int64),  # output tokens to produce
    ("cached", np.int64),  # KV tokens that it holds
    ("produced", np.int64),  # output tokens produced so far
    ("decoding", np.bool_),  # whether its whole input is cached
)
"""Fields of a request's record that `advance` and `evict` read and change.

A loop adds fields of its own. It keeps its requests in one structured array, and compiled code
sees each entry as a record.
"""


def new_requests(prompt: Ints, output: Ints, fields: Sequence[tuple[str, Any]] = ()) -> Any:
    """Return requests of which nothing has been processed yet.

    Parameters
    ----------
    prompt, output : ndarray of int64, shape (n,)
        Prompt and output tokens.
    fields : sequence of (str, dtype)
        Further fields, which begin as 0.

    Returns
    -------
    ndarray of records, shape (n,)
    """
    requests = np.zeros(len(prompt), dtype=record(*LIFE, *fields))
    requests["prompt"], requests["output"] = prompt, output
    return requests


@njit
def rest_of(r: Any) -> int:
    """Return the number of input tokens of a request that are still to be prefilled.

    The input is the prompt and, after an eviction, the output tokens produced so far.

    Parameters
    ----------
    r : record with the fields of `LIFE`
    """
    return r.prompt + r.produced - r.cached


@njit
def advance(r: Any, tokens: int) -> bool:
    """Process tokens of a request and return whether that produced an output token.

    Parameters
    ----------
    r : record with the fields of `LIFE`
        Changed in place.
    tokens : int
        Tokens that the batch processes.

    Returns
    -------
    bool
    """
    r.cached += tokens
    if r.cached < r.prompt + r.produced:
        return False
    r.decoding = True
    r.produced += 1
    return True


@njit
def kv_of(tokens: int, limits: Any) -> int:
    """Return the KV that a request holds with so many tokens cached: the offset, whole blocks.

    Parameters
    ----------
    tokens : int
        Cached tokens, >= 1.
    limits : Limits
        See `optsched.judge.replay`.

    Returns
    -------
    int
        KV tokens.
    """
    return whole_blocks(tokens + limits.kv_offset, limits.kv_block_tokens)


@njit
def kv_growth(cached: int, tokens: int, limits: Any) -> int:
    """Return the KV that a request takes in addition when it caches more tokens.

    Parameters
    ----------
    cached : int
        Tokens that it has cached; 0 if it holds no KV.
    tokens : int
        Tokens that it caches next, >= 1.
    limits : Limits
        See `optsched.judge.replay`.

    Returns
    -------
    int
        KV tokens.
    """
    if cached == 0:
        return kv_of(tokens, limits)
    if limits.kv_block_tokens == 1:
        return tokens
    return kv_of(cached + tokens, limits) - kv_of(cached, limits)


@njit
def evict(r: Any, restart: bool) -> None:
    """Free the KV of a request.

    Parameters
    ----------
    r : record with the fields of `LIFE`
        Changed in place.
    restart : bool
        Whether the request loses the output tokens that it has produced, too.
    """
    r.cached = 0
    r.decoding = False
    if restart:
        r.produced = 0
