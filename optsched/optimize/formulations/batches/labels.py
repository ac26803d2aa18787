"""Exact search for infermax with arrivals: labels (state, t, S), the least bound first.

A **state** says of each request how many tokens it has produced, and whether its KV is held. A
**label** adds the time t at which the machine is free and the sum S of completions so far. A
**batch** does one thing with each request: it lets it idle, decodes, prefills it whole, evicts it,
or evicts and refills it. It begins at t, or at a later arrival of which it prefills a request: any
other could begin earlier. Let V(state, t) be the least sum of completions still to come. V does not
fall with t, since a schedule may wait. So of two labels of one state the one whose t and S are no
larger is enough. Equal requests may change places, so a state has them in order, and a batch does
with them what comes first in the order of choices first.

**Which batches are left out.** A rest is the batches of a schedule from (state, t) on, each as
early as may be. Order rests by the sum of completions, then the sum of the times of all tokens, the
evictions, and minus the sum of the numbers of batches that evict. They are finitely many, so there
is a smallest one. Each rule names a smaller rest for one that begins with a batch that it leaves
out. So the smallest one obeys all rules, now and, by the same argument, later. The rules look at
state and time alone, so they may be used with labels that were dropped.

1. *An eviction without which the batch still fits.* It is put off by a batch, which changes no
   time. If the next batch refills the request, it evicts it first.
2. *A refill in place where a decode alone, with decode_base, is no dearer, and may stand beside
   prefills.* The decode leaves the same state, no later, with an eviction less.

A state is quiet if the peaks of all unfinished requests fit, their number, and their tokens
together, and if 2 or ``eviction_free`` excludes every refill in place. There nothing is evicted:
by 1 evictions are put off until the request is refilled, which 2 excludes. In a quiet state tokens
of one request may be moved to earlier batches of the same kind, for which there always is room.

3. *A batch that decodes without a resident i, if u w < base + decode_base,* where u others are
   unfinished and w is the own work of i's last decode. Let i's decodes, of own works d, d + z, ...,
   d + (m - 1) z with z = decode_kv, be in the later batches b_1, ..., b_m. Move each to the one
   before, and the first to the present one, B. B is longer by d, b_1 to b_{m-1} by z each, and b_m
   is shorter by d + (m - 1) z <= w. So nothing is later from the end of b_m on, and nothing by more
   than d + (m - 2) z, or d if m = 1, before it: at most u completions by at most w. And i, which
   ended with b_m, ends with b_{m-1} or B, and so at least base + decode_base earlier.
4. *To wait for an arrival, while a request that is there has time for a batch of its own before.*
   Its next token moves there. Nothing is later, since the batch that it leaves gets shorter.

**Bounds** of V, of which the largest counts, by requests' remaining own works W, and fixed costs F
of their batches (`_tables`). Leaving requests out delays nobody, so the requests may be split, and
bounds added.

- *By works and chains.* The j-th completion is at least t + (sum of the j least W) + (the j-th
  least F): j requests were worked off, and one of them has that F, in batches that are all
  different. It is also at least the j-th least of max(t, arrival) + W + F.
- *By what those in flight share,* if no refill is cheaper than a decode alone with decode_base, so
  that a refill may be counted as that decode. Let h of the u requests be held and v wait. Each
  completion is t plus four kinds of time before it, so each kind is bounded on its own:

  - own work of decodes: the sum of the j least before the j-th completion;
  - own work of the v first prefills, in the order p_1, ..., p_v: if e_i requests have ended before
    the batch of the i-th ends, p_i is in u - e_i completions. As e_i does not fall, the order of
    increasing p is the least;
  - prefill_base once at first, and again where e_i < e_{i+1}, as these are two batches. If h = 0,
    the first batch does not decode, and its base counts, too;
  - f = base + decode_base of batches that decode. It is in the completions of those that decode,
    which adds up to f for every decode of every request; and of those that wait: v - i, after the
    batch of the i-th. Before the (i+1)-th, e_{i+1} requests have ended. They have decoded at least
    as often as the e_{i+1} with the fewest decodes. Call f times that number G(e_{i+1}). In a batch
    after that of the l-th at most h + l - e_l decode. So a unit of G costs at least
    (v - l) / (h + l - e_l) then. What first is needed before the (i+1)-th, G(e_{i+1}) - G(e_i), is
    bought with l = i, or with l < i and then for at least (v - i + 1) / (h + i - 1), which is the
    least of all (v - l) / (h + l).

  The least sum over e_1 <= ... <= e_v is found by a dynamic program over (i, e_i).
- *By later arrivals.* The requests that arrive from some time on have, alone, a least sum of
  completions. It is found first, from the last arrival backwards (Russian dolls, Verfaillie et al.
  1996): each is the same search, with the values before it as its bounds.

All numbers are integers. If these are exact (`BatchProblem.shrink`, `BatchProblem.floored`),
*optimal* needs no tolerance. Arrivals with so many digits that no short unit divides them are
rounded down by less than 1e-12 s, and the answer is the interval that this leaves.
"""

