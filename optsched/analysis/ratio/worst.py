"""Find instances on which a policy is far from the optimum, by local search."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from optsched.analysis.optima import Optima
from optsched.analysis.ratio.exact import optimum
from optsched.analysis.ratio.families import FAMILIES, Family
from optsched.analysis.ratio.interrupts import interrupts_noted
from optsched.costs.fleet import Hardware, fleet_of
from optsched.judge.evaluate import evaluate
from optsched.optimize.consistency import reconcile
from optsched.optimize.formulations.rounds.horizon import round_data, serial_starts
from optsched.optimize.ramp.jobs import Jobs
from optsched.optimize.search.orders import Annealing
from optsched.optimize.strategies import outside_reason
from optsched.policies import Scheduler, behind_routers, label_of
from optsched.policies.run import run
from optsched.problem.budget import work_time
from optsched.problem.columns import check_choice
from optsched.problem.errors import InputError, LoopError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY, Objective, parse_objective
from optsched.problem.progress import LiveLine
from optsched.problem.schedule import Schedule, from_starts
from optsched.workloads.problem import Problem

Runs = list[list[int]]
"""The seeds of a policy's runs."""

# Number of instances drawn at each restart. The search starts from the best of them.
_DRAWS = 10
# So many changes in succession without a gain end a climb, and so many best instances are kept.
_PATIENCE, _KEPT = 150, 8
# The share of the time for the search, and of what is left of it for the first proof.
_SEARCH_SHARE, _FIRST_PROOF = 2 / 3, 0.7
# Orders per request in which annealing looks for a schedule that is nearly optimal.
_ORDERS = 50
# Policies whose schedules stand for the optimum in seconds.
_QUICK = ("least-work", "mc-sf", "spf-work", "fcfs")
# Changed arrivals in seconds are multiples of one over this.
_TICKS = 100


@dataclass(frozen=True, eq=False)
class WorstCase:
    """The worst instance found for a policy.

    Parameters
    ----------
    policy : str
        The policy's specification, or the name of its class.
    instance : Instance
        Its ``known`` has the optimum of the objective, or a bound and the best known value.
    value : float
        The policy's objective, as the mean over seeds if it is random.
    low, high : float
        The competitive ratio on the instance lies in [low, high]. The two are equal if the optimum
        is proved.
    schedule : Schedule
        The best schedule found. It is optimal if the optimum is proved.
    evaluations : int
        Number of instances tried.
    wall_s : float
        Seconds that the search took.
    objective : Objective
    """

    policy: str
    instance: Instance
    value: float
    low: float
    high: float
    schedule: Schedule
    evaluations: int
    wall_s: float
    objective: Objective = TOTAL_LATENCY

    def __repr__(self) -> str:
        ratio = f"{self.low:.4f}" if self.proved else f"{self.low:.4f} to {self.high:.4f}"
        return f"<WorstCase of {self.policy}: {ratio} times the best {self.objective}>"

    @property
    def proved(self) -> bool:
        """Whether the optimum is proved, so that the ratio is exact."""
        return self.low == self.high


