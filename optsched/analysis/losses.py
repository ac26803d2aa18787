"""What a policy loses to its order, its admission and its batching: its own run, step by step.

One ingredient of a policy after another is replaced by that of a target, and the policy runs again
on the same requests: first true output lengths, then the order, then admission with what happens
at an overflow, then the batches. What a step takes off the total latency is the loss to its
ingredient. The target is the best of a few `Rules` that know all lengths, and of the policies
compared: they admit as MC-SF does, by least work or shortest output, in whole prefills or in
chunks, which may pause or be as many tokens as are cheap. What the best known schedule has beyond
the target is the rest, so that the five sum to the total latency less the best known. From there
down to the bound nothing is known.

The sequence is a choice: ingredients interact, so another one would give other shares, and a step
may even lose.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

from optsched.optimize import strategies
from optsched.optimize.interval import Interval
from optsched.policies import Scheduler, make_policy, runner_of
from optsched.policies.base import Rules, Runner
from optsched.policies.engine.simulate import simulate
from optsched.policies.table import rules_like
from optsched.problem.budget import Budget
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance

# The share of the time in which the target is found.
_TARGET_SHARE = 0.5
_ORDERS = {"work": "least work first", "output": "shortest output first"}


@runtime_checkable
class InParts(Protocol):
    """A scheduler that is made of an order, an admission and batches, as `Rules` are."""

    def towards(self, target: Rules, instance: Instance) -> tuple[Runner, Runner] | None:
        """See `Rules.towards`. None where it has no such order."""


class Losses(NamedTuple):
    """A policy's total latency less the best known one, by what it is lost to, in its unit.

    Attributes
    ----------
    lengths : float
        To predictions: the policy as it ran, less the same with true output lengths.
    order : float
        To the order of service, less that of the target.
    admission : float
        To what is admitted, and what happens when KV overflows.
    batching : float
        To chunks, groups and limits of batches. What is left then is the target's.
    rest : float
        The target less the best known schedule, >= 0.
    """

    lengths: float
    order: float
    admission: float
    batching: float
    rest: float


@dataclass(frozen=True, eq=False)
class Ladder:
    """A policy's total latencies, from its own to the target's, or why there are none."""

    steps: tuple[float, ...] = ()
    missing: str | None = None

    def losses(self, best_known: float) -> Losses | None:
        """Return what each step takes off, and what the best known schedule takes off the last."""
        if not self.steps:
            return None

        return Losses(*(a - b for a, b in pairwise((*self.steps, best_known))))


class Ladders:
    """The ladders of policies, by specification, and their target in words (None without one).

    Schedules that are found on the way are offered to the interval.
    """

    def __init__(
        self,
        interval: Interval,
        tels: Mapping[str, tuple[str | Scheduler, float]],
        budget: Budget,
        seed: int,
        slos: Mapping[str, float | None],
    ) -> None:
        self._interval, self._budget = interval, budget.part(_TARGET_SHARE)
        self._told: dict[str, Any] = {"seed": seed, "slos": slos, "predictor": "oracle"}
        self._values: dict[Runner, float | None] = {}
        ranked = [(s, tels[s][0]) for s in sorted(tels, key=lambda s: tels[s][1])]
        found = [
            (value, place, words, rules)
            for place, (words, rules) in enumerate(self._targets(ranked))
            if (value := self._value(rules, words)) is not None
        ]
        self._budget = budget
        target = min(found)[2:] if found else None
        self.target = None if target is None else target[0]
        none = Ladder(missing="no rules to hold it against had a schedule in time")
        self.of = {s: none if target is None else self._ladder(s, *tels[s], *target) for s in tels}

    def _targets(
        self, ranked: Sequence[tuple[str, str | Scheduler]]
    ) -> Iterable[tuple[str, Rules]]:
        """Yield the rules of which the best is the target, and their words."""
        instance = self._interval.task.instance
        for spec, policy in ranked:
            rules = make_policy(policy)[0]
            if isinstance(rules, Rules) and rules.on(instance)[0].ties == "arrival":
                yield spec, replace(rules.on(instance)[0], in_rounds=None, wide=None)
                break

        for order, words in _ORDERS.items():
            whole = Rules(order=order, admission="lookahead")  # type: ignore[arg-type]
            yield f"{words}, look-ahead, whole prefills", whole
            if instance.in_rounds or instance.chunked_prefill is False:
                continue  # in rounds the bound is about whole prefills

            chunks = replace(whole, groups=rules_like("sarathi").groups, chunked=True)
            yield f"{words}, look-ahead, chunks", chunks
            yield f"{words}, look-ahead, batches of cheap tokens", replace(chunks, cheap=True)
            if order == "work":
                pausing = rules_like("spf-work", max_batch_tokens=None)
                yield f"{words}, look-ahead, long prefills pause", pausing

    def _ladder(
        self, spec: str, policy: str | Scheduler, tel: float, words: str, target: Rules
    ) -> Ladder:
        """Return the ladder of a policy whose own run has a total latency."""
        instance = self._interval.task.instance
        made, info = make_policy(policy)
        runner, stages = runner_of(made), None
        try:
            if isinstance(runner, InParts):
                stages = runner.towards(target, instance)
        except InputError:
            return Ladder(missing="its parts do not go together with those of the target")

        if stages is None:
            return Ladder(missing="it is not made of an order, an admission and batches")

        told = instance.has_predictions or info.predictor is not None
        blind = runner.uses_lengths(instance) is False or not told
        known = [tel if blind else self._value(runner, f"{spec}, lengths known")]
        for stage in (*stages, target):
            known.append(self._value(stage, f"{spec}, with parts of: {words}"))

        steps = [value for value in known if value is not None]
        if len(steps) < len(known):
            return Ladder(missing="with parts of the target it has no comparable schedule in time")

        return Ladder((tel, *steps))

    def _value(self, runner: Runner, words: str) -> float | None:
        """Return the total latency of a scheduler that knows all lengths, if it is comparable."""
        if runner not in self._values:
            self._values[runner] = self._run(runner, words)

        return self._values[runner]

    def _run(self, runner: Runner, words: str) -> float | None:
        task, budget = self._interval.task, self._budget.part(1.0)
        if budget.over:
            return None

        try:
            schedule = simulate(task.instance, runner, task.cost_model, budget=budget, **self._told)
        except strategies.NO_SCHEDULE:
            return None

        evaluation = self._interval.judge(schedule, quiet=True)
        if strategies.outside_reason(evaluation) is not None:
            return None

        self._interval.take(schedule, evaluation, words)
        return self._interval.goal.of(evaluation)
