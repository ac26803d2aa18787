"""The one search for both ends of an interval, which `solve`, `bound` and `compare` share.

It improves the interval under one budget: bounds that take no search, policies, bounds that search,
searches for schedules, and an exact method where one may end. So whoever asks finds the same best
schedule and the same best bound, up to what the clock decides.
"""

import warnings
from dataclasses import replace
from typing import NamedTuple

from optsched.bounds import usable
from optsched.bounds.base import BoundTask
from optsched.optimize.exact import Exact, Start, accept, attempt, in_terms_of
from optsched.optimize.formulations.base import Answer
from optsched.optimize.formulations.rounds.goals import COMPLETIONS, GOALS, LATENCY
from optsched.optimize.interval import Interval
from optsched.optimize.plan import is_limited
from optsched.optimize.ramp.bound import suits_ramp
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.optimize.strategies import (
    can_search,
    offer,
    prove,
    run_policies,
    search_offline,
    warn_if_short,
)
from optsched.problem.budget import Budget, History, Progress
from optsched.problem.errors import InfeasibleError, OptschedError, UsageError
from optsched.problem.objective import TOTAL_LATENCY

# Methods that end by the clock. What they do is part of this search.
_SEARCHES = ("lns", "placement", "search")
# The share of the time for a first run of an exact method, with its min in seconds and its max as a
# share: most small instances are proved at once.
_FIRST_SHARE, _FIRST_MIN_S, _FIRST_MAX = 0.05, 0.5, 0.5
# The shares of the time left: for policies, for bounds that search, in rounds for the dual and its
# search where a stronger method follows and where none does, and for what is not last.
_POLICIES, _BOUNDS, _DUAL_BRIEF, _DUAL_LONG, _HALF = 0.2, 0.6, 0.1, 0.8, 0.5


class Attempt(NamedTuple):
    """A run of an exact method, and the interval of its formulation's schedules."""

    interval: Interval
    answer: Answer
    status: Status

    @property
    def is_settled(self) -> bool:
        """Whether more time would not change the answer."""
        return self.status in (Status.OPTIMAL, Status.INFEASIBLE, Status.ERROR)


class Narrowed(NamedTuple):
    """The last run of the exact method, if there was one, or why it refused the instance."""

    attempt: Attempt | None = None
    refused: OptschedError | None = None

    @property
    def is_final(self) -> bool:
        """Whether the exact method need not run again."""
        return self.refused is not None or (self.attempt is not None and self.attempt.is_settled)


