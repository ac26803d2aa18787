"""Competitive ratios of policies over many instances."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.compare import best_of_policies, outside_reason
from optsched.analysis.ratio.exact import optimum
from optsched.bounds import lower_bound
from optsched.costs.cost import CostModel, cost_for
from optsched.judge.evaluate import evaluate
from optsched.policies import make_policy
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.instance import Instance

Reference = Literal["optimum", "bound", "h-sf", "best-known"]
REFERENCES: tuple[Reference, ...] = ("optimum", "bound", "h-sf", "best-known")
_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """One policy on one instance: its total latency over the reference lies in [low, high].

    Parameters
    ----------
    policy : str
    instance : int
        Position among the instances.
    name : str
        The instance's.
    tel : float or None
        Mean over the seeds; None if the policy failed.
    low, high : float or None
        Equal where the reference is known exactly. ``high`` is None without a bound.
    error : str or None
        Why there is no latency, or no ratio: an optimum or a bound is one for schedules of its
        own model (`optsched.analysis.compare.outside_reason`), such as those of one worker.
    """

    policy: str
    instance: int
    name: str
    tel: float | None
    low: float | None
    high: float | None
    error: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the ratio is one number."""
        return self.low is not None and self.low == self.high


@dataclass(frozen=True)
class Mean:
    """A mean ratio over instances: it lies in [low, high], each end with its interval.

    Parameters
    ----------
    low, high : float
        Mean of the lower and the upper ends; ``high`` is infinite where a bound is missing.
    interval : tuple of float
        Confidence interval for the mean over instances: the lower limit belongs to ``low``, the
        upper one to ``high``.
    count, failed : int
        Instances with a ratio, and without.
    exact : bool
        Whether every ratio is one number.
    """

    low: float
    high: float
    interval: tuple[float, float]
    count: int
    failed: int
    exact: bool


@dataclass(frozen=True)
class Paired:
    """Two policies on the same instances: quotient of their total latencies, first over second.

    Parameters
    ----------
    first, second : str
    quotient : float
        Geometric mean over instances; below 1 the first is better. It needs no optimum.
    interval : tuple of float
        Its confidence interval.
    wins, ties, losses : int
        Instances on which the first is better, equal, worse.
    """

    first: str
    second: str
    quotient: float
    interval: tuple[float, float]
    wins: int
    ties: int
    losses: int


@dataclass(frozen=True, eq=False)
class Study:
    """Ratios of policies over instances.

    Parameters
    ----------
    policies : tuple of str
    reference : str
    rows : tuple of Ratio
        Instance by instance, policies in order.
    confidence : float
    seed : int
        Of the resampling behind the intervals, and of the policies' first run.
    """

    policies: tuple[str, ...]
    reference: str
    rows: tuple[Ratio, ...]
    confidence: float
    seed: int

    def of(self, policy: str) -> list[Ratio]:
        """Return a policy's rows.

        Raises
        ------
        InputError
            A policy that is not in the study.
        """
        if policy not in self.policies:
            raise InputError(f"policy {policy!r} is not here; there are {', '.join(self.policies)}")
        return [row for row in self.rows if row.policy == policy]

    def mean(self, policy: str) -> Mean:
        """Return the mean ratio with its confidence interval (bootstrap over instances).

        Raises
        ------
        InputError
            A policy that is not in the study, or failed everywhere.
        """
        rows = self.of(policy)
        good = [row for row in rows if row.low is not None]
        if not good:
            raise InputError(f"policy {policy!r}: no ratio at all: {rows[0].error}")
        low = np.array([row.low for row in good], dtype=np.float64)
        high = np.array([np.inf if row.high is None else row.high for row in good])
        pick = self._samples(len(good))
        tail = (1 - self.confidence) / 2
        bottom = float(np.quantile(low[pick].mean(axis=1), tail))
        top = math.inf
        if np.isfinite(high).all():
            top = float(np.quantile(high[pick].mean(axis=1), 1 - tail))
        return Mean(
            low=float(low.mean()),
            high=float(high.mean()),
            interval=(bottom, top),
            count=len(good),
            failed=len(rows) - len(good),
            exact=all(row.exact for row in good),
        )

    def worst(self, policy: str) -> Ratio:
        """Return the row with the largest ratio that is certain (its lower end)."""
        good = [row for row in self.of(policy) if row.low is not None]
        if not good:
            raise InputError(f"policy {policy!r}: no ratio at all")
        return max(good, key=lambda row: row.low or 0.0)

    def paired(self, first: str, second: str) -> Paired:
        """Compare two policies on the instances that both finished.

        Raises
        ------
        InputError
            No such instance.
        """
        both = [
            (a.tel, b.tel)
            for a, b in zip(self.of(first), self.of(second), strict=True)
            if a.tel is not None and b.tel is not None
        ]
        if not both:
            raise InputError(f"policies {first!r} and {second!r}: no instance that both finished")
        one, two = np.array(both, dtype=np.float64).T
        logs = np.log(one / two)
        means = logs[self._samples(len(logs))].mean(axis=1)
        tail = (1 - self.confidence) / 2
        bottom, top = np.exp(np.quantile(means, [tail, 1 - tail])).tolist()
        return Paired(
            first=first,
            second=second,
            quotient=float(np.exp(logs.mean())),
            interval=(bottom, top),
            wins=int((one < two).sum()),
            ties=int((one == two).sum()),
            losses=int((one > two).sum()),
        )

    def table(self) -> str:
        """Return the means as a Markdown table."""
        lines = [
            f"| policy | mean ratio to {self.reference} | {self.confidence:.0%} interval | worst | "
            "instances |",
            "|---|---|---|---|---|",
        ]
        for policy in self.policies:
            try:
                mean, worst = self.mean(policy), self.worst(policy)
            except InputError as error:
                lines.append(f"| {policy} | | | | {error} |")
                continue
            value = f"{mean.low:.4f}" if mean.exact else f"{mean.low:.4f} to {mean.high:.4f}"
            interval = f"{mean.interval[0]:.4f} to {mean.interval[1]:.4f}"
            failed = f" ({mean.failed} failed)" if mean.failed else ""
            lines.append(
                f"| {policy} | {value} | {interval} | {worst.low:.4f} | {mean.count}{failed} |"
            )
        return "\n".join(lines)

    def _samples(self, count: int) -> NDArray[np.int64]:
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, count, size=(_RESAMPLES, count))


