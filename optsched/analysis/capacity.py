"""How much load, or how few workers, keep requests within their SLOs: by policy, and proved."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from optsched.analysis.reached import Capacity, Reach
from optsched.bounds.service import most_within
from optsched.costs.cost import CostModel, cost_for
from optsched.judge.evaluate import evaluate
from optsched.optimize.search.on_time import serve_in_time
from optsched.policies import is_clairvoyant, make_policy, policies as registry, runner_of
from optsched.policies.engine.simulate import simulate
from optsched.policies.routers import DEFAULT as ROUTER, MAX_WORKERS, ROUTERS, check_workers
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, LoopError, PolicyError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.metrics import served_well
from optsched.problem.specs import is_file, parse_spec

POLICIES = ("fcfs", "vllm", "sarathi", "edf", "least-slack", "late-last", "paced")
"""The policies that run if none is asked for, as far as the instance allows."""

MAX_SCALE = 2.0**20
"""Rate scales beyond this, or below its inverse, are not tried."""

OFFLINE = "offline search"
"""The name of the offline search among the rows."""

_DRAWN = 6
"""Twice as many points of the bound for each doubling of the rate are kept for pictures."""
_FINE = 0.002
"""The search for the smallest impossible rate ends within this, relative to it."""


def scaled(instance: Instance, scale: float) -> Instance:
    """Return an instance whose requests arrive faster by a factor, in the same pattern.

    Parameters
    ----------
    instance : Instance
        An instance in seconds.
    scale : float
        A factor > 0. Gaps between arrivals are divided by it.

    Returns
    -------
    Instance

    Raises
    ------
    InputError
        The instance is in rounds, or the scale is not a number > 0.
    """
    if not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        raise InputError(f"rate_scale: found {scale!r}; expected a number > 0")
    if scale == 1:
        return instance
    if instance.in_rounds:
        raise InputError(
            "time_unit: found 'round'; expected 'second', since only such arrivals can be stretched"
        )
    return replace(instance, arrival=instance.first_arrival + instance.release / scale, known=None)


def capacity(
    instance: Instance,
    policies: Iterable[str] | None = None,
    *,
    cost_model: CostModel | str | Path | None = None,
    attainment: float = 0.99,
    workers: int | str = 1,
    router: str = ROUTER,
    rate_scale: float = 1.0,
    tolerance: float = 0.01,
    time_limit_s: float | None = None,
    seed: int = 0,
    progress: Callable[[str, float, float], None] | None = None,
    stop: threading.Event | None = None,
    search_s: float = 0.0,
    **slos: float | None,
) -> Capacity:
    """Return the largest load within SLOs, or the fewest workers, of policies and of all schedules.

    Parameters
    ----------
    instance : Instance
        Its requests arrive in the same pattern at every rate, with gaps stretched.
    policies : iterable of str, optional
        Policy specifications; default: those of `POLICIES` that the instance allows.
    cost_model : BatchCost, str or path, optional
        An instance in seconds needs one.
    attainment : float
        Share of the requests that must be within all their SLOs, above 0 and at most 1.
    workers : int or "auto"
        Number of equal workers behind a router; ``"auto"``: the fewest are searched for.
    router : str
        A name in `optsched.policies.routers.ROUTERS`.
    rate_scale : float
        The rate for ``workers="auto"``, as a multiple of the instance's.
    tolerance : float
        The search for a rate ends when the largest that is attained and the smallest that is not
        differ by this much, relative to the former.
    time_limit_s : float, optional
        Seconds after which no further simulation starts.
    seed : int
        Seed of everything that is random, the same at every rate.
    progress : callable, optional
        Called as ``progress(policy, value, attainment)`` after every simulation.
    stop : threading.Event, optional
        When it is set, no further simulation starts. Ctrl-C has the same effect. What was found
        until then is kept.
    search_s : float
        Seconds for the offline search, which knows true lengths and what arrives when, for one
        worker (`optsched.optimize.search.on_time`). It begins at the best policy's rate. 0: none.
    **slos : float
        SLOs of every request by name (``slo_ttft``, ``slo_tpot``, ``slo_gap``, ``slo_latency``), in
        place of the instance's columns of their names.

    Returns
    -------
    Capacity

    Raises
    ------
    InputError, UsageError
        A value is out of its range; there is no SLO, or so many requests cannot be within theirs
        even alone that the attainment is impossible at any rate; a policy is unknown or has
        workers of its own choice; a rate is searched for and all requests arrive at once, or in
        rounds.

    Notes
    -----
    A policy's attainment need not fall with the rate, since its decisions change. The value is the
    largest that bisection found. The bound of `optsched.bounds.service` does fall, so that all
    rates from ``impossible`` on are impossible.
    """
    told = with_slos(instance, slos)
    cost = cost_for(told, cost_model)
    if not (isinstance(attainment, (int, float)) and 0 < attainment <= 1):
        raise InputError(f"attainment: found {attainment!r}; expected a share > 0 and <= 1")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: found {tolerance!r}; expected a number > 0 and < 1")
    if router not in ROUTERS:
        raise InputError(f"router {router!r} is unknown; known are {', '.join(ROUTERS)}")
    count = None if workers == "auto" else check_workers(workers)
    if search_s > 0 and (count != 1 or told.in_rounds):
        raise UsageError(
            "search: found several workers or an instance in rounds; expected one worker and an "
            "instance in seconds for the offline search"
        )
    base = scaled(told, rate_scale)
    if count is not None and rate_scale != 1:
        raise UsageError(
            f"rate_scale: found {rate_scale:g} and a number of workers, for which the rate is "
            "searched for; expected it with workers 'auto'"
        )
    search = _Search(base, cost, attainment, count, router, seed, tolerance, progress, stop)
    if time_limit_s is not None:
        search.until = time.perf_counter() + time_limit_s
    search.check_alone()
    if count is not None and not base.release.max() > 0:
        raise InputError("requests.arrival: found one time only; expected arrivals over time")
    specs = _specs(told, policies, count)
    rows: list[Reach] = []
    impossible: float | int | None = None
    try:
        impossible = search.impossible_workers() if count is None else search.impossible_scale()
        for spec in specs:
            rows.append(search.reach(spec, impossible))
        if search_s > 0:
            best = max((row.value or 0.0 for row in rows), default=0.0)
            rows.append(search.offline(best or None, impossible, search_s))
    except KeyboardInterrupt:
        search.interrupted = True
    return Capacity(
        instance=instance,
        slos={name: float(limit) for name, limit in slos.items() if limit is not None},
        cost_model=cost,
        attainment=attainment,
        searched="workers" if count is None else "rate_scale",
        workers=count,
        router=router,
        rate_scale=rate_scale,
        rows=tuple(rows),
        impossible=impossible,
        bound_points=tuple(sorted(search.bounds.items())),
        seed=seed,
        interrupted=search.interrupted,
    )


def _specs(instance: Instance, asked: Iterable[str] | None, workers: int | None) -> list[str]:
    """Return the policies that run, each of which can be made."""
    if asked is None:
        known = registry()
        return [
            name for name in POLICIES
            if name in known and runner_of(make_policy(name)[0]).allows(instance) is None
        ]  # fmt: skip
    specs = list(asked)
    if not specs:
        raise UsageError("policies: found an empty list; expected at least one, or none given")
    for spec in specs:
        if "workers" in parse_spec(spec)[1]:
            raise UsageError(
                f"policy {spec!r}: found workers in it; expected them as an option beside it"
            )
        make_policy(spec)
    return specs


def on_workers(spec: str, workers: int, router: str) -> str:
    """Return a policy's specification for a number of workers behind a router.

    Parameters
    ----------
    spec : str
    workers : int
    router : str
        It is left out for a policy that has workers and a balancer of its own.

    Returns
    -------
    str
    """
    if workers == 1:
        return spec
    name, texts = parse_spec(spec)
    own = not is_file(name) and "workers" in registry()[name].parameters
    more = f"workers={workers}" + ("" if own else f",router={router}")
    return f"{spec}{',' if texts else ':'}{more}"


@dataclass
class _Search:
    """Simulations and bounds at rates and numbers of workers, with what they said."""

    base: Instance
    cost: CostModel
    attainment: float
    workers: int | None
    router: str
    seed: int
    tolerance: float
    progress: Callable[[str, float, float], None] | None
    stop: threading.Event | None
    until: float = math.inf
    interrupted: bool = False
    bounds: dict[float, float] = field(default_factory=dict)

    @property
    def need(self) -> int:
        """The fewest requests that attain it."""
        return math.ceil(self.attainment * self.base.n - 1e-9)

    def at(self, value: float) -> tuple[Instance, int]:
        """Return the instance and the workers at a rate scale, or at a number of workers."""
        if self.workers is None:
            return self.base, int(value)
        return scaled(self.base, value), self.workers

    def check_alone(self) -> None:
        """Raise UsageError if too many requests cannot be within their SLOs even alone."""
        most = most_within(self.base, self.cost, None, self.base.n + 1)
        if most < self.need:
            share = math.floor(1e4 * most / self.base.n) / 1e4
            raise UsageError(
                f"SLO: found {self.base.n - most} of {self.base.n} requests that cannot be within "
                f"theirs even alone; expected longer limits"
                + (f", or an attainment of at most {share:g}" if share > 0 else "")
            )

    def possible(self, value: float) -> bool:
        """Whether the bound leaves the attainment possible."""
        instance, workers = self.at(value)
        most = most_within(instance, self.cost, None, workers)
        self.bounds[value] = most / instance.n
        return most >= self.need

    def impossible_scale(self) -> float | None:
        """Return a rate scale proved impossible, close to the smallest such; None beyond limits."""
        low, high = None, 1.0
        while self.possible(high):
            low, high = high, 2 * high
            if high > MAX_SCALE:
                return None
        while low is None or high > low * (1 + _FINE):
            middle = high / 2 if low is None else math.sqrt(low * high)
            if middle < 1 / MAX_SCALE:
                return high
            if self.possible(middle):
                low = middle
            else:
                high = middle
        for step in range(-_DRAWN, 2 * _DRAWN + 1):  # for pictures
            self.possible(high * 2 ** (step / _DRAWN / 2))
        return high

    def impossible_workers(self) -> int | None:
        """Return the most workers that are proved too few; None if one may do."""
        if self.possible(1):
            return None
        low, high = 1, 2
        while not self.possible(high):
            low, high = high, 2 * high
        while high > low + 1:
            middle = (low + high) // 2
            if self.possible(middle):
                high = middle
            else:
                low = middle
        return low

    def reach(self, spec: str, impossible: float | int | None) -> Reach:
        """Return what a policy reaches, or what is known of it when the work is stopped."""
        made, info = make_policy(spec)
        row = Reach(spec, clairvoyant=is_clairvoyant(made, info, self.base))
        found: dict[float, int] = {}
        begin = time.perf_counter()
        error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self.workers is None:
                    self._fewest(spec, found, impossible)
                else:
                    self._largest(spec, found, impossible)
        except _StoppedError:
            self.interrupted = True
        except KeyboardInterrupt:
            self.interrupted = True
            self.until = 0.0
        except (LoopError, PolicyError) as problem:
            error = str(problem)
        return self._row(row, found, time.perf_counter() - begin, error)

    def _row(self, row: Reach, found: dict[float, int], wall_s: float, error: str | None) -> Reach:
        met = [value for value, good in found.items() if good >= self.need]
        auto = self.workers is None
        value = (min if auto else max)(met) if met else None
        missed = [
            other for other, good in found.items()
            if good < self.need and (value is None or (other < value if auto else other > value))
        ]  # fmt: skip
        if value is None and error is None:
            error = "interrupted" if self.interrupted else "it attains this at no value tried"
        return replace(
            row,
            value=int(value) if auto and value is not None else value,
            attainment=None if value is None else found[value] / self.base.n,
            missed=(max if auto else min)(missed) if missed else None,
            points=tuple(sorted((at, good / self.base.n) for at, good in found.items())),
            wall_s=wall_s,
            error=error,
        )

    def _meets(self, spec: str, found: dict[float, int], value: float) -> bool:
        if time.perf_counter() >= self.until or (self.stop is not None and self.stop.is_set()):
            raise _StoppedError
        instance, workers = self.at(value)
        schedule = simulate(
            instance, on_workers(spec, workers, self.router), self._model, seed=self.seed
        )
        good = served_well(evaluate(instance, schedule, self._model))
        found[value] = 0 if good is None else int(good.sum())
        if self.progress is not None:
            self.progress(spec, value, found[value] / instance.n)
        return found[value] >= self.need

    def offline(self, low: float | None, impossible: float | None, seconds: float) -> Reach:
        """Return what the offline search reaches from a rate on that a policy attains."""
        begin, found, points = time.perf_counter(), None, {}
        budget = Budget(max(0.0, min(seconds, self.until - begin)), stop=self.stop)
        high = math.inf if impossible is None else float(impossible)
        scale = low or min(1.0, high / 2)
        missed, best = None, None
        while not budget.over and scale > 1 / MAX_SCALE and high > scale * (1 + self.tolerance):
            served = serve_in_time(
                scaled(self.base, scale), self.cost, budget.part(0.3), enough=self.need,
                seed=self.seed, start=found,
            )  # fmt: skip
            points[scale] = (0 if served is None else served.total) / self.base.n
            if self.progress is not None:
                self.progress(OFFLINE, scale, points[scale])
            if served is not None and served.total >= self.need:
                best, found = scale, served
            else:
                missed = high = scale
            known = best or min(scale, high / 4)
            scale = 1.5 * known if high == math.inf else math.sqrt(known * high)
        return Reach(
            OFFLINE, best, None if best is None else points[best], missed,
            tuple(sorted(points.items())), True, time.perf_counter() - begin,
            None if best is not None else "it attains this at no value tried",
        )  # fmt: skip

    @property
    def _model(self) -> CostModel | None:
        return None if self.base.in_rounds else self.cost

    def _largest(self, spec: str, found: dict[float, int], impossible: float | None) -> None:
        high = impossible
        low = 1.0 if high is None else high / 1.25
        while not self._meets(spec, found, low):
            low, high = low / 1.5, low
            if low < 1 / MAX_SCALE:
                return
        while high is None:
            if low > MAX_SCALE:
                return
            if self._meets(spec, found, 2 * low):
                low *= 2
            else:
                high = 2 * low
        while high > low * (1 + self.tolerance):
            middle = math.sqrt(low * high)
            if self._meets(spec, found, middle):
                low = middle
            else:
                high = middle

    def _fewest(self, spec: str, found: dict[float, int], impossible: int | float | None) -> None:
        low = int(impossible or 0)  # too few
        high = low + 1
        most = min(MAX_WORKERS, max(self.base.n, high))
        while not self._meets(spec, found, high):
            if high == most:
                return
            low, high = high, min(most, high + max(1, high // 2))
        while high > low + 1:
            middle = (low + high) // 2
            if self._meets(spec, found, middle):
                high = middle
            else:
                low = middle


class _StoppedError(Exception):
    """The time is up, or the work was stopped."""
