"""The scheduler of vLLM's version 1 engine in plain Python, written from vLLM's code.

It asks for nothing but lists: ``running`` in the order of admission, ``waiting`` in line. The tests
hold the compiled loop against it, and `tests/real_vllm` holds the loop against vLLM itself.
"""

from __future__ import annotations

from optsched.policies.base import Batch, View
from optsched.policies.runner import waiting_rank
from optsched.policies.vllm_v1 import VllmV1
from optsched.problem.instance import Instance
from optsched.workloads.predict import estimates

INFINITE = 10**9


class ReadableVllm:
    """`VllmV1` as an object that is asked before every batch; for one run."""

    def __init__(self, policy: VllmV1, instance: Instance, cost) -> None:
        self.own, self.instance = policy, instance
        predicted = estimates(instance)[0]
        self.rank = waiting_rank(policy.priority, instance, predicted, cost).tolist()
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.known: set[int] = set()
        self.steps, self.bound = 0, False

    def batch(self, view: View) -> Batch:
        """Return the next step."""
        own, limits = self.own, view.limits
        alive = {*view.running, *view.waiting}
        if not self.known & alive:
            self.steps = 0
        self.running = [i for i in self.running if i in alive]
        for i in view.waiting:
            if i not in self.known:
                self.known.add(i)
                self.waiting.append(i)
        threshold = own.long_prefill_token_threshold
        if not view.chunked or len(self.running) + len(self.waiting) == 1:
            threshold = 0
        self.budget = min(own.max_num_batched_tokens, limits.max_batch_tokens or INFINITE)
        self.threshold = threshold or INFINITE
        self.tokens: dict[int, int] = {}
        self.lost: list[int] = []
        self.defer = (
            self.steps % own.prefill_schedule_interval != 0
            and not self.bound
            and any(view.decoding[i] for i in self.running)
        )
        self.steps += 1
        self._serve_running(view)
        if not self.lost:
            self._admit(view)
        return Batch(self.tokens, self.lost)

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
        cached = {i: 0 if i not in view.running else int(view.cached[i]) for i in self.running}
        return sum(view.kv_of(cached[i] + self.tokens.get(i, 0)) for i in self.running)

    def _serve_running(self, view: View) -> None:
        for i in list(self.running):
            if i not in self.running:
                continue  # preempted before its turn
            if sum(self.tokens.values()) >= self.budget:
                return
            decoding = bool(view.decoding[i])
            c = self._share(view, i, view.rest(i), decoding)
            if c == 0 or (self.defer and not decoding):
                continue
            self.tokens[i] = c
            while self._held(view) > view.kv_capacity:
                if self.own.policy == "priority":
                    victim = max(self.running, key=self.rank.__getitem__)
                else:
                    victim = self.running[-1]
                self.running.remove(victim)
                self.tokens.pop(victim, None)
                self.lost.append(victim)
                self.waiting.insert(0, victim)
                if victim == i:
                    return

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
            if (self.defer and size > 1) or sum(self.tokens.values()) >= self.budget:
                break
            c = self._share(view, i, size, False)
            needed = view.kv_of(size if own.scheduler_reserve_full_isl else c)
            if self.running:
                needed += int(own.watermark * blocks) * view.kv_block_tokens
            if c == 0 or self._held(view) + needed > view.kv_capacity:
                break
            self.waiting.pop(0)
            self.running.append(i)
            self.tokens[i] = c
        if not self.defer:
            self.bound = bool(self.waiting)
