"""What a scheduler is run on, and the workers that run it in steps as requests are handed out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel
from optsched.costs.fleet import Fleet
from optsched.costs.machine import Link, Machine
from optsched.problem.budget import NO_LIMIT, Budget
from optsched.problem.errors import InputError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode, Schedule, from_batches
from optsched.problem.streams import Seed, stream


@dataclass(frozen=True, eq=False)
class Job:
    """What a scheduler is run on.

    Parameters
    ----------
    instance : Instance
        The instance as the scheduler sees it, with the predictions.
    problem : Instance
        The same requests without added predictions. The schedule is one of this instance.
    cost : CostModel
        It gives the time of every batch.
    seed : int or sequence of int
    name : str
        The scheduler's name in error messages.
    budget : Budget
        Once it is over, the run ends with an `OutOfTimeError`.
    fleet : Fleet, optional
        The machines of the workers. None: one, with the instance's capacity and limits and
        ``cost``.
    worker : int
        Which of several workers the job is of.
    """

    instance: Instance
    problem: Instance
    cost: CostModel
    seed: Seed = 0
    name: str = "policy"
    budget: Budget = NO_LIMIT
    fleet: Fleet | None = None
    worker: int = 0

    @property
    def workers(self) -> int:
        """The number of workers."""
        return 1 if self.fleet is None else len(self.fleet)

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """The machine of each worker. Empty: all have the instance's capacity and limits."""
        if self.fleet is None:
            return ()

        # Where all machines are as the instance says, one loop's workers need no jobs of their own.
        one, of_instance = self.fleet.machines[0], (self.instance.kv_capacity, self.instance.limits)
        same = self.fleet.equal and (one.kv_capacity, one.limits) == of_instance
        return () if same else tuple(self.fleet.machines)

    @property
    def pools(self) -> Fleet | None:
        """The fleet, if KV moves between its machines."""
        return None if self.fleet is None or self.fleet.link is None else self.fleet

    @property
    def sha256(self) -> str | None:
        """The digest of the cost models."""
        return self.cost.sha256 if self.fleet is None else self.fleet.sha256

    def coins(self, worker: int = 0) -> np.random.Generator:
        """Return what the scheduler draws from on one of its workers.

        Parameters
        ----------
        worker : int
        """
        return stream(self.seed, "policy", self.worker + worker)

    def on(self, worker: int) -> Job:
        """Return the job of one of the workers, whose machine is that of its instances.

        The requests of prefill machines end with their first token.

        Parameters
        ----------
        worker : int
        """
        if not self.machines:
            return replace(self, fleet=None, worker=worker)

        machine = self.machines[worker]
        of_machine = {"kv_capacity": machine.kv_capacity, "limits": machine.limits}
        try:
            instance = replace(self.instance, **of_machine)  # type: ignore[arg-type]
            problem = replace(self.problem, **of_machine)  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(f"machines: machine {worker}: {error}") from None

        if self.pools is not None and machine.role == "prefill":
            instance, problem = _first_tokens(instance), _first_tokens(problem)

        seen = replace(self, instance=instance, problem=problem, cost=machine.cost)
        return replace(seen, worker=worker, fleet=None)


def _first_tokens(instance: Instance) -> Instance:
    """Return an instance whose requests end with their first token."""
    ones = np.ones(instance.n, dtype=np.int64)
    names = ("predicted", "predicted_lower", "predicted_upper")
    known = {name: ones for name in names if getattr(instance, name) is not None}
    return replace(instance, output_tokens=ones, forecast=None, **known)  # type: ignore[arg-type]


class Part(NamedTuple):
    """What one worker ran, batch by batch.

    `entries` and `evicted_until` count up to each batch. `off_default`: some batch starts later
    than it can. `reused`: what each entry claims; None: nothing.
    """

    start: NDArray[np.float64]
    entries: NDArray[np.int64]
    request: NDArray[Any]
    tokens: NDArray[Any]
    evicted_until: NDArray[np.int64]
    evicted: NDArray[np.int64]
    off_default: bool
    reused: NDArray[Any] | None = None


class Event(NamedTuple):
    """What a simulation can stop at, since the first arrival: a request's last token, or that one
    whose KV is elsewhere has just been given room and `moves`."""

    request: int
    time: float
    moves: bool = False


