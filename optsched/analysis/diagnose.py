"""What to change first on a server of vLLM: its own run repeated by the twin, then with changes.

The twin is the policy ``vllm-v1`` under a cost model. Where the run was measured, the times of
prefills and of decodes are each multiplied by a factor, so that the twin's latencies and TTFTs are
the measured ones as far as two factors can do it. What is left of the difference is the error, with
which every gain is computed again under slower and faster machines.
"""

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from optsched.analysis.why import why
from optsched.bounds import lower_bound
from optsched.bounds.service import most_within
from optsched.costs.cost import BatchCost
from optsched.files.measured import Measured
from optsched.files.results import cost_model_reference, head
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.policies.engine.simulate import simulate
from optsched.policies.vllm_v1 import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance

REPEATS = 0.3
"""The median relative error up to which the twin is said to repeat a run."""
_UNMEASURED = 0.2
"""The error that is assumed of a cost model that no measured time confirms."""
_WORTH = 0.05
"""The gain below which nothing is worth changing."""
_PREFERRED = 0.8
"""Settings come first if they gain this share of what memory does, and memory before workers."""
_PREFILL = ("token", "prefill_")
_COSTS = {"settings": 0, "memory": 1, "workers": 2}


class Change(NamedTuple):
    """A change of the server, and what the twin gains by it.

    Attributes
    ----------
    what, kind : str
        The setting and its new value, and whether it takes settings, memory or workers.
    gain, low, high : float
        The share of the loss that it takes away: of requests that miss their SLOs, or of the mean
        latency; and the range under the error of the cost model.
    metrics : dict
        The metrics of the twin with the change.
    """

    what: str
    kind: str
    gain: float
    low: float
    high: float
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
    error : float or None
        The median relative error of the twin's latencies; None without measured times.
    base : dict
        The metrics of the twin as the server is set.
    waits : dict
        What its requests wait for, in seconds (`optsched.analysis.why`).
    changes : tuple of Change
        In the order of their gains.
    first : Change or None
        What to change first; None if nothing is worth it.
    sure : float
        The share of the cost models tried under which ``first`` gains anything worth it.
    bound : float
        The mean latency that no schedule beats.
    attainable : float or None
        The share of requests within SLOs that no schedule exceeds.
    """

    instance: Instance
    cost_model: BatchCost
    error: float | None
    base: dict[str, Any]
    waits: dict[str, float]
    changes: tuple[Change, ...]
    first: Change | None
    sure: float
    bound: float
    attainable: float | None

    @property
    def misses(self) -> bool:
        """Whether gains are of requests that miss their SLOs, and not of the mean latency."""
        return self.base["slo_attainment"] not in (None, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``diagnose --json``."""
        return {
            **head("optsched-diagnosis", "diagnose", self.instance),
            "cost_model": cost_model_reference(self.instance, self.cost_model),
            "coefficients_ms_per_layer": dict(self.cost_model.coefficients),
            "error": self.error,
            "metrics": self.base,
            "waits_s": self.waits,
            "changes": [one._asdict() for one in self.changes],
            "first": None if self.first is None else self.first._asdict(),
            "sure": self.sure,
            "mean_latency_bound": self.bound,
            "slo_attainment_bound": self.attainable,
        }


