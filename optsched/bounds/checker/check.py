"""Independent check of certificates in exact integer arithmetic, which trusts no solver.

The checker imports nothing from what makes certificates; some of that calls its loops. It computes
with Python integers, or with 64-bit ones where it has first shown that nothing that matters exceeds
them. It counts its steps, and refuses a certificate that needs too many.

What a certificate proves is what its only leaf does: prices of KV memory (`prices`) and what few
`starts` they leave, a chain of the ramp relaxation (`ramp`), or what `pairs`, `lengths` or
`sessions` prove. Of weights `prices` and `starts` alone are proved. Certificates in seconds
are described in `optsched.bounds.checker.seconds`.
"""

import hashlib
import json
from itertools import pairwise
from typing import Any

from optsched.bounds.checker.lengths import lengths_total
from optsched.bounds.checker.pairs import pairs_total
from optsched.bounds.checker.parts import (
    Budget,
    Columns,
    Rejected,
    TooLarge,
    columns_of,
    expect,
    expect_fields,
    integer,
    integers,
    same,
)
from optsched.bounds.checker.seconds import FIELDS, proved_ticks
from optsched.bounds.checker.sessions import sessions_rounds
from optsched.bounds.checker.windows import proved_about

_FIELDS = {*FIELDS, "denominator"} - {"cost_model", "ticks_per_second"}


def check_certificate(
    instance: Any, certificate: dict[str, Any], budget: Budget | None = None
) -> int:
    """Return the value that a certificate proves for an instance.

    It is in rounds, or in seconds a value of the objective in ticks
    (`optsched.bounds.checker.seconds`). `Rejected` is raised if the certificate proves nothing, and
    `TooLarge` if the check would take more steps than the budget, by default a billion.
    """
    try:
        return _check(instance, certificate, budget or Budget())
    except Rejected:
        raise
    except (MemoryError, RecursionError) as error:
        raise TooLarge(f"found no room to check it ({type(error).__name__})") from None
    except Exception as error:  # whatever fails, nothing is proved
        reason = str(error) or "the check takes too much"
        raise Rejected(f"cannot be checked: {type(error).__name__}: {reason:.200}") from None


def _check(instance: Any, certificate: Any, budget: Budget) -> int:
    """Return the value of a certificate after checking its fields, its claim and its proof."""
    kind = type(certificate).__name__
    expect(kind == "dict", f"certificate: found {kind}; expected a JSON object")
    claim = certificate.get("claim")
    right = claim in ("bound", "optimal")
    expect(right, f"claim: found {claim!r:.60}; expected 'bound' or 'optimal'")
    seconds = certificate.get("model") == "seconds"
    if seconds:
        fields = FIELDS | ({"pools"} & {*certificate})  # those alone may be missing
    else:
        fields = _FIELDS | ({"schedule"} if claim == "optimal" else set())

    wrong = ", ".join(sorted(map(repr, fields ^ set(certificate))))
    expect(not wrong, f"fields: found missing or unknown {wrong:.200}; expected none")
    head = {"format": "optsched-certificate", "version": 1, "instance_sha256": instance.sha256}
    for name, expected in {**head, "sha256": digest(certificate)}.items():
        same(certificate[name], expected, name)

    # A certificate states exactly what its tree proves, so a smaller value is refused, too.
    value = integer(certificate["value"], "value")
    instance = proved_about(instance, certificate, budget)
    proved = (proved_ticks if seconds else _proved_rounds)(instance, certificate, budget)
    expect(proved == value, f"value: found {value}; expected {proved}, which is proved")

    if claim == "optimal":
        expect(not seconds, "claim: found 'optimal'; expected 'bound' in seconds")
        weight, constant = _weights_and_constant(instance, certificate["objective"])
        columns, schedule = columns_of(instance), certificate["schedule"]
        reached = constant + schedule_value(columns, schedule, instance.sha256, weight)
        expect(reached == value, f"schedule: found a total latency of {reached}; expected {value}")

    return value


