"""Judges a schedule of starts in closed form: uninterrupted runs in rounds."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.machine import Machine
from optsched.judge.evaluation import Clock, Evaluation
from optsched.problem.errors import InputError, ViolationError
from optsched.problem.instance import Instance


def judge_starts(
    instance: Instance, starts: NDArray[np.int64], machines: tuple[Machine, ...]
) -> Evaluation:
    """Judge uninterrupted runs in O(n log n), however far apart the arrivals are.

    Every running request gains a token per round, so KV rises between two completions and is
    largest at a completion. Tokens per round are largest where a prefill starts. The events are the
    starts and completions in order, and arrays by interval have one entry from each to the next.
    """
    if len(machines) > 1:
        raise InputError(
            f"machines: found {len(machines)} for a schedule of starts; expected one, since such a "
            "schedule is on one worker"
        )

    released, first = _check_starts(instance, starts), int(instance.first_arrival)
    prompt, output = instance.prompt_tokens, instance.output_tokens
    starts = starts - first  # as all times below count from the first arrival
    finish = starts + output
    events = np.unique(np.concatenate([starts, finish]))
    rank_start, rank_finish = np.searchsorted(events, starts), np.searchsorted(events, finish)
    begin, end = events[:-1], events[1:]

    def at_events(*changes: tuple[NDArray[np.int64], Any]) -> NDArray[np.int64]:
        """Return the sum of changes at each event but the last, after which nothing runs."""
        total = np.zeros(len(events), dtype=np.int64)
        for place, values in changes:
            np.add.at(total, place, values)

        return total[:-1]

    # After the events up to time t, running requests hold sum(s - k) + (t + offset - 1) * count
    # while they produce a token in round t: a start at k, of prompt s and output o, adds s - k to
    # `base` and 1 to `count` for all rounds in (k, k + o].
    count = np.cumsum(at_events((rank_start, 1), (rank_finish, -1)))
    base = np.cumsum(at_events((rank_start, prompt - starts), (rank_finish, starts - prompt)))
    kv_end = (base + (end + instance.kv_offset - 1) * count).astype(np.int64)
    volume = int(instance.volume.sum())
    if not instance.kv_by_token:
        kv_end, volume = _kv_held(instance, starts, end), _kv_volume(instance)

    # By interval, the requests that start with it, and their prompt tokens.
    new, prefill = at_events((rank_start, 1)), at_events((rank_start, prompt))
    # Within an interval KV is largest in the last round, and everything else in the first.
    first_round, last = begin + first + 1, end + first
    limits = machines[0].limits_on(instance)
    mixed = np.where(count > new, new, 0)  # prefills beside decodes
    hybrid = 0 if instance.hybrid_batching is False else None
    checks = (
        ("kv_capacity", "KV tokens", last, kv_end, machines[0].capacity),
        ("max_running", "running requests", first_round, count, limits.max_running),
        ("max_batch_tokens", "tokens", first_round, prefill + count - new, limits.max_batch_tokens),
        ("max_prefill_tokens", "prefill tokens", first_round, prefill, limits.max_prefill_tokens),
        ("hybrid_batching", "prefills", first_round, mixed, hybrid),
    )

    for rule, what, when, values, limit in checks:
        if limit is None or not (values > limit).any():
            continue

        j = int(np.argmax(values > limit))
        value = int(values[j])
        text = f"found {value} {what}; expected at most {rule} {limit}"
        if rule == "kv_capacity":
            text = text.replace("found", "running requests hold")
        if rule == "hybrid_batching":
            text = f"found {value} prefills beside {count[j] - value} decodes; expected one kind, "
            text += "since hybrid batching is forbidden"

        raise ViolationError(
            f"round {when[j]}: {text}", rule=rule, batch=int(when[j]), value=value, limit=limit
        )

    busy = count > 0  # intervals in which something runs
    rounds = int((end - begin)[busy].sum())
    zeros = np.zeros(instance.n, dtype=np.int64)
    return Evaluation(
        instance=instance,
        kind="starts",
        clock=Clock(released, starts, starts + 1, finish, begin[busy], end[busy]),
        served=output,
        evictions=zeros,
        pauses=zeros,
        batch_kv=kv_end[busy],
        workers=1,
        machines=machines,
        mean_kv=float(volume / rounds),
        busy_batches=rounds,
        gap=np.where(output > 1, 1.0, np.nan),
    )


def _check_starts(instance: Instance, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Check that each request has a start from which it may run.

    Return the releases, since the first arrival.
    """
    if not instance.in_rounds:
        raise InputError(
            "schedule.kind: found 'starts' for an instance in seconds; expected 'batches'"
        )

    if len(starts) != instance.n:
        raise InputError(
            f"schedule.starts: found {len(starts)} values; expected {instance.n}, one per request"
        )

    # In sessions a release follows from the ends of the requests before it.
    release = instance.releases(starts + instance.output_tokens)
    early = starts < release
    if early.any():
        i = int(np.argmax(early))
        raise ViolationError(
            f"request {i}: starts in round {starts[i]}, before its arrival {release[i]}",
            rule="arrival",
            request=i,
            value=int(starts[i]),
            limit=int(release[i]),
        )

    # No sum in `judge_starts` exceeds n times the last completion, prompts included.
    prompt, output = instance.prompt_tokens, instance.output_tokens
    first = int(instance.first_arrival)
    last = int(starts.max()) - first + int((prompt + output).max())
    if instance.n * last >= 2**63 or int(starts.max()) + int(output.max()) >= 2**63:
        i = int(np.argmax(starts))
        raise InputError(
            f"schedule.starts: request {i}: found round {starts[i]}; expected an earlier start, "
            f"since {instance.n} completions that late may exceed 64-bit sums"
        )

    return np.asarray(release - first)


def _kv_held(
    instance: Instance, starts: NDArray[np.int64], rounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the KV that runs from ``starts`` on hold in some rounds, in blocks and windows."""
    held = np.zeros(len(rounds), dtype=np.int64)
    for j, t in enumerate(rounds):
        # A run from k on is processed in rounds k + 1 to k + o, and has cached its prompt and one
        # token for each round but the first.
        running = (starts < t) & (t <= starts + instance.output_tokens)
        cached = instance.prompt_tokens[running] + (t - starts[running]) - 1
        held[j] = instance.kv_of(cached).sum()

    return held


def _kv_volume(instance: Instance) -> int:
    """Return the KV that uninterrupted runs hold, in blocks and windows, summed over rounds."""
    # In its rounds a run has s, s + 1, ..., s + o - 1 tokens cached.
    runs = zip(instance.prompt_tokens.tolist(), instance.output_tokens.tolist(), strict=True)
    return sum(int(instance.kv_of(np.arange(s, s + o)).sum()) for s, o in runs)
