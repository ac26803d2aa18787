"""Exhaustive search over schedules of batches in seconds: shares no code with the package.

Every batch that the judge would accept is tried in every reachable state of the requests; of the
ways into a state only those are kept that another one does not match in everything that can still
matter. Exact integers (1e-14 ms) and fractions throughout. For tiny instances.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from itertools import product
from math import lcm

SCALE = 10**14  # units per millisecond
NAMES = [
    "token", "base", "decode_kv", "decode_request", "decode_base", "prefill_square",
    "prefill_cross", "prefill_kv", "prefill_token", "prefill_request", "prefill_base",
]  # fmt: skip


class Exhaustive:
    """All batches of an instance, by state; `best` answers for objectives."""

    def __init__(
        self, instance, cost_model, *, eviction_free=False, restart=False, split=None
    ):  # fmt: skip
        """``restart``: an eviction loses tokens. ``split``: whether prefills may be split."""
        self.prompt = [int(v) for v in instance.prompt_tokens]
        self.output = [int(v) for v in instance.output_tokens]
        self.arrival = [Fraction(float(v)) * 1000 * SCALE for v in instance.arrival]
        self.room = instance.kv_capacity
        self.newest = 1 if instance.kv_accounting == "generated" else 0
        none = 2**62
        self.most_tokens = instance.limits.max_batch_tokens or none
        self.most_prefill = instance.limits.max_prefill_tokens or none
        self.most_running = instance.limits.max_running or none
        self.mixed = instance.hybrid_batching is not False
        self.split = instance.chunked_prefill is True if split is None else split
        self.block, self.window = instance.kv_block_tokens, instance.kv_window
        self.restart = restart
        self.evicts = not eviction_free
        unknown = set(cost_model.coefficients).difference(NAMES)
        assert not unknown, f"price {unknown} in tests/exhaustive_batches.py"
        self.price = {}
        for name in NAMES:
            value = Fraction(str(cost_model.coefficients.get(name, "0"))) * SCALE
            assert value.denominator == 1
            self.price[name] = cost_model.layers * int(value)
        self.n = len(self.prompt)
        self.weight = [int(v) for v in instance.weights]
        self.batches = {}

    def options(self, i, state):
        """Yield (tokens, phase, evicted, next state) of what a batch may do with a request."""
        if state == "done":
            yield 0, None, False, state
            return
        produced, cached, ready = state
        yield 0, None, False, state
        starts = [(cached, ready, False)]
        kept = 0 if self.restart else produced
        if cached and self.evicts:
            yield 0, None, True, (kept, 0, False)
            starts.append((0, False, True))
        for have, decoding, evicted in starts:
            produced = kept if evicted else produced
            need = self.prompt[i] + produced - have
            for tokens in range(1, need + 1) if self.split else [need]:
                if tokens == need:
                    after = (produced + 1, have + tokens, True)
                else:
                    after = (produced, have + tokens, False)
                if decoding:
                    assert need == 1
                yield tokens, ("decode" if decoding else "prefill", have), evicted, after

    def in_blocks(self, cached):
        """Return the KV tokens that a request with so many cached ones holds."""
        tokens = cached + self.newest
        if self.window is not None:
            last, sliding, layers = self.window
            full = (layers - sliding) * tokens
            tokens = -(-(full + sliding * min(tokens, last)) // layers)
        return -(-tokens // self.block) * self.block

    def time(self, decode, prefill):
        """Return the time of a batch: decodes by cached tokens, prefills as (tokens, cached)."""
        tokens = len(decode) + sum(c for c, _ in prefill)
        p = self.price
        time = p["token"] * tokens + p["base"]
        if decode:
            time += p["decode_kv"] * sum(decode) + p["decode_request"] * len(decode)
            time += p["decode_base"]
        if prefill:
            time += p["prefill_square"] * sum(c * c for c, _ in prefill)
            time += p["prefill_cross"] * sum(c * m for c, m in prefill)
            time += p["prefill_kv"] * sum(m for _, m in prefill)
            time += p["prefill_token"] * sum(c for c, _ in prefill)
            time += p["prefill_request"] * len(prefill) + p["prefill_base"]
        return time

    def from_state(self, state):
        """Return every batch in a state: (duration, latest arrival, next state)."""
        if state in self.batches:
            return self.batches[state]
        found = {}
        for choice in product(*(list(self.options(i, s)) for i, s in enumerate(state))):
            tokens = sum(c for c, *_ in choice)
            if tokens == 0 or tokens > self.most_tokens:
                continue
            prefill = [(c, phase[1]) for c, phase, *_ in choice if phase and phase[0] == "prefill"]
            decode = [phase[1] for _, phase, *_ in choice if phase and phase[0] == "decode"]
            if sum(c for c, _ in prefill) > self.most_prefill:
                continue
            if prefill and decode and not self.mixed:
                continue
            held = [
                self.in_blocks(max(s[1], c + phase[1] if phase else 0))  # drafts take room, too
                for c, phase, _, s in choice
                if s != "done" and s[1]
            ]
            if sum(held) > self.room or len(held) > self.most_running:
                continue
            time = self.time(decode, prefill)
            time += self.price["token"] * (tokens - len(decode) - sum(c for c, _ in prefill))
            latest = max(self.arrival[i] for i, (c, *_) in enumerate(choice) if c)
            after = tuple(
                "done" if s != "done" and s[0] == self.output[i] else s
                for i, (*_, s) in enumerate(choice)
            )
            key = (latest, after)
            if key not in found or time < found[key]:
                found[key] = time
        out = [(time, latest, after) for (latest, after), time in found.items()]
        self.batches[state] = out
        return out

    def best(self, *objectives):
        """Return the least values, lexicographically, in seconds (tps: tokens per second).

        TPOT alone does not depend on arrivals: after the last one nothing need wait. TPOT beside
        others is refused where arrivals differ, as the starts would have to be chosen.
        """
        best = min(
            self.values(*objectives),
            key=lambda v: tuple(
                -x if o == "tps" else x for o, x in zip(objectives, v, strict=True)
            ),
        )
        return tuple(float(v) for v in best)

    def values(self, *objectives):
        """Return the exact values of schedules of which one is best for each sum of objectives."""
        apart = len(set(self.arrival)) > 1
        spans = {"mean_tpot", "max_tpot"} & set(objectives)
        assert not (apart and spans and len(objectives) > 1)
        arrival = [max(self.arrival)] * self.n if apart and spans else self.arrival
        whole = lcm(1, *(o - 1 for o in self.output if o > 1))
        rate = [whole // (o - 1) if o > 1 else 0 for o in self.output]
        start = tuple((0, 0, False) for _ in self.output)
        # A label: (what may dominate), then the same in full: clock, finish, first times.
        first = (Fraction(0) + min(arrival), (None,) * self.n, (None,) * self.n)
        labels = {start: {self.matter(objectives, start, first, rate): first}}
        queue = deque([start])
        waiting = {start}
        while queue:
            state = queue.popleft()
            waiting.discard(state)
            for label in list(labels[state].values()):
                for time, latest, after in self.from_state(state):
                    clock = max(label[0], latest if not (apart and spans) else arrival[0]) + time
                    firsts, ends = list(label[1]), list(label[2])
                    for i in range(self.n):
                        if state[i] != "done" and after[i] == "done":
                            ends[i] = clock
                        if firsts[i] is None and (after[i] == "done" or after[i][0] > 0):
                            firsts[i] = clock
                    new = (clock, tuple(firsts), tuple(ends))
                    key = self.matter(objectives, after, new, rate)
                    known = labels.setdefault(after, {})
                    if any(all(a <= b for a, b in zip(k, key, strict=True)) for k in known):
                        continue
                    worse = [k for k in known if all(a <= b for a, b in zip(key, k, strict=True))]
                    for k in worse:
                        del known[k]
                    known[key] = new
                    if after not in waiting and any(s != "done" for s in after):
                        waiting.add(after)
                        queue.append(after)
        end = tuple("done" for _ in self.output)
        return [
            tuple(self.value(name, label, arrival) for name in objectives)
            for label in labels[end].values()
        ]

    def matter(self, objectives, state, label, rate):
        """Return what of a label can still matter: less in all places is at least as good."""
        clock, firsts, ends = label
        out = []
        if set(objectives) - {"mean_tpot", "max_tpot"}:
            out.append(clock)
        for name in objectives:
            if name == "tel":
                out.append(sum(e for e in ends if e is not None))
            elif name == "weighted_latency":
                out.append(
                    sum(w * e for w, e in zip(self.weight, ends, strict=True) if e is not None)
                )
            elif name == "mean_ttft":
                out.append(sum(f for f in firsts if f is not None))
            elif name in ("mean_tpot", "max_tpot"):
                spent = [
                    rate[i] * ((clock if ends[i] is None else ends[i]) - f)
                    for i, f in enumerate(firsts)
                    if f is not None
                ]
                if name == "mean_tpot":
                    out.append(sum(spent))
                else:
                    over = [
                        rate[i] * (ends[i] - firsts[i])
                        for i in range(self.n)
                        if ends[i] is not None
                    ]
                    out.append(max(over, default=0))
                    out += [
                        rate[i] * (clock - firsts[i])
                        for i in range(self.n)
                        if ends[i] is None and firsts[i] is not None
                    ]
        return tuple(out)

    def value(self, name, label, arrival):
        """Return an objective's value in seconds (tps: tokens per second), exactly."""
        _, firsts, ends = label
        unit = 1000 * SCALE
        spans = [
            (e - f) / (o - 1) for e, f, o in zip(ends, firsts, self.output, strict=True) if o > 1
        ]
        if name == "makespan":
            return Fraction(max(ends)) / unit
        if name == "tps":
            return sum(self.output) * unit / (Fraction(max(ends)) - min(arrival))
        if name == "tel":
            return (Fraction(sum(ends)) - sum(self.arrival)) / unit
        if name == "weighted_latency":
            rows = zip(self.weight, ends, self.arrival, strict=True)
            return Fraction(sum(w * (e - a) for w, e, a in rows)) / unit
        if name == "mean_ttft":
            return (Fraction(sum(firsts)) - sum(self.arrival)) / unit / self.n
        if name == "mean_tpot":
            return Fraction(sum(spans)) / unit / len(spans)
        return Fraction(max(spans)) / unit
