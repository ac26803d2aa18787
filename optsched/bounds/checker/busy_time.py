"""Independent check of the leaf ``busy-time``: prices of machine time, and what each token pays.

docs/formulations.md, "Prices of machine time", has the notation and the proof: token k of a
request, with own work w, share sigma and weight theta_k, costs at least the min over one moment
tau, which is no earlier than a_i + pre_k, of

    F_k(tau) = theta_k (tau - a_i) + p1 (w + sigma) + p2 w + Theta_k f + H(p2),
    H(p2) = min over x >= w_0 of Theta_k x + p2 w f / x,    0 <= w_0 <= w.

Its batch lasts f + x, and x >= w. The min is at x = w_0 up to the price p2 = Theta_k w_0^2 / (w f),
and 2 sqrt(p2 w f Theta_k) beyond. H is concave in p2, and at least Theta_k w_0. Prices p1, p2 >= 0
are constant on cells of ``width`` ticks from the first arrival of the range on, and 0 afterwards.
Least machine times are those of `optsched.bounds.checker.requests`. N equal machines cost N times
the integral; where ``later`` has prices of those that decode, the weight of first tokens is that of
the leaf, and the rest is in `optsched.bounds.pools`.

*Chunks.* A prefill in chunks splits theta in proportion to own work: chunk q has r_q of both, a
batch f + x_q with x_q >= r_q w_0, and Theta_q >= B + theta (R_q + r_q / 2), where B is the weight
of the tokens before and R_q the part of the chunks before. So Theta_q >= r_q Theta_k, which covers
all but H. With u = r_q Theta_q w_0 and z = p2 w f / w_0 a chunk's own min H_q is u + z if z <= u,
and 2 sqrt(u z) beyond. At every price H_q >= r_q H - r_q (Theta_k - Theta_q) w_0, since with s^2 =
z / u

- s < 1: r_q H is at most r_q (Theta_k w_0 + z), and r_q z <= z;
- 1 <= s <= (1 + sqrt(1 - r_q)) / r_q: the same, and u + r_q z <= 2 sqrt(u z) there;
- beyond, z >= Theta_q w_0 / r_q >= Theta_k w_0, so r_q H = 2 r_q sqrt(Theta_k w_0 z). Where
  Theta_q <= Theta_k, H_q is no less. Else H_q - r_q H grows with z, and at that z is at least
  2 w_0 (Theta_q - sqrt(r_q Theta_q Theta_k)) >= r_q (Theta_q - Theta_k) w_0, which holds as
  (sqrt(Theta_q) - sqrt(Theta_k))^2 >= 0 at r_q = 1, and by more at less.

These losses sum to at most 0, as sum r_q Theta_q >= Theta_k. So F of the whole is at most the sum
of F of the chunks, each at its own moments, if sigma is at most kappa w with the smallest ratio
kappa of a chunk's share to its own work. A chunk of c of s tokens has the share
(base / M + prefill_base / cap) c or more, and own work of at most
(token + max(square, cross) s + prefill_kv s + request) c. The same holds for a refill in chunks.
What evictions lose is left out.

*Pieces.* A prefill's own work is done one part after another. Let t run evenly over a chunk's batch
while its own work is counted evenly. What a chunk pays by the means over its batch is the mean over
t, as H is concave in p2. After own work y of W in all, t >= a_i + y (1 + f / W): batches before
take their own work and f each, and this one's part so far is as large a part of f + x. So the least
cost of a prefill is at least the mean over 2**_PIECES equal pieces of the least F from the moment
on at which each can begin.

*Steps.* The moment of step k is no earlier than a_i, the prefill's time and that of the batches of
the steps before, if the request were alone.

*Chords.* Let w and sigma be affine in k and theta_k the same for all tokens after the first. Let
w_0 and the earliest moment be those of the first of them. At each moment and each x the cost is
affine in k, so F_k is concave in k, and so is its min. So consecutive tokens cost at least their
number times the mean of the two at the ends. The smaller one of a decode step and a refill is at
least the affine function that begins at the smaller value and rises by the smaller slope.

*Integers.* The cost of an end of a chord is found on a scale of its own, 2**bits per tick: what a
cell of waiting costs, and what is paid per unit of each price and of the root of p2, are rounded
down to integers, with roots by `math.isqrt`. The scale is such that what is paid at the highest
prices is below 2**60, and waiting is cut to 2**60 per cell, so that sums stay below 2**63.
"""

from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import Budget, TooLarge, expect, expect_fields, integer, integers
from optsched.bounds.checker.requests import Part, Rates, Request, later_of

CHORDS = 8
"""Chords over the tokens after the first."""
# A prefill has 2**_PIECES pieces.
_PIECES = 4
# Bits of what is paid at the highest prices.
_TOP = 60
# The weights theta of a request's tokens are multiples of 1 / (steps 2**30).
_WEIGHT = 30
# Costs are added up in units of 2**-20 ticks.
_COST = 20
_CELLS = 4_000_000
# A price that none reaches.
_NEVER = 1 << 60
# Max ends of chords that are found at once.
_BATCH = 100_000


