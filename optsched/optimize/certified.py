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


def certificate_of(interval: Interval, wanted: bool) -> tuple[dict[str, Any] | None, str | None]:
    """Return the certificate of an interval, or None and the reason.

    In seconds it is made of the best proof that the checker accepts, which takes time, and so only
    if it is ``wanted``.
    """
    task, goal = interval.task, interval.goal.name
    known = interval.certificate
    # With weights the checker may prove the optimum itself where the certificate proves less.
    is_loose = known is not None and known["value"] != interval.value
    if wanted and is_loose and goal in WEIGHTED:
        prove(interval, Budget(_STARTS_S, stop=interval.budget.stop), "starts")
    if interval.certificate is not None:
        return _with_schedule(interval, interval.certificate), None
    if interval.bound is None:
        return None, f"no bound on {goal} is known"

    if task.workers > 1 and task.pools is None:
        return None, "none is written of several machines without a link (--pools)"
    if not interval.trees:
        return None, _why_no_proof(task.instance.time_unit, goal, interval.bound_origin)
    if not wanted:
        return None, f"none was asked for: {NOT_HERE}"

    # Each reason once, in order. The best proof comes first.
    reasons = dict[str, None]()
    for proof in sorted(interval.trees, key=lambda proof: -task.goal.signed(proof.value)):
        cost, tree = proof.cost_model, proof.tree or {}
        assert isinstance(cost, BatchCost)
        steps = Steps(lambda: interval.budget.stopped)
        try:
            if task.pools is None:
                certificate = certify(task.instance, cost, goal, tree, budget=steps)
            else:
                certificate = certify_pools(task.instance, goal, tree, steps)
        except OutOfTimeError:
            return None, "it was interrupted while it was checked"
        except UsageError as error:  # for example a coefficient with too many digits
            reasons[f"{cost.name}: {error}"] = None
            continue

        return certificate, None

    return None, f"the checker refuses it: {'; '.join(reasons)}"


def _with_schedule(interval: Interval, certificate: dict[str, Any]) -> dict[str, Any]:
    """Return a certificate of optimality if the best schedule reaches the bound in rounds.

    Else it is as it was: in seconds, of sessions, of a schedule that is no list of starts, or where
    the schedule's value is not the one proved.
    """
    best, instance = interval.incumbent, interval.task.instance
    is_bound = certificate["claim"] == "bound" and instance.in_rounds and instance.sessions is None
    starts = None if best is None else best.schedule.starts
    if not is_bound or best is None or starts is None or best.value != certificate["value"]:
        return certificate

    return make_certificate(
        instance,
        certificate["tree"],
        value=certificate["value"],
        denominator=certificate["denominator"],
        schedule=best.schedule,
        objective=certificate["objective"],
    )


def _why_no_proof(time_unit: str, goal: str, name: str | None) -> str:
    """Return that no bound of some name, or none on some objective, carries a certificate.

    A bound that carries one in principle may have found none in its time.
    """
    if goal not in CERTIFIED[time_unit]:
        known = ", ".join(CERTIFIED[time_unit])
        return f"no bound on {goal} in {time_unit}s carries one; those on {known} do"

    if name in list_bounds() and list_bounds()[name].certifies:
        return f"the bound {name!r} found none in its time; expected a larger time limit"

    bounds = [b for b in list_bounds().values() if b.certifies and b.time_unit == time_unit]
    names = ", ".join(b.name for b in bounds if goal in b.objectives and not b.needs)
    return f"the bound {name!r} carries none; those that do are {names}"
