"""Independent check of ramp leaves: one pass of the dynamic program per level, integers only.

The relaxation, the form of a leaf and why both are valid: `optsched.optimize.ramp.relaxation`, of
which no code is used here. Each level takes the product of the graph before with a tracker,
dropping what the multipliers before show to cost a period's ``value`` or more. The leaf proves the
sum over the periods of the least of ``value`` and what the last level leaves.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

_NEVER = 1 << 100
MAX_NODES = 5_000_000
"""Nodes of one level beyond which a leaf is refused."""


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)


def check_ramp(columns: Any, leaf: dict[str, Any]) -> int:
    """Return the total latency, in rounds, that a leaf proves no schedule to be below.

    ``columns`` has lists of integers ``arrival``, ``prompt`` and ``output``, ``capacity`` and
    ``offset`` (1 in generated, 0 in cached accounting). ValueError: malformed or too large.
    """
    _expect(set(leaf) == {"relaxation", "periods"}, "fields are not relaxation and periods")
    groups: list[list[tuple[int, int, int]]] = []
    latest = outputs = origin = 0
    for i in sorted(range(len(columns.arrival)), key=lambda i: (columns.arrival[i], i)):
        arrival, output = columns.arrival[i], columns.output[i]
        if not groups or arrival >= latest + outputs:
            groups.append([])
            outputs, origin = 0, arrival
        floor = columns.prompt[i] + columns.offset
        groups[-1].append((arrival - origin, floor + output - 1, floor))
        latest, outputs = arrival, outputs + output
    _expect(len(leaf["periods"]) == len(groups), f"periods: there are {len(groups)}")
    pairs = zip(groups, leaf["periods"], strict=True)
    return sum(_period(group, period, columns.capacity) for group, period in pairs)


def _period(requests: list[tuple[int, int, int]], period: Any, capacity: int) -> int:
    fields = {"value", "denominator", "clock", "levels"}
    _expect(set(period) == fields, "a period has unknown fields")
    value, unit, clock = period["value"], period["denominator"], period["clock"]
    right = type(value) is type(unit) is type(clock) is int and unit >= 1 and clock >= 0
    _expect(right, "value, denominator and clock: no integers, or below 1 or 0")
    proved = sum(peak - floor + 1 for _, peak, floor in requests)
    arrivals = sum(a for a, _, _ in requests)
    kinds = sorted(set(requests))
    kind_of = [kinds.index(r) for r in requests]
    copies = [kind_of.count(k) for k in range(len(kinds))]

    def per_kind(values: Any, name: str) -> list[int]:
        right = len(values) == len(kind_of) and all(type(v) is int for v in values)
        _expect(right, f"{name}: not {len(kind_of)} integers")
        out = [values[kind_of.index(k)] for k in range(len(kinds))]
        _expect(values == [out[k] for k in kind_of], f"{name}: equal requests have different ones")
        return out

    graph, loops = _base(kinds, copies, capacity, clock) if period["levels"] else ([], [])
    rest: list[int] = []  # each node's cost to the end
    pi: list[int] = []
    for level in period["levels"]:
        fields = {"floors", "counters", "multipliers"}
        _expect(set(level) == fields, "a level has unknown fields")
        cutoff = (value - 1 + arrivals) * unit - sum(map(int.__mul__, copies, pi))
        if level["floors"] is None:
            tracker = _counters([{kind_of[i] for i in g} for g in level["counters"]], copies)
        else:
            _expect(not level["counters"], "a level has floors or counters")
            tracker = _multisets(kinds, per_kind(level["floors"], "floors"), copies, capacity)
        graph, loops = _product(graph, loops, tracker, rest, pi, cutoff, unit)
        pi = per_kind(level["multipliers"], "multipliers")
        rest = [_NEVER] * len(graph)
        rest[-1:] = [0][: len(graph)]
        for u in range(len(graph) - 2, -1, -1):
            for v, fixed, _, members in graph[u]:
                if rest[v] < _NEVER:
                    step = fixed * unit - max([pi[k] for k in members], default=0)
                    rest[u] = min(rest[u], rest[v] + step)
        if not graph or rest[0] == _NEVER:
            return value
        proved = -(-(rest[0] + sum(map(int.__mul__, copies, pi))) // unit) - arrivals
    return min(value, proved)


def _base(kinds: list[Any], copies: list[int], capacity: int, clock: int) -> Any:
    """Return arcs (target, rounds, what, kinds) and loops of (m), then (t, m) for t to 0.

    A clock is right whatever its length, also none at all, which 0 stands for.
    By round t at most ``done[t]`` requests have completed: so many are ready and small enough.
    """
    n, ready = sum(copies), [a + p - f + 1 for a, p, f in kinds]
    clock = clock or -1
    _expect((clock + 1) * (n + 1) <= MAX_NODES, f"a clock of {clock} rounds is too long")
    sizes = sorted(((p - f + 1) * (p + f) // 2, k) for k, (_, p, f) in enumerate(kinds))
    done = []
    for t in range(clock + 1):
        volumes = accumulate(v for v, k in sizes if ready[k] <= t for _ in range(copies[k]))
        done.append(sum(v <= capacity * t for v in volumes))
    keys = [(-1, m) for m in range(n + 1)]
    keys += [(t, m) for t in range(clock, -1, -1) for m in range(n - done[t], n + 1)]
    number = {key: u for u, key in enumerate(keys)}
    graph: list[list[Any]] = [[] for _ in range(len(keys) + 1)]
    for (t, m), arcs in zip(keys, graph, strict=False):
        able = tuple(k for k, r in enumerate(ready) if t < 0 or r <= t)
        if m < n and able:
            arcs.append((number[t, m + 1], 0, "place", able))
        if t < 0 and (clock, m) in number and clock >= 0:
            arcs.append((number[clock, m], 0, "join", ()))
        if m == n and (t >= 0 or clock < 0):
            arcs.append((len(keys), n * max(t, 0), "end", ()))
        if t > 0 and (t - 1, m) in number:
            arcs.append((number[t - 1, m], m, "round", ()))
    return graph, [m if t < 0 and m else -1 for t, m in keys] + [-1]


# A tracker is (start, place(state, kind), step(state), final(state), weight(state)).
def _multisets(kinds: Any, floors: list[int], copies: list[int], capacity: int) -> Any:
    for (_, _, f), up in zip(kinds, floors, strict=True):
        _expect(f <= up, f"floors: {up} is below {f}")
    peaks = [p for _, p, _ in kinds]

    @cache
    def room(floor: int, w: int) -> int:
        mine = zip(floors, peaks, copies, strict=True)
        return sum(n for own, p, n in mine if own == floor and p >= w)

    def place(state: Any, k: int) -> Any:
        if weight(state) + peaks[k] > capacity:
            return None
        if peaks[k] < floors[k]:
            return state
        new = tuple(sorted((*state, (peaks[k], floors[k])), reverse=True))
        alike = [w for w, floor in new if floor == floors[k]]
        return new if all(j <= room(floors[k], w) for j, w in enumerate(alike, 1)) else None

    def step(state: Any) -> Any:
        return tuple((w - 1, floor) for w, floor in state if w > floor)

    def weight(state: Any) -> int:
        return sum(w for w, _ in state)

    return (), place, step, lambda s: not s, weight


def _counters(groups: list[set[int]], copies: list[int]) -> Any:
    full = tuple(sum(copies[k] for k in group) for group in groups)

    def place(state: Any, k: int) -> Any:
        new = tuple(c + (k in group) for c, group in zip(state, groups, strict=True))
        return new if all(c <= most for c, most in zip(new, full, strict=True)) else None

    return (0,) * len(groups), place, lambda s: s, lambda s: s == full, lambda s: 0


def _product(
    graph: Any, loops: Any, tracker: Any, rest: Any, pi: Any, cutoff: int, unit: int
) -> Any:  # fmt: skip
    """Return the graph of the paths that both take and that may cost at most ``cutoff``."""
    start, place, step, final, weight = tracker
    memo: dict[Any, Any] = {}
    cost: list[dict[Any, int]] = [{} for _ in graph]  # of each node and state: least so far
    number: list[dict[Any, int]] = [{} for _ in graph]
    cost[0][start] = 0
    arcs: list[list[Any]] = []
    out_loops: list[int] = []
    for u, bucket in enumerate(cost):
        todo = list(bucket) if loops[u] >= 0 else []
        while todo:
            if (new := step(todo.pop())) not in bucket:
                bucket[new] = _NEVER
                todo.append(new)
        for state in sorted(bucket, key=weight, reverse=True) if loops[u] >= 0 else bucket:
            number[u][state] = len(arcs)
            arcs.append([])
            _expect(len(arcs) <= MAX_NODES, f"more than {MAX_NODES} nodes; too large to check")
            moves = loops[u] >= 0 and step(state) != state
            out_loops.append(-1 if moves else loops[u])
            for v, fixed, what, members in [(u, loops[u], "round", ())] * moves + graph[u]:
                slack = cutoff - bucket[state] - rest[v] if rest else _NEVER
                targets: dict[Any, list[int]] = {}
                for k in members:
                    if not pi or -pi[k] <= slack:
                        if (state, k) not in memo:
                            memo[state, k] = place(state, k)
                        targets.setdefault(memo[state, k], []).append(k)
                targets.pop(None, None)
                if not members and fixed * unit <= slack and (what != "end" or final(state)):
                    targets[step(state) if what == "round" else state] = []
                for new, ks in targets.items():
                    more = fixed * unit - (max(pi[k] for k in ks) if ks and pi else 0)
                    cost[v][new] = min(cost[v].get(new, _NEVER), bucket[state] + more)
                    arcs[-1].append((v, new, fixed, what, ks))
    if not cost[-1]:
        return [], []
    return [[(number[v][new], *more) for v, new, *more in mine] for mine in arcs], out_loops
