"""Leaves of certificates: the numbers of a bound as the checker reads them, in JSON."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.classes import ONE, UNIT as CLASS_UNIT
from optsched.bounds.dual import Prices

if TYPE_CHECKING:
    from optsched.bounds.checker.labels import Units

TICKS_PER_SECOND = 10**12
"""Ticks per second of the certificates made here."""
# Bits of the highest price, and by how many fewer those of paths have.
_PRICE_BITS, _PATH_BITS = 30, 16
# The weight of the largest share in a cell.
_HIGHEST_WEIGHT = 4000
# How much charges are lowered, relatively, so that rounding does not matter to the checker.
_CHARGES_MARGIN = 1e-7
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def seconds_of(ticks: int, per: int = TICKS_PER_SECOND) -> float:
    """Return so many ticks, or the mean of so many terms, in seconds, rounded down."""
    exact = Fraction(ticks, per)
    nearest = float(exact)
    return nearest if nearest <= exact else math.nextafter(nearest, -math.inf)


def prices_leaf(prices: Prices) -> dict[str, Any]:
    """Return the leaf that holds prices of KV memory. Their denominator is not part of it."""
    rounds, price = prices.from_round.tolist(), prices.price.tolist()
    return {"relaxation": "prices", "from_round": rounds, "price": price}


def starts_leaf(prices: Prices, value: int) -> dict[str, Any]:
    """Return the leaf of prices near which no start of a schedule below the value is."""
    return {**prices_leaf(prices), "relaxation": "starts", "value": value}


def pairs_leaf(threshold: int) -> dict[str, Any]:
    """Return the leaf of requests whose peak is the threshold or more."""
    return {"relaxation": "pairs", "threshold": threshold}


def lengths_leaf(every: int, floor: int, lengths: list[list[int]]) -> dict[str, Any]:
    """Return the leaf of lists of lengths of the kinds of requests, with marks so far apart."""
    return {"relaxation": "lengths", "every": every, "floor": floor, "lengths": lengths}


def work_leaf() -> dict[str, Any]:
    """Return the leaf of `optsched.bounds.batch`. The checker derives all numbers itself."""
    return {"relaxation": "work"}


def sessions_leaf(parts: int) -> dict[str, Any]:
    """Return the leaf of sessions, whose requests' later tokens are cut into so many parts."""
    return {"relaxation": "sessions", "parts": parts}


def clock_leaf(branches: Integers) -> dict[str, Any]:
    """Return the leaf of a search, with the nodes that `optsched.bounds.clock.search` returns."""
    return {"relaxation": "clock", "branches": branches.tolist()}


def labels_leaf(
    units: "Units", arrival: Sequence[Fraction], claims: Sequence[tuple[int, Fraction, Fraction]]
) -> dict[str, Any]:
    """Return the leaf of claims (m, t, value), in seconds.

    A claim says that the requests from the m-th on, in order of arrival, count to no less than the
    value on a machine that is free from t on. The last one is about all requests. A search took
    `arrival` for their arrivals. Those of the checker, in ``units``, may be earlier, and its times
    are rounded down: as much earlier may each request end.
    """
    n, per = len(arrival), units.per_second
    pairs = zip(arrival, units.arrival, strict=True)
    max_earlier = max(Fraction(0), *(a - Fraction(b, per) for a, b in pairs))
    rows = []
    for m, t, value in claims:
        begin = math.floor(t * per)
        earlier = (n - m) * (max_earlier + t - Fraction(begin, per))  # of all requests from m on
        rows.append((m, begin, max(0, math.floor((value - earlier) * per))))

    *others, (_, _, value_of_all) = rows
    lists = {name: [row[k] for row in others] for k, name in enumerate(("first", "begin", "least"))}
    return {"relaxation": "labels", "value": value_of_all, **lists}


