"""A linear model's corner: steps that take the p-norm of reading and arithmetic, not their sum.

Reading is what a batch takes however few its tokens are, and arithmetic what every token takes.
With exponent 1 one follows the other, which is the linear model; with an infinite one the longer
hides the shorter. A p-norm is the largest of its tangents, and these are linear. So such a model is
a table (`optsched.costs.table`) whose minorants are tangents, and everybody who prices or proves
takes it as it is. Its grid is the same norm of a batch's tokens and its base, for bounds that go by
the length of batches.
"""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from optsched.costs.cost import BatchCost
from optsched.costs.table import CostTable, Grid
from optsched.problem.errors import InputError, UsageError

_READING, _ARITHMETIC = {"base"}, {"token"}
_READING_KV = {"base", "decode_kv", "prefill_kv"}
_ARITHMETIC_KV = {"token", "prefill_token", "prefill_square", "prefill_cross"}
# The tangents, by their place between all reading and all arithmetic.
_TANGENTS = np.linspace(0, 1, 5)
_LAST = 65536.0


def corner(cost: BatchCost, exponent: float, *, kv: bool = False) -> BatchCost:
    """Return a model in which a step takes the p-norm of its reading and its arithmetic.

    Parameters
    ----------
    cost : BatchCost
        A linear model. ``base`` reads the weights, and ``token`` is arithmetic.
    exponent : float
        From 1, which gives the model itself, to infinity, which gives the larger of both.
    kv : bool
        Whether reading KV counts as reading and attention of prefills as arithmetic. Otherwise both
        come on top, as where one operator follows the other.
    """
    if cost.table is not None:
        raise UsageError(f"corner: found {cost.name}, which is tabulated; expected a linear model")
    if not exponent >= 1:
        raise InputError(f"exponent: found {exponent!r}; expected a number >= 1, or inf")
    if exponent == 1:
        return cost

    read, count = (_READING_KV, _ARITHMETIC_KV) if kv else (_READING, _ARITHMETIC)
    forms = []
    for share in _TANGENTS:
        first, second = _tangent(share, exponent)
        of = dict.fromkeys(read, first) | dict.fromkeys(count, second)
        texts = {key: float(text) * of.get(key, 1.0) for key, text in cost.coefficients.items()}
        forms.append({key: f"{value:.9g}" for key, value in texts.items() if value > 0})

    lines = np.array([[float(form.get(key, 0)) for key in ("base", "token")] for form in forms])
    kinks = {1.0, _LAST}
    for (base, slope), (other, steeper) in combinations(lines, 2):
        if slope != steeper and 1 < (at := (base - other) / (steeper - slope)) < _LAST:
            kinks.add(round(float(at), 6))

    tokens = np.array(sorted(kinks))
    dense = Grid({"tokens": tokens}, (lines[:, :1] + lines[:, 1:] * tokens).max(axis=0))
    words = f"{cost.provenance}; the p-norm of reading and arithmetic, p = {exponent:g}"
    return replace(cost, provenance=words.lstrip("; "), table=CostTable([dense], forms))


def _tangent(share: float, exponent: float) -> tuple[float, float]:
    """Return how much of reading and of arithmetic a tangent takes."""
    if math.isinf(exponent):
        return 1 - share, share

    angle = share * np.pi / 2
    sides = np.array([np.cos(angle), np.sin(angle)])
    first, second = (sides / np.linalg.norm(sides, exponent)) ** (exponent - 1)
    return float(first), float(second)
