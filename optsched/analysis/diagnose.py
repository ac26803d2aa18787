"""What to change first on a server of vLLM: its own run repeated by the twin, then with changes.

The twin is the policy ``vllm-v1`` under a cost model. Where the run was measured, two factors make
the twin's latencies and TTFTs the measured ones as far as they can: one on work by the token, one
on what a batch takes beside it. A run does not tell which part of that is slow, so several such
models are fitted. Every gain is computed under each that repeats the run about as well as the best,
and under machines that are slower and faster by the error which the best one leaves.
"""

import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.analysis.twin import Twin, scaled
from optsched.analysis.why import why
from optsched.problem.budget import Budget
from optsched.bounds import lower_bound
from optsched.bounds.service import most_within
from optsched.costs.cost import BatchCost
from optsched.costs.fleet import Fleet
from optsched.files.measured import Measured
from optsched.files.results import cost_model_reference, head
from optsched.judge.evaluation import Evaluation
from optsched.policies.engine.simulate import simulate
from optsched.policies.run import run as run_policy
from optsched.policies.vllm_v1 import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from optsched.problem.errors import InputError, OptschedError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.markup import framed
from optsched.problem.metrics import derive
from optsched.problem.schedule import check_columns
from optsched.workloads.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

REPEATS = 0.3
"""The median relative error up to which the twin is said to repeat a run."""
# The error that is assumed of a cost model that no measured time confirms.
_UNMEASURED = 0.2
# The gain below which nothing is worth changing.
_WORTH = 0.05
# What costs less comes first if it gains this share of the largest gain.
_PREFERRED = 0.8
_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
_TOKENS = ("token", "prefill_")
# What the first factor multiplies, and what the second may, one choice for each fit.
_BATCHES = (("base", "decode_"), ("base",), ("decode_",))


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
        """The gain and its range in percent."""
        return tuple(round(100 * share) for share in (self.gain, self.low, self.high))


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
    bound : float
        The mean latency that no schedule beats under any of the cost models.
    attainable : float or None
        The share of requests within SLOs that no schedule exceeds under any of them.
    """

    instance: Instance
    cost_model: BatchCost
    models: int
    error: float | None
    prefix_caching: bool | None
    measured: dict[str, Any] | None
    base: dict[str, Any]
    waits: dict[str, float]
    changes: tuple[Change, ...]
    first: Change | None
    bound: float
    attainable: float | None

    @property
    def misses(self) -> bool:
        """Whether gains are of requests that miss their SLOs, and not of the mean latency."""
        return self.base["slo_attainment"] not in (None, 1)

    @property
    def of_settings(self) -> Change | None:
        """What to change first of settings alone; None if nothing is worth it."""
        return _first([one for one in self.changes if one.kind == "settings"])

    def __repr__(self) -> str:
        first = "nothing" if self.first is None else self.first.what
        return f"<Diagnosis on {self.instance.name!r}: change first: {first}>"

    _repr_html_ = framed

    def to_frame(self) -> "pd.DataFrame":
        """Return a row for each of ``changes``, without metrics."""
        import pandas as pd

        return pd.DataFrame(self.changes, columns=Change._fields).drop(columns="metrics")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``diagnose --json``."""
        return {
            **head("optsched-diagnosis", "diagnose", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "coefficients_ms_per_layer": dict(self.cost_model.coefficients),
            "kv_capacity": self.instance.kv_capacity,
            "error": self.error,
            "prefix_caching": self.prefix_caching,
            "measured": self.measured,
            "metrics": self.base,
            "waits_s": self.waits,
            "changes": [one._asdict() for one in self.changes],
            "first": None if self.first is None else self.first._asdict(),
            "sure": 0.0 if self.first is None else self.first.sure,
            "mean_latency_bound": self.bound,
            "slo_attainment_bound": self.attainable,
        }


def diagnose(
    problem: Problem,
    *,
    measured: Measured | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    stop: threading.Event | None = None,
) -> Diagnosis:
    """Say what to change first on a server of vLLM, by its twin with other settings.

    Parameters
    ----------
    problem : Problem
        The requests, in seconds, with the server's KV capacity and the SLOs, and its cost model: as
        measured or of published peaks; of tables, the linear approximation. With measured times it
        is calibrated.
    measured : Measured, optional
        The times that the server took.
    max_num_seqs, max_num_batched_tokens : int
        As the server is set.
    stop : threading.Event, optional
        When it is set, no further change is tried, and the answer is of those that were.

    Returns
    -------
    Diagnosis

    Raises
    ------
    InputError
        The twin does not repeat the measured run, so nothing is said of changes.
    """
    instance, cost_model = problem.instance, problem.cost_model
    if problem.workers > 1 or not isinstance(cost_model, BatchCost):
        raise UsageError("diagnose: found several machines, or rounds; expected one, in seconds")

    limits = max_num_seqs, max_num_batched_tokens
    tried = (None,) if instance.prefixes is None else (True, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits, error, run, spread = [cost_model], None, None, _UNMEASURED
        caching = tried[0]
        if measured is not None:
            specs = {_spec(_served(*limits, on)): on for on in tried}
            found_fits, chosen = Twin(instance, measured, Budget(stop=None)).fits(cost_model, list(specs))
            caching, fits = specs[chosen], [one.model for one in found_fits]
            self_fits = found_fits
            error = float(np.expm1(found_fits[0].errors["latency"]))
            if error > REPEATS:
                raise InputError(
                    f"measured: found latencies from which the twin's differ by {error:.0%} in the "
                    f"median; expected at most {REPEATS:.0%}: the settings, the KV capacity or the "
                    "cost model are not the server's, so nothing can be said of changes"
                )

            run, spread = derive(measured.times(instance)), max(error, 0.02)

        cost, served = fits[0], _served(*limits, caching)
        spec = _spec(served)
        models = [*fits, *(scaled(cost, (f, f, f)) for f in (1 - spread, 1 + spread))]
        twins = [_run(Problem(instance, model), spec) for model in models]
        base, seen = twins[0][0].metrics, twins[0][1]
        misses = base["slo_attainment"] not in (None, 1)
        loss = _losses(twins, misses)
        found = []
        for what, kind, changed, workers, other in _grid(instance, limits, served):
            if stop is not None and stop.is_set():
                break
            try:
                fleets = (Fleet.of(workers, model) for model in models)
                runs = [_run(Problem(changed, fleet), other) for fleet in fleets]
            except OptschedError:
                continue  # for example settings that the instance does not allow

            gains = (loss - _losses(runs, misses)) / np.where(loss > 0, loss, 1.0)
            span = float(gains[0]), float(gains.min()), float(gains.max())
            sure = float((gains >= _WORTH).mean())
            beyond = measured is not None and bool((runs[0][1] > 1.1 * seen).any())
            found.append(Change(what, kind, *span, sure, beyond, runs[0][0].metrics))

        # What is impossible under all of them; the slower one never has the lowest bound.
        each_s = 4.0 / len(models)
        asked = [Problem(instance, model) for model in models[:-1]]
        bounds = [lower_bound(one, time_limit_s=each_s)[0] for one in asked]
        bound = min(value or 0.0 for value in bounds) / instance.n
        judged = base["slo_attainment"] is not None
        within = max(most_within(instance, m) for m in models[:-1]) if judged else 0
        attainable = within / instance.n if judged else None
        given: dict[str, Any] = dict(zip(_LIMITS, limits, strict=True))
        twin = Problem(instance, cost)
        waits = why(twin, simulate(twin, spec), **given).totals()

    changes, first = tuple(sorted(found, key=lambda one: -one.gain)), _first(found)
    numbers = len(models), error, caching, run, base, waits
    return Diagnosis(instance, cost, *numbers, changes, first, bound, attainable)


def _served(seqs: int, tokens: int, caching: bool | None) -> str:
    """Return the settings of the server; None where nothing can be cached."""
    cached = "" if caching is None else f",prefix_caching={str(caching).lower()}"
    return f"max_num_seqs={seqs},max_num_batched_tokens={tokens}{cached}"


def _spec(served: str, changed: str = "") -> str:
    """Return the policy with the settings of the server, and with others in their place."""
    values = dict(pair.split("=") for pair in f"{served},{changed}".strip(",").split(","))
    tokens = max(int(values["max_num_seqs"]), int(values["max_num_batched_tokens"]))
    values["max_num_batched_tokens"] = str(tokens)
    return "vllm-v1:" + ",".join(f"{name}={value}" for name, value in values.items())


def _grid(
    instance: Instance, limits: tuple[int, int], served: str
) -> list[tuple[str, str, Instance, int, str]]:
    """Return changes: words, kind, and the instance, the workers and the policy with it."""
    seqs, tokens = limits
    budgets = (max(seqs, 64, round(tokens * factor)) for factor in (0.125, 0.25, 0.5, 2, 4))
    settings = [
        *(f"max_num_seqs={max(1, round(seqs * f))}" for f in (0.5, 1.25, 1.5, 2, 4, 8)),
        *(f"max_num_batched_tokens={budget}" for budget in budgets),
        f"long_prefill_token_threshold={max(64, tokens // 8)}",
        "prefill_schedule_interval=4",
        "policy=priority,priority=prompt",
        *["prefix_caching=true"] * ("prefix_caching=false" in served),
    ]
    found = [(words, "settings", instance, 1, _spec(served, words)) for words in settings]
    off = ",caching=none" * ("prefix_caching=false" in served)
    paused = f"spf:max_running={seqs},max_batch_tokens={max(seqs, tokens)}{off}"
    found.append((paused, "plug-in", instance, 1, paused))
    for factor in (1.5, 2, 4):
        larger = replace(instance, kv_capacity=round(instance.kv_capacity * factor))
        words = f"kv_capacity={larger.kv_capacity}"
        found.append((words, "memory", larger, 1, _spec(served)))
    for kind, count in (("workers", 2), ("further workers", 4), ("further workers", 8)):
        words = f"workers={count}"
        routed = _spec(served, "router=least-requests")
        found.append((words, kind, instance, count, routed))

    return found


def _run(problem: Problem, spec: str) -> tuple[Evaluation, NDArray[np.int64]]:
    """Return a run of the twin, and the requests and the tokens of its largest batches."""
    done = run_policy(problem, spec)
    offsets, _, tokens, *_ = check_columns(done.schedule)
    largest = np.diff(offsets).max(), np.add.reduceat(tokens, offsets[:-1]).max()
    return done.evaluation, np.array(largest)


def _losses(runs: Sequence[tuple[Evaluation, Any]], misses: bool) -> NDArray[np.float64]:
    """Return what is to be small, by run: the share of SLOs missed, or else the mean latency."""
    metrics: list[dict[str, Any]] = [judged.metrics for judged, _ in runs]
    return np.array([1 - m["slo_attainment"] if misses else m["mean_latency"] for m in metrics])


def _first(found: Sequence[Change]) -> Change | None:
    """Return the change to begin with: the cheapest that gains nearly as much as any.

    Settings are cheapest, then the plug-in, then memory, and a second worker costs most. What
    counts is the gain under every cost model, or if none is worth it under all, that under the
    first.
    """
    gain = attrgetter("low" if any(one.low >= _WORTH for one in found) else "gain")
    steps = sorted((one for one in found if one.kind == "settings"), key=gain, reverse=True)
    for kind in ("plug-in", "memory", "workers"):
        steps += [one for one in found if one.kind == kind]

    enough = max([_WORTH, *(_PREFERRED * gain(one) for one in steps)])
    return next((one for one in steps if gain(one) >= enough), None)
