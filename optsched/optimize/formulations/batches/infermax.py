"""InferMax's constraint satisfaction problem (003, section 3.3): what its methods share.

Symbols of the paper: I_i ``prompt`` (s), O_i ``output`` (o), c tokens processed, m KV tokens
cached, C, P, M and R_max the limits. A batch's time is `optsched.costs.cost.BatchCost`'s, here in
exact integers of a common unit, taken from the coefficients' decimal text.

The space of schedules is the judge's (`optsched.judge.replay`). Three of its rules deserve words:

- A request may be evicted and refilled in the same batch; family (4) of the paper forbids it. It
  pays where a refill is cheaper than the fixed cost of decoding; it changes none of the paper's
  11 optima.
- A request may pause: hold its KV while batches pass it over.
- A prefill in chunks may be evicted halfway; what was cached is then lost.

A schedule may also wait longer than it must. For every objective but TPOT the earliest starts are
best. TPOT alone is best after the last arrival, without a pause; only TPOT behind other
objectives needs chosen starts.

**Number of batches.** Without chunks every processed entry produces a token, and a batch holds at
least one entry: no schedule has more than sum o batches, whatever its objective. With chunks, the
chunks of a prefill that is evicted halfway can be left out (times and KV only fall; a batch left
empty is dropped), and a prefill of s + k tokens that is completed has at most s + k chunks: at
most sum_i sum_{k < o_i} (s_i + k) batches. If the first objective is makespan, TPS or TEL, its
value U of a schedule at hand bounds the last completion of better ones (TEL: F <= U less the least
latencies of all but the last to finish), and J batches take at least J (base + min(decode_base,
prefill_base)), n_prefill (prefill_base - decode_base)+ and everyone's own work, where n_prefill
= ceil(sum s / min(C, P, M)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optsched.costs.batch import COEFFICIENTS
from optsched.costs.cost import BatchCost
from optsched.optimize.formulations.base import Answer, Formulation, Task
from optsched.optimize.solvers.base import Status
from optsched.problem.errors import InfeasibleError, InputError, SolverError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns, from_batches

OBJECTIVES = ("makespan", "tel", "mean_ttft", "mean_tpot", "max_tpot", "tps")
LIMITS = frozenset({"max_batch_tokens", "max_prefill_tokens", "max_running", "hybrid_batching_off"})
SWITCHES = LIMITS | {"chunked_prefill", "arrivals"}
EXTRAS = frozenset({"eviction_free", "below"})
UNLIMITED = 2**40
_LARGEST_UNITS = 2**52
_FINEST = 10**7
_ARRIVAL_S = Fraction(1, 10**12)
"""What arrivals may be rounded down by where no short unit divides them."""


@dataclass(frozen=True)
class Costs:
    """Coefficients of a batch's time as integers; see `BatchCost` for what each multiplies."""

    token: int
    base: int
    decode_kv: int
    decode_request: int
    decode_base: int
    prefill_square: int
    prefill_cross: int
    prefill_kv: int
    prefill_token: int
    prefill_request: int
    prefill_base: int
    unit_s: Fraction

    def decode(self, kv: int) -> int:
        """Own work of decoding with ``kv`` tokens cached before."""
        return self.token + self.decode_request + self.decode_kv * kv

    def prefill(self, tokens: int, kv: int = 0) -> int:
        """Own work of prefilling ``tokens`` with ``kv`` tokens cached before."""
        return (
            (self.token + self.prefill_token) * tokens
            + self.prefill_square * tokens * tokens
            + self.prefill_cross * tokens * kv
            + self.prefill_kv * kv
            + self.prefill_request
        )

    @property
    def least_batch(self) -> int:
        """Least fixed cost of a batch."""
        return self.base + min(self.decode_base, self.prefill_base)

    def finer(self, factor: int) -> Costs:
        """Return the costs in a unit ``factor`` times as short."""
        ints = {name: getattr(self, name) * factor for name in COEFFICIENTS}
        return Costs(**ints, unit_s=self.unit_s / factor)

    def coarser(self, factor: int) -> Costs:
        """Return the costs in a unit ``factor`` times as long, rounded down."""
        ints = {name: getattr(self, name) // factor for name in COEFFICIENTS}
        return Costs(**ints, unit_s=self.unit_s * factor)


def exact_costs(model: BatchCost) -> Costs:
    """Return a cost model in exact integers: whole units of layers / 10^k milliseconds."""
    parts = {name: Fraction(str(model.coefficients.get(name, "0"))) for name in COEFFICIENTS}
    whole = math.lcm(*(part.denominator for part in parts.values()))
    ints = {name: int(part * whole) for name, part in parts.items()}
    common = math.gcd(*ints.values())
    return Costs(
        **{name: value // common for name, value in ints.items()},
        unit_s=Fraction(model.layers * common, 1000 * whole),
    )


@dataclass(frozen=True)
class Batch:
    """One batch of a plan: requests evicted before it, and (request, tokens) processed."""

    entries: tuple[tuple[int, int], ...]
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Times:
    """First token and finish of every request, in exact units, and its batches' ends."""

    first: tuple[Fraction, ...]
    finish: tuple[Fraction, ...]
    end: tuple[Fraction, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """An instance, its exact costs and what is asked, checked.

    Parameters
    ----------
    instance : Instance
    model : BatchCost
    objectives : tuple of str
    eviction_free : bool
    below : Fraction, optional
        Only schedules whose first objective is better than this value (in the instance's
        units) count.
    """

    instance: Instance
    model: BatchCost
    objectives: tuple[str, ...]
    eviction_free: bool = False
    below: Fraction | None = None

    @cached_property
    def prompt(self) -> list[int]:
        """s, by request."""
        return [int(v) for v in self.instance.prompt_tokens]

    @cached_property
    def output(self) -> list[int]:
        """o, by request."""
        return [int(v) for v in self.instance.output_tokens]

    @property
    def n(self) -> int:
        """Number of requests."""
        return self.instance.n

    @property
    def capacity(self) -> int:
        """M."""
        return self.instance.kv_capacity

    @property
    def offset(self) -> int:
        """KV tokens of a running request beyond its cached ones."""
        return self.instance.kv_offset

    @property
    def batch_tokens(self) -> int:
        """C."""
        return self.instance.limits.max_batch_tokens or UNLIMITED

    @property
    def prefill_tokens(self) -> int:
        """min(P, C): tokens that prefills process in one batch."""
        return min(self.instance.limits.max_prefill_tokens or UNLIMITED, self.batch_tokens)

    @property
    def running(self) -> int:
        """R_max."""
        return self.instance.limits.max_running or UNLIMITED

    @property
    def hybrid(self) -> bool:
        """Whether a batch may hold both phases."""
        return self.instance.hybrid_batching is not False

    @property
    def chunked(self) -> bool:
        """Whether a prefill may be split."""
        return self.instance.chunked_prefill is True

    @cached_property
    def first_arrival(self) -> Fraction:
        """The first arrival in seconds, where the models' time begins."""
        return Fraction(self.instance.first_arrival)

    @cached_property
    def since_first(self) -> list[Fraction]:
        """Arrivals in seconds since the first: the judge's floats as short decimals.

        0.3 s after 0.1 s is 0.2 s, although the floats differ by 0.19999999999999998. Where the
        decimals' difference is another moment (time stamps with too few digits), the float is it.
        """
        first = _decimal(self.instance.first_arrival)
        found = []
        for arrival, judged in zip(self.instance.arrival, self.instance.release, strict=True):
            since = _decimal(arrival) - first
            near = abs(since - Fraction(float(judged))) <= _ARRIVAL_S
            found.append(since if near or not first else _decimal(judged))
        return found

    @cached_property
    def exact(self) -> Costs:
        """The costs, exactly; in a unit that divides the arrivals, or nearly."""
        costs = exact_costs(self.model)
        parts = [a / costs.unit_s for a in self.since_first]
        factor = math.lcm(*(part.denominator for part in parts))
        if factor > _FINEST:
            factor = max(1, math.ceil(costs.unit_s / _ARRIVAL_S))
        return costs.finer(factor)

    @cached_property
    def shrink(self) -> int:
        """Factor between `exact` and the unit of `costs`; 1 unless integers would overflow."""
        c, total = self.exact, 0
        for s, o in zip(self.prompt, self.output, strict=True):
            most = s + o
            total += o * (c.prefill(most, most) + c.decode(most) + c.base)
            total += o * (c.decode_base + c.prefill_base)
        spread = self.rate_unit if {"mean_tpot", "max_tpot"} & set(self.objectives) else 1
        total = (total + int(self.last_arrival / c.unit_s)) * self.n * spread
        return max(1, -(-total // _LARGEST_UNITS))

    @cached_property
    def costs(self) -> Costs:
        """The costs in the integers of the models: exact, or rounded down (a relaxation)."""
        return self.exact if self.shrink == 1 else self.exact.coarser(self.shrink)

    @cached_property
    def last_arrival(self) -> Fraction:
        """The latest arrival in seconds since the first."""
        return max(self.since_first)

    @cached_property
    def arrival(self) -> list[int]:
        """`since_first` in the models' unit, rounded down (a relaxation by less than a unit)."""
        unit = self.costs.unit_s
        return [math.floor(v / unit) for v in self.since_first]

    @cached_property
    def rate_unit(self) -> int:
        """Least common multiple of all o - 1."""
        return math.lcm(1, *(o - 1 for o in self.output if o > 1))

    @cached_property
    def classes(self) -> list[list[int]]:
        """Requests by equal (s, o, arrival), each list rising."""
        groups: dict[tuple[int, int, float], list[int]] = {}
        for i, key in enumerate(
            zip(self.prompt, self.output, self.instance.arrival.tolist(), strict=True)
        ):
            groups.setdefault(key, []).append(i)
        return list(groups.values())

    def own_work(self, s: int, k: int) -> int:
        """Least own work of producing token k + 1 of a request with s prompt tokens."""
        c, size = self.costs, s + k
        refill = c.prefill(size)
        if self.chunked:  # in chunks of one token the squares shrink to the tokens
            whole = (c.token + c.prefill_token + c.prefill_square) * size + c.prefill_request
            refill = min(refill, whole)
        return refill if k == 0 else min(refill, c.decode(size - 1))

    @cached_property
    def total_work(self) -> int:
        """Least own work of all requests."""
        pairs = zip(self.prompt, self.output, strict=True)
        return sum(self.own_work(s, k) for s, o in pairs for k in range(o))

    def least_span(self, s: int, k: int) -> int:
        """Least time of the batches that lead from token k to token k + 1 of a request.

        A decode's batch, or those of a refill, all of which come after token k.
        """
        c, size = self.costs, s + k
        batches = -(-size // min(self.prefill_tokens, self.capacity))
        if self.chunked:
            unit = c.token + c.prefill_token + c.prefill_square
            work = unit * size + c.prefill_request * batches
        else:
            work = c.prefill(size)
        refill = work + batches * (c.base + c.prefill_base)
        if k == 0:
            return refill
        decode = c.decode(size - 1) + c.base + c.decode_base
        refillable = self.chunked or batches == 1
        return min(decode, refill) if refillable and not self.eviction_free else decode

    @cached_property
    def least_latency(self) -> list[int]:
        """Least time from start to finish of each request alone."""
        pairs = zip(self.prompt, self.output, strict=True)
        return [sum(self.least_span(s, k) for k in range(o)) for s, o in pairs]

    def max_batches(self, best: Times | None) -> int:
        """Return J: some optimal schedule has no more batches (proof at the module's head)."""
        if self.chunked:
            pairs = zip(self.prompt, self.output, strict=True)
            most = sum(s + k for s, o in pairs for k in range(o))
        else:
            most = sum(self.output)
        last = self._latest_finish(best)
        if last is not None:
            c = self.costs
            per = min(self.prefill_tokens, self.capacity)
            prefills = -(-sum(self.prompt) // per)
            spare = last - self.total_work
            spare -= prefills * max(0, c.prefill_base - c.decode_base)
            if c.least_batch > 0:
                most = min(most, max(0, math.floor(spare / c.least_batch)))
        return max(most, max(self.output))

    def _latest_finish(self, best: Times | None) -> Fraction | int | None:
        """Return a bound on the last completion of every schedule that is not worse."""
        name, unit = self.objectives[0], self.shrink
        limit = self.cutoff
        if best is not None:
            # What rounding of costs and arrivals may add to each request's times.
            rounded = unit > 1 or any(self.since_first)
            value = self.level(name, best) / unit + (self.n + 1 if rounded else 0)
            limit = value if limit is None else min(limit, value)
        if limit is None or name in ("mean_ttft", "mean_tpot", "max_tpot"):
            return None
        if name != "tel":
            return limit
        least = self.least_latency
        return limit - sum(least) + max(least) + max(self.arrival) + 1

    @cached_property
    def cutoff(self) -> Fraction | None:
        """``below`` as a level in the models' unit (exclusive), or None."""
        return None if self.below is None else self.to_level(self.objectives[0], self.below)

    def level(self, name: str, times: Times) -> Fraction:
        """Return the quantity that stands for an objective, in exact units.

        Latest finish since the first arrival (makespan, tps), sum of latencies (tel), of first
        tokens less arrivals (mean_ttft), of (finish - first) L / (o - 1) with L = `rate_unit`
        (mean_tpot) or the largest of these (max_tpot).
        """
        unit = self.exact.unit_s
        arrival = [Fraction(float(a)) / unit for a in self.instance.release]
        if name in ("makespan", "tps"):
            return max(times.finish)
        if name == "tel":
            return sum(times.finish, Fraction(0)) - sum(arrival)
        if name == "mean_ttft":
            return sum(times.first, Fraction(0)) - sum(arrival)
        rates = [
            (f - t) * (self.rate_unit // (o - 1))
            for f, t, o in zip(times.finish, times.first, self.output, strict=True)
            if o > 1
        ]
        return sum(rates, Fraction(0)) if name == "mean_tpot" else max(rates)

    def _scale(self, name: str, unit: Fraction) -> Fraction:
        if name == "mean_ttft":
            return unit / self.n
        if name == "mean_tpot":
            return unit / (self.rate_unit * sum(o > 1 for o in self.output))
        return unit / self.rate_unit if name == "max_tpot" else unit

    def to_value(self, name: str, level: Fraction | int, *, exact: bool = False) -> float:
        """Return an objective's value for a level in the models' (or the exact) unit."""
        value = level * self._scale(name, self.exact.unit_s if exact else self.costs.unit_s)
        if name == "tps":
            return float(sum(self.output) / value)
        return float(value + self.first_arrival if name == "makespan" else value)

    def to_level(self, name: str, value: Fraction) -> Fraction:
        """Return the level in the models' unit for an objective's value."""
        if name == "tps":
            value = sum(self.output) / value
        if name == "makespan":
            value -= self.first_arrival
        return value / self._scale(name, self.costs.unit_s)

    def levels(self, times: Times) -> tuple[Fraction, ...]:
        """Return the levels of all objectives, the most important first."""
        return tuple(self.level(name, times) for name in self.objectives)


def _decimal(arrival: float) -> Fraction:
    """Return an arrival in seconds as its shortest decimal, less than 1e-15 of it away."""
    return Fraction(repr(float(arrival)))


def problem(task: Task) -> Problem:
    """Return what a task asks, checked.

    Raises
    ------
    UsageError
        A TPOT where no request has a second token; no cost model.
    InfeasibleError
        A request that a limit rules out, with the limit.
    InputError
        A ``below`` that is not a number > 0.
    """
    instance, model = task.instance, task.cost_model
    if not isinstance(model, BatchCost):
        raise UsageError("formulation: infermax needs a cost model of batches")
    objectives = task.names or ("makespan",)
    for name in objectives:
        if name in ("mean_tpot", "max_tpot") and not (instance.output_tokens > 1).any():
            raise UsageError(
                f"objective: {name} has no value, as no request has more than one output token"
            )
    below = task.extras.get("below")
    if below is not None and not 0 < float(below) < math.inf:
        raise InputError(f"below: {below!r} is not a number > 0")
    if instance.chunked_prefill is not True:
        for name in ("max_batch_tokens", "max_prefill_tokens"):
            limit = getattr(instance.limits, name)
            if limit is not None and (instance.prompt_tokens > limit).any():
                i = int(np.argmax(instance.prompt_tokens > limit))
                raise InfeasibleError(
                    f"limits.{name}: request {i}: prompt_tokens {instance.prompt_tokens[i]} "
                    f"exceeds {limit} and prefills are not chunked; chunked_prefill = true, or "
                    "a larger limit, is right"
                )
    return Problem(
        instance,
        model,
        tuple(objectives),
        eviction_free=bool(task.extras.get("eviction_free")),
        below=None if below is None else Fraction(float(below)),
    )


def batches_of(schedule: Schedule) -> list[Batch]:
    """Return a schedule's decisions as a list of batches."""
    offsets, request, tokens, evicted_offsets, evicted = (
        column.tolist() for column in check_columns(schedule)
    )
    return [
        Batch(
            tuple(
                zip(
                    request[offsets[j] : offsets[j + 1]],
                    tokens[offsets[j] : offsets[j + 1]],
                    strict=True,
                )
            ),
            tuple(evicted[evicted_offsets[j] : evicted_offsets[j + 1]]),
        )
        for j in range(len(offsets) - 1)
    ]


def exact_times(
    prob: Problem, batches: Iterable[Batch], start: Iterable[float] | None = None
) -> Times:
    """Return the exact times of decisions that the judge accepts.

    Parameters
    ----------
    prob : Problem
    batches : iterable of Batch
    start : iterable of float, optional
        Starts in seconds since the first arrival; without them each batch starts as early as it
        may.
    """
    c = prob.exact
    cached, produced, ready = [0] * prob.n, [0] * prob.n, [False] * prob.n
    first: list[Any] = [None] * prob.n
    finish: list[Any] = [None] * prob.n
    ends, clock = [], Fraction(0)
    starts = None if start is None else list(start)
    for j, batch in enumerate(batches):
        for i in batch.evicted:
            cached[i], ready[i] = 0, False
        work, decodes, prefills = c.base, False, False
        for i, tokens in batch.entries:
            if ready[i]:
                work += c.decode(cached[i])
                decodes = True
            else:
                work += c.prefill(tokens, cached[i])
                prefills = True
        work += c.decode_base * decodes + c.prefill_base * prefills
        latest = max(Fraction(float(prob.instance.release[i])) for i, _ in batch.entries)
        begin = max(clock, latest / c.unit_s)
        if starts is not None:
            begin = max(clock, Fraction(float(starts[j])) / c.unit_s)
        clock = begin + work
        ends.append(clock)
        for i, tokens in batch.entries:
            cached[i] += tokens
            if cached[i] == prob.prompt[i] + produced[i]:
                ready[i] = True
                produced[i] += 1
                if produced[i] == 1:
                    first[i] = clock
                if produced[i] == prob.output[i]:
                    finish[i] = clock
                    cached[i], ready[i] = 0, False
    if None in finish:
        raise SolverError(f"infermax: request {finish.index(None)} of a plan never finishes")
    return Times(tuple(first), tuple(finish), tuple(ends))


def to_schedule(prob: Problem, batches: list[Batch], start: list[float] | None = None) -> Schedule:
    """Return the schedule of batches, for the judge."""
    entries = [entry for batch in batches for entry in batch.entries]
    return from_batches(
        np.cumsum([0] + [len(batch.entries) for batch in batches]),
        [i for i, _ in entries],
        [tokens for _, tokens in entries],
        instance=prob.instance,
        evicted_offsets=np.cumsum([0] + [len(batch.evicted) for batch in batches]),
        evicted=[i for batch in batches for i in batch.evicted],
        start=None if start is None else prob.instance.at(start),
        cost_model_sha256=prob.model.sha256,
    )


def answer(
    prob: Problem,
    status: Status,
    batches: list[Batch] | None,
    bound: Fraction | int | float | None,
    *,
    start: list[float] | None = None,
    claimed: int | None = None,
    fallback: list[Batch] | None = None,
    **rest: Any,
) -> Answer:
    """Return a method's answer; the objective is recomputed exactly from the decisions.

    Parameters
    ----------
    prob : Problem
    status : Status
        What the method proved; ``OPTIMAL`` makes the bound the objective.
    batches : list of Batch, optional
        The incumbent.
    bound : number, optional
        Bound on the first objective's level in the models' unit; where nothing was proved, the
        bound from own work and batches needed competes with it.
    start : list of float, optional
        Starts in seconds since the first arrival, where they are not the earliest.
    claimed : int, optional
        The level that the method gives its incumbent, checked.
    fallback : list of Batch, optional
        The schedule at hand, taken where the method was stopped before a first incumbent.

    Raises
    ------
    SolverError
        The claimed level is not what the decisions have.
    """
    name = prob.objectives[0]
    objective = schedule = None
    if status in (Status.FEASIBLE, Status.NO_INCUMBENT):
        least = _least_level(prob)
        bound = least if bound is None else max(least, bound)
    if batches is None and status is Status.NO_INCUMBENT and fallback is not None:
        batches, status = fallback, Status.FEASIBLE
    if batches is not None:
        times = exact_times(prob, batches, start)
        level = prob.level(name, times)
        if prob.cutoff is not None and level / prob.shrink >= prob.cutoff:
            # Within a solver's tolerance of what was asked for, but not below it.
            proved = status is Status.OPTIMAL
            status = Status.INFEASIBLE if proved else Status.NO_INCUMBENT
            bound = prob.cutoff if proved else bound
            batches = None
    if batches is not None:
        objective = prob.to_value(name, level, exact=True)
        schedule = to_schedule(prob, batches, start)
        if claimed is not None and not _near(prob, level / prob.shrink, claimed):
            raise SolverError(
                f"infermax: a schedule of {name} {objective:.12g} s is claimed to have "
                f"{prob.to_value(name, claimed):.12g} s; the model or the solver is wrong"
            )
    if status is Status.OPTIMAL and len(prob.objectives) == 1 and prob.shrink == 1:
        value = objective
    else:
        value = None if bound is None else prob.to_value(name, Fraction(bound))
    return Answer(status=status, schedule=schedule, objective=objective, bound=value, **rest)


def _least_level(prob: Problem) -> int:
    """Return the bound on the first objective's level that needs no search."""
    from optsched.optimize.formulations.batches.network import outline

    name = prob.objectives[0]
    if name in ("makespan", "tps"):
        ends = [a + t for a, t in zip(prob.arrival, prob.least_latency, strict=True)]
        return max(outline(prob).least_makespan(), *ends)
    return sum(prob.least_latency) if name == "tel" else 0


def _near(prob: Problem, level: Fraction, claimed: int) -> bool:
    """Whether the models' integers agree with the exact level, up to what they round away."""
    rounded = prob.shrink > 1 or any(prob.since_first)
    slack = max(1.0, 1e-9 * float(level)) * prob.n if rounded else 0
    return abs(level - claimed) <= slack


_EXACT = 100_000
"""Requests times output tokens up to which exact methods do better than the offline search."""


def _choose(task: Task) -> str:
    """Return A* where it can do the task, else CP-SAT (measured: `docs/infermax.md`).

    Beyond their reach the offline search, if it knows the objective.
    """
    instance = task.instance
    large = instance.n * int(instance.output_tokens.sum()) > _EXACT
    if large and len(task.names) == 1 and task.names[0] in ("makespan", "tel", "mean_ttft"):
        return "search"
    together = bool((instance.arrival == instance.arrival[0]).all())
    searched = len(task.names) == 1 and task.names[0] != "max_tpot"
    if together and searched and instance.chunked_prefill is not True:
        return "astar"
    return "cpsat"


def _export(task: Task, format_name: str, path: str | Path) -> None:
    from optsched.optimize.formulations.batches.pulp_big_m import export

    export(task, format_name, path)


FORMULATION = Formulation(
    name="infermax",
    summary="optimal batches under a cost model, with evictions (003, section 3.3)",
    time_unit="second",
    default_objective="makespan",
    methods={},
    choose=_choose,
    switches=SWITCHES,
    export=_export,
)
