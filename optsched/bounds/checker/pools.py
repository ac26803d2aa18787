"""Independent check of certificates about several machines, with or without roles.

`optsched.bounds.pools` states what is claimed, and has the proof. A certificate's ``pools`` are
``{"mixed": M}`` for equal machines, whatever their roles, or ``{"prefill": M, "decode": M, "link":
L}`` for machines of which none prefills and decodes. M says how many ``machines`` there are, with
their ``kv_capacity``, ``limits`` and ``cost_model``; L has ``latency_s`` and ``seconds_per_token``
as decimal texts and ``recompute_last``. The tree is one leaf, ``work`` or ``busy-time``.

A capacity that is less than a request's prompt and output is taken to be as large: more room only
lowers what requests pay.
"""

from dataclasses import replace
from math import lcm
from typing import Any

from optsched.bounds.checker.fields import PREFIX_FIELDS, SESSION_FIELDS, further_fields
from optsched.bounds.checker.parts import Budget, expect, expect_fields, integer
from optsched.bounds.checker.requests import (
    Decodes,
    Part,
    Rates,
    decimal,
    rates_of,
    request_of,
    srpt_completions,
    ticks_since,
)

_MACHINES = 10_000  # the most of a pool
_MACHINE = ("machines", "kv_capacity", "limits", "cost_model")
_LIMITS = ("max_batch_tokens", "max_prefill_tokens", "max_running")


