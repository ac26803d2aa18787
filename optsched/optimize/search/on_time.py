"""Search for schedules with many requests within their SLOs: whom to serve in time, whom to let go.

The loop of the policy `edf-decode` serves an instance with known lengths and arrivals in a few
milliseconds. Who is *let go* waits until all others have begun, and takes no time from them before.
The search decides who that is, and how the loop is tuned in each stretch of the trace.

*A machine without batches.* Work that can be interrupted at any time is served by earliest
deadlines: a prefill by the limit on the first token, the decodes by that on the last. If a deadline
is missed, the one with the most work is let go of those that must lie between the last idle moment,
or later deadline, and this one. With one release time and one job each that is the rule of Moore
and Hodgson. The fixed costs of batches are a factor of the work, of which a few are tried.

*Annealing.* A change takes back one who was let go, lets another go instead, or changes a knob of
the loop, and the loop runs again. A run ends as soon as too many are late, and begins at the last
of several moments that the change does not touch. Long traces are served window by window, with the
state of the machine at its beginning: a change has the same price there as in a short one.

*Several workers.* A router that sends each request to the worker with the least work left says
where it is at first. Each worker then has windows of its own. Who is let go belongs to no worker,
and may be taken back on any of them. So requests move from one worker to another.

Counts are the judge's.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.judge.evaluate import evaluate_quietly
from optsched.policies.base import Job
from optsched.policies.edf_decode import EdfDecode, limits_for, requests_of
from optsched.policies.runner import own_work
from optsched.policies.workers import joined
from optsched.problem.budget import Budget, work_time
from optsched.problem.errors import LoopError
from optsched.problem.instance import Instance
from optsched.problem.limits import all_limits
from optsched.problem.metrics import served_well
from optsched.problem.schedule import Schedule
from optsched.workloads.predict import predict
from optsched.workloads.problem import Problem

Flags = NDArray[np.bool_]

# The max output tokens for a search.
_MAX_TOKENS = 10_000_000
# The factors of the work on a machine without batches.
_FACTORS = (1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4)
# The share of decode work in the size of a request.
_DECODES = 0.3
# Requests in a window, and by how many it moves. Requests between two moments at which a run can
# begin.
_WINDOW, _MOVE, _PART = 1200, 300, 25
# Where nothing has become better for this share of the time, there is nothing to be had.
_PATIENCE = 0.5
# A plan with so many more late requests is accepted with a chance of 1/e.
_HEAT = 0.3
# How often a knob is changed, and by what factor about.
_TUNED, _SPREAD = 0.15, 0.25
# What a second of work that is left at the end of a window counts for, in late requests.
_BACKLOG = 1.0
# Changes in a window the first time, and then twice as many each time.
_STEPS = 150
# Turns of the loop; seconds for a search without a limit.
_TURNS, _USUAL_S = 1 << 40, 20.0
# Lengths are known here, so predictions are trusted. Knobs that are tried first, and the ranges of
# all others in the order of the loop.
_TRUSTING = EdfDecode(piece=0.5, trust=1.0)
_USUAL = replace(
    _TRUSTING, urgent=0.3, share=0.6, floor=0.25, behind=0.5, smallest=0.1, lump=0.04, load=1.0
)
_RANGES = (
    (0.02, 10.0), (0.05, 5.0), (0.2, 1.0), (0.1, 1.1), (0.1, 1.5), (0.02, 1.0), (0.005, 0.5),
    (0.0, 3.0), (0.02, 1.0), (0.0, 5.0), (0.0, 1.0), (0.0, 1.0),
)  # fmt: skip
# The share of a pace that batches of prefills and decodes take at first.
_MIXED = 0.6
# Seconds that a request must have to spare beyond its refill to be evicted for a prompt, at first.
_SPARE = 0.1
# Who is let go instead of another came at most so many requests before or after it.
_NEAR = 15


class Served(NamedTuple):
    """A schedule that a run of the loop made, and the plan that led to it.

    By request (shape (n,)): who is within all SLOs (`good`), and the worker (`home`), -1 for those
    who are let go. `knobs`: the loop's, a row for each stretch of the trace.
    """

    schedule: Schedule
    good: Flags
    home: Ints
    knobs: Floats

    @property
    def total(self) -> int:
        """How many are within their SLOs."""
        return int(self.good.sum())

    @property
    def gone(self) -> Flags:
        """Who is let go."""
        return self.home < 0


def quick_to_search(instance: Instance) -> bool:
    """Whether there is a search: all arrivals are known, and a candidate takes some seconds."""
    return instance.after is None and int(instance.output_tokens.sum()) <= _MAX_TOKENS


def serve_in_time(
    problem: Problem,
    budget: Budget,
    *,
    enough: int | None = None,
    seed: int = 0,
    start: Served | None = None,
    tell: Callable[[Served], object] | None = None,
) -> Served | None:
    """Search for a schedule with many requests within their SLOs; return the best.

    None if the instance is not `quick_to_search`. The search ends when `enough` are in time, or
    when a share of its time brought nothing. `start` is what was found for other arrivals or
    SLOs: who is let go at first, and who is where. `tell` is given each schedule that is better
    than all before.
    """
    if not quick_to_search(problem.instance):
        return None

    search = _Search(problem, seed, budget, tell)
    search.enough = problem.instance.n if enough is None else enough
    search.begin_with(start)
    steps = _STEPS
    # Longer sweeps find what shorter ones do not; the first ones end soon, with a schedule.
    while search.best is not None and not search.over:
        search.sweep(steps)
        steps *= 2

    return search.best


class _Run(NamedTuple):
    """A worker at a moment, as `optsched.policies.engine.deadlines` has it.

    Its requests (records, by number), its state (one record) and its lines (rows of requests'
    numbers: the queue, those that decode, those that are late).
    """

    requests: Any
    state: Any
    lines: Ints

    def copy(self) -> "_Run":
        """Return a copy that stays as it is when the loop goes on and changes arrays in place."""
        return _Run(self.requests.copy(), self.state.copy(), self.lines.copy())

    @property
    def now(self) -> float:
        """The worker's time."""
        return float(self.state[0].now)

    @property
    def lost(self) -> int:
        """How many were to be in time and are not."""
        return int(self.state[0].lost)


