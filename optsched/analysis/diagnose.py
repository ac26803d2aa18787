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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.reached import scaled as faster
from optsched.analysis.twin import Fitted, Twin, gaps_of, scaled, shapes_of
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
from optsched.problem.specs import parse_spec, read_pairs
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

REPEATS, ON_AVERAGE = 0.3, 0.1
"""The relative error of a request's latency, in the median, and of means, up to which the twin is
said to repeat a run."""
IN_TIME = 0.99
"""The share of requests within SLOs from which on a server is said to be within them."""
# The error that is assumed of a cost model that no measured time confirms.
_UNMEASURED = 0.2
# Policies that are quick and often the best known.
_RIVALS = (*LIKELY, *DRAFTING[1:])
# The error from which on arrivals are doubted.
_DOUBTFUL = 0.05
# The gain below which nothing is worth changing.
_WORTH = 0.05
# The width of a gain from which on a run says too little of it.
_WIDE = 0.5
# Of what costs as much, what comes first gains this share of the largest gain.
_PREFERRED = 0.8
# Tokens of a batch that are tried on every server with more.
_SMALL = 256, 512
_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
# The largest rate that is tried, and how close the room is found.
_ROOM, _CLOSE = 16.0, 1.03
_FLAGS = {"policy": "scheduling-policy", "prefix_caching": "enable-prefix-caching"}


class Change(NamedTuple):
    """A change of the server, and what the twin gains by it.

    Attributes
    ----------
    what, kind : str
        The setting and its new value, and whether it takes settings, the plug-in for vLLM, memory,
        workers (one more) or further workers.
    gain, low, high : float
        The share of the loss that it takes away: of requests that miss their SLOs, or of the mean
        latency; and the range under all cost models tried.
    sure : float
        The share of these cost models under which it gains anything worth it.
    extrapolated : bool
        Whether its batches are larger than any of the measured run.
    metrics : dict
        The metrics of the twin with the change.
    """

    what: str
    kind: str
    gain: float
    low: float
    high: float
    sure: float
    extrapolated: bool
    metrics: dict[str, Any]

    @property
    def percents(self) -> tuple[int, ...]:
        """The gain and its range in percent; a loss of more than all there is counts as that."""
        return tuple(round(100 * max(share, -1)) for share in (self.gain, self.low, self.high))

    @property
    def told(self) -> bool:
        """Whether all cost models agree on whether it is worth it or does harm."""
        return self.low > -_WORTH or self.high < _WORTH

    @property
    def how(self) -> str:
        """How it is done: what to add to ``vllm serve``, or what else it takes."""
        if self.kind == "memory":
            return "more GPU memory, or less for weights; the cache in fp8 doubles it"
        if "workers" in self.kind:
            return f"{self.what.partition('=')[2]} servers, each request to the least busy"
        if self.kind == "plug-in":
            policy = self.what.partition(":")[0]
            return f"the plug-in of docs/howto/policy.md, with the policy {policy}"

        flags, values = ["vllm serve ..."], read_pairs(self.what.split(","), "change")
        sent = values.pop("priority", None)
        for name, value in values.items():
            flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
            off = flag.replace("--", "--no-", 1)
            flags.append({"true": flag, "false": off}.get(value, f"{flag} {value}"))

        if sent is not None:
            flags.append('and in each request of clients "priority": the tokens of its prompt')

        return " ".join(flags)


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
        """The setting of which the run tells least whether or how much it helps; None if of all."""
        unsure = [
            one
            for one in self.changes
            if one.kind == "settings" and (not one.told or one.high - one.low > _WIDE)
        ]

        def doubt(one: Change) -> tuple[float, float]:
            return -1.0 if one.told else min(one.high, -max(one.low, -1)), one.high

        return max(unsure, key=doubt, default=None)

    @property
    def beyond(self) -> Change | None:
        """The hardware to begin with; None if it adds nothing worth it."""
        found = _first([one for one in self.changes if one.kind in ("memory", "workers")])
        more = found is not None and found.gain >= _WORTH + (self.first.gain if self.first else 0)
        return found if more and found != self.first else None

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
            **{name: getattr(self, name) for name in _SAME},
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "coefficients_ms_per_layer": dict(self.cost_model.coefficients),
            "kv_capacity": self.instance.kv_capacity,
            "server": self.served,
            "metrics": self.base,
            "waits_s": self.waits,
            "gains_of": "requests that miss their SLOs" if self.of_shares else "mean latency",
            "changes": [{**one._asdict(), "how": one.how} for one in self.changes],
            "first": None if self.first is None else self.first._asdict(),
            "sure": 0.0 if self.first is None else self.first.sure,
            "untold": None if self.untold is None else self.untold.what,
            "objective_name": self.problem.goal.name,
            "best_known": self.value,
            "best_origin": self.found_by,
            "slo_attainment_bound": self.attainable,
        }


