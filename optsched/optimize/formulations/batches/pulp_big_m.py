"""The program of Kim et al. 2024, section 3.3, in PuLP: to be read, and exported as LP or MPS.

The variables of request i and batch j = 1..J are as follows. I, m and c are integers; the others
are binary.

- I_ij is the input size, m_ij the KV cached after the batch, and c_ij the tokens processed.
- d_ij: i is in its decode phase before j. e_ij: i is evicted. g_ij: i produces a token. f_ij: i has
  finished before j.
- cz_ij = [c > 0], mz_ij = [m > 0], and ed = e d.
- dg_ij = d (1 - e) cz, which is what family (5) of the paper subtracts.
- u_j, hd_j and hp_j: batch j is used, decodes, prefills.

An eviction and its refill may share a batch. Then d no longer limits c, and I is already the new
input. `optsched.optimize.formulations.batches.problem` gives the reason and the effect.

**Big-M constants.** Let S = s + o - 1. Then s <= I <= S, 0 <= m <= S, and
0 <= c <= K = min(S, C, M - offset). Also m - I <= o - 1, since m is at most S and I is at least s.

- d = 1: m_{j-1} >= I_{j-1}, relaxed by S (I - m <= S); d = 0: m_{j-1} <= I_{j-1} - 1, relaxed by
  o (m - I + 1 <= o).
- (2) ed = 1: I_j = m_{j-1} + 1, relaxed by o above m (m + 1 - I <= o) and by S - 1 below it
  (I - m - 1 <= S - 1); I_j <= I_{j-1} + (o - 1) ed, as all of I grows by o - 1 at most.
- (3) e or f: m_j = c_j, relaxed by S (m_j - c_j = m_{j-1} <= S); else m_j = m_{j-1} + c_j, relaxed
  by S. Not decoding: m_j <= I_j, relaxed by o - 1.
- (4) decoding: c <= 1, relaxed by K - 1.
- g = 1: m_j >= I_j, relaxed by S; processed without a token: m_j <= I_j - 1, relaxed by o.
- w_ij >= m_{j-1} - S (1 - dg) is the KV read by a decode. It is at least s dg.
  No constant is above `LARGEST`: a binary may be off by 1e-6, and S times that stays below 1/2,
  so that integers round to what they are.
- q_ij >= (2 a + 1) c - a (a + 1) on prefills. These are tangents of c^2, exact at every integer c.
  Without chunks c is in s..S there, so a is in s..S - 1 (and q >= s^2).

**Symmetry.** Equal requests are ordered by sum_j (J - j) g_ij. Ordering them by any one number is
valid.
"""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

from optsched.optimize.formulations.base import Answer, Method, Readable, Task
from optsched.optimize.formulations.batches import plans, problem as csp
from optsched.optimize.formulations.batches.batch_count import batches_needed, least_makespan
from optsched.optimize.formulations.batches.cpsat import solve_by_cpsat
from optsched.optimize.formulations.batches.labels import solve_by_labels, why_chunks_matter
from optsched.optimize.formulations.batches.problem import Batch, BatchProblem
from optsched.optimize.formulations.batches.start import start_of
from optsched.optimize.solvers.base import PULP_STATUS, RawOutcome, SolveOptions, Status
from optsched.optimize.solvers.pulp_models import solve_pulp_problem
from optsched.problem.budget import work_time
from optsched.problem.columns import check_whole
from optsched.problem.errors import OutOfTimeError, UsageError, in_words
from optsched.problem.memory import check_size, check_tokens
from optsched.problem.schedule import Schedule

_MAX_TANGENTS = 256
# The bytes of a nonzero in PuLP, with its share of variables and names.
_ENTRY_BYTES = 200
_BINARIES = ("d", "e", "g", "ed", "f", "cz", "mz", "dg")

Rows = Iterator[tuple[str, Any]]
"""Constraints with their names."""


