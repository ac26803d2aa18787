"""Few requests in rounds: good schedules, and bounds that are refined until they meet.

Schedules come from four searches: annealing over orders (`orders`), CP-SAT neighbourhoods
(`neighbourhood`), a beam search (`beam`) and a part of an enumeration (`finish`). The last two walk
the graphs of `optsched.optimize.ramp.relaxation` backward in time, guided by their costs to the
end. Good schedules come first, since they decide how much of the next graph can be deleted. Floors
are made exact from the largest down (`optsched.optimize.ramp.floors`). Where the bound is close,
schedules are enumerated. A second thread (`second_thread`) looks for schedules and enumerates the
last graph, while the first one builds the next. With one thread the work is
deterministic from the seed unless a time limit ends it. Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.ramp.beam import beam
from optsched.optimize.ramp.climb import CLOCKED_SHARE, Climb
from optsched.optimize.ramp.finish import LABELS_PER_S, WIDER, finish, reach, refused, samples
from optsched.optimize.ramp.floors import Ladder, count_multisets
from optsched.optimize.ramp.graph import Interrupted, TooLargeError
from optsched.optimize.ramp.jobs import Jobs, most_completed, needed_clock, periods
from optsched.optimize.ramp.relaxation import MAX_NODES, Level, Relaxation, unsupported
from optsched.optimize.ramp.second_thread import MOST_ORDERS, Helper, look
from optsched.optimize.search.orders import CHUNK, Annealing, anneal, in_line
from optsched.problem.instance import Instance

_MAX_ROUNDS = 10**7
"""The max length of annealing's array of rounds."""
_LARGE = 4_000_000
"""A graph with more nodes is large. It is pruned before its multipliers are improved, and its time
predicts that of larger graphs."""
_RATE = 1_500_000.0
"""Nodes per second for building, ascent and search, until they are measured."""
_BUDGET = 32_000_000
"""The initial budget: the max nodes of a graph before the target is lowered."""
_RAISE = 3.0
"""The factor by which the budget is raised once a target is proved or out of reach."""
_LAST = 10.0
"""If the time left allows less than this factor, the next raise is the last and uses all of it."""
_WORTH = 1.3
"""The min factor of the budget for which it is worth beginning again."""
_NEARLY = 1.25
"""The known value is the target if it is at most so many times as far as the next target."""
_NEXT = 0.6
"""The share of the time left for the next graph, since others follow."""
_STEEPER = 1.2
"""A factor of the measured slope, since the logarithm of the nodes is convex in the target."""
_FURTHER = 0.1
"""The first raise of the target for a budget of `_RAISE`, as a share of the gap at that point."""
_CAREFUL = 0.8
"""The share of the time left that is planned, since larger graphs take longer per node."""
_WHOLE_CLOCK = 600
"""A clock is not shortened if it has at most so many (t, m) pairs."""
_CLOCK_PART = 0.03
"""The share of the nodes for the first graphs with a clock, with the coarsest usual floors."""
_ARCS_PER_ORDER = 80
"""After each level, annealing tries at most one order per so many arcs."""
_SEARCHED = 0.15
"""The max time of this annealing, as a share of the level's."""
_FIRST_ORDERS = 2_000_000
"""The max number of orders that annealing tries before the first graph."""
_HELPED = 10
"""The divisor of the first thread's orders if a second thread looks for schedules too."""
_CLOSE = 0.025
"""Below this gap to the target schedules are enumerated, until there are too many labels."""
_LABELS, _NODES_PER_LABEL = 3_000, 20
"""There may be so many labels, and one more per so many nodes that the graph was built with."""
_NEAR = 0.05
"""Below this gap to the known schedule a share of the labels is followed to find a better one."""
_FOLLOWED = 0.3
"""The time for it, as a share of that for a graph, and of what is left after the last graph."""
_TOO_LONG = "the next graph would take too long"
_TOO_LARGE = "the next graph would be too large"
_NO_MORE = "nothing is left to refine"


