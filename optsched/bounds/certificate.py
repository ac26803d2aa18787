"""Certificates: bounds and proofs of optimality as files that anyone can check.

Written here, checked by `optsched.bounds.checker`, which shares no code with this package.
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
    """Return the leaf of a certificate that holds prices; their denominator is the file's."""
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
    children : sequence of (first, last, node)
        Ranges of starts, ascending; together the parent's range. ``last`` None: without end.
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
        In rounds.
    tree : mapping
        A leaf, or a `branch`.
    value : int
        The bound on the total latency that the tree proves, in rounds.
    denominator : int
        Of all prices in the tree.
    schedule : Schedule of starts, optional
        One of that value: the claim is then ``optimal``.

    Raises
    ------
    UsageError
        The instance is in seconds, or the schedule is not one of starts.
    """
    if not instance.in_rounds:
        raise UsageError("certificate: an instance in rounds is right; this one is in seconds")
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
            raise UsageError("certificate: a schedule of starts is right")
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
    """Have a certificate checked; return the value that it proves.

    Raises
    ------
    ViolationError
        It does not prove what it claims, with the checker's reason.
    """
    from optsched.bounds.checker import check_certificate
    from optsched.bounds.checker_parts import Rejected

    try:
        return check_certificate(instance, certificate)
    except Rejected as error:
        raise ViolationError(f"certificate: {error}", rule="certificate") from None
