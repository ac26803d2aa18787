"""Lagrangian dual of the memory rows: prices of KV memory, and the bound that they prove.

Let lambda_t >= 0 be the price of one KV token in round t. Request i, started at k, holds
q_i + j tokens in round k + j, j = 1..o_i, with q_i = s_i (cached accounting: s_i - 1), and the
machine holds at most M. For any schedule with starts k_i,

    TEL  =  sum_i (k_i + o_i - a_i)
        >=  sum_i (k_i + o_i - a_i) + sum_t lambda_t (tokens held in t - M)
         =  sum_i f_i(k_i) - M sum_t lambda_t
        >=  sum_i min_{k >= a_i} f_i(k) - M sum_t lambda_t  =:  L(lambda),

    f_i(k) = k + o_i - a_i + sum_{j=1..o_i} lambda_{k+j} (q_i + j),

since prices are not negative and memory is not exceeded. So every list of prices gives a bound.
TEL is an integer, so L may be rounded up. The largest L is the value of the linear relaxation of
the time-indexed program, by linear programming duality: L is the dual with the requests' own rows
optimized out. Limits on batches only rule schedules out.

Prices are constant on pieces of rounds and integers over a common denominator D. This makes D L an
integer, which is computed exactly. Take a run of starts over which the first round k + 1 stays in
one piece (price p) and the last round k + o in another (price r). There the second difference of f
is the constant p - r, so f is quadratic. Its min over integers is at an end of the run or, where
p > r, next to its vertex. A request has at most two such runs per piece, so computing L takes
O(n * pieces) steps, however far apart the pieces are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.timeline import Floats, Ints, Model
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

_NEVER = 1 << 60
"""The round at which the last piece ends."""


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


def dual_value(instance: Instance, prices: Prices) -> int:
    """Return the bound that prices prove, which is the exact dual value L rounded up.

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    prices : Prices

    Returns
    -------
    int
        A bound on total latency, in rounds.

    Raises
    ------
    UsageError
        If the instance is in seconds.
    """
    numerator, denominator = dual_fraction(instance, prices)
    return -(-numerator // denominator)


def dual_fraction(instance: Instance, prices: Prices) -> tuple[int, int]:
    """Return the exact dual value L before it is rounded up.

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    prices : Prices

    Returns
    -------
    numerator, denominator : int

    Raises
    ------
    UsageError
        If the instance is in seconds.
    """
    _check_rounds(instance)
    begin, end, price = _pieces(prices)
    minima = _all_minima(instance, begin, end, price, prices.denominator)
    paid = sum((e - b) * p for b, e, p in zip(begin, end, price, strict=True) if p)

    return minima - instance.kv_capacity * paid, prices.denominator


def _check_rounds(instance: Instance) -> None:
    if not instance.in_rounds:
        raise UsageError(
            "bound: found an instance in seconds; expected one in rounds, as `optsched import "
            "--rounds SECONDS` makes, since prices of memory are per round"
        )


def _pieces(prices: Prices) -> tuple[list[int], list[int], list[int]]:
    """Return begin, end (excluded) and price of pieces that cover every round from 0."""
    begin = [0, *prices.from_round.tolist()]
    price = [0, *prices.price.tolist()]
    return begin, [*begin[1:], _NEVER], price


class _Requests(NamedTuple):
    """Arrivals, outputs, and the KV q held before the first round, as arrays or lists."""

    arrival: Any
    output: Any
    q: Any


class _Pieces(NamedTuple):
    """Begin, end and price of pieces, and the sums of price and price * round before each."""

    begin: Any
    end: Any
    price: Any
    sums: Any
    moments: Any


def _all_minima(
    instance: Instance, begin: list[int], end: list[int], price: list[int], denominator: int
) -> int:
    """Return D * sum_i min f_i."""
    sums, moments = [0], [0]
    for b, e, p in zip(begin[:-1], end[:-1], price[:-1], strict=True):
        sums.append(sums[-1] + (e - b) * p)
        moments.append(moments[-1] + p * ((e - b) * b + (e - b) * (e - b - 1) // 2))

    q = instance.prompt_tokens + instance.kv_offset - 1
    # f at the arrival is at most D o + top o peak, so the min is too, and so is D times the
    # delay of the starts that matter. Elsewhere among them f is at most twice that.
    longest, peak = int(instance.output_tokens.max()), int(instance.peak_tokens.max())
    largest = denominator * longest + max(price) * longest * peak
    small = 4 * largest < 2**62 and largest // denominator < 2**31

    if small:
        wrap = (1 << 64) - 1
        columns = [np.array([v & wrap for v in c], dtype=np.uint64) for c in (sums, moments)]
        minima = np.empty(instance.n, dtype=np.int64)
        requests = _Requests(instance.release_times.astype(np.int64), instance.output_tokens, q)
        numbers = [np.array(c, dtype=np.int64) for c in (begin, end, price)]
        pieces = _Pieces(*numbers, *(c.view(np.int64) for c in columns))
        _minima(requests, pieces, denominator, minima)

        return sum(minima.tolist())

    exact = [0] * instance.n
    requests = _Requests(
        instance.release_times.tolist(), instance.output_tokens.tolist(), q.tolist()
    )
    pieces = _Pieces(begin, end, price, sums, moments)
    _minima.py_func(requests, pieces, denominator, exact)

    return sum(exact)


@njit(nogil=True)
def _minima(requests, pieces, denominator, minima):  # type: ignore[no-untyped-def]
    """Fill in the exact min of D f_i of each request.

    In compiled code 64-bit sums wrap. Every f that matters fits into 64 bits (see `_all_minima`),
    so a result that is right modulo 2**64 is right. Called as plain Python on lists, it computes
    with integers of any size.
    """
    arrival, output, q = requests
    begin, end, price, sums, moments = pieces
    for i in range(len(arrival)):
        a, o, held = arrival[i], output[i], q[i]
        least = -1
        k = a
        left, right = 0, 0
        low, high = 0, len(begin) - 1

        while low < high:  # the piece of the first round, k + 1
            middle = (low + high + 1) // 2
            if begin[middle] <= k + 1:
                low = middle
            else:
                high = middle - 1

        left = right = low
        while True:
            while end[left] <= k + 1:
                left += 1
            while end[right] <= k + o:
                right += 1

            last = min(end[left] - 2, end[right] - 1 - o)
            # Sums over the rounds up to k, and up to k + o.
            m = k + 1 - begin[left]
            sum_k = sums[left] + m * price[left]
            half = m // 2 * (m - 1) if m % 2 == 0 else (m - 1) // 2 * m
            moment_k = moments[left] + price[left] * (m * begin[left] + half)
            m = k + o + 1 - begin[right]
            sum_o = sums[right] + m * price[right]
            half = m // 2 * (m - 1) if m % 2 == 0 else (m - 1) // 2 * m
            moment_o = moments[right] + price[right] * (m * begin[right] + half)
            value = denominator * (k + o - a) + moment_o - moment_k + (held - k) * (sum_o - sum_k)
            if least < 0 or value < least:
                least = value

            # A start whose delay alone costs more cannot be better.
            last = min(last, a - o + least // denominator)
            if last > k:
                bend = price[left] - price[right]
                rise = denominator - (sum_o - sum_k - price[left])
                rise += price[right] * (held + o) - price[left] * (held + 1)
                steps = last - k
                if bend > 0 and rise < 0:
                    steps = min(steps, (-rise + bend - 1) // bend)

                value += steps * rise + bend * (steps * (steps - 1) // 2)
                if value < least:
                    least = value

            if least // denominator < end[left] - 1 + o - a and least // denominator < (
                end[right] - a
            ):
                break

            k = min(end[left] - 1, end[right] - o)

        minima[i] = least

    return 0


def prices_in_rounds(model: Model, dense: Floats) -> Prices:
    """Return prices per unit of a model's time as integer prices of the instance's rounds.

    The denominator is the largest power of ten up to 10**9 that keeps sums within 64 bits.

    Parameters
    ----------
    model : Model
    dense : ndarray of float64, shape (units,)
        Price of a token for each unit of the model's time. Afterwards the price is 0.

    Returns
    -------
    Prices
    """
    instance, unit = model.instance, model.unit
    per_round = np.maximum(dense, 0.0) / unit
    longest, peak = float(instance.output_tokens.max()), float(instance.peak_tokens.max())
    top = float(per_round.max(initial=0.0))
    denominator = 10**9
    while denominator > 1 and denominator * longest * (1.0 + top * peak) > 2.0**59:
        denominator //= 10

    scaled = np.rint(per_round * denominator).astype(np.int64)
    change = np.flatnonzero(np.diff(scaled, prepend=0))
    # Round t is part of unit (t - 1) // unit; blocks begin and end anywhere in a unit.
    cuts = np.unique(np.concatenate([change * unit, model.block_begin, [len(scaled) * unit]]))
    owner = np.searchsorted(model.block_begin, cuts, side="right") - 1
    value = np.append(scaled, 0)[np.minimum(cuts // unit, len(scaled))]
    shift = model.block_real - model.block_begin
    rounds, price = (cuts + shift[owner] + 1).tolist(), value.tolist()

    for b in range(len(shift) - 1):
        if model.block_real[b + 1] > model.block_end[b] + shift[b]:
            rounds.append(int(model.block_end[b] + shift[b]) + 1)
            price.append(0)

    merged_rounds: list[int] = []
    merged: list[int] = []
    before = 0

    for at, p in sorted(zip(rounds, price, strict=True)):
        if p != before:
            merged_rounds.append(at)
            merged.append(p)
            before = p

    if not merged:
        merged_rounds, merged = [1], [0]

    return Prices(
        np.array(merged_rounds, dtype=np.int64), np.array(merged, dtype=np.int64), denominator
    )
