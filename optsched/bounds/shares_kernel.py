"""Compiled loops of `optsched.bounds.shares`. Its docstring has the notation and the proof."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.busy_time import Floats
from optsched.bounds.paths_kernel import Shared
from optsched.problem.kernel import njit

_SAFETY = 1e-9
_LEAST_USE = 0.02
_FASTEST = 3.0


@njit(nogil=True)
def scale_to_one(shared: Shared, cell: NDArray[np.int64], cells: int) -> None:
    """Divide shares by the sum of their cell, and by a little more."""
    begin, share = shared.begin, shared.share
    total = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            total[cell[i] + at - begin[i]] += share[at]

    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            share[at] /= max(total[cell[i] + at - begin[i]], 1e-300) * (1 + _SAFETY)


@njit(nogil=True)
def improve_shares(
    shared: Shared, used: Floats, cell: NDArray[np.int64], cells: int, step: float
) -> None:
    """Raise the shares of requests that sit through more fixed costs than others of their cell."""
    begin, share = shared.begin, shared.share
    mean = np.zeros(cells)
    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            mean[cell[i] + at - begin[i]] += share[at] * used[at]

    for i in range(cell.shape[0]):
        for at in range(begin[i], begin[i + 1]):
            usual = mean[cell[i] + at - begin[i]]
            if usual > 0:
                more = used[at] / max(usual, _LEAST_USE) - 1
                share[at] *= np.exp(step * max(-_FASTEST, min(_FASTEST, more)))