class Workers:
    """Workers that run one scheduler each, in steps, while a router hands them requests.

    `finish` has each request's last token since the first arrival, infinite while it is unknown.
    """

    mode: EvictMode
    finish: NDArray[np.float64]

    def __init__(self, job: Job, count: int) -> None:
        self.job, self.count = job, count
        self._events: list[tuple[float, int, Event]] = []  # a heap of those that lie ahead
        self._count = 0  # events so far: of those at the same time, the first noted comes first
        self.kept = (0, 0)

    def keep(self, worker: int, request: int, sign: int, at: float) -> None:
        """Keep the room of a request that has finished here and moves elsewhere; -1: free it.

        `kept` is the KV and the number of such requests, of one worker.
        """
        instance = self.job.instance
        kv = int(instance.kv_of(instance.prompt_tokens[request]))
        self.kept = self.kept[0] + sign * kv, self.kept[1] + sign

    def receive(self, worker: int, request: int, at: float, link: Link, takes: float) -> None:
        """Hand over a request that is prefilled elsewhere, as `assign` does.

        When it has been given room, its KV comes within the time that it `takes`. If this is
        infinite, `land` says when it is there.
        """
        raise NotImplementedError

    def land(self, worker: int, request: int, at: float) -> None:
        """Say when the KV of a request that has room will be there."""
        raise NotImplementedError

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        """Hand a request to a worker. Requests come in the order of their releases.

        `at`: its release, since the first arrival; None: as the instance gives it. No worker has
        gone on to a batch that begins later than the last event or ``until`` of `advance`. Where an
        instance has sessions it is given for every request.
        """
        raise NotImplementedError

    def clock(self, worker: int) -> float:
        """Return when a worker decides next, or infinity if all of its requests are done.

        Times count from the first arrival.
        """
        raise NotImplementedError

    def step(self, worker: int, until: float, watch: bool) -> list[Event]:
        """Let a worker decide about all batches that begin before a time, or up to an event."""
        raise NotImplementedError

    def parts(self) -> list[Part]:
        """Return what each worker ran."""
        raise NotImplementedError

    def advance(self, until: float, watch: bool = False) -> Event | None:
        """Let workers decide about all batches that begin before a time, or up to an event.

        The next event is returned, after which no worker has decided about a later batch, or None.
        Watch in every call or in none.
        """
        if not watch:
            for worker in range(self.count):
                if self.clock(worker) < until:
                    self.step(worker, until, watch)

            return None

        blocked: set[int] = set()  # workers that cannot go on in this call
        while True:
            limit = min(until, self._events[0][0]) if self._events else until
            clocks = sorted((self.clock(w), w) for w in range(self.count) if w not in blocked)
            if not clocks or clocks[0][0] >= limit:
                break

            # The worker that is the furthest behind goes on up to the next one's clock. So batches
            # begin in the order of time, and no event comes after a batch that it might change.
            now, worker = clocks[0]
            ahead = min(limit, clocks[1][0]) if len(clocks) > 1 else limit
            # If the next one's clock is the same, it decides about this moment alone.
            for event in self.step(worker, max(ahead, math.nextafter(now, math.inf)), watch):
                self._count += 1
                heappush(self._events, (event.time, self._count, event))

            # It cannot go on before it is handed another request.
            if self.clock(worker) == now:
                blocked.add(worker)

        if self._events and self._events[0][0] <= until:
            return heappop(self._events)[-1]
        if math.isinf(until):
            # Nothing else can come, so blocked workers are stuck: their loops note it now.
            Workers.advance(self, until)

        return None

    def schedule(self) -> Schedule:
        """Return the schedule of all workers, which have run to the end."""
        return joined(self.job, self.mode, self.parts())


class MixedWorkers(Workers):
    """Workers on machines of their own, each of which runs by itself."""

    def __init__(self, job: Job, each: Sequence[Workers]) -> None:
        super().__init__(job, len(each))
        self.each, self.mode = each, each[0].mode
        self.finish = np.full(job.instance.n, np.inf)

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        """See `Workers.assign`."""
        self.each[worker].assign(0, request, at)

    def clock(self, worker: int) -> float:
        """See `Workers.clock`."""
        return self.each[worker].clock(0)

    def step(self, worker: int, until: float, watch: bool) -> list[Event]:
        """See `Workers.step`."""
        events = self.each[worker].step(0, until, watch)
        np.minimum(self.finish, self.each[worker].finish, out=self.finish)
        return events

    def keep(self, worker: int, request: int, sign: int, at: float) -> None:
        """See `Workers.keep`."""
        self.each[worker].keep(0, request, sign, at)

    def receive(self, worker: int, request: int, at: float, link: Link, takes: float) -> None:
        """See `Workers.receive`."""
        self.each[worker].receive(0, request, at, link, takes)

    def land(self, worker: int, request: int, at: float) -> None:
        """See `Workers.land`."""
        self.each[worker].land(0, request, at)

    def parts(self) -> list[Part]:
        """See `Workers.parts`."""
        return [part for one in self.each for part in one.parts()]


