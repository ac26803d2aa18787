"""Independent check of certificates in exact integer arithmetic, which trusts no solver.

The checker shares no code with what makes certificates. It computes with Python integers, or with
64-bit ones where it has first shown that nothing that matters exceeds them. It counts its steps,
and refuses a certificate that needs too many.

What a certificate proves. A node of the tree allows a range of starts for every request; at the
root the range of request i is k_i >= a_i. A branch splits one request's range into disjoint ranges
that cover it. So every schedule belongs to one leaf, and the min of the leaves' bounds holds for
all schedules. A leaf of prices p_t >= 0 (over the denominator D) proves

    D TEL >= sum_i min_{k in range} f_i(k) - M sum_t p_t,
    f_i(k) = D (k + o_i - a_i) + sum_{j=1..o_i} p_{k+j} (q_i + j),

with q_i = s_i (cached accounting: s_i - 1). The reason is that request i holds q_i + j tokens of KV
in its j-th round, and that the KV held in round t is at most M. TEL is an integer, so the bound is
rounded up. Certificates in seconds are described in `optsched.bounds.checker.seconds`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from optsched.bounds.checker.parts import (
    Budget,
    Columns,
    Rejected,
    TooLarge,
    columns_of,
    expect,
    integer,
    integers,
    same,
)
from optsched.bounds.checker.seconds import FIELDS, proved_ticks

_FIELDS = {"format", "version", "instance_sha256", "model", "objective", "claim", "value",
           "denominator", "tree", "sha256"}  # fmt: skip
_FAR = 1 << 60
"""A round later than any with a price. Arrivals are below 2**53."""
_WRAP = (1 << 64) - 1


def check_certificate(instance: Any, certificate: dict[str, Any]) -> int:
    """Return the value that a certificate proves for an instance.

    Parameters
    ----------
    instance : Instance
        An instance in rounds, or in seconds if the certificate is.
    certificate : dict
        The JSON object of a certificate file.

    Returns
    -------
    int
        A total latency in rounds that no schedule is below. In seconds: a value of the objective
        in ticks (`optsched.bounds.checker.seconds`).

    Raises
    ------
    Rejected
        If the object is no certificate, belongs to another instance, was changed, or does not
        prove what it claims.
    TooLarge
        If the check would take too much.
    """
    try:
        return _check(instance, certificate)
    except Rejected:
        raise
    except (MemoryError, RecursionError) as error:
        raise TooLarge(f"found no room to check it ({type(error).__name__})") from None
    except Exception as error:  # whatever fails, nothing is proved
        reason = str(error) or "the check takes too much"
        raise Rejected(f"cannot be checked: {type(error).__name__}: {reason:.200}") from None


def _check(instance: Any, certificate: Any) -> int:
    expect(
        isinstance(certificate, dict),
        f"certificate: found {type(certificate).__name__}; expected a JSON object",
    )
    claim = certificate.get("claim")
    expect(
        claim in ("bound", "optimal"), f"claim: found {claim!r:.60}; expected 'bound' or 'optimal'"
    )
    seconds = certificate.get("model") == "seconds"
    fields = FIELDS if seconds else _FIELDS | ({"schedule"} if claim == "optimal" else set())
    wrong = ", ".join(sorted(map(repr, fields ^ set(certificate))))
    expect(not wrong, f"fields: found missing or unknown {wrong:.200}; expected none")
    right = {"format": "optsched-certificate", "version": 1, "instance_sha256": instance.sha256,
             "sha256": digest(certificate)}  # fmt: skip
    for name, expected in right.items():
        same(certificate[name], expected, name)

    value = integer(certificate["value"], "value")
    proved = (proved_ticks if seconds else _proved_rounds)(instance, certificate, Budget())
    expect(proved == value, f"value: found {value}; expected {proved}, which is proved")

    if claim == "optimal":
        expect(not seconds, "claim: found 'optimal'; expected 'bound' in seconds")
        reached = schedule_value(columns_of(instance), certificate["schedule"], instance.sha256)
        expect(reached == value, f"schedule: found a total latency of {reached}; expected {value}")

    return value


def _proved_rounds(instance: Any, certificate: dict[str, Any], budget: Budget) -> int:
    for name, expected in {"model": "rounds", "objective": "tel"}.items():
        same(certificate[name], expected, name)

    denominator = integer(certificate["denominator"], "denominator")
    expect(denominator >= 1, f"denominator: found {denominator}; expected an integer >= 1")
    columns = columns_of(instance)
    leaves = _leaves(columns, certificate["tree"], budget)

    return min(_leaf(columns, leaf, low, high, denominator, budget) for leaf, low, high in leaves)


def digest(certificate: dict[str, Any]) -> str:
    """Return the sha256 of all fields but ``sha256``, in canonical JSON.

    Parameters
    ----------
    certificate : dict

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    rest = {key: value for key, value in certificate.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()


Ranges = dict[int, int | None]


def _leaves(
    columns: Columns, tree: Any, budget: Budget
) -> Iterator[tuple[Any, dict[int, int], Ranges]]:
    """Yield each leaf with the first and last starts that its branches allow (None: no last)."""
    stack: list[tuple[Any, dict[int, int], Ranges, dict[int, tuple[int, int | None]]]]
    stack = [(tree, {}, {}, {})]
    while stack:
        node, low, high, branch = stack.pop()
        budget.spend(10 + len(low))
        for i, (begin, end) in branch.items():
            low, high = {**low, i: begin}, {**high, i: end}

        expect(
            isinstance(node, dict),
            f"tree: found a node {type(node).__name__}; expected a JSON object",
        )
        if "branch" not in node:
            yield node, low, high
            continue

        expect(
            set(node) == {"branch", "children"},
            "tree: found other fields in a branch; expected branch and children",
        )
        i = integer(node["branch"], "tree: branch")
        expect(
            0 <= i < len(columns.arrival),
            f"tree: found request {i}; expected one below {len(columns.arrival)}",
        )
        children = node["children"]
        expect(
            isinstance(children, list) and len(children) > 0,
            "tree: found a branch without children; expected a list",
        )
        following: int | None = low.get(i, columns.arrival[i])
        last = high.get(i)

        for child in children:
            right = isinstance(child, dict) and set(child) == {"from", "to", "tree"}
            expect(right, "tree: found other fields in a child; expected from, to and tree")
            begin = integer(child["from"], "tree: from")
            end = None if child["to"] is None else integer(child["to"], "tree: to")
            gap = f"found the range {begin}..{end}; expected one that begins at {following}"
            right = begin == following and (end is None or end >= begin)
            expect(right, f"tree: request {i}: {gap}")
            following = None if end is None else end + 1
            stack.append((child["tree"], low, high, {i: (begin, end)}))

        complete = following == (None if last is None else last + 1)
        expect(
            complete, f"tree: request {i}: found ranges with another end; expected {last or 'none'}"
        )


def _leaf(
    columns: Columns, leaf: Any, low: dict[int, int], high: Ranges, unit: int, budget: Budget
) -> int:
    kind = leaf.get("relaxation")
    if kind == "prices":
        return _prices(columns, leaf, low, high, unit, budget)
    if kind == "ramp":
        # The ramp relaxation knows no ranges: its bound holds for every start.
        try:
            from optsched.bounds.checker.ramp import check_ramp as check

            return int(check(columns, leaf, budget))
        except Rejected as error:
            raise type(error)(f"ramp: {error}") from None

    raise Rejected(f"tree: relaxation: found {kind!r:.60}; expected 'prices' or 'ramp'")


def _prices(
    columns: Columns, leaf: Any, low: dict[int, int], high: Ranges, unit: int, budget: Budget
) -> int:
    expect(
        set(leaf) == {"relaxation", "from_round", "price"},
        "prices: found other fields; expected relaxation, from_round and price",
    )
    rounds = integers(leaf["from_round"], "prices: from_round")
    price = integers(leaf["price"], "prices: price")
    expect(
        len(rounds) == len(price) > 0,
        "prices: found lists of other lengths; expected as many rounds as prices",
    )
    ascend = rounds[0] >= 1 and all(x < y for x, y in pairwise(rounds)) and rounds[-1] < _FAR
    expect(ascend, "prices: from_round: found other rounds; expected ascending ones >= 1")
    expect(min(price) >= 0, f"prices: price: found {min(price)}; expected integers >= 0")
    expect(price[-1] == 0, f"prices: price: found {price[-1]} as the last; expected 0")
    begin, price = [0, *rounds], [0, *price]
    sums, moments, paid = [0], [0], 0

    for (b, e), p in zip(pairwise(begin), price, strict=False):
        sums.append(sums[-1] + (e - b) * p)
        moments.append(moments[-1] + p * ((b + e - 1) * (e - b) // 2))
        paid += (e - b) * p

    # Only starts whose delay costs less than the first allowed start matter. Where no value
    # among them can exceed 64 bits, sums may wrap on the way, since they are right modulo 2**64.
    longest, top = max(columns.output), max(price)
    peak = max(map(sum, zip(columns.prompt, columns.output, strict=True)))
    wait = max((low[i] - columns.arrival[i] for i in low), default=0)
    span = wait + longest + top * longest * peak // unit + 1
    largest = unit * (span + longest) + 2 * top * longest * peak
    kind: Any = np.int64 if largest < 2**61 and span < 2**31 else object
    table = _Table(
        np.array(begin, dtype=kind), np.array(price, dtype=kind),
        _wrapped(sums, kind), _wrapped(moments, kind), unit, budget,
    )  # fmt: skip
    total = 0
    # Each request needs some numpy calls, and comparisons of starts with every piece.
    budget.spend(len(columns.arrival) * (200 + len(begin) // (200 if kind is np.int64 else 10)))

    for i, a in enumerate(columns.arrival):
        o, q = columns.output[i], columns.prompt[i] + columns.offset - 1
        total += table.least(a, o, q, low.get(i, a), high.get(i))

    return -((columns.capacity * paid - total) // unit)


def _wrapped(values: list[int], kind: Any) -> Any:
    wrapped = np.array([v & _WRAP for v in values], dtype=np.uint64).view(np.int64)
    return np.array(values, dtype=object) if kind is object else wrapped


@dataclass(frozen=True)
class _Table:
    """Prices by pieces of rounds, and the sums of p_t and of t p_t before each piece."""

    begin: Any
    price: Any
    sums: Any
    moments: Any
    unit: int
    budget: Budget

    def least(self, a: int, o: int, q: int, low: int, high: int | None) -> int:
        """Return min f over the starts low..high.

        Take two successive starts at which the first or the last round enters a new piece.
        Between them f has the constant second difference (price of the first round) - (price of
        the last round). So its min there is at an end, or where f stops falling.
        """
        x, final = np.array([low], dtype=self.begin.dtype), _FAR if high is None else high
        top = int(self._f(x, a, o, q)[0][0])
        for enter in ([self.begin[::40] - 1], [self.begin - 1, self.begin - o]):
            # Later than `final` the delay alone costs more than the start that gave `top`.
            final = max(low, min(final, a - o + top // self.unit))
            inner = [e[(e > low) & (e <= final)] for e in enter]
            starts = np.concatenate(inner)
            self.budget.spend(len(starts) // 8 if starts.dtype == np.int64 else 8 * len(starts))
            x = np.append(x[:1], np.unique(starts))
            top = min(top, int(self._f(x, a, o, q)[0].min()))

        value, before, after, within = self._f(x, a, o, q)
        rest = np.append(x[1:], final + 1) - x - 1  # steps to the last start of each run
        # f(x + 1) - f(x) inside a run: the first round's price and KV go, all others' KV falls.
        rise = self.unit - (within - before) + after * (q + o) - before * (q + 1)
        bend = before - after
        turn = np.maximum(0, -(rise // np.maximum(bend, 1)))
        steps = np.where(bend > 0, np.minimum(rest, turn), rest)
        moved = value + steps * rise + bend * (steps * (steps - 1) // 2)

        return min(top, int(moved.min()))

    def _f(self, k: Any, a: int, o: int, q: int) -> tuple[Any, Any, Any, Any]:
        """Return f, the prices of the first and the last round, and the sum of prices between."""
        first = np.searchsorted(self.begin, k + 1, side="right") - 1
        last = np.searchsorted(self.begin, k + o, side="right") - 1
        sum_k, moment_k = self._before(k + 1, first)
        sum_o, moment_o = self._before(k + o + 1, last)
        within = sum_o - sum_k
        value = self.unit * (k + o - a) + (moment_o - moment_k) + (q - k) * within

        return value, self.price[first], self.price[last], within

    def _before(self, t: Any, piece: Any) -> tuple[Any, Any]:
        """Return the sums of p and of t p over the rounds before t, which ends in ``piece``."""
        m, p, b = t - self.begin[piece], self.price[piece], self.begin[piece]
        pairs = np.where(m % 2 == 0, m // 2 * (m - 1), (m - 1) // 2 * m)
        return self.sums[piece] + m * p, self.moments[piece] + p * (m * b + pairs)


def _kv_in_blocks(columns: Columns, starts: list[int], t: int) -> int:
    """Return the KV in whole blocks that requests hold at the end of round t."""
    tokens = (
        s + columns.offset - 1 + t - k
        for s, o, k in zip(columns.prompt, columns.output, starts, strict=True)
        if k < t <= k + o
    )
    return sum(-(-held // columns.block) * columns.block for held in tokens)


def schedule_value(columns: Columns, schedule: Any, sha256: str) -> int:
    """Return the total latency of a schedule of starts after checking every limit on it.

    Parameters
    ----------
    columns : Columns
        The instance.
    schedule : dict
        The JSON object of the schedule.
    sha256 : str
        The sha256 of the instance, which the schedule must name.

    Returns
    -------
    int
        Total latency in rounds.

    Raises
    ------
    Rejected
        If the object is no schedule of the instance, or if it breaks a limit.
    """
    right = {"format": "optsched-schedule", "version": 1, "kind": "starts",
             "instance_sha256": sha256}  # fmt: skip
    fields = isinstance(schedule, dict) and set(schedule) == {*right, "starts"}
    expect(fields, f"schedule: found other fields; expected {', '.join(right)} and starts")
    for name, value in right.items():
        same(schedule[name], value, f"schedule: {name}")

    starts = integers(schedule["starts"], "schedule: starts")
    expect(
        len(starts) == len(columns.arrival),
        f"schedule: found {len(starts)} starts; expected one per request",
    )
    changes: dict[int, list[int]] = {}  # time: running requests, sum of (q - start), prompts, new

    for i, k in enumerate(starts):
        a, s, o = columns.arrival[i], columns.prompt[i], columns.output[i]
        expect(
            k >= a, f"schedule: request {i}: found the start {k}; expected one >= its arrival {a}"
        )
        held = s + columns.offset - 1 - k

        for at, sign in ((k, 1), (k + o, -1)):
            change, new = changes.setdefault(at, [0, 0, 0, 0]), int(sign > 0)
            for j, amount in enumerate((sign, sign * held, s * new, new)):
                change[j] += amount

    count = base = 0
    for at, until in pairwise(sorted(changes)):
        change = changes[at]
        count, base = count + change[0], base + change[1]
        decodes = count - change[3]
        kv = base + until * count
        if columns.block > 1:
            kv = _kv_in_blocks(columns, starts, until)
        for name, use, limit in (
            ("KV tokens", kv, columns.capacity),
            ("running requests", count, columns.running),
            ("tokens", change[2] + decodes, columns.batch),
            ("prefill tokens", change[2], columns.prefill),
            ("decodes beside prefills", decodes if change[3] else 0, None if columns.hybrid else 0),
        ):
            broken = f"schedule: rounds {at}..{until}: found {use} {name}; expected at most {limit}"
            expect(limit is None or use <= limit, broken)

    return sum(starts) + sum(columns.output) - sum(columns.arrival)
