"""`Trail` in plain Python: the twin of the compiled loop, asked batch by batch."""

from __future__ import annotations

import math

from optsched.policies.base import Batch, View
from optsched.policies.trail import Trail


class ReadableTrail:
    """Answers what a `Trail` decides."""

    evict_mode = "recompute"

    def __init__(self, policy: Trail) -> None:
        self.policy = policy

    def place(self, view: View, i: int) -> tuple[bool, float, float, int]:
        beyond = i in view.running and view.generated[i] >= math.floor(
            self.policy.c * view.predicted[i]
        )
        left = max(1.0, float(view.predicted[i] - view.generated[i]))
        if self.policy.refine:
            left = float(view.remaining[i])

        return not beyond, left, float(view.arrival[i]), i

    def batch(self, view: View) -> Batch:
        limits = view.limits
        own_batch = self.policy.max_batch_tokens or math.inf
        hard_batch = limits.max_batch_tokens or math.inf
        hard_prefill = limits.max_prefill_tokens or math.inf
        hard_running = limits.max_running or math.inf
        most_batch = min(own_batch, hard_batch)
        seats = min(self.policy.max_running or math.inf, hard_running)
        line = sorted([*view.running, *view.waiting], key=lambda i: self.place(view, i))
        head = line[0]

        room = min(hard_batch, hard_prefill)
        need: float = 0 if view.decoding[head] else view.rest(head)
        if view.chunked:
            need = min(need, 1)
        elif need > room:
            need = 0  # this head will never run

        alone = need > own_batch
        n_decoding = sum(bool(view.decoding[i]) for i in view.running)
        decodes = 0 if alone else min(n_decoding, most_batch - need)
        prefills = room if alone else min(most_batch - decodes, hard_prefill)

        if not view.hybrid and need > 0:
            decodes = 0
            prefills = room if alone else min(most_batch, hard_prefill)

        if not view.hybrid and need == 0:
            prefills = 0

        tokens: dict[int, int] = {}
        lost: list[int] = []
        used = holders = 0
        refused = False

        for i in line:
            fresh = i in view.waiting
            if fresh and refused:
                continue

            work: float = 0
            if view.decoding[i]:
                work = 1 if decodes >= 1 else 0
                kv = view.kv_of(int(view.cached[i] + work))
            else:
                if not alone or i == head:
                    rest = view.rest(i)
                    work = min(rest, prefills) if view.chunked or rest <= prefills else 0

                kv = view.kv_of(int(view.prompt_tokens[i] + view.generated[i]))

            if (fresh and work == 0) or holders + 1 > seats or used + kv > view.kv_capacity:
                refused = True
                if not fresh:
                    lost.append(i)

                continue

            holders += 1
            used += kv
            if work == 0:
                continue

            tokens[i] = int(work)
            if view.decoding[i]:
                decodes -= 1
            else:
                prefills -= work

        if not tokens:
            return Batch()

        evicted = []
        for i in lost:
            kv = view.held([i])
            if self.policy.keep and holders < hard_running and used + kv <= view.kv_capacity:
                holders += 1
                used += kv
            else:
                evicted.append(i)

        return Batch(tokens=tokens, evict=evicted)