class _Search:
    """Runs of the loop on one instance, and the best of them.

    A *plan* is `home` (shape (n,)), each request's worker or -1 for those who are let go, and
    `knobs`, a row for each stretch of `stretch` requests in order of arrival.
    """

    def __init__(
        self, problem: Problem, seed: int, budget: Budget, tell: Callable[[Served], object] | None
    ) -> None:
        from optsched.policies.engine import common, deadlines as loop

        self.problem, self.budget, self.tell = problem, budget, tell
        instance, cost, workers = problem.instance, problem.cost_model, problem.workers
        self.instance, self.workers = instance, workers
        # The loop acts on predictions: here they are the true lengths. It draws nothing (seed 0).
        # `on(0)`: it is the job of one worker, the first.
        predicted = predict(instance, "oracle")
        self.job = Job(predicted, instance, cost, 0, "edf-decode", fleet=problem.hardware).on(0)
        self.requests = requests_of(self.job)
        self.limits = limits_for(self.job, "recompute")
        self.slos = all_limits(predicted, None)
        self.generator = np.random.default_rng(seed)

        # The loop looks so many seconds ahead of its time: as far as the longest first token's SLO.
        first = np.minimum(self.slos["slo_ttft"], self.slos["slo_latency"])
        self.ahead = float(first[np.isfinite(first)].max(initial=1.0))

        # Seconds of work of each request by itself; those who have more of it rather go. With one
        # output token there is only a prefill.
        ones = np.ones_like(instance.output_tokens)
        self.prefill = own_work(instance.prompt_tokens, ones, cost)
        self.decodes = own_work(instance.prompt_tokens, instance.output_tokens, cost) - self.prefill
        self.size = self.prefill + _DECODES * self.decodes

        # A window moves by one stretch, so that each row of knobs belongs to one move.
        self.order = np.lexsort((np.arange(instance.n), instance.release))
        self.stretch = _MOVE * workers
        self.requests["row"][self.order] = np.arange(instance.n) // self.stretch
        self.rows = (instance.n - 1) // self.stretch + 1

        self.common, self.loop, self.compiled = common, loop, common.skip_type_checks(loop.run)
        # Scratch space of runs that only count: what they write there is overwritten when it fills.
        columns, width = common.new_columns(instance), 4 * instance.n + (1 << 16)
        self.columns = columns._replace(
            entries=np.empty((2, width), np.int32), evicted=np.empty(width, np.int64)
        )
        self.best: Served | None = None
        self.enough, self.improved_at = instance.n, work_time()

    @property
    def over(self) -> bool:
        """Whether the time is up, enough are in time, or nothing has become better for long."""
        if self.best is not None and self.best.total >= self.enough:
            return True

        limit = self.budget.limit_s if math.isfinite(self.budget.limit_s) else _USUAL_S
        return self.budget.over or work_time() - self.improved_at > _PATIENCE * limit

    def run(
        self,
        run: _Run,
        order: Ints,
        knobs: Floats,
        until: float,
        max_lost: int,
        columns: Any = None,
    ) -> Any:
        """Let a worker go on, in place, up to a time or until more than `max_lost` are lost.

        Return the `columns` with the batches that it made, longer if they were too short. Without
        `columns` the run only counts who is lost.
        """
        counts = columns is None
        columns = self.columns if counts else columns
        settings = self.loop.Settings(knobs, self.ahead, max_lost, counts)
        state = run.state
        while True:
            state["turns"] = _TURNS
            # The loop projects no KV, so that `usage` is empty.
            arguments = self.common.Worker(
                self.limits, self.job.cost.array, order, until, columns, order[:0], run.lines
            )
            self.compiled(run.requests, state, arguments, settings)
            # The loop returns before its turns are used up, unless the columns are full.
            if state[0].turns > 0:
                return columns
            if counts:  # nobody needs what was written: begin again in front
                for name in ("batches", "entries", "evicted", "settled"):
                    state[name] = 0
            else:
                columns = self.common.with_room(columns, state[0], len(order), len(order))

    def new_run(self, home: Ints, worker: int) -> _Run:
        """Return a worker before the first arrival. Requests of others are late to it.

        Late ones wait until nobody else does, and a run that only counts never serves them. It ends
        when no request is `pending`: one that may still be in time and has not finished.
        """
        requests = self.requests.copy()
        requests["late"] = home != worker
        state = self.common.new_state(self.loop.STATE_FIELDS, self.instance)
        state["pending"] = (home == worker).sum()
        return _Run(requests, state, np.empty((3, self.instance.n + 1), dtype=np.int64))

    def count_late(self, home: Ints, knobs: Floats) -> int:
        """Return how many are late under a plan, those who are let go included."""
        # Those who are let go are late to every worker from the start, so no run counts them.
        late = int((home < 0).sum())
        for worker in range(self.workers):
            run = self.new_run(home, worker)
            self.run(run, self.order, knobs, math.inf, self.instance.n)
            late += run.lost

        return late

    def serve(self, home: Ints, knobs: Floats) -> None:
        """Run the loop under a plan to the end of all, and keep the schedule if it is the best."""
        common, parts = self.common, []
        # Those who are let go have to be served too, after all others: by turns on all workers.
        served_by = np.where(home < 0, np.arange(len(home)) % self.workers, home)
        for worker in range(self.workers):
            run = self.new_run(home, worker)
            order = self.order[served_by[self.order] == worker]
            # Nobody is too many, so the run never ends early.
            until, max_lost = math.inf, self.instance.n
            columns = self.run(
                run, order, knobs, until, max_lost, common.new_columns(self.instance)
            )
            try:
                # The loop splits prefills (`split`), so no limit is too small for a whole one.
                parts.append(common.part_of(self.job, run.requests, run.state, columns, split=True))
            except LoopError:  # some request is never served with these knobs
                return

        # `job` is that of a single worker; the schedule is of all of them.
        whole = replace(self.job, fleet=self.problem.hardware)
        schedule = joined(whole, "recompute", parts)
        good = served_well(evaluate_quietly(self.problem, schedule))
        assert good is not None  # there are SLOs, or nobody would search
        served = Served(schedule, good, home, knobs)
        if self.best is None or served.total > self.best.total:
            self.best, self.improved_at = served, work_time()
            if self.tell is not None:
                self.tell(served)

    def begin_with(self, start: Served | None) -> None:
        """Serve under the best of some first plans.

        They are the one known, nobody let go, and whom a machine without batches lets go.
        """
        workers, first_knobs = self.route(), self.first_knobs()
        plans = [] if start is None else [(start.home, start.knobs)]
        plans.append((workers, np.tile(first_knobs[0], (self.rows, 1))))
        for factor in _FACTORS:
            home = np.where(self.without_batches(factor), -1, workers)
            plans += [(home, np.tile(row, (self.rows, 1))) for row in first_knobs]

        late = []
        for home, knobs in plans:
            # To count the late takes no schedule, and only the best of all is worth one.
            late.append(self.count_late(home, knobs))
            # Enough are in time under this plan, or there is no time for the next one.
            if self.instance.n - late[-1] >= self.enough or self.budget.over:
                break

        self.serve(*plans[int(np.argmin(late))])

    def first_knobs(self) -> list[Floats]:
        """Return the rows of knobs that are tried first: prefills apart, mixed, and evicting.

        These are settings that serve many where lengths are known (docs/policies/deadlines.md).
        """
        policy = replace(_TRUSTING, floor=0.3, share=0.5, smallest=0.2)
        # Batches of prefills and decodes, for machines that do both at once about as quickly. Each
        # lasts at most a share of the median limit on a step.
        step = float(np.median(np.minimum(self.slos["slo_tpot"], self.slos["slo_gap"])))
        piece = _MIXED * min(step, 1.0)
        mixed = replace(policy, mixed=True, urgent=5.0, piece=piece, lump=piece / 3, reserve=0.2)
        evicts = replace(mixed, urgent=0.5, load=0.6, reserve=0.1, evict=_SPARE)
        # These two let nobody of the queue wait for all others by themselves.
        usual = (replace(_USUAL, drop=False, reserve=x) for x in (1.0, 0.5))
        return [p.row for p in (policy, mixed, evicts, replace(policy, evict=_SPARE), *usual)]

    def route(self) -> Ints:
        """Return the worker of each request: the one with the least work left when it comes."""
        free = np.zeros(self.workers)  # when each worker has done its work
        home = np.zeros(self.instance.n, dtype=np.int64)
        work = (self.prefill + self.decodes).tolist()
        # With one worker all are at home there.
        for i in self.order.tolist() if self.workers > 1 else []:
            home[i] = w = int(free.argmin())
            free[w] = max(free[w], self.instance.release[i]) + work[i]

        return home

    def without_batches(self, factor: float) -> Flags:
        """Return whom to let go so that all others are in time on a machine without batches.

        It is as fast as all workers together, but each request takes `factor` times its own work.
        """
        from optsched.optimize.search.on_time_kernel import let_go

        slos = self.slos
        # A first token is due by both of its limits, and each later one within both limits on
        # steps. A limit that is not set is infinite.
        first = np.minimum(slos["slo_ttft"], slos["slo_latency"])
        step = np.minimum(slos["slo_tpot"], slos["slo_gap"])
        steps = self.instance.output_tokens - 1
        # Without a further token its time is 0, also where a step's limit is infinite.
        after_first = np.where(steps > 0, step * np.maximum(steps, 1), 0.0)
        last = np.minimum(slos["slo_latency"], first + after_first)
        release, share = self.instance.release, factor / self.workers
        dues = release + first, release + last
        return let_go(release, *dues, share * self.prefill, share * self.decodes)

    def window_end(self, first: int) -> int:
        """Return the place in order of arrival where a window ends; the last one may be longer."""
        last = first + _WINDOW * self.workers
        return last if last + self.stretch < self.instance.n else self.instance.n

    def sweep(self, steps: int) -> None:
        """Change who is let go and how the loop is tuned, window by window, `steps` times in each.

        A window moves by one stretch. What was decided for that stretch is then run, and the next
        window begins where each worker (its *front*) is after it.
        """
        assert self.best is not None
        home, knobs = self.best.home.copy(), self.best.knobs.copy()
        fronts = [self.new_run(home, worker) for worker in range(self.workers)]
        n = self.instance.n
        for row in range(self.rows):
            first = row * self.stretch
            last = self.window_end(first)
            # Each worker has a window of its own. A request that one takes back is no longer let go
            # for the next.
            for worker in range(self.workers):
                window = _Window(self, fronts[worker], worker, home, knobs, first, last)
                # Each worker's window of this and later moves has an equal share of the time left.
                windows = 1 if last == n else self.rows - row
                budget = self.budget.part(1.0 / (windows * self.workers))
                # Only a window of all requests says whether enough are in time.
                window.improve(steps, self.enough if last - first == n else n, budget)
                new_home, new_knobs = home.copy(), knobs.copy()
                window.write(new_home, new_knobs)
                if last < n:  # what it leads to may come later: a longer window decides
                    further = self.window_end(last)
                    plans = ((home, knobs), (new_home, new_knobs))
                    old_late, new_late = (
                        _Window(self, fronts[worker], worker, *plan, first, further).best.value
                        for plan in plans
                    )
                    # In the longer window the change turned out worse: it is forgotten.
                    if new_late > old_late:
                        continue

                home, knobs = new_home, new_knobs

            # The last window has decided about all that follow.
            if last == n or self.budget.over:
                break

            until = float(self.instance.release[self.order[first + self.stretch]])
            for worker, front in enumerate(fronts):
                # What was decided holds from here on, for those whom others took back as well.
                coming = self.order[first:]
                front.requests["late"][coming] = home[coming] != worker
                front.state["pending"] = n  # so that the loop does not end before the time
                self.run(front, self.order, knobs, until, n)

        self.serve(home, knobs)