def worst_case(
    policy: str | Scheduler,
    family: str | Family = "online",
    budget_s: float = 60.0,
    *,
    kv_capacity: int = 100,
    n: int = 10,
    objective: str | Objective = TOTAL_LATENCY,
    fleet: Hardware = None,
    change: Callable[[Instance, Generator], Instance] | None = None,
    store: str | Path | None = None,
    seeds: int = 1,
    seed: int = 0,
    enough: float = np.inf,
    progress: bool | Callable[[int, int], None] = True,
    stop: threading.Event | None = None,
) -> WorstCase:
    """Search for an instance on which a policy is far from the optimum.

    This is a local search with restarts. Each restart takes the best of a few instances of the
    family, and then changes one or two requests at a time. It maximizes the quotient of the
    policy's objective and that of a schedule, found by placing the requests in many orders (in
    seconds by quick policies). That schedule is feasible, so that the quotient never exceeds the
    true ratio. Then the best instances are solved to optimality, beginning with the best. The
    answer is the instance with the largest proved ratio.

    Parameters
    ----------
    policy : str, Rules, Windows or Policy
        An object may have an attribute ``name``, which is then what the answer calls it.
    family : str or callable
        One of `FAMILIES`, which draw instances in rounds, or a function like them: it takes the
        policy, `kv_capacity`, `n` and a generator, and draws a first instance.
    budget_s : float
        Seconds for search and proofs together. A third is kept for proofs.
    kv_capacity : int
        M, at least 4 tokens.
    n : int
        Number of requests.
    objective : str or Objective
    fleet : Fleet, Machine, BatchCost or str, optional
        The machines, as of `Problem`. A family in seconds needs a cost model.
    change : callable, optional
        ``change(instance, generator)`` returns an instance that is a step away. By default one or
        two requests change, and arrivals that are all 0 stay so. In seconds arrivals are then
        multiples of 10 ms.
    store : str or Path, optional
        A folder where optima are kept, as of `ratios`.
    seeds : int
        Number of runs of a random policy, in the search, and with other coins for the answer.
    seed : int
    enough : float
        Once a quotient is this large, the search ends and the proofs begin.
    progress : bool or callable
        Whether to show a line on standard error, if that is a terminal. Or a function that is
        called about once a second with the seconds that are over, and all.
    stop : threading.Event, optional
        When it is set, the search ends. The worst instance so far is solved within a second, and
        returned. Ctrl-C has the same effect once there is such an instance.

    Returns
    -------
    WorstCase
    """
    if isinstance(family, str):
        check_choice(family, "family", FAMILIES)
    if n < 1 or kv_capacity < 4 or seeds < 1 or not budget_s > 0:
        raise InputError(
            f"n, kv_capacity, seeds, budget_s: found {n}, {kv_capacity}, {seeds}, {budget_s}; "
            "expected >= 1, >= 4, >= 1 and > 0"
        )

    draw = FAMILIES[family] if isinstance(family, str) else family
    goal, machines = parse_objective(objective), fleet_of(fleet)
    started = work_time()
    deadline = started + budget_s
    rng = np.random.default_rng(seed)

    def problem_of(instance: Instance) -> Problem:
        return Problem(instance, machines, goal)

    def report(ratio: float, tried: int) -> None:
        spent = work_time() - started
        line.show(f"{spent:.0f} of {budget_s:g} s, ratio {ratio:.3f}, {tried} instances")
        if callable(progress):
            progress(int(spent), ceil(budget_s))

    search = _Search(
        policy=policy,
        runs=[[seed, 0, run] for run in range(seeds)],
        draw=lambda: problem_of(draw(policy, kv_capacity, n, rng)),
        change=lambda problem: problem_of((change or _changed)(problem.instance, rng)),
        enough=enough,
        until=started + budget_s * _SEARCH_SHARE,
        stop=stop,
        report=report,
    )
    with interrupts_noted() as interrupted, LiveLine(wanted=progress is True) as line:
        try:
            # Each climb adds a quotient and its instance to `best`, where the largest is first.
            search.climb()
            while search.goes_on(search.best[0][0]):
                search.climb()
        except KeyboardInterrupt:
            if not search.best:
                raise

            interrupted.clear()  # from here on it tells of another Ctrl-C
            deadline = started  # which leaves a second for one proof

        if stop is not None and stop.is_set():
            deadline = started

        # What is worst with the coins of the search (0 above) has a smaller mean with others (1).
        other_runs = [[seed, 1, run] for run in range(seeds)]
        kept = None if store is None else Optima(Path(store))
        worst = _solve_best(search, other_runs, deadline, interrupted, kept)

    return replace(worst, evaluations=search.tried, wall_s=work_time() - started)


