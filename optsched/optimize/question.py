"""Is there a schedule that takes less than a share of what a policy takes?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optsched.costs.cost import CostModel
from optsched.judge.evaluate import evaluate
from optsched.optimize.solve import Result
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective, parse_objectives, service_limits


@dataclass(frozen=True)
class Question:
    """Whether a schedule below a value exists.

    Parameters
    ----------
    phi : float
    than : str
        The policy's specification.
    policy_objective : int or float
        What the policy's schedule comes to, in the objective's unit.
    value : float
        ``phi`` times that.
    """

    phi: float
    than: str
    policy_objective: float | int
    value: float

    def answer(self, result: Result) -> Literal["yes", "no", "unknown"]:
        """Return what the result of a solve for the same objective says.

        ``"unknown"`` where neither a schedule below the value was found, nor a bound excludes it.
        """
        if result.status == "infeasible":
            return "no"  # the CSP was asked for schedules below the value alone
        if result.objective is not None and result.objective < self.value:
            return "yes"
        if result.bound is not None and result.bound >= self.value:
            return "no"
        return "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return the first fields of a result file's block ``below``."""
        return dict(vars(self))


def below(
    instance: Instance,
    phi: float,
    policy: str,
    *,
    objective: str | Objective | Sequence[str | Objective] | None = None,
    cost_model: CostModel | str | Path | None = None,
    seed: int = 0,
) -> Question:
    """Return the question whether a schedule takes less than ``phi`` times what a policy takes.

    Parameters
    ----------
    instance : Instance
    phi : float
        The share, above 0.
    policy : str
        A specification.
    objective : str, Objective or sequence of these, optional
        The first one counts; by default ``tel`` in rounds and ``makespan`` in seconds.
    cost_model : BatchCost, str or path, optional
        For an instance in seconds.
    seed : int
        For policies that draw at random.

    Returns
    -------
    Question
        `Question.answer` takes the result of `optsched.solve`. In seconds the methods that search
        for a schedule below a value take the option ``below=question.value``.

    Raises
    ------
    UsageError
        An objective of which more is better, or that the policy's schedule does not have.
    """
    goals = parse_objectives(objective or ("tel" if instance.in_rounds else "makespan"))
    goal = goals[0]
    if goal.maximized:
        raise UsageError(
            f"--below: {goal.name!r} is maximized; an objective of which less is better is right "
            "(for 'tps', makespan asks the same)"
        )
    schedule = simulate(instance, policy, cost_model, seed=seed)
    value = goal.of(evaluate(instance, schedule, cost_model, **service_limits(goals)))
    if value is None:
        raise UsageError(f"--below: policy {policy!r} has no {goal.name!r} on this instance")
    return Question(phi, policy, value, phi * value)
