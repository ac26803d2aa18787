"""Lower bounds on percentiles of latency and TTFT, from how many requests can be that quick.

Let at most m(x) requests of any schedule have a latency of at most x (`most_within`). Let L_k be
the k-th smallest latency, k = 0, ..., n - 1. If m(x) <= k, not all of L_0, ..., L_k are at most x,
so L_k > x. The percentile q is interpolated linearly: with h = (n - 1) q / 100, k = floor(h) and
f = h - k, it is (1 - f) L_k + f L_(k+1), which is at least the same mean of bounds on the two.
Bisection finds an x close to the largest, or ends earlier with a smaller one. In rounds latencies
are integers, so L_k >= x + 1.
"""

import math

from optsched.bounds.base import CHARGES, IN_ROUNDS, WORKERS, Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import Ask
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
    share, column = task.goal.name[1:].split("_")
    h = (task.instance.n - 1) * int(share) / 100
    k = math.floor(h)
    low = _order_statistic(task, budget, f"slo_{column}", k)
    if h == k:
        return Proof(low)

    high = max(low, _order_statistic(task, budget, f"slo_{column}", k + 1))
    return Proof(((k + 1 - h) * low + (h - k) * high) * _DOWN)


def _order_statistic(task: BoundTask, budget: Budget, slo: str, k: int) -> float:
    """Return a value that the k-th smallest time, from 0, is above, or in rounds at least."""
    instance = task.instance

    def few(limit: float) -> bool:
        asked = task.cost_model, {slo: limit}, task.workers
        return most_within(instance, *asked, columns=False, charged=task.charged) <= k

    # Where at most k requests can be within a limit, the k-th smallest time, from 0, is above it.
    whole = instance.in_rounds
    low, high = 0.0, 1.0
    while not budget.over and few(high):
        low, high = high, 2 * high
    while not budget.over and high - low > (1.0 if whole else _FINE * high):
        middle = math.floor((low + high) / 2) if whole else (low + high) / 2
        if few(middle):
            low = middle
        else:
            high = middle

        if high < _FINE * _FINE:
            break

    return low + 1.0 if whole else _by_prices(task, budget, slo, k, low)


def _by_prices(task: BoundTask, budget: Budget, slo: str, k: int, low: float) -> float:
    """Return a larger time that the k-th smallest is above, as `optsched.bounds.slo_prices` says.

    Its time is longer, so it begins where work alone ends.
    """
    instance, high = task.instance, math.inf
    limits = all_limits(instance, {slo: 1.0}, columns=False)
    ask = Ask(instance, task.batch_cost, limits, task.workers, task.charged)
    while instance.n >= _MANY and low > 0 and not budget.over and high > low * (1 + _CLOSE):
        limit = _LONGER * low if high == math.inf else math.sqrt(low * high)
        ask.limits[slo] = [limit] * instance.n
        low, high = (limit, high) if ask.between(k + 1, budget).most <= k else (low, limit)

    return low


_WORK = "how many requests slo-work and slo-prices allow to be that quick"
_VOLUME = "how many requests slo-volume allows to be that quick"
_PROVED = PROVED_FOR | WORKERS | CHARGES
TAIL = Bound("tail-work", _WORK, "second", _METRICS, percentile, _PROVED, searches=True)
TAIL_ROUNDS = Bound("tail-volume", _VOLUME, "round", _METRICS, percentile, IN_ROUNDS, searches=True)
