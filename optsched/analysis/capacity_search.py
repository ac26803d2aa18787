"""The search for the largest rate, or the fewest workers, of policies and of all schedules.

Work alone is the bound of `optsched.bounds.service`, at one rate or number of workers. Prices are
those of `optsched.bounds.slo_prices`, which bound how many requests are in time at all rates of an
interval. Each is asked of a minorant: a linear cost model under which no batch takes longer than
under the problem's, which is itself its only one if it is linear. Under a table charges by class of
batch length (`optsched.bounds.class_work`) are asked, too.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from optsched.analysis.capacity_answer import Reach
from optsched.analysis.capacity_question import Question, with_classes
from optsched.bounds.service import most_within
from optsched.bounds.slo_prices import Ask, Interval
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
Tried = dict[float, tuple[int, bool]]
"""By rate or workers, how many are within their SLOs, and whether that attains what is asked."""
OFFLINE = "offline search"
"""The name of the offline search among the rows."""
# The search for the smallest impossible rate ends within this, relative to it.
_TOLERANCE = 0.002
# The share of the time for the smallest impossible rate. The best one so far counts.
_BOUND_SHARE = 0.5
# The share of that time for charges by class, under a table.
_CLASSES_SHARE = 0.4
# Where so many times the workers close less than this share of what is missing, no more are tried.
_TIMES_WORKERS, _MIN_BROUGHT = 4, 0.1
# The share of the time left that the offline search spends on one rate. A number of workers has all
# of it, since the first that is missed ends the search.
_RATE_SHARE = 0.3
# From so many times the rate that work excludes on, prices are tried for all larger ones.
_ONWARDS_FROM = (1.0, 1.1, 1.25, 1.5, *(2.0**k for k in range(1, 13)))


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
            return  # no bound on SLOs is proved for sessions

        # With more workers than requests, each request may have one of its own. None: the SLOs are
        # the instance's.
        alone = most_within(self.instance, self.asked.problem.cost_model, None, n + 1)
        if alone < self.need:
            share = math.floor(1e4 * alone / n) / 1e4  # rounded down, so that it is possible
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
        budget = self.budget.part(_BOUND_SHARE)
        self.asked = with_classes(self.asked, budget.part(_CLASSES_SHARE))
        if self.asked.fewest:
            return self._more_workers_by_prices(self._workers_by_work(budget), budget)

        rate = self._rate_by_work(budget)
        return None if rate is None else self._lower_rate_by_prices(rate, budget)

    def _rate_by_work(self, budget: Budget) -> float | None:
        """Return the smallest rate that work alone excludes, by bisection; None without any."""
        low, high = None, 1.0  # ``low`` is possible, and ``high`` will not be
        while self.possible(high):
            low, high = high, 2 * high
            if high > MAX_SCALE or budget.over:
                return None

        # As long as no rate is known to be possible, halve.
        while not budget.over and (low is None or high > low * (1 + _TOLERANCE)):
            middle = high / 2 if low is None else math.sqrt(low * high)
            if middle < 1 / MAX_SCALE:
                break
            low, high = (middle, high) if self.possible(middle) else (low, middle)

        return high

    def _lower_rate_by_prices(self, known: float, budget: Budget) -> float:
        """Return the least rate from which on intervals that are excluded lie side by side.

        `known`: a rate from which on work alone excludes all. Every interval ends where the last
        one begins. With ``certify`` the first one has no end, and may begin above ``known``.
        """
        # ``place`` is that of the minorant which is asked now, and ``high`` where the next interval
        # ends. Each minorant is asked until it brings nearly nothing, for rates up to ``high`` at
        # which fewer than `need` requests are in time.
        asks, place, high = self.asked.asks(), 0, known
        if self.certify:
            high = self._rate_onwards(asks, known, budget)

        while place < len(asks) and not budget.over:
            ask, need = asks[place]
            interval = ask.below(high, need, budget)
            if interval is None:
                place += 1
                continue

            self.chain.append((place, interval))
            last, high = high, interval.low
            # Of rates above `known` work alone says as much.
            if high < known:
                self.bound_origin = ask.bound.name
                self.bounds[high] = (need - 1) / self.instance.n
            if high > last * (1 - _TOLERANCE):
                place += 1  # another minorant of a table, or its classes, may exclude more

        return min(high, known)

    def _rate_onwards(self, asks: Sequence[tuple[Ask, int]], known: float, budget: Budget) -> float:
        """Return a rate from which on prices exclude all others, or the one that is known.

        A certificate needs such an interval without an end. Rates from `known` on are excluded by
        work as well, so that the first factor at which prices do it will do.
        """
        for factor in _ONWARDS_FROM:
            for place, (ask, need) in enumerate(asks):
                interval = ask.onwards(known * factor, need, budget)
                if interval is not None:
                    self.chain.append((place, interval))
                    return interval.low

        return known

    def _workers_by_work(self, budget: Budget) -> int | None:
        """Return the most workers that work alone excludes; None if one may do."""
        if self.possible(1):
            return None

        # ``low`` is always excluded. If time is up, it is the answer.
        low, high = 1, 2
        while not budget.over and not self.possible(high):
            low, high = high, 2 * high
        return _last_failing(low, high, self.possible, budget)

    def _more_workers_by_prices(self, known: int | None, budget: Budget) -> int | None:
        """Return the most workers that prices exclude, from those on that work excludes.

        `known`: these, or None if work excludes not even one.
        """
        count = (known or 0) + 1
        while not budget.over and count <= MAX_MACHINES:
            # How many can be in time with so many workers, if they are too few, or None.
            too_few = self._too_few_in_time(count, budget)
            if too_few is None:
                break

            in_time, self.bound_origin = too_few
            self.bounds[count] = in_time / self.instance.n
            known, count = count, count + 1

        return known

    def _too_few_in_time(self, workers: int, budget: Budget) -> tuple[int, str] | None:
        """Return how many some prices leave in time, and their bound's name, if these are too few.

        None: they are as many as needed, or more.
        """
        asks = self.asked.asks(workers)
        for ask, need in asks:
            in_time = ask.between(need, budget.part(1 / len(asks))).most
            if in_time < need:
                return in_time, ask.bound.name

        return None

    def reach(self, spec: str, impossible: float | int | None, share: float) -> Reach:
        """Return what a policy reaches in a share of the time left, or what is known by then.

        `impossible`: the rate from which on, or the workers up to which, nothing will do; None if
        nothing is proved.
        """
        policy, info = make_policy(spec)
        row = Reach(spec, clairvoyant=is_clairvoyant(policy, info, self.instance))
        tried: Tried = {}
        budget = self.budget.part(share)
        error = None

        def meets(value: float) -> bool:
            return self._policy_meets(spec, tried, value, budget)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each of many runs would warn of the same
                if self.asked.fewest:
                    self._fewest_workers(meets, impossible, tried)
                else:
                    self._largest_rate(meets, impossible)
        except _StoppedError:
            self.interrupted = True
            error = "interrupted"
        except KeyboardInterrupt:
            self.interrupted = True
            self.budget = Budget(0.0)  # so that the policies after this one end at once
            error = "interrupted"
        except (LoopError, PolicyError, _NoUseError) as problem:
            error = str(problem)

        return self._row(row, tried, budget.spent_s, error)

    def _row(self, row: Reach, tried: Tried, wall_s: float, error: str | None) -> Reach:
        """Return a row with its best value, and with the nearest value beyond that is missed.

        `tried`: by value, how many are within their SLOs, and whether that attains what is asked.
        Attainment need not fall with the rate, so values before the best one may be missed as well.
        """
        fewest, n = self.asked.fewest, self.instance.n
        best_of, next_of = (min, max) if fewest else (max, min)
        met = [value for value, (_, is_met) in tried.items() if is_met]
        missed = [value for value, (_, is_met) in tried.items() if not is_met]
        best = best_of(met) if met else None
        if best is not None:
            missed = [value for value in missed if (value < best if fewest else value > best)]
            # `Reach.error` says why there is no value, and here is one.
            error = None if error == "interrupted" else error
        elif error is None:
            error = "it attains this at no value tried"

        return replace(
            row,
            value=int(best) if fewest and best is not None else best,
            attainment=None if best is None else tried[best][0] / n,
            missed=next_of(missed) if missed else None,
            points=tuple(sorted((value, in_time / n) for value, (in_time, _) in tried.items())),
            wall_s=wall_s,
            error=error,
        )

    def _policy_meets(self, spec: str, tried: Tried, value: float, budget: Budget) -> bool:
        """Simulate a policy at a rate or with workers, note the outcome, and say if it will do.

        `value`: the rate scale or the number of workers. `tried`: where the outcome is noted.
        """
        if budget.over:
            raise _StoppedError

        problem = self.asked.problem_at(value)
        policy = behind(spec, self.asked.router) if problem.workers > 1 else spec
        try:
            judged = run_within(problem, policy, budget, self.asked.seed).evaluation
        except OutOfTimeError:
            raise _StoppedError from None

        in_time = served_well(judged)
        count = 0 if in_time is None else int(in_time.sum())
        tried[value] = count, self.asked.meets(judged, count)
        self._tell(spec, value, count)
        return tried[value][1]

    def _tell(self, name: str, value: float, in_time: int) -> None:
        if self.progress is not None:
            words = f"{name} at {value:.4g}: {in_time / self.instance.n:.4f}"
            self.progress(Progress(self.budget.spent_s, doing=words))

    def offline(
        self, rows: Sequence[Reach], impossible: float | int | None, seconds: float
    ) -> Reach:
        """Return what the offline search reaches, which begins with the best policy's value.

        `rows`: those of policies. `impossible`: as for `reach`. `seconds`: its own time limit.
        """
        budget = Budget(min(seconds, self.budget.left_s), stop=self.budget.stop)
        tried: Tried = {}
        last: Served | None = None

        def meets(value: float) -> bool:
            nonlocal last
            served = self._search_offline(value, tried, budget, last)
            last = last if served is None else served
            return served is not None

        values = [row.value for row in rows if row.value is not None]
        try:
            if self.asked.fewest:
                self._fewer_workers(meets, min(values, default=None), impossible)
            else:
                self._faster_rates(meets, max(values, default=None), impossible)
        except _StoppedError:
            pass  # the search has a time of its own, so this is no interruption
        except KeyboardInterrupt:
            self.budget = Budget(0.0)  # which is over, so that nothing else begins

        over = self.budget.over
        self.interrupted = self.interrupted or over
        error = "interrupted" if over else None
        return self._row(Reach(OFFLINE, clairvoyant=True), tried, budget.spent_s, error)

    def _search_offline(
        self, value: float, tried: Tried, budget: Budget, last: Served | None
    ) -> Served | None:
        """Return a schedule that attains what is asked at a value, or None; note the outcome.

        `value`: the rate scale or the number of workers. `tried`: where the outcome is noted.
        `last`: the last such schedule, at another rate, from which the search begins. One of
        another number of workers is not taken.
        """
        if budget.over:
            raise _StoppedError

        problem = self.asked.problem_at(value)
        start, share = (None, 1.0) if self.asked.fewest else (last, _RATE_SHARE)
        enough = self.asked.enough(self.instance)
        served = serve_in_time(
            problem, budget.part(share), enough=enough, seed=self.asked.seed, start=start
        )
        count = 0 if served is None else served.total
        self._tell(OFFLINE, value, count)
        # Without limits of percentiles the count says all.
        judged = None
        if served is not None and self.asked.percentiles:
            judged = evaluate(problem, served.schedule)
        tried[value] = count, self.asked.meets(judged, count)
        if served is None or not tried[value][1]:
            return None

        best = None if self.served is None else self.served[0]
        if best is None or (value < best if self.asked.fewest else value > best):
            self.served = value, served.schedule

        return served

    def _faster_rates(
        self, meets: Callable[[float], bool], low: float | None, impossible: float | None
    ) -> None:
        """Try larger rates than the largest that is known, and smaller ones than what is missed.

        `meets`: tries a rate, and raises an error when the time is up, which ends the search where
        nothing is proved impossible. `low`: the largest rate that a policy attains. `impossible`:
        the smallest one that is proved to be too large.
        """
        high = math.inf if impossible is None else float(impossible)
        # The rate of the best policy itself comes first, as the search has no schedule there yet.
        scale, best = low or min(1.0, high / 2), None
        while scale > 1 / MAX_SCALE and high > scale * (1 + self.asked.tolerance):
            if meets(scale):
                best = scale
            else:
                high = scale

            # The search may miss what a policy attains. Before it has any, go down quickly, from
            # ``high`` to half of it at most.
            known = best or min(scale, high / 4)
            scale = 1.5 * known if high == math.inf else math.sqrt(known * high)

    def _fewer_workers(
        self, meets: Callable[[float], bool], known: float | None, impossible: float | None
    ) -> None:
        """Try one worker less than is known to do, again and again; without any, more of them.

        `meets`: tries a number of workers. `known`: the fewest with which a policy will do.
        `impossible`: the most that are proved to be too few.
        """
        too_few = int(impossible or 0)
        count = too_few + 1 if known is None else int(known)
        while not meets(count):
            # Where a policy does with so many, more would be no news.
            if known is not None or count >= MAX_MACHINES:
                return

            count += max(1, (count - too_few) // 2)

        while count - 1 > too_few and meets(count - 1):
            count -= 1

    def _largest_rate(self, meets: Callable[[float], bool], impossible: float | None) -> None:
        """Find a rate that is met and a larger one that is missed, and bisect between them.

        `meets`: tries a rate. `impossible`: the smallest one that is proved to be too large.
        """
        high = impossible
        # The first rate lies a little below the impossible one. Go down until one is met.
        low = 1.0 if high is None else high / 1.25
        while not meets(low):
            low, high = low / 1.5, low
            if low < 1 / MAX_SCALE:
                return

        # Nothing is proved impossible, and the first rate was met. Go up until one is missed.
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

    def _fewest_workers(
        self, meets: Callable[[float], bool], impossible: float | None, tried: Tried
    ) -> None:
        """Try half as many workers more until they do, and then bisect down to the fewest.

        `meets`: tries a number of workers and notes it in `tried`. `impossible`: the most workers
        that are proved to be too few.
        """
        too_few = int(impossible or 0)
        count = too_few + 1
        # With a worker for each request, none waits for another.
        limit = min(MAX_MACHINES, max(self.instance.n, count))

        while not meets(count):
            if count == limit:
                return

            self._check_use(tried, count)
            too_few, count = count, min(limit, count + max(1, count // 2))

        # Without a limit here, since `meets` raises an error when the time is up.
        _last_failing(too_few, count, meets, Budget(None))

    def _check_use(self, tried: Tried, workers: int) -> None:
        """Raise if several times as many workers bring almost nothing of what is missing.

        Attainment need not rise with workers: in sessions, requests come when others end, so that
        more workers may have more of them at once.
        """
        earlier = workers / _TIMES_WORKERS
        before = max(
            (in_time for count, (in_time, _) in tried.items() if count <= earlier), default=0
        )
        best = max(in_time for in_time, _ in tried.values())
        # With nobody in time before, it is too early to say.
        if before == 0 or best - before > _MIN_BROUGHT * (self.need - before):
            return

        n = self.instance.n
        raise _NoUseError(
            f"more workers do not help: it attains {before / n:.4f} with {int(earlier)} workers "
            f"or fewer, and {best / n:.4f} with up to {workers}"
        )


def _last_failing(low: int, high: int, meets: Callable[[int], bool], budget: Budget) -> int:
    """Return the most workers that fail, by bisection between ``low``, which do, and ``high``."""
    while not budget.over and high > low + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)

    return low


class _NoUseError(Exception):
    """More workers do not help."""


class _StoppedError(Exception):
    """The time is up, or the work was stopped."""