@dataclass(eq=False)
class Proof:
    """What is known of one busy period.

    Attributes
    ----------
    value : int
        The total latency of ``starts``, in rounds.
    bound : int
        The bound on the total latency, in rounds.
    denominator : int
        The denominator of the multipliers.
    levels : sequence of Level
        The chain that proves the bound (`optsched.optimize.ramp.relaxation.ramp_leaf`).
    note : str
        The reason why the refinement ended.
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
        A time of `time.perf_counter`.
    stop : ndarray of int8, shape (1,)
        Another thread sets it to 1 to interrupt the work.
    report : callable, optional
        Called with bound and value whenever one of them improves.
    starts : ndarray of int64, shape (n,), optional
        A feasible schedule.
    gap : float
        Relative gap at which to stop.
    threads : int
        With 2 or more and a deadline, a second thread looks for schedules unless annealing is
        soon done.

    Returns
    -------
    Proof
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
        """Report an improvement. Both threads call it."""
        with lock:
            if bound > told[0] or value < told[1]:
                told[:] = max(bound, told[0]), min(value, told[1])
                if report is not None:
                    report(told[0], told[1])

    # A schedule 1 % above the optimum costs far more time in graphs that are pruned less.
    orders = int((24 if jobs.arrival.any() else 6) * CHUNK * (jobs.n / 12) ** 4)
    if threads == 1 or deadline == math.inf or orders <= MOST_ORDERS:
        _prove(proof, annealing, min(orders, _FIRST_ORDERS), None, deadline, stop, tell, gap)
        return proof
    with Helper(annealing, deadline, stop, tell) as helper:
        _prove(proof, annealing, MOST_ORDERS // _HELPED, helper, deadline, helper.halt, tell, gap)
    _take(proof, helper.relaxation)
    annealing.offer(helper.annealing.starts)
    proof.starts, proof.value = annealing.starts, annealing.value
    tell(proof.bound, proof.value)
    return proof


def _take(proof: Proof, relaxation: Relaxation | None) -> None:
    """Take a relaxation's bound if it is the best."""
    if relaxation is not None and relaxation.bound > proof.bound:
        proof.bound, proof.levels = relaxation.bound, relaxation.levels
        proof.denominator, proof.clock = relaxation.scale, relaxation.clock


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
        if helper is not None:
            _take(proof, helper.relaxation)
            if helper.annealing.value < annealing.value:
                annealing.offer(helper.annealing.starts)
        if relaxation is not None:
            while relaxation.found:
                annealing.offer(relaxation.found.pop())
            relaxation.offer(annealing.value)
            _take(proof, relaxation)
        proof.starts, proof.value = annealing.starts, annealing.value
        tell(proof.bound, proof.value)

    def search(orders: int, until: float) -> None:
        """Look for schedules, but less if another thread does so too."""
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
            proof.note = _refine(
                relaxation, proof, annealing, helper, over, update, search, deadline
            )
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
    """Return the first clock to refine with, the longest that takes a small part of the room."""
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones_like(top), jobs.capacity, stop)
    pairs = np.cumsum(most_completed(jobs, needed_clock(jobs)) + 1)
    few = (pairs <= _WHOLE_CLOCK) | (CLOCKED_SHARE * pairs * states <= _CLOCK_PART * room)
    return int(few.sum()) - 1


