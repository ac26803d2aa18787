"""How much load, or how few workers, keep requests within their SLOs: by policy, and proved."""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from optsched.analysis.capacity_answer import Capacity, Reach
from optsched.analysis.capacity_question import (
    Question,
    check_in_seconds,
    with_percentiles_as_slos,
)
from optsched.analysis.capacity_search import CapacitySearch
from optsched.optimize.search.on_time import quick_to_search
from optsched.policies import make_policy, runner_of
from optsched.policies.routers import DEFAULT as ROUTER
from optsched.problem.budget import Budget, Progress
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.workloads.problem import Problem, as_problem

POLICIES = ("fcfs", "vllm-v1", "sarathi", "edf", "least-slack", "late-last", "paced")
"""The policies that run if none is asked for, as far as the instance allows."""

_ATTAINMENT = 0.99
# Seconds for a search that nobody asked for, with at most so many requests and with more.
_SHORT_SEARCH_S, _LONG_SEARCH_S, _MANY_REQUESTS = 10.0, 30.0, 2000


def capacity(
    problem: Problem | Instance | str | Path,
    policies: Iterable[str] | None = None,
    *,
    attainment: float | None = None,
    percentiles: Mapping[str, float] | None = None,
    fewest: bool = False,
    router: str = ROUTER,
    rate_scale: float = 1.0,
    tolerance: float = 0.01,
    time_limit_s: float | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    search_s: float | None = None,
    certify: bool = False,
) -> Capacity:
    """Return the largest load within SLOs, or the fewest workers, of policies and of all schedules.

    Parameters
    ----------
    problem : Problem
        The instance with its SLOs, and the machines. Requests arrive in the same pattern at every
        rate, with gaps stretched.
    policies : iterable of str, optional
        Policy specifications; default: those of `POLICIES` that the instance allows.
    attainment : float, optional
        Share of the requests that must be within all their SLOs, above 0 and at most 1; default:
        0.99.
    percentiles : mapping of str to float, optional
        Limits of percentiles in place of SLOs and an attainment: ``{"p99_ttft": 1.0}``. Each of
        them is kept, by whichever requests. Policies see the limits as SLOs.
    fewest : bool
        Whether to search for the fewest machines like the problem's one, and not for a rate.
    router : str
        Who chooses the worker of a request, a name in `optsched.policies.routers.ROUTERS`.
    rate_scale : float
        The rate with ``fewest``, as a multiple of the instance's.
    tolerance : float
        The search for a rate ends when the largest that is attained and the smallest that is not
        differ by this much, relative to the former.
    time_limit_s : float, optional
        Seconds for the bound and the simulations. Each policy has an equal share of what those
        before it have left.
    seed : int
        Seed of everything that is random, the same at every rate.
    progress : callable, optional
        Called with a `Progress` after every simulation: policy, value and attainment in words.
    stop : threading.Event, optional
        When it is set, the simulations end. Ctrl-C has the same effect. What was found
        until then is kept.
    search_s : float, optional
        Seconds for the offline search, which knows true lengths and what arrives when
        (`optsched.optimize.search.on_time`). It begins with what the best policy reaches. 0: none.
        Default: 10, or 30 with more than 2,000 requests, where it can do the instance: in seconds,
        on equal machines, without sessions.
    certify : bool
        Whether prices are looked for that exclude all larger rates, too, for
        `Capacity.certificate`: of one worker, in seconds.

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
    largest that bisection found. Nor need what can be served at best fall with the rate. All rates
    from the bound on are impossible: that of `optsched.bounds.service` falls with the rate, and
    below it intervals of rates are excluded one after another (`optsched.bounds.slo_prices`).
    """
    problem, percentiles = as_problem(problem), percentiles or {}
    if percentiles and attainment is not None:
        raise UsageError(
            f"attainment: found {attainment:g} beside limits of percentiles; expected none, since "
            "each percentile says its share"
        )

    attainment = _ATTAINMENT if attainment is None else attainment
    if percentiles:
        problem, attainment = with_percentiles_as_slos(problem, percentiles)

    instance = problem.instance
    check_whole(seed, "seed", 0)
    all_limits(instance, None)  # raises an error if there is no SLO
    asked = Question(problem, attainment, fewest, router, rate_scale, tolerance, seed, percentiles)

    if search_s is None:
        search_s = _usual_search_s(problem)
    if search_s > 0 and instance.in_rounds:
        raise UsageError(
            "search: found an instance in rounds; expected one in seconds for the offline search"
        )

    if search_s > 0 and not problem.fleet.equal:
        raise UsageError("search: found machines with roles, or that differ; expected equal ones")

    # `asks` is empty where prices prove nothing: of pools, sessions or rounds.
    is_certifiable = problem.workers == 1 and not fewest and len(percentiles) < 2
    if certify and not (is_certifiable and asked.asks()):
        raise UsageError(
            "certificate: found rounds, several machines or percentiles, or a number of machines; "
            "expected one machine in seconds, and a rate that is searched for"
        )

    search = CapacitySearch(asked, Budget(time_limit_s, stop=stop), progress, certify)
    search.check_alone()
    if not fewest and not np.ptp(instance.given_arrivals) > 0:
        raise InputError("requests.arrival: found one time only; expected arrivals over time")
    if not fewest:
        check_in_seconds(instance)

    specs = _specs(instance, policies)
    rows: list[Reach] = []
    impossible: float | int | None = None
    jobs = len(specs) + (search_s > 0)  # the search has a share of the time as a policy has
    try:
        impossible = search.impossible()
        for place, spec in enumerate(specs):
            # An equal share of the time that those before it have left.
            rows.append(search.reach(spec, impossible, 1.0 / (jobs - place)))
        if search_s > 0:
            rows.append(search.offline(rows, impossible, search_s))
    except KeyboardInterrupt:
        search.interrupted = True

    return Capacity(
        question=search.asked,
        rows=tuple(rows),
        bound=impossible,
        served=search.served,
        bounded=search.bounds,
        interrupted=search.interrupted,
        bound_origin=search.bound_origin,
        chain=tuple(search.chain),
    )


def _usual_search_s(problem: Problem) -> float:
    """Return the seconds of a search that nobody asked for; 0 where it cannot do the instance."""
    instance = problem.instance
    is_able = problem.fleet.equal and problem.pools is None
    if instance.in_rounds or not is_able or not quick_to_search(instance):
        return 0.0

    return _SHORT_SEARCH_S if instance.n <= _MANY_REQUESTS else _LONG_SEARCH_S


def _specs(instance: Instance, asked: Iterable[str] | None) -> list[str]:
    """Return the policies that run, each of which can be made."""
    if asked is None:
        # `allows` returns why it does not run, or None.
        return [
            name for name in POLICIES if runner_of(make_policy(name)[0]).allows(instance) is None
        ]

    specs = list(asked)
    if not specs:
        raise UsageError("policies: found an empty list; expected at least one, or none given")
    for spec in specs:
        _, info = make_policy(spec)  # raises what is wrong with it
        if info.workers is not None:
            raise UsageError(f"policy {spec!r}: found workers in it; expected them as the fleet")

    return specs
