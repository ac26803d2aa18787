"""The life of a request, compiled once: what a batch and an eviction do to it.

The judge, the schedulers' engines and the timelines all move requests on by `advance` and take
their KV away by `evict`, and add batches up by the functions of `optsched.costs.batch`. Import
this module lazily: it loads numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.costs import batch

add_decode = njit(cache=True)(batch.add_decode)
add_prefill = njit(cache=True)(batch.add_prefill)
batch_time = njit(cache=True)(batch.batch_time)

EMPTY = batch.EMPTY
UNLIMITED = np.iinfo(np.int64).max

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    """Return the type of a record whose fields are attributes, compiled or interpreted."""
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


LIFE = (
    ("prompt", np.int64),  # what it asks for, in tokens
    ("output", np.int64),
    ("cached", np.int64),  # KV tokens that it holds
    ("produced", np.int64),  # output tokens that it has
    ("decoding", np.bool_),  # whether its whole input is cached
)
"""Fields of a request's record that `advance` and `evict` change; loops add fields of their own.

A loop keeps its requests in one structured array, of which compiled code sees each as a record.
"""


def new_requests(prompt: Ints, output: Ints, fields: Sequence[tuple[str, Any]] = ()) -> Any:
    """Return requests of which nothing has been processed.

    Parameters
    ----------
    prompt, output : ndarray of int64, shape (n,)
    fields : sequence of (str, dtype)
        Further fields of a loop's own, 0 at first.

    Returns
    -------
    ndarray of records, shape (n,)
    """
    requests = np.zeros(len(prompt), dtype=record(*LIFE, *fields))
    requests["prompt"], requests["output"] = prompt, output
    return requests


@njit(cache=True)
def rest_of(r: Any) -> int:
    """Return the input tokens of a request that are still to be prefilled."""
    return r.prompt + r.produced - r.cached


@njit(cache=True)
def advance(r: Any, tokens: int) -> bool:
    """Process tokens of a request; return whether it produced one."""
    r.cached += tokens
    if r.cached < r.prompt + r.produced:
        return False
    r.decoding = True
    r.produced += 1
    return True


@njit(cache=True)
def evict(r: Any, restart: bool) -> None:
    """Take a request's KV away; under ``restart`` its tokens are lost with it."""
    r.cached = 0
    r.decoding = False
    if restart:
        r.produced = 0
