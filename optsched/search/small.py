"""Few requests in rounds: good schedules, and bounds refined until they meet.

Schedules come from annealing over placement orders (forward from the first start, backward from
the last completion, in turn) and from a beam search that walks the graphs of
`optsched.bounds.ramp` backward in time, guided by what they say about the rest. Good schedules
first: they decide how much of the next graph can be deleted. Deterministic from the seed, but for
what a time limit cuts off. Import lazily: it loads numba.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
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
from optsched.search.neighbourhood import improve

_CHUNK = 2000
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
_NEIGHBOURHOODS_S = 1.0
"""Seconds of CP-SAT neighbourhoods after every `_MOST_ORDERS` when refining has ended."""
_READ = 100
"""Entries of a beam that are made schedules."""


@njit(cache=True, nogil=True)
def serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any
) -> int:
    """Place the requests in order, each at its earliest feasible start; return sum of ends.

    ``used`` is all zero before and after, and longer than any schedule.
    """
    total = 0
    end = 0
    for i in order:
        k = arrival[i]
        f = first_kv[i]
        o = output[i]
        while True:
            later = k
            # From the peak backward: the first conflict found asks for the longest jump.
            for j in range(o - 1, -1, -1):
                room = capacity - used[k + 1 + j]
                if f + j > room:
                    later = k + j - (room - f) if room >= f else k + 1 + j
                    break
            if later == k:
                break
            k = later
        for j in range(o):
            used[k + 1 + j] += f + j
        starts[i] = k
        total += k + o
        end = max(end, k + o)
    used[: end + 1] = 0
    return total


@njit(cache=True, nogil=True)
def backward_serial(
    order: Any, arrival: Any, first_kv: Any, output: Any, capacity: int, used: Any, starts: Any,
    worth: int
) -> int:  # fmt: skip
    """Place the requests in order of completion, the last first; return the sum of ends.

    In reverse time a request starts at its peak and only shrinks, so it fits at all later moments
    if it fits at the first, and one placed later is heavier at every moment after: each at the
    first moment where it fits, not before the one placed before it, ends the last placement
    soonest. The whole is moved until none starts too early; then, if the value is at most
    ``worth``, each request, the first completion first, to its earliest feasible start.
    """
    n = order.shape[0]
    at = 0
    finish = 0
    top = 0
    for i in order:
        o = output[i]
        peak = first_kv[i] + o - 1
        while used[at] + peak > capacity:
            at += 1
        for j in range(o):
            used[at + j] += peak - j
        starts[i] = at
        top = max(top, at + o)
        finish = max(finish, at + o + arrival[i])
    used[: top + 1] = 0
    total = 0
    for i in order:
        starts[i] = finish - starts[i] - output[i]
        total += starts[i] + output[i]
    if total > worth:
        return total
    for i in order:
        for j in range(output[i]):
            used[starts[i] + 1 + j] += first_kv[i] + j
    for _ in range(2):
        moved = False
        for b in range(n - 1, -1, -1):
            i = order[b]
            if starts[i] == arrival[i]:
                continue
            f = first_kv[i]
            o = output[i]
            was = starts[i]
            for j in range(o):
                used[was + 1 + j] -= f + j
            k = arrival[i]
            while k < was:
                later = k
                for j in range(o - 1, -1, -1):
                    room = capacity - used[k + 1 + j]
                    if f + j > room:
                        later = k + j - (room - f) if room >= f else k + 1 + j
                        break
                if later == k:
                    break
                k = later
            k = min(k, was)
            for j in range(o):
                used[k + 1 + j] += f + j
            if k < was:
                starts[i] = k
                total -= was - k
                moved = True
        if not moved:
            break
    for i in order:
        used[starts[i] + 1 : starts[i] + 1 + output[i]] = 0
    return total


@njit(cache=True, nogil=True)
def _anneal_orders(
    order: Any, best_order: Any, value: int, best: int, hot: float, cold: float, first: int,
    steps: int, all_steps: int, arrival: Any, first_kv: Any, output: Any, capacity: int,
    used: Any, starts: Any, best_starts: Any, forward: bool, rng: Any
) -> Any:  # fmt: skip
    """Anneal over orders, steps ``first`` to ``first + steps`` of ``all_steps``."""
    n = order.shape[0]
    arrives = arrival.max() > 0
    trial = order.copy()
    for step in range(first, first + steps):
        temperature = hot * (cold / hot) ** (step / all_steps)
        trial[:] = order
        a = rng.integers(0, n)
        if rng.random() < 0.5:
            reach = max(2, n // 3)
            b = min(n - 1, max(0, a + rng.integers(-reach, reach + 1)))
        else:
            b = rng.integers(0, n)
        if a == b:
            continue
        if rng.random() < 0.4:
            trial[a], trial[b] = trial[b], trial[a]
        else:
            moved = trial[a]
            if a < b:
                for k in range(a, b):
                    trial[k] = trial[k + 1]
            else:
                for k in range(a, b, -1):
                    trial[k] = trial[k - 1]
            trial[b] = moved
        if forward:
            new = serial(trial, arrival, first_kv, output, capacity, used, starts)
        else:
            worth = 2**62 if arrives else value + int(4 * temperature) + 1
            new = backward_serial(trial, arrival, first_kv, output, capacity, used, starts, worth)
        if new <= value or rng.random() < math.exp((value - new) / temperature):
            order[:] = trial
            value = new
            if value < best:
                best = value
                best_order[:] = order
                best_starts[:] = starts
    return value, best


@njit(cache=True, nogil=True)
def _children(
    u: int, g: int, entry: int, placed: Any, items: Any, length: int, capacity: int,
    arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any, mask: Any,
    join: int, first_mask: int, cutoff: int, cost: Any, scale: int, copies: Any, peak: Any,
    floor: Any, out: Any, found: int, rounds_cost: Any, stack: Any
) -> int:  # fmt: skip
    """Append every placement that an entry can make next: (f, g, parent, kind, node, rounds)."""
    # Chains of rounds, from the entry itself and from every join met on the way.
    stack[0, 0], stack[0, 1], stack[0, 2] = u, g, 0
    depth = 1
    row = np.empty(length + 1, dtype=np.int64)
    while depth > 0:
        depth -= 1
        node, cost_so_far, rounds = stack[depth]
        while True:
            live = 0
            total = 0
            for k in range(length):
                w = items[k, 0] - rounds
                if w >= items[k, 1]:
                    row[live] = w
                    live += 1
                    total += w
            onward = -1
            onward_cost = 0
            for a in range(arc_start[node], arc_start[node + 1]):
                v = arc_target[a]
                label = arc_label[a]
                if label < join:
                    onward = v
                    onward_cost = label * scale
                elif label == join:
                    if cost_so_far + backward[v] <= cutoff and depth < stack.shape[0]:
                        stack[depth, 0], stack[depth, 1], stack[depth, 2] = v, cost_so_far, rounds
                        depth += 1
                elif label >= first_mask:
                    bits = mask[label]
                    k = 0
                    while bits != np.uint64(0):
                        if (
                            bits & np.uint64(1)
                            and placed[k] < copies[k]
                            and total + peak[k] <= capacity
                            and found < out.shape[0]
                        ):
                            f = cost_so_far + cost[k] + backward[v]
                            if f <= cutoff and backward[v] < 2**30:
                                out[found, 0] = f
                                out[found, 1] = cost_so_far + cost[k]
                                out[found, 2] = entry
                                out[found, 3] = k
                                out[found, 4] = v
                                out[found, 5] = rounds
                                found += 1
                        bits >>= np.uint64(1)
                        k += 1
            if onward < 0 and loop[node] >= 0 and live > 0:
                onward = node
                onward_cost = loop[node] * scale
            if onward < 0 or cost_so_far + onward_cost + backward[onward] > cutoff:
                break
            node = onward
            cost_so_far += onward_cost
            rounds += 1
    return found


@njit(cache=True, nogil=True)
def _beam(
    width: int, n: int, arc_start: Any, arc_target: Any, arc_label: Any, loop: Any, backward: Any,
    mask: Any, join: int, first_mask: int, cutoff: int, cost: Any, scale: int, copies: Any,
    peak: Any, floor: Any, capacity: int, slots: int, stop: Any
) -> Any:  # fmt: skip
    """Return kinds and rounds between placements of the best complete entries, layer by layer."""
    kinds = copies.shape[0]
    room = width * 24 + 4096
    out = np.empty((room, 6), dtype=np.int64)
    stack = np.empty((4096, 3), dtype=np.int64)
    node = np.zeros(width, dtype=np.int64)
    cost_of = np.zeros(width, dtype=np.int64)
    placed = np.zeros((width, kinds), dtype=np.int16)
    items = np.zeros((width, slots, 2), dtype=np.int64)
    length = np.zeros(width, dtype=np.int64)
    new_placed = placed.copy()
    new_items = items.copy()
    new_length = length.copy()
    back_parent = np.zeros((n, width), dtype=np.int32)
    back_kind = np.zeros((n, width), dtype=np.int32)
    back_rounds = np.zeros((n, width), dtype=np.int32)
    entries = 1
    seen = np.empty(4 * width, dtype=np.uint64)
    bits = 1
    while bits < 4 * width:
        bits *= 2
    seen = np.zeros(bits, dtype=np.uint64)
    for m in range(n):
        if stop[0] != 0:
            return 0, back_parent, back_kind, back_rounds
        found = 0
        for e in range(entries):
            found = _children(
                node[e], cost_of[e], e, placed[e], items[e], length[e], capacity, arc_start,
                arc_target, arc_label, loop, backward, mask, join, first_mask, cutoff, cost,
                scale, copies, peak, floor, out, found, cost, stack
            )  # fmt: skip
        if found == 0:
            return 0, back_parent, back_kind, back_rounds
        order = np.argsort(out[:found, 0])
        seen[:] = 0
        taken = 0
        for c in order:
            e, k, v, rounds = out[c, 2], out[c, 3], out[c, 4], out[c, 5]
            live = 0
            for j in range(length[e]):
                w = items[e, j, 0] - rounds
                if w >= items[e, j, 1]:
                    new_items[taken, live, 0] = w
                    new_items[taken, live, 1] = items[e, j, 1]
                    live += 1
            if live >= slots:
                continue
            # Insert in order, so that equal multisets look equal.
            at = live
            while at > 0 and (
                new_items[taken, at - 1, 0] > peak[k]
                or (
                    new_items[taken, at - 1, 0] == peak[k]
                    and new_items[taken, at - 1, 1] > floor[k]
                )
            ):
                new_items[taken, at, 0] = new_items[taken, at - 1, 0]
                new_items[taken, at, 1] = new_items[taken, at - 1, 1]
                at -= 1
            new_items[taken, at, 0] = peak[k]
            new_items[taken, at, 1] = floor[k]
            live += 1
            h = np.uint64(v + 1) * np.uint64(0x9E3779B97F4A7C15)
            for j in range(live):
                h = (
                    h ^ np.uint64(new_items[taken, j, 0] * 65537 + new_items[taken, j, 1])
                ) * np.uint64(1099511628211)
                h ^= h >> np.uint64(31)
            for j in range(kinds):
                new_placed[taken, j] = placed[e, j]
            new_placed[taken, k] += 1
            for j in range(kinds):
                h = (h ^ np.uint64(new_placed[taken, j] + 1)) * np.uint64(1099511628211)
                h ^= h >> np.uint64(29)
            spot = h & np.uint64(bits - 1)
            double = False
            while seen[spot] != np.uint64(0):
                if seen[spot] == h:
                    double = True
                    break
                spot = (spot + np.uint64(1)) & np.uint64(bits - 1)
            if double:
                continue
            seen[spot] = h
            new_length[taken] = live
            node[taken] = v  # node and cost of parents are not read any more
            cost_of[taken] = out[c, 1]
            back_parent[m, taken] = e
            back_kind[m, taken] = k
            back_rounds[m, taken] = rounds
            taken += 1
            if taken == width:
                break
        entries = taken
        placed, new_placed = new_placed, placed
        items, new_items = new_items, items
        length, new_length = new_length, length
    return entries, back_parent, back_kind, back_rounds


class Annealing:
    """An annealing search that can be run in slices; the best starts so far are always at hand.

    Parameters
    ----------
    jobs : Jobs
    rng : numpy.random.Generator
    starts : ndarray of int64, optional
        A feasible schedule to begin from.
    """

    def __init__(
        self, jobs: Jobs, rng: np.random.Generator, starts: NDArray[np.int64] | None = None
    ) -> None:
        self.jobs, self.rng = jobs, rng
        self._used = np.zeros(2 * jobs.rounds + int(jobs.output.max()) + 2, dtype=np.int64)
        index = np.arange(jobs.n)
        keys = (jobs.volume, jobs.output, jobs.peak, jobs.arrival + jobs.volume // jobs.capacity)
        self.starts = _in_line(jobs) if starts is None else starts
        self.value = jobs.total(self.starts)
        for key in keys:
            self.offer_order(np.lexsort((index, jobs.arrival, key)))
        self._runs = 0

    def offer_order(self, order: NDArray[np.int64]) -> int:
        """Place requests in that order, keep the result if it is the best, return its value."""
        jobs, starts = self.jobs, np.empty(self.jobs.n, dtype=np.int64)
        serial(
            order, jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, self._used, starts
        )  # fmt: skip
        value = jobs.total(starts)
        if value < self.value:
            self.value, self.starts = value, starts
        return value

    def offer(self, starts: NDArray[np.int64]) -> int:
        """Take a feasible schedule, place its requests again in order of start."""
        value = self.jobs.total(starts)
        if value < self.value:
            self.value, self.starts = value, starts.copy()
        return self.offer_order(np.argsort(starts, kind="stable"))

    def anneal(
        self, steps: int, *, deadline: float = math.inf, hot: float = 0.0, stop: Any = None,
        fresh: bool = False,
    ) -> None:  # fmt: skip
        """Anneal once from the best schedule, until ``deadline`` (of `time.perf_counter`).

        Parameters
        ----------
        steps : int
            Orders to try.
        hot : float
            First temperature in rounds; 0: about half the mean latency over the root of n.
        fresh : bool
            Begin from a random order instead, roughly the smallest volume first.
        """
        jobs = self.jobs
        if jobs.n == 1:
            return
        if hot <= 0:
            hot = max(2.0, 0.6 * self.value / jobs.n**1.5)
        forward = self._runs % 2 == 1
        self._runs += 1
        scratch = np.empty(jobs.n, dtype=np.int64)
        if fresh:
            noise = self.rng.uniform(0.5, 2.0, jobs.n)
            ready = jobs.arrival + noise * jobs.volume / jobs.capacity * math.sqrt(jobs.n)
            order = np.argsort(ready if forward else -ready, kind="stable")
        elif forward:
            order = np.argsort(self.starts, kind="stable")
        else:
            order = np.argsort(-(self.starts + jobs.output), kind="stable")
        if forward:
            value = serial(
                order, jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, self._used, scratch
            )
        else:
            value = backward_serial(
                order, jobs.arrival, jobs.first_kv, jobs.output, jobs.capacity, self._used,
                scratch, 2**62
            )  # fmt: skip
        best_order, best_starts = order.copy(), scratch.copy()
        best = value
        done = 0
        while done < steps and time.perf_counter() < deadline and not (
            stop is not None and stop[0]
        ):  # fmt: skip
            more = min(_CHUNK, steps - done)
            value, best = _anneal_orders(
                order, best_order, value, best, hot, 0.4, done, more, steps, jobs.arrival,
                jobs.first_kv, jobs.output, jobs.capacity, self._used, scratch, best_starts,
                forward, self.rng
            )  # fmt: skip
            done += more
        self.offer(best_starts)


def beam(relaxation: Relaxation, annealing: Annealing, width: int) -> None:
    """Walk the relaxation's graph with exact memory and each request once, ``width`` at a time.

    Entries after m placements are ranked by cost so far plus the graph's cost to the end, and
    given up beyond the known schedule. What arrives is offered to ``annealing``, in the order
    that it has and placed again.
    """
    graph, labels, jobs = relaxation.graph, relaxation.labels, relaxation.jobs
    if graph is None or relaxation.closed:
        return
    slots = int(min(jobs.n, jobs.capacity // int(relaxation.floor.min()))) + 1
    entries, parent, kind, rounds = _beam(
        width, jobs.n, graph.arc_start, graph.arc_target, graph.arc_label, graph.loop,
        relaxation.backward, labels.mask, labels.join, labels.first_mask, relaxation.cutoff,
        -relaxation.pi, relaxation.scale, relaxation.copies, relaxation.peak, relaxation.floor,
        jobs.capacity, slots, relaxation.stop
    )  # fmt: skip
    for entry in range(min(entries, _READ)):
        kinds = np.empty(jobs.n, dtype=np.int64)
        steps = np.empty(jobs.n, dtype=np.int64)
        at = entry
        for m in range(jobs.n - 1, -1, -1):
            kinds[m], steps[m] = kind[m, at], rounds[m, at]
            at = parent[m, at]
        annealing.offer(relaxation.starts(kinds, np.cumsum(steps)))
    relaxation.offer(annealing.value)


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
        line = _in_line(jobs)
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
    orders = int((24 if jobs.arrival.any() else 6) * _CHUNK * (jobs.n / 12) ** 4)
    orders = min(orders, _MOST_ORDERS)
    _anneal(annealing, orders, min(deadline, begin + 0.1 * (deadline - begin)), stop)
    update()
    proof.note = unsupported(jobs)
    if proof.note:
        while not over() and deadline < math.inf:
            _anneal(annealing, 100 * _CHUNK, deadline, stop)
            update()
        return proof
    short = _clock(jobs, _room(deadline, _RATE))
    for clock in dict.fromkeys((short, needed_clock(jobs))):
        relaxation = Relaxation(jobs, annealing.value, stop, proof.bound, clock)
        try:
            proof.note = ""
            if not _refine(relaxation, annealing, over, update, deadline):
                proof.note = _TOO_LONG
        except Interrupted:
            proof.note = "stopped"
        except TooLargeError:
            proof.note = "the next graph would be too large"
        update(relaxation)
        if over() or proof.note == _TOO_LONG:
            break
    while proof.note and not over() and deadline < math.inf:
        _anneal(annealing, _MOST_ORDERS, deadline, stop)
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
        _anneal(annealing, orders, deadline, relaxation.stop)
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
        anew, anew_size = menu.choose(target)
        fresh = (
            choice is not None
            and anew is not None
            and present is not None
            and (
                anew.loss <= WORTH * present.loss and _better(anew, anew_size, choice, size, target)
            )
        )
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


def _anneal(annealing: Annealing, orders: int, deadline: float, stop: Any) -> None:
    """Try so many orders: many runs, from the best schedule and from random orders in turn.

    Several runs of moderate length find more than a long one.
    """
    steps, turn, most = _CHUNK, 0, max(_CHUNK, 60 * annealing.jobs.n**2)
    while orders > 0 and time.perf_counter() < deadline and not stop[0]:
        for _ in range(2):
            annealing.anneal(steps, deadline=deadline, stop=stop, fresh=turn % 2 == 1)
        orders -= 2 * steps
        steps = min(3 * steps, most)
        turn += 1


def _in_line(jobs: Jobs) -> NDArray[np.int64]:
    """Return starts that run the requests one after another, the shortest waiting first."""
    starts = np.empty(jobs.n, dtype=np.int64)
    now = 0
    left = set(range(jobs.n))
    while left:
        ready = [i for i in left if jobs.arrival[i] <= now]
        if not ready:
            now = min(int(jobs.arrival[i]) for i in left)
            continue
        i = min(ready, key=lambda i: (int(jobs.output[i]), i))
        starts[i] = now
        now += int(jobs.output[i])
        left.remove(i)
    return starts


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
        line = _in_line(jobs) if given is None else given
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
