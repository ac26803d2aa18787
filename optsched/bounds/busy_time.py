r"""Prices of machine time, and what each token pays at its best moment: the bound under load.

docs/formulations.md, "Prices of machine time", has the notation and the proof, and
`optsched.bounds.checker.busy_time` the bound. Here prices are found in floating point, and what
they prove, or nearly so over fewer pieces, is what the checker says. A token has own work w, a
share sigma of fixed costs and a part theta of its request's latency. Out of a batch of length T
with the fixed cost f it pays p1 (w + sigma) + p2 w T / (T - f), and pi = p1 + p2 is the price of
machine time.

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
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from math import isqrt
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import CHARGES, WORKERS, Bound, BoundTask, Proof
from optsched.bounds.batch import (
    PROVED_FOR,
    in_seconds,
    part_of,
    requests_of,
)
from optsched.bounds.checker.busy_time import (
    Costs,
    Prices,
    WeightedCosts,
    alone_of,
    check_busy_time,
    chunk_share,
    line_of,
)
from optsched.bounds.checker.parts import Rejected, Unlimited
from optsched.bounds.checker.prefixes import Charge
from optsched.bounds.checker.requests import Part
from optsched.bounds.leaves import (
    TICKS_PER_SECOND,
    busy_time_leaf,
    price_unit,
    seconds_of,
    ticks_of,
)
from optsched.bounds.timeline import schedule_prices as schedule_prices
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.kernel import njit

Floats = NDArray[np.float64]
Curve: TypeAlias = tuple[Floats, float]
"""Prices on cells of time, before p2 is cut off, and the seconds of a cell."""

# Cells of time at first. For the value that counts there are so many for each request, but no more
# than leave requests times cells below the last number.
_CELLS, _FINER, _MOST = 8_000, 64, 150_000_000
# Chords over a request's decode steps, and 2**.. pieces of its prefill, for finding the cap.
_CHORDS, _PIECES = 2, 2
# The first cap of p2, others, and the ratios by which the best of these moves. A price is in
# seconds of latency per second: how many requests wait.
_FIRST_CAP, _CAPS, _RATIOS = 700.0, (200.0, 50.0, 5.0), (1.6, 1.25)


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

    Slopes are the least ones of all requests. ``charged`` is what they pay of shared prefills
    (`BoundTask`), None for whole prompts.
    """
    rates, requests = requests_of(instance, cost, charged)
    # What tokens after the first take, as lines by their number.
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


@njit
def cell_at(moment: float, width: float) -> int:
    """Return the cell c with fl(c width) <= moment < fl((c + 1) width)."""
    # The quotient is rounded, so the cell beside may be the right one.
    c = int(moment / width)
    while c > 0 and c * width > moment:
        c -= 1
    while (c + 1) * width <= moment:
        c += 1

    return c


def prices_of(tokens: Tokens, cells: int, machines: int = 1, weight: Floats | None = None) -> Curve:
    """Return the prices of the schedule (module's text, Prices used), by Smith's rule of weights.

    Of several machines each has the price over their number of one machine that is as fast as all.
    """
    price, width = schedule_prices(tokens.arrival, tokens.machine / machines, cells, weight)
    return price / machines, width


def quick_costs(
    part: Part, curves: Sequence[Curve], objective: str = "tel", share: int | None = None
) -> Costs:
    """Return what requests pay nearly, at prices under any caps.

    `share` is the weight of first tokens where there are two curves, as in `optsched.bounds.pools`.
    """
    # Costs are on scales that the highest prices decide, and no cap makes these higher.
    highest = [capped(curve, np.inf) for curve in curves]
    return Costs(part, highest, objective, share, _CHORDS, _PIECES)


def capped(curve: Curve, cap: float) -> Prices:
    """Return prices with so much of p2 at most, on a scale that is the same for all caps.

    What the cap takes off p2 is p1, so that their sum is the curve. Roots of p2 are not rounded
    down for sure, as the checker's are.
    """
    price, width = curve
    unit = price_unit(float(price.max()))
    whole = np.rint(price * unit).astype(np.int64)
    top = int(whole.max())
    p2 = np.minimum(whole, int(min(cap * unit, top)))
    # p2 times 4**shift stays below 2**62, so that its root has as many bits as fit into 31, as the
    # checker's has.
    shift = max(0, 62 - top.bit_length()) // 2
    root = np.sqrt(p2 * 4.0**shift).astype(np.int64)
    highest = top, top, isqrt(top << 2 * shift)
    # From the third on: p1, p2, the roots of p2, and the highest of each of these three.
    return Prices(ticks_of(width), unit, whole - p2, p2, root, highest, shift)


