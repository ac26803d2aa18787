"""Independent check of the leaf ``classes``: prices of machine time, and charges by batch length.

docs/formulations.md, "Prices by batch length", has the notation and the proof. Classes (lo_b, hi_b]
cover the lengths of all batches. While a batch of class b lasts T, its tokens pay charges c^b that
sum to at most T. So with a price pi >= 0 of machine time, constant on cells of ``width`` ticks from
the first arrival of the range on and 0 afterwards, token k of a request costs at least the min over
one moment tau >= a_i + pre_k and one class b of

    F = theta_k (tau - a_i) + pi(tau) c^b_k + Theta_k lo_b.

*Weights.* The first token has the weight theta_1 that the leaf gives for each request, later ones
share the rest equally, and Theta_k = sum_{l < k} theta_l + theta_k / 2.

*Weighted latencies*, the sum of W_i (C_i - a_i), are bounded the same way with W_i times the
weights theta and Theta of request i: what its tokens pay of the machine's time stays.

*The first token* is that of a prefill in chunks, each in a batch of its own. Token p of the prompt
(from 0) pays pi (g_b + d_b p), and has a part omega_p of theta_1 in proportion to this charge in
the class ``reference``. A chunk from p to q has the weight theta_1 (Omega_q - Omega_p) and the
Theta theta_1 (Omega_q + Omega_p) / 2, which is at least half of its weight. So token p costs at
least the min of theta_1 omega_p (tau - a_i) + pi (g_b + d_b p) + theta_1 omega_p lo_b / 2.

*A later token* over m cached ones pays a_b + b_b m + k_b (m + 1) where it comes from a decode step,
and g_b (m + 1) or more where it comes from a refill of m + 1 tokens. Of a refill in chunks each
chunk has the part of theta_k, Theta_k and of the charge g_b (m + 1) that it has of the tokens. The
smaller charge is used. Token k comes after the prefill and k - 2 further batches of the request,
each no shorter than the shortest batch. Of a request that restarts the last run counts, and what
evictions lose is left out.

*Chords.* F is affine in p and concave in k at each moment and class, so its min is concave, too,
for one earliest moment. Consecutive tokens cost at least their number times the mean of the two at
the ends, with the earliest moment of the first of them.

*Integers.* The cost of an end of a chord is found on a scale of its own, 2**bits per tick: what a
cell of waiting costs, and what each class pays per unit of the price and for its length, are
rounded down to integers. The scale is such that each class's cost at the highest price is below
2**60. Waiting is cut to 2**60 per cell, so that sums stay below 2**62.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.batches import batches_of
from optsched.bounds.checker.charges import refuse
from optsched.bounds.checker.parts import Budget, TooLarge, expect, expect_fields, integer, integers
from optsched.bounds.checker.requests import Part
from optsched.costs.cost import BatchCost
from optsched.costs.table import table_from_dict

CHORDS = 24
"""Chords over the tokens after the first."""
ONE = 1 << 30
"""The weight of all tokens of a request."""
UNIT = 10**18
"""Charges and lengths are multiples of 1 / UNIT seconds."""
MAX_CLASSES = 64
# Bits of what a class pays at the highest price.
_TOP = 60
# Costs are added up in units of 2**-20 ticks.
_COST = 20
# The most cells of a price. Behind them it is 0, so that a later moment counts as one in that cell.
_CELLS = 4_000_000
# Max ends of chords that are found at once.
_BATCH = 100_000
_FIELDS = {"relaxation", "width", "denominator", "price", "found", "first", "reference", "classes"}


class ExactCharges(NamedTuple):
    """Charges of a class of lengths (lo, hi]; hi is None for the last class.

    A decode over m cached tokens pays ``decode + context m + memory (m + 1)``, and token p of a
    prompt ``prefill + position p``.
    """

    lo: int
    hi: int | None
    decode: int
    context: int
    memory: int
    prefill: int
    position: int


class Prices(NamedTuple):
    """The price of machine time on cells, in integers over ``unit``."""

    width: int  # of a cell, in ticks
    unit: int
    price: Any  # by cell
    highest: int  # of ``price``


def exact_charges(leaf: dict[str, Any]) -> list[ExactCharges]:
    """Return the classes of a leaf after checking that they cover all lengths from the first on.

    A row is the fields of `ExactCharges`, with one more integer in third place that nothing reads.
    """
    rows = leaf["classes"]
    right = isinstance(rows, list) and 1 <= len(rows) <= MAX_CLASSES
    expect(right, f"classes: classes: found no list of 1 to {MAX_CLASSES}; expected one")
    found: list[ExactCharges] = []

    for row in rows:
        right = isinstance(row, list) and len(row) == len(ExactCharges._fields) + 1
        expect(right, "classes: found a class of other fields; expected 8")
        last = len(found) == len(rows) - 1
        open_end = row[1] is None
        expect(open_end == last, "classes: found an end that is open; expected the last one so")
        # Only the end of the last class, in second place, may be none.
        stated = row if row[1] is not None else [row[0], *row[2:]]
        values = [integer(x, "classes: classes") for x in stated]
        expect(min(values) >= 0, "classes: found an integer below 0; expected integers >= 0")
        one = ExactCharges(*row[:2], *row[3:])  # row[2] is no part of the proof
        # Classes begin where the one before ends; `proved_charges` proves the begin of the first.
        begin = found[-1].hi if found else one.lo
        expect(one.lo == begin, f"classes: found a class from {one.lo}; expected {begin}")
        right = one.hi is None or one.hi > one.lo
        expect(right, "classes: found an end that is not above the begin; expected it above")
        found.append(one)

    return found


def _read_prices(leaf: dict[str, Any]) -> Prices:
    """Return the price of a leaf; ``denominator`` is its unit."""
    width, unit = (integer(leaf[name], f"classes: {name}") for name in ("width", "denominator"))
    expect(width >= 1 and unit >= 1, "classes: found width or denominator < 1; expected >= 1")
    price = integers(leaf["price"], "classes: price", highest=(1 << 40) - 1)
    right = 1 <= len(price) <= _CELLS
    expect(right, f"classes: found {len(price)} cells; expected 1 to {_CELLS}")
    return Prices(width, unit, np.array(price, dtype=np.int64), max(price))


class _ChordEnds:
    """The ends of chords whose least costs are still to be found.

    ``rows``, ``paid`` and ``fixed`` are what `kernel.min_class_costs` reads, and ``weights`` by row
    how often its cost counts, and the bits by which it is above units of 2**-20 ticks.
    """

    def __init__(self, ticks: int, prices: Prices, classes: Sequence[ExactCharges]) -> None:
        self.ticks, self.prices = ticks, prices
        self.total = 0
        self.lengths = [one.lo for one in classes]
        self.rows: list[tuple[int, int, int]] = []
        self.paid: list[list[int]] = []
        self.fixed: list[list[int]] = []
        self.weights: list[tuple[int, int]] = []

    def add(
        self, count: int, earliest: int, theta: tuple[int, int], later: int, charges: list[int]
    ) -> None:
        """Add half of ``count`` tokens, which come no earlier than ``earliest``, in ticks.

        Their weights theta and Theta are ``theta[0]`` and ``later`` over ``theta[1]``. ``charges``
        are what one of them pays in each class, over `UNIT`, as lengths of batches are.

        The row that is added says for one of them, in units of 2**-bits ticks: in ``rows`` the cell
        of ``earliest``, what waiting until its end costs, and what every further cell costs; by
        class in ``paid`` what it pays per unit of the price, and in ``fixed`` Theta lo.
        """
        (width, unit, _, highest), ticks, below = self.prices, self.ticks, theta[1]
        max_charge, longest = max(charges) * highest, max(self.lengths)
        # More than a token can pay, in ticks; 2 is for what the divisions round down.
        top = max_charge * ticks // (UNIT * unit) + later * longest * ticks // (UNIT * below) + 2
        # What is paid at the highest price stays below 2**60 on this scale.
        bits = _TOP - top.bit_length()
        if bits < 0:
            raise TooLarge("classes: found costs of 2**60 ticks; too large to check")

        cell, cap = earliest // width, 1 << _TOP
        lead = ((theta[0] * ((cell + 1) * width - earliest)) << bits) // below
        step = ((theta[0] * width) << bits) // below
        scale, size = UNIT * unit, UNIT * below
        share, later_ticks = ticks << bits, (later * ticks) << bits
        self.rows.append((min(cell, _CELLS), min(cap, lead), min(cap, step)))
        self.paid.append([c * share // scale for c in charges] if highest else [0] * len(charges))
        self.fixed.append([later_ticks * length // size for length in self.lengths])
        # `_COST` bits are those of the total, and one more is for the half of ``count``.
        self.weights.append((count, bits + 1 - _COST))
        if len(self.rows) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Find the least costs of the ends at hand, and add them to the total."""
        from optsched.bounds.checker.kernel import min_class_costs

        if self.rows:
            rows, paid, fixed = (
                np.array(x, dtype=np.int64) for x in (self.rows, self.paid, self.fixed)
            )
            costs = min_class_costs(rows, paid, fixed, self.prices.price).tolist()
            for (count, bits), cost in zip(self.weights, costs, strict=True):
                self.total += count * cost >> bits if bits >= 0 else count * cost << -bits

        self.rows, self.paid, self.fixed, self.weights = [], [], [], []


