"""`Rules` asked batch by batch, where nobody knows all requests in advance.

What decides is the loop that runs them elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.policies.base import Batch, View
from optsched.policies.rules import Rules
from optsched.policies.runner import Job

if TYPE_CHECKING:
    from optsched.judge.life import Ints

LASTING = (
    "estimate", "peak", "promoted", "band", "key", "place", "first_at", "produced", "leaving",
)  # fmt: skip
"""Fields of a request that its rules remember from one batch to the next."""


class Stepwise:
    """A policy object that answers what rules say.

    `job`: the requests that are known so far, and the cost model.
    """

    def __init__(self, rules: Rules, job: Job) -> None:
        self.rules = rules
        _, self.evict_mode, self.hybrid, self.chunked = rules.on(job.instance)
        self.queued: set[int] = set()  # requests that have waited
        self.batched: dict[int, int] = {}  # KV of each request of the last batch, after it
        requests, self.state, self.limits = rules.prepared(job)
        self.state["short"] = True  # nobody knows the lengths, so a prediction may be too short
        self.requests = requests[:0]  # nothing is known yet: `learn` makes the records
        self.learn(job)

    def learn(self, job: Job) -> None:
        """Take in a job that has further requests at its end."""
        old, self.requests = self.requests, self.rules.prepared(job)[0]
        self.first_arrival = job.instance.first_arrival
        self.requests["first_at"] = np.inf  # unknown before the first token
        for name in LASTING:
            self.requests[name][: old.size] = old[name]

    def batch(self, view: View) -> Batch:
        """See `Policy.batch`. The view goes into the records, and the loop forms one batch."""
        from optsched.judge.memory import kv_of
        from optsched.policies.engine import common, prefills, rules as loop

        requests, limits, s = self.requests, self.limits, self.state[0]
        running, projection = self._load_view(view)
        size = len(running) + len(view.waiting)  # a batch has at most one entry of each
        # What the loop works on: the queue as a heap, the running requests, a projection of KV, and
        # the entries and evictions of one batch.
        heap, active = np.zeros((2, size + 1), dtype=np.int64)
        active[: len(running)] = running
        batch = common.one_batch_columns(size)
        buffers = heap, active, projection, batch.entries, batch.evicted
        w = prefills.Worker(*buffers, limits, view.cost.array)
        waiting = np.array(view.waiting, dtype=np.int64)  # in the order in which they began to wait
        queued = np.array([i in self.queued for i in view.waiting], dtype=np.bool_)
        loop.count_in(requests, s, w, waiting, queued, view.generator)
        self.queued.update(view.waiting)
        loop.decide(requests, s, w, view.generator, None)
        evicted = batch.evicted[: s.evicted].tolist()
        if s.stall:
            return Batch(evict=evicted, stall=True)

        tokens = dict(zip(*batch.entries[:, : s.entries].tolist(), strict=True))
        if tokens:  # an answer without tokens is no batch, so the last one stays
            sizes = requests["prompt"] + requests["produced"]
            self.batched = {i: kv_of(int(sizes[i]), limits) for i in tokens}

        return Batch(tokens, evicted)

    def _load_view(self, view: View) -> tuple[list[int], Ints]:
        """Write into the records what a view shows.

        Return the running requests in the order of the rules, and an empty projection of their KV.
        """
        from optsched.policies.engine import common, prefills

        requests, s = self.requests, self.state[0]
        order, place = requests["order"], requests["seq"].__getitem__
        running = sorted(view.running, key=place)
        # In the group of all, running requests stand in the scheduler's order; ties as above.
        if "all" in self.rules.groups:
            running.sort(key=order.__getitem__)

        ids = np.array([*running, *view.waiting])
        now, produced = view.now - self.first_arrival, view.generated[ids]
        requests["produced"][ids], requests["cached"][ids] = produced, view.cached[ids]
        requests["decoding"][ids] = view.decoding[ids]
        # Nobody says when a first token came: a view that shows it for the first time is taken.
        first_at = np.minimum(requests["first_at"][ids], now)
        requests["first_at"][ids] = np.where(produced > 0, first_at, np.inf)
        # What these were in the last batch no longer holds; `count_in` allocates KV anew.
        for name in ("leaving", "in_batch", "allocated"):
            requests[name][ids] = 0

        s.now, s.outcome, s.cleared_at, s.running = now, common.DONE, -1, len(running)
        zero = ("waiting", "entries", "evicted", "held", "reserved", "over", "partial", "clearings")
        for name in zero:
            s[name] = 0

        # A request of the last batch that the view no longer shows has produced its last token.
        finished = [
            i for i in set(self.batched).difference(ids.tolist()) if not requests[i].leaving
        ]
        requests["leaving"][finished] = True
        requests["produced"][finished] += 1
        for i in finished:
            prefills.note_end(requests[i], s, view.cost.array)

        s.freed = sum(self.batched[i] for i in finished) if s.make_room else 0
        lengths = (requests["estimate"][ids], requests["second"][ids], produced + 1)
        # Long enough for the last projected batch of any request, numbered from 1, and one more.
        usage = np.zeros(max(int(column.max()) for column in lengths) + 2, dtype=np.int64)
        return running, usage
