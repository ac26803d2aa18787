"""Find instances on which a policy is far from the optimum, by local search."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
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
# Orders per request in which annealing looks for a schedule that is nearly optimal.
_ORDERS = 50
# Policies whose schedules stand for the optimum in seconds, and arrivals in a second.
_QUICK, _TICKS = ("least-work", "mc-sf", "spf-work", "fcfs"), 100


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

    def asked(instance: Instance) -> Problem:
        return Problem(instance, machines, goal)

    begin = work_time()
    until, deadline = begin + budget_s * 2 / 3, begin + budget_s
    rng = np.random.default_rng(seed)
    runs = [[seed, 0, run] for run in range(seeds)]
    pool: list[tuple[float, Problem]] = []
    tried, told = 0, begin

    def report(best: float) -> None:
        spent = work_time() - begin
        line.show(f"{spent:.0f} of {budget_s:g} s, ratio {best:.3f}, {tried} instances")
        if callable(progress):
            progress(int(spent), ceil(budget_s))

    def score(problem: Problem) -> float:
        nonlocal tried, told
        tried += 1
        if work_time() - told > 1:
            told = work_time()
            report(pool[0][0] if pool else 1.0)

        try:
            reached, known = _mean(problem, policy, runs), quick_value(problem)[0]
        except LoopError:
            return 0.0  # there is no value to compare; this search is not for loops

        return problem.goal.quotient(reached, known)

    def goes_on() -> bool:
        return work_time() < until and not (stop is not None and stop.is_set())

    def climb() -> None:
        draws = [asked(draw(policy, kv_capacity, n, rng)) for _ in range(_DRAWS)]
        value, now = max(((score(drawn), drawn) for drawn in draws), key=lambda pair: pair[0])
        patience = 0

        try:
            while patience < 150 and value < enough and goes_on():
                trial = asked((change or _changed)(now.instance, rng))
                worth = score(trial)
                patience = 0 if worth > value else patience + 1
                if worth >= value:
                    now, value = trial, worth
        finally:  # also when the search is interrupted
            pool.append((value, now))
            pool.sort(key=lambda pair: -pair[0])
            del pool[8:]

    with interrupts_noted() as interrupted, LiveLine(wanted=progress is True) as line:
        try:
            climb()
            while pool[0][0] < enough and goes_on():
                climb()
        except KeyboardInterrupt:
            if not pool:
                raise

            interrupted.clear()
            deadline = begin

        if stop is not None and stop.is_set():
            deadline = begin

        # What is worst with the coins of the search has a smaller mean with others.
        others = [[seed, 1, run] for run in range(seeds)]
        kept = None if store is None else Optima(Path(store))
        best = _proved(pool, policy, others, deadline, report, interrupted, kept)

    return replace(best, evaluations=tried, wall_s=work_time() - begin)


def _proved(
    pool: list[tuple[float, Problem]],
    policy: str | Scheduler,
    runs: Runs,
    deadline: float,
    report: Callable[[float], None],
    interrupted: threading.Event,
    store: Optima | None,
) -> WorstCase:
    """Solve the best instances, at least one; return that with the largest certain ratio."""
    best: WorstCase | None = None
    for k, (value, problem) in enumerate(pool):
        left = deadline - work_time()
        if best is not None and (left <= 0 or value <= best.low or interrupted.is_set()):
            break
        try:
            found = _solved(problem, policy, runs, max(1.0, left if k else left * 0.7), store)
            if best is None or found.low > best.low:
                best = found

            report(best.low)
        except KeyboardInterrupt:
            if best is None:
                raise

            break

    assert best is not None
    return best


def _solved(
    problem: Problem, policy: str | Scheduler, runs: Runs, time_limit_s: float, store: Optima | None
) -> WorstCase:
    """Solve an instance, and return it with its ratio."""
    name, goal, instance = label_of(policy), problem.goal, problem.instance
    value, schedule = _mean(problem, policy, runs), quick_value(problem)[1]
    result = optimum(problem, store, time_limit_s=time_limit_s, warm_start=schedule)
    assert result.value is not None
    assert result.schedule is not None
    reconcile(instance, goal, (value, name), (result.bound, result.method))
    low = goal.quotient(value, result.value)
    known: dict[str, Any] = {"best_known": result.value, "bound": result.bound}
    if result.value == result.bound:
        known = {"optimum": result.value}

    known["reference"] = f"worst_case: {name} reaches {value:g}, {low:.3f} times the best known"
    high = goal.quotient(value, result.bound) if result.bound else float("inf")
    shown = replace(instance, known=known)
    return WorstCase(name, shown, value, low, high, result.schedule, 0, 0.0, goal)


def _mean(problem: Problem, policy: str | Scheduler, runs: Runs) -> float:
    """Return the policy's mean value of schedules that the optimum covers, or raise LoopError."""
    values = []
    for one in runs:
        done = run(problem, policy, seed=one)
        if done.value is None or outside_reason(done.evaluation, problem) is not None:
            raise LoopError("no value to compare")

        values.append(float(done.value))

    return sum(values) / len(runs)


