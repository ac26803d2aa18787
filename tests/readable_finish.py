"""`optsched.bounds.checker.enumeration` on a relaxation's graph, in plain Python.

Slow and short; the tests demand the same bound and as many labels in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from optsched.optimize.ramp.graph import INFINITE
from optsched.optimize.ramp.relaxation import Relaxation

TOP = 255


@dataclass(eq=False)
class Label:
    """Requests placed up to a graph node, and what is left to do."""

    node: int
    rounds: int
    clock: int | None  # the present round
    need: int  # the round at which it may join the clock
    rest: tuple[int, ...]  # of each kind
    tokens: tuple[int, ...]  # now, one round earlier, ..., of live requests


class Readable:
    """The enumeration of one relaxation."""

    def __init__(self, relaxation: Relaxation, size: int = 16) -> None:
        r = self.r = relaxation
        self.pi = [int(x) for x in r.pi]
        self.copies = [int(x) for x in r.copies]
        self.peak = [int(x) for x in r.peak]
        self.output = [p - int(f) + 1 for p, f in zip(r.peak, r.floor, strict=True)]
        arrivals = bool(r.jobs.arrival.any())
        self.ready = [int(x) if arrivals else 0 for x in r.ready]
        self.kinds = range(len(self.pi))
        self.unit = max(0, r.cutoff - int(r.backward[0])) // TOP + 1
        self.groups = self.split(size)
        self.counters = [self.tables(group) for group in self.groups]

    def arcs(self, u: int) -> list[tuple[int, int, str, list[int]]]:
        """Return target, fixed rounds, what it is, and kinds of the arcs of a node."""
        (start, targets, numbers, _), period = self.r.graph, self.r.period
        labels, out = period.labels, []
        for a in range(start[u], start[u + 1]):
            label, v = int(numbers[a]), int(targets[a])
            mask = sum(int(word) << 64 * at for at, word in enumerate(labels.mask[label]))
            kinds = [k for k in self.kinds if mask >> k & 1]
            what = "place" if label >= period.fixed else "end"
            what = "join" if label == period.join else "round" if label < period.join else what
            if self.r.backward[v] < INFINITE:
                out.append((v, int(labels.rounds[label]) * self.r.scale, what, kinds))
        return out

    def split(self, size: int) -> list[list[int]]:
        """Return kinds in order of peak, in groups of at most so many entries.

        Kinds of so many requests or more are in none.
        """
        groups: list[list[int]] = []
        entries = size
        for k in sorted(self.kinds, key=lambda k: self.peak[k]):
            own = self.copies[k] + 1
            if own > size:
                continue
            fits = entries * own <= size
            groups = [*groups[:-1], [*groups[-1], k]] if fits else [*groups, [k]]
            entries = entries * own if fits else own
        return groups

    def tables(self, group: list[int]) -> list[dict[tuple[int, ...], int]]:
        """Return by node the counters of a group, by what is left of its kinds."""
        back, unit = [int(x) for x in self.r.backward], self.unit
        ways = list(product(*(range(self.copies[k] + 1) for k in group)))
        out = [dict.fromkeys(ways, TOP) for _ in back]
        out[-1][ways[0]] = 0
        for u in range(len(back) - 2, -1, -1):
            for left in ways if back[u] < INFINITE else ():
                costs = [TOP * unit]
                for v, fixed, what, kinds in self.arcs(u):
                    more = back[v] - back[u]
                    for k in kinds:
                        if k not in group:
                            costs.append(more - self.pi[k] + unit * out[v][left])
                        elif left[group.index(k)]:
                            less = tuple(x - (j == k) for j, x in zip(group, left, strict=True))
                            costs.append(more - self.pi[k] + unit * out[v][less])
                    if what != "place":
                        costs.append(more + fixed + unit * out[v][left])
                out[u][left] = min(costs) // unit
        return out

    def least(self, node: int, rest: tuple[int, ...]) -> int:
        """Return the least cost to the end that the graph and counters allow."""
        extra = [0]
        for group, table in zip(self.groups, self.counters, strict=True):
            left = tuple(rest[k] for k in group)
            extra.append(table[node][left])
        return int(self.r.backward[node]) + self.unit * max(extra)

    def following(self, label: Label, m: int) -> list[Label]:
        """Return the labels with one more placement."""
        r, out = self.r, []
        stack = [(label.node, 0, label.clock)]
        while stack:
            node, passed, clock = stack.pop()
            onward: int | None = node
            while onward is not None:
                node = onward
                tokens = label.tokens[passed:]
                rounds = label.rounds + passed * m
                so_far = rounds * r.scale - sum(
                    (c - left) * p
                    for c, left, p in zip(self.copies, label.rest, self.pi, strict=True)
                )
                if so_far + self.least(node, label.rest) > r.cutoff:
                    break
                waiting = clock is None and label.need - passed > r.clock
                onward = None
                for v, _, what, kinds in self.arcs(node):
                    if what == "round":
                        onward = v
                    elif what == "join" and not waiting:
                        stack.append((v, passed, r.clock))
                    for k in kinds:
                        fits = sum(tokens[:1]) + self.peak[k] <= r.jobs.capacity
                        if label.rest[k] and fits:
                            new = self.placed(label, v, rounds, passed, clock, k)
                            if so_far - self.pi[k] + self.least(v, new.rest) <= r.cutoff:
                                out.append(new)
                if onward is None and r.graph.loop[node] >= 0 and (any(tokens) or waiting):
                    onward = node
                passed += 1
                clock = None if clock is None else clock - 1
        return out

    def placed(
        self, label: Label, node: int, rounds: int, passed: int, clock: int | None, k: int
    ) -> Label:
        """Return the label that places kind k so many rounds later."""
        own = [self.peak[k] - j for j in range(self.output[k])]
        old = list(label.tokens[passed:])
        size = max(len(own), len(old))
        tokens = [
            x + y
            for x, y in zip(
                own + [0] * (size - len(own)), old + [0] * (size - len(old)), strict=True
            )
        ]
        need = max(label.need - passed, self.r.clock, self.ready[k] if clock is None else 0)
        rest = tuple(left - (j == k) for j, left in enumerate(label.rest))
        return Label(node, rounds, clock, need, rest, tuple(tokens))

    def deletes(self, a: Label, b: Label, m: int) -> bool:
        """Whether conditions 1 and 2 hold for some number of rounds."""
        most, join = (b.rounds - a.rounds) // m, self.r.clock
        if a.clock is not None:
            if b.clock is None or not 0 <= a.clock - b.clock <= most:
                return False
            most = a.clock - b.clock
        elif b.clock is not None:
            before = most - (join - b.clock)
            if before < 0 or a.need - before > join:
                return False
        elif most < 0 or max(a.need - most, join) > b.need:
            return False
        later = a.tokens[most:]
        return all(x <= y for x, y in zip(later, b.tokens, strict=False)) and not any(
            later[len(b.tokens) :]
        )

    def larger(self, i: int, j: int) -> bool:
        """Whether kind i is another kind and at least as large as kind j."""
        sizes = [(self.peak[k], self.output[k], int(self.r.ready[k])) for k in (i, j)]
        return i != j and all(x >= y for x, y in zip(*sizes, strict=True))

    def away(self, i: int, j: int) -> int:
        """Return how much kinds i and j differ."""
        return sum(abs(of[i] - of[j]) for of in (self.peak, self.output, self.r.ready))

    def layer(self, labels: list[Label], m: int) -> list[Label]:
        """Return the labels that dominance leaves of a layer, those of each set next to others."""
        sets: dict[tuple[int, ...], list[Label]] = {}
        for new in labels:
            sets.setdefault(new.rest, []).append(new)
        for rest, alike in sets.items():
            kept: list[Label] = []
            for new in sorted(alike, key=lambda x: (x.rounds, sum(x.tokens))):
                if not any(self.deletes(a, new, m) for a in kept):
                    kept.append(new)
            sets[rest] = kept
        for rest, alike in sets.items():
            for j in self.kinds:
                left = [i for i in self.kinds if rest[i] and self.larger(i, j)]
                if rest[j] < self.copies[j] and left:
                    i = min(left, key=lambda i: (self.away(i, j), i))
                    other = tuple(x + (k == j) - (k == i) for k, x in enumerate(rest))
                    better = sets.get(other, [])
                    alike[:] = [b for b in alike if not any(self.deletes(a, b, m) for a in better)]
        return [x for alike in sets.values() for x in alike]

    def finish(self) -> tuple[int, list[int]]:
        """Return the bound that the enumeration proves, and how many labels each layer has."""
        r = self.r
        labels = [Label(0, 0, None, r.clock, tuple(self.copies), ())]
        sizes = []
        for m in range(r.jobs.n):
            labels = self.layer([x for label in labels for x in self.following(label, m)], m + 1)
            sizes.append(len(labels))
            if not labels:
                break
        totals = [
            x.rounds
            + r.jobs.n * (max(x.need, sum(map(bool, x.tokens))) if x.clock is None else x.clock)
            - r.latency_offset
            for x in labels
        ]
        return min([*totals, r.upper]), sizes
