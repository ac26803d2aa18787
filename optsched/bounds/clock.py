"""One clock for all requests: the bound at low load.

docs/formulations.md, "One clock", says what prices leave open and why bounds of pieces add up.
`optsched.bounds.checker.clock` has the notation and the proof, and says what a node proves. The
clock stands still while a request does own work that nobody shares. On it request i begins at s_i
or later, and ends at e_i = s_i + d + D_i or later, with d a fixed cost and D_i what its later
tokens need of the clock. How long it waits beyond b_i >= s_i is u >= 0, and the u that costs least
counts.

*Pieces.* Where pieces end is chosen by dynamic programming, with a short search for each piece. A
longer search follows for the pieces that were chosen.

*Search.* The node with the least value is taken first. The request i that would gain most from
u > 0 is decided against the last k that it waits for. The least value among open nodes is a bound,
whenever the search ends. A node where no undecided pair would gain keeps its value.
"""

import heapq
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from optsched.bounds.base import Bound, BoundTask, Proof, only_by_name
from optsched.bounds.batch import PROVED_FOR, part_of
from optsched.bounds.checker.clock import AFTER, BEFORE, Marks, node_value, table_of
from optsched.bounds.checker.parts import Ints
from optsched.bounds.checker.requests import Part
from optsched.bounds.cuts import cut_where_quiet
from optsched.bounds.leaves import TICKS_PER_SECOND, clock_leaf, parts, seconds_of, work_leaf
from optsched.problem.budget import Budget
from optsched.problem.kernel import njit

Leaf: TypeAlias = dict[str, Any]
# The fewest and the most requests between places where the trace may be cut.
_FEWEST, _MOST = 3, 6
# A piece is at most so many of these stretches.
_TOGETHER = 5
# Nodes of the short search for each piece, and of the longer one for those that were chosen.
_FEW_NODES, _MANY_NODES = 30, 1000


def search(part: Part, first: int, last: int, nodes: int) -> tuple[int, Leaf]:
    """Return what a search proves about requests ``first`` to before ``last``, and its leaf."""
    # Each piece counts from its own first arrival, in units of 2**shift ticks.
    arrival = [at - part.arrival[first] for at in part.arrival[first:last]]
    piece = part._replace(arrival=arrival, requests=part.requests[first:last])
    table, fixed, shift = table_of(piece)
    value, branches = search_tree(table, fixed, nodes)
    return int(value) << shift, clock_leaf(branches)


@njit
def _next_pair(table: Ints, fixed: int, decided: Marks, details: Ints) -> tuple[int, int]:
    """Return the pair (i, k) to decide next, or -1 twice.

    ``decided`` is 0 for a pair of which nothing is decided yet. ``details`` are of `node_value`: by
    request s, b, the best u, and what it gains over u = 0.
    """
    begins, bases, waits, gains = details
    n, largest = len(table), 0
    first = second = -1

    for i in range(n):
        # While i waits, from b_i to b_i + u: the request that ends last, or -1, and its end.
        last, latest = -1, bases[i]
        # Decide about the request that gains most by waiting, and the last end that it waits for.
        for k in range(n if gains[i] > largest else 0):
            end = begins[k] + fixed + table[k, 2]  # e_k = s_k + d + D_k
            if k != i and decided[i, k] == 0 and latest < end <= bases[i] + waits[i]:
                last, latest = k, end

        if last >= 0:
            largest, first, second = gains[i], i, last

    return first, second


