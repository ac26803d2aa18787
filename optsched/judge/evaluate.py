"""The one judge, which replays a schedule, checks every constraint and derives every metric."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from optsched.judge.evaluation import Evaluation
from optsched.judge.starts import judge_starts
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns, runs_on
from optsched.workloads.problem import Problem, as_problem


def evaluate(problem: Problem | Instance | str | Path, schedule: Schedule) -> Evaluation:
    """Judge a schedule: check every constraint and derive every metric.

    The judge checks these rules at every batch:

    - Requests and workers exist, and no request stands twice in a batch.
    - No request is processed before its arrival, after its last token, or on a worker other than
      the one that holds its KV. Only a request that holds KV is evicted.
    - A decode step has one token, or more where drafts are verified. A prefill has at most the rest
      of the request's input, and all of it when chunked prefill is forbidden.
    - Prefills and decodes are not mixed when hybrid batching is forbidden.
    - The limits C on tokens, P on prefill tokens and R_max on requests that hold KV, and the KV
      capacity hold, counting requests that finish in the batch.
    - Cached tokens are claimed by requests that hold no KV, in whole blocks, at most their input
      less one. Each block is held by another request, computed in the same batch, or was held
      before: then it is retained since, which counts as KV (docs/formulations.md, Shared prefixes).
    - KV moves after its request's batch, to another worker, and counts on both until the move is
      over. Only then is the request processed again. A prefill machine produces first tokens only,
      and a decode machine prefills only requests that were handed over, or are deflected.

    At the end every request has produced all its tokens.

    Parameters
    ----------
    problem : Problem
        The instance and its machines. Or an instance in rounds, its file or its name. A single
        machine is that of every worker of the schedule. KV moves only in fleets with a link.
    schedule : Schedule

    Returns
    -------
    Evaluation

    Warns
    -----
    UserWarning
        The schedule leaves a cost model's range of validity.

    Raises
    ------
    ViolationError
        The schedule breaks a rule. The error names the first violation with its batch, request,
        value and limit.
    InputError
        Columns do not fit together, or the schedule was made for another instance or cost model.
    """
    problem = as_problem(problem)
    instance, machines = problem.instance, problem.machines
    columns = check_columns(schedule)
    instance.check_digest(schedule.instance_sha256, "schedule.instance_sha256")
    digest = problem.hardware.sha256
    if schedule.cost_model_sha256 not in (None, digest):
        names = ", ".join(dict.fromkeys(one.cost.name for one in machines))
        raise InputError(
            f"schedule.cost_model_sha256: found {schedule.cost_model_sha256}, which is another "
            f"cost model's; expected {digest} of {names}"
        )

    if schedule.kind == "starts" and instance.prefixes is None:
        return judge_starts(instance, columns[0], machines)

    # The closed form knows no shared blocks, so such starts are replayed batch by batch.
    from optsched.judge.batches import judge_batches

    if schedule.kind == "starts":
        alike = runs_on(instance, columns[0], np.zeros(instance.n, dtype=np.int64))
        return replace(judge_batches(problem, alike), kind="starts")

    return judge_batches(problem, schedule)


def evaluate_quietly(problem: Problem | Instance | str | Path, schedule: Schedule) -> Evaluation:
    """Judge a schedule without warnings, where the schedule that is kept is judged once more.

    Parameters
    ----------
    problem : Problem
        As for `evaluate`.
    schedule : Schedule

    Returns
    -------
    Evaluation

    Raises
    ------
    ViolationError, InputError
        As by `evaluate`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate(problem, schedule)
