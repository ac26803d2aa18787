"""Independent check of the leaf ``labels``: a search for a schedule below what it claims.

*Claims.* The leaf claims that some number is below no schedule of the requests from the m-th on, in
order of arrival, alone, if the machine is free from t on. That number is the sum of completions, or
of first tokens, or the latest completion. The last claim is about all requests, from 0 on. Each is
refuted or proved by a search for a schedule below it, and bounds use the claims that are proved. A
schedule that begins d later ends each of its c requests at most d later, so for c requests
L(m, t) >= L(m, t + d) - c d; from the last arrival on only time passes, and both are equal.

*Labels.* A label has the tokens that each request has produced and whether its KV is held (its
state), the time t and the count S so far. V(state, t) is the least that is still to be counted. It
does not fall with t, since a schedule may wait. Every batch produces a token. So labels are taken
in order of tokens produced, and all labels of a state are known before the first of them is left.
A label is dropped if another of its state has t and S no larger, or if S and a bound of V reach the
claim.

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
makes no first token later.

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

*Integers.* Time is counted in units that divide a tick and all coefficients. An arrival less than a
quarter of a tick below a tick is rounded up to it, and what that may add is subtracted; others are
rounded down. The proof is about schedules that do not split prefills, so the instance must forbid
it.
"""

from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np

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
from optsched.problem.kernel import njit

OBJECTIVES = ("tel", "makespan", "mean_ttft")
MAX_BITS = 60
"""Bits of the largest sum of two times, in units."""
MAX_LABELS, _ROOM = 2**23, 2**10
"""The most labels of a search, and the room for them at first."""
MAX_BYTES = 3 * 2**30
_CLAIMS = 64
"""The most claims about the requests from one on."""
_NO_LIMIT = 2**40
_SLICE = 20_000_000
_LATEST = 1
_FIRSTS = 2
NEVER = 2**62
PROVED, FOUND, PAUSE, GROW, GO_ON = range(5)
IDLE, DECODE, PREFILL, EVICT, REFILL = range(5)
# Sums of a batch: the first four have limits. Then own work, how many decode and prefill, who
# arrives as it begins, and of its prefills, who was there for the batch before, and is forced.
TOKENS, PROMPTS, HELD, RUNS, WORK, DECODES, PREFILLS, NEW, EARLY, FORCED, SUMS = range(11)
COUNT, LAYER, STEPS = range(3)


class Tables(NamedTuple):
    """Requests in order of arrival, equal ones side by side; by request and tokens produced k.

    `kv` is held after token k; `decode` and `prefill` are own work of token k + 1, `tokens` of its
    prefill, and `refills` says whether a later token may be refilled in place. By code, 2 k + held,
    `work` and `fixed` are the least that is needed. `begin` and `least` are the claims that are
    proved, so many as `known`.
    """

    arrival: Ints
    output: Ints
    kind: Ints
    kv: Ints
    decode: Ints
    prefill: Ints
    tokens: Ints
    refills: Ints
    work: Ints
    fixed: Ints
    begin: Ints
    least: Ints
    known: Ints
    limits: Ints
    base: int
    decode_base: int
    prefill_base: int
    hybrid: int
    counts: int


class Labels(NamedTuple):
    """By label: state, t, S, and when the batch before began if 5 looks at it, else -1.

    `other` is the next label of its state, `following` of its layer, the tokens produced.
    """

    rows: Ints
    time: Ints
    done: Ints
    since: Ints
    other: Ints
    following: Ints
    alive: Ints
    head: Ints
    slots: Ints
    number: Ints


class Scratch(NamedTuple):
    """The label at hand, and the batch in the making of the requests in `who`."""

    row: Ints
    child: Ints
    forced: Ints
    there: Ints
    who: Ints
    choices: Ints
    many: Ints
    take: Ints
    sums: Ints
    sorts: Ints


