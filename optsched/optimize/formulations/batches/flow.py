"""The aggregated flow model of infermax: requests of a class as integer flows through batches.

Nodes and arcs are `infermax_network`'s, once for every batch j = 1..J. Variables: x_aj, how many
requests take arc a in batch j; u_j, d_j, p_j: batch j is used, decodes, prefills::

    min  sum_j base u_j + decode_base d_j + prefill_base p_j + sum_a work_a x_aj
    s.t. flow through every node between two batches; all requests end
         sum_a kv_a x_aj <= M u_j,  sum tokens x <= C,  of prefills <= P,  of those with KV <= R_max
         x_aj <= n_a d_j (decode arcs), x_aj <= n_a p_j (prefill arcs), n_a = min(n, M / kv_a)
         u_j <= sum of works x, u_j <= d_j + p_j, d_j <= u_j, p_j <= u_j, u_{j+1} <= u_j
         d_j + p_j <= 1 (hybrid batching off)

No constant multiplies sizes: squares are coefficients of arcs. Valid cuts, all of which hold for
whole numbers: every dual feasible function f of `Network.functions`, sum f(kv_a) x_aj <= most u_j
(also over decode arcs against d_j, prefill arcs against p_j); sum u >= batches and sum p >= prefill
batches needed; the objective at least the search's bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.greedy import best_start
from optsched.optimize.formulations.batches.infermax import (
    EXTRAS,
    LIMITS,
    UNLIMITED,
    Batch,
    Problem,
    answer,
    problem,
)
from optsched.optimize.formulations.batches.network import (
    DECODE,
    DONE,
    EVICT,
    REFILL,
    STAY,
    Network,
    network,
)
from optsched.optimize.solvers.base import LinearModel, Progress, RawOutcome, SolveOptions, Status
from optsched.problem.errors import SolverError, UsageError

MAX_ENTRIES = 20_000_000
_CUTS = 5


@dataclass(frozen=True, eq=False)
class Flow:
    """The flow model and what its columns mean.

    Parameters
    ----------
    net : Network
    batches : int
        J.
    model : LinearModel
        Costs in milliseconds.
    cost : list of int
        Costs in the problem's exact units.
    range : tuple of int
        Least and largest cost (None: any), the model's last row.
    start : ndarray, optional
        Values of the schedule at hand.
    """

    net: Network
    batches: int
    model: LinearModel
    cost: list[int]
    range: tuple[int, int | None]
    start: NDArray[np.float64] | None

    @property
    def stride(self) -> int:
        """Columns per batch: the arcs, then u, d, p."""
        return len(self.net.arcs) + 3

    def steps(self, values: NDArray[np.float64]) -> list[dict[int, int]]:
        """Return the numbers of arcs of every batch used."""
        table = np.rint(values).astype(np.int64).reshape(self.batches, self.stride)
        arcs = table[:, : len(self.net.arcs)]
        works = [arc.works for arc in self.net.arcs]
        return [
            {int(a): int(row[a]) for a in np.flatnonzero(row)} for row in arcs if row[works].any()
        ]


class _Rows:
    """Collects rows of a linear model."""

    def __init__(self) -> None:
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[int] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(
        self,
        entries: Iterable[tuple[int, int]],
        *,
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """Add lower <= sum value * column <= upper."""
        at = len(self.lower)
        for column, value in entries:
            if value:
                self.row.append(at)
                self.column.append(column)
                self.value.append(value)
        self.lower.append(lower)
        self.upper.append(upper)


def flow_model(prob: Problem, start: list[Batch] | None, most_batches: int) -> Flow:
    """Return the flow model with room for ``most_batches`` batches.

    Raises
    ------
    UsageError
        More than `MAX_ENTRIES` nonzeros.
    """
    net = network(prob)
    arcs, nodes = net.arcs, len(net.nodes)
    if 8 * len(arcs) * most_batches > MAX_ENTRIES:
        raise UsageError(
            f"method: the flow model of {len(arcs)} arcs and {most_batches} batches has more than "
            f"{MAX_ENTRIES:.2g} nonzeros; astar needs none"
        )
    width = len(arcs) + 3
    rows = _Rows()
    needed, prefills = net.batch_bound()

    def x(a: int, j: int) -> int:
        return j * width + a

    into: list[list[int]] = [[] for _ in range(nodes)]
    out: list[list[int]] = [[] for _ in range(nodes)]
    for a, arc in enumerate(arcs):
        out[arc.source].append(a)
        if arc.target != DONE:
            into[arc.target].append(a)
    supply = dict(zip(net.entry, net.counts, strict=True))
    for v in range(nodes):
        amount = supply.get(v, 0)
        rows.add(((x(a, 0), 1) for a in out[v]), lower=amount, upper=amount)
    for j in range(most_batches):
        for v in range(nodes):
            entries = [(x(a, j), 1) for a in into[v]]
            if j + 1 < most_batches:
                entries += [(x(a, j + 1), -1) for a in out[v]]
            rows.add(entries, lower=0, upper=0)
        _batch_rows(net, rows, j * width)
        if j:
            rows.add([(j * width + len(arcs), 1), ((j - 1) * width + len(arcs), -1)], upper=0)
    used = [(j * width + len(arcs), 1) for j in range(most_batches)]
    rows.add(used, lower=needed)
    rows.add(((k + 2, 1) for k, _ in used), lower=prefills)

    c = prob.costs
    cost = ([arc.work for arc in arcs] + [c.base, c.decode_base, c.prefill_base]) * most_batches
    low, high = net.least_makespan(), None
    if prob.cutoff is not None:
        high = math.ceil(prob.cutoff) - 1
    n = [net.counts[net.nodes[arc.source].cls] for arc in arcs]
    top = [
        min(count, prob.capacity // arc.kv) if arc.kv else count
        for count, arc in zip(n, arcs, strict=True)
    ]
    model = _arrays(rows, cost, (low, high), [*top, 1, 1, 1] * most_batches, prob)
    values = None if start is None else _start_values(net, start, most_batches)
    return Flow(net, most_batches, model, cost, (low, high), values)


def _ms(prob: Problem) -> Fraction:
    return prob.costs.unit_s * 1000


def _batch_rows(net: Network, rows: _Rows, at: int) -> None:
    """Add the rows of the batch whose columns begin at ``at``."""
    prob, arcs = net.prob, net.arcs
    used, decodes, prefills = at + len(arcs), at + len(arcs) + 1, at + len(arcs) + 2
    decode = [a for a, arc in enumerate(arcs) if arc.kind == DECODE]
    prefill = [a for a, arc in enumerate(arcs) if arc.prefills]
    held = [a for a, arc in enumerate(arcs) if arc.kv]
    room = prob.capacity
    rows.add([(at + a, arcs[a].kv) for a in held] + [(used, -room)], upper=0)
    for weight, most in net.functions[:_CUTS]:
        for group, flag in ((held, used), (decode, decodes), (prefill, prefills)):
            entries = [(at + a, weight(arcs[a].kv)) for a in group]
            rows.add([*entries, (flag, -most)], upper=0)
    for group, flag in ((decode, decodes), (prefill, prefills)):
        for a in group:
            count = net.counts[net.nodes[arcs[a].source].cls]
            rows.add([(at + a, 1), (flag, -min(count, room // arcs[a].kv))], upper=0)
    n = sum(net.counts)
    if prob.batch_tokens < UNLIMITED:
        entries = [(at + a, arcs[a].tokens) for a in decode + prefill]
        rows.add([*entries, (used, -prob.batch_tokens)], upper=0)
    if prob.prefill_tokens < UNLIMITED:
        entries = [(at + a, arcs[a].tokens) for a in prefill]
        rows.add([*entries, (prefills, -prob.prefill_tokens)], upper=0)
    if prob.running < n:
        rows.add([(at + a, 1) for a in held] + [(used, -prob.running)], upper=0)
    rows.add([(used, 1)] + [(at + a, -1) for a in decode + prefill], upper=0)
    rows.add([(used, 1), (decodes, -1), (prefills, -1)], upper=0)
    for flag in (decodes, prefills):
        rows.add([(flag, 1), (used, -1)], upper=0)
    if not prob.hybrid:
        rows.add([(decodes, 1), (prefills, 1)], upper=1)


def _arrays(
    rows: _Rows, cost: list[int], span: tuple[int, int | None], top: list[int], prob: Problem
) -> LinearModel:
    """Return the model in milliseconds, with a last row that holds the objective in ``span``."""
    columns = len(cost)
    unit = float(_ms(prob))
    floats = np.array(cost, dtype=np.float64) * unit
    priced = np.flatnonzero(floats)
    column = np.concatenate([np.array(rows.column, dtype=np.int64), priced])
    row = np.concatenate([np.array(rows.row), np.full(len(priced), len(rows.upper))])
    value = np.concatenate([np.array(rows.value, dtype=np.float64), floats[priced]])
    low, high = span
    rows.lower.append(low * unit * (1 - 1e-12))
    rows.upper.append(math.inf if high is None else high * unit)
    order = np.lexsort((row, column))
    start = np.zeros(columns + 1, dtype=np.int32)
    np.cumsum(np.bincount(column, minlength=columns), out=start[1:])
    return LinearModel(
        cost=floats,
        lower=np.zeros(columns),
        upper=np.array(top, dtype=np.float64),
        integrality=np.ones(columns, dtype=np.int32),
        start=start,
        index=row[order].astype(np.int32),
        value=value[order],
        row_lower=np.array(rows.lower, dtype=np.float64),
        row_upper=np.array(rows.upper, dtype=np.float64),
    )


def _start_values(net: Network, start: list[Batch], most_batches: int) -> NDArray[np.float64]:
    """Return the columns' values of a list of batches."""
    arcs = net.arcs
    width = len(arcs) + 3
    values = np.zeros((most_batches, width))
    by_key = {(a.source, a.kind, a.tokens): k for k, a in enumerate(arcs)}
    at = [0] * net.prob.n
    for members, v in zip(net.prob.classes, net.entry, strict=True):
        for i in members:
            at[i] = v
    for j in range(most_batches):
        batch = start[j] if j < len(start) else Batch(())
        evicted = set(batch.evicted)
        tokens = dict(batch.entries)
        for i in range(net.prob.n):
            if at[i] == DONE:
                continue
            node = net.nodes[at[i]]
            if i in tokens:
                if i in evicted:
                    kind = REFILL
                else:
                    kind = DECODE if node.ready else REFILL - 1
                a = by_key[at[i], kind, tokens[i]]
            else:
                a = by_key[at[i], EVICT if i in evicted else STAY, 0]
            values[j, a] += 1
            if arcs[a].works:
                values[j, -3] = 1
                values[j, -2 if kind == DECODE else -1] = 1
            at[i] = arcs[a].target
    return values.reshape(-1)


