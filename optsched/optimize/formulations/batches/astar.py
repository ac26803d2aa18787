"""Exact search for infermax: A* over multisets of request states.

A state says how many requests of each class have produced how many tokens and hold how much KV
(`optsched.optimize.formulations.batches.network`). A step is a batch. Costs are exact integers. For
makespan and TPS a step costs the batch's time. For TEL, mean TTFT and mean TPOT it costs that time
once for every request that waits for what the objective counts (TPOT: 1 / (o - 1) times).

**Bound.** For makespan the steps that finish a state cost at least

    own work + base J + prefill_base n_p + decode_base (J - n_p)

for the least possible J >= batches needed and n_p >= prefill batches needed. The terms:

- Own work: every token still to come is decoded or refilled, and requests without KV must be
  prefilled.
- J is the max of three numbers: ceil(sum weight / largest) over `Network.weights` (dual feasible
  functions of KV, token and running limits), the longest remaining output, and n_p.
- A batch without prefills decodes, so J - n_p batches pay decode_base. If
  prefill_base >= decode_base, fewer prefill batches are better. Else all J batches pay at most
  prefill_base.

For the other objectives the bound is the sum of each request's min own times.

**What is left out.** docs/formulations.md, "The CSP", has the three rules and why they end. A
refill in place is replaced by a decode also if all prefills of the batch are refills in place and
decode_base <= prefill_base. An eviction that is put off becomes one if the next batch refills the
request. A state with fewer tokens produced, or with more, does not dominate.
"""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches import plans
from optsched.optimize.formulations.batches.best_first import BestFirst
from optsched.optimize.formulations.batches.network import DECODE, REFILL, Network, network
from optsched.optimize.formulations.batches.problem import (
    CHUNKS,
    ENDS,
    EXTRAS,
    MODELLED,
    BatchProblem,
)
from optsched.optimize.formulations.batches.start import begun
from optsched.optimize.solvers.base import Progress, SolveOptions, Status
from optsched.problem.budget import work_time
from optsched.problem.errors import OutOfTimeError, UsageError

_OBJECTIVES = ("makespan", "tps", "tel", "mean_ttft", "mean_tpot")
MAX_BYTES = 6 * 2**30
"""The max memory of the search. At this limit it stops as at a time limit."""
_NONE = 2**62


def _tables(net: Network) -> Any:
    """Return the compiled search's view of a network."""
    from optsched.optimize.formulations.batches.astar_kernel import IN_ALL, PREFILLING, Tables

    prob, c, name = net.prob, net.prob.costs, net.prob.objectives[0]
    nodes = range(len(net.nodes))
    makespan = name in ENDS
    node = [
        (
            net.least_work(v) if makespan else _least_share(net, v),
            net.remaining[v],
            prob.rate(name, net.sizes[net.nodes[v].cls][1], net.nodes[v].produced),
            net.held[v],
            net.remaining[v] == 1
            and (net.nodes[v].ready or not prob.chunked)
            and _decoding_is_cheaper(net, v),
        )
        for v in nodes
    ]
    arcs = []
    for a in net.arcs:
        again = a.kind == REFILL and a.tokens == _input(net, a.source)
        again = again and c.decode(net.nodes[a.source].cached) <= a.work
        sums = a.kv, a.tokens, a.tokens * a.prefills, a.kv > 0, a.work, a.kind == DECODE, a.prefills
        arcs.append((*sums, again, a.target, a.kind))

    limits = [prob.capacity, prob.batch_tokens, prob.prefill_tokens, prob.running]
    weights = [
        *((w, largest, IN_ALL) for w, largest in net.weights),
        *((w, largest, PREFILLING) for w, largest in net.prefill_weights),
    ]

    def ints(values: Any) -> Any:
        return np.array(values, dtype=np.int64)

    return Tables(
        arc_start=ints(np.searchsorted([a.source for a in net.arcs], range(len(nodes) + 1))),
        arcs=ints(arcs),
        limits=ints([*limits, *[_NONE] * 4]),
        node=ints(node),
        fixed=ints([c["base"], c["decode_base"], c["prefill_base"]]),
        weights=ints([w for w, _, _ in weights]),
        largest=ints([rest for _, *rest in weights]),
        makespan=makespan,
        hybrid=prob.hybrid,
    )


