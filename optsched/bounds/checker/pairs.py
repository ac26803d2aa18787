"""What pairs of large requests prove, in exact integers: the leaf ``pairs`` with a threshold h.

Let request i have the peak p_i and 2h > M. *Ends lie apart*: if C_i <= C_j for two requests with
peaks of h or more, then C_j - C_i >= d_j = min(o_j, p_j + h - M). Every schedule can be replaced by
uninterrupted runs with the same ends that hold no more (docs/formulations.md, "Bounds in rounds").
Either j starts at C_i or later, and so ends o_j rounds later or more; or it holds
p_j - (C_j - C_i) in the round that ends at C_i, in which i holds p_i >= h; together at most M.

So the stretches (C_j - d_j, C_j] of the large requests are disjoint. None begins before
a_j + o_j - d_j. They are a schedule of one machine with these times and releases, on which shortest
remaining processing time first has the least sum of ends (Schrage 1968). Any other request has a
latency of o_j or more.

Memory of several workers as that of one machine, limits and KV blocks only take schedules away or
leave these as they are. Where KV is shared, two requests need not hold p_i + p_j, so the checker
refuses such instances.
"""

from bisect import insort
from typing import Any

from optsched.bounds.checker.parts import Budget, Columns, expect, expect_fields, integer


def pairs_total(columns: Columns, leaf: dict[str, Any], budget: Budget) -> int:
    """Return the total latency that the leaf proves."""
    expect_fields(leaf, "pairs", ("relaxation", "threshold"))
    threshold = integer(leaf["threshold"], "pairs: threshold")
    found = f"pairs: threshold: found {threshold}; expected more than half of {columns.capacity}"
    expect(2 * threshold > columns.capacity, found)
    total, jobs = 0, []
    for a, s, o in zip(columns.arrival, columns.prompt, columns.output, strict=True):
        peak = s + columns.offset - 1 + o
        if peak < threshold:
            total += o
        else:
            apart = min(o, peak + threshold - columns.capacity)
            jobs.append((a + o - apart, apart))
            total -= a

    budget.spend(64 * len(columns.arrival))
    return total + least_ends(jobs)


def least_ends(jobs: list[tuple[int, int]]) -> int:
    """Return the least sum of ends of jobs (release, length) on one preemptive machine."""
    jobs, waiting, now, total = sorted(jobs, reverse=True), list[int](), 0, 0
    while jobs or waiting:
        if not waiting:
            now = jobs[-1][0]
        while jobs and jobs[-1][0] <= now:
            insort(waiting, -jobs.pop()[1])  # the shortest one is the last

        need = -waiting.pop()
        until = min(now + need, jobs[-1][0]) if jobs else now + need
        if need > until - now:
            insort(waiting, until - now - need)
        else:
            total += until

        now = until

    return total
