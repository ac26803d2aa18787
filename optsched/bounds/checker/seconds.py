"""Independent check of certificates in seconds, in exact integers.

Time is counted in ticks from the first arrival. Arrivals are rounded down to ticks. This never
raises a bound on a completion, and a latency counts from an arrival less than one tick later than
the rounded one. So at most one tick per request is subtracted.

The value of ``tel`` and ``mean_ttft`` is the sum over requests, in ticks; that of ``makespan`` is
the time of day, in ticks. Each is rounded down. That of ``slo_attainment`` is a number of requests,
and so is that of ``capacity``, at any rate from one on (`optsched.bounds.checker.slo_prices`).

*The tree* is a leaf, or ``{"sum": [...]}`` of leaves for disjoint ranges of requests in order of
arrival, ties by index. A leaf's proof holds for any set of requests in any schedule of all of them
(`optsched.bounds.checker.requests`, Some of the requests). The latencies, and the times to first
tokens, of disjoint sets add up, so the bounds do. A makespan is at least the largest of the bounds
(``{"max": [...]}``). What a leaf says of time counts from the first arrival of its range.

*Shared prefixes.* The tree of an instance that has them is ``{"within": D, "tree": ...}``, where D
ticks say who pays for what (`optsched.bounds.checker.prefixes`). Charges are made once, for all
requests. Releases stand in for arrivals in what is said above, and what they are earlier is
subtracted from a sum. The leaves are work, busy-time and shares.

*Sessions.* The tree of an instance that has them is one leaf ``sessions``, which proves sums over
sessions, too (`optsched.bounds.checker.sessions`).

*Weights.* The value of ``weighted_latency`` is the weighted sum, in ticks.

*Several machines* stand in a further field ``pools`` (`optsched.bounds.checker.pools`). With
sessions they are equal.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from optsched.bounds.checker import sessions
from optsched.bounds.checker.fields import PREFIX_FIELDS, SESSION_FIELDS, further_fields
from optsched.bounds.checker.parts import Budget, expect, expect_fields, integer, same
from optsched.bounds.checker.pools import check_work, equal_machines, part_of
from optsched.bounds.checker.prefixes import Charge, charges_of
from optsched.bounds.checker.requests import (
    Part,
    minorants_of,
    rates_of,
    request_of,
    ticks_since,
)

FIELDS = {"format", "version", "instance_sha256", "sha256", "model", "objective", "claim"}
FIELDS |= {"value", "tree", "cost_model", "ticks_per_second"}
IN_TIME = "slo_attainment"
"""The objective whose value is a number of requests."""
WEIGHTED = "weighted_latency"
"""The objective that counts weights, of which the leaves `_OF_WEIGHTS` alone are proved."""
CAPACITY = "capacity"
"""The same at any rate from one on: a claim about the instance with other arrivals."""
OBJECTIVES = ("tel", "mean_ttft", "makespan", WEIGHTED, *sessions.SUMS, IN_TIME)
MAX_TICKS = 10**18
"""The most ticks per second."""


def proved_ticks(instance: Any, certificate: dict[str, Any], budget: Budget) -> int:
    """Return what the tree of a certificate proves, whatever the certificate claims."""
    objective = certificate["objective"]
    known = (*OBJECTIVES, CAPACITY)
    expect(objective in known, f"objective: found {objective!r:.60}; expected {', '.join(known)}")
    ticks = integer(certificate["ticks_per_second"], "ticks_per_second")
    expect(1 <= ticks <= MAX_TICKS, f"ticks_per_second: found {ticks}; expected 1 to 10**18")
    model, tree = certificate["cost_model"], certificate["tree"]
    p, q = float(instance.first_arrival).as_integer_ratio()
    # A makespan is a time of day, so the first arrival comes on top of what leaves prove.
    begin = p * ticks // q if objective == "makespan" else 0
    pools = "pools" in certificate
    if objective in (IN_TIME, CAPACITY):
        expect(not pools, f"pools: found some; expected one machine for {objective}")
        from optsched.bounds.checker.slo_prices import most_from, most_in_time  # loads numba

        proved = most_in_time if objective == IN_TIME else most_from
        return proved(instance, model, ticks, tree, budget)

    if objective == WEIGHTED:
        right = instance.weight is not None and not pools
        right = right and not further_fields(instance) & (SESSION_FIELDS | PREFIX_FIELDS)
        expected = "expected weights on one machine, without sessions and shared prefixes"
        expect(right, f"objective: found {objective}; {expected}")

    if further_fields(instance) & SESSION_FIELDS:
        count, seen = equal_machines(instance, certificate.get("pools"), model)
        return begin + sessions.sessions_ticks(seen, model, ticks, tree, objective, budget, count)

    right = objective not in sessions.SUMS
    expect(right, f"objective: found {objective}, and no sessions; expected some")
    if pools:
        return _on_pools(instance, certificate, ticks, budget)

    arrival, charges = instance.release_times.tolist(), None
    budget.spend(50 * len(arrival))
    if further_fields(instance) & PREFIX_FIELDS:
        budget.spend(500 * len(arrival))
        expect_fields(tree, "tree", ("within", "tree"))
        within, tree = integer(tree["within"], "tree: within"), tree["tree"]
        expect(within >= 0, f"tree: within: found {within}; expected an integer >= 0")
        charges = charges_of(instance, ticks_since(arrival, ticks), within)

    # By request, at whose arrival it is released: at its own, or at an earlier one by its charge.
    release = [one.release for one in charges] if charges else list(range(len(arrival)))
    order = sorted(range(len(arrival)), key=lambda i: (arrival[release[i]], i))

    # Latencies of disjoint sets add up, and a makespan is at least that of any set. ``members`` has
    # of each leaf the numbers of its requests, in order of release.
    latest = objective == "makespan"
    leaves = _parts(tree, len(order), "max" if latest else "sum")
    members = [order[first : last + 1] for first, last, _ in leaves]
    budget.spend(50 * sum(map(len, members)))
    values = []
    for (since, part), (_, _, leaf) in zip(
        parts_of(instance, model, ticks, members, charges), leaves, strict=True
    ):
        kind = leaf.get("relaxation")
        right = charges is None or kind in ("work", "busy-time", "shares")
        expect(right, f"tree: found {kind!r:.60}, not proved for shared prefixes; expected work")
        right = objective in ("tel", WEIGHTED) or kind != "busy-time"
        expect(right, f"busy-time: found the objective {objective!r}; expected 'tel'")
        right = objective != WEIGHTED or kind in _OF_WEIGHTS
        expected = f"expected {' or '.join(_OF_WEIGHTS)}"
        expect(right, f"tree: found {kind!r:.60}, not proved of weights; {expected}")
        # All other leaves read the first minorant of a table alone.
        right = "table" not in model or kind in _OF_TABLES
        expected = f"expected {', '.join(_OF_TABLES[:-1])} or {_OF_TABLES[-1]}"
        expect(right, f"tree: found {kind!r:.60} under a table; {expected}")
        values.append((since if latest else 0) + _leaf(leaf)(part, leaf, objective, budget))

    if not latest:
        # Charged requests wait from their releases on, which may lie before their arrivals.
        early = sum(charges[i].lag for some in members for i in some) if charges else 0
        return sum(values) - early

    return begin + max(values)


def _parts(tree: Any, n: int, node: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the leaves of a tree, each with its first and last request in order of arrival.

    ``node`` is the name of the only node: a sum or a max. Requests in no part add nothing, which
    only lowers what is proved.
    """
    expect(isinstance(tree, dict), f"tree: found {type(tree).__name__}; expected a JSON object")
    if "relaxation" in tree:
        return [(0, n - 1, tree)]

    expect(set(tree) == {node}, f"tree: found another node; expected a leaf or {node!r}")
    right = isinstance(tree[node], list) and len(tree[node]) > 0
    expect(right, f"tree: {node}: found no such list; expected one or more parts")
    found, following = [], 0

    for part in tree[node]:
        expect_fields(part, f"tree: {node}", ("first", "last", "tree"))
        first, last = integer(part["first"], "tree: first"), integer(part["last"], "tree: last")
        rest = f"found requests {first}..{last}; expected some of {following}..{n - 1}"
        expect(following <= first <= last < n, f"tree: {node}: {rest}")
        expect(isinstance(part["tree"], dict), "tree: found no leaf in a part; expected one")
        found.append((first, last, part["tree"]))
        following = last + 1

    return found


