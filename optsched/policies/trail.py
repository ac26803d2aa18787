"""Policies of Shahout et al. 2024 (TRAIL): shortest remaining work first, limited preemption.

They read what an instance predicts: the first prediction of a request and, where the instance
carries a forecast, the tokens that are left as it runs. Without predictions they use true lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optsched.policies import policy
from optsched.policies.base import Batch, Job, Runner, View, Workers
from optsched.problem.columns import check_fields
from optsched.problem.errors import InputError
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates, forecast_of

if TYPE_CHECKING:  # the loop is loaded by those who run it
    from optsched.judge.life import Records

BATCH_TOKENS = 512
"""Max tokens of a batch with chunked prefill, as in vLLM 0.5, on which the paper builds."""


@policy(
    "trail",
    "shortest predicted remaining output first, preempting requests early in their run",
    clairvoyant=True,
    paper="Shahout et al. 2024, section 3.3",
)
@dataclass(kw_only=True, eq=False)
class Trail(Runner):
    """All requests in one line, ranked anew before every batch (Shahout et al. 2024, section 3.3).

    docs/policies/predictions.md has the parameters. The paper says of preempted requests both that
    "the cache must keep the intermediate state" (section 2) and that they are discarded and
    recomputed when memory is out (section 4). That is ``keep``. To discard at once is the plainer
    reading of "discard".
    """

    evict_mode: EvictMode = field(default="recompute", init=False)
    hybrid: ClassVar[bool] = True  # unless the instance forbids it, as below
    chunked: ClassVar[bool] = True

    c: float = 0.8
    refine: bool = True
    keep: bool = False
    max_running: int | None = None
    max_batch_tokens: int | None = BATCH_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.c <= 1:
            raise InputError(f"c: found {self.c!r}; expected 0 <= c <= 1")
        check_fields(self, {"max_running": 1, "max_batch_tokens": 1})

    def batch(self, view: View) -> Batch:
        """Return the next batch (docs/policies/predictions.md).

        A request takes the KV of its whole input from its admission on. Prefills get what tokens
        decodes leave, in the order of the line, and at its head what they need (one token where it
        may be split). The compiled loop decides: it is given records of what the view shows.
        """
        from optsched.judge import life, replay
        from optsched.policies.engine import common, rerank as loop

        ids, running = np.array([*view.running, *view.waiting]), len(view.running)
        n, prompt, predicted = len(ids), view.prompt_tokens[ids], view.predicted[ids]
        requests = life.new_requests(prompt, predicted, loop.REQUEST_FIELDS)
        requests["produced"], requests["cached"] = view.generated[ids], view.cached[ids]
        requests["decoding"] = view.decoding[ids]

        # The loop's requests are numbered as in `ids`, the running ones first; ties by arrival.
        requests["place"][np.lexsort((ids, view.arrival[ids]))] = np.arange(n)
        remaining = view.remaining if self.refine else view.predicted - view.generated
        requests["key"] = np.maximum(1.0, remaining[ids])  # nobody is done, so one is left
        # Who has produced a share c of its first prediction is not preempted any more.
        shielded = requests["produced"] >= np.floor(self.c * view.predicted[ids])
        shielded[running:] = False  # a request that waits has been preempted, or is new
        requests["band"] = np.where(shielded, loop.SHIELDED, loop.PREEMPTIBLE)

        # The state, the running requests in line 1 and the waiting ones as a heap in line 0.
        # The keys are given, so the loop asks no forecast: the 1 stands for nothing.
        empty = np.zeros(1, dtype=life.record(*common.STATE, *loop.STATE_FIELDS))
        state = self._settings_in(empty, 1)
        state["running"] = running
        lines = np.empty((3, n + 1), dtype=np.int64)
        lines[1, :running] = np.arange(running)
        for i in range(running, n):
            common.push(requests, lines[0], state[0], i)

        # The limits, and columns for one batch.
        kv = (view.kv_capacity, view.kv_offset, view.kv_block_tokens, view.kv_window)
        given = view.limits
        values = given.max_batch_tokens, given.max_prefill_tokens, given.max_running
        batch, prefill, seats = (value or life.UNLIMITED for value in values)
        # As in `Limits`: hybrid, chunked, eviction, restart.
        switches = (view.hybrid, view.chunked, True, view.evict_mode == "restart")
        limits = replay.Limits(*kv, batch, prefill, seats, *switches)
        columns = common.one_batch_columns(n)
        coming = usage = np.empty(0, dtype=np.int64)  # the loop looks at neither
        cost, until = view.cost.array, np.inf
        worker = common.Worker(limits, cost, coming, until, columns, usage, lines)
        loop.decide(requests, state[0], worker)
        entries = columns.entries[:, : state[0].entries]
        tokens = dict(zip(ids[entries[0]].tolist(), entries[1].tolist(), strict=True))
        return Batch(tokens, ids[columns.evicted[: state[0].evicted]].tolist())

    def _settings_in(self, state: Records, every: int) -> Records:
        """Write into a new state what this policy says; return it."""
        from optsched.judge.life import UNLIMITED

        state["every"], state["refine"], state["keep"] = every, self.refine, self.keep
        state["max_batch_tokens"] = self.max_batch_tokens or UNLIMITED
        state["max_running"] = self.max_running or UNLIMITED
        return state

    def begin(self, job: Job, workers: int) -> Workers:
        """See `Runner.begin`.

        The decisions are those of `batch`, made by the loop in `optsched.policies.engine.rerank`.
        """
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, rerank as loop
        from optsched.policies.engine.online import evict_mode_of

        instance, mode = job.instance, evict_mode_of(self, job)
        forecast = forecast_of(instance)
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["first"] = estimates(instance)[0]
        requests["shield"] = np.floor(self.c * requests["first"])
        requests["band"] = loop.PREEMPTIBLE
        limits = limits_of(instance, mode)
        empty = common.new_state(loop.STATE_FIELDS, instance)
        state = self._settings_in(empty, int(forecast.every))
        run = common.Loop(loop.run, [(forecast.offsets, forecast.remaining)])
        return common.Compiled(job, requests, state, limits, run, workers)


@policy(
    "srpt",
    "shortest predicted remaining output first, preempting at any time",
    clairvoyant=True,
    paper="Shahout et al. 2024, section 3.3 (C = 1)",
)
@dataclass(kw_only=True, eq=False)
class Srpt(Trail):
    """`Trail` with C = 1: preempted until it has produced as many tokens as first predicted."""

    c: float = field(default=1.0, init=False)