import math
from typing import Any

import numpy as np

from optsched.bounds.base import WHOLE_BLOCKS
from optsched.optimize.formulations.base import LIMITS, Answer, Method, Task
from optsched.optimize.formulations.batches import plans
from optsched.optimize.formulations.batches.greedy import begun
from optsched.optimize.formulations.batches.problem import EXTRAS, MODELLED, Batch, BatchProblem
from optsched.optimize.solvers.base import Progress, SolveOptions, Status
from optsched.problem.budget import work_time

MAX_BYTES = 4 * 2**30
"""The max memory of the search. At this limit it stops as at a time limit."""
_SLICE = 50_000
_NONE = 2**62
# The largest level: the sum of two of them is below `_NONE`.
_LARGEST = 2**60
# The max expansions for the requests from a later arrival on. Beyond, their bound is used.
_PART, _LATER_PART = 300_000, 500
_MOMENTS, _WIDER = 16, 1.5


def solve_by_labels(task: Task, options: SolveOptions) -> Answer:
    """Solve infermax for total latency by setting labels."""
    prob, start, _ = begun(task, options, _LARGEST, steps=0)
    search, built_s = _Dolls(prob, start, options), prob.budget.spent_s
    native = search.run(options.after(built_s))
    plan = search.plan
    status = Status.NO_INCUMBENT if plan is None else Status.FEASIBLE
    claim = plans.Claim(status, plan, search.bound)
    if native == "solved" and (plan is None or (prob.shrink == 1 and prob.floored == 0)):
        status = Status.INFEASIBLE if plan is None else Status.OPTIMAL
        claim = plans.Claim(status, plan, search.best, level=None if plan is None else search.best)

    native = f"{native}, {search.expanded:,} labels expanded"
    return plans.answer(prob, claim, native, prob.budget.spent_s - built_s)


