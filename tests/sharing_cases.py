"""Random schedules with claims, a brute force over all retentions, and an engine with an LRU cache.

Nothing here is shared with the package's judge. A block's name is all tokens up to its end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from random import Random

from slow_judge import _block_of, _in_blocks, _names, of_rows, sequences_of

from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule


def sharing_instance(rng: Random, *, most: int = 4, **fixed) -> Instance:
    """Return a small instance with shared prefixes and as much room as a schedule may ask for."""
    n = rng.randint(2, most)
    prompt = [rng.randint(1, 8) for _ in range(n)]
    output = [rng.randint(1, 4) for _ in range(n)]
    size = [s + o for s, o in zip(prompt, output, strict=True)]
    parent, shared = [None], [0]
    for i in range(1, n):
        parent.append(rng.choice([None, *range(i), *range(i)]))
        most_tokens = 0 if parent[i] is None else min(size[i], size[parent[i]])
        shared.append(rng.choice([rng.randint(0, most_tokens), most_tokens]))
    block = rng.choice([1, 2, 2, 2, 3, 4])
    unit = rng.choice(["round", "second"])
    values = {
        "prefix_parent": parent,
        "prefix_tokens": shared,
        "prefix_block_tokens": block,
        "kv_block_tokens": rng.choice([b for b in (1, 2, 3, 4) if block % b == 0]),
        "kv_accounting": rng.choice(["generated", "cached"]),
        "kv_capacity": 10_000,
        "time_unit": unit,
    }
    if rng.random() < 0.1:
        del values["prefix_parent"], values["prefix_tokens"]
    return Instance([0] * n, prompt, output, **{**values, **fixed})


def random_claims(rng: Random, instance: Instance, wrong: float = 0.01) -> Schedule:
    """Return a schedule of random decisions with claims, most of which are of computed blocks."""
    n, block = instance.n, _block_of(instance)
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    sequences = sequences_of(instance)
    mode = "restart" if instance.in_rounds else rng.choice(["restart", "recompute"])
    workers, eager, evicting = rng.choice([1, 1, 2]), rng.choice([0.4, 0.8]), rng.choice([0, 0.2])
    greedy = rng.choice([0.3, 0.7, 1.0])
    cached, produced, home = [0] * n, [0] * n, [-1] * n
    past: list[set] = [set() for _ in range(workers)]  # names ever held
    rows, evict, reused, worker = [], [], [], []
    while any(p < o for p, o in zip(produced, output, strict=True)) and len(rows) < 60:
        w = rng.randrange(workers)
        gone = [i for i in range(n) if home[i] == w and rng.random() < evicting]
        for i in gone:
            cached[i], home[i] = 0, -1
            produced[i] = 0 if mode == "restart" else produced[i]
        able = [i for i in range(n) if produced[i] < output[i] and home[i] in (-1, w)]
        row = [i for i in able if rng.random() < eager]
        if not row:
            if not able:
                break
            row = [rng.choice(able)]
        rng.shuffle(row)
        there = set(past[w])
        entries, claims = [], []
        for i in row:
            claim = 0
            if home[i] < 0:
                whole = (prompt[i] + produced[i] - 1) // block
                known = 0
                while known < whole and tuple(sequences[i][: (known + 1) * block]) in there:
                    known += 1
                claim = block * (known if rng.random() < greedy else rng.randint(0, known))
                if rng.random() < wrong:
                    claim = rng.choice([claim + 1, block * rng.randint(0, whole + 1), -block])
                cached[i], home[i] = claim, w
            elif rng.random() < wrong / 4:
                claim = block
            rest = prompt[i] + produced[i] - cached[i]
            tokens = rest if rng.random() < 0.7 or rest < 2 else rng.randint(1, rest)
            entries.append((i, tokens))
            claims.append(claim)
            cached[i] += tokens
            there |= _names(sequences[i], cached[i], block)
        past[w] = there
        for i, _ in entries:
            if cached[i] == prompt[i] + produced[i]:
                produced[i] += 1
                if produced[i] == output[i]:
                    cached[i], home[i] = 0, -1
        both = list(zip(entries, claims, strict=True))
        rng.shuffle(both)
        rows.append([entry for entry, _ in both])
        reused.append([claim for _, claim in both])
        evict.append(gone)
        worker.append(w)
    apart = [5 * j for j in range(len(rows))] if workers > 1 else None
    worker = worker if workers > 1 else None
    more = {"evict_mode": mode, "worker": worker, "start": apart}
    return of_rows(instance, rows, evict, reused=reused, **more)


def any_retention(instance: Instance, schedule: Schedule) -> bool | None:
    """Return whether some choice of what to retain after each batch serves all claims in the room.

    All sets of names that a worker may retain after a batch are tried, of those that anybody ever
    claims. None if those are too many to try.
    """
    block, sequences = _block_of(instance), sequences_of(instance)
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    cached, produced, home = [0] * instance.n, [0] * instance.n, [-1] * instance.n
    newest = instance.kv_offset
    pairs = zip(schedule.request.tolist(), schedule.reused.tolist(), strict=True)
    useful = set().union(*(_names(sequences[i], r, block) for i, r in pairs))
    if len(useful) > 7:
        return None

    contents: dict[int, set[frozenset]] = defaultdict(lambda: {frozenset()})
    for j in range(schedule.batches):
        w = 0 if schedule.worker is None else int(schedule.worker[j])
        for p in range(schedule.evicted_offsets[j], schedule.evicted_offsets[j + 1]):
            i = int(schedule.evicted[p])
            cached[i], home[i] = 0, -1
            produced[i] = 0 if schedule.evict_mode == "restart" else produced[i]
        wants: set = set()
        own = {i: _names(sequences[i], cached[i], block) for i in range(instance.n) if home[i] == w}
        ends = []
        for p in range(schedule.batch_offsets[j], schedule.batch_offsets[j + 1]):
            i, r = int(schedule.request[p]), int(schedule.reused[p])
            cached[i] += r + int(schedule.tokens[p])
            home[i] = w
            claimed = _names(sequences[i], r, block)
            own[i] = _names(sequences[i], cached[i], block) - claimed
            wants |= claimed
            if cached[i] == prompt[i] + produced[i]:
                produced[i] += 1
                if produced[i] == output[i]:
                    ends.append(i)
        wants -= set().union(*own.values())
        running = [i for i in range(instance.n) if home[i] == w]
        held = set().union(*(_names(sequences[i], cached[i], block) for i in running))
        used = block * len(held) + sum(
            _in_blocks(cached[i] + newest, instance) - cached[i] // block * block for i in running
        )
        room = (instance.kv_capacity - used) // block if used <= instance.kv_capacity else -1
        after: set[frozenset] = set()
        for there in contents[w]:
            if wants <= there and room >= 0:
                loose = sorted((there & useful) - held, key=repr)
                for k in range(min(room, len(loose)) + 1):
                    after |= {
                        frozenset((held & useful).union(kept)) for kept in combinations(loose, k)
                    }
        if not after:
            return False
        contents[w] = after
        for i in ends:
            cached[i], home[i] = 0, -1
    return True


class LruEngine:
    """An engine like vLLM's, with a pool of physical blocks, hits, preemptions and LRU eviction.

    Blocks of equal content are not merged. Those of a request are freed from the last to the first,
    and the block that was freed first is taken first.
    """

    def __init__(self, instance: Instance, rng: Random) -> None:
        self.instance, self.rng, self.block = instance, rng, instance.prefix_block_tokens
        self.sequences = sequences_of(instance)
        self.free = list(range(instance.kv_capacity // self.block))
        self.users = [0] * len(self.free)
        self.content: list[tuple | None] = [None] * len(self.free)
        self.cached: dict[tuple, list[int]] = defaultdict(list)
        n = instance.n
        self.table: list[list[int]] = [[] for _ in range(n)]
        self.computed, self.produced = [0] * n, [0] * n
        self.waiting, self.running = list(range(n)), list[int]()

    def _input(self, i: int) -> int:
        return int(self.instance.prompt_tokens[i]) + self.produced[i]

    def _allocate(self, i: int, tokens: int) -> None:
        """Take blocks for so many tokens of a request, and register those that they fill."""
        while len(self.table[i]) * self.block < tokens:
            block = self.free.pop(0)
            if self.content[block] is not None:
                self.cached[self.content[block]].remove(block)
                self.content[block] = None
            self.users[block] = 1
            self.table[i].append(block)
        for d in range(tokens // self.block):
            block = self.table[i][d]
            if self.content[block] is None:
                self.content[block] = tuple(self.sequences[i][: (d + 1) * self.block])
                self.cached[self.content[block]].append(block)

    def _release(self, i: int) -> None:
        for block in reversed(self.table[i]):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        self.table[i], self.computed[i] = [], 0

    def _lacks(self, tokens: int, there: int) -> int:
        return max(0, -(-tokens // self.block) - there)

    def step(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Schedule one batch; return its entries, who was preempted, and the claims."""
        budget, entries, gone, claims = self.rng.randint(4, 12), [], [], []
        k = 0
        while k < len(self.running):
            i = self.running[k]
            c = min(self._input(i) - self.computed[i], budget)
            if c == 0:
                break
            while i in self.running:
                if self._lacks(self.computed[i] + c, len(self.table[i])) <= len(self.free):
                    break
                victim = self.running.pop()
                self._release(victim)
                self.waiting.insert(0, victim)
                gone.append(victim)
            if i not in self.running:
                break
            self._allocate(i, self.computed[i] + c)
            entries.append((i, c))
            claims.append(0)
            budget -= c
            k += 1
        while self.waiting and budget and not gone:
            i, hits = self.waiting[0], list[int]()
            for d in range((self._input(i) - 1) // self.block):
                found = self.cached.get(tuple(self.sequences[i][: (d + 1) * self.block]))
                if not found:
                    break
                hits.append(found[0])
            c = min(self._input(i) - len(hits) * self.block, budget)
            idle = sum(self.users[block] == 0 for block in hits)
            end = len(hits) * self.block + c
            if self._lacks(end, len(hits)) > len(self.free) - idle:
                break
            self.waiting.pop(0)
            self.running.append(i)
            for block in hits:
                if self.users[block] == 0:
                    self.free.remove(block)
                self.users[block] += 1
            self.table[i], self.computed[i] = list(hits), len(hits) * self.block
            self._allocate(i, end)
            entries.append((i, c))
            claims.append(len(hits) * self.block)
            budget -= c
        for i, c in entries:
            self.computed[i] += c
            if self.computed[i] == self._input(i):
                self.produced[i] += 1
                if self.produced[i] == self.instance.output_tokens[i]:
                    self.running.remove(i)
                    self._release(i)
        return entries, gone, claims

    def run(self) -> Schedule:
        """Serve all requests."""
        rows, evict, reused = [], [], []
        while self.waiting or self.running:
            entries, gone, claims = self.step()
            rows.append(entries)
            evict.append(gone)
            reused.append(claims)
            assert entries
        return of_rows(self.instance, rows, evict, reused=reused)


def engine_instance(rng: Random) -> Instance:
    """Return an instance for the engine, whose KV is so tight that requests are preempted."""
    instance = sharing_instance(rng, most=6, time_unit="second", kv_accounting="cached")
    block = instance.prefix_block_tokens
    instance = replace(instance, kv_block_tokens=block)
    largest = -(-int(instance.peak_tokens.max()) // block) * block
    return replace(instance, kv_capacity=largest + block * rng.randint(0, 6))