def min_charge(one: ExactCharges, cached: int) -> int:
    """Return the least charge of a token after the first, by a decode step or a refill.

    It has ``cached`` tokens before it, and a refill computes one more.
    """
    decode = one.decode + one.context * cached + one.memory * (cached + 1)
    return min(decode, one.prefill * (cached + 1))


def check_classes(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the total latency, weighted or not, that a leaf proves, in ticks, rounded down."""
    expect_fields(leaf, "classes", sorted(_FIELDS))
    right = objective in ("tel", "weighted_latency")
    expect(right, f"classes: found the objective {objective!r}; expected 'tel'")
    if objective == "tel":
        part = part._replace(weight=())

    # Nothing has ever written another number here: an allowance for a prefix cache.
    found = integer(leaf["found"], "classes: found")
    expect(found == 0, f"classes: found: found {found}; expected 0")
    classes = proved_charges(part, leaf, budget)

    return value_of(part, leaf, classes, budget)


def proved_charges(part: Part, leaf: dict[str, Any], budget: Budget) -> list[ExactCharges]:
    """Return the classes of a leaf after holding them against all batches of the machine."""
    classes = exact_charges(leaf)
    instance, model = part.machine
    # Vectors (phi, a, b, k, g, d) of `charges`. The first says that no batch is shorter than the
    # first class: like the last class it has no end. The others are charges of a class, held
    # against all batches up to its end.
    vectors = [[classes[0].lo, 0, 0, 0, 0, 0], *([0, *one[2:]] for one in classes)]
    until = [one.hi / UNIT if one.hi else np.inf for one in (classes[-1], *classes)]
    refuse(batches_of(instance, cost_of(model)), np.array(vectors) / UNIT, np.array(until), budget)
    return classes


def cost_of(model: Any) -> BatchCost:
    """Return the cost model that a certificate states."""
    # Of a tabulated model `batches_of` reads the table alone. It has to have coefficients, too.
    if "table" in model:
        table = table_from_dict(model["table"])
        return BatchCost("certificate", model["layers"], {"base": "1"}, table=table)

    return BatchCost("certificate", model["layers"], model["coefficients"])


def value_of(
    part: Part, leaf: dict[str, Any], classes: Sequence[ExactCharges], budget: Budget
) -> int:
    """Return what a leaf proves if its classes are right.

    That is of weighted latencies if the part has weights. ``first`` of a leaf has theta_1 of each
    request, as a multiple of 1 / `ONE`.
    """
    budget.spend(10 * len(leaf["price"]))
    prices, n = _read_prices(leaf), len(part.requests)
    budget.spend(2 * CHORDS * n * len(classes) * (1 + len(prices.price) // 1000))
    first = integers(leaf["first"], "classes: first", count=n, highest=ONE)
    reference = integer(leaf["reference"], "classes: reference")
    right = 0 <= reference < len(classes)
    expect(right, f"classes: reference: found {reference}; expected 0 to {len(classes) - 1}")
    ends, top = _ChordEnds(part.ticks, prices, classes), classes[reference]
    shortest = classes[0].lo * part.ticks // UNIT
    weights = part.weight or [1] * n
    waits = 0  # sum of W_i theta_k pre_k

    for i, (arrival, request, theta) in enumerate(
        zip(part.arrival, part.requests, first, strict=True)
    ):
        m, s, times = request.steps, request.prompt, weights[i]
        # An only token has all the weight.
        theta = theta if m > 0 else ONE
        earliest = prefill_end(part, i, shortest)
        whole = top.prefill * s + top.position * (s * (s - 1) // 2)

        # The cost is affine in p, so a chord from the first token to the last is a lower bound.
        for p in {0, s - 1}:
            # omega_p as a fraction. Then theta_1 omega_p as one, and over its denominator Theta,
            # which is half as much.
            share = (top.prefill + top.position * p, whole) if whole > 0 else (1, s)
            weight = 2 * times * theta * share[0], 2 * ONE * share[1]
            charges = [one.prefill + one.position * p for one in classes]
            # A chord over one token has one end, which counts twice a half.
            later = times * theta * share[0]
            ends.add(s if s > 1 else 2, arrival, weight, later, charges)

        for block in range(CHORDS):
            low, high = m * block // CHORDS, m * (block + 1) // CHORDS
            if high == low:
                continue

            before = earliest + low * shortest
            # Ends of chords wait from their earliest moment; until then is added here.
            waits += times * (ONE - theta) * (high - low) * before // m
            for j in {low, high - 1}:
                # Theta of token j + 2: theta_1, j later ones and half of its own. Both weights are
                # over 2 m `ONE`.
                later = times * (2 * m * theta + (ONE - theta) * (2 * j + 1))
                weight = 2 * times * (ONE - theta), 2 * m * ONE
                count = high - low if high - low > 1 else 2
                charges = [min_charge(one, s + j) for one in classes]
                ends.add(count, arrival + before, weight, later, charges)

    ends.flush()
    total = (ends.total + (waits << _COST) // ONE) >> _COST
    # The integral of the price is rounded up, as it is subtracted. A tick per request comes off, as
    # arrivals are rounded down.
    spent = int(prices.price.sum()) * prices.width

    return total - sum(weights) + (-spent // prices.unit)


def prefill_end(part: Part, i: int, shortest: int) -> int:
    """Return the least ticks until a request's first token.

    That is what its cost model says, or so many chunks in batches of the shortest length.
    """
    chunks = 1 if part.rates.whole else -(-part.requests[i].prompt // part.rates.cap)
    return max(part.first[i], chunks * shortest)
