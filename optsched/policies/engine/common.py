"""What the compiled loops share: outcomes, limits, arrays that grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from optsched.problem import forecast

# Outcomes.
DONE = 0
STUCK = 1  # nothing runs, nothing can be admitted, nothing arrives
LOOP = 2  # cleared twice in the same state
STALLED = 3  # too many batches or clearings without a completion

MAX_STALLED_BATCHES = 1_000_000
"""Batches without a completion (beyond the longest output) that count as an endless loop."""

tokens_left = njit(cache=True)(forecast.tokens_left)


@njit(cache=True)
def grown(array: Any, needed: int) -> Any:
    """Return the array, or a copy of at least twice its length (zeros at the end) if too short."""
    if needed <= array.shape[0]:
        return array
    wider = np.zeros(max(needed, 2 * array.shape[0]), dtype=array.dtype)
    wider[: array.shape[0]] = array
    return wider
