r"""What no scheduler can have of both: the mean latency and the mean TTFT of any schedule.

For a weight a from 0 to 1 let B_a be a bound on (1 - a) x + a y, where x is the mean latency and y
the mean TTFT of a schedule. Then every schedule has y >= (B_a - (1 - a) x) / a for all a > 0 that
were tried, and x >= B_0. The schedules that remain possible lie in an intersection of half-planes,
whose edge is a convex curve. A schedule of mean latency at most x has at least the curve's TTFT at
x, since the curve falls.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from optsched.costs.cost import CostModel, cost_for
from optsched.files.results import cost_model_reference, head
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize import strategies
from optsched.optimize.consistency import reconcile
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, NoIncumbentError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.markup import table
from optsched.problem.objective import Objective
from optsched.problem.scope import ONE_WORKER

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""The weights of TTFT that are tried."""
_POLICY_SHARE = 0.4
"""The share of the time limit after which no further policy starts."""
_SEARCH_SHARE = 0.25
"""The share of the rest of the time for the offline search."""


@dataclass(frozen=True)
class WeightedBound:
    """A bound on the weighted sum of mean latency and mean TTFT.

    Parameters
    ----------
    weight : float
        The weight of TTFT, from 0 to 1. Latency has the rest.
    value : float
        No schedule has a smaller sum, in seconds.
    name : str
        The bound that proved it.
    """

    weight: float
    value: float
    name: str