@dataclass
class _Search:
    """A local search for instances with large quotients, and the best ones that it has found.

    `runs`: the seeds of the policy's runs on each instance. `draw`: returns a first instance.
    `change`: returns one that is a step away. `until`: when the search ends, in seconds of work.
    `enough`: the quotient at which it ends, too. `report`: shows the best quotient and how many
    were tried.
    `best`: quotients with their instances, one of each climb, the largest first.
    """

    policy: str | Scheduler
    runs: Runs
    draw: Callable[[], Problem]
    change: Callable[[Problem], Problem]
    enough: float
    until: float
    stop: threading.Event | None
    report: Callable[[float, int], None]
    best: list[tuple[float, Problem]] = field(default_factory=list)
    tried: int = 0
    reported: float = field(default_factory=work_time)

    def goes_on(self, quotient: float) -> bool:
        """Whether there is time and reason to look for more than this quotient."""
        stopped = self.stop is not None and self.stop.is_set()
        return quotient < self.enough and work_time() < self.until and not stopped

    def climb(self) -> None:
        """Draw instances, and change the best of them as long as that brings something."""
        # Only quotients are compared, since problems have no order.
        draws = [self.draw() for _ in range(_DRAWS)]
        value, problem = max(
            ((self.quotient(drawn), drawn) for drawn in draws), key=lambda pair: pair[0]
        )
        in_vain = 0

        try:
            while in_vain < _PATIENCE and self.goes_on(value):
                changed = self.change(problem)
                quotient = self.quotient(changed)
                in_vain = 0 if quotient > value else in_vain + 1
                # An equal one is a step, too, since a plateau may lead on.
                if quotient >= value:
                    problem, value = changed, quotient
        finally:  # also when the search is interrupted
            self.best.append((value, problem))
            self.best.sort(key=lambda pair: -pair[0])
            del self.best[_KEPT:]

    def quotient(self, problem: Problem) -> float:
        """Return the policy's value over that of a good schedule: the true ratio is no smaller."""
        self.tried += 1
        if work_time() - self.reported > 1:
            self.reported = work_time()
            self.report(self.best[0][0] if self.best else 1.0, self.tried)

        try:
            value = _mean_value(problem, self.policy, self.runs)
            reference, _ = quick_value(problem)
        except LoopError:
            return 0.0  # there is no value to compare; this search is not for loops

        return problem.goal.quotient(value, reference)


def _solve_best(
    search: _Search,
    runs: Runs,
    deadline: float,
    interrupted: threading.Event,
    store: Optima | None,
) -> WorstCase:
    """Solve the best instances, at least one; return that with the largest certain ratio.

    `runs`: the seeds for the policy's values. `deadline`: in seconds of `work_time`. `interrupted`:
    set by a Ctrl-C, with which a solver ends as well.
    """
    worst: WorstCase | None = None
    for k, (quotient, problem) in enumerate(search.best):
        left_s = deadline - work_time()
        # The work ends, or the ratios hardly exceed the one proved, since from here on quotients
        # are smaller still.
        if worst is not None and (left_s <= 0 or quotient <= worst.low or interrupted.is_set()):
            break
        try:
            # The first proof leaves some time for others, and each has at least a second.
            limit_s = max(1.0, left_s if k else left_s * _FIRST_PROOF)
            solved = _solve(problem, search.policy, runs, limit_s, store)
            if worst is None or solved.low > worst.low:
                worst = solved

            search.report(worst.low, search.tried)
        except KeyboardInterrupt:
            if worst is None:
                raise

            break

    assert worst is not None
    return worst


def _solve(
    problem: Problem, policy: str | Scheduler, runs: Runs, time_limit_s: float, store: Optima | None
) -> WorstCase:
    """Solve an instance, and return it with its ratio.

    `runs`: the seeds for the policy's mean value. `store`: a folder of optima, or None.
    """
    name, goal = label_of(policy), problem.goal
    value = _mean_value(problem, policy, runs)
    _, schedule = quick_value(problem)
    result = optimum(problem, store, time_limit_s=time_limit_s, warm_start=schedule)
    assert result.value is not None
    assert result.schedule is not None
    # A value that beats the bound raises an error, since one of the two is wrong.
    reconcile(problem.instance, goal, (value, name), (result.bound, result.method))

    low = goal.quotient(value, result.value)
    known: dict[str, Any] = {"best_known": result.value, "bound": result.bound}
    if result.value == result.bound:
        known = {"optimum": result.value}
    known["reference"] = f"worst_case: {name} reaches {value:g}, {low:.3f} times the best known"
    return WorstCase(
        policy=name,
        instance=replace(problem.instance, known=known),
        value=value,
        low=low,
        high=goal.quotient(value, result.bound) if result.bound else float("inf"),
        schedule=result.schedule,
        evaluations=0,  # `worst_case` puts these two in, which are of the whole search
        wall_s=0.0,
        objective=goal,
    )


def _mean_value(problem: Problem, policy: str | Scheduler, runs: Runs) -> float:
    """Return the policy's mean value of schedules that the optimum covers, or raise LoopError."""
    values = []
    for seed in runs:
        done = run(problem, policy, seed=seed)
        # For `_Search.quotient` such a schedule is as useless as a loop.
        if done.value is None or outside_reason(done.evaluation, problem) is not None:
            raise LoopError("no value to compare")

        values.append(float(done.value))

    return sum(values) / len(runs)