def _refine(
    first: Relaxation,
    proof: Proof,
    annealing: Annealing,
    helper: Helper | None,
    over: Callable[[], bool],
    update: Callable[[Relaxation], None],
    search: Callable[[int, float], None],
    deadline: float,
) -> str:
    """Prove one target after another. Return why the last one is not the known value.

    The lower the target, the smaller is the graph of the paths below it. If the next graph would
    exceed a budget of nodes, the target is lowered. Once the target is proved or out of reach, the
    budget is raised. Refinement then begins again at the graph where the target was first lowered.
    """
    clock = time.perf_counter
    rate, budget, timely = _RATE, float(min(_BUDGET, MAX_NODES)), math.inf
    base = climb = Climb(first, Ladder(first))
    proved: list[tuple[int, int]] = []  # targets, and the nodes that it took
    first_raise, start = 0, clock()
    begin, built = start, 0

    def lower(nodes: float) -> bool:
        """Lower the target until at most ``nodes`` remain. Return whether it is worth proving.

        It is not if enumeration of the present graph should reach it in the time that is left.
        """
        nonlocal climb, first_raise, begin, built
        relaxation = climb.relaxation
        if climb is base:
            first_raise = max(1, int(_FURTHER * (proof.value - first.bound)))
        target = relaxation.target(nodes)
        labels = LABELS_PER_S * (deadline - clock()) / 2 if timely < budget else 0.0
        if target <= max(proof.bound, reach(relaxation, labels)):
            return False
        if climb is base:
            climb = base.fork()
            begin, built = clock(), climb.nodes  # the next target begins here, too
        relaxation = climb.relaxation
        relaxation.offer(target)
        relaxation.prune()
        relaxation.ascend()  # on fewer paths other multipliers are best, and delete more
        relaxation.prune()
        update(relaxation)
        return True

    def settle() -> None:
        """Use a new graph: improve multipliers, delete, and look for schedules."""
        nonlocal rate
        relaxation, nodes = climb.relaxation, climb.nodes
        update(relaxation)
        if over() or relaxation.closed:
            return
        while True:
            if relaxation.graph.nodes > _LARGE:
                relaxation.prune()
            large = relaxation.graph.nodes > _LARGE
            middle = (relaxation.graph_bound + relaxation.upper + 1) // 2
            relaxation.ascend(until=middle if large else None)
            update(relaxation)
            if over() or relaxation.closed:
                return
            if not large or relaxation.graph_bound < middle:
                break
        if nodes >= _LARGE:
            rate = nodes / (clock() - start)
        if relaxation.upper >= annealing.value:
            beam(relaxation, annealing, 300)
            update(relaxation)
            if relaxation.gap < _NEAR:
                follow_some(relaxation, _FOLLOWED * (clock() - start))
        orders = min(MOST_ORDERS, relaxation.graph.arcs // _ARCS_PER_ORDER)
        search(orders, min(deadline, clock() + _SEARCHED * (clock() - start)))
        update(relaxation)
        relaxation.prune()
        if relaxation.gap < _CLOSE and not over():
            enumerate_(nodes)

    def follow_some(relaxation: Relaxation, seconds: float) -> None:
        """Follow parts of the labels for a good schedule, for so many seconds beside the tables."""
        if relaxation.closed or relaxation.counted or refused(relaxation):
            return
        found = samples(relaxation, over)
        next(found)
        begin = before = clock()
        for starts in found:
            if starts is not None:
                annealing.offer(starts)
                update(relaxation)
            now = clock()
            if over() or now + WIDER * (now - before) > begin + seconds:
                break
            before = now
        relaxation.prune()

    def enumerate_(nodes: int) -> None:
        """Prove targets by enumeration."""
        relaxation = climb.relaxation
        if relaxation.upper >= annealing.value and not relaxation.counted and helper is not None:
            helper.post(relaxation)
        at_end = 0.0  # a second thread goes on to the end anyway
        if helper is None:
            next_s = climb.plan(min(budget, MAX_NODES))[1] * nodes / rate
            at_end = LABELS_PER_S * min(next_s, deadline - clock())
        finish(relaxation, _LABELS + nodes // _NODES_PER_LABEL, over, at_end)
        update(relaxation)

    def use_up() -> None:
        """Enumerate for the rest of the time."""
        for part in (climb,) if climb is base or helper is not None else (climb, base):
            relaxation = part.relaxation
            relaxation.offer(annealing.value)
            relaxation.bound = max(relaxation.bound, proof.bound)
            if helper is not None and part is base:
                continue  # the second thread does so
            if not over() and part.rung >= 0 and relaxation.gap < _CLOSE:
                relaxation.prune()
                follow_some(relaxation, _FOLLOWED * (deadline - clock()))
                finish(relaxation, LABELS_PER_S * (deadline - clock()), over)
                update(relaxation)

    while True:
        begin, built = clock(), climb.nodes
        while not over() and not climb.ended:
            timely = max(0.0, _NEXT * rate * (deadline - clock()))
            room = min(budget, MAX_NODES, timely)
            to, growth = climb.plan(room)
            if growth * climb.nodes > room:
                if not lower(room / growth):
                    break
                continue
            start = clock()
            try:
                climb.take(to, int(2 * room) if growth else MAX_NODES)
            except TooLargeError:
                if not lower(climb.nodes / 3):
                    break
                continue
            if climb.relaxation.graph is not None:
                built += climb.nodes
                settle()
        if over():
            return ""
        if climb.relaxation.closed:
            proved.append((climb.relaxation.upper, built))
        elif climb.ended:
            return _NO_MORE
        elif timely < budget:
            use_up()
            return _TOO_LONG
        elif budget >= MAX_NODES:
            return _TOO_LARGE
        else:
            first_raise = (first_raise + 1) // 2
        factor = _CAREFUL * (deadline - clock()) / (clock() - begin)
        if factor < _WORTH:
            use_up()
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
    """Return the raise of the target for ``factor`` times the nodes, from the earlier targets."""
    slope = math.log(_RAISE) / first
    if len(proved) > 1:
        (before, few), (last, many) = proved[-2:]
        slope = max(slope / 2, _STEEPER * math.log(many / few) / (last - before))
    return max(1, int(math.log(factor) / slope))


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
    """Bound every busy period of an instance in rounds. The sums are those of the instance.

    Parameters
    ----------
    instance : Instance
        In rounds. Its limits on batches are ignored: the bounds hold, but schedules may break them.
    seed : int
    time_limit_s : float
        Wall-clock seconds.
    stop : ndarray of int8, shape (1,), optional
        See `prove`.
    report : callable, optional
        See `prove`; the values are sums over all periods.
    starts : ndarray of int64, shape (n,), optional
        A feasible schedule of the instance.
    gap : float
        See `prove`.
    threads : int
        See `prove`.

    Returns
    -------
    list of Proof
        One per busy period, in order of time.
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
