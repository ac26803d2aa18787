"""What improves an interval: bounds, policies, the offline search; exact methods are in `exact`."""

from __future__ import annotations

import time
from collections.abc import Callable

from optsched.bounds import raise_bound
from optsched.bounds.base import BoundTask, Proof
from optsched.costs.cost import CostModel
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.interval import Interval
from optsched.policies import allows, policies as registry
from optsched.policies.engine.simulate import quick_to_simulate, simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import LoopError, NoIncumbentError, PolicyError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule


def prove(interval: Interval, budget: Budget, method: str = "auto", *, seed: int = 0) -> None:
    """Raise the lower end by one bound, or by all that are proved for the instance.

    Parameters
    ----------
    interval : Interval
    budget : Budget
        With no time left only bounds run that do not search, or the one asked for.
    method : str
    seed : int

    Raises
    ------
    UsageError
        As `optsched.bounds.usable`.
    """
    known = None if interval.incumbent is None else interval.incumbent.schedule
    task = interval.task
    question = BoundTask(task.instance, task.cost_model, interval.goal, known, seed)
    told = Budget(budget.left_s, stop=budget.stop, progress=interval.heard)

    def take(name: str, proof: Proof) -> None:
        before = interval.bound
        interval.prove(proof.value, name, proof.certificate)
        if proof.schedule is not None:
            offer(interval, proof.schedule, name)
        if interval.bound != before:
            interval.tell()

    interval.clock_s = interval.budget.spent_s
    raise_bound(question, told, take, method)


def offer(interval: Interval, schedule: Schedule, origin: str) -> bool:
    """Take a schedule that a relaxation found, which may break limits, if it is the best."""
    try:
        evaluation = interval.judge(schedule, quiet=True)
    except ViolationError:
        return False
    return interval.take(schedule, evaluation, origin)


def allowed_policies(instance: Instance) -> list[str]:
    """Return the names of the policies that the instance allows."""
    return [name for name in registry() if allows(name, instance) is None]


def run_policy(
    instance: Instance, spec: str, cost: CostModel, *, seed: int = 0, **limits: float | None
) -> tuple[Schedule, Evaluation, float]:
    """Run a policy and have its schedule judged.

    Returns
    -------
    schedule : Schedule
    evaluation : Evaluation
    wall_s : float
        Seconds for the decisions, without judging them.

    Raises
    ------
    LoopError, PolicyError
        The policy makes no schedule.
    ViolationError
        The judge rejects its schedule.
    """
    begin = time.perf_counter()
    schedule = simulate(instance, spec, cost, seed=seed)
    wall_s = time.perf_counter() - begin
    try:
        return schedule, evaluate(instance, schedule, cost, **limits), wall_s
    except ViolationError as error:
        error.args = (f"policy {spec}: the judge rejects its schedule: {error}",)
        raise


def outside_reason(evaluation: Evaluation) -> str | None:
    """Return why the bounds of the instance do not cover a schedule, or None if they do.

    In seconds every schedule on one worker is covered: dropping the runs that a restart loses
    makes no batch longer, and leaves a schedule that evicts nothing.
    """
    if evaluation.instance.in_rounds:
        return evaluation.outside_reason
    return f"it uses {evaluation.workers} workers" if evaluation.workers > 1 else None


def run_policies(
    interval: Interval,
    budget: Budget,
    *,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Lower the upper end by every policy that the instance allows.

    None is started once the budget is over, and none at all where one could take very long
    (`optsched.policies.engine.simulate.quick_to_simulate`). Ctrl-C keeps the best so far.
    """
    instance, cost = interval.task.instance, interval.task.cost_model
    if not quick_to_simulate(instance):
        return
    try:
        for spec in allowed_policies(instance):
            if budget.over:
                break
            if tell is not None:
                tell(spec)
            try:
                schedule, evaluation, _ = run_policy(instance, spec, cost, seed=seed)
            except (LoopError, PolicyError):
                continue
            if outside_reason(evaluation) is None:
                interval.take(schedule, evaluation, spec)
    except KeyboardInterrupt:
        pass


def search_offline(interval: Interval, budget: Budget, *, seed: int = 0) -> None:
    """Lower the upper end by the search of `optsched.optimize.search.offline`, in seconds."""
    from optsched.optimize.search.offline import POLICIES, improve

    task = interval.task
    known = [] if interval.incumbent is None else [interval.incumbent.schedule]
    interval.clock_s = interval.budget.spent_s
    told = Budget(budget.left_s, stop=budget.stop, progress=interval.heard)
    try:
        schedule, _ = improve(
            task.instance, task.cost_model, told, seed=seed, known=known,
            policies=() if known else POLICIES, objective=interval.goal.name,
        )  # fmt: skip
    except NoIncumbentError:
        return  # no policy serves it
    if not known or schedule is not known[0]:
        interval.take(schedule, interval.judge(schedule, quiet=True), "offline search")
