"""Pools: prefill machines hand requests over to decode machines, and both run one scheduler.

A prefill machine sees requests of one output token, and keeps their KV until it has moved. On its
decode machine a request waits, in the scheduler's order, until the scheduler would admit it: then
its KV comes, and once that is there it decodes. With `Routed.reserve` it waits there first, and is
prefilled once it has room. Mixed machines stand beside the prefill machines and serve requests
whole; where there are no decode machines they decode for the prefill machines, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from optsched.costs.fleet import Fleet
from optsched.costs.machine import Link
from optsched.policies.workers import Event, Job, MixedWorkers, Place, Workers, joined
from optsched.problem.errors import UsageError
from optsched.problem.schedule import Schedule

Placing = Callable[[Job, NDArray[np.float64], int], Place]
"""Makes a router's choice among so many workers, from when requests leave them."""


class PoolWorkers(MixedWorkers):
    """The workers of pools, which hand requests over to each other.

    ``place`` says where each request begins. `left_at`: when each has left the machine where it
    began, infinite while it is there.
    """

    def __init__(
        self,
        job: Job,
        pools: Fleet,
        each: Sequence[Workers],
        routers: tuple[Placing, Placing],
        reserve: bool,
    ) -> None:
        super().__init__(job, each)
        if job.instance.prefixes is not None:
            raise UsageError("pools: found an instance with shared prefixes; expected one without")

        self.link, self.reserve = pools.link or Link(), reserve
        # `prefill`: the numbers of the prefill machines.
        self.prefill, self.left_at = set(pools.having("prefill")), np.full(job.instance.n, np.inf)
        # Shorter prompts begin on decode machines, if there are some.
        below = pools.deflect_below if pools.having("decode") else 0
        self.deflected = job.instance.prompt_tokens < below
        self.one_token = job.instance.output_tokens == 1  # they end where they are prefilled
        decoding_workers = pools.having("decode") or pools.having("mixed")
        # A router counts the requests that have not left its machines: of the first machines by
        # `left_at`, of the second by `finish`.
        self.first_place = self._among(pools.having("prefill", "mixed"), routers[0], self.left_at)
        self.second_place = self._among(decoding_workers, routers[1], self.finish)
        # By request: its prefill machine, and the machine where it goes on, once that is chosen.
        self.prefill_worker: dict[int, int] = {}
        self.decode_worker: dict[int, int] = {}
        self.moves: list[tuple[float, int, int]] = []  # time, request, receiver
        self.move_ends: list[tuple[float, int]] = []  # of moves that go on: a heap

    def _among(self, workers: list[int], router: Placing, finish: NDArray[np.float64]) -> Place:
        """Return a router's choice among some of the workers. `finish`: see `Router.place_in`."""
        # A fleet of one role alone is refused, so the router is shown mixed machines.
        fleet = Fleet([replace(self.job.machines[w], role="mixed") for w in workers], self.link)
        # Both routers draw, each from the stream of its first worker.
        job = replace(self.job, fleet=fleet, worker=workers[0])
        place = router(job, finish, len(workers))
        return lambda request, now: workers[place(request, now)]

    def place(self, request: int, now: float) -> int:
        """Return the machine where a request begins."""
        place = self.second_place if self.deflected[request] else self.first_place
        return place(request, now)

    def step(self, worker: int, until: float, watch: bool) -> list[Event]:
        """See `Workers.step`."""
        events = self.each[worker].step(0, until, watch)
        for event in events:
            # The last token on a prefill machine is the first one, and most requests go on.
            if not event.moves:
                self.left_at[event.request] = min(self.left_at[event.request], event.time)
                if worker not in self.prefill or self.one_token[event.request]:
                    self.finish[event.request] = event.time

        return events

    def advance(self, until: float, watch: bool = False) -> Event | None:
        """See `Workers.advance`.

        Only last tokens are events. Prefills that end, KV that gets room and moves that end are
        dealt with here, in the order of time.
        """
        while True:
            end = self.move_ends[0][0] if self.move_ends else math.inf
            event = super().advance(min(until, end), watch=True)
            if event is None and (not self.move_ends or end > until):
                return None
            if event is None:  # nothing happens before the next move ends
                now, i = heappop(self.move_ends)
                # Its KV is gone from there: -1 frees the room that was kept for it.
                self.keep(self.prefill_worker[i], i, -1, now)
            elif event.moves:
                self.on_room(event.request, event.time)
            # Its prefill has ended, and its last token is still to come.
            elif event.time < self.finish[event.request]:
                self.hand_over(event.request, event.time)
            elif watch:
                return event

    def assign(self, worker: int, request: int, at: float | None = None) -> None:
        """See `Workers.assign`. With `reserve` a request first waits for room where it goes on."""
        now = float(self.job.instance.given_release[request]) if at is None else at
        if worker in self.prefill:
            self.prefill_worker[request] = worker
        # Its KV comes within an infinite time: `land` will say when.
        if worker in self.prefill and self.reserve and not self.one_token[request]:
            self.decode_worker[request] = self.second_place(request, now)
            self.receive(self.decode_worker[request], request, now, self.link, math.inf)
        else:
            super().assign(worker, request, now)

    def hand_over(self, i: int, now: float) -> None:
        """Hand a request over: its KV moves at once if it has room, or else waits for it."""
        self.keep(self.prefill_worker[i], i, 1, now)
        if self.reserve:
            self.land(self.decode_worker[i], i, self.move(i, now))
            return

        self.decode_worker[i] = self.second_place(i, now)
        self.receive(self.decode_worker[i], i, now, self.link, self.move_time(i))

    def on_room(self, i: int, now: float) -> None:
        """Let a request that has room be prefilled, or its KV come."""
        if self.reserve:
            super().assign(self.prefill_worker[i], i, now)
        else:
            self.move(i, now)

    def move_time(self, i: int) -> float:
        """Return how long the KV of a request moves."""
        return self.link.time(self.link.moved(int(self.job.instance.prompt_tokens[i])))

    def move(self, i: int, now: float) -> float:
        """Note a move, and return when it is over."""
        end = now + self.move_time(i)
        self.moves.append((now, i, self.decode_worker[i]))
        heappush(self.move_ends, (end, i))
        return end

    def schedule(self) -> Schedule:
        """See `Workers.schedule`. A move stands before all that begins with it."""
        if not self.moves:
            return super().schedule()

        # `off_default` makes `joined` state every start, since moves lie between starts.
        problem, parts = self.job.problem, [p._replace(off_default=True) for p in self.parts()]
        schedule = joined(self.job, self.mode, parts)

        # Times stand as in the schedule, so that moves and batches compare exactly.
        self.moves.sort(key=lambda move: move[0])
        now, moved, to = (np.array(column) for column in zip(*self.moves, strict=True))
        start = problem.at(now) if problem.in_rounds else problem.clock_origin + now
        assert schedule.start is not None
        moves_before = np.searchsorted(start, schedule.start, "right")
        return replace(
            schedule,
            moved_offsets=np.append(0, moves_before).astype(np.int64),
            moved=moved,
            moved_to=to,
            moved_start=start.astype(schedule.start.dtype),
        )