class _State(NamedTuple):
    """A plan for a window's requests, and what comes of it.

    Who is let go (`gone`), who is late in the end (`late`, those let go included), the knobs, how
    many are late (`value`, with the backlog), and moments at which a run can begin: before the
    first request and after every `_PART` of them.
    """

    gone: Flags
    late: Flags
    knobs: Floats
    value: float
    moments: list[_Run]


def _renumber(front: _Run, numbers: Ints, sizes: list[int], first_row: int) -> _Run:
    """Return a worker as it is at its front, with some requests alone, numbered anew.

    Its front is where the window of requests that are tried anew begins there. ``numbers`` are
    the old ones: first the members of its lines of requests (those without a first token, those
    that decode, and late ones), of these `sizes`, then those that come. Rows of knobs count from
    `first_row` on.
    """
    before = sum(sizes)
    requests = front.requests[numbers]  # a copy, since it is picked by an array of numbers
    requests["row"] -= first_row
    lines = np.empty((3, len(numbers) + 1), dtype=np.int64)
    for line, members in enumerate(np.split(np.arange(before), np.cumsum(sizes[:2]))):
        lines[line, : len(members)] = members

    # What has arrived, was made or was lost counts from here on.
    state = front.state.copy()
    for name in ("arrived", "batches", "entries", "evicted", "settled", "lost"):
        state[name] = 0

    # The row of knobs that applies, the number of late ones, and that of requests done.
    state["row"] = max(0, int(state[0].row) - first_row)
    state["late"] = sizes[2]
    # The loop ends when all that come are done. Those present are not among them, but will count.
    state["done"] = -before
    return _Run(requests, state, lines)


