"""`optsched.bounds.checker.period` in Python integers, without its code: slow and readable.

Costs are Python integers, so that none can wrap. A node that no path reaches has the cost None, so
that no cost, however large, can be mistaken for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from readable_labels import Enumeration, Requests

from optsched.bounds.checker import parts
from optsched.bounds.checker.parts import Budget, TooLarge

MAX_NODES = 5_000_000
"""Max nodes of one level."""
MAX_ARCS = 40_000_000
"""Max arcs of one level, of 8 bytes each."""
MAX_CELLS = 400_000_000
"""Max cells of 8 bytes for the states and labels of one level."""


def _limit(count: int, most: int, what: str) -> None:
    if count > most:
        raise TooLarge(f"a level of more than {most} {what}; too large to check")


class _Label(NamedTuple):
    """What an arc does: it passes rounds, or places a request of one of some kinds."""

    rounds: int
    what: str
    kinds: tuple[int, ...]


class Graph:
    """A graph whose arcs ascend in the order of the nodes, with the end as the last node.

    Arcs are sorted by their source: node u has the arcs ``first[u]`` to ``first[u + 1] - 1``.
    ``loop[u]`` is the cost of a round that leaves u as it is, or -1.
    """

    def __init__(self) -> None:
        self.first, self.loop = array("i", [0]), array("q")
        self.target, self.label = array("i"), array("i")
        self.labels: list[_Label] = []
        self._number: dict[_Label, int] = {}
        self.cells = 0

    def number(self, label: _Label) -> int:
        """Return the number of a label, which is new if it has none yet."""
        found = self._number.setdefault(label, len(self.labels))
        if found == len(self.labels):
            self.labels.append(label)
            self.cells += 40 + len(label.kinds)
        return found

    def add_node(self, arcs: list[tuple[int, int]], loop: int) -> None:
        """Add a node that comes after all others, with its arcs: targets and labels."""
        total = len(self.target) + len(arcs)
        _limit(total, MAX_ARCS, "arcs")
        for target, label in arcs:
            self.target.append(target)
            self.label.append(label)
        self.first.append(total)
        self.loop.append(loop)

    def arcs(self, u: int) -> list[tuple[int, _Label]]:
        """Return the targets and labels of a node's arcs."""
        mine = range(self.first[u], self.first[u + 1])
        return [(self.target[a], self.labels[self.label[a]]) for a in mine]

    def costs_to_end(self, pi: list[int], unit: int) -> list[int | None]:
        """Return each node's min cost to the end, or None where no path leads to it."""
        price = [r * unit - max((pi[k] for k in kinds), default=0) for r, _, kinds in self.labels]
        rest: list[int | None] = [None] * len(self.loop)
        rest[-1] = 0
        for u in range(len(rest) - 2, -1, -1):
            best = None
            for a in range(self.first[u], self.first[u + 1]):
                after = rest[self.target[a]]
                if after is not None and (best is None or after + price[self.label[a]] < best):
                    best = after + price[self.label[a]]
            rest[u] = best
        return rest


