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
_BRIEF, _BRIEF_S, _BRIEF_MAX = 0.05, 0.5, 0.5
# The shares of the time left: for policies, for bounds that search, in rounds for the dual and its
# search where a stronger method follows and where none does, and for what is not last.
_POLICIES, _BOUNDS, _FEW, _MANY, _HALF = 0.2, 0.6, 0.1, 0.8, 0.5


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
    budget, seed, done = interval.budget, options.seed, Narrowed()
    instance = interval.task.instance
    if exact is not None and exact.name in _SEARCHES:
        exact = None

    # A bound is known by the name of the method alone.
    origin = "" if exact is None or certify else f"{exact.model.name} ({exact.name})"
    prove(interval, Budget(0.0, stop=budget.stop), seed=seed)
    if exact is not None and not (certify or budget.over or interval.closed):
        seconds = min(max(_BRIEF * budget.limit_s, _BRIEF_S), _BRIEF_MAX * budget.left_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of little time: the method runs again
            done = _try(exact, interval, start, options, seconds, settle, origin)
        if settle and done.is_final:
            return done

    # The search in rounds and its prices are about the total, which decides some other goals.
    total = BoundTask.of(interval.task.about(TOTAL_LATENCY))
    able = {one.name for one in usable(total) if not one.lacks(total)}
    dual = interval.goal.name in LATENCY and "dual" in able
    ends = interval.goal.name in COMPLETIONS  # else pauses may gain, and the total says less
    ramp = dual and ends and suits_ramp(instance) and not is_limited(instance)
    again = exact is not None and not (ramp and exact.name == "ramp") and not done.is_final
    if dual and (certify or not interval.closed):
        share = _FEW if ramp or again else _MANY if policies else 1.0
        _explore(interval, seed, certify, share)

    left = list[str]()
    if policies and not interval.closed:
        share = _POLICIES if can_search(interval) or dual else _HALF
        left = run_policies(interval, budget.part(share), seed=seed)

    proved = interval.value if interval.certificate is None else interval.certificate["value"]
    if ramp and not (interval.closed and (not certify or proved == interval.value)):
        prove(interval, budget, "ramp", seed=seed)
    elif not dual and (certify or not interval.closed):
        _raise(interval, seed, certify, follows=again or bool(left))

    if left and not interval.closed:
        run_policies(interval, budget.part(_HALF if again else 1.0), seed=seed, specs=left)
    if exact is None or not again or interval.closed or budget.over:
        return done

    warn_if_short(f"the method {exact.name}", budget.left_s, budget.limit_s)
    return _try(exact, interval, start, options, budget.left_s, settle, origin)


def _try(
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
    says for which schedules its bound holds.
    """
    own, instance = interval, exact.task.instance
    limited = instance.in_rounds and is_limited(instance)
    if exact.model.leaves_out(exact.task) and not limited:
        own = Interval(exact.task, interval.budget)
        own.history = interval.history if settle else History()
        own.trees, own.certifies = interval.trees, interval.certifies
        if interval.general is not None:
            own.prove(*interval.general)

    best = interval.incumbent
    known = None if best is None else in_terms_of(exact, best.schedule, best.evaluation)
    goal = interval.goal
    if known is None or (
        start is not None and goal.better(goal.of(start.evaluation), goal.of(known.evaluation))
    ):
        known = start
    if known is not None and own is not interval:
        own.take(known.schedule, known.evaluation, "the warm start")

    try:
        answer = attempt(exact, own, replace(options, time_limit_s=seconds), known)
        status = accept(exact, own, answer, origin, at_ties=settle)
    except (InfeasibleError, UsageError) as error:
        return Narrowed(refused=error)

    if own is not interval and own.incumbent is not None:
        found = own.incumbent
        interval.take(found.schedule, found.evaluation, found.origin)

    return Narrowed(Attempt(own, answer, status))


def _explore(interval: Interval, seed: int, certify: bool, share: float) -> None:
    """Raise the dual and search in rounds, for a share of the time."""
    from optsched.optimize.search.anytime import explore

    budget, name = interval.budget, interval.goal.name
    interval.clock_s = budget.spent_s
    instance = interval.task.instance
    known = None if interval.incumbent is None else interval.incumbent.schedule
    goal, same = GOALS[name](instance), interval.goal == TOTAL_LATENCY

    def heard(state: Progress) -> None:
        found, bound = (
            x if x is None else goal.of_total(x) for x in (state.incumbent, state.bound)
        )
        interval.heard(Progress(state.elapsed_s, found, bound))

    told = budget.part(share, interval.heard if same else heard)
    best = explore(instance, told, seed=seed, certify=certify, warm_start=known)
    left_out = frozenset[str]() if name in COMPLETIONS else frozenset({"pauses"})
    proof = best.certificate() if same else None
    interval.prove(goal.of_total(best.bound), best.origin, proof, left_out)
    if best.schedule is not None:
        offer(interval, best.schedule, "search")


def _raise(interval: Interval, seed: int, certify: bool, follows: bool) -> None:
    """Raise the bound, then search for schedules where there is a search.

    Where only bounds that search carry a certificate, one runs even if no time is left.
    """
    budget, searched = interval.budget, can_search(interval)
    prove(interval, budget.part(_BOUNDS if follows or searched else 1.0), seed=seed)
    if certify and not interval.trees and interval.certificate is None:
        for one in usable(BoundTask.of(interval.task)):
            if one.certifies:
                prove(interval, budget, one.name, seed=seed)

    if not searched or interval.closed or budget.stopped:
        return

    warn_if_short("the offline search", budget.left_s, budget.limit_s)
    if not budget.over:
        search_offline(interval, budget.part(_HALF if follows else 1.0), seed=seed)
