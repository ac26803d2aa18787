"""Drives an online policy to a Schedule: compiled for rules and windows, open for objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.batch import EMPTY, Sums, add_decode, add_prefill, batch_time
from optsched.costs.cost import CostModel, cost_for
from optsched.policies import make_policy
from optsched.policies.base import (
    Batch,
    Policy,
    Rules,
    Scheduler,
    View,
    Windows,
    interval_ratio,
    waiting_rank,
)
from optsched.problem.errors import InputError, LoopError, PolicyError
from optsched.problem.instance import Instance
from optsched.problem.schedule import EvictMode, Schedule, from_batches, read_start
from optsched.workloads.predict import Predictor, estimates, forecast_of, predict

MAX_STALLED_BATCHES = 1_000_000
"""Batches without a completion (beyond the longest output) that count as an endless loop."""


_LONG_OUTPUT, _QUICK_STEPS = 1 << 15, 5_000_000_000
"""Tokens of an output, and batches times the longest output: see `quick_to_simulate`."""


def quick_to_simulate(instance: Instance) -> bool:
    """Whether policies may be run that nobody asked for, given that none can be interrupted.

    Some look ahead as far as the longest output in every batch, or start long runs over and over:
    with outputs of 10^5 tokens that takes minutes, whatever the time limit is.
    """
    longest = int(instance.output_tokens.max())
    batches = instance.volume.sum(dtype=np.float64) / instance.kv_capacity
    return bool(longest <= _LONG_OUTPUT or batches * longest <= _QUICK_STEPS)


def simulate(
    instance: Instance,
    policy: str | Scheduler,
    cost_model: CostModel | str | Path | None = None,
    *,
    seed: int = 0,
    predictor: Predictor | None = None,
) -> Schedule:
    """Run an online policy over an instance.

    Parameters
    ----------
    instance : Instance
    policy : str, Rules, Windows or Policy
        A specification (``"mc-sf"``, ``"vllm:eviction_free=true"``, ``"mine.py:MyPolicy"``), a
        scheduler as data (compiled), or an object with ``batch(view) -> Batch``.
    cost_model : BatchCost or str, optional
        Needed for an instance in seconds.
    seed : int
        For policies and predictors that draw at random.
    predictor : str, callable or array_like, optional
        Where the policy takes output lengths from; see `optsched.workloads.predict.predict`. A
        specification that names its own predictor overrides it.

    Returns
    -------
    Schedule
        Of kind ``"batches"``: decisions only, to be judged by `optsched.evaluate`.

    Raises
    ------
    LoopError
        The policy would go on for ever, or cannot go on.
    PolicyError
        A policy object that raises, names an unknown request or breaks a rule.
    InputError, UsageError
        An unknown policy, a cost model that does not fit the instance.
    """
    cost = cost_for(instance, cost_model)
    name = policy if isinstance(policy, str) else type(policy).__name__
    made: Scheduler
    if isinstance(policy, str):
        made, info = make_policy(policy)
        predictor = info.predictor or predictor
    else:
        made = policy
    told = instance if predictor is None else predict(instance, predictor, seed=seed)
    # What was predicted is no part of the problem that the schedule solves.
    if isinstance(made, Rules):
        return _simulate_rules(told, made, cost, name, seed, instance)
    if isinstance(made, Windows):
        return _simulate_windows(told, made, cost, name, instance)
    if hasattr(made, "compiled"):
        mode: EvictMode = "restart" if instance.in_rounds else _evict_mode(made, name)
        found = made.compiled(told, cost, mode)
        chunked = instance.chunked_prefill is not False
        return _schedule_of(found, instance, name, mode, cost, chunked)
    return _simulate_open(told, made, cost, name, seed, instance)


def effective(rules: Rules, instance: Instance) -> tuple[Rules, EvictMode, bool, bool]:
    """Return the rules for an instance's time unit, their eviction mode, hybrid and chunking.

    A switch that the instance forbids is off.
    """
    if instance.in_rounds and rules.in_rounds is not None:
        rules = rules.in_rounds
    if rules.wide is not None and interval_ratio(instance) < rules.wide_below:
        rules = rules.wide
    mode: EvictMode = "restart" if instance.in_rounds else rules.evict_mode
    hybrid = rules.hybrid and instance.hybrid_batching is not False
    chunked = rules.chunked and instance.chunked_prefill is not False
    return rules, mode, hybrid, chunked


def _simulate_rules(
    instance: Instance, rules: Rules, cost: CostModel, name: str, seed: int, problem: Instance
) -> Schedule:
    from optsched.judge.life import UNLIMITED
    from optsched.policies.engine import rules as engine

    rules, mode, hybrid, chunked = effective(rules, instance)
    predicted, _ = estimates(instance, rules.lengths, rules.margin)
    second = estimates(instance, "upper", rules.margin)[0] if rules.promote else predicted
    arrival = instance.release
    by_arrival = np.lexsort((np.arange(instance.n), arrival))
    limits = instance.limits
    found = engine.run(
        arrival,
        instance.prompt_tokens,
        instance.output_tokens,
        predicted,
        second,
        instance.kv_capacity,
        instance.kv_offset,
        limits.max_batch_tokens or UNLIMITED,
        limits.max_prefill_tokens or UNLIMITED,
        min(limits.max_running or UNLIMITED, rules.max_running or UNLIMITED),
        cost.array,
        instance.clock_origin,
        by_arrival,
        waiting_rank(rules.running_order, instance, predicted, cost),
        waiting_rank(rules.order, instance, predicted, cost),
        rules.requeue == "back",
        rules.ties == "random",
        rules.order == "output",
        np.array([engine.GROUPS[g] for g in rules.groups], dtype=np.int64),
        engine.ADMISSIONS[rules.admission],
        (1.0 - rules.alpha) * instance.kv_capacity,
        engine.OVERFLOWS[rules.overflow],
        rules.beta,
        rules.promote,
        rules.make_room,
        hybrid,
        chunked,
        rules.max_batch_tokens or UNLIMITED,
        rules.max_prefill_tokens or UNLIMITED,
        mode == "restart",
        np.random.default_rng(seed),
    )
    return _schedule_of(found, problem, name, mode, cost, chunked)


def _schedule_of(
    found: Any,
    instance: Instance,
    name: str,
    mode: EvictMode,
    cost: CostModel,
    chunked: bool,
    worker: NDArray[np.int64] | None = None,
) -> Schedule:
    """Return the schedule that a compiled loop made, or raise why it made none."""
    from optsched.policies.engine.common import DONE, LOOP, STALLED, STUCK

    outcome, about, size, batches, now = (v for v in found[:5])
    offsets, request, tokens, evicted_offsets, evicted, start, late = found[5:]
    if instance.in_rounds:
        start = instance.at(start)
    if outcome != DONE:
        reason = {
            STUCK: "nothing runs and it can never be admitted",
            LOOP: "the running requests were cleared twice in the same state",
            STALLED: "no request completed for too long",
        }[int(outcome)]
        if outcome == STUCK and not chunked:
            for limit, value in instance.limits.as_dict().items():
                if limit != "max_running" and size > value:
                    reason = f"its input of {size} tokens exceeds {limit} {value}, and is not split"
        raise _loop(instance, name, int(about), int(batches), float(now), reason)
    return from_batches(
        offsets,
        request,
        tokens,
        instance=instance,
        evicted_offsets=evicted_offsets,
        evicted=evicted,
        start=start if late else None,
        worker=worker,
        evict_mode=mode,
        cost_model_sha256=cost.sha256,
    )


def _simulate_windows(
    instance: Instance, rules: Windows, cost: CostModel, name: str, problem: Instance
) -> Schedule:
    from optsched.judge.life import UNLIMITED
    from optsched.policies.engine import windows

    mode: EvictMode = "restart" if instance.in_rounds else "recompute"
    forecast = forecast_of(instance)
    predicted, _ = estimates(instance)
    limits = instance.limits
    found = windows.run(
        instance.release,
        instance.prompt_tokens,
        instance.output_tokens,
        forecast.every,
        forecast.offsets,
        forecast.remaining,
        predicted,
        instance.kv_capacity,
        instance.kv_offset,
        limits.max_batch_tokens or UNLIMITED,
        limits.max_prefill_tokens or UNLIMITED,
        limits.max_running or UNLIMITED,
        cost.array,
        waiting_rank("arrival", instance, predicted, cost),
        windows.ORDERS[rules.order],
        rules.window,
        rules.batch_size,
        rules.workers,
        float(rules.aging),
        mode == "restart",
        MAX_STALLED_BATCHES,
    )
    worker = found[-1] if rules.workers > 1 else None
    return _schedule_of(found[:-1], problem, name, mode, cost, False, worker)


def _loop(
    instance: Instance, name: str, request: int, batch: int, now: float, reason: str
) -> LoopError:
    where = f"batch {batch} at {now + instance.first_arrival:.6g} {instance.time_unit}s"
    about = f", request {request}" if request >= 0 else ""
    return LoopError(f"policy {name!r}: endless loop at {where}{about}: {reason}")


def _simulate_open(
    instance: Instance, policy: Policy, cost: CostModel, name: str, seed: int, problem: Instance
) -> Schedule:
    """Ask a policy object before every batch; the twin of the compiled engine's loop."""
    n = instance.n
    mode = _evict_mode(policy, name)
    if instance.in_rounds:
        mode = "restart"
    predicted, _ = estimates(instance)
    arrival = instance.release
    first, origin = instance.first_arrival, instance.clock_origin
    by_arrival = np.lexsort((np.arange(n), arrival)).tolist()
    place = waiting_rank("arrival", instance, predicted, cost)
    shown_arrival = np.full(n, -1.0)
    shown_prompt = np.full(n, -1, dtype=np.int64)
    shown_predicted = np.full(n, -1, dtype=np.int64)
    shown_remaining = np.full(n, -1.0)
    forecast = forecast_of(instance)
    seen = np.zeros(n, dtype=np.int64)  # most tokens that each request has ever produced
    generated = np.zeros(n, dtype=np.int64)
    cached = np.zeros(n, dtype=np.int64)
    decoding = np.zeros(n, dtype=np.bool_)
    waiting: list[int] = []
    running: list[int] = []
    generator = np.random.default_rng(seed)
    shown_lower = shown_upper = None
    if instance.predicted_lower is not None:
        shown_lower, shown_upper = np.full((2, n), -1, dtype=np.int64)
    columns: tuple[NDArray[Any] | None, ...] = (
        shown_arrival,
        shown_prompt,
        shown_predicted,
        shown_remaining,
        generated,
        cached,
        decoding,
        shown_lower,
        shown_upper,
    )
    public: list[Any] = [None if column is None else column.view() for column in columns]
    for column in public:
        if column is not None:
            column.setflags(write=False)

    offsets, evicted_offsets = [0], [0]
    request: list[int] = []
    tokens: list[int] = []
    evicted: list[int] = []
    start: list[float] = []
    now = end = 0.0
    done = arrived = since = 0
    off_default = False
    longest = int(instance.output_tokens.max())
    while done < n:
        while arrived < n and arrival[by_arrival[arrived]] <= now:
            i = by_arrival[arrived]
            shown_arrival[i] = first + arrival[i]
            shown_prompt[i] = instance.prompt_tokens[i]
            shown_predicted[i] = predicted[i]
            shown_remaining[i] = forecast.left(i, 0, 0)
            if shown_lower is not None and shown_upper is not None:
                assert instance.predicted_lower is not None
                assert instance.predicted_upper is not None
                shown_lower[i] = instance.predicted_lower[i]
                shown_upper[i] = instance.predicted_upper[i]
            waiting.append(i)
            arrived += 1
        if not running and not waiting:
            now = float(arrival[by_arrival[arrived]])
            continue
        view = View(
            now=first + now,
            waiting=list(waiting),
            running=list(running),
            arrival=public[0],
            prompt_tokens=public[1],
            predicted=public[2],
            remaining=public[3],
            generated=public[4],
            cached=public[5],
            decoding=public[6],
            kv_capacity=instance.kv_capacity,
            kv_offset=instance.kv_offset,
            limits=instance.limits,
            hybrid=instance.hybrid_batching is not False,
            chunked=instance.chunked_prefill is not False,
            evict_mode=mode,
            generator=generator,
            cost=cost,
            predicted_lower=public[7],
            predicted_upper=public[8],
        )
        batch = _ask(policy, view, name, len(offsets) - 1)
        _check(batch, running, waiting, name, len(offsets) - 1)
        for i in batch.evict:
            running.remove(i)
            waiting.append(i)
            evicted.append(i)
            cached[i] = 0
            decoding[i] = False
            if mode == "restart":
                generated[i] = 0
                shown_remaining[i] = forecast.left(i, seen[i], 0)
        since += 1
        if since > MAX_STALLED_BATCHES + longest:
            about = (running or waiting)[0]
            reason = "no request completed for too long"
            raise _loop(instance, name, about, len(offsets) - 1, now, reason)
        if not batch.tokens:
            if batch.stall:
                sums = EMPTY
                for i in running:
                    sums = add_decode(sums, int(cached[i]))
                now += batch_time(cost.array, sums)
            elif batch.evict:
                continue  # asked again at once: what it evicted precedes its next batch
            elif arrived < n:
                now = float(arrival[by_arrival[arrived]])
            else:
                about = (waiting or running)[0]
                reason = "nothing runs and it can never be admitted"
                raise _loop(instance, name, about, len(offsets) - 1, now, reason)
            continue
        latest = max(arrival[i] for i in batch.tokens)
        written = origin + now
        now = read_start(written, max(end, latest), origin)
        off_default = off_default or now != max(end, latest)
        start.append(written)
        sums = _sums(batch.tokens, decoding, cached)
        request.extend(batch.tokens.keys())
        tokens.extend(batch.tokens.values())
        offsets.append(len(request))
        evicted_offsets.append(len(evicted))
        end = now = now + batch_time(cost.array, sums)
        for i, c in batch.tokens.items():
            if cached[i] == 0:
                waiting.remove(i)
                running.append(i)
            cached[i] += c
            if cached[i] == instance.prompt_tokens[i] + generated[i]:
                decoding[i] = True
                generated[i] += 1
                if generated[i] == instance.output_tokens[i]:
                    running.remove(i)
                    done += 1
                    since = 0
                    continue
                seen[i] = max(seen[i], generated[i])
                shown_remaining[i] = forecast.left(i, seen[i], generated[i])
        running.sort(key=place.__getitem__)
    return from_batches(
        offsets,
        request,
        tokens,
        instance=problem,
        evicted_offsets=evicted_offsets,
        evicted=evicted,
        start=None if not off_default else instance.at(start) if instance.in_rounds else start,
        evict_mode=mode,
        cost_model_sha256=cost.sha256,
    )


