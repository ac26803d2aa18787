"""Bounds on sessions: against all schedules of tiny instances, and what their checker accepts."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, run
from exhaustive_pools import Best, Case
from exhaustive_sessions import Chains
from exhaustive_sharing import DONE, Sharing
from session_cases import chains, claiming_chains, forest
from slow_judge import of_rows
from test_certificate import sealed
from test_pools_bounds import tiny
from test_prefix_bounds import TERMS

import optsched
from optsched import BatchCost, Instance, Link, Machine, Problem, bound, evaluate, from_starts
from optsched.bounds import sessions as proofs
from optsched.bounds.certificate import certify, verify_certificate
from optsched.bounds.checker import prefixes, sessions as checker
from optsched.bounds.checker.parts import Budget
from optsched.bounds.leaves import sessions_leaf
from optsched.bounds.pools import verify_pools
from optsched.bounds.sessions import alone_times
from optsched.costs.fleet import Fleet
from optsched.files.read_write import write_instance, write_json
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.sessions import Sessions

GOALS = ("session_completion", "makespan", "tel")


def agents(seed: int, sessions: int, calls: int, shared: bool) -> tuple[Instance, BatchCost, str]:
    """Return sessions of up to 3 calls, so many calls in all, whole milliseconds, little KV."""
    rng = Random(seed)
    size = [1] * sessions
    while sum(size) < calls and min(size) < 3:
        size[rng.choice([s for s in range(sessions) if size[s] < 3])] += 1
    arrival, after, delay, parent, share, prompt, output = ([] for _ in range(7))
    block = rng.choice([1, 2])
    for own in size:
        begin = len(prompt)
        for c in range(own):
            i = begin + c
            before = [begin + rng.randrange(c)] if c and rng.random() < 0.3 else [i - 1]
            if c == 2 and rng.random() < 0.2:
                before = [begin, begin + 1]
            after.append(before if c else None)
            arrival.append(None if c else rng.randint(0, 20) / 1000)
            delay.append(rng.choice([0, 0, rng.randint(1, 20)]) / 1000 if c else None)
            prompt.append(rng.randint(1, 2) + (prompt[-1] if c and rng.random() < 0.7 else 0))
            output.append(rng.choice([1, 1, 1, 2]))
            up = before[-1] if c else rng.choice([None, rng.randrange(i)]) if i else None
            longest = 0 if up is None else min(prompt[up] + output[up], prompt[i] + output[i])
            parent.append(up if shared else None)
            share.append(rng.choice([longest, longest, rng.randint(0, longest)]) if shared else 0)
    peak = -(-max(s + o for s, o in zip(prompt, output, strict=True)) // block) * block
    price = dict.fromkeys(TERMS, 0) | {"token": rng.randint(1, 4), "base": rng.randint(0, 5)}
    for name in TERMS[2:]:
        if rng.random() < 0.25:
            price[name] = rng.randint(1, 3)
    columns: dict[str, Any] = {
        "prefix_parent": parent,
        "prefix_tokens": share,
        "prefix_block_tokens": block,
    }
    instance = Instance(
        arrival, prompt, output, rng.choice([peak, peak + rng.randint(0, peak), 100]),
        time_unit="second", after=after, delay=delay,
        chunked_prefill=rng.choice([None, False, False]), **(columns if shared else {}),
    )  # fmt: skip
    cost = BatchCost("tiny", 1, {name: str(value) for name, value in price.items()})
    return instance, cost, rng.choice(["recompute", "restart"])


class Agents(Sharing):
    """All schedules of sessions: releases follow from ends. No code of the package."""

    def __init__(self, instance: Instance, price: dict[str, int], *, restart: bool) -> None:
        super().__init__(instance, price, restart=restart)
        self.before, self.ready = instance.after, []
        self.shared = instance.prefix_block_tokens is not None
        self.names = self.names if self.shared else [[]] * self.n
        self.delay = [round(1000 * float(d)) for d in instance.delay]
        root = list(range(self.n))
        for _ in range(self.n):
            for i, row in enumerate(self.before):
                for j in row:
                    root[i] = root[j] = min(root[i], root[j])
        self.session = root
        self.roots = [i for i in range(self.n) if not self.before[i]]

    def options(self, i: int, state: Any) -> Any:
        """See `Sharing.options`. What is not released yet does nothing."""
        if not self.ready[i]:
            return [(0, None, False, 0, state)]
        return [one for one in super().options(i, state) if self.shared or not one[3]]

    def value(self, ends: list[int], release: list[int], objective: str) -> int:
        if objective == "makespan":
            return max(ends)
        if objective == "tel":
            return sum(ends) - sum(release)
        last, first = {}, {}
        for i, s in enumerate(self.session):
            last[s] = max(last.get(s, 0), ends[i])
            first[s] = min(first.get(s, 10**9), release[i])
        return sum(last.values()) - sum(first.values())

    def coming(self, now: int, states: tuple, ends: tuple) -> tuple[list[int], list[int]]:
        """Return when requests end and are released at the earliest from now on."""
        end, release = list(ends), [0] * self.n
        for i in range(self.n):  # predecessors have smaller numbers
            before = self.before[i]
            release[i] = self.arrival[i]
            if before:
                release[i] = max(end[j] for j in before) + self.delay[i]
            if end[i] == 0:
                rest = self.least * (self.output[i] - states[i][0])
                end[i] = max(now, release[i]) + max(rest, 1)
        return end, release

    def best_of(self, objective: str, most: int) -> tuple[int, list] | None:
        """Return the least value in ms and the batches (start, row); None after ``most`` trials."""
        begin = tuple((0, 0, False) for _ in range(self.n))
        tie, seen = count(), {}
        queue = [(0, next(tie), 0, (0,) * self.n, begin, frozenset(), None)]
        while queue:
            low, _, now, ends, states, there, way = heappop(queue)
            if all(one == DONE for one in states):
                rows = []
                while way:
                    rows.append(way[0])
                    way = way[1]
                return low, rows[::-1]
            known = seen.setdefault((states, there), [])
            if any(
                t <= now and all(a <= b for a, b in zip(e, ends, strict=True)) for t, e in known
            ):
                continue
            known.append((now, ends))
            if self.tried > most or len(queue) > most:
                return None
            release = self.coming(now, states, ends)[1]
            self.ready = [all(states[j] == DONE for j in row) for row in self.before]
            for time, row, nexts, names in self.batches(states, there):
                doing = [i for i, one in enumerate(row) if one[0]]
                start = max(now, *(release[i] for i in doing))
                new = list(ends)
                for i in doing:
                    if nexts[i] == DONE:
                        new[i] = start + time
                more = self.coming(start + time, nexts, tuple(new))
                entry = start + time, tuple(new), nexts, names, ((start, row), way)
                heappush(queue, (self.value(*more, objective), next(tie), *entry))
        return None


def contradicted(seed: int, sessions: int, calls: int, shared: bool, most: int = 30_000) -> Any:
    """Return how far bounds are above the best schedules, or None if those are too many."""
    instance, cost, mode = agents(seed, sessions, calls, shared)
    price = {name: int(cost.coefficients.get(name, "0")) for name in TERMS}
    found = []
    for objective in GOALS:
        best = Agents(instance, price, restart=mode == "restart").best_of(objective, most)
        if best is None:
            return None
        value, rows = best
        schedule = of_rows(
            instance, [[(i, one[0]) for i, one in enumerate(row) if one[0]] for _, row in rows],
            [[i for i, one in enumerate(row) if one[2]] for _, row in rows], evict_mode=mode,
            reused=[[one[3] for one in row if one[0]] for _, row in rows] if shared else None,
        )  # fmt: skip
        judged = evaluate(Problem(instance, cost), schedule)
        assert judged.metrics[objective] == pytest.approx(value / 1000), (seed, objective)
        assert (judged.clock.finish - judged.clock.release
                >= alone_times(instance, cost) - 1e-9).all()  # fmt: skip
        for parts in (1, 3):
            made = certify(instance, cost, objective, sessions_leaf(parts))
            proved = verify_certificate(instance, made, cost)
            if proved > value / 1000 * (1 + 1e-12):
                found.append((seed, objective, parts, proved, value / 1000))
    return found


# Numbers of sessions and of calls, by seed.
SIZES = ((6, 8), (4, 6), (3, 6), (2, 5), (5, 7), (2, 4))


@pytest.mark.parametrize("shared", [False, True])
def test_no_schedule_of_tiny_sessions_contradicts(shared: bool) -> None:
    """`contradicted` is None where there are more than 4,000 trials; four of eight seeds have
    fewer."""
    solved = 0
    for seed in range(8):
        found = contradicted(seed, *SIZES[seed % 6], shared, 4_000)
        assert not found
        solved += found is not None
    assert solved >= 4


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_no_schedule_of_500_tiny_instances_contradicts(shared: bool) -> None:
    """280 seeds without shared prefixes and 280 with them. Of each 200 at least have few enough
    schedules to try all; of the others nothing is asserted."""
    solved = 0
    for seed in range(100, 380):
        found = contradicted(seed, *SIZES[seed % 6], shared, 30_000)
        assert not found
        solved += found is not None
    assert solved >= 200


def contradicted_by_claims(seed: int, most: int = 6_000) -> list[Any] | None:
    """Return how bounds on six sessions of three calls exceed the best schedule, with claims."""
    instance, base, token = claiming_chains(seed)
    found = Chains(instance, base, token, 0.001).best(most)
    if found is None:
        return None
    least, rows = found
    cost = BatchCost("tiny", 1, {"base": str(base), "token": str(token)})
    schedule = of_rows(
        instance, [[entry[:2] for entry in entries] for entries, _ in rows],
        [list(evicted) for _, evicted in rows], evict_mode="recompute",
        reused=[[claim for _, _, claim in entries] for entries, _ in rows],
    )  # fmt: skip
    assert instance.delay is not None
    total = least / 1000 - float(instance.delay.sum())
    judged = evaluate(Problem(instance, cost), schedule).metrics
    reached = optsched.run(Problem(instance, cost), "vllm-v1").metrics
    wrong = list[Any]()
    for goal, best in (("session_completion", least / 1000), ("tel", total)):
        assert judged[goal] == pytest.approx(best)
        assert reached[goal] >= best * (1 - 1e-9)
        for parts in (1, 16):
            made = certify(instance, cost, goal, sessions_leaf(parts))
            if (proved := verify_certificate(instance, made, cost)) > best * (1 + 1e-12):
                wrong.append((seed, goal, parts, proved, best))
    return wrong


def test_no_schedule_of_six_sessions_that_claim_contradicts() -> None:
    found = [contradicted_by_claims(seed) for seed in (15, 109, 113, 118, 121)]
    assert found == [[]] * len(found)


def test_two_searches_agree_on_sessions_that_claim() -> None:
    """`Agents` (in this file) and `Chains` (tests/exhaustive_sessions.py) are two exhaustive
    searches that share no code; seeds with more than 4,000 trials are left out."""
    solved = 0
    for seed in range(12):
        instance, base, token = claiming_chains(seed, 2 + seed % 2, 3 - seed % 2)
        price = dict.fromkeys(TERMS, 0) | {"base": base, "token": token}
        other = Agents(instance, price, restart=False).best_of("session_completion", 4_000)
        if other is not None:
            solved += 1
            found = Chains(instance, base, token, 0.001).best()
            assert found is not None
            assert found[0] == other[0], seed
    assert solved >= 6  # of 12


@pytest.mark.slow
def test_no_schedule_of_500_times_six_sessions_that_claim_contradicts() -> None:
    """`contradicted_by_claims` is None where there are too many schedules: of 500 all are tried."""
    solved, seed = 0, 1000
    while solved < 500:
        found, seed = contradicted_by_claims(seed), seed + 1
        assert not found
        solved += found is not None


# Name of a step, module with its text, the text, and what stands there instead.
TRAPS = [
    ("alone only what nobody did before", prefixes, "first_users[v] == i if first_users else",
     "True or"),
    ("work lasts until it is done", checker, "work * (work + 2 * piece_tail)",
     "work * (2 * work + 2 * piece_tail)"),
    ("tails begin behind a piece", checker, "piece_tail -= time", "pass"),
    ("delays are subtracted", checker, "- sum(sessions.delay.tolist())", ""),
]  # fmt: skip


def changed(module: Any, right: str, wrong: str) -> dict[str, Any]:
    """Return the names of a module whose text is changed in one place."""
    text = Path(module.__file__).read_text()
    assert text.count(right) == 1
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(text.replace(right, wrong), "changed", "exec"), names)
    return names


@pytest.mark.parametrize("trap", TRAPS, ids=[trap[0] for trap in TRAPS])
def test_each_step_of_the_proof_is_needed(monkeypatch: Any, trap: Any) -> None:
    """With one step of the checker changed in its text (`TRAPS`), it proves more than the best
    schedule of some instance has."""
    _, module, right, wrong = trap
    names = changed(module, right, wrong)
    if module is prefixes:
        monkeypatch.setattr(proofs, "charges_of", names["charges_of"])
    else:
        monkeypatch.setattr(checker, "sessions_ticks", names["sessions_ticks"])

    def is_caught(seed: int) -> bool:
        try:
            return bool(contradicted(seed, *SIZES[seed % 6], True, 3_000))
        except AssertionError:  # a request took less than its time alone
            return True

    # Each change is caught on one of these instances.
    assert any(map(is_caught, (3, 26, 29, 9, 0, 1, 2, 4)))


def test_kv_that_two_lines_hold_counts_once(monkeypatch: Any) -> None:
    """Six calls decode beside each other over one prompt of 10 tokens, for which there is room, and
    for 1 + 3 tokens of each. With the text changed so that every line pays for the 10, the bound
    is above what the judge has seen."""
    n = 6
    instance = Instance(
        [0.0] * n + [None], [11] * n + [1], [3] * n + [1], 10 + 4 * n, time_unit="second",
        after=[None] * n + [0], prefix_parent=[None] + [0] * (n - 1) + [None],
        prefix_tokens=[0] + [10] * (n - 1) + [0], prefix_block_tokens=5, kv_block_tokens=1,
    )  # fmt: skip
    cost = BatchCost("base", 1, {"token": "1", "base": "10"})
    reached = optsched.run(Problem(instance, cost), "vllm-v1:merge_blocks=true").evaluation
    least = reached.metrics["makespan"]

    def proved() -> float:
        made = certify(instance, cost, "makespan", sessions_leaf(1))
        return made["value"] / made["ticks_per_second"]

    assert proved() <= least
    names = changed(prefixes, "if lines[v] < 0", "if False")
    monkeypatch.setattr(checker, "charges_of", names["charges_of"])
    assert proved() > least


def test_kv_that_sessions_share_counts_once_in_rounds(monkeypatch: Any) -> None:
    """Six sessions of two calls hold 9 tokens together, and each 1 or 2 of its own: 9 + 6 * 2."""
    n = 6
    instance = Instance(
        [0] * n + [None] * n, [9] * 2 * n, [2] * 2 * n, 9 + 2 * n, after=[None] * n + [*range(n)],
        prefix_parent=[None] + [0] * (2 * n - 1), prefix_tokens=[0] + [9] * (2 * n - 1),
        prefix_block_tokens=1,
    )  # fmt: skip
    # All first calls at once and then all second ones, 2 rounds each, so that a session takes 4.
    starts = [0] * n + [2] * n
    judged = evaluate(instance, from_starts(starts, instance))
    assert judged.metrics["session_completion"] == 4 * n
    found = bound(Problem(instance, objective="session_completion"), time_limit_s=0)
    assert found.bound == 4 * n
    assert verify_certificate(instance, found.certificate or {}) == 4 * n
    # As if nothing were shared, the bound is above what was reached, so sharing is counted.
    monkeypatch.setattr(checker, "charges_of", lambda *_: None)
    assert (
        bound(
            Problem(replace(instance, name="other"), objective="session_completion"),
            method="sessions",
            time_limit_s=0,
        ).bound
        or 0
    ) > 4 * n


def test_kv_of_one_line_is_private() -> None:
    """Calls that follow one another never hold KV together, so all of it has shares of base."""
    instance = Instance(
        [0.0, None], [100, 110], [3, 3], 200, time_unit="second", after=[None, 0],
        prefix_parent=[None, 0], prefix_tokens=[0, 100], prefix_block_tokens=10,
    )  # fmt: skip
    found = prefixes.charges_of(instance, [0, 5], 0)
    assert found is not None
    # The prompt ends on a block, which its request computes itself, and so does whoever claims it.
    assert [one.private for one in found] == [100, 110]
    assert [one.alone_tokens for one in found] == [100, 10]
    assert [one.tokens / prefixes.FINE for one in found] == [100, 10]
    # Both come at once, and may hold the 100 tokens together: none of the first's are private, and
    # 10 of the second's.
    alone = Instance(
        [0.0, 0.0], [100, 110], [3, 3], 250, time_unit="second", prefix_parent=[None, 0],
        prefix_tokens=[0, 100], prefix_block_tokens=10,
    )  # fmt: skip
    assert [one.private for one in prefixes.charges_of(alone, [0, 0], 0) or ()] == [0, 10]


def test_who_precedes_whom() -> None:
    """0 calls 1 and 2, 3 waits for both, and 4 follows 3."""
    rows = ((), (0,), (0,), (1, 2), (3,), ())
    sessions = Sessions(rows, np.zeros(6, dtype=np.int64))
    # The first of each one's line, which goes on only where one follows one: 4 behind 3.
    assert sessions.line == [0, 1, 2, 3, 3, 5]
    before = {(i, k) for i in range(6) for k in range(6) if sessions.precedes(i, k)}
    up = {(0, k) for k in range(5)} | {(1, 3), (1, 4), (2, 3), (2, 4), (3, 4)}
    assert before == up | {(i, i) for i in range(6)}


class ChainsOnMachines(Best):
    """Calls that follow one another, on machines with roles. ``before`` has -1 for none."""

    def __init__(self, case: Case, before: list[int], delay: list[float]) -> None:
        self.before, self.delay, self.root = before, delay, list(range(len(before)))
        for i, up in enumerate(before):
            self.root[i] = i if up < 0 else self.root[up]
        super().__init__(case, "tel")

    def _cost(self, i: int, first: float, finish: float | None) -> float:
        if finish is None or i in self.before:
            return 0.0
        return finish - self.case.arrival[self.root[i]]

    def _rest(self, now: float, places: Any, firsts: Any) -> float:
        each = self.case.cost["base"] + self.case.cost["token"]
        steps = [o - k for (_, _, k), o in zip(places, self.case.output, strict=True)]
        ends = [max(now, self.case.arrival[self.root[i]]) + each * s for i, s in enumerate(steps)]
        return sum(self._cost(i, 0, end) for i, end in enumerate(ends) if steps[i])

    def _ended(self, i: int, w: int, end: float, places: Any, firsts: Any, value: float) -> Any:
        for new, some, worth in super()._ended(i, w, end, places, firsts, value):
            moved = list(new)
            for k, up in enumerate(self.before):
                if up == i and new[i][2] == self.case.output[i]:
                    moved[k] = None, end + self.delay[k], 0
            yield tuple(moved), some, worth


def above_on_machines(seed: int, count: int) -> list[Any]:
    """Return on which instances certificates of several machines prove too much."""
    generator, found = np.random.default_rng(seed), []
    for number in range(count):
        case, plain, pools = tiny(generator)
        n = plain.n
        before = [i - 1 if i and generator.random() < 0.6 else -1 for i in range(n)]
        before[1] = 0
        delay = np.round(generator.random(n) * generator.choice([0.0, 0.02]), 4).tolist()
        waits = [None if up < 0 else d for up, d in zip(before, delay, strict=True)]
        known = [None if up >= 0 else a for up, a in zip(before, case.arrival, strict=True)]
        after = [None if up < 0 else up for up in before]
        instance = Instance(
            known, plain.prompt_tokens, plain.output_tokens, plain.kv_capacity, after=after,
            delay=waits, time_unit="second", kv_accounting="cached",
        )  # fmt: skip
        given = tuple(float("inf") if a is None else a for a in known)
        best = ChainsOnMachines(replace(case, arrival=given), before, delay).best
        total = best - sum(d for d in waits if d)
        for goal, least in (("session_completion", best), ("tel", total)):
            made = bound(Problem(instance, pools, goal), time_limit_s=0)  # fmt: skip
            assert made.certificate is not None
            proved = verify_pools(instance, made.certificate, pools)
            assert made.bound == pytest.approx(proved)
            if proved > least * (1 + 1e-9) + 1e-12:
                found.append((number, goal, proved, least))
            judged = optsched.run(Problem(instance, pools), "vllm-v1").evaluation
            assert judged.metrics[goal] >= least - 1e-9
    return found


def test_no_schedule_on_several_machines_contradicts(monkeypatch: Any) -> None:
    """Against exhaustive search. With the work of all machines not divided by their number, the
    checker proves too much."""
    assert not above_on_machines(1, 30)
    names = changed(checker, "floor(w) // machines", "floor(w)")
    monkeypatch.setattr(proofs, "sessions_ticks", names["sessions_ticks"])
    monkeypatch.setattr(checker, "sessions_ticks", names["sessions_ticks"])
    assert above_on_machines(1, 30)


@pytest.mark.slow
def test_no_schedule_on_several_machines_contradicts_500() -> None:
    assert not above_on_machines(2, 500)


def test_machines_of_sessions_are_equal(tmp_path: Path) -> None:
    """What is proved of machines is of one cost model, capacity and limits."""
    cost = BatchCost("small", 1, {"base": "20", "token": "1"})
    instance = forest(3, 3, rounds=False)
    # Machines apart are refused; three equal ones have a bound and a certificate.
    apart = Fleet(
        [
            Machine(cost_model=cost, kv_capacity=90, role="prefill"),
            Machine(cost_model=cost, kv_capacity=80, role="decode"),
        ],
        Link(),
    )
    for goal in ("tel", "p99_session_completion"):
        with pytest.raises(UsageError, match="bound:"):
            bound(Problem(instance, apart, goal), time_limit_s=0)
    pools = Fleet([Machine(cost_model=cost, kv_capacity=80)] * 3, Link())
    good = bound(Problem(instance, pools, "makespan"), time_limit_s=0)
    made = good.certificate
    assert made is not None
    assert verify_pools(instance, made, pools) == pytest.approx(good.bound)
    three = made["pools"]["mixed"]
    # A certificate of other pools, or none that can be, is refused.
    for wrong in (
        3, {}, {"mixed": 3}, {"mixed": {**three, "machines": 0}}, {"link": {}},
        {"prefill": three, "decode": {**three, "kv_capacity": 99}},
        {"mixed": {**three, "cost_model": {"layers": 2, "coefficients": {}}}},
    ):  # fmt: skip
        with pytest.raises(ViolationError, match="certificate"):
            verify_pools(instance, sealed({**made, "pools": wrong}), pools)
    with pytest.raises(ViolationError, match="found other ones"):
        verify_pools(instance, made, Fleet([Machine(cost_model=cost, kv_capacity=80)] * 2, Link()))
    # The same by the command line.
    file, model, proof = (tmp_path / name for name in ("i.json", "m.toml", "proof.json"))
    write_instance(instance, file)
    model.write_text(
        'format = "optsched-cost-model"\nversion = 1\nunit = "ms_per_layer"\nlayers = 1\n'
        '[coefficients]\nbase = "20"\ntoken = "1"\n'
    )
    words = ("--cost-model", model, "--pools", "1p1d")
    found = answer(
        "bound", file, *words, "--objective", "session_completion", "--certificate-out", proof
    )
    assert found["bound"] == pytest.approx(found["certified"])
    assert "1 prefill, 1 decode" in run("verify", file, proof, *words)


@pytest.mark.parametrize("rounds", [True, False])
def test_certificates_of_sessions_are_checked_and_forged_ones_refused(rounds: bool) -> None:
    """What is forged has a right digest (`sealed`), so that more than the digest refuses it."""
    cost = None if rounds else BatchCost("small", 1, {"base": "20", "token": "1"})
    instance = chains(3) if rounds else forest(3, 3, rounds=False)
    for goal in (*GOALS, "mean_session_completion"):
        if rounds and goal == "makespan":
            continue
        found = bound(Problem(instance, cost, goal), time_limit_s=0)
        good = found.certificate
        assert good is not None, goal
        assert verify_certificate(instance, good, cost) == pytest.approx(found.bound, rel=1e-8)
        for change in (
            {"value": good["value"] + 1},
            {"objective": "mean_ttft"},
            {"tree": {"relaxation": "sessions", "parts": 0}},
            {"tree": {"relaxation": "sessions", "parts": 2, "more": 1}},
            {"tree": {"relaxation": "work"}},
            {"tree": {"within": 0, "tree": good["tree"]}},
        ):
            with pytest.raises(ViolationError, match="certificate"):
                verify_certificate(instance, sealed({**copy.deepcopy(good), **change}), cost)
        with pytest.raises(ViolationError, match="instance_sha256"):
            verify_certificate(chains(4), good, cost)


def test_a_leaf_of_sessions_needs_some() -> None:
    plain = Instance([0.0], [3], [2], 30, time_unit="second")
    cost = BatchCost("one", 1, {"token": "1"})
    with pytest.raises(UsageError, match="expected work, busy-time"):
        certify(plain, cost, "tel", sessions_leaf(2))
    with pytest.raises(UsageError, match="no sessions"):
        certify(plain, cost, "session_completion", sessions_leaf(2))


def test_an_arrival_between_two_ticks_costs_a_tick() -> None:
    # Three calls of 20 ms on a clock of 10 ms: one at 0, and at 19 ms one with another behind it.
    # The machine is busy until 60 ms, so the two sessions take 20 and 41 ms, which is 6.1 ticks.
    # At tick 1 instead the second would take 5, and both 7. A tick less for each of two sessions:
    # 5. Of the three latencies 7 - 3 is less than 2 for each alone.
    cost = BatchCost("ten", 1, {"token": "10"})
    instance = Instance([0.0, 0.019, None], [2, 2, 2], [1, 1, 1], 99, time_unit="second",
                        after=[None, None, 1])  # fmt: skip
    metrics = optsched.run(Problem(instance, cost), "fcfs").metrics
    model = {"layers": 1, "coefficients": {"token": "10"}}
    for goal, ticks in (("session_completion", 5), ("tel", 6)):
        found = checker.sessions_ticks(instance, model, 100, sessions_leaf(1), goal, Budget(), 1)
        assert found == ticks
        assert metrics[goal] == pytest.approx(0.061)  # 20 + 41 ms, and 20 + 21 + 20


def test_more_parts_prove_more() -> None:
    """The fixed costs of the batches behind a part count, and not its share of them alone."""
    model = {"layers": 1, "coefficients": {"base": "5", "token": "30"}}
    instance = Instance(
        [0.0, 0.0, None], [5, 5, 5], [50, 50, 50], 1000, time_unit="second", after=[None, None, 1]
    )
    one, many = (
        checker.sessions_ticks(
            instance, model, 1000, sessions_leaf(parts), "session_completion", Budget(), 1
        )
        for parts in (1, 16)
    )
    assert one < many


def test_the_command_line_writes_and_verifies_certificates_of_sessions(tmp_path: Path) -> None:
    """Three sessions with six calls and shared prefixes; the forged certificate claims 10^9
    ticks more."""
    instance, cost, _ = agents(2, 3, 6, True)
    file, proof, model = (tmp_path / name for name in ("i.json", "proof.json", "m.toml"))
    write_instance(instance, file)
    model.write_text(
        'format = "optsched-cost-model"\nversion = 1\nunit = "ms_per_layer"\nlayers = 1\n'
        "[coefficients]\n"
        + "".join(f'{name} = "{value}"\n' for name, value in cost.coefficients.items())
    )
    words = ("--cost-model", model, "--objective", "session_completion", "--time-limit", 1)
    found = answer("bound", file, *words, "--certificate-out", proof)
    assert found["certificate"]
    assert 0 < found["bound"] <= found["objective"]
    assert "or more" in run("verify", file, proof, "--cost-model", model)
    data = json.loads(proof.read_text())
    data["value"] += 10**9
    write_json(sealed(data), proof)
    assert invoke("verify", file, proof, "--cost-model", model).exit_code == 5
