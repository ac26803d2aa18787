"""The interval and its budget: what improves it, what is told, and what ends the work.

Its numbers are total latencies of TINY, computed by hand.
"""

from __future__ import annotations

import math
import threading

import pytest

from optsched import Instance, Limits, evaluate, from_starts
from optsched.bounds import list_bounds
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.optimize.strategies import allowed_policies, offer, prove, run_policies
from optsched.problem.budget import Budget, Progress
from optsched.problem.errors import SolverError, ViolationError

TINY = Instance([0, 0], [1, 2], [3, 2], 6, name="tiny")
"""Request 1 first and request 0 a round later: latencies 2 + 4 = 6. One by one, request 0 first:
3 + 5 = 8; request 1 first: 2 + 5 = 7."""


def interval(instance: Instance = TINY, budget: Budget | None = None) -> Interval:
    """An interval about total latency that knows neither a schedule nor a bound yet."""
    return Interval(Task(instance, objective=("tel",)), budget)


def offered(to: Interval, starts: list[int], origin: str, *, at_ties: bool = False) -> bool:
    """Let the judge look at a schedule and offer it; return whether it is taken."""
    schedule = from_starts(starts, to.task.instance)
    return to.take(schedule, to.judge(schedule), origin, at_ties=at_ties)


def test_the_best_schedule_and_the_largest_bound_stay() -> None:
    """Worse schedules and smaller bounds are not taken; where the two meet it is closed."""
    # Latencies of the three schedules sum to 8, 7 and 6, as `TINY` says.
    found = interval()
    assert (found.value, found.bound, found.closed) == (None, None, False)
    assert offered(found, [0, 3], "serial")
    assert offered(found, [2, 0], "short first")
    assert not offered(found, [0, 3], "serial again")
    assert found.value == 7
    found.prove(5, "outputs")
    found.prove(4, "weaker")
    assert (found.bound, found.bound_origin) == (5, "outputs")
    assert offered(found, [1, 0], "optimal")
    found.prove(6, "proof")
    found.reconcile()
    assert found.closed
    assert found.incumbent is not None
    assert found.incumbent.evaluation.metrics["tel"] == 6


def test_at_ties_the_earlier_schedule_stays_unless_asked() -> None:
    # The same schedule three times, so each offer is a tie with the one before.
    found = interval()
    offered(found, [2, 0], "first")
    assert not offered(found, [2, 0], "second")
    assert offered(found, [2, 0], "third", at_ties=True)
    assert found.incumbent is not None
    assert found.incumbent.origin == "third"


def test_a_bound_above_the_schedule_is_an_error_with_both_named() -> None:
    found = interval()
    offered(found, [1, 0], "search")  # latencies of 4 + 2
    found.prove(7, "wrong")
    with pytest.raises(SolverError, match=r"wrong:.*bound 7.*tel 6"):
        found.reconcile()


def test_a_certificate_is_kept_if_it_proves_as_much_as_another() -> None:
    """Of two certificates the larger one stays, beside a larger bound that comes without one."""
    found = interval()
    found.prove(5, "dual", {"value": 5})
    found.prove(6, "without")
    found.prove(4, "weaker", {"value": 4})
    assert found.certificate == {"value": 5}
    assert found.bound == 6


def test_what_is_heard_of_a_solver_is_told_with_what_is_known() -> None:
    told: list[Progress] = []
    found = interval(budget=Budget(progress=told.append))
    offered(found, [2, 0], "short first")
    found.prove(5, "outputs")
    found.clock_s = 10.0  # the solver began then, so that 1 and 2 s of its own are 11 and 12
    found.merge_progress(Progress(1.0, 8, 4.2))  # 8 is worse than 7; 4.2 rounds up to 5
    found.merge_progress(Progress(2.0, 6, 5.1))
    assert [(state.elapsed_s, state.incumbent, state.bound) for state in told] == [
        (11.0, 7, 5),
        (12.0, 6, 6),
    ]


def test_a_schedule_of_a_relaxation_that_breaks_a_limit_is_left() -> None:
    # The optimum of TINY runs both in round 2, and only one may run.
    limited = Instance([0, 0], [1, 2], [3, 2], 6, limits=Limits(max_running=1))
    found = interval(limited)
    both = from_starts([1, 0], limited)
    with pytest.raises(ViolationError, match="max_running"):
        evaluate(limited, both)
    assert not offer(found, both, "ramp")
    assert found.incumbent is None
    assert offer(found, from_starts([2, 0], limited), "serial")


def test_bounds_and_policies_are_strategies_on_one_interval() -> None:
    """Without time a quick bound is taken and no policy starts; with time both ends enclose 6."""
    found = interval()
    prove(found, Budget(0.0))
    quick = {name for name, one in list_bounds().items() if not one.searches}
    assert found.bound_origin in quick
    run_policies(found, Budget(0.0))
    assert found.value is None  # none starts without time
    run_policies(found, Budget())
    assert found.incumbent is not None
    assert found.incumbent.origin in allowed_policies(found.task.instance)
    assert found.bound is not None
    assert found.bound <= 6 <= found.incumbent.value  # 6 is the optimum of TINY


def test_a_budget_counts_from_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    every_second = map(float, range(100)).__next__  # a second a look
    monkeypatch.setattr("optsched.problem.budget.work_time.now", every_second)
    budget = Budget(3.0)  # looked at 0
    assert budget.left_s == 2.0
    assert not budget.over  # 2 s
    assert budget.over  # 3 s
    assert budget.left_s == 0.0
    part = Budget(100.0).part(0.5)  # made at 5, looked at 6: 99 s are left
    assert part.limit_s == 49.5


def test_a_stop_ends_every_part_of_a_budget() -> None:
    """Before the stop a part without limit has time for ever, and none after it."""
    stop = threading.Event()
    budget = Budget(stop=stop)
    part = budget.part(0.5)
    assert part.left_s == math.inf
    assert not part.over
    stop.set()
    assert budget.over
    assert part.over
    assert part.left_s == 0.0
