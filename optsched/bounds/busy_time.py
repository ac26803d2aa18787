r"""Prices of machine time, and what each token pays at its best moment: the bound under load.

docs/formulations.md, "Prices of machine time", has the notation and the proof. This module finds
prices in floating point.

*The minimum.* A prefill has 2 `_PIECES` pieces for each chord of the steps; a step's moment is no
earlier than the chain of the steps before its chord. A batch lasts f + w or more, with w that of
the first step of the chord. So at price 0 a request costs nearly all of its chain.

*Evictions.* Work lost to evictions is left out, which only lowers what is paid. Only the last run
of a request that restarts counts. Where a request keeps its output tokens, token 1 is that of the
first run: its prefill is whole, and each later token comes from a refill or a decode step in a
batch of its own after it.

*Weights used.* theta is proportional to w + sigma.

*Prices used.* The dual of the preemptive weighted-shortest-processing-time schedule in which
request i needs L_i = sum (w + sigma) of the machine. Going back in time, the price rises with
slope 1 / L_j while j runs, and it is continuous where j completes or another job is taken up. At
the end of a preempted piece it is the price at which j resumes plus (resume - end) / L_j. It is 0
before idle time. This price is optimal where p2 = 0 and theta is the one used. Then p2 = min(pi,
cap), with the cap that gives the best bound. Prices are constant on cells of time. Any prices are
valid.

*Rounding.* Costs and the integral are sums of N <= 18 n + (cells) non-negative terms, each with a
relative error below 1e-12; summation adds at most N 2^-53. Both sums are moved by the safe
relative margin 1e-9 + 2 N 2^-53 before they are subtracted. A cell is found by comparing with the
same floats that represent its ends, so that every moment belongs to exactly one cell.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import CHARGES, WORKERS, Bound, BoundTask, Proof
from optsched.bounds.batch import (
    PROVED_FOR,
    in_seconds,
    requests_of,
)
from optsched.bounds.checker.busy_time import alone_of, chunk_share, line_of
from optsched.bounds.checker.prefixes import Charge
from optsched.bounds.leaves import busy_time_leaf
from optsched.bounds.timeline import schedule_prices as schedule_prices
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]

_SAFETY = 1e-9
# Cells of time; for the value also so many for each request, if requests times cells are few.
_CELLS, _FINER, _MOST = 8_000, 64, 150_000_000
# Chords over a request's decode steps, for finding the cap and for the value.
_COARSE, _FINE = 2, 8
# Pieces of a prefill for each chord.
_PIECES = 2
# First values of the cap of p2, in requests. The cap is then refined around the best one.
_CAPS = (700.0, 200.0, 50.0, 5.0)


class Tokens(NamedTuple):
    """Lower bounds on what tokens take, in seconds; columns have the shape (n,).

    Arrivals count from the first one. ``prefill`` and ``work`` are own work of the first and of the
    second token, and ``prefill_paid`` and ``paid`` have shares of fixed costs, too. The slopes are
    lower bounds on the growth with every token. ``first`` is the time of the prefill's batches,
    ``steps`` the number of tokens after the first, and ``alone`` the time of the second token's
    batch, which grows by ``work_slope``. ``decode`` and ``prefill_fixed`` are the fixed costs of a
    batch that decodes (or refills, if that is less), and of one that prefills.
    """

    arrival: Floats
    prefill: Floats
    prefill_paid: Floats
    first: Floats
    steps: Floats
    work: Floats
    paid: Floats
    work_slope: float
    paid_slope: float
    decode: float
    prefill_fixed: float
    alone: Floats

    @property
    def machine(self) -> Floats:
        """The machine time L_i of each request: own work and shares of all its tokens."""
        rest = self.steps * self.paid + self.paid_slope * self.steps * (self.steps - 1) / 2
        return self.prefill_paid + rest

    @property
    def chain(self) -> Floats:
        """Time of all batches of each request if it were alone."""
        rest = self.steps * self.alone + self.work_slope * self.steps * (self.steps - 1) / 2
        return self.first + rest


def tokens_of(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None = None
) -> Tokens:
    """Return lower bounds on what tokens take, which are the checker's, in seconds.

    Slopes are the least ones of all requests.
    """
    rates, requests = requests_of(instance, cost, charged)
    lines = [line_of(rates, request) for request in requests]
    columns = in_seconds(
        rates,
        [
            (r.own, r.own + chunk_share(rates, r), r.first, line.work, line.paid, alone)
            for r, line in zip(requests, lines, strict=True)
            for alone in (alone_of(rates, r.prompt),)
        ],
    )
    slopes = min(line.work_slope for line in lines), min(line.paid_slope for line in lines)
    fixed = min(rates.decode, rates.refill), rates.refill
    work_slope, paid_slope, decode, refill = in_seconds(rates, [(*slopes, *fixed)]).ravel().tolist()
    prefill, prefill_paid, first, work, paid, alone = columns

    return Tokens(
        arrival=instance.release,
        prefill=prefill,
        prefill_paid=prefill_paid,
        first=first,
        steps=(instance.output_tokens - 1).astype(np.float64),
        work=work,
        paid=paid,
        work_slope=work_slope,
        paid_slope=paid_slope,
        decode=decode,
        prefill_fixed=refill,
        alone=alone,
    )


class Prices(NamedTuple):
    """Prices of machine time on cells of so many seconds, and square roots of p2."""

    width: float
    p1: Floats
    p2: Floats
    root2: Floats


def margin(terms: int) -> float:
    """Return the relative margin that covers the rounding of a sum (module's text, Rounding)."""
    return _SAFETY + 2.0 * terms * 2.0**-53


@njit
def cell_at(moment: float, width: float) -> int:
    """Return the cell c with fl(c width) <= moment < fl((c + 1) width)."""
    c = int(moment / width)
    while c > 0 and c * width > moment:
        c -= 1
    while (c + 1) * width <= moment:
        c += 1

    return c


class Token(NamedTuple):
    """What one token pays: ``paid`` times p1, and the least over its batch's own work for p2.

    Where p2 < ``turn`` its batch does no other own work than ``low``. That is ``least`` of latency,
    and ``short`` times p2. From there on it is ``work`` times p2 and ``root`` times its root.
    """

    paid: float
    work: float
    root: float
    least: float
    short: float
    turn: float


@njit
def token_of(paid: float, work: float, fixed: float, later: float, low: float) -> Token:
    """Return a token of weight Theta = ``later`` in a batch of at least ``low`` own work."""
    root, turn, short = 2 * np.sqrt(work * fixed * later), -1.0, work
    if low > 0:
        short = work + fixed * work / low
        turn = later * low * low / (work * fixed) if work * fixed > 0 else np.inf

    return Token(paid, work, root, later * low, short, turn)


@njit
def _least(theta: float, earliest: float, token: Token, prices: Prices) -> float:
    """Return min over tau >= earliest of theta (tau - earliest) and what the token pays."""
    width, p1, p2, root2 = prices
    c = cell_at(earliest, width)
    best = np.inf

    while True:
        value = theta * max(0.0, c * width - earliest) + token.least
        if value >= best:
            return best
        if c >= p1.shape[0]:  # no price from here on
            return value

        value += p1[c] * token.paid
        if p2[c] < token.turn:
            value += p2[c] * token.short
        else:
            value += max(0.0, p2[c] * token.work + root2[c] * token.root - token.least)

        best = min(best, value)
        c += 1


@njit(nogil=True)
def costs_at_prices(
    tokens: Tokens,
    chords: int,
    prices: tuple[Prices, Prices],
    weights: Floats,
    moved: Floats,
) -> float:
    """Return sum_i sum_k min F_k by chords over the decode steps (module's text).

    ``prices`` are those of prefills and of decodes. ``weights`` has theta_1 of each request, and
    ``moved`` the least time from its first token to its first decode step.
    """
    arrival, prefill, prefill_paid = tokens.arrival, tokens.prefill, tokens.prefill_paid
    first, steps, work, paid = tokens.first, tokens.steps, tokens.work, tokens.paid
    work_slope, paid_slope = tokens.work_slope, tokens.paid_slope
    decode, prefill_fixed, alone = tokens.decode, tokens.prefill_fixed, tokens.alone
    total = 0.0

    for i in range(arrival.shape[0]):
        a, m, theta = arrival[i], steps[i], weights[i]
        token = token_of(prefill_paid[i], prefill[i], prefill_fixed, theta / 2, prefill[i])
        total += theta / 2 * prefill_fixed
        for q in range(_PIECES * chords):
            ahead = q / (_PIECES * chords) * (prefill[i] + prefill_fixed)
            value = theta * ahead + _least(theta, a + ahead, token, prices[0])
            total += value / (_PIECES * chords)

        each = (1 - theta) / m if m > 0 else 0.0
        total += theta * moved[i]
        if each == 0:
            total += theta * (m * alone[i] + work_slope * m * (m - 1) / 2)
            continue

        low = 0.0
        for b in range(chords):
            high = np.floor(m * (b + 1) / chords)
            if high == low:
                continue

            least = work[i] + work_slope * low
            ahead = first[i] + moved[i] + low * alone[i] + work_slope * low * (low - 1) / 2
            for k in (low, high - 1):
                later = theta + each * (k + 0.5)
                w = work[i] + work_slope * k
                token = token_of(paid[i] + paid_slope * k, w, decode, later, least)
                value = each * ahead + later * decode + _least(each, a + ahead, token, prices[1])
                total += (high - low) / 2 * value

            low = high

    return total


def prices_of(tokens: Tokens, cells: int, machines: int = 1) -> tuple[Floats, float]:
    """Return the prices of the schedule (module's text, Prices used).

    Of several machines each has the price over their number of one machine that is as fast as all.
    """
    price, width = schedule_prices(tokens.arrival, tokens.machine / machines, cells)
    return price / machines, width


def first_weights(tokens: Tokens) -> Floats:
    """Return theta_1 of each request (module's text, Weights used)."""
    whole, alone = tokens.machine, np.ones(len(tokens.steps))
    some = (tokens.steps > 0) & (whole > 0)
    return np.divide(tokens.prefill_paid, whole, out=alone, where=some)


def value_at(
    tokens: Tokens,
    width: float,
    p1: Floats,
    p2: Floats,
    *,
    chords: int = _FINE,
    machines: int = 1,
) -> float:
    """Return the bound on total latency that prices prove."""
    stage, weights = (Prices(width, p1, p2, np.sqrt(p2)), machines), first_weights(tokens)
    return value_of(tokens, [stage], weights, np.zeros(len(weights)), chords)


def value_of(
    tokens: Tokens,
    stages: Sequence[tuple[Prices, int]],
    weights: Floats,
    moved: Floats,
    chords: int,
) -> float:
    """Return the bound where some machines make first tokens, and others perhaps all later ones.

    `stages`: the prices of so many machines. ``weights`` has theta_1 of each request, and ``moved``
    the least time from its first token until it can decode.
    """
    paid = sum(m * (float(one.p1.sum()) + float(one.p2.sum())) * one.width for one, m in stages)
    cells, prices = sum(len(one.p1) for one, _ in stages), (stages[0][0], stages[-1][0])
    total = float(costs_at_prices(tokens, chords, prices, weights, moved))
    safe = margin(((2 + _PIECES) * chords + 2) * len(tokens.arrival) + cells)

    return total * (1 - safe) - paid * (1 + safe)


def has_time(budget: Budget) -> bool:
    """Return whether there is time to try other prices."""
    return not budget.stopped and budget.spent_s < 0.8 * budget.limit_s


def best_caps(
    value: Callable[[float], float], in_time: Callable[[], bool], caps: Sequence[float] = _CAPS
) -> float:
    """Return the cap of p2 with the largest value among some and among others close to the best."""
    found = {caps[0]: value(caps[0])}
    for cap in caps[1:]:
        if in_time():
            found[cap] = value(cap)

    for ratio in (1.6, 1.25):
        best = max(found, key=found.__getitem__)
        for cap in (best / ratio, best * ratio):
            if in_time():
                found[cap] = value(cap)

    return max(found, key=found.__getitem__)


def busy_time(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, in seconds."""
    tokens = tokens_of(task.instance, task.batch_cost, task.charged)
    machines = task.workers
    price, width = prices_of(tokens, _CELLS, machines)

    def at(cap: float, chords: int = _COARSE) -> float:
        p2 = np.minimum(price, cap)
        return value_at(tokens, width, price - p2, p2, chords=chords, machines=machines)

    best = best_caps(at, lambda: has_time(budget))
    value = max(0.0, at(best), at(best, _FINE) if has_time(budget) else 0.0)
    cells = min(_FINER * task.instance.n, _MOST // task.instance.n)
    if cells > _CELLS and has_time(budget):
        finer, narrow = prices_of(tokens, cells, machines)
        p2 = np.minimum(finer, best)
        found_fine = value_at(tokens, narrow, finer - p2, p2, machines=machines)
        if found_fine > value:
            value, price, width = found_fine, finer, narrow

    if machines > 1:
        return Proof(value)

    p2 = np.minimum(price, best)
    return Proof(value, tree=busy_time_leaf(width, price - p2, p2))


BUSY_TIME = Bound(
    "busy-time",
    "prices of machine time along a preemptive schedule",
    "second",
    ("tel",),
    busy_time,
    PROVED_FOR | CHARGES | WORKERS,
    searches=True,
    suits=lambda task: task.workers > 1,  # for one, `pieces` has this bound as a part
    certifies=True,
)