class Line(NamedTuple):
    """The least own work of token j + 2 is ``work + j work_slope``, and so on; 1 / scale s."""

    work: int
    work_slope: int
    paid: int
    paid_slope: int


class Prices(NamedTuple):
    """The prices of a leaf: integers over ``unit``, and their roots times 2**(-shift / 2)."""

    width: int
    unit: int
    p1: Any
    p2: Any
    root: Any
    highest: tuple[int, int, int]
    shift: int


def line_of(rates: Rates, request: Request) -> Line:
    """Return lower bounds on what the tokens after the first take, affine in their number."""
    decode, base = rates.decode // rates.capacity, rates.cost["base"] // rates.capacity
    step, slope, again, refilled = later_of(rates, request.prompt)
    held, growth = request.held + 1 + rates.offset, 1 if request.held >= 0 else 0
    return Line(
        min(step, again),
        min(slope, refilled),
        min(step + decode * held, again + base * held),
        min(slope + decode * growth, refilled + base * growth),
    )


def alone_of(rates: Rates, prompt: int) -> int:
    """Return the least time of the second token's batch, which grows by ``work_slope``."""
    step, _, again, _ = later_of(rates, prompt)
    return min(step + rates.decode, again + rates.refill)


def chunk_share(rates: Rates, request: Request) -> int:
    """Return the share of a prefill that is in proportion to own work in every chunk."""
    cost, s = rates.cost, request.prompt
    share = (cost["base"] // rates.capacity + cost["prefill_base"] // rates.cap) * request.paid
    if rates.whole:
        return share

    steepest = max(cost["prefill_square"], cost["prefill_cross"]) + cost["prefill_kv"]
    token = cost["token"] + cost["prefill_token"]
    largest = (token + steepest * s + cost["prefill_request"]) * request.paid
    return request.own * share // largest if largest > 0 else 0


def _read(leaf: Any, others: tuple[str, ...]) -> Prices:
    expect_fields(leaf, "busy-time", ("width", "denominator", "p1", "p2", *others))
    width, unit = (integer(leaf[name], f"busy-time: {name}") for name in ("width", "denominator"))
    expect(width >= 1 and unit >= 1, "busy-time: found width or denominator < 1; expected >= 1")
    p1, p2 = (integers(leaf[name], f"busy-time: {name}") for name in ("p1", "p2"))
    expect(len(p1) == len(p2) > 0, "busy-time: found lists of other lengths; expected p1 like p2")
    expect(len(p1) <= _CELLS, f"busy-time: found {len(p1)} cells; expected at most {_CELLS}")
    expect(min(min(p1), min(p2)) >= 0, "busy-time: found a price below 0; expected prices >= 0")
    expect(max(max(p1), max(p2)) < 1 << 40, "busy-time: found a price of 2**40; expected less")
    shift = max(0, 62 - max(p2).bit_length()) // 2
    root = [isqrt(p << 2 * shift) for p in p2]
    one, two, third = (np.array(column, dtype=np.int64) for column in (p1, p2, root))

    return Prices(width, unit, one, two, third, (max(p1), max(p2), max(root)), shift)


class _End(NamedTuple):
    """An end of a chord: weights theta and Theta, as fractions, and what the token costs.

    Its batch has own work of at least ``low``.
    """

    theta: tuple[int, int]
    later: tuple[int, int]
    paid: int
    work: int
    fixed: int
    low: int


class _Ends:
    """The ends of chords whose least costs are still to be found."""

    def __init__(self, part: Part, prices: Prices) -> None:
        self.prices, self.total = prices, 0
        self.ticks, self.scale = part.ticks, part.rates.scale
        self.rows: list[tuple[int, ...]] = []
        self.weights: list[tuple[int, int]] = []

    def add(self, count: int, earliest: int, end: _End, parts: int = 0) -> None:
        """Add half of ``count`` tokens over 2**parts, which no moment before ``earliest`` has."""
        theta, later, paid, work, fixed, low = end
        (width, unit, _, _, _, highest, shift), ticks = self.prices, self.ticks
        scale = self.scale * unit
        cell = earliest // width
        square = 4 * work * fixed * later[0] * ticks * ticks
        below = self.scale * scale * later[1]
        top = (highest[0] * paid + highest[1] * work) * ticks // scale
        top += isqrt(square * highest[2] ** 2 // (below << 2 * shift)) + 3
        latest = self.scale * later[1]
        top += 2 * later[0] * low * ticks // latest + 1
        bits = _TOP - top.bit_length()
        if bits < 0:
            raise TooLarge("busy-time: found costs of 2**60 ticks; too large to check")

        ceiling = 1 << _TOP
        lead = ((theta[0] * ((cell + 1) * width - earliest)) << bits) // theta[1]
        every = ((theta[0] * width) << bits) // theta[1]
        l1 = min(ceiling, ((paid * ticks) << bits) // scale) if highest[0] else 0
        l2 = min(ceiling, ((work * ticks) << bits) // scale) if highest[1] else 0
        root = isqrt((square << 2 * bits) // (below << 2 * shift)) if highest[2] else 0
        turn, short = _NEVER, 0
        if low == 0:
            turn = -1
        else:
            short = min(ceiling, (((work + fixed * work // low) * ticks) << bits) // scale)
            if work * fixed > 0:
                turn = min(_NEVER, unit * later[0] * low**2 // (later[1] * work * fixed))

        least = ((later[0] * low * ticks) << bits) // latest
        highest_paid = highest[0] * l1 + highest[1] * l2 + highest[2] * root
        if highest_paid > ceiling:
            raise TooLarge("busy-time: found costs that overflow; too large to check")

        cell = min(cell, _CELLS)
        waits = min(ceiling, lead), min(ceiling, every)
        self.rows.append((cell, *waits, l1, l2, root, least, short, turn))
        self.weights.append((count, bits + 1 + parts - _COST))
        if len(self.rows) >= _BATCH:
            self.find()

    def find(self) -> None:
        """Find the least costs of the ends at hand, and add them to the total."""
        from optsched.bounds.checker.kernel import least_costs

        _, _, p1, p2, root, _, _ = self.prices
        if self.rows:
            found = least_costs(np.array(self.rows, dtype=np.int64), p1, p2, root).tolist()
            for (count, bits), cost in zip(self.weights, found, strict=True):
                self.total += count * cost >> bits if bits >= 0 else count * cost << -bits

        self.rows, self.weights = [], []


def check_busy_time(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the sum over requests that a leaf proves, in ticks, rounded down (module's text)."""
    firsts, decodes = objective == "mean_ttft", part.decodes
    budget.spend(10 * (len(leaf.get("p1", ())) + len(leaf.get("p2", ()))))
    prices = later = _read(leaf, ("relaxation", "first", "later") if decodes else ("relaxation",))
    rates, one, after = part.rates, 1 << _WEIGHT, part.rates
    moved, share = [0] * len(part.requests), None

    if decodes is not None:
        later, after = _read(leaf["later"], ()), decodes.rates
        share = integer(leaf["first"], "busy-time: first")
        expect(0 <= share <= one, f"busy-time: first: found {share}; expected 0 to {one}")
        moved = decodes.before_first if firsts else decodes.moved

    cells = len(prices.p1) + len(later.p1)
    budget.spend((2 * CHORDS + (1 << _PIECES)) * len(part.requests) * (20 + cells // 1000))
    ends = _Ends(part, prices)
    ends_later = _Ends(part, later) if decodes else ends
    decode, refill = min(after.decode, after.refill), rates.refill
    waits = fixed = 0  # sum of theta_k pre_k, and of Theta_k f

    for arrival, request, move in zip(part.arrival, part.requests, moved, strict=True):
        m, own, line = 0 if firsts else request.steps, request.own, line_of(after, request)
        paid = own + chunk_share(rates, request)
        whole = paid + m * line.paid + line.paid_slope * (m * (m - 1) // 2)
        theta = (paid << _WEIGHT) // whole if m > 0 and whole > 0 else one
        theta = share if share is not None and m > 0 else theta
        end = _End((theta, one), (theta, 2 * one), paid, own, refill, own)
        for q in range(1 << _PIECES) if theta > 0 else ():
            ahead = part.floor((own + refill) * q >> _PIECES)
            ends.add(2, arrival + ahead, end, _PIECES)
            waits += theta * ahead >> _PIECES

        fixed += theta * refill
        waits += theta * move
        if m == 0:
            continue

        alone = alone_of(after, request.prompt)
        if theta == one:  # the others come behind it, alone
            waits += one * part.floor(m * alone + line.work_slope * (m * (m - 1) // 2))
            continue

        fixed += (one + theta) * m * decode

        # F is concave in k: so many tokens cost at least as often the mean of those at the ends.
        for b in range(CHORDS):
            low, high = m * b // CHORDS, m * (b + 1) // CHORDS
            chain = low * alone + line.work_slope * (low * (low - 1) // 2)
            ahead = part.floor(request.first + chain) + move
            waits += (one - theta) * (high - low) * ahead // m
            for k in {low, high - 1} if high > low else ():
                weight = 2 * m * theta + (one - theta) * (2 * k + 1), 2 * m * one
                costs = line.paid + k * line.paid_slope, line.work + k * line.work_slope, decode
                end = _End(
                    (one - theta, m * one), weight, *costs, line.work + low * line.work_slope
                )
                ends_later.add(high - low if high - low > 1 else 2, arrival + ahead, end)

    ends.find()
    fixed = (fixed * part.ticks << _COST) // (2 * one * rates.scale)
    total = ends.total + fixed + (waits << _COST) // one
    spent = _spent(prices, part.machines)
    if decodes is not None:
        ends_later.find()
        total += ends_later.total
        spent += _spent(later, decodes.machines)

    return (total >> _COST) - len(part.requests) - spent


def _spent(prices: Prices, machines: int) -> int:
    """Return what prices on so many machines cost at most, in ticks."""
    return -(
        -machines * (int(prices.p1.sum()) + int(prices.p2.sum())) * prices.width // prices.unit
    )
