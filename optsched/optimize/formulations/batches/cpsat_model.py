"""The program of Kim et al. 2024 for CP-SAT: conditionals, exact integer costs, every objective.

The variables of request i and batch j are as follows.

- D_ivj and P_ivj: i decodes, or is prefilled, after it has produced v tokens.
- G_ivj: token v + 1 is produced.
- k_ij is the number of tokens produced so far, and m_ij the KV cached after the batch.
- hold_ij = [m_ij > 0], and keep_ij: what was cached before the batch is still cached.

Batches in use come first. Without chunks every D and P produces a token, every token is produced
once, and m follows from k and hold. With chunks, c_ij is chosen, and a request decodes iff its
whole input was cached (ready_ij).

**Symmetry.** Requests of equal s, o and arrival produce their first tokens in order of index, since
their schedules can be exchanged as a whole. Ordering their tokens *in every batch* is not valid: an
equal request may overtake an evicted one (`docs/lab/infermax.md` has an instance).

**Redundant rows.** In every batch the dual feasible functions of `Network.functions` hold for the
requests processed. The numbers of batches and of prefill batches are at least those needed.

Times are integers of the cost model's unit. Without arrivals no pause helps any objective. For TPOT
alone it is best to begin after the last arrival and not to pause, so arrivals do not matter. The
starts are variables only if TPOT or gaps are combined with other objectives and requests arrive at
different times. Else each batch starts as early as it may.
"""

import math
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from optsched.optimize.formulations.batches import problem as csp
from optsched.optimize.formulations.batches.batch_count import batches_needed, by_kv, least_makespan
from optsched.optimize.formulations.batches.plans import Plan, Requests
from optsched.optimize.formulations.batches.problem import Batch, BatchProblem
from optsched.problem.instance import Instance
from optsched.problem.memory import check_size

# How many of the strongest dual feasible functions have a row for every batch.
_CUTS = 5
# About so many terms has a token of a request in a batch, and so many bytes a term.
_TERMS = 40
ENTRY_BYTES = 70


def entries_at_most(instance: Instance, batches: int | None = None) -> float:
    """Return about how many terms the model of an instance has at most, over so many batches.

    None: as many batches as tokens that may be processed one by one.
    """
    output = instance.output_tokens.astype(np.float64)
    tokens, chunked = float(output.sum()), instance.chunked_prefill is True
    if batches is None:
        chunks = (output * instance.prompt_tokens + output * (output - 1) / 2).sum()
        batches = int(chunks if chunked else tokens)

    # A sum over the batches so far has half of all on average. With chunks a request has one for
    # every batch: whether it has finished (`_has_finished`). Whole prefills: each token comes after
    # the one before it, which is a row of two such sums for every batch.
    rows = instance.n / 2 if chunked else tokens + instance.n
    return rows * float(batches) ** 2 + _TERMS * tokens * batches


