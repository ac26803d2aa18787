"""The twin of a server: the policy ``vllm-v1`` under cost models that repeat a measured run.

Three factors are fitted: on work by the token, on what a batch takes whatever is in it, and on what
its decodes take beside their tokens. The measured latencies, TTFTs and times between tokens are
what they have to meet. How a step is made of these parts is tried in several shapes, from a sum to
the larger of both (`optsched.costs.cost.corner`), since a run at one setting may not tell. Nor may
it tell whether batches take long for what they are or for their decodes, so further fits hold one
of these factors at 1. The minorants of a tabulated model are linear ones under which no batch takes
longer.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost, corner
from optsched.files.measured import GAP_PLACES, Measured
from optsched.judge.evaluate import evaluate
from optsched.judge.evaluation import Evaluation
from optsched.policies import make_policy
from optsched.policies.base import Scheduler
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget
from optsched.problem.errors import OutOfTimeError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns
from optsched.workloads.problem import Problem

Floats = NDArray[np.float64]
Factors = Sequence[float] | Floats


class Shape(NamedTuple):
    """How a step is made of reading and arithmetic, as `corner` takes it; None as it is given."""

    exponent: float | None
    kv: bool = False

    @property
    def words(self) -> str:
        """What a step takes."""
        if self.exponent is None:
            return "as the profile has it"
        if self.exponent == 1:
            return "the sum of reading and arithmetic"

        parts = "reading (with KV) and arithmetic" if self.kv else "reading and arithmetic"
        return f"the {'larger' if math.isinf(self.exponent) else 'root of the squares'} of {parts}"

    def of(self, cost: BatchCost) -> BatchCost:
        """Return a linear model in this shape, or a model as it is."""
        return cost if self.exponent is None else corner(cost, self.exponent, kv=self.kv)


AS_GIVEN, SUM = Shape(None), Shape(1.0)
SHAPES = Shape(math.inf), Shape(2.0, kv=True), Shape(math.inf, kv=True), SUM
"""The shapes of linear models, the likeliest first."""


def shapes_of(cost: BatchCost) -> tuple[Shape, ...]:
    """Return the shapes in which a cost model is tried."""
    return SHAPES if cost.table is None else (AS_GIVEN,)


NEAR = 0.05
"""Two runs of one server differ by about as much, in all errors together."""
# How the names of coefficients begin that are of work by the token.
_WORK = ("token", "prefill_")
# The places of two of the three factors.
_BATCH, _DECODE = 1, 2
# What factors of batches and of decodes cost that differ, by the difference of their logarithms.
_PULL = 0.003
# The runs of the first fit, of one in another shape, and of one with a factor held.
_FIRST_RUNS, _SHAPE_RUNS, _HELD_RUNS = 80, 60, 40
# The number of requests that are fitted.
_FITTED_REQUESTS = 500
# Where a search for factors starts: the best of these, all three being equal.
_START_FACTORS = 1.0, 1.5, 2.5, 4.0
# Shorter times in seconds are compared as this, whose logarithm says something.
_SHORTEST_S = 1e-4


class Fitted(NamedTuple):
    """A cost model with its relative errors by what was measured: latency, TTFT and gaps."""

    model: BatchCost
    shape: Shape
    errors: Mapping[str, float]

    @property
    def total(self) -> float:
        """The sum of the errors, of the logarithms."""
        return sum(self.errors.values())


def scale_cost(cost: BatchCost, factors: Factors) -> BatchCost:
    """Return a cost model in which work by the token, batches, and their decodes take longer.

    Of a tabulated model the second factor is that of the smallest batch's time, and the third is
    not used. The new minorants are still below the tables, since every time is multiplied by at
    least the smaller of both factors, and no part of a minorant by more.
    """
    work, batch, decode = factors  # of names that begin as in `_WORK`, of ``base``, of others

    def factor_of(coefficient: str) -> float:
        if coefficient.startswith(_WORK):
            return work
        return batch if coefficient == "base" else decode

    def scale_texts(coefficients: Mapping[str, str], max_factor: float) -> dict[str, str]:
        return {
            name: f"{float(text) * min(factor_of(name), max_factor):.9g}"
            for name, text in coefficients.items()
        }

    table = cost.table
    if table is not None:
        # The smallest time becomes ``batch`` times as long, what is above it ``work`` times.
        grids = [
            replace(grid, values=work * grid.values + (batch - work) * grid.values.min())
            for grid in table.grids
        ]
        smaller = min(work, batch)
        minorants = [scale_texts(minorant, smaller) for minorant in table.minorants]
        table = replace(table, grids=grids, minorants=minorants)

    # The coefficients themselves, unlike minorants, need not stay below anything: hence infinity.
    return replace(cost, coefficients=scale_texts(cost.coefficients, math.inf), table=table)


def gaps_of(judged: Evaluation, schedule: Schedule) -> Floats:
    """Return quantiles of the times between two tokens of a request, at `GAP_PLACES`."""
    offsets, request, *_ = check_columns(schedule)
    # A line is a request in a batch, and ends with it.
    end = np.repeat(judged.clock.batch_end, np.diff(offsets))
    # Lines by request, each in the order of batches, so that neighbours are successive batches.
    order = np.argsort(request, kind="stable")
    request, end = request[order], end[order]
    same_request = request[1:] == request[:-1]
    # What comes before is the prefill, and no gap.
    after_first_token = end[:-1] >= judged.clock.first_token[request[1:]]
    gaps = np.diff(end)[same_request & after_first_token]
    return np.quantile(gaps, GAP_PLACES) if len(gaps) else np.zeros(len(GAP_PLACES))


def first_of(
    instance: Instance, measured: Measured | None, count: int
) -> tuple[Instance, Measured | None]:
    """Return the first requests of a long run, which later ones hardly delay, and their times.

    Sessions and shared prefixes connect requests, so such instances stay whole.
    """
    if instance.n <= count or instance.sessions is not None or instance.prefixes is not None:
        return instance, measured

    first = instance.without_predictions().subset(np.arange(count))
    return first, None if measured is None else measured.first(count, first)


class Twin:
    """A measured run, and what repeats it. Of a long one the beginning is fitted."""

    def __init__(self, instance: Instance, measured: Measured, budget: Budget) -> None:
        measured.check(instance)
        self.policies: dict[str, Scheduler] = {}
        self.whole = instance, measured
        self.instance, self.measured = first_of(instance, measured, _FITTED_REQUESTS)
        self.budget = budget

    def errors(self, model: BatchCost, spec: str) -> dict[str, float]:
        """Return by how much a model misses what was measured, in logarithms.

        That is for latencies and TTFTs the median over the requests, and for gaps the mean over
        their quantiles.
        """
        self.budget.check("the twin was fitted")
        problem = Problem(self.instance, model)
        if spec not in self.policies:
            self.policies[spec] = make_policy(spec)[0]

        schedule = simulate(problem, self.policies[spec])
        judged, seen = evaluate(problem, schedule), self.measured
        assert seen is not None
        # TTFTs and gaps below `_SHORTEST_S` are compared as that, whose logarithm says something.
        off = {"latency": np.median(np.abs(np.log(judged.latency / seen.latency)))}
        if seen.ttft is not None:
            ttft = np.maximum(seen.ttft, _SHORTEST_S)
            off["ttft"] = np.median(np.abs(np.log(judged.ttft / ttft)))
        if seen.gaps is not None:
            gaps = np.maximum(gaps_of(judged, schedule), _SHORTEST_S)
            seen_gaps = np.maximum(seen.gaps, _SHORTEST_S)
            off["gaps"] = np.abs(np.log(gaps / seen_gaps)).mean()

        return {name: float(value) for name, value in off.items()}

    def fit(
        self,
        cost: BatchCost,
        shape: Shape,
        spec: str,
        runs: int = _FIRST_RUNS,
        held: int | None = None,
        start: Factors | None = None,
    ) -> tuple[Fitted, Factors]:
        """Return the model of a shape that repeats the run best, and its factors.

        `runs`: how many simulations the search for factors may take. `held`: the place of a factor
        that stays 1. `start`: the factors at which the search begins.
        """
        from scipy.optimize import minimize

        free = [k for k in range(3) if k != held]

        def model(logs: Floats) -> BatchCost:
            factors = np.ones(3)
            factors[free] = np.exp(logs)
            return shape.of(scale_cost(cost, factors))

        def miss(logs: Floats) -> float:
            # The last two logarithms are those of batches and of decodes. If a run does not tell
            # them apart, they should be equal.
            pull = _PULL * abs(float(logs[-1] - logs[-2])) if held is None else 0.0
            return sum(self.errors(model(logs), spec).values()) + pull

        starts = [start] if start is not None else [(f, f, f) for f in _START_FACTORS]
        first: Floats = min((np.log(np.asarray(factors)[free]) for factors in starts), key=miss)
        # The corners of the first simplex: the start, and one factor each larger by 40 %.
        steps = 0.35 * np.eye(len(free) + 1, len(free), -1)
        options = {"maxfev": runs, "initial_simplex": first + steps}
        best = minimize(miss, first, method="Nelder-Mead", tol=0.004, options=options)
        calibrated = replace(model(best.x), name=f"{cost.name}, calibrated")
        factors = np.ones(3)
        factors[free] = np.exp(best.x)
        return Fitted(calibrated, shape, self.errors(calibrated, spec)), factors

    def ended(self, fitted: Fitted, spec: str) -> bool:
        """Return whether the run is repeated much better if its arrivals were times of ends.

        Requests are then sent a latency earlier. Twice as well is much better.
        """
        instance, measured = self.instance, self.measured
        # The instance that is made below has neither sessions nor prefixes.
        if measured is None or instance.sessions is not None or instance.prefixes is not None:
            return False

        sent = instance.release - measured.latency
        order = np.argsort(sent, kind="stable")
        columns = instance.prompt_tokens[order], instance.output_tokens[order]
        capacity = instance.kv_capacity
        moved = Instance(sent[order] - sent.min(), *columns, capacity, "second")
        ttft = None if measured.ttft is None else measured.ttft[order]
        times = Measured(measured.latency[order], ttft, requests_sha256=moved.requests_sha256)
        # One shape is fitted. A sum is one of linear models only, so that a table is dropped.
        linear = replace(fitted.model, table=None)
        refitted, _ = Twin(moved, times, self.budget).fit(linear, SUM, spec)
        return 2 * refitted.errors["latency"] < fitted.errors["latency"]

    def fits(self, costs: Sequence[BatchCost], specs: Sequence[str]) -> tuple[list[Fitted], str]:
        """Return the models that repeat the run about as well as the best, and the policy.

        Of several policies the one that repeats it better is taken, by the first shape: a run does
        not say how the server was set. Once the time is over it is of the fits that there are.
        """
        tried = [(cost, shape) for cost in costs for shape in shapes_of(cost)]
        # Fits with their factors, and with the cost models that these are factors of.
        found: list[tuple[Fitted, Factors, BatchCost]] = []
        spec = specs[0]
        try:
            first_fits = self._fit_specs(*tried[0], specs)
            spec = min(first_fits, key=lambda spec: first_fits[spec][0].total)
            found = [(*first_fits[spec], costs[0])]
            for cost, shape in tried[1:]:
                # Factors of one cost model say nothing of those of another.
                start = found[0][1] if cost is costs[0] else None
                runs = _FIRST_RUNS if start is None else _SHAPE_RUNS
                found.append((*self.fit(cost, shape, spec, runs, start=start), cost))

            lowest = min(fitted.total for fitted, *_ in found)
            for fitted, factors, cost in tuple(found):
                # A table has no factor of decodes, and what is far from the best is left out below.
                if cost.table is not None or fitted.total > lowest + NEAR:
                    continue

                for held in (_BATCH, _DECODE):  # the place of a factor that stays 1
                    again = self.fit(cost, fitted.shape, spec, _HELD_RUNS, held, factors)
                    found.append((*again, cost))
        except OutOfTimeError:
            if not found:
                raise

        fits = [fitted for fitted, *_ in found]
        # Errors are those of the whole run, if there is time for it.
        if self.whole[0] is not self.instance:
            self.instance, self.measured = self.whole
            with suppress(OutOfTimeError):
                fits = [fit._replace(errors=self.errors(fit.model, spec)) for fit in fits]

        # A cost model as it is, with all factors 1, may repeat the run as well.
        with suppress(OutOfTimeError):
            fits += [Fitted(cost, AS_GIVEN, self.errors(cost, spec)) for cost in costs]

        fits.sort(key=lambda fit: fit.total)
        return [fit for fit in fits if fit.total <= fits[0].total + NEAR], spec

    def _fit_specs(
        self, cost: BatchCost, shape: Shape, specs: Sequence[str]
    ) -> dict[str, tuple[Fitted, Factors]]:
        """Return fits of a cost model in a shape, by policy; the first of them is always there.

        A policy under which the model has the same errors makes no difference in this run, and is
        left out.
        """
        first = self.fit(cost, shape, specs[0])
        fits = {specs[0]: first}
        for spec in specs[1:]:
            if self.errors(first[0].model, spec) != first[0].errors:
                fits[spec] = self.fit(cost, shape, spec)

        return fits
