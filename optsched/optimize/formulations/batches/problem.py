"""The problem that infermax's methods solve, in exact integers: costs, limits and objectives.

The constraint satisfaction problem is that of InferMax (Kim et al. 2024, section 3.3). Its symbols
are I_i for ``prompt`` (s), O_i for ``output`` (o), c for tokens processed, m for KV tokens cached,
and C, P, M and R_max for the limits. The time of a batch is that of
`optsched.costs.cost.BatchCost`. Here it is an integer of a common unit, which is derived from the
decimal text of the coefficients.

The space of schedules is the judge's (`optsched.judge.replay`). Three of its rules are worth
noting.

- A request may be evicted and refilled in the same batch. Family (4) of the paper forbids this. It
  pays if a refill is cheaper than the fixed cost of decoding. It changes none of the 11 optima of
  the paper.
- A request may pause: it holds its KV while batches run without it.
- A prefill in chunks may be evicted halfway. What was cached is then lost.

A schedule may also wait longer than it must. For every objective but TPOT the earliest starts are
best. For TPOT alone it is best to begin after the last arrival and to run without a pause. Only
TPOT combined with other objectives needs chosen starts.

Time counts from the first arrival. The models count an objective by its *level*, which is an
integer or a fraction in units of time (`BatchProblem.level`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import ANY_INSTANCE
from optsched.costs.batch import COEFFICIENTS, decode_ms, fixed_ms, prefill_ms
from optsched.costs.cost import BatchCost
from optsched.optimize.formulations.base import LIMITS, Task, check_prompts
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import InputError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits

OBJECTIVES = ("makespan", "tel", "mean_ttft", "mean_tpot", "max_tpot", "tps")
COUNTED = "slo_attainment"
"""The objective that counts requests within their SLOs. CP-SAT and labels have it."""
SPANS = ("mean_tpot", "max_tpot")
"""Objectives about the time from a request's first token to its last."""
ENDS = ("makespan", "tps")
"""Objectives that depend on the latest finish alone."""
CHUNKS = LIMITS | {"chunked_prefill"}
SWITCHES = CHUNKS | {"arrivals"}
EXTRAS = frozenset({"eviction_free", "below"})
_DECODE, _PREFILL = "kv request base", "square cross kv token request base"
MODELLED = (
    ANY_INSTANCE
    | {"cost.token", "cost.base"}
    | {f"cost.decode_{term}" for term in _DECODE.split()}
    | {f"cost.prefill_{term}" for term in _PREFILL.split()}
)
"""The features of the exact methods (`Method.features`). They read some coefficients by name. Add
one for a method only when its model, and what it leaves out, are right with it."""
UNLIMITED = 2**40
"""What stands for no limit."""
LARGEST_UNITS = 2**52
"""The largest level. int64 holds it a thousandfold, and float64 each smaller one."""
# The most parts into which arrivals may divide the unit of costs, and the share of a limit by which
# a time within an SLO may exceed it.
_FINEST = 10**7
_SPARE = Fraction(1, 10**9)
ARRIVAL_S = Fraction(1, 10**12)
"""By how much arrivals may be rounded down if no short unit divides them."""


