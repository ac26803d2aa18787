"""Policies of Shahout et al. 2024 (TRAIL): shortest remaining work first, limited preemption.

They read what an instance predicts: the first prediction of a request and, where the instance
carries a forecast, the tokens that are left as it runs. Without predictions they use true lengths.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from optsched.policies import policy
from optsched.policies.base import Batch, Fleet, Job, Rules, Runner, View
from optsched.problem.errors import InputError
from optsched.problem.schedule import EvictMode
from optsched.workloads.predict import estimates, forecast_of

BATCH_TOKENS = 512
"""Max tokens of a batch with chunked prefill, as in vLLM 0.5, on which the paper builds."""


class Trail(Runner):
    """All requests in one line, ranked anew before every batch (Shahout et al. 2024, section 3.3).

    Parameters
    ----------
    c : float
        C in [0, 1]. Let r be a request's first prediction. A request that holds KV and has
        produced floor(C r) tokens or more can no longer be preempted. C = 1 is SRPT.
    refine : bool
        Whether a request is ranked by the tokens that the latest prediction leaves. Otherwise it
        is ranked by its first prediction minus the tokens produced.
    keep : bool
        Whether the KV of a preempted request stays until another request needs the memory.
        Otherwise it is discarded at once.
    max_running, max_batch_tokens : int, optional
        Max requests and max tokens of a batch.

    Raises
    ------
    InputError
        If ``c`` is not in [0, 1], or if one of the two limits is below 1.

    Notes
    -----
    The paper says of preempted requests both that "the cache must keep the intermediate state"
    (section 2) and that they are discarded and recomputed when memory is out (section 4). That is
    ``keep``. To discard at once is the plainer reading of "discard", and costs more.
    """

    evict_mode: EvictMode = "recompute"
    hybrid = chunked = True  # unless the instance forbids it

    def __init__(
        self,
        *,
        c: float = 0.8,
        refine: bool = True,
        keep: bool = False,
        max_running: int | None = None,
        max_batch_tokens: int | None = BATCH_TOKENS,
    ) -> None:
        if not 0 <= c <= 1:
            raise InputError(f"c: found {c!r}; expected 0 <= c <= 1")
        for name, value in (("max_running", max_running), ("max_batch_tokens", max_batch_tokens)):
            if value is not None and value < 1:
                raise InputError(f"{name}: found {value!r}; expected an integer >= 1")

        self.c, self.refine, self.keep = c, refine, keep
        self.max_running, self.max_batch_tokens = max_running, max_batch_tokens

    def place(self, view: View, i: int) -> tuple[bool, float, float, int]:
        """Return the key by which the line is sorted, ascending.

        Parameters
        ----------
        view : View
        i : int
            The request.

        Returns
        -------
        tuple of bool, float, float and int
            Whether it may be preempted, its predicted tokens left, its arrival and its index.
        """
        beyond = i in view.running and view.generated[i] >= math.floor(self.c * view.predicted[i])
        left = max(1.0, float(view.predicted[i] - view.generated[i]))
        if self.refine:
            left = float(view.remaining[i])

        return not beyond, left, float(view.arrival[i]), i

    def batch(self, view: View) -> Batch:
        """Return the next batch.

        There are ``max_running`` seats. In the order of the line each request takes a seat and
        the KV that it will hold, which is that of the whole input from its admission on. A
        running request that finds no room loses its seat, and no waiting request behind it is
        admitted. Decodes get the batch's tokens first, except those that a prefill at the head of
        the line needs (one token where it may be split). Prefills get the rest in the order of
        the line.

        Parameters
        ----------
        view : View

        Returns
        -------
        Batch

        Notes
        -----
        Where an instance keeps phases apart, the head of the line decides which phase runs. Where
        it forbids chunks, a prefill beyond ``max_batch_tokens`` runs alone once it is the head.
        """
        limits = view.limits
        own_batch = self.max_batch_tokens or math.inf
        hard_batch = limits.max_batch_tokens or math.inf
        hard_prefill = limits.max_prefill_tokens or math.inf
        hard_running = limits.max_running or math.inf
        most_batch = min(own_batch, hard_batch)
        seats = min(self.max_running or math.inf, hard_running)
        line = sorted([*view.running, *view.waiting], key=lambda i: self.place(view, i))
        head = line[0]

        room = min(hard_batch, hard_prefill)
        need: float = 0 if view.decoding[head] else view.rest(head)
        if view.chunked:
            need = min(need, 1)
        elif need > room:
            need = 0  # this head will never run

        alone = need > own_batch
        n_decoding = sum(bool(view.decoding[i]) for i in view.running)
        decodes = 0 if alone else min(n_decoding, most_batch - need)
        prefills = room if alone else min(most_batch - decodes, hard_prefill)

        if not view.hybrid and need > 0:
            decodes = 0
            prefills = room if alone else min(most_batch, hard_prefill)

        if not view.hybrid and need == 0:
            prefills = 0

        tokens: dict[int, int] = {}
        lost: list[int] = []
        used = holders = 0
        refused = False

        for i in line:
            fresh = i in view.waiting
            if fresh and refused:
                continue

            work: float = 0
            if view.decoding[i]:
                work = 1 if decodes >= 1 else 0
                kv = view.kv_of(int(view.cached[i] + work))
            else:
                if not alone or i == head:
                    rest = view.rest(i)
                    work = min(rest, prefills) if view.chunked or rest <= prefills else 0

                kv = view.kv_of(int(view.prompt_tokens[i] + view.generated[i]))

            if (fresh and work == 0) or holders + 1 > seats or used + kv > view.kv_capacity:
                refused = True
                if not fresh:
                    lost.append(i)

                continue

            holders += 1
            used += kv
            if work == 0:
                continue

            tokens[i] = int(work)
            if view.decoding[i]:
                decodes -= 1
            else:
                prefills -= work

        if not tokens:
            return Batch()

        evicted = []
        for i in lost:
            kv = view.held([i])
            if self.keep and holders < hard_running and used + kv <= view.kv_capacity:
                holders += 1
                used += kv
            else:
                evicted.append(i)

        return Batch(tokens=tokens, evict=evicted)

    def begin(self, job: Job, workers: int) -> Fleet:
        """See `Runner.begin`.

        The decisions are those of `batch`, made by the loop in `optsched.policies.engine.rerank`.
        """
        from optsched.judge.life import UNLIMITED
        from optsched.judge.replay import limits_of
        from optsched.policies.engine import common, rerank as loop
        from optsched.policies.engine.online import evict_mode_of

        instance, mode = job.instance, evict_mode_of(self, job)
        forecast = forecast_of(instance)
        by_arrival = np.lexsort((np.arange(instance.n), instance.release))
        requests = common.new_requests(instance, loop.REQUEST_FIELDS)
        requests["first"] = estimates(instance)[0]
        requests["shield"] = np.floor(self.c * requests["first"])
        requests["band"] = loop.PREEMPTIBLE
        requests["place"][by_arrival] = np.arange(instance.n)
        limits = limits_of(instance, mode)
        own_batch = self.max_batch_tokens or UNLIMITED
        settings = loop.Settings(
            limits,
            float(instance.clock_origin),
            int(forecast.every),
            self.refine,
            self.keep,
            own_batch,
            min(own_batch, limits.max_batch_tokens),
            min(self.max_running or UNLIMITED, limits.max_running),
        )
        lines = np.empty((workers, 3, instance.n + 1), dtype=np.int64)

        def step(w: int, state: Any, queue: Any, columns: Any, until: float) -> Any:
            return loop.run(
                requests, state, settings, job.cost.array, queue,
                forecast.offsets, forecast.remaining, columns, lines[w], until,
            )  # fmt: skip

        states = [common.new_state(loop.STATE_FIELDS, instance) for _ in range(workers)]
        return common.Compiled(job, mode, requests, states, step, limits.chunked)


@policy(
    "trail",
    "shortest predicted remaining output first, preempting requests early in their run",
    clairvoyant=True,
    paper="Shahout et al. 2024, section 3.3",
)
def trail(
    *,
    c: float = 0.8,
    refine: bool = True,
    keep: bool = False,
    max_running: int | None = None,
    max_batch_tokens: int | None = BATCH_TOKENS,
) -> Trail:
    """Return `Trail` with the paper's C; ``refine=false`` is the paper's Trail-BERT.

    Parameters
    ----------
    c, refine, keep, max_running, max_batch_tokens
        As for `Trail`.

    Returns
    -------
    Trail
    """
    return Trail(
        c=c, refine=refine, keep=keep, max_running=max_running, max_batch_tokens=max_batch_tokens
    )


@policy(
    "srpt",
    "shortest predicted remaining output first, preempting at any time",
    clairvoyant=True,
    paper="Shahout et al. 2024, section 3.3 (C = 1)",
)
def srpt(
    *,
    refine: bool = True,
    keep: bool = False,
    max_running: int | None = None,
    max_batch_tokens: int | None = BATCH_TOKENS,
) -> Trail:
    """Return `Trail` with C = 1.

    Parameters
    ----------
    refine, keep, max_running, max_batch_tokens
        As for `Trail`.

    Returns
    -------
    Trail

    Notes
    -----
    A request may be preempted until it has produced as many tokens as its first prediction. After
    that it is not preempted, since it may end with any token.
    """
    return Trail(
        c=1.0, refine=refine, keep=keep, max_running=max_running, max_batch_tokens=max_batch_tokens
    )


@policy(
    "vllm-sjf",
    "vLLM with chunked prefill: new requests first, by predicted output",
    clairvoyant=True,
    paper="Shahout et al. 2024, section 4",
)
def vllm_sjf(*, max_running: int | None = None) -> Rules:
    """Return rules that take waiting requests before running ones, by first prediction.

    A running request is never preempted for a shorter one. When KV is short, the latest arrival
    is evicted, and waits at its place in the order.

    Parameters
    ----------
    max_running : int, optional
        The max number of running requests.

    Returns
    -------
    Rules
    """
    return Rules(
        order="output",
        groups=("waiting", "running"),
        chunked=True,
        max_prefill_tokens=BATCH_TOKENS,
        max_running=max_running,
    )


@policy(
    "vllm-fcfs",
    "vLLM with chunked prefill: new requests first, by arrival",
    paper="Shahout et al. 2024, section 4",
)
def vllm_fcfs(*, max_running: int | None = None) -> Rules:
    """Return the rules of the paper's baseline: those of `vllm_sjf` in the order of arrival.

    Parameters
    ----------
    max_running : int, optional
        The max number of running requests.

    Returns
    -------
    Rules
    """
    return Rules(
        groups=("waiting", "running"),
        chunked=True,
        max_prefill_tokens=BATCH_TOKENS,
        max_running=max_running,
    )
