"""Runs an online policy on an instance, which gives a `Schedule`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from optsched.costs.cost import CostModel, cost_for
from optsched.policies import make_policy, runner_of
from optsched.policies.base import Job, Scheduler
from optsched.problem.errors import PolicyError
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.schedule import Schedule
from optsched.workloads.predict import Predictor, predict

_LONG_OUTPUT, _QUICK_STEPS = 1 << 15, 5_000_000_000
"""Max tokens of an output, and max of batches times the longest output (`quick_to_simulate`)."""


def quick_to_simulate(instance: Instance) -> bool:
    """Return whether every policy can be simulated in a short time.

    A policy cannot be interrupted. Some policies look ahead as far as the longest output in every
    batch, or start long runs again and again. With outputs of 10^5 tokens they take minutes,
    whatever the time limit is. Where this function returns False, policies are run only if the
    user asks for them.

    Parameters
    ----------
    instance : Instance

    Returns
    -------
    bool
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
    slos: Mapping[str, float | None] | None = None,
) -> Schedule:
    """Run an online policy on an instance.

    Parameters
    ----------
    instance : Instance
    policy : str, Rules, Windows or Policy
        A specification (``"mc-sf"``, ``"vllm:eviction_free=true"``, ``"mine.py:MyPolicy"``), a
        scheduler as data (compiled), or an object with ``batch(view) -> Batch``.
    cost_model : BatchCost or str, optional
        The batch times. An instance in seconds needs one.
    seed : int
        Seed of policies and predictors that draw at random.
    predictor : str, callable or array_like, optional
        Where the policy takes output lengths from, see `optsched.workloads.predict.predict`. A
        specification that names its own predictor overrides it.
    slos : mapping of str to float, optional
        SLOs of every request by name (``slo_ttft``, ``slo_tpot``, ``slo_gap``, ``slo_latency``),
        which the policy sees in place of the instance's columns.

    Returns
    -------
    Schedule
        A schedule of kind ``"batches"``. It holds decisions only; `optsched.evaluate` derives
        times and metrics.

    Raises
    ------
    LoopError
        If the policy would go on for ever, or cannot go on.
    PolicyError
        If the policy does not allow the instance (`optsched.policies.allows`), or if a policy
        object raises, names an unknown request or answers anything but a valid batch.
    InputError, UsageError
        If the policy is unknown, or if the cost model does not fit the instance.
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
    if any(value is not None for value in (slos or {}).values()):
        told = with_slos(told, slos)
    runner = runner_of(made)
    reason = runner.allows(told)
    if reason is not None:
        raise PolicyError(f"policy {name!r}: {reason}")
    # The schedule is one of the instance without the predictions and the SLOs that were given.
    return runner.run(Job(told, instance, cost, seed, name))
