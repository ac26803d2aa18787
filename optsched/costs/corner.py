"""A linear model's corner: steps that take the p-norm of reading and arithmetic, not their sum.

Reading is what a batch takes however few its tokens are, and arithmetic what every token takes.
With exponent 1 one follows the other, which is the linear model; with an infinite one the longer
hides the shorter. A p-norm is the largest of its tangents, and these are linear. So such a model is
a table (`optsched.costs.table`) whose minorants are tangents, and everybody who prices or proves
takes it as it is. Its grid is the same norm of a batch's tokens and its base, for bounds that go by
the length of batches.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from optsched.costs.table import CostTable, Grid

_READING, _ARITHMETIC = {"base"}, {"token"}
_READING_KV = {"base", "decode_kv", "prefill_kv"}
_ARITHMETIC_KV = {"token", "prefill_token", "prefill_square", "prefill_cross"}
# The tangents, by their place between all reading and all arithmetic.
_TANGENTS = np.linspace(0, 1, 5)
_LAST = 65536.0


def norm(coefficients: Mapping[str, str], exponent: float, *, kv: bool = False) -> CostTable:
    """Return the table of a p-norm of reading and arithmetic. See `optsched.costs.cost.corner`."""
    read, count = (_READING_KV, _ARITHMETIC_KV) if kv else (_READING, _ARITHMETIC)
    forms = []
    for share in _TANGENTS:
        first, second = _tangent(share, exponent)
        of = dict.fromkeys(read, first) | dict.fromkeys(count, second)
        forms.append({key: float(text) * of.get(key, 1.0) for key, text in coefficients.items()})

    return largest(forms)


def largest(models: Sequence[Mapping[str, float]]) -> CostTable:
    """Return the table of batches that take the largest time of some linear models."""
    forms = [{key: f"{value:.9g}" for key, value in one.items() if value > 0} for one in models]
    lines = np.array([[float(form.get(key, 0)) for key in ("base", "token")] for form in forms])
    kinks = {1.0, _LAST}
    for (base, slope), (other, steeper) in combinations(lines, 2):
        if slope != steeper and 1 < (at := (base - other) / (steeper - slope)) < _LAST:
            kinks.add(round(float(at), 6))

    tokens = np.array(sorted(kinks))
    dense = Grid({"tokens": tokens}, (lines[:, :1] + lines[:, 1:] * tokens).max(axis=0))
    return CostTable([dense], forms)


def _tangent(share: float, exponent: float) -> tuple[float, float]:
    """Return how much of reading and of arithmetic a tangent takes."""
    if math.isinf(exponent):
        return 1 - share, share

    angle = share * np.pi / 2
    sides = np.array([np.cos(angle), np.sin(angle)])
    first, second = (sides / np.linalg.norm(sides, exponent)) ** (exponent - 1)
    return float(first), float(second)
