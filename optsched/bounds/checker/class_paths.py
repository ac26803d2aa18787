r"""Independent check of the leaf ``class-paths``: each request's path through classes of batches.

docs/formulations.md, "Prices by batch length" and "Paths by batch length", has the notation.
Classes (lo_b, hi_b] cover the lengths of all batches. The tokens of a batch of class b have charges
c^b that sum to at most its length T, whatever else is in it. With a price pi >= 0 of machine time,
constant on cells of ``width`` ticks from the first arrival of the range on and 0 afterwards,

    TEL >= sum_i (C_i - a_i + what i's tokens pay) - int pi,

where a token in a batch of class b pays the mean of pi over the batch, times c^b.

*A path.* Request i prefills in [a, t] and takes its m further tokens in [t, C], one after another,
each from a batch of its own. For any nu >= 0 let

    g(t) = max over b of [nu - pi(t) c^b]_+ / lo_b,    c^b the least charge of a token in class b.

A token in a batch of class b and length T >= lo_b pays at least nu - int_batch g, since
int_batch g >= (T / lo_b) mean [nu - pi c^b]_+ >= nu - c^b mean pi. So the tokens pay at least
max(0, m nu - int_t^C g). The same holds for the prefill with m = 1. For every end the nu that gives
most is taken. From here on it is the bound of `optsched.bounds.checker.shares` with another g: its
module's text says how ends, starts and cells are treated.

*Charges.* A token after the first has at least s cached ones. c^b is the smaller of what it pays
from a decode step, and of what a refill of s + 1 tokens pays (`min_charge`). Both rise with what is
cached.

*Chunks.* Of a refill, a chunk with the part omega of its tokens pays omega c^b or more. Of the
prefill, token p of the prompt (from 0) pays g_b + d_b p. Let r be the class ``reference``, W the
sum of g_r + d_r p over the prompt, and omega the part of W that a chunk has. The chunk pays at
least omega c^b with

    c^b = W min over p of (g_b + d_b p) / (g_r + d_r p),

and the quotient is monotone in p, so the first and the last token decide. Where W is 0, omega is
the part of the tokens, and c^b = s g_b. A chunk pays at least omega nu - int_batch g, because
(T / lo_b) mean [nu - pi c^b]_+ is at least omega times the same. The parts sum to 1. Of a request
that restarts the last run counts, and what evictions lose is left out.

*Least times.* No batch is shorter than lo_0. So all batches of a request take m lo_0 after its
first token, and that one comes no earlier than `prefill_end`.

*Integers* are those of `optsched.bounds.checker.shares`, with h = lo_0. Charges are rounded down,
and h / lo_b <= 1 up, so g is rounded up.
"""

from typing import Any

import numpy as np

from optsched.bounds.checker.classes import (
    UNIT,
    ExactCharges,
    min_charge,
    prefill_end,
    proved_charges,
)
from optsched.bounds.checker.parts import Budget, expect, expect_fields, integer, integers
from optsched.bounds.checker.requests import Part
from optsched.bounds.checker.shares import mantissa, path_row

# `kernel.UNIT_BITS`, the max cells, and the bits of a price.
_UNIT = 26
_CELLS = 2_000_000
_PRICE = 40
# Requests that are checked at once.
_BATCH = 2000
_FIELDS = ["relaxation", "width", "bits", "price", "levels", "first", "later", "reference"]


