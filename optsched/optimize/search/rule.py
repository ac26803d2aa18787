"""MC-SF's admission in a given order, with two brakes: the rule that the offline search adjusts.

Let N be the number of requests in the system.

*Prefills together.* Every batch that prefills pays `prefill_base` and delays all decodes. So
waiting requests are admitted only if ``together = q + r sqrt(N)`` of them fit at once.

*Fewer at a time.* With few requests in the system, a batch of all of them is too long for a small
sum of latencies. N identical requests are best served about ``sqrt(N f / w)`` at a time, where f is
the fixed cost of a batch and w a request's own part of it. So at most ``c + d sqrt(N)`` run.

Import this module lazily: it loads numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.judge.life import (
    EMPTY,
    add_decode,
    add_prefill,
    advance,
    batch_time,
    kv_of,
    record,
)
from optsched.judge.replay import Limits, limits_of
from optsched.policies.engine.common import (
    REQUEST,
    STATE,
    TOKENS,
    Columns,
    add_entry,
    arriving,
    full,
    grown,
    idle,
    new_columns,
    new_requests,
    with_room,
)
from optsched.problem.instance import Instance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIELDS = (
    ("arrival", np.float64),
    ("rank", np.int64),  # its place in the order
)
_STATE = record(
    *STATE,
    ("total", np.float64),  # sum of the completion times so far
    ("joined", np.int64),  # requests that the batch being formed admits
    ("changed", np.bool_),  # something has, since admission was last tried
)


class Brakes(NamedTuple):
    """At least ``q + r sqrt(N)`` join at once, and at most ``c + d sqrt(N)`` run."""

    q: float
    r: float
    c: float
    d: float


class _Served(NamedTuple):
    """The outcome of a run: the sum of completion times, and how much of the columns is filled."""

    total: float
    batches: int
    entries: int


class Server:
    """An instance that can be served repeatedly, under different orders and brakes.

    Parameters
    ----------
    instance : Instance
        In seconds.
    cost : CostModel
    by_arrival : ndarray of int64, shape (n,)
        The requests in order of arrival.
    """

    def __init__(self, instance: Instance, cost: CostModel, by_arrival: Ints) -> None:
        self._requests = new_requests(instance, _FIELDS)
        self._by_arrival = by_arrival
        self._limits = limits_of(instance, "recompute")
        self._cost = cost.array
        self._columns = new_columns(instance)
        self._served = _Served(np.inf, 0, 0)

    def run(self, rank: Ints, brakes: Brakes, enough: float) -> float:
        """Serve all requests. Return the sum of their completion times, in seconds.

        Parameters
        ----------
        rank : ndarray of int64, shape (n,)
            Each request's place in the order.
        brakes : Brakes
        enough : float
            The run ends, and the sum is infinite, as soon as the sum exceeds this value or a prompt
            does not fit into the limits.
        """
        self._columns, self._served = _serve(
            self._requests, rank, self._by_arrival, self._limits, self._cost, brakes,
            self._columns, enough,
        )  # fmt: skip
        return self._served.total

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Return batch_offsets, request and tokens of the last run's schedule."""
        batches = self._columns.batches[: self._served.batches]
        entries = self._columns.entries[:, : self._served.entries].astype(np.int64)
        return np.append(0, batches["entries"]), entries[REQUEST], entries[TOKENS]


@njit(cache=True)
def _reset(requests: Any, rank: Ints, s: Any) -> None:
    """Begin anew with another order."""
    for i in range(requests.shape[0]):
        r = requests[i]
        r.cached = r.produced = 0
        r.decoding = False
        r.rank = rank[i]
        s.longest = max(s.longest, r.output)
    s.changed = True


@njit(cache=True)
def _place(requests: Any, wait: Ints, s: Any, i: int) -> int:
    """Insert a request among those that wait, in order of rank. Return its place."""
    rank = requests[i].rank
    low, high = 0, s.waiting
    while low < high:
        middle = (low + high) // 2
        if requests[wait[middle]].rank < rank:
            low = middle + 1
        else:
            high = middle
    for k in range(s.waiting, low, -1):
        wait[k] = wait[k - 1]
    wait[low] = i
    s.waiting += 1
    return low


@njit(cache=True)
def _fits(usage: Ints, start: int, base: int, output: int, limits: Limits) -> bool:
    """Whether a request fits that caches ``base + k`` tokens by its k-th batch."""
    k = output  # from the last batch, in which the request holds the most, backward
    while k > 0 and usage[start + k] + kv_of(base + k, limits) <= limits.kv_capacity:
        k -= 1
    return k == 0


@njit(cache=True)
def _put(usage: Ints, base: int, output: int, start: int, sign: int, limits: Limits) -> None:
    """Add a request to the KV in use, or with sign -1 remove it."""
    for k in range(1, output + 1):
        usage[start + k] += sign * kv_of(base + k, limits)


