"""Few requests in rounds: good schedules, and bounds that are refined until they meet.

Schedules come from two searches: annealing over orders (`orders`), and a part of an enumeration
(`finish`), which walks the graphs of `optsched.optimize.ramp.relaxation` backward in time, guided
by their costs to the end. Good schedules come first, since they decide how much of the next graph
can be deleted. Floors are made exact from the largest down (`optsched.optimize.ramp.climb`). Where
the bound is close, schedules are enumerated. A second thread (`second_thread`) looks for schedules
and enumerates the last graph, while the first one builds the next. With one thread the work is
deterministic from the seed unless a time limit ends it. Import this module lazily: it loads numba.
"""

import math
import sys
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import Ints, TooLarge
from optsched.optimize.ramp.climb import CLOCKED_SHARE, Climb, Ladder, count_multisets
from optsched.optimize.ramp.graph import Interrupted
from optsched.optimize.ramp.jobs import Jobs, max_completed_by, needed_clock, periods, refusal
from optsched.optimize.ramp.refine import RATE, TOO_LARGE, TOO_LONG, Proof, Refinement, Session
from optsched.optimize.ramp.relaxation import MAX_NODES, Relaxation
from optsched.optimize.ramp.second_thread import HELPED, Helper, look
from optsched.optimize.ramp.tuning import MEASURED, Tuning
from optsched.optimize.search.orders import CHUNK, Annealing, anneal, in_line
from optsched.problem.budget import work_time
from optsched.problem.instance import Instance

# The max length of annealing's array of rounds.
_MAX_ROUNDS = 10**7
# The share of the nodes for the first graphs with a clock, with the coarsest usual floors.
_CLOCK_PART = 0.03
# The factor by which a clock is shortened at a time.
_SHORTER = 0.85
# The max number of orders that annealing tries before the first graph.
_FIRST_ORDERS = 2_000_000

Report = Callable[[int, int], None]


