"""The question whether a schedule takes less than a given share of what a policy takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optsched.costs.cost import CostModel
from optsched.judge.evaluate import evaluate
from optsched.optimize.solve import Result
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import UsageError
from optsched.problem.instance import Instance
from optsched.problem.objective import Objective, parse_objectives, service_limits


@dataclass(frozen=True)
class Question:
    """The question whether a schedule with an objective below a value exists.

    Parameters
    ----------
    phi : float
        The share of the policy's objective, > 0.
    than : str
    policy_objective : int or float
        The objective of the policy's schedule, in the objective's unit.
    value : float
        ``phi * policy_objective``.
    """

    phi: float
    than: str
    policy_objective: float | int
    value: float

    def answer(self, result: Result) -> Literal["yes", "no", "unknown"]:
        """Return "yes" if a result has a schedule below the value, "no" if its bound excludes one.

        Else the answer is "unknown".

        Parameters
        ----------
        result : Result
            What `optsched.solve` returned for the same instance and objective.
        """
        if result.status == "infeasible":
            return "no"  # the solve only allowed schedules below the value
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
    budget: Budget = NO_LIMIT,
) -> Question:
    """Return the question whether a schedule takes less than ``phi`` times what a policy takes.

    Parameters
    ----------
    instance : Instance
    phi : float
        The share, > 0.
    policy : str
        A policy's specification, such as ``"mc-sf"``.
    objective : str, Objective or sequence of these, optional
        The first one counts. Default: ``tel`` in rounds and ``makespan`` in seconds.
    cost_model : BatchCost, str or path, optional
        Required for an instance in seconds.
    seed : int
        The seed of policies that draw at random.
    budget : Budget
        Time for the policy.

    Returns
    -------
    Question
        Pass the result of `optsched.solve` to `Question.answer`. In seconds some methods take the
        option ``below=question.value`` and then search only for schedules below it.
    """
    goals = parse_objectives(objective or ("tel" if instance.in_rounds else "makespan"))
    goal = goals[0]
    if goal.maximized:
        raise UsageError(
            f"--below: found the objective {goal.name!r}, which is maximized; expected a minimized "
            "one (for 'tps', makespan asks the same)"
        )

    schedule = simulate(instance, policy, cost_model, seed=seed, budget=budget)
    value = goal.of(evaluate(instance, schedule, cost_model, **service_limits(goals)))
    if value is None:
        raise UsageError(
            f"--below: found no {goal.name!r} of policy {policy!r} on this instance; expected "
            "another objective"
        )

    return Question(phi, policy, value, phi * value)
