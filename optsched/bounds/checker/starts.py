"""What prices and an enumeration of starts prove, exactly: the leaf ``starts``, weights or not.

*What a schedule costs.* Take f_i and prices p_t over D as in `prices`. Every schedule can be
replaced by uninterrupted runs that end no later and hold no more; runs that leave no round idle
while a request waits end by T = max a + sum o. For the starts k_i and the tokens u_t of such runs

    D sum_i w_i (C_i - a_i) = sum_i f_i(k_i) - sum_t p_t u_t
                            = B + sum_i (f_i(k_i) - min f_i) + sum_t p_t (M - u_t),

with B = sum_i min f_i - M sum_t p_t, where minima are over starts and sums over rounds, both up to
T. No term is negative. So a schedule below the value V pays at most D (V - 1) - B beyond B: few
starts are near enough to the best ones, and memory is full wherever it has a price.

*Check.* Rounds are gone through forward. Of a round there are states: who waits, and who runs since
when. A state has the lowest sum paid on the way into it, plus for each request that waits the
lowest excess from now on, and is dropped above what is allowed. If no state reaches the end, no
schedule is below V. Limits on batches and KV blocks only rule schedules out.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

from optsched.bounds.checker.parts import Budget, TooLarge
from optsched.bounds.checker.prices import Runs

MAX_CELLS = 2_000_000
"""Max product of requests and rounds."""
# What a way on from a state counts, in steps.
_WAY = 8

State = tuple[int, tuple[tuple[int, int], ...]]
"""Who waits, as bits, and (request, start) of those that run."""


class Starts(NamedTuple):
    """What starts pay: by request and start the excess and the lowest one from then on.

    ``price`` is that of each round, ``rest`` what an empty machine pays from each round on, and
    ``base`` is B of the module's text. ``unit`` is D.
    """

    runs: Runs
    capacity: int
    unit: int
    base: int
    excess: list[list[int]]
    lowest: list[list[int]]
    price: list[int]
    rest: list[int]


def starts_of(
    runs: Runs, capacity: int, from_round: list[int], price: list[int], unit: int
) -> Starts:
    """Return what starts pay by prices, which are 0 before the first of the rounds."""
    last, n = max(runs.arrival) + sum(runs.output), len(runs.arrival)
    if n * last > MAX_CELLS:
        raise TooLarge(f"starts: found {n} requests in {last} rounds; too large to check")

    dense, pieces = [0] * (last + 2), [*zip(from_round, price, strict=True), (last + 2, 0)]
    for (begin, p), (end, _) in pairwise(pieces):
        dense[begin:end] = [p] * (min(end, last + 2) - min(begin, last + 2))

    # Before each round the sums of the price, and of the price times the round.
    sums = [0, *accumulate(dense)]
    moments = [0, *accumulate(t * p for t, p in enumerate(dense))]
    excess, lowest, base = [], [], -capacity * sums[-1]
    for a, o, held, w in zip(*runs, strict=True):
        f = [
            unit * w * (k + o - a)
            + (held - k) * (sums[k + o + 1] - sums[k + 1])
            + moments[k + o + 1]
            - moments[k + 1]
            for k in range(a, last - o + 1)
        ]
        low = min(f)
        base += low
        excess.append([0] * a + [one - low for one in f])
        lowest.append([0] * a + [one - low for one in [*accumulate(f[::-1], min)][::-1]])

    rest = [capacity * (sums[-1] - before) for before in sums]
    return Starts(runs, capacity, unit, base, excess, lowest, dense, rest)


def lowest_value(starts: Starts, below: int, budget: Budget) -> int | None:
    """Return the lowest value of a schedule below some value, or None if there is none."""
    found: int | None = None
    allowed = (below - 1) * starts.unit - starts.base
    states: dict[State, int] = {((1 << len(starts.excess)) - 1, ()): 0}
    for t in range(len(starts.price) - 2):
        after: dict[State, int] = {}
        for (waiting, running), paid in states.items():
            ways = _ways(starts, t, waiting, running, allowed - paid)
            budget.spend(_WAY * (1 + len(running) + len(ways)))
            for more, left, begun in ways:
                goes_on = tuple(x for x in running if x[1] + starts.runs.output[x[0]] > t + 1)
                goes_on += tuple((i, t) for i in begun if starts.runs.output[i] > 1)
                total = paid + more
                if not left and not goes_on:
                    total += starts.rest[t + 2]
                    if total <= allowed:  # values are whole, so a smaller one is by D or more
                        found, allowed = (starts.base + total) // starts.unit, total - starts.unit
                elif total <= after.get((left, goes_on), allowed):
                    after[left, goes_on] = total

        states = after

    return found


def _ways(
    starts: Starts, t: int, waiting: int, running: tuple[tuple[int, int], ...], allowed: int
) -> list[tuple[int, int, list[int]]]:
    """Return (what is paid, who waits, who starts) of the ways from a moment to the next round."""
    arrival, _, held, _ = starts.runs
    use = sum(held[i] + t + 1 - k for i, k in running)
    if use > starts.capacity:
        return []

    ways = [(0, use, waiting, list[int]())]
    for i in range(len(arrival)):
        if not waiting >> i & 1 or arrival[i] > t:
            continue

        excess, lowest, more = starts.excess[i], starts.lowest[i], held[i] + 1
        wait = lowest[t + 1] - lowest[t] if t + 1 < len(lowest) else allowed + 1
        begin = excess[t] - lowest[t]
        ways = [
            way
            for paid, use, left, begun in ways
            for way in (
                (paid + wait, use, left, begun),
                (paid + begin, use + more, left & ~(1 << i), [*begun, i]),
            )
            if way[0] <= allowed and way[1] <= starts.capacity
        ]

    p = starts.price[t + 1]
    full = ((paid + p * (starts.capacity - use), left, begun) for paid, use, left, begun in ways)
    return [way for way in full if way[0] <= allowed]
