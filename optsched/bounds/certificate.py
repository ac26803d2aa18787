"""Certificates: bounds and proofs of optimality as files that anyone can check.

This module writes them. `optsched.bounds.checker` checks them, and imports nothing of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.seconds import OBJECTIVES
from optsched.bounds.dual import Prices
from optsched.costs.cost import BatchCost, CostModel
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance, canonical_json
from optsched.problem.schedule import Schedule

TICKS_PER_SECOND = 10**12
"""Ticks per second of the certificates made here."""
CERTIFIED = {"round": ("tel",), "second": OBJECTIVES}
"""The objectives of certificates, by the instance's unit of time."""
_PRICE_BITS, _PATH_BITS = 24, 16
_HIGHEST_WEIGHT = 4000
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


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
        A leaf.
    value : int
        The bound on the total latency that the tree proves, in rounds.
    denominator : int
        The common denominator of all prices in the leaf.
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


def work_leaf() -> dict[str, Any]:
    """Return the leaf of a certificate in seconds that proves what `optsched.bounds.batch` does.

    Returns
    -------
    dict
        A JSON object. The checker derives all numbers itself.
    """
    return {"relaxation": "work"}


def busy_time_leaf(width: float, p1: Floats, p2: Floats) -> dict[str, Any]:
    """Return the leaf of a certificate in seconds that holds prices of `optsched.bounds.busy_time`.

    Parameters
    ----------
    width : float
        Width of a cell, in seconds.
    p1, p2 : ndarray of float64, shape (cells,)
        Prices >= 0. The leaf holds them as multiples of a power of 2, rounded.

    Returns
    -------
    dict
        A JSON object.
    """
    unit = _unit(max(float(p1.max()), float(p2.max())))
    return {
        "relaxation": "busy-time",
        "width": max(1, round(width * TICKS_PER_SECOND)),
        "denominator": unit,
        "p1": np.rint(p1 * unit).astype(np.int64).tolist(),
        "p2": np.rint(p2 * unit).astype(np.int64).tolist(),
    }


def shares_leaf(
    width: float,
    price: Floats,
    levels: Floats,
    shared: tuple[Floats, Integers, Floats],
    centre: Floats,
    cell: Integers,
) -> dict[str, Any]:
    """Return the leaf of a certificate in seconds that holds prices of `optsched.bounds.shares`.

    Parameters
    ----------
    width : float
        Width of a cell, in seconds.
    price : ndarray of float64, shape (cells,)
        Prices p2 >= 0. The leaf holds prices as multiples of a power of 2, rounded.
    levels : ndarray of float64
        The multipliers that the checker tries, of those in ``centre``.
    shared : tuple of ndarray
        An `optsched.bounds.paths_kernel.Shared`: prices p3, and shares. The leaf holds shares as
        weights, rounded.
    centre : ndarray of float64, shape (n, 2)
        Multipliers for the prefill and for the steps of each request, in seconds.
    cell : ndarray of int64, shape (n,)
        The cell of each arrival.

    Returns
    -------
    dict
        A JSON object.
    """
    p3, begin, share = shared
    highest = max(float(price.max()), float(p3.max()))
    bits = min(_unit(highest * 2 ** (_PRICE_BITS - _PATH_BITS)).bit_length() - 1, 26)
    many = np.diff(begin)
    at = np.repeat(cell - begin[:-1], many) + np.arange(len(share))
    largest = np.zeros(int(at.max(initial=0)) + 1)
    np.maximum.at(largest, at, share)
    weight = share / np.where(largest > 0, largest, 1.0)[at] * _HIGHEST_WEIGHT
    ticks = np.rint(centre * TICKS_PER_SECOND).astype(np.int64)

    return {
        "relaxation": "shares",
        "width": max(1, round(width * TICKS_PER_SECOND)),
        "bits": bits,
        "p2": np.rint(price * 2.0**bits).astype(np.int64).tolist(),
        "p3": np.rint(p3 * 2.0**bits).astype(np.int64).tolist(),
        "levels": np.rint(levels * 1000).astype(np.int64).tolist(),
        "first": ticks[:, 0].tolist(),
        "later": ticks[:, 1].tolist(),
        "cells": many.tolist(),
        "weight": np.rint(weight).astype(np.int64).tolist(),
    }


def clock_leaf(branches: Integers) -> dict[str, Any]:
    """Return the leaf of a certificate in seconds that holds a search of `optsched.bounds.clock`.

    Parameters
    ----------
    branches : ndarray of int64
        The nodes, as `optsched.bounds.clock_search.searched` returns them.

    Returns
    -------
    dict
        A JSON object.
    """
    return {"relaxation": "clock", "branches": branches.tolist()}


def _unit(highest: float) -> int:
    """Return the power of 2 that gives the highest price `_PRICE_BITS` bits."""
    return int(1 << min(max(_PRICE_BITS - math.frexp(highest)[1], 0), 60))


