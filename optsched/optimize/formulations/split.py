"""Exact answers on several workers for few requests, by all ways to split them.

Workers are equal and do not meet. So a schedule on N workers is a split of the requests, and a
schedule of each part on one worker. Every set of requests is solved once on one worker, by the
method that ``auto`` stands for there. Then the best splits into 1, 2, ..., N parts follow from each
other: the best one of a set into k parts joins a part on one worker and the best split of the rest
into k - 1. Objectives are sums over requests, or a maximum of them.
"""

import operator
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optsched.bounds.base import ANY_INSTANCE, WORKERS
from optsched.costs.fleet import Fleet
from optsched.judge.evaluate import evaluate
from optsched.optimize.formulations import base
from optsched.optimize.formulations.base import LIMITS, Answer, Method, Task
from optsched.optimize.formulations.batches.problem import MODELLED, SWITCHES
from optsched.optimize.formulations.rounds.goals import GOALS, SUMS
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.policies.base import Job
from optsched.policies.routers import part_of
from optsched.policies.workers import joined
from optsched.problem.budget import work_time
from optsched.problem.errors import UsageError
from optsched.problem.schedule import Schedule, runs_on

MAX_REQUESTS = 8
"""Maximum number of requests. There are 2^n sets of n requests."""
# Objectives that are divided by the number of requests.
_SHARES = ("mean_latency", "mean_ttft", "slo_attainment")


def solve_by_split(task: Task, options: SolveOptions) -> Answer:
    """Solve every set of requests on one worker, and take the best split."""
    begin, n, name = work_time(), task.instance.n, task.names[0]
    if n > MAX_REQUESTS:
        raise UsageError(
            f"method: found split for {n} requests; expected at most {MAX_REQUESTS}, or another "
            "method"
        )

    answers: dict[int, Answer] = {}
    for members in range(1, 2**n):
        left = options.after(work_time() - begin)
        stopped = options.stop is not None and options.stop.is_set()
        if stopped or left.time_limit <= 0:
            return Answer(Status.NO_INCUMBENT, native_status="time limit")

        answers[members] = _alone(task, members, replace(left, progress=None, warm_start=None))
        if answers[members].status is not Status.OPTIMAL:
            return Answer(Status.NO_INCUMBENT, native_status=answers[members].native_status)

    join: Callable[[float, float], float] = operator.add if name in SUMS + _SHARES else max
    sign = -1.0 if task.objective[0].maximized else 1.0

    def best(values: dict[int, float]) -> tuple[float, list[int]]:
        if name in _SHARES:  # means and shares: the requests' part of the sum over all
            values = {m: value * m.bit_count() for m, value in values.items()}

        found = {0: (0.0, list[int]())} | {m: (value, [m]) for m, value in values.items()}
        for _ in range(min(task.workers, n) - 1):
            more = dict(found)
            for members in values:
                part = members
                while part:
                    rest, parts = found[members ^ part]
                    both = join(values[part], rest)
                    if sign * both < sign * more[members][0]:
                        more[members] = both, [part, *parts]

                    part = (part - 1) & members

            found = more

        value, parts = found[2**n - 1]
        if name == "slo_attainment":
            value = round(value)

        return value / n if name in _SHARES else value, parts

    level: float | None
    level, parts = best({m: a.objective or 0.0 for m, a in answers.items()})
    bound, _ = best({m: a.bound or 0.0 for m, a in answers.items()})
    schedule = _joined(task, {members: answers[members] for members in parts})

    if name == "slo_attainment":
        # The clock of all begins with the first arrival of all. A time that is its limit in one
        # clock may be above it in another, by rounding.
        level = task.objective[0].of(evaluate(task, schedule))

    return Answer(
        Status.OPTIMAL,
        schedule,
        objective=level,
        bound=bound,
        native_status=f"{len(answers)} sets of requests solved on one worker",
        solve_s=work_time() - begin,
    )


def _members(members: int, n: int) -> list[int]:
    return [i for i in range(n) if members >> i & 1]


def _alone(task: Task, members: int, options: SolveOptions) -> Answer:
    """Solve a set of requests on one worker."""
    from optsched.optimize.formulations import get

    part = task.instance.subset(np.array(_members(members, task.instance.n)))
    own = replace(task, instance=part, fleet=Fleet(task.fleet.machines[:1]))
    model = get("hindsight" if part.in_rounds else "infermax")
    name = base.automatic(model, own)

    return base.check_method(model, name, own).run(own, options)


def _joined(task: Task, parts: dict[int, Answer]) -> Schedule:
    """Return the schedule of all workers."""
    instance = task.instance
    if instance.in_rounds:
        starts, place = np.zeros(instance.n, dtype=np.int64), np.zeros(instance.n, dtype=np.int64)
        for worker, (members, answer) in enumerate(parts.items()):
            assert answer.schedule is not None
            assert answer.schedule.starts is not None
            mine = _members(members, instance.n)
            starts[mine], place[mine] = answer.schedule.starts, worker

        return runs_on(instance, starts, place)

    found = []
    for members, answer in parts.items():
        assert answer.schedule is not None
        who = np.array(_members(members, instance.n))
        own = instance.subset(who)
        found.append(part_of(answer.schedule, who, Job(own, own, task.cost_model)))
        mode = answer.schedule.evict_mode

    return joined(Job(instance, instance, task.cost_model), mode, found)


_SUMMARY = "every set of requests on one worker, and the best split of all; few requests"
_IN_ROUNDS, _IN_SECONDS = ANY_INSTANCE | WORKERS, MODELLED | WORKERS
_GOALS = ("makespan", "tel", "mean_ttft", "slo_attainment")
_EXTRAS = frozenset({"eviction_free"})
METHODS = {
    "hindsight": {
        "split": Method(
            _SUMMARY, solve_by_split, (*GOALS, "slo_attainment"), LIMITS, features=_IN_ROUNDS
        )
    },
    "infermax": {
        "split": Method(
            _SUMMARY, solve_by_split, _GOALS, SWITCHES, extras=_EXTRAS, features=_IN_SECONDS
        )
    },
}