def _proved_rounds(instance: Any, certificate: dict[str, Any], budget: Budget) -> int:
    """Return what the tree of a certificate in rounds proves."""
    same(certificate["model"], "rounds", "model")
    denominator = integer(certificate["denominator"], "denominator")
    expect(denominator >= 1, f"denominator: found {denominator}; expected an integer >= 1")
    if instance.sessions is not None:
        objective = certificate["objective"]
        return sessions_rounds(instance, certificate["tree"], objective, budget)

    # The constant is what weighted arrivals add where completions are asked for, and else 0.
    weight, constant = _weights_and_constant(instance, certificate["objective"])
    columns = columns_of(instance)
    leaf = certificate["tree"]
    expect(isinstance(leaf, dict), f"tree: found {type(leaf).__name__}; expected a JSON object")
    return constant + _prove_leaf(columns, leaf, denominator, budget, weight)


def _weights_and_constant(instance: Any, objective: Any) -> tuple[list[int] | None, int]:
    """Return by which weights an objective sums latencies, None if all are 1, and what it adds.

    Weighted completions are weighted latencies plus the weighted arrivals, which are constant.
    """
    if objective in ("weighted_latency", "weighted_completion") and instance.weight is not None:
        weight, arrival = instance.weight.tolist(), instance.release_times.tolist()
        total = sum(map(int.__mul__, weight, arrival))
        return weight, total if objective == "weighted_completion" else 0

    same(objective, "tel", "objective")
    return None, 0


def digest(certificate: dict[str, Any]) -> str:
    """Return the sha256 of all fields but ``sha256``, in canonical JSON."""
    others = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()


def _prove_leaf(
    columns: Columns, leaf: dict[str, Any], unit: int, budget: Budget, weight: list[int] | None
) -> int:
    """Return the total latency, weighted or not, that a leaf in rounds proves.

    `unit` is the denominator of the certificate's numbers.
    """
    kind = leaf.get("relaxation")
    if kind in ("prices", "starts"):
        return _prove_by_prices(columns, leaf, unit, budget, weight)

    of = "for which prices and starts alone are proved; expected tel"
    expect(weight is None, f"objective: found weights beside {kind!r:.60}, {of}")
    if kind == "pairs":
        return pairs_total(columns, leaf, budget)
    if kind == "lengths":
        return lengths_total(columns, leaf, unit, budget)

    is_leaf = "branch" not in leaf
    expect(is_leaf, "tree: found a branch, which nothing writes any more; expected one leaf")
    others = "'prices', 'starts', 'pairs', 'lengths' or 'ramp'"
    expect(kind == "ramp", f"tree: relaxation: found {kind!r:.60}; expected {others}")
    from optsched.bounds.checker.ramp import check_ramp

    try:
        return check_ramp(columns, leaf, budget)
    except Rejected as error:
        raise type(error)(f"ramp: {error}") from None


