"""Few requests in rounds: good schedules, and bounds that are refined until they meet.

Schedules come from two searches: annealing over orders (`orders`), and a part of an enumeration
(`finish`), which walks the graphs of `optsched.optimize.ramp.relaxation` backward in time, guided
by their costs to the end. Good schedules come first, since they decide how much of the next graph
can be deleted. Floors are made exact from the largest down (`optsched.optimize.ramp.floors`). Where
the bound is close, schedules are enumerated. A second thread (`second_thread`) looks for schedules
and enumerates the last graph, while the first one builds the next. With one thread the work is
deterministic from the seed unless a time limit ends it. Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import TooLarge
from optsched.optimize.ramp.climb import CLOCKED_SHARE, Climb
from optsched.optimize.ramp.floors import Ladder, count_multisets
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.jobs import Jobs, max_completed_by, needed_clock, periods
from optsched.optimize.ramp.kinds import unsupported
from optsched.optimize.ramp.refine import RATE, TOO_LARGE, TOO_LONG, Proof, Refinement
from optsched.optimize.ramp.relaxation import MAX_NODES, Relaxation
from optsched.optimize.ramp.second_thread import MOST_ORDERS, Helper, look
from optsched.optimize.ramp.tuning import MEASURED, Tuning
from optsched.optimize.search.orders import CHUNK, Annealing, anneal, in_line
from optsched.problem.budget import work_time
from optsched.problem.instance import Instance

_MAX_ROUNDS = 10**7
"""The max length of annealing's array of rounds."""
_CLOCK_PART = 0.03
"""The share of the nodes for the first graphs with a clock, with the coarsest usual floors."""
_SHORTER = 0.85
"""The factor by which a clock is shortened at a time."""
_FIRST_ORDERS = 2_000_000
"""The max number of orders that annealing tries before the first graph."""
_HELPED = 10
"""The divisor of the first thread's orders if a second thread looks for schedules too."""

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
    tuning: Tuning = MEASURED,
) -> Proof:
    """Bound one busy period from both sides until the bounds meet or time is up.

    `threads`: with 2 or more and a deadline, a second thread looks for schedules unless annealing
    is soon done.
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
    orders = int(6 * CHUNK * (jobs.n / 12) ** 4)
    if threads == 1 or deadline == math.inf or orders <= MOST_ORDERS:
        orders, end = min(orders, _FIRST_ORDERS), _End(deadline, stop, gap)
        _prove(proof, annealing, orders, None, end, tell, tuning)
        return proof

    with Helper(annealing, deadline, stop, tell) as helper:
        end = _End(deadline, helper.halt, gap)
        _prove(proof, annealing, MOST_ORDERS // _HELPED, helper, end, tell, tuning)

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


class _End(NamedTuple):
    """When to end: see `prove`."""

    deadline: float
    stop: NDArray[np.int8]
    gap: float


def _prove(
    proof: Proof,
    annealing: Annealing,
    orders: int,
    helper: Helper | None,
    end: _End,
    tell: Report,
    tuning: Tuning,
) -> None:
    """Improve a proof until its bounds meet or time is up."""
    jobs, (deadline, stop, gap) = annealing.jobs, end

    def over() -> bool:
        return bool(
            stop[0]
            or work_time() >= deadline
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

    begin = work_time()
    anneal(annealing, orders, min(deadline, begin + 0.1 * (deadline - begin)), stop)
    update()
    proof.note = unsupported(jobs)

    if proof.note:
        while not over() and deadline < math.inf:
            anneal(annealing, 100 * CHUNK, deadline, stop)
            update()

        return

    room = min(MAX_NODES, RATE * (deadline - work_time()))
    try:
        clock = _clock(jobs, room, annealing.value, stop, over, tuning)
        needed = needed_clock(jobs)
    except Interrupted:
        proof.note = "stopped"
        return

    tried: set[int] = set()
    while clock not in tried:
        tried.add(clock)
        relaxation = Relaxation(jobs, annealing.value, stop, proof.bound, clock, update, tuning)
        try:
            proof.note = Refinement(
                relaxation, proof, annealing, helper, over, update, search, deadline
            ).run()
        except Interrupted:
            proof.note = "stopped"
        except TooLarge:
            proof.note = TOO_LARGE

        update(relaxation)
        if over():
            break
        if proof.note != TOO_LONG:
            clock = needed

    while proof.note and not over() and deadline < math.inf:
        look(annealing, deadline, stop)
        update(relaxation)


def _clock(
    jobs: Jobs,
    room: float,
    value: int,
    stop: NDArray[np.int8],
    over: Callable[[], bool],
    tuning: Tuning = MEASURED,
) -> int:
    """Return the first clock to refine with.

    It is the longest that takes a small part of the room, or a shorter one that says nearly as much
    in coarse graphs. ``value`` is that of the known schedule, and ``over`` says when to end.
    """
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones_like(top), jobs.capacity, stop)
    pairs = np.cumsum(max_completed_by(jobs, needed_clock(jobs)) + 1)
    nodes = CLOCKED_SHARE * pairs * states
    clock = int(((pairs <= tuning.whole_clock) | (nodes <= _CLOCK_PART * room)).sum()) - 1
    if pairs[clock] <= tuning.whole_clock or nodes[clock] <= tuning.clocked_nodes:
        return clock

    coarse = Relaxation(jobs, value, stop, horizon=clock, tuning=tuning)
    ladder = Ladder(coarse)
    floors = ladder.steps[Climb(coarse, ladder).plan(room, value)[0]]
    least = -math.inf

    while clock and not over():
        try:
            coarse.use_floors(floors)
        except TooLarge:
            break

        coarse.ascend()
        if coarse.graph_bound < least:
            break

        least = max(least, coarse.graph_bound - tuning.lost * value)
        clock, pi = coarse.clock, coarse.pi
        coarse = Relaxation(jobs, value, stop, horizon=int(_SHORTER * clock), tuning=tuning)
        coarse.pi = pi

    return clock


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
    tuning: Tuning = MEASURED,
) -> list[Proof]:
    """Bound every busy period of an instance in rounds. The sums are those of the instance.

    `instance`: in rounds. Its limits on batches are ignored: the bounds hold, but schedules may
    break them.
    """
    flag = np.zeros(1, dtype=np.int8) if stop is None else stop
    deadline = work_time() + time_limit_s
    parts = periods(instance)
    rng = np.random.default_rng(seed)
    proofs: list[Proof] = []

    for jobs in parts:
        given = None
        if starts is not None:
            given = starts[jobs.index] - instance.release_times[jobs.index] + jobs.arrival

        line = in_line(jobs) if given is None else given
        proofs.append(Proof(jobs, line, jobs.total(line), int(jobs.output.sum())))

    for k, jobs in enumerate(parts):
        now = work_time()
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
            tuning=tuning,
        )

    return proofs