def parts(objective: str, trees: Sequence[tuple[int, int, Any]]) -> dict[str, Any]:
    """Return a node that takes a leaf for each range of requests.

    Parameters
    ----------
    objective : str
        The bounds of the ranges add up, or for the makespan the largest counts.
    trees : sequence of (first, last, tree)
        Disjoint ranges of requests, ascending, as places in order of arrival, ties by index. Each
        tree is a leaf, or the node of the parts of its range.

    Returns
    -------
    dict
        A JSON object.
    """
    node = "max" if objective == "makespan" else "sum"
    flat = []
    for first, last, tree in trees:
        for part in tree.get(node) or [{"first": 0, "last": last - first, "tree": tree}]:
            i, j = int(first + part["first"]), int(first + part["last"])
            flat.append({"first": i, "last": j, "tree": part["tree"]})

    return {node: flat}


def certify(
    instance: Instance, cost: BatchCost, objective: str, tree: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON object of a certificate file in seconds.

    Parameters
    ----------
    instance : Instance
        An instance in seconds.
    cost : BatchCost
        The certificate holds its layers, and the text of its coefficients.
    objective : str
        ``"tel"``, ``"mean_ttft"`` or ``"makespan"``.
    tree : mapping
        A leaf, or `parts`.

    Returns
    -------
    dict
        A JSON object with its own sha256. The value is what the checker proves from the tree.

    Raises
    ------
    UsageError
        If the checker refuses the instance, the cost model or the tree.
    """
    from optsched.bounds.checker.parts import Budget, Rejected
    from optsched.bounds.checker.seconds import proved_ticks

    data: dict[str, Any] = {
        "format": "optsched-certificate",
        "version": 1,
        "instance_sha256": instance.sha256,
        "model": "seconds",
        "objective": objective,
        "cost_model": _cost_model(cost),
        "claim": "bound",
        "ticks_per_second": TICKS_PER_SECOND,
        "tree": dict(tree),
    }
    try:
        data["value"] = proved_ticks(instance, data, Budget())
    except (Rejected, ArithmeticError) as error:
        raise UsageError(f"certificate: {error}") from None

    data["sha256"] = hashlib.sha256(canonical_json(data)).hexdigest()
    return data


def _cost_model(cost: BatchCost) -> dict[str, Any]:
    texts = {name: text for name, text in cost.coefficients.items() if cost[name] != 0}
    return {"layers": cost.layers, "coefficients": texts}


def certified_value(instance: Instance, certificate: Mapping[str, Any]) -> int | float:
    """Return the value that a certificate states, in the unit of its objective.

    Parameters
    ----------
    instance : Instance
    certificate : mapping
        A certificate that is valid for the instance.

    Returns
    -------
    int or float
        Rounds, or seconds, rounded down.
    """
    value = int(certificate["value"])
    if certificate["model"] == "rounds":
        return value

    requests = instance.n if certificate["objective"] == "mean_ttft" else 1
    exact = Fraction(value, int(certificate["ticks_per_second"]) * requests)
    seconds = float(exact)
    return seconds if seconds <= exact else math.nextafter(seconds, -math.inf)


def verify_certificate(
    instance: Instance, certificate: dict[str, Any], cost_model: CostModel | None = None
) -> int | float:
    """Check a certificate and return the value that it proves.

    Parameters
    ----------
    instance : Instance
        The instance that the certificate is about.
    certificate : dict
        The JSON object of a certificate file.
    cost_model : BatchCost, optional
        The cost model that a certificate in seconds must be about. By default any is accepted:
        the proof is for the one that stands in the certificate.

    Returns
    -------
    int or float
        A value of the certificate's objective that no schedule is below: rounds, or seconds.

    Raises
    ------
    ViolationError
        If the certificate does not prove what it claims. The message has the checker's reason. The
        rule is ``"certificate_size"`` if the check would take too much, so that nothing is known,
        else ``"certificate"``.
    """
    from optsched.bounds.checker import check_certificate
    from optsched.bounds.checker.parts import Rejected, TooLarge

    try:
        check_certificate(instance, certificate)
    except Rejected as error:
        rule = "certificate_size" if isinstance(error, TooLarge) else "certificate"
        raise ViolationError(f"certificate: {error}", rule=rule) from None

    if isinstance(cost_model, BatchCost) and not same_cost_model(certificate, cost_model):
        raise ViolationError(
            f"certificate: cost_model: found another one; expected that of {cost_model.name!r}",
            rule="certificate",
        )

    return certified_value(instance, certificate)


def same_cost_model(certificate: Mapping[str, Any], cost_model: CostModel | None) -> bool:
    """Return whether a valid certificate is about a cost model, or one of its minorants.

    Parameters
    ----------
    certificate : mapping
    cost_model : BatchCost, UnitCost or None
        Only a `BatchCost` can be that of a certificate in seconds.

    Returns
    -------
    bool
    """
    if certificate["model"] == "rounds" or not isinstance(cost_model, BatchCost):
        return certificate["model"] == "rounds" and not isinstance(cost_model, BatchCost)

    def exact(model: Mapping[str, Any]) -> tuple[int, dict[str, Fraction]]:
        values = {name: Fraction(text) for name, text in model["coefficients"].items()}
        return model["layers"], {name: value for name, value in values.items() if value}

    return exact(certificate["cost_model"]) in [exact(_cost_model(c)) for c in cost_model.minorants]
