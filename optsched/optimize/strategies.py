"""Strategies that improve an interval: bounds, policies and the offline search.

Exact methods are in `optsched.optimize.exact`.
"""

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from optsched.bounds import list_bounds, raise_bound
from optsched.bounds.base import BoundTask, Proof
from optsched.bounds.certificate import certified_value, same_cost_model, same_limits
from optsched.files import library
from optsched.files.read_write import read_json, schedule_from_dict
from optsched.judge.evaluate import Evaluation
from optsched.optimize.formulations.base import Method
from optsched.optimize.interval import Interval
from optsched.policies import allows, list_policies
from optsched.policies.engine.simulate import completions
from optsched.policies.run import run_within
from optsched.problem import kernel
from optsched.problem.budget import Budget
from optsched.problem.errors import (
    LoopError,
    NoIncumbentError,
    OutOfTimeError,
    PolicyError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.notes import warn
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem

# The share of a time limit below which a search is said to have had none.
_MIN_SHARE = 0.1
# What is imported of packages, and of this one, by the first search.
_IMPORTS = [f"optsched.policies.{name}" for name in ("table", "engine.blocks", "engine.rules")]
_MODULES = {"ortools": "ortools.sat.python.cp_model"}
# The seconds for a policy as long as there is no schedule.
_MIN_S = 1.0
LIKELY = ("fcfs", "least-work", "mc-sf", "paced", "sarathi-pc", "spf", "spf-work", "vllm-v1")
"""Policies that are quick and often the best, so that they run first."""
DRAFTING = "vllm-v1", *(f"vllm-v1:policy=priority,priority={key}" for key in ("prompt", "work"))
"""Policies that verify drafts, and how they are often the best."""
NO_SCHEDULE = LoopError, OutOfTimeError, PolicyError
"""What a policy raises that serves not all requests, or not in time."""
POLICY_SHARE = 0.5
"""The share of the time left for one policy of many, so that a slow one leaves time for others."""


def load(method: Method | None = None) -> None:
    """Import what a search and a method would at first, so that no time limit counts it."""
    kernel.load()
    for name in (*_IMPORTS, *(() if method is None else method.solvers)):
        with suppress(ImportError):  # the method says what is missing
            import_module(_MODULES.get(name, name))


def prove(interval: Interval, budget: Budget, method: str = "auto", *, seed: int = 0) -> None:
    """Raise the interval's bound by one method, or by all that are proved for the instance.

    Once no time is left, only a method given by name, or bounds without a search, still run.
    """
    known = None if interval.incumbent is None else interval.incumbent.schedule
    # Prices start from the completions of a schedule that is quickly made.
    question = BoundTask.of(interval.task, known=known, seed=seed, completions=completions)
    part = Budget(budget.left_s, stop=budget.stop, progress=interval.merge_progress)

    def keep(name: str, proof: Proof) -> None:
        before = interval.bound
        left_out = list_bounds()[name].leaves_out
        interval.prove(proof.value, name, proof.certificate, left_out)
        if proof.tree is not None:
            interval.trees.append(proof)
        if proof.schedule is not None:
            offer(interval, proof.schedule, name)
        if interval.bound != before:
            interval.report()

    interval.clock_s = interval.budget.spent_s
    raise_bound(question, part, keep, method)


def take_from_library(interval: Interval) -> float | None:
    """Begin an interval with what the shipped library knows, and return its best known value.

    The schedule is judged, and the certificate is taken as shipped (`verify` checks it). None: the
    interval's question is not one of the library.
    """
    task = interval.task
    instance, folder = task.instance, library.library_folder()
    names = {file.name.removesuffix(".json.gz") for file in folder.glob("*.json.gz")}
    if task.workers > 1 or task.pools or instance.name not in names:
        return None

    entry = library.entry_of(instance.name, library.read_library())
    # It is known by name, so the requests, the objective and the costs are compared, too.
    question = entry["instance_sha256"], entry["objective"], entry.get("workers", 1)
    if question != (instance.sha256, str(interval.goal), 1) or entry.get("bound") is None:
        return None

    certificate = read_json(folder / entry["bound"]["file"], expect="certificate")
    if not (same_cost_model(certificate, task.cost_model) and same_limits(certificate, instance)):
        return None

    schedule = schedule_from_dict(read_json(folder / entry["best"]["file"]), instance)
    evaluation = interval.judge(schedule, quiet=True)
    interval.take(schedule, evaluation, "the library")
    interval.prove(certified_value(instance, certificate), "the library")
    return interval.goal.of(evaluation)


def offer(interval: Interval, schedule: Schedule, origin: str) -> bool:
    """Judge a relaxation's schedule. Make it the incumbent if it keeps limits and is the best.

    A relaxation may ignore limits, so a schedule that breaks one is no error.
    """
    try:
        evaluation = interval.judge(schedule, quiet=True)
    except ViolationError:
        return False

    return interval.take(schedule, evaluation, origin)


def warn_if_short(name: str, left_s: float, limit_s: float | None) -> None:
    """Warn if almost nothing of a time limit is left for what is about to begin."""
    if limit_s and left_s < _MIN_SHARE * limit_s:
        warn(
            f"{name} had {left_s:.1f} s of the {limit_s:g} s, since what came before took the "
            "rest; a larger time limit may improve the answer",
            stacklevel=2,
        )


def allowed_policies(instance: Instance) -> list[str]:
    """Return the names of the policies that the instance allows."""
    return [name for name in list_policies() if allows(name, instance) is None]


def outside_reason(evaluation: Evaluation, problem: Problem) -> str | None:
    """Return why a problem's bounds do not cover a schedule, or None if they do.

    In seconds they cover every schedule on its machines, without the runs that a restart loses.
    """
    if problem.pools is not None:
        return None
    if evaluation.workers > problem.workers:
        return f"it uses {evaluation.workers} workers"

    return evaluation.outside_reason


def run_policies(
    interval: Interval, budget: Budget, *, seed: int = 0, specs: Sequence[str] | None = None
) -> list[str]:
    """Improve the incumbent by policies until the budget is over. Return those that did not end.

    `specs`: default: every policy that the instance allows. One that uses up half of the time left
    is stopped, but the first one has a second. Ctrl-C keeps the best schedule so far.
    """
    task, allowed = interval.task, specs
    if allowed is None:
        names = allowed_policies(task.instance)
        allowed = sorted(names, key=lambda name: (name not in LIKELY, name))
        if task.instance.drafts is not None:  # who verifies none is slower
            allowed = [*DRAFTING, *allowed]

    unfinished = list[str]()

    try:
        for spec in allowed:
            if budget.over:
                unfinished.append(spec)
                continue

            min_s = _MIN_S if interval.incumbent is None else 0.0
            policy_budget = Budget(max(min_s, POLICY_SHARE * budget.left_s), stop=budget.stop)
            try:
                run = run_within(task, spec, policy_budget, seed)
            except OutOfTimeError:
                unfinished.append(spec)
                continue
            except NO_SCHEDULE:
                continue

            is_covered = outside_reason(run.evaluation, task) is None
            if is_covered and interval.take(run.schedule, run.evaluation, spec):
                interval.report()
    except KeyboardInterrupt:
        pass

    return unfinished


def can_search(interval: Interval) -> bool:
    """Whether the offline search can do the task.

    It minimizes, or counts requests in time, needs all arrivals in advance, and drafts nothing. It
    knows one machine, in seconds.
    """
    task, goal = interval.task, interval.goal
    is_known = not task.instance.in_rounds and task.instance.after is None
    is_known = is_known and task.instance.drafts is None
    is_known = is_known and task.pools is None and len(task.machines) == 1
    return is_known and (not goal.maximized or goal.name == "slo_attainment")


def search_offline(interval: Interval, budget: Budget, *, seed: int = 0) -> None:
    """Improve the incumbent by the search of `optsched.optimize.search.offline`.

    It begins with the incumbent, or without one with its own policies.
    """
    from optsched.optimize.search.offline import POLICIES, improve

    task = interval.task
    known = [] if interval.incumbent is None else [interval.incumbent.schedule]
    interval.clock_s = interval.budget.spent_s
    part = Budget(budget.left_s, stop=budget.stop, progress=interval.merge_progress)

    try:
        policies = () if known else POLICIES
        schedule, _ = improve(task, part, known=known, policies=policies, seed=seed)
    except NoIncumbentError:
        return  # no policy finds a schedule

    # It gives back what it began with if it found nothing better.
    if not known or schedule is not known[0]:
        interval.take(schedule, interval.judge(schedule, quiet=True), "offline search")
