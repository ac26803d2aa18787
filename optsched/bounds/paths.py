r"""Prices of machine time, and what each request pays along its best path: the bound at low load.

`optsched.bounds.busy_time` lets every token of a request choose its moment alone. This gives a good
bound when requests wait long and run briefly. When they run at once, their latency is that of a
path: the prefill, then o - 1 steps one after another, each slower the more requests share its
batch. The notation and the inequality

    TEL >= sum_i [ C_i - a_i + payments of i ] - int pi,

in which a token pays mean(pi) w T / (T - f), are those of that module, with p1 = 0 and pi = p2.

*A path in continuous time.* Let request i run its prefill in [a, t] and its m = o - 1 steps in
[t, C]. A step in a batch of length T pays the integral over the batch of pi w / (T - f). For any
nu >= 0, with T >= f + w,

    payment >= nu - int_batch g,    g(pi) = max_{T >= f + w} [ nu / T - pi w / (T - f) ]_+ ,

and its batches are disjoint and lie in [t, C]. So the steps pay together at least

    max(0, m nu - int_t^C g(pi)),         g = (sqrt(nu) - sqrt(pi w))^2 / f,

or nu / (f + w) - pi where that T would be below f + w. They also take the time `chain` of a
request alone. Any nu is valid, and a different one may be taken for every C. So a set of them is
tried, and for each end the largest value holds. The same holds for the prefill, with m = 1, its own
work W and f = base + prefill_base.

*Later steps* cost more. Let step k have own work w + d_k, and let pi_min be the min price in
[a, C]. With nu + pi_min d_k in place of nu, the same g is an upper bound, since pi >= pi_min. So
pi_min sum d_k is added.

*Chunks, refills, restarts.* A prefill's chunk of own work w_c gets the multiplier nu w_c / W. As
w_c <= T - f, its rate is at most (T - f) / W [nu / T - pi W / (T - f)] for T <= f + W. This rises
with T, so g covers it as it stands. A refill is a prefill with more own work than is used for a
step, and with no smaller fixed cost (`Tokens` takes the smaller of the two), and g falls with w and
f. Only the last run of a request that restarts counts.

*First tokens.* Where the end F of the prefill has a weight a and C the rest, as in that module, the
path pays a (F - a_i) at the end of its prefill and (1 - a) (C - a_i) at its end. The payments above
do not change, since they hold for any a_i <= F <= C. The path is that of the prefill which produces
the first token, and of the batches of later tokens. These follow it even where the request loses
its KV in between. A request of one token has F = C.

*Cells.* Prices are constant on cells. V(j) is a lower bound on what is paid up to a moment in
cell j. The slope s(j) >= 0 is such that to finish x seconds before the cell's end costs at least
V(j) + s(j) x. Both follow from the recursion: an earlier end has fewer starts to choose from and
loses g x of the integral. The cost of an end in cell j, whose length is d, is then at least
V(j) + max(chain, begin - a + min(1, s) d). Starts of the steps in cell j' enter with
V(j') + int up to the cell's end, less [g(j') - s(j')]_+ d, which covers every moment of the cell.

With a weight a, V(j) of the prefill is larger by a (end of the cell - a_i), and s(j) is smaller by
a. It may then be negative, so a prefill in cell j costs at least V(j) - [-s(j)]_+ d, and steps that
pay nothing begin after the cheapest prefill so far. There d is cut to the part of the cell that is
later than a_i plus the prefill's own time. The end of the steps counts with 1 - a, as
max((1 - a) chain, (1 - a) (begin - a_i) + min(1 - a, s) d).

Any prices are valid. `optsched.bounds.shares` adds a second price and chooses both.

*Rounding.* An integral of g is a sum of at most `WINDOW` non-negative terms, so its relative error
is at most `WINDOW` 2^-52. `SLACK` times (m nu plus the integral up to the end) is subtracted from
what a multiplier proves. The error of g itself is below 2^-50 nu / f. As long as nu / f < 10^5,
this error and those of the sums over requests and prices are covered by twice the relative margin
of `optsched.bounds.busy_time`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import BoundTask
from optsched.bounds.busy_time import Floats, Tokens, margin
from optsched.bounds.paths_kernel import WINDOW, Shared, Use, costs_of_paths
from optsched.problem.instance import Instance


def value_at(
    tokens: Tokens,
    width: float,
    price: Floats,
    levels: Floats,
    use: Use | None = None,
    ttft_weight: float = 0.0,
    shared: Shared | None = None,
    centre: Floats | None = None,
) -> float:
    """Return the bound on total latency, or on its weighted sum, that prices prove, rounded down."""
    empty = np.zeros(0)
    use = Use(empty, empty, empty) if use is None else use
    shared = nothing_shared(tokens, price) if shared is None else shared
    centre = np.zeros((0, 2)) if centre is None else centre
    total = costs_of_paths(
        tokens, tokens.chain, width, price, shared, levels, centre, use, ttft_weight
    )
    paid = float(price.sum() + shared.price.sum()) * width
    safe = 2 * margin(len(price) + len(tokens.arrival) + WINDOW)

    return total * (1 - safe) - paid * (1 + safe)


def nothing_shared(tokens: Tokens, price: Floats) -> Shared:
    """Return prices p3 of 0 and no shares."""
    none = np.zeros(len(tokens.arrival) + 1, np.int64)
    return Shared(np.zeros(len(price)), none, np.zeros(0))


def completions_of(task: BoundTask, instance: Instance, chain: Floats) -> Floats:
    """Return when requests of an instance in seconds may end, from the first arrival on.

    That is in the caller's schedule, or `chain` after their arrival if there is none.
    """
    found = None if task.completions is None else task.completions(instance, task.batch_cost)
    return np.asarray(instance.release + chain if found is None else found, dtype=np.float64)


def in_system(arrival: Floats, finish: Floats, width: float, cells: int) -> NDArray[np.int64]:
    """Return the number of requests in the system in the middle of each cell."""
    moments = (np.arange(cells) + 0.5) * width
    arrived, finished = (np.searchsorted(np.sort(t), moments, "right") for t in (arrival, finish))
    return arrived - finished
