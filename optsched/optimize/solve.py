"""Solve an instance: pick a formulation and a method, run it, have its answer judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optsched.costs.cost import CostModel, cost_for
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.consistency import float_noise, reconcile
from optsched.optimize.formulations import Answer, Formulation, Task, check_method, get
from optsched.optimize.solvers.base import (
    History,
    Progress,
    SolveOptions,
    Status,
    progress_columns,
    round_up_bound,
    settle_status,
)
from optsched.problem.errors import (
    InfeasibleError,
    OptschedError,
    SolverError,
    UsageError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.markup import facts, number
from optsched.problem.objective import Objective, parse_objectives, service_limits
from optsched.problem.schedule import Schedule, from_starts
from optsched.problem.version import __version__

_STARTERS = ("mc-sf", "least-work", "mc-benchmark", "rank-output", "fcfs", "vllm", "sarathi-nohy")
"""Policies whose schedules are tried as warm starts: quick, and none that may go on for ever."""
_POLICY_REQUESTS = 20_000


@dataclass(frozen=True, eq=False)
class Result:
    """What `solve` found, judged.

    Times and objectives are in the instance's unit; None is unknown.

    Parameters
    ----------
    instance : Instance
    formulation, method, objective_name : str
        The method that ran, also where ``auto`` chose it.
    status : Status
    objective : int, float or None
        Value of the schedule, as judged; the first where there are several objectives.
    bound : int, float or None
        No schedule of the formulation is better; rounded up where the objective is integral.
    schedule : Schedule or None
    evaluation : Evaluation or None
    build_s, solve_s : float
        Seconds to build the model, and to solve it.
    seed, threads : int
    native_status : str
        The solver's own word.
    maximized : bool
        Whether more is better, so that the bound lies above.
    certificate : object, optional
    versions : mapping of str to str
        Versions of the solvers used.
    objectives : tuple of int, float or None
        Values of the schedule by every objective, as judged, in the order of ``objective_name``;
        None without a schedule.
    progress : tuple of Progress
        Incumbent and bound whenever one changed, and at the end.
    """

    instance: Instance
    formulation: str
    method: str
    objective_name: str
    status: Status
    objective: float | int | None
    bound: float | int | None
    schedule: Schedule | None
    evaluation: Evaluation | None
    build_s: float
    solve_s: float
    seed: int
    threads: int
    native_status: str = ""
    maximized: bool = False
    certificate: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)
    objectives: tuple[float | int | None, ...] | None = None
    progress: tuple[Progress, ...] = ()

    @property
    def metrics(self) -> dict[str, float | int | None] | None:
        """Every metric of the schedule (`Evaluation.metrics`), or None without one."""
        return None if self.evaluation is None else self.evaluation.metrics

    @property
    def gap(self) -> float | None:
        """Relative distance of objective and bound (`gap_definition`), or None."""
        if self.objective is None or self.bound is None or self.objective == 0:
            return None
        ends = (self.bound, self.objective) if self.maximized else (self.objective, self.bound)
        return float((ends[0] - ends[1]) / self.objective)

    @property
    def gap_definition(self) -> str:
        """How `gap` is computed."""
        if self.maximized:
            return "(bound - objective) / objective"
        return "(objective - bound) / objective"

    def __repr__(self) -> str:
        return (
            f"<Result {self.instance.name!r} in {self.instance.time_unit}s: {self.status.value}, "
            f"{self.objective_name} {self.objective}, bound {self.bound}, "
            f"{self.formulation} by {self.method}>"
        )

    def _repr_html_(self) -> str:
        unit = "rounds" if self.instance.in_rounds else "s"
        gap = self.gap
        return facts(
            f"Result on {self.instance.name}",
            [
                ("status", self.status.value),
                (f"{self.objective_name} (times in {unit})", number(self.objective)),
                ("bound", number(self.bound)),
                ("gap", None if gap is None else f"{gap:.2%}"),
                ("by", f"{self.formulation}, {self.method}"),
                ("time", f"{self.build_s + self.solve_s:.2f} s"),
                ("certificate", None if self.certificate is None else "yes"),
            ],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a result file.

        ``schedule`` and ``certificate`` are None: who writes them to files names the files.
        """
        return {
            "format": "optsched-result",
            "version": 1,
            "optsched": __version__,
            "command": "solve",
            "instance": {
                "name": self.instance.name,
                "sha256": self.instance.sha256,
                "requests": self.instance.n,
            },
            "time_unit": self.instance.time_unit,
            "formulation": self.formulation,
            "method": self.method,
            "objective_name": self.objective_name,
            "status": self.status.value,
            "objective": self.objective,
            "objectives": None if self.objectives is None else list(self.objectives),
            "bound": self.bound,
            "gap": self.gap,
            "gap_definition": self.gap_definition,
            "certificate": None,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "build_s": self.build_s,
            "solve_s": self.solve_s,
            "progress": progress_columns(self.progress),
            "seed": self.seed,
            "threads": self.threads,
            "versions": dict(self.versions),
            "schedule": None,
        }


