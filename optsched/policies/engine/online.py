"""Runs any object with ``batch(view)`` by asking it before every batch."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.costs.machine import Link
from optsched.policies.base import Batch, Policy, View
from optsched.policies.fleet import Event, Fleet, Job, MixedFleet, Part, Watch
from optsched.policies.runner import (
    MAX_STALLED_BATCHES,
    Runner,
    beyond_limits,
    endless,
)
from optsched.problem.errors import InputError, PolicyError, raised
from optsched.problem.schedule import EvictMode, read_start
from optsched.workloads.predict import estimates, forecast_of


class Online(Runner):
    """A runner that asks a policy object before every batch."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.hybrid = getattr(policy, "hybrid", False)  # type: ignore[misc]
        self.chunked = getattr(policy, "chunked", False)  # type: ignore[misc]

    def warm_up(self) -> None:
        """Do nothing, since a user's object may remember what it was shown."""

    def begin(self, job: Job, workers: int) -> Fleet:
        """See `Runner.begin`. Each of several workers asks a copy of the object.

        `Fleet.advance` raises a `PolicyError` for anything but a valid batch.
        """
        if workers == 1:
            return _Loop(self.policy, job, job.seed)

        seeds = [[job.seed, w] for w in range(workers)]
        return MixedFleet(job, [_Loop(deepcopy(self.policy), job, seed) for seed in seeds])


def evict_mode_of(policy: object, job: Job) -> EvictMode:
    """Return what an eviction loses under a policy, in the time unit of its instance."""
    mode: EvictMode = getattr(policy, "evict_mode", "recompute")
    if mode not in ("restart", "recompute"):
        raise InputError(
            f"policy {job.name!r}: evict_mode: found {mode!r}; expected restart or recompute"
        )

    return "restart" if job.instance.in_rounds else mode


