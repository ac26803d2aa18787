"""Random sessions, and exhaustive searches over their schedules, without code of the package."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from itertools import combinations
from random import Random

from slow_judge import _block_of, _seconds, sequences_of

from optsched.problem.instance import Instance


def chains(seed: int, sessions: int = 6, calls: int = 3, *, delays: int = 2) -> Instance:
    """Return sessions whose calls follow one another, in rounds, with little KV."""
    rng = Random(seed)
    arrival, after, delay = [], [], []
    for s in range(sessions):
        arrival += [rng.randrange(3)] + [None] * (calls - 1)
        after += [None] + [s * calls + k for k in range(calls - 1)]
        delay += [None] + [rng.randint(0, delays) for _ in range(calls - 1)]
    n = sessions * calls
    prompt, output = ([rng.randint(1, most) for _ in range(n)] for most in (4, 2))
    return Instance(arrival, prompt, output, rng.randint(9, 16), after=after, delay=delay)


def sharing_chains(seed: int) -> Instance:
    """Return `chains` whose calls share KV with calls before them, in blocks of 1 or 2 tokens."""
    rng, plain = Random(seed), chains(seed)
    size = (plain.prompt_tokens + plain.output_tokens).tolist()
    parent, shared = [None], [0]
    for i in range(1, plain.n):
        up = rng.choice([i - 1, rng.randrange(i), 0, None])
        longest = 0 if up is None else min(size[i], size[up])
        parent.append(up)
        shared.append(rng.choice([longest, rng.randint(0, longest)]))
    columns = {"prefix_parent": parent, "prefix_tokens": shared}
    room = rng.randint(max(size), 12)
    return replace(
        plain, **columns, prefix_block_tokens=rng.choice([1, 2]), kv_block_tokens=1,
        kv_capacity=room,
    )  # fmt: skip


def forest(seed: int, sessions: int = 5, calls: int = 4, *, rounds: bool = True) -> Instance:
    """Return sessions in which calls come after any earlier ones, one or two, or after none."""
    rng = Random(seed)
    scale = 1 if rounds else Fraction(1, 16)
    arrival, after, delay = [], [], []
    for s in range(sessions):
        for c in range(calls):
            before = sorted(
                {s * calls + rng.randrange(c) for _ in range(rng.randint(0, 2))} if c else ()
            )
            after.append(before or None)
            arrival.append(None if before else scale * rng.randrange(12))
            delay.append(scale * rng.randrange(5) if before else None)
    n = sessions * calls
    columns = [
        [None if v is None else int(v) if rounds else float(v) for v in c] for c in (arrival, delay)
    ]
    prompt, output = ([rng.randint(1, most) for _ in range(n)] for most in (20, 6))
    return Instance(
        columns[0], prompt, output, rng.randint(40, 80), after=after, delay=columns[1],
        time_unit="round" if rounds else "second", slo_ttft=[2.0] * n, slo_tpot=[1.5] * n,
    )  # fmt: skip


def best_in_rounds(instance: Instance) -> tuple[int, list[int]]:
    """Return the least sum of session completions of `chains`, and starts that reach it.

    A* over what sessions are at: a call, rounds until its release, and rounds that it has run. Each
    round costs 1 for every session that has arrived and not ended, and what is to come costs at
    least what each session would take alone.
    """
    next_of = {row[0]: i for i, row in enumerate(instance.after) if row}
    roots = [i for i, row in enumerate(instance.after) if not row]
    calls = []
    for root in roots:
        calls.append([root])
        while calls[-1][-1] in next_of:
            calls[-1].append(next_of[calls[-1][-1]])
    output, prompt = instance.output_tokens.tolist(), instance.prompt_tokens.tolist()
    delay = instance.delay.tolist()
    sequences, block = sequences_of(instance), _block_of(instance) or 1

    def held(runs: list[tuple[int, int]]) -> int:
        """Return the KV of requests and their tokens made; whole blocks of a name count once."""
        names = [
            tuple(sequences[i][:end])
            for i, j in runs
            for end in range(block, prompt[i] + j, block)
            if instance.prefix_parent is not None
        ]
        return sum(prompt[i] + j for i, j in runs) - block * (len(names) - len(set(names)))

    def alone(s: int, at: tuple[int, int, int]) -> int:
        call, wait, ran = at
        if call == len(calls[s]):
            return 0
        rest = sum(output[i] + delay[i] for i in calls[s][call + 1 :])
        return (wait if call else 0) + output[calls[s][call]] - ran + rest

    begin = tuple((0, int(instance.arrival[root]), 0) for root in roots)
    heap = [(sum(alone(s, at) for s, at in enumerate(begin)), 0, begin)]
    paid, came_from = {begin: 0}, {}
    while heap:
        _, cost, state = heappop(heap)
        if cost > paid[state]:
            continue
        if all(call == len(calls[s]) for s, (call, _, _) in enumerate(state)):
            return cost, _starts(came_from, state, len(output))
        live = [s for s, (call, _, _) in enumerate(state) if call < len(calls[s])]
        ready = [s for s in live if state[s][1:] == (0, 0)]
        on = [s for s in live if state[s][2] > 0]
        here = sum(state[s][0] > 0 or state[s][1] == 0 for s in live)
        for size in range(len(ready) + 1):
            for chosen in combinations(ready, size):
                runs = [(calls[s][state[s][0]], state[s][2] + 1) for s in (*on, *chosen)]
                if held(runs) > instance.kv_capacity:
                    continue
                after = list(state)
                for s in live:
                    call, wait, ran = state[s]
                    if s in on or s in chosen:
                        ran += 1
                        if ran == output[calls[s][call]]:
                            call, ran = call + 1, 0
                            wait = delay[calls[s][call]] if call < len(calls[s]) else 0
                    elif wait > 0:
                        wait -= 1
                    after[s] = (call, wait, ran)
                new = tuple(after)
                if cost + here < paid.get(new, 10**9):
                    paid[new] = cost + here
                    came_from[new] = state, [calls[s][state[s][0]] for s in chosen]
                    to_come = sum(alone(s, at) for s, at in enumerate(new))
                    heappush(heap, (cost + here + to_come, cost + here, new))
    raise AssertionError


def _starts(came_from: dict, state: tuple, n: int) -> list[int]:
    path = []
    while state in came_from:
        state, begun = came_from[state]
        path.append(begun)
    starts = [0] * n
    for k, begun in enumerate(reversed(path)):
        for i in begun:
            starts[i] = k
    return starts


def best_in_seconds(instance: Instance, layers: int, coefficients: dict[str, str]) -> Fraction:
    """Return the least sum of session completions where prefills are whole and nobody is evicted.

    Every set of released requests is tried as the next batch, and to wait for the next release.
    """
    n = instance.n
    session = list(range(n))  # the first request that each is linked with
    for _ in range(n):
        for i, row in enumerate(instance.after):
            for j in row:
                session[i] = session[j] = min(session[i], session[j])
    given = [Fraction(a) if a >= 0 else None for a in instance.arrival.tolist()]
    roots = {s: min(given[i] for i in range(n) if session[i] == s and given[i] is not None)
             for s in set(session)}  # fmt: skip
    wait = [Fraction(d) for d in instance.delay.tolist()]
    best = [Fraction(10**9)]

    def go(now: Fraction, made: tuple[int, ...], ends: dict[int, Fraction]) -> None:
        done = {s: max(ends.get(i, now) for i in range(n) if session[i] == s) for s in roots}
        if sum(done[s] - roots[s] for s in roots if done[s] > roots[s]) >= best[0]:
            return
        if len(ends) == n:
            best[0] = sum((done[s] - roots[s] for s in roots), Fraction(0))
            return
        release = {}
        for i in range(n):
            before = instance.after[i]
            if i not in ends and all(j in ends for j in before):
                release[i] = max(ends[j] for j in before) + wait[i] if before else given[i]
        free = [i for i, at in release.items() if at <= now]
        later = [at for at in release.values() if at > now]
        for size in range(len(free), 0, -1):
            for batch in combinations(free, size):
                holders = {i for i in free if made[i]} | set(batch)
                held = sum(int(instance.prompt_tokens[i]) + made[i] + (i in batch) for i in holders)
                if held > instance.kv_capacity:
                    continue
                cached = {i: int(instance.prompt_tokens[i]) + made[i] - 1 for i in batch}
                decodes = [(1, cached[i]) for i in batch if made[i]]
                fills = [(int(instance.prompt_tokens[i]), 0) for i in batch if not made[i]]
                total = len(decodes) + sum(c for c, _ in fills)
                end = now + _seconds(total, decodes, fills, layers, coefficients)
                new = tuple(m + (i in batch) for i, m in enumerate(made))
                gone = {i: end for i in batch if new[i] == instance.output_tokens[i]}
                go(end, new, ends | gone)
        if later:
            go(min(later), made, ends)

    go(min(roots.values()), (0,) * n, {})
    return best[0]


def claiming_chains(seed: int, sessions: int = 6, calls: int = 3) -> tuple[Instance, int, int]:
    """Return chains in whole ms whose calls share KV, with little room; base and token."""
    rng = Random(seed)
    base, token, common = rng.randint(1, 5), rng.choice([1, 1, 2]), rng.choice([0, 0, 1])
    every = rng.choice([40, 80, 160])
    arrival, after, delay, prompt, output, parent, shared = ([] for _ in range(7))
    for _ in range(sessions):
        for c in range(calls):
            i = len(prompt)
            arrival.append(None if c else rng.randrange(every) / 1000)
            after.append(i - 1 if c else None)
            delay.append(rng.choice([0, rng.randint(0, 9)]) / 1000 if c else None)
            output.append(rng.choice([1, 1, 2]))
            longest = prompt[-1] + output[-2] if c else common
            prompt.append(max(common + 1, rng.choice([longest, 0, 0]) + rng.randint(1, 2)))
            parent.append(i - 1 if c else 0 if i else None)
            both = min(longest, prompt[-1] + output[-1])
            shared.append(rng.choice([both, both, rng.randint(common, both)]) if i else 0)
    peak = max(p + o for p, o in zip(prompt, output, strict=True))
    instance = Instance(
        arrival, prompt, output, peak + rng.randint(0, 2 * peak), time_unit="second", after=after,
        delay=delay, prefix_parent=parent, prefix_tokens=shared, prefix_block_tokens=1,
        chunked_prefill=False,
    )  # fmt: skip
    return instance, base, token
