"""The best schedule of sessions whose calls follow one another and claim KV; no package code.

A* over what sessions are at, by one worker's batches. It is exact where a batch takes a base and so
much for each token: then nobody claims less than there is, a request that is evicted comes back
later, and prefills are whole. Blocks of KV are one token. Times are whole numbers.

A state has of each session its call, the time until that is released, the output tokens made, the
KV cached, and how many of the call's tokens there are to be claimed behind those that all sessions
share, also where calls before it left more than it holds. What all share can be claimed since the
first batch, as every request holds it.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import count, product
from typing import NamedTuple

from optsched.problem.instance import Instance


class Call(NamedTuple):
    """A call: its release after the one before, tokens, and the tokens that one shares with it."""

    request: int
    delay: int
    prompt: int
    output: int
    shared: int


class At(NamedTuple):
    """Where a session is, between batches."""

    call: int
    wait: int
    made: int
    cached: int
    there: int


class Chains:
    """All batches of an instance's sessions; times are multiples of ``unit``."""

    def __init__(self, instance: Instance, base: int, token: int, unit: float = 1) -> None:
        self.base, self.token, self.room = base, token, instance.kv_capacity
        self.newest = instance.kv_offset
        n, after = instance.n, instance.after
        shared = [0] * n if instance.prefix_tokens is None else instance.prefix_tokens.tolist()
        roots = [i for i in range(n) if not after[i]]
        self.common = max((shared[i] for i in roots), default=0)
        self.sessions = []
        for root in roots:
            calls, at = [], root
            while at is not None:
                wait = instance.delay[at] if after[at] else instance.arrival[at]
                sizes = int(instance.prompt_tokens[at]), int(instance.output_tokens[at])
                own = shared[at] - self.common if after[at] and shared[at] else 0
                calls.append(Call(at, round(float(wait) / unit), *sizes, own))
                at = next((i for i in range(n) if after[i] == (at,)), None)
            self.sessions.append(calls)
        self.rest = [self._rests(calls) for calls in self.sessions]

    def _rests(self, calls: list[Call]) -> list[tuple[int, int]]:
        """Return by call the least time and work from its release to the session's end."""
        found = [(0, 0)]
        for k in range(len(calls) - 1, -1, -1):
            one = calls[k]
            first = max(1, one.prompt - one.shared - self.common)
            work = self.token * (first + one.output - 1)
            time = work + self.base * one.output
            if k + 1 < len(calls):
                time += calls[k + 1].delay
            found.insert(0, (found[0][0] + time, found[0][1] + work))
        return found

    def to_come(self, state: tuple[At, ...]) -> int:
        """Return what sessions take at least from now on, after their arrivals."""
        ends, works, coming = [], [], 0
        for s, at in enumerate(state):
            calls = self.sessions[s]
            if at.call == len(calls):
                continue
            time, work = self.rest[s][at.call]
            if at.made:
                one, later = calls[at.call], self.rest[s][at.call + 1]
                steps = one.output - at.made
                after = calls[at.call + 1].delay if at.call + 1 < len(calls) else 0
                time = later[0] + after + (self.base + self.token) * steps
                work = later[1] + self.token * steps
            elif at.call == 0:
                coming += at.wait
            ends.append(at.wait + time)
            works.append(work)
        # The k-th to end has waited for its own rest, and for the k smallest works.
        total = done = 0
        for end, work in zip(sorted(ends), sorted(works), strict=True):
            done += work
            total += max(end, done)
        return total - coming

    def best(self, most: int = 10**9) -> tuple[int, list] | None:
        """Return the least sum of completions, and the batches: (request, tokens, claimed) rows.

        Each comes with those evicted before it. None after ``most`` states.
        """
        begin = tuple(At(0, calls[0].delay, 0, 0, 0) for calls in self.sessions), False
        tie = count()
        heap = [(self.to_come(begin[0]), next(tie), 0, begin)]
        paid, came_from, expanded = {begin: 0}, {}, defaultdict(list)
        while heap:
            _, _, cost, key = heappop(heap)
            if cost > paid[key]:
                continue
            state, begun = key
            if all(at.call == len(self.sessions[s]) for s, at in enumerate(state)):
                return cost, self._path(came_from, key)
            if self._is_beaten(expanded, cost, state, begun):
                continue
            if len(paid) > most:
                return None
            for time, row, new in self.ways(state, begun):
                total = cost + self._spent(state, time)
                if total < paid.get(new, 10**9):
                    paid[new] = total
                    came_from[new] = key, row
                    heappush(heap, (total + self.to_come(new[0]), next(tie), total, new))
        raise AssertionError

    def _is_beaten(self, expanded: dict, cost: int, state: tuple[At, ...], begun: bool) -> bool:
        """Return whether a state that was expanded has done as much, waits less and keeps more.

        Whatever follows this one may follow that, too. A session that is still to arrive counts
        from its arrival, so what it waits is subtracted from what has been paid.
        """
        place = begun, *((at.call, at.made, at.cached) for at in state)
        early = sum(at.wait for at in state if at.call == at.made == 0)
        mine = cost - early, *(at.wait for at in state), *(-at.there for at in state)
        known = expanded[place]
        if any(all(a <= b for a, b in zip(one, mine, strict=True)) for one in known):
            return True
        known.append(mine)
        return False

    def _spent(self, state: tuple[At, ...], time: int) -> int:
        """Return how long sessions are there within a time."""
        total = 0
        for s, at in enumerate(state):
            if at.call < len(self.sessions[s]):
                total += max(0, time - at.wait) if at.call == at.made == 0 else time
        return total

    def _path(self, came_from: dict, key: tuple) -> list:
        rows = []
        while key in came_from:
            key, row = came_from[key]
            if row is not None:
                rows.append(row)
        return rows[::-1]

    def ways(self, state: tuple[At, ...], begun: bool):
        """Yield (time, row, next state): to wait for the next release, and every batch."""
        waits = [at.wait for at in state if at.wait]
        if waits:
            yield min(waits), None, (self._later(state, min(waits)), begun)

        choices = []
        for s, at in enumerate(state):
            able = at.call < len(self.sessions[s]) and not at.wait
            choices.append(["idle", "run", "evict"][: 1 + able + (at.cached > 0)])
        for row in product(*choices):
            if "run" in row:
                yield from self._batch(state, begun, row)

    def _later(self, state: tuple[At, ...], time: int) -> tuple[At, ...]:
        return tuple(at._replace(wait=max(0, at.wait - time)) if at.wait else at for at in state)

    def _batch(self, state: tuple[At, ...], begun: bool, row: tuple[str, ...]):
        """Yield the ways in which a batch leaves KV to be claimed."""
        held, entries, evicted, own, claims = self.common, [], [], [0] * len(state), []
        nexts = list(state)
        for s, at in enumerate(state):
            if at.call == len(self.sessions[s]):
                continue
            one, cached = self.sessions[s][at.call], at.cached
            if row[s] == "run" and cached:
                cached += 1
                entries.append((one.request, 1, 0))
            elif row[s] == "run":
                cached = one.prompt + at.made
                claim = min(cached - 1, self.common + at.there)
                claims.append((claim, len(entries)))
                entries.append((one.request, cached - claim, claim))
            elif row[s] == "evict":
                evicted.append(one.request)
                there = max(at.there, cached - self.common)
                nexts[s], cached = at._replace(cached=0, there=there), 0
            if row[s] == "run":
                nexts[s] = at._replace(cached=cached, made=at.made + 1)
            if cached:
                own[s] = cached - self.common
                held += own[s] + self.newest
        # All share the first tokens. In the first batch one computes them and all behind them.
        if self.common and not begun:
            claim, place = min(claims)
            i, tokens, _ = entries[place]
            entries[place] = i, tokens + claim, 0
        room = self.room - held
        if room < 0:
            return
        time = self.base + self.token * sum(tokens for _, tokens, _ in entries)
        # What nobody holds is retained, as much as there is room for.
        made = tuple(entries), tuple(evicted)
        extra = [max(0, at.there - own[s]) for s, at in enumerate(nexts)]
        choices = [extra]
        if sum(extra) > room:
            ways = product(*(range(min(tokens, room) + 1) for tokens in extra))
            choices = [kept for kept in ways if sum(kept) == room]
        for kept in choices:
            new = [self._after(s, at, own[s], kept[s], time) for s, at in enumerate(nexts)]
            yield time, made, (tuple(new), True)

    def _after(self, s: int, at: At, own: int, kept: int, time: int) -> At:
        """Return where a session is behind a batch, of which it held its own and kept some."""
        calls, there = self.sessions[s], own + kept if kept else 0
        if at.call == len(calls) or at.made < calls[at.call].output:
            return at._replace(wait=max(0, at.wait - time), there=there)
        if at.call + 1 == len(calls):
            return At(at.call + 1, 0, 0, 0, 0)
        new = calls[at.call + 1]
        return At(at.call + 1, new.delay, 0, 0, min(own + kept, new.shared))
