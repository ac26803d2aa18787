"""The certificate of an interval: made of the best proof that the checker accepts."""

from typing import Any

from optsched.bounds import list_bounds
from optsched.bounds.certificate import CERTIFIED, Steps, certify, make_certificate
from optsched.bounds.pools import certify_pools
from optsched.costs.cost import BatchCost
from optsched.files.results import NOT_HERE
from optsched.optimize.formulations.rounds.goals import WEIGHTED
from optsched.optimize.interval import Interval
from optsched.optimize.strategies import prove
from optsched.problem.budget import Budget
from optsched.problem.errors import OutOfTimeError, UsageError

# Seconds to prove an optimum of weights again, by what the checker knows.
_STARTS_S = 20.0


def certified(interval: Interval, wanted: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Return the certificate of an interval, or None and the reason.

    In seconds it is made of the best proof that the checker accepts.
    """
    task, goal = interval.task, interval.goal.name
    made = interval.certificate
    if wanted and made is not None and made["value"] != interval.value and goal in WEIGHTED:
        prove(interval, Budget(_STARTS_S, stop=interval.budget.stop), "starts")
    if interval.certificate is not None:
        return _with_schedule(interval, interval.certificate), None
    if interval.bound is None:
        return None, f"no bound on {goal} is known"

    if task.workers > 1 and task.pools is None:
        return None, "none is written of several machines without a link (--pools)"
    if not interval.trees:
        return None, _no_proof(task.instance.time_unit, goal, interval.bound_origin)
    if not wanted:
        return None, f"none was asked for: {NOT_HERE}"

    refused = dict[str, None]()
    for proof in sorted(interval.trees, key=lambda one: -task.goal.signed(one.value)):
        cost, tree = proof.cost_model, proof.tree or {}
        assert isinstance(cost, BatchCost)
        steps = Steps(interval.budget.stop)
        try:
            if task.pools is None:
                made = certify(task.instance, cost, goal, tree, budget=steps)
            else:
                made = certify_pools(task.instance, goal, tree, steps)
        except OutOfTimeError:
            return None, "it was interrupted while it was checked"
        except UsageError as error:  # for example a coefficient with too many digits
            refused[f"{cost.name}: {error}"] = None
            continue

        return made, None

    return None, f"the checker refuses it: {'; '.join(refused)}"


def _with_schedule(interval: Interval, made: dict[str, Any]) -> dict[str, Any]:
    """Return a certificate of optimality if the best schedule reaches the bound in rounds."""
    best, instance = interval.incumbent, interval.task.instance
    bound = made["claim"] == "bound" and instance.in_rounds and instance.sessions is None
    if not bound or best is None or best.schedule.starts is None or best.value != made["value"]:
        return made

    return make_certificate(
        instance,
        made["tree"],
        value=made["value"],
        denominator=made["denominator"],
        schedule=best.schedule,
        objective=made["objective"],
    )


def _no_proof(time_unit: str, goal: str, name: str | None) -> str:
    """Return that no bound of some name, or none on some objective, carries a certificate."""
    if goal not in CERTIFIED[time_unit]:
        known = ", ".join(CERTIFIED[time_unit])
        return f"no bound on {goal} in {time_unit}s carries one; those on {known} do"

    if name in list_bounds() and list_bounds()[name].certifies:
        return f"the bound {name!r} found none in its time; expected a larger time limit"

    there = [one for one in list_bounds().values() if one.certifies and one.time_unit == time_unit]
    able = ", ".join(one.name for one in there if goal in one.objectives and not one.needs)
    return f"the bound {name!r} carries none; those that do are {able}"
