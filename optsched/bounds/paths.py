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

*Rounding.* An integral of g is a sum of at most `_WINDOW` non-negative terms, so it is off by at
most `_WINDOW` 2^-52 of itself; `_SLACK` times m nu plus the integral up to the end is taken off
whatever a multiplier proves. The error of g itself, below 2^-50 nu / f, and those of the sums over
requests and prices are covered by the relative margin of `optsched.bounds.busy_time`, doubled, as
long as nu / f < 10^5.
"""

from __future__ import annotations

import time
import warnings

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.bounds.base import Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR
from optsched.bounds.busy_time import Floats, Tokens, cell_at, margin, tokens_of
from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError
from optsched.problem.instance import Instance

_WINDOW = 1 << 15
"""Cells after its arrival that a request's path may extend over; beyond, only time counts."""
_SLACK = 4.0 * _WINDOW * 2.0**-52
_LEVELS = np.array([0.1, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0])
"""Multipliers are best for steady prices of these times the mean price after the arrival."""
_FINE_LEVELS = np.array([0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.2, 3.5, 6.0, 10.0, 20.0, 40.0])
_CELLS_PER_CHAIN = 75
_MOST_CELLS = 2_000_000
_MOST_IN_SYSTEM = 40.0
"""Mean number of requests in the system beyond which prices are not searched for."""


@njit(cache=True)
def _gain(nu: float, root: float, work: float, fixed: float, price: float, sqrt: float) -> float:
    """Return g; ``root`` is sqrt(nu), ``sqrt`` is sqrt(price work)."""
    if sqrt >= root:
        return 0.0
    if sqrt * (fixed + work) >= root * work:
        return (root - sqrt) ** 2 / fixed
    return max(0.0, nu / (fixed + work) - price)


@njit(cache=True)
def _used(root: float, work: float, fixed: float, sqrt: float) -> float:
    """Return own work per unit of its batch's room, w / (T - f), at the best T."""
    if work <= 0 or sqrt >= root:
        return 0.0
    if sqrt * (fixed + work) >= root * work:
        ratio = sqrt / root
        return work * (1 - ratio) / (fixed * ratio)
    return 1.0


@njit(cache=True)
def _worth(work: float, fixed: float, price: float) -> float:
    """Return min over T >= f + w of T + price w T / (T - f): the multiplier at steady prices."""
    if work <= 0:
        return fixed
    room = max(work, np.sqrt(price * work * fixed))
    return (fixed + room) * (1 + price * work / room)


