"""Schedules of batches in seconds that are better than every online policy's, at trace scale.

One compiled rule with free parameters is run over the whole instance, some 10,000 times faster
than the requests arrive, and its parameters are searched: first a fixed list that has done well,
then random changes to the best. The rule is MC-SF's admission in a given order, with two brakes:

*Prefills together.* Every batch that prefills pays `prefill_base` and holds up all that decode,
so waiting requests are admitted only when ``together = q + r sqrt(N)`` of them fit at once, N the
number of requests in the system.

*Fewer at a time.* With few requests in the system, a batch of all of them is longer than the sum
of latencies wants: N identical requests are served best about ``sqrt(N f / w)`` at a time, f the
fixed cost of a batch and w a request's own part of it. At most ``c + d sqrt(N)`` run.

*Order.* Own work (`optsched.policies.runner.own_work`) to which a share of the decode steps' work,
and for single requests a random factor, may be added.

Everything is judged by `optsched.evaluate`. The schedules of a few policies, or those given, are
among the candidates: what comes back is never worse than they are.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from optsched.costs.cost import CostModel, cost_for
from optsched.judge.evaluate import Evaluation, evaluate
from optsched.judge.life import EMPTY, UNLIMITED, add_decode, add_prefill, batch_time
from optsched.policies.base import own_work
from optsched.policies.engine.common import grown
from optsched.policies.engine.simulate import simulate
from optsched.problem.errors import NoIncumbentError, OptschedError, UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.problem.schedule import Schedule, from_batches

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FREE = 1e18
_STARTS: tuple[tuple[float, ...], ...] = (
    # q, r, c, d, weight of the decode steps' work
    (1.0, 0.0, _FREE, 0.0, 0.0),
    (6.0, 0.0, _FREE, 0.0, 0.0),
    (0.0, 0.4, _FREE, 0.0, 0.0),
    (0.0, 0.3, 2.0, 2.0, 0.0),
    (1.0, 0.0, 2.0, 2.0, 0.0),
    (8.0, 0.0, _FREE, 0.0, 0.0),
    (0.0, 0.5, 2.0, 8.0, 0.0),
)
_PATIENCE = 400
"""Candidates in a row that bring nothing, after which the search ends."""
POLICIES = ("least-work", "rank-output", "mc-sf", "sarathi-pc", "vllm-hy", "fcfs")


@njit(cache=True)
def _place(wait: Ints, waiting: int, rank: Ints, i: int) -> int:
    """Insert a request among those that wait, ascending in rank; return its place."""
    low, high = 0, waiting
    while low < high:
        middle = (low + high) // 2
        if rank[wait[middle]] < rank[i]:
            low = middle + 1
        else:
            high = middle
    for k in range(waiting, low, -1):
        wait[k] = wait[k - 1]
    wait[low] = i
    return low


@njit(cache=True)
def serve(
    arrival: Floats,
    prompt: Ints,
    output: Ints,
    capacity: int,
    offset: int,
    hard_batch: int,
    hard_prefill: int,
    hard_running: int,
    hybrid: bool,
    cost: Floats,
    by_arrival: Ints,
    rank: Ints,
    q: float,
    r: float,
    c: float,
    d: float,
    enough: float,
) -> Any:
    """Run the rule (module's text).

    Returns
    -------
    tuple
        The sum of completion times and the columns batch_offsets, request, tokens. The sum is
        infinite, and the columns useless, as soon as it exceeds ``enough`` or a prompt does not
        fit into the hard limits.
    """
    n = arrival.shape[0]
    wait = np.empty(n + 1, np.int64)
    running = np.empty(n, np.int64)
    admitted = np.empty(n, np.int64)
    produced = np.zeros(n, np.int64)
    usage = np.zeros(4096, np.int64)  # KV after each batch, if all that run go on
    offsets = np.zeros(1024, np.int64)
    request = np.empty(4096, np.int64)
    tokens = np.empty(4096, np.int64)
    longest = int(output.max())
    waiting = n_running = batches = entries = arrived = done = 0
    now = total = 0.0
    retry = True  # something changed since admission was tried
    while done < n and total <= enough:
        while arrived < n and arrival[by_arrival[arrived]] <= now:
            retry = _place(wait, waiting, rank, by_arrival[arrived]) <= q + r * n or retry
            waiting += 1
            arrived += 1
        if n_running == 0 and waiting == 0:
            now = arrival[by_arrival[arrived]]
            continue
        usage = grown(usage, batches + longest + 2)
        size = np.sqrt(n_running + waiting)
        most = min(float(hard_running), c + d * size, float(hard_batch))
        joined = held_tokens = 0
        if waiting > 0 and (retry or n_running == 0):
            while joined < waiting and (n_running + joined < most or n_running + joined == 0):
                i = wait[joined]
                beside = n_running if hybrid else 0
                room = min(hard_prefill, hard_batch - beside) - held_tokens
                fits = prompt[i] <= room
                for ahead in range(output[i], 0, -1):
                    if not fits:
                        break
                    fits = usage[batches + ahead] + prompt[i] + offset + ahead - 1 <= capacity
                if not fits:
                    break
                for ahead in range(1, output[i] + 1):
                    usage[batches + ahead] += prompt[i] + offset + ahead - 1
                admitted[joined] = i
                held_tokens += prompt[i]
                joined += 1
            blocked = joined < waiting and prompt[wait[joined]] + held_tokens > hard_prefill
            if joined < q + r * size and n_running > 0 and not blocked:
                for k in range(joined):
                    i = admitted[k]
                    for ahead in range(1, output[i] + 1):
                        usage[batches + ahead] -= prompt[i] + offset + ahead - 1
                joined = held_tokens = 0
                retry = False
            for k in range(joined, waiting):
                wait[k - joined] = wait[k]
            waiting -= joined
            if joined == 0 and n_running == 0:
                return np.inf, offsets[:1], request[:0], tokens[:0]
        decodes = n_running if hybrid or joined == 0 else 0
        request = grown(request, entries + decodes + joined)
        tokens = grown(tokens, entries + decodes + joined)
        sums = EMPTY
        for k in range(decodes):
            i = running[k]
            request[entries + k], tokens[entries + k] = i, 1
            sums = add_decode(sums, prompt[i] + produced[i] - 1)
        entries += decodes
        for k in range(joined):
            i = admitted[k]
            request[entries + k], tokens[entries + k] = i, prompt[i]
            sums = add_prefill(sums, prompt[i], 0)
        entries += joined
        now += batch_time(cost, sums)
        if decodes == 0 and n_running > 0:  # those that run stand still for this batch
            for k in range(n_running):
                i = running[k]
                left = output[i] - produced[i]
                for ahead in range(1, left + 1):
                    usage[batches + ahead] -= prompt[i] + offset + produced[i] + ahead - 1
                usage[batches + 1] += prompt[i] + offset + produced[i] - 1
                for ahead in range(1, left + 1):
                    usage[batches + 1 + ahead] += prompt[i] + offset + produced[i] + ahead - 1
        batches += 1
        offsets = grown(offsets, batches + 1)
        offsets[batches] = entries
        kept = 0
        for k in range(n_running):
            i = running[k]
            produced[i] += decodes > 0
            if produced[i] == output[i]:
                total += now
                done += 1
                retry = True
            else:
                running[kept] = i
                kept += 1
        n_running = kept
        for k in range(joined):
            i = admitted[k]
            produced[i] = 1
            if output[i] == 1:
                total += now
                done += 1
                retry = True
            else:
                running[n_running] = i
                n_running += 1
    if done < n:
        return np.inf, offsets[:1], request[:0], tokens[:0]
    return total, offsets[: batches + 1], request[:entries], tokens[:entries]


def improve(
    instance: Instance,
    cost_model: CostModel | str | None = None,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
    stop: threading.Event | None = None,
    known: Sequence[Schedule] = (),
    policies: Sequence[str] = POLICIES,
    objective: str = "tel",
    admit: Callable[[Evaluation], bool] | None = None,
) -> tuple[Schedule, str]:
    """Return the best schedule found within the time, and its origin.

    Parameters
    ----------
    instance : Instance
        In seconds.
    cost_model : BatchCost, str or path
    time_limit_s : float
        No further candidate starts after that; the policies and the first of the list always run.
    seed : int
    progress : callable, optional
        Called as ``progress(origin, value)`` with every schedule that is better than those before.
    stop : threading.Event, optional
        When set, what has been found is returned.
    known : sequence of Schedule
        Schedules to start from.
    policies : sequence of str
        Policies to start from.
    objective : str
        The metric to minimize. The rule was made for total latency.
    admit : callable, optional
        Which schedules count; default all.

    Returns
    -------
    schedule : Schedule
    origin : str
        The policy, or the parameters of the rule.

    Raises
    ------
    UsageError
        An instance in rounds.
    NoIncumbentError
        No schedule that counts was found.
    """
    if instance.in_rounds:
        raise UsageError("search: the offline search is for instances in seconds")
    cost = cost_for(instance, cost_model)
    begin = time.perf_counter()
    best: Schedule | None = None
    least, origin = np.inf, ""

    def judge(schedule: Schedule, name: str) -> None:
        nonlocal best, least, origin
        with warnings.catch_warnings():  # the caller's judgement says it once
            warnings.simplefilter("ignore")
            evaluation = evaluate(instance, schedule, cost)
        if admit is not None and not admit(evaluation):
            return
        value = evaluation.metrics[objective]
        if value is not None and value < least:
            best, least, origin = schedule, float(value), name
            if progress is not None:
                progress(name, least)

    for schedule in known:
        judge(schedule, "known")
    for policy in policies:
        try:
            judge(simulate(instance, policy, cost, seed=seed), policy)
        except OptschedError:
            continue  # it splits no prefill, or never comes to an end
    arrival = instance.release
    prompt, output = instance.prompt_tokens, instance.output_tokens
    work = own_work(prompt, output, cost)
    decode_work = work - own_work(prompt, np.ones_like(output), cost)
    by_arrival = np.lexsort((np.arange(instance.n), arrival))
    limits = instance.limits
    run: Any = serve
    in_total = objective == "tel"
    generator = np.random.default_rng(seed)
    factor = np.ones(instance.n)
    chosen = np.array(_STARTS[0])

    def attempt(parameters: Floats, factors: Floats) -> bool:
        nonlocal chosen, factor
        rank = np.empty(instance.n, dtype=np.int64)
        key = (work + parameters[4] * decode_work) * factors
        rank[np.lexsort((np.arange(instance.n), arrival, key))] = np.arange(instance.n)
        total, offsets, request, tokens = run(
            arrival, prompt, output, instance.kv_capacity, instance.kv_offset,
            limits.max_batch_tokens or UNLIMITED, limits.max_prefill_tokens or UNLIMITED,
            limits.max_running or UNLIMITED, instance.hybrid_batching is not False, cost.array,
            by_arrival, rank, *parameters[:4],
            (least + arrival.sum()) * (1 + 1e-12) if in_total else np.inf,
        )  # fmt: skip
        if not total - arrival.sum() < (least if in_total else np.inf):
            return False
        schedule = from_batches(
            offsets, request, tokens, instance=instance, evict_mode="recompute",
            cost_model_sha256=cost.sha256,
        )  # fmt: skip
        before = least
        try:
            judge(schedule, "search")
        except ViolationError:  # without hybrid batches, KV of those that stand still can overflow
            return False
        if least < before:
            chosen, factor = parameters, factors
            return True
        return False

    tried = stale = 0
    while tried == 0 or (
        stale < _PATIENCE
        and time.perf_counter() - begin < time_limit_s
        and not (stop is not None and stop.is_set())
    ):
        stale += 1
        if tried < len(_STARTS):
            better = attempt(np.array(_STARTS[tried]), factor)
        else:
            parameters, factors = chosen.copy(), factor
            if generator.random() < 0.6:
                k = int(generator.integers(5))
                if k < 4:
                    parameters[k] = max(0.0, parameters[k] * generator.uniform(0.7, 1.4))
                    parameters[k] += generator.uniform(0, 0.3) if k in (1, 3) else 0.0
                else:
                    parameters[k] += generator.normal() * 0.1
            else:  # requests of a window of arrivals move up or down
                width = int(generator.integers(1, max(2, instance.n // 10)))
                at = int(generator.integers(0, max(1, instance.n - width)))
                factors = factor.copy()
                pick = by_arrival[at : at + width]
                pick = pick[generator.random(len(pick)) < generator.uniform(0.02, 0.5)]
                factors[pick] *= np.exp(generator.normal(0, 0.3, len(pick)))
            better = attempt(parameters, factors)
        tried += 1
        stale = 0 if better else stale
    if best is None:
        raise NoIncumbentError("search: no policy finds a schedule; chunked prefill may be needed")
    return best, origin