class _Dolls:
    """The searches for the requests from every arrival on, the last one first.

    `best` and `bound` are levels: sums of latencies. Nothing at `best` or above is searched for.
    `rests` has the best batches of those that were solved.
    """

    def __init__(self, prob: BatchProblem, start: plans.Plan | None, options: SolveOptions) -> None:
        from optsched.optimize.formulations.batches import labels_kernel as core

        self.core, self.prob, self.plan, self.expanded = core, prob, start, 0
        keys = zip(prob.arrival, prob.output, prob.prompt, range(prob.n), strict=True)
        self.order = [i for *_, i in sorted(keys)]
        self.tables = _tables(prob, self.order)
        self.rests: dict[int, plans.Plan] = {prob.n: []}
        self.begin, self.progress = work_time(), options.progress
        self.step = max(1, 3 * sum(self.tables.rules[[core.BASE, core.DECODE_BASE]].tolist()))
        ceilings = [_NONE]
        ceilings += [] if start is None else [_level(prob, start)]
        ceilings += [] if prob.cutoff is None else [math.ceil(prob.cutoff)]
        self.best = min(ceilings)
        alone = self.tables.work[:, 0] + self.tables.fixed[:, 0]
        self._alone_before = [0, *np.cumsum(alone).tolist()]
        self.spent = 0
        self._busy_until, t = [0], 0
        ends = (
            self.tables.rules[[core.BASE, core.PREFILL_BASE]].sum(),
            self.tables.rules[[core.BASE, core.DECODE_BASE]].sum(),
        )
        for i in range(prob.n):
            t = max(t, int(self.tables.arrival[i])) + int(self.tables.prefill[i, 0] + ends[0])
            self._busy_until.append(t + int(ends[1] * max(prob.output)))
        self._arrivals_from = [*np.cumsum(self.tables.arrival[::-1]).tolist()[::-1], 0]
        self.bound = min(self.best, self._alone_before[-1])

    def run(self, options: SolveOptions) -> str:
        """Search until the end or a limit. Return why the search ended."""
        end = work_time() + options.time_limit
        arrival, n = self.tables.arrival, self.prob.n
        firsts = [m for m in range(n) if m == 0 or arrival[m] > arrival[m - 1]]
        for m in reversed(firsts[1:]):
            native = self._rest(m, options, end)
            if native is not None:
                return native

        most = min(_NONE, self.best + self._arrivals_from[0])
        search, native = self._search(0, 0, most, options, end)
        if search.goal >= 0:
            self.plan = search.plan()
        if native == "solved":
            self.bound = self.best

        return native

    def _rest(self, m: int, options: SolveOptions, end: float) -> str | None:
        """Bound what the requests from m on need alone, if the machine is free from t on.

        First from their arrival on, then from later t on. A schedule that begins later by some
        time is later by no more. Return why the search ended, unless it goes on.
        """
        tables, n = self.tables, self.prob.n
        arrival, before = int(tables.arrival[m]), self._busy_until[m]
        t, most, step = arrival, _NONE, self.step
        for k in range(tables.moments.shape[1]):
            search, native = self._search(m, t, most, options, end)
            tables.moments[m, k], tables.values[m, k], tables.known[m] = t, search.bound, k + 1
            if k == 0:
                self.spent = search.expanded
            if k == 0 and native == "solved":
                self.rests[m] = search.plan()
                tables.exact[m] = 1
            if native not in ("solved", "long enough"):
                return native
            if t >= min(int(tables.arrival[-1]), before) or native != "solved":
                break

            later = min(t + step, max(t + 1, int(tables.arrival[-1])))
            most = min(_NONE, search.best + (n - m) * (later - t))
            t, step = later, int(step * _WIDER)

        return None

    def _search(
        self, m: int, t: int, best: int, options: SolveOptions, end: float
    ) -> tuple["_Search", str]:
        search = _Search(self, m, t, best)
        native = search.run(options, end)
        self.hear(search)
        self.expanded += search.expanded
        return search, native

    def hear(self, search: "_Search") -> None:
        """Take over a search's values, and report progress."""
        m = search.first
        later = search.bound - self._arrivals_from[m]
        if m == 0 and search.goal >= 0:
            self.best = search.best - self._arrivals_from[0]

        if search.begin <= self.tables.arrival[m]:
            self.bound = min(self.best, max(self.bound, self._alone_before[m] + later))
        if self.progress is not None:
            found = self.plan is not None or (m == 0 and search.goal >= 0)
            value = self.prob.value("tel", self.best) if found else None
            bound = self.prob.value("tel", self.bound)
            self.progress(Progress(work_time() - self.begin, value, bound))


