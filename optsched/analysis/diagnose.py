"""What to change first on a server of vLLM: its own run repeated by the twin, then with changes.

The twin is the policy ``vllm-v1`` under a cost model. Where the run was measured,
`optsched.analysis.twin` finds the models under which it repeats the run. Every gain is computed
under each of them, and under machines that are slower and faster by the error which the best one
leaves. Where they differ on the sign, the run does not tell, and the answer says so.
"""

import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.capacity_question import scale_arrivals
from optsched.analysis.changes import (
    LIMITS,
    WORTH,
    Change,
    Outcome,
    Trial,
    Tried,
    changes_to_try,
    first_change,
    loss_of,
    settings_in,
    twin_spec,
)
from optsched.analysis.twin import Fitted, Twin, gaps_of, scale_cost, shapes_of
from optsched.analysis.why import why
from optsched.bounds.service import most_within
from optsched.costs.cost import BatchCost
from optsched.costs.fleet import Fleet
from optsched.files.measured import GAP_PLACES, Measured
from optsched.files.results import cost_model_reference, head
from optsched.optimize.bounded import relative_gap
from optsched.optimize.formulations.base import Task
from optsched.optimize.interval import Interval
from optsched.optimize.strategies import DRAFTING, LIKELY, prove, run_policies
from optsched.policies.run import Run, run as run_policy
from optsched.policies.vllm_v1 import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, OptschedError, OutOfTimeError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.markup import html_of_frame
from optsched.problem.metrics import derive
from optsched.problem.schedule import check_columns
from optsched.problem.specs import read_pairs
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

