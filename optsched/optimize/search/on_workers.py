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
# Changed places are so many places apart at first, and at most.
_APART, _MAX_APART = 4, 256


class OnWorkers:
    """The workers of requests, the parameters of the rule, and the completions they lead to.

    By request: `home`, its worker, `place`, a number that grows with its arrival, and `finish`, its
    completion in the present schedule, in seconds (infinite before the first).
    """

    def __init__(self, best: Best, workers: int, seed: int) -> None:
        self.best, self.workers, self.seed = best, workers, seed
        n = best.instance.n
        self.order = np.lexsort((np.arange(n), best.instance.release))
        rank = np.empty(n, dtype=np.int64)
        rank[self.order] = np.arange(n)
        self.place = rank // (_PLACE * workers)
        # Without a schedule that says who is where, workers take turns in order of arrival.
        self.home = rank % workers
        if best.schedule is not None and best.schedule.worker is not None:
            self.home = workers_of(best.schedule, n)

        # As in `Candidate`. The first search of the order sets them before they matter.
        self.parameters, self.factors = np.zeros((6, n)), np.ones(n)
        self.finish = np.full(n, np.inf)
        self.generator = np.random.default_rng(seed)

    def run(self, budget: Budget) -> None:
        """Take turns until the budget is spent, or a turn brings no improvement."""
        # Moves are kept by the sum of latencies, and so only where that is the objective.
        moves = self.workers > 1 and self.best.objective == TOTAL_LATENCY
        value, first = np.inf, True
        # The first turn takes place whatever the budget, and has nothing to be compared with.
        while first or not budget.over:
            self.search_order(budget.part(_ORDER if moves else 1.0))
            if moves:
                self.move(budget.part(_ORDER / (1 - _ORDER)))  # as many seconds as the order had

            self.offer()
            # The turn has brought nothing.
            if not first and not self.finish.sum() < value:
                return

            value, first = float(self.finish.sum()), False

    def parts(self, home: Ints) -> list[Ints]:
        """Return the requests of each worker that has some, by arrival."""
        parts = (self.order[home[self.order] == worker] for worker in range(self.workers))
        return [part for part in parts if len(part)]

    def first_arrival(self, part: Ints) -> float:
        """Return when the first of some requests arrives. Their own clock counts from there."""
        return float(self.best.instance.release[part].min())

    def search_of_part(self, part: Ints) -> RuleSearch:
        """Make the search of one worker's order, which starts from the present one if there is.

        Its completions are infinite before the first schedule, and then count from the part's
        first arrival.
        """
        finish = self.finish[part] - self.first_arrival(part)
        present = Candidate(self.parameters[:, part], self.factors[part], finish)
        return search_of(self.best, part, self.seed, present if np.isfinite(finish).all() else None)

    def replay(self, part: Ints) -> RuleSearch | None:
        """Run the rule once on one worker's requests, with the parameters that they have.

        Return the search that ran it, or None if some request is not served.
        """
        # A run reads the candidate's parameters and factors; its completions do not matter.
        search = self.search_of_part(part)
        present = Candidate(self.parameters[:, part], self.factors[part], self.finish[part])
        return search if search.serve(present, np.inf) else None

    def search_order(self, budget: Budget) -> None:
        """Search the order of each worker, one after another, with equal shares of the time."""
        parts = self.parts(self.home)
        for k, part in enumerate(parts):
            search = self.search_of_part(part)
            search.run(budget.part(1.0 / (len(parts) - k)))
            self.parameters[:, part], self.factors[part] = search.chosen[:2]

        # If somebody is not served with these parameters, the completions known so far stay.
        finish = self.serve(self.home)
        self.finish = self.finish if finish is None else finish

    def serve(self, home: Ints) -> Floats | None:
        """Serve all requests on given workers. Return when they complete; None if some do not."""
        finish = np.empty(len(home))
        for part in self.parts(home):
            search = self.replay(part)
            if search is None:
                return None

            # The rule's clock counts from the first arrival of its requests.
            finish[part] = search.server.finish + self.first_arrival(part)

        return finish

    def move(self, budget: Budget) -> None:
        """Move requests between workers, in many places at once, and keep the moves that pay."""
        # Completions that are not known yet could not tell a gain.
        stale, apart = 0, _APART
        while not budget.over and stale < _PATIENCE and np.isfinite(self.finish).all():
            first = int(self.generator.integers(apart))
            home = self.home.copy()
            # Changed places lie apart, so that a gain near one can be told to come from it.
            for place in range(first, int(self.place[self.order[-1]]) + 1, apart):
                self.propose(home, place)

            # A region lasts from one changed place to the next. Region 0 is before the first one.
            region = (self.place - first + apart) // apart
            finish = self.serve(home)
            if finish is not None:
                gain = np.bincount(region, self.finish - finish)
                # Only the moves around which the sum fell stay. All are served again, since moves
                # may yet touch each other.
                mixed = np.where(gain[region] > 0, home, self.home)
                mixed_finish = finish if (mixed == home).all() else self.serve(mixed)

                if mixed_finish is not None and mixed_finish.sum() < self.finish.sum():
                    self.home, self.finish, stale = mixed, mixed_finish, 0
                    continue

            stale += 1
            # Many moves at once may spoil each other: where none succeed, fewer are tried.
            apart = min(2 * apart, _MAX_APART) if stale % 8 == 0 else apart

    def propose(self, home: Ints, place: int) -> None:
        """Change `home`: move a request of a place to another worker, or exchange two."""
        size = _PLACE * self.workers
        here = self.order[place * size : (place + 1) * size]
        moved = int(self.generator.choice(here))
        # Any of the other workers, each as likely: 1 to workers - 1 places further, in a circle.
        old = int(home[moved])
        new = int((old + 1 + self.generator.integers(self.workers - 1)) % self.workers)
        there = here[home[here] == new]
        home[moved] = new
        # An exchange leaves both workers about as much work as before.
        if len(there) and self.generator.random() < 0.5:
            home[self.generator.choice(there)] = old

    def offer(self) -> None:
        """Offer the present schedule to the best. Nothing happens if some request is not served."""
        whole, schedules = self.best, []
        for part in self.parts(self.home):
            search = self.replay(part)
            if search is None:
                return

            # The part's requests get back their numbers, and its batches the times of the judge.
            instance = search.best.instance
            schedules.append(part_of(search.schedule(), part, Job(instance, instance, whole.cost)))

        job = Job(whole.instance, whole.instance, whole.cost)
        whole.offer(joined(job, "recompute", schedules), "search")