class Program:
    """The PuLP problem and its variables by name, request and batch.

    ``order_equal``: whether equal requests are put in order (module docstring, Symmetry). Families
    of rows are made for request i and batch j. In them s and o are the prompt and the output,
    ``top`` is S, and ``largest`` is K (module docstring, Big-M constants).
    """

    def __init__(self, prob: BatchProblem, batches: int, *, order_equal: bool = True) -> None:
        import pulp

        self.prob, self.batches = prob, batches
        self.steps = range(1, batches + 1)
        check_tokens(max(s + o - 1 for s, o in prob.sizes), "pulp-bigm")
        if prob.chunked and prob.costs["prefill_cross"]:
            raise UsageError(
                "method: found prefill_cross in the cost model, a product of two decisions with "
                "chunks; expected 0 for pulp-bigm (or the method cpsat)"
            )

        # About so many nonzeros has a request in a batch: rows, tangents, sums over the batches.
        per_batch = 150 + 3 * min(_MAX_TANGENTS, prob.capacity) + 4 * batches
        what = f"nonzeros in the program of {batches} batches"
        check_size(prob.n * batches * per_batch, _ENTRY_BYTES, what, "search has no model")
        self.problem = pulp.LpProblem("infermax", pulp.LpMinimize)
        self.sum = pulp.lpSum
        self.var: dict[tuple[Any, ...], Any] = {}
        self._add_variables(pulp)
        self._set_objective(pulp)
        families = [self._finished_rows, self._phase_rows, self._input_rows, self._memory_rows]
        families += [self._processed_rows, self._cost_rows]
        # These rows hold only where every prefill is whole.
        if not prob.chunked:
            families.append(self._valid_rows)
        for i in range(prob.n):
            self._add(self._token_rows(i), i)
            for j in prob.budget.through(self.steps):
                for family in families:
                    self._add(family(i, j), i, j)

        for j in prob.budget.through(self.steps):
            self._add(self._limit_rows(j), j)
            self._add(self._batch_rows(j), j)

        if order_equal:
            self._add(self._symmetry_rows())
        self._add(self._needed_rows())

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        """Return a variable, or its value before the first batch.

        The key is (name, request, batch), or (name, batch). At batch 0 the input is the prompt, and
        nothing is cached or held.
        """
        name, i, j = key if len(key) == 3 else (key[0], None, key[1])
        if j == 0 and i is not None:
            return self.prob.prompt[i] if name == "I" else 0

        return self.var[key]

    def _add(self, rows: Rows, *places: int) -> None:
        """Add rows, whose names end with their request and batch."""
        for name, row in rows:
            self.problem += row, "_".join([name, *map(str, places)])

    def _sizes(self, i: int) -> tuple[int, int, int, int]:
        """Return s, o, S and K of a request (module docstring, Big-M constants)."""
        s, o = self.prob.prompt[i], self.prob.output[i]
        top = s + o - 1
        return s, o, top, min(top, self.prob.batch_tokens, self.prob.capacity - self.prob.offset)

    def _add_variables(self, pulp: Any) -> None:
        """Add the variables with their ranges; w, q and z are costs, and may be fractions."""
        for i in range(self.prob.n):
            s, _, top, largest = self._sizes(i)
            spans = {"I": (s, top), "m": (0, top), "c": (0, largest)}
            spans |= dict.fromkeys(_BINARIES, (0, 1))
            for j in self.prob.budget.through(self.steps):
                for name, (low, high) in spans.items():
                    self.var[name, i, j] = pulp.LpVariable(
                        f"{name}_{i}_{j}", low, high, cat=pulp.LpInteger
                    )
                for name in ("w", "q", "z"):
                    self.var[name, i, j] = pulp.LpVariable(f"{name}_{i}_{j}", 0)

        for j in self.steps:
            for name in ("u", "hd", "hp"):
                self.var[name, j] = pulp.LpVariable(f"{name}_{j}", cat=pulp.LpBinary)

    def _set_objective(self, pulp: Any) -> None:
        """Set the makespan in milliseconds as the objective, and its limit if there is one.

        All requests arrive together, so the machine never waits, and the makespan is the sum of the
        batches' times.
        """
        c, prob = self.prob.exact, self.prob
        terms = []
        for j in prob.budget.through(self.steps):
            terms += [c["base"] * self["u", j], c["decode_base"] * self["hd", j]]
            terms.append(c["prefill_base"] * self["hp", j])

            for i in range(prob.n):
                tokens, decodes, processes = self["c", i, j], self["dg", i, j], self["cz", i, j]
                # A decode is one of the tokens, and does not pay `prefill_token`.
                terms += [
                    (c["token"] + c["prefill_token"]) * tokens - c["prefill_token"] * decodes,
                    c["decode_request"] * decodes + c["prefill_request"] * (processes - decodes),
                    c["decode_kv"] * self["w", i, j] + c["prefill_square"] * self["q", i, j],
                    c["prefill_kv"] * self["z", i, j],
                ]

        # Prices are integers of exact units, of which one is so many milliseconds.
        unit = float(c.unit_s * 1000)
        scaled = pulp.LpAffineExpression({v: k * unit for v, k in self.sum(terms).items()})
        self.problem += scaled, "makespan_ms"

        # Levels are whole in exact units, so half a unit below the cutoff keeps off rounding.
        if prob.cutoff is not None:
            below = float((prob.cutoff * prob.shrink - Fraction(1, 2)) * c.unit_s * 1000)
            self._add(iter([("below", scaled <= below)]))

    def _token_rows(self, i: int) -> Rows:
        """(1) Every request produces its tokens."""
        yield "tokens", self.sum(self["g", i, j] for j in self.steps) == self.prob.output[i]

    def _finished_rows(self, i: int, j: int) -> Rows:
        """f is 1 iff all tokens were produced before."""
        o, before = self.prob.output[i], self.sum(self["g", i, k] for k in range(1, j))
        yield "finished", o * self["f", i, j] <= before
        yield "unfinished", before <= o - 1 + self["f", i, j]

    def _phase_rows(self, i: int, j: int) -> Rows:
        """d is 1 iff the input is cached, and ed = e d. An eviction frees some KV.

        Who has finished holds nothing from the next batch on, without an eviction. All rows' large
        constants are derived in the module docstring, for each value of the binaries.
        """
        # The output, and the most KV that is ever cached (S of the module docstring).
        _, o, top, _ = self._sizes(i)
        m, size, d, e = self["m", i, j - 1], self["I", i, j - 1], self["d", i, j], self["e", i, j]
        yield "decode_phase", m >= size - top * (1 - d)
        yield "prefill_phase", m <= size - 1 + o * d
        yield from _product("evicted_decode", self["ed", i, j], e, d)
        yield "evict_cached", e <= self["mz", i, j - 1]
        yield "evict_running", e <= 1 - self["f", i, j]
        if self.prob.eviction_free:
            yield "eviction_free", e == 0

    def _input_rows(self, i: int, j: int) -> Rows:
        """(2) The input of a request evicted in its decode phase grows by the tokens generated.

        It is then what was cached and the last token, m + 1. Else it stays.
        """
        _, o, top, _ = self._sizes(i)
        after, before, m = self["I", i, j], self["I", i, j - 1], self["m", i, j - 1]
        ed = self["ed", i, j]
        yield "input_keeps", after >= before
        yield "input_stays", after <= before + (o - 1) * ed
        yield "input_grows", after >= m + 1 - o * (1 - ed)
        yield "input_exact", after <= m + 1 + (top - 1) * (1 - ed)

    def _memory_rows(self, i: int, j: int) -> Rows:
        """(3) The KV cached after the batch: what is processed, and what was there unless freed.

        An eviction frees it, or that the request has finished (at most one of them). Who does not
        decode caches its input at most.
        """
        _, o, top, _ = self._sizes(i)
        m, before, c = self["m", i, j], self["m", i, j - 1], self["c", i, j]
        freed = self["e", i, j] + self["f", i, j]
        yield "memory_at_most", m <= before + c
        yield "memory_kept", m >= before + c - top * freed
        yield "memory_at_least", m >= c
        yield "memory_freed", m <= c + top * (1 - freed)
        decoding = self["d", i, j] - self["ed", i, j]
        yield "memory_input", m <= self["I", i, j] + (o - 1) * decoding
        yield "holds", m <= top * self["mz", i, j]
        yield "holds_not", self["mz", i, j] <= m

    def _processed_rows(self, i: int, j: int) -> Rows:
        """(4) The tokens processed, and whether one is produced.

        A decode processes one token. One is produced iff something is processed and the input is
        cached after it; without chunks a prefill is whole, so all that is processed produces one.
        """
        _, o, top, largest = self._sizes(i)
        c, cz, g = self["c", i, j], self["cz", i, j], self["g", i, j]
        m, size = self["m", i, j], self["I", i, j]
        decoding = self["d", i, j] - self["ed", i, j]
        yield "one_token", c <= 1 + (largest - 1) * (1 - decoding)
        yield "processed", c <= largest * cz
        yield "processed_not", c >= cz
        yield "done", cz <= 1 - self["f", i, j]
        yield "produces", g <= cz
        yield "complete", m >= size - top * (1 - g)
        yield "incomplete", m <= size - 1 + o * (g + 1 - cz)
        yield from _product("decodes", self["dg", i, j], decoding, cz)
        if not self.prob.chunked:
            yield "whole", g >= cz

    def _cost_rows(self, i: int, j: int) -> Rows:
        """The KV read by decodes (w) and prefills (z), and the squares of prefills (q)."""
        s, _, top, largest = self._sizes(i)
        costs, before = self.prob.costs, self["m", i, j - 1]
        dg, prefills = self["dg", i, j], self["cz", i, j] - self["dg", i, j]

        # Costs that are minimized push w, z and q down, so lower bounds on them suffice. What costs
        # nothing needs none, and whole prefills read no KV.
        if costs["decode_kv"]:
            yield "kv_read", self["w", i, j] >= before - top * (1 - dg)
            yield "kv_read_least", self["w", i, j] >= s * dg

        if costs["prefill_kv"] and self.prob.chunked:
            # 0 for a prefill that reads KV: without a prefill, or after an eviction, none is read.
            no_chunk = 1 - prefills + self["e", i, j]
            yield "kv_prefill", self["z", i, j] >= before - top * no_chunk

        if not costs["prefill_square"]:
            return

        # Tangents at the sizes that a prefill can have; that of a touches at a and a + 1.
        points = range(largest) if self.prob.chunked else range(max(s - 1, 0), largest)
        if len(points) > _MAX_TANGENTS:
            raise UsageError(
                f"method: found {len(points)} tangents of a square for request {i}; expected at "
                f"most {_MAX_TANGENTS} for pulp-bigm (cpsat has no such limit)"
            )

        chunk = self["c", i, j] - dg
        for a in points:
            yield f"square_{a}", self["q", i, j] >= (2 * a + 1) * chunk - a * (a + 1) * prefills

    def _valid_rows(self, i: int, j: int) -> Rows:
        """Valid without chunks: s + k - 1 tokens are cached if k tokens were produced so far.

        For whole numbers these rows follow from the others, so all that they exclude are fractions.
        """
        s, o, top, _ = self._sizes(i)
        before = self.sum(self["g", i, k] for k in range(1, j))
        produced = before + self["g", i, j]
        m, mz, dg, cz = self["m", i, j], self["mz", i, j], self["dg", i, j], self["cz", i, j]
        prefills = cz - dg
        yield "cached", m >= s - 1 + produced - top * (1 - mz)
        yield "cached_most", m <= s - 1 + produced
        yield "cached_least", m >= s * mz
        yield "input_most", self["I", i, j] <= s + produced
        yield "prefill_least", self["c", i, j] >= s * prefills + dg
        yield "decode_cached", dg <= self["mz", i, j - 1]
        yield "decode_kept", dg + self["e", i, j] <= 1
        yield "processed_held", cz <= mz
        # A prefill processes the prompt and all that was produced before.
        yield "refill_least", self["c", i, j] >= s * prefills + before - o * (1 - prefills)

    def _limit_rows(self, j: int) -> Rows:
        """(5) The limits C, P, M and R_max."""
        prob, requests = self.prob, range(self.prob.n)
        if prob.batch_tokens < csp.UNLIMITED:
            yield "batch_tokens", self.sum(self["c", i, j] for i in requests) <= prob.batch_tokens
        if prob.prefill_tokens < csp.UNLIMITED:
            prefill = self.sum(self["c", i, j] - self["dg", i, j] for i in requests)
            yield "prefill_tokens", prefill <= prob.prefill_tokens

        # No batch holds more than all peaks, so a larger capacity would only loosen the row.
        kv = self.sum(self["m", i, j] + prob.offset * self["mz", i, j] for i in requests)
        capacity = min(prob.capacity, sum(s + o - 1 + prob.offset for s, o in prob.sizes))
        yield "kv_capacity", kv <= capacity * self["u", j]
        # A limit of n requests or more never matters.
        if prob.running < prob.n:
            yield "running", self.sum(self["mz", i, j] for i in requests) <= prob.running

    def _batch_rows(self, j: int) -> Rows:
        """Batches in use come first, and decode or prefill what they hold."""
        requests = range(self.prob.n)
        used, decodes, prefills = self["u", j], self["hd", j], self["hp", j]
        for i in requests:
            yield f"has_decode_{i}", decodes >= self["dg", i, j]
            yield f"has_prefill_{i}", prefills >= self["cz", i, j] - self["dg", i, j]
            yield f"evict_used_{i}", self["e", i, j] <= used

        yield "not_empty", used <= self.sum(self["cz", i, j] for i in requests)
        yield "some_phase", used <= decodes + prefills
        yield "decode_used", decodes <= used
        yield "prefill_used", prefills <= used
        if j > 1:
            yield "first", used <= self["u", j - 1]
        if not self.prob.hybrid:
            yield "one_phase", decodes + prefills <= 1

    def _symmetry_rows(self) -> Rows:
        """Equal requests are in order of how early they produce tokens."""
        for members in self.prob.classes:
            for i, other in pairwise(members):
                early, late = (
                    self.sum((self.batches - j) * self["g", k, j] for j in self.steps)
                    for k in (i, other)
                )
                yield f"order_{i}_{other}", early >= late

    def _needed_rows(self) -> Rows:
        """Valid: the min number of batches by bin packing and KV volume, and the makespan of it."""
        needed, prefills = batches_needed(self.prob)
        # A float may stand a little above the exact bound.
        smallest = float(least_makespan(self.prob) * self.prob.costs.unit_s * 1000)
        yield "least_makespan", self.problem.objective >= smallest * (1 - 1e-9)
        yield "batches_needed", self.sum(self["u", j] for j in self.steps) >= needed
        yield "prefills_needed", self.sum(self["hp", j] for j in self.steps) >= prefills

    def start_values(self, plan: plans.Plan) -> list[tuple[Any, int]]:
        """Return each variable (module docstring) with its value for a list of batches."""
        # `size` is I, the input of each request so far.
        prob, values_of = self.prob, dict.fromkeys(self.var, 0)
        state, size = plans.Requests(prob), list(prob.prompt)
        for j in self.steps:
            # Batches after the last one of the plan are not used.
            batch = plan[j - 1] if j <= len(plan) else Batch(())
            tokens = dict(batch.entries)
            values_of["u", j] = int(bool(tokens))
            # The states before the batch, after its evictions, and who produces a token in it.
            finished = [state.done(i) for i in range(prob.n)]
            before, ready = list(state.cached), list(state.ready)
            state.evict(batch.evicted)
            kept = list(state.cached)
            gained = state.process(batch.entries)

            for i in range(prob.n):
                c, d, e = tokens.get(i, 0), int(ready[i]), int(i in batch.evicted)
                # Evicted in its decode phase, its input is what was cached and the last token.
                if d and e:
                    size[i] = before[i] + 1

                decodes = int(d and not e and c > 0)
                # m, and z: the KV that a prefill reads unless it was evicted.
                kv, read = kept[i] + c, before[i] * int(c > 0 and not decodes and not e)
                values = {"I": size[i], "m": kv, "c": c, "d": d, "e": e, "ed": d * e, "dg": decodes}
                values |= {"g": int(i in gained), "f": int(finished[i]), "cz": int(c > 0)}
                values |= {"mz": int(kv > 0), "w": before[i] * decodes, "z": read}
                values["q"] = c * c * (1 - decodes)
                values_of |= {(name, i, j): value for name, value in values.items()}
                values_of["hd", j] |= decodes
                values_of["hp", j] |= int(c > 0 and not decodes)

        return [(self.var[key], value) for key, value in values_of.items()]

    def plan(self) -> plans.Plan:
        """Return the batches that the problem's present values mean.

        A batch without entries is not used, and evicts nobody (`_batch_rows`).
        """
        batches, requests = [], range(self.prob.n)
        for j in self.steps:
            tokens = [round(self["c", i, j].varValue) for i in requests]
            entries = tuple((i, c) for i, c in enumerate(tokens) if c)
            if entries:
                evicted = tuple(i for i in requests if round(self["e", i, j].varValue))
                batches.append(Batch(entries, evicted))

        return batches


