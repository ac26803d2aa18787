"""Compiled loops of the checker, in 64-bit integers. Callers show first that none can overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def least_costs(ends: Any, p1: Any, p2: Any, root: Any) -> Any:
    """Return the least cost of each row of ``ends`` over the moments from its first one on.

    A row has the cell of its first moment, the cost of waiting until that cell ends and of every
    further cell, and what it pays per unit of ``p1``, ``p2`` and ``root``. Beyond the last cell
    only waiting costs. While it is compared, the waiting is at most the best cost plus one cell.
    """
    found = np.empty(len(ends), np.int64)
    cells = len(p1)
    for row in range(len(ends)):
        cell, wait, every, l1, l2, r = ends[row]
        if cell >= cells:
            found[row] = 0
            continue
        best = p1[cell] * l1 + p2[cell] * l2 + root[cell] * r
        cell += 1
        while wait < best:
            if cell >= cells:
                best = wait
                break
            best = min(best, wait + p1[cell] * l1 + p2[cell] * l2 + root[cell] * r)
            wait += every
            cell += 1
        found[row] = best
    return found
