"""Independent check of the leaf ``work``: machine time on one preemptive machine.

A batch has room for at most its length of own work and shares, so a schedule is a
single preemptive machine on which request i has received at least its machine time by its
completion. The k-th smallest completion is at least that of shortest remaining processing time
(Schrage 1968), and at least the k-th smallest of the arrivals plus the chains. For the first
tokens only prefills count. A makespan is at least every arrival plus the work that arrives from
then on, and every arrival plus the request's chain.
"""

from itertools import accumulate
from typing import Any

from optsched.bounds.checker.parts import Budget, expect_fields
from optsched.bounds.checker.requests import Part, srpt_completions


def check_work(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return what the leaf proves of a sum over requests, or of the makespan, in ticks."""
    expect_fields(leaf, "work", ("relaxation",))
    budget.spend(20 * len(part.arrival))
    return work_ticks(part, objective)


def work_ticks(part: Part, objective: str) -> int:
    """Return what the leaf ``work`` proves, or the same on so many machines as one that is as fast.

    ``length`` is what a request needs of that machine, and ``alone`` the time of its batches. The
    prover calls it, too.
    """
    if objective == "mean_ttft":
        length = [part.floor(r.own + r.share) // part.machines for r in part.requests]
        alone = [part.floor(r.first) for r in part.requests]
    else:
        length = [part.floor(r.total) // part.machines for r in part.requests]
        alone = [part.floor(r.chain) for r in part.requests]

    ends = sorted(map(sum, zip(part.arrival, alone, strict=True)))
    if objective == "makespan":
        # From the last arrival to the first: each arrival plus all work that arrives from then on.
        rest = accumulate(reversed(length))
        busy = max(map(sum, zip(reversed(part.arrival), rest, strict=True)))
        return max(busy, ends[-1])

    # The k-th smallest completion is at least the k-th of the machine, and of requests alone. A
    # tick per request comes off, as arrivals are rounded down. Times alone need no arrivals.
    machine = srpt_completions(part.arrival, length)
    waited = sum(map(max, machine, ends)) - sum(part.arrival) - len(ends)
    return max(waited, sum(alone))
