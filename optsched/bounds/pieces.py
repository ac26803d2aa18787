"""The trace in pieces, each with the bound that suits it.

What is left of a schedule without the requests outside a piece is a schedule of the piece with idle
time, so bounds of disjoint pieces add up (docs/formulations.md, "One clock"). What is lost is the
effect of requests across a cut. So the trace is cut where few are in the system, and a stretch
where many always are stays whole. What requests pay of shared prefills is settled before the cuts,
since one that is left out may have done the work of others.

One bound for the whole trace is the wrong one for most of it: where requests queue for minutes,
only their order counts (`optsched.bounds.busy_time`), and where few are in the system they slow
each other down (`optsched.bounds.clock`, `optsched.bounds.shares`).
"""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from optsched.bounds.base import CHARGES, Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR, work_tel
from optsched.bounds.busy_time import busy_time, tokens_of
from optsched.bounds.clock import clock
from optsched.bounds.cuts import cut_where_quiet
from optsched.bounds.leaves import parts
from optsched.bounds.shares import completions_of, shares
from optsched.problem.budget import Budget

# Requests of a piece, unless it is never quiet.
_FEWEST, _MOST = 60, 180
# At a cut so many requests are in the system at most.
_QUIET = 5
# The part of a piece's time that `clock` may take.
_CLOCK_SHARE = 0.25
_THREADS = 2
# How much the sum is lowered, relatively, since floats are added.
_SAFETY = 1e-9


def pieces(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency, in seconds."""
    instance = task.instance
    order = np.argsort(instance.release_times, kind="stable")
    chain = tokens_of(instance, task.batch_cost, task.charged).chain
    arrived = np.sort(instance.release)
    finished = completions_of(task, instance, chain)

    def prove(ends: tuple[int, int]) -> list[Proof]:
        """Return what each bound proves of a piece: in order of arrival, from first to before last.

        Without time there is work alone.
        """
        first, last = ends
        piece = task.part(order[first:last])
        proofs = [work_tel(piece, budget)]

        if not budget.over:
            # Of the time that is left, its share by requests of those that are left, times the
            # threads that work side by side.
            part = budget.part(min(1.0, _THREADS * (last - first) / (instance.n - first)))
            proofs.append(busy_time(piece, part))
            # `clock` is not proved for charges.
            if task.charged is None:
                proofs.append(clock(piece, part.part(_CLOCK_SHARE)))

            proofs.append(shares(piece, part))

        return proofs

    cuts = cut_where_quiet(arrived, finished, _FEWEST, _MOST, _QUIET)
    total, trees = 0.0, []
    # Each thread silences warnings for a while, and the last to end would leave them silenced.
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as threads:
        warnings.simplefilter("ignore")
        # Each piece's requests alone cost no more than they do in any schedule of all.
        for (first, last), proofs in zip(cuts, threads.map(prove, cuts), strict=True):
            best = max(proofs, key=lambda one: one.value)
            total += best.value
            trees.append((first, last - 1, best.tree))

    return Proof(total * (1 - _SAFETY), tree=parts("tel", trees))


PIECES = Bound(
    "pieces",
    "the trace cut where it is quiet, each piece with the bound that suits it",
    "second",
    ("tel",),
    pieces,
    PROVED_FOR | CHARGES,
    searches=True,
    certifies=True,
)
