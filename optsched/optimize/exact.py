"""Exact methods: choose one, find a schedule to start from, run it and check its answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from optsched.bounds import list_bounds
from optsched.bounds.base import Proof
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.consistency import TOLERANCE, end_of, float_noise, rounding
from optsched.optimize.formulations import (
    Answer,
    Formulation,
    Method,
    Task,
    automatic,
    check_method,
    get,
    lacks_of,
)
from optsched.optimize.interval import Interval
from optsched.optimize.solvers.base import SolveOptions, Status, round_up_bound, settle_status
from optsched.optimize.strategies import POLICY_SHARE
from optsched.policies import behind_routers
from optsched.problem import errors
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.notes import warn
from optsched.problem.objective import Objective, parse_objectives
from optsched.problem.schedule import Schedule, from_starts, runs_on, workers_of
from optsched.workloads.problem import Problem

# Policies whose schedules are tried as warm starts. They are quick, and each of them ends.
_STARTERS = ("mc-sf", "least-work", "mc-benchmark", "rank-output", "fcfs", "vllm", "sarathi-nohy")
# The share of the time for policies to start from.
_STARTS_SHARE = 0.1
# The seconds for a policy as long as there is no schedule.
_MIN_S = 1.0
# The most requests for which policies are run to start from.
_POLICY_REQUESTS = 20_000


@dataclass(frozen=True, eq=False)
class Exact:
    """A formulation and one of its methods by name (`way`), chosen for a task.

    `asked`: whether the user named the method. One that is too large is an error then.
    """

    model: Formulation
    name: str
    way: Method
    task: Task
    asked: bool = True


class Start(NamedTuple):
    """A schedule that fits a formulation, with its evaluation."""

    schedule: Schedule
    evaluation: Evaluation


def choose(
    problem: Problem,
    formulation: str | None = None,
    method: str = "auto",
    *,
    extras: Mapping[str, Any] | None = None,
) -> Exact:
    """Return the formulation and the method for a problem.

    ``auto`` stands for a method that can do the task if there is one (`automatic`).
    """
    model, task = question(problem, formulation, extras)
    name = automatic(model, task) if method == "auto" else method
    if method == "auto" and (lacks := lacks_of(model, name, task)):
        raise errors.UsageError(
            f"method: found auto, which cannot do {', '.join(lacks)}; no method of {model.name} can"
        )

    return Exact(model, name, check_method(model, name, task), task, asked=method != "auto")


def question(
    problem: Problem, formulation: str | None, extras: Mapping[str, Any] | None
) -> tuple[Formulation, Task]:
    """Return the formulation, by name or by the instance's time unit, and the task."""
    model = _formulation(problem.instance, formulation)
    # An objective that no method has may have a bound: the error says so.
    known = sorted({name for method in model.methods.values() for name in method.objectives})
    try:
        parse_objectives(problem.objective, known, f"formulation {model.name}")
    except errors.UsageError as error:
        goals = parse_objectives(problem.objective)
        unit, names = model.time_unit, {goal.name for goal in goals}
        able = [bound for bound in list_bounds().values() if bound.time_unit == unit]
        words = ", ".join(bound.name for bound in able if names & {*bound.objectives})
        raise errors.UsageError(f"{error}; `bound` has {words}" if words else str(error)) from None

    return model, Task.of(problem, extras=extras or {})


def choose_if_able(task: Task) -> Exact | None:
    """Return the method that ``auto`` stands for, or None if no method can do the task."""
    model = _formulation(task.instance, None)
    name = automatic(model, task)
    lacks = lacks_of(model, name, task)
    return None if lacks else Exact(model, name, model.methods[name], task, asked=False)


def _formulation(instance: Instance, name: str | None) -> Formulation:
    """Return a formulation by name, or that of the instance's time unit, which it must fit."""
    if name is None:
        name = "hindsight" if instance.in_rounds else "infermax"

    formulation = get(name)
    if formulation.time_unit != instance.time_unit:
        if formulation.time_unit == "round":
            raise errors.UsageError(
                f"formulation: found {name} for an instance in seconds; expected infermax, or an "
                "instance in rounds (`optsched import --rounds SECONDS` makes one)"
            )

        raise errors.UsageError(
            f"formulation: found {name} for an instance in rounds; expected hindsight"
        )

    return formulation