def _prepare(task: Task, options: SolveOptions) -> tuple[Problem, Flow, list[Batch] | None]:
    prob = problem(task)
    start, times = best_start(prob, options.warm_start)
    return prob, flow_model(prob, start, prob.max_batches(times)), start


def _finish(
    prob: Problem, flow: Flow, raw: RawOutcome, level: Fraction | int | None, **rest: Any
) -> Answer:
    """Return the answer of a solver's outcome, with the bound as a level."""
    status = raw.status
    batches = None
    if raw.values is not None:
        batches = flow.net.plan(flow.steps(raw.values))
    if status is Status.INFEASIBLE and prob.cutoff is None:
        raise SolverError(
            f"infermax: the flow model of {flow.batches} batches has no solution, although every "
            "request can be served alone; the model or the solver is wrong"
        )
    if status is Status.INFEASIBLE and prob.cutoff is not None:
        level = math.ceil(prob.cutoff)
    claimed = None
    if raw.values is not None and raw.status is Status.OPTIMAL:
        counts = np.rint(raw.values).astype(np.int64).tolist()
        claimed = sum(c * k for c, k in zip(flow.cost, counts, strict=True))
    return answer(
        prob,
        status,
        batches,
        level,
        claimed=claimed,
        native_status=raw.native_status,
        build_s=raw.build_s,
        solve_s=raw.solve_s,
        **rest,
    )


