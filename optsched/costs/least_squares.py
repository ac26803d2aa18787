"""Non-negative least squares on relative errors, by the active-set method."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.problem.errors import InputError


def nnls(
    matrix: NDArray[np.float64], target: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return x >= 0 that minimizes ``|matrix x - target|``.

    Parameters
    ----------
    matrix : ndarray, shape (rows, columns)
    target : ndarray, shape (rows,), optional
        Ones by default: with rows divided by what was measured, the error is relative.

    Notes
    -----
    Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23. Columns are scaled to
    a largest entry of 1, as squared tokens stand beside constants; all-zero columns get 0.
    """
    goal = np.ones(len(matrix)) if target is None else target
    scale = np.abs(matrix).max(axis=0, initial=0)
    scale[scale == 0] = 1
    a = matrix / scale
    gram, moment = a.T @ a, a.T @ goal
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    tolerance = 1e-11 * max(1.0, float(np.abs(moment).max(initial=0)))
    for _ in range(10 * a.shape[1] + 10):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], goal, rcond=None)[0]
            blocked = free & (trial <= 0)
            if not blocked.any():
                break
            step = float((x[blocked] / (x[blocked] - trial[blocked])).min())
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0
            if not free.any():
                break
        x = trial if free.any() else x
    return x / scale


def relative_fit(
    matrix: NDArray[np.float64],
    measured: NDArray[np.float64],
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return non-negative coefficients with the least squared relative error.

    Parameters
    ----------
    matrix : ndarray, shape (rows, columns)
    measured : ndarray, shape (rows,)
    weights : ndarray, shape (rows,), optional
        Of the squared relative errors.

    Raises
    ------
    InputError
        Fewer rows than columns.
    """
    rows, columns = matrix.shape
    if rows < columns:
        raise InputError(f"{rows} rows for {columns} coefficients; at least as many is right")
    if weights is None:
        return nnls(matrix / measured[:, None])
    root = np.sqrt(weights)
    return nnls(matrix * (root / measured)[:, None], root)