REPEATS, ON_AVERAGE = 0.3, 0.1
"""The relative error of a request's latency, in the median, and of means, up to which the twin is
said to repeat a run."""
IN_TIME = 0.99
"""The share of requests within SLOs from which on a server is said to be within them."""
# The error that is assumed of a cost model that no measured time confirms, and the least of others.
_UNMEASURED, _LEAST_ERROR = 0.2, 0.02
# Policies that are quick and often the best known.
_RIVALS = (*LIKELY, *DRAFTING[1:])
# The error from which on arrivals are doubted.
_DOUBTFUL = 0.05
# The width of a gain's range from which on a run says too little of it.
_WIDE = 0.5
# Batches that are so many times as large as any of the measured run are not covered by it.
_BEYOND_RUN = 1.1
# The largest multiple of the rate that is tried, and how close the ends of the search for it are.
_MAX_RATE, _CLOSE = 16.0, 1.03


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The answer of `diagnose`.

    Attributes
    ----------
    instance : Instance
    cost_model : BatchCost
        After calibration.
    models : int
        The number of cost models under which every change was tried.
    error : float or None
        The median relative error of the twin's latencies; None without measured times.
    served : str
        The policy that is the twin.
    prefix_caching : bool or None
        Whether the twin caches prefixes: with measured times, what repeats the run better; None if
        no request shares any.
    measured : dict or None
        The metrics of the measured run.
    base : dict
        The metrics of the twin as the server is set.
    waits : dict
        What its requests wait for, in seconds (`optsched.analysis.why`).
    changes : tuple of Change
        In the order of their gains.
    first : Change or None
        What to change first; None if nothing is worth it.
    problem : Problem
        What was served: the instance with the server's own limits of a batch, the calibrated model,
        and what gains are of. `bound`, `solve` and `compare` of it narrow ``value`` and ``bound``.
    value, bound : float or None
        How far schedules can get in that problem: the best known, and what none beats. No clock has
        a part in them, so they are the same again. None if there was no time.
    found_by : str or None
        The policy whose schedule is the best known.
    attainable : float or None
        The share of requests within SLOs that no schedule exceeds.
    of_shares : bool
        Whether gains are of requests that miss their SLOs, and not of the mean latency.
    checks : dict
        What was measured and what the twin has of it: means, a long gap, the share within SLOs.
    shapes : dict
        The shapes of a step that repeat the run, with what each misses it by.
    room : float or None
        By how much the rate may grow before requests miss their SLOs, where they are met.
    tried : int
        The number of changes that were to be tried.
    curves : dict
        Percentiles 0, 1, ..., 100 of latency, TTFT and TPOT: as measured, of the twin, and with
        the first change.
    """

    instance: Instance
    cost_model: BatchCost
    models: int
    error: float | None
    served: str
    prefix_caching: bool | None
    measured: dict[str, Any] | None
    base: dict[str, Any]
    waits: dict[str, float]
    changes: tuple[Change, ...]
    first: Change | None
    problem: Problem
    value: float | None
    bound: float | None
    found_by: str | None
    attainable: float | None
    of_shares: bool
    checks: dict[str, tuple[float, float]] = field(default_factory=dict)
    shapes: dict[str, float] = field(default_factory=dict)
    room: float | None = None
    tried: int = 0
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    @property
    def served_value(self) -> float:
        """What ``value`` is held against: the run's, or the twin's where the run does not tell."""
        run = (self.measured or {}).get(self.problem.goal.name)
        return float(self.base[self.problem.goal.name] if run is None else run)

    @property
    def gap(self) -> float | None:
        """The relative gap |value - bound| / value. None if it is unknown."""
        return relative_gap(self.value, self.bound, self.of_shares)

    @property
    def untold(self) -> Change | None:
        """The setting of which the run tells least whether or how much it helps, or None.

        None: of all settings it tells enough.
        """
        settings = [change for change in self.changes if change.kind == "settings"]
        unsure = [
            change for change in settings if not change.told or change.high - change.low > _WIDE
        ]

        def doubt(change: Change) -> tuple[float, float]:
            # Of an unknown sign, what counts is the smaller of what it may gain and may lose, which
            # is the whole loss at most. Settings of a known sign come after these (-1), the one
            # that may gain most first.
            either_way = min(change.high, -max(change.low, -1))
            return -1.0 if change.told else either_way, change.high

        return max(unsure, key=doubt, default=None)

    @property
    def beyond(self) -> Change | None:
        """The hardware to begin with; None if it adds nothing worth it."""
        hardware = first_change([one for one in self.changes if one.kind in ("memory", "workers")])
        if hardware is None or hardware == self.first:
            return None

        # Beyond what the first change gains, hardware has to gain what is worth a change.
        first_gain = self.first.gain if self.first else 0
        return hardware if hardware.gain >= WORTH + first_gain else None

    def __repr__(self) -> str:
        first = "nothing" if self.first is None else self.first.what
        return f"<Diagnosis on {self.instance.name!r}: change first: {first}>"

    _repr_html_ = html_of_frame

    def to_frame(self) -> "pd.DataFrame":
        """Return a row for each of ``changes``, without metrics."""
        import pandas as pd

        return pd.DataFrame(self.changes, columns=Change._fields).drop(columns="metrics")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``diagnose --json``."""
        return {
            **head("optsched-diagnosis", "diagnose", self.instance),
            **{name: getattr(self, name) for name in _SAME_NAME},
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "coefficients_ms_per_layer": dict(self.cost_model.coefficients),
            "kv_capacity": self.instance.kv_capacity,
            "server": self.served,
            "metrics": self.base,
            "waits_s": self.waits,
            "gains_of": "requests that miss their SLOs" if self.of_shares else "mean latency",
            "changes": [{**change._asdict(), "how": change.how} for change in self.changes],
            "first": None if self.first is None else self.first._asdict(),
            "sure": 0.0 if self.first is None else self.first.sure,
            "untold": None if self.untold is None else self.untold.what,
            "objective_name": self.problem.goal.name,
            "best_known": self.value,
            "best_origin": self.found_by,
            "slo_attainment_bound": self.attainable,
        }


# What stands in a file by the name that it has here.
_SAME_NAME = ("error", "checks", "shapes", "prefix_caching", "measured", "curves", "room", "bound",
         "served_value")  # fmt: skip