def prove(
    jobs: Jobs,
    *,
    rng: np.random.Generator,
    deadline: float,
    stop: NDArray[np.int8],
    report: Report | None = None,
    starts: Ints | None = None,
    gap: float = 0.0,
    threads: int = 1,
    tuning: Tuning = MEASURED,
) -> Proof:
    """Bound one busy period from both sides until the bounds meet or time is up.

    `starts`: a known schedule, in the period's own time. `report` is given the best bound and the
    best value in rounds, whenever one of them improves. The work ends once both are apart by at
    most the part `gap` of the value. With 2 `threads` and a deadline, one looks for schedules
    unless annealing is soon done. `tuning` says how large graphs may be, and how many orders
    annealing tries at a time.
    """
    # Annealing has an array of all rounds. Without it there is a plain schedule and no search.
    if jobs.rounds > _MAX_ROUNDS:
        line = in_line(jobs)
        known = line if starts is None or jobs.total(line) < jobs.total(starts) else starts
        return Proof.known(jobs, known, "too long a time axis")

    annealing = Annealing(jobs, rng, starts)
    proof = Proof.known(jobs, annealing.starts)
    lock, reported = threading.Lock(), [-1, sys.maxsize]  # the best bound and value so far

    def tell(bound: int, value: int) -> None:
        """Report an improvement. Both threads call it."""
        with lock:
            if bound > reported[0] or value < reported[1]:
                reported[:] = max(bound, reported[0]), min(value, reported[1])
                if report is not None:
                    report(reported[0], reported[1])

    # A schedule 1 % above the optimum costs far more time in graphs that are pruned less. Orders in
    # which it is found become rare with n.
    orders = int(6 * CHUNK * (jobs.n / 12) ** 4)
    session = Session(proof, annealing, deadline, stop, gap, tell)
    if threads == 1 or deadline == math.inf or orders <= tuning.orders:
        _prove(session, min(orders, _FIRST_ORDERS), tuning)
        return proof

    with Helper(annealing, deadline, stop, tell) as helper:
        # The helper's flag is set for `stop` too, and when its own bound and schedule meet.
        session.stop, session.helper = helper.halt, helper
        # It looks for schedules too, so this thread tries few orders.
        _prove(session, tuning.orders // HELPED, tuning)

    session.update()  # what the second thread has found in the end
    return proof


def _prove(session: Session, orders: int, tuning: Tuning) -> None:
    """Improve a proof until its bounds meet or time is up.

    Annealing tries `orders` orders first. ``proof.note`` says why the refinement ended.
    """
    proof, annealing, jobs = session.proof, session.annealing, session.annealing.jobs
    stop, deadline = session.stop, session.deadline
    session.update()
    if session.over() or jobs.n == 1:  # one request alone: its output is the bound
        return

    # At most a tenth of the time goes to annealing before the first graph.
    begin = work_time()
    anneal(annealing, orders, min(deadline, begin + 0.1 * (deadline - begin)), stop)
    session.update()
    proof.note = refusal(jobs)

    # Without a relaxation the time goes to schedules; without a limit there is no end to that.
    if proof.note:
        while not session.over() and deadline < math.inf:
            anneal(annealing, 100 * CHUNK, deadline, stop)
            session.update()

        return

    max_nodes = min(MAX_NODES, RATE * session.left)  # those that there is time to build
    try:
        clock = _first_clock(session, max_nodes, tuning)
        needed = needed_clock(jobs)
    except Interrupted:
        proof.note = "stopped"
        return

    tried: set[int] = set()
    # With a shorter clock the graph is smaller and says less; where time was not the limit, the
    # clock that arrivals need is tried next.
    while clock not in tried:
        tried.add(clock)
        # `value` is its first target, `proof.bound` the bound so far, and `update` is told of more.
        value, update = annealing.value, session.update
        relaxation = Relaxation(jobs, value, stop, proof.bound, clock, update, tuning)
        try:
            proof.note = Refinement(relaxation, session).run()
        except Interrupted:
            proof.note = "stopped"
        except TooLarge:
            proof.note = TOO_LARGE

        session.update(relaxation)
        if session.over():
            break
        # If time was the limit, the same clock ends the loop.
        if proof.note != TOO_LONG:
            clock = needed

    # Nothing is left to refine: the time that is left goes to schedules.
    while proof.note and not session.over() and deadline < math.inf:
        look(annealing, deadline, stop)
        session.update(relaxation)


def _first_clock(session: Session, max_nodes: float, tuning: Tuning) -> int:
    """Return the first clock to refine with.

    It is the longest that takes a small part of the nodes, or a shorter one that says nearly as
    much in coarse graphs.
    """
    jobs, value, stop = session.annealing.jobs, session.annealing.value, session.stop
    # The states are those of the coarsest usual floors, with each request as a kind of its own.
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones_like(top), jobs.capacity, stop)
    # By length of the clock, the number of pairs (t, m) in which m requests can have completed by
    # round t. No clock needs to be longer than `needed_clock`.
    pairs = np.cumsum(max_completed_by(jobs, needed_clock(jobs)) + 1)
    nodes = CLOCKED_SHARE * pairs * states
    # Both only grow with the clock, so the rounds within the limits are the first ones, and round 0
    # is among them.
    clock = int(((pairs <= tuning.whole_clock) | (nodes <= _CLOCK_PART * max_nodes)).sum()) - 1
    # Such a clock costs little: there is nothing to gain by a shorter one.
    if pairs[clock] <= tuning.whole_clock or nodes[clock] <= tuning.clocked_nodes:
        return clock

    # Shorter and shorter clocks are tried in graphs of the floors that a refinement begins with.
    coarse = Relaxation(jobs, value, stop, horizon=clock, tuning=tuning)
    ladder = Ladder(coarse)
    floors = ladder.steps[Climb(coarse, ladder).plan(max_nodes, value)[0]]
    lowest = -math.inf  # a shorter clock may not lead to a lower bound

    while clock and not session.over():
        try:
            coarse.use_floors(floors)
        except TooLarge:
            break

        coarse.ascend()
        if coarse.graph_bound < lowest:
            break

        # This clock says enough. The next one may say a little less than the best so far.
        lowest = max(lowest, coarse.graph_bound - tuning.lost * value)
        clock, pi = coarse.clock, coarse.pi
        # The multipliers are nearly the best for the next, shorter clock.
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
    starts: Ints | None = None,
    gap: float = 0.0,
    threads: int = 1,
    tuning: Tuning = MEASURED,
) -> list[Proof]:
    """Bound every busy period of an instance in rounds, whose limits on batches are ignored.

    Each period has an equal share of the time that is left. `starts`: a known schedule. `report` is
    given the sums of bounds and values over all periods. Other arguments go to `prove`; the gap
    holds for each period by itself.
    """
    flag = np.zeros(1, dtype=np.int8) if stop is None else stop
    deadline = work_time() + time_limit_s
    rng, proofs = np.random.default_rng(seed), []
    for jobs in periods(instance):
        known = in_line(jobs)
        if starts is not None:
            # In the period's own time, which begins with its first arrival.
            known = starts[jobs.index] - instance.release_times[jobs.index] + jobs.arrival

        proofs.append(Proof.known(jobs, known))

    for k, proof in enumerate(proofs):
        now = work_time()
        # Periods that are not begun keep the bound of their outputs.
        if now >= deadline or flag[0]:
            break

        # What is reported is of all periods: this one, and the others as they stand.
        other_bounds = sum(p.bound for p in proofs) - proof.bound
        other_values = sum(p.value for p in proofs) - proof.value

        # Defaults, since a closure would see the numbers of a later period.
        def tell(bound: int, value: int, b: int = other_bounds, v: int = other_values) -> None:
            if report is not None:
                report(b + bound, v + value)

        proofs[k] = prove(
            proof.jobs,
            rng=rng,
            deadline=now + (deadline - now) / (len(proofs) - k),
            stop=flag,
            report=tell,
            starts=None if starts is None else proof.starts,
            gap=gap,
            threads=threads,
            tuning=tuning,
        )

    return proofs
