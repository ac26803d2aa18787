"""The search for the largest rate, or the fewest workers, of policies and of all schedules."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optsched.analysis.reached import Question, Reach
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import SHARE, Ask, Interval
from optsched.costs.fleet import MAX_MACHINES
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.on_time import Served, serve_in_time
from optsched.policies import behind, is_clairvoyant, make_policy
from optsched.policies.run import run_within
from optsched.problem.budget import Budget, Progress
from optsched.problem.errors import LoopError, OutOfTimeError, PolicyError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.metrics import served_well
from optsched.problem.schedule import Schedule

MAX_SCALE = 2.0**20
"""Rate scales beyond this, or below its inverse, are not tried."""
Found = dict[float, tuple[int, bool]]
"""How many are within their SLOs by rate or workers, and whether that is what is asked."""
OFFLINE = "offline search"
"""The name of the offline search among the rows."""
# The search for the smallest impossible rate ends within this, relative to it.
_FINE = 0.002
# The share of the time for the smallest impossible rate. The best one so far counts.
_BOUND = 0.5
# Where so many times the workers close less than this share of what is missing, no more are tried.
_TIMES, _BRINGS = 4, 0.1
# The share of the time left that the offline search spends on one rate. A number of workers has all
# of it, since the first that is missed ends the search.
_TRY = 0.3
# From so many times the rate that work excludes on, prices are tried for all larger ones.
_FASTER = (1.0, 1.1, 1.25, 1.5, *(2.0**k for k in range(1, 13)))


@dataclass(eq=False)
class CapacitySearch:
    """Simulations and bounds at rates and numbers of workers, with what they said.

    ``interrupted`` says whether the work was stopped early, ``served`` is the best value of the
    offline search with its schedule, ``bounds`` has the shares of requests that no schedule
    exceeds, by rate scale or workers, and ``bound_origin`` is the bound that what is impossible is
    of. With ``certify`` prices exclude all larger rates, too. The ``chain`` has their intervals,
    each with the number of its minorant.
    """

    asked: Question
    budget: Budget
    progress: Callable[[Progress], None] | None
    certify: bool = False
    chain: list[tuple[int, Interval]] = field(default_factory=list)
    interrupted: bool = False
    bounds: dict[float, float] = field(default_factory=dict)
    served: tuple[float, Schedule] | None = None
    bound_origin: str = "slo-work"

    @property
    def instance(self) -> Instance:
        """The instance, with its SLOs as columns."""
        return self.asked.problem.instance

    @property
    def need(self) -> int:
        """The fewest requests that attain what is asked."""
        return self.asked.need(self.instance.n)

    def check_alone(self) -> None:
        """Raise UsageError if too many requests cannot be within their SLOs even alone."""
        n = self.instance.n
        if self.instance.after is not None:
            return

        alone = most_within(self.instance, self.asked.problem.cost_model, None, n + 1)
        if alone < self.need:
            share = math.floor(1e4 * alone / n) / 1e4
            raise UsageError(
                f"SLO: found {n - alone} of {n} requests that cannot be within "
                f"theirs even alone; expected longer limits"
                + (f", or an attainment of at most {share:g}" if share > 0 else "")
            )

    def possible(self, value: float) -> bool:
        """Whether the bound leaves the attainment possible."""
        within = self.asked.max_within(value)
        self.bounds[value] = within / self.instance.n
        return within >= self.need

    def impossible(self) -> float | int | None:
        """Return the smallest rate, or the most workers, proved impossible so far, or None.

        From this rate on, all are: the bound of `optsched.bounds.service` falls with the rate, and
        below it intervals of rates are excluded one after another (`optsched.bounds.slo_prices`).
        """
        part = self.budget.part(_BOUND)
        if self.asked.fewest:
            return self._fewer_by_prices(self._too_few(part), part)

        high = self._too_fast(part)
        return None if high is None else self._chained(high, part)

    def _too_fast(self, budget: Budget) -> float | None:
        low, high = None, 1.0
        while self.possible(high):
            low, high = high, 2 * high
            if high > MAX_SCALE or budget.over:
                return None

        while not budget.over and (low is None or high > low * (1 + _FINE)):
            middle = high / 2 if low is None else math.sqrt(low * high)
            if middle < 1 / MAX_SCALE:
                break
            low, high = (middle, high) if self.possible(middle) else (low, middle)

        return high

    def _chained(self, high: float, budget: Budget) -> float:
        """Return the least rate from which on intervals that are excluded lie side by side."""
        asks, place, known = self.asked.asks(), 0, high
        if self.certify:
            high = self._onwards(asks, high, budget)

        while place < len(asks) and not budget.over:
            ask, need = asks[place]
            interval = ask.below(high, need, budget)
            if interval is not None:
                self.chain.append((place, interval))
                high, last = interval.low, high
                if high < known:
                    self.bound_origin = SHARE.name
                    self.bounds[high] = (need - 1) / self.instance.n
            if interval is None or high > last * (1 - _FINE):
                place += 1  # another minorant of a table may exclude more

        return min(high, known)

    def _onwards(self, asks: Sequence[tuple[Ask, int]], known: float, budget: Budget) -> float:
        """Return a rate from which on prices exclude all others, or the one that is known."""
        for times in _FASTER:
            for place, (ask, need) in enumerate(asks):
                interval = ask.onwards(known * times, need, budget)
                if interval is not None:
                    self.chain.append((place, interval))
                    return interval.low

        return known

    def _too_few(self, budget: Budget) -> int | None:
        if self.possible(1):
            return None

        low, high = 1, 2
        while not budget.over and not self.possible(high):
            low, high = high, 2 * high
        return _last_missed(low, high, self.possible, budget)

    def _fewer_by_prices(self, known: int | None, budget: Budget) -> int | None:
        """Return the most workers that prices exclude, too, from those known on."""
        count = (known or 0) + 1
        while not budget.over and count <= MAX_MACHINES:
            asks = self.asked.asks(count)
            for ask, need in asks:
                most = ask.between(need, budget.part(1 / len(asks))).most
                if most < need:
                    break
            else:
                break

            self.bound_origin = SHARE.name
            self.bounds[count] = most / self.instance.n
            known, count = count, count + 1

        return known

    def reach(self, spec: str, impossible: float | int | None, share: float) -> Reach:
        """Return what a policy reaches in a share of the time left, or what is known by then."""
        made, info = make_policy(spec)
        row = Reach(spec, clairvoyant=is_clairvoyant(made, info, self.instance))
        found: Found = {}
        budget = self.budget.part(share)
        error = None

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")

                def meets(value: float) -> bool:
                    return self._meets(spec, found, value, budget)

                if self.asked.fewest:
                    self._fewest(meets, impossible, found)
                else:
                    self._largest(meets, impossible)
        except _StoppedError:
            self.interrupted = True
            error = "interrupted"
        except KeyboardInterrupt:
            self.interrupted = True
            self.budget = Budget(0.0)
            error = "interrupted"
        except (LoopError, PolicyError, _NoUseError) as problem:
            error = str(problem)

        return self._row(row, found, budget.spent_s, error)

    def _row(self, row: Reach, found: Found, wall_s: float, error: str | None) -> Reach:
        auto, n = self.asked.fewest, self.instance.n
        met = [value for value, (_, met) in found.items() if met]
        value = (min if auto else max)(met) if met else None
        missed = [other for other, (_, met) in found.items() if not met]
        if value is not None:
            missed = [other for other in missed if (other < value if auto else other > value)]
        if value is None and error is None:
            error = "it attains this at no value tried"
        if value is not None and error == "interrupted":
            error = None

        return replace(
            row,
            value=int(value) if auto and value is not None else value,
            attainment=None if value is None else found[value][0] / n,
            missed=(max if auto else min)(missed) if missed else None,
            points=tuple(sorted((at, good / n) for at, (good, _) in found.items())),
            wall_s=wall_s,
            error=error,
        )

    def _meets(self, spec: str, found: Found, value: float, budget: Budget) -> bool:
        if budget.over:
            raise _StoppedError

        try:
            asked = self.asked.at(value)
            policy = behind(spec, self.asked.router) if asked.workers > 1 else spec
            judged = run_within(asked, policy, budget, self.asked.seed).evaluation
        except OutOfTimeError:
            raise _StoppedError from None

        good = served_well(judged)
        count = 0 if good is None else int(good.sum())
        found[value] = count, self.asked.meets(judged, count)
        self._tell(spec, value, count)
        return found[value][1]

    def _tell(self, name: str, value: float, good: int) -> None:
        if self.progress is not None:
            words = f"{name} at {value:.4g}: {good / self.instance.n:.4f}"
            self.progress(Progress(self.budget.spent_s, doing=words))

    def offline(
        self, rows: Sequence[Reach], impossible: float | int | None, seconds: float
    ) -> Reach:
        """Return what the offline search reaches from there on where the best policy is."""
        budget = Budget(min(seconds, self.budget.left_s), stop=self.budget.stop)
        found: Found = {}
        known: Served | None = None

        def meets(value: float) -> bool:
            nonlocal known
            if budget.over:
                raise _StoppedError

            part, start = (1.0, None) if self.asked.fewest else (_TRY, known)
            problem, enough = self.asked.at(value), self.asked.enough(self.instance)
            more: dict[str, Any] = {"enough": enough, "seed": self.asked.seed, "start": start}
            served = serve_in_time(problem, budget.part(part), **more)
            count = 0 if served is None else served.total
            self._tell(OFFLINE, value, count)
            judged = (
                evaluate(problem, served.schedule) if served and self.asked.percentiles else None
            )
            found[value] = count, self.asked.meets(judged, count)
            if served is None or not found[value][1]:
                return False

            known = served
            best = None if self.served is None else self.served[0]
            if best is None or (value < best if self.asked.fewest else value > best):
                self.served = value, served.schedule

            return True

        values = [row.value for row in rows if row.value is not None]
        try:
            if self.asked.fewest:
                self._fewer(meets, min(values, default=None), impossible)
            else:
                self._faster(meets, max(values, default=None), impossible)
        except _StoppedError:
            pass  # its time is up
        except KeyboardInterrupt:
            self.budget = Budget(0.0)

        over = self.budget.over
        self.interrupted = self.interrupted or over
        error = "interrupted" if over else None
        return self._row(Reach(OFFLINE, clairvoyant=True), found, budget.spent_s, error)

    def _faster(
        self, meets: Callable[[float], bool], low: float | None, impossible: float | None
    ) -> None:
        """Try larger rates than the largest that is known, and smaller ones than what is missed."""
        high = math.inf if impossible is None else float(impossible)
        scale, best = low or min(1.0, high / 2), None
        while scale > 1 / MAX_SCALE and high > scale * (1 + self.asked.tolerance):
            if meets(scale):
                best = scale
            else:
                high = scale

            known = best or min(scale, high / 4)
            scale = 1.5 * known if high == math.inf else math.sqrt(known * high)

    def _fewer(
        self, meets: Callable[[float], bool], known: float | None, impossible: float | None
    ) -> None:
        """Try one worker less than is known to do, again and again; without any, more of them."""
        low = int(impossible or 0)  # too few
        count = low + 1 if known is None else int(known)
        while not meets(count):
            if known is not None or count >= MAX_MACHINES:
                return

            count += max(1, (count - low) // 2)

        while count - 1 > low and meets(count - 1):
            count -= 1

    def _largest(self, meets: Callable[[float], bool], impossible: float | None) -> None:
        high = impossible
        low = 1.0 if high is None else high / 1.25
        while not meets(low):
            low, high = low / 1.5, low
            if low < 1 / MAX_SCALE:
                return

        while high is None:
            if low > MAX_SCALE:
                return
            if meets(2 * low):
                low *= 2
            else:
                high = 2 * low

        while high > low * (1 + self.asked.tolerance):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if meets(middle) else (low, middle)

    def _fewest(
        self, meets: Callable[[float], bool], impossible: float | None, found: Found
    ) -> None:
        low = int(impossible or 0)  # too few
        high = low + 1
        limit = min(MAX_MACHINES, max(self.instance.n, high))

        while not meets(high):
            if high == limit:
                return

            self._check_use(found, high)
            low, high = high, min(limit, high + max(1, high // 2))

        _last_missed(low, high, meets, Budget(None))

    def _check_use(self, found: Found, high: int) -> None:
        """Raise if several times as many workers bring almost nothing of what is missing.

        Attainment need not rise with workers: in sessions, requests come when others end, so that
        more workers may have more of them at once.
        """
        few = max((good for at, (good, _) in found.items() if at <= high / _TIMES), default=0)
        best = max(good for good, _ in found.values())
        if few == 0 or best - few > _BRINGS * (self.need - few):
            return

        n = self.instance.n
        raise _NoUseError(
            f"more workers do not help: it attains {few / n:.4f} with {int(high / _TIMES)} workers "
            f"or fewer, and {best / n:.4f} with up to {high}"
        )


def _last_missed(low: int, high: int, met: Callable[[int], bool], budget: Budget) -> int:
    """Return the most workers that do not do, between some that do not and some that do."""
    while not budget.over and high > low + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)

    return low


class _NoUseError(Exception):
    """More workers do not help."""


class _StoppedError(Exception):
    """The time is up, or the work was stopped."""