def busy_time_leaf(width: float, p1: Floats, p2: Floats) -> dict[str, Any]:
    """Return the leaf of prices of machine time on cells of so many seconds.

    ``p1`` and ``p2`` are those of `optsched.bounds.checker.busy_time`. The leaf holds them as
    multiples of a power of 2, rounded.
    """
    unit = price_unit(max(float(p1.max()), float(p2.max())))
    return {
        "relaxation": "busy-time",
        "width": ticks_of(width),
        "denominator": unit,
        "p1": _whole(p1 * unit),
        "p2": _whole(p2 * unit),
    }


def classes_leaf(
    width: float, price: Floats, first: Floats, reference: int, classes: tuple[Floats, Floats]
) -> dict[str, Any]:
    """Return the leaf of prices on cells of so many seconds, and of charges by batch length.

    `first` has the weight of each request's first token, and `classes` the begin of each class in
    seconds and its charges (shape (classes, 5)). Both are lowered by a margin and rounded down.
    """
    unit = price_unit(float(price.max()))
    return {
        "relaxation": "classes",
        "width": ticks_of(width),
        "denominator": unit,
        "price": _whole(price * unit),
        "first": _whole(np.clip(first, 0, 1) * ONE),
        "found": 0,  # the format has this place for tokens of a prefix cache
        "reference": reference,
        "classes": _class_rows(*classes),
    }


def _class_rows(*classes: Floats) -> list[list[int | None]]:
    """Return the classes of a leaf: begin, end, an unused place, and charges, all rounded down."""
    begin, charges = (values * (1 - _CHARGES_MARGIN) for values in classes)
    edges = [math.floor(x * CLASS_UNIT) for x in begin.tolist()]
    ends = [*edges[1:], None]  # a class ends where the next one begins
    rows: list[list[int | None]] = []
    for low, high, paid in zip(edges, ends, charges.tolist(), strict=True):
        rows.append([low, high, 0, *(math.floor(x * CLASS_UNIT) for x in paid)])

    return rows


def class_work_leaf(*classes: Floats) -> dict[str, Any]:
    """Return the leaf of charges by class, given as the last of `classes_leaf`."""
    return {"relaxation": "class-work", "classes": _class_rows(*classes)}


def _bits_of_paths(highest: float) -> int:
    """Return how many bits after the point the prices of a path get, whose highest is given.

    They need so many less than one token's, and the checker takes 26 at most.
    """
    return min(price_unit(highest * 2 ** (_PRICE_BITS - _PATH_BITS)).bit_length() - 1, 26)


def class_paths_leaf(
    curve: tuple[float, Floats],
    levels: Floats,
    centre: Floats,
    reference: int,
    classes: tuple[Floats, Floats],
) -> dict[str, Any]:
    """Return the leaf of a price of machine time along paths through classes of batches.

    `curve` has the width of a cell in seconds and the prices. `levels` and `centre` are as in
    `shares_leaf`, and `reference` and `classes` as in `classes_leaf`.
    """
    width, price = curve
    bits = _bits_of_paths(float(price.max(initial=0.0)))
    first, later = (centre * TICKS_PER_SECOND).T
    return {
        "relaxation": "class-paths",
        "width": ticks_of(width),
        "bits": bits,
        "price": _whole(price * 2.0**bits),
        "levels": _whole(levels * 1000),  # the checker takes thousandths
        "first": _whole(first),
        "later": _whole(later),
        "reference": reference,
        "classes": _class_rows(*classes),
    }


