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
integers:

- for every dual feasible function f of `Network.functions`, sum f(kv_a) x_aj <= most u_j, and the
  same over decode arcs with d_j and over prefill arcs with p_j;
- sum u_j and sum p_j are at least the numbers of batches and of prefill batches needed;
- the objective is at least `least_makespan`.

HiGHS solves the model with milliseconds as the unit, CP-SAT in exact integers. The latter is the
strongest of the models here. Both check A*.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.astar import confirmed
from optsched.optimize.formulations.batches.greedy import begun
from optsched.optimize.formulations.batches.network import (
    DECODE,
    DONE,
    EVICT,
    PREFILL,
    REFILL,
    STAY,
    Network,
    least_makespan,
    network,
)
from optsched.optimize.formulations.batches.plans import (
    Claim,
    Plan,
    Requests,
    Scale,
    answer,
    known_level,
    max_batches,
    unbuilt,
)
from optsched.optimize.formulations.batches.problem import (
    ENDS,
    EXTRAS,
    LIMITS,
    MODELLED,
    UNLIMITED,
    Batch,
)
from optsched.optimize.solvers.base import RawOutcome, SolveOptions, Status
from optsched.optimize.solvers.rows import Rows
from optsched.problem.budget import work_time
from optsched.problem.errors import OutOfTimeError, UsageError

MAX_ENTRIES = 20_000_000
_CUTS = 5


class Flow(NamedTuple):
    """The flow model. Its columns are, for each batch, the arcs and then u, d and p.

    Attributes
    ----------
    net : Network
    batches : int
        The number of batches J.
    rows : Rows
    cost, most : list of int
        The cost and the upper bound of every column, in the problem's units.
    range : tuple of int
        The min and max objective. None means no limit.
    start : ndarray, optional
        The values of the columns for a known plan.
    """

    net: Network
    batches: int
    rows: Rows
    cost: list[int]
    most: list[int]
    range: tuple[int, int | None]
    start: NDArray[np.float64] | None

    def plan(self, values: NDArray[np.float64]) -> Plan:
        """Return the batches of a solution."""
        table = np.rint(values).astype(np.int64).reshape(self.batches, -1)[:, :-3]
        works = [arc.works for arc in self.net.arcs]
        return self.net.plan(
            [
                {int(a): int(row[a]) for a in np.flatnonzero(row)}
                for row in table
                if row[works].any()
            ]
        )


def flow_model(net: Network, start: Plan | None, batches: int) -> Flow:
    """Return the flow model."""
    prob, arcs, c = net.prob, net.arcs, net.prob.costs
    if 8 * len(arcs) * batches > MAX_ENTRIES:
        raise UsageError(
            f"method: found a flow model of {len(arcs)} arcs and {batches} batches; expected at "
            f"most {MAX_ENTRIES:.2g} nonzeros (astar has no model)"
        )

    width = len(arcs) + 3
    rows = Rows()
    into: list[list[int]] = [[] for _ in net.nodes]
    out: list[list[int]] = [[] for _ in net.nodes]

    for a, arc in enumerate(arcs):
        out[arc.source].append(a)
        if arc.target != DONE:
            into[arc.target].append(a)

    for v in range(len(net.nodes)):
        amount = net.counts[v] if v < len(net.counts) else 0
        rows.add(((a, 1) for a in out[v]), lower=amount, upper=amount)

    for j in range(batches):
        prob.budget.check("the model was built")
        at = j * width
        for v in range(len(net.nodes)):
            entries = [(at + a, 1) for a in into[v]]
            if j + 1 < batches:
                entries += [(at + width + a, -1) for a in out[v]]

            rows.add(entries, lower=0, upper=0)

        _batch_rows(net, rows, at)
        if j:
            rows.add([(at + len(arcs), 1), (at - 3, -1)], upper=0)

    needed, prefills = net.batch_bound()
    used = range(len(arcs), batches * width, width)
    rows.add(((k, 1) for k in used), lower=needed)
    rows.add(((k + 2, 1) for k in used), lower=prefills)
    cost = [arc.work for arc in arcs] + [c["base"], c["decode_base"], c["prefill_base"]]
    high = None
    if prob.cutoff is not None:
        high = math.ceil(prob.cutoff) - 1

    return Flow(
        net=net,
        batches=batches,
        rows=rows,
        cost=cost * batches,
        most=[*(_most(net, a) for a in range(len(arcs))), 1, 1, 1] * batches,
        range=(least_makespan(prob), high),
        start=None if start is None else _start_values(net, start, batches),
    )


