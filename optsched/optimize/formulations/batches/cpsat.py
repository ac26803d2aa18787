"""InferMax's program for CP-SAT: conditionals as they stand, exact integer costs, every objective.

Variables per request i and batch j: D_ivj and P_ivj (decodes, or is prefilled, having produced v
tokens), G_ivj (token v + 1 is produced), k_ij produced so far, m_ij cached after the batch, hold_ij
= [m_ij > 0], and keep_ij (what was cached before the batch still is). Batches in use come first.

Without chunks every D and P produces a token, every token is produced once, and m follows from k
and hold. With chunks, c_ij is chosen and a request decodes iff its whole input was cached
(ready_ij).

**Symmetry.** Equal requests (s, o and arrival) take their first tokens in order of index: their
schedules can be exchanged as a whole. Ordering their tokens *in every batch* is not valid: an
evicted request may be overtaken by an equal one (`docs/infermax.md` has an instance).

**Redundant.** In every batch the dual feasible functions of `infermax_network` hold for the
requests processed; at least the batches, and prefill batches, that they need are there.

Times are integers of the cost model's unit. Without arrivals no pause helps any objective. TPOT
alone is best without a pause after the last arrival, which then does not matter. Only where TPOT
stands beside other objectives and requests arrive apart are the starts chosen; else batches start
as early as they may.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches.greedy import best_start
from optsched.optimize.formulations.batches.infermax import (
    EXTRAS,
    OBJECTIVES,
    SWITCHES,
    UNLIMITED,
    Batch,
    Problem,
    answer,
    exact_times,
    problem,
)
from optsched.optimize.formulations.batches.network import outline
from optsched.optimize.solvers.base import Progress, RawOutcome, SolveOptions, Status
from optsched.problem.errors import SolverError

_CUTS = 5
_MARGIN_S = 1e-12
"""Added to each chosen start, so that rounding does not put it before its predecessor's end."""


