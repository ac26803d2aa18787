"""The paper's program (003, section 3.3), family by family, by PuLP: readable, exported as LP, MPS.

For request i and batch j = 1..J (I, m, c integers, the others binary): I_ij input size, m_ij
cached after the batch, c_ij tokens, d_ij [decode phase before j], e_ij [evicted], g_ij [produces a
token], cz_ij = [c > 0], mz_ij = [m > 0], ed = e d, f_ij [finished before j], and dg_ij = d (1 - e)
cz, which is what family (5) of the paper subtracts. u_j, hd_j, hp_j: batch j is used, decodes,
prefills. An eviction and its refill may share a batch
(`optsched.optimize.formulations.batches.infermax` says why and what it changes): then d no longer
binds c, and I is already the new input.

**Big-M constants.** With S = s + o - 1: s <= I <= S, 0 <= m <= S, m - I <= o - 1 (m is S at most,
and I at least s; while I = s + k, k tokens are in I already), 0 <= c <= K = min(S, C, M - offset).

- d = 1: m_{j-1} >= I_{j-1}, relaxed by S (I - m <= S); d = 0: m_{j-1} <= I_{j-1} - 1, relaxed by
  o (m - I + 1 <= o).
- (2) ed = 1: I_j = m_{j-1} + 1, relaxed by o above m (m + 1 - I <= o) and by S - 1 below it
  (I - m - 1 <= S - 1); I_j <= I_{j-1} + (o - 1) ed, as all of I grows by o - 1 at most.
- (3) e or f: m_j = c_j, relaxed by S (m_j - c_j = m_{j-1} <= S); else m_j = m_{j-1} + c_j, relaxed
  by S. Not decoding: m_j <= I_j, relaxed by o - 1.
- (4) decoding: c <= 1, relaxed by K - 1.
- g = 1: m_j >= I_j, relaxed by S; processed without a token: m_j <= I_j - 1, relaxed by o.
- w_ij >= m_{j-1} - S (1 - dg), the KV read by a decode, at least s dg.
- q_ij >= (2 a + 1) c - a (a + 1) on prefills, the tangents of c^2, exact at every whole c; without
  chunks c is s..S there, so a is s..S - 1 (and q >= s^2).

Symmetry: equal requests are ordered by sum_j (J - j) g_ij, any one number being a valid order.
"""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.flow import scaled_progress
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
from optsched.optimize.formulations.batches.network import outline
from optsched.optimize.solvers.base import (
    PULP_STATUS,
    RawOutcome,
    SolveOptions,
    Status,
    settle_status,
)
from optsched.problem.errors import SolverError, UsageError

_MAX_TANGENTS = 256
_INTEGERS = ("I", "m", "c")
_BINARIES = ("d", "e", "g", "ed", "f", "cz", "mz", "dg")