def check_labels(part: Part, leaf: dict[str, Any], objective: str, budget: Budget) -> int:
    """Return what a leaf proves, in ticks, rounded down.

    It has the ``value`` of all requests, and lists of further claims: from the request ``first`` on
    and the time ``begin`` at ``least`` so much, each after those that it needs.
    """
    known = objective in OBJECTIVES
    expect(known, f"labels: found the objective {objective!r}; expected {', '.join(OBJECTIVES)}")
    expect_fields(leaf, "labels", ("relaxation", "value", "first", "begin", "least"))
    n, most, instance = len(part.arrival), 1 << MAX_BITS, part.machine[0]
    expect(n == instance.n, f"labels: found {n} requests; expected all {instance.n}")
    whole = instance.chunked_prefill is False
    expect(whole, "labels: found prefills that may be split; expected chunked_prefill = false")
    value = integer(leaf["value"], "labels: value")
    expect(0 <= value < most, f"labels: value: found {value}; expected 0 to 2**{MAX_BITS} - 1")
    first = integers(leaf["first"], "labels: first", highest=n - 1) if leaf["first"] else []
    others = [
        integers(leaf[name], f"labels: {name}", count=len(first), highest=most - 1) if first else []
        for name in ("begin", "least")
    ]
    right = bool(first) or leaf["first"] == leaf["begin"] == leaf["least"] == []
    expect(right, "labels: found lists of other lengths; expected as many of each")
    many = max(map(first.count, set(first)), default=0)
    expect(many <= _CLAIMS, f"labels: found {many} claims from a request on; expected {_CLAIMS}")
    begun = Units.of(part)
    tables = begun.tables(OBJECTIVES.index(objective))

    for m, t, least in zip(first, *others, strict=True):
        _prove(m, t, least, tables, budget)
        tables.begin[m, tables.known[m]], tables.least[m, tables.known[m]] = t, least
        tables.known[m] += 1

    _prove(0, 0, value, tables, budget)
    return begun.ticks_of(value, objective)