def competitive_ratio(
    policies: str | Sequence[str],
    instances: Iterable[Instance],
    reference: Reference = "optimum",
    *,
    cost_model: CostModel | str | Path | None = None,
    seeds: int = 1,
    seed: int = 0,
    time_limit_s: float = 10.0,
    confidence: float = 0.95,
    jobs: int = 1,
    progress: bool | Callable[[int, int], None] = False,
) -> Study:
    """Measure policies against a reference on every instance.

    Parameters
    ----------
    policies : str or sequence of str
        Specifications.
    instances : iterable of Instance
    reference : {"optimum", "bound", "h-sf", "best-known"}
        What total latency is divided by. ``"optimum"``: the hindsight program's (rounds only);
        where it is not proved within the limit, the ratio lies between policy / best known and
        policy / bound. ``"bound"``: the largest of `optsched.bounds`, so that the ratio is at
        most ``high``, and ``low`` is 1. ``"h-sf"``: MC-SF with the true lengths (001).
        ``"best-known"``: the instance's known optimum, or the best of all policies and those
        measured.
    cost_model : BatchCost, str or path, optional
        For instances in seconds.
    seeds : int
        Runs of each policy; their mean latency counts.
    seed : int
        Seed of the first run, the next ones follow; also of the resampling.
    time_limit_s : float
        For each optimum.
    confidence : float
        Of the intervals for means over instances.
    jobs : int
        Processes; more than 1 needs joblib.
    progress : bool or callable
        Show a bar on standard error (where that is a terminal), or call with the numbers of
        finished and of all instances.

    Returns
    -------
    Study
        A policy that loops, raises or names an unknown request has a row with the error, and
        everything else is kept.

    Raises
    ------
    InputError, UsageError
        No instances, numbers out of range, a specification that cannot be read; the optimum of
        an instance in seconds.
    """
    specs = (policies,) if isinstance(policies, str) else tuple(policies)
    cases = list(instances)
    if not cases or not specs:
        raise InputError("instances, policies: empty; at least one of each is right")
    if reference not in REFERENCES:
        raise InputError(f"reference: {reference!r}; one of {', '.join(REFERENCES)} is right")
    if seeds < 1 or jobs < 1 or not 0 < confidence < 1 or not time_limit_s > 0:
        raise InputError(
            f"seeds, jobs, confidence, time_limit_s: {seeds}, {jobs}, {confidence}, "
            f"{time_limit_s}; at least 1, 1, between 0 and 1, and more than 0 are right"
        )
    if len(set(specs)) < len(specs):
        raise InputError("policies: one is given twice")
    for spec in specs:
        make_policy(spec)
    for k, case in enumerate(cases):
        cost_for(case, cost_model)
        if reference == "optimum" and not case.in_rounds:
            raise UsageError(
                f"reference: instance {k} is in seconds, where no optimum is at hand; use bound, "
                "h-sf or best-known"
            )
    tasks = [
        (k, case, specs, reference, cost_model, seeds, seed, time_limit_s)
        for k, case in enumerate(cases)
    ]
    found: dict[int, list[Ratio]] = {}
    with _Bar(progress, len(tasks)) as report:
        for k, rows in _finished(tasks, jobs):
            found[k] = rows
            report(len(found), len(tasks))
    every = tuple(row for k in range(len(cases)) for row in found[k])
    return Study(specs, reference, every, confidence, seed)


