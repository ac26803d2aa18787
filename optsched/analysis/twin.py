"""The twin of a server: the policy ``vllm-v1`` under cost models that repeat a measured run.

Three factors are fitted: on work by the token, on what a batch takes whatever is in it, and on what
its decodes take beside their tokens. The measured latencies, TTFTs and times between tokens are
what they have to meet. How a step is made of these parts is tried in several shapes, from a sum to
the larger of both (`optsched.costs.cost.corner`), since a run at one setting may not tell. Nor may
it tell whether batches take long for what they are or for their decodes, so further fits hold one
of these factors at 1.
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
_WORK = ("token", "prefill_")
_BATCH, _DECODE = 1, 2
_PULL = 0.003
# The runs of the first fit, of one in another shape, and of one with a factor held.
_FIRST, _SHAPE, _HELD = 80, 60, 40
# The number of requests that are fitted.
_FITTED = 500


class Fitted(NamedTuple):
    """A cost model with its relative errors by what was measured: latency, TTFT and gaps."""

    model: BatchCost
    shape: Shape
    errors: Mapping[str, float]

    @property
    def total(self) -> float:
        """The sum of the errors, of the logarithms."""
        return sum(self.errors.values())


def scaled(cost: BatchCost, factors: Factors) -> BatchCost:
    """Return a cost model in which work by the token, batches, and their decodes take longer.

    Of a tabulated model the second factor is that of the smallest batch's time, and the third is
    not used. The new minorants are still below the tables, since every time is multiplied by at
    least the smaller of both factors, and no part of a minorant by more.
    """
    work, batch, decode = factors

    def texts(given: Mapping[str, str], limit: float = math.inf) -> dict[str, str]:
        found = {}
        for key, text in given.items():
            factor = work if key.startswith(_WORK) else batch if key == "base" else decode
            found[key] = f"{float(text) * min(factor, limit):.9g}"

        return found

    table = cost.table
    if table is not None:
        grids = [
            replace(grid, values=work * grid.values + (batch - work) * grid.values.min())
            for grid in table.grids
        ]
        minorants = [texts(one, min(work, batch)) for one in table.minorants]
        table = replace(table, grids=grids, minorants=minorants)

    return replace(cost, coefficients=texts(cost.coefficients), table=table)


def gaps_of(judged: Evaluation, schedule: Schedule) -> Floats:
    """Return quantiles of the times between two tokens of a request, at `GAP_PLACES`."""
    offsets, request, *_ = check_columns(schedule)
    end = np.repeat(judged.clock.batch_end, np.diff(offsets))
    order = np.argsort(request, kind="stable")
    request, end = request[order], end[order]
    later = (request[1:] == request[:-1]) & (end[:-1] >= judged.clock.first_token[request[1:]])
    gaps = np.diff(end)[later]
    return np.quantile(gaps, GAP_PLACES) if len(gaps) else np.zeros(len(GAP_PLACES))


def first_of(
    instance: Instance, measured: Measured | None, count: int
) -> tuple[Instance, Measured | None]:
    """Return the first requests of a long run, which later ones hardly delay, and their times."""
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
        self.instance, self.measured = first_of(instance, measured, _FITTED)
        self.budget = budget

    def errors(self, model: BatchCost, spec: str) -> dict[str, float]:
        """Return by how much a model misses what was measured, in logarithms."""
        self.budget.check("the twin was fitted")
        problem = Problem(self.instance, model)
        if spec not in self.policies:
            self.policies[spec] = make_policy(spec)[0]

        schedule = simulate(problem, self.policies[spec])
        judged, seen = evaluate(problem, schedule), self.measured
        assert seen is not None
        off = {"latency": np.median(np.abs(np.log(judged.latency / seen.latency)))}
        if seen.ttft is not None:
            ttft = np.maximum(seen.ttft, 1e-4)
            off["ttft"] = np.median(np.abs(np.log(judged.ttft / ttft)))
        if seen.gaps is not None:
            own, gaps = (np.maximum(one, 1e-4) for one in (gaps_of(judged, schedule), seen.gaps))
            off["gaps"] = np.abs(np.log(own / gaps)).mean()

        return {name: float(value) for name, value in off.items()}

    def fit(
        self,
        cost: BatchCost,
        shape: Shape,
        spec: str,
        runs: int = _FIRST,
        held: int | None = None,
        start: Factors | None = None,
    ) -> tuple[Fitted, Factors]:
        """Return the model of a shape that repeats the run best, and its factors.

        `runs`: how many simulations the search for factors may take.
        """
        from scipy.optimize import minimize

        free = [k for k in range(3) if k != held]

        def model(logs: Floats) -> BatchCost:
            factors = np.ones(3)
            factors[free] = np.exp(logs)
            return shape.of(scaled(cost, factors))

        def miss(logs: Floats) -> float:
            # If a run does not tell the factors of batches and of decodes apart, they should be
            # equal.
            pull = _PULL * abs(float(logs[-1] - logs[-2])) if held is None else 0.0
            return sum(self.errors(model(logs), spec).values()) + pull

        tries = [start] if start is not None else [(f, f, f) for f in (1.0, 1.5, 2.5, 4.0)]
        first: Floats = min((np.log(np.asarray(one)[free]) for one in tries), key=miss)
        steps = 0.35 * np.eye(len(free) + 1, len(free), -1)
        options = {"maxfev": runs, "initial_simplex": first + steps}
        best = minimize(miss, first, method="Nelder-Mead", tol=0.004, options=options)
        found = replace(model(best.x), name=f"{cost.name}, calibrated")
        factors = np.ones(3)
        factors[free] = np.exp(best.x)
        return Fitted(found, shape, self.errors(found, spec)), factors

    def ended(self, fitted: Fitted, spec: str) -> bool:
        """Return whether the run is repeated much better if its arrivals were times of ends."""
        instance, measured = self.instance, self.measured
        if measured is None or instance.sessions is not None or instance.prefixes is not None:
            return False

        sent = instance.release - measured.latency
        order = np.argsort(sent, kind="stable")
        columns = instance.prompt_tokens[order], instance.output_tokens[order]
        capacity = instance.kv_capacity
        moved = Instance(sent[order] - sent.min(), *columns, capacity, "second")
        ttft = None if measured.ttft is None else measured.ttft[order]
        times = Measured(measured.latency[order], ttft, requests_sha256=moved.requests_sha256)
        linear = replace(fitted.model, table=None)
        found, _ = Twin(moved, times, self.budget).fit(linear, SUM, spec)
        return 2 * found.errors["latency"] < fitted.errors["latency"]

    def fits(self, costs: Sequence[BatchCost], specs: Sequence[str]) -> tuple[list[Fitted], str]:
        """Return the models that repeat the run about as well as the best, and the policy.

        Of several policies the one that repeats it better is taken, by the first shape: a run does
        not say how the server was set. Once the time is over it is of the fits that there are.
        """
        tried = [(cost, shape) for cost in costs for shape in shapes_of(cost)]
        found: list[tuple[Fitted, Factors, BatchCost]] = []
        spec = specs[0]
        try:
            firsts = {spec: self.fit(*tried[0], spec)}
            for one in specs[1:]:
                model, _, errors = firsts[spec][0]
                if self.errors(model, one) != errors:  # otherwise it is not in the way
                    firsts[one] = self.fit(*tried[0], one)

            spec = min(firsts, key=lambda one: firsts[one][0].total)
            found = [(*firsts[spec], costs[0])]
            for cost, shape in tried[1:]:
                start = found[0][1] if cost is costs[0] else None
                runs = _FIRST if start is None else _SHAPE
                found.append((*self.fit(cost, shape, spec, runs, start=start), cost))

            least = min(one.total for one, *_ in found)
            for fitted, factors, cost in tuple(found):
                if cost.table is None and fitted.total <= least + NEAR:
                    for held in (_BATCH, _DECODE):
                        again = self.fit(cost, fitted.shape, spec, _HELD, held, factors)
                        found.append((*again, cost))
        except OutOfTimeError:
            if not found:
                raise

        fits = [one for one, *_ in found]
        if self.whole[0] is not self.instance:
            self.instance, self.measured = self.whole
            with suppress(OutOfTimeError):
                fits = [one._replace(errors=self.errors(one.model, spec)) for one in fits]

        with suppress(OutOfTimeError):
            fits += [Fitted(one, AS_GIVEN, self.errors(one, spec)) for one in costs]

        fits.sort(key=lambda one: one.total)
        return [one for one in fits if one.total <= fits[0].total + NEAR], spec
