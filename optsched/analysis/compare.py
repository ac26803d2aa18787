"""Compare policies on one instance with the best schedule known and with a bound."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optsched.analysis.comparison import BEST, Comparison, PolicyRow
from optsched.analysis.hits import lost_hits
from optsched.analysis.optima import Optima
from optsched.bounds import BoundTask, usable
from optsched.files.measured import Measured, read_measured
from optsched.optimize import strategies
from optsched.optimize.consistency import rounding
from optsched.optimize.exact import Exact, choose
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.optimize.narrow import narrow
from optsched.optimize.solvers.base import SolveOptions
from optsched.policies import (
    Named,
    Scheduler,
    is_clairvoyant,
    labelled,
    lengths_note,
    make_policy,
    runner_of,
)
from optsched.policies.run import Run, run_within
from optsched.problem.budget import Budget, Progress
from optsched.problem.columns import check_whole
from optsched.problem.errors import (
    InfeasibleError,
    OptschedError,
    UsageError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.markup import number
from optsched.problem.metrics import COMPARED, TABLE, derive
from optsched.problem.objective import TOTAL_LATENCY, Objective, parse_objective
from optsched.problem.progress import percent
from optsched.workloads.problem import Problem, as_problem

__all__ = ["Comparison", "PolicyRow", "best_of_policies", "compare"]

# The share of the time limit that bounds and searches have at least, after the policies.
_MIN_SHARE = 0.5
# The share of the time limit for bounds on other metrics.
_FURTHER_SHARE = 0.1
# Policies that look for a better schedule, whoever is compared, by the unit of time.
_RIVALS = {
    "round": ("least-work", "mc-sf"),
    "second": ("least-work", "vllm-v1:policy=priority,priority=work"),
}
# How many times longer a tail must be for the comparison of means to be called misleading.
_MISLEADS = 2.0
# The error of the twin beyond which the ratios of a measured server say nothing about it.
_TWIN_OFF = 0.3
# The share of the latency up to which requests are said to hardly wait, and totals to be alike.
_CALM = 0.02
# The share of the time for further bounds that one on a tail may use.
_TAIL_SHARE = 0.5


def compare(
    problem: Problem | Instance | str | Path,
    policies: Named | None = None,
    *,
    objective: str | Objective | None = None,
    bound: bool = True,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    keep_schedules: bool = True,
    measured: Measured | str | Path | None = None,
    store: str | Path | None = None,
) -> Comparison:
    """Run policies and set the objective of each beside the best known value and a bound.

    Parameters
    ----------
    problem : Problem
        The instance, its machines and its objective. Or an instance in rounds, its file or its
        name. Of several machines there are bounds and no searches, since these know one.
    policies : str, Runner or Policy, or an iterable or a mapping of them, optional
        Policy specifications, or objects. The keys of a mapping are what rows call them, else the
        specification or the object's ``name``. By default all run that the instance allows. A
        policy that is asked for and not allowed, that loops or raises, or whose schedule breaks a
        rule, gets a row without metrics that says why.
    objective : str or Objective, optional
        One metric, by default the problem's. Where more is better ratios are the best known value
        or the bound over the policy's value.
    bound : bool
        Whether to look for a bound and a better schedule after the policies. The bounds of
        `optsched.bounds` that apply are always tried. Small instances in rounds are also solved by
        the hindsight program, and instances in seconds get an offline search.
    time_limit_s : float
        Seconds for all of the work. A policy may take half of the time left, the last one all of
        it. The rest is for the bounds that search, the solver (in rounds) and the offline search
        (in seconds), which have at least half of the limit, beyond it if need be.
    seed : int
        Seed of random policies and of the searches.
    progress : callable, optional
        Called with a `Progress` before each policy, and whenever the bound or the schedule
        improves.
    stop : threading.Event, optional
        When it is set, no further policy starts and the solver ends. The answer holds everything
        that was found until then. Ctrl-C has the same effect.
    keep_schedules : bool
        Whether rows keep their schedules. Otherwise only the best schedule is kept. A schedule of
        a long trace takes some 70 MB.
    measured : Measured or path, optional
        Times in seconds that a real server took for these requests. They become a row of their
        own, whose ratios hold if the cost model and the KV capacity are those of the server. They
        never become the best known value, since no schedule proves them.
    store : str or Path, optional
        A folder where optima are kept (`ratios`): what it has of the problem is where the search
        begins, and not looked for again where it is an optimum.

    Returns
    -------
    Comparison

    Raises
    ------
    InputError, UsageError
        A specification cannot be read, the list of policies is empty, or the measured times do not
        fit the instance.
    SolverError
        A bound contradicts a schedule that it covers.

    Notes
    -----
    Ratios are given only for schedules inside the model of the best known value and the bound. In
    rounds, this is the model of uninterrupted runs and restarts. In seconds, it has every schedule
    on the problem's machines. Where the optimum is not proved, the ratio to the optimum lies
    between the two ratios given.
    """
    problem = as_problem(problem)
    task = Task.of(problem.about(parse_objective(objective or problem.objective)))
    check_whole(seed, "seed", 0)
    if measured is not None and not isinstance(measured, Measured):
        measured = read_measured(measured)
    if measured is not None:
        measured.check(task.instance)

    specs = _specs(task.instance, policies)
    for spec in ("fcfs", *specs.values()):  # so that no policy's wall time includes compiling
        runner_of(make_policy(spec)[0]).warm_up()

    strategies.load()
    interval = Interval(task)
    budget = Budget(time_limit_s, stop=stop)
    searched = bound and task.pools is None and task.workers == 1
    # Policies that run without a row, since their schedules may be the best known ones.
    rivals = _RIVALS[task.instance.time_unit] if searched else ()
    rows, interrupted = _run_all(interval, specs, rivals, seed, budget, progress, keep_schedules)
    if measured is not None:
        rows.append(_measured_row(measured, rows, interval))

    notes: tuple[str, ...] = ()
    further: dict[str, float] = {}
    if bound and not interrupted:
        left_s = max(budget.left_s, _MIN_SHARE * time_limit_s)
        interval.begin(Budget(left_s, stop=stop, progress=progress))
        # The best value that the shipped library knows, or None where it has no such problem.
        shipped = strategies.take_from_library(interval)
        if store is not None:
            Optima(Path(store)).offer(interval)

        notes = (*_narrow(interval, seed), *_unproved(interval), *_beats(interval, shipped))
        if not budget.stopped:
            further = _further_bounds(interval, Budget(_FURTHER_SHARE * time_limit_s, stop=stop))

    interval.reconcile()  # a bound that contradicts the best schedule is an error
    rows = [_with_ratios(row, interval) for row in rows]
    best = None if interval.incumbent is None else _best_row(interval)
    if best is not None and interval.goal == TOTAL_LATENCY:
        notes += (*_long_tail(best, rows), *_no_queues(best, rows))

    return Comparison.of(
        interval,
        seed=seed,
        rows=tuple(rows),
        cost_model=task.cost_model,
        interrupted=interrupted or (stop is not None and stop.is_set()),
        notes=notes,
        best=best,
        bounds=further,
        pools=task.pools,
    )


def _run_all(
    interval: Interval,
    specs: Mapping[str, str | Scheduler],
    rivals: Sequence[str],
    seed: int,
    budget: Budget,
    progress: Callable[[Progress], None] | None,
    keep_schedules: bool,
) -> tuple[list[PolicyRow], bool]:
    """Return the rows of policies by label, and whether the work was interrupted before the last.

    `rivals`: policies that run after them for their schedules only, and have no rows.
    `keep_schedules`: whether rows keep their schedules.
    """
    rows: list[PolicyRow] = []
    interrupted = False
    try:
        for place, (label, policy) in enumerate(specs.items()):
            # The first runs in any case, for an answer.
            if budget.stopped and rows:
                interrupted = True
                break

            if progress is not None:
                progress(Progress(budget.spent_s, interval.value, doing=f"policy {label}"))

            is_last = place + 1 == len(specs)
            part = budget.part(1.0 if is_last else strategies.POLICY_SHARE)
            row = _run(interval, label, policy, seed, part)
            rows.append(row if keep_schedules else replace(row, schedule=None))

        for spec in () if budget.stopped else rivals:
            _run(interval, spec, spec, seed, budget.part(strategies.POLICY_SHARE))
    except KeyboardInterrupt:
        interrupted = True
        if not rows:
            raise

    # Rows stand in the order of the policies, so those without one are the last.
    rows += [PolicyRow(label, error="interrupted") for label in list(specs)[len(rows) :]]
    return rows, interrupted


def _measured_row(measured: Measured, rows: Sequence[PolicyRow], interval: Interval) -> PolicyRow:
    """Return the row of a measured server, with a note of how well a twin among the rows fits."""
    metrics = derive(measured.times(interval.task.instance))
    note = "its ratios hold if the cost model and the KV capacity are those of the server"
    return PolicyRow(
        measured.name,
        metrics=metrics,
        value=metrics.get(interval.goal.name),
        inside=True,
        measured=True,
        notes=(note, *_miss_of_twin(rows, metrics)),
    )


def _narrow(interval: Interval, seed: int) -> tuple[str, ...]:
    """Improve both ends of the interval beyond the policies; return why there can be no optimum."""
    task, budget = interval.task, interval.budget
    if task.pools is not None or task.workers > 1:
        strategies.prove(interval, budget, seed=seed)
        return ("searches are left out, since they know one machine",)

    exact: Exact | None = None
    refused: OptschedError | None = None
    try:
        exact = choose(task)
    except (InfeasibleError, UsageError) as error:
        refused = error

    # The policies of this comparison have run already.
    options = SolveOptions(seed=seed, stop=budget.stop)
    refused = narrow(interval, exact, options=options, policies=False).refused or refused
    # In seconds searches and bounds do without an exact method, so that its lack is no news.
    if refused is None or not task.instance.in_rounds:
        return ()
    if isinstance(refused, InfeasibleError):  # a policy that splits prefills may have a schedule
        return (f"no optimum in the round model, which splits no prefill: {refused}",)

    return (f"no optimum: {refused}",)


def _beats(interval: Interval, shipped: float | None) -> tuple[str, ...]:
    """Return that the best known schedule is better than the shipped library's, if it is."""
    best = interval.incumbent
    if shipped is None or best is None:
        return ()
    # Where more is better the difference is never above 0, so that nothing is said.
    if shipped - best.value <= rounding(best.evaluation, shipped):
        return ()

    return (
        f"this beats the library's {number(shipped)}: --schedules-out DIR writes the schedule, and "
        "`library check DIR/best.json` checks it",
    )


