"""Lagrangian dual of the memory rows: prices of KV memory, and the bound that they prove.

`optsched.bounds.checker.prices` has the bound, its proof, and the exact value. The largest one is
the value of the linear relaxation of the time-indexed program, by linear programming duality: it is
the dual with the requests' own rows optimized out.
"""

from dataclasses import dataclass

import numpy as np

from optsched.bounds.checker.parts import Unlimited
from optsched.bounds.checker.prices import Runs, priced_total
from optsched.bounds.timeline import Floats, Ints, Model
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of one KV token over time, constant on pieces of rounds.

    Parameters
    ----------
    from_round : ndarray of int64, shape (pieces,)
        First round of each piece, ascending, >= 1. The price is 0 before the first piece.
    price : ndarray of int64, shape (pieces,)
        Numerators of the prices, in rounds of latency per token, >= 0. The last one is 0.
    denominator : int
        The common denominator of the prices, >= 1.
    """

    from_round: Ints
    price: Ints
    denominator: int

    def array(self) -> Floats:
        """Return rows (from_round, price) as floats, shape (pieces, 2)."""
        return np.column_stack([self.from_round, self.price / self.denominator])


def dual_value(instance: Instance, prices: Prices, weight: Ints | None = None) -> int:
    """Return the bound in rounds that prices prove, which is the exact dual value L rounded up.

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    prices : Prices
    weight : ndarray of int64, shape (n,), optional
        The bound is one on the weighted latency then.
    """
    numerator, denominator = dual_fraction(instance, prices, weight)
    return -(-numerator // denominator)


def dual_fraction(
    instance: Instance, prices: Prices, weight: Ints | None = None
) -> tuple[int, int]:
    """Return the exact dual value L before it is rounded up, as numerator and denominator."""
    if not instance.in_rounds:
        raise UsageError(
            "bound: found an instance in seconds; expected one in rounds, as `optsched import "
            "--rounds SECONDS` makes, since prices of memory are per round"
        )

    total = priced_total(
        runs_of(instance, weight),
        instance.kv_capacity,
        prices.from_round.tolist(),
        prices.price.tolist(),
        prices.denominator,
        Unlimited(),
    )
    return total, prices.denominator


def runs_of(instance: Instance, weight: Ints | None = None) -> Runs:
    """Return what prices are paid for, in Python integers. Weights are 1 by default.

    A run holds one KV token more in each round, so in the first one it holds ``held`` + 1.
    """
    held = instance.prompt_tokens + instance.kv_offset - 1
    weight = np.ones_like(held) if weight is None else weight
    columns = (instance.release_times.astype(np.int64), instance.output_tokens, held, weight)
    return Runs(*(column.tolist() for column in columns))


def prices_in_rounds(model: Model, dense: Floats) -> Prices:
    """Return prices per unit of a model's time as integer prices of the instance's rounds.

    The denominator is the largest power of ten up to 10**9 that keeps sums within 64 bits. The
    model has no gaps between blocks; in them the price is 0.

    `dense` (shape (units,)): price of a token for each unit of the model's time. Afterwards the
    price is 0.
    """
    instance, unit = model.instance, model.unit
    per_round = np.maximum(dense, 0.0) / unit
    longest, peak = float(instance.output_tokens.max()), float(instance.peak_tokens.max())
    top = float(per_round.max(initial=0.0))
    denominator = 10**9
    # A run costs its rounds and the prices of its KV, together at most this.
    while denominator > 1 and denominator * longest * (1.0 + top * peak) > 2.0**59:
        denominator //= 10

    scaled = np.rint(per_round * denominator).astype(np.int64)
    change = np.flatnonzero(np.diff(scaled, prepend=0))
    # Times at which the price may change: where it does in the model, where blocks begin, and after
    # the last unit. Round t is part of unit (t - 1) // unit; blocks begin and end anywhere in one.
    blocks = model.blocks
    cuts = np.unique(np.concatenate([change * unit, blocks.begin, [len(scaled) * unit]]))
    block = np.searchsorted(blocks.begin, cuts, side="right") - 1
    value = np.append(scaled, 0)[np.minimum(cuts // unit, len(scaled))]
    # From the axis without gaps to the instance's rounds. Pieces are (first round, price).
    shift = blocks.real - blocks.begin
    pieces = list(zip((cuts + shift[block] + 1).tolist(), value.tolist(), strict=True))

    # In gaps between blocks the price is 0.
    for b in range(len(shift) - 1):
        end = int(blocks.end[b] + shift[b])
        if blocks.real[b + 1] > end:
            pieces.append((end + 1, 0))

    # Neighbours of the same price are one piece.
    from_round: list[int] = []
    price: list[int] = []
    for first, p in sorted(pieces):
        if p != (price[-1] if price else 0):
            from_round.append(first)
            price.append(p)

    if not price:
        from_round, price = [1], [0]

    return Prices(
        np.array(from_round, dtype=np.int64), np.array(price, dtype=np.int64), denominator
    )
