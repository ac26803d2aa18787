"""Lower bounds on percentiles of latency and TTFT, from how many requests can be that quick.

Let at most m(x) requests of any schedule have a latency of at most x (`most_within`). Let L_k be
the k-th smallest latency, k = 0, ..., n - 1. If m(x) <= k, not all of L_0, ..., L_k are at most x,
so L_k > x. The percentile q is interpolated linearly: with h = (n - 1) q / 100, k = floor(h) and
f = h - k, it is (1 - f) L_k + f L_(k+1), which is at least the same mean of bounds on the two.
Bisection finds an x close to the largest, or ends earlier with a smaller one. In rounds latencies
are integers, so L_k >= x + 1.
"""

import math
from collections.abc import Callable

import numpy as np

from optsched.bounds.base import CHARGES, IN_ROUNDS, WORKERS, Bound, BoundTask, Proof, of_table
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.class_work import within_slos
from optsched.bounds.leaves import TICKS_PER_SECOND
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import TABLES, Ask
from optsched.problem.budget import Budget
from optsched.problem.limits import all_limits

# Interpolation in floating point is rounded down.
_DOWN = 1 - 1e-12
# Bisection in seconds ends within this, relative to the value.
_FINE = 1e-3
# Prices end within this, and begin with so much more.
_CLOSE, _LONGER = 0.01, 1.3
# They are not worth their time for fewer requests, of which exact methods know more.
_MANY = 100

_METRICS = tuple(f"p{q}_{column}" for column in ("latency", "ttft") for q in (50, 90, 99))


def percentile(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on a percentile of latency or TTFT (see the module's text for the proof)."""
    return _interpolated(task, lambda slo, k: _order_statistic(task, budget, slo, k))


def by_class(task: BoundTask, budget: Budget) -> Proof:
    """Return the same by what requests cost by class of batch length, under a tabulated model.

    The k-th smallest time is at least the k-th smallest of requests alone.
    """
    found = within_slos(task, budget)
    if found is None:
        return Proof(0.0)

    limits = all_limits(task.instance, {"slo_latency": 1.0}, columns=False)
    ask = Ask(task.instance, task.cost_model, limits, task.workers, floors=found[1])
    works = {"slo_ttft": ask.works.first, "slo_latency": ask.works.chain}

    def statistic(slo: str, k: int) -> float:
        alone = float(np.sort(works[slo])[k]) / TICKS_PER_SECOND * _DOWN
        return _by_prices(task, ask, budget, slo, k, alone)

    return _interpolated(task, statistic)


def _interpolated(task: BoundTask, statistic: Callable[[str, int], float]) -> Proof:
    """Return what bounds on the k-th smallest times say of a percentile."""
    share, column = task.goal.name[1:].split("_")  # of a name such as p90_latency
    h = (task.instance.n - 1) * int(share) / 100
    k = math.floor(h)
    low = statistic(f"slo_{column}", k)
    if h == k:
        return Proof(low)

    # The next value is no smaller than the k-th one, so what that is above holds for it, too.
    high = max(low, statistic(f"slo_{column}", k + 1))
    return Proof(((k + 1 - h) * low + (h - k) * high) * _DOWN)


def _order_statistic(task: BoundTask, budget: Budget, slo: str, k: int) -> float:
    """Return a value that the k-th smallest time is above, or in rounds at least; k counts from 0.

    ``slo`` is the limit on these times, such as ``slo_ttft``.
    """
    instance = task.instance

    def is_below(limit: float) -> bool:
        """Whether at most k requests can be within a limit, so that the k-th time is above it."""
        asked = task.cost_model, {slo: limit}, task.workers
        return most_within(instance, *asked, columns=False, charged=task.charged) <= k

    # Double until a limit is not below (or the time is over), then bisect.
    in_rounds = instance.in_rounds
    low, high = 0.0, 1.0
    while not budget.over and is_below(high):
        low, high = high, 2 * high
    while not budget.over and high - low > (1.0 if in_rounds else _FINE * high):
        middle = math.floor((low + high) / 2) if in_rounds else (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle

        # With 0 as the low end the relative width never falls: a microsecond is small enough.
        if high < _FINE * _FINE:
            break

    # In rounds times are integers, so above the limit is one round more.
    if in_rounds:
        return low + 1.0

    # The limit of 1 only stands in for those that are set below.
    limits = all_limits(instance, {slo: 1.0}, columns=False)
    ask = Ask(instance, task.batch_cost, limits, task.workers, task.charged)
    return _by_prices(task, ask, budget, slo, k, low)


def _by_prices(task: BoundTask, ask: Ask, budget: Budget, slo: str, k: int, low: float) -> float:
    """Return a time from ``low`` on that the k-th smallest is above, by `bounds.slo_prices`.

    These take longer to compute than work alone, so they begin where that ends.
    """
    instance, high = task.instance, math.inf
    # Nor is there a place to begin from where work alone proved nothing.
    if instance.n < _MANY or low == 0:
        return low

    while not budget.over and high > low * (1 + _CLOSE):
        # Longer limits until one is not below, then bisection of the ratio.
        limit = _LONGER * low if high == math.inf else math.sqrt(low * high)
        others = dict.fromkeys(ask.limits, [math.inf] * instance.n)
        ask.limits = {**others, slo: [limit] * instance.n}
        if ask.between(k + 1, budget).most <= k:
            low = limit
        else:
            high = limit

    return low


_WORK = "how many requests slo-work and slo-prices allow to be that quick"
_VOLUME = "how many requests slo-volume allows to be that quick"
_PROVED = PROVED_FOR | WORKERS | CHARGES
TAIL = Bound("tail-work", _WORK, "second", _METRICS, percentile, _PROVED, searches=True)
_BY_CLASS = "how many requests slo-classes allows to be that quick"
TAIL_BY_CLASS = Bound(
    "tail-classes",
    _BY_CLASS,
    "second",
    _METRICS,
    by_class,
    TABLES,
    searches=True,
    suits=of_table,
    weight=4.0,
)
TAIL_ROUNDS = Bound("tail-volume", _VOLUME, "round", _METRICS, percentile, IN_ROUNDS, searches=True)