def diagnose(
    instance: Instance,
    cost_model: BatchCost,
    *,
    measured: Measured | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    stop: threading.Event | None = None,
    **slos: float,
) -> Diagnosis:
    """Say what to change first on a server of vLLM, by its twin with other settings.

    Parameters
    ----------
    instance : Instance
        The requests, in seconds, with the server's KV capacity.
    cost_model : BatchCost
        As measured or of published peaks; of tables, the linear approximation. With measured times
        it is calibrated.
    measured : Measured, optional
        The times that the server took.
    max_num_seqs, max_num_batched_tokens : int
        As the server is set.
    stop : threading.Event, optional
        When it is set, no further change is tried, and the answer is of those that were.
    **slos : float
        SLOs of every request (``slo_ttft``, ``slo_tpot``, ``slo_gap``, ``slo_latency``).

    Returns
    -------
    Diagnosis

    Raises
    ------
    InputError
        The twin does not repeat the measured run, so nothing is said of changes.
    """
    spec = _spec(max_num_seqs, max_num_batched_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error, cost = None, replace(cost_model, table=None)
        if measured is not None:
            measured.check(instance)
            cost, error = _calibrated(instance, cost, measured, spec)

        spread = max(_UNMEASURED if error is None else error, 0.02)
        models = [_scaled(cost, f, f) for f in (1.0, 1.0 - spread, 1.0 + spread)]
        bases = [_run(instance, spec, model, slos) for model in models]
        found = []
        for what, kind, changed, other in _grid(instance, max_num_seqs, max_num_batched_tokens):
            if stop is not None and stop.is_set():
                break
            try:
                runs = [_run(changed, other, model, slos) for model in models]
            except OptschedError:
                continue  # for example settings that the instance does not allow

            gains = [
                1 - _loss(run, base, slos) / _loss(base, base, slos)
                for run, base in zip(runs, bases, strict=True)
            ]
            found.append(Change(what, kind, gains[0], min(gains), max(gains), runs[0].metrics))

        value, _ = lower_bound(instance, cost_model=cost, time_limit_s=2.0)
        attainable = most_within(instance, cost, slos) / instance.n if slos else None

    changes = tuple(sorted(found, key=lambda one: -one.gain))
    first = _first(changes)
    limits: dict[str, Any] = {"max_num_seqs": max_num_seqs}
    limits["max_num_batched_tokens"] = max_num_batched_tokens
    waits = why(instance, simulate(instance, spec, cost), cost, **limits).totals()
    sure = 0.0 if first is None else (1.0 if first.low >= _WORTH else 0.5)
    bound = 0.0 if value is None else value / instance.n
    base = bases[0].metrics
    return Diagnosis(instance, cost, error, base, waits, changes, first, sure, bound, attainable)


def _spec(seqs: int, tokens: int, more: str = "") -> str:
    return f"vllm-v1:max_num_seqs={seqs},max_num_batched_tokens={max(tokens, seqs)}{more}"


def _grid(instance: Instance, seqs: int, tokens: int) -> list[tuple[str, str, Instance, str]]:
    """Return changes: words, kind, and the instance and the policy with it."""
    seats = [max(1, round(seqs * factor)) for factor in (0.5, 2, 4, 8)]
    sizes = [max(seqs, 64, round(tokens * factor)) for factor in (0.125, 0.25, 0.5, 2, 4)]
    others = [f"long_prefill_token_threshold={max(64, tokens // 8)}", "prefill_schedule_interval=4"]
    settings = [(f"max_num_seqs={value}", _spec(value, tokens)) for value in seats]
    settings += [(f"max_num_batched_tokens={value}", _spec(seqs, value)) for value in sizes]
    settings += [
        (more, _spec(seqs, tokens, f",{more}"))
        for more in (*others, "policy=priority,priority=prompt")
    ]
    found = [(words, "settings", instance, spec) for words, spec in settings]
    for factor in (1.5, 2, 4):
        larger = replace(instance, kv_capacity=round(instance.kv_capacity * factor))
        words = f"kv_capacity={larger.kv_capacity}"
        found.append((words, "memory", larger, _spec(seqs, tokens)))

    routed = _spec(seqs, tokens, ",workers=2,router=least-requests")
    return [*found, ("workers=2", "workers", instance, routed)]


def _run(instance: Instance, spec: str, cost: BatchCost, slos: Mapping[str, Any]) -> Evaluation:
    return evaluate(instance, simulate(instance, spec, cost), cost, **slos)


def _loss(run: Evaluation, base: Evaluation, slos: Mapping[str, Any]) -> float:
    """Return what is to be small: the share of SLOs missed, or the mean latency where none is."""
    if slos and base.metrics["slo_attainment"] != 1:
        return 1.0 - float(run.metrics["slo_attainment"] or 0.0)

    return float(run.metrics["mean_latency"] or 0.0)


def _first(changes: tuple[Change, ...]) -> Change | None:
    """Return the change to begin with: what costs less first, if it gains enough of the rest."""
    best: Change | None = None
    for kind in sorted(_COSTS, key=_COSTS.__getitem__, reverse=True):
        own = max((c for c in changes if c.kind == kind), key=lambda c: c.gain, default=None)
        if own is not None and own.gain >= _WORTH:
            best = own if best is None or own.gain >= _PREFERRED * best.gain else best

    return best


def _scaled(cost: BatchCost, prefill: float, rest: float) -> BatchCost:
    """Return a linear cost model whose prefills and decodes take other times."""
    texts = {
        key: f"{float(text) * (prefill if key.startswith(_PREFILL) else rest):.9g}"
        for key, text in cost.coefficients.items()
    }
    return replace(cost, name=f"{cost.name}, calibrated", coefficients=texts)


def _calibrated(
    instance: Instance, cost: BatchCost, measured: Measured, spec: str
) -> tuple[BatchCost, float]:
    """Return the cost model whose two factors fit a run best, and the error that is left."""
    from scipy.optimize import minimize

    def differences(factors: Any) -> tuple[float, float]:
        run = _run(instance, spec, _scaled(cost, *np.exp(factors)), {})
        off = float(np.median(np.abs(np.log(run.latency / measured.latency))))
        if measured.ttft is None:
            return off, 0.0

        seen = np.maximum(measured.ttft, 1e-4)
        return off, float(np.median(np.abs(np.log(run.ttft / seen))))

    starts = np.log([1.0, 2.0, 4.0])
    start = min(starts, key=lambda x: sum(differences((x, x))))
    options = {"maxfev": 80, "xatol": 0.01, "fatol": 0.002, "initial_simplex": None}
    options["initial_simplex"] = start + np.array([[0, 0], [0.4, 0], [0, 0.4]])
    best = minimize(lambda x: sum(differences(x)), (start, start), method="Nelder-Mead",
                    options=options).x  # fmt: skip
    error = float(np.expm1(differences(best)[0]))
    if error > REPEATS:
        raise InputError(
            f"measured: found latencies from which the twin's differ by {error:.0%} in the median; "
            f"expected at most {REPEATS:.0%}: the settings, the KV capacity or the cost model are "
            "not the server's, so nothing can be said of changes"
        )

    return _scaled(cost, *np.exp(best)), error