def leaf_of(curve: Curve, cap: float) -> dict[str, Any]:
    """Return the leaf of prices with so much of p2 at most; p1 is the rest of the curve."""
    price, width = curve
    p2 = np.minimum(price, cap)
    return busy_time_leaf(width, price - p2, p2)


def has_time(budget: Budget) -> bool:
    """Return whether there is time to try other prices."""
    return not budget.stopped and budget.spent_s < 0.8 * budget.limit_s


def best_cap(
    value: Callable[[float], float], cap: float, highest: float, in_time: Callable[[], bool]
) -> float:
    """Return a cap of p2 of a large value: the best of some, and then of its neighbours.

    `value`: what prices with a cap prove, nearly. `cap`: the first one. `highest`: the highest
    price, beyond which all caps are the same. `in_time`: whether to try another one.
    """
    at = cache(value)
    for other in _CAPS:
        if in_time() and at(min(other, highest)) > at(min(cap, highest)):
            cap = other

    # Go up, and down, for as long as each step gains: first by a large ratio, then by a small one.
    for ratio in _RATIOS:
        for step in (1 / ratio, ratio):
            while in_time() and at(min(cap * step, highest)) > at(min(cap, highest)):
                cap *= step

    return cap


def busy_time(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, in seconds."""
    value, leaf = _best_leaf(task, budget, "tel")
    return Proof(max(0.0, seconds_of(value)), tree=leaf if task.workers == 1 else None)


def weighted_busy_time(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on weighted latency in seconds, or on weighted completion, which is more.

    It is more by the weighted sum of arrivals.
    """
    value, leaf = _best_leaf(task, budget, "weighted_latency")
    if task.goal.name == "weighted_latency":
        # Certificates are for one worker.
        return Proof(max(0.0, seconds_of(value)), tree=leaf if task.workers == 1 else None)

    # The checker knows no weighted completions in seconds, so there is no tree.
    columns = zip(task.instance.weights.tolist(), task.instance.release_times.tolist(), strict=True)
    rest = sum(weight * Fraction(arrival) for weight, arrival in columns)
    return Proof(seconds_of(max(0, value) + int(rest * TICKS_PER_SECOND)))


def _best_leaf(task: BoundTask, budget: Budget, goal: str) -> tuple[int, dict[str, Any] | None]:
    """Return the most ticks that some prices prove, and their leaf.

    It is 0, without a leaf, if the checker refuses numbers as too large.
    The cap of p2 is chosen on few cells, and prices on more cells are tried with the same cap.
    """
    instance, machines = task.instance, task.workers
    tokens = tokens_of(instance, task.batch_cost, task.charged)
    part, cap = part_of(task), _FIRST_CAP
    weight = None if goal == "tel" else instance.weights.astype(np.float64)
    curve = prices_of(tokens, _CELLS, machines, weight)
    cells = min(_FINER * instance.n, _MOST // instance.n)

    try:
        if has_time(budget):
            # `Costs` is made with the width and the highest prices: the same for all caps.
            of = Costs if goal == "tel" else WeightedCosts
            costs = of(part, [capped(curve, np.inf)], chords=_CHORDS, pieces=_PIECES)
            cap = best_cap(
                lambda cap: costs.value([capped(curve, cap)]),
                cap,
                float(curve[0].max()),
                lambda: has_time(budget),
            )

        leaves = [leaf_of(curve, cap)]
        if cells > _CELLS and has_time(budget):
            leaves.append(leaf_of(prices_of(tokens, cells, machines, weight), cap))

        proved = [(check_busy_time(part, leaf, goal, Unlimited()), leaf) for leaf in leaves]
    except (Rejected, ArithmeticError):  # as too large
        return 0, None

    return max(proved, key=itemgetter(0))


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
WEIGHTED = Bound(
    "smith-time",
    "prices of machine time along a preemptive schedule by Smith's rule",
    "second",
    ("weighted_latency", "weighted_completion"),
    weighted_busy_time,
    PROVED_FOR | WORKERS,
    searches=True,
    certifies=True,
)
