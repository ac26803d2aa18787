"""Search for schedules in seconds that are better than every online policy's, at trace scale.

One compiled rule with free parameters (`optsched.optimize.search.rule`) runs over the whole
instance, some 10,000 times faster than the requests arrive. The search varies its parameters. It
first tries a fixed list that has done well, then random changes to the best. The parameters are two
brakes and an order. The order is by own work (`optsched.policies.runner.own_work`), plus a share of
the work of the decode steps; single requests may have a random factor.

`optsched.evaluate` judges every schedule. The schedules of a few policies, or the given ones, are
candidates too, so the result is never worse than they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel, cost_for
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.optimize.search.on_time import serve_in_time
from optsched.optimize.search.rule import Brakes, Server
from optsched.policies.engine.simulate import simulate
from optsched.policies.runner import own_work
from optsched.problem.budget import Budget
from optsched.problem.errors import NoIncumbentError, OptschedError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.objective import (
    TOTAL_LATENCY,
    Objective,
    parse_objective,
    service_limits,
)
from optsched.problem.schedule import Schedule, from_batches

Floats = NDArray[np.float64]

_FREE = 1e18
_STARTS: tuple[tuple[float, ...], ...] = (
    # q, r, c, d, weight of the decode steps' work
    (1.0, 0.0, _FREE, 0.0, 0.0),
    (6.0, 0.0, _FREE, 0.0, 0.0),
    (0.0, 0.4, _FREE, 0.0, 0.0),
    (0.0, 0.3, 2.0, 2.0, 0.0),
    (1.0, 0.0, 2.0, 2.0, 0.0),
    (8.0, 0.0, _FREE, 0.0, 0.0),
    (0.0, 0.5, 2.0, 8.0, 0.0),
)
_PATIENCE = 400
"""The search ends after so many candidates in a row without an improvement."""
_DEFAULT_S = 60.0
"""The time in seconds if no budget is given."""
POLICIES = ("least-work", "rank-output", "mc-sf", "sarathi-pc", "vllm-hy", "fcfs")


class _Best:
    """The best schedule so far.

    Parameters
    ----------
    instance, cost, objective, admit
        As of `improve`.
    budget : Budget
        Its callback receives every improvement.
    """

    def __init__(
        self,
        instance: Instance,
        cost: CostModel,
        objective: Objective,
        admit: Callable[[Evaluation], bool] | None,
        budget: Budget,
    ) -> None:
        self.instance, self.cost, self.objective = instance, cost, objective
        self.schedule: Schedule | None = None
        self.value, self.origin = objective.signed(np.inf), ""
        self._admit, self._budget = admit, budget

    def offer(self, schedule: Schedule, origin: str) -> bool:
        """Keep a schedule if it is admitted and better. Return whether it was kept."""
        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            limits = service_limits([self.objective])
            evaluation = evaluate(self.instance, schedule, self.cost, **limits)
        if self._admit is not None and not self._admit(evaluation):
            return False
        value = self.objective.of(evaluation)
        if value is None or not self.objective.better(value, self.value):
            return False
        self.schedule, self.value, self.origin = schedule, float(value), origin
        self._budget.tell(incumbent=self.value)
        return True


class _Candidate(NamedTuple):
    """Parameters of the rule: q, r, c, d, the weight of the decode steps' work, and factors."""

    parameters: Floats
    factors: Floats


