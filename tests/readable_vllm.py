"""The scheduler of vLLM's version 1 engine in plain Python, written from vLLM's code.

It asks for nothing but lists: ``running`` in the order of admission, ``waiting`` in line. The tests
hold the compiled loop against it, and `tests/real_vllm` holds the loop against vLLM itself.
"""

from __future__ import annotations

from collections import defaultdict

from slow_judge import sequences_of

from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.policies.base import Batch, View
from optsched.policies.runner import waiting_rank
from optsched.policies.vllm_v1 import VllmV1
from optsched.problem.instance import Instance
from optsched.workloads.predict import estimates

INFINITE = 10**9


class ReadableCache:
    """A pool of KV blocks. A block's name is all tokens up to its end, and a copy is a number."""

    def __init__(self, own: VllmV1, instance: Instance) -> None:
        self.own, self.instance = own, instance
        self.block = instance.prefixes.block
        self.merge = own.merge_blocks or own.eviction == "next-use"
        self.sequences = sequences_of(instance)
        self.copies = 0
        self.users: dict[int, int] = {}
        self.name: dict[int, tuple | None] = {}
        self.of: dict[tuple, list[int]] = defaultdict(list)  # copies by name, the oldest first
        self.idle: list[tuple] = []  # (what is taken first, turn, copy, since when)
        self.turns = 0
        self.table: dict[int, list[int]] = {}
        self.tokens: dict[int, int] = {}  # allocated to running requests
        self.finished: set[int] = set()
        order = sorted(range(instance.n), key=lambda i: (instance.release[i], i))
        self.rank = {i: k for k, i in enumerate(order)}

    def named(self, i: int, d: int) -> tuple:
        """Return the name of a request's block."""
        return tuple(self.sequences[i][: (d + 1) * self.block])

    def find(self, i: int, size: int) -> list[int]:
        """Return the copies that a request with an input of a size finds."""
        found: list[int] = []
        while (len(found) + 1) * self.block < size and self.of[self.named(i, len(found))]:
            found.append(self.of[self.named(i, len(found))][0])
        return found

    def held(self, view: View) -> int:
        """Return the KV of running requests: each copy once, and what is behind whole blocks."""
        rest = sum(view.kv_of(c) - c // self.block * self.block for c in self.tokens.values())
        return self.block * sum(users > 0 for users in self.users.values()) + rest

    def is_kept(self, since: float, now: float) -> bool:
        return since + self.own.ttl > now

    def extra(self, view: View, found: list[int], alone: bool) -> int:
        """Return what finding copies saves, and what is kept beside them."""
        used = sum(self.users[c] > 0 for c in found)
        kept = [c for _, _, c, since in self.idle if self.is_kept(since, view.now)]
        kept = [] if alone or self.own.eviction != "ttl" else [c for c in kept if c not in found]
        return self.block * (len(kept) - used)

    def take_away(self, copy: int) -> None:
        name = self.name.pop(copy)
        if name is not None:
            self.of[name].remove(copy)
        del self.users[copy]

    def use(self, copy: int) -> None:
        self.idle = [one for one in self.idle if one[2] != copy]
        self.users[copy] += 1

    def give(self, view: View, i: int, tokens: int) -> None:
        """Give a request room for more tokens, and name the blocks that they fill."""
        self.tokens[i] = self.tokens.get(i, 0) + tokens
        table = self.table.setdefault(i, [])
        new = self.tokens[i] // self.block - len(table)
        while self.held(view) + self.block * (new + len(self.idle)) > view.kv_capacity:
            if not self.idle:
                break
            self.idle.sort()
            self.take_away(self.idle.pop(0)[2])
        for d in range(len(table), len(table) + new):
            name = self.named(i, d)
            if self.merge and self.of[name]:
                self.use(self.of[name][0])
                table.append(self.of[name][0])
                continue
            self.copies += 1
            self.users[self.copies], self.name[self.copies] = 1, name
            self.of[name].append(self.copies)
            table.append(self.copies)

    def leave(self, i: int, size: int, computed: int, now: float) -> None:
        """Let a request use its blocks no more."""
        if size == len(self.sequences[i]):
            self.finished.add(i)
        for d in reversed(range(len(self.table[i]))):
            copy = self.table[i][d]
            self.users[copy] -= 1
            if self.users[copy]:
                continue
            name = self.name[copy]
            if d >= computed // self.block:
                self.of[name].remove(copy)
                self.name[copy] = name = None
            self.turns += 1
            key = self.key(i, name, d, size)
            self.idle.append((key, self.turns, copy, now))
        del self.table[i], self.tokens[i]

    def key(self, i: int, name: tuple | None, d: int, size: int) -> int:
        """Return when a copy is taken away, smallest first."""
        if self.own.eviction != "next-use":
            return 0
        if name is None:
            return -INFINITE
        users = [
            self.rank[j]
            for j in range(self.instance.n)
            if j not in self.finished and j != i
            if len(name) < self.instance.prompt_tokens[j] and self.named(j, d) == name
        ]
        if i not in self.finished:
            users.append(self.rank[i])
        return -min(users, default=INFINITE)


class ReadableVllm:
    """`VllmV1` as an object that is asked before every batch; for one run."""

    def __init__(self, policy: VllmV1, instance: Instance, cost) -> None:
        self.own, self.instance, self.cost = policy, instance, cost
        predicted = estimates(instance)[0]
        self.rank = waiting_rank(policy.priority, instance, predicted, cost).tolist()
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.known: set[int] = set()
        self.steps, self.bound = 0, False
        self.slots: dict[int, int] = {}  # room of running requests
        self.end, self.prefilled = 0.0, 0
        self.by_turn: list[int] = []  # requests in line, whatever they find
        self.begun: dict[int, int] = {}  # tokens that were prefilled before they began to wait
        caches = policy.prefix_caching and instance.prefixes is not None
        self.cache = ReadableCache(policy, instance) if caches else None

    def batch(self, view: View) -> Batch:
        """Return the next step."""
        own, limits = self.own, view.limits
        alive = {*view.running, *view.waiting}
        if not self.known & alive:
            self.steps = 0
        for i in self.running:
            if self.cache is not None and i not in alive:
                size = len(self.cache.sequences[i])
                self.cache.leave(i, size, size, self.end)
        self.running = [i for i in self.running if i in alive]
        for i in view.waiting:
            if i not in self.known:
                self.known.add(i)
                self.waiting.append(i)
                self.by_turn.append(i)
                self.begun[i] = self.prefilled
        threshold = own.long_prefill_token_threshold
        if not view.chunked or len(self.running) + len(self.waiting) == 1:
            threshold = 0
        self.budget = min(own.max_num_batched_tokens, limits.max_batch_tokens or INFINITE)
        self.threshold = threshold or INFINITE
        self.tokens: dict[int, int] = {}
        self.reused: dict[int, int] = {}
        self.lost: list[int] = []
        self.defer = (
            self.steps % own.prefill_schedule_interval != 0
            and not self.bound
            and any(view.decoding[i] for i in self.running)
        )
        self.steps += 1
        if self.cache is not None and own.policy not in ("fcfs", "priority"):
            self._sort(view)
        self._serve_running(view)
        if not self.lost:
            self._admit(view)
        self._note_end(view)
        for i, c in self.tokens.items():
            self.slots[i] = c + (int(view.cached[i]) if i in view.running else 0)
        return Batch(self.tokens, self.lost, reused=self.reused)

    def _sort(self, view: View) -> None:
        """Sort the line by what each request would find now, as SGLang does."""
        cache, keys, ahead = self.cache, {}, set()
        line = [i for i in self.by_turn if i in self.waiting]
        if len(line) > 128 and self.own.policy != "shortest-prefill-first":
            self.waiting = line
            return
        for i in line:
            size = int(view.prompt_tokens[i] + view.generated[i])
            found = len(cache.find(i, size)) * cache.block
            prompt = int(view.prompt_tokens[i])
            if self.own.policy == "lpm":
                key = -found
            elif self.own.policy == "shortest-prefill-first":
                key = size - found
            elif found >= prompt:
                key = -float("inf")
            else:
                key = -(self.prefilled - self.begun[i]) / (prompt - found)
            first = -(-32 // cache.block) * cache.block
            late = False
            if found <= 32 and size >= first:
                late = tuple(cache.sequences[i][:first]) in ahead
                ahead.add(tuple(cache.sequences[i][:first]))
            keys[i] = (late, key)
        self.waiting = sorted(line, key=keys.__getitem__)

    def _note_end(self, view: View) -> None:
        """Note when the batch ends."""
        sums = EMPTY
        for i, c in self.tokens.items():
            m = self.reused.get(i, 0) if i not in view.running else int(view.cached[i])
            prefills = i not in view.running or not view.decoding[i]
            sums = add_prefill(sums, c, m) if prefills else add_decode(sums, m)
            self.prefilled += c if prefills else 0
        self.end = view.now + (batch_time(self.cost.array, sums) if self.tokens else 0)

    def _share(self, view: View, i: int, size: int, decoding: bool) -> int:
        """Return what the step has for a request that needs ``size`` tokens."""
        decodes = [k for k in self.tokens if view.decoding[k]]
        prefills = [k for k in self.tokens if not view.decoding[k]]
        left = self.budget - sum(self.tokens.values())
        if not view.hybrid and (prefills if decoding else decodes):
            return 0
        if not decoding:
            most = view.limits.max_prefill_tokens or INFINITE
            left = min(left, most - sum(self.tokens[k] for k in prefills))
        want = min(size, self.threshold)
        if view.chunked or decoding:
            return max(0, min(want, left))
        if not self.tokens:  # alone
            hard = (view.limits.max_batch_tokens, view.limits.max_prefill_tokens)
            left = min(limit or INFINITE for limit in hard)
        return want if want <= left else 0

    def _held(self, view: View) -> int:
        """Return the KV allocated to running requests, with what the step adds."""
        if self.cache is not None:
            return self.cache.held(view)
        held = 0
        for i in self.running:
            cached = int(view.cached[i]) if i in view.running else 0
            # Room for drafts that were not accepted is kept until the next step.
            kept = self.slots[i] if i in view.running else 0
            held += view.kv_of(cached + self.tokens[i] if i in self.tokens else kept)
        return held

    def _fits(self, view: View, i: int, c: int) -> bool:
        """Return whether there is room for more tokens of a running request, which has them."""
        if self.cache is None:
            return self._held(view) <= view.kv_capacity
        more = view.kv_of(int(view.cached[i]) + c) - view.kv_of(int(view.cached[i]))
        return self._held(view) + more <= view.kv_capacity

    def _serve_running(self, view: View) -> None:
        for i in list(self.running):
            if i not in self.running:
                continue  # preempted before its turn
            if sum(self.tokens.values()) >= self.budget:
                return
            decoding = bool(view.decoding[i])
            rest = 1 + (self.instance.num_speculative_tokens or 0) if decoding else view.rest(i)
            c = self._share(view, i, rest, decoding)
            if c == 0 or (self.defer and not decoding):
                continue
            self.tokens[i] = c
            while not self._fits(view, i, c):
                if self.own.policy == "priority":
                    victim = max(self.running, key=self.rank.__getitem__)
                else:
                    victim = self.running[-1]
                if self.cache is not None:
                    size = int(view.prompt_tokens[victim] + view.generated[victim])
                    computed = int(view.cached[victim])
                    self.cache.leave(victim, size, computed, view.now)
                self.running.remove(victim)
                self.tokens.pop(victim, None)
                self.lost.append(victim)
                self.waiting.insert(0, victim)
                self.by_turn.remove(victim)
                self.by_turn.insert(0, victim)
                self.begun[victim] = self.prefilled
                if victim == i:
                    return
            if self.cache is not None:
                self.cache.give(view, i, c)

    def _admit(self, view: View) -> None:
        own = self.own
        seats = min(own.max_num_seqs, view.limits.max_running or INFINITE)
        blocks = view.kv_capacity // view.kv_block_tokens + 1
        while self.waiting and len(self.running) < seats:
            if own.policy == "priority":
                self.waiting.sort(key=self.rank.__getitem__)
            i = self.waiting[0]
            # The view may still count the KV of a request that was preempted a moment ago.
            size = int(view.prompt_tokens[i] + view.generated[i])
            found = [] if self.cache is None else self.cache.find(i, size)
            there = 0 if self.cache is None else len(found) * self.cache.block
            if (self.defer and size - there > 1) or sum(self.tokens.values()) >= self.budget:
                break
            c = self._share(view, i, size - there, False)
            needed = view.kv_of(size if own.scheduler_reserve_full_isl else there + c)
            if self.cache is not None:
                needed += self.cache.extra(view, found, not self.running)
            if self.running:
                needed += int(own.watermark * blocks) * view.kv_block_tokens
            if c == 0 or self._held(view) + needed > view.kv_capacity:
                break
            self.waiting.pop(0)
            self.running.append(i)
            self.tokens[i] = c
            if self.cache is not None:
                for copy in found:
                    self.cache.use(copy)
                self.cache.table[i], self.cache.tokens[i] = list(found), there
                self.cache.give(view, i, c)
                if there:
                    self.reused[i] = there
        if not self.defer:
            self.bound = bool(self.waiting)