class _Search:
    """The compiled search and its arrays, for the requests from `first` on, from `begin` on."""

    def __init__(self, dolls: _Dolls, first: int, begin: int, best: int) -> None:
        self.dolls, self.core, self.first, self.begin = dolls, dolls.core, first, begin
        tables, core = dolls.tables, dolls.core
        n, size, codes = len(tables.arrival), 1 << 10, 2 * int(tables.output.max())
        self.state = core.Search(
            rows=np.zeros((size, n), np.uint16 if codes < 2**16 else np.uint32),
            acts=np.zeros((size, n), np.uint8),
            more=np.zeros(size, np.int32),
            since=np.full(size, -1, np.int64),
            time=np.zeros(size, np.int64),
            done=np.zeros(size, np.int64),
            low=np.zeros(size, np.int64),
            parent=np.full(size, -1, np.int32),
            link=np.full(size, -1, np.int32),
            flag=np.zeros(size, np.uint8),
            heap=np.zeros((2 * size, 3), np.int64),
            table=np.full(4 * size, -1, np.int32),
            numbers=np.zeros(6, np.int64),
        )
        root = self.state.rows[0]
        root[:first] = 2 * tables.output[:first]
        self.state.time[0] = begin
        self.floor = int(core.remaining(root, begin, _NONE, tables, np.zeros((5, n + 1), np.int64)))
        self.state.low[0] = self.state.heap[0, 0] = self.floor
        core.enter(self.state.rows, np.zeros(1, np.int32), self.state.table)
        where = [core.LABELS, core.ENTRIES, core.BEST, core.GOAL, core.DIVE]
        self.state.numbers[where] = 1, 1, best, -1, -1

    @property
    def best(self) -> int:
        """The least sum of completions found, or the least that is not searched for."""
        return int(self.state.numbers[self.core.BEST])

    @property
    def goal(self) -> int:
        """The label of the best schedule, or -1."""
        return int(self.state.numbers[self.core.GOAL])

    @property
    def expanded(self) -> int:
        """Number of labels expanded."""
        return int(self.state.numbers[self.core.EXPANDED])

    @property
    def bound(self) -> int:
        """A lower bound on every sum of completions below `best`, and on `best`."""
        waiting = self.state.numbers[self.core.ENTRIES]
        lowest = int(self.state.heap[0, 0]) if waiting else self.best
        return min(max(self.floor, lowest), self.best)

    def run(self, options: SolveOptions, end: float) -> str:
        """Search until the end or a limit. Return why the search ended."""
        limit, dolls = 1, self.dolls
        part = _PART
        if self.begin > dolls.tables.arrival[self.first]:
            part = max(_LATER_PART, 2 * dolls.spent)
        try:
            while True:
                gap = options.mip_rel_gap * dolls.best
                if options.stop is not None and options.stop.is_set():
                    return "interrupted"
                if work_time() >= end:
                    return "time limit"
                if options.mip_rel_gap and dolls.best - dolls.bound <= gap:
                    return "gap reached"
                if self.first and self.expanded >= part:
                    return "long enough"

                slice_begin = work_time()
                ended = self.core.expand(limit, self.state, dolls.tables)
                took = work_time() - slice_begin
                limit = min(max(1, limit * 2 if took < 0.05 else limit // 2), _SLICE)
                if ended == self.core.SOLVED:
                    return "solved"
                if ended == self.core.GROW and not self._grow():
                    return "memory limit"

                dolls.hear(self)
        except KeyboardInterrupt:
            return "interrupted"

    def _grow(self) -> bool:
        old, numbers = self.state, self.state.numbers
        if 2 * sum(column.nbytes for column in old) > MAX_BYTES:
            return False

        def doubled(column: Any) -> Any:
            return np.concatenate([column, np.zeros_like(column)])

        self.state = old._replace(
            **{name: doubled(getattr(old, name)) for name in self.core.COLUMNS},
            heap=doubled(old.heap),
            table=np.full(2 * len(old.table), -1, np.int32),
            numbers=numbers,
        )
        self.core.enter(self.state.rows, old.table, self.state.table)
        return True

    def plan(self) -> plans.Plan:
        """Return the batches of the best schedule."""
        core, state, prob = self.core, self.state, self.dolls.prob
        path = [self.goal]
        while path[-1] != 0:
            path.append(int(state.parent[path[-1]]))

        path.reverse()
        who = list(self.dolls.order)
        kind = self.dolls.tables.kind.tolist()
        row, found = state.rows[0].tolist(), []
        for label in path[1:]:
            entries, evicted = [], []
            for p, act in enumerate(state.acts[label].tolist()):
                i, produced = who[p], row[p] >> 1
                if act in (core.EVICT, core.REFILL):
                    evicted.append(i)
                    row[p] = 2 * produced
                if act in (core.DECODE, core.PREFILL, core.REFILL):
                    entries.append((i, 1 if act == core.DECODE else prob.prompt[i] + produced))
                    row[p] = 2 * (produced + 1) + (produced + 1 < prob.output[i])

            found.append(Batch(tuple(entries), tuple(evicted)))
            # Equal requests change places as in the search, whose sort is stable, too.
            places = sorted(range(len(row)), key=lambda p: (kind[p], -row[p]))
            who, row = [who[p] for p in places], [row[p] for p in places]
            for _ in range(int(state.more[label])):
                found.append(
                    Batch(tuple((i, 1) for i, code in zip(who, row, strict=True) if code & 1))
                )
                codes = zip(who, row, strict=True)
                row = [x + 2 * (x & 1) - (x // 2 + 1 == prob.output[i]) * (x & 1) for i, x in codes]

        return found + self.dolls.rests[core.begins_at(np.array(row))]


def _tables(prob: BatchProblem, order: list[int]) -> Any:
    """Return the compiled search's view of a problem."""
    from optsched.optimize.formulations.batches.labels_kernel import Tables

    c, n, longest = prob.costs, prob.n, max(prob.output) + 1
    block, evicts = prob.instance.kv_block_tokens, not prob.eviction_free
    fixed_costs = base, decode_base, prefill_base = c["base"], c["decode_base"], c["prefill_base"]
    kv, decode, prefill, tokens, calm = (np.zeros((n, longest), np.int64) for _ in range(5))
    decodes, shared = np.zeros((n, longest), np.int64), True
    work, fixed = (np.zeros((n, 2 * longest), np.int64) for _ in range(2))

    for p, i in enumerate(order):
        s, o = prob.prompt[i], prob.output[i]
        tokens[p, :o] = [s + k for k in range(o)]
        kv[p, 1 : o + 1] = [-(-(s + k - 1 + prob.offset) // block) * block for k in range(1, o + 1)]
        prefill[p, :o] = [c.prefill(s + k) for k in range(o)]
        decode[p, 1:o] = [c.decode(s + k - 1) for k in range(1, o)]
        dearer = decode[p, 1:o] + decode_base > prefill[p, 1:o]
        decodes[p, :o] = decode[p, o - 1 :: -1].cumsum()[::-1]
        shared &= not (evicts and dearer.any())
        pays = evicts & (dearer if prob.hybrid else np.ones_like(dearer))
        calm[p, 1:o] = ~np.logical_or.accumulate(pays[::-1])[::-1]
        calm[p, 0] = not pays.any()
        for k in reversed(range(o)):
            after = 2 * (k + 1) + (k + 1 < o)
            own, alone = int(prefill[p, k]), base + prefill_base
            work[p, 2 * k], fixed[p, 2 * k] = own + work[p, after], alone + fixed[p, after]
            if k == 0:
                continue
            if not evicts:
                own, alone = int(decode[p, k]), base + decode_base
            else:
                own, alone = min(own, int(decode[p, k])), base + min(decode_base, prefill_base)

            work[p, 2 * k + 1], fixed[p, 2 * k + 1] = own + work[p, after], alone + fixed[p, after]

    sizes = [(prob.arrival[i], prob.output[i], prob.prompt[i]) for i in order]
    limits = [prob.batch_tokens, prob.prefill_tokens, prob.capacity, prob.running]
    return Tables(
        arrival=np.array([prob.arrival[i] for i in order], np.int64),
        output=np.array([prob.output[i] for i in order], np.int64),
        kind=np.array([sizes.index(one) for one in sizes], np.int64),
        kv=kv,
        decode=decode,
        prefill=prefill,
        tokens=tokens,
        calm=calm,
        decodes=decodes,
        work=work,
        fixed=fixed,
        moments=np.zeros((n + 1, _MOMENTS), np.int64),
        values=np.zeros((n + 1, _MOMENTS), np.int64),
        known=np.zeros(n + 1, np.int64),
        exact=np.zeros(n + 1, np.int64),
        rules=np.array([*limits, *fixed_costs, prob.hybrid, evicts, shared, 0], np.int64),
    )


def _level(prob: BatchProblem, plan: plans.Plan) -> int:
    """Return a plan's sum of latencies in the models' integers."""
    now, clock, total, c = plans.Requests(prob), 0, -sum(prob.arrival), prob.costs
    for batch in plan:
        now.evict(batch.evicted)
        decodes = [now.ready[i] for i, _ in batch.entries]
        clock = max(clock, *(prob.arrival[i] for i, _ in batch.entries))
        clock += c.fixed(any(decodes), not all(decodes))
        clock += sum(
            c.decode(now.cached[i]) if now.ready[i] else c.prefill(tokens, now.cached[i])
            for i, tokens in batch.entries
        )
        total += clock * sum(now.done(i) for i in now.process(batch.entries))

    return total


_SUMMARY = "exact search over states, times and sums of completions, with arrivals (labels)"
_FEATURES = MODELLED | WHOLE_BLOCKS
_LABELS = Method(
    _SUMMARY,
    solve_by_labels,
    ("tel",),
    LIMITS | {"arrivals"},
    extras=EXTRAS,
    features=_FEATURES,
)
METHODS = {"infermax": {"labels": _LABELS}}