class _Search:
    """The search: it runs the rule with the parameters of one candidate after another."""

    def __init__(self, best: _Best, seed: int) -> None:
        instance, cost = best.instance, best.cost
        prompt, output = instance.prompt_tokens, instance.output_tokens
        self._best = best
        self._arrival = instance.release
        self._work = own_work(prompt, output, cost)
        self._decode_work = self._work - own_work(prompt, np.ones_like(output), cost)
        self._arrivals = float(self._arrival.sum())
        self._index = np.arange(instance.n)
        self._by_arrival = np.lexsort((self._index, self._arrival))
        self._server = Server(instance, cost, self._by_arrival)
        self._generator = np.random.default_rng(seed)
        self._chosen = _Candidate(np.array(_STARTS[0]), np.ones(instance.n))

    def run(self, budget: Budget) -> None:
        """Try at least one candidate, until the budget is spent or many bring no improvement."""
        tried = stale = 0
        while tried == 0 or (stale < _PATIENCE and not budget.over):
            if tried < len(_STARTS):
                candidate = self._chosen._replace(parameters=np.array(_STARTS[tried]))
            else:
                candidate = self._changed()
            stale = 0 if self._attempt(candidate) else stale + 1
            tried += 1

    def _attempt(self, candidate: _Candidate) -> bool:
        """Run the rule with a candidate's parameters. Return whether it is the best so far."""
        best, index, arrivals = self._best, self._index, self._arrivals
        weight = candidate.parameters[4]
        rank = np.empty(len(index), dtype=np.int64)
        key = (self._work + weight * self._decode_work) * candidate.factors
        rank[np.lexsort((index, self._arrival, key))] = index
        # The rule's own sum of completion times rules out candidates without judging them.
        least = best.value if best.objective == TOTAL_LATENCY else np.inf
        brakes = Brakes(*candidate.parameters[:4].tolist())
        total = self._server.run(rank, brakes, (least + arrivals) * (1 + 1e-12))
        if not total - arrivals < least:
            return False
        schedule = from_batches(
            *self._server.columns(), instance=best.instance, evict_mode="recompute",
            cost_model_sha256=best.cost.sha256,
        )  # fmt: skip
        try:
            better = best.offer(schedule, "search")
        except ViolationError:  # without hybrid batches, KV of those that stand still can overflow
            return False
        if better:
            self._chosen = candidate
        return better

    def _changed(self) -> _Candidate:
        """Return the best candidate so far with a random change."""
        generator, n = self._generator, len(self._arrival)
        parameters, factors = self._chosen.parameters.copy(), self._chosen.factors
        if generator.random() < 0.6:
            k = int(generator.integers(5))
            if k < 4:
                parameters[k] = max(0.0, parameters[k] * generator.uniform(0.7, 1.4))
                parameters[k] += generator.uniform(0, 0.3) if k in (1, 3) else 0.0
            else:
                parameters[k] += generator.normal() * 0.1
        else:  # requests of a window of arrivals move up or down
            width = int(generator.integers(1, max(2, n // 10)))
            at = int(generator.integers(0, max(1, n - width)))
            factors = factors.copy()
            pick = self._by_arrival[at : at + width]
            pick = pick[generator.random(len(pick)) < generator.uniform(0.02, 0.5)]
            factors[pick] *= np.exp(generator.normal(0, 0.3, len(pick)))
        return _Candidate(parameters, factors)


def improve(
    instance: Instance,
    cost_model: CostModel | str | None = None,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    known: Sequence[Schedule] = (),
    policies: Sequence[str] = POLICIES,
    objective: str | Objective = TOTAL_LATENCY,
    admit: Callable[[Evaluation], bool] | None = None,
) -> tuple[Schedule, str]:
    """Return the best schedule found within the time, and its origin.

    Parameters
    ----------
    instance : Instance
        In seconds.
    cost_model : BatchCost, str or path
    budget : Budget, optional
        Default: 60 s. Once it is over, no further candidate starts. The policies and the first
        candidate always run. Its callback receives every improvement.
    seed : int
    known : sequence of Schedule
        Schedules to start from.
    policies : sequence of str
        Policies to start from.
    objective : str or Objective
        The rule was made for total latency. For ``slo_attainment`` the search is that of
        `optsched.optimize.search.on_time`. No other maximized objective is searched for.
    admit : callable, optional
        ``admit(evaluation)`` says whether a schedule counts. Default: all count.

    Returns
    -------
    schedule : Schedule
    origin : str
        The policy's name, "known" or "search".

    Raises
    ------
    UsageError
        The instance is in rounds.
    NoIncumbentError
        No schedule was found that counts.
    """
    if instance.in_rounds:
        raise UsageError(
            "search: found an instance in rounds; expected one in seconds for the offline search"
        )
    budget = Budget(_DEFAULT_S) if budget is None else budget
    goal = parse_objective(objective)
    best = _Best(instance, cost_for(instance, cost_model), goal, admit, budget)
    for schedule in known:
        best.offer(schedule, "known")
    for policy in policies:
        try:
            best.offer(simulate(instance, policy, best.cost, seed=seed), policy)
        except OptschedError:
            continue  # the policy splits no prefill, or does not end
    if goal.name == "slo_attainment":
        serve_in_time(
            instance, best.cost, budget.part(1.0), slos=dict(goal.parameters), seed=seed,
            tell=lambda found: best.offer(found.schedule, "search"),
        )  # fmt: skip
    else:
        _Search(best, seed).run(budget)
    if best.schedule is None:
        raise NoIncumbentError(
            "search: found no schedule by any policy; expected one (chunked prefill may be needed)"
        )
    return best.schedule, best.origin
