"""Closed forms of theorems by Chen, Ye and Zhou 2025 on competitive ratios.

Shares of outputs are arrays ``x`` over the lengths ``first, ..., first + len(x) - 1``. They need
not sum to 1. Ratios are limits for a large KV capacity and many requests that all arrive at 0.
Below, "Chen et al." is Chen, Ye and Zhou 2025, and ``alpha = l / u`` is the quotient of the
smallest and the largest output.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optsched.problem.errors import InputError

ALPHA_STAR = (3 - math.sqrt(5)) / 2
"""The alpha where the bounds of A_min and A_l on two-point outputs meet (Chen et al., sec. 5.1)."""


def a_min_ratio(shares: ArrayLike, *, first: int = 1, prompt: float = 0.0) -> float:
    """Return the competitive ratio of A_min for given shares of outputs (Chen et al., Lemma 4.6).

    Parameters
    ----------
    shares : array_like, shape (u - l + 1,)
        The shares of requests with output l, l + 1, ..., u.
    first : int
        l, the lower prediction, in tokens.
    prompt : float
        s, the prompt length of every request, in tokens.
    """
    x = _shares(shares)
    k = np.arange(first, first + len(x), dtype=np.float64)
    delta = np.ones(len(x))
    delta[0] = prompt + first
    work = _tail(k * x)  # sum_{i >= k} i x_i
    alive = _tail(x / (prompt + k))  # sum_{i >= k} x_i / (s + i)
    later = _tail(k * x / (prompt + k)) - k * alive  # sum_{i > k} (i - k) x_i / (s + i)
    ours = float((delta * work * (delta * alive + 2 * later)).sum())

    hindsight = float((k * (prompt + k) * x * (x + 2 * (_tail(x) - x))).sum())

    return ours / hindsight


def _tail(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.cumsum(values[::-1])[::-1])


def _shares(shares: ArrayLike) -> NDArray[np.float64]:
    x = np.asarray(shares, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all() or (x < 0).any() or not x.any():
        raise InputError(
            f"shares: found {np.array2string(x.ravel(), threshold=6)}; expected a flat list of "
            "finite numbers >= 0, not all 0"
        )

    return x


def a_max_bounds(alpha: float) -> tuple[float, float]:
    """Return lower and upper bound of A_max's ratio (Chen et al., Theorems 3.4 and 3.3).

    Parameters
    ----------
    alpha : float
        l / u, in (0, 1].
    """
    _check_alpha(alpha)
    return (1 + alpha**-0.5) / (2 * alpha), (1 + 1 / alpha) / (2 * alpha)


def a_min_two_point_bound(alpha: float) -> float:
    """Return (3 - alpha) / 2, the bound of A_min on outputs l or u (Chen et al., Theorem 5.1).

    Parameters
    ----------
    alpha : float
        l / u, in (0, 1].
    """
    _check_alpha(alpha)
    return (3 - alpha) / 2


def a_l_bound(alpha: float) -> float:
    """Return the bound of A_l on outputs l or u (Chen et al., Theorem 5.2).

    Parameters
    ----------
    alpha : float
        l / u, in (0, 1].
    """
    _check_alpha(alpha)
    return 1 + alpha / (2 * (1 - alpha)) if alpha <= 0.5 else 1 + 2 * alpha**2


def a_l_two_point(alpha: float, t: float) -> float:
    """Return A_l's ratio on outputs l or u for s = 0 (Chen et al., proof of Theorem 5.2).

    Parameters
    ----------
    alpha : float
        l / u, in (0, 1].
    t : float
        x_l / x_u, the number of short requests over that of long ones.
    """
    _check_alpha(alpha)
    a = alpha**2
    return 1 + (a * t + 2 * a) / (a * t**2 + 2 * a * t + 1)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise InputError(f"alpha: found {alpha!r}; expected 0 < alpha <= 1")
