"""The one judge, which replays a schedule, checks every constraint and derives every metric."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optsched.costs.machine import Hardware, Pools, digest_of, machines_of
from optsched.files.read_write import as_instance
from optsched.judge.evaluation import Evaluation
from optsched.judge.starts import judge_starts
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.metrics import check_parameter
from optsched.problem.schedule import Schedule, check_columns, runs_on


def evaluate(
    instance: Instance | str | Path,
    schedule: Schedule,
    cost_model: Hardware = None,
    *,
    slo_ttft: float | None = None,
    slo_tpot: float | None = None,
    slo_gap: float | None = None,
    slo_latency: float | None = None,
) -> Evaluation:
    """Judge a schedule: check every constraint and derive every metric.

    The judge checks these rules at every batch:

    - Requests and workers exist, and no request stands twice in a batch.
    - No request is processed before its arrival, after its last token, or on a worker other than
      the one that holds its KV. Only a request that holds KV is evicted.
    - A decode step has one token. A prefill has at most the rest of the request's input, and all
      of it when chunked prefill is forbidden.
    - Prefills and decodes are not mixed when hybrid batching is forbidden.
    - The limits C, P and R_max and the KV capacity hold, counting requests that finish in the
      batch.
    - Cached tokens are claimed by requests that hold no KV, in whole blocks, at most their input
      less one. Each block is held by another request, computed in the same batch, or was held
      before: then it is retained since, which counts as KV (docs/formulations.md, Shared prefixes).
    - KV moves after its request's batch, to another worker, and counts on both until the move is
      over. Only then is the request processed again. A prefill machine produces first tokens only,
      and a decode machine prefills only requests that were handed over, or are deflected.

    At the end every request has produced all its tokens.

    Parameters
    ----------
    instance : Instance, str or path
        The instance, its file, or the name of a shipped one.
    schedule : Schedule
    cost_model : BatchCost, str, path, sequence of Machine or Pools, optional
        Cost model, or the name or file of one. An instance in seconds needs it; one in rounds
        refuses it. Or a sequence of `Machine`: that of each worker, in place of the instance's KV
        capacity and limits, or a single one that all workers have. KV moves only in `Pools`.
    slo_ttft, slo_tpot, slo_gap, slo_latency : float, optional
        Service level objectives of every request, in the instance's time unit: the max TTFT, TPOT,
        gap between two output tokens, and latency of a request that is served well. Each that is
        given replaces the instance's column of its name.

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
        Columns do not fit together, the schedule was made for another instance or cost model, or
        an SLO is not a time > 0.
    UsageError
        An instance in seconds without a cost model, or one in rounds with one.
    """
    instance = as_instance(instance)
    machines = machines_of(instance, cost_model)
    pools = cost_model if isinstance(cost_model, Pools) else None
    columns = check_columns(schedule)
    instance.check_digest(schedule.instance_sha256, "schedule.instance_sha256")
    digest = digest_of(machines)

    if schedule.cost_model_sha256 not in (None, digest):
        names = ", ".join(dict.fromkeys(one.cost.name for one in machines))
        raise InputError(
            f"schedule.cost_model_sha256: found {schedule.cost_model_sha256}, which is another "
            f"cost model's; expected {digest} of {names}"
        )

    given: dict[str, Any] = {"slo_ttft": slo_ttft, "slo_tpot": slo_tpot, "slo_gap": slo_gap}
    given["slo_latency"] = slo_latency
    for name, value in given.items():
        expected = None if value is None else check_parameter(value)
        if expected is not None:
            raise InputError(f"{name}: found {value!r}; expected {expected}")

    if schedule.kind == "starts" and instance.prefixes is not None:
        from optsched.judge.batches import judge_batches

        alike = runs_on(instance, columns[0], np.zeros(instance.n, dtype=np.int64))
        judged = replace(judge_batches(instance, alike, machines), kind="starts")
    elif schedule.kind == "starts":
        judged = judge_starts(instance, columns[0], machines)
    else:
        from optsched.judge.batches import judge_batches

        judged = judge_batches(instance, schedule, machines, pools)

    return replace(judged, **given)
