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
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.timeline import Floats, Ints
from optsched.judge.evaluate import evaluate
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
# Of so many late requests a worse state has less than e^-1 of a chance.
_HEAT = 0.3
# How often a knob is changed, and by what factor about.
_TUNED, _SPREAD = 0.15, 0.25
# What a second of work that is left at the end of a window counts for, in late requests.
_BACKLOG = 1.0
# Changes in a window the first time, and then twice as many each time.
_STEPS = 150
# Turns of the loop; seconds for a search without a limit.
_TURNS, _USUAL_S = 1 << 40, 20.0
# The knobs that are tried first, and the ranges of all, in the order of the loop.
_USUAL = EdfDecode(
    urgent=0.3,
    piece=0.5,
    share=0.6,
    floor=0.25,
    behind=0.5,
    smallest=0.1,
    lump=0.04,
    load=1.0,
    drop=False,
    trust=1.0,
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
    """What a run of the loop gave.

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
    """Return the schedule with the most requests within their SLOs that was found.

    The search ends when `enough` are in time, or when a share of its time brought nothing. `start`
    is what was found at another rate: who is let go at first, and who is where.
    """
    if not quick_to_search(problem.instance):
        return None

    search = _Search(problem, seed, budget, tell)
    search.enough = problem.instance.n if enough is None else enough
    search.begin(start)
    steps = _STEPS
    while search.best is not None and not search.over:
        search.sweep(steps)
        steps *= 2

    return search.best


class _Run(NamedTuple):
    """A worker at a moment: its requests, its state and its lines."""

    requests: Any
    state: Any
    lines: Ints

    def copy(self) -> "_Run":
        """Return a moment of its own, since the loop changes arrays in place."""
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
    """Runs of the loop on one instance, and the best of them."""

    def __init__(
        self, problem: Problem, seed: int, budget: Budget, tell: Callable[[Served], object] | None
    ) -> None:
        from optsched.policies.engine import common, deadlines as loop

        self.problem, self.budget, self.tell = problem, budget, tell
        instance, cost, workers = problem.instance, problem.cost_model, problem.workers
        self.instance, self.workers = instance, workers
        told = predict(instance, "oracle")
        self.job = Job(told, instance, cost, 0, "edf-decode", fleet=problem.hardware).on(0)
        self.requests = requests_of(self.job)
        self.limits, self.slos = limits_for(self.job, "recompute"), all_limits(told, None)
        first = np.minimum(self.slos["slo_ttft"], self.slos["slo_latency"])
        self.ahead = float(first[np.isfinite(first)].max(initial=1.0))
        self.generator = np.random.default_rng(seed)
        ones = np.ones_like(instance.output_tokens)
        self.prefill = own_work(instance.prompt_tokens, ones, cost)
        self.decodes = own_work(instance.prompt_tokens, instance.output_tokens, cost) - self.prefill
        self.size = self.prefill + _DECODES * self.decodes
        self.order = np.lexsort((np.arange(instance.n), instance.release))
        self.stretch = _MOVE * workers
        self.requests["row"][self.order] = np.arange(instance.n) // self.stretch
        self.rows = (instance.n - 1) // self.stretch + 1
        self.common, self.loop, self.compiled = common, loop, common.skip_type_checks(loop.run)
        columns, room = common.new_columns(instance), 4 * instance.n + (1 << 16)
        self.columns = columns._replace(
            entries=np.empty((2, room), np.int32), evicted=np.empty(room, np.int64)
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
        self, at: _Run, order: Ints, knobs: Floats, until: float, max_lost: int, columns: Any = None
    ) -> Any:
        """Go on in place, up to a time or until more are lost; return the columns if they count."""
        own = self.columns if columns is None else columns
        counts = columns is None
        settings = self.loop.Settings(knobs, self.ahead, max_lost, counts)
        state = at.state
        while True:
            state["turns"] = _TURNS
            worker = self.common.Worker(
                self.limits, self.job.cost.array, order, until, own, order[:0], at.lines
            )
            self.compiled(at.requests, state, worker, settings)
            if state[0].turns > 0:
                return own
            if counts:  # what was written is not needed
                for name in ("batches", "entries", "evicted", "settled"):
                    state[name] = 0
            else:
                own = self.common.with_room(own, state[0], len(order), len(order))

    def fresh(self, home: Ints, worker: int) -> _Run:
        """Return a worker before the first arrival."""
        requests = self.requests.copy()
        requests["late"] = home != worker
        state = self.common.new_state(self.loop.STATE_FIELDS, self.instance)
        state["pending"] = (home == worker).sum()
        return _Run(requests, state, np.empty((3, self.instance.n + 1), dtype=np.int64))

    def count(self, home: Ints, knobs: Floats) -> int:
        """Return how many are late if some are let go."""
        late = int((home < 0).sum())
        for worker in range(self.workers):
            one = self.fresh(home, worker)
            self.run(one, self.order, knobs, math.inf, self.instance.n)
            late += one.lost

        return late

    def serve(self, home: Ints, knobs: Floats) -> None:
        """Run the loop to the end of all, and keep the schedule if it is the best."""
        common, parts = self.common, []
        for worker in range(self.workers):
            one = self.fresh(home, worker)
            others = np.where(home < 0, np.arange(len(home)) % self.workers, home) != worker
            order = self.order[~others[self.order]]
            columns = self.run(
                one, order, knobs, math.inf, self.instance.n, common.new_columns(self.instance)
            )
            try:
                part = common.part_of(self.job, one.requests, one.state, columns, split=True)
            except LoopError:
                return

            parts.append(part)

        whole = replace(self.job, fleet=self.problem.hardware)
        schedule = joined(whole, "recompute", parts)
        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            good = served_well(evaluate(self.problem, schedule))

        assert good is not None
        found = Served(schedule, good, home, knobs)
        if self.best is None or found.total > self.best.total:
            self.best, self.improved_at = found, work_time()
            if self.tell is not None:
                self.tell(found)

    def begin(self, start: Served | None) -> None:
        """Begin with what is known, or with what a machine without batches lets go."""
        homes = self.homes()
        known = [] if start is None else [(start.home, start.knobs)]
        known.append((homes, np.repeat(self.first_knobs()[0][None], self.rows, axis=0)))
        for factor in _FACTORS:
            gone = self.without_batches(factor)
            for row in self.first_knobs():
                known.append((np.where(gone, -1, homes), np.repeat(row[None], self.rows, axis=0)))

        late = []
        for home, knobs in known:
            # To count the late takes no schedule, and only the best of all is worth one.
            late.append(self.count(home, knobs))
            if self.instance.n - late[-1] >= self.enough or self.budget.over:
                break

        self.serve(*known[int(np.argmin(late))])

    def first_knobs(self) -> list[Floats]:
        """Return the knobs that are tried first."""
        policy = EdfDecode(trust=1.0, floor=0.3, share=0.5, smallest=0.2)
        # Batches of prefills and decodes, for machines that do both at once about as quickly.
        step = float(np.median(np.minimum(self.slos["slo_tpot"], self.slos["slo_gap"])))
        piece = _MIXED * min(step, 1.0)
        mixed = replace(policy, mixed=True, urgent=5.0, piece=piece, lump=piece / 3, reserve=0.2)
        evicts = replace(mixed, urgent=0.5, load=0.6, reserve=0.1, evict=_SPARE)
        usual = (replace(_USUAL, reserve=x) for x in (1.0, 0.5))
        return [p.row for p in (policy, mixed, evicts, replace(policy, evict=_SPARE), *usual)]

    def homes(self) -> Ints:
        """Return the worker of each request: the one with the least work left when it comes."""
        free = np.zeros(self.workers)
        home = np.zeros(self.instance.n, dtype=np.int64)
        work = (self.prefill + self.decodes).tolist()
        # With one worker all are at home there.
        for i in self.order.tolist() if self.workers > 1 else []:
            home[i] = w = int(free.argmin())
            free[w] = max(free[w], self.instance.release[i]) + work[i]

        return home

    def without_batches(self, factor: float) -> Flags:
        """Return whom to let go so that all others are in time on a machine without batches."""
        from optsched.optimize.search.on_time_kernel import let_go

        slos = self.slos
        first = np.minimum(slos["slo_ttft"], slos["slo_latency"])
        step = np.minimum(slos["slo_tpot"], slos["slo_gap"])
        steps = self.instance.output_tokens - 1
        rest = np.where(steps > 0, step * np.maximum(steps, 1), 0.0)
        last = np.minimum(slos["slo_latency"], first + rest)
        release, share = self.instance.release, factor / self.workers
        dues = release + first, release + last
        return np.asarray(let_go(release, *dues, share * self.prefill, share * self.decodes))

    def window_end(self, first: int) -> int:
        """Return where a window ends; the last one may be longer."""
        last = first + _WINDOW * self.workers
        return last if last + self.stretch < self.instance.n else self.instance.n

    def sweep(self, steps: int) -> None:
        """Change who is let go and how the loop is tuned, window by window."""
        assert self.best is not None
        home, knobs = self.best.home.copy(), self.best.knobs.copy()
        fronts = [self.fresh(home, worker) for worker in range(self.workers)]
        n = self.instance.n
        for row in range(self.rows):
            first = row * self.stretch
            last = self.window_end(first)
            for worker in range(self.workers):
                window = _Window(self, fronts[worker], worker, home, knobs, first, last)
                windows = 1 if last == n else self.rows - row
                budget = self.budget.part(1.0 / (windows * self.workers))
                window.improve(steps, self.enough if last - first == n else n, budget)
                other, others = home.copy(), knobs.copy()
                window.write(other, others)
                if last < n:  # what it leads to may come later
                    further = self.window_end(last)
                    plans = ((home, knobs), (other, others))
                    was, now = (
                        _Window(self, fronts[worker], worker, *plan, first, further).best.value
                        for plan in plans
                    )
                    if now > was:
                        continue

                home, knobs = other, others

            if last == n or self.budget.over:
                break

            until = float(self.instance.release[self.order[first + self.stretch]])
            for worker, one in enumerate(fronts):
                # What was decided holds from here on, for those whom others took back as well.
                one.requests["late"][self.order[first:]] = home[self.order[first:]] != worker
                one.state["pending"] = n
                self.run(one, self.order, knobs, until, n)

        self.serve(home, knobs)


class _State(NamedTuple):
    """Who is let go of a window's requests, who is late in the end, the knobs, how many are late,
    and moments at which a run can begin."""

    late: Flags
    lost: Flags
    knobs: Floats
    value: float
    moments: list[_Run]


class _Window:
    """A stretch of the trace on one worker, with what it has to do at its beginning."""

    def __init__(
        self, search: _Search, begin: _Run, worker: int, home: Ints, knobs: Floats, first: int,
        last: int,
    ) -> None:  # fmt: skip
        self.search, self.worker = search, worker
        loop, order, s = search.loop, search.order, begin.state[0]
        queue, decodes = begin.lines[loop.QUEUE, : s.queued], begin.lines[loop.DECODES, : s.decodes]
        late = begin.lines[loop.LATE, : s.late]
        late = late[begin.requests["holds"][late]]
        coming = order[first:last]
        self.ids = coming[(home[coming] == worker) | (home[coming] < 0)]
        self.release = search.instance.release[self.ids]
        whole = last == len(order)
        self.end = math.inf if whole else float(search.instance.release[order[last]])
        # Later requests of the window only show what a change leads to.
        movable = coming[-1] if whole else order[first + 2 * search.stretch]
        self.movable = int((self.release <= search.instance.release[movable]).sum())
        # What is done already looked at those that come soon.
        seen = begin.now + search.ahead if first > 0 else -math.inf
        self.fixed = int((self.release <= seen).sum())
        self.size = search.size[self.ids]
        self.row = search.requests["row"][self.ids] - max(0, first // search.stretch - 1)

        present = np.concatenate((queue, decodes, late))
        self.before = len(present)
        requests = begin.requests[np.concatenate((present, self.ids))]
        self.rows = slice(max(0, first // search.stretch - 1), (last - 1) // search.stretch + 1)
        requests["row"] -= self.rows.start
        knobs = knobs[self.rows].copy()
        state, lines = begin.state.copy(), np.empty((3, len(requests) + 1), dtype=np.int64)
        steps = np.maximum(1, search.instance.output_tokens - 1)
        self.step = (search.decodes / steps)[np.concatenate((present, self.ids))]
        place = 0
        for line, members in enumerate((queue, decodes, late)):
            lines[line, : len(members)] = np.arange(place, place + len(members))
            place += len(members)

        for name in ("arrived", "batches", "entries", "evicted", "settled", "lost"):
            state[name] = 0

        state["row"] = max(0, int(state[0].row) - self.rows.start)
        state["late"], state["done"] = len(late), -self.before
        self.order = np.arange(self.before, len(requests))
        gone = home[self.ids] < 0
        requests["late"][self.before :] = gone
        state["pending"] = (~requests["late"]).sum()
        begun = _State(gone, gone, knobs, 0, [_Run(requests, state, lines)])
        found = self.outcome(begun, gone, knobs, 0, math.inf)
        assert found is not None
        self.now = self.best = self.without_lost(found)

    def outcome(
        self, old: _State, late: Flags, knobs: Floats, part: int, max_late: float
    ) -> _State | None:
        """Return what comes of letting some go, from one of the moments on. None: too many late."""
        one = old.moments[part].copy()
        arrived = int(one.state[0].arrived)
        one.requests["late"][self.before + arrived :] = late[arrived:]
        one.state["pending"] += int(old.late[arrived:].sum()) - int(late[arrived:].sum())
        moments, gone = old.moments[: part + 1], int(late.sum())
        max_lost = int(min(max_late, len(self.search.order)))
        # After every part the run may be too bad already, and later runs may begin there.
        for at in range((part + 1) * _PART, len(late) + _PART, _PART):
            until = float(self.release[at]) if at < len(late) else self.end
            self.search.run(one, self.order, knobs, until, max_lost - gone)
            if gone + one.lost > max_late:
                return None
            if at < len(late):
                moments.append(one.copy())

        value = gone + one.lost + self.backlog(one)
        if value > max_late:
            return None

        lost = one.requests["late"][self.before :].copy()
        return _State(late, lost, knobs, value, moments)

    def backlog(self, one: _Run) -> float:
        """Return what the work that is left at the end counts for, in late requests."""
        if math.isinf(self.end):
            return 0.0

        r = one.requests
        prefill = r["work"] * np.maximum(0, r["prompt"] + r["produced"] - r["cached"]) / r["prompt"]
        decodes = self.step * np.minimum(r["output"] - r["produced"], r["output"] - 1)
        open_ones = ~r["late"] & (r["produced"] < r["output"]) & (r["release"] <= self.end)
        return _BACKLOG * float((prefill + decodes)[open_ones].sum())

    def part_before(self, state: _State, changed: Ints) -> int:
        """Return the last of the moments that requests do not touch, seen from afar or not."""
        if not len(changed):
            return 0

        until, part = self.release[changed[0]] - self.search.ahead, 0
        while part + 1 < len(state.moments) and state.moments[part + 1].now < until:
            part += 1

        return part

    def without_lost(self, found: _State) -> _State:
        """Return a state in which those who are late anyway are let go, if it is no worse."""
        late = found.lost.copy()
        # The batches before have looked ahead at the first ones, so these stay as they are.
        late[: self.fixed] = found.late[: self.fixed]
        changed = np.flatnonzero(late != found.late)
        if not len(changed):
            return found

        part = self.part_before(found, changed)
        return self.outcome(found, late, found.knobs, part, found.value) or found

    def improve(self, steps: int, enough: int, budget: Budget) -> None:
        """Change something again and again, and keep what is better, or now and then worse."""
        for _ in range(steps):
            done = self.best.value <= len(self.search.order) - enough
            # Enough are in time, or all: nothing better can come.
            if done or self.best.value < 1 or budget.over:
                return

            u = self.search.generator.random(4)
            late, knobs = self.now.late, self.now.knobs
            if u[0] < _TUNED:
                knobs, row = self.tuned(knobs)
                part = self.part_before(self.now, np.flatnonzero(self.row >= row))
            else:
                late = self.changed(late, u[1:])
                part = self.part_before(self.now, np.flatnonzero(late != self.now.late))

            limit = self.now.value - _HEAT * math.log(1.0 - self.search.generator.random())
            found = self.outcome(self.now, late, knobs, part, limit)
            if found is not None:
                self.now = self.without_lost(found)
                if self.now.value < self.best.value:
                    self.best = self.now

    def tuned(self, knobs: Floats) -> tuple[Floats, int]:
        """Return knobs of which one is another, in a stretch or from it on, and the first row."""
        generator, knobs = self.search.generator, knobs.copy()
        first, k = int(generator.choice(self.row[: self.movable])), generator.integers(len(_RANGES))
        rows = slice(first, first + 1 if generator.random() < 0.5 else None)
        if k >= self.search.loop.MIXED:
            knobs[rows, k] = 1.0 - knobs[first, k]
        else:
            factor = math.exp(_SPREAD * generator.standard_normal())
            knobs[rows, k] = np.clip(knobs[first, k] * factor, *_RANGES[k])

        return knobs, first

    def changed(self, late: Flags, u: Floats) -> Flags:
        """Return whom to let go if one is taken back, and another let go, or not."""
        generator, late = self.search.generator, late.copy()
        gone = self.fixed + np.flatnonzero(late[self.fixed : self.movable])
        back = -1
        if len(gone):
            smallest = (generator.random(len(gone)) * self.size[gone]).argmin()
            back = int(gone[smallest] if u[0] < 0.7 else gone[int(u[2] * len(gone))])
            late[back] = False

        middle = back if back >= 0 else int(u[2] * self.movable)
        first = max(self.fixed, middle - _NEAR)
        near = first + np.flatnonzero(~late[first : min(self.movable, middle + _NEAR + 1)])
        near = near[near != back]
        if len(near) and (back < 0 or u[1] < 0.6):
            late[near[(generator.random(len(near)) * self.size[near]).argmax()]] = True
        elif len(near) and u[1] < 0.75:
            late[near[int(generator.integers(len(near)))]] = True
        elif u[1] < 0.85 and len(gone) > 1:
            late[gone[int(generator.integers(len(gone)))]] = False

        return late

    def write(self, home: Ints, knobs: Floats) -> None:
        """Write down who is let go of those of whom the window decides, and the knobs."""
        mine = self.ids[: self.movable]
        home[mine] = np.where(self.best.late[: self.movable], -1, self.worker)
        knobs[self.rows] = self.best.knobs
