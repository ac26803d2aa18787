"""Lower bounds for the batch model from the work that no schedule can avoid.

The batch times are those of Kim et al. 2024, and the rules those of the judge. On one worker every
request costs the following, whatever the schedule.

*Own work* and *shares of fixed costs* are those of `optsched.bounds.checker.requests`, which has
the proof. Here they are computed in floating point, and for other bounds, too.

A batch of length T thus has room for at most T of own work and shares of its requests, and a
schedule is a single preemptive machine on which request i has received at least w_i by its
completion. Work lost to evictions only adds to it. N workers together are such a machine of N times
the speed: whatever they do at the same time, it does one after another, as fast.

Notes
-----
Times are counted from the first arrival in whole picoseconds. Lengths and arrivals are rounded
down, so sums are exact in integers of any size. The float64 arithmetic behind a request's length is
covered by a relative margin of 1e-9. The bounds hold for both eviction modes, with and without
chunking as the instance allows; certificates are for one worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import (
    ANY_INSTANCE,
    CHARGES,
    WHOLE_BLOCKS,
    WORKERS,
    Bound,
    BoundTask,
    Proof,
)
from optsched.bounds.checker.fields import COST_TERMS
from optsched.bounds.checker.prefixes import FINE, Charge
from optsched.bounds.checker.requests import srpt_completions
from optsched.bounds.leaves import work_leaf
from optsched.costs.batch import decode_ms
from optsched.costs.cost import BatchCost
from optsched.problem.budget import Budget
from optsched.problem.instance import Instance
from optsched.problem.memory import check_size
from optsched.problem.objective import TOTAL_LATENCY

Floats = NDArray[np.float64]
_TICKS = 10**12
"""Ticks per second of the integer clock."""
_SAFETY = 1e-9
_TOKEN_BYTES = 40
"""The bytes of an output token in all columns of `later_tokens`."""

PROVED_FOR = ANY_INSTANCE | WHOLE_BLOCKS | {f"cost.{name}" for name in COST_TERMS}
"""Features that the bounds in seconds are proved for."""
SUMS = ("tel", "latency_and_ttft")
"""Objectives of most of them."""


@dataclass(frozen=True, eq=False)
class Work:
    """A lower bound on the machine time of each request, in seconds, each of shape (n,).

    ``own_prefill`` is own work of the prefill alone, and ``first_shares`` the shares of
    ``prefill_base`` in it. ``prefill`` and ``total`` are machine time (own work and shares) until
    the first token and until the last. ``first`` and ``chain`` are the times to these if the
    request were alone, one batch after another with its fixed cost. ``decode_share`` is then the
    least share of own work in the time of a later token's batch, 0 without such tokens, and
    ``longest_step`` the longest of these times.
    """

    own_prefill: Floats
    prefill: Floats
    total: Floats
    first_shares: Floats
    first: Floats
    chain: Floats
    decode_share: Floats
    longest_step: Floats


def prefill_cap(instance: Instance) -> float:
    """Return the max prefill tokens of a batch. They are held after it, too."""
    limits, capacity = instance.limits, float(instance.kv_capacity)
    return min(limits.max_batch_tokens or np.inf, limits.max_prefill_tokens or np.inf, capacity)


class Prefill(NamedTuple):
    """Own work, shares of fixed costs and time alone of prefills, in ms per layer, shape (n,).

    ``first_shares`` are the shares of ``prefill_base``. ``paid`` and ``held`` tokens are those of
    `optsched.bounds.checker.requests`. It is released ``lag`` seconds
    before its arrival.
    """

    own: Floats
    share: Floats
    first_shares: Floats
    alone: Floats
    paid: Floats
    held: Floats
    lag: Floats


def prefill_of(instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None) -> Prefill:
    """Return what prefills take, of whole prompts or of what is charged."""
    if charged is not None:
        return _charged_prefill(instance, cost, charged)

    token_prefill, base = cost["token"] + cost["prefill_token"], cost["base"]
    square, cross = cost["prefill_square"], cost["prefill_cross"]
    prompt, capacity = instance.prompt_tokens.astype(np.float64), float(instance.kv_capacity)
    cap = prefill_cap(instance)

    chunks = np.ceil(prompt / cap)
    if instance.chunked_prefill is False:
        chunks = np.ones(instance.n)
        squared = square * prompt**2
    elif 2 * square <= cross:
        squared = square * prompt**2  # splitting only adds
    else:
        part = (square - cross / 2) * prompt**2
        request = cost["prefill_request"]
        best = np.sqrt(part / request) if request > 0 else prompt
        many = np.clip(best, chunks, np.maximum(prompt, chunks))
        squared = cross / 2 * prompt**2 + part / many + request * (many - chunks)

    before = np.zeros(instance.n)  # sum over chunks of the tokens cached before
    if chunks.max() > 1:
        whole = chunks - 1
        before = whole * prompt - cap * whole * (whole + 1) / 2

    own_prefill = (
        token_prefill * prompt
        + squared
        + cost["prefill_kv"] * before
        + cost["prefill_request"] * chunks
    )
    first_shares = cost["prefill_base"] * prompt / cap
    share = base * (before + prompt + instance.kv_offset * chunks) / capacity + first_shares
    first = own_prefill + chunks * (base + cost["prefill_base"])
    return Prefill(own_prefill, share, first_shares, first, prompt, prompt, np.zeros(instance.n))


def _charged_prefill(instance: Instance, cost: BatchCost, charged: Sequence[Charge]) -> Prefill:
    rows = np.array(charged, dtype=np.float64)
    _, lag, tokens, squares, distinct, alone, alone_squares, held = rows.T
    tokens, squares, distinct = tokens / FINE, squares / FINE, distinct / FINE
    cap = prefill_cap(instance)
    square = min(cost["prefill_square"], cost["prefill_cross"] / 2)
    token = cost["token"] + cost["prefill_token"] + cost["prefill_square"] - square

    own = token * tokens + square * squares + cost["prefill_request"]
    first = token * alone + square * alone_squares + cost["prefill_request"]
    first += np.ceil(alone / cap) * (cost["base"] + cost["prefill_base"])
    first_shares = cost["prefill_base"] * distinct / cap
    share = cost["base"] * distinct / instance.kv_capacity + first_shares
    paid = np.where(distinct < tokens, 0.0, tokens)

    return Prefill(own, share, first_shares, first, paid, held, lag / _TICKS)


def found_of(cost: BatchCost, charged: Sequence[Charge] | None) -> float:
    """Return how much less a refilled token is if it may be found cached, in ms per layer."""
    token, cached = (
        cost["token"] + cost["prefill_token"],
        cost["prefill_kv"] + cost["prefill_cross"],
    )
    return 0.0 if charged is None else max(0.0, token - cached)


def unavoidable_work(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None = None
) -> Work:
    """Return the work that no schedule can avoid (see the module's text for the proof)."""
    base, decode_base, prefill_base = cost["base"], cost["decode_base"], cost["prefill_base"]
    capacity, offset = float(instance.kv_capacity), instance.kv_offset
    own_prefill, share, first_shares, first, _, private, lag = prefill_of(instance, cost, charged)

    owner, after, decode, refill = later_tokens(instance, cost, charged)
    alone_kv = private[owner] + (after - instance.prompt_tokens[owner])
    held = (np.where(private[owner] < 0, 0.0, alone_kv) + offset) / capacity
    with_share = np.minimum(decode + (base + decode_base) * held, refill + base * held)
    alone = np.minimum(decode + base + decode_base, refill + base + prefill_base)
    seconds = cost.layers / 1000.0 * (1 - _SAFETY)

    def per_request(values: Floats) -> Floats:
        return np.bincount(owner, weights=values, minlength=instance.n).astype(np.float64)

    steps = instance.output_tokens - 1
    decoding, ends = steps > 0, np.cumsum(steps)
    begins = (ends - steps)[decoding]
    decode_share, longest_step = np.zeros(instance.n), np.zeros(instance.n)

    if len(begins) > 0:
        own = np.minimum(decode, refill) / np.maximum(alone, 1e-300)
        decode_share[decoding] = np.minimum.reduceat(own, begins)
        longest_step[decoding] = np.maximum.reduceat(alone, begins)

    return Work(
        own_prefill=own_prefill * seconds,
        prefill=(own_prefill + share) * seconds,
        total=(own_prefill + share + per_request(with_share)) * seconds,
        first_shares=first_shares * seconds,
        first=(first * seconds) + lag,
        chain=(first + per_request(alone)) * seconds + lag,
        decode_share=np.minimum(decode_share, 1.0) * (1 - _SAFETY),
        longest_step=longest_step * cost.layers / 1000.0 * (1 + _SAFETY),
    )


def later_tokens(
    instance: Instance, cost: BatchCost, charged: Sequence[Charge] | None = None
) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """Return what tokens 2 to o of every request take, flat, in ms per layer."""
    check_size(
        float(instance.output_tokens.sum()),
        _TOKEN_BYTES,
        "output tokens, each with its own work",
        "fewer requests or shorter outputs",
    )
    steps = instance.output_tokens - 1
    owner = np.repeat(np.arange(instance.n), steps)
    ends = np.cumsum(steps)
    k = np.arange(len(owner)) - np.repeat(ends - steps, steps) + 2.0
    after = instance.prompt_tokens[owner] + k - 1
    decode = decode_ms(cost.array, after - 1)
    refill = (cost["token"] + cost["prefill_token"]) * after + cost["prefill_request"]
    refill -= found_of(cost, charged) * (after - 1)

    return owner, after, decode, refill


def _ticks(values: Floats) -> list[int]:
    ticks = np.floor(values * _TICKS)
    if ticks.max() < 2.0**62:
        return list(ticks.astype(np.int64).tolist())

    return [int(tick) for tick in ticks.tolist()]


def sum_on_machine(since: Floats, length: Floats, alone: Floats) -> float:
    """Return a bound on the sum of (time - release), as `optsched.bounds.simple.srpt` does."""
    release = _ticks(since)
    earliest = sorted(map(add, release, _ticks(alone)))
    total = 0
    completions = srpt_completions(release, _ticks(length))
    for completion, floor in zip(completions, earliest, strict=True):
        total += max(completion, floor)

    total -= sum(release) + len(release)  # releases were rounded down
    return total / _TICKS


def _leaf(task: BoundTask) -> dict[str, Any] | None:
    return work_leaf() if task.workers == 1 else None


def scale_of(task: BoundTask) -> int:
    """Return by how much a sum over requests is larger than the task's objective."""
    return 1 if task.objective == TOTAL_LATENCY else task.instance.n


def work_tel(task: BoundTask, budget: Budget) -> Proof:
    """Return the SRPT bound on total latency in seconds, or its weighted sum with that on TTFT."""
    weight = task.objective.ttft_weight
    work = unavoidable_work(task.instance, task.batch_cost, task.charged)
    length = work.total / task.workers
    total = max(sum_on_machine(task.instance.release, length, work.chain), float(work.chain.sum()))
    if task.objective == TOTAL_LATENCY:
        return Proof(total, tree=_leaf(task))
    if weight > 0:
        firsts = work_ttft(task, budget).value * task.instance.n
        total = (1 - weight) * total + weight * firsts

    return Proof(total / task.instance.n)


def work_ttft(task: BoundTask, budget: Budget) -> Proof:
    """Return the SRPT bound on mean TTFT in seconds, for which only prefills count."""
    work = unavoidable_work(task.instance, task.batch_cost, task.charged)
    total = sum_on_machine(task.instance.release, work.prefill / task.workers, work.first)
    value = max(total, float(work.first.sum())) / task.instance.n
    return Proof(value, tree=_leaf(task))


def work_makespan(task: BoundTask, budget: Budget) -> Proof:
    """Return a bound on makespan in seconds.

    It is the max over t of t plus the work that arrives from t on, and any arrival plus the chain.
    """
    instance = task.instance
    work = unavoidable_work(instance, task.batch_cost, task.charged)
    order = np.argsort(instance.release_times, kind="stable")
    arrival = instance.release
    remaining = np.cumsum(work.total[order][::-1])[::-1] / task.workers
    busy = float((arrival[order] + remaining * (1 - _SAFETY)).max())
    latest = max(busy, float((arrival + work.chain).max()))

    return Proof(latest + float(instance.first_arrival), tree=_leaf(task))


_WORK = "unavoidable GPU work on one preemptive machine"
_PREFILLS = "unavoidable prefill work on one machine"
_LATEST = "work that arrives from t on, and chains"
_PROVED = PROVED_FOR | WORKERS | CHARGES
WORK_TEL = Bound("work", _WORK, "second", SUMS, work_tel, _PROVED, certifies=True)
WORK_TTFT = Bound(
    "prefill-work", _PREFILLS, "second", ("mean_ttft",), work_ttft, _PROVED, certifies=True
)
WORK_MAKESPAN = Bound(
    "work-makespan", _LATEST, "second", ("makespan",), work_makespan, _PROVED, certifies=True
)
