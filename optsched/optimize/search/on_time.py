"""Search for schedules with many requests within their SLOs: whom to serve in time, whom to let go.

The compiled scheduler `paced` serves an instance with true lengths in a fraction of a second. Who
is *let go* waits until all others have their first tokens, and takes no time from them before. The
search decides who that is, by three kinds of steps.

*Ways.* The scheduler runs once in each of a few ways: by arrival or shortest prompt first, with
larger or smaller lumps of prefills, and with or without evictions.

*A machine without batches.* Work that can be interrupted at any time is served by earliest
deadlines: a prefill by the limit on the first token, the decodes by that on the last. If a deadline
is missed, the one with the most work is let go of those that must lie between the last idle moment,
or later deadline, and this one. With one release time and one job each that is the rule of Moore
and Hodgson. The fixed costs of batches are a factor of the work, of which a few are tried.

*One of each crowd.* As long as requests are late that were not let go, the largest one is let go of
each crowd, which is a stretch of time in which requests wait.

*Many small changes at once.* Requests that were let go are taken back, and others are let go, in
many places of the trace in one run. Those changes are kept around which no fewer are in time.

*Several workers.* A router sends those that are not let go to workers at first, by the work that
is left. The machine without batches is then as many times as fast. Later each request has a worker,
and the steps above are those of each worker. Who is let go belongs to no worker, and whoever is
taken back comes to any of them. So requests move from one worker to another.

Counts are the judge's.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.judge.evaluate import evaluate
from optsched.policies import make_policy
from optsched.policies.base import Job, Rules
from optsched.policies.routers import Routed, run_on
from optsched.policies.runner import own_work
from optsched.problem.budget import Budget
from optsched.problem.errors import LoopError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.metrics import served_well
from optsched.problem.schedule import Schedule, workers_of
from optsched.workloads.predict import predict
from optsched.workloads.problem import Problem

Flags = NDArray[np.bool_]

_LUMPS: Mapping[str, Any] = {"hold": 6.0, "catch_up": 0.8, "lump": 3.0, "admission": "reserve"}
_WAYS: tuple[Mapping[str, Any], ...] = (
    {"order": "arrival", **_LUMPS},
    {"order": "prompt", **_LUMPS},
    {"order": "prompt", "hold": 2.0, "admission": "reserve"},
    {"order": "arrival", "hold": 4.0},
    {"order": "prompt", "groups": ("waiting", "running"), "hybrid": False, "late_last": False},
)
# The max output tokens for a search.
_MAX_TOKENS = 10_000_000
# Who sends requests to workers at first.
_ROUTER = "least-work"
# The way for requests without a limit on the time per token: prefills first.
_WITHOUT_PACE = 4
# The factors of the work, the likeliest first.
_FACTORS = (1.15, 1.2, 1.1, 1.25)
# The share of decode work in the size of a request.
_DECODES = 0.3
# Who waits longer than this share of its limit on the first token belongs to a crowd.
_WAITED = 0.15
# Requests per place in which something is changed; every fourth place is changed in a run.
_PLACE = 40
# A kind of steps ends after so many runs in a row without an improvement.
_PATIENCE = 15
# Small changes do not begin if a larger share of the requests is missing.
_HOPELESS = 0.01


class Served(NamedTuple):
    """What a run of the scheduler gave.

    By request (shape (n,)): who is within all SLOs (`good`), seconds until the first batch
    (`waited`), who was let go (`gone`), and the worker (`home`).
    """

    schedule: Schedule
    good: Flags
    waited: Floats
    gone: Flags
    way: int
    home: Ints

    @property
    def total(self) -> int:
        """How many are within their SLOs."""
        return int(self.good.sum())


def quick_to_search(instance: Instance) -> bool:
    """Whether a candidate, which cannot be interrupted, takes some seconds at most."""
    return int(instance.output_tokens.sum()) <= _MAX_TOKENS


def serve_in_time(
    problem: Problem,
    budget: Budget,
    *,
    enough: int | None = None,
    seed: int = 0,
    start: Served | None = None,
    tell: Callable[[Served], object] | None = None,
) -> Served | None:
    """Return the schedule with the most requests within their SLOs that was found.

    The search ends when `enough` are in time, and has no small changes if far fewer are. `start` is
    what was found at another rate: who is let go at first, and who is where.
    """
    instance = problem.instance
    if not quick_to_search(instance):
        return None

    search = _Search(problem, seed, budget, tell)
    search.enough = instance.n if enough is None else enough
    nobody = np.zeros(instance.n, dtype=bool)

    for way in search.ways if start is None else [start.way]:
        search.serve(*((nobody, way) if start is None else (start.gone, way, start.home)))
        if search.over:
            return search.best

    best = search.best
    search.relax(dict.fromkeys((search.ways[0], search.ways[0] if best is None else best.way)))
    if search.best is not None:
        search.thin_out(search.best)
    if search.best is not None and (
        enough is None or search.best.total >= enough - _HOPELESS * instance.n
    ):
        search.change(search.best)

    return search.best


class _Search:
    """Runs of the scheduler on one instance, and the best of them."""

    def __init__(
        self, problem: Problem, seed: int, budget: Budget, tell: Callable[[Served], object] | None
    ) -> None:
        self.problem, self.budget, self.tell = problem, budget, tell
        instance, cost, workers = problem.instance, problem.cost_model, problem.workers
        self.instance, self.cost, self.workers = instance, cost, workers
        self.told = predict(instance, "oracle")
        self.limits = all_limits(self.told, None)
        first = np.minimum(self.limits["slo_ttft"], self.limits["slo_latency"])
        self.end = instance.release_times.max() + max(first[np.isfinite(first)], default=0.0)
        rules = make_policy("paced")[0]
        assert isinstance(rules, Rules)
        self.rules = rules
        pace = np.minimum(self.limits["slo_tpot"], self.limits["slo_gap"])
        ways = range(len(_WAYS))
        self.ways = [w for w in ways if w != _WITHOUT_PACE or not np.isfinite(pace).any()]
        self.generator = np.random.default_rng(seed)
        work = own_work(instance.prompt_tokens, instance.output_tokens, cost)
        prefill = own_work(instance.prompt_tokens, np.ones_like(instance.output_tokens), cost)
        self.prefill, self.decodes = prefill, work - prefill
        self.size = prefill + _DECODES * self.decodes
        self.order = np.argsort(instance.release, kind="stable")
        self.place = np.empty(instance.n, dtype=np.int64)
        self.place[self.order] = np.arange(instance.n) // (_PLACE * workers)
        self.best: Served | None = None
        self.enough = instance.n
        self.stale = 0

    @property
    def over(self) -> bool:
        """Whether the budget is spent, or enough are in time."""
        return self.budget.over or (self.best is not None and self.best.total >= self.enough)

    def serve(self, gone: Flags, way: int, home: Ints | None = None) -> Served | None:
        """Run the scheduler, and keep what is best. None if it finds no schedule."""
        told = self.told
        moved = replace(told, arrival=np.where(gone, self.end, told.release_times), known=None)
        rules = replace(self.rules, **_WAYS[way])

        try:
            job = Job(moved, self.instance, self.cost, 0, "paced", fleet=self.problem.hardware)
            schedule, home = self.run(job, rules, home)
        except LoopError:
            return None

        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            judged = evaluate(self.problem, schedule)

        good = served_well(judged)
        assert good is not None
        found = Served(schedule, good, np.asarray(judged.queuing_delay, float), gone, way, home)
        self.stale += 1

        if self.best is None or found.total > self.best.total:
            self.best, self.stale = found, 0
            if self.tell is not None:
                self.tell(found)

        return found

    def run(self, job: Job, rules: Rules, home: Ints | None) -> tuple[Schedule, Ints]:
        """Return a schedule, and the worker of each request in it."""
        if self.workers == 1:
            return rules.run(job), np.zeros(job.instance.n, dtype=np.int64)
        if home is not None:
            homes = home.tolist()
            return run_on(rules, job, lambda request, now: homes[request]), home

        schedule = Routed(rules, _ROUTER).run(job)
        return schedule, workers_of(schedule, job.instance.n)

    def relax(self, ways: Iterable[int]) -> None:
        """Let those go whom a machine without batches would, at a few factors of the work."""
        for factor in _FACTORS:
            gone = self.without_batches(factor)
            tried = [self.serve(gone, way) for way in ways if not self.over]
            found = [one for one in tried if one is not None]
            if not found:
                return

            ways = [max(found, key=lambda one: one.total).way]

    def without_batches(self, factor: float) -> Flags:
        """Return whom to let go so that all others are in time on a machine without batches."""
        from optsched.optimize.search.on_time_kernel import let_go

        told, limits = self.told, self.limits
        first = np.minimum(limits["slo_ttft"], limits["slo_latency"])
        step = np.minimum(limits["slo_tpot"], limits["slo_gap"])
        steps = told.output_tokens - 1
        rest = np.where(steps > 0, step * np.maximum(steps, 1), 0.0)
        last = np.minimum(limits["slo_latency"], first + rest)
        release, (prefill, decodes) = told.release, (self.prefill, self.decodes)
        share = factor / self.workers

        return np.asarray(
            let_go(release, release + first, release + last, share * prefill, share * decodes)
        )

    def thin_out(self, best: Served) -> None:
        """Let go the largest of each crowd in which somebody is late, again and again."""
        self.stale = 0
        gone = best.gone
        while not self.over and self.stale < _PATIENCE:
            found = self.serve(gone, best.way, best.home)
            largest = [] if found is None else self.crowds(found)
            if not largest:
                return

            gone = gone.copy()
            gone[largest] = True

    def crowds(self, found: Served) -> list[int]:
        """Return the largest request of each worker's crowds in which somebody is late."""
        here = self.order[~found.gone[self.order]]
        homes = found.home[here]
        return [i for w in range(self.workers) for i in self.crowds_of(found, here[homes == w])]

    def crowds_of(self, found: Served, here: Ints) -> list[int]:
        """Return the largest request of each crowd of some requests in which somebody is late."""
        first = np.minimum(self.limits["slo_ttft"], self.limits["slo_latency"])
        limit = np.where(np.isfinite(first), first, 2 * np.median(found.waited) / _WAITED)
        crowded = (found.waited > _WAITED * limit)[here] | ~found.good[here]
        # The two before those who wait may be why they do. The two behind join crowds.
        near = crowded.copy()

        for step in (1, 2):
            near[step:] |= crowded[:-step]
            near[:-step] |= crowded[step:]

        label = np.cumsum(~near)
        largest = []
        for crowd in np.split(here[near], np.flatnonzero(np.diff(label[near])) + 1):
            if len(crowd) and not found.good[crowd].all():
                largest.append(int(crowd[self.size[crowd].argmax()]))

        return largest

    def change(self, found: Served) -> None:
        """Take some back and let others go, in many places at once."""
        self.stale = 0
        while not self.over and self.stale < 2 * _PATIENCE:
            first = int(self.generator.integers(4))
            new, home = found.gone.copy(), found.home
            if self.workers > 1:  # whoever was let go is taken back on any worker
                drawn = self.generator.integers(self.workers, size=len(home))
                home = np.where(new, drawn, home)

            for place in range(first, int(self.place.max()) + 1, 4):
                size = _PLACE * self.workers
                here = self.order[place * size : (place + 1) * size]
                for worker in range(self.workers):
                    self.propose(new, found, here[home[here] == worker])

            tried = self.serve(new, found.way, home)
            if tried is None:
                return

            # Those of a worker from a changed place up to the next one belong together.
            region = np.maximum(self.place - first + 4, 0) // 4 * self.workers + home
            gain = np.bincount(region, tried.good.astype(float) - found.good)
            mixed = np.where(gain[region] >= 0, new, found.gone)
            both = tried if (mixed == new).all() else self.serve(mixed, found.way, home)
            if both is not None and both.total >= found.total:
                found = both

    def propose(self, gone: Flags, found: Served, here: Ints) -> None:
        """Change who is let go of a few requests, in place."""
        away, stay = here[gone[here]], here[~gone[here]]
        kind = self.generator.random()
        if len(away) and kind < 0.7:
            gone[away[(self.generator.random(len(away)) * self.size[away]).argmin()]] = False
        if len(stay) and ((kind > 0.5 and len(away)) or not found.good[stay].all()):
            gone[stay[(self.generator.random(len(stay)) * self.size[stay]).argmax()]] = True
