"""The reverse-time ramp relaxation: lower bounds on total latency in rounds, up to optimality.

The proof is in docs/formulations.md, "Ramp relaxation": a schedule, read from its end backward, is
a path from (0, {}) to (n, {}) through states (m, multiset of live items). m counts the requests met
so far, and an item is (tokens, floor), with the peak p = s + o tokens at a completion and the floor
f = s + 1 (in cached accounting one less). Request i has s_i prompt and o_i output tokens and comes
at a_i, and M is the KV capacity. A path may place any n requests. One placed c_i times
costs pi_i (1 - c_i) more, for an integer multiplier pi_i. What the page leaves out:

**Clock.** In the part with a clock, the n - m requests not yet met complete by round t, so all of
their token-rounds lie in rounds 1 to t. So n - m is at most the number of requests with
a_i + o_i <= t whose volumes, the smallest first, sum to at most M t.

**Loops.** In the part without a clock, a round from the empty state changes nothing and costs
m >= 0. A path without such rounds costs no more, so sweeps ignore them. A state that is empty in a
coarse graph may not be empty in a finer one, so the product follows such rounds (`Graph.loop`).

**Targets.** A cutoff z - 1 need not belong to the value z of a schedule: with a lower z, which is
called a target, the graphs are far smaller. Once floors are exact, schedules are enumerated
(`optsched.optimize.ramp.finish`).

Limits on batches and a ban on hybrid batching only rule schedules out. Of a request that restarts,
the last run is uninterrupted, and the others only take room. So the bound holds there, too. No
array is as long as the time axis: busy periods far apart are bounded one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import Ints, Limits, Unlimited
from optsched.optimize.ramp.jobs import (
    BEYOND,
    Jobs,
    Level,
    kinds_of,
    max_completed_by,
    needed_clock,
    refusal,
    scale_of,
)
from optsched.optimize.ramp.tuning import MEASURED, Tuning

try:
    _MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
except (AttributeError, ValueError, OSError):  # not on every system
    _MEMORY = 8 * 2**30
MAX_NODES = min(128_000_000, _MEMORY // 250)
"""The max number of nodes of a graph. A node takes about 120 bytes while a level is built, and
graphs may take half of the memory."""
_STATE_BYTES = min(3 * 2**30, _MEMORY // 5)
# Of levels and enumerations. Nodes, arcs and cells are limited level by level.
_LIMITS = Limits(rest=500_000, layer_bytes=2**31, table_bytes=2**30)
# On a divided graph, multipliers are improved on one part in so many of its nodes first.
_PARTS = 8
# The share of the gap below which what a step promises ends an ascent.
_TOLERANCE = 0.01


class Growth(NamedTuple):
    """How the nodes on paths below a target are expected to grow in the next graph.

    Measured: with x = (target - bound) / (value - bound), ``value`` that of the known schedule, the
    logarithm of the growth is about (x (2 - x))^bend of that of all paths, ``factor``. The bend is
    1, or less where the growth was larger.
    """

    factor: float = 1.0
    value: int = 1
    bend: float = 1.0

    def below(self, target: Any, bound: int) -> Any:
        """Return the growth below a target."""
        return max(1.0, self.factor) ** (self.part(target, bound) ** self.bend)

    def part(self, target: Any, bound: int) -> Any:
        """Return x (2 - x)."""
        x = np.clip((target - bound) / max(1, self.value - bound), 0.0, 1.0)
        return x * (2.0 - x)


_SAME = Growth()


@dataclass(eq=False)
class Relaxation:
    """The relaxation of one busy period, refined level by level.

    ``upper`` is the largest bound of interest: the total latency of a known schedule, or a lower
    target, which leads to smaller graphs. `offer` lowers it. Another thread sets ``stop`` to
    interrupt the kernels (`graph.Interrupted`). At most ``horizon`` rounds get a clock; by default
    all that need one. ``improved`` is called with the relaxation when `bound` or the chain that
    proves it, ``levels``, is new. The bound never exceeds ``upper``.

    ``schedules`` has the starts of those that paths turned out to be, ``made`` the number of
    nodes that were made for the present graph, and ``shown`` the targets that were proved by its
    enumeration, with what it showed (`optsched.optimize.ramp.finish.Finished`). It raises
    ValueError where `refusal` says why.

    By kind (shape (kinds,)): ``ready`` is the earliest completion, ``peak`` and ``floor`` the KV
    tokens in the last and the first round, ``copies`` the number of requests, and ``pi`` the
    multipliers times ``scale``. ``kind_of`` is each request's kind, and ``backward`` the min cost
    from each node of the graph to the end.
    """

    jobs: Jobs
    upper: int
    stop: NDArray[np.int8] = field(default_factory=lambda: np.zeros(1, dtype=np.int8))
    bound: int = 0
    horizon: int | None = None
    improved: Callable[[Relaxation], None] | None = None
    tuning: Tuning = MEASURED

    def __post_init__(self) -> None:
        reason = refusal(self.jobs)
        if reason:
            raise ValueError(reason)

        from optsched.bounds.checker.period import Period, outward
        from optsched.bounds.checker.states import Kinds
        from optsched.optimize.ramp import graph as ramp_graph

        self._kernels = ramp_graph
        jobs = self.jobs
        self.ready, self.peak, self.floor, self.kind_of, self.copies = kinds_of(jobs)
        self.clock = needed_clock(jobs)
        if self.horizon is not None:
            self.clock = min(self.clock, self.horizon)

        self.scale = scale_of(jobs)
        # Paths cost completions, from which arrivals are subtracted.
        self.latency_offset = int(jobs.arrival.sum())

        # The first graph has no memory of what is live: every path through (m, round) is there.
        # `Kinds` has the peaks of requests with those of one kind after those of another.
        order = np.argsort(self.kind_of, kind="stable")
        columns = self.ready, self.peak, self.floor, self.copies
        kinds = Kinds(*columns, jobs.capacity, jobs.peak[order])
        completed = max_completed_by(jobs, self.clock)
        # Memory is limited by `_LIMITS`; steps are not (`Unlimited`), as time ends the work.
        self.period = Period(kinds, completed, Unlimited(), _LIMITS)
        # The first graph has a path. `use_floors` sets None if a later one has none.
        self.graph: Any = outward(self.period.graph)
        # Before the first sweep every cost to the end counts as less than any real one.
        self.backward: Any = np.full(self.graph.nodes, -BEYOND, dtype=np.int32)
        self._chain: list[Level] = []  # that led to the present graph
        self._deleted = False  # whether `prune` has deleted something since the chain's last level

        # The first multipliers of requests are about the total latency that each adds if the
        # smallest volumes run first, and those of a kind their mean. The factors were measured.
        per_request = 1.1 * np.minimum(jobs.volume[:, None], jobs.volume[None, :]).sum(axis=1)
        per_request /= jobs.capacity * (2 if self.clock else 1)
        per_kind = np.bincount(self.kind_of, weights=per_request) / self.copies
        self.pi = self._clip(per_kind * self.scale)
        self.levels: list[Level] = []
        self.schedules: list[Ints] = []
        self.shown: list[tuple[int, Any]] = []
        self._known = self.upper  # the total latency of the best schedule met
        self.made = 0
        self._step = 1.0  # the length of the first step of an ascent
        # A request takes a round for each output token at least.
        self.bound = max(self.bound, int(jobs.output.sum()))

    def _clip(self, pi: NDArray[Any]) -> Ints:
        """Return multipliers as integers small enough for 32-bit sweeps."""
        # So n placements cost at most a quarter of `BEYOND`, and rounds at most half (`scale_of`).
        largest = BEYOND // (4 * self.jobs.n)
        return np.clip(np.rint(pi), -largest, largest).astype(np.int64)

    @property
    def closed(self) -> bool:
        """Whether the bound has reached the known schedule."""
        return self.bound >= self.upper

    @property
    def gap(self) -> float:
        """(Known schedule - bound) / known schedule."""
        return (self.upper - self.bound) / self.upper

    @property
    def graph_bound(self) -> int:
        """The bound on the total latency that the cheapest path of the graph shows, in rounds."""
        # Of the prices pi_i (1 - c_i) sweeps count -pi_i for each placement. The sum of all pi_i,
        # which is the same for every path, is added here.
        total = int(self.backward[0]) + int((self.copies * self.pi).sum())
        return -(-total // self.scale) - self.latency_offset  # rounded up: latencies are integers

    @property
    def cutoff(self) -> int:
        """The cost, in the units of the sweeps, above which a path can be deleted.

        A path that costs more is no schedule of at most `upper` - 1 rounds.
        """
        total = (self.upper - 1 + self.latency_offset) * self.scale
        return total - int((self.copies * self.pi).sum())

    def offer(self, value: int) -> None:
        """Lower `upper`, beyond which bounds do not count."""
        self.upper = min(self.upper, value)

    def fork(self) -> Relaxation:
        """Return a copy that can be refined further while this relaxation stays as it is."""
        other = copy(self)
        other.period = self.period.fork()
        # The copy has only those schedules that it will meet itself; `take` brings them back.
        other.schedules, other.shown = [], list(self.shown)
        other._chain = list(self._chain)

        return other

    def below(self, target: int, like: Relaxation | None = None) -> Relaxation:
        """Return a copy with only the paths below a target, where other multipliers are best."""
        part = self.fork()
        # It begins with what this graph itself shows. A higher bound from elsewhere would close a
        # target below it at once, and its labels would not be counted (`finish`).
        part.improved, part.bound, part.levels = None, min(self.graph_bound, self.bound), []
        part.cut(target, like)
        return part

    def cut(self, target: int, like: Relaxation | None = None) -> None:
        """Keep the paths below a target only, and improve the multipliers on them; see `below`."""
        self.offer(target)
        self.prune()
        if like is not None:
            self.pi, self._step = like.pi, like._step

        self.ascend()
        self.prune()

    def take(self, part: Relaxation) -> None:
        """Take the bound that a copy of this relaxation has proved, and the schedules met there."""
        for starts in part.schedules:
            self._offer_starts(starts)
        if part.bound > self.bound:
            self.bound, self.levels = part.bound, part.levels
            if self.improved is not None:
                self.improved(self)

    def sizes(self, growth: Growth = _SAME) -> NDArray[np.float64]:
        """Return how many nodes the next graph would have for each target.

        They are expected for the targets `bound` + 1 to `upper`, by default as in this graph. Entry
        j is of the target `bound` + 1 + j, and entries never fall.
        """
        if not self._chain:  # `backward` does not say anything yet
            return np.full(self.upper - self.bound, np.inf)

        shift = int((self.copies * self.pi).sum())  # it is not in the sweeps' costs (`graph_bound`)
        latency = self._kernels.Latency(shift, self.scale, self.latency_offset)
        number = self._kernels.count_nodes_by_total(
            self.graph, self.values(self.pi)[0], self.backward, latency, self.bound, self.upper
        )
        # The graph below a target has the nodes whose best path is below it.
        targets = np.arange(self.bound + 1, self.upper + 1)

        return np.asarray(np.cumsum(number) * growth.below(targets, self.graph_bound))

    def target(self, nodes: float, growth: Growth = _SAME) -> int:
        """Return the largest target whose graph would have at most so many nodes.

        It is `bound` itself if even the next target has more.
        """
        return self.bound + int(np.searchsorted(self.sizes(growth), nodes, side="right"))

    def use_floors(self, floors: Ints, max_nodes: int = MAX_NODES) -> None:
        """Refine: multiply the graph with the multisets in which kind k vanishes at ``floors[k]``.

        The nodes of the new graph are those of the present one, divided by multiset. With more than
        `max_nodes` `TooLarge` is raised, and the graph stays as it was.
        """
        from optsched.bounds.checker.period import inward, outward

        period, nodes = self.period, min(max_nodes, MAX_NODES)
        cells = _STATE_BYTES // 4  # of 4 bytes each
        # Graphs have some three arcs per node, and half of one is kept in reserve.
        period.limits = replace(period.limits, nodes=nodes, arcs=7 * nodes // 2, cells=cells)
        # By the costs to the end, paths above the cutoff are deleted. Before the first refinement
        # nothing is.
        period.to_end = self.rest() if self._chain else None
        # A period has arcs by target, and what lies here by source.
        period.graph = inward(self.graph)
        is_left = period.refine(floors, self.pi, self.scale, self.cutoff, self._look)
        self.made = period.made
        self._chain.append(Level(floors[self.kind_of], self.pi[self.kind_of]))
        # What enumerations showed and `prune` deleted belongs to the graph before.
        self._deleted, self.shown = False, []
        self.graph = outward(period.graph) if is_left else None

        # Without a path up to the cutoff, no schedule is better than the known one.
        if self.graph is None:
            self._prove(self.upper)
            return

        # The same holds if the sweep finds no way from the root to the end.
        _, self.backward, _ = self._evaluate(self.pi)
        if self.backward[0] >= self._kernels.INFINITE:
            self._prove(self.upper)

    def rest(self) -> Ints:
        """Return the cost to the end of each node as the period has it: in 64 bits, or `NEVER`."""
        from optsched.bounds.checker.product import NEVER

        rest: Ints = self.backward.astype(np.int64)
        rest[self.backward >= self._kernels.INFINITE] = NEVER
        return rest

    def _look(self) -> None:
        """End what is being made if the stop flag is set."""
        if self.stop[0]:
            raise self._kernels.Interrupted

    def take_enumeration(self, bound: int, starts: Ints | None) -> None:
        """Take what an enumeration of the schedules below `upper` has shown."""
        if starts is not None:
            self._offer_starts(starts)

        # A last level without floors and multipliers says that schedules were enumerated.
        self._prove(bound, [Level(None, None)])

    def _prove(self, value: int, last: Sequence[Level] = ()) -> None:
        """Take a bound that the chain of levels proves, followed by the levels `last`."""
        value = min(value, self.upper)
        # An equal bound counts only if no chain proves it yet.
        if value > self.bound or (value == self.bound and not self.levels):
            self.bound = value
            self.levels = [*self._chain, *last]
            if self.improved is not None:
                self.improved(self)

    def values(self, pi: Ints) -> Any:
        """Return the cost of each label, and the kind of min cost (-1 for fixed steps)."""
        price = self.period.prices(pi, self.scale)
        # A label that places no kind is on no arc, and has a price beyond 32 bits.
        value = np.minimum(price[:, 0], self._kernels.INFINITE)
        return value.astype(np.int32), price[:, 1].astype(np.int32)

    def _evaluate(self, pi: Ints) -> tuple[int, Any, Any]:
        """Find a cheapest path under multipliers.

        Return its cost with the multipliers' constant, the cost from each node to the end, and the
        path (`graph.best_path`): 0 and None in the places of the first and the last without one.
        """
        kernels, period, graph = self._kernels, self.period, self.graph
        value, kind = self.values(pi)
        backward = kernels.sweep_backward(graph, value)
        if backward[0] >= kernels.INFINITE:
            return 0, backward, None

        path = kernels.best_path(graph, value, backward, kind, period.join, period.fixed)
        self._keep_if_schedule(path[0])
        return int(backward[0]) + int((self.copies * pi).sum()), backward, path

    def _keep_if_schedule(self, symbols: NDArray[np.int32]) -> None:
        """Keep a path's schedule if the path is a schedule and improves on the known one."""
        counts = np.bincount(symbols[symbols >= 0], minlength=len(self.copies))
        # A path that places some kind too often is no schedule.
        if (counts != self.copies).any():
            return

        # A placement is a completion, as long before the last one as rounds of the path passed.
        steps = np.cumsum(symbols == self._kernels.ROUND)[symbols >= 0]
        self._offer_starts(self.starts(symbols[symbols >= 0], steps))

    def _offer_starts(self, starts: Ints) -> None:
        """Keep a schedule, and lower `upper`, if it is feasible and the best known.

        A path of a coarse graph may break the capacity, since it forgets what is live below floors.
        """
        total = self.jobs.total(starts)
        if total < self._known and self.jobs.feasible(starts):
            self.schedules.append(starts)
            self._known = total
            self.offer(total)

    def starts(self, kinds: NDArray[Any], steps: NDArray[Any]) -> Ints:
        """Return the starts of a schedule whose completions are given from its end backward.

        The i-th one met is of kind ``kinds[i]``, ``steps[i]`` rounds before the last.
        """
        back = np.empty(self.jobs.n, dtype=np.int64)  # rounds from each completion to the last
        # Requests of a kind are alike, so it does not matter which is which.
        order = np.argsort(kinds, kind="stable")
        back[np.argsort(self.kind_of, kind="stable")] = np.asarray(steps)[order]
        # The earliest end at which every request starts after its arrival.
        end = int((back + self.jobs.output + self.jobs.arrival).max())

        return end - back - self.jobs.output

    def ascend(self, *, until: int | None = None, evaluations: int = 200) -> None:
        """Improve the multipliers, and with them the bound, on the present graph.

        If `prune` has deleted something since the last call, it is a new level of the chain. On a
        large graph it begins on the part with the cheapest paths. It ends when the bound cannot
        rise much, or is `until`, after so many `evaluations`, or when the stop flag is set.
        """
        if self.graph is None or self.closed:
            return

        from optsched.optimize.ramp.ascent import Bundle

        # None: the level has no floors, and only deletes.
        if self._deleted:
            self._chain.append(Level(None, self.pi[self.kind_of]))
            self._deleted = False

        if self.graph.nodes > self.tuning.divided_nodes and not self.stop[0]:
            self._ascend_on_part()

        # The bundle counts in rounds. There is a path, or `closed` would hold.
        bundle = Bundle(self.pi / self.scale, self._step)
        best, self.backward, path = self._evaluate(self.pi)
        bundle.value = best / self.scale
        bundle.add(*self._piece_of(path))
        self._record(best)

        for _ in range(evaluations):
            # Beyond the known schedule, or the caller's value, a bound is of no more use.
            if self.closed or self.stop[0] or (until is not None and self.graph_bound >= until):
                break

            point = bundle.propose()
            gap = self.upper + self.latency_offset - bundle.value
            # The model is an upper bound, so no step from here gains more than this. It has to be
            # a share of the gap, and two units of the sweeps, or the ascent ends.
            if bundle.predicted - bundle.value < max(_TOLERANCE * gap, 2 / self.scale):
                break

            pi = self._clip(point * self.scale)
            total, backward, path = self._evaluate(pi)
            bundle.add(*self._piece_of(path))

            if total > best:
                best, self.pi, self.backward = total, pi, backward
                self._record(best)

            bundle.observe(pi / self.scale, total / self.scale)

        # The next ascent begins with steps as long as the last ones.
        self._step = max(bundle.step, 0.01)

    def _ascend_on_part(self) -> None:
        """Improve the multipliers on the nodes of the cheapest paths, then take them if they pay.

        This part has most of the paths that become cheapest.
        """
        part = self.fork()
        part.improved, part.bound = None, self.graph_bound
        # Below a lower target only a part of the nodes stays. One next to the bound would leave
        # nothing to improve.
        part.offer(max(part.target(self.graph.nodes / _PARTS), part.bound + 2))
        part.prune()
        # A part of more than half of the nodes is hardly cheaper to work on than the whole.
        if part.graph.nodes > self.graph.nodes / 2:
            return

        part.ascend()
        # The bound of the part is none: on the whole graph the same multipliers may show less.
        total, backward, _ = self._evaluate(part.pi)
        if total > int(self.backward[0]) + int((self.copies * self.pi).sum()):
            self.pi, self.backward = part.pi, backward

        for starts in part.schedules:
            self._offer_starts(starts)

    def _piece_of(self, path: Any) -> tuple[float, NDArray[np.float64]]:
        """Return a path's cost as a piece of the dual function: its value at 0, and its slope.

        The cost is that of its rounds, and rises with pi_i by the copies of kind i that it misses.
        `path` is that of `graph.best_path`: by step the kind placed or a symbol below 0, and the
        number of a fixed step's label or -1.
        """
        symbols, fixed = path
        counts = np.bincount(symbols[symbols >= 0], minlength=len(self.copies))
        cost = float(self.period.labels.rounds[fixed[fixed >= 0]].sum())
        return cost, (self.copies - counts).astype(np.float64)

    def _record(self, total: int) -> None:
        """Give the chain's last level the present multipliers, and take the bound they prove."""
        self._chain[-1] = replace(self._chain[-1], multipliers=self.pi[self.kind_of])
        self._prove(-(-total // self.scale) - self.latency_offset)

    def prune(self) -> None:
        """Delete the nodes and arcs that lie only on paths no better than the known schedule."""
        if self.graph is None or self.closed:
            return

        cutoff = self.cutoff  # another thread may lower it
        # Even the cheapest path costs more, so no schedule is better than the known one.
        if int(self.backward[0]) > cutoff:
            self._prove(self.upper)
            return

        before = self.graph
        value = self.values(self.pi)[0]
        self.graph, self.backward = self._kernels.prune(before, self.backward, value, cutoff)
        self._deleted |= (self.graph.nodes, self.graph.arcs) != (before.nodes, before.arcs)
