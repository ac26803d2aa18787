r"""One clock for all requests: the bound at low load.

Prices (`optsched.bounds.paths`) let every request choose its own path through time, and a mixture
of paths too: "hurry now, while the prefills of others wait" with "the prefills first, hurry later".
In truth all requests see the same batches. This bound counts time on a clock that they share.

*Reading a schedule.* Request i has own prefill work P_i, and its k-th token (k >= 2) own work of at
least w_k in a batch that lasts at least alone_k for it (`optsched.bounds.batch`). Choose any
x_i in [0, P_i] and any eta_i in [0, 1) with eta_i alone_k <= w_k for all k. Read a batch as its own
works, one request after another, and then its fixed cost. Of the own work of i's last run, the
first x_i seconds of its prefill, and the first eta_i alone_k seconds of token k, are *exclusive*:
nobody else gets on meanwhile. All other time is *clock*. While the clock runs, the requests of the
batch make *progress*: i makes P_i - x_i + f_1 of it until its first token, f_1 being the fixed cost
of a batch that prefills, and (1 - eta_i) alone_k for token k. So with

    d_i = P_i - x_i + f_1,   r_i = eta_i / (1 - eta_i),   T_i = d_i + (1 - eta_i) sum_k alone_k,

i completes when its progress c_i is T_i. Let X_i(t) be its exclusive time up to t, and
Psi(t) = t - sum_i X_i(t) the clock. Progress grows at most as fast as the clock. Exclusive work
comes before the progress of its token, so

    g_i(c_i) <= X_i <= G_i(c_i),    g_i(c) = x_i [c > 0] + r_i max(0, c - d_i)    (c <= T_i),

where G_i is g_i plus x_i [c = 0] plus the exclusive part of one token, and 0 before i arrives.

*Where the clock is when j arrives.* Let L_j be any number with

    L_j + sum_{i arrived before j} G_i(max(0, L_j - L_i)) <= a_j.

Then Psi(a_j) >= L_j. By induction c_i(a_j) <= Psi(a_j) - Psi(a_i) <= Psi(a_j) - L_i, so
a_j = Psi(a_j) + sum X_i <= Psi(a_j) + sum G_i(Psi(a_j) - L_i), and the right-hand side grows with
Psi(a_j) and would be below a_j if Psi(a_j) were below L_j. And as the clock never falls, L_j may be
raised to any earlier L_i. The least clock is that of prefilling every request at once and letting
all decode together.

*Lags.* U_j(t) = Psi(t) - L_j - c_j(t) is at least 0 when j arrives and never falls. Let U_j be its
value when j completes. Then Psi(C_i) = L_i + T_i + U_i. At that moment c_j is at least
Psi(C_i) - L_j - U_j (or T_j, after j's completion; and where that is not positive g_j is 0, whether
j has arrived or not). Since C_i = Psi(C_i) + sum_j X_j(C_i), with h_j <= g_j nondecreasing,

    C_i >= L_i + T_i + U_i + R_i + sum_{j != i} h_j(L_i + T_i + U_i - L_j - U_j),

R_i being all exclusive work of i. Dropping U_i from the argument of h_j, the terms with U_j stand
alone, and with y_ij = L_i + T_i - L_j

    TEL >= sum_i (L_i + T_i + R_i - a_i) + sum_j min_{u >= 0} [ u + sum_{i != j} h_j(y_ij - u) ].

*What is used.* h_j(c) = x_j min(1, c / s_j) + r_j max(0, c - d_j) for a ramp of length s_j, since a
prefill that is exclusive at once is put off for every completion that comes soon. The function of u
is piecewise linear, and its least value is found at its corners. x_j and eta_j start at their
largest values and fall where putting j off would gain, since a lag costs only the clock and not
the exclusive time of others. Any values are valid.

*Pieces.* Dropping requests from a schedule leaves a schedule of the others with idle time, and the
reading above allows idle time. So bounds of disjoint sets of requests add up
(`optsched.bounds.pieces`). The bound is taken on pieces of the trace, which also ends the sums over
i.

*Rounding.* Times are counted from a piece's first arrival. Sums of completion times and gains carry
relative errors far below 1e-9 of the sum of all completion times, and that much is subtracted. L_j
is lowered by 1e-9 of the arrival time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.bounds.base import Bound, BoundTask, Proof
from optsched.bounds.batch import PROVED_FOR, unavoidable_work
from optsched.bounds.cuts import cut_where_quiet
from optsched.problem.budget import Budget
from optsched.problem.objective import TOTAL_LATENCY

Floats = NDArray[np.float64]

_SAFETY = 1e-9
_FEWEST, _MOST = 4, 8
"""Requests between places where the trace may be cut."""
_TOGETHER = 8
"""A piece goes over at most so many of them: over long pieces lags are charged too little."""
_ROUNDS = 40
_LARGEST_SHARE = 0.99
_SWEEPS = 4


class Shares(NamedTuple):
    """Requests, and how much of their work is exclusive; columns have the shape (n,).

    Attributes
    ----------
    arrival : ndarray of float64
        Seconds since the first arrival, nondecreasing.
    prefill : ndarray of float64
        Own work of the prefill, in seconds: P of the module's text.
    fixed : float
        Fixed cost of a batch that prefills, in seconds.
    decode : ndarray of float64
        Time of all later batches of each request, if it were alone, in seconds.
    longest : ndarray of float64
        Time of the longest of them.
    exclusive : ndarray of float64
        Seconds of the prefill that are exclusive: x.
    share : ndarray of float64
        The exclusive share of decoding: eta.
    ramp : ndarray of float64
        Seconds of the ramp over the exclusive part of the prefill: s.
    """

    arrival: Floats
    prefill: Floats
    fixed: float
    decode: Floats
    longest: Floats
    exclusive: Floats
    share: Floats
    ramp: Floats


@njit(cache=True)
def clock_at_arrivals(shares: Shares) -> Floats:
    """Return L of the module's text: the least clock when each request arrives.

    Parameters
    ----------
    shares : Shares

    Returns
    -------
    ndarray of float64, shape (n,)
        Seconds of the clock, nondecreasing.
    """
    arrival, prefill, fixed, decode, longest, exclusive, share, _ = shares
    n = arrival.shape[0]
    clock = np.zeros(n)
    active = np.zeros(n, np.int64)
    running = 0
    now = level = 0.0
    for j in range(n):
        while now < arrival[j]:
            end, slope = level + (arrival[j] - now), 1.0
            for q in range(running):
                i = active[q]
                begin = clock[i] + prefill[i] - exclusive[i] + fixed
                if level < begin:
                    end = min(end, begin)
                else:
                    end = min(end, begin + (1 - share[i]) * decode[i])
                    slope += share[i] / (1 - share[i])
            if now + (end - level) * slope >= arrival[j]:
                level += (arrival[j] - now) / slope
                now = arrival[j]
            else:
                now += (end - level) * slope
                level = end
            left = 0
            for q in range(running):
                i = active[q]
                begin = clock[i] + prefill[i] - exclusive[i] + fixed
                if level < begin + (1 - share[i]) * decode[i]:
                    active[left] = i
                    left += 1
            running = left
        clock[j] = level
        now += exclusive[j] + share[j] * longest[j]
        active[running] = j
        running += 1
    return np.maximum(clock - 1e-9 * arrival, 0.0)


@njit(cache=True)
def _gain(after: Floats, ramp: float, x: float, rate: float, begin: float, tail: float) -> float:
    """Return max over u >= 0 of sum h(y) - h(y - u) - u, for the values y > 0 in ``after``."""
    m = after.shape[0]
    at, change = np.empty(4 * m), np.empty(4 * m)
    corners = 0
    for q in range(m):
        y = after[q]
        at[corners], change[corners] = max(0.0, y - ramp), x / ramp
        at[corners + 1], change[corners + 1] = y, -x / ramp
        corners += 2
        if y > begin:
            at[corners], change[corners] = max(0.0, y - tail), rate
            at[corners + 1], change[corners + 1] = y - begin, -rate
            corners += 2
    best = value = u = 0.0
    slope = -1.0
    for q in np.argsort(at[:corners]):
        value += slope * (at[q] - u)
        u = at[q]
        slope += change[q]
        best = max(best, value)
    return best


@njit(cache=True)
def value_at(shares: Shares, gains: Floats) -> float:
    """Return the bound on total latency that shares prove, rounded down.

    Parameters
    ----------
    shares : Shares
    gains : ndarray of float64, shape (n,)
        Receives what putting off each request would gain, in seconds.

    Returns
    -------
    float
        Seconds.
    """
    arrival, prefill, fixed, decode, _, exclusive, share, ramps = shares
    n = arrival.shape[0]
    clock = clock_at_arrivals(shares)
    begin = prefill - exclusive + fixed
    tail = begin + (1 - share) * decode
    ends = clock + tail
    total = completions = 0.0
    after = np.empty(n)
    for j in range(n):
        x, rate = exclusive[j], share[j] / (1 - share[j])
        ramp = max(1e-9, min(ramps[j], tail[j]))
        known = ends[j] + x + rate * (tail[j] - begin[j])
        total += known - arrival[j]
        completions += known
        m = 0
        for i in range(n):
            y = ends[i] - clock[j]
            if i == j or y <= 0:
                continue
            after[m] = y
            m += 1
            put = x * min(1.0, y / ramp) + rate * max(0.0, min(y, tail[j]) - begin[j])
            total += put
            completions += put
        gains[j] = _gain(after[:m], ramp, x, rate, begin[j], tail[j])
        total -= gains[j]
        completions += gains[j]
    return total - 1e-9 * completions


@njit(cache=True)
def best_value(shares: Shares, rounds: int) -> float:
    """Return the best bound on the way of lowering and raising shares together.

    The shares of a request fall while putting it off would gain, and rise again otherwise.

    Parameters
    ----------
    shares : Shares
        With the largest valid shares. They become the best ones found.
    rounds : int

    Returns
    -------
    float
        Seconds.
    """
    exclusive, share, ramp = shares.exclusive, shares.share, shares.ramp
    most, largest = exclusive.copy(), share.copy()
    n = exclusive.shape[0]
    gains = np.zeros(n)
    found = np.zeros((3, n))
    best, step = -np.inf, 0.15
    for _ in range(rounds):
        value = value_at(shares, gains)
        if value > best:
            best = value
            found[0], found[1], found[2] = exclusive, share, ramp
        for j in range(n):
            factor = 1 - step if gains[j] > 1e-9 else 1 + step / 4
            exclusive[j] = min(most[j], exclusive[j] * factor)
            share[j] = min(largest[j], share[j] * factor)
            ramp[j] = exclusive[j]
        step *= 0.93
    exclusive[:], share[:], ramp[:] = found[0], found[1], found[2]
    return best


@njit(cache=True)
def polished_value(shares: Shares, largest: Shares, sweeps: int) -> float:
    """Return the bound after shares and ramps were changed one by one where that raises it.

    Parameters
    ----------
    shares : Shares
        Where to start. They are changed.
    largest : Shares
        With the largest valid shares.
    sweeps : int

    Returns
    -------
    float
        Seconds.
    """
    gains = np.zeros(shares.arrival.shape[0])
    best = value_at(shares, gains)
    for sweep in range(sweeps):
        step = 0.5 / (1 + sweep)
        for j in range(shares.arrival.shape[0]):
            for kind in range(3):
                values = (shares.exclusive, shares.share, shares.ramp)[kind]
                most = (largest.exclusive[j], largest.share[j], np.inf)[kind]
                for factor in (1 + step, 1 - step):
                    before = values[j]
                    values[j] = min(most, before * factor + (1e-4 if factor > 1 else 0.0))
                    value = value_at(shares, gains)
                    if value > best + 1e-12:
                        best = value
                    else:
                        values[j] = before
    return best


def shares_of(task: BoundTask) -> Shares:
    """Return the requests of a task in order of arrival, with the largest valid shares.

    Parameters
    ----------
    task : BoundTask
        A task with an instance in seconds and a `BatchCost`.

    Returns
    -------
    Shares
    """
    instance, cost = task.instance, task.batch_cost
    work = unavoidable_work(instance, cost)
    order = np.argsort(instance.arrival, kind="stable")
    safe = 1 - _SAFETY
    fixed = cost.layers / 1000.0 * (cost["base"] + cost["prefill_base"]) * safe
    return Shares(
        arrival=instance.release[order],
        prefill=work.own_prefill[order],
        fixed=fixed,
        decode=(work.chain - work.first)[order] * safe,
        longest=work.longest_step[order],
        exclusive=work.own_prefill[order],
        share=np.minimum(work.decode_share[order], _LARGEST_SHARE),
        ramp=work.own_prefill[order],
    )


def clock(task: BoundTask, budget: Budget) -> Proof:
    """Return the bound on total latency in seconds (see the module's text for the proof).

    Parameters
    ----------
    task : BoundTask
        A task with an instance in seconds and a `BatchCost`.
    budget : Budget
        When it is over, pieces that are left count with their requests alone.

    Returns
    -------
    Proof
        A value in seconds.
    """
    shares = shares_of(task)
    alone = shares.prefill + shares.fixed + shares.decode
    cuts = cut_where_quiet(shares.arrival, shares.arrival + alone, _FEWEST, _MOST)
    least = np.concatenate([[0.0], np.cumsum(alone)]) * (1 - _SAFETY)
    ends = [0, *(last for _, last in cuts)]
    best, begins = [0.0], [0]  # of all requests before each cut, and where their last piece begins
    for place in range(len(cuts)):
        found = best[place] + float(least[ends[place + 1]] - least[ends[place]]), place
        for back in range(place, max(-1, place - _TOGETHER), -1):
            if budget.over and place > 0:
                break
            piece = _piece(shares, ends[back], ends[place + 1])
            found = max(found, (best[back] + best_value(piece, _ROUNDS), back))
        best.append(found[0])
        begins.append(found[1])
    total, place = best[-1], len(cuts)
    while place > 0 and not budget.over:
        back = begins[place]
        piece = _piece(shares, ends[back], ends[place])
        largest = _piece(shares, ends[back], ends[place])
        best_value(piece, _ROUNDS)
        # The piece counts with this, which may be its requests alone and not what its shares prove.
        counted = best[place] - best[back]
        total += max(0.0, polished_value(piece, largest, _SWEEPS) - counted)
        place = back
    return Proof(total * (1 - _SAFETY))


def _piece(shares: Shares, first: int, last: int) -> Shares:
    """Return copies of the columns from ``first`` to before ``last``."""
    arrival, prefill, fixed, decode, longest, exclusive, share, ramp = shares
    of = slice(first, last)
    return Shares(
        arrival[of] - arrival[first], prefill[of], fixed, decode[of], longest[of],
        exclusive[of].copy(), share[of].copy(), ramp[of].copy(),
    )  # fmt: skip


CLOCK = Bound(
    "clock",
    "one clock of fixed costs for all requests; best at low load",
    "second",
    ("tel",),
    clock,
    PROVED_FOR,
    searches=True,
    suits=lambda task: task.objective != TOTAL_LATENCY,  # which `pieces` takes together
)