def _finished(tasks: list[Any], jobs: int) -> Iterator[tuple[int, list[Ratio]]]:
    if jobs == 1:
        for task in tasks:
            yield _one(*task)
        return
    if find_spec("joblib") is None:
        raise UsageError("jobs: more than 1 needs the package joblib; install it, or use 1")
    joblib: Any = import_module("joblib")
    pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")
    yield from pool(joblib.delayed(_one)(*task) for task in tasks)


def _one(
    number: int,
    instance: Instance,
    specs: tuple[str, ...],
    reference: Reference,
    cost_model: CostModel | str | Path | None,
    seeds: int,
    seed: int,
    time_limit_s: float,
) -> tuple[int, list[Ratio]]:
    """Measure all policies on one instance; at the top level so that processes can call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a cost model's range, instance by instance
        tels: list[float | None] = []
        errors: list[str | None] = []
        for spec in specs:
            try:
                tel, outside = _tel(instance, spec, cost_model, seeds, seed)
                tels.append(tel)
                error = None if outside is None or reference == "h-sf" else f"no ratio: {outside}"
                errors.append(error)
            except (InputError, UsageError):
                raise
            except OptschedError as failure:
                tels.append(None)
                errors.append(str(failure))
        inside = [tel for tel, error in zip(tels, errors, strict=True) if error is None]
        below, above = _references(instance, reference, cost_model, time_limit_s, seed, inside)
    rows = []
    for spec, value, error in zip(specs, tels, errors, strict=True):
        low = high = None
        if value is not None and error is None:
            low = 1.0 if above is None else value / above
            high = None if not below else value / below
        rows.append(Ratio(spec, number, instance.name, value, low, high, error))
    return number, rows


def _tel(
    instance: Instance,
    spec: str,
    cost_model: CostModel | str | Path | None,
    seeds: int,
    seed: int,
) -> tuple[float, str | None]:
    """Return the mean total latency, and why some schedule is outside the bounds' model."""
    values, outside = [], None
    for k in range(seeds):
        schedule = simulate(instance, spec, cost_model, seed=seed + k)
        judged = evaluate(instance, schedule, cost_model)
        values.append(float(judged.metrics["tel"] or 0))
        outside = outside or outside_reason(judged)
    return math.fsum(values) / seeds, outside


def _references(
    instance: Instance,
    reference: Reference,
    cost_model: CostModel | str | Path | None,
    time_limit_s: float,
    seed: int,
    tels: list[float | None],
) -> tuple[float | None, float | None]:
    """Return two values between which the reference lies; None where there is none."""
    if reference == "h-sf":
        truth = instance.without_predictions()
        value, _ = _tel(truth, "h-sf", cost_model, 1, seed)
        return value, value
    if reference == "bound":
        bound, _ = lower_bound(instance, cost_model=cost_for(instance, cost_model))
        return bound, None
    known = instance.known or {}
    if known.get("optimum") is not None:
        return float(known["optimum"]), float(known["optimum"])
    if reference == "best-known":
        best = best_of_policies(instance, cost_model=cost_model, seed=seed)
        values = [known.get("best_known"), None if best is None else best.tel, *tels]
        least = min((float(v) for v in values if v is not None), default=None)
        return least, least
    result = optimum(instance, time_limit_s=time_limit_s, seed=seed)
    return result.bound, result.objective


class _Bar:
    """A progress bar, a callable, or nothing."""

    def __init__(self, wanted: bool | Callable[[int, int], None], total: int) -> None:
        self.call = wanted if callable(wanted) else None
        self.bar: Any = None
        if wanted is True:
            progress = import_module("rich.progress")
            console = import_module("rich.console").Console(stderr=True)
            if console.is_terminal:
                self.bar = progress.Progress(console=console, transient=True)
                self.task = self.bar.add_task("instances", total=total)

    def __enter__(self) -> Callable[[int, int], None]:
        if self.bar is not None:
            self.bar.start()
        return self.report

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are finished."""
        if self.call is not None:
            self.call(done, total)
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
