"""The network of a request's states, for infermax's A* and bounds.

Identical requests form a class. A node is a state: class, tokens produced, KV cached, and whether
the next step decodes. An arc is what a batch does with one request in a node. A batch is a number
of requests for every arc. A finished request leaves the network. All requests arrive together. The
module also bounds the number of batches that are needed.
"""

import operator
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

from optsched.optimize.formulations.batches.problem import Batch, BatchProblem
from optsched.problem.errors import UsageError

STAY, EVICT, DECODE, PREFILL, REFILL = range(5)
"""The kinds of arcs: do nothing, free the KV, decode, prefill (continue, or start without KV), and
free the KV and prefill."""
DONE = -1
MAX_ARCS = 200_000
# The max number of sizes looked at for all dual feasible functions, and how many there are.
_STEPS, _FEW = 10_000_000, 8


class Node(NamedTuple):
    """The state of a request between two batches."""

    cls: int
    produced: int
    cached: int
    ready: bool


class Arc(NamedTuple):
    """What one batch does with one request: source, target, tokens, KV held and own work."""

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

    Class k has requests of ``sizes[k]``, starts in node k, and counts ``counts[k]``. Arcs are in
    order of node; within a node, idling or pausing is first and eviction last.
    """

    prob: BatchProblem
    sizes: list[tuple[int, int]]
    counts: list[int]
    nodes: list[Node] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)

    @cached_property
    def remaining(self) -> list[int]:
        """Tokens still to be produced, by node."""
        return [self.sizes[v.cls][1] - v.produced for v in self.nodes]

    @cached_property
    def held(self) -> list[int]:
        """KV tokens held, by node."""
        return [self.held_by(node) for node in self.nodes]

    def held_by(self, node: Node) -> int:
        """Return the KV tokens that a request in this node holds."""
        return node.cached + self.prob.offset if node.cached else 0

    def productions(self, node: int) -> list[int]:
        """Return a request's KV in each of the batches that still produce its tokens."""
        v = self.nodes[node]
        s, o = self.sizes[v.cls]
        return [s + k + self.prob.offset for k in range(v.produced, o)]

    def least_work(self, node: int) -> int:
        """Return the min own work that a request in this node still needs."""
        v, c = self.nodes[node], self.prob.costs
        s, _ = self.sizes[v.cls]
        if v.ready:
            return self._work_from[v.cls][v.produced]

        work = self._work_from[v.cls][v.produced + 1]
        rest = s + v.produced - v.cached
        # A refill from nothing costs no less.
        return work + (c.prefill_in_chunks(rest) if self.prob.chunked else c.prefill(rest))

    @cached_property
    def functions(self) -> list[tuple[Callable[[int], int], int]]:
        """Pairs (weight of a KV size, max sum of weights in one batch), the strongest first.

        They are dual feasible functions of the KV sizes (the bound L2 of Martello and Toth), and
        the limits on running requests and tokens.
        """
        room, prob = self.prob.capacity, self.prob
        sizes = Counter[int]()
        for v, n in enumerate(self.counts):
            for z in self.productions(v):
                sizes[z] += n

        # Each threshold is valid alone, so of too many some are enough.
        thresholds = sorted({min(z, room - z + 1) for z in sizes})
        many = max(_FEW, _STEPS // (len(sizes) + sum(prob.output)))
        thresholds = thresholds[:: -(-len(thresholds) // many)]

        found: list[tuple[Callable[[int], int], int]] = [(lambda z: z, room)]
        found += [(lambda z: 1, min(prob.running, prob.batch_tokens, sum(self.counts)))]
        found += [(partial(_keep_or_drop, room, t), room) for t in thresholds]

        different = {(*map(weight, sizes), largest): (weight, largest) for weight, largest in found}

        def strength(values: tuple[int, ...]) -> float:
            *weights, largest = values
            return sum(map(operator.mul, weights, sizes.values())) / largest

        return [different[values] for values in sorted(different, key=strength, reverse=True)[:10]]

    @cached_property
    def weights(self) -> list[tuple[list[int], int]]:
        """Pairs (weight by node, largest): ceil(sum of weights / largest) batches are needed.

        A node has the sum of the weights of `functions` over the batches that still produce tokens.
        """
        found = []
        for weight, largest in self.functions:
            later = [
                _sums_from([weight(z) for z in self.productions(v)]) for v in range(len(self.sizes))
            ]
            found.append(([later[node.cls][node.produced] for node in self.nodes], largest))

        return found

    @cached_property
    def _work_from(self) -> list[list[int]]:
        """The min own work of all tokens from each one on, by class."""
        prob = self.prob
        return [_sums_from([prob.own_work(s, k) for k in range(o)]) for s, o in self.sizes]

    @cached_property
    def prefill_weights(self) -> list[tuple[list[int], int]]:
        """Pairs as `weights`, for the batches that prefill the requests without KV."""
        off, prob = self.prob.offset, self.prob
        starts = [
            0 if v.ready else self.sizes[v.cls][0] + v.produced - v.cached for v in self.nodes
        ]
        out = [(starts, min(prob.prefill_tokens, prob.capacity))]
        fresh = [not v.cached for v in self.nodes]

        if not prob.chunked:
            out.append(([(z + off) * f for z, f in zip(starts, fresh, strict=True)], prob.capacity))
            largest = min(prob.prefill_tokens, prob.capacity - off)
            out.append(([int(2 * z > largest) for z in starts], 1))

        out.append(([int(f) for f in fresh], min(prob.running, sum(self.counts))))
        return out

    def batch_bound(self) -> tuple[int, int]:
        """Return the min number of batches, and the min number of batches with prefills."""
        bounds = [
            max(-(-sum(n * w[v] for v, n in enumerate(self.counts)) // room) for w, room in weights)
            for weights in (self.weights, self.prefill_weights)
        ]
        return max(*bounds, *(o for _, o in self.sizes)), bounds[1]

    def plan(self, steps: list[dict[int, int]]) -> list[Batch]:
        """Return the batches that numbers of requests on arcs mean; idle ones may be left out."""
        where: dict[int, deque[int]] = {v: deque() for v in range(len(self.nodes))}
        for v, members in enumerate(self.prob.classes):
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


def _sums_from(values: list[int]) -> list[int]:
    """Return the sum of the values from each place on, and 0 after the last one."""
    return [*accumulate(reversed(values), initial=0)][::-1]


def _keep_or_drop(room: int, threshold: int, size: int) -> int:
    """Round sizes above room - threshold up to the room, and sizes below the threshold to 0."""
    return room if size > room - threshold else size * (size >= threshold)


def outline(prob: BatchProblem) -> Network:
    """Return the network of a problem without its arcs, for functions and bounds."""
    sizes = [prob.sizes[members[0]] for members in prob.classes]
    nodes = [Node(cls, 0, 0, False) for cls in range(len(sizes))]
    counts = [len(members) for members in prob.classes]
    return Network(prob, sizes, counts, nodes)


def least_makespan(prob: BatchProblem) -> int:
    """Return a lower bound on the time from start to end, by own work and the batches needed."""
    c = prob.costs
    batches, prefills = outline(prob).batch_bound()
    if c.fixed(False, True) < c.fixed(True, False):
        prefills = batches

    decode_batches = batches - prefills
    fixed = prefills * c.fixed(False, True) + decode_batches * c.fixed(True, False)
    return prob.total_work + fixed


def network(prob: BatchProblem) -> Network:
    """Return the network of a problem whose requests arrive together."""
    net = outline(prob)
    index = {node: v for v, node in enumerate(net.nodes)}

    def number(node: Node | None) -> int:
        if node is None:
            return DONE
        if node not in index:
            index[node] = len(net.nodes)
            net.nodes.append(node)

        return index[node]

    done = 0
    while done < len(net.nodes):
        prob.budget.check("the network was built")
        net.arcs += _arcs_of(net, done, number)
        if len(net.arcs) > MAX_ARCS:
            raise UsageError(
                f"method: found more than {MAX_ARCS} arcs in the network of states; expected fewer "
                "(chunked_prefill off), or the method cpsat, which has no network"
            )

        done += 1

    return net


def _arcs_of(net: Network, v: int, number: Callable[[Node | None], int]) -> list[Arc]:
    prob, node = net.prob, net.nodes[v]
    s, o = net.sizes[node.cls]
    c, off, k = prob.costs, prob.offset, node.produced
    most_tokens = prob.prefill_tokens
    arcs = [Arc(v, v, STAY, 0, net.held_by(node), 0)]
    after = Node(node.cls, k + 1, s + k, True) if k + 1 < o else None
    if node.ready:
        arcs.append(Arc(v, number(after), DECODE, 1, s + k + off, c.decode(node.cached)))

    def prefill(kind: int, cached: int) -> None:
        rest = s + k - cached
        for tokens in range(1, rest + 1) if prob.chunked else [rest]:
            if tokens > most_tokens:
                continue

            target = after if tokens == rest else Node(node.cls, k, cached + tokens, False)
            kv = cached + tokens + off
            arcs.append(Arc(v, number(target), kind, tokens, kv, c.prefill(tokens, cached)))

    if not node.ready:
        prefill(PREFILL, node.cached)

    refillable = prob.chunked or s + k <= prob.prefill_tokens  # else it must stay
    if node.cached and refillable and not prob.eviction_free:
        if node.ready:
            prefill(REFILL, 0)

        arcs.append(Arc(v, number(Node(node.cls, k, 0, False)), EVICT, 0, 0, 0))

    return arcs
