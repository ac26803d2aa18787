"""Search for schedules in seconds that are better than every online policy's, at trace scale.

For total latency it is `optsched.optimize.search.rule_search`, with several workers
`optsched.optimize.search.on_workers`, and for requests within SLOs
`optsched.optimize.search.on_time`. `optsched.evaluate` judges every schedule. The schedules of a
few policies, or the given ones, are candidates too, so the result is never worse than they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from optsched.bounds.tail import TAIL
from optsched.judge.evaluate import Evaluation
from optsched.optimize.search.on_time import Served, quick_to_search, serve_in_time
from optsched.optimize.search.on_workers import OnWorkers
from optsched.optimize.search.rule_search import Best, RuleSearch
from optsched.policies import Rules, behind_routers, make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError, OptschedError, UsageError
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

# The share of the time for policies behind routers, where there are several workers.
_ROUTED = 0.3
# The share of the time left for one policy, so that a slow one leaves time for others.
_POLICY_SHARE = 0.5
# The share of the time for rules with pauses, without and with a prefix cache (`RuleSearch` claims
# nothing), and how many in a row may bring nothing.
_VARIED, _CLAIMING, _PATIENCE = 0.1, 0.9, 60
# The seconds for a policy as long as there is no schedule.
_MIN_S = 1.0
# The time in seconds if no budget is given.
_DEFAULT_S = 60.0
# The max tokens of a batch that are varied where rules have no limit.
_TOKENS = 8192
# The search for a percentile ends within this, and spends this share of its time on a value.
_TAIL_FINE, _TAIL_SHARE = 0.01, 0.3
POLICIES = (
    "least-work",
    "spf-work",
    "spf",
    "rank-output",
    "mc-sf",
    "sarathi-pc",
    "vllm-hy",
    "fcfs",
)


def improve(
    problem: Problem,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    known: Sequence[Schedule] = (),
    policies: Sequence[str] = POLICIES,
    admit: Callable[[Evaluation], bool] | None = None,
) -> tuple[Schedule, str]:
    """Return the best schedule found within the time, by default 60 s, and its origin.

    The policies and the first candidate run whatever the budget, whose callback receives every
    improvement. For ``slo_attainment`` and percentiles of latency and TTFT it is the search of
    `optsched.optimize.search.on_time`; the rule was made for total latency. With several workers,
    policies run behind each router, and requests move from one worker to another.

    `known`: schedules to begin with. `admit`: says whether a schedule may be the result. The origin
    is "known", the name of a policy or "search".
    """
    instance, goal, workers = problem.instance, problem.goal, problem.workers
    if instance.in_rounds:
        raise UsageError(
            "search: found an instance in rounds; expected one in seconds for the offline search"
        )

    budget = Budget(_DEFAULT_S) if budget is None else budget
    best = Best(problem, admit, budget)
    for schedule in known:
        best.offer(schedule, "known")

    _offer_policies(best, behind_routers(policies, workers), budget, seed, workers)
    serve = partial(serve_in_time, tell=lambda served: best.offer(served.schedule, "search"))
    if not quick_to_search(instance):
        pass  # the policies are all that there is
    elif goal.name == "slo_attainment":
        _serve_many(best, budget, seed, serve)
    elif goal.name in TAIL.objectives:
        _shorten_tail(best, budget, seed, serve)
    elif workers > 1:
        OnWorkers(best, workers, seed).run(budget)
    else:
        # `RuleSearch` claims no cached tokens: with a prefix cache, pauses have most of the time.
        _vary_pauses(best, budget.part(_VARIED if instance.prefixes is None else _CLAIMING), seed)
        RuleSearch(best, seed).run(budget)

    if best.schedule is None:
        raise NoIncumbentError(
            "search: found no schedule by any policy in time; expected one (chunked prefill or "
            "more time may be needed)"
        )

    return best.schedule, best.origin


def _offer_policies(
    best: Best, policies: Sequence[str], budget: Budget, seed: int, workers: int
) -> None:
    """Offer the schedules of policies. On several workers they have a share of the time."""
    all_policies = budget.part(_ROUTED)
    for policy in policies:
        # With one worker every policy runs: there are few.
        if workers > 1 and best.schedule is not None and all_policies.over:
            return

        # Until there is a schedule, a policy has some time even if none is left.
        min_s = _MIN_S if best.schedule is None else 0.0
        policy_budget = Budget(max(min_s, _POLICY_SHARE * all_policies.left_s), stop=budget.stop)
        try:
            schedule = simulate(best.problem, policy, seed=seed, budget=policy_budget)
            best.offer(schedule, policy)
        except OptschedError:
            continue  # the policy splits no prefill, or does not end


def _vary_pauses(best: Best, budget: Budget, seed: int) -> None:
    """Vary which prefills pause, and for how long: random steps from the best `spf-work` so far.

    It ends with the budget, or after many steps without an improvement. Where prefixes are cached,
    next uses are expected in the order of the best schedule so far, and the first rules are those
    that did best on Mooncake's conversations with little memory.
    """
    generator, stale = np.random.default_rng(seed), 0
    cached = best.instance.prefixes is not None
    # The policy, without what is known about it.
    rules = make_policy("spf-work")[0]
    assert isinstance(rules, Rules)
    if cached:
        rules = replace(rules, order="prompt", gate=0.5, max_batch_tokens=2048)

    often, spread, patience = (0.6, 0.4, 5 * _PATIENCE) if cached else (0.2, 0.7, _PATIENCE)
    # Without a cache the first rules themselves have been offered already, as a policy.
    trial = rules if cached else _near(rules, generator, often, spread)
    while stale < patience and not budget.over:
        if cached and best.evaluation is not None:
            order = np.argsort(best.evaluation.first_token, kind="stable")
            trial = replace(trial, served=tuple(order.tolist()))

        try:
            schedule = simulate(best.problem, trial, seed=seed, budget=budget)
        except OptschedError:
            return  # out of time, or prefills may not be split

        better = best.offer(schedule, "search")
        stale = 0 if better else stale + 1
        rules = trial if better else rules
        trial = _near(rules, generator, often, spread)


def _near(rules: Rules, generator: np.random.Generator, often: float, spread: float) -> Rules:
    """Return rules near the given ones: numbers by random factors, and switches drawn anew.

    `spread`: the standard deviation of the factors' logarithms. `often`: how often the order is by
    prompt and admission by what is present.
    """
    gate, piece, tokens = generator.lognormal(0.0, spread, 3)
    return replace(
        rules,
        gate=rules.gate * gate,
        piece=rules.piece * piece,
        max_batch_tokens=max(16, round(tokens * (rules.max_batch_tokens or _TOKENS))),
        cheap=bool(generator.random() < 0.5),
        order="prompt" if generator.random() < often else "work",
        admission="present" if generator.random() < often else "lookahead",
    )


def _serve_many(best: Best, budget: Budget, seed: int, serve: Callable[..., Served | None]) -> None:
    """Look for schedules with more requests in time, with other random steps until time is up.

    `serve` is `serve_in_time`, which offers what it finds to `best`. Without a limit on the time it
    ends with the first steps that bring nothing.
    """
    # Each search goes on from what the one before has found, with a seed of its own.
    served: Served | None = None
    for again in count():
        before = best.value
        served = serve(best.problem, budget.part(1.0), start=served, seed=seed + again)
        # All are in time, or time is up, or there was not even a first schedule.
        if served is None or budget.over or served.total == best.instance.n:
            return
        if best.value == before and np.isinf(budget.limit_s):
            return


def _shorten_tail(
    best: Best, budget: Budget, seed: int, serve: Callable[..., Served | None]
) -> None:
    """Look for schedules in which as many requests are quick as a percentile needs.

    Bisection starts below the best value known, with the requests that were let go before. `serve`
    is `serve_in_time`, which offers what it finds to `best`.
    """
    instance = best.instance
    share, column = best.objective.name[1:].split("_")  # p99_ttft: "99" and "ttft"
    # A percentile is interpolated between the sorted values at places k and k + 1, counted from 0,
    # with k = floor((n - 1) p / 100). So it is within a limit if k + 2 values are.
    enough = min(instance.n, (instance.n - 1) * int(share) // 100 + 2)

    # Bisection needs a finite value to begin with.
    if best.schedule is None:
        best.offer(simulate(best.problem, "fcfs", seed=seed), "fcfs")

    low, high, start = 0.0, best.value, None
    # Each search has the middle as the SLO. With enough requests within it the percentile is, too.
    while not budget.over and high - low > _TAIL_FINE * high and np.isfinite(high):
        limit = (low + high) / 2
        slo: Any = {f"slo_{column}": limit}
        with_slo = replace(best.problem, **slo)
        served = serve(with_slo, budget.part(_TAIL_SHARE), enough=enough, start=start, seed=seed)
        high = min(high, best.value)

        # With enough in time, `best` has the schedule, and so `high` has fallen. That nothing was
        # found proves nothing: the lower half is only given up.
        if served is not None and served.total >= enough:
            start = served
        else:
            low = limit
