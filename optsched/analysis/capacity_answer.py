"""What `optsched.capacity` returns: what policies reach within SLOs, and what is impossible.

Work alone is the bound of `optsched.bounds.service`, at one rate or number of workers. Prices are
those of `optsched.bounds.slo_prices`, which bound how many requests are in time at all rates of an
interval. Each is asked of a minorant: a linear cost model under which no batch takes longer than
under the problem's, which is itself its only one if it is linear.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from optsched.analysis.capacity_question import Question
from optsched.bounds.certificate import certify_chain
from optsched.bounds.slo_prices import Interval
from optsched.costs.cost import BatchCost
from optsched.files.results import cost_model_reference, head
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.optimize.bounded import relative_gap
from optsched.problem.budget import Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.limits import slos_of_all
from optsched.problem.markup import html_of_frame
from optsched.problem.progress import number
from optsched.problem.schedule import Schedule
from optsched.problem.scope import Scope

if TYPE_CHECKING:
    import pandas as pd

# So many points of the bound for each doubling of the rate are drawn.
_DRAWN = 12
# The first and the last of them, counted from the impossible rate.
_BELOW, _ABOVE = -6, 5
# Prices are asked for as many seconds at each point, and of so many requests at most.
_POINT_S, _MAX_PRICED = 0.5, 3000


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

        # At each step work alone says something, and prices may say more. The last step is left
        # out, since it only ends an interval.
        n, steps = self.instance.n, self._steps
        for low in steps[:-1]:
            points.setdefault(low, self.question.max_within(low) / n)
        for _, interval in self._curve:
            points[interval.low] = min(points[interval.low], interval.most / n)

        # From the impossible rate on fewer are in time than needed. With several percentiles it
        # may be one of them alone that excludes the rate, which says nothing of this share.
        too_few = (self.question.need(n) - 1) / n
        about_the_share = len(self.question.percentiles) < 2
        for scale, share in points.items():
            # What prices say of a step holds up to the next one.
            step = max((low for low in steps if low <= scale), default=scale)
            beyond = scale >= self.bound and about_the_share
            points[scale] = min(share, points.get(step, 1.0), too_few if beyond else 1.0)

        return tuple(sorted(points.items()))

    @property
    def _steps(self) -> list[float]:
        """Rates around the impossible one, in a picture. The last only ends the last interval."""
        return [float(self.bound or 0) * 2 ** (k / _DRAWN) for k in range(_BELOW, _ABOVE + 2)]

    @cached_property
    def _curve(self) -> list[tuple[int, Interval]]:
        """What prices say of the rates between two steps, with the number of the minorant."""
        # With more requests the time of a point does not suffice, and the curve is that of work.
        # Nothing is asked for single percentiles (`alone`), which say nothing of the share within
        # all SLOs. So there is one question for each minorant, in their order, and for classes.
        asks = self.question.asks(alone=False) if self.instance.n <= _MAX_PRICED else []
        if not asks:
            return []

        curve = []
        for low, high in pairwise(self._steps):
            # No share is needed here (0), so that prices are improved until the time is up. `most`
            # is how many they leave in time at any rate of an interval.
            intervals = [ask.between(0, Budget(_POINT_S), low, high) for ask, _ in asks]
            tightest = min(range(len(asks)), key=lambda k: intervals[k].most)
            curve.append((tightest, intervals[tightest]))

        return curve

    @cached_property
    def _proof(self) -> tuple[dict[str, Any] | None, str | None]:
        """The certificate and None, or None and why there is none."""
        chain = self.chain[::-1]  # from the smallest rate up
        if self.bound is None or not chain or chain[-1][1].high < math.inf:
            return None, "no chain of intervals up to all larger rates was found"

        # From this rate on the chain excludes all. Below it the picture's curve may go on.
        since = chain[0][1].low
        below = [(minorant, part) for minorant, part in self._curve if part.high <= since]
        if not below or below[-1][1].high < since:
            below = []  # between the curve and the chain is a hole, which no certificate may have

        cost = self.question.problem.cost_model
        assert isinstance(cost, BatchCost)  # prices are asked of no other
        try:
            both, charges = [*below, *chain], self.question.by_class
            classes = charges and charges[0]["classes"]
            certificate = certify_chain(self.instance, cost, since, both, classes)
        except UsageError as error:
            return None, f"the checker refuses it: {error}"

        return certificate, None

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
        rows = [row for row in self.rows if row.value is not None]
        sign = 1 if self.question.fewest else -1
        return min(rows, key=lambda row: sign * (row.value or 0), default=None)

    @cached_property
    def best_schedule(self) -> Evaluation | None:
        """The schedule of the offline search at the best rate or number of workers, judged."""
        if self.served is None:
            return None

        with warnings.catch_warnings():  # about the range of the cost model
            warnings.simplefilter("ignore")
            return evaluate(self.question.problem_at(self.served[0]), self.served[1])

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
        arrivals = self.instance.given_arrivals
        span = float(arrivals.max() - arrivals.min())
        if value is None or not span > 0:
            return None, None  # nothing was attained, or all arrive at once

        scale, workers = value, self.question.count
        if self.question.fewest:
            scale, workers = self.question.rate_scale, int(value)
        rate = scale * (len(arrivals) - 1) / span  # as many gaps lie in this span
        return rate, rate / workers

    @property
    def arriving(self) -> str:
        """What arrives at the rates of `loads`: requests, or sessions of them."""
        return "requests" if self.instance.after is None else "sessions"

    @property
    def verdict(self) -> str:
        """What a policy attains, and what is impossible for any schedule, in a sentence."""
        return f"{self.question.words}: {self._attained_in_words()}; {self._proved_in_words()}"

    def _attained_in_words(self) -> str:
        """Say what the best policy attains."""
        best = self.best
        if best is None or best.value is None:
            return "no policy attains it" + (" so far" if self.interrupted else "")

        if not self.question.fewest:
            until = "up to" if best.missed is not None else "at least up to"
            return f"{best.policy} attains it {until} rate scale {self._rate_in_words(best.value)}"

        words = f"{best.policy} attains it with workers {number(best.value)}"
        rate, _ = self.loads(best.value)
        if rate:
            scale = self.question.rate_scale
            words += f", at {scale:g} times the traffic" if scale != 1 else ""
            words += f" ({rate:.3g} {self.arriving}/s)"

        return words

    def _proved_in_words(self) -> str:
        """Say what is impossible for any schedule."""
        if self.bound is not None:
            if self.question.fewest:
                return f"impossible for any schedule with workers {number(self.bound)} or fewer"
            rate_scale = self._rate_in_words(self.bound)
            return f"impossible for any schedule from rate scale {rate_scale} on"
        if self.instance.after is not None:
            return (
                "nothing is proved impossible, since no bound on SLOs is proved for sessions (on "
                "mean_session_completion there is one: `bound`)"
            )

        return "nothing is proved impossible"

    def _rate_in_words(self, scale: float) -> str:
        rate, _ = self.loads(scale)
        return number(scale) + (f" ({rate:.3g} {self.arriving}/s)" if rate else "")

    def __repr__(self) -> str:
        return f"<Capacity {self.instance.name!r}: {self.verdict}>"

    _repr_html_ = html_of_frame

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each policy, as far as `Reach` has it, without the points."""
        import pandas as pd

        rows = pd.DataFrame([row.to_dict(self.searched) for row in self.rows])
        return rows.drop(columns="points", errors="ignore")

    def _schedule_to_dict(self) -> dict[str, Any] | None:
        """Return what a file says of the offline search's schedule: attainment, and each p99."""
        judged = self.best_schedule
        if judged is None or self.served is None:
            return None

        names = ("slo_attainment", *(name for name in judged.metrics if name.startswith("p99_")))
        return {self.searched: self.served[0], **{name: judged.metrics[name] for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a capacity file."""
        best, asked, value = self.best, self.question, self.value
        rates = not asked.fewest
        per_second = None
        if rates and self.instance.after is None:
            per_second, _ = self.loads(1.0)

        data = head("optsched-capacity", "capacity", self.instance)
        data |= {
            "cost_model": cost_model_reference(self.instance, asked.problem.cost_model),
            "seed": asked.seed,
            "attainment": asked.attainment,
            "percentiles": dict(asked.percentiles),
            "verdict": self.verdict,
            "requests_per_second": per_second,
            "slos": slos_of_all(self.instance),
            "searched": self.searched,
            "router": asked.router,
            "policies": [row.to_dict(self.searched) for row in self.rows],
            "best_rate_scale": value if rates else None,
            "best_origin": None if best is None else best.policy,
            "impossible_rate_scale": self.bound if rates else None,
            "bound_origin": None if self.bound is None else self.bound_origin,
            "scope": self.scope.to_dict() if rates else None,
            "best_schedule": self._schedule_to_dict(),
            "bound_points": [list(point) for point in self.bound_points],
            "interrupted": self.interrupted,
        }
        workers = {"rate_scale": asked.rate_scale, "fewest": value, "impossible": self.bound}
        if asked.problem.pools is not None:
            data["pools"] = asked.problem.pools.to_dict()

        return {**data, "workers": {"given": asked.count} if rates else workers}
