"""Independent check of the leaf ``labels``: a search for a schedule below what it claims.

*Claims.* The leaf claims that some number is below no schedule of the requests from the m-th on, in
order of arrival, alone, if the machine is free from t on. That number is the sum of completions, or
of first tokens, or the latest completion. The last claim is about all requests, from 0 on. Each is
refuted or proved by a search for a schedule below it, and bounds use the claims that are proved. A
schedule that begins d later ends each of its c requests at most d later, so for c requests
L(m, t) >= L(m, t + d) - c d; from the last arrival on only time passes, and both are equal.

*Labels.* A label has the tokens that each request has produced and whether its KV is held (its
state), the time t and the count S so far. V(state, t) is the least that is still to be counted. It
does not fall with t, since a schedule may wait, and rises by c d at most, if d is added to t, and c
requests are unfinished. Every batch produces a token. So labels are taken in order of tokens
produced, and all labels of a state are known before the first of them is left. A label (t', S') is
dropped if another of its state, (t, S), has S + c max(0, t - t') <= S', or if S' and a bound of V
reach the claim.

*Why the search finds what there is.* Let v be the least value of all schedules, below the claim.
Call a label live if S + V = v. The root is live. Take a live label that was kept, with the most
tokens. Below it is shown of some first batch of its best rests that a live label follows it, with
more tokens, in the same state as the one that it leads to or further. That one is kept, or another
of its state, which is live, too. So the label was complete. No chain of replacements is followed:
the kept label is in the state of the dropped one, so it has more tokens than the label before it.

*Which first batch.* A rest is the batches from (state, t) on, each as early as may be. Take the
rest of the least V, then the least sum of the times of all tokens, then the fewest evictions, then
the latest ones (by the number of their batches). For it:

1. Nothing is evicted that would still fit: it is put off by a batch, where it may precede a refill.
2. Nothing is refilled in place of a decode that is no dearer with decode_base, and may stand there:
   the decode leaves the same state, no later, and an eviction less.
3. In a *quiet* state, where all that are unfinished fit at their peaks, in one batch, also as
   prefills, and 2 excludes all refills in place, nothing is evicted, now and later (1). Tokens may
   be moved to earlier batches. So the machine does not wait for an arrival, if a request that is
   there has time for a batch of its own before: its next token moves there, and the batch that it
   leaves gets shorter. (For the latest completion this is not used.)

For the latest completion the rest of the least V, the fewest evictions and then the least sum of
the numbers of tokens' batches is taken in quiet states. By 4 a batch that decodes has all residents
then. For first tokens nothing decodes in a quiet state before all have begun: moved to the end, it
makes no first token later. Once all have begun a schedule is found in a quiet state, as that can be
served to its end. Others are searched on, since limits on tokens may forbid a refill.

*In quiet states, completions.*

4. A batch B decodes, without the resident i. Let i's decodes, of own works d, d + z, ...,
   d + (m - 1) z, be in the later batches b_1, ..., b_m. Move each to the one before, the first to
   B. B gets longer by d, the next ones by z each, and b_m shorter by all that. So nothing is later
   from the end of b_m on, and before nothing by more than w, the own work of i's last decode. And i
   ends earlier by base + decode_base. So for a live label at least u others end from then on before
   i, with u w >= base + decode_base. If there are no u others, or the bound of V with i behind the
   u-th end of others reaches the claim, i is *forced*: no live label has a best rest with such a B.
5. B prefills J alone, all of them were there when the batch before, A, began, in a quiet state, and
   nothing ended with A. Let J move to A.
   - A prefills, and B decodes: B is left with its decodes, no completion is later, the state is the
     same, and the end no later. A request of J with one token ends earlier, which is better, if
     base + decode_base > 0. A longer one, j, does not decode in B. The same requests end after A
     and before j as before, so if j is forced after A, 4 applies: neither was best.
   - A does not prefill: B comes before A instead, with the same end, and A is without j.
   - A prefills, and B does not decode: the same state is reached by A with J, no later, with S no
     larger. If 5 left that batch out, too, the same holds of the batch before A, and so on, to a
     batch that it does not leave out, at the root at the latest. So a label of that state, as good,
     was kept, and it is live if the one after B is.
   So B is left out if some j of J is forced. Equal requests change places in a state, which changes
   neither t nor S; who is forced is asked of the requests in the state's own order.

*Bounds.* With W the least own work of what a request still needs, and F the fixed costs of its
batches: the j-th completion is at least t plus the j least W plus the j-th least F, and at least
the j-th least of max(t, arrival) + W + F. For the latest completion, max(t, arrival) plus the W of
all that arrive from then on plus their largest F. Claims are added to those who arrive before.
While a batch is being made, what it does with some requests is known. It ends no earlier than with
these alone. The W of the others counts after that, wherever their next tokens stand, and their F
but for this batch.

*Chunks.* Let no limit on tokens be below what all requests may have as inputs at once, or the KV
capacity, and let no prefill of the largest size be less work in two chunks: (2 square - cross) c
(size - c) <= kv c + request for all c. Then move all chunks of a prefill to the batch of its last
one. Their work together does not rise, and is done no earlier, so no batch ends later, and less KV
is held before. So whole prefills are enough. Else the instance must forbid to split them.

*Integers.* Time is counted in units that divide a tick and all coefficients. An arrival less than a
quarter of a tick below a tick is rounded up to it, and what that may add is subtracted; others are
rounded down.
"""

