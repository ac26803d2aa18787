"""Drives an online policy to a Schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from optsched.costs.cost import CostModel, cost_for
from optsched.policies import make_policy, runner_of
from optsched.policies.base import Job, Scheduler
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule
from optsched.workloads.predict import Predictor, predict

_LONG_OUTPUT, _QUICK_STEPS = 1 << 15, 5_000_000_000
"""Tokens of an output, and batches times the longest output: see `quick_to_simulate`."""


def quick_to_simulate(instance: Instance) -> bool:
    """Whether policies may be run that nobody asked for, given that none can be interrupted.

    Some look ahead as far as the longest output in every batch, or start long runs over and over:
    with outputs of 10^5 tokens that takes minutes, whatever the time limit is.
    """
    longest = int(instance.output_tokens.max())
    batches = instance.volume.sum(dtype=np.float64) / instance.kv_capacity
    return bool(longest <= _LONG_OUTPUT or batches * longest <= _QUICK_STEPS)


def simulate(
    instance: Instance,
    policy: str | Scheduler,
    cost_model: CostModel | str | Path | None = None,
    *,
    seed: int = 0,
    predictor: Predictor | None = None,
) -> Schedule:
    """Run an online policy over an instance.

    Parameters
    ----------
    instance : Instance
    policy : str, Rules, Windows or Policy
        A specification (``"mc-sf"``, ``"vllm:eviction_free=true"``, ``"mine.py:MyPolicy"``), a
        scheduler as data (compiled), or an object with ``batch(view) -> Batch``.
    cost_model : BatchCost or str, optional
        Needed for an instance in seconds.
    seed : int
        For policies and predictors that draw at random.
    predictor : str, callable or array_like, optional
        Where the policy takes output lengths from; see `optsched.workloads.predict.predict`. A
        specification that names its own predictor overrides it.

    Returns
    -------
    Schedule
        Of kind ``"batches"``: decisions only, to be judged by `optsched.evaluate`.

    Raises
    ------
    LoopError
        The policy would go on for ever, or cannot go on.
    PolicyError
        A policy object that raises, names an unknown request or breaks a rule.
    InputError, UsageError
        An unknown policy, a cost model that does not fit the instance.
    """
    cost = cost_for(instance, cost_model)
    name = policy if isinstance(policy, str) else type(policy).__name__
    made: Scheduler
    if isinstance(policy, str):
        made, info = make_policy(policy)
        predictor = info.predictor or predictor
    else:
        made = policy
    told = instance if predictor is None else predict(instance, predictor, seed=seed)
    # What was predicted is no part of the problem that the schedule solves.
    return runner_of(made).run(Job(told, instance, cost, seed, name))