class Program:
    """The PuLP problem and its variables by name, request and batch."""

    def __init__(self, prob: Problem, batches: int) -> None:
        import pulp

        self.prob, self.batches = prob, batches
        self.steps = range(1, batches + 1)
        if prob.chunked and prob.costs.prefill_cross:
            raise UsageError(
                "method: pulp-bigm cannot do chunks under a cost model with prefill_cross, a "
                "product of two decisions; cpsat can"
            )
        self.problem = pulp.LpProblem("infermax", pulp.LpMinimize)
        self.var: dict[tuple[Any, ...], Any] = {}
        self._variables(pulp)
        self._objective(pulp)
        for i in range(prob.n):
            self._tokens(pulp, i)
            for j in self.steps:
                self._phase(i, j)
                self._input_size(i, j)
                self._memory(i, j)
                self._processed(i, j)
                self._costs(i, j)
                if not prob.chunked:
                    self._valid(pulp, i, j)
        for j in self.steps:
            self._limits(pulp, j)
            self._batch(pulp, j)
        self._symmetry(pulp)
        self._needed(pulp)

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        """Return a variable, or its value before the first batch."""
        name, i, j = key if len(key) == 3 else (key[0], None, key[1])
        if j == 0 and i is not None:
            return self.prob.prompt[i] if name == "I" else 0
        return self.var[key]

    def _add(self, row: Any, name: str) -> None:
        self.problem += row, name

    def _sizes(self, i: int) -> tuple[int, int, int, int]:
        s, o = self.prob.prompt[i], self.prob.output[i]
        top = s + o - 1
        return s, o, top, min(top, self.prob.batch_tokens, self.prob.capacity - self.prob.offset)

    def _variables(self, pulp: Any) -> None:
        for i in range(self.prob.n):
            s, _, top, most = self._sizes(i)
            span = {"I": (s, top), "m": (0, top), "c": (0, most)}
            for j in self.steps:
                for name in _INTEGERS:
                    low, high = span[name]
                    self.var[name, i, j] = pulp.LpVariable(
                        f"{name}_{i}_{j}", low, high, cat=pulp.LpInteger
                    )
                for name in _BINARIES:
                    self.var[name, i, j] = pulp.LpVariable(f"{name}_{i}_{j}", cat=pulp.LpBinary)
                self.var["w", i, j] = pulp.LpVariable(f"w_{i}_{j}", 0)
                self.var["q", i, j] = pulp.LpVariable(f"q_{i}_{j}", 0)
                self.var["z", i, j] = pulp.LpVariable(f"z_{i}_{j}", 0)
        for j in self.steps:
            for name in ("u", "hd", "hp"):
                self.var[name, j] = pulp.LpVariable(f"{name}_{j}", cat=pulp.LpBinary)

    def _objective(self, pulp: Any) -> None:
        c, prob = self.prob.costs, self.prob
        terms = []
        for j in self.steps:
            terms += [c.base * self["u", j], c.decode_base * self["hd", j]]
            terms.append(c.prefill_base * self["hp", j])
            for i in range(prob.n):
                tokens, decodes, works = self["c", i, j], self["dg", i, j], self["cz", i, j]
                terms += [
                    (c.token + c.prefill_token) * tokens - c.prefill_token * decodes,
                    c.decode_request * decodes + c.prefill_request * (works - decodes),
                    c.decode_kv * self["w", i, j] + c.prefill_square * self["q", i, j],
                    c.prefill_kv * self["z", i, j],
                ]
        self.total = pulp.lpSum(terms)
        unit = float(c.unit_s * 1000)
        scaled = pulp.LpAffineExpression({v: k * unit for v, k in self.total.items()})
        self.problem += scaled, "makespan_ms"
        if prob.cutoff is not None:
            below = float((prob.cutoff - Fraction(1, 2)) * c.unit_s * 1000)
            self._add(scaled <= below, "below")

    def _tokens(self, pulp: Any, i: int) -> None:
        """(1) Every request produces its tokens; f says when it has."""
        o = self.prob.output[i]
        self._add(pulp.lpSum(self["g", i, j] for j in self.steps) == o, f"tokens_{i}")
        for j in self.steps:
            before = pulp.lpSum(self["g", i, k] for k in range(1, j))
            self._add(o * self["f", i, j] <= before, f"finished_{i}_{j}")
            self._add(before <= o - 1 + self["f", i, j], f"unfinished_{i}_{j}")

    def _phase(self, i: int, j: int) -> None:
        """d: the input is cached. ed = e and d. Evictions free something."""
        _, o, top, _ = self._sizes(i)
        m, size, d, e = self["m", i, j - 1], self["I", i, j - 1], self["d", i, j], self["e", i, j]
        ed = self["ed", i, j]
        self._add(m >= size - top * (1 - d), f"decode_phase_{i}_{j}")
        self._add(m <= size - 1 + o * d, f"prefill_phase_{i}_{j}")
        for k, row in enumerate((ed <= e, ed <= d, ed >= e + d - 1)):
            self._add(row, f"evicted_decode_{k}_{i}_{j}")
        self._add(e <= self["mz", i, j - 1], f"evict_cached_{i}_{j}")
        self._add(e <= 1 - self["f", i, j], f"evict_running_{i}_{j}")
        if self.prob.eviction_free:
            self._add(e == 0, f"eviction_free_{i}_{j}")

    def _input_size(self, i: int, j: int) -> None:
        """(2) Evicted in decode phase, the input grows by what was generated."""
        _, o, top, _ = self._sizes(i)
        now, before, m = self["I", i, j], self["I", i, j - 1], self["m", i, j - 1]
        ed = self["ed", i, j]
        self._add(now >= before, f"input_keeps_{i}_{j}")
        self._add(now <= before + (o - 1) * ed, f"input_stays_{i}_{j}")
        self._add(now >= m + 1 - o * (1 - ed), f"input_grows_{i}_{j}")
        self._add(now <= m + 1 + (top - 1) * (1 - ed), f"input_exact_{i}_{j}")

    def _memory(self, i: int, j: int) -> None:
        """(3) KV after the batch."""
        _, o, top, _ = self._sizes(i)
        m, before, c = self["m", i, j], self["m", i, j - 1], self["c", i, j]
        gone = self["e", i, j] + self["f", i, j]
        self._add(m <= before + c, f"memory_at_most_{i}_{j}")
        self._add(m >= before + c - top * gone, f"memory_kept_{i}_{j}")
        self._add(m >= c, f"memory_at_least_{i}_{j}")
        self._add(m <= c + top * (1 - gone), f"memory_freed_{i}_{j}")
        decoding = self["d", i, j] - self["ed", i, j]
        self._add(m <= self["I", i, j] + (o - 1) * decoding, f"memory_input_{i}_{j}")
        self._add(m <= top * self["mz", i, j], f"holds_{i}_{j}")
        self._add(self["mz", i, j] <= m, f"holds_not_{i}_{j}")

    def _processed(self, i: int, j: int) -> None:
        """(4) Tokens processed, and whether one is produced."""
        _, o, top, most = self._sizes(i)
        c, cz, g, dg = self["c", i, j], self["cz", i, j], self["g", i, j], self["dg", i, j]
        m, size = self["m", i, j], self["I", i, j]
        decoding = self["d", i, j] - self["ed", i, j]
        self._add(c <= 1 + (most - 1) * (1 - decoding), f"one_token_{i}_{j}")
        self._add(c <= most * cz, f"processed_{i}_{j}")
        self._add(c >= cz, f"processed_not_{i}_{j}")
        self._add(cz <= 1 - self["f", i, j], f"done_{i}_{j}")
        self._add(g <= cz, f"produces_{i}_{j}")
        self._add(m >= size - top * (1 - g), f"complete_{i}_{j}")
        self._add(m <= size - 1 + o * (g + 1 - cz), f"incomplete_{i}_{j}")
        for k, row in enumerate((dg <= decoding, dg <= cz, dg >= decoding + cz - 1)):
            self._add(row, f"decodes_{k}_{i}_{j}")
        if not self.prob.chunked:
            self._add(g >= cz, f"whole_{i}_{j}")

    def _costs(self, i: int, j: int) -> None:
        """KV read by decodes (w) and prefills (z), squares of prefills (q)."""
        s, _, top, most = self._sizes(i)
        costs, before = self.prob.costs, self["m", i, j - 1]
        dg, prefills = self["dg", i, j], self["cz", i, j] - self["dg", i, j]
        if costs.decode_kv:
            self._add(self["w", i, j] >= before - top * (1 - dg), f"kv_read_{i}_{j}")
            self._add(self["w", i, j] >= s * dg, f"kv_read_least_{i}_{j}")
        if costs.prefill_kv and self.prob.chunked:
            gone = 1 - prefills + self["e", i, j]
            self._add(self["z", i, j] >= before - top * gone, f"kv_prefill_{i}_{j}")
        if costs.prefill_square:
            points = range(most) if self.prob.chunked else range(max(s - 1, 0), most)
            if len(points) > _MAX_TANGENTS:
                raise UsageError(
                    f"method: pulp-bigm has no more than {_MAX_TANGENTS} tangents of a square; "
                    f"request {i} needs {len(points)}; cpsat has no such limit"
                )
            part = self["c", i, j] - dg
            for a in points:
                square = (2 * a + 1) * part - a * (a + 1) * prefills
                self._add(self["q", i, j] >= square, f"square_{a}_{i}_{j}")

    def _valid(self, pulp: Any, i: int, j: int) -> None:
        """Valid without chunks: what is cached is s + k - 1, k tokens being produced so far."""
        s, o, top, _ = self._sizes(i)
        produced = pulp.lpSum(self["g", i, k] for k in range(1, j + 1))
        m, mz, dg = self["m", i, j], self["mz", i, j], self["dg", i, j]
        self._add(m >= s - 1 + produced - top * (1 - mz), f"cached_{i}_{j}")
        self._add(m <= s - 1 + produced, f"cached_most_{i}_{j}")
        self._add(m >= s * mz, f"cached_least_{i}_{j}")
        self._add(self["I", i, j] <= s + produced, f"input_most_{i}_{j}")
        prefills = self["cz", i, j] - dg
        self._add(self["c", i, j] >= s * prefills + dg, f"prefill_least_{i}_{j}")
        self._add(dg <= self["mz", i, j - 1], f"decode_cached_{i}_{j}")
        self._add(dg + self["e", i, j] <= 1, f"decode_kept_{i}_{j}")
        self._add(self["cz", i, j] <= mz, f"processed_held_{i}_{j}")
        # A prefill processes the prompt and all that was produced before.
        before = pulp.lpSum(self["g", i, k] for k in range(1, j))
        tokens = s * prefills + before - o * (1 - prefills)
        self._add(self["c", i, j] >= tokens, f"refill_least_{i}_{j}")

    def _limits(self, pulp: Any, j: int) -> None:
        """(5) C, P, M and R_max."""
        prob, requests = self.prob, range(self.prob.n)
        tokens = [self["c", i, j] for i in requests]
        if prob.batch_tokens < UNLIMITED:
            self._add(pulp.lpSum(tokens) <= prob.batch_tokens, f"batch_tokens_{j}")
        if prob.prefill_tokens < UNLIMITED:
            prefill = pulp.lpSum(self["c", i, j] - self["dg", i, j] for i in requests)
            self._add(prefill <= prob.prefill_tokens, f"prefill_tokens_{j}")
        kv = pulp.lpSum(self["m", i, j] + prob.offset * self["mz", i, j] for i in requests)
        self._add(kv <= prob.capacity * self["u", j], f"kv_capacity_{j}")
        if prob.running < prob.n:
            self._add(
                pulp.lpSum(self["mz", i, j] for i in requests) <= prob.running, f"running_{j}"
            )

    def _batch(self, pulp: Any, j: int) -> None:
        """Batches in use come first; what they hold."""
        requests = range(self.prob.n)
        used, decodes, prefills = self["u", j], self["hd", j], self["hp", j]
        for i in requests:
            self._add(decodes >= self["dg", i, j], f"has_decode_{i}_{j}")
            self._add(prefills >= self["cz", i, j] - self["dg", i, j], f"has_prefill_{i}_{j}")
            self._add(self["e", i, j] <= used, f"evict_used_{i}_{j}")
        self._add(used <= pulp.lpSum(self["cz", i, j] for i in requests), f"not_empty_{j}")
        self._add(used <= decodes + prefills, f"some_phase_{j}")
        self._add(decodes <= used, f"decode_used_{j}")
        self._add(prefills <= used, f"prefill_used_{j}")
        if j > 1:
            self._add(used <= self["u", j - 1], f"first_{j}")
        if not self.prob.hybrid:
            self._add(decodes + prefills <= 1, f"one_phase_{j}")

    def _symmetry(self, pulp: Any) -> None:
        for members in self.prob.classes:
            for k in range(1, len(members)):
                early, late = (
                    pulp.lpSum((self.batches - j) * self["g", i, j] for j in self.steps)
                    for i in (members[k - 1], members[k])
                )
                self._add(early >= late, f"order_{members[k - 1]}_{members[k]}")

    def _needed(self, pulp: Any) -> None:
        """Valid: the batches that bin packing and the KV volume prove, and so the makespan."""
        net = outline(self.prob)
        needed, prefills = net.batch_bound()
        least = float(net.least_makespan() * self.prob.costs.unit_s * 1000)
        self._add(self.problem.objective >= least * (1 - 1e-9), "least_makespan")
        self._add(pulp.lpSum(self["u", j] for j in self.steps) >= needed, "batches_needed")
        self._add(pulp.lpSum(self["hp", j] for j in self.steps) >= prefills, "prefills_needed")

    def start_values(self, plan: list[Batch]) -> dict[tuple[Any, ...], int]:
        """Return the variables' values of a list of batches (those left out are 0)."""
        prob, out = self.prob, dict.fromkeys(self.var, 0)
        cached, size = [0] * prob.n, list(prob.prompt)
        produced = [0] * prob.n
        for j in self.steps:
            batch = plan[j - 1] if j <= len(plan) else Batch(())
            tokens, evicted = dict(batch.entries), set(batch.evicted)
            out["u", j] = int(bool(tokens))
            for i in range(prob.n):
                finished = produced[i] == prob.output[i]
                d, e, c = int(cached[i] >= size[i]), int(i in evicted), tokens.get(i, 0)
                before = cached[i]
                if d and e:
                    size[i] = before + 1
                cached[i] = c if e or finished else before + c
                decodes = int(d and not e and c > 0)
                gained = int(c > 0 and cached[i] >= size[i])
                produced[i] += gained
                for name, value in (
                    ("I", size[i]), ("m", cached[i]), ("c", c), ("d", d), ("e", e), ("g", gained),
                    ("ed", d * e), ("f", int(finished)), ("cz", int(c > 0)),
                    ("mz", int(cached[i] > 0)), ("dg", decodes), ("w", before * decodes),
                    ("q", c * c * (1 - decodes)),
                    ("z", before * int(c > 0 and not decodes and not e)),
                ):  # fmt: skip
                    out[name, i, j] = value
                out["hd", j] |= decodes
                out["hp", j] |= int(c > 0 and not decodes)
        return out

    def plan(self) -> list[Batch]:
        """Return the batches of the problem's present values."""
        out = []
        for j in self.steps:
            value = {
                (n, i): round(self[n, i, j].varValue)
                for n in ("c", "e")
                for i in range(self.prob.n)
            }
            requests = range(self.prob.n)
            entries = tuple((i, value["c", i]) for i in requests if value["c", i])
            evicted = tuple(i for i in requests if value["e", i])
            if entries:
                out.append(Batch(entries, evicted))
        return out


