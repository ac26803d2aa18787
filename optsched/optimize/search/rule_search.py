"""Search for schedules under a rule with parameters, on one worker in seconds.

One compiled rule with free parameters (`optsched.optimize.search.rule`) runs over the whole
instance, some 10,000 times faster than the requests arrive. The search varies its parameters. It
first tries a fixed list that has done well, then random changes to the best. The parameters are
three brakes and an order. The order is by own work (`optsched.policies.runner.own_work`), plus a
share of the work of the decode steps; single requests may have a random factor.

Where nobody is in the system, what comes later does not depend on what was before. So each stretch
between such moments keeps the parameters that are best for it, and one run tries a change for every
stretch. `Best` does the same with schedules of any origin: policies, rules that pause, this one.
Most of the time goes to windows of the stretches with much of the latency, one by one: many changes
of each are judged by a short horizon, which says more than a whole run with one change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.judge.evaluate import Evaluation, evaluate_quietly
from optsched.optimize.search.rule import Server
from optsched.policies.runner import Job, own_work
from optsched.policies.workers import Part, joined
from optsched.problem.budget import Budget
from optsched.problem.errors import ViolationError
from optsched.problem.objective import TOTAL_LATENCY
from optsched.problem.schedule import Schedule, check_columns, from_batches, in_parts
from optsched.workloads.problem import Problem

_FREE = 1e18  # no limit on the requests that run
_STARTS: tuple[tuple[float, ...], ...] = (
    # q, r, c, d, p, weight of the decode steps' work
    (1.0, 0.0, _FREE, 0.0, 0.0, 0.0),
    (1.0, 0.0, _FREE, 0.0, 0.6, 0.0),
    (0.0, 0.4, _FREE, 0.0, 0.6, 0.0),
    (6.0, 0.0, _FREE, 0.0, 0.0, 0.0),
    (1.0, 0.0, _FREE, 0.0, 1.3, 0.0),
    (0.0, 0.5, 1.3, 4.5, 0.6, 0.0),
    (8.0, 0.0, _FREE, 0.0, 0.3, 0.0),
    (0.0, 0.4, _FREE, 0.0, 0.0, 0.0),
    (0.0, 0.3, 2.0, 2.0, 0.0, 0.0),
    (0.0, 0.5, 2.0, 8.0, 0.3, 0.0),
    (0.0, 0.7, _FREE, 0.0, 0.6, 0.0),
)
# Of so many candidates, one is judged where stretches are chosen one by one.
_OFFER_EVERY = 20
# The search ends after so many candidates in a row without an improvement.
_PATIENCE = 400
# A stretch is drawn with so many times its share of the latency as probability.
_OFTEN = 4
# Windows have so many times the requests in the system, and what follows counts for so many more
# windows. So many changes of each are tried.
_WIDTH, _HORIZON, _TRIES = 4, 1.5, 60
# Between two times that windows change come so many candidates for the whole trace, for each change
# of a window that is as long as the trace.
_BETWEEN = 0.5
# A second of work delays this share of the requests to come, until so small a share of the mean
# number is in the system. What batches take beside the work of requests is shared by tokens: this
# share of it, since not all of it is due to them.
_DELAYED, _QUIET, _SHARED = 0.25, 0.2, 0.5
# A sum of latencies is smaller only by more than this, in seconds: no rounding decides.
_GAIN_S = 1e-9


def starts_of_stretches(release: Floats, finish: Floats) -> Ints:
    """Return the places, in order of release, of the requests that find nobody in the system."""
    latest = np.maximum.accumulate(finish)
    return np.append(0, 1 + np.flatnonzero(latest[:-1] <= release[1:]))


def are_better(release: Floats, new: Floats, old: Floats) -> NDArray[np.bool_]:
    """Return which requests are in a stretch whose completions have a smaller sum than so far.

    All are in order of release. Under both completions nobody is in the system where a stretch
    begins.
    """
    first = starts_of_stretches(release, np.maximum(new, old))
    less = np.add.reduceat(new - old, first) < -_GAIN_S
    return np.repeat(less, np.diff(np.append(first, len(release))))


@dataclass(eq=False)
class Best:
    """The best schedule so far, its judgement and `origin`, and the arguments of `improve`.

    `admit` says whether a schedule may be the result; None: every one may.
    """

    problem: Problem
    admit: Callable[[Evaluation], bool] | None
    budget: Budget
    schedule: Schedule | None = None
    evaluation: Evaluation | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        self.instance, self.cost = self.problem.instance, self.problem.cost_model
        self.objective = self.problem.goal
        self.value = self.objective.signed(np.inf)  # worse than that of any schedule

    def offer(self, schedule: Schedule, origin: str) -> bool:
        """Keep a schedule, or its best stretches, if it is admitted and better.

        Return whether something was kept.
        """
        evaluation = evaluate_quietly(self.problem, schedule)
        if self.admit is not None and not self.admit(evaluation):
            return False

        # If it is better in some stretches only, these join the others of the best one. That is
        # done only where there is no `admit`, so it need not be asked again.
        if self.schedule is not None and self._may_mix(schedule, evaluation):
            better = self.is_better_for(evaluation.finish)
            if better.any() and not better.all():
                schedule, origin = self._mix(schedule, evaluation, better), "search"
                evaluation = evaluate_quietly(self.problem, schedule)

        value = self.objective.of(evaluation)
        if value is None or not self.objective.better(value, self.value):
            return False

        self.schedule, self.evaluation, self.value = schedule, evaluation, float(value)
        self.origin = origin
        self.budget.tell(incumbent=self.value)
        return True

    def is_better_for(self, finish: Floats) -> NDArray[np.bool_]:
        """Return which requests are in a stretch whose latencies have a smaller sum than so far.

        Without a schedule so far it is all.
        """
        better = np.ones(len(finish), dtype=np.bool_)
        if self.evaluation is not None:
            release = self.instance.release_times
            order = np.argsort(release, kind="stable")
            better[order] = are_better(release[order], finish[order], self.evaluation.finish[order])

        return better

    def _may_mix(self, schedule: Schedule, evaluation: Evaluation) -> bool:
        """Whether batches of a schedule and of the best one may follow each other.

        That is so on one worker, for the sum of latencies, if both are plain sequences of batches
        with one mode of eviction: the machine is empty where one stretch ends and the next begins.
        `admit` judges whole schedules and might refuse a mixed one, so with it nothing is mixed.
        """
        assert self.schedule is not None
        plain = all(
            candidate.kind == "batches"
            and candidate.start is None  # each batch starts as soon as it can
            and candidate.reused is None  # what a stretch leaves in the prefix cache may differ
            and bool((np.diff(check_columns(candidate)[0]) > 0).all())  # no batch is empty
            for candidate in (schedule, self.schedule)
        )
        one_mode = schedule.evict_mode == self.schedule.evict_mode
        total = self.objective == TOTAL_LATENCY and self.admit is None
        return plain and one_mode and total and evaluation.workers == 1

    def _mix(
        self, schedule: Schedule, evaluation: Evaluation, better: NDArray[np.bool_]
    ) -> Schedule:
        """Join the batches in which requests are `better` and the best schedule's of the others."""
        assert self.schedule is not None
        assert self.evaluation is not None
        parts = []
        for source, judged, chosen in (
            (schedule, evaluation, better),
            (self.schedule, self.evaluation, ~better),
        ):
            # Entries and evictions of batch b end at entry b + 1 of `offsets` and `until`.
            offsets, request, tokens, until, evicted = check_columns(source)
            # By batch, whether it is taken: all of its requests are of one stretch.
            batch = chosen[request[offsets[:-1]]]
            entries, evictions = (np.diff(ends)[batch].cumsum() for ends in (offsets, until))
            columns = request[chosen[request]], tokens[chosen[request]]
            start = judged.batch_start[batch].astype(np.float64)
            evicted = evicted[chosen[evicted]]
            # False: no batch has a start of its own, as in both schedules (`_may_mix`).
            parts.append(Part(start, entries, *columns, evictions, evicted, False))

        # `joined` sorts batches by their starts, as if two workers had made them. It is one, so
        # their numbers are dropped.
        job = Job(self.instance, self.instance, self.cost)
        return replace(joined(job, schedule.evict_mode, parts), worker=None)


