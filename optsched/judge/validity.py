"""Whether a schedule stays within a cost model's range of validity.

Import this module lazily, since it loads numba.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

WORDS = {
    "max_batch_tokens": "batches of more than {} tokens",
    "min_prefill_chunk_tokens": "prefills of fewer than {} tokens",
    "max_prefill_chunk_tokens": "prefills of more than {} tokens",
    "min_decode_requests": "batches that decode fewer than {} requests",
    "max_decode_requests": "batches that decode more than {} requests",
    "max_request_kv_tokens": "requests that hold more than {} KV tokens",
    "max_kv_tokens": "batches that read more than {} KV tokens",
}
"""Limits of validity by name, with the words for a schedule that leaves them."""

_SHOWN: dict[Any, Any] = {}
"""Memory of Python's warning filter, shared by all callers so that a warning is shown once."""


@njit
def extremes(
    prompt: NDArray[np.int64],
    offsets: NDArray[np.int64],
    request: NDArray[np.int64],
    tokens: NDArray[np.int64],
    evicted_offsets: NDArray[np.int64],
    evicted: NDArray[np.int64],
    restart: bool,
) -> Any:
    """Return the extremes of a feasible schedule, in the order of `WORDS`.

    Parameters
    ----------
    prompt : ndarray of int64, shape (n,)
        Prompt tokens.
    offsets, request, tokens, evicted_offsets, evicted : ndarray of int64
        Columns of the schedule; see `optsched.Schedule`.
    restart : bool
        Whether an evicted request loses the tokens that it has produced.

    Returns
    -------
    ndarray of int64, shape (7,)
        0 where the schedule has no such batch or prefill.
    """
    n = prompt.shape[0]
    cached = np.zeros(n, dtype=np.int64)
    produced = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)  # whether its whole input is cached
    worst = np.zeros(7, dtype=np.int64)

    for b in range(offsets.shape[0] - 1):
        for k in range(evicted_offsets[b], evicted_offsets[b + 1]):
            cached[evicted[k]] = 0
            decoding[evicted[k]] = False
            if restart:
                produced[evicted[k]] = 0

        total = decodes = read = 0
        for k in range(offsets[b], offsets[b + 1]):
            i, c = request[k], tokens[k]
            total += c
            read += cached[i]
            worst[5] = max(worst[5], cached[i])

            if decoding[i]:
                decodes += 1
            else:
                worst[1] = c if worst[1] == 0 else min(worst[1], c)
                worst[2] = max(worst[2], c)

            cached[i] += c
            if cached[i] >= prompt[i] + produced[i]:
                decoding[i] = True
                produced[i] += 1

        worst[0] = max(worst[0], total)
        worst[6] = max(worst[6], read)
        if decodes > 0:
            worst[3] = decodes if worst[3] == 0 else min(worst[3], decodes)
            worst[4] = max(worst[4], decodes)

    return worst


def warn_outside(
    instance: Instance,
    columns: tuple[NDArray[np.int64], ...],
    restart: bool,
    cost: BatchCost,
) -> None:
    """Warn if a schedule leaves the cost model's range of validity.

    The text names the limits and nothing of a single schedule, and its place is always this
    module. Python's own filter therefore shows it once for the many schedules of a comparison or
    a sweep.

    Parameters
    ----------
    instance : Instance
    columns : tuple of ndarray of int64
        Columns of a feasible schedule of batches, as `optsched.problem.schedule.check_columns`
        returns them.
    restart : bool
        Whether an evicted request loses the tokens that it has produced.
    cost : BatchCost

    Warns
    -----
    UserWarning
        The schedule leaves a limit of ``cost.valid``.
    """
    compiled: Any = extremes
    found = compiled(instance.prompt_tokens, *columns, restart)
    outside = []

    for (key, words), value in zip(WORDS.items(), found.tolist(), strict=True):
        limit = cost.valid.get(key)
        if limit is None or value == 0:
            continue
        if value < limit if key.startswith("min_") else value > limit:
            outside.append(words.format(int(limit)))

    if outside:
        warnings.warn_explicit(
            f"cost model {cost.name!r} is used outside its range of validity: "
            + ", ".join(outside),
            UserWarning,
            filename=__file__,
            lineno=1,
            module=__name__,
            registry=_SHOWN,
        )
