"""One clock for all requests: the bound at low load.

docs/formulations.md, "One clock", says what prices leave open and why bounds of pieces add up.
`optsched.bounds.checker.clock` has the proof, and `optsched.bounds.clock_search` the search. Where
pieces end is chosen by dynamic programming, with a short search for each piece. A longer search
follows for the pieces that were chosen.
"""

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import Bound, BoundTask, Proof, only_by_name
from optsched.bounds.batch import PROVED_FOR, unavoidable_work
from optsched.bounds.clock_search import Piece, searched
from optsched.bounds.cuts import cut_where_quiet
from optsched.bounds.leaves import clock_leaf, parts
from optsched.problem.budget import Budget

_SAFETY = 1e-9
_FEWEST, _MOST = 3, 6
"""Requests between places where the trace may be cut."""
_TOGETHER = 5
"""A piece goes over at most so many of them."""
_FEW_NODES, _MANY_NODES = 30, 1000
_LARGEST_SHARE = 0.99

Branches = NDArray[np.int64]
_ROOT: Branches = np.zeros(1, np.int64)
"""The tree of a search that decides nothing."""


def piece_of(task: BoundTask) -> Piece:
    """Return the requests of a task in order of arrival, with the largest valid shares."""
    instance, cost = task.instance, task.batch_cost
    work = unavoidable_work(instance, cost)
    order = np.argsort(instance.release_times, kind="stable")
    safe = 1 - _SAFETY
    fixed = cost.layers / 1000.0 * (cost["base"] + cost["prefill_base"]) * safe
    share = np.minimum(work.decode_share[order], _LARGEST_SHARE)
    decode = (work.chain - work.first)[order] * safe

    return Piece(
        arrival=instance.release[order],
        prefill=work.own_prefill[order],
        fixed=fixed,
        need=fixed + (1 - share) * decode,
        rate=share / (1 - share),
        slack=share * np.minimum(work.longest_step[order], decode),
    )


def _part(piece: Piece, first: int, last: int) -> Piece:
    """Return the requests from ``first`` to before ``last``."""
    columns = (x[first:last] if isinstance(x, np.ndarray) else x for x in piece)
    part = Piece._make(columns)
    return part._replace(arrival=part.arrival - piece.arrival[first])


def clock(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency in seconds (see the module's text for the proof)."""
    whole = piece_of(task)
    alone = whole.prefill + whole.need + whole.rate * (whole.need - whole.fixed)
    cuts = cut_where_quiet(whole.arrival, whole.arrival + alone, _FEWEST, _MOST)
    lowest = np.concatenate([[0.0], np.cumsum(alone)]) * (1 - _SAFETY)
    ends = [0, *(last for _, last in cuts)]
    # Of all requests before each cut: the bound, where their last piece begins, and its tree.
    best: list[tuple[float, int, Branches]] = [(0.0, 0, _ROOT)]

    # Bounds of disjoint pieces add up, so the best division of what is before a cut is kept.
    for place in range(len(cuts)):
        alone_too = float(lowest[ends[place + 1]] - lowest[ends[place]])
        found = best[place][0] + alone_too, place, _ROOT
        for back in range(place, max(-1, place - _TOGETHER), -1):
            if budget.over and place > 0:
                break

            value, branches = searched(_part(whole, ends[back], ends[place + 1]), _FEW_NODES)
            if best[back][0] + value > found[0]:
                found = best[back][0] + value, back, branches

        best.append(found)

    total, place, trees = best[-1][0], len(cuts), []
    while place > 0:
        before, back, branches = best[place]
        if not budget.over:
            value, tried = searched(_part(whole, ends[back], ends[place]), _MANY_NODES)
            # The piece may count with its requests alone, and not with what a search proves.
            if value > before - best[back][0]:
                total, branches = total + value - (before - best[back][0]), tried

        trees.append((ends[back], ends[place] - 1, clock_leaf(branches)))
        place = back

    return Proof(total * (1 - _SAFETY), tree=parts("tel", trees[::-1]))


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
