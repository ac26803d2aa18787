"""Which splits of machines into prefill and decode pools can be best, and which are proved not to.

Each split has an interval for every metric: the bound of `optsched.bounds.pools`, which no schedule
on it beats, and the best value of the policies that ran on it. Where no schedule of a split is as
good as one that was found on another, the split is proved worse.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from optsched.bounds.pools import POOLED, POOLED_IN_TIME
from optsched.costs.cost import CostModel
from optsched.costs.machine import Link
from optsched.files.results import cost_model_reference, head
from optsched.optimize.bound import bound as find_bound
from optsched.optimize.strategies import NO_SCHEDULE
from optsched.policies import behind, make_policy
from optsched.policies.routers import DEFAULT as ROUTER
from optsched.policies.run import run_within
from optsched.problem.budget import Budget, Progress
from optsched.problem.columns import check_whole
from optsched.problem.errors import InputError, NoIncumbentError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.limits import slos_of_all
from optsched.problem.markup import html_of_frame, number
from optsched.problem.metrics import time_words
from optsched.problem.objective import TOTAL_LATENCY, Objective
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

POLICIES = ("vllm", "least-work")
"""The policies that run if none is asked for."""
BEST, POSSIBLE, WORSE = "best", "possible", "proved worse than the best found"
"""The verdicts on a split."""
# The largest number of machines to split.
_MAX_MACHINES = 64
_COLUMNS = ("bound", "found", "policy", "verdict")
# Seconds for each bound on a split, at most.
_BOUND_S = 20.0


@dataclass(frozen=True, eq=False)
class Split:
    """What is known of one split.

    Parameters
    ----------
    pools : str
        How many machines prefill, decode or are mixed: ``2p6d`` or ``8m``.
    bounds : dict of str to float
        By metric, what no schedule on the split beats.
    found : dict of str to float
        By metric, the best value of the policies that ran.
    policies : dict of str to str
        By metric, the policy with that value.
    certificates : dict of str to dict
        By metric, a certificate of the bound (`optsched.bounds.pools.verify_pools`), where asked.
    errors : list of str
        Why policies have no schedule.
    """

    pools: str
    bounds: dict[str, float] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    certificates: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def interval(self, metric: str) -> tuple[float | None, float | None, str | None]:
        """Return the bound on a metric, the best value found, and the policy that has it.

        Parameters
        ----------
        metric : str
        """
        return self.bounds.get(metric), self.found.get(metric), self.policies.get(metric)


@dataclass(frozen=True, eq=False)
class Splits:
    """Every split of some machines, with intervals and verdicts.

    Parameters
    ----------
    instance : Instance
    cost_model : CostModel
    link : Link
    slos : dict of str to float
    metrics : tuple of str
        ``mean_latency``, ``mean_ttft``, and ``slo_goodput`` where there are SLOs, with bounds; then
        ``p99_ttft`` and ``p90_latency`` without.
    rows : tuple of Split
        The splits, as far as the work went.
    interrupted : bool
        Whether the work was stopped early.
    """

    instance: Instance
    cost_model: CostModel
    link: Link
    slos: dict[str, float]
    metrics: tuple[str, ...]
    rows: tuple[Split, ...]
    interrupted: bool = False

    def best(self, metric: str) -> Split | None:
        """Return the split with the best value found of a metric, or None if none has one.

        Parameters
        ----------
        metric : str
        """
        known = [row for row in self.rows if metric in row.found]
        return min(known, key=lambda row: Objective(metric).signed(row.found[metric]), default=None)

    def verdict(self, row: Split, metric: str) -> str:
        """Return whether a split is the best found, possible, or proved worse, by a metric.

        Parameters
        ----------
        row : Split
        metric : str
        """
        best = self.best(metric)
        if row is best:
            return BEST

        if best is None or metric not in row.bounds:
            return POSSIBLE

        # What was found elsewhere is better than what nothing on this split beats.
        is_worse = Objective(metric).better(best.found[metric], row.bounds[metric])
        return WORSE if is_worse else POSSIBLE

    def worse(self, metric: str) -> list[str]:
        """Return the splits that are proved worse than the best found.

        Parameters
        ----------
        metric : str
        """
        return [row.pools for row in self.rows if self.verdict(row, metric) == WORSE]

    def cells(self, row: Split, metric: str) -> tuple[float | str | None, ...]:
        """Return `Split.interval` and the verdict.

        Parameters
        ----------
        row : Split
        metric : str
        """
        return *row.interval(metric), self.verdict(row, metric)

    def to_frame(self) -> "pd.DataFrame":
        """Return a row for each metric and split: its bound, the best value found, the verdict."""
        import pandas as pd

        rows = [(name, r.pools, *self.cells(r, name)) for name in self.metrics for r in self.rows]
        return pd.DataFrame(rows, columns=["metric", "pools", *_COLUMNS])

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a splits file."""

        def cells(row: Split) -> dict[str, Any]:
            return {
                name: dict(zip(_COLUMNS, self.cells(row, name), strict=True))
                for name in self.metrics
            }

        rows = [{"pools": row.pools, **cells(row), "errors": row.errors} for row in self.rows]
        return {
            **head("optsched-splits", "splits", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "link": vars(self.link),
            "slos": self.slos,
            "metrics": list(self.metrics),
            "splits": rows,
            "interrupted": self.interrupted,
        }

    _repr_html_ = html_of_frame

    def __repr__(self) -> str:
        worse = {name: self.worse(name) for name in self.metrics}
        return f"<Splits of {self.instance.name!r}: {len(self.rows)} splits, proved worse: {worse}>"


def splits(
    problem: Problem,
    policies: Iterable[str] | None = None,
    *,
    router: str = ROUTER,
    time_limit_s: float | None = None,
    seed: int = 0,
    certify: bool = False,
    prove: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Splits:
    """Return what each split of machines into prefill and decode pools can reach, with proofs.

    Parameters
    ----------
    problem : Problem
        The instance, in seconds if there are to be bounds, and from 2 to 64 equal machines, such as
        ``Fleet.of(8, "llama2-7b-a100", link="bandwidth=50GB/s")``. Without a link, moves take no
        time.
    policies : iterable of str, optional
        Policies that run on every split (default: `POLICIES`).
    router : str
        The router in front of both pools.
    time_limit_s : float, optional
        Seconds for all of the work. Each split has an equal share of what is left.
    seed : int
    certify : bool
        Whether to make certificates of the bounds on mean latency and mean TTFT.
    prove : bool
        Whether to look for bounds. Without them an instance may be in rounds, and have sessions.
    progress : callable, optional
        Called with a `Progress` before the work on each split.
    stop : threading.Event, optional
        When it is set, the work ends, as with Ctrl-C. What was found until then is kept.

    Returns
    -------
    Splits

    Raises
    ------
    InputError, UsageError
        The instance is in rounds, a value is out of its range, a policy is unknown, or the bounds
        are not proved for a feature of the instance, such as sessions or shared prefixes.
    """
    instance, workers = problem.instance, problem.workers
    check_whole(seed, "seed", 0)
    check_whole(workers, "workers", 2, _MAX_MACHINES)
    if not problem.fleet.alike:
        raise UsageError("fleet: found machines that differ; expected equal ones to split")
    if prove and instance.in_rounds:
        raise InputError("time_unit: found 'round'; expected 'second' for splits")

    specs = list(POLICIES if policies is None else policies)
    for spec in specs:
        make_policy(spec)  # an unknown policy fails here, before anything runs

    # All mixed comes first, since its bounds hold for every split.
    names = [f"{workers}m", *(f"{p}p{workers - p}d" for p in range(1, workers))]
    bounded = ("mean_latency", "mean_ttft", *(("slo_goodput",) if instance.slos else ()))
    metrics = (*bounded, "p99_ttft", "p90_latency")
    budget = Budget(time_limit_s, stop=stop)
    rows: list[Split] = []
    interrupted = False
    try:
        for place, name in enumerate(names):
            if budget.over:
                interrupted = True
                break
            if progress is not None:
                progress(Progress(budget.spent_s, doing=f"split {name}"))

            row = Split(name)
            rows.append(row)  # so that what is found of it counts if the work is interrupted
            on_split = replace(problem, fleet=problem.fleet.split(name))
            part = budget.part(1 / (len(names) - place))
            # A bound has `_BOUND_S` seconds at most; the policies have what is left of the part.
            for metric in bounded if prove else ():
                limited = Budget(min(_BOUND_S, part.left_s), stop=part.stop)
                _add_bound(row, on_split, metric, limited, certify=certify, mixed=rows[0])

            for spec in specs:
                try:
                    judged = run_within(on_split, behind(spec, router), part, seed)
                except (*NO_SCHEDULE, ViolationError) as error:
                    row.errors.append(f"{spec}: {error}")
                else:
                    _add_metrics(row, spec, judged.metrics, metrics)
    except KeyboardInterrupt:
        interrupted = True

    return Splits(
        instance=instance,
        cost_model=problem.cost_model,
        link=problem.fleet.link or Link(),
        slos=slos_of_all(instance),
        metrics=metrics,
        rows=(*rows[1:], *rows[:1]),  # mixed machines, which ran first, come last
        interrupted=interrupted or budget.stopped,
    )


def _add_bound(
    row: Split, problem: Problem, metric: str, budget: Budget, *, certify: bool, mixed: Split
) -> None:
    """Add the bound on a metric to a row, and its certificate.

    `certify`: as of `splits`. `mixed`: the row without pools, whose bounds hold for every split:
    with no link and no roles the machines can do whatever they do in a split.
    """
    goal, divisor = Objective(metric), 1
    if metric == "mean_latency":  # the bound is proved for the sum
        goal, divisor = TOTAL_LATENCY, problem.instance.n

    method = POOLED_IN_TIME if metric == "slo_goodput" else POOLED
    result = find_bound(
        problem.about(goal),
        method=method.name,
        certify=certify,
        stop=budget.stop,
        time_limit_s=budget.left_s,
    )
    assert result.bound is not None
    value = result.bound / divisor
    # Both hold. The tighter one is the larger, or where more is better the smaller: in signed
    # values, of which less is better, the largest.
    of_mixed = mixed.bounds.get(metric, value)
    row.bounds[metric] = max(value, of_mixed, key=Objective(metric).signed)
    if result.certificate is not None:
        row.certificates[metric] = result.certificate


def _add_metrics(
    row: Split, spec: str, values: Mapping[str, float | None], metrics: Iterable[str]
) -> None:
    """Add what a policy reaches to a row, where it is the best so far."""
    for name in metrics:
        value, best = values[name], row.found.get(name)
        if value is not None and (best is None or Objective(name).better(value, best)):
            row.found[name] = value
            row.policies[name] = spec


def best_split(
    problem: Problem, policies: Iterable[str] | None = None, **more: Any
) -> tuple[str, str]:
    """Return the split of machines on which policies have the best mean latency, and say so.

    Parameters
    ----------
    problem : Problem
        An instance in rounds or in seconds, and from 2 to 64 equal machines.
    policies : iterable of str, optional
        Policies that run on every split (default: `POLICIES`).
    **more
        Other parameters of `splits`. With a time limit not all splits may be tried.

    Returns
    -------
    pools : str
        The split, such as ``2p6d``, for `Fleet.split`.
    words : str
        One line: which split is taken, and what the others have.

    Raises
    ------
    NoIncumbentError
        No policy has a schedule on any split.
    """
    found = splits(problem, policies, prove=False, **more)
    best = found.best("mean_latency")
    if best is None:
        reasons = "; ".join(dict.fromkeys(error for row in found.rows for error in row.errors))
        raise NoIncumbentError(f"pools: found no split with a schedule ({reasons or 'no time'})")

    latencies = {row.pools: number(row.found.get("mean_latency")) for row in found.rows}
    latency = f"{latencies.pop(best.pools)} {time_words(problem.instance.time_unit)}"
    others = ", ".join(f"{pools} {value}" for pools, value in latencies.items()) or "none"
    # There are as many splits as machines: 1 to all but one prefill, or all are mixed.
    return best.pools, (
        f"pools: {best.pools} is taken, with a mean latency of {latency} by "
        f"{best.policies['mean_latency']}; of {problem.workers} splits others have: {others}"
    )