def check_class_paths(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the total latency that a leaf proves, in ticks, rounded down (module's text)."""
    expect(objective == "tel", f"class-paths: found the objective {objective!r}; expected 'tel'")
    expect_fields(leaf, "class-paths", [*_FIELDS, "classes"])
    return paths_value(part, leaf, proved_charges(part, leaf, budget), budget)


def paths_value(
    part: Part, leaf: dict[str, Any], classes: list[ExactCharges], budget: Budget
) -> int:
    """Return what a leaf proves if its classes are right.

    ``first`` and ``later`` of a leaf are multipliers nu, in ticks, of each request's prefill and of
    its later tokens. ``levels`` are the thousandths of them that are tried, and ``price`` has
    ``bits`` bits after the point.
    """
    from optsched.bounds.checker.kernel import path_costs

    n, last = len(part.requests), len(classes) - 1

    def column_of(name: str, highest: int, count: int | None = None) -> list[int]:
        return integers(leaf[name], f"class-paths: {name}", count=count, highest=highest)

    width, bits, reference = (
        integer(leaf[name], f"class-paths: {name}") for name in ("width", "bits", "reference")
    )
    is_valid = width >= 1 and 0 <= bits <= _UNIT and 0 <= reference <= last
    expect(is_valid, "class-paths: found width, bits or reference out of range; expected it inside")
    price = column_of("price", (1 << _PRICE) - 1)
    expect(0 < len(price) <= _CELLS, f"class-paths: found {len(price)} cells; expected some")
    levels = column_of("levels", 10**6)
    expect(0 < len(levels) <= 64, f"class-paths: found {len(levels)} levels; expected 1 to 64")
    multipliers = column_of("first", 1 << 80, n), column_of("later", 1 << 80, n)
    budget.spend(len(price) + n * (100 + 20 * len(classes)))
    shortest = classes[0].lo * part.ticks // UNIT
    # Lengths are divided by that of the shortest batch: h of the module's text.
    expect(shortest >= 1, "class-paths: found a shortest batch below a tick; expected a longer one")

    prices, none = np.array(price, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # There is no p3, and so no shares; roots of p2 are not used.
    market = prices, np.zeros_like(prices), none, none, bits
    total, highest = 0, max(price)
    # Requests go to the compiled loop in batches, so that a budget is looked at between them.
    for at in range(0, n, _BATCH):
        rows, tables = [], []
        for i in range(at, min(n, at + _BATCH)):
            request, first = part.requests[i], prefill_end(part, i, shortest)
            m, s = request.steps, request.prompt
            times = part.arrival[i], first, first + m * shortest
            # No growth of own work is added, and no shares follow: zeros.
            rows.append((*path_row(times, m, width, 0), 0, 0))
            # Of the prefill, then of the m later tokens.
            charges = prefill_charges(classes, reference, s), [min_charge(b, s) for b in classes]
            tables.append(
                [
                    _phase(part, classes, charged, (nus[i], batches), (width, highest))
                    for charged, nus, batches in zip(charges, multipliers, (1, m), strict=True)
                ]
            )

        numbers = (np.array(x, dtype=np.int64) for x in (rows, tables, levels))
        # 50 compiled steps count as one.
        costs, steps = path_costs(*numbers, market, 50 * budget.left)
        budget.spend(steps // 50 + 1)
        total += sum(costs.tolist())

    # The integral of the price comes off the sum of the costs, rounded up: -spent is shifted down.
    # A tick per request comes off, as arrivals are rounded down.
    spent = sum(price) * width
    return (total * width >> _UNIT) - n + (-spent >> bits)


def prefill_charges(classes: list[ExactCharges], reference: int, prompt: int) -> list[int]:
    """Return what a prefill pays in each class: c^b of the module's text, rounded down."""
    top = classes[reference]
    whole = top.prefill * prompt + top.position * (prompt * (prompt - 1) // 2)
    if whole == 0:  # W of the module's text (Chunks)
        return [prompt * b.prefill for b in classes]

    def at(b: ExactCharges, p: int) -> int:
        return b.prefill + b.position * p

    # Tokens that pay nothing in the reference class are no part of any chunk: their omega is 0.
    places = [p for p in (0, prompt - 1) if at(top, p) > 0]
    return [min(whole * at(b, p) // at(top, p) for p in places) for b in classes]


def _phase(
    part: Part,
    classes: list[ExactCharges],
    charges: list[int],
    batches: tuple[int, int],
    market: tuple[int, int],
) -> list[int]:
    """Return the integers of a phase that `path_costs` takes, those of its classes last.

    The first ten are those of `optsched.bounds.checker.shares`, with 0 for what classes do not use.
    ``charges`` has c^b by class. ``batches`` are the multiplier in ticks and the number of batches,
    and ``market`` the width of a cell in ticks and the highest price.
    """
    (nu, count), (width, highest) = batches, market
    unit = classes[0].lo
    # The product of a price and of a charge per unit stays below 2**62: charges lose bits downward.
    max_bits = 62 - highest.bit_length()
    fine = min(30, max(0, max_bits - (max(charges) // unit + 2).bit_length()))
    # What is paid is nu / h, which has 44 bits, times this, less 30 bits (`kernel.times`), in units
    # of 2**-26 cells. So this has 12 bits, and 62 more, of which `mantissa` keeps 30.
    time, wide = mantissa((unit * count * part.ticks << 12 + 62) // (UNIT * width), 62, 30)
    multiplier = min((nu * UNIT << 20) // (part.ticks * unit), (1 << 37) - 1)
    lines: list[int] = []
    # Of each class c / h, rounded down, and h / lo, rounded up.
    for b, charge in zip(classes, charges, strict=True):
        lines += [min((charge << fine) // unit, (1 << max_bits) - 2), -((-unit << 30) // b.lo)]

    return [multiplier, 0, fine, 0, 0, 0, 0, 0, time, wide, *lines]
