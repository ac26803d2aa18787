"""The result file of the commands that run no solver."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from optsched.costs.cost import CostModel
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.version import __version__


def result_dict(
    instance: Instance,
    *,
    command: str,
    method: str | None,
    objective: float | None,
    metrics: Mapping[str, Any] | None,
    cost_model: CostModel | None,
    bound: float | None = None,
    policy: str | None = None,
    predictor: str | None = None,
    seed: int | None = None,
    solve_s: float | None = None,
    schedule: str | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a result; ``policy`` made the schedule of the objective.

    ``predictor`` is the policy's own, in place of the instance's predictions.
    """
    gap = None
    if objective and bound is not None:
        gap = (objective - bound) / objective
    if objective is None:
        status = "no_incumbent"
    else:
        status = "optimal" if bound is not None and bound == objective else "feasible"
    return {
        "format": "optsched-result",
        "version": 1,
        "optsched": __version__,
        "command": command,
        "instance": {"name": instance.name, "sha256": instance.sha256, "requests": instance.n},
        "time_unit": instance.time_unit,
        "formulation": None,
        "method": method,
        "objective_name": TOTAL_LATENCY.name,
        "status": status,
        "objective": objective,
        "bound": bound,
        "gap": gap,
        "gap_definition": "(objective - bound) / objective",
        "certificate": None,
        "policy": policy,
        "predictor": predictor or ("instance" if instance.has_predictions else "oracle"),
        "cost_model": None
        if cost_model is None
        else {"name": cost_model.name, "sha256": cost_model.sha256},
        "metrics": None if metrics is None else dict(metrics),
        "build_s": None,
        "solve_s": solve_s,
        "seed": seed,
        "threads": None,
        "versions": _versions(),
        "schedule": schedule,
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in ("numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