def part_of(instance: Any, pools: Any, ticks: int, budget: Budget) -> Part:
    """Return all requests of an instance on the pools of a certificate.

    With roles, the part is about the machines that prefill, and its `Decodes` about the others.
    Its ``machine`` has no cost model, as no leaf of pools looks at batches.
    """
    unproved = further_fields(instance) & (PREFIX_FIELDS | SESSION_FIELDS)
    names_found = ", ".join(sorted(unproved))
    expect(not unproved, f"instance: found {names_found}; expected none with several machines")
    n = len(instance.prompt_tokens)
    budget.spend(100 * n)
    since = ticks_since(instance.release_times.tolist(), ticks)
    order = sorted(range(n), key=lambda i: (since[i], i))
    sizes = [(int(instance.prompt_tokens[i]), int(instance.output_tokens[i])) for i in order]
    arrival = [since[i] for i in order]
    has_roles = isinstance(pools, dict) and "mixed" not in pools
    names = ("prefill", "decode") if has_roles else ("mixed",)
    expect_fields(pools, "pools", (*names, "link") if has_roles else names)

    # All rates in one unit of time, so that times of both pools can be added.
    machines = [_machines(instance, pools[name], f"pools: {name}") for name in names]
    common = lcm(*(rates.scale for _, _, rates in machines))
    counts = [count for count, _, _ in machines]
    rates_of_pools = [_scaled(rates, common // rates.scale) for _, _, rates in machines]
    rates = rates_of_pools[0]
    requests = [request_of(rates, *size) for size in sizes]
    decodes = None
    if has_roles:
        moved, before_first = _moves(pools["link"], sizes, ticks)
        decode_rates = rates_of_pools[1]
        later = [request_of(decode_rates, *size) for size in sizes]
        decodes = Decodes(decode_rates, later, moved, before_first, counts[1])

    first = [request.first * ticks // common for request in requests]
    return Part(arrival, requests, rates, ticks, first, (instance, None), counts[0], decodes)


def equal_machines(instance: Any, pools: Any, model: Any) -> tuple[int, Any]:
    """Return how many machines of a cost model there are, and the instance as on each of them.

    Without ``pools`` that is one. Pools of roles may stand there if their machines are equal.
    """
    if pools is None:
        return 1, instance

    given = [pool for name, pool in pools.items() if name != "link"]
    machines = [_machines(instance, pool, "pools") for pool in given]
    # All pools are alike but for their numbers of machines, and have the certificate's cost model.
    alike = [{**pool, "machines": 0} for pool in given]
    right = alike[1:] == alike[:-1] and [pool["cost_model"] for pool in alike[:1]] == [model]
    expect(right, "pools: found machines that differ, or none; expected equal ones for sessions")
    return sum(count for count, _, _ in machines), machines[0][1]


def _machines(instance: Any, pool: Any, place: str) -> tuple[int, Any, Rates]:
    """Return the number of a pool's machines, the instance as on one of them, and its rates."""
    expect_fields(pool, place, _MACHINE)
    count, capacity = (integer(pool[k], f"{place}: {k}") for k in ("machines", "kv_capacity"))
    expect(1 <= count <= _MACHINES, f"{place}: found {count} machines; expected 1 to {_MACHINES}")
    expect(1 <= capacity < 1 << 62, f"{place}: kv_capacity: found {capacity}; expected >= 1")
    limits = pool["limits"]
    known = isinstance(limits, dict) and set(limits) <= set(_LIMITS)
    expect(known, f"{place}: limits: found others; expected some of {', '.join(_LIMITS)}")
    for name, value in limits.items():
        expect(integer(value, f"{place}: {name}") >= 1, f"{place}: {name}: expected >= 1")

    # A capacity below a request's size is taken to be as large (module's text).
    kv_capacity = max(capacity, int((instance.prompt_tokens + instance.output_tokens).max()))
    seen = replace(
        instance, kv_capacity=kv_capacity, limits=type(instance.limits)(**limits), known=None
    )
    return count, seen, rates_of(seen, pool["cost_model"], PREFIX_FIELDS | SESSION_FIELDS)


def _scaled(rates: Rates, factor: int) -> Rates:
    """Return the same rates in a unit of time that is ``factor`` times as small."""
    cost = {name: value * factor for name, value in rates.cost.items()}
    refilled = rates.refilled * factor
    return replace(rates, scale=rates.scale * factor, cost=cost, refilled=refilled)


def _moves(link: Any, sizes: list[tuple[int, int]], ticks: int) -> tuple[list[int], list[int]]:
    """Return by request the ticks that its KV is on the way, and those before its first token.

    If the last token is recomputed, it is not moved, and the decoding machine makes the first
    token: then it comes after the move.
    """
    expect_fields(link, "pools: link", ("latency_s", "seconds_per_token", "recompute_last"))
    recomputes = link["recompute_last"]
    expect(type(recomputes) is bool, "pools: link: recompute_last: expected true or false")
    latency, token = (decimal(link[k], f"link: {k}") for k in ("latency_s", "seconds_per_token"))
    common = lcm(latency.denominator, token.denominator)
    base, per_token = int(latency * common) * ticks, int(token * common) * ticks
    # A request of one token ends where it is prefilled, and is not moved.
    moved = [
        (base + per_token * (prompt - recomputes)) // common if output > 1 else 0
        for prompt, output in sizes
    ]
    # A prompt of one token is not recomputed (`optsched.bounds.pools`).
    before_first = [
        move if recomputes and prompt > 1 else 0
        for move, (prompt, _) in zip(moved, sizes, strict=True)
    ]
    return moved, before_first


def check_work(part: Part, objective: str) -> int:
    """Return the sum over requests, in ticks, that work proves of machines, with roles or not."""
    arrival, n, decodes = part.arrival, len(part.arrival), part.decodes
    first = [part.floor(r.first) for r in part.requests]

    def min_times(since: list[int], work: list[int], alone: list[int], machines: int) -> int:
        """Return the least sum of times from ``since`` until work is done.

        The k-th end is at least that on one machine as fast as all, and the k-th of times alone.
        """
        ends = sorted(map(sum, zip(since, alone, strict=True)))
        done = srpt_completions(since, [part.floor(w) // machines for w in work])
        total = sum(max(*pair) for pair in zip(done, ends, strict=True)) - sum(since)
        # ``since`` is rounded down, so that each time may be a tick less.
        return max(total - n, sum(alone) - n)

    prefills = [r.own + r.share for r in part.requests]
    firsts = min_times(arrival, prefills, first, part.machines)
    if objective == "mean_ttft":
        return firsts + (sum(decodes.before_first) if decodes else 0)
    if decodes is None:
        alone = [part.floor(r.chain) for r in part.requests]
        return min_times(arrival, [r.total for r in part.requests], alone, part.machines)

    # Two bounds on latencies with roles: the prefills as above, then all later batches alone; or
    # prefills alone, and the decodes' machines, which may begin at ``ready``. The larger counts.
    alone_after = [part.floor(r.chain - r.first) for r in decodes.requests]
    later_work = [r.total - r.own - r.share for r in decodes.requests]
    before = [f + move for f, move in zip(first, decodes.moved, strict=True)]
    ready = list(map(sum, zip(arrival, before, strict=True)))
    decoded = min_times(ready, later_work, alone_after, decodes.machines) + sum(before)
    return max(firsts + sum(decodes.moved) + sum(alone_after), decoded)
