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

_MACHINES = 10_000
_MACHINE = ("machines", "kv_capacity", "limits", "cost_model")
_LIMITS = ("max_batch_tokens", "max_prefill_tokens", "max_running")


def part_of(instance: Any, pools: Any, ticks: int, budget: Budget) -> Part:
    """Return all requests of an instance on the pools of a certificate."""
    more = further_fields(instance) & (PREFIX_FIELDS | SESSION_FIELDS)
    rest = "expected none with several machines"
    expect(not more, f"instance: found {', '.join(sorted(more))}; {rest}")
    n = len(instance.prompt_tokens)
    budget.spend(100 * n)
    since = ticks_since(instance.release_times.tolist(), ticks)
    order = sorted(range(n), key=lambda i: (since[i], i))
    sizes = [(int(instance.prompt_tokens[i]), int(instance.output_tokens[i])) for i in order]
    arrival = [since[i] for i in order]
    split = isinstance(pools, dict) and "mixed" not in pools
    names = ("prefill", "decode") if split else ("mixed",)
    expect_fields(pools, "pools", (*names, "link") if split else names)
    found = [_machines(instance, pools[name], f"pools: {name}") for name in names]
    common = lcm(*(rates.scale for _, _, rates in found))
    both = [(count, _scaled(rates, common // rates.scale)) for count, _, rates in found]
    (count, rates), (others, after) = both[0], both[-1]
    requests = [request_of(rates, *size) for size in sizes]
    decodes = None

    if split:
        moved, early = _moves(pools["link"], sizes, ticks)
        later = [request_of(after, *size) for size in sizes]
        decodes = Decodes(after, later, moved, early, others)

    first = [request.first * ticks // common for request in requests]
    return Part(arrival, requests, rates, ticks, first, (instance, None), count, decodes)


def equal_machines(instance: Any, pools: Any, model: Any) -> tuple[int, Any]:
    """Return how many machines of a cost model there are, and the instance as on each of them.

    Without ``pools`` that is one.
    """
    if pools is None:
        return 1, instance

    stages = [one for name, one in pools.items() if name != "link"]
    found = [_machines(instance, one, "pools") for one in stages]
    alike = [{**one, "machines": 0} for one in stages]
    right = alike[1:] == alike[:-1] and [one["cost_model"] for one in alike[:1]] == [model]
    expect(right, "pools: found machines that differ, or none; expected equal ones for sessions")
    return sum(count for count, _, _ in found), found[0][1]


def _machines(instance: Any, given: Any, place: str) -> tuple[int, Any, Rates]:
    expect_fields(given, place, _MACHINE)
    count, capacity = (integer(given[k], f"{place}: {k}") for k in ("machines", "kv_capacity"))
    expect(1 <= count <= _MACHINES, f"{place}: found {count} machines; expected 1 to {_MACHINES}")
    expect(1 <= capacity < 1 << 62, f"{place}: kv_capacity: found {capacity}; expected >= 1")
    limits = given["limits"]
    known = isinstance(limits, dict) and set(limits) <= set(_LIMITS)
    expect(known, f"{place}: limits: found others; expected some of {', '.join(_LIMITS)}")
    for name, value in limits.items():
        expect(integer(value, f"{place}: {name}") >= 1, f"{place}: {name}: expected >= 1")

    room = max(capacity, int((instance.prompt_tokens + instance.output_tokens).max()))
    own = type(instance.limits)(**limits)
    seen = replace(instance, kv_capacity=room, limits=own, known=None)
    return count, seen, rates_of(seen, given["cost_model"], PREFIX_FIELDS | SESSION_FIELDS)


def _scaled(rates: Rates, factor: int) -> Rates:
    cost = {name: value * factor for name, value in rates.cost.items()}
    refilled = rates.refilled * factor
    return replace(rates, scale=rates.scale * factor, cost=cost, refilled=refilled)


def _moves(link: Any, sizes: list[tuple[int, int]], ticks: int) -> tuple[list[int], list[int]]:
    expect_fields(link, "pools: link", ("latency_s", "seconds_per_token", "recompute_last"))
    again = link["recompute_last"]
    expect(type(again) is bool, "pools: link: recompute_last: expected true or false")
    latency, token = (decimal(link[k], f"link: {k}") for k in ("latency_s", "seconds_per_token"))
    common = lcm(latency.denominator, token.denominator)
    base, each = int(latency * common) * ticks, int(token * common) * ticks
    moved = [
        (base + each * (prompt - again)) // common if output > 1 else 0 for prompt, output in sizes
    ]
    early = [h if again and p > 1 else 0 for h, (p, _) in zip(moved, sizes, strict=True)]
    return moved, early


def check_work(part: Part, objective: str) -> int:
    """Return the sum over requests, in ticks, that work proves of machines with roles."""
    arrival, n, decodes = part.arrival, len(part.arrival), part.decodes
    first = [part.floor(r.first) for r in part.requests]

    def waited(since: list[int], work: list[int], alone: list[int], machines: int) -> int:
        """Return the least sum of times since ``since`` until work is done."""
        ends = sorted(map(sum, zip(since, alone, strict=True)))
        done = srpt_completions(since, [part.floor(one) // machines for one in work])
        found = sum(max(*pair) for pair in zip(done, ends, strict=True)) - sum(since) - n
        return max(found, sum(alone) - n)

    prefills = [r.own + r.share for r in part.requests]
    firsts = waited(arrival, prefills, first, part.machines)
    if objective == "mean_ttft":
        return firsts + (sum(decodes.before_first) if decodes else 0)
    if decodes is None:
        alone = [part.floor(r.chain) for r in part.requests]
        return waited(arrival, [r.total for r in part.requests], alone, part.machines)

    rest = [part.floor(r.chain - r.first) for r in decodes.requests]
    later = [r.total - r.own - r.share for r in decodes.requests]
    since = [f + h for f, h in zip(first, decodes.moved, strict=True)]
    ready = list(map(sum, zip(arrival, since, strict=True)))
    decoded = waited(ready, later, rest, decodes.machines) + sum(since)
    return max(firsts + sum(decodes.moved) + sum(rest), decoded)