def _evict_mode(policy: Policy, name: str) -> EvictMode:
    mode: EvictMode = getattr(policy, "evict_mode", "recompute")
    if mode not in ("restart", "recompute"):
        raise InputError(f"policy {name!r}: evict_mode {mode!r}; restart or recompute is right")
    return mode


def _ask(policy: Policy, view: View, name: str, batch: int) -> Batch:
    try:
        answer = policy.batch(view)
    except PolicyError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {name!r}: batch {batch}: raised {error!r}") from error
    if not isinstance(answer, Batch):
        raise PolicyError(f"policy {name!r}: batch {batch}: answered {answer!r}; a Batch is right")
    return answer


def _check(
    batch: Batch, running: Sequence[int], waiting: Sequence[int], name: str, number: int
) -> None:
    """Refuse answers about requests that are not there; the judge checks all the rest."""
    where = f"policy {name!r}: batch {number}"
    here = set(running)
    for i in batch.evict:
        if i not in here:
            raise PolicyError(f"{where}: request {i!r} is evicted, but holds no KV")
        here.remove(i)
    here.update(waiting, running)
    for i, c in batch.tokens.items():
        if i not in here:
            raise PolicyError(f"{where}: request {i!r} has not arrived, is done, or is unknown")
        if isinstance(c, bool) or not isinstance(c, (int, np.integer)) or c < 1:
            raise PolicyError(f"{where}: request {i}: {c!r} tokens; an integer >= 1 is right")


def _sums(tokens: Mapping[int, int], decoding: NDArray[Any], cached: NDArray[Any]) -> Sums:
    """Return what a batch holds, from the tokens that each of its requests processes."""
    sums = EMPTY
    for i, c in tokens.items():
        m = int(cached[i])
        sums = add_decode(sums, m) if decoding[i] else add_prefill(sums, int(c), m)
    return sums