class _Window:
    """A stretch of the trace on one worker, with what it has to do at its beginning.

    It has the places `first` to `last` - 1 in the order of all arrivals, and begins with the plan
    `home` and `knobs`. `front` is the worker at its beginning. `ids` are the requests that arrive
    in it and are the worker's or let go, by arrival; flags and places count in this order. Those
    before the place `fixed` stay as they are, and so do those from `movable` on. `now` is the
    present plan with what comes of it, and `best` the best one so far.
    """

    def __init__(
        self, search: _Search, front: _Run, worker: int, home: Ints, knobs: Floats, first: int,
        last: int,
    ) -> None:  # fmt: skip
        self.search, self.worker = search, worker
        loop, order, s = search.loop, search.order, front.state[0]
        queue, decodes = front.lines[loop.QUEUE, : s.queued], front.lines[loop.DECODES, : s.decodes]
        late = front.lines[loop.LATE, : s.late]
        # Late requests without KV wait until all others are done, and so change nothing here.
        late = late[front.requests["holds"][late]]
        # Requests of other workers are left out; this one can neither serve nor take them.
        coming = order[first:last]
        self.ids = coming[(home[coming] == worker) | (home[coming] < 0)]
        self.release = search.instance.release[self.ids]
        whole = last == len(order)
        self.end = math.inf if whole else float(search.instance.release[order[last]])
        # Requests of the first two stretches may change. Later requests of the window only show
        # what a change leads to.
        last_movable = coming[-1] if whole else order[first + 2 * search.stretch]
        self.movable = int((self.release <= search.instance.release[last_movable]).sum())
        # The batches before have looked `ahead` at the first ones, so these stay as they are.
        seen = front.now + search.ahead if first > 0 else -math.inf
        self.fixed = int((self.release <= seen).sum())
        self.size = search.size[self.ids]

        # The window's rows of knobs begin one before its own: the worker may still use that one.
        first_row = max(0, first // search.stretch - 1)
        self.rows = slice(first_row, (last - 1) // search.stretch + 1)
        self.row = search.requests["row"][self.ids] - first_row
        knobs = knobs[self.rows].copy()

        # From here on those that are present come first, line by line, and then those that come.
        present = queue, decodes, late
        self.before = sum(map(len, present))
        numbers = np.concatenate((*present, self.ids))
        steps = np.maximum(1, search.instance.output_tokens - 1)  # without any there is no work
        self.step = (search.decodes / steps)[numbers]  # seconds of work per token
        self.order = np.arange(self.before, len(numbers))
        run = _renumber(front, numbers, [len(line) for line in present], first_row)
        gone = home[self.ids] < 0
        run.requests["late"][self.before :] = gone
        # Those who may still be in time: a run that counts ends when all of them have finished.
        run.state["pending"] = (~run.requests["late"]).sum()

        # A plan that was not run yet: who is late and how many is not known, and nobody asks.
        begun = _State(gone, gone, knobs, 0, [run])
        present_plan = self.try_plan(begun, gone, knobs, 0, math.inf)
        assert present_plan is not None  # nothing is above an infinite limit
        # Whoever is late under the first plan may as well be let go.
        self.now = self.best = self.let_late_go(present_plan)

    def try_plan(
        self, old: _State, gone: Flags, knobs: Floats, moment: int, max_late: float
    ) -> _State | None:
        """Run a plan from one of an old plan's moments on. Return what comes of it.

        None if its value is above `max_late`. Until that moment both plans are the same. `moment`
        is a place in ``old.moments``: the m-th is before request m * `_PART` in order of arrival.
        ``gone`` (who is let go) and ``knobs`` are the new plan's.
        """
        # Requests that have arrived by then are as they were. The new plan says who of the others
        # is let go, and so how many may still be in time.
        run = old.moments[moment].copy()
        arrived = int(run.state[0].arrived)
        run.requests["late"][self.before + arrived :] = gone[arrived:]
        run.state["pending"] += int(old.gone[arrived:].sum()) - int(gone[arrived:].sum())
        moments, gone_count = old.moments[: moment + 1], int(gone.sum())
        # An infinite limit is no integer, and no more than all can be late.
        max_lost = int(min(max_late, len(self.search.order))) - gone_count
        # After every part the run may be too bad already, and later runs may begin there. The last
        # part ends with the window.
        for place in range((moment + 1) * _PART, len(gone) + _PART, _PART):
            until = float(self.release[place]) if place < len(gone) else self.end
            self.search.run(run, self.order, knobs, until, max_lost)
            if gone_count + run.lost > max_late:
                return None
            if place < len(gone):
                moments.append(run.copy())

        value = gone_count + run.lost + self.backlog(run)
        if value > max_late:
            return None

        late = run.requests["late"][self.before :].copy()
        return _State(gone, late, knobs, value, moments)

    def backlog(self, run: _Run) -> float:
        """Return what the work that is left at the end counts for, in late requests.

        The window of the last request has no end: all of its work is done.
        """
        if math.isinf(self.end):
            return 0.0

        # A prefill has what is not cached, after an eviction tokens that were produced as well. It
        # makes a token itself, so there are at most output - 1 decodes, of `step` seconds each.
        r = run.requests
        uncached = np.maximum(0, r["prompt"] + r["produced"] - r["cached"])
        prefill = r["work"] * uncached / r["prompt"]
        decodes = self.step * np.minimum(r["output"] - r["produced"], r["output"] - 1)
        unfinished = ~r["late"] & (r["produced"] < r["output"]) & (r["release"] <= self.end)
        return _BACKLOG * float((prefill + decodes)[unfinished].sum())

    def last_moment_before(self, state: _State, changed: Ints) -> int:
        """Return the last of a plan's moments at which the loop has not looked at changed requests.

        `changed` are places in order of arrival. It looks `_Search.ahead` seconds into the future.
        Moment 0 will do for all: what was seen before it does not change (`fixed`).
        """
        if not len(changed):
            return 0

        until, moment = self.release[changed[0]] - self.search.ahead, 0
        while moment + 1 < len(state.moments) and state.moments[moment + 1].now < until:
            moment += 1

        return moment

    def let_late_go(self, state: _State) -> _State:
        """Return a plan in which those who are late anyway are let go, if it is no worse."""
        gone = state.late.copy()
        # The batches before have looked ahead at the first ones, so these stay as they are.
        gone[: self.fixed] = state.gone[: self.fixed]
        changed = np.flatnonzero(gone != state.gone)
        if not len(changed):
            return state

        moment = self.last_moment_before(state, changed)
        return self.try_plan(state, gone, state.knobs, moment, state.value) or state

    def improve(self, steps: int, enough: int, budget: Budget) -> None:
        """Change something again and again, and keep what is better, or now and then worse.

        `enough`: it ends with so many in time, if the window has all requests.
        """
        for _ in range(steps):
            done = self.best.value <= len(self.search.order) - enough
            # Enough are in time, or all (the backlog adds a part of a request): nothing better can
            # come.
            if done or self.best.value < 1 or budget.over:
                return

            draws = self.search.generator.random(4)
            gone, knobs = self.now.gone, self.now.knobs
            if draws[0] < _TUNED:
                knobs, row = self.change_a_knob(knobs)
                changed = np.flatnonzero(self.row >= row)
            else:
                gone = self.change_who_goes(gone, draws[1:])
                changed = np.flatnonzero(gone != self.now.gone)

            # An exponential random number of late requests more is accepted, with the mean `_HEAT`.
            limit = self.now.value - _HEAT * math.log(1.0 - self.search.generator.random())
            moment = self.last_moment_before(self.now, changed)
            state = self.try_plan(self.now, gone, knobs, moment, limit)
            if state is not None:
                self.now = self.let_late_go(state)
                if self.now.value < self.best.value:
                    self.best = self.now

    def change_a_knob(self, knobs: Floats) -> tuple[Floats, int]:
        """Change a knob in one row, or from it on. Return a copy of the knobs, and the row."""
        generator, knobs = self.search.generator, knobs.copy()
        # The row of a random request that may change.
        first, k = int(generator.choice(self.row[: self.movable])), generator.integers(len(_RANGES))
        rows = slice(first, first + 1 if generator.random() < 0.5 else None)
        # From `MIXED` on knobs are switches: 0 and 1 change places. Those before change by a random
        # factor. The very last knob, `trust`, is never drawn, since `_RANGES` ends before it: it
        # stays 1, as lengths are known.
        if k >= self.search.loop.MIXED:
            knobs[rows, k] = 1.0 - knobs[first, k]
        else:
            factor = math.exp(_SPREAD * generator.standard_normal())
            knobs[rows, k] = np.clip(knobs[first, k] * factor, *_RANGES[k])

        return knobs, first

    def change_who_goes(self, gone: Flags, draws: Floats) -> Flags:
        """Return who is let go if one is taken back, and most often a large one near it goes.

        `draws`: three random numbers in [0, 1), which decide between the kinds of changes.
        """
        generator, gone = self.search.generator, gone.copy()
        could_return = self.fixed + np.flatnonzero(gone[self.fixed : self.movable])
        back = -1  # nobody
        if len(could_return):
            # A small one most often: it costs the least to serve.
            small = (generator.random(len(could_return)) * self.size[could_return]).argmin()
            any_one = int(draws[2] * len(could_return))
            back = int(could_return[small if draws[0] < 0.7 else any_one])
            gone[back] = False

        # Who goes instead is near the one taken back, or, where nobody is, anywhere.
        middle = back if back >= 0 else int(draws[2] * self.movable)
        first = max(self.fixed, middle - _NEAR)
        near = first + np.flatnonzero(~gone[first : min(self.movable, middle + _NEAR + 1)])
        near = near[near != back]
        # Who goes instead: most often a large one, at times any one. Else nobody goes, and now and
        # then a second one is taken back.
        if len(near) and (back < 0 or draws[1] < 0.6):
            gone[near[(generator.random(len(near)) * self.size[near]).argmax()]] = True
        elif len(near) and draws[1] < 0.75:
            gone[near[int(generator.integers(len(near)))]] = True
        elif draws[1] < 0.85 and len(could_return) > 1:
            gone[could_return[int(generator.integers(len(could_return)))]] = False

        return gone

    def write(self, home: Ints, knobs: Floats) -> None:
        """Write into a plan who is let go of those of whom the window decides, and the knobs."""
        decided = self.ids[: self.movable]
        home[decided] = np.where(self.best.gone[: self.movable], -1, self.worker)
        knobs[self.rows] = self.best.knobs