def _build(task: Task, options: SolveOptions) -> tuple[Problem, Program, list[Batch] | None]:
    prob = problem(task)
    start, times = best_start(prob, options.warm_start)
    return prob, Program(prob, prob.max_batches(times)), start


def export(task: Task, format_name: str, path: str | Path) -> None:
    """Write the program of a task as ``"lp"`` or ``"mps"``.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem`.
    """
    if (task.instance.arrival > task.instance.arrival.min()).any():
        raise UsageError(
            "export: the program has no arrivals, and these requests arrive at different times; "
            "solve --method cpsat can"
        )
    _, program, _ = _build(task, SolveOptions())
    write = program.problem.writeLP if format_name == "lp" else program.problem.writeMPS
    write(str(path))


def write_lp(task: Task, path: str | Path) -> None:
    """Write the program of a task as an LP file; see `export`."""
    export(task, "lp", path)


def write_mps(task: Task, path: str | Path) -> None:
    """Write the program of a task as an MPS file; see `export`."""
    export(task, "mps", path)


def solve_by_pulp(task: Task, options: SolveOptions) -> Answer:
    """Solve the paper's program by PuLP's HiGHS, or by another of its solvers.

    ``extras["solver"]`` names another solver of PuLP; then neither its bound before a proof nor
    progress is known, and it starts from nothing.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem`; a solver that PuLP does not
        have here.
    SolverError
        The solver failed.
    """
    begin = time.perf_counter()
    prob, program, start = _build(task, options)
    options = options.after(time.perf_counter() - begin)
    other = task.extras.get("solver")
    if other:
        return _by_other(prob, program, options, str(other), time.perf_counter() - begin)
    return _by_highs(prob, program, options, start, begin)


