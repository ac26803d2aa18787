"""Several workers behind a router that sends every request to one of them as it arrives.

Any policy takes ``router=NAME`` in its specification::

    vllm:router=least-requests

Each worker is a machine of the problem's fleet, and runs the policy by itself. A request stays on
its worker. Routers that weigh work do so with the cost model of the worker's machine.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from optsched.costs.fleet import Fleet
from optsched.policies.base import Job, Runner, Workers, own_work
from optsched.policies.pools import PoolWorkers
from optsched.policies.workers import MixedWorkers, Part, Place, hand_out
from optsched.problem.errors import InputError, PolicyError, UsageError, named
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, check_columns
from optsched.problem.streams import stream
from optsched.workloads.predict import estimates

DEFAULT = "least-requests"
"""The router where workers are given without one."""


@dataclass(frozen=True)
class Router:
    """How a request is sent to a worker: by turn, by the key of its id, or by load.

    The key is the id up to the first ``/``. A worker's `load` counts its unfinished requests, or
    sums their prompt tokens or predicted `own_work`. Ties: the lowest number. With `choices`, so
    many workers are drawn at random. `affinity`: how many units of load one token is worth that
    the request can find on a worker where a call of its session ran that it comes after, or without
    sessions the request whose prefix it shares.
    """

    name: str
    summary: str
    load: Literal["turn", "key", "requests", "tokens", "work"]
    choices: int | None = None
    affinity: float = 0.0

    @property
    def fixed(self) -> bool:
        """Whether the choice does not depend on what the workers have done."""
        return self.load in ("turn", "key")

    def weights(self, job: Job) -> NDArray[np.float64]:
        """Return what each request adds to the load of its worker while it is unfinished.

        There is a row for each machine, or one for all.
        """
        instance = job.instance
        if self.load == "tokens":
            return instance.prompt_tokens[None].astype(np.float64)
        if self.load != "work":
            return np.ones((1, instance.n))
        if not instance.has_predictions:
            raise InputError(
                f"router {self.name!r}: found no predictions of output lengths; expected an "
                "instance with them, or a predictor, such as predictor=oracle"
            )

        costs = [machine.cost for machine in job.machines] or [job.cost]
        predicted = estimates(instance)[0]
        return np.stack([own_work(instance.prompt_tokens, predicted, cost) for cost in costs])

    def reusable(self, instance: Instance) -> Callable[[int], list[tuple[int, float]]] | None:
        """Return a function from a request to those whose KV it can use, with the worth of each.

        None: it has none, or that does not matter. The worth is in units of load.
        """
        after, sizes = instance.after, instance.prompt_tokens + instance.output_tokens
        shared, finite = instance.prefixes, np.isfinite(self.affinity)
        # An infinite affinity is for sessions alone: with prefixes one worker would get them all.
        if self.affinity and after is None and shared is not None and finite:
            # At most one request: the parent, whose first blocks it shares; none if it is -1.
            worth = self.affinity * shared.block * shared.first
            return lambda i: [(int(shared.parent[i]), float(worth[i]))] * int(shared.parent[i] >= 0)
        if not self.affinity or after is None:
            return None

        def from_session(i: int) -> list[tuple[int, float]]:
            """Return the requests that request i comes after, of whose KV it uses its prompt."""
            tokens = np.minimum(sizes[list(after[i])], instance.prompt_tokens[i])
            return list(zip(after[i], (self.affinity * tokens).tolist(), strict=True))

        return from_session

    def by_turn(self, instance: Instance, workers: int) -> Place:
        """Return a function that chooses the worker of a request, where the choice is `fixed`."""
        if self.load == "turn":
            turns = count()
            return lambda request, now: next(turns) % workers

        names: Any = instance.id
        if names is None and instance.sessions is not None:
            names = instance.sessions.session
        if names is None:
            raise InputError(
                f"router {self.name!r}: requests.id: found nothing, and no sessions; expected ids, "
                "of which those that agree up to the first '/' go to one worker"
            )

        # Unlike `hash`, this is the same in every run of Python.
        homes = [crc32(str(i).partition("/")[0].encode()) % workers for i in names]
        return lambda request, now: homes[request]

    def place_in(self, job: Job, finish: NDArray[np.float64], workers: int) -> Place:
        """Return a function that sends each request to a worker: by turn, key or least load.

        `finish`: when each request has left the workers, infinite while it is unknown. The workers'
        simulation writes it as it goes on, and the function reads it at each arrival.
        """
        if self.fixed:
            return self.by_turn(job.instance, workers)

        weights, choices = self.weights(job), self.choices
        generator = stream(job.seed, "router", job.worker)
        # The first `count` entries are the requests that were unfinished at the last arrival.
        earlier = np.empty(job.instance.n, dtype=np.int64)
        worker_of = np.zeros(job.instance.n, dtype=np.int64)
        reusable = self.reusable(job.instance)
        count = 0

        def place(i: int, now: float) -> int:
            """Return the worker with the least load, less what the request can find there."""
            nonlocal count
            # Forget the requests that have left since the last arrival, in the same array.
            unfinished = earlier[:count]
            unfinished = unfinished[finish[unfinished] > now]
            count = len(unfinished)
            earlier[:count] = unfinished
            # A weight's row is that of the worker's machine, or 0 where one row stands for all.
            load_of_each = weights[worker_of[unfinished] % len(weights), unfinished]
            loads = np.bincount(worker_of[unfinished], load_of_each, workers).astype(np.float64)
            # Of the requests on a worker whose KV it can use, the one of the largest worth counts.
            if reusable is not None:
                gains = np.zeros(workers)
                for j, tokens in reusable(i):
                    gains[worker_of[j]] = max(gains[worker_of[j]], tokens)

                loads = loads - gains

            # `argmin` takes the first of equals, which is the lowest number.
            if choices is None or choices >= workers:
                chosen = int(loads.argmin())
            else:
                candidates = np.sort(generator.choice(workers, choices, replace=False))
                chosen = int(candidates[loads[candidates].argmin()])

            worker_of[i] = chosen
            earlier[count] = i
            count += 1
            return chosen

        return place


ROUTERS: dict[str, Router] = {
    router.name: router
    for router in (
        Router("least-requests", "to the worker with the fewest unfinished requests", "requests"),
        Router("least-tokens", "to the worker with the fewest unfinished prompt tokens", "tokens"),
        Router("least-work", "to the worker with the least unfinished predicted work", "work"),
        Router("session", "where the call before ran, else least-tokens", "tokens", None, np.inf),
        Router("affinity", "least-tokens, less what it can find in a cache", "tokens", None, 1.0),
        Router("power-of-two", "fewest unfinished requests of two random workers", "requests", 2),
        Router("round-robin", "to the workers in turn", "turn"),
        Router(
            "sticky", "requests of one key (id up to the first /), or session, to one worker", "key"
        ),
    )
}
"""Every router by name."""


class Routed(Runner):
    """The workers of a fleet behind a router, each of which runs one scheduler.

    With one worker, schedules are those of the scheduler itself. In pools, `decode_router` sends
    prefilled requests to decode machines; without it `router` does. With `reserve` a request is
    prefilled only once it has room on its decode machine.
    """

    def __init__(
        self,
        inner: Runner,
        router: str = DEFAULT,
        decode_router: str | None = None,
        reserve: bool = False,
    ) -> None:
        self.inner, self.reserve = inner, reserve
        self.router = named("router", router, ROUTERS)
        self.decode_router = named("router", decode_router or router, ROUTERS)
        self.hybrid, self.chunked = inner.hybrid, inner.chunked  # type: ignore[misc]

    def run(self, job: Job) -> Schedule:
        """See `Runner.run`. Routers see which requests have finished when one arrives."""
        if job.pools is not None and job.pools.having("prefill", "decode"):
            return self._in_pools(job, job.pools)
        if job.workers == 1 and not job.machines:
            return self.inner.run(job)

        begun = begin_on(self.inner, job)
        if begun is None:
            # Pools are one of several things that a comparison runs on.
            raise (UsageError if job.pools is None else PolicyError)(
                f"router {self.router.name!r}: found a scheduler that runs only whole instances, "
                f"{job.name!r}; expected one worker, or `Runner.begin`"
            )

        place = self.router.place_in(job, begun.finish, job.workers)
        return hand_out(begun, job, place, in_steps=not self.router.fixed)

    def _in_pools(self, job: Job, pools: Fleet) -> Schedule:
        """Run the scheduler on prefill and decode machines, see `optsched.policies.pools`."""
        begun = begin_on(self.inner, job)
        if not isinstance(begun, MixedWorkers) or not self.inner.moves:
            raise PolicyError(
                f"pools: found a scheduler that runs whole windows or instances, {job.name!r}; "
                "expected one that decides batch by batch"
            )

        routers = self.router.place_in, self.decode_router.place_in
        workers = PoolWorkers(job, pools, begun.each, routers, self.reserve)
        return hand_out(workers, job, workers.place)

    def warm_up(self) -> None:
        """See `Runner.warm_up`."""
        self.inner.warm_up()

    def uses_lengths(self, instance: Instance) -> bool | None:
        """See `Runner.uses_lengths`."""
        return self.router.load == "work" or self.inner.uses_lengths(instance)

    def allows(self, instance: Instance) -> str | None:
        """See `Runner.allows`."""
        return self.inner.allows(instance)

    def switched_off(self, instance: Instance) -> tuple[str, ...]:
        """See `Runner.switched_off`."""
        return self.inner.switched_off(instance)


def begin_on(inner: Runner, job: Job) -> Workers | None:
    """Return workers that run a scheduler in steps, on the job's machines.

    None if the scheduler runs only whole instances.
    """
    if not job.machines:  # all are like the instance's
        return inner.begin(job, job.workers)

    each = [deepcopy(inner).begin(job.on(w), 1) for w in range(job.workers)]
    known = [one for one in each if one is not None]
    return MixedWorkers(job, known) if len(known) == job.workers else None


def part_of(schedule: Schedule, mine: NDArray[np.int64], job: Job) -> Part:
    """Return the schedule of some requests as a part of the schedule of all.

    `job` is about these requests alone, and `mine` has their numbers among all.
    """
    from optsched.judge.evaluate import evaluate_quietly
    from optsched.workloads.problem import Problem

    # A schedule may leave its starts out, so the judge says when its batches begin.
    model = None if job.problem.in_rounds else job.cost
    start = evaluate_quietly(Problem(job.problem, model), schedule).batch_start

    offsets, request, tokens, evicted_offsets, evicted = check_columns(schedule)
    entries = offsets[1:], mine[request], tokens
    evictions = evicted_offsets[1:], mine[evicted]
    late = schedule.start is not None  # stated, so that some may be later than they must be
    return Part(start.astype(np.float64), *entries, *evictions, late, schedule.reused)
