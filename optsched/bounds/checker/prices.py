"""Prices of KV memory: what a list of them proves, exactly. The prover and the checker call it.

docs/formulations.md, "Prices of memory", proves for prices p_t >= 0 over the denominator D

    D TEL >= sum_i min_{k >= a_i} f_i(k) - M sum_t p_t,
    f_i(k) = D w_i (k + o_i - a_i) + sum_{j=1..o_i} p_{k+j} (q_i + j),  q_i = s_i, cached: s_i - 1.

The weights w_i are 1 for total latency; with others the left side is D times the weighted latency.

Limits on batches only rule schedules out. Prices are constant on pieces of rounds. While the first
round k + 1 stays in one piece (price p) and the last one k + o in another (price r), f is quadratic
with the second difference p - r. Its min over integers is at an end of these starts or, where
p > r, next to its vertex. So it takes O(n * pieces) steps, however far apart the pieces are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Budget
from optsched.problem.kernel import njit

NEVER = 1 << 60
"""The round at which the last piece ends."""
# Of a number its lowest 64 bits: it modulo 2**64.
_WRAP = (1 << 64) - 1
# What a step with integers of any size counts.
_EXACT = 8


class Runs(NamedTuple):
    """Arrivals, outputs, the KV q held before the first round, and weights, as arrays or lists."""

    arrival: Sequence[int]
    output: Sequence[int]
    held: Sequence[int]
    weight: Sequence[int]


class _Pieces(NamedTuple):
    """Begin, end and price of pieces, and the sums of price and price * round before each."""

    begin: Sequence[int]
    end: Sequence[int]
    price: Sequence[int]
    sums: Sequence[int]
    moments: Sequence[int]


def priced_total(
    runs: Runs, capacity: int, from_round: list[int], price: list[int], unit: int, budget: Budget
) -> int:
    """Return the bound times D, ``unit``, that prices from these rounds on prove (module's text).

    Rounds are >= 1 and ascend, and the last price is 0. Before the first round the price is 0.
    """
    begin, price = [0, *from_round], [0, *price]
    # Before each piece, the sums of the price and of price * round over the rounds up to there.
    sums, moments = [0], [0]
    # The last piece is left out: it has no end, and costs nothing.
    for b, e, p in zip(begin, from_round, price, strict=False):
        sums.append(sums[-1] + (e - b) * p)
        moments.append(moments[-1] + p * ((b + e - 1) * (e - b) // 2))

    # The largest number that matters. f at the arrival is at most D w o + price o peak, so the min
    # is too, and so is D w times the delay of the starts that matter. Among them f is at most twice
    # that.
    longest, peak = max(runs.output), max(map(int.__add__, runs.held, runs.output))
    top = unit * max(runs.weight)
    largest = top * longest + max(price) * longest * peak
    pieces = _Pieces(begin, [*from_round, NEVER], price, sums, moments)

    # Compiled code may take 64-bit integers, in which larger sums wrap around (`_minima`). What it
    # halves may not wrap: a product of two delays, which are at most this number over D.
    if 4 * largest < 2**62 and largest // unit < 2**31:
        wrapped: list[Any] = [
            np.array([v & _WRAP for v in c], np.uint64).view(np.int64) for c in pieces
        ]
        lowest = np.zeros(len(runs.arrival), np.int64)
        columns: list[Any] = [np.array(c, np.int64) for c in runs]
        budget.spend_compiled(
            _minima(Runs(*columns), _Pieces(*wrapped), unit, lowest, budget.compiled)
        )
        minima = lowest.tolist()
    else:
        minima = [0] * len(runs.arrival)
        steps = _minima.py_func(runs, pieces, unit, minima, budget.left // _EXACT)
        budget.spend(_EXACT * steps)

    return sum(minima) - capacity * sums[-1]


@njit(nogil=True)
def _minima(runs: Any, pieces: Any, scale: Any, minima: Any, allowed: int) -> int:
    """Fill in the exact min of f of each request (``minima``), and return the steps taken.

    ``scale`` is D. It stops once there are more steps than ``allowed``, and the caller then rejects
    the certificate.

    In compiled code 64-bit sums wrap. Every f that matters fits into 64 bits (see `priced_total`),
    so a result that is right modulo 2**64 is right. Called as plain Python on lists, it computes
    with integers of any size.
    """
    arrival, output, q, weight = runs
    begin, end, price, sums, moments = pieces
    steps = 0

    for i in range(len(arrival)):
        a, o, held, unit = arrival[i], output[i], q[i], scale * weight[i]
        lowest = -1  # none is known: f is never negative
        k = a

        # Bisect for the piece of the first round, k + 1.
        low, high = 0, len(begin) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if begin[middle] <= k + 1:
                low = middle
            else:
                high = middle - 1

        # Starts k, ..., last have their first round in one piece (left) and their last in one
        # (right): such a stretch after another.
        left = right = low
        while True:
            while end[left] <= k + 1:
                left += 1
            while end[right] <= k + o:
                right += 1

            last = min(end[left] - 2, end[right] - 1 - o)
            # Sums of price and of price * round over the rounds up to k, and up to k + o. Of the m
            # rounds of a piece, numbered b to b + m - 1, the latter is price (m b + m (m - 1) / 2);
            # the even factor is halved first, since a product that has wrapped cannot be halved.
            m = k + 1 - begin[left]
            sum_k = sums[left] + m * price[left]
            half = m // 2 * (m - 1) if m % 2 == 0 else (m - 1) // 2 * m
            moment_k = moments[left] + price[left] * (m * begin[left] + half)
            m = k + o + 1 - begin[right]
            sum_o = sums[right] + m * price[right]
            half = m // 2 * (m - 1) if m % 2 == 0 else (m - 1) // 2 * m
            moment_o = moments[right] + price[right] * (m * begin[right] + half)
            value = unit * (k + o - a) + moment_o - moment_k + (held - k) * (sum_o - sum_k)
            if lowest < 0 or value < lowest:
                lowest = value

            # A start whose delay alone costs more than the best so far is not better.
            last = min(last, a - o + lowest // unit)
            if last > k:
                # f(k + x) = f(k) + x rise + bend x (x - 1) / 2: its min is at the last start, or at
                # the vertex if it bends upward and falls at first. ``rise`` is f(k + 1) - f(k): a
                # round of delay, a token less in each round that stays, one more round with all
                # o tokens at the end, and none at the begin.
                bend = price[left] - price[right]
                rise = unit - (sum_o - sum_k - price[left])
                rise += price[right] * (held + o) - price[left] * (held + 1)
                ahead = last - k
                if bend > 0 and rise < 0:
                    ahead = min(ahead, (-rise + bend - 1) // bend)

                value += ahead * rise + bend * (ahead * (ahead - 1) // 2)
                if value < lowest:
                    lowest = value

            # Once every later start has a delay that alone costs more than the best so far, none of
            # them can be better.
            delay = lowest // unit
            if delay < end[left] - 1 + o - a and delay < end[right] - a:
                break

            # The next stretch: its first round, or its last one, enters the piece that follows.
            k = min(end[left] - 1, end[right] - o)

        minima[i] = lowest
        steps += 40 + 8 * (right - low)  # about what the bisection and each stretch take
        if steps > allowed:
            break

    return steps
