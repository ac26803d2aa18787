"""Solve an instance: choose a formulation and a method, run it, and have its answer judged.

`below` asks whether a schedule takes less than a given share of what a policy takes.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from optsched.bounds import usable
from optsched.bounds.base import BoundTask
from optsched.files.results import NOT_HERE, head
from optsched.optimize.bounded import Bounded
from optsched.optimize.certified import certificate_of
from optsched.optimize.exact import (
    Exact,
    Start,
    accept,
    attempt,
    choose,
    choose_if_able,
    in_terms_of,
    is_restricted,
    offer_warm_start,
    question,
    starting_point,
)
from optsched.optimize.formulations import Answer, Formulation, formulations
from optsched.optimize.interval import Interval
from optsched.optimize.narrow import narrow
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.optimize.strategies import (
    load,
    prove,
    search_offline,
    take_from_library,
    warn_if_short,
)
from optsched.policies.run import run_within
from optsched.problem.budget import NO_LIMIT, Budget, Progress, progress_columns
from optsched.problem.errors import InfeasibleError, UsageError, check_keywords
from optsched.problem.instance import Instance
from optsched.problem.markup import number
from optsched.problem.notes import warn
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule
from optsched.workloads.problem import Problem, as_problem

# Of more requests than this a bound and a search are asked first whether a schedule is better than
# a value: the shares of the time left for the bound (the first), and for searches until one is.
_SMALL, _SHARES = 20, (0.05, 0.1, 0.4)
# The seconds of a search if there is no time limit.
_SEARCH_S = 60.0
# The fields of a result file in their order.
_COLUMNS = (
    "formulation method workers objective_name status objective objectives bound scope gap "
    "gap_definition certificate certificate_missing metrics build_s solve_s progress seed threads "
    "versions"
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Result(Bounded):
    """What `solve` found, as judged.

    Parameters
    ----------
    formulation : str
        What ran. If ``auto`` was asked for, ``method`` is the one that it chose.
    build_s, solve_s : float
        Wall-clock seconds to build the model, and to solve it.
    threads : int
        The number of threads that the solver was given.
    native_status : str
        The status in the solver's own words.
    versions : mapping of str to str
        Versions of the solvers used, by name.
    objectives : tuple of int, float or None
        Every objective of the schedule, as judged, in the order of ``objective_name``. None without
        a schedule.
    """

    formulation: str
    build_s: float
    solve_s: float
    threads: int
    native_status: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    objectives: tuple[float | int | None, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a result file.

        ``schedule`` and ``certificate`` are None. Whoever writes them to files puts the files'
        names there.
        """
        columns = {name: getattr(self, name, None) for name in _COLUMNS.split()}
        return {
            **head("optsched-result", "solve", self.instance),
            **columns,
            "status": self.status.value,
            "workers": self.scope.workers,
            "objective": self.value,
            "objectives": None if self.objectives is None else list(self.objectives),
            "scope": self.scope.to_dict(),
            "certificate": None,
            "certificate_missing": self.certificate_missing or NOT_HERE,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "progress": progress_columns(self.progress),
            "schedule": None,
        }


