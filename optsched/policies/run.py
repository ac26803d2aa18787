"""`run`: what an online policy does with a problem, in one value."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optsched.files.results import result_dict
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.policies import label_of, predictor_of
from optsched.policies.base import Scheduler
from optsched.policies.engine.simulate import simulate
from optsched.problem.budget import Budget, work_time
from optsched.problem.errors import ViolationError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule
from optsched.problem.streams import Seed
from optsched.workloads.predict import Predictor
from optsched.workloads.problem import Problem, as_problem

if TYPE_CHECKING:
    import pandas as pd

# What a policy may do about a rule that it breaks.
_HINTS = {"kv_capacity": "; `evict_until_fits` of optsched.policies makes room for a batch"}


@dataclass(frozen=True, eq=False)
class Run:
    """A policy's run: its schedule, as judged.

    Parameters
    ----------
    problem : Problem
    policy : str
        The policy's specification or name.
    schedule : Schedule
    evaluation : Evaluation
    wall_s : float
        Seconds that the simulation took.
    seed : int or sequence of int
    predictor : str, optional
        The predictor that the specification names.
    """

    problem: Problem
    policy: str
    schedule: Schedule
    evaluation: Evaluation
    wall_s: float
    seed: Seed = 0
    predictor: str | None = None

    @property
    def metrics(self) -> dict[str, float | int | None]:
        """Every metric by name (`Evaluation.metrics`)."""
        return self.evaluation.metrics

    @property
    def value(self) -> float | int | None:
        """The problem's objective, the first one if there are several."""
        return self.problem.goal.of(self.evaluation)

    def to_frame(self) -> "pd.DataFrame":
        """Return a table of requests with their times (`Evaluation.to_frame`)."""
        return self.evaluation.to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of a result file, in which ``schedule`` is None."""
        pools = self.problem.pools
        return result_dict(
            self.problem.instance,
            "simulate",
            cost_model=self.problem.cost_model,
            objective_name=str(self.problem.goal),
            objective=self.value,
            metrics=self.metrics,
            workers=self.evaluation.workers,
            pools=pools and pools.to_dict(),
            method=self.policy,
            policy=self.policy,
            predictor=self.predictor,
            seed=self.seed,
            solve_s=self.wall_s,
            schedule=None,
        )

    def __repr__(self) -> str:
        return f"<Run of {self.policy}: {self.evaluation!r}>"

    def _repr_html_(self) -> str:
        return self.evaluation._repr_html_()


def run(
    problem: Problem | Instance | str | Path,
    policy: str | Scheduler,
    *,
    seed: Seed = 0,
    predictor: Predictor | None = None,
    time_limit_s: float | None = None,
    stop: threading.Event | None = None,
) -> Run:
    """Run an online policy, and judge its schedule.

    Parameters
    ----------
    problem : Problem
        The instance and its machines. Or an instance in rounds, its file or its name.
    policy : str, Rules, Windows or Policy
        A specification (``"mc-sf"``, ``"vllm:eviction_free=true"``, ``"mine.py:MyPolicy"``), a
        scheduler as data (compiled), or an object with ``batch(view) -> Batch``.
    seed : int or sequence of int
        Seed of policies and predictors that draw at random, each from a stream of its own.
    predictor : str, callable or array_like, optional
        Where the policy takes output lengths from, see `optsched.predict`. A specification that
        names its own predictor overrides it.
    time_limit_s : float, optional
        Seconds for the run. The work of a policy that is stopped is of no use.
    stop : threading.Event, optional
        When it is set, the run ends likewise.

    Returns
    -------
    Run

    Raises
    ------
    LoopError
        If the policy would go on for ever, or cannot go on.
    OutOfTimeError
        If the time is over before the last request has finished.
    PolicyError
        If the policy does not allow the instance, or is an object that raises or answers anything
        but a valid batch (`optsched.policies.engine.simulate.simulate`).
    ViolationError
        If the schedule of a policy object breaks a rule.
    InputError, UsageError
        If the policy is unknown, or a request can never run on one of the machines.

    Examples
    --------
    >>> from optsched import run
    >>> run("tiny", "mc-sf").metrics["evictions"]
    0
    """
    return run_within(problem, policy, Budget(time_limit_s, stop=stop), seed, predictor)


def run_within(
    problem: Problem | Instance | str | Path,
    policy: str | Scheduler,
    budget: Budget,
    seed: Seed = 0,
    predictor: Predictor | None = None,
) -> Run:
    """Return what `run` does within a budget."""
    problem, begin = as_problem(problem), work_time()
    schedule = simulate(problem, policy, seed=seed, predictor=predictor, budget=budget)
    wall_s = work_time() - begin

    try:
        evaluation = evaluate(problem, schedule)
    except ViolationError as error:
        hint = _HINTS.get(error.rule, "")
        error.args = (f"policy {label_of(policy)}: the judge rejects its schedule: {error}{hint}",)
        raise

    named = predictor_of(policy) if isinstance(policy, str) else None
    return Run(problem, label_of(policy), schedule, evaluation, wall_s, seed, named)
