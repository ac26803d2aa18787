"""Pools: prefill machines hand requests over to decode machines, and both run one scheduler.

A prefill machine sees requests of one output token, and keeps their KV until it has moved. On its
decode machine a request waits, in the scheduler's order, until the scheduler would admit it: then
its KV comes, and once that is there it decodes. With `Routed.reserve` it waits there first, and is
prefilled once it has room. Mixed machines stand beside the prefill machines and serve requests
whole; where there are no decode machines they decode for the prefill machines, too.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from optsched.costs.machine import Pools
from optsched.policies.fleet import Event, Fleet, Job, MixedFleet, Place, Watch
from optsched.policies.runner import Runner
from optsched.problem.errors import PolicyError, UsageError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule

Placing = Callable[[Job, NDArray[np.float64], int], Place]
"""Makes a router's choice among so many workers, from when requests leave them."""

WATCH = Watch.FINISH | Watch.MOVE


class PoolFleet(MixedFleet):
    """The workers of pools. `left`: when each request has left the machines where it began."""

    def __init__(self, job: Job, fleets: list[Fleet], prefill: set[int]) -> None:
        super().__init__(job, fleets)
        self.prefill, self.left = prefill, np.full(job.instance.n, np.inf)

    def step(self, worker: int, until: float, watch: Watch) -> list[Event]:
        """See `Fleet.step`."""
        events = self.fleets[worker].step(0, until, watch)
        for event in events:
            if event.kind is Watch.FINISH:
                self.left[event.request] = min(self.left[event.request], event.time)
                if worker not in self.prefill or self.ends(event.request):
                    self.finish[event.request] = event.time

        return events

    def ends(self, request: int) -> bool:
        """Whether a request has one token only, and ends where it is prefilled."""
        return bool(self.job.instance.output_tokens[request] == 1)


def run_pools(
    inner: Runner, job: Job, pools: Pools, places: tuple[Placing, Placing], reserve: bool
) -> Schedule:
    """Run a scheduler on the machines of pools; return the schedule with its moves."""
    if job.instance.prefixes is not None:
        raise UsageError("pools: found an instance with shared prefixes; expected one without")

    prefill, fleets = set(pools.workers("prefill")), []
    for w in range(len(pools.machines)):
        own = job.on(w)
        if w in prefill:
            told, problem = _first_tokens(own.instance), _first_tokens(own.problem)
            own = replace(own, instance=told, problem=problem)

        fleets.append(begin_alone(inner, own))

    hand = _Hand(job, pools, PoolFleet(job, fleets, prefill), places, reserve)
    return hand.run()


def begin_alone(inner: Runner, job: Job) -> Fleet:
    """Return one worker that runs a scheduler in steps; refuse those that cannot."""
    fleet = deepcopy(inner).begin(job, 1)
    if fleet is None:
        raise PolicyError(
            f"pools: found a scheduler that runs only whole instances, {job.name!r}; expected one "
            "that decides batch by batch"
        )

    return fleet


def _first_tokens(instance: Instance) -> Instance:
    """Return an instance whose requests end with their first token."""
    ones = np.ones(instance.n, dtype=np.int64)
    names = ("predicted", "predicted_lower", "predicted_upper")
    known = {name: ones for name in names if getattr(instance, name) is not None}
    return replace(instance, output_tokens=ones, forecast=None, **known)  # type: ignore[arg-type]