class Units(NamedTuple):
    """A part in units of 1 / `per_second` s: arrivals, exact and as they are counted, and costs."""

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
        texts = {name: Fraction(cost, rates.scale) for name, cost in rates.cost.items()}
        read = [v for name, v in texts.items() if name not in ("prefill_cross", "prefill_kv")]
        per_second = lcm(part.ticks, *(v.denominator for v in read))
        tick = per_second // part.ticks
        given = sorted(Fraction(float(a)) for a in instance.release_times)
        exact = [(a - given[0]) * part.ticks for a in given]
        arrival = [tick * ((4 * a + 1) // 4) for a in exact]
        cost = {name: int(v * per_second) for name, v in texts.items()}
        return cls(part, per_second, [a * tick for a in exact], arrival, cost)

    @property
    def later(self) -> Fraction:
        """By how much an arrival is counted later than it is, at most."""
        return max(a - b for a, b in zip(self.arrival, self.exact, strict=True))

    def ticks_of(self, value: int, objective: str) -> int:
        """Return a count as an objective's value, in ticks, rounded down."""
        n = len(self.arrival)
        if objective == "makespan":
            found = value - self.later
        else:
            found = value - n * self.later - sum(self.exact)

        return int(found * self.part.ticks // self.per_second)

    def own(self, cached: int) -> int:
        """Return the own work of a decode."""
        c = self.cost
        return c["token"] + c["decode_request"] + c["decode_kv"] * cached

    def whole(self, tokens: int) -> int:
        """Return the own work of a prefill."""
        c = self.cost
        each = c["token"] + c["prefill_token"] + c["prefill_square"] * tokens
        return each * tokens + c["prefill_request"]

    def tables(self, counts: int) -> Tables:
        """Return the compiled search's view."""
        instance, _ = self.part.machine
        n, base = len(self.arrival), self.cost["base"]
        decode_base, prefill_base = self.cost["decode_base"], self.cost["prefill_base"]
        order = sorted(range(n), key=lambda i: (instance.release_times[i], i))
        sizes = [(int(instance.prompt_tokens[i]), int(instance.output_tokens[i])) for i in order]
        rows = sorted(zip(self.arrival, sizes, strict=True))
        longest, hybrid = max(o for _, o in sizes) + 1, instance.hybrid_batching is not False
        offset, block = self.part.rates.offset, int(instance.kv_block_tokens)
        names = ["kv", "decode", "prefill", "tokens", "refills"]
        by_k = {name: np.zeros((n, longest), np.int64) for name in names}
        work, fixed = (np.zeros((n, 2 * longest), np.int64) for _ in range(2))
        largest = rows[-1][0]

        for i, (_, (s, o)) in enumerate(rows):
            largest += sum(self.whole(s + k) + self.own(s + k) for k in range(o))
            largest += o * (base + decode_base + prefill_base)
            expect_small(largest * n)
            for k in range(o):
                dear, own = self.whole(s + k), self.own(s + k - 1) if k else 0
                held = -(-(s + k + offset) // block) * block
                by_k["kv"][i, k + 1], by_k["tokens"][i, k] = held, s + k
                by_k["prefill"][i, k], by_k["decode"][i, k] = dear, own
                by_k["refills"][i, k] = k > 0 and (own + decode_base > dear or not hybrid)

            pays = by_k["refills"][i]
            pays[:] = np.maximum.accumulate(pays[::-1])[::-1]
            for k in reversed(range(o)):
                after = 2 * (k + 1) + (k + 1 < o)
                dear, own = int(by_k["prefill"][i, k]), int(by_k["decode"][i, k])
                rest, alone = int(work[i, after]), int(fixed[i, after])
                if counts == _FIRSTS and k > 0:
                    continue

                work[i, 2 * k], fixed[i, 2 * k] = dear + rest, base + prefill_base + alone
                if k > 0:
                    cheap = base + min(decode_base, prefill_base)
                    work[i, 2 * k + 1], fixed[i, 2 * k + 1] = min(own, dear) + rest, cheap + alone

        given = instance.limits
        limits = [given.max_batch_tokens, given.max_prefill_tokens, None, given.max_running]
        limits = [_NO_LIMIT if one is None else int(one) for one in limits]
        limits[HELD] = int(instance.kv_capacity)
        return Tables(
            np.array([a for a, _ in rows], np.int64),
            np.array([o for _, (_, o) in rows], np.int64),
            np.array([rows.index(one) for one in rows], np.int64),
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


def expect_small(number: int) -> None:
    """Raise TooLarge unless a number has so many bits at most that sums of a few fit."""
    if number >> MAX_BITS:
        raise TooLarge(f"labels: found a time beyond {MAX_BITS} bits; too large to check")


def _prove(m: int, t: int, least: int, tables: Tables, budget: Budget) -> None:
    """Show that nothing is below a claim about the requests from m on, from t on."""
    n = len(tables.arrival)
    labels = _new_labels(_ROOM, tables)
    labels.rows[0, :m] = 2 * tables.output[:m]
    labels.time[0], labels.since[0], labels.alive[0] = t, -1, 1
    labels.number[COUNT], layer = 1, int(tables.output[:m].sum())
    labels.number[LAYER] = layer
    labels.head[layer] = 0
    while True:
        ended = go_on(least, min(_SLICE, budget.compiled), labels, tables)
        budget.spend_compiled(int(labels.number[STEPS]))
        labels.number[STEPS] = 0
        if ended == FOUND:
            raise Rejected(
                f"labels: found a schedule of the requests from {m} on, from {t} on, that counts "
                f"less than {least}; expected none"
            )
        if ended == PROVED:
            return
        if ended == GROW:
            size = 2 * len(labels.time)
            if size > MAX_LABELS or size * (2 * n + 60) > MAX_BYTES:
                raise TooLarge(f"labels: found more than {size // 2} labels; too large to check")

            labels = _new_labels(size, tables, labels)


def _new_labels(size: int, tables: Tables, old: Labels | None = None) -> Labels:
    """Return room for so many labels, with the old ones."""
    codes = 2 * int(tables.output.max()) + 2
    kind = np.uint16 if codes < 2**16 else np.uint32
    longs = [np.zeros(size, np.int64) for _ in range(3)]
    links = [np.full(size, -1, np.int32) for _ in range(2)]
    rows, alive = np.zeros((size, len(tables.arrival)), kind), np.zeros(size, np.uint8)
    head = np.full(int(tables.output.sum()) + 1, -1, np.int32)
    slots, number = np.full(4 * size, -1, np.int32), np.zeros(3, np.int64)
    new = Labels._make([rows, *longs, *links, alive, head, slots, number])
    if old is not None:
        for a, b in zip(new[:7], old[:7], strict=True):
            a[: len(b)] = b

        new.head[:], new.number[:] = old.head, old.number
        fill(new, old.slots)

    return new


# Compiled


@njit
def _slot(row: Ints, labels: Labels) -> Any:
    """Return the place of a state among the slots, or the empty one for it."""
    code = np.uint64(88172645463325252)
    for i in range(row.shape[0]):
        code = (code + np.uint64(row[i]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        code ^= code >> np.uint64(31)

    mask = np.uint64(labels.slots.shape[0] - 1)
    at = code & mask
    while labels.slots[at] >= 0:
        known, same = labels.slots[at], True
        for i in range(row.shape[0]):
            if labels.rows[known, i] != row[i]:
                same = False
                break
        if same:
            break

        at = (at + np.uint64(1)) & mask

    return at


@njit
def fill(labels: Labels, slots: Ints) -> None:
    """Enter the states of smaller slots, each with its first label."""
    for at in range(slots.shape[0]):
        if slots[at] >= 0:
            labels.slots[_slot(labels.rows[slots[at]], labels)] = slots[at]


@njit
def _insert(values: Ints, size: int, value: int) -> None:
    at = size
    while at > 0 and values[at - 1] > value:
        values[at] = values[at - 1]
        at -= 1

    values[at] = value


@njit
def _completions(t: int, size: int, sorts: Ints) -> Any:
    """Return a bound on the sum of so many completions, from ends alone, works and fixed costs."""
    total, now = np.int64(0), np.int64(t)
    for j in range(size):
        now += sorts[1, j]
        total += max(sorts[0, j], now + sorts[2, j])

    return total


@njit
def _claimed(m: int, t: int, tables: Tables) -> Any:
    """Return what the claims prove of the requests from m on, from t on."""
    n, best, t = tables.arrival.shape[0], np.int64(0), max(t, tables.arrival[m])
    many = 1 if tables.counts == _LATEST else n - m
    for k in range(tables.known[m]):
        value, begin = tables.least[m, k], tables.begin[m, k]
        if begin > t:
            value -= many * (begin - t)
        elif begin >= tables.arrival[n - 1]:
            value += many * (t - begin)

        best = max(best, value)

    return best


@njit
def _last_end(row: Ints, t: int, tables: Tables) -> Any:
    best, work, fixed, n = np.int64(t), np.int64(0), np.int64(0), row.shape[0]
    fresh = True
    for i in range(n - 1, -1, -1):
        fresh &= row[i] == 0
        if row[i] < 2 * tables.output[i]:
            work += tables.work[i, row[i]]
            fixed = max(fixed, tables.fixed[i, row[i]])
            best = max(best, max(t, tables.arrival[i]) + work + fixed)
        if fresh:
            best = max(best, _claimed(i, t, tables))

    return best


@njit
def _bound(
    row: Ints, t: int, enough: int, tables: Tables, sorts: Ints, late: int = -1, until: int = 0
) -> Any:
    """Return a bound on what is still to be counted; one of ``enough`` is as good as any.

    The request ``late`` does not end before ``until``.
    """
    n, size, best = row.shape[0], 0, np.int64(0)
    if tables.counts == _LATEST:
        return _last_end(row, t, tables)

    fresh = n
    while fresh > 0 and row[fresh - 1] == 0:
        fresh -= 1
    for i in range(n):
        if i >= fresh and tables.known[i] > 0:
            best = max(best, _completions(t, size, sorts) + _claimed(i, t, tables))
            if best >= enough:
                return best

        code = np.int64(row[i])
        if code == 2 * tables.output[i] or (tables.counts == _FIRSTS and code > 0):
            continue

        work, fixed = tables.work[i, code], tables.fixed[i, code]
        end = max(t, tables.arrival[i]) + work + fixed
        _insert(sorts[0], size, max(end, until) if i == late else end)
        _insert(sorts[1], size, work)
        _insert(sorts[2], size, fixed)
        size += 1

    return max(best, _completions(t, size, sorts))


@njit
def _is_forced(i: int, row: Ints, t: int, room: int, tables: Tables, sorts: Ints) -> bool:
    """Whether 4 forces a request that is there: ``room`` is what the claim leaves."""
    output, arrival = tables.output, tables.arrival
    if row[i] == 2 * output[i] or arrival[i] > t:
        return False
    if tables.counts == _LATEST:
        return True

    saved, here, later = tables.base + tables.decode_base, 0, 0
    for j in range(row.shape[0]):
        if j == i or row[j] == 2 * output[j]:
            continue
        if arrival[j] <= t:
            here += 1
        else:
            end = arrival[j] + tables.work[j, row[j]] + tables.fixed[j, row[j]]
            _insert(sorts[3], later, end)
            later += 1

    others = -(-saved // max(1, tables.decode[i, output[i] - 1]))
    if here + later < others:
        return True
    if here >= others:
        return False

    return _bound(row, t, room, tables, sorts, i, sorts[3, others - here - 1]) >= room


@njit
def _is_quiet(row: Ints, tables: Tables) -> tuple[bool, bool]:
    """Return whether a state is quiet, and whether all peaks fit."""
    held, runs, tokens, calm = np.int64(0), 0, np.int64(0), True
    for i in range(row.shape[0]):
        if row[i] < 2 * tables.output[i]:
            k = row[i] >> 1
            held += tables.kv[i, tables.output[i]]
            runs += 1
            tokens += 1 if row[i] & 1 else tables.tokens[i, k]
            calm &= tables.refills[i, k] == 0

    fits = held <= tables.limits[HELD] and runs <= tables.limits[RUNS]
    in_one = tokens <= tables.limits[TOKENS] and tokens <= tables.limits[PROMPTS]
    return fits and in_one and calm, fits


@njit
def _add(d: int, act: int, start: int, tables: Tables, s: Scratch) -> bool:
    """Set the sums after request d of `who`. Return whether the batch is within the limits."""
    sums, i = s.sums, s.who[d]
    k, held = s.row[i] >> 1, s.row[i] & 1
    for q in range(SUMS):
        sums[d + 1, q] = sums[d, q]

    after = sums[d + 1]
    if act == DECODE:
        after[TOKENS] += 1
        after[WORK] += tables.decode[i, k]
        after[DECODES] += 1
    elif act in (PREFILL, REFILL):
        after[TOKENS] += tables.tokens[i, k]
        after[PROMPTS] += tables.tokens[i, k]
        after[WORK] += tables.prefill[i, k]
        after[PREFILLS] += 1
        after[EARLY] += s.there[i]
        after[FORCED] += s.there[i] * s.forced[i]
    if act == IDLE and held:
        after[HELD] += tables.kv[i, k]
        after[RUNS] += 1
    elif act != IDLE and act != EVICT:
        after[HELD] += tables.kv[i, k + 1]
        after[RUNS] += 1
        after[NEW] += tables.arrival[i] == start

    for q in range(4):
        if after[q] > tables.limits[q]:
            return False

    return tables.hybrid == 1 or after[DECODES] == 0 or after[PREFILLS] == 0


@njit
def _is_left_out(size: int, tables: Tables, s: Scratch) -> bool:
    """Whether 1 or 5 leave a batch out."""
    sums = s.sums[size]
    if sums[PREFILLS] > 0 and sums[PREFILLS] == sums[EARLY] and sums[FORCED] > 0:
        return True

    for d in range(size):
        i = s.who[d]
        if s.choices[d, s.take[d]] == EVICT:
            fits = sums[HELD] + tables.kv[i, s.row[i] >> 1] <= tables.limits[HELD]
            if fits and sums[RUNS] < tables.limits[RUNS]:
                return True

    return False


@njit
def _offer(size: int, decodes: bool, quiet: bool, fits: bool, tables: Tables, s: Scratch) -> None:
    """Write what may be done with each request. In quiet states batches decode, or they do not."""
    for d in range(size):
        i = s.who[d]
        k, many = s.row[i] >> 1, 2
        if s.row[i] & 1 == 0:
            s.choices[d, 0], s.choices[d, 1] = PREFILL, IDLE
        elif quiet and not decodes:
            s.choices[d, 0], many = IDLE, 1
        else:
            s.choices[d, 0], s.choices[d, 1] = DECODE, IDLE
            if quiet and s.forced[i]:
                many = 1
            if not quiet and not fits:
                s.choices[d, many] = EVICT
                many += 1

            dearer = tables.decode[i, k] + tables.decode_base > tables.prefill[i, k]
            if not quiet and (dearer or tables.hybrid == 0):
                s.choices[d, many] = REFILL
                many += 1

        s.many[d] = many


@njit
def _order(row: Ints, kind: Ints) -> None:
    """Put the codes of equal requests in order, the most advanced first."""
    for i in range(1, row.shape[0]):
        at = i
        while at > 0 and kind[at - 1] == kind[at] and row[at - 1] < row[at]:
            row[at - 1], row[at] = row[at], row[at - 1]
            at -= 1


@njit
def _only_decodes(since: int, t: int, room: int, tables: Tables, row: Ints, sorts: Ints) -> bool:
    """Whether 3 to 5 leave only a batch that decodes all residents, in a quiet state."""
    held, next_one, least = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(row.shape[0]):
        if row[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > t:
            next_one = min(next_one, tables.arrival[i])
        elif row[i] & 1:
            held += 1
            least = min(least, tables.decode[i, row[i] >> 1])
        elif tables.arrival[i] > since:
            return False

    if held == 0 or t + tables.base + tables.decode_base + least > next_one:
        return False

    for i in range(row.shape[0]):
        there = row[i] < 2 * tables.output[i] and tables.arrival[i] <= t
        if there and not _is_forced(i, row, t, room, tables, sorts):
            return False

    return True


@njit
def _enter(end: int, done: int, since: int, labels: Labels, child: Ints) -> int:
    """Keep a label unless another of its state is as good; drop those that it is as good as."""
    number, at = labels.number, _slot(child, labels)
    known = labels.slots[at]
    while known >= 0:
        number[STEPS] += 1
        if labels.time[known] <= end and labels.done[known] <= done:
            return GO_ON
        if end <= labels.time[known] and done <= labels.done[known]:
            labels.alive[known] = 0

        known = labels.other[known]

    new, layer = number[COUNT], 0
    if new == labels.time.shape[0]:
        return GROW

    number[COUNT] += 1
    for i in range(child.shape[0]):
        labels.rows[new, i] = child[i]
        layer += child[i] >> 1

    labels.time[new], labels.done[new], labels.since[new] = end, done, since
    labels.other[new], labels.slots[at], labels.alive[new] = labels.slots[at], new, 1
    labels.following[new], labels.head[layer] = labels.head[layer], new
    return GO_ON


@njit
def _follow(
    at: int,
    size: int,
    start: int,
    quiet: bool,
    cut: int,
    labels: Labels,
    tables: Tables,
    s: Scratch,
) -> int:
    """Follow the batch in the making, and the batches that are the only ones after it."""
    child, sums, sums_up = s.child, s.sums[size], tables.counts != _LATEST
    end, ended, done = start + tables.base + sums[WORK], 0, labels.done[at]
    end += tables.decode_base * (sums[DECODES] > 0) + tables.prefill_base * (sums[PREFILLS] > 0)
    child[:] = s.row
    for d in range(size):
        i, act = s.who[d], s.choices[d, s.take[d]]
        if act == EVICT:
            child[i] = s.row[i] & ~1
        elif act != IDLE:
            k = (s.row[i] >> 1) + 1
            child[i] = 2 * k + (k < tables.output[i])
            ended += k == 1 if tables.counts == _FIRSTS else k == tables.output[i]

    done += ended * end if sums_up else 0
    _order(child, tables.kind)
    follows = quiet and tables.counts == 0
    since = np.int64(start) if follows and ended == 0 else np.int64(-1)
    while follows and _only_decodes(since, end, cut - done, tables, child, s.sorts):
        since, ended = end, 0
        end += tables.base + tables.decode_base
        for i in range(child.shape[0]):
            if child[i] & 1:
                k = (child[i] >> 1) + 1
                end += tables.decode[i, k - 1]
                child[i] = 2 * k + (k < tables.output[i])
                ended += k == tables.output[i]

        done += ended * end
        since = np.int64(-1) if ended else since
        labels.number[STEPS] += child.shape[0]

    labels.number[STEPS] += child.shape[0]
    left = False
    for i in range(child.shape[0]):
        left |= child[i] == 0 if tables.counts == _FIRSTS else child[i] < 2 * tables.output[i]
    if not left:
        return FOUND if (done if sums_up else end) < cut else GO_ON
    if done + _bound(child, end, cut - done, tables, s.sorts) >= cut:
        return GO_ON

    return _enter(end, done, since, labels, child)


@njit
def _begin(start: int, t: int, tables: Tables, s: Scratch) -> tuple[Any, Any, Any]:
    """Write who is there at a start, and return their number and the next arrival.

    Return the first end of a batch of one, too, of a first token if these count.
    """
    size, after, first_end = 0, np.int64(NEVER), np.int64(NEVER)
    for i in range(tables.arrival.shape[0]):
        if s.row[i] == 2 * tables.output[i]:
            continue
        if tables.arrival[i] > start:
            after = min(after, tables.arrival[i])
            continue

        s.who[size] = i
        size += 1
        k = s.row[i] >> 1
        alone = tables.prefill[i, k] + tables.prefill_base
        if s.row[i] & 1:
            alone = tables.decode[i, k] + tables.decode_base
        if k == 0 or tables.counts != _FIRSTS:
            first_end = min(first_end, max(t, tables.arrival[i]) + tables.base + alone)

    return size, after, first_end


@njit
def _expand(at: int, cut: int, labels: Labels, tables: Tables, s: Scratch) -> int:
    """Follow all batches from a label on. Return GO_ON, or what ends the search."""
    t, n, take = labels.time[at], s.row.shape[0], s.take
    s.row[:] = labels.rows[at]
    if at == 0 and _bound(s.row, t, cut, tables, s.sorts) >= cut:
        return GO_ON

    quiet, fits = _is_quiet(s.row, tables)
    for i in range(n):
        s.there[i] = tables.arrival[i] <= labels.since[at]
        s.forced[i] = 0
        if quiet and tables.counts != _FIRSTS:
            room = cut - labels.done[at]
            s.forced[i] = _is_forced(i, s.row, t, room, tables, s.sorts)

    start, modes = t, 1 + (quiet and tables.counts != _FIRSTS)
    while True:
        size, after, first_end = _begin(start, t, tables, s)
        for mode in range(modes if size else 0):
            _offer(size, mode == 1, quiet, fits, tables, s)
            d, take[0] = 0, -1
            while d >= 0:
                if take[d] < 0 and d > 0:  # equal requests: what comes first goes first
                    i, j = s.who[d - 1], s.who[d]
                    if tables.kind[i] == tables.kind[j] and s.row[i] == s.row[j]:
                        take[d] = take[d - 1] - 1

                take[d] += 1
                if take[d] >= s.many[d]:
                    d -= 1
                    continue

                labels.number[STEPS] += 1
                if not _add(d, s.choices[d, take[d]], start, tables, s):
                    continue
                if d + 1 < size:
                    d += 1
                    take[d] = -1
                    continue

                sums = s.sums[size]
                if sums[TOKENS] == 0 or (start > t and sums[NEW] == 0):
                    continue
                if (mode == 1 and sums[DECODES] == 0) or _is_left_out(size, tables, s):
                    continue

                ended = _follow(at, size, start, quiet, cut, labels, tables, s)
                if ended != GO_ON:
                    return ended

        if after == NEVER or (quiet and tables.counts != _LATEST and first_end <= after):
            return GO_ON

        start = after


@njit
def go_on(cut: int, limit: int, labels: Labels, tables: Tables) -> int:
    """Search below a claim, from the label where it was left, for so many steps.

    A label that found no room for those after it begins again; what it has made is there already.
    """
    n, number = tables.arrival.shape[0], labels.number
    s = Scratch(
        labels.rows[0].copy(),
        labels.rows[0].copy(),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, 4), np.int64),
        np.zeros(n, np.int64),
        np.zeros(n + 1, np.int64),
        np.zeros((n + 1, SUMS), np.int64),
        np.zeros((4, n + 1), np.int64),
    )
    while number[LAYER] < labels.head.shape[0]:
        at = labels.head[number[LAYER]]
        if at < 0:
            number[LAYER] += 1
            continue
        if number[STEPS] > limit:
            return PAUSE
        if labels.alive[at]:
            ended = _expand(at, cut, labels, tables, s)
            if ended != GO_ON:
                return ended

        labels.head[number[LAYER]] = labels.following[at]

    return PROVED
