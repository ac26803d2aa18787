r"""One clock for all requests: the bound at low load.

Prices (`optsched.bounds.paths`) let every request choose its own path through time, and a mixture
of paths too: "hurry now, while the prefills of others wait" with "the prefills first, hurry later".
In truth all requests see the same batches. This bound counts time on a clock that they share.

*Reading a schedule.* Request i has own prefill work x_i, and its k-th token (k >= 2) own work of at
least w_k in a batch that lasts at least alone_k for it (`optsched.bounds.batch`). Choose any
eta_i in [0, 1) with eta_i alone_k <= w_k for all k. Read a batch as its own works, one request
after another, and then its fixed cost. Of the own work of i's last run, the x_i seconds of its
prefill, and the first eta_i alone_k seconds of token k, are *exclusive*: nobody else gets on
meanwhile. All other time is *clock*. While the clock runs, the requests of the batch make
*progress*: i makes d of it until its first token, d being the fixed cost of a batch that prefills,
and (1 - eta_i) alone_k for token k. So with

    r_i = eta_i / (1 - eta_i),   T_i = d + (1 - eta_i) sum_k alone_k,   R_i = x_i + r_i (T_i - d),

i completes when its progress c_i is T_i, and R_i is all its exclusive time. Let X_i(t) be its
exclusive time up to t, and Psi(t) = t - sum_i X_i(t) the clock. Progress grows at most as fast as
the clock. Exclusive work comes before the progress of its token, so

    g_i(c_i) <= X_i <= G_i(c_i),    g_i(c) = x_i [c > 0] + r_i max(0, c - d)    (c <= T_i),

where G_i(c) is x_i for c < d, and then g_i plus the exclusive part of one token, but at most R_i.
It is 0 before i arrives.

*What follows* for the clock at arrivals and at completions stands in
`optsched.bounds.clock_search`, with a search over who waits for whom.

*Pieces.* Dropping requests from a schedule leaves a schedule of the others with idle time, and the
reading above allows idle time. So bounds of disjoint sets of requests add up
(`optsched.bounds.pieces`). The bound is taken on short pieces of the trace. Where they end is
chosen by dynamic programming, with a short search for each piece. A longer search follows for the
pieces that were chosen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.base import Bound, BoundTask, Proof, only_by_name
from optsched.bounds.batch import PROVED_FOR, unavoidable_work
from optsched.bounds.certificate import clock_leaf, parts
from optsched.bounds.clock_search import Piece, searched
from optsched.bounds.cuts import cut_where_quiet
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
    """Return the requests of a task in order of arrival, with the largest valid shares.

    Parameters
    ----------
    task : BoundTask
        A task with an instance in seconds and a `BatchCost`.

    Returns
    -------
    Piece
    """
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
    of = slice(first, last)
    return Piece(
        piece.arrival[of] - piece.arrival[first], piece.prefill[of], piece.fixed, piece.need[of],
        piece.rate[of], piece.slack[of],
    )  # fmt: skip


def clock(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency in seconds (see the module's text for the proof).

    Parameters
    ----------
    task : BoundTask
        A task with an instance in seconds and a `BatchCost`.
    budget : Budget
        When it is over, pieces that are left count with their requests alone.

    Returns
    -------
    Proof
        A value in seconds, with the trees of the searches.
    """
    whole = piece_of(task)
    alone = whole.prefill + whole.need + whole.rate * (whole.need - whole.fixed)
    cuts = cut_where_quiet(whole.arrival, whole.arrival + alone, _FEWEST, _MOST)
    least = np.concatenate([[0.0], np.cumsum(alone)]) * (1 - _SAFETY)
    ends = [0, *(last for _, last in cuts)]
    # Of all requests before each cut: the bound, where their last piece begins, and its tree.
    best: list[tuple[float, int, Branches]] = [(0.0, 0, _ROOT)]

    for place in range(len(cuts)):
        alone_too = float(least[ends[place + 1]] - least[ends[place]])
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
