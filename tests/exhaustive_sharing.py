"""Best schedules of tiny instances with shared prefixes, found by search; no code of the package.

A state has of each request what it produced and cached, and the names of blocks that may still be
claimed: those held in the last batch, and those retained. After a batch as many names are retained
as there is room for. Prefills may stop where a block ends. Times are whole milliseconds.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import combinations, count, product
from math import prod

from slow_judge import _block_of, sequences_of

DONE = "done"


class Sharing:
    """All batches of an instance by state; `best` finds the least sum of latencies, or others."""

    def __init__(self, instance, price, *, restart=False):
        """``price``: milliseconds by the name of a term, whole numbers."""
        self.prompt = [int(v) for v in instance.prompt_tokens]
        self.output = [int(v) for v in instance.output_tokens]
        self.arrival = [round(1000 * float(v)) for v in instance.arrival]
        self.block, self.kv_block = _block_of(instance) or 1, instance.kv_block_tokens
        self.newest, self.room = instance.kv_offset, instance.kv_capacity
        self.whole = instance.chunked_prefill is False
        self.restart, self.price, self.n = restart, price, instance.n
        limits = instance.limits
        self.most_tokens = limits.max_batch_tokens or 10**9
        self.most_prefill = limits.max_prefill_tokens or 10**9
        self.names = []
        ids = {}
        for sequence in sequences_of(instance):
            ends = range(self.block, len(sequence) + 1, self.block)
            self.names.append([ids.setdefault(tuple(sequence[:end]), len(ids)) for end in ends])
        self.least = min(
            price["base"] + price["prefill_base"], price["base"] + price["decode_base"]
        )
        self.known, self.tried = {}, 0

    def held(self, i, cached):
        """Return the names of the whole blocks of a request."""
        return self.names[i][: cached // self.block]

    def options(self, i, state):
        """Yield what a batch may do with a request: (tokens, phase, evicted, claim, next state)."""
        yield 0, None, False, 0, state
        if state == DONE:
            return
        produced, cached, ready = state
        kept = 0 if self.restart and cached else produced
        starts = [(claim, False, claim) for claim in range(0, self.prompt[i] + kept, self.block)]
        if cached:
            yield 0, None, True, 0, (kept, 0, False)
            starts.append((cached, ready, 0))
        for place, (have, decoding, claim) in enumerate(starts):
            evicted = cached > 0 and place < len(starts) - 1
            made = kept if evicted else produced
            need = self.prompt[i] + made - have
            for tokens in range(1, need + 1):
                if tokens == need:
                    after = made + 1, have + tokens, True
                elif self.whole or (have + tokens) % self.block:
                    continue
                else:
                    after = made, have + tokens, False
                yield tokens, ("decode" if decoding else "prefill", have), evicted, claim, after

    def time(self, entries):
        """Return the milliseconds of a batch of (tokens, (phase, cached))."""
        p = self.price
        total = p["base"]
        phases = {phase for _, (phase, _) in entries}
        total += sum(p[f"{phase}_base"] for phase in phases)
        for tokens, (phase, cached) in entries:
            total += p["token"] * tokens
            if phase == "decode":
                total += p["decode_request"] + p["decode_kv"] * cached
            else:
                total += p["prefill_request"] + p["prefill_token"] * tokens
                total += p["prefill_kv"] * cached + p["prefill_square"] * tokens**2
                total += p["prefill_cross"] * tokens * cached
        return total

    def batches(self, states, there):
        """Return every batch: (time, doers, next states, names that may be claimed after it)."""
        key = states, there
        if key in self.known:
            return self.known[key]

        found = []
        ways = [list(self.options(i, one)) for i, one in enumerate(states)]
        self.tried += prod(map(len, ways))
        for row in product(*ways):
            entries = [(one[0], one[1]) for one in row if one[0]]
            if not entries or sum(t for t, _ in entries) > self.most_tokens:
                continue
            if sum(t for t, (phase, _) in entries if phase == "prefill") > self.most_prefill:
                continue
            after = self.after(states, row, there)
            if after is not None:
                nexts, kept = after
                time = self.time(entries)
                found += [(time, row, nexts, names) for names in kept]
        self.known[key] = found
        return found

    def after(self, states, row, there):
        """Return the states after a batch and the names that may then be claimed, or None."""
        own, names, private = set(there), set(), 0
        nexts = []
        for i, (_, _, _, claim, after) in enumerate(row):
            nexts.append(after)
            if after == DONE or after[1] == 0:
                continue
            cached = after[1]
            blocks = self.held(i, cached)
            names |= set(blocks)
            own |= set(blocks[claim // self.block :])
            in_blocks = -(-(cached + self.newest) // self.kv_block) * self.kv_block
            private += in_blocks - len(blocks) * self.block
        for i, (_, _, _, claim, _) in enumerate(row):
            if not set(self.held(i, claim)) <= own:
                return None
        room = (self.room - private) // self.block - len(names)
        if room < 0:
            return None

        for i, after in enumerate(nexts):
            if after != DONE and after[0] >= self.output[i]:
                nexts[i] = DONE
        live = {v for i, one in enumerate(nexts) if one != DONE for v in self.names[i]}
        idle = sorted((there - names) & live)
        choices = combinations(idle, min(room, len(idle)))
        return tuple(nexts), {frozenset((names & live) | set(kept)) for kept in choices}

    def best(self, objective="tel", most=200_000):
        """Return the least value in ms and the batches (start, row); None after ``most`` trials.

        Objectives: ``tel`` and ``ttft`` sum over requests, ``makespan`` is the last completion.
        """
        begin = tuple((0, 0, False) for _ in range(self.n))
        tie = count()
        queue = [(0, next(tie), 0, 0, begin, frozenset(), None)]
        seen = {}
        while queue:
            _, _, now, cost, states, there, way = heappop(queue)
            if all(one == DONE for one in states):
                rows = []
                while way:
                    rows.append(way[0])
                    way = way[1]
                return cost, rows[::-1]
            if any(t <= now and c <= cost for t, c in seen.get((states, there), ())):
                continue
            seen.setdefault((states, there), []).append((now, cost))
            if self.tried > most:
                return None
            for time, row, nexts, names in self.batches(states, there):
                doing = [i for i, one in enumerate(row) if one[0]]
                start = max(now, *(self.arrival[i] for i in doing))
                end = start + time
                total = max(cost, end) if objective == "makespan" else cost
                for i in doing:
                    first = row[i][4][0] == 1 and (states[i][0] == 0 or row[i][2])
                    counts = nexts[i] == DONE if objective == "tel" else first
                    if objective != "makespan" and counts:
                        total += end - self.arrival[i]
                rest = 0
                for i, one in enumerate(nexts):
                    if one != DONE and objective == "tel":
                        wait = max(end, self.arrival[i]) - self.arrival[i]
                        rest += wait + self.least * (self.output[i] - one[0])
                entry = end, total, nexts, names, ((start, row), way)
                heappush(queue, (total + rest, next(tie), *entry))
        return None
