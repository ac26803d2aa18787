"""Certificates: bounds and proofs of optimality as files that anyone can check.

This module writes them. `optsched.bounds.checker` checks them, and imports nothing of it.
"""

import hashlib
import threading
from collections.abc import Mapping
from fractions import Fraction
from math import inf
from typing import Any

from optsched.bounds.checker.parts import Budget, Rejected, TooLarge
from optsched.bounds.checker.seconds import IN_TIME, OBJECTIVES
from optsched.bounds.checker.sessions import SUMS
from optsched.bounds.leaves import TICKS_PER_SECOND, seconds_of
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.errors import OutOfTimeError, UsageError, ViolationError
from optsched.problem.instance import Instance, canonical_json
from optsched.problem.limits import all_limits
from optsched.problem.schedule import Schedule

CERTIFIED = {"round": ("tel", "weighted_latency", *SUMS), "second": OBJECTIVES}
"""The objectives of certificates, by the instance's unit of time."""


def make_certificate(
    instance: Instance,
    tree: Mapping[str, Any],
    *,
    value: int,
    denominator: int = 1,
    schedule: Schedule | None = None,
    objective: str = "tel",
) -> dict[str, Any]:
    """Return the JSON object of a certificate file."""
    if not instance.in_rounds:
        raise UsageError("certificate: found an instance in seconds; expected one in rounds")

    fields: dict[str, Any] = {
        "objective": objective,
        "claim": "bound" if schedule is None else "optimal",
        "value": int(value),
        "denominator": int(denominator),
        "tree": dict(tree),
    }
    if schedule is not None:
        if schedule.starts is None:
            raise UsageError("certificate: found a schedule of batches; expected one of starts")

        fields["schedule"] = {
            "format": "optsched-schedule",
            "version": 1,
            "instance_sha256": instance.sha256,
            "kind": "starts",
            "starts": schedule.starts.tolist(),
        }

    return _sealed(instance, "rounds", fields)


class Steps(Budget):
    """The steps that the check of a new certificate may take, until an event stops it."""

    def __init__(self, stop: threading.Event | None) -> None:
        super().__init__()
        self.stop = stop

    def spend(self, steps: int) -> None:
        """Count some steps. OutOfTimeError: the event was set."""
        if self.stop is not None and self.stop.is_set():
            raise OutOfTimeError("interrupted while a certificate was checked")

        super().spend(steps)