def _changed(instance: Instance, rng: Generator) -> Instance:
    """Return the instance with one or two requests changed; it keeps intervals of predictions."""
    columns = (instance.release_times, instance.prompt_tokens, instance.output_tokens)
    arrival, prompt, output = (column.copy() for column in columns)
    capacity = instance.kv_capacity - instance.kv_offset + 1
    if not instance.in_rounds:  # in ticks
        arrival = np.rint(arrival * _TICKS).astype(np.int64)

    offline = not arrival.any()

    for _ in range(1 + (rng.random() < 0.4)):
        i = rng.integers(instance.n)
        kind = rng.integers(1 if offline else 0, 5)
        if kind == 0:
            far = int(arrival.max()) + 2
            arrival[i] = max(0, _nudged(int(arrival[i]), far, rng))
        elif kind in (1, 2):
            one, other = (prompt, output) if kind == 1 else (output, prompt)
            one[i] = min(max(1, _nudged(int(one[i]), capacity, rng)), capacity - 1)
            other[i] = min(other[i], capacity - one[i])
        elif kind == 3:  # a copy of another request
            j = rng.integers(instance.n)
            prompt[i], output[i], arrival[i] = prompt[j], output[j], arrival[j]
        else:  # all equal requests are changed together
            same = (prompt == prompt[i]) & (output == output[i])
            step = int(rng.choice([-1, 1]))
            output[same] = np.clip(output[same] + step, 1, capacity - prompt[same])

    lower, upper = instance.predicted_lower, instance.predicted_upper
    if lower is not None and upper is not None:
        output = np.clip(output, lower, upper)
        prompt = np.minimum(prompt, capacity - output)

    arrival -= arrival.min()
    return replace(
        instance,
        arrival=arrival if instance.in_rounds else arrival / _TICKS,
        prompt_tokens=prompt,
        output_tokens=output,
        known=None,
    )


def _nudged(value: int, high: int, rng: Generator) -> int:
    if rng.random() < 0.5:
        return value + int(rng.integers(-3, 4))

    return int(rng.integers(0, high + 1))


def quick_value(problem: Problem) -> tuple[float, Schedule]:
    """Return the value of a good schedule, and the schedule: the best of a few that are quick."""
    instance, goal = problem.instance, problem.goal
    if instance.in_rounds and problem.workers == 1:
        data = round_data(instance)
        starts = [quick_optimum(instance)[1]]
        if goal != TOTAL_LATENCY:
            starts.append(data.shift + serial_starts(data))

        every = [from_starts(one, instance) for one in starts]
    else:
        every = [run(problem, spec).schedule for spec in behind_routers(_QUICK, problem.workers)]

    found = [(goal.of(evaluate(problem, one)), one) for one in every]
    values = [(value, one) for value, one in found if value is not None]
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
