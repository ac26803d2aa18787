"""Strategies that improve an interval: bounds, policies and the offline search.

Exact methods are in `optsched.optimize.exact`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from optsched.bounds import bounds, raise_bound
from optsched.bounds.base import BoundTask, Proof
from optsched.bounds.certificate import certified_value, same_cost_model
from optsched.costs.machine import Hardware
from optsched.files import library
from optsched.files.read_write import read_json, schedule_from_dict
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.interval import Interval
from optsched.policies import Scheduler, allows, label_of, policies as registry
from optsched.policies.engine.simulate import completions, simulate
from optsched.problem.budget import NO_LIMIT, Budget, work_time
from optsched.problem.errors import (
    LoopError,
    NoIncumbentError,
    OutOfTimeError,
    PolicyError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.notes import warn
from optsched.problem.objective import service_limits
from optsched.problem.schedule import Schedule
from optsched.problem.service import SLOS
from optsched.problem.streams import Seed

# The share of a time limit below which a search is said to have had none.
_USEFUL = 0.1
# The seconds for a policy as long as there is no schedule.
_MIN_S = 1.0
# Policies that are quick and often the best, so that they run first.
_LIKELY = ("fcfs", "least-work", "mc-sf", "paced", "sarathi-pc", "spf", "spf-work", "vllm-v1")
# What a policy may do about a rule that it breaks.
_HINTS = {"kv_capacity": "; `evict_until_fits` of optsched.policies makes room for a batch"}
NO_SCHEDULE = LoopError, OutOfTimeError, PolicyError
"""What a policy raises that serves not all requests, or not in time."""
POLICY_SHARE = 0.5
"""The share of the time left for one policy of many, so that a slow one leaves time for others."""


def prove(interval: Interval, budget: Budget, method: str = "auto", *, seed: int = 0) -> None:
    """Raise the interval's bound by one method, or by all that are proved for the instance.

    Once no time is left, only a method given by name, or bounds without a search, still run.
    """
    known = None if interval.incumbent is None else interval.incumbent.schedule
    task = interval.task
    about = task.instance, task.cost_model, interval.goal, known, seed, task.workers
    question = BoundTask(*about, completions, pools=task.pools)
    told = Budget(budget.left_s, stop=budget.stop, progress=interval.heard)

    def take(name: str, proof: Proof) -> None:
        before = interval.bound
        left_out = bounds()[name].leaves_out
        interval.prove(proof.value, name, proof.certificate, left_out)
        if proof.tree is not None:
            interval.trees.append(proof)
        if proof.schedule is not None:
            offer(interval, proof.schedule, name)
        if interval.bound != before:
            interval.tell()

    interval.clock_s = interval.budget.spent_s
    raise_bound(question, told, take, method)


def take_from_library(interval: Interval) -> float | None:
    """Begin an interval with what the shipped library knows, and return its best known value.

    The schedule is judged, and the certificate is taken as shipped (`verify` checks it). None: the
    interval's question is not one of the library.
    """
    task = interval.task
    instance, folder = task.instance, library.library_folder()
    names = {file.name.removesuffix(".json.gz") for file in folder.glob("*.json.gz")}
    if task.pools is not None or instance.name not in names:
        return None

    entry = library.entry_of(instance.name, library.read_library())
    question = entry["instance_sha256"], entry["objective"], entry.get("workers", 1)
    if question != (instance.sha256, str(interval.goal), 1) or entry.get("bound") is None:
        return None

    certificate = read_json(folder / entry["bound"]["file"], expect="certificate")
    if not same_cost_model(certificate, task.cost_model):
        return None

    schedule = schedule_from_dict(read_json(folder / entry["best"]["file"]), instance)
    evaluation = interval.judge(schedule, quiet=True)
    interval.take(schedule, evaluation, "the library")
    interval.prove(certified_value(instance, certificate), "the library")
    return interval.goal.of(evaluation)


def offer(interval: Interval, schedule: Schedule, origin: str) -> bool:
    """Judge a relaxation's schedule. Make it the incumbent if it keeps limits and is the best."""
    try:
        evaluation = interval.judge(schedule, quiet=True)
    except ViolationError:
        return False

    return interval.take(schedule, evaluation, origin)


def _slos(limits: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in limits.items() if name in SLOS and value is not None}


def with_limits(instance: Instance, limits: Mapping[str, float | None]) -> Instance:
    """Return an instance that has the SLOs among some limits of service as columns."""
    given = _slos(limits)
    return with_slos(instance, given) if given else instance


