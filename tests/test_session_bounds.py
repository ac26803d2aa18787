"""Bounds on sessions: against all schedules of tiny instances, and what their checker accepts."""

from __future__ import annotations

import copy
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from command_line import answer, invoke, run
from exhaustive_sharing import DONE, Sharing
from session_cases import chains, forest
from slow_judge import of_rows
from test_certificate import sealed
from test_prefix_bounds import TERMS

from optsched import BatchCost, Instance, bound, evaluate, simulate
from optsched.bounds import lower_bound
from optsched.bounds.certificate import certify, verify_certificate
from optsched.bounds.checker import prefixes, sessions as checker
from optsched.bounds.checker.parts import Budget
from optsched.bounds.leaves import sessions_leaf
from optsched.bounds.sessions import alone_times
from optsched.files.read_write import write_instance, write_json
from optsched.problem.errors import UsageError, ViolationError

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
        time_unit="second", after=after, delay=delay, chunked_prefill=rng.choice([None, False, False]),
        **(columns if shared else {}),
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
        judged = evaluate(instance, schedule, cost)
        assert judged.metrics[objective] == pytest.approx(value / 1000), (seed, objective)
        assert judged.metrics["mean_above_chain"] >= 0
        assert (judged.clock.finish - judged.clock.release
                >= alone_times(instance, cost) - 1e-9).all()  # fmt: skip
        for parts in (1, 3):
            made = certify(instance, cost, objective, sessions_leaf(parts))
            proved = verify_certificate(instance, made, cost)
            if proved > value / 1000 * (1 + 1e-12):
                found.append((seed, objective, parts, proved, value / 1000))
    return found


SIZES = ((6, 8), (4, 6), (3, 6), (2, 5), (5, 7), (2, 4))


@pytest.mark.parametrize("shared", [False, True])
def test_no_schedule_of_tiny_sessions_contradicts(shared: bool) -> None:
    solved = 0
    for seed in range(10):
        found = contradicted(seed, *SIZES[seed % 6], shared, 4_000)
        assert not found
        solved += found is not None
    assert solved >= 5
