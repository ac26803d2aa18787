"""Exhaustive search over start times, in plain Python: shares no code with the package."""

from __future__ import annotations

from collections.abc import Iterator

OBJECTIVES = ("tel", "makespan")


def brute_force_tel(instance) -> tuple[int, list[int]]:
    """Return the least total latency of an instance in rounds and starts that reach it."""
    return brute_force(instance, "tel")


def brute_force(instance, objective: str) -> tuple[int, list[int]]:
    """Return the least value of an objective of `OBJECTIVES` and starts that reach it.

    Every start of every request from its arrival up to max(arrival) + sum(outputs) is tried, in
    order of index, dropping a partial choice once a round breaks a rule or the value so far (for
    the total latency with the outputs still to come) reaches the best known.
    """
    arrival = [int(v) for v in instance.arrival]
    prompt = [int(v) for v in instance.prompt_tokens]
    output = [int(v) for v in instance.output_tokens]
    newest = 1 if instance.kv_accounting == "generated" else 0
    limits = instance.limits
    n = len(arrival)
    end = max(arrival) + sum(output)
    kv = [0] * (end + 2)
    running = [0] * (end + 2)
    decodes = [0] * (end + 2)
    prefills = [0] * (end + 2)
    prefill_tokens = [0] * (end + 2)
    starts = [0] * n
    best: list = [sum(output) * n + sum(end - a for a in arrival) + max(arrival) + 1, []]

    def value(i: int, start: int, so_far: int) -> int:
        """Return the objective of requests 0..i, of which the last starts now."""
        if objective == "tel":
            return so_far + start + output[i] - arrival[i]
        return max(so_far, start + output[i])  # the makespan

    def change(i: int, start: int, sign: int) -> None:
        for j in range(1, output[i] + 1):
            t = start + j
            kv[t] += sign * (prompt[i] + j - 1 + newest)
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

    def choices(i: int, so_far: int) -> Iterator[int]:
        to_come = sum(output[i + 1 :]) if objective == "tel" else 0
        for start in range(arrival[i], end - output[i] + 1):
            if value(i, start, so_far) + to_come >= best[0]:
                return
            yield start

    def search(i: int, so_far: int) -> None:
        if i == n:
            best[0], best[1] = so_far, starts[:]
            return
        for start in choices(i, so_far):
            change(i, start, 1)
            if allowed(i, start):
                starts[i] = start
                search(i + 1, value(i, start, so_far))
            change(i, start, -1)

    search(0, 0)
    return best[0], best[1]
