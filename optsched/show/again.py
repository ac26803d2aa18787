"""Simulate policies of a comparison again whose schedules no file has, and check their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optsched.problem.budget import Budget
from optsched.problem.errors import InputError, OptschedError
from optsched.problem.instance import Instance
from optsched.problem.metrics import TABLE
from optsched.problem.objective import TOTAL_LATENCY

if TYPE_CHECKING:
    from optsched.costs.cost import CostModel
    from optsched.judge.evaluate import Evaluation
    from optsched.problem.schedule import Schedule

_AGAIN_S = 20.0
"""The seconds after which a policy is not simulated again for a report."""
_NAMES_FILES = (".py", "file")
"""Texts in specifications that run a user's code or read a file. Such policies never run here."""


class NotAgainError(InputError):
    """A schedule could not be made again. The message says why, without the policy's name."""


def cost_model_again(
    instance: Instance, data: Mapping[str, Any], given: str | None
) -> CostModel | None:
    """Return the cost model of a comparison, or None if its instance is in rounds."""
    from optsched.files.sources import cost_model_like

    known = data.get("cost_model")
    known = known if isinstance(known, Mapping) else {}
    name = known.get("name")

    try:
        cost = cost_model_like(instance, given, known)
    except OptschedError as error:
        wanted = "" if name is None else f" (it was made under {name!r}; --cost-model names it)"
        raise NotAgainError(f"{error}{wanted}") from None

    if cost is not None and cost.sha256 != known.get("sha256"):
        raise NotAgainError(f"the cost model {cost.name!r} is not the one recorded, {name!r}")

    return cost


def simulate_again(
    instance: Instance, row: Mapping[str, Any], seed: object, cost: CostModel | None
) -> tuple[Schedule, Evaluation]:
    """Run a policy of a comparison again. Every recorded metric must agree.

    A specification that names a file is refused, since comparison files may come from anybody.
    """
    from optsched.judge.evaluate import evaluate
    from optsched.policies.engine.simulate import simulate

    spec = str(row.get("policy"))
    if any(word in spec.casefold() for word in _NAMES_FILES):
        raise NotAgainError("names a user file, which is never executed from here")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise NotAgainError(f"the file records no seed (found {seed!r:.40})")
    try:
        schedule = simulate(instance, spec, cost, seed=seed, budget=Budget(_AGAIN_S))
        evaluation = evaluate(instance, schedule, cost)
    except OptschedError as error:
        raise NotAgainError(f"simulated again, it fails: {error}") from None

    differing = _difference(row.get("metrics"), evaluation.metrics)
    if differing is not None:
        raise NotAgainError(f"simulated again: {differing}")

    return schedule, evaluation


def _difference(recorded: object, found: Mapping[str, float | int | None]) -> str | None:
    """Return words for the first metric that differs, or None if all recorded metrics agree."""
    known = recorded if isinstance(recorded, Mapping) else {}
    for name, metric in TABLE.items():
        if metric.parameters or (name not in known and name != TOTAL_LATENCY.name):
            continue  # SLO limits are not recorded, and an older file has fewer metrics

        old, new = known.get(name), found[name]
        if old is None or new is None:
            same = old is new
        else:
            same = isinstance(old, (int, float)) and abs(old - new) <= 1e-9 * max(1.0, abs(new))

        if not same:
            return f"{name} {new}, not {old}"

    return None