def _most(net: Network, a: int) -> int:
    """Return the max number of requests that can take an arc in one batch."""
    arc = net.arcs[a]
    count = net.counts[net.nodes[arc.source].cls]
    return min(count, net.prob.capacity // arc.kv) if arc.kv else count


def _batch_rows(net: Network, rows: Rows, at: int) -> None:
    """Add the rows of the batch whose columns begin at ``at``."""
    prob, arcs = net.prob, net.arcs
    used, decodes, prefills = at + len(arcs), at + len(arcs) + 1, at + len(arcs) + 2
    decode = [a for a, arc in enumerate(arcs) if arc.kind == DECODE]
    prefill = [a for a, arc in enumerate(arcs) if arc.prefills]
    held = [a for a, arc in enumerate(arcs) if arc.kv]
    rows.add([(at + a, arcs[a].kv) for a in held] + [(used, -prob.capacity)], upper=0)

    for weight, most in net.functions[:_CUTS]:
        for group, flag in ((held, used), (decode, decodes), (prefill, prefills)):
            entries = [(at + a, weight(arcs[a].kv)) for a in group]
            rows.add([*entries, (flag, -most)], upper=0)

    for group, flag in ((decode, decodes), (prefill, prefills)):
        for a in group:
            rows.add([(at + a, 1), (flag, -_most(net, a))], upper=0)

    for limit, group, flag in (
        (prob.batch_tokens, decode + prefill, used),
        (prob.prefill_tokens, prefill, prefills),
    ):
        if limit < UNLIMITED:
            rows.add([*((at + a, arcs[a].tokens) for a in group), (flag, -limit)], upper=0)

    if prob.running < prob.n:
        rows.add([(at + a, 1) for a in held] + [(used, -prob.running)], upper=0)

    rows.add([(used, 1)] + [(at + a, -1) for a in decode + prefill], upper=0)
    rows.add([(used, 1), (decodes, -1), (prefills, -1)], upper=0)
    for flag in (decodes, prefills):
        rows.add([(flag, 1), (used, -1)], upper=0)
    if not prob.hybrid:
        rows.add([(decodes, 1), (prefills, 1)], upper=1)


def _start_values(net: Network, start: Plan, batches: int) -> NDArray[np.float64]:
    """Return the columns' values of a list of batches."""
    prob, arcs = net.prob, net.arcs
    values = np.zeros((batches, len(arcs) + 3))
    by_key = {(a.source, a.kind, a.tokens): k for k, a in enumerate(arcs)}
    now = Requests(prob)
    at = [0] * prob.n

    for v, members in enumerate(prob.classes):
        for i in members:
            at[i] = v

    for j in range(batches):
        batch = start[j] if j < len(start) else Batch(())
        tokens = dict(batch.entries)
        for i in range(prob.n):
            if at[i] == DONE:
                continue

            kind = EVICT if i in batch.evicted else STAY
            if i in tokens:
                kind = REFILL if i in batch.evicted else DECODE if now.ready[i] else PREFILL
                values[j, -3] = values[j, -2 if kind == DECODE else -1] = 1

            a = by_key[at[i], kind, tokens.get(i, 0)]
            values[j, a] += 1
            at[i] = arcs[a].target

        now.evict(batch.evicted)
        now.process(batch.entries)

    return values.reshape(-1)


def _by_highs(flow: Flow, options: SolveOptions, unit: float) -> RawOutcome:
    """Solve in milliseconds, with a last row that keeps the objective in its range."""
    from optsched.optimize.solvers.highs import solve_linear_model

    cost = np.array(flow.cost, dtype=np.float64) * unit
    low, high = flow.range
    flow.rows.add(
        enumerate(cost.tolist()),
        lower=low * unit * (1 - 1e-12),
        upper=math.inf if high is None else high * unit,
    )
    columns = len(cost)
    model = flow.rows.model(
        cost=cost, lower=np.zeros(columns), upper=flow.most, integrality=np.ones(columns)
    )

    return solve_linear_model(model, options, start_values=flow.start)


def _by_cpsat(flow: Flow, options: SolveOptions, known: int | None) -> RawOutcome:
    """Solve in exact integers."""
    from ortools.sat.python import cp_model as cp

    from optsched.optimize.solvers.cpsat import solve_cp_model

    model, rows = cp.CpModel(), flow.rows
    variables = [model.new_int_var(0, most, "") for most in flow.most]
    total = cp.LinearExpr.weighted_sum(variables, flow.cost)
    low, high = flow.range
    model.add_linear_constraint(total, low, cp.INT_MAX if high is None else high)
    begin = 0

    for end, lower, upper in zip(rows.end, rows.lower, rows.upper, strict=True):
        expression = cp.LinearExpr.weighted_sum(
            [variables[k] for k in rows.column[begin:end]], rows.value[begin:end]
        )
        model.add_linear_constraint(
            expression,
            int(lower) if math.isfinite(lower) else cp.INT_MIN,
            int(upper) if math.isfinite(upper) else cp.INT_MAX,
        )
        begin = end

    if flow.start is not None:
        for variable, value in zip(variables, flow.start.tolist(), strict=True):
            model.add_hint(variable, int(value))

    model.minimize(total)
    return solve_cp_model(model, options, read=variables, known=known)


def _solve(task: Task, options: SolveOptions, *, exact: bool) -> Answer:
    """Solve the flow model, by CP-SAT if ``exact``, else by HiGHS."""
    begin = work_time()
    prob, start, times = begun(task, options)
    try:
        flow = flow_model(network(prob), start, max_batches(prob, times))
    except OutOfTimeError as late:
        return unbuilt(prob, start, late)

    scale = Scale.units() if exact else Scale.milliseconds(prob)
    spent = work_time() - begin
    left = scale.told(options.after(spent), prob)
    versions: dict[str, Any]

    if exact:
        from optsched.optimize.solvers.cpsat import cpsat_version

        raw = _by_cpsat(flow, left, known_level(prob, times))
        versions = {"ortools": cpsat_version()}
    else:
        from optsched.optimize.solvers.highs import highs_version

        raw, versions = _by_highs(flow, left, float(scale.unit)), {"highspy": highs_version()}

    raw = replace(raw, build_s=spent + raw.build_s)
    plan = claimed = None
    if raw.values is not None:
        plan = flow.plan(raw.values)
        if raw.status is Status.OPTIMAL:
            counts = np.rint(raw.values).astype(np.int64).tolist()
            claimed = sum(c * k for c, k in zip(flow.cost, counts, strict=True))

    claim = Claim(raw.status, plan, scale.level(raw.bound), level=claimed)
    if not exact:
        claim = confirmed(prob, claim, left.after(raw.solve_s))

    return answer(
        prob,
        claim,
        fallback=start,
        room=flow.batches,
        native_status=raw.native_status,
        build_s=raw.build_s,
        solve_s=raw.solve_s,
        versions=versions,
    )


def _solve_by_highs(task: Task, options: SolveOptions) -> Answer:
    return _solve(task, options, exact=False)


def _solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    return _solve(task, options, exact=True)


METHODS = {
    "infermax": {
        "flow-highs": Method(
            "aggregated flow of requests through batches, by HiGHS",
            _solve_by_highs,
            ENDS,
            LIMITS,
            extras=EXTRAS,
            features=MODELLED,
        ),
        "flow-cpsat": Method(
            "aggregated flow of requests through batches, by CP-SAT in exact integers",
            _solve_by_cpsat,
            ENDS,
            LIMITS,
            extras=EXTRAS,
            features=MODELLED,
        ),
    }
}