def is_restricted(task: Task) -> bool:
    """Whether extras may rule out schedules that the judge accepts."""
    return any(value not in (None, False) for value in task.extras.values())


def starting_point(
    exact: Exact, given: Schedule | str | None, seed: int, budget: Budget
) -> Start | None:
    """Return a schedule to start from that fits the formulation, or None if there is none.

    It is the given one, or else the best of some policies and, in rounds, of a serial placement.
    """
    from optsched.optimize.formulations.rounds.horizon import serial_schedule
    from optsched.policies.engine.simulate import simulate

    task = exact.task
    if given is not None:
        what_is_found, expected = "a schedule that", "one"
        schedule = given
        if isinstance(schedule, str):
            what_is_found, expected = f"policy {given!r}, which", "a policy whose schedule"
            schedule = simulate(task, schedule, seed=seed, budget=budget)

        start = in_terms_of(exact, schedule)
        if start is None:
            raise errors.UsageError(
                f"warm start: found {what_is_found} pauses a request or splits a prefill; expected "
                f"{expected} that formulation {exact.model.name} allows"
            )

        return start

    # Policies would take too long, or may make a schedule that the task rules out.
    if task.instance.n > _POLICY_REQUESTS or is_restricted(task):
        return None

    # Of several objectives the first one decides which start is the best.
    goal = task.objective[0]
    best: Start | None = None
    starts_budget = budget.part(_STARTS_SHARE)

    makers: list[Callable[..., Schedule]] = [
        partial(simulate, task, spec, seed=seed) for spec in behind_routers(_STARTERS, task.workers)
    ]
    if task.instance.in_rounds and task.workers == 1:
        makers.append(lambda budget: serial_schedule(task.instance))

    for make in makers:
        if best is not None and starts_budget.over:
            break

        # Even where no time is left, one of these quick policies gets a second.
        min_s = _MIN_S if best is None else 0.0
        policy_budget = Budget(max(min_s, POLICY_SHARE * starts_budget.left_s), stop=budget.stop)
        try:
            start = in_terms_of(exact, make(budget=policy_budget))
        except errors.OptschedError:
            continue  # the policy loops, or the instance rules it out

        if start is not None and (
            best is None or goal.better(goal.of(start.evaluation), goal.of(best.evaluation))
        ):
            best = start

    return best


def offer_warm_start(interval: Interval, given: Schedule | str, seed: int) -> None:
    """Take a schedule, or a policy's, as the incumbent, whatever a formulation leaves out."""
    from optsched.policies.engine.simulate import simulate

    task, schedule = interval.task, given
    if isinstance(schedule, str):
        schedule = simulate(task, schedule, seed=seed, budget=interval.budget)

    interval.take(schedule, interval.judge(schedule), "the warm start")


def in_terms_of(
    exact: Exact, schedule: Schedule, evaluation: Evaluation | None = None
) -> Start | None:
    """Return a schedule rewritten to fit the formulation, or None if that is not possible.

    In rounds it becomes uninterrupted runs with the same completions, which may break a limit if
    requests paused or prefills were split. In seconds only split prefills may not fit.
    """
    instance = exact.task.instance
    judged = evaluate(exact.task, schedule) if evaluation is None else evaluation
    # It needs more workers than the task has.
    if judged.workers > exact.task.workers:
        return None
    if exact.model.time_unit != "round":
        # If chunked_prefill is absent, models take it as off, while schedulers may choose.
        splits = judged.split_prefill and instance.chunked_prefill is not True
        return None if splits else Start(schedule, judged)

    if schedule.kind == "starts":
        return Start(schedule, judged)

    # The run without pauses that ends when the request does.
    begin = judged.finish - instance.output_tokens
    if judged.workers == 1:
        runs = from_starts(begin, instance)
    else:
        runs = runs_on(instance, begin, workers_of(schedule, instance.n))

    try:
        return Start(runs, evaluate(exact.task, runs))
    except errors.ViolationError:
        return None