from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from optsched.bounds.checker.labels_kernel import (
    COUNT,
    FIRSTS,
    FOUND,
    GROW,
    HELD,
    LAYER,
    PROVED,
    STEPS,
    Labels,
    Tables,
    enter_states,
    search_below,
)
from optsched.bounds.checker.parts import (
    Budget,
    Ints,
    Rejected,
    TooLarge,
    expect,
    expect_fields,
    integer,
    integers,
)
from optsched.bounds.checker.requests import Part, Rates

OBJECTIVES = ("tel", "makespan", "mean_ttft")
MAX_BITS = 60
"""Bits of the largest sum of two times, in units."""
MAX_LABELS, _ROOM = 2**23, 2**10
"""The max labels of a search, and how many labels arrays have space for at first."""
MAX_BYTES = 3 * 2**30
"""Max bytes of the labels of a search."""
_CLAIMS = 64
"""The max number of claims about the requests from any one on."""
# What stands for a limit that there is not, and compiled steps between two looks at the budget.
_NO_LIMIT = 2**40
_SLICE = 20_000_000


def check_labels(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return what a leaf proves, in ticks, rounded down.

    It has the ``value`` of all requests, and lists of further claims: from the request ``first`` on
    and the time ``begin`` at ``least`` so much, each after those that it needs.
    """
    known = objective in OBJECTIVES
    expect(known, f"labels: found the objective {objective!r}; expected {', '.join(OBJECTIVES)}")
    expect_fields(leaf, "labels", ("relaxation", "value", "first", "begin", "least"))
    n, limit, instance = len(part.arrival), 1 << MAX_BITS, part.machine[0]
    expect(n == instance.n, f"labels: found {n} requests; expected all {instance.n}")
    value = integer(leaf["value"], "labels: value")
    expect(0 <= value < limit, f"labels: value: found {value}; expected 0 to 2**{MAX_BITS} - 1")
    first = integers(leaf["first"], "labels: first", highest=n - 1)
    begin, least = (
        integers(leaf[name], f"labels: {name}", count=len(first), highest=limit - 1)
        for name in ("begin", "least")
    )
    most = max(map(first.count, set(first)), default=0)
    expect(most <= _CLAIMS, f"labels: found {most} claims from a request on; expected {_CLAIMS}")

    units = Units.of(part)
    right = instance.chunked_prefill is False or not units.chunks_matter()
    expect(right, "labels: found chunks that may be better; expected chunked_prefill = false")
    # Objectives are in the order of `Tables.counts`: completions, the latest, first tokens.
    tables = units.tables(OBJECTIVES.index(objective))

    # Each claim that is proved helps to prove those after it.
    for m, t, claim in zip(first, begin, least, strict=True):
        _prove(m, t, claim, tables, budget)
        tables.begin[m, tables.known[m]], tables.least[m, tables.known[m]] = t, claim
        tables.known[m] += 1

    # The last claim is about all requests, on a machine that is free from 0 on.
    _prove(0, 0, value, tables, budget)
    return units.ticks_of(value, objective)


class Units(NamedTuple):
    """A part in units of 1 / `per_second` s: arrivals, exact and as they are counted, and costs.

    Arrivals count from the first one and ascend.
    """

    part: Part
    per_second: int
    exact: list[Fraction]
    arrival: list[int]
    cost: dict[str, int]

    @classmethod
    def of(cls, part: Part) -> "Units":
        """Return the units of a part that has all requests of its instance."""
        instance, _ = part.machine
        rates: Rates = part.rates
        seconds = {name: Fraction(cost, rates.scale) for name, cost in rates.cost.items()}
        per_second = lcm(part.ticks, *(v.denominator for v in seconds.values()))
        units_per_tick = per_second // part.ticks
        release = sorted(Fraction(float(a)) for a in instance.release_times)
        ticks = [(a - release[0]) * part.ticks for a in release]
        # Down to a whole tick, but up if less than a quarter of a tick is missing (module's text).
        arrival = [units_per_tick * ((4 * a + 1) // 4) for a in ticks]
        cost = {name: int(v * per_second) for name, v in seconds.items()}
        return cls(part, per_second, [a * units_per_tick for a in ticks], arrival, cost)

    @property
    def max_delay(self) -> Fraction:
        """By how much an arrival is counted later than it is, at most."""
        return max(a - b for a, b in zip(self.arrival, self.exact, strict=True))

    def chunks_matter(self) -> bool:
        """Return whether a schedule that splits prefills may be better (module's text, Chunks)."""
        instance, c = self.part.machine[0], self.cost
        # The most that each may have to prefill, in a refill before its last token. ``tokens`` is
        # what all may have as inputs at once, or the KV capacity; ``size`` is the largest prefill.
        sizes = instance.prompt_tokens + instance.output_tokens - 1
        tokens, size = min(int(sizes.sum()), int(instance.kv_capacity)), int(sizes.max())
        limits = instance.limits.max_batch_tokens, instance.limits.max_prefill_tokens
        if any(limit is not None and limit < tokens for limit in limits):
            return True

        # What a prefill of the largest size saves as chunks of k and size - k tokens.
        squares = 2 * c["prefill_square"] - c["prefill_cross"]
        # Two chunks read the KV of the first one, and (below) are one more request of a batch.
        saved = (squares * k * (size - k) - c["prefill_kv"] * k for k in range(1, size))
        return squares > 0 and any(work > c["prefill_request"] for work in saved)

    def ticks_of(self, value: int, objective: str) -> int:
        """Return a count as an objective's value, in ticks, rounded down.

        What is counted are times since the first arrival: of one completion, or of n completions or
        first tokens, from which arrivals are subtracted.
        """
        if objective == "makespan":
            units = value - self.max_delay
        else:
            units = value - len(self.arrival) * self.max_delay - sum(self.exact)

        return int(units * self.part.ticks // self.per_second)

    def decode_work(self, cached: int) -> int:
        """Return the own work of a decode."""
        c = self.cost
        return c["token"] + c["decode_request"] + c["decode_kv"] * cached

    def prefill_work(self, tokens: int) -> int:
        """Return the own work of a whole prefill."""
        c = self.cost
        per_token = c["token"] + c["prefill_token"] + c["prefill_square"] * tokens
        return per_token * tokens + c["prefill_request"]

    def tables(self, counts: int) -> Tables:
        """Return what the compiled search reads; `counts` as in `Tables`."""
        instance, _ = self.part.machine
        n, base = len(self.arrival), self.cost["base"]
        decode_base, prefill_base = self.cost["decode_base"], self.cost["prefill_base"]
        order = sorted(range(n), key=lambda i: (instance.release_times[i], i))
        sizes = [(int(instance.prompt_tokens[i]), int(instance.output_tokens[i])) for i in order]
        # Sorted by size, too, equal requests lie side by side.
        rows = sorted(zip(self.arrival, sizes, strict=True))
        longest, hybrid = max(o for _, o in sizes) + 1, instance.hybrid_batching is not False
        offset, block = self.part.rates.offset, int(instance.kv_block_tokens)
        names = ["kv", "decode", "prefill", "tokens", "refills"]
        # Tables by request and tokens produced, k, but for kv, which is held after token k.
        by_k = {name: np.zeros((n, longest), np.int64) for name in names}
        latest_end = rows[-1][0]

        for i, (_, (s, o)) in enumerate(rows):  # s is the prompt, o the output
            # With every token prefilled and decoded, in a batch of its own, all is done by then. A
            # sum of n such times must fit.
            latest_end += sum(self.prefill_work(s + k) + self.decode_work(s + k) for k in range(o))
            latest_end += o * (base + decode_base + prefill_base)
            if latest_end * n >> MAX_BITS:
                raise TooLarge(f"labels: found a time beyond {MAX_BITS} bits; too large to check")

            for k in range(o):
                prefill, decode = self.prefill_work(s + k), self.decode_work(s + k - 1) if k else 0
                # Blocks after token k + 1, of which the KV is counted where ``offset`` is 1.
                blocks = -(-(s + k + offset) // block)
                by_k["kv"][i, k + 1], by_k["tokens"][i, k] = blocks * block, s + k
                by_k["prefill"][i, k], by_k["decode"][i, k] = prefill, decode
                # Else rule 2 excludes a refill in place of this decode.
                by_k["refills"][i, k] = k > 0 and (decode + decode_base > prefill or not hybrid)

            # Whether a refill in place may pay for this token or a later one.
            pays = by_k["refills"][i]
            pays[:] = np.maximum.accumulate(pays[::-1])[::-1]

        output = np.array([o for _, (_, o) in rows], np.int64)
        work, fixed = self._min_needs(output, by_k["prefill"], by_k["decode"], counts == FIRSTS)
        given = instance.limits
        # In the order of a batch's sums: `TOKENS`, `PROMPTS`, `HELD` and `RUNS`.
        limits = [given.max_batch_tokens, given.max_prefill_tokens, None, given.max_running]
        limits = [_NO_LIMIT if limit is None else int(limit) for limit in limits]
        limits[HELD] = int(instance.kv_capacity)
        return Tables(
            np.array([a for a, _ in rows], np.int64),
            output,
            # A kind is the number of the first of equal requests.
            np.array([rows.index(row) for row in rows], np.int64),
            **by_k,
            work=work,
            fixed=fixed,
            begin=np.zeros((n, _CLAIMS), np.int64),
            least=np.zeros((n, _CLAIMS), np.int64),
            known=np.zeros(n, np.int64),
            limits=np.array(limits, np.int64),
            base=base,
            decode_base=decode_base,
            prefill_base=prefill_base,
            hybrid=int(hybrid),
            counts=counts,
        )

    def _min_needs(self, output: Ints, prefill: Ints, decode: Ints, firsts: bool) -> list[Ints]:
        """Return the min own work and fixed costs that requests still need, by code 2 k + held.

        `prefill` and `decode` are own work by request and k. With `firsts` only first tokens count.
        """
        base, prefill_base = self.cost["base"], self.cost["prefill_base"]
        cheaper_base = base + min(self.cost["decode_base"], prefill_base)
        work, fixed = (np.zeros((len(output), 2 * prefill.shape[1]), np.int64) for _ in range(2))
        for i, o in enumerate(output.tolist()):
            for k in reversed(range(1 if firsts else o)):
                # The code after token k + 1: its KV is held if another one follows. Where only
                # first tokens count, nothing is needed then, and the tables have 0.
                after = 2 * (k + 1) + (k + 1 < o)
                work_after, fixed_after = int(work[i, after]), int(fixed[i, after])
                refill, step = int(prefill[i, k]), int(decode[i, k])
                work[i, 2 * k] = refill + work_after
                fixed[i, 2 * k] = base + prefill_base + fixed_after
                # What is held may be decoded, or evicted and prefilled again.
                if k > 0:
                    work[i, 2 * k + 1] = min(step, refill) + work_after
                    fixed[i, 2 * k + 1] = cheaper_base + fixed_after

        return [work, fixed]


def _prove(m: int, t: int, least: int, tables: Tables, budget: Budget) -> None:
    """Show that no schedule of the requests from m on, from t on, counts less than ``least``."""
    n = len(tables.arrival)
    labels = _new_labels(_ROOM, tables)
    # At the root all requests before m have completed: only the others count.
    labels.rows[0, :m] = 2 * tables.output[:m]
    labels.time[0], labels.before_began[0], labels.alive[0] = t, -1, 1
    # Their tokens are produced, so the search begins in the layer of so many.
    labels.counters[COUNT], layer = 1, int(tables.output[:m].sum())
    labels.counters[LAYER] = layer
    labels.head[layer] = 0
    while True:
        result = search_below(least, min(_SLICE, budget.compiled), labels, tables)
        budget.spend_compiled(int(labels.counters[STEPS]))
        labels.counters[STEPS] = 0
        if result == FOUND:
            raise Rejected(
                f"labels: found a schedule of the requests from {m} on, from {t} on, that counts "
                f"less than {least}; expected none"
            )
        if result == PROVED:
            return
        # After `PAUSE` the search just goes on, with what is left of the budget.
        if result == GROW:
            size = 2 * len(labels.time)
            # A label takes some 2 n + 60 bytes, with its slots.
            if size > MAX_LABELS or size * (2 * n + 60) > MAX_BYTES:
                raise TooLarge(f"labels: found more than {size // 2} labels; too large to check")

            labels = _new_labels(size, tables, labels)


def _new_labels(size: int, tables: Tables, old: Labels | None = None) -> Labels:
    """Return arrays with space for so many labels, and the old ones in them."""
    # Codes are 2 k + held, up to 2 output.
    codes = 2 * int(tables.output.max()) + 2
    code_type = np.uint16 if codes < 2**16 else np.uint32
    longs = [np.zeros(size, np.int64) for _ in range(3)]
    links = [np.full(size, -1, np.int32) for _ in range(2)]
    rows, alive = np.zeros((size, len(tables.arrival)), code_type), np.zeros(size, np.uint8)
    # A layer for each number of tokens produced, and 4 slots for each label that has space.
    head = np.full(int(tables.output.sum()) + 1, -1, np.int32)
    slots, count = np.full(4 * size, -1, np.int32), np.zeros(3, np.int64)
    # The longs are times, counts and when the batches before began; links are -1 for no next label.
    new = Labels._make([rows, *longs, *links, alive, head, slots, count])
    if old is not None:
        # The first seven columns are by label. States are looked up in a larger table.
        for column, old_column in zip(new[:7], old[:7], strict=True):
            column[: len(old_column)] = old_column

        new.head[:], new.counters[:] = old.head, old.counters
        enter_states(new, old.slots)

    return new
