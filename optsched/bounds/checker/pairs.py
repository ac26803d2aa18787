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

from typing import Any

from optsched.bounds.checker.parts import Budget, Columns, expect, expect_fields, integer
from optsched.bounds.checker.requests import srpt_completions


def pairs_total(columns: Columns, leaf: dict[str, Any], budget: Budget) -> int:
    """Return the total latency that the leaf proves."""
    expect_fields(leaf, "pairs", ("relaxation", "threshold"))
    threshold = integer(leaf["threshold"], "pairs: threshold")
    text = f"pairs: threshold: found {threshold}; expected more than half of {columns.capacity}"
    expect(2 * threshold > columns.capacity, text)
    # Of large requests the total has the ends, which come last, less the arrivals; of others o.
    total, release, apart = 0, list[int](), list[int]()
    for a, s, o in zip(columns.arrival, columns.prompt, columns.output, strict=True):
        peak = s + columns.offset - 1 + o
        if peak < threshold:
            total += o
        else:
            apart.append(min(o, peak + threshold - columns.capacity))
            release.append(a + o - apart[-1])
            total -= a

    budget.spend(64 * len(columns.arrival))
    return total + sum(srpt_completions(release, apart))
