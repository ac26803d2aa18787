r"""Independent check of the leaf ``clock``: one clock of fixed costs for a few requests.

*Reading a schedule.* Request i has own work of at least x_i in its last prefill and at least d is
the fixed cost of a batch that prefills. Its later token k takes a batch of at least alone_k, of
which at least own_k is own work. Let r_i be such that r_i / (1 + r_i) alone_k <= own_k for all k.
Read a batch as the own works of its requests, one after another, and then its fixed cost. Of i's
own work, x_i of the prefill and r_i / (1 + r_i) alone_k of token k are *exclusive*: nobody else
gets on meanwhile. Time that is not exclusive, for any request, is the *clock*. While it runs, the
requests of the batch make *progress*: d until the first token, and alone_k / (1 + r_i) for token k.
With D_i = sum_k alone_k / (1 + r_i), i completes at progress T_i = d + D_i, and then
R_i = x_i + r_i D_i of exclusive time has passed for it. Exclusive work comes before the progress of
its token, so at progress c it is at most

    G_i(c) = x_i for c < d,    min(R_i, x_i + r_i (c - d) + the exclusive part of one token) else,

and at least x_i [c > 0] + r_i min(D_i, max(0, c - d)). Any smaller x_i, d, alone_k and r_i will do.

*The clock.* Let Psi(t) be the clock at time t, s_i a lower bound on Psi when i's progress begins,
e_i = s_i + T_i, and U_i = Psi(C_i) - T_i >= s_i. Progress grows at most as fast as the clock. So if
F(L) = L + sum of G_i(max(0, L - s_i)) over the requests that arrived before k, F(Psi(a_k)) >= a_k.
F does not fall, so F(L) < a_k shows Psi(a_k) > L: then s_j >= L for j = k and all later j.

*Branching.* Either i begins before k completes, or it is after k, and s_i >= e_k. A branch bounds
both cases, and the smaller bound holds. A node holds with its own bound, too.

*Completions.* C_k is Psi(C_k) = T_k + U_k, R_k and the exclusive time of others before C_k. Of
those that are after k only what had passed at a_k counts: if F without them is below a_k at L, the
clock and that time were more than L together at a_k. With b_k the larger of s_k and such an L,

    C_k >= max(U_k, b_k) + T_k + R_k
           + sum_{i not after k} (x_i [U_i < e_k or i begins before k completes]
                                  + r_i min(D_i, max(0, e_k - U_i - d))).

Summed over k, the terms with U_i depend on u = U_i - b_i alone. They do not rise with U_i but for
u itself, so u >= 0. They are linear in u between the values at which e_k - U_i is 0, d or T_i,
and jump down only, so the least is at such a value or at u = 0.

*Integers.* Time is counted in units of a power of 2 of ticks, such that no sum reaches 2**61. All
is rounded down, but what G counts is rounded up. r_i has 20 bits after the point. Arrivals are
rounded down, and a unit per request is subtracted. In compiled loops ``table`` has a row for each
request, in order of arrival: 0 the arrival, 1 x, 2 D, 3 r times 2**20, 4 the exclusive part of one
token. ``fixed`` is d, ``begins`` has s, ``decided`` a mark for each pair (`Marks`), and what is
paid is times 2**20.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import Budget, Ints, TooLarge, expect, expect_fields, integers
from optsched.bounds.checker.requests import Part, Rates, Request, later_of
from optsched.problem.kernel import njit

BITS = 20
"""Bits of r after the point."""
# The largest r that is used.
_LARGEST_RATE = 99 << BITS
# Bits of the largest time, in units.
_TOP = 40
# The most requests of a leaf.
_REQUESTS = 200
# What is decided of a pair (`Marks`), and what `tree_value` returns in place of a value.
BEFORE, AFTER = 1, 2
MALFORMED, TOO_LONG = -2, -1
Marks = NDArray[np.int8]
"""Of i and k: 0, or 1 if i begins before k completes, or 2 if it begins after."""


def check_clock(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return the total latency that a leaf proves, in ticks, rounded down (module's text).

    ``branches`` lists the nodes of the tree, each before its children. It is 0 for a node without
    children, and 1 + i n + k for one that decides about the requests i and k, in order of arrival.
    The child in which i begins before k completes comes first.
    """
    expect(objective == "tel", f"clock: found the objective {objective!r}; expected 'tel'")
    expect_fields(leaf, "clock", ("relaxation", "branches"))
    branches, n = integers(leaf["branches"], "clock: branches"), len(part.requests)
    expect(n <= _REQUESTS, f"clock: found {n} requests; expected at most {_REQUESTS}")
    expect(
        len(branches) > 0 and min(branches) >= 0 and max(branches) <= n * n,
        f"clock: branches: found none or others; expected integers from 0 to {n * n}",
    )
    table, fixed, shift = table_of(part)
    value, steps = tree_value(table, fixed, np.array(branches, dtype=np.int64), budget.left)
    budget.spend(steps)
    if value == TOO_LONG:
        raise TooLarge("clock: found more steps than are left; too large to check")

    expect(value != MALFORMED, "clock: branches: found no tree of pairs; expected one")
    return int(value) << shift


