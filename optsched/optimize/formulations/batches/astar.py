"""Exact search for infermax: A* over multisets of request states.

A state says how many requests of each class have produced how many tokens and hold how much KV
(`infermax_network`); a step is a batch. Costs are exact integers. For makespan and TPS a step
costs the batch's time; for TEL, mean TTFT and mean TPOT it costs that time as often as there are
requests that wait for what the objective counts (TPOT: 1 / (o - 1) times).

**Bound.** For makespan the steps that finish a state cost at least

    own work + base J + prefill_base n_p + decode_base (J - n_p) + swap (n_d - (J - n_p))+

for the least possible J >= batches needed and n_p >= prefill batches needed. Own work: every
token still to come is decoded or refilled, and requests without KV must be prefilled. J: the
largest of ceil(sum weight / most) over `Network.weights` (dual feasible functions of KV, token and
running limits), of the longest remaining output, and of n_p. A batch without prefills decodes, so
J - n_p batches pay decode_base; where prefill_base >= decode_base fewer prefill batches are
better, else all J batches pay prefill_base at most. n_d is the number of batches needed by the
tokens that come from requests that hold KV then, if every one is decoded; each one that is
refilled instead costs at least ``pen`` more and spares at most one such batch, worth decode_base
(and base where phases may not be mixed): swap = min(pen, that).
For the other objectives the bound is the sum of each request's least own times.

**What is left out.** Each rule changes an optimal schedule into one that is no worse; they end, as
each lowers (refills, sum of batch numbers of all tokens, minus the sum of those of evictions) in
this order.

- A refill in place (evicted and prefilled in one batch) beside a decode, or where all prefills of
  the batch are such and decode_base <= prefill_base: decode instead, if that is no more work.
- An eviction without which the batch would still fit: put it off by a batch, or refill in place
  if the next batch refills.
- Makespan only. A request with one token left that idles in a batch of its phase into which it
  fits: its token moves here, it is gone sooner, and the batch where it was gets shorter.

Fewer tokens generated, or more, is no dominance.
"""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.greedy import best_start
from optsched.optimize.formulations.batches.infermax import EXTRAS, LIMITS, Problem, answer, problem
from optsched.optimize.formulations.batches.network import (
    DECODE,
    DONE,
    REFILL,
    Network,
    network,
)
from optsched.optimize.solvers.base import Progress, SolveOptions, Status

_OBJECTIVES = ("makespan", "tps", "tel", "mean_ttft", "mean_tpot")
MAX_BYTES = 6 * 2**30
"""Memory that the search may take; at this limit it stops as at a time limit."""
_SLICE = 2000


class _Tables:
    """The compiled search's view of a network."""

    def __init__(self, net: Network) -> None:
        prob, c = net.prob, net.prob.costs
        self.net = net
        name = prob.objectives[0]
        makespan = name in ("makespan", "tps")
        nodes = len(net.nodes)
        self.arc_start = np.searchsorted([a.source for a in net.arcs], np.arange(nodes + 1)).astype(
            np.int64
        )
        cheap = {a.source: a.work for a in net.arcs if a.kind == DECODE}
        self.arcs = np.array(
            [
                (a.target, a.kind, a.tokens, a.kv, a.work,
                 a.kind == REFILL and a.tokens == _input(net, a.source)
                 and cheap[a.source] <= a.work)
                for a in net.arcs
            ],
            dtype=np.int64,
        )  # fmt: skip
        self.node = np.array(
            [
                (
                    net.least_work(v) if makespan else _least_share(net, v, name),
                    net.remaining[v],
                    _rate(net, v, name),
                    net.held[v],
                    net.remaining[v] == 1
                    and (net.nodes[v].ready or not prob.chunked)
                    and _decoding_is_cheaper(net, v),
                )
                for v in range(nodes)
            ],
            dtype=np.int64,
        )
        penalty = min(
            (
                prob.costs.prefill(s + k) - prob.costs.decode(s + k - 1)
                for s, o in net.sizes
                for k in range(1, o)
            ),
            default=0,
        )
        spared = c.decode_base + (0 if prob.hybrid else c.base)
        swap = 0 if prob.chunked else max(0, min(penalty, spared))
        self.fixed = np.array([c.base, c.decode_base, c.prefill_base, makespan, swap])
        weights = net.weights
        self.weights = np.array([w for w, _ in weights], dtype=np.int64)
        self.most = np.array([m for _, m in weights], dtype=np.int64)
        self.decodes = self._decode_weights()
        self.prefills = np.array([w for w, _ in net.prefill_weights], dtype=np.int64)
        self.prefill_most = np.array([m for _, m in net.prefill_weights], dtype=np.int64)
        self.limits = np.array(
            [prob.capacity, prob.batch_tokens, prob.prefill_tokens, prob.running, prob.hybrid],
            dtype=np.int64,
        )

    def _decode_weights(self) -> Any:
        """Return `weights` without the next token of requests that do not decode it."""
        out = self.weights.copy()
        index = {node: v for v, node in enumerate(self.net.nodes)}
        for v, node in enumerate(self.net.nodes):
            if not node.ready:
                after = type(node)(
                    node.cls, node.produced + 1,
                    self.net.sizes[node.cls][0] + node.produced, True,
                )  # fmt: skip
                out[:, v] = self.weights[:, index[after]] if after in index else 0
        return out

    @property
    def given(self) -> tuple[Any, ...]:
        """The arguments of the compiled search after its own arrays."""
        return (
            self.arc_start, self.arcs, self.node, self.fixed, self.weights, self.most,
            self.prefills, self.prefill_most, self.decodes, self.limits,
        )  # fmt: skip


