"""`Windows` in plain Python, as in Choi et al. 2025: the twin of the compiled loop.

Slow and short; the tests demand the same schedule from both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optsched import Problem
from optsched.costs.batch import EMPTY, add_decode, add_prefill, batch_time
from optsched.policies.base import Windows
from optsched.problem.errors import LoopError
from optsched.problem.schedule import Schedule, from_batches
from optsched.workloads.predict import estimates, forecast_of

INFINITE = float("inf")


@dataclass(eq=False)
class _Worker:
    """A worker: its unfinished requests, the batch of the window that runs, and its end."""

    requests: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    until: float | None = None


class _Run:
    """The state of one run: what every request has produced and cached, and the batches."""

    def __init__(self, problem: Problem, rules: Windows) -> None:
        instance, cost = problem.instance, problem.cost_model
        self.instance, self.rules, self.cost = instance, rules, cost
        self.forecast = forecast_of(instance)
        self.predicted = estimates(instance)[0]
        self.produced = [0] * instance.n
        self.seen = [0] * instance.n  # most tokens ever produced
        self.cached: dict[int, int] = {}
        self.workers = [_Worker() for _ in range(problem.workers)]
        self.rows: list[dict[int, int]] = []
        self.evictions: list[list[int]] = []
        self.places: list[int] = []
        self.starts: list[float] = []

    def priority(self, i: int) -> tuple[float, float, int]:
        """Return what a worker's requests are sorted by."""
        arrival = float(self.instance.arrival[i])
        length = {
            "arrival": 0.0,
            "remaining": self.forecast.left(i, self.seen[i], self.produced[i]),
            "total": float(self.predicted[i]),
        }[self.rules.order]
        return self.rules.aging * arrival + length, arrival, i

    def input(self, i: int) -> int:
        return int(self.instance.prompt_tokens[i]) + self.produced[i]

    def finished(self, i: int) -> bool:
        return self.produced[i] == self.instance.output_tokens[i]

    def kv(self, tokens: int) -> int:
        block, tokens = self.instance.kv_block_tokens, tokens + self.instance.kv_offset
        if self.instance.kv_window is not None:
            last, sliding, layers = self.instance.kv_window
            tokens -= max(0, tokens - last) * sliding // layers
        return block * -(-tokens // block)

    def held(self, requests: list[int], row: dict[int, int] | None = None) -> int:
        """Return the KV that requests hold after a row of a batch."""
        after = {i: self.cached.get(i, 0) + (row or {}).get(i, 0) for i in requests}
        return sum(self.kv(tokens) for tokens in after.values() if tokens)

    def window(self, worker: _Worker, now: float) -> None:
        """Choose a batch and run it for a window."""
        instance, limits = self.instance, self.instance.limits
        most_tokens = limits.max_batch_tokens or INFINITE
        most_running = limits.max_running or INFINITE
        line = sorted(worker.requests, key=self.priority)
        batch: list[int] = []
        need = 0
        for i in line:
            need += self.kv(self.input(i))
            if len(batch) == min(self.rules.batch_size, most_tokens, most_running):
                break
            if need > instance.kv_capacity:
                break
            batch.append(i)
        worker.batch = list(batch)
        quota = dict.fromkeys(batch, self.rules.window)
        prefills = [i for i in batch if i not in self.cached]
        while not any(self.finished(i) for i in batch) and any(quota[i] for i in batch):
            row: dict[int, int] = {}
            for i in prefills:
                if sum(row.values()) + self.input(i) > min(
                    most_tokens, limits.max_prefill_tokens or INFINITE
                ):
                    break
                row[i] = self.input(i)
            if prefills and not row:
                raise LoopError(f"request {prefills[0]}: its input is not split")
            prefills = prefills[len(row) :]
            fresh = bool(row)
            leaving: list[int] = []  # members that cannot go on beside the others
            if not fresh:
                row = {i: 1 for i in batch if quota[i]}
                staying = list(batch)
                while self.held(staying, row) > instance.kv_capacity:
                    leaving.append(staying.pop())
                    row.pop(leaving[-1], None)
                if not row:
                    break
                batch = staying
            evicted: list[int] = []
            paused = [i for i in line if i in self.cached and i not in worker.batch]
            while paused:
                holders = [i for i in worker.requests if i in self.cached]
                if (
                    self.held([*holders, *(row if fresh else ())], row) <= instance.kv_capacity
                    and len(holders) + fresh * len(row) <= most_running
                ):
                    break
                evicted.append(paused.pop())
                del self.cached[evicted[-1]]
            for victim in leaving:
                evicted.append(victim)
                del self.cached[victim]
            for victim in evicted:
                if instance.in_rounds:
                    self.produced[victim] = 0
            self.starts.append(now)
            sums = EMPTY
            for i, c in row.items():
                sums = add_prefill(sums, c, 0) if fresh else add_decode(sums, self.cached[i])
            now += batch_time(self.cost.array, sums)
            self.rows.append(row)
            self.evictions.append(evicted)
            self.places.append(self.workers.index(worker))
            for i, c in row.items():
                self.cached[i] = self.cached.get(i, 0) + c
                self.produced[i] += 1
                self.seen[i] = max(self.seen[i], self.produced[i])
                quota[i] -= 1
        worker.until = now
        for i in batch:
            if self.finished(i):
                del self.cached[i]


def simulate_windows(problem: Problem, rules: Windows) -> Schedule:
    """Return the schedule of `optsched.run`, decided request by request.

    Raises
    ------
    LoopError
        An input that a batch cannot hold.
    """
    run, instance = _Run(problem, rules), problem.instance
    coming = sorted(range(instance.n), key=lambda i: (instance.arrival[i], i))
    while coming or any(worker.requests for worker in run.workers):
        times = [worker.until for worker in run.workers if worker.until is not None]
        now = min([*times, *(float(instance.arrival[i]) for i in coming[:1])])
        for worker in run.workers:
            if worker.until == now:
                worker.requests = [i for i in worker.requests if not run.finished(i)]
                worker.batch, worker.until = [], None
        while coming and instance.arrival[coming[0]] <= now:
            fewest = min(run.workers, key=lambda worker: len(worker.requests))
            fewest.requests.append(coming.pop(0))
        for worker in run.workers:
            if worker.until is None and worker.requests:
                run.window(worker, now)
    line = sorted(range(len(run.rows)), key=lambda j: (run.starts[j], run.places[j], j))
    for name in ("rows", "evictions", "places"):
        setattr(run, name, [getattr(run, name)[j] for j in line])
    batch_offsets, evicted_offsets = [0], [0]
    for row, evicted in zip(run.rows, run.evictions, strict=True):
        batch_offsets.append(batch_offsets[-1] + len(row))
        evicted_offsets.append(evicted_offsets[-1] + len(evicted))
    return from_batches(
        batch_offsets,
        [i for row in run.rows for i in row],
        [c for row in run.rows for c in row.values()],
        instance=instance,
        evicted_offsets=evicted_offsets,
        evicted=[i for evicted in run.evictions for i in evicted],
        worker=run.places if problem.workers > 1 else None,
        evict_mode="restart" if instance.in_rounds else "recompute",
        cost_model_sha256=problem.cost_model.sha256,
    )