def solve(
    instance: Instance,
    *,
    formulation: str | None = None,
    method: str = "auto",
    cost_model: CostModel | str | Path | None = None,
    objective: str | Objective | Sequence[str | Objective] | None = None,
    time_limit_s: float | None = 60.0,
    mip_rel_gap: float = 0.0,
    threads: int | None = None,
    seed: int = 0,
    warm_start: Schedule | str | None = None,
    log: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    **extras: Any,
) -> Result:
    """Find an optimal schedule, or the best one within the limits and a bound.

    The answer's schedule is replayed by `optsched.evaluate`, whose value is the result's. It is
    never worse than the warm start. The bound is the best of the method's and
    `optsched.bounds`'.

    Parameters
    ----------
    instance : Instance
    formulation : str, optional
        Default: ``hindsight`` for an instance in rounds, ``infermax`` for one in seconds.
    method : str
        One of the formulation's, or ``"auto"``.
    cost_model : BatchCost or str, optional
        Needed for an instance in seconds.
    objective : str or sequence of str, optional
        Metrics, the most important first; a string may hold several, separated by commas.
    time_limit_s : float or None
        Seconds in all: schedules to start from and quick bounds come out of it, too.
    mip_rel_gap : float
        Relative gap at which the method may stop; 0 demands a proof.
    threads : int, optional
        Default: all.
    seed : int
    warm_start : Schedule or str, optional
        A schedule, or the specification of a policy. Default: the best of the policies'
        and, in rounds, of `optsched.optimize.formulations.rounds.horizon.serial_schedule`.
    log : path, optional
        File for the solver's log.
    progress : callable, optional
        Called with a `Progress` at once and then from a solver's thread: the best of what the
        solver, the warm start and `optsched.bounds` know.
    stop : threading.Event, optional
        Interrupts the solve when set, as Ctrl-C does; incumbent and bound are kept.
    **extras
        What only some formulations know.

    Returns
    -------
    Result

    Raises
    ------
    UsageError
        A combination that has no meaning, or that the method cannot do.
    InfeasibleError
        A request that the formulation can never serve, by name.
    SolverError
        The solver's answer breaks a constraint, or its objective or bound contradicts the judge.
    ViolationError, InputError
        A warm start that is not feasible, or an option out of range.
    """
    begin = time.perf_counter()
    model = _formulation(instance, formulation)
    cost = cost_for(instance, cost_model)
    known = sorted({name for way in model.methods.values() for name in way.objectives})
    goals = model.default_objective if objective is None else objective
    task = Task(instance, cost, parse_objectives(goals, known, f"formulation {model.name}"), extras)
    chosen = model.choose(task) if method == "auto" else method
    way = check_method(model, chosen, task)
    options = SolveOptions(
        time_limit_s=time_limit_s,
        mip_rel_gap=mip_rel_gap,
        threads=threads,
        seed=seed,
        log_path=log,
        progress=progress,
        stop=stop,
    )

    def over() -> bool:
        late = time.perf_counter() - begin >= options.time_limit
        return late or (stop is not None and stop.is_set())

    start = _warm_start(task, model, warm_start, seed, over)
    if start is not None:
        options = replace(options, warm_start=start[0])
    proved = _proved(task)
    history = History(progress)
    options = replace(options, progress=_informed(history, task, start, proved))
    since = time.perf_counter()
    try:
        answer = way.run(task, options.after(since - begin))
    except KeyboardInterrupt:
        if start is None:
            raise
        answer = Answer(Status.NO_INCUMBENT, native_status="interrupted")
    result = _judged(task, model, chosen, options, answer, start, proved)
    spent = time.perf_counter() - since
    return replace(result, progress=history.until(spent, result.objective, result.bound))