def _input(net: Network, v: int) -> int:
    node = net.nodes[v]
    return net.sizes[node.cls][0] + node.produced


def _decoding_is_cheaper(net: Network, v: int) -> bool:
    size = _input(net, v)
    return net.prob.costs.decode(size - 1) <= net.prob.costs.prefill(size)


def _rate(net: Network, v: int, name: str) -> int:
    """Return how often a batch's time counts for a request in this node."""
    output, produced = net.sizes[net.nodes[v].cls][1], net.nodes[v].produced
    if name == "tel":
        return 1
    if name == "mean_ttft":
        return int(produced == 0)
    if name == "mean_tpot":
        return net.prob.rate_unit // (output - 1) if produced and output > 1 else 0
    return 0


def _least_share(net: Network, v: int, name: str) -> int:
    """Return the least that a request in this node adds to a sum of times."""
    c, node = net.prob.costs, net.nodes[v]
    s, o = net.sizes[node.cls]
    later = [net.prob.least_span(s, k) for k in range(node.produced + 1, o)]
    if node.produced == 0 and not node.cached:
        first = net.prob.least_span(s, 0)
    elif node.ready:
        first = net.prob.least_span(s, node.produced)
    else:  # the rest of a prefill, or a refill
        own = net.least_work(v) - sum(net.prob.own_work(s, k) for k in range(node.produced + 1, o))
        first = own + c.base + c.prefill_base
    if name == "tel":
        return first + sum(later)
    if name == "mean_ttft":
        return 0 if node.produced else first
    if o == 1:
        return 0
    rate = net.prob.rate_unit // (o - 1)
    return rate * (sum(later) + (first if node.produced else 0))


def solve_by_astar(task: Task, options: SolveOptions) -> Answer:
    """Solve by A*.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem` and
        `infermax_network.network`.
    """
    begin = time.perf_counter()
    prob = problem(task)
    start, times = best_start(prob, options.warm_start)
    net = network(prob)
    tables = _Tables(net)
    best = _ceiling(prob, None if times is None else prob.level(prob.objectives[0], times))
    search = _Search(tables, best)
    built_s = time.perf_counter() - begin
    native = search.run(options.after(built_s), prob, begin)
    solve_s = time.perf_counter() - begin - built_s
    steps = search.steps()
    batches = start if steps is None else net.plan(steps)
    bound = search.bound()
    status = Status.FEASIBLE if batches is not None else Status.NO_INCUMBENT
    if native == "solved":
        status = Status.OPTIMAL if batches is not None else Status.INFEASIBLE
        bound = best if steps is None else search.best
    solved = native == "solved" and steps is not None
    claimed = search.best if solved else None
    return answer(
        prob,
        status,
        batches,
        bound,
        claimed=claimed,
        native_status=f"{native}, {search.expanded} states expanded",
        build_s=built_s,
        solve_s=solve_s,
    )


