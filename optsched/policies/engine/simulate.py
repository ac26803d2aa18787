"""Runs an online policy on an instance, which gives a `Schedule`."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import NoneType

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import BatchCost
from optsched.costs.machine import Hardware, Pools, are_machines, machines_of
from optsched.files.read_write import as_instance
from optsched.judge.evaluate import evaluate
from optsched.policies import label_of, make_policy, runner_of
from optsched.policies.base import Job, Scheduler
from optsched.policies.routers import Routed
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import OptschedError, PolicyError, UsageError, check_kind
from optsched.problem.instance import Instance
from optsched.problem.limits import with_slos
from optsched.problem.schedule import Schedule
from optsched.problem.streams import Seed
from optsched.workloads.predict import Predictor, predict

MAX_ENTRIES = 1 << 28
"""Max output tokens of an instance that is simulated. Each is an entry of the schedule."""
# The seconds for completions that nobody asked for: 10,000 requests take one.
_COMPLETIONS_S = 5.0


def simulate(
    instance: Instance | str | Path,
    policy: str | Scheduler,
    cost_model: Hardware = None,
    *,
    seed: Seed = 0,
    predictor: Predictor | None = None,
    slos: Mapping[str, float | None] | None = None,
    budget: Budget = NO_LIMIT,
) -> Schedule:
    """Run an online policy on an instance.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
    policy : str, Rules, Windows or Policy
        A specification (``"mc-sf"``, ``"vllm:eviction_free=true"``, ``"mine.py:MyPolicy"``), a
        scheduler as data (compiled), or an object with ``batch(view) -> Batch``.
    cost_model : BatchCost, str, path, sequence of Machine or Pools, optional
        The batch times. An instance in seconds needs one. Or the machine of each worker behind the
        policy's router, in place of the instance's KV capacity and limits; or pools of them.
    seed : int or sequence of int
        Seed of policies and predictors that draw at random, each from a stream of its own.
    predictor : str, callable or array_like, optional
        Where the policy takes output lengths from, see `optsched.workloads.predict.predict`. A
        specification that names its own predictor overrides it.
    slos : mapping of str to float, optional
        SLOs of every request by name (``slo_ttft``, ``slo_tpot``, ``slo_gap``, ``slo_latency``),
        which the policy sees in place of the instance's columns.
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
        If the policy is unknown, if the cost model does not fit the instance, if a request can
        never run on one of the machines, or if the policy has another number of workers.
    """
    instance = as_instance(instance)
    machines = machines_of(instance, cost_model)
    check_kind("slos", slos, (Mapping, NoneType), "a mapping such as {'slo_ttft': 1.0}, or None")
    name, (made, info) = label_of(policy), make_policy(policy)
    predictor = info.predictor or predictor
    told = instance if predictor is None else predict(instance, predictor, seed=seed)
    if any(value is not None for value in (slos or {}).values()):
        told = with_slos(told, slos)

    runner = runner_of(made)
    reason = runner.allows(told)
    if reason is not None:
        raise PolicyError(f"policy {name!r}: {reason}")

    told_of = (instance.output_tokens, told.predicted, told.predicted_upper)
    tokens = max(int(column.sum()) for column in told_of if column is not None)
    if tokens > MAX_ENTRIES:
        raise PolicyError(
            f"policy {name!r}: found {tokens:.2g} output tokens, true or predicted, an entry of "
            f"the schedule each; expected at most {MAX_ENTRIES:.2g}"
        )

    # The schedule is one of the instance without the predictions and the SLOs that were given.
    job = Job(told, instance, machines[0].cost, seed, name, budget)
    if not are_machines(cost_model):
        return runner.run(job)

    if not isinstance(runner, Routed):
        runner = Routed(runner, len(machines))
    if runner.workers != len(machines):
        raise UsageError(
            f"policy {name!r}: found {runner.workers} workers; expected {len(machines)}, one on "
            "each machine"
        )

    pools = cost_model if isinstance(cost_model, Pools) else None
    return runner.run(replace(job, machines=machines, pools=pools))


def completions(instance: Instance, cost: BatchCost) -> NDArray[np.float64] | None:
    """Return when requests end under ``least-work``, in seconds from the first arrival.

    None where it cannot run, since a prompt is beyond a hard limit that it does not split, or where
    that takes many seconds.

    Parameters
    ----------
    instance : Instance
        An instance in seconds.
    cost : BatchCost
    """
    try:
        with warnings.catch_warnings():  # about the cost model's range, since no claim is made here
            warnings.simplefilter("ignore")
            schedule = simulate(instance, "least-work", cost, budget=Budget(_COMPLETIONS_S))
            return evaluate(instance, schedule, cost).clock.finish
    except OptschedError:
        return None