def solve(
    problem: Problem | Instance | str | Path,
    *,
    formulation: str | None = None,
    method: str = "auto",
    time_limit_s: float | None = 60.0,
    mip_rel_gap: float = 0.0,
    threads: int | None = None,
    seed: int = 0,
    warm_start: Schedule | str | None = None,
    log: str | Path | None = None,
    certify: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    **extras: Any,
) -> Result:
    """Find an optimal schedule, or the best schedule and bound within the limits.

    `optsched.evaluate` replays the schedule, and the result reports that value. The schedule is
    never worse than the warm start. The bound is the best of the method's own bound and the bounds
    of `optsched.bounds`.

    Parameters
    ----------
    problem : Problem
        The instance, its machines, and the objectives. Of several equal machines, which request
        runs where is part of the schedule. Or an instance in rounds, its file or its name.
    formulation : str, optional
        Default: ``hindsight`` for an instance in rounds, ``infermax`` for one in seconds.
    method : str
        A method of the formulation, or ``"auto"``: then the formulation chooses.
    time_limit_s : float or None
        Wall-clock seconds for all of the work, including schedules to start from and quick bounds.
        None is no limit.
    mip_rel_gap : float
        Relative gap at which the method may stop, >= 0. With 0 it stops only at a proof.
    threads : int, optional
        Number of threads, 1 to 4096. Default: as many as the machine has.
    seed : int
        The seed of the solver and of policies that draw at random, >= 0.
    warm_start : Schedule or str, optional
        A schedule, or the specification of a policy. Default: the best schedule of some policies
        and, in rounds, of `optsched.optimize.formulations.rounds.horizon.serial_schedule`.
    log : path, optional
        File for the solver's log.
    certify : bool
        Whether to make a certificate in seconds, which takes as long as to check it, after the time
        limit. In rounds every certificate is kept.
    progress : callable, optional
        Called with a `Progress` at once, and then from a solver's thread. It holds the best
        incumbent and bound of the solver, the warm start and `optsched.bounds`.
    stop : threading.Event, optional
        Interrupts the solve when it is set, as Ctrl-C does. Incumbent and bound are kept.
    **extras
        Options that only some formulations have, for example ``eviction_free``. With ``below`` and
        more than 20 requests in seconds, bounds and a search are asked first.

    Returns
    -------
    Result

    Raises
    ------
    UsageError
        The formulation does not fit the instance, or the method cannot do the task.
    InfeasibleError
        The formulation can never serve a request. The message names the request.
    SolverError
        The solver's schedule is not feasible, or its objective or bound contradicts the judge.
    ViolationError, InputError
        The warm start is not feasible, or an option is out of range.
    """
    known_extras = set[str]()
    for form in formulations().values():
        known_extras.update(*(way.extras for way in form.methods.values()))

    check_keywords(solve, extras, sorted(known_extras))
    problem = as_problem(problem)
    options = SolveOptions(time_limit_s, mip_rel_gap, threads, seed, log, stop=stop)
    model, task = question(problem, formulation, extras)
    # A plain question is about all schedules and one value, so that any schedule and any bound of
    # the interval answers it. `narrow` does so on one worker.
    is_plain = not is_restricted(task) and len(task.objective) == 1
    on_one_worker = task.workers == 1 and task.pools is None
    may_search = is_plain and on_one_worker and method in ("auto", "search") and mip_rel_gap == 0

    # Which exact method. It may be None where the search alone can do the task.
    exact = None
    if not may_search or (method == "search" and task.instance.in_rounds):
        exact = choose(problem, formulation, method, extras=extras)
    elif method == "auto":
        exact = choose_if_able(task)
        # Where no bound is proved either, `choose` says what nobody here models.
        if exact is None and not usable(BoundTask.of(task.about(TOTAL_LATENCY))):
            choose(problem, extras=extras)

    load(None if exact is None else exact.way)
    budget = Budget(time_limit_s, stop=stop)
    interval = Interval(task, budget)
    interval.certifies = certify

    # The search alone, where no exact method applies or it is the one that was asked for.
    if exact is None or (exact.name == "search" and may_search):
        limit_s = _SEARCH_S if time_limit_s is None else time_limit_s
        interval.begin(Budget(limit_s, stop=stop, progress=progress))
        if warm_start is not None:
            offer_warm_start(interval, warm_start, seed)

        return _solve_by_search(model, None, interval, None, options)

    # Its time counts, but its progress does not. If the question is not plain, the method alone
    # gets the start.
    start = starting_point(exact, warm_start, seed, budget)
    if start is not None and is_plain:
        interval.take(start.schedule, start.evaluation, "the warm start")

    # The search that `bound` and `compare` share, with the exact method in it.
    if may_search and time_limit_s is not None:
        interval.begin(budget.part(1.0, progress))
        return _solve_by_search(model, exact, interval, start, options)

    # The exact method runs at once, after the bounds that take no search.
    try:
        prove(interval, Budget(0.0, stop=stop))
    except InfeasibleError:
        pass  # the method says why
    except KeyboardInterrupt:
        if start is None or stop is None:
            raise

        stop.set()  # the method ends at once, and the start is kept

    # The start and the quick bounds are reported before the method has anything to say.
    interval.begin(budget.part(1.0, progress))
    interval.merge_progress(Progress(0.0, None, None))
    if not budget.stopped:
        warn_if_short(exact.name, budget.left_s, time_limit_s)

    early = _answer_by_interval(exact, Interval(exact.task, budget.part(1.0, progress)), options)
    if early is not None:
        return early

    answer = attempt(exact, interval, options.after(budget.spent_s), start)
    # At a tie the answer is the method's own schedule, and not the one that it began with.
    status = accept(exact, interval, answer, at_ties=True)
    return result_of((model, exact.name), interval, answer, status, options)


def _solve_by_search(
    model: Formulation,
    exact: Exact | None,
    interval: Interval,
    start: Start | None,
    options: SolveOptions,
) -> Result:
    """Narrow the interval, and return the result.

    It is that of the formulation's own interval, where an exact method ran, unless the interval of
    all schedules has a better value and the question is not settled.
    """
    interval.merge_progress(Progress(0.0, None, None))
    take_from_library(interval)
    attempted, refused = narrow(interval, exact, start, options=options, settle=True)
    if refused is not None:
        raise refused

    names = model, "search" if exact is None else exact.name
    # No exact method ran.
    if attempted is None:
        interval.reconcile()
        answer = Answer(interval.status, solve_s=interval.budget.spent_s - interval.clock_s)
        return result_of(names, interval, answer, interval.status, options)

    # The interval of the schedules that the formulation allows may be another one.
    of_formulation, answer, status = attempted
    # Settled: the formulation's answer stands, with a warning where a schedule that it leaves out
    # is better. Else the better one of both intervals is the answer.
    if attempted.is_settled:
        best, value = interval.incumbent, of_formulation.value
        if of_formulation is not interval and best and interval.goal.better(best.value, value):
            kinds = of_formulation.scope.limitation.removeprefix("without ")
            better = f"{interval.goal} {number(best.value)} ({best.origin})"
            warn(f"a schedule with {kinds} is better: {better}", stacklevel=3)
    else:
        if interval.general is not None:
            of_formulation.prove(*interval.general)
        if interval.goal.better(interval.value, of_formulation.value):
            of_formulation = interval

        of_formulation.reconcile()
        status = of_formulation.status

    return result_of(names, of_formulation, answer, status, options)


