"""Upper bounds on how many requests can be served within their SLOs, on one or several workers.

*Windows.* Let a request of arrival a be within SLOs on TTFT F, TPOT or gap p (the smaller of the
two), and latency L. Its first token is there by ``d1 = a + min(F, L)``, and its last of o tokens by
``d2 = min(a + L, d1 + p (o - 1))``: a mean of at most p, and gaps of at most p, both say that the
last comes at most p (o - 1) after the first. So all batches that prefill it for its first token lie
in [a, d1], and all that it is in lie in [a, d2].

*Time.* The batches of a worker are disjoint, and a batch of length T has room for at most T of own
work and shares of fixed costs (`optsched.bounds.batch`). So for any set S of requests within their
SLOs on N workers, with w_i their work up to the first token (or up to the last),
``sum of w_i over S <= N |union of their windows|``. What others do only takes time away.

*The price of TPOT.* Let p be the largest TPOT limit, b = base + decode_base with p > b, and
``k = b / (p - b)^2``, ``c = b / (p - b)``. For a request i within its limit let u_i be its smallest
decode step. The batches in which i decodes take at most p for each of its o - 1 later tokens,
refilled ones included. Add k u_i times this to the time of all batches: a batch that takes T, holds
own work V and decodes requests whose u sum up to U then counts ``T (1 + k U) - k p U``. With
T >= b + V and V >= U this is at least ``V + b - k (p - b) U + k U^2 >= V + c U``, since the
difference ``b - 2 b U / (p - b) + k U^2`` is a square; and with U = 0 it is at least V. So own work
can be counted with c u_i more for every decode step. A token that is refilled counts its refill
less k p u_i, which may be less than 0, and the smaller of the two is what a later token costs at
least. The sum over a request's tokens is proved, and not each token alone. Nothing but V >= U is
asked of u_i, so each request may have the u_i above or 0, whichever proves more.

*Rounds.* A round holds at most M tokens of KV. A request holds its prompt in the round of its first
token, and its volume (`Instance.volume`) in all; restarts and pauses only add. The limits on
tokens and requests per batch give the same with the tokens that it processes, and its rounds.

*Counting.* Let x_i in [0, 1] say how much of request i is served within its SLOs, and maximize the
sum of x_i subject to ``sum of w_i x_i over A <= N |union of A's windows|`` for all sets A. The
right side is a coverage function, so the w_i x_i form a polymatroid, and the greedy that fills
requests in ascending w_i is optimal (Edmonds 1970). Windows are first widened such that their ends
are in the order of their beginnings (or their beginnings in the order of their ends). Then
intervals of requests decide, and two trees of prefix sums find what fits: O(n log n).

*Rates.* If all arrivals are drawn together by a factor, unions of windows of fixed lengths do not
grow. So what is impossible at one rate is impossible at every larger rate.

Notes
-----
Requests that cannot be within their SLOs alone on an idle worker count as not. Times are whole
ticks of an integer clock, with windows rounded outward and work inward. Work is lowered by a
relative margin of 1e-7, and windows are widened by 1e-9, for the rounding of the judge's clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import (
    CHARGES,
    IN_ROUNDS,
    MINORANTS,
    WORKERS,
    Bound,
    BoundTask,
    Proof,
    features_of,
)
from optsched.bounds.batch import (
    PROVED_FOR,
    in_seconds,
    requests_of,
    unavoidable_work,
    with_rates,
)
from optsched.bounds.checker.fields import PREFIX_FIELDS
from optsched.bounds.checker.prefixes import Charge, charges_of
from optsched.bounds.checker.requests import later_of, least_sum
from optsched.bounds.checker.windows import without_window
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.service import with_spare

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MARGIN, CLOCK = 1e-7, 1e-9


def most_within(
    instance: Instance,
    cost_model: CostModel | None,
    slos: Mapping[str, float | None] | None = None,
    workers: int = 1,
    *,
    columns: bool = True,
    charged: Sequence[Charge] | None = None,
) -> int:
    """Return a number of requests that no schedule on so many workers exceeds within SLOs.

    `slos` holds for all requests, and `columns` says whether the instance's own count, too.
    `charged` is that of a task of this instance, whose requests then arrive when they are released.
    """
    if instance.kv_window is not None:
        instance = without_window(instance)

    limits = all_limits(instance, slos, columns=columns)
    proved = IN_ROUNDS if instance.in_rounds else PROVED_FOR | PREFIX_FIELDS
    # Of a table each linear minorant is asked below, and the least count holds.
    lacks = sorted(features_of(instance, cost_model) - MINORANTS - proved)
    if lacks:
        raise UsageError(f"SLO bound: found {', '.join(lacks)}; it is not proved for that")
    if isinstance(cost_model, BatchCost) and not instance.in_rounds:
        charged = charged or charges_of(instance, instance.release_times.tolist(), 0)
        costs = cost_model.minorants
        return min(_in_seconds(instance, c, charged, limits, workers) for c in costs)

    return _in_rounds(instance, limits, workers)


def _in_seconds(
    instance: Instance,
    cost: BatchCost,
    charged: Sequence[Charge] | None,
    limits: Mapping[str, Floats],
    workers: int,
) -> int:
    """Return the least count that some kind of work proves, under one linear cost model."""
    work = unavoidable_work(instance, cost, charged)
    # False: the limits are in seconds, where the judge's comparison has some spare.
    limits = {name: with_spare(v, instance.release, False) for name, v in limits.items()}
    # By request: max time to the first token, per later token (p), from the first to the last, and
    # to the last.
    first = np.minimum(limits["slo_ttft"], limits["slo_latency"])
    step = np.minimum(limits["slo_tpot"], limits["slo_gap"])
    later = longest_later(instance, step)
    last = np.minimum(limits["slo_latency"], first + later)
    # Only those count that are within their limits if they are alone (module's text, Notes).
    possible = (work.first <= first) & (work.chain <= last) & (work.chain - work.first <= later)
    slack = CLOCK * (1 + instance.release)
    best = int(possible.sum())

    # Whatever is within its limits does this work in its window, and so do all of them together:
    # its prefill, all its work, and all its work with decode steps at the price of TPOT.
    with_price = _work_at_tpot_price(instance, cost, charged, step)
    for length, amount in ((first, work.prefill), (last, work.total), (last, with_price)):
        begin = np.maximum(instance.release - slack, 0.0)[possible]
        end = (instance.release + length + slack)[possible]
        best = min(best, count_in_windows(begin, end, amount[possible] * (1 - MARGIN), workers))

    return best


def longest_later(instance: Instance, step: Floats) -> Floats:
    """Return the longest time from the first token to the last; 0 for a single token."""
    steps = instance.output_tokens - 1.0
    # Without a limit the step is infinite, and times 0 it would be NaN.
    return np.where(steps > 0, step * np.maximum(steps, 1.0), 0.0)


def _work_at_tpot_price(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None, step: Floats
) -> Floats:
    """Return each request's work in seconds, with c u more for a decode (see The price of TPOT).

    ``step`` has the limit on TPOT or gap of each request in seconds, or infinity; the largest one
    is p. ``steps`` below is a number of tokens: those after the first. Up to the last line times
    are exact, in the units of `Rates`.
    """
    rates, requests = requests_of(instance, cost, charged)
    fixed, steps = rates.decode, instance.output_tokens - 1
    limited = np.isfinite(step) & (steps > 0)
    # p in the units of `Rates`, rounded up. Without any limit it is 0, so that nothing is spare.
    longest = Fraction(step[limited].max(initial=0.0)) * rates.scale
    spare = -(-longest.numerator // longest.denominator) - fixed  # p - b
    # The price of TPOT counts the base of a batch already, so prefills have no share of it: only
    # one of ``prefill_base``.
    alone = replace(rates, cost={**rates.cost, "base": 0})
    firsts, rows = with_rates(alone, instance, charged), []

    for r, first, is_limited in zip(requests, firsts, limited, strict=True):
        # Own work of the first decode, and of a refill instead, and how both grow by the token.
        decode, growth, refill, refill_growth = later_of(rates, r.prompt)
        totals = [least_sum((decode, growth), (refill, refill_growth), r.steps)]
        # Refilled tokens may count less than 0. Whatever gain that is, it is real for the sum, so a
        # token is not cut off at 0; a request for which it does not pay has the price 0 instead.
        if is_limited and spare > 0 and fixed > 0:
            # With b = fixed, p - b = spare and u = decode, a decode step counts c u more, and a
            # refill k p u less. The minus is inside the division, which rounds down: k p u up.
            priced_decode = decode + fixed * decode // spare, growth
            priced_refill = refill + -fixed * (spare + fixed) * decode // spare**2, refill_growth
            totals.append(least_sum(priced_decode, priced_refill, r.steps))

        rows.append((first.own + first.share + max(totals),))

    return np.asarray(in_seconds(rates, rows)[0])


def _in_rounds(instance: Instance, limits: Mapping[str, Floats], workers: int) -> int:
    """Return the least count that any limit on rounds proves (module's text, Rounds)."""
    possible, first, last, amounts = loads(instance, limits)
    best, begin = len(possible), instance.release[possible]
    for prefill, later, capacity in amounts:
        for length, amount in ((first, prefill), (last, prefill + later)):
            work = amount.astype(np.float64)
            best = min(best, count_in_windows(begin, begin + length, work, workers * capacity))

    return best


def loads(
    instance: Instance, limits: Mapping[str, Floats]
) -> tuple[Ints, Floats, Floats, list[tuple[Ints, Ints, int]]]:
    """Return what those take up in rounds that can be within their SLOs alone.

    They come as their indices, with the rounds from arrival until the first token and until the
    last one. Every limit has what they take up until the first token, what they do later, and how
    much a round has of it.
    """
    # Rounds are whole, so limits are rounded down.
    first = np.floor(np.minimum(limits["slo_ttft"], limits["slo_latency"]))
    step = np.minimum(limits["slo_tpot"], limits["slo_gap"])
    later = np.floor(longest_later(instance, step) * (1 + CLOCK))
    last = np.minimum(np.floor(limits["slo_latency"]), first + later)
    s, o, batch_limits = instance.prompt_tokens, instance.output_tokens, instance.limits
    # Alone on an idle worker a request has a token in every round.
    able = np.flatnonzero((first >= 1) & (last >= o) & (later >= o - 1))
    held, steps, nothing = s + instance.kv_offset, o - 1, np.zeros_like(o)
    amounts = [(held, instance.volume - held, instance.kv_capacity)]
    for prefill, later_part, capacity in (
        (s, steps, batch_limits.max_batch_tokens),
        (s, nothing, batch_limits.max_prefill_tokens),
        # Each round that a request is in takes one of the places of running requests.
        (nothing + 1, steps, batch_limits.max_running),
    ):
        if capacity is not None:
            amounts.append((prefill, later_part, capacity))

    return able, first[able], last[able], [(x[able], y[able], size) for x, y, size in amounts]


def count_in_windows(begin: Floats, end: Floats, work: Floats, capacity: int) -> int:
    """Return how many jobs at most fit into their windows, each by its share that fits.

    `capacity` is how much work is done per unit of time. Jobs without an end or without work fit.
    """
    limited = np.isfinite(end) & (work > 0)
    free = int((~limited).sum())
    begin, end, work = begin[limited], end[limited], work[limited]
    if not len(work):
        return free

    by_begin = np.lexsort((end, begin))
    by_end = np.lexsort((begin, end))
    # Wider windows hold no less, and any of the two orders will do (module's text, Counting).
    later_ends = np.maximum.accumulate(end[by_begin])
    earlier_begins = np.minimum.accumulate(begin[by_end][::-1])[::-1]

    return free + min(
        _greedy(begin[by_begin], later_ends, work[by_begin], capacity),
        _greedy(earlier_begins, end[by_end], work[by_end], capacity),
    )


def _greedy(begin: Floats, end: Floats, work: Floats, capacity: int) -> int:
    """Return how many jobs fit, which are in an order in which begins and ends both ascend.

    Begins, ends and work become whole ticks. Of begins and ends these are multiplied by the
    capacity, so that one has room for one unit of work.
    """
    from optsched.bounds.service_kernel import fill

    # Rounds are whole numbers as they are; seconds become picoseconds, if there is space.
    whole = all((column == np.floor(column)).all() for column in (begin, end, work))
    digits = int(np.floor(np.log10(2.0**59 / (capacity * max(1.0, float(end.max()))))))
    # As many digits as sums below 2**59 have space for. Ends are rounded up and begins and work
    # down, so no less fits.
    ticks = 10.0 ** min(0 if whole else 12, digits)
    ends = np.ceil(end * ticks).astype(np.int64) * capacity
    begins = np.floor(begin * ticks).astype(np.int64) * capacity
    amount = np.floor(work * ticks).astype(np.int64)
    positive = amount > 0
    order = np.argsort(amount[positive], kind="stable")
    done = fill(begins[positive], ends[positive], amount[positive], order)
    shares = (done / amount[positive]).sum()

    # The sum is of floats, so a little is added lest it fall short of a whole number. Jobs whose
    # work is rounded down to 0 fit, too.
    return int(np.floor(shares * (1 + CLOCK) + 1e-6)) + int((~positive).sum())


def within(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on SLO attainment, or on goodput: over the shortest possible span.

    The module's text has the proof.
    """
    instance = task.instance
    largest = most_within(instance, task.cost_model, None, task.workers, charged=task.charged)
    attained = task.goal.name == "slo_attainment"
    return Proof(largest / (instance.n if attained else shortest_span(task)))


def shortest_span(task: BoundTask) -> float:
    """Return a time that no schedule ends before, from the first arrival on.

    Some request ends last, and none before its arrival and all its batches alone. In rounds there
    is a batch for each output token.
    """
    instance = task.instance
    alone: Floats = instance.output_tokens.astype(np.float64)
    if not instance.in_rounds:
        alone = unavoidable_work(instance, task.batch_cost, task.charged).chain * (1 - MARGIN)

    return float((instance.release + alone).max())


_WORK = "work of prefills and of requests in the windows of their SLOs"
_VOLUME = "KV volume in the windows of SLOs"
_GOALS = ("slo_attainment", "slo_goodput")
_PROVED = PROVED_FOR | WORKERS | CHARGES
WITHIN = Bound("slo-work", _WORK, "second", _GOALS, within, _PROVED)
WITHIN_ROUNDS = Bound("slo-volume", _VOLUME, "round", _GOALS, within, IN_ROUNDS)