Place = Callable[[int, float], int]
"""``place(request, now) -> worker``, with the time since the first arrival."""


def hand_out(workers: Workers, job: Job, place: Place, *, in_steps: bool = True) -> Schedule:
    """Hand each request to a worker when it is released, run all to the end; return the schedule.

    Requests come in the order of (release, index), those with `after` once others have ended.

    Parameters
    ----------
    workers : Workers
    job : Job
    place : callable
        ``place(request, now) -> worker``. It is asked once for each request.
    in_steps : bool
        Whether `place` looks at what workers have done by now.
    """
    release, sessions = job.instance.given_release, job.instance.sessions
    known = np.flatnonzero(np.isfinite(release))
    # By release, ties by index. A sorted list is a heap, to which followers are added below.
    in_order = known[np.lexsort((known, release[known]))].tolist()
    coming = list(zip(release[in_order].tolist(), in_order, strict=True))
    if sessions is None:
        for now, i in coming:
            if in_steps:
                workers.advance(now)

            workers.assign(place(i, now), i)

        workers.advance(math.inf)
        return workers.schedule()

    missing = sessions.count.tolist()  # by request, its predecessors that have not ended
    while True:
        now = coming[0][0] if coming else math.inf
        event = workers.advance(now, watch=True)
        if event is not None:
            for k in sessions.followers(event.request):
                missing[k] -= 1
                if missing[k] == 0:  # the last of its predecessors has just ended
                    heappush(coming, (event.time + float(sessions.delay[k]), k))
        elif coming:
            _, i = heappop(coming)
            workers.assign(place(i, now), i, now)
        else:
            return workers.schedule()


def joined(job: Job, mode: EvictMode, parts: Sequence[Part]) -> Schedule:
    """Return the schedule of workers: their batches sorted by start, ties by worker.

    `mode`: what an eviction loses. `parts`: one for each worker, in their order.
    """
    problem = job.problem
    # Where some workers claim cached tokens, the others claim 0.
    claims = ["reused"] if any(part.reused is not None for part in parts) else []
    for k, part in enumerate(parts):
        if claims and part.reused is None:
            parts = [*parts[:k], part._replace(reused=0 * part.request), *parts[k + 1 :]]

    start = np.concatenate([part.start for part in parts])
    worker = np.repeat(np.arange(len(parts)), [len(part.start) for part in parts])
    order = np.argsort(start, kind="stable") if len(parts) > 1 else np.arange(len(start))

    def flat(ends: str, *columns: str) -> list[NDArray[Any]]:
        """Return the offsets of the sorted batches, and the columns in their order.

        `ends`: the column of a part that counts what the others hold up to each batch.
        """
        sizes = [np.diff(getattr(part, ends), prepend=0) for part in parts]
        size = np.concatenate(sizes)
        offsets = np.append(0, np.cumsum(size[order]))
        if len(parts) == 1:
            return [offsets, *(getattr(parts[0], name) for name in columns)]

        # Entries of a batch stay together: each moves with its batch.
        values = [np.concatenate([getattr(part, name) for part in parts]) for name in columns]
        first = (np.cumsum(size) - size)[order]
        entries = np.repeat(first - offsets[:-1], size[order]) + np.arange(offsets[-1])
        return [offsets, *(column[entries] for column in values)]

    offsets, request, tokens, *reused = flat("entries", "request", "tokens", *claims)
    evicted_offsets, evicted = flat("evicted_until", "evicted")
    # If every batch starts as early as it can, the starts follow from the rest and are left out.
    late = any(part.off_default for part in parts)
    return from_batches(
        offsets,
        request,
        tokens,
        instance=problem,
        evicted_offsets=evicted_offsets,
        evicted=evicted,
        start=None if not late else problem.at(start[order]) if problem.in_rounds else start[order],
        worker=worker[order] if len(parts) > 1 else None,
        reused=reused[0] if claims else None,
        evict_mode=mode,
        cost_model_sha256=job.sha256,
    )
