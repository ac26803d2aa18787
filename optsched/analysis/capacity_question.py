"""What `optsched.capacity` is asked: a share or percentiles within SLOs, by rate or by workers.

Prices are those of `optsched.bounds.slo_prices`, which bound how many requests are in time at all
rates of an interval. Each is asked of a minorant: a linear cost model under which no batch takes
longer than under the problem's, which is itself its only one if it is linear.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optsched.bounds import lower_bound
from optsched.bounds.base import OTHER_MACHINES, BoundTask, features_of_problem
from optsched.bounds.checker.class_work import Floors
from optsched.bounds.class_work import within_slos
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import SHARE_BY_CLASS, Ask
from optsched.costs.cost import BatchCost
from optsched.judge.evaluation import Evaluation
from optsched.policies.routers import DEFAULT as ROUTER, ROUTERS
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, UsageError, named
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.metrics import TABLE
from optsched.problem.progress import number
from optsched.problem.service import SLOS, check_slo
from optsched.problem.sessions import UNKNOWN
from optsched.workloads.problem import Problem


def scale_arrivals(instance: Instance, scale: float) -> Instance:
    """Return an instance whose requests arrive ``scale`` times as fast, in the same pattern.

    Gaps between arrivals are divided by the factor. Of sessions the first calls move: there are
    more users, who think for as long as before.
    """
    _check_scale(scale)
    if scale == 1:
        return instance
    check_in_seconds(instance)
    # Later calls of a session arrive when an earlier one ends: their release is infinite.
    moved = instance.first_arrival + instance.given_release / scale
    return replace(instance, arrival=np.where(np.isinf(moved), UNKNOWN, moved), known=None)


def check_in_seconds(instance: Instance) -> None:
    """Raise InputError if arrivals cannot be stretched, since they are whole rounds."""
    if instance.in_rounds:
        raise InputError(
            "time_unit: found 'round'; expected 'second', since only such arrivals can be stretched"
        )


def _check_scale(scale: object) -> None:
    """Raise InputError unless it is a number > 0."""
    if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise InputError(f"rate_scale: found {scale!r}; expected a number > 0")


@dataclass(frozen=True)
class Question:
    """How much is asked of the schedules, and whether a rate or workers are searched for.

    `problem`: the instance with its SLOs, and the machines at every rate.
    `attainment`: share of the requests that must be within all their SLOs, above 0 and at most 1.
    `fewest`: whether the fewest machines like the problem's are searched for, and not a rate. A
    ``value`` is a number of workers then, and else a rate scale.
    `rate_scale`: the rate at which machines are searched for, as a multiple of the instance's.
    `tolerance`: how close the ends of the search for a rate are, relative to the lower one.
    `percentiles`: limits of percentiles by name, in place of the share
    (`with_percentiles_as_slos`).
    `by_class`: a leaf of charges by class of batch length, and what it says (`with_classes`).
    """

    problem: Problem
    attainment: float = 0.99
    fewest: bool = False
    router: str = ROUTER
    rate_scale: float = 1.0
    tolerance: float = 0.01
    seed: int = 0
    percentiles: Mapping[str, float] = field(default_factory=dict)
    by_class: tuple[dict[str, Any], Floors] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        share = self.attainment
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise InputError(f"attainment: found {share!r}; expected a share > 0 and <= 1")
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance: found {self.tolerance!r}; expected a number > 0 and < 1")
        named("router", self.router, ROUTERS)
        _check_scale(self.rate_scale)
        if self.fewest and (self.problem.workers > 1 or self.problem.pools is not None):
            raise UsageError(
                f"fewest: found {self.problem.workers} machines; expected one, of which the fewest "
                "are searched for"
            )
        if not self.fewest and self.rate_scale != 1:
            raise UsageError(
                f"rate_scale: found {self.rate_scale:g} and a number of workers, for which the "
                "rate is searched for; expected it where the fewest workers are searched for"
            )

    def need(self, n: int) -> int:
        """Return the fewest requests that attain it."""
        return math.ceil(self.attainment * n - 1e-9)  # 0.99 * 100 may come out above 99

    @property
    def words(self) -> str:
        """What is asked of the schedules."""
        limits = [f"{name} <= {number(limit)}" for name, limit in self.percentiles.items()]
        return ", ".join(limits) or f"attainment {self.attainment:g}"

    def meets(self, judged: Evaluation | None, in_time: int) -> bool:
        """Return whether a schedule attains what is asked.

        `judged`: the schedule, of which percentiles are taken; None if there is none. `in_time`:
        how many requests are within all SLOs, which count where no percentiles are limited.
        """
        if not self.percentiles:
            return in_time >= self.need(self.problem.instance.n)
        if judged is None:
            return False

        # A percentile is None if no request has such a time, so that nothing exceeds the limit.
        values = {name: judged.metrics[name] or 0.0 for name in self.percentiles}
        return all(values[name] <= limit for name, limit in self.percentiles.items())

    def enough(self, instance: Instance) -> int:
        """Return a number of requests within all SLOs that surely attains it.

        A percentile lies between two values, of which `min_within` counts up to the lower one. With
        one request more, both are within the limit, and so is the percentile.
        """
        if not self.percentiles:
            return self.need(instance.n)

        return min(instance.n, 1 + max(min_within(instance, name) for name in self.percentiles))

    def problem_at(self, value: float) -> Problem:
        """Return the problem at a rate scale, or with a number of workers."""
        if not self.fewest:
            return self.problem.on(scale_arrivals(self.problem.instance, value))

        moved = scale_arrivals(self.problem.instance, self.rate_scale)
        return replace(self.problem, instance=moved, fleet=self.problem.fleet.times(int(value)))

    @property
    def count(self) -> int:
        """The number of workers, where a rate is searched for."""
        return self.problem.workers

    def max_within(self, value: float) -> int:
        """Return how many requests can be within their SLOs at most, by any schedule."""
        problem = self.problem_at(value)
        n = problem.instance.n
        if problem.instance.after is not None:
            return n  # no bound of this kind is proved for sessions
        if _has_equal_machines(problem):
            return most_within(problem.instance, problem.cost_model, None, problem.workers)

        # Shares are whole numbers of requests over n.
        share, _ = lower_bound(problem.about("slo_attainment"))
        return n if share is None else round(share * n)

    def asks(self, workers: int | None = None, alone: bool = True) -> list[tuple[Ask, int]]:
        """Return what prices are asked, each with how many requests are needed in time.

        There is one for each minorant of a tabulated cost model, then one for charges by class if
        there are any, and with ``alone`` as many again for each of several percentiles by itself. A
        number of workers is asked for at the rate at which the fewest are searched for. Prices
        prove nothing of pools, sessions or rounds: then the list is empty.
        """
        problem = self.problem if workers is None else self.problem_at(workers)
        instance, cost = problem.instance, problem.cost_model
        priced = _has_equal_machines(problem) and instance.after is None and not instance.in_rounds
        if not priced or not isinstance(cost, BatchCost):
            return []

        limits_and_needs = [(all_limits(instance, None), self.need(instance.n))]
        if alone and len(self.percentiles) > 1:
            for name, limit in self.percentiles.items():
                # This limit alone: the instance's own columns of SLOs are left out.
                limits = all_limits(instance, {slo_of(name): limit}, columns=False)
                limits_and_needs.append((limits, min_within(instance, name)))

        floors: list[tuple[BatchCost, Floors | None]] = [(one, None) for one in cost.minorants]
        floors += [(cost, self.by_class[1])] if self.by_class else []
        return [
            (Ask(instance, one, limits, problem.workers, floors=charges), need)
            for limits, need in limits_and_needs
            for one, charges in floors
        ]


def with_classes(asked: Question, budget: Budget) -> Question:
    """Return a question with charges by class, where these are proved and say more: of a table."""
    task = BoundTask.of(asked.problem.about("slo_attainment"))
    if not SHARE_BY_CLASS.suits(task) or SHARE_BY_CLASS.lacks(task):
        return asked

    return replace(asked, by_class=within_slos(task, budget))


def _has_equal_machines(problem: Problem) -> bool:
    """Return whether the bounds of one machine, or of several equal ones, cover the problem."""
    return problem.pools is None and not OTHER_MACHINES & features_of_problem(problem)


def slo_of(percentile: str) -> str:
    """Return the SLO that limits what a metric such as p99_ttft is of."""
    return {column: slo for slo, column in SLOS.items()}[percentile.partition("_")[2]]


def min_within(instance: Instance, percentile: str) -> int:
    """Return how many requests at least are within a limit that a percentile is within.

    The percentile p of m values is interpolated between two in succession. The lower one, at place
    1 + floor((m - 1) p / 100) in their order, is within the limit if the percentile is. A request
    without a value, as one token has no TPOT, counts as within the limit. `percentile`: its name as
    a metric, for example p99_ttft.
    """
    share, _, column = percentile[1:].partition("_")
    with_value = instance.n
    if column in ("tpot", "gap"):
        with_value = int((instance.output_tokens > 1).sum())
    if with_value == 0:
        return instance.n

    return instance.n - with_value + 1 + math.floor((with_value - 1) * int(share) / 100)


def with_percentiles_as_slos(
    problem: Problem, percentiles: Mapping[str, float]
) -> tuple[Problem, float]:
    """Return a problem whose SLOs are limits of percentiles, and the share within all of them.

    Where each limit is kept by all requests but some, all limits are kept by all requests but the
    sum of these.
    """
    # Names such as p99_ttft: two digits, and a time that an SLO may limit.
    known = {x: x for x in TABLE if x[1:].partition("_")[2] in SLOS.values() and x[1:3].isdigit()}
    for name, limit in percentiles.items():
        named("percentile", name, known)
        check_slo(name, limit)
    if problem.instance.slos:
        raise UsageError("percentiles: found SLOs as well; expected limits of one kind")
    if len({slo_of(name) for name in percentiles}) < len(percentiles):
        raise UsageError("percentiles: found two of one time; expected one of each")

    n = problem.instance.n
    # A percentile within its limit means that `min_within` requests are, and others may be late.
    late = sum(n - min_within(problem.instance, name) for name in percentiles)
    slos: dict[str, Any] = {slo_of(name): limit for name, limit in percentiles.items()}
    # A `Question` takes a share above 0 only.
    return Problem(problem.instance, problem.fleet, **slos), max(n - late, 1) / n
