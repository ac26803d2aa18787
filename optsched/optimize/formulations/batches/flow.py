"""The aggregated flow model of infermax: requests of a class are integer flows through batches.

The nodes and arcs of `optsched.optimize.formulations.batches.network` appear once for every batch
j = 1..J. The variables are x_aj, the number of requests on arc a in batch j, and u_j, d_j and p_j,
which say whether batch j is used, decodes and prefills::

    min  sum_j base u_j + decode_base d_j + prefill_base p_j + sum_a work_a x_aj
    s.t. flow through every node between two batches; all requests end
         sum_a kv_a x_aj <= M u_j,  sum tokens x <= C,  of prefills <= P,  of those with KV <= R_max
         x_aj <= n_a d_j (decode arcs), x_aj <= n_a p_j (prefill arcs), n_a = min(n, M / kv_a)
         u_j <= sum of works x, u_j <= d_j + p_j, d_j <= u_j, p_j <= u_j, u_{j+1} <= u_j
         d_j + p_j <= 1 (hybrid batching off)

No product of two sizes appears, since squares are coefficients of arcs. Further rows are valid for
integers: for every dual feasible function f of `Network.functions`, sum f(kv_a) x_aj <= room u_j,
and the same over decode arcs with d_j and over prefill arcs with p_j; the numbers of batches and of
prefill batches are at least those needed; the objective is at least `least_makespan`.

CP-SAT solves the model in exact integers. ``auto`` never takes it, since A* is faster. It stays as
an independent check of A*, and as the method with the best schedule known of 16 requests of 8
tokens with prompts of one (`docs/lab/infermax.md`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from optsched.optimize.formulations.base import LIMITS, Answer, Method, Task
from optsched.optimize.formulations.batches import network as states, plans
from optsched.optimize.formulations.batches.greedy import begun
from optsched.optimize.formulations.batches.network import Arc, Network
from optsched.optimize.formulations.batches.problem import ENDS, EXTRAS, MODELLED, UNLIMITED, Batch
from optsched.optimize.solvers.base import SolveOptions, Status
from optsched.problem.errors import OutOfTimeError, UsageError

MAX_ENTRIES = 20_000_000
_CUTS = 5


class Flow:
    """The model of a network, with a row of variables per batch: its arcs, then u, d and p."""

    def __init__(self, net: Network, batches: int, start: plans.Plan | None) -> None:
        from ortools.sat.python import cp_model as cp

        prob, c = net.prob, net.prob.costs
        if 8 * len(net.arcs) * batches > MAX_ENTRIES:
            raise UsageError(
                f"method: found a flow model of {len(net.arcs)} arcs and {batches} batches; "
                f"expected at most {MAX_ENTRIES:.2g} nonzeros (astar has no model)"
            )

        self.net, self.model, self._sum = net, cp.CpModel(), cp.LinearExpr.weighted_sum
        self._room = [self._largest(arc) for arc in net.arcs]
        self.cost = [arc.work for arc in net.arcs]
        self.cost += [c["base"], c["decode_base"], c["prefill_base"]]
        self.x: list[list[Any]] = []

        for _ in range(batches):
            prob.budget.check("the model was built")
            self.x.append([self.model.new_int_var(0, k, "") for k in (*self._room, 1, 1, 1)])
            self._batch(self.x[-1])

        self._flows()
        needed, prefills = net.batch_bound()
        self.model.add(sum(row[-3] for row in self.x) >= needed)
        self.model.add(sum(row[-1] for row in self.x) >= prefills)
        total = sum(self._sum(row, self.cost) for row in self.x)
        high = cp.INT_MAX if prob.cutoff is None else math.ceil(prob.cutoff) - 1
        self.model.add_linear_constraint(total, states.least_makespan(prob), high)
        self.model.minimize(total)
        if start is not None:
            self._hint(start)

    def _largest(self, arc: Arc) -> int:
        """Return the max number of requests that can take an arc in one batch."""
        count = self.net.counts[self.net.nodes[arc.source].cls]
        return min(count, self.net.prob.capacity // arc.kv) if arc.kv else count

    def _flows(self) -> None:
        """What enters a node in a batch leaves it in the next one; in the end all are done."""
        out: list[list[int]] = [[] for _ in self.net.nodes]
        into: list[list[int]] = [[] for _ in self.net.nodes]
        for a, arc in enumerate(self.net.arcs):
            out[arc.source].append(a)
            if arc.target != states.DONE:
                into[arc.target].append(a)

        counts = self.net.counts + [0] * (len(self.net.nodes) - len(self.net.counts))
        for v, count in enumerate(counts):
            self.model.add(sum(self.x[0][a] for a in out[v]) == count)
            for row, after in zip(self.x, [*self.x[1:], None], strict=True):
                entering = sum(row[a] for a in into[v])
                self.model.add(entering == sum(after[a] for a in out[v] if after) + 0)

        for row, after in zip(self.x, self.x[1:], strict=False):
            self.model.add(after[-3] <= row[-3])

    def _batch(self, row: list[Any]) -> None:
        """Add the rows of one batch."""
        prob, arcs, add = self.net.prob, self.net.arcs, self.model.add
        used, decodes, prefills = row[-3:]
        decode = [a for a, arc in enumerate(arcs) if arc.kind == states.DECODE]
        prefill = [a for a, arc in enumerate(arcs) if arc.prefills]
        held = [a for a, arc in enumerate(arcs) if arc.kv]

        def total(group: Sequence[int], weight: Callable[[Arc], int] = lambda arc: 1) -> Any:
            return self._sum([row[a] for a in group], [weight(arcs[a]) for a in group])

        add(total(held, lambda arc: arc.kv) <= prob.capacity * used)
        for weight, room in self.net.functions[:_CUTS]:
            for group, flag in ((held, used), (decode, decodes), (prefill, prefills)):
                add(total(group, lambda arc, f=weight: f(arc.kv)) <= room * flag)  # type: ignore[misc]

        for group, flag in ((decode, decodes), (prefill, prefills)):
            add(flag <= used)
            for a in group:
                add(row[a] <= self._room[a] * flag)

        for limit, group, flag in (
            (prob.batch_tokens, decode + prefill, used),
            (prob.prefill_tokens, prefill, prefills),
        ):
            if limit < UNLIMITED:
                add(total(group, lambda arc: arc.tokens) <= limit * flag)

        if prob.running < prob.n:
            add(total(held) <= prob.running * used)

        add(used <= total(decode + prefill))
        add(used <= decodes + prefills)
        if not prob.hybrid:
            add(decodes + prefills <= 1)

    def _hint(self, start: plans.Plan) -> None:
        """Give the values of the variables for a list of batches as hints."""
        prob, arcs = self.net.prob, self.net.arcs
        by_key = {(arc.source, arc.kind, arc.tokens): a for a, arc in enumerate(arcs)}
        now, at = plans.Requests(prob), dict.fromkeys(range(prob.n), states.DONE)
        at |= {i: v for v, members in enumerate(prob.classes) for i in members}

        for j, row in enumerate(self.x):
            batch = start[j] if j < len(start) else Batch(())
            tokens, values = dict(batch.entries), [0] * len(row)
            for i in (i for i in at if at[i] != states.DONE):
                kind = states.EVICT if i in batch.evicted else states.STAY
                if i in tokens:
                    fresh = states.DECODE if now.ready[i] else states.PREFILL
                    kind = states.REFILL if i in batch.evicted else fresh
                    values[-3] = values[-2 if kind == states.DECODE else -1] = 1

                a = by_key[at[i], kind, tokens.get(i, 0)]
                values[a] += 1
                at[i] = arcs[a].target

            now.evict(batch.evicted)
            now.process(batch.entries)
            for variable, value in zip(row, values, strict=True):
                self.model.add_hint(variable, value)


def solve_by_flow(task: Task, options: SolveOptions) -> Answer:
    """Solve the flow model by CP-SAT."""
    from optsched.optimize.solvers.cpsat import solve_cp_model

    prob, start, times = begun(task, options)
    try:
        flow = Flow(states.network(prob), plans.max_batches(prob, times), start)
    except OutOfTimeError as late:
        return plans.unbuilt(prob, start, late)

    scale = plans.UNITS
    raw = solve_cp_model(
        flow.model,
        scale.told(options.after(prob.budget.spent_s), prob),
        read=[x for row in flow.x for x in row],
        known=plans.known_level(prob, times),
    )
    plan = level = None
    if raw.values is not None:
        table = raw.values.reshape(len(flow.x), -1)
        level = int((table * flow.cost).sum()) if raw.status is Status.OPTIMAL else None
        steps = [dict(enumerate(row[:-3])) for row in table.tolist() if row[-3]]
        plan = flow.net.plan([{a: k for a, k in step.items() if k} for step in steps])

    claim = plans.Claim(raw.status, plan, scale.level(raw.bound), level=level)
    rest = raw.native_status, raw.solve_s
    return plans.answer(prob, claim, *rest, fallback=start, room=len(flow.x))


_SUMMARY = "aggregated flow of requests through batches, by CP-SAT in exact integers"
_MORE: Any = {"extras": EXTRAS, "features": MODELLED, "solvers": ("ortools",)}
METHODS = {"infermax": {"flow-cpsat": Method(_SUMMARY, solve_by_flow, ENDS, LIMITS, **_MORE)}}
