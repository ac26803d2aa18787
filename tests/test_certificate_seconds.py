"""Certificates in seconds: exact, below every optimum, close to the float bounds, hard to forge."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import cycle
from math import floor, isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive_batches import Exhaustive
from test_batch_bounds import PLAIN, poisson, prices, tiny, wild_shares
from test_certificate import corrupted, sealed
from typer.testing import CliRunner

from optsched import BatchCost, Instance, Problem, bound, load_cost_model
from optsched.bounds import busy_time as busy, lower_bound
from optsched.bounds.base import BoundTask
from optsched.bounds.batch import part_of
from optsched.bounds.certificate import certify, verify_certificate
from optsched.bounds.checker import (
    check_certificate,
    kernel as checker_kernel,
    parts as checker_parts,
    shares as checker_shares,
)
from optsched.bounds.checker.clock import BITS, MALFORMED, TOO_LONG, node_value, tree_value
from optsched.bounds.checker.kernel import (
    LEAD_BITS,
    UNIT_BITS,
    min_costs,
    path_costs,
    portions,
    root_above,
    times,
)
from optsched.bounds.checker.parts import Budget, Rejected
from optsched.bounds.checker.requests import srpt_completions
from optsched.bounds.checker.seconds import proved_ticks
from optsched.bounds.clock import search
from optsched.bounds.leaves import (
    TICKS_PER_SECOND,
    busy_time_leaf,
    clock_leaf,
    parts,
    shares_leaf,
    work_leaf,
)
from optsched.bounds.shares import value_at
from optsched.bounds.shares_kernel import Shared, Use
from optsched.cli import app
from optsched.files.read_write import write_instance
from optsched.problem.errors import UsageError, ViolationError
from optsched.workloads.traces import read_trace

DATA = os.environ.get("OPTSCHED_DATA")
# The bound in floats that corresponds to the leaf `work`, by objective.
FLOAT = {"tel": "work", "mean_ttft": "prefill-work", "makespan": "work-makespan"}
"""The bound in float64 that each objective's leaf ``work`` proves."""
LEVELS = np.array([0.3, 1.0, 4.0])
# A relative rounding of one float64.
ULP = 2.0**-52
"""The exact optimum is a fraction that the exhaustive search rounds to a float once."""


def exact(instance: Instance, certificate: dict[str, Any]) -> Fraction:
    """What a certificate states, in the unit of its objective."""
    requests = instance.n if certificate["objective"] == "mean_ttft" else 1
    return Fraction(certificate["value"], certificate["ticks_per_second"] * requests)


def cuts(rng: np.random.Generator, n: int) -> Iterator[tuple[int, int]]:
    """Disjoint ranges of n requests, some of which may be in none."""
    ends = sorted(set(rng.integers(1, n + 1, 2).tolist()) | {n})
    begin = 0
    for end in ends:
        if rng.random() < 0.9 or end == n:
            yield begin, end - 1
        begin = end


def clock_tree(instance: Instance, cost: BatchCost, nodes: int) -> dict[str, Any]:
    """The leaf of a search of so many nodes."""
    return search(part_of(BoundTask(instance, cost)), 0, instance.n, nodes)[1]


def wild_leaf(
    rng: np.random.Generator, instance: Instance, cost: BatchCost, width: float, price: np.ndarray
) -> dict[str, Any]:
    """Prices, shares at random, and multipliers that are best or far from it."""
    tokens = busy.tokens_of(instance.subset(np.argsort(instance.arrival, kind="stable")), cost)
    width = max(width, 1e-6 * float(tokens.chain.max()))  # a path has no more than 2**30 cells
    shared, centre = wild_shares(rng, tokens, width, len(price))
    use = Use(np.zeros(len(price)), np.zeros(len(price)), np.zeros(len(shared.share)))
    value_at(tokens, width, price, LEVELS, shared, use=use, centre=centre)
    centre *= rng.choice([0, 0.3, 1, 1, 1, 50], centre.shape)
    cell = np.array([busy.cell_at(at, width) for at in tokens.arrival])
    levels = rng.choice([0.01, 0.3, 1, 3, 50], 3)
    return shares_leaf(width, price, levels, shared, centre, cell, rises=bool(rng.integers(2)))


def trees(
    rng: np.random.Generator, instance: Instance, cost: BatchCost, objective: str
) -> Iterator[dict[str, Any]]:
    """Trees of every kind, with prices near those of a schedule and wild ones."""
    yield work_leaf()
    yield parts(objective, [(i, j, work_leaf()) for i, j in cuts(rng, instance.n)])
    if objective != "tel":
        return
    for width, p1, p2 in prices(rng, instance, cost):
        yield busy_time_leaf(width, p1, p2)
        yield wild_leaf(rng, instance, cost, width, p1 + p2)
    for nodes in (1, 9, 99):
        yield clock_tree(instance, cost, nodes)
    yield clock_leaf(grown(rng, instance.n, frozenset()))
    order = np.argsort(instance.arrival, kind="stable")
    some = []
    for i, j in cuts(rng, instance.n):
        piece = instance.subset(order[i : j + 1])
        width, p1, p2 = next(prices(rng, piece, cost))
        leaves = (
            busy_time_leaf(width, p1, p2), wild_leaf(rng, piece, cost, width, p2), work_leaf(),
            clock_tree(piece, cost, 9),
        )  # fmt: skip
        some.append((i, j, leaves[int(rng.integers(len(leaves)))]))
    yield parts(objective, some)


def grown(rng: np.random.Generator, n: int, decided: frozenset[int]) -> np.ndarray:
    """A random tree of decisions about pairs, each at most once on a way from the root."""
    free = [i * n + k for i in range(n) for k in range(n) if i != k and i * n + k not in decided]
    if not free or rng.random() < 0.1 + 0.2 * len(decided):
        return np.zeros(1, np.int64)
    code = int(rng.choice(free))
    two = [grown(rng, n, decided | {code}) for _ in range(2)]
    return np.concatenate([[code + 1], *two])


