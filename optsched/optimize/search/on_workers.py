"""Search for schedules of a small sum of latencies on several workers: who runs where, and when.

It begins with the workers of the best schedule known, and alternates between two kinds of steps.

*Order.* Each worker by itself is searched by `optsched.optimize.search.rule_search`.

*Moves.* Requests move to another worker, or two of about the same arrival change places, in many
places of the trace at once. All workers are served anew, under the parameters that each request
has. The moves are kept around which the sum of latencies is smaller.
"""

import numpy as np

from optsched.bounds.timeline import Floats, Ints
from optsched.optimize.search.rule_search import Best, Candidate, RuleSearch, search_of
from optsched.policies.base import Job
from optsched.policies.routers import part_of
from optsched.policies.workers import joined
from optsched.problem.budget import Budget
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import workers_of

# The share of the time left for the order in each turn, and the same for moves.
_ORDER = 0.3
# Requests of each worker in a place, where one of them moves.
_PLACE = 40
# Moves end after so many runs in a row without an improvement.
_PATIENCE = 40


class OnWorkers:
    """The workers of requests, the parameters of the rule, and the completions they lead to."""

    def __init__(self, best: Best, workers: int, seed: int) -> None:
        self.best, self.workers, self.seed = best, workers, seed
        n = best.instance.n
        self.order = np.lexsort((np.arange(n), best.instance.release))
        rank = np.empty(n, dtype=np.int64)
        rank[self.order] = np.arange(n)
        self.place = rank // (_PLACE * workers)
        self.home = rank % workers
        if best.schedule is not None and best.schedule.worker is not None:
            self.home = workers_of(best.schedule, n)

        self.parameters, self.factors = np.zeros((6, n)), np.ones(n)
        self.finish = np.full(n, np.inf)
        self.generator = np.random.default_rng(seed)

    def run(self, budget: Budget) -> None:
        """Take turns until the budget is spent, or a turn brings no improvement."""
        moves = self.workers > 1 and self.best.objective == TOTAL_LATENCY
        value, first = np.inf, True
        while first or not budget.over:
            self.search_order(budget.part(_ORDER if moves else 1.0))
            if moves:
                self.move(budget.part(_ORDER / (1 - _ORDER)))

            self.offer()
            if not first and not self.finish.sum() < value:
                return

            value, first = float(self.finish.sum()), False

    def parts(self, home: Ints) -> list[Ints]:
        """Return the requests of each worker that has some, by arrival."""
        parts = (self.order[home[self.order] == worker] for worker in range(self.workers))
        return [part for part in parts if len(part)]

    def searched(self, part: Ints) -> RuleSearch:
        """Return the search of the order of some requests, which starts from the present one."""
        finish = self.finish[part] - self.begin(part)
        kept = Candidate(self.parameters[:, part], self.factors[part], finish)
        return search_of(self.best, part, self.seed, kept if np.isfinite(finish).all() else None)

    def replayed(self, part: Ints) -> RuleSearch | None:
        """Return a search that has run some requests' parameters; None if not all are served."""
        found = self.searched(part)
        kept = Candidate(self.parameters[:, part], self.factors[part], self.finish[part])
        return found if found.serve(kept, np.inf) else None

    def begin(self, part: Ints) -> float:
        """Return when the first of some requests arrives. Their own clock counts from there."""
        return float(self.best.instance.release[part].min())

    def search_order(self, budget: Budget) -> None:
        """Search the order of each worker, one after another."""
        parts = self.parts(self.home)
        for k, part in enumerate(parts):
            found = self.searched(part)
            found.run(budget.part(1.0 / (len(parts) - k)))
            self.parameters[:, part], self.factors[part] = found.chosen[:2]

        finish = self.served(self.home)
        self.finish = self.finish if finish is None else finish

    def served(self, home: Ints) -> Floats | None:
        """Return when requests complete on these workers; None if not all are served."""
        finish = np.empty(len(home))
        for part in self.parts(home):
            found = self.replayed(part)
            if found is None:
                return None

            finish[part] = found.server.finish + self.begin(part)

        return finish

    def move(self, budget: Budget) -> None:
        """Move requests between workers, in many places at once."""
        stale, apart = 0, 4
        while not budget.over and stale < _PATIENCE and np.isfinite(self.finish).all():
            first = int(self.generator.integers(apart))
            home = self.home.copy()
            # Changed places lie apart, so that a gain near one can be told to come from it.
            for place in range(first, int(self.place[self.order[-1]]) + 1, apart):
                self.propose(home, place)

            region = np.maximum(self.place - first + apart, 0) // apart
            tried = self.served(home)
            if tried is not None:
                gain = np.bincount(region, self.finish - tried)
                # Only the moves around which the sum fell stay. All are served again, since moves
                # may yet touch each other.
                mixed = np.where(gain[region] > 0, home, self.home)
                both = tried if (mixed == home).all() else self.served(mixed)

                if both is not None and both.sum() < self.finish.sum():
                    self.home, self.finish, stale = mixed, both, 0
                    continue

            stale += 1
            # Many moves at once may spoil each other: where none succeed, fewer are tried.
            apart = min(2 * apart, 256) if stale % 8 == 0 else apart

    def propose(self, home: Ints, place: int) -> None:
        """Move a request of a place to another worker, in place, or exchange two."""
        size = _PLACE * self.workers
        here = self.order[place * size : (place + 1) * size]
        one = int(self.generator.choice(here))
        old = int(home[one])
        new = int((old + 1 + self.generator.integers(self.workers - 1)) % self.workers)
        there = here[home[here] == new]
        home[one] = new
        # An exchange leaves both workers about as much work as before.
        if len(there) and self.generator.random() < 0.5:
            home[self.generator.choice(there)] = old

    def offer(self) -> None:
        """Have the present schedule judged."""
        whole, schedules = self.best, []
        for part in self.parts(self.home):
            found = self.replayed(part)
            if found is None:
                return

            own = found.best.instance
            schedules.append(part_of(found.schedule(), part, Job(own, own, whole.cost)))

        job = Job(whole.instance, whole.instance, whole.cost)
        whole.offer(joined(job, "recompute", schedules), "search")