def _unproved(interval: Interval) -> tuple[str, ...]:
    """Return why there is no bound, if none is proved."""
    try:
        usable(BoundTask.of(interval.task), required=True)
    except UsageError as error:
        return (str(error),)

    return ()


def _specs(instance: Instance, asked: Named | None) -> dict[str, str | Scheduler]:
    """Return the policies that run, by label."""
    specs = labelled(strategies.allowed_policies(instance) if asked is None else asked)
    if not specs:
        raise UsageError(
            "policies: found an empty list; expected at least one, or none given to run all that "
            "are allowed"
        )

    for spec in specs.values():
        make_policy(spec)  # a typo is an error before anything runs

    return specs


def _run(
    interval: Interval, label: str, spec: str | Scheduler, seed: int, budget: Budget
) -> PolicyRow:
    """Run a policy, and offer its schedule to the interval if it is of the bound's model.

    `label`: what its row calls it. `spec`: its specification, or an object. `budget`: of this run.
    """
    task = interval.task
    policy, info = make_policy(spec)
    notes = runner_of(policy).switched_off(task.instance)
    # `assumed`: an object of the user's does not say whether it uses true lengths.
    if info.assumed and (note := lengths_note(policy, info, task.instance)) is not None:
        notes += (note,)
    row = PolicyRow(label, is_clairvoyant(policy, info, task.instance), notes=notes)
    try:
        run = run_within(task, spec, budget, seed)
    # Only a `ViolationError` has a rule.
    except (*strategies.NO_SCHEDULE, ViolationError) as error:
        return replace(row, error=str(error), rule=getattr(error, "rule", None))

    outside = strategies.outside_reason(run.evaluation, task)
    if outside is None:
        interval.take(run.schedule, run.evaluation, label)

    notes += _note_of_lost_hits(run)
    if outside is not None:
        notes += (f"no ratio: {outside}",)

    return replace(
        row,
        metrics=run.metrics,
        value=run.value if outside is None else None,
        inside=outside is None,
        wall_s=run.wall_s,
        notes=notes,
        schedule=run.schedule,
    )