@dataclass(frozen=True)
class TradeoffPoint:
    """What a policy reaches.

    Parameters
    ----------
    policy : str
        The policy's specification, or ``"offline search"``.
    mean_latency, mean_ttft : float
        As judged, in seconds.
    """

    policy: str
    mean_latency: float
    mean_ttft: float


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """Bounds on mean latency and mean TTFT together, and what policies reach.

    Parameters
    ----------
    instance : Instance
    cost_model : CostModel
    bounds : tuple of WeightedBound
        In the order of their weights.
    points : tuple of TradeoffPoint
        In the order of their mean latency.
    seed : int
    interrupted : bool
        Whether Ctrl-C came before everything had run.
    """

    instance: Instance
    cost_model: CostModel
    bounds: tuple[WeightedBound, ...]
    points: tuple[TradeoffPoint, ...]
    seed: int = 0
    interrupted: bool = False

    def ttft_at(self, mean_latency: float) -> float | None:
        """Return a bound in seconds on the mean TTFT of schedules of at most some mean latency.

        It is None if no schedule has so small a latency.

        Parameters
        ----------
        mean_latency : float
            In seconds.
        """
        if any(mean_latency < one.value for one in self.bounds if one.weight == 0):
            return None

        values = ((b.value - (1 - b.weight) * mean_latency, b.weight) for b in self.bounds)
        return max([0.0, *(value / weight for value, weight in values if weight > 0)])

    def curve(self) -> list[tuple[float, float]]:
        """Return the corners of the curve that no schedule crosses.

        Returns
        -------
        list of (float, float)
            Mean latency and mean TTFT in seconds, from the smallest latency that is not ruled out
            to the smallest TTFT.
        """
        left = max((b.value for b in self.bounds if b.weight == 0), default=0.0)
        steps = [b for b in self.bounds if b.weight > 0]
        places = {left}

        for one, other in combinations(steps, 2):
            slopes = (1 - one.weight) / one.weight - (1 - other.weight) / other.weight
            if slopes != 0:
                place = (one.value / one.weight - other.value / other.weight) / slopes
                places.add(max(left, place))

        corners = [(x, self.ttft_at(x) or 0.0) for x in sorted(places)]
        lowest = min(y for _, y in corners)
        kept: list[tuple[float, float]] = []

        for x, y in corners:
            while len(kept) > 1 and _straight(kept[-2], kept[-1], (x, y)):
                kept.pop()

            kept.append((x, y))
            if y <= lowest:
                break

        return kept

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a tradeoff file."""
        corners = self.curve()
        return {
            **head("optsched-tradeoff", "tradeoff", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "bounds": [
                {"ttft_weight": one.weight, "bound": one.value, "bound_origin": one.name}
                for one in self.bounds
            ],
            "scope": ONE_WORKER.to_dict(),
            "curve": {
                "mean_latency": [x for x, _ in corners],
                "mean_ttft": [y for _, y in corners],
            },
            "policies": [
                {
                    "policy": point.policy,
                    "mean_latency": point.mean_latency,
                    "mean_ttft": point.mean_ttft,
                    "mean_ttft_bound": self.ttft_at(point.mean_latency),
                }
                for point in self.points
            ],
            "seed": self.seed,
            "interrupted": self.interrupted,
        }

    def __repr__(self) -> str:
        (x, y), (_, lowest) = self.curve()[0], self.curve()[-1]
        return (
            f"<Tradeoff {self.instance.name!r}: mean latency >= {x:.4g} s, mean TTFT >= "
            f"{lowest:.4g} s, and >= {y:.4g} s at that latency; {len(self.points)} policies>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (p.policy, p.mean_latency, p.mean_ttft, self.ttft_at(p.mean_latency))
            for p in self.points
        ]
        headers = ("", "mean latency [s]", "mean TTFT [s]", "TTFT of any schedule so fast [s] >=")
        return table(f"Latency and TTFT on {self.instance.name}", headers, rows, repr(self))


def _straight(
    one: tuple[float, float], two: tuple[float, float], three: tuple[float, float]
) -> bool:
    """Whether the second of three corners lies on the line between the others."""
    (a, b), (c, d), (e, f) = one, two, three
    along = b + (f - b) * (c - a) / (e - a) if e > a else b
    return abs(along - d) <= 1e-12 * max(1.0, abs(d))


def tradeoff(
    instance: Instance,
    policies: Iterable[str] | None = None,
    *,
    cost_model: CostModel | str | Path | None = None,
    weights: Sequence[float] = WEIGHTS,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Tradeoff:
    """Bound mean latency and mean TTFT together, and run policies and the offline search.

    The bounds that take no search come first, for every weight. Those that search share the rest of
    the time.

    Parameters
    ----------
    instance : Instance
        In seconds.
    policies : iterable of str, optional
        Specifications of policies. By default all run that the instance allows, a slow one for a
        part of the time, and the search for a small total latency.
    cost_model : BatchCost, str or path
    weights : sequence of float
        The weights of TTFT that are tried, from 0 to 1.
    time_limit_s : float
        Seconds for all of the work, >= 0.
    seed : int
    progress : callable, optional
        Called with a line of text whenever something begins.
    stop : threading.Event, optional
        When it is set, the work ends and what is known is kept.

    Returns
    -------
    Tradeoff

    Raises
    ------
    UsageError
        The instance is in rounds, no weight is given, or a weight is out of its range; or the cost
        model does not fit.
    InputError
        ``time_limit_s`` is negative or not a number.
    SolverError
        A bound contradicts a policy, which is an internal error.
    """
    if instance.in_rounds:
        raise UsageError(
            "tradeoff: found an instance in rounds; expected one in seconds, for which bounds on "
            "latency and TTFT together are known"
        )

    if not time_limit_s >= 0:
        raise InputError(f"time_limit: found {time_limit_s!r}; expected seconds >= 0")
    if not len(weights):
        raise UsageError("weights: found an empty list; expected at least one from 0 to 1")

    goals = [
        Objective("latency_and_ttft", (("ttft_weight", float(one)),))
        for one in sorted(set(weights))
    ]
    cost = cost_for(instance, cost_model)
    tell = progress or (lambda text: None)
    budget = Budget(time_limit_s, stop=stop)
    points = _run(instance, policies, cost, budget, seed, tell)

    if policies is None and not budget.over:
        tell("offline search")
        points += _search(instance, cost, budget.part(_SEARCH_SHARE), seed)

    intervals = [Interval(Task(instance, cost, (goal,))) for goal in goals]

    def improve(interval: Interval, part: Budget) -> None:
        tell(f"bound with {interval.goal.ttft_weight:g} of the weight on TTFT")
        strategies.prove(interval, part, seed=seed)

    for interval in intervals:
        if not budget.stopped or all(one.bound is None for one in intervals):
            improve(interval, Budget(0.0))

    if not budget.stopped:
        strategies.warn_if_short("the bounds that search", budget.left_s, time_limit_s)
    for k, interval in enumerate(intervals):
        if not budget.over:
            improve(interval, budget.part(1.0 / (len(goals) - k)))

    return Tradeoff(
        instance=instance,
        cost_model=cost,
        bounds=tuple(_checked(one, points) for one in intervals if one.bound is not None),
        points=tuple(sorted(points, key=lambda point: point.mean_latency)),
        seed=seed,
        interrupted=budget.stopped,
    )


def _run(
    instance: Instance,
    policies: Iterable[str] | None,
    cost: CostModel,
    budget: Budget,
    seed: int,
    tell: Callable[[str], None],
) -> list[TradeoffPoint]:
    """Return what policies reach. Those that are not named may be left out."""
    named, points = policies is not None, list[TradeoffPoint]()
    for spec in policies or (() if named else strategies.allowed_policies(instance)):
        if budget.stopped or (not named and budget.spent_s >= _POLICY_SHARE * budget.limit_s):
            break

        tell(f"policy {spec}")
        try:
            part = budget if named else budget.part(_POLICY_SHARE * strategies.POLICY_SHARE)
            _, evaluation, _ = strategies.run_policy(instance, spec, cost, seed=seed, budget=part)
        except strategies.NO_SCHEDULE:
            if named:
                raise

            continue

        if strategies.outside_reason(evaluation) is None:
            points.append(_point(spec, evaluation))

    return points


def _search(instance: Instance, cost: CostModel, budget: Budget, seed: int) -> list[TradeoffPoint]:
    """Return what the offline search for a small latency reaches, if it finds a schedule."""
    from optsched.optimize.search.offline import improve

    try:
        schedule, _ = improve(instance, cost, budget, seed=seed)
    except NoIncumbentError:
        return []

    return [_point("offline search", evaluate(instance, schedule, cost))]


def _point(name: str, evaluation: Evaluation) -> TradeoffPoint:
    latency, ttft = evaluation.metrics["mean_latency"], evaluation.metrics["mean_ttft"]
    return TradeoffPoint(name, float(latency or 0.0), float(ttft or 0.0))


def _checked(interval: Interval, points: Sequence[TradeoffPoint]) -> WeightedBound:
    """Return a bound of which it is checked that no policy contradicts it."""
    weight, name = interval.goal.ttft_weight, interval.bound_origin or ""
    values = ((1 - weight) * p.mean_latency + weight * p.mean_ttft for p in points)
    best = min(zip(values, (p.policy for p in points), strict=True), default=(None, None))
    instance, goal = interval.task.instance, interval.goal
    value = reconcile(instance, goal, best, (interval.bound, name))

    return WeightedBound(weight, float(value or 0.0), name)
