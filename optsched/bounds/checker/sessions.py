"""What sessions prove, in exact integers: the leaf ``sessions``, which the bounds compute, too.

Every request is cut into *pieces* one after another: its prefill, and its later tokens in as many
parts as the leaf says. A piece has machine time that no schedule avoids, and a time that its
batches take alone, one after another with their fixed costs
(`optsched.bounds.checker.requests`). Rounds are batches of fixed cost 1, and a token's work is the
KV that it holds over M.

*Alone.* Let a piece's *head* be the longest way to it of arrival, delays and times alone, and its
*tail* the longest way from it to its session's end. By induction along `Sessions.order` it begins
no earlier than its head, and its session goes on after its end for at least its tail. The longest
way of all is the session's *chain*.

*Work.* Give piece k, with work w_k, the weight w_k / W, where W is the work of its session. A
session ends no earlier than each of its pieces and its tail, so its end is at least the mean of
c_k + tail_k by these weights. In a schedule spread the work that a batch does evenly over it: these
rates sum to at most 1, and are 0 before the heads. So the mean time B_k at which k is worked for is
at most c_k - w_k / 2: its work fills a time of at least w_k before c_k. Over all such rates the
weighted sum of B_k is least on one preemptive machine that always works for a released piece of the
largest ratio of weight to work (Goemans 1996), here 1 / W: of the smallest session. So

    sum of session ends >= sum_k (w_k / W) (B*_k + w_k / 2 + tail_k),

and the sum is also at least that of arrivals and chains. The larger of both counts. That machine's
last end is one of every schedule's makespan, as is the longest way to an end. Evictions do work
again, after which each token was made once more, or for the last time: that one counts here.

*Shared prefixes.* Charges (`optsched.bounds.checker.prefixes`) stand in for prefills, at D = 0:
who pays for a name has the smallest head of all its users, and its work is done since the release
of one of them, by the first token of each. Heads need times alone, which go by precedence only.

*Total latency.* Where each request comes after at most one and has at most one after it, latencies
of a session telescope to its last end less its arrival and its delays.

*Several machines.* N equal machines are one that is N times as fast, whatever they do at once: a
piece needs w_k / N of its time. Heads and tails are those of one machine, since the batches of a
request follow one another wherever they run. So all of the above holds with w_k / N in place of
w_k. Moves between machines only add to it, and machines with roles do no more than others. A name
is first filled on one of them, before whoever claims it has its first token.

*Rounds in which KV is shared.* A token's work is the KV that no other request of its batch holds
(`Charge.private`), over M; none where a request shares what it decodes.

Times are ticks since the first arrival. Arrivals, delays, work and times alone are rounded down, so
for what is subtracted a tick is added.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from optsched.bounds.checker.fields import PREFIX_FIELDS, SESSION_FIELDS
from optsched.bounds.checker.parts import Budget, expect, expect_fields, expect_known, integer
from optsched.bounds.checker.prefixes import charges_of
from optsched.bounds.checker.requests import (
    least_sum,
    rates_of,
    request_of,
    shortest_first,
    steps_of,
    ticks_since,
)
from optsched.problem.sessions import Sessions

SUMS = ("session_completion", "mean_session_completion")
"""Objectives for which what is proved is a sum over sessions."""
OBJECTIVES = (*SUMS, "tel", "makespan")
MAX_PARTS = 64
# Ticks of a round are the capacity times this.
_FINE = 1 << 20
Pieces = list[tuple[int, int]]
"""Of a request: the work and the time alone of each piece, in ticks."""


def sessions_rounds(instance: Any, leaf: Any, objective: str, budget: Budget) -> int:
    """Return what the leaf proves in rounds, rounded up."""
    expect_known(instance, PREFIX_FIELDS | SESSION_FIELDS)
    parts, capacity = _parts(instance, leaf, budget), int(instance.kv_capacity)
    held, newest = instance.prompt_tokens.tolist(), instance.kv_offset
    # What is private to a request does not depend on arrivals, so any will do. D is 0, as always
    # here (module's text, Shared prefixes).
    if charges := charges_of(instance, [0] * len(held), 0):
        held = [charge.private for charge in charges]

    # A round has ``unit`` ticks. The j-th token's work is a line in j: its KV over M, with the
    # newest token where that counts. It is 0 where a request shares what it decodes (-1).
    unit = capacity * _FINE
    pieces = []
    for s, o in zip(held, instance.output_tokens.tolist(), strict=True):
        # With a line twice, `least_sum` is the sum of that line.
        line = ((s + newest) * _FINE, _FINE) if s >= 0 else (0, 0)
        sums = [(least_sum(line, line, k), k * unit) for k in (0, *_cuts(o, parts))]
        pieces.append(_differences(sums))

    arrivals = _arrivals(instance, unit)
    ticked = Sessions(instance.after, _column([d * unit for d in instance.delay.tolist()]))
    ticks = _prove(ticked, arrivals, pieces, objective, 0)  # rounds are exact: nothing is added
    return -(-ticks // unit) + (int(instance.first_arrival) if objective == "makespan" else 0)


def sessions_ticks(
    instance: Any, model: Any, ticks: int, leaf: Any, objective: str, budget: Budget, machines: int
) -> int:
    """Return what the leaf proves in seconds, in ticks since the first arrival.

    `machines`: how many equal ones there are, each with the instance's capacity and limits.
    """
    rates = rates_of(instance, model, PREFIX_FIELDS | SESSION_FIELDS)
    parts, arrivals = _parts(instance, leaf, budget), _arrivals(instance, ticks)
    # Since the smallest one: with 0 among them these are the delays themselves.
    delay = ticks_since([0.0, *instance.delay.tolist()], ticks)[1:]
    sessions = Sessions(instance.after, _column(delay))
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()

    def charge(alone: Sequence[int]) -> list[Any]:
        """Return the requests' least times, with charges at the releases by some times alone."""
        # D is 0 (module's text, Shared prefixes).
        charges: Any = charges_of(instance, sessions.earliest(arrivals, alone), 0)
        rows = zip(prompt, output, charges or [None] * len(prompt), strict=True)
        return [request_of(rates, *row, ticks) for row in rows]

    def floor(time: int) -> int:
        return time * ticks // rates.scale

    # What a request takes alone depends on precedence only, so these times are right at once. Who
    # pays for a name depends on heads, for which they are needed (module's text, Shared prefixes).
    requests = charge([0] * len(prompt))
    if instance.prefixes is not None:
        requests = charge([floor(r.chain) for r in requests])

    pieces = []
    for r in requests:
        steps = steps_of(rates, r.prompt, r.held)
        sums = [(0, 0)]  # up to the end of the prefill, then of each part of the later tokens
        for k in (0, *_cuts(r.steps, parts)):
            work, alone = steps.upto(k)
            sums.append((r.own + r.share + work, r.first + alone))

        pieces.append([(floor(w) // machines, floor(a)) for w, a in _differences(sums)])

    # Arrivals and delays were rounded down, by less than 1 tick each.
    return _prove(sessions, arrivals, pieces, objective, 1)


def _parts(instance: Any, leaf: Any, budget: Budget) -> int:
    """Return into how many parts a leaf cuts the later tokens of each request."""
    expect_fields(leaf, "sessions", ("relaxation", "parts"))
    kind, parts = leaf["relaxation"], integer(leaf["parts"], "sessions: parts")
    expect(kind == "sessions", f"tree: relaxation: found {kind!r:.60}; expected sessions")
    expect(1 <= parts <= MAX_PARTS, f"sessions: parts: found {parts}; expected 1 to {MAX_PARTS}")
    budget.spend(instance.n * (500 + 50 * parts))
    return parts


def _arrivals(instance: Any, ticks: int) -> list[int]:
    """Return the arrivals since the first one, and 0 for those that come after others."""
    given = iter(ticks_since(instance.given_arrivals.tolist(), ticks))
    return [0 if row else next(given) for row in instance.after]


def _column(values: list[int]) -> Any:
    """Return an array of Python integers, which may be of any size."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _cuts(count: int, parts: int) -> list[int]:
    """Return where so many tokens are cut, without 0 and with their number, ascending."""
    return sorted({count * k // parts for k in range(1, parts + 1)} - {0})


def _differences(sums: Pieces) -> Pieces:
    """Return the pieces of which the sums up to each are known, from (0, 0) on."""
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(sums)]


def _prove(
    sessions: Sessions, arrivals: list[int], pieces: list[Pieces], objective: str, tick: int
) -> int:
    """Return the value that is proved, in ticks.

    ``pieces`` has of each request (work, time alone) of its pieces, in ticks, as arrivals are.
    `tick` is by how much an arrival or a delay may be longer than its number of ticks.
    """
    right = objective in OBJECTIVES
    expect(right, f"objective: found {objective!r:.60}; expected {', '.join(OBJECTIVES)}")
    alone = [sum(time for _, time in cut) for cut in pieces]
    head, tail, number = sessions.earliest(arrivals, alone), sessions.tails(alone), sessions.session

    # By session: its first head, its chain (here since the first arrival of all), its work W, and
    # twice the sum over pieces of work times (mean time + half the work + tail).
    begin, chain, total, moment = ([0] * (int(number.max()) + 1) for _ in range(4))
    # By piece with work: its session, and its release, work and tail.
    session_of, release, length, tail_of = list[int](), list[int](), list[int](), list[int]()
    for i, s in enumerate(number.tolist()):
        piece_head, piece_tail = head[i], alone[i] + tail[i]
        # A chain of 0: no request of the session was looked at yet.
        begin[s] = min(begin[s], piece_head) if chain[s] else piece_head
        chain[s] = max(chain[s], piece_head + alone[i])
        for work, time in pieces[i]:
            piece_tail -= time
            if work > 0:
                session_of.append(s)
                release.append(piece_head)
                length.append(work)
                tail_of.append(piece_tail)
                total[s] += work

            piece_head += time

    # On the machine of the proof, a piece that is worked for from low to end adds to twice its work
    # times its mean time the integral of 2 t, end^2 - low^2.
    end = 0
    if session_of:
        for low, end, k in shortest_first(release, length, [total[s] for s in session_of]):
            moment[session_of[k]] += end * end - low * low

    for s, work, piece_tail in zip(session_of, length, tail_of, strict=True):
        moment[s] += work * (work + 2 * piece_tail)

    if objective == "makespan":
        return max(end, *chain)

    ends = sum(m // (2 * w) if w else c for m, w, c in zip(moment, total, chain, strict=True))
    ends = max(ends, sum(chain)) - sum(begin)
    # What is subtracted was rounded down: a tick for each session's begin.
    if objective != "tel":
        return ends - tick * len(total)

    # Total latency: each request alone, and where sessions are lines, the sum that telescopes.
    latencies = sum(alone)
    if sessions.count.max() <= 1 and np.diff(sessions.next_offsets).max() <= 1:
        latencies = max(latencies, ends - sum(sessions.delay.tolist()) - tick * sessions.n)

    return latencies
