"""Certificates: bounds and proofs of optimality as files that anyone can check.

This module writes them. `optsched.bounds.checker` checks them, and shares no code with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from optsched.bounds.dual import Prices
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance, canonical_json
from optsched.problem.schedule import Schedule


def prices_leaf(prices: Prices) -> dict[str, Any]:
    """Return the leaf of a certificate that holds prices.

    Parameters
    ----------
    prices : Prices
        Their denominator is not part of the leaf; pass it to `make_certificate`.

    Returns
    -------
    dict
        A JSON object.
    """
    return {
        "relaxation": "prices",
        "from_round": prices.from_round.tolist(),
        "price": prices.price.tolist(),
    }


def branch(request: int, children: Sequence[tuple[int, int | None, Any]]) -> dict[str, Any]:
    """Return a node that splits a request's starts.

    Parameters
    ----------
    request : int
        The index of the request.
    children : sequence of (first, last, node)
        Ranges of starts with their nodes, ascending. Together they cover the parent's range. A
        range with ``last`` None has no end.

    Returns
    -------
    dict
        A JSON object.
    """
    return {
        "branch": int(request),
        "children": [{"from": lo, "to": hi, "tree": tree} for lo, hi, tree in children],
    }


def make_certificate(
    instance: Instance,
    tree: Mapping[str, Any],
    *,
    value: int,
    denominator: int = 1,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a certificate file.

    Parameters
    ----------
    instance : Instance
        An instance in rounds.
    tree : mapping
        A leaf, or a `branch`.
    value : int
        The bound on the total latency that the tree proves, in rounds.
    denominator : int
        The common denominator of all prices in the tree.
    schedule : Schedule, optional
        A schedule of starts that reaches the value. The claim is then ``optimal``.

    Returns
    -------
    dict
        A JSON object with its own sha256.

    Raises
    ------
    UsageError
        If the instance is in seconds, or if the schedule is not one of starts.
    """
    if not instance.in_rounds:
        raise UsageError("certificate: found an instance in seconds; expected one in rounds")
    data: dict[str, Any] = {
        "format": "optsched-certificate",
        "version": 1,
        "instance_sha256": instance.sha256,
        "model": "rounds",
        "objective": "tel",
        "claim": "bound" if schedule is None else "optimal",
        "value": int(value),
        "denominator": int(denominator),
        "tree": dict(tree),
    }
    if schedule is not None:
        if schedule.starts is None:
            raise UsageError("certificate: found a schedule of batches; expected one of starts")
        data["schedule"] = {
            "format": "optsched-schedule",
            "version": 1,
            "instance_sha256": instance.sha256,
            "kind": "starts",
            "starts": schedule.starts.tolist(),
        }
    data["sha256"] = hashlib.sha256(canonical_json(data)).hexdigest()
    return data


def verify_certificate(instance: Instance, certificate: dict[str, Any]) -> int:
    """Check a certificate and return the value that it proves.

    Parameters
    ----------
    instance : Instance
        The instance that the certificate is about.
    certificate : dict
        The JSON object of a certificate file.

    Returns
    -------
    int
        A total latency in rounds that no schedule is below.

    Raises
    ------
    ViolationError
        If the certificate does not prove what it claims. The message has the checker's reason.
    """
    from optsched.bounds.checker import check_certificate
    from optsched.bounds.checker_parts import Rejected

    try:
        return check_certificate(instance, certificate)
    except Rejected as error:
        raise ViolationError(f"certificate: {error}", rule="certificate") from None
