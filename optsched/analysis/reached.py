"""What `optsched.capacity` is asked and returns: what is reached, and what is proved impossible."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bounds import lower_bound
from optsched.bounds.base import OTHER_MACHINES, features_of_problem
from optsched.bounds.certificate import certify_chain
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import Ask, Interval
from optsched.costs.cost import BatchCost
from optsched.files.results import cost_model_reference, head
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.optimize.bounded import relative_gap
from optsched.policies.routers import DEFAULT as ROUTER, ROUTERS
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, UsageError, named
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits, slos_of_all
from optsched.problem.markup import html_of_frame
from optsched.problem.metrics import TABLE
from optsched.problem.progress import number
from optsched.problem.schedule import Schedule
from optsched.problem.scope import Scope
from optsched.problem.service import SLOS, check_slo
from optsched.problem.sessions import UNKNOWN
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

# So many points of the bound for each doubling of the rate are drawn.
_DRAWN = 12
# The first and the last of them, counted from the impossible rate.
_BELOW, _ABOVE = -6, 5
# Prices are asked for as many seconds each of so many requests at most.
_POINT_S, _FEW = 0.5, 3000


def scaled(instance: Instance, scale: float) -> Instance:
    """Return an instance whose requests arrive faster by a factor, in the same pattern.

    Of sessions the first calls do: there are more users, who think for as long as before.
    """
    _check_scale(scale)
    if scale == 1:
        return instance
    if instance.in_rounds:
        raise InputError(
            "time_unit: found 'round'; expected 'second', since only such arrivals can be stretched"
        )

    moved = instance.first_arrival + instance.given_release / scale
    return replace(instance, arrival=np.where(np.isinf(moved), UNKNOWN, moved), known=None)


def _check_scale(scale: object) -> None:
    if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise InputError(f"rate_scale: found {scale!r}; expected a number > 0")


@dataclass(frozen=True)
class Question:
    """How much is asked of the schedules, and whether a rate or workers are searched for.

    `problem`: the instance with its SLOs, and the machines at every rate.
    `attainment`: share of the requests that must be within all their SLOs, above 0 and at most 1.
    `fewest`: whether the fewest machines like the problem's are searched for, and not a rate.
    `rate_scale`: the rate at which machines are searched for.
    `tolerance`: how close the ends of the search for a rate are, relative to the lower one.
    `percentiles`: limits of percentiles by name, in place of the share (`of_percentiles`).
    """

    problem: Problem
    attainment: float = 0.99
    fewest: bool = False
    router: str = ROUTER
    rate_scale: float = 1.0
    tolerance: float = 0.01
    seed: int = 0
    percentiles: Mapping[str, float] = field(default_factory=dict)

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
        return math.ceil(self.attainment * n - 1e-9)

    @property
    def words(self) -> str:
        """What is asked of the schedules."""
        limits = [f"{name} <= {number(limit)}" for name, limit in self.percentiles.items()]
        return ", ".join(limits) or f"attainment {self.attainment:g}"

    def meets(self, judged: Evaluation | None, good: int) -> bool:
        """Whether a schedule with so many requests within all SLOs attains what is asked."""
        if not self.percentiles:
            return good >= self.need(self.problem.instance.n)

        return judged is not None and all(
            (judged.metrics[name] or 0.0) <= limit  # None: of no request
            for name, limit in self.percentiles.items()
        )

    def enough(self, instance: Instance) -> int:
        """Return how many within all SLOs surely attain it: both that a percentile lies between."""
        if not self.percentiles:
            return self.need(instance.n)

        return min(instance.n, 1 + max(needed(instance, name) for name in self.percentiles))

    def at(self, value: float) -> Problem:
        """Return the problem at a rate scale, or with a number of workers."""
        if not self.fewest:
            return self.problem.on(scaled(self.problem.instance, value))

        moved = scaled(self.problem.instance, self.rate_scale)
        return replace(self.problem, instance=moved, fleet=self.problem.fleet.times(int(value)))

    @property
    def count(self) -> int:
        """The number of workers, where a rate is searched for."""
        return self.problem.workers

    def max_within(self, value: float) -> int:
        """Return how many requests can be within their SLOs at most."""
        moved = self.at(value)
        n = moved.instance.n
        if moved.instance.after is not None:
            return n  # no bound of this kind is proved for sessions
        if moved.pools is None and not OTHER_MACHINES & features_of_problem(moved):
            return most_within(moved.instance, moved.cost_model, None, moved.workers)

        share, _ = lower_bound(moved.about("slo_attainment"))
        return n if share is None else round(share * n)

    def asks(self, workers: int | None = None, alone: bool = True) -> list[tuple[Ask, int]]:
        """Return what prices are asked, and how many are needed; none of pools or in rounds.

        That is for each minorant of a table, and then for each of several percentiles ``alone``. A
        number of workers is asked for at the rate at which the fewest are searched for.
        """
        problem = self.problem if workers is None else self.at(workers)
        instance, cost = problem.instance, problem.cost_model
        other = problem.pools is not None or OTHER_MACHINES & features_of_problem(problem)
        if (
            other
            or instance.after is not None
            or instance.in_rounds
            or not isinstance(cost, BatchCost)
        ):
            return []

        limits, every = all_limits(instance, None), cost.minorants
        found = [(limits, self.need(instance.n))]
        if alone and len(self.percentiles) > 1:
            for name in self.percentiles:
                one = all_limits(instance, {slo_of(name): self.percentiles[name]}, columns=False)
                found.append((one, needed(instance, name)))

        return [
            (Ask(instance, one, kept, problem.workers), need)
            for kept, need in found
            for one in every
        ]


def slo_of(percentile: str) -> str:
    """Return the SLO that limits what a metric such as p99_ttft is of."""
    return {column: slo for slo, column in SLOS.items()}[percentile.partition("_")[2]]


def needed(instance: Instance, percentile: str) -> int:
    """Return how many requests are within the limit of a percentile if that is, at least.

    It is interpolated between two in succession of those that have a value, of which the first is
    within it, too. Whoever has none, as one token has no TPOT, counts as within it.
    """
    share, _, column = percentile[1:].partition("_")
    some = instance.n
    if column in ("tpot", "gap"):
        some = int((instance.output_tokens > 1).sum())

    return instance.n - some + (some > 0) * (1 + math.floor((some - 1) * int(share) / 100))


def of_percentiles(problem: Problem, limits: Mapping[str, float]) -> tuple[Problem, float]:
    """Return a problem whose SLOs are limits of percentiles, and the share within all of them.

    Where each is kept by all requests but some, all are kept by all but the sum of these.
    """
    known = {x: x for x in TABLE if x[1:].partition("_")[2] in SLOS.values() and x[1:3].isdigit()}
    for name, limit in limits.items():
        named("percentile", name, known)
        check_slo(name, limit)
    if problem.instance.slos:
        raise UsageError("percentiles: found SLOs as well; expected limits of one kind")
    if len({slo_of(name) for name in limits}) < len(limits):
        raise UsageError("percentiles: found two of one time; expected one of each")

    n = problem.instance.n
    left = sum(n - needed(problem.instance, name) for name in limits)
    slos: dict[str, Any] = {slo_of(name): limit for name, limit in limits.items()}
    return Problem(problem.instance, problem.fleet, **slos), max(n - left, 1) / n


@dataclass(frozen=True)
class Reach:
    """What one policy reaches.

    Parameters
    ----------
    policy : str
    value : float, int or None
        The largest rate scale, or the fewest workers, at which it was within the attainment; None
        if there was none.
    attainment : float or None
        The share of requests within their SLOs there.
    missed : float, int or None
        The smallest rate scale above, or the most workers below, at which it was not.
    points : tuple of (float, float)
        Every rate scale, or number of workers, that was tried, with the attainment; sorted.
    clairvoyant : bool
        Whether it sees true output lengths.
    wall_s : float
        Seconds for all simulations.
    error : str or None
        Why there is no value.
    """

    policy: str
    value: float | int | None = None
    attainment: float | None = None
    missed: float | int | None = None
    points: tuple[tuple[float, float], ...] = ()
    clairvoyant: bool = False
    wall_s: float = 0.0
    error: str | None = None

    def to_dict(self, searched: str) -> dict[str, Any]:
        """Return the row as an object of a capacity file.

        Parameters
        ----------
        searched : str
            The name of its value, as `Capacity.searched` says.
        """
        data = {searched if key == "value" else key: value for key, value in vars(self).items()}
        return {**data, "points": [list(point) for point in self.points]}


@dataclass(frozen=True, eq=False)
class Capacity:
    """What policies reach within SLOs, and what is proved impossible.

    Parameters
    ----------
    question : Question
    rows : tuple of Reach
        One for each policy, in the order given.
    bound : float, int or None
        At this rate scale and at every larger one, or with this number of workers and fewer, no
        schedule and no router attains it. None if nothing is proved impossible.
    bounded : dict of float to float
        Rate scales or workers at which the bound was computed, with shares of requests that no
        schedule exceeds.
    interrupted : bool
        Whether the work was stopped early.
    served : tuple of float and Schedule, optional
        The best rate scale or number of workers of the offline search, and its schedule there.
    bound_origin : str
        The bound that ``bound`` is of.
    chain : tuple of (int, Interval)
        Intervals of rates that prices exclude, from the largest down, each with the number of the
        minorant of the cost model. With ``certify`` the first has no end.
    """

    question: Question
    rows: tuple[Reach, ...]
    bound: float | int | None
    bounded: Mapping[float, float] = field(default_factory=dict)
    interrupted: bool = False
    served: tuple[float, Schedule] | None = None
    bound_origin: str = "slo-work"
    chain: tuple[tuple[int, Interval], ...] = ()

    @property
    def instance(self) -> Instance:
        """The instance, with its SLOs."""
        return self.question.problem.instance

    @property
    def scope(self) -> Scope:
        """The schedules that ``bound`` is about. Of a number of workers it says so itself."""
        pools = self.question.problem.pools
        words = "" if pools is None else pools.words
        return Scope(self.question.count, pools=words)

    @property
    def searched(self) -> str:
        """``"workers"`` or ``"rate_scale"``: what is as small, or as large, as possible."""
        return "workers" if self.question.fewest else "rate_scale"

    @cached_property
    def bound_points(self) -> tuple[tuple[float, float], ...]:
        """Rate scales or workers, with shares of requests that no schedule exceeds; sorted.

        Pictures have some more around the impossible rate, computed when they are asked for.
        """
        points = dict(self.bounded)
        if self.question.fewest or self.bound is None:
            return tuple(sorted(points.items()))

        n, steps = self.instance.n, self._steps
        for low in steps[:-1]:
            points.setdefault(low, self.question.max_within(low) / n)
        for _, interval in self._curve:
            points[interval.low] = min(points[interval.low], interval.most / n)

        # What prices say of a rate holds up to the next step, and from the impossible one on fewer
        # are in time than needed.
        fewer = (self.question.need(n) - 1) / n
        for at, share in points.items():
            before = max((low for low in steps if low <= at), default=at)
            beyond = at >= self.bound and len(self.question.percentiles) < 2
            points[at] = min(share, points.get(before, 1.0), fewer if beyond else 1.0)

        return tuple(sorted(points.items()))

    @property
    def _steps(self) -> list[float]:
        """Rates around the impossible one, in a picture."""
        return [float(self.bound or 0) * 2 ** (k / _DRAWN) for k in range(_BELOW, _ABOVE + 2)]

    @cached_property
    def _curve(self) -> list[tuple[int, Interval]]:
        """What prices say of the rates between two steps, with the number of the minorant."""
        asks = self.question.asks(alone=False) if self.instance.n <= _FEW else []
        found = []
        for low, high in pairwise(self._steps):
            made = [ask.between(0, Budget(_POINT_S), low, high) for ask, _ in asks]
            place = min(range(len(made)), key=lambda k: made[k].most, default=None)
            if place is not None:
                found.append((place, made[place]))

        return found

    @cached_property
    def _proof(self) -> tuple[dict[str, Any] | None, str | None]:
        chain, bound = self.chain[::-1], self.bound
        if bound is None or not chain or chain[-1][1].high < math.inf:
            return None, "no chain of intervals up to all larger rates was found"

        problem, since = self.question.problem, chain[0][1].low
        assert isinstance(problem.cost_model, BatchCost)  # prices are asked of no other
        below = [one for one in self._curve if one[1].high <= since]
        if not below or below[-1][1].high < since:
            below = []
        try:
            made = certify_chain(self.instance, problem.cost_model, since, [*below, *chain])
        except UsageError as error:
            return None, f"the checker refuses it: {error}"

        return made, None

    @property
    def certificate(self) -> dict[str, Any] | None:
        """The certificate of ``bound``, and of the picture's curve below it; None if there is none.

        It states the rate from which on it holds, which is larger if work alone says more.
        """
        return self._proof[0]

    @property
    def certificate_missing(self) -> str | None:
        """Why there is no certificate. None if there is one."""
        return self._proof[1]

    @property
    def best(self) -> Reach | None:
        """The policy with the largest rate scale or the fewest workers; None if there is none."""
        found = [row for row in self.rows if row.value is not None]
        sign = -1 if self.searched == "rate_scale" else 1
        return min(found, key=lambda row: sign * (row.value or 0), default=None)

    @cached_property
    def best_schedule(self) -> Evaluation | None:
        """The schedule of the offline search at the best rate or number of workers, judged."""
        if self.served is None:
            return None

        with warnings.catch_warnings():  # about the range of the cost model
            warnings.simplefilter("ignore")
            return evaluate(self.question.at(self.served[0]), self.served[1])

    @property
    def value(self) -> float | int | None:
        """The rate scale, or the number of workers, of `best`."""
        return None if self.best is None else self.best.value

    @property
    def gap(self) -> float | None:
        """The relative gap |value - bound| / value. None if it is unknown."""
        return relative_gap(self.value, self.bound, not self.question.fewest)

    def loads(self, value: float | int | None) -> tuple[float, float] | tuple[None, None]:
        """Return requests per second, and per second and worker, at a rate scale or with workers.

        They are those on average from the first arrival to the last one. Of sessions the first
        calls count.

        Parameters
        ----------
        value : float, int or None
            The rate scale, or the number of workers.
        """
        given = self.instance.given_arrivals
        last = float(given.max() - given.min())
        if value is None or not last > 0:
            return None, None

        auto, scale, workers = self.question.fewest, self.question.rate_scale, self.question.count
        rate = (scale if auto else value) * (len(given) - 1) / last
        return rate, rate / int(value if auto else workers)

    @property
    def arriving(self) -> str:
        """What arrives at the rates of `loads`: requests, or sessions of them."""
        return "requests" if self.instance.after is None else "sessions"

    @property
    def verdict(self) -> str:
        """What a policy attains, and what is impossible for any schedule, in a sentence."""
        best, rates, what = self.best, not self.question.fewest, self.searched.replace("_", " ")

        def words(value: float | int) -> str:
            rate, _ = self.loads(value)
            return number(value) + (f" ({rate:.3g} {self.arriving}/s)" if rates and rate else "")

        reached = "no policy attains it" + (" so far" if self.interrupted else "")
        if best is not None and best.value is not None:
            sure = "up to" if best.missed is not None else "at least up to"
            reached = f"{best.policy} attains it {sure if rates else 'with'} "
            reached += f"{what} {words(best.value)}"
            if not rates and (rate := self.loads(best.value)[0]):
                asked = self.question.rate_scale
                reached += f", at {asked:g} times the traffic" * (asked != 1)
                reached += f" ({rate:.3g} {self.arriving}/s)"

        proved = "nothing is proved impossible"
        if self.instance.after is not None:
            proved = (
                "nothing is proved impossible, since no bound on SLOs is proved for sessions (on "
                "mean_session_completion there is one: `bound`)"
            )
        if self.bound is not None:
            ends = ("from", "on") if rates else ("with", "or fewer")
            proved = f"impossible for any schedule {ends[0]} {what} {words(self.bound)} {ends[1]}"

        return f"{self.question.words}: {reached}; {proved}"

    def __repr__(self) -> str:
        return f"<Capacity {self.instance.name!r}: {self.verdict}>"

    _repr_html_ = html_of_frame

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each policy, as far as `Reach` has it, without the points."""
        import pandas as pd

        rows = pd.DataFrame([row.to_dict(self.searched) for row in self.rows])
        return rows.drop(columns="points", errors="ignore")

    def _tails(self) -> dict[str, Any] | None:
        """Return what is said of the best schedule in a file: its attainment, and all p99."""
        judged = self.best_schedule
        if judged is None or self.served is None:
            return None

        names = ("slo_attainment", *(name for name in judged.metrics if name.startswith("p99_")))
        return {self.searched: self.served[0], **{name: judged.metrics[name] for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a capacity file."""
        best, asked, rates, value = self.best, self.question, not self.question.fewest, self.value
        data = head("optsched-capacity", "capacity", self.instance)
        data |= {
            "cost_model": cost_model_reference(self.instance, asked.problem.cost_model),
            "seed": asked.seed,
            "attainment": asked.attainment,
            "percentiles": dict(asked.percentiles),
            "verdict": self.verdict,
            "requests_per_second": None
            if asked.fewest or self.instance.after is not None
            else self.loads(1.0)[0],
            "slos": slos_of_all(self.instance),
            "searched": self.searched,
            "router": asked.router,
            "policies": [row.to_dict(self.searched) for row in self.rows],
            "best_rate_scale": value if rates else None,
            "best_origin": None if best is None else best.policy,
            "impossible_rate_scale": self.bound if rates else None,
            "bound_origin": None if self.bound is None else self.bound_origin,
            "scope": self.scope.to_dict() if rates else None,
            "best_schedule": self._tails(),
            "bound_points": [list(point) for point in self.bound_points],
            "interrupted": self.interrupted,
        }
        workers = {"rate_scale": asked.rate_scale, "fewest": value, "impossible": self.bound}
        if asked.problem.pools is not None:
            data["pools"] = asked.problem.pools.to_dict()

        return {**data, "workers": {"given": asked.count} if rates else workers}
