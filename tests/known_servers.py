"""Servers whose truth is known: a loop like vLLM's in code of its own, and its bench's files.

Nothing here comes from the package, so that what `diagnose` says of a change can be held against
what the changed server does. Times are in seconds, and a step's time is the p-norm of reading and
arithmetic, or what public tables say.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

Prefills = Sequence[tuple[int, int]]
StepTime = Callable[[Prefills, Sequence[int]], float]
"""The time of a step of prefills (tokens, tokens cached before) and decodes (tokens cached)."""


def corner(
    exponent: float,
    *,
    read: float = 0.0225,
    kv: float = 2.1e-7,
    token: float = 7.6e-5,
    pair: float = 3.5e-9,
    host: tuple[float, float] = (0.004, 2e-5),
    adds_host: bool = False,
) -> StepTime:
    """Return the step of a model of 8 billion parameters on a GPU like an L40S."""

    def step(prefills: Prefills, decodes: Sequence[int]) -> float:
        tokens = len(decodes) + sum(c for c, _ in prefills)
        pairs = sum(c * m + c * (c + 1) / 2 for c, m in prefills)
        reading = read + kv * (sum(decodes) + sum(m for _, m in prefills))
        arithmetic = token * tokens + pair * pairs
        gpu = float((reading**exponent + arithmetic**exponent) ** (1 / exponent))
        cpu = host[0] + host[1] * (len(decodes) + len(prefills))
        return gpu + cpu if adds_host else max(gpu, cpu)

    return step


def padded(step: StepTime) -> StepTime:
    """Return a step whose decodes are padded to the next power of two, as CUDA graphs are."""

    def whole(prefills: Prefills, decodes: Sequence[int]) -> float:
        more = (1 << max(len(decodes) - 1, 0).bit_length()) - len(decodes) if not prefills else 0
        return step(prefills, [*decodes, *[0] * more])

    return whole


def uneven(step: StepTime) -> StepTime:
    """Return a step that takes 60 ms longer every now and then, as beside another process."""
    return lambda prefills, decodes: step(prefills, decodes) + 0.06 * (sum(decodes) % 29 == 0)


def tabulated(folder: Path, layers: int = 32) -> StepTime:
    """Return the step of LLMServingSim's public tables: dense operators, heads and attention."""
    per_layer = {"layernorm": 2.0}
    once = {"embedding", "final_layernorm"}
    dense: dict[str, dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader((folder / "dense.csv").open()):
        dense[row["layer"]][int(row["tokens"])] = float(row["time_us"]) * 1e-6
    heads: dict[str, dict[int, float]] = defaultdict(dict)
    for row in csv.DictReader((folder / "per_sequence.csv").open()):
        heads[row["layer"]][int(row["sequences"])] = float(row["time_us"]) * 1e-6
    cells: dict[tuple[int, ...], float] = {}
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    for row in csv.DictReader((folder / "attention.csv").open()):
        cells[tuple(int(float(row[n])) for n in names)] = float(row["time_us"]) * 1e-6
    axes = [sorted({key[k] for key in cells}) for k in range(4)]

    def line(points: dict[int, float], x: float) -> float:
        keys = sorted(points)
        k = min(max(bisect_right(keys, x), 1), len(keys) - 1)
        low, high = keys[k - 1], keys[k]
        share = max(0.0, (x - low) / (high - low))
        return points[low] + share * (points[high] - points[low])

    def nearest(values: Sequence[float]) -> float:
        places = []
        for axis, x in zip(axes, values, strict=True):
            k = min(max(bisect_right(axis, x), 1), len(axis) - 1)
            share = min(max((x - axis[k - 1]) / (axis[k] - axis[k - 1]), 0.0), 1.5)
            places.append(((axis[k - 1], 1 - share), (axis[k], share)))
        total = weight = 0.0
        for a, wa in places[0]:
            for b, wb in places[1]:
                for c, wc in places[2]:
                    for d, wd in places[3]:
                        key = (a, b, c, d)
                        if key in cells:
                            total += wa * wb * wc * wd * cells[key]
                            weight += wa * wb * wc * wd
        return total / weight if weight else 0.0

    whole = {
        n: sum(per_layer.get(name, 1.0) * (1 if name in once else layers) * line(one, n)
               for name, one in dense.items())
        for n in sorted(set().union(*dense.values()))
    }  # fmt: skip

    def step(prefills: Prefills, decodes: Sequence[int]) -> float:
        chunk, cached = sum(c for c, _ in prefills), sum(m for _, m in prefills)
        kv = sum(decodes) / max(len(decodes), 1)
        time = line(whole, chunk + len(decodes))
        time += sum(line(one, len(prefills) + len(decodes)) for one in heads.values())
        return time + layers * nearest((chunk, cached, len(decodes), kv))

    return step


@dataclass(frozen=True)
class Server:
    """A server, its load and its SLOs. ``first_chunk`` admits a prompt by the room for a chunk."""

    name: str
    step: StepTime
    seats: int = 256
    tokens: int = 2048
    threshold: int = 0
    kv: int = 90_000
    shortest_first: bool = False
    first_chunk: bool = False
    machines: int = 1
    n: int = 240
    rate: float = 3.0
    sizes: tuple[int, int] = (800, 150)
    spread: tuple[float, float] = (1.0, 0.7)
    bursts: int = 1
    slos: dict[str, float] = field(default_factory=lambda: {"slo_ttft": 1.0, "slo_tpot": 0.06})
    gpu: str = "l40s"
    noise: float = 0.01
    seed: int = 1

    def load(self) -> tuple[list[float], list[int], list[int]]:
        """Return arrivals, prompts and outputs."""
        rng = np.random.default_rng(self.seed)
        groups = -(-self.n // self.bursts)
        times = np.cumsum(rng.exponential(self.bursts / self.rate, groups))
        arrivals = np.repeat(times, self.bursts)[: self.n] - times[0]
        sizes = [
            np.clip(rng.lognormal(np.log(size), spread, self.n), 8, 4_000).astype(int).tolist()
            for size, spread in zip(self.sizes, self.spread, strict=True)
        ]
        return arrivals.tolist(), *sizes

    def run(self) -> list[list[float]]:
        """Return for each request when its tokens appear; a router sends each to the least busy."""
        arrivals, prompts, outputs = self.load()
        loops = [_Loop(self, prompts, outputs) for _ in range(self.machines)]
        for i, at in enumerate(arrivals):
            for loop in loops:
                loop.go(at)
            least = min(loops, key=lambda one: len(one.running) + len(one.waiting))
            least.waiting.append(i)
            least.clock = max(least.clock, at) if not least.busy else least.clock
        for loop in loops:
            loop.go(float("inf"))
        return [next(loop.emitted[i] for loop in loops if i in loop.emitted) for i in range(self.n)]

    def loss(self, slos: bool) -> float:
        """Return the share of requests that miss their SLOs, or the mean latency."""
        arrivals, _, outputs = self.load()
        tokens = self.run()
        latency = np.array([one[-1] - a for one, a in zip(tokens, arrivals, strict=True)])
        if not slos:
            return float(latency.mean())
        ttft = np.array([one[0] - a for one, a in zip(tokens, arrivals, strict=True)])
        steps = np.maximum(np.array(outputs) - 1, 1)
        gap = np.array([max(np.diff(one), default=0.0) for one in tokens])
        found = {"slo_ttft": ttft, "slo_tpot": (latency - ttft) / steps, "slo_gap": gap}
        found["slo_latency"] = latency
        met = np.ones(self.n, bool)
        for name, value in self.slos.items():
            met &= found[name] <= value
        return float(1 - met.mean())

    def write(self, file: Path) -> None:
        """Write the run as ``vllm bench serve --save-result --save-detailed`` does."""
        arrivals, prompts, outputs = self.load()
        rng = np.random.default_rng(9)
        run: dict[str, Any] = {"backend": "vllm", "model_id": "meta-llama/Llama-3.1-8B"}
        run |= {"num_prompts": self.n, "request_rate": self.rate, "burstiness": 1.0}
        run |= {"max_concurrency": None, "completed": self.n}
        run |= {"input_lens": prompts, "output_lens": outputs, "ttfts": [], "itls": []}
        for tokens, arrival in zip(self.run(), arrivals, strict=True):
            seen = np.maximum.accumulate(np.array(tokens) + rng.exponential(self.noise * 0.02))
            run["ttfts"].append(float(seen[0] - arrival))
            run["itls"].append(np.diff(seen).tolist())
        run["start_times"] = [50.0 + a for a in arrivals]
        run["generated_texts"] = [""] * self.n
        run["errors"] = [""] * self.n
        file.write_text(json.dumps(run))

    def changed(self, what: str) -> Server | None:
        """Return the server with a change as `diagnose` names it; None if it has no such one."""
        names = {
            "max_num_seqs": "seats",
            "max_num_batched_tokens": "tokens",
            "long_prefill_token_threshold": "threshold",
            "kv_capacity": "kv",
            "workers": "machines",
        }
        settings: dict[str, Any] = {}
        for pair in what.split(","):
            name, _, value = pair.partition("=")
            if name in names:
                settings[names[name]] = int(value)
            elif pair == "policy=priority":
                settings["shortest_first"] = True
            elif pair != "priority=prompt":
                return None
        return replace(self, **settings)


class _Loop:
    """One machine: running requests first, then whom there is room for, KV in blocks of 16."""

    def __init__(self, server: Server, prompts: list[int], outputs: list[int]) -> None:
        self.server, self.prompts, self.outputs = server, prompts, outputs
        self.clock, self.busy = 0.0, False
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.cached: dict[int, int] = {}
        self.emitted: dict[int, list[float]] = {}

    def blocks(self, tokens: int) -> int:
        return -(-tokens // 16)

    @property
    def free(self) -> int:
        held = sum(self.blocks(self.cached[i]) for i in self.running)
        return self.server.kv // 16 - held

    def target(self, i: int) -> int:
        return self.prompts[i] + len(self.emitted.get(i, ()))

    def go(self, until: float) -> None:
        while (self.running or self.waiting) and self.clock < until:
            batch = self.schedule() or self.schedule()  # all may have been preempted
            self.busy = bool(self.running)
            if not batch:
                return
            prefills, decodes = [], []
            for i, c in batch.items():
                before = self.cached[i] - c
                if c == 1 and before + 1 == self.target(i) and i in self.emitted:
                    decodes.append(before)
                else:
                    prefills.append((c, before))
            self.clock += self.server.step(prefills, decodes)
            for i in batch:
                if self.cached[i] == self.target(i):
                    self.emitted.setdefault(i, []).append(self.clock)
                    if len(self.emitted[i]) == self.outputs[i]:
                        self.running.remove(i)
            self.busy = bool(self.running or self.waiting)

    def schedule(self) -> dict[int, int]:
        """Return the tokens of each request in the next step, which are counted as cached."""
        server, left, free = self.server, self.server.tokens, self.free
        batch: dict[int, int] = {}
        k, preempted = 0, False
        while k < len(self.running) and left > 0:
            i = self.running[k]
            c = min(self.target(i) - self.cached[i], left)
            c = min(c, server.threshold) if server.threshold else c
            while (more := self.blocks(self.cached[i] + c) - self.blocks(self.cached[i])) > free:
                key = (lambda j: (self.prompts[j], j)) if server.shortest_first else (lambda j: j)
                last = max(self.running, key=key) if server.shortest_first else self.running[-1]
                preempted = True
                free += self.blocks(self.cached[last])
                left += batch.pop(last, 0)
                at = self.running.index(last)
                self.running.remove(last)
                k -= at < k
                self.cached[last] = 0
                self.waiting.appendleft(last)
                if last == i:
                    break
            else:
                free -= more
                batch[i] = c
                self.cached[i] += c
                left -= c
                k += 1
                continue
            break
        if preempted or len(batch) < len(self.running):
            return batch
        while self.waiting and left > 0 and len(self.running) < server.seats:
            i = self.waiting[0]
            if server.shortest_first:
                i = min(self.waiting, key=lambda j: (self.prompts[j], j))
            c = min(self.target(i), left)
            c = min(c, server.threshold) if server.threshold else c
            if self.blocks(c if server.first_chunk else self.target(i)) > free:
                break
            self.waiting.remove(i)
            free -= self.blocks(c)
            self.cached[i] = c
            self.running.append(i)
            batch[i] = c
            left -= c
        return batch


SERVERS = (
    Server("sum", corner(1.0), rate=4.0, slos={"slo_ttft": 1.5, "slo_tpot": 0.06}),
    Server("corner-2", corner(2.0), rate=4.0, slos={"slo_ttft": 1.5, "slo_tpot": 0.045}),
    Server("corner-3", corner(3.0), rate=4.4, slos={"slo_ttft": 1.5, "slo_tpot": 0.046}),
    Server("gaps", corner(3.0), rate=2.2, sizes=(1500, 120),
           slos={"slo_ttft": 2.0, "slo_gap": 0.165}),
    Server("host-bound", corner(3.0, host=(0.03, 6e-4)), rate=4.0, sizes=(300, 200),
           slos={"slo_ttft": 1.0, "slo_tpot": 0.07}),
    Server("host-adds", corner(3.0, host=(0.006, 3e-4), adds_host=True), rate=3.0, seats=64),
    Server("kv-starved", corner(3.0), kv=12_000, rate=1.2,
           slos={"slo_ttft": 3.0, "slo_tpot": 0.06}),
    Server("seat-starved", corner(2.0), seats=16, rate=2.6,
           slos={"slo_ttft": 2.0, "slo_tpot": 0.06}),
    Server("first-chunk", corner(3.0), kv=14_000, first_chunk=True, rate=1.1, sizes=(1200, 120),
           slos={"slo_ttft": 3.0, "slo_tpot": 0.06}),
    Server("in-time", corner(2.0), rate=0.8, slos={"slo_ttft": 3.0, "slo_tpot": 0.3}),
    Server("bursty", corner(3.0), bursts=24, rate=2.2, slos={"slo_ttft": 2.0, "slo_tpot": 0.06}),
    Server("latency", corner(3.0), rate=4.0, slos={}),
    # Those that no model was made for.
    Server("padded", padded(corner(2.5, token=1.2e-4)), rate=3.0, seats=48,
           slos={"slo_ttft": 1.5, "slo_tpot": 0.06}),
    Server("uneven", uneven(corner(2.0)), rate=3.6, slos={"slo_ttft": 1.5, "slo_tpot": 0.05}),
    Server("heavy-tails", corner(1.5), rate=4.5, sizes=(500, 100), spread=(1.6, 1.2), seed=4,
           slos={"slo_ttft": 1.5, "slo_tpot": 0.05}),
)  # fmt: skip


def published(folder: Path) -> Server:
    """Return the server of the public tables of an RTX 4090."""
    step = tabulated(folder / "rtx4090-llama-3.1-8b" / "profile")
    return Server("rtx4090-tables", step, gpu="rtx4090", kv=41_408, n=240, rate=4.0,
                  slos={"slo_ttft": 1.0, "slo_tpot": 0.03})  # fmt: skip