def _changed(instance: Instance, rng: Generator) -> Instance:
    """Return the instance with one or two requests changed; it keeps intervals of predictions."""
    columns = (instance.release_times, instance.prompt_tokens, instance.output_tokens)
    arrival, prompt, output = (column.copy() for column in columns)
    # Prompt and output of a request that fits sum to at most this: s + o - 1 + kv_offset <= M.
    capacity = instance.kv_capacity - instance.kv_offset + 1
    if not instance.in_rounds:  # in ticks
        arrival = np.rint(arrival * _TICKS).astype(np.int64)

    offline = not arrival.any()
    for _ in range(1 + (rng.random() < 0.4)):
        i = rng.integers(instance.n)
        kind = rng.integers(1 if offline else 0, 5)  # 0 moves an arrival: what is offline stays so
        if kind == 0:
            last = int(arrival.max()) + 2
            arrival[i] = max(0, _draw_near_or_far(int(arrival[i]), last, rng))
        elif kind in (1, 2):  # its prompt or its output, and the other one is cut to what fits
            moved, other = (prompt, output) if kind == 1 else (output, prompt)
            tokens = max(1, _draw_near_or_far(int(moved[i]), capacity, rng))
            moved[i] = min(tokens, capacity - 1)  # the other one has at least a token
            other[i] = min(other[i], capacity - moved[i])
        elif kind == 3:  # a copy of another request
            j = rng.integers(instance.n)
            prompt[i], output[i], arrival[i] = prompt[j], output[j], arrival[j]
        else:  # all equal requests are changed together
            same = (prompt == prompt[i]) & (output == output[i])
            step = int(rng.choice([-1, 1]))
            output[same] = np.clip(output[same] + step, 1, capacity - prompt[same])

    # Intervals of predictions stay as they are, so that outputs have to lie in them.
    lower, upper = instance.predicted_lower, instance.predicted_upper
    if lower is not None and upper is not None:
        output = np.clip(output, lower, upper)
        prompt = np.minimum(prompt, capacity - output)

    arrival -= arrival.min()  # the first request still arrives at 0
    return replace(
        instance,
        arrival=arrival if instance.in_rounds else arrival / _TICKS,
        prompt_tokens=prompt,
        output_tokens=output,
        known=None,
    )


def _draw_near_or_far(value: int, high: int, rng: Generator) -> int:
    """Return a number within 3 of a value, which may be negative, or any from 0 to ``high``."""
    if rng.random() < 0.5:
        return value + int(rng.integers(-3, 4))

    return int(rng.integers(0, high + 1))


def quick_value(problem: Problem) -> tuple[float, Schedule]:
    """Return the value of a good schedule, and the schedule: the best of a few that are quick."""
    instance, goal = problem.instance, problem.goal
    if instance.in_rounds and problem.workers == 1:
        starts = [quick_optimum(instance)[1]]
        # Annealing minimizes the total latency. Requests one after another serve other objectives.
        if goal != TOTAL_LATENCY:
            # Starts of `round_data` are counted from ``shift``, by request.
            data = round_data(instance)
            starts.append(data.shift + serial_starts(data))

        schedules = [from_starts(start, instance) for start in starts]
    else:
        specs = behind_routers(_QUICK, problem.workers)
        schedules = [run(problem, spec).schedule for spec in specs]

    judged = [(goal.of(evaluate(problem, schedule)), schedule) for schedule in schedules]
    values = [(value, schedule) for value, schedule in judged if value is not None]
    return min(values, key=lambda pair: goal.signed(pair[0]))


def quick_optimum(
    instance: Instance, *, orders: int | None = None
) -> tuple[int, NDArray[np.int64]]:
    """Return the total latency and the starts of a good schedule of an instance in rounds.

    It is the best placement in some orders and in so many more that annealing tries.
    """
    if not instance.in_rounds or instance.limits.as_dict() or instance.hybrid_batching is False:
        raise UsageError(
            f"ratio: found an instance in {instance.time_unit}s"
            f"{' with limits on batches' if instance.in_rounds else ''}; expected one in rounds "
            "without limits on batches"
        )

    # Arrivals, KV in the first round, outputs, the capacity, and numbers of the requests. With a
    # fixed seed equal instances have equal schedules.
    jobs = Jobs(
        np.asarray(instance.release_times, dtype=np.int64),
        instance.prompt_tokens + instance.kv_offset,
        instance.output_tokens,
        instance.kv_capacity,
        np.arange(instance.n),
    )
    annealing = Annealing(jobs, np.random.default_rng(0))
    annealing.anneal(_ORDERS * instance.n if orders is None else orders)
    return annealing.value, annealing.starts