@njit(cache=True)
def _admit(
    requests: Any, s: Any, wait: Ints, joining: Ints, usage: Ints, limits: Limits, brakes: Brakes
) -> None:
    """Admit the first requests that wait, or none unless enough of them fit at once."""
    size = np.sqrt(s.running + s.waiting)
    most = min(
        float(limits.max_running), brakes.c + brakes.d * size, float(limits.max_batch_tokens)
    )
    beside = s.running if limits.hybrid else 0
    room = min(limits.max_prefill_tokens, limits.max_batch_tokens - beside)
    waiting, running, now = s.waiting, s.running, s.batches
    joined = tokens = 0
    while joined < waiting and (running + joined < most or running + joined == 0):
        i = wait[joined]
        r = requests[i]
        base = r.prompt - 1
        if r.prompt > room - tokens or not _fits(usage, now, base, r.output, limits):
            break
        _put(usage, base, r.output, now, 1, limits)
        joining[joined] = i
        tokens += r.prompt
        joined += 1
    blocked = joined < waiting and (
        requests[wait[joined]].prompt + tokens > limits.max_prefill_tokens
    )
    if joined < brakes.q + brakes.r * size and running > 0 and not blocked:
        for k in range(joined):
            r = requests[joining[k]]
            _put(usage, r.prompt - 1, r.output, now, -1, limits)
        joined = 0
        s.changed = False
    for k in range(joined, waiting):
        wait[k - joined] = wait[k]
    s.waiting -= joined
    s.joined = joined


@njit(cache=True)
def _form(requests: Any, s: Any, running: Ints, decodes: int, joining: Ints, entries: Ints) -> Any:
    """Write the entries of a batch. Return the batch's sums."""
    sums = EMPTY
    for k in range(decodes):
        i = running[k]
        add_entry(entries, s, i, 1)
        sums = add_decode(sums, requests[i].cached)
    for k in range(s.joined):
        i = joining[k]
        prompt = requests[i].prompt
        add_entry(entries, s, i, prompt)
        sums = add_prefill(sums, prompt, 0)
    return sums


@njit(cache=True)
def _stand_still(requests: Any, s: Any, running: Ints, usage: Ints, limits: Limits) -> None:
    """Delay the KV of running requests by a batch, since they are not in the one being formed."""
    for k in range(s.running):
        r = requests[running[k]]
        base, left = r.prompt + r.produced - 1, r.output - r.produced
        _put(usage, base, left, s.batches, -1, limits)
        usage[s.batches + 1] += kv_of(base, limits)
        _put(usage, base, left, s.batches + 1, 1, limits)


@njit(cache=True)
def _step(requests: Any, s: Any, who: Ints, count: int, running: Ints, kept: int) -> int:
    """Let requests produce a token. Those that go on join the running. Return how many run."""
    for k in range(count):
        i = who[k]
        r = requests[i]
        advance(r, 1 if r.decoding else r.prompt)
        if r.produced == r.output:
            s.total += s.now
            s.done += 1
            s.changed = True
        else:
            running[kept] = i
            kept += 1
    return kept


@njit(cache=True)
def _serve(
    requests: Any,
    rank: Ints,
    by_arrival: Ints,
    limits: Limits,
    cost: Floats,
    brakes: Brakes,
    columns: Columns,
    enough: float,
) -> tuple[Columns, _Served]:
    """Run the rule once. Return the columns, which grow as needed, and the outcome."""
    s = np.zeros(1, _STATE)[0]
    _reset(requests, rank, s)
    n = requests.shape[0]
    wait = np.empty(n + 1, np.int64)
    running, joining = np.empty(n, np.int64), np.empty(n, np.int64)
    usage = np.zeros(4096, np.int64)  # KV after each batch, if all that run go on
    while s.done < n and s.total <= enough:
        i = arriving(requests, s, by_arrival)
        while i >= 0:
            if _place(requests, wait, s, i) <= brakes.q + brakes.r * n:
                s.changed = True
            i = arriving(requests, s, by_arrival)
        if s.running == 0 and s.waiting == 0:
            idle(requests, s, by_arrival)
            continue
        usage = grown(usage, s.batches + s.longest + 2)
        s.joined = 0
        if s.waiting > 0 and (s.changed or s.running == 0):
            _admit(requests, s, wait, joining, usage, limits, brakes)
            if s.joined == 0 and s.running == 0:
                break
        decodes = s.running if limits.hybrid or s.joined == 0 else 0
        if full(columns, s, decodes + s.joined, 0):
            columns = with_room(columns, s, decodes + s.joined, 0)
        s.now += batch_time(cost, _form(requests, s, running, decodes, joining, columns.entries))
        if decodes == 0:
            _stand_still(requests, s, running, usage, limits)
        columns.batches[s.batches].entries = s.entries
        s.batches += 1
        kept = s.running if decodes == 0 else _step(requests, s, running, decodes, running, 0)
        s.running = _step(requests, s, joining, s.joined, running, kept)
    total = s.total if s.done == n else np.inf
    return columns, _Served(total, s.batches, s.entries)
