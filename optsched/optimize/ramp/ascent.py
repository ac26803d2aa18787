"""A proximal bundle method, which maximizes a concave function: the min of affine pieces."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.problem.kernel import njit

_MAX_PIECES = 160
_STEPS = 4000


@njit(nogil=True)
def _solve_qp(gram: Any, linear: Any, step: float, weight: Any, steps: int, tol: float) -> None:
    """Minimize step/2 w' gram w + linear' w over the simplex. w is ``weight``, changed in place.

    By piece, w is its weight, ``linear`` its value at the center above the lowest, and ``gram`` has
    the products of slopes (`Bundle.propose`). `step` is the factor in the formula. It ends after
    `steps` moves of weight, or when two gradients differ by at most `tol`.
    """
    n = linear.shape[0]
    grad = np.empty(n)
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += gram[i, j] * weight[j]

        grad[i] = step * total + linear[i]

    # Move weight from the piece of the largest gradient to that of the smallest, exactly as far as
    # the sum falls: pairs converge for a convex function on the simplex. Only a piece with some
    # weight can give any.
    for _ in range(steps):
        low, high = 0, -1
        for i in range(n):
            if grad[i] < grad[low]:
                low = i
            if weight[i] > 0.0 and (high < 0 or grad[i] > grad[high]):
                high = i

        gap = grad[high] - grad[low]
        if gap <= tol:
            break

        # The second derivative along the pair; without any, all of the weight moves.
        curve = step * (gram[low, low] + gram[high, high] - 2.0 * gram[low, high])
        move = weight[high] if curve <= 1e-12 else min(weight[high], gap / curve)
        if move == weight[high]:
            weight[high] = 0.0  # exactly, so that no rounding leaves a piece with some weight
        else:
            weight[high] -= move

        weight[low] += move
        for i in range(n):
            grad[i] += step * move * (gram[i, low] - gram[i, high])


class Bundle:
    """The pieces found so far, the best point, and the length of a step per unit of slope.

    Piece i is ``at_zero[i] + slopes[i] @ x``, and ``weight[i]`` its part in the last step. The best
    point is ``center``, with the function's ``value``. The min of the pieces at the last proposed
    point is ``predicted``. ``_gram`` has the products of all pairs of slopes.
    """

    def __init__(self, center: NDArray[np.float64], step: float) -> None:
        self.center = center.copy()
        self.value = -np.inf
        self.step = step
        self.slopes = np.zeros((0, len(center)))
        self.at_zero = np.zeros(0)
        self.weight = np.zeros(0)
        self._gram = np.zeros((0, 0))
        self.predicted = np.inf
        self._nulls = 0  # steps in a row without enough gain

    def add(self, at_zero: float, slope: NDArray[np.float64]) -> None:
        """Add the piece ``at_zero + slope @ x``, which is an upper bound on the function."""
        known = (np.abs(self.at_zero - at_zero) < 1e-9) & (self.slopes == slope).all(axis=1)
        # A piece that is there adds nothing but a singular matrix.
        if known.any():
            return

        pieces = len(self.at_zero)
        # Drop the pieces of the least weight, but never the last one: it is the newest. About
        # a third goes at once.
        if pieces >= _MAX_PIECES:
            order = np.argsort(-self.weight[:-1], kind="stable")[: _MAX_PIECES * 2 // 3]
            kept = np.sort(np.append(order, pieces - 1))
            self.slopes, self.at_zero = self.slopes[kept], self.at_zero[kept]
            self.weight, self._gram = self.weight[kept], self._gram[kept][:, kept]
            pieces = len(kept)

        # The matrix of all products of slopes has a new row and column.
        row = self.slopes @ slope
        gram = np.empty((pieces + 1, pieces + 1))
        gram[:-1, :-1], gram[-1, :-1], gram[:-1, -1] = self._gram, row, row
        gram[-1, -1] = slope @ slope
        self._gram = gram
        self.slopes = np.vstack([self.slopes, slope])
        self.at_zero = np.append(self.at_zero, at_zero)
        self.weight = np.append(self.weight, 0.0)

    def propose(self) -> NDArray[np.float64]:
        """Return the next point to try, and set ``predicted`` to the model's value there.

        The point maximizes the model, the min of the pieces, less (distance to the center)^2 /
        (2 `step`). That is the center plus `step` times a mean of slopes, and the weights of this
        mean solve the dual (`_solve_qp`). They begin with those of the point before.
        """
        linear = self.at_zero + self.slopes @ self.center  # the pieces at the center
        # Weights have to sum to 1. Without any, as before the first step, the lowest piece has all.
        total = self.weight.sum()
        if total <= 0:
            self.weight[:] = 0.0
            self.weight[np.argmin(linear)] = 1.0
        else:
            self.weight /= total

        low = float(linear.min())
        # As exact as the model is at the center, where it should be the function's value.
        tol = 1e-4 * max(1.0, abs(low - self.value) if np.isfinite(self.value) else 1.0)
        # Subtracting the min from all changes no solution, and keeps the numbers small.
        _solve_qp(self._gram, linear - low, self.step, self.weight, _STEPS, tol)
        point = self.center + self.step * (self.weight @ self.slopes)
        self.predicted = float((self.at_zero + self.slopes @ point).min())

        return np.asarray(point)

    def observe(self, point: NDArray[np.float64], value: float) -> None:
        """Record the function's value at a proposed point, and make it the center if it is best.

        Steps become longer where they gain what was predicted, and shorter where they do not.
        """
        gain, predicted_gain = value - self.value, self.predicted - self.value
        if gain > 0:
            self.center, self.value = point.copy(), value
        # Even a step that gains a little of what was predicted makes the next one longer, or
        # multipliers would stop far from their best.
        if gain > max(0.0, 0.1 * predicted_gain):
            self.step *= 1.7 if gain > 0.5 * predicted_gain else 1.3
            self._nulls = 0
            return

        # Four steps in a row without enough gain say that steps are too long, and then each two
        # more say it again.
        self._nulls += 1
        if self._nulls >= 4:
            self.step *= 0.7
            self._nulls = 2