def parts_of(
    instance: Any,
    model: Any,
    ticks: int,
    members: Sequence[Sequence[int]],
    charges: Sequence[Charge] | None = None,
) -> Iterator[tuple[int, Part]]:
    """Return the part of each set of requests, in order of release, and the tick of its first one.

    A batch takes no less than under each minorant of a table (`optsched.costs.table`). So the time
    until a first token is the longest under any of them; all else is that under the first one.
    `members`: the requests of each set, by number, in order of release.
    """
    rates = [rates_of(instance, form) for form in minorants_of(model)]
    since = ticks_since(instance.release_times.tolist(), ticks)
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    charged: Sequence[Charge | None] = charges or [None] * len(since)
    release = [since[one.release] for one in charges] if charges else since

    for some in members:
        begin = release[some[0]]
        # By form of the cost model, the requests under it.
        under = [
            [request_of(one, prompt[i], output[i], charged[i], ticks) for i in some]
            for one in rates
        ]
        first = [
            max(r.first * ticks // one.scale for one, r in zip(rates, each, strict=True))
            for each in zip(*under, strict=True)
        ]
        arrival = [release[i] - begin for i in some]
        weight = () if instance.weight is None else [int(instance.weight[i]) for i in some]
        part = Part(arrival, under[0], rates[0], ticks, first, (instance, model))
        yield begin, part._replace(weight=weight)


def _on_pools(instance: Any, certificate: dict[str, Any], ticks: int, budget: Budget) -> int:
    """Return what a certificate's only leaf proves of several machines.

    `optsched.bounds.checker.pools` has the fields of ``pools``.
    """
    pools, leaf, objective = certificate["pools"], certificate["tree"], certificate["objective"]
    # On several machines leaves are proved for sums over requests only (`optsched.bounds.pools`).
    expect(objective != "makespan", "objective: found makespan; expected tel or mean_ttft")
    expect(isinstance(pools, dict), "pools: found no JSON object; expected one")
    part = part_of(instance, pools, ticks, budget)
    # The proof reads the cost models in ``pools`` alone; the certificate's own repeats the first.
    first = pools["mixed" if "mixed" in pools else "prefill"]
    same(certificate["cost_model"], first["cost_model"], "cost_model")
    expect(isinstance(leaf, dict), "tree: found no JSON object; expected a leaf")
    if leaf.get("relaxation") == "work":
        expect_fields(leaf, "work", ("relaxation",))
        return check_work(part, objective)

    kind = leaf.get("relaxation")
    right = kind == "busy-time"
    expect(right, f"tree: relaxation: found {kind!r:.60}; expected work or busy-time")
    return _leaf(leaf)(part, leaf, objective, budget)


_OF_WEIGHTS = ("busy-time", "classes")
_OF_TABLES = ("classes", "class-paths", "class-work")
_KINDS = ("work", "busy-time", "shares", "clock", *_OF_TABLES, "labels")
Leaf = Callable[[Part, dict[str, Any], str, Budget], int]


def _leaf(leaf: dict[str, Any]) -> Leaf:
    """Return the check of a leaf: of ``class-paths`` it is `class_paths.check_class_paths`.

    Its module is loaded only now, as some load numba.
    """
    kind: Any = leaf.get("relaxation")
    expected = f"expected {', '.join(_KINDS[:-1])} or {_KINDS[-1]}"
    expect(kind in _KINDS, f"tree: relaxation: found {kind!r:.60}; {expected}")
    name = kind.replace("-", "_")
    module = import_module(f"optsched.bounds.checker.{name}")
    check: Leaf = getattr(module, f"check_{name}")
    return check
