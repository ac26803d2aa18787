"""The life of a request: what a batch and an eviction do to it, compiled by numba.

The judge, the schedulers' engines and the timelines all use `advance` when a batch processes a
request and `evict` when it loses its KV. They price batches by the functions of
`optsched.costs.batch`. Import this module lazily, since it loads numba.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs import batch
from optsched.problem.drafts import Drafts
from optsched.problem.kernel import njit

add_decode = njit(batch.add_decode)
add_prefill = njit(batch.add_prefill)
batch_time = njit(batch.batch_time)

EMPTY = batch.EMPTY
UNLIMITED = np.iinfo(np.int64).max

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Records = NDArray[np.record]


def record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    """Return the dtype of a record whose fields are attributes, in Python and compiled code."""
    return np.dtype((np.record, np.dtype(list(fields), align=True)))


LIFE = (
    ("prompt", np.int64),  # prompt tokens
    ("output", np.int64),  # output tokens to produce
    ("cached", np.int64),  # tokens whose KV it holds
    ("allocated", np.int64),  # tokens that its KV has room for (`optsched.judge.memory`)
    ("produced", np.int64),  # output tokens produced so far
    ("decoding", np.bool_),  # whether its whole input is cached
)
"""Fields of a request's record that its life and its memory read and change.

A loop adds fields of its own. It keeps its requests in one structured array, and compiled code
sees each entry as a record.
"""


def new_requests(prompt: Ints, output: Ints, fields: Sequence[tuple[str, Any]] = ()) -> Any:
    """Return requests of which nothing has been processed yet."""
    requests = np.zeros(len(prompt), dtype=record(*LIFE, *fields))
    requests["prompt"], requests["output"] = prompt, output
    return requests


@njit
def rest_of(r: Any) -> int:
    """Return the tokens of a request's input that are still to be prefilled.

    The input is the prompt and, after an eviction, the output tokens produced so far.
    """
    return r.prompt + r.produced - r.cached


@njit
def tokens_of_step(drafts: Drafts | None) -> int:
    """Return the tokens that a decode step processes at most."""
    if drafts is None:  # numba drops what follows
        return 1

    return drafts.tokens


@njit
def advance(r: Any, tokens: int, i: int = -1, drafts: Drafts | None = None) -> bool:
    """Process tokens of request i and return whether that produced an output token.

    With drafts, a decode step may yield several.
    """
    if drafts is not None and r.decoding:
        # The accepted drafts and the next token count: the rest of the run at which it is
        # (`Drafts`). Or all that is processed, if that is less.
        made = min(tokens, drafts.rest[drafts.first[i] + r.produced])
        r.cached += made
        r.produced += made
        return True

    r.cached += tokens
    if r.cached < r.prompt + r.produced:  # its prefill goes on
        return False

    r.decoding = True
    r.produced += 1
    return True


@njit
def evict(r: Any, restart: bool) -> None:
    """Let a request lose what it has cached."""
    r.cached = 0
    r.decoding = False
    if restart:
        r.produced = 0
