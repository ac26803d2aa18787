"""Few requests in rounds: good schedules, and bounds refined until they meet.

Schedules come from annealing over orders (`orders`), from a beam search that walks the graphs of
`optsched.bounds.ramp` backward in time, guided by what they say about the rest (`beam`), and from
CP-SAT neighbourhoods (`neighbourhood`). Good schedules first: they decide how much of the next
graph can be deleted. Which floors the next graph has follows from how many states they have and
what they lose (`optsched.bounds.ramp_floors`). Deterministic from the seed, but for what a time
limit cuts off. Import lazily: it loads numba.
"""

from __future__ import annotations

import math
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
from optsched.bounds.ramp_floors import CLOCKED_SHARE, WORTH, Choice, Menu, count_multisets
from optsched.bounds.ramp_graph import Interrupted, TooLargeError
from optsched.instance import Instance
from optsched.search.beam import beam
from optsched.search.neighbourhood import improve
from optsched.search.orders import CHUNK, Annealing, anneal, in_line

_MOST_ORDERS = 600_000
"""Orders that annealing tries before the first graph; a tenth of the time at most."""
_MAX_ROUNDS = 10**7
"""Longest time axis that annealing keeps an array of."""
_COUNTERS = 3
"""Kinds that get counters at a time."""
_GROWTH = 20.0
"""By how much the nodes of a graph grow from one choice of floors to the next, at most."""
_FIRST = 1_000_000
"""Nodes of the first graph."""
_RATE = 300_000.0
"""Nodes per second that are built, ascended and searched, until measured."""
_TRIED = 1.25
"""Estimated nodes, per node that memory allows, beyond which a graph is not tried: the known
schedule deletes some."""
_NEARLY = 0.006
"""Gap below which a graph that takes too long, or counters, may close it before time is up."""
_LARGE = 8_000_000
"""Nodes up to which a graph is tried even if time seems too short: deletion may do wonders."""
_WHOLE_CLOCK = 600
"""Pairs of a round with a clock and a number of requests up to which no clock is shortened."""
_CLOCK_PART = 0.08
"""Part of the nodes that the first graphs with a clock may take with the coarsest usual floors."""
_ARCS_PER_ORDER = 80
"""Annealing after each level tries one order per so many arcs: a tenth of the level's time."""
_TOO_LONG = "the next graph would take too long"
_TOO_LARGE = "the next graph would be too large"
_NEIGHBOURHOODS_S = 1.0
"""Seconds of CP-SAT neighbourhoods after every `_MOST_ORDERS` when refining has ended."""


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
    """
    outputs = int(jobs.output.sum())
    if jobs.rounds > _MAX_ROUNDS:
        line = in_line(jobs)
        if starts is None or jobs.total(line) < jobs.total(starts):
            starts = line
        return Proof(jobs, starts, jobs.total(starts), outputs, note="too long a time axis")
    annealing = Annealing(jobs, rng, starts)
    proof = Proof(jobs, annealing.starts, annealing.value, outputs)

    def over() -> bool:
        return bool(
            stop[0]
            or time.perf_counter() >= deadline
            or proof.value - proof.bound <= gap * proof.value
        )

    def update(relaxation: Relaxation | None = None) -> None:
        before = proof.bound, proof.value
        if relaxation is not None:
            while relaxation.found:
                annealing.offer(relaxation.found.pop())
            relaxation.offer(annealing.value)
            if relaxation.bound > proof.bound:
                proof.bound = relaxation.bound
                proof.levels, proof.denominator = relaxation.levels, relaxation.scale
                proof.clock = relaxation.clock
        proof.starts, proof.value = annealing.starts, annealing.value
        if report is not None and (proof.bound, proof.value) != before:
            report(proof.bound, proof.value)

    update()
    if over() or jobs.n == 1:
        return proof
    begin = time.perf_counter()
    # A schedule 1 % too long costs far more in the graphs that it fails to prune.
    orders = int((24 if jobs.arrival.any() else 6) * CHUNK * (jobs.n / 12) ** 4)
    orders = min(orders, _MOST_ORDERS)
    anneal(annealing, orders, min(deadline, begin + 0.1 * (deadline - begin)), stop)
    update()
    proof.note = unsupported(jobs)
    if proof.note:
        while not over() and deadline < math.inf:
            anneal(annealing, 100 * CHUNK, deadline, stop)
            update()
        return proof
    short = _clock(jobs, _room(deadline, _RATE))
    for clock in dict.fromkeys((short, needed_clock(jobs))):
        relaxation = Relaxation(jobs, annealing.value, stop, proof.bound, clock)
        try:
            proof.note = ""
            if not _refine(relaxation, annealing, over, update, deadline):
                proof.note = _TOO_LONG
            elif relaxation.graph is not None and not over():
                proof.note = _TOO_LARGE
        except Interrupted:
            proof.note = "stopped"
        except TooLargeError:
            proof.note = _TOO_LARGE
        update(relaxation)
        if over() or proof.note == _TOO_LONG:
            break
    while proof.note and not over() and deadline < math.inf:
        anneal(annealing, _MOST_ORDERS, deadline, stop)
        part = min(deadline, time.perf_counter() + _NEIGHBOURHOODS_S)
        annealing.offer(improve(jobs, annealing.starts, rng=rng, deadline=part, stop=stop))
        update(relaxation)
    return proof


def _clock(jobs: Jobs, room: float) -> int:
    """Return the clock to refine with first: the longest that takes a small part of the room."""
    top = np.full(jobs.n, jobs.first_kv.max())
    states = count_multisets(jobs.peak, top, np.ones(jobs.n, dtype=np.int64), jobs.capacity)
    clock = pairs = 0
    for t in range(needed_clock(jobs) + 1):
        pairs += most_completed(jobs, t) + 1
        if pairs <= _WHOLE_CLOCK or CLOCKED_SHARE * pairs * states <= _CLOCK_PART * room:
            clock = t
    return clock


def _refine(
    relaxation: Relaxation,
    annealing: Annealing,
    over: Callable[[], bool],
    update: Callable[[Relaxation], None],
    deadline: float,
) -> bool:
    """Refine to the end; return whether that is where it stopped, and not where time is better
    spent on schedules."""
    clock = time.perf_counter

    def settle() -> None:
        """Spend what a new graph is worth: multipliers, schedules, deletion."""
        relaxation.ascend()
        update(relaxation)
        if over():
            return
        for width in (300, 3000):
            before = annealing.value
            beam(relaxation, annealing, width)
            update(relaxation)
            if over() or annealing.value < before:
                break
        orders = min(_MOST_ORDERS, relaxation.graph.arcs // _ARCS_PER_ORDER)
        anneal(annealing, orders, deadline, relaxation.stop)
        update(relaxation)
        relaxation.prune()
        update(relaxation)

    menu = Menu(relaxation)
    present: Choice | None = None
    rate, most = _RATE, math.inf
    while not over() and relaxation.graph is not None:
        room = min(most, _room(deadline, rate))
        have = relaxation.graph.nodes
        if present is None:
            target = min(_FIRST, room / 4)
        else:
            target = room if room < 1.5 * _GROWTH * have else _GROWTH * have
        choice, size = menu.choose(target, present, relaxation.sizes)
        fresh = False
        if choice is not None and present is not None:
            anew, anew_size = menu.choose(target)
            if anew is not None and anew.loss <= WORTH * present.loss:
                fresh = _better(anew, anew_size, choice, size, target)
            if fresh:
                choice, size = anew, anew_size
        large = present is not None and size > max(2 * room, _LARGE)
        if large and relaxation.gap > _NEARLY and deadline < math.inf:
            return False
        if choice is None or (present is not None and size > min(most, _TRIED * MAX_NODES)):
            break
        start = clock()
        if fresh:
            relaxation.restart()
        try:
            relaxation.use_floors(choice.floors, choice.clocked)
        except TooLargeError:
            if present is None or fresh:
                raise
            most = size / 2
            continue
        if relaxation.graph is None:
            return True
        after = relaxation.graph.nodes
        settle()
        rate = after / max(clock() - start, 1e-3)
        present = choice
    _count_all(relaxation, over, settle)
    return True


def _better(a: Choice, a_size: float, b: Choice, b_size: float, target: float) -> bool:
    """Whether floors are no larger than ``target`` and lose less than others, or are smaller."""
    if min(a_size, b_size) > target:
        return a_size < b_size
    return a_size <= target and (b_size > target or (a.loss, a_size) < (b.loss, b_size))


def _room(deadline: float, rate: float) -> float:
    """Return how many nodes memory and time allow."""
    return min(_TRIED * MAX_NODES, rate * (deadline - time.perf_counter()))


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
) -> list[Proof]:
    """Bound every busy period of an instance in rounds; the sums are the instance's.

    Parameters
    ----------
    instance : Instance
        In rounds. Its limits are ignored: bounds hold, schedules may break them.
    seed : int
    time_limit_s : float
    stop, report, gap
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
        )
    return proofs
