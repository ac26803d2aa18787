"""Schedules without a search, for infermax's methods to start from."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, product

from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.batches.infermax import (
    Batch,
    Problem,
    Times,
    batches_of,
    exact_times,
)
from optsched.problem.errors import OptschedError, UsageError
from optsched.problem.schedule import Schedule

_LARGE = 2000
_STEPS = 10_000_000
"""Requests looked at while making plans: about a second per million."""


def best_start(prob: Problem, given: Schedule | None) -> tuple[list[Batch] | None, Times | None]:
    """Return the best of the greedy schedules and the given one, with its times.

    None where the problem asks for a value that none of them reaches. A given schedule that the
    problem rules out (evictions, chunks) is left aside.

    Raises
    ------
    UsageError
        A problem far beyond the exact methods.
    """
    per_plan = prob.n * sum(prob.output)
    if per_plan > _STEPS:
        raise UsageError(
            f"formulation infermax: {prob.n} requests with {sum(prob.output)} output tokens are "
            "beyond the exact methods; method search is right"
        )
    best: tuple[list[Batch], Times] | None = None
    candidates: list[list[Batch]] = list(islice(_greedy_plans(prob), _STEPS // per_plan))
    if given is not None and _admitted(prob, given):
        candidates.insert(0, batches_of(given))
    for plan in candidates:
        times = exact_times(prob, plan)
        if best is None or prob.levels(times) < prob.levels(best[1]):
            best = plan, times
    if best is None:
        return None, None
    if prob.cutoff is not None:
        level = prob.level(prob.objectives[0], best[1]) / prob.shrink
        if level >= prob.cutoff:
            return None, None
    return best


def _admitted(prob: Problem, schedule: Schedule) -> bool:
    if schedule.kind != "batches" or schedule.evict_mode != "recompute":
        return False
    if schedule.worker is not None and (schedule.worker > 0).any():
        return False
    try:
        judged = evaluate(prob.instance, schedule, prob.model)
    except OptschedError:
        return False
    if judged.split_prefill and not prob.chunked:
        return False
    return not (prob.eviction_free and judged.evictions.any())


def _greedy_plans(prob: Problem) -> Iterator[list[Batch]]:
    requests = range(prob.n)
    orders = [
        sorted(requests, key=lambda i: (prob.instance.arrival[i], i)),
        sorted(requests, key=lambda i: (prob.output[i], prob.prompt[i], i)),
        sorted(requests, key=lambda i: (prob.prompt[i], prob.output[i], i)),
        sorted(requests, key=lambda i: (-prob.output[i] - prob.prompt[i], i)),
    ]
    distinct = [order for k, order in enumerate(orders) if order not in orders[:k]]
    peaks = [s + o - 1 for s, o in zip(prob.prompt, prob.output, strict=True)]
    refill = max(peaks) <= prob.prefill_tokens and not prob.eviction_free
    most = min(prob.n, prob.running)
    caps = sorted({most, *range(1, min(most, 4) + 1)}) if prob.n <= _LARGE else [most]
    for order, reserve, waves, mixed, cap in product(
        distinct, (True, False), (False, True), (False, True), caps
    ):
        if (reserve or refill) and (prob.hybrid or not mixed):
            yield _greedy(prob, order, reserve=reserve, waves=waves, mixed=mixed, cap=cap)


def _greedy(
    prob: Problem, order: list[int], *, reserve: bool, waves: bool, mixed: bool, cap: int
) -> list[Batch]:
    """Prefill what fits, else decode; evict the last in order where decoding does not fit.

    Parameters
    ----------
    reserve : bool
        Admit only what fits at its peak, so that nothing is ever evicted.
    waves : bool
        Admit only when nothing runs.
    mixed : bool
        Decode beside prefills where that fits.
    cap : int
        Most running requests.
    """
    off, room = prob.offset, prob.capacity
    cached = [0] * prob.n
    produced = [0] * prob.n
    ready = [False] * prob.n
    peak = [s + o - 1 + off for s, o in zip(prob.prompt, prob.output, strict=True)]
    unit = prob.exact.unit_s
    arrival = [Fraction(float(a)) / unit for a in prob.instance.release]
    left, clock, plan = set(range(prob.n)), Fraction(0), []
    while left:
        queue = [i for i in order if i in left]
        if not any(cached[i] or arrival[i] <= clock for i in queue):
            clock = min(arrival[i] for i in queue)
        running = [i for i in queue if cached[i]]
        entries: list[tuple[int, int]] = []
        evicted: list[int] = []
        kv = sum(peak[i] if reserve else cached[i] + off for i in running)
        count, tokens = len(running), 0
        for i in queue:  # continue split prefills, then admit
            size = prob.prompt[i] + produced[i] - cached[i]
            if ready[i] or arrival[i] > clock or (waves and running and not cached[i]):
                continue
            fresh = cached[i] == 0
            need = 0 if reserve and not fresh else size + off * fresh
            if reserve and fresh:
                need = peak[i]
            if kv + need > room or count + fresh > min(cap, prob.running):
                continue
            share = prob.prefill_tokens - tokens
            if size > share and not (prob.chunked and share > 0 and not entries):
                continue
            entries.append((i, min(size, share)))
            kv, count, tokens = kv + need, count + fresh, tokens + min(size, share)
        if not entries or mixed:
            decodes = [i for i in running if ready[i]]
            decodes = decodes[: prob.batch_tokens - tokens]
            if not entries:
                if not reserve:
                    kv = sum(cached[i] + off for i in running)
                    while kv + len(decodes) > room:
                        victim = running.pop()
                        kv -= cached[victim] + off
                        decodes = [i for i in decodes if i != victim]
                        evicted.append(victim)
                entries = [(i, 1) for i in decodes]
            elif reserve or kv + len(decodes) <= room:
                entries += [(i, 1) for i in decodes]
        for i in evicted:
            cached[i], ready[i] = 0, False
        plan.append(Batch(tuple(entries), tuple(evicted)))
        clock += _length(prob, entries, cached, ready)
        for i, c in entries:
            cached[i] += c
            if cached[i] == prob.prompt[i] + produced[i]:
                produced[i] += 1
                ready[i] = True
                if produced[i] == prob.output[i]:
                    cached[i], ready[i] = 0, False
                    left.discard(i)
    return plan


def _length(
    prob: Problem, entries: list[tuple[int, int]], cached: list[int], ready: list[bool]
) -> int:
    c = prob.exact
    work = c.base + c.decode_base * any(ready[i] for i, _ in entries)
    work += c.prefill_base * (not all(ready[i] for i, _ in entries))
    for i, tokens in entries:
        work += c.decode(cached[i]) if ready[i] else c.prefill(tokens, cached[i])
    return work
