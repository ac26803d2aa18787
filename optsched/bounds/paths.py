r"""Prices of machine time, and what each request pays along its best path: the bound at low load.

`optsched.bounds.busy_time` lets every token of a request choose its moment alone, which is right
when requests wait long and run briefly. When they run at once, their latency is that of a path:
the prefill, then o - 1 steps one after another, each slower the more requests share its batch.
Notation and the inequality

    TEL >= sum_i [ C_i - a_i + payments of i ] - int pi,

a token paying mean(pi) w T / (T - f), are that module's, with p1 = 0 and pi = p2.

*A path in continuous time.* Let request i run its prefill in [a, t] and its m = o - 1 steps in
[t, C]. A step in a batch of length T pays the integral over the batch of pi w / (T - f). For any
nu >= 0, with T >= f + w,

    payment >= nu - int_batch g,    g(pi) = max_{T >= f + w} [ nu / T - pi w / (T - f) ]_+ ,

and its batches are disjoint and lie in [t, C]. So the steps pay together at least

    max(0, m nu - int_t^C g(pi)),         g = (sqrt(nu) - sqrt(pi w))^2 / f,

or nu / (f + w) - pi where that T would be below f + w. They also take the time `chain` of a
request alone. Any nu is valid, and another may be taken for every C: a set of them is tried, and
for each end the largest value holds. For the prefill the same with m = 1, its own work W and
f = base + prefill_base.

*Later steps* cost more: if step k has own work w + d_k, nu + pi_min d_k in place of nu has the
same g as an upper bound where pi >= pi_min, so pi_min sum d_k is added, pi_min the least price
in [a, C].

*Chunks, refills, restarts.* A prefill's chunk of own work w_c gets the multiplier nu w_c / W. As
w_c <= T - f, its rate is at most (T - f) / W [nu / T - pi W / (T - f)] for T <= f + W, which
rises with T: g as it stands covers it. A refill is a prefill with more own work and no smaller
fixed cost than what is used for a step (`Tokens` takes the smaller of the two), and g falls with
w and f. Of a request that restarts, its last run counts.

*Cells.* Prices are constant on cells. V(j) is a lower bound on what is paid up to a moment in
cell j, and s(j) >= 0 such that finishing x seconds before the cell's end costs at least
V(j) + s(j) x. Both follow from the recursion: an earlier end has fewer starts to choose from and
loses g x of the integral. The cost of ending in cell j, whose length is d, is then at least
V(j) + max(chain, begin - a + min(1, s) d). Starts of the steps in cell j' enter with
V(j') + int up to the cell's end, less [g(j') - s(j')]_+ d, which covers every moment of the cell.

*Prices used.* From a schedule: proportional to N^1.5, N the number of requests in the system,
then ascent: where the best paths use more machine time than there is, the price rises, where
they use less it falls. Any prices are valid.

*Rounding.* An integral of g is a sum of at most `WINDOW` non-negative terms, so it is off by at
most `WINDOW` 2^-52 of itself; `SLACK` times m nu plus the integral up to the end is taken off
whatever a multiplier proves. The error of g itself, below 2^-50 nu / f, and those of the sums over
requests and prices are covered by the relative margin of `optsched.bounds.busy_time`, doubled, as
long as nu / f < 10^5.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.busy_time import Floats, Tokens, margin, tokens_of
from optsched.bounds.paths_kernel import WINDOW, costs_of_paths
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance

_LEVELS = np.array([0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0])
"""Multipliers are best for steady prices of these times the mean price after the arrival."""
_FINE_LEVELS = np.array([0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.2, 3.5, 6.0, 10.0, 20.0, 40.0])
_CELLS_PER_CHAIN = 75
_MOST_CELLS = 2_000_000
_MOST_IN_SYSTEM = 40.0
"""Mean number of requests in the system beyond which prices are not searched for."""


def value_at(
    tokens: Tokens, width: float, price: Floats, levels: Floats, use: Floats | None = None
) -> float:
    """Return the bound on total latency at prices on cells of ``width`` seconds, rounded down.

    Parameters
    ----------
    tokens : Tokens
    width : float
    price : ndarray of float64
    levels : ndarray of float64
        See `_LEVELS`.
    use : ndarray of float64, optional
        Filled with the machine time that the best paths use, per cell and second.
    """
    used = np.zeros(0) if use is None else use
    total = costs_of_paths(tokens, tokens.chain, width, price, levels, used)
    paid = float(price.sum()) * width
    safe = 2 * margin(len(price) + len(tokens.arrival) + WINDOW)
    return total * (1 - safe) - paid * (1 + safe)


def in_system(instance: Instance, cost: BatchCost, chain: Floats) -> tuple[Floats, Floats]:
    """Return arrivals and completions, each sorted, of an online schedule or else of chains.

    Both are counted from the first arrival.
    """
    arrival = instance.release
    try:
        with warnings.catch_warnings():  # of the cost model's range: nothing is claimed here
            warnings.simplefilter("ignore")
            finish = evaluate(instance, simulate(instance, "least-work", cost), cost).clock.finish
    except OptschedError:  # a prompt beyond a hard limit that it does not split
        finish = arrival + chain
    return np.sort(arrival), np.sort(np.asarray(finish, dtype=np.float64))


def paths(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, seconds (module's text).

    No evaluation starts that would not end in time, judged by those before. Where requests are so
    many that `optsched.bounds.busy_time` is the better bound, the value is the sum of chains: the
    paths where nothing is paid.
    """
    tokens = tokens_of(task.instance, task.batch_cost)
    chain = tokens.chain * (1 - margin(3))
    best = float(chain.sum()) * (1 - margin(task.instance.n))
    arrived, finished = in_system(task.instance, task.batch_cost, chain)
    if budget.limit_s <= 0 or (finished - arrived).sum() > _MOST_IN_SYSTEM * finished[-1]:
        return Proof(best)
    width = max(float(chain.mean()) / _CELLS_PER_CHAIN, float(finished[-1]) / _MOST_CELLS)
    moments = (np.arange(int(finished[-1] / width) + 1) + 0.5) * width
    number: NDArray[np.int64] = np.searchsorted(arrived, moments, "right") - np.searchsorted(
        finished, moments, "right"
    )
    steady = float(tokens.work.mean()) / max(tokens.decode, 1e-12)
    start = 1.2 * min(steady, 1.0) * number**1.5
    floor = np.where(number > 0, 0.1 * min(steady, 1.0), 0.0)
    use = np.zeros(len(start))
    spent = 0.0

    def measured(price: Floats) -> float:
        nonlocal spent
        before = time.perf_counter()
        use[:] = 0.0
        value = value_at(tokens, width, price, _LEVELS, use)
        spent = time.perf_counter() - before
        return value

    value_at(tokens, 1.0, np.zeros(1), _LEVELS, np.zeros(1))  # compiles
    price: Floats = np.asarray(start, dtype=np.float64)
    best_price, reached = price, -np.inf
    steps = stale = 0
    while stale < 3 and (steps == 0 or budget.left_s > 7 * spent):
        value = measured(price)
        if value > reached:
            best_price, reached, stale = price, value, 0
        else:
            stale += 1
        step = 0.4 / (1 + steps / 4)
        price = np.maximum(price * np.exp(step * np.clip(use - 1, -2, 2)), floor)
        steps += 1
    while budget.left_s > 7 * spent:  # the clipped steps fall short on the side of low prices
        value = measured(best_price * 1.03)
        if value <= reached:
            break
        best_price, reached = best_price * 1.03, value
    best = max(best, reached)
    for times in (2, 4):
        if budget.left_s > 1.6 * times * spent and times * len(best_price) <= 4 * _MOST_CELLS:
            finer = np.repeat(best_price, times)
            best = max(best, value_at(tokens, width / times, finer, _FINE_LEVELS))
    return Proof(best)


PATHS = Bound(
    "paths",
    "prices of machine time along each request's path; best at low load",
    "second",
    ("tel",),
    paths,
    PROVED_FOR,
    searches=True,
)