def _formulation(instance: Instance, name: str | None) -> Formulation:
    if name is None:
        name = "hindsight" if instance.in_rounds else "infermax"
    found = get(name)
    if found.time_unit != instance.time_unit:
        if found.time_unit == "round":
            raise UsageError(
                f"formulation: {name} is for instances in rounds, this one is in seconds; "
                "`optsched import --rounds SECONDS` makes one in rounds, or use infermax"
            )
        raise UsageError(
            f"formulation: {name} is for instances in seconds, this one is in rounds; use hindsight"
        )
    return found


_Start = tuple[Schedule, Evaluation]
_Bound = tuple[float | int | None, str | None]
"""A value and its origin."""


def _warm_start(
    task: Task,
    model: Formulation,
    given: Schedule | str | None,
    seed: int,
    over: Callable[[], bool],
) -> _Start | None:
    """Return a schedule to start from, in the formulation's terms, with its evaluation.

    Once ``over()``, one of the policies' is good enough.

    Raises
    ------
    UsageError
        A given schedule that is none of the formulation's.
    """
    if isinstance(given, Schedule):
        start = _fitting(task, model, given)
        if start is None:
            raise UsageError(
                f"warm start: the schedule is none of formulation {model.name} (it pauses a "
                "request or splits a prefill); give another one"
            )
        return start
    from optsched.optimize.formulations.rounds.horizon import serial_schedule
    from optsched.policies.engine.simulate import quick_to_simulate, simulate

    if given is not None:
        schedule = simulate(task.instance, given, task.cost_model, seed=seed)
        start = _fitting(task, model, schedule)
        if start is None:
            raise UsageError(
                f"warm start: policy {given!r} makes a schedule that is none of formulation "
                f"{model.name}; give another one"
            )
        return start
    if task.instance.n > _POLICY_REQUESTS or _restricted(task):
        return None
    goal = task.objective[0]
    makers: list[Callable[[], Schedule]] = []
    if quick_to_simulate(task.instance):
        makers += [
            lambda spec=spec: simulate(task.instance, spec, task.cost_model, seed=seed)  # type: ignore[misc]
            for spec in _STARTERS
        ]
    if task.instance.in_rounds:
        makers.append(lambda: serial_schedule(task.instance))
    best: _Start | None = None
    for make in makers:
        if best is not None and over():
            break
        try:
            start = _fitting(task, model, make())
        except OptschedError:
            continue  # a policy that loops, or that the instance rules out
        if start is not None and (best is None or goal.better(goal.of(start[1]), goal.of(best[1]))):
            best = start
    return best


def _proved(task: Task) -> _Bound:
    """Return the best of the bounds that need no search, None where there is none."""
    goal = task.objective[0]
    if goal.maximized:
        return None, None
    from optsched.bounds import lower_bound

    try:
        return lower_bound(task.instance, cost_model=task.cost_model, objective=goal)
    except InfeasibleError:
        return None, None  # the method says why


def _informed(
    progress: Callable[[Progress], None],
    task: Task,
    start: _Start | None,
    proved: _Bound,
) -> Callable[[Progress], None]:
    """Return a progress call that also knows the warm start and the bound proved before."""
    goal = task.objective[0]
    integral = goal.integral(task.instance)
    warm = None
    if start is not None and not _restricted(task) and len(task.objective) == 1:
        warm = goal.of(start[1])

    def tell(state: Progress) -> None:
        bound, _ = _best_bound((state.bound, None), proved, integral)
        known = [v for v in (state.incumbent, warm) if v is not None]
        progress(Progress(state.elapsed_s, min(known, key=goal.signed, default=None), bound))

    tell(Progress(0.0, None, None))
    return tell


def _restricted(task: Task) -> bool:
    """Whether extras may rule out schedules that the judge accepts."""
    return any(value not in (None, False) for value in task.extras.values())


def _judge(task: Task, schedule: Schedule) -> Evaluation:
    """Judge a schedule with the limits of service that the objectives are about."""
    return evaluate(task.instance, schedule, task.cost_model, **service_limits(task.objective))