def warn_if_short(name: str, left_s: float, limit_s: float | None) -> None:
    """Warn if almost nothing of a time limit is left for what is about to begin."""
    if limit_s and left_s < _USEFUL * limit_s:
        warn(
            f"{name} had {left_s:.1f} s of the {limit_s:g} s, since what came before took the "
            "rest; a larger time limit may improve the answer",
            stacklevel=2,
        )


def allowed_policies(instance: Instance) -> list[str]:
    """Return the names of the policies that the instance allows."""
    return [name for name in registry() if allows(name, instance) is None]


def run_policy(
    instance: Instance,
    spec: str | Scheduler,
    cost: Hardware,
    *,
    seed: Seed = 0,
    budget: Budget = NO_LIMIT,
    **limits: float | None,
) -> tuple[Schedule, Evaluation, float]:
    """Run a policy, which sees the SLOs among ``limits``, and have its schedule judged."""
    begin = work_time()
    schedule = simulate(instance, spec, cost, seed=seed, slos=_slos(limits), budget=budget)
    wall_s = work_time() - begin

    try:
        return schedule, evaluate(instance, schedule, cost, **limits), wall_s
    except ViolationError as error:
        hint = _HINTS.get(error.rule, "")
        error.args = (f"policy {label_of(spec)}: the judge rejects its schedule: {error}{hint}",)
        raise


def outside_reason(evaluation: Evaluation) -> str | None:
    """Return why the instance's bounds do not cover a schedule, or None if they do.

    In seconds they cover every schedule on one worker, without the runs that a restart loses.
    """
    if evaluation.instance.in_rounds:
        return evaluation.outside_reason

    return f"it uses {evaluation.workers} workers" if evaluation.workers > 1 else None


def run_policies(
    interval: Interval, budget: Budget, *, seed: int = 0, specs: Sequence[str] | None = None
) -> list[str]:
    """Improve the incumbent by policies until the budget is over, and return those that it ended.

    `specs`: default: every policy that the instance allows. One that uses up half of the time left
    is stopped, but the first one has a second. Ctrl-C keeps the best schedule so far.
    """
    instance, cost = interval.task.instance, interval.task.cost_model
    limits = service_limits(interval.task.objective)
    allowed = specs
    if allowed is None:
        named = allowed_policies(with_limits(instance, limits))
        allowed = sorted(named, key=lambda name: (name not in _LIKELY, name))

    ended = list[str]()

    try:
        for spec in allowed:
            if budget.over:
                ended.append(spec)
                continue

            least_s = _MIN_S if interval.incumbent is None else 0.0
            own = Budget(max(least_s, POLICY_SHARE * budget.left_s), stop=budget.stop)
            try:
                schedule, evaluation, _ = run_policy(
                    instance, spec, cost, seed=seed, budget=own, **limits
                )
            except OutOfTimeError:
                ended.append(spec)
                continue
            except NO_SCHEDULE:
                continue

            inside = outside_reason(evaluation) is None
            if inside and interval.take(schedule, evaluation, spec):
                interval.tell()
    except KeyboardInterrupt:
        pass

    return ended


def can_search(interval: Interval) -> bool:
    """Whether the offline search can do the task.

    It minimizes, or counts requests in time, and needs all arrivals in advance.
    """
    task, goal = interval.task, interval.goal
    known = not task.instance.in_rounds and task.instance.after is None and task.pools is None
    return known and (not goal.maximized or goal.name == "slo_attainment")


def search_offline(interval: Interval, budget: Budget, *, seed: int = 0) -> None:
    """Improve the incumbent by the search of `optsched.optimize.search.offline`."""
    from optsched.optimize.search.offline import POLICIES, improve

    task = interval.task
    known = [] if interval.incumbent is None else [interval.incumbent.schedule]
    interval.clock_s = interval.budget.spent_s
    told = Budget(budget.left_s, stop=budget.stop, progress=interval.heard)

    try:
        rest: Any = {"known": known, "policies": () if known else POLICIES, "seed": seed}
        schedule, _ = improve(task.instance, task.cost_model, told, objective=interval.goal, **rest)
    except NoIncumbentError:
        return  # no policy finds a schedule

    if not known or schedule is not known[0]:
        interval.take(schedule, interval.judge(schedule, quiet=True), "offline search")