def _ceiling(prob: Problem, level: Fraction | None) -> int:
    """Return the least cost that the search need not find."""
    values = [Fraction(2**62)]
    if level is not None:
        values.append(level / prob.shrink)
    if prob.cutoff is not None:
        values.append(prob.cutoff)
    return math.ceil(min(values))


class _Search:
    """Arrays of the compiled search, grown as needed."""

    def __init__(self, tables: _Tables, best: int) -> None:
        from optsched.optimize.formulations.batches import astar_kernel as core

        self.core, self.tables = core, tables
        net = tables.net
        nodes, n = len(net.nodes), sum(net.counts)
        self.by_request = n < nodes
        width = n if self.by_request else nodes
        kind = np.uint8 if (nodes < 255 if self.by_request else n < 256) else np.uint16
        size = 1 << 14
        self.rows = np.zeros((size, width), dtype=kind)
        self.cost = np.zeros(size, dtype=np.int64)
        self.parent = np.full(size, -1, dtype=np.int32)
        self.table = np.full(4 * size, -1, dtype=np.int32)
        self.heap = [np.zeros(size, dtype=t) for t in (np.int64, np.int64, np.int32)]
        self.numbers = np.zeros(8, dtype=np.int64)
        self.numbers[core.BEST] = best
        self.numbers[core.GOAL] = -1
        counts = np.zeros(nodes, dtype=np.int64)
        np.add.at(counts, net.entry, net.counts)
        core.first_state(counts, self.rows, self.table, self.by_request)
        scratch = np.zeros(nodes, dtype=np.int64)
        compiled: Any = core.remaining_cost
        lower = compiled(counts, tables.node, tables.fixed, *tables.given[4:9], scratch)
        self.heap[0][0] = lower
        self.numbers[core.STATES] = self.numbers[core.HEAP] = 1
        self.floor = int(lower)

    @property
    def best(self) -> int:
        """The incumbent's cost, or the ceiling given."""
        return int(self.numbers[self.core.BEST])

    @property
    def expanded(self) -> int:
        """Number of states expanded."""
        return int(self.numbers[self.core.EXPANDED])

    def bound(self) -> int | None:
        """Return a lower bound on every cost below the ceiling, and on the ceiling."""
        lowest = int(self.heap[0][0]) if self.numbers[self.core.HEAP] else self.best
        return min(max(self.floor, lowest), self.best)

    def run(self, options: SolveOptions, prob: Problem, begin: float) -> str:
        """Search until it is done or a limit comes; return why it ended."""
        core = self.core
        end = time.perf_counter() + options.time_limit
        limit, name = 1, prob.objectives[0]
        try:
            while True:
                if options.stop is not None and options.stop.is_set():
                    return "interrupted"
                if time.perf_counter() >= end:
                    return "time limit"
                if options.mip_rel_gap and self.best - (self.bound() or 0) <= (
                    options.mip_rel_gap * self.best
                ):
                    return "gap reached"
                slice_begin = time.perf_counter()
                ended = core.expand(
                    limit, self.rows, self.cost, self.parent, self.table, *self.heap,
                    self.numbers, self.by_request, *self.tables.given,
                )  # fmt: skip
                took = time.perf_counter() - slice_begin
                limit = min(max(1, limit * 2 if took < 0.05 else limit // 2), _SLICE * 100)
                if ended == core.SOLVED:
                    return "solved"
                if ended == core.GROW and not self._grow():
                    return "memory limit"
                if options.progress is not None:
                    found = self.numbers[core.GOAL] >= 0
                    options.progress(
                        Progress(
                            time.perf_counter() - begin,
                            prob.to_value(name, self.best) if found else None,
                            prob.to_value(name, self.bound() or 0),
                        )
                    )
        except KeyboardInterrupt:
            return "interrupted"

    def _grow(self) -> bool:
        core = self.core
        columns = [self.rows, self.cost, self.parent, self.table, *self.heap]
        if 2 * sum(column.nbytes for column in columns) > MAX_BYTES:
            return False
        if self.numbers[core.HEAP] + 2 >= len(self.heap[0]):
            self.heap = [np.concatenate([column, column]) for column in self.heap]
        if self.numbers[core.STATES] + 1 >= len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.cost = np.concatenate([self.cost, self.cost])
            self.parent = np.concatenate([self.parent, self.parent])
        if 2 * self.numbers[core.STATES] >= len(self.table):
            self.table = np.full(2 * len(self.table), -1, dtype=np.int32)
            core.rehash(self.rows, int(self.numbers[core.STATES]), self.table)
        return True

    def steps(self) -> list[dict[int, int]] | None:
        """Return the incumbent's batches as numbers of arcs, or None where none was found."""
        core, net = self.core, self.tables.net
        state = int(self.numbers[core.GOAL])
        if state < 0:
            return None
        path = [state]
        while path[-1] != 0:
            path.append(int(self.parent[path[-1]]))
        path.reverse()
        nodes = len(net.nodes)
        rows = [core.counts_of(self.rows[s], nodes, self.by_request) for s in path]
        steps = []
        for k in range(len(path) - 1):
            price = int(self.cost[path[k + 1]] - self.cost[path[k]])
            steps.append(_step(self.tables, rows[k], rows[k + 1], price))
        return steps


def _step(tables: _Tables, before: Any, after: Any, price: int) -> dict[int, int]:
    """Return a batch that leads from one state to another at no more than ``price``.

    Found again rather than stored: a small enumeration over arcs, node by node. (The price is
    larger than the batch's cost where a cheaper way to ``before`` was found after ``after``.)
    """
    net = tables.net
    makespan = bool(tables.fixed[3])
    rate = 1 if makespan else int((before * tables.node[:, 2]).sum())
    base, decode_base, prefill_base = (int(v) for v in tables.fixed[:3])
    out: list[list[int]] = [[] for _ in net.nodes]
    for a, arc in enumerate(net.arcs):
        out[arc.source].append(a)
    wanted = after.copy()

    def search(v: int, rest: int, at: int) -> bool:
        while v < len(net.nodes) and before[v] == 0:
            v += 1
        if v == len(net.nodes):
            return not wanted.any() and fits()
        if at == 0:
            rest = int(before[v])
        if rest == 0:
            return search(v + 1, 0, 0)
        if at == len(out[v]):
            return False
        a = out[v][at]
        target = net.arcs[a].target
        most = rest if target == DONE else min(rest, int(wanted[target]))
        for x in range(most, -1, -1):
            if x:
                chosen[a] = x
                if target != DONE:
                    wanted[target] -= x
            if search(v, rest - x, at + 1) if rest - x else search(v + 1, 0, 0):
                return True
            if x:
                del chosen[a]
                if target != DONE:
                    wanted[target] += x
        return False

    def fits() -> bool:
        batch = [(net.arcs[a], x) for a, x in chosen.items()]
        tokens = sum(x * a.tokens for a, x in batch)
        prefill = sum(x * a.tokens for a, x in batch if a.prefills)
        kv = sum(x * a.kv for a, x in batch)
        running = sum(x for a, x in batch if a.kv)
        decodes = any(a.kind == DECODE for a, _ in batch)
        if tokens == 0 or (decodes and prefill and not tables.limits[4]):
            return False
        length = base + sum(x * a.work for a, x in batch)
        length += decode_base * decodes + prefill_base * (prefill > 0)
        room, most, most_prefill, most_running = (int(v) for v in tables.limits[:4])
        return (
            length * rate <= price
            and kv <= room
            and tokens <= most
            and prefill <= most_prefill
            and running <= most_running
        )

    chosen: dict[int, int] = {}
    if not search(0, 0, 0):
        raise AssertionError("infermax: a step of the search cannot be found again")
    return dict(chosen)


METHODS = {
    "infermax": {
        "astar": Method(
            "exact search over states of interchangeable requests (A*)",
            solve_by_astar,
            _OBJECTIVES,
            LIMITS | {"chunked_prefill"},
            extras=EXTRAS,
        )
    }
}