def narrow(
    interval: Interval,
    exact: Exact | None = None,
    start: Start | None = None,
    *,
    options: SolveOptions,
    policies: bool = True,
    certify: bool = False,
    settle: bool = False,
) -> Narrowed:
    """Improve both ends of an interval until they meet or its budget is over.

    `exact`: a method that may prove an optimum. It runs briefly at first, and again at the end.
    `start`: a schedule for it to start from, unless a better one is found.
    `policies`: whether to run them. If not, the caller has.
    `certify`: whether to raise the bounds that carry certificates first, and even if another bound
    has met the schedule.
    `settle`: whether to end once the exact method has an answer for its formulation, although
    schedules that this leaves out may be better.
    """
    budget, seed, tried = interval.budget, options.seed, Narrowed()
    instance = interval.task.instance
    # What these methods do is part of this search.
    if exact is not None and exact.name in _SEARCHES:
        exact = None

    # Whose bound it is said to be: formulation and method or, with `certify`, the method alone,
    # for which "" stands (`accept`).
    origin = "" if exact is None or certify else f"{exact.model.name} ({exact.name})"
    # Without time, only the bounds that take no search run.
    prove(interval, Budget(0.0, stop=budget.stop), seed=seed)
    # A first run of the exact method, briefly, unless certificates come first.
    if exact is not None and not (certify or budget.over or interval.closed):
        seconds = min(max(_FIRST_SHARE * budget.limit_s, _FIRST_MIN_S), _FIRST_MAX * budget.left_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of little time: the method runs again
            tried = _run_exact(exact, interval, start, options, seconds, settle, origin)
        if settle and tried.is_final:
            return tried

    # The search in rounds and its prices are about the total, which decides some other goals.
    total = BoundTask.of(interval.task.about(TOTAL_LATENCY))
    usable_bounds = {bound.name for bound in usable(total) if not bound.lacks(total)}
    has_dual = interval.goal.name in LATENCY and "dual" in usable_bounds
    # Where completions do not decide, pauses may gain, and the total says less.
    has_ramp = has_dual and interval.goal.name in COMPLETIONS
    has_ramp = has_ramp and suits_ramp(instance) and not is_limited(instance)
    # The exact method may be the ramp relaxation itself, which runs as a bound below.
    is_ramp = has_ramp and exact is not None and exact.name == "ramp"
    exact_follows = exact is not None and not is_ramp and not tried.is_final

    # In rounds: the dual with its search, for a short time if a stronger method follows.
    if has_dual and (certify or not interval.closed):
        share = _DUAL_LONG if policies else 1.0
        share = _DUAL_BRIEF if has_ramp or exact_follows else share
        _explore(interval, seed, certify, share)

    # Policies. Those that did not end in their time may have the time that is left.
    unfinished = list[str]()
    if policies and not interval.closed:
        share = _POLICIES if can_search(interval) or has_dual else _HALF
        unfinished = run_policies(interval, budget.part(share), seed=seed)

    # The ramp relaxation, or bounds that search. A certificate may prove less than the bound.
    certified = interval.value if interval.certificate is None else interval.certificate["value"]
    is_done = interval.closed and (not certify or certified == interval.value)
    if has_ramp and not is_done:
        prove(interval, budget, "ramp", seed=seed)
    elif not has_dual and (certify or not interval.closed):
        _raise_bound(interval, seed, certify, more_follows=exact_follows or bool(unfinished))

    if unfinished and not interval.closed:
        part = budget.part(_HALF if exact_follows else 1.0)
        run_policies(interval, part, seed=seed, specs=unfinished)

    # The exact method once more, in all that is left of the time.
    if exact is None or not exact_follows or interval.closed or budget.over:
        return tried

    warn_if_short(f"the method {exact.name}", budget.left_s, budget.limit_s)
    return _run_exact(exact, interval, start, options, budget.left_s, settle, origin)


def _run_exact(
    exact: Exact,
    interval: Interval,
    start: Start | None,
    options: SolveOptions,
    seconds: float,
    settle: bool,
    origin: str,
) -> Narrowed:
    """Run the exact method from the best schedule that fits its formulation.

    A formulation that leaves schedules out has an interval of its own, since those may be better
    than its optimum. Not so under limits in rounds: nothing else bounds them well, and the result
    says for which schedules its bound holds. `settle` is as of `narrow`, `origin` as of `accept`.
    """
    of_formulation, instance = interval, exact.task.instance
    limited = instance.in_rounds and is_limited(instance)
    if exact.model.leaves_out(exact.task) and not limited:
        of_formulation = Interval(exact.task, interval.budget)
        # Its progress is reported only where its answer ends the search (`settle`).
        of_formulation.history = interval.history if settle else History()
        of_formulation.trees, of_formulation.certifies = interval.trees, interval.certifies
        if interval.general is not None:
            of_formulation.prove(*interval.general)

    # The best schedule that fits: the incumbent, or the start if that does not fit or is better.
    best = interval.incumbent
    begin_with = None if best is None else in_terms_of(exact, best.schedule, best.evaluation)
    goal = interval.goal
    if begin_with is None or (
        start is not None and goal.better(goal.of(start.evaluation), goal.of(begin_with.evaluation))
    ):
        begin_with = start
    if begin_with is not None and of_formulation is not interval:
        of_formulation.take(begin_with.schedule, begin_with.evaluation, "the warm start")

    try:
        answer = attempt(exact, of_formulation, replace(options, time_limit_s=seconds), begin_with)
        status = accept(exact, of_formulation, answer, origin, at_ties=settle)
    except (InfeasibleError, UsageError) as error:
        return Narrowed(refused=error)

    # Its schedule counts for all, too. Its bound is of its formulation only.
    if of_formulation is not interval and of_formulation.incumbent is not None:
        best_found = of_formulation.incumbent
        interval.take(best_found.schedule, best_found.evaluation, best_found.origin)

    return Narrowed(Attempt(of_formulation, answer, status))


def _explore(interval: Interval, seed: int, certify: bool, share: float) -> None:
    """Raise the dual and search in rounds, for a share of the time.

    A certificate is of total latency, so it is kept if that is the objective. Where completions
    alone do not decide, the bound says nothing of schedules that pause.
    """
    from optsched.optimize.search.anytime import explore

    budget, name = interval.budget, interval.goal.name
    interval.clock_s = budget.spent_s
    instance = interval.task.instance
    known = None if interval.incumbent is None else interval.incumbent.schedule
    # The dual and its search are about the total latency. Other goals follow from it.
    goal, is_total = GOALS[name](instance), interval.goal == TOTAL_LATENCY

    def report(state: Progress) -> None:
        totals = state.incumbent, state.bound
        value, bound = (x if x is None else goal.of_total(x) for x in totals)
        interval.merge_progress(Progress(state.elapsed_s, value, bound))

    part = budget.part(share, interval.merge_progress if is_total else report)
    explored = explore(instance, part, seed=seed, certify=certify, warm_start=known)
    left_out = frozenset[str]() if name in COMPLETIONS else frozenset({"pauses"})
    proof = explored.certificate() if is_total else None
    interval.prove(goal.of_total(explored.bound), explored.origin, proof, left_out)
    if explored.schedule is not None:
        offer(interval, explored.schedule, "search")


def _raise_bound(interval: Interval, seed: int, certify: bool, more_follows: bool) -> None:
    """Raise the bound, then search for schedules where there is a search.

    If a certificate is wanted and no bound so far has a proof for one, all bounds that carry
    certificates run, even if no time is left. ``more_follows``: whether policies or an exact method
    run after this, which need some of the time.
    """
    budget, may_search = interval.budget, can_search(interval)
    prove(interval, budget.part(_BOUNDS if more_follows or may_search else 1.0), seed=seed)
    if certify and not interval.trees and interval.certificate is None:
        for bound in usable(BoundTask.of(interval.task)):
            # `prove` runs a bound by name even without time.
            if bound.certifies:
                prove(interval, budget, bound.name, seed=seed)

    if not may_search or interval.closed or budget.stopped:
        return

    warn_if_short("the offline search", budget.left_s, budget.limit_s)
    if not budget.over:
        search_offline(interval, budget.part(_HALF if more_follows else 1.0), seed=seed)