def _product(name: str, product: Any, one: Any, other: Any) -> Rows:
    """Yield the rows of product = one * other, of binary expressions."""
    yield f"{name}_0", product <= one
    yield f"{name}_1", product <= other
    yield f"{name}_2", product >= one + other - 1


def readable(task: Task, length: int | None = None) -> Readable:
    """Return the program of a task to which rows may be added.

    It has a batch for every token, which suffices to run the requests one by one, and for further
    chunks of prompts. The order of equal requests is left out, since a row may tell them apart.
    """
    if task.instance.arrivals_differ:
        raise UsageError(
            "export: found requests that arrive at different times; expected all together, as the "
            "program has no arrivals (solve --method cpsat has them)"
        )

    from optsched.optimize.formulations import check_method, get

    check_method(get("infermax"), "pulp-bigm", task)
    prob, _, _ = start_of(task, SolveOptions(time_limit_s=None))
    chunk = min(prob.batch_tokens, prob.prefill_tokens)
    sufficient = sum(o - 1 + -(-s // chunk) for s, o in prob.sizes)
    batches = check_whole(sufficient if length is None else length, "length", sufficient)
    notes = (
        "c_I_J: the tokens that batch J processes of request I; e_I_J = 1: I is evicted before it.",
        f"There are {batches} batches, and {sufficient} suffice to run the requests one by one, "
        "and no order among equal requests, so rows may be added.",
        "optsched evaluate INSTANCE SOLUTION reads the solution that a solver writes.",
    )
    program = Program(prob, batches, order_equal=False)
    scale, name = plans.Scale(prob.costs.unit_s * 1000, False), task.names[0]

    def schedule() -> Schedule:
        """Return the schedule that the variables' present values mean."""
        return plans.to_schedule(prob, program.plan())

    def value(number: float) -> float:
        """Return what a number of the program, in milliseconds, means for the objective."""
        return prob.value(name, Fraction(number) / scale.unit)

    # Milliseconds need not be whole: False.
    return Readable(program.problem, program.var, schedule, value, False, batches, notes)


def solve_by_pulp(task: Task, options: SolveOptions) -> Answer:
    """Solve the paper's program by PuLP's HiGHS, or by the solver ``extras["solver"]`` of PuLP.

    That one reports no progress, has no bound before a proof, and gets no schedule to start from.
    """
    prob, start, times = start_of(task, options)
    try:
        program = Program(prob, plans.max_batches(prob, times))
    except OutOfTimeError as late:
        return plans.unbuilt(prob, start, late)

    # The program counts milliseconds, in floats, which need not be whole (False).
    scale = plans.Scale(prob.costs.unit_s * 1000, False)
    remaining = scale.in_values(options.after(prob.budget.spent_s), prob)
    if task.extras.get("solver"):
        raw = _solve_by_other(program, remaining, str(task.extras["solver"]))
    else:
        hint = None if start is None else program.start_values(start)
        try:
            problem = program.problem
            raw = solve_pulp_problem(problem, remaining, integral_objective=False, start=hint)
        except OutOfTimeError as why:
            raw = RawOutcome(Status.NO_INCUMBENT, None, None, None, str(why))

    plan = None if raw.objective is None else program.plan()
    claim = plans.Claim(raw.status, plan, scale.level(raw.bound))
    claim = _confirm(task, prob, claim, options.after(prob.budget.spent_s))
    native, solve_s = raw.native_status, raw.solve_s
    return plans.answer(prob, claim, native, solve_s, fallback=start, room=program.batches)


def _confirm(
    task: Task, prob: BatchProblem, claim: plans.Claim, options: SolveOptions
) -> plans.Claim:
    """Return what of a claim from floats holds in integers, by an exact method.

    Within its tolerances HiGHS cannot see a schedule that is better by less than 1e-6 ms. The
    option ``solver`` is of PuLP's method only, so the exact one does not get it.
    """
    status, plan = claim.status, claim.plan
    # Only a proof is to be confirmed. `answer` refuses infeasible where nothing was asked below.
    if status is not Status.OPTIMAL and (status is not Status.INFEASIBLE or prob.cutoff is None):
        return claim

    unproved = Status.NO_INCUMBENT if plan is None else Status.FEASIBLE
    extras = {name: value for name, value in task.extras.items() if name != "solver"}
    start = None if plan is None else plans.to_schedule(prob, plan)
    method = solve_by_cpsat if why_chunks_matter(task) else solve_by_labels
    remaining = replace(options, progress=None, warm_start=start)
    try:
        exact = method(replace(task, extras=extras), remaining)
    except UsageError:  # the model is too large
        return claim._replace(status=unproved)

    if exact.status is Status.INFEASIBLE:
        return plans.Claim(Status.INFEASIBLE, None, None)
    if exact.status is not Status.OPTIMAL or exact.schedule is None:
        return claim._replace(status=unproved)

    plan = plans.plan_of(exact.schedule)
    level = prob.level(prob.objectives[0], plans.exact_times(prob, plan))
    return plans.Claim(Status.OPTIMAL, plan, level)


def _solve_by_other(program: Program, options: SolveOptions, name: str) -> RawOutcome:
    """Solve by another of PuLP's solvers, which has a bound only if it proves its value."""
    import pulp

    available = pulp.listSolvers(onlyAvailable=True)
    if name not in available:
        raise UsageError(
            f"solver: found {name!r}; expected one that PuLP has here: "
            f"{', '.join(sorted(available))}"
        )

    begin = work_time()
    problem = program.problem
    _run_solver(problem, name, options.time_limit_s)
    status = PULP_STATUS[problem.sol_status]
    native = f"{name}: {pulp.LpSolution[problem.sol_status]}"
    value = None
    if status in (Status.OPTIMAL, Status.FEASIBLE):
        value = float(pulp.value(problem.objective))

    bound = value if status is Status.OPTIMAL else None
    # None: the problem's variables have the values, from which `Program.plan` reads them.
    return RawOutcome(status, value, bound, None, native, work_time() - begin)


def _run_solver(problem: Any, name: str, time_limit_s: float | None) -> None:
    """Run another solver of PuLP, which leaves no files behind if it fails.

    Its values are then those of the problem's variables.
    """
    import pulp

    with TemporaryDirectory(prefix="optsched-") as folder:
        try:
            solver = pulp.getSolver(name, msg=False, timeLimit=time_limit_s)
            solver.tmpDir = folder  # only those that are commands look at it
            problem.solve(solver)
        except Exception as error:  # a licence is missing, it crashes, it may not be executed
            spaces = f"; it may be the space in {folder}: set TMPDIR" if " " in folder else ""
            raise UsageError(
                f"solver: found that {name} fails ({in_words(error)}){spaces}; expected a solver "
                "that works, or none, for HiGHS"
            ) from error


_SUMMARY = "the paper's program with tight Big-M constants, readable, by PuLP and HiGHS"
_MORE: Any = {"features": csp.MODELLED, "solvers": ("pulp", "highspy")}
_EXTRAS = csp.EXTRAS | {"solver"}
_PULP = Method(_SUMMARY, solve_by_pulp, csp.ENDS, csp.CHUNKS, extras=_EXTRAS, **_MORE)
METHODS = {"infermax": {"pulp-bigm": _PULP}}
