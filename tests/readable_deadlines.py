"""The policy `edf-decode` in plain Python, one batch at a time, for comparison with the loop."""

from __future__ import annotations

import math

import numpy as np

from optsched import BatchCost, Instance
from optsched.costs.batch import EMPTY, Sums, add_decode, add_prefill, batch_time
from optsched.policies.base import Batch, View
from optsched.policies.edf_decode import EdfDecode
from optsched.policies.runner import own_work


class Readable:
    """It answers as `EdfDecode` decides. Predicted lengths are those of the view."""

    hybrid = True
    chunked = True

    def __init__(self, instance: Instance, cost: BatchCost, rules: EdfDecode) -> None:
        self.cost, self.rules, self.instance = cost.array, rules, instance
        prompt = instance.prompt_tokens
        self.whole = own_work(prompt, np.ones_like(prompt), cost)
        none = np.full(instance.n, np.inf)
        slo = {name: instance.slos.get(f"slo_{name}", none) for name in ("ttft", "tpot", "gap")}
        self.ttft, self.pace, self.gap = slo["ttft"].copy(), slo["tpot"], slo["gap"].copy()
        self.step = np.minimum(self.pace, self.gap)
        self.late: list[int] = []
        self.is_late: set[int] = set()
        self.queue: list[int] = []
        self.decoding: list[int] = []
        self.first_at: dict[int, float] = {}
        self.last_at: dict[int, float] = {}
        self.due: dict[int, float] = {}
        self.tokens = dict.fromkeys(range(instance.n), 0)

    def batch(self, view: View) -> Batch:
        self.view, self.now = view, view.now - self.instance.first_arrival
        self.note_what_happened()
        self.give_up()
        batch: dict[int, int] = {}
        for r in [i for i in self.decoding if i not in self.is_late]:
            alone = self.time(add_decode(EMPTY, int(view.cached[r])))
            if self.pace_left(r, 1.0) < min(0.5 * self.step[r], alone):
                self.lose(r)
                self.decoding.remove(r)
                self.decoding.append(r)

        if self.queue:
            slack = self.slack()
            ready, due = self.queue, not self.decoding or slack < self.rules.urgent
        else:
            ready, due = self.late, True

        if ready and due and self.spare() >= self.rules.lump:
            time = min(self.spare(), self.rules.piece)
            batch = self.decode(time) if self.rules.mixed and self.decoding else {}
            batch = self.prefill(ready, time, batch)
        if not batch and self.decoding:
            batch = self.decode()
        for ready in (self.queue, self.late):
            if not batch and ready:
                batch = self.prefill(ready, math.inf, {})

        return Batch(batch)

    def note_what_happened(self) -> None:
        view, end = self.view, self.now
        for i in [*self.queue, *self.late, *self.decoding]:
            made = i not in view.running and i not in view.waiting
            made = made or view.generated[i] > self.tokens[i]
            if not made:
                continue

            self.tokens[i] += 1
            before = self.last_at.get(i, math.inf)
            self.last_at[i] = end
            gone = i not in view.running
            if self.tokens[i] == 1:
                self.first_at[i] = end
            elif i not in self.is_late and end > before + self.gap[i] + 1e-9:
                self.lose(i)
                if i in self.decoding:
                    self.decoding.remove(i)
                    self.decoding.append(i)
            if i in self.decoding:
                if gone:
                    self.decoding.remove(i)
                elif self.tokens[i] >= view.predicted[i] and self.due[i] < math.inf:
                    self.due[i] = self.first_at[i] + self.pace[i] * self.tokens[i]
                continue

            (self.late if i in self.late else self.queue).remove(i)
            self.due[i] = math.inf
            if i not in self.is_late:
                self.due[i] = end + self.pace[i] * (view.predicted[i] - 1)
            if not gone:
                place = len(self.decoding)  # before all that are due later and stand at the end
                while place and self.due[self.decoding[place - 1]] > self.due[i]:
                    place -= 1

                self.decoding.insert(place, i)

        known = {*self.queue, *self.late, *self.decoding}
        for i in sorted(set(view.waiting) - known):
            self.queue.append(i)
            self.queue.sort(key=self.first_due)

    def lose(self, i: int) -> None:
        self.is_late.add(i)
        self.due[i] = self.gap[i] = math.inf

    def give_up(self) -> None:
        for i in list(self.queue):
            sums = add_prefill(EMPTY, self.view.rest(i), int(self.view.cached[i]))
            if self.now + self.time(sums) > self.first_due(i):
                self.lose(i)
                self.queue.remove(i)
                self.late.append(i)

    def slack(self) -> float:
        while True:
            clock, slack = self.now, math.inf
            for place, i in enumerate(self.queue):
                clock += self.work(i) * (1.0 + self.rules.load)
                slack = min(slack, self.first_due(i) - clock)
                if slack < 0 and self.rules.drop:
                    largest = max(self.queue[: place + 1], key=self.work)
                    self.lose(largest)
                    self.queue.remove(largest)
                    self.late.append(largest)
                    break
            else:
                return slack

    def spare(self) -> float:
        spare = math.inf
        for i in self.decoding:
            if self.due[i] < math.inf and self.step[i] < math.inf:
                sure, due = self.sure(i, self.rules.trust)
                spare = min(spare, due - self.now - sure * self.rules.floor * self.step[i])
            if self.gap[i] < math.inf:
                spare = min(spare, (self.last_at[i] + self.gap[i] - self.now) * self.rules.share)

        return spare

    def prefill(self, ready: list[int], time: float, batch: dict[int, int]) -> dict[int, int]:
        view, sums = self.view, EMPTY
        for i in batch:
            sums = add_decode(sums, int(view.cached[i]))
        for i in ready:
            due = math.inf if i in self.is_late else self.first_due(i)
            rest, inside = view.rest(i), min(time, due - self.now)
            tokens = rest
            while tokens and self.time(add_prefill(sums, tokens, int(view.cached[i]))) > inside:
                tokens -= 1

            if tokens < 1:
                break

            batch[i], sums = tokens, add_prefill(sums, tokens, int(view.cached[i]))
            time = inside if tokens == rest else time
            if tokens < rest:
                break

        return batch

    def decode(self, time: float | None = None) -> dict[int, int]:
        rules, sums, batch = self.rules, EMPTY, dict[int, int]()
        left = {i: self.pace_left(i, rules.trust) for i in self.decoding}
        timed = [i for i in self.decoding if left[i] < math.inf]
        if time is None:
            time = rules.share * min((left[i] for i in timed), default=math.inf)
            if timed:
                time = max(time, rules.smallest * min(self.step[i] for i in timed))

        behind = [i for i in timed if left[i] < rules.behind * self.step[i]]
        for i in [*behind, *(j for j in self.decoding if j not in behind)]:
            more = add_decode(sums, int(self.view.cached[i]))
            if batch and self.time(more) > time:
                break

            sums, batch[i] = more, 1

        return batch

    def sure(self, i: int, trust: float) -> tuple[float, float]:
        """Return the tokens that a request has left at least, and when the last of them is due."""
        left, due = float(max(1, self.view.predicted[i] - self.tokens[i])), self.due[i]
        if trust < 1 and self.pace[i] < math.inf:
            less = (1.0 - trust) * (left - 1.0)
            left, due = left - less, due - less * self.pace[i]

        return left, due

    def pace_left(self, i: int, trust: float) -> float:
        left, due = self.sure(i, trust)
        return min((due - self.now) / left, self.last_at[i] + self.gap[i] - self.now)

    def first_due(self, i: int) -> float:
        return float(self.instance.release[i] + self.ttft[i])

    def work(self, i: int) -> float:
        return float(self.whole[i]) * self.view.rest(i) / int(self.instance.prompt_tokens[i])

    def time(self, sums: Sums) -> float:
        return float(batch_time(self.cost, sums))
