"""What exact methods in rounds minimize: sums, or largest values, of what requests count.

Each objective of `GOALS` counts ``slope * (start - arrival) + base`` for a request, with whole
numbers, and is the sum or the largest of these over a `scale`. It never falls when a request starts
later, so that what docs/formulations.md proves about deadlines ("How far to look") holds for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optsched.bounds.timeline import Ints
from optsched.optimize.formulations.base import Answer, Task
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, round_up_bound
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance

_MAX_SUM = 1 << 50  # numbers that CP-SAT adds up without overflow


@dataclass(frozen=True, eq=False)
class Goal:
    """What the requests of an instance count: `slope` and `base` have the shape (n,).

    Values are counted in *units*, whole numbers, of which `scale` are 1 in the metric. `largest`:
    the value is the largest of what requests count, not the sum. `output` (shape (n,)) are the
    output tokens, by which a wait is less than a latency.
    """

    slope: Ints
    base: Ints
    output: Ints
    scale: int = 1
    largest: bool = False

    def units(self, wait: Ints) -> int:
        """Return the value times the scale, if requests start so long after their arrivals."""
        counted = self.slope * wait + self.base
        return int(counted.max() if self.largest else counted.sum())

    def value(self, units: float) -> float:
        """Return the value that a solver's number means."""
        return units if self.scale == 1 else units / self.scale

    @property
    def equal(self) -> int | None:
        """The slope of all requests, if the total latency alone decides the value."""
        return None if self.largest or np.ptp(self.slope) else int(self.slope[0])

    def of_latency(self, total: float) -> float:
        """Return the value times the scale that a total latency means, if it alone decides.

        Waits sum to the total latency less the outputs.
        """
        slope = int(self.slope[0])
        return slope * total + int(self.base.sum()) - slope * int(self.output.sum())

    def of_total(self, latency: float) -> float:
        """Return the value that a total latency means, if it alone decides."""
        return self.value(self.of_latency(latency))

    def waits(self, units: int) -> Ints:
        """Return how long each request may wait for the value to be at most so many units.

        In a sum the others count their `base` at least. In a largest value they do not matter.
        """
        others = 0 if self.largest else int(self.base.sum()) - self.base
        return (units - others - self.base) // self.slope


def _largest_stretch(instance: Instance) -> Goal:
    """Return the goal of the largest latency over output, in units of 1 / lcm of the outputs.

    (wait + output) / output is 1 (`base`, `scale` units) and 1 / output for each round waited
    (`slope`).
    """
    output = instance.output_tokens
    # In Python's integers, as the multiple may exceed int64.
    scale = int(np.lcm.reduce(output.astype(object)))
    # No schedule has to end later, so no request has to count more than scale * end.
    end = int(instance.release_times.max() + output.sum())
    if scale * end > _MAX_SUM:
        raise UsageError(
            f"objective: found outputs whose least common multiple is {scale}; expected at most "
            f"{_MAX_SUM // end}, as max_stretch is in whole numbers"
        )

    return Goal(scale // output, np.full_like(output, scale), output, scale, largest=True)


def _sum(instance: Instance, base: Ints, scale: int = 1) -> Goal:
    """Return the goal of the sum of waits and ``base``."""
    return Goal(np.ones_like(base), base, instance.output_tokens, scale)


def _weighted(instance: Instance, base: Ints) -> Goal:
    """Return the goal of the sum of waits and ``base``, each times the request's weight."""
    weight = instance.weights
    return Goal(weight, weight * base, instance.output_tokens)


def _makespan(instance: Instance) -> Goal:
    """Return the goal of the last completion."""
    output = instance.output_tokens
    return Goal(np.ones_like(output), instance.release_times + output, output, largest=True)


GOALS: dict[str, Callable[[Instance], Goal]] = {
    "tel": lambda i: _sum(i, i.output_tokens),
    "mean_latency": lambda i: _sum(i, i.output_tokens, i.n),
    "mean_ttft": lambda i: _sum(i, np.ones_like(i.output_tokens), i.n),
    "makespan": _makespan,
    "max_stretch": _largest_stretch,
    "weighted_latency": lambda i: _weighted(i, i.output_tokens),
    "weighted_completion": lambda i: _weighted(i, i.release_times + i.output_tokens),
}
"""The goal of an instance by the name of the metric."""

WEIGHTED = ("weighted_latency", "weighted_completion")
"""The goals that count weights."""

COMPLETIONS = ("tel", "mean_latency", "makespan", "max_stretch", *WEIGHTED)
"""The goals that completions alone decide. A run without pauses that ends when one with pauses does
never holds more KV, so that pauses gain nothing."""

SUMS = tuple(name for name in GOALS if name not in ("makespan", "max_stretch"))
"""The goals that are sums."""

LATENCY = ("tel", "mean_latency", "mean_ttft")
"""The goals that total latency alone decides."""


def goal_of(task: Task) -> Goal:
    """Return the goal of a task."""
    return GOALS[task.names[0]](task.instance)


def in_values(raw: RawOutcome, goal: Goal) -> tuple[float | None, float | None]:
    """Return a solver's objective and bound in the metric. The bound is rounded up to a unit."""
    bound = None if raw.bound is None else goal.value(round_up_bound(raw.bound))
    return None if raw.objective is None else goal.value(raw.objective), bound


def by_latency(run: Callable[[Task, SolveOptions], Answer]) -> Any:
    """Return the method that minimizes a goal of `LATENCY`, as one for total latency does.

    ``run`` is the method for ``tel``. Values of other goals follow from its total latency.
    """

    def solve(task: Task, options: SolveOptions) -> Answer:
        if task.names == ("tel",):
            return run(task, options)

        # The same schedules are best. A certificate would be of total latency.
        goal = goal_of(task)
        answer = run(task.about("tel"), options.reporting(goal.of_total))
        totals = answer.objective, answer.bound
        objective, bound = (total if total is None else goal.of_total(total) for total in totals)
        return replace(answer, objective=objective, bound=bound, certificate=None)

    return solve
