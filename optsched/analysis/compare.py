"""Every policy on one instance, beside the best schedule known and a bound that none can beat."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bounds import lower_bound
from optsched.costs.cost import CostModel, cost_for
from optsched.files.measured import Measured, read_measured
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.consistency import reconcile
from optsched.optimize.solvers.base import Progress
from optsched.policies import Rules, Windows, allows, is_clairvoyant, lengths_note, make_policy
from optsched.policies import policies as registry
from optsched.policies.engine.simulate import effective, quick_to_simulate, simulate
from optsched.problem.errors import (
    InfeasibleError,
    LoopError,
    NoIncumbentError,
    PolicyError,
    UsageError,
    ViolationError,
)
from optsched.problem.instance import Instance
from optsched.problem.markup import number, table
from optsched.problem.metrics import COMPARED, METRICS, TABLE, Times, derive, time_words
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule
from optsched.problem.version import __version__

if TYPE_CHECKING:
    import pandas as pd

    from optsched.optimize.solve import Result

SOLVER_STARTS = 200_000
"""Start times over all requests up to which `compare` asks the hindsight program for the bound."""

_BOUND_SHARE = 0.6
"""Part of the time limit that bounds may search for; the rest is for better schedules."""


@dataclass(frozen=True, eq=False)
class PolicyRow:
    """One policy of a comparison.

    Parameters
    ----------
    policy : str
        Specification as given.
    clairvoyant : bool
        Whether it sees true output lengths, because the instance carries no predictions.
    metrics : dict or None
        `Evaluation.metrics`; None when there is no schedule.
    inside : bool
        Whether best known value and bound hold for the schedule, so that ratios mean something.
    ratio_to_best_known, ratio_to_bound : float or None
    wall_s : float or None
        Seconds for the decisions, without judging them.
    notes : tuple of str
        Features that the instance switches off, and why there is no ratio.
    error : str or None
        Why there is no schedule: a loop, or features that the instance forbids.
    schedule : Schedule or None
    measured : bool
        Whether these are a real server's times and not a policy's.
    """

    policy: str
    clairvoyant: bool = False
    metrics: Mapping[str, float | int | None] | None = None
    inside: bool = False
    ratio_to_best_known: float | None = None
    ratio_to_bound: float | None = None
    wall_s: float | None = None
    notes: tuple[str, ...] = ()
    error: str | None = None
    schedule: Schedule | None = None
    measured: bool = False

    @property
    def tel(self) -> float | None:
        """Total latency of a schedule inside the bound's model, else None."""
        return (
            self.metrics[TOTAL_LATENCY.name] if self.metrics is not None and self.inside else None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the row of the comparison file."""
        return {
            "policy": self.policy,
            "clairvoyant": self.clairvoyant,
            "measured": self.measured,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "ratio_to_best_known": self.ratio_to_best_known,
            "ratio_to_bound": self.ratio_to_bound,
            "wall_s": self.wall_s,
            "notes": list(self.notes),
            "error": self.error,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Policies judged side by side; total latency (``tel``) is what ratios compare.

    Parameters
    ----------
    instance : Instance
    rows : tuple of PolicyRow
        In the order asked for.
    best_known, bound : float or None
        Smallest total latency among the solver's schedule and the policies inside the bound's
        model, and a value that no schedule of that model beats.
    best_known_origin, bound_origin : str or None
        Who found them.
    cost_model : CostModel
    seed : int
    interrupted : bool
        Whether Ctrl-C came before everything had run.
    best_schedule : Schedule or None
        A schedule of the best known value.
    notes : tuple of str
        Why there is no optimum, where there can be none.
    """

    instance: Instance
    rows: tuple[PolicyRow, ...]
    best_known: float | None
    best_known_origin: str | None
    bound: float | None
    bound_origin: str | None
    cost_model: CostModel
    seed: int = 0
    interrupted: bool = False
    best_schedule: Schedule | None = None
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        """(best known - bound) / best known, None where one of them is unknown."""
        if self.best_known is None or self.bound is None:
            return None
        return (self.best_known - self.bound) / self.best_known

    @property
    def predictor(self) -> str:
        """Where policies take output lengths from: the instance's predictions, or the oracle."""
        return "instance" if self.instance.has_predictions else "oracle"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a comparison file."""
        instance, cost = self.instance, self.cost_model
        return {
            "format": "optsched-comparison",
            "version": 1,
            "optsched": __version__,
            "command": "compare",
            "instance": {
                "name": instance.name, "sha256": instance.sha256, "requests": instance.n
            },
            "time_unit": instance.time_unit,
            "cost_model": None
            if instance.in_rounds
            else {"name": cost.name, "sha256": cost.sha256},
            "objective_name": TOTAL_LATENCY.name,
            "status": self.status,
            "bound": self.bound,
            "bound_origin": self.bound_origin,
            "certificate": None,
            "best_known": self.best_known,
            "best_known_origin": self.best_known_origin,
            "gap": self.gap,
            "gap_definition": "(best_known - bound) / best_known",
            "predictor": self.predictor,
            "seed": self.seed,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "policies": [row.to_dict() for row in self.rows],
        }  # fmt: skip

    def __repr__(self) -> str:
        unit = f"{self.instance.time_unit}s"
        return (
            f"<Comparison {self.instance.name!r}: {len(self.rows)} policies, {self.status}, best "
            f"known {self.best_known} {unit} ({self.best_known_origin}), bound {self.bound} {unit}>"
        )

    def _repr_html_(self) -> str:
        unit = time_words(self.instance.time_unit)
        shown = (TOTAL_LATENCY.name, *COMPARED)
        rows = []
        for row in self.rows:
            metrics = row.metrics or {}
            ratios = (row.ratio_to_best_known, row.ratio_to_bound)
            rows.append(
                (row.policy, "clairvoyant" if row.clairvoyant else "", *ratios,
                 *map(metrics.get, shown))
            )  # fmt: skip
        gap = "unknown" if self.gap is None else f"{self.gap:.2%}"
        below = (
            f"times in {unit}; best known {number(self.best_known)} ({self.best_known_origin}), "
            f"bound {number(self.bound)} ({self.bound_origin}), gap {gap}"
        )
        headers = ("policy", "", "/ best known", "/ bound", *(TABLE[name].words for name in shown))
        return table(f"Comparison on {self.instance.name}", headers, rows, below)

    def table(self) -> pd.DataFrame:
        """Return one row per policy: both ratios, every metric, wall time, and why there is none.

        What is unknown, or is not there, is NaN or None.
        """
        import pandas as pd

        rows = [
            {
                "policy": row.policy,
                "clairvoyant": row.clairvoyant,
                "ratio_to_best_known": row.ratio_to_best_known,
                "ratio_to_bound": row.ratio_to_bound,
                **{name: (row.metrics or {}).get(name) for name in METRICS},
                "wall_s": row.wall_s,
                "error": row.error,
            }
            for row in self.rows
        ]
        table = pd.DataFrame(rows)
        numbers = ["ratio_to_best_known", "ratio_to_bound", *METRICS, "wall_s"]
        return table.astype(dict.fromkeys(numbers, float))

    @property
    def status(self) -> str:
        """``optimal`` when the best known value meets the bound, else feasible or no_incumbent."""
        if self.best_known is None:
            return "no_incumbent"
        return "optimal" if self.bound == self.best_known else "feasible"


def compare(
    instance: Instance,
    policies: Iterable[str] | None = None,
    *,
    cost_model: CostModel | str | Path | None = None,
    bound: bool = True,
    time_limit_s: float = 60.0,
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    seed: int = 0,
    progress: Callable[[str, Any], None] | None = None,
    stop: threading.Event | None = None,
    keep_schedules: bool = True,
    measured: Measured | str | Path | None = None,
) -> Comparison:
    """Run policies on an instance and set each beside the best known value and a bound.

    Parameters
    ----------
    instance : Instance
    policies : iterable of str, optional
        Policy specifications; all that the instance allows if left out. A policy that is asked
        for and forbidden, or that loops, gets a row without metrics that says why.
    cost_model : BatchCost, str or path, optional
        For an instance in seconds.
    bound : bool
        Whether to look for a bound and a better schedule: in rounds the hindsight program on
        small instances, in seconds the offline search; the largest of `optsched.bounds` always.
    time_limit_s : float
        Seconds for bounds that search, the solver (in rounds) and the offline search (in
        seconds), after the policies.
    slo_ttft, slo_tpot : float, optional
        Objectives of service for the judge.
    seed : int
    progress : callable, optional
        Called as ``progress("policy", spec)`` and ``progress("solve", Progress)``.
    stop : threading.Event, optional
        When set, no further policy starts and the solver ends; what there is is kept. Ctrl-C
        has the same effect.
    keep_schedules : bool
        Whether rows keep their schedules; if not, only the best one is kept (a long trace takes
        some 70 MB a schedule).
    measured : Measured or path, optional
        Times that a real server took for these requests, in seconds: a row more, its ratios with
        the bound as if the cost model and the KV capacity were the server's. It is never the
        best known value, since no schedule proves it.

    Returns
    -------
    Comparison

    Raises
    ------
    InputError, UsageError
        A specification that cannot be read, or a cost model that does not fit.
    ViolationError
        The judge rejects a policy's schedule.
    SolverError
        A bound contradicts a schedule that it covers.

    Notes
    -----
    Ratios are given only inside the model that best known value and bound belong to. In rounds
    these are uninterrupted runs and restarts; in seconds, everything on one worker. Where the
    optimum is not proved, the ratio to the optimum lies between the two ratios given.
    """
    cost = cost_for(instance, cost_model)
    if measured is not None and not isinstance(measured, Measured):
        measured = read_measured(measured)
    if measured is not None:
        measured.check(instance)
    rows: list[PolicyRow] = []
    interrupted = False
    specs = _specs(instance, policies)
    _load_engine(specs)
    best: PolicyRow | None = None
    try:
        for spec in specs:
            if stop is not None and stop.is_set() and rows:
                interrupted = True
                break
            if progress is not None:
                progress("policy", spec)
            row = _run(instance, spec, cost, slo_ttft, slo_tpot, seed)
            if row.tel is not None and (best is None or row.tel < (best.tel or 0)):
                best = row
            rows.append(row if keep_schedules else replace(row, schedule=None))
    except KeyboardInterrupt:
        interrupted = True
        if not rows:
            raise
    rows += [PolicyRow(spec, error="interrupted") for spec in specs[len(rows) :]]

    if measured is not None:
        rows.append(_measured_row(instance, measured, slo_ttft, slo_tpot))

    value, origin = None, None
    notes: tuple[str, ...] = ()
    best_known = None if best is None else best.tel
    best_origin = None if best is None else best.policy
    best_schedule = None if best is None else best.schedule
    if bound and not interrupted:
        begin = time.perf_counter()

        def report(*_: object) -> None:
            if progress is not None:
                progress("solve", Progress(time.perf_counter() - begin, best_known, value))

        value, origin = lower_bound(
            instance, cost_model=cost, time_limit_s=_BOUND_SHARE * time_limit_s, stop=stop,
            progress=report,
        )  # fmt: skip
        if value is not None and value == best_known:
            pass  # the policy's schedule is optimal: nothing is left to solve
        elif not instance.in_rounds:
            found = _search(
                instance, cost, None if best is None else [best_schedule],
                time_limit_s - (time.perf_counter() - begin), seed, report, stop,
            )  # fmt: skip
            if found is not None and (best_known is None or found[0] < best_known):
                best_known, best_schedule = found
                best_origin = "offline search"
        elif _worth_solving(instance):
            try:
                result = _solve(instance, best_schedule, time_limit_s, seed, progress, stop)
            except InfeasibleError as error:  # policies that split prefills can do more
                notes = (f"no optimum in the round model, which splits no prefill: {error}",)
            else:
                if result.bound is not None and (value is None or result.bound > value):
                    value, origin = result.bound, f"{result.formulation} ({result.method})"
                if result.objective is not None and (
                    best_known is None or result.objective < best_known
                ):
                    best_known = result.objective
                    best_origin = f"{result.formulation} ({result.method})"
                    best_schedule = result.schedule
    value = reconcile(instance, TOTAL_LATENCY, (best_known, best_origin), (value, origin))
    return Comparison(
        instance=instance,
        rows=tuple(_with_ratios(row, best_known, value) for row in rows),
        best_known=best_known,
        best_known_origin=best_origin,
        bound=value,
        bound_origin=origin,
        cost_model=cost,
        seed=seed,
        interrupted=interrupted or (stop is not None and stop.is_set()),
        best_schedule=best_schedule,
        notes=notes,
    )


def outside_reason(evaluation: Evaluation) -> str | None:
    """Return why the bounds of the instance do not cover a schedule, or None if they do.

    In seconds every schedule on one worker is covered: dropping the runs that a restart loses
    makes no batch longer, and leaves a schedule that evicts nothing.
    """
    if evaluation.instance.in_rounds:
        return evaluation.outside_reason
    return f"it uses {evaluation.workers} workers" if evaluation.workers > 1 else None


def _specs(instance: Instance, asked: Iterable[str] | None) -> list[str]:
    if asked is None:
        return [name for name in registry() if allows(name, instance) is None]
    specs = list(asked)
    if not specs:
        raise UsageError("policies: the list is empty; leave it out to run all that are allowed")
    for spec in specs:
        make_policy(spec)  # a typo is an error before anything runs
    return specs


def _load_engine(specs: Iterable[str]) -> None:
    """Run one request, so that no policy's clock sees its engine being compiled or loaded."""
    one = Instance(np.array([0]), np.array([1]), np.array([1]), kv_capacity=2)
    simulate(one, "fcfs")
    made = [make_policy(spec)[0] for spec in specs]
    if any(hasattr(policy, "compiled") for policy in made):
        simulate(one, "trail")
    if any(isinstance(policy, Windows) for policy in made):
        simulate(one, "elis-fcfs")


def _feature_notes(made: object, instance: Instance) -> tuple[str, ...]:
    """Return which features of a scheduler the instance switches off."""
    wants = effective(made, instance)[0] if isinstance(made, Rules) else made
    notes = []
    if getattr(wants, "hybrid", False) and instance.hybrid_batching is False:
        notes.append("hybrid batching is off by the instance")
    if getattr(wants, "chunked", False) and instance.chunked_prefill is False:
        notes.append("chunked prefill is off by the instance")
    return tuple(notes)


def _run(
    instance: Instance,
    spec: str,
    cost: CostModel,
    slo_ttft: float | None,
    slo_tpot: float | None,
    seed: int,
) -> PolicyRow:
    made, info = make_policy(spec)
    note = lengths_note(made, info, instance) if info.assumed else None
    row = PolicyRow(
        spec,
        clairvoyant=is_clairvoyant(made, info, instance),
        notes=_feature_notes(made, instance) + (() if note is None else (note,)),
    )
    reason = allows(spec, instance)
    if reason is not None:
        return replace(row, error=reason)
    begin = time.perf_counter()
    try:
        schedule = simulate(instance, spec, None if instance.in_rounds else cost, seed=seed)
    except (LoopError, PolicyError) as error:
        return replace(row, error=str(error))
    wall_s = time.perf_counter() - begin
    try:
        evaluation = evaluate(
            instance,
            schedule,
            None if instance.in_rounds else cost,
            slo_ttft=slo_ttft,
            slo_tpot=slo_tpot,
        )
    except ViolationError as error:
        error.args = (f"policy {spec}: the judge rejects its schedule: {error}",)
        raise
    outside = outside_reason(evaluation)
    return replace(
        row,
        metrics=evaluation.metrics,
        inside=outside is None,
        wall_s=wall_s,
        notes=row.notes if outside is None else (*row.notes, f"no ratio: {outside}"),
        schedule=schedule,
    )


def _search(
    instance: Instance,
    cost: CostModel,
    known: Sequence[Schedule | None] | None,
    time_limit_s: float,
    seed: int,
    report: Callable[..., None],
    stop: threading.Event | None,
) -> tuple[float, Schedule] | None:
    """Return the total latency and schedule of the offline search, None without a schedule."""
    from optsched.optimize.search.offline import POLICIES, improve

    schedules = [s for s in known or [] if s is not None]
    try:
        schedule, _ = improve(
            instance, cost, time_limit_s=time_limit_s, seed=seed, stop=stop, progress=report,
            known=schedules, policies=() if schedules else POLICIES,
        )  # fmt: skip
    except NoIncumbentError:
        return None  # no policy serves it
    with warnings.catch_warnings():  # of the cost model's range: the policies' rows have said it
        warnings.simplefilter("ignore")
        tel = TOTAL_LATENCY.of(evaluate(instance, schedule, cost))
    return None if tel is None else (float(tel), schedule)


def _worth_solving(instance: Instance) -> bool:
    if not instance.in_rounds:
        return False
    spread = int(instance.arrival.max() - instance.arrival.min())
    return instance.n * (spread + int(instance.output_tokens.sum())) <= SOLVER_STARTS


def _solve(
    instance: Instance,
    warm_start: Schedule | None,
    time_limit_s: float,
    seed: int,
    progress: Callable[[str, Any], None] | None,
    stop: threading.Event | None,
) -> Result:
    from optsched.optimize.solve import solve

    def report(state: Any) -> None:
        if progress is not None:
            progress("solve", state)

    return solve(
        instance,
        formulation="hindsight",
        time_limit_s=time_limit_s,
        seed=seed,
        warm_start=warm_start,
        progress=report,
        stop=stop,
    )


def _measured_row(
    instance: Instance, measured: Measured, slo_ttft: float | None, slo_tpot: float | None
) -> PolicyRow:
    latency, ttft = measured.latency, measured.ttft
    tpot = None
    if ttft is not None:
        steps = np.where(instance.output_tokens > 1, instance.output_tokens - 1.0, np.nan)
        tpot = (latency - ttft) / steps
    times = Times(instance, latency, ttft, tpot, slo_ttft, slo_tpot)
    note = "its ratios hold if the cost model and the KV capacity are its server's"
    return PolicyRow(
        measured.name, metrics=derive(times), inside=True, notes=(note,), measured=True
    )


def _with_ratios(row: PolicyRow, best_known: float | None, bound: float | None) -> PolicyRow:
    tel = row.tel
    if tel is None:
        return row
    if row.measured and bound is not None and tel < bound:
        note = "it beats the bound: the cost model or the KV capacity is not its server's"
        row = replace(row, notes=(*row.notes, note))
    return replace(
        row,
        ratio_to_best_known=None if not best_known else tel / best_known,
        ratio_to_bound=None if not bound else tel / bound,
    )


def best_schedule(
    instance: Instance,
    *,
    cost_model: CostModel | str | Path | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> PolicyRow | None:
    """Return the best policy's row, or in seconds that of a better schedule found offline.

    Policies take at most half of the time limit.
    """
    cost = cost_for(instance, cost_model)
    begin = time.perf_counter()
    best = best_of_policies(
        instance, cost_model=cost, seed=seed, progress=progress, stop=stop,
        time_limit_s=time_limit_s if instance.in_rounds else time_limit_s / 2,
    )  # fmt: skip
    left = time_limit_s - (time.perf_counter() - begin)
    if instance.in_rounds or left <= 0 or (stop is not None and stop.is_set()):
        return best

    def report(name: str, tel: float) -> None:
        if progress is not None:
            progress(f"{name}: {tel:.6g}")

    found = _search(
        instance, cost, None if best is None else [best.schedule], left, seed, report, stop
    )
    if found is None or (best is not None and not found[0] < (best.tel or 0)):
        return best
    metrics = evaluate(instance, found[1], cost).metrics
    return PolicyRow("offline search", metrics=metrics, inside=True, schedule=found[1])


def best_of_policies(
    instance: Instance,
    *,
    cost_model: CostModel | str | Path | None = None,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> PolicyRow | None:
    """Return the policy with the least total latency inside the bound's model, or None.

    Every policy that the instance allows runs; none is started after the time limit, or once
    ``stop`` is set, and Ctrl-C keeps the best so far. None runs where one could take very long
    (`optsched.policies.engine.simulate.quick_to_simulate`).
    """
    cost = cost_for(instance, cost_model)
    if not quick_to_simulate(instance):
        return None
    best: PolicyRow | None = None
    begin = time.perf_counter()
    try:
        for spec in _specs(instance, None):
            if time.perf_counter() - begin > time_limit_s or (stop is not None and stop.is_set()):
                break
            if progress is not None:
                progress(spec)
            row = _run(instance, spec, cost, None, None, seed)
            if row.tel is not None and (best is None or row.tel < (best.tel or 0)):
                best = row
    except KeyboardInterrupt:
        pass
    return best
