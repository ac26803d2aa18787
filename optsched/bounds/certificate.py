"""Certificates: bounds and proofs of optimality as files that anyone can check.

This module writes them. `optsched.bounds.checker` checks them, and imports nothing of it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from optsched.bounds.checker.fields import PREFIX_FIELDS, further_fields
from optsched.bounds.checker.parts import Budget, Rejected, TooLarge
from optsched.bounds.checker.seconds import CAPACITY, IN_TIME, OBJECTIVES
from optsched.bounds.checker.sessions import SUMS
from optsched.bounds.checker.windows import proved_about
from optsched.bounds.leaves import TICKS_PER_SECOND, seconds_of, slo_prices_leaf
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.errors import OutOfTimeError, UsageError, ViolationError
from optsched.problem.instance import Instance, canonical_json
from optsched.problem.limits import all_limits
from optsched.problem.progress import number
from optsched.problem.schedule import Schedule

CERTIFIED = {
    "round": ("tel", "weighted_latency", "weighted_completion", *SUMS),
    "second": OBJECTIVES,
}
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
    """Return the JSON object of a certificate file, about an instance in rounds.

    With a schedule it claims that this is optimal, else only the bound ``value``. `denominator` is
    that of the prices in the tree.
    """
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
    """The steps that the check of a new certificate may take, until its time is over."""

    def __init__(self, over: Callable[[], bool], steps: int | None = None) -> None:
        super().__init__(steps)
        self.over = over

    def spend(self, steps: int) -> None:
        """Count some steps. OutOfTimeError: the time is over."""
        if self.over():
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
    # The value is what the checker finds the tree to prove. Trees are about the instance without
    # drafts and windows.
    try:
        about = proved_about(instance, fields, budget or Budget())
        fields["value"] = proved_ticks(about, fields, budget or Budget())
    except (Rejected, ArithmeticError) as error:
        raise UsageError(f"certificate: {error}") from None

    return _sealed(instance, "seconds", fields)


def certify_chain(
    instance: Instance,
    cost: BatchCost,
    since: float,
    chain: Sequence[tuple[int, Any]],
    classes: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Return a certificate of how many are within SLOs at any rate from one on.

    `since`: that rate. `chain`: intervals of rates side by side
    (`optsched.bounds.slo_prices.Interval`), each behind the number of the minorant that proves it,
    or that behind the last minorant for `classes`, which are those of a leaf.
    """
    limits, parts = all_limits(instance, None), []
    for minorant, interval in chain:
        leaf = slo_prices_leaf(interval.prices, limits, (interval.low, interval.high))
        parts.append({"minorant": minorant, "most": interval.most, "leaf": leaf})

    tree: dict[str, Any] = {"from": repr(float(since)), "chain": parts}
    if any(number == len(cost.minorants) for number, _ in chain):
        tree["classes"] = classes

    # With SLOs, users share what they pay of a prefix within 0 seconds (`bounds.relaxations`).
    if further_fields(instance) & PREFIX_FIELDS:
        tree = {"within": 0, "tree": tree}

    return certify(instance, cost, CAPACITY, tree)


def tree_of(certificate: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tree of a certificate of requests in time, without what is said of prefixes."""
    tree: Mapping[str, Any] = certificate["tree"]
    return tree.get("tree", tree)


def limits_of(certificate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SLOs that a certificate of requests in time states, as texts; else none."""
    if certificate["objective"] not in (IN_TIME, CAPACITY):
        return {}

    tree = tree_of(certificate)
    return dict(tree["chain"][0]["leaf"]["limits"] if "chain" in tree else tree["limits"])


def limits_in_words(certificate: Mapping[str, Any]) -> str:
    """Return what the requests of a certificate are within, one limit after another."""
    limits = limits_of(certificate).items()
    return ", ".join(f"{k} {'by request' if isinstance(v, list) else v}" for k, v in limits)


def chain_in_words(instance: Instance, certificate: Mapping[str, Any]) -> str:
    """Return what a chain proves at any rate from one on, and from lower ones on."""
    tree, count = tree_of(certificate), certificate["value"]
    since = float(tree["from"])
    words = f"at most {count} of {instance.n} requests are within {limits_in_words(certificate)}"
    words += f" at any rate scale from {number(since)} on"

    # Going on to lower rates, the max so far holds from each part's rate on. Of parts with the same
    # max the last one, with the lowest rate, stays.
    lowest_rate: dict[int, float] = {}
    for part in reversed(tree["chain"]):
        rate = float(part["leaf"]["rates"][0])
        if rate < since:
            count = max(count, part["most"])
            lowest_rate[count] = rate

    return words + "".join(f", {k} from {number(rate)} on" for k, rate in lowest_rate.items())


def same_limits(
    certificate: Mapping[str, Any], instance: Instance, given: Mapping[str, float] | None = None
) -> bool:
    """Return whether a valid certificate is about these SLOs: those given, else the instance's.

    It is True for a certificate without SLOs. Where nobody has an SLO nothing is counted, so that
    no certificate of a count is about that.
    """
    if certificate["objective"] not in (IN_TIME, CAPACITY):
        return True
    if not given and not instance.slos:
        return False

    def column(limit: Any) -> list[float]:
        """Return a limit by request; a certificate has one text for all, or a list."""
        texts = limit if isinstance(limit, list) else [limit] * instance.n
        return [inf if text is None else float(text) for text in texts]

    certified, wanted = limits_of(certificate), all_limits(instance, given)
    return all(column(certified.get(name)) == wanted[name].tolist() for name in wanted)


def _sealed(instance: Instance, model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a certificate with its head and its hash."""
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
    if objective == CAPACITY:
        return float(tree_of(certificate)["from"])

    # A certificate has the sum over requests or sessions, in rounds or ticks, also of a mean.
    ticks_per_unit, terms = int(certificate.get("ticks_per_second", 1)), 1
    if objective == "mean_ttft":
        terms = instance.n
    elif objective == "mean_session_completion" and instance.sessions is not None:
        terms = int(instance.sessions.session.max()) + 1
    # Sums of rounds stay integers.
    if ticks_per_unit == terms == 1 and instance.in_rounds:
        return value

    return seconds_of(value, ticks_per_unit * terms)


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

    # Texts of equal coefficients may differ, and those of 0 may stand there or not.
    def exact(model: Mapping[str, Any]) -> tuple[int, dict[str, Fraction]]:
        values = {name: Fraction(text) for name, text in model["coefficients"].items()}
        return model["layers"], {name: value for name, value in values.items() if value}

    return exact(certificate["cost_model"]) in [
        exact(cost_model_dict(c)) for c in cost_model.minorants
    ]