def _input(net: Network, v: int) -> int:
    node = net.nodes[v]
    return net.sizes[node.cls][0] + node.produced


def _decoding_is_cheaper(net: Network, v: int) -> bool:
    size = _input(net, v)
    return net.prob.costs.decode(size - 1) <= net.prob.costs.prefill(size)


def _least_share(net: Network, v: int) -> int:
    """Return the min that a request in this node adds to a sum of times."""
    prob, node = net.prob, net.nodes[v]
    prob.budget.check("the network was built")
    s, o = net.sizes[node.cls]
    name = prob.objectives[0]
    spans = [prob.least_span(s, k) for k in range(node.produced, o)]

    if not node.ready and (node.produced or node.cached):  # the rest of a prefill, or a refill
        later = sum(prob.own_work(s, k) for k in range(node.produced + 1, o))
        spans[0] = net.least_work(v) - later + prob.costs.fixed(False, True)

    return sum(prob.rate(name, o, node.produced + k) * span for k, span in enumerate(spans))


def solve_by_astar(task: Task, options: SolveOptions) -> Answer:
    """Solve infermax by A*."""
    prob, start, times = begun(task, options)
    try:
        search = _Search(prob, None if times is None else prob.level(prob.objectives[0], times))
    except OutOfTimeError as late:
        return plans.unbuilt(prob, start, late)

    built_s = prob.budget.spent_s
    native = search.search(options.after(built_s), prob.budget.begin)
    found = search.plan()
    plan = start if found is None else found
    claim = plans.Claim(
        Status.NO_INCUMBENT if plan is None else Status.FEASIBLE, plan, search.bound
    )

    if native == "solved":
        status = Status.INFEASIBLE if plan is None else Status.OPTIMAL
        claim = plans.Claim(status, plan, search.best, level=None if found is None else search.best)

    native = f"{native}, {search.expanded} states expanded"
    return plans.answer(prob, claim, native, prob.budget.spent_s - built_s)


def confirmed(prob: BatchProblem, claim: plans.Claim, options: SolveOptions) -> plans.Claim:
    """Return what of a claim from floats holds in integers, by A*.

    Within its tolerances HiGHS cannot see a schedule that is better by less than 1e-6 ms.
    """
    none_below = claim.status is Status.INFEASIBLE and prob.cutoff is not None
    if claim.status is not Status.OPTIMAL and not none_below:
        return claim

    times = None if claim.plan is None else plans.exact_times(prob, claim.plan)
    unproved = Status.NO_INCUMBENT if claim.plan is None else Status.FEASIBLE
    claim = claim._replace(status=unproved, level=None)

    try:
        search = _Search(prob, None if times is None else prob.level(prob.objectives[0], times))
    except UsageError:  # too many states
        return claim

    ended = search.search(replace(options, progress=None), work_time())
    if ended != "solved":
        return claim

    plan = search.plan() or claim.plan
    return plans.Claim(Status.INFEASIBLE if plan is None else Status.OPTIMAL, plan, search.best)


