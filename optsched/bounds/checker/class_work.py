"""What requests cost by class of batch length, and the leaf ``class-work`` of a table.

docs/formulations.md, "Work by batch length", has the proof. Classes (lo_b, hi_b] cover the lengths
of all batches, and the charges of all tokens of a batch of class b sum to at most its time, as in
`optsched.bounds.checker.classes`. So on one machine a request has received at least the least
charges of its tokens by its completion, like work of a single preemptive machine.

*Later tokens* of a request whose m batches after the first token must last at most L in all: with
any rho >= 0 they pay at least the sum over tokens of min over b of rho lo_b + c^b_k, less rho L,
since a token's batch lasts lo_b or more. Of a refill in chunks each chunk has the part of rho lo_b
and of g_b (k + 1) that it has of the tokens. The rho taken here is best for the middle token.

*Chords.* A token's charge is the smaller of two affine functions of the number of tokens before it,
and so the min over classes is concave in it: consecutive tokens cost at least their number times
the mean of the two at the ends. Token p of a prompt pays g_b + d_b p, and one chord will do.

*Alone.* Let a batch with at least c prefill tokens last T_c or more (`least_prefills`). Chunks of
at most c_max tokens sum up to s, so all batches of a prefill last at least s times the least of
T_c / c over c <= c_max. There are s / c_max of them or more, and no batch is shorter than the first
class. A later token's batch of class b lasts at least lo_b, and at least its
charge, which grows from token to token: so the first of some stands for all.

*Rounding.* Seconds are floats here, and sums of non-negative ones. What they say is lowered, or for
rho L raised, by `_MARGIN`, which is a thousand times what rounding may lose.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.batches import batches_of, least_prefills
from optsched.bounds.checker.classes import UNIT, ExactCharges, cost_of, proved_charges
from optsched.bounds.checker.parts import Budget, expect, expect_fields
from optsched.bounds.checker.requests import Part
from optsched.bounds.checker.work import work_ticks

Floats = NDArray[np.float64]
# Chords over the tokens after the first.
_CHORDS = 4
_MARGIN = 1e-9


class Floors(NamedTuple):
    """What tokens pay at least on a machine, in seconds, and the least times of prefills.

    ``lo`` has the begins of classes and ``charges`` their rows, shape (classes, 5), as in
    `ExactCharges`. ``prefills`` has at c the least time of a batch of c prefill tokens or more, and
    ``whole`` says that prompts are not split.
    """

    lo: Floats
    charges: Floats
    prefills: Floats
    whole: bool


def floors_of(machine: tuple[Any, Any], classes: Sequence[ExactCharges]) -> Floors:
    """Return the floors of a machine, an instance and a certificate's cost model, by its classes.

    The classes are taken to be proved (`proved_charges`).
    """
    instance, model = machine
    lo = np.array([one.lo for one in classes], np.float64) / UNIT
    charges = np.array([one[2:] for one in classes], np.float64) / UNIT
    prefills = least_prefills(batches_of(instance, cost_of(model)))
    return Floors(lo, charges, prefills, instance.chunked_prefill is False)


def prefill_work(floors: Floors, prompt: Floats) -> Floats:
    """Return the least charges of all tokens of each prompt, in seconds."""
    ends = [
        (floors.charges[:, 3:4] + floors.charges[:, 4:5] * place).min(axis=0)
        for place in (0 * prompt, prompt - 1)
    ]
    return np.asarray(prompt * (ends[0] + ends[1]) / 2 * (1 - _MARGIN))


def later_work(floors: Floors, prompt: Floats, steps: Floats, within: Floats | float) -> Floats:
    """Return the least charges of the tokens after the first, in seconds.

    Their batches last at most ``within`` seconds in all, which may be infinite.
    """
    best = _later_at(floors, prompt, steps, np.zeros(len(prompt)))
    if np.min(within, initial=inf) == inf:
        return best

    rate = _best_rate(floors, prompt, steps, np.asarray(within))
    owed = rate * np.where(rate > 0, within, 0.0)
    return np.maximum(best, _later_at(floors, prompt, steps, rate) - owed * (1 + _MARGIN))


def _later_at(floors: Floors, prompt: Floats, steps: Floats, rate: Floats) -> Floats:
    """Return what later tokens pay if a second of their batches costs each request its rate."""
    total = np.zeros(len(prompt))
    for first, last in _blocks(steps):
        ends = [
            (_charges_at(floors, prompt + j) + rate * floors.lo[:, None]).min(axis=0)
            for j in (first, np.maximum(last - 1, first))
        ]
        total += (last - first) * (ends[0] + ends[1]) / 2

    return total * (1 - _MARGIN)


def _blocks(steps: Floats) -> list[tuple[Floats, Floats]]:
    """Return the first token and the one behind the last of each chord, counted from 0."""
    return list(pairwise(np.floor(steps * k / _CHORDS) for k in range(_CHORDS + 1)))


def _charges_at(floors: Floors, cached: Floats) -> Floats:
    """Return what a token over so many cached ones pays at least, shape (classes, requests)."""
    decode, context, memory, prefill, _ = floors.charges.T[:, :, None]
    return np.asarray(
        np.minimum(decode + context * cached + memory * (cached + 1), prefill * (cached + 1))
    )


def _best_rate(floors: Floors, prompt: Floats, steps: Floats, within: Floats) -> Floats:
    """Return the rho of each request that is best for its middle token.

    It is the slope at the mean length that is allowed of the lower convex hull of what the token
    pays over the lengths of the classes.
    """
    # Where there is time for the longest batches, more makes no difference.
    mean = np.minimum(within / np.maximum(steps, 1), floors.lo[-1])
    paid = _charges_at(floors, prompt + np.floor(steps / 2))
    rate, least = np.zeros(len(prompt)), np.full(len(prompt), inf)
    for a, low in enumerate(floors.lo):
        # Shorter batches than the mean need nothing of longer ones.
        short = (low <= mean) & (paid[a] < least)
        rate, least = np.where(short, 0.0, rate), np.where(short, paid[a], least)
        for b in range(a + 1, len(floors.lo)):
            width = floors.lo[b] - low
            slope = (paid[a] - paid[b]) / width
            value = paid[a] - slope * (mean - low)
            here = (low <= mean) & (mean < floors.lo[b]) & (slope > 0) & (value < least)
            rate, least = np.where(here, slope, rate), np.where(here, value, least)

    return rate


def alone(floors: Floors, prompt: Floats, steps: Floats) -> tuple[Floats, Floats]:
    """Return the least seconds of the batches until the first token, and of those behind it."""
    most = len(floors.prefills) - 1
    # By c, the least time per token of chunks of at most c tokens.
    each = np.minimum.accumulate(floors.prefills[1:] / np.arange(1, most + 1))
    largest = np.minimum(prompt, most).astype(np.int64)
    first = floors.prefills[largest] if floors.whole else prompt * each[largest - 1]
    chunks = np.ones(len(prompt)) if floors.whole else np.ceil(prompt / most)
    first = np.maximum(first, chunks * floors.lo[0])
    rest = np.zeros(len(prompt))
    for begin, end in _blocks(steps):
        longer = np.maximum(_charges_at(floors, prompt + begin), floors.lo[:, None])
        rest += (end - begin) * longer.min(axis=0)

    return np.asarray(first) * (1 - _MARGIN), rest * (1 - _MARGIN)


def with_floors(part: Part, floors: Floors) -> Part:
    """Return a part whose requests' times are those of the floors, in ticks, for `work_ticks`."""
    prompt = np.array([r.prompt for r in part.requests], np.float64)
    steps = np.array([r.steps for r in part.requests], np.float64)
    own, later = prefill_work(floors, prompt), later_work(floors, prompt, steps, inf)
    first, rest = alone(floors, prompt, steps)
    columns = (np.floor(x * part.ticks).tolist() for x in (own, own + later, first, first + rest))
    requests = [
        replace(r, own=int(a), share=0, total=int(b), first=int(c), chain=int(d))
        for r, a, b, c, d in zip(part.requests, *columns, strict=True)
    ]
    return part._replace(requests=requests, rates=replace(part.rates, scale=part.ticks))


def check_class_work(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return what a leaf proves of a sum over requests, or of the makespan, in ticks."""
    expect_fields(leaf, "class-work", ("relaxation", "classes"))
    classes = proved_charges(part, leaf, budget)
    budget.spend(50 * len(part.requests) * len(classes))
    expect(part.machines == 1, "class-work: found several machines; expected one")
    return work_ticks(with_floors(part, floors_of(part.machine, classes)), objective)