def _answer_by_interval(exact: Exact, interval: Interval, options: SolveOptions) -> Result | None:
    """Answer by a bound or a search whether a schedule is better than the value of ``below``.

    None if they do not say, if nothing was asked, or if the instance is small, so that the exact
    method is as quick.
    """
    asked = {k: v for k, v in exact.task.extras.items() if v not in (None, False)}
    if "below" not in asked or exact.task.instance.n <= _SMALL:
        return None

    def result(status: Status, method: str) -> Result:
        names = exact.model, exact.name
        # No solver ran, so that there are no versions.
        of_interval = result_of(names, interval, Answer(status), status, options)
        return replace(of_interval, method=method, versions={})

    below, budget, goal = asked["below"], interval.budget, interval.goal
    prove(interval, budget.part(_SHARES[0]), seed=options.seed)
    # No schedule is better than the bound.
    if interval.bound is not None and not goal.better(interval.bound, below):
        return result(Status.INFEASIBLE, "bounds")

    # The search may evict, so it has no answer if anything else is asked.
    for share in _SHARES if len(asked) == 1 else ():
        search_offline(interval, budget.part(share), seed=options.seed)
        best = interval.incumbent
        if best is None or not goal.better(best.value, below):
            continue
        if in_terms_of(exact, best.schedule, best.evaluation) is None:
            break  # it splits prefills, which the formulation does not

        return result(Status.FEASIBLE, "search")

    return None


def result_of(
    names: tuple[Formulation, str],
    interval: Interval,
    answer: Answer,
    status: Status,
    options: SolveOptions,
) -> Result:
    """Return an interval and the answer of a method, by its formulation and name, as a result.

    What the method did not spend on solving, since it began, it spent on building its model. The
    name ``search`` may stand for no method of the formulation, and then has no solver.
    """
    (model, method), task, best = names, interval.task, interval.incumbent
    solvers = model.methods[method].solvers if method in model.methods else ()
    evaluation = None if best is None else best.evaluation
    certificate, missing = answer.certificate, None
    if certificate is None:
        certificate, missing = certificate_of(interval, interval.certifies)

    return Result.of(
        interval,
        formulation=model.name,
        method=method,
        status=status,
        build_s=max(0.0, interval.budget.spent_s - interval.clock_s - answer.solve_s),
        solve_s=answer.solve_s,
        seed=options.seed,
        threads=options.thread_count,
        native_status=answer.native_status,
        certificate=certificate,
        certificate_missing=missing,
        versions={package: version(package) for package in solvers},
        objectives=None if evaluation is None else tuple(o.of(evaluation) for o in task.objective),
    )


@dataclass(frozen=True)
class Question:
    """The question whether a schedule with an objective below a value exists.

    Parameters
    ----------
    phi : float
        The share of the policy's objective, > 0.
    than : str
    policy_objective : int or float
        The objective of the policy's schedule, in the objective's unit.
    value : float
        ``phi * policy_objective``.
    """

    phi: float
    than: str
    policy_objective: float | int
    value: float

    def answer(self, result: Result) -> Literal["yes", "no", "unknown"]:
        """Return "yes" if a result has a schedule below the value, "no" if its bound excludes one.

        Else the answer is "unknown".

        Parameters
        ----------
        result : Result
            What `optsched.solve` returned for the same instance and objective.
        """
        if result.status == "infeasible":
            return "no"  # the solve only allowed schedules below the value
        if result.value is not None and result.value < self.value:
            return "yes"
        if result.bound is not None and result.bound >= self.value:
            return "no"

        return "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return the first fields of a result file's block ``below``."""
        return dict(vars(self))


def below(
    problem: Problem, phi: float, policy: str, *, seed: int = 0, budget: Budget = NO_LIMIT
) -> Question:
    """Return the question whether a schedule takes less than ``phi`` times what a policy takes.

    Parameters
    ----------
    problem : Problem
        Its first objective counts.
    phi : float
        The share, > 0.
    policy : str
        A policy's specification, such as ``"mc-sf"``.
    seed : int
        The seed of policies that draw at random.
    budget : Budget
        Time for the policy.

    Returns
    -------
    Question
        Pass the result of `optsched.solve` to `Question.answer`. In seconds some methods take the
        option ``below=question.value`` and then search only for schedules below it.
    """
    goal = problem.goal
    if goal.maximized:
        raise UsageError(
            f"--below: found the objective {goal.name!r}, which is maximized; expected a minimized "
            "one (for 'tps', makespan asks the same)"
        )

    value = run_within(problem, policy, budget, seed).value
    if value is None:
        raise UsageError(
            f"--below: found no {goal.name!r} of policy {policy!r} on this instance; expected "
            "another objective"
        )

    return Question(phi, policy, value, phi * value)
