"""Few requests in rounds: good schedules, and bounds refined until they meet.

Schedules come from annealing over orders (`orders`), from a beam search that walks the graphs of
`optsched.bounds.ramp` backward in time, guided by what they say about the rest (`beam`), and from
CP-SAT neighbourhoods (`neighbourhood`). Good schedules first: they decide how much of the next
graph can be deleted. Floors are made exact from the largest down (`optsched.bounds.ramp_floors`).
A second thread looks for schedules all the time (`helper`), and the first one is left to the
graphs. With one thread deterministic from the seed, but for what a time limit cuts off. Import
lazily: it loads numba.
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

from optsched.bounds.ramp import (
    MAX_NODES,
    Jobs,
    Level,
    Relaxation,
    most_completed,
    needed_clock,
    periods,
    unsupported,
)
from optsched.bounds.ramp_floors import Ladder, count_multisets
from optsched.bounds.ramp_graph import Interrupted, TooLargeError
from optsched.instance import Instance
from optsched.search.beam import beam
from optsched.search.helper import MOST_ORDERS, Helper, look
from optsched.search.orders import CHUNK, Annealing, anneal, in_line

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
_FAR = 0.03
"""Gap above which deletion makes no graph smaller than its states say."""
_MOST_HOPE = 3.0
"""Estimated nodes, over what memory allows, beyond which a graph is not tried."""
_NEAR = 0.02
"""Gap below which wide beams are worth their time."""
_CLOCKED_SHARE = 0.35
"""Share of (t, m) pairs times multisets that are nodes, as measured on Poisson arrivals."""
_WHOLE_CLOCK = 600
"""Pairs of a round with a clock and a number of requests up to which no clock is shortened."""
_CLOCK_PART = 0.03
"""Part of the nodes that the first graphs with a clock may take with the coarsest usual floors."""
_LEAST_CLOCK = 20
"""Rounds with a clock of which none is given up for larger graphs."""
_EARLY = 0.25
"""Part of the time within which another clock is tried."""
_ARCS_PER_ORDER = 80
"""Annealing after each level tries one order per so many arcs: a tenth of the level's time."""
_HELPED = 10
"""The first thread tries so many times fewer orders where a second one does nothing else."""
_TOO_LONG = "the next graph would take too long"
_TOO_LARGE = "the next graph would be too large"


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
        What proves the bound (`optsched.bounds.ramp.ramp_leaf`).
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
    clock, needed = _clock(jobs, _room(deadline, _RATE)), needed_clock(jobs)
    tried: set[int] = set()
    while clock not in tried:
        tried.add(clock)
        relaxation = Relaxation(jobs, annealing.value, stop, proof.bound, clock, update)
        try:
            proof.note = ""
            if not _refine(relaxation, annealing, over, update, search, deadline):
                proof.note = _TOO_LONG
            elif relaxation.graph is not None and not over():
                proof.note = _TOO_LARGE
        except Interrupted:
            proof.note = "stopped"
        except TooLargeError:
            proof.note = _TOO_LARGE
        update(relaxation)
        if over():
            break
        if proof.note == _TOO_LONG:
            # A shorter clock, if there still is time for larger graphs with it.
            if clock < _LEAST_CLOCK or time.perf_counter() > begin + _EARLY * (deadline - begin):
                break
            clock = clock * 3 // 4
        else:
            clock = needed
    while proof.note and not over() and deadline < math.inf:
        look(annealing, deadline, stop)
        update(relaxation)


def _clock(jobs: Jobs, room: float) -> int:
    """Return the clock to refine with first: the longest that takes a small part of the room."""
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones_like(top), jobs.capacity)
    clock = pairs = 0
    for t in range(needed_clock(jobs) + 1):
        pairs += most_completed(jobs, t) + 1
        if pairs <= _WHOLE_CLOCK or _CLOCKED_SHARE * pairs * states <= _CLOCK_PART * room:
            clock = t
    return clock


def _refine(
    relaxation: Relaxation,
    annealing: Annealing,
    over: Callable[[], bool],
    update: Callable[[Relaxation], None],
    search: Callable[[int, float], None],
    deadline: float,
) -> bool:
    """Refine to the end; return whether that is where it stopped, and not where time is better
    spent on schedules."""
    clock = time.perf_counter

    def settle() -> None:
        """Spend what a new graph is worth: multipliers, schedules, deletion."""
        update(relaxation)
        if over():
            return
        if relaxation.graph.nodes > _LARGE:
            relaxation.prune()
        relaxation.ascend()
        update(relaxation)
        if over():
            return
        for width in (300, 3000) if relaxation.gap < _NEAR else (300,):
            before = annealing.value
            beam(relaxation, annealing, width)
            update(relaxation)
            if over() or annealing.value < before:
                break
        orders = min(MOST_ORDERS, relaxation.graph.arcs // _ARCS_PER_ORDER)
        search(orders, deadline)
        update(relaxation)
        relaxation.prune()
        update(relaxation)

    ladder = Ladder(relaxation)
    step, last = -1, len(ladder.steps) - 1
    rate, share = _RATE, 1.0
    while step < last and not over() and relaxation.graph is not None:
        room = _room(deadline, rate)
        if step < 0:
            size = min(_FIRST, room / 4)
            to = min(last, ladder.finest(0, size / _first_nodes(relaxation)))
        else:
            have = relaxation.graph.nodes
            per_state = share * have / ladder.states(step)
            to = ladder.finest(step + 1, min(room, max(_FIRST, _GROWTH * have)) / per_state)
            to = min(last, to)
            size = per_state * ladder.states(to)
            # The smaller the gap, the more is deleted of what the states make one expect.
            hope = max(1.0, _FAR / relaxation.gap)
            if size > hope * rate * (deadline - clock()):
                return False
            if size > min(hope, _MOST_HOPE) * MAX_NODES:
                break
        start = clock()
        try:
            relaxation.use_floors(ladder.steps[to])
        except TooLargeError:
            last = to - 1
            if last < 0:
                raise
            continue
        if relaxation.graph is None:
            return True
        after = relaxation.graph.nodes
        if step >= 0:
            share *= after / size
        settle()
        if after >= _LARGE:
            rate = after / (clock() - start)
        step = to
    _count_all(relaxation, over, settle)
    return True


def _first_nodes(relaxation: Relaxation) -> float:
    """Return about how many nodes there are per state."""
    r = relaxation
    pairs = sum(most_completed(r.jobs, t) + 1 for t in range(r.clock + 1) if r.clock)
    return r.jobs.n + _CLOCKED_SHARE * pairs


def _room(deadline: float, rate: float) -> float:
    """Return how many nodes memory and time allow."""
    return min(MAX_NODES, rate * (deadline - time.perf_counter()))


def _count_all(
    relaxation: Relaxation, over: Callable[[], bool], settle: Callable[[], None]
) -> None:
    """Count kinds, those that paths place most wrongly first, until none is left."""
    kinds = _COUNTERS
    while not over() and relaxation.graph is not None:
        order = np.argsort(-relaxation.violation, kind="stable").tolist()
        left = [k for k in order if k not in relaxation.counted]
        if not left:
            return
        try:
            relaxation.count(left[:kinds])
        except TooLargeError:
            if kinds == 1:
                raise
            kinds = 1
            continue
        settle()


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
