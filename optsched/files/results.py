"""Result files of commands that run no solver, and the first fields of all result files."""

from collections.abc import Mapping
from typing import Any

from optsched.costs.cost import CostModel
from optsched.problem.instance import Instance
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.version import __version__

NOT_HERE = "`optsched bound --certificate-out` and that of `solve` write one"
"""Why the files of other commands with a bound have no certificate."""


def head(format_name: str, command: str, instance: Instance) -> dict[str, Any]:
    """Return the first fields of a file about an instance."""
    return {
        "format": format_name,
        "version": 1,
        "optsched": __version__,
        "command": command,
        "instance": {"name": instance.name, "sha256": instance.sha256, "requests": instance.n},
        "time_unit": instance.time_unit,
    }


def cost_model_reference(instance: Instance, cost: CostModel | None) -> dict[str, Any] | None:
    """Return the name and the digest of a cost model."""
    if cost is None or instance.in_rounds:
        return None

    return {"name": cost.name, "sha256": cost.sha256}


def predictor_of(instance: Instance) -> str:
    """Return where policies take output lengths from."""
    return "instance" if instance.has_predictions else "oracle"


def result_dict(
    instance: Instance,
    command: str,
    *,
    objective: float | None,
    metrics: Mapping[str, Any] | None,
    cost_model: CostModel | None,
    **further: Any,
) -> dict[str, Any]:
    """Return the JSON object of a result file.

    Of the `further` fields, such as ``seed``, ``bound`` or ``predictor`` (a policy's own), those
    that are None are left out.
    """
    from importlib.metadata import version  # takes 30 ms, so it is only imported to write a file

    unknown = dict.fromkeys(("build_s", "solve_s", "seed", "threads"))
    data = {
        **head("optsched-result", command, instance),
        "formulation": None,
        "method": None,
        "objective_name": TOTAL_LATENCY.name,
        "status": "no_incumbent" if objective is None else "feasible",
        "objective": objective,
        "bound": None,
        "gap": None,
        "gap_definition": "(objective - bound) / objective",
        "certificate": None,
        "policy": None,
        "predictor": predictor_of(instance),
        "cost_model": cost_model_reference(instance, cost_model),
        "metrics": None if metrics is None else dict(metrics),
        **unknown,
        "versions": {package: version(package) for package in ("numpy", "numba")},
        "schedule": None,
    }
    return data | {key: value for key, value in further.items() if value is not None}