@njit(cache=True)
def costs_of_paths(
    tokens: Tokens, chain: Floats, width: float, price: Floats, levels: Floats, use: Floats
) -> float:
    """Return the sum of what all requests cost at least; add the machine time used to ``use``.

    ``use`` is left alone when it is empty; ``chain`` is `Tokens.chain`.
    """
    arrival, prefill, first, steps = tokens.arrival, tokens.prefill, tokens.first, tokens.steps
    work, work_slope = tokens.work, tokens.work_slope
    decode, prefill_fixed = tokens.decode, tokens.prefill_fixed
    cells = price.shape[0]
    roots = np.sqrt(price)
    ahead = np.empty(_WINDOW)  # V of the prefill
    slope = np.empty(_WINDOW)
    after = np.empty(_WINDOW)  # V of the steps
    slope_after = np.empty(_WINDOW)
    level = np.empty(_WINDOW, np.int64)
    level_after = np.empty(_WINDOW, np.int64)
    begin = np.empty(_WINDOW, np.int64)  # where the steps begin, -1 - cell if they pay nothing
    least = np.empty(_WINDOW)  # smallest price so far
    gains = np.empty(_WINDOW)
    area = np.empty(_WINDOW + 1)
    queue = np.empty(_WINDOW, np.int64)
    key = np.empty(_WINDOW)
    nus = np.empty((2, levels.shape[0]))
    total = 0.0
    for i in range(arrival.shape[0]):
        a, m = arrival[i], steps[i]
        c0 = cell_at(a, width)
        lead = (c0 + 1) * width - a  # length of the first cell
        alone = chain[i]
        extra = work_slope * m * (m - 1) / 2
        span = min(_WINDOW, max(32, int(2 * alone / width) + 8))
        mean = 0.0
        for j in range(span):
            mean += price[c0 + j] if c0 + j < cells else 0.0
        mean = max(mean / span, 0.02)
        for k in range(levels.shape[0]):
            nus[0, k] = _worth(prefill[i], prefill_fixed, mean * levels[k])
            nus[1, k] = _worth(work[i], decode, mean * levels[k])
        while True:
            low = np.inf
            for j in range(span):
                low = min(low, price[c0 + j] if c0 + j < cells else 0.0)
                least[j] = low
            for phase in range(2 if m > 0 else 1):
                count, own = (1.0, prefill[i]) if phase == 0 else (m, work[i])
                fixed = prefill_fixed if phase == 0 else decode
                scale = np.sqrt(own)
                for k in range(levels.shape[0]):
                    nu = nus[phase, k]
                    root = np.sqrt(nu)
                    all_paid = nu * count
                    area[0] = 0.0
                    for j in range(span):
                        if c0 + j < cells:
                            sqrt = roots[c0 + j] * scale
                            g = _gain(nu, root, own, fixed, price[c0 + j], sqrt)
                        else:
                            g = nu / (fixed + own)
                        gains[j] = g
                        area[j + 1] = area[j] + g * (width if j > 0 else lead)
                    if phase == 0:
                        for j in range(span):
                            if (c0 + j + 1) * width - a < first[i]:
                                value, s = np.inf, 0.0
                            else:
                                value, s = all_paid - area[j + 1], gains[j]
                                value -= _SLACK * (all_paid + area[j + 1])
                                if value <= 0:
                                    value, s = 0.0, 0.0
                            if k == 0 or value > ahead[j]:
                                ahead[j], slope[j], level[j] = value, s, k
                        continue
                    head = tail = 0
                    last = free = -1  # starts that leave time enough; that make the steps free
                    for j in range(span):
                        end = (c0 + j + 1) * width
                        while last < j and (
                            last < 0 or (c0 + last + 1) * width <= end - (alone - first[i])
                        ):
                            last += 1
                            d = width if last > 0 else lead
                            value = ahead[last] + area[last + 1]
                            value -= max(0.0, gains[last] - slope[last]) * d
                            while tail > head and key[tail - 1] >= value:
                                tail -= 1
                            queue[tail], key[tail] = last, value
                            tail += 1
                        slack = _SLACK * (all_paid + area[j + 1])
                        while free < last and all_paid - slack <= area[j + 1] - area[free + 1]:
                            free += 1
                        while tail > head and queue[head] <= free:
                            head += 1
                        nothing = ahead[free] if free >= 0 else np.inf
                        some = np.inf
                        if tail > head:
                            some = key[head] + all_paid - area[j + 1] - slack
                        if end - a < alone:
                            value, s, start = np.inf, 0.0, 0
                        elif some < nothing:
                            value, start = some, queue[head]
                            s = min(gains[j], (nothing - some) / (width if j > 0 else lead))
                        else:
                            value, s, start = nothing, 0.0, -1 - free
                        value += extra * least[j]
                        if k == 0 or value > after[j]:
                            after[j], slope_after[j], level_after[j] = value, s, k
                            begin[j] = start
            best, at = np.inf, -1
            for j in range(span):
                early = max(0.0, (c0 + j) * width - a)
                if early >= best:
                    break
                paid, s = (after[j], slope_after[j]) if m > 0 else (ahead[j], slope[j])
                if paid == np.inf:
                    continue
                value = paid + max(alone, early + min(1.0, s) * (width if j > 0 else lead))
                if value < best:
                    best, at = value, j
            beyond = (c0 + span) * width - a
            if beyond >= best or span == _WINDOW:
                break
            span = min(_WINDOW, 2 * span)
        total += min(best, beyond)
        if use.shape[0] == 0 or at < 0:
            continue
        j = at
        for phase in range(1 if m > 0 else 0, -1, -1):
            own = prefill[i] if phase == 0 else work[i]
            fixed = prefill_fixed if phase == 0 else decode
            start = 0 if phase == 0 else begin[j]
            nu = nus[phase, level[j] if phase == 0 else level_after[j]]
            root, scale = np.sqrt(nu), np.sqrt(own)
            for c in range(c0 + max(start, 0), min(c0 + j + 1, cells) if start >= 0 else 0):
                share = 1.0 if c > c0 else lead / width
                use[c] += share * _used(root, own, fixed, roots[c] * scale)
            j = start if start >= 0 else -1 - start
    return total


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
    safe = 2 * margin(len(price) + len(tokens.arrival) + _WINDOW)
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
