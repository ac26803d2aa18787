"""`optsched.bounds.checker.enumeration` in plain Python, without its code: slow and readable.

It needs the last graph, each node's cost to the end, and the requests. Counters are of single
kinds, where the compiled ones are of groups. More labels are deleted.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any, NamedTuple

from optsched.bounds.checker.parts import Budget, TooLarge

MAX_LABELS = 3_000_000
"""Max labels of one layer."""
_BEYOND = 255


class Requests(NamedTuple):
    """Requests by kind, and the round at which paths join the clock, 0 for no clock.

    A kind has an arrival, a peak, a floor and a number of requests.
    """

    arrival: list[int]
    peak: list[int]
    floor: list[int]
    copies: list[int]
    capacity: int
    clock: int


class _Label(NamedTuple):
    """A graph node, and the requests placed on a way there."""

    node: int
    cost: int  # in rounds
    clock: int  # the present round, -1 without a clock
    need: int  # the least clock at which it may join
    left: tuple[int, ...]  # of each kind
    tokens: tuple[int, ...]  # of live requests, in this round and those before it


class Enumeration:
    """The labels of schedules that may cost at most ``cutoff``, over the denominator ``unit``."""

    def __init__(
        self, graph: Any, rest: list[Any], pi: list[int], unit: int, cutoff: int,
        requests: Requests, budget: Budget
    ) -> None:  # fmt: skip
        self._graph, self._rest, self._pi, self._unit = graph, rest, pi, unit
        self._cutoff, self._of, self._budget = cutoff, requests, budget
        self._timed = any(requests.arrival)
        self._step = max(0, cutoff - rest[0]) // _BEYOND + 1
        self._never, self._once = self._counters()

    def _counters(self) -> tuple[list[bytearray], list[bytearray]]:
        """Return what the cost to the end rises by with no and with one more of each kind."""
        kinds, rest, step = len(self._pi), self._rest, self._step
        never = [bytearray([_BEYOND]) * kinds for _ in rest]
        once = [bytearray([_BEYOND]) * kinds for _ in rest]
        never[-1] = bytearray(kinds)
        for u in range(len(rest) - 2, -1, -1):
            if rest[u] is None:
                continue
            for v, label in self._graph.arcs(u):
                if rest[v] is None:
                    continue
                self._budget.spend(1 + kinds)
                more = rest[v] - rest[u] + label.rounds * self._unit
                prices = sorted((-self._pi[k], k) for k in label.kinds)
                for k in range(kinds):
                    others = [c for c, j in prices[:2] if j != k] if prices else [0]
                    if others:
                        a, b = divmod(more + others[0], step)[0], never[v][k]
                        never[u][k] = min(never[u][k], a + b)
                        once[u][k] = min(once[u][k], a + once[v][k])
                for price, k in prices:
                    once[u][k] = min(once[u][k], (more + price) // step + never[v][k])
        return never, once

    def _may(self, node: int, so_far: int, left: tuple[int, ...]) -> bool:
        """Whether a label may be completed at a cost up to the cutoff."""
        if self._rest[node] is None:
            return False
        self._budget.spend(len(left))
        never, once = self._never[node], self._once[node]
        extra = max(
            [0]
            + [never[k] for k, x in enumerate(left) if x == 0]
            + [once[k] for k, x in enumerate(left) if x == 1]
        )
        return bool(so_far + self._rest[node] + extra * self._step <= self._cutoff)

    def empty(self) -> bool:
        """Whether no schedule costs at most the cutoff."""
        of = self._of
        labels = [_Label(0, 0, -1, of.clock, tuple(of.copies), ())]
        n = sum(of.copies)
        for m in range(n):
            found: dict[tuple[int, ...], list[_Label]] = {}
            count = 0
            for label in labels:
                for new in self._following(label, m):
                    count += self._enter(new, found.setdefault(new.left, []), m + 1)
                    if count > MAX_LABELS:
                        raise TooLarge(f"found more than {MAX_LABELS} labels; too large to check")
            self._swap(found, m + 1)
            labels = [label for alike in found.values() for label in alike]
        shift = sum(c * p for c, p in zip(of.copies, self._pi, strict=True))
        return all(
            (label.cost + n * self._last(label)) * self._unit - shift > self._cutoff
            for label in labels
        )

    def _last(self, label: _Label) -> int:
        """Return the rounds from a complete schedule's start to now."""
        live = len(label.tokens)
        return max(label.need, live) if label.clock < 0 else label.clock

    def _following(self, label: _Label, m: int) -> list[_Label]:
        """Return the labels with one more request placed."""
        of, out = self._of, []
        placed = sum(
            (c - x) * p for c, x, p in zip(of.copies, label.left, self._pi, strict=True)
        )  # fmt: skip
        waiting = [(label.node, 0, label.clock)]
        while waiting:
            node, passed, clock = waiting.pop()
            while True:
                cost = label.cost + m * passed
                so_far = cost * self._unit - placed
                if not self._may(node, so_far, label.left):
                    break
                tokens = label.tokens[passed:]
                room = of.capacity - sum(tokens[:1])
                early = clock < 0 and label.need - passed > of.clock
                onward = node if self._graph.loop[node] >= 0 and (tokens or early) else -1
                for v, arc in self._graph.arcs(node):
                    if arc.what == "round":
                        onward = v
                    elif arc.what == "join" and not early:
                        waiting.append((v, passed, of.clock))
                    for k in arc.kinds:
                        left = (*label.left[:k], label.left[k] - 1, *label.left[k + 1 :])
                        if (
                            left[k] >= 0
                            and of.peak[k] <= room
                            and self._may(v, so_far - self._pi[k], left)
                        ):
                            need = self._need(label.need - passed, clock, k)
                            out.append(
                                _Label(v, cost, clock, need, left, self._with(tokens, k))
                            )  # fmt: skip
                if onward < 0:
                    break
                node, passed = onward, passed + 1
                clock = max(clock - 1, -1)
        return out

    def _need(self, need: int, clock: int, k: int) -> int:
        """Return the least clock at which a label may join that has just placed kind k."""
        of = self._of
        if self._timed and clock < 0:
            need = max(need, of.arrival[k] + of.peak[k] - of.floor[k] + 1)
        return max(need, of.clock)

    def _with(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """Return the tokens with those of a request of kind k, which has just been placed."""
        own = range(self._of.peak[k], self._of.floor[k] - 1, -1)
        short = min(len(own), len(tokens))
        both = tuple(x + y for x, y in zip(own, tokens, strict=False))
        return (*both, *own[short:], *tokens[short:])

    def _enter(self, new: _Label, alike: list[_Label], m: int) -> int:
        """Add a label to those with the same requests; return by how many these are more."""
        self._budget.spend(1 + len(alike))
        if any(self._deletes(old, new, m) for old in alike):
            return 0
        kept = [old for old in alike if not self._deletes(new, old, m)]
        change = len(kept) + 1 - len(alike)
        alike[:] = [*kept, new]
        return change

    def _swap(self, found: dict[tuple[int, ...], list[_Label]], m: int) -> None:
        """Delete labels by those that have placed a larger request instead of one of theirs."""
        for left, alike in found.items():
            self._budget.spend(len(left) ** 2)
            for i, j in permutations(range(len(left)), 2):
                if left[i] > 0 and left[j] < self._of.copies[j] and self._larger(i, j):
                    other = [x + (k == j) - (k == i) for k, x in enumerate(left)]
                    better = found.get(tuple(other), [])
                    self._budget.spend(len(alike) * len(better))
                    alike[:] = [b for b in alike if not any(self._deletes(a, b, m) for a in better)]

    def _larger(self, i: int, j: int) -> bool:
        """Whether kind i is at least kind j in peak, output and arrival + output."""
        of = self._of
        output = [p - f + 1 for p, f in zip(of.peak, of.floor, strict=True)]
        ready = [a + o for a, o in zip(of.arrival, output, strict=True)]
        return all(size[i] >= size[j] for size in (of.peak, output, ready))

    def _deletes(self, a: _Label, b: _Label, m: int) -> bool:
        """Whether a, some rounds later, is where b is and holds no more tokens at any time."""
        waits, join = (b.cost - a.cost) // m, self._of.clock
        if a.clock >= 0 and b.clock >= 0:
            if a.clock - b.clock > waits:
                return False
            waits = a.clock - b.clock
        elif a.clock >= 0:
            return False
        elif b.clock >= 0:
            before = waits - (join - b.clock)
            if before < 0 or a.need - before > join:
                return False
        elif max(a.need - waits, join) > b.need:
            return False
        if waits < 0:
            return False
        later = a.tokens[waits:]
        return len(later) <= len(b.tokens) and all(
            x <= y for x, y in zip(later, b.tokens, strict=False)
        )