class Candidate(NamedTuple):
    """Parameters of the rule, and the completions that they lead to, infinite before a run.

    `parameters` (shape (6, n)): q, r, c, d, p and the weight of the decode steps' work. `factors`
    (shape (n,)): what a request's place in the order, its weighted work, is multiplied by.
    """

    parameters: Floats
    factors: Floats
    finish: Floats

    def copy_of(self, part: slice) -> "Candidate":
        """Return a copy of the columns of some requests."""
        return Candidate(*(column[..., part].copy() for column in self))


class RuleSearch:
    """The search: it runs the rule with the parameters of one candidate after another.

    Columns are in order of arrival.
    """

    def __init__(self, best: Best, seed: int | np.random.Generator) -> None:
        instance, cost = best.instance, best.cost
        self.best = best
        self._order = np.lexsort((np.arange(instance.n), instance.release))
        self._back = np.argsort(self._order)  # the place of each request in that order
        prompt, output = instance.prompt_tokens[self._order], instance.output_tokens[self._order]
        # The rule's clock counts from the first arrival, at `_since` in the instance's time.
        self._arrival, self._since = instance.release[self._order], float(instance.first_arrival)
        self._work = own_work(prompt, output, cost)
        self._decode_work = self._work - own_work(prompt, np.ones_like(output), cost)
        self.server = Server(instance, cost, self._order)
        # Without hybrid batches a schedule may be refused, so each is judged.
        self._by_stretches = instance.hybrid_batching is not False and (
            best.objective == TOTAL_LATENCY and best.admit is None
        )
        self._generator = np.random.default_rng(seed)
        self._first = np.zeros(1, dtype=np.int64)  # place of the first request of each stretch
        self._due = float(len(_STARTS))  # windows come after so many candidates
        self.chosen = self._start(_STARTS[0])

    def run(self, budget: Budget) -> None:
        """Try at least one candidate, until the budget is spent or many bring no improvement."""
        # By stretches only completions are compared. After the first candidate, and then now and
        # then, windows have their turn (if it is `_due`), and what was chosen becomes a schedule.
        attempt = self._attempt_by_stretches if self._by_stretches else self._attempt
        tried = stale = 0
        while tried == 0 or (stale < _PATIENCE and not budget.over):
            if tried < len(_STARTS):
                candidate = self._start(_STARTS[tried])
            else:
                candidate = self._vary(self.chosen, self._first)

            stale = 0 if attempt(candidate) else stale + 1
            tried += 1
            if self._by_stretches and tried % _OFFER_EVERY == 1:
                stale = 0 if tried > self._due and self._attempt_by_windows(budget) else stale
                self._attempt(self.chosen)

        self._attempt(self.chosen)

    def serve(self, candidate: Candidate, enough: float) -> bool:
        """Run the rule with a candidate's parameters. Return whether it served all requests."""
        n = len(self._arrival)
        self._adjust(candidate, slice(n))
        self.server.begin()
        return bool(np.isfinite(self.server.run(n, n + 1, enough)))

    def _adjust(self, candidate: Candidate, part: slice) -> None:
        """Set the order and the brakes of some requests by a candidate of these."""
        work = self._work[part] + candidate.parameters[5] * self._decode_work[part]
        self.server.adjust(part, work * candidate.factors, candidate.parameters[:5])

    def _attempt_by_stretches(self, candidate: Candidate) -> bool:
        """Keep a candidate for the stretches that it serves sooner; return whether there is any."""
        chosen = self.chosen
        # If all is one stretch, the sum of completions ends a run that is worse.
        enough = np.inf
        if len(self._first) == 1:
            enough = float(chosen.finish.sum()) * (1 + 1e-12)  # no rounding ends an equal one
        if not self.serve(candidate, enough):
            return False

        served = candidate._replace(finish=self.server.finish)
        better = are_better(self._arrival, served.finish, chosen.finish)
        if not better.any():
            return False

        pairs = zip(served, chosen, strict=True)
        self.chosen = Candidate(*(np.where(better, new, old) for new, old in pairs))
        self._first = starts_of_stretches(self._arrival, self.chosen.finish)

        return True

    def _attempt_by_windows(self, budget: Budget) -> bool:
        """Choose changes window by window in some stretches; return whether any is better.

        Stretches are drawn by their shares of the latency. The time of the next call is put off by
        the work of this one.
        """
        n, chosen = len(self._arrival), self.chosen.copy_of(slice(None))
        # Without completions there are no stretches to draw from.
        if not np.isfinite(chosen.finish).all():
            return False

        latency = np.add.reduceat(chosen.finish - self._arrival, self._first)
        drawn = self._generator.random(len(latency)) * latency.sum() < _OFTEN * latency
        bounds = np.append(self._first, n)
        # The last candidate has left its own keys and brakes in the server.
        self._adjust(chosen, slice(n))
        for k in np.flatnonzero(drawn):
            first, end = bounds[k : k + 2].tolist()
            self._choose_changes(chosen, first, end, budget)
            self._due += _BETWEEN * _TRIES * (end - first) / n

        return self._attempt_by_stretches(chosen)

    def _choose_changes(self, chosen: Candidate, first: int, end: int, budget: Budget) -> None:
        """Change a candidate in one window of arrivals after another of the stretch first to end.

        A change is judged by what follows within a horizon, if no more requests come, and by the
        work that it leaves to later ones, at a price: each second of it delays a share of those
        that come before a moment with few requests in the system.
        """
        arrival, finish, server = self._arrival[first:end], chosen.finish[first:end], self.server
        length = finish.max() - arrival[0]
        mean = (finish - arrival).sum() / length  # requests in the system (Little's law)
        width = 1 + int(_WIDTH * mean)  # requests of a window
        # How many are in the system when each request comes, and 0 at the end of the stretch.
        present = np.append(np.arange(end - first) - np.searchsorted(np.sort(finish), arrival), 0)
        quiet = np.flatnonzero(present < _QUIET * mean) + first
        # By output token, the time that batches take beside the work of the requests themselves. A
        # share of it counts below as due to those that are left.
        tokens = self.best.instance.output_tokens[self._order[first:end]]
        overhead = (length - self._work[first:end].sum()) / tokens.sum()
        server.begin(first)  # nobody is in the system where a stretch begins

        # From here on `first` is the place of the next to arrive, where its window begins.
        while (first := server.arrived) < end and not budget.over:
            saved = server.save()
            until = min(end, first + width + int(_HORIZON * width))
            part = slice(first, until)
            # The requests from `until` to the next quiet moment, of which a share is delayed.
            price = _DELAYED * (quiet[np.searchsorted(quiet, until)] - until)
            best, pick = np.inf, chosen.copy_of(part)
            # The first trial, without a change, is what changes have to be better than.
            for k in range(_TRIES + 1):
                if budget.over:
                    break

                trial = chosen.copy_of(part)
                # Other trials change the first half, all, or twice as much of the window.
                # It is one stretch for `_vary`, which may change all of it (1.0).
                if k > 0:
                    some = slice(1 + int(width * self._generator.choice([0.5, 1.0, 2.0])))
                    change = self._vary(trial.copy_of(some), np.zeros(1, np.int64), 1.0)
                    trial.parameters[:, some], trial.factors[some] = change[:2]

                server.restore(saved)
                self._adjust(trial, part)
                # First up to the last arrival of the horizon. The work present then is priced, and
                # the run goes on until all who have come are done: no more than `until` ever come.
                # No total above the best one so far is of use, so it ends the run.
                server.run(until, until, np.inf)
                later = price * server.work_until(_SHARED * overhead)
                total = server.run(until, until + 1, best - later) + later
                if total < best:
                    best, pick = total, trial

            # The best change stays, and the server goes on with it to the next window, which begins
            # once a width of requests has arrived: horizons overlap.
            chosen.parameters[:, part], chosen.factors[part] = pick[:2]
            server.restore(saved)
            self._adjust(pick, part)
            server.run(end, min(end, first + width), np.inf)

    def _attempt(self, candidate: Candidate) -> bool:
        """Run a candidate to the end and have it judged. Return whether it is the best so far."""
        best = self.best
        # By stretches, its completions are known of earlier runs, one for some stretches each. If
        # they are better nowhere, it is not worth a judgement.
        finish = self._since + candidate.finish[self._back]
        if self._by_stretches and not best.is_better_for(finish).any():
            return False
        if not self.serve(candidate, enough=np.inf):
            return False
        try:
            better = best.offer(self.schedule(), "search")
        except ViolationError:
            # Without hybrid batches, requests that decode wait while a batch prefills, and their KV
            # can overflow beside it.
            return False

        if better:
            self.chosen = candidate

        return better

    def schedule(self) -> Schedule:
        """Return the schedule of the last run, with prompts longer than a batch in parts."""
        instance, sha256 = self.best.instance, self.best.cost.sha256
        columns = self.server.columns()
        schedule = from_batches(*columns, instance=instance, cost_model_sha256=sha256)
        return in_parts(schedule, instance)

    def _start(self, parameters: Sequence[float]) -> Candidate:
        """Return a candidate with the same parameters for all."""
        n = len(self._arrival)
        columns = np.tile(np.array(parameters)[:, None], n)
        return Candidate(columns, np.ones(n), np.full(n, np.inf))

    def _vary(self, chosen: Candidate, stretches: Ints, widest: float = 0.1) -> Candidate:
        """Return a candidate with a random change for each stretch, given by its first request.

        The change is to begin anew from a row of `_STARTS`, to change one parameter, or to move
        single requests in the order.
        `widest`: the max share of a stretch that a window of arrivals has to each side.
        """
        # m stretches have one draw of each kind, which `spread` gives to their requests.
        generator, n = self._generator, len(chosen.factors)
        parameters, factors = chosen.parameters.copy(), chosen.factors.copy()
        m = len(stretches)
        size = np.diff(np.append(stretches, n))

        def spread(values: NDArray[Any]) -> NDArray[Any]:
            """Return for each request the value of its stretch."""
            return np.repeat(values, size)

        # In a stretch the change is to all requests or, half of the time, to a window of arrivals.
        width = generator.integers(1, np.maximum(2, (size * widest).astype(np.int64) + 2))
        middle = stretches + (generator.random(m) * size).astype(np.int64)
        near = np.abs(np.arange(n) - spread(middle)) <= spread(width)
        kind = generator.random(m)
        here = near | spread(generator.random(m) < 0.5)

        # One in five stretches begins anew.
        again = here & spread(kind < 0.2)
        start = spread(generator.integers(len(_STARTS), size=m))
        parameters[:, again] = np.array(_STARTS).T[:, start[again]]

        # In two of five one row of the parameters is scaled. Rows 1, 3 and 4 (r, d and p) also
        # rise, so that they leave 0. To row 5, the weight of decode steps, something is added.
        row = spread(generator.integers(6, size=m))
        scale, rise = spread(generator.uniform(0.7, 1.4, m)), spread(generator.uniform(0, 0.3, m))
        one_row = here & spread((kind >= 0.2) & (kind < 0.6))
        for k in range(6):
            changed = one_row & (row == k)
            if k < 5:
                parameters[k, changed] *= scale[changed]
                parameters[k, changed] += rise[changed] if k in (1, 3, 4) else 0.0
            else:
                parameters[k, changed] += rise[changed] - 0.15  # the weight falls as often as not

        # In the others some of the window's requests move: their places in the order are multiplied
        # by random factors.
        moved = near & spread(kind >= 0.6)
        moved &= generator.random(n) < spread(generator.uniform(0.02, 0.5, m))
        factors[moved] *= np.exp(generator.normal(0, 0.3, int(moved.sum())))
        return Candidate(parameters, factors, chosen.finish)


def search_of(
    best: Best, part: Ints, seed: int | np.random.Generator, start: Candidate | None
) -> RuleSearch:
    """Return the search of some requests by themselves, which begins from `start` if given."""
    # No `admit`: only the schedule of all requests is offered to `best`, which asks it.
    problem = Problem(best.instance.subset(part), best.cost, best.objective)
    search = RuleSearch(Best(problem, None, Budget()), seed)
    if start is not None:
        search.chosen = start

    return search