def scaled_progress(options: SolveOptions, prob: Problem, unit: Fraction) -> SolveOptions:
    """Return the options with progress told in the instance's unit."""
    tell = options.progress
    if tell is None:
        return options
    name = prob.objectives[0]

    def value(number: float | None) -> float | None:
        if number is None or not math.isfinite(number) or number < 0:
            return None
        return prob.to_value(name, Fraction(number) / unit)

    def scaled(progress: Progress) -> None:
        tell(Progress(progress.elapsed_s, value(progress.incumbent), value(progress.bound)))

    return replace(options, progress=scaled)


def solve_by_highs(task: Task, options: SolveOptions) -> Answer:
    """Solve the flow model by HiGHS.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem` and `flow_model`.
    """
    from optsched.optimize.solvers.highs import highs_version, solve_linear_model

    begin = time.perf_counter()
    prob, flow, start = _prepare(task, options)
    unit = _ms(prob)
    options = scaled_progress(options, prob, unit)
    built_s = time.perf_counter() - begin
    raw = solve_linear_model(flow.model, options.after(built_s), start_values=flow.start)
    level = None if raw.bound is None else Fraction(raw.bound) / unit
    raw = replace(raw, build_s=built_s + raw.build_s)
    versions = {"highspy": highs_version()}
    return _finish(prob, flow, raw, level, fallback=start, versions=versions)


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve the flow model by CP-SAT, with exact integer costs.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem` and `flow_model`.
    """
    from ortools.sat.python import cp_model as cp

    from optsched.optimize.solvers.cpsat import cpsat_version, solve_cp_model

    begin = time.perf_counter()
    prob, flow, start = _prepare(task, options)
    source = flow.model
    model = cp.CpModel()
    variables = [model.new_int_var(0, int(top), "") for top in source.upper]
    by_row: list[list[tuple[int, int]]] = [[] for _ in range(source.rows)]  # the last: in floats
    for k in range(source.columns):
        for entry in range(int(source.start[k]), int(source.start[k + 1])):
            by_row[source.index[entry]].append((k, int(source.value[entry])))
    total = cp.LinearExpr.weighted_sum(variables, flow.cost)
    least, most = flow.range
    model.add(total >= least)
    if most is not None:
        model.add(total <= most)
    for row, entries in enumerate(by_row[:-1]):
        low, high = source.row_lower[row], source.row_upper[row]
        expression = cp.LinearExpr.weighted_sum(
            [variables[k] for k, _ in entries], [value for _, value in entries]
        )
        model.add_linear_constraint(
            expression,
            int(low) if math.isfinite(low) else cp.INT_MIN,
            int(high) if math.isfinite(high) else cp.INT_MAX,
        )
    if flow.start is not None:
        for variable, value in zip(variables, flow.start.tolist(), strict=True):
            model.add_hint(variable, int(value))
    model.minimize(total)
    built_s = time.perf_counter() - begin
    options = scaled_progress(options, prob, Fraction(1))
    raw = solve_cp_model(
        model, options.after(built_s), read=variables, integral_objective=False, build_s=built_s
    )
    level = None if raw.bound is None else math.ceil(raw.bound)
    versions = {"ortools": cpsat_version()}
    return _finish(prob, flow, raw, level, fallback=start, versions=versions)


METHODS = {
    "infermax": {
        "flow-highs": Method(
            "aggregated flow of requests through batches, by HiGHS",
            solve_by_highs,
            ("makespan", "tps"),
            LIMITS,
            extras=EXTRAS,
        ),
        "flow-cpsat": Method(
            "aggregated flow of requests through batches, by CP-SAT in exact integers",
            solve_by_cpsat,
            ("makespan", "tps"),
            LIMITS,
            extras=EXTRAS,
        ),
    }
}
