"""Exact search for infermax: labels (state, t, S), the least bound first, with arrivals.

A **state** says of each request how many tokens it has produced, and whether its KV is held. A
**label** adds the time t at which the machine is free and the sum S of completions so far. A
**batch** does one thing with each request: it lets it idle, decodes, prefills it whole, evicts it,
or evicts and refills it. It begins at t, or at a later arrival of which it prefills a request: any
other could begin earlier. Let V(state, t) be the least sum of completions still to come. V does not
fall with t, since a schedule may wait, and a schedule that begins d later ends each of its u
unfinished requests at most d later. So of two labels of one state, (t, S) is enough, and **no
worse** than (t', S'), if S + u max(0, t - t') <= S'. Equal requests may change places, so a state
has them in order, and a batch does with them what comes first in the order of choices first.

**Rules by state.** A rest is the batches of a schedule from (state, t) on, each as early as may be.
Order rests by the sum of completions, then the sum of the times of all tokens, the evictions, and
minus the sum of the numbers of batches that evict. They are finitely many, so there is a smallest
one. Rules 1, 2 and 4 name a smaller rest for one that begins with a batch that they leave out. So
the smallest one obeys them, now and, by the same argument, later. They look at state and time
alone, so they may be used with labels that were dropped.

1. *An eviction without which the batch still fits.* It is put off by a batch, which changes no
   time. If the next batch refills the request, it evicts it first.
2. *A refill in place where a decode alone, with decode_base, is no dearer, and may stand beside
   prefills.* The decode leaves the same state, no later, with an eviction less. So it does where
   its own work is no dearer, and the batch decodes anyway, or prefills nothing but such refills and
   decode_base <= prefill_base.

A state is quiet if the peaks of all unfinished requests fit, their number, and their tokens
together, in one batch and as prefills, and if 2 or ``eviction_free`` excludes every refill in
place. There nothing is evicted: by 1 evictions are put off until the request is refilled, which 2
excludes. What follows a quiet state is quiet. There is always room to move tokens of a request to
earlier batches, or batches into one.

4. *To wait for an arrival, while a request that is there has time for a batch of its own before.*
   Its next token moves there. Nothing is later, since the batch that it leaves gets shorter.

**Rules of value, in quiet states.** What these leave out is on no schedule below the incumbent that
is optimal: there is a better one, or it ends at the incumbent or above. So they may look at the
batch before. Only the last case of 5 names a label that is as good.

3. *A batch that decodes without a resident i,* if no schedule below the incumbent has u others that
   end from then on and before i, for the least u with u w >= base + decode_base. Here w is the own
   work of i's last decode. Let i's decodes, of own works d, d + z, ..., d + (m - 1) z with
   z = decode_kv, be in the later batches b_1, ..., b_m. Move each to the one before, and the first
   to the present one, B. B is longer by d, b_1 to b_{m-1} by z each, and b_m is shorter by
   d + (m - 1) z <= w. So nothing is later from the end of b_m on, and nothing before it by more
   than d + (m - 1) z: fewer than u completions by at most w. And i, which ended with b_m, ends with
   b_{m-1} or B, and so at least base + decode_base earlier: this is better. To see that the u
   others cannot end before it: they are not so many. Or a of them are here, the (u - a)-th least of
   arrival + W + F of those to come (below) is a time before which i does not end, and the bound by
   works and chains with this end of i reaches the incumbent.
5. *A batch B that prefills only requests J that were there when the batch before, A, began, if
   nothing ended with A, and 3 would have one of J, were it a resident, in every decode batch.* (So
   it is said, too, of a j in J with one token, if base + decode_base > 0.)
   - A prefills, and B decodes. Let A prefill J as well, and let B's decodes D alone follow. This
     leaves the same state, as soon or prefill_base earlier, and nothing that ended with B is later.
     If j's token is its only one, j ends earlier, which is better. Else D decodes without j. After
     A and before j the same others end as with A, B, so what 3 has found of them after A, with j
     not yet prefilled, holds: this is not optimal, or not below the incumbent; nor is A, B.
   - A does not prefill. A and B change places, with the same end, and A's decodes are without j.
     What ended with B ends no later, nothing ended with A, and 3 says the same.
   - A prefills, and B does not decode. Let A prefill J, too, which takes base + prefill_base less,
     and leads from the label before A to the same state, t and S no larger (if both fixed costs are
     0, t may be the same).

**Why nothing is lost.** Let v be the least sum of all schedules, below the incumbent. A label is
live if S + V(state, t) = v. The root is. A label is dropped for another of its state that is no
worse, which is live if it was, and one of equal t and S is not entered. No worse is an order. So at
the end each state that ever had a live label has a kept live one.
Of the kept live labels, all of them expanded, take one X with the most tokens produced, and the
first batch B of the smallest rest of X. It obeys 1, 2 and 4, and as v is optimal, 3 and the first
two cases of 5. If the third leaves it out, the label P before A has a batch, A with J, to the state
that B leads to, with t and S no larger. If 5 leaves this one out at P, it is by the third case
again, and the same holds of the label before P; this ends at the root at the latest, which has no
batch before it. In each case the state after B has had a live label: it was entered, or was
followed at once, or ended a schedule of sum v. Every batch produces a token, so it has more tokens
than X, and a schedule of sum v was found. No order of replacements is needed, and none of the steps
asks that t falls.

Equal requests change places in a state. That changes neither t, S nor V, nor who arrived before A:
they arrive together. 3 is asked anew of each label's state, in its own order, and batches with
equal requests in equal states are followed in one order, which loses none but for names.

A batch after which the rules leave only one, which decodes all, is followed at once, so such labels
are never written.

**Bounds** of V, of which the largest counts, by requests' remaining own works W, and fixed costs F
of their batches (`_tables`). Leaving requests out delays nobody, so the requests may be split, and
bounds added.

- *By works and chains.* The j-th completion is at least t + (sum of the j least W) + (the j-th
  least F): j requests were worked off, and one of them has that F, in batches that are all
  different. It is also at least the j-th least of max(t, arrival) + W + F.
- *By what those in flight share,* if no refill is cheaper than a decode alone with decode_base, so
  that a refill may be counted as that decode. Let h of the u requests be held and v wait, among
  them the next to arrive, as if they had: this delays nobody. Each completion is t plus four kinds
  of time before it, so each kind is bounded on its own:

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
- *By later arrivals.* Let L(m, t) be the least sum of the requests from the m-th arrival on, alone,
  if the machine is free from t on. It is found first, for the last arrivals first (Russian dolls,
  Verfaillie et al. 1996), each by the same search, for t from the m-th arrival on, at moments that
  get wider. A schedule that begins d later ends each of its c requests at most d later, so
  L(m, t) >= L(m, t + d) - c d. From the last arrival on it is L(m, t + d) = L(m, t) + c d, since
  only time passes. Where none of the requests from m on has begun, L(m, t) is added to a bound of
  the others. Where the others have ended by the m-th arrival, it is the value: busy periods that
  do not meet are solved apart.
- *Of a batch in the making.* If it does so with the first requests, it ends no earlier than with
  these alone. What it does with another one is that one's first batch, whose own work is counted
  after it, and whose fixed cost is left out.

**Other objectives.** For the mean TTFT, S is the sum of first tokens; W and F are those of a first
prefill, or 0. In a quiet state nothing decodes while a request has not begun: moved behind the last
first token, decodes make no first token later. 4 is for requests that have not begun. For the
makespan, S is 0, and V the latest completion. It is at least, from each arrival on, the sum of W of
those that arrive from then on, and their largest F, or else the fixed costs of the batches that
they need (`optsched.optimize.formulations.batches.batch_count`): those J that produce tokens, of
which n_p prefill, and the others decode. Fewer prefills are better, unless prefill_base is below
decode_base, and then all J pay no more. A rest's times of tokens are here the numbers of their
batches, and one with its last token left is not left out of a batch of its phase into which it
fits (rule 6): its token moves here from a later batch, which gets as much shorter, and its KV is
free earlier. If it is held, this is for a decode that is no dearer than a refill. In a quiet state
every batch that decodes has all residents: the smallest rest moves them up, as in 3. 4 does not go
with that, and is left out. Rules 5 and the bounds by sharing and of a batch in the making are for
total latency only. For the mean TPOT of requests that arrive together, S counts each batch's time
as often as those say who have had their first token and not their last, t is 0, no state is quiet,
and V is at least the sum of W + F after the first tokens, each as often as it counts.

*Requests within limits* on first tokens and on latencies: to remove a request from a schedule
delays nobody, so those that miss a limit may be served last, one after another. A label is then a
state and t, where all that have begun must be within their limits, and V is how many are never
begun. Who cannot be within limits any more is not. If all others before j, by due time, are to be,
the last of them has a completion of at least t + their works + its F, so the works fit before the
largest due time less F: Moore's rule says how many must be left out (so for first tokens, by their
prefills). L(m, t) >= L(m, arrival of m) adds up with that. 3 and 5 do not hold, 4 does for those
that have begun.

The order of rests may differ from state to state: the first batch of the smallest one obeys the
rules, and leads to the next state.

All numbers are integers. If these are exact (`BatchProblem.shrink`, `BatchProblem.floored`),
*optimal* needs no tolerance. Arrivals with so many digits that no short unit divides them are
rounded down by less than 1e-12 s, and the answer is the interval that this leaves.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from optsched.bounds.base import WHOLE_BLOCKS
from optsched.bounds.certificate import cost_model_dict
from optsched.bounds.checker.parts import Rejected
from optsched.bounds.checker.seconds import parts_of
from optsched.bounds.leaves import TICKS_PER_SECOND, labels_leaf
from optsched.costs.cost import BatchCost
from optsched.optimize.formulations.base import Answer, Method, Task
from optsched.optimize.formulations.batches import plans
from optsched.optimize.formulations.batches.batch_count import by_input, by_kv, kv_sizes
from optsched.optimize.formulations.batches.best_first import NONE, Search
from optsched.optimize.formulations.batches.problem import (
    ARRIVAL_S,
    COUNTED,
    ENDS,
    EXTRAS,
    MODELLED,
    SWITCHES,
    Batch,
    BatchProblem,
    Costs,
)
from optsched.optimize.formulations.batches.start import start_of
from optsched.optimize.solvers.base import Progress, SolveOptions, Status
from optsched.problem.budget import work_time
from optsched.problem.errors import UsageError

_PACES = ("slo_tpot", "slo_gap")
# The largest level: the sum of two of them is below `NONE`.
_LARGEST = 2**60
# The max number of labels expanded for the requests from an arrival on, beyond which their bound is
# used, and the min of that max if they begin later.
_MAX_EXPANDED, _MIN_EXPANDED_LATER = 300_000, 500
# How many moments at which they may begin are looked at.
_MOMENTS = 16
# The share of the time left after which a part's bound is used, so that those before it get some.
_SHARE = 0.3


COUNTS = {"tel": 0, "makespan": 1, "tps": 1, "mean_ttft": 2, "mean_tpot": 3, COUNTED: 4}
"""What `labels_kernel` counts for an objective: FINISHES, LATEST, FIRSTS, PACES or MISSES there."""


def solve_by_labels(task: Task, options: SolveOptions) -> Answer:
    """Solve infermax for one objective by setting labels."""
    if why := why_not_by_labels(task):
        raise UsageError(f"method: found labels with {why}; expected cpsat")

    prob, start, _ = start_of(task, options, _LARGEST)
    search, built_s = SuffixSearches(prob, start, options), prob.budget.spent_s
    native = search.run(options.after(built_s))
    plan = search.plan
    status = Status.NO_INCUMBENT if plan is None else Status.FEASIBLE
    claim = plans.Claim(status, plan, search.bound)
    # Rounded numbers prove an interval only, so that optimal is for exact ones.
    if native == "solved" and (plan is None or (prob.shrink == 1 and prob.floored == 0)):
        status = Status.INFEASIBLE if plan is None else Status.OPTIMAL
        claim = plans.Claim(status, plan, search.best, level=None if plan is None else search.best)

    native = f"{native}, {search.expanded:,} labels expanded"
    answer = plans.answer(prob, claim, native, prob.budget.spent_s - built_s)
    if prob.eviction_free or search.name in ("mean_tpot", COUNTED):
        return answer  # of such schedules, or an objective, that `checker.labels` does not know

    return replace(answer, tree=search.tree())


def why_chunks_matter(task: Task) -> str:
    """Return why a schedule that splits prefills may be better than all others, or "".

    Say that neither the tokens of all requests' largest inputs together nor the KV capacity exceed
    the limits on tokens, and that no prefill is more work than the same in two chunks: by the price
    of c1 and then c2 tokens, (2 square - cross) c1 c2 <= kv c1 + request. Then move all chunks of a
    prefill into the batch of its last chunk. That batch is a prefill batch already, and its tokens
    fit. No batch's work so far rises, since what a batch gains the ones before it lose, and they
    may vanish. No token is produced later, and less KV is held before. Evictions of vanished
    batches move to the next one. What does not rise if every token is earlier does not rise. A time
    per token may, since it counts from the first one.
    """
    instance, cost = task.instance, task.cost_model
    if not isinstance(cost, BatchCost):
        return "there is no cost model of batches"
    gaps_count = COUNTED in task.names and _limits_gaps(task)
    if gaps_count or not set(task.names) <= {"tel", "mean_ttft", COUNTED, *ENDS}:
        return "a time between tokens counts"

    largest = instance.prompt_tokens + instance.output_tokens - 1
    tokens = min(int(largest.sum()), instance.kv_capacity)
    exceeded = instance.limits.exceeded(np.array([tokens]))
    if exceeded is not None:
        name, limit, _ = exceeded
        return f"limits.{name} {limit} may cut prefills (up to {tokens} tokens at once)"

    price = Costs.of(cost)
    saved = 2 * price["prefill_square"] - price["prefill_cross"]
    size, kv = int(largest.max()), price["prefill_kv"]
    # For c1 it is hardest with c1 + c2 = size, and then the difference is concave in c1: its top is
    # at one of the two integers beside the real one.
    worst = 0 if saved <= 0 else (saved * size - kv) // (2 * saved)
    dearer = any(
        saved * c * (size - c) > kv * c + price["prefill_request"]
        for c in (worst, worst + 1)
        if 0 < c < size
    )
    return "the cost model makes a prefill in chunks cheaper than a whole one" if dearer else ""


def why_not_by_labels(task: Task) -> str:
    """Return what of a task a label does not say, or "".

    A label has no moments of single tokens, so no gaps between them. For times per token the time t
    of labels stays 0, so all requests have to be there (module docstring, Other objectives).
    """
    name, instance = task.names[0], task.instance
    if name == "mean_tpot" and instance.arrivals_differ:
        return "mean_tpot and arrivals"
    if name == COUNTED and _limits_gaps(task):
        return f"{COUNTED} and limits on the time between tokens"

    why = why_chunks_matter(task) if instance.chunked_prefill is True else ""
    return why and f"chunked_prefill = true, where {why}"


def _limits_gaps(task: Task) -> bool:
    """Whether there is a limit on the time between tokens."""
    limits = task.instance.slos
    return any(np.isfinite(limits[slo]).any() for slo in _PACES if slo in limits)


class SuffixSearches:
    """The searches for the requests from every arrival on, the last one first.

    `best` and `bound` are levels (`BatchProblem.level`). Nothing from `best` on is searched for.
    `rests[m]` has the best batches of the requests from m on alone, where these were solved. The
    plan ``start`` is the first incumbent; None: there is none yet.
    """

    def __init__(self, prob: BatchProblem, start: plans.Plan | None, options: SolveOptions) -> None:
        from optsched.optimize.formulations.batches import labels_kernel as core

        self.core, self.prob, self.plan, self.expanded = core, prob, start, 0
        self.name = prob.objectives[0]
        self.sums = self.name not in (*ENDS, COUNTED)  # whether S adds up what requests count
        self.due = _due(prob)
        keys = zip(prob.arrival, prob.output, prob.prompt, self.due, range(prob.n), strict=True)
        # By arrival, and equal requests side by side, as `Tables` asks for.
        self.order = [i for *_, i in sorted(keys)]
        self.tables = _tables(prob, self.order, self.due)
        # A code is 2 k + held, of which 2 o is the largest.
        self.code_type = np.uint16 if 2 * max(prob.output) < 2**16 else np.uint32
        self.rests: dict[int, plans.Plan] = {prob.n: []}
        self.begin, self.progress = work_time(), options.progress
        # Anybody may be late here, so that to serve one after another is a schedule.
        if start is None and self.name == COUNTED:
            self.plan = start = self.serve_one_by_one(range(prob.n))

        # If S is a sum: the least latency of the first m requests, each alone, and the arrivals of
        # those from m on, which turn completions into latencies. Else both are 0.
        alone = self.sums * (self.tables.work[:, 0] + self.tables.fixed[:, 0])
        self._alone_before = [0, *np.cumsum(alone).tolist()]
        arrivals = self.sums * self.tables.arrival[::-1]
        self._arrivals_from = [*np.cumsum(arrivals).tolist()[::-1], 0]
        # Only levels below the start's and the cutoff are searched for.
        ceilings = [NONE]
        ceilings += [] if start is None else [self._count(start) - self._arrivals_from[0]]
        ceilings += [] if prob.cutoff is None else [math.ceil(prob.cutoff)]
        self.best = min(ceilings)
        self.bound = min(self.best, self._alone_before[-1])

    def run(self, options: SolveOptions) -> str:
        """Search until the end or a limit. Return why the search ended."""
        end = work_time() + options.time_limit
        arrival, n = self.tables.arrival, self.prob.n
        # The first request of each arrival: those from it on are one of the searches.
        firsts = [m for m in range(n) if m == 0 or arrival[m] > arrival[m - 1]]
        # What is found of later arrivals bounds every search that begins earlier.
        for m in reversed(firsts[1:]):
            native = self._bound_suffix(m, options, end)
            if native is not None:
                return native

        # All requests, from time 0 on, and as many labels as it takes (None). If S is a sum, the
        # search counts completions, and `best` latencies.
        ceiling = min(NONE, self.best + self._arrivals_from[0])
        search, native = self._search(0, 0, ceiling, None, options, end)
        if search.goal >= 0:
            self.plan = search.plan()
        if native == "solved":
            self.bound = self.best

        return native

    def _bound_suffix(self, m: int, options: SolveOptions, end: float) -> str | None:
        """Bound what the requests from m on need alone, if the machine is free from t on.

        First for their arrival, then for later t, as long as those before may take. A later search
        may expand twice as many labels as the first one did. Return why the search ended, or None
        if that of an earlier arrival may begin.
        """
        tables, core, n = self.tables, self.core, self.prob.n
        # About as long as those before m may take: their prefills one after another, and then the
        # fixed costs of as many decode batches as the longest output of them has tokens.
        base, decode_base, prefill_base = tables.rules[core.BASE : core.PREFILL_BASE + 1].tolist()
        latest_begin = 0
        for arrival, work in zip(tables.arrival[:m].tolist(), tables.prefill[:m, 0], strict=True):
            latest_begin = max(latest_begin, arrival) + int(work) + base + prefill_base

        latest_begin += (base + decode_base) * int(tables.output[:m].max())
        t, ceiling, max_expanded = int(tables.arrival[m]), NONE, _MAX_EXPANDED
        # From one moment to the next: at first about three decode batches' fixed costs.
        step = 3 * (base + decode_base) + 1
        # Nothing is searched for that is worse than the incumbent without those before m (`known`).
        known = None if self.plan is None else _without(self.plan, self.order[:m])
        if known is not None:
            ceiling = self._count(known)
        if self.name == COUNTED:
            ceiling = min(ceiling, n - m)

        for k in range(_MOMENTS):
            part_end = end if math.isinf(end) else work_time() + _SHARE * (end - work_time())
            search, why = self._search(m, t, ceiling, max_expanded, options, part_end)
            # Only this part's share of the time is up: its bound is used, and the search goes on.
            if why == "time limit" and work_time() < end:
                why = "long enough"

            tables.moments[m, k], tables.values[m, k], tables.known[m] = t, search.bound, k + 1
            self._raise(self._root_bound())
            if why not in ("solved", "long enough"):
                return why
            # What begins at its arrival may end a schedule (`tables.exact`). Without a goal nothing
            # is below the value of `known`, so that this is the best.
            if k == 0 and why == "solved":
                self.rests[m] = search.plan() if known is None or search.goal >= 0 else known
                tables.exact[m] = 1
                max_expanded = max(_MIN_EXPANDED_LATER, 2 * search.expanded)
            # A later begin is harder; of a count only the value at the arrival is used; and from
            # the last arrival on values are known (`labels`, By later arrivals).
            is_last = t >= min(int(tables.arrival[-1]), latest_begin)
            if why != "solved" or self.name == COUNTED or is_last:
                break

            # No moment is behind the last arrival: from there on values are known.
            later = min(t + step, max(t + 1, int(tables.arrival[-1])))
            # To begin later ends each request so much later at most: nothing beyond counts.
            ceiling = min(NONE, search.best + (n - m if self.sums else 1) * (later - t))
            # The moments get wider, since few of them must reach far.
            t, step = later, step + step // 2

        return None

    def _count(self, plan: plans.Plan) -> int:
        """Return what is counted for a plan of some requests, in the models' integers.

        Of sums it is that of completions or first tokens, from which no arrivals are taken off.
        """
        prob, name = self.prob, self.name
        first, finish = _moments(prob, plan)
        if name in ENDS:
            return max(finish.values())
        if name == COUNTED:
            return sum(first[i] > self.due[i][0] or finish[i] > self.due[i][1] for i in first)
        if name == "mean_tpot":
            return sum(_pace(prob, i) * (finish[i] - first[i]) for i in first)

        return sum((finish if name == "tel" else first).values())

    def serve_one_by_one(self, requests: Iterable[int]) -> plans.Plan:
        """Return the batches of a plan that serves requests one after another."""
        prob, batches = self.prob, list[Batch]()
        for i in requests:
            batches.append(Batch(((i, prob.prompt[i]),)))
            batches += [Batch(((i, 1),))] * (prob.output[i] - 1)

        return batches

    def tree(self) -> dict[str, Any] | None:
        """Return the tree of a certificate of the bound, or None if the checker refuses costs."""
        from optsched.bounds.checker.labels import Units

        prob, tables, unit = self.prob, self.tables, self.prob.costs.unit_s
        # All requests are in one part, on one worker.
        order, model = list(range(prob.n)), cost_model_dict(prob.model)
        try:
            (_, part), *_ = parts_of(prob.instance, model, TICKS_PER_SECOND, [order])
        except Rejected:
            return None

        # (m, t, value): from t on the requests from m on alone need at least the value, in seconds.
        # The checker proves a claim from those of later requests, so these come first.
        claims = [
            (m, int(tables.moments[m, k]) * unit, int(tables.values[m, k]) * unit)
            for m in reversed(range(1, prob.n))
            for k in range(int(tables.known[m]))
        ]
        # The table has sums of completions already, and the bound is one of latencies.
        claims.append((0, Fraction(0), (self.bound + self._arrivals_from[0]) * unit))
        return labels_leaf(Units.of(part), [int(a) * unit for a in tables.arrival], claims)

    def _search(
        self, m: int, t: int, best: int, max_expanded: int | None, options: SolveOptions, end: float
    ) -> tuple[Search, str]:
        """Search for the requests from m on, from t on, below ``best``, until ``end``.

        Return the search, and why it ended.
        """
        search = Search(self, m, t, best)
        why = search.run(options, end, max_expanded)
        self.report(search)
        self.expanded += search.expanded
        return search, why

    def _raise(self, bound: int) -> None:
        """Raise the bound of all, up to the incumbent: nothing beyond is searched for."""
        self.bound = min(self.best, max(self.bound, bound))

    def _root_bound(self) -> int:
        """Return the bound of the begin, which uses what is known of those that arrive later.

        There, at time 0, nobody has begun, so all codes are 0. No bound is enough to stop (`NONE`).
        It is a level: arrivals are taken off.
        """
        core, row = self.core, np.zeros(self.prob.n, self.code_type)
        bound = core.bound_rest(row, 0, NONE, self.tables, core.new_sorts(len(row)))
        return int(bound) - self._arrivals_from[0]

    def report(self, search: Search) -> None:
        """Take over a search's bound, and its best value if it is for all, and report progress."""
        m = search.first
        bound_of_others = search.bound - self._arrivals_from[m]
        if m == 0 and search.goal >= 0:
            self.best = search.best - self._arrivals_from[0]

        # `bound_of_others` is of those from m on. Where the search begins at their own arrival, it
        # adds up with what those before m need, each alone.
        if search.begin == self.tables.arrival[m]:
            self._raise(self._alone_before[m] + bound_of_others)
        if self.progress is not None:
            has_plan = self.plan is not None or (m == 0 and search.goal >= 0)
            value = self.prob.value(self.name, self.best) if has_plan else None
            bound = self.prob.value(self.name, self.bound)
            self.progress(Progress(work_time() - self.begin, value, bound))