def _prove_by_prices(
    columns: Columns, leaf: dict[str, Any], unit: int, budget: Budget, weight: list[int] | None
) -> int:
    """Return what prices of KV memory prove, alone or with a search through the starts they leave.

    Prices are over ``unit``. In a leaf of `starts` the value is claimed, and the search refutes it
    or proves it.
    """
    from optsched.bounds.checker.prices import NEVER, Runs, priced_total
    from optsched.bounds.checker.starts import lowest_value, starts_of

    fields, prices_alone = ("relaxation", "from_round", "price"), leaf["relaxation"] == "prices"
    expect_fields(leaf, leaf["relaxation"], fields if prices_alone else (*fields, "value"))
    rounds = integers(leaf["from_round"], "prices: from_round")
    price = integers(leaf["price"], "prices: price")
    right = len(rounds) == len(price) > 0
    expect(right, "prices: found lists of other lengths; expected as many rounds as prices")
    ascend = rounds[0] >= 1 and all(x < y for x, y in pairwise(rounds)) and rounds[-1] < NEVER
    expect(ascend, "prices: from_round: found other rounds; expected ascending ones >= 1")
    expect(min(price) >= 0, f"prices: price: found {min(price)}; expected integers >= 0")
    # The last price holds in all rounds from then on, of which there is no end.
    expect(price[-1] == 0, f"prices: price: found {price[-1]} as the last; expected 0")
    budget.spend(len(price) + len(columns.arrival))
    held = [s + columns.offset - 1 for s in columns.prompt]
    runs = Runs(columns.arrival, columns.output, held, weight or [1] * len(held))
    if not prices_alone:
        value = integer(leaf["value"], "starts: value")
        starts = starts_of(runs, columns.capacity, rounds, price, unit)
        lower = lowest_value(starts, value, budget)
        expect(lower is None, f"starts: found a schedule of {lower}; expected none below {value}")
        return value

    return -(-priced_total(runs, columns.capacity, rounds, price, unit, budget) // unit)


def _kv_in_blocks(columns: Columns, starts: list[int], t: int) -> int:
    """Return the tokens of the whole blocks that requests hold at the end of round t.

    One of start k runs in the rounds k + 1 to k + o, and holds q + t - k.
    """
    tokens = (
        s + columns.offset - 1 + t - k
        for s, o, k in zip(columns.prompt, columns.output, starts, strict=True)
        if k < t <= k + o
    )
    return sum(-(-held // columns.block) * columns.block for held in tokens)


def schedule_value(
    columns: Columns, schedule: Any, sha256: str, weight: list[int] | None = None
) -> int:
    """Return the total latency, weighted or not, of a schedule whose limits are all checked."""
    head = {"format": "optsched-schedule", "version": 1, "kind": "starts"}
    head = {**head, "instance_sha256": sha256}
    expect_fields(schedule, "schedule", (*head, "starts"))
    for name, value in head.items():
        same(schedule[name], value, f"schedule: {name}")

    starts = integers(schedule["starts"], "schedule: starts", count=len(columns.arrival))
    # By time, how much changes: running requests, the sum of their (q - start), prompts that are
    # prefilled in the next round, and requests that start. After round t a request holds q + t - k.
    changes: dict[int, list[int]] = {}

    for i, k in enumerate(starts):
        a, s, o = columns.arrival[i], columns.prompt[i], columns.output[i]
        early = f"schedule: request {i}: found the start {k}; expected one >= its arrival {a}"
        expect(k >= a, early)
        held = s + columns.offset - 1 - k

        for time, sign in ((k, 1), (k + o, -1)):
            change, new = changes.setdefault(time, [0, 0, 0, 0]), int(sign > 0)
            for j, amount in enumerate((sign, sign * held, s * new, new)):
                change[j] += amount

    # Between two changes the same requests run. Their KV only grows, so that its max is in the last
    # round, and prefills are in the first one.
    running = base = 0
    for begin, end in pairwise(sorted(changes)):
        more_running, more_base, prompts, new = changes[begin]
        running, base = running + more_running, base + more_base
        decodes = running - new
        kv = base + end * running
        if columns.block > 1:
            kv = _kv_in_blocks(columns, starts, end)
        for name, use, limit in (
            ("KV tokens", kv, columns.capacity),
            ("running requests", running, columns.running),
            ("tokens", prompts + decodes, columns.batch),
            ("prefill tokens", prompts, columns.prefill),
            ("decodes beside prefills", decodes if new else 0, None if columns.hybrid else 0),
        ):
            broken = (
                f"schedule: rounds {begin}..{end}: found {use} {name}; expected at most {limit}"
            )
            expect(limit is None or use <= limit, broken)

    latency = [k + o - a for k, o, a in zip(starts, columns.output, columns.arrival, strict=True)]
    return sum(map(int.__mul__, weight or [1] * len(latency), latency))
