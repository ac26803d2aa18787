"""Greedy plans, which infermax's methods start from."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import chain, islice, product
from typing import NamedTuple

from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations.base import Task
from optsched.optimize.formulations.batches.plans import (
    Plan,
    Requests,
    exact_times,
    plan_of,
    to_schedule,
)
from optsched.optimize.formulations.batches.problem import (
    LARGEST_UNITS,
    Batch,
    BatchProblem,
    Times,
    problem,
)
from optsched.optimize.solvers.base import SolveOptions
from optsched.problem.budget import Budget
from optsched.problem.errors import OptschedError, OutOfTimeError, UsageError
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

_LARGE = 2000
# The seconds for the first plan, where no time is left.
_FIRST_S = 2.0
# The max number of requests looked at for all plans. A million takes about a second.
_STEPS = 10_000_000


def begun(
    task: Task, options: SolveOptions, largest: int = LARGEST_UNITS, steps: int = _STEPS
) -> tuple[BatchProblem, Plan | None, Times | None]:
    """Return a task's problem, whose budget begins now, and the best plan with its times.

    It is the best of the greedy plans and of a given one, unless the problem rules that out. Plans
    take up to so many ``steps``, but the first one.
    """
    prob, given = problem(task, options.budget(), largest), options.warm_start
    per_plan = prob.n * sum(prob.output)
    if per_plan > _STEPS:
        raise UsageError(
            f"formulation infermax: found {prob.n} requests with {sum(prob.output)} output tokens, "
            "beyond the exact methods; expected the method search"
        )

    plans: Iterator[Plan] = islice(_greedy_plans(prob), max(1, steps // per_plan))
    if prob.instance.kv_block_tokens > 1:  # greedy plans do not count the rests of blocks
        plans = (plan for plan in plans if _admitted(prob, to_schedule(prob, plan)))
    if given is not None and _admitted(prob, given):
        plans = chain([plan_of(given)], plans)

    best: tuple[tuple[Fraction, ...], Plan, Times] | None = None
    try:
        for plan in plans:
            times = exact_times(prob, plan)
            levels = prob.levels(times)
            if best is None or levels < best[0]:
                best = levels, plan, times

            prob.budget.check("plans to start from were made")
    except OutOfTimeError:
        if best is None:
            raise

    if best is None or (prob.cutoff is not None and best[0][0] / prob.shrink >= prob.cutoff):
        return prob, None, None

    return prob, best[1], best[2]


def _admitted(prob: BatchProblem, schedule: Schedule) -> bool:
    if schedule.kind != "batches" or schedule.evict_mode != "recompute":
        return False
    try:
        judged = evaluate(Problem(prob.instance, prob.model), schedule)
    except OptschedError:
        return False

    split = judged.split_prefill and not prob.chunked
    return judged.workers == 1 and not split and not (prob.eviction_free and judged.evictions.any())


class _Rule(NamedTuple):
    """The options of `_greedy`: how admission goes, decodes beside prefills, and a max number.

    With `reserve` all peaks fit, so that nothing is ever evicted; `waves` admit when nothing runs.
    """

    reserve: bool
    waves: bool
    mixed: bool
    cap: int


def _greedy_plans(prob: BatchProblem) -> Iterator[Plan]:
    budget = Budget(max(_FIRST_S, prob.budget.left_s))  # the first one is the least that is known
    requests = range(prob.n)
    orders = [
        sorted(requests, key=lambda i: (prob.instance.release_times[i], i)),
        sorted(requests, key=lambda i: (prob.output[i], prob.prompt[i], i)),
        sorted(requests, key=lambda i: (prob.prompt[i], prob.output[i], i)),
        sorted(requests, key=lambda i: (-prob.output[i] - prob.prompt[i], i)),
    ]
    distinct = [order for k, order in enumerate(orders) if order not in orders[:k]]
    refill = max(s + o - 1 for s, o in prob.sizes) <= prob.prefill_tokens
    cap = min(prob.n, prob.running)
    caps = sorted({cap, *range(1, min(cap, 4) + 1)}) if prob.n <= _LARGE else [cap]
    switches = ((True, False), (False, True), (False, True), caps)

    for order, *chosen in product(distinct, *switches):
        rule = _Rule(*chosen)
        evicts = refill and not prob.eviction_free
        if (rule.reserve or evicts) and (prob.hybrid or not rule.mixed):
            yield _greedy(prob, order, rule, budget)
            budget = prob.budget


def _greedy(prob: BatchProblem, order: list[int], rule: _Rule, budget: Budget) -> Plan:
    """Prefill what fits, else decode. If decoding does not fit, evict the last in order."""
    off, room = prob.offset, prob.capacity
    now = Requests(prob)
    peak = [s + o - 1 + off for s, o in prob.sizes]
    clock, plan = Fraction(0), []
    queue = order

    while queue:
        budget.check("plans to start from were made")
        if not any(now.cached[i] or prob.exact_arrival[i] <= clock for i in queue):
            clock = min(prob.exact_arrival[i] for i in queue)

        running = [i for i in queue if now.cached[i]]
        entries: list[tuple[int, int]] = []
        evicted: list[int] = []
        kv = sum(peak[i] if rule.reserve else now.cached[i] + off for i in running)
        count, tokens = len(running), 0

        for i in queue:  # continue split prefills, then admit
            fresh, size = now.cached[i] == 0, now.rest(i)
            if now.ready[i] or prob.exact_arrival[i] > clock or (rule.waves and running and fresh):
                continue

            need = size + off * fresh
            if rule.reserve:
                need = peak[i] if fresh else 0
            if kv + need > room or count + fresh > min(rule.cap, prob.running):
                continue

            share = prob.prefill_tokens - tokens
            if size > share and not (prob.chunked and share > 0 and not entries):
                continue

            entries.append((i, min(size, share)))
            kv, count, tokens = kv + need, count + fresh, tokens + min(size, share)

        if not entries or rule.mixed:
            decodes = [i for i in running if now.ready[i]][: prob.batch_tokens - tokens]
            if not entries and not rule.reserve:
                kv = sum(now.cached[i] + off for i in running)
                while kv + len(decodes) > room:
                    victim = running.pop()
                    kv -= now.cached[victim] + off
                    decodes = [i for i in decodes if i != victim]
                    evicted.append(victim)

            if not entries or rule.reserve or kv + len(decodes) <= room:
                entries += [(i, 1) for i in decodes]

        plan.append(Batch(tuple(entries), tuple(evicted)))
        now.evict(evicted)
        clock += now.length(entries)
        if any(now.done(i) for i in now.process(entries)):
            queue = [i for i in queue if not now.done(i)]

    return plan