def _fitting(task: Task, model: Formulation, schedule: Schedule) -> _Start | None:
    """Return the schedule as one of the formulation's, or None if it is none.

    In rounds: uninterrupted runs with the same completions. Restarted runs are dropped, which
    only frees KV; where requests paused or prefills were split, that may break a limit. In
    seconds: any schedule that splits no prefill, unless the instance says that it may.
    """
    instance = task.instance
    evaluation = _judge(task, schedule)
    if model.time_unit != "round":
        # An absent chunked_prefill means off to models, while schedulers are free.
        split = evaluation.split_prefill and instance.chunked_prefill is not True
        return None if split else (schedule, evaluation)
    if schedule.kind == "starts":
        return schedule, evaluation
    starts = from_starts(evaluation.finish - instance.output_tokens, instance)
    try:
        return starts, _judge(task, starts)
    except ViolationError:
        return None


def _judged(
    task: Task,
    model: Formulation,
    method: str,
    options: SolveOptions,
    answer: Answer,
    start: _Start | None,
    proved: _Bound,
) -> Result:
    instance, goal = task.instance, task.objective[0]
    integral = goal.integral(instance)
    schedule, evaluation, status = answer.schedule, None, answer.status
    objective: float | int | None = None
    found_by = None
    if schedule is not None:
        evaluation = _replayed(task, method, schedule)
        objective = goal.of(evaluation)
        _agree(instance, method, goal.name, answer.objective, objective, integral)
    if start is not None and not _restricted(task) and len(task.objective) == 1:
        if status is Status.INFEASIBLE:
            raise SolverError(
                f"{method}: says infeasible ({answer.native_status}), but the warm start is "
                "feasible; the model or the solver is wrong"
            )
        if evaluation is None or goal.better(goal.of(start[1]), goal.of(evaluation)):
            schedule, evaluation = start
            objective, found_by = goal.of(evaluation), "the warm start"
            status = Status.ERROR if status is Status.ERROR else Status.FEASIBLE
    known = objective, method if found_by is None else found_by
    best = _best_bound((answer.bound, method), proved, integral)
    bound = reconcile(instance, goal, known, best)
    if status is not Status.ERROR:
        status = settle_status(
            status,
            None if objective is None else goal.signed(objective),
            None if bound is None else goal.signed(bound),
            integral_objective=integral,
        )
    if len(task.objective) > 1 and answer.status is not Status.OPTIMAL:
        # Objective and bound are those of the first objective only.
        status = Status.FEASIBLE if status is Status.OPTIMAL else status
    return Result(
        instance=instance,
        formulation=model.name,
        method=method,
        objective_name=",".join(map(str, task.objective)),
        status=status,
        objective=objective,
        bound=bound,
        schedule=schedule,
        evaluation=evaluation,
        build_s=answer.build_s,
        solve_s=answer.solve_s,
        seed=options.seed,
        threads=options.thread_count,
        native_status=answer.native_status,
        maximized=goal.maximized,
        certificate=answer.certificate,
        versions=answer.versions,
        objectives=(
            None if evaluation is None else tuple(o.of(evaluation) for o in task.objective)
        ),
    )


def _replayed(task: Task, method: str, schedule: Schedule) -> Evaluation:
    try:
        return _judge(task, schedule)
    except OptschedError as error:
        raise SolverError(f"{method}: its schedule does not verify: {error}") from error


def _agree(
    instance: Instance,
    method: str,
    name: str,
    claimed: float | None,
    judged: float | int | None,
    integral: bool,
) -> None:
    if claimed is None or judged is None:
        raise SolverError(f"{method}: {name} of its schedule is {judged}, it says {claimed}")
    slack = 0.01 if integral else float_noise(instance, name, judged)
    if not abs(claimed - judged) <= slack:
        raise SolverError(
            f"{method}: {name} of its schedule is {judged}, but it says {claimed}; "
            "the model or the solver is wrong"
        )


def _best_bound(claimed: _Bound, proved: _Bound, integral: bool) -> _Bound:
    value, origin = claimed
    if value is not None and integral:
        value = round_up_bound(value)
    if proved[0] is not None and (value is None or proved[0] > value):
        return proved
    return value, origin