def certify(
    instance: Instance,
    cost: BatchCost,
    objective: str,
    tree: Mapping[str, Any],
    pools: Mapping[str, Any] | None = None,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a certificate file in seconds, about pools of machines if given."""
    from optsched.bounds.checker.seconds import proved_ticks

    fields: dict[str, Any] = {
        "objective": objective,
        "cost_model": cost_model_dict(cost),
        "claim": "bound",
        "ticks_per_second": TICKS_PER_SECOND,
        "tree": dict(tree),
        **({} if pools is None else {"pools": dict(pools)}),
    }
    try:
        fields["value"] = proved_ticks(instance, fields, budget or Budget())
    except (Rejected, ArithmeticError) as error:
        raise UsageError(f"certificate: {error}") from None

    return _sealed(instance, "seconds", fields)


def limits_of(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SLOs that a certificate of requests in time states, as texts; else none."""
    if certificate["objective"] != IN_TIME:
        return {}

    tree = certificate["tree"]
    return dict(tree.get("tree", tree)["limits"])


def limits_in_words(certificate: Mapping[str, Any]) -> str:
    """Return what the requests of a certificate are within, one limit after another."""
    limits = limits_of(certificate).items()
    return ", ".join(f"{k} {'by request' if isinstance(v, list) else v}" for k, v in limits)


def same_limits(
    certificate: Mapping[str, Any], instance: Instance, given: Mapping[str, float] | None = None
) -> bool:
    """Return whether a valid certificate is about an instance's SLOs, but for those given."""
    if certificate["objective"] != IN_TIME:
        return True
    if not given and not instance.slos:
        return False

    def column(stated: Any) -> list[float]:
        texts = stated if isinstance(stated, list) else [stated] * instance.n
        return [inf if text is None else float(text) for text in texts]

    stated, asked = limits_of(certificate), all_limits(instance, given)
    return all(column(stated.get(name)) == asked[name].tolist() for name in asked)


def _sealed(instance: Instance, model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    head = {"format": "optsched-certificate", "version": 1, "instance_sha256": instance.sha256}
    data = {**head, "model": model, **fields}
    return {**data, "sha256": hashlib.sha256(canonical_json(data)).hexdigest()}


def cost_model_dict(cost: BatchCost) -> dict[str, Any]:
    """Return a cost model as a certificate states it: coefficients, or tables with minorants."""
    if cost.table is not None:
        return {"layers": cost.layers, "table": cost.table.to_dict()}

    texts = {name: text for name, text in cost.coefficients.items() if cost[name] != 0}
    return {"layers": cost.layers, "coefficients": texts}


def certified_value(instance: Instance, certificate: Mapping[str, Any]) -> int | float:
    """Return the value that a certificate states, in the unit of its objective."""
    value, objective = int(certificate["value"]), certificate["objective"]
    if objective == IN_TIME:
        return value / instance.n

    ticks, terms = int(certificate.get("ticks_per_second", 1)), 1
    if objective == "mean_ttft":
        terms = instance.n
    elif objective == "mean_session_completion" and instance.sessions is not None:
        terms = int(instance.sessions.session.max()) + 1
    if ticks == terms == 1 and instance.in_rounds:
        return value

    return seconds_of(value, ticks * terms)


def verify_certificate(
    instance: Instance,
    certificate: dict[str, Any],
    cost_model: CostModel | None = None,
    *,
    on_pools: bool = False,
) -> int | float:
    """Return the value, in rounds or seconds, that a certificate proves, once it is checked.

    Parameters
    ----------
    instance : Instance
        The instance that the certificate is about.
    certificate : dict
    cost_model : BatchCost, optional
        The cost model that a certificate in seconds must be about. By default any is accepted:
        the proof is for the one that stands in the certificate.
    on_pools : bool
        Whether it may be about several machines (`optsched.bounds.pools.verify_pools`).

    Raises
    ------
    ViolationError
        If the certificate does not prove what it claims. The message has the checker's reason. The
        rule is ``"certificate_size"`` if the check would take too much, so that nothing is known,
        ``"certificate_pools"`` if it is about other machines, else ``"certificate"``.
    """
    from optsched.bounds.checker import check_certificate

    try:
        check_certificate(instance, certificate)
    except Rejected as error:
        rule = "certificate_size" if isinstance(error, TooLarge) else "certificate"
        raise ViolationError(f"certificate: {error}", rule=rule) from None

    if "pools" in certificate and not on_pools:
        raise ViolationError(
            "certificate: found one about pools of machines; expected one about one worker",
            rule="certificate_pools",
        )

    if isinstance(cost_model, BatchCost) and not same_cost_model(certificate, cost_model):
        raise ViolationError(
            f"certificate: cost_model: found another one; expected that of {cost_model.name!r}",
            rule="certificate",
        )

    return certified_value(instance, certificate)


def same_cost_model(certificate: Mapping[str, Any], cost_model: CostModel | None) -> bool:
    """Return whether a valid certificate is about a cost model, or one of its minorants."""
    if certificate["model"] == "rounds" or not isinstance(cost_model, BatchCost):
        return certificate["model"] == "rounds" and not isinstance(cost_model, BatchCost)

    if "table" in certificate["cost_model"]:
        return bool(certificate["cost_model"] == cost_model_dict(cost_model))

    def exact(model: Mapping[str, Any]) -> tuple[int, dict[str, Fraction]]:
        values = {name: Fraction(text) for name, text in model["coefficients"].items()}
        return model["layers"], {name: value for name, value in values.items() if value}

    return exact(certificate["cost_model"]) in [
        exact(cost_model_dict(c)) for c in cost_model.minorants
    ]
