"""From coarse graphs to fine ones, one target after another, until bound and schedule meet.

Where the next graph would be too large for the time or the memory, only the paths below a target
are kept. Each target that is proved is a bound. Import this module lazily: it loads numba.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from optsched.bounds.checker.parts import Ints, TooLarge
from optsched.optimize.ramp.climb import Climb, Ladder
from optsched.optimize.ramp.finish import LABELS_PER_S, WIDER, finish, reach, refusal, samples
from optsched.optimize.ramp.jobs import Jobs, Level
from optsched.optimize.ramp.relaxation import MAX_NODES, Growth, Relaxation
from optsched.optimize.ramp.second_thread import HELPED, Helper
from optsched.optimize.search.orders import Annealing, anneal
from optsched.problem.budget import work_time

RATE = 1_500_000.0
"""Nodes per second for building, ascent and search, until they are measured."""
# The factor by which the budget is raised once a target is proved or out of reach.
_RAISE = 3.0
# If the time left allows less than this factor, the next raise is the last and uses all of it.
_LAST = 10.0
# The min factor of the budget for which it is worth beginning again.
_WORTH = 1.1
# The known value is the target if it is at most so many times as far as the next target, and a
# graph is not cut down to a target if it takes at most so many times the nodes allowed.
_NEARLY = 1.25
# The share of the time left for the next graph, since others follow.
_NEXT = 0.45
# If there is time for less than so many times the budget, a graph may be as large as there is time
# for: no time would be left for a second target.
_SOON = 2.0
# The share of the time left that is planned, since larger graphs take longer per node.
_CAREFUL = 0.8
# After each level, annealing tries at most one order per so many arcs.
_ARCS_PER_ORDER = 80
# The max time of this annealing, as a share of the level's.
_SEARCHED = 0.15
# With a small gap and at most so many rounds per request to the target, schedules are enumerated,
# until there are too many labels. Some of the labels are followed to find a better schedule.
_ROUNDS = 4
# There may be so many labels, and one more per so many nodes that the graph was built with, if they
# should prove the target. Else a finer graph follows, and there may be one per ``_FEW`` of these.
_LABELS, _NODES_PER_LABEL, _FEW = 3_000, 20, 10
# The time for some labels, as a share of that for a graph, and of what is left after the last.
_FOLLOWED = 0.3
# This is done in graphs of at most so many nodes per second left: tables take 5 % of the time.
_TABLES = 250_000
TOO_LONG = "the next graph would take too long"
TOO_LARGE = "the next graph would be too large"
_NO_MORE = "nothing is left to refine"


@dataclass(eq=False)
class Proof:
    """What is known of one busy period.

    ``value`` is the total latency of ``starts`` and ``bound`` that on any total latency, in rounds.
    The chain ``levels``, whose multipliers have the ``denominator``, proves it, with a clock up to
    the round ``clock``, 0 for none (`optsched.optimize.ramp.jobs.ramp_leaf`). ``note`` is the
    reason why the refinement ended.
    """

    jobs: Jobs
    starts: Ints
    value: int
    bound: int
    denominator: int = 1
    clock: int = 0
    levels: Sequence[Level] = ()
    note: str = ""

    @classmethod
    def known(cls, jobs: Jobs, starts: Ints, note: str = "") -> Proof:
        """Return what a schedule shows, and what outputs do."""
        return cls(jobs, starts, jobs.total(starts), int(jobs.output.sum()), note=note)

    def take(self, relaxation: Relaxation | None) -> None:
        """Take a relaxation's bound if it is the best.

        The chain, its denominator and its clock belong to the bound and change with it.
        """
        if relaxation is not None and relaxation.bound > self.bound:
            self.bound, self.levels = relaxation.bound, relaxation.levels
            self.denominator, self.clock = relaxation.scale, relaxation.clock


@dataclass(eq=False)
class Session:
    """Work on one busy period: what it has found, who looks for schedules, and when it ends.

    It ends at the ``deadline``, a time of `work_time`, with the ``stop`` flag, or where bound and
    value are apart by at most the part ``gap`` of the value. ``tell`` is given both.
    """

    proof: Proof
    annealing: Annealing
    deadline: float
    stop: NDArray[np.int8]
    gap: float
    tell: Callable[[int, int], None]
    helper: Helper | None = None

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.deadline - work_time()

    def over(self) -> bool:
        """Whether time is up, bound and schedule are close enough, or the helper has failed.

        Its error is raised when its block is left.
        """
        proof, helper = self.proof, self.helper
        return bool(
            self.stop[0]
            or self.left <= 0
            or proof.value - proof.bound <= self.gap * proof.value
            or (helper is not None and helper.error is not None)
        )

    def update(self, relaxation: Relaxation | None = None) -> None:
        """Exchange bounds and schedules between the proof, annealing, a relaxation and the helper.

        Then report the proof's bound and value.
        """
        proof, annealing, helper = self.proof, self.annealing, self.helper
        if helper is not None:
            proof.take(helper.relaxation)
            if helper.annealing.value < annealing.value:
                annealing.offer(helper.annealing.starts)

        if relaxation is not None:
            while relaxation.schedules:
                annealing.offer(relaxation.schedules.pop())

            relaxation.offer(annealing.value)
            proof.take(relaxation)

        proof.starts, proof.value = annealing.starts, annealing.value
        self.tell(proof.bound, proof.value)


@dataclass(eq=False)
class Refinement:
    """Proves one target after another.

    The lower the target, the smaller is the graph of the paths below it. If the next graph would
    exceed a budget of nodes, the target is lowered. Once the target is proved or out of reach, the
    budget is raised. Refinement then begins again at the finest graph of all paths below the known
    value. ``first`` has no graph yet but that without memory.
    """

    first: Relaxation
    session: Session
    base: Climb = field(init=False)  # where targets begin: the finest graph of all paths
    climb: Climb = field(init=False)  # for the present target
    rate: float = RATE  # nodes per second
    budget: float = field(init=False)  # the max nodes of a graph
    hurried: bool = False  # whether time, and not the budget, limits the nodes of a graph
    graph_since: float = field(init=False)  # when the present graph was begun
    target_since: float = field(init=False)  # and the present target

    def __post_init__(self) -> None:
        self.base = self.climb = Climb(self.first, Ladder(self.first))
        self.budget = float(min(self.first.tuning.budget, MAX_NODES))
        self.graph_since = self.target_since = work_time()

    @property
    def _has_all_paths(self) -> bool:
        """Whether the present graph has all paths below the known value."""
        return self.climb.relaxation.upper >= self.session.annealing.value

    def run(self) -> str:
        """Prove targets. Return why the last one is not the known value, or an empty string."""
        # Every target that is proved is a bound, whether or not the known value is.
        while True:
            self._climb_on()
            if self.session.over():
                return ""

            proved = self.climb.relaxation.closed
            if not proved:
                # Not even the finest graph proves it.
                if self.climb.ended:
                    return _NO_MORE
                # Else the next graph would take too long,
                if self.hurried:
                    self._use_up_time()
                    return TOO_LONG

                # or it is too large for the memory. For the budget alone, that is raised below.
                if self.budget >= MAX_NODES:
                    return TOO_LARGE

            # How much longer than for this target there is time, and so how much larger the graphs
            # may be: time grows with nodes.
            factor = _CAREFUL * self.session.left / (work_time() - self.target_since)
            # With hardly more nodes than before the next target would show nothing new.
            if factor < _WORTH:
                self._use_up_time()
                return TOO_LONG

            # With much time left, some of it stays for targets after the next.
            factor = factor if factor < _LAST else _RAISE
            self.budget = min(MAX_NODES, factor * self.budget)
            last, self.climb = self.climb.relaxation.upper, self.base.fork()
            self.climb.relaxation.offer(self.session.annealing.value)
            # A target out of reach is followed by the known value itself. As the graphs grow, it is
            # lowered to what the larger budget allows.
            target = self._next_target(last, factor) if proved else self.session.annealing.value

            if target < self.session.annealing.value:
                self.climb.relaxation.cut(target)
                self.session.update(self.climb.relaxation)

    def _climb_on(self) -> None:
        """Make finer and finer graphs for the target, which may become lower on the way.

        It ends when the target is proved, when nothing is left to refine, when lowering the target
        does not pay, or when the session is over.
        """
        self.target_since = work_time()
        while not self.session.over() and not self.climb.ended:
            # The nodes for a share of the time left, since other graphs follow.
            timely_nodes = max(0.0, _NEXT * self.rate * self.session.left)
            # With time for less than about twice the budget no second target would follow. Then
            # time is the limit, be it above the budget or below.
            self.hurried = timely_nodes < _SOON * self.budget
            max_nodes = min(timely_nodes if self.hurried else self.budget, MAX_NODES)
            to, growth = self.climb.plan(max_nodes, self.session.annealing.value)

            # The next graph would be too large, by more than is let pass: only below a lower target
            # it may be small enough.
            if self._growth(growth) * self.climb.nodes > _NEARLY * max_nodes:
                if not self._lower(max_nodes, growth):
                    break

                continue

            self.graph_since = work_time()
            try:
                # Growth is a guess, so more is allowed. The first graph has no guess and no limit.
                limit = int(2 * max_nodes) if growth.factor else MAX_NODES
                self.climb.take(to, limit, self.session.annealing.value)
            except TooLarge:
                # Now more growth is expected, and with it a lower target is planned.
                growth = self.climb.plan(max_nodes, self.session.annealing.value)[1]
                if not self._lower(max_nodes, growth):
                    break

                continue

            # Without a graph no path is left, and the target is proved.
            if self.climb.relaxation.graph is not None:
                self._use_graph()

    def _growth(self, growth: Growth) -> float:
        """Return the growth below the present target."""
        relaxation = self.climb.relaxation
        return float(growth.below(relaxation.upper, relaxation.graph_bound))

    def _lower(self, nodes: float, growth: Growth) -> bool:
        """Lower the target until the next graph has at most ``nodes``; return whether it pays.

        Where it does not, nothing is changed. ``growth`` is that expected up to the next graph.
        """
        relaxation = self.climb.relaxation
        target = min(relaxation.target(nodes, growth), relaxation.upper - 1)
        # A target is worth a graph only above what is proved, and above what enumeration of the
        # present graph should prove. That may take half of the time if the time left is short.
        # Else it gets no labels, and `reach` is the last target that it has proved.
        labels = LABELS_PER_S * self.session.left / 2 if self.hurried else 0.0
        if target <= max(self.session.proof.bound, reach(relaxation, labels)):
            return False
        if self._has_all_paths:
            # The graph of all paths is where the next target begins again, so it is kept as it is.
            self.base, self.climb = self.climb, self.climb.fork()
            self.target_since = work_time()

        self.climb.relaxation.cut(target)
        self.session.update(self.climb.relaxation)
        return True

    def _next_target(self, last: int, factor: float) -> int:
        """Return the next target after ``last``, which was proved.

        It is the largest whose graph has at most ``factor`` times the nodes of that of ``last``, or
        else the next one above all that is proved. The known value is taken instead if it is hardly
        farther.
        """
        value, relaxation = self.session.annealing.value, self.climb.relaxation
        # Sizes are of the targets bound + 1, bound + 2, and so on, of which one is `last`.
        sizes = relaxation.sizes(self.climb.plan(math.inf, value)[1])
        nodes = factor * sizes[last - 1 - relaxation.bound]
        target = relaxation.bound + int(np.searchsorted(sizes, nodes, side="right"))
        target = max(target, last + 1, self.session.proof.bound + 1)

        return value if value - last <= _NEARLY * (target - last) else target

    def _use_graph(self) -> None:
        """Use a new graph: improve multipliers, delete, look for schedules, and enumerate."""
        relaxation, nodes = self.climb.relaxation, self.climb.nodes
        self.session.update(relaxation)
        self._raise_bound(relaxation)
        if self.session.over() or relaxation.closed:
            return

        # Only large graphs say how long larger ones take.
        if nodes >= relaxation.tuning.large_nodes:
            self.rate = nodes / (work_time() - self.graph_since)
        # A better schedule makes every later graph smaller, so it is worth a share of the time.
        if self._has_all_paths and _is_close(relaxation):
            self._follow_some(relaxation, _FOLLOWED * (work_time() - self.graph_since))

        orders = min(relaxation.tuning.orders, relaxation.graph.arcs // _ARCS_PER_ORDER)
        if self.session.helper is not None:
            orders //= HELPED  # it looks for schedules too

        now = work_time()
        until = min(self.session.deadline, now + _SEARCHED * (now - self.graph_since))
        anneal(self.session.annealing, orders, until, self.session.stop)
        self.session.update(relaxation)
        relaxation.prune()
        if (self.climb.finest or _is_close(relaxation)) and not self.session.over():
            self._enumerate(nodes)

    def _raise_bound(self, relaxation: Relaxation) -> None:
        """Improve the multipliers. On a large graph, delete whenever half of the gap is closed."""
        # A smaller graph is cheaper to sweep, and a higher bound deletes more of it.
        while not (self.session.over() or relaxation.closed):
            if relaxation.graph.nodes > relaxation.tuning.large_nodes:
                relaxation.prune()

            large = relaxation.graph.nodes > relaxation.tuning.large_nodes
            middle = (relaxation.graph_bound + relaxation.upper + 1) // 2
            relaxation.ascend(until=middle if large else None)
            self.session.update(relaxation)
            # The ascent has ended by itself.
            if not large or relaxation.graph_bound < middle:
                return

    def _follow_some(self, relaxation: Relaxation, seconds: float) -> None:
        """Follow parts of the labels for a good schedule, for so many seconds beside the tables."""
        if relaxation.closed or refusal(relaxation):
            return
        # Tables alone would take too much of the time that is left.
        if relaxation.graph.nodes > _TABLES * self.session.left:
            return

        parts = samples(relaxation, self.session.over)
        next(parts, None)  # the tables, unless time is up before
        begin = before = work_time()

        for starts in parts:
            if starts is not None:
                self.session.annealing.offer(starts)
                self.session.update(relaxation)

            now = work_time()
            # The next part is wider and takes as much longer.
            if self.session.over() or now + WIDER * (now - before) > begin + seconds:
                break

            before = now

        relaxation.prune()

    def _enumerate(self, nodes: int) -> None:
        """Prove targets by enumeration. `nodes` is what the graph had when it was new.

        The labels are few, so that a finer graph follows soon, unless they should prove the target.
        No finer graph follows the one of exact floors: without a helper, it has all the time left.
        """
        # A few labels, and more if they should prove the target (see `_LABELS`).
        relaxation = self.climb.relaxation
        labels = _LABELS + nodes / (_NODES_PER_LABEL * _FEW)
        labels_at_end = _LABELS + nodes / _NODES_PER_LABEL
        # From the graph of a lower target the helper could not prove the known value.
        helper = self.session.helper if self._has_all_paths else None
        if self.climb.finest and helper is None:
            labels = labels_at_end = LABELS_PER_S * self.session.left
        elif self.session.helper is None:
            # Labels may take as long as the next graph, which they make needless.
            max_nodes = min(self.budget, MAX_NODES)
            growth = self._growth(self.climb.plan(max_nodes, self.session.annealing.value)[1])
            next_graph_s = min(growth * nodes / self.rate, self.session.left)
            labels_at_end = max(labels_at_end, LABELS_PER_S * next_graph_s)

        finish(relaxation, labels, self.session.over, labels_at_end)
        self.session.update(relaxation)
        if helper is not None and not self.session.over():
            helper.post(relaxation)  # it goes on to the end

    def _use_up_time(self) -> None:
        """Enumerate for the rest of the time: the present graph, and that of all paths."""
        # With a helper, which works on a graph of all paths, only that of a lower target is left.
        climbs = [self.climb]
        if self.session.helper is not None and self._has_all_paths:
            climbs = []  # the second thread does so
        elif self.session.helper is None and not self._has_all_paths:
            climbs.append(self.base)

        for climb in climbs:
            relaxation = climb.relaxation
            relaxation.offer(self.session.annealing.value)
            # So `finish` knows what is proved by now, and spends no labels on less.
            relaxation.bound = max(relaxation.bound, self.session.proof.bound)

            # A climb without a rung has no graph but that without memory.
            if not self.session.over() and climb.rung >= 0 and _is_close(relaxation):
                relaxation.prune()
                self._follow_some(relaxation, _FOLLOWED * self.session.left)
                finish(relaxation, LABELS_PER_S * self.session.left, self.session.over)
                self.session.update(relaxation)


def _is_close(relaxation: Relaxation) -> bool:
    """Whether there may be few enough labels to follow."""
    rounds = relaxation.upper - relaxation.bound
    return relaxation.gap < relaxation.tuning.close_gap and rounds <= _ROUNDS * relaxation.jobs.n
