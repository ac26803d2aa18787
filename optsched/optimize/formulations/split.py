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
from optsched.bounds.timeline import Ints
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
_AVERAGES = ("mean_latency", "mean_ttft", "slo_attainment")


def solve_by_split(task: Task, options: SolveOptions) -> Answer:
    """Solve every set of requests on one worker, and take the best split.

    It is optimal, since each set is. If one is not solved in time there is no answer.
    """
    begin, n, name = work_time(), task.instance.n, task.names[0]
    if n > MAX_REQUESTS:
        raise UsageError(
            f"method: found split for {n} requests; expected at most {MAX_REQUESTS}, or another "
            "method"
        )

    answers: dict[int, Answer] = {}
    for members in range(1, 2**n):
        remaining = options.after(work_time() - begin)
        is_stopped = options.stop is not None and options.stop.is_set()
        if is_stopped or remaining.time_limit <= 0:
            return Answer(Status.NO_INCUMBENT, native_status="time limit")

        # Progress and warm start are of all requests, not of a part.
        part_options = replace(remaining, progress=None, warm_start=None)
        answers[members] = _solve_on_one(task, members, part_options)
        if answers[members].status is not Status.OPTIMAL:
            return Answer(Status.NO_INCUMBENT, native_status=answers[members].native_status)

    level: float | None
    level, parts = _best_split(task, {m: a.objective or 0.0 for m, a in answers.items()})
    bound, _ = _best_split(task, {m: a.bound or 0.0 for m, a in answers.items()})
    schedule = _join_parts(task, {members: answers[members] for members in parts})

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


def _best_split(task: Task, values: dict[int, float]) -> tuple[float, list[int]]:
    """Return the value of the best split into at most as many parts as workers, and its parts.

    ``values`` has that of each set of requests on one worker, but not of the empty one. A set is a
    whole number whose bit i stands for request i.
    """
    n, name = task.instance.n, task.names[0]
    join: Callable[[float, float], float] = operator.add if name in SUMS + _AVERAGES else max
    sign = -1.0 if task.objective[0].maximized else 1.0
    # Of means and shares: the set's part of the sum over all requests.
    if name in _AVERAGES:
        values = {m: value * m.bit_count() for m, value in values.items()}

    # By set: the best split of it into at most k parts, for k = 1, 2, ..., workers.
    best = {0: (0.0, list[int]())} | {m: (value, [m]) for m, value in values.items()}
    for _ in range(min(task.workers, n) - 1):
        with_one_more = dict(best)
        for members in values:
            part = members
            while part:
                # The rest of the set has at most one part fewer.
                value_of_others, parts = best[members ^ part]
                value = join(values[part], value_of_others)
                if sign * value < sign * with_one_more[members][0]:
                    with_one_more[members] = value, [part, *parts]

                part = (part - 1) & members  # the next smaller subset

        best = with_one_more

    value, parts = best[2**n - 1]
    # Requests in time are a whole number, which sums of the parts' shares in floats may miss.
    if name == "slo_attainment":
        value = round(value)

    return value / n if name in _AVERAGES else value, parts


def _members_of(members: int, n: int) -> Ints:
    """Return the requests of a set, which is a whole number with a bit for each."""
    return np.array([i for i in range(n) if members >> i & 1])


def _solve_on_one(task: Task, members: int, options: SolveOptions) -> Answer:
    """Solve a set of requests on one worker."""
    from optsched.optimize.formulations import get

    part = task.instance.subset(_members_of(members, task.instance.n))
    part_task = replace(task, instance=part, fleet=Fleet(task.fleet.machines[:1]))
    model = get("hindsight" if part.in_rounds else "infermax")
    name = base.automatic(model, part_task)

    return base.check_method(model, name, part_task).run(part_task, options)


def _join_parts(task: Task, parts: dict[int, Answer]) -> Schedule:
    """Return the schedule of all workers, from the set and the answer of each.

    In rounds that is a start and a worker for each request, in seconds the parts' batches. A `Job`
    has an instance with predictions and one without: here there are none, so both are the same.
    """
    instance = task.instance
    if instance.in_rounds:
        starts, worker_of = np.zeros((2, instance.n), dtype=np.int64)
        for worker, (members, answer) in enumerate(parts.items()):
            assert answer.schedule is not None
            assert answer.schedule.starts is not None
            requests = _members_of(members, instance.n)
            starts[requests] = answer.schedule.starts
            worker_of[requests] = worker

        return runs_on(instance, starts, worker_of)

    schedules = []
    for members, answer in parts.items():
        assert answer.schedule is not None
        requests = _members_of(members, instance.n)
        part = instance.subset(requests)
        schedules.append(part_of(answer.schedule, requests, Job(part, part, task.cost_model)))
        mode = answer.schedule.evict_mode

    return joined(Job(instance, instance, task.cost_model), mode, schedules)


_SUMMARY = "every set of requests on one worker, and the best split of all; few requests"
_IN_ROUNDS, _IN_SECONDS = ANY_INSTANCE | WORKERS, MODELLED | WORKERS
_GOALS = ("makespan", "tel", "mean_ttft", "slo_attainment")
_EXTRAS = frozenset({"eviction_free"})
_ROUNDS = Method(_SUMMARY, solve_by_split, (*GOALS, "slo_attainment"), LIMITS, features=_IN_ROUNDS)
_SECONDS = Method(_SUMMARY, solve_by_split, _GOALS, SWITCHES, extras=_EXTRAS, features=_IN_SECONDS)
METHODS = {"hindsight": {"split": _ROUNDS}, "infermax": {"split": _SECONDS}}