def base(kinds: list[Any], copies: list[int], capacity: int, clock: int) -> Graph:
    """Return the graph of the nodes (m) without a clock, then of (t, m) with one, t down to 0.

    A clock of any length is valid; 0 means none. By round t only requests that are ready and
    small enough can have completed, so that m is at least n minus their number.
    """
    n, ready = sum(copies), [a + p - f + 1 for a, p, f in kinds]
    rounds = clock + 1 if clock else 0
    sizes = sorted(((p - f + 1) * (p + f) // 2, k) for k, (_, p, f) in enumerate(kinds))
    least = []  # by round, the min m: all other requests have completed
    for t in range(rounds):
        volumes = accumulate(v for v, k in sizes if ready[k] <= t for _ in range(copies[k]))
        least.append(n - sum(v <= capacity * t for v in volumes))
    graph = Graph()
    place = graph.number(_Label(0, "place", tuple(range(len(kinds)))))
    join, over = graph.number(_Label(0, "join", ())), graph.number(_Label(0, "end", ()))
    begin = n + 1  # of the nodes of the present round
    end = begin + sum(n + 1 - m for m in least)
    for m in range(n + 1):
        arcs = [(m + 1, place)] if m < n else []
        if rounds and m >= least[clock]:
            arcs.append((begin + m - least[clock], join))
        if m == n and not rounds:
            arcs.append((end, over))
        graph.add_node(arcs, m or -1)
    for t in range(rounds - 1, -1, -1):
        able = tuple(k for k, r in enumerate(ready) if r <= t)
        place, over = graph.number(_Label(0, "place", able)), graph.number(_Label(n * t, "end", ()))
        following = begin + n + 1 - least[t]
        for m in range(least[t], n + 1):
            arcs = [(begin + m + 1 - least[t], place)] if m < n and able else []
            if m == n:
                arcs.append((end, over))
            if t > 0 and m >= least[t - 1]:
                passed = graph.number(_Label(m, "round", ()))
                arcs.append((following + m - least[t - 1], passed))
            graph.add_node(arcs, -1)
        begin = following
    graph.add_node([], -1)
    return graph


class _Multisets:
    """The tracker of live items. Each has a weight, and a floor at which it vanishes."""

    start: Any = ()

    def __init__(
        self, kinds: list[Any], floors: list[int], copies: list[int], capacity: int
    ) -> None:
        self._peaks, self._floors = [p for _, p, _ in kinds], floors
        self._capacity = capacity
        self._heavy: dict[int, list[int]] = {floor: [] for floor in floors}
        for p, floor, n in sorted(zip(self._peaks, floors, copies, strict=True)):
            self._heavy[floor] += [p] * n
        self._item = cache(lambda w, floor: (w, floor))  # one object for equal ones

    def place(self, state: Any, k: int) -> Any:
        """Return the state with a request of kind k, or None if no schedule has it."""
        peak, floor = self._peaks[k], self._floors[k]
        if self.weight(state) + peak > self._capacity:
            return None
        if peak < floor:
            return state
        new = tuple(sorted((*state, self._item(peak, floor)), reverse=True))
        heavy = self._heavy[floor]
        alike = [w for w, own in new if own == floor]
        room = all(j <= len(heavy) - bisect_left(heavy, w) for j, w in enumerate(alike, 1))
        return new if room else None

    def step(self, state: Any) -> Any:
        """Return the state one round earlier."""
        return tuple(self._item(w - 1, floor) for w, floor in state if w > floor)

    def final(self, state: Any) -> bool:
        """Return whether a path may end here."""
        return not state

    def weight(self, state: Any) -> int:
        """Return the tokens held."""
        return sum(w for w, _ in state)


class _Nothing:
    """The tracker that distinguishes nothing."""

    start = ()

    def place(self, state: Any, k: int) -> Any:
        """Return the state with a request of kind k."""
        return state

    def step(self, state: Any) -> Any:
        """Return the state one round earlier."""
        return state

    def final(self, state: Any) -> bool:
        """Return whether a path may end here."""
        return True

    def weight(self, state: Any) -> int:
        """Return 0, since it knows nothing of the tokens held."""
        return 0


class _States:
    """A tracker's states by number, and the states that follow each, computed once."""

    def __init__(self, tracker: _Multisets | _Nothing, kinds: int, budget: Budget) -> None:
        self._tracker, self._kinds, self._budget = tracker, kinds, budget
        self._number: dict[Any, int] = {}
        self._state: list[Any] = []
        self._unknown = array("i", [-2]) * kinds
        self._after = array("i")  # by state and kind; -1: not allowed, -2: not known yet
        self._before = array("i")
        self.weight: list[int] = []
        self.cells = 0
        self.number(tracker.start)

    def number(self, state: Any) -> int:
        """Return the number of a state, which is new if it has none yet."""
        found = self._number.get(state)
        if found is None:
            found = self._number[state] = len(self._state)
            self.cells += 30 + len(state) + self._kinds // 2
            self._state.append(state)
            self._after += self._unknown
            self._before.append(-2)
            self.weight.append(self._tracker.weight(state))
        return found

    def after(self, s: int, k: int) -> int:
        """Return the state after placing kind k, or -1 if that is not allowed."""
        at = s * self._kinds + k
        found = self._after[at]
        if found == -2:
            self._budget.spend(2 + len(self._state[s]))
            new = self._tracker.place(self._state[s], k)
            found = self._after[at] = -1 if new is None else self.number(new)
        return found

    def before(self, s: int) -> int:
        """Return the state one round earlier."""
        if self._before[s] == -2:
            self._budget.spend(2 + len(self._state[s]))
            self._before[s] = self.number(self._tracker.step(self._state[s]))
        return self._before[s]

    def final(self, s: int) -> bool:
        """Return whether a path may end here."""
        return self._tracker.final(self._state[s])


def _product(
    graph: Graph, states: _States, rest: Any, pi: list[int], cutoff: int, unit: int, budget: Budget
) -> Graph:
    """Return the graph of the paths that graph and tracker allow and that may cost ``cutoff``.

    ``rest`` is each node's cost to the end. If it is None, nothing is known and every path is
    kept. If there is no path, the graph returned has no nodes.
    """
    out = Graph()
    cost: list[int | None] = []  # of each node, as they are met: min so far from the root
    place = array("i")  # its number in the graph returned
    buckets: list[dict[int, int] | None] = [None] * len(graph.loop)

    def node(u: int, s: int) -> int:
        mine = buckets[u]
        if mine is None:
            mine = buckets[u] = {}
        if s not in mine:
            _limit(len(cost) + 1, MAX_NODES, "nodes")
            _limit(states.cells + out.cells, MAX_CELLS, "cells")
            mine[s] = len(cost)
            cost.append(None)
            place.append(-1)
        return mine[s]

    budget.spend(len(graph.loop) + len(graph.target) // 4)
    cost[node(0, 0)] = 0
    for u, loop in enumerate(graph.loop):
        mine = buckets[u] or {}
        order = list(mine)
        for s in order if loop >= 0 else ():  # every state that rounds lead to is added
            if (lighter := states.before(s)) not in mine:
                node(u, lighter)
                order.append(lighter)
        if loop >= 0:
            order.sort(key=states.weight.__getitem__, reverse=True)
        for s in order:
            here = cost[mine[s]]
            place[mine[s]] = len(out.loop)
            moves = loop >= 0 and states.before(s) != s
            leaving = [(u, _Label(loop, "round", ()))] if moves else []
            leaving += graph.arcs(u) if here is not None else []
            arcs = []
            for v, label in leaving:
                if here is None or (rest is not None and rest[v] is None):
                    continue
                budget.spend(1 + len(label.kinds))
                slack = None if rest is None else cutoff - here - rest[v]
                for new, part in _moves(states, s, label, pi, unit, slack):
                    y = node(v, new)
                    then = here + part.rounds * unit - max((pi[k] for k in part.kinds), default=0)
                    before = cost[y]
                    cost[y] = then if before is None else min(before, then)
                    arcs.append((y, out.number(part)))
            out.add_node(arcs, -1 if moves else loop)
        buckets[u] = None
    if not mine:  # of the end, the last one
        return Graph()
    out.target = array("i", map(place.__getitem__, out.target))
    return out


def _moves(
    states: _States, s: int, label: _Label, pi: list[int], unit: int, slack: int | None
) -> list[tuple[int, _Label]]:
    """Return the states that an arc leads to at a cost up to ``slack``, each with its label."""
    if not label.kinds:
        if slack is not None and label.rounds * unit > slack:
            return []
        if label.what == "end" and not states.final(s):
            return []
        return [(states.before(s) if label.what == "round" else s, label)]
    targets: dict[int, list[int]] = {}
    for k in label.kinds:
        if slack is None or -pi[k] <= slack:
            targets.setdefault(states.after(s, k), []).append(k)
    targets.pop(-1, None)
    return [(new, label._replace(kinds=tuple(part))) for new, part in targets.items()]


class Plain:
    """The graph of a period, refined level by level (`optsched.bounds.checker.ramp.Replay`)."""

    def __init__(
        self, requests: parts.Requests, unit: int, multipliers: list[list[int]], budget: Budget
    ) -> None:
        self._kinds, self._copies, self._capacity, self._clock = requests
        self.graph, self._unit, self._budget = base(*requests), unit, budget
        self.rest: list[int | None] | None = None

    def refine(self, floors: list[int] | None, pi: list[int], cutoff: int) -> bool:
        """Take the product with a tracker, for multipliers; return whether a path is left.

        Before the first multipliers, nothing is deleted.
        """
        if floors is None:
            tracker: _Multisets | _Nothing = _Nothing()
        else:
            tracker = _Multisets(self._kinds, floors, self._copies, self._capacity)
        states = _States(tracker, len(self._kinds), self._budget)
        self.graph = _product(self.graph, states, self.rest, pi, cutoff, self._unit, self._budget)
        return len(self.graph.loop) > 0

    def bound(self, pi: list[int]) -> int | None:
        """Return the min cost of a path, in units, and keep each node's cost to the end."""
        self.rest = self.graph.costs_to_end(pi, self._unit)
        return self.rest[0]

    def none_left(self, pi: list[int], cutoff: int) -> bool:
        """Return whether no schedule costs at most the cutoff."""
        arrival, peak, floor = (list(of) for of in zip(*self._kinds, strict=True))
        of = Requests(arrival, peak, floor, self._copies, self._capacity, self._clock)
        rest = self.rest or []
        return Enumeration(self.graph, rest, pi, self._unit, cutoff, of, self._budget).empty()