# What stands in a file by the name that it has here.
_SAME = ("error", "checks", "shapes", "prefix_caching", "measured", "curves", "room", "bound",
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

    given = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    settings = {**{name: str(value) for name, value in given.items()}, **(settings or {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        budget = Budget(time_limit_s, stop=stop)
        return _Search(problem, also, measured, settings, budget, progress).found()


class _Search:
    """The work of one diagnosis."""

    def __init__(
        self,
        problem: Problem,
        also: BatchCost | None,
        measured: Measured | None,
        settings: Mapping[str, str],
        budget: Budget,
        progress: Callable[[str], None],
    ) -> None:
        self.instance, self.measured, self.budget = problem.instance, measured, budget
        self.progress, self.settings, self.left_out = progress, settings, 0
        cost = problem.cost_model
        assert isinstance(cost, BatchCost)
        costs = [cost] if also is None else [cost, also]
        self.fits, self.spec = self._fits(costs, self._specs())
        self.error = None if measured is None else math.expm1(self.fits[0].errors["latency"])
        spread = _UNMEASURED if self.error is None else max(self.error, 0.02)
        self.cost = self.fits[0].model
        fitted = [one.model for one in self.fits]
        edges = [scaled(self.cost, (f, f, f)) for f in (1 - spread, 1 + spread)]
        self.models = [*fitted, *edges]

    def _specs(self) -> list[str]:
        """Return the policies that the server may have had, as far as it is not said."""
        usual: dict[str, str] = {}
        others = {"scheduler_reserve_full_isl": "false"}
        if self.instance.prefixes is not None:
            usual, others = {"prefix_caching": "true"}, {**others, "prefix_caching": "false"}

        unsaid = [{name: value} for name, value in others.items() if name not in self.settings]
        return [_spec({**usual, **self.settings, **one}) for one in ({}, *unsaid)]

    def _fits(self, costs: list[BatchCost], specs: list[str]) -> tuple[list[Fitted], str]:
        if self.measured is None:
            return [Fitted(one.of(costs[0]), one, {}) for one in shapes_of(costs[0])], specs[0]

        self.progress("fitting the twin to the run")
        twin = Twin(self.instance, self.measured, self.budget)
        found, spec = twin.fits(costs, specs)
        error = math.expm1(found[0].errors["latency"])
        if error > _DOUBTFUL and twin.ended(found[0], spec):
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

        return found, spec

    def found(self) -> Diagnosis:
        """Return the diagnosis."""
        instance, twins = self.instance, [self._run(model) for model in self.models]
        twin = twins[0][0]
        base: dict[str, Any] = twin.metrics
        seen = None if self.measured is None else self.measured.times(instance)
        run = None if seen is None else derive(seen)
        judged = base["slo_attainment"] is not None
        missed = judged and base["slo_attainment"] < IN_TIME
        grid = _grid(instance, self.settings, self.spec)
        tries = self._tries(grid, [one.metrics for one, _ in twins])
        # Where no request is in time, whatever is changed, shares say nothing.
        some = any(one["slo_attainment"] for _, runs in tries for one, _ in runs) or not tries
        shares = bool(missed and (some or base["slo_attainment"]))
        tries += self._together(tries, base, shares)
        changes = self._changes(tries, twins, run, shares)
        own: dict[str, Any] = {name: int(self.settings[name]) for name in _LIMITS}
        best = sorted(tries, key=lambda one: _loss(one[1][0][0], shares))
        specs = (one.spec for one, _ in best if one.kind == "settings")
        inside = (one for one in specs if all(int(_given(one)[x]) <= own[x] for x in own))
        far, attainable = self._far(own, shares, [*islice(inside, 3)]), None
        if judged and far.bound is not None:
            attainable = most_within(instance, self.cost) / instance.n

        cached = "prefix_caching=false" not in self.spec
        first = _first(changes) if missed or not judged else None
        judged_runs: dict[str, Any] = {} if seen is None else {"measured": seen}
        judged_runs["as it is (twin)"] = twin.evaluation
        if first is not None and not self.budget.over:
            change = next(one for one, _ in tries if one.what == first.what)
            done, _ = self._run(self.cost, change.instance, change.workers, change.spec)
            judged_runs[f"{first.what} (twin)"] = done.evaluation

        return Diagnosis(
            instance=instance,
            cost_model=self.cost,
            models=len(self.models),
            error=self.error,
            served=self.spec,
            prefix_caching=None if instance.prefixes is None else cached,
            measured=run,
            base=base,
            waits=why(twin.problem, twin.schedule, **own).totals(),
            changes=tuple(sorted(changes, key=lambda one: -one.gain)),
            first=first,
            problem=far.task,
            value=far.value,
            bound=far.bound,
            found_by=None if far.incumbent is None else far.incumbent.origin,
            attainable=attainable,
            of_shares=shares,
            checks={} if run is None else self._checks(run, twin),
            shapes={one.shape.words: one.total for one in reversed(self.fits)},
            room=self._room() if judged and not missed else None,
            tried=len(grid) - self.left_out,
            curves=_curves(judged_runs),
        )

    def _far(self, own: Mapping[str, int], shares: bool, specs: Sequence[str]) -> Interval:
        """Return what schedules can reach that the server's own limits allow, without a clock.

        `specs`: policies that are tried beside the usual ones, within the same limits.
        """
        most: Any = {"max_running": own["max_num_seqs"], "max_batch_tokens": max(own.values())}
        limited = replace(self.instance, limits=replace(self.instance.limits, **most))
        goal = "slo_attainment" if shares else "mean_latency"
        found = Interval(Task.of(Problem(limited, self.cost, goal)))
        if not self.budget.over:
            self.progress("bounds, and the best schedule known")
            prove(found, Budget(0.0))
            run_policies(found, Budget(stop=self.budget.stop), specs=(self.spec, *_RIVALS, *specs))
            found.reconcile()

        return found

    def _run(
        self, model: BatchCost, instance: Instance | None = None, workers: int = 1, spec: str = ""
    ) -> tuple[Run, NDArray[np.int64]]:
        """Return a run of the twin, and the requests and the tokens of its largest batches."""
        fleet = model if workers == 1 else Fleet.of(workers, model)
        done = run_policy(Problem(instance or self.instance, fleet), spec or self.spec)
        offsets, _, tokens, *_ = check_columns(done.schedule)
        largest = np.diff(offsets).max(), np.add.reduceat(tokens, offsets[:-1]).max()
        return done, np.array(largest)

    def _tries(self, grid: "list[_Try]", base: list[dict[str, Any]]) -> "Tried":
        """Return changes with their metrics and largest batches under each model.

        What changes nothing on the slowest machine nor on the likeliest changes nothing.
        """
        found = []
        for k, one in enumerate(grid):
            self.progress(f"change {k + 1} of {len(grid)}: {one.what}")
            try:
                runs: list[Any] = [None] * len(self.models)
                for m in (-1, 0, *range(1, len(runs) - 1)):
                    self.budget.check("changes were tried")
                    done, largest = self._run(self.models[m], one.instance, one.workers, one.spec)
                    runs[m] = done.metrics, largest
                    if m == 0 and (runs[0][0], runs[-1][0]) == (base[0], base[-1]):
                        runs = [(metrics, largest) for metrics in base]
                        break
            except OutOfTimeError:
                break
            except OptschedError:
                self.left_out += 1  # for example settings that the instance does not allow
                continue

            found.append((one, runs))

        return found

    def _together(self, tries: "Tried", base: dict[str, Any], shares: bool) -> "Tried":
        """Return the settings that gain more together, if that is worth it; under all models.

        To the best one each further one is added that gains, in their order, under the likeliest.
        """
        whole = _loss(base, shares)
        kept = [(_loss(runs[0][0], shares), one) for one, runs in tries if one.kind == "settings"]
        kept = sorted((pair for pair in kept if pair[0] < whole), key=lambda pair: pair[0])
        if not kept:
            return []

        (alone, joined), *others = kept
        least, seen = alone, dict(read_pairs(joined.what.split(","), "change"))
        for _, one in others:
            more = read_pairs(one.what.split(","), "change")
            if self.budget.over or not seen.keys().isdisjoint(more):
                continue

            both = joined._replace(what=f"{joined.what},{one.what}")
            both = both._replace(spec=_spec(_given(self.spec), both.what))
            loss = _loss(self._run(self.cost, spec=both.spec)[0].metrics, shares)
            if loss < least:
                joined, least, seen = both, loss, {**seen, **more}

        return self._tries([joined], [base]) if alone - least >= _WORTH * whole else []

    def _changes(
        self,
        tries: "Tried",
        twins: Sequence[tuple[Run, NDArray[np.int64]]],
        seen: dict[str, Any] | None,
        shares: bool,
    ) -> list[Change]:
        """Return the gains of what was tried: the share of the loss that each takes away.

        `seen`: the metrics of the measured run.
        """

        loss, slack = np.array([_loss(one.metrics, shares) for one, _ in twins]), 0.0
        if seen is not None:
            # The twin misses the run's own loss by so much, and the last request by chance.
            known = not shares or seen["slo_attainment"] is not None
            off = abs(_loss(seen, shares) - loss[0]) if known else 0.0
            slack = (off + shares / self.instance.n) / max(float(loss[0]), 1e-9)

        found, seen_batches = [], twins[0][1]
        for one, runs in tries:
            after = np.array([_loss(metrics, shares) for metrics, _ in runs])
            gains = (loss - after) / np.where(loss > 0, loss, 1.0)
            more = slack * (np.ptp(gains) > 0 or abs(gains[0]) > 0)
            span = float(gains[0]), float(gains.min() - more), float(min(gains.max() + more, 1.0))
            sure = float((gains >= _WORTH).mean())
            beyond = seen is not None and bool((runs[0][1] > 1.1 * seen_batches).any())
            found.append(Change(one.what, one.kind, *span, sure, beyond, runs[0][0]))

        return found

    def _checks(self, run: Mapping[str, Any], twin: Run) -> dict[str, tuple[float, float]]:
        """Return what was measured beside what the twin has; refuse a twin that is far off."""
        assert self.measured is not None
        names = ("mean_latency", "mean_ttft", "mean_tpot", "slo_attainment")
        found: dict[str, Any] = {name: (run[name], twin.metrics[name]) for name in names}
        if self.measured.gaps is not None:
            k = int(np.searchsorted(GAP_PLACES, 0.95))
            gaps = gaps_of(twin.evaluation, twin.schedule)
            found["p95_itl"] = float(self.measured.gaps[k]), float(gaps[k])

        known = {name: pair for name, pair in found.items() if None not in pair}
        for name, (seen, own) in known.items():
            share = name == "slo_attainment"
            off = own - seen if share else own / seen - 1
            if abs(off) > ON_AVERAGE and name in ("mean_latency", "mean_tpot", "slo_attainment"):
                raise InputError(
                    f"measured: found a {name} of {seen:.4g}, where the twin has {own:.4g}; "
                    f"expected at most {ON_AVERAGE:.0%} between them: the settings, the KV "
                    "capacity, the cost model or the arrivals are not the server's, so nothing "
                    "can be said of changes"
                )

        return known

    def _room(self) -> float | None:
        """Return by how much the rate may grow, under each model that repeats the run."""
        if self.instance.sessions is not None or self.budget.over:
            return None

        def within(scale: float) -> bool:
            moved = faster(self.instance, scale)
            runs = (self._run(one.model, moved)[0].metrics for one in self.fits)
            return all((metrics["slo_attainment"] or 0) >= IN_TIME for metrics in runs)

        low, high = 1.0, _ROOM
        if within(high):
            return high
        while high > _CLOSE * low and not self.budget.over:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if within(middle) else (low, middle)

        return low


def _loss(metrics: Mapping[str, Any], shares: bool) -> float:
    """Return what gains are of: the share of requests that miss their SLOs, or the mean latency."""
    return float(1 - metrics["slo_attainment"] if shares else metrics["mean_latency"])


def _curves(judged: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return percentiles of the times of runs, by what they are of and by the run."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in ("latency", "ttft", "tpot"):
        for label, one in judged.items():
            times = getattr(one, name)
            if times is not None and np.isfinite(times).any():
                curve = np.nanpercentile(times, np.arange(101)).tolist()
                found.setdefault(name, {})[label] = curve

    return found


class _Try(NamedTuple):
    """A change: words, kind, and the instance, the workers and the policy with it."""

    what: str
    kind: str
    instance: Instance
    workers: int
    spec: str


Tried = list[tuple[_Try, list[tuple[Any, Any]]]]
"""Changes with their metrics and largest batches under each model."""


def _spec(settings: Mapping[str, str], changed: str = "") -> str:
    """Return the policy with the settings of the server, and with others in their place."""
    values = {**settings, **read_pairs(filter(None, changed.split(",")), "change")}
    tokens = max(int(values["max_num_seqs"]), int(values["max_num_batched_tokens"]))
    values["max_num_batched_tokens"] = str(tokens)
    return "vllm-v1:" + ",".join(f"{name}={value}" for name, value in values.items())


def _given(spec: str) -> dict[str, str]:
    """Return the settings of a policy."""
    return parse_spec(spec)[1]


def _grid(instance: Instance, settings: Mapping[str, str], spec: str) -> list[_Try]:
    """Return the changes to try."""
    seqs, tokens = (int(settings[name]) for name in _LIMITS)
    served = _given(spec)
    cold = served.get("prefix_caching") == "false"
    near = {max(64, round(tokens * factor)) for factor in (0.125, 0.25, 0.5, 2, 4)}
    budgets = sorted(near | {size for size in _SMALL if size < tokens})
    seats = (max(1, round(seqs * factor)) for factor in (0.5, 1.25, 1.5, 2, 4, 8))
    words = [
        # vLLM has no more seats than tokens.
        *(f"max_num_seqs={count}" for count in seats if count <= tokens),
        *(
            f"max_num_seqs={size}," * (size < seqs) + f"max_num_batched_tokens={size}"
            for size in budgets
            if size != tokens
        ),
        *(f"long_prefill_token_threshold={t}" for t in sorted({_SMALL[0], max(64, tokens // 8)})),
        "prefill_schedule_interval=4",
        "policy=priority,priority=prompt",
        *[f"prefix_caching={str(cold).lower()}"] * (instance.prefixes is not None),
    ]
    found = [_Try(what, "settings", instance, 1, _spec(served, what)) for what in words]
    paused = f"spf:max_running={seqs},max_batch_tokens={max(seqs, tokens)}"
    paused += ",caching=none" * cold
    found.append(_Try(paused, "plug-in", instance, 1, paused))
    for factor in (1.5, 2, 4):
        larger = replace(instance, kv_capacity=round(instance.kv_capacity * factor))
        found.append(_Try(f"kv_capacity={larger.kv_capacity}", "memory", larger, 1, spec))
    for kind, count in (("workers", 2), ("further workers", 4), ("further workers", 8)):
        routed = _spec(served, "router=least-requests")
        found.append(_Try(f"workers={count}", kind, instance, count, routed))

    return found


def _first(found: Sequence[Change]) -> Change | None:
    """Return the change to begin with: the cheapest kind that is worth it.

    Settings cost nothing, the plug-in hardly anything, and of hardware memory less than a second
    worker. What counts is the gain under every cost model, or if nothing is worth it under all,
    that under the first. Of one kind the cheapest gains nearly as much as any, and of settings that
    gain the same that with the least mean latency is taken.
    """

    def rank(one: Change, sure: str) -> tuple[float, float]:
        return -round(getattr(one, sure), 2), one.metrics["mean_latency"]

    for sure in ("low", "gain"):
        for kinds in (("settings",), ("plug-in",), ("memory", "workers")):
            able = [one for one in found if one.kind in kinds and getattr(one, sure) >= _WORTH]
            able.sort(key=lambda one: (kinds.index(one.kind), *rank(one, sure)))
            enough = _PREFERRED * max((getattr(one, sure) for one in able), default=0.0)
            for one in able:
                if getattr(one, sure) >= enough:
                    return one

    return None
