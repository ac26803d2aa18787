"""What the checker knows of requests in seconds: least machine times, in exact integers.

A batch lasts F + X. Its fixed cost F is base, plus decode_base if a request decodes, plus
prefill_base if one prefills. Its own work X is the sum of what each of its requests adds.
docs/formulations.md, "Unavoidable work", derives own work and the shares of fixed costs. With at
most ``cap`` tokens a chunk there are K >= ceil(s / cap) chunks, and the r-th from the end starts
with at least s - r cap tokens cached.

*Some of the requests.* Take any set of requests and any schedule of all requests. Its batches are
disjoint in time. Each lasts at least the own work of its requests of the set plus the fixed cost
of the phases of these, and these hold at most M tokens and prefill at most cap. So all that is
said of a schedule here and in the leaves' proofs, which use nothing else, holds for the set alone.

All numbers are integers in units of 1 / ``scale`` seconds. They are exact, except that divisions
round down.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import inf, isqrt, lcm
from typing import Any, NamedTuple

from optsched.bounds.checker.fields import COST_TERMS, PREFIX_FIELDS, further_fields
from optsched.bounds.checker.parts import expect, expect_fields, expect_known, integer
from optsched.bounds.checker.prefixes import FINE, Charge

_ONE = Fraction(1)
_DECIMAL = re.compile(r"\d{1,40}(?:\.\d{0,60})?(?:[eE][+-]?\d{1,2})?", re.ASCII)
# The largest coefficient.
_MOST = 10**6
# Further bits of the unit, so that divisions lose nothing that matters.
_FRACTION_BITS = 30
_MINORANTS = 16


@dataclass(frozen=True)
class Rates:
    """One instance's coefficients, in units of 1 / ``scale`` s per batch, token or request.

    Each can be divided by 2, by ``capacity`` (M) and by ``cap`` without a rest. ``refilled`` is own
    work for each token but the last of what is refilled; where KV is shared it may be cached.
    """

    scale: int
    cost: dict[str, int]
    capacity: int
    cap: int
    offset: int
    whole: bool
    refilled: int

    @property
    def decode(self) -> int:
        """The fixed cost of a batch that decodes."""
        return self.cost["base"] + self.cost["decode_base"]

    @property
    def refill(self) -> int:
        """The fixed cost of a batch that prefills."""
        return self.cost["base"] + self.cost["prefill_base"]


@dataclass(frozen=True)
class Request:
    """The least times of one request, in units of 1 / scale seconds.

    ``own`` and ``share`` are the own work of the prefill and its share of fixed costs; ``first``
    is the time of its batches. ``steps`` tokens follow. ``total`` is the machine time of all
    tokens, own work and shares. ``chain`` is the time of all batches. In every chunk ``paid``
    tokens of the prompt have shares of fixed costs. The request alone holds ``held`` tokens of KV
    as its first one is produced. Both are less than the prompt where KV is shared; then ``held``
    may be -1: none, and no more with every further token.
    """

    prompt: int
    paid: int
    held: int
    steps: int
    own: int
    share: int
    first: int
    total: int
    chain: int


class Decodes(NamedTuple):
    """What tokens after the first cost on machines of their own (`optsched.bounds.checker.pools`).

    ``moved`` has the ticks between a request's prefill and its decodes, and ``before_first`` the
    same where they come before its first token, else 0.
    """

    rates: Rates
    requests: list[Request]
    moved: list[int]
    before_first: list[int]
    machines: int


class Part(NamedTuple):
    """The requests of a leaf in order of arrival, in ticks from the first one of the range.

    ``first`` has the least time until each request's first token, in ticks, where there are several
    rates: then ``requests`` are those of the first ones. ``machine`` has the instance and the cost
    model, for leaves that look at batches. There are so many equal ``machines``, or they prefill
    only and ``decodes`` has the others. ``weight`` is that of each request, if there are weights.
    """

    arrival: list[int]
    requests: list[Request]
    rates: Rates
    ticks: int
    first: list[int]
    machine: tuple[Any, Any]
    machines: int = 1
    decodes: Decodes | None = None
    weight: Sequence[int] = ()

    def floor(self, time: int) -> int:
        """Return a time in units of 1 / scale seconds as ticks, rounded down."""
        return time * self.ticks // self.rates.scale


def decimal(text: Any, place: str) -> Fraction:
    """Return the exact value of a decimal text."""
    right = isinstance(text, str) and _DECIMAL.fullmatch(text) is not None
    expect(right, f"{place}: found {text!r:.60}; expected a decimal text >= 0")
    value = Fraction(text)
    expect(value <= _MOST, f"{place}: found {text}; expected at most {_MOST}")
    return value


def rates_of(instance: Any, model: Any, others: frozenset[str] = PREFIX_FIELDS) -> Rates:
    """Return the rates under the cost model of a certificate: ``layers`` and ``coefficients``.

    These are the decimal texts of some of `COST_TERMS`. Those that are left out are 0. `others`:
    fields of the instance that the proof allows for.
    """
    unit = getattr(instance, "time_unit", None)
    expect(unit == "second", "instance: found one in rounds; expected one in seconds")
    expect_known(instance, others)
    expect_fields(model, "cost_model", ("layers", "coefficients"))
    layers = integer(model["layers"], "cost_model: layers")
    texts = model["coefficients"]
    expect(1 <= layers <= 10_000, f"cost_model: layers: found {layers}; expected 1 to 10000")
    expect(isinstance(texts, dict), "cost_model: coefficients: found no JSON object; expected one")

    # Terms that the proofs do not allow for must be 0.
    values = {name: decimal(text, f"cost_model: {name:.40}") for name, text in texts.items()}
    unknown = ", ".join(sorted(x for x, value in values.items() if value and x not in COST_TERMS))
    expected = f"for which nothing is proved; expected only {', '.join(COST_TERMS)}"
    expect(not unknown, f"cost_model: found {unknown:.200}, {expected}")
    exact = {name: values.get(name, Fraction(0)) for name in COST_TERMS}
    right = exact["base"] + exact["token"] > 0
    expect(right, "cost_model: found no base and no token; expected batches that take time")
    shared = bool(further_fields(instance) & PREFIX_FIELDS)
    return exact_rates(instance, layers, exact, shared)


def minorants_of(model: Any) -> list[Any]:
    """Return the linear models that a cost model of a certificate is at least."""
    expect(isinstance(model, dict), "cost_model: found no JSON object; expected one")
    if "table" not in model:
        return [model]

    expect_fields(model, "cost_model", ("layers", "table"))
    table = model["table"]
    minorants = table.get("minorants") if isinstance(table, dict) else None
    right = isinstance(minorants, list) and 1 <= len(minorants) <= _MINORANTS
    expect(right, f"cost_model: table: expected 1 to {_MINORANTS} minorants")
    return [{"layers": model["layers"], "coefficients": linear} for linear in minorants or ()]


def exact_rates(
    instance: Any, layers: int, exact: Mapping[str, Fraction], shared: bool = False
) -> Rates:
    """Return the rates of an instance; `exact`: all `COST_TERMS`, in milliseconds per layer.

    `shared`: whether requests may find what others have prefilled.
    """
    capacity = int(instance.kv_capacity)
    token_limits = (instance.limits.max_batch_tokens, instance.limits.max_prefill_tokens)
    cap = min([capacity, *(limit for limit in token_limits if limit is not None)])

    # Coefficients are milliseconds with a common denominator, and all divisions that follow are by
    # 2, by the capacity and by the cap. So these are factors of the scale.
    common = lcm(*(value.denominator for value in exact.values()))
    fine = 2 * lcm(capacity, cap) << _FRACTION_BITS
    cost = {name: int(layers * value * common) * fine for name, value in exact.items()}
    offset = 1 if instance.kv_accounting == "generated" else 0
    refilled = cost["token"] + cost["prefill_token"]
    # Where KV is shared, all tokens but the last may be cached, and are then only read.
    if shared:
        refilled = min(refilled, cost["prefill_kv"] + cost["prefill_cross"])

    whole_only = instance.chunked_prefill is False and not shared
    return Rates(1000 * common * fine, cost, capacity, cap, offset, whole_only, refilled)


class Later(NamedTuple):
    """Own work of token j + 2, decoded or refilled.

    It is the smaller of ``step + j rise`` and ``again + j refilled``.
    """

    step: int
    rise: int
    again: int
    refilled: int


def later_of(rates: Rates, prompt: int) -> Later:
    """Return the own work of the tokens after the first."""
    cost, refilled = rates.cost, rates.refilled
    step = cost["token"] + cost["decode_request"] + cost["decode_kv"] * prompt
    again = cost["token"] + cost["prefill_token"] + refilled * prompt + cost["prefill_request"]
    return Later(step, cost["decode_kv"], again, refilled)


class Steps(NamedTuple):
    """What the tokens after the first take, by j = 0, 1, ...: the smaller of two lines a + b j.

    The lines, as (a, b), are for a decode and for a refill. `work` is machine time, own work and
    shares, and `alone` the time of the batches.
    """

    work: tuple[tuple[int, int], tuple[int, int]]
    alone: tuple[tuple[int, int], tuple[int, int]]

    def upto(self, count: int) -> tuple[int, int]:
        """Return the work and the time alone of the first ``count`` of these tokens."""
        return least_sum(*self.work, count), least_sum(*self.alone, count)


def steps_of(rates: Rates, prompt: int, held: int) -> Steps:
    """Return what the tokens after the first take; ``held`` as in `Request`.

    Token j + 2 is decoded, with own work ``step + slope j``, or comes of a refill, with
    ``again + refilled j`` (`later_of`).
    """
    step, slope, again, refilled = later_of(rates, prompt)
    # The KV as the first of these tokens is produced, which grows with each, unless held is -1.
    # The newest token is counted, too, where the instance counts it (``offset``).
    growth = 1 if held >= 0 else 0
    kv = held + 1 + rates.offset
    # A batch's fixed cost is shared by the tokens of KV that it holds, at most the capacity. That
    # of a refill has prefill_base, too, but a share of it is left out: the bound only gets lower.
    decode, base = rates.decode // rates.capacity, rates.cost["base"] // rates.capacity
    decoded = step + decode * kv, slope + decode * growth
    recomputed = again + base * kv, refilled + base * growth
    # Batches alone take their whole fixed cost, so no shares.
    alone = (step + rates.decode, slope), (again + rates.refill, refilled)
    return Steps((decoded, recomputed), alone)


def request_of(
    rates: Rates, prompt: int, output: int, charge: Charge | None = None, ticks: int = 1
) -> Request:
    """Return the least times of a request (module's text), under what it is charged.

    Without a charge it pays for its whole prompt. With one, its first token comes no earlier than
    the time of its batches after the charge's release, which may lie ``lag`` before its arrival.
    """
    held, lag = prompt, 0
    if charge is None:
        own, share, first, paid = _prefill_of(rates, prompt)
    else:
        own, share, first, paid = _charged_prefill(rates, charge)
        held, lag = charge.private, charge.lag * rates.scale // ticks

    steps = output - 1
    first += lag
    later, alone = steps_of(rates, prompt, held).upto(steps)
    total, chain = own + share + later, first + alone

    return Request(prompt, paid, held, steps, own, share, first, total, chain)


def _charged_prefill(rates: Rates, charge: Charge) -> tuple[int, int, int, int]:
    """Return own work, shares and time alone of the prefill that is charged, and its tokens.

    The tokens are those that have shares of fixed costs.
    """
    cost = rates.cost
    # For chunks of c tokens after m cached ones, s^2 = sum of c^2 + 2 c m, at prefill_square per
    # c^2 and prefill_cross per c m. So each unit of s^2 costs at least the less of the first and
    # half of the second. What prefill_square is above this counts for the sum of c^2 >= c, which
    # is at least s.
    square = min(cost["prefill_square"], cost["prefill_cross"] // 2)
    token = cost["token"] + cost["prefill_token"] + cost["prefill_square"] - square

    def work(tokens: int, squares: int) -> int:
        return token * tokens + square * squares

    # Tokens that are charged are in units of 1 / FINE. Only distinct ones have shares, since the KV
    # of others may be counted for several requests of a batch.
    own = work(charge.tokens, charge.squares) // FINE + cost["prefill_request"]
    alone = work(charge.alone_tokens, charge.alone_squares) + cost["prefill_request"]
    batches = -(-charge.alone_tokens // rates.cap)
    share = cost["base"] // rates.capacity + cost["prefill_base"] // rates.cap
    share = share * charge.distinct // FINE
    # Where only some tokens have shares, a chunk may have none of them, so none are paid by chunk.
    paid = charge.tokens // FINE if charge.distinct == charge.tokens else 0

    return own, share, alone + batches * rates.refill, paid


def _prefill_of(rates: Rates, prompt: int) -> tuple[int, int, int, int]:
    """Return own work, shares and time alone of the prefill of a whole prompt, and its tokens."""
    cost, capacity = rates.cost, rates.capacity
    chunks = -(-prompt // rates.cap) if not rates.whole else 1
    # The sum over chunks of the tokens that are cached before it (module's text): s - r cap.
    cached = (chunks - 1) * prompt - rates.cap * (chunks * (chunks - 1) // 2)
    own = (cost["token"] + cost["prefill_token"]) * prompt
    own += _squares(rates, prompt, chunks)
    own += cost["prefill_kv"] * cached + cost["prefill_request"] * chunks
    share = cost["base"] // capacity * (cached + prompt + rates.offset * chunks)
    share += cost["prefill_base"] // rates.cap * prompt

    return own, share, own + chunks * rates.refill, prompt


def _squares(rates: Rates, prompt: int, chunks: int) -> int:
    """Return the least quadratic work of a prefill in K >= ``chunks`` chunks.

    That is the cost of squares and products, and of each chunk beyond ``chunks``. K chunks have a
    sum of squares of s^2 / K or more, and the rest of s^2 are products.
    """
    square, half = rates.cost["prefill_square"], rates.cost["prefill_cross"] // 2
    part = (square - half) * prompt**2
    if rates.whole or part <= 0:  # splitting only adds
        return square * prompt**2

    # part / K + per_chunk (K - chunks) is convex in K, and least beside sqrt(part / per_chunk).
    per_chunk = rates.cost["prefill_request"]
    root = isqrt(part // per_chunk) if per_chunk > 0 else prompt
    tries = {min(max(k, chunks), max(prompt, chunks)) for k in (root, root + 1)}
    return half * prompt**2 + min(part // k + per_chunk * (k - chunks) for k in tries)


def least_sum(one: tuple[int, int], other: tuple[int, int], count: int) -> int:
    """Return the sum over j < count of the smaller of two lines a + b j, given as (a, b)."""
    # The steeper line is the smaller one for j < crossing, and the other one from there on.
    steep, flat = (one, other) if one[1] >= other[1] else (other, one)
    rise, lead = steep[1] - flat[1], flat[0] - steep[0]
    if rise == 0:
        crossing = count if lead > 0 else 0
    else:
        crossing = min(max(-(-lead // rise), 0), count)

    def sum_to(line: tuple[int, int], end: int) -> int:
        return line[0] * end + line[1] * (end * (end - 1) // 2)

    return sum_to(steep, crossing) + sum_to(flat, count) - sum_to(flat, crossing)


def ticks_since(arrival: list[float], per_second: int, rate: Fraction = _ONE) -> list[int]:
    """Return arrivals since the first one, in ticks, rounded down.

    Times are divided by the rate. Floats are read exactly: they are fractions with powers of two.
    """
    fractions = [value.as_integer_ratio() for value in arrival]
    common = lcm(*{q for _, q in fractions})
    numerators = [p * (common // q) for p, q in fractions]
    first = min(numerators)
    over, under = per_second * rate.denominator, common * rate.numerator

    return [(value - first) * over // under for value in numerators]


def srpt_completions(release: Sequence[int], length: Sequence[int]) -> list[int]:
    """Return the completions under shortest remaining processing time, ascending, any unit."""
    needs: list[int] = []  # a heap: what the jobs that are released still need
    completions: list[int] = []
    now = 0

    for arrival, need in sorted(zip(release, length, strict=True)):
        # The shortest ones complete before the next job arrives.
        while needs and now + needs[0] <= arrival:
            now += heappop(needs)
            completions.append(now)

        # The head stays the smallest when it shrinks.
        if needs and now < arrival:
            needs[0] -= arrival - now

        now = max(now, arrival)
        heappush(needs, need)

    while needs:
        now += heappop(needs)
        completions.append(now)

    return completions


def shortest_first(
    release: Sequence[Any], length: Sequence[Any], key: Sequence[Any] | None = None
) -> Iterator[tuple[Any, Any, int]]:
    """Yield the pieces (begin, end, job) of the preemptive schedule that runs shortest jobs first.

    At each moment it runs the released, unfinished job of the smallest whole length (or ``key``),
    not of the smallest remaining one; among equals the one of the smallest number. With integers it
    is exact.
    """
    keys = length if key is None else key
    order = sorted(range(len(release)), key=release.__getitem__)
    remaining = list(length)
    waiting: list[tuple[Any, int]] = []  # a heap of the released, unfinished jobs
    now = release[order[0]]
    released, n = 0, len(order)

    while released < n or waiting:
        # The machine idles until the next release.
        if not waiting:
            now = max(now, release[order[released]])
        while released < n and release[order[released]] <= now:
            heappush(waiting, (keys[order[released]], order[released]))
            released += 1

        # The job runs until it ends or the next one is released, which may come first from then on.
        job = waiting[0][1]
        next_release = release[order[released]] if released < n else inf
        end = min(now + remaining[job], next_release)
        remaining[job] -= end - now
        # A job that ends before a release is done, also if rounding of floats leaves it a bit.
        if end < next_release or remaining[job] <= 0:
            heappop(waiting)

        yield now, end, job
        now = end