def shares_leaf(
    width: float,
    price: Floats,
    levels: Floats,
    shared: tuple[Floats, Integers, Floats],
    centre: Floats,
    cell: Integers,
    rises: bool = False,
) -> dict[str, Any]:
    """Return the leaf of prices and shares on cells of so many seconds.

    `shared` is a `Shared` of `shares_kernel`. Its prices and `price` are held as multiples of a
    power of 2, and shares as weights, rounded. `centre` (shape (n, 2)) has multipliers for the
    prefill and for the steps of each request, in seconds, and `levels` says which multiples the
    checker tries. `cell` is that of each arrival. `rises`: whether those of steps rise from step to
    step.
    """
    p3, begin, share = shared
    bits = _bits_of_paths(max(float(price.max()), float(p3.max())))

    # Request i has shares in cells_of[i] cells from that of its arrival on. Only their proportions
    # in a cell count, so weights are relative to the largest share there.
    cells_of = np.diff(begin)
    cell_of_share = np.repeat(cell - begin[:-1], cells_of) + np.arange(len(share))
    largest = np.zeros(int(cell_of_share.max(initial=0)) + 1)
    np.maximum.at(largest, cell_of_share, share)
    weight = share / np.where(largest > 0, largest, 1.0)[cell_of_share] * _HIGHEST_WEIGHT
    first, later = (centre * TICKS_PER_SECOND).T

    return {
        "relaxation": "shares",
        "width": ticks_of(width),
        "bits": bits,
        "p2": _whole(price * 2.0**bits),
        "p3": _whole(p3 * 2.0**bits),
        "levels": _whole(levels * 1000),  # the checker takes thousandths
        "first": _whole(first),
        "later": _whole(later),
        "cells": cells_of.tolist(),
        "weight": _whole(weight),
        **({"rises": 1} if rises else {}),
    }


def slo_prices_leaf(
    prices: Any, limits: Mapping[str, Floats], rates: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Any]:
    """Return the leaf of prices within SLOs, for arrivals at any rate between two.

    `limits`: every SLO as a column, infinite for none. A second rate that is infinite stands for
    all larger ones than the first. Cells of the same price become one.
    """
    edges, price = prices.edges, prices.price
    begins = np.append(True, price[1:] != price[:-1])  # by cell, whether another price begins there
    limit_texts: dict[str, Any] = {}
    for name, column in limits.items():
        texts = [None if x == math.inf else repr(x) for x in column.tolist()]
        # One text stands for all requests, and SLOs that nobody has are left out.
        if any(texts):
            limit_texts[name] = texts[0] if len(set(texts)) == 1 else texts

    return {
        "relaxation": "slo-prices",
        "limits": limit_texts,
        "rates": [None if rate == math.inf else repr(float(rate)) for rate in rates],
        "edges": [*edges[:-1][begins].tolist(), int(edges[-1])],
        "price": price[begins].tolist(),
        "rate": prices.rate.tolist(),
        "extra": prices.extra.tolist(),
        "stretches": [list(row) for row in prices.stretches if row[2] > 0],
    }


def _whole(values: Floats) -> list[int]:
    """Return the nearest integers."""
    return list(np.rint(values).astype(np.int64).tolist())


def ticks_of(width: float) -> int:
    """Return the width of a cell in ticks, at least one."""
    return max(1, round(width * TICKS_PER_SECOND))


def price_unit(highest: float) -> int:
    """Return the power of 2 that gives the highest price `_PRICE_BITS` bits."""
    return int(1 << min(max(_PRICE_BITS - math.frexp(highest)[1], 0), 60))


def parts(objective: str, trees: Sequence[tuple[int, int, Any]]) -> dict[str, Any]:
    """Return a node that takes a tree for each range of requests: (first, last, tree).

    The bounds of the ranges add up, or for the makespan the largest counts. Ranges are disjoint and
    ascend, as places in order of arrival, ties by index. A tree is a leaf, or the node of the parts
    of its range.
    """
    node = "max" if objective == "makespan" else "sum"
    flat = []
    for first, last, tree in trees:
        # The ranges of a tree that is such a node itself count from the first of its own range.
        for part in tree.get(node) or [{"first": 0, "last": last - first, "tree": tree}]:
            i, j = int(first + part["first"]), int(first + part["last"])
            flat.append({"first": i, "last": j, "tree": part["tree"]})

    return {node: flat}