class _Search(BestFirst):
    """The compiled search and its arrays, for plans better than that of the level `known`."""

    def __init__(self, prob: BatchProblem, known: Fraction | None) -> None:
        from optsched.optimize.formulations.batches import astar_kernel as core

        self.core, self.prob, self.net = core, prob, network(prob)
        self.tables = _tables(self.net)
        nodes, n = len(self.net.nodes), prob.n
        by_request = n < nodes
        kind = np.uint8 if (nodes < 255 if by_request else n < 256) else np.uint16
        size = 1 << 14
        self.state = core.Search(
            rows=np.zeros((size, n if by_request else nodes), dtype=kind),
            cost=np.zeros(size, dtype=np.int64),
            parent=np.full(size, -1, dtype=np.int32),
            table=np.full(4 * size, -1, dtype=np.int32),
            heap=np.zeros((size, 3), dtype=np.int64),
            numbers=np.zeros(5, dtype=np.int64),
            by_request=by_request,
        )
        counts = np.zeros(nodes, dtype=np.int64)
        counts[: len(self.net.counts)] = self.net.counts
        core.pack(counts, self.state.rows[0], by_request)
        core.enter(self.state.rows, np.zeros(1, np.int32), self.state.table)
        tables, scratch, compiled = self.tables, np.zeros_like(counts), core.remaining_cost
        given = (tables.node, tables.weights, tables.largest, tables.fixed, tables.makespan)
        self.floor = int(compiled(counts, *given, scratch))
        self.state.heap[0, 0] = self.floor
        ceilings = [Fraction(_NONE)]
        ceilings += [] if known is None else [known / prob.shrink]
        ceilings += [] if prob.cutoff is None else [prob.cutoff]
        best = math.ceil(min(ceilings))
        self.state.numbers[[core.ROWS, core.ENTRIES, core.BEST, core.GOAL]] = 1, 1, best, -1

    def interval(self) -> tuple[int, int]:
        """Return the incumbent's level, and the bound."""
        return self.best, self.bound

    def tell(self) -> None:
        """Report progress."""
        if self._progress is not None:
            name = self.prob.objectives[0]
            value = self.prob.value(name, self.best) if self.goal >= 0 else None
            bound = self.prob.value(name, self.bound)
            self._progress(Progress(work_time() - self._begin, value, bound))

    def search(self, options: SolveOptions, begin: float) -> str:
        """Search until the end or a limit. Return why the search ended."""
        self._progress, self._begin = options.progress, begin
        return self.run(options, work_time() + options.time_limit)

    def grow(self) -> bool:
        """Make larger arrays. Return whether there is memory for them."""
        core, old = self.core, self.state
        if 2 * sum(column.nbytes for column in old[:5]) > MAX_BYTES:
            return False

        states, entries = old.numbers[core.ROWS], old.numbers[core.ENTRIES]
        grown: dict[str, Any] = {}
        if entries + 3 >= len(old.heap):
            grown["heap"] = np.concatenate([old.heap, old.heap])
        if states + 1 >= len(old.rows):
            for name in ("rows", "cost", "parent"):
                column = getattr(old, name)
                grown[name] = np.concatenate([column, np.zeros_like(column)])

        if 2 * states >= len(old.table):
            grown["table"] = np.full(2 * len(old.table), -1, dtype=np.int32)
            core.enter(old.rows, old.table, grown["table"])

        self.state = old._replace(**grown)
        return True

    def plan(self) -> plans.Plan | None:
        """Return the incumbent's batches, or None where none was found."""
        core, net, state = self.core, self.net, self.state
        path = [self.goal]
        if path[0] < 0:
            return None
        while path[-1] != 0:
            path.append(int(state.parent[path[-1]]))

        path.reverse()
        counts = np.zeros((len(path), len(net.nodes)), dtype=np.int64)
        for k, at in enumerate(path):
            core.unpack(state.rows[at], counts[k], state.by_request)

        steps = []
        for k in range(len(path) - 1):
            # It exceeds the batch's cost if a cheaper way to its begin was found later.
            price = int(state.cost[path[k + 1]] - state.cost[path[k]])
            taken = core.step(counts[k], counts[k + 1], price, self.tables)
            if not taken.any():
                raise AssertionError("infermax: a step of the search cannot be found again")

            steps.append({int(a): int(taken[a]) for a in np.flatnonzero(taken)})

        return net.plan(steps)


_SUMMARY = "exact search over states of interchangeable requests (A*)"
_ASTAR = Method(_SUMMARY, solve_by_astar, _OBJECTIVES, CHUNKS, extras=EXTRAS, features=MODELLED)
METHODS = {"infermax": {"astar": _ASTAR}}