def table_of(part: Part) -> tuple[Ints, int, int]:
    """Return the columns of requests and d in units of 2**shift ticks, and the shift.

    The columns are the arrival, x, D, r and the exclusive part of one token. The shift is such that
    the largest time that can come up is below 2**40 units; with the bits of r it is below 2**60.
    """
    fixed, n = part.floor(part.rates.refill), len(part.requests)
    rows = [_row_of(part, request) for request in part.requests]
    longest = max(row[1] for row in rows) + fixed
    top = part.arrival[-1] + n * (n + 3) * longest  # in a round of `node_value` each may wait
    # What each may get of others' exclusive work: x, the exclusive part of one token and r D.
    top += n * max(row[0] + row[3] + row[4] for row in rows)
    shift = max(0, top.bit_length() - _TOP)
    columns = [
        [a >> shift, own >> shift, progress >> shift, rate, -(-slack >> shift)]
        for a, (own, progress, rate, slack, _) in zip(part.arrival, rows, strict=True)
    ]
    return np.array(columns, dtype=np.int64), fixed >> shift, shift


def _row_of(part: Part, request: Request) -> tuple[int, int, int, int, int]:
    """Return x, D, r, the exclusive part of one token, rounded up, and r D; r in its own unit.

    Times are ticks, and r is in units of 2**-`BITS`. D = sum alone_k / (1 + r), and the exclusive
    part of token k is r / (1 + r) alone_k, at most that of the longest batch.
    """
    own = part.floor(request.own)
    if request.steps == 0:
        return own, 0, 0, 0, 0

    one = 1 << BITS
    rate, longest = _min_rate(part.rates, request)
    progress = part.floor((request.chain - request.first) * one // (one + rate))
    slack = -(-longest * rate * part.ticks // ((one + rate) * part.rates.scale))

    return own, progress, rate, slack, -(-progress * rate >> BITS)


def _min_rate(rates: Rates, request: Request) -> tuple[int, int]:
    """Return the largest r of a request's later tokens, rounded down, and their longest batch.

    The r of a token is own / (alone - own) of its batch, and the smallest over all will do for
    each; it is at most `_LARGEST_RATE`, also if batches are own work alone. Own work and time of
    the j-th are each the smaller of two affine functions, so between the places where one takes
    over, their ratio is monotone.
    """
    # Own work of the j-th is step + slope j if it is decoded, and again + token j if refilled. The
    # fixed cost of its batch comes on top: `rates.decode`, or `rates.refill`.
    step, slope, again, token = later_of(rates, request.prompt)
    last, rise = request.steps - 1, slope - token
    places = {0, last}

    for lead in (again - step, again + rates.refill - step - rates.decode):
        if rise != 0:
            turn = lead // rise
            # Where the two affine functions cross, the ratio may turn, and nowhere else: between
            # these two whole numbers.
            places |= {min(max(j, 0), last) for j in (turn, turn + 1)}

    rate, longest = _LARGEST_RATE, 0
    for j in places:
        decode, refill = step + slope * j, again + token * j
        own, alone = min(decode, refill), min(decode + rates.decode, refill + rates.refill)
        longest = max(longest, alone)
        if alone > own:
            rate = min(rate, (own << BITS) // (alone - own))

    return rate, longest


@njit
def tree_value(table: Ints, fixed: int, branches: Ints, allowed: int) -> tuple[int, int]:
    """Return what a tree proves, >= 0, or `MALFORMED` or `TOO_LONG`, and the steps that it took.

    ``branches`` are as in `check_clock`, and ``allowed`` is how many steps it may take. Nodes are
    looked at in depth-first order. A node's own value counts beside that of its children.
    """
    n, nodes = table.shape[0], branches.shape[0]
    decided = np.zeros((n, n), np.int8)
    pairs = np.zeros(n * n + 1, np.int64)  # i n + k of the nodes above, with what they prove alone
    alone = np.zeros(n * n + 1, np.int64)
    first = np.zeros(n * n + 1, np.int64)  # what the first child proves
    depth = next_node = steps = 0
    details = np.empty((4, n), np.int64)  # scratch of `node_value`, whose rows are not used here

    while next_node < nodes:
        value, more = node_value(table, fixed, decided, details)
        value, steps = max(value, 0), steps + more
        # What is not looked at proves nothing, so the caller refuses the leaf.
        if steps > allowed:
            return TOO_LONG, allowed

        # -1 for a node without children.
        code = branches[next_node] - 1
        next_node += 1
        if code >= 0:
            i, k = code // n, code % n
            # A pair is decided once on a path of the tree.
            if i == k or decided[i, k] != 0:
                return MALFORMED, steps

            decided[i, k] = BEFORE
            pairs[depth], alone[depth] = code, value
            depth += 1
            continue

        # A schedule belongs to one of two children, so the smaller bound holds, and the node's own.
        while depth > 0:
            i, k = pairs[depth - 1] // n, pairs[depth - 1] % n
            if decided[i, k] == BEFORE:
                decided[i, k] = AFTER
                # The first child is done: its bound waits for that of the second one.
                first[depth - 1] = value
                break

            decided[i, k] = 0
            depth -= 1
            value = max(alone[depth], min(first[depth], value))

        # The root is done, so no nodes may be left.
        if depth == 0:
            return (value if next_node == nodes else MALFORMED), steps

    # The list ended before the tree did.
    return MALFORMED, steps


@njit
def node_value(table: Ints, fixed: int, decided: Marks, details: Ints) -> tuple[int, int]:
    """Return what the decisions of a node prove, in units, and the steps that it took.

    ``decided[i, k]`` is a mark (`Marks`), 0 where nothing is decided. ``details`` receives of each
    request s, b, the best u, and what this gains, times 2**20.
    """
    n, steps = table.shape[0], 0
    begins = details[0]
    begins[:] = 0
    changed = True

    for _ in range(n + 2):  # who waits in a circle would wait forever; every round is valid
        if not changed:
            break

        changed = False
        # The clock at one arrival is a lower bound at the next ones, too.
        level = 0
        for k in range(n):
            # False: what is after k counts in F, too.
            level, used = clock_at_arrival(table, fixed, decided, begins, k, level, False)
            steps += used
            earliest = max(level, begins[k])

            for i in range(n):
                # s_k >= e_i (docstring, Branching).
                if decided[k, i] == AFTER:
                    earliest = max(earliest, begins[i] + fixed + table[i, 2])

            if earliest > begins[k]:
                begins[k], changed = earliest, True

    # Arrivals were rounded down, by less than a unit each.
    total = -n
    for i in range(n):
        base, used, waits = begins[i], 0, False
        for k in range(n):
            waits = waits or decided[k, i] == AFTER

        # Exclusive time of those after i counts only as far as it had passed when i arrived: F is
        # then without them (docstring, Completions).
        if waits:
            base, used = clock_at_arrival(table, fixed, decided, begins, i, base, True)

        # What is paid at u = 0.
        at_once = payment_at(table, fixed, decided, begins, i, base, 0)
        paid, wait, more = min_payment(table, fixed, decided, begins, i, base, at_once)
        details[1, i], details[2, i], details[3, i] = base, wait, at_once - paid
        steps += used + more + 1
        # b + T - a, its own x and r D, and at last u and what its exclusive time costs others.
        total += base + fixed + table[i, 2] - table[i, 0]
        total += table[i, 1] + ((table[i, 2] * table[i, 3]) >> BITS) + (paid >> BITS)

    return total, steps


@njit
def clock_at_arrival(
    table: Ints, fixed: int, decided: Marks, begins: Ints, k: int, low: int, late: bool
) -> tuple[int, int]:
    """Return the largest L with F(L) below the arrival of k, or ``low`` if that is larger.

    So the clock is later than L when k arrives (docstring, The clock).

    F is without the requests after k if ``late``. The second number is of steps: 16 requests that
    are looked at count as one.
    """
    arrival = table[k, 0]
    # F(L) is L or more, so at the arrival it is not below it. At ``low`` F is looked at first.
    high, steps = max(arrival, low + 1), 0
    middle = low

    while True:
        steps += 1
        passed = middle
        # Requests are in order of arrival, so these are the ones that arrived before k.
        for i in range(k):
            if passed >= arrival:
                break
            # F is without those that begin after k completes.
            if late and decided[i, k] == AFTER:
                continue

            passed += table[i, 1]
            progress = middle - begins[i] - fixed
            if progress >= 0:
                # What G counts besides x, from d on, rounded up: r (c - d) and the exclusive part
                # of a token, at most r D.
                so_far = table[i, 3] * min(progress, table[i, 2])
                in_all = table[i, 3] * table[i, 2]
                passed += min((so_far >> BITS) + 1 + table[i, 4], (in_all >> BITS) + 1)

        if passed >= arrival:
            high = middle
        else:
            low = middle

        # Bisection, as F does not fall. If F is not below the arrival at the given ``low``, both
        # ends are there now, and it is returned.
        if high - low <= 1:
            return low, 1 + steps * k // 16

        middle = (low + high) // 2


@njit
def min_payment(
    table: Ints, fixed: int, decided: Marks, begins: Ints, i: int, base: int, at_once: int
) -> tuple[int, int, int]:
    """Return the min over u of u and what i's exclusive time costs others, this u, and steps.

    Costs are times 2**20, ``at_once`` is that of u = 0, and ``base`` is b of request i. 16 requests
    that are looked at count as one step.
    """
    n, steps = table.shape[0], 1
    best, best_u = at_once, 0
    for k in range(n):
        if k == i or decided[i, k] == AFTER:
            continue

        end = begins[k] + fixed + table[k, 2] - base
        # The min is at u = 0 or where a term has a kink: e_k - U_i is 0, d or T_i (docstring).
        for u in (end, end - fixed, end - fixed - table[i, 2]):
            # u itself is paid, so a larger one than the best cost is not better.
            if u > 0 and (u << BITS) < best:
                steps += 1
                paid = payment_at(table, fixed, decided, begins, i, base, u)
                if paid < best:
                    best, best_u = paid, u

    return best, best_u, 1 + steps * n // 16


@njit
def payment_at(
    table: Ints, fixed: int, decided: Marks, begins: Ints, i: int, base: int, u: int
) -> int:
    """Return u and what i's exclusive time costs others if U_i is base + u, times 2**20."""
    paid = u << BITS
    for k in range(table.shape[0]):
        if k != i and decided[i, k] != AFTER:
            # e_k - U_i. Before it is over, k waits for all of x_i, and for r_i of i's progress
            # beyond d (docstring, Completions).
            progress = begins[k] + fixed + table[k, 2] - base - u
            if progress > 0 or decided[i, k] == BEFORE:
                paid += table[i, 1] << BITS
            if progress > fixed:
                paid += table[i, 3] * min(progress - fixed, table[i, 2])

    return paid
