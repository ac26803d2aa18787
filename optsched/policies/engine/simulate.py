"""Runs an online policy on an instance, which gives a `Schedule`."""

import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost
from optsched.judge.evaluate import evaluate
from optsched.policies import label_of, make_policy, runner_of
from optsched.policies.base import Job, Scheduler
from optsched.policies.routers import Routed
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import OptschedError, PolicyError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule
from optsched.problem.streams import Seed
from optsched.workloads.predict import Predictor, predict
from optsched.workloads.problem import Problem, as_problem

MAX_ENTRIES = 1 << 28
"""Max output tokens of an instance that is simulated. Each is an entry of the schedule."""
# The seconds for completions that nobody asked for: 10,000 requests take one.
_COMPLETIONS_S = 5.0


def simulate(
    problem: Problem | Instance | str | Path,
    policy: str | Scheduler,
    *,
    seed: Seed = 0,
    predictor: Predictor | None = None,
    budget: Budget = NO_LIMIT,
) -> Schedule:
    """Run an online policy on an instance.

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
        Where the policy takes output lengths from, see `optsched.workloads.predict.predict`. A
        specification that names its own predictor overrides it.
    budget : Budget
        Time for the run. The work of a policy that is stopped is of no use.

    Returns
    -------
    Schedule
        A schedule of kind ``"batches"``. It holds decisions only; `optsched.evaluate` derives
        times and metrics.

    Raises
    ------
    LoopError
        If the policy would go on for ever, or cannot go on.
    OutOfTimeError
        If the budget is over before the last request has finished.
    PolicyError
        If there are, or are predicted, more than `MAX_ENTRIES` output tokens; if the policy does
        not allow the instance (`optsched.policies.allows`); or if a policy object raises, names an
        unknown request or answers anything but a valid batch.
    InputError, UsageError
        If the policy is unknown, if a request can never run on one of the machines, or if the
        specification names another number of workers.
    """
    problem, (made, info) = as_problem(problem), make_policy(policy)
    name, instance = label_of(policy), problem.instance
    fleet = problem.hardware
    # A specification may ask for workers like the problem's one machine (`make_policy`).
    if info.workers is not None and len(fleet) == 1 and fleet.link is None:
        fleet = fleet.times(info.workers)
    if info.workers not in (None, len(fleet)):
        found = f"policy {name!r}: found {info.workers} workers"
        raise UsageError(f"{found}; expected {len(fleet)}, the machines of the problem")

    predictor = info.predictor or predictor
    # The policy sees an instance with predictions, and the schedule is one of the true instance.
    seen = instance if predictor is None else predict(instance, predictor, seed=seed)
    runner = runner_of(made)
    reason = runner.allows(seen)
    if reason is not None:
        raise PolicyError(f"policy {name!r}: {reason}")

    outputs = (instance.output_tokens, seen.predicted, seen.predicted_upper)
    tokens = max(int(column.sum()) for column in outputs if column is not None)
    if tokens > MAX_ENTRIES:
        raise PolicyError(
            f"policy {name!r}: found {tokens:.2g} output tokens, true or predicted, an entry of "
            f"the schedule each; expected at most {MAX_ENTRIES:.2g}"
        )

    job = Job(seen, instance, problem.cost_model, seed, name, budget, fleet)
    # Several workers need a router, and a machine unlike the instance needs `begin_on`.
    if (job.workers > 1 or job.machines) and not isinstance(runner, Routed):
        runner = Routed(runner)

    return runner.run(job)


def completions(instance: Instance, cost: BatchCost) -> NDArray[np.float64] | None:
    """Return when requests end under a policy that serves the least work first, in seconds.

    They count from the first arrival. None where that takes many seconds, or no policy can run.

    Parameters
    ----------
    instance : Instance
        An instance in seconds.
    cost : BatchCost
    """
    budget = Budget(_COMPLETIONS_S)
    # The first cannot run where a prompt is beyond a limit of batches; the second splits prefills.
    for policy in ("least-work", "spf-work"):
        # Warnings are about the cost model's range, and no claim is made here.
        with suppress(OptschedError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = Problem(instance, cost)
            return evaluate(problem, simulate(problem, policy, budget=budget)).clock.finish

    return None