def on_clock(tree: Any, ticks: int) -> Any:
    """The tree for a clock of so many ticks a second, with cells of at least one."""
    if isinstance(tree, list):
        return [on_clock(one, ticks) for one in tree]
    if not isinstance(tree, dict):
        return tree
    found = {name: on_clock(one, ticks) for name, one in tree.items()}
    if "width" in found:
        found["width"] = max(1, found["width"] * ticks // TICKS_PER_SECOND)
    return found


def check_tiny(seed: int, count: int) -> None:
    """Hold every tree against optima by exhaustion, on the clock of 10**12 Hz and on slow ones."""
    rng, clocks = np.random.default_rng(seed), cycle((1, 40, 1000))
    for _ in range(count):
        instance, cost = tiny(rng)
        search = Exhaustive(instance, cost)
        about = f"{instance.to_dict()} {dict(cost.coefficients)}"
        for objective, name in FLOAT.items():
            optimum = search.best(objective)[0]
            for tree in trees(rng, instance, cost, objective):
                certificate = json.loads(json.dumps(certify(instance, cost, objective, tree)))
                verify_certificate(instance, certificate, cost)
                assert exact(instance, certificate) <= optimum * (1 + ULP), about
                # Arrivals between the ticks of a slow clock are earlier there by up to a tick each.
                ticks = next(clocks)
                slow = {**certificate, "ticks_per_second": ticks, "tree": on_clock(tree, ticks)}
                slow["value"] = proved_ticks(instance, slow, Budget())
                assert exact(instance, slow) <= optimum * (1 + ULP), (about, ticks)
                if tree == work_leaf():
                    value, _ = lower_bound(Problem(instance, cost, objective), method=name)
                    # It counts chunks as whole numbers, and loses a tick a request.
                    assert exact(instance, certificate) >= value * (1 - 1e-9) - 1e-11


def test_certificates_of_tiny_instances_are_below_the_optimum_and_close_to_the_bound() -> None:
    check_tiny(1, 15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_the_same_by_the_thousand(seed: int) -> None:
    check_tiny(seed, 400)


def test_one_request_alone_is_proved_to_the_tick() -> None:
    # Prefill of 3 tokens: 10 + 7 + 3 = 20 ms; two decodes: 10 + 5 + 1 = 16 ms each; 52 in all. It
    # arrives at 1 s, so the makespan is 1000 + 52 ms.
    instance = Instance([1.0], [3], [3], kv_capacity=5, time_unit="second", kv_accounting="cached")
    for objective, ms in (("tel", 52), ("mean_ttft", 20), ("makespan", 1052)):
        certificate = certify(instance, PLAIN, objective, work_leaf())
        assert certificate["value"] == ms * TICKS_PER_SECOND // 1000
        assert verify_certificate(instance, certificate, PLAIN) == pytest.approx(ms / 1000)
        assert exact(instance, certificate) >= Fraction(
            verify_certificate(instance, certificate, PLAIN)
        )
        found = bound(Problem(instance, PLAIN, objective), time_limit_s=0)
        assert found.certified == pytest.approx(ms / 1000)


def test_arrivals_between_two_ticks_cost_a_tick_each() -> None:
    # Eight requests of 1 s, one at a time: the first at 0, and seven at 9.9 ms. So latencies of
    # 1, 2, ..., 8 s less 7 times 9.9 ms, on a clock of 10 ms: 3600 - 6.93 ticks. That clock reads
    # arrivals as 0, and whoever did not allow for it would prove 3600, or some 3595 by prices: of
    # each moment the work that is left, in requests.
    instance = Instance(
        [0.0, *[0.0099] * 7], [100] * 8, [1] * 8, kv_capacity=101, time_unit="second"
    )
    cost = BatchCost("ten", 1, {"token": "10"})
    prices = busy_time_leaf(0.01, (799.5 - np.arange(800)) / 100, np.zeros(800))
    # A tick for each of 8 requests is lost: 3600 - 8 = 3592, and some 3595 - 8 = 3587 by prices,
    # where 3580 leaves 7 ticks for the roundings of cells.
    for leaf, least in ((work_leaf(), 3592), (on_clock(prices, 100), 3580)):
        slow = certify(instance, cost, "tel", work_leaf()) | {"ticks_per_second": 100, "tree": leaf}
        assert least <= proved_ticks(instance, slow, Budget()) <= 3600 - 6.93


def one_long_path(base: str, nu: float) -> tuple[Instance, BatchCost, dict[str, Any], float]:
    """One request with own work of 1.1 to 5 ms, no prices, rising multipliers; what it takes."""
    words = {"base": base, "token": "1", "decode_kv": "0.1", "prefill_token": "5"}
    cost = BatchCost("kv", 1, words)
    instance = Instance([0.0], [1], [41], kv_capacity=50, time_unit="second")
    tokens = busy.tokens_of(instance, cost)
    width, levels, cell = 2e-5, np.ones(1), np.zeros(1, np.int64)
    shared = Shared(np.zeros(9), np.array([0, 0]), np.zeros(0))
    centre = np.array([[0.01, nu]])
    leaf = shares_leaf(width, np.zeros(9), levels, shared, centre, cell, rises=True)
    alone = float(tokens.chain[0])
    # The prefill's 1 + 5 ms, 40 decodes of 1 + 0.1 ms and 0.1 ms more from each to the next (78
    # ms), and 41 bases.
    assert alone == pytest.approx(0.006 + 40 * 0.0011 + 0.078 + 41 * float(base) / 1000)
    return instance, cost, leaf, alone


def test_payments_of_one_percent_too_much_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without prices a path costs what it takes alone, and no more.
    instance, cost, leaf, alone = one_long_path("0.01", 0.1)
    assert exact(instance, certify(instance, cost, "tel", leaf)) == pytest.approx(alone, rel=1e-6)
    phases, pays = checker_shares._phases_of, 8  # the place of what all batches pay

    def inflated(*about: Any) -> list[list[int]]:
        found = phases(*about)
        for one in found[1:]:
            one[pays] = one[pays] * 101 // 100
        return found

    # The path then proves over half of that percent more than the path costs, which is not true.
    monkeypatch.setattr(checker_shares, "_phases_of", inflated)
    assert exact(instance, certify(instance, cost, "tel", leaf)) > alone * 1.005


@pytest.mark.parametrize(("kept", "nu"), [(1, 0.1), (2, 0.009)])
def test_without_the_gain_of_either_end_a_path_would_cost_too_much(
    kept: int, nu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without prices the last step gains most a second, and where multipliers are too low to rise,
    # the first. All batches pay what they did, but gain what one end does.
    instance, cost, leaf, alone = one_long_path("10", nu)
    assert exact(instance, certify(instance, cost, "tel", leaf)) == pytest.approx(alone, rel=1e-6)
    # Of the phases [prefill, first step, last step] one of the two ends is kept: 1 the first, 2 the
    # last. Place 0 has its multiplier and place 8 what all batches pay.
    phases = checker_shares._phases_of

    def of_one_end(*about: Any) -> list[list[int]]:
        found = phases(*about)
        (one, *_), (other, *_) = ends = found[1:]
        end = ends[kept - 1]
        *gains, pays, bits = end
        return [found[0], [*gains, pays * (one + other) // (4 * end[0]), bits - 1]]

    monkeypatch.setattr(checker_shares, "_phases_of", of_one_end)
    # Half a percent too much is far beyond the 1e-6 up to which the path's cost is exact.
    assert exact(instance, certify(instance, cost, "tel", leaf)) > alone * 1.005


@pytest.mark.parametrize("rises", [2, -1, True, "1", None, [1]])
def test_multipliers_rise_or_do_not(rises: Any) -> None:
    instance, cost, leaf, _ = one_long_path("0.01", 0.1)
    with pytest.raises(UsageError, match="rises"):
        certify(instance, cost, "tel", leaf | {"rises": rises})


def test_where_later_steps_have_no_more_work_nothing_rises() -> None:
    instance, _, leaf, _ = one_long_path("10", 0.1)
    # Without decode_kv every step has the same work.
    cost = BatchCost("flat", 1, {"base": "10", "token": "1", "prefill_token": "5"})
    without = {name: value for name, value in leaf.items() if name != "rises"}
    made = [exact(instance, certify(instance, cost, "tel", one)) for one in (leaf, without)]
    assert made[0] == made[1] > 0


def test_later_steps_have_more_work_than_the_first_by_what_they_read() -> None:
    # 40 steps, each of 0.1 ms more than the one before: 0.1 (0 + 1 + ... + 39) = 78 ms beyond 40
    # times the first, in cells of 0.02 ms.
    instance, cost, leaf, _ = one_long_path("0.01", 0.1)
    del leaf["rises"]
    prices = checker_shares._read_prices(leaf)
    # Place 8 of a row is `extra` (see `slow_path_cost`). Times a price it is a cost and has 16
    # binary digits more, and costs have UNIT_BITS = 26 digits and prices `bits`.
    extra = checker_shares._row_of(part_of(BoundTask(instance, cost)), 0, prices)[8]
    assert extra / 2 ** (26 + 16 - prices.bits) == pytest.approx(78 / 0.02)


def test_g_of_the_first_and_the_last_step_is_that_of_all_between() -> None:
    # g is the most that a step of own work w and multiplier nu gains, less what it pays, over its
    # lengths T. Between two ends w and nu are on straight lines, and no g between is above both.
    rng = np.random.default_rng(12)
    longer = np.concatenate([[1.0], 1 + np.geomspace(1e-4, 1e4, 300)])  # (T - f) / w
    for _ in range(2000):
        w, nu, (fixed, p2, p3, mu) = *rng.exponential(1, (2, 2)), rng.exponential(1, 4)
        w, nu = np.sort(w), 10 * np.sort(nu)
        k = np.linspace(0, 1, 7)[:, None]
        own, worth = w[0] + k * (w[1] - w[0]), nu[0] + k * (nu[1] - nu[0])
        paid = p2 / longer + p3 * (own + mu * fixed) / (fixed + own * longer)
        g = np.maximum(0.0, worth / (fixed + own * longer) - paid).max(axis=1)
        assert g.max() <= max(g[0], g[-1]) * (1 + 1e-12)


def test_parts_add_up_and_the_latest_part_counts_for_the_makespan() -> None:
    # Two requests an hour apart, each alone: 52 ms each, of which 20 ms are the prefill. Together
    # they prove no more and no less. A millisecond has 10**9 ticks.
    instance = Instance(
        [3600.0, 0.0], [3, 3], [3, 3], kv_capacity=5, time_unit="second", kv_accounting="cached"
    )
    alone = [(0, 0, work_leaf()), (1, 1, work_leaf())]
    for objective, ms in (("tel", 104), ("mean_ttft", 40), ("makespan", 3_600_052)):
        tree = parts(objective, alone)
        assert certify(instance, PLAIN, objective, tree)["value"] == ms * 10**9
        # Parts count requests by arrival, so the first is that at 0.
        first = parts(objective, alone[:1])
        less = {"tel": 52, "mean_ttft": 20, "makespan": 52}[objective]
        assert certify(instance, PLAIN, objective, first)["value"] == less * 10**9


def test_the_machine_runs_the_job_with_the_least_left_to_do() -> None:
    # Moment by moment: of the jobs that are there, the one with the least left runs for one tick.
    rng = np.random.default_rng(3)
    for _ in range(200):
        n = int(rng.integers(1, 30))
        arrival = np.sort(rng.integers(0, 50, n)).tolist()
        length = rng.integers(1, 12, n).tolist()
        left, ends = dict(enumerate(length)), []
        for now in range(50 + sum(length)):
            there = [j for j in left if arrival[j] <= now]
            if there:
                job = min(there, key=lambda j: (left[j], j))
                left[job] -= 1
                if left[job] == 0:
                    del left[job]
                    ends.append(now + 1)
        assert srpt_completions(arrival, length) == ends


def test_the_compiled_search_of_moments_is_that_of_the_definition() -> None:
    # A row has the cell of its first moment, the cost of waiting for the first and for each further
    # cell, factors of p1, p2 and the root of p2, the least cost, a slope, and the p2 up to which
    # that slope holds. The definition tries every cell in plain Python.
    rng = np.random.default_rng(4)
    for _ in range(100):
        cells = int(rng.integers(1, 150))
        p1, p2, root = rng.integers(0, 2**20, (3, cells))
        top = 2 ** int(rng.integers(0, 38))
        lead, every, l1, l2, r, least, short = rng.integers(0, top, (7, 30))
        cell, turn = rng.integers(0, cells + 3, 30), rng.integers(-1, 2**20, 30)
        waiting = [lead * 2**20, every * 2**20]
        rows = np.stack([cell, *waiting, l1, l2, r, least << 10, short, turn], axis=1)
        for row, found in zip(rows.tolist(), min_costs(rows, p1, p2, root), strict=True):
            c, first, step, pay1, pay2, pay_root, low, near, upto = row
            waits = [0, *(first + k * step for k in range(cells - c))]
            paid = [low]
            for p, q, root_q in list(zip(p1.tolist(), p2.tolist(), root.tolist(), strict=True))[c:]:
                far = max(low, q * pay2 + root_q * pay_root)
                paid.insert(-1, p * pay1 + (low + q * near if q <= upto else far))
            assert found == min(map(sum, zip(waits, paid, strict=c < cells)))


def slow_path_cost(row: list[int], phases: list, levels: list[int], market: tuple) -> int:
    """The least cost of a path by the definition: every start and end, at every multiplier."""
    cell, down, up, lead, first, every, apart, alone, extra, steps, _, begin, many = row
    p2, p3, root, share, bits = market
    span, one = 150, 1 << UNIT_BITS
    length = [down / (1 << LEAD_BITS), *[1.0] * span]

    def gains_of(phase: list[int], level: int) -> tuple[list[int], int]:
        nu, own, fine, coarse, low, slow, factor, cut, batch, wide = phase
        nu = min(nu * level // 1000, 2**37 - 1) * 2**24
        gain = []
        for j in range(span):
            p, q, r = (x[cell + j] if cell + j < len(p2) else 0 for x in (p2, p3, root))
            mu = share[begin + j] if j < many else 0
            asked = Fraction(2) ** (44 - bits - fine) * q * (own + mu // 2**coarse)
            left = max(0, nu - floor(asked))
            d = max(0, ceil_root(left) - r * factor // 2**cut)
            middle = d**2 // 2**18 + 1 if d > 0 else 0
            small = max(0, left * slow // 2**48 + 1 - p * 2 ** (UNIT_BITS - bits))
            early = p <= left * low // 2 ** (74 - bits)
            gain.append(0 if left == 0 else small if early else middle)
        return gain, min(floor(nu * batch // 2**30 * Fraction(2) ** -wide), 2**60)

    def gains(ends: list, level: int) -> tuple[list[int], list[int], int]:
        of_ends = [gains_of(phase, level) for phase in ends]
        gain = [max(found) for found in zip(*(one for one, _ in of_ends), strict=True)]
        area = [0, gain[0] * up // (1 << LEAD_BITS) + 1]
        for one in gain[1:]:
            area.append(area[-1] + one)
        return gain, area, sum(pays // len(ends) for _, pays in of_ends)

    ahead: list = [None] * span
    for level in levels:
        gain, area, pays = gains(phases[:1], level)
        for j in range(first, span):
            value = max(0, pays - area[j + 1])
            if ahead[j] is None or value > ahead[j][0]:
                ahead[j] = value, gain[j] if value else 0
    ends = ahead
    if steps:
        ends = [None] * span
        for level in levels:
            gain, area, pays = gains(phases[1:], level)
            for j in range(every, span):
                starts = range(max(0, min(j, j + 1 - apart)) + 1)
                free = [i for i in starts if pays <= area[j + 1] - area[i]]
                nothing = ahead[free[-1]] if free else None
                some = [
                    ahead[i][0] + area[i + 1] + pays - area[j + 1]
                    - (max(0, gain[i] - ahead[i][1]) if i else
                       max(0, gain[0] - ahead[0][1]) * up // (1 << LEAD_BITS) + 1)
                    for i in starts if i not in free and ahead[i] is not None
                ]  # fmt: skip
                found = [(v, gain[j]) for v in some] + ([(nothing[0], 0)] if nothing else [])
                if not found:
                    continue
                value, s = min(found, key=lambda one: (one[0], one[1]))
                if nothing and value < nothing[0]:
                    s = min(s, nothing[0] - value)
                whole = [a + b for a, b in zip(p2, p3, strict=True)]
                least = min([*whole, *[0] * span][cell : cell + j + 1] or [0])
                value += extra * least // 2**16
                if ends[j] is None or value > ends[j][0]:
                    ends[j] = value, s
    costs = [lead + (span - 1) * one]
    for j, end in enumerate(ends):
        early = lead + (j - 1) * one if j else 0
        if end is not None:
            costs.append(end[0] + max(alone, early + int(min(one, end[1]) * length[j])))
    return min(costs)


def ceil_root(x: int) -> int:
    """Return the least integer whose square is x or more, exactly."""
    return isqrt(x - 1) + 1 if x > 0 else 0


def slow_node(table: list[list[int]], fixed: int, decided: list[list[int]]) -> int:
    """What a node of a search proves, by the definition: every moment of the clock is tried."""
    n = len(table)
    arrival, prefill, work, rate, slack = zip(*table, strict=True)
    need = [fixed + d for d in work]
    begins = [0] * n

    def passed(i: int, c: int) -> int:
        """The most exclusive time at progress c."""
        if c < fixed:
            return prefill[i]
        whole = rate[i] * work[i] // 2**BITS + 1
        some = rate[i] * min(c - fixed, work[i]) // 2**BITS + 1 + slack[i]
        return prefill[i] + min(whole, some)

    def level(k: int, who: list[int]) -> int:
        """The last moment of the clock that is surely over when k arrives."""
        at = [
            clock for clock in range(arrival[k] + 1)
            if clock + sum(passed(i, clock - begins[i]) for i in who) < arrival[k]
        ]  # fmt: skip
        return max(at, default=0)

    for _ in range(n + 2):
        for k in range(n):
            levels = [level(j, list(range(j))) for j in range(k + 1)]
            ends = [begins[i] + need[i] for i in range(n) if decided[k][i] == 2]
            begins[k] = max([begins[k], *levels, *ends])
    total = 0
    for i in range(n):
        base = max(begins[i], level(i, [j for j in range(i) if decided[j][i] != 2]))
        if not any(decided[j][i] == 2 for j in range(n)):
            base = begins[i]

        def paid(u: int, i: int = i, base: int = base) -> int:
            total = u * 2**BITS
            for k in range(n):
                if k != i and decided[i][k] != 2:
                    y = begins[k] + need[k] - base - u
                    total += prefill[i] * 2**BITS if y > 0 or decided[i][k] == 1 else 0
                    total += rate[i] * min(work[i], max(0, y - fixed))
            return total

        longest = max(b + t for b, t in zip(begins, need, strict=True))
        least = min(paid(u) for u in range(longest + 1)) // 2**BITS
        own = prefill[i] + rate[i] * work[i] // 2**BITS
        total += base + need[i] + own + least - arrival[i] - 1
    return total


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_clock_that_proves_nothing_is_no_malformed_tree(n: int) -> None:
    # The only batch takes 10 + 7 + 3 = 20 ms at most, which is no tick of a second. A tick per
    # request is subtracted, so -n is proved, and 0 holds for any latency.
    instance = Instance(
        [0.0] * n, [1] * n, [1] * n, kv_capacity=9, time_unit="second", kv_accounting="cached"
    )
    good = certify(instance, PLAIN, "tel", clock_leaf(np.zeros(1, np.int64)))
    coarse = {**good, "ticks_per_second": 1}
    assert proved_ticks(instance, coarse, checker_parts.Budget()) == 0


def test_the_compiled_clock_is_that_of_the_definition() -> None:
    # Columns of `table_of`: arrival, x, D, r (with 20 bits after the point) and one token's part.
    # Marks are 0, 1 (before) or 2 (after).
    rng, found = np.random.default_rng(6), []
    for _ in range(60):
        n, fixed = int(rng.integers(1, 6)), int(rng.integers(0, 6))
        table = np.stack([
            np.sort(rng.integers(0, 40, n)), rng.integers(0, 9, n), rng.integers(0, 15, n),
            rng.integers(0, 3 << BITS, n), rng.integers(0, 4, n),
        ], axis=1)  # fmt: skip
        decided = rng.choice(3, (n, n), p=[0.6, 0.2, 0.2]).astype(np.int8)
        value, _ = node_value(table, fixed, decided, np.empty((4, n), np.int64))
        assert value == slow_node(table.tolist(), fixed, decided.tolist())
        found.append(value)
    assert len(set(found)) > 30  # over half of the 60 values differ: the cases are not trivial


def test_a_tree_proves_the_least_of_its_leaves_and_no_less_than_its_nodes() -> None:
    # Columns as of `table_of`: arrival, x, D, r = 1 and the exclusive part of one token.
    table = np.array([[0, 5, 9, 1 << BITS, 1], [3, 7, 4, 1 << BITS, 1]])
    decided, found = np.zeros((2, 2), np.int8), np.empty((4, 2), np.int64)
    root, _ = node_value(table, 2, decided, found)
    both = []
    # 0 begins before 1 completes, or after.
    for choice in (1, 2):
        decided[0, 1] = choice  # code 2: the requests 0 and 1
        both.append(node_value(table, 2, decided, found)[0])
    # Code 2 and both of its leaves. Three steps are too few for them, and without its last number
    # the tree lacks a leaf.
    tree = np.array([2, 0, 0])
    assert tree_value(table, 2, tree, 10**6)[0] == max(root, min(both)) > root
    assert tree_value(table, 2, tree, 3)[0] == TOO_LONG
    assert tree_value(table, 2, tree[:2], 10**6)[0] == MALFORMED


def test_the_compiled_paths_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every path that a check of wild leaves prices is priced again by `slow_path_cost`.
    rng, compared = np.random.default_rng(5), []

    def both(rows: Any, phases: Any, levels: Any, market: Any, most: int) -> Any:
        found, steps = path_costs(rows, phases, levels, market, most)
        plain = tuple(x.tolist() for x in market[:4]), market[4]
        for row, phase, cost in zip(rows.tolist(), phases.tolist(), found.tolist(), strict=True):
            assert slow_path_cost(row, phase, levels.tolist(), (*plain[0], plain[1])) == cost
            compared.append(cost)
        return found, steps

    monkeypatch.setattr(checker_kernel, "path_costs", both)
    while len(compared) < 40:
        instance, cost = tiny(rng)
        tokens = busy.tokens_of(instance, cost)
        width = float(tokens.chain.max()) * rng.choice([0.03, 0.1, 0.3])
        price = rng.choice([0.1, 2.0, 20.0]) * rng.random(60) ** 2
        certify(instance, cost, "tel", wild_leaf(rng, instance, cost, width, price))
    assert len(set(compared)) > 20  # of 40 or more paths: the costs are not all alike


def test_products_and_roots_of_the_checker_are_exact() -> None:
    rng = np.random.default_rng(8)
    whole = [0, 1, 2**61 - 1, *(int(2**x) for x in 61 * rng.random(500))]
    for x in [*whole, *(isqrt(one) ** 2 for one in whole)]:
        assert root_above(x) == ceil_root(x)
        for c in (0, 1, 2**30, int(rng.integers(2**30))):
            assert times(x, c) == x * c // 2**30


def test_the_parts_of_a_cell_are_at_most_the_whole() -> None:
    # Cells 1 and 2 of three; the second request comes in cell 2, and its last weight is outside.
    found = portions(np.array([3, 0, 5, 1]), np.array([0, 2, 4]), np.array([1, 2]), 3)
    # Cell 1 has the weight 3 alone, and cell 2 has 0 and 5: 3 of 3 and 5 of 5 are 2**30.
    assert found.tolist() == [2**30, 0, 2**30, 0]
    rng = np.random.default_rng(9)
    many = rng.integers(0, 30, 50)
    begin, cell = np.concatenate([[0], np.cumsum(many)]), rng.integers(0, 60, 50)
    part = portions(rng.integers(0, 2**20, begin[-1]), begin, cell, 60)
    at = np.repeat(cell - begin[:-1], many) + np.arange(begin[-1])
    total = np.bincount(at, part.astype(float), 90)
    # There are 60 cells; a request in one of the last has up to 30 weights beyond them, which count
    # 0.
    assert (total[60:] == 0).all()
    assert (total <= 2**30).all()
    # Rounding down loses less than 1 for each of at most 50 requests in a cell.
    assert total.max() > 2**30 - 50


@pytest.mark.parametrize("method", ["busy-time", "clock", "shares"])
@pytest.mark.parametrize("rate", [0.5, 4.0, 30.0])
def test_the_value_is_what_the_certificate_proves(method: str, rate: float) -> None:
    cost, instance = load_cost_model("llama2-7b-a100-infermax"), poisson(rate)
    problem = Problem(instance, cost)
    value = lower_bound(problem, method=method, time_limit_s=0.5)[0]
    proof = bound(problem, method=method, time_limit_s=0.5)
    assert proof.bound == proof.certified
    if method == "busy-time":  # the others are stopped by the clock
        assert proof.bound == value


def test_a_piece_that_begins_where_a_cell_ends_is_not_in_it() -> None:
    # 10 + 7 + 3 = 20 ms, alone: 20 ms at best. Half of the prefill's 16 pieces begin in the second
    # cell of 10 ms, at p1 = 1/2, where a piece pays 13.2 / 2 = 6.6 ms or waits until 20 ms. Pieces
    # begin 1.25 ms apart, 9.375 ms after its arrival on average, and half of 20 ms comes on top.
    instance = Instance([0.0], [3], [1], kv_capacity=5, time_unit="second", kv_accounting="cached")
    # A piece's whole pay is 13.2 ms: 3 of its own, and 3 of the 5 tokens of M of the fixed 10 + 7.
    p1, p2, most = np.array([0.0, 0.5]), np.zeros(2), 6.6
    paid = [min(most, 20 - 1.25 * q) for q in range(8, 16)]
    # p1 costs 1/2 of a cell of 10 ms: 5.
    expected = (10 + 9.375 + sum(paid) / 16 - 5) / 1000
    assert expected < 0.020
    made = certify(instance, PLAIN, "tel", busy_time_leaf(0.010, p1, p2))
    assert float(exact(instance, made)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_prices_of_machine_time_prove_no_more_than_thousands_of_optima(seed: int) -> None:
    rng, checked = np.random.default_rng(seed), 0
    for _ in range(500):
        instance, cost = tiny(rng)
        tokens = busy.tokens_of(instance, cost)
        most = Exhaustive(instance, cost).best("tel")[0] * (1 + 1e-12)
        about = f"{instance.to_dict()} {dict(cost.coefficients)}"
        chosen, end = busy.prices_of(tokens, 50)
        tried = list(prices(rng, instance, cost))
        for scale in (0.0, 0.3, 1.0, 2.0):  # 4 scales, two each: 8
            p2 = np.minimum(scale * chosen, 3 * rng.random())
            tried += [(end, scale * chosen - p2, p2), (end, 0 * p2, p2)]

        for width, p1, p2 in tried:
            try:
                made = certify(instance, cost, "tel", busy_time_leaf(width, p1, p2))
            except UsageError:
                continue  # refused as too large
            assert exact(instance, made) <= most, about
            checked += 1

    assert checked > 5000  # of 500 x (8 above + 4 of `prices`) = 6000, few were refused


@pytest.mark.parametrize("tiny_text", ["1e-60", "1e-99", "0." + "0" * 50 + "1"])
def test_extreme_cost_models_and_prices_prove_less_and_never_too_much(tiny_text: str) -> None:
    # Asserted is that nothing above the optimum is proved: a leaf proves as much or less, or is
    # refused.
    # Sums that would leave 64 bits are cut or refused. Where tokens take 1 ms: 3 in the prefill and
    # 2 more, 5 ms. Where batches take 1 ms: 3 of them.
    instance = Instance([0.0], [3], [3], kv_capacity=9, time_unit="second")
    for base, token, ms in ((tiny_text, "1", 5), ("1", tiny_text, 3)):
        cost = BatchCost("extreme", 1, {"base": base, "token": token})
        optimum = ms / 1000 * (1 + 1e-12)
        for price, width in ((0, 1), (1, 10**9), (2**39, 10**9), (5, 10**12), (1, 2**1000)):
            for leaf in (
                {"relaxation": "busy-time", "width": width, "denominator": 1, "p1": [price, 0],
                 "p2": [0, price]},
                {"relaxation": "shares", "width": width, "bits": 0, "p2": [price, 1],
                 "p3": [1, price], "levels": [1, 10**6], "first": [10**13], "later": [2**80],
                 "cells": [2], "weight": [0, 2**20]},
            ):  # fmt: skip
                try:
                    proved = certify(instance, cost, "tel", leaf)
                except UsageError:
                    continue
                assert exact(instance, proved) <= optimum


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="OPTSCHED_DATA names no folder of public traces")
def test_bounds_of_a_whole_trace_are_certified_to_one_part_in_a_hundred_thousand() -> None:
    (file,) = Path(DATA or "").rglob("AzureLLMInferenceTrace_conv.csv")
    cost = load_cost_model("llama2-7b-a100-infermax")
    for rate, names in ((0.25, ("work", "clock")), (1.0, ("work", "busy-time"))):
        instance = read_trace("azure", file, rate_scale=rate, kv_accounting="cached")
        for name in names:
            found = bound(Problem(instance, cost), method=name, time_limit_s=20)
            assert found.certificate is not None
            proved = verify_certificate(instance, found.certificate, cost)
            assert proved == pytest.approx(found.bound, rel=1e-5)
            assert found.certified == min(proved, found.bound)


# --- what is refused ----------------------------------------------------------------------------


def forge(seed: int, count: int) -> None:
    """Corrupt certificates: as they are, with the digest made anew, and with a new value too."""
    rng = np.random.default_rng(seed)
    tried = passed = 0
    while tried < count:
        instance, cost = tiny(rng)
        objective = list(FLOAT)[int(rng.integers(3))]
        optimum = Exhaustive(instance, cost).best(objective)[0]
        for tree in trees(rng, instance, cost, objective):
            good = json.loads(json.dumps(certify(instance, cost, objective, tree)))
            more = forgeries(rng, instance, cost, good, optimum, 12)
            tried, passed = tried + more[0], passed + more[1]
    assert passed < tried


def forgeries(
    rng: np.random.Generator,
    instance: Instance,
    cost: BatchCost,
    good: dict[str, Any],
    optimum: Any,
    count: int,
) -> tuple[int, int]:
    """Corrupt a certificate; return how many were tried, and how many forged ones pass and hold."""
    tried = passed = 0
    for _ in range(count):
        bad = corrupted(rng, good)
        if bad == good:
            continue
        tried += 1
        with pytest.raises(ViolationError):
            verify_certificate(instance, bad, cost)
        for forged in (sealed(bad), claimed(instance, bad)):
            try:
                verify_certificate(instance, forged, cost)
            except ViolationError:
                continue
            passed += 1
            if forged["objective"] == good["objective"]:
                assert exact(instance, forged) <= optimum * (1 + ULP), json.dumps(forged)
    return tried, passed


def claimed(instance: Instance, bad: dict[str, Any]) -> dict[str, Any]:
    """A corrupted certificate whose value a forger sets to what its tree proves."""
    from optsched.bounds.checker.seconds import proved_ticks

    try:
        value = proved_ticks(instance, bad, checker_parts.Budget())
    except Exception:
        return bad
    return sealed({**bad, "value": value})


def test_corrupted_and_forged_certificates_are_refused_or_still_true() -> None:
    forge(7, 200)


@pytest.mark.slow
def test_ten_thousand_corruptions_are_refused_or_still_true() -> None:
    forge(8, 10_000)


def test_a_bad_cost_model_is_refused() -> None:
    instance = Instance([0.0], [3], [3], kv_capacity=9, time_unit="second")
    good = certify(instance, PLAIN, "tel", work_leaf())
    texts = good["cost_model"]["coefficients"]
    # A coefficient with a wrong text or too large, no batch that takes time, or an unknown name.
    for change, words in (
        ({"token": "-1"}, "decimal text >= 0"),
        ({"token": "nan"}, "decimal text"),
        ({"token": " 1"}, "decimal text"),
        ({"token": "1_0"}, "decimal text"),
        ({"token": "٣"}, "decimal text"),
        ({"token": 1}, "decimal text"),
        ({"token": "1e99"}, "at most"),
        ({"token": "1e-999999999"}, "decimal text"),
        ({"token": "0", "base": "0.0"}, "batches that take time"),
        ({"tokens": "1"}, "found tokens, for which nothing is proved"),
    ):
        bad = copy.deepcopy(good)
        bad["cost_model"]["coefficients"] = {**texts, **change}
        with pytest.raises(Rejected, match=words):
            check_certificate(instance, sealed(bad))
    # No table of coefficients, then a number of layers that is none from 1 to 10,000.
    for texts in (None, [], "token"):
        bad = copy.deepcopy(good)
        bad["cost_model"]["coefficients"] = texts
        with pytest.raises(Rejected, match="coefficients:"):
            check_certificate(instance, sealed(bad))
    for layers in (0, -1, 10_001, 1.0, True, "1"):
        bad = copy.deepcopy(good)
        bad["cost_model"]["layers"] = layers
        with pytest.raises(Rejected, match="layers"):
            check_certificate(instance, sealed(bad))
    # Another cost model than the one that is verified with.
    dearer = BatchCost("dearer", 2, PLAIN.coefficients)
    other = certify(instance, dearer, "tel", work_leaf())
    check_certificate(instance, other)  # true, but of another cost model
    with pytest.raises(ViolationError, match="cost_model"):
        verify_certificate(instance, other, PLAIN)


def test_other_trees_objectives_and_instances_are_refused() -> None:
    # Each table has a field with a wrong value, or a whole tree, and words of the refusal.
    instance = Instance([0.0, 1.0], [3, 3], [3, 3], kv_capacity=9, time_unit="second")
    leaf = work_leaf()
    for tree, words in (
        ({"relaxation": "magic"}, "relaxation"),
        ({"relaxation": ["work"]}, "relaxation"),
        ({"relaxation": "work", "value": 7}, "other fields"),
        ({"sum": []}, "one or more parts"),
        ({"sum": [leaf]}, "first, last and tree"),
        ({"max": [{"first": 0, "last": 1, "tree": leaf}]}, "another node"),
        (parts("tel", [(0, 0, leaf), (0, 1, leaf)]), "found requests 0..1; expected some of 1..1"),
        (parts("tel", [(0, 2, leaf)]), "requests 0..2"),
        (parts("tel", [(-1, 1, leaf)]), "requests -1..1"),
        (parts("tel", [(1, 0, leaf)]), "requests 1..0"),
        (parts("tel", [(1, 1, leaf), (0, 0, leaf)]), "requests 0..0"),
        ({"sum": [{"first": 0, "last": 1, "tree": parts("tel", [(0, 1, leaf)])}]}, "relaxation"),
    ):
        with pytest.raises(UsageError, match=words):
            certify(instance, PLAIN, "tel", tree)
    # Leaves of prices of machine time.
    busy_leaf = busy_time_leaf(0.1, np.ones(3), np.ones(3))
    for change, words in (
        ({"width": 0}, "width or denominator"),
        ({"denominator": 0}, "width or denominator"),
        ({"width": 0.5}, "width: found 0.5; expected an integer"),
        ({"p1": [1]}, "other lengths"),
        ({"p1": [], "p2": []}, "other lengths"),
        ({"p1": [-1, 0, 0]}, "below 0"),
        ({"p2": [2**40, 0, 0]}, "price of 2"),
        ({"p2": [0, True, 0]}, "expected an integer"),
        ({"p2": None}, "cannot be checked|expected a list"),
        ({"price": []}, "other fields"),
    ):
        bad = sealed(
            {**certify(instance, PLAIN, "tel", busy_leaf), "tree": {**busy_leaf, **change}}
        )
        with pytest.raises(Rejected, match=words):
            check_certificate(instance, bad)
    # Leaves of paths, with shares of fixed costs. Bits are 26 at most, and weights 2^20.
    begin, cell = np.array([0, 2, 3]), np.array([0, 2])
    shared = Shared(np.ones(3), begin, np.array([0.5, 0.5, 1.0]))
    path = shares_leaf(0.4, np.ones(3), LEVELS, shared, np.ones((2, 2)), cell)
    for change, words in (
        ({"width": 0}, "width or bits"),
        ({"width": 1}, "too narrow"),
        ({"bits": -1}, "width or bits"),
        ({"bits": 27}, "width or bits"),
        ({"p2": [], "p3": []}, "cells"),
        ({"p2": [1, 2]}, "p3: found 3 integers; expected 2"),
        ({"p2": [0, 0, -1]}, "p2: found an integer out of range"),
        ({"p3": [0, 0, 2**40]}, "p3: found an integer out of range"),
        ({"levels": []}, "levels"),
        ({"levels": [1] * 65}, "levels"),
        ({"levels": [-1]}, "levels"),
        ({"levels": [0.5]}, "expected an integer"),
        ({"first": [1]}, "first: found 1 integers; expected 2"),
        ({"later": [1, -1]}, "later: found an integer out of range"),
        ({"later": [1, 2**80 + 1]}, "later: found an integer out of range"),
        ({"cells": [3]}, "cells: found 1 integers; expected 2"),
        ({"cells": [4, -1]}, "cells: found an integer out of range"),
        ({"cells": [2, 2]}, "weight: found 3 integers; expected 4"),
        ({"cells": [0, 2**15 + 1]}, "cells: found an integer out of range"),
        ({"weight": [1, 1, -1]}, "weight: found an integer out of range"),
        ({"weight": [1, 1, 2**20 + 1]}, "weight: found an integer out of range"),
        ({"p2": None}, "expected a list"),
        ({"split": 1}, "other fields"),
    ):
        good = certify(instance, PLAIN, "tel", path)
        with pytest.raises(Rejected, match=words):
            check_certificate(instance, sealed({**good, "tree": {**path, **change}}))
    # Leaves of the clock: branches of two requests are integers up to 2 x 2 = 4, for 200 requests
    # at most.
    clock = clock_leaf(np.array([2, 0, 0]))
    for change, words in (
        ({"branches": []}, "integers from 0 to 4"),
        ({"branches": [5, 0, 0]}, "integers from 0 to 4"),
        ({"branches": [-1]}, "integers from 0 to 4"),
        ({"branches": [0.0]}, "expected an integer"),
        ({"branches": None}, "expected a list"),
        ({"branches": [2, 0]}, "no tree of pairs"),
        ({"branches": [0, 0]}, "no tree of pairs"),
        ({"branches": [1, 0, 0]}, "no tree of pairs"),  # a request against itself
        ({"branches": [2, 0, 2, 0, 0]}, "no tree of pairs"),  # decided twice
        ({"nodes": 3}, "other fields"),
    ):
        good = certify(instance, PLAIN, "tel", clock)
        with pytest.raises(Rejected, match=words):
            check_certificate(instance, sealed({**good, "tree": {**clock, **change}}))
    crowd = Instance([0.0] * 201, [1] * 201, [1] * 201, kv_capacity=9, time_unit="second")
    with pytest.raises(UsageError, match=r"clock:.*201.*200"):
        certify(crowd, PLAIN, "tel", clock_leaf(np.zeros(1, np.int64)))
    # Other objectives, an instance in rounds, and other fields of the certificate.
    for leaf_of_latency in (busy_leaf, path, clock):
        with pytest.raises(UsageError, match="expected 'tel'"):
            certify(instance, PLAIN, "makespan", leaf_of_latency)
    with pytest.raises(UsageError, match="another node"):
        certify(instance, PLAIN, "makespan", {"sum": [{"first": 0, "last": 1, "tree": leaf}]})
    with pytest.raises(UsageError, match="objective: found 'tps'"):
        certify(instance, PLAIN, "tps", leaf)
    rounds = Instance([0], [3], [3], kv_capacity=9)
    with pytest.raises(UsageError, match="rounds"):
        certify(rounds, PLAIN, "tel", leaf)
    good = certify(instance, PLAIN, "tel", leaf)
    for change, words in (
        ({"claim": "optimal"}, "claim"),
        ({"model": "rounds"}, "fields"),
        ({"ticks_per_second": 0}, "ticks_per_second"),
        ({"ticks_per_second": 10**19}, "ticks_per_second"),
        ({"value": good["value"] + 1}, f"expected {good['value']}, which is proved"),
        ({"denominator": 1}, "fields"),
    ):
        with pytest.raises(Rejected, match=words):
            check_certificate(instance, sealed({**good, **change}))


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.5])
def test_the_clock_is_certified_to_one_part_in_a_million(rate: float) -> None:
    cost, instance = load_cost_model("llama2-7b-a100-infermax"), poisson(rate)
    for method in ("clock", "pieces"):
        found = bound(Problem(instance, cost), method=method, time_limit_s=0.5)
        assert found.certified == pytest.approx(found.bound, rel=1e-6)


def test_what_a_check_may_take_is_limited() -> None:
    instance = Instance([0.0] * 9, [3] * 9, [3] * 9, kv_capacity=9, time_unit="second")
    good = certify(instance, PLAIN, "tel", work_leaf())
    with pytest.raises(Rejected, match="steps; too large to check"):
        # Nine requests take more than 100 steps.
        check_certificate(instance, good, checker_parts.Budget(100))


def test_long_paths_and_many_cells_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # At a price of 100,000 for ever a path may end very late, so that all its cells are looked at.
    instance = Instance([0.0] * 9, [3] * 9, [3] * 9, kv_capacity=9, time_unit="second")
    cells = 100_000
    shared = Shared(np.zeros(cells), np.zeros(10, np.int64), np.zeros(0))
    leaf = shares_leaf(
        1e-3, np.full(cells, 1e5), LEVELS, shared, np.full((9, 2), 50.0), np.zeros(9, np.int64)
    )
    good = certify(instance, PLAIN, "tel", leaf)
    with pytest.raises(Rejected, match="steps; too large to check"):
        # Nine paths of 100,000 cells take more than 250,000 steps.
        check_certificate(instance, good, checker_parts.Budget(250_000))
    monkeypatch.setattr(checker_shares, "_CELLS", cells - 1)
    with pytest.raises(Rejected, match=r"100000.*1 to 99999"):
        check_certificate(instance, good)


def test_command_line_writes_and_verifies(tmp_path: Path) -> None:
    """For each objective `bound` writes and `verify` takes it, but not under another cost model
    (status 5)."""
    instance = Instance(
        [0.0, 0.1], [30, 20], [3, 9], kv_capacity=90, time_unit="second", name="two"
    )
    file, proof = tmp_path / "two.json", tmp_path / "proof.json"
    write_instance(instance, file)
    model = "llama2-7b-a100-infermax"

    def run(*words: object) -> Any:
        return CliRunner().invoke(app, [str(word) for word in words])

    for objective in FLOAT:
        made = run(
            "bound", file, "--cost-model", model, "--objective", objective, "--time-limit", 1,
            "--certificate-out", proof,
        )  # fmt: skip
        assert made.exit_code == 0, made.output
        assert "certificate of" in made.stdout
        checked = run("verify", file, proof, "--cost-model", model)
        assert checked.exit_code == 0, checked.output
        assert f"valid certificate: {objective}" in checked.stdout
    refused = run("verify", file, proof, "--cost-model", "llama2-7b-a100-fit")
    assert refused.exit_code == 5
    assert "cost_model: found another one" in refused.output
    # The file has the proof for the last objective of FLOAT, the makespan.
    value = json.loads(proof.read_text())["value"]
    exact_value = value / TICKS_PER_SECOND
    found = bound(Problem(instance, load_cost_model(model), "makespan"), time_limit_s=0)
    assert found.certified == pytest.approx(exact_value)


def test_a_report_shows_what_is_certified_in_seconds(tmp_path: Path) -> None:
    """Both certificates are verified; the one of the comparison's cost model is shown beside it."""

    from optsched import compare
    from optsched.files.read_write import write_json
    from optsched.show.report import gather, page

    model = "llama2-7b-a100-infermax"
    instance = Instance(
        [0.0, 0.1, 0.2], [30, 20, 10], [3, 9, 5], kv_capacity=90, time_unit="second", name="three"
    )
    compared = compare(Problem(instance, model), ["fcfs"], time_limit_s=0.5)
    names = [tmp_path / name for name in ("i.json", "c.json", "right.json", "wrong.json")]
    write_instance(instance, names[0])
    write_json(compared.to_dict(), names[1])
    for name, file in ((model, names[2]), ("llama2-70b-tp2-a100-splitwise", names[3])):
        write_json(certify(instance, load_cost_model(name), "tel", work_leaf()), file)
    right = verify_certificate(instance, json.loads(names[2].read_text()))
    (section,) = gather.gather(names).sections
    assert [v.state for _, v in section.certificates] == ["verified", "verified"]
    (comparison,) = section.comparisons
    assert comparison["certified"] == right  # the other cost model's larger value does not count
    assert right < verify_certificate(instance, json.loads(names[3].read_text()))
    text = page.render(gather.gather(names))
    assert "/ certified" in text
    assert "total latency" in text
