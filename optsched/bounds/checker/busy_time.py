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

*Weights.* Of latencies with weights W_i the same is said of W_i (C_i - a_i). A token waits W_i as
much and pays the same, which is W_i times what it waits and pays at the prices over W_i. So the
requests of one weight cost W times what they cost at prices over W times the unit.

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

from collections.abc import Sequence
from itertools import chain
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.parts import (
    Budget,
    Ints,
    TooLarge,
    expect,
    expect_fields,
    integer,
    integers,
)
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
# The most cells of a price. Behind them it is 0, so that a later moment counts as one in that cell.
_CELLS = 4_000_000
# A price that none reaches.
_NEVER = 1 << 60
# Ends of chords that are put into an array at once.
_BATCH = 100_000


class Line(NamedTuple):
    """Of token j + 2, own work is at least ``work + j work_slope``, in units of 1 / scale s.

    With its shares it is at least ``paid + j paid_slope``.
    """

    work: int
    work_slope: int
    paid: int
    paid_slope: int


class Prices(NamedTuple):
    """The prices of a leaf by cells of ``width`` ticks: integers over ``unit``.

    ``root`` has the roots of those of ``p2``, times 2**``shift``, rounded down; ``highest`` is the
    max of ``p1``, ``p2`` and ``root``.
    """

    width: int
    unit: int
    p1: Any
    p2: Any
    root: Any
    highest: tuple[int, int, int]
    shift: int


def line_of(rates: Rates, request: Request) -> Line:
    """Return lower bounds on what the tokens after the first take, affine in their number.

    A token is decoded or refilled. The smaller start and the smaller slope of the two are a lower
    bound on both.
    """
    decode, base = rates.decode // rates.capacity, rates.cost["base"] // rates.capacity
    step, slope, refill, refill_slope = later_of(rates, request.prompt)
    # The KV that shares go by, as in `requests.steps_of`.
    held, growth = request.held + 1 + rates.offset, 1 if request.held >= 0 else 0
    return Line(
        min(step, refill),
        min(slope, refill_slope),
        min(step + decode * held, refill + base * held),
        min(slope + decode * growth, refill_slope + base * growth),
    )


def alone_of(rates: Rates, prompt: int) -> int:
    """Return the least time of the second token's batch, which grows by ``work_slope``."""
    step, _, refill, _ = later_of(rates, prompt)
    return min(step + rates.decode, refill + rates.refill)