def _by_highs(
    prob: Problem, program: Program, options: SolveOptions, start: list[Batch] | None, begin: float
) -> Answer:
    import pulp

    from optsched.optimize.solvers.highs import highs_version
    from optsched.optimize.solvers.pulp_highs import OutOfTime, solve_pulp_problem

    first = None
    if start is not None:
        first = [(program.var[key], value) for key, value in program.start_values(start).items()]
    unit = prob.costs.unit_s * 1000
    options = scaled_progress(options, prob, unit)
    built_s = time.perf_counter() - begin
    try:
        raw = solve_pulp_problem(program.problem, options, integral_objective=False, start=first)
        batches = None if raw.values is None else program.plan()
    except OutOfTime as why:
        status = Status.NO_INCUMBENT if start is None else Status.FEASIBLE
        raw, batches = RawOutcome(status, None, None, None, str(why)), start
    level = None if raw.bound is None else Fraction(raw.bound) / unit
    return _answer(
        prob, program, raw.status, batches, level,
        native_status=raw.native_status, build_s=built_s, solve_s=raw.solve_s,
        versions={"pulp": pulp.__version__, "highspy": highs_version()},
    )  # fmt: skip


def _by_other(
    prob: Problem, program: Program, options: SolveOptions, name: str, built_s: float
) -> Answer:
    import pulp

    available = pulp.listSolvers(onlyAvailable=True)
    if name not in available:
        raise UsageError(
            f"solver: PuLP has no {name!r} here; it has {', '.join(sorted(available))}"
        )
    begin = time.perf_counter()
    solver = pulp.getSolver(name, msg=False, timeLimit=options.time_limit_s)
    program.problem.solve(solver)
    status = PULP_STATUS[program.problem.sol_status]
    batches = program.plan() if status in (Status.OPTIMAL, Status.FEASIBLE) else None
    level = None
    if status is Status.OPTIMAL:
        level = Fraction(pulp.value(program.problem.objective)) / (prob.costs.unit_s * 1000)
    return _answer(
        prob, program, status, batches, level,
        native_status=f"{name}: {pulp.LpSolution[program.problem.sol_status]}",
        build_s=built_s, solve_s=time.perf_counter() - begin,
        versions={"pulp": pulp.__version__},
    )  # fmt: skip


