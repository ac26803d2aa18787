"""Linear models with coefficients >= 0 that are near measured times, or below them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError


def non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x >= 0 that minimizes ``|matrix x - target|`` (non-negative least squares).

    Every column is scaled to a maximum of 1 first, since squared tokens and constants differ by
    many orders of magnitude.
    """
    from scipy.optimize import nnls  # loaded only to fit

    scale = np.abs(matrix).max(axis=0, initial=0)
    scale[scale == 0] = 1
    return np.asarray(nnls(matrix / scale, target)[0] / scale)


def minorant(
    relative: NDArray[np.float64], near: NDArray[np.bool_], least: Mapping[int, float]
) -> NDArray[np.float64]:
    """Return the x >= 0 with ``relative @ x <= 1`` that has the largest mean over some rows.

    `relative` (shape (rows, columns)): what multiplies each coefficient in the time of a row,
    divided by that time.
    `near` (shape (rows,)): the rows that count in the mean. The others count a thousandth as much.
    """
    from scipy.optimize import linprog

    weights = near / max(near.sum(), 1) + 1e-3 / len(near)
    scale = relative.max(axis=0)
    scale[scale == 0] = 1
    rows = relative / scale
    bounds = [(least.get(k, 0.0) * size, None) for k, size in enumerate(scale.tolist())]
    found = linprog(-(weights @ rows), A_ub=rows, b_ub=np.ones(len(rows)), bounds=bounds)
    if not found.success:
        raise InputError(f"minorant: found no linear model ({found.message}); expected times > 0")

    return np.asarray(found.x / scale)
