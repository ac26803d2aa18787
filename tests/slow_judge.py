"""A judge in plain Python, written from the definitions, and random cases to hold it against.

It shares no code with the package's judge, and collects every rule that the
first bad batch breaks (of a schedule of starts: that any round breaks), so that a faster judge
may check them in another order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random

import numpy as np

from optsched.costs.cost import BatchCost
from optsched.costs.fleet import Fleet
from optsched.costs.machine import Link, Machine
from optsched.problem.instance import Instance, Limits
from optsched.problem.schedule import Schedule, from_batches

TOLERANCE = Fraction(1, 10**9)
"""Slack of comparisons between times in seconds; rounds are exact."""


@dataclass
class Verdict:
    """What the slow judge found; times are exact."""

    broken: dict[str, list[tuple[int | None, int | None]]] = field(default_factory=dict)
    finish: list = field(default_factory=list)
    first_token: list = field(default_factory=list)
    gap: list = field(default_factory=list)  # between two tokens; None for a single token
    served: list = field(default_factory=list)  # time of all batches of each request
    kv: dict[int, int] = field(default_factory=dict)  # after each batch, or in each busy round

    @property
    def rule(self) -> str | None:
        return next(iter(self.broken), None)

    def breaks(self, rule: str, batch: int | None, request: int | None = None) -> None:
        self.broken.setdefault(rule, []).append((batch, request))


def slow_judge(
    instance,
    schedule,
    *,
    layers: int | None = None,
    coefficients: Mapping[str, str] | None = None,
    pools=None,
) -> Verdict:
    """Judge a schedule; an instance in seconds needs the cost model's layers and coefficients.

    `pools`: equal machines with roles, each with the instance's KV capacity and limits.
    """
    if schedule.kind == "starts":
        return _judge_rounds(instance, [int(k) for k in schedule.starts])
    return _judge_batches(instance, schedule, layers, coefficients, pools)


def _in_blocks(tokens: int, instance) -> int:
    """Count blocks one by one until the tokens fit in; those of windows layer by layer."""
    if instance.kv_window is not None:
        window, sliding, layers = instance.kv_window
        held = sum(min(tokens, window) if k < sliding else tokens for k in range(layers))
        tokens = math.ceil(Fraction(held, layers))
    blocks = 0
    while blocks * instance.kv_block_tokens < tokens:
        blocks += 1
    return blocks * instance.kv_block_tokens


def _judge_rounds(instance, starts: list[int]) -> Verdict:
    """Walk through every round of every request."""
    verdict = Verdict()
    newest = {"generated": 1, "cached": 0}[instance.kv_accounting]
    prompts, outputs = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    kv: dict[int, int] = defaultdict(int)
    running: dict[int, int] = defaultdict(int)
    prefills: dict[int, int] = defaultdict(int)
    prefill_tokens: dict[int, int] = defaultdict(int)
    ends = [k + o for k, o in zip(starts, outputs, strict=True)]
    for i, k in enumerate(starts):
        arrival = int(instance.arrival[i])
        if instance.after is not None and instance.after[i]:
            arrival = max(ends[j] for j in instance.after[i]) + int(instance.delay[i])
        if k < arrival:
            verdict.breaks("arrival", None, i)
        for j in range(1, outputs[i] + 1):  # produces its j-th token in round k + j
            kv[k + j] += _in_blocks(prompts[i] + j - 1 + newest, instance)
            running[k + j] += 1
        prefills[k + 1] += 1
        prefill_tokens[k + 1] += prompts[i]
    limits = instance.limits
    for t in sorted(kv):
        decodes = running[t] - prefills[t]
        if kv[t] > instance.kv_capacity:
            verdict.breaks("kv_capacity", t)
        for rule, used, limit in (
            ("max_running", running[t], limits.max_running),
            ("max_batch_tokens", decodes + prefill_tokens[t], limits.max_batch_tokens),
            ("max_prefill_tokens", prefill_tokens[t], limits.max_prefill_tokens),
        ):
            if limit is not None and used > limit:
                verdict.breaks(rule, t)
        if instance.hybrid_batching is False and prefills[t] and decodes:
            verdict.breaks("hybrid_batching", t)
    verdict.finish = [k + o for k, o in zip(starts, outputs, strict=True)]
    verdict.first_token = [k + 1 for k in starts]
    verdict.gap = [1 if o > 1 else None for o in outputs]
    verdict.kv = dict(kv)
    return verdict


@dataclass
class _Request:
    arrival: Fraction | None  # None: not all that it comes after have ended
    prompt: int
    output: int
    cached: int = 0
    generated: int = 0
    worker: int | None = None  # that holds its KV
    free_at: Fraction = Fraction(0)
    first_token: Fraction | None = None
    tokens: list[Fraction] = field(default_factory=list)  # when each was produced
    finish: Fraction | None = None
    served: Fraction = Fraction(0)
    lands: Fraction = Fraction(0)  # when its latest move is over
    held_on: list = field(default_factory=list)  # (worker, KV, until): left behind by moves
    handed: bool = False
    slots: int = 0  # whose KV it has room for: those of its latest step

    @property
    def input(self) -> int:
        """Tokens to cache before it can produce its next one by decoding: prompt and produced."""
        return self.prompt + self.generated


def _judge_batches(instance, schedule, layers, coefficients, pools=None) -> Verdict:
    verdict = Verdict()
    rounds = instance.time_unit == "round"
    slack = Fraction(0) if rounds else TOLERANCE
    requests = {
        i: _Request(Fraction(float(a)), s, o)
        for i, (a, s, o) in enumerate(
            zip(
                instance.arrival.tolist(),
                instance.prompt_tokens.tolist(),
                instance.output_tokens.tolist(),
                strict=True,
            )
        )
    }
    after = instance.after or ((),) * instance.n
    for i, before in enumerate(after):
        if before:
            requests[i].arrival = None
    newest = {"generated": 1, "cached": 0}[instance.kv_accounting]
    limits = instance.limits
    block, sequences = _block_of(instance), sequences_of(instance)
    held_names: dict[int, list[set]] = defaultdict(list)  # after each batch of a worker
    retained: dict[int, set] = defaultdict(set)  # in each batch
    batches_of: dict[int, list[int]] = defaultdict(list)
    reused = [0] * len(schedule.request) if schedule.reused is None else schedule.reused.tolist()
    free: dict[int, Fraction] = defaultdict(Fraction)  # when each worker is free
    decode_phase: set[int] = set()
    shown: dict[int, list[tuple]] = defaultdict(list)  # starts and KV of moves to each worker
    spans: dict[int, list[list]] = defaultdict(list)  # start, end and KV of each worker's batches
    for j in range(len(schedule.batch_offsets) - 1):
        worker = 0 if schedule.worker is None else int(schedule.worker[j])
        if worker < 0 or (pools is not None and worker >= len(pools.machines)):
            verdict.breaks("worker", j)
            if worker >= 0:
                return verdict
        low, high = schedule.batch_offsets[j : j + 2]
        entries = [
            (int(i), int(c))
            for i, c in zip(schedule.request[low:high], schedule.tokens[low:high], strict=True)
        ]
        claims = dict(zip((i for i, _ in entries), reused[low:high], strict=True))
        low, high = schedule.evicted_offsets[j : j + 2]
        evicted = [int(i) for i in schedule.evicted[low:high]]

        if schedule.moved is not None:
            moves = range(*map(int, schedule.moved_offsets[j : j + 2]))
            for p in moves:
                _move(verdict, instance, schedule, pools, (j, p), requests, shown, spans)
                if verdict.broken:
                    return verdict
                if requests[int(schedule.moved[p])].generated == 0:
                    decode_phase.discard(int(schedule.moved[p]))
        arrivals = [requests[i].arrival for i, _ in entries if i in requests]
        if None in arrivals:
            verdict.breaks("after", j, entries[arrivals.index(None)][0])
            return verdict
        role = "mixed" if pools is None else pools.machines[worker].role
        moved = [requests[i].lands for i, _ in entries if i in requests]
        began = [at for at, _ in shown[worker][-1:]]
        start = max([free[worker], *arrivals, *moved, *began])
        if schedule.start is not None:
            start = Fraction(float(schedule.start[j]))
            if start < max([free[worker], *began]) - slack:
                verdict.breaks("start", j)
        idle = max([*began, *(end for _, end, _ in spans[worker][-1:])], default=start)
        between = _held_on(worker, requests, idle, newest, instance)
        if began and idle < start and between > instance.kv_capacity:
            verdict.breaks("kv_capacity", j)  # what the batch evicts is still there

        for i in evicted:
            if i not in requests:
                verdict.breaks("request", j, i)
                continue
            request = requests[i]
            if request.cached == 0 or request.worker != worker:
                verdict.breaks("eviction", j, i)
            if rounds and schedule.evict_mode != "restart":
                verdict.breaks("evict_mode", j, i)
            if start < request.lands - slack:
                verdict.breaks("eviction", j, i)
            request.cached, request.slots, request.worker = 0, 0, None
            request.free_at = max(request.free_at, start)
            decode_phase.discard(i)
            if schedule.evict_mode == "restart":
                request.generated, request.first_token, request.tokens = 0, None, []

        if not entries:
            verdict.breaks("empty_batch", j)
        seen: set[int] = set()
        decodes: list[tuple[int, int]] = []  # (tokens, cached before)
        prefills: list[tuple[int, int]] = []
        for i, c in entries:
            if i not in requests:
                verdict.breaks("request", j, i)
                continue
            request = requests[i]
            if i in seen:
                verdict.breaks("duplicate", j, i)
                continue
            seen.add(i)
            if request.finish is not None:
                verdict.breaks("finished", j, i)
                continue
            if c < 1:
                verdict.breaks("tokens", j, i)
            if start < request.arrival - slack:
                verdict.breaks("arrival", j, i)
            if request.worker not in (None, worker):
                verdict.breaks("worker", j, i)
            if start < request.free_at - slack:
                verdict.breaks("start", j, i)
            first = i not in decode_phase and not request.handed
            if role == "decode" and first and request.prompt >= pools.deflect_below:
                verdict.breaks("role", j, i)
            if role == "prefill" and request.generated > 0:
                verdict.breaks("role", j, i)
            if (r := claims[i]) != 0:
                fits = block is not None and 0 <= r < request.input and r % block == 0
                if request.cached > 0 or not fits:
                    verdict.breaks("reused", j, i)
                else:
                    request.cached = r
            if i in decode_phase:
                decodes.append((c, request.cached))
                if c > 1 + (instance.num_speculative_tokens or 0):
                    verdict.breaks("tokens", j, i)
            else:
                prefills.append((c, request.cached))
                rest = request.input - request.cached
                if c > rest:
                    verdict.breaks("tokens", j, i)
                if c < rest and instance.chunked_prefill is False:
                    verdict.breaks("chunked_prefill", j, i)
        if decodes and prefills and instance.hybrid_batching is False:
            verdict.breaks("hybrid_batching", j)
        total = sum(c for c, _ in decodes + prefills)
        prefilled = sum(c for c, _ in prefills)
        if limits.max_batch_tokens is not None and total > limits.max_batch_tokens:
            verdict.breaks("max_batch_tokens", j)
        if limits.max_prefill_tokens is not None and prefilled > limits.max_prefill_tokens:
            verdict.breaks("max_prefill_tokens", j)
        if verdict.broken:
            return verdict

        end = start + (
            1 if rounds else _seconds(total, decodes, prefills, layers, coefficients or {})
        )
        free[worker] = end
        for i, c in entries:
            request = requests[i]
            request.worker, request.free_at = worker, end
            request.served += end - start
            request.slots = request.cached + c
            made = made_of(instance, i, request.generated, c) if i in decode_phase else 1
            request.cached += made if i in decode_phase else c
            if i in decode_phase or request.cached == request.input:
                decode_phase.add(i)
                request.generated += made
                request.tokens += [end] * made
                if request.first_token is None:
                    request.first_token = end
                if request.generated == request.output:
                    request.finish = end
        running = [i for i, r in requests.items() if r.worker == worker and r.cached > 0]
        held = [requests[i] for i in running]
        verdict.kv[j] = _held_on(worker, requests, start, newest, instance)
        left = sum(
            w == worker and until > start for r in requests.values() for w, _, until in r.held_on
        )
        spans[worker].append([start, end, j])
        if block is not None:
            names = {i: _names(sequences[i], requests[i].cached, block) for i in running}
            own = {i: names[i] - _names(sequences[i], claims.get(i, 0), block) for i in running}
            past = held_names[worker]
            for i, r in claims.items():
                others = set().union(*(own[q] for q in running))
                for name in _names(sequences[i], r, block) - others:
                    last = max((k for k, there in enumerate(past) if name in there), default=None)
                    if last is None:
                        verdict.breaks("reused", j, i)
                    else:
                        for k in batches_of[worker][last + 1 :]:
                            retained[k].add(name)
            past.append(set().union(*names.values()))
            batches_of[worker].append(j)
            verdict.kv[j] += block * (len(past[-1]) - sum(map(len, names.values())))
        if verdict.kv[j] > instance.kv_capacity:
            verdict.breaks("kv_capacity", j)
        if limits.max_running is not None and len(held) + left > limits.max_running:
            verdict.breaks("max_running", j)
        if verdict.broken:
            return verdict
        for i, before in enumerate(after):
            ends = [requests[p].finish for p in before]
            if before and None not in ends:
                requests[i].arrival = max(ends) + Fraction(instance.delay[i].item())
        for i, _ in entries:  # completion releases the KV, after it was counted
            if requests[i].finish is not None:
                requests[i].cached, requests[i].slots, requests[i].worker = 0, 0, None
                decode_phase.discard(i)
    for i, request in requests.items():
        if request.finish is None:
            verdict.breaks("unfinished", None, i)
    if any(_overfull(w, math.inf, requests, shown, spans, instance) for w in list(shown)):
        verdict.breaks("kv_capacity", None)
    if not verdict.broken:
        for j in verdict.kv:
            verdict.kv[j] += (block or 0) * len(retained[j])
            if verdict.kv[j] > instance.kv_capacity and not verdict.broken:
                verdict.breaks("kv_capacity", j)
    verdict.finish = [r.finish for r in requests.values()]
    verdict.first_token = [r.first_token for r in requests.values()]
    verdict.gap = [
        max((b - a for a, b in pairwise(r.tokens)), default=None) for r in requests.values()
    ]
    verdict.served = [r.served for r in requests.values()]
    return verdict


def made_of(instance, i: int, produced: int, tokens: int) -> int:
    """Return what a decode step yields: walk through whole steps up to that of the next token."""
    end, step = 1, 0
    while end <= produced:
        drafts = instance.num_speculative_tokens or 0
        end += 1 + (drafts if instance.accepted is None else instance.accepted[i][step])
        step += 1
    return min(tokens, min(end, int(instance.output_tokens[i])) - produced)


def _held_on(worker, requests, at, newest, instance) -> int:
    """Return the KV on a worker at a time: of those there, and left behind by moves not over."""
    there = [r for r in requests.values() if r.worker == worker and r.cached > 0]
    kv = sum(_in_blocks(max(r.cached, r.slots) + newest, instance) for r in there)
    behind = (entry for r in requests.values() for entry in r.held_on)
    return kv + sum(amount for w, amount, until in behind if w == worker and until > at)


def _overfull(worker, until, requests, shown, spans, instance) -> bool:
    """Return whether an idle worker holds too much KV for some time before ``until``."""
    newest = {"generated": 1, "cached": 0}[instance.kv_accounting]
    ends = [at for at, _ in shown[worker][-1:]] + [end for _, end, _ in spans[worker][-1:]]
    if not shown[worker] or max(ends) >= until:
        return False
    return _held_on(worker, requests, max(ends), newest, instance) > instance.kv_capacity


def _move(verdict, instance, schedule, pools, place, requests, shown, spans) -> None:
    """Let KV move as the p-th entry of the columns says, before batch j."""
    (j, p), slack = place, Fraction(0) if instance.time_unit == "round" else TOLERANCE
    i, to = int(schedule.moved[p]), int(schedule.moved_to[p])
    if i not in requests:
        return verdict.breaks("request", j, i)
    if not 0 <= to < len(pools.machines):
        return verdict.breaks("worker", j, i)
    r, newest = requests[i], {"generated": 1, "cached": 0}[instance.kv_accounting]
    if r.cached == 0 or r.worker is None or r.worker == to:
        return verdict.breaks("moved", j, i)
    earliest = max(
        [r.free_at, *(at for at, _ in shown[to][-1:]), *(at for at, _, _ in spans[to][-1:])]
    )
    start = earliest
    if schedule.moved_start is not None:
        start = Fraction(float(schedule.moved_start[p]))
        if start < earliest - slack:
            return verdict.breaks("moved", j, i)
    for w in (r.worker, to):
        if _overfull(w, start, requests, shown, spans, instance):
            return verdict.breaks("kv_capacity", j, i)
    link, before = pools.link, _in_blocks(r.cached + newest, instance)
    decoding = r.generated > 0 and r.cached == r.input - 1
    r.handed = r.handed or decoding
    if link.recompute_last and decoding and r.generated == 1 and r.prompt > 1:
        r.cached, r.generated, r.first_token, r.tokens = r.cached - 1, 0, None, []
        r.slots = r.cached
    take = Fraction(float(link.latency_s)) + r.cached * Fraction(float(link.seconds_per_token))
    r.held_on.append((r.worker, before, start + take))
    r.worker, r.lands, r.free_at = to, start + take, start + take
    shown[to].append((start, i))
    kv = _in_blocks(r.cached + newest, instance)
    for begin, end, k in spans[to]:
        if begin <= start < end:  # the batch that runs there when the move begins
            verdict.kv[k] += kv
            if verdict.kv[k] > instance.kv_capacity:
                verdict.breaks("kv_capacity", j, i)
    return None


def sequences_of(instance) -> list[list[object]]:
    """Return prompt and output of each request as tokens, which it shares as the instance says."""
    found: list[list[object]] = []
    none = [-1] * instance.n, [0] * instance.n
    parent, shared = none
    if instance.prefix_parent is not None:
        parent, shared = instance.prefix_parent.tolist(), instance.prefix_tokens.tolist()
    for i in range(instance.n):
        size = int(instance.prompt_tokens[i] + instance.output_tokens[i])
        begin = found[parent[i]][: shared[i]] if parent[i] >= 0 else []
        found.append(begin + [(i, k) for k in range(len(begin), size)])
    return found


def _block_of(instance) -> int | None:
    if instance.prefix_parent is None and instance.prefix_block_tokens is None:
        return None
    return instance.prefix_block_tokens or instance.kv_block_tokens


def _names(sequence: list[object], tokens: int, block: int) -> set:
    """Return the names of the whole blocks among the first tokens: all that stands before."""
    return {tuple(sequence[:end]) for end in range(block, tokens + 1, block)}


def _seconds(total, decodes, prefills, layers, coefficients) -> Fraction:
    """Return the time of a non-empty batch from the formula of the cost model."""
    k = defaultdict(Fraction, {name: Fraction(text) for name, text in coefficients.items()})
    ms = k["token"] * total + k["base"]
    if decodes:
        ms += k["decode_kv"] * sum(m for _, m in decodes)
        ms += k["decode_request"] * len(decodes) + k["decode_base"]
    if prefills:
        ms += k["prefill_square"] * sum(c * c for c, _ in prefills)
        ms += k["prefill_cross"] * sum(c * m for c, m in prefills)
        ms += k["prefill_kv"] * sum(m for _, m in prefills)
        ms += k["prefill_token"] * sum(c for c, _ in prefills)
        ms += k["prefill_request"] * len(prefills) + k["prefill_base"]
    return layers * ms / 1000


TIMED = BatchCost(
    "every-term",
    3,
    {
        "token": "1.5",
        "base": "7",
        "decode_kv": "0.25",
        "decode_request": "2",
        "decode_base": "11",
        "prefill_square": "0.125",
        "prefill_cross": "0.375",
        "prefill_kv": "0.0625",
        "prefill_token": "0.5",
        "prefill_request": "3",
        "prefill_base": "13",
    },
)
"""A cost model in which every term counts."""


def batches(
    instance: Instance,
    *rows: Mapping[int, int],
    evict: Mapping[int, list[int]] | None = None,
    **options,
) -> Schedule:
    """Return the schedule whose batches process ``rows``, after the evictions of ``evict``."""
    gone = [(evict or {}).get(j, []) for j in range(len(rows))]
    return of_rows(instance, [list(row.items()) for row in rows], gone, **options)


def of_rows(
    instance: Instance,
    rows: Sequence[Sequence[tuple[int, int]]],
    evict: Sequence[Sequence[int]],
    *,
    reused: Sequence[Sequence[int]] | None = None,
    **options,
) -> Schedule:
    """Return the schedule of rows of (request, tokens), each after evictions, and their claims."""
    return from_batches(
        [0, *accumulate(map(len, rows))],
        [i for row in rows for i, _ in row],
        [c for row in rows for _, c in row],
        instance=instance,
        evicted_offsets=[0, *accumulate(map(len, evict))],
        evicted=[i for gone in evict for i in gone],
        reused=None if reused is None else [r for row in reused for r in row],
        **options,
    )


def random_instance(rng: Random, *, unit: str | None = None, most: int = 6, **fixed) -> Instance:
    """Return a small instance, often tight in KV, with some limits and switches."""
    unit = unit or rng.choice(["round", "second"])
    n = rng.randint(1, most)
    prompt = [rng.randint(1, 8) for _ in range(n)]
    output = [rng.randint(1, 6) for _ in range(n)]
    late = rng.choice([0, 3, 12])
    arrival: list = [rng.randint(0, late) for _ in range(n)]
    if unit == "second":
        arrival = [a * 0.03125 for a in arrival]
    largest = max(s + o for s, o in zip(prompt, output, strict=True))
    values = {
        "kv_accounting": rng.choice(["generated", "cached"]),
        "kv_capacity": largest + rng.randint(0, 20),
        "limits": Limits(
            rng.choice([None, None, rng.randint(8, 16)]),
            rng.choice([None, None, rng.randint(8, 12)]),
            rng.choice([None, None, rng.randint(1, 4)]),
        ),
        "hybrid_batching": rng.choice([None, True, False]),
        "chunked_prefill": rng.choice([None, True, False]),
    }
    return Instance(arrival, prompt, output, time_unit=unit, **{**values, **fixed})


def with_drafts(rng: Random, instance: Instance, **fixed) -> Instance:
    """Return the instance on a server that verifies drafts, of which some are accepted."""
    drafts, accepted = rng.randint(1, 3), []
    for o in instance.output_tokens.tolist():
        accepted.append([])
        while sum(accepted[-1]) + len(accepted[-1]) < o - 1:
            accepted[-1].append(rng.randint(0, drafts))
    values = {"num_speculative_tokens": drafts, "accepted": rng.choice([None, accepted])}
    return replace(instance, **{**values, **fixed})


def random_batches(rng: Random, instance: Instance) -> Schedule:
    """Return a schedule of random decisions that keeps the rules, unless it never ends."""
    n = instance.n
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    offset = instance.kv_offset
    rounds = instance.time_unit == "round"
    mode = "restart" if rounds or rng.random() < 0.5 else "recompute"
    chunking = instance.chunked_prefill is not False and rng.random() < 0.5
    hybrid = instance.hybrid_batching is not False
    infinite = 10**9
    most_tokens = instance.limits.max_batch_tokens or infinite
    most_prefill = instance.limits.max_prefill_tokens or infinite
    most_running = instance.limits.max_running or infinite
    workers = rng.choice([1, 1, 1, 2])
    eager, evicting = rng.choice([0.5, 0.9, 1.0]), rng.choice([0.0, 0.1])
    cached, produced, home = [0] * n, [0] * n, [-1] * n
    decoding, slots = [False] * n, [0] * n
    drafts = instance.num_speculative_tokens or 0
    rows, evict, worker = [], {}, []
    while len(rows) < 80 and any(p < o for p, o in zip(produced, output, strict=True)):
        w = rng.randrange(workers)
        gone = [i for i in range(n) if home[i] == w and rng.random() < evicting]
        row: dict[int, int] = {}
        while not row:
            if gone:
                evict.setdefault(len(rows), []).extend(gone)
            for i in gone:
                cached[i], slots[i], home[i], decoding[i] = 0, 0, -1, False
                if mode == "restart":
                    produced[i] = 0
            used = sum(slots[i] + offset for i in range(n) if home[i] == w)
            running = sum(home[i] == w for i in range(n))
            order = [i for i in range(n) if produced[i] < output[i] and home[i] in (-1, w)]
            rng.shuffle(order)
            phase, prefilled = None, 0
            for i in order:
                if rng.random() > eager or (phase not in (None, decoding[i]) and not hybrid):
                    continue
                c = 1 if decoding[i] else prompt[i] + produced[i] - cached[i]
                if drafts and decoding[i]:
                    c = rng.randint(1, 1 + drafts)
                if chunking and not decoding[i]:
                    c = rng.randint(1, c)
                more = cached[i] + c - slots[i] + (offset if home[i] < 0 else 0)
                if (
                    used + more > instance.kv_capacity
                    or sum(row.values()) + c > most_tokens
                    or (not decoding[i] and prefilled + c > most_prefill)
                    or (home[i] < 0 and running + 1 > most_running)
                ):
                    continue
                used += more
                running += home[i] < 0
                prefilled += 0 if decoding[i] else c
                phase = decoding[i]
                row[i] = c
            if not row:
                held = [i for i in range(n) if home[i] == w]
                if not held and not order:
                    break
                gone = rng.sample(held, rng.randint(0, len(held)))
                if not gone and rng.random() < 0.05:
                    break
        if not row:
            evict.pop(len(rows), None)
            break
        for i, c in row.items():
            home[i] = w
            made = made_of(instance, i, produced[i], c) if decoding[i] else 1
            slots[i] = cached[i] + c
            cached[i] += made if decoding[i] else c
            if decoding[i] or cached[i] == prompt[i] + produced[i]:
                decoding[i] = True
                produced[i] += made
                if produced[i] == output[i]:
                    cached[i], slots[i], home[i], decoding[i] = 0, 0, -1, False
        rows.append(row)
        worker.append(w)
    start = None
    if workers == 2 or rng.random() < 0.3:
        # Far enough apart for any batch; workers never run at the same time.
        first = max(instance.arrival.tolist())
        start = [first + j * rng.choice([2, 3]) for j in range(len(rows))]
        start = [max(start[: j + 1]) for j in range(len(rows))]
        start = [t + j * 2 for j, t in enumerate(start)]
    return batches(
        instance,
        *rows,
        evict=evict,
        evict_mode=mode,
        start=start,
        worker=worker if workers == 2 else None,
    )


CONSTANT = {"base": "2000"}
"""Coefficients of a cost model of one layer in which every batch takes 2 seconds."""


def random_moves(rng: Random) -> tuple[Instance, Fleet, Schedule]:
    """Return a tight instance, pools, and random decisions with moves that keep most rules.

    Time goes in steps of half a second, so that moves begin in the middle of batches.
    """
    tight = rng.random() < 0.2  # with limits to which the decisions do not keep
    options = {} if tight else {"limits": Limits(), "hybrid_batching": None}
    instance = random_instance(rng, unit="second", **options)
    offset, limits = instance.kv_offset, instance.limits
    roles = rng.choice(["pd", "pdd", "ppd", "pdm", "mm"])
    names = {"p": "prefill", "d": "decode", "m": "mixed"}
    cost = BatchCost("constant", 1, CONSTANT)
    machines = [
        Machine(cost_model=cost, kv_capacity=instance.kv_capacity, limits=limits, role=names[role])
        for role in roles
    ]
    rates = rng.choice([0, 0.5, 3]), rng.choice([0, 0.25, 0.5])
    link = Link(*rates, recompute_last=rng.random() < 0.4)
    pools = Fleet(machines, link, rng.choice([0, 0, 4]))
    mode, n = rng.choice(["restart", "recompute"]), instance.n
    prompt, output = instance.prompt_tokens.tolist(), instance.output_tokens.tolist()
    cached, produced, home, decoding = [0] * n, [0] * n, [-1] * n, [False] * n
    free_at, handed = instance.arrival.tolist(), [False] * n
    clock, during = [0.0] * len(roles), [0] * len(roles)
    behind: list[tuple[int, int, float]] = []
    rows, evict, worker, start, moves, offsets = [], [], [], [], [], []

    def kv(tokens: int) -> int:
        return _in_blocks(tokens + offset, instance) if tokens else 0

    def held(w: int, t: float) -> int:
        left = sum(k for v, k, until in behind if v == w and until > t)
        return left + sum(kv(cached[i]) for i in range(n) if home[i] == w)

    for t in (k / 2 for k in range(120)):
        for i in range(n):
            ready = home[i] >= 0 and free_at[i] <= t and produced[i] < output[i]
            if not ready or rng.random() < 0.3 or not (decoding[i] or roles == "mm"):
                continue
            if roles[home[i]] in "dm" and rng.random() < 0.8:
                continue
            again = link.recompute_last and decoding[i] and produced[i] == 1 and prompt[i] > 1
            to = rng.randrange(len(roles))
            more = kv(cached[i] - again)
            now = during[to] if t < clock[to] else held(to, t)
            fits = max(now, held(to, t)) + more <= instance.kv_capacity
            if to == home[i] or roles[to] == "p" or not fits:
                continue
            handed[i] = handed[i] or decoding[i]
            free_at[i] = t + link.latency_s + (cached[i] - again) * link.seconds_per_token
            behind.append((home[i], kv(cached[i]), free_at[i]))
            home[i], during[to] = to, during[to] + more
            if again:
                cached[i], produced[i], decoding[i] = cached[i] - 1, 0, False
            moves.append((i, to, t))
        for w, role in enumerate(roles):
            if t < clock[w] or rng.random() < 0.3:
                continue
            gone = [
                i
                for i in range(n)
                if home[i] == w
                and role in "dm"
                and rng.random() < 0.05
                and (free_at[i] <= t or rng.random() < 0.1)
            ]
            for i in gone:
                cached[i], home[i], decoding[i] = 0, -1, False
                produced[i] = 0 if mode == "restart" else produced[i]
            row: dict[int, int] = {}
            used, order = held(w, t), list(range(n))
            rng.shuffle(order)
            for i in order:
                wrong = free_at[i] > t or produced[i] == output[i] or home[i] not in (-1, w)
                deflected = handed[i] or prompt[i] < pools.deflect_below
                if wrong or (role == "p" and (produced[i] or handed[i])):
                    continue
                if role == "d" and not (decoding[i] or deflected):
                    continue
                c = 1 if decoding[i] else prompt[i] + produced[i] - cached[i]
                if c > 1 and instance.chunked_prefill is not False and rng.random() < 0.3:
                    c = rng.randint(1, c)
                more = kv(cached[i] + c) - kv(cached[i])
                size = sum(row.values()) + c
                if used + more <= instance.kv_capacity and size <= (limits.max_batch_tokens or 99):
                    row[i], used = c, used + more
            if not row:
                if gone:
                    break
                continue
            rows.append(list(row.items()))
            evict.append(gone)
            worker.append(w)
            start.append(t)
            offsets.append(len(moves))
            clock[w], during[w] = t + 2, used
            for i, c in row.items():
                home[i], cached[i], free_at[i] = w, cached[i] + c, t + 2
                if cached[i] == prompt[i] + produced[i]:
                    decoding[i], produced[i] = True, produced[i] + 1
                if produced[i] == output[i]:
                    cached[i], home[i], decoding[i] = 0, -1, False
    columns = list(zip(*moves[: offsets[-1]], strict=True)) if rows and offsets[-1] else [[]] * 3
    options = {"start": start, "worker": worker, "evict_mode": mode}
    moved = dict(zip(("moved", "moved_to", "moved_start"), map(list, columns), strict=True))
    return (
        instance,
        pools,
        of_rows(instance, rows, evict, moved_offsets=[0, *offsets], **moved, **options),
    )


def corrupted_moves(rng: Random, instance: Instance, pools: Fleet, schedule: Schedule) -> Schedule:
    """Return a schedule with one random change to its moves or to where it runs."""
    moved, to, start = (
        column.tolist() for column in (schedule.moved, schedule.moved_to, schedule.moved_start)
    )
    offsets, worker = schedule.moved_offsets.copy(), schedule.worker.copy()
    kind = rng.randrange(8)
    if not moved or kind == 0:
        j = rng.randrange(schedule.batches)
        worker[j] = rng.randrange(len(pools.machines))
    elif kind == 1:
        return corrupted(rng, instance, schedule)
    else:
        p = rng.randrange(len(moved))
        j = int(np.searchsorted(offsets, p, "right")) - 1  # it stands before this batch
        if kind == 2:
            moved[p] = rng.randint(-1, instance.n)
        elif kind == 3:
            to[p] = rng.randint(-1, len(pools.machines))
        elif kind == 4:
            start[p] += rng.choice([-2, -0.5, 0.5, 2, 6])
        elif kind == 5:
            offsets[rng.randrange(j + 1) + 1 : j + 1] += 1  # earlier in the list
        elif kind == 6:
            offsets[j + 1 : rng.randrange(j + 1, len(offsets))] -= 1  # later in the list
        else:
            for column in (moved, to, start):
                del column[p]
            offsets[j + 1 :] -= 1
    return replace(
        schedule,
        worker=worker,
        moved_offsets=np.sort(offsets),
        moved=np.array(moved, dtype=np.int64),
        moved_to=np.array(to, dtype=np.int64),
        moved_start=np.array(start, dtype=np.float64),
    )


def corrupted(rng: Random, instance: Instance, schedule: Schedule) -> Schedule:
    """Return a schedule with one random change, which may or may not break a rule."""
    total = schedule.batches
    rows = []
    evict = []
    for j in range(total):
        low, high = schedule.batch_offsets[j : j + 2]
        pairs = zip(schedule.request[low:high], schedule.tokens[low:high], strict=True)
        rows.append([(int(i), int(c)) for i, c in pairs])
        low, high = schedule.evicted_offsets[j : j + 2]
        evict.append([int(i) for i in schedule.evicted[low:high]])
    start = None if schedule.start is None else schedule.start.tolist()
    worker = None if schedule.worker is None else schedule.worker.tolist()
    mode = schedule.evict_mode
    j = rng.randrange(total)
    p = rng.randrange(len(rows[j]))
    i, c = rows[j][p]
    kind = rng.randrange(10)
    if kind == 0:
        rows[j][p] = (i, c + rng.choice([-1, 1]))
    elif kind == 1:
        rows[j][p] = (rng.randint(-1, instance.n), c)
    elif kind == 2:
        del rows[j][p]
    elif kind == 3:
        rows[j].append((i, c))
    elif kind == 4:
        evict[j] = []
    elif kind == 5:
        evict[j].append(rng.randint(-1, instance.n))
    elif kind == 6 and start is not None:
        start[j] -= rng.choice([1, 2, 5])
    elif kind == 7:
        worker = worker or [0] * total
        worker[j] = rng.choice([-1, 0, 1, 2])
    elif kind == 8:
        k = rng.randrange(total)
        rows[j], rows[k] = rows[k], rows[j]
    else:
        mode = "restart" if mode == "recompute" else "recompute"
    options = {"start": start, "worker": worker, "evict_mode": mode}
    for name in ("moved_offsets", "moved", "moved_to", "moved_start"):
        options[name] = getattr(schedule, name)
    return of_rows(instance, rows, evict, **options)