def _note_of_lost_hits(run: Run) -> tuple[str, ...]:
    """Say where prefixes were not found in the cache of a worker, if routing has lost any."""
    found, routed, evicted = lost_hits(run)
    if not routed:
        return ()

    served = found + routed + evicted
    here, elsewhere, gone = (percent(tokens / served) for tokens in (found, routed, evicted))
    return (
        f"of {number(served)} tokens of prefixes that had been served, {here} were found, "
        f"{elsewhere} on another worker (routing), {gone} gone from its own (eviction)",
    )


def _best_row(interval: Interval) -> PolicyRow:
    """Return the best known schedule as a row, with the metrics that every policy has."""
    best = interval.incumbent
    assert best is not None
    # True: it counts as clairvoyant, whoever found it.
    row = PolicyRow(BEST, True, best.evaluation.metrics, best.value, inside=True)
    row = replace(row, schedule=best.schedule, notes=(f"it is from {best.origin}",))
    return _with_ratios(row, interval)


def _long_tail(best: PolicyRow, rows: Sequence[PolicyRow]) -> tuple[str, ...]:
    """Return a note if the best known schedule for the mean has a far longer tail than a policy."""
    for name in ("p99_ttft", "p99_latency"):
        tail = (best.metrics or {}).get(name)
        others = [
            (value, row.policy)
            for row in rows
            if row.inside and (value := (row.metrics or {}).get(name)) is not None
        ]
        if tail is None or not others:
            continue

        shortest, policy = min(others)
        if tail > _MISLEADS * shortest:
            return (
                f"the mean misleads: {BEST} has a {TABLE[name].words} of {number(tail)}, {policy} "
                f"of {number(shortest)}; `solve --objective {name}` looks for the best of that, "
                "and `capacity` for the load within SLOs",
            )

    return ()