class _Hand:
    """What hands requests out, and over: where each is, and which moves are under way."""

    def __init__(
        self,
        job: Job,
        pools: Pools,
        fleet: PoolFleet,
        places: tuple[Placing, Placing],
        reserve: bool,
    ) -> None:
        self.job, self.fleet, self.link, self.reserve = job, fleet, pools.link, reserve
        self.first = pools.workers("prefill", "mixed")
        self.second = pools.workers("decode") or pools.workers("mixed")
        self.below = pools.deflect_below if pools.workers("decode") else 0
        self.begin = self._place(places[0], fleet.left, self.first)
        self.go_on = self._place(places[1], fleet.finish, self.second)
        self.at: dict[int, int] = {}  # the prefill machine of those that are to be handed over
        self.to: dict[int, int] = {}  # and their decode machine, once it is chosen
        self.moves: list[tuple[float, int, int]] = []
        self.ends: list[tuple[float, int]] = []  # of moves, a heap

    def _place(self, placing: Placing, finish: NDArray[np.float64], workers: list[int]) -> Place:
        machines = tuple(self.job.machines[w] for w in workers)
        place = placing(replace(self.job, machines=machines), finish, len(workers))
        return lambda request, now: workers[place(request, now)]

    def run(self) -> Schedule:
        """Run all to the end."""
        instance, fleet = self.job.instance, self.fleet
        release, sessions = instance.given_release, instance.sessions
        coming = [(float(release[i]), int(i)) for i in np.flatnonzero(np.isfinite(release))]
        coming.sort()
        missing = [] if sessions is None else sessions.count.tolist()
        while True:
            until = min((line[0][0] for line in (coming, self.ends) if line), default=math.inf)
            event = fleet.advance(until, WATCH)
            if event is None and self.ends and self.ends[0][0] == until:
                now, i = heappop(self.ends)
                fleet.keep(self.at[i], i, -1, now)
            elif event is None and coming:
                now, i = heappop(coming)
                self.arrive(i, now)
            elif event is None:
                return self.schedule()
            elif event.kind is Watch.MOVE:
                self.admitted(event.request, event.time)
            elif event.time < fleet.finish[event.request]:
                self.prefilled(event.request, event.time)
            elif sessions is not None:
                for k in sessions.followers(event.request):
                    missing[k] -= 1
                    if missing[k] == 0:
                        heappush(coming, (event.time + float(sessions.delay[k]), k))

    def arrive(self, i: int, now: float) -> None:
        """Hand a request out: deflected, or where it is served whole, or to be handed over."""
        fleet = self.fleet
        if self.job.instance.prompt_tokens[i] < self.below:
            fleet.assign(self.go_on(i, now), i, now)
            return

        w = self.begin(i, now)
        if w in fleet.prefill:
            self.at[i] = w
        if w in fleet.prefill and self.reserve and not fleet.ends(i):
            self.to[i] = self.go_on(i, now)
            fleet.receive(self.to[i], i, now, self.link, math.inf)
        else:
            fleet.assign(w, i, now)

    def prefilled(self, i: int, now: float) -> None:
        """Hand a request over: its KV moves at once if it has room, or else waits for it."""
        self.fleet.keep(self.at[i], i, 1, now)
        if self.reserve:
            self.fleet.land(self.to[i], i, self.move(i, now))
            return

        self.to[i] = self.go_on(i, now)
        self.fleet.receive(self.to[i], i, now, self.link, self.takes(i))

    def admitted(self, i: int, now: float) -> None:
        """Let a request that has room be prefilled, or its KV come."""
        if self.reserve:
            self.fleet.assign(self.at[i], i, now)
        else:
            self.move(i, now)

    def takes(self, i: int) -> float:
        """Return how long the KV of a request moves."""
        return self.link.time(self.link.moved(int(self.job.instance.prompt_tokens[i])))

    def move(self, i: int, now: float) -> float:
        """Note a move, and return when it is over."""
        end = now + self.takes(i)
        self.moves.append((now, i, self.to[i]))
        heappush(self.ends, (end, i))
        return end

    def schedule(self) -> Schedule:
        """Return the schedule of all workers. A move stands before all that begins with it."""
        problem, schedule = self.job.problem, self.fleet.schedule()
        if not self.moves:
            return schedule

        self.moves.sort(key=lambda move: move[0])
        now, moved, to = (np.array(column) for column in zip(*self.moves, strict=True))
        start = problem.at(now) if problem.in_rounds else problem.clock_origin + now
        assert schedule.start is not None
        before = np.searchsorted(start, schedule.start, "right")
        return replace(
            schedule,
            moved_offsets=np.append(0, before).astype(np.int64),
            moved=moved,
            moved_to=to,
            moved_start=start.astype(schedule.start.dtype),
        )
