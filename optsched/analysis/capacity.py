"""How much load, or how few workers, keep requests within their SLOs: by policy, and proved."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from optsched.analysis.capacity_search import CapacitySearch
from optsched.analysis.reached import Capacity, Question, Reach
from optsched.costs.cost import CostModel, cost_for
from optsched.costs.machine import Pools
from optsched.files.read_write import as_instance
from optsched.policies import make_policy, policies as registry, runner_of
from optsched.policies.routers import DEFAULT as ROUTER
from optsched.problem.budget import Budget
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, UsageError, check_keywords
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.service import SLOS
from optsched.problem.specs import parse_spec

POLICIES = ("fcfs", "vllm-v1", "sarathi", "edf", "least-slack", "late-last", "paced")
"""The policies that run if none is asked for, as far as the instance allows."""


def capacity(
    instance: Instance | str | Path,
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
    pools: Pools | None = None,
    **slos: float | None,
) -> Capacity:
    """Return the largest load within SLOs, or the fewest workers, of policies and of all schedules.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
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
        Seconds for the bound and the simulations. Each policy has an equal share of what those
        before it have left.
    seed : int
        Seed of everything that is random, the same at every rate.
    progress : callable, optional
        Called as ``progress(policy, value, attainment)`` after every simulation.
    stop : threading.Event, optional
        When it is set, the simulations end. Ctrl-C has the same effect. What was found
        until then is kept.
    search_s : float
        Seconds for the offline search, which knows true lengths and what arrives when
        (`optsched.optimize.search.on_time`). It begins with what the best policy reaches. 0: none.
    pools : Pools, optional
        Machines with roles, in place of equal workers. The offline search does not know them.
    **slos : float
        SLOs of every request by name (``slo_ttft``, ``slo_tpot``, ``slo_gap``, ``slo_latency``), in
        place of the instance's columns of their names.

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
    check_keywords(capacity, slos, SLOS)
    instance = as_instance(instance)
    check_whole(seed, "seed", 0)
    limited = with_slos(instance, slos)
    cost = cost_for(limited, cost_model)
    asked = Question(attainment, workers, router, rate_scale, tolerance, seed, pools)

    if search_s > 0 and limited.in_rounds:
        raise UsageError(
            "search: found an instance in rounds; expected one in seconds for the offline search"
        )

    if search_s > 0 and pools is not None:
        raise UsageError("search: found pools; expected equal workers for the offline search")

    search = CapacitySearch(limited, cost, asked, Budget(time_limit_s, stop=stop), progress)
    search.check_alone()
    if not asked.auto and not limited.release.max() > 0:
        raise InputError("requests.arrival: found one time only; expected arrivals over time")

    specs = _specs(limited, policies)
    rows: list[Reach] = []
    impossible: float | int | None = None
    runs = len(specs) + (search_s > 0)

    try:
        impossible = search.impossible()
        for place, spec in enumerate(specs):
            rows.append(search.reach(spec, impossible, 1.0 / (runs - place)))
        if search_s > 0:
            rows.append(search.offline(rows, impossible, search_s))
    except KeyboardInterrupt:
        search.interrupted = True

    return Capacity(
        instance=instance,
        slos={name: float(limit) for name, limit in slos.items() if limit is not None},
        cost_model=cost,
        question=asked,
        rows=tuple(rows),
        impossible=impossible,
        bounded=search.bounds,
        interrupted=search.interrupted,
    )


def _specs(instance: Instance, asked: Iterable[str] | None) -> list[str]:
    """Return the policies that run, each of which can be made."""
    if asked is None:
        known = [name for name in POLICIES if name in registry()]
        return [name for name in known if runner_of(make_policy(name)[0]).allows(instance) is None]

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