@njit(nogil=True)
def search_tree(table: Ints, fixed: int, nodes: int) -> tuple[int, Ints]:
    """Return the bound on total latency that a search of so many nodes proves, and its tree.

    ``table`` and ``fixed`` are those of the checker's `table_of`. By node, ``decided`` has what is
    decided about each pair, and ``pairs`` the pair (i, k) to decide next, -1 for none. Open nodes
    are a heap of (value, number). The tree is that of `_order_tree`.
    """
    n = len(table)
    decided = np.zeros((nodes + 2, n, n), np.int8)
    pairs = np.zeros((nodes + 2, 2), np.int64)
    children = np.zeros(nodes + 2, np.int64)  # the first of two, or 0
    details = np.empty((4, n), np.int64)
    value = max(0, node_value(table, fixed, decided[0], details)[0])
    pairs[0, 0], pairs[0, 1] = _next_pair(table, fixed, decided[0], details)
    open_nodes = [(value, 0)]
    used = 1

    # Every schedule belongs to an open node, so the least of their values is a bound.
    while True:
        value, at = heapq.heappop(open_nodes)
        i, k = pairs[at, 0], pairs[at, 1]
        # No pair would raise the least node, or there are not two more nodes to spend.
        if i < 0 or used + 2 > nodes:
            return value, _order_tree(n, pairs, children, used)

        children[at] = used
        for choice in (BEFORE, AFTER):
            for first in range(n):  # a slice takes seconds more to compile
                for second in range(n):
                    decided[used, first, second] = decided[at, first, second]

            decided[used, i, k] = choice
            more = node_value(table, fixed, decided[used], details)[0]
            pairs[used, 0], pairs[used, 1] = _next_pair(table, fixed, decided[used], details)
            # What is proved of all schedules of a node holds in each of its two cases.
            heapq.heappush(open_nodes, (max(value, more), used))
            used += 1


@njit
def _order_tree(n: int, pairs: Ints, children: Ints, used: int) -> Ints:
    """Return a code for each node of a tree, before those of its children.

    It is 0 without children, and 1 + i n + k for a node that decides about the requests i and k in
    ``pairs``. ``children`` has the first of two nodes that stand side by side, or 0.
    """
    branches = np.zeros(used, np.int64)
    stack = [0]
    for place in range(used):
        at = stack.pop()
        if children[at] > 0:
            branches[place] = 1 + pairs[at, 0] * n + pairs[at, 1]
            # The first child is pushed last, so that it comes first.
            stack.append(children[at] + 1)
            stack.append(children[at])

    return branches


def clock(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency in seconds (see the module's text for the proof)."""
    whole = part_of(task)
    alone = [whole.floor(request.chain) for request in whole.requests]
    arrival, chain = (np.array(column) / TICKS_PER_SECOND for column in (whole.arrival, alone))
    cuts = cut_where_quiet(arrival, arrival + chain, _FEWEST, _MOST)
    # By place, the time alone of all requests before it; by cut, the first request behind it.
    lowest, ends = [0, *accumulate(alone)], [0, *(last for _, last in cuts)]
    # Of all requests before each cut: the bound, where their last piece begins, and its leaf.
    best: list[tuple[int, int, Leaf]] = [(0, 0, work_leaf())]

    # Bounds of disjoint pieces add up, so the best division of what is before a cut is kept.
    for place in range(len(cuts)):
        together = best[place][0] + lowest[ends[place + 1]] - lowest[ends[place]]
        found = together, place, work_leaf()  # which proves no less than all of them alone
        for back in range(place, max(-1, place - _TOGETHER), -1):
            # The first piece is searched even without time.
            if budget.over and place > 0:
                break

            value, leaf = search(whole, ends[back], ends[place + 1], _FEW_NODES)
            if best[back][0] + value > found[0]:
                found = best[back][0] + value, back, leaf

        best.append(found)

    # Go back through the chosen pieces, and add what longer searches prove more of them.
    total, place, trees = best[-1][0], len(cuts), []
    while place > 0:
        before, back, leaf = best[place]
        if not budget.over:
            value, tried = search(whole, ends[back], ends[place], _MANY_NODES)
            if value > before - best[back][0]:
                total, leaf = total + value - (before - best[back][0]), tried

        trees.append((ends[back], ends[place] - 1, leaf))
        place = back

    return Proof(seconds_of(total), tree=parts("tel", trees[::-1]))


CLOCK = Bound(
    "clock",
    "one clock of fixed costs for all requests; best at low load",
    "second",
    ("tel",),
    clock,
    PROVED_FOR,
    searches=True,
    certifies=True,
    suits=only_by_name,
)