class _Loop(Fleet):
    """A worker that asks a policy object: what the object is shown, and the schedule so far."""

    def __init__(self, policy: Policy, job: Job, seed: Any) -> None:
        super().__init__(job, 1)
        self.policy, self.mode = policy, evict_mode_of(policy, job)
        instance, n = job.instance, job.instance.n
        self.finish = np.full(n, np.inf)
        self.release = instance.given_release.copy()
        self.predicted, _ = estimates(instance)
        self.forecast = forecast_of(instance)
        self.watch, self.events = Watch.NONE, list[Event]()
        self.by_arrival: list[int] = []  # requests assigned so far
        self.place = np.zeros(n, dtype=np.int64)  # in the order of (release, index)
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.seen = np.zeros(n, dtype=np.int64)  # max tokens that each has ever produced
        self.generator = np.random.default_rng(seed)

        self.truth = {"prompt_tokens": instance.prompt_tokens, "predicted": self.predicted}
        if instance.predicted_lower is not None and instance.predicted_upper is not None:
            self.truth["predicted_lower"] = instance.predicted_lower
            self.truth["predicted_upper"] = instance.predicted_upper

        self.generated, self.cached = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.decoding, self.remaining = np.zeros(n, dtype=np.bool_), np.full(n, -1.0)
        self.shown: dict[str, NDArray[Any]] = {
            "arrival": np.full(n, -1.0),
            "remaining": self.remaining,
            "generated": self.generated,
            "cached": self.cached,
            "decoding": self.decoding,
            **{name: np.full(n, -1, dtype=np.int64) for name in self.truth},
        }
        self.public = {name: column.view() for name, column in self.shown.items()}
        for column in self.public.values():
            column.setflags(write=False)

        self.offsets, self.evicted_offsets = [0], [0]
        self.request: list[int] = []
        self.tokens: list[int] = []
        self.reused: list[int] = []
        self.evicted: list[int] = []
        self.start: list[float] = []
        self.now = self.end = 0.0
        self.done = self.arrived = self.since = 0
        self.off_default = False
        self.away: dict[int, float] = {}  # how long the KV of each takes to come
        self.ready: dict[int, float] = {}  # when it is there, of those that have room
        self.moved_at = np.full(n, np.inf)
        self.wake = 0.0

    def keep(self, worker: int, request: int, sign: int, at: float) -> None:
        super().keep(worker, request, sign, at)
        self.now = max(self.now, at)

    def receive(self, worker: int, request: int, at: float, link: Link, takes: float) -> None:
        prompt = int(self.job.instance.prompt_tokens[request])
        self.cached[request] = link.moved(prompt)
        self.generated[request] = int(link.moved(prompt) == prompt)
        self.away[request] = takes
        self.assign(worker, request, at)

    def land(self, worker: int, request: int, at: float) -> None:
        self.ready[request], self.wake = at, 0.0

    def come(self, batch: Batch) -> Batch:
        """Let KV come of requests that the policy admits, and leave those out that wait for it."""
        for i in self.away.keys() & batch.tokens.keys():
            self.ready[i] = self.now + self.away.pop(i)
            self.moved_at[i] = self.now
            self.waiting.remove(i)
            self.running.append(i)
            self.events.append(Event(i, Watch.MOVE, self.now))

        self.running.sort(key=self.place.__getitem__)
        tokens = {i: c for i, c in batch.tokens.items() if i not in self.ready}
        return replace(batch, tokens=tokens, evict=[i for i in batch.evict if i not in self.ready])

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        if at is not None:
            self.release[request] = at
            self.off_default = self.off_default or self.job.instance.after is None

        self.wake = min(self.wake, at or 0.0)
        self.place[request] = len(self.by_arrival)
        self.by_arrival.append(request)

    def clock(self, worker: int) -> float:
        return max(self.now, self.wake) if self.done < len(self.by_arrival) else math.inf

    def step(self, worker: int, until: float, watch: Watch) -> list[Event]:
        longest = int(self.job.instance.output_tokens.max())
        self.watch, self.events, self.wake = watch, [], 0.0
        while self.done < len(self.by_arrival) and self.now < until and not self.events:
            self.job.budget.check(f"policy {self.job.name!r} ran")
            self.arrive()
            for i in [i for i, at in self.ready.items() if at <= self.now]:
                del self.ready[i]
                self.decoding[i] = self.generated[i] > 0

            if not self.running and not self.waiting:
                self.now = float(self.release[self.by_arrival[self.arrived]])
                continue

            batch = self.ask()
            self.check(batch)
            if self.away or self.ready:
                batch = self.come(batch)

            self.evict(batch.evict)
            self.since += 1
            if self.since > MAX_STALLED_BATCHES + longest:
                self.stop((self.running or self.waiting)[0], "no request completed for too long")
            if batch.tokens:
                self.process(batch)
            elif batch.stall:
                sums = EMPTY
                for i in self.running:
                    sums = add_decode(sums, int(self.cached[i]))

                self.now += batch_time(self.job.cost.array, sums)
            elif batch.evict:
                continue  # asked again at once: what it evicted precedes its next batch
            elif (at := self.next()) < math.inf:
                if at >= until and at == min(self.ready.values(), default=math.inf):
                    self.wake = at  # a request may come before it
                    break

                self.now = max(self.now, at)
            elif until < math.inf or self.events:  # a request may change that
                break
            else:
                self.stuck()

        return self.events

    def next(self) -> float:
        """Return when the next request arrives, or KV that is on its way."""
        coming = self.by_arrival[self.arrived : self.arrived + 1]
        return min(
            [*(float(self.release[i]) for i in coming), *self.ready.values()], default=math.inf
        )

    def parts(self) -> list[Part]:
        def columns(*values: list[int]) -> list[NDArray[np.int64]]:
            return [np.array(one, dtype=np.int64) for one in values]

        entries = columns(self.offsets[1:], self.request, self.tokens)
        evictions = columns(self.evicted_offsets[1:], self.evicted)
        start = np.array(self.start, dtype=np.float64)
        reused = columns(self.reused)[0] if any(self.reused) else None
        return [Part(start, *entries, *evictions, self.off_default, reused)]  # type: ignore[call-arg, arg-type]

    def stuck(self) -> None:
        """Say why nothing runs: a request that no batch may hold whole, or the policy's choice."""
        about = (self.waiting or self.running)[0]
        reason = "the policy processes nothing, and no further request arrives"
        for i in [] if getattr(self.policy, "chunked", False) else self.waiting:
            size = int(self.job.instance.prompt_tokens[i] + self.generated[i])
            found = beyond_limits(self.job.problem, size)
            if found is not None:
                about, reason = i, found
                break

        self.stop(about, reason)

    def stop(self, request: int, reason: str) -> None:
        raise endless(self.job, request, len(self.offsets) - 1, self.now, reason)

    def arrive(self) -> None:
        while (
            self.arrived < len(self.by_arrival)
            and self.release[self.by_arrival[self.arrived]] <= self.now
        ):
            i = self.by_arrival[self.arrived]
            self.shown["arrival"][i] = self.release[i] + self.job.instance.first_arrival
            for name, column in self.truth.items():
                self.shown[name][i] = column[i]

            self.remaining[i] = self.forecast.left(i, 0, 0)
            self.waiting.append(i)
            self.arrived += 1

    def ask(self) -> Batch:
        instance, where = self.job.instance, self.where()
        view = View(
            now=instance.first_arrival + self.now,
            waiting=list(self.waiting),
            running=list(self.running),
            kv_capacity=instance.kv_capacity - self.kept[0],
            kv_offset=instance.kv_offset,
            kv_block_tokens=instance.kv_block_tokens,
            limits=instance.limits,
            hybrid=instance.hybrid_batching is not False,
            chunked=instance.chunked_prefill is not False,
            evict_mode=self.mode,
            generator=self.generator,
            cost=self.job.cost,
            **self.public,
        )
        try:
            answer = self.policy.batch(view)
        except PolicyError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{where}: raised {raised(error)}") from error

        if not isinstance(answer, Batch):
            raise PolicyError(f"{where}: found {answer!r}; expected a Batch")

        return answer

    def where(self) -> str:
        return f"policy {self.job.name!r}: batch {len(self.offsets) - 1}"

    def check(self, batch: Batch) -> None:
        """Refuse answers about requests that are not there. The judge checks all the rest."""
        here = set(self.running)
        for i in batch.evict:
            if i not in here:
                raise PolicyError(
                    f"{self.where()}: found an eviction of request {i!r}, which holds no KV; "
                    "expected a running request"
                )

            here.remove(i)

        here.update(self.waiting, self.running)
        for i, c in batch.tokens.items():
            if i not in here:
                raise PolicyError(
                    f"{self.where()}: found request {i!r}, which has not arrived, is done, or is "
                    "unknown; expected a waiting or running request"
                )

            if isinstance(c, bool) or not isinstance(c, (int, np.integer)) or c < 1:
                raise PolicyError(
                    f"{self.where()}: request {i}: found {c!r} tokens; expected an integer >= 1"
                )

        free = {*self.waiting, *batch.evict} if self.job.problem.prefixes is not None else set()
        for i, r in batch.reused.items():
            if i not in batch.tokens or i not in free:
                raise PolicyError(
                    f"{self.where()}: request {i!r}: found a claim of {r!r} cached tokens; "
                    "expected one of a request in the batch that holds no KV and may share prefixes"
                )

    def evict(self, requests: Sequence[int]) -> None:
        for i in requests:
            self.running.remove(i)
            self.waiting.append(i)
            self.evicted.append(i)
            self.cached[i] = 0
            self.decoding[i] = False

            if self.mode == "restart":
                self.generated[i] = 0
                self.remaining[i] = self.forecast.left(i, self.seen[i], 0)

    def process(self, batch: Batch) -> None:
        origin = self.job.instance.clock_origin
        default = max(self.end, max(self.release[i] for i in batch.tokens))
        written = origin + self.now
        self.now = read_start(written, default, origin)
        self.off_default = self.off_default or self.now != default
        sums = EMPTY

        for i, r in batch.reused.items():
            if r != 0:
                self.waiting.remove(i)
                self.running.append(i)
                self.cached[i] = r

        for i, c in batch.tokens.items():
            m = int(self.cached[i])
            sums = add_decode(sums, m) if self.decoding[i] else add_prefill(sums, int(c), m)

        self.start.append(written)
        self.request.extend(batch.tokens.keys())
        self.tokens.extend(batch.tokens.values())
        self.reused.extend(batch.reused.get(i, 0) for i in batch.tokens)
        self.offsets.append(len(self.request))
        self.evicted_offsets.append(len(self.evicted))
        self.end = self.now = self.now + batch_time(self.job.cost.array, sums)

        for i, c in batch.tokens.items():
            if self.cached[i] == 0:
                self.waiting.remove(i)
                self.running.append(i)

            self.cached[i] += c
            if self.cached[i] == self.job.instance.prompt_tokens[i] + self.generated[i]:
                self.produce(i)

        self.running.sort(key=self.place.__getitem__)

    def produce(self, i: int) -> None:
        self.decoding[i] = True
        self.generated[i] += 1
        if self.generated[i] == 1:
            self.note(i, Watch.FIRST_TOKEN)
        if self.generated[i] == self.job.instance.output_tokens[i]:
            self.note(i, Watch.FINISH)
            self.running.remove(i)
            self.finish[i] = self.now
            self.done += 1
            self.since = 0

            return

        self.seen[i] = max(self.seen[i], self.generated[i])
        self.remaining[i] = self.forecast.left(i, self.seen[i], self.generated[i])

    def note(self, i: int, kind: Watch) -> None:
        if self.watch & kind:
            self.events.append(Event(i, kind, self.now))
