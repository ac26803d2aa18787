"""Lower bounds for the batch model from the work that no schedule can avoid.

The batch times are those of Kim et al. 2024, and the rules those of the judge. On one worker every
request costs the following, whatever the schedule.

*Own work* and *shares of fixed costs* are those of `optsched.bounds.checker.requests`, which has
the proof and computes them exactly; here they become seconds, for other bounds, too.

A batch of length T thus has room for at most T of own work and shares of its requests, and a
schedule is a single preemptive machine on which request i has received at least w_i by its
completion. Work lost to evictions only adds to it. N workers together are such a machine of N times
the speed: whatever they do at the same time, it does one after another, as fast.

Notes
-----
Times are counted from the first arrival in whole picoseconds. Lengths and arrivals are rounded
down, so sums are exact in integers of any size. A relative margin of 1e-9 covers that a request's
length is a float64, and the rounding of the judge. The bounds hold for both eviction modes, with
and without chunking as the instance allows; certificates are for one worker.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import (
    ANY_INSTANCE,
    CHARGES,
    WHOLE_BLOCKS,
    WORKERS,
    Bound,
    BoundTask,
    Proof,
)
from optsched.bounds.checker.fields import COST_TERMS
from optsched.bounds.checker.prefixes import Charge
from optsched.bounds.checker.requests import (
    Part,
    Rates,
    Request,
    exact_rates,
    request_of,
    ticks_since,
)
from optsched.bounds.checker.work import work_ticks
from optsched.bounds.leaves import TICKS_PER_SECOND, work_leaf
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance

Floats = NDArray[np.float64]
_SAFETY = 1e-9

PROVED_FOR = ANY_INSTANCE | WHOLE_BLOCKS | {f"cost.{name}" for name in COST_TERMS}
"""Features that the bounds in seconds are proved for."""


@dataclass(frozen=True, eq=False)
class Work:
    """A lower bound on the machine time of each request, in seconds, each of shape (n,).

    ``prefill`` and ``total`` are machine time (own work and shares) until the first token and until
    the last. ``first`` and ``chain`` are the times to these if the request were alone, one batch
    after another with its fixed cost.
    """

    prefill: Floats
    total: Floats
    first: Floats
    chain: Floats


def requests_of(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None = None
) -> tuple[Rates, list[Request]]:
    """Return the exact least times of requests, of whole prompts or of what is charged."""
    texts = {name: Fraction(cost.coefficients.get(name, 0)) for name in COST_TERMS}
    rates = exact_rates(instance, cost.layers, texts, shared=charged is not None)
    return rates, with_rates(rates, instance, charged)


def with_rates(rates: Rates, instance: Instance, charged: Sequence[Charge] | None) -> list[Request]:
    """Return the least times of requests under some rates, of whole prompts or what is charged."""
    sizes = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    charges: Sequence[Charge | None] = charged or [None] * instance.n
    # Many requests are alike, and computed once.
    times_of = cache(lambda s, o, charge: request_of(rates, s, o, charge, TICKS_PER_SECOND))
    return [times_of(*row) for row in zip(*sizes, charges, strict=True)]


def in_seconds(rates: Rates, rows: Iterable[Sequence[int]]) -> Floats:
    """Return rows of exact times as columns of seconds, rounded down.

    An exact time is an integer over the scale of the rates.
    """
    columns = np.array([[time / rates.scale for time in row] for row in rows]).T
    return np.asarray(columns * (1 - _SAFETY))


def unavoidable_work(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None = None
) -> Work:
    """Return the work that no schedule can avoid (see the module's text for the proof)."""
    rates, requests = requests_of(instance, cost, charged)
    rows = ((r.own + r.share, r.total, r.first, r.chain) for r in requests)
    return Work(*in_seconds(rates, rows))


def part_of(task: BoundTask) -> Part:
    """Return the requests of a task in order of arrival, as the checker has them."""
    instance, arrival = task.instance, task.instance.release_times
    rates, requests = requests_of(instance, task.batch_cost, task.charged)
    order = np.argsort(arrival, kind="stable")
    since = sorted(ticks_since(arrival.tolist(), TICKS_PER_SECOND))
    in_order, weight = [requests[i] for i in order], instance.weights[order].tolist()
    machine = instance, task.cost_model
    # []: there is one set of rates, so the times until first tokens are those of the requests.
    return Part(since, in_order, rates, TICKS_PER_SECOND, [], machine, task.workers, weight=weight)


def _from_work(task: BoundTask, objective: str) -> tuple[float, dict[str, Any] | None]:
    """Return what work proves of a sum over requests or of the makespan, in seconds, and a leaf.

    Certificates are for one worker, so there is no leaf for several.
    """
    ticks = work_ticks(part_of(task), objective)
    leaf = work_leaf() if task.workers == 1 else None
    return ticks / TICKS_PER_SECOND * (1 - _SAFETY), leaf


def work_tel(task: BoundTask, budget: Budget) -> Proof:
    """Return the SRPT bound on total latency in seconds."""
    total, leaf = _from_work(task, "tel")
    return Proof(total, tree=leaf)


def work_ttft(task: BoundTask, budget: Budget) -> Proof:
    """Return the SRPT bound on mean TTFT in seconds, for which only prefills count."""
    total, leaf = _from_work(task, "mean_ttft")
    return Proof(total / task.instance.n, tree=leaf)


def work_makespan(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on makespan in seconds.

    It is the max over t of t plus the work that arrives from t on, and any arrival plus the chain.
    """
    latest, leaf = _from_work(task, "makespan")
    return Proof(latest + float(task.instance.first_arrival), tree=leaf)


_WORK = "unavoidable GPU work on one preemptive machine"
_PREFILLS = "unavoidable prefill work on one machine"
_LATEST = "work that arrives from t on, and chains"
_PROVED = PROVED_FOR | WORKERS | CHARGES
WORK_TEL = Bound("work", _WORK, "second", ("tel",), work_tel, _PROVED, certifies=True)
WORK_TTFT = Bound(
    "prefill-work", _PREFILLS, "second", ("mean_ttft",), work_ttft, _PROVED, certifies=True
)
WORK_MAKESPAN = Bound(
    "work-makespan", _LATEST, "second", ("makespan",), work_makespan, _PROVED, certifies=True
)
