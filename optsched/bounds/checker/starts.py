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
    """Return what starts pay by prices, which are 0 before the first of the rounds.

    ``last`` is T of the module's text, the last round by which all may have ended.
    """
    last, n = max(runs.arrival) + sum(runs.output), len(runs.arrival)
    if n * last > MAX_CELLS:
        raise TooLarge(f"starts: found {n} requests in {last} rounds; too large to check")

    # The price of each round, from those of pieces. Number t is round t: 0 is before the first one,
    # and T + 1 after the last one.
    dense, pieces = [0] * (last + 2), [*zip(from_round, price, strict=True), (last + 2, 0)]
    for (begin, p), (end, _) in pairwise(pieces):
        dense[begin:end] = [p] * (min(end, last + 2) - min(begin, last + 2))

    # Before each round the sums of the price, and of the price times the round.
    sums = [0, *accumulate(dense)]
    moments = [0, *accumulate(t * p for t, p in enumerate(dense))]
    excess, lowest, base = [], [], -capacity * sums[-1]
    for a, o, held, w in zip(*runs, strict=True):
        # f_i(k) for all starts k: latency times D and weight, and the price of the KV, which is
        # q + t - k at the end of round t. `lowest` is the min from each start on.
        f = [
            unit * w * (k + o - a)
            + (held - k) * (sums[k + o + 1] - sums[k + 1])
            + moments[k + o + 1]
            - moments[k + 1]
            for k in range(a, last - o + 1)
        ]
        # Below, number k is that of start k: starts before the arrival, which cannot be, have 0.
        low = min(f)
        base += low
        excess.append([0] * a + [value - low for value in f])
        min_from = [*accumulate(f[::-1], min)][::-1]
        lowest.append([0] * a + [value - low for value in min_from])

    rest = [capacity * (sums[-1] - before) for before in sums]
    return Starts(runs, capacity, unit, base, excess, lowest, dense, rest)


def lowest_value(starts: Starts, below: int, budget: Budget) -> int | None:
    """Return the lowest value of a schedule below some value, or None if there is none."""
    lowest: int | None = None
    allowed = (below - 1) * starts.unit - starts.base  # beyond B, see the module's text
    everyone_waits = (1 << len(starts.excess)) - 1
    states: dict[State, int] = {(everyone_waits, ()): 0}
    # Round t + 1 comes after the moment t; the last one is T.
    for t in range(len(starts.price) - 2):
        after: dict[State, int] = {}
        for (waiting, running), paid in states.items():
            ways = _ways(starts, t, waiting, running, allowed - paid)
            budget.spend(_WAY * (1 + len(running) + len(ways)))
            for more, waiting_after, begun in ways:
                # Those that run, as (request, start), but for who ends by t + 1.
                running_after = tuple(x for x in running if x[1] + starts.runs.output[x[0]] > t + 1)
                running_after += tuple((i, t) for i in begun if starts.runs.output[i] > 1)
                total = paid + more
                if not waiting_after and not running_after:
                    # A schedule: all have ended, and the empty machine pays for later rounds. Only
                    # lower values are looked for from now on, which are lower by D or more.
                    total += starts.rest[t + 2]
                    if total <= allowed:
                        lowest = (starts.base + total) // starts.unit
                        allowed = total - starts.unit
                elif total <= after.get((waiting_after, running_after), allowed):
                    after[waiting_after, running_after] = total

        states = after

    return lowest


def _ways(
    starts: Starts, t: int, waiting: int, running: tuple[tuple[int, int], ...], allowed: int
) -> list[tuple[int, int, list[int]]]:
    """Return (what is paid, who waits, who starts) of the ways from a moment to the next round.

    Who waits are bits, who starts a list; ``running`` has (request, start) of who runs at the
    moment t. Ways that pay more than ``allowed`` are left out.
    """
    arrival, _, held, _ = starts.runs
    # What they hold in round t + 1: q, and a token for each round since their starts.
    use = sum(held[i] + t + 1 - k for i, k in running)
    if use > starts.capacity:
        return []

    # Ways are (what is paid, KV in use, who waits, who starts), for some of the requests at first.
    ways = [(0, use, waiting, list[int]())]
    for i in range(len(arrival)):
        if not waiting >> i & 1 or arrival[i] > t:
            continue

        # The lowest excess from t on is paid already: to wait or to start pays what is beyond it.
        # After the last start it cannot wait.
        excess, lowest = starts.excess[i], starts.lowest[i]
        to_wait = lowest[t + 1] - lowest[t] if t + 1 < len(lowest) else allowed + 1
        to_start = excess[t] - lowest[t]
        longer = []
        for paid, use, waits, begun in ways:
            if paid + to_wait <= allowed:
                longer.append((paid + to_wait, use, waits, begun))
            if paid + to_start <= allowed and use + held[i] + 1 <= starts.capacity:
                kv = use + held[i] + 1
                longer.append((paid + to_start, kv, waits & ~(1 << i), [*begun, i]))

        ways = longer

    # The KV that is free in the next round pays its price.
    price, room = starts.price[t + 1], starts.capacity
    paying = ((paid + price * (room - use), waits, begun) for paid, use, waits, begun in ways)
    return [way for way in paying if way[0] <= allowed]