class Model:
    """The CP-SAT model of a problem.

    `decode`, `prefill` and `gain` have D_ivj, P_ivj and G_ivj at ``[i][v][j]``. What has two places
    is by request and batch: `produced` is k_ij, `cached` m_ij, `tokens` c_ij, `prefill_tokens` the
    part of it that counts in P, and `work` the own work; `ready` is there with chunks only. `used`,
    `decodes` and `prefills` (1 if the batch does so) are by batch.
    """

    def __init__(self, prob: BatchProblem, batches: int, start: Plan | None) -> None:
        from ortools.sat.python import cp_model as cp

        self.prob, self.batches = prob, batches
        terms, what = entries_at_most(prob.instance, batches), f"of {batches} batches"
        check_size(terms, ENTRY_BYTES, f"terms in the CP-SAT model {what}", "search has no model")
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
            # The first token (v = 0) is never decoded.
            self.decode.append(
                [[bools(f"d_{i}_{v}_{j}") if v else 0 for j in self.steps] for v in tokens]
            )
            self.prefill.append([[bools(f"p_{i}_{v}_{j}") for j in self.steps] for v in tokens])
            self._add_request(i)

        self._order_equal_requests()
        self._add_batches()
        self._add_times()
        if start is not None:
            self._hint(start)

    def _processed(self, i: int, j: int) -> list[Any]:
        """Return literals of which exactly one holds iff a batch processes a request."""
        return [d[j] for d in self.decode[i][1:]] + [p[j] for p in self.prefill[i]]

    def _grid(self) -> list[list[Any]]:
        """Return a place for each request and batch."""
        return [[None] * self.batches for _ in self.requests]

    def _add_request(self, i: int) -> None:
        """Add the state of a request after each batch, and what it may do in it."""
        model, prob = self.model, self.prob
        s, o = prob.prompt[i], prob.output[i]
        decode, prefill = self.decode[i], self.prefill[i]

        for j in self.prob.budget.through(self.steps):
            # After the batch before: the tokens produced, and 1 if it has finished, or holds KV.
            # Before the first batch nothing is produced or held.
            before = self.produced[i][j - 1] if j else 0
            done = self._has_finished(i, j - 1)
            held = self.hold[i][j - 1] if j else 0
            self.produced[i][j] = model.new_int_var(0, o, f"k_{i}_{j}")
            # The last token is never cached.
            m = self.cached[i][j] = model.new_int_var(0, s + o - 1, f"m_{i}_{j}")
            hold = self.hold[i][j] = model.new_bool_var(f"hold_{i}_{j}")
            keep = self.keep[i][j] = model.new_bool_var(f"keep_{i}_{j}")
            model.add_at_most_one(self._processed(i, j))
            # Only what is held can be kept, what has finished is not, and without evictions all
            # else is.
            model.add(keep <= held)
            model.add(keep + done <= 1)
            if prob.eviction_free and j:
                model.add(keep + done >= held)
            # D_ivj and P_ivj are for v tokens produced before.
            for v in range(o):
                for literal in (decode[v][j], prefill[v][j]):
                    if not isinstance(literal, int):  # not the 0 of a first token
                        model.add(before == v).only_enforce_if(literal)

            model.add(m == 0).only_enforce_if(~hold)
            decodes, prefills = sum(d[j] for d in decode), sum(p[j] for p in prefill)
            if prob.chunked:
                self._add_chunks(i, j, decodes, prefills)
            else:
                self._add_whole_prefill(i, j, decodes, prefills)

        if not prob.chunked:
            for v in range(o):
                model.add_exactly_one(self.gain[i][v])

        model.add(self.produced[i][-1] == o)

    def _has_finished(self, i: int, j: int) -> Any:
        """Return an expression that is 1 iff a request has finished by the end of a batch.

        It is 0 for j = -1, before the first batch.
        """
        return sum(self.gain[i][-1][: j + 1])

    def _decode_work(self, i: int, j: int) -> Any:
        """Return the own work of a decode, or 0. After v tokens it reads s + v - 1 of KV."""
        s, c = self.prob.prompt[i], self.prob.costs
        return sum(
            c.decode(s + v - 1) * self.decode[i][v][j] for v in range(1, self.prob.output[i])
        )

    def _add_whole_prefill(self, i: int, j: int, decodes: Any, prefills: Any) -> None:
        """Add request i in batch j without chunks: what is processed produces a token.

        `decodes`, `prefills`: The sums over v of D_ivj and of P_ivj. At most one of them is 1.
        """
        model, prob, c = self.model, self.prob, self.prob.costs
        s, o = prob.prompt[i], prob.output[i]
        prefill = [p[j] for p in self.prefill[i]]
        self.gain[i][0].append(prefill[0])  # the first token is never decoded

        for v in range(1, o):
            gain = model.new_bool_var(f"g_{i}_{v}_{j}")
            model.add(gain == self.decode[i][v][j] + prefill[v])
            self.gain[i][v].append(gain)
            # Each token comes after the one before it.
            model.add(sum(self.gain[i][v]) <= sum(self.gain[i][v - 1][:j]))

        before = self.produced[i][j - 1] if j else 0
        model.add(self.produced[i][j] == before + decodes + prefills)
        # A decode needs the KV of the batch before. A request that keeps its KV without a decode
        # pauses. A prefill starts without KV.
        keep, hold = self.keep[i][j], self.hold[i][j]
        model.add(decodes <= keep)
        model.add(prefills + keep == hold)
        # The token produced last is not cached yet. Without `hold`, m_ij is 0 (`_add_request`).
        model.add(self.cached[i][j] == self.produced[i][j] + (s - 1)).only_enforce_if(hold)
        # The input of a prefill is the prompt and the tokens produced before an eviction.
        self.prefill_tokens[i][j] = sum((s + v) * p for v, p in enumerate(prefill))
        self.tokens[i][j] = self.prefill_tokens[i][j] + decodes
        work = sum(c.prefill(s + v) * p for v, p in enumerate(prefill))
        self.work[i][j] = work + self._decode_work(i, j)

    def _add_chunks(self, i: int, j: int, decode: Any, prefill: Any) -> None:
        """Add request i in batch j where a prefill may process a part of its input.

        `decode`, `prefill`: The sums over v of D_ivj and of P_ivj. At most one of them is 1. Below,
        `decodes` and `prefills` are literals equal to them.
        """
        model, prob = self.model, self.prob
        s, o = prob.prompt[i], prob.output[i]
        largest = s + o - 1
        names = f"{i}_{j}"
        keep, hold, m = self.keep[i][j], self.hold[i][j], self.cached[i][j]
        before = self.produced[i][j - 1] if j else 0
        # The KV kept from before, the tokens processed, and the KV after the batch, which is 0
        # without `hold` (`_add_request`).
        kept = self._value_if(keep, self.cached[i][j - 1] if j else 0, largest, f"b_{names}")
        tokens = model.new_int_var(0, min(largest, prob.batch_tokens), f"c_{names}")
        model.add(m == kept + tokens)
        model.add(m >= 1).only_enforce_if(hold)
        # `ready`: its whole input is cached after the batch, so that it may decode in the next one
        # if its KV is kept. `may_decode`: it was ready before this batch, and its KV is kept.
        ready = model.new_bool_var(f"r_{names}")
        may_decode = model.new_bool_var(f"rk_{names}")

        if j:
            model.add_multiplication_equality(may_decode, [self.ready[i][j - 1], keep])
        else:
            model.add(may_decode == 0)

        decodes, prefills = model.new_bool_var(f"dec_{names}"), model.new_bool_var(f"pre_{names}")
        model.add(decodes == decode)
        model.add(prefills == prefill)
        model.add_implication(decodes, may_decode)
        model.add_implication(prefills, ~may_decode)
        # The prefill is complete, and produces a token, iff the input is cached after the batch.
        whole = model.new_bool_var(f"whole_{names}")
        model.add_implication(whole, prefills)
        model.add(m == before + s).only_enforce_if(whole)
        model.add(m <= before + s - 1).only_enforce_if(prefills, ~whole)
        model.add(tokens == 1).only_enforce_if(decodes)
        model.add(tokens >= 1).only_enforce_if(prefills)
        model.add(tokens == 0).only_enforce_if(~decodes, ~prefills)
        model.add(self.produced[i][j] == before + decodes + whole)
        # Ready: it produced a token in this batch, or could have.
        model.add_bool_or(decodes, whole, may_decode).only_enforce_if(ready)
        for literal in (whole, may_decode):
            model.add_implication(literal, ready)
        # Token v + 1 is produced by the one decode or whole prefill, if v were before.
        for v in range(o):
            gain = model.new_bool_var(f"g_{i}_{v}_{j}")
            model.add(gain <= decodes + whole)
            model.add(before == v).only_enforce_if(gain)
            model.add(gain <= self.decode[i][v][j] + self.prefill[i][v][j])
            self.gain[i][v].append(gain)

        model.add(sum(self.gain[i][v][j] for v in range(o)) == decodes + whole)
        self.ready[i][j] = ready
        self.tokens[i][j] = tokens
        part = self.prefill_tokens[i][j] = self._value_if(prefills, tokens, largest, f"pc_{names}")
        work = self._prefill_work(part, kept, prefills, largest)
        self.work[i][j] = work + self._decode_work(i, j)

    def _prefill_work(self, tokens: Any, kv: Any, prefills: Any, largest: int) -> Any:
        """Return `Costs.prefill` as an expression. All terms are 0 without a prefill.

        ``tokens`` is 0 without one, but ``kv`` is not, so its own term has to ask for a prefill.
        Neither exceeds ``largest``.
        """
        c = self.prob.costs
        work = (c["token"] + c["prefill_token"]) * tokens + c["prefill_request"] * prefills
        for factor, other in ((c["prefill_square"], tokens), (c["prefill_cross"], kv)):
            if factor:
                product = self.model.new_int_var(0, largest * largest, "")
                self.model.add_multiplication_equality(product, [tokens, other])
                work += factor * product

        if c["prefill_kv"]:
            work += c["prefill_kv"] * self._value_if(prefills, kv, largest, "")

        return work

    def _value_if(self, literal: Any, value: Any, largest: int, name: str) -> Any:
        """Return a variable that is ``value`` if a literal holds, else 0."""
        variable = self.model.new_int_var(0, largest, name)
        self.model.add(variable == value).only_enforce_if(literal)
        self.model.add(variable == 0).only_enforce_if(~literal)
        return variable

    def _order_equal_requests(self) -> None:
        """Order the first tokens of equal requests by index (module docstring, Symmetry).

        After each batch an earlier one has its first token if a later one has. After the last batch
        all have.
        """
        for members in self.prob.classes:
            for i, next_one in pairwise(members):
                for j in self.prob.budget.through(self.steps[:-1]):
                    self.model.add(
                        sum(self.gain[i][0][: j + 1]) >= sum(self.gain[next_one][0][: j + 1])
                    )

    def _add_batches(self) -> None:
        """Add the rows that couple requests: limits, phases and the number of batches."""
        model, prob = self.model, self.prob
        self.used = [model.new_bool_var(f"u_{j}") for j in self.steps]
        self.decodes = [model.new_bool_var(f"hd_{j}") for j in self.steps]
        self.prefills = [model.new_bool_var(f"hp_{j}") for j in self.steps]
        # The fewest batches, and the fewest that prefill; and weights of KV with their largest sum.
        needed, prefill_batches = batches_needed(prob)
        functions = by_kv(prob)[:_CUTS]

        for j in self.prob.budget.through(self.steps):
            used, decodes, prefills = self.used[j], self.decodes[j], self.prefills[j]
            # A batch has a phase iff some request does that in it.
            for variables, phase in ((self.decode, decodes), (self.prefill, prefills)):
                # D of a first token is the number 0, and no literal.
                chosen = (tokens[j] for request in variables for tokens in request)
                literals = [x for x in chosen if not isinstance(x, int)]
                for literal in literals:
                    model.add_implication(literal, phase)

                model.add_bool_or(*literals, ~phase)

            # A batch is in use iff it has a phase. Batches in use come first.
            model.add_max_equality(used, [decodes, prefills])
            if j:
                model.add_implication(used, self.used[j - 1])
            if not prob.hybrid:
                model.add_at_most_one(decodes, prefills)

            offset = prob.offset
            kv = sum(self.cached[i][j] + offset * self.hold[i][j] for i in self.requests)
            model.add(kv <= prob.capacity)

            for grid, limit in (
                (self.tokens, prob.batch_tokens),
                (self.prefill_tokens, prob.prefill_tokens),
                (self.hold, prob.running),
            ):
                if limit < csp.UNLIMITED:
                    model.add(sum(grid[i][j] for i in self.requests) <= limit)

            # What produces tokens in a batch fits into it, by each of the weights (`by_kv`).
            for weight, largest in functions:
                model.add(
                    sum(
                        weight(prob.prompt[i] + v + offset) * self.gain[i][v][j]
                        for i in self.requests
                        for v in range(prob.output[i])
                    )
                    <= largest * used
                )

        for j in range(min(needed, self.batches)):
            model.add(self.used[j] == 1)

        model.add(sum(self.prefills) >= prefill_batches)

    def _add_times(self) -> None:
        """Add every batch's length, start and end, and the terms of the objectives."""
        model, prob, c = self.model, self.prob, self.prob.costs
        wanted = set(prob.objectives)
        # `spans`: objectives and limits for which a batch may better begin later than it might.
        spans, counted = set(csp.SPANS) & wanted, csp.COUNTED in wanted

        # For limits on the time between tokens, as for TPOT, to wait before a token may help.
        for slo in ("slo_tpot", "slo_gap"):
            if counted and any(prob.within(slo, i) is not None for i in self.requests):
                spans |= {slo}

        # For spans alone time begins after the last arrival (module docstring). `apart`: requests
        # arrive after the origin. `late`: the origin is after the first arrival.
        origin = max(prob.arrival) if spans == wanted else 0
        self.apart = apart = origin != max(prob.arrival)
        self.late = origin != 0
        self.chosen_starts = bool(spans) and apart

        # No end is later: each token has a prefill or a decode of its own, all after all arrivals,
        # and with chunks each batch processes as much of every request as may be.
        inputs = (s + v for s, o in prob.sizes for v in range(o))
        largest = sum(max(c.prefill(size), c.decode(size)) for size in inputs)
        if prob.chunked:
            of_batch = (c.prefill(s + o, s + o) + c.decode(s + o) for s, o in prob.sizes)
            largest = self.batches * sum(of_batch)

        largest += self.batches * c.fixed(True, True)
        self.horizon = max(prob.arrival) + largest
        length = [
            c["base"] * self.used[j]
            + c["decode_base"] * self.decodes[j]
            + c["prefill_base"] * self.prefills[j]
            + sum(self.work[i][j] for i in self.requests)
            for j in self.steps
        ]
        self.start: list[Any] = []
        self.end: list[Any] = []
        arrive_later = [i for i in self.requests if prob.arrival[i] > origin] if apart else []
        for j in self.prob.budget.through(self.steps):
            begin = previous = self.end[j - 1] if j else origin
            # A batch may wait, for those that arrive later.
            if apart:
                begin = model.new_int_var(origin, self.horizon, f"S_{j}")
                model.add(begin >= previous)
            for i in arrive_later:
                for literal in self._processed(i, j):
                    model.add(begin >= prob.arrival[i]).only_enforce_if(literal)

            end = model.new_int_var(origin, self.horizon, f"E_{j}")
            model.add(end == begin + length[j])
            self.start.append(begin)
            self.end.append(end)

        model.add(self.end[-1] >= origin + least_makespan(prob))
        self.first: dict[int, Any] = {}
        self.finish: dict[int, Any] = {}

        # First and last tokens are variables where an objective asks for them. The rows on their
        # least times are valid, and help the solver.
        if spans or counted or "mean_ttft" in wanted:
            self.first = {i: self._token_end(i, 0, f"T_{i}") for i in self.requests}
            for i, first in self.first.items():
                model.add(first >= prob.arrival[i] + prob.least_span(prob.prompt[i], 0))

        if spans or counted or "tel" in wanted:
            self.finish = {
                i: self._token_end(i, prob.output[i] - 1, f"F_{i}")
                for i in self.requests
                if counted or "tel" in wanted or prob.output[i] > 1
            }
            smallest = prob.least_latency
            for i, finish in self.finish.items():
                model.add(finish >= prob.arrival[i] + smallest[i])
                if spans:
                    size, output = prob.prompt[i], prob.output[i]
                    # Each later token takes a batch of its own.
                    later = sum(prob.least_span(size, v) for v in range(1, output))
                    model.add(finish - self.first[i] >= later)

        if counted:
            self._count_misses()

    def _count_misses(self) -> None:
        """Add who misses an SLO. Rounded arrivals may make a span a unit too long.

        Who misses none keeps every limit; others may be counted as missing, which costs 1 each.
        """
        prob, add = self.prob, self.model.add
        spare = int(prob.shrink > 1 or prob.costs.unit_s <= csp.ARRIVAL_S)
        self.missed = [self.model.new_bool_var(f"late_{i}") for i in self.requests]

        for i, missed in enumerate(self.missed):
            first, finish, arrival = self.first[i], self.finish[i], prob.arrival[i]
            # The lengths that a limit is on. That of TPOT is on all decodes together.
            spans = {"slo_ttft": [first - arrival], "slo_latency": [finish - arrival]}
            spans |= {"slo_tpot": [finish - first], "slo_gap": []}
            if prob.within("slo_gap", i) is not None:
                tokens = [self._token_end(i, v, f"T_{i}_{v}") for v in range(prob.output[i])]
                spans["slo_gap"] = [next_token - token for token, next_token in pairwise(tokens)]

            for slo, lengths in spans.items():
                if (limit := prob.within(slo, i)) is not None:
                    largest = min(math.floor(limit / prob.shrink) + spare, self.horizon)
                    for length in lengths:
                        add(length <= largest).only_enforce_if(~missed)

    def _token_end(self, i: int, v: int, name: str) -> Any:
        """Return a variable that is the end of the batch that produces token v + 1 of request i."""
        end = self.model.new_int_var(self.prob.arrival[i], self.horizon, name)
        for j in self.prob.budget.through(self.steps):
            self.model.add(end == self.end[j]).only_enforce_if(self.gain[i][v][j])

        return end

    def level(self, name: str) -> Any:
        """Return an objective's level as an expression; see `BatchProblem.level`."""
        prob = self.prob
        if name == csp.COUNTED:
            return sum(self.missed)
        if name in csp.ENDS:
            return self.end[-1]
        if name in ("tel", "mean_ttft"):
            counted = self.finish if name == "tel" else self.first
            return sum(counted.values()) - sum(prob.arrival)

        # `rate_unit` is a multiple of all o - 1, so that times per token are whole numbers.
        rates = [
            (self.finish[i] - self.first[i]) * (prob.rate_unit // (o - 1))
            for i, o in enumerate(prob.output)
            if o > 1
        ]
        if name == "mean_tpot":
            return sum(rates)
        # The max TPOT is a variable above all rates.
        for rate in rates:
            self.model.add(self._largest >= rate)

        return self._largest

    @cached_property
    def _largest(self) -> Any:
        """The variable of the max TPOT, times `BatchProblem.rate_unit`; one for all calls."""
        return self.model.new_int_var(0, self.horizon * self.prob.rate_unit, "worst")

    def _hint(self, start: Plan) -> None:
        """Give the decisions of a list of batches as hints. All else follows from them.

        ``clock`` is the end of the batch before, in the models' unit, and a hint only: rounding may
        put it a little off.
        """
        hint, state, clock = self.model.add_hint, Requests(self.prob), 0
        for j in self.prob.budget.through(self.steps):
            # Batches after the last one are not used.
            batch = start[j] if j < len(start) else Batch(())
            state.evict(batch.evicted)
            # Of each request in the batch: whether it decodes.
            phase = {i: state.ready[i] for i, _ in batch.entries}
            clock = max([clock, *(self.prob.arrival[i] for i in phase)])
            if self.apart:
                hint(self.start[j], clock)
            if phase:
                clock += state.length(batch.entries, self.prob.exact) // self.prob.shrink

            for i in self.requests:
                hint(self.keep[i][j], state.cached[i] > 0)
                for v in range(self.prob.output[i]):
                    processed_now = i in phase and state.produced[i] == v
                    if v:
                        hint(self.decode[i][v][j], processed_now and phase[i])

                    hint(self.prefill[i][v][j], processed_now and not phase[i])

            # m_ij, before those that finish free their KV (`Requests.process`).
            tokens = dict(batch.entries)
            for i in self.requests:
                hint(self.cached[i][j], state.cached[i] + tokens.get(i, 0))

            state.process(batch.entries)

    def read(self) -> list[Any]:
        """Return the variables to read: by batch, used and start, then each i's c and keep."""
        variables: list[Any] = []
        for j in self.steps:
            variables += [self.used[j], self.start[j]]
            for i in self.requests:
                variables += [self.tokens[i][j], self.keep[i][j]]

        return variables

    def decisions(self, values: Any) -> tuple[Plan, list[int]]:
        """Return the batches and their starts in the models' unit, from values of `read`.

        A row of the values is a batch: whether it is used, its start, and then the tokens and
        `keep` of each request in turn. Who has KV before a batch and keeps none is evicted before
        it. ``now`` follows the states.
        """
        now = Requests(self.prob)
        plan, starts = [], []
        for row in values.round().astype(int).reshape(self.batches, -1).tolist():
            used, start, tokens, keep = row[0], row[1], row[2::2], row[3::2]
            # Batches in use come first.
            if not used:
                break

            evicted = tuple(i for i in self.requests if now.cached[i] and not keep[i])
            plan.append(Batch(tuple((i, t) for i, t in enumerate(tokens) if t), evicted))
            starts.append(start)
            now.evict(evicted)
            now.process(plan[-1].entries)

        return plan, starts