def _miss_of_twin(rows: Sequence[PolicyRow], measured: dict[str, Any]) -> tuple[str, ...]:
    """Return by how much the twins of a measured server, of `vllm-v1`, miss what it took."""
    misses = [
        ((row.metrics or {})["mean_latency"] / measured["mean_latency"] - 1, row.policy)
        for row in rows
        if row.policy.startswith("vllm-v1") and row.metrics
    ]
    if not misses:
        return ()

    miss, policy = min(misses, key=lambda pair: abs(pair[0]))
    words = f"its twin, {policy}, has a mean latency {100 * miss:+.0f} % off"
    if abs(miss) > _TWIN_OFF:
        words += ", so the ratios say nothing about this server; `diagnose` calibrates the model"

    return (words,)


def _no_queues(best: PolicyRow, rows: Sequence[PolicyRow]) -> tuple[str, ...]:
    """Return a note if requests hardly wait under most policies, so that these are equal.

    The best known schedule need not be: it may let requests wait so that batches stay small.
    """
    simulated: list[Any] = [row.metrics for row in rows if row.metrics and not row.measured]
    # `_CALM`: a share of the latency. Up to it requests hardly wait, and totals are alike.
    calm = [m for m in simulated if m["mean_waiting"] <= _CALM * m["mean_latency"]]
    # A single policy has none to be equal to, and at least half of all must be calm.
    if len(calm) < 2 or 2 * len(calm) < len(simulated):
        return ()

    tels = [metrics["tel"] for metrics in calm]
    best_tel = best.value or 0.0
    advice = "only a higher rate or less KV tells them apart"
    if best_tel < (1 - _CALM) * min(tels):
        gain = percent(1 - best_tel / min(tels))
        advice = f"{BEST} is {gain} below them, so another order may gain"

    return (
        f"nothing queues: under {len(calm)} of {len(simulated)} policies requests hardly wait, and "
        f"these are within {percent(max(tels) / min(tels) - 1)} of each other; {advice}",
    )


def _further_bounds(interval: Interval, budget: Budget) -> dict[str, float]:
    """Return bounds on other metrics of the comparison: quick ones, and on tails with a search."""
    task = interval.task
    bounds: dict[str, float] = {}
    for name in ("slo_attainment", *COMPARED):
        if name == "slo_attainment" and not task.instance.slos:
            continue

        # Bounds on tails take a search, and on pools those on every metric.
        other = Interval(task.about(name))
        searched = name.startswith("p99") or task.pools is not None
        # Without any time, only the bounds that need no search are computed.
        strategies.prove(other, budget.part(_TAIL_SHARE) if searched else Budget(0.0))
        # `general`: the best bound for every schedule on these workers, and its origin. A bound of
        # 0 says nothing.
        if other.general is not None and other.general[0] > 0:
            bounds[name] = other.general[0]

    if interval.general is not None:
        bounds[interval.goal.name] = interval.general[0]
        if interval.goal == TOTAL_LATENCY:
            bounds["mean_latency"] = interval.general[0] / task.instance.n

    return bounds


def _with_ratios(row: PolicyRow, interval: Interval) -> PolicyRow:
    """Return a row with its ratios to both ends of the interval, if it has a value."""
    value, goal = row.value, interval.goal
    best_known, bound = interval.value, interval.bound
    if value is None:
        return row
    if row.measured and bound is not None and goal.better(value, bound):
        note = "it beats the bound: the cost model or the KV capacity is not that of the server"
        row = replace(row, notes=(*row.notes, note))

    # To 0 there is no ratio.
    return replace(
        row,
        ratio_to_best_known=None if not best_known else goal.quotient(value, best_known),
        ratio_to_bound=None if not bound else goal.quotient(value, bound),
    )


def best_of_policies(
    problem: Problem | Instance, *, time_limit_s: float = 60.0, seed: int = 0
) -> PolicyRow | None:
    """Return the policy with the best objective inside the bound's model, or None."""
    interval = Interval(Task.of(as_problem(problem)))
    strategies.run_policies(interval, Budget(time_limit_s), seed=seed)
    best = interval.incumbent
    if best is None:
        return None

    return PolicyRow(
        best.origin,
        metrics=best.evaluation.metrics,
        value=best.value,
        inside=True,
        schedule=best.schedule,
    )