def chunk_share(rates: Rates, request: Request) -> int:
    """Return the share of a prefill that is in proportion to own work in every chunk.

    In one chunk that is the whole share. Of several it is the own work times the ratio of a token's
    share to the most own work that it can have (module's text, Chunks: kappa w).
    """
    cost, s = rates.cost, request.prompt
    share = (cost["base"] // rates.capacity + cost["prefill_base"] // rates.cap) * request.paid
    if rates.whole:
        return share

    steepest = max(cost["prefill_square"], cost["prefill_cross"]) + cost["prefill_kv"]
    token = cost["token"] + cost["prefill_token"]
    largest = (token + steepest * s + cost["prefill_request"]) * request.paid
    return request.own * share // largest if largest > 0 else 0


def _read_prices(leaf: Any, others: tuple[str, ...]) -> Prices:
    """Return the prices of one stage of a leaf, which has the fields `others`, too."""
    expect_fields(leaf, "busy-time", ("width", "denominator", "p1", "p2", *others))
    width, unit = (integer(leaf[name], f"busy-time: {name}") for name in ("width", "denominator"))
    expect(width >= 1 and unit >= 1, "busy-time: found width or denominator < 1; expected >= 1")
    p1, p2 = (integers(leaf[name], f"busy-time: {name}") for name in ("p1", "p2"))
    expect(len(p1) == len(p2) > 0, "busy-time: found lists of other lengths; expected p1 like p2")
    expect(len(p1) <= _CELLS, f"busy-time: found {len(p1)} cells; expected at most {_CELLS}")
    expect(min(min(p1), min(p2)) >= 0, "busy-time: found a price below 0; expected prices >= 0")
    expect(max(max(p1), max(p2)) < 1 << 40, "busy-time: found a price of 2**40; expected less")
    # Roots keep as many bits as fit, with p2 shifted below 2**62: they are below 2**31.
    shift = max(0, 62 - max(p2).bit_length()) // 2
    root = [isqrt(p << 2 * shift) for p in p2]
    first, second, third = (np.array(column, dtype=np.int64) for column in (p1, p2, root))

    return Prices(width, unit, first, second, third, (max(p1), max(p2), max(root)), shift)


class _End(NamedTuple):
    """An end of a chord: weights theta and Theta (``later``), as fractions, and what it costs.

    In units of 1 / scale s, ``work`` is the token's own work w, ``paid`` w and its share, ``fixed``
    the fixed cost f of its batch, and ``low`` the least own work w_0 of the batch.
    """

    theta: tuple[int, int]
    later: tuple[int, int]
    paid: int
    work: int
    fixed: int
    low: int


class _ChordEnds:
    """The ends of chords, which cost so much at least at any prices up to the highest of some.

    A row of numbers of one end at one moment is what `kernel.min_costs` reads. Each has a scale of
    its own, so ``weights`` has by row how often its cost counts, and the bits to take off for that.
    """

    def __init__(self, part: Part, prices: Prices) -> None:
        self.prices, self.ticks, self.scale = prices, part.ticks, part.rates.scale
        self.waits: list[tuple[int, int]] = []  # of each row the first two columns
        self.pays: list[tuple[int, ...]] = []  # and the others, once for so many rows
        self.times: list[int] = []
        self.weights: list[tuple[int, int]] = []
        self.packed: list[Ints] = []

    def add(self, count: int, begins: Sequence[int], end: _End, parts: int = 0) -> None:
        """Add half of ``count`` tokens over 2**parts for each of the moments that they begin at.

        ``begins`` are in ticks from the first arrival. The square root below is of 4 p2 w f Theta,
        which is ``square / divisor`` times the square of the integer in `Prices.root`, and
        ``due / latest`` is Theta w_0, in ticks. An end adds to ``pays`` what is the same for all of
        its moments, in the order of `kernel.min_costs`, to ``times`` how many moments these are,
        and to ``waits`` a row for each.
        """
        theta, later, paid, work, fixed, low = end
        # ``highest`` are those of p1, p2 and the root of p2, times 2**shift.
        (width, unit, _, _, _, highest, shift), ticks = self.prices, self.ticks
        scale = self.scale * unit
        square = 4 * work * fixed * later[0] * ticks * ticks
        divisor = self.scale * scale * later[1] << 2 * shift
        latest, due = self.scale * later[1], later[0] * low * ticks
        # More than a token can pay, in ticks; 4 is for what the divisions round down. Theta w_0 is
        # there twice: it is due at every price, and p2 w f / w_0 is as much at the turn.
        top = (highest[0] * paid + highest[1] * work) * ticks // scale
        top += isqrt(square * highest[2] ** 2 // divisor) + 2 * due // latest + 4
        # The scale is such that what is paid at the highest prices is below 2**60 (docstring,
        # Integers).
        bits = _TOP - top.bit_length()
        if bits < 0:
            raise TooLarge("busy-time: found costs of 2**60 ticks; too large to check")

        # From here on all is in units of 2**-bits ticks: what a cell of waiting costs, and what is
        # paid per unit of p1, p2 and the root of p2. A price that is 0 throughout is no part of the
        # scale, so its rate could have any size.
        cap, tick = 1 << _TOP, ticks << bits
        waits = theta[0] << bits
        step = min(cap, waits * width // theta[1])
        rate1 = min(cap, paid * tick // scale) if highest[0] else 0
        rate2 = min(cap, work * tick // scale) if highest[1] else 0
        root = isqrt((square << 2 * bits) // divisor) if highest[2] else 0
        turn, low_rate = _NEVER, 0
        if low == 0:
            # With w_0 = 0 the root form holds at every price (docstring: H).
            turn = -1
        else:
            # At x = w_0, p2 w + p2 w f / w_0 is paid, besides Theta w_0.
            low_rate = min(cap, (work + fixed * work // low) * tick // scale)
            if work * fixed > 0:
                # Up to this price the min is at x = w_0 (docstring: H).
                turn = min(_NEVER, unit * later[0] * low**2 // (later[1] * work * fixed))

        if highest[0] * rate1 + highest[1] * rate2 + highest[2] * root > cap:
            raise TooLarge("busy-time: found costs that overflow; too large to check")

        self.pays.append((step, rate1, rate2, root, (due << bits) // latest, low_rate, turn))
        self.times.append(len(begins))
        # Costs come down to units of 2**-_COST ticks; one more bit is for the half of the count.
        self.weights += [(count, bits + 1 + parts - _COST)] * len(begins)
        for earliest in begins:
            # The first cell is left after a part of its width, so waiting until then costs less.
            cell, passed = divmod(earliest, width)
            lead = waits * (width - passed) // theta[1]
            self.waits.append((min(cell, _CELLS), min(cap, lead)))

        if len(self.waits) >= _BATCH:
            self.pack()

    def pack(self) -> None:
        """Put the rows at hand, of Python's integers, into an array."""
        waits, pays = (np.array(column, dtype=np.int64) for column in (self.waits, self.pays))
        # Seven numbers of an end go to each of its rows, behind the cell and the waiting there.
        pays = np.repeat(pays.reshape(-1, 7), self.times, axis=0)
        self.packed.append(np.hstack([waits.reshape(-1, 2), pays]))
        self.waits, self.pays, self.times = [], [], []

    def min_sum(self, prices: Prices) -> int:
        """Return the sum of the min costs at some prices."""
        from optsched.bounds.checker.kernel import min_costs

        self.pack()
        costs = (min_costs(rows, prices.p1, prices.p2, prices.root) for rows in self.packed)
        flat = chain.from_iterable(column.tolist() for column in costs)
        return sum(
            count * cost >> bits if bits >= 0 else count * cost << -bits
            for (count, bits), cost in zip(self.weights, flat, strict=True)
        )


class Costs:
    """What requests pay at the least, at any prices up to the highest of those it is made with.

    ``stages`` has the prices on machines that prefill and, where others decode, on those; then
    ``share`` is the weight of first tokens. With fewer ``chords``, and 2**pieces pieces of a
    prefill, a prover sees sooner which prices are good.
    """

    def __init__(
        self,
        part: Part,
        stages: Sequence[Prices],
        objective: str = "tel",
        share: int | None = None,
        chords: int = CHORDS,
        pieces: int = _PIECES,
    ) -> None:
        firsts, decodes, one = objective == "mean_ttft", part.decodes, 1 << _WEIGHT
        # Weights are over ``one``. Later tokens have the rates ``after``, and where KV moves they
        # come ``moved`` ticks later. With mean TTFT it is the first tokens that do.
        rates, after, moved = part.rates, part.rates, [0] * len(part.requests)
        self.machines, self.requests = [part.machines], len(part.requests)
        if decodes is not None:
            after, self.machines = decodes.rates, [part.machines, decodes.machines]
            moved = decodes.before_first if firsts else decodes.moved

        self.ends = [_ChordEnds(part, prices) for prices in stages]
        # The fixed costs f of a later token's batch, decoded or refilled, and of a prefill's.
        decode, refill = min(after.decode, after.refill), rates.refill
        waits = fixed = 0  # sum of theta_k pre_k, and of Theta_k f

        for arrival, request, move in zip(part.arrival, part.requests, moved, strict=True):
            # For mean TTFT only first tokens count, so there are no steps.
            m, own, line = 0 if firsts else request.steps, request.own, line_of(after, request)
            paid = own + chunk_share(rates, request)
            whole = paid + m * line.paid + line.paid_slope * (m * (m - 1) // 2)
            # theta_1 is the prefill's part of what all tokens pay, unless the leaf says otherwise;
            # any weight from 0 to 1 is valid.
            theta = (paid << _WEIGHT) // whole if m > 0 and whole > 0 else one
            theta = share if share is not None and m > 0 else theta
            # Theta_1 = theta_1 / 2. The others are paid, w, f, and w_0 = w.
            end = _End((theta, one), (theta, 2 * one), paid, own, refill, own)
            if theta > 0:
                # A piece of the prefill begins no earlier than the pieces before can be done
                # (docstring, Pieces).
                ahead = [part.floor((own + refill) * q >> pieces) for q in range(1 << pieces)]
                # Half of 2 tokens: the prefill is no chord, and each piece is a part of it. Over
                # ``ahead``, here and below, ``one`` is a moment in ticks, and no unit of weights.
                self.ends[0].add(2, [arrival + one for one in ahead], end, pieces)
                # Ends of chords wait from the moments that they begin at; until then is added here.
                waits += sum(theta * one >> pieces for one in ahead)

            # Theta_1 f twice over, as `fixed` is halved in the end.
            fixed += theta * refill
            waits += theta * move
            if m == 0:
                continue

            alone = alone_of(after, request.prompt)
            # Later tokens then have theta_k = 0 and Theta_k = 1. They may come where prices are 0
            # and pay nothing, but the time of their batches counts in full.
            if theta == one:  # the others come behind it, alone
                waits += one * part.floor(m * alone + line.work_slope * (m * (m - 1) // 2))
                continue

            # The Theta_k of m tokens, which share 1 - theta_1 equally, sum to m (1 + theta_1) / 2.
            fixed += (one + theta) * m * decode

            # F is concave in k: so many tokens cost at least the mean of those at the ends each.
            for b in range(chords):
                low, high = m * b // chords, m * (b + 1) // chords
                if low == high:
                    continue

                behind = low * alone + line.work_slope * (low * (low - 1) // 2)
                # No step begins before the prefill and all earlier steps, alone (docstring, Steps).
                since = part.floor(request.first + behind) + move
                waits += (one - theta) * (high - low) * since // m
                for k in {low, high - 1}:
                    # Theta of token k + 2, a fraction: theta_1, k later ones and half of its own.
                    weight = 2 * m * theta + (one - theta) * (2 * k + 1), 2 * m * one
                    costs = line.paid + k * line.paid_slope, line.work + k * line.work_slope, decode
                    least = line.work + low * line.work_slope
                    end = _End((one - theta, m * one), weight, *costs, least)
                    # A chord over one token has one end, which counts twice a half.
                    count = high - low if high - low > 1 else 2
                    self.ends[-1].add(count, [arrival + since], end)

        fixed = (fixed * part.ticks << _COST) // (2 * one * rates.scale)
        self.paid = fixed + (waits << _COST) // one

    def min_sum(self, stages: Sequence[Prices]) -> int:
        """Return what requests wait and pay at least at some prices, in ticks, rounded down.

        A tick per request comes off, as arrivals are rounded down.
        """
        paid = sum(ends.min_sum(prices) for ends, prices in zip(self.ends, stages, strict=True))
        return (paid + self.paid >> _COST) - self.requests

    def value(self, stages: Sequence[Prices]) -> int:
        """Return the sum over requests that prices prove, in ticks, rounded down."""
        return self.min_sum(stages) - sum(map(_integral_of, stages, self.machines))


class WeightedCosts:
    """The same as `Costs` of weighted latency on one kind of machine (module's text, Weights)."""

    def __init__(
        self, part: Part, stages: Sequence[Prices], chords: int = CHORDS, pieces: int = _PIECES
    ) -> None:
        self.machines = part.machines
        self.groups = [
            (weight, Costs(some, _divide(stages, weight), chords=chords, pieces=pieces))
            for weight, some in _split_by_weight(part)
        ]

    def value(self, stages: Sequence[Prices]) -> int:
        """Return the weighted sum over requests that prices prove, in ticks, rounded down."""
        paid = sum(weight * costs.min_sum(_divide(stages, weight)) for weight, costs in self.groups)
        return paid - _integral_of(stages[0], self.machines)


def _divide(stages: Sequence[Prices], weight: int) -> list[Prices]:
    """Return prices over a weight (module's text, Weights)."""
    return [prices._replace(unit=prices.unit * weight) for prices in stages]


def _split_by_weight(part: Part) -> list[tuple[int, Part]]:
    """Return each weight with the part of the requests that have it."""
    groups = []
    for weight in sorted(set(part.weight)):
        who = [i for i, other in enumerate(part.weight) if other == weight]
        arrival, requests = [part.arrival[i] for i in who], [part.requests[i] for i in who]
        groups.append((weight, part._replace(arrival=arrival, requests=requests)))

    return groups


def check_busy_time(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the sum over requests that a leaf proves, in ticks, rounded down (module's text).

    Where other machines decode, it has their prices in ``later``, and in ``first`` the weight of
    first tokens, in multiples of 2**-30.
    """
    decodes, share = part.decodes is not None, None
    budget.spend(10 * (len(leaf.get("p1", ())) + len(leaf.get("p2", ()))))
    stages = [_read_prices(leaf, ("relaxation", "first", "later") if decodes else ("relaxation",))]
    if decodes:
        stages.append(_read_prices(leaf["later"], ()))
        share, one = integer(leaf["first"], "busy-time: first"), 1 << _WEIGHT
        expect(0 <= share <= one, f"busy-time: first: found {share}; expected 0 to {one}")

    # Without machines that decode, both are the same prices.
    cells = len(stages[0].p1) + len(stages[-1].p1)
    budget.spend((2 * CHORDS + (1 << _PIECES)) * len(part.requests) * (20 + cells // 1000))
    if objective == "weighted_latency":
        budget.spend(len(set(part.weight)) * (1000 + cells))
        return WeightedCosts(part, stages).value(stages)

    return Costs(part, stages, objective, share).value(stages)


def _integral_of(prices: Prices, machines: int) -> int:
    """Return what prices on so many machines cost at most, in ticks."""
    return -(
        -machines * (int(prices.p1.sum()) + int(prices.p2.sum())) * prices.width // prices.unit
    )
