"""`Rules` in plain Python, as the papers write them: the twin of the compiled loop.

It was written by itself, and is slow and short. It is asked batch by batch, as any policy is, and
both must make the same schedules.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.policies.base import Batch, View
from optsched.policies.engine.prefills import EXACT
from optsched.policies.rules import Rules
from optsched.policies.runner import Order, latest_start, own_work, waiting_rank
from optsched.problem.instance import Instance
from optsched.workloads.predict import estimates

INFINITE = float("inf")


class Readable:
    """Answers batch by batch what the rules say.

    Parameters
    ----------
    rules : Rules
    instance : Instance
        For its time unit and switches, and the order of waiting requests.
    """

    def __init__(self, rules: Rules, instance: Instance) -> None:
        self.rules, self.evict_mode, self.hybrid, self.chunked = rules.on(instance)
        self.rank: NDArray[np.int64] | None = None  # known with the first view's cost model
        self.place: NDArray[np.int64] | None = None
        self.raised: dict[int, int] = {}  # estimates that have changed
        self.promoted: set[int] = set()
        self.turn = 0
        self.after: dict[int, int] = {}  # KV of the last batch's requests after it
        self.drawn: dict[int, tuple[float, float]] = {}  # places in a line with random ties
        self.first_at: dict[int, float] = {}  # times of first tokens
        self.finished: dict[int, int] = {}  # tokens of those that are no longer here
        self.here: set[int] = set()
        self.mates = self.rules.mates(instance)
        self.instance = instance
        self.predicted = estimates(instance, self.rules.lengths, self.rules.margin)[0]
        self.second = estimates(instance, "upper", self.rules.margin)[0]

    def estimate(self, view: View, i: int) -> int:
        """Return the predicted output tokens of a request."""
        return self.raised.get(i, int(self.predicted[i]))

    def batch(self, view: View) -> Batch:
        """Return the next batch (Kim et al. 2024 and Jaillet et al. 2025)."""
        rules = self.rules
        place = self._ranks(view)[1]
        running = sorted(view.running, key=place.__getitem__)
        waiting = list(view.waiting)
        evicted: list[int] = []
        for i in self.here.difference(running, waiting):
            self.finished[i] = int(self.instance.output_tokens[i])

        self.here = {*running, *waiting}
        generated = {i: int(view.generated[i]) for i in running + waiting}

        for i in running + waiting:
            if generated[i] == 0:
                self.first_at.pop(i, None)  # a restart has lost it
            else:
                self.first_at.setdefault(i, view.now - self.instance.first_arrival)

        for i in waiting:
            if rules.ties == "random" and i not in self.drawn:
                self._draw(view, i)

        allocated = {i: int(max(view.cached[i], self._input(view, i))) for i in running}
        if rules.promote:  # Chen, Ye and Zhou 2025, Algorithm 6
            for i in running:
                if generated[i] >= self.estimate(view, i) and i not in self.promoted:
                    self.promoted.add(i)
                    evicted.append(i)

            running = [i for i in running if i not in evicted]
            allocated = {i: allocated[i] for i in running}

        promoted = list(evicted)
        room = view.kv_capacity - (self._freed(view) if rules.make_room and waiting else 0)
        if (
            rules.overflow == "evict_shortest" and self._next(view, allocated) > room
        ):  # Chen, Ye and Zhou 2025, Algorithm 2
            line = [(self.estimate(view, i), view.generator.random(), i) for i in running]
            for estimate, _, i in sorted(line):
                needed = self._next(view, allocated)
                if needed <= room:
                    break
                if needed > view.kv_capacity or generated[i] >= estimate:
                    del allocated[i]
                    evicted.append(i)

            running = [i for i in running if i not in evicted]

        for i in evicted:
            if i in promoted:
                self.raised[i] = max(int(self.second[i]), generated[i] + 1)
            else:
                self.raised[i] = max(self.estimate(view, i), generated[i])

            if view.evict_mode == "restart":
                generated[i] = 0
            if i in promoted:
                self.turn += 1
                self.drawn[i] = (INFINITE, self.turn)
            elif rules.ties == "random":
                self._draw(view, i)

        waiting += evicted
        if rules.overflow == "clear" and self._next(view, allocated) > view.kv_capacity:
            cleared = [
                i for i in running if rules.beta >= 1 or view.generator.random() < rules.beta
            ]
            for i in cleared:
                if generated[i] >= self.estimate(view, i):
                    self.raised[i] = generated[i] + 1
                if view.evict_mode == "restart":
                    generated[i] = 0
                if rules.ties == "random":
                    self._draw(view, i)

            running = [i for i in running if i not in cleared]
            waiting += cleared
            evicted += cleared
            allocated = {i: allocated[i] for i in running}
            if self._next(view, allocated) > view.kv_capacity:
                return Batch(evict=evicted, stall=True)

        told: Any = (running, waiting, evicted, generated, allocated)
        if rules.paced and self._holds(view, running, waiting, generated, allocated):
            hold = rules.hold + EXACT
            ahead = {i for i in running if self._slack(view, i) > hold * self._pace(i)}
            held = {i for i in ahead if view.decoding[i]}
            batch = self._form(view, held, *map(copy, told))
            if batch.tokens:
                return batch

        return self._form(view, set(), *told)

    def _pace(self, i: int) -> float:
        limits = self.instance.slo_tpot
        return INFINITE if limits is None else float(limits[i])

    def _slack(self, view: View, i: int) -> float:
        """Return the time until the next token is due by the pace."""
        if not view.decoding[i] or self._pace(i) == INFINITE:
            return INFINITE

        due = self.first_at[i] + self._pace(i) * int(view.generated[i])
        return due - (view.now - self.instance.first_arrival)

    def _holds(
        self,
        view: View,
        running: list[int],
        waiting: list[int],
        generated: dict[int, int],
        allocated: dict[int, int],
    ) -> bool:
        """Return whether there are prefills for which those ahead of their pace should wait."""
        if any(not view.decoding[i] for i in running):
            return True

        line = self._line(view, waiting, generated)
        if not line or (self.rules.late_last and self._late(view, line[0], generated)):
            return False

        i = line[0]
        most = min(view.limits.max_running or INFINITE, self.rules.max_running or INFINITE)
        whole = int(view.prompt_tokens[i]) + generated[i]
        fits = self._fits(view, i, whole, running, allocated, generated)

        return len(running) + 1 <= most and fits

    def _late(self, view: View, i: int, generated: dict[int, int]) -> bool:
        now = view.now - self.instance.first_arrival
        return generated[i] == 0 and bool(now > latest_start(self.instance, view.cost)[i])

    def _resorted(self, view: View, line: list[int]) -> list[int]:
        """Return a line in the order that the rules have at this moment."""
        if self.rules.order in ("ratio", "response"):  # as one without sessions
            one = np.ones_like(self.predicted)
            work = own_work(self.instance.prompt_tokens, one, view.cost)
            now = view.now - self.instance.first_arrival
            since = self.instance.release - now
            return sorted(line, key=lambda i: since[i] / work[i])

        return line

    def _gathered(self, line: list[int], running: list[int]) -> list[int]:
        """Return those of a line of whose group enough wait, or all if nothing runs."""
        count = {i: sum(self.mates[k] == self.mates[i] for k in line) for i in line}
        return [i for i in line if count[i] >= self.rules.gather or not running]

    def _line(self, view: View, waiting: list[int], generated: dict[int, int]) -> list[int]:
        """Return the waiting requests in their order."""
        rules, rank = self.rules, self._ranks(view)[0]
        line = waiting if rules.requeue == "back" else sorted(waiting, key=rank.__getitem__)
        if rules.ties == "random":
            line = sorted(waiting, key=self.drawn.__getitem__)
        if rules.late_last:
            line = sorted(line, key=lambda i: self._late(view, i, generated))

        return self._resorted(view, line)

    def _within(self, view: View, tokens: dict[int, int], i: int, most: float, time: float) -> int:
        """Return how many more tokens of i's prefill leave a batch within a time."""
        sums = EMPTY
        for k, c in tokens.items():
            add = add_decode(sums, int(view.cached[k])) if view.decoding[k] else None
            sums = add_prefill(sums, c, int(view.cached[k])) if add is None else add

        cached = int(view.cached[i])
        return sum(
            batch_time(view.cost.array, add_prefill(sums, c, cached)) <= time
            for c in range(1, int(most) + 1)
        )

    def _form(
        self,
        view: View,
        held: set[int],
        running: list[int],
        waiting: list[int],
        evicted: list[int],
        generated: dict[int, int],
        allocated: dict[int, int],
    ) -> Batch:
        """Form the batch group by group, after the evictions that precede it."""
        rules, rank = self.rules, self._ranks(view)[0]
        lost: set[int] = set()  # evicted for want of KV: not in this batch
        tokens: dict[int, int] = {}
        decode: set[int] = set()
        prefill: set[int] = set()
        alone = False
        limits = view.limits
        own_batch = rules.max_batch_tokens or INFINITE
        if rules.cheap:
            own_batch = min(own_batch, view.cost.cheap_tokens or INFINITE)

        own_prefill = rules.max_prefill_tokens or INFINITE
        hard_batch = limits.max_batch_tokens or INFINITE
        hard_prefill = limits.max_prefill_tokens or INFINITE
        max_running = min(limits.max_running or INFINITE, rules.max_running or INFINITE)
        queue = self._gathered(self._line(view, waiting, generated), running)
        slacks = [self._slack(view, i) - (self._pace(i) if i in held else 0) for i in running]
        paces = [self._pace(i) for i in running if self._slack(view, i) < INFINITE]
        time_left = max(min(slacks, default=INFINITE), 0.5 * max(paces, default=0.0))

        for group in rules.groups:
            together = group == "all"
            candidates = list(queue if group == "waiting" else running)
            if together:
                candidates = sorted([*queue, *running], key=rank.__getitem__)

            gate = INFINITE
            if group == "prefill":
                candidates = self._prefills(view, queue, running)
                gate = self._gate(view, queue, running, lost, generated)
                told = (allocated, generated)
                if rules.patient and not self._enough(view, queue, running, lost, *told):
                    continue

            refused = False  # among all, a waiting request was: the running ones go on
            while candidates:
                i = candidates.pop(0)
                decoding = i in running and bool(view.decoding[i])
                fresh = i in waiting
                if alone or i in lost or i in held or (fresh and refused):
                    continue
                if (group == "running_decode" and not decoding) or (
                    group in ("running_prefill", "prefill") and decoding
                ):
                    continue

                if group == "prefill" and self._alone(view, i)[0] > gate:
                    break
                if not self.hybrid and (prefill if decoding else decode):
                    refused = refused or fresh
                    continue

                total = sum(tokens.values())
                if decoding:
                    if total + 1 > min(hard_batch, own_batch):
                        break

                    more = allocated[i] + 1
                    while self._used(view, {**allocated, i: more}) > view.kv_capacity:
                        others = [v for v in running if v != i and v not in tokens]
                        victim = others[-1] if others else i
                        running.remove(victim)
                        evicted.append(victim)
                        lost.add(victim)
                        del allocated[victim]
                        if victim == i:
                            break

                    if i not in running:
                        continue

                    allocated[i] += 1
                    tokens[i] = 1
                    decode.add(i)
                    continue

                whole = int(view.prompt_tokens[i]) + generated[i]
                rest = whole - (int(view.cached[i]) if i in running else 0)
                c: float = rest
                hard = min(hard_batch - total, hard_prefill - sum(tokens[k] for k in prefill))

                if self.chunked:
                    c = min(rest, own_batch - total, own_prefill - total, hard)
                    if rules.paced:
                        c = self._within(view, tokens, i, c, time_left)
                    if rules.piece < INFINITE:
                        time = rules.piece * self._decode_step(view)
                        c = max(min(c, 1), self._within(view, tokens, i, c, time))

                    fits = c >= 1
                else:
                    fits = c <= hard and (total == 0 or total + c <= min(own_batch, own_prefill))

                if fits and fresh:
                    joined = running + [k for k in tokens if k not in running]
                    fits = len(joined) + 1 <= max_running and self._fits(
                        view, i, whole, joined, allocated, generated
                    )

                if not fits:
                    if not together and not (group == "prefill" and fresh):
                        break

                    refused = refused or fresh
                    continue

                if fresh:
                    allocated[i] = whole

                tokens[i] = int(c)
                prefill.add(i)
                alone = total + c > min(own_batch, own_prefill)

        if tokens:
            self.after = {i: view.kv_of(int(view.prompt_tokens[i]) + generated[i]) for i in tokens}

        return Batch(tokens=tokens, evict=evicted)

    def _decode_step(self, view: View) -> float:
        """Return the time of a batch that decodes one short request."""
        return batch_time(view.cost.array, add_decode(EMPTY, 1))

    def _alone(self, view: View, i: int) -> tuple[float, float]:
        """Return the time of the rest of a prefill alone, and with the decodes to come."""
        rest = int(view.prompt_tokens[i] + view.generated[i]) - int(view.cached[i])
        alone = batch_time(view.cost.array, add_prefill(EMPTY, rest, int(view.cached[i])))
        if self.rules.order != "work":
            return alone, alone

        one = np.ones_like(self.predicted)
        both = [
            own_work(self.instance.prompt_tokens, length, view.cost)[i]
            for length in (self.predicted, one)
        ]
        return alone, alone + (both[0] - both[1])

    def _prefills(self, view: View, queue: list[int], running: list[int]) -> list[int]:
        """Return waiting requests, in their order, merged with prefills that have begun."""
        begun = [i for i in running if not view.decoding[i]]
        begun.sort(key=lambda i: self._alone(view, i)[1])
        line, rest = [], list(queue)
        while begun or rest:
            left = [self._alone(view, side[0])[1] if side else INFINITE for side in (begun, rest)]
            line.append((begun if left[0] <= left[1] else rest).pop(0))

        return line

    def _gate(
        self,
        view: View,
        queue: list[int],
        running: list[int],
        lost: set[int],
        generated: dict[int, int],
    ) -> float:
        """Return how many seconds of a prefill may run beside those that decode."""
        decoding = [i for i in running if view.decoding[i]]
        if not decoding or (self.rules.gate == INFINITE and not self.rules.patient):
            return INFINITE

        if self.rules.order == "work":
            left = sum(max(1, self.estimate(view, i) - generated[i]) for i in decoding)
            mean = left / len(decoding)
        else:
            seen = sum(self.finished.values()) + sum(generated[i] for i in running)
            mean = seen / max(1, len(self.finished))

        prefills = len(queue) + len(running) - len(decoding)
        time = self.rules.gate * self._decode_step(view) * mean
        time *= max(1, prefills / len(decoding))
        if not self.rules.patient or not self.finished:
            return time

        k, there = len(decoding), len(queue) + len(running) + len(lost)
        left = sorted(self.estimate(view, i) - generated[i] for i in decoding)
        left = [count for count in left if count > 0]  # nobody waits for those past predictions
        soonest = mean / k
        if self.rules.order == "work":
            soonest = min((count / m for m, count in enumerate(left, 1)), default=INFINITE)

        sums = EMPTY
        for i in decoding:
            sums = add_decode(sums, int(view.cached[i]))

        times, share = self._amplified(view, there)
        times = 1.0 - share + share * times
        return min(time, times * soonest * batch_time(view.cost.array, sums) * there / k)

    def _fixed(self, view: View) -> tuple[float, float]:
        """Return the time that a decode batch takes in any case, and what prefills add to one."""

        def time(decodes: int, prefills: int) -> float:
            sums = EMPTY
            for _ in range(decodes):
                sums = add_decode(sums, 1)
            for _ in range(prefills):
                sums = add_prefill(sums, 1, 0)
            return batch_time(view.cost.array, sums)

        return 2 * time(1, 0) - time(2, 0), 2 * time(1, 1) - time(1, 0) - time(1, 2)

    def _amplified(self, view: View, there: int) -> tuple[float, float]:
        """Return 1 / (1 - load), and the decodes' share of the work of those that have finished."""
        cost, fixed, prefill, decode = view.cost.array, self._fixed(view)[0], 0.0, 0.0
        for i, count in self.finished.items():
            prompt = int(self.instance.prompt_tokens[i])
            decode += (batch_time(cost, add_decode(EMPTY, prompt + count // 2)) - fixed) * (
                count - 1
            )
            prefill += batch_time(cost, add_prefill(EMPTY, prompt, 0)) - fixed

        work = prefill + decode
        if work <= 0:
            return 1.0, 0.0

        now, ended = view.now - self.instance.first_arrival, len(self.finished)
        load = min(0.85, work / ended * (ended + there) / now)
        return 1 / (1 - load), decode / work

    def _enough(
        self,
        view: View,
        queue: list[int],
        running: list[int],
        lost: set[int],
        allocated: dict[int, int],
        generated: dict[int, int],
    ) -> bool:
        """Return whether as many requests can be admitted as should be prefilled together."""
        runs, ended = [*running, *lost], len(self.finished)
        if not runs or not queue or not ended or not all(view.decoding[i] for i in runs):
            return True

        there = len(runs) + len(queue)
        now = view.now - self.instance.first_arrival
        delayed = self._amplified(view, there)[0] * there
        wanted = min(np.sqrt(2 * self._fixed(view)[1] * ended / now * delayed), 0.125 * len(runs))
        joined, allocated, count = list(running), dict(allocated), 0
        seats = min(view.limits.max_running or INFINITE, self.rules.max_running or INFINITE)
        for i in queue:
            whole = int(view.prompt_tokens[i]) + generated[i]
            fits = self._fits(view, i, whole, joined, allocated, generated)
            if count >= wanted or len(joined) + 1 > seats or not fits:
                break

            joined.append(i)
            allocated[i] = whole
            count += 1

        return bool(count >= wanted)

    def _freed(self, view: View) -> int:
        """Return the KV of the requests that the last batch completed."""
        here = {*view.running, *view.waiting}
        return sum(kv for i, kv in self.after.items() if i not in here)

    def _ranks(self, view: View) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.rank is None or self.place is None:
            own = self.rules.order
            shown: Order = "arrival" if own in ("ratio", "response") else own
            self.rank, self.place = (
                waiting_rank(order, self.instance, self.predicted, view.cost)
                for order in (shown, own if "all" in self.rules.groups else "arrival")
            )

        return self.rank, self.place

    def _draw(self, view: View, i: int) -> None:
        length = self.estimate(view, i) if self.rules.order == "output" else 0
        self.drawn[i] = (length, view.generator.random())

    def _input(self, view: View, i: int) -> int:
        return 0 if view.decoding[i] else int(view.prompt_tokens[i] + view.generated[i])

    def _used(self, view: View, allocated: dict[int, int]) -> int:
        return sum(view.kv_of(tokens) for tokens in allocated.values())

    def _next(self, view: View, allocated: dict[int, int]) -> int:
        """Return the KV held if all of these requests decode."""
        return sum(view.kv_of(tokens + 1) for tokens in allocated.values())

    def _fits(
        self,
        view: View,
        i: int,
        whole: int,
        joined: list[int],
        allocated: dict[int, int],
        generated: dict[int, int],
    ) -> bool:
        """Return whether a waiting request may join those running or just admitted."""
        capacity = view.kv_capacity
        used = self._used(view, {**allocated, i: whole})
        admission = self.rules.admission
        if used > capacity:
            return False
        if admission == "reserve":
            peaks = [view.prompt_tokens[k] + self.estimate(view, k) - 1 for k in [*joined, i]]
            return sum(view.kv_of(int(peak)) for peak in peaks) <= capacity

        hard_batch = view.limits.max_batch_tokens or INFINITE
        if admission == "protect":
            spare = used <= (1 - self.rules.alpha) * capacity
            alone = self.rules.overflow == "evict_latest" and not any(allocated.values())
            return (spare or alone) and len(joined) + 1 <= hard_batch
        if admission == "lookahead":  # Jaillet et al. 2025, inequality (5)
            left = {k: max(1, self.estimate(view, k) - generated[k]) for k in [*joined, i]}
            base = {k: int(view.prompt_tokens[k]) + generated[k] - 1 for k in left}
            return len(left) <= hard_batch and all(
                sum(view.kv_of(base[k] + at) for k in left if left[k] >= at) <= capacity
                for at in set(left.values())
            )

        return True
