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

# The coefficients that are reading and arithmetic, without KV and with it.
_READING, _ARITHMETIC = {"base"}, {"token"}
_READING_KV = {"base", "decode_kv", "prefill_kv"}
_ARITHMETIC_KV = {"token", "prefill_token", "prefill_square", "prefill_cross"}
# The tangents, by their place between all reading and all arithmetic.
_TANGENTS = np.linspace(0, 1, 5)
# Batches of more tokens go on as between the last two values of the grid.
_LAST_TOKENS = 65536.0


def norm(coefficients: Mapping[str, str], exponent: float, *, kv: bool = False) -> CostTable:
    """Return the table of a p-norm of reading and arithmetic. See `optsched.costs.cost.corner`.

    A norm is the largest of its tangents, which are linear models: each takes one share of the
    reading and another of the arithmetic. What is neither comes on top. `kv`: whether reading KV
    is reading, too, and what prefills add for attention is arithmetic.
    """
    reading, arithmetic = (_READING_KV, _ARITHMETIC_KV) if kv else (_READING, _ARITHMETIC)
    tangents = []
    for place in _TANGENTS:  # from 0, all reading, to 1, all arithmetic
        of_reading, of_arithmetic = _tangent(place, exponent)
        factors = dict.fromkeys(reading, of_reading) | dict.fromkeys(arithmetic, of_arithmetic)
        tangents.append({k: float(text) * factors.get(k, 1.0) for k, text in coefficients.items()})

    return largest(tangents)


def largest(models: Sequence[Mapping[str, float]]) -> CostTable:
    """Return the table of batches that take the largest time of some linear models.

    Its grid has the largest of their lines by tokens, with values where two of them cross.
    """
    minorants = [{key: f"{value:.9g}" for key, value in m.items() if value > 0} for m in models]
    # A line by model: its time of no token, and what each token adds. `knots`: numbers of tokens.
    lines = np.array([[float(m.get(key, 0)) for key in ("base", "token")] for m in minorants])
    knots = {1.0, _LAST_TOKENS}
    for (base, slope), (other_base, other_slope) in combinations(lines, 2):
        if slope != other_slope:
            crossing = (base - other_base) / (other_slope - slope)
            if 1 < crossing < _LAST_TOKENS:
                knots.add(round(float(crossing), 6))

    tokens = np.array(sorted(knots))
    dense = Grid({"tokens": tokens}, (lines[:, :1] + lines[:, 1:] * tokens).max(axis=0))
    return CostTable([dense], minorants)


def _tangent(place: float, exponent: float) -> tuple[float, float]:
    """Return how much of reading and of arithmetic a tangent takes, by its place from 0 to 1.

    It touches the norm in the direction of an angle: the gradient of |(x, y)| there.
    """
    if math.isinf(exponent):  # the gradient jumps; any two shares of sum 1 stay below the larger
        return 1 - place, place

    angle = place * np.pi / 2
    sides = np.array([np.cos(angle), np.sin(angle)])
    of_reading, of_arithmetic = (sides / np.linalg.norm(sides, exponent)) ** (exponent - 1)
    return float(of_reading), float(of_arithmetic)
