"""Independent check of certificates in seconds, in exact integers.

Time is counted in ticks from the first arrival. Arrivals are rounded down to ticks. This never
raises a bound on a completion, and a latency counts from an arrival less than one tick later than
the rounded one. So at most one tick per request is subtracted.

The value of ``tel`` and ``mean_ttft`` is the sum over requests, in ticks; that of ``makespan`` is
the time of day, in ticks. Each is rounded down.

*The tree* is a leaf, or ``{"sum": [...]}`` of leaves for disjoint ranges of requests in order of
arrival, ties by index. A leaf's proof holds for any set of requests in any schedule of all of them
(`optsched.bounds.checker.requests`, Some of the requests). The latencies, and the times to first
tokens, of disjoint sets add up, so the bounds do. A makespan is at least the largest of the bounds
(``{"max": [...]}``). What a leaf says of time counts from the first arrival of its range.

*Leaf* ``work``. A batch has room for at most its length of own work and shares, so a schedule is a
single preemptive machine on which request i has received at least its machine time by its
completion. The k-th smallest completion is at least that of shortest remaining processing time
(Schrage 1968), and at least the k-th smallest of the arrivals plus the chains. For the first
tokens only prefills count. A makespan is at least every arrival plus the work that arrives from
then on, and every arrival plus the request's chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import accumulate
from typing import Any

from optsched.bounds.checker.parts import Budget, Rejected, expect, integer
from optsched.bounds.checker.requests import Part, rates_of, request_of, ticks_since

FIELDS = {"format", "version", "instance_sha256", "model", "objective", "cost_model", "claim",
          "ticks_per_second", "value", "tree", "sha256"}  # fmt: skip
OBJECTIVES = ("tel", "mean_ttft", "makespan")
MAX_TICKS = 10**18
"""The most ticks per second."""


def proved_ticks(instance: Any, certificate: dict[str, Any], budget: Budget) -> int:
    """Return what the tree of a certificate proves, whatever the certificate claims."""
    objective = certificate["objective"]
    expect(
        objective in OBJECTIVES,
        f"objective: found {objective!r:.60}; expected {', '.join(OBJECTIVES)}",
    )
    ticks = integer(certificate["ticks_per_second"], "ticks_per_second")
    expect(1 <= ticks <= MAX_TICKS, f"ticks_per_second: found {ticks}; expected 1 to 10**18")
    rates = rates_of(instance, certificate["cost_model"])
    arrival = instance.release_times.tolist()
    budget.spend(50 * len(arrival))
    since = ticks_since(arrival, ticks)
    order = sorted(range(len(arrival)), key=lambda i: (arrival[i], i))
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()

    def part(first: int, last: int) -> tuple[int, Part]:
        budget.spend(50 * (last - first + 1))
        mine = order[first : last + 1]
        begin = since[mine[0]]
        times = [since[i] - begin for i in mine]
        requests = [request_of(rates, prompt[i], output[i]) for i in mine]

        return begin, Part(times, requests, rates, ticks)

    latest = objective == "makespan"
    values = []
    for first, last, leaf in _parts(certificate["tree"], len(order), "max" if latest else "sum"):
        begin, some = part(first, last)
        values.append((begin if latest else 0) + _leaf(leaf)(some, leaf, objective, budget))

    if not latest:
        return sum(values)

    p, q = min(arrival).as_integer_ratio()
    return p * ticks // q + max(values)


def _parts(tree: Any, n: int, node: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the leaves of a tree, each with its first and last request in order of arrival."""
    expect(isinstance(tree, dict), f"tree: found {type(tree).__name__}; expected a JSON object")
    if "relaxation" in tree:
        return [(0, n - 1, tree)]

    expect(set(tree) == {node}, f"tree: found another node; expected a leaf or {node!r}")
    expect(
        isinstance(tree[node], list) and len(tree[node]) > 0,
        f"tree: {node}: found no such list; expected one or more parts",
    )
    found, following = [], 0

    for part in tree[node]:
        right = isinstance(part, dict) and set(part) == {"first", "last", "tree"}
        expect(right, f"tree: {node}: found other fields; expected first, last and tree")
        first, last = integer(part["first"], "tree: first"), integer(part["last"], "tree: last")
        expect(
            following <= first <= last < n,
            f"tree: {node}: found requests {first}..{last}; expected some of {following}..{n - 1}",
        )
        expect(isinstance(part["tree"], dict), "tree: found no leaf in a part; expected one")
        found.append((first, last, part["tree"]))
        following = last + 1

    return found


Leaf = Callable[[Part, dict[str, Any], str, Budget], int]


def _leaf(leaf: dict[str, Any]) -> Leaf:
    kind = leaf.get("relaxation")
    if kind == "work":
        return _work
    if kind == "busy-time":
        from optsched.bounds.checker.busy_time import check_busy_time

        return check_busy_time

    if kind == "shares":
        from optsched.bounds.checker.shares import check_shares

        return check_shares

    if kind == "clock":
        from optsched.bounds.checker.clock import check_clock

        return check_clock

    raise Rejected(
        f"tree: relaxation: found {kind!r:.60}; expected work, busy-time, shares or clock"
    )


def _work(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    expect(set(leaf) == {"relaxation"}, "work: found other fields; expected relaxation alone")
    n = len(part.arrival)
    budget.spend(20 * n)

    if objective == "mean_ttft":
        length = [part.floor(r.own + r.share) for r in part.requests]
        alone = [part.floor(r.first) for r in part.requests]
    else:
        length = [part.floor(r.total) for r in part.requests]
        alone = [part.floor(r.chain) for r in part.requests]

    ends = sorted(map(sum, zip(part.arrival, alone, strict=True)))
    if objective == "makespan":
        rest = accumulate(reversed(length))
        busy = max(map(sum, zip(reversed(part.arrival), rest, strict=True)))
        return max(busy, ends[-1])

    machine = _completions(part.arrival, length)
    waited = sum(map(max, machine, ends)) - sum(part.arrival) - n
    return max(waited, sum(alone))


def _completions(arrival: Sequence[int], length: Sequence[int]) -> list[int]:
    """Return the completions of shortest remaining processing time. Arrivals ascend."""
    rest: list[int] = []  # what the jobs at hand still need
    found: list[int] = []
    now = 0

    for at, need in zip(arrival, length, strict=True):
        while rest and now + rest[0] <= at:
            now += heappop(rest)
            found.append(now)

        if rest and now < at:
            heapreplace(rest, rest[0] - (at - now))

        now = at if at > now else now
        heappush(rest, need)

    while rest:
        now += heappop(rest)
        found.append(now)

    return found
