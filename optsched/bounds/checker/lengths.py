"""What lengths of requests prove, in exact integers: the leaf ``lengths``, which provers call, too.

*Lengths.* Let every request have a length w_j >= 0 such that no set of requests S can be served,
whenever they arrive, in fewer rounds than the sum of w_j over S. In a schedule those that run only
in the rounds (a, b] have lengths of b - a or less in all. So on one preemptive machine with these
times earliest due date first meets the schedule's ends as due dates, since no stretch of time has
more work than it is long. Shortest remaining processing time first has, at every moment, completed
as many as any rule can (Schrage 1968). So the k-th smallest end of the schedule is at least that
machine's. Several lists of lengths may be given, and for each k the largest counts. It is also at
least the k-th smallest a_j + o_j, and that of the machine of KV volume (`optsched.bounds.volume`).

*Walks.* Go through the uninterrupted runs of a schedule from the end backward, and look at the KV
at every u-th round only, the *marks*. At the last mark of its run a request with the peak p holds
p - u + 1 or more tokens, and u less at each of the floor(o / u) marks at which it is there at
least. In units of u tokens, rounded down, that is y = floor((p - u + 1) / u), y - 1, and so on, and
M is room for floor(M / u). Forget a request once it would hold its *floor* f or less, and those
with y <= f altogether. Then a state is a multiset of (tokens, floor), and a schedule is a walk: it
places requests where they fit and steps to the mark before, from no requests to none. If no walk
places more lengths W than it has steps, the requests of S have lengths of at most as many as
there are marks. Of b - a rounds every u-th is a mark; the mean over the u ways to choose them says
that the sum of w_j = u W_j is at most b - a.

A request is in the walk for y - f marks, all of them later than a_j + o_j - u (y - f): its release.

*Check.* The largest surplus of lengths over steps from each state on to none is found by iteration
to a fixed point. It is refused when that of no requests exceeds 0.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import (
    Budget,
    Columns,
    TooLarge,
    expect,
    expect_fields,
    integer,
    integers,
)
from optsched.bounds.checker.requests import srpt_completions

# The max states of a graph and lists of a leaf, and a bound on lengths and on their unit.
MAX_STATES = 20_000
MAX_LISTS = 64
_HIGHEST = 1 << 40
Ints = NDArray[np.int64]
Kind = tuple[int, int]
"""Tokens at the last mark, and the floor, in units of u tokens."""


class Graph(NamedTuple):
    """States of walks: the one a step before, and who can be placed (source, kind, target).

    State 0 is that of no requests, and ``source`` ascends.
    """

    step: Ints
    source: Ints
    kind: Ints
    target: Ints

    def allow(self, length: Ints, unit: int, budget: Budget) -> bool:
        """Return whether no walk from no requests to none places more lengths than its steps.

        A step is as long as ``unit``. The surplus of a state is the max, over walks from there to
        no requests, of the lengths placed less the steps.
        """
        surplus = np.full(len(self.step), -(1 << 60), np.int64)  # no walk is known yet
        surplus[0] = 0
        first = np.flatnonzero(np.diff(self.source, prepend=-1))  # of the arcs of each source
        # A walk that visits no state twice has fewer arcs than there are states. What still rises
        # after so many goes round a circle that gains.
        for _ in range(len(self.step) + 1):
            budget.spend_compiled(len(self.step) + len(self.source))
            raised = np.maximum(surplus, surplus[self.step] - unit)
            if len(first):
                placed = surplus[self.target] + length[self.kind]
                sources, max_placed = self.source[first], np.maximum.reduceat(placed, first)
                raised[sources] = np.maximum(raised[sources], max_placed)
            # A fixed point: no longer walk has a larger surplus.
            if (raised == surplus).all():
                return True

            surplus = raised
            if surplus[0] > 0:
                break

        return False


class Walks(NamedTuple):
    """The different kinds, the graph of their walks, and of each request the number of its kind.

    It is -1 for those that walks forget. ``release`` is in rounds.
    """

    kinds: list[Kind]
    graph: Graph
    kind: list[int]
    release: list[int]
    every: int

    def ends(self, length: list[int], unit: int) -> list[int]:
        """Return the ends on the machine of lengths in 1 / ``unit`` marks, rounded up to rounds."""
        work = [self.every * length[k] if k >= 0 else 0 for k in self.kind]
        ends_in_marks = srpt_completions([at * unit for at in self.release], work)
        return [-(-end // unit) for end in ends_in_marks]


def walks_of(
    columns: Columns, every: int, floor: int, max_states: int = MAX_STATES
) -> Walks | None:
    """Return the walks of requests, or None if they have more states than allowed.

    ``every`` is u of the module's text, and floors are multiples of ``floor``.
    """
    kind_of, release = list[Kind | None](), list[int]()
    for a, s, o in zip(columns.arrival, columns.prompt, columns.output, strict=True):
        # y of the module's text, and at how many marks the request is there at least.
        tokens, marks = (s + columns.offset + o - every) // every, o // every
        # It is forgotten after its last mark, or at a larger floor, so that states are fewer, but
        # stays for one mark at least (tokens - 1).
        own_floor = -(-max(tokens - marks, 1) // floor) * floor
        kind = (tokens, min(own_floor, tokens - 1)) if marks and tokens > floor else None
        kind_of.append(kind)
        release.append(a + o - (every * (kind[0] - kind[1]) if kind else 0))

    kinds = sorted({kind for kind in kind_of if kind})
    graph = _graph_of(kinds, columns.capacity // every, max_states)
    number = {kind: k for k, kind in enumerate(kinds)}
    numbers = [number[kind] if kind else -1 for kind in kind_of]
    return graph and Walks(kinds, graph, numbers, release, every)


def _graph_of(kinds: list[Kind], capacity: int, max_states: int) -> Graph | None:
    """Return the graph of all states that walks reach, or None if they are more than allowed."""
    states: list[tuple[Kind, ...]] = [()]
    number, steps, arcs = {states[0]: 0}, list[int](), list[tuple[int, int, int]]()

    def number_of(state: tuple[Kind, ...]) -> int:
        if state not in number:
            number[state] = len(states)
            states.append(state)

        return number[state]

    # States are numbered as they are met; with too many of them there is no graph.
    while len(steps) < len(states) <= max_states:
        source = len(steps)
        state = states[source]
        space = capacity - sum(tokens for tokens, _ in state)
        steps.append(number_of(tuple((x - 1, f) for x, f in state if x - 1 > f)))
        for k, kind in enumerate(kinds):
            # Kinds ascend in tokens, so none of the next ones fits.
            if kind[0] > space:
                break

            arcs.append((source, k, number_of(tuple(sorted((*state, kind))))))

    columns = np.array(arcs, np.int64).reshape(-1, 3).T
    return Graph(np.array(steps, np.int64), *columns) if len(states) <= max_states else None


def least_ends(columns: Columns) -> list[int]:
    """Return the least k-th end of requests alone and of the machine of KV volume, in rounds."""
    held = [s + columns.offset - 1 for s in columns.prompt]
    # The KV of a run, q + 1 to q + o, added up over its rounds.
    volume = [q * o + o * (o + 1) // 2 for q, o in zip(held, columns.output, strict=True)]
    # In a unit of 1 / M rounds a token of KV takes the machine one unit.
    capacity = columns.capacity
    by_volume = srpt_completions([a * capacity for a in columns.arrival], volume)
    alone = sorted(map(int.__add__, columns.arrival, columns.output))
    return [max(a, -(-v // capacity)) for a, v in zip(alone, by_volume, strict=True)]


def lengths_total(columns: Columns, leaf: dict[str, Any], unit: int, budget: Budget) -> int:
    """Return the total latency that the leaf proves; its lengths are in 1 / ``unit`` marks."""
    expect_fields(leaf, "lengths", ("relaxation", "every", "floor", "lengths"))
    every = integer(leaf["every"], "lengths: every")
    floor = integer(leaf["floor"], "lengths: floor")
    expect(min(every, floor) >= 1, f"lengths: found {every} and {floor}; expected integers >= 1")
    expect(unit < _HIGHEST, f"denominator: found {unit}; expected less than {_HIGHEST}")
    lists = leaf["lengths"]
    right = isinstance(lists, list) and 1 <= len(lists) <= MAX_LISTS
    expect(right, f"lengths: found others; expected 1 to {MAX_LISTS} lists")
    walks = walks_of(columns, every, floor)
    if walks is None:
        raise TooLarge(f"lengths: found more than {MAX_STATES} states; too large to check")

    budget.spend(20 * len(walks.graph.source) + 50 * len(walks.kind) * (1 + len(lists)))
    # For each k the largest k-th end of all lists counts.
    ends = least_ends(columns)
    for k, values in enumerate(lists):
        length = integers(values, f"lengths: list {k}", count=len(walks.kinds), highest=_HIGHEST)
        right = walks.graph.allow(np.array(length, np.int64), unit, budget)
        expect(right, f"lengths: list {k}: found a walk of fewer steps; expected none")
        ends = list(map(max, ends, walks.ends(length, unit)))

    return sum(ends) - sum(columns.arrival)