def diagnose(
    problem: Problem,
    *,
    measured: Measured | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    settings: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
    also: BatchCost | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Diagnosis:
    """Say what to change first on a server of vLLM, by its twin with other settings.

    Parameters
    ----------
    problem : Problem
        The requests, in seconds, with the server's KV capacity and the SLOs, and its cost model: as
        measured or of published peaks. With measured times it is calibrated; of a linear one
        further shapes are tried (`optsched.costs.cost.corner`).
    measured : Measured, optional
        The times that the server took.
    max_num_seqs, max_num_batched_tokens : int
        As the server is set.
    settings : mapping of str to str, optional
        Further settings of the server, by their names in the policy ``vllm-v1``.
    time_limit_s : float, optional
        Seconds for all. What is not tried by then is left out.
    also : BatchCost, optional
        A second cost model that is fitted, in case that it repeats the run better.
    stop : threading.Event, optional
        When it is set, no further change is tried, and the answer is of those that were.
    progress : callable, optional
        Called with words for what begins.

    Returns
    -------
    Diagnosis

    Raises
    ------
    InputError
        The twin does not repeat the measured run, so nothing is said of changes.
    """
    if problem.workers > 1 or not isinstance(problem.cost_model, BatchCost):
        raise UsageError("diagnose: found several machines, or rounds; expected one, in seconds")

    limits = dict(zip(LIMITS, (str(max_num_seqs), str(max_num_batched_tokens)), strict=True))
    settings = {**limits, **(settings or {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each of many runs would warn of the cost model's range
        budget = Budget(time_limit_s, stop=stop)
        return _Diagnosing(problem, also, measured, settings, budget, progress).diagnosis()


class _Diagnosing:
    """The work of one diagnosis: fitted models, and runs of the twin under each of them.

    `models` has the fitted ones, the likeliest first, then one that is faster, and at last one that
    is slower, by the error that the likeliest leaves. `also`: a second cost model to fit, or None.
    `settings`: as the server is set, by name. `spec`: the policy that is the twin. `left_out`: how
    many changes the instance does not allow.
    """

    def __init__(
        self,
        problem: Problem,
        also: BatchCost | None,
        measured: Measured | None,
        settings: Mapping[str, str],
        budget: Budget,
        progress: Callable[[str], None],
    ) -> None:
        self.instance = problem.instance
        self.measured = measured
        self.budget = budget
        self.progress = progress
        self.settings = settings
        self.left_out = 0  # changes that the instance does not allow
        cost = problem.cost_model
        assert isinstance(cost, BatchCost)
        costs = [cost] if also is None else [cost, also]
        self.fits, self.spec = self._fit(costs, self._possible_specs())
        # Errors of fits are differences of logarithms, and this is the relative one.
        self.error = None if measured is None else math.expm1(self.fits[0].errors["latency"])
        spread = _UNMEASURED if self.error is None else max(self.error, _LEAST_ERROR)
        self.cost = self.fits[0].model
        # All three factors at once: a faster machine, and a slower one, which is the last model.
        edges = [scale_cost(self.cost, (f, f, f)) for f in (1 - spread, 1 + spread)]
        self.models = [*(fit.model for fit in self.fits), *edges]

    def _possible_specs(self) -> list[str]:
        """Return the policies that the server may have had, as far as its settings leave it open.

        The usual one comes first, and each of the others differs from it by one setting.
        """
        # Versions of vLLM differ in whether a whole input must fit when a request is admitted
        # (true in the policy by default), and a benchmark does not say if prefixes were cached.
        usual: dict[str, str] = {}
        others = {"scheduler_reserve_full_isl": "false"}
        if self.instance.prefixes is not None:
            usual, others = {"prefix_caching": "true"}, {**others, "prefix_caching": "false"}

        unsaid = [{name: value} for name, value in others.items() if name not in self.settings]
        return [twin_spec({**usual, **self.settings, **other}) for other in ({}, *unsaid)]

    def _fit(self, costs: list[BatchCost], specs: list[str]) -> tuple[list[Fitted], str]:
        """Fit cost models to the measured run; return them, the best first, and the policy.

        `specs`: the policies that the server may have run. Without a measured run the models are
        all shapes of the first cost model, as they are.

        Raises
        ------
        InputError
            Not even the best model repeats the run.
        """
        if self.measured is None:
            return [Fitted(one.of(costs[0]), one, {}) for one in shapes_of(costs[0])], specs[0]

        self.progress("fitting the twin to the run")
        twin = Twin(self.instance, self.measured, self.budget)
        fits, spec = twin.fits(costs, specs)
        error = math.expm1(fits[0].errors["latency"])  # of a difference of logarithms
        # Ends in place of arrivals make the error large as well, and this message says more.
        if error > _DOUBTFUL and twin.ended(fits[0], spec):
            raise InputError(
                "arrival: found times at which requests had ended, by their latencies; expected "
                "those at which they were sent, which are the latency earlier"
            )
        if error > REPEATS:
            raise InputError(
                f"measured: found latencies from which the twin's differ by {error:.0%} in the "
                f"median; expected at most {REPEATS:.0%}: the settings, the KV capacity or the "
                "cost model are not the server's, so nothing can be said of changes"
            )

        return fits, spec

    def diagnosis(self) -> Diagnosis:
        """Try all changes under all models, and return what they say."""
        instance = self.instance
        # As the server is set: under each model a run, and the sizes of its largest batches.
        twins = [self._run(model) for model in self.models]
        twin = twins[0][0]  # under the likeliest model
        attainment = twin.metrics["slo_attainment"]
        has_slos = attainment is not None
        # `IN_TIME`: the share of requests with which SLOs count as met.
        misses_slos = attainment is not None and attainment < IN_TIME
        times = None if self.measured is None else self.measured.times(instance)
        run = None if times is None else derive(times)

        trials = changes_to_try(instance, self.settings, self.spec)
        tried = self._try_all(trials, [done.metrics for done, _ in twins])
        # Where no request is in time, whatever is changed, shares say nothing. If nothing was
        # tried, that is not known, and they count.
        outcomes = [outcome for change in tried for outcome in change.outcomes]
        any_in_time = any(one.metrics["slo_attainment"] for one in outcomes) or not tried
        of_shares = bool(misses_slos and (any_in_time or attainment))
        tried += self._combine(tried, twin.metrics, of_shares)
        changes = self._gains(tried, twins, run, of_shares)
        # Within its SLOs, a server needs no change.
        first = first_change(changes) if misses_slos or not has_slos else None

        # How far any schedule could get, and at best which share of requests.
        limits: dict[str, Any] = {name: int(self.settings[name]) for name in LIMITS}
        interval = self._interval(limits, of_shares, tried)
        attainable = None
        # Shares within SLOs are not bounded for decode steps that verify drafts.
        if has_slos and interval.bound is not None and instance.drafts is None:
            attainable = most_within(instance, self.cost) / instance.n

        curves: dict[str, Any] = {} if times is None else {"measured": times}
        curves["as it is (twin)"] = twin.evaluation
        if first is not None and not self.budget.over:
            trial = next(change.trial for change in tried if change.trial.what == first.what)
            changed, _ = self._run(self.cost, trial.instance, trial.workers, trial.spec)
            curves[f"{first.what} (twin)"] = changed.evaluation

        cached = "prefix_caching=false" not in self.spec
        return Diagnosis(
            instance=instance,
            cost_model=self.cost,
            models=len(self.models),
            error=self.error,
            served=self.spec,
            prefix_caching=None if instance.prefixes is None else cached,
            measured=run,
            base=twin.metrics,
            waits=why(twin.problem, twin.schedule, **limits).totals(),
            changes=tuple(sorted(changes, key=lambda change: -change.gain)),
            first=first,
            problem=interval.task,
            value=interval.value,
            bound=interval.bound,
            found_by=None if interval.incumbent is None else interval.incumbent.origin,
            attainable=attainable,
            of_shares=of_shares,
            checks={} if run is None else self._check_twin(run, twin),
            # Of two fits in one shape the better one, which comes first, overwrites the other.
            shapes={fit.shape.words: fit.total for fit in reversed(self.fits)},
            room=self._max_rate() if has_slos and not misses_slos else None,
            tried=len(trials) - self.left_out,  # joined settings come on top of these
            curves=_percentiles(curves),
        )

    def _interval(
        self, limits: Mapping[str, int], of_shares: bool, tried: Sequence[Tried]
    ) -> Interval:
        """Return what schedules can reach that the server's own limits allow, without a clock.

        The usual policies run, and with them the best settings that were tried within these limits.
        `limits`: max_num_seqs and max_num_batched_tokens, as the server is set. `of_shares`:
        whether the goal is the share of requests within SLOs, and not the latency.
        """
        # The twin has no fewer tokens in a batch than requests either (`twin_spec`).
        batch: Any = {
            "max_running": limits["max_num_seqs"],
            "max_batch_tokens": max(limits.values()),
        }
        limited = replace(self.instance, limits=replace(self.instance.limits, **batch))
        goal = "slo_attainment" if of_shares else "mean_latency"
        interval = Interval(Task.of(Problem(limited, self.cost, goal)))
        if self.budget.over:
            return interval

        def is_within(spec: str) -> bool:
            return all(int(settings_in(spec)[name]) <= limit for name, limit in limits.items())

        by_loss = sorted(tried, key=lambda change: change.loss(of_shares))
        settings = (change.trial.spec for change in by_loss if change.trial.kind == "settings")
        best = islice(filter(is_within, settings), 3)  # more of them cost time and bring little
        self.progress("bounds, and the best schedule known")
        # Without any time, only the bounds that need no search are computed. The policies have no
        # limit. So the same input has the same answer.
        prove(interval, Budget(0.0))
        run_policies(interval, Budget(stop=self.budget.stop), specs=(self.spec, *_RIVALS, *best))
        interval.reconcile()
        return interval

    def _run(
        self, model: BatchCost, instance: Instance | None = None, workers: int = 1, spec: str = ""
    ) -> tuple[Run, NDArray[np.int64]]:
        """Return a run of the twin, and the requests and the tokens of its largest batches."""
        fleet = model if workers == 1 else Fleet.of(workers, model)
        run = run_policy(Problem(instance or self.instance, fleet), spec or self.spec)
        # Batch b has the lines from ``offsets[b]`` to ``offsets[b + 1]``, one for each request.
        offsets, _, tokens, *_ = check_columns(run.schedule)
        largest = np.diff(offsets).max(), np.add.reduceat(tokens, offsets[:-1]).max()
        return run, np.array(largest)

    def _try_all(self, trials: Sequence[Trial], unchanged: list[dict[str, Any]]) -> list[Tried]:
        """Return changes with their outcomes; those that the instance does not allow are left out.

        `unchanged`: the metrics of the twin as it is, under each model or the likeliest only.
        """
        tried = []
        for k, trial in enumerate(trials):
            self.progress(f"change {k + 1} of {len(trials)}: {trial.what}")
            try:
                tried.append(Tried(trial, self._outcomes(trial, unchanged)))
            except OutOfTimeError:
                break  # what was tried until then counts
            except OptschedError:
                self.left_out += 1  # for example settings that the instance does not allow

        return tried

    def _outcomes(self, trial: Trial, unchanged: list[dict[str, Any]]) -> list[Outcome]:
        """Return the outcomes of a change, of which the slowest and the likeliest model run first.

        What changes nothing under these two changes nothing, so no other model runs. `unchanged`:
        as for `_try_all`.
        """
        outcomes: list[Any] = [None] * len(self.models)
        for m in (-1, 0, *range(1, len(outcomes) - 1)):
            self.budget.check("changes were tried")
            run, largest = self._run(self.models[m], trial.instance, trial.workers, trial.spec)
            outcomes[m] = Outcome(run.metrics, largest)
            # After the first two runs, ``m`` is 0.
            if m == 0 and [outcomes[m].metrics for m in (0, -1)] == [unchanged[0], unchanged[-1]]:
                return [Outcome(metrics, largest) for metrics in unchanged]

        return outcomes

    def _combine(
        self, tried: Sequence[Tried], unchanged: dict[str, Any], of_shares: bool
    ) -> list[Tried]:
        """Return the settings that gain more together, if that is worth it; under all models.

        To the best one each further one is added that gains, in their order, under the likeliest.
        `unchanged`: the metrics of the twin as it is, under the likeliest model. `of_shares`: as
        for `loss_of`.
        """
        whole = loss_of(unchanged, of_shares)
        settings = [one for one in tried if one.trial.kind == "settings"]
        gaining = [one for one in settings if one.loss(of_shares) < whole]
        if not gaining:
            return []

        best, *others = sorted(gaining, key=lambda one: one.loss(of_shares))
        joined = best.trial
        alone = lowest = best.loss(of_shares)
        values = dict(read_pairs(joined.what.split(","), "change"))
        for other in others:
            more = read_pairs(other.trial.what.split(","), "change")
            # Two values of one setting cannot be joined.
            if self.budget.over or not values.keys().isdisjoint(more):
                continue

            what = f"{joined.what},{other.trial.what}"
            both = joined._replace(what=what, spec=twin_spec(settings_in(self.spec), what))
            loss = loss_of(self._run(self.cost, spec=both.spec)[0].metrics, of_shares)
            if loss < lowest:
                joined, lowest = both, loss
                values |= more

        # Losses were compared under the likeliest model only. Now all of them run, if joining takes
        # away as large a share of the whole loss as is worth a change (`WORTH`).
        return self._try_all([joined], [unchanged]) if alone - lowest >= WORTH * whole else []

    def _gains(
        self,
        tried: Sequence[Tried],
        twins: Sequence[tuple[Run, NDArray[np.int64]]],
        run: dict[str, Any] | None,
        of_shares: bool,
    ) -> list[Change]:
        """Return the gains of what was tried: the share of the loss that each takes away.

        `twins`: as the server is set, under each model, with the sizes of the largest batches.
        `run`: the metrics of the measured run. `of_shares`: as for `loss_of`.
        """
        # Arrays have an entry for each model, the likeliest first.
        before = np.array([loss_of(twin.metrics, of_shares) for twin, _ in twins])
        slack = 0.0
        if run is not None:
            # Ranges are wider by how far the twin's loss is from the run's, and for shares by one
            # request, which may be in time or late by chance. Both are relative to the twin's loss.
            known = not of_shares or run["slo_attainment"] is not None
            miss = abs(loss_of(run, of_shares) - before[0]) if known else 0.0
            slack = (miss + of_shares / self.instance.n) / max(float(before[0]), 1e-9)

        changes = []
        for trial, outcomes in tried:
            after = np.array([loss_of(outcome.metrics, of_shares) for outcome in outcomes])
            gains = (before - after) / np.where(before > 0, before, 1.0)
            # A change without any effect is not uncertain.
            margin = slack * (np.ptp(gains) > 0 or abs(gains[0]) > 0)
            low = float(gains.min() - margin)
            high = float(min(gains.max() + margin, 1.0))  # it takes away the whole loss at most
            sure = float((gains >= WORTH).mean())
            larger = outcomes[0].largest_batch > _BEYOND_RUN * twins[0][1]
            extrapolated = run is not None and bool(larger.any())
            changes.append(
                Change(
                    trial.what,
                    trial.kind,
                    float(gains[0]),
                    low,
                    high,
                    sure,
                    extrapolated,
                    outcomes[0].metrics,
                )
            )

        return changes

    def _check_twin(self, run: Mapping[str, Any], twin: Run) -> dict[str, tuple[float, float]]:
        """Return what was measured beside what the twin has; refuse a twin that is far off."""
        assert self.measured is not None
        names = ("mean_latency", "mean_ttft", "mean_tpot", "slo_attainment")
        pairs: dict[str, Any] = {name: (run[name], twin.metrics[name]) for name in names}
        if self.measured.gaps is not None:
            k = int(np.searchsorted(GAP_PLACES, 0.95))  # the quantiles of gaps that are kept
            gaps = gaps_of(twin.evaluation, twin.schedule)
            pairs["p95_itl"] = float(self.measured.gaps[k]), float(gaps[k])

        # A metric is None if no request has it: a TPOT with one token each, shares without SLOs.
        known = {name: pair for name, pair in pairs.items() if None not in pair}
        for name, (seen, repeated) in known.items():
            if name not in ("mean_latency", "mean_tpot", "slo_attainment"):
                continue  # TTFT and long gaps are shown, and vary too much to be held against it

            off = repeated - seen if name == "slo_attainment" else repeated / seen - 1
            if abs(off) > ON_AVERAGE:
                raise InputError(
                    f"measured: found a {name} of {seen:.4g}, where the twin has {repeated:.4g}; "
                    f"expected at most {ON_AVERAGE:.0%} between them: the settings, the KV "
                    "capacity, the cost model or the arrivals are not the server's, so nothing "
                    "can be said of changes"
                )

        return known

    def _max_rate(self) -> float | None:
        """Return by how much the rate may grow, under each model that repeats the run.

        None if arrivals cannot be moved, or if there is no time left.
        """
        if self.instance.sessions is not None or self.budget.over:
            return None

        def is_within(scale: float) -> bool:
            moved = scale_arrivals(self.instance, scale)
            runs = (self._run(fit.model, moved)[0].metrics for fit in self.fits)
            return all((metrics["slo_attainment"] or 0) >= IN_TIME for metrics in runs)

        low, high = 1.0, _MAX_RATE
        if is_within(high):
            return high
        # SLOs are met at ``low`` and missed at ``high``. The caller has seen that they are met at 1
        # under the likeliest model.
        while high > _CLOSE * low and not self.budget.over:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_within(middle) else (low, middle)

        return low


def _percentiles(judged: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return percentiles 0 to 100 of the times of runs, by what they are of and by the run.

    `judged`: by the run's name, what has the arrays ``latency``, ``ttft`` and ``tpot``.
    """
    curves: dict[str, dict[str, list[float]]] = {}
    for name in ("latency", "ttft", "tpot"):
        for label, run in judged.items():
            times = getattr(run, name)
            # Nothing was measured of it, or no request has it, as one token has no TPOT.
            if times is not None and np.isfinite(times).any():
                curve = np.nanpercentile(times, np.arange(101)).tolist()
                curves.setdefault(name, {})[label] = curve

    return curves