class _Model:
    """The CP-SAT model of a problem."""

    def __init__(self, prob: Problem, batches: int, start: list[Batch] | None) -> None:
        from ortools.sat.python import cp_model as cp

        self.cp, self.prob, self.batches = cp, prob, batches
        self.model: Any = cp.CpModel()
        self.requests, self.steps = range(prob.n), range(batches)
        bools = self.model.new_bool_var
        self.decode: list[list[list[Any]]] = []
        self.prefill: list[list[list[Any]]] = []
        self.gain: list[list[list[Any]]] = [[[] for _ in range(o)] for o in prob.output]
        self.produced, self.cached, self.hold, self.keep = (self._grid() for _ in range(4))
        self.tokens, self.work, self.prefill_tokens = (self._grid() for _ in range(3))
        self.ready = self._grid()
        for i in self.requests:
            tokens = range(prob.output[i])
            self.decode.append(
                [[bools(f"d_{i}_{v}_{j}") if v else 0 for j in self.steps] for v in tokens]
            )
            self.prefill.append([[bools(f"p_{i}_{v}_{j}") for j in self.steps] for v in tokens])
            self._request(i)
        self._symmetry()
        self._batches()
        self._times()
        if start is not None:
            self._hint(start)

    def _grid(self) -> list[list[Any]]:
        return [[None] * self.batches for _ in self.requests]

    def _request(self, i: int) -> None:
        """Add one request's states."""
        model, prob = self.model, self.prob
        s, o = prob.prompt[i], prob.output[i]
        decode, prefill = self.decode[i], self.prefill[i]
        for j in self.steps:
            before = self.produced[i][j - 1] if j else 0
            done = self._done(i, j - 1)
            held = self.hold[i][j - 1] if j else 0
            k = self.produced[i][j] = model.new_int_var(0, o, f"k_{i}_{j}")
            m = self.cached[i][j] = model.new_int_var(0, s + o - 1, f"m_{i}_{j}")
            hold = self.hold[i][j] = model.new_bool_var(f"hold_{i}_{j}")
            keep = self.keep[i][j] = model.new_bool_var(f"keep_{i}_{j}")
            column = [d[j] for d in decode[1:]] + [p[j] for p in prefill]
            model.add_at_most_one(column)
            model.add(keep <= held)
            model.add(keep + done <= 1)
            if prob.eviction_free and j:
                model.add(keep + done >= held)
            for v in range(o):
                for literal in (decode[v][j], prefill[v][j]):
                    if not isinstance(literal, int):
                        model.add(before == v).only_enforce_if(literal)
            add = self._chunked_step if prob.chunked else self._whole_step
            add(i, j, before, k, m, hold, keep)
        model.add(self.produced[i][-1] == o)

    def _done(self, i: int, j: int) -> Any:
        """Return an expression that is 1 iff a request has finished by the end of a batch."""
        return sum(self.gain[i][-1][: j + 1])

    def _whole_step(
        self, i: int, j: int, before: Any, k: Any, m: Any, hold: Any, keep: Any
    ) -> None:
        """Add a batch without chunks: everything processed produces a token."""
        model, prob, c = self.model, self.prob, self.prob.costs
        s, o = prob.prompt[i], prob.output[i]
        decode = [d[j] for d in self.decode[i]]
        prefill = [p[j] for p in self.prefill[i]]
        for v in range(o):
            if v == 0:
                self.gain[i][v].append(prefill[v])
                continue
            gain = model.new_bool_var(f"g_{i}_{v}_{j}")
            model.add(gain == decode[v] + prefill[v])
            self.gain[i][v].append(gain)
        if j == self.batches - 1:
            for v in range(o):
                model.add_exactly_one(self.gain[i][v])
        for v in range(1, o):  # each token after the one before it
            model.add(sum(self.gain[i][v][: j + 1]) <= sum(self.gain[i][v - 1][:j]))
        model.add(k == before + sum(decode) + sum(prefill))
        # Kept KV that is not decoded pauses; a prefill starts from nothing.
        model.add(sum(decode) <= keep)
        model.add(sum(prefill) + keep == hold)
        model.add(m == k + (s - 1)).only_enforce_if(hold)
        model.add(m == 0).only_enforce_if(~hold)
        self.prefill_tokens[i][j] = sum((s + v) * p for v, p in enumerate(prefill))
        self.tokens[i][j] = self.prefill_tokens[i][j] + sum(decode)
        self.work[i][j] = sum(c.prefill(s + v) * p for v, p in enumerate(prefill)) + sum(
            c.decode(s + v - 1) * decode[v] for v in range(1, o)
        )

    def _chunked_step(
        self, i: int, j: int, before: Any, k: Any, m: Any, hold: Any, keep: Any
    ) -> None:
        """Add a batch in which a prefill may process a part of its input."""
        model, prob, c = self.model, self.prob, self.prob.costs
        s, o = prob.prompt[i], prob.output[i]
        most = s + o - 1
        decode, prefill = sum(d[j] for d in self.decode[i]), sum(p[j] for p in self.prefill[i])
        names = f"{i}_{j}"
        have = model.new_int_var(0, most, f"b_{names}")
        if j:
            model.add(have == self.cached[i][j - 1]).only_enforce_if(keep)
        model.add(have == 0).only_enforce_if(~keep)
        tokens = model.new_int_var(0, min(most, prob.batch_tokens), f"c_{names}")
        model.add(m == have + tokens)
        model.add(m >= 1).only_enforce_if(hold)
        model.add(m == 0).only_enforce_if(~hold)
        ready = model.new_bool_var(f"r_{names}")  # decodes next, if its KV is kept
        stays = model.new_bool_var(f"rk_{names}")  # could decode now
        if j:
            model.add_multiplication_equality(stays, [self.ready[i][j - 1], keep])
        else:
            model.add(stays == 0)
        decodes, prefills = model.new_bool_var(f"dec_{names}"), model.new_bool_var(f"pre_{names}")
        model.add(decodes == decode)
        model.add(prefills == prefill)
        model.add_implication(decodes, stays)
        model.add_implication(prefills, ~stays)
        whole = model.new_bool_var(f"whole_{names}")
        model.add_implication(whole, prefills)
        model.add(m == before + s).only_enforce_if(whole)
        model.add(m <= before + s - 1).only_enforce_if(prefills, ~whole)
        model.add(tokens == 1).only_enforce_if(decodes)
        model.add(tokens >= 1).only_enforce_if(prefills)
        model.add(tokens == 0).only_enforce_if(~decodes, ~prefills)
        model.add(k == before + decodes + whole)
        model.add_bool_or(decodes, whole, stays).only_enforce_if(ready)
        for literal in (whole, stays):
            model.add_implication(literal, ready)
        for v in range(o):
            gain = model.new_bool_var(f"g_{i}_{v}_{j}")
            model.add(gain <= decodes + whole)
            model.add(before == v).only_enforce_if(gain)
            model.add(gain <= self.decode[i][v][j] + self.prefill[i][v][j])
            self.gain[i][v].append(gain)
        model.add(sum(self.gain[i][v][j] for v in range(o)) == decodes + whole)
        self.ready[i][j] = ready
        part = model.new_int_var(0, most, f"pc_{names}")
        model.add(part == tokens).only_enforce_if(prefills)
        model.add(part == 0).only_enforce_if(~prefills)
        self.prefill_tokens[i][j] = part
        self.tokens[i][j] = tokens
        work = c.token * tokens + c.prefill_token * part
        work += c.decode_request * decodes + c.prefill_request * prefills
        if c.decode_kv:
            work += c.decode_kv * self._if(decodes, have, most, f"dk_{names}")
        if c.prefill_square:
            square = model.new_int_var(0, most * most, f"sq_{names}")
            model.add_multiplication_equality(square, [part, part])
            work += c.prefill_square * square
        if c.prefill_cross:
            cross = model.new_int_var(0, most * most, f"x_{names}")
            model.add_multiplication_equality(cross, [part, have])
            work += c.prefill_cross * cross
        if c.prefill_kv:
            work += c.prefill_kv * self._if(prefills, have, most, f"pk_{names}")
        self.work[i][j] = work

    def _if(self, literal: Any, value: Any, most: int, name: str) -> Any:
        """Return a variable that is ``value`` if a literal holds, else 0."""
        out = self.model.new_int_var(0, most, name)
        self.model.add(out == value).only_enforce_if(literal)
        self.model.add(out == 0).only_enforce_if(~literal)
        return out

    def _symmetry(self) -> None:
        for members in self.prob.classes:
            for i, other in pairwise(members):
                for j in self.steps[:-1]:
                    self.model.add(
                        sum(self.gain[i][0][: j + 1]) >= sum(self.gain[other][0][: j + 1])
                    )

    def _batches(self) -> None:
        """Add what couples requests: limits, phases, the number of batches."""
        model, prob = self.model, self.prob
        self.used = [model.new_bool_var(f"u_{j}") for j in self.steps]
        self.decodes = [model.new_bool_var(f"hd_{j}") for j in self.steps]
        self.prefills = [model.new_bool_var(f"hp_{j}") for j in self.steps]
        net = outline(prob)
        needed, prefill_batches = net.batch_bound()
        for j in self.steps:
            used, decodes, prefills = self.used[j], self.decodes[j], self.prefills[j]
            any_decode = [d[j] for i in self.requests for d in self.decode[i][1:]]
            any_prefill = [p[j] for i in self.requests for p in self.prefill[i]]
            for literals, flag in ((any_decode, decodes), (any_prefill, prefills)):
                for literal in literals:
                    model.add_implication(literal, flag)
                model.add_bool_or(*literals, ~flag)
            model.add_max_equality(used, [decodes, prefills])
            if j:
                model.add_implication(used, self.used[j - 1])
            if not prob.hybrid:
                model.add_at_most_one(decodes, prefills)
            off = prob.offset
            kv = sum(self.cached[i][j] + off * self.hold[i][j] for i in self.requests)
            model.add(kv <= prob.capacity)
            if prob.batch_tokens < UNLIMITED:
                model.add(sum(self.tokens[i][j] for i in self.requests) <= prob.batch_tokens)
            if prob.prefill_tokens < UNLIMITED:
                model.add(
                    sum(self.prefill_tokens[i][j] for i in self.requests) <= prob.prefill_tokens
                )
            if prob.running < prob.n:
                model.add(sum(self.hold[i][j] for i in self.requests) <= prob.running)
            for weight, most in net.functions[:_CUTS]:
                model.add(
                    sum(
                        weight(prob.prompt[i] + v + off) * self.gain[i][v][j]
                        for i in self.requests
                        for v in range(prob.output[i])
                    )
                    <= most * used
                )
        for j in range(min(needed, self.batches)):
            model.add(self.used[j] == 1)
        model.add(sum(self.prefills) >= prefill_batches)
        self.least_makespan = net.least_makespan()

    def _times(self) -> None:
        """Add every batch's length, start and end, and what the objectives count."""
        model, prob, c = self.model, self.prob, self.prob.costs
        wanted = set(prob.objectives)
        spans = {"mean_tpot", "max_tpot"} & wanted
        origin = max(prob.arrival) if spans == wanted else 0
        apart = origin != max(prob.arrival)
        self.late = origin != 0
        self.chosen_starts = bool(spans) and apart
        if prob.chunked:
            pairs = zip(prob.prompt, prob.output, strict=True)
            most = self.batches * sum(c.prefill(s + o, s + o) + c.decode(s + o) for s, o in pairs)
        else:
            most = sum(
                max(c.prefill(s + v), c.decode(s + v))
                for s, o in zip(prob.prompt, prob.output, strict=True)
                for v in range(o)
            )
        most += self.batches * (c.base + c.decode_base + c.prefill_base)
        self.horizon = max(prob.arrival) + most
        length = [
            c.base * self.used[j]
            + c.decode_base * self.decodes[j]
            + c.prefill_base * self.prefills[j]
            + sum(self.work[i][j] for i in self.requests)
            for j in self.steps
        ]
        self.start: list[Any] = []
        self.end: list[Any] = []
        for j in self.steps:
            previous = self.end[j - 1] if j else origin
            if not apart:
                self.start.append(previous)
            else:
                begin = model.new_int_var(origin, self.horizon, f"S_{j}")
                model.add(begin >= previous)
                for i in self.requests:
                    if prob.arrival[i] > origin:
                        for literal in [d[j] for d in self.decode[i][1:]] + [
                            p[j] for p in self.prefill[i]
                        ]:
                            model.add(begin >= prob.arrival[i]).only_enforce_if(literal)
                self.start.append(begin)
            end = model.new_int_var(origin, self.horizon, f"E_{j}")
            model.add(end == self.start[j] + length[j])
            self.end.append(end)
        model.add(self.end[-1] >= origin + self.least_makespan)
        self.first: dict[int, Any] = {}
        self.finish: dict[int, Any] = {}
        if spans or "mean_ttft" in wanted:
            self.first = {i: self._at(i, 0, f"T_{i}") for i in self.requests}
            for i, first in self.first.items():
                model.add(first >= prob.arrival[i] + prob.least_span(prob.prompt[i], 0))
        if spans or "tel" in wanted:
            self.finish = {
                i: self._at(i, prob.output[i] - 1, f"F_{i}")
                for i in self.requests
                if "tel" in wanted or prob.output[i] > 1
            }
            least = prob.least_latency
            for i, finish in self.finish.items():
                model.add(finish >= prob.arrival[i] + least[i])
                if spans:
                    size, output = prob.prompt[i], prob.output[i]
                    later = sum(prob.least_span(size, v) for v in range(1, output))
                    model.add(finish - self.first[i] >= later)

    def _at(self, i: int, v: int, name: str) -> Any:
        """Return the end of the batch that produces a token."""
        out = self.model.new_int_var(self.prob.arrival[i], self.horizon, name)
        for j in self.steps:
            self.model.add(out == self.end[j]).only_enforce_if(self.gain[i][v][j])
        return out

    def level(self, name: str) -> Any:
        """Return an objective's level as an expression; see `Problem.level`."""
        prob = self.prob
        if name in ("makespan", "tps"):
            return self.end[-1]
        if name == "tel":
            return sum(self.finish.values()) - sum(prob.arrival)
        if name == "mean_ttft":
            return sum(self.first.values()) - sum(prob.arrival)
        rates = {
            i: (self.finish[i] - self.first[i]) * (prob.rate_unit // (prob.output[i] - 1))
            for i in self.requests
            if prob.output[i] > 1
        }
        if name == "mean_tpot":
            return sum(rates.values())
        if not hasattr(self, "_largest"):
            self._largest = self.model.new_int_var(0, self.horizon * prob.rate_unit, "worst")
            for rate in rates.values():
                self.model.add(self._largest >= rate)
        return self._largest

    def _hint(self, start: list[Batch]) -> None:
        """Give the decisions of a list of batches as hints."""
        prob, hint = self.prob, self.model.add_hint
        produced, cached, ready = [0] * prob.n, [0] * prob.n, [False] * prob.n
        for j in self.steps:
            batch = start[j] if j < len(start) else Batch(())
            tokens = dict(batch.entries)
            for i in batch.evicted:
                cached[i], ready[i] = 0, False
            phase = {i: ready[i] for i in tokens}
            hint(self.used[j], bool(tokens))
            hint(self.decodes[j], any(phase.values()))
            hint(self.prefills[j], not all(phase.values()))
            for i in self.requests:
                hint(self.keep[i][j], cached[i] > 0)
                for v in range(prob.output[i]):
                    here = i in tokens and produced[i] == v
                    if v:
                        hint(self.decode[i][v][j], here and phase[i])
                    hint(self.prefill[i][v][j], here and not phase[i])
                gained = 0
                if i in tokens:
                    cached[i] += tokens[i]
                    if cached[i] == prob.prompt[i] + produced[i]:
                        produced[i] += 1
                        ready[i] = True
                        gained = produced[i]
                for v in range(prob.output[i]):
                    if v or prob.chunked:
                        hint(self.gain[i][v][j], gained == v + 1)
                hint(self.produced[i][j], produced[i])
                hint(self.cached[i][j], cached[i])
                hint(self.hold[i][j], cached[i] > 0)
                if produced[i] == prob.output[i]:
                    cached[i], ready[i] = 0, False

    def read(self) -> list[Any]:
        """Return what an outcome's values hold: per batch used, start, then i's c and keep."""
        out: list[Any] = []
        for j in self.steps:
            out += [self.used[j], self.start[j]]
            for i in self.requests:
                out += [self.tokens[i][j], self.keep[i][j]]
        return out

    def decisions(self, values: Any) -> tuple[list[Batch], list[int]]:
        """Return the batches and their starts in the models' unit."""
        prob = self.prob
        table = [[round(v) for v in row] for row in values.reshape(self.batches, -1)]
        cached, produced = [0] * prob.n, [0] * prob.n
        batches, starts = [], []
        for row in table:
            if not row[0]:
                break
            tokens, keep = row[2::2], row[3::2]
            evicted = tuple(i for i in self.requests if cached[i] and not keep[i])
            for i in evicted:
                cached[i] = 0
            batches.append(Batch(tuple((i, t) for i, t in enumerate(tokens) if t), evicted))
            starts.append(row[1])
            for i, t in batches[-1].entries:
                cached[i] += t
                if cached[i] == prob.prompt[i] + produced[i]:
                    produced[i] += 1
                    if produced[i] == prob.output[i]:
                        cached[i] = 0
        return batches, starts


def solve_by_cpsat(task: Task, options: SolveOptions) -> Answer:
    """Solve by CP-SAT, objective after objective.

    Raises
    ------
    UsageError, InfeasibleError, InputError
        See `optsched.optimize.formulations.batches.infermax.problem`.
    """
    from optsched.optimize.solvers.cpsat import cpsat_version, solve_cp_model

    begin = time.perf_counter()
    prob = problem(task)
    start, times = best_start(prob, options.warm_start)
    built = _Model(prob, prob.max_batches(times), start)
    if prob.cutoff is not None:
        built.model.add(built.level(prob.objectives[0]) <= math.ceil(prob.cutoff) - 1)
    build_s = time.perf_counter() - begin
    left = options.after(build_s)
    read = built.read()
    best: RawOutcome | None = None
    bound: int | None = None
    native = ""
    solve_s = 0.0
    for rank, name in enumerate(prob.objectives):
        level = built.level(name)
        built.model.minimize(level)
        if best is not None and best.values is not None:
            built.model.clear_hints()
            for expression, value in zip(read, best.values.tolist(), strict=True):
                if hasattr(expression, "proto") or hasattr(expression, "index"):
                    built.model.add_hint(expression, round(value))
        raw = solve_cp_model(
            built.model,
            _told(left, prob, rank),
            read=read,
            integral_objective=False,
            build_s=build_s,
        )
        solve_s += raw.solve_s
        native = raw.native_status
        left = left.after(raw.solve_s)
        if rank == 0:
            best = raw
            bound = None if raw.bound is None else math.ceil(raw.bound)
        elif raw.values is not None:
            best = raw
        if raw.status is not Status.OPTIMAL or raw.objective is None:
            break
        built.model.add(level <= round(raw.objective))
    assert best is not None
    status = raw.status if rank == 0 else best.status
    if rank and raw.status is not Status.OPTIMAL:
        status = Status.FEASIBLE
    if status is Status.INFEASIBLE:
        if prob.cutoff is None:
            raise SolverError(
                f"infermax: {built.batches} batches are said not to suffice, although every "
                "request can be served alone; the model or the solver is wrong"
            )
        bound = math.ceil(prob.cutoff)
    batches, starts = (None, None) if best.values is None else built.decisions(best.values)
    chosen = None
    if batches is not None and starts is not None and (built.chosen_starts or built.late):
        chosen = _starts(prob, batches, starts)
    return answer(
        prob,
        status,
        batches,
        bound,
        start=chosen,
        fallback=start,
        native_status=native,
        build_s=build_s,
        solve_s=solve_s,
        versions={"ortools": cpsat_version()},
    )


def _starts(prob: Problem, batches: list[Batch], starts: list[int]) -> list[float] | None:
    """Return the chosen starts in seconds since the first arrival.

    None where the earliest are as good.
    """
    unit = prob.costs.unit_s
    chosen = [float(t * unit) + (j + 1) * _MARGIN_S for j, t in enumerate(starts)]
    if prob.levels(exact_times(prob, batches)) <= prob.levels(exact_times(prob, batches, chosen)):
        return None
    return chosen


def _told(options: SolveOptions, prob: Problem, rank: int) -> SolveOptions:
    """Return the options with progress in the instance's unit, of the first objective only."""
    tell = options.progress
    if tell is None or rank:
        return replace(options, progress=None)
    name = prob.objectives[0]

    def value(level: float | None) -> float | None:
        return None if level is None or level <= 0 else prob.to_value(name, Fraction(level))

    def told(progress: Progress) -> None:
        tell(Progress(progress.elapsed_s, value(progress.incumbent), value(progress.bound)))

    return replace(options, progress=told)


METHODS = {
    "infermax": {
        "cpsat": Method(
            "conditionals as they stand, by CP-SAT in exact integers",
            solve_by_cpsat,
            OBJECTIVES,
            SWITCHES,
            lexicographic=True,
            extras=EXTRAS,
        )
    }
}
