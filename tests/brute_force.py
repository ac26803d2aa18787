"""Exhaustive search over start times, in plain Python: shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import add
from typing import Any

OBJECTIVES: dict[str, tuple[Callable[[int, int, int], Any], Callable[[Any, Any], Any]]] = {
    "tel": (lambda arrival, output, start: start + output - arrival, add),
    "makespan": (lambda arrival, output, start: start + output, max),
    "mean_ttft": (lambda arrival, output, start: start + 1 - arrival, add),
    "mean_latency": (lambda arrival, output, start: start + output - arrival, add),
    "weighted_latency": (lambda arrival, output, start: start + output - arrival, add),
    "weighted_completion": (lambda arrival, output, start: start + output, add),
    "max_stretch": (lambda arrival, output, start: Fraction(start + output - arrival, output), max),
}
"""What a request counts that starts at a time, and how requests join. Means are sums until the end.

A further objective of this kind is one more line.
"""


def brute_force_tel(instance) -> tuple[float, list[int]]:
    """Return the least total latency of an instance in rounds and starts that reach it."""
    return brute_force(instance, "tel")


def brute_force(instance, objective: str) -> tuple[float, list[int]]:
    """Return the least value of an objective of `OBJECTIVES` and starts that reach it.

    Every start of every request from its arrival up to max(arrival) + sum(outputs) is tried, in
    order of index, dropping a partial choice once a round breaks a rule, or once the value so far
    joined with the least of the requests to come reaches the best known.
    """
    weighted = objective.startswith("weighted_")
    counted, joined = OBJECTIVES[objective]
    weight = [int(v) for v in instance.weight] if weighted else [1] * len(instance.arrival)
    arrival = [int(v) for v in instance.arrival]
    prompt = [int(v) for v in instance.prompt_tokens]
    output = [int(v) for v in instance.output_tokens]
    newest = 1 if instance.kv_accounting == "generated" else 0
    block, window = int(instance.kv_block_tokens), instance.kv_window
    limits = instance.limits
    n = len(arrival)
    end = max(arrival) + sum(output)
    kv = [0] * (end + 2)
    running = [0] * (end + 2)
    decodes = [0] * (end + 2)
    prefills = [0] * (end + 2)
    prefill_tokens = [0] * (end + 2)
    starts = [0] * n
    best: list = [math.inf, []]
    to_come = [0] * (n + 1)  # the least that requests i.. count
    for i in reversed(range(n)):
        to_come[i] = joined(to_come[i + 1], weight[i] * counted(arrival[i], output[i], arrival[i]))

    def held(tokens: int) -> int:
        if window is not None:
            last, sliding, layers = window
            full = (layers - sliding) * tokens
            tokens = math.ceil(Fraction(full + sliding * min(tokens, last), layers))
        return block * -(-tokens // block)

    def change(i: int, start: int, sign: int) -> None:
        for j in range(1, output[i] + 1):
            t = start + j
            kv[t] += sign * held(prompt[i] + j - 1 + newest)
            running[t] += sign
            if j == 1:
                prefills[t] += sign
                prefill_tokens[t] += sign * prompt[i]
            else:
                decodes[t] += sign

    def allowed(i: int, start: int) -> bool:
        for t in range(start + 1, start + output[i] + 1):
            if kv[t] > instance.kv_capacity:
                return False
            if limits.max_running is not None and running[t] > limits.max_running:
                return False
            tokens = decodes[t] + prefill_tokens[t]
            if limits.max_batch_tokens is not None and tokens > limits.max_batch_tokens:
                return False
            most = limits.max_prefill_tokens
            if most is not None and prefill_tokens[t] > most:
                return False
            if instance.hybrid_batching is False and prefills[t] and decodes[t]:
                return False
        return True

    def choices(i: int, so_far: int) -> Iterator[tuple[int, int]]:
        for start in range(arrival[i], end - output[i] + 1):
            value = joined(so_far, weight[i] * counted(arrival[i], output[i], start))
            if joined(value, to_come[i + 1]) >= best[0]:
                return
            yield start, value

    def search(i: int, so_far: int) -> None:
        if i == n:
            best[0], best[1] = so_far, starts[:]
            return
        for start, value in choices(i, so_far):
            change(i, start, 1)
            if allowed(i, start):
                starts[i] = start
                search(i + 1, value)
            change(i, start, -1)

    search(0, 0)
    least, found = best
    return least / n if objective.startswith("mean_") else least, found
