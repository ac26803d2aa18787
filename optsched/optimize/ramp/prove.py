"""Few requests in rounds: good schedules, and bounds refined until they meet.

Schedules come from annealing over orders (`orders`), from a beam search that walks the graphs of
`optsched.optimize.ramp.relaxation` backward in time, guided by what they say about the rest
(`beam`), and from CP-SAT neighbourhoods (`neighbourhood`). Good schedules first: they decide how
much of the next graph can be deleted. Floors are made exact from the largest down
(`optsched.optimize.ramp.floors`). A second thread looks for schedules all the time (`helper`), and
the first one is left to the graphs. With one thread deterministic from the seed, but for what a
time limit cuts off. Import lazily: it loads numba.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.beam import beam
from optsched.optimize.ramp.floors import Ladder, count_multisets
from optsched.optimize.ramp.graph import Interrupted, TooLargeError
from optsched.optimize.ramp.relaxation import (
    MAX_NODES,
    Jobs,
    Level,
    Relaxation,
    most_completed,
    needed_clock,
    periods,
    unsupported,
)
from optsched.optimize.ramp.second_thread import MOST_ORDERS, Helper, look
from optsched.optimize.search.orders import CHUNK, Annealing, anneal, in_line
from optsched.problem.instance import Instance

_MAX_ROUNDS = 10**7
"""Longest time axis that annealing keeps an array of."""
_COUNTERS = 3
"""Kinds that get counters at a time."""
_GROWTH = 8.0
"""By how much the nodes of a graph should grow from one step of the ladder to the next."""
_FIRST = 1_000_000
"""Nodes up to which a graph is made without smaller ones before."""
_LARGE = 4_000_000
"""Nodes beyond which some are deleted before the multipliers are improved, and which say how long
larger graphs take."""
_RATE = 800_000.0
"""Nodes per second that are built, ascended and searched, until measured."""
_BUDGET = 8_000_000
"""Nodes of a graph up to which no target is set."""
_IF_NEAR = 4.0
"""How many times as many they may be below the gap `_NEAR`."""
_RAISE = 3.0
"""By how much that is raised, once a target is proved or out of reach."""
_LAST = 10.0
"""Raise by which there is no time for another one: then all of the time is spent at once."""
_WORTH = 1.3
"""Raise that is worth beginning again."""
_NEARLY = 1.25
"""How many times as far the value may be for it to be the target."""
_NEXT = 0.6
"""Part of the time left that the next graph may take: others follow."""
_STEEPER = 1.2
"""The logarithm of the nodes is convex in the target."""
_FURTHER = 0.1
"""Part of the gap where the target was first lowered by which it is raised first, for `_RAISE`."""
_CAREFUL = 0.8
"""Part of the time left that is planned for, larger graphs taking longer per node."""
_CAUTION = 1.5
"""By how much more graphs of a higher target may grow at the same step."""
_NEAR = 0.02
"""Gap below which a proof is near: wide beams and large graphs are worth their time."""
_CLOCKED_SHARE = 0.35
"""Share of (t, m) pairs times multisets that are nodes, as measured on Poisson arrivals."""
_WHOLE_CLOCK = 600
"""Pairs of a round with a clock and a number of requests up to which no clock is shortened."""
_CLOCK_PART = 0.03
"""Part of the nodes that the first graphs with a clock may take with the coarsest usual floors."""
_ARCS_PER_ORDER = 80
"""Annealing after each level tries one order per so many arcs: a tenth of the level's time."""
_HELPED = 10
"""The first thread tries so many times fewer orders where a second one does nothing else."""
_TOO_LONG = "the next graph would take too long"
_TOO_LARGE = "the next graph would be too large"
_NO_MORE = "nothing is left to refine"


@dataclass(eq=False)
class Proof:
    """What is known of one busy period.

    Attributes
    ----------
    value : int
        Total latency of ``starts``.
    bound : int
    denominator : int
    levels : sequence of Level
        What proves the bound (`optsched.optimize.ramp.relaxation.ramp_leaf`).
    note : str
        Why the refinement ended.
    """

    jobs: Jobs
    starts: NDArray[np.int64]
    value: int
    bound: int
    denominator: int = 1
    clock: int = 0
    levels: Sequence[Level] = ()
    note: str = ""


Report = Callable[[int, int], None]