def attempt(exact: Exact, interval: Interval, options: SolveOptions, start: Start | None) -> Answer:
    """Run the method, and report its progress merged with what the interval knows.

    The start is the answer after a Ctrl-C before the method runs, and with a warning if the time
    was up before the model was built, or if ``auto`` chose a method whose model is too large.
    """
    schedule = None if start is None else start.schedule
    interval.clock_s = interval.budget.spent_s
    try:
        run_options = replace(options, progress=interval.merge_progress, warm_start=schedule)
        return exact.way.run(exact.task, run_options)
    except KeyboardInterrupt:
        if start is None:
            raise

        reason = "interrupted"
    except errors.OutOfTimeError as late:
        reason = str(late)
    except errors.TooLargeError as large:
        if exact.asked:
            raise

        reason = str(large)

    if reason != "interrupted":
        warn(f"{exact.name} found no schedule and no bound: {reason}", stacklevel=2)
    if start is None:
        return Answer(Status.NO_INCUMBENT, native_status=reason)

    value = interval.goal.of(start.evaluation)
    return Answer(Status.FEASIBLE, start.schedule, value, native_status=reason)


def accept(
    exact: Exact, interval: Interval, answer: Answer, origin: str = "", at_ties: bool = False
) -> Status:
    """Check an answer against the judge and the interval, and improve the interval by it.

    A bound counts for the schedules that the formulation does not leave out. Return what the two
    ends of the interval prove then. `origin`: whose bound and schedule these are; default: the
    method's. `at_ties`: whether its schedule replaces one of the same value.
    """
    task, goal, method = exact.task, interval.goal, exact.name
    integral = goal.integral(task.instance)
    status = answer.status

    if interval.incumbent is not None:
        if status is Status.INFEASIBLE:
            raise errors.SolverError(
                f"{method}: found the status infeasible ({answer.native_status}) although the warm "
                "start is feasible; expected an incumbent; the model or the solver is wrong"
            )

        # A schedule is known, whatever the method has found.
        status = Status.ERROR if status is Status.ERROR else Status.FEASIBLE

    if answer.schedule is not None:
        evaluation = _judge(task, method, answer.schedule)
        _check_value(method, goal, answer.objective, evaluation)
        # What the method says of its schedule counts if that is the incumbent now.
        if interval.take(answer.schedule, evaluation, origin or method, at_ties=at_ties):
            status = answer.status

    if answer.bound is not None:
        bound = round_up_bound(answer.bound) if integral else answer.bound
        certificate = answer.certificate if isinstance(answer.certificate, dict) else None
        left_out = exact.model.leaves_out(task)
        interval.prove(bound, origin or method, certificate, leaves_out=left_out)
        if answer.tree is not None:
            interval.trees.append(Proof(bound, tree=answer.tree, cost_model=task.cost_model))

    # Floats of a value and a bound may differ by rounding, and are still said to meet.
    interval.reconcile()
    best, slack = interval.incumbent, 0.0
    if best is not None:
        slack = max(rounding(best.evaluation, best.value), TOLERANCE * abs(best.value))
    if status is not Status.ERROR:
        status = settle_status(
            status,
            None if interval.value is None else goal.signed(interval.value),
            None if interval.bound is None else goal.signed(interval.bound),
            integral_objective=integral,
            slack=slack,
        )

    if len(task.objective) > 1 and answer.status is not Status.OPTIMAL:
        # Objective and bound are those of the first objective only.
        status = Status.FEASIBLE if status is Status.OPTIMAL else status

    return status


def _judge(task: Task, method: str, schedule: Schedule) -> Evaluation:
    """Judge a method's schedule. That it is not feasible is an internal error."""
    try:
        return evaluate(task, schedule)
    except errors.OptschedError as error:
        raise errors.SolverError(
            f"{method}: found a schedule that is not feasible: {error}"
        ) from error


def _check_value(
    method: str, goal: Objective, claimed: float | None, evaluation: Evaluation
) -> None:
    """Check the value that a method claims for its schedule against the judge's."""
    name, judged, instance = goal.name, goal.of(evaluation), evaluation.instance
    if claimed is None or judged is None:
        raise errors.SolverError(
            f"{method}: found {name} {claimed} claimed; expected {judged}, as judged"
        )

    # A whole value is claimed as a float, near it; others differ by the noise of floats.
    slack = 0.01
    if not goal.integral(instance):
        slack = float_noise(instance, name, judged, end_of(evaluation))
    if not abs(claimed - judged) <= slack:
        raise errors.SolverError(
            f"{method}: found {name} {claimed} claimed for its schedule; expected {judged}, as "
            "judged; the model or the solver is wrong"
        )