@dataclass(frozen=True)
class Costs:
    """Prices of a cost model in exact integers, from the same functions as the judge's floats.

    `values` are in the order of `BatchCost.array`, whose first entry is not used, in units of
    `unit_s`. What a request or a coefficient costs is divided by `divisor` and rounded down, which
    is a relaxation. Whole works are rounded, not their coefficients, so each loses less than a
    unit.
    """

    values: tuple[int, ...]
    unit_s: Fraction
    divisor: int = 1

    @classmethod
    def of(cls, model: BatchCost) -> Costs:
        """Return a cost model in exact integers.

        Coefficients are decimals, in milliseconds a layer. They are brought to a common denominator
        and divided by what they have in common, so that the unit is as large as may be.
        """
        exact_prices = [Fraction(str(model.coefficients.get(name, "0"))) for name in COEFFICIENTS]
        denominator = math.lcm(*(price.denominator for price in exact_prices))
        prices = [int(price * denominator) for price in exact_prices]
        common = math.gcd(*prices)
        values = (0, *(value // common for value in prices))

        return cls(values, Fraction(model.layers * common, 1000 * denominator))

    def __getitem__(self, coefficient: str) -> int:
        """Return a coefficient, divided and rounded down like all costs."""
        return self.values[1 + COEFFICIENTS.index(coefficient)] // self.divisor

    def decode(self, kv: int) -> int:
        """Return the own work of decoding with ``kv`` tokens cached before."""
        work: int = decode_ms(self.values, kv)
        return work // self.divisor

    def prefill(self, tokens: int, kv: int = 0) -> int:
        """Return the own work of prefilling ``tokens`` with ``kv`` tokens cached before."""
        work: int = prefill_ms(self.values, tokens, kv)
        return work // self.divisor

    def prefill_in_chunks(self, tokens: int, batches: int = 1) -> int:
        """Return a lower bound on the own work of a prefill in at least so many batches.

        In chunks of one token the squares shrink to the tokens. Other terms are left out.
        """
        token_work = self["token"] + self["prefill_token"] + self["prefill_square"]
        return token_work * tokens + self["prefill_request"] * batches

    def fixed(self, decodes: bool, prefills: bool) -> int:
        """Return the cost of a batch that does not depend on its requests."""
        cost: int = fixed_ms([v // self.divisor for v in self.values], decodes, prefills)
        return cost

    def finer(self, factor: int) -> Costs:
        """Return the costs in a unit that is 1 / ``factor`` of the present one."""
        return Costs(tuple(value * factor for value in self.values), self.unit_s / factor)

    def coarser(self, factor: int) -> Costs:
        """Return the costs, rounded down, in a unit that is ``factor`` times the present one."""
        return Costs(self.values, self.unit_s * factor, self.divisor * factor)


class Batch(NamedTuple):
    """One batch of a plan: the (request, tokens) it processes, and the requests evicted first."""

    entries: tuple[tuple[int, int], ...]
    evicted: tuple[int, ...] = ()


class Times(NamedTuple):
    """Every request's first token, finish, and largest gap between tokens or 0, in exact units."""

    first: Sequence[Fraction]
    finish: Sequence[Fraction]
    gap: Sequence[Fraction]


@dataclass(eq=False)
class BatchProblem:
    """An instance in seconds with its exact costs and the objectives, the most important first.

    If `below` is given, only schedules count whose first objective is better. `slos` (shape (n,))
    are by name, where requests within them are counted. `budget` is the time for plans and models,
    and `largest` the largest level that a method can hold. `prompt` (s), `output` (o) and `sizes`
    (both) are by request, `capacity` is M, and `offset` the KV tokens of a running request beyond
    its cached ones. `batch_tokens` is C, `prefill_tokens` min(P, C), and `running` R_max.
    """

    instance: Instance
    model: BatchCost
    objectives: tuple[str, ...]
    eviction_free: bool = False
    below: Fraction | None = None
    slos: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    budget: Budget = NO_LIMIT
    largest: int = LARGEST_UNITS

    def __post_init__(self) -> None:
        instance = self.instance
        self.n, self.capacity, self.offset = instance.n, instance.kv_capacity, instance.kv_offset
        self.prompt: list[int] = instance.prompt_tokens.tolist()
        self.output: list[int] = instance.output_tokens.tolist()
        self.sizes = list(zip(self.prompt, self.output, strict=True))
        limits = instance.limits
        self.batch_tokens = limits.max_batch_tokens or UNLIMITED
        self.prefill_tokens = min(limits.max_prefill_tokens or UNLIMITED, self.batch_tokens)
        self.running = limits.max_running or UNLIMITED
        # Where the instance does not say, batches may mix phases, and prefills are whole.
        self.hybrid = instance.hybrid_batching is not False
        self.chunked = instance.chunked_prefill is True

    @cached_property
    def classes(self) -> list[list[int]]:
        """The requests grouped by equal (s, o, arrival, SLOs), each group by index."""
        groups: dict[tuple[float, ...], list[int]] = {}
        keys = (self.instance.release_times.tolist(), *(v.tolist() for v in self.slos.values()))
        for i, key in enumerate(zip(self.prompt, self.output, *keys, strict=True)):
            groups.setdefault(key, []).append(i)

        return list(groups.values())

    # Units

    @cached_property
    def first_arrival(self) -> Fraction:
        """The first arrival in seconds. The time of the models begins there."""
        return Fraction(self.instance.first_arrival)

    @cached_property
    def since_first(self) -> list[Fraction]:
        """Arrivals in seconds since the first one, exactly: the judge's floats as short decimals.

        0.3 s is 0.2 s after 0.1 s, although the floats are not. But if the difference of the
        decimals is another float than the judge's (time stamps with too few digits), the judge's
        counts. From 0 on the two are the same.
        """
        first = _decimal(self.instance.first_arrival)
        since_first = []
        for arrival, judged in zip(self.instance.release_times, self.instance.release, strict=True):
            since = _decimal(arrival) - first
            near = abs(since - Fraction(float(judged))) <= ARRIVAL_S
            since_first.append(since if near or not first else _decimal(judged))

        return since_first

    @cached_property
    def exact(self) -> Costs:
        """The exact costs, in a unit that divides the arrivals exactly or nearly."""
        costs = Costs.of(self.model)
        parts = [a / costs.unit_s for a in self.since_first]
        factor = math.lcm(*(part.denominator for part in parts))
        # Arrivals with many digits would make all numbers large, so they are rounded down instead,
        # by less than a unit, which is at most `ARRIVAL_S`.
        if factor > _FINEST:
            factor = max(1, math.ceil(costs.unit_s / ARRIVAL_S))

        return costs.finer(factor)

    @cached_property
    def shrink(self) -> int:
        """The unit of `costs` over that of `exact`: 1 unless levels would exceed `largest`."""
        c, total = self.exact, 0
        # No schedule that the models look at takes longer: each token is computed on its own, by a
        # prefill and a decode of the largest size.
        for s, o in self.sizes:
            largest = s + o
            total += o * (c.prefill(largest, largest) + c.decode(largest) + c.fixed(True, True))

        # Levels add up n requests, of which times per token count `rate_unit` times at most. The
        # last arrival is when all may begin.
        spread = self.rate_unit if set(SPANS) & set(self.objectives) else 1
        total = (total + int(max(self.since_first) / c.unit_s)) * self.n * spread
        return max(1, -(-total // self.largest))

    @cached_property
    def costs(self) -> Costs:
        """The costs in the integers of the models: exact, or rounded down (a relaxation)."""
        return self.exact if self.shrink == 1 else self.exact.coarser(self.shrink)

    @cached_property
    def exact_arrival(self) -> list[Fraction]:
        """Arrivals since the first one, in exact units, as the judge has them."""
        return [Fraction(float(a)) / self.exact.unit_s for a in self.instance.release]

    @cached_property
    def arrival(self) -> list[int]:
        """`since_first` in the models' unit, rounded down (a relaxation by less than a unit)."""
        return [math.floor(v / self.costs.unit_s) for v in self.since_first]

    @property
    def rounded(self) -> int:
        """By how many units the models' integers may differ from an exact level: n or 0."""
        return self.n if self.shrink > 1 or any(self.since_first) else 0

    @cached_property
    def floored(self) -> int:
        """By how many of the models' units rounded arrivals may lengthen latencies: n or 0."""
        whole = all((v / self.costs.unit_s).denominator == 1 for v in self.since_first)
        return 0 if whole else self.n

    # Work that no schedule avoids

    def own_work(self, s: int, k: int) -> int:
        """Return the min own work of producing token k + 1 of a request with s prompt tokens."""
        c, size = self.costs, s + k
        ways = [c.prefill(size)]
        ways += [c.prefill_in_chunks(size)] if self.chunked else []
        ways += [c.decode(size - 1)] if k else []
        return min(ways)

    @cached_property
    def total_work(self) -> int:
        """The min own work of all requests together."""
        return sum(self.own_work(s, k) for s, o in self.sizes for k in range(o))

    def least_span(self, s: int, k: int) -> int:
        """Return the min time of a request's batches for token k + 1: a decode's or a refill's."""
        c, size = self.costs, s + k
        # Without chunks a refill that takes several batches is not possible (below).
        batches = -(-size // min(self.prefill_tokens, self.capacity))
        work = c.prefill_in_chunks(size, batches) if self.chunked else c.prefill(size)
        refill = work + batches * c.fixed(False, True)
        if k == 0:
            return refill

        decode = c.decode(size - 1) + c.fixed(True, False)
        # A refill may produce the token if an eviction is allowed, and the input fits.
        refillable = self.chunked or batches == 1
        return min(decode, refill) if refillable and not self.eviction_free else decode

    @cached_property
    def least_latency(self) -> list[int]:
        """The min time from start to finish of each request alone."""
        return [sum(self.least_span(s, k) for k in range(o)) for s, o in self.sizes]

    # Objectives

    @cached_property
    def rate_unit(self) -> int:
        """The least common multiple of all o - 1."""
        return math.lcm(1, *(o - 1 for o in self.output if o > 1))

    @cached_property
    def cutoff(self) -> Fraction | None:
        """``below`` as a level in the models' unit, which must not be reached. None without it."""
        if self.below is None:
            return None

        name, value = self.objectives[0], self.below
        # Tokens per second and the makespan mean a latest finish, since the first arrival.
        if name == "tps":
            value = sum(self.output) / value
        if name == "makespan":
            value -= self.first_arrival

        return value / self._scale(name, self.costs.unit_s)

    def rate(self, name: str, output: int, produced: int) -> int:
        """Return how often a batch's time counts for a request with so many tokens produced.

        For ends only the last batch counts, which is not for a request to say, so it is 0.
        """
        if name in ENDS or produced == output:
            return 0
        if name == "tel":
            return 1
        if name == "mean_ttft":
            return int(produced == 0)

        # TPOT counts the time from the first token to the last, each of output - 1 tokens alike.
        return self.rate_unit // (output - 1) if produced else 0

    def level(self, name: str, times: Times) -> Fraction:
        """Return the quantity that stands for an objective, in exact units.

        - makespan, tps: the latest finish since the first arrival.
        - tel: the sum of latencies.
        - mean_ttft: the sum of (first token - arrival).
        - mean_tpot: the sum of (finish - first token) L / (o - 1), with L = `rate_unit`.
        - max_tpot: the max of the same terms.
        - slo_attainment: the number of requests that miss an SLO.
        """
        if name == COUNTED:
            return Fraction(sum(self._misses(i, times) for i in range(self.n)))
        if name in ENDS:
            return max(times.finish)
        if name in ("tel", "mean_ttft"):
            counted = times.finish if name == "tel" else times.first
            return sum(counted, Fraction(0)) - sum(self.exact_arrival)

        rates = [
            (finish_i - first_i) * (self.rate_unit // (o - 1))
            for finish_i, first_i, o in zip(times.finish, times.first, self.output, strict=True)
            if o > 1
        ]
        return sum(rates, Fraction(0)) if name == "mean_tpot" else max(rates)

    def within(self, slo: str, i: int) -> Fraction | None:
        """Return a limit in exact units, with 1e-9 of it to spare; TPOT's is on all decodes."""
        limit, output = float(self.slos[slo][i]), self.output[i]
        # One token has no time between tokens.
        if math.isinf(limit) or (slo in ("slo_tpot", "slo_gap") and output == 1):
            return None

        steps = output - 1 if slo == "slo_tpot" else 1
        return Fraction(limit) * steps * (1 + _SPARE) / self.exact.unit_s

    def _misses(self, i: int, times: Times) -> bool:
        """Whether a request exceeds one of its limits."""
        first, finish, arrival = times.first[i], times.finish[i], self.exact_arrival[i]
        spans = {"slo_ttft": first - arrival, "slo_latency": finish - arrival}
        spans |= {"slo_tpot": finish - first, "slo_gap": times.gap[i]}
        limits = {slo: self.within(slo, i) for slo in spans}

        return any(limit is not None and spans[slo] > limit for slo, limit in limits.items())

    def levels(self, times: Times) -> tuple[Fraction, ...]:
        """Return the levels of all objectives, the most important first."""
        return tuple(self.level(name, times) for name in self.objectives)

    def value(self, name: str, level: Fraction | int, *, exact: bool = False) -> float:
        """Return an objective's value for a level in the models' unit, or in the exact unit."""
        # The level is the number of requests that miss an SLO, and the value the share of others.
        if name == COUNTED:
            return float((self.n - Fraction(level)) / self.n)

        value = level * self._scale(name, self.exact.unit_s if exact else self.costs.unit_s)
        if name == "tps":
            return float(sum(self.output) / value)

        return float(value + self.first_arrival if name == "makespan" else value)

    def _scale(self, name: str, unit: Fraction) -> Fraction:
        """Return the value in seconds of a level of 1, which counts in ``unit``."""
        if name == "mean_ttft":
            return unit / self.n
        if name == "mean_tpot":
            return unit / (self.rate_unit * sum(o > 1 for o in self.output))

        return unit / self.rate_unit if name == "max_tpot" else unit


def _decimal(arrival: float) -> Fraction:
    """Return an arrival in seconds as its shortest decimal, within 1e-15 of it relatively."""
    return Fraction(repr(float(arrival)))


def problem(task: Task, budget: Budget = NO_LIMIT, largest: int = LARGEST_UNITS) -> BatchProblem:
    """Return the problem of a task, after checking it."""
    instance, model = task.instance, task.cost_model
    if not isinstance(model, BatchCost):
        raise UsageError("formulation: found no cost model of batches; infermax expected one")

    objectives = task.names
    for name in objectives:
        if name in SPANS and not (instance.output_tokens > 1).any():
            raise UsageError(
                f"objective: found {name} for requests of one output token each; expected a "
                "request with more than one"
            )

    slos: Mapping[str, NDArray[np.float64]] = {}
    below = task.extras.get("below")
    if COUNTED in objectives:
        slos = all_limits(instance, None)
        if below is not None:
            raise UsageError(f"below: found it with {COUNTED}; expected a minimized objective")

    if below is not None and not 0 < float(below) < math.inf:
        raise InputError(f"below: found {below!r}; expected a number > 0")
    # Without chunks a prompt must fit into one batch.
    if instance.chunked_prefill is not True:
        expected = "expected a larger limit, or chunked_prefill = true"
        check_prompts(instance, f", without chunked prefill; {expected}")

    return BatchProblem(
        instance,
        model,
        tuple(objectives),
        eviction_free=bool(task.extras.get("eviction_free")),
        below=None if below is None else Fraction(float(below)),
        slos=slos,
        budget=budget,
        largest=largest,
    )