def prove(
    jobs: Jobs,
    *,
    rng: np.random.Generator,
    deadline: float,
    stop: NDArray[np.int8],
    report: Report | None = None,
    starts: NDArray[np.int64] | None = None,
    gap: float = 0.0,
    threads: int = 1,
) -> Proof:
    """Bound one busy period from both sides until the bounds meet or time is up.

    Parameters
    ----------
    jobs : Jobs
    rng : numpy.random.Generator
    deadline : float
        Of `time.perf_counter`.
    stop : ndarray of int8, shape (1,)
        Interrupts when set to 1 by another thread.
    report : callable, optional
        Called with bound and value whenever one has improved.
    starts : ndarray of int64, optional
        A feasible schedule.
    gap : float
        Relative gap at which to stop.
    threads : int
        With 2 or more and a deadline, the second one looks for schedules where annealing is not
        soon done.
    """
    outputs = int(jobs.output.sum())
    if jobs.rounds > _MAX_ROUNDS:
        line = in_line(jobs)
        if starts is None or jobs.total(line) < jobs.total(starts):
            starts = line
        return Proof(jobs, starts, jobs.total(starts), outputs, note="too long a time axis")
    annealing = Annealing(jobs, rng, starts)
    proof = Proof(jobs, annealing.starts, annealing.value, outputs)
    lock, told = threading.Lock(), [-1, sys.maxsize]

    def tell(bound: int, value: int) -> None:
        """Report what has improved, from either thread."""
        with lock:
            if bound > told[0] or value < told[1]:
                told[:] = max(bound, told[0]), min(value, told[1])
                if report is not None:
                    report(told[0], told[1])

    # A schedule 1 % too long costs far more in the graphs that it fails to prune.
    orders = int((24 if jobs.arrival.any() else 6) * CHUNK * (jobs.n / 12) ** 4)
    if threads == 1 or deadline == math.inf or orders <= MOST_ORDERS:
        _prove(proof, annealing, min(orders, MOST_ORDERS), None, deadline, stop, tell, gap)
        return proof
    with Helper(annealing, deadline, stop, lambda value: tell(proof.bound, value)) as helper:
        _prove(proof, annealing, MOST_ORDERS // _HELPED, helper, deadline, stop, tell, gap)
    annealing.offer(helper.annealing.starts)
    proof.starts, proof.value = annealing.starts, annealing.value
    tell(proof.bound, proof.value)
    return proof


def _prove(
    proof: Proof,
    annealing: Annealing,
    orders: int,
    helper: Helper | None,
    deadline: float,
    stop: NDArray[np.int8],
    tell: Report,
    gap: float,
) -> None:
    """Improve a proof until its bounds meet or time is up."""
    jobs = annealing.jobs

    def over() -> bool:
        return bool(
            stop[0]
            or time.perf_counter() >= deadline
            or proof.value - proof.bound <= gap * proof.value
            or (helper is not None and helper.error is not None)
        )

    def update(relaxation: Relaxation | None = None) -> None:
        if helper is not None and helper.annealing.value < annealing.value:
            annealing.offer(helper.annealing.starts)
        if relaxation is not None:
            while relaxation.found:
                annealing.offer(relaxation.found.pop())
            relaxation.offer(annealing.value)
            if relaxation.bound > proof.bound:
                proof.bound = relaxation.bound
                proof.levels, proof.denominator = relaxation.levels, relaxation.scale
                proof.clock = relaxation.clock
        proof.starts, proof.value = annealing.starts, annealing.value
        tell(proof.bound, proof.value)

    def search(orders: int, until: float) -> None:
        """Look for schedules; less if another thread does."""
        anneal(annealing, orders if helper is None else orders // _HELPED, until, stop)

    update()
    if over() or jobs.n == 1:
        return
    begin = time.perf_counter()
    anneal(annealing, orders, min(deadline, begin + 0.1 * (deadline - begin)), stop)
    update()
    proof.note = unsupported(jobs)
    if proof.note:
        while not over() and deadline < math.inf:
            anneal(annealing, 100 * CHUNK, deadline, stop)
            update()
        return
    room = min(MAX_NODES, _RATE * (deadline - time.perf_counter()))
    try:
        clock, needed = _clock(jobs, room, stop), needed_clock(jobs)
    except Interrupted:
        proof.note = "stopped"
        return
    tried: set[int] = set()
    while clock not in tried:
        tried.add(clock)
        relaxation = Relaxation(jobs, annealing.value, stop, proof.bound, clock, update)
        try:
            proof.note = _refine(relaxation, proof, annealing, over, update, search, deadline)
        except Interrupted:
            proof.note = "stopped"
        except TooLargeError:
            proof.note = _TOO_LARGE
        update(relaxation)
        if over():
            break
        if proof.note != _TOO_LONG:
            clock = needed
    while proof.note and not over() and deadline < math.inf:
        look(annealing, deadline, stop)
        update(relaxation)


def _clock(jobs: Jobs, room: float, stop: NDArray[np.int8]) -> int:
    """Return the clock to refine with first: the longest that takes a small part of the room."""
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones_like(top), jobs.capacity, stop)
    pairs = np.cumsum(most_completed(jobs, needed_clock(jobs)) + 1)
    few = (pairs <= _WHOLE_CLOCK) | (_CLOCKED_SHARE * pairs * states <= _CLOCK_PART * room)
    return int(few.sum()) - 1


@dataclass(eq=False)
class _Climb:
    """A relaxation on its way up the ladder of floors, then to counters.

    Parameters
    ----------
    relaxation : Relaxation
    ladder : Ladder
    grown : dict
        By what factor nodes grew at a step, the last time: shared among climbs.
    rung : int
        Step of the ladder, -1 before the first; more than the last where kinds are counted.
    share : float
        Nodes over what the states of the ladder make one expect.
    """

    relaxation: Relaxation
    ladder: Ladder
    grown: dict[tuple[int, int], float] = field(default_factory=dict)
    rung: int = -1
    share: float = 1.0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.relaxation.graph.nodes)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to refine."""
        r = self.relaxation
        return r.closed or r.graph is None or len(r.counted) == len(r.copies)

    def fork(self) -> _Climb:
        """Return another one that goes on from here."""
        return replace(self, relaxation=self.relaxation.fork())

    def plan(self, room: float) -> tuple[int, float]:
        """Return the next rung, and by what factor nodes should grow up to there."""
        r, ladder, rung = self.relaxation, self.ladder, self.rung
        last = len(ladder.steps) - 1
        if rung < 0:
            states = min(_FIRST, room / 4) / _first_nodes(r)
            return min(last, ladder.finest(0, states)), 0.0
        if rung < last:
            per_state = self.share * self.nodes / ladder.states(rung)
            states = min(room, max(_FIRST, _GROWTH * self.nodes)) / per_state
            to = ladder.finest(rung + 1, states)
            growth = per_state * ladder.states(to) / self.nodes
        else:
            to = rung + 1
            for kinds in range(min(_COUNTERS, len(r.copies) - len(r.counted)), 1, -1):
                if self.grown.get((rung, rung + kinds), 2.0**kinds) * self.nodes <= room:
                    to = rung + kinds
                    break
            growth = 2.0 ** (to - rung)
        return to, min(growth, _CAUTION * self.grown.get((rung, to), math.inf))

    def take(self, to: int, most: int) -> None:
        """Go to a rung.

        Raises
        ------
        Interrupted, TooLargeError
            Nothing has changed.
        """
        r, rung = self.relaxation, self.rung
        last, before = len(self.ladder.steps) - 1, self.nodes
        if rung < last:
            r.use_floors(self.ladder.steps[to], most)
        else:
            order = np.argsort(-r.violation, kind="stable").tolist()
            r.count([k for k in order if k not in r.counted][: to - rung], most)
        self.rung = to
        if r.graph is not None and rung >= 0:
            self.grown[rung, to] = self.nodes / before
            if to <= last:
                expected = self.ladder.states(to) / self.ladder.states(rung)
                self.share = self.nodes / before / expected


def _refine(
    first: Relaxation,
    proof: Proof,
    annealing: Annealing,
    over: Callable[[], bool],
    update: Callable[[Relaxation], None],
    search: Callable[[int, float], None],
    deadline: float,
) -> str:
    """Prove one target after another; return why the last one is not the value.

    A graph of the paths below a target is the smaller the lower the target is. Where the next one
    would exceed a budget of nodes, the target is lowered; when it is proved, or out of reach, the
    budget is raised, and refinement begins again where the target was first lowered.
    """
    clock = time.perf_counter
    rate, budget, timely = _RATE, float(min(_BUDGET, MAX_NODES)), math.inf
    base = climb = _Climb(first, Ladder(first))
    proved: list[tuple[int, int]] = []  # targets, and the nodes that it took
    first_raise = 0

    def lower(nodes: float) -> bool:
        """Lower the target until no more nodes are left; return whether it is worth proving."""
        nonlocal climb, first_raise
        if climb is base:
            climb = base.fork()
            first_raise = max(1, int(_FURTHER * (proof.value - first.bound)))
        target = climb.relaxation.target(nodes)
        if target <= proof.bound:
            return False
        climb.relaxation.offer(target)
        climb.relaxation.prune()
        return True

    def settle() -> None:
        """Spend what a new graph is worth: multipliers, schedules, deletion."""
        relaxation = climb.relaxation
        update(relaxation)
        if over() or relaxation.closed:
            return
        while True:
            if relaxation.graph.nodes > _LARGE:
                relaxation.prune()
            large = relaxation.graph.nodes > _LARGE
            middle = (relaxation.bound + relaxation.upper + 1) // 2
            relaxation.ascend(until=middle if large else None)
            update(relaxation)
            if over() or relaxation.closed:
                return
            if not large or relaxation.bound < middle:
                break
        if relaxation.upper >= annealing.value:
            for width in (300, 3000) if relaxation.gap < _NEAR else (300,):
                before = annealing.value
                beam(relaxation, annealing, width)
                update(relaxation)
                if over() or annealing.value < before:
                    break
        search(min(MOST_ORDERS, relaxation.graph.arcs // _ARCS_PER_ORDER), deadline)
        update(relaxation)
        relaxation.prune()
        update(relaxation)

    while True:
        begin, built = clock(), climb.nodes
        while not over() and not climb.ended:
            near = climb.relaxation.upper == annealing.value and climb.relaxation.gap < _NEAR
            timely = max(0.0, _NEXT * rate * (deadline - clock()))
            room = min(budget * (_IF_NEAR if near else 1.0), MAX_NODES, timely)
            to, growth = climb.plan(room)
            if growth * climb.nodes > room and not lower(room / growth):
                break
            start = clock()
            try:
                climb.take(to, int(2 * room) if growth else MAX_NODES)
            except TooLargeError:
                if not lower(climb.nodes / 3):
                    break
                continue
            if climb.relaxation.graph is not None:
                nodes = climb.nodes
                built += nodes
                settle()
                if nodes >= _LARGE:
                    rate = nodes / (clock() - start)
        if over():
            return ""
        if climb.relaxation.closed:
            proved.append((climb.relaxation.upper, built))
        elif climb.ended:
            return _NO_MORE
        elif timely < budget:
            return _TOO_LONG
        elif budget >= MAX_NODES:
            return _TOO_LARGE
        else:
            first_raise = (first_raise + 1) // 2
        factor = _CAREFUL * (deadline - clock()) / (clock() - begin)
        if factor < _WORTH:
            return _TOO_LONG
        factor = factor if factor < _LAST else _RAISE
        budget = min(MAX_NODES, factor * budget)
        climb = base.fork()
        further = _further(proved, factor, first_raise)
        if annealing.value > proof.bound + _NEARLY * further:
            climb.relaxation.offer(proof.bound + further)
        climb.relaxation.offer(annealing.value)
        climb.relaxation.prune()


def _further(proved: list[tuple[int, int]], factor: float, first: int) -> int:
    """Return by how much to raise the target for so many times the nodes, given earlier ones."""
    slope = math.log(_RAISE) / first
    if len(proved) > 1:
        (before, few), (last, many) = proved[-2:]
        slope = max(slope / 2, _STEEPER * math.log(many / few) / (last - before))
    return max(1, int(math.log(factor) / slope))


def _first_nodes(relaxation: Relaxation) -> float:
    """Return about how many nodes there are per state."""
    r = relaxation
    pairs = int((most_completed(r.jobs, r.clock) + 1).sum()) if r.clock else 0
    return r.jobs.n + _CLOCKED_SHARE * pairs


def prove_all(
    instance: Instance,
    *,
    seed: int = 0,
    time_limit_s: float = math.inf,
    stop: NDArray[np.int8] | None = None,
    report: Report | None = None,
    starts: NDArray[np.int64] | None = None,
    gap: float = 0.0,
    threads: int = 1,
) -> list[Proof]:
    """Bound every busy period of an instance in rounds; the sums are the instance's.

    Parameters
    ----------
    instance : Instance
        In rounds. Its limits are ignored: bounds hold, schedules may break them.
    seed : int
    time_limit_s : float
    stop, report, gap, threads
        See `prove`; the report's values are sums over all periods.
    starts : ndarray of int64, shape (n,), optional
        A feasible schedule of the instance.
    """
    flag = np.zeros(1, dtype=np.int8) if stop is None else stop
    deadline = time.perf_counter() + time_limit_s
    parts = periods(instance)
    rng = np.random.default_rng(seed)
    proofs: list[Proof] = []
    for jobs in parts:
        given = None
        if starts is not None:
            given = starts[jobs.index] - instance.arrival[jobs.index] + jobs.arrival
        line = in_line(jobs) if given is None else given
        proofs.append(Proof(jobs, line, jobs.total(line), int(jobs.output.sum())))
    for k, jobs in enumerate(parts):
        now = time.perf_counter()
        if now >= deadline or flag[0]:
            break
        bounds = sum(p.bound for p in proofs) - proofs[k].bound
        values = sum(p.value for p in proofs) - proofs[k].value

        def tell(bound: int, value: int, bounds: int = bounds, values: int = values) -> None:
            if report is not None:
                report(bounds + bound, values + value)

        proofs[k] = prove(
            jobs,
            rng=rng,
            deadline=now + (deadline - now) / (len(parts) - k),
            stop=flag,
            report=tell,
            starts=None if starts is None else proofs[k].starts,
            gap=gap,
            threads=threads,
        )
    return proofs
