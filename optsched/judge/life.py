"""The life of a request, compiled once: what a batch and an eviction do to it.

The judge, the schedulers' engines and the timelines all move requests on by `advance` and take
their KV away by `evict`, and add batches up by the functions of `optsched.costs.batch`. Import
this module lazily: it loads numba.
"""

from __future__ import annotations

from typing import NamedTuple

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
Flags = NDArray[np.bool_]


class Life(NamedTuple):
    """Where every request stands, as arrays of shape (n,) that change in place.

    Parameters
    ----------
    prompt, output : ndarray of int64
        What it asks for, in tokens.
    cached, produced : ndarray of int64
        KV tokens that it holds, and output tokens that it has.
    decoding : ndarray of bool
        Whether its whole input is cached.
    """

    prompt: Ints
    output: Ints
    cached: Ints
    produced: Ints
    decoding: Flags


@njit(cache=True)
def new_life(prompt: Ints, output: Ints) -> Life:
    """Return the state in which nothing has been processed."""
    n = prompt.shape[0]
    return Life(
        prompt,
        output,
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.bool_),
    )


@njit(cache=True)
def rest_of(life: Life, i: int) -> int:
    """Return the input tokens of a request that are still to be prefilled."""
    return life.prompt[i] + life.produced[i] - life.cached[i]


@njit(cache=True)
def advance(life: Life, i: int, tokens: int) -> bool:
    """Process tokens of a request; return whether it produced one."""
    life.cached[i] += tokens
    if life.cached[i] < life.prompt[i] + life.produced[i]:
        return False
    life.decoding[i] = True
    life.produced[i] += 1
    return True


@njit(cache=True)
def evict(life: Life, i: int, restart: bool) -> None:
    """Take a request's KV away; under ``restart`` its tokens are lost with it."""
    life.cached[i] = 0
    life.decoding[i] = False
    if restart:
        life.produced[i] = 0