def _tables(prob: BatchProblem, order: list[int], due: list[tuple[int, int]]) -> Any:
    """Return the compiled search's view of a problem: `labels_kernel.Tables`.

    ``order`` has the requests by their places p there. ``due``: each request's last moments of its
    first and its last token. ``longest`` is the number of values k from 0 to the longest output.
    """
    from optsched.optimize.formulations.batches.labels_kernel import FINISHES, FIRSTS, PACES, Tables

    c, n, longest = prob.costs, prob.n, max(prob.output) + 1
    block, evicts = prob.instance.kv_block_tokens, not prob.eviction_free
    fixed_costs = c["base"], c["decode_base"], c["prefill_base"]
    kv, decode, prefill, tokens, calm = (np.zeros((n, longest), np.int64) for _ in range(5))
    decodes, shared = np.zeros((n, longest), np.int64), True
    work, fixed = (np.zeros((n, 2 * longest), np.int64) for _ in range(2))

    for p, i in enumerate(order):
        s, o = prob.prompt[i], prob.output[i]
        tokens[p, :o] = [s + k for k in range(o)]
        # After token k the prompt and k - 1 tokens are cached: the last one is not yet. The offset
        # is held on top, and in whole blocks.
        kv[p, 1 : o + 1] = [-(-(s + k - 1 + prob.offset) // block) * block for k in range(1, o + 1)]
        prefill[p, :o] = [c.prefill(s + k) for k in range(o)]
        decode[p, 1:o] = [c.decode(s + k - 1) for k in range(1, o)]
        decode_dearer = decode[p, 1:o] + c["decode_base"] > prefill[p, 1:o]
        # Sums from the last token back: the work of token k + 1 and all later ones.
        decodes[p, :o] = decode[p, o - 1 :: -1].cumsum()[::-1]
        # The bound by sharing counts a refill as a decode, so none may be cheaper.
        shared &= not (evicts and decode_dearer.any())
        # A refill in place may pay, by rule 2, where a decode alone is dearer, or if none may stand
        # beside prefills. Calm: neither the next token's may, nor that of a later one.
        refill_may_pay = evicts & (decode_dearer if prob.hybrid else np.ones_like(decode_dearer))
        calm[p, 1:o] = ~np.logical_or.accumulate(refill_may_pay[::-1])[::-1]
        calm[p, 0] = not refill_may_pay.any()
        _set_work_left(work[p], fixed[p], (decode[p, :o], prefill[p, :o]), fixed_costs, evicts)

    counted = COUNTS[prob.objectives[0]]
    # After its first token nothing of a request counts.
    if counted == FIRSTS:
        work[:, 1:], fixed[:, 1:] = 0, 0
        work[:, 0], fixed[:, 0] = prefill[:, 0], c["base"] + c["prefill_base"]

    rate = np.array([_pace(prob, i) * (counted == PACES) for i in order], np.int64)
    if counted == PACES:
        calm[:] = 0  # so that no state is quiet
        work, fixed = rate[:, None] * (work + fixed), np.zeros_like(fixed)
        for p, i in enumerate(order):
            # Until its first token no time counts, so what is left is what is left after it.
            # It is the code 3: one token, and held.
            work[p, 0] = work[p, 3] if prob.output[i] > 1 else 0

    weights, largest = _weights(prob, order, 2 * longest)
    shared &= counted == FINISHES
    # Equal requests have one kind: the place of the first of them.
    sizes = [(prob.arrival[i], prob.output[i], prob.prompt[i], due[i]) for i in order]
    limits = [prob.batch_tokens, prob.prefill_tokens, prob.capacity, prob.running]
    return Tables(
        arrival=np.array([prob.arrival[i] for i in order], np.int64),
        output=np.array([prob.output[i] for i in order], np.int64),
        kind=np.array([sizes.index(size) for size in sizes], np.int64),
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
        rules=np.array([*limits, *fixed_costs, prob.hybrid, evicts, shared, counted], np.int64),
        due=np.array([due[i] for i in order], np.int64),
        rate=rate,
        weights=weights,
        largest=largest,
    )


def _set_work_left(
    work: Any, fixed: Any, steps: tuple[Any, Any], fixed_costs: tuple[int, int, int], evicts: bool
) -> None:
    """Set a request's least own work and fixed costs still to come, by its code 2 k + held.

    ``steps``: the own work of token k + 1 by a decode and by a prefill. ``fixed_costs``: base,
    decode_base and prefill_base.
    """
    base, decode_base, prefill_base = fixed_costs
    output = len(steps[0])
    # From the last token back, since what is left at one includes what is left after it.
    for k in reversed(range(output)):
        after = 2 * (k + 1) + (k + 1 < output)
        decode, prefill = int(steps[0][k]), int(steps[1][k])
        work[2 * k] = prefill + work[after]
        fixed[2 * k] = base + prefill_base + fixed[after]
        # Nobody holds KV before the first token.
        if k == 0:
            continue

        # Where evictions are allowed, a refill may be cheaper than a decode, in its own work or in
        # its fixed cost: each is bounded alone.
        own_work, phase = decode, decode_base
        if evicts:
            own_work, phase = min(decode, prefill), min(decode_base, prefill_base)

        work[2 * k + 1] = own_work + work[after]
        fixed[2 * k + 1] = base + phase + fixed[after]


def _weights(prob: BatchProblem, order: list[int], codes: int) -> tuple[Any, Any]:
    """Return what the steps still to come weigh, and the largest weight of a batch.

    The first is by request, code (of so many ``codes``) and kind of weight; the second by kind,
    with `BY_KV` or `BY_INPUT`. There are no kinds for objectives other than the makespan.
    """
    from optsched.optimize.formulations.batches.labels_kernel import BY_INPUT, BY_KV

    kinds = [(weight, BY_KV) for weight in by_kv(prob)]
    kinds += [(weight, BY_INPUT) for weight in by_input(prob)]
    if prob.objectives[0] not in ENDS:
        kinds = []

    weights = np.zeros((prob.n, codes, len(kinds)), np.int64)
    for d, (weight, kind) in enumerate(kinds):
        for p, i in enumerate(order):
            s, o = prob.sizes[i]
            # Only who waits must prefill, and its first prefill alone is sure. Of KV each token
            # still to come weighs, held or not.
            if kind == BY_INPUT:
                weights[p, : 2 * o : 2, d] = [weight.of(s + k) for k in range(o)]
            else:
                later = np.cumsum([weight.of(z) for z in kv_sizes(prob, s, o)][::-1])[::-1]
                weights[p, : 2 * o, d] = np.repeat(later, 2)

    largest = np.array([(weight.largest, kind) for weight, kind in kinds], np.int64)
    return weights, largest.reshape(len(kinds), 2)


def _pace(prob: BatchProblem, i: int) -> int:
    """Return how often the time from a request's first token to its last counts."""
    return prob.rate("mean_tpot", prob.output[i], 1) if prob.output[i] > 1 else 0


def _without(plan: plans.Plan, requests: list[int]) -> plans.Plan:
    """Return a plan without some requests."""
    batches, evicted, removed = list[Batch](), list[int](), set(requests)
    for batch in plan:
        entries = tuple(entry for entry in batch.entries if entry[0] not in removed)
        # A batch that vanishes leaves its evictions to the next one.
        evicted += [i for i in batch.evicted if i not in removed]
        if entries:
            batches.append(Batch(entries, tuple(evicted)))
            evicted = []

    return batches


def _moments(prob: BatchProblem, plan: plans.Plan) -> tuple[dict[int, int], dict[int, int]]:
    """Return when requests of a plan have their first and last tokens, in the models' integers."""
    first, finish = dict[int, int](), dict[int, int]()
    for i, end in plans.token_ends(prob, plan, prob.costs, prob.arrival):
        first.setdefault(i, end)
        finish[i] = end

    return first, finish


def _due(prob: BatchProblem) -> list[tuple[int, int]]:
    """Return the last moments of each request's first and last token within its limits.

    Rounded arrivals may make a span a unit too long, so limits get a unit more (a relaxation).
    """
    if prob.objectives[0] != COUNTED:
        return [(NONE, NONE)] * prob.n

    rounding = int(prob.shrink > 1 or prob.costs.unit_s <= ARRIVAL_S)

    def last_moment(slo: str, i: int) -> int:
        """Return the last moment within one limit; `NONE` if there is none."""
        limit = prob.within(slo, i)
        if limit is None:
            return NONE
        return min(NONE, prob.arrival[i] + math.floor(limit / prob.shrink) + rounding)

    return [(last_moment("slo_ttft", i), last_moment("slo_latency", i)) for i in range(prob.n)]


_SUMMARY = "exact search over states, times and what is counted so far, with arrivals (labels)"
_FEATURES = MODELLED | WHOLE_BLOCKS
_LABELS = Method(
    _SUMMARY, solve_by_labels, tuple(COUNTS), SWITCHES, extras=EXTRAS, features=_FEATURES
)
METHODS = {"infermax": {"labels": _LABELS}}
