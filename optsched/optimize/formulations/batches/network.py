"""The network of a request's states, shared by infermax's aggregated methods (flow, A*).

Identical requests are one class. A node is (class, tokens produced, KV cached, whether the next
step decodes); an arc is what a batch does with one request of a node. A batch is a number for
every arc; a finished request leaves the network. All requests arrive together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.formulations.batches.infermax import Batch, Problem
from optsched.problem.errors import UsageError

STAY, EVICT, DECODE, PREFILL, REFILL = range(5)
"""What a batch does with a request: nothing; free its KV; decode; prefill (continue, or start
without KV); free its KV and prefill."""
DONE = -1
MAX_ARCS = 200_000


@dataclass(frozen=True)
class Node:
    """State of a request between two batches."""

    cls: int
    produced: int
    cached: int
    ready: bool


@dataclass(frozen=True)
class Arc:
    """What one batch does with one request: where from and to, tokens, KV held, own work."""

    source: int
    target: int
    kind: int
    tokens: int
    kv: int
    work: int

    @property
    def prefills(self) -> bool:
        """Whether it is a prefill."""
        return self.kind >= PREFILL

    @property
    def works(self) -> bool:
        """Whether it processes tokens."""
        return self.kind >= DECODE


@dataclass(eq=False)
class Network:
    """Nodes and arcs of a problem.

    Parameters
    ----------
    prob : Problem
    sizes : list of (s, o)
        By class.
    counts : list of int
        Requests by class.
    nodes : list of Node
    arcs : list of Arc
        By node: idle (or pause) first, eviction last.
    entry : list of int
        The node in which each class starts.
    """

    prob: Problem
    sizes: list[tuple[int, int]]
    counts: list[int]
    nodes: list[Node] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)

    @cached_property
    def remaining(self) -> list[int]:
        """Tokens still to be produced, by node."""
        return [self.sizes[v.cls][1] - v.produced for v in self.nodes]

    @cached_property
    def held(self) -> list[int]:
        """KV tokens held, by node."""
        return [v.cached + self.prob.offset if v.cached else 0 for v in self.nodes]

    def productions(self, node: int) -> list[int]:
        """KV of a request in the batches that still produce its tokens, one by one."""
        v = self.nodes[node]
        s, o = self.sizes[v.cls]
        return [s + k + self.prob.offset for k in range(v.produced, o)]

    def least_work(self, node: int) -> int:
        """Least own work that a request in this node still needs."""
        v, c = self.nodes[node], self.prob.costs
        s, o = self.sizes[v.cls]
        work = sum(self.prob.own_work(s, k) for k in range(v.produced + 1, o))
        if v.ready:
            return work + self.prob.own_work(s, v.produced)
        rest = s + v.produced - v.cached
        if not self.prob.chunked:
            return work + c.prefill(rest)
        # Squares shrink to tokens in chunks of one; a refill from nothing costs no less.
        unit = c.token + c.prefill_token + c.prefill_square
        return work + unit * rest + c.prefill_request

    @cached_property
    def functions(self) -> list[tuple[Callable[[int], int], int]]:
        """Pairs (weight of a KV size, most in one batch), the most telling first.

        Dual feasible functions of the KV sizes (Martello and Toth's L2, Fekete and Schepers'
        rounding), and the limits on running requests and tokens: whatever a batch holds, the
        weights of its requests sum to no more than ``most``.
        """
        room, prob = self.prob.capacity, self.prob
        items = sorted({z for v in self.entry for z in self.productions(v)})
        thresholds = {z for z in items if 2 * z <= room}
        thresholds |= {room - z + 1 for z in items if 2 * z > room}
        found: list[tuple[Callable[[int], int], int]] = [(lambda z: z, room)]
        found += [(partial(_keep_or_drop, room, t), room) for t in thresholds if 2 * t <= room + 1]
        found += [(partial(_round_parts, room, k), k * room) for k in range(1, 6)]
        found += [(lambda z: 1, min(prob.running, prob.batch_tokens, sum(self.counts)))]
        ranked: list[tuple[float, int]] = []
        seen = set()
        for index, (weight, most) in enumerate(found):
            values = [weight(z) for z in items]
            common = math.gcd(most, *values)
            key = (most // common, *(value // common for value in values))
            if key not in seen and any(values):
                seen.add(key)
                total = sum(
                    n * sum(map(weight, self.productions(v)))
                    for n, v in zip(self.counts, self.entry, strict=True)
                )
                ranked.append((-total / most, index))
        return [found[index] for _, index in sorted(ranked)[:10]]

    @cached_property
    def weights(self) -> list[tuple[list[int], int]]:
        """Pairs (weight by node, most): ceil(sum of weights / most) batches are needed.

        A node weighs as much as the batches that still produce its tokens, by `functions`.
        """
        return [
            ([sum(map(weight, self.productions(v))) for v in range(len(self.nodes))], most)
            for weight, most in self.functions
        ]

    @cached_property
    def prefill_weights(self) -> list[tuple[list[int], int]]:
        """As `weights`, of what requests without KV need in the batches that prefill them."""
        off, prob = self.prob.offset, self.prob
        starts = [
            0 if v.ready else self.sizes[v.cls][0] + v.produced - v.cached for v in self.nodes
        ]
        out = [(starts, min(prob.prefill_tokens, prob.capacity))]
        fresh = [not v.cached for v in self.nodes]
        if not prob.chunked:
            out.append(([(z + off) * f for z, f in zip(starts, fresh, strict=True)], prob.capacity))
            most = min(prob.prefill_tokens, prob.capacity - off)
            out.append(([int(2 * z > most) for z in starts], 1))
        out.append(([int(f) for f in fresh], min(prob.running, sum(self.counts))))
        return out

    def batch_bound(self) -> tuple[int, int]:
        """Return how many batches, and how many with prefills, are needed at least."""
        bounds = [
            max(-(-sum(n * w[v] for n, v in self._start) // most) for w, most in weights)
            for weights in (self.weights, self.prefill_weights)
        ]
        return max(*bounds, *(o for _, o in self.sizes)), bounds[1]

    def least_makespan(self) -> int:
        """Return a bound on the time from start to end: own work and the batches needed."""
        c = self.prob.costs
        batches, prefills = self.batch_bound()
        if c.prefill_base < c.decode_base:
            prefills = batches
        fixed = c.base * batches + c.prefill_base * prefills
        return self.prob.total_work + fixed + c.decode_base * (batches - prefills)

    @property
    def _start(self) -> list[tuple[int, int]]:
        return list(zip(self.counts, self.entry, strict=True))

    def plan(self, steps: list[dict[int, int]]) -> list[Batch]:
        """Return the batches that numbers of arcs mean: who exactly is arbitrary in a class.

        Parameters
        ----------
        steps : list of dict
            For each batch, how many requests take each arc (idle ones may be left out).
        """
        where: dict[int, deque[int]] = {v: deque() for v in range(len(self.nodes))}
        for members, v in zip(self.prob.classes, self.entry, strict=True):
            where[v].extend(members)
        batches = []
        for step in steps:
            entries: list[tuple[int, int]] = []
            evicted: list[int] = []
            moved: list[tuple[int, int]] = []
            for a in sorted(step, key=lambda a: -self.arcs[a].kind):
                arc = self.arcs[a]
                if arc.kind == STAY:
                    continue
                for _ in range(step[a]):
                    i = where[arc.source].popleft()
                    moved.append((i, arc.target))
                    if arc.kind in (EVICT, REFILL):
                        evicted.append(i)
                    if arc.works:
                        entries.append((i, arc.tokens))
            for i, v in moved:
                if v != DONE:
                    where[v].append(i)
            batches.append(Batch(tuple(sorted(entries)), tuple(sorted(evicted))))
        return batches


def _keep_or_drop(room: int, threshold: int, size: int) -> int:
    """Count sizes above room - threshold whole, those below the threshold not at all."""
    return room if size > room - threshold else size * (size >= threshold)


def _round_parts(room: int, k: int, size: int) -> int:
    """Round (k + 1) size / room down to whole parts, k of which fill a batch."""
    return size * k if (k + 1) * size % room == 0 else (k + 1) * size // room * room


def outline(prob: Problem) -> Network:
    """Return the network of a problem without its arcs: for functions and bounds."""
    firsts = [members[0] for members in prob.classes]
    sizes = [(prob.prompt[i], prob.output[i]) for i in firsts]
    counts = [len(members) for members in prob.classes]
    nodes = [Node(cls, 0, 0, False) for cls in range(len(sizes))]
    return Network(prob, sizes, counts, nodes, [], list(range(len(sizes))))


def network(prob: Problem) -> Network:
    """Return the network of a problem whose requests arrive together.

    Raises
    ------
    UsageError
        More than `MAX_ARCS` arcs (chunks of long prompts).
    """
    firsts = [members[0] for members in prob.classes]
    sizes = [(prob.prompt[i], prob.output[i]) for i in firsts]
    net = Network(prob, sizes, [len(members) for members in prob.classes])
    index: dict[Node, int] = {}
    arcs: list[list[Arc]] = []

    def number(node: Node) -> int:
        if node not in index:
            index[node] = len(net.nodes)
            net.nodes.append(node)
            arcs.append([])
        return index[node]

    for cls in range(len(sizes)):
        net.entry.append(number(Node(cls, 0, 0, False)))
    done, total = 0, 0
    while done < len(net.nodes):
        arcs[done] = _arcs_of(prob, sizes, done, net.nodes[done], number)
        total += len(arcs[done])
        if total > MAX_ARCS:
            raise UsageError(
                f"method: the network of states has more than {MAX_ARCS} arcs; cpsat has none, "
                "or switch chunked_prefill off"
            )
        done += 1
    net.arcs = [arc for some in arcs for arc in some]
    return net


def _arcs_of(
    prob: Problem, sizes: list[tuple[int, int]], v: int, node: Node, number: object
) -> list[Arc]:
    s, o = sizes[node.cls]
    c, off, k = prob.costs, prob.offset, node.produced
    held = node.cached + off if node.cached else 0
    arcs = [Arc(v, v, STAY, 0, held, 0)]

    def go(target: Node | None) -> int:
        return DONE if target is None else number(target)  # type: ignore[operator]

    after = Node(node.cls, k + 1, s + k, True) if k + 1 < o else None
    if node.ready:
        arcs.append(Arc(v, go(after), DECODE, 1, s + k + off, c.decode(node.cached)))

    def prefill(kind: int, cached: int) -> None:
        rest = s + k - cached
        for tokens in range(1, rest + 1) if prob.chunked else [rest]:
            if tokens > prob.prefill_tokens:
                continue
            target = after if tokens == rest else Node(node.cls, k, cached + tokens, False)
            kv = cached + tokens + off
            arcs.append(Arc(v, go(target), kind, tokens, kv, c.prefill(tokens, cached)))

    if not node.ready:
        prefill(PREFILL, node.cached)
    refillable = prob.chunked or s + k <= prob.prefill_tokens  # else it must stay
    if node.cached and refillable and not prob.eviction_free:
        if node.ready:
            prefill(REFILL, 0)
        arcs.append(Arc(v, go(Node(node.cls, k, 0, False)), EVICT, 0, 0, 0))
    return arcs


def columns(net: Network) -> dict[str, NDArray[np.int64]]:
    """Return the arcs as columns."""
    names = ("source", "target", "kind", "tokens", "kv", "work")
    return {name: np.array([getattr(a, name) for a in net.arcs], dtype=np.int64) for name in names}