def _answer(
    prob: Problem,
    program: Program,
    status: Status,
    batches: list[Batch] | None,
    level: Fraction | int | None,
    **rest: Any,
) -> Answer:
    if status is Status.INFEASIBLE:
        if prob.cutoff is None:
            raise SolverError(
                f"infermax: {program.batches} batches are said not to suffice, although every "
                "request can be served alone; the model or the solver is wrong"
            )
        level = prob.cutoff
    found = answer(prob, status, batches, level, **rest)
    if status is Status.OPTIMAL and level is not None and found.objective is not None:
        proved = prob.to_value("makespan", level)
        reached = found.objective
        if prob.objectives[0] == "tps":
            proved, reached = prob.to_value("tps", level), -reached
            proved = -proved
        if settle_status(status, reached, proved, integral_objective=False) is not status:
            raise SolverError(
                f"pulp-bigm: calls {found.objective:.12g} optimal, but its bound is {proved:.12g}"
            )
    return found


METHODS = {
    "infermax": {
        "pulp-bigm": Method(
            "the paper's program with tight Big-M constants, readable, by PuLP and HiGHS",
            solve_by_pulp,
            ("makespan", "tps"),
            LIMITS | {"chunked_prefill"},
            extras=EXTRAS | {"solver"},
        )
    }
}
